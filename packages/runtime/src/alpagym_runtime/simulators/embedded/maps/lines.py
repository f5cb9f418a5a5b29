"""Lines that a car can drive: clothoids, offsets of them, and smooth connections between two poses.

A line is [K,3]: x, y m, yaw rad (unwrapped), about `STEP_M` apart; a pose is one row of it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from alpagym_runtime.geometry import angle_difference

Float = NDArray[np.float64]

STEP_M = 2.0
"""Distance between the samples of a road."""

TURN_STEP_M = 1.0
"""Distance between the samples of a connection."""

RAMP = 0.3
"""Share of a turn's length on which its curvature grows, and again on which it falls."""


def integrate(start: ArrayLike, curvature: Float, step_m: float) -> Float:
    """The line [K,3] with a curvature [K] 1/m at samples `step_m` apart."""
    x, y, yaw = np.asarray(start, np.float64)
    headings = yaw + np.concatenate([[0.0], np.cumsum((curvature[1:] + curvature[:-1]) / 2.0 * step_m)])
    middle = (headings[1:] + headings[:-1]) / 2.0
    xs = x + np.concatenate([[0.0], np.cumsum(np.cos(middle) * step_m)])
    ys = y + np.concatenate([[0.0], np.cumsum(np.sin(middle) * step_m)])
    return np.stack([xs, ys, headings], axis=1)


def clothoids(start: ArrayLike, knots_m: ArrayLike, curvature: ArrayLike) -> Float:
    """A line whose curvature runs linearly between knots: straights, arcs and clothoids in one.

    Args:
        start: its first pose.
        knots_m: [N] arc lengths, ascending from 0; the line ends at the last.
        curvature: [N] 1/m at the knots, positive to the left.

    """
    knots = np.asarray(knots_m, np.float64)
    count = max(round(knots[-1] / STEP_M), 2)
    arcs = np.linspace(0.0, knots[-1], count + 1)
    return integrate(start, np.interp(arcs, knots, np.asarray(curvature, np.float64)), float(arcs[1]))


def offset(line: Float, left_m: float | Float) -> Float:
    """The line `left_m` (one number, or one a sample) to the left; negative is to the right."""
    left = np.broadcast_to(np.asarray(left_m, np.float64), (len(line),))
    x = line[:, 0] - left * np.sin(line[:, 2])
    y = line[:, 1] + left * np.cos(line[:, 2])
    if np.ptp(left) == 0.0:
        return np.stack([x, y, line[:, 2]], axis=1)
    return with_yaw(np.stack([x, y], axis=1))


def with_yaw(points: Float) -> Float:
    """Points [K,2] as a line [K,3], headings by central differences."""
    ahead = np.gradient(points, axis=0)
    return np.column_stack([points, np.unwrap(np.arctan2(ahead[:, 1], ahead[:, 0]))])


def arc_lengths(points: Float) -> Float:
    """[K] m along a polyline [K,≥2] from its first point."""
    steps = np.hypot(np.diff(points[:, 0]), np.diff(points[:, 1]))
    return np.concatenate([[0.0], np.cumsum(steps)])


def at_arc(points: Float, arc_m: ArrayLike) -> Float:
    """[...,3] x, y, yaw of a polyline [K,≥2] at arc lengths; straight on beyond its ends.

    A heading is the chord's over one metre before and after, as an axle's would be.
    """
    arcs = arc_lengths(points)
    asked = np.asarray(arc_m, np.float64)
    inside = np.clip(asked, 0.0, arcs[-1])
    low, high = np.maximum(inside - 1.0, 0.0), np.minimum(inside + 1.0, arcs[-1])
    at = np.stack([inside, low, high])
    x, y = np.interp(at, arcs, points[:, 0]), np.interp(at, arcs, points[:, 1])
    yaw = np.arctan2(y[2] - y[1], x[2] - x[1])
    beyond = asked - inside
    return np.stack([x[0] + beyond * np.cos(yaw), y[0] + beyond * np.sin(yaw), yaw], axis=-1)


def minimum_radius(points: Float) -> float:
    """The smallest radius m of a polyline [K,≥2], from the turn between neighbouring segments."""
    steps = np.diff(points[:, :2], axis=0)
    lengths = np.hypot(steps[:, 0], steps[:, 1])
    turn = np.abs(angle_difference(*(np.arctan2(steps[k, 1], steps[k, 0]) for k in (slice(1, None), slice(None, -1)))))
    return float(1.0 / max(float((2.0 * turn / (lengths[1:] + lengths[:-1])).max()), 1e-9))


