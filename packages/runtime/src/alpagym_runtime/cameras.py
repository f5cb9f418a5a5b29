"""Camera models: points in the optical frame to pixels and back.

The optical frame has x right, y down, z forward; a pixel is (column, row) with (0, 0) at the upper left corner of the
picture, so the centre of the first pixel is (0.5, 0.5) and resizing is a plain multiplication. All arithmetic is
float64 over leading axes [...]. Outside the range in which a model can be inverted nothing is invented: `valid` is
False there.

Sources: OpenCV's rational and fisheye models (docs.opencv.org, calib3d and fisheye); f-theta as NVIDIA's data uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from alpagym_runtime.geometry import Pose, rotate

Float = NDArray[np.float64]
Bool = NDArray[np.bool_]

EDGE = 1e-6
"""Newton's method has converged below this many pixels or radians; it ends far below."""


class CameraModel(Protocol):
    """What every model offers."""

    @property
    def width(self) -> int:
        """Columns of the picture."""
        ...

    @property
    def height(self) -> int:
        """Rows of the picture."""
        ...

    def project(self, points_optical: ArrayLike) -> tuple[Float, Bool]:
        """Pixels [...,2] of points [...,3], and valid [...]: in front, and within the model's range.

        A valid pixel may lie outside the picture; see `inside`.
        """
        ...

    def unproject(self, pixels: ArrayLike) -> tuple[Float, Bool]:
        """Unit rays [...,3] of pixels [...,2], and valid [...]."""
        ...


def inside(camera: CameraModel, pixels: ArrayLike) -> Bool:
    """Whether pixels [...,2] lie in the picture."""
    at = np.asarray(pixels, np.float64)
    result: Bool = (at[..., 0] >= 0) & (at[..., 0] < camera.width) & (at[..., 1] >= 0) & (at[..., 1] < camera.height)
    return result


@dataclass(frozen=True)
class _Sensor:
    """Size, and what a resized picture multiplies pixels with."""

    width: int
    height: int
    principal_x: float
    principal_y: float
    scale_x: float = 1.0
    scale_y: float = 1.0

    def _scaled(self, native: Float) -> Float:
        return native * np.array([self.scale_x, self.scale_y])

    def _native(self, pixels: ArrayLike) -> Float:
        return np.asarray(pixels, np.float64) / np.array([self.scale_x, self.scale_y])


M = TypeVar("M", bound=_Sensor)


def resized(camera: M, height: int, width: int) -> M:
    """The same camera for pictures of another size."""
    return replace(
        camera,
        width=width,
        height=height,
        scale_x=camera.scale_x * width / camera.width,
        scale_y=camera.scale_y * height / camera.height,
    )


@dataclass(frozen=True)
class Pinhole(_Sensor):
    """x = f X / Z + c; `focal_x`, `focal_y` in px."""

    focal_x: float = 1.0
    focal_y: float = 1.0

    def project(self, points_optical: ArrayLike) -> tuple[Float, Bool]:
        """See `CameraModel`; valid in front of the camera."""
        flat, valid = _divide(points_optical)
        return self._scaled(self._to_pixels(flat)), valid

    def unproject(self, pixels: ArrayLike) -> tuple[Float, Bool]:
        """See `CameraModel`; every pixel has a ray."""
        flat = self._from_pixels(self._native(pixels))
        return _rays(flat), np.ones(flat.shape[:-1], bool)

    def _to_pixels(self, flat: Float) -> Float:
        return flat * np.array([self.focal_x, self.focal_y]) + np.array([self.principal_x, self.principal_y])

    def _from_pixels(self, native: Float) -> Float:
        at: Float = (native - np.array([self.principal_x, self.principal_y])) / np.array([self.focal_x, self.focal_y])
        return at


