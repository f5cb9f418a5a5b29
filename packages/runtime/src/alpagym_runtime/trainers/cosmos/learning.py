"""One training step on the drives that Cosmos-RL hands to a policy replica; knows nothing of Cosmos-RL itself.

Drives are of unequal length, and so is what they teach: their decisions are laid end to end, the ones without weight
are left out, and forwards are of what is left, without padding. Loss, guards and passes are those of `trainer=grpo`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from alpagym_runtime.random import mix_int
from alpagym_runtime.run_config import RunConfig
from alpagym_runtime.trainers.base import Observations, decision_batch
from alpagym_runtime.trainers.closed_loop_config import ClosedLoopConfig
from alpagym_runtime.trainers.cosmos.config import CosmosSection, CosmosTrainerConfig
from alpagym_runtime.trainers.cosmos.digests import WeightsError
from alpagym_runtime.trainers.cosmos.groups import Driven
from alpagym_runtime.trainers.metrics import drive_numbers
from alpagym_runtime.trainers.team import ALONE, Team, is_shard
from alpagym_runtime.trainers.update import StepData, optimise, taking_part
from alpagym_runtime.types import Sampling, TrainablePolicy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Lesson:
    """A drive in a policy replica's batch.

    Attributes:
        driven: the drive.
        advantage: Cosmos-RL's, of the whole episode.

    """

    driven: Driven
    advantage: float


@contextlib.contextmanager
def precision(device: torch.device | str, dtype: str) -> Iterator[None]:
    """Forwards inside compute in a type; the same for driving and training, so that their ratio begins at 1."""
    if dtype == "float32":
        yield
        return
    with torch.autocast(torch.device(device).type, DTYPES[dtype]):
        yield


def fresh_enough(lessons: Sequence[Lesson], version: int, allowed: int) -> tuple[list[Lesson], int]:
    """Drives by weights that are at most `allowed` steps older than `version`, and how many were not.

    A drive through which weights changed counts as its oldest.

    Raises:
        WeightsError: one was driven by weights that are not there yet.

    """
    kept = []
    for lesson in lessons:
        decisions = lesson.driven.episode.decisions
        assert decisions is not None
        oldest, newest = int(decisions.version.min()), int(decisions.version.max())
        if newest > version:
            raise WeightsError(
                f"a drive (scene {lesson.driven.episode.request.scene_id!r}) was decided by version {newest} of the "
                f"weights, and the policy is at {version}: two jobs share this run, or a resume lost a step"
            )
        if version - oldest <= allowed:
            kept.append(lesson)
    return kept, len(lessons) - len(kept)


def step_data(lessons: Sequence[Lesson], config: CosmosTrainerConfig) -> StepData:
    """The decisions that are worth a gradient."""
    counts = {"decisions": 0.0, "decisions_kept": 0.0}
    episodes = [lesson.driven.episode for lesson in lessons]
    if not episodes:
        return StepData(Observations({}), None, np.zeros(0, np.float32), Sampling(), counts)
    per_tick = [
        lesson.driven.advantage_T if len(lesson.driven.advantage_T) else np.full(len(episode), lesson.advantage)
        for lesson, episode in zip(lessons, episodes, strict=True)
    ]
    advantage = np.concatenate(per_tick).astype(np.float32)
    controls = np.concatenate([episode.controls for episode in episodes])
    rows = np.flatnonzero(controls & (np.abs(advantage) >= config.least_advantage) & (advantage != 0.0))
    observation, decisions = decision_batch(episodes)
    counts = {"decisions": float(len(advantage)), "decisions_kept": float(len(rows))}
    sampling = episodes[0].sampling
    return StepData(observation.keep(rows), decisions.take(rows), advantage[rows], sampling, counts)


def loop_config(cosmos: CosmosSection, trainer: CosmosTrainerConfig, lessons: int, decisions: int) -> ClosedLoopConfig:
    """Cosmos-RL's options under the names of our loss.

    Cosmos-RL counts batches in episodes, our loss in decisions: both get the same share of the step.

    Args:
        cosmos: its section.
        trainer: ours.
        lessons: episodes of the step, all replicas'.
        decisions: of these that are worth a gradient.

    """
    train, step = cosmos.train, cosmos.train.train_policy
    whole = max(decisions, 1)
    share = whole / max(lessons, 1)
    per_optimize = (step.batch_size_per_optimize or 0) * cosmos.policy.parallelism.n_init_replicas
    minibatch = max(1, round(share * per_optimize)) if per_optimize else whole
    micro = min(max(1, round(share * step.mini_batch)), minibatch)
    return ClosedLoopConfig(
        learning_rate=train.optm_lr,
        epochs=step.mu_iterations,
        minibatch=minibatch,
        micro_batch=micro,
        clip_low=step.epsilon_low,
        clip_high=step.epsilon_high,
        gradient_clip=train.optm_grad_norm_clip,
        discount=trainer.discount,
        kl_weight=step.kl_beta,
        kl_stop=trainer.kl_stop,
        warm_start=None,
    )


def rate_share(cosmos: CosmosSection, step: int, total: int) -> float:
    """The learning rate of step 1, 2, … of `total`, as a share of optm_lr: a rise from 0, then a line down."""
    section = cosmos.train
    warm = min(1.0, step / section.optm_warmup_steps) if section.optm_warmup_steps else 1.0
    progress = min(max(step - 1, 0) / max(total - 1, 1), 1.0)
    return warm * (1.0 + progress * (section.optm_min_lr_factor - 1.0))


def learn(
    config: RunConfig,
    policy: TrainablePolicy,
    optimiser: torch.optim.Optimizer,
    lessons: Sequence[Lesson],
    step: int,
    reference: torch.nn.Module | None = None,
    team: Team = ALONE,
) -> dict[str, float]:
    """Train on a step's drives; numbers to log. The policy's version is that of `step` afterwards.

    Args:
        config: the run's; its trainer is `cosmos`.
        policy: at the version of the step before.
        optimiser: of its parameters.
        lessons: this replica's drives.
        step: from 1.
        reference: the policy as training began, where kl_beta is not 0.
        team: the policy replicas.

    """
    cosmos, trainer = config.cosmos, config.trainer.config
    assert isinstance(trainer, CosmosTrainerConfig)
    allowed = 0 if cosmos.train.train_policy.on_policy else cosmos.train.train_policy.allowed_outdated_steps
    # Between two syncs rollouts fall behind by nobody's fault.
    allowed += cosmos.train.sync_weight_interval - 1
    fresh, outdated = fresh_enough(lessons, policy.version, allowed)
    taken = team.added({"episodes_stale": float(outdated), "episodes_trained": float(len(fresh))})
    if not taken["episodes_trained"]:
        raise WeightsError(
            f"all {taken['episodes_stale']:.0f} drives of step {step} were decided by weights more than {allowed} "
            "steps old: the rollouts get no new weights, or drive too far ahead"
        )
    numbers = drive_numbers([lesson.driven.episode for lesson in fresh], policy.version, team)
    data = step_data(fresh, trainer)
    if any(map(is_shard, policy.module.parameters())):
        data = taking_part(data, [lesson.driven.episode for lesson in lessons])
    totals = taken | team.added(data.counts)
    numbers |= totals | {"groups_collapsed": _collapsed(fresh, team)}
    if totals["decisions_kept"]:
        options = loop_config(cosmos, trainer, int(totals["episodes_trained"]), int(totals["decisions_kept"]))
        order_seed = mix_int(config.run.seed, 9, step)
        device = next(policy.module.parameters()).device
        with precision(device, cosmos.train.param_dtype):
            numbers |= optimise(policy, optimiser, data, options, order_seed, reference, None, team)
    policy.version = step
    return numbers


def _collapsed(lessons: Sequence[Lesson], team: Team) -> float:
    """Share of the groups, of which two or more drives are in this step, whose rewards are all equal.

    Over the whole team: the drives of a group are spread over its processes.
    """
    groups: dict[int, list[float]] = {}
    own = ((lesson.driven.episode.request.group_id, lesson.driven.reward) for lesson in lessons)
    for group, reward in team.joined(own):
        groups.setdefault(group, []).append(reward)
    several = [rewards for rewards in groups.values() if len(rewards) > 1]
    return sum(max(r) - min(r) < 1e-7 for r in several) / len(several) if several else 0.0
