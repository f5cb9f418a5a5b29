"""Plans as acceleration and curvature at a few knots in time, and back.

The knots lie at 0, 0.5, 1, 1.5, 2, 3, 4.5 and 6.4 s, linear between; rolled out from the present speed they give 64
poses, 0.1 s apart, in the rig frame. Zero keeps speed and heading.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.kernels import kernel

KNOT_TIMES_S = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.5, 6.4])
PLAN_STEPS = 64
STEP_S = 0.1

# Value of each interval's middle as a mix of the knots: [64,8].
_MIDDLES_S = (np.arange(PLAN_STEPS) + 0.5) * STEP_S
INTERPOLATION = np.stack([np.interp(_MIDDLES_S, KNOT_TIMES_S, row) for row in np.eye(len(KNOT_TIMES_S))], axis=1)


def roll_out(knots: NDArray[np.float64], speed_mps: NDArray[np.float64]) -> NDArray[np.float32]:
    """Plans [N,64,3] (x m, y m, yaw rad in the rig frame) from knots and the present speed.

    Args:
        knots: [N,2,8], acceleration m/s2 and curvature 1/m.
        speed_mps: [N], not negative; the plan stops at standstill, it never reverses.

    """
    values = np.asarray(knots, np.float64) @ INTERPOLATION.T
    return _integrate(values[:, 0], values[:, 1], np.maximum(np.asarray(speed_mps, np.float64), 0.0))


@kernel
def _integrate(acceleration, curvature, speed):
    count, steps = acceleration.shape
    out = np.empty((count, steps, 3), np.float32)
    for n in range(count):
        x, y, yaw, v = 0.0, 0.0, 0.0, speed[n]
        for k in range(steps):
            after = max(v + acceleration[n, k] * 0.1, 0.0)
            ds = (v + after) / 2.0 * 0.1
            heading = yaw + curvature[n, k] * ds / 2.0
            x += ds * np.cos(heading)
            y += ds * np.sin(heading)
            yaw += curvature[n, k] * ds
            v = after
            out[n, k, 0], out[n, k, 1], out[n, k, 2] = x, y, yaw
    return out


def knots_of_plan(plan_rig: NDArray[np.float32], speed_mps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Knots [N,2,8] whose roll-out follows plans [N,64,3]: ridge least squares on speed and heading changes.

    Exact for plans that `roll_out` made; where a plan hardly moves its curvature is 0.
    """
    plan = np.asarray(plan_rig, np.float64)
    before = np.concatenate([np.zeros_like(plan[:, :1]), plan[:, :-1]], axis=1)
    turn = (plan[..., 2] - before[..., 2] + np.pi) % (2.0 * np.pi) - np.pi
    middle = before[..., 2] + turn / 2.0
    step = plan[..., :2] - before[..., :2]
    ds = step[..., 0] * np.cos(middle) + step[..., 1] * np.sin(middle)
    # Speeds at the plan's points from the mean speed of each interval would ring; differences of means do not:
    # mean_k - mean_{k-1} is the acceleration at the point between two intervals, and the first is known from `speed`.
    mean = ds / STEP_S
    first = 2.0 * (mean[:, :1] - np.asarray(speed_mps, np.float64)[:, None]) / STEP_S
    acceleration = np.concatenate([first, np.diff(mean, axis=1) / STEP_S], axis=1)
    times = np.concatenate([[STEP_S / 4.0], np.arange(1, PLAN_STEPS) * STEP_S])
    basis = np.stack([np.interp(times, KNOT_TIMES_S, row) for row in np.eye(len(KNOT_TIMES_S))], axis=1)
    ridge = 1e-6 * np.eye(len(KNOT_TIMES_S))
    acceleration_knots = np.linalg.solve(basis.T @ basis + ridge, basis.T @ acceleration[..., None])[..., 0]
    # Curvature is weighted by the distance it acts on; standing parts say nothing.
    weight = np.clip(ds, 0.0, None)[..., None]
    gram = np.einsum("nkr,kc->nrc", weight * weight * INTERPOLATION, INTERPOLATION)
    right = np.einsum("nk,kc->nc", weight[..., 0] * turn, INTERPOLATION)
    # A plan of 1 m in 6.4 s weighs 64·(1/64)^2 = 0.016; the ridge is a hundredth of that.
    smooth = np.diff(np.eye(len(KNOT_TIMES_S)), axis=0)
    gram = gram + 1e-4 * np.eye(len(KNOT_TIMES_S)) + 1e-3 * (smooth.T @ smooth)
    curvature_knots = np.linalg.solve(gram, right[..., None])[..., 0]
    return np.stack([acceleration_knots, curvature_knots], axis=1)
