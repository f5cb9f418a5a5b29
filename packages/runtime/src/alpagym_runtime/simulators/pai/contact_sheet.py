"""A picture of one sample: every camera's frames, and the driven path projected into each of them.

A path is drawn in a frame from where the car was when that frame was taken, by the frame's own time stamp.
"""

from __future__ import annotations

import itertools

import cv2
import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.cameras import MountedCamera
from alpagym_runtime.geometry import Pose
from alpagym_runtime.simulators.pai.calibration import read_cameras
from alpagym_runtime.simulators.pai.clips import Sample
from alpagym_runtime.simulators.pai.egomotion import EgoLog
from alpagym_runtime.simulators.pai.samples import Layout, read_pictures
from alpagym_runtime.simulators.pai.tree import Tree

U8 = NDArray[np.uint8]

DRIVEN, OWN, TEXT = (70, 230, 90), (255, 120, 40), (255, 255, 255)
CAPTION_PX = 22


def contact_sheet(
    tree: Tree, sample: Sample, layout: Layout, width: int = 480, plan_rig: NDArray[np.float64] | None = None
) -> U8:
    """Rows of cameras, columns of frames, oldest first: [h,w,3] u8 RGB.

    Args:
        tree: where the files are.
        sample: which.
        layout: its cameras and frames; sizes are ignored.
        width: of one picture, px; its height keeps the video's shape.
        plan_rig: [T,3] another path, in the rig frame of the key frame, drawn in a second colour.

    """
    native = Layout(dict.fromkeys(layout.cameras, (0, 0)), layout.frames, layout.frame_step_us)
    table = tree.table("egomotion", sample.chunk, sample.clip_id, "egomotion")
    log = EgoLog.from_table(table, f"egomotion of clip {sample.clip_id}")
    cameras = read_cameras(tree, sample.chunk, sample.clip_id)
    times = sample.t0_us + np.arange(1, layout.plan_steps + 1, dtype=np.int64) * layout.plan_step_us
    driven = log.poses(np.concatenate([[sample.t0_us], times])).position  # anchor frame
    start = log.poses(sample.t0_us)
    own = None if plan_rig is None else start.transform(np.pad(plan_rig[:, :2], ((0, 0), (0, 1))))
    rows = []
    for name in native.cameras:
        pictures = read_pictures(tree, sample, name, native)
        tiles = []
        for image, time_us in zip(pictures.images, pictures.time_us.tolist(), strict=True):
            rig = log.poses(time_us)
            tile = draw_path(image.copy(), cameras[name], rig, driven, DRIVEN)
            if own is not None:
                tile = draw_path(tile, cameras[name], rig, own, OWN)
            height = round(tile.shape[0] * width / tile.shape[1])
            tile = np.asarray(cv2.resize(tile, (width, height), interpolation=cv2.INTER_AREA), np.uint8)
            label = f"{name.removeprefix('camera_')} {(time_us - sample.t0_us) * 1e-6:+.3f} s"
            tiles.append(np.concatenate([_caption(label, width), tile]))
        rows.append(np.concatenate(tiles, axis=1))
    sheet = np.concatenate(rows)
    head = f"{sample.clip_id} at {sample.t0_us * 1e-6:.1f} s"
    words = [head] if not sample.cot else [head, sample.cot.replace("\n", " ")]
    return np.concatenate([*(_caption(line, sheet.shape[1]) for line in words), sheet]).astype(np.uint8)


def draw_path(image: U8, camera: MountedCamera, rig: Pose, points: NDArray[np.float64], colour: tuple[int, ...]) -> U8:
    """Points [P,3] of the anchor frame as a line in a picture taken from a rig pose; parts behind are left out."""
    dense = np.concatenate([np.linspace(a, b, 8, endpoint=False) for a, b in itertools.pairwise(points)])
    pixels, valid = camera.project_rig(rig.inverse().transform(dense))
    near = np.abs(pixels).max(axis=-1) < 1e5
    thickness = max(image.shape[1] // 240, 1)
    for i in np.flatnonzero(valid[:-1] & valid[1:] & near[:-1] & near[1:]).tolist():
        a, b = (tuple(np.rint(pixels[k]).astype(int).tolist()) for k in (i, i + 1))
        cv2.line(image, a, b, colour, thickness, cv2.LINE_AA)
    return image


def _caption(text: str, width: int) -> U8:
    strip = np.full((CAPTION_PX, width, 3), 24, np.uint8)
    plain = text.encode("ascii", "replace").decode()
    cv2.putText(strip, plain, (6, CAPTION_PX - 7), cv2.FONT_HERSHEY_SIMPLEX, 0.45, TEXT, 1, cv2.LINE_AA)
    return strip
