"""Options of the transports between processes; that of `memory` stands beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from alpagym_plugins import check_range

if TYPE_CHECKING:
    from alpagym_runtime.transport.disk import DiskTransport
    from alpagym_runtime.transport.shared_memory import SharedMemoryTransport


@dataclass
class DiskConfig:
    """Episodes pass through files on a filesystem that both ends see.

    Attributes:
        path: the folder; null takes `transport` in the run directory.
        limit_mb: room for what one sender sent and nobody discarded; beyond it the oldest is released.
        expire_s: age at which a file is released, also one whose sender is gone.

    """

    path: str | None = None
    limit_mb: int = 65_536
    expire_s: float = 21_600.0

    def __post_init__(self) -> None:
        check_range("limit_mb", self.limit_mb, minimum=1)
        check_range("expire_s", self.expire_s, above=0)

    def build(self, role: str, directory: Path) -> DiskTransport:
        """An end; any process may send, receive and discard."""
        from alpagym_runtime.transport.disk import DiskTransport

        return DiskTransport(Path(self.path) if self.path else directory / "transport", self)


@dataclass
class SharedMemoryConfig:
    """Episodes pass through the memory of one machine; a receiver maps them without a copy.

    Attributes:
        limit_mb: room for what one sender sent and nobody discarded; beyond it the oldest is released.
        expire_s: age at which one is released.

    """

    limit_mb: int = 8_192
    expire_s: float = 21_600.0

    def __post_init__(self) -> None:
        check_range("limit_mb", self.limit_mb, minimum=1)
        check_range("expire_s", self.expire_s, above=0)

    def build(self, role: str, directory: Path) -> SharedMemoryTransport:
        """An end; what dead owners left on this machine is freed first."""
        from alpagym_runtime.transport.shared_memory import SharedMemoryTransport

        return SharedMemoryTransport(self)
