"""Paths over lanes: what a vehicle follows, where it may have to wait on it, and how fast it may begin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import shapely
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded.lane_map import MERGE, ZEBRA, Agent, Lane, LaneMap, Stop
from alpagym_runtime.simulators.embedded.maps.lines import arc_lengths, at_arc, with_yaw

Float = NDArray[np.float64]

WAIT_BEFORE_M = 6.0
"""A left turn under a green signal waits in the junction, so far before the path that it crosses."""

ALONGSIDE_RAD = 0.6
"""Lanes that meet at a smaller angle merge: no place to stop."""

ZEBRA_BEFORE_M = 3.0
"""Cars stop so far before a zebra's middle, which is half as wide."""

BEND_MPS2 = 2.0
COMFORT_MPS2 = 1.5


@dataclass(frozen=True)
class Path:
    """A polyline over lanes.

    Attributes:
        points: [P,2] m, distinct, about 1 to 2 m apart.
        lanes: ids, in order.
        stops: where it may have to wait, ascending.
        lanes_left, lanes_right: lanes that it may change to anywhere on it.

    """

    points: Float
    lanes: tuple[int, ...]
    stops: tuple[Stop, ...]
    lanes_left: int
    lanes_right: int

    @cached_property
    def arcs(self) -> Float:
        """[P] m."""
        return arc_lengths(self.points)

    @cached_property
    def bend_square(self) -> Float:
        """[P] m²/s², the square of the speed that each of its bends allows."""
        curvature = np.gradient(with_yaw(self.points)[:, 2], self.arcs)
        squares: Float = BEND_MPS2 / np.maximum(np.abs(curvature), 1e-4)
        return squares

    def speed_for_bends(self, arc_m: float, ahead_m: float = 60.0) -> float:
        """The speed m/s at an arc length from which a vehicle slows in comfort for every bend ahead."""
        near = slice(*np.searchsorted(self.arcs, [arc_m - 2.0, arc_m + ahead_m]))
        to_go = np.maximum(self.arcs[near] - arc_m, 0.0)
        return math.sqrt(float((self.bend_square[near] + 2.0 * COMFORT_MPS2 * to_go).min(initial=1e4)))

    def cut(self, begin_m: float, end_m: float) -> tuple[Float, tuple[Stop, ...], float]:
        """Points and stops between two arc lengths, and the arc length that is 0 now."""
        arcs = self.arcs
        first = max(int(np.searchsorted(arcs, begin_m, side="right")) - 1, 0)
        last = min(int(np.searchsorted(arcs, end_m)) + 1, len(arcs))
        shift = float(arcs[first])
        stops = tuple(
            Stop(stop.arc_m - shift, stop.signal_group, stop.conflict)
            for stop in self.stops
            if arcs[first] < stop.arc_m <= arcs[last - 1]
        )
        return self.points[first:last], stops, shift


def path_over(lane_map: LaneMap, lanes: tuple[int, ...], zebras: Sequence[Float] = ()) -> Path:
    """The path along lanes, each a successor of the one before; `zebras` [2,2] lead from kerb to kerb."""
    pieces = [lane_map.lanes[lanes[0]].centre]
    starts = [0.0]
    for lane in lanes[1:]:
        starts.append(starts[-1] + float(arc_lengths(pieces[-1])[-1]))
        # Successors begin where their predecessor ends.
        pieces.append(lane_map.lanes[lane].centre)
    points = np.concatenate([pieces[0], *(piece[1:] for piece in pieces[1:])])
    stops: list[Stop] = []
    for k, lane in enumerate(lanes):
        before = lane_map.lanes[lanes[k - 1]].signal_group if k else -1
        stops += _stops_of(lane_map, lane_map.lanes[lane], starts[k], before)
    if lane_map.lanes[lanes[-1]].signal_group >= 0:
        end = starts[-1] + float(arc_lengths(pieces[-1])[-1])
        stops.append(Stop(end, lane_map.lanes[lanes[-1]].signal_group))
    ends = [*starts[1:], starts[-1] + float(arc_lengths(pieces[-1])[-1])]
    merges = [_merge_of(lane_map, lane) for lane in lanes]
    stops += [Stop(end, MERGE, point) for end, point in zip(ends, merges, strict=True) if point is not None]
    stops += [stop for zebra in zebras if (stop := _zebra_on(points, zebra)) is not None]
    stops.sort(key=lambda stop: stop.arc_m)
    left, right = _freedom(lane_map, lanes)
    return Path(points, lanes, tuple(stops), left, right)


