"""The ground of a scene as small tiles of palette entries, in levels of halved resolution.

Only tiles with an edge in them are kept; a tile of one material is its palette entry. Level l has texels of
2^l · `texel_m`. A road of 300 m takes about 1 MB at 0.1 m.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded.rendering.compiled import picture_kernel
from alpagym_runtime.simulators.embedded.rendering.materials import CODES, GRASS, nearest_mixture
from alpagym_runtime.simulators.embedded.rendering.rays import LEVELS

F64 = NDArray[np.float64]

TILE_BITS = 4
TILE = 1 << TILE_BITS
"""Small, so that most tiles are of one material: of 16 texels two thirds of what pictures look up, of 64 a tenth."""
EDGE = TILE + 1
"""A tile repeats its neighbours' first row and column, so that every sample lies in one tile."""

BLOCK = 512
"""Texels a side that are drawn at once."""

MARGIN = 32
REACH_M = {0.05: 120.0, 0.1: 80.0}
"""By texel: ground is drawn this far from where the ego can come; beyond it is grass."""

SHIFT = 5


@dataclass(frozen=True)
class Patch:
    """A polygon [K,2] of one material."""

    material: int
    outline: F64


class Ground(NamedTuple):
    """Tiles as the kernels read them."""

    tiles: NDArray[np.uint8]  # [n,17,17] palette entries
    cells: NDArray[np.int32]  # all levels' maps, row by row: a palette entry (< 256), or 256 + tile; GRASS
    levels: NDArray[np.int64]  # [LEVELS,3] offset in `cells`, rows, columns
    origin: F64  # [3] x, y m of the first texel's corner, texel m

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self.tiles.nbytes + self.cells.nbytes


def strip(line: F64, width_m: float, left_m: float = 0.0) -> F64:
    """The outline [2K,2] of a band of a width along a polyline [K,2], its middle `left_m` to the left."""
    points = np.asarray(line, np.float64)[:, :2]
    ahead = np.gradient(points, axis=0) if len(points) > 2 else np.repeat(points[1:] - points[:1], 2, axis=0)
    normal = np.stack([-ahead[:, 1], ahead[:, 0]], axis=1)
    normal /= np.maximum(np.hypot(normal[:, 0], normal[:, 1]), 1e-9)[:, None]
    outer, inner = points + normal * (left_m + width_m / 2.0), points + normal * (left_m - width_m / 2.0)
    return np.concatenate([outer, inner[::-1]])


