"""What torch and NCCL say of the GPUs, as one line of JSON: `python -m alpagym_runtime.trainers.gpu_probe [--nccl N]`.

A process of its own, because a driver that is broken, or GPUs whose peer-to-peer is, hang whoever asks. The caller has
a time-out and ends the process group.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

_FLOATS = 64 << 20 >> 2  # 64 MiB
_ROUNDS = 10
_TIMEOUT_S = 30.0


def describe() -> dict[str, Any]:
    """Versions, devices, and which pairs reach each other's memory; every device multiplies two small matrices."""
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "available": False, "error": ""}
    found |= {"nccl": "", "devices": 0, "peers": []}
    try:
        count = torch.cuda.device_count()
        for device in range(count):
            ones = torch.ones(64, 64, device=f"cuda:{device}")
            assert float((ones @ ones).sum()) == 64.0**3
        found["devices"], found["available"] = count, count > 0
        if count:
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["peers"] = [
            [i, j] for i in range(count) for j in range(count) if i != j and torch.cuda.can_device_access_peer(i, j)
        ]
    except (RuntimeError, AssertionError) as err:
        found["error"] = str(err).splitlines()[0] if str(err) else type(err).__name__
    return found


def reduce_among(world: int) -> float:
    """All-reduce 64 MiB among the first `world` GPUs, a process each; GB/s as NCCL counts it (bus bandwidth).

    Raises:
        RuntimeError: a process failed or took longer than 30 s; with what it said last.

    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __spec__.name, "--world", str(world), "--store", f"{folder}/store", "--rank"]
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for rank in range(world)
        ]
        try:
            deadline = time.monotonic() + _TIMEOUT_S * 2
            texts = [rank.communicate(timeout=max(0.1, deadline - time.monotonic()))[0] for rank in ranks]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"no answer within {_TIMEOUT_S * 2:.0f} s: the GPUs do not reach each other") from None
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    for rank, text in zip(ranks, texts, strict=True):
        if rank.returncode != 0:
            lines = [line for line in text.strip().splitlines() if line.strip()]
            raise RuntimeError(lines[-1] if lines else f"a process ended with {rank.returncode}")
    return float(json.loads(texts[0].strip().splitlines()[-1])["gigabytes_per_s"])


def _be_a_rank(rank: int, world: int, store: Path) -> None:
    import torch.distributed as dist

    # Multicast over NVLink needs a fabric manager, which containers often lack, and two GPUs gain nothing from it.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.cuda.set_device(rank)
    limit = timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
    values = torch.full((_FLOATS,), float(rank + 1), device=f"cuda:{rank}")
    dist.all_reduce(values)
    # 1 + 2 + … + world
    assert float(values[0]) == float(values[-1]) == world * (world + 1) / 2, "the sum over GPUs is wrong"
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(_ROUNDS):
        dist.all_reduce(values)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begun) / _ROUNDS
    dist.destroy_process_group()
    moved = 2 * (world - 1) / world * values.numel() * values.element_size()
    print(json.dumps({"gigabytes_per_s": moved / seconds / 1e9}))


def main() -> int:
    """One of the three parts, as the options say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nccl", type=int, default=0, help="all-reduce among so many GPUs")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        _be_a_rank(options.rank, options.world, options.store)
    elif options.nccl:
        try:
            print(json.dumps({"gigabytes_per_s": reduce_among(options.nccl)}))
        except RuntimeError as err:
            print(err, file=sys.stderr)
            return 1
    else:
        print(json.dumps(describe()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
