"""Threads that copy: numpy lets go of the interpreter meanwhile, so they use a core each.

A pool of its own because it is asked several times an episode: an executor's futures cost as much as a small copy.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Work = Callable[[], None]
PIECE = 8 << 20
"""Bytes that one thread copies at a time, and that follow to a GPU as one."""


class Copiers:
    """Do what they are given, each piece of work in some thread; work must not raise."""

    def __init__(self, count: int) -> None:
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"alpagym-copy-{k}", daemon=True) for k in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def give(self, work: Work) -> None:
        """Have something done; returns at once."""
        self._work.put(work)

    def copy(self, to: NDArray[Any], data: NDArray[Any]) -> None:
        """Copy an array of bytes, all threads side by side; returns when that is done."""
        done, starts = threading.Semaphore(0), range(0, len(data), PIECE)

        def piece(start: int) -> None:
            np.copyto(to[start : start + PIECE], data[start : start + PIECE])
            done.release()

        for start in starts:
            self.give(functools.partial(piece, start))
        for _ in starts:
            done.acquire()

    def close(self) -> None:
        """Finish what was given and end the threads."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # it holds an episode
