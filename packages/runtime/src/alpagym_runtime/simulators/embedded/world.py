"""The state kernel: slots stepped by compiled code; no Python loop over slots.

Each slot depends on its scene and its decisions only, so an episode is the same bits whatever runs beside it. Compiled
without fast maths for that reason.
"""

from __future__ import annotations

import math

import numpy as np

from alpagym_runtime.kernels import inlined, kernel
from alpagym_runtime.simulators.embedded.contacts import new_contacts, on_the_road, time_to_collision
from alpagym_runtime.simulators.embedded.dynamic_vehicle import clip_commands, command_for_plan, drive_dynamic
from alpagym_runtime.simulators.embedded.measures import report
from alpagym_runtime.simulators.embedded.route import project
from alpagym_runtime.simulators.embedded.scene import STANDING_REFERENCE_M
from alpagym_runtime.simulators.embedded.scene_bank import (
    LOG,
    LOG_N,
    WHEELBASE,
)
from alpagym_runtime.simulators.embedded.state import (
    ALONG_TRACK,
    AT_FAULT,
    COLLISIONS,
    EVENT_COLLISION,
    EVENT_GOAL,
    EVENT_OFFROAD,
    INITIAL,
    JERK,
    OFFROAD,
    PROGRESS,
    RED_LIGHTS,
    TO_COLLISION,
)
from alpagym_runtime.simulators.embedded.traffic import begin_traffic, step_traffic
from alpagym_runtime.simulators.embedded.traffic.columns import make_view
from alpagym_runtime.simulators.embedded.vehicle import (
    ACCELERATION_MAX_MPS2,
    EGO_ACCELERATION,
    EGO_COLUMNS,
    EGO_LATERAL,
    EGO_SLIP,
    EGO_SPEED,
    EGO_STEER,
    EGO_THROTTLE,
    EGO_YAW_RATE,
    KINEMATIC,
    STEERING_MAX_RAD,
    STEP_S,
    drive,
    track,
)
from alpagym_runtime.types import GOAL_PROGRESS


@kernel
def begin(bank, slots, rows, scenes, handovers, starts):
    """Put slots on the recorded drive at grid index `starts` (≤ handover; earlier ones are warm-up)."""
    around, seen = make_view()
    for r in range(len(rows)):
        i, scene = rows[r], scenes[r]
        slots.scene[i], slots.step[i], slots.start[i], slots.handover[i] = scene, starts[r], starts[r], handovers[r]
        row = bank.rows[scene]
        log = bank.log[row[LOG] : row[LOG] + row[LOG_N]]
        for k in range(handovers[r] + 1):
            _log_state(log, k, slots.trail[i, k], bank.numbers[scene, WHEELBASE], slots.vehicle[i])
        # Agents have driven beside the recording since its start.
        slots.step[i] = 0
        begin_traffic(bank, slots, i)
        for k in range(1, starts[r] + 1):
            slots.step[i] = k
            step_traffic(bank, slots, i, slots.trail[i, k - 1], around, seen)
        slots.state[i] = slots.trail[i, starts[r]]
        slots.hit[i] = False
        slots.frozen[i] = False
        slots.control[i] = np.nan
        slots.measures[i] = 0.0
        slots.valid[i] = False
        # Along the log, so that each place is found on its own branch where the route passes itself.
        segment, arc, _ = project(bank, scene, 0, log[0, 0], log[0, 1], 0.0, 1e18)
        slots.reference[i, 0] = arc
        for k in range(len(log)):
            segment, arc, _ = project(bank, scene, segment, log[k, 0], log[k, 1], 10.0, 40.0)
            if k == starts[r]:
                slots.segment[i] = segment
            # AlpaSim measures progress over the whole recording.
            if k == handovers[r] and not slots.quirks[i]:
                slots.reference[i, 0] = arc
        slots.reference[i, 1] = arc
        if starts[r] == handovers[r]:
            _hand_over(bank, slots, i)


@inlined
def _hand_over(bank, slots, i):
    """The initial sample: what overlaps or is outside now is an initial fault, not the policy's doing."""
    scene, state = slots.scene[i], slots.state[i]
    slots.off[i] = not on_the_road(bank, scene, state)
    touching, _ = new_contacts(bank, slots, i, state, False)
    slots.arc[i] = -1e18
    slots.measures[i] = 0.0
    slots.valid[i] = False
    for m in (COLLISIONS, AT_FAULT, OFFROAD, INITIAL, RED_LIGHTS):
        slots.valid[i, m] = True
    slots.measures[i, INITIAL] = 1.0 if (slots.off[i] or touching > 0) else 0.0
    report(bank, slots, i, state[EGO_ACCELERATION], state[EGO_LATERAL])
    _foresee(bank, slots, i)


@inlined
def _foresee(bank, slots, i):
    """The time to collision; once a tick, for it looks at every road user."""
    seconds = time_to_collision(bank, slots, i)
    slots.measures[i, TO_COLLISION] = seconds
    slots.valid[i, TO_COLLISION] = seconds < 1e17


