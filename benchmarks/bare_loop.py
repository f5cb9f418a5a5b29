"""What the framework costs: CPU seconds of GRPO updates, beside a bare loop over the same kernels, renderer and policy.

    uv run python benchmarks/bare_loop.py

The bare loop keeps arrays in lists and knows no episodes, retries, failures, metrics, checkpoints or evaluations. Both
make the same drives with the same rewards and the same number of optimiser steps; they take turns, the first update of
each is left out.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alpagym_host.compose import compose
from alpagym_runtime.random import mix, mix_int
from alpagym_runtime.rollouts.cores import make_policy
from alpagym_runtime.trainers.grpo.advantages import tick_advantages
from alpagym_runtime.trainers.run import Run
from alpagym_runtime.trainers.scenes import scenes_of_step
from alpagym_runtime.types import Decision, EpisodeRequest, Sampling

REWARD = ["~reward.terms.pace", "~reward.terms.off_road"]  # progress and collisions are left
OPTIONS = [*REWARD, "trainer.warm_start=null", "evaluation.every_updates=0", "evaluation.videos=false"]


def bare_update(simulator: Any, policy: Any, optimiser: Any, config: Any, step: int) -> None:
    """One update of GRPO with credit by tick; the loop that the framework is measured against."""
    rollout, trainer = config.rollout, config.trainer.config
    scenes = scenes_of_step(simulator.spec.scenes, {}, rollout.scenes_per_step, 0.0, config.run.seed, step)
    members = range(rollout.group_size)
    requests = [
        EpisodeRequest(s, -1, config.expected_valid_steps, mix_int(1, 4, step, g), mix_int(1, 5, step, g, m))
        for g, s in enumerate(scenes)
        for m in members
    ]
    count, sampling = len(requests), Sampling()
    seeds = np.array([r.policy_seed for r in requests], np.uint64)
    noise, running = np.zeros((count, 4), np.float32), np.ones(count, bool)
    rewards: list[list[float]] = [[] for _ in range(count)]
    seen: list[tuple[np.ndarray, dict[str, np.ndarray], Decision]] = []
    simulator.start(np.arange(count), requests)
    while running.any():
        batch = simulator.receive(max(1, int(running.sum()) // 2), 30.0)
        now, before = batch.measures.values, batch.measures_previous.values
        paid = np.minimum(now["progress"] / 0.8, 1.0) - np.minimum(before["progress"] / 0.8, 1.0)
        paid = paid - (now["collision_count"] - before["collision_count"])
        for row in np.flatnonzero(batch.tick > 0).tolist():
            rewards[batch.slots[row]].append(paid[row])
        running[batch.slots[batch.ended > 0]] = False
        rows = np.flatnonzero(batch.ended == 0)
        if len(rows):
            slots = batch.slots[rows]
            observation = {name: array[rows] for name, array in batch.observation.items()}
            observation["carry_noise"] = noise[slots]
            drawn = mix(seeds[slots], batch.tick[rows].astype(np.uint64), np.zeros(len(rows), np.uint64))
            decisions = policy.act(observation, drawn, sampling)
            noise[slots] = decisions.carry["noise"]
            seen.append((slots, observation, decisions))
            simulator.send(slots, decisions, np.zeros(len(rows), bool))
    paid_by = [np.array(each) for each in rewards]
    groups = [paid_by[g * len(members) : (g + 1) * len(members)] for g in range(len(scenes))]
    by_slot = [a for group in groups for a in tick_advantages(group, trainer.discount, trainer.spread_floor)]
    ticks, advantage = np.zeros(count, np.int64), []
    for slots, _, _ in seen:
        advantage += [by_slot[slot][ticks[slot]] for slot in slots]
        ticks[slots] += 1
    advantage_B = np.array(advantage, np.float32)
    observations = {name: np.concatenate([o[name] for _, o, _ in seen]) for name in seen[0][1]}
    decided = Decision.concatenate([d for _, _, d in seen])
    kept = np.flatnonzero(np.abs(advantage_B) >= trainer.least_advantage)
    order = np.random.default_rng(step).permutation(kept)
    for part in np.array_split(order, max(1, round(len(kept) / trainer.minibatch))):
        score = policy.score({k: v[part] for k, v in observations.items()}, decided.take(part), sampling)
        ratio = torch.exp(score.log_prob[:, 0] - torch.from_numpy(decided.log_prob[part, 0]))
        gain = torch.from_numpy(advantage_B[part])
        loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.module.parameters(), 1.0)
        optimiser.step()


def bare(config: Any, updates: int) -> float:
    """CPU seconds an update of the bare loop."""
    policy = make_policy(config)
    dataset = config.dataset
    dataset.split = "train"
    slots = config.rollout.scenes_per_step * config.rollout.group_size
    simulator = config.simulator.config.build(policy.spec, dataset, slots, ())
    for scene in simulator.spec.scenes:
        simulator.scene_hash(scene)
    optimiser = torch.optim.Adam(policy.module.parameters(), lr=config.trainer.config.learning_rate)
    bare_update(simulator, policy, optimiser, config, 0)
    began = time.process_time()
    for step in range(1, updates + 1):
        bare_update(simulator, policy, optimiser, config, step)
    spent = time.process_time() - began
    simulator.close()
    return spent / updates


class Clock:
    """A reporter that notes the CPU time at which each update was done."""

    def __init__(self) -> None:
        self.marks: list[float] = []
        self._in_grpo = False

    def stage(self, name: str, total: int, unit: str) -> None:
        """Only updates count."""
        self._in_grpo = name == "grpo"

    def advance(self, amount: int = 1, **numbers: float) -> None:
        """An update is done."""
        if self._in_grpo and amount:
            self.marks.append(time.process_time())

    def note(self, text: str) -> None:
        """Nothing."""


def whole(config: Any, updates: int) -> float:
    """CPU seconds an update of `alpagym train`, its logs, checkpoints and everything included."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        Run(config, Path(folder), clock).train()
    return (clock.marks[updates] - clock.marks[0]) / updates


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenes", type=int, default=64)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    sizes = [f"dataset.train_scenes={options.scenes}", "dataset.val_scenes=1", "dataset.test_scenes=1"]
    words = [*OPTIONS, *sizes, f"trainer.updates={options.updates + 1}"]
    spent: dict[str, list[float]] = {"bare loop": [], "alpagym train": []}
    for _ in range(options.turns):
        spent["bare loop"].append(bare(compose(words), options.updates))
        spent["alpagym train"].append(whole(compose(words), options.updates))
    for name, values in spent.items():
        print(f"{name}: " + ", ".join(f"{value:.3f}" for value in values) + " CPU s an update")
    ratio = np.mean(spent["alpagym train"]) / np.mean(spent["bare loop"])
    print(f"ratio: {ratio:.3f} (target at most 1.1); load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")


if __name__ == "__main__":
    main()
