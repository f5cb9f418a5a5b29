"""Tiles of 64 x 64 texels for everything that stands on the ground, drawn once.

A texel is r, g, b and a code that says how it is lit; levels of halved resolution lie behind each other.
"""

from __future__ import annotations

from functools import lru_cache

import cv2
import numpy as np
from numpy.typing import NDArray

NAMES = (
    "plain", "facade", "facade_wide", "facade_tall", "shop", "car_side", "car_front", "car_rear", "glass", "glass_side",
    "bus_side", "bus_front", "truck_side", "bike", "head", "lamp_red", "lamp_yellow", "lamp_green", "tree", "tree_wide",
    "tree_fir", "stripes", "truck_rear", "wheel_side",
)  # fmt: skip
"""What there is; `index` gives the number."""

NOTHING, TINTED, WINDOW, HEADLIGHT, TAIL, LAMP, OWN = 0, 128, 200, 224, 232, 240, 255
"""Codes: see through; multiplied by the object's colour; a window, perhaps lit at night; a car's lamps; a lamp that
always shines; the texel's own colour."""

SIZE = 64
LEVELS = 7
STRIDE = 2 * SIZE
TEXTURE_SIZE = SIZE * STRIDE
"""Texels of a row, and of a texture, as kernels see them: levels lie beside each other."""


def index(name: str) -> int:
    """Number of a texture."""
    return NAMES.index(name)


def _own(tile: NDArray[np.uint8], y: slice, x: slice, colour: tuple[int, int, int], code: int = OWN) -> None:
    tile[y, x, :3] = colour
    tile[y, x, 3] = code


def _disc(tile: NDArray[np.uint8], x: int, y: int, radius: int, colour: tuple[int, int, int], code: int = OWN) -> None:
    yy, xx = np.mgrid[:SIZE, :SIZE]
    there = (xx + 0.5 - x) ** 2 + (yy + 0.5 - y) ** 2 <= radius**2
    tile[there] = (*colour, code)


