"""Facts about the manner of a drive, for telling a policy that parks, creeps, speeds or weaves from one that drives."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.types import MeasureSeries

NAMES = ("drive/distance_m", "drive/speed_ratio", "drive/standing_share", "drive/weaving_per_s")
SHORTEST_REFERENCE_M = 5.0
STANDING_MPS = 0.5
YAW_RATE_RADPS = 0.05
"""A turn counts as one from this yaw rate on: smaller swings are corrections that nobody feels."""


def drive_facts(measures: Mapping[str, MeasureSeries]) -> dict[str, float]:
    """Manner of one drive; NaN where the world does not report what it takes.

    Returns:
        drive/distance_m: path length.
        drive/speed_ratio: path length over that of the recording in the same time, while both last; NaN for a
            recording that stays within 5 m. Below 1 slower, above 1 faster than the recording.
        drive/standing_share: share of samples below 0.5 m/s.
        drive/weaving_per_s: changes between a left and a right turn, each of at least 0.05 rad/s, a second.

    """
    speed, ahead, yaw_rate = (measures.get(n) for n in ("speed_mps", "along_track_error_m", "yaw_rate_radps"))
    facts = dict.fromkeys(NAMES, float("nan"))
    if speed is not None and speed.valid.all():
        driven_m = _distance(speed)
        facts["drive/distance_m"] = float(driven_m[-1])
        facts["drive/standing_share"] = float(np.mean(np.abs(speed.value) < STANDING_MPS))
        if ahead is not None and len(ahead.value) == len(driven_m) and ahead.valid.any():
            last = int(np.flatnonzero(ahead.valid)[-1])
            recorded_m = driven_m[last] - ahead.value[last]
            if recorded_m >= SHORTEST_REFERENCE_M:
                facts["drive/speed_ratio"] = float(driven_m[last] / recorded_m)
    if yaw_rate is not None and len(yaw_rate.value) > 1:
        good = yaw_rate.value[yaw_rate.valid]
        turns = np.sign(good[np.abs(good) >= YAW_RATE_RADPS])
        seconds = float(yaw_rate.time_us[-1] - yaw_rate.time_us[0]) * 1e-6
        facts["drive/weaving_per_s"] = np.count_nonzero(np.diff(turns)) / seconds
    return facts


def _distance(speed: MeasureSeries) -> NDArray[np.float64]:
    """[M] m driven since the first sample, by trapezoids."""
    seconds = np.diff(speed.time_us) * 1e-6
    value = np.abs(speed.value)
    return np.concatenate([[0.0], np.cumsum((value[1:] + value[:-1]) / 2.0 * seconds)])
