"""Light and air of a scene: what colours the sun, the sky and the distance give."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.random import generator, text_seed
from alpagym_runtime.simulators.embedded.rendering.materials import mixtures

F64 = NDArray[np.float64]

WEATHER, APPEARANCE, DRESSING = 11, 12, 13
"""Streams of a scene's seed."""

KINDS = ("clear", "low_sun", "dusk", "fog")
SHARES = (0.55, 0.15, 0.15, 0.15)
"""How often each is drawn for a scene."""

SKY_STEPS = 256


class Air(NamedTuple):
    """As the kernels read it; colours are 0..255."""

    palette: NDArray[np.int64]  # [256] the ground's colours under this light: r | g << 20 | b << 40
    sky: NDArray[np.uint8]  # [256,3] by the sine of the elevation, 0 to 1
    numbers: F64  # [20], columns below


SUN_X, SUN_Y, SUN_Z, AMBIENT, SUN, FOG, GLOW, NIGHT, SHADOW = 0, 1, 2, 3, 6, 9, 12, 13, 14
DENSITY = 15
"""Columns: direction to the sun (local); ambient, sunlight and fog as three channels each; strength of the sun's glow,
whether lamps burn, how dark shadows are; fog density 1/m."""


@dataclass(frozen=True)
class Look:
    """What a scene's weather looks like before it becomes numbers."""

    kind: str
    sun_azimuth_rad: float
    sun_elevation_rad: float
    seed: int


def look_of(scene_id: str, weather: str) -> Look:
    """The look of a scene; `weather` is one of `KINDS` or "scene", which draws it from the scene's id."""
    seed = text_seed(scene_id)
    rng = generator(seed, WEATHER)
    drawn = str(rng.choice(KINDS, p=SHARES))
    azimuth, height = float(rng.uniform(-math.pi, math.pi)), float(rng.uniform(0.0, 1.0))
    kind = drawn if weather == "scene" else weather
    low, high = {"clear": (32.0, 62.0), "low_sun": (7.0, 13.0), "dusk": (4.0, 6.0), "fog": (30.0, 50.0)}[kind]
    return Look(kind, azimuth, math.radians(low + (high - low) * height), seed)


_LIGHT = {
    # ambient, sun, horizon, zenith, fog, density 1/m, glow, night, shadow
    "clear": (
        (118, 126, 140), (150, 144, 130), (206, 222, 238), (92, 146, 216), (198, 212, 226), 0.0014, 0.0, 0.0, 0.52),
    "low_sun": (
        (104, 104, 122), (190, 146, 92), (250, 216, 168), (112, 146, 200), (232, 204, 168), 0.0022, 1.0, 0.0, 0.5),
    "dusk": (
        (92, 94, 118), (30, 26, 30), (226, 158, 128), (64, 76, 122), (124, 112, 126), 0.0026, 0.25, 1.0, 0.15),
    "fog": (
        (158, 164, 168), (34, 34, 34), (196, 200, 202), (180, 186, 190), (196, 200, 202), 0.021, 0.0, 0.6, 0.12),
}  # fmt: skip


def air_of(look: Look) -> Air:
    """Colours of the ground, sky and fog under a look."""
    ambient, sun, horizon, zenith, fog, density, glow, night, shadow = (
        np.asarray(value, np.float64) for value in _LIGHT[look.kind]
    )
    rng = generator(look.seed, APPEARANCE)
    asphalt = float(rng.uniform(62.0, 96.0))
    grey = np.array([1.0, 1.0, rng.uniform(0.98, 1.06)])
    grass = np.array([rng.uniform(84, 128), rng.uniform(118, 142), rng.uniform(52, 80)])
    paving = np.array([1.0, 0.98, rng.uniform(0.90, 0.97)]) * rng.uniform(150.0, 182.0)
    wear = float(rng.uniform(0.84, 1.0))
    colours = np.stack(
        [
            asphalt * grey,
            np.array([240.0, 240.0, 236.0]) * wear,
            np.array([236.0, 184.0, 40.0]) * wear,
            grass,
            paving,
            np.array([176.0, 174.0, 168.0]),
        ]
    )
    up = math.sin(look.sun_elevation_rad)
    light = (ambient + sun * max(up, 0.0)) / 255.0 * 1.18
    lit = np.clip(mixtures() @ colours * light, 0.0, 255.0).astype(np.int64)
    flat = math.cos(look.sun_elevation_rad)
    numbers = np.zeros(20)
    numbers[SUN_X : SUN_Z + 1] = [flat * math.cos(look.sun_azimuth_rad), flat * math.sin(look.sun_azimuth_rad), up]
    numbers[AMBIENT : AMBIENT + 3], numbers[SUN : SUN + 3] = ambient / 255.0, sun / 255.0
    numbers[FOG : FOG + 3], numbers[GLOW], numbers[NIGHT] = fog, glow, night
    numbers[SHADOW], numbers[DENSITY] = shadow, density
    rise = np.linspace(0.0, 1.0, SKY_STEPS)[:, None] ** 0.62
    sky = horizon * (1.0 - rise) + zenith * rise
    # The distance fades into what stands on the horizon.
    near = np.exp(-np.linspace(0.0, 1.0, SKY_STEPS)[:, None] * 30.0)
    sky = sky * (1.0 - 0.75 * near) + fog * 0.75 * near
    palette = lit[:, 0] | (lit[:, 1] << 20) | (lit[:, 2] << 40)
    return Air(palette, np.clip(sky, 0, 255).astype(np.uint8), numbers)
