"""Ground, sky and shadows by pixel; then what stands, mixed in by its samples; for whole batches of pictures."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded.rendering.compiled import inlined, picture_kernel
from alpagym_runtime.simulators.embedded.rendering.ground import EDGE, TILE
from alpagym_runtime.simulators.embedded.rendering.materials import GRASS
from alpagym_runtime.simulators.embedded.rendering.quads import build, in_sight
from alpagym_runtime.simulators.embedded.rendering.raster import colour, draw, outline, spans
from alpagym_runtime.simulators.embedded.rendering.rays import LEVELS, NO_GROUND
from alpagym_runtime.simulators.embedded.rendering.weather import DENSITY, FOG, GLOW, SHADOW, SUN_X, SUN_Z

GRAIN = 256
GRAIN_LEVELS = 4
GRAIN_OFFSETS = np.cumsum([0] + [(GRAIN >> level) ** 2 for level in range(GRAIN_LEVELS)])[:GRAIN_LEVELS].astype(
    np.int64
)
SHADOW_REACH_M = 90.0
TILE_SIZE = EDGE * EDGE


@lru_cache(maxsize=1)
def grain() -> NDArray[np.int8]:
    """Brightness of the ground's surface, ±40 of 256, levels of halved resolution behind each other; seamless."""
    rng = np.random.default_rng(3)
    total: Any = np.zeros((GRAIN, GRAIN), np.float32)
    for sigma, share in ((0.9, 13.0), (3.5, 7.0), (18.0, 9.0)):
        noise = np.tile(rng.normal(0.0, 1.0, (GRAIN, GRAIN)).astype(np.float32), (3, 3))
        soft = cv2.GaussianBlur(noise, (0, 0), sigma)[GRAIN : 2 * GRAIN, GRAIN : 2 * GRAIN]
        total += share * soft / soft.std()
    parts = []
    for _ in range(GRAIN_LEVELS):
        parts.append(np.clip(total, -40, 40).astype(np.int8).ravel())
        total = cv2.resize(total, None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA)
    return np.concatenate(parts)


@inlined
def clear_air(distance, density):
    """Share of light that reaches the eye; close to exp(-density · distance), without its cost."""
    a = distance * density
    return np.float32(1.0) / (np.float32(1.0) + a + np.float32(0.5) * a * a)


@picture_kernel
def paint_sky(out, backdrop, level, elevation, rays, air, yaw):
    """The backdrop, and the sun's glow where there is one."""
    out[:] = backdrop
    glow, most = np.float32(air[GLOW]), np.float32(255.0)
    if glow == 0.0:
        return
    height, width = level.shape
    sun_x = np.float32(math.cos(yaw) * air[SUN_X] + math.sin(yaw) * air[SUN_X + 1])
    sun_y = np.float32(math.cos(yaw) * air[SUN_X + 1] - math.sin(yaw) * air[SUN_X])
    sun_z = np.float32(air[SUN_Z])
    step = rays.shape[0] // height
    middle = step // 2
    for row in range(height):
        for column in range(width):
            if level[row, column] != NO_GROUND or elevation[row, column] > 1.5:
                continue
            y, x = row * step + middle, column * step + middle
            towards = max(rays[y, x, 0] * sun_x + rays[y, x, 1] * sun_y + rays[y, x, 2] * sun_z, np.float32(0.0))
            wide = towards * towards
            wide = wide * wide
            tight = wide * wide
            tight = tight * tight
            tight = tight * tight
            tight = tight * tight
            add = glow * (np.float32(52.0) * wide + np.float32(150.0) * tight * tight)
            out[row, column, 0] = np.uint8(min(np.float32(out[row, column, 0]) + add, most))
            out[row, column, 1] = np.uint8(min(np.float32(out[row, column, 1]) + add * np.float32(0.8), most))
            out[row, column, 2] = np.uint8(min(np.float32(out[row, column, 2]) + add * np.float32(0.5), most))


