"""Plans as trajectory tokens and back, in numpy: what a completion means, and the round trip of the published rewards.

The same published formulas as the Alpamayo package's (which trains through them in torch); a test holds the two against
each other. Encoding solves four small regularised least-squares problems, in float64.

Source: action space and tokenizer of NVlabs/alpamayo (formulas and constants), written anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float = NDArray[np.float64]

RIDGE_STEPS = 8


@dataclass(frozen=True)
class TrajectoryCodec:
    """T controls (acceleration m/s², curvature 1/m), normalised, as 2 T bins a0 k0 a1 k1 and so on.

    Defaults are those of the released configuration.
    """

    waypoints: int = 64
    step_s: float = 0.1
    accel_mean: float = 0.02902694707164455
    accel_std: float = 0.6810426736454882
    curvature_mean: float = 0.0002692167976330542
    curvature_std: float = 0.026148280660833106
    low: float = -10.0
    high: float = 10.0
    bins: int = 3000

    @property
    def tokens(self) -> int:
        """Tokens a plan."""
        return 2 * self.waypoints

    def decode(self, bins: ArrayLike, speed_mps: ArrayLike) -> Float:
        """Plans [...,T,3] (x m, y m, yaw rad, not wrapped) of bins [...,2T] from a start speed [...]."""
        u = np.asarray(bins, np.float64) / (self.bins - 1) * (self.high - self.low) + self.low
        a = u[..., 0::2] * self.accel_std + self.accel_mean
        k = u[..., 1::2] * self.curvature_std + self.curvature_mean
        dt = self.step_s
        start = np.asarray(speed_mps, np.float64)[..., None]
        speed = np.concatenate([start, start + np.cumsum(a * dt, axis=-1)], axis=-1)
        yaw = np.cumsum(k * (speed[..., :-1] * dt + a * (dt * dt / 2.0)), axis=-1)
        before = np.concatenate([np.zeros_like(yaw[..., :1]), yaw[..., :-1]], axis=-1)
        x = speed[..., :-1] * np.cos(before) + speed[..., 1:] * np.cos(yaw)
        y = speed[..., :-1] * np.sin(before) + speed[..., 1:] * np.sin(yaw)
        return np.stack([np.cumsum(x, axis=-1) * dt / 2.0, np.cumsum(y, axis=-1) * dt / 2.0, yaw], axis=-1)

    def encode(self, history_xy: ArrayLike, history_yaw: ArrayLike, plan: ArrayLike) -> NDArray[np.int64]:
        """Bins [...,2T] of plans [...,T,3]; history [...,H,2] m and [...,H] rad end at the origin."""
        u = self.actions(history_xy, history_yaw, plan)
        # Single precision and rounding to even, as published: a standing car gets the same bins everywhere.
        scaled = (u.astype(np.float32) - np.float32(self.low)) / np.float32(self.high - self.low)
        rounded = np.clip(np.rint(scaled * np.float32(self.bins - 1)), 0, self.bins - 1).astype(np.int64)
        return rounded.reshape(*u.shape[:-2], self.tokens)

    def actions(self, history_xy: ArrayLike, history_yaw: ArrayLike, plan: ArrayLike) -> Float:
        """Normalised acceleration and curvature [...,T,2] of plans [...,T,3]."""
        path = np.asarray(plan, np.float64)
        dt, count = self.step_s, self.waypoints
        if path.shape[-2:] != (count, 3):
            raise ValueError(f"plan must be [..., {count}, 3], got {path.shape}")
        start = self.initial_speed(history_xy, history_yaw)
        yaw = _headings(np.unwrap(path[..., 2], axis=-1).astype(np.float64), dt)
        direction = np.stack([np.cos(yaw), np.sin(yaw)], axis=-1)
        first = np.zeros_like(path[..., :1, :2])
        steps = np.diff(np.concatenate([first, path[..., :2]], axis=-2), axis=-2) * (2.0 / dt)
        speed = _speeds(direction, steps, start, dt)
        smooth = _smoothness(2, count, 1e-4, dt)
        acceleration = _solve(np.eye(count) + smooth, np.diff(speed, axis=-1) / dt, 1e-4)
        distance = speed[..., :-1] * dt + acceleration * (dt * dt / 2.0)
        gram = distance[..., None] * distance[..., None] * np.eye(count) + smooth
        curvature = _solve(gram, distance * np.diff(yaw, axis=-1), 1e-4)
        return np.stack(
            [
                (acceleration - self.accel_mean) / self.accel_std,
                (curvature - self.curvature_mean) / self.curvature_std,
            ],
            axis=-1,
        )

    def initial_speed(self, history_xy: ArrayLike, history_yaw: ArrayLike) -> Float:
        """Speed [...] m/s at the last of the history's poses [...,H,2] m, [...,H] rad, smoothed over them."""
        xy, yaw = np.asarray(history_xy, np.float64)[..., :2], np.asarray(history_yaw, np.float64)
        direction = np.stack([np.cos(yaw), np.sin(yaw)], axis=-1)
        steps = np.diff(xy, axis=-2) * (2.0 / self.step_s)
        last: Float = _speeds(direction, steps, None, self.step_s)[..., -1]
        return last


