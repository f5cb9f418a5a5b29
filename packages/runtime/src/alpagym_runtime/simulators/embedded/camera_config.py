"""Options of the embedded world's cameras: where they are mounted, how they look, how pictures travel."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Any

from alpagym_plugins import ConfigError, check_choice, check_range

MODELS = ("pinhole", "opencv", "fisheye", "ftheta")
WEATHERS = ("scene", "clear", "low_sun", "dusk", "fog")
STEP_US = 100_000
BRAKES_MPS2 = 0.6
"""Deceleration from which brake lamps shine."""


@dataclass
class MountConfig:
    """A camera on the ego.

    Attributes:
        model: pinhole | opencv (rational distortion) | fisheye | ftheta.
        fov_deg: horizontal field of view; counts unless `focal_px` is given.
        x_m, y_m, z_m: the optical centre in the rig frame.
        yaw_deg, pitch_deg, roll_deg: to the left, up, and clockwise as the driver sees it.
        width, height: of the sensor that the calibration is for; 0: of the pictures that the policy asks for.
        focal_px: fx, fy on that sensor; empty: from `fov_deg`, square pixels.
        principal_px: cx, cy; empty: the middle.
        distortion: opencv: k1, k2, p1, p2, k3, k4, k5, k6, s1, s2, s3, s4 (OpenCV's order); fisheye: k1 to k4;
            ftheta: the polynomial from angle (rad) to radius (px), rising power, empty: equidistant.
        max_angle_deg: fisheye and ftheta see nothing beyond this angle to the axis.
        period_us: time between frames, a multiple of 100,000; frame k is taken at k · period_us of the scene's clock.

    """

    model: str = "pinhole"
    fov_deg: float = 85.0
    x_m: float = 1.7
    y_m: float = 0.0
    z_m: float = 1.45
    yaw_deg: float = 0.0
    pitch_deg: float = 0.0
    roll_deg: float = 0.0
    width: int = 0
    height: int = 0
    focal_px: list[float] = field(default_factory=list)
    principal_px: list[float] = field(default_factory=list)
    distortion: list[float] = field(default_factory=list)
    max_angle_deg: float = 100.0
    period_us: int = STEP_US

    def __post_init__(self) -> None:
        check_choice("model", self.model, MODELS)
        check_range("fov_deg", self.fov_deg, above=1.0, maximum=170.0 if self.model in ("pinhole", "opencv") else 220.0)
        for key in ("x_m", "y_m"):
            check_range(key, getattr(self, key), minimum=-20.0, maximum=20.0)
        check_range("z_m", self.z_m, minimum=0.2, maximum=20.0)
        for key in ("yaw_deg", "pitch_deg", "roll_deg"):
            check_range(key, getattr(self, key), minimum=-360.0, maximum=360.0)
        for key in ("width", "height"):
            check_range(key, getattr(self, key), minimum=0, maximum=8192)
        if (self.width == 0) != (self.height == 0):
            raise ConfigError(f"width and height go together, got {self.width} x {self.height}", key="width")
        if (self.focal_px or self.principal_px or (self.model == "ftheta" and self.distortion)) and not self.width:
            raise ConfigError("a calibration in pixels needs the sensor's width and height", key="width")
        for key, count in (("focal_px", 2), ("principal_px", 2)):
            if getattr(self, key) and len(getattr(self, key)) != count:
                raise ConfigError(f"needs {count} numbers or none, got {getattr(self, key)}", key=key)
        most = {"pinhole": 0, "opencv": 12, "fisheye": 4, "ftheta": 16}[self.model]
        if len(self.distortion) > most:
            raise ConfigError(
                f"{self.model} takes at most {most} numbers, got {len(self.distortion)}", key="distortion"
            )
        check_range("max_angle_deg", self.max_angle_deg, above=1.0, maximum=179.0)
        check_range("period_us", self.period_us, minimum=STEP_US, maximum=10_000_000)
        if self.period_us % STEP_US:
            raise ConfigError(
                f"must be a multiple of {STEP_US} (the world's own step), got {self.period_us}", key="period_us"
            )


def _pai(fov_deg: float, yaw_deg: float, x_m: float, y_m: float, z_m: float, pitch_deg: float = 0.0) -> MountConfig:
    return MountConfig(
        "ftheta", fov_deg, x_m, y_m, z_m, yaw_deg, pitch_deg, width=1920, height=1080, max_angle_deg=fov_deg * 0.62
    )


def presets() -> dict[str, MountConfig]:
    """Cameras that can be asked for by name alone; PAI's are nominal: equidistant, without a car's own numbers."""
    return {
        "front": MountConfig(),
        "front_wide": MountConfig(fov_deg=120.0),
        "left": MountConfig(yaw_deg=75.0, x_m=1.9, y_m=0.9, z_m=1.1),
        "right": MountConfig(yaw_deg=-75.0, x_m=1.9, y_m=-0.9, z_m=1.1),
        "rear": MountConfig(yaw_deg=180.0, x_m=-0.8, z_m=1.2, fov_deg=70.0),
        "camera_front_wide_120fov": _pai(120.0, 0.0, 1.75, 0.0, 1.45),
        "camera_front_tele_30fov": _pai(30.0, 0.0, 1.78, 0.05, 1.45),
        "camera_cross_left_120fov": _pai(120.0, 70.0, 2.0, 0.95, 0.95),
        "camera_cross_right_120fov": _pai(120.0, -70.0, 2.0, -0.95, 0.95),
    }


PAI_CAMERAS = (
    "camera_cross_left_120fov",
    "camera_front_wide_120fov",
    "camera_cross_right_120fov",
    "camera_front_tele_30fov",
)


@dataclass
class CamerasConfig:
    """How the world is seen; nothing is rendered unless the policy asks for cameras.

    Attributes:
        mounts: cameras by name, beside the presets (`front`, `front_wide`, `left`, `right`, `rear` and PAI's four).
        encoding: raw | jpeg95: pictures as they are, or as a JPEG of quality 95 shows them (its bytes can be stored).
        weather: scene (drawn for each scene) | clear | low_sun | dusk | fog.
        antialias: samples a pixel and direction for objects, 1 to 4; 0: 2 up to 64 x 128 px, else 1.
        threads: that render beside each other; the pictures do not depend on it.
        memory_mb: bound on what is kept of scenes (ground and what stands on it), shared by all simulators.

    """

    mounts: dict[str, MountConfig] = field(default_factory=dict)
    encoding: str = "raw"
    weather: str = "scene"
    antialias: int = 0
    threads: int = 1
    memory_mb: int = 1024

    def __post_init__(self) -> None:
        check_choice("encoding", self.encoding, ("raw", "jpeg95"))
        check_choice("weather", self.weather, WEATHERS)
        check_range("antialias", self.antialias, minimum=0, maximum=4)
        check_range("threads", self.threads, minimum=1, maximum=256)
        check_range("memory_mb", self.memory_mb, minimum=16, maximum=1_000_000)

    def mount(self, name: str) -> MountConfig:
        """A camera by name; `front_wide_120fov` is `camera_front_wide_120fov`, as the PAI dataset calls it, too.

        Raises:
            ConfigError: neither mounted nor a preset.

        """
        known = presets() | self.mounts
        if name not in known and f"camera_{name}" in known:
            name = f"camera_{name}"
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(known))}"
            raise ConfigError(f"no camera {name!r}; {hint} Others go under simulator.cameras.mounts", key="policy")
        return dataclasses.replace(known[name])


def check_cameras(config: CamerasConfig, spec: Any) -> None:
    """Whether this world can render what a policy asks for, before anything starts.

    Raises:
        ConfigError: an unknown camera, a size or number of frames out of range, times off the world's grid.

    """
    for name, (height, width) in spec.cameras.items():
        config.mount(name)
        if not (8 <= height <= 4096 and 8 <= width <= 4096):
            raise ConfigError(f"camera {name!r}: {height} x {width} px; 8 to 4096 can be rendered", key="policy")
    if not 1 <= spec.frames <= 64:
        raise ConfigError(f"the policy asks for {spec.frames} frames a camera; 1 to 64 are possible", key="policy")
    if spec.frame_step_us % STEP_US or spec.frame_step_us < STEP_US:
        raise ConfigError(
            f"the policy's frame_step_us is {spec.frame_step_us}; this world needs a multiple of {STEP_US}",
            key="policy",
        )
