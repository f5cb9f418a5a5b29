"""What a plan is worth against the recording: displacement, comfort, corners. Numpy, any leading axes.

Source: evaluation and rewards of NVlabs/alpamayo-recipes (formulas and bounds), written anew.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float = NDArray[np.float64]

RATE_HZ = 10.0
PREFIXES_S = (0.5, 1.0, 3.0, 5.0)
BOX_M = (4.0, 3.0, 2.0)
"""Length, width, height of the box of `corner_distance`."""

COMFORT_BOUNDS = {
    "lon_accel": (-4.05, 2.40),
    "lat_accel": (-4.89, 4.89),
    "jerk": (-8.37, 8.37),
    "lon_jerk": (-4.13, 4.13),
    "yaw_accel": (-1.93, 1.93),
    "yaw_rate": (-0.95, 0.95),
}
"""Strict bounds of each check: m/s², m/s³, rad/s², rad/s (nuPlan's)."""


def displacements(plan: ArrayLike, target: ArrayLike) -> Float:
    """Distance [...,T] m in the plane of plans [...,T,2+] to targets [...,T,2+]."""
    difference = np.asarray(plan, np.float64)[..., :2] - np.asarray(target, np.float64)[..., :2]
    return np.hypot(difference[..., 0], difference[..., 1])


def average(distances: Float, valid: ArrayLike | None = None) -> Float:
    """Mean [...] over the valid steps of [...,T]; NaN where none is."""
    if valid is None:
        mean: Float = distances.mean(axis=-1)
        return mean
    mask = np.broadcast_to(np.asarray(valid, bool), distances.shape)
    count = mask.sum(axis=-1)
    total = np.where(mask, distances, 0.0).sum(axis=-1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def comfort_checks(plan: ArrayLike) -> dict[str, NDArray[np.bool_]]:
    """Whether plans [...,T,3] pass each check: all T values strictly inside its bounds.

    Rates are forward differences times 10 Hz, the last one repeated. The lateral acceleration is the rate of the
    body-frame lateral velocity, near zero in a steady turn: not centripetal.
    """
    path = np.asarray(plan, np.float64)
    x, y, yaw = path[..., 0], path[..., 1], path[..., 2]
    dx, dy, cos, sin = _rate(x), _rate(y), np.cos(yaw), np.sin(yaw)
    lon_accel, yaw_rate = _rate(dx * cos + dy * sin), _rate(yaw, wrap=True)
    values = {
        "lon_accel": lon_accel,
        "lat_accel": _rate(-dx * sin + dy * cos),
        "jerk": _rate(_rate(np.hypot(dx, dy))),
        "lon_jerk": _rate(lon_accel),
        "yaw_accel": _rate(yaw_rate),
        "yaw_rate": yaw_rate,
    }
    return {
        name: np.asarray(((values[name] > low) & (values[name] < high)).all(axis=-1))
        for name, (low, high) in COMFORT_BOUNDS.items()
    }


def comfort_score(checks: dict[str, NDArray[np.bool_]]) -> Float:
    """Share of passed checks less 1, in [-1, 0]."""
    score: Float = np.mean([checks[name] for name in COMFORT_BOUNDS], axis=0) - 1.0
    return score


def _rate(values: Float, wrap: bool = False) -> Float:
    step = np.diff(values, axis=-1)
    if wrap:
        step = np.mod(step + np.pi, 2.0 * np.pi) - np.pi
    rate = step * RATE_HZ
    return np.concatenate([rate, rate[..., -1:]], axis=-1)


def minimum_displacements(plans: ArrayLike, target: ArrayLike, step_s: float = 0.1) -> dict[str, Float]:
    """The minADE family of K plans [...,K,T,3] against a target [...,T,3]; each [...] m.

    `min_ade`: of the plan that is nearest over all T steps. `min_ade/by_t=t`: the mean of that same plan's first t
    seconds. `min_ade@ts`: of the plan that is nearest over its first t seconds, chosen anew.
    """
    distances = displacements(plans, np.asarray(target)[..., None, :, :])
    best = np.argmin(distances.mean(axis=-1), axis=-1)
    nearest = np.take_along_axis(distances, best[..., None, None], axis=-2)[..., 0, :]
    out = {"min_ade": nearest.mean(axis=-1)}
    for seconds in PREFIXES_S:
        steps = min(round(seconds / step_s), distances.shape[-1])
        out[f"min_ade/by_t={seconds}"] = nearest[..., :steps].mean(axis=-1)
    for seconds in PREFIXES_S:
        steps = min(round(seconds / step_s), distances.shape[-1])
        out[f"min_ade@{seconds}s"] = distances[..., :steps].mean(axis=-1).min(axis=-1)
    return out


def corner_distance(plans: ArrayLike, target: ArrayLike, target_z: ArrayLike | None = None) -> Float:
    """Mean distance [...] m of a box's corners, least over K plans [...,K,T,3] a corner and step, to the target's.

    The box is 4 x 3 x 2 m around each pose, turned by its yaw; plans lie at z = 0, the target at `target_z` [...,T].
    """
    own, other = _corners(np.asarray(plans, np.float64), None), _corners(np.asarray(target, np.float64), target_z)
    distance = np.linalg.norm(own - other[..., None, :, :, :], axis=-1)
    mean: Float = distance.min(axis=-3).mean(axis=(-1, -2))
    return mean


def _corners(poses: Float, z: ArrayLike | None) -> Float:
    """Corners [...,T,8,3] of boxes at poses [...,T,3]."""
    signs = np.array([[a, b, c] for a in (-0.5, 0.5) for b in (-0.5, 0.5) for c in (-0.5, 0.5)]) * np.array(BOX_M)
    cos, sin = np.cos(poses[..., 2, None]), np.sin(poses[..., 2, None])
    height = np.zeros(poses.shape[:-1]) if z is None else np.asarray(z, np.float64)
    x = poses[..., 0, None] + cos * signs[:, 0] - sin * signs[:, 1]
    y = poses[..., 1, None] + sin * signs[:, 0] + cos * signs[:, 1]
    return np.stack([x, y, np.broadcast_to(height[..., None] + signs[:, 2], x.shape)], axis=-1)
