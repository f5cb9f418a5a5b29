"""Traffic: recorded road users as pure functions of time, or agents that react.

An agent follows its own path. It keeps its distance by the intelligent driver model, slows for bends, stops at signals,
waits for traffic that goes first, lets people cross, and changes lanes when that pays. Leaders are searched for in the
corridor of the path, every fourth step for each agent; in between, only the distance to the one found is renewed.

Sources: IDM, Treiber, Hennecke, Helbing 2000, doi:10.1103/PhysRevE.62.1805; lane changes by MOBIL's incentive and
safety criteria with politeness 0, Kesting, Treiber, Helbing 2007, doi:10.3141/1999-10.
"""

from __future__ import annotations

import math

import numpy as np

from alpagym_runtime.kernels import inlined, kernel
from alpagym_runtime.simulators.embedded.lane_map import GREEN, RED, YELLOW
from alpagym_runtime.simulators.embedded.scene import KINDS, MAX_ACTORS
from alpagym_runtime.simulators.embedded.scene_bank import (
    ACTOR,
    ACTOR_N,
    CENTRE_OFFSET,
    LENGTH,
    REACTIVE,
    SIGNAL,
    SIGNAL_CYCLE,
    SIGNAL_N,
    SIGNAL_YELLOW,
    WIDTH,
)
from alpagym_runtime.simulators.embedded.state import ACTOR_COS, ACTOR_SIN, ACTOR_SPEED, ACTOR_X, ACTOR_Y, ACTOR_YAW
from alpagym_runtime.simulators.embedded.vehicle import STEP_S

# Columns of bank.agents.
PATH, PATH_N, STOP, STOP_N, LANES_LEFT, LANES_RIGHT, YIELDS = range(7)
# Columns of bank.agent_numbers.
START_ARC, START_SPEED, DESIRED, LATERAL, LANE_WIDTH = range(5)
# Columns of bank.stops.
STOP_ARC, STOP_GROUP, STOP_X, STOP_Y = range(4)
# Columns of Slots.agents.
ARC, SPEED, ACCELERATION, OFFSET, OFFSET_TARGET, WAITED, LANE, NEXT_STOP = range(8)

# Rows of what agents see of each other, see `make_view`.
X, Y, COS, SIN, PACE, LONG, WIDE, ON_FOOT = range(8)

PEDESTRIAN = KINDS.index("pedestrian")
NOBODY = -1

SEARCH_EVERY = 4
SIGHT_M = 55.0
ACCELERATE_MPS2, BRAKE_MPS2, HARDEST_MPS2 = 1.6, 2.2, -8.0
COMFORT_MPS2 = 2.0 * math.sqrt(ACCELERATE_MPS2 * BRAKE_MPS2)
HEADWAY_S, STANDSTILL_M = 1.2, 2.0
BEND_MPS2 = 2.0
SIDE_MARGIN_M = 0.25
LANE_CHANGE_MPS = 1.2
PATIENCE_S = 8.0


@inlined
def _colour(start, end, cycle, yellow, time_s):
    since = (time_s - start) % cycle
    if since < end - start:
        return GREEN
    return YELLOW if since < end - start + yellow else RED


@kernel
def signal_state(bank, scene, group, time_s):
    """GREEN, YELLOW or RED of a signal group."""
    k = bank.rows[scene, SIGNAL] + group
    cycle, yellow = bank.numbers[scene, SIGNAL_CYCLE], bank.numbers[scene, SIGNAL_YELLOW]
    return _colour(bank.signals[k, 0], bank.signals[k, 1], cycle, yellow, time_s)


@inlined
def _pose_on_path(paths, first, last, arc, offset):
    """Centre x, y, yaw and its cos and sin of a place `offset` m left of the path paths[first:first + last + 2]."""
    k = min(max(int(arc), 0), last)
    t, p = arc - k, first + k
    yaw = paths[p, 2] + t * (paths[p + 1, 2] - paths[p, 2])
    cos, sin = math.cos(yaw), math.sin(yaw)
    x = paths[p, 0] + t * (paths[p + 1, 0] - paths[p, 0]) - offset * sin
    y = paths[p, 1] + t * (paths[p + 1, 1] - paths[p, 1]) + offset * cos
    return x, y, yaw, cos, sin


