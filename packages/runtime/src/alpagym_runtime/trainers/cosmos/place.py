"""Where a worker of Cosmos-RL finds its run, and what it computes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from alpagym_runtime.run_config import RunConfig, load_run_config

RUN = "ALPAGYM_COSMOS_RUN"
"""The variable that names the run directory."""


def run_of(cosmos_config: Any = None) -> tuple[RunConfig, Path]:
    """The frozen config and the directory of the run that this process works for.

    Args:
        cosmos_config: Cosmos-RL's, which names the directory as well; None: the environment does.

    """
    named = (getattr(cosmos_config, "custom", None) or {}).get("alpagym", {}).get("run") or os.environ.get(RUN)
    if not named:
        raise RuntimeError(f"no run: {RUN} is not set; Cosmos-RL's workers are started by alpagym train trainer=cosmos")
    directory = Path(named)
    return load_run_config(directory), directory


def device_of(config: RunConfig) -> str:
    """Of this worker: the GPU that its launcher gave it, or the CPU with the stand-in for CUDA."""
    return "cpu" if config.cosmos.device == "cpu" else f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
