"""A driver of rules: follow the route, keep the distance, slow down for curves.

The path starts at the ego with its heading and blends into the route; the speed along it comes from the intelligent
driver model (Treiber, Hennecke, Helbing 2000, arXiv:cond-mat/0002177). Actors are predicted to keep their speed along
the route. It sees no signals, no crossing traffic before that is in its corridor, and never leaves the route.

All arrays hold N rows; the loops are over time, never over rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.policies.config import RouteFollowerConfig
from alpagym_runtime.types import Decision, Observation, Sampling

Float = NDArray[np.float64]

MISSING_SPACING_M = 5.0
"""Spacing of the points that go on straight where a route ends."""

WINDOW_M = np.linspace(-1.75, 1.75, 8)
"""The path is the route's mean over this window: waypoints some 4 m apart become a curve without corners."""

CHORD_M = 0.5
"""Half of the chord that gives the path's heading."""

FREE_GAP_M = 1e6
"""Gap where nobody is ahead."""


class RouteFollower:
    """See `RouteFollowerConfig`."""

    def __init__(self, config: RouteFollowerConfig) -> None:
        self.spec = config.spec()
        self._config = config

    def act(self, observations: Observation, seeds: NDArray[np.uint64], sampling: Sampling) -> Decision:
        """Plans [N,T,3] along the route; nothing is drawn."""
        speed = np.maximum(observations["ego_dynamics_rig"][:, 0].astype(np.float64), 0.0)
        route = make_route(observations["route_rig"], observations["route_mask"])
        ego = route.project(np.zeros((len(speed), 1, 2)))
        mask = observations["actors_mask"] if self._config.sees_traffic else np.zeros_like(observations["actors_mask"])
        gap, leader_speed = self._leader(route, ego.arc[:, 0], observations["actors_rig"], mask)
        driven = self._speed_profile(route, ego.arc[:, 0], speed, gap, leader_speed)
        if not self._config.weave_m:
            return plan_decision(_path(route, ego, speed, driven))
        swing = self._swing(observations["time_us"], np.arange(self.spec.plan_steps + 1))
        ego = replace(ego, offset=ego.offset - swing[:, :1])
        plan = _path(route, ego, speed, driven)
        plan[..., 1] += swing[:, 1:] - swing[:, :1]
        plan[..., 2] += np.arctan2(np.diff(swing, axis=1), np.maximum(np.diff(driven, axis=1, prepend=0.0), 0.1))
        return plan_decision(plan)

    def _swing(self, time_us: NDArray[np.int64], steps: NDArray[np.int64]) -> Float:
        """Offset [N,S] m from the route to swing to, `steps` plan steps from now."""
        at_s = (time_us[:, None] + steps * self.spec.plan_step_us) * 1e-6
        return self._config.weave_m * np.sin(2.0 * np.pi * at_s / self._config.weave_period_s)

    def _leader(self, route: Route, arc: Float, actors_rig: NDArray, mask: NDArray[np.bool_]) -> tuple[Float, Float]:
        """Bumper gap [N] m to the nearest actor in the corridor ahead, and its speed [N] along the route."""
        actors = actors_rig.astype(np.float64)
        at = route.project(actors[:, :, :2])
        turn = actors[:, :, 2] - at.heading
        cos, sin = np.abs(np.cos(turn)), np.abs(np.sin(turn))
        length, width = actors[:, :, 5], actors[:, :, 6]
        half_along, half_across = (length * cos + width * sin) / 2.0, (length * sin + width * cos) / 2.0
        inside = np.abs(at.offset) - half_across < self._config.corridor_half_width_m
        # Something that is beside the ego already is not ahead of it.
        ahead = at.arc > arc[:, None]
        gaps = np.where(mask & inside & ahead, at.arc - arc[:, None] - half_along - self._config.front_m, FREE_GAP_M)
        nearest = np.argmin(gaps, axis=1)[:, None]
        along = actors[:, :, 3] * np.cos(at.heading) + actors[:, :, 4] * np.sin(at.heading)
        return np.take_along_axis(gaps, nearest, 1)[:, 0], np.take_along_axis(along, nearest, 1)[:, 0]

    def _speed_profile(self, route: Route, arc: Float, speed: Float, gap: Float, leader_speed: Float) -> Float:
        """Distance driven [N,T] m at the plan's times."""
        c, dt = self._config, self.spec.plan_step_us * 1e-6
        braking = 2.0 * np.sqrt(c.acceleration_mps2 * c.comfortable_deceleration_mps2)
        limit = np.sqrt(c.lateral_acceleration_mps2 / np.maximum(route.curvature, 1e-6))
        driven = np.zeros((len(speed), self.spec.plan_steps))
        travelled, present, leader = np.zeros_like(speed), speed, np.maximum(leader_speed, 0.0)
        for k in range(self.spec.plan_steps):
            to_bend = route.arc - (arc + travelled)[:, None]
            # The speed now from which the comfortable deceleration meets each bend's limit.
            reachable = np.sqrt(limit * limit + 2.0 * c.comfortable_deceleration_mps2 * np.maximum(to_bend, 0.0))
            passed = to_bend < -MISSING_SPACING_M / 2.0
            desired = np.minimum(np.where(passed, FREE_GAP_M, reachable).min(axis=1), c.desired_speed_mps)
            room = np.maximum(gap + leader * (k * dt) - travelled, 0.1)
            wish = c.standstill_gap_m + np.maximum(
                present * c.headway_s + present * (present - leader_speed) / braking, 0.0
            )
            share = present / desired
            squared = share * share
            acceleration = c.acceleration_mps2 * (1.0 - squared * squared - (wish / room) * (wish / room))
            # The fourth power alone nears the desired speed too slowly for bends, and from afar brakes too hard.
            acceleration = np.where(present > desired, np.minimum(acceleration, (desired - present) / dt), acceleration)
            lowest = np.where(wish < room, -c.comfortable_deceleration_mps2, -c.emergency_deceleration_mps2)
            after = np.maximum(present + np.clip(acceleration, lowest, c.acceleration_mps2) * dt, 0.0)
            travelled = travelled + (present + after) / 2.0 * dt
            driven[:, k], present = travelled, after
        return driven


