"""PPO: what a step's episodes teach is how much better each decision went than the value of its state said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alpagym_runtime.errors import ConfigError
from alpagym_runtime.trainers.base import Observations, decision_batch
from alpagym_runtime.trainers.closed_loop import UNUSABLE, ClosedLoopTrainer, common_sampling, usable
from alpagym_runtime.trainers.ppo.advantages import explained_variance, generalised_advantages, normalised, value_loss
from alpagym_runtime.trainers.ppo.config import PpoConfig
from alpagym_runtime.trainers.team import ALONE, Team
from alpagym_runtime.trainers.update import FurtherLoss, StepData
from alpagym_runtime.types import Decision, Episode, Sampling, Score, TrainablePolicy

if TYPE_CHECKING:
    from alpagym_runtime.trainers.run import Run

ROWS = 512
"""Rows of one forward that asks for values."""


class PpoTrainer(ClosedLoopTrainer):
    """See `ClosedLoopTrainer` for the loop."""

    stage: ClassVar[str] = "ppo"

    def __init__(self, config: PpoConfig) -> None:
        super().__init__(config)
        self._ppo = config

    def learn_from(self, run: Run, episodes: list[Episode], step: int) -> tuple[StepData, FurtherLoss | None]:
        """Advantages against the value under the weights that are about to train."""
        data, target, value = select(run.policy, episodes, self._ppo, run.team)
        if step < self._ppo.value_first:
            data.advantage_B[:] = 0.0
        return data, self._value_part(target, value)

    def nothing_learnt(self, counts: Mapping[str, float]) -> str | None:
        """Every episode is void or faulty, which `drive_numbers` reports as an error; or none was driven."""
        return "no episode holds a decision that controlled the car"

    def _value_part(self, target_B: NDArray[np.float64], value_B: NDArray[np.float64]) -> FurtherLoss:
        weight, clip = self._ppo.value_weight, self._ppo.value_clip
        if not len(target_B):  # of a decision that stands in
            target_B = value_B = np.zeros(1)

        def part(score: Score, rows: NDArray[np.int64], count: float) -> tuple[Tensor, dict[str, float]]:
            value = score.value
            assert value is not None
            old, target = (torch.from_numpy(array[rows]).to(value) for array in (value_B, target_B))
            loss = value_loss(value, old, target, clip, count)
            return weight * loss, {"value_loss": float(loss.detach()) * count / len(rows)}

        return part


def select(
    policy: TrainablePolicy, episodes: list[Episode], config: PpoConfig, team: Team = ALONE
) -> tuple[StepData, NDArray[np.float64], NDArray[np.float64]]:
    """The decisions that controlled, with advantages; the returns [B] that the value shall meet; the values [B] now.

    Void, faulty-from-the-start and non-finite episodes are left out and counted.
    """
    counts = dict.fromkeys((*UNUSABLE, "decisions", "decisions_kept"), 0.0)
    chosen = [episode for episode in episodes if usable(episode, counts)]
    if not chosen:
        empty = np.zeros(0)
        _, numbers = _statistics(empty, empty, empty, config, team)
        return StepData(Observations({}), None, empty.astype(np.float32), Sampling(), counts, numbers), empty, empty
    sampling = common_sampling(chosen)
    observation, decisions = decision_batch(chosen)
    value = values_of(policy, observation, decisions, sampling)
    # A value is one of the observation alone; the decision beside it is there because `score` asks for one.
    ends = np.cumsum([len(episode) for episode in chosen])
    last = values_of(policy, _last_observations(chosen), decisions.take(ends - 1), sampling)
    advantages, targets = [], []
    for episode, end, beyond in zip(chosen, ends, last, strict=True):
        own = value[end - len(episode) : end]
        found = generalised_advantages(
            episode.rewards, np.append(own, beyond), episode.ended.terminated, config.discount, config.trace_decay
        )
        advantages.append(found)
        targets.append(found + own)
    rows = np.flatnonzero(np.concatenate([episode.controls for episode in chosen]))
    counts["decisions"], counts["decisions_kept"] = float(len(value)), float(len(rows))
    advantage, target, value = np.concatenate(advantages)[rows], np.concatenate(targets)[rows], value[rows]
    advantage, numbers = _statistics(advantage, target, value, config, team)
    kept = advantage.astype(np.float32)
    return StepData(observation.keep(rows), decisions.take(rows), kept, sampling, counts, numbers), target, value


def _statistics(
    advantage_B: NDArray[np.float64],
    target_B: NDArray[np.float64],
    value_B: NDArray[np.float64],
    config: PpoConfig,
    team: Team,
) -> tuple[NDArray[np.float64], dict[str, float]]:
    """Advantages less their mean over their deviation, if so configured, and numbers to log; of the whole team."""
    mean, deviation = team.moments(advantage_B)
    (_, spread), (_, missed) = team.moments(target_B), team.moments(target_B - value_B)
    numbers = {
        "explained_variance": explained_variance(spread, missed),
        "value_mean": team.moments(value_B)[0],
        "advantage_std": deviation,
    }
    return normalised(advantage_B, mean, deviation) if config.normalise else advantage_B, numbers


def _last_observations(episodes: list[Episode]) -> Observations:
    """[E] what each drive saw last."""
    names = episodes[0].observation
    return Observations.of({name: np.stack([e.observation[name][-1] for e in episodes]) for name in names})


def values_of(
    policy: TrainablePolicy, observation: Observations, decisions: Decision, sampling: Sampling
) -> NDArray[np.float64]:
    """[B] values of observations under the present weights.

    Raises:
        ConfigError: the policy gives none.

    """
    parts = []
    for start in range(0, len(decisions), ROWS):
        rows = np.arange(start, min(start + ROWS, len(decisions)))
        with torch.no_grad():
            value = policy.score(observation.take(rows), decisions.take(rows), sampling).value
        if value is None:
            raise ConfigError(
                "gives no value of a state, which trainer=ppo needs; policy.value_head=true", key="policy"
            )
        parts.append(value.double().cpu().numpy())
    return np.concatenate(parts)
