"""What trainers share: batches of decisions from episodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.types import Decision, Episode, Observation

__all__ = ["StopTraining", "decision_batch", "take"]


class StopTraining(Exception):
    """Somebody asked the run to stop; raised between units of work, after which nothing is half done."""


def decision_batch(episodes: Sequence[Episode], drop: Sequence[str] = ()) -> tuple[Observation, Decision]:
    """Observations and decisions [B,...] of all ticks of all episodes, in order (the last observation is left out)."""
    names = [name for name in episodes[0].observation if name not in drop]
    observation = {name: np.concatenate([e.observation[name][:-1] for e in episodes]) for name in names}
    parts = [episode.decisions for episode in episodes if episode.decisions is not None]
    return observation, Decision.concatenate(parts)


def take(observation: Observation, rows: NDArray[np.int64]) -> Observation:
    """The given rows."""
    return {name: array[rows] for name, array in observation.items()}
