"""What stands and lies beside the lanes of an OpenDRIVE map: crosswalks, buildings, trees, stop lines."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded import opendrive_notes as notes
from alpagym_runtime.simulators.embedded.lane_map import Building, LaneMap, Marking, Signals
from alpagym_runtime.simulators.embedded.opendrive_draft import Draft, end_yaw
from alpagym_runtime.simulators.embedded.opendrive_line import poses
from alpagym_runtime.simulators.embedded.opendrive_sheet import offset_points
from alpagym_runtime.simulators.embedded.opendrive_xml import Road, RoadObject

Float = NDArray[np.float64]

CROSSWALK_SIGN = "1000003"


def dress(draft: Draft, signals: Signals) -> LaneMap:
    """The map with what the file's objects and signals add to its lanes."""
    crosswalks: list[Float] = []
    buildings: list[Building] = []
    trees: list[tuple[float, float, float]] = []
    own_surface: list[Float] = []
    for road in draft.file.roads.values():
        for thing in road.objects:
            rings = _outlines(road, thing)
            if thing.kind == "tree" or (thing.kind == "vegetation" and thing.radius_m > 0.0):
                x, y, _ = _object_pose(road, thing)
                trees.append((x, y, thing.radius_m or 1.5))
            elif thing.name == notes.SURFACE:
                own_surface += rings
            elif thing.name == notes.SIDEWALK:
                draft.sidewalks += rings
            elif thing.name.startswith(notes.MARKING):
                draft.markings += [Marking(ring, notes.marking_kind(thing.name)) for ring in rings]
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
        tuple(draft.lanes),
        tuple(own_surface or draft.surface),
        signals,
        tuple(draft.markings) + _stop_lines(draft),
        tuple(crosswalks),
        tuple(draft.sidewalks),
        tuple(buildings),
        np.array(trees, np.float64).reshape(-1, 3),
    )


def _stop_lines(draft: Draft) -> tuple[Marking, ...]:
    lines: list[Marking] = []
    for lane in draft.lanes:
        if lane.signal_group >= 0:
            pose = np.array([[*lane.centre[-1], end_yaw(lane)]])
            half = lane.width_m / 2.0
            lines.append(Marking(np.concatenate([offset_points(pose, half), offset_points(pose, -half)]), "stop"))
    return tuple(lines)


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
