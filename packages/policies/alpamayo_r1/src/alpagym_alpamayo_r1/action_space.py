"""Plans as normalised acceleration and curvature of a unicycle, and back.

Decoding integrates exactly; encoding solves four small regularised least-squares problems, all rows at once. Whatever
the dtype of the input, the solves run in float64: upstream's float32 solves differ by up to 3e-4 (normalised), and near
standstill, where curvature is heading change over almost no distance, single precision is what makes them explode
(NVlabs/alpamayo issue 113). The ridge r = 1e-4 bounds what remains, in the 2-norm over the steps: |curvature| <=
r^-1/2 |heading changes|, that is 100 of them.

Frames: everything is in the rig frame of the last history pose, whose position is the origin and whose yaw is 0.

Source: the published action space of NVlabs/alpamayo (formulas and constants), written anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alpagym_plugins import ConfigError

ACCELERATION, CURVATURE = "accel", "curvature"
RIDGE_STEPS = 8


@dataclass(frozen=True)
class Path:
    """A decoded plan: xy [...,T,2] m, yaw [...,T] rad (not wrapped), speed [...,T] m/s at each pose."""

    xy: Tensor
    yaw: Tensor
    speed: Tensor


@dataclass(frozen=True)
class UnicycleActionSpace:
    """T controls (acceleration m/s², curvature 1/m), constant over a step, normalised to zero mean and unit variance.

    Attributes:
        waypoints: T.
        step_s: time between poses, of history and future.
        accel_mean, accel_std, curvature_mean, curvature_std: of the normalisation.
        accel_bounds, curvature_bounds: what `is_within_bounds` tests; nothing is ever clipped.
        order: which of the two stands first in the last axis; a checkpoint's config decides.
        a_lambda, a_ridge, kappa_lambda, kappa_ridge, theta_lambda, theta_ridge, v_lambda, v_ridge: weights of
            smoothness and ridge in the four solves (kappa: curvature, theta: heading).

    """

    waypoints: int = 64
    step_s: float = 0.1
    accel_mean: float = 0.0
    accel_std: float = 1.0
    curvature_mean: float = 0.0
    curvature_std: float = 1.0
    accel_bounds: tuple[float, float] = (-9.8, 9.8)
    curvature_bounds: tuple[float, float] = (-0.2, 0.2)
    order: tuple[str, str] = (ACCELERATION, CURVATURE)
    a_lambda: float = 1e-4
    a_ridge: float = 1e-4
    kappa_lambda: float = 1e-4
    kappa_ridge: float = 1e-4
    theta_lambda: float = 1e-6
    theta_ridge: float = 1e-8
    v_lambda: float = 1e-6
    v_ridge: float = 1e-4

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> UnicycleActionSpace:
        """From a checkpoint's `action_space_cfg`, without its `_target_`.

        Raises:
            ConfigError: an unknown key, or an order that is not a permutation of accel and curvature.

        """
        names = {"n_waypoints": "waypoints", "dt": "step_s", "action_order": "order"}
        own = set(UnicycleActionSpace.__dataclass_fields__) - set(names.values())
        values: dict[str, Any] = {}
        for key, value in config.items():
            if key.startswith("_"):
                continue
            if key not in own | names.keys():
                known = ", ".join(sorted(own | names.keys()))
                raise ConfigError(f"unknown key; known here: {known}", key=f"action_space_cfg.{key}")
            values[names.get(key, key)] = tuple(value) if isinstance(value, (list, tuple)) else value
        order = values.get("order", (ACCELERATION, CURVATURE))
        if sorted(order) != [ACCELERATION, CURVATURE]:
            raise ConfigError(
                f"must hold {ACCELERATION!r} and {CURVATURE!r} once each, got {list(order)}",
                key="action_space_cfg.action_order",
            )
        return UnicycleActionSpace(**values)

    # ---------------------------------------------------------------- decoding

    def decode(self, actions: Tensor, speed_mps: Tensor) -> Path:
        """The plan [...,T] that normalised actions drive; behind the last of them it keeps speed and curvature.

        Args:
            actions: [...,K,2], K <= T, in `order`.
            speed_mps: [...], at the last history pose.

        """
        acceleration, curvature = self._denormalise(actions)
        missing = self.waypoints - acceleration.shape[-1]
        acceleration = torch.nn.functional.pad(acceleration, (0, missing))
        curvature = torch.cat([curvature, curvature[..., -1:].expand(*curvature.shape[:-1], missing)], -1)
        dt = self.step_s
        speed = torch.cat([speed_mps[..., None], speed_mps[..., None] + torch.cumsum(acceleration * dt, -1)], -1)
        turn = curvature * (speed[..., :-1] * dt + acceleration * (dt * dt / 2.0))
        yaw = torch.cumsum(turn, -1)
        before = torch.cat([torch.zeros_like(yaw[..., :1]), yaw[..., :-1]], -1)
        x = speed[..., :-1] * torch.cos(before) + speed[..., 1:] * torch.cos(yaw)
        y = speed[..., :-1] * torch.sin(before) + speed[..., 1:] * torch.sin(yaw)
        xy = torch.cumsum(torch.stack([x, y], -1) * (dt / 2.0), -2)
        return Path(xy, yaw, speed[..., 1:])

    # ---------------------------------------------------------------- encoding

    def initial_speed(self, history_xyz: Tensor, history_yaw: Tensor) -> Tensor:
        """Speed [...] m/s at the last history pose: smoothed over the history [...,H,3] m, yaw [...,H] rad."""
        xy, yaw = history_xyz[..., :2].double(), history_yaw.double()
        steps = (xy[..., 1:, :] - xy[..., :-1, :]) * (2.0 / self.step_s)
        direction = torch.stack([torch.cos(yaw), torch.sin(yaw)], -1)
        return self._speeds(direction, steps, None)[..., -1].to(history_xyz.dtype)

    def encode(self, history_xyz: Tensor, history_yaw: Tensor, future_xyz: Tensor, future_yaw: Tensor) -> Tensor:
        """Normalised actions [...,T,2] whose plan follows the future.

        Args:
            history_xyz: [...,H,3] m, last row the origin.
            history_yaw: [...,H] rad.
            future_xyz: [...,T,3] m.
            future_yaw: [...,T] rad; any branch, unwrapped from its own first value.

        Returns:
            In the dtype of `future_xyz`; finite for finite input, but not bounded to the tokenizer's range.

        """
        if future_xyz.shape[-2] != self.waypoints:
            raise ValueError(f"future_xyz must be [..., {self.waypoints}, 3], got {list(future_xyz.shape)}")
        dt, count = self.step_s, self.waypoints
        xy = future_xyz[..., :2].double()
        start = self.initial_speed(history_xyz.double(), history_yaw)
        yaw = self._headings(unwrap(future_yaw.double()))
        direction = torch.stack([torch.cos(yaw), torch.sin(yaw)], -1)
        steps = torch.diff(torch.cat([torch.zeros_like(xy[..., :1, :]), xy], -2), dim=-2) * (2.0 / dt)
        speed = self._speeds(direction, steps, start)
        smooth = self._smoothness(2, count, self.a_lambda, xy)
        eye = torch.eye(count, dtype=xy.dtype, device=xy.device)
        change = torch.diff(speed, dim=-1)
        acceleration = _solve(eye + smooth, change / dt, self.a_ridge)
        distance = speed[..., :-1] * dt + acceleration * (dt * dt / 2.0)
        turn = torch.diff(yaw, dim=-1)
        gram = torch.diag_embed(distance * distance) + self._smoothness(2, count, self.kappa_lambda, xy)
        curvature = _solve(gram, distance * turn, self.kappa_ridge)
        return self._normalise(acceleration, curvature).to(future_xyz.dtype)

    def is_within_bounds(self, actions: Tensor) -> Tensor:
        """[...] bool: every acceleration and curvature of normalised actions [...,T,2] lies in its bounds."""
        values = zip(self._denormalise(actions), (self.accel_bounds, self.curvature_bounds), strict=True)
        inside = [(value >= low) & (value <= high) for value, (low, high) in values]
        return (inside[0] & inside[1]).all(-1)

    # ---------------------------------------------------------------- parts

    def _denormalise(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        first = self.order.index(ACCELERATION)
        return (
            actions[..., first] * self.accel_std + self.accel_mean,
            actions[..., 1 - first] * self.curvature_std + self.curvature_mean,
        )

    def _normalise(self, acceleration: Tensor, curvature: Tensor) -> Tensor:
        pair = [
            (acceleration - self.accel_mean) / self.accel_std,
            (curvature - self.curvature_mean) / self.curvature_std,
        ]
        return torch.stack(pair if self.order[0] == ACCELERATION else pair[::-1], -1)

    def _smoothness(self, degree: int, count: int, weight: float, like: Tensor) -> Tensor:
        """Weight / dt^(2n) · Dᵀ D of the n-th difference over `count` points: [count,count]."""
        matrix = torch.eye(count, dtype=like.dtype, device=like.device)
        for _ in range(degree):
            matrix = torch.diff(matrix, dim=0)
        return matrix.mT @ matrix * (weight / self.step_s ** (2 * degree))

    def _headings(self, yaw: Tensor) -> Tensor:
        """Smoothed headings [...,T+1] from [...,T]; the first is 0."""
        count = yaw.shape[-1]
        # The heading at t0 is known to be 0, so it adds nothing to the right-hand side.
        smooth = self._smoothness(3, count + 1, self.theta_lambda, yaw)[1:, 1:]
        eye = torch.eye(count, dtype=yaw.dtype, device=yaw.device)
        inner = _solve(eye + smooth, yaw, self.theta_ridge)
        return torch.cat([torch.zeros_like(inner[..., :1]), inner], -1)

    def _speeds(self, direction: Tensor, steps: Tensor, start: Tensor | None) -> Tensor:
        """Speeds [...,P] with v_t u_t + v_{t+1} u_{t+1} = step_t; `start` [...] fixes the first.

        Args:
            direction: unit vectors u [...,P,2].
            steps: [...,P-1,2], 2 · displacement / dt.
            start: known first speed, or None.

        """
        count = direction.shape[-2]
        # Normal equations of the two-point rows: a tridiagonal gram, assembled from the products of directions.
        inner = (direction[..., :-1, :] * direction[..., 1:, :]).sum(-1)
        square = (direction * direction).sum(-1)
        touched = torch.full((count,), 2.0, dtype=direction.dtype, device=direction.device)
        touched[0] = touched[-1] = 1.0
        gram = torch.diag_embed(square * touched)
        gram = gram + torch.diag_embed(inner, 1) + torch.diag_embed(inner, -1)
        gram = gram + self._smoothness(3, count, self.v_lambda, direction)
        along = (direction[..., :-1, :] * steps).sum(-1), (direction[..., 1:, :] * steps).sum(-1)
        right = torch.nn.functional.pad(along[0], (0, 1)) + torch.nn.functional.pad(along[1], (1, 0))
        if start is None:
            return _solve(gram, right, self.v_ridge)
        rest = _solve(gram[..., 1:, 1:], right[..., 1:] - gram[..., 1:, 0] * start[..., None], self.v_ridge)
        return torch.cat([start[..., None], rest], -1)


def _solve(gram: Tensor, right: Tensor, ridge: float) -> Tensor:
    """(gram + ridge · 1) x = right for [...,n]; rows that are not positive definite get ten times the ridge, again."""
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    gram = gram.expand(*right.shape[:-1], *gram.shape[-2:])
    weight = torch.full(right.shape[:-1], ridge, dtype=gram.dtype, device=gram.device)
    for _ in range(RIDGE_STEPS):
        factor, failed = torch.linalg.cholesky_ex(gram + weight[..., None, None] * eye)
        if not failed.any():
            break
        weight = torch.where(failed > 0, weight * 10.0, weight)
    else:
        raise ValueError(f"the drive cannot be encoded: no positive definite system with a ridge of {weight.max():.1e}")
    return torch.cholesky_solve(right[..., None], factor)[..., 0]


def unwrap(angle: Tensor) -> Tensor:
    """Angles [...,T] rad without jumps of 2π, from the first value on."""
    step = torch.diff(angle, dim=-1)
    wrapped = torch.remainder(step + torch.pi, 2.0 * torch.pi) - torch.pi
    return torch.cat([angle[..., :1], angle[..., :1] + torch.cumsum(wrapped, -1)], -1)


def yaw_of_rotation(rotation: Tensor) -> Tensor:
    """Yaw [...] rad of rotation matrices [...,3,3]."""
    return torch.atan2(rotation[..., 1, 0], rotation[..., 0, 0])
