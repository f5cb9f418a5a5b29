"""OpenDRIVE maps as `LaneMap`: reads a file, and has its parts made by the modules beside this one.

`opendrive_xml` says what the file says; `opendrive_lanes`, `_links`, `_priority` and `_things` make a `Draft` of it.
Left out of what the format can say: heights (a remark tells how much), parking spaces, virtual junctions, lights for
people.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import shapely

from alpagym_runtime.errors import SceneError
from alpagym_runtime.simulators.embedded import opendrive_notes as notes
from alpagym_runtime.simulators.embedded.lane_map import LaneMap, Signals
from alpagym_runtime.simulators.embedded.opendrive_draft import Draft
from alpagym_runtime.simulators.embedded.opendrive_lanes import add_road, fill_junctions
from alpagym_runtime.simulators.embedded.opendrive_links import find_neighbours, link, meet
from alpagym_runtime.simulators.embedded.opendrive_priority import decide_yields, plan_signals
from alpagym_runtime.simulators.embedded.opendrive_things import dress
from alpagym_runtime.simulators.embedded.opendrive_xml import OpenDrive, Placement, parse

EXTENT_MAX_M = 100_000.0
FLAT_SLOPE = 1e-3


@dataclass(frozen=True)
class OpenDriveMap:
    """A map with what its file says about the Earth.

    Attributes:
        lane_map: in the file's inertial frame, moved by the placement that was asked for.
        name: from the header.
        geo_reference: PROJ string of that frame, or None.
        offset: x, y, z m and hdg rad that the writer took off the projected coordinates; not applied.
        remarks: links that were dropped with reasons, heights that are left out.

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
            return _build(parse(data, placement))
    except SceneError as err:
        raise SceneError(f"{name}: {err}") from None
    except shapely.errors.GEOSException as err:
        raise SceneError(f"{name}: the roads' shapes cannot be used: {err}") from err


def _build(contents: OpenDrive) -> OpenDriveMap:
    draft = Draft(contents, notes.SIGNALS in contents.notes)
    for road in contents.roads.values():
        try:
            add_road(draft, road)
        except SceneError as err:
            raise SceneError(f"road {road.road_id}: {err}") from None
    if not any(lane.kind in ("driving", "turn") for lane in draft.lanes):
        raise SceneError("no lane that a car may drive on")
    ends = np.concatenate([lane.centre[[0, -1]] for lane in draft.lanes])
    if (ends.max(axis=0) - ends.min(axis=0) > EXTENT_MAX_M).any():
        raise SceneError(f"the roads spread over more than {EXTENT_MAX_M / 1000.0:g} km")
    link(draft)
    if not draft.own:
        meet(draft)
    find_neighbours(draft)
    signals = Signals()
    if not draft.own:
        signals = plan_signals(draft)
        decide_yields(draft)
        fill_junctions(draft)
    lane_map = notes.apply(dress(draft, signals), contents, [draft.road_lane(key).notes for key in draft.keys])
    _remark_on_heights(draft)
    return OpenDriveMap(lane_map, contents.name, contents.geo_reference, contents.offset, tuple(draft.remarks))


def _remark_on_heights(draft: Draft) -> None:
    """Say how much of the ground is lost: this world is flat, and distances are those of the plan."""
    low, high, slope = np.inf, -np.inf, 0.0
    for road in draft.file.roads.values():
        rows = road.elevation
        for k, (start, a, b, c, d) in enumerate(rows):
            u = np.linspace(0.0, max((rows[k + 1][0] if k + 1 < len(rows) else road.length) - start, 0.0), 9)
            z = a + u * (b + u * (c + u * d))
            low, high = min(low, float(z.min())), max(high, float(z.max()))
            slope = max(slope, float(np.abs(b + u * (2.0 * c + u * 3.0 * d)).max()))
    if slope > FLAT_SLOPE:
        draft.remark(f"heights from {low:.1f} to {high:.1f} m and slopes up to {100.0 * slope:.1f} % are left out")
