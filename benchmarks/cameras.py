"""What pictures cost: whole environment steps with two cameras, and batches of small pictures; CPU seconds, one thread.

    uv run python benchmarks/cameras.py [--scenes 22] [--steps 40]

Each figure is of the process's CPU time, kinds of steps in turn, scene by scene. `calib` is a fixed piece of Python
and NumPy that takes 4 to 6 ms on an idle core of the machine that docs/benchmarks.md names: divide by it to compare
machines.
"""

from __future__ import annotations

import argparse
import os
import resource
import time

# A thread of OpenBLAS that waits for more work spins: 45 ms of CPU that would be counted with the steps after a reset.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from alpagym_runtime.envs.driving_env import DrivingEnv
from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.embedded.camera_config import CamerasConfig
from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
from alpagym_runtime.types import Ended, EpisodeRequest, PolicySpec

PAIR = ["camera_front_wide_120fov", "camera_front_tele_30fov"]


def calib_ms() -> float:
    """Median CPU ms of a fixed piece of work."""
    times = []
    for _ in range(9):
        began = time.process_time()
        total = 0
        for i in range(60_000):
            total += i * i % 7
        np.sort(np.random.default_rng(0).random(30_000))
        times.append((time.process_time() - began) * 1e3)
    return float(np.median(times))


def env_steps(kinds: list[tuple[list[str], tuple[int, int], str]], scenes: int, steps: int) -> None:
    """Whole `env.step` at 10 Hz over suite `test` of the roads, rewards included: (cameras, size, encoding) in turn."""
    envs = [
        DrivingEnv(
            dataset="road",
            suite="test",
            scenes=scenes,
            cameras=cameras,
            camera_size=size,
            camera_options={"encoding": encoding},
            control_period_us=100_000,
            horizon=steps,
        )
        for cameras, size, encoding in kinds
    ]
    times: list[list[float]] = [[] for _ in kinds]
    quads: list[list[float]] = [[] for _ in kinds]
    action = np.zeros(16, np.float32)
    for number in range(scenes):
        for env, (cameras, _, _), spent, drawn in zip(envs, kinds, times, quads, strict=True):
            env.reset(seed=number, options={"scene_id": f"road-test-{number:06d}"})
            assert env._core is not None
            stream = env._core.simulator._cameras  # type: ignore[attr-defined]
            for _ in range(steps):
                before = 0 if stream is None else stream.quads
                began = time.process_time()
                *_, terminated, truncated, _ = env.step(action)
                spent.append((time.process_time() - began) * 1e3)
                if stream is not None:
                    drawn.append((stream.quads - before) / len(cameras))
                if terminated or truncated:
                    break
    for env, (cameras, size, encoding), spent, drawn in zip(envs, kinds, times, quads, strict=True):
        env.close()
        name = f"{len(cameras)} x {size[0]}x{size[1]} {encoding}" if cameras else "no camera"
        median, mean = float(np.median(spent)), float(np.mean(spent))
        print(
            f"env.step {name:22s} median {median:6.2f} ms, mean {mean:6.2f} ms = {100.0 / mean:6.1f} x real time, "
            f"{np.mean(drawn) if drawn else 0:5.0f} quads a picture, {len(spent)} steps",
            flush=True,
        )


def batch(slots: int, size: tuple[int, int], scenes: int, ticks: int) -> None:
    """A simulator of many slots with one small camera, two frames 0.2 s apart: the newest is rendered each tick."""
    spec = PolicySpec(
        ("ego_history_rig", "ego_dynamics_rig", "route_rig"),
        cameras={"front": size},
        frames=2,
        frame_step_us=200_000,
    )
    dataset = DatasetSection(split="train", train_scenes=scenes)
    times = {}
    for name, used in (("with", spec), ("without", PolicySpec(spec.fields))):
        simulator = EmbeddedConfig(cameras=CamerasConfig()).build(used, dataset, slots, ())
        ids = simulator.spec.scenes
        taken = []
        for first in range(0, scenes, slots // 8):
            requests = [EpisodeRequest(ids[(first + i // 8) % scenes], horizon_ticks=ticks + 1) for i in range(slots)]
            simulator.start(np.arange(slots), requests)
            simulator.receive(slots, 10.0)
            rows = np.arange(slots)
            for _ in range(ticks):
                plan = np.zeros((len(rows), 64, 3), np.float32)
                plan[:, :, 0] = 0.7 * np.arange(1, 65)
                simulator.send(rows, plan_decision(plan), np.zeros(len(rows), bool))
                began = time.process_time()
                got = simulator.receive(len(rows), 10.0)
                taken.append((time.process_time() - began) * 1e3 / len(got))
                rows = got.slots[got.ended == Ended.RUNNING]
                if not len(rows):
                    break
        simulator.close()
        times[name] = float(np.median(taken))
    print(
        f"{slots} slots, {size[0]}x{size[1]}: {times['with'] - times['without']:.3f} ms a picture "
        f"(tick {times['with']:.3f} ms a slot, {times['without']:.3f} without), {scenes} scenes, "
        f"peak RSS {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MB",
        flush=True,
    )


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenes", type=int, default=22)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--train-scenes", type=int, default=448)
    arguments = parser.parse_args()
    print(f"calib {calib_ms():.2f} ms", flush=True)
    batch(256, (48, 96), arguments.train_scenes, 3)
    kinds = [
        ([], (96, 160), "raw"),
        (["front"], (96, 160), "raw"),
        (PAIR, (320, 512), "raw"),
        (PAIR, (320, 512), "jpeg95"),
    ]
    env_steps(kinds, arguments.scenes, arguments.steps)
    print(f"calib {calib_ms():.2f} ms", flush=True)


if __name__ == "__main__":
    main()
