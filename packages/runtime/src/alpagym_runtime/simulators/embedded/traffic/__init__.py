"""Traffic: recorded road users as pure functions of time, or agents that react.

An agent follows its own path. It keeps its distance, slows for bends, stops at signals, waits for traffic that goes
first and for people at a zebra, closes up to one lane with others by turns, and changes lanes when that pays. Leaders
are searched for in the corridor of the path, every fourth step for each agent; in between, only the distance to the one
found is renewed. People on foot walk, wait and make way. Each of these ideas is a file here.
"""

from __future__ import annotations

import math

import numpy as np

from alpagym_runtime.kernels import inlined, kernel
from alpagym_runtime.simulators.embedded.lane_map import RED
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
from alpagym_runtime.simulators.embedded.traffic.columns import (
    ACCELERATION,
    ARC,
    COS,
    DESIRED,
    LANES_LEFT,
    LANES_RIGHT,
    LATERAL,
    LONG,
    NEXT_STOP,
    NOBODY,
    NOWHERE_M,
    OFFSET,
    OFFSET_TARGET,
    ON_FOOT,
    PACE,
    PATH,
    PATH_N,
    PEDESTRIAN,
    SIN,
    SPEED,
    START_ARC,
    START_SPEED,
    STOP,
    STOP_ARC,
    STOP_GROUP,
    STOP_N,
    WIDE,
    X,
    Y,
)
from alpagym_runtime.simulators.embedded.traffic.following import (
    STANDSTILL_M,
    gap_to,
    idm,
    pace_along,
    pose_on_path,
    search,
)
from alpagym_runtime.simulators.embedded.traffic.lane_changes import consider_lane
from alpagym_runtime.simulators.embedded.traffic.right_of_way import signal_state, stop_distance, zip_in
from alpagym_runtime.simulators.embedded.traffic.walking import walk
from alpagym_runtime.simulators.embedded.vehicle import STEP_S

SEARCH_EVERY = 4
BEND_MPS2 = 2.0
LANE_CHANGE_MPS = 1.2


@inlined
def _place(paths, meta, state, actors, a):
    """Put an actor where its agent is on its path."""
    x, y, yaw, cos, sin = pose_on_path(paths, meta[a, PATH], meta[a, PATH_N] - 2, state[a, ARC], state[a, OFFSET])
    actors[a, ACTOR_X], actors[a, ACTOR_Y], actors[a, ACTOR_YAW] = x, y, yaw
    actors[a, ACTOR_SPEED], actors[a, ACTOR_COS], actors[a, ACTOR_SIN] = state[a, SPEED], cos, sin


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
            state[a, ACCELERATION] = walk(
                paths, meta, numbers, stops, signals, cycle, yellow, state, around, seen, others, a, time_s
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
        around[X, a] = actors[a, ACTOR_X] if present[a] else NOWHERE_M
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
    if (step + a) % SEARCH_EVERY == 0 or step == 1:
        leader, gap = search(paths, first, last, a, arc, target, offset, around, seen, others, leader)
        if offset != target:
            # Between lanes both count.
            here, near = search(paths, first, last, a, arc, offset, offset, around, seen, others, NOBODY)
            if near < gap:
                leader, gap = here, near
        leaders[a] = leader
    elif leader != NOBODY:
        gap = gap_to(paths, first, last, arc, target, around, a, leader)
        if offset != target:
            gap = min(gap, gap_to(paths, first, last, arc, offset, around, a, leader))
    if leader != NOBODY:
        pace = pace_along(around, a, leader)
    answer = idm(speed, desired, gap, speed - pace)
    free = meta[a, LANES_LEFT] + meta[a, LANES_RIGHT] > 0
    if free and (step + 3 * a) % 10 == 0 and offset == target:
        consider_lane(paths, meta, numbers, stops, state, around, seen, others, a, desired, answer)
    if int(state[a, NEXT_STOP]) < meta[a, STOP_N]:
        stop = stop_distance(meta, stops, signals, cycle, yellow, state, around, others, a, time_s)
        if stop < 1e9:
            answer = min(answer, idm(speed, desired, max(stop + STANDSTILL_M - 0.5, 0.1), speed))
        answer = min(answer, zip_in(meta, numbers, stops, state, around, others, a, desired))
    return answer


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
                x, y, yaw, _, _ = pose_on_path(bank.paths, row[PATH], row[PATH_N] - 2, arc, state[OFFSET] + shift)
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
