"""What a picture's pixels show, as numbers: depth, instance and semantic class, at the pixels' centres."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded.rendering.compiled import picture_kernel
from alpagym_runtime.simulators.embedded.rendering.ground import TILE
from alpagym_runtime.simulators.embedded.rendering.materials import (
    ASPHALT,
    GRASS,
    KERB,
    MATERIALS,
    SIDEWALK,
    WHITE,
    YELLOW,
    mixtures,
)
from alpagym_runtime.simulators.embedded.rendering.quads import CLASS, NAME, build
from alpagym_runtime.simulators.embedded.rendering.raster import FAR, collect, find
from alpagym_runtime.simulators.embedded.rendering.rays import NO_GROUND
from alpagym_runtime.simulators.embedded.rendering.scenery import MARKING, ROAD, SKY, TERRAIN, WALK
from alpagym_runtime.simulators.embedded.rendering.weather import SUN_X, SUN_Z


@lru_cache(maxsize=1)
def ground_classes() -> NDArray[np.int64]:
    """[256] semantic class of each entry of the ground's palette: its commonest material's; paint from 40 % on."""
    of = np.zeros(len(MATERIALS), np.int64)
    of[[ASPHALT, WHITE, YELLOW, GRASS, SIDEWALK, KERB]] = ROAD, MARKING, MARKING, TERRAIN, WALK, WALK
    shares = mixtures()
    classes = of[shares.argmax(axis=1)]
    classes[shares[:, WHITE] + shares[:, YELLOW] > 0.4] = MARKING
    return classes


@picture_kernel
def label(depth_m, instance, kind, pose, time_s, actors, present, sizes, kinds, looks, table, ground, walls, trees,
          heads, green, cycle, yellow, air, scratch, texels, classes):  # fmt: skip
    """Fill three pictures [h,w] of one job; the camera takes one sample a pixel."""
    (quads, edges, entries, rows, points, corner, kept, left, right, depth, seen, deepest) = scratch[:12]
    pixel_rad, wide = np.float32(table.pixel_rad), table.wide[0]
    height, width = depth_m.shape
    sun = air.numbers[SUN_X : SUN_Z + 1]
    count = build(quads, walls, trees, heads, green, cycle, yellow, time_s, pose, table.centre, table.rotation,
                  table.cone, actors, present, sizes, kinds, looks, sun, air.numbers)  # fmt: skip
    entries = collect(quads, count, table.rotation, table.projection, table.numbers, table.radius, table.affine,
                      table.cone, pixel_rad, height, width, edges, entries, rows, points, corner, kept, left,
                      right)  # fmt: skip
    cos, sin = math.cos(pose[2]), math.sin(pose[2])
    for row in range(height):
        find(entries, rows[row], edges, quads, table.ray_x, table.ray_y, table.ray_z, row * wide, wide, pixel_rad,
             texels, depth, seen, deepest, 0)  # fmt: skip
        for column in range(width):
            q = seen[column]
            if q >= 0:
                depth_m[row, column] = depth[column]
                instance[row, column], kind[row, column] = int(quads[q, NAME]), int(quads[q, CLASS])
                continue
            instance[row, column] = 0
            k = table.level[row, column]
            if k == NO_GROUND:
                depth_m[row, column], kind[row, column] = FAR, SKY
                continue
            depth_m[row, column] = table.distance[row, column]
            gx, gy = table.ground_x[row * table.wide[1] + column], table.ground_y[row * table.wide[1] + column]
            scale = 1.0 / (ground.origin[2] * (1 << k))
            px = (cos * gx - sin * gy + pose[0] - ground.origin[0]) * scale
            py = (sin * gx + cos * gy + pose[1] - ground.origin[1]) * scale
            entry = GRASS
            if px >= 0.0 and py >= 0.0 and px < ground.levels[k, 2] * TILE and py < ground.levels[k, 1] * TILE:
                ix, iy = int(px), int(py)
                entry = ground.cells[ground.levels[k, 0] + (iy // TILE) * ground.levels[k, 2] + ix // TILE]
                if entry >= 256:
                    entry = int(ground.tiles[entry - 256, iy % TILE, ix % TILE])
            kind[row, column] = classes[entry]
