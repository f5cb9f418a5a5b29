"""Where the wall time of a run goes: named parts, such as simulate, render and act, added up until somebody asks.

One table a process. Parts that run in threads beside each other are each counted in full, so their sum may exceed the
time that passed. A measurement costs about a microsecond; what is measured is a batch, never a slot.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ContextDecorator
from types import TracebackType


class Timers:
    """Seconds by name."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = defaultdict(float)

    def add(self, name: str, seconds: float) -> None:
        """Add to a part."""
        with self._lock:
            self._seconds[name] += seconds

    def take(self) -> dict[str, float]:
        """Seconds by part since the last call; the table starts anew."""
        with self._lock:
            taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken


TIMERS = Timers()
"""The process's own."""


class timed(ContextDecorator):
    """Add the time inside a block, or inside each call of a function, to a part."""

    def __init__(self, name: str, timers: Timers = TIMERS) -> None:
        self._name, self._timers = name, timers
        self._begun: list[float] = []

    def _recreate_cm(self) -> timed:
        # A decorator is one object for all calls, which may overlap in threads.
        return timed(self._name, self._timers)

    def __enter__(self) -> timed:
        self._begun.append(self._timers.clock())
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self._timers.add(self._name, self._timers.clock() - self._begun.pop())
