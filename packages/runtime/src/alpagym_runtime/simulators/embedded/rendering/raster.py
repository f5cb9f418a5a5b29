"""Which quad each sample sees, and what colour that is.

A quad is looked for inside the outline that its projected edges enclose, one sample wider; whether a sample sees it is
decided by its own ray, so the camera's model may bend lines as it likes.
"""

from __future__ import annotations

import math

import numpy as np

from alpagym_runtime.simulators.embedded.rendering.compiled import inlined, picture_kernel
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
    E,
    F,
    N,
    P,
)
from alpagym_runtime.simulators.embedded.rendering.rays import ANGULAR, BENT, FLAT, RADIUS_STEPS
from alpagym_runtime.simulators.embedded.rendering.textures import (
    LAMP,
    NOTHING,
    OFFSETS,
    OWN,
    TAIL,
    TINTED,
    WINDOW,
)

NEAR_M = 0.02
FAR = 1e9
SPLITS = 24
CORNERS = 160


@inlined
def project(x, y, z, projection, numbers, radius, affine):
    """Sample coordinates of a point in the optical frame, in front of the camera unless the model is angular."""
    scale = projection[1]
    if projection[0] == ANGULAR:
        across = math.sqrt(x * x + y * y) + 1e-12
        at = math.atan2(across, z) * (RADIUS_STEPS / math.pi)
        k = min(int(at), RADIUS_STEPS - 1)
        r = (radius[k] + (at - k) * (radius[k + 1] - radius[k])) / across
        u = affine[0] * x * r + affine[1] * y * r + affine[4]
        v = affine[2] * x * r + affine[3] * y * r + affine[5]
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
            splits = int(min(math.sqrt(square) / nearest / (2.0 * math.sqrt(pixel_rad)) + 1.0, float(SPLITS)))
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
    for k in range(count):
        ax, ay = points[k, 0], points[k, 1]
        j = k + 1 if k + 1 < count else 0
        bx, by = points[j, 0], points[j, 1]
        if ay > by:
            ax, ay, bx, by = bx, by, ax, ay
        slope = (bx - ax) / (by - ay) if by - ay > 1e-9 else 0.0
        flat = by - ay <= 1e-9
        y0 = max(int(max(math.floor(ay - margin), 0.0)), first)
        y1 = min(int(min(math.ceil(by + margin), float(height))), last)
        for y in range(y0, y1):
            # The part of the edge within the row, the margin included.
            if flat:
                one, two = ax, bx
            else:
                one = ax + (min(max(y - margin, ay), by) - ay) * slope
                two = ax + (min(max(y + 1.0 + margin, ay), by) - ay) * slope
            x0 = int(min(max(math.floor(min(one, two) - margin), 0.0), float(width)))
            x1 = int(min(max(math.ceil(max(one, two) + margin), 0.0), float(width))) - 1
            left[y] = min(left[y], x0)
            right[y] = max(right[y], x1)
    return first, last


LEVEL_OF = np.array([min(max(int(np.floor(np.log2(max(ratio, 0.5)) + 0.5)), 0), 6) for ratio in np.arange(96) + 0.5])
"""Texture level by how many texels a sample covers."""


@inlined
def texel(quads, i, u, v, distance, sample_rad):
    """Index into a texture's levels for a place on a quad."""
    level = LEVEL_OF[int(min(quads[i, TEXELS] * distance * sample_rad, np.float32(95.0)))]
    size = 64 >> level
    # Places on a quad are above -1 texel; the shift keeps truncation a floor.
    x = int(u * quads[i, REPEAT_E] * np.float32(size) + np.float32(8192.0)) & (size - 1)
    y = int(v * quads[i, REPEAT_F] * np.float32(size) + np.float32(8192.0)) & (size - 1)
    return OFFSETS[level] + y * size + x


