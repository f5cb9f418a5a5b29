"""Episodes through transport=nccl against bare send and receive from pinned memory, between two processes.

    python benchmarks/nccl_transport.py                                             # two GPUs, 200 episodes of 64 MB
    python benchmarks/nccl_transport.py --backend gloo --episodes 20 --megabytes 8  # a CPU
    python benchmarks/nccl_transport.py --profile                                   # where the time goes
    python benchmarks/nccl_transport.py --one-gpu                                   # without the way between two GPUs

One process sends back to back with at most 8 episodes on their way, the other receives, takes and discards. Their
pictures are in memory of the transport (`allocate`), where a worker's collector puts them, or in ordinary memory.
Bare is the same bytes from one pinned buffer to another, copied to the GPU, sent, received, copied back, everything
queued on one stream and waited for once (gloo: from memory to memory). Memory is taken after the first episodes, as
many as can be on their way and all held at once, which make the buffers, and again at the end. Prints a line of JSON;
with `--profile` also milliseconds an episode of each part, and what the machine copies into pinned memory by so many
threads.

With `--one-gpu` both processes are on one GPU, and where NCCL would send or receive a buffer it is copied within that
GPU, on the same stream. Packing, every copy, announcements, grants and unpacking are as ever; no byte passes from one
process to the other, so contents are not checked, neither end waits for the other's data, and its figures are not those
of two GPUs. `--backend gloo --one-gpu` does the same on a CPU, to try the benchmark.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from alpagym_runtime.telemetry.timers import timed
from alpagym_runtime.transport.config import NcclConfig
from alpagym_runtime.transport.nccl import channel as channels
from alpagym_runtime.transport.nccl.blocks import Blocks, page_locked, plain
from alpagym_runtime.transport.nccl.channel import PARTS, Channel, current_device
from alpagym_runtime.transport.nccl.copiers import Copiers
from alpagym_runtime.transport.nccl.ends import Sender
from alpagym_runtime.transport.picture_memory import Allocate, plain_memory
from alpagym_runtime.types import Ended, Episode, EpisodeRequest

TICKS = 35


def episode(size: int, number: int, allocate: Allocate) -> Episode:
    """A drive whose pictures take about so many bytes; its number is in the first picture and in the last.

    The pixels are what the memory holds: to draw them is the collector's work.
    """
    width = max(1, round(size / ((TICKS + 1) * 540 * 3)))
    shape = (TICKS + 1, 1, 540, width, 3)
    pictures = allocate(math.prod(shape)).reshape(shape)
    pictures[0, ..., 0, :] = pictures[-1, ..., -1, :] = number % 251
    return Episode(
        EpisodeRequest("benchmark", policy_seed=number),
        Ended.HORIZON,
        None,
        {},
        1.0,
        False,
        observation={"camera_front": pictures, "ego_history_rig": np.zeros((TICKS + 1, 16, 7), np.float32)},
        controls=np.ones(TICKS, bool),
        rewards=np.zeros(TICKS),
    )


def check(found: Episode) -> None:
    """Whether it is whole, and nobody else's pictures are in it."""
    pictures, number = found.observation["camera_front"], found.request.policy_seed % 251
    assert len(found) == TICKS
    assert (pictures[0, ..., 0, :] == number).all()
    assert (pictures[-1, ..., -1, :] == number).all()


class SameGpu:
    """Stands in for the process group of a `Channel`: a buffer is copied to a place on its own GPU, or from there."""

    def __init__(self, device: torch.device | None) -> None:
        self._place = torch.empty(0, dtype=torch.uint8, device=device)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> SameGpu:
        """Copy what is to be sent away."""
        (tensor,) = tensors
        self._at(len(tensor)).copy_(tensor, non_blocking=True)
        return self

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> SameGpu:
        """Copy something to where it is to arrive."""
        (tensor,) = tensors
        tensor.copy_(self._at(len(tensor)), non_blocking=True)
        return self

    def wait(self, timeout: timedelta | None = None) -> None:
        """The stream is in order, and a CPU has copied already."""

    def abort(self) -> None:
        """Nothing waits."""

    def _at(self, size: int) -> torch.Tensor:
        if len(self._place) < size:
            self._place = torch.zeros(size, dtype=torch.uint8, device=self._place.device)
        return self._place[:size]


