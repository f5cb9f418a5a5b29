# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["alpagym-plugins", "alpagym-runtime[torch]", "torchrl>=0.10"]
#
# [tool.uv.sources]
# alpagym-plugins = { path = "../packages/plugins", editable = true }
# alpagym-runtime = { path = "../packages/runtime", editable = true }
# ///
"""TorchRL's collector and PPO loss over the native vector environment, resets by mask (its preferred mode).

    uv run --script examples/torchrl_collector.py

Runs some iterations and compares the episodes that the collector saw with those that the environment ended.
"""

from __future__ import annotations

import argparse
import warnings

import gymnasium
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.envs import GymWrapper
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

try:
    from torchrl.collectors import Collector
except ImportError:  # before 0.11
    from torchrl.collectors import SyncDataCollector as Collector

ENV_ID = "alpagym_runtime:alpagym/Embedded-LowDim-v0"


class CountEnds(gymnasium.vector.VectorWrapper):
    """What the environment itself says: how many drives have ended."""

    ends = 0

    def step(self, actions):
        """As the environment's, counted."""
        result = self.env.step(actions)
        self.ends += int((result[2] | result[3]).sum())
        return result

    @property
    def autoreset_mode(self):
        """Where TorchRL looks for it."""
        return self.env.unwrapped.autoreset_mode


def main() -> None:
    """Collect, learn, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--slots", type=int, default=16)
    options = parser.parse_args()
    torch.manual_seed(1)
    envs = CountEnds(
        gymnasium.make_vec(ENV_ID, options.slots, autoreset_mode="disabled", action_type="control", scenes=64)
    )
    env = GymWrapper(envs)
    size, actions = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    network = nn.Sequential(nn.Linear(size, 128), nn.Tanh(), nn.Linear(128, 2 * actions), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=env.action_spec,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -1.0, "high": 1.0},
        return_log_prob=True,
    )
    critic = ValueOperator(nn.Sequential(nn.Linear(size, 128), nn.Tanh(), nn.Linear(128, 1)), ["observation"])
    loss, gae = ClipPPOLoss(actor, critic), GAE(gamma=0.98, lmbda=0.95, value_network=critic)
    optimizer = torch.optim.Adam(loss.parameters(), 3e-4)
    frames = 64 * options.slots
    collector = Collector(env, actor, frames_per_batch=frames, total_frames=options.iterations * frames)
    seen = 0
    for iteration, data in enumerate(collector, 1):
        seen += int(data["next", "done"].sum())
        gae(data)
        for rows in torch.randperm(data.numel()).split(256):
            parts = loss(data.reshape(-1)[rows])
            optimizer.zero_grad()
            sum(value for name, value in parts.items() if name.startswith("loss_")).backward()
            optimizer.step()
        reward = float(data["next", "reward"].mean())
        print(f"iteration {iteration}: {seen} episodes, mean reward {reward:.4f}", flush=True)
    assert seen == envs.ends, f"TorchRL saw {seen} episodes, the environment ended {envs.ends}"
    print(f"{seen} episodes, as the environment counted")
    collector.shutdown()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
