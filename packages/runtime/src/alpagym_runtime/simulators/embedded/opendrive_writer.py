"""`LaneMap` as an OpenDRIVE 1.7 file that our reader turns into the same lanes.

Each lane is a road of its own with one right lane around its centre line: straight runs are lines, the rest cubic
curves through the centre's points. Turning lanes are connecting roads of junctions; other forks and merges are direct
junctions. What the format cannot say travels as notes (`opendrive_notes`); elevation is zero.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from xml.sax.saxutils import escape, quoteattr

import numpy as np
import shapely
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded import opendrive_notes as notes
from alpagym_runtime.simulators.embedded.lane_map import Lane, LaneMap

Float = NDArray[np.float64]

STRAIGHT_M = 1e-3
"""Runs of points that stay this close to one line become one."""

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(5)
_TYPES = {"driving": "driving", "turn": "driving", "walkway": "sidewalk", "bicycle": "biking"}


def write_opendrive(
    lane_map: LaneMap,
    name: str = "",
    geo_reference: str | None = None,
    offset: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0),
) -> bytes:
    """The file; `geo_reference` and `offset` are written as they are (see `OpenDriveMap`)."""
    return "".join(_document(lane_map, name, geo_reference, offset)).encode()


def _document(
    lane_map: LaneMap, name: str, geo_reference: str | None, offset: tuple[float, float, float, float]
) -> Iterator[str]:
    points = np.concatenate([lane.centre for lane in lane_map.lanes])
    (west, south), (east, north) = points.min(axis=0).tolist(), points.max(axis=0).tolist()
    yield '<?xml version="1.0" encoding="UTF-8"?>\n<OpenDRIVE>\n'
    yield f'<header revMajor="1" revMinor="7" name={quoteattr(name)} version="1.00" '
    yield f'north="{north!r}" south="{south!r}" east="{east!r}" west="{west!r}">\n'
    if geo_reference is not None:
        yield f"<geoReference>{escape(geo_reference)}</geoReference>\n"
    if any(offset):
        yield '<offset x="{!r}" y="{!r}" z="{!r}" hdg="{!r}"/>\n'.format(*offset)
    yield "</header>\n"
    graph = _Graph(lane_map.lanes)
    for lane in lane_map.lanes:
        yield from _road(lane, graph, lane_map)
    for group in range(len(lane_map.signals.green_s)):
        heads = np.flatnonzero(lane_map.signals.heads[:, 3] == group)
        controls = "".join(f'<control signalId="{head}" type="0"/>' for head in heads)
        yield f'<controller id="{group}" name="group {group}">{controls}</controller>\n'
    yield from graph.junctions()
    yield f"<userData code={quoteattr(notes.SIGNALS)} value={quoteattr(notes.signals_note(lane_map.signals))}/>\n"
    yield f"<userData code={quoteattr(notes.TREES)} value={quoteattr(json.dumps(lane_map.trees.tolist()))}/>\n"
    yield "</OpenDRIVE>\n"


class _Graph:
    """Which road ends meet directly and which through junctions, numbered after the roads."""

    def __init__(self, lanes: tuple[Lane, ...]) -> None:
        self.lanes = lanes
        self.before: list[list[int]] = [[] for _ in lanes]
        for lane in lanes:
            for successor in lane.successors:
                self.before[successor].append(lane.lane_id)
        self._parent = list(range(len(lanes)))
        for lane in lanes:
            if self.forks(lane):
                for successor in lane.successors[1:]:
                    self._unite(lane.successors[0], successor)
            if lane.kind == "turn":
                for other in lane.yields_to:
                    if lanes[other].kind == "turn":
                        self._unite(lane.lane_id, other)
        roots = sorted({self._root(s) for lane in lanes if self.forks(lane) for s in lane.successors})
        roots += sorted({self._root(lane.lane_id) for lane in lanes if lane.kind == "turn"} - set(roots))
        self._number = {root: len(lanes) + k for k, root in enumerate(roots)}

    def _root(self, lane_id: int) -> int:
        while self._parent[lane_id] != lane_id:
            self._parent[lane_id] = self._parent[self._parent[lane_id]]
            lane_id = self._parent[lane_id]
        return lane_id

    def _unite(self, a: int, b: int) -> None:
        self._parent[self._root(a)] = self._root(b)

    def forks(self, lane: Lane) -> bool:
        """Whether a lane's end needs a junction."""
        ways = lane.successors
        if len(ways) > 1:
            return True
        if not ways or lane.kind == "turn":
            return False
        return self.lanes[ways[0]].kind == "turn" or len(self.before[ways[0]]) > 1

    def junction(self, lane_id: int) -> int:
        """The junction that a lane is entered through or belongs to."""
        return self._number[self._root(lane_id)]

    def links(self, lane: Lane) -> str:
        """The road's <link>."""
        parts = []
        sources = self.before[lane.lane_id]
        if sources and lane.kind != "turn" and (len(sources) > 1 or self.forks(self.lanes[sources[0]])):
            parts.append(f'<predecessor elementType="junction" elementId="{self._entry(lane.lane_id, sources)}"/>')
        elif sources:
            parts.append(f'<predecessor elementType="road" elementId="{sources[0]}" contactPoint="end"/>')
        if self.forks(lane):
            parts.append(f'<successor elementType="junction" elementId="{self.junction(lane.successors[0])}"/>')
        elif lane.successors:
            parts.append(f'<successor elementType="road" elementId="{lane.successors[0]}" contactPoint="start"/>')
        return f"<link>{''.join(parts)}</link>"

    def _entry(self, lane_id: int, sources: list[int]) -> int:
        """A lane after turns is entered through their junction, another through its own."""
        turns = [source for source in sources if self.lanes[source].kind == "turn"]
        if turns and not any(self.forks(self.lanes[source]) for source in sources):
            return self.junction(turns[0])
        return self.junction(lane_id)

    def junctions(self) -> Iterator[str]:
        connections: dict[int, list[tuple[int, int]]] = {number: [] for number in self._number.values()}
        for lane in self.lanes:
            if self.forks(lane):
                for successor in lane.successors:
                    connections[self.junction(successor)].append((lane.lane_id, successor))
        for number, ways in connections.items():
            direct = bool(ways) and not any(self.lanes[target].kind == "turn" for _, target in ways)
            yield f'<junction id="{number}" name="" type="{"direct" if direct else "default"}">\n'
            for k, (source, target) in enumerate(ways):
                road = "linkedRoad" if direct else "connectingRoad"
                yield f'<connection id="{k}" incomingRoad="{source}" {road}="{target}" contactPoint="start">'
                yield '<laneLink from="-1" to="-1"/></connection>\n'
            yield "</junction>\n"


