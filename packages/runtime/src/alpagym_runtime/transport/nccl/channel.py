"""Moves buffers between two processes, in order, several under way; every wait has an end.

A channel is a process group of two of its own, so one peer's end or restart touches no other's. Each buffer passes
through a slot: memory of the CPU (pinned where a GPU follows) and, for NCCL, its twin on the GPU with a stream of its
own, so that one buffer's copy runs beside another's transfer. What is sent goes to the GPU part by part (`load`), each
as soon as it is there.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from alpagym_runtime.telemetry.timers import Timers

PARTS = Timers()
"""Where an episode's time goes, in seconds of both ends; what threads do side by side is counted in full."""
SLOTS = 3
"""Buffers of a channel: one is filled, one travels, one is emptied."""
TAG = 0


@dataclass
class Slot:
    """Room for one buffer; `memory` is on the CPU, and replaced where it is too small or was given away."""

    memory: Tensor
    device: Tensor | None = None
    stream: Any = None
    done: Any = None

    def array(self, size: int) -> NDArray[Any]:
        """The first `size` bytes, u8."""
        found: NDArray[Any] = self.memory[:size].numpy()
        return found

    def give(self, size: int) -> NDArray[Any]:
        """The same, to be kept: the memory lives as long as the array and its views, then torch uses it again."""
        found, self.memory = self.array(size), self.memory[:0]
        return found


class Pinned:
    """Page-locked memory that is lent to arrays, up to a limit; it comes back with the last view of each.

    Args:
        limit: bytes lent at a time.

    """

    def __init__(self, limit: int) -> None:
        self._limit, self._lent = limit, 0
        # Reentrant: arrays can end, and give their memory back, wherever Python collects garbage.
        self._lock = threading.RLock()

    def lend(self, size: int) -> bool:
        """Count memory that an array is to hold; False where it would be too much."""
        with self._lock:
            if self._lent + size > self._limit:
                return False
            self._lent += size
            return True

    def bind(self, array: NDArray[Any], size: int) -> None:
        """Count it as given back once the array and its views are gone."""
        weakref.finalize(array, self._give_back, size)

    def _give_back(self, size: int) -> None:
        with self._lock:
            self._lent -= size


