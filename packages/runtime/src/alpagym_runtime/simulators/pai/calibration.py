"""A clip's cameras and vehicle from the chunk's calibration tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from alpagym_runtime.cameras import Ftheta, MountedCamera
from alpagym_runtime.errors import SceneError
from alpagym_runtime.geometry import Pose, quaternion_from_xyzw
from alpagym_runtime.simulators.pai.tree import Tree, column

POLYNOMIAL = range(5)


@dataclass(frozen=True)
class VehicleDimensions:
    """The recording vehicle, m; `rear_axle_to_bbox_center` forward from the rig's origin."""

    length: float
    width: float
    height: float
    rear_axle_to_bbox_center: float
    wheelbase: float
    track_width: float


def read_cameras(tree: Tree, chunk: int, clip_id: str) -> dict[str, MountedCamera]:
    """The clip's f-theta cameras by feature name, native size; poses are optical frame in rig."""
    intrinsics = _rows(tree, "camera_intrinsics", chunk, clip_id, "camera_name")
    extrinsics = _rows(tree, "sensor_extrinsics", chunk, clip_id, "sensor_name")
    cameras = {}
    for name, row in intrinsics.items():
        if name not in extrinsics:
            raise SceneError(f"clip {clip_id}: {name} has intrinsics, but no row in sensor_extrinsics")
        forward = tuple(float(row[f"fw_poly_{i}"]) for i in POLYNOMIAL)
        backward = tuple(float(row[f"bw_poly_{i}"]) for i in POLYNOMIAL)
        width, height = int(row["width"]), int(row["height"])
        centre = float(row["cx"]), float(row["cy"])
        corner = np.hypot(max(centre[0], width - centre[0]), max(centre[1], height - centre[1]))
        reach = float(np.polyval(backward[::-1], corner))
        model = Ftheta(
            width,
            height,
            *centre,
            max_angle_rad=min(max(1.1 * reach, 0.1), np.pi),
            angle_to_radius=forward,
            radius_to_angle=backward,
        )
        mount = extrinsics[name]
        xyzw = np.array([mount[key] for key in ("qx", "qy", "qz", "qw")], np.float64)
        position = np.array([mount[key] for key in ("x", "y", "z")], np.float64)
        cameras[name] = MountedCamera(name, model, Pose(position, quaternion_from_xyzw(xyzw)))
    return cameras


def read_vehicle(tree: Tree, chunk: int, clip_id: str) -> VehicleDimensions:
    """The clip's vehicle."""
    (row,) = _of_clip(tree, "vehicle_dimensions", chunk, clip_id)
    return VehicleDimensions(*(float(row[name]) for name in VehicleDimensions.__dataclass_fields__))


def _rows(tree: Tree, feature: str, chunk: int, clip_id: str, name: str) -> dict[str, dict[str, Any]]:
    return {row[name]: row for row in _of_clip(tree, feature, chunk, clip_id)}


def _of_clip(tree: Tree, feature: str, chunk: int, clip_id: str) -> list[dict[str, Any]]:
    table: pa.Table = tree.chunk_table(feature, chunk)
    what = str(tree.chunk_file(feature, chunk))
    rows = table.filter(pc.equal(column(table, "clip_id", what), clip_id)).to_pylist()
    if not rows:
        raise SceneError(f"{what} has no row of clip {clip_id}")
    return rows
