"""Pictures row by row: what stands, ground, sky and shadows behind it, and both together; for whole batches."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded.rendering.compiled import inlined, picture_kernel
from alpagym_runtime.simulators.embedded.rendering.ground import EDGE, TILE, TILE_BITS
from alpagym_runtime.simulators.embedded.rendering.memory import get, put
from alpagym_runtime.simulators.embedded.rendering.quads import build, in_sight
from alpagym_runtime.simulators.embedded.rendering.raster import (
    LANES,
    channels,
    collect,
    find,
    outline,
    packed,
    shade,
    spans,
)
from alpagym_runtime.simulators.embedded.rendering.weather import DENSITY, FOG, GLOW, SHADOW, SUN_X, SUN_Z

GRAIN = 256
GRAIN_LEVELS = 4
SHADOW_REACH_M = 90.0
TILE_SIZE = EDGE * EDGE
PLACE_BITS = 9
"""For a place within a tile, below the sixteenths that it lies to the right and down."""
PLACES = (1 << PLACE_BITS) - 1
THIRD = np.int32(-1431655765)
"""1 / 3 among 32 bits: exact for multiples of three."""


@lru_cache(maxsize=1)
def grain() -> NDArray[np.int8]:
    """Brightness of the ground's surface, ±40 of 256, levels of halved resolution behind each other; seamless.

    Last comes a zero, for levels beyond.
    """
    rng = np.random.default_rng(3)
    total: Any = np.zeros((GRAIN, GRAIN), np.float32)
    # Nothing finer than the ground's texels, which are two of these: pictures would flicker, and JPEGs be 8 % larger.
    for sigma, share in ((1.8, 8.0), (3.5, 7.0), (18.0, 9.0)):
        noise = np.tile(rng.normal(0.0, 1.0, (GRAIN, GRAIN)).astype(np.float32), (3, 3))
        soft = cv2.GaussianBlur(noise, (0, 0), sigma)[GRAIN : 2 * GRAIN, GRAIN : 2 * GRAIN]
        total += share * soft / soft.std()
    parts = []
    for _ in range(GRAIN_LEVELS):
        parts.append(np.clip(total, -40, 40).astype(np.int8).ravel())
        total = cv2.resize(total, None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA)
    return np.concatenate([*parts, np.zeros(1, np.int8)])


@inlined
def next_run(free, at, width):
    """First pixel and end of the next run of groups, from pixel `at` on, that are not wholly hidden; or the end."""
    while at < width and not free[np.uintp(at // LANES)]:
        at += LANES
    begin = min(at, width)
    while at < width and free[np.uintp(at // LANES)]:
        at += LANES
    return begin, min(at, width)


@inlined
def sky_row(sky, table, air, sun_x, sun_y, sun_z, row, free, back):
    """The backdrop, and the sun's glow where there is one, for the groups of pixels that are `free`."""
    glow, zero, most = np.float32(air[GLOW]), np.float32(0.0), np.float32(255.0)
    wide = table.wide[1]
    first = row * wide
    at = 0
    while at < wide:
        begin, at = next_run(free, at, wide)
        if glow == zero:
            for x in range(at - begin):
                put(back, np.uintp(begin + x), get(sky, np.uintp(first + begin + x), "table"), "back")
            continue
        for x in range(at - begin):
            o = np.uintp(first + begin + x)
            towards = get(table.middle_x, o, "table") * sun_x + get(table.middle_y, o, "table") * sun_y
            towards = max(towards + get(table.middle_z, o, "table") * sun_z, zero)
            # Powers of 4 and 64.
            wider = towards * towards
            wider = wider * wider
            tight = wider * wider
            tight = tight * tight
            tight = tight * tight
            tight = tight * tight
            add = glow * (np.float32(52.0) * wider + np.float32(150.0) * tight)
            r, g, b = channels(get(sky, o, "table"))
            r, g, b = r + add, g + add * np.float32(0.8), b + add * np.float32(0.5)
            put(back, np.uintp(begin + x), packed(min(r, most), min(g, most), min(b, most)), "back")


