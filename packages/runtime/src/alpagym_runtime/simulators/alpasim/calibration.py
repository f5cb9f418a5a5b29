"""Camera models from AlpaSim's calibration messages, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.cameras import (
    RAYS,
    CameraModel,
    Ftheta,
    MountedCamera,
    OpenCVFisheye,
    OpenCVPinhole,
    Pinhole,
    ray_grid,
    resized,
)
from alpagym_runtime.geometry import Pose, unit_quaternion
from alpagym_runtime.simulators.alpasim.wire import sensorsim_pb2

Calibration = tuple[NDArray[np.float32], NDArray[np.bool_], NDArray[np.float32]]
"""Rays [9,16,3] in the rig frame, their mask [9,16], and the camera's position [3] m."""

RAY_SHAPES: list[tuple[tuple[int, ...], Any]] = [((*RAYS, 3), np.float32), (RAYS, np.bool_), ((3,), np.float32)]


def read_calibration(
    message: sensorsim_pb2.AvailableCamerasReturn.AvailableCamera, size: tuple[int, int]
) -> Calibration:
    """What an observation holds of a declared camera, for pictures of `size`; ValueError as `read_camera`."""
    camera = read_camera(message, size)
    position = camera.pose_rig_to_optical.position.astype(np.float32)
    if not np.isfinite(position).all():
        raise ValueError(f"camera {message.logical_id!r} stands at {position.tolist()}")
    return *ray_grid(camera), position


def read_camera(
    message: sensorsim_pb2.AvailableCamerasReturn.AvailableCamera, size: tuple[int, int] | None = None
) -> MountedCamera:
    """The camera that a session declares, for pictures of `size` (height, width); None: as large as the sensor.

    Raises:
        ValueError: no model is set, it lacks its exact polynomial, the pose is no rotation, or a windshield bends the
            rays (which no model here describes).

    """
    name, spec = message.logical_id, message.intrinsics
    if spec.WhichOneof("external_distortion") is not None:
        raise ValueError(f"camera {name!r} looks through a windshield model, which is not supported")
    kind = spec.WhichOneof("camera_param")
    if kind is None:
        raise ValueError(f"camera {name!r} has no intrinsics")
    height, width = int(spec.resolution_h), int(spec.resolution_w)
    if not height or not width:
        if size is None:
            raise ValueError(f"camera {name!r} says no resolution")
        height, width = size
    model: Ftheta | OpenCVFisheye | Pinhole
    if kind == "ftheta_param":
        p = spec.ftheta_param
        backward = p.reference_poly == sensorsim_pb2.FthetaCameraParam.PIXELDIST_TO_ANGLE
        cde = (p.linear_cde.linear_c, p.linear_cde.linear_d, p.linear_cde.linear_e)
        model = Ftheta(
            width,
            height,
            p.principal_point_x,
            p.principal_point_y,
            max_angle_rad=p.max_angle or np.pi,
            angle_to_radius=tuple(p.angle_to_pixeldist_poly),
            radius_to_angle=tuple(p.pixeldist_to_angle_poly),
            exact="radius_to_angle" if backward or not p.angle_to_pixeldist_poly else "angle_to_radius",
            affine=cde if p.HasField("linear_cde") else (1.0, 0.0, 0.0),
        )
    elif kind == "opencv_fisheye_param":
        f = spec.opencv_fisheye_param
        model = OpenCVFisheye(
            width,
            height,
            f.principal_point_x,
            f.principal_point_y,
            max_angle_rad=f.max_angle or np.pi,
            focal_x=f.focal_length_x,
            focal_y=f.focal_length_y,
            radial=tuple(f.radial_coeffs),
        )
    else:
        o = spec.opencv_pinhole_param
        plain = {"focal_x": o.focal_length_x, "focal_y": o.focal_length_y}
        centre = (o.principal_point_x, o.principal_point_y)
        bent = (tuple(o.radial_coeffs), tuple(o.tangential_coeffs), tuple(o.thin_prism_coeffs))
        if any(value for part in bent for value in part):
            model = OpenCVPinhole(
                width, height, *centre, **plain, radial=bent[0], tangential=bent[1], thin_prism=bent[2]
            )
        else:
            model = Pinhole(width, height, *centre, **plain)
    if size is not None:
        model = resized(model, *size)
    checked: CameraModel = model
    pose = message.rig_to_camera
    rotation = unit_quaternion([pose.quat.w, pose.quat.x, pose.quat.y, pose.quat.z], f"the pose of camera {name!r}")
    return MountedCamera(name, checked, Pose(np.array([pose.vec.x, pose.vec.y, pose.vec.z]), rotation))


def write_camera(camera: MountedCamera) -> sensorsim_pb2.AvailableCamerasReturn.AvailableCamera:
    """The inverse of `read_camera`: what a session declares of a camera; the numbers are those of its sensor."""
    model = camera.model
    assert isinstance(model, (Ftheta, OpenCVFisheye, Pinhole)), f"no message for a {type(model).__name__}"
    out = sensorsim_pb2.AvailableCamerasReturn.AvailableCamera(logical_id=camera.name)
    spec = out.intrinsics
    spec.logical_id, spec.shutter_type = camera.name, sensorsim_pb2.SHUTTER_TYPE_GLOBAL
    spec.resolution_w, spec.resolution_h = round(model.width / model.scale_x), round(model.height / model.scale_y)
    if isinstance(model, Ftheta):
        ftheta = spec.ftheta_param
        kinds = sensorsim_pb2.FthetaCameraParam
        backward = model.exact == "radius_to_angle"
        ftheta.reference_poly = kinds.PIXELDIST_TO_ANGLE if backward else kinds.ANGLE_TO_PIXELDIST
        ftheta.pixeldist_to_angle_poly.extend(model.radius_to_angle)
        ftheta.angle_to_pixeldist_poly.extend(model.angle_to_radius)
        ftheta.max_angle = model.max_angle_rad
        ftheta.linear_cde.linear_c, ftheta.linear_cde.linear_d, ftheta.linear_cde.linear_e = model.affine
        ftheta.principal_point_x, ftheta.principal_point_y = model.principal_x, model.principal_y
    else:
        lens = spec.opencv_fisheye_param if isinstance(model, OpenCVFisheye) else spec.opencv_pinhole_param
        lens.principal_point_x, lens.principal_point_y = model.principal_x, model.principal_y
        lens.focal_length_x, lens.focal_length_y = model.focal_x, model.focal_y
        if isinstance(model, OpenCVFisheye):
            spec.opencv_fisheye_param.radial_coeffs.extend(model.radial)
            spec.opencv_fisheye_param.max_angle = model.max_angle_rad
        elif isinstance(model, OpenCVPinhole):
            spec.opencv_pinhole_param.radial_coeffs.extend(model.radial)
            spec.opencv_pinhole_param.tangential_coeffs.extend(model.tangential)
            spec.opencv_pinhole_param.thin_prism_coeffs.extend(model.thin_prism)
    pose = camera.pose_rig_to_optical
    out.rig_to_camera.vec.x, out.rig_to_camera.vec.y, out.rig_to_camera.vec.z = pose.position.tolist()
    quat = out.rig_to_camera.quat
    quat.w, quat.x, quat.y, quat.z = pose.quaternion_wxyz.tolist()
    return out
