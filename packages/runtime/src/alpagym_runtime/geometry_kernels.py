"""Compiled box tests; `geometry` offers them to Python, the embedded simulator's kernels call them directly."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.kernels import kernel

Float = NDArray[np.float64]

EDGE_TOLERANCE_M = 1e-3
"""A box may stick out of the drivable area by this much (1 cm over is off-road, a rounding error is not)."""


@kernel
def box_penetration_kernel(ax, ay, ayaw, alength, awidth, bx, by, byaw, blength, bwidth):
    """Separating-axis test of two boxes given by centre, yaw and size.

    Returns (depth, axis, sign): depth > 0 is the smallest overlap in m, <= 0 a separation; axis 0 and 1 are a's x and
    y, 2 and 3 b's; sign is +1 where b lies on the axis' positive side of a.
    """
    dx, dy = bx - ax, by - ay
    ca, sa, cb, sb = math.cos(ayaw), math.sin(ayaw), math.cos(byaw), math.sin(byaw)
    cross, dot = abs(ca * sb - sa * cb), abs(ca * cb + sa * sb)
    along_a, across_a = dx * ca + dy * sa, dy * ca - dx * sa
    along_b, across_b = dx * cb + dy * sb, dy * cb - dx * sb
    best, axis, sign = 1e18, 0, 1.0
    for i in range(4):
        if i == 0:
            gap, reach = along_a, (alength + blength * dot + bwidth * cross) / 2.0
        elif i == 1:
            gap, reach = across_a, (awidth + blength * cross + bwidth * dot) / 2.0
        elif i == 2:
            gap, reach = along_b, (blength + alength * dot + awidth * cross) / 2.0
        else:
            gap, reach = across_b, (bwidth + alength * cross + awidth * dot) / 2.0
        depth = reach - abs(gap)
        if depth < best:
            best, axis, sign = depth, i, 1.0 if gap >= 0.0 else -1.0
    return best, axis, sign


@kernel
def penetrations_kernel(a: Float, b: Float) -> Float:
    """`box_penetration_kernel`'s depth [N] for boxes [N,5] (centre x, y, yaw, length, width), the same both ways."""
    out = np.empty(len(a))
    for i in range(len(a)):
        # Ordered, so that rounding is the same both ways.
        first, second = a[i], b[i]
        swap = False
        for k in range(5):
            if first[k] != second[k]:
                swap = first[k] > second[k]
                break
        if swap:
            first, second = second, first
        out[i] = box_penetration_kernel(
            first[0], first[1], first[2], first[3], first[4], second[0], second[1], second[2], second[3], second[4]
        )[0]
    return out


@kernel
def segment_meets_box_kernel(x0, y0, x1, y1, half_length, half_width):
    """Whether a segment enters the open box [-half_length, half_length] x [-half_width, half_width] (Liang-Barsky)."""
    enter, leave = 0.0, 1.0
    for axis in range(2):
        start, delta, half = (x0, x1 - x0, half_length) if axis == 0 else (y0, y1 - y0, half_width)
        if delta == 0.0:
            if abs(start) >= half:
                return False
        else:
            near, far = (-half - start) / delta, (half - start) / delta
            if near > far:
                near, far = far, near
            enter, leave = max(enter, near), min(leave, far)
            if enter >= leave:
                return False
    return True


@kernel
def box_inside_kernel(x, y, yaw, length, width, segments, band_offsets, band_segments, band_low, band_height):
    """Whether a box (centre, yaw, size) lies inside the area bounded by `segments` [S,4].

    A box lies inside exactly when its centre does and no boundary segment enters it. The segments are indexed by bands
    of y: band k holds those that touch [band_low + k·band_height, … + band_height].
    """
    half_length, half_width = length / 2.0 - EDGE_TOLERANCE_M, width / 2.0 - EDGE_TOLERANCE_M
    cos, sin = math.cos(yaw), math.sin(yaw)
    reach_x = abs(half_length * cos) + abs(half_width * sin)
    reach_y = abs(half_length * sin) + abs(half_width * cos)
    bands = len(band_offsets) - 1
    first = math.floor((y - reach_y - band_low) / band_height)
    last = math.floor((y + reach_y - band_low) / band_height)
    centre = math.floor((y - band_low) / band_height)
    if centre < 0 or centre >= bands:
        return False
    for band in range(max(first, 0), min(last, bands - 1) + 1):
        for k in range(band_offsets[band], band_offsets[band + 1]):
            s = segments[band_segments[k]]
            if max(s[0], s[2]) <= x - reach_x or min(s[0], s[2]) >= x + reach_x:
                continue
            dx0, dy0, dx1, dy1 = s[0] - x, s[1] - y, s[2] - x, s[3] - y
            if segment_meets_box_kernel(
                dx0 * cos + dy0 * sin,
                dy0 * cos - dx0 * sin,
                dx1 * cos + dy1 * sin,
                dy1 * cos - dx1 * sin,
                half_length,
                half_width,
            ):
                return False
    inside = False
    for k in range(band_offsets[centre], band_offsets[centre + 1]):
        s = segments[band_segments[k]]
        if (s[1] > y) != (s[3] > y) and x < s[0] + (y - s[1]) * (s[2] - s[0]) / (s[3] - s[1]):
            inside = not inside
    return inside


@kernel
def boxes_inside_kernel(
    boxes: Float,
    segments: Float,
    band_offsets: NDArray[np.int64],
    band_segments: NDArray[np.int64],
    band_low: float,
    band_height: float,
) -> NDArray[np.bool_]:
    """`box_inside_kernel` for boxes [N,5]."""
    out = np.empty(len(boxes), np.bool_)
    for i in range(len(boxes)):
        b = boxes[i]
        out[i] = box_inside_kernel(
            b[0], b[1], b[2], b[3], b[4], segments, band_offsets, band_segments, band_low, band_height
        )
    return out
