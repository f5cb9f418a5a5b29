"""Keeping one's distance: the intelligent driver model, and who is ahead in a corridor.

Source: Treiber, Hennecke, Helbing 2000, doi:10.1103/PhysRevE.62.1805.
"""

from __future__ import annotations

import math

import numpy as np

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
WALKS_MPS, STEP_IN_S = 0.3, 1.5
"""Who walks faster is where he will be so much later, too."""
SPARE_M, NEAR_M = 3.0, 20.0


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
    if gap >= 1e9 and around[ON_FOOT, o] * around[PACE, o] > WALKS_MPS:
        reach = STEP_IN_S * around[PACE, o]
        dx, dy = dx + reach * around[COS, o], dy + reach * around[SIN, o]
        gap = _gap_at(paths, first, last, arc, offset, around, a, o, dx, dy)
    return gap


@inlined
def search(paths, first, last, a, arc, offset, aside, around, seen, others, likely):
    """Nearest road user in the corridor `offset` m left of an agent's path: (column of around, gap m).

    `aside` is how far left of the path the agent is, and `likely` who it may be: that one is looked at first, and the
    nearer it is, the fewer others. Of two at the same distance it is the first.
    """
    mx, my = around[X, a], around[Y, a]
    best, leader = 1e9, NOBODY
    if likely != NOBODY and max(abs(around[X, likely] - mx), abs(around[Y, likely] - my)) <= SIGHT_M:
        best = gap_to(paths, first, last, arc, offset, around, a, likely)
        if best < 1e9:
            leader = likely
    # Who is found near spares looking farther.
    for within in (min(best, NEAR_M), best):
        _look_ahead(a, within + abs(offset) + abs(aside), around, seen, others)
        for word in range(others // 8 + 1):
            if seen.view(np.uint64)[word] == 0:
                continue
            for o in range(8 * word, min(8 * word + 8, others)):
                if seen[o] == 0 or o == likely:
                    continue
                gap = gap_to(paths, first, last, arc, offset, around, a, o)
                if gap < best or (gap == best and o < leader):
                    best, leader = gap, o
        if best <= within:
            break
    return leader, best


@inlined
def _look_ahead(a, within, around, seen, others):
    """Mark who may be in an agent's corridor at a free distance of `within` m, or about to step into it.

    Along a path nobody is nearer than straight, but for the halves of both sizes and the metre between a path's points.
    """
    mx, my, cos, sin = around[X, a], around[Y, a], around[COS, a], around[SIN, a]
    spare = within + SPARE_M + (around[LONG, a] + around[WIDE, a]) / 2.0
    # Without branches, for several at a time.
    for o in range(others):
        dx, dy = around[X, o] - mx, around[Y, o] - my
        along, across = dx * cos + dy * sin, dy * cos - dx * sin
        walks = around[ON_FOOT, o] * around[PACE, o]
        reach = min(SIGHT_M, spare + 0.71 * (around[LONG, o] + around[WIDE, o]) + STEP_IN_S * walks)
        near = (abs(dx) <= reach) & (abs(dy) <= reach)
        ahead = (along >= 0.0) & (along <= SIGHT_M) & (abs(across) <= along + 4.0)
        seen[o] = near & (ahead | (walks > WALKS_MPS))
    seen[a] = 0


@inlined
def pace_along(around, a, o):
    """Speed m/s of `o` in the direction of `a`."""
    return around[PACE, o] * (around[COS, a] * around[COS, o] + around[SIN, a] * around[SIN, o])