@inlined
def _place(paths, meta, state, actors, a):
    """Put an actor where its agent is on its path."""
    x, y, yaw, cos, sin = _pose_on_path(paths, meta[a, PATH], meta[a, PATH_N] - 2, state[a, ARC], state[a, OFFSET])
    actors[a, ACTOR_X], actors[a, ACTOR_Y], actors[a, ACTOR_YAW] = x, y, yaw
    actors[a, ACTOR_SPEED], actors[a, ACTOR_COS], actors[a, ACTOR_SIN] = state[a, SPEED], cos, sin


@kernel
def make_view():
    """Room for what the agents of one slot see: (around [8,MAX_ACTORS + 1], seen [MAX_ACTORS + 1])."""
    return np.empty((8, MAX_ACTORS + 1)), np.empty(MAX_ACTORS + 1, np.uint8)


@inlined
def begin_traffic(bank, slots, i):
    """Put a scene's road users where they are at grid index 0."""
    scene = slots.scene[i]
    first, count = bank.rows[scene, ACTOR], bank.rows[scene, ACTOR_N]
    if bank.rows[scene, REACTIVE] == 0 or not slots.reactive[i]:
        _replay(bank, slots, i, scene, 0)
        return
    meta = bank.agents[first : first + count]
    for a in range(count):
        number = bank.agent_numbers[first + a]
        state = slots.agents[i, a]
        state[:] = 0.0
        state[ARC], state[SPEED] = number[START_ARC], number[START_SPEED]
        state[OFFSET], state[OFFSET_TARGET] = number[LATERAL], number[LATERAL]
        slots.leader[i, a] = NOBODY
        slots.present[i, a] = True
        _place(bank.paths, meta, slots.agents[i], slots.actors[i], a)
        slots.actors_before[i, a] = slots.actors[i, a, :4]


@inlined
def step_traffic(bank, slots, i, ego, around, seen):
    """Move a slot's road users to its present step; `ego` is the ego's state one step ago, when they decided.

    `around` and `seen` are of `make_view`.
    """
    scene, step = slots.scene[i], slots.step[i]
    if bank.rows[scene, REACTIVE] == 0 or not slots.reactive[i]:
        _replay(bank, slots, i, scene, step)
        return
    first, count = bank.rows[scene, ACTOR], bank.rows[scene, ACTOR_N]
    meta = bank.agents[first : first + count]
    _look_around(bank, slots, i, ego, around)
    _decide(
        *(bank.paths, meta, bank.agent_numbers[first : first + count], bank.stops),
        bank.signals[bank.rows[scene, SIGNAL] : bank.rows[scene, SIGNAL] + bank.rows[scene, SIGNAL_N]],
        *(bank.numbers[scene, SIGNAL_CYCLE], bank.numbers[scene, SIGNAL_YELLOW]),
        *(slots.present[i], slots.agents[i], slots.leader[i], around, seen, count + 1, step, (step - 1) * STEP_S),
    )
    _move(bank.paths, meta, slots.present[i], slots.agents[i], slots.actors[i], slots.actors_before[i])


@inlined
def _move(paths, meta, present, state, actors, before):
    """Every agent's next place; who comes to the end of its path leaves."""
    for a in range(len(meta)):
        if not present[a]:
            continue
        speed = max(state[a, SPEED] + state[a, ACCELERATION] * STEP_S, 0.0)
        state[a, ARC] += (state[a, SPEED] + speed) / 2.0 * STEP_S
        moved = min(LANE_CHANGE_MPS, speed) * STEP_S
        state[a, OFFSET] += min(max(state[a, OFFSET_TARGET] - state[a, OFFSET], -moved), moved)
        state[a, SPEED] = speed
        if state[a, ARC] >= meta[a, PATH_N] - 1.5:
            present[a] = False
            continue
        for k in range(4):
            before[a, k] = actors[a, k]
        _place(paths, meta, state, actors, a)


