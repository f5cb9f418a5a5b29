# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["alpagym-plugins", "alpagym-runtime[torch]", "ray[rllib]>=2.48,<3"]
#
# [tool.uv.sources]
# alpagym-plugins = { path = "../packages/plugins", editable = true }
# alpagym-runtime = { path = "../packages/runtime", editable = true }
# ///
"""RLlib's PPO with an env runner over the native vector environment (RLlib expects next-step resets, our default).

    uv run --script examples/rllib_ppo.py

Runs some iterations and compares RLlib's count of episodes with the environment's own.
"""

from __future__ import annotations

import argparse
import os
import warnings
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # everything runs in this process

import gymnasium
import ray
from gymnasium.envs.registration import VectorizeMode
from ray.rllib.algorithms.ppo import PPOConfig
from ray.tune.registry import register_env

ENV_ID = "alpagym_runtime:alpagym/Embedded-LowDim-v0"


class CountEnds(gymnasium.vector.VectorWrapper):
    """What the environment itself says: how many drives have ended."""

    ends = 0

    def step(self, actions: Any) -> Any:
        """As the environment's, counted."""
        result = self.env.step(actions)
        self.ends += int((result[2] | result[3]).sum())
        return result


def create(context: dict[str, Any]) -> Any:
    """A vector environment where RLlib names a number of slots, else a single one."""
    arguments = {name: value for name, value in context.items() if name != "num_envs"}
    if "num_envs" not in context:
        return gymnasium.make(ENV_ID, **arguments)
    return CountEnds(gymnasium.make_vec(ENV_ID, context["num_envs"], **arguments))


def main() -> None:
    """Train and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--slots", type=int, default=16)
    options = parser.parse_args()
    register_env("alpagym", create)
    config = (
        PPOConfig()
        .environment("alpagym", env_config={"action_type": "control", "scenes": 64})
        # The runner of this process: with remote ones, CountEnds would count in theirs.
        .env_runners(
            num_env_runners=0,
            num_envs_per_env_runner=options.slots,
            gym_env_vectorize_mode=VectorizeMode.VECTOR_ENTRY_POINT,
        )
        .training(train_batch_size_per_learner=64 * options.slots, minibatch_size=256, num_epochs=4, gamma=0.98)
        .learners(num_learners=0)
        .debugging(seed=1)
    )
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    algorithm = config.build_algo()
    for iteration in range(1, options.iterations + 1):
        found = algorithm.train()["env_runners"]
        episodes = int(found["num_episodes_lifetime"])
        reward = found.get("episode_return_mean", float("nan"))
        print(f"iteration {iteration}: {episodes} episodes, mean return {reward:.3f}", flush=True)
    envs = algorithm.env_runner.env
    while not isinstance(vars(envs).get("ends"), int):  # below RLlib's wrappers; their classes are copies of ours
        envs = envs.env
    assert episodes == envs.ends, f"RLlib counted {episodes} episodes, the environment ended {envs.ends}"
    print(f"{episodes} episodes, as the environment counted")
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
