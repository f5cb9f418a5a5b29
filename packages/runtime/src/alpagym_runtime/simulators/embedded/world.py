"""The state kernel: slots stepped by compiled code; no Python loop over slots.

Each slot depends on its scene and its decisions only, so an episode is the same bits whatever runs beside it. Compiled
without fast maths for that reason.
"""

from __future__ import annotations

import math

import numpy as np

from alpagym_runtime.kernels import kernel
from alpagym_runtime.simulators.embedded.contacts import new_contacts, on_the_road
from alpagym_runtime.simulators.embedded.measures import report
from alpagym_runtime.simulators.embedded.route import project
from alpagym_runtime.simulators.embedded.scene import STANDING_REFERENCE_M
from alpagym_runtime.simulators.embedded.scene_bank import (
    ACTOR,
    ACTOR_N,
    LOG,
    LOG_N,
    S_END,
    S_START,
    WHEELBASE,
)
from alpagym_runtime.simulators.embedded.state import (
    AT_FAULT,
    COLLISIONS,
    EVENT_COLLISION,
    EVENT_GOAL,
    EVENT_OFFROAD,
    INITIAL,
    JERK,
    OFFROAD,
    PROGRESS,
)
from alpagym_runtime.simulators.embedded.vehicle import ACCELERATION_MAX_MPS2, STEP_S, drive, track


@kernel
def place_actors(bank, slots, i):
    """Put the recorded road users where they are at the slot's present step; each only inside its interval."""
    scene, step = slots.scene[i], slots.step[i]
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
def begin(bank, slots, rows, scenes, handovers, starts):
    """Put slots on the recorded drive at grid index `starts` (≤ handover; earlier ones are warm-up)."""
    for r in range(len(rows)):
        i, scene = rows[r], scenes[r]
        slots.scene[i], slots.step[i], slots.handover[i] = scene, starts[r], handovers[r]
        row = bank.rows[scene]
        log = bank.log[row[LOG] : row[LOG] + row[LOG_N]]
        for k in range(handovers[r] + 1):
            _log_state(log, k, slots.trail[i, k], bank.numbers[scene, WHEELBASE])
        slots.state[i] = slots.trail[i, starts[r]]
        place_actors(bank, slots, i)
        slots.hit[i] = False
        slots.frozen[i] = False
        slots.control[i] = np.nan
        slots.measures[i] = 0.0
        slots.valid[i] = False
        segment, _, _ = project(bank, scene, 0, log[starts[r], 0], log[starts[r], 1], 0.0, 1e18)
        slots.segment[i] = segment
        if starts[r] == handovers[r]:
            _hand_over(bank, slots, i)


@kernel
def _hand_over(bank, slots, i):
    """The initial sample: what overlaps or is outside now is an initial fault, not the policy's doing."""
    scene, state = slots.scene[i], slots.state[i]
    slots.off[i] = not on_the_road(bank, scene, state)
    touching, _ = new_contacts(bank, slots, i, state, False)
    slots.arc[i] = -1e18
    slots.measures[i] = 0.0
    slots.valid[i] = False
    for m in (COLLISIONS, AT_FAULT, OFFROAD, INITIAL):
        slots.valid[i, m] = True
    slots.measures[i, INITIAL] = 1.0 if (slots.off[i] or touching > 0) else 0.0
    report(bank, slots, i, state[4], state[3] * state[3] * state[5])


@kernel
def _log_state(log, k, out, wheelbase):
    """State [6] of the recorded drive at a sample; acceleration and curvature by differences."""
    out[0], out[1], out[2], out[3] = log[k, 0], log[k, 1], log[k, 2], log[k, 3]
    a, b = max(k - 1, 0), min(k + 1, len(log) - 1)
    seconds = (b - a) * STEP_S
    out[4] = min((log[b, 3] - log[a, 3]) / seconds, ACCELERATION_MAX_MPS2)
    travelled = math.hypot(log[b, 0] - log[a, 0], log[b, 1] - log[a, 1])
    out[5] = (log[b, 2] - log[a, 2]) / travelled if travelled > 0.2 else 0.0
    limit = math.tan(0.6) / wheelbase
    out[5] = min(max(out[5], -limit), limit)


@kernel
def advance(bank, slots, rows, inner_steps, plan_step_s, end_on, last_steps, events):
    """Drive `rows` for `inner_steps` grid steps by their plans; stops a slot early at an end event or its last step.

    events [n] returns the EVENT bits that ended the slot, 0 otherwise; bits not in `end_on` freeze the measures only.
    """
    ahead = np.empty((64, 3))
    for r in range(len(rows)):
        i = rows[r]
        scene, state = slots.scene[i], slots.state[i]
        number = bank.numbers[scene]
        row = bank.rows[scene]
        events[r] = 0
        for inner in range(inner_steps):
            if slots.step[i] < slots.handover[i]:
                slots.step[i] += 1
                slots.state[i] = slots.trail[i, slots.step[i]]
                place_actors(bank, slots, i)
                if slots.step[i] == slots.handover[i]:
                    _hand_over(bank, slots, i)
                    break
                continue
            before = state.copy()
            lateral_before = before[3] * before[3] * before[5]
            if not math.isnan(slots.control[i, 0]):
                acceleration = slots.control[i, 0]
                curvature = math.tan(slots.control[i, 1]) / number[WHEELBASE]
            else:
                # The plan in the present rig frame, from its first point that lies ahead in time.
                elapsed = inner * STEP_S
                plan, pose = slots.plan[i], slots.plan_pose[i]
                skip = math.floor(elapsed / plan_step_s + 1e-9)
                count = min(len(plan) - skip, 64)
                turn = pose[2] - state[2]
                cos, sin = math.cos(turn), math.sin(turn)
                wx, wy = pose[0] - state[0], pose[1] - state[1]
                ex = wx * math.cos(state[2]) + wy * math.sin(state[2])
                ey = wy * math.cos(state[2]) - wx * math.sin(state[2])
                for k in range(count):
                    p = plan[skip + k]
                    ahead[k, 0] = ex + cos * p[0] - sin * p[1]
                    ahead[k, 1] = ey + sin * p[0] + cos * p[1]
                    ahead[k, 2] = p[2] + turn
                acceleration, curvature = track(
                    ahead, count, (skip + 1) * plan_step_s - elapsed, plan_step_s, state[3], state[5]
                )
            drive(state, acceleration, curvature, number[WHEELBASE])
            slots.step[i] += 1
            slots.trail[i, slots.step[i]] = state
            place_actors(bank, slots, i)
            happened = 0
            if not slots.frozen[i]:
                new, fault = new_contacts(bank, slots, i, before, True)
                slots.measures[i, COLLISIONS] += new
                slots.measures[i, AT_FAULT] += fault
                outside = not on_the_road(bank, scene, state)
                if outside and not slots.off[i]:
                    slots.measures[i, OFFROAD] += 1.0
                    happened |= EVENT_OFFROAD
                slots.off[i] = outside
                if new > 0:
                    happened |= EVENT_COLLISION
            report(bank, slots, i, before[4], lateral_before)
            slots.valid[i, JERK] = True
            if not slots.frozen[i]:
                standing = number[S_END] - number[S_START] < STANDING_REFERENCE_M
                if not standing and slots.measures[i, PROGRESS] >= 0.99:
                    happened |= EVENT_GOAL
                slots.frozen[i] = happened != 0
            events[r] = happened & end_on
            if events[r] != 0 or slots.step[i] >= last_steps[r]:
                break
            if slots.step[i] + 1 > row[LOG_N] - 1:
                break
