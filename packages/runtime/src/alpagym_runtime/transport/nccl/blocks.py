"""Memory in blocks that are lent to arrays and used again; with a GPU it is page-locked.

To lock 64 MB takes 34 ms on the host of an H200, so what comes back is kept. Who gives a block away has waited until no
GPU reads or writes it.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

SMALLEST = 1 << 16


def plain(size: int) -> Tensor:
    """Bytes as they come."""
    return torch.empty(size, dtype=torch.uint8)


def page_locked(size: int) -> Tensor:
    """Bytes that a GPU reads and writes by itself."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def rounded(size: int) -> int:
    """The size of a block with room for so much: the next power of two, as torch rounds what it locks."""
    return max(SMALLEST, 1 << (size - 1).bit_length()) if size else SMALLEST


def suits(block: Tensor, size: int) -> bool:
    """Whether a block has room for so much and is not far too large."""
    return rounded(size) <= len(block) <= 2 * rounded(size)


class Blocks:
    """Those of one end; safe to use from several threads.

    Args:
        limit: bytes that are lent or kept at a time; who holds a block that is not lent counts it himself.
        make: new memory of a size.

    """

    def __init__(self, limit: int, make: Callable[[int], Tensor]) -> None:
        self._limit, self._make = limit, make
        self._lent, self._kept = 0, list[Tensor]()  # smallest first
        self._lock = threading.Lock()
        # Arrays end wherever Python collects garbage, this thread's lock held or not: they only put down what they had.
        self._back: queue.SimpleQueue[Tensor] = queue.SimpleQueue()

    def take(self, size: int) -> Tensor:
        """A block with room for so much: the smallest that is kept and suits, or a new one."""
        with self._lock:
            self._collect()
            for at, block in enumerate(self._kept):
                if suits(block, size):
                    return self._kept.pop(at)
        return self._make(rounded(size))

    def keep(self, block: Tensor) -> None:
        """Keep a block that was taken, if there is room."""
        with self._lock:
            self._collect()
            if len(block) and self._lent + self._kept_bytes() + len(block) <= self._limit:
                self._insert(block)

    def lend(self, block: Tensor, count: int) -> NDArray[Any] | None:
        """The first bytes of a block, u8, which comes back with the array's last view; None: too much is lent."""
        with self._lock:
            if not self._has_room(len(block)):
                return None
            self._lent += len(block)
            self._collect()
        # Views of views refer to this array, since its own base is no array.
        found: NDArray[Any] = block[:count].numpy()
        weakref.finalize(found, self._back.put, block).atexit = False
        return found

    def allocate(self, count: int) -> NDArray[Any] | None:
        """So many bytes, u8, in a block of their own; None: too much is lent."""
        with self._lock:
            if not self._has_room(rounded(count)):
                return None
        block = self.take(count)
        found = self.lend(block, count)
        if found is None:  # others were faster
            self.keep(block)
        return found

    def close(self) -> None:
        """Keep nothing from here on; what is lent stays with who has it."""
        with self._lock:
            self._limit = 0
            self._collect()

    def _has_room(self, size: int) -> bool:
        self._collect()
        return self._lent + size <= self._limit

    def _collect(self) -> None:
        """Keep what has come back, as much as there is room for."""
        while not self._back.empty():
            block = self._back.get()
            self._lent -= len(block)
            self._insert(block)

        while self._kept and self._lent + self._kept_bytes() > self._limit:
            self._kept.pop()

    def _insert(self, block: Tensor) -> None:
        self._kept.append(block)
        self._kept.sort(key=len)

    def _kept_bytes(self) -> int:
        return sum(map(len, self._kept))
