"""Episodes through transport=nccl against bare send and receive from pinned memory, between two processes.

    python benchmarks/nccl_transport.py                                             # two GPUs, 200 episodes of 64 MB
    python benchmarks/nccl_transport.py --backend gloo --episodes 20 --megabytes 8  # a CPU

One process sends back to back with at most 8 episodes on their way, the other receives, takes and discards. Bare is the
same bytes from one pinned buffer to another, copied to the GPU, sent, received, copied back, everything queued on one
stream and waited for once (gloo: from memory to memory). Memory is taken after the first episodes, which make the
buffers, and again at the end. Prints a line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
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

from alpagym_runtime.transport.config import NcclConfig
from alpagym_runtime.transport.nccl.channel import Channel, current_device
from alpagym_runtime.types import Ended, Episode, EpisodeRequest

TICKS = 35


def episode(megabytes: float) -> Episode:
    """A drive whose pictures take about so much."""
    width = max(1, round(megabytes * 1e6 / ((TICKS + 1) * 540 * 3)))
    pictures = np.random.default_rng(0).integers(0, 256, (TICKS + 1, 1, 540, width, 3), np.uint8)
    return Episode(
        EpisodeRequest("benchmark"),
        Ended.HORIZON,
        None,
        {},
        1.0,
        False,
        observation={"camera_front": pictures, "ego_history_rig": np.zeros((TICKS + 1, 16, 7), np.float32)},
        controls=np.ones(TICKS, bool),
        rewards=np.zeros(TICKS),
    )


def memory() -> dict[str, float]:
    """MB of this process and on its GPU."""
    gc.collect()
    found = {"rss_mb": psutil.Process().memory_info().rss / 1e6}
    if torch.cuda.is_available():
        found["gpu_mb"] = torch.cuda.memory_allocated() / 1e6
    return found


def bare(folder: Path, rank: int, options: argparse.Namespace) -> float:
    """Seconds for all buffers, after one to warm up."""
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
    channel = Channel(dist.PrefixStore("bare", store), rank, device, "127.0.0.1", 60.0)
    size = sum(array.nbytes for array in episode(options.megabytes).observation.values())
    slot = channel.acquire(size, 60.0)
    assert slot is not None
    seconds = 0.0
    for count in (1, options.episodes):
        store.add(f"ready{count}", 1)
        while store.add(f"ready{count}", 0) < 2:
            time.sleep(0.001)
        began = time.perf_counter()
        for _ in range(count):
            (channel.start_receive if rank == 0 else channel.start_send)(slot, size)
            if device is None:
                channel.finish(slot, size, 60.0)
        if device is not None:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < 2:
        time.sleep(0.001)
    channel.abort()
    return seconds


def config(options: argparse.Namespace) -> NcclConfig:
    """Of both ends."""
    return NcclConfig(options.backend, in_flight=options.in_flight, copy_threads=options.threads, timeout_s=60.0)


def send(folder: Path, options: argparse.Namespace) -> None:
    """The sending process: prints each handle, at last its memory."""
    bare(folder, 1, options)
    sender, one = config(options).build("rollout", folder), episode(options.megabytes)
    for _ in range(options.in_flight):
        print(sender.send(one), flush=True)
    sys.stdin.readline()  # they have arrived
    before = memory()
    for _ in range(options.episodes):
        print(sender.send(one), flush=True)
    sys.stdin.readline()
    after = memory()
    print(json.dumps({"before": before, "after": after}), flush=True)
    sys.stdin.readline()
    sender.close()


def receive(folder: Path, child: subprocess.Popen[str], options: argparse.Namespace) -> dict[str, Any]:
    """The receiving process: both figures and both memories."""
    assert child.stdout is not None
    assert child.stdin is not None
    bare_s = bare(folder, 0, options)
    receiver = config(options).build("trainer", folder)
    size = 0
    for _ in range(options.in_flight):
        handle = child.stdout.readline().strip()
        size = sum(array.nbytes for array in receiver.receive(handle).observation.values())
        receiver.discard(handle)
    before = memory()
    child.stdin.write("\n")
    child.stdin.flush()
    began = time.perf_counter()
    cpu = time.process_time()
    for _ in range(options.episodes):
        handle = child.stdout.readline().strip()
        got = receiver.receive(handle)
        assert len(got) == TICKS
        receiver.discard(handle)
    seconds = time.perf_counter() - began
    cpu = time.process_time() - cpu
    del got
    after = memory()
    child.stdin.write("\n")
    child.stdin.flush()
    other = json.loads(child.stdout.readline())
    child.stdin.write("\n")
    child.stdin.flush()
    child.wait(60)
    receiver.close()
    gigabytes = options.episodes * size / 1e9
    return {
        "backend": options.backend,
        "episodes": options.episodes,
        "megabytes": size / 1e6,
        "in_flight": options.in_flight,
        "copy_threads": options.threads,
        "bare_gb_per_s": gigabytes / bare_s,
        "transport_gb_per_s": gigabytes / seconds,
        "share": bare_s / seconds,
        "receiver_cpu_s": cpu,
        "receiver_memory": {"before": before, "after": after},
        "sender_memory": other,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Run both processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--megabytes", type=float, default=64.0)
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--sender-in", metavar="DIR", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.backend == "nccl":
        torch.cuda.set_device(1 if options.sender_in else 0)
    if options.sender_in:
        send(Path(options.sender_in), options)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--sender-in", folder]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            print(json.dumps(receive(Path(folder), child, options)))
        finally:
            child.kill()
            child.wait()


if __name__ == "__main__":
    main()
