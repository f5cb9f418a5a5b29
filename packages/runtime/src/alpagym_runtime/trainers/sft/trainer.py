"""Imitation, top to bottom: drive the expert with noise, or take stored drives; then regress the plans.

It goes on until the loss on validation drives stops falling, `epochs` at most, and ends with the best epoch's weights,
or after a cool-down with the last ones: at a high rate the weights of one epoch drive much better or worse than the
next one's, whatever their loss.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from alpagym_runtime.errors import ConfigError
from alpagym_runtime.policies.noisy_expert import LABEL
from alpagym_runtime.random import generator, mix_int
from alpagym_runtime.trainers.base import Observations, decision_batch
from alpagym_runtime.trainers.learner import whole_tensor
from alpagym_runtime.trainers.sft.config import SftConfig
from alpagym_runtime.trainers.sft.early_stop import EarlyStop
from alpagym_runtime.trainers.sft.stored import choose, hold_out, hold_still, read_data
from alpagym_runtime.trainers.team import Team, is_shard
from alpagym_runtime.types import Episode, EpisodeRequest, ImitatingPolicy, Sampling

if TYPE_CHECKING:
    from alpagym_runtime.trainers.run import Run

STAGE = "imitation"
RISE_EPOCHS = 0.75
"""In which the rate rises to its peak, where a cool-down follows."""
PORTION = 64
"""Expert drives whose pictures are joined at a time."""

Data = tuple[Observations, np.ndarray]
"""Observations and target plans [B,T,3]."""


class SftTrainer:
    """Trains a policy by imitation; as a trainer of its own, or as the warm start of another."""

    def __init__(self, config: SftConfig) -> None:
        self._config = config

    def fit(self, run: Run) -> None:
        """Evaluate, train, evaluate."""
        run.evaluate_policy("start")
        self.train(run)
        run.conclude()

    def train(self, run: Run) -> None:
        """The stage `imitation`; a step is an epoch, resumed at the epoch where it stopped."""
        config, policy = self._config, run.policy
        if not isinstance(policy, ImitatingPolicy):
            raise ConfigError("cannot be trained by imitation: it has no `imitation_loss`", key="policy")
        if run.stage_done(STAGE):
            return
        observation, target, validation = self._data(run) if config.store is None else self._stored(run)
        learner, team = run.learner(), run.team
        optimiser = torch.optim.AdamW(learner.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
        watch = None
        if validation is not None:
            watch = EarlyStop(policy, *validation, config.patience, config.batch, run.stage_state, team)
        kept = None if watch is None or config.cool_down_epochs else watch.best
        first = run.begin_stage(STAGE, config.epochs, "epochs", optimiser, kept)
        # Rows of the whole team in order: this process's are those from `begin` on.
        sizes = team.gather(len(target))
        begin, count = sum(sizes[: team.rank]), sum(sizes)
        batches = -(-count // config.batch)
        for epoch in range(first, config.epochs):
            started = time.perf_counter()
            order = generator(run.config.run.seed, 7, epoch).permutation(count)
            total, refused = 0.0, 0
            with learner.training():
                for b, rows in enumerate(np.array_split(order, batches)):
                    rate = _share_of_rate(config, epoch + b / batches, run.stage_state.get("cooling"))
                    for group in optimiser.param_groups:
                        group["lr"] = rate * config.learning_rate
                    optimiser.zero_grad()
                    mine = rows[(rows >= begin) & (rows < begin + len(target))] - begin
                    loss = self._backward(run, observation, target, mine, len(rows))
                    norm = whole_tensor(
                        torch.nn.utils.clip_grad_norm_(policy.module.parameters(), config.gradient_clip)
                    )
                    if not bool(torch.isfinite(norm)) or not np.isfinite(loss):
                        refused += 1
                        continue
                    optimiser.step()
                    total += loss
            numbers = {
                "loss": total / max(batches - refused, 1),
                "samples": float(count),
                "steps_refused": float(refused),
            }
            stop = False
            if watch is not None:
                measured, stop = watch.after_epoch(epoch + 1)
                numbers |= measured
            if config.cool_down_epochs:
                cooling = run.stage_state.get("cooling")
                numbers["cooling_down"] = float(cooling is not None)
                if cooling is None and (stop or epoch + 1 >= config.epochs - config.cool_down_epochs):
                    run.stage_state["cooling"] = epoch + 1
                stop = cooling is not None and epoch + 1 >= cooling + config.cool_down_epochs
            elif watch is not None and (stop or epoch + 1 == config.epochs):
                watch.take_best()
            took = time.perf_counter() - started
            run.end_step(STAGE, epoch + 1, config.epochs, numbers, took, optimiser, kept, last=stop)
            if stop:
                break

    def _backward(self, run: Run, observation: Observations, target: np.ndarray, rows: np.ndarray, count: int) -> float:
        """The loss of a batch of `count` rows over the team, of which `rows` are here; leaves its gradient."""
        policy, team = run.policy, run.team
        sharded = any(map(is_shard, policy.module.parameters()))
        share = 0.0
        if len(rows) or sharded:
            # Forwards and backwards of a sharded policy are taken by all at once: who has no row takes one for nothing.
            used = rows if len(rows) else np.zeros(1, np.int64)
            loss = policy.imitation_loss(observation.take(used), target[used]).sum() / count
            loss = loss if len(rows) else loss * 0.0
            (loss * team.size if sharded else loss).backward()  # shards take the mean over the team
            share = float(loss.detach())
        team.add_gradients(policy.module.parameters())
        return float(sum(team.gather(share)))

    def _stored(self, run: Run) -> tuple[Observations, np.ndarray, Data | None]:
        """Decisions of stored episodes, and those of scenes that are held out for validation."""
        config, spec = self._config, run.policy.spec
        files = choose(config)
        hold_still(files, run.directory, run.resuming)
        files, held = hold_out(files, config.validation_share) if config.patience else (files, [])
        files, held = _mine(files, run.team), _mine(held, run.team) if held else []
        run.reporter.note(
            f"imitating {config.target} of {len(files)} episodes in {config.store}, validating on {len(held)}"
        )
        train, *rest = (read_data(part, spec, config.target) for part in (files, held) if part)
        return (*train, rest[0] if rest else None)

    def _data(self, run: Run) -> tuple[Observations, np.ndarray, Data | None]:
        """Decisions of the expert in the training scenes, and in scenes of val for validation."""
        config, horizon = self._config, run.config.expected_valid_steps
        train = self._expert(run, "train", config.drives_per_scene, None)
        if train is None:
            raise ConfigError(f"no scene of the training split gave an expert drive of {horizon} ticks", key="dataset")
        if not config.patience:
            return (*train, None)
        validation = self._expert(run, "val", 1, config.validation_scenes)
        if validation is None:
            run.reporter.note("no scene of val gave an expert drive: imitation makes all its epochs")
        return (*train, validation)

    def _expert(self, run: Run, split: str, drives: int, most: int | None) -> Data | None:
        """Decisions of noisy expert drives through the first `most` scenes of a split; None where there are none."""
        seed, salt = run.config.run.seed, 11 if split == "train" else 31
        expert = self._config.expert(run.policy.spec)
        core = run.core(split, expert.spec, labels=(LABEL,), scenes=most)
        collector = run.collector(core, expert, actor="expert")
        requests = [
            EpisodeRequest(
                scene_id=scene_id,
                horizon_ticks=run.config.expected_valid_steps,
                world_seed=mix_int(seed, salt, number),
                policy_seed=mix_int(seed, salt + 1, number, drive),
            )
            for drive in range(drives)
            for number, scene_id in enumerate(core.spec.scenes[:most])
        ]
        requests = _mine(requests, run.team)
        run.reporter.stage(f"expert drives {split}", len(requests), "drives")

        finished: list[Episode] = []
        waiting: list[Episode] = []
        parts: list[Observations] = []

        def join() -> None:
            parts.append(decision_batch(waiting, (LABEL, f"{LABEL}_mask", "carry_expert_noise"), consume=True)[0])
            waiting.clear()

        def watch(episode: Episode) -> None:
            run.reporter.advance()
            run.check_stop_alone()
            if not episode.trainable:
                return
            finished.append(episode)
            waiting.append(episode)
            # A drive that ends between ticks holds each picture as often as it was seen; not for long.
            if len(waiting) == PORTION:
                join()

        usable = [e for e in collector.collect(requests, Sampling(), watch) if e.trainable]
        everywhere = run.team.gather(len(usable))
        if not sum(everywhere):
            return None
        if not min(everywhere):
            raise ConfigError(
                f"a process of the team has no usable expert drive in {split}: {everywhere} of them each; "
                f"take fewer processes, or more scenes",
                key="topology.processes",
            )
        if waiting:
            join()
        first = dict(zip(map(id, finished), np.cumsum([0, *map(len, finished)]), strict=False))
        # In the order of the requests, whichever drive ended first.
        rows = np.concatenate([first[id(episode)] + np.arange(len(episode)) for episode in usable])
        target = np.concatenate([episode.labels[LABEL] for episode in usable])
        keep = np.concatenate([e.labels[f"{LABEL}_mask"].all(axis=1) & e.controls for e in usable])
        return Observations.concatenate(parts).keep(rows[keep]), target[keep]


def _mine(things: list[Any], team: Team) -> list[Any]:
    """This process's part of a list."""
    part = team.part(len(things))
    if not len(part):
        raise ConfigError(
            f"{team.size} processes cannot share {len(things)} episodes; take fewer", key="topology.processes"
        )
    return things[part.start : part.stop]


def _share_of_rate(config: SftConfig, epochs_made: float, cooling: int | None) -> float:
    """Share of the peak rate after so many epochs; `cooling` is the epoch with which the cool-down began."""
    if not config.cool_down_epochs:
        return _one_cycle(epochs_made / config.epochs)
    up = min(0.1 + 0.9 * epochs_made / RISE_EPOCHS, 1.0)
    return up if cooling is None else up * _fall((epochs_made - cooling) / config.cool_down_epochs)


def _one_cycle(progress: float) -> float:
    """Share of the peak rate: up over the first 15 %, then down by a cosine to 1 %."""
    if progress < 0.15:
        return 0.1 + 0.9 * progress / 0.15
    return _fall((progress - 0.15) / 0.85)


def _fall(progress: float) -> float:
    """From 1 to 0.01, by a cosine."""
    return 0.01 + 0.99 * 0.5 * (1.0 + float(np.cos(np.pi * progress)))