def connect(start: ArrayLike, end: ArrayLike) -> Float:
    """A drivable line [K,3] between two poses.

    Where the tangents meet in front of the start: straight, clothoid, arc, clothoid, straight; else a quintic with no
    curvature at its ends.
    """
    a, b = np.asarray(start, np.float64), np.asarray(end, np.float64)
    turn = float(angle_difference(b[2], a[2]))
    if abs(turn) > 0.3:
        to_corner, from_corner = tangents(a, b)
        if min(to_corner, from_corner) > 2.0:
            return _corner(a, b, turn, to_corner, from_corner)
    return quintic(a, b)


def tangents(a: Float, b: Float) -> tuple[float, float]:
    """Distances from pose a forward, and from pose b backward, to where the tangents meet; not for parallel ones."""
    d, sine = b[:2] - a[:2], math.sin(b[2] - a[2])
    to_corner = (d[0] * math.sin(b[2]) - d[1] * math.cos(b[2])) / sine
    from_corner = (math.cos(a[2]) * d[1] - math.sin(a[2]) * d[0]) / sine
    return to_corner, from_corner


def _corner(a: Float, b: Float, turn: float, to_corner: float, from_corner: float) -> Float:
    tangent = min(to_corner, from_corner)
    count = max(2 * round(tangent / TURN_STEP_M), 12)
    s = np.linspace(0.0, 1.0, count + 1)
    shape = np.interp(s, [0.0, RAMP, 1.0 - RAMP, 1.0], [0.0, 1.0, 1.0, 0.0])
    # Scaled so that the samples' trapezoid sum turns by exactly `turn`; by symmetry the end then lies on the tangent.
    curvature = shape * turn / ((shape[1:] + shape[:-1]).sum() / 2.0 / count)
    unit = integrate([0.0, 0.0, 0.0], curvature, 1.0 / count)
    scale = tangent / (math.hypot(*unit[-1, :2]) / 2.0 / math.cos(turn / 2.0))
    before, after = to_corner - tangent, from_corner - tangent
    cos, sin = math.cos(a[2]), math.sin(a[2])
    x, y = unit[:, 0] * scale + before, unit[:, 1] * scale
    bend = np.stack([a[0] + cos * x - sin * y, a[1] + sin * x + cos * y, a[2] + unit[:, 2]], axis=1)
    parts = [_straight(a, bend[0])[:-1], bend, _straight(bend[-1], np.array([b[0], b[1], bend[-1, 2]]))[1:]]
    return np.concatenate(parts) if before + after > 1e-6 else bend


def _straight(a: Float, b: Float) -> Float:
    count = max(math.ceil(math.hypot(*(b[:2] - a[:2])) / STEP_M - 1e-6), 0)
    return a + np.linspace(0.0, 1.0, count + 1)[:, None] * (b - a) if count else a[None]


def quintic(start: ArrayLike, end: ArrayLike, start_curvature: float = 0.0, end_curvature: float = 0.0) -> Float:
    """A line [K,3] between two poses by a quintic with the given curvatures (1/m) at its ends."""
    a, b = np.asarray(start, np.float64), np.asarray(end, np.float64)
    reach = math.hypot(*(b[:2] - a[:2]))
    count = max(round(reach / TURN_STEP_M), 6)
    t = np.linspace(0.0, 1.0, count + 1)[:, None]
    along_a, along_b = (reach * np.array([math.cos(p[2]), math.sin(p[2])]) for p in (a, b))
    bend_a = start_curvature * reach * np.array([-along_a[1], along_a[0]])
    bend_b = end_curvature * reach * np.array([-along_b[1], along_b[0]])
    points = (
        (1 - 10 * t**3 + 15 * t**4 - 6 * t**5) * a[:2]
        + (t - 6 * t**3 + 8 * t**4 - 3 * t**5) * along_a
        + (t**2 - 3 * t**3 + 3 * t**4 - t**5) / 2 * bend_a
        + (t**3 - 2 * t**4 + t**5) / 2 * bend_b
        + (-4 * t**3 + 7 * t**4 - 3 * t**5) * along_b
        + (10 * t**3 - 15 * t**4 + 6 * t**5) * b[:2]
    )
    line = with_yaw(points)
    line[0, 2] = a[2]
    line[-1, 2] = line[-2, 2] + float(angle_difference(b[2], line[-2, 2]))
    return line


def blend(share: Float) -> Float:
    """0 to 1 over `share` 0 to 1 (clipped), with no slope and no curvature at the ends."""
    t = np.clip(share, 0.0, 1.0)
    return t**3 * (10.0 - 15.0 * t + 6.0 * t**2)
