"""Traffic: recorded road users as pure functions of time, or agents that react.

An agent follows its own path. It keeps its distance by the intelligent driver model, slows for bends, stops at signals,
waits for traffic that goes first, lets people cross, and changes lanes when that pays. Leaders are searched for in the
corridor of the path, every third step for each agent; in between, only the distance to the one found is renewed.

Sources: IDM, Treiber, Hennecke, Helbing 2000, doi:10.1103/PhysRevE.62.1805; lane changes by MOBIL's incentive and
safety criteria with politeness 0, Kesting, Treiber, Helbing 2007, doi:10.3141/1999-10.
"""

from __future__ import annotations

import math

import numpy as np

from alpagym_runtime.kernels import kernel
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

PEDESTRIAN = KINDS.index("pedestrian")
EGO = MAX_ACTORS
NOBODY = -1

SEARCH_EVERY = 3
SIGHT_M = 55.0
ACCELERATE_MPS2, BRAKE_MPS2, HARDEST_MPS2 = 1.6, 2.2, -8.0
HEADWAY_S, STANDSTILL_M = 1.2, 2.0
BEND_MPS2 = 2.0
SIDE_MARGIN_M = 0.25
LANE_CHANGE_MPS = 1.2
PATIENCE_S = 8.0


@kernel
def signal_state(bank, scene, group, time_s):
    """GREEN, YELLOW or RED of a signal group."""
    cycle = bank.numbers[scene, SIGNAL_CYCLE]
    green = bank.signals[bank.rows[scene, SIGNAL] + group]
    since = (time_s - green[0]) % cycle
    if since < green[1] - green[0]:
        return GREEN
    return YELLOW if since < green[1] - green[0] + bank.numbers[scene, SIGNAL_YELLOW] else RED


@kernel
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


@kernel
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


@kernel
def step_traffic(bank, slots, i, ego):
    """Move a slot's road users to its present step; `ego` is the ego's state one step ago, when they decided."""
    scene, step = slots.scene[i], slots.step[i]
    if bank.rows[scene, REACTIVE] == 0 or not slots.reactive[i]:
        _replay(bank, slots, i, scene, step)
        return
    first, count = bank.rows[scene, ACTOR], bank.rows[scene, ACTOR_N]
    number = bank.numbers[scene]
    box = np.empty(6)
    box[0] = ego[0] + number[CENTRE_OFFSET] * math.cos(ego[2])
    box[1] = ego[1] + number[CENTRE_OFFSET] * math.sin(ego[2])
    box[2], box[3], box[4], box[5] = ego[2], ego[3], number[LENGTH], number[WIDTH]
    time_s = (step - 1) * STEP_S
    for a in range(count):
        if not slots.present[i, a]:
            continue
        if bank.actors[first + a, 3] == PEDESTRIAN:
            slots.agents[i, a, ACCELERATION] = _walk(bank, slots, i, a, box, time_s)
        else:
            slots.agents[i, a, ACCELERATION] = _drive(bank, slots, i, a, box, time_s)
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


@kernel
def _replay(bank, slots, i, scene, step):
    """Recorded road users where they are at the present step; each only inside its interval."""
    for a in range(bank.rows[scene, ACTOR_N]):
        row = bank.actors[bank.rows[scene, ACTOR] + a]
        slots.present[i, a] = row[1] <= step <= row[2]
        if not slots.present[i, a]:
            continue
        now = bank.tracks[row[0] + step]
        before = bank.tracks[row[0] + max(step - 1, row[1])]
        for k in range(4):
            slots.actors[i, a, k] = now[k]
            slots.actors_before[i, a, k] = before[k]


@kernel
def _idm(speed, desired, gap, closing):
    """Acceleration m/s2 of the intelligent driver model; `closing` > 0 comes nearer."""
    wanted = STANDSTILL_M + max(
        speed * HEADWAY_S + speed * closing / (2.0 * math.sqrt(ACCELERATE_MPS2 * BRAKE_MPS2)), 0.0
    )
    free = (speed / max(desired, 0.1)) ** 4
    near = wanted / max(gap, 0.1)
    return min(max(ACCELERATE_MPS2 * (1.0 - free - near * near), HARDEST_MPS2), ACCELERATE_MPS2)


