"""What starts a Cosmos-RL job on a machine, and in which environment."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from alpagym_runtime.children import identify
from alpagym_runtime.run_config import RunConfig
from alpagym_runtime.trainers.cosmos.config import is_spread
from alpagym_runtime.trainers.cosmos.double import MAIL
from alpagym_runtime.trainers.cosmos.housekeeping import EVERYWHERE, owner_variables
from alpagym_runtime.trainers.cosmos.place import RUN
from alpagym_runtime.trainers.cosmos.tables import FOLDER

MODULE = "alpagym_runtime.trainers.cosmos"
TOML = "config.toml"


def launch_command(config: RunConfig, directory: Path, node: Sequence[str] = (), logs: str = "logs") -> list[str]:
    """What starts a job, or one node's part of it.

    Args:
        config: the run's.
        directory: the run's.
        node: options that say which node of several this is.
        logs: folder of its workers' logs, below FOLDER.

    """
    cosmos, folder = config.cosmos, directory.absolute() / FOLDER
    return [
        *(sys.executable, "-m", f"{MODULE}.launcher"),
        *("--config", str(folder / TOML)),
        *("--policy", str(cosmos.policy.parallelism.n_init_replicas)),
        *("--rollout", str(cosmos.rollout.parallelism.n_init_replicas)),
        *("--log-dir", str(folder / logs)),
        *(node or ("--port", str(cosmos.controller_port))),
        f"{MODULE}.entry",
    ]


def environment(config: RunConfig, directory: Path, start: int = 1, first: bool = True) -> dict[str, str]:
    """The environment of a job's processes, which work for this one.

    Args:
        config: the run's.
        directory: the run's.
        start: which start of the job this is, of several nodes.
        first: whether this is the first node.

    """
    cosmos, folder = config.cosmos, directory.absolute() / FOLDER
    me = identify(os.getpid())
    assert me is not None
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    # Cosmos-RL's scripts call `python`; without this it may be another one, or none.
    _program(tools / "python", f'exec "{sys.executable}" "$@"')
    extra = {
        RUN: str(directory.absolute()),
        "PATH": f"{tools}:{os.environ.get('PATH', '')}",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "COSMOS_CACHE_DIR": str(folder / "cache"),
        "PYTHONUNBUFFERED": "1",
        **owner_variables(me, start if is_spread(config) else None),
    }
    if is_spread(config):
        extra[EVERYWHERE] = "1"
    if cosmos.device == "cpu":
        count = sum(cosmos.gpus.values())
        if is_spread(config):
            count = config.topology.gpus_per_node
        shown = next(n for n in (1, 2, 4, 8, count) if n >= count)
        _program(tools / "nvidia-smi", f'for i in $(seq 0 {shown - 1}); do echo "GPU $i: stand-in"; done')
        mail = folder / "mail"
        if first:
            shutil.rmtree(mail, ignore_errors=True)
            mail.mkdir()
        extra |= {MAIL: str(mail), "OMP_NUM_THREADS": str(config.run.torch_threads)}
    else:
        (tools / "nvidia-smi").unlink(missing_ok=True)
        extra["NCCL_NVLS_ENABLE"] = os.environ.get("NCCL_NVLS_ENABLE", "0")
    return {**os.environ, **extra}


def _program(path: Path, command: str) -> None:
    """Write a script, whole for whoever runs it meanwhile on another node."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    temporary.write_text(f"#!/bin/sh\n{command}\n")
    temporary.chmod(temporary.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    temporary.replace(path)
