"""Lanes, surface and paint of an OpenDRIVE map, road by road.

Each lane of each lane section becomes one lane, reversed where traffic runs against the road (left lanes of roads with
right-hand traffic, right lanes of others [ASAM OpenDRIVE 1.7, 11.1]).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import shapely

from alpagym_runtime.errors import SceneError
from alpagym_runtime.geometry import wrap_angle
from alpagym_runtime.simulators.embedded.lane_map import Lane, Marking
from alpagym_runtime.simulators.embedded.opendrive_draft import Draft
from alpagym_runtime.simulators.embedded.opendrive_sheet import Sheet, check_turn, sheet_of, simple, thinned
from alpagym_runtime.simulators.embedded.opendrive_xml import Road, RoadLane, Section

Kind = Literal["driving", "turn", "walkway", "bicycle"]

WIDTH_MIN_M = 0.5
ISLAND_MAX_M2 = 60.0
"""Gaps between the turning lanes of a junction up to this size are asphalt; larger ones are islands."""

CAR_LANES = frozenset(
    (
        *("driving", "entry", "exit", "onRamp", "offRamp", "connectingRamp", "slipLane", "bidirectional"),
        *("mwyEntry", "mwyExit", "bus", "taxi", "HOV", "special1", "special2", "special3"),
    )
)
SURFACE_LANES = CAR_LANES | {"stop", "parking"}


def add_road(draft: Draft, road: Road) -> None:
    """Add what each of a road's sections has."""
    for index, section in enumerate(road.sections):
        sheet = sheet_of(road, section)
        for number, lane in sorted(section.lanes.items(), reverse=True):
            if number != 0:
                _add_lane(draft, road, index, number, lane, sheet)
        _add_surface(draft, road, section, sheet)
        _add_marks(draft, road, index, section, sheet)


def _add_lane(draft: Draft, road: Road, index: int, number: int, lane: RoadLane, sheet: Sheet) -> None:
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
    if kind == "walkway" and not draft.own:
        draft.sidewalks.append(np.concatenate([simple(left), simple(right)[::-1]]))
    key = (road.road_id, index, number)
    centre = thinned((left + right) / 2.0)
    ends = (float(width[0]), float(width[-1]))
    if not draft.forward(key):
        centre, ends = centre[::-1].copy(), ends[::-1]
    if not (np.hypot(*np.diff(centre, axis=0).T) > 1e-6).all():
        raise SceneError(f"lane {number} has a length of zero or turns back on itself")
    draft.ids[key] = len(draft.lanes)
    draft.keys.append(key)
    draft.end_widths.append(ends)
    draft.junction_of.append(road.junction if in_junction else "")
    limit = lane.limit_mps if lane.limit_mps is not None else road.limit_mps
    draft.lanes.append(Lane(len(draft.lanes), centre, max(float(np.median(width)), WIDTH_MIN_M), limit, kind=kind))


def _add_surface(draft: Draft, road: Road, section: Section, sheet: Sheet) -> None:
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
                check_turn(wrap_angle(np.diff(np.arctan2(step[:, 1], step[:, 0]))), section)
            ring = np.concatenate([simple(left), simple(right)[::-1]])
            draft.surface.append(ring)
            if road.junction != "-1":
                draft.junction_surface.setdefault(road.junction, []).append(ring)
        run = []


def _add_marks(draft: Draft, road: Road, index: int, section: Section, sheet: Sheet) -> None:
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
                    draft.markings.append(Marking(simple(line, 0.02), kind))


def fill_junctions(draft: Draft) -> None:
    """Add the small gaps between a junction's lanes to the surface."""
    for rings in draft.junction_surface.values():
        shapes = [shapely.make_valid(shapely.Polygon(ring)) for ring in rings if len(ring) > 2]
        union = shapely.union_all([shape.buffer(0.05) for shape in shapes])
        for polygon in shapely.get_parts(union):
            if polygon.geom_type == "Polygon":
                holes = [np.asarray(ring.coords)[:-1] for ring in polygon.interiors]
                # As wide as the buffer took off, and a little more, so that no seam is left.
                draft.surface += [
                    np.asarray(shapely.Polygon(hole).buffer(0.1, join_style="mitre").exterior.coords)[:-1]
                    for hole in holes
                    if shapely.Polygon(hole).area < ISLAND_MAX_M2
                ]


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
