"""OpenDRIVE maps as `LaneMap`: lanes in driving direction, who follows whom, surface, signals, paint.

Each lane of each lane section becomes one lane, reversed where traffic runs against the road (left lanes of roads with
right-hand traffic, right lanes of others [ASAM OpenDRIVE 1.7, 11.1]). Junctions are seen through: a lane's successors
are the connecting roads' lanes. Traffic lights get a fixed plan, two phases a junction by the direction of approach:
files say which lights go together (controllers) but never when. Who yields follows, in this order: separate phases,
the junction's priorities, signs at the approaches, turning after straight on, left after right, right before left.

Left out of what the format can say: elevation, parking spaces, virtual junctions, lights for people.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import shapely
from numpy.typing import NDArray

from alpagym_runtime.errors import SceneError
from alpagym_runtime.geometry import wrap_angle
from alpagym_runtime.simulators.embedded import opendrive_notes as notes
from alpagym_runtime.simulators.embedded.lane_map import Building, Lane, LaneMap, Marking, Signals
from alpagym_runtime.simulators.embedded.opendrive_line import polynomial, poses
from alpagym_runtime.simulators.embedded.opendrive_xml import (
    OpenDrive,
    Placement,
    Road,
    RoadLane,
    RoadObject,
    Section,
    Signal,
    parse,
)

Float = NDArray[np.float64]
Kind = Literal["driving", "turn", "walkway", "bicycle"]
Key = tuple[str, int, int]
"""A lane of the file: road id, index of the section, lane number."""

STEP_M = 1.5
"""Largest distance between samples along a road."""

EXTENT_MAX_M = 100_000.0
LINK_GAP_MAX_M = 2.0
WIDTH_MIN_M = 0.5
JUMP_M, TAPER_M = 0.02, 40.0
LATERAL_MAX_M = 500.0
TURN_RAD, TURN_RADPM, LOOPS_RAD = 40.0, 0.05, 14.0
JUNCTION_LANES_MAX = 500
ISLAND_MAX_M2 = 60.0
"""Gaps between the turning lanes of a junction up to this size are asphalt; larger ones are islands."""

SIGNAL_REACH_M = 30.0
CYCLE_S, YELLOW_S = 60.0, 3.0
GREEN_S = ((0.0, 25.0), (30.0, 55.0))

CAR_LANES = frozenset(
    (
        *("driving", "entry", "exit", "onRamp", "offRamp", "connectingRamp", "slipLane", "bidirectional"),
        *("mwyEntry", "mwyExit", "bus", "taxi", "HOV", "special1", "special2", "special3"),
    )
)
SURFACE_LANES = CAR_LANES | {"stop", "parking"}
PRIORITY_SIGNS = {"301": 1, "306": 1, "205": -1, "206": -1}
"""Signs of the German catalogue, which the format's examples use: goes first, yields."""

PEOPLE_LIGHT, CROSSWALK_SIGN = "1000002", "1000003"


@dataclass(frozen=True)
class OpenDriveMap:
    """A map with what its file says about the Earth.

    Attributes:
        lane_map: in the file's inertial frame, moved by the placement that was asked for.
        name: from the header.
        geo_reference: PROJ string of that frame, or None.
        offset: x, y, z m and hdg rad that the writer took off the projected coordinates; not applied.
        remarks: links that were dropped, with reasons.

    """

    lane_map: LaneMap
    name: str
    geo_reference: str | None
    offset: tuple[float, float, float, float]
    remarks: tuple[str, ...]


def read_opendrive(data: bytes, name: str) -> LaneMap:
    """The lanes of an OpenDRIVE file; `name` is what errors call it.

    Raises:
        SceneError: naming file, place and reason.

    """
    return read_opendrive_map(data, name).lane_map


def read_opendrive_map(data: bytes, name: str, placement: Placement | None = None) -> OpenDriveMap:
    """Like `read_opendrive`, with geo reference and remarks, moved by `placement`."""
    try:
        # Polynomials of strangers overflow; what comes out is checked.
        with np.errstate(all="ignore"):
            return _Builder(parse(data, placement)).build()
    except SceneError as err:
        raise SceneError(f"{name}: {err}") from None
    except shapely.errors.GEOSException as err:
        raise SceneError(f"{name}: the roads' shapes cannot be used: {err}") from err


