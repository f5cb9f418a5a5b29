"""What a camera sees, as tables: a ray a pixel, and where it meets the ground.

Cameras are fixed to the ego, which stays on the plane z = 0: everything that depends on the camera alone is computed
once. A table is in rig axes, so a picture at another place only turns and shifts it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from alpagym_plugins import ConfigError
from alpagym_runtime.cameras import (
    CameraModel,
    Ftheta,
    MountedCamera,
    OpenCVFisheye,
    OpenCVPinhole,
    Pinhole,
    resized,
)
from alpagym_runtime.geometry import Pose, quaternion_product
from alpagym_runtime.simulators.embedded.camera_config import MountConfig

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

FLAT, ANGULAR, BENT = range(3)
"""Projections: pinhole; radius by a table over the angle to the axis; OpenCV's rational distortion."""

LEVELS = 6
BLOCK = 32
"""Rows are padded to a multiple of so many samples or pixels."""
NO_GROUND = 255
HORIZON_SLOPE = 0.0035
"""Rays that fall less than this a metre see the horizon; it is 400 m away."""


class Table(NamedTuple):
    """A camera as the kernels read it; h, w of the picture, S samples a pixel and direction.

    Rows of what is flat here are padded to `wide[0]` samples or `wide[1]` pixels.
    """

    ray_x: F32  # [h*S*wide] unit rays through the samples, rig axes; zero where the model has no ray
    ray_y: F32
    ray_z: F32
    middle_x: F32  # [h*wide] those through the pixels' middles
    middle_y: F32
    middle_z: F32
    ground_x: F32  # [h*wide] where they meet the ground, m from the rig
    ground_y: F32
    level: NDArray[np.uint8]  # [h,w] level of the ground's texture, NO_GROUND for the sky
    distance: F32  # [h,w] m along the ray to the ground, 0 for the sky
    columns: NDArray[np.int32]  # [g] the columns of the pixels that see ground, row by row
    taps: NDArray[np.uint8]  # [g] how many samples of the ground each takes: 1, 2, 4, 8
    starts: NDArray[np.int64]  # [h+1,2] where a row begins in `columns` and in the samples
    tap_x: F32  # [s] the samples, m from the rig, along the longer axis of the pixels' footprints
    tap_y: F32
    runs: NDArray[np.int64]  # [r+1,2] samples of one row and level: the first one's index, the level; ends with s
    run_starts: NDArray[np.int64]  # [h+1] where a row begins in `runs`
    reach: NDArray[np.int64]  # [h,2] columns between which a row may show ground
    wide: NDArray[np.int64]  # [2] samples and pixels of a padded row
    rotation: F64  # [3,3] rows: optical axes in rig axes
    centre: F64  # [3] m, optical centre in the rig frame
    projection: NDArray[np.int64]  # [2] kind, samples a pixel and direction
    numbers: F64  # [16] focal x, y, principal x, y of the picture; then OpenCV's k1..k6, p1, p2, s1..s4; ANGULAR: bend
    radius: F64  # [1025] ANGULAR: radius over the angle's sine, by its cosine from 0 to 1
    affine: F64  # [6] ANGULAR: picture = A · (radius · direction) + b; BENT: largest undistorted radius, five unused
    cone: F64  # [2] cosine and sine of the widest angle to the axis
    pixel_rad: float  # angle of a sample near the axis


def padded(values: NDArray[Any]) -> NDArray[Any]:
    """[h,w] as the kernels read it: one dimension, rows padded by zeros to a multiple of `BLOCK`."""
    return np.pad(values, ((0, 0), (0, -values.shape[1] % BLOCK))).ravel()


def mounted(name: str, mount: MountConfig, size: tuple[int, int]) -> MountedCamera:
    """The camera of a mount for pictures of `size` (height, width)."""
    height, width = (mount.height, mount.width) if mount.height else size
    model = resized(_model(mount, height, width), *size)  # type: ignore[type-var]
    # Optical from rig: x right = -y, y down = -z, z forward = x; then turned by yaw, pitch and roll.
    yaw, pitch, roll = np.radians([mount.yaw_deg, -mount.pitch_deg, mount.roll_deg]) / 2.0
    turned = quaternion_product(
        quaternion_product([np.cos(yaw), 0.0, 0.0, np.sin(yaw)], [np.cos(pitch), 0.0, np.sin(pitch), 0.0]),
        [np.cos(roll), np.sin(roll), 0.0, 0.0],
    )
    pose = Pose(np.array([mount.x_m, mount.y_m, mount.z_m]), quaternion_product(turned, [0.5, -0.5, 0.5, -0.5]))
    return MountedCamera(name, model, pose)