@dataclass(frozen=True)
class OpenCVPinhole(Pinhole):
    """OpenCV's rational model with tangential and thin-prism terms.

    With (x, y) = (X, Y) / Z and r² = x² + y²: the radial factor is (1 + k1 r² + k2 r⁴ + k3 r⁶) /
    (1 + k4 r² + k5 r⁴ + k6 r⁶); tangential 2 p1 x y + p2 (r² + 2 x²) and p1 (r² + 2 y²) + 2 p2 x y; prism s1 r² + s2 r⁴
    and s3 r² + s4 r⁴. Valid while the radial map still grows: beyond, two rays would share a pixel.

    Attributes:
        radial: k1 to k6, missing ones are 0.
        tangential: p1, p2.
        thin_prism: s1 to s4.

    """

    radial: tuple[float, ...] = ()
    tangential: tuple[float, ...] = ()
    thin_prism: tuple[float, ...] = ()

    def project(self, points_optical: ArrayLike) -> tuple[Float, Bool]:
        """See `CameraModel`."""
        flat, valid = _divide(points_optical)
        bent, _ = self._distort(flat)
        return self._scaled(self._to_pixels(bent)), valid & self._grows(flat)

    def unproject(self, pixels: ArrayLike) -> tuple[Float, Bool]:
        """See `CameraModel`; the radial part by bisection, the whole distortion by Newton's method from there."""
        target = self._from_pixels(self._native(pixels))
        flat = self._undo_radial(target)
        for _ in range(20):
            bent, (a, b, c, d) = self._distort(flat)
            miss = bent - target
            determinant = a * d - b * c
            determinant = np.where(np.abs(determinant) < 1e-12, 1e-12, determinant)
            step = np.stack([d * miss[..., 0] - b * miss[..., 1], a * miss[..., 1] - c * miss[..., 0]], -1)
            step /= determinant[..., None]
            # Tangential and prism terms are small corrections; a long step has left the model's range.
            length = np.maximum(np.hypot(step[..., 0], step[..., 1]), 1e-12)
            flat = flat - step * np.minimum(1.0, 0.2 / length)[..., None]
        bent, _ = self._distort(flat)
        error = np.abs(bent - target).max(axis=-1)
        return _rays(flat), (error < EDGE / max(self.focal_x, self.focal_y)) & self._grows(flat)

    def _radial(self, radius: Float) -> tuple[Float, Float]:
        """The distorted radius and its derivative."""
        k, _, _ = self._coefficients()
        q = radius * radius
        above, below = 1.0 + q * (k[0] + q * (k[1] + q * k[2])), 1.0 + q * (k[3] + q * (k[4] + q * k[5]))
        above_q, below_q = k[0] + q * (2 * k[1] + 3 * q * k[2]), k[3] + q * (2 * k[4] + 3 * q * k[5])
        slope = above / below + 2.0 * q * (above_q * below - above * below_q) / (below * below)
        return radius * above / below, np.where(below > 0.0, slope, -1.0)

    @property
    def limit(self) -> float:
        """The largest undistorted radius up to which the radial map grows; at most 4 (76 degrees)."""
        radius = np.linspace(0.0, 4.0, 4001)
        falls = np.flatnonzero(self._radial(radius)[1] <= 0.0)
        return float(radius[max(falls[0] - 1, 0)]) if len(falls) else 4.0

    def _undo_radial(self, target: Float) -> Float:
        wanted = np.hypot(target[..., 0], target[..., 1])
        low, high = np.zeros_like(wanted), np.full_like(wanted, self.limit)
        for _ in range(40):
            middle = (low + high) / 2.0
            short = self._radial(middle)[0] < wanted
            low, high = np.where(short, middle, low), np.where(short, high, middle)
        return target * (low / np.where(wanted < 1e-12, 1.0, wanted))[..., None]

    def _coefficients(self) -> tuple[list[float], list[float], list[float]]:
        k = [*self.radial, *[0.0] * 6][:6]
        return k, [*self.tangential, 0.0, 0.0][:2], [*self.thin_prism, *[0.0] * 4][:4]

    def _distort(self, flat: Float) -> tuple[Float, tuple[Float, Float, Float, Float]]:
        """Distorted coordinates [...,2] and the map's derivatives dx'/dx, dx'/dy, dy'/dx, dy'/dy."""
        k, p, s = self._coefficients()
        x, y = flat[..., 0], flat[..., 1]
        q = x * x + y * y
        above, below = 1.0 + q * (k[0] + q * (k[1] + q * k[2])), 1.0 + q * (k[3] + q * (k[4] + q * k[5]))
        above_q, below_q = k[0] + q * (2 * k[1] + 3 * q * k[2]), k[3] + q * (2 * k[4] + 3 * q * k[5])
        factor = above / below
        slope = (above_q * below - above * below_q) / (below * below)
        bent_x = x * factor + 2 * p[0] * x * y + p[1] * (q + 2 * x * x) + q * (s[0] + s[1] * q)
        bent_y = y * factor + p[0] * (q + 2 * y * y) + 2 * p[1] * x * y + q * (s[2] + s[3] * q)
        prism_x, prism_y = 2 * (s[0] + 2 * s[1] * q), 2 * (s[2] + 2 * s[3] * q)
        a = factor + 2 * x * x * slope + 2 * p[0] * y + 6 * p[1] * x + prism_x * x
        b = 2 * x * y * slope + 2 * p[0] * x + 2 * p[1] * y + prism_x * y
        c = 2 * x * y * slope + 2 * p[0] * x + 2 * p[1] * y + prism_y * x
        d = factor + 2 * y * y * slope + 6 * p[0] * y + 2 * p[1] * x + prism_y * y
        return np.stack([bent_x, bent_y], -1), (a, b, c, d)

    def _grows(self, flat: Float) -> Bool:
        """Whether the radial map grows from the axis up to here."""
        result: Bool = np.hypot(flat[..., 0], flat[..., 1]) <= self.limit
        return result