def _wheels(tile: NDArray[np.uint8], places: tuple[int, ...], radius: int) -> None:
    """Discs that stand on the lower edge; below the sill the tile is open."""
    for x in places:
        _disc(tile, x, SIZE - radius, radius, (24, 24, 26))
        _disc(tile, x, SIZE - radius, max(radius // 2, 2), (128, 130, 134))


def _facade(rng: np.random.Generator, x: tuple[int, int], y: tuple[int, int]) -> NDArray[np.uint8]:
    tile = _blank()
    tile[..., :3] -= rng.integers(0, 16, (SIZE, SIZE, 1)).astype(np.uint8)
    _own(tile, slice(y[0] - 2, y[1] + 3), slice(x[0] - 2, x[1] + 2), (212, 210, 204))
    _own(tile, slice(*y), slice(*x), (74, 96, 122), WINDOW)
    middle = (x[0] + x[1]) // 2
    _own(tile, slice(*y), slice(middle - 1, middle + 1), (206, 206, 202))
    tile[y[1] + 1 : y[1] + 4, x[0] - 3 : x[1] + 3] = (190, 186, 180, OWN)
    return tile


def _blank(code: int = TINTED) -> NDArray[np.uint8]:
    tile = np.full((SIZE, SIZE, 4), 255, np.uint8)
    tile[..., 3] = code
    return tile


def _leaves(rng: np.random.Generator, tile: NDArray[np.uint8], at: NDArray[np.float64], radius: float) -> None:
    """A crown of discs; darker below, and to the right of the light."""
    for x, y in at:
        shade = int(rng.integers(-18, 18)) + int((26.0 - y) * 0.9)
        colour = (int(58 + shade * 0.6), int(112 + shade), int(44 + shade * 0.5))
        _disc(tile, int(x), int(y), int(rng.integers(3, max(int(radius), 4))), tuple(np.clip(colour, 0, 255).tolist()))


def _trees(rng: np.random.Generator) -> dict[str, NDArray[np.uint8]]:
    trees = {}
    for name, (wide, tall, middle) in {"tree": (20, 19, 23), "tree_wide": (27, 16, 22)}.items():
        tile = np.zeros((SIZE, SIZE, 4), np.uint8)
        _own(tile, slice(34, SIZE), slice(30, 35), (88, 66, 46))
        for k in range(5):
            cv2.line(tile, (32, 50 - 2 * k), (int(32 + (k - 2) * 6), 30), (88, 66, 46, OWN), 2)
        angle, reach = rng.uniform(0, 2 * np.pi, 190), np.sqrt(rng.random(190))
        order = np.argsort(reach * np.sin(angle))[::-1]
        spots = np.stack([32 + wide * reach * np.cos(angle), middle + tall * reach * np.sin(angle)], axis=1)[order]
        _leaves(rng, tile, spots, 6)
        trees[name] = tile
    tile = np.zeros((SIZE, SIZE, 4), np.uint8)
    _own(tile, slice(50, SIZE), slice(30, 35), (84, 62, 44))
    for y in range(56, 2, -1):
        half = 2 + (y - 2) * 0.34 * (0.75 + 0.25 * ((y * 7) % 11) / 11.0)
        shade = int(rng.integers(-10, 10))
        _own(tile, slice(y, y + 1), slice(int(32 - half), int(33 + half)), (40, 84 + shade, 50))
    trees["tree_fir"] = tile
    return trees


def _cars() -> dict[str, NDArray[np.uint8]]:
    side = _blank()
    side[0:5, :, :3] = 235
    for x in (31, 32):
        side[6:48, x, :3] = 150
    _own(side, slice(16, 19), slice(22, 28), (60, 60, 62))
    _own(side, slice(16, 19), slice(42, 48), (60, 60, 62))
    side[44:50, :, :3] = 120
    side[50:, :] = 0
    _own(side, slice(8, 16), slice(0, 3), (235, 230, 210), HEADLIGHT)
    _own(side, slice(6, 18), slice(61, 64), (150, 24, 22), TAIL)
    for x in (12, 51):
        _disc(side, x, 48, 17, (30, 30, 32))
    side[50:, :] = np.where(side[50:, :, 3:] == OWN, side[50:, :], 0)
    _wheels(side, (12, 51), 15)
    front, rear = _blank(), _blank()
    _own(front, slice(8, 24), slice(2, 17), (238, 236, 220), HEADLIGHT)
    _own(front, slice(8, 24), slice(47, 62), (238, 236, 220), HEADLIGHT)
    _own(front, slice(12, 34), slice(20, 44), (34, 34, 36))
    _own(front, slice(38, 46), slice(24, 40), (226, 226, 220))
    _own(front, slice(50, 64), slice(0, 64), (40, 40, 42))
    _own(rear, slice(6, 22), slice(1, 16), (150, 22, 20), TAIL)
    _own(rear, slice(6, 22), slice(48, 63), (150, 22, 20), TAIL)
    rear[4:5, :, :3] = 170
    _own(rear, slice(26, 37), slice(22, 42), (226, 226, 218))
    _own(rear, slice(50, 64), slice(0, 64), (40, 40, 42))
    glass, glass_side = _blank(), _blank()
    _own(glass, slice(4, 62), slice(3, 61), (44, 56, 70))
    for k in range(18):
        glass[6 + 2 * k : 8 + 2 * k, 8 + k : 20 + k, :3] += np.uint8(16)
    _own(glass_side, slice(5, 62), slice(2, 30), (44, 56, 70))
    _own(glass_side, slice(5, 62), slice(34, 62), (44, 56, 70))
    return {"car_side": side, "car_front": front, "car_rear": rear, "glass": glass, "glass_side": glass_side}


def _large() -> dict[str, NDArray[np.uint8]]:
    bus, bus_front, truck, wheel = _blank(), _blank(), _blank(), _blank()
    for k in range(6):
        _own(bus, slice(8, 30), slice(3 + 10 * k, 11 + 10 * k), (48, 60, 74))
    for k in (12, 43):
        _own(bus, slice(10, 54), slice(k, k + 7), (56, 68, 80))
    bus[34:37, :, :3] = 215
    truck[::6, :, :3] = 228
    for tile in (bus, truck):
        _own(tile, slice(54, 58), slice(0, 64), (46, 46, 48))
        tile[58:, :] = 0
        _wheels(tile, (11, 48, 56), 5)
    rear = _blank()
    for x in (31, 32):
        rear[2:52, x, :3] = 150
    for columns in (slice(2, 14), slice(50, 62)):
        _own(rear, slice(49, 54), columns, (150, 22, 20), TAIL)
    _own(rear, slice(55, 64), slice(0, 64), (40, 40, 42))
    _own(bus_front, slice(6, 34), slice(4, 60), (46, 58, 72))
    _own(bus_front, slice(46, 54), slice(4, 14), (238, 236, 220), HEADLIGHT)
    _own(bus_front, slice(46, 54), slice(50, 60), (238, 236, 220), HEADLIGHT)
    _own(bus_front, slice(57, 64), slice(0, 64), (40, 40, 42))
    wheel[40:, :] = 0
    _wheels(wheel, (14, 50), 12)
    return {"bus_side": bus, "bus_front": bus_front, "truck_side": truck, "truck_rear": rear, "wheel_side": wheel}


def _small() -> dict[str, NDArray[np.uint8]]:
    bike = np.zeros((SIZE, SIZE, 4), np.uint8)
    for x in (14, 50):
        cv2.circle(bike, (x, 47), 14, (26, 26, 28, OWN), 3)
    for a, b in (((14, 47), (28, 26)), ((28, 26), (44, 26)), ((44, 26), (30, 47)), ((30, 47), (14, 47)),
                 ((28, 26), (30, 47)), ((50, 47), (44, 20)), ((40, 18), (48, 18)), ((23, 20), (31, 20))):  # fmt: skip
        cv2.line(bike, a, b, (255, 255, 255, TINTED), 3)
    head = np.full((SIZE, SIZE, 4), (214, 168, 138, OWN), np.uint8)
    head[:24] = (255, 255, 255, TINTED)
    stripes = np.full((SIZE, SIZE, 4), (226, 226, 222, OWN), np.uint8)
    yy, xx = np.mgrid[:SIZE, :SIZE]
    stripes[((xx + yy) // 12) % 2 == 0] = (206, 52, 38, OWN)
    lamps = {}
    colours = {"lamp_red": (255, 52, 40), "lamp_yellow": (255, 196, 44), "lamp_green": (56, 255, 128)}
    for k, (name, colour) in enumerate(colours.items()):
        tile = np.full((SIZE, SIZE, 4), (30, 30, 30, OWN), np.uint8)
        for j, dark in enumerate(((70, 20, 18), (70, 56, 18), (16, 66, 36))):
            _disc(tile, 32, 11 + 21 * j, 9, colour if j == k else dark, LAMP if j == k else OWN)
        lamps[name] = tile
    return {"bike": bike, "head": head, "stripes": stripes} | lamps


@lru_cache(maxsize=1)
def textures() -> NDArray[np.uint8]:
    """[T,5461,4] uint8: r, g, b, code of every level, the finest first."""
    rng = np.random.default_rng(0)
    shop = _facade(rng, (5, 59), (12, 58))
    shop[4:11, :] = (150, 72, 58, OWN)
    tiles = {
        "plain": _blank(),
        "facade": _facade(rng, (14, 50), (14, 48)),
        "facade_wide": _facade(rng, (5, 59), (18, 46)),
        "facade_tall": _facade(rng, (20, 44), (8, 56)),
        "shop": shop,
    }
    tiles |= _cars() | _large() | _small() | _trees(rng)
    return np.stack([_with_levels(tiles[name]) for name in NAMES])


@lru_cache(maxsize=1)
def texels() -> NDArray[np.uint32]:
    """[T * TEXTURE_SIZE] r | g << 8 | b << 16 | code << 24; level k's rows begin at column 128 - (128 >> k)."""
    flat = np.ascontiguousarray(textures()).view(np.uint32)[..., 0]
    out = np.zeros((len(flat), SIZE, STRIDE), np.uint32)
    first = 0
    for level in range(LEVELS):
        size, column = SIZE >> level, STRIDE - (STRIDE >> level)
        out[:, :size, column : column + size] = flat[:, first : first + size * size].reshape(-1, size, size)
        first += size * size
    return out.ravel()


def _with_levels(tile: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[5461,4]: a coarser texel has the commonest code of its four and the mean colour of those that share it."""
    parts = [tile.reshape(-1, 4)]
    while len(tile) > 1:
        four = np.stack([tile[a::2, b::2] for a in (0, 1) for b in (0, 1)]).astype(np.int64)
        votes = (four[:, None, ..., 3] == four[None, ..., 3]).sum(axis=1)
        chosen = np.take_along_axis(four[..., 3], votes.argmax(axis=0)[None], axis=0)[0]
        same = (four[..., 3] == chosen)[..., None]
        colour = (four[..., :3] * same).sum(axis=0) // same.sum(axis=0)
        tile = np.concatenate([colour, chosen[..., None]], axis=-1).astype(np.uint8)
        parts.append(tile.reshape(-1, 4))
    return np.concatenate(parts)