def _model(mount: MountConfig, height: int, width: int) -> CameraModel:
    centre = tuple(mount.principal_px) or (width / 2.0, height / 2.0)
    half = np.radians(mount.fov_deg) / 2.0
    common: dict[str, Any] = {"width": width, "height": height, "principal_x": centre[0], "principal_y": centre[1]}
    if mount.model in ("pinhole", "opencv"):
        focal = tuple(mount.focal_px) or (width / 2.0 / np.tan(half),) * 2
        if mount.model == "pinhole":
            return Pinhole(**common, focal_x=focal[0], focal_y=focal[1])
        k = [*mount.distortion, *[0.0] * 12][:12]
        return OpenCVPinhole(
            **common,
            focal_x=focal[0],
            focal_y=focal[1],
            radial=(k[0], k[1], k[4], k[5], k[6], k[7]),
            tangential=(k[2], k[3]),
            thin_prism=tuple(k[8:12]),
        )
    limit = float(np.radians(mount.max_angle_deg))
    focal = tuple(mount.focal_px) or (width / 2.0 / half,) * 2
    if mount.model == "fisheye":
        return OpenCVFisheye(
            **common, max_angle_rad=limit, focal_x=focal[0], focal_y=focal[1], radial=tuple(mount.distortion)
        )
    return Ftheta(
        **common,
        max_angle_rad=limit,
        angle_to_radius=tuple(mount.distortion) or (0.0, focal[0]),
    )


def ray_table(camera: MountedCamera, height: int, width: int, samples: int) -> tuple[F64, NDArray[np.bool_]]:
    """Unit rays [h*S,w*S,3] in rig axes through the samples' centres, and where there is one."""
    rows, columns = np.arange(height * samples), np.arange(width * samples)
    u, v = np.meshgrid((columns + 0.5) / samples, (rows + 0.5) / samples)
    rays, valid = camera.model.unproject(np.stack([u, v], axis=-1))
    return _to_rig(camera, rays), valid


def _to_rig(camera: MountedCamera, rays: F64) -> F64:
    turn = Pose(np.zeros(3), camera.pose_rig_to_optical.quaternion_wxyz)
    return turn.transform(rays)


