"""GRPO, top to bottom: groups of drives, advantages within each group, a clipped step.

Axes: S scenes, G members of a group, B decisions.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from alpagym_runtime.random import generator, mix_int
from alpagym_runtime.trainers.base import Observations, decision_batch
from alpagym_runtime.trainers.grpo.advantages import group_advantages, tick_advantages
from alpagym_runtime.trainers.grpo.config import GrpoConfig
from alpagym_runtime.trainers.grpo.loss import LossParts, grpo_loss
from alpagym_runtime.trainers.grpo.scenes import scenes_of_step, spreads_of
from alpagym_runtime.trainers.metrics import drive_numbers
from alpagym_runtime.trainers.sft.trainer import SftTrainer
from alpagym_runtime.types import Decision, Episode, EpisodeRequest, Sampling, TrainablePolicy

if TYPE_CHECKING:
    from alpagym_runtime.trainers.run import Run

STAGE = "grpo"


@dataclass
class StepData:
    """The decisions of a step that are worth a gradient, and counts of what was left out."""

    observation: Observations
    decisions: Decision | None
    advantage_B: NDArray[np.float32]
    sampling: Sampling
    counts: dict[str, float]


class GrpoTrainer:
    """See the module's text."""

    def __init__(self, config: GrpoConfig) -> None:
        self._config = config

    def fit(self, run: Run) -> None:
        """Evaluate, warm start, evaluate, train, evaluate."""
        run.evaluate_policy("start")
        if self._config.warm_start is not None:
            SftTrainer(self._config.warm_start).train(run)
            run.evaluate_policy("warm_start")
        if not run.stage_done(STAGE):
            self._train(run)
        run.conclude()

    def _train(self, run: Run) -> None:
        config, policy = self._config, run.policy
        core = run.core("train", policy.spec)
        collector = run.collector(core, policy)
        optimiser = torch.optim.Adam(policy.module.parameters(), lr=config.learning_rate)
        reference = copy.deepcopy(policy.module) if config.kl_weight > 0.0 else None
        first = run.begin_stage(STAGE, config.updates, "updates", optimiser, reference)
        spreads, spent_before = run.stage_state.setdefault("spreads", {}), run.stage_state.get("spent_s", 0.0)
        began = time.process_time()
        for step in range(first, config.updates):
            run.check_stop()
            started = time.perf_counter()
            share = _progress(config, step, run.stage_state.get("spent_s", 0.0))
            sampling = Sampling("sample", _towards(config.temperature, config.final_temperature_share, share))
            collector.counts.clear()
            requests = self._requests(run, core.spec.scenes, spreads, step)
            handles = [run.transport.send(e) for e in collector.collect(requests, sampling)]
            episodes = [run.transport.receive(handle) for handle in handles]
            for handle in handles:
                run.transport.discard(handle)
            drove = time.perf_counter()
            for group in optimiser.param_groups:
                group["lr"] = _towards(config.learning_rate, config.final_rate_share, share)
            spreads.update(spreads_of(episodes))
            data = select(episodes, config, run.config.rollout.minimum_group)
            numbers = (
                drive_numbers(episodes, policy.version)
                | data.counts
                | {f"episodes_{k}": float(v) for k, v in collector.counts.items()}
            )
            if len(data.advantage_B):
                order_seed = mix_int(run.config.run.seed, 9, step)
                with collector.paused():
                    numbers |= optimise(policy, optimiser, data, config, order_seed, reference)
                    policy.version += 1
            elif data.counts["groups_informative"] == 0:
                dropped, groups = int(data.counts["groups_dropped"]), int(data.counts["groups"])
                run.reporter.note(
                    f"step {step + 1}: nothing to learn from: {dropped} of {groups} groups have too few valid "
                    "episodes, the rewards of the others are equal"
                )
            numbers |= {"seconds_drive": drove - started, "seconds_train": time.perf_counter() - drove}
            if config.budget_s:
                run.stage_state["spent_s"] = spent_before + time.process_time() - began
            last = 0.0 < config.budget_s <= run.stage_state.get("spent_s", 0.0)
            seconds = time.perf_counter() - started
            # An evaluation and the next drives need the room: pictures of a step take up to 0.5 GB.
            del episodes, data
            run.end_step(STAGE, step + 1, config.updates, numbers, seconds, optimiser, reference, last)
            if last:
                break

    def _requests(
        self, run: Run, scenes: tuple[str, ...], spreads: Mapping[str, float], step: int
    ) -> list[EpisodeRequest]:
        """S × G requests, a function of the seed, the step and how much the groups of each scene differed so far."""
        rollout, seed = run.config.rollout, run.config.run.seed
        chosen = scenes_of_step(scenes, spreads, rollout.scenes_per_step, self._config.scene_focus, seed, step)
        return [
            EpisodeRequest(
                scene_id=scene,
                horizon_ticks=run.config.expected_valid_steps,
                world_seed=mix_int(seed, 4, step, group),
                policy_seed=mix_int(seed, 5, step, group, member),
                group_id=group,
                member=member,
            )
            for group, scene in enumerate(chosen)
            for member in range(rollout.group_size)
        ]


