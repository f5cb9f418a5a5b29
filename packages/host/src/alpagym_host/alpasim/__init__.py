"""NVIDIA's AlpaSim, as the control plane starts it: checkout, scenes, the command line of its launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alpagym_runtime.run_config import RunConfig


def starts_alpasim(config: RunConfig) -> bool:
    """Whether a run brings an AlpaSim of its own up: on this machine, or on nodes of its Slurm job."""
    simulator = config.simulator
    return simulator.type == "alpasim" and not simulator.config.addresses and config.deploy.kind in ("local", "slurm")
