"""What every transport does with episodes that nobody discards: it releases them by rule, so nothing grows for ever.

The oldest goes first, when its time is over or when a newer one needs its room, for which what is still wanted stays
where the sender can be held up instead. A handle that was released says so, and which key to change.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

REMEMBERED = 1024
"""Released handles whose reason is kept for the error."""


@dataclass
class _Held:
    size: int
    since: float
    wanted: bool


class Ledger:
    """The handles of one end: sizes, ages and why some are gone. Safe to use from several threads.

    Args:
        limit_bytes: room for episodes that are sent and not discarded.
        expire_s: age at which one is released.
        clock: seconds, never falling.

    """

    def __init__(self, limit_bytes: int, expire_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._expire, self._clock = limit_bytes, expire_s, clock
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._reasons: OrderedDict[str, str] = OrderedDict()
        self._lock = Lock()

    def add(self, handle: str, size: int, *, wanted: bool = False) -> list[str]:
        """Note a new episode; returns the handles that are to be released for it, oldest first, never the new one.

        One that is `wanted` makes no room for others until it is `taken`; its time can be over all the same.
        """
        with self._lock:
            self._held[handle] = _Held(size, self._clock(), wanted)
            return self._release(handle)

    def expired(self) -> list[str]:
        """The handles whose time is over, oldest first; for an end to which nothing new comes."""
        with self._lock:
            return self._release(None)

    def _release(self, newest: str | None) -> list[str]:
        now, gone = self._clock(), []
        total = sum(held.size for held in self._held.values())
        for old, held in list(self._held.items()):
            if old == newest:
                break
            if now - held.since > self._expire:
                reason = f"released after {self._expire:.0f} s (transport.expire_s)"
            elif newest is None or total <= self._limit:
                break
            elif held.wanted:
                continue
            else:
                reason = f"released to make room: {self._limit / 1e6:.0f} MB are held (transport.limit_mb)"
            total -= held.size
            del self._held[old]
            gone.append(old)
            self._reasons[old] = reason
        while len(self._reasons) > REMEMBERED:
            self._reasons.popitem(last=False)
        return gone

    def taken(self, handle: str) -> None:
        """Note that it was received: from now on it can be released like any other."""
        with self._lock:
            if handle in self._held:
                self._held[handle].wanted = False

    def remove(self, handle: str) -> None:
        """Note that an episode was discarded."""
        with self._lock:
            self._held.pop(handle, None)

    def keep_only(self, exists: Callable[[str], bool]) -> None:
        """Forget what the other end discarded."""
        with self._lock:
            for handle in [h for h in self._held if not exists(h)]:
                del self._held[handle]

    def handles(self) -> list[str]:
        """What is held, oldest first."""
        with self._lock:
            return list(self._held)

    @property
    def held_bytes(self) -> int:
        """Room that the held episodes take."""
        with self._lock:
            return sum(held.size for held in self._held.values())

    def missing(self, handle: str) -> KeyError:
        """The error for a handle that leads nowhere."""
        shown = handle if len(handle) <= 80 else handle[:80] + "…"
        with self._lock:
            reason = self._reasons.get(handle, "discarded or never sent")
            return KeyError(f"no episode {shown!r}: {reason} ({len(self._held)} are held)")