@kernel
def _log_state(log, k, out, wheelbase, vehicle):
    """Ego state of the recorded drive at a sample, by differences; steering is the kinematic one."""
    out[0], out[1], out[2], out[EGO_SPEED] = log[k, 0], log[k, 1], log[k, 2], log[k, 3]
    speed, a, b = log[k, 3], max(k - 1, 0), min(k + 1, len(log) - 1)
    seconds = (b - a) * STEP_S
    out[EGO_ACCELERATION] = min((log[b, 3] - log[a, 3]) / seconds, ACCELERATION_MAX_MPS2)
    dx, dy = log[b, 0] - log[a, 0], log[b, 1] - log[a, 1]
    travelled = math.hypot(dx, dy)
    curvature = (log[b, 2] - log[a, 2]) / travelled if travelled > 0.2 else 0.0
    limit = math.tan(0.6) / wheelbase
    curvature = min(max(curvature, -limit), limit)
    out[EGO_YAW_RATE], out[EGO_LATERAL] = speed * curvature, speed * speed * curvature
    out[EGO_SLIP] = 0.0
    if vehicle != KINEMATIC:
        out[EGO_SLIP] = (dy * math.cos(log[k, 2]) - dx * math.sin(log[k, 2])) / seconds
    out[EGO_STEER], out[EGO_THROTTLE] = math.atan(curvature * wheelbase), out[EGO_ACCELERATION]


@inlined
def _follow_plan(slots, i, inner, plan_step_s, wheelbase, ahead):
    """Drive the kinematic vehicle one inner step along the slot's plan, from its first point still ahead in time."""
    state, plan, pose = slots.state[i], slots.plan[i], slots.plan_pose[i]
    elapsed = (inner + slots.plan_age[i]) * STEP_S
    skip = min(math.floor(elapsed / plan_step_s + 1e-9), len(plan) - 1)
    count = min(len(plan) - skip, len(ahead))
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
    first = (skip + 1) * plan_step_s - elapsed
    curvature = math.tan(state[EGO_STEER]) / wheelbase
    acceleration, curvature = track(ahead, count, first, plan_step_s, state[EGO_SPEED], curvature)
    drive(state, acceleration, curvature, wheelbase)


@inlined
def _drive_ego(slots, i, inner, plan_step_s, wheelbase, ahead):
    """One inner step of the slot's vehicle under its control, or along its plan where there is none."""
    state, control = slots.state[i], slots.control[i]
    planned = math.isnan(control[0])
    if slots.vehicle[i] == KINEMATIC:
        if planned:
            _follow_plan(slots, i, inner, plan_step_s, wheelbase, ahead)
        else:
            steering = min(max(control[1], -STEERING_MAX_RAD), STEERING_MAX_RAD)
            drive(state, control[0], math.tan(steering) / wheelbase, wheelbase)
        return
    if planned:
        elapsed = (inner + slots.plan_age[i]) * STEP_S
        steer, acceleration = command_for_plan(
            slots.longitudinal, slots.lateral, slots.plan[i], slots.plan_pose[i], elapsed, plan_step_s, state, wheelbase
        )
    else:
        steer, acceleration = clip_commands(control[1], control[0], state[EGO_STEER], state[EGO_THROTTLE])
    drive_dynamic(state, steer, acceleration, wheelbase)


@kernel
def advance(bank, slots, rows, inner_steps, plan_step_s, end_on, last_steps, events):
    """Drive `rows` for `inner_steps` grid steps by their plans; stops a slot early at an end event or its last step.

    events [n] returns the EVENT bits that ended the slot, 0 otherwise; bits not in `end_on` freeze the measures only.
    """
    ahead, before = np.empty((64, 3)), np.empty(EGO_COLUMNS)
    around, seen = make_view()
    for r in range(len(rows)):
        i = rows[r]
        scene, state = slots.scene[i], slots.state[i]
        number = bank.numbers[scene]
        row = bank.rows[scene]
        events[r] = 0
        over = slots.frozen[i]
        if over:
            # An end event is past: what counts up to it is kept, the rest is no longer defined.
            for m in range(ALONG_TRACK, INITIAL):
                slots.valid[i, m] = False
            slots.valid[i, TO_COLLISION] = False
        for inner in range(inner_steps):
            warm = slots.step[i] < slots.handover[i]
            for k in range(EGO_COLUMNS):
                before[k] = state[k]
            if not warm:
                _drive_ego(slots, i, inner, plan_step_s, number[WHEELBASE], ahead)
            slots.step[i] += 1
            kept = slots.trail[i, slots.step[i]]
            for k in range(EGO_COLUMNS):
                if warm:
                    state[k] = kept[k]
                else:
                    kept[k] = state[k]
            step_traffic(bank, slots, i, before, around, seen)
            if warm:
                segment, _, _ = project(bank, scene, slots.segment[i], state[0], state[1], 10.0, 40.0)
                slots.segment[i] = segment
                if slots.step[i] == slots.handover[i]:
                    _hand_over(bank, slots, i)
                    break
                continue
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
            report(bank, slots, i, before[EGO_ACCELERATION], before[EGO_LATERAL])
            if not slots.frozen[i]:
                slots.valid[i, JERK] = True
                standing = slots.reference[i, 1] - slots.reference[i, 0] < STANDING_REFERENCE_M
                if not standing and slots.measures[i, PROGRESS] >= GOAL_PROGRESS:
                    happened |= EVENT_GOAL
                slots.frozen[i] = happened != 0
            events[r] = happened & end_on
            if events[r] != 0 or slots.step[i] >= last_steps[r]:
                break
            if slots.step[i] + 1 > row[LOG_N] - 1:
                break
        if slots.step[i] > slots.handover[i] and not over:
            _foresee(bank, slots, i)
