"""A map seen from above, with the paths of a scene's road users; for people."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded.lane_map import GREEN, YELLOW, Agent, LaneMap
from alpagym_runtime.simulators.embedded.maps.lines import arc_lengths, at_arc
from alpagym_runtime.simulators.embedded.maps.paths import start_box
from alpagym_runtime.simulators.embedded.scene import KINDS

Float = NDArray[np.float64]
Colour = tuple[int, int, int]

GRASS, SIDEWALK, ROAD, WHITE, GOLD = (118, 140, 96), (176, 174, 166), (84, 86, 92), (236, 236, 236), (238, 190, 58)
BUILDING, CROWN, LANE, ROUTE = (150, 120, 104), (70, 112, 62), (120, 160, 190), (86, 170, 240)
EGO, CAR, PARKED, PERSON, BICYCLE = (64, 210, 120), (226, 92, 76), (150, 150, 160), (250, 210, 90), (230, 130, 230)
LAMPS = {GREEN: (60, 220, 90), YELLOW: (250, 210, 60)}
RED_LAMP = (240, 50, 50)

SHIFT = 4
"""Sub-pixel bits."""


def draw_map(
    lane_map: LaneMap,
    agents: Sequence[Agent] = (),
    route: Float | None = None,
    ego: Sequence[float] | None = None,
    *,
    centre: tuple[float, float] = (0.0, 0.0),
    span_m: float = 140.0,
    size_px: int = 800,
    lanes: bool = True,
    time_us: int = 0,
) -> NDArray[np.uint8]:
    """[size,size,3] uint8 RGB of a square of `span_m` around `centre`, x to the right and y up.

    Args:
        lane_map: the map.
        agents: drawn at their starts, with their paths.
        route: [P,2] m, the ego's.
        ego: x, y, yaw, length, width of the ego's box.
        centre: x, y m of the picture's middle.
        span_m: its side.
        size_px: its side.
        lanes: whether lane centres are drawn.
        time_us: for the signals.

    """
    picture = np.full((size_px, size_px, 3), GRASS, np.uint8)
    scale = size_px / span_m

    def pixels(points: Float) -> NDArray[np.int32]:
        place = (points[..., :2] - np.asarray(centre)) * [scale, -scale] + size_px / 2.0
        return np.round(np.clip(place, -30000, 30000) * (1 << SHIFT)).astype(np.int32)

    def fill(points: Float, colour: Colour) -> None:
        cv2.fillPoly(picture, [pixels(points)], colour, cv2.LINE_AA, SHIFT)

    def stroke(points: Float, colour: Colour, width_m: float) -> None:
        thickness = max(round(width_m * scale), 1)
        cv2.polylines(picture, [pixels(points)], False, colour, thickness, cv2.LINE_AA, SHIFT)

    def disc(x: float, y: float, radius_m: float, colour: Colour) -> None:
        middle = pixels(np.array([x, y]))
        radius = round(radius_m * scale * (1 << SHIFT))
        cv2.circle(picture, (int(middle[0]), int(middle[1])), radius, colour, -1, cv2.LINE_AA, SHIFT)

    for polygon in lane_map.sidewalks:
        fill(polygon, SIDEWALK)
    for polygon in lane_map.surface:
        fill(polygon, ROAD)
    for polygon in lane_map.crosswalks:
        for bar in zebra_bars(polygon):
            fill(bar, WHITE)
    for marking in lane_map.markings:
        if marking.kind == "dashed":
            for dash in dashes(marking.points):
                stroke(dash, WHITE, 0.15)
        else:
            width = {"stop": 0.4, "yellow": 0.3}.get(marking.kind, 0.15)
            stroke(marking.points, GOLD if marking.kind == "yellow" else WHITE, width)
    for building in lane_map.buildings:
        fill(building.footprint, BUILDING)
    for x, y, radius in lane_map.trees:
        disc(x, y, radius, CROWN)
    if lanes:
        for lane in lane_map.lanes:
            stroke(lane.centre, PERSON if lane.kind == "walkway" else LANE, 0.0)
    if route is not None:
        stroke(route, ROUTE, 0.5)
    for agent in agents:
        colour = {"pedestrian": PERSON, "bicycle": BICYCLE}.get(KINDS[agent.kind], CAR)
        if agent.desired_speed_mps == 0.0:
            colour = PARKED
        else:
            ahead = agent.start_arc_m + np.arange(0.0, 8.0 * agent.desired_speed_mps, 1.0)
            stroke(at_arc(agent.path, ahead), colour, 0.0)
        fill(box_corners(start_box(agent)), colour)
    if ego is not None:
        fill(box_corners(np.asarray(ego, np.float64)), EGO)
    for x, y, yaw, group in lane_map.signals.heads:
        colour = LAMPS.get(lane_map.signals.state(int(group), time_us), RED_LAMP)
        disc(x, y, 0.7, colour)
        stroke(np.array([[x, y], [x - 1.6 * np.cos(yaw), y - 1.6 * np.sin(yaw)]]), colour, 0.3)
    return picture


def box_corners(box: Float) -> Float:
    """[4,2] corners of a box [5]."""
    x, y, yaw, length, width = box
    corners = np.array([[1, 1], [1, -1], [-1, -1], [-1, 1]]) * [length / 2.0, width / 2.0]
    cos, sin = np.cos(yaw), np.sin(yaw)
    return np.stack(
        [x + cos * corners[:, 0] - sin * corners[:, 1], y + sin * corners[:, 0] + cos * corners[:, 1]], axis=1
    )


def dashes(points: Float, length_m: float = 3.0, every_m: float = 9.0) -> list[Float]:
    """Dashes [3,2] of a broken line."""
    arcs = arc_lengths(points)
    starts = np.arange(0.0, max(arcs[-1] - length_m, 0.0) + 1e-9, every_m)
    return [at_arc(points, np.array([start, start + length_m / 2.0, start + length_m])) for start in starts]


def zebra_bars(polygon: Float, bar_m: float = 0.5, every_m: float = 1.1) -> list[Float]:
    """Bars of a crosswalk whose first side leads from kerb to kerb."""
    near, far = polygon[0], polygon[3]
    along = polygon[1] - polygon[0]
    length = float(np.hypot(*along))
    unit = along / length
    starts = np.arange(0.4, length - bar_m, every_m)[:, None] * unit
    return [np.stack([near + s, near + s + unit * bar_m, far + s + unit * bar_m, far + s]) for s in starts]
