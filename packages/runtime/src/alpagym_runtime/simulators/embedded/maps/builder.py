"""Assembles a `LaneMap`: lanes and their links, pavement, paint, and places where people cross."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import shapely
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded.lane_map import Lane, LaneMap, Marking, Signals
from alpagym_runtime.simulators.embedded.maps import dressing
from alpagym_runtime.simulators.embedded.maps.lines import arc_lengths, offset

Float = NDArray[np.float64]

LANE_WIDTH_M = 3.5
SHOULDER_M = 0.4
WALKWAY_FROM_EDGE_M = 1.4


@dataclass(frozen=True)
class Road:
    """Parallel lanes along a line.

    Attributes:
        line: [K,3], between the two directions.
        forward, backward: lane ids with the line and against it, from the line outwards.
        right_m, left_m: distances from the line to the outer edges of the outer lanes.

    """

    line: Float
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    right_m: float
    left_m: float


@dataclass(frozen=True)
class Crossing:
    """Where people cross: a line [2,2] from kerb to kerb, and its signal group (-1: none)."""

    line: Float
    signal_group: int = -1


@dataclass(frozen=True)
class Route:
    """A way that the ego may take.

    Attributes:
        lanes: lane ids, each a successor of the one before.
        focus_m: arc length, from the first lane's start, of the place that the scene is about.

    """

    lanes: tuple[int, ...]
    focus_m: float


@dataclass(frozen=True)
class Phase:
    """Signal groups that are green together, then yellow, then all red.

    Attributes:
        groups: of vehicles.
        people: groups of pedestrians that may walk in it.
        green_s: how long.

    """

    groups: tuple[int, ...]
    people: tuple[int, ...]
    green_s: float


@dataclass(frozen=True)
class RoadPlan:
    """A map, and what may happen on it.

    Attributes:
        kind: one of `maps.KINDS`.
        lane_map: the map.
        routes: the ego's choices.
        crossings: where people cross.
        phases: of the signals, in order; empty without signals.
        speed_limit_mps: the usual limit.

    """

    kind: str
    lane_map: LaneMap
    routes: tuple[Route, ...]
    crossings: tuple[Crossing, ...] = ()
    phases: tuple[Phase, ...] = ()
    speed_limit_mps: float = 13.9

    @property
    def zebras(self) -> tuple[Float, ...]:
        """Lines [2,2] from kerb to kerb where people who cross go first."""
        return tuple(crossing.line for crossing in self.crossings if crossing.signal_group < 0)


YELLOW_S = 3.0
ALL_RED_S = 1.5
CLEARING_S = 6.0
"""People get no green in the last seconds of a phase: they need them to reach the other side."""


def fixed_time(phases: tuple[Phase, ...], heads: Float, first: int, first_green_s: float) -> Signals:
    """Signals that begin in the middle of phase `first`, with `first_green_s` of its green left (0: it is over)."""
    groups = 1 + max(g for phase in phases for g in phase.groups + phase.people)
    green = np.zeros((groups, 2))
    now = ALL_RED_S if first_green_s <= 0.0 else 0.0
    for k in range(len(phases)):
        phase = phases[(first + k + (first_green_s <= 0.0)) % len(phases)]
        lasts = first_green_s if k == 0 and first_green_s > 0.0 else phase.green_s
        green[list(phase.groups)] = now, now + lasts
        green[list(phase.people)] = now, now + max(lasts - CLEARING_S, 0.1 * lasts)
        now += lasts + YELLOW_S + ALL_RED_S
    return Signals(now, green, YELLOW_S, heads)


@dataclass
class MapBuilder:
    """Collects the parts of a map; `finish` gives the `LaneMap`."""

    lanes: list[Lane] = field(default_factory=list)
    pavement: list[shapely.Polygon] = field(default_factory=list)
    markings: list[Marking] = field(default_factory=list)
    crossings: list[Crossing] = field(default_factory=list)
    crosswalks: list[Float] = field(default_factory=list)
    walkways: list[Float] = field(default_factory=list)
    roadsides: list[tuple[Float, float]] = field(default_factory=list)

    def lane(
        self,
        line: Float,
        kind: Literal["driving", "turn"] = "driving",
        width_m: float = LANE_WIDTH_M,
        speed_limit_mps: float = 13.9,
        signal_group: int = -1,
        margin_m: float = SHOULDER_M,
    ) -> int:
        """Add a lane along a line and pave it `margin_m` beyond its width; its id."""
        self.lanes.append(
            Lane(len(self.lanes), line[:, :2].copy(), width_m, speed_limit_mps, kind=kind, signal_group=signal_group)
        )
        half = width_m / 2.0 + margin_m
        self.pave(line, half, half)
        return len(self.lanes) - 1

    def pave(self, line: Float, right_m: float, left_m: float) -> None:
        """Pavement from `right_m` right to `left_m` left of a line."""
        outline = np.concatenate([offset(line, -right_m)[:, :2], offset(line, left_m)[::-1, :2]])
        shape = shapely.Polygon(outline)
        self.pavement.append(shape if shape.is_valid else shape.buffer(0.0))

    def road(
        self,
        line: Float,
        forward: int,
        backward: int,
        *,
        width_m: float = LANE_WIDTH_M,
        speed_limit_mps: float = 13.9,
        strip_m: float = 0.0,
        edges: bool = True,
        walkways: bool = True,
    ) -> Road:
        """Add lanes on both sides of a line, with their paint.

        Args:
            line: [K,3], between the directions.
            forward: lanes with the line, on its right.
            backward: lanes against it.
            width_m: of each lane.
            speed_limit_mps: of each lane.
            strip_m: pavement beyond the outer lanes, for parking.
            edges: whether edge lines are painted.
            walkways: whether people walk along it.

        """
        right, left = forward * width_m, backward * width_m
        first = len(self.lanes)
        for k in range(forward + backward):
            with_line = k < forward
            place = -(k + 0.5) * width_m if with_line else (k - forward + 0.5) * width_m
            centre = offset(line, place)[:, :2]
            self.lanes.append(Lane(first + k, centre if with_line else centre[::-1].copy(), width_m, speed_limit_mps))
        ids = list(range(first, len(self.lanes)))
        road = Road(line, tuple(ids[:forward]), tuple(ids[forward:]), right, left)
        self.neighbours(road.forward)
        self.neighbours(road.backward)
        side = SHOULDER_M + strip_m
        self.pave(line, right + side, left + side)
        for k in range(1, forward):
            self.paint(offset(line, -k * width_m), "dashed")
        for k in range(1, backward):
            self.paint(offset(line, k * width_m), "dashed")
        if forward and backward:
            self.paint(line, "yellow")
        if edges:
            self.paint(offset(line, -right), "edge")
            self.paint(offset(line, left), "edge")
        self.roadsides += [(line, -(right + side)), (line, left + side)]
        if walkways:
            self.walkway(line, -(right + side))
            self.walkway(line, left + side)
        return road

    def walkway(self, line: Float, kerb_m: float) -> None:
        """People walk along a line, beside a kerb `kerb_m` left of it (negative: right)."""
        self.walkways.append(offset(line, kerb_m + math.copysign(WALKWAY_FROM_EDGE_M, kerb_m))[:, :2])

    def neighbours(self, ids: tuple[int, ...]) -> None:
        """Lanes from left to right, between which traffic may change."""
        for left, right in itertools.pairwise(ids):
            self.lanes[left] = replace(self.lanes[left], right=right)
            self.lanes[right] = replace(self.lanes[right], left=left)

    def closed(self, lane: int, to: int) -> None:
        """Nobody changes from `lane` to its neighbour `to`."""
        there = self.lanes[lane]
        self.lanes[lane] = replace(
            there, left=-1 if there.left == to else there.left, right=-1 if there.right == to else there.right
        )

    def join(self, lane: int, successor: int) -> None:
        """One lane goes on as another."""
        self.lanes[lane] = replace(self.lanes[lane], successors=(*self.lanes[lane].successors, successor))

    def yields(self, lane: int, to: int) -> None:
        """Traffic of `lane` lets that of `to` go first."""
        self.lanes[lane] = replace(self.lanes[lane], yields_to=(*self.lanes[lane].yields_to, to))

    def govern(self, lane: int, signal_group: int) -> None:
        """Signals govern the end of a lane."""
        self.lanes[lane] = replace(self.lanes[lane], signal_group=signal_group)

    def paint(self, line: Float, kind: Literal["solid", "dashed", "yellow", "edge", "stop"]) -> None:
        """A painted line."""
        self.markings.append(Marking(line[:, :2].copy(), kind))

    def stop_line(self, road: Road) -> None:
        """Across the approach lanes of a road that begins at a junction."""
        ends = np.concatenate([offset(road.line[:1], left)[:, :2] for left in (0.1, road.left_m)])
        self.markings.append(Marking(ends, "stop"))

    def crossing(self, road: Road, along_m: float, signal_group: int = -1, depth_m: float = 3.2) -> None:
        """A zebra across a road, its middle `along_m` from the line's start (negative: before it)."""
        x, y, yaw = _pose_at(road.line, along_m)
        ahead, left = np.array([np.cos(yaw), np.sin(yaw)]), np.array([-np.sin(yaw), np.cos(yaw)])
        middle = np.array([x, y])
        right_kerb, left_kerb = middle - left * (road.right_m + SHOULDER_M), middle + left * (road.left_m + SHOULDER_M)
        half = ahead * depth_m / 2.0
        self.crosswalks.append(np.stack([right_kerb - half, left_kerb - half, left_kerb + half, right_kerb + half]))
        self.crossings.append(Crossing(np.stack([right_kerb, left_kerb]), signal_group))

    def length_m(self, *lanes: int) -> float:
        """Summed length of lanes."""
        return float(sum(arc_lengths(self.lanes[lane].centre)[-1] for lane in lanes))

    def finish(
        self,
        rng: np.random.Generator,
        *,
        kerb_radius_m: float,
        sidewalk_m: float,
        buildings: int,
        trees: int,
        signals: Signals | None = None,
    ) -> LaneMap:
        """The map, dressed.

        Args:
            rng: the stream of the dressing; it does not touch the roads.
            kerb_radius_m: how round the inner corners become.
            sidewalk_m: width of the sidewalks beside the pavement; 0: none.
            buildings: at most so many.
            trees: at most so many.
            signals: if any.

        """
        # Grown and shrunk: outer edges come back to where they were, corners between roads become round.
        union = shapely.union_all(shapely.simplify(self.pavement, 0.005))
        surface = union.buffer(kerb_radius_m, quad_segs=8).buffer(-kerb_radius_m, quad_segs=8)
        walk_outline = surface.buffer(sidewalk_m, quad_segs=4) if sidewalk_m else surface
        sidewalks = polygons_without_holes(walk_outline.difference(surface)) if sidewalk_m else ()
        for points in self.walkways if sidewalk_m else ():
            self.lanes.append(Lane(len(self.lanes), points, 2.0, 1.5, kind="walkway"))
        placed = dressing.place(rng, shapely.simplify(walk_outline, 0.3), self.roadsides, buildings, trees)
        return LaneMap(
            lanes=tuple(self.lanes),
            surface=polygons_without_holes(surface),
            signals=signals or Signals(),
            markings=tuple(self.markings),
            crosswalks=tuple(self.crosswalks),
            sidewalks=sidewalks,
            buildings=placed.buildings,
            trees=placed.trees,
        )