@picture_kernel
def paint_ground(out, ground, level, taps, reach, clear_by_pixel, tiles, index, levels, origin, palette,
                 surface_grain, air, x, y, yaw):  # fmt: skip
    """The ground of one picture [h,w,3]; x, y, yaw of the rig in the local frame."""
    height = level.shape[0]
    cos, sin = np.float32(math.cos(yaw)), np.float32(math.sin(yaw))
    ox, oy = np.float32(x - origin[0]), np.float32(y - origin[1])
    fog_r, fog_g, fog_b = np.float32(air[FOG]), np.float32(air[FOG + 1]), np.float32(air[FOG + 2])
    texels = np.empty(LEVELS, np.float32)
    for k in range(LEVELS):
        texels[k] = 1.0 / (origin[2] * (1 << k))
    zero, half, two, sixteen = np.float32(0.0), np.float32(0.5), np.float32(2.0), np.float32(16.0)
    starts, columns = levels[:, 0].copy(), levels[:, 2].copy()
    span_x, span_y = np.empty(LEVELS, np.float32), np.empty(LEVELS, np.float32)
    for k in range(LEVELS):
        span_x[k], span_y[k] = levels[k, 2] * TILE, levels[k, 1] * TILE
    shares = np.empty(9, np.float32)
    for k in range(9):
        shares[k] = 1.0 / (256.0 * max(k, 1))
    beyond = palette[GRASS] << 8
    for row in range(height):
        for column in range(reach[row, 0], reach[row, 1]):
            k = level[row, column]
            if k == NO_GROUND:
                continue
            gx, gy = ground[row, column, 0], ground[row, column, 1]
            scale = texels[k]
            px = (cos * gx - sin * gy + ox) * scale - half
            py = (sin * gx + cos * gy + oy) * scale - half
            count = taps[row, column]
            sx = sy = np.float32(0.0)
            if count > 1:
                ax, ay = ground[row, column, 2], ground[row, column, 3]
                part = scale / np.float32(count)
                sx, sy = (cos * ax - sin * ay) * part, (sin * ax + cos * ay) * part
                back = np.float32(count - 1) * half
                px -= back * sx
                py -= back * sy
            total = np.int64(0)
            for _ in range(count):
                if px >= zero and py >= zero and px < span_x[k] and py < span_y[k]:
                    ix, iy = int(px), int(py)
                    entry = index[np.uintp(starts[k] + (iy >> 6) * columns[k] + (ix >> 6))]
                    if entry < 256:
                        total += palette[np.uintp(entry)] << 8
                    else:
                        # Unsigned offsets spare a test for negative ones.
                        at = (entry - 256) * TILE_SIZE + (iy & 63) * EDGE + (ix & 63)
                        fx = int((px - np.float32(ix)) * sixteen)
                        fy = int((py - np.float32(iy)) * sixteen)
                        upper = palette[tiles[np.uintp(at)]] * (16 - fx) + palette[tiles[np.uintp(at + 1)]] * fx
                        at += EDGE
                        lower = palette[tiles[np.uintp(at)]] * (16 - fx) + palette[tiles[np.uintp(at + 1)]] * fx
                        total += upper * (16 - fy) + lower * fy
                else:
                    total += beyond
                px += sx
                py += sy
            norm = shares[count]
            if k < GRAIN_LEVELS:
                size = (GRAIN >> k) - 1
                nx, ny = int((px - sx) * two), int((py - sy) * two)
                n = surface_grain[np.uintp(GRAIN_OFFSETS[k] + (ny & size) * (size + 1) + (nx & size))]
                norm *= np.float32(1.0) + np.float32(n) * np.float32(1.0 / 256.0)
            clear = clear_by_pixel[row, column]
            norm *= clear
            rest = np.float32(1.0) - clear
            r = np.float32(total & 0xFFFFF) * norm + fog_r * rest
            g = np.float32((total >> 20) & 0xFFFFF) * norm + fog_g * rest
            b = np.float32(total >> 40) * norm + fog_b * rest
            out[row, column, 0] = np.uint8(min(r, np.float32(255.0)))
            out[row, column, 1] = np.uint8(min(g, np.float32(255.0)))
            out[row, column, 2] = np.uint8(min(b, np.float32(255.0)))