@inlined
def mixture(entry, place, tiles, palette):
    """256 times the colour, in the palette's packing, of a cell's entry at a place within its tile."""
    if entry < 256:
        return palette[np.uintp(entry)] << 8
    right, down = (place >> PLACE_BITS) & 15, place >> (PLACE_BITS + 4)
    # Unsigned offsets spare a test for negative ones.
    at = np.uintp((np.int64(entry) - 256) * TILE_SIZE + (place & PLACES))
    one, two = tiles[at], tiles[at + np.uintp(1)]
    at += np.uintp(EDGE)
    three, four = tiles[at], tiles[at + np.uintp(1)]
    if (one == two) & (three == four) & (one == three):
        return palette[one] << 8
    a, b, c, d = palette[one], palette[two], palette[three], palette[four]
    # A difference's borrows between the channels cancel in the sum.
    upper, lower = (a << 4) + (b - a) * right, (c << 4) + (d - c) * right
    return (upper << 4) + (lower - upper) * down


@inlined
def ground_row(table, clear, tiles, cells, levels, origin, palette, surface, air, x, y, cos, sin, row, from_pixel,
               to_pixel, plain, bare, shadows, shadow, cell, inner, grains, total, norm, back):  # fmt: skip
    """The ground where a pixel of a row is `bare`; x, y, and cosine and sine of the yaw, of the rig in the local frame.

    `plain` rows are all ground, one sample a pixel: of these only the pixels `from_pixel` to `to_pixel` are made.
    `shadows` from `shadow` on are the shares of light that the road users leave.
    """
    cos, sin = np.float32(cos), np.float32(sin)
    ox, oy = np.float32(x - origin[0]), np.float32(y - origin[1])
    zero, half, two, sixteen, one = (
        np.float32(0.0), np.float32(0.5), np.float32(2.0), np.float32(16.0), np.float32(1.0),
    )  # fmt: skip
    finest = np.float32(1.0 / origin[2])
    columns = np.int32(levels[0, 2])
    across, along = np.float32(levels[0, 2] * TILE), np.float32(levels[0, 1] * TILE)
    all_cells, nowhere = np.int32(4 * levels[0, 1] * levels[0, 2]), np.int32(len(cells) - 1)
    all_grains, smooth = np.int32(4 * GRAIN * GRAIN), np.int32(len(surface) - 1)
    begin, first, left, right = table.starts[row, 0], table.starts[row, 1], table.reach[row, 0], table.reach[row, 1]
    pixels, count = table.starts[row + 1, 0] - begin, table.starts[row + 1, 1] - first
    single = pixels == count
    if plain:
        begin, first, left, right = begin + from_pixel, first + from_pixel, from_pixel, to_pixel
        pixels = count = to_pixel - from_pixel
    # Where each sample looks; in loops without branches, one for the samples of a level.
    for run in range(table.run_starts[row], table.run_starts[row + 1]):
        k = np.int32(table.runs[run, 1])
        part = finest * np.int32(np.int32(np.int32(127) - k) << np.int32(23)).view(np.float32)
        right_end, upper_end = across * part / finest, along * part / finest
        # Maps of the finer levels: 4/3 (1 - 4^-k) of the finest one's size.
        double = np.int32(k << np.int32(1))
        map_start, map_columns = np.int32(np.int32(all_cells - np.int32(all_cells >> double)) * THIRD), columns >> k
        grainy = k < np.int32(GRAIN_LEVELS)
        size = np.int32(np.int32(GRAIN) >> k) if grainy else np.int32(1)
        grain_start = np.int32(np.int32(all_grains - np.int32(all_grains >> double)) * THIRD) if grainy else smooth
        mask = np.int32(size - np.int32(1))
        for j in range(max(table.runs[run, 0] - first, 0), min(table.runs[run + 1, 0] - first, count)):
            o, s = np.uintp(j), np.uintp(first + j)
            gx, gy = get(table.tap_x, s, "table"), get(table.tap_y, s, "table")
            px, py = (cos * gx - sin * gy + ox) * part - half, (sin * gx + cos * gy + oy) * part - half
            inside = (px >= zero) & (py >= zero) & (px < right_end) & (py < upper_end)
            px, py = (px if inside else zero), (py if inside else zero)
            ix, iy = np.int32(px), np.int32(py)
            fx, fy = np.int32((px - np.float32(ix)) * sixteen), np.int32((py - np.float32(iy)) * sixteen)
            there = np.int32(np.int32(map_start + np.int32(np.int32(iy >> np.int32(TILE_BITS)) * map_columns))
                             + np.int32(ix >> np.int32(TILE_BITS)))  # fmt: skip
            put(cell, o, there if inside else nowhere, "cell")
            at = np.int32(
                np.int32(np.int32(iy & np.int32(TILE - 1)) * np.int32(EDGE)) + np.int32(ix & np.int32(TILE - 1))
            )
            at = np.int32(at | np.int32(fx << np.int32(PLACE_BITS)) | np.int32(fy << np.int32(PLACE_BITS + 4)))
            put(inner, o, at, "inner")
            nx, ny = np.int32(np.int32(px * two) & mask), np.int32(np.int32(py * two) & mask)
            put(grains, o, np.int32(np.int32(grain_start + np.int32(ny * size)) + nx), "grain")
    # What lies there.
    if single:
        for j in range(pixels):
            column, o = np.uintp(left + j if plain else table.columns[np.uintp(begin + j)]), np.uintp(j)
            if bare[column]:
                total[column] = mixture(cells[np.uintp(cell[o])], np.int64(inner[o]), tiles, palette)
                rough = np.float32(surface[np.uintp(grains[o])])
                norm[column] = (np.float32(256.0) + rough) * np.float32(1.0 / 65536.0)
    else:
        sample = np.uintp(0)
        for j in range(begin, begin + pixels):
            column, taps = np.uintp(table.columns[np.uintp(j)]), np.uintp(table.taps[np.uintp(j)])
            if bare[column]:
                last = sample + taps - np.uintp(1)
                entry = cells[np.uintp(cell[sample])]
                if (entry < 256) & (cell[sample] == cell[last]):
                    # They stand in a line.
                    value = np.int64(taps) * (palette[np.uintp(entry)] << 8)
                else:
                    value = np.int64(0)
                    for tap in range(taps):
                        place = sample + np.uintp(tap)
                        value += mixture(cells[np.uintp(cell[place])], np.int64(inner[place]), tiles, palette)
                total[column] = value
                rough = np.float32(surface[np.uintp(grains[last])])
                norm[column] = (np.float32(256.0) + rough) * (np.float32(1.0 / 65536.0) / np.float32(taps))
            sample += taps
    # Its light, and the air between.
    fog_r, fog_g, fog_b = np.float32(air[FOG]), np.float32(air[FOG + 1]), np.float32(air[FOG + 2])
    low, most = np.int64(0xFFFFF), np.float32(255.0)
    plane = row * table.wide[1]
    for j in range(right - left):
        o = np.uintp(left + j)
        arrives, light = (
            get(clear, np.uintp(plane + left + j), "table"),
            get(shadows, np.uintp(shadow + left + j), "shade"),
        )
        value, share = get(total, o, "total"), get(norm, o, "norm") * light * arrives
        rest = one - arrives
        r = np.float32(np.int32(value & low)) * share + fog_r * rest
        g = np.float32(np.int32((value >> 20) & low)) * share + fog_g * rest
        b = np.float32(np.int32((value >> 40) & low)) * share + fog_b * rest
        new, old = packed(min(r, most), min(g, most), min(b, most)), get(back, o, "back")
        put(back, o, new if arrives > zero else old, "back")


