"""Where a recorded drive would have gone on: its route, led along the lanes of a map."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.geometry import angle_difference
from alpagym_runtime.simulators.embedded.commonroad_xml import along_line, thin
from alpagym_runtime.simulators.embedded.lane_map import LaneMap
from alpagym_runtime.simulators.embedded.scene_bank import arc_lengths

Float = NDArray[np.float64]

HEADING_MAX_RAD = 1.0
EASE_M = 20.0
SMOOTHINGS = 6


def lead_on(log: Float, lane_map: LaneMap, behind_m: float, ahead_m: float) -> Float:
    """[P,2] m: the driven path [K,3] (x, y, yaw), begun `behind_m` earlier and led on for `ahead_m`.

    It goes on along the lane that it ends in, easing onto its centre, and along the straightest successors; straight
    on where no lane is. Points are about 1 m apart and smoothed, so that the noise of recordings does not fold it.
    """
    path = thin(log[:, :2], 0.5)
    start, end = ([math.cos(yaw), math.sin(yaw)] for yaw in (log[0, 2], log[-1, 2]))
    ahead = _along_lanes(log[-1], lane_map, ahead_m)
    if ahead is None:
        ahead = path[-1] + np.arange(1.0, ahead_m)[:, None] * np.array(end)
    points = thin(np.concatenate([path[:1] - behind_m * np.array(start), path, ahead]), 0.3)
    points = along_line(points, int(arc_lengths(points)[-1]) + 2)
    for _ in range(SMOOTHINGS):
        points[1:-1] = 0.25 * points[:-2] + 0.5 * points[1:-1] + 0.25 * points[2:]
    return thin(points, 0.3)


def _along_lanes(pose: Float, lane_map: LaneMap, ahead_m: float) -> Float | None:
    """[K,2] every metre from 1 m beyond a pose on; None where it lies in no lane of its direction."""
    best, here, rest = math.inf, -1, np.zeros((0, 2))
    foot = pose[:2]
    for lane in lane_map.lanes:
        if lane.kind not in ("driving", "turn"):
            continue
        start, delta = lane.centre[:-1], np.diff(lane.centre, axis=0)
        t = np.clip(np.sum((pose[:2] - start) * delta, axis=1) / np.sum(delta * delta, axis=1), 0.0, 1.0)
        feet = start + t[:, None] * delta
        away = np.hypot(*(feet - pose[:2]).T)
        k = int(np.argmin(away))
        turn = abs(float(angle_difference(math.atan2(delta[k, 1], delta[k, 0]), pose[2])))
        cost = float(away[k]) / 3.0 + turn
        if away[k] <= lane.width_m / 2.0 + 1.0 and turn < HEADING_MAX_RAD and cost < best:
            best, here, foot, rest = cost, lane.lane_id, feet[k], lane.centre[k + 1 :]
    if here < 0:
        return None
    pieces = [foot[None], rest]
    length = float(arc_lengths(np.concatenate(pieces))[-1])
    for _ in range(200):
        ways = lane_map.lanes[here].successors
        if length > ahead_m or not ways:
            break
        heading = _heading(lane_map.lanes[here].centre[-2:])
        here = min(ways, key=lambda way: abs(float(angle_difference(_entry(lane_map.lanes[way].centre), heading))))
        pieces.append(lane_map.lanes[here].centre)
        length += float(arc_lengths(pieces[-1])[-1])
    line = thin(np.concatenate(pieces), 0.1)
    if len(line) < 2:
        return None
    last = line[-1] - line[-2]
    line = np.concatenate([line, line[-1:] + last / np.hypot(*last) * ahead_m])
    lengths = arc_lengths(line)
    wanted = np.arange(1.0, ahead_m)
    centre = np.column_stack([np.interp(wanted, lengths, line[:, axis]) for axis in range(2)])
    return centre + np.maximum(1.0 - wanted / EASE_M, 0.0)[:, None] * (pose[:2] - foot)


def _heading(points: Float) -> float:
    return math.atan2(*(points[-1] - points[0])[::-1])


def _entry(centre: Float) -> float:
    """Direction from a lane's start to its point 15 m on."""
    return _heading(centre[[0, min(int(np.searchsorted(arc_lengths(centre), 15.0)), len(centre) - 1)]])