def _zebra_on(points: Float, zebra: Float) -> Stop | None:
    """Where a path lets people cross at a zebra, if it passes that."""
    path = shapely.LineString(points)
    met = path.intersection(shapely.LineString(zebra))
    if met.is_empty:
        return None
    middle = zebra.mean(axis=0)
    at = float(path.project(shapely.Point(met.representative_point())))
    return Stop(at - ZEBRA_BEFORE_M, ZEBRA, (float(middle[0]), float(middle[1])))


def _merge_of(lane_map: LaneMap, lane: int) -> tuple[float, float] | None:
    """Where a lane ends by becoming one with its neighbour: the end of the one that yields; None where none does."""
    for successor in lane_map.lanes[lane].successors:
        for other in lane_map.predecessors[successor]:
            for late, first in ((lane, other), (other, lane)):
                yields = lane_map.lanes[late]
                if first in yields.yields_to and yields.kind != "turn" and _alongside(yields, lane_map.lanes[first]):
                    return float(yields.centre[-1, 0]), float(yields.centre[-1, 1])
    return None


def _stops_of(lane_map: LaneMap, lane: Lane, start_m: float, signal_group: int) -> list[Stop]:
    """Where a lane that starts at `start_m`, behind a signal or none, makes one wait."""
    conflicts = [found for other in lane.yields_to if (found := _meeting(lane, lane_map.lanes[other])) is not None]
    line = [] if signal_group < 0 else [Stop(start_m, signal_group)]
    if not conflicts:
        return line
    # One point stands for all: who comes to the junction comes close to it.
    nearest = min(arc for arc, _ in conflicts)
    middle = np.mean([point for _, point in conflicts], axis=0)
    conflict = (float(middle[0]), float(middle[1]))
    wait = nearest - WAIT_BEFORE_M
    if signal_group < 0 or wait < 3.0:
        return [Stop(start_m, signal_group, conflict)]
    return [*line, Stop(start_m + wait, -1, conflict)]


def _meeting(lane: Lane, other: Lane) -> tuple[float, Float] | None:
    """Arc length on `lane` and point where two lanes cross or join; None where they only run into each other."""
    mine, theirs = shapely.LineString(lane.centre), shapely.LineString(other.centre)
    shared = mine.intersection(theirs)
    point = np.asarray(shared.representative_point().coords[0]) if not shared.is_empty else lane.centre[-1]
    at = float(mine.project(shapely.Point(point)))
    if lane.kind != "turn" and _alongside(lane, other):
        return None
    return at, point


def _alongside(lane: Lane, other: Lane) -> bool:
    a, b = (with_yaw(one.centre)[len(one.centre) // 2, 2] for one in (lane, other))
    return bool(abs(math.remainder(a - b, math.tau)) < ALONGSIDE_RAD)


def _freedom(lane_map: LaneMap, lanes: tuple[int, ...]) -> tuple[int, int]:
    """Lanes to the left and right that exist along all of a path; none where it turns in a junction."""
    if any(lane_map.lanes[lane].kind == "turn" for lane in lanes):
        return 0, 0
    counts = []
    for side in ("left", "right"):
        fewest = 9
        for lane in lanes:
            number, there = 0, getattr(lane_map.lanes[lane], side)
            while there >= 0:
                number, there = number + 1, getattr(lane_map.lanes[there], side)
            fewest = min(fewest, number)
        counts.append(fewest)
    return counts[0], counts[1]


def onward(lane_map: LaneMap, lane: int, length_m: float, rng: np.random.Generator) -> tuple[int, ...]:
    """A lane and random successors, until they are `length_m` long or the map ends."""
    lanes = [lane]
    left = length_m - float(arc_lengths(lane_map.lanes[lane].centre)[-1])
    while left > 0.0 and lane_map.lanes[lanes[-1]].successors:
        lanes.append(int(rng.choice(lane_map.lanes[lanes[-1]].successors)))
        left -= float(arc_lengths(lane_map.lanes[lanes[-1]].centre)[-1])
    return tuple(lanes)


def start_box(agent: Agent) -> Float:
    """[5] centre x, y, yaw, length, width of an agent at its start."""
    x, y, yaw = at_arc(agent.path, agent.start_arc_m)
    x, y = x - agent.lateral_m * math.sin(yaw), y + agent.lateral_m * math.cos(yaw)
    return np.array([x, y, yaw, agent.length_m, agent.width_m])