@picture_kernel
def cast_shadows(shadows, shaded, table, pose, actors, present, sizes, air, points, corner, kept, left, right):
    """The share of light [(h+1)*wide] that road users leave on the ground under and behind them, seen from the sun.

    Only rows that `shaded` [h] marks are written; the last row is ones.
    """
    height, width, wide = table.level.shape[0], table.level.shape[1], table.wide[1]
    shaded[:] = False
    samples, rotation, centre = table.projection[1], table.rotation, table.centre
    cos, sin = math.cos(pose[2]), math.sin(pose[2])
    quad = np.zeros(12)
    reach = 1.1 / max(air[SUN_Z], 0.25)
    zero, one = np.float32(0.0), np.float32(1.0)
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
        if not in_sight(x - centre[0], y - centre[1], -centre[2], max(x1, -x0) + max(y1, -y0), rotation, table.cone):
            continue
        # Seen from above: the corner, the edge to the right, the edge down.
        quad[0] = x + c * x0 - s * y1 - centre[0]
        quad[1] = y + s * x0 + c * y1 - centre[1]
        quad[2] = -centre[2]
        quad[3], quad[4] = c * (x1 - x0), s * (x1 - x0)
        quad[6], quad[7] = s * (y1 - y0), -c * (y1 - y0)
        m = outline(quad, rotation, table.projection, table.numbers, table.radius, table.affine, table.cone,
                    table.pixel_rad, points, corner, kept)  # fmt: skip
        if m == 0:
            continue
        if m < 0:
            first, last = 0, height
            left[:height] = 0
            right[:height] = width - 1
        else:
            for k in range(m):
                points[k, 0] /= samples
                points[k, 1] /= samples
            first, last = spans(points, m, 1.5, height, width, left, right)
        strength, contact = np.float32(air[SHADOW]), np.float32(0.42)
        blur, softness, steep = np.float32(1.0 / soft), np.float32(soft), np.float32(2.0 * math.hypot(ex, ey) / soft)
        # One over the shadow's extent along each axis; almost none counts as a millionth of a metre.
        per_x = np.float32(1.0 / (ex if abs(ex) > 1e-6 else 1e-6))
        per_y = np.float32(1.0 / (ey if abs(ey) > 1e-6 else 1e-6))
        cf, sf, xf, yf, hxf, hyf = (
            np.float32(c), np.float32(s), np.float32(x), np.float32(y), np.float32(hx), np.float32(hy),
        )  # fmt: skip
        x0f, x1f, y0f, y1f = np.float32(x0), np.float32(x1), np.float32(y0), np.float32(y1)
        for row in range(first, last):
            if right[row] < left[row]:
                continue
            at = row * wide
            if not shaded[row]:
                shaded[row] = True
                for column in range(wide):
                    put(shadows, np.uintp(at + column), one, "shade")
            at += left[row]
            for column in range(right[row] - left[row] + 1):
                o = np.uintp(at + column)
                gx, gy = get(table.ground_x, o, "table") - xf, get(table.ground_y, o, "table") - yf
                u, v = cf * gx + sf * gy, cf * gy - sf * gx
                near = (u >= x0f) & (u <= x1f) & (v >= y0f) & (v <= y1f)
                # Inside the footprint swept along the shadow: the longest way back that still lies in it.
                u0, u1, v0, v1 = (u - hxf) * per_x, (u + hxf) * per_x, (v - hyf) * per_y, (v + hyf) * per_y
                low = max(max(min(u0, u1), min(v0, v1)), zero)
                high = min(min(max(u0, u1), max(v0, v1)), one)
                inside = min(max((high - low) * steep, zero), one)
                away = max(max(abs(u) - hxf, abs(v) - hyf) + softness, zero) * blur * np.float32(0.5)
                close = max(one - away, zero)
                keep = (one - strength * inside) * (one - contact * close * close)
                put(shadows, o, get(shadows, o, "shade") * (keep if near else one), "shade")


