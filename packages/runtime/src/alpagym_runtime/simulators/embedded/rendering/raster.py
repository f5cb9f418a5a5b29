"""Which quad each sample sees, and what colour that is.

A quad is looked for inside the outline that its projected edges enclose, one sample wider; whether a sample sees it is
decided by its own ray, so the camera's model may bend lines as it likes. Pictures are made row by row: `collect` lists
what may be seen in each, `find` and `shade` work in a row's few KB, in loops without branches.
"""

from __future__ import annotations

import math

import numpy as np

from alpagym_runtime.simulators.embedded.rendering.compiled import inlined, picture_kernel
from alpagym_runtime.simulators.embedded.rendering.memory import get, put
from alpagym_runtime.simulators.embedded.rendering.quads import (
    BRAKING,
    BURNING,
    DISTANCE,
    FLAGS,
    HIGH,
    LIGHT,
    LOW,
    NAME,
    PER_E,
    PER_F,
    REPEAT_E,
    REPEAT_F,
    SEE_THROUGH,
    TEXELS,
    TEXTURE,
    TINT,
    VARIED,
    E,
    F,
    N,
    P,
)
from alpagym_runtime.simulators.embedded.rendering.rays import ANGULAR, BENT, FLAT, RADIUS_STEPS
from alpagym_runtime.simulators.embedded.rendering.textures import (
    HEADLIGHT,
    LAMP,
    NOTHING,
    STRIDE,
    TAIL,
    TEXTURE_SIZE,
    TINTED,
    WINDOW,
)

NEAR_M = 0.02
FAR = 1e9
SPLITS = 24
CORNERS = 160
LANES = 16
"""Samples are looked at in groups of so many: what one instruction handles."""

QUAD, LEFT, RIGHT, NEXT = range(4)
"""Columns of an entry: a quad that may be seen between two samples of a row (`find` narrows them down), and the next
entry, farther away."""


@inlined
def project(x, y, z, projection, numbers, radius, affine):
    """Sample coordinates of a point before the camera, in the optical frame."""
    scale = projection[1]
    if projection[0] == ANGULAR:
        per = 1.0 / math.sqrt(x * x + y * y + z * z)
        at = min(max(z * per, 0.0), 1.0) * RADIUS_STEPS
        k = min(int(at), RADIUS_STEPS - 1)
        per *= radius[k] + (at - k) * (radius[k + 1] - radius[k])
        u = (affine[0] * x + affine[1] * y) * per + affine[4]
        v = (affine[2] * x + affine[3] * y) * per + affine[5]
        return u * scale, v * scale
    a, b = x / z, y / z
    if projection[0] == BENT:
        # Beyond its limit the distortion would fold back; there it goes on straight, outwards.
        r = math.sqrt(a * a + b * b)
        beyond = max(r - affine[0], 0.0) / max(r, 1e-12)
        out_a, out_b = a * beyond, b * beyond
        a, b = a - out_a, b - out_b
        q = a * a + b * b
        above = 1.0 + q * (numbers[4] + q * (numbers[5] + q * numbers[6]))
        factor = above / (1.0 + q * (numbers[7] + q * (numbers[8] + q * numbers[9])))
        p1, p2 = numbers[10], numbers[11]
        bent_a = a * factor + 2.0 * p1 * a * b + p2 * (q + 2.0 * a * a) + q * (numbers[12] + numbers[13] * q)
        bent_b = b * factor + p1 * (q + 2.0 * b * b) + 2.0 * p2 * a * b + q * (numbers[14] + numbers[15] * q)
        a, b = bent_a + out_a, bent_b + out_b
    return (numbers[0] * a + numbers[2]) * scale, (numbers[1] * b + numbers[3]) * scale


