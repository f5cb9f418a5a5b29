"""A stand-in for CUDA and NCCL, so that the real Cosmos-RL runs on a machine without a GPU (cosmos.device=cpu).

Launcher, controller, Redis, policy and rollout workers are the real ones. Streams and events do nothing, process groups
are gloo's, and what would go through NCCL goes through files of one folder. It proves orchestration: who starts whom,
which weights arrive where, what happens when one dies. It says nothing about NCCL, CUDA streams or speed.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

MAIL = "ALPAGYM_COSMOS_MAIL"
"""The variable that names the folder through which tensors go."""
_POLL_S = 0.001
_WAIT_MS = 60_000


class _Stream:
    """Work of this stream is done when it is asked for."""

    cuda_stream = 0
    priority = 0
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True

    def _nothing(self, *args: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = _nothing

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.record()

    def record(self, *args: Any) -> None:
        self._at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def _nothing(self, *args: Any) -> None:
        pass

    wait = synchronize = _nothing

    def elapsed_time(self, other: _Event) -> float:
        return 1000.0 * (other._at_s - self._at_s)


class Mail:
    """Point-to-point messages of named groups through files; the part of NCCL that Cosmos-RL uses.

    Args:
        folder: shared by all of a job.

    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._groups: dict[int, tuple[Path, int, int]] = {}
        self._numbers: defaultdict[tuple[int, str, int], int] = defaultdict(int)
        self._made = 0

    def create_nccl_uid(self) -> list[int]:
        """A name for a group, 128 numbers as NCCL's."""
        return list(uuid.uuid4().bytes * 8)

    def create_nccl_comm(
        self, uid_chars: Sequence[int], rank: int, world_size: int, timeout_ms: int | None = None
    ) -> int:
        """Join a group; returns when all have."""
        name = hashlib.sha256(bytes(int(part) & 255 for part in uid_chars)).hexdigest()[:16]
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"joined_{rank}").touch()
        joined = [folder / f"joined_{other}" for other in range(world_size)]
        self._wait(lambda: all(path.exists() for path in joined), timeout_ms, f"{world_size} to join")
        with self._lock:
            self._made += 1
            self._groups[self._made] = folder, rank, world_size
            return self._made

    def nccl_send(self, tensor: Tensor, peer: int, comm_idx: int, *args: Any, **kwargs: Any) -> None:
        """Leave a tensor for another of a group."""
        folder, rank, _ = self._groups[comm_idx]
        path = folder / f"{rank}_{peer}_{self._next(comm_idx, 'to', peer)}"
        temporary = path.with_name(f".{path.name}")
        temporary.write_bytes(save({"": tensor.detach().contiguous().clone()}))
        temporary.replace(path)

    def nccl_recv(
        self,
        tensor: Tensor,
        peer: int,
        comm_idx: int,
        stream: Any = None,
        timeout_ms: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Take what another of a group left."""
        folder, rank, _ = self._groups[comm_idx]
        path = folder / f"{peer}_{rank}_{self._next(comm_idx, 'from', peer)}"
        self._wait(path.exists, timeout_ms, f"rank {peer}")
        found = load(path.read_bytes())[""]
        path.unlink()
        with torch.no_grad():
            tensor.copy_((found if found.dtype == tensor.dtype else found.view(tensor.dtype)).reshape(tensor.shape))

    def nccl_broadcast(
        self, tensor: Tensor, rank: int, comm_idx: int, stream: Any = None, timeout_ms: int | None = None
    ) -> None:
        """Give one's tensor to all others."""
        _, own, size = self._groups[comm_idx]
        if own != rank:
            self.nccl_recv(tensor, rank, comm_idx, timeout_ms=timeout_ms)
            return
        for peer in range(size):
            if peer != rank:
                self.nccl_send(tensor, peer, comm_idx)

    def nccl_allreduce(
        self,
        sendbuff: Tensor,
        recvbuff: Tensor,
        op: Any,
        comm_idx: int,
        stream: Any = None,
        timeout_ms: int | None = None,
    ) -> None:
        """The sum, or the mean, over a group; in the order of ranks, so that all get the same bits."""
        _, own, size = self._groups[comm_idx]
        for peer in range(size):
            if peer != own:
                self.nccl_send(sendbuff, peer, comm_idx)
        total = torch.zeros_like(sendbuff)
        part = torch.empty_like(sendbuff)
        for peer in range(size):
            if peer == own:
                total += sendbuff
            else:
                self.nccl_recv(part, peer, comm_idx, timeout_ms=timeout_ms)
                total += part
        recvbuff.copy_(total / size if "AVG" in str(op) else total)

    @contextlib.contextmanager
    def nccl_group(self, comm_idx: int, timeout_ms: int | None = None) -> Iterator[None]:
        """Messages of a group go as they come."""
        yield

    def nccl_abort(self, comm_idx: int) -> None:
        """Leave a group."""
        self._groups.pop(comm_idx, None)

    def nccl_abort_all(self) -> int:
        """Leave all groups; how many failed to end."""
        self._groups.clear()
        return 0

    def nccl_comm_is_registered(self, comm_idx: int) -> bool:
        """Whether this process is in a group."""
        return comm_idx in self._groups

    def get_nccl_comm_nranks(self, comm_idx: int) -> int:
        """How many are in a group."""
        return self._groups[comm_idx][2]

    def _next(self, comm_idx: int, way: str, peer: int) -> int:
        with self._lock:
            number = self._numbers[comm_idx, way, peer]
            self._numbers[comm_idx, way, peer] = number + 1
            return number

    @staticmethod
    def _wait(ready: Any, timeout_ms: int | None, what: str) -> None:
        deadline_s = time.monotonic() + (timeout_ms or _WAIT_MS) / 1000.0
        while not ready():
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"waited {(timeout_ms or _WAIT_MS) / 1000.0:g} s for {what}, in vain")
            time.sleep(_POLL_S)