@inlined
def write_row(out, first, width, back):
    """Packed colours as bytes."""
    for x in range(width):
        put_bytes(out, np.uintp(first + 3 * x), get(back, np.uintp(x), "back"))


@inlined
def write_over(out, first, width, back, seen, colour):
    """The same, with the colour of what stands where something does."""
    for x in range(width):
        o = np.uintp(x)
        value, behind = get(colour, o, "colour"), get(back, o, "back")
        put_bytes(out, np.uintp(first + 3 * x), value if get(seen, o, "seen") >= 0 else behind)


@inlined
def put_bytes(out, o, value):
    """A packed colour as three bytes."""
    put(out, o, np.uint8(value), "out")
    put(out, o + np.uintp(1), np.uint8(value >> np.uint32(8)), "out")
    put(out, o + np.uintp(2), np.uint8(value >> np.uint32(16)), "out")


@picture_kernel
def render(out, sky, clear, places, poses, times_s, actors, present, sizes, kinds, looks, table, ground, walls, trees,
           heads, green, cycle, yellow, air, scratch, texels, surface):  # fmt: skip
    """Pictures of one scene by one camera: job j goes to out[places[j]] [*, h*w*3]; returns the quads drawn in all."""
    (quads, edges, entries, rows, points, corner, kept, left, right, depth, seen, deepest, colour, bare, free, back,
     total, norm, cell, inner, grains, shadows, shaded) = scratch  # fmt: skip
    height, width = table.level.shape
    samples, wide = table.projection[1], table.wide[0]
    pixel_rad = np.float32(table.pixel_rad)
    coarse, share = pixel_rad * np.float32(samples), np.float32(1.0 / (samples * samples))
    sun = air.numbers[SUN_X : SUN_Z + 1]
    fog_r, fog_g, fog_b = (
        np.float32(air.numbers[FOG]),
        np.float32(air.numbers[FOG + 1]),
        np.float32(air.numbers[FOG + 2]),
    )
    density = np.float32(air.numbers[DENSITY])
    tiles = ground.tiles.reshape(-1)
    drawn, ones = 0, height * table.wide[1]
    no, yes = np.int32(0), np.int32(1)
    for x in range(table.wide[1]):
        shadows[ones + x] = 1.0
    for j in range(len(places)):
        picture, pose = out[places[j]], poses[j]
        cast_shadows(shadows, shaded, table, pose, actors[j], present[j], sizes, air.numbers, points, corner, kept,
                     left, right)  # fmt: skip
        count = build(quads, walls, trees, heads, green, cycle, yellow, times_s[j], pose, table.centre, table.rotation,
                      table.cone, actors[j], present[j], sizes, kinds, looks, sun, air.numbers)  # fmt: skip
        entries = collect(quads, count, table.rotation, table.projection, table.numbers, table.radius, table.affine,
                          table.cone, pixel_rad, height * samples, width * samples, edges, entries, rows, points,
                          corner, kept, left, right)  # fmt: skip
        drawn += count
        cos, sin = math.cos(pose[2]), math.sin(pose[2])
        sun_x, sun_y = np.float32(cos * sun[0] + sin * sun[1]), np.float32(cos * sun[1] - sin * sun[0])
        for row in range(height):
            stands = False
            for k in range(samples):
                y = row * samples + k
                head = rows[y]
                stands = stands or head >= 0
                find(entries, head, edges, quads, table.ray_x, table.ray_y, table.ray_z, y * wide, wide, pixel_rad,
                     texels, depth, seen, deepest, k * wide)  # fmt: skip
                shade(entries, head, edges, quads, table.ray_x, table.ray_y, table.ray_z, y * wide, coarse, texels,
                      fog_r, fog_g, fog_b, density, depth, seen, colour, k * wide)  # fmt: skip
            if samples == 1:
                for x in range(wide):
                    bare[x] = get(seen, np.uintp(x), "seen") < 0
            else:
                bare[:width] = True
                if stands:
                    for x in range(width):
                        covered = True
                        for k in range(samples):
                            for i in range(samples):
                                covered = covered and seen[k * wide + x * samples + i] >= 0
                        bare[x] = not covered
            for group in range(len(free)):
                some = no
                for x in range(LANES):
                    some = np.int32(max(some, yes if bare[np.uintp(group * LANES + x)] else no))
                free[np.uintp(group)] = some
            pixels = table.starts[row + 1, 0] - table.starts[row, 0]
            if pixels < width:
                sky_row(sky, table, air.numbers, sun_x, sun_y, np.float32(sun[2]), row, free, back)
            shadow = row * table.wide[1] if shaded[row] else ones
            plain = pixels == width and table.starts[row + 1, 1] - table.starts[row, 1] == width
            along = 0 if pixels > 0 else width
            while along < width:
                begin, upto = next_run(free, along, width) if plain else (0, width)
                along = upto
                ground_row(table, clear, tiles, ground.cells, ground.levels, ground.origin, air.palette, surface,
                           air.numbers, pose[0], pose[1], cos, sin, row, begin, upto, plain, bare, shadows, shadow,
                           cell, inner, grains, total, norm, back)  # fmt: skip
            if samples == 1:
                write_over(picture, row * width * 3, width, back, seen, colour)
                continue
            if stands:
                for x in range(width):
                    r, g, b = np.float32(0.0), np.float32(0.0), np.float32(0.0)
                    hits = 0
                    for k in range(samples):
                        for i in range(samples):
                            at = np.uintp(k * wide + x * samples + i)
                            if seen[at] >= 0:
                                one_r, one_g, one_b = channels(colour[at])
                                r += one_r
                                g += one_g
                                b += one_b
                                hits += 1
                    if hits:
                        one_r, one_g, one_b = channels(back[np.uintp(x)])
                        rest = np.float32(samples * samples - hits)
                        back[x] = packed(
                            (r + rest * one_r) * share, (g + rest * one_g) * share, (b + rest * one_b) * share
                        )
            write_row(picture, row * width * 3, width, back)
    return drawn