def _road(lane: Lane, graph: _Graph, lane_map: LaneMap) -> Iterator[str]:
    pieces = list(_pieces(lane.centre))
    length = sum(piece[1] for piece in pieces)
    junction = graph.junction(lane.lane_id) if lane.kind == "turn" else -1
    yield f'<road name="" length="{length!r}" id="{lane.lane_id}" junction="{junction}" rule="RHT">'
    yield f"{graph.links(lane)}\n"
    yield f'<type s="0.0" type="town"><speed max="{float(lane.speed_limit_mps)!r}" unit="m/s"/></type>\n<planView>\n'
    s = 0.0
    for (x, y, yaw), size, shape in pieces:
        yield f'<geometry s="{s!r}" x="{x!r}" y="{y!r}" hdg="{yaw!r}" length="{size!r}">{shape}</geometry>\n'
        s += size
    yield "</planView>\n<elevationProfile/><lateralProfile/>\n<lanes>"
    width = float(lane.width_m)
    yield f'<laneOffset s="0.0" a="{width / 2.0!r}" b="0.0" c="0.0" d="0.0"/><laneSection s="0.0">'
    yield '<center><lane id="0" type="none" level="false"/></center><right>'
    yield f'<lane id="-1" type="{_TYPES[lane.kind]}" level="false"><link>'
    yield '<predecessor id="-1"/>' if len(graph.before[lane.lane_id]) == 1 else ""
    yield '<successor id="-1"/>' if len(lane.successors) == 1 else ""
    yield f'</link><width sOffset="0.0" a="{width!r}" b="0.0" c="0.0" d="0.0"/>'
    note = notes.lane_note(lane.lane_id, lane.left, lane.right, lane.signal_group, width, lane.yields_to)
    yield f"<userData code={quoteattr(notes.LANE)} value={quoteattr(note)}/>"
    yield "</lane></right></laneSection></lanes>\n"
    if lane.lane_id == 0:
        yield from _objects(lane_map, pieces[0][0])
    yield from _signals(lane, length, lane_map)
    yield "</road>\n"


