"""Numbers of a training step that follow from its episodes; their names are in `telemetry.metrics`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alpagym_runtime.errors import SimulatorError
from alpagym_runtime.rollouts.drive_facts import drive_facts
from alpagym_runtime.rollouts.statistics import RATES
from alpagym_runtime.types import Ended, Episode


def drive_numbers(episodes: Sequence[Episode], version: int) -> dict[str, float]:
    """Reward, terms, scores, manner and staleness of the drives that count.

    Args:
        episodes: of the step, void ones too.
        version: of the weights that are about to train on them.

    Raises:
        SimulatorError: none of the episodes is usable; says why.

    """
    good = [episode for episode in episodes if episode.trainable and np.isfinite(episode.rewards).all()]
    if not good:
        texts = sorted({episode.failure.text for episode in episodes if episode.failure is not None})
        why = texts[0] if texts else "each is at fault from its start, or has a reward that is not finite"
        raise SimulatorError(f"none of the {len(episodes)} episodes of this step is usable: {why}", code="NO_EPISODE")
    rewards = np.array([episode.rewards.sum() for episode in good])
    numbers = {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "driving_score": float(np.mean([episode.driving_score for episode in good])),
        "ticks": float(sum(len(episode) for episode in good)),
    }
    for name in good[0].terms:
        numbers[f"term/{name}"] = float(np.mean([episode.terms[name].sum() for episode in good]))
    for rate, measure in RATES.items():
        counts = np.array([e.measures[measure].aggregate() for e in good if measure in e.measures])
        if len(counts):
            numbers[f"rate/{rate}"] = float((counts > 0.0).mean())
    numbers["rate/goal"] = float(np.mean([episode.ended == Ended.GOAL for episode in good]))
    facts = [drive_facts(episode.measures) for episode in good]
    for name in ("drive/speed_ratio", "drive/standing_share", "drive/weaving_per_s"):
        values = np.array([fact[name] for fact in facts])
        if np.isfinite(values).any():
            numbers[name] = float(np.nanmean(values))
    lags = [version - episode.decisions.version for episode in good if episode.decisions is not None]
    if lags:
        merged = np.concatenate(lags)
        numbers |= {"staleness_mean": float(merged.mean()), "staleness_max": float(merged.max())}
    return numbers
