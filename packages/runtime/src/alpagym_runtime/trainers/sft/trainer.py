"""Imitation, top to bottom: drive the expert with noise, then regress its plans."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from alpagym_runtime.errors import ConfigError
from alpagym_runtime.random import generator, mix_int
from alpagym_runtime.trainers.base import decision_batch, take
from alpagym_runtime.trainers.sft.config import SftConfig
from alpagym_runtime.trainers.sft.expert import LABEL, NoisyExpert
from alpagym_runtime.types import Episode, EpisodeRequest, ImitatingPolicy, Observation, Sampling

if TYPE_CHECKING:
    from alpagym_runtime.trainers.run import Run

STAGE = "imitation"


class SftTrainer:
    """Trains a policy by imitation; as a trainer of its own, or as the warm start of another."""

    def __init__(self, config: SftConfig) -> None:
        self._config = config

    def fit(self, run: Run) -> None:
        """Evaluate, train, evaluate."""
        run.evaluate_policy("start")
        self.train(run)
        run.evaluate_policy("final")

    def train(self, run: Run) -> None:
        """The stage `imitation`; a step is an epoch, resumed at the epoch where it stopped."""
        config, policy = self._config, run.policy
        if not isinstance(policy, ImitatingPolicy):
            raise ConfigError("cannot be trained by imitation: it has no `imitation_loss`", key="policy")
        if run.stage_done(STAGE):
            return
        observation, target = self._data(run)
        optimiser = torch.optim.AdamW(
            policy.module.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        first = run.begin_stage(STAGE, config.epochs, "epochs", optimiser)
        batches = -(-len(target) // config.batch)
        for epoch in range(first, config.epochs):
            started = time.perf_counter()
            order = generator(run.config.run.seed, 7, epoch).permutation(len(target))
            total, refused = torch.zeros(()), 0
            for b, rows in enumerate(np.array_split(order, batches)):
                rate = _one_cycle((epoch * batches + b) / (config.epochs * batches)) * config.learning_rate
                for group in optimiser.param_groups:
                    group["lr"] = rate
                loss = policy.imitation_loss(take(observation, rows), target[rows]).mean()
                optimiser.zero_grad()
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(policy.module.parameters(), config.gradient_clip)
                if not bool(torch.isfinite(norm)) or not bool(torch.isfinite(loss)):
                    refused += 1
                    continue
                optimiser.step()
                total += loss.detach()
            numbers = {
                "loss": float(total) / max(batches - refused, 1),
                "samples": float(len(target)),
                "steps_refused": float(refused),
            }
            run.end_step(STAGE, epoch + 1, config.epochs, numbers, time.perf_counter() - started, optimiser)

    def _data(self, run: Run) -> tuple[Observation, np.ndarray]:
        """All decisions of noisy expert drives through the training scenes: observations and target plans [B,T,3]."""
        seed = run.config.run.seed
        expert = NoisyExpert(run.policy.spec, self._config)
        core = run.core("train", expert.spec, labels=(LABEL,))
        collector = run.collector(core, expert, actor="expert")
        scenes = core.spec.scenes
        requests = [
            EpisodeRequest(
                scene_id=scene_id,
                horizon_ticks=run.config.expected_valid_steps,
                world_seed=mix_int(seed, 11, number),
                policy_seed=mix_int(seed, 12, number, drive),
            )
            for drive in range(self._config.drives_per_scene)
            for number, scene_id in enumerate(scenes)
        ]
        run.reporter.stage("expert drives", len(requests), "drives")

        def watch(_: Episode) -> None:
            run.reporter.advance()
            run.check_stop()

        episodes = [e for e in collector.collect(requests, Sampling(), watch) if len(e)]
        usable = [e for e in episodes if e.trainable]
        if not usable:
            raise ConfigError(
                f"no scene of the training split gave an expert drive ({len(requests)} tried)", key="dataset"
            )
        observation, _ = decision_batch(usable, drop=(LABEL, f"{LABEL}_mask", "carry_expert_noise"))
        target = np.concatenate([episode.labels[LABEL] for episode in usable])
        keep = np.concatenate([e.labels[f"{LABEL}_mask"].all(axis=1) & e.controls for e in usable])
        return take(observation, np.flatnonzero(keep)), target[keep]


def _one_cycle(progress: float) -> float:
    """Share of the peak rate: up over the first 15 %, then down by a cosine to 1 %."""
    if progress < 0.15:
        return 0.1 + 0.9 * progress / 0.15
    return 0.01 + 0.99 * 0.5 * (1.0 + float(np.cos(np.pi * (progress - 0.15) / 0.85)))