@inlined
def _decide(
    paths, meta, numbers, stops, signals, cycle, yellow, present, state, leaders, around, seen, others, step, time_s
):
    """Every agent's acceleration. Arrays are passed one by one: handing over the bank costs 0.3 us a call."""
    for a in range(others - 1):
        if not present[a]:
            continue
        if around[ON_FOOT, a] > 0.0:
            state[a, ACCELERATION] = _walk(
                meta, numbers, stops, signals, cycle, yellow, state, around, others, a, time_s
            )
        else:
            state[a, ACCELERATION] = _drive(
                *(paths, meta, numbers, stops, signals, cycle, yellow, state, leaders),
                *(around, seen, others, a, step, time_s),
            )


@inlined
def _look_around(bank, slots, i, ego, around):
    """Everybody whom agents may meet, as columns [8,A+1]; the last is the ego, absent ones are far away."""
    scene, actors, present = slots.scene[i], slots.actors[i], slots.present[i]
    first, count = bank.rows[scene, ACTOR], bank.rows[scene, ACTOR_N]
    for a in range(count):
        around[X, a] = actors[a, ACTOR_X] if present[a] else 1e9
        around[Y, a], around[PACE, a] = actors[a, ACTOR_Y], actors[a, ACTOR_SPEED]
        around[COS, a], around[SIN, a] = actors[a, ACTOR_COS], actors[a, ACTOR_SIN]
        around[LONG, a], around[WIDE, a] = bank.sizes[first + a, 0], bank.sizes[first + a, 1]
        around[ON_FOOT, a] = 1.0 if bank.actors[first + a, 3] == PEDESTRIAN else 0.0
    number, cos, sin = bank.numbers[scene], math.cos(ego[2]), math.sin(ego[2])
    around[COS, count], around[SIN, count], around[PACE, count] = cos, sin, ego[3]
    around[X, count] = ego[0] + number[CENTRE_OFFSET] * cos
    around[Y, count] = ego[1] + number[CENTRE_OFFSET] * sin
    around[LONG, count], around[WIDE, count], around[ON_FOOT, count] = number[LENGTH], number[WIDTH], 0.0


@inlined
def _replay(bank, slots, i, scene, step):
    """Recorded road users where they are at the present step; each only inside its interval."""
    for a in range(bank.rows[scene, ACTOR_N]):
        row = bank.actors[bank.rows[scene, ACTOR] + a]
        slots.present[i, a] = row[1] <= step <= row[2]
        if not slots.present[i, a]:
            continue
        now = bank.tracks[row[0] + step]
        before = bank.tracks[row[0] + step - 1] if step > row[1] else now
        for k in range(6):
            slots.actors[i, a, k] = now[k]
        for k in range(4):
            # Where it has just appeared there is no step before.
            slots.actors_before[i, a, k] = before[k] if step > row[1] else np.nan


@inlined
def _idm(speed, desired, gap, closing):
    """Acceleration m/s2 of the intelligent driver model; `closing` > 0 comes nearer."""
    wanted = STANDSTILL_M + max(speed * HEADWAY_S + speed * closing / COMFORT_MPS2, 0.0)
    free = speed / max(desired, 0.1)
    free *= free
    near = wanted / max(gap, 0.1)
    return min(max(ACCELERATE_MPS2 * (1.0 - free * free - near * near), HARDEST_MPS2), ACCELERATE_MPS2)


@inlined
def _gap(paths, first, last, arc, offset, around, a, o, dx, dy):
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
def _search(paths, first, last, a, arc, offset, around, seen, others):
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
        dx, dy = around[X, o] - mx, around[Y, o] - my
        gap = _gap(paths, first, last, arc, offset, around, a, o, dx, dy)
        if gap >= 1e9 and around[ON_FOOT, o] * around[PACE, o] > 0.3:
            # Somebody about to step into the corridor.
            reach = 1.5 * around[PACE, o]
            dx, dy = dx + reach * around[COS, o], dy + reach * around[SIN, o]
            gap = _gap(paths, first, last, arc, offset, around, a, o, dx, dy)
        if gap < best:
            best, leader = gap, o
    return leader, best


@inlined
def _pace_along(around, a, o):
    """Speed m/s of `o` in the direction of `a`."""
    return around[PACE, o] * (around[COS, a] * around[COS, o] + around[SIN, a] * around[SIN, o])


