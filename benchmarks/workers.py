"""What a second rollout worker costs and brings: CPU seconds an episode, and wall time, of one worker and of two.

    uv run python benchmarks/workers.py

The policy and the world of the default run, pictures included; a worker is held to one core and one thread. The two
pools take turns, so that the machine's load meets both; the first round of each loads scenes and is left out. CPU is
the workers' and, apart, what the trainer's process adds an episode. Wall times mean something on a quiet machine only.

What the machine itself allows is taken in the same turns: collectors in processes of their own, with nothing between
them and no trainer, one and then two side by side, held to the same cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from omegaconf import OmegaConf

from alpagym_host.compose import compose
from alpagym_runtime.random import mix_int
from alpagym_runtime.rollouts.collector import Collector
from alpagym_runtime.rollouts.cores import Cores, make_policy
from alpagym_runtime.rollouts.launchers import LocalLauncher
from alpagym_runtime.rollouts.pool import WorkerPool
from alpagym_runtime.run_config import to_mapping
from alpagym_runtime.transport.between import build_transport
from alpagym_runtime.types import EpisodeRequest, Sampling

PINNED = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class Pinned(LocalLauncher):
    """Workers that are held to a core each."""

    def command(self, index: int) -> list[str]:
        """The same command, from the worker's core."""
        cores = sorted(os.sched_getaffinity(0))
        return [sys.executable, "-c", PINNED, str(cores[index % len(cores)]), *super().command(index)[1:]]


class Side:
    """A pool of `count` workers and what it spent."""

    def __init__(self, count: int, folder: Path, scenes: int) -> None:
        words = [f"dataset.train_scenes={scenes}", "simulator.cameras.threads=1", f"rollout.workers={count}"]
        config = compose([*words, "transport=shared_memory"])
        self.directory = folder / str(count)
        self.directory.mkdir()
        (self.directory / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(to_mapping(config))))
        self._transport = build_transport(config, "trainer", self.directory)
        self.pool = WorkerPool(config, self.directory, self._transport, lambda: Pinned(self.directory), print)
        policy, cores = make_policy(config), Cores(config, 1, Path())
        self._scenes = cores.core(cores.world("train"), policy.spec)[0].spec.scenes
        self._collector = self.pool.collector(cores.world("train"), policy)
        self.wall_s = self.cpu_s = self.own_cpu_s = 0.0
        self.episodes = 0

    def round(self, number: int, counts: bool) -> None:
        """Eight drives in each scene."""
        requests = [
            EpisodeRequest(scene, policy_seed=mix_int(number, group, member), group_id=group, member=member)
            for group, scene in enumerate(self._scenes)
            for member in range(8)
        ]
        before, own, began = self._workers_cpu_s(), time.process_time(), time.perf_counter()
        episodes = self._collector.collect(requests, Sampling())
        wall_s, own_s = time.perf_counter() - began, time.process_time() - own
        if counts:
            self.wall_s += wall_s
            self.own_cpu_s += own_s
            self.cpu_s += self._workers_cpu_s() - before
            self.episodes += len(episodes)

    def _workers_cpu_s(self) -> float:
        """Of the processes that work for this pool."""
        total = 0.0
        for process in psutil.Process().children():
            if str(self.directory) in process.cmdline():
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def close(self) -> None:
        """End the workers."""
        self.pool.close()
        self._transport.close()


class Unrelated:
    """Collectors in processes of their own, which know nothing of each other: each drives its part of a round."""

    def __init__(self, count: int, scenes: int) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self._children = []
        for index in range(count):
            part = ["--collector", str(index), str(count), "--scenes", str(scenes)]
            command = [sys.executable, "-c", PINNED, str(cores[index % len(cores)]), __file__, *part]
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._children.append(child)
        self.wall_s = self.cpu_s = 0.0
        self.episodes = 0

    def round(self, number: int, counts: bool) -> None:
        """The same drives as a pool's round; over when the last is done."""
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write(f"{number}\n")
            child.stdin.flush()
        began = time.perf_counter()
        for child in self._children:
            assert child.stdout is not None
            episodes, cpu_s = child.stdout.readline().split()
            if counts:
                self.episodes += int(episodes)
                self.cpu_s += float(cpu_s)
        if counts:
            self.wall_s += time.perf_counter() - began

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            assert child.stdin is not None
            child.stdin.close()
            child.wait()


def collector(index: int, count: int, scenes: int) -> None:
    """One of the unrelated processes: drives its part of each round that it is told the number of."""
    words = [f"dataset.train_scenes={scenes}", "simulator.cameras.threads=1"]
    config = compose([*words, f"rollout.slots={256 // count}"])
    policy, cores = make_policy(config), Cores(config, config.rollout.slots, Path())
    core = cores.core(cores.world("train"), policy.spec)[0]
    driving = Collector(core, policy, config_hash=config.config_hash)
    mine = list(enumerate(core.spec.scenes))[index::count]
    for line in sys.stdin:
        number = int(line)
        requests = [
            EpisodeRequest(scene, policy_seed=mix_int(number, group, member), group_id=group, member=member)
            for group, scene in mine
            for member in range(8)
        ]
        cpu = time.process_time()
        episodes = driving.collect(requests, Sampling())
        print(len(episodes), time.process_time() - cpu, flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2, help="against one")
    parser.add_argument("--collector", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.collector:
        collector(*options.collector, options.scenes)
        return
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    with tempfile.TemporaryDirectory() as folder:
        many = options.workers
        sides = {f"{count} workers": Side(count, Path(folder), options.scenes) for count in (1, many)}
        alone = {f"{count} unrelated collectors": Unrelated(count, options.scenes) for count in (1, many)}
        for number in range(1 + options.rounds):
            for side in (*sides.values(), *alone.values()):
                side.round(number, counts=number > 0)
        print("| | episodes | CPU s an episode | of the trainer's process | wall s an episode |")
        print("|---|---|---|---|---|")
        for name, side in (sides | alone).items():
            own = f"{side.own_cpu_s / side.episodes:.4f}" if isinstance(side, Side) else ""
            each = [f"{spent / side.episodes:.4f}" for spent in (side.cpu_s, side.wall_s)]
            print(f"| {name} | {side.episodes} | {each[0]} | {own} | {each[1]} |")
        (one, two), (single, pair) = sides.values(), alone.values()
        faster, allowed = one.wall_s / two.wall_s, single.wall_s / pair.wall_s
        print(f"\nCPU an episode: {two.cpu_s / one.cpu_s:.2f} times one worker's (target at most 1.1)")
        print(f"wall: {faster:.2f} times as fast (target at least 1.6 with 2 on a quiet machine)")
        print(f"unrelated collectors: {allowed:.2f} times as fast, {pair.cpu_s / single.cpu_s:.2f} times the CPU")
        print(f"workers against what the machine allows: {faster / allowed:.2f}")
        print(f"load average: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
        for side in (*sides.values(), *alone.values()):
            side.close()


if __name__ == "__main__":
    main()
