"""How fast episodes are written, read and handed over, how large their files are and what memory they need.

    python benchmarks/episode_io.py [--ticks 64] [--folder /dev/shm]

An episode of four cameras, 320 x 512 px, one new frame a tick, histories of K frames. `MB` counts the episode's arrays
in memory where a transport carries them, and the file where a file is written or read. Each number is the best of
`--repeat` runs: the first run on a virtual machine measures its page faults.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from alpagym_runtime.episodes.format import episode_bytes, read, save
from alpagym_runtime.testing.examples import example_episode
from alpagym_runtime.transport.config import DiskConfig, SharedMemoryConfig
from alpagym_runtime.types import Episode, Frame

HEIGHT, WIDTH, CAMERAS = 320, 512, ("front", "left", "right", "rear")


def make_episode(ticks: int, history: int, jpeg: bool) -> Episode:
    """Smooth pictures with some noise, so that a JPEG is as large as one of a street."""
    import cv2

    episode, random = example_episode(ticks), np.random.default_rng(1)
    moments = ticks + 1
    time_us = np.arange(moments, dtype=np.int64) * 200_000
    observation, arrived = {**episode.observation, "time_us": time_us}, []
    index = np.maximum(np.arange(moments)[:, None] + np.arange(1 - history, 1), 0)
    for number, name in enumerate(CAMERAS):
        pictures = np.empty((moments, HEIGHT, WIDTH, 3), np.uint8)
        ids = np.arange(1, moments + 1, dtype=np.uint64) + np.uint64(number << 32)
        for t in range(moments):
            coarse = random.integers(0, 256, (20, 32, 3), np.uint8)
            noise = random.integers(0, 24, (HEIGHT, WIDTH, 3), np.uint8)
            pictures[t] = cv2.add(cv2.resize(coarse, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC), noise)
            if jpeg:
                data = cv2.imencode(".jpg", pictures[t], [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes()
                pictures[t] = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
                arrived.append(Frame(0, name, int(time_us[t]), int(ids[t]), "jpeg", data))
        observation[f"camera_{name}"] = pictures[index]
        observation[f"camera_{name}_time_us"] = time_us[index]
        observation[f"camera_{name}_frame_id"] = ids[index]
    return episode.with_arrays(observation=observation, frames=tuple(arrived))


def best(work: Callable[[], object], repeat: int) -> tuple[float, float]:
    """Seconds of the fastest run, on the wall and of CPU: on a machine that others use only the second repeats."""
    times, cpu = [], []
    for _ in range(repeat):
        begun, used = time.perf_counter(), time.process_time()
        work()
        times.append(time.perf_counter() - begun)
        cpu.append(time.process_time() - used)
    return min(times), min(cpu)


def rates(megabytes: float, seconds: tuple[float, float]) -> str:
    """MB/s on the wall, and MB a CPU second."""
    return f"{megabytes / seconds[0]:.0f} MB/s ({megabytes / seconds[1]:.0f} a CPU s)"


def touch(episode: Episode) -> int:
    """Read a byte of every page of every array."""
    return sum(int(a.reshape(-1).view(np.uint8)[::4096].sum()) for a in episode.observation.values())


def unique_bytes(episode: Episode, frames: str) -> tuple[int, int]:
    """Bytes of the frames as they are stored, once each, and of all other arrays."""
    pixels = sum(episode.observation[f"camera_{name}"].nbytes for name in CAMERAS)
    encoded = sum(len(frame.data) for frame in episode.frames)
    rest = episode_bytes(episode) - pixels - encoded
    moments = len(episode.observation["time_us"])
    return (encoded if frames == "arrived" else moments * len(CAMERAS) * HEIGHT * WIDTH * 3), rest


def files(folder: Path, ticks: int, repeat: int) -> None:
    """Size and speed of files."""
    for frames, history, jpeg in (("seen", 1, False), ("seen", 4, False), ("arrived", 1, True), ("arrived", 4, True)):
        episode = make_episode(ticks, history, jpeg)
        path = folder / "bench.arrow"
        size = save(episode, path, frames, durable=False, remedy="")
        wrote = best(lambda: save(episode, path, frames, durable=False, remedy=""), repeat)  # noqa: B023
        got = best(lambda: read(path), repeat)  # noqa: B023
        plain = best(lambda: read(path, frames=False), repeat)  # noqa: B023
        pictures, arrays = unique_bytes(episode, frames)
        memory_mb = episode_bytes(episode) / 1e6
        print(
            f"{frames:8} K={history}: file {size / 1e6:7.1f} MB = {size / (pictures + arrays):.4f} x "
            f"(frames + arrays), write {rates(size / 1e6, wrote)}, read {rates(size / 1e6, got)}, "
            f"without frames {plain[0] * 1e3:.1f} ms; "
            f"of {memory_mb:.0f} MB in memory: write {rates(memory_mb, wrote)}, read {rates(memory_mb, got)}"
        )
        path.unlink()


def transports(folder: Path, ticks: int, repeat: int) -> None:
    """Speed of a hand-over, in MB of arrays that arrive."""
    for history in (1, 4):
        episode = make_episode(ticks, history, jpeg=False)
        size = episode_bytes(episode) / 1e6
        for name, end in (
            ("disk", DiskConfig(path=str(folder / "transport")).build("both", folder)),
            ("shared_memory", SharedMemoryConfig().build("both", folder)),
        ):
            handles: list[str] = []

            def send(end=end, handles=handles, episode=episode) -> None:
                for old in handles:
                    end.discard(old)
                handles[:] = [end.send(episode)]

            sent = best(send, repeat)
            received = best(lambda: end.receive(handles[0]), repeat)  # noqa: B023
            used = best(lambda: touch(end.receive(handles[0])), repeat)  # noqa: B023
            print(
                f"{name:13} K={history}: {size:6.0f} MB, send {rates(size, sent)}, "
                f"receive {received[0] * 1e3:.2f} ms, receive and touch every page {rates(size, used)}"
            )
            end.close()


def memory(folder: Path, ticks: int) -> None:
    """Peak of resident memory beyond the episode itself while it is written, then read, each in its own process."""
    for frames, history, jpeg in (("seen", 1, False), ("seen", 4, False), ("arrived", 4, True)):
        for action in ("write", "read"):
            command = [sys.executable, __file__, "--peak", action, "--ticks", str(ticks), "--folder", str(folder)]
            command += ["--frames", frames, "--history", str(history), *(["--jpeg"] if jpeg else [])]
            print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="")


def peak(options: argparse.Namespace) -> None:
    """One process of `memory`."""
    path = Path(options.folder) / "bench-peak.arrow"
    if options.peak == "write":
        episode = make_episode(options.ticks, options.history, options.jpeg)
        size = episode_bytes(episode)
        before = _reset_peak()
        save(episode, path, options.frames, durable=False, remedy="")
        extra = _status("VmHWM") - before
    else:
        before = _reset_peak()
        episode = read(path)
        touch(episode)
        size = episode_bytes(episode)
        extra = _status("VmHWM") - before - size
        path.unlink()
    print(
        f"{options.frames:8} K={options.history}: {options.action_name} needs {max(extra, 0) / 1e6:.0f} MB beyond the "
        f"episode of {size / 1e6:.0f} MB: {max(extra, 0) / size:.2f} x"
    )


def _reset_peak() -> int:
    """Resident bytes now; the kernel's high-water mark starts here."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ticks", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", default="/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
    for name, default in (("--peak", ""), ("--frames", "seen"), ("--history", 1)):
        parser.add_argument(name, default=default, type=type(default), help=argparse.SUPPRESS)
    parser.add_argument("--jpeg", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        options.action_name = options.peak
        peak(options)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        files(folder, options.ticks, options.repeat)
        transports(folder, options.ticks, options.repeat)
        memory(folder, options.ticks)


if __name__ == "__main__":
    main()
