"""Speed of the PhysicalAI-AV loader: a cold and a warm sample, and how busy a stand-in step keeps over epochs.

    alpagym pai make-synthetic DIR --chunks 0 --clips-per-chunk 1 --width 1920 --height 1080 --no-obstacles
    python benchmarks/pai_loading.py DIR

Samples are key frames 0.75 s apart, of every clip in turn. Cold: nothing decoded, the processes run. Warm: in the
cache. CPU time stands beside wall time: the workers' for a cold sample, the caller's for a warm one.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from pathlib import Path

import numpy as np

from alpagym_runtime.simulators.pai.clips import ClipIndex, Sample
from alpagym_runtime.simulators.pai.loader import SampleLoader
from alpagym_runtime.simulators.pai.samples import Layout
from alpagym_runtime.simulators.pai.tree import find_root

CAMERAS = ("front_wide_120fov", "front_tele_30fov", "cross_left_120fov", "cross_right_120fov")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path)
    parser.add_argument("--height", type=int, default=320)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--step-s", type=float, default=0.2)
    options = parser.parse_args()
    root = find_root(options.tree)
    samples = samples_of(root, options.samples)
    layout = Layout(dict.fromkeys((f"camera_{name}" for name in CAMERAS), (options.height, options.width)))
    size_mb = 16 * options.height * options.width * 3 / 2**20
    cache = round((options.samples + 2) * (size_mb + 1))
    load = os.getloadavg()[0]
    print(f"{len(samples)} samples, 4 cameras x 4 frames at {options.height} x {options.width}; load {load:.1f}")

    loader = SampleLoader(root, layout, options.workers, cache)
    take(loader, samples[0])
    loader.close()
    start_s = cpu(resource.RUSAGE_CHILDREN)  # of the processes, and one sample
    loader = SampleLoader(root, layout, options.workers, cache)
    take(loader, samples[0])  # the processes have started and opened their files
    cold = [timed(loader, sample) for sample in samples[1:]]
    own_s = cpu(resource.RUSAGE_SELF)
    warm = [timed(loader, sample) for _ in range(options.rounds) for sample in samples[1:]]
    own_s = (cpu(resource.RUSAGE_SELF) - own_s) / len(warm)
    loader.close()
    cold_s = (cpu(resource.RUSAGE_CHILDREN) - 2.0 * start_s) / len(cold)
    for name, found, spent in (("cold", cold, cold_s), ("warm", warm, own_s)):
        median, most = 1e3 * np.median(found), 1e3 * np.max(found)
        print(f"{name}: {median:.1f} ms median, {most:.1f} ms at most; {1e3 * spent:.1f} ms CPU a sample")

    loader = SampleLoader(root, layout, options.workers, cache)
    take(loader, samples[0])
    for epoch in range(options.epochs):
        gaps, begun = [], time.perf_counter()
        for i, sample in enumerate(samples):
            loader.expect(samples[i + 1 :])
            asked = time.perf_counter()
            take(loader, sample)
            gaps.append(time.perf_counter() - asked)
            time.sleep(options.step_s)
        wall = time.perf_counter() - begun
        busy = options.step_s * len(samples) / wall
        rate, gap = len(samples) / wall, 1e3 * max(gaps)
        print(f"epoch {epoch + 1}: {rate:.2f} samples/s, busy {busy:.1%}, longest gap {gap:.0f} ms")
    loader.close()


def cpu(who: int) -> float:
    """CPU seconds so far."""
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def samples_of(root: Path, count: int) -> list[Sample]:
    """Key frames from 2 s on, 0.75 s apart, of every clip in turn."""
    index = ClipIndex.read(root / "clip_index.parquet")
    times = [2_000_000 + 750_000 * i for i in range(15)]
    pairs = [(row, time_us) for time_us in times for row in range(len(index))]
    return [Sample("", str(index.clip_id[row]), int(index.chunk[row]), "", t) for row, t in pairs[:count]]


def take(loader: SampleLoader, sample: Sample) -> None:
    """One sample."""
    loader.submit(sample)
    loader.take(sample)


def timed(loader: SampleLoader, sample: Sample) -> float:
    """Seconds until a sample's arrays are there."""
    begun = time.perf_counter()
    take(loader, sample)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
