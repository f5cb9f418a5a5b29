"""Crossings with and without signals, and roundabouts.

An arm is a road whose line leads away from the junction: its forward lanes leave, its backward lanes arrive and end at
the stop line, from which turning lanes lead on. Traffic keeps to the right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import shapely
from numpy.typing import NDArray

from alpagym_runtime.geometry import angle_difference
from alpagym_runtime.simulators.embedded.lane_map import Signals
from alpagym_runtime.simulators.embedded.maps.builder import (
    LANE_WIDTH_M,
    SHOULDER_M,
    MapBuilder,
    Phase,
    Road,
    RoadPlan,
    Route,
    fixed_time,
)
from alpagym_runtime.simulators.embedded.maps.lines import clothoids, connect, minimum_radius, offset, quintic, tangents

Float = NDArray[np.float64]

ARM_M = 270.0
"""Length of an arm: a car that leaves at the limit stays on it for a scene, with its route before it."""

TURN_RADIUS_M = 6.5
"""The tightest turn, at the lane's middle."""

KERB_RADIUS_M = 4.5


@dataclass(frozen=True)
class _Arm:
    road: Road
    axis: int
    approach: tuple[int, ...]
    exits: tuple[int, ...]
    left_only: bool


@dataclass(frozen=True)
class _Turn:
    """A turning lane: from which arm to which, and which way (1 left, 0 straight, -1 right)."""

    lane: int
    approach: int
    exit: int
    start: int
    end: int
    way: int


def crossing3(rng: np.random.Generator, dressing: np.random.Generator) -> RoadPlan:
    """A T of three arms with signals."""
    return _signalled("crossing3", 3, rng, dressing)


def crossing4(rng: np.random.Generator, dressing: np.random.Generator) -> RoadPlan:
    """Four arms with signals; some with lanes and a phase for left turns only."""
    return _signalled("crossing4", 4, rng, dressing)


def _signalled(kind: str, count: int, rng: np.random.Generator, dressing: np.random.Generator) -> RoadPlan:
    builder, limit = MapBuilder(), float(rng.uniform(10.0, 13.9))
    lanes = [int(rng.integers(1, 4)), int(rng.integers(1, 3))]
    left_only = [bool(rng.uniform() < 0.5) and lanes[axis] >= 2 and count == 4 for axis in (0, 1)]
    arms = _arms(builder, rng, count, lanes, left_only, (limit, limit))
    turns = _turns(builder, arms)
    phases: list[Phase] = []
    groups = 2
    for axis in (0, 1):
        for arm in (arm for arm in arms if arm.axis == axis):
            for k, lane in enumerate(arm.approach):
                # Lanes for left turns only have a phase of their own.
                builder.govern(lane, groups if left_only[axis] and k == 0 else axis)
        phases.append(Phase((axis,), (), float(rng.uniform(14.0, 22.0))))
        if left_only[axis]:
            phases.append(Phase((groups,), (), float(rng.uniform(6.0, 9.0))))
            groups += 1
    # People cross an axis while the other one drives.
    walk = {axis: groups + axis for axis in (0, 1)}
    phases = [
        Phase(phase.groups, (walk[1 - phase.groups[0]],) if phase.groups[0] < 2 else (), phase.green_s)
        for phase in phases
    ]
    for arm in arms:
        builder.stop_line(arm.road)
        builder.crossing(arm.road, -2.6, walk[arm.axis])
    group_of = {lane: builder.lanes[lane].signal_group for arm in arms for lane in arm.approach}
    _give_way(builder, turns, lambda a: -float(a.way == 1), lambda a, b: group_of[a.approach] == group_of[b.approach])
    heads = _heads(builder, arms)
    first, left_s = int(rng.integers(len(phases))), float(rng.uniform(-3.0, 12.0))
    signals = fixed_time(tuple(phases), heads, first, left_s)
    return _plan(kind, builder, dressing, turns, tuple(phases), signals, limit)


def priority_crossing(rng: np.random.Generator, dressing: np.random.Generator) -> RoadPlan:
    """Three or four arms without signals: the minor road gives way to the major one."""
    builder, limit = MapBuilder(), float(rng.uniform(10.0, 13.9))
    count = int(rng.integers(3, 5))
    lanes = [int(rng.choice([1, 1, 2])), 1]
    arms = _arms(builder, rng, count, lanes, [False, False], (limit, 9.0))
    turns = _turns(builder, arms)
    for arm in arms:
        if arm.axis == 1:
            builder.stop_line(arm.road)
    _give_way(builder, turns, lambda a: -2.0 * arms[a.start].axis - float(a.way == 1), lambda a, b: True)
    return _plan("priority_crossing", builder, dressing, turns, (), None, limit)