@picture_kernel
def paint_shadows(out, ground, level, rotation, projection, numbers, radius, affine, cone, pixel_rad, centre, pose,
                  actors, present, sizes, air, points, corner, kept, left, right):  # fmt: skip
    """Darken the ground under and behind road users, seen from the sun."""
    height, width = level.shape
    samples = projection[1]
    cos, sin = math.cos(pose[2]), math.sin(pose[2])
    quad = np.zeros(12)
    reach = 1.1 / max(air[SUN_Z], 0.25)
    for a in range(len(present)):
        if not present[a]:
            continue
        dx, dy = actors[a, 0] - pose[0], actors[a, 1] - pose[1]
        x, y = cos * dx + sin * dy, cos * dy - sin * dx
        hx, hy = sizes[a, 0] / 2.0, sizes[a, 1] / 2.0
        far = (x - centre[0]) ** 2 + (y - centre[1]) ** 2
        if far > SHADOW_REACH_M * SHADOW_REACH_M:
            continue
        turn = actors[a, 2] - pose[2]
        c, s = math.cos(turn), math.sin(turn)
        # Where the top's shadow lies from the foot, in the road user's axes.
        across = math.cos(actors[a, 2]) * air[SUN_X + 1] - math.sin(actors[a, 2]) * air[SUN_X]
        along = math.cos(actors[a, 2]) * air[SUN_X] + math.sin(actors[a, 2]) * air[SUN_X + 1]
        ex, ey = -along * reach, -across * reach
        soft = 0.12 + 0.05 * hx
        x0, x1 = min(-hx, -hx + ex) - soft, max(hx, hx + ex) + soft
        y0, y1 = min(-hy, -hy + ey) - soft, max(hy, hy + ey) + soft
        if not in_sight(x - centre[0], y - centre[1], -centre[2], max(x1, -x0) + max(y1, -y0), rotation, cone):
            continue
        # Seen from above: the corner, the edge to the right, the edge down.
        quad[0] = x + c * x0 - s * y1 - centre[0]
        quad[1] = y + s * x0 + c * y1 - centre[1]
        quad[2] = -centre[2]
        quad[3], quad[4] = c * (x1 - x0), s * (x1 - x0)
        quad[6], quad[7] = s * (y1 - y0), -c * (y1 - y0)
        m = outline(quad, rotation, projection, numbers, radius, affine, cone, pixel_rad, points, corner, kept)
        if m == 0:
            continue
        if m < 0:
            first, last = 0, height
            left[:] = 0
            right[:] = width - 1
        else:
            for k in range(m):
                points[k, 0] /= samples
                points[k, 1] /= samples
            first, last = spans(points, m, 1.5, height, width, left, right)
        strength, contact = np.float32(air[SHADOW]), np.float32(0.42)
        blur = np.float32(1.0 / soft)
        length = np.float32(math.hypot(ex, ey) + 1e-6)
        fx, fy = np.float32(ex), np.float32(ey)
        for row in range(first, last):
            for column in range(left[row], right[row] + 1):
                if level[row, column] == NO_GROUND:
                    continue
                gx, gy = ground[row, column, 0] - np.float32(x), ground[row, column, 1] - np.float32(y)
                u, v = c * gx + s * gy, c * gy - s * gx
                if u < x0 or u > x1 or v < y0 or v > y1:
                    continue
                # Inside the footprint swept along the shadow: the longest way back that still lies in it.
                low, high = np.float32(0.0), np.float32(1.0)
                if abs(fx) > 1e-5:
                    t0, t1 = (u - hx) / fx, (u + hx) / fx
                    low, high = max(low, min(t0, t1)), min(high, max(t0, t1))
                elif abs(u) > hx:
                    high = np.float32(-1.0)
                if abs(fy) > 1e-5:
                    t0, t1 = (v - hy) / fy, (v + hy) / fy
                    low, high = max(low, min(t0, t1)), min(high, max(t0, t1))
                elif abs(v) > hy:
                    high = np.float32(-1.0)
                inside = min(max((high - low) * length * blur * np.float32(2.0), np.float32(0.0)), np.float32(1.0))
                away = max(max(abs(u) - hx, abs(v) - hy) + np.float32(soft), np.float32(0.0)) * blur * np.float32(0.5)
                close = max(np.float32(1.0) - away, np.float32(0.0))
                keep = (np.float32(1.0) - strength * inside) * (np.float32(1.0) - contact * close * close)
                for k in range(3):
                    out[row, column, k] = np.uint8(np.float32(out[row, column, k]) * keep)


@inlined
def seen_colour(quads, i, t, dx, dy, dz, tiles, sample_rad, fog, density):
    """r, g, b 0..255 of a quad through the air; `fog` is a triple."""
    most, one = np.float32(255.0), np.float32(1.0)
    r, g, b = colour(quads, i, t, dx, dy, dz, tiles, sample_rad)
    clear = clear_air(t, density)
    rest = one - clear
    return (
        min(r, most) * clear + fog[0] * rest,
        min(g, most) * clear + fog[1] * rest,
        min(b, most) * clear + fog[2] * rest,
    )


