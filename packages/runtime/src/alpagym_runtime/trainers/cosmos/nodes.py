"""The further nodes of a job: each runs Cosmos-RL's launcher for its own GPUs, as the first node tells it.

What they are told lies in the run directory, `cosmos/nodes.json`. The first node writes it at each start of the job,
and says in it when the job is down and when the run is over. The password of the job's Redis is not in it: each node
derives it from what the Slurm job's script has made, and from the number of the start. A node whose launcher fails says
so as a worker does, and the first node ends the job, or starts it again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from alpagym_runtime.children import Child, Children
from alpagym_runtime.files import write_json
from alpagym_runtime.run_config import RunConfig
from alpagym_runtime.trainers.cosmos.commands import environment, launch_command
from alpagym_runtime.trainers.cosmos.journal import Presence
from alpagym_runtime.trainers.cosmos.tables import FOLDER

FILE = "nodes.json"
"""Below FOLDER."""
RUNS, DOWN, OVER = "runs", "down", "over"
_LOOK_S = 0.5
_GRACE_S = 20.0


@dataclass(frozen=True)
class Call:
    """What the first node tells the others.

    Attributes:
        start: which start of the Slurm job this is; what another start has left is nobody's.
        number: which start of Cosmos-RL's job within it, from 1.
        state: RUNS | DOWN | OVER.
        controller: HOST:PORT of Cosmos-RL's controller.

    """

    start: str
    number: int
    state: str
    controller: str = ""


def job_start() -> str:
    """Which start of which Slurm job this process is part of."""
    return f"{os.environ.get('SLURM_JOB_ID', '')}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"


def call(directory: Path, told: Call) -> None:
    """Tell the other nodes."""
    (directory / FOLDER).mkdir(exist_ok=True)
    write_json(directory / FOLDER / FILE, asdict(told))


def called(directory: Path) -> Call | None:
    """What was told last; None where nothing was, or not to the end."""
    try:
        return Call(**json.loads((directory / FOLDER / FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def first_options(config: RunConfig) -> list[str]:
    """Options of the launcher on the first node of several."""
    nodes = ("--num-workers", str(config.topology.train_nodes), "--worker-idx", "0")
    return ["--port", str(config.cosmos.controller_port), *nodes]


def other_options(config: RunConfig, controller: str, index: int) -> list[str]:
    """Options of the launcher on node `index`, from 1."""
    return ["--url", controller, "--num-workers", str(config.topology.train_nodes), "--worker-idx", str(index)]


def take_part(
    config: RunConfig,
    directory: Path,
    index: int,
    program: Sequence[str] | None = None,
) -> int:
    """Work for the job on node `index` until the first node says that the run is over; the exit code.

    Args:
        config: the run's.
        directory: the run's.
        index: of this node, from 1.
        program: in place of Cosmos-RL's launcher.

    """
    number, start = 0, job_start()
    children: Children | None = None
    launcher: Child | None = None
    try:
        while True:
            told = called(directory)
            if told is None or told.start != start:
                time.sleep(_LOOK_S)
                continue
            if children is not None and (told.state != RUNS or told.number != number):
                # The first node's end is the job's: workers here come to theirs at the same time.
                _wait(children, launcher, _GRACE_S if told.state == OVER else 0.0)
                children.close(1.0)
                children = launcher = None
            if told.state == OVER:
                return 0
            if told.state == RUNS and told.number != number:
                number, children = told.number, Children()
                options = other_options(config, told.controller, index)
                argv = program or launch_command(config, directory, options, logs=f"logs-{index}")
                surroundings = environment(config, directory, told.number, first=False)
                log = directory / FOLDER / f"launcher-{index}.log"
                launcher = children.start("cosmos", argv, log=log, environment=surroundings)
            elif launcher is not None and launcher.code not in (None, 0):
                if called(directory) == told:  # else it ended because the job is down
                    why = f"Cosmos-RL's launcher on node {index} ended with code {launcher.code}; see {launcher.log}"
                    Presence(directory, "node").failed(why)
                launcher = None
            time.sleep(_LOOK_S)
    finally:
        if children is not None:
            children.close(1.0)


def _wait(children: Children, launcher: Child | None, limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while launcher is not None and launcher.code is None and time.monotonic() < end_s:
        children.ended(_LOOK_S)
