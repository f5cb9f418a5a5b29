"""Training in closed loop, top to bottom: groups of drives, what they teach, a clipped step; for every algorithm.

An algorithm says what a step's episodes teach (`learn_from`). Axes: S scenes, G members of a group.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from alpagym_runtime.random import mix_int
from alpagym_runtime.trainers.ahead import Ahead
from alpagym_runtime.trainers.closed_loop_config import ClosedLoopConfig
from alpagym_runtime.trainers.health import Health
from alpagym_runtime.trainers.metrics import drive_numbers
from alpagym_runtime.trainers.scenes import scenes_of_step, spreads_of
from alpagym_runtime.trainers.sft.trainer import SftTrainer
from alpagym_runtime.trainers.update import FurtherLoss, StepData, optimise, taking_part
from alpagym_runtime.types import Episode, EpisodeRequest, Sampling

if TYPE_CHECKING:
    from alpagym_runtime.trainers.run import Run

UNUSABLE = ("void", "initial_fault", "non_finite")
"""Why an episode teaches nothing."""
COUNTED = ("episodes", "retried", "failed")
"""What collectors count."""


class ClosedLoopTrainer(ABC):
    """See the module's text.

    Attributes:
        stage: the name of the stage in metrics and checkpoints.

    """

    stage: ClassVar[str]

    def __init__(self, config: ClosedLoopConfig) -> None:
        self._config = config

    @abstractmethod
    def learn_from(self, run: Run, episodes: list[Episode], step: int) -> tuple[StepData, FurtherLoss | None]:
        """The decisions of step 0, 1, … with their advantages, and what the loss has besides the policy's part."""

    @abstractmethod
    def nothing_learnt(self, counts: Mapping[str, float]) -> str | None:
        """What to tell the user of a step that left no decision; None where that is no news."""

    def fit(self, run: Run) -> None:
        """Evaluate, warm start, evaluate, train, evaluate."""
        run.evaluate_policy("start")
        if self._config.warm_start is not None:
            SftTrainer(self._config.warm_start).train(run)
            run.evaluate_policy("warm_start")
        if not run.stage_done(self.stage):
            self._train(run)
        run.conclude()

    def _train(self, run: Run) -> None:
        config, policy = self._config, run.policy
        core = run.core("train", policy.spec)
        collector, team = run.collector(core, policy), run.team
        learner = run.learner()
        optimiser = torch.optim.AdamW(learner.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
        reference = copy.deepcopy(policy.module) if config.kl_weight > 0.0 else None
        first = run.begin_stage(self.stage, config.updates, "updates", optimiser, reference)
        spreads, spent_before = run.stage_state.setdefault("spreads", {}), run.stage_state.get("spent_s", 0.0)
        began = run.cpu_s

        def share_of(step: int) -> float:
            return _progress(config, step, run.stage_state.get("spent_s", 0.0))

        def ask(step: int) -> tuple[list[EpisodeRequest], Sampling]:
            temperature = _towards(config.temperature, config.final_temperature_share, share_of(step))
            return self._requests(run, core.spec.scenes, spreads, step), Sampling("sample", temperature, config.top_p)

        ahead = Ahead(run, collector, ask, (first, config.updates), 0 if config.on_policy else config.max_lag)
        health = Health(run.reporter.note, ahead=not config.on_policy)
        for step in range(first, config.updates):
            run.check_stop()
            started = time.perf_counter()
            share = share_of(step)
            collector.counts.clear()
            episodes = ahead.take()
            drove = time.perf_counter()
            for group in optimiser.param_groups:
                group["lr"] = _towards(config.learning_rate, config.final_rate_share, share)
            for found in team.gather(spreads_of(episodes)):
                spreads.update(found)
            numbers = drive_numbers(episodes, policy.version, team)
            data, further = self.learn_from(run, episodes, step)
            counts = team.added(data.counts)
            idle: list[int] = []
            if learner.spread_out:
                data = taking_part(data, episodes)
                idle = [rank for rank, there in enumerate(team.gather(data.decisions is not None)) if not there]
            driven = team.added({f"episodes_{name}": float(collector.counts[name]) for name in COUNTED})
            numbers |= counts | data.numbers | {name: count for name, count in driven.items() if count}
            if idle:
                run.reporter.note(
                    f"step {step + 1}: not trained on: processes {idle} have no decision to take part with in the "
                    "forwards of a policy that is spread over all"
                )
            elif sum(team.gather(data.taught)):
                order_seed = mix_int(run.config.run.seed, 9, step)
                with collector.paused(), learner.training():
                    numbers |= optimise(policy, optimiser, data, config, order_seed, reference, further, team)
                    policy.version += 1
            elif (why := self.nothing_learnt(counts)) is not None:
                run.reporter.note(f"step {step + 1}: nothing to learn from: {why}")
            numbers |= {"seconds_drive": drove - started, "seconds_train": time.perf_counter() - drove}
            if not config.on_policy:
                numbers["pending"] = float(ahead.pending)
            health.see(step + 1, numbers)
            if config.budget_s:
                run.stage_state["spent_s"] = max(team.gather(spent_before + run.cpu_s - began))
            last = 0.0 < config.budget_s <= run.stage_state.get("spent_s", 0.0)
            seconds = time.perf_counter() - started
            # An evaluation and the next drives need the room: pictures of a step take up to 0.5 GB.
            del episodes, data, further
            run.end_step(self.stage, step + 1, config.updates, numbers, seconds, optimiser, reference, last)
            if last:
                break
        ahead.cancel()

    def _requests(
        self, run: Run, scenes: tuple[str, ...], spreads: Mapping[str, float], step: int
    ) -> list[EpisodeRequest]:
        """S × G requests, a function of the seed, the step and how much the groups of each scene differed so far.

        In a team whole groups are shared out; which request a seed belongs to does not depend on the team.
        """
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
            for group in run.team.part(len(chosen))
            for scene in [chosen[group]]
            for member in range(rollout.group_size)
        ]


def usable(episode: Episode, counts: dict[str, float]) -> bool:
    """Whether an episode can teach: neither void, nor at fault from its start, nor with a reward that is not finite.

    Counts those that cannot, by the names of `UNUSABLE`.
    """
    why = None
    if not episode.trainable:
        why = "initial_fault" if episode.initial_fault else "void"
    elif not np.isfinite(episode.rewards).all():
        why = "non_finite"
    if why is not None:
        counts[why] += 1.0
    return why is None


def common_sampling(episodes: Sequence[Episode]) -> Sampling:
    """How all of a step's episodes were sampled."""
    assert len({episode.sampling for episode in episodes}) == 1, "a step's episodes were sampled in different ways"
    return episodes[0].sampling


def _progress(config: ClosedLoopConfig, step: int, spent_s: float) -> float:
    """How much of the stage is over, in [0, 1], by steps or by the budget, whichever is nearer its end."""
    by_steps = step / max(config.updates - 1, 1)
    return min(max(by_steps, spent_s / config.budget_s if config.budget_s else 0.0), 1.0)


def _towards(start: float, final_share: float, progress: float) -> float:
    """On the line from `start` to `final_share` of it."""
    return start * (1.0 + progress * (final_share - 1.0))
