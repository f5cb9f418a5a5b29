"""Frames, angles, rotations, trajectories in time and exact boxes.

Conventions (docs/concepts.md has the one table): x forward, y left, z up; yaw counter-clockwise in [-pi, pi);
quaternions are w, x, y, z unless a name says xyzw; times are int64 microseconds and are never extrapolated.
The compiled box tests behind it are in `geometry_kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from alpagym_runtime.errors import OutOfRangeError
from alpagym_runtime.geometry_kernels import boxes_inside_kernel, penetrations_kernel

Float = NDArray[np.float64]

# ---------------------------------------------------------------- angles


def wrap_angle(angle_rad: ArrayLike) -> Float:
    """The same angle in [-pi, pi); pi becomes -pi."""
    wrapped = np.mod(np.asarray(angle_rad, np.float64) + np.pi, 2.0 * np.pi) - np.pi
    # np.mod of a tiny negative number rounds to 2 pi itself.
    return np.where(wrapped >= np.pi, -np.pi, wrapped)[()]


def angle_difference(a_rad: ArrayLike, b_rad: ArrayLike) -> Float:
    """A - b along the shorter way, in [-pi, pi)."""
    return wrap_angle(np.asarray(a_rad, np.float64) - np.asarray(b_rad, np.float64))


# ---------------------------------------------------------------- quaternions


def unit_quaternion(quaternion_wxyz: ArrayLike, what: str = "quaternion") -> Float:
    """[...,4] scaled to norm 1.

    Raises:
        ValueError: a row is zero or not finite; the message holds `what` and the row's index.

    """
    q = np.asarray(quaternion_wxyz, np.float64)
    if q.shape[-1:] != (4,):
        raise ValueError(f"{what} must be [..., 4] (w, x, y, z), got {q.shape}")
    norm = np.linalg.norm(q, axis=-1, keepdims=True)
    bad = ~np.isfinite(norm[..., 0]) | (norm[..., 0] < 1e-9)
    if bad.any():
        index = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"{what} at {index or 'its only row'} is {q[index].tolist()}: neither zero nor NaN is a rotation"
        )
    unit: Float = q / norm
    return unit


def quaternion_from_xyzw(quaternion_xyzw: ArrayLike) -> Float:
    """[...,4] scalar-last columns, as datasets store them, to w, x, y, z."""
    return np.asarray(quaternion_xyzw, np.float64)[..., [3, 0, 1, 2]]


def quaternion_to_xyzw(quaternion_wxyz: ArrayLike) -> Float:
    """[...,4] w, x, y, z to scalar-last."""
    return np.asarray(quaternion_wxyz, np.float64)[..., [1, 2, 3, 0]]


def quaternion_from_yaw(yaw_rad: ArrayLike) -> Float:
    """[...,4] w, x, y, z of a rotation about z."""
    half = np.asarray(yaw_rad, np.float64) / 2.0
    zero = np.zeros_like(half)
    return np.stack([np.cos(half), zero, zero, np.sin(half)], axis=-1)


def yaw_from_quaternion(quaternion_wxyz: ArrayLike) -> Float:
    """Heading [...] rad in [-pi, pi) of the rotated x axis; the quaternion need not be normalised."""
    w, x, y, z = np.moveaxis(unit_quaternion(quaternion_wxyz), -1, 0)
    return wrap_angle(np.arctan2(2.0 * (w * z + x * y), 1.0 - 2.0 * (y * y + z * z)))


def quaternion_product(a_wxyz: ArrayLike, b_wxyz: ArrayLike) -> Float:
    """[...,4]: first rotate by b, then by a."""
    aw, ax, ay, az = np.moveaxis(np.asarray(a_wxyz, np.float64), -1, 0)
    bw, bx, by, bz = np.moveaxis(np.asarray(b_wxyz, np.float64), -1, 0)
    return np.stack(
        [
            aw * bw - ax * bx - ay * by - az * bz,
            aw * bx + ax * bw + ay * bz - az * by,
            aw * by - ax * bz + ay * bw + az * bx,
            aw * bz + ax * by - ay * bx + az * bw,
        ],
        axis=-1,
    )


def rotate(quaternion_wxyz: ArrayLike, vector: ArrayLike) -> Float:
    """Vectors [...,3] rotated by quaternions [...,4]."""
    q = unit_quaternion(quaternion_wxyz)
    v = np.asarray(vector, np.float64)
    twice = 2.0 * np.cross(q[..., 1:], v)
    return v + q[..., :1] * twice + np.cross(q[..., 1:], twice)


def slerp(a_wxyz: ArrayLike, b_wxyz: ArrayLike, fraction: ArrayLike) -> Float:
    """[...,4] between a (0) and b (1) at constant rate, along the shorter way whatever the signs."""
    a, b = unit_quaternion(a_wxyz), unit_quaternion(b_wxyz)
    f = np.asarray(fraction, np.float64)[..., None]
    dot = np.sum(a * b, axis=-1, keepdims=True)
    b = np.where(dot < 0.0, -b, b)
    angle = np.arccos(np.clip(np.abs(dot), 0.0, 1.0))
    # Below 1e-6 rad the sines cancel; linear is then exact to 1e-12.
    small = angle < 1e-6
    sine = np.where(small, 1.0, np.sin(angle))
    mixed = np.where(small, 1.0 - f, np.sin((1.0 - f) * angle) / sine) * a
    mixed = mixed + np.where(small, f, np.sin(f * angle) / sine) * b
    return unit_quaternion(mixed)


# ---------------------------------------------------------------- poses


@dataclass(frozen=True)
class Pose:
    """Rigid transforms from a child frame to a parent frame: position [...,3] m, quaternion_wxyz [...,4].

    Name variables by both frames: `pose_local_to_rig` places the rig in the local frame; its `transform` takes rig
    coordinates to local ones.
    """

    position: Float
    quaternion_wxyz: Float

    @staticmethod
    def planar(x_m: ArrayLike, y_m: ArrayLike, yaw_rad: ArrayLike) -> Pose:
        """A pose on the ground plane."""
        x, y, yaw = np.broadcast_arrays(*(np.asarray(v, np.float64) for v in (x_m, y_m, yaw_rad)))
        return Pose(np.stack([x, y, np.zeros_like(x)], axis=-1), quaternion_from_yaw(yaw))

    def transform(self, points_child: ArrayLike) -> Float:
        """Points [...,3] of the child frame, in the parent frame."""
        return rotate(self.quaternion_wxyz, points_child) + self.position

    def inverse(self) -> Pose:
        """Parent to child."""
        conjugate = unit_quaternion(self.quaternion_wxyz) * np.array([1.0, -1.0, -1.0, -1.0])
        return Pose(-rotate(conjugate, self.position), conjugate)

    def __matmul__(self, other: Pose) -> Pose:
        """`(a @ b).transform(p) == a.transform(b.transform(p))`."""
        rotation = unit_quaternion(quaternion_product(self.quaternion_wxyz, other.quaternion_wxyz))
        return Pose(self.transform(other.position), rotation)


def local_to_rig(points_local: ArrayLike, rig_local: ArrayLike) -> Float:
    """Planar points [...,2] of the local frame in the rig frame of poses [...,3] (x, y, yaw in local)."""
    points, rig = np.asarray(points_local, np.float64), np.asarray(rig_local, np.float64)
    dx, dy = points[..., 0] - rig[..., 0], points[..., 1] - rig[..., 1]
    cos, sin = np.cos(rig[..., 2]), np.sin(rig[..., 2])
    return np.stack([cos * dx + sin * dy, cos * dy - sin * dx], axis=-1)


def rig_to_local(points_rig: ArrayLike, rig_local: ArrayLike) -> Float:
    """The inverse of `local_to_rig`."""
    points, rig = np.asarray(points_rig, np.float64), np.asarray(rig_local, np.float64)
    cos, sin = np.cos(rig[..., 2]), np.sin(rig[..., 2])
    x = rig[..., 0] + cos * points[..., 0] - sin * points[..., 1]
    return np.stack([x, rig[..., 1] + sin * points[..., 0] + cos * points[..., 1]], axis=-1)


# ---------------------------------------------------------------- trajectories in time


def check_times(times_us: ArrayLike, what: str = "trajectory") -> NDArray[np.int64]:
    """Strictly increasing int64 times; the error names the first bad index."""
    times = np.asarray(times_us)
    if times.ndim != 1 or not len(times):
        raise ValueError(f"{what}: needs at least one time, got shape {times.shape}")
    if times.dtype.kind not in "iu":
        raise ValueError(f"{what}: times are integer microseconds, got {times.dtype}")
    times = times.astype(np.int64)
    bad = np.flatnonzero(np.diff(times) <= 0)
    if len(bad):
        i = int(bad[0]) + 1
        raise ValueError(f"{what}: time {int(times[i])} us at index {i} does not follow {int(times[i - 1])} us")
    return times


def _bracket(times_us: ArrayLike, query_us: ArrayLike, what: str) -> tuple[NDArray[np.int64], Float]:
    """Left neighbours [...] and fractions [...] in [0, 1]; a query outside raises."""
    times = check_times(times_us, what)
    query = np.asarray(query_us)
    if query.dtype.kind not in "iu":
        raise ValueError(f"{what}: query times are integer microseconds, got {query.dtype}")
    query = query.astype(np.int64)
    outside = (query < times[0]) | (query > times[-1])
    if outside.any():
        raise OutOfRangeError(int(np.atleast_1d(query)[np.atleast_1d(outside)][0]), int(times[0]), int(times[-1]), what)
    if len(times) == 1:
        return np.zeros(query.shape, np.int64), np.zeros(query.shape)
    left = np.clip(np.searchsorted(times, query, side="right") - 1, 0, len(times) - 2)
    return left, (query - times[left]) / (times[left + 1] - times[left])


def interpolate(times_us: ArrayLike, values: ArrayLike, query_us: ArrayLike, what: str = "trajectory") -> Float:
    """Linear in time: values [K,...] at times [K], read at [...] times.

    Raises:
        OutOfRangeError: a query lies outside the log.
        ValueError: no pose, or times that do not increase (the index is named).

    """
    left, fraction = _bracket(times_us, query_us, what)
    v = np.asarray(values, np.float64)
    right = np.minimum(left + 1, len(v) - 1)
    fraction = fraction.reshape(fraction.shape + (1,) * (v.ndim - 1))
    mixed: Float = v[left] * (1.0 - fraction) + v[right] * fraction
    return mixed


def interpolate_angle(times_us: ArrayLike, angles_rad: ArrayLike, query_us: ArrayLike, what: str = "angle") -> Float:
    """Like `interpolate`, at constant rate along the shorter way between neighbours; in [-pi, pi)."""
    left, fraction = _bracket(times_us, query_us, what)
    angles = np.asarray(angles_rad, np.float64)
    right = np.minimum(left + 1, len(angles) - 1)
    return wrap_angle(angles[left] + fraction * angle_difference(angles[right], angles[left]))


def interpolate_pose(times_us: ArrayLike, pose: Pose, query_us: ArrayLike, what: str = "pose log") -> Pose:
    """Poses between recorded ones: positions linear, rotations by slerp.

    Raises:
        ValueError: a neighbour's rotation is zero or not finite; its time is named. Otherwise as `interpolate`.

    """
    left, fraction = _bracket(times_us, query_us, what)
    right = np.minimum(left + 1, len(pose.position) - 1)
    used = np.unique([left, right])
    norm = np.linalg.norm(pose.quaternion_wxyz[used], axis=-1)
    bad = used[~np.isfinite(norm) | (norm < 1e-9)]
    if len(bad):
        q, time_us = pose.quaternion_wxyz[bad[0]].tolist(), int(np.asarray(times_us)[bad[0]])
        raise ValueError(f"{what}: quaternion {q} at {time_us} us is no rotation")
    rotation = slerp(pose.quaternion_wxyz[left], pose.quaternion_wxyz[right], fraction)
    return Pose(interpolate(times_us, pose.position, query_us, what), rotation)


def motion(times_us: ArrayLike, xy_local: ArrayLike, yaw_rad: ArrayLike) -> dict[str, Float]:
    """Speed, acceleration and jerk of a driven path by central differences, wrapped angles handled.

    Args:
        times_us: [K] strictly increasing, K >= 3.
        xy_local: [K,2] m.
        yaw_rad: [K], any branch.

    Returns:
        speed_mps, acceleration_mps2 (longitudinal), lateral_acceleration_mps2, jerk_mps3 (magnitude of the change of
        the acceleration vector), yaw_rate_radps, each [K].

    """
    times_s = check_times(times_us).astype(np.float64) * 1e-6
    xy, yaw = np.asarray(xy_local, np.float64), np.unwrap(np.asarray(yaw_rad, np.float64))
    if len(times_s) < 3:
        raise ValueError(f"motion needs at least 3 samples, got {len(times_s)}")
    velocity = np.gradient(xy, times_s, axis=0, edge_order=2)
    heading = np.stack([np.cos(yaw), np.sin(yaw)], axis=-1)
    speed = np.sum(velocity * heading, axis=-1)
    yaw_rate = np.gradient(yaw, times_s, edge_order=2)
    longitudinal = np.gradient(speed, times_s, edge_order=2)
    lateral = speed * yaw_rate
    normal = np.stack([-heading[:, 1], heading[:, 0]], axis=-1)
    acceleration = longitudinal[:, None] * heading + lateral[:, None] * normal
    jerk = np.linalg.norm(np.gradient(acceleration, times_s, axis=0, edge_order=2), axis=-1)
    return {
        "speed_mps": speed,
        "acceleration_mps2": longitudinal,
        "lateral_acceleration_mps2": lateral,
        "jerk_mps3": jerk,
        "yaw_rate_radps": yaw_rate,
    }


# ---------------------------------------------------------------- boxes and areas

CONTACT_TOLERANCE_M = 1e-9
"""Overlaps up to this depth are touching, not colliding; it only absorbs rounding."""


def boxes_overlap(a_boxes: ArrayLike, b_boxes: ArrayLike) -> NDArray[np.bool_]:
    """Whether exact oriented rectangles overlap; touching is not overlapping, the order does not matter.

    Args:
        a_boxes: [...,5]: centre x m, centre y m, yaw rad, length m, width m.
        b_boxes: [...,5], broadcast against `a_boxes`.

    """
    a, b = np.broadcast_arrays(np.asarray(a_boxes, np.float64), np.asarray(b_boxes, np.float64))
    # Copies: a broadcast view is no array that compiled code may take.
    depth = penetrations_kernel(a.reshape(-1, 5).copy(), b.reshape(-1, 5).copy())
    overlap: NDArray[np.bool_] = (depth > CONTACT_TOLERANCE_M).reshape(a.shape[:-1])[()]
    return overlap


@dataclass(frozen=True)
class Area:
    """A drivable area as boundary segments, indexed by bands of y; made by `area_from_polygons`."""

    segments: Float
    band_offsets: NDArray[np.int64]
    band_segments: NDArray[np.int64]
    band_low_m: float
    band_height_m: float

    def rings(self) -> list[Float]:
        """Its boundary as closed rings [K,2]; consecutive segments that share a point belong to one ring."""
        breaks = np.flatnonzero(np.any(self.segments[1:, :2] != self.segments[:-1, 2:], axis=1)) + 1
        return [part[:, :2] for part in np.split(self.segments, breaks)]

    def contains(self, boxes: ArrayLike) -> NDArray[np.bool_]:
        """Whether boxes [...,5] (centre x, y, yaw, length, width) lie inside, up to `EDGE_TOLERANCE_M`."""
        b = np.asarray(boxes, np.float64)
        flat = b.reshape(-1, 5)
        flags = boxes_inside_kernel(
            flat, self.segments, self.band_offsets, self.band_segments, self.band_low_m, self.band_height_m
        )
        inside: NDArray[np.bool_] = flags.reshape(b.shape[:-1])[()]
        return inside


SEAM_M = 0.1
"""Gaps between road polygons up to this width are seams of the map, not places to fall into."""

HOLE_M2 = 4.0
"""Enclosed gaps smaller than this, such as slivers between turning lanes, are artefacts: no kerb is that small."""


def area_of_boundary(segments: Float, band_height_m: float = 2.0, entries_max: int | None = None) -> Area:
    """The area inside boundary segments [S,4] m (x0, y0, x1, y1; outlines and holes), S ≥ 1, with its index of bands.

    Raises:
        ValueError: the index would have more than `entries_max` entries or bands.

    """
    low = float(segments[:, [1, 3]].min())
    first = np.floor((segments[:, [1, 3]].min(axis=1) - low) / band_height_m).astype(np.int64)
    last = np.floor((segments[:, [1, 3]].max(axis=1) - low) / band_height_m).astype(np.int64)
    counts = last - first + 1
    if entries_max is not None and max(int(counts.sum()), int(last.max())) > entries_max:
        raise ValueError(f"an area that spreads over {segments[:, [1, 3]].max() - low:g} m")
    index = np.repeat(np.arange(len(segments)), counts)
    band = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    order = np.lexsort((index, band))
    offsets = np.zeros(int(last.max()) + 2, np.int64)
    np.add.at(offsets, band + 1, 1)
    return Area(segments, np.cumsum(offsets), index[order].astype(np.int64), low, band_height_m)


def area_from_polygons(polygons: list[ArrayLike], band_height_m: float = 2.0) -> Area:
    """The union of road polygons (each [K,2] m, local frame), seams closed, outer edges where they were.

    Raises:
        ValueError: no polygon has an area; an empty map is an error, never "on the road".

    """
    import shapely

    shapes = [shapely.Polygon(np.asarray(p, np.float64)) for p in polygons if len(np.asarray(p)) >= 3]
    shapes = [shapely.make_valid(shape) for shape in shapes]
    # Grown and shrunk by half a seam with mitred corners: straight outer edges come back to where they were.
    grown = shapely.union_all([s.buffer(SEAM_M / 2.0, join_style="mitre") for s in shapes if s.area > 0.0])
    union = grown.buffer(-SEAM_M / 2.0, join_style="mitre")
    if union.is_empty:
        raise ValueError(f"no drivable area in {len(polygons)} polygons")
    rings = []
    for polygon in shapely.get_parts(union):
        holes = [ring for ring in polygon.interiors if shapely.Polygon(ring).area >= HOLE_M2]
        rings += [np.asarray(ring.coords) for ring in (polygon.exterior, *holes)]
    segments = np.concatenate([np.concatenate([ring[:-1], ring[1:]], axis=1) for ring in rings])
    return area_of_boundary(segments, band_height_m)