def _smoothness(degree: int, count: int, weight: float, dt: float) -> Float:
    """Weight / dt^(2n) · Dᵀ D of the n-th difference: [count,count]."""
    matrix = np.diff(np.eye(count), n=degree, axis=0)
    result: Float = matrix.T @ matrix * (weight / dt ** (2 * degree))
    return result


def _headings(yaw: Float, dt: float) -> Float:
    """Smoothed headings [...,T+1] of [...,T]; the first is 0."""
    count = yaw.shape[-1]
    gram = np.eye(count) + _smoothness(3, count + 1, 1e-6, dt)[1:, 1:]
    inner = _solve(gram, yaw, 1e-8)
    return np.concatenate([np.zeros_like(inner[..., :1]), inner], axis=-1)


def _speeds(direction: Float, steps: Float, start: Float | None, dt: float) -> Float:
    """Speeds [...,P] with v_t u_t + v_{t+1} u_{t+1} = step_t; `start` [...] fixes the first."""
    count = direction.shape[-2]
    inner = np.sum(direction[..., :-1, :] * direction[..., 1:, :], axis=-1)
    touched = np.full(count, 2.0)
    touched[[0, -1]] = 1.0
    gram = np.broadcast_to(_smoothness(3, count, 1e-6, dt) + np.diag(touched), (*inner.shape[:-1], count, count)).copy()
    at = np.arange(count - 1)
    gram[..., at, at + 1] += inner
    gram[..., at + 1, at] += inner
    right = np.zeros(direction.shape[:-1])
    right[..., :-1] += np.sum(direction[..., :-1, :] * steps, axis=-1)
    right[..., 1:] += np.sum(direction[..., 1:, :] * steps, axis=-1)
    if start is None:
        return _solve(gram, right, 1e-4)
    rest = _solve(gram[..., 1:, 1:], right[..., 1:] - gram[..., 1:, 0] * start[..., None], 1e-4)
    return np.concatenate([start[..., None], rest], axis=-1)


def _solve(gram: Float, right: Float, ridge: float) -> Float:
    """(gram + ridge · 1) x = right for [...,n], ten times the ridge where that is not positive definite."""
    gram = np.broadcast_to(gram, (*right.shape[:-1], *gram.shape[-2:]))
    out = np.empty_like(right)
    for row in np.ndindex(right.shape[:-1]):
        weight = ridge
        for _ in range(RIDGE_STEPS):
            matrix = gram[row] + weight * np.eye(right.shape[-1])
            try:
                np.linalg.cholesky(matrix)
                break
            except np.linalg.LinAlgError:
                weight *= 10.0
        else:
            raise ValueError(f"the drive cannot be encoded: no positive definite system with a ridge of {weight:.1e}")
        out[row] = np.linalg.solve(matrix, right[row])
    return out
