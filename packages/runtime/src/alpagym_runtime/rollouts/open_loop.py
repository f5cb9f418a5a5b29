"""Measuring a policy open loop: its mean plan, and K drawn plans a scene and seed, against what was driven.

A seed is a set of K plans. The published metrics choose the plan of a set that is nearest over the whole horizon,
report prefixes of that same plan, average over sets and scenes, and give the deviation over the sets of a scene.

Source: the evaluation of NVlabs/alpamayo-recipes (formulas), written anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.random import mix_int, text_seed
from alpagym_runtime.rollouts.collector import Collects
from alpagym_runtime.rollouts.evaluation import evaluate
from alpagym_runtime.rollouts.table import Row
from alpagym_runtime.simulators.pai.scoring import corner_distance, displacements, minimum_displacements
from alpagym_runtime.types import Ended, Episode, EpisodeRequest, Sampling

TARGET = "recorded_plan_rig"
PORTION = 64
"""Scenes whose drawn plans are held at once."""

PUBLISHED = {
    "ade": "measure/ade_m",
    "ade/by_t=3.0": "measure/ade_m/by_t=3.0",
    "min_ade": "measure/min_ade",
    **{f"min_ade/by_t={t}": f"measure/min_ade/by_t={t}" for t in (0.5, 1.0, 3.0, 5.0)},
    "corner_distance": "measure/corner_distance",
}
"""The published names, and our columns."""


def evaluate_open_loop(
    collector: Collects,
    scene_ids: Sequence[str],
    seeds: Sequence[int],
    samples: int,
    sampling: Sampling,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Row]:
    """Rows of `evaluate` (the mean plan); with samples > 0 their minADE family is that of K drawn plans.

    Args:
        collector: over an open-loop world that was asked for the label `recorded_plan_rig`.
        scene_ids: what to measure on.
        seeds: one set of plans each.
        samples: K, plans of a set; 0 draws none.
        sampling: how they are drawn.
        on_episode: is given every episode, drawn ones too.

    Returns:
        One row a scene and seed. With drawn plans `samples` is K, `measure/ade_first` the mean distance of the first
        one (what the published `ade` is, where a model gives no probabilities) and `measure/ade_likeliest` that of the
        one with the highest log-probability, where the policy gives one.

    """
    rows = evaluate(collector, scene_ids, seeds, 1, on_episode)
    if samples == 0:
        return rows
    by_place = {(row["scene_id"], row["seed"]): row for row in rows}
    for start in range(0, len(scene_ids), PORTION):
        part = scene_ids[start : start + PORTION]
        requests = [
            EpisodeRequest(
                scene_id=scene_id,
                horizon_ticks=1,
                policy_seed=mix_int(seed, 3, k, text_seed(scene_id)),
                group_id=seed,
                member=k,
            )
            for scene_id in part
            for seed in seeds
            for k in range(samples)
        ]
        sets: dict[tuple[str, int], list[Episode]] = defaultdict(list)
        for episode in collector.collect(requests, sampling, on_episode):
            sets[episode.request.scene_id, episode.request.group_id].append(episode)
        for place, episodes in sets.items():
            by_place[place] |= _of_set([e for e in episodes if e.ended != Ended.FAILED])
    return rows


def _of_set(episodes: Sequence[Episode]) -> Row:
    """Columns of a set of drawn plans of one scene."""
    row: Row = {"samples": len(episodes)}
    decisions = [episode.decisions for episode in episodes if episode.decisions is not None]
    if not decisions:
        return row
    plans = np.stack([decision.plan_rig[0] for decision in decisions]).astype(np.float64)
    target = np.asarray(episodes[0].labels[TARGET][0], np.float64)
    values: dict[str, Any] = minimum_displacements(plans, target)
    values["corner_distance"] = corner_distance(plans, target)
    distances = displacements(plans, target).mean(axis=-1)
    values["ade_first"] = distances[0]
    if all(decision.log_prob_mask.any() for decision in decisions):
        likely = [np.where(d.log_prob_mask[0], d.log_prob[0], 0.0).sum(dtype=np.float64) for d in decisions]
        values["ade_likeliest"] = distances[int(np.argmax(likely))]
    return row | {f"measure/{name}": float(value) for name, value in values.items()}


def summarise_open_loop(rows: Sequence[Row]) -> dict[str, Any]:
    """The published metrics: mean over sets, then scenes; with several sets also `<name>_std`, over a scene's sets.

    Returns:
        By published name, m; `count`, the scenes. Empty where the rows are no open-loop ones. A metric that is
        undefined in every scene is None.

    """
    good = [row for row in rows if not row["failed"]]
    if not good or "measure/ade_m" not in good[0]:
        return {}
    scenes: dict[str, list[Row]] = defaultdict(list)
    for row in good:
        scenes[row["scene_id"]].append(row)
    several = max(map(len, scenes.values())) > 1
    out: dict[str, Any] = {"count": len(scenes), "samples": max(int(row.get("samples") or 1) for row in good)}
    for name, column in PUBLISHED.items():
        # The published `ade` is the first drawn plan's.
        if name == "ade" and "measure/ade_first" in good[0]:
            column = "measure/ade_first"
        sets = [np.array([_number(row.get(column)) for row in group]) for group in scenes.values()]
        out[name] = _mean(np.array([values.mean() for values in sets]))
        if several:
            out[f"{name}_std"] = _mean(np.array([values.std() for values in sets]))
    return out


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _mean(values: NDArray[np.float64]) -> float | None:
    defined = values[np.isfinite(values)]
    return float(defined.mean()) if len(defined) else None
