"""Lane changes by MOBIL's incentive and safety criteria with politeness 0.

Source: Kesting, Treiber, Helbing 2007, doi:10.3141/1999-10.
"""

from __future__ import annotations

from alpagym_runtime.kernels import kernel
from alpagym_runtime.simulators.embedded.lane_map import MERGE
from alpagym_runtime.simulators.embedded.traffic.columns import (
    ARC,
    COS,
    LANE,
    LANE_WIDTH,
    LANES_LEFT,
    LANES_RIGHT,
    LONG,
    NOBODY,
    OFFSET,
    OFFSET_TARGET,
    PACE,
    PATH,
    PATH_N,
    SIN,
    SPEED,
    X,
    Y,
)
from alpagym_runtime.simulators.embedded.traffic.following import idm, pace_along, search
from alpagym_runtime.simulators.embedded.traffic.right_of_way import next_group

SAME_LANE_M = 1.9


@kernel
def consider_lane(paths, meta, numbers, stops, state, around, seen, others, a, desired, now):
    """Start a lane change if it gains 0.4 m/s2 or more and leaves whoever is behind there enough room."""
    first, last, width = meta[a, PATH], meta[a, PATH_N] - 2, numbers[a, LANE_WIDTH]
    arc, speed, offset = state[a, ARC], state[a, SPEED], state[a, OFFSET]
    best, target = now + 0.4, 0.0
    if idm(speed, desired, 1e9, 0.0) <= best:
        return
    # Where it comes from it still brakes for a while.
    slower = max(speed + min(now, 0.0), 0.0)
    for side in (1, -1):
        lane = state[a, LANE] + side
        if lane > meta[a, LANES_LEFT] or -lane > meta[a, LANES_RIGHT]:
            continue
        there = offset + side * width
        leader, gap = search(paths, first, last, a, arc, there, offset, around, seen, others, NOBODY)
        pace = pace_along(around, a, leader) if leader != NOBODY else 0.0
        gain = idm(speed, desired, gap, speed - pace)
        if gain <= best or gap < 6.0 + 0.5 * speed:
            continue
        room = True
        for o in range(others):
            dx, dy = around[X, o] - around[X, a], around[Y, o] - around[Y, a]
            along = dx * around[COS, a] + dy * around[SIN, a]
            across = dy * around[COS, a] - dx * around[SIN, a]
            reach = (around[LONG, o] + around[LONG, a]) / 2.0
            if o == a or along > reach or pace_along(around, a, o) < 0.0:
                continue
            away = abs(across - side * width)
            if o < others - 1:
                # Who is about to come into that lane from beyond it counts as there; the ego tells nobody.
                away = min(away, abs(across + state[o, OFFSET_TARGET] - state[o, OFFSET] - side * width))
                if next_group(meta, stops, state, o) == MERGE:
                    away -= width
            if away > SAME_LANE_M:
                continue
            pace = around[PACE, o]
            if -along < reach + 3.0 + max(pace - slower, 0.0) * 2.5 + 0.3 * pace:
                room = False
                break
        if room:
            best, target = gain, float(side)
    if target != 0.0:
        state[a, LANE] += target
        state[a, OFFSET_TARGET] = offset + target * width
