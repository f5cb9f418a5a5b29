"""What evaluations say: means with intervals, by kind of scene, and the paired comparison of two policies.

All of it is computed from rows (`table.Row`), nothing from an older summary. Drives that the infrastructure failed, or
that were at fault before the policy drove, are counted apart and enter no mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.rollouts.bootstrap import Bootstrap, Float, bounds, with_bounds
from alpagym_runtime.rollouts.table import Row

__all__ = ["FILTER", "RATES", "compare", "hit", "summarise", "usable"]

FILTER = "not failed and not initial_fault"
RATES = {
    "collision": "collision_count",
    "collision_at_fault": "collision_at_fault_count",
    "offroad": "offroad_count",
}
"""Rate -> the measure that it counts drives of."""

OPEN_LOOP = ("ade_m", "ade_first", "min_ade", "corner_distance", "comfort")
"""Measures of open-loop worlds that are compared in pairs."""


def usable(row: Row) -> bool:
    """Whether a drive enters means: `FILTER` as code."""
    return not row["failed"] and not row["initial_fault"]


def hit(row: Row, rate: str) -> float:
    """1 where a drive had the event of a rate (or "goal"), 0 where not, NaN where the world does not say."""
    if rate == "goal":
        return float(row["ended"] == "goal")
    count = _number(row.get(f"measure/{RATES[rate]}"))
    return count if np.isnan(count) else float(count > 0.0)


def summarise(rows: Sequence[Row], resamples: int) -> dict[str, Any]:
    """What summary.json keeps of an evaluation: means over the drives that `filter` names, the others counted apart.

    A reward or measure that is undefined in a drive (NaN) is left out of its own mean, whose `n` then is smaller.
    Intervals are 95 %, by `Bootstrap` over scenes and the drives of each.
    """
    good = [row for row in rows if usable(row)]
    known = dict.fromkeys(name for row in good for name in row)
    rates = [*(rate for rate, measure in RATES.items() if f"measure/{measure}" in known), *(["goal"] if good else [])]
    columns: dict[str, Float] = {name: _column(good, name) for name in ("driving_score", "reward")}
    columns |= {f"rate/{rate}": np.array([hit(row, rate) for row in good]) for rate in rates}
    if "measure/progress" in known:
        columns["progress"] = _column(good, "measure/progress")
    columns |= {name: _column(good, name) for name in known if name.startswith("drive/")}
    families = sorted({row["family"] for row in good})
    for family in families:
        inside = np.array([row["family"] == family for row in good])
        for name in ("driving_score", *(f"rate/{rate}" for rate in rates)):
            columns[f"family/{family}/{name}"] = np.where(inside, columns[name], np.nan)
    found = _intervals(columns, scene_index(good), resamples)
    terms = sorted(name for name in known if name.startswith("term/"))
    measures = sorted(name for name in known if name.startswith("measure/"))
    summary: dict[str, Any] = {
        "filter": FILTER,
        "driving_score": found["driving_score"],
        "reward": found["reward"],
        "rates": {rate: found[f"rate/{rate}"]["mean"] for rate in rates},
        "rate_intervals": {rate: found[f"rate/{rate}"] for rate in rates},
        "scenes": len({row["scene_id"] for row in good}),
        "failed": sum(row["failed"] for row in rows),
        "failures": failures(rows),
        "initial_fault": sum(row["initial_fault"] for row in rows),
        "non_finite_reward": int((~np.isfinite(columns["reward"])).sum()),
    }
    if "progress" in found:
        summary["progress"] = found["progress"]
    summary["drive"] = {name.removeprefix("drive/"): found[name] for name in known if name.startswith("drive/")}
    summary["terms"] = {name.removeprefix("term/"): float(_column(good, name).mean()) for name in terms}
    summary["measures"] = {name.removeprefix("measure/"): _moments(_column(good, name)) for name in measures}
    summary["by_family"] = {
        family: {
            "driving_score": found[f"family/{family}/driving_score"]["mean"],
            "low": found[f"family/{family}/driving_score"]["low"],
            "high": found[f"family/{family}/driving_score"]["high"],
            "n": found[f"family/{family}/driving_score"]["n"],
            "rates": {rate: found[f"family/{family}/rate/{rate}"]["mean"] for rate in rates},
        }
        for family in families
    }
    return summary


def failures(rows: Sequence[Row]) -> dict[str, int]:
    """Void drives by their code, most frequent first; drives that a retry saved count as `retried`."""
    codes: dict[str, int] = {}
    for row in rows:
        if row["failed"]:
            code = row.get("failure_code") or "unknown"
            codes[code] = codes.get(code, 0) + 1
    retried = sum(1 for row in rows if not row["failed"] and row.get("attempt"))
    ordered = dict(sorted(codes.items(), key=lambda item: -item[1]))
    return ordered | ({"retried": retried} if retried else {})


def compare(before: Sequence[Sequence[Row]], after: Sequence[Sequence[Row]], resamples: int) -> dict[str, Any]:
    """Paired comparison of two policies over the drives that both made: same scene, same content, same seed.

    Args:
        before: rows of one evaluation of each training run.
        after: likewise; run i of one side pairs with run i of the other.
        resamples: of the bootstrap over training runs (where there are several), scenes and drives.

    Returns:
        n, pairs; scenes; runs; left_out by reason; `driving_score`, `reward`, `progress` and, where both have them, the
        distances of `open_loop` by name: the mean of after − before with its interval; `rates`: by rate before, after,
        the difference and the ratio after / before, each with its interval (a ratio is None where `before` has none);
        `by_family`: the difference of the driving score.

    """
    assert len(before) == len(after), "each run of one side pairs with a run of the other"
    pairs: list[tuple[int, Row, Row]] = []
    left_out: dict[str, int] = {}
    for run, (olds, news) in enumerate(zip(before, after, strict=True)):
        known = {(row["scene_id"], row["seed"]): row for row in olds}
        for row in news:
            old = known.pop((row["scene_id"], row["seed"]), None)
            reason = _why_not(old, row)
            if reason is not None or old is None:
                left_out[reason or "unmatched"] = left_out.get(reason or "unmatched", 0) + 1
            else:
                pairs.append((run, old, row))
        if known:
            left_out["unmatched"] = left_out.get("unmatched", 0) + len(known)
    olds, news = [old for _, old, _ in pairs], [new for _, _, new in pairs]
    rates = [r for r, m in RATES.items() if olds and f"measure/{m}" in olds[0] and f"measure/{m}" in news[0]]
    rates += ["goal"] if olds else []
    columns: dict[str, Float] = {}
    open_loop = [name for name in OPEN_LOOP if olds and f"measure/{name}" in olds[0] and f"measure/{name}" in news[0]]
    for name in ("driving_score", "reward", "measure/progress", *(f"measure/{name}" for name in open_loop)):
        columns[name] = _column(news, name) - _column(olds, name)
    for rate in rates:
        one, two = (np.array([hit(row, rate) for row in side]) for side in (olds, news))
        both = np.isfinite(one) & np.isfinite(two)
        columns |= {f"{rate}/before": np.where(both, one, np.nan), f"{rate}/after": np.where(both, two, np.nan)}
        columns[f"{rate}/difference"] = two - one
    families = sorted({row["family"] for row in news})
    for family in families:
        inside = np.array([row["family"] == family for row in news])
        columns[f"family/{family}"] = np.where(inside, columns["driving_score"], np.nan)
    runs = np.array([run for run, _, _ in pairs], np.int64)
    found, samples = _intervals_and_samples(columns, scene_index(news), resamples, runs)
    result: dict[str, Any] = {
        "n": len(pairs),
        "scenes": len({row["scene_id"] for row in news}),
        "runs": len(before),
        "left_out": dict(sorted(left_out.items())),
        "driving_score": found["driving_score"],
        "reward": found["reward"],
        "progress": found["measure/progress"],
        "open_loop": {name: found[f"measure/{name}"] for name in open_loop},
        "rates": {},
        "by_family": {family: found[f"family/{family}"] for family in families},
    }
    for rate in rates:
        base, now = found[f"{rate}/before"], found[f"{rate}/after"]
        ratio: dict[str, Any] = {"mean": None, "low": None, "high": None, "n": base["n"]}
        if base["mean"]:
            with np.errstate(divide="ignore", invalid="ignore"):
                low, high = bounds(samples[f"{rate}/after"] / samples[f"{rate}/before"])
            ratio |= {"mean": now["mean"] / base["mean"], "low": low, "high": high}
        difference = found[f"{rate}/difference"]
        result["rates"][rate] = {"before": base, "after": now, "difference": difference, "ratio": ratio}
    return result


def _why_not(old: Row | None, new: Row) -> str | None:
    """Why two drives do not pair; None if they do."""
    if old is None:
        return "unmatched"
    if old["failed"] or new["failed"]:
        return "void"
    if not (usable(old) and usable(new)):
        return "initial_fault"
    return None if old.get("scene_hash", "") == new.get("scene_hash", "") else "other_scene"


def _intervals(columns: dict[str, Float], scenes: NDArray[np.int64], resamples: int) -> dict[str, dict[str, Any]]:
    return _intervals_and_samples(columns, scenes, resamples, None)[0]


def _intervals_and_samples(
    columns: dict[str, Float], scenes: NDArray[np.int64], resamples: int, runs: NDArray[np.int64] | None
) -> tuple[dict[str, dict[str, Any]], dict[str, Float]]:
    """Mean, low, high and n of each column, and its resampled means [B]."""
    if not len(scenes):
        return {name: with_bounds(np.nan, np.zeros(0), 0) for name in columns}, {}
    samples = Bootstrap(scenes, resamples, runs).means(np.stack(list(columns.values()), axis=1))
    found = {}
    for k, (name, values) in enumerate(columns.items()):
        good = values[np.isfinite(values)]
        found[name] = with_bounds(float(good.mean()) if len(good) else np.nan, samples[:, k], len(good))
    return found, {name: samples[:, k] for k, name in enumerate(columns)}


def _moments(values: Float) -> dict[str, Any]:
    good = values[np.isfinite(values)]
    if not len(good):
        return {"mean": None, "std": None, "n": 0}
    return {"mean": float(good.mean()), "std": float(good.std()), "n": len(good)}


def scene_index(rows: Sequence[Row]) -> NDArray[np.int64]:
    """[M]: a number for each row's scene."""
    if not rows:
        return np.zeros(0, np.int64)
    return np.unique([row["scene_id"] for row in rows], return_inverse=True)[1]


def _column(rows: Sequence[Row], name: str) -> Float:
    return np.array([_number(row.get(name)) for row in rows], np.float64)


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)
