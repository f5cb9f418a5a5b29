"""Supervised fine-tuning of Alpamayo, top to bottom: samples, words with labels, one loss, one optimiser step.

Stage 1: mean cross-entropy over trajectory labels plus that over the other labels. Stage 2: flow matching of the
expert over the frozen language model's memory. In a team each process takes samples of its own; the loss is the mean
over all forwards of a step, as published.

Source: the two stages of NVlabs/alpamayo-recipes, written anew.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from alpagym_alpamayo_r1.action_expert import training_times
from alpagym_alpamayo_r1.checkpoints import load_backbone, publish
from alpagym_alpamayo_r1.model import AlpamayoModel
from alpagym_alpamayo_r1.policy import AlpamayoPolicy
from alpagym_alpamayo_r1.processing import Batch
from alpagym_alpamayo_r1.prompt import PromptLayout
from alpagym_alpamayo_r1.sft_config import POLICIES, AlpamayoSftConfig, reasoning_problem
from alpagym_alpamayo_r1.sft_data import COT, TARGET, Plan, Samples
from alpagym_alpamayo_r1.sft_schedule import parameter_groups, rate_share
from alpagym_plugins import ConfigError
from alpagym_runtime.random import mix, normal, uniform
from alpagym_runtime.trainers.learner import whole_tensor
from alpagym_runtime.trainers.team import is_shard

if TYPE_CHECKING:
    from alpagym_runtime.trainers.run import Run

NOISE, TIMES = 52, 53  # streams of a sample's seed


class AlpamayoSftTrainer:
    """See the module's text."""

    def __init__(self, config: AlpamayoSftConfig) -> None:
        self._config = config
        self.stage = f"sft_stage{config.stage}"

    def fit(self, run: Run) -> None:
        """Take the weights of stage 1 where they are given, evaluate, train, evaluate."""
        config, policy = self._config, run.policy
        self._check(run)
        if config.stage1_path is not None and not run.resuming:
            load_backbone(policy.module, Path(config.stage1_path).expanduser())
        if config.evaluate:
            run.evaluate_policy("start")
        if not run.stage_done(self.stage):
            self._train(run)
        if config.evaluate:
            run.conclude()

    def _check(self, run: Run) -> None:
        if not isinstance(run.policy, AlpamayoPolicy):
            raise ConfigError(f"must be one of {', '.join(POLICIES)}, got {run.config.policy.type!r}", key="policy")
        if why := reasoning_problem(self._config.components_order, run.config.dataset):
            raise ConfigError("; ".join(why), key="trainer.components_order")
        if self._config.stage == 2 and not run.policy.module.with_expert:
            raise ConfigError("has no action expert to train", key="policy.model.path")

    def _train(self, run: Run) -> None:
        config, policy, team = self._config, run.policy, run.team
        layout, texts = self._layout(policy), "cot" in config.components_order
        core = run.core("train", policy.spec, labels=(TARGET, *((COT,) if texts else ())))
        samples = Samples(core.simulator, config.per_device_batch, texts)
        plan = Plan(
            len(samples.scenes),
            config.per_device_batch,
            config.gradient_accumulation_steps,
            team.size,
            config.epochs,
            config.max_steps,
            run.config.run.seed,
        )
        if run.config.learner.lora is None:
            self._choose_weights(policy.module)
        learner = run.learner()
        optimiser = torch.optim.AdamW(
            parameter_groups(learner.named_parameters(), config),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
        )
        first = run.begin_stage(self.stage, plan.steps, "steps", optimiser)
        publish(run.directory, policy, write=team.writes)
        for step in range(first, plan.steps):
            run.check_stop()
            started = time.perf_counter()
            share = rate_share(step, plan.steps, config)
            for group in optimiser.param_groups:
                group["lr"] = share * group["factor"] * config.learning_rate
            ahead = plan.of_step(step, team.rank) + (plan.of_step(step + 1, team.rank) if step + 1 < plan.steps else [])
            forwards = ahead[: len(plan.of_step(step, team.rank))]
            with learner.training():
                numbers = self._step(run, samples, layout, ahead, forwards, optimiser, step)
            numbers["epoch"] = (step + 1) / plan.steps_an_epoch
            numbers["learning_rate"] = share * config.learning_rate
            took = time.perf_counter() - started
            try:
                run.end_step(self.stage, step + 1, plan.steps, numbers, took, optimiser)
            finally:
                publish(run.directory, policy, write=team.writes)

    def _step(
        self,
        run: Run,
        samples: Samples,
        layout: PromptLayout,
        ahead: list[list[int]],
        forwards: list[list[int]],
        optimiser: torch.optim.Optimizer,
        step: int,
    ) -> dict[str, float]:
        """One optimiser step, or none where a number is not finite; numbers to log."""
        policy, team = run.policy, run.team
        sharded = any(map(is_shard, policy.module.parameters()))
        optimiser.zero_grad()
        sums = np.zeros(3)
        waited = 0.0
        for turn, rows in enumerate(forwards):
            began = time.perf_counter()
            samples.expect([sample for later in ahead[turn:] for sample in later])
            observation, target, texts = samples.read(rows)
            batch = policy.labelled(observation, target, texts, layout)
            waited += time.perf_counter() - began
            seeds = mix(run.config.run.seed, step, turn, team.rank, np.arange(len(rows)))
            with policy.recomputing(), self._precision(policy.module):
                losses = policy.module.within(lambda b=batch, s=seeds: self._losses(policy.module, b, s))
                # Shards take the mean over the team by themselves.
                (losses[0] / (len(forwards) * (1 if sharded else team.size))).backward()
            sums += [float(loss.detach()) for loss in losses]
        team.add_gradients(policy.module.parameters())
        trained = [p for group in optimiser.param_groups for p in group["params"]]
        norm = float(whole_tensor(torch.nn.utils.clip_grad_norm_(trained, self._config.gradient_clip)))
        means = np.mean(team.gather((sums / len(forwards)).tolist()), axis=0)
        fine = bool(np.isfinite(norm) and np.isfinite(means).all())
        if fine:
            optimiser.step()
        numbers = dict(zip(("loss", "loss_trajectory", "loss_text"), means.tolist(), strict=True))
        if self._config.stage == 2 and not self._config.cotrain_vlm:
            numbers = {"loss": numbers["loss"]}
        count = float(sum(team.gather(sum(map(len, forwards)))))
        return numbers | {
            "samples": count,
            "gradient_norm": norm,
            "steps_refused": float(not fine),
            "seconds_data": waited,
        }

    def _losses(self, model: AlpamayoModel, batch: Batch, seeds: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, and its parts over trajectory and text labels."""
        config = self._config
        zero = torch.zeros((), device=batch.input_ids.device)
        total, trajectory, text = zero, zero, zero
        if config.stage == 1 or config.cotrain_vlm:
            words = model.language_loss(batch)
            total, trajectory, text = words.total, words.trajectory, words.text
        if config.stage == 2:
            waypoints = model.future.action_space.waypoints
            noise = normal(seeds, 2 * waypoints, NOISE).reshape(-1, waypoints, 2)
            draws = uniform(seeds, 1, TIMES)[:, 0]
            device = batch.input_ids.device
            flow = model.expert_loss(
                batch,
                torch.as_tensor(noise, dtype=torch.float32, device=device),
                training_times(torch.as_tensor(draws, dtype=torch.float32, device=device)),
                train_backbone=config.cotrain_vlm and not config.stop_grad_from_vlm,
            )
            total = total + flow.mean()
        return total, trajectory, text

    def _layout(self, policy: AlpamayoPolicy) -> PromptLayout:
        config = self._config
        order = tuple(name for name in config.components_order if name != "image" or policy.spec.cameras)
        return PromptLayout(
            order,
            tuple(config.components_prompt),
            tuple(config.label_components),
            camera_names=policy.layout.camera_names,
            frames=policy.layout.frames,
        )

    def _choose_weights(self, model: AlpamayoModel) -> None:
        """Which weights have gradients in this stage."""
        for name, parameter in model.named_parameters():
            backbone = name.startswith("vlm.")
            parameter.requires_grad_(backbone if self._config.stage == 1 else self._config.cotrain_vlm or not backbone)

    def _precision(self, model: AlpamayoModel) -> torch.autocast:
        weights = next(model.parameters())
        wide = self._config.bf16 and weights.dtype == torch.float32
        return torch.autocast(weights.device.type, torch.bfloat16, enabled=wide)
