"""People on foot: they wait at the kerb, let each other pass, and do not walk into what stands in their way."""

from __future__ import annotations

import math

from alpagym_runtime.kernels import inlined
from alpagym_runtime.simulators.embedded.contacts import seconds_to_contact
from alpagym_runtime.simulators.embedded.lane_map import GREEN
from alpagym_runtime.simulators.embedded.traffic.columns import (
    ARC,
    COS,
    DESIRED,
    LATERAL,
    LONG,
    NEXT_STOP,
    OFFSET,
    OFFSET_TARGET,
    ON_FOOT,
    PACE,
    PATH,
    PATH_N,
    SIN,
    SPEED,
    STOP,
    STOP_ARC,
    STOP_GROUP,
    STOP_N,
    STOP_X,
    STOP_Y,
    WIDE,
    YIELDS,
    X,
    Y,
)
from alpagym_runtime.simulators.embedded.traffic.following import pose_on_path
from alpagym_runtime.simulators.embedded.traffic.right_of_way import colour, somebody_first
from alpagym_runtime.simulators.embedded.vehicle import STEP_S

APART_M = 0.8
"""Between the middles of two people who pass each other."""

CLEAR_M = 0.85
"""The diagonal of a person."""

ASIDE_MPS, ASIDE_MAX_M = 1.0, 1.0
AHEAD_M = 0.3
"""Kept free in front of one's feet."""

HESITATE_S = 0.5
STRIDE_M = 0.8
"""So far ahead on his path somebody looks, for corners."""


@inlined
def walk(paths, meta, numbers, stops, signals, cycle, yellow, state, around, seen, others, a, time_s):
    """Acceleration of somebody on foot: to the desired pace; at the kerb perhaps waits for a gap or for green."""
    pace = numbers[a, DESIRED]
    first, count, k = meta[a, STOP], meta[a, STOP_N], int(state[a, NEXT_STOP])
    while k < count and stops[first + k, STOP_ARC] < state[a, ARC] - 0.3:
        k += 1
        state[a, NEXT_STOP] = k
    if k < count and stops[first + k, STOP_ARC] - state[a, ARC] < 1.0:
        group, x, y = int(stops[first + k, STOP_GROUP]), stops[first + k, STOP_X], stops[first + k, STOP_Y]
        wait = group >= 0 and colour(signals[group, 0], signals[group, 1], cycle, yellow, time_s) != GREEN
        if not wait and meta[a, YIELDS] != 0 and not math.isnan(x):
            wait = somebody_first(state, around, others, a, x, y)
        if wait:
            pace = 0.0
    if pace > 0.0:
        pace = _among_others(paths, meta, numbers, state, around, seen, others, a, pace)
    # A walker stops within a step.
    return min(max((pace - state[a, SPEED]) / 0.3, -4.0), 2.0) if pace > 0.0 else -state[a, SPEED] / STEP_S


@inlined
def _among_others(paths, meta, numbers, state, around, seen, others, a, pace):
    """The pace m/s that others leave to somebody on foot; he also steps aside here."""
    x, y, cos, sin = around[X, a], around[Y, a], around[COS, a], around[SIN, a]
    first, last, offset, track = meta[a, PATH], meta[a, PATH_N] - 2, state[a, OFFSET], numbers[a, LATERAL]
    next_x, next_y, _, _, _ = pose_on_path(paths, first, last, state[a, ARC] + STRIDE_M, offset)
    # Where he will be going, round a corner, and where he is going.
    ways = ((next_x - x) / STRIDE_M, (next_y - y) / STRIDE_M), (cos, sin)
    allowed, nearest, aside, left_free, right_free = pace, 1e9, track, True, True
    # Who does not wait for cars does not look at the ego either: it has to look out.
    count = others if meta[a, YIELDS] != 0 else others - 1
    # Most are far; without branches, for several at a time.
    for o in range(count):
        reach = 4.0 + around[LONG, o] / 2.0
        seen[o] = (abs(around[X, o] - x) <= reach) & (abs(around[Y, o] - y) <= reach)
    seen[a] = 0
    for o in range(count):
        if seen[o] == 0:
            continue
        dx, dy = around[X, o] - x, around[Y, o] - y
        if around[ON_FOOT, o] == 0.0:
            if _about_to_touch(x, y, cos, sin, pace, around, o):
                allowed = 0.0
            continue
        same_way = cos * around[COS, o] + sin * around[SIN, o]
        toward = around[PACE, o] * same_way
        for way in ways:
            along, across = dx * way[0] + dy * way[1], dy * way[0] - dx * way[1]
            if 0.0 < along < CLEAR_M + 0.1 * (pace - toward) and abs(across) < CLEAR_M - 0.1:
                allowed = min(allowed, max(toward - 0.1, 0.0))
        along, across = dx * cos + dy * sin, dy * cos - dx * sin
        if abs(along) < APART_M and abs(across) < APART_M - 0.02:
            left_free, right_free = left_free and across < 0.0, right_free and across > 0.0
        if around[PACE, o] > 0.2 and abs(same_way) < 0.7:
            # Ways that cross: the later one in the list waits, if they would meet.
            if a > o and _about_to_meet(x, y, cos, sin, pace, around, o):
                allowed = 0.0
        elif toward < pace - 0.05 and -APART_M < along < min(nearest, 3.5):
            # In his way, or in it if he went back to where he walks.
            if min(abs(across), abs(offset + across - track)) > APART_M + 0.05:
                continue
            nearest, aside = along, offset
            if abs(across) < APART_M - 0.05:
                # To the right, unless the other one is there.
                aside += across + (APART_M if across < -0.2 else -APART_M)
    shift = min(max(aside, track - ASIDE_MAX_M), track + ASIDE_MAX_M) - offset
    if (shift > 0.0 and left_free) or (shift < 0.0 and right_free):
        state[a, OFFSET] += min(max(shift, -ASIDE_MPS * STEP_S), ASIDE_MPS * STEP_S)
    state[a, OFFSET_TARGET] = state[a, OFFSET]
    return allowed


@inlined
def _about_to_touch(x, y, cos, sin, pace, around, o):
    """Whether a vehicle would be touched within half a second by walking on, and not by standing."""
    yaw, other = math.atan2(sin, cos), math.atan2(around[SIN, o], around[COS, o])
    vx, vy = around[PACE, o] * around[COS, o], around[PACE, o] * around[SIN, o]
    long, wide = around[LONG, o], around[WIDE, o]
    front_x, front_y = x + AHEAD_M / 2.0 * cos, y + AHEAD_M / 2.0 * sin
    size = 0.6 + AHEAD_M
    walking = seconds_to_contact(
        *(front_x, front_y, yaw, size, 0.66, around[X, o], around[Y, o], other, long, wide),
        *(vx - pace * cos, vy - pace * sin),
    )
    if walking > HESITATE_S:
        return False
    standing = seconds_to_contact(x, y, yaw, 0.6, 0.6, around[X, o], around[Y, o], other, long, wide, vx, vy)
    return standing > 1.0


@inlined
def _about_to_meet(x, y, cos, sin, pace, around, o):
    """Whether somebody on foot comes near within 1.5 s."""
    dx, dy = around[X, o] - x, around[Y, o] - y
    vx, vy = around[PACE, o] * around[COS, o] - pace * cos, around[PACE, o] * around[SIN, o] - pace * sin
    square = vx * vx + vy * vy
    when = min(max(-(dx * vx + dy * vy) / max(square, 1e-6), 0.0), 1.5)
    return math.hypot(dx + when * vx, dy + when * vy) < APART_M + 0.2
