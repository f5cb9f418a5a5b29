"""Who goes first: signals, junctions, people at a zebra, lanes that become one."""

from __future__ import annotations

import math

from alpagym_runtime.kernels import inlined, kernel
from alpagym_runtime.simulators.embedded.lane_map import GREEN, MERGE, RED, YELLOW, ZEBRA
from alpagym_runtime.simulators.embedded.scene_bank import SIGNAL, SIGNAL_CYCLE, SIGNAL_YELLOW
from alpagym_runtime.simulators.embedded.traffic.columns import (
    ARC,
    COS,
    LANE_WIDTH,
    LONG,
    NEXT_STOP,
    NOWHERE_M,
    OFFSET_TARGET,
    ON_FOOT,
    PACE,
    SIGHT_M,
    SIN,
    SPEED,
    STOP,
    STOP_ARC,
    STOP_GROUP,
    STOP_N,
    STOP_X,
    STOP_Y,
    WAITED,
    X,
    Y,
)
from alpagym_runtime.simulators.embedded.traffic.following import STANDSTILL_M, idm, pace_along
from alpagym_runtime.simulators.embedded.vehicle import STEP_S

PATIENCE_S = 8.0
KERB_M = 2.5
"""Who is so near to the kerb of a zebra wants to cross."""

MERGE_BRAKE_MPS2 = 2.5
"""Nobody brakes harder than it takes, or than this, to let somebody in."""

MERGE_SIGHT_M, TAPER_M = 90.0, 20.0
"""From where on one minds the others who merge, and how far before the end of a lane they have come near."""

BESIDE_M = 5.0


@inlined
def colour(start, end, cycle, yellow, time_s):
    """GREEN, YELLOW or RED at a time of a signal that is green from `start` to `end` s of its cycle."""
    since = (time_s - start) % cycle
    if since < end - start:
        return GREEN
    return YELLOW if since < end - start + yellow else RED


@kernel
def signal_state(bank, scene, group, time_s):
    """GREEN, YELLOW or RED of a signal group."""
    k = bank.rows[scene, SIGNAL] + group
    cycle, yellow = bank.numbers[scene, SIGNAL_CYCLE], bank.numbers[scene, SIGNAL_YELLOW]
    return colour(bank.signals[k, 0], bank.signals[k, 1], cycle, yellow, time_s)


@inlined
def stop_distance(meta, stops, signals, cycle, yellow, state, around, others, a, time_s):
    """Distance m from an agent's front to the next place where it has to wait now; 1e9 for none."""
    front = state[a, ARC] + around[LONG, a] / 2.0
    first, count, k = meta[a, STOP], meta[a, STOP_N], int(state[a, NEXT_STOP])
    while k < count and stops[first + k, STOP_ARC] - front <= -1.0:
        k += 1
        state[a, NEXT_STOP], state[a, WAITED] = k, 0.0
    if k >= count:
        return 1e9
    ahead = stops[first + k, STOP_ARC] - front
    speed = state[a, SPEED]
    needed = speed * speed / (2.0 * 4.0)
    if ahead > SIGHT_M or needed > ahead + 1.0:
        return 1e9
    group = int(stops[first + k, STOP_GROUP])
    if group == MERGE:
        return 1e9
    if group == ZEBRA:
        if speed < 0.5 and ahead < 4.0:
            state[a, WAITED] += STEP_S
        waits = _somebody_at_kerb(
            meta, stops, state, around, others, stops[first + k, STOP_X], stops[first + k, STOP_Y]
        )
        return max(ahead, 0.1) if waits and state[a, WAITED] <= PATIENCE_S else 1e9
    if group >= 0:
        shown = colour(signals[group, 0], signals[group, 1], cycle, yellow, time_s)
        if shown == RED or (shown == YELLOW and needed < ahead):
            return max(ahead, 0.1)
    if ahead < 25.0 and not math.isnan(stops[first + k, STOP_X]):
        if speed < 0.5 and ahead < 4.0:
            state[a, WAITED] += STEP_S
        if somebody_first(state, around, others, a, stops[first + k, STOP_X], stops[first + k, STOP_Y]):
            return max(ahead, 0.1)
    return 1e9


