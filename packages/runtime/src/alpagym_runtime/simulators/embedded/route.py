"""Projection onto routes."""

from __future__ import annotations

import math

from alpagym_runtime.kernels import inlined, kernel
from alpagym_runtime.simulators.embedded.scene_bank import (
    ROUTE,
    ROUTE_N,
)


@inlined
def project(bank, scene, segment, x, y, behind, ahead):
    """Nearest route point from `behind` m before to `ahead` m after a segment: (segment, arc length, lateral offset).

    The window keeps the projection on its own branch where a route passes itself; the offset is positive to the left.
    """
    return nearest_on_route(
        bank.route, bank.rows[scene, ROUTE], bank.rows[scene, ROUTE_N], segment, x, y, behind, ahead
    )


@kernel
def nearest_on_route(points, first, count, segment, x, y, behind, ahead):
    """`project` on the polyline points[first:first + count]."""
    route = points[first : first + count]
    here = route[segment, 2]
    low = segment
    while low > 0 and here - route[low, 2] < behind:
        low -= 1
    best, best_arc, best_offset, best_segment = 1e18, 0.0, 0.0, segment
    # The nearest point is at most this far; along the route, distance shrinks by a metre a metre at most.
    near = math.hypot(x - route[segment, 0], y - route[segment, 1]) + 1e-6
    k = low
    while k < count - 1 and route[k, 2] - here < ahead:
        px, py = x - route[k, 0], y - route[k, 1]
        if 0 < k < count - 2:
            too_far = route[k, 2] + math.sqrt(px * px + py * py) - near
            if route[k + 1, 2] < too_far:
                while k < count - 2 and route[k + 1, 2] < too_far:
                    k += 1
                continue
        dx, dy = route[k + 1, 0] - route[k, 0], route[k + 1, 1] - route[k, 1]
        length = route[k + 1, 2] - route[k, 2]
        t = (px * dx + py * dy) / (length * length)
        # Open at both ends of the route, so that behind and beyond it arc length goes on.
        if t < 0.0 and k > 0:
            t = 0.0
        if t > 1.0 and k < count - 2:
            t = 1.0
        ex, ey = px - t * dx, py - t * dy
        distance = ex * ex + ey * ey
        if distance < best - 1e-12:
            best, best_segment = distance, k
            best_arc = route[k, 2] + t * length
            best_offset = (dx * py - dy * px) / length
        k += 1
    return best_segment, best_arc, best_offset
