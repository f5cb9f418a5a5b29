"""From AlpaSim's metrics, which come with the rollout's end and cover all of it, to measures from the handover on.

Two families, never under one name. `alpasim/<metric>` is AlpaSim's number at each tick, `alpasim/scene_score` its
score. Ours, under the names that rewards and the driving score read: counts of events, as AlpaSim's scorer sees the
boxes (it shrinks and rounds them; a driver is told of no other road user), and progress along the recorded drive.
Counts and progress stop at the first end event, and pace and speed, which poses give, are undefined after it: what a
drive earns must not depend on the world it was in. Only the end tells of events, so these are paid then. The distance
to the recording goes on, as AlpaSim's own does (ADR 46). A world of ours that is served as an AlpaSim
(`alpagym serve`) sends its own numbers too, as `alpagym/<measure>`; those then stand under our names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.simulators.alpasim.wire import runtime_pb2
from alpagym_runtime.types import GOAL_PROGRESS, MeasureSeries

Aggregation = Literal["last", "max", "min", "mean", "median"]

METRICS: dict[str, Aggregation] = {
    "collision_any": "max",
    "collision_front": "max",
    "collision_lateral": "max",
    "collision_rear": "max",
    "dist_to_gt_location": "max",
    "dist_to_gt_trajectory": "max",
    "dist_traveled_m": "last",
    "gt_dist_traveled_m": "last",
    "min_distance_to_lane_boundary_m": "min",
    "min_distance_to_obstacle_m": "min",
    "offroad": "max",
    "plan_deviation": "mean",
    "progress": "last",
    "progress_rel": "min",
    "progress_rel_to_total": "last",
    "wrong_lane": "max",
}
"""AlpaSim's metrics that a series is always given for (without a valid sample where AlpaSim sent none)."""

EVENTS = ("collision_any", "collision_front", "collision_lateral", "collision_rear", "offroad", "wrong_lane")
AGGREGATIONS: dict[int, Aggregation] = {1: "mean", 2: "median", 3: "max", 4: "min", 5: "last"}

POSE_MEASURES: dict[str, Aggregation] = {"along_track_error_m": "last", "distance_to_gt_m": "mean", "speed_mps": "mean"}
"""From the poses that a driver is told, so each tick has them."""

UNTIL_EVENT = ("along_track_error_m", "speed_mps")
END_MEASURES = ("collision_at_fault_count", "collision_count", "initial_fault", "offroad_count", "progress")

EXACT = "alpagym/"
"""Metrics that are our own measures already."""

GT_CUT_M = 4.0
"""AlpaSim's score leaves out what follows when the ego is this far from the recorded path."""

STANDING_M = 5.0
FULL_SCORE_PROGRESS = 0.8


def end_measures() -> dict[str, Literal["tick", "end"]]:
    """Every measure of this world and when it comes."""
    late = [*UNTIL_EVENT, *END_MEASURES, *(f"alpasim/{name}" for name in METRICS), "alpasim/scene_score"]
    timely = [name for name in POSE_MEASURES if name not in UNTIL_EVENT]
    return {**dict.fromkeys(timely, "tick"), **dict.fromkeys(late, "end")}  # type: ignore[dict-item]


def measures_of(
    metrics: Iterable[runtime_pb2.SimulationReturn.TimestepMetric],
    tick_us: NDArray[np.int64],
    period_us: int,
    progress: NDArray[np.float64],
    progress_valid: NDArray[np.bool_],
    *,
    standing: bool = False,
) -> dict[str, MeasureSeries]:
    """All measures that come with the end, at the ticks' times; counts and progress stop at the first end event.

    Args:
        metrics: what AlpaSim sent.
        tick_us: [T+1], the handover's time first.
        period_us: the control period; a sample holds for the tick in whose period it lies.
        progress: [T+1], furthest share of the recorded drive so far.
        progress_valid: [T+1].
        standing: the recording stays where it is, so there is no goal to reach.

    """
    out: dict[str, MeasureSeries] = {}
    exact: dict[str, MeasureSeries] = {}
    for metric in metrics:
        series = _at_ticks(metric, tick_us, period_us)
        if metric.name.startswith(EXACT):
            exact[metric.name.removeprefix(EXACT)] = series
        else:
            out[f"alpasim/{metric.name}"] = series
    nothing = np.zeros(len(tick_us))
    for short, aggregation in METRICS.items():
        name = f"alpasim/{short}"
        if name not in out:
            out[name] = MeasureSeries(tick_us.copy(), nothing.copy(), np.zeros(len(tick_us), bool), aggregation)
    collides, left = out["alpasim/collision_any"], out["alpasim/offroad"]
    fault = _either(out["alpasim/collision_front"], out["alpasim/collision_lateral"])
    goal = np.flatnonzero((progress[1:] >= GOAL_PROGRESS) & progress_valid[1:] & (not standing))
    reached = int(goal[0]) + 1 if len(goal) else len(tick_us)
    end = min(_first_rise(collides), _first_rise(left), reached, len(tick_us) - 1)
    out["collision_count"] = _count(collides, end)
    out["collision_at_fault_count"] = _count(fault, end)
    out["offroad_count"] = _count(left, end)
    at_start = any(bool(s.valid[0]) and s.value[0] > 0.0 for s in (collides, left))
    known = bool(collides.valid[0] or left.valid[0])
    out["initial_fault"] = MeasureSeries(
        tick_us.copy(), np.full(len(tick_us), float(at_start)), np.full(len(tick_us), known), "last"
    )
    held = np.minimum(np.arange(len(tick_us)), end)
    out["progress"] = MeasureSeries(tick_us.copy(), progress[held], progress_valid[held], "last")
    out["alpasim/scene_score"] = _scene_score(out, tick_us)
    return out | {name: series for name, series in exact.items() if name in END_MEASURES}


