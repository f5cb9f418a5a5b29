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
from alpagym_runtime.simulators.embedded.scene import KINDS
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
from alpagym_runtime.simulators.embedded.vehicle import STEP_S

# Columns of bank.agents.
PATH, PATH_N, STOP, STOP_N, LANES_LEFT, LANES_RIGHT, YIELDS = range(7)
# Columns of bank.agent_numbers.
START_ARC, START_SPEED, DESIRED, LATERAL, LANE_WIDTH = range(5)
# Columns of bank.stops.
STOP_ARC, STOP_GROUP, STOP_X, STOP_Y = range(4)
# Columns of Slots.agents.
ARC, SPEED, ACCELERATION, OFFSET, OFFSET_TARGET, WAITED, LANE, NEXT_STOP = range(8)

# Columns of what agents see of each other.
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
def pose_on_path(bank, agent, arc, offset, out):
    """Write centre x, y, yaw of a place on an agent's path (samples 1 m apart), `offset` m left of it."""
    row = bank.agents[agent]
    last = row[PATH_N] - 2
    k = min(max(int(arc), 0), last)
    t = arc - k
    a, b = bank.paths[row[PATH] + k], bank.paths[row[PATH] + k + 1]
    yaw = a[2] + t * (b[2] - a[2])
    out[0] = a[0] + t * (b[0] - a[0]) - offset * math.sin(yaw)
    out[1] = a[1] + t * (b[1] - a[1]) + offset * math.cos(yaw)
    out[2] = yaw


@inlined
def begin_traffic(bank, slots, i):
    """Put a scene's road users where they are at grid index 0."""
    scene = slots.scene[i]
    first, count = bank.rows[scene, ACTOR], bank.rows[scene, ACTOR_N]
    if bank.rows[scene, REACTIVE] == 0 or not slots.reactive[i]:
        _replay(bank, slots, i, scene, 0)
        return
    for a in range(count):
        number = bank.agent_numbers[first + a]
        state = slots.agents[i, a]
        state[:] = 0.0
        state[ARC], state[SPEED] = number[START_ARC], number[START_SPEED]
        state[OFFSET], state[OFFSET_TARGET] = number[LATERAL], number[LATERAL]
        slots.leader[i, a] = NOBODY
        slots.present[i, a] = True
        pose_on_path(bank, first + a, state[ARC], state[OFFSET], slots.actors[i, a])
        slots.actors[i, a, 3] = state[SPEED]
        slots.actors_before[i, a] = slots.actors[i, a]


@inlined
def step_traffic(bank, slots, i, ego):
    """Move a slot's road users to its present step; `ego` is the ego's state one step ago, when they decided."""
    scene, step = slots.scene[i], slots.step[i]
    if bank.rows[scene, REACTIVE] == 0 or not slots.reactive[i]:
        _replay(bank, slots, i, scene, step)
        return
    first, count = bank.rows[scene, ACTOR], bank.rows[scene, ACTOR_N]
    around = np.empty((count + 1, 8))
    _look_around(bank, slots, i, ego, around)
    _decide(
        *(bank.paths, bank.agents[first : first + count], bank.agent_numbers[first : first + count], bank.stops),
        bank.signals[bank.rows[scene, SIGNAL] : bank.rows[scene, SIGNAL] + bank.rows[scene, SIGNAL_N]],
        *(bank.numbers[scene, SIGNAL_CYCLE], bank.numbers[scene, SIGNAL_YELLOW]),
        *(slots.present[i], slots.agents[i], slots.leader[i], around, step, (step - 1) * STEP_S),
    )
    for a in range(count):
        if not slots.present[i, a]:
            continue
        state = slots.agents[i, a]
        speed = max(state[SPEED] + state[ACCELERATION] * STEP_S, 0.0)
        state[ARC] += (state[SPEED] + speed) / 2.0 * STEP_S
        moved = min(LANE_CHANGE_MPS, speed) * STEP_S
        state[OFFSET] += min(max(state[OFFSET_TARGET] - state[OFFSET], -moved), moved)
        state[SPEED] = speed
        if state[ARC] >= bank.agents[first + a, PATH_N] - 1.5:
            slots.present[i, a] = False
            continue
        slots.actors_before[i, a] = slots.actors[i, a]
        pose_on_path(bank, first + a, state[ARC], state[OFFSET], slots.actors[i, a])
        slots.actors[i, a, 3] = speed


@inlined
def _decide(paths, meta, numbers, stops, signals, cycle, yellow, present, state, leaders, around, step, time_s):
    """Every agent's acceleration. Arrays are passed one by one: handing over the bank costs 0.3 us a call."""
    for a in range(len(meta)):
        if not present[a]:
            continue
        if around[a, ON_FOOT] > 0.0:
            state[a, ACCELERATION] = _walk(meta, numbers, stops, signals, cycle, yellow, state, around, a, time_s)
        else:
            state[a, ACCELERATION] = _drive(
                paths, meta, numbers, stops, signals, cycle, yellow, state, leaders, around, a, step, time_s
            )


