"""The processes that train one policy together; a run without torchrun is a team of one.

Everything that decides what a run does is equal in all of them: they gather the same facts and compute the same
numbers. What is gathered is JSON, never an object. Only rank 0 writes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from alpagym_runtime.endpoints import Endpoint, Registry, own_address
from alpagym_runtime.errors import SimulatorError

SHORT = 4096
"""Bytes that are gathered without asking for lengths first."""
LONGEST_WAIT = timedelta(hours=2)
"""Of one process for the others; rank 0 may be filming meanwhile."""
LONGEST_MEETING = timedelta(minutes=10)
"""Until all have come; on some nodes the container is still being unpacked."""


class Team:
    """See the module's text.

    Attributes:
        rank: of this process, from 0.
        size: how many there are.

    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @classmethod
    def join(cls, device: str) -> Team:
        """Meet the others that torchrun started; NCCL serves what lies on a GPU, gloo the rest.

        Args:
            device: cpu, or cuda for the GPU of this process's local rank.

        """
        return cls._join(device)

    @classmethod
    def meet(cls, device: str, directory: Path, name: str, rank: int, size: int) -> Team:
        """Meet others that know their rank and see the same run directory, where rank 0 says how it is reached.

        Args:
            device: as for `join`.
            directory: the run's.
            name: of this meeting, so that nobody goes to one of an earlier start.
            rank: of this process.
            size: how many there are.

        Raises:
            SimulatorError: rank 0 has not said where it is.

        """
        registry = Registry(directory)
        if rank == 0:
            # Port 0: the system chooses a free one.
            store = dist.TCPStore("0.0.0.0", 0, size, is_master=True, timeout=LONGEST_MEETING, wait_for_workers=False)
            registry.publish(Endpoint(name, "team", own_address(), store.port))
        else:
            found = registry.named(name, LONGEST_MEETING.total_seconds())
            if found is None:
                text = f"rank 0 has not published {registry.folder / name}.json within {LONGEST_MEETING}"
                raise SimulatorError(text, code="TEAM")
            store = dist.TCPStore(found.host, found.port, size, is_master=False, timeout=LONGEST_MEETING)
        team = cls._join(device, store=store, rank=rank, world_size=size)
        if rank == 0:
            registry.withdraw(name)
        return team

    @classmethod
    def _join(cls, device: str, **where: Any) -> Team:
        if device == "cuda":
            torch.cuda.set_device(own_device(device))
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=LONGEST_WAIT, **where)
        return cls(dist.get_rank(), dist.get_world_size())

    def leave(self) -> None:
        """The end of the team: all of them at once, for who leaves early takes connections from under the others."""
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    @property
    def writes(self) -> bool:
        """Whether this process writes the run directory."""
        return self.rank == 0

    def part(self, count: int) -> range:
        """Which of `count` things in a row are this process's: the parts differ by one at most."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def gather(self, value: Any) -> list[Any]:
        """The value of each process, by rank; plain data, which comes back as JSON reads it. All must call it."""
        if self.size == 1:
            return [value]
        text = json.dumps(value, default=lambda number: number.item()).encode()
        message = len(text).to_bytes(8, "little") + text
        # Most fit into one message; where one does not, all send again with room for the longest.
        parts = self._exchange(message[:SHORT], SHORT)
        lengths = [8 + int.from_bytes(part[:8], "little") for part in parts]
        if max(lengths) > SHORT:
            parts = self._exchange(message, max(lengths))
        return [json.loads(part[8:length]) for part, length in zip(parts, lengths, strict=True)]

    def _exchange(self, message: bytes, room: int) -> list[bytes]:
        own = torch.zeros(room, dtype=torch.uint8)
        own[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own)
        return [part.numpy().tobytes() for part in parts]

    def joined(self, values: Iterable[Any]) -> list[Any]:
        """The items of every process's list, by rank."""
        return [item for part in self.gather(list(values)) for item in part]

    def any(self, flag: bool) -> bool:
        """Whether it is true for one of them."""
        return any(self.gather(bool(flag)))

    def added(self, numbers: dict[str, float]) -> dict[str, float]:
        """Sums by name; the names are the same everywhere."""
        parts = self.gather(numbers)
        return {name: float(math.fsum(part[name] for part in parts)) for name in parts[0]}

    def moments(self, values: NDArray[np.float64]) -> tuple[float, float]:
        """Mean and population standard deviation over the values of all; 0 where there are none."""
        count, total = (sum(part) for part in zip(*self.gather([len(values), float(values.sum())]), strict=True))
        if not count:
            return 0.0, 0.0
        mean = total / count
        return mean, math.sqrt(sum(self.gather(float(((values - mean) ** 2).sum()))) / count)

    def same_weights(self, module: nn.Module) -> None:
        """Give every process rank 0's weights: they are the same by construction, this makes sure."""
        if self.size > 1:
            with torch.no_grad():
                for tensor in (*module.parameters(), *module.buffers()):
                    dist.broadcast(tensor, 0)

    def add_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace each gradient by its sum over the team, in one message a device and type.

        One that a process lacks counts as 0; one that all lack stays away. Those of sharded parameters are summed
        already.
        """
        if self.size == 1:
            return
        trained = [p for p in parameters if p.requires_grad and not is_shard(p)]
        known = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8)
        dist.all_reduce(known, dist.ReduceOp.MAX)
        groups: dict[tuple[Any, Any], list[Tensor]] = {}
        for parameter, wanted in zip(trained, known.tolist(), strict=True):
            if wanted:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                groups.setdefault((parameter.device, parameter.dtype), []).append(parameter.grad)
        for gradients in groups.values():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat)
            for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(total.view_as(gradient))


ALONE = Team()


def is_shard(parameter: Tensor) -> bool:
    """Whether a parameter's memory is spread over the team."""
    return hasattr(parameter, "full_tensor")


def own_device(device: str) -> str:
    """The device of this process: `cuda` is the GPU that torchrun's LOCAL_RANK names."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device