def _arms(
    builder: MapBuilder,
    rng: np.random.Generator,
    count: int,
    lanes: list[int],
    left_only: list[bool],
    limit_mps: tuple[float, float],
) -> list[_Arm]:
    """Arms counter-clockwise, axis 0 and 1 in turn, as near to the centre as the tightest right turn allows."""
    heading = rng.uniform(-math.pi, math.pi) + np.arange(count) * math.pi / 2.0 + rng.uniform(-0.12, 0.12, count)
    axes = [k % 2 for k in range(count)]
    bend, straight = rng.uniform(-0.25, 0.25, count), rng.uniform(60.0, 110.0, count)
    width = [n * LANE_WIDTH_M for n in lanes]
    outer = [width[axis] - LANE_WIDTH_M / 2.0 for axis in axes]
    start_m = max(width) + 8.0
    poses = np.stack([start_m * np.cos(heading), start_m * np.sin(heading), heading], axis=1)
    # A farther start lengthens both tangents of a turn by as much, and its radius in proportion.
    missing = []
    for k in range(count if count == 4 else 2):
        after = (k + 1) % count
        source = offset(poses[k : k + 1], outer[k])[0] + np.array([0.0, 0.0, math.pi])
        target = offset(poses[after : after + 1], -outer[after])[0]
        tangent = min(tangents(source, target))
        missing.append(tangent * (TURN_RADIUS_M / minimum_radius(connect(source, target)) - 1.0))
    start_m += max(missing)
    poses[:, :2] = start_m * np.stack([np.cos(heading), np.sin(heading)], axis=1)
    arms = []
    for k in range(count):
        # Arms bend by a quarter of a radian at most, far from the crossing: they never meet again.
        peak = bend[k] / 100.0
        knots = [0.0, straight[k], straight[k] + 50.0, straight[k] + 100.0, ARM_M]
        line = clothoids(poses[k], knots, [0.0, 0.0, peak, 0.0, 0.0])
        axis = axes[k]
        road = builder.road(line, lanes[axis], lanes[axis], speed_limit_mps=limit_mps[axis])
        arms.append(_Arm(road, axis, road.backward, road.forward, left_only[axis]))
    return arms


def _turns(builder: MapBuilder, arms: list[_Arm]) -> list[_Turn]:
    turns = []
    for i, start in enumerate(arms):
        for j, end in enumerate(arms):
            if i == j:
                continue
            turn = float(angle_difference(end.road.line[0, 2], start.road.line[0, 2] + math.pi))
            way = 0 if abs(turn) < 0.7 else int(np.sign(turn))
            for a, b in _lane_pairs(start, end, way):
                source, target = builder.lanes[start.approach[a]].centre, builder.lanes[end.exits[b]].centre
                pose = np.array([*source[-1], start.road.line[0, 2] + math.pi])
                line = connect(pose, np.array([*target[0], end.road.line[0, 2]]))
                limit = 13.9 if way == 0 else 8.0
                lane = builder.lane(line, "turn", speed_limit_mps=limit)
                builder.join(start.approach[a], lane)
                builder.join(lane, end.exits[b])
                turns.append(_Turn(lane, start.approach[a], end.exits[b], i, j, way))
    for arm in arms:
        # Each arm's pavement goes on to the middle; closing the union rounds the corners between them.
        mouth = arm.road.line[0]
        back = np.array([[0.0, 0.0, mouth[2]], mouth])
        builder.pave(back, arm.road.right_m + SHOULDER_M, arm.road.left_m + SHOULDER_M)
    return turns


def _lane_pairs(start: _Arm, end: _Arm, way: int) -> list[tuple[int, int]]:
    """(approach lane, exit lane) pairs, counted from the middle outwards."""
    last, out = len(start.approach) - 1, len(end.exits) - 1
    if way == 1:
        return [(0, 0)]
    if way == -1:
        return [(last, out)]
    return [(k, k) for k in range(int(start.left_only), last + 1)]


def _give_way(
    builder: MapBuilder,
    turns: list[_Turn],
    rank: Callable[[_Turn], float],
    together: Callable[[_Turn, _Turn], bool],
) -> None:
    """Where turning lanes of different arms that drive `together` meet, the lower rank yields to the higher one."""
    lines = [shapely.LineString(builder.lanes[turn.lane].centre) for turn in turns]
    for (i, a), (j, b) in combinations(enumerate(turns), 2):
        if a.start == b.start or not together(a, b) or not shapely.intersects(lines[i], lines[j]):
            continue
        first, second = (a, b) if rank(a) > rank(b) else (b, a)
        if rank(a) == rank(b) and a.way != b.way:
            # Turning right goes before turning left; the rest of the equals are two left turns.
            first, second = (a, b) if a.way < b.way else (b, a)
        builder.yields(second.lane, first.lane)


def _heads(builder: MapBuilder, arms: list[_Arm]) -> Float:
    """[H,4]: for each group of an arm one head at the stop line and one beyond the junction, right of the lanes."""
    rows = []
    for arm in arms:
        heading = arm.road.line[0, 2] + math.pi
        near = offset(arm.road.line[:1], arm.road.left_m + SHOULDER_M + 0.8)[0, :2]
        opposite = next((other.road for other in arms if other is not arm and other.axis == arm.axis), None)
        if opposite is not None:
            far = offset(opposite.line[:1], -(opposite.right_m + SHOULDER_M + 0.8))[0, :2]
        else:
            # The stem of a T looks at the far kerb.
            depth = math.hypot(*arm.road.line[0, :2]) + max(other.road.right_m for other in arms if other is not arm)
            far = near + (depth + 2.0) * np.array([math.cos(heading), math.sin(heading)])
        for group in sorted({builder.lanes[lane].signal_group for lane in arm.approach}):
            shift = 0.0 if group < 2 else 0.5
            rows += [[near[0], near[1] + shift, heading, group], [far[0], far[1] + shift, heading, group]]
    return np.array(rows)