@picture_kernel
def outline(q, rotation, projection, numbers, radius, affine, cone, pixel_rad, points, corner, kept):
    """Sample coordinates of a quad's edges in `points` [*,2]; their number, 0: behind, -1: anywhere in the picture."""
    for k in range(4):
        right, down = 1.0 if k == 1 or k == 2 else 0.0, 1.0 if k >= 2 else 0.0
        x = q[P] + right * q[E] + down * q[F]
        y = q[P + 1] + right * q[E + 1] + down * q[F + 1]
        z = q[P + 2] + right * q[E + 2] + down * q[F + 2]
        for j in range(3):
            corner[k, j] = rotation[j, 0] * x + rotation[j, 1] * y + rotation[j, 2] * z
    # Scalars only: a view of an array counts a reference, which costs more than the arithmetic.
    m = 0
    narrow = cone[0] > 0.1 or projection[0] != ANGULAR
    for k in range(4):
        j = (k + 1) & 3
        az, bz = corner[k, 2], corner[j, 2]
        if az > NEAR_M:
            kept[m, 0], kept[m, 1], kept[m, 2] = corner[k, 0], corner[k, 1], az
            m += 1
        elif not narrow:
            return -1
        if narrow and (az > NEAR_M) != (bz > NEAR_M):
            t = (NEAR_M - az) / (bz - az)
            for c in range(3):
                kept[m, c] = corner[k, c] + t * (corner[j, c] - corner[k, c])
            m += 1
    if m < 3:
        return 0
    n = 0
    for k in range(m):
        j = k + 1 if k + 1 < m else 0
        ax, ay, az = kept[k, 0], kept[k, 1], kept[k, 2]
        dx, dy, dz = kept[j, 0] - ax, kept[j, 1] - ay, kept[j, 2] - az
        splits = 1
        if projection[0] != FLAT:
            square = dx * dx + dy * dy + dz * dz + 1e-12
            t = min(max(-(ax * dx + ay * dy + az * dz) / square, 0.0), 1.0)
            nearest = math.sqrt((ax + t * dx) ** 2 + (ay + t * dy) ** 2 + (az + t * dz) ** 2) + 1e-6
            # The chord of a bent edge stays within half a sample of it.
            bent = 1.0
            if projection[0] == ANGULAR:
                # By symmetry an edge bends the less, the nearer its plane comes to the axis.
                nx, ny, nz = ay * dz - az * dy, az * dx - ax * dz, ax * dy - ay * dx
                bent = math.sqrt(numbers[0] * math.sqrt(nz * nz / (nx * nx + ny * ny + nz * nz + 1e-12)))
            most = math.sqrt(square) / nearest * bent / (2.0 * math.sqrt(pixel_rad)) + 1.0
            splits = int(min(most, float(SPLITS)))
        for s in range(splits):
            t = s / splits
            u, v = project(ax + t * dx, ay + t * dy, az + t * dz, projection, numbers, radius, affine)
            points[n, 0], points[n, 1] = u, v
            n += 1
    return n


@picture_kernel
def spans(points, count, margin, height, width, left, right):
    """First and last column of each row [height] that an outline may cover; returns the rows' range."""
    low, high = points[0, 1], points[0, 1]
    for k in range(count):
        low, high = min(low, points[k, 1]), max(high, points[k, 1])
    first = int(min(max(math.floor(low - margin), 0.0), float(height)))
    last = int(max(min(math.ceil(high + margin), float(height)), 0.0))
    for y in range(first, last):
        left[y], right[y] = width, -1
    most = float(width)
    for k in range(count):
        ax, ay = points[k, 0], points[k, 1]
        j = k + 1 if k + 1 < count else 0
        bx, by = points[j, 0], points[j, 1]
        if ay > by:
            ax, ay, bx, by = bx, by, ax, ay
        y0 = max(int(max(ay - margin, 0.0)), first)
        y1 = min(int(max(by + margin + 1.0, 0.0)), last)
        # The part of the edge within a row, the margin included, begins and ends at these distances from the row.
        to_left, to_right, slope = -margin, 1.0 + margin, 0.0
        if by - ay > 1e-9:
            slope = (bx - ax) / (by - ay)
            if slope < 0.0:
                to_left, to_right = to_right, to_left
            begin = end = ax - ay * slope
        else:
            begin, end = min(ax, bx), max(ax, bx)
        begin, end = begin - margin, end + margin + 1.0
        for y in range(y0, y1):
            x0 = int(min(max(begin + min(max(y + to_left, ay), by) * slope, 0.0), most))
            x1 = int(min(max(end + min(max(y + to_right, ay), by) * slope, 0.0), most)) - 1
            left[y], right[y] = min(left[y], x0), max(right[y], x1)
    return first, last


