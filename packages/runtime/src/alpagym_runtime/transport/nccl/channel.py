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
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from alpagym_runtime.telemetry.timers import Timers
from alpagym_runtime.transport.nccl.blocks import Blocks, suits

PARTS = Timers()
"""Where an episode's time goes, in seconds of both ends; what threads do side by side is counted in full."""
SLOTS = 3
"""Buffers of a channel: one is filled, one travels, one is emptied."""
GRAIN = 1 << 20
"""Sizes on the GPU are multiples of it, so that episodes of about one size share a slot."""
TAG = 0


@dataclass
class Slot:
    """Room for one buffer; `memory` is a block on the CPU, which may be lent to an episode, and then another follows.

    A sender's `memory` has room for what it copies, `device` for the whole message.
    """

    memory: Tensor
    device: Tensor | None = None
    stream: Any = None
    done: Any = None

    def array(self, size: int) -> NDArray[Any]:
        """The first `size` bytes, u8."""
        found: NDArray[Any] = self.memory[:size].numpy()
        return found


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
        blocks: where the slots' memory is from.

    """

    def __init__(
        self, store: dist.Store, rank: int, device: torch.device | None, host: str, timeout_s: float, blocks: Blocks
    ) -> None:
        self._peer, self._cuda, self._blocks = 1 - rank, device, blocks
        if device is not None:
            torch.cuda.set_device(device)  # of this thread, which makes the buffers
        self._group = process_group(store, rank, device, host, timeout_s)
        self._free = [self._slot() for _ in range(SLOTS)]
        self._changed = threading.Condition()
        self._aborted = False
        # NCCL connects at the first message, which takes seconds: before any deadline of an episode.
        greeting = self._free[0]
        (self.start_send if rank == 1 else self.start_receive)(greeting, 1)
        if not self.finish(greeting, 1, timeout_s):
            raise RuntimeError(f"the other end did not connect within {timeout_s:g} s")

    def acquire(self, size: int, timeout_s: float, on_cpu: int | None = None) -> Slot | None:
        """A slot with room for `size` bytes; None where none got free in time.

        Args:
            size: of the message.
            timeout_s: longest wait.
            on_cpu: bytes that pass through memory of the CPU; None: all.

        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._free or self._aborted, timeout_s) or self._aborted:
                return None
            slot = self._free.pop()
        needed = size if on_cpu is None else on_cpu
        if not suits(slot.memory, needed):
            self._blocks.keep(slot.memory)
            slot.memory = self._blocks.take(needed)
        if slot.device is not None and len(slot.device) < size:
            self._take_on_gpu(slot, size)
        return slot

    def release(self, slot: Slot) -> None:
        """Give a slot back."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()

    def readable(self, data: NDArray[Any]) -> Tensor | None:
        """Bytes that the GPU can read where they are; None: there is no GPU, or it cannot."""
        if self._cuda is None:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it may be read-only, and is only read
            memory = torch.from_numpy(data)
        return memory if memory.is_pinned() else None

    def load(self, slot: Slot, copies: Sequence[tuple[int, Tensor]]) -> None:
        """Begin to copy what is to be sent to the GPU: bytes and where in the message they lie; any thread may.

        They must not change until `finish`. Nothing without a GPU.
        """
        if slot.device is None or not copies:
            return
        with torch.cuda.stream(slot.stream):
            for at, memory in copies:
                slot.device[at : at + len(memory)].copy_(memory, non_blocking=True)

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
        slot = Slot(self._blocks.take(1))
        if self._cuda is not None:
            slot.stream, slot.done = torch.cuda.Stream(self._cuda), torch.cuda.Event()
            self._take_on_gpu(slot, 1)
        return slot

    def _take_on_gpu(self, slot: Slot, size: int) -> None:
        # Of the slot's own stream: memory of another may still be read there by what was queued before it was freed.
        with torch.cuda.stream(slot.stream):
            slot.device = torch.empty(-(-size // GRAIN) * GRAIN, dtype=torch.uint8, device=self._cuda)