def roundabout(rng: np.random.Generator, dressing: np.random.Generator) -> RoadPlan:
    """A ring of one lane with three or four arms; who is on it goes first."""
    builder, limit = MapBuilder(), float(rng.uniform(9.0, 12.5))
    count = int(rng.integers(3, 5))
    radius = float(rng.uniform(15.0, 19.0))
    heading = rng.uniform(-math.pi, math.pi) + np.arange(count) * 2.0 * math.pi / count
    heading = heading + rng.uniform(-0.1, 0.1, count)
    bend = rng.uniform(-0.2, 0.2, count)
    aside = ASIDE_RAD * 16.0 / radius
    starts, ends = heading + aside, np.roll(heading, -1) - aside
    ends[-1] += 2.0 * math.pi
    # Ring lanes by turns: past an arm (from its exit to its entry), then on to the next arm's exit.
    past = [_ring_lane(builder, radius, heading[k] - aside, heading[k] + aside) for k in range(count)]
    on = [_ring_lane(builder, radius, starts[k], ends[k]) for k in range(count)]
    routes: dict[tuple[int, int], Route] = {}
    entries, exits, arms = [], [], []
    for k in range(count):
        start = (radius + ARM_FROM_RING_M) * np.array([math.cos(heading[k]), math.sin(heading[k])])
        peak = bend[k] / 100.0
        line = clothoids([*start, heading[k]], [0.0, 60.0, 110.0, 160.0, ARM_M], [0.0, 0.0, peak, 0.0, 0.0])
        road = builder.road(line, 1, 1, speed_limit_mps=limit)
        arms.append(road)
        ring_in, ring_out = _on_ring(radius, heading[k] + aside), _on_ring(radius, heading[k] - aside)
        inward = np.array([*offset(line[:1], LANE_WIDTH_M / 2.0)[0, :2], heading[k] + math.pi])
        outward = offset(line[:1], -LANE_WIDTH_M / 2.0)[0]
        entries.append(builder.lane(quintic(inward, ring_in, 0.0, 1.0 / radius), "turn", speed_limit_mps=8.0))
        exits.append(builder.lane(quintic(ring_out, outward, 1.0 / radius, 0.0), "turn", speed_limit_mps=8.0))
        builder.stop_line(road)
        # A car that waits to enter stands before the zebra, not on it.
        builder.crossing(road, 8.0)
    for k in range(count):
        after = (k + 1) % count
        builder.join(arms[k].backward[0], entries[k])
        builder.join(entries[k], on[k])
        builder.join(past[k], on[k])
        builder.join(on[k], exits[after])
        builder.join(on[k], past[after])
        builder.join(exits[k], arms[k].forward[0])
        builder.yields(entries[k], past[k])
    for k in range(count):
        approach = arms[k].backward[0]
        lanes = [approach, entries[k]]
        for step in range(1, count):
            at = (k + step) % count
            lanes.append(on[(at - 1) % count])
            routes[k, at] = Route((*lanes, exits[at], arms[at].forward[0]), builder.length_m(approach))
            lanes.append(past[at])
    lane_map = builder.finish(dressing, kerb_radius_m=6.0, sidewalk_m=2.8, buildings=40, trees=70)
    return RoadPlan("roundabout", lane_map, tuple(routes.values()), tuple(builder.crossings), (), limit)


ASIDE_RAD = 0.55
"""Angle on a ring of radius 16 m between an arm's axis and where its entry joins and its exit leaves."""

ARM_FROM_RING_M = 11.0


def _on_ring(radius: float, angle: float) -> Float:
    return np.array([radius * math.cos(angle), radius * math.sin(angle), angle + math.pi / 2.0])


def _ring_lane(builder: MapBuilder, radius: float, start: float, end: float) -> int:
    count = max(round((end - start) * radius / 1.2), 4)
    angles = np.linspace(start, end, count + 1)
    line = np.stack([radius * np.cos(angles), radius * np.sin(angles), angles + math.pi / 2.0], axis=1)
    return builder.lane(line, width_m=4.2, speed_limit_mps=8.0)


def _plan(
    kind: str,
    builder: MapBuilder,
    dressing: np.random.Generator,
    turns: list[_Turn],
    phases: tuple[Phase, ...],
    signals: Signals | None,
    limit_mps: float,
) -> RoadPlan:
    routes = [Route((turn.approach, turn.lane, turn.exit), builder.length_m(turn.approach)) for turn in turns]
    lane_map = builder.finish(
        dressing, kerb_radius_m=KERB_RADIUS_M, sidewalk_m=2.8, buildings=40, trees=70, signals=signals
    )
    return RoadPlan(kind, lane_map, tuple(routes), tuple(builder.crossings), phases, limit_mps)