@kernel
def _other(bank, slots, i, first, o, ego):
    """Box of a road user: x, y, yaw, speed, length, width; the ego has the index EGO."""
    if o == EGO:
        return ego[0], ego[1], ego[2], ego[3], ego[4], ego[5]
    actor, size = slots.actors[i, o], bank.sizes[first + o]
    return actor[0], actor[1], actor[2], actor[3], size[0], size[1]


@kernel
def _gap(bank, agent, arc, offset, me, length, width, x, y, yaw, other_length, other_width):
    """Free distance m along a path to a box, 1e9 where it is not in the corridor, behind, or out of sight."""
    cos, sin = math.cos(me[2]), math.sin(me[2])
    along = (x - me[0]) * cos + (y - me[1]) * sin
    if along < 0.0 or along > SIGHT_M:
        return 1e9
    row = bank.agents[agent]
    last = row[PATH_N] - 2
    k = min(int(arc + along), last)
    # The straight guess falls short on bends: once more from there.
    for _ in range(2):
        p = bank.paths[row[PATH] + k]
        k = min(max(int(k + (x - p[0]) * math.cos(p[2]) + (y - p[1]) * math.sin(p[2])), 0), last)
    p = bank.paths[row[PATH] + k]
    cos, sin = math.cos(p[2]), math.sin(p[2])
    lateral = (y - p[1]) * cos - (x - p[0]) * sin - offset
    turn = yaw - p[2]
    c, s = abs(math.cos(turn)), abs(math.sin(turn))
    if abs(lateral) > (width + other_length * s + other_width * c) / 2.0 + SIDE_MARGIN_M:
        return 1e9
    beyond = (x - p[0]) * cos + (y - p[1]) * sin
    ahead = k + beyond - arc
    if ahead <= 0.0:
        return 1e9
    return max(ahead - (length + other_length * c + other_width * s) / 2.0, 0.01)


@kernel
def _search(bank, slots, i, a, ego, offset):
    """Nearest road user in the corridor at `offset` m left of an agent's path: (index, gap m, its speed along m/s)."""
    scene = slots.scene[i]
    first, count = bank.rows[scene, ACTOR], bank.rows[scene, ACTOR_N]
    me, size, arc = slots.actors[i, a], bank.sizes[first + a], slots.agents[i, a, ARC]
    best, leader, pace = 1e9, NOBODY, 0.0
    for n in range(count + 1):
        o = n if n < count else EGO
        if o == a or (o != EGO and not slots.present[i, o]):
            continue
        x, y, yaw, speed, length, width = _other(bank, slots, i, first, o, ego)
        dx, dy = x - me[0], y - me[1]
        if abs(dx) > SIGHT_M or abs(dy) > SIGHT_M:
            continue
        gap = _gap(bank, first + a, arc, offset, me, size[0], size[1], x, y, yaw, length, width)
        if o != EGO and gap >= 1e9 and bank.actors[first + o, 3] == PEDESTRIAN and speed > 0.3:
            # Somebody about to step into the corridor.
            gap = _gap(
                bank,
                first + a,
                arc,
                offset,
                me,
                size[0],
                size[1],
                x + 1.5 * speed * math.cos(yaw),
                y + 1.5 * speed * math.sin(yaw),
                yaw,
                length,
                width,
            )
        if gap < best:
            best, leader, pace = gap, o, speed * math.cos(yaw - me[2])
    return leader, best, pace


