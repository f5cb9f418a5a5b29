"""What road users and signals look like: tables of quads, scaled to a road user's length, width and height.

A row is a quad as seen from its visible side: an upper left corner, an edge to the right and one down. Along each axis
a coordinate is a share of the size plus metres, so a car stretches and a person does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded.rendering import textures
from alpagym_runtime.simulators.embedded.rendering.scenery import (
    CAR,
    LARGE,
    OBSTACLE,
    PERSON,
    POLE_M,
    SIGNAL,
    TWO_WHEELER,
)
from alpagym_runtime.simulators.embedded.scene import KINDS

F64 = NDArray[np.float64]

# Columns: corner, right edge, down edge, each x, y, z as share and metres; then
CORNER, RIGHT, DOWN = 0, 6, 12
LOW, HIGH, TEXTURE, FLIP, TINT, CLASS, SWING = range(18, 25)
RED, GREEN, BLUE = 25, 26, 27
COLUMNS = 28

PAINT, BODY, HAIR, FIXED = range(4)
"""Where a row's colour comes from: the looks' three colours, or its own."""

LAMPS = -1
"""Texture of a signal's front: the state's."""

SIGNAL_HEAD = len(KINDS)
"""Model of a signal head, behind the kinds of road users."""

HEIGHTS = (1.38, 3.4, 3.0, 1.76, 1.76, 1.74, 1.0, POLE_M + 1.0)
"""m by model; cars vary by up to `TALLER_CARS_M`."""

TALLER_CARS_M = 0.34

Point = tuple[float, float]
"""A share of the size and metres."""


def _row(
    corner: tuple[Point, Point, Point],
    right: tuple[Point, Point, Point],
    down: tuple[Point, Point, Point],
    texture: str,
    kind: int,
    tint: int | tuple[float, float, float] = PAINT,
    *,
    flip: bool = False,
    taper: tuple[float, float] = (0.0, 0.0),
    swing: float = 0.0,
) -> list[float]:
    rgb = tint if isinstance(tint, tuple) else (0.0, 0.0, 0.0)
    number = LAMPS if texture == "lamps" else textures.index(texture)
    source = FIXED if isinstance(tint, tuple) else tint
    flat = [value for point in (*corner, *right, *down) for value in point]
    return [*flat, *taper, number, -1.0 if flip else 1.0, source, kind, swing, *rgb]


def _box(
    x: tuple[Point, Point],
    y: tuple[Point, Point],
    z: tuple[Point, Point],
    front: str,
    rear: str,
    side: str,
    top: str,
    kind: int,
    tint: int | tuple[float, float, float] = PAINT,
    swing: float = 0.0,
) -> list[list[float]]:
    """Five sides of a box between lower and upper bounds."""

    def span(a: Point, b: Point) -> Point:
        return b[0] - a[0], b[1] - a[1]

    zero: Point = (0.0, 0.0)
    (x0, x1), (y0, y1), (z0, z1) = x, y, z
    falls = (zero, zero, span(z1, z0))
    options = {"kind": kind, "tint": tint, "swing": swing}
    return [
        _row((x1, y0, z1), (zero, span(y0, y1), zero), falls, front, **options),  # type: ignore[arg-type]
        _row((x0, y1, z1), (zero, span(y1, y0), zero), falls, rear, **options),  # type: ignore[arg-type]
        _row((x1, y1, z1), (span(x1, x0), zero, zero), falls, side, **options),  # type: ignore[arg-type]
        _row((x0, y0, z1), (span(x0, x1), zero, zero), falls, side, flip=True, **options),  # type: ignore[arg-type]
        _row((x0, y1, z1), (span(x0, x1), zero, zero), (zero, span(y1, y0), zero), top, **options),  # type: ignore[arg-type]
    ]


def _share(a: float, b: float) -> tuple[Point, Point]:
    return (a, 0.0), (b, 0.0)


def _metres(a: float, b: float) -> tuple[Point, Point]:
    return (0.0, a), (0.0, b)


def _car() -> list[list[float]]:
    """Body with open wheel arches, bonnet and boot, and a cabin with sloped glass."""
    waist, sill, wide = 0.58, 0.13, 0.45
    x, y = _share(-0.5, 0.5), _share(-0.5, 0.5)
    rows = _box(x, y, _share(sill, waist), "car_front", "car_rear", "car_side", "plain", CAR)
    # The sides reach down to the ground, for the wheels.
    for row in rows[2:4]:
        row[DOWN + 4] = -waist
    b0, b1, t0, t1 = -0.47, 0.24, -0.33, 0.06
    zero: Point = (0.0, 0.0)
    across, back = ((0.0, 0.0), (2.0 * wide, 0.0), zero), ((0.0, 0.0), (-2.0 * wide, 0.0), zero)
    drop: Point = (waist - 1.0, 0.0)
    ahead, behind = (b1 - t1) / (b1 - b0), (t0 - b0) / (b1 - b0)
    top: Point = (1.0, 0.0)
    return [
        *rows,
        _row(((t1, 0.0), (-wide, 0.0), top), across, ((b1 - t1, 0.0), zero, drop), "glass", CAR),
        _row(((t0, 0.0), (wide, 0.0), top), back, ((b0 - t0, 0.0), zero, drop), "glass", CAR),
        _row(((b1, 0.0), (wide, 0.0), top), ((b0 - b1, 0.0), zero, zero), (zero, zero, drop), "glass_side", CAR,
             taper=(ahead, behind)),
        _row(((b0, 0.0), (-wide, 0.0), top), ((b1 - b0, 0.0), zero, zero), (zero, zero, drop), "glass_side", CAR,
             flip=True, taper=(behind, ahead)),
        _row(((t0, 0.0), (wide, 0.0), top), ((t1 - t0, 0.0), zero, zero), (zero, (-2.0 * wide, 0.0), zero),
             "plain", CAR),
    ]  # fmt: skip


def _person(kind: int, lift: float, walks: bool) -> list[list[float]]:
    rows = []
    for side in (-1.0, 1.0):
        y = _metres(side * 0.1 - 0.085, side * 0.1 + 0.085)
        z = _metres(lift, lift + 0.86)
        rows += _box(_metres(-0.1, 0.1), y, z, "plain", "plain", "plain", "plain", kind, PAINT, side if walks else 0.0)
    rows += _box(
        _metres(-0.14, 0.14), _metres(-0.26, 0.26), _metres(lift + 0.84, lift + 1.46),
        "plain", "plain", "plain", "plain", kind, BODY,
    )  # fmt: skip
    return rows + _box(
        _metres(-0.11, 0.11), _metres(-0.1, 0.1), _metres(lift + 1.46, lift + 1.74),
        "head", "plain", "head", "plain", kind, HAIR,
    )  # fmt: skip


def _two_wheeler(thick_m: float, tall_m: float) -> list[list[float]]:
    """The frame is a sheet seen from both sides; a narrow box keeps it visible from behind."""
    zero: Point = (0.0, 0.0)
    falls = (zero, zero, (0.0, -1.05))
    sheet = [
        _row(((0.5, 0.0), zero, (0.0, 1.05)), ((-1.0, 0.0), zero, zero), falls, "bike", TWO_WHEELER, flip=True),
        _row(((-0.5, 0.0), zero, (0.0, 1.05)), ((1.0, 0.0), zero, zero), falls, "bike", TWO_WHEELER),
    ]
    half = thick_m / 2.0
    core = _box(
        _share(-0.34, 0.34), _metres(-half, half), _metres(0.05, tall_m),
        "plain", "plain", "wheel_side", "plain", TWO_WHEELER, (0.16, 0.16, 0.17),
    )  # fmt: skip
    return sheet + core + _person(TWO_WHEELER, 0.18, False)


def _truck() -> list[list[float]]:
    y = _share(-0.5, 0.5)
    cab = _box(
        ((0.5, -2.2), (0.5, 0.0)), y, _metres(0.25, 2.7), "bus_front", "plain", "glass_side", "plain", LARGE, PAINT
    )
    load = ((-0.5, 0.0), (0.5, -2.4))
    return cab + _box(
        load, y, _metres(0.0, 3.4), "plain", "truck_rear", "truck_side", "plain", LARGE, (0.82, 0.82, 0.80)
    )


@lru_cache(maxsize=1)
def models() -> tuple[F64, NDArray[np.int64]]:
    """Rows [R,28] of all models, and each model's first and last row [M,2], by kind of road user, then the signal's."""
    x, y = _share(-0.5, 0.5), _share(-0.5, 0.5)
    parts: Sequence[list[list[float]]] = (
        _car(),
        _truck(),
        _box(x, y, _share(0.0, 1.0), "bus_front", "truck_rear", "bus_side", "plain", LARGE),
        _two_wheeler(0.28, 0.85),
        _two_wheeler(0.08, 0.6),
        _person(PERSON, 0.0, True),
        _box(x, y, _share(0.0, 1.0), "stripes", "stripes", "stripes", "plain", OBSTACLE, (0.8, 0.8, 0.78)),
        # Traffic looks along a head's yaw: its lamps are on the rear.
        _box(_metres(-0.15, 0.15), _metres(-0.21, 0.21), _metres(POLE_M, POLE_M + 1.0),
             "plain", "lamps", "plain", "plain", SIGNAL, (0.13, 0.13, 0.13)),
    )  # fmt: skip
    bounds = np.cumsum([0] + [len(part) for part in parts])
    rows = np.array([row for part in parts for row in part])
    return rows, np.stack([bounds[:-1], bounds[1:]], axis=1).astype(np.int64)
