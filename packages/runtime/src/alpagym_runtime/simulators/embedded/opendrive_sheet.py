"""A lane section of an OpenDRIVE road in the plane: where its lanes' edges are."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import shapely
from numpy.typing import NDArray

from alpagym_runtime.errors import SceneError
from alpagym_runtime.simulators.embedded.opendrive_line import polynomial, poses
from alpagym_runtime.simulators.embedded.opendrive_xml import Road, Section

Float = NDArray[np.float64]

STEP_M = 1.5
"""Largest distance between samples along a road."""
LATERAL_MAX_M = 500.0
TURN_RAD, TURN_RADPM, LOOPS_RAD = 40.0, 0.05, 14.0


@dataclass(frozen=True)
class Sheet:
    """A section's cross sections: stations s [K] m, poses [K,3] and each lane's inner and outer offset t [K] m."""

    s: Float
    poses: Float
    inner: dict[int, Float]
    outer: dict[int, Float]

    def points(self, t: Float) -> Float:
        """[K,2] m, local, at offsets t [K]."""
        return offset_points(self.poses, t)

    def edges(self, number: int) -> tuple[Float, Float]:
        """[K,2] left (larger t) and right edge of a lane, along the road."""
        inner, outer = self.points(self.inner[number]), self.points(self.outer[number])
        return (outer, inner) if number > 0 else (inner, outer)


def offset_points(line: Float, t: Float | float) -> Float:
    """[K,2] points `t` m left of poses [K,3]."""
    return np.stack([line[:, 0] - t * np.sin(line[:, 2]), line[:, 1] + t * np.cos(line[:, 2])], axis=-1)


def sheet_of(road: Road, section: Section) -> Sheet:
    """Evaluate a section at its breaks and every `STEP_M`.

    Raises:
        SceneError: its shape is not finite, too wide or curls.

    """
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
    check_turn(np.diff(line[:, 2]), section)
    return Sheet(s, line, inner, outer)


def check_turn(steps_rad: Float, section: Section) -> None:
    """Refuse curls: a line that winds over itself thousands of times takes the polygon union hours."""
    length = section.end - section.start
    turn, net = float(np.abs(steps_rad).sum()), abs(float(steps_rad.sum()))
    if turn > TURN_RAD + TURN_RADPM * length or net > LOOPS_RAD:
        raise SceneError(f"it turns by {turn:.0f} rad over {length:.0f} m; no road does")


def thinned(points: Float) -> Float:
    """Without points closer than 0.25 m to their neighbour; both ends stay."""
    kept = [0]
    for k in range(1, len(points) - 1):
        if math.hypot(*(points[k] - points[kept[-1]])) >= 0.25:
            kept.append(k)
    if len(kept) > 1 and math.hypot(*(points[-1] - points[kept[-1]])) < 0.25:
        kept.pop()
    return points[[*kept, len(points) - 1]]


def simple(points: Float, tolerance_m: float = 0.01) -> Float:
    """Without the points that it takes to be within the tolerance of the polyline."""
    line = shapely.simplify(shapely.linestrings(points), tolerance_m)
    out = shapely.get_coordinates(line)
    return out if len(out) > 1 else points
