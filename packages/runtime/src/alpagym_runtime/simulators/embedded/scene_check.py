"""What is wrong with a scene before anybody drives it, and a picture of it; for people who make or import scenes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.geometry import boxes_overlap
from alpagym_runtime.simulators.embedded.lane_map import Agent, LaneMap
from alpagym_runtime.simulators.embedded.scene import KINDS, STEP_US, Scene

Float = NDArray[np.float64]

LEAST_DRIVE_M = 5.0
STANDING_MPS = 0.3


def problems(scene: Scene) -> list[str]:
    """Faults of a scene in plain words: the recorded drive against the recorded traffic and the area.

    A fault at the handover makes every episode start with it (an initial fault), one after it means that the recording
    itself would be scored as one.
    """
    found = []
    boxes = ego_boxes(scene)
    outside = np.flatnonzero(~scene.area.contains(boxes))
    found += _first("leaves the drivable area", outside, scene.handover)
    for a in range(len(scene.actors.first)):
        first, last = int(scene.actors.first[a]), min(int(scene.actors.last[a]), len(boxes) - 1)
        if last < first:
            continue
        track = scene.actors.tracks[a, first : last + 1, :3]
        size = np.broadcast_to(scene.actors.size[a], (len(track), 2))
        hit = np.flatnonzero(boxes_overlap(boxes[first : last + 1], np.column_stack([track, size]))) + first
        found += _first(f"overlaps actor {a} ({KINDS[scene.actors.kind[a]]})", hit, scene.handover)
    steps = np.hypot(*np.diff(scene.ego_log[scene.handover :, :2], axis=0).T)
    if steps.sum() < LEAST_DRIVE_M:
        found.append(f"the recorded drive has {steps.sum():.1f} m after the handover: a standing reference")
    return found


def _first(what: str, steps: NDArray[np.int64], handover: int) -> list[str]:
    """The fault at the handover and the first one after it; before the handover nothing is scored."""
    found = []
    if (steps == handover).any():
        found.append(f"initial fault: the ego {what} at the handover")
    later = steps[steps > handover]
    if len(later) and later[0] > handover + 1:
        found.append(f"the recorded drive {what} at {later[0] * STEP_US * 1e-6:.1f} s")
    return found


def ego_boxes(scene: Scene) -> Float:
    """[K,5] centre x, y, yaw, length, width of the recorded ego."""
    log, vehicle = scene.ego_log, scene.vehicle
    forward = vehicle.centre_offset_m * np.stack([np.cos(log[:, 2]), np.sin(log[:, 2])], axis=-1)
    size = np.broadcast_to([vehicle.length_m, vehicle.width_m], (len(log), 2))
    return np.column_stack([log[:, :2] + forward, log[:, 2], size])


def draw_scene(scene: Scene, size_px: int = 800, span_m: float = 0.0) -> NDArray[np.uint8]:
    """[size,size,3] uint8 RGB, x to the right and y up: map, route, traffic and the ego's box at the handover.

    `span_m` is the picture's side; 0 takes what shows the whole drive.
    """
    from alpagym_runtime.simulators.embedded.map_picture import draw_map

    lane_map = scene.lane_map
    if lane_map is None:
        lane_map = LaneMap((), tuple(scene.area.rings()), scene.signals)
    drive = scene.ego_log[:, :2]
    low, high = drive.min(axis=0), drive.max(axis=0)
    middle = (low + high) / 2.0
    return draw_map(
        lane_map,
        _as_agents(scene),
        scene.route,
        ego_boxes(scene)[scene.handover].tolist(),
        centre=(float(middle[0]), float(middle[1])),
        span_m=span_m or max(float((high - low).max()) + 50.0, 80.0),
        size_px=size_px,
        time_us=scene.handover * STEP_US,
    )


def _as_agents(scene: Scene) -> list[Agent]:
    """The recorded road users at the handover, as the picture takes them."""
    agents = []
    for a in range(len(scene.actors.first)):
        first, last = int(scene.actors.first[a]), int(scene.actors.last[a])
        if not first <= scene.handover <= last:
            continue
        x, y, yaw, speed = scene.actors.tracks[a, scene.handover]
        path = np.array([x, y]) + np.arange(2)[:, None] * np.array([np.cos(yaw), np.sin(yaw)])
        length, width = scene.actors.size[a].tolist()
        pace = float(speed) if abs(speed) > STANDING_MPS else 0.0
        agents.append(Agent(path, 0.0, max(pace, 0.0), max(pace, 0.0), int(scene.actors.kind[a]), length, width))
    return agents