@picture_kernel
def collect(quads, count, rotation, projection, numbers, radius, affine, cone, pixel_rad, height, width, edges, entries,
            heads, points, corner, kept, left, right):  # fmt: skip
    """List what may be seen in each of `height` rows of samples, from near to far.

    `heads` becomes each row's first entry (-1: none), `edges` [*,16] what `find` wants to know of the quads; returns
    the entries, in a larger array where `entries` is too small.
    """
    heads[:height] = -1
    margin = 0.75 if projection[0] == FLAT else 1.5
    away = np.empty(count)
    for i in range(count):
        across, down = quads[i, E] + quads[i, F], quads[i, E + 1] + quads[i, F + 1]
        away[i] = -((quads[i, P] + 0.5 * across) ** 2) - (quads[i, P + 1] + 0.5 * down) ** 2
    n = 0
    # Each quad goes to the head of its rows' lists, the farthest first.
    for i in np.argsort(away):
        q = quads[i]
        m = outline(q, rotation, projection, numbers, radius, affine, cone, pixel_rad, points, corner, kept)
        if m == 0:
            continue
        if m < 0:
            first, last = 0, height
            left[:height] = 0
            right[:height] = width - 1
        else:
            first, last = spans(points, m, margin, height, width, left, right)
        if last <= first:
            continue
        if n + last - first > len(entries):
            more = np.empty((2 * len(entries) + last - first, 4), np.int32)
            more[:n] = entries[:n]
            entries = more
        for y in range(first, last):
            if left[y] > right[y]:
                continue
            entries[n, QUAD], entries[n, LEFT], entries[n, RIGHT], entries[n, NEXT] = i, left[y], right[y], heads[y]
            heads[y] = n
            n += 1
        edge = edges[i]
        base_u, base_v = np.float32(0.0), np.float32(0.0)
        for k in range(3):
            edge[k] = q[N + k]
            edge[4 + k], edge[8 + k] = q[E + k] * q[PER_E], q[F + k] * q[PER_F]
            base_u += q[P + k] * edge[4 + k]
            base_v += q[P + k] * edge[8 + k]
        edge[3], edge[7], edge[11], edge[12], edge[13] = q[DISTANCE], base_u, base_v, q[LOW], q[HIGH]
        edge[14] = q[SEE_THROUGH]
        # No point of the quad is nearer: neither its plane nor the ball around it.
        square, middle, one, other = 0.0, 0.0, 0.0, 0.0
        for k in range(3):
            square += q[N + k] ** 2
            middle += (q[P + k] + 0.5 * (q[E + k] + q[F + k])) ** 2
            one += (q[E + k] + q[F + k]) ** 2
            other += (q[E + k] - q[F + k]) ** 2
        ball = math.sqrt(middle) - 0.5 * math.sqrt(max(one, other))
        edge[15] = 0.9999 * max(-q[DISTANCE] / math.sqrt(square), ball)
    return entries


@inlined
def texel(u, v, base, detail, repeat_e, repeat_f):
    """Index into the textures for a place on a quad; `detail`: texels a sample covers, times sqrt 2."""
    one, most = np.float32(1.0), np.float32(120.0)
    # A float's exponent is the logarithm's whole part.
    exponent = np.int32(np.float32(max(detail, one)).view(np.int32) >> np.int32(23))
    level = np.int32(min(np.int32(exponent - np.int32(127)), np.int32(6)))
    size = np.int32(np.int32(np.int32(133) - level) << np.int32(23)).view(np.float32)
    mask = np.int32(np.int32(size) - np.int32(1))
    # Samples beside the quad stay within reach of the arithmetic; 8192 keeps truncation a floor.
    x = np.int32(np.int32(min(max(u * repeat_e, -most), most) * size + np.float32(8192.0)) & mask)
    y = np.int32(np.int32(min(max(v * repeat_f, -most), most) * size + np.float32(8192.0)) & mask)
    offset = np.int32(np.int32(STRIDE) - np.int32(np.int32(STRIDE) >> np.int32(level & np.int32(7))))
    return np.uintp(np.uint32(np.int32(np.int32(base + offset) + np.int32(np.int32(y << np.int32(7)) + x))))