def _pose_at(line: Float, along_m: float) -> Float:
    """The pose at an arc length; straight back before the line's start."""
    if along_m < 0.0:
        x, y, yaw = line[0]
        return np.array([x + along_m * np.cos(yaw), y + along_m * np.sin(yaw), yaw])
    arcs = arc_lengths(line)
    return np.array([np.interp(along_m, arcs, line[:, k]) for k in range(3)])


def polygons_without_holes(shape: shapely.Geometry) -> tuple[Float, ...]:
    """Outlines [K,2] whose union is a shape; polygons with holes are cut through the first hole's middle."""
    outlines: list[Float] = []
    pending = list(shapely.get_parts(shape))
    while pending:
        polygon = pending.pop()
        if polygon.geom_type != "Polygon" or polygon.area < 0.05:
            continue
        if not len(polygon.interiors):
            outlines.append(np.asarray(polygon.exterior.coords)[:-1])
            continue
        x_min, y_min, x_max, y_max = polygon.bounds
        cut = shapely.Polygon(polygon.interiors[0]).centroid.x
        for low, high in ((x_min - 1.0, cut), (cut, x_max + 1.0)):
            pending += list(shapely.get_parts(polygon.intersection(shapely.box(low, y_min - 1.0, high, y_max + 1.0))))
    return tuple(outlines)
