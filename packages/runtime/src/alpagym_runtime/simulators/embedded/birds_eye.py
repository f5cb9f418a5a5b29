"""A bird's-eye picture of a slot, for people."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.geometry import local_to_rig, rig_to_local

SIZE_PX = 400
SPAN_M = 80.0
EGO_AT = np.array([0.5, 0.72])

BACKGROUND, ROAD, KERB, ROUTE, TRAIL = (112, 128, 96), (84, 86, 92), (214, 214, 208), (86, 156, 214), (250, 210, 90)
PLAN = (86, 224, 132)
EGO, ACTOR = (64, 200, 120), (226, 92, 76)


def draw(simulator: Any, slot: int, plan_rig: NDArray[np.float32] | None = None) -> NDArray[np.uint8]:
    """[400,400,3] uint8 RGB: 80 m square, the ego's driving direction up.

    Args:
        simulator: the embedded one.
        slot: which of its slots.
        plan_rig: [T,3], the plan of this tick; None draws the one that is being driven.

    """
    request = simulator.request(slot)
    scene = simulator.scene(request.scene_id)
    trail = simulator.trail(slot)
    ego = trail[-1]
    picture = np.full((SIZE_PX, SIZE_PX, 3), BACKGROUND, np.uint8)
    shift = 4  # sub-pixel bits

    def pixels(points_local: NDArray[np.float64]) -> NDArray[np.int32]:
        rig = local_to_rig(points_local, ego)
        place = np.stack([EGO_AT[0] - rig[..., 1] / SPAN_M, EGO_AT[1] - rig[..., 0] / SPAN_M], axis=-1)
        return np.round(np.clip(place, -20, 20) * SIZE_PX * (1 << shift)).astype(np.int32)

    def box(pose: NDArray[np.float64], length: float, width: float, colour: tuple[int, int, int]) -> None:
        corners = np.array([[1, 1], [1, -1], [-1, -1], [-1, 1]]) * [length / 2, width / 2]
        cv2.fillPoly(picture, [pixels(rig_to_local(corners, pose))], colour, cv2.LINE_AA, shift)
        nose = np.array([[length / 2, 0.0], [length / 6, width / 3], [length / 6, -width / 3]])
        dark = tuple(int(c * 0.55) for c in colour)
        cv2.fillPoly(picture, [pixels(rig_to_local(nose, pose))], dark, cv2.LINE_AA, shift)

    rings = [pixels(ring) for ring in scene.area.rings()]
    cv2.fillPoly(picture, rings, ROAD, cv2.LINE_AA, shift)
    cv2.polylines(picture, rings, True, KERB, 1, cv2.LINE_AA, shift)
    cv2.polylines(picture, [pixels(scene.route)], False, ROUTE, 1, cv2.LINE_AA, shift)
    cv2.polylines(picture, [pixels(trail[:, :2])], False, TRAIL, 2, cv2.LINE_AA, shift)
    if plan_rig is not None:
        plan = rig_to_local(np.concatenate([np.zeros((1, 2)), plan_rig[:, :2].astype(np.float64)]), ego)
    else:
        plan = simulator.plan(slot)
    if plan is not None:
        cv2.polylines(picture, [pixels(plan[:, :2])], False, PLAN, 2, cv2.LINE_AA, shift)
    for actor in simulator.actor_boxes(slot):
        box(actor[:3], actor[3], actor[4], ACTOR)
    vehicle = scene.vehicle
    centre = rig_to_local(np.array([vehicle.centre_offset_m, 0.0]), ego)
    box(np.array([*centre, ego[2]]), vehicle.length_m, vehicle.width_m, EGO)
    return picture