@picture_kernel
def draw(quads, count, rays, rotation, projection, numbers, radius, affine, cone, pixel_rad, tiles, depth, seen,
         points, corner, kept, left, right):  # fmt: skip
    """Fill depth [H,W] (m along the ray, FAR: nothing) and seen [H,W] (quad's index, -1: none)."""
    height, width = depth.shape
    depth[:] = FAR
    seen[:] = -1
    margin = 0.75 if projection[0] == FLAT else 1.5
    zero, one, edge = np.float32(0.0), np.float32(1.0), np.float32(-1e-12)
    # From near to far, so that most of what is hidden is dropped early.
    away = np.empty(count)
    for i in range(count):
        across, down = quads[i, E] + quads[i, F], quads[i, E + 1] + quads[i, F + 1]
        away[i] = (quads[i, P] + 0.5 * across) ** 2 + (quads[i, P + 1] + 0.5 * down) ** 2
    for i in np.argsort(away):
        q = quads[i]
        m = outline(q, rotation, projection, numbers, radius, affine, cone, pixel_rad, points, corner, kept)
        if m == 0:
            continue
        if m < 0:
            first, last = 0, height
            left[:] = 0
            right[:] = width - 1
        else:
            first, last = spans(points, m, margin, height, width, left, right)
        nx, ny, nz, distance = q[N], q[N + 1], q[N + 2], q[DISTANCE]
        px, py, pz = q[P], q[P + 1], q[P + 2]
        ex, ey, ez = q[E] * q[PER_E], q[E + 1] * q[PER_E], q[E + 2] * q[PER_E]
        fx, fy, fz = q[F] * q[PER_F], q[F + 1] * q[PER_F], q[F + 2] * q[PER_F]
        base_u, base_v = px * ex + py * ey + pz * ez, px * fx + py * fy + pz * fz
        low, high, open_ = q[LOW], q[HIGH], q[SEE_THROUGH] > 0.0
        texture = int(q[TEXTURE])
        for y in range(first, last):
            for x in range(left[y], right[y] + 1):
                dx, dy, dz = rays[y, x, 0], rays[y, x, 1], rays[y, x, 2]
                towards = nx * dx + ny * dy + nz * dz
                if towards >= edge:
                    continue
                # Both are negative: farther than what is seen already, without a division.
                if distance <= depth[y, x] * towards:
                    continue
                t = distance / towards
                v = t * (dx * fx + dy * fy + dz * fz) - base_v
                if v < zero or v > one:
                    continue
                u = t * (dx * ex + dy * ey + dz * ez) - base_u
                rest = one - v
                a, b = low * rest, one - high * rest
                if u < a or u > b:
                    continue
                if open_ and tiles[texture, texel(quads, i, u, v, t, pixel_rad), 3] == NOTHING:
                    continue
                depth[y, x] = t
                seen[y, x] = i


@inlined
def colour(quads, i, t, dx, dy, dz, tiles, sample_rad):
    """r, g, b 0..255 of a quad where a ray meets it, without the air between."""
    rx, ry, rz = t * dx - quads[i, P], t * dy - quads[i, P + 1], t * dz - quads[i, P + 2]
    u = (rx * quads[i, E] + ry * quads[i, E + 1] + rz * quads[i, E + 2]) * quads[i, PER_E]
    v = (rx * quads[i, F] + ry * quads[i, F + 1] + rz * quads[i, F + 2]) * quads[i, PER_F]
    flags = int(quads[i, FLAGS])
    rest = np.float32(1.0) - v
    u = (u - quads[i, LOW] * rest) / (np.float32(1.0) - (quads[i, LOW] + quads[i, HIGH]) * rest)
    # Scalars only: a view of an array counts a reference, which costs more than the rest.
    texture, at = int(quads[i, TEXTURE]), texel(quads, i, u, v, t, sample_rad)
    code = tiles[texture, at, 3]
    r, g, b = np.float32(tiles[texture, at, 0]), np.float32(tiles[texture, at, 1]), np.float32(tiles[texture, at, 2])
    if code in (TINTED, OWN, WINDOW):
        if code == WINDOW:
            # Panes differ; at night some are lit.
            pane = (
                int(u * abs(quads[i, REPEAT_E])) * 7919
                + int(v * quads[i, REPEAT_F]) * 104729
                + int(quads[i, NAME]) * 31
            )
            pane = (pane * 2654435761) >> 7
            if flags & BURNING and pane & 7 < 3:
                return np.float32(244.0), np.float32(206.0), np.float32(130.0)
            pale = np.float32(0.82 + 0.06 * (pane & 7))
            r, g, b = r * pale, g * pale, b * pale
        k = TINT if code == TINTED else LIGHT
        return r * quads[i, k], g * quads[i, k + 1], b * quads[i, k + 2]
    if code == LAMP:
        return r, g, b
    if code == TAIL and flags & BRAKING:
        return np.float32(255.0), np.float32(58.0), np.float32(44.0)
    if flags & BURNING:
        if code == TAIL:
            return np.float32(206.0), np.float32(30.0), np.float32(26.0)
        return np.float32(255.0), np.float32(250.0), np.float32(226.0)
    return r * quads[i, LIGHT], g * quads[i, LIGHT + 1], b * quads[i, LIGHT + 2]