@inlined
def _look_around(bank, slots, i, ego, around):
    """Everybody whom agents may meet, as rows [A+1,8]; the last is the ego, absent ones are far away."""
    scene = slots.scene[i]
    first, count = bank.rows[scene, ACTOR], bank.rows[scene, ACTOR_N]
    for a in range(count):
        actor, size, row = slots.actors[i, a], bank.sizes[first + a], around[a]
        row[X] = actor[0] if slots.present[i, a] else 1e9
        row[Y], row[COS], row[SIN], row[PACE] = actor[1], math.cos(actor[2]), math.sin(actor[2]), actor[3]
        row[LONG], row[WIDE] = size[0], size[1]
        row[ON_FOOT] = 1.0 if bank.actors[first + a, 3] == PEDESTRIAN else 0.0
    number, row = bank.numbers[scene], around[count]
    row[COS], row[SIN], row[PACE] = math.cos(ego[2]), math.sin(ego[2]), ego[3]
    row[X] = ego[0] + number[CENTRE_OFFSET] * row[COS]
    row[Y] = ego[1] + number[CENTRE_OFFSET] * row[SIN]
    row[LONG], row[WIDE], row[ON_FOOT] = number[LENGTH], number[WIDTH], 0.0


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
        for k in range(4):
            slots.actors[i, a, k] = now[k]
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
    cos, sin = around[a, COS], around[a, SIN]
    along = dx * cos + dy * sin
    across = dy * cos - dx * sin
    # A path turns by 45 degrees at most between here and there.
    if along < 0.0 or along > SIGHT_M or abs(across) > along + 4.0:
        return 1e9
    x, y = around[a, X] + dx, around[a, Y] + dy
    k = min(int(arc + along), last)
    # The straight guess falls short on bends: once more from there.
    p = first + k
    k = min(max(int(k + (x - paths[p, 0]) * paths[p, 4] + (y - paths[p, 1]) * paths[p, 5]), 0), last)
    p = first + k
    cos, sin = paths[p, 4], paths[p, 5]
    ex, ey = x - paths[p, 0], y - paths[p, 1]
    lateral = ey * cos - ex * sin - offset
    c = abs(around[o, COS] * cos + around[o, SIN] * sin)
    s = abs(around[o, SIN] * cos - around[o, COS] * sin)
    if abs(lateral) > (around[a, WIDE] + around[o, LONG] * s + around[o, WIDE] * c) / 2.0 + SIDE_MARGIN_M:
        return 1e9
    ahead = k + ex * cos + ey * sin - arc
    if ahead <= 0.0:
        return 1e9
    return max(ahead - (around[a, LONG] + around[o, LONG] * c + around[o, WIDE] * s) / 2.0, 0.01)


@inlined
def _search(paths, first, last, a, arc, offset, around):
    """Nearest road user in the corridor `offset` m left of an agent's path: (row of around, gap m)."""
    mx, my = around[a, X], around[a, Y]
    best, leader = 1e9, NOBODY
    for o in range(len(around)):
        dx, dy = around[o, X] - mx, around[o, Y] - my
        if abs(dx) > SIGHT_M or abs(dy) > SIGHT_M or o == a:
            continue
        gap = _gap(paths, first, last, arc, offset, around, a, o, dx, dy)
        if gap >= 1e9 and around[o, ON_FOOT] * around[o, PACE] > 0.3:
            # Somebody about to step into the corridor.
            reach = 1.5 * around[o, PACE]
            dx, dy = dx + reach * around[o, COS], dy + reach * around[o, SIN]
            gap = _gap(paths, first, last, arc, offset, around, a, o, dx, dy)
        if gap < best:
            best, leader = gap, o
    return leader, best


@inlined
def _pace_along(around, a, o):
    """Speed m/s of `o` in the direction of `a`."""
    return around[o, PACE] * (around[a, COS] * around[o, COS] + around[a, SIN] * around[o, SIN])


