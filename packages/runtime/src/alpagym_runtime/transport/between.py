"""Which transport a run's episodes take: what the config says, or what can do the same between processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alpagym_runtime.files import remove_partials
from alpagym_runtime.run_config import RunConfig
from alpagym_runtime.transport.config import DiskConfig, SharedMemoryConfig
from alpagym_runtime.transport.memory import MemoryConfig
from alpagym_runtime.types import Transport


def build_transport(config: RunConfig, role: str, directory: Path) -> Transport:
    """An end of a run's transport.

    `memory` is the memory of one process. Where workers drive it becomes that of the machine, and where they may be on
    other machines the run directory; its limits stay.

    Args:
        config: the run's.
        role: trainer | rollout.
        directory: the run's.

    """
    built: Transport = _chosen(config).build(role, directory)
    return built


def _chosen(config: RunConfig) -> Any:
    chosen = config.transport.config
    if config.trainer.type == "cosmos" and isinstance(chosen, MemoryConfig):
        # A rollout worker may end before the policy worker has read its last drives: they must outlive it.
        return DiskConfig(limit_mb=chosen.limit_mb, expire_s=chosen.expire_s)
    if config.has_workers and isinstance(chosen, MemoryConfig):
        kind = SharedMemoryConfig if config.deploy.kind == "local" else DiskConfig
        return kind(limit_mb=chosen.limit_mb, expire_s=chosen.expire_s)
    return chosen


def remove_leftovers(config: RunConfig, directory: Path) -> None:
    """Remove episodes that killed workers left in the run directory; none of a run's workers may be alive."""
    chosen = _chosen(config)
    if isinstance(chosen, DiskConfig) and chosen.path is None:
        folder = directory / "transport"
        remove_partials(folder)
        for path in folder.glob("disk-*.arrow"):
            path.unlink(missing_ok=True)