def install() -> None:
    """Put the stand-ins in place, in this process, before Cosmos-RL's workers are built."""
    _torch()
    import cosmos_rl.policy.policy_entry
    import cosmos_rl.rollout
    import cosmos_rl.rollout.rollout_entry
    import cosmos_rl.utils.distributed as distributed
    import cosmos_rl.utils.pynccl as pynccl

    mail = Mail(Path(os.environ[MAIL]))
    names = [name for name in dir(mail) if name.startswith(("nccl_", "create_nccl", "get_nccl"))]
    by = {getattr(pynccl, name): _same_parameters(getattr(pynccl, name), getattr(mail, name)) for name in names}
    by[distributed.init_distributed] = _init_distributed
    for module in list(sys.modules.values()):
        if not getattr(module, "__name__", "").startswith("cosmos_rl"):
            continue
        for name, value in list(module.__dict__.items()):
            if callable(value) and getattr(value, "__hash__", None) is not None and value in by:
                setattr(module, name, by[value])
        if module.__dict__.get("cosmos_device_type") == "cuda":
            module.cosmos_device_type = "cpu"  # type: ignore[attr-defined]
    base = cosmos_rl.rollout.RolloutWorkerBase
    started = base.runner_init

    def runner_init(self: Any) -> None:
        started(self)
        self.device = torch.device("cpu")

    base.runner_init = runner_init


def _same_parameters(original: Any, stand_in: Any) -> Any:
    """The stand-in, if it can be called as the original is.

    Raises:
        RuntimeError: names a parameter that it lacks.

    """
    taken = inspect.signature(stand_in).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    lacking = [name for name in inspect.signature(original).parameters if name not in taken]
    if lacking and not anything:
        raise RuntimeError(f"the stand-in for {original.__name__} takes no {', '.join(lacking)}")
    return stand_in


def _init_distributed(cpu_enabled: bool = True) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=600))


def _torch() -> None:
    one = _Stream()
    stand_ins = {
        "set_device": lambda *args, **kwargs: None,
        "current_device": lambda: 0,
        "current_stream": lambda *args, **kwargs: one,
        "default_stream": lambda *args, **kwargs: one,
        "Stream": _Stream,
        "Event": _Event,
        "synchronize": lambda *args, **kwargs: None,
        "stream": contextlib.nullcontext,
    }
    for name, value in stand_ins.items():
        setattr(torch.cuda, name, value)
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, *args, **kwargs: None