@inlined
def _drive(paths, meta, numbers, stops, signals, cycle, yellow, state, leaders, around, a, step, time_s):
    """Acceleration m/s2 of a driving agent."""
    desired = numbers[a, DESIRED]
    if desired <= 0.0:
        return 0.0
    first, last = meta[a, PATH], meta[a, PATH_N] - 2
    arc, speed, offset, target = state[a, ARC], state[a, SPEED], state[a, OFFSET], state[a, OFFSET_TARGET]
    bend = 0.0
    for d in range(0, 20, 4):
        bend = max(bend, abs(paths[first + min(int(arc) + d, last), 3]))
    if bend * desired * desired > BEND_MPS2:
        desired = math.sqrt(BEND_MPS2 / bend)
    leader, gap, pace = leaders[a], 1e9, 0.0
    if (step + a) % SEARCH_EVERY == 0:
        leader, gap = _search(paths, first, last, a, arc, target, around)
        if offset != target:
            # Between lanes both count.
            here, near = _search(paths, first, last, a, arc, offset, around)
            if near < gap:
                leader, gap = here, near
        leaders[a] = leader
    elif leader != NOBODY:
        dx, dy = around[leader, X] - around[a, X], around[leader, Y] - around[a, Y]
        gap = _gap(paths, first, last, arc, target, around, a, leader, dx, dy)
    if leader != NOBODY:
        pace = _pace_along(around, a, leader)
    answer = _idm(speed, desired, gap, speed - pace)
    free = meta[a, LANES_LEFT] + meta[a, LANES_RIGHT] > 0
    if free and (step + 3 * a) % 10 == 0 and offset == target:
        _consider_lane(paths, meta, numbers, state, around, a, desired, answer)
    if int(state[a, NEXT_STOP]) < meta[a, STOP_N]:
        stop = _stop_distance(meta, stops, signals, cycle, yellow, state, around, a, time_s)
        if stop < 1e9:
            answer = min(answer, _idm(speed, desired, max(stop + STANDSTILL_M - 0.5, 0.1), speed))
    return answer


@inlined
def _stop_distance(meta, stops, signals, cycle, yellow, state, around, a, time_s):
    """Distance m from an agent's front to the next place where it has to wait now; 1e9 for none."""
    front = state[a, ARC] + around[a, LONG] / 2.0
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
        if _somebody_first(state, around, a, stops[first + k, STOP_X], stops[first + k, STOP_Y]):
            return max(ahead, 0.1)
    return 1e9


@inlined
def _somebody_first(state, around, a, x, y):
    """Whether traffic on another path reaches the conflict at x, y before this agent has cleared it."""
    to_clear = around[a, LONG] + math.hypot(x - around[a, X], y - around[a, Y])
    clear_s = to_clear / max(around[a, PACE], 4.0) + 1.0
    if state[a, WAITED] > PATIENCE_S:
        clear_s = min(clear_s, 1.5)
    for o in range(len(around)):
        dx, dy = x - around[o, X], y - around[o, Y]
        if abs(dx) > 70.0 or abs(dy) > 70.0 or o == a:
            continue
        if around[o, COS] * around[a, COS] + around[o, SIN] * around[a, SIN] > 0.8:
            continue
        away = math.hypot(dx, dy)
        if away < 3.5:
            return True
        toward = dx * around[o, COS] + dy * around[o, SIN]
        if around[o, PACE] > 0.5 and toward > 0.8 * away and away < clear_s * around[o, PACE]:
            return True
    return False


@kernel
def _consider_lane(paths, meta, numbers, state, around, a, desired, now):
    """Start a lane change if it gains 0.4 m/s2 or more and leaves whoever is behind there enough room."""
    first, last, width = meta[a, PATH], meta[a, PATH_N] - 2, numbers[a, LANE_WIDTH]
    arc, speed, offset = state[a, ARC], state[a, SPEED], state[a, OFFSET]
    best, target = now + 0.4, 0.0
    for side in (1, -1):
        lane = state[a, LANE] + side
        if lane > meta[a, LANES_LEFT] or -lane > meta[a, LANES_RIGHT]:
            continue
        leader, gap = _search(paths, first, last, a, arc, offset + side * width, around)
        pace = _pace_along(around, a, leader) if leader != NOBODY else 0.0
        gain = _idm(speed, desired, gap, speed - pace)
        if gain <= best or gap < 6.0 + 0.5 * speed:
            continue
        room = True
        for o in range(len(around)):
            dx, dy = around[o, X] - around[a, X], around[o, Y] - around[a, Y]
            along = dx * around[a, COS] + dy * around[a, SIN]
            across = dy * around[a, COS] - dx * around[a, SIN]
            reach = (around[o, LONG] + around[a, LONG]) / 2.0
            if o == a or abs(across - side * width) > 1.9 or along > reach or _pace_along(around, a, o) < 0.0:
                continue
            pace = around[o, PACE]
            if -along < reach + 3.0 + max(pace - speed, 0.0) * 2.5 + 0.3 * pace:
                room = False
        if room:
            best, target = gain, float(side)
    if target != 0.0:
        state[a, LANE] += target
        state[a, OFFSET_TARGET] = offset + target * width


@inlined
def _walk(meta, numbers, stops, signals, cycle, yellow, state, around, a, time_s):
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
            wait = _somebody_first(state, around, a, x, y)
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
                pose_on_path(bank, first + a, arc, state[OFFSET] + shift, out[a, k])
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
