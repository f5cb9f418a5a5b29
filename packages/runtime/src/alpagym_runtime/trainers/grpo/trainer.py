"""GRPO: what a step's episodes teach is how much better each went than its group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.trainers.base import Observations, decision_batch
from alpagym_runtime.trainers.closed_loop import UNUSABLE, ClosedLoopTrainer, common_sampling, usable
from alpagym_runtime.trainers.grpo.advantages import group_advantages, tick_advantages
from alpagym_runtime.trainers.grpo.config import GrpoConfig
from alpagym_runtime.trainers.update import FurtherLoss, StepData
from alpagym_runtime.types import Episode, Sampling

if TYPE_CHECKING:
    from alpagym_runtime.trainers.run import Run


class GrpoTrainer(ClosedLoopTrainer):
    """See `ClosedLoopTrainer` for the loop."""

    stage: ClassVar[str] = "grpo"

    def __init__(self, config: GrpoConfig) -> None:
        super().__init__(config)
        self._grpo = config

    def learn_from(self, run: Run, episodes: list[Episode], step: int) -> tuple[StepData, FurtherLoss | None]:
        """Advantages within each group."""
        return select(episodes, self._grpo, run.config.rollout.minimum_group), None

    def nothing_learnt(self, counts: Mapping[str, float]) -> str | None:
        """Groups that are too small or whose members fared alike; decisions below `least_advantage` are no news."""
        if counts["groups_informative"]:
            return None
        dropped, groups = int(counts["groups_dropped"]), int(counts["groups"])
        return f"{dropped} of {groups} groups have too few valid episodes, the rewards of the others are equal"


def select(episodes: list[Episode], config: GrpoConfig, minimum_group: int) -> StepData:
    """Advantages within each group, and the decisions whose advantage is worth a gradient.

    Void, faulty-from-the-start and non-finite episodes leave their group and are counted; a group below `minimum_group`
    is dropped and counted.
    """
    groups: dict[int, list[Episode]] = defaultdict(list)
    counts = dict.fromkeys((*UNUSABLE, "groups_dropped", "groups_informative"), 0.0)
    for episode in episodes:
        members = groups[episode.request.group_id]  # A group that is wholly void is a group too.
        if usable(episode, counts):
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
    counts["decisions"], counts["decisions_kept"] = 0.0, 0.0
    if not chosen:
        return StepData(Observations({}), None, np.zeros(0, np.float32), Sampling(), counts)
    sampling = common_sampling(chosen)
    advantage = np.concatenate(advantages)
    controls = np.concatenate([episode.controls for episode in chosen])
    rows = np.flatnonzero(controls & (np.abs(advantage) >= config.least_advantage) & (advantage != 0.0))
    observation, decisions = decision_batch(chosen)
    counts["decisions"], counts["decisions_kept"] = float(len(advantage)), float(len(rows))
    kept = advantage[rows].astype(np.float32)
    return StepData(observation.keep(rows), decisions.take(rows), kept, sampling, counts)