def _progress(config: GrpoConfig, step: int, spent_s: float) -> float:
    """How much of the stage is over, in [0, 1], by steps or by the budget, whichever is nearer its end."""
    by_steps = step / max(config.updates - 1, 1)
    return min(max(by_steps, spent_s / config.budget_s if config.budget_s else 0.0), 1.0)


def _towards(start: float, final_share: float, progress: float) -> float:
    """On the line from `start` to `final_share` of it."""
    return start * (1.0 + progress * (final_share - 1.0))


def select(episodes: list[Episode], config: GrpoConfig, minimum_group: int) -> StepData:
    """Advantages within each group, and the decisions whose advantage is worth a gradient.

    Void, faulty-from-the-start and non-finite episodes leave their group and are counted; a group below `minimum_group`
    is dropped and counted.
    """
    groups: dict[int, list[Episode]] = defaultdict(list)
    counts = dict.fromkeys(("void", "initial_fault", "non_finite", "groups_dropped", "groups_informative"), 0.0)
    for episode in episodes:
        members = groups[episode.request.group_id]  # A group that is wholly void is a group too.
        if not episode.trainable:
            counts["initial_fault" if episode.initial_fault else "void"] += 1
        elif not np.isfinite(episode.rewards).all():
            counts["non_finite"] += 1
        else:
            members.append(episode)
    chosen: list[Episode] = []
    advantages: list[NDArray[np.float64]] = []
    for members in groups.values():
        if len(members) < minimum_group:
            counts["groups_dropped"] += 1
            continue
        per_episode = group_advantages([episode.rewards.sum() for episode in members])
        counts["groups_informative"] += bool(np.any(per_episode != 0.0))
        if config.credit == "episode":
            per_tick = [np.full(len(e), a) for e, a in zip(members, per_episode, strict=True)]
        else:
            per_tick = tick_advantages([e.rewards for e in members], config.discount, config.spread_floor)
        chosen += members
        advantages += per_tick
    counts["groups"] = float(len(groups))
    if not chosen:
        return StepData(Observations({}), None, np.zeros(0, np.float32), Sampling(), counts)
    assert len({episode.sampling for episode in chosen}) == 1, "a step's episodes were sampled in different ways"
    advantage = np.concatenate(advantages)
    controls = np.concatenate([episode.controls for episode in chosen])
    rows = np.flatnonzero(controls & (np.abs(advantage) >= config.least_advantage) & (advantage != 0.0))
    observation, decisions = decision_batch(chosen)
    counts["decisions"], counts["decisions_kept"] = float(len(advantage)), float(len(rows))
    kept = advantage[rows].astype(np.float32)
    return StepData(observation.keep(rows), decisions.take(rows), kept, chosen[0].sampling, counts)