class Kept:
    """Ordinary memory that was written to before, as a process's heap has it: its pages are there."""

    def __init__(self, count: int, size: int) -> None:
        self._arrays = [np.ones(2 * size, np.uint8) for _ in range(count)]
        self._turn = 0

    def __call__(self, count: int) -> NDArray[np.uint8]:
        """The next of a few, in turns."""
        self._turn += 1
        return self._arrays[self._turn % len(self._arrays)][:count]


def memory() -> dict[str, float]:
    """MB of this process and on its GPU."""
    gc.collect()
    found = {"rss_mb": psutil.Process().memory_info().rss / 1e6}
    if torch.cuda.is_available():
        found["gpu_mb"] = torch.cuda.memory_allocated() / 1e6
    return found


def bare(folder: Path, rank: int, options: argparse.Namespace) -> float:
    """Seconds for all buffers, after one to warm up, of the slower process."""
    where = folder / "bare"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        where.with_suffix(".new").write_text(str(store.port))
        where.with_suffix(".new").rename(where)
    else:
        while not where.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(where.read_text()), None, False, timedelta(seconds=60))
    device = current_device(options.backend)
    blocks = Blocks(0, plain if device is None else page_locked)
    channel = Channel(dist.PrefixStore("bare", store), rank, device, "127.0.0.1", 60.0, blocks)
    size = sum(array.nbytes for array in episode(round(options.megabytes * 1e6), 0, plain_memory).observation.values())
    slot = channel.acquire(size, 60.0)
    assert slot is not None
    seconds = 0.0
    for count in (1, options.episodes):
        store.add(f"ready{count}", 1)
        while store.add(f"ready{count}", 0) < 2:
            time.sleep(0.001)
        began = time.perf_counter()
        for _ in range(count):
            if rank == 0:
                channel.start_receive(slot, size)
            else:
                channel.load(slot, [(0, slot.memory[:size])])
                channel.start_send(slot, size)
            if device is None:
                channel.finish(slot, size, 60.0)
        if device is not None:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    store.set(f"seconds{rank}", str(seconds))
    seconds = max(float(store.get(f"seconds{either}")) for either in (0, 1))
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < 2:
        time.sleep(0.001)
    channel.abort()
    return seconds


def copying(options: argparse.Namespace) -> dict[str, float]:
    """GB/s from plain to pinned memory (gloo: to plain), by threads; nothing else runs in this process."""
    source = np.random.default_rng(0).integers(0, 256, round(options.megabytes * 1e6), np.uint8)
    targets = [torch.empty(len(source), dtype=torch.uint8, pin_memory=options.backend == "nccl") for _ in range(3)]
    found = {}
    for threads in sorted({1, 2, 4, 8, 12, options.threads}):
        copiers = Copiers(threads)
        copiers.copy(targets[0].numpy(), source)
        began = time.perf_counter()
        for turn in range(12):
            copiers.copy(targets[turn % 3].numpy(), source)
        found[str(threads)] = 12 * len(source) / 1e9 / (time.perf_counter() - began)
        copiers.close()
    return found


