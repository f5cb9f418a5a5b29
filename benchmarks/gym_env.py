"""Speed of the Gymnasium environments, whole steps with rewards and resets, in CPU seconds, beside the peers.

    uv run --with highway-env --with envpool python benchmarks/gym_env.py

Suite `bench`: 32 moving, reacting road users in each scene, every kind of reward term, decisions of 0.1 s, automatic
resets, zero actions. Highway-env's `highway-v0` and EnvPool's C++ port of it (`Highway-v0`) drive their own traffic;
their decision lasts 1 s, 15 inner steps: a rate of theirs is not one of ours. Peers that are not installed are named.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import gymnasium
import numpy as np

ENV_ID = "alpagym_runtime:alpagym/Embedded-v0"
EVERY_TERM = {
    "progress": {"type": "progress", "scale": 1.0, "full_at": 0.8},
    "collision": {"type": "collision", "scale": -1.0},
    "at_fault": {"type": "collision", "scale": -1.0, "at_fault": True},
    "off_road": {"type": "off_road", "scale": -1.0},
    "comfort": {"type": "comfort", "scale": -0.01},
    "distance_to_gt": {"type": "distance_to_gt", "scale": -0.01},
    "pace": {"type": "measure", "scale": -0.03, "measure": "along_track_error_m", "absolute": True, "span": 7.0},
}
BENCH = {"dataset": "road", "suite": "bench", "horizon": 60, "control_period_us": 100_000, "reward": EVERY_TERM}


def rate(step: Callable[[], int], seconds: float) -> float:
    """Env-steps a CPU second, the best of three spans; the first ones make scenes and compile."""
    best = 0.0
    for _ in range(3):
        begun, steps = time.process_time(), 0
        while time.process_time() - begun < seconds:
            steps += step()
        best = max(best, steps / (time.process_time() - begun))
    return best


def vector(slots: int, scenes: int, action_type: str, seconds: float, **arguments: object) -> tuple[float, float]:
    """Env-steps a CPU second of the native vector environment, and the mean length of its episodes."""
    envs = gymnasium.make_vec(ENV_ID, slots, action_type=action_type, scenes=scenes, **BENCH, **arguments)
    envs.reset(seed=1)
    for scene in range(0, scenes, slots):
        names = [f"road-bench-{(scene + i) % scenes:06d}" for i in range(slots)]
        envs.reset(options={"scenes": names})
    actions = np.zeros(envs.action_space.shape, np.float32)
    ends = [0, 0]

    def step() -> int:
        _, _, terminated, truncated, _ = envs.step(actions)
        ends[0] += slots
        ends[1] += int((terminated | truncated).sum())
        return slots

    found = rate(step, seconds)
    envs.close()
    return found, ends[0] / max(ends[1], 1)


def single(seconds: float, **arguments: object) -> float:
    """Steps a CPU second of one environment through gymnasium.make, every wrapper on."""
    env = gymnasium.make(ENV_ID, cameras=[], **arguments)
    action = np.zeros(env.action_space.shape, np.float32)
    seeds = iter(range(10**9))
    env.reset(seed=0)

    def step() -> int:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset(seed=next(seeds) % 32)
        return 1

    return rate(step, seconds)


def highway(seconds: float) -> float | None:
    """Decisions a CPU second of highway-v0."""
    try:
        import highway_env  # noqa: F401
    except ImportError:
        return None
    env = gymnasium.make("highway-v0")
    env.reset(seed=1)

    def step() -> int:
        _, _, terminated, truncated, _ = env.step(1)
        if terminated or truncated:
            env.reset()
        return 1

    return rate(step, seconds)


def pool(slots: int, seconds: float) -> float | None:
    """Decisions a CPU second of EnvPool's Highway-v0 with one thread."""
    try:
        import envpool
    except ImportError:
        return None
    if "Highway-v0" not in envpool.list_all_envs():
        return None
    envs = envpool.make("Highway-v0", env_type="gymnasium", num_envs=slots, num_threads=1)
    envs.reset()
    actions = np.ones(slots, np.int32)

    def step() -> int:
        envs.step(actions)
        return slots

    return rate(step, seconds)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="CPU seconds a span, three spans a row")
    parser.add_argument("--scenes", type=int, default=33)
    options = parser.parse_args()
    for action_type in ("control", "unicycle"):
        steps, length = vector(256, options.scenes, action_type, options.seconds)
        print(
            f"vector 256 × 32 agents, {action_type:9} {steps:10,.0f} env-steps/CPU-s (episodes of {length:.0f})",
            flush=True,
        )
    steps, _ = vector(256, options.scenes, "control", options.seconds, copy=False)
    print(f"the same, control, copy=False      {steps:10,.0f} env-steps/CPU-s", flush=True)
    print(f"single, control                    {single(options.seconds, action_type='control'):10,.0f} steps/CPU-s")
    print(f"single, unicycle                   {single(options.seconds):10,.0f} steps/CPU-s", flush=True)
    for name, found in (
        ("highway-v0", highway(options.seconds)),
        ("EnvPool Highway-v0, 64", pool(64, options.seconds)),
    ):
        print(f"{name:34} " + ("not installed" if found is None else f"{found:10,.1f} decisions/CPU-s"), flush=True)


if __name__ == "__main__":
    main()