# ---------------------------------------------------------------- a section in the plane


@dataclass(frozen=True)
class _Sheet:
    """A section's cross sections: stations s [K] m, poses [K,3] and each lane's inner and outer offset t [K] m."""

    s: Float
    poses: Float
    inner: dict[int, Float]
    outer: dict[int, Float]

    def points(self, t: Float) -> Float:
        return offset_points(self.poses, t)

    def edges(self, number: int) -> tuple[Float, Float]:
        """[K,2] left (larger t) and right edge of a lane, along the road."""
        inner, outer = self.points(self.inner[number]), self.points(self.outer[number])
        return (outer, inner) if number > 0 else (inner, outer)


def offset_points(line: Float, t: Float | float) -> Float:
    """[K,2] points `t` m left of poses [K,3]."""
    return np.stack([line[:, 0] - t * np.sin(line[:, 2]), line[:, 1] + t * np.cos(line[:, 2])], axis=-1)


def _sheet(road: Road, section: Section) -> _Sheet:
    breaks = {section.start, section.end}
    breaks |= {piece.s for piece in road.pieces} | {row[0] for row in road.lane_offsets}
    for lane in section.lanes.values():
        breaks |= {section.start + row[0] for row in (*lane.widths, *lane.borders)}
    inside = sorted(b for b in breaks if section.start <= b <= section.end)
    kept = [inside[0]]
    kept += [b for b in inside[1:] if b - kept[-1] > 1e-6]
    kept[-1] = section.end
    parts = [
        np.linspace(a, b, max(math.ceil((b - a) / STEP_M), 1), endpoint=False) for a, b in itertools.pairwise(kept)
    ]
    s = np.concatenate([*parts, [section.end]])
    ds = s - section.start
    # At the very end of a section the offset is still this section's: a jump there belongs to the next one.
    offset = polynomial(road.lane_offsets, np.minimum(s, section.end - 2e-9) if section.end < road.length else s)
    inner: dict[int, Float] = {}
    outer: dict[int, Float] = {0: offset}
    for number in sorted(section.lanes, key=lambda n: (abs(n), n)):
        if number == 0:
            continue
        side = 1 if number > 0 else -1
        lane = section.lanes[number]
        edge = inner[number] = outer[number - side]
        if lane.widths or not lane.borders:
            outer[number] = edge + side * np.maximum(polynomial(lane.widths, ds), 0.0)
        else:
            outer[number] = offset + polynomial(lane.borders, ds)
    line = poses(road.pieces, s)
    if not all(np.isfinite(array).all() for array in (line, *outer.values())):
        raise SceneError("its shape is not finite")
    farthest = max(float(np.abs(t).max()) for t in outer.values())
    if farthest > LATERAL_MAX_M:
        raise SceneError(f"a lane reaches {farthest:g} m to the side, expected at most {LATERAL_MAX_M:g} m")
    _check_turn(np.diff(line[:, 2]), section)
    return _Sheet(s, line, inner, outer)


def _check_turn(steps_rad: Float, section: Section) -> None:
    """Refuse curls: a line that winds over itself thousands of times takes the polygon union hours."""
    length = section.end - section.start
    turn, net = float(np.abs(steps_rad).sum()), abs(float(steps_rad.sum()))
    if turn > TURN_RAD + TURN_RADPM * length or net > LOOPS_RAD:
        raise SceneError(f"it turns by {turn:.0f} rad over {length:.0f} m; no road does")


def _thinned(points: Float) -> Float:
    """Without points closer than 0.25 m to their neighbour; both ends stay."""
    kept = [0]
    for k in range(1, len(points) - 1):
        if math.hypot(*(points[k] - points[kept[-1]])) >= 0.25:
            kept.append(k)
    if len(kept) > 1 and math.hypot(*(points[-1] - points[kept[-1]])) < 0.25:
        kept.pop()
    return points[[*kept, len(points) - 1]]