@kernel
def _drive(bank, slots, i, a, ego, time_s):
    """Acceleration m/s2 of a driving agent."""
    scene, step = slots.scene[i], slots.step[i]
    first = bank.rows[scene, ACTOR]
    state, me = slots.agents[i, a], slots.actors[i, a]
    row, size = bank.agents[first + a], bank.sizes[first + a]
    desired = bank.agent_numbers[first + a, DESIRED]
    if desired <= 0.0:
        return 0.0
    bend = 0.0
    for d in range(0, 20, 4):
        k = min(int(state[ARC]) + d, row[PATH_N] - 1)
        bend = max(bend, abs(bank.paths[row[PATH] + k, 3]))
    desired = min(desired, math.sqrt(BEND_MPS2 / max(bend, 1e-4)))
    leader, gap, pace = slots.leader[i, a], 1e9, 0.0
    if leader == NOBODY or (step + a) % SEARCH_EVERY == 0 or (leader != EGO and not slots.present[i, leader]):
        leader, gap, pace = _search(bank, slots, i, a, ego, state[OFFSET_TARGET])
        if state[OFFSET] != state[OFFSET_TARGET]:
            # Between lanes both count.
            here, near, slow = _search(bank, slots, i, a, ego, state[OFFSET])
            if near < gap:
                leader, gap, pace = here, near, slow
        slots.leader[i, a] = leader
    elif leader != NOBODY:
        x, y, yaw, speed, length, width = _other(bank, slots, i, first, leader, ego)
        offset = state[OFFSET_TARGET]
        gap = _gap(bank, first + a, state[ARC], offset, me, size[0], size[1], x, y, yaw, length, width)
        pace = speed * math.cos(yaw - me[2])
    answer = _idm(state[SPEED], desired, gap, state[SPEED] - pace)
    if row[LANES_LEFT] + row[LANES_RIGHT] > 0 and (step + 3 * a) % 10 == 0 and state[OFFSET] == state[OFFSET_TARGET]:
        _consider_lane(bank, slots, i, a, ego, desired, answer)
    stop = _stop_distance(bank, slots, i, a, ego, time_s)
    if stop < 1e9:
        answer = min(answer, _idm(state[SPEED], desired, max(stop + STANDSTILL_M - 0.5, 0.1), state[SPEED]))
    return answer


@kernel
def _stop_distance(bank, slots, i, a, ego, time_s):
    """Distance m from an agent's front to the next place where it has to wait now; 1e9 for none."""
    scene = slots.scene[i]
    first = bank.rows[scene, ACTOR]
    state, row, size = slots.agents[i, a], bank.agents[first + a], bank.sizes[first + a]
    while int(state[NEXT_STOP]) < row[STOP_N]:
        stop = bank.stops[row[STOP] + int(state[NEXT_STOP])]
        ahead = stop[STOP_ARC] - state[ARC] - size[0] / 2.0
        if ahead > -1.0:
            break
        state[NEXT_STOP] += 1.0
        state[WAITED] = 0.0
    if int(state[NEXT_STOP]) >= row[STOP_N]:
        return 1e9
    stop = bank.stops[row[STOP] + int(state[NEXT_STOP])]
    ahead = stop[STOP_ARC] - state[ARC] - size[0] / 2.0
    needed = state[SPEED] * state[SPEED] / (2.0 * 4.0)
    if ahead > SIGHT_M or needed > ahead + 1.0:
        return 1e9
    if stop[STOP_GROUP] >= 0.0:
        colour = signal_state(bank, scene, int(stop[STOP_GROUP]), time_s)
        if colour == RED or (colour == YELLOW and needed < ahead):
            return max(ahead, 0.1)
    if not math.isnan(stop[STOP_X]) and ahead < 25.0:
        if state[SPEED] < 0.5 and ahead < 4.0:
            state[WAITED] += STEP_S
        if _somebody_first(bank, slots, i, a, ego, stop, ahead):
            return max(ahead, 0.1)
    return 1e9


@kernel
def _somebody_first(bank, slots, i, a, ego, stop, ahead):
    """Whether traffic on another path reaches the conflict before this agent has cleared it."""
    scene = slots.scene[i]
    first, count = bank.rows[scene, ACTOR], bank.rows[scene, ACTOR_N]
    me, state, size = slots.actors[i, a], slots.agents[i, a], bank.sizes[first + a]
    to_clear = ahead + size[0] + math.hypot(stop[STOP_X] - me[0], stop[STOP_Y] - me[1]) - max(ahead, 0.0)
    clear_s = to_clear / max(state[SPEED], 4.0) + 1.0
    if state[WAITED] > PATIENCE_S:
        clear_s = min(clear_s, 1.5)
    for n in range(count + 1):
        o = n if n < count else EGO
        if o == a or (o != EGO and not slots.present[i, o]):
            continue
        x, y, yaw, speed, _, _ = _other(bank, slots, i, first, o, ego)
        dx, dy = stop[STOP_X] - x, stop[STOP_Y] - y
        away = math.hypot(dx, dy)
        if away > 70.0 or math.cos(yaw - me[2]) > 0.8:
            continue
        if away < 3.5:
            return True
        toward = (dx * math.cos(yaw) + dy * math.sin(yaw)) / away
        if speed > 0.5 and toward > 0.8 and away / speed < clear_s:
            return True
    return False