def optimise(
    policy: TrainablePolicy,
    optimiser: torch.optim.Optimizer,
    data: StepData,
    config: GrpoConfig,
    order_seed: int,
    reference: torch.nn.Module | None = None,
) -> dict[str, float]:
    """`epochs` passes in minibatches over a step's decisions; returns numbers to log.

    A minibatch whose loss, log-probabilities or gradient are not finite makes no optimiser step and is counted; one in
    which no factor of any decision counts makes none either.
    """
    assert data.decisions is not None
    count = len(data.advantage_B)
    valid = np.asarray(data.decisions.log_prob_mask.any(axis=1))
    logged: list[dict[str, float]] = []
    stopped, refused = 0.0, 0.0
    for epoch in range(config.epochs):
        order = generator(order_seed, epoch).permutation(count)
        for rows in np.array_split(order, max(1, round(count / config.minibatch))):
            optimiser.zero_grad()
            rows = rows[valid[rows]]
            if not len(rows):
                continue
            finite, pieces = True, []
            micro = config.micro_batch or len(rows)
            for start in range(0, len(rows), micro):
                piece, entropy = _loss(policy, data, rows[start : start + micro], len(rows), config, reference)
                finite = finite and piece.finite
                if finite:
                    piece.loss.backward()
                pieces.append((piece, entropy))
            norm = torch.nn.utils.clip_grad_norm_(policy.module.parameters(), config.gradient_clip)
            if not finite or not bool(torch.isfinite(norm)):
                refused += 1
                optimiser.zero_grad()
                continue
            optimiser.step()
            logged.append(_merge(pieces) | {"gradient_norm": float(norm), "valid": float(len(rows))})
            if logged[-1]["kl"] > config.kl_stop:
                stopped = 1.0
                break
        if stopped:
            break
    numbers = {"steps_refused": refused, "kl_stopped": stopped}
    if logged:
        weights = [part["valid"] for part in logged]
        for name in ("loss", "kl", "clip_share", "entropy", "ratio_mean"):
            numbers[name] = float(np.average([part[name] for part in logged], weights=weights))
        numbers["ratio_min"] = min(part["ratio_min"] for part in logged)
        numbers["ratio_max"] = max(part["ratio_max"] for part in logged)
        numbers["gradient_norm"] = float(np.mean([part["gradient_norm"] for part in logged]))
    return numbers


def _merge(pieces: list[tuple[LossParts, float]]) -> dict[str, float]:
    """The numbers of a minibatch from its micro-batches, whose losses are shares of one sum."""
    weights = [part.valid for part, _ in pieces]
    return {
        "loss": sum(float(part.loss.detach()) for part, _ in pieces),
        "kl": float(np.average([part.kl_old for part, _ in pieces], weights=weights)),
        "clip_share": float(np.average([part.clip_share for part, _ in pieces], weights=weights)),
        "entropy": float(np.average([entropy for _, entropy in pieces], weights=weights)),
        "ratio_mean": float(np.average([part.ratio_mean for part, _ in pieces], weights=weights)),
        "ratio_min": min(part.ratio_min for part, _ in pieces),
        "ratio_max": max(part.ratio_max for part, _ in pieces),
    }


def _loss(
    policy: TrainablePolicy,
    data: StepData,
    rows: NDArray[np.int64],
    count: int,
    config: GrpoConfig,
    reference: torch.nn.Module | None,
) -> tuple[LossParts, float]:
    assert data.decisions is not None
    observation, decisions = data.observation.take(rows), data.decisions.take(rows)
    score = policy.score(observation, decisions, data.sampling)
    device = score.log_prob.device
    before = None
    if reference is not None:
        with torch.no_grad():
            own, policy.module = policy.module, reference
            try:
                before = policy.score(observation, decisions, data.sampling).log_prob
            finally:
                policy.module = own
    parts = grpo_loss(
        score.log_prob,
        torch.from_numpy(decisions.log_prob).to(device),
        torch.from_numpy(decisions.log_prob_mask).to(device),
        torch.from_numpy(data.advantage_B[rows]).to(device),
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        kl_weight=config.kl_weight,
        reference_log_prob_BJ=before,
        count=count,
    )
    return parts, float(score.entropy.detach().mean())