def draw_ground(patches: Sequence[Patch], way: F64, texel_m: float) -> Ground:
    """Tiles of patches, drawn in their order on grass.

    Args:
        patches: what lies on the ground.
        way: [P,2] m where the ego can come.
        texel_m: the finest texel, a key of `REACH_M`.

    """
    reach = REACH_M[texel_m]
    coarsest = TILE * texel_m * 2 ** (LEVELS - 1)
    boxes = np.array([[*p.outline.min(axis=0), *p.outline.max(axis=0)] for p in patches]).reshape(-1, 4)
    low, high = way.min(axis=0) - reach, way.max(axis=0) + reach
    if len(boxes):
        low, high = np.maximum(low, boxes[:, :2].min(axis=0) - 1.0), np.minimum(high, boxes[:, 2:].max(axis=0) + 1.0)
    x0, y0 = np.floor(low / coarsest) * coarsest
    columns, rows = np.maximum(np.ceil((high - [x0, y0]) / coarsest).astype(int), 1) * 2 ** (LEVELS - 1)
    # Entries of the coarser levels are collected whole; the two finest are cut block by block.
    whole = [
        np.full((rows * TILE >> level, columns * TILE >> level), GRASS, np.uint8) if level > 1 else None
        for level in range(LEVELS)
    ]
    maps = [np.full((rows >> level, columns >> level), GRASS, np.int32) for level in range(LEVELS)]
    kept: list[NDArray[np.uint8]] = []
    count = 0
    lut = nearest_mixture()
    per_block = BLOCK // TILE
    block_m = BLOCK * texel_m
    for by in range(rows // per_block):
        for bx in range(columns // per_block):
            corner = np.array([x0 + bx * block_m, y0 + by * block_m])
            pad = MARGIN * texel_m
            touched = np.flatnonzero(
                (boxes[:, 0] < corner[0] + block_m + pad)
                & (boxes[:, 2] > corner[0] - pad)
                & (boxes[:, 1] < corner[1] + block_m + pad)
                & (boxes[:, 3] > corner[1] - pad)
            )
            middle = corner + block_m / 2.0
            away = np.hypot(way[:, 0] - middle[0], way[:, 1] - middle[1]).min()
            if not len(touched) or away > reach + block_m * 0.7:
                continue
            canvas: Any = _draw_block([patches[i] for i in touched], corner - pad, texel_m)
            for level in range(LEVELS):
                if level:
                    canvas = cv2.resize(canvas, None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA)
                entries = _entries(canvas, lut)
                margin, size, there = MARGIN >> level, BLOCK >> level, whole[level]
                if there is not None:
                    inner = entries[margin : margin + size, margin : margin + size]
                    there[by * size : (by + 1) * size, bx * size : (bx + 1) * size] = inner
                    continue
                side = size // TILE
                part = entries[margin : margin + size + 1, margin : margin + size + 1]
                cells = maps[level][by * side : (by + 1) * side, bx * side : (bx + 1) * side]
                kept.append(cut_tiles(part, cells, count))
                count += len(kept[-1])
    for level in range(2, LEVELS):
        entries = np.pad(whole[level], ((0, 1), (0, 1)), constant_values=GRASS)  # type: ignore[arg-type]
        kept.append(cut_tiles(entries, maps[level], count))
        count += len(kept[-1])
    sizes = np.cumsum([0] + [part.size for part in maps])
    return Ground(
        np.concatenate(kept),
        np.concatenate([*(part.ravel() for part in maps), np.array([GRASS], np.int32)]),
        np.array([(start, *part.shape) for start, part in zip(sizes[:-1], maps, strict=True)], np.int64),
        np.array([x0, y0, texel_m]),
    )


MEADOW = np.full((BLOCK + 2 * MARGIN, BLOCK + 2 * MARGIN, 3), CODES[GRASS].astype(np.uint8))


def _draw_block(patches: Sequence[Patch], corner: F64, texel_m: float) -> NDArray[np.uint8]:
    """[BLOCK + 2 MARGIN]² codes; rows run north."""
    canvas = MEADOW.copy()
    for patch in patches:
        # OpenCV's pixel centres are whole numbers, ours lie at halves.
        place = (patch.outline - corner) / texel_m - 0.5
        points = np.round(np.clip(place, -20000.0, 20000.0) * (1 << SHIFT)).astype(np.int32)
        cv2.fillPoly(canvas, [points], CODES[patch.material].tolist(), cv2.LINE_AA, SHIFT)
    return canvas


@picture_kernel
def _entries(canvas, lut):
    out = np.empty(canvas.shape[:2], np.uint8)
    for y in range(canvas.shape[0]):
        for x in range(canvas.shape[1]):
            r, g, b = canvas[y, x, 0] >> 3, canvas[y, x, 1] >> 3, canvas[y, x, 2] >> 3
            out[y, x] = lut[(r << 10) | (g << 5) | b]
    return out


@picture_kernel
def cut_tiles(entries, cells, known):
    """Tiles [*,EDGE,EDGE] of entries [m*TILE+1,n*TILE+1] that are of several materials, numbered from `known` on.

    `cells` [m,n] become an entry, or 256 + a tile's number.
    """
    more = 0
    for ty in range(cells.shape[0]):
        for tx in range(cells.shape[1]):
            first = entries[ty * TILE, tx * TILE]
            cells[ty, tx] = first
            for y in range(EDGE):
                for x in range(EDGE):
                    if entries[ty * TILE + y, tx * TILE + x] != first:
                        cells[ty, tx] = 256
            if cells[ty, tx] == 256:
                cells[ty, tx] = 256 + known + more
                more += 1
    tiles = np.empty((more, EDGE, EDGE), np.uint8)
    for ty in range(cells.shape[0]):
        for tx in range(cells.shape[1]):
            n = cells[ty, tx] - 256 - known
            if n >= 0:
                for y in range(EDGE):
                    for x in range(EDGE):
                        tiles[n, y, x] = entries[ty * TILE + y, tx * TILE + x]
    return tiles
