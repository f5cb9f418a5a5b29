"""The transport of one process: a dictionary. Nothing is copied, nothing outlives the process."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from alpagym_plugins import check_range

if TYPE_CHECKING:
    from alpagym_runtime.types import Episode


@dataclass
class MemoryConfig:
    """Episodes stay in the memory of the process that makes and trains on them.

    Attributes:
        limit_mb: room for episodes that are sent and not discarded; beyond it the oldest is released.
        expire_s: age at which one is released.

    """

    limit_mb: int = 32_768
    expire_s: float = 21_600.0

    def __post_init__(self) -> None:
        check_range("limit_mb", self.limit_mb, minimum=1)
        check_range("expire_s", self.expire_s, above=0)

    def build(self, role: str, directory: Path) -> MemoryTransport:
        """An empty transport; `role` and `directory` matter to transports between processes."""
        return MemoryTransport(self)


class MemoryTransport:
    """See `types.Transport`; safe to use from several threads."""

    def __init__(self, config: MemoryConfig | None = None) -> None:
        from alpagym_runtime.transport.rules import Ledger

        config = config or MemoryConfig()
        self._episodes: dict[str, Episode] = {}
        self._numbers = itertools.count()
        self._lock = Lock()
        self._ledger = Ledger(config.limit_mb * 1_000_000, config.expire_s)

    def send(self, episode: Episode) -> str:
        """Keep an episode until it is discarded; its handle is new even if an equal one was sent before."""
        from alpagym_runtime.episodes.format import episode_bytes

        with self._lock:
            handle = f"memory-{next(self._numbers)}"
            self._episodes[handle] = episode
            for old in self._ledger.add(handle, episode_bytes(episode)):
                self._episodes.pop(old, None)
            return handle

    def receive(self, handle: str) -> Episode:
        """The episode that was sent, the same object.

        Raises:
            KeyError: it was discarded, released by rule, or never sent.

        """
        with self._lock:
            if handle not in self._episodes:
                raise self._ledger.missing(handle)
            return self._episodes[handle]

    def discard(self, handle: str) -> None:
        """Free it; an unknown handle is fine."""
        with self._lock:
            self._episodes.pop(handle, None)
            self._ledger.remove(handle)

    def close(self) -> None:
        """Free everything."""
        with self._lock:
            for handle in self._ledger.handles():
                self._ledger.remove(handle)
            self._episodes.clear()
