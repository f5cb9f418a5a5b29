# /// script
# requires-python = ">=3.12,<3.14"
# dependencies = ["alpagym-plugins", "alpagym-runtime[torch]", "lerobot[dataset]>=0.6,<0.7"]
#
# [tool.uv.sources]
# alpagym-plugins = { path = "../packages/plugins", editable = true }
# alpagym-runtime = { path = "../packages/runtime", editable = true }
# ///
"""LeRobot's evaluation of an ACT policy: `make_env` by config, preprocessing, batched rollouts, success rate.

    uv run --script examples/lerobot_eval.py --episodes 8                  # same-step resets, SyncVectorEnv
    uv run --script examples/lerobot_eval.py --native                      # the native vector environment

The policy has random weights and is shrunk to keep speed and heading (its actions are scaled by `--scale`), so the rate
is about that of constant speed; put a trained one in its place. `--cameras front` adds pictures. `make_env` at the end
of the file is what an environment on LeRobot's EnvHub exposes.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
import torch
from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
from lerobot.envs.configs import EnvConfig
from lerobot.envs.factory import make_env as make_lerobot_env
from lerobot.envs.factory import make_env_pre_post_processors
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.factory import make_pre_post_processors
from lerobot.scripts.lerobot_eval import eval_policy

ENV_ID = "alpagym/Embedded-LeRobot-v0"


@EnvConfig.register_subclass("alpagym")
@dataclass
class AlpaGymConfig(EnvConfig):
    """AlpaGym's embedded world for LeRobot."""

    task: str | None = "Embedded-LeRobot-v0"
    fps: int = 5
    cameras: list[str] = field(default_factory=list)
    suite: str = "test"

    @property
    def package_name(self) -> str:
        """Importing it registers the environments."""
        return "alpagym_runtime"

    @property
    def gym_id(self) -> str:
        """See `package_name`."""
        return ENV_ID

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        """Arguments of the environment."""
        return {"action_type": "control", "suite": self.suite, "cameras": self.cameras}


def policy_of(space: gymnasium.spaces.Dict) -> ACTPolicy:
    """A small ACT for the space, random weights."""
    inputs = {
        "observation.state": PolicyFeature(FeatureType.STATE, space["agent_pos"].shape),
        "observation.environment_state": PolicyFeature(FeatureType.ENV, space["environment_state"].shape),
    }
    for name, picture in (space["pixels"].spaces if "pixels" in space.spaces else {}).items():
        height, width, _ = picture.shape
        inputs[f"observation.images.{name}"] = PolicyFeature(FeatureType.VISUAL, (3, height, width))
    config = ACTConfig(
        input_features=inputs,
        output_features={"action": PolicyFeature(FeatureType.ACTION, (2,))},
        normalization_mapping=dict.fromkeys(("STATE", "ENV", "VISUAL", "ACTION"), NormalizationMode.IDENTITY),
        dim_model=64,
        n_heads=4,
        dim_feedforward=128,
        n_encoder_layers=1,
        n_vae_encoder_layers=1,
        chunk_size=5,
        n_action_steps=5,
        pretrained_backbone_weights=None,
        device="cpu",
        push_to_hub=False,
    )
    return ACTPolicy(config)


def main() -> None:
    """Evaluate and print the success rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--cameras", nargs="*", default=[])
    parser.add_argument("--scale", type=float, default=0.0)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.manual_seed(1)
    config = AlpaGymConfig(cameras=options.cameras)
    if options.native:
        envs = make_env(options.envs, cfg=config)
    else:
        envs = make_lerobot_env(config, n_envs=options.envs, use_async_envs=options.asynchronous)["alpagym"][0]
    policy = policy_of(envs.single_observation_space).eval()
    with torch.no_grad():
        policy.model.action_head.weight.mul_(options.scale)
        policy.model.action_head.bias.mul_(options.scale)
    pre, post = make_pre_post_processors(policy.config)
    env_pre, env_post = make_env_pre_post_processors(config, policy.config)
    found = eval_policy(envs, policy, env_pre, env_post, pre, post, n_episodes=options.episodes, start_seed=1)
    total = found["aggregated"]
    lengths = [episode["sum_reward"] for episode in found["per_episode"]]
    print(f"{len(lengths)} episodes, mean return {np.mean(lengths):.3f}, success rate {total['pc_success']:.1f} %")
    envs.close()


def make_env(n_envs: int = 1, use_async_envs: bool = False, cfg: Any = None) -> gymnasium.vector.VectorEnv:
    """What LeRobot calls in an `env.py` from its hub; native, so nothing runs in other processes."""
    arguments = {"action_type": "control"} if cfg is None else cfg.gym_kwargs
    return gymnasium.make_vec(f"alpagym_runtime:{ENV_ID}", n_envs, autoreset_mode="same_step", **arguments)


if __name__ == "__main__":
    main()