@picture_kernel
def mix(out, quads, rays, depth, seen, samples, tiles, pixel_rad, air):
    """Lay what the samples see over ground and sky."""
    height, width, _ = out.shape
    fog = (np.float32(air[FOG]), np.float32(air[FOG + 1]), np.float32(air[FOG + 2]))
    density = np.float32(air[DENSITY])
    if samples == 1:
        for row in range(height):
            for column in range(width):
                q = seen[row, column]
                if q >= 0:
                    r, g, b = seen_colour(quads, q, depth[row, column], rays[row, column, 0], rays[row, column, 1],
                                          rays[row, column, 2], tiles, pixel_rad, fog, density)  # fmt: skip
                    out[row, column, 0], out[row, column, 1], out[row, column, 2] = (
                        np.uint8(r),
                        np.uint8(g),
                        np.uint8(b),
                    )
        return
    share, coarse = np.float32(1.0 / (samples * samples)), pixel_rad * np.float32(samples)
    middle = samples >> 1
    for row in range(height):
        for column in range(width):
            y, x = row * samples, column * samples
            first = seen[y, x]
            same, none = True, first < 0
            for j in range(samples):
                for i in range(samples):
                    q = seen[y + j, x + i]
                    same = same and q == first
                    none = none and q < 0
            if none:
                continue
            # Where all see the same quad one sample stands for them, its texture as coarse as the pixel.
            begin, end = (middle, middle + 1) if same else (0, samples)
            hits = 0
            r = g = b = np.float32(0.0)
            for j in range(begin, end):
                for i in range(begin, end):
                    q = seen[y + j, x + i]
                    if q >= 0:
                        one_r, one_g, one_b = seen_colour(
                            quads, q, depth[y + j, x + i], rays[y + j, x + i, 0], rays[y + j, x + i, 1],
                            rays[y + j, x + i, 2], tiles, coarse, fog, density)  # fmt: skip
                        r += one_r
                        g += one_g
                        b += one_b
                        hits += 1
            part = np.float32(1.0) if same else share
            back = np.float32(0 if same else samples * samples - hits)
            out[row, column, 0] = np.uint8((r + back * np.float32(out[row, column, 0])) * part)
            out[row, column, 1] = np.uint8((g + back * np.float32(out[row, column, 1])) * part)
            out[row, column, 2] = np.uint8((b + back * np.float32(out[row, column, 2])) * part)


@picture_kernel
def render(out, backdrop, clear, places, poses, times_s, actors, present, sizes, kinds, looks, table, ground, walls,
           trees, heads, green, cycle, yellow, air, scratch, tiles, surface_grain):  # fmt: skip
    """Pictures of one scene by one camera: job j goes to out[places[j]]; returns the quads drawn in all."""
    depth, seen, quads, points, corner, kept, left, right = scratch
    samples = table.projection[1]
    drawn = 0
    sun = air.numbers[SUN_X : SUN_Z + 1]
    ground_tiles, pixel_rad = ground.tiles.reshape(-1), np.float32(table.pixel_rad)
    for j in range(len(places)):
        picture, pose = out[places[j]], poses[j]
        paint_sky(picture, backdrop, table.level, table.elevation, table.rays, air.numbers, pose[2])
        paint_ground(picture, table.ground, table.level, table.taps, table.reach, clear, ground_tiles, ground.cells,
                     ground.levels, ground.origin, air.palette, surface_grain, air.numbers,
                     pose[0], pose[1], pose[2])  # fmt: skip
        paint_shadows(picture, table.ground, table.level, table.rotation, table.projection, table.numbers, table.radius,
                      table.affine, table.cone, pixel_rad, table.centre, pose, actors[j], present[j], sizes,
                      air.numbers, points, corner, kept, left, right)  # fmt: skip
        count = build(quads, walls, trees, heads, green, cycle, yellow, times_s[j], pose, table.centre, table.rotation,
                      table.cone, actors[j], present[j], sizes, kinds, looks, sun, air.numbers)  # fmt: skip
        draw(quads, count, table.rays, table.rotation, table.projection, table.numbers, table.radius, table.affine,
             table.cone, pixel_rad, tiles, depth, seen, points, corner, kept, left, right)  # fmt: skip
        mix(picture, quads, table.rays, depth, seen, samples, tiles, pixel_rad, air.numbers)
        drawn += count
    return drawn