@dataclass(frozen=True)
class _Angular(_Sensor):
    """A radius on the sensor that is a function of the angle to the optical axis."""

    max_angle_rad: float = np.pi / 2.0

    def _angle(self, points_optical: ArrayLike) -> tuple[Float, Float, Bool]:
        """Angles [...], directions on the sensor [...,2] and valid [...]."""
        points = np.asarray(points_optical, np.float64)
        across = np.hypot(points[..., 0], points[..., 1])
        angle = np.arctan2(across, points[..., 2])
        direction = points[..., :2] / np.where(across < 1e-300, 1.0, across)[..., None]
        return angle, direction, (angle <= self.max_angle_rad) & ((across > 0.0) | (points[..., 2] > 0.0))


@dataclass(frozen=True)
class OpenCVFisheye(_Angular):
    """θ_d = θ (1 + k1 θ² + k2 θ⁴ + k3 θ⁶ + k4 θ⁸); x = f θ_d cos φ + c. `radial`: k1 to k4."""

    focal_x: float = 1.0
    focal_y: float = 1.0
    radial: tuple[float, ...] = ()

    def project(self, points_optical: ArrayLike) -> tuple[Float, Bool]:
        """See `CameraModel`."""
        angle, direction, valid = self._angle(points_optical)
        flat = direction * _polynomial(self._odd(), angle)[..., None]
        native = flat * np.array([self.focal_x, self.focal_y]) + np.array([self.principal_x, self.principal_y])
        return self._scaled(native), valid & _grows(self._odd(), angle)

    def unproject(self, pixels: ArrayLike) -> tuple[Float, Bool]:
        """See `CameraModel`."""
        native = self._native(pixels) - np.array([self.principal_x, self.principal_y])
        flat = native / np.array([self.focal_x, self.focal_y])
        radius = np.hypot(flat[..., 0], flat[..., 1])
        angle, valid = _invert(self._odd(), radius, radius, self.max_angle_rad)
        return _bend(flat, radius, angle), valid

    def _odd(self) -> tuple[float, ...]:
        k = [*self.radial, *[0.0] * 4][:4]
        return (0.0, 1.0, 0.0, k[0], 0.0, k[1], 0.0, k[2], 0.0, k[3])


