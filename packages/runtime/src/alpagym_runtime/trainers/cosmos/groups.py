"""Exactly as many drives of a prompt as were asked for, all of which can be trained on.

Cosmos-RL counts episodes: where a prompt brings fewer than it was asked for, the missing ones stay on its books, and
from a certain number of them on every rollout waits for ever for a step that cannot come. So a drive that failed is
made again, in a new simulator where the old one gave up; a group whose scene begins with a fault begins at another
moment; and when that does not help either, the run ends and says why.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.errors import SimulatorError
from alpagym_runtime.rollouts.collector import Collector
from alpagym_runtime.trainers.closed_loop import UNUSABLE, usable
from alpagym_runtime.trainers.cosmos.config import CosmosTrainerConfig
from alpagym_runtime.trainers.cosmos.prompts import Prompts
from alpagym_runtime.trainers.grpo.advantages import tick_advantages
from alpagym_runtime.types import Episode, Sampling


@dataclass
class Driven:
    """A drive and, with credit by tick, what each of its decisions was worth against its group.

    Attributes:
        episode: the drive.
        advantage_T: f32 [T]; empty where Cosmos-RL's advantage of the whole episode counts.

    """

    episode: Episode
    advantage_T: NDArray[np.float32]

    @property
    def reward(self) -> float:
        """The sum of all terms."""
        return float(self.episode.rewards.sum())

    @property
    def numbers(self) -> dict[str, float]:
        """Driving score and each term, for Cosmos-RL's own log; without those that are not known (open loop)."""
        terms = {f"term/{name}": float(values.sum()) for name, values in self.episode.terms.items()}
        every = {"driving_score": float(self.episode.driving_score), **terms}
        # They travel as JSON, which has no NaN: a worker that reports one ends.
        return {name: value for name, value in every.items() if math.isfinite(value)}


class Groups:
    """Drives groups; see the module's text.

    Args:
        prompts: what numbers mean.
        make_collector: gives a collector on fresh slots, and what closes it.
        members: of a group.
        redraws: further rounds, over all of a batch.
        batch_s: longest time of one batch, s.

    Attributes:
        counts: drives that were made, and those that were thrown away, by reason.

    """

    def __init__(
        self,
        prompts: Prompts,
        make_collector: Callable[[], tuple[Collector, Callable[[], None]]],
        members: int,
        redraws: int,
        batch_s: float,
    ) -> None:
        self._prompts, self._make, self._members = prompts, make_collector, members
        self._redraws, self._batch_s = redraws, batch_s
        self._collector: Collector | None = None
        self._close_collector: Callable[[], None] = lambda: None
        self.counts: Counter[str] = Counter()

    def drive(self, numbers: Sequence[int], sampling: Sampling) -> list[list[Episode]]:
        """The drives of each prompt, `members` each, in order.

        Raises:
            SimulatorError: not to be had in `redraws` further rounds, or in time; says what went wrong and how often.

        """
        deadline_s = time.monotonic() + self._batch_s
        worlds = [0] * len(numbers)
        kept: list[dict[int, Episode]] = [{} for _ in numbers]
        why: Counter[str] = Counter()
        for redraw in range(self._redraws + 1):
            missing = [(g, m) for g in range(len(numbers)) for m in range(self._members) if m not in kept[g]]
            if not missing:
                break
            requests = [self._prompts.request(numbers[g], m, worlds[g], redraw) for g, m in missing]
            made: dict[int, Episode] = {}

            def on_time(made: dict[int, Episode] = made, asked: int = len(missing)) -> list[None]:
                if time.monotonic() > deadline_s:
                    raise SimulatorError(
                        f"{asked - len(made)} of {asked} drives are not over after cosmos.rollout.episode_s = "
                        f"{self._batch_s:g} s",
                        code="EPISODE_TIMEOUT",
                    )
                return []

            try:
                self._fresh().stream(requests, sampling, made.__setitem__, on_time)  # type: ignore[arg-type]
            except SimulatorError as err:
                if err.code == "EPISODE_TIMEOUT":
                    raise
                # The simulator is in an unknown state: the next round has a new one.
                why[str(err)] += 1
                self.close()
            begun_wrong = set()
            for index, episode in made.items():
                group, member = missing[index]
                found = dict.fromkeys(UNUSABLE, 0.0)
                self.counts["episodes"] += 1
                if usable(episode, found):
                    kept[group][member] = episode
                    continue
                reason = next(name for name, count in found.items() if count)
                self.counts[reason] += 1
                why[f"{reason}: {episode.failure.text}" if episode.failure is not None else reason] += 1
                if reason == "initial_fault":
                    begun_wrong.add(group)
            for group in begun_wrong:
                worlds[group] += 1
                kept[group].clear()  # a group shares its beginning
        short = [n for n, members in zip(numbers, kept, strict=True) if len(members) < self._members]
        if short:
            told = "; ".join(f"{count} × {text}" for text, count in why.most_common(3))
            raise SimulatorError(
                f"{len(short)} of {len(numbers)} groups (first: prompt {short[0]}, scene "
                f"{self._prompts.request(short[0], 0).scene_id!r}) have fewer than {self._members} drives to train on "
                f"after {self._redraws + 1} rounds (cosmos.rollout.redraws = {self._redraws}): {told}",
                code="GROUP_INCOMPLETE",
            )
        return [[members[m] for m in range(self._members)] for members in kept]

    def close(self) -> None:
        """Close the simulator; idempotent."""
        close, self._close_collector, self._collector = self._close_collector, lambda: None, None
        with contextlib.suppress(SimulatorError):
            close()

    def _fresh(self) -> Collector:
        if self._collector is None:
            self._collector, self._close_collector = self._make()
        return self._collector


def credited(members: Sequence[Episode], config: CosmosTrainerConfig) -> list[Driven]:
    """A group's drives with what the config's credit makes of their rewards."""
    if config.credit == "episode":
        return [Driven(episode, np.zeros(0, np.float32)) for episode in members]
    advantages = tick_advantages([episode.rewards for episode in members], config.discount, config.spread_floor)
    return [Driven(episode, a.astype(np.float32)) for episode, a in zip(members, advantages, strict=True)]