def pinned(size: int) -> Tensor:
    """Page-locked bytes; torch keeps what is freed, and waits until no GPU reads it any more."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def current_device(backend: str) -> torch.device | None:
    """The GPU of the calling thread; None for gloo."""
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None


def process_group(store: dist.Store, rank: int, device: torch.device | None, host: str, timeout_s: float) -> Any:
    """What a pair sends and receives by; see `Channel`."""
    if device is not None:
        options = dist.ProcessGroupNCCL.Options()
        # Our own deadlines come first; beyond this one NCCL's watchdog would end the process.
        options._timeout = timedelta(seconds=max(10.0 * timeout_s, 600.0))
        return dist.ProcessGroupNCCL(store, rank, 2, options)
    gloo: Any = dist.ProcessGroupGloo
    bound = gloo._Options()
    bound._devices, bound._timeout = [gloo.create_device(hostname=host)], timedelta(seconds=timeout_s)
    return gloo(store, rank, 2, bound)


class Channel:
    """One side of a pair.

    Args:
        store: of this pair alone.
        rank: 0 or 1.
        device: of NCCL; None takes gloo.
        host: address that gloo listens on.
        timeout_s: bound of the connection's set-up.

    """

    def __init__(self, store: dist.Store, rank: int, device: torch.device | None, host: str, timeout_s: float) -> None:
        self._peer, self._cuda = 1 - rank, device
        if device is not None:
            torch.cuda.set_device(device)  # of this thread, which makes the buffers
        self._group = process_group(store, rank, device, host, timeout_s)
        self._free = [self._slot() for _ in range(SLOTS)]
        self._changed = threading.Condition()
        self._aborted = False
        # NCCL connects at the first message, which takes seconds: before any deadline of an episode.
        greeting = self._free[0]
        (self.start_send if rank == 1 else self.start_receive)(greeting, 1)
        self.finish(greeting, 1, timeout_s)

    def acquire(self, size: int, timeout_s: float) -> Slot | None:
        """A slot with room for `size` bytes; None where none got free in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free or self._aborted, timeout_s) or self._aborted:
                return None
            slot = self._free.pop()
        if len(slot.memory) < size:
            slot.memory = self._memory(size)
            if slot.device is not None and len(slot.device) < len(slot.memory):
                slot.device = torch.empty(len(slot.memory), dtype=torch.uint8, device=self._cuda)
        return slot

    def release(self, slot: Slot) -> None:
        """Give a slot back."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()

    def load(self, slot: Slot, start: int, end: int) -> None:
        """Begin to copy a part of what is to be sent to the GPU; any thread may. Nothing without a GPU."""
        if slot.device is not None:
            with torch.cuda.stream(slot.stream):
                slot.device[start:end].copy_(slot.memory[start:end], non_blocking=True)

    def load_from(self, slot: Slot, at: int, data: NDArray[Any]) -> bool:
        """Begin to copy bytes to the GPU from where they are, which must not change until `finish`.

        False where that is impossible: no GPU, or memory that it cannot read by itself.
        """
        if slot.device is None:
            return False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it may be read-only, and is only read
            memory = torch.from_numpy(data)
        if not memory.is_pinned():
            return False
        with torch.cuda.stream(slot.stream):
            slot.device[at : at + len(data)].copy_(memory, non_blocking=True)
        return True

    def start_send(self, slot: Slot, size: int) -> None:
        """Send the slot's first `size` bytes, all of which are loaded; returns at once."""
        self._start(slot, size, sending=True)

    def start_receive(self, slot: Slot, size: int) -> None:
        """Receive `size` bytes into the slot; returns at once."""
        self._start(slot, size, sending=False)

    def finish(self, slot: Slot, size: int, timeout_s: float) -> bool:
        """Wait for what was started with a slot; False where it did not end in time, which leaves the channel broken.

        Raises:
            RuntimeError: the other side is gone.

        """
        if not size:
            return True
        if self._cuda is None:
            try:
                slot.done.wait(timedelta(seconds=timeout_s))
            except RuntimeError as err:
                if "imed out" in str(err):
                    return False
                raise
            return True
        end = time.monotonic() + timeout_s
        while not slot.done.query():
            if self._aborted or time.monotonic() > end:
                return False
            time.sleep(150e-6)
        return True

    def abort(self) -> None:
        """End every transfer under way; waiting threads return."""
        with self._changed:
            if self._aborted:
                return
            self._aborted = True
            self._changed.notify_all()
        self._group.abort()

    def _start(self, slot: Slot, size: int, *, sending: bool) -> None:
        if not size:
            return
        operate = self._group.send if sending else self._group.recv
        if slot.device is None:
            slot.done = operate([slot.memory[:size]], self._peer, TAG)
            return
        with torch.cuda.stream(slot.stream):
            operate([slot.device[:size]], self._peer, TAG).wait()  # orders the stream after it, not this thread
            if not sending:
                slot.memory[:size].copy_(slot.device[:size], non_blocking=True)
            slot.done.record(slot.stream)

    def _slot(self) -> Slot:
        slot = Slot(self._memory(1))
        if self._cuda is not None:
            slot.device = torch.empty(len(slot.memory), dtype=torch.uint8, device=self._cuda)
            slot.stream, slot.done = torch.cuda.Stream(self._cuda), torch.cuda.Event()
        return slot

    def _memory(self, size: int) -> Tensor:
        """At least `size` bytes, rounded up so that episodes of about one size share a slot."""
        step = 1 << 20 if size > 1 << 16 else 1 << 16
        rounded = -(-size // step) * step
        return torch.empty(rounded, dtype=torch.uint8) if self._cuda is None else pinned(rounded)
