"""Options of the transports between processes; that of `memory` stands beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alpagym_plugins import Problem, check_choice, check_range

if TYPE_CHECKING:
    from alpagym_runtime.transport.disk import DiskTransport
    from alpagym_runtime.transport.nccl.ends import Receiver, Sender
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


@dataclass
class NcclConfig:
    """Episodes pass from rollout processes to the trainer through NCCL, or through gloo on a CPU.

    Attributes:
        backend: nccl (each process has a GPU of its own) | gloo.
        host: address that the trainer's end listens on; other than loopback it is open to all, without a password.
        port: of the store, and the next one is listened on too; 0 takes free ones. They stand in the run directory.
        in_flight: episodes of one sender that are sent and not taken by the trainer; the next one waits.
        timeout_s: longest wait for the other end, wherever one waits.
        copy_threads: that copy into pinned memory what of an episode is not in it.
        pinned_mb: pinned memory that episodes may hold, at each end; those beyond it are copied.
        limit_mb: room for episodes at the trainer. The oldest that was received and not discarded is released for a
            new one; for those that nobody received yet a sender waits.
        expire_s: age at which one is released.

    """

    backend: str = "nccl"
    host: str = "127.0.0.1"
    port: int = 0
    in_flight: int = 8
    timeout_s: float = 30.0
    copy_threads: int = 4
    pinned_mb: int = 4_096
    limit_mb: int = 32_768
    expire_s: float = 21_600.0

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, ("nccl", "gloo"))
        check_range("port", self.port, minimum=0, maximum=65_534)
        check_range("in_flight", self.in_flight, minimum=1, maximum=1024)
        check_range("timeout_s", self.timeout_s, above=0, maximum=86_400)
        check_range("copy_threads", self.copy_threads, minimum=1, maximum=64)
        check_range("pinned_mb", self.pinned_mb, minimum=0)
        check_range("limit_mb", self.limit_mb, minimum=1)
        check_range("expire_s", self.expire_s, above=0)

    def preflight(self, config: Any, machine: Any) -> Iterator[Problem]:
        """Whether there are two processes."""
        if not config.has_workers:
            yield Problem(
                ".type",
                "nccl",
                "carries episodes from rollout processes to the trainer, and this run has one process for both",
                "rollout.workers=2, or transport=memory",
            )
        elif self.backend == "nccl" and config.deploy.kind == "local" and len(machine.gpus) < 2:
            yield Problem(
                ".backend",
                self.backend,
                f"the trainer and its workers need GPUs of their own: {machine.gpus_text}",
                "transport.backend=gloo, or transport=shared_memory",
            )

    def build(self, role: str, directory: Path) -> Receiver | Sender:
        """The trainer's end, or a rollout process's for every other role."""
        from alpagym_runtime.transport.nccl.ends import Receiver, Sender

        return (Receiver if role == "trainer" else Sender)(directory / "transport", self)
