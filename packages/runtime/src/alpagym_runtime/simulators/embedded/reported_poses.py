"""Poses between the world's samples, where they are reported more often: the ego's by its velocities, others' evenly.

AlpaSim's controller reports a pose every `pose_reporting_interval_us`, and others' poses come once a control period.
The grid of this world is 0.1 s; its vehicles integrate at 10 ms.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.geometry import wrap_angle
from alpagym_runtime.simulators.embedded.scene import STEP_US
from alpagym_runtime.simulators.embedded.vehicle import EGO_SLIP, EGO_SPEED, EGO_YAW_RATE, STEP_S

Float = NDArray[np.float64]
Times = NDArray[np.int64]


def reported_times(before_us: int, now_us: int, interval_us: int) -> Times:
    """Times after `before_us`, every interval, up to and with `now_us`; only that one if the interval is 0."""
    between = np.arange(before_us + interval_us, now_us, interval_us) if interval_us else np.zeros(0, np.int64)
    return np.append(between, now_us).astype(np.int64)


def ego_poses(states: Float, times_us: Times) -> Float:
    """[T,3] x, y, yaw of an ego whose states [K,10] (columns in `vehicle`) lie on the grid from 0 on.

    Between two states, cubics with the velocities and yaw rates of both: within 1 mm and 0.002 rad of the vehicles'
    own integration (`test_reported_poses.py`). At the grid's times it is the state itself.

    Raises:
        ValueError: a time outside the states.

    """
    k, rest = np.divmod(times_us, STEP_US)
    if len(times_us) and (times_us.min() < 0 or times_us.max() > (len(states) - 1) * STEP_US):
        raise ValueError(f"times {times_us.min()} to {times_us.max()} us, states 0 to {(len(states) - 1) * STEP_US} us")
    if not rest.any():
        return states[k, :3]
    a, b = states[k], states[np.minimum(k + 1, len(states) - 1)]
    t = (rest / STEP_US)[:, None]
    bend = (t - 1.0) * t
    # Hermite's cubic as the straight line and what bends it.
    start, end = _rates(a) * STEP_S, _rates(b) * STEP_S
    chord = b[:, :3] - a[:, :3]
    between = a[:, :3] + t * chord + bend * ((t - 1.0) * (start - chord) + t * (end - chord))
    return np.where(rest[:, None] == 0, a[:, :3], between)


def _rates(states: Float) -> Float:
    """[T,3] velocity x, y m/s local and yaw rate rad/s."""
    cos, sin, speed, slip = np.cos(states[:, 2]), np.sin(states[:, 2]), states[:, EGO_SPEED], states[:, EGO_SLIP]
    return np.stack([speed * cos - slip * sin, speed * sin + slip * cos, states[:, EGO_YAW_RATE]], axis=1)


def others_between(
    before: tuple[Times, Float], after: tuple[Times, Float], part: float
) -> tuple[NDArray[np.int64], NDArray[np.int64], Float]:
    """Who is there both before and after, and where at `part` in [0, 1) of the way; ids [A] and poses [A,3] each.

    Returns ids [B], their rows in `before` [B], and poses [B,3].
    """
    ids, i, j = np.intersect1d(before[0], after[0], return_indices=True)
    start, end = before[1][i], after[1][j]
    turn = np.column_stack([end[:, :2] - start[:, :2], wrap_angle(end[:, 2] - start[:, 2])])
    return ids, i, start + part * turn