@dataclass(frozen=True)
class Ftheta(_Angular):
    """The radius is a polynomial of the angle, or the angle of the radius; the other one is an approximation.

    pixel = [[c, d], [e, 1]] · (r · direction) + principal point. The polynomial that is exact is used in both
    directions; the other only starts Newton's method.

    Attributes:
        angle_to_radius: px of rad, coefficients of rising power.
        radius_to_angle: rad of px.
        exact: which of them is exact.
        affine: c, d, e.

    """

    angle_to_radius: tuple[float, ...] = ()
    radius_to_angle: tuple[float, ...] = ()
    exact: str = "angle_to_radius"
    affine: tuple[float, float, float] = (1.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        if self.exact not in ("angle_to_radius", "radius_to_angle") or len(getattr(self, self.exact)) < 2:
            raise ValueError(f"an f-theta camera needs the polynomial that is exact, got {self.exact!r} {self}")

    def project(self, points_optical: ArrayLike) -> tuple[Float, Bool]:
        """See `CameraModel`."""
        angle, direction, valid = self._angle(points_optical)
        if self.exact == "angle_to_radius":
            radius, known = _polynomial(self.angle_to_radius, angle), _grows(self.angle_to_radius, angle)
        else:
            start = (
                _polynomial(self.angle_to_radius, angle) if self.angle_to_radius else angle / self.radius_to_angle[1]
            )
            radius, known = _invert(self.radius_to_angle, angle, start, np.inf)
        c, d, e = self.affine
        at = direction * radius[..., None]
        native = np.stack([c * at[..., 0] + d * at[..., 1], e * at[..., 0] + at[..., 1]], -1)
        return self._scaled(native + np.array([self.principal_x, self.principal_y])), valid & known

    def unproject(self, pixels: ArrayLike) -> tuple[Float, Bool]:
        """See `CameraModel`."""
        native = self._native(pixels) - np.array([self.principal_x, self.principal_y])
        c, d, e = self.affine
        u, v = native[..., 0], native[..., 1]
        flat = np.stack([u - d * v, c * v - e * u], -1) / (c - d * e)
        radius = np.hypot(flat[..., 0], flat[..., 1])
        if self.exact == "radius_to_angle":
            angle = _polynomial(self.radius_to_angle, radius)
            known = _grows(self.radius_to_angle, radius) & (angle <= self.max_angle_rad)
        else:
            start = (
                _polynomial(self.radius_to_angle, radius) if self.radius_to_angle else radius / self.angle_to_radius[1]
            )
            angle, known = _invert(self.angle_to_radius, radius, start, self.max_angle_rad)
        return _bend(flat, radius, angle), known


@dataclass(frozen=True)
class MountedCamera:
    """A camera on a vehicle: its model, and the pose of its optical frame in the rig."""

    name: str
    model: CameraModel
    pose_rig_to_optical: Pose

    def project_rig(self, points_rig: ArrayLike) -> tuple[Float, Bool]:
        """Pixels [...,2] of points [...,3] in the rig frame, and valid [...]."""
        return self.model.project(self.pose_rig_to_optical.inverse().transform(points_rig))


RAYS = (9, 16)
"""Rows and columns of the grid of rays that stands for a camera's calibration in an observation."""


def ray_grid(camera: MountedCamera) -> tuple[NDArray[np.float32], Bool]:
    """Where a camera looks, whatever its model: for policies that read `camera_rays`.

    Returns:
        Unit rays [9,16,3] in the rig frame through the centres of 9 x 16 equal cells of the picture, first row on top;
        and valid [9,16], False (with a ray of zeros) where the model has no ray.

    """
    rows, columns = RAYS
    y, x = np.meshgrid((np.arange(rows) + 0.5) / rows, (np.arange(columns) + 0.5) / columns, indexing="ij")
    with np.errstate(all="ignore"):  # numbers that describe no camera give no ray
        rays, valid = camera.model.unproject(np.stack([x * camera.model.width, y * camera.model.height], axis=-1))
    turned = rotate(camera.pose_rig_to_optical.quaternion_wxyz, rays)
    valid = valid & np.isfinite(turned).all(axis=-1)
    return np.where(valid[..., None], turned, 0.0).astype(np.float32), valid


# ---------------------------------------------------------------- arithmetic


def _divide(points_optical: ArrayLike) -> tuple[Float, Bool]:
    points = np.asarray(points_optical, np.float64)
    depth = points[..., 2]
    valid: Bool = depth > 1e-9
    return points[..., :2] / np.where(valid, depth, 1.0)[..., None], valid


def _rays(flat: Float) -> Float:
    ray = np.concatenate([flat, np.ones((*flat.shape[:-1], 1))], axis=-1)
    unit: Float = ray / np.linalg.norm(ray, axis=-1, keepdims=True)
    return unit


def _bend(flat: Float, radius: Float, angle: Float) -> Float:
    """Unit rays at angles from the axis, towards where `flat` points."""
    direction = flat / np.where(radius < 1e-300, 1.0, radius)[..., None]
    return np.concatenate([direction * np.sin(angle)[..., None], np.cos(angle)[..., None]], axis=-1)


def _polynomial(coefficients: tuple[float, ...], at: Float) -> Float:
    value = np.zeros_like(at)
    for coefficient in coefficients[::-1]:
        value = value * at + coefficient
    return value


def _derivative(coefficients: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(k * coefficient for k, coefficient in enumerate(coefficients))[1:]


def _grows(coefficients: tuple[float, ...], at: Float) -> Bool:
    """Whether a polynomial grows from 0 up to each value, by 64 samples of its derivative."""
    slope = _polynomial(_derivative(coefficients), at[..., None] * (np.arange(65) / 64.0))
    result: Bool = np.asarray((slope > 0.0).all(axis=-1))
    return result


def _invert(coefficients: tuple[float, ...], value: Float, start: Float, limit: float) -> tuple[Float, Bool]:
    """Where a polynomial takes values, by Newton's method; valid where it converged inside the growing part."""
    slope = _derivative(coefficients)
    at = np.maximum(np.asarray(start, np.float64), 0.0)
    for _ in range(40):
        steep = _polynomial(slope, at)
        at = np.maximum(
            at - (_polynomial(coefficients, at) - value) / np.where(np.abs(steep) < 1e-12, 1e-12, steep), 0.0
        )
    error = np.abs(_polynomial(coefficients, at) - value)
    good: Bool = (error <= 1e-9 * np.maximum(1.0, np.abs(value))) & (at <= limit) & _grows(coefficients, at)
    return np.where(good, at, 0.0), good