@inlined
def _drive(paths, meta, numbers, stops, signals, cycle, yellow, state, leaders, around, seen, others, a, step, time_s):
    """Acceleration m/s2 of a driving agent."""
    desired = numbers[a, DESIRED]
    if desired <= 0.0:
        return 0.0
    first, last = meta[a, PATH], meta[a, PATH_N] - 2
    arc, speed, offset, target = state[a, ARC], state[a, SPEED], state[a, OFFSET], state[a, OFFSET_TARGET]
    bend = paths[first + min(int(arc), last), 3]
    if bend * desired * desired > BEND_MPS2:
        desired = math.sqrt(BEND_MPS2 / bend)
    leader, gap, pace = leaders[a], 1e9, 0.0
    if (step + a) % SEARCH_EVERY == 0:
        leader, gap = _search(paths, first, last, a, arc, target, around, seen, others)
        if offset != target:
            # Between lanes both count.
            here, near = _search(paths, first, last, a, arc, offset, around, seen, others)
            if near < gap:
                leader, gap = here, near
        leaders[a] = leader
    elif leader != NOBODY:
        dx, dy = around[X, leader] - around[X, a], around[Y, leader] - around[Y, a]
        gap = _gap(paths, first, last, arc, target, around, a, leader, dx, dy)
    if leader != NOBODY:
        pace = _pace_along(around, a, leader)
    answer = _idm(speed, desired, gap, speed - pace)
    free = meta[a, LANES_LEFT] + meta[a, LANES_RIGHT] > 0
    if free and (step + 3 * a) % 10 == 0 and offset == target:
        _consider_lane(paths, meta, numbers, state, around, seen, others, a, desired, answer)
    if int(state[a, NEXT_STOP]) < meta[a, STOP_N]:
        stop = _stop_distance(meta, stops, signals, cycle, yellow, state, around, others, a, time_s)
        if stop < 1e9:
            answer = min(answer, _idm(speed, desired, max(stop + STANDSTILL_M - 0.5, 0.1), speed))
    return answer


@inlined
def _stop_distance(meta, stops, signals, cycle, yellow, state, around, others, a, time_s):
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
    if group >= 0:
        colour = _colour(signals[group, 0], signals[group, 1], cycle, yellow, time_s)
        if colour == RED or (colour == YELLOW and needed < ahead):
            return max(ahead, 0.1)
    if ahead < 25.0 and not math.isnan(stops[first + k, STOP_X]):
        if speed < 0.5 and ahead < 4.0:
            state[a, WAITED] += STEP_S
        if _somebody_first(state, around, others, a, stops[first + k, STOP_X], stops[first + k, STOP_Y]):
            return max(ahead, 0.1)
    return 1e9


@inlined
def _somebody_first(state, around, others, a, x, y):
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


@kernel
def _consider_lane(paths, meta, numbers, state, around, seen, others, a, desired, now):
    """Start a lane change if it gains 0.4 m/s2 or more and leaves whoever is behind there enough room."""
    first, last, width = meta[a, PATH], meta[a, PATH_N] - 2, numbers[a, LANE_WIDTH]
    arc, speed, offset = state[a, ARC], state[a, SPEED], state[a, OFFSET]
    best, target = now + 0.4, 0.0
    for side in (1, -1):
        lane = state[a, LANE] + side
        if lane > meta[a, LANES_LEFT] or -lane > meta[a, LANES_RIGHT]:
            continue
        leader, gap = _search(paths, first, last, a, arc, offset + side * width, around, seen, others)
        pace = _pace_along(around, a, leader) if leader != NOBODY else 0.0
        gain = _idm(speed, desired, gap, speed - pace)
        if gain <= best or gap < 6.0 + 0.5 * speed:
            continue
        room = True
        for o in range(others):
            dx, dy = around[X, o] - around[X, a], around[Y, o] - around[Y, a]
            along = dx * around[COS, a] + dy * around[SIN, a]
            across = dy * around[COS, a] - dx * around[SIN, a]
            reach = (around[LONG, o] + around[LONG, a]) / 2.0
            if o == a or abs(across - side * width) > 1.9 or along > reach or _pace_along(around, a, o) < 0.0:
                continue
            pace = around[PACE, o]
            if -along < reach + 3.0 + max(pace - speed, 0.0) * 2.5 + 0.3 * pace:
                room = False
        if room:
            best, target = gain, float(side)
    if target != 0.0:
        state[a, LANE] += target
        state[a, OFFSET_TARGET] = offset + target * width


