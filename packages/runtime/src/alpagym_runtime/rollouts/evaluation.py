"""Measuring a policy: each scene of a split once a seed, mean action, and intervals that say how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.random import generator, mix_int, text_seed
from alpagym_runtime.rollouts.collector import Collector
from alpagym_runtime.types import Ended, Episode, EpisodeRequest, Sampling

Row = dict[str, Any]
"""One evaluated drive: scene_id, family, seed, ended, failed, driving_score, reward, terms and aggregated measures."""

RATES = {
    "collision": "collision_count",
    "collision_at_fault": "collision_at_fault_count",
    "offroad": "offroad_count",
}


def evaluate(
    collector: Collector,
    scene_ids: Sequence[str],
    seeds: Sequence[int],
    horizon_ticks: int,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Row]:
    """Drive every scene once a seed with the policy's mean action; one row a drive, in the order of the requests."""
    requests = [
        EpisodeRequest(
            scene_id=scene_id,
            horizon_ticks=horizon_ticks,
            world_seed=mix_int(seed, 1, text_seed(scene_id)),
            policy_seed=mix_int(seed, 2, text_seed(scene_id)),
            member=seed,
        )
        for seed in seeds
        for scene_id in scene_ids
    ]
    family = collector.core.simulator.scene_family
    episodes = collector.collect(requests, Sampling(mode="mean"), on_episode)
    return [_row(episode, family) for episode in episodes]


def _row(episode: Episode, family: Callable[[str], str]) -> Row:
    request, failed = episode.request, episode.ended == Ended.FAILED
    row: Row = {
        "scene_id": request.scene_id,
        "family": "" if failed else family(request.scene_id),
        "seed": request.member,
        "ended": episode.ended.name.lower(),
        "failed": failed,
        "failure": episode.failure.text if episode.failure else None,
        "ticks": len(episode),
        "driving_score": None if failed else episode.driving_score,
        "initial_fault": episode.initial_fault,
        "reward": None if failed else float(episode.rewards.sum()),
    }
    row |= {f"term/{name}": float(values.sum()) for name, values in episode.terms.items()}
    row |= {f"measure/{name}": series.aggregate() for name, series in episode.measures.items()}
    return row


def interval(values: NDArray[np.float64], groups: NDArray[np.int64], resamples: int, seed: int = 0) -> dict[str, Any]:
    """Mean with its 95 % interval, by a bootstrap over scenes, then over the drives of each.

    Args:
        values: [M], one a drive.
        groups: [M], the scene of each.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Returns:
        mean, low, high and n (drives); None where nothing was driven.

    """
    if not len(values):
        return {"mean": None, "low": None, "high": None, "n": 0}
    names, index = np.unique(groups, return_inverse=True)
    counts = np.bincount(index)
    order = np.argsort(index, kind="stable")
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    rng = generator(seed, 95)
    means = np.empty(resamples)
    for b in range(resamples):
        scenes = rng.integers(0, len(names), len(names))
        picks = counts[scenes]
        # Within a drawn scene, its drives are drawn again.
        drawn = np.repeat(starts[scenes], picks) + (rng.random(picks.sum()) * np.repeat(picks, picks)).astype(np.int64)
        means[b] = values[order[drawn]].mean()
    low, high = np.quantile(means, [0.025, 0.975])
    return {"mean": float(values.mean()), "low": float(low), "high": float(high), "n": len(values)}


def _moments(values: NDArray[np.float64]) -> dict[str, Any]:
    good = values[np.isfinite(values)]
    if not len(good):
        return {"mean": None, "std": None, "n": 0}
    return {"mean": float(good.mean()), "std": float(good.std()), "n": len(good)}


def _scenes(rows: Sequence[Row]) -> NDArray[np.int64]:
    return np.unique([row["scene_id"] for row in rows], return_inverse=True)[1]


def summarise(rows: Sequence[Row], resamples: int) -> dict[str, Any]:
    """What summary.json keeps of an evaluation: means over the drives that `filter` names, the others counted apart.

    A reward or measure that is undefined in a drive (NaN) is left out of its own mean, whose `n` then is smaller.
    """
    good = [row for row in rows if not row["failed"] and not row["initial_fault"]]
    column = lambda name: np.array([row[name] for row in good], np.float64)  # noqa: E731
    groups = _scenes(good) if good else np.zeros(0, np.int64)
    reward = column("reward")
    summary: dict[str, Any] = {
        "filter": "not failed and not initial_fault",
        "driving_score": interval(column("driving_score"), groups, resamples),
        "reward": interval(reward[np.isfinite(reward)], groups[np.isfinite(reward)], resamples),
        "rates": {},
        "failed": sum(row["failed"] for row in rows),
        "initial_fault": sum(row["initial_fault"] for row in rows),
        "non_finite_reward": int((~np.isfinite(reward)).sum()),
    }
    known = {name for row in good for name in row}
    for rate, measure in RATES.items():
        if f"measure/{measure}" in known:
            hits = (column(f"measure/{measure}") > 0).astype(np.float64)
            summary["rates"][rate] = float(hits.mean()) if len(hits) else None
    if good:
        summary["rates"]["goal"] = float(np.mean([row["ended"] == "goal" for row in good]))
    if "measure/progress" in known:
        summary["progress"] = interval(column("measure/progress"), groups, resamples)
    terms = sorted(name for name in known if name.startswith("term/"))
    summary["terms"] = {name.removeprefix("term/"): float(column(name).mean()) for name in terms}
    measures = sorted(name for name in known if name.startswith("measure/"))
    summary["measures"] = {name.removeprefix("measure/"): _moments(column(name)) for name in measures}
    summary["by_family"] = {}
    for family in sorted({row["family"] for row in good}):
        scores = [row["driving_score"] for row in good if row["family"] == family]
        summary["by_family"][family] = {"driving_score": float(np.mean(scores)), "n": len(scores)}
    return summary


def paired_gain(before: Sequence[Row], after: Sequence[Row], resamples: int) -> dict[str, Any]:
    """Mean difference of the driving score over drives that both have, with its 95 % interval."""
    usable = lambda row: not row["failed"] and not row["initial_fault"]  # noqa: E731
    first = {(row["scene_id"], row["seed"]): row["driving_score"] for row in before if usable(row)}
    pairs = [row for row in after if usable(row) and (row["scene_id"], row["seed"]) in first]
    gains = np.array([row["driving_score"] - first[row["scene_id"], row["seed"]] for row in pairs], np.float64)
    return interval(gains, _scenes(pairs) if pairs else np.zeros(0, np.int64), resamples)