def build_table(camera: MountedCamera, height: int, width: int, samples: int, texel_m: float, max_taps: int) -> Table:
    """All that the kernels need of a camera.

    Raises:
        ConfigError: the calibration has no ray for any pixel.

    """
    rays, valid = ray_table(camera, height, width, samples)
    if not valid.any():
        raise ConfigError(f"camera {camera.name!r}: its calibration reaches none of the picture's pixels", key="policy")
    centre = np.asarray(camera.pose_rig_to_optical.position, np.float64)
    u, v = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
    at = np.stack([u, v], axis=-1)
    middle, known = camera.model.unproject(at)
    direction = _to_rig(camera, middle)
    down = known & (direction[..., 2] < -HORIZON_SLOPE)
    place = _meet(centre, direction)
    steps = []
    for shift in ((0.5, 0.0), (0.0, 0.5)):
        ends = [_to_rig(camera, camera.model.unproject(at + sign * np.array(shift))[0]) for sign in (-1.0, 1.0)]
        before, after = (
            np.where((end[..., 2] < -HORIZON_SLOPE)[..., None], _meet(centre, end), np.nan) for end in ends
        )
        step = after - before
        # At the horizon one side sees the sky: twice the other one.
        step = np.where(np.isnan(step), 2.0 * (place - before), step)
        step = np.where(np.isnan(step), 2.0 * (after - place), step)
        steps.append(np.nan_to_num(step))
    lengths = np.stack([np.hypot(step[..., 0], step[..., 1]) for step in steps])
    longer = np.where((lengths[0] >= lengths[1])[..., None], steps[0], steps[1])
    longest, shortest = lengths.max(axis=0), np.maximum(lengths.min(axis=0), 1e-6)
    taps = 2 ** np.clip(np.round(np.log2(np.maximum(longest / shortest, 1.0))), 0, np.log2(max_taps)).astype(int)
    # What the taps leave of a long footprint is shared between blur and flicker.
    footprint = np.maximum(shortest, np.sqrt(shortest * longest / taps))
    level = np.clip(np.floor(np.log2(np.maximum(footprint / texel_m, 1.0)) + 0.3), 0, LEVELS - 1)
    distance = np.linalg.norm(
        np.concatenate([place - centre[:2], np.broadcast_to(-centre[2:], place[..., :1].shape)], -1), axis=-1
    )
    some = np.asarray(down.any(axis=1))
    first, last = down.argmax(axis=1), width - down[:, ::-1].argmax(axis=1)
    reach = np.where(some[:, None], np.stack([first, last], axis=1), 0)
    each = taps[down]
    within = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
    share = (within - (np.repeat(each, each) - 1) / 2.0) / np.repeat(each, each)
    tapped = np.repeat(place[down], each, axis=0) + share[:, None] * np.repeat(longer[down], each, axis=0)
    counts = np.stack([down.sum(axis=1), np.where(down, taps, 0).sum(axis=1)], axis=1)
    runs, run_starts = _runs(
        np.repeat(level[down], each).astype(np.int64), np.repeat(np.nonzero(down)[0], each), height
    )
    seen = direction[known] @ _to_rig(camera, np.array([0.0, 0.0, 1.0]))
    widest = float(np.arccos(np.clip(seen.min(), -1.0, 1.0))) + 0.02
    numbers, radius, affine, kind = _projection(camera.model)
    centre_ray = _to_rig(camera, camera.model.unproject([width / 2.0, height / 2.0])[0])
    beside = _to_rig(camera, camera.model.unproject([width / 2.0 + 1.0, height / 2.0])[0])
    rays = np.where(valid[..., None], rays, 0.0).astype(np.float32)
    middle = np.where(known[..., None], direction, 0.0).astype(np.float32)
    place = np.where(down[..., None], place, 0.0).astype(np.float32)
    return Table(
        ray_x=padded(rays[..., 0]),
        ray_y=padded(rays[..., 1]),
        ray_z=padded(rays[..., 2]),
        middle_x=padded(middle[..., 0]),
        middle_y=padded(middle[..., 1]),
        middle_z=padded(middle[..., 2]),
        ground_x=padded(place[..., 0]),
        ground_y=padded(place[..., 1]),
        level=np.where(down, level, NO_GROUND).astype(np.uint8),
        distance=np.where(down, distance, 0.0).astype(np.float32),
        columns=np.nonzero(down)[1].astype(np.int32),
        taps=each.astype(np.uint8),
        starts=np.concatenate([np.zeros((1, 2), np.int64), np.cumsum(counts, axis=0)]),
        tap_x=tapped[:, 0].astype(np.float32),
        tap_y=tapped[:, 1].astype(np.float32),
        runs=runs,
        run_starts=run_starts,
        reach=reach.astype(np.int64),
        wide=np.array([-(-size // BLOCK) * BLOCK for size in (width * samples, width)]),
        rotation=np.stack([_to_rig(camera, axis) for axis in np.eye(3)]),
        centre=centre,
        projection=np.array([kind, samples], np.int64),
        numbers=numbers,
        radius=radius,
        affine=affine,
        cone=np.array([np.cos(widest), np.sin(widest)]),
        pixel_rad=float(np.arccos(np.clip(centre_ray @ beside, -1.0, 1.0))) / samples,
    )


def _runs(levels: NDArray[np.int64], rows: NDArray[np.int64], height: int) -> tuple[NDArray[np.int64], ...]:
    """Samples in their order, cut where the level or the row changes; see `Table`."""
    first = np.flatnonzero(np.diff(levels, prepend=-1) | np.diff(rows, prepend=-1))
    runs = np.stack([np.append(first, len(levels)), np.append(levels[first], 0)], axis=1)
    return runs, np.searchsorted(rows[first], np.arange(height + 1))


def _meet(centre: F64, direction: F64) -> F64:
    """[...,2] where rays meet the ground, rig frame; nonsense for those that do not."""
    reach = centre[2] / np.maximum(-direction[..., 2:], 1e-9)
    return centre[:2] + direction[..., :2] * reach


RADIUS_STEPS = 1024


def _projection(model: CameraModel) -> tuple[F64, F64, F64, int]:
    """Numbers, radius table, affine map and kind of a model, all for the picture's own size."""
    numbers, radius, affine = np.zeros(16), np.zeros(RADIUS_STEPS + 1), np.array([1.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    if isinstance(model, Pinhole):
        scale = np.array([model.scale_x, model.scale_y])
        numbers[:2] = np.array([model.focal_x, model.focal_y]) * scale
        numbers[2:4] = np.array([model.principal_x, model.principal_y]) * scale
        if not isinstance(model, OpenCVPinhole):
            return numbers, radius, affine, FLAT
        k, p, s = ([*part, *[0.0] * 6] for part in (model.radial, model.tangential, model.thin_prism))
        numbers[4:16] = [*k[:6], *p[:2], *s[:4]]
        affine[0] = model.limit
        return numbers, radius, affine, BENT
    assert isinstance(model, (Ftheta, OpenCVFisheye))
    # Beyond the limit the radius goes on straight: only a bound of where a surface may be is needed there.
    limit = model.max_angle_rad
    angles = np.linspace(0.0, np.pi / 2.0, 1025)
    points = np.stack([np.sin(angles), np.zeros_like(angles), np.cos(angles)], axis=-1)
    plain: CameraModel
    if isinstance(model, Ftheta):
        plain = Ftheta(
            model.width, model.height, 0.0, 0.0, max_angle_rad=limit, angle_to_radius=model.angle_to_radius,
            radius_to_angle=model.radius_to_angle, exact=model.exact,
        )  # fmt: skip
        c, d, e = model.affine
        linear = np.array([[c, d], [e, 1.0]])
    else:
        plain = OpenCVFisheye(
            model.width, model.height, 0.0, 0.0, max_angle_rad=limit, focal_x=1.0, focal_y=1.0, radial=model.radial
        )
        linear = np.diag([model.focal_x, model.focal_y])
    pixels, good = plain.project(points)
    last = int(np.flatnonzero(good)[-1]) if good.any() else 1
    straight = np.empty_like(angles)
    straight[: last + 1] = pixels[: last + 1, 0]
    slope = (straight[last] - straight[max(last - 8, 0)]) / max(min(last, 8), 1)
    straight[last + 1 :] = straight[last] + slope * np.arange(1, len(angles) - last)
    cosines = np.linspace(0.0, 1.0, RADIUS_STEPS + 1)
    radius[:-1] = np.interp(np.arccos(cosines[:-1]), angles, straight) / np.sqrt(1.0 - cosines[:-1] ** 2)
    radius[-1] = 2.0 * radius[-2] - radius[-3]
    numbers[0] = _bend(radius)
    scale = np.array([model.scale_x, model.scale_y])
    linear = scale[:, None] * linear
    affine = np.array([*linear.ravel(), model.principal_x * scale[0], model.principal_y * scale[1]])
    return numbers, radius, affine, ANGULAR


def _bend(radius: F64) -> float:
    """How much the images of straight edges bend.

    The curvature along an edge's arc, in radii a radian near the axis, is at most so many times the sine of the angle
    between the arc's plane and the axis.
    """
    sine = np.sin(np.linspace(0.03, 1.5, 50))[:, None]
    along = np.linspace(0.0, 1.5, 400)
    x, y = np.broadcast_to(sine, (50, 400)), np.broadcast_to(np.sin(along), (50, 400))
    away = np.interp(np.sqrt(1.0 - sine**2) * np.cos(along), np.linspace(0.0, 1.0, len(radius)), radius) / radius[-1]
    places = np.stack([x * np.cos(along) * away, y * away])
    first = np.gradient(places, along, axis=2)
    second = np.gradient(first, along, axis=2)
    aside = np.abs(first[0] * second[1] - first[1] * second[0]) / np.maximum(np.hypot(*first), 1e-9)
    return float((aside / sine)[:, 2:-2].max())
