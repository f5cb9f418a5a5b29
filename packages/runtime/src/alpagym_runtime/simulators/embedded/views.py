"""Pictures of a running slot for people and for checks: a camera's colours, depth, instances, classes, the plan.

What a policy sees comes from `camera_stream`; this looks at the present moment whatever the policy asked for.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import cv2
import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.cameras import MountedCamera
from alpagym_runtime.geometry import local_to_rig
from alpagym_runtime.simulators.embedded.camera_config import BRAKES_MPS2, CamerasConfig, MountConfig
from alpagym_runtime.simulators.embedded.rendering.rays import mounted
from alpagym_runtime.simulators.embedded.rendering.renderer import Eye, Jobs, Renderer
from alpagym_runtime.simulators.embedded.rendering.scenery import CLASSES, STORE
from alpagym_runtime.simulators.embedded.scene import STEP_US, Scene

if TYPE_CHECKING:
    from alpagym_runtime.simulators.embedded.simulator import EmbeddedSimulator

Float = NDArray[np.float64]

PLAN, PLAN_EDGE = (86, 224, 132), (24, 150, 74)
PLAN_HALF_WIDTH_M = 0.85
PLAN_FROM_M = 2.5


@dataclass(frozen=True)
class View:
    """What a camera sees.

    Attributes:
        rgb: [h,w,3] uint8.
        depth_m: [h,w] f32, m along each pixel's ray; inf for the sky.
        instance: [h,w] i32: 0 ground and sky, 1 + index for the scene's road users, 1000 and on for what stands.
        semantic: [h,w] u8, index into `CLASSES`.
        camera: its model and pose.

    """

    rgb: NDArray[np.uint8]
    depth_m: NDArray[np.float32]
    instance: NDArray[np.int32]
    semantic: NDArray[np.uint8]
    camera: MountedCamera


@dataclass(frozen=True)
class Moment:
    """Where everybody is: a scene, the rig's pose [3] and time, road users [A,5] and whether they exist [A]; local."""

    scene: Scene
    pose: Float
    time_us: int
    actors: Float
    present: NDArray[np.bool_]


def recorded_moment(scene: Scene, step: int) -> Moment:
    """A grid step of a scene's recording."""
    actors = scene.actors
    last = actors.tracks.shape[1] - 1
    rows = np.zeros((len(actors.first), 5))
    rows[:, :4] = actors.tracks[:, min(step, last)]
    before = actors.tracks[:, max(min(step, last) - 1, 0), 3]
    rows[:, 4] = (before - rows[:, 3]) * (1e6 / STEP_US) > BRAKES_MPS2
    present = (actors.first <= step) & (step <= actors.last)
    return Moment(scene, scene.ego_log[step, :3], step * STEP_US, rows, present)


def look(
    moment: Moment,
    camera: str | MountConfig = "front",
    size: tuple[int, int] = (320, 512),
    cameras: CamerasConfig | None = None,
) -> View:
    """A moment through a camera, by name or mount, as a picture of `size` (height, width)."""
    config = cameras or CamerasConfig()
    mount = config.mount(camera) if isinstance(camera, str) else camera
    fine, plain = _eyes(json.dumps(asdict(mount)), *size, config.antialias)
    scenery = STORE.get(moment.scene, fine.texel_m, config.weather, config.memory_mb << 20)
    jobs = Jobs(
        np.zeros(1, np.int64),
        moment.pose[None].astype(np.float64),
        np.array([moment.time_us * 1e-6]),
        moment.actors[None].astype(np.float64),
        moment.present[None],
    )
    rgb = np.zeros((1, *size, 3), np.uint8)
    renderer = Renderer()
    renderer.draw(fine, [(scenery, jobs)], rgb)
    depth, instance, semantic = renderer.labels(plain, scenery, jobs)
    return View(rgb[0], depth, instance, semantic, plain.camera)


@lru_cache(maxsize=32)
def _eyes(mount: str, height: int, width: int, antialias: int) -> tuple[Eye, Eye]:
    """For colours, and for labels with one sample a pixel. The key is the mount as JSON: config objects can change."""
    camera = mounted("view", MountConfig(**json.loads(mount)), (height, width))
    return Eye(camera, height, width, antialias), Eye(camera, height, width, 1)


def draw_plan(view: View, plan_rig: Float) -> NDArray[np.uint8]:
    """The view's picture with a plan [T,2 or 3] (x, y m in the rig frame) as a band on the ground."""
    line = np.concatenate([np.zeros((1, 2)), np.asarray(plan_rig, np.float64)[:, :2]])
    arcs = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(line, axis=0).T))])
    if arcs[-1] < PLAN_FROM_M + 0.5:
        return view.rgb
    keep = np.concatenate([[True], np.diff(arcs) > 1e-6])
    at = np.arange(PLAN_FROM_M, arcs[-1], 0.25)
    points = np.stack([np.interp(at, arcs[keep], line[keep, k]) for k in range(2)], axis=1)
    ahead = np.gradient(points, axis=0)
    left = np.stack([-ahead[:, 1], ahead[:, 0]], axis=1) / np.maximum(np.hypot(*ahead.T), 1e-9)[:, None]
    edges = [np.column_stack([points + side * PLAN_HALF_WIDTH_M * left, np.zeros(len(at))]) for side in (1.0, -1.0)]
    (left_px, left_ok), (right_px, right_ok) = (view.camera.project_rig(edge) for edge in edges)
    good = left_ok & right_ok
    band = np.zeros(view.rgb.shape[:2], np.uint8)
    for k in np.flatnonzero(good[1:] & good[:-1]):
        corners = np.stack([left_px[k], left_px[k + 1], right_px[k + 1], right_px[k]]) - 0.5
        if (np.abs(corners) < 8000).all():
            cv2.fillConvexPoly(band, np.round(corners * 16).astype(np.int32), 255, cv2.LINE_8, 4)
    band[view.instance > 0] = 0
    inner = cv2.erode(band, np.ones((3, 3), np.uint8))
    out = view.rgb.astype(np.float32)
    for mask, colour, share in ((inner > 0, PLAN, 0.45), ((band > 0) & (inner == 0), PLAN_EDGE, 0.9)):
        out[mask] = out[mask] * (1.0 - share) + np.array(colour) * share
    return out.astype(np.uint8)


def show(simulator: EmbeddedSimulator, slot: int, view: str, height: int = 400) -> NDArray[np.uint8]:
    """A slot as a picture [height,*,3] uint8 RGB: "camera", "birds_eye" or "both" side by side, with its plan."""
    from alpagym_runtime.simulators.embedded.birds_eye import draw

    parts: list[NDArray[np.uint8]] = []
    if view in ("camera", "both"):
        moment = simulator.moment(slot)
        seen = look(moment, "front_wide", (height, height * 8 // 5), simulator.camera_options)
        plan = simulator.plan(slot)
        parts.append(seen.rgb if plan is None else draw_plan(seen, local_to_rig(plan[:, :2], moment.pose)))
    if view in ("birds_eye", "both"):
        parts.append(draw(simulator, slot))
    return np.concatenate(parts, axis=1)


__all__ = ["CLASSES", "Moment", "View", "draw_plan", "look", "recorded_moment", "show"]
