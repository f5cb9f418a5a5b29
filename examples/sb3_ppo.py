"""PPO of Stable-Baselines3 on the default road scenes, state only, and what it gains over constant speed.

    uv run python examples/sb3_ppo.py                        # 10 CPU minutes
    uv run python examples/sb3_ppo.py --cpu-minutes 1 --envs dummy

`--envs dummy` is Stable-Baselines3's own vector of single environments, unmodified; `native` (default) puts the same
episodes behind its interface at several times the speed. Prints the driving score on 256 test scenes, mean action, with
the paired 95 % interval of the gain.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small networks: one thread is faster than two

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv

from alpagym_runtime.rollouts.evaluation import interval

ENV_ID = "alpagym_runtime:alpagym/Embedded-LowDim-v0"
TEST_SCENES = 256


class NativeVecEnv(VecEnv):
    """A native vector environment as Stable-Baselines3 wants it: same-step resets, a list of infos."""

    def __init__(self, envs: gymnasium.vector.VectorEnv) -> None:
        self.envs = envs
        self.seed_next: int | None = None
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    def reset(self) -> np.ndarray:
        observation, _ = self.envs.reset(seed=self.seed_next)
        self.seed_next = None
        return observation

    def seed(self, seed: int | None = None) -> list[int | None]:
        self.seed_next = seed
        return [seed] * self.num_envs

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        observation, rewards, terminated, truncated, info = self.envs.step(self.actions)
        over = terminated | truncated
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for row in np.flatnonzero(over):
            infos[row] = {
                "terminal_observation": info["final_obs"][row],
                "TimeLimit.truncated": bool(truncated[row] and not terminated[row]),
                "driving_score": float(info["final_info"]["driving_score"][row]),
            }
        return observation, rewards.astype(np.float32), over, infos

    def close(self) -> None:
        self.envs.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self.envs, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError("the slots of a native environment have no attributes of their own")

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        return [getattr(self.envs, method_name)(*args, **kwargs)] * len(list(self._get_indices(indices)))

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        return [False] * len(list(self._get_indices(indices)))


class StopAtCpuTime(BaseCallback):
    """Ends `learn` when the process has used so many CPU seconds, and says now and then how it goes."""

    def __init__(self, cpu_s: float) -> None:
        super().__init__()
        self.cpu_s, self.scores, self.episodes, self.told = cpu_s, [], 0, 0.0

    def _on_step(self) -> bool:
        for done, info in zip(self.locals["dones"], self.locals["infos"], strict=True):
            if done:
                self.episodes += 1
                self.scores.append(info["driving_score"])
        used = time.process_time()
        if used > self.told + 30.0:
            self.told = used
            rate = self.num_timesteps / used
            score = np.mean(self.scores[-2000:]) if self.scores else float("nan")
            print(
                f"{used:5.0f} CPU s  {self.num_timesteps:9d} steps ({rate:.0f}/s)  {self.episodes} episodes  "
                f"sampled driving score {score:.3f}",
                flush=True,
            )
        return used < self.cpu_s


def driving_scores(act: Any, arguments: dict[str, Any]) -> np.ndarray:
    """[256] driving score of each test scene under `act(observations) -> actions`."""
    envs = gymnasium.make_vec(ENV_ID, TEST_SCENES, suite="test", autoreset_mode="next_step", **arguments)
    scenes = [f"procedural-test-{i:06d}" for i in range(TEST_SCENES)]
    observation, _ = envs.reset(seed=0, options={"scenes": scenes})
    scores = np.full(TEST_SCENES, np.nan)
    while np.isnan(scores).any():
        observation, _, _, _, info = envs.step(act(observation))
        if "ended" in info:
            first = info["_ended"] & np.isnan(scores)
            scores[first] = info["driving_score"][first]
    envs.close()
    return scores


def main() -> None:
    """Train, evaluate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-minutes", type=float, default=10.0)
    parser.add_argument("--envs", choices=("native", "dummy"), default="native")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    arguments = {"action_type": "control"}
    if options.envs == "native":
        envs: VecEnv = NativeVecEnv(gymnasium.make_vec(ENV_ID, options.slots, autoreset_mode="same_step", **arguments))
    else:
        envs = make_vec_env(ENV_ID, options.slots, env_kwargs=arguments)
    model = PPO(
        "MlpPolicy",
        envs,
        n_steps=64,
        batch_size=1024,
        n_epochs=6,
        gamma=0.98,
        gae_lambda=0.95,
        learning_rate=6e-4,
        clip_range=0.2,
        ent_coef=0.0,
        max_grad_norm=0.5,
        # A zero mean keeps speed and heading; wide noise would only leave the road.
        policy_kwargs={"net_arch": [256, 256], "activation_fn": torch.nn.Tanh, "log_std_init": -1.6},
        seed=options.seed,
        device="cpu",
    )
    watch = StopAtCpuTime(60.0 * options.cpu_minutes)
    model.learn(10**9, callback=watch)
    trained_cpu_s = time.process_time()
    learnt = driving_scores(lambda observation: model.predict(observation, deterministic=True)[0], arguments)
    constant = driving_scores(lambda observation: np.zeros((len(observation), 2), np.float32), arguments)
    gain = interval(learnt - constant, np.arange(TEST_SCENES), 2000)
    print(f"{watch.episodes} episodes, {model.num_timesteps} steps in {trained_cpu_s:.0f} CPU s")
    print(f"driving score on {TEST_SCENES} test scenes: {learnt.mean():.3f}, constant speed {constant.mean():.3f}")
    print(f"gain {gain['mean']:.3f} [{gain['low']:.3f}, {gain['high']:.3f}]")


if __name__ == "__main__":
    main()