def _fading(points: Float, shift: Float) -> Float:
    """[K,2]: `shift` at the first point, smoothly nothing from `TAPER_M` or half way on."""
    along = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(points, axis=0).T))])
    left = np.clip(1.0 - along / min(TAPER_M, along[-1] / 2.0), 0.0, 1.0)
    return (left * left * (3.0 - 2.0 * left))[:, None] * shift


def _simple(points: Float, tolerance_m: float = 0.01) -> Float:
    line = shapely.simplify(shapely.linestrings(points), tolerance_m)
    out = shapely.get_coordinates(line)
    return out if len(out) > 1 else points


# ---------------------------------------------------------------- the map


class _Builder:
    """Builds one map; the methods run in the order of `build`."""

    def __init__(self, contents: OpenDrive) -> None:
        self.file = contents
        self.own = notes.SIGNALS in contents.notes  # written by us: says itself what is derived otherwise
        self.remarks: list[str] = []
        self.sheets: dict[tuple[str, int], _Sheet] = {}
        self.ids: dict[Key, int] = {}
        self.lanes: list[Lane] = []
        self.keys: list[Key] = []
        self.junction_of: list[str] = []
        self.end_widths: list[tuple[float, float]] = []
        self.surface: list[Float] = []
        self.junction_surface: dict[str, list[Float]] = {}
        self.sidewalks: list[Float] = []
        self.markings: list[Marking] = []

    def build(self) -> OpenDriveMap:
        for road in self.file.roads.values():
            try:
                self._road(road)
            except SceneError as err:
                raise SceneError(f"road {road.road_id}: {err}") from None
        if not any(lane.kind in ("driving", "turn") for lane in self.lanes):
            raise SceneError("no lane that a car may drive on")
        ends = np.concatenate([lane.centre[[0, -1]] for lane in self.lanes])
        if (ends.max(axis=0) - ends.min(axis=0) > EXTENT_MAX_M).any():
            raise SceneError(f"the roads spread over more than {EXTENT_MAX_M / 1000.0:g} km")
        self._link()
        if not self.own:
            self._meet()
        self._neighbours()
        signals = Signals()
        if not self.own:
            signals = self._signals()
            self._yields()
            self._fill_junctions()
        lane_map = self._dress(signals)
        lane_map = notes.apply(lane_map, self.file, [self._lane(key).notes for key in self.keys])
        return OpenDriveMap(lane_map, self.file.name, self.file.geo_reference, self.file.offset, tuple(self.remarks))

    def _lane(self, key: Key) -> RoadLane:
        return self.file.roads[key[0]].sections[key[1]].lanes[key[2]]

    def _forward(self, key: Key) -> bool:
        """Whether traffic runs along the road."""
        lane = self._lane(key)
        forward = (key[2] < 0) != self.file.roads[key[0]].left_hand
        return not forward if lane.direction == "reversed" else forward

    # ---- lanes and surface

    def _road(self, road: Road) -> None:
        for index, section in enumerate(road.sections):
            sheet = self.sheets[road.road_id, index] = _sheet(road, section)
            for number, lane in sorted(section.lanes.items(), reverse=True):
                if number != 0:
                    self._add_lane(road, index, number, lane, sheet)
            self._add_surface(road, section, sheet)
            self._add_marks(road, index, section, sheet)

    def _add_lane(self, road: Road, index: int, number: int, lane: RoadLane, sheet: _Sheet) -> None:
        in_junction = road.junction != "-1"
        kind: Kind | None = None
        if lane.kind in CAR_LANES:
            kind = "turn" if in_junction else "driving"
        elif lane.kind in ("sidewalk", "walking"):
            kind = "walkway"
        elif lane.kind == "biking":
            kind = "bicycle"
        width = np.abs(sheet.outer[number] - sheet.inner[number])
        if kind is None or width.max() < WIDTH_MIN_M:
            return
        left, right = sheet.edges(number)
        if kind == "walkway" and not self.own:
            self.sidewalks.append(np.concatenate([_simple(left), _simple(right)[::-1]]))
        key = (road.road_id, index, number)
        centre = _thinned((left + right) / 2.0)
        ends = (float(width[0]), float(width[-1]))
        if not self._forward(key):
            centre, ends = centre[::-1].copy(), ends[::-1]
        if not (np.hypot(*np.diff(centre, axis=0).T) > 1e-6).all():
            raise SceneError(f"lane {number} has a length of zero or turns back on itself")
        self.ids[key] = len(self.lanes)
        self.keys.append(key)
        self.end_widths.append(ends)
        self.junction_of.append(road.junction if in_junction else "")
        limit = lane.limit_mps if lane.limit_mps is not None else road.limit_mps
        self.lanes.append(Lane(len(self.lanes), centre, max(float(np.median(width)), WIDTH_MIN_M), limit, kind=kind))

    def _add_surface(self, road: Road, section: Section, sheet: _Sheet) -> None:
        """One polygon for each run of neighbouring lanes that may be driven on."""
        numbers = sorted((n for n in section.lanes if n != 0), reverse=True)
        run: list[int] = []
        for number in [*numbers, None]:
            if number is not None and section.lanes[number].kind in SURFACE_LANES:
                run.append(number)
                continue
            if run:
                left, right = sheet.edges(run[0])[0], sheet.edges(run[-1])[1]
                for edge in (left, right):
                    step = np.diff(edge, axis=0)
                    _check_turn(wrap_angle(np.diff(np.arctan2(step[:, 1], step[:, 0]))), section)
                ring = np.concatenate([_simple(left), _simple(right)[::-1]])
                self.surface.append(ring)
                if road.junction != "-1":
                    self.junction_surface.setdefault(road.junction, []).append(ring)
            run = []

    def _add_marks(self, road: Road, index: int, section: Section, sheet: _Sheet) -> None:
        for number, lane in section.lanes.items():
            side = -1 if number < 0 else 1
            beyond = section.lanes.get(number + side)
            within = lane if number != 0 else section.lanes.get(-1)
            cars = [other is not None and other.kind in CAR_LANES for other in (within, beyond)]
            for k, mark in enumerate(lane.marks):
                last = lane.marks[k + 1].start if k + 1 < len(lane.marks) else section.end - section.start
                ds = sheet.s - section.start
                here = (ds >= mark.start - 1e-6) & (ds <= last + 1e-6)
                kind = _marking_kind(mark.kind, mark.colour, number == 0, all(cars))
                if kind is not None and here.sum() > 1:
                    line = sheet.points(sheet.outer[number])[here]
                    if (np.ptp(line, axis=0) > 1e-3).any():
                        self.markings.append(Marking(_simple(line, 0.02), kind))

    def _fill_junctions(self) -> None:
        for rings in self.junction_surface.values():
            shapes = [shapely.make_valid(shapely.Polygon(ring)) for ring in rings if len(ring) > 2]
            union = shapely.union_all([shape.buffer(0.05) for shape in shapes])
            for polygon in shapely.get_parts(union):
                if polygon.geom_type == "Polygon":
                    holes = [np.asarray(ring.coords)[:-1] for ring in polygon.interiors]
                    # As wide as the buffer took off, and a little more, so that no seam is left.
                    self.surface += [
                        np.asarray(shapely.Polygon(hole).buffer(0.1, join_style="mitre").exterior.coords)[:-1]
                        for hole in holes
                        if shapely.Polygon(hole).area < ISLAND_MAX_M2
                    ]

    # ---- links

    def _link(self) -> None:
        """Successors of each lane, from both lanes' links, across sections, roads and junctions."""
        by_incoming: dict[tuple[str, str], list[Any]] = {}
        for junction in self.file.junctions.values():
            for connection in junction.connections:
                by_incoming.setdefault((junction.junction_id, connection.incoming), []).append(connection)
        follow: list[dict[int, None]] = [{} for _ in self.lanes]
        for lane_id, key in enumerate(self.keys):
            for target, entered_forward in self._targets(key, self._forward(key), by_incoming):
                self._join(follow, lane_id, target, entered_forward)
            # A link may stand in one of the two lanes only: read backwards as well.
            for target, left_forward in self._targets(key, not self._forward(key), {}):
                source = self.ids.get(target)
                if source is not None and self._forward(target) != left_forward:
                    self._join_ids(follow, source, lane_id)
        self.lanes = [replace(lane, successors=tuple(ways)) for lane, ways in zip(self.lanes, follow, strict=True)]

    def _targets(
        self, key: Key, towards_end: bool, by_incoming: dict[tuple[str, str], list[Any]]
    ) -> list[tuple[Key, bool]]:
        """Lanes beyond a lane's end (or start), and whether each is entered at its own start."""
        road_id, index, number = key
        road = self.file.roads[road_id]
        lane = self._lane(key)
        numbers = lane.successors if towards_end else lane.predecessors
        beyond = index + (1 if towards_end else -1)
        if 0 <= beyond < len(road.sections):
            return [((road_id, beyond, n), towards_end) for n in numbers]
        link = road.successor if towards_end else road.predecessor
        if link is None:
            return []
        if link.kind == "road":
            other = self.file.roads.get(link.target)
            if other is None:
                self._remark(f"road {road_id}: no road {link.target}, which it is linked to")
                return []
            at_start = link.contact == "start"
            section = 0 if at_start else len(other.sections) - 1
            return [((other.road_id, section, n), at_start) for n in numbers]
        found = []
        for connection in by_incoming.get((link.target, road_id), ()):
            other = self.file.roads.get(connection.road)
            if other is None:
                self._remark(f"junction {link.target}: no road {connection.road}, which a connection names")
                continue
            at_start = connection.contact == "start"
            section = 0 if at_start else len(other.sections) - 1
            found += [((other.road_id, section, to), at_start) for start, to in connection.lanes if start == number]
        return found

    def _join(self, follow: list[dict[int, None]], lane_id: int, target: Key, entered_forward: bool) -> None:
        other = self.ids.get(target)
        if other is not None and self._forward(target) == entered_forward:
            self._join_ids(follow, lane_id, other)

    def _join_ids(self, follow: list[dict[int, None]], lane_id: int, other: int) -> None:
        cars = ("driving", "turn")
        a, b = self.lanes[lane_id], self.lanes[other]
        if a.kind != b.kind and not (a.kind in cars and b.kind in cars):
            return
        gap = math.hypot(*(a.centre[-1] - b.centre[0]))
        if gap <= LINK_GAP_MAX_M:
            follow[lane_id][other] = None
        elif other not in follow[lane_id]:
            self._remark(f"lanes {self.keys[lane_id]} and {self.keys[other]} are linked but {gap:.1f} m apart")

    def _meet(self) -> None:
        """Bend lanes that begin or end beside the lane they are linked to: tapers, which shrink to their edge.

        The narrower of the two gives way, over up to `TAPER_M` and half its length.
        """
        for lane_id, lane in enumerate(self.lanes):
            for other in lane.successors:
                end, start = self.lanes[lane_id].centre, self.lanes[other].centre
                jump = start[0] - end[-1]
                if math.hypot(*jump) <= JUMP_M:
                    continue
                if self.end_widths[other][0] < self.end_widths[lane_id][1]:
                    bent = start - _fading(start, jump)
                    self.lanes[other] = replace(self.lanes[other], centre=bent)
                else:
                    bent = end + _fading(end[::-1], jump)[::-1]
                    self.lanes[lane_id] = replace(self.lanes[lane_id], centre=bent)

    def _remark(self, text: str) -> None:
        if len(self.remarks) < 100 and text not in self.remarks:
            self.remarks.append(text)

    # ---- neighbours

    def _neighbours(self) -> None:
        for lane_id, key in enumerate(self.keys):
            lane = self.lanes[lane_id]
            forward = self._forward(key)
            found = []
            for step in (1, -1):  # larger t first: the left of forward traffic
                other = (key[0], key[1], key[2] + step)
                beside = self.ids.get(other)
                allowed = (
                    beside is not None
                    and self._forward(other) == forward
                    and self.lanes[beside].kind == lane.kind
                    and lane.kind in ("driving", "turn")
                    and self._may_change(key, step)
                )
                found.append(beside if allowed and beside is not None else -1)
            left, right = found if forward else found[::-1]
            self.lanes[lane_id] = replace(lane, left=left, right=right)

    def _may_change(self, key: Key, step: int) -> bool:
        """Whether paint lets traffic go from a lane to the next larger (step 1) or smaller number."""
        inner = min((key[2], key[2] + step), key=abs)
        marks = self.file.roads[key[0]].sections[key[1]].lanes[inner].marks
        way = "increase" if step > 0 else "decrease"
        return not marks or any(mark.lane_change in ("both", way) for mark in marks)

    # ---- signals

    def _signals(self) -> Signals:
        groups: dict[tuple[str, int], int] = {}
        phase_of_controller: dict[str, int] = {}
        first_heading: dict[str, float] = {}
        greens: list[tuple[float, float]] = []
        heads = []
        into: dict[int, list[int]] = {}
        for lane in self.lanes:
            for successor in lane.successors:
                into.setdefault(successor, []).append(lane.lane_id)
        for road in self.file.roads.values():
            for signal in road.signals:
                if not signal.dynamic or signal.kind == PEOPLE_LIGHT:
                    continue
                governed = self._governed(road, signal, into)
                if not governed:
                    continue
                heading = _end_yaw(self.lanes[governed[0]])
                place = self._junction_after(governed[0])
                first = first_heading.setdefault(place, heading)
                phase = 0 if abs(math.cos(heading - first)) > math.sqrt(0.5) else 1
                controller = self.file.controllers.get(signal.signal_id)
                if controller is not None:
                    phase = phase_of_controller.setdefault(f"{place}/{controller}", phase)
                if (place, phase) not in groups:
                    groups[place, phase] = len(greens)
                    greens.append(GREEN_S[phase])
                group = groups[place, phase]
                for lane_id in governed:
                    if self.lanes[lane_id].signal_group == -1:
                        self.lanes[lane_id] = replace(self.lanes[lane_id], signal_group=group)
                pose = poses(road.pieces, np.array([min(max(signal.s, 0.0), road.length)]))
                heads.append([*offset_points(pose, signal.t)[0], heading, group])
        if not greens:
            return Signals()
        return Signals(CYCLE_S, np.array(greens), YELLOW_S, np.array(heads, np.float64))

    def _governed(self, road: Road, signal: Signal, into: dict[int, list[int]]) -> list[int]:
        """Lanes whose end a light governs: its own road's before a junction, or those that lead into its road."""
        governed: dict[int, None] = {}
        for lane_id, key in self._of_road(road):
            lane = self.lanes[lane_id]
            forward = self._forward(key)
            if lane.kind not in ("driving", "turn") or signal.orientation == ("-" if forward else "+"):
                continue
            if signal.lanes and not any(min(a, b) <= key[2] <= max(a, b) for a, b in signal.lanes):
                continue
            if road.junction != "-1":
                if abs(signal.s - (0.0 if forward else road.length)) <= SIGNAL_REACH_M:
                    governed.update(dict.fromkeys(into.get(lane_id, ())))
            elif abs(signal.s - (road.length if forward else 0.0)) <= SIGNAL_REACH_M and any(
                self.junction_of[s] for s in lane.successors
            ):
                governed[lane_id] = None
        return list(governed)

    def _of_road(self, road: Road) -> list[tuple[int, Key]]:
        """A road's lanes at the end that their traffic leaves (or, in junctions, enters) by."""
        last = len(road.sections) - 1
        found = []
        for index in {0, last}:
            for number in road.sections[index].lanes:
                key = (road.road_id, index, number)
                if key in self.ids:
                    at_end = self._forward(key) == (road.junction == "-1")
                    if index == (last if at_end else 0):
                        found.append((self.ids[key], key))
        return found

    def _junction_after(self, lane_id: int) -> str:
        return next((j for s in self.lanes[lane_id].successors if (j := self.junction_of[s])), "")

    # ---- right of way

    def _yields(self) -> None:
        members: dict[str, list[int]] = {}
        for lane_id, junction in enumerate(self.junction_of):
            if junction and self.lanes[lane_id].kind == "turn":
                members.setdefault(junction, []).append(lane_id)
        before: dict[int, int] = {}
        for lane in self.lanes:
            for successor in lane.successors:
                before.setdefault(successor, lane.lane_id)
        waits: dict[int, list[int]] = {}
        for junction, ids in members.items():
            if len(ids) > JUNCTION_LANES_MAX:
                raise SceneError(f"junction {junction}: {len(ids)} lanes are more than {JUNCTION_LANES_MAX}")
            lines = [shapely.linestrings(self.lanes[i].centre) for i in ids]
            first, second = shapely.STRtree(lines).query(lines, predicate="intersects")
            meets = set(zip(first.tolist(), second.tolist(), strict=True))
            ends = np.array([self.lanes[i].centre[-1] for i in ids])
            close = np.argwhere(np.hypot(*(ends[:, None] - ends[None]).T) < 1.0)
            meets |= {(int(a), int(b)) for a, b in close}
            for a, b in sorted(meets):
                one, other = ids[a], ids[b]
                if a < b and before.get(one) != before.get(other):
                    loser = self._loser(junction, one, other, before)
                    if loser is not None:
                        waits.setdefault(loser, []).append(other if loser == one else one)
        for lane_id, others in waits.items():
            self.lanes[lane_id] = replace(self.lanes[lane_id], yields_to=tuple(sorted(others)))

    def _loser(self, junction: str, one: int, other: int, before: dict[int, int]) -> int | None:
        """Which of two lanes that meet waits; None where lights part them or they stand in one line."""
        approaches = (before.get(one), before.get(other))
        groups = [self.lanes[a].signal_group if a is not None else -1 for a in approaches]
        if -1 not in groups and groups[0] != groups[1]:
            return None
        found = self.file.junctions.get(junction)
        for high, low in found.priorities if found is not None else ():
            roads = [
                {self.keys[i][0]} | ({self.keys[a][0]} if a is not None else set())
                for i, a in zip((one, other), approaches, strict=True)
            ]
            if high in roads[0] and low in roads[1]:
                return other
            if high in roads[1] and low in roads[0]:
                return one
        ranks = [self._rank(a) for a in approaches]
        if ranks[0] != ranks[1]:
            return one if ranks[0] < ranks[1] else other
        turns = [_turn(self.lanes[i]) for i in (one, other)]
        if abs(abs(turns[0]) - abs(turns[1])) > 0.35:
            return one if abs(turns[0]) > abs(turns[1]) else other
        left_hand = self.file.roads[self.keys[one][0]].left_hand
        if abs(turns[0] - turns[1]) > 0.35:
            across = turns if not left_hand else [-turn for turn in turns]
            return one if across[0] > across[1] else other
        # Right before left (left before right on left-hand roads), by where the other comes from.
        bearing = float(wrap_angle(_start_yaw(self.lanes[other]) - _start_yaw(self.lanes[one])))
        if abs(bearing) < 0.2:
            return max(one, other)
        comes_from_right = (bearing > 0.0) != left_hand
        return one if comes_from_right else other

    def _rank(self, approach: int | None) -> int:
        """1 where a priority sign stands at the approach, -1 where it must yield."""
        if approach is None:
            return 0
        key = self.keys[approach]
        forward = self._forward(key)
        for signal in self.file.roads[key[0]].signals:
            if signal.kind in PRIORITY_SIGNS and signal.orientation != ("-" if forward else "+"):
                return PRIORITY_SIGNS[signal.kind]
        return 0

    # ---- what stands and lies beside

    def _dress(self, signals: Signals) -> LaneMap:
        crosswalks: list[Float] = []
        buildings: list[Building] = []
        trees: list[tuple[float, float, float]] = []
        own_surface: list[Float] = []
        for road in self.file.roads.values():
            for thing in road.objects:
                rings = _outlines(road, thing)
                if thing.kind == "tree" or (thing.kind == "vegetation" and thing.radius_m > 0.0):
                    x, y, _ = _object_pose(road, thing)
                    trees.append((x, y, thing.radius_m or 1.5))
                elif thing.name == notes.SURFACE:
                    own_surface += rings
                elif thing.name == notes.SIDEWALK:
                    self.sidewalks += rings
                elif thing.name.startswith(notes.MARKING):
                    self.markings += [Marking(ring, notes.marking_kind(thing.name)) for ring in rings]
                elif thing.kind == "crosswalk":
                    crosswalks += [ring for ring in rings if len(ring) > 3]
                elif thing.kind == "building":
                    buildings += [Building(ring, thing.height_m or 6.0) for ring in rings if len(ring) > 2]
            for signal in road.signals:
                if signal.kind == CROSSWALK_SIGN and signal.width_m > 0.0:
                    pose = poses(road.pieces, np.array([min(max(signal.s, 0.0), road.length)]))[0]
                    place = offset_points(pose[None], signal.t)[0]
                    crosswalks.append(_rectangle((*place, pose[2]), signal.value or 4.0, signal.width_m))
        return LaneMap(
            tuple(self.lanes),
            tuple(own_surface or self.surface),
            signals,
            tuple(self.markings) + self._stop_lines(),
            tuple(crosswalks),
            tuple(self.sidewalks),
            tuple(buildings),
            np.array(trees, np.float64).reshape(-1, 3),
        )

    def _stop_lines(self) -> tuple[Marking, ...]:
        lines: list[Marking] = []
        for lane in self.lanes:
            if lane.signal_group >= 0:
                pose = np.array([[*lane.centre[-1], _end_yaw(lane)]])
                half = lane.width_m / 2.0
                lines.append(Marking(np.concatenate([offset_points(pose, half), offset_points(pose, -half)]), "stop"))
        return tuple(lines)


