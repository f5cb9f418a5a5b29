"""PPO in one file, in the manner of CleanRL, on the native vector environment with same-step resets.

    uv run python examples/cleanrl_ppo.py --iterations 2
    uv run python examples/cleanrl_ppo.py --iterations 300 --slots 128

CleanRL's own scripts pin an older Gymnasium; what differs here is how an ended slot's last observation is read:
`info["final_obs"][slot]`, and its numbers in `info["final_info"]`.
"""

from __future__ import annotations

import argparse
import time

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import Tensor, nn
from torch.distributions import Normal

ENV_ID = "alpagym_runtime:alpagym/Embedded-LowDim-v0"


def layer(inputs: int, outputs: int, gain: float) -> nn.Linear:
    """A linear layer with orthogonal weights."""
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    """A Gaussian policy and a value, two networks."""

    def __init__(self, observation: int, action: int) -> None:
        super().__init__()

        def network(outputs: int, gain: float) -> nn.Sequential:
            hidden = [layer(observation, 256, 2**0.5), nn.Tanh(), layer(256, 256, 2**0.5), nn.Tanh()]
            return nn.Sequential(*hidden, layer(256, outputs, gain))

        self.mean, self.value = network(action, 0.01), network(1, 1.0)
        self.log_std = nn.Parameter(torch.full((action,), -1.6))

    def act(self, observation: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """An action and its log-probability [B]."""
        distribution = Normal(self.mean(observation), self.log_std.exp())
        action = distribution.sample() if action is None else action
        return action, distribution.log_prob(action).sum(-1)


def advantages(rewards, values, next_values, over, gamma: float = 0.98, decay: float = 0.95):
    """Generalised advantages [T,N]; `next_values` is the value after each step, 0 where the drive terminated."""
    found, last = torch.zeros_like(rewards), torch.zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_values[t] - values[t]
        last = delta + gamma * decay * ~over[t] * last
        found[t] = last
    return found


def main() -> None:
    """Train and print a line an iteration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    envs = gymnasium.make_vec(ENV_ID, options.slots, autoreset_mode="same_step", action_type="control")
    envs = RecordEpisodeStatistics(envs)
    agent = Agent(envs.single_observation_space.shape[0], envs.single_action_space.shape[0])
    optimizer = torch.optim.Adam(agent.parameters(), lr=6e-4, eps=1e-5)
    observation = torch.from_numpy(envs.reset(seed=options.seed)[0])
    episodes, shape = 0, (options.steps, options.slots)
    for iteration in range(1, options.iterations + 1):
        observations, actions = torch.zeros(*shape, observation.shape[1]), torch.zeros(*shape, 2)
        log_probs, rewards, values, next_values = (torch.zeros(shape) for _ in range(4))
        overs, scores = torch.zeros(shape, dtype=torch.bool), []
        for t in range(options.steps):
            with torch.no_grad():
                action, log_probs[t] = agent.act(observation)
                values[t] = agent.value(observation).squeeze(-1)
            observations[t], actions[t] = observation, action
            fresh, reward, terminated, truncated, info = envs.step(action.clamp(-1.0, 1.0).numpy())
            observation, rewards[t] = torch.from_numpy(fresh), torch.from_numpy(reward)
            over = terminated | truncated
            overs[t] = torch.from_numpy(over)
            following = fresh
            if over.any():
                following = fresh.copy()
                following[over] = np.stack(info["final_obs"][over])
                scores += info["final_info"]["driving_score"][over].tolist()
            with torch.no_grad():
                next_values[t] = agent.value(torch.from_numpy(following)).squeeze(-1)
            next_values[t, torch.from_numpy(terminated)] = 0.0
            episodes += int(over.sum())
        gains = advantages(rewards, values, next_values, overs)
        targets = (gains + values).reshape(-1)
        flat = (observations.flatten(0, 1), actions.flatten(0, 1), log_probs.reshape(-1), gains.reshape(-1))
        for _ in range(4):
            for rows in torch.randperm(options.steps * options.slots).split(1024):
                seen, taken, before, gain = (part[rows] for part in flat)
                ratio = (agent.act(seen, taken)[1] - before).exp()
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                policy_loss = -torch.min(gain * ratio, gain * ratio.clamp(0.8, 1.2)).mean()
                value_loss = 0.5 * (agent.value(seen).squeeze(-1) - targets[rows]).square().mean()
                optimizer.zero_grad()
                (policy_loss + 0.5 * value_loss).backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        score = float(np.mean(scores)) if scores else float("nan")
        print(
            f"iteration {iteration}: {episodes} episodes, driving score {score:.3f}, {time.process_time():.0f} CPU s",
            flush=True,
        )
    assert envs.episode_count == episodes, f"Gymnasium counted {envs.episode_count}, we {episodes}"
    print(f"{episodes} episodes, as Gymnasium's RecordEpisodeStatistics counted")
    envs.close()


if __name__ == "__main__":
    main()