def parts(options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds an episode by part."""
    return {name: 1e3 * seconds / options.episodes for name, seconds in sorted(PARTS.take().items())}


def config(options: argparse.Namespace) -> NcclConfig:
    """Of both ends."""
    return NcclConfig(options.backend, in_flight=options.in_flight, copy_threads=options.threads, timeout_s=60.0)


def send(folder: Path, options: argparse.Namespace) -> None:
    """The sending process: prints each handle, at last its memory."""
    bare(folder, 1, options)
    sender, size = config(options).build("rollout", folder), round(options.megabytes * 1e6)
    assert isinstance(sender, Sender)
    allocate = sender.allocate if options.memory == "transport" else Kept(options.in_flight + options.buffers + 2, size)
    for number in range(options.in_flight):
        print(sender.send(episode(size, number, allocate)), flush=True)
    sys.stdin.readline()  # they have arrived
    before = memory()  # takes tenths of a second, so the other process starts its clock only now
    PARTS.take()
    print("ready", flush=True)
    sys.stdin.readline()
    cpu = time.process_time()
    for number in range(options.episodes):
        one = episode(size, number, allocate)
        print(sender.send(one), flush=True)
        del one
    sys.stdin.readline()
    cpu = time.process_time() - cpu
    found: dict[str, Any] = {"cpu_s": cpu, "memory": {"before": before, "after": memory()}}
    if options.profile:
        found |= {"ms": parts(options), "copying_gb_per_s": copying(options)}
    print(json.dumps(found), flush=True)
    sys.stdin.readline()
    sender.close()
    print("closed", flush=True)


def answer(child: subprocess.Popen[str]) -> None:
    """Let the sending process go on."""
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def receive(folder: Path, child: subprocess.Popen[str], options: argparse.Namespace) -> dict[str, Any]:
    """The receiving process: both figures and both memories."""
    assert child.stdout is not None
    bare_s = bare(folder, 0, options)
    receiver = config(options).build("trainer", folder)
    held = {}
    for _ in range(options.in_flight):
        handle = child.stdout.readline().strip()
        held[handle] = receiver.receive(handle)
    size = sum(array.nbytes for array in held[handle].observation.values())
    while held:
        receiver.discard(held.popitem()[0])
    before = memory()
    PARTS.take()
    answer(child)
    child.stdout.readline()
    began = time.perf_counter()
    answer(child)
    cpu = time.process_time()
    for _ in range(options.episodes):
        handle = child.stdout.readline().strip()
        with timed("receiver: wait for the episode", PARTS):
            got = receiver.receive(handle)
        if not options.one_gpu:
            check(got)
        receiver.discard(handle)
    seconds = time.perf_counter() - began
    cpu = time.process_time() - cpu
    del got
    after = memory()
    answer(child)
    other = json.loads(child.stdout.readline())
    answer(child)
    child.stdout.readline()
    receiver.close()
    gigabytes = options.episodes * size / 1e9
    if options.profile:
        split = parts(options) | other["ms"]
        print(f"ms an episode, of {1e3 * seconds / options.episodes:.2f} (bare {1e3 * bare_s / options.episodes:.2f}):")
        for name, value in split.items():
            print(f"    {name:50} {value:8.3f}")
        print("copying, GB/s by threads:", {n: round(v, 1) for n, v in other["copying_gb_per_s"].items()})
    return {
        "backend": options.backend,
        "one_gpu": options.one_gpu,
        "episodes": options.episodes,
        "megabytes": size / 1e6,
        "in_flight": options.in_flight,
        "memory": options.memory,
        "copy_threads": options.threads,
        "buffers": options.buffers,
        "bare_gb_per_s": gigabytes / bare_s,
        "transport_gb_per_s": gigabytes / seconds,
        "share": bare_s / seconds,
        "receiver_cpu_s": cpu,
        "sender_cpu_s": other["cpu_s"],
        "receiver_memory": {"before": before, "after": after},
        "sender_memory": other["memory"],
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Run both processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--megabytes", type=float, default=64.0)
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--threads", type=int, default=NcclConfig.copy_threads)
    parser.add_argument("--memory", choices=("transport", "ordinary"), default="transport", help="of the pictures")
    parser.add_argument(
        "--buffers", type=int, default=channels.SLOTS, help="of each end, beside those that episodes hold"
    )
    parser.add_argument("--one-gpu", action="store_true", help="replace the way between two GPUs by a copy within one")
    parser.add_argument("--repeat", type=int, default=1, help="measure so many times")
    parser.add_argument("--profile", action="store_true", help="show where the time goes")
    parser.add_argument("--sender-in", metavar="DIR", help=argparse.SUPPRESS)
    options = parser.parse_args()
    channels.SLOTS = options.buffers
    if options.one_gpu:
        channels.process_group = lambda store, rank, device, host, timeout_s: SameGpu(device)
    if options.backend == "nccl":
        torch.cuda.set_device(1 if options.sender_in and not options.one_gpu else 0)
    if options.sender_in:
        for turn in range(options.repeat):
            send(Path(options.sender_in, str(turn)), options)
        return
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.repeat):
            Path(folder, str(turn)).mkdir()
        command = [sys.executable, __file__, *sys.argv[1:], "--sender-in", folder]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            for turn in range(options.repeat):
                print(json.dumps(receive(Path(folder, str(turn)), child, options)), flush=True)
        finally:
            child.kill()
            child.wait()


if __name__ == "__main__":
    main()
