"""One process of a team that torchrun starts: `torchrun --nproc-per-node N -m alpagym_host.launch.torchrun RUN_DIR`.

Rank 0 is the run as it always is: it holds the directory's lock, shows progress, writes. The others drive and train
their share and write nothing but episodes. A signal asks all of them to stop after the step in hand.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console

from alpagym_host.launch.local import Stop, launch, requeued
from alpagym_host.run_dir import command_of, open_existing
from alpagym_host.run_state import condition, read_state
from alpagym_plugins import ConfigError
from alpagym_runtime.run_config import RunConfig, load_run_config

if TYPE_CHECKING:
    from alpagym_runtime.trainers.team import Team


def command_line(processes: int, directory: Path) -> list[str]:
    """What starts a run on one machine in so many processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [*torchrun, "-m", "alpagym_host.launch.torchrun", str(directory)]


def launch_team(config: RunConfig, directory: Path, console: Console) -> int:
    """Run torchrun to its end, on to which signals are passed; its exit code, or 128 + the signal that stopped it."""
    child = subprocess.Popen(command_line(config.topology.processes, directory))
    asked: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        # Ctrl-C reaches the whole group by itself.
        # torchrun itself would die of SIGUSR1, before its processes have kept a checkpoint.
        if number != signal.SIGINT:
            child.send_signal(signal.SIGTERM)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code and asked and condition(directory, read_state(directory)) == "stopped":
        code = 128 + asked[0]  # torchrun's own code is 1, however its processes ended
    return requeued(config, directory, code, console)


def main() -> int:
    """Train in this process; the exit code."""
    if "RANK" not in os.environ or len(sys.argv) != 2:
        raise ConfigError("start it with torchrun: torchrun --nproc-per-node N -m alpagym_host.launch.torchrun RUN_DIR")
    directory = open_existing(Path(sys.argv[1]))
    config = load_run_config(directory)
    if (command := command_of(directory)) != "train":
        raise ConfigError(f"{directory} was made for {command}, which one process does: alpagym resume {directory}")
    from alpagym_runtime.trainers.team import Team

    return train_in_team(config, directory, Team.join(config.learner.device))


def train_in_team(config: RunConfig, directory: Path, team: Team) -> int:
    """Train as one process of a team that has met; the exit code."""
    from alpagym_runtime.trainers.run import Run

    if team.writes:
        code = launch(config, directory, "train", Console(), functools.partial(Run, team=team))
    else:
        stop = _quiet_stop()
        outcome = Run(config, directory, stop_requested=stop, team=team).train()
        code = 0 if outcome.completed else 128 + (stop.signal or signal.SIGTERM)
    # Not after an error: torchrun or srun ends the others, which may wait for this process somewhere else.
    team.leave()
    return code


def _quiet_stop() -> Stop:
    stop = Stop()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.signal = stop.signal or number

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, handle)
    return stop


def end_process(main: Callable[[], int]) -> NoReturn:
    """Leave with the code of `main`, without taking the interpreter down: all is closed and written by then.

    A thread of gloo's aborts an interpreter that takes itself down, now and then (2 of 10 runs, torch 2.11: "terminate
    called without an active exception").
    """
    from alpagym_host.cli import errors_as_messages

    with errors_as_messages():
        code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end_process(main)