@inlined
def somebody_first(state, around, others, a, x, y):
    """Whether traffic on another path reaches the conflict at x, y before this agent has cleared it."""
    to_clear = around[LONG, a] + math.hypot(x - around[X, a], y - around[Y, a])
    clear_s = to_clear / max(around[PACE, a], 4.0) + 1.0
    if state[a, WAITED] > PATIENCE_S:
        clear_s = min(clear_s, 1.5)
    for o in range(others):
        dx, dy = x - around[X, o], y - around[Y, o]
        # No root for those who are too far to matter.
        reach = max(3.5, clear_s * around[PACE, o]) + 1e-6
        if abs(dx) > 70.0 or abs(dy) > 70.0 or dx * dx + dy * dy > reach * reach or o == a:
            continue
        if around[COS, o] * around[COS, a] + around[SIN, o] * around[SIN, a] > 0.8:
            continue
        away = math.hypot(dx, dy)
        if away < 3.5:
            return True
        toward = dx * around[COS, o] + dy * around[SIN, o]
        if around[PACE, o] > 0.5 and toward > 0.8 * away and away < clear_s * around[PACE, o]:
            return True
    return False


@inlined
def _somebody_at_kerb(meta, stops, state, around, others, x, y):
    """Whether somebody on foot is about to cross at the zebra whose middle is x, y."""
    for o in range(others - 1):
        k = int(state[o, NEXT_STOP])
        if around[ON_FOOT, o] == 0.0 or k >= meta[o, STOP_N] or around[X, o] >= NOWHERE_M:
            continue
        stop = meta[o, STOP] + k
        if stops[stop, STOP_X] == x and stops[stop, STOP_Y] == y and stops[stop, STOP_ARC] - state[o, ARC] < KERB_M:
            return True
    return False


@inlined
def next_group(meta, stops, state, a):
    """The group of an agent's next stop, or ZEBRA or MERGE; -1 for none."""
    k = int(state[a, NEXT_STOP])
    return int(stops[meta[a, STOP] + k, STOP_GROUP]) if k < meta[a, STOP_N] else -1


@inlined
def zip_in(meta, numbers, stops, state, around, others, a, desired):
    """Acceleration m/s2 at most, where an agent's lane becomes one with another; 1e9 if that leaves it free.

    Who has less way to go to where the lanes meet goes first; everybody keeps a distance from the one before him,
    whatever lane that one is in.
    """
    if next_group(meta, stops, state, a) != MERGE:
        return 1e9
    stop, half = meta[a, STOP] + int(state[a, NEXT_STOP]), numbers[a, LANE_WIDTH] / 2.0
    to_go = stops[stop, STOP_ARC] - state[a, ARC]
    if to_go > MERGE_SIGHT_M or abs(state[a, OFFSET_TARGET]) > half:
        return 1e9
    x, y = stops[stop, STOP_X], stops[stop, STOP_Y]
    best, pace = 1e9, 0.0
    for o in range(others):
        if o == a or around[ON_FOOT, o] > 0.0 or around[X, o] >= NOWHERE_M:
            continue
        if o == others - 1:
            # The ego: by where it is and looks.
            dx, dy = x - around[X, o], y - around[Y, o]
            if abs(dy * around[COS, o] - dx * around[SIN, o]) > BESIDE_M or pace_along(around, a, o) < 0.0:
                continue
            others_way = dx * around[COS, o] + dy * around[SIN, o]
            if others_way < 0.0:
                continue
        else:
            if next_group(meta, stops, state, o) != MERGE or abs(state[o, OFFSET_TARGET]) > half:
                continue
            stop = meta[o, STOP] + int(state[o, NEXT_STOP])
            if stops[stop, STOP_X] != x or stops[stop, STOP_Y] != y:
                continue
            others_way = stops[stop, STOP_ARC] - state[o, ARC]
        ahead = to_go - others_way
        gap = ahead - (around[LONG, a] + around[LONG, o]) / 2.0
        if ahead < 0.0 or (ahead == 0.0 and o > a) or gap >= best:
            continue
        best, pace = gap, pace_along(around, a, o)
    if best >= 1e9:
        return 1e9
    closing = state[a, SPEED] - pace
    # What it takes to be a little behind where the lanes have come together; not more, for there is time.
    left_s = max((to_go - TAPER_M) / max(state[a, SPEED], 1.0), 0.5)
    needed = 2.0 * max(STANDSTILL_M - best + closing * left_s, 0.0) / (left_s * left_s)
    return max(idm(state[a, SPEED], desired, best, closing), -max(MERGE_BRAKE_MPS2, 1.2 * needed))
