"""Keeping one's distance: the intelligent driver model, and who is ahead in a corridor.

Source: Treiber, Hennecke, Helbing 2000, doi:10.1103/PhysRevE.62.1805.
"""

from __future__ import annotations

import math

from alpagym_runtime.kernels import inlined
from alpagym_runtime.simulators.embedded.traffic.columns import (
    COS,
    LONG,
    NOBODY,
    ON_FOOT,
    PACE,
    SIGHT_M,
    SIN,
    WIDE,
    X,
    Y,
)

ACCELERATE_MPS2, BRAKE_MPS2, HARDEST_MPS2 = 1.6, 2.2, -8.0
COMFORT_MPS2 = 2.0 * math.sqrt(ACCELERATE_MPS2 * BRAKE_MPS2)
HEADWAY_S, STANDSTILL_M = 1.2, 2.0
SIDE_MARGIN_M = 0.25


@inlined
def pose_on_path(paths, first, last, arc, offset):
    """Centre x, y, yaw and its cos and sin of a place `offset` m left of the path paths[first:first + last + 2]."""
    k = min(max(int(arc), 0), last)
    t, p = arc - k, first + k
    yaw = paths[p, 2] + t * (paths[p + 1, 2] - paths[p, 2])
    cos, sin = math.cos(yaw), math.sin(yaw)
    x = paths[p, 0] + t * (paths[p + 1, 0] - paths[p, 0]) - offset * sin
    y = paths[p, 1] + t * (paths[p + 1, 1] - paths[p, 1]) + offset * cos
    return x, y, yaw, cos, sin


@inlined
def idm(speed, desired, gap, closing):
    """Acceleration m/s2 of the intelligent driver model; `closing` > 0 comes nearer."""
    wanted = STANDSTILL_M + max(speed * HEADWAY_S + speed * closing / COMFORT_MPS2, 0.0)
    free = speed / max(desired, 0.1)
    free *= free
    near = wanted / max(gap, 0.1)
    return min(max(ACCELERATE_MPS2 * (1.0 - free * free - near * near), HARDEST_MPS2), ACCELERATE_MPS2)


@inlined
def _gap_at(paths, first, last, arc, offset, around, a, o, dx, dy):
    """Free distance m along a path to the box of `o`, taken to be `dx, dy` away from `a`; 1e9 if out of the corridor.

    The path is paths[first:first + last + 2]. Scalars are read one by one: a view of a row costs more than the test.
    """
    cos, sin = around[COS, a], around[SIN, a]
    along = dx * cos + dy * sin
    across = dy * cos - dx * sin
    # A path turns by 45 degrees at most between here and there.
    if along < 0.0 or along > SIGHT_M or abs(across) > along + 4.0:
        return 1e9
    x, y = around[X, a] + dx, around[Y, a] + dy
    k = min(int(arc + along), last)
    # The straight guess falls short on bends: once more from there.
    p = first + k
    k = min(max(int(k + (x - paths[p, 0]) * paths[p, 4] + (y - paths[p, 1]) * paths[p, 5]), 0), last)
    p = first + k
    cos, sin = paths[p, 4], paths[p, 5]
    ex, ey = x - paths[p, 0], y - paths[p, 1]
    lateral = ey * cos - ex * sin - offset
    c = abs(around[COS, o] * cos + around[SIN, o] * sin)
    s = abs(around[SIN, o] * cos - around[COS, o] * sin)
    if abs(lateral) > (around[WIDE, a] + around[LONG, o] * s + around[WIDE, o] * c) / 2.0 + SIDE_MARGIN_M:
        return 1e9
    ahead = k + ex * cos + ey * sin - arc
    if ahead <= 0.0:
        return 1e9
    return max(ahead - (around[LONG, a] + around[LONG, o] * c + around[WIDE, o] * s) / 2.0, 0.01)


@inlined
def gap_to(paths, first, last, arc, offset, around, a, o):
    """Free distance m along a path to a road user who is in the corridor or about to step into it; 1e9 if neither."""
    dx, dy = around[X, o] - around[X, a], around[Y, o] - around[Y, a]
    gap = _gap_at(paths, first, last, arc, offset, around, a, o, dx, dy)
    if gap >= 1e9 and around[ON_FOOT, o] * around[PACE, o] > 0.3:
        reach = 1.5 * around[PACE, o]
        dx, dy = dx + reach * around[COS, o], dy + reach * around[SIN, o]
        gap = _gap_at(paths, first, last, arc, offset, around, a, o, dx, dy)
    return gap


@inlined
def search(paths, first, last, a, arc, offset, around, seen, others):
    """Nearest road user in the corridor `offset` m left of an agent's path: (column of around, gap m)."""
    mx, my, cos, sin = around[X, a], around[Y, a], around[COS, a], around[SIN, a]
    # Who may be there at all; without branches, for several at a time.
    for o in range(others):
        dx, dy = around[X, o] - mx, around[Y, o] - my
        along, across = dx * cos + dy * sin, dy * cos - dx * sin
        near = (abs(dx) <= SIGHT_M) & (abs(dy) <= SIGHT_M)
        ahead = (along >= 0.0) & (along <= SIGHT_M) & (abs(across) <= along + 4.0)
        seen[o] = near & (ahead | (around[ON_FOOT, o] * around[PACE, o] > 0.3))
    seen[a] = 0
    best, leader = 1e9, NOBODY
    for o in range(others):
        if seen[o] == 0:
            continue
        gap = gap_to(paths, first, last, arc, offset, around, a, o)
        if gap < best:
            best, leader = gap, o
    return leader, best


@inlined
def pace_along(around, a, o):
    """Speed m/s of `o` in the direction of `a`."""
    return around[PACE, o] * (around[COS, a] * around[COS, o] + around[SIN, a] * around[SIN, o])
