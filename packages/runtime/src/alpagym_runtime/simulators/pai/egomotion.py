"""The recorded motion of a clip: poses between samples by slerp and a cubic spline, as the devkit does.

Columns are in the anchor frame, the rig's pose at the clip's start; velocity and acceleration too, not in the body's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from alpagym_runtime.errors import CorruptFileError, OutOfRangeError
from alpagym_runtime.geometry import (
    Pose,
    check_times,
    interpolate,
    interpolate_pose,
    quaternion_from_xyzw,
    rotate,
    yaw_from_quaternion,
)

Float = NDArray[np.float64]

COLUMNS = ("timestamp", "qx", "qy", "qz", "qw", "x", "y", "z", "vx", "vy", "vz", "ax", "ay", "az", "curvature")


@dataclass(frozen=True)
class EgoLog:
    """M samples of a clip, about 100 a second.

    Attributes:
        time_us: [M] i64, clip-relative, strictly increasing.
        pose_anchor_to_rig: positions [M,3] m, rotations [M,4] wxyz.
        velocity_anchor: [M,3] m/s.
        acceleration_anchor: [M,3] m/s².
        curvature: [M] 1/m.

    """

    time_us: NDArray[np.int64]
    pose_anchor_to_rig: Pose
    velocity_anchor: Float
    acceleration_anchor: Float
    curvature: Float

    @staticmethod
    def from_table(table: pa.Table, what: str) -> EgoLog:
        """From the columns of an egomotion table.

        Raises:
            CorruptFileError: a column is missing, or times do not increase (the index is named).

        """
        missing = [name for name in COLUMNS if name not in table.column_names]
        if missing:
            raise CorruptFileError(f"{what} lacks {', '.join(missing)}")
        columns = {name: table[name].to_numpy() for name in COLUMNS}
        try:
            times = check_times(columns["timestamp"], what)
        except ValueError as err:
            raise CorruptFileError(str(err)) from err
        stack = lambda *names: np.stack([columns[name].astype(np.float64) for name in names], axis=-1)  # noqa: E731
        return EgoLog(
            times,
            Pose(stack("x", "y", "z"), quaternion_from_xyzw(stack("qx", "qy", "qz", "qw"))),
            stack("vx", "vy", "vz"),
            stack("ax", "ay", "az"),
            columns["curvature"].astype(np.float64),
        )

    def poses(self, query_us: ArrayLike) -> Pose:
        """Rig poses [...] in the anchor frame; OutOfRangeError outside the log."""
        query = np.asarray(query_us, np.int64)
        between = interpolate_pose(self.time_us, self.pose_anchor_to_rig, query, "egomotion")
        return Pose(self._spline.at(query), between.quaternion_wxyz)

    def velocities(self, query_us: ArrayLike) -> Float:
        """[...,3] m/s in the anchor frame."""
        return interpolate(self.time_us, self.velocity_anchor, query_us, "egomotion")

    def poses_rig(self, t0_us: int, query_us: ArrayLike) -> Pose:
        """Rig poses [...] in the rig frame of `t0_us`: p = R0⁻¹ (p - p0), R = R0⁻¹ R, in all three dimensions."""
        return self.poses(t0_us).inverse() @ self.poses(query_us)

    def dynamics_rig(self, t0_us: int) -> Float:
        """[7]: velocity m/s, acceleration m/s², yaw rate rad/s, in the rig frame of `t0_us`."""
        inverse = self.poses(t0_us).inverse().quaternion_wxyz
        at = np.int64(t0_us)
        velocity = rotate(inverse, interpolate(self.time_us, self.velocity_anchor, at, "egomotion"))
        acceleration = rotate(inverse, interpolate(self.time_us, self.acceleration_anchor, at, "egomotion"))
        around = np.clip([t0_us - 50_000, t0_us + 50_000], self.time_us[0], self.time_us[-1])
        turn = yaw_from_quaternion(self.poses_rig(t0_us, around).quaternion_wxyz)
        rate = (turn[1] - turn[0]) / max((around[1] - around[0]) * 1e-6, 1e-6)
        return np.concatenate([velocity, acceleration, [rate]])

    def longest_gap_us(self, first_us: int, last_us: int) -> int:
        """The longest time between neighbouring samples within a span; OutOfRangeError if the log does not cover it."""
        if first_us < self.time_us[0] or last_us > self.time_us[-1]:
            outside = first_us if first_us < self.time_us[0] else last_us
            raise OutOfRangeError(outside, int(self.time_us[0]), int(self.time_us[-1]), "egomotion")
        first = max(int(np.searchsorted(self.time_us, first_us, side="right")) - 1, 0)
        last = min(int(np.searchsorted(self.time_us, last_us)), len(self.time_us) - 1)
        return int(np.diff(self.time_us[first : last + 1]).max(initial=0))

    @cached_property
    def _spline(self) -> CubicSpline:
        return CubicSpline(self.time_us, self.pose_anchor_to_rig.position)


class CubicSpline:
    """The interpolating cubic spline with not-a-knot ends, as SciPy's default; two points: a line, three: a parabola.

    Args:
        time_us: [M] i64, strictly increasing.
        values: [M,D].

    """

    def __init__(self, time_us: NDArray[np.int64], values: Float) -> None:
        self._time_us = time_us
        # Relative microseconds, as the devkit: large offsets would cost digits.
        x = (time_us - time_us[0]).astype(np.float64)
        self._values = np.asarray(values, np.float64)
        self._slopes = _slopes(x, self._values)

    def at(self, query_us: NDArray[np.int64]) -> Float:
        """Values [...,D]; times must lie within the knots."""
        times = self._time_us
        if len(times) == 1:
            return np.broadcast_to(self._values[0], (*query_us.shape, self._values.shape[1])).copy()
        left = np.clip(np.searchsorted(times, query_us, side="right") - 1, 0, len(times) - 2)
        step = (times[left + 1] - times[left]).astype(np.float64)[..., None]
        u = (query_us - times[left]).astype(np.float64)[..., None]
        y0, y1, s0, s1 = self._values[left], self._values[left + 1], self._slopes[left], self._slopes[left + 1]
        chord = (y1 - y0) / step
        bend = (s0 + s1 - 2.0 * chord) / step
        result: Float = y0 + u * (s0 + u * ((chord - s0) / step - bend + u * (bend / step)))
        return result


def _slopes(x: Float, y: Float) -> Float:
    """Derivatives [M,D] at the knots: a tridiagonal system by forward elimination and back substitution."""
    count = len(x)
    if count < 2:
        return np.zeros_like(y)
    h = np.diff(x)
    chord = np.diff(y, axis=0) / h[:, None]
    if count == 2:
        return np.repeat(chord, 2, axis=0)
    if count == 3:
        # The parabola through three points.
        bend = (chord[1] - chord[0]) / (h[0] + h[1])
        return np.stack([chord[0] - h[0] * bend, chord[0] + h[0] * bend, chord[1] + h[1] * bend])
    low, middle, high = np.zeros(count), np.zeros(count), np.zeros(count)
    right = np.zeros_like(y)
    middle[1:-1], high[1:-1], low[1:-1] = 2.0 * (h[:-1] + h[1:]), h[:-1], h[1:]
    right[1:-1] = 3.0 * (h[1:, None] * chord[:-1] + h[:-1, None] * chord[1:])
    span = x[2] - x[0]
    middle[0], high[0] = h[1], span
    right[0] = ((h[0] + 2.0 * span) * h[1] * chord[0] + h[0] ** 2 * chord[1]) / span
    span = x[-1] - x[-3]
    middle[-1], low[-1] = h[-2], span
    right[-1] = (h[-1] ** 2 * chord[-2] + (2.0 * span + h[-1]) * h[-2] * chord[-1]) / span
    # Plain numbers: numpy's cost a call would be ten times the arithmetic.
    a, b, c, rows = low.tolist(), middle.tolist(), high.tolist(), right.tolist()
    for i in range(1, count):
        factor = a[i] / b[i - 1]
        b[i] -= factor * c[i - 1]
        before, row = rows[i - 1], rows[i]
        rows[i] = [value - factor * other for value, other in zip(row, before, strict=True)]
    rows[-1] = [value / b[-1] for value in rows[-1]]
    for i in range(count - 2, -1, -1):
        after, row = rows[i + 1], rows[i]
        rows[i] = [(value - c[i] * other) / b[i] for value, other in zip(row, after, strict=True)]
    return np.array(rows)
