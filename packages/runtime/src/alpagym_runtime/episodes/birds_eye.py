"""A bird's-eye picture of one tick, drawn from what the policy saw: no simulator and no map are needed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIZE_PX = 480
SPAN_M = 80.0
EGO_AT = (0.5, 0.72)
EGO_BOX_M = (5.393, 2.109, 1.397)
"""Length, width and the centre's distance ahead of the rear axle of the default vehicle."""

BACKGROUND, ROUTE, TRAIL, PLAN, TARGET = (38, 42, 48), (86, 156, 214), (250, 210, 90), (120, 230, 140), (200, 140, 230)
EGO, ACTOR, STATIC, SIGNAL = (64, 200, 120), (226, 92, 76), (150, 150, 155), (240, 220, 60)
STATIC_KIND = 6


def draw(
    observation: Mapping[str, NDArray[Any]],
    plan_rig: NDArray[Any] | None = None,
    target_rig: NDArray[Any] | None = None,
) -> NDArray[np.uint8]:
    """[480,480,3] uint8 RGB, 80 m square in the rig frame, driving direction up.

    Args:
        observation: one row of each field; what is missing is not drawn.
        plan_rig: [T,3], the decision of this tick; None at the last one.
        target_rig: [T,3], the expert's answer where the episode holds it.

    """
    import cv2

    picture = np.full((SIZE_PX, SIZE_PX, 3), BACKGROUND, np.uint8)
    shift = 4  # sub-pixel bits

    def pixels(points_rig: NDArray[Any]) -> NDArray[np.int32]:
        points = np.asarray(points_rig, np.float64)
        place = np.stack([EGO_AT[0] - points[..., 1] / SPAN_M, EGO_AT[1] - points[..., 0] / SPAN_M], axis=-1)
        return np.round(np.clip(np.nan_to_num(place), -20, 20) * SIZE_PX * (1 << shift)).astype(np.int32)

    def line(points_rig: NDArray[Any], colour: tuple[int, int, int], width: int) -> None:
        if len(points_rig) > 1:
            cv2.polylines(picture, [pixels(points_rig)], False, colour, width, cv2.LINE_AA, shift)

    def box(x: float, y: float, yaw: float, length: float, width: float, colour: tuple[int, int, int]) -> None:
        corners = np.array([[1, 1], [1, -1], [-1, -1], [-1, 1]]) * [length / 2, width / 2]
        turn = np.array([[math.cos(yaw), math.sin(yaw)], [-math.sin(yaw), math.cos(yaw)]])
        cv2.fillPoly(picture, [pixels(corners @ turn + [x, y])], colour, cv2.LINE_AA, shift)

    for ring_m in (20.0, 40.0):
        centre = pixels(np.zeros(2))
        radius = round(ring_m / SPAN_M * SIZE_PX * (1 << shift))
        cv2.circle(picture, (int(centre[0]), int(centre[1])), radius, (58, 62, 70), 1, cv2.LINE_AA, shift)
    if "route_rig" in observation:
        line(observation["route_rig"][observation["route_mask"]], ROUTE, 2)
    if "ego_history_rig" in observation:
        line(observation["ego_history_rig"][observation["ego_history_mask"]][:, :2], TRAIL, 2)
    if "actors_rig" in observation:
        for actor in observation["actors_rig"][observation["actors_mask"]]:
            colour = SIGNAL if actor[8] else STATIC if actor[7] == STATIC_KIND else ACTOR
            x, y, yaw, long, wide = actor[[0, 1, 2, 5, 6]].tolist()
            box(x, y, yaw, long, wide, colour)
    length, width, ahead = EGO_BOX_M
    box(ahead, 0.0, 0.0, length, width, EGO)
    for points, colour in ((target_rig, TARGET), (plan_rig, PLAN)):
        if points is not None:
            line(np.concatenate([np.zeros((1, 2)), points[:, :2]]), colour, 2)
    return picture