@inlined
def meet(dx, dy, dz, old, nx, ny, nz, distance, ex, ey, ez, base_u, fx, fy, fz, base_v, low, high):
    """Where a ray meets a quad: m along it, share of the right and of the down edge, and whether it is first there."""
    zero, one, none = np.float32(0.0), np.float32(1.0), np.float32(-1e-12)
    towards = nx * dx + ny * dy + nz * dz
    faces = towards < none
    t = distance / (towards if faces else -one)
    v = t * (dx * fx + dy * fy + dz * fz) - base_v
    u = t * (dx * ex + dy * ey + dz * ez) - base_u
    rest = one - v
    hit = faces & (t < old) & (v >= zero) & (v <= one) & (u >= low * rest) & (u <= one - high * rest)
    return t, u, v, hit


@inlined
def find(entries, head, edges, quads, ray_x, ray_y, ray_z, ray, wide, pixel_rad, texels, depth, seen, deepest, at):
    """What a row of samples sees: depth (m along the ray, FAR: nothing) and seen (quad's index, -1) from `at` on.

    `ray` is the row's first index in the tables of rays, `wide` their padded width; `deepest` is the largest depth of
    each group of samples, for passing over groups that hide a quad.
    """
    zero, no, yes = np.float32(0.0), np.int32(0), np.int32(1)
    for x in range(wide):
        put(depth, np.uintp(at + x), np.float32(FAR), "depth")
        put(seen, np.uintp(at + x), np.int32(-1), "seen")
    top = at // LANES
    for g in range(wide // LANES):
        deepest[top + g] = FAR
    e = head
    while e >= 0:
        i = np.int32(entries[e, QUAD])
        begin, end, nearest = int(entries[e, LEFT]) // LANES, int(entries[e, RIGHT]) // LANES, edges[i, 15]
        while begin <= end and deepest[np.uintp(top + begin)] <= nearest:
            begin += 1
        if begin > end:
            entries[e, LEFT], entries[e, RIGHT] = 1, 0
            e = entries[e, NEXT]
            continue
        nx, ny, nz, distance = edges[i, 0], edges[i, 1], edges[i, 2], edges[i, 3]
        ex, ey, ez, base_u = edges[i, 4], edges[i, 5], edges[i, 6], edges[i, 7]
        fx, fy, fz, base_v = edges[i, 8], edges[i, 9], edges[i, 10], edges[i, 11]
        low, high = edges[i, 12], edges[i, 13]
        lowest, highest = end + 1, begin - 1
        if edges[i, 14] > zero:
            detail = quads[i, TEXELS] * pixel_rad * np.float32(1.4142135)
            base, repeat_e, repeat_f = (
                np.int32(quads[i, TEXTURE]) * TEXTURE_SIZE,
                quads[i, REPEAT_E],
                quads[i, REPEAT_F],
            )
            base = np.int32(base)
            for g in range(begin, end + 1):
                if deepest[np.uintp(top + g)] <= nearest:
                    continue
                some, far = no, no
                for x in range(LANES):
                    o, r = np.uintp(at + LANES * g + x), np.uintp(ray + LANES * g + x)
                    dx, dy, dz = get(ray_x, r, "table"), get(ray_y, r, "table"), get(ray_z, r, "table")
                    old, before = get(depth, o, "depth"), get(seen, o, "seen")
                    t, u, v, hit = meet(
                        dx, dy, dz, old, nx, ny, nz, distance, ex, ey, ez, base_u, fx, fy, fz, base_v, low, high
                    )
                    code = get(texels, texel(u, v, base, detail * t, repeat_e, repeat_f), "table") >> np.uint32(24)
                    hit = hit & (np.uint32(code) != np.uint32(NOTHING))
                    new = t if hit else old
                    some = np.int32(max(some, yes if hit else no))
                    far = np.int32(max(far, np.float32(new).view(np.int32)))
                    put(depth, o, new, "depth")
                    put(seen, o, i if hit else before, "seen")
                deepest[np.uintp(top + g)] = np.int32(far).view(np.float32)
                if some != 0:
                    lowest, highest = min(lowest, g), g
        else:
            for g in range(begin, end + 1):
                if deepest[np.uintp(top + g)] <= nearest:
                    continue
                some, far = no, no
                for x in range(LANES):
                    o, r = np.uintp(at + LANES * g + x), np.uintp(ray + LANES * g + x)
                    dx, dy, dz = get(ray_x, r, "table"), get(ray_y, r, "table"), get(ray_z, r, "table")
                    old, before = get(depth, o, "depth"), get(seen, o, "seen")
                    t, _, _, hit = meet(
                        dx, dy, dz, old, nx, ny, nz, distance, ex, ey, ez, base_u, fx, fy, fz, base_v, low, high
                    )
                    new = t if hit else old
                    some = np.int32(max(some, yes if hit else no))
                    far = np.int32(max(far, np.float32(new).view(np.int32)))
                    put(depth, o, new, "depth")
                    put(seen, o, i if hit else before, "seen")
                deepest[np.uintp(top + g)] = np.int32(far).view(np.float32)
                if some != 0:
                    lowest, highest = min(lowest, g), g
        entries[e, LEFT], entries[e, RIGHT] = lowest * LANES, highest * LANES + LANES - 1
        e = entries[e, NEXT]


@inlined
def packed(r, g, b):
    """A colour 0..255 as one number."""
    return np.uint32(
        np.uint32(np.int32(r))
        | np.uint32(np.uint32(np.int32(g)) << np.uint32(8))
        | np.uint32(np.uint32(np.int32(b)) << np.uint32(16))
    )


@inlined
def channels(value):
    """r, g, b of a packed colour."""
    return (
        np.float32(np.int32(value & np.uint32(255))),
        np.float32(np.int32(np.uint32(value >> np.uint32(8)) & np.uint32(255))),
        np.float32(np.int32(np.uint32(value >> np.uint32(16)) & np.uint32(255))),
    )


@inlined
def shade(entries, head, edges, quads, ray_x, ray_y, ray_z, ray, pixel_rad, texels, fog_r, fog_g, fog_b, density, depth,
          seen, colour, at):  # fmt: skip
    """Packed colours of the samples of a row that see a quad, through the air; `pixel_rad` decides the level."""
    zero, one, half, most = np.float32(0.0), np.float32(1.0), np.float32(0.5), np.float32(255.0)
    no, yes = np.int32(0), np.int32(1)
    e = head
    while e >= 0:
        if entries[e, LEFT] > entries[e, RIGHT]:
            e = entries[e, NEXT]
            continue
        i = np.int32(entries[e, QUAD])
        begin, end = int(entries[e, LEFT]) // LANES, int(entries[e, RIGHT]) // LANES + 1
        ex, ey, ez, base_u = edges[i, 4], edges[i, 5], edges[i, 6], edges[i, 7]
        fx, fy, fz, base_v = edges[i, 8], edges[i, 9], edges[i, 10], edges[i, 11]
        detail = quads[i, TEXELS] * pixel_rad * np.float32(1.4142135)
        base = np.int32(np.int32(quads[i, TEXTURE]) * np.int32(TEXTURE_SIZE))
        repeat_e, repeat_f = quads[i, REPEAT_E], quads[i, REPEAT_F]
        tint_r, tint_g, tint_b = quads[i, TINT], quads[i, TINT + 1], quads[i, TINT + 2]
        light_r, light_g, light_b = quads[i, LIGHT], quads[i, LIGHT + 1], quads[i, LIGHT + 2]
        if quads[i, VARIED] == zero:
            for g in range(begin, end):
                some = no
                for x in range(LANES):
                    some = np.int32(max(some, yes if get(seen, np.uintp(at + LANES * g + x), "seen") == i else no))
                if some == 0:
                    continue
                for x in range(LANES):
                    o, r = np.uintp(at + LANES * g + x), np.uintp(ray + LANES * g + x)
                    mine, old = get(seen, o, "seen") == i, get(colour, o, "colour")
                    t = min(get(depth, o, "depth"), np.float32(1e4))
                    dx, dy, dz = get(ray_x, r, "table"), get(ray_y, r, "table"), get(ray_z, r, "table")
                    v = t * (dx * fx + dy * fy + dz * fz) - base_v
                    u = t * (dx * ex + dy * ey + dz * ez) - base_u
                    value = get(texels, texel(u, v, base, detail * t, repeat_e, repeat_f), "table")
                    tinted = np.uint32(value >> np.uint32(24)) == np.uint32(TINTED)
                    red, green, blue = channels(value)
                    red *= tint_r if tinted else light_r
                    green *= tint_g if tinted else light_g
                    blue *= tint_b if tinted else light_b
                    a = t * density
                    clear = one / (one + a + half * a * a)
                    back = one - clear
                    new = packed(
                        min(red, most) * clear + fog_r * back,
                        min(green, most) * clear + fog_g * back,
                        min(blue, most) * clear + fog_b * back,
                    )
                    put(colour, o, new if mine else old, "colour")
            e = entries[e, NEXT]
            continue
        low, both = edges[i, 12], edges[i, 12] + edges[i, 13]
        flags, panes = int(quads[i, FLAGS]), abs(repeat_e)
        name = np.uint32(np.uint32(np.int32(quads[i, NAME])) * np.uint32(31))
        burning = flags & BURNING != 0
        # Lamps that burn have a colour of their own, others are lit like the rest.
        head_kept = zero if burning else one
        head_r, head_g, head_b = zero, zero, zero
        tail_kept, tail_r, tail_g, tail_b = one, zero, zero, zero
        if burning:
            head_r, head_g, head_b = np.float32(255.0), np.float32(250.0), np.float32(226.0)
            tail_kept, tail_r, tail_g, tail_b = zero, np.float32(206.0), np.float32(30.0), np.float32(26.0)
        if flags & BRAKING:
            tail_kept, tail_r, tail_g, tail_b = zero, most, np.float32(58.0), np.float32(44.0)
        # At night some panes shine.
        shining = np.uint32(3) if burning else np.uint32(0)
        for g in range(begin, end):
            some = no
            for x in range(LANES):
                some = np.int32(max(some, yes if get(seen, np.uintp(at + LANES * g + x), "seen") == i else no))
            if some == 0:
                continue
            for x in range(LANES):
                o, r = np.uintp(at + LANES * g + x), np.uintp(ray + LANES * g + x)
                mine, old = get(seen, o, "seen") == i, get(colour, o, "colour")
                t = min(get(depth, o, "depth"), np.float32(1e4))
                dx, dy, dz = get(ray_x, r, "table"), get(ray_y, r, "table"), get(ray_z, r, "table")
                v = t * (dx * fx + dy * fy + dz * fz) - base_v
                u = t * (dx * ex + dy * ey + dz * ez) - base_u
                rest = one - v
                u = (u - low * rest) / (one - both * rest)
                value = get(texels, texel(u, v, base, detail * t, repeat_e, repeat_f), "table")
                code = np.uint32(value >> np.uint32(24))
                red, green, blue = channels(value)
                tinted, window = code == np.uint32(TINTED), code == np.uint32(WINDOW)
                lamp, front, rear = code == np.uint32(LAMP), code == np.uint32(HEADLIGHT), code == np.uint32(TAIL)
                # Panes differ.
                pane = np.uint32(
                    np.uint32(np.uint32(np.int32(u * panes)) * np.uint32(7919))
                    + np.uint32(np.uint32(np.int32(v * repeat_f)) * np.uint32(104729))
                    + name
                )
                pane = np.uint32(np.uint32(np.uint32(pane * np.uint32(2654435761)) >> np.uint32(7)) & np.uint32(7))
                shines = window & (pane < shining)
                pale = np.float32(0.82) + np.float32(0.06) * np.float32(np.int32(pane))
                share = pale if window else one
                keep = zero if shines else (head_kept if front else (tail_kept if rear else share))
                red *= keep * (one if lamp else (tint_r if tinted else light_r))
                green *= keep * (one if lamp else (tint_g if tinted else light_g))
                blue *= keep * (one if lamp else (tint_b if tinted else light_b))
                red += np.float32(244.0) if shines else (head_r if front else (tail_r if rear else zero))
                green += np.float32(206.0) if shines else (head_g if front else (tail_g if rear else zero))
                blue += np.float32(130.0) if shines else (head_b if front else (tail_b if rear else zero))
                a = t * density
                clear = one / (one + a + half * a * a)
                back = one - clear
                new = packed(
                    min(red, most) * clear + fog_r * back,
                    min(green, most) * clear + fog_g * back,
                    min(blue, most) * clear + fog_b * back,
                )
                put(colour, o, new if mine else old, "colour")
        e = entries[e, NEXT]