@inlined
def _walk(meta, numbers, stops, signals, cycle, yellow, state, around, others, a, time_s):
    """Acceleration m/s2 of somebody on foot: to the desired pace; at the kerb perhaps waits for a gap or for green."""
    pace = numbers[a, DESIRED]
    first, count, k = meta[a, STOP], meta[a, STOP_N], int(state[a, NEXT_STOP])
    while k < count and stops[first + k, STOP_ARC] < state[a, ARC] - 0.3:
        k += 1
        state[a, NEXT_STOP] = k
    if k < count and stops[first + k, STOP_ARC] - state[a, ARC] < 1.0:
        group, x, y = int(stops[first + k, STOP_GROUP]), stops[first + k, STOP_X], stops[first + k, STOP_Y]
        wait = group >= 0 and _colour(signals[group, 0], signals[group, 1], cycle, yellow, time_s) != GREEN
        if not wait and meta[a, YIELDS] != 0 and not math.isnan(x):
            wait = _somebody_first(state, around, others, a, x, y)
        if wait:
            pace = 0.0
    return min(max((pace - state[a, SPEED]) / 0.3, -4.0), 2.0)


@kernel
def forecast(bank, slots, i, steps, every, out, exists):
    """Where a slot's road users will be: out [A,steps,3] centre x, y, yaw after `every` grid steps each.

    Recorded ones are known; beyond the recording they go straight on. Agents keep their acceleration for a second and
    then their speed, along their paths; those that have to wait at a red signal now stop there.
    """
    scene, step = slots.scene[i], slots.step[i]
    first, count = bank.rows[scene, ACTOR], bank.rows[scene, ACTOR_N]
    reactive = bank.rows[scene, REACTIVE] != 0 and slots.reactive[i]
    for a in range(count):
        if reactive:
            state, row = slots.agents[i, a], bank.agents[first + a]
            last = row[PATH_N] - 1.5
            limit = 1e9
            if int(state[NEXT_STOP]) < row[STOP_N]:
                stop = bank.stops[row[STOP] + int(state[NEXT_STOP])]
                if stop[STOP_GROUP] >= 0.0 and signal_state(bank, scene, int(stop[STOP_GROUP]), step * STEP_S) == RED:
                    limit = max(stop[STOP_ARC] - bank.sizes[first + a, 0] / 2.0, state[ARC])
            for k in range(steps):
                exists[a, k] = slots.present[i, a]
                t = (k + 1) * every * STEP_S
                ramp = min(t, 1.0)
                if state[ACCELERATION] < 0.0:
                    # It brakes to a stop, not backwards.
                    ramp = min(ramp, state[SPEED] / -state[ACCELERATION])
                moved = state[SPEED] * ramp + state[ACCELERATION] * ramp * ramp / 2.0
                moved += max(state[SPEED] + state[ACCELERATION] * ramp, 0.0) * max(t - ramp, 0.0)
                shift = min(max(state[OFFSET_TARGET] - state[OFFSET], -LANE_CHANGE_MPS * t), LANE_CHANGE_MPS * t)
                arc = min(min(state[ARC] + moved, limit), last)
                x, y, yaw, _, _ = _pose_on_path(bank.paths, row[PATH], row[PATH_N] - 2, arc, state[OFFSET] + shift)
                out[a, k, 0], out[a, k, 1], out[a, k, 2] = x, y, yaw
            continue
        row = bank.actors[first + a]
        for k in range(steps):
            at = step + (k + 1) * every
            exists[a, k] = row[1] <= at and step <= row[2]
            if not exists[a, k]:
                continue
            sample = bank.tracks[row[0] + min(at, row[2])]
            beyond = max(at - row[2], 0) * STEP_S * sample[3]
            out[a, k, 0] = sample[0] + beyond * math.cos(sample[2])
            out[a, k, 1] = sample[1] + beyond * math.sin(sample[2])
            out[a, k, 2] = sample[2]
