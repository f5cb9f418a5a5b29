"""The transport of one process: a dictionary. Nothing is copied, nothing outlives the process."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alpagym_runtime.types import Episode


@dataclass
class MemoryConfig:
    """Episodes stay in the memory of the process that makes and trains on them."""

    def build(self, role: str, directory: Path) -> MemoryTransport:
        """An empty transport; `role` and `directory` matter to transports between processes."""
        return MemoryTransport()


class MemoryTransport:
    """See `types.Transport`; safe to use from several threads."""

    def __init__(self) -> None:
        self._episodes: dict[str, Episode] = {}
        self._numbers = itertools.count()
        self._lock = Lock()

    def send(self, episode: Episode) -> str:
        """Keep an episode until it is discarded; its handle is new even if an equal one was sent before."""
        with self._lock:
            handle = f"memory-{next(self._numbers)}"
            self._episodes[handle] = episode
            return handle

    def receive(self, handle: str) -> Episode:
        """The episode that was sent, the same object.

        Raises:
            KeyError: it was discarded or never sent.

        """
        with self._lock:
            if handle not in self._episodes:
                raise KeyError(f"no episode {handle!r}: discarded or never sent ({len(self._episodes)} are held)")
            return self._episodes[handle]

    def discard(self, handle: str) -> None:
        """Free it; an unknown handle is fine."""
        with self._lock:
            self._episodes.pop(handle, None)