def _pieces(points: Float) -> Iterator[tuple[tuple[float, float, float], float, str]]:
    """Start pose, length m and shape of each geometry along a centre line."""
    tangents = np.gradient(points, axis=0)
    if len(points) > 2:
        # Central differences weighted by the other side's length: right for uneven points on a curve.
        step = np.diff(points, axis=0)
        size = np.hypot(step[:, 0], step[:, 1])[:, None]
        unit = step / size
        tangents[1:-1] = unit[:-1] * size[1:] + unit[1:] * size[:-1]
        tangents[0] = 2.0 * unit[0] - tangents[1] / np.hypot(*tangents[1])
        tangents[-1] = 2.0 * unit[-1] - tangents[-2] / np.hypot(*tangents[-2])
    tangents = tangents / np.maximum(np.hypot(tangents[:, 0], tangents[:, 1]), 1e-12)[:, None]
    kept = shapely.get_coordinates(shapely.simplify(shapely.linestrings(points), STRAIGHT_M))
    index, at = [], 0
    for corner in kept:
        while not (points[at] == corner).all():
            at += 1
        index.append(at)
    for first, last in itertools.pairwise(index):
        start, chord = points[first], points[last] - points[first]
        length = math.hypot(*chord)
        yaw = math.atan2(chord[1], chord[0])
        ends = tangents[[first, last]] if last == first + 1 else None
        if ends is None or (np.abs(ends @ np.array([-math.sin(yaw), math.cos(yaw)])) < 1e-4).all():
            yield (float(start[0]), float(start[1]), yaw), length, "<line/>"
        else:
            yield _cubic(start, chord, length * ends[0], length * ends[1])


def _cubic(start: Float, chord: Float, leaves: Float, arrives: Float) -> tuple[tuple[float, float, float], float, str]:
    """A Hermite curve as paramPoly3 in the frame of its start."""
    yaw = math.atan2(leaves[1], leaves[0])
    turn = np.array([[math.cos(yaw), math.sin(yaw)], [-math.sin(yaw), math.cos(yaw)]])
    b, end, late = turn @ leaves, turn @ chord, turn @ arrives
    c, d = 3.0 * end - 2.0 * b - late, b + late - 2.0 * end
    p = ((_NODES + 1.0) / 2.0)[:, None]
    speed = b + p * (2.0 * c + p * 3.0 * d)
    length = float(_WEIGHTS @ np.hypot(speed[:, 0], speed[:, 1])) / 2.0
    numbers = " ".join(
        f'{name}{axis}="{float(value[k])!r}"'
        for k, axis in enumerate("UV")
        for name, value in (("a", np.zeros(2)), ("b", b), ("c", c), ("d", d))
    )
    return (float(start[0]), float(start[1]), yaw), length, f'<paramPoly3 pRange="normalized" {numbers}/>'


def _objects(lane_map: LaneMap, origin: tuple[float, float, float]) -> Iterator[str]:
    """Everything with an outline, as objects of the first road whose own frame is turned back to the map's."""
    things: list[tuple[str, str, Float, float]] = []
    things += [("none", notes.SURFACE, ring, 0.0) for ring in lane_map.surface]
    things += [("none", notes.SIDEWALK, ring, 0.0) for ring in lane_map.sidewalks]
    things += [("none", notes.MARKING + mark.kind, mark.points, 0.0) for mark in lane_map.markings]
    things += [("crosswalk", "", ring, 0.0) for ring in lane_map.crosswalks]
    things += [("building", "", building.footprint, building.height_m) for building in lane_map.buildings]
    x, y, yaw = origin
    yield "<objects>\n"
    for k, (kind, name, points, height) in enumerate(things):
        closed = "false" if name.startswith(notes.MARKING) else "true"
        yield f'<object id="{k}" type="{kind}" name="{name}" s="0.0" t="0.0" zOffset="0.0" hdg="{-yaw!r}" '
        yield f'height="{float(height)!r}"><outlines><outline id="0" closed="{closed}">'
        for px, py in (points - np.array([x, y])).tolist():
            yield f'<cornerLocal u="{px!r}" v="{py!r}" z="0.0" height="{float(height)!r}"/>'
        yield "</outline></outlines></object>\n"
    yield "</objects>\n"


def _signals(lane: Lane, length: float, lane_map: LaneMap) -> Iterator[str]:
    """Heads on the first road that they govern, at its end: for other readers, ours takes the note."""
    governed = {other.signal_group: other.lane_id for other in reversed(lane_map.lanes) if other.signal_group >= 0}
    heads = [k for k, head in enumerate(lane_map.signals.heads) if governed.get(int(head[3]), 0) == lane.lane_id]
    if not heads:
        return
    step = lane.centre[-1] - lane.centre[-2]
    left = np.array([-step[1], step[0]]) / math.hypot(*step)
    yield "<signals>\n"
    for k in heads:
        t = float(left @ (lane_map.signals.heads[k, :2] - lane.centre[-1]))
        yield f'<signal id="{k}" name="" s="{length!r}" t="{t!r}" zOffset="5.0" orientation="+" dynamic="yes" '
        yield 'type="1000001" subtype="-1" country="OpenDRIVE" value="-1" width="0.3" height="0.9"/>\n'
    yield "</signals>\n"