@dataclass(frozen=True)
class Projection:
    """Nearest route points of P points a row: arc length, offset to the left, heading there; each [N,P]."""

    arc: Float
    offset: Float
    heading: Float


@dataclass(frozen=True)
class Route:
    """Polylines, goes on straight beyond both ends.

    Attributes:
        points: [N,R,2] m, rig frame.
        arc: [N,R] arc length, 0 at the first point.
        tangent: [N,R-1,2] unit vectors of the segments.
        curvature: [N,R] magnitude at the points, 1/m; 0 at the ends.

    """

    points: Float
    arc: Float
    tangent: Float
    curvature: Float

    def at(self, arc: Float) -> Float:
        """Points [N,P,2] at arc lengths [N,P]."""
        inner = self.arc[:, None, 1:-1] <= arc[:, :, None]
        segment = np.count_nonzero(inner, axis=2)
        start = np.take_along_axis(self.points, segment[:, :, None], 1)
        along = arc - np.take_along_axis(self.arc, segment, 1)
        return start + along[:, :, None] * np.take_along_axis(self.tangent, segment[:, :, None], 1)

    def project(self, points: Float) -> Projection:
        """Nearest points on the polylines for [N,P,2]."""
        delta = points[:, :, None, :] - self.points[:, None, :-1, :]
        tangent = self.tangent[:, None]
        along = delta[..., 0] * tangent[..., 0] + delta[..., 1] * tangent[..., 1]
        lengths = np.diff(self.arc, axis=1)
        lowest, highest = np.zeros_like(lengths), lengths.copy()
        lowest[:, 0], highest[:, -1] = -np.inf, np.inf
        along = np.clip(along, lowest[:, None], highest[:, None])
        ex, ey = delta[..., 0] - along * tangent[..., 0], delta[..., 1] - along * tangent[..., 1]
        segment = np.argmin(ex * ex + ey * ey, axis=2)[:, :, None]
        left = delta[..., 1] * tangent[..., 0] - delta[..., 0] * tangent[..., 1]
        chosen = np.take_along_axis(self.tangent, segment, 1)
        return Projection(
            np.take_along_axis(self.arc, segment[:, :, 0], 1) + np.take_along_axis(along, segment, 2)[:, :, 0],
            np.take_along_axis(left, segment, 2)[:, :, 0],
            np.arctan2(chosen[..., 1], chosen[..., 0]),
        )


