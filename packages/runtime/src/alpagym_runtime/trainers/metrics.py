"""Numbers of a training step that follow from its episodes; their names are in `telemetry.metrics`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from alpagym_runtime.errors import SimulatorError
from alpagym_runtime.rollouts.drive_facts import drive_facts
from alpagym_runtime.rollouts.statistics import RATES
from alpagym_runtime.trainers.team import ALONE, Team
from alpagym_runtime.types import Ended, Episode

OPEN_LOOP = ("ade_m", "comfort")
MANNER = ("drive/speed_ratio", "drive/standing_share", "drive/weaving_per_s")


def drive_numbers(episodes: Sequence[Episode], version: int, team: Team = ALONE) -> dict[str, float]:
    """Reward, terms, scores, manner and staleness of the drives that count, those of the whole team.

    Args:
        episodes: of the step, void ones too.
        version: of the weights that are about to train on them.
        team: whose episodes are meant.

    Raises:
        SimulatorError: none of the episodes is usable; says why.

    """
    facts = team.joined(_facts(episode, version) for episode in episodes)
    good = [fact for fact in facts if fact["good"]]
    if not good:
        texts = sorted({fact["failure"] for fact in facts if fact["failure"] is not None})
        why = texts[0] if texts else "each is at fault from its start, or has a reward that is not finite"
        raise SimulatorError(f"none of the {len(facts)} episodes of this step is usable: {why}", code="NO_EPISODE")
    rewards = np.array([fact["reward"] for fact in good])
    numbers = {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "driving_score": float(np.mean([fact["driving_score"] for fact in good])),
        "ticks": float(sum(fact["ticks"] for fact in good)),
    }
    for name in good[0]["terms"]:
        numbers[f"term/{name}"] = float(np.mean([fact["terms"][name] for fact in good]))
    for rate in RATES:
        counts = np.array([fact["rates"][rate] for fact in good if rate in fact["rates"]])
        if len(counts):
            numbers[f"rate/{rate}"] = float((counts > 0.0).mean())
    numbers["rate/goal"] = float(np.mean([fact["goal"] for fact in good]))
    for name in MANNER:
        values = np.array([fact["manner"][name] for fact in good])
        if np.isfinite(values).any():
            numbers[name] = float(np.nanmean(values))
    for name in OPEN_LOOP:
        values = np.array([fact["open_loop"][name] for fact in good if name in fact["open_loop"]])
        if len(values):
            numbers[f"open_loop/{name}"] = float(values.mean())
    lags = [fact["lag"] for fact in good if fact["lag"] is not None]
    if lags:
        numbers["staleness_mean"] = sum(lag["sum"] for lag in lags) / sum(lag["count"] for lag in lags)
        numbers["staleness_max"] = float(max(lag["max"] for lag in lags))
    return numbers


def _facts(episode: Episode, version: int) -> Mapping[str, Any]:
    """What of a drive enters the numbers of a step; plain data."""
    lag = version - episode.decisions.version if episode.decisions is not None else np.zeros(0, np.int64)
    good = episode.trainable and bool(np.isfinite(episode.rewards).all())
    manner = drive_facts(episode.measures) if good else {}
    return {
        "good": good,
        "failure": None if episode.failure is None else episode.failure.text,
        "reward": float(episode.rewards.sum()),
        "driving_score": float(episode.driving_score),
        "ticks": len(episode),
        "terms": {name: float(values.sum()) for name, values in episode.terms.items()},
        "rates": {rate: episode.measures[name].aggregate() for rate, name in RATES.items() if name in episode.measures},
        "goal": episode.ended == Ended.GOAL,
        "manner": {name: float(manner[name]) for name in MANNER if name in manner},
        "open_loop": {name: episode.measures[name].aggregate() for name in OPEN_LOOP if name in episode.measures},
        "lag": {"sum": int(lag.sum()), "count": len(lag), "max": int(lag.max())} if len(lag) else None,
    }