def ticks_until_event(measures: Mapping[str, MeasureSeries], *, standing: bool) -> int:
    """How many of a drive's samples its first end event leaves defined: those up to the tick in which it happens.

    Args:
        measures: as `measures_of` makes them.
        standing: the recording stays where it is, so there is no goal to reach.

    """
    progress = measures["progress"].value
    happened = (progress >= GOAL_PROGRESS) & (not standing)
    for name in ("collision_count", "offroad_count"):
        happened = happened | (measures[name].value > 0.0)
    # What is true at the handover is no event of the drive.
    first = np.flatnonzero(happened[1:])
    return int(first[0]) + 2 if len(first) else len(progress)


def _at_ticks(
    metric: runtime_pb2.SimulationReturn.TimestepMetric, tick_us: NDArray[np.int64], period_us: int
) -> MeasureSeries:
    aggregation = AGGREGATIONS.get(metric.time_aggregation, METRICS.get(metric.name, "last"))
    count = min(len(metric.timestamps_us), len(metric.values), len(metric.valid))
    times = np.array(metric.timestamps_us[:count], np.int64)
    values = np.array(metric.values[:count], np.float64)
    valid = np.array(metric.valid[:count], bool) & np.isfinite(values)
    order = np.argsort(times, kind="stable")
    times, values, valid = times[order], values[order], valid[order]
    first, last = np.searchsorted(times, tick_us - period_us, "right"), np.searchsorted(times, tick_us, "right")
    out, known = np.zeros(len(tick_us)), np.zeros(len(tick_us), bool)
    for k, (a, b) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        good = values[a:b][valid[a:b]]
        if len(good):
            # An event between two ticks belongs to the later one; of other numbers the newest counts.
            out[k], known[k] = good.max() if metric.name in EVENTS and k else good[-1], True
    return MeasureSeries(tick_us.copy(), out, known, aggregation)


def _either(a: MeasureSeries, b: MeasureSeries) -> MeasureSeries:
    value = np.maximum(np.where(a.valid, a.value, 0.0), np.where(b.valid, b.value, 0.0))
    return MeasureSeries(a.time_us, value, a.valid | b.valid, "max")


def _rises(series: MeasureSeries) -> NDArray[np.bool_]:
    """[T+1] where an event begins; what is true at the handover is an initial fault, not an event."""
    now = np.where(series.valid, series.value, 0.0) > 0.0
    return np.concatenate([[False], now[1:] & ~now[:-1]])


def _first_rise(series: MeasureSeries) -> int:
    rises = np.flatnonzero(_rises(series))
    return int(rises[0]) if len(rises) else len(series.value)


def _count(series: MeasureSeries, end: int) -> MeasureSeries:
    rises = _rises(series)
    rises[end + 1 :] = False
    valid = np.full(len(rises), bool(series.valid.any()))
    return MeasureSeries(series.time_us.copy(), np.cumsum(rises).astype(np.float64), valid, "last")


def _scene_score(measures: dict[str, MeasureSeries], tick_us: NDArray[np.int64]) -> MeasureSeries:
    """AlpaSim's score over the driven part, at the last tick: its cuts first, then collision, off-road, progress."""
    count = len(tick_us)
    value, valid = np.zeros(count), np.zeros(count, bool)

    def seen(name: str, until: int) -> NDArray[np.float64]:
        series = measures[f"alpasim/{name}"]
        return series.value[:until][series.valid[:until]]

    bad = np.zeros(count, bool)
    for name in ("collision_any", "offroad"):
        series = measures[f"alpasim/{name}"]
        bad |= series.valid & (series.value > 0.0)
    far = measures["alpasim/dist_to_gt_trajectory"]
    cuts = [np.flatnonzero(bad), np.flatnonzero(far.valid & (far.value >= GT_CUT_M))]
    until = min([int(cut[0]) + 1 for cut in cuts if len(cut)] + [count])
    progress, length = seen("progress_rel_to_total", until), seen("gt_dist_traveled_m", until)
    needed = [seen(name, until) for name in ("collision_front", "collision_lateral", "offroad")]
    if all(len(part) for part in (*needed, progress, length)):
        valid[-1] = True
        if any(part.max() > 0.0 for part in needed):
            value[-1] = 0.0
        elif length[-1] < STANDING_M:
            value[-1] = 1.0
        else:
            value[-1] = min(min(max(progress[-1], 0.0), 1.0) / FULL_SCORE_PROGRESS, 1.0)
    return MeasureSeries(tick_us.copy(), value, valid, "last")