@kernel
def _consider_lane(bank, slots, i, a, ego, desired, now):
    """Start a lane change if it gains 0.4 m/s2 or more and leaves whoever is behind there enough room."""
    scene = slots.scene[i]
    first, count = bank.rows[scene, ACTOR], bank.rows[scene, ACTOR_N]
    state, row, me = slots.agents[i, a], bank.agents[first + a], slots.actors[i, a]
    width, size = bank.agent_numbers[first + a, LANE_WIDTH], bank.sizes[first + a]
    best, target = now + 0.4, 0.0
    for side in (1, -1):
        lane = state[LANE] + side
        if lane > row[LANES_LEFT] or -lane > row[LANES_RIGHT]:
            continue
        offset = state[OFFSET] + side * width
        _, gap, pace = _search(bank, slots, i, a, ego, offset)
        gain = _idm(state[SPEED], desired, gap, state[SPEED] - pace)
        if gain <= best or gap < 6.0 + 0.5 * state[SPEED]:
            continue
        room = True
        cos, sin = math.cos(me[2]), math.sin(me[2])
        for n in range(count + 1):
            o = n if n < count else EGO
            if o == a or (o != EGO and not slots.present[i, o]):
                continue
            x, y, yaw, speed, length, _ = _other(bank, slots, i, first, o, ego)
            along = (x - me[0]) * cos + (y - me[1]) * sin
            lateral = (y - me[1]) * cos - (x - me[0]) * sin
            reach = (length + size[0]) / 2.0
            if abs(lateral - side * width) > 1.9 or along > reach or math.cos(yaw - me[2]) < 0.5:
                continue
            if -along < reach + 3.0 + max(speed - state[SPEED], 0.0) * 2.5 + 0.3 * speed:
                room = False
        if room:
            best, target = gain, float(side)
    if target != 0.0:
        state[LANE] += target
        state[OFFSET_TARGET] = state[OFFSET] + target * width


@kernel
def _walk(bank, slots, i, a, ego, time_s):
    """Acceleration m/s2 of somebody on foot: to the desired pace; at the kerb perhaps waits for a gap or for green."""
    scene = slots.scene[i]
    first = bank.rows[scene, ACTOR]
    state, row = slots.agents[i, a], bank.agents[first + a]
    pace = bank.agent_numbers[first + a, DESIRED]
    while int(state[NEXT_STOP]) < row[STOP_N] and (
        bank.stops[row[STOP] + int(state[NEXT_STOP]), STOP_ARC] < state[ARC] - 0.3
    ):
        state[NEXT_STOP] += 1.0
    if int(state[NEXT_STOP]) < row[STOP_N]:
        stop = bank.stops[row[STOP] + int(state[NEXT_STOP])]
        ahead = stop[STOP_ARC] - state[ARC]
        if ahead < 1.0:
            wait = stop[STOP_GROUP] >= 0.0 and signal_state(bank, scene, int(stop[STOP_GROUP]), time_s) != GREEN
            if not wait and row[YIELDS] != 0 and not math.isnan(stop[STOP_X]):
                wait = _somebody_first(bank, slots, i, a, ego, stop, ahead)
            if wait:
                pace = 0.0
    return min(max((pace - state[SPEED]) / 0.3, -4.0), 2.0)


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
            exists[a, k] = at >= row[1] and step <= row[2]
            if not exists[a, k]:
                continue
            sample = bank.tracks[row[0] + min(at, row[2])]
            beyond = max(at - row[2], 0) * STEP_S * sample[3]
            out[a, k, 0] = sample[0] + beyond * math.cos(sample[2])
            out[a, k, 1] = sample[1] + beyond * math.sin(sample[2])
            out[a, k, 2] = sample[2]