def _marking_kind(
    kind: str, colour: str, centre: bool, between_cars: bool
) -> Literal["solid", "dashed", "yellow", "edge"] | None:
    if kind in ("none", "grass", "custom", "botts dots"):
        return None
    if kind in ("curb", "edge"):
        return "edge"
    if "solid" in kind:
        if centre and ("yellow" in colour or kind == "solid solid"):
            return "yellow"
        return "solid" if between_cars else "edge"
    return "dashed"


def _start_yaw(lane: Lane) -> float:
    return math.atan2(*(lane.centre[1] - lane.centre[0])[::-1])


def _end_yaw(lane: Lane) -> float:
    return math.atan2(*(lane.centre[-1] - lane.centre[-2])[::-1])


def _turn(lane: Lane) -> float:
    """How far a lane turns, rad, left positive."""
    step = np.diff(lane.centre, axis=0)
    return float(np.sum(wrap_angle(np.diff(np.arctan2(step[:, 1], step[:, 0])))))


def _object_pose(road: Road, thing: RoadObject) -> tuple[float, float, float]:
    line = poses(road.pieces, np.array([min(max(thing.s, 0.0), road.length)]))
    x, y = offset_points(line, thing.t)[0]
    return float(x), float(y), float(line[0, 2] + thing.yaw)


