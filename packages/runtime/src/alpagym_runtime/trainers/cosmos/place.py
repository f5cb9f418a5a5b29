"""Where a worker of Cosmos-RL finds its run, what it computes on, and its end of the transport."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from alpagym_runtime.run_config import RunConfig, load_run_config
from alpagym_runtime.trainers.cosmos.config import episodes_under_way
from alpagym_runtime.transport.between import build_transport
from alpagym_runtime.transport.config import NcclConfig
from alpagym_runtime.transport.memory import MemoryConfig
from alpagym_runtime.types import Transport

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


def transport_of(config: RunConfig, directory: Path, role: str) -> Transport:
    """A worker's end of the run's transport.

    One colocated replica trains on what it drove itself: its episodes stay in the memory of its process.

    Args:
        config: the run's.
        directory: the run's.
        role: as Cosmos-RL calls it: Controller (which only passes handles on) | Policy | Rollout.

    """
    chosen = config.transport.config
    if role == "Controller":
        return MemoryConfig().build("trainer", directory)
    if isinstance(chosen, MemoryConfig) and _one_process(config):
        return chosen.build("trainer", directory)
    if isinstance(chosen, NcclConfig):
        # Cosmos-RL hands handles over a step at a time, and bounds itself what is under way.
        whole = replace(chosen, in_flight=max(chosen.in_flight, episodes_under_way(config)))
        return whole.build("trainer" if role == "Policy" else "rollout", directory)
    return build_transport(config, "trainer", directory)


def _one_process(config: RunConfig) -> bool:
    return config.cosmos.mode == "colocated" and config.cosmos.policy.parallelism.gpus == 1