def make_route(route_rig: NDArray[np.float32], route_mask: NDArray[np.bool_]) -> Route:
    """A route from waypoints [N,R,2] and their mask [N,R]; masked ones go on straight from the last two that are known.

    A row with fewer than two known points becomes straight ahead.
    """
    points = route_rig.astype(np.float64)
    if points.shape[1] < 3:
        raise ValueError(f"route_rig must be [N, R, 2] with R >= 3, got {points.shape}")
    known = np.logical_and.accumulate(route_mask, axis=1)
    count = np.count_nonzero(known, axis=1)
    index = np.arange(points.shape[1])
    straight = np.stack([index * MISSING_SPACING_M, np.zeros(len(index))], axis=-1)
    points = np.where((count >= 2)[:, None, None], points, straight)
    count = np.where(count >= 2, count, len(index))
    last = np.take_along_axis(points, (count - 1)[:, None, None], 1)
    heading = _unit(last - np.take_along_axis(points, (count - 2)[:, None, None], 1))
    beyond = index - (count - 1)[:, None]
    points = np.where((beyond > 0)[:, :, None], last + beyond[:, :, None] * MISSING_SPACING_M * heading, points)
    steps = np.diff(points, axis=1)
    lengths = np.sqrt(steps[..., 0] * steps[..., 0] + steps[..., 1] * steps[..., 1])
    tangent = _unit(steps)
    arc = np.concatenate([np.zeros((len(points), 1)), np.cumsum(lengths, axis=1)], axis=1)
    before, after = tangent[:, :-1], tangent[:, 1:]
    cross = before[..., 0] * after[..., 1] - before[..., 1] * after[..., 0]
    dot = before[..., 0] * after[..., 0] + before[..., 1] * after[..., 1]
    between = np.maximum((lengths[:, :-1] + lengths[:, 1:]) / 2.0, 0.5)
    curvature = np.zeros_like(arc)
    curvature[:, 1:-1] = np.abs(np.arctan2(cross, dot)) / between
    return Route(points, arc, tangent, curvature)


def _unit(vectors: Float) -> Float:
    """Vectors [...,2] of length 1; a zero vector becomes the x axis."""
    norm = np.sqrt(vectors[..., 0] * vectors[..., 0] + vectors[..., 1] * vectors[..., 1])[..., None]
    return np.where(norm > 1e-9, vectors / np.maximum(norm, 1e-9), np.array([1.0, 0.0]))


def _path(route: Route, ego: Projection, speed: Float, driven: Float) -> Float:
    """Poses [N,T,3] after `driven` [N,T] m: from the ego's offset and heading into the route."""
    arc, offset = ego.arc, -0.0 + ego.offset
    slope = np.tan(np.clip(-ego.heading, -0.6, 0.6))
    # Three seconds to close an offset is brisk; in a wide turn-in more metres are needed.
    blend = np.maximum(3.0 * speed[:, None], 10.0) + 2.0 * np.abs(offset)

    def place(distance: Float) -> Float:
        # Cubic Hermite from (offset, slope) to (0, 0): no jump in heading at the ego, none where the route is met.
        u = np.clip(distance / blend, 0.0, 1.0)
        rest = 1.0 - u
        shift = rest * rest * ((1.0 + 2.0 * u) * offset + u * blend * slope)
        along = arc + distance
        centre = sum(route.at(along + step) for step in WINDOW_M) / len(WINDOW_M)
        tangent = _unit(route.at(along + 2.0) - route.at(along - 2.0))
        normal = np.stack([-tangent[..., 1], tangent[..., 0]], axis=-1)
        return centre + shift[..., None] * normal

    here, start = place(driven), place(np.zeros_like(arc))
    chord = place(driven + CHORD_M) - place(np.maximum(driven - CHORD_M, 0.0))
    yaw = np.arctan2(chord[..., 1], chord[..., 0])
    # The ego is at the origin, up to the rounding of corners.
    return np.concatenate([here - start, yaw[..., None]], axis=-1)