def _outlines(road: Road, thing: RoadObject) -> list[Float]:
    rings = []
    for frame, corners in thing.outlines:
        table = np.array(corners)
        if frame == "road":
            line = poses(road.pieces, np.clip(table[:, 0], 0.0, road.length))
            ring = offset_points(line, table[:, 1])
        else:
            x, y, yaw = _object_pose(road, thing)
            cos, sin = math.cos(yaw), math.sin(yaw)
            ring = np.stack(
                [x + cos * table[:, 0] - sin * table[:, 1], y + sin * table[:, 0] + cos * table[:, 1]], axis=-1
            )
        rings.append(ring)
    if not rings and thing.length_m > 0.0 and thing.width_m > 0.0:
        rings.append(_rectangle(_object_pose(road, thing), thing.length_m, thing.width_m))
    return [ring for ring in rings if np.isfinite(ring).all()]


def _rectangle(pose: tuple[float, float, float], length_m: float, width_m: float) -> Float:
    """[4,2]; its first side runs across, for a crosswalk from kerb to kerb."""
    corners = np.array([[1, 1], [1, -1], [-1, -1], [-1, 1]]) * [length_m / 2.0, width_m / 2.0]
    cos, sin = math.cos(pose[2]), math.sin(pose[2])
    return np.array(pose[:2]) + corners @ np.array([[cos, sin], [-sin, cos]])
