"""Measures that are functions of the present state."""

from __future__ import annotations

import math

from alpagym_runtime.kernels import inlined
from alpagym_runtime.simulators.embedded.lane_map import RED
from alpagym_runtime.simulators.embedded.route import project
from alpagym_runtime.simulators.embedded.scene import STANDING_REFERENCE_M
from alpagym_runtime.simulators.embedded.scene_bank import (
    CENTRE_OFFSET,
    EGO_STOP,
    EGO_STOP_N,
    LENGTH,
    LOG,
    LOG_N,
)
from alpagym_runtime.simulators.embedded.state import (
    ACCELERATION,
    ALONG_TRACK,
    DEVIATION,
    JERK,
    LATERAL,
    PROGRESS,
    RED_LIGHTS,
    SPEED,
    TO_GT,
    YAW_RATE,
)
from alpagym_runtime.simulators.embedded.traffic.columns import STOP_ARC, STOP_GROUP
from alpagym_runtime.simulators.embedded.traffic.right_of_way import signal_state
from alpagym_runtime.simulators.embedded.vehicle import (
    EGO_ACCELERATION,
    EGO_LATERAL,
    EGO_SPEED,
    EGO_YAW_RATE,
    STEP_S,
)

ON_ROUTE_M = 5.0
"""Further from the route its signals do not count."""


@inlined
def _reds_passed(bank, scene, before, now, time_s):
    """How many stop lines the ego's front passes, as its rig's arc length grows, whose signals are red."""
    row, number = bank.rows[scene], bank.numbers[scene]
    front, passed = number[CENTRE_OFFSET] + number[LENGTH] / 2.0, 0
    for k in range(row[EGO_STOP], row[EGO_STOP] + row[EGO_STOP_N]):
        line, group = bank.ego_stops[k, STOP_ARC] - front, int(bank.ego_stops[k, STOP_GROUP])
        if group >= 0 and before < line <= now and signal_state(bank, scene, group, time_s) == RED:
            passed += 1
    return passed


@inlined
def report(bank, slots, i, acceleration_before, lateral_before):
    """Measures of the present step that are functions of the state."""
    scene, step = slots.scene[i], slots.step[i]
    state, values, valid = slots.state[i], slots.measures[i], slots.valid[i]
    row = bank.rows[scene]
    segment, arc, offset = project(bank, scene, slots.segment[i], state[0], state[1], 10.0, 40.0)
    slots.segment[i] = segment
    before = slots.arc[i, 0]
    slots.arc[i, 0] = arc
    if slots.frozen[i]:
        return
    # At the handover there is no step before.
    if row[EGO_STOP_N] > 0 and before > -1e17 and abs(offset) <= ON_ROUTE_M:
        values[RED_LIGHTS] += _reds_passed(bank, scene, before, arc, step * STEP_S)
    start, end = slots.reference[i]
    log = bank.log[row[LOG] : row[LOG] + row[LOG_N]]
    slots.arc[i, 1] = max(slots.arc[i, 1], arc)
    if end - start >= STANDING_REFERENCE_M:
        values[PROGRESS] = min(max((slots.arc[i, 1] - start) / (end - start), 0.0), 1.0)
    else:
        # To stay means not to have been away either.
        origin = log[slots.handover[i]]
        away = math.hypot(state[0] - origin[0], state[1] - origin[1]) > STANDING_REFERENCE_M
        values[PROGRESS] = 0.0 if away or (valid[PROGRESS] and values[PROGRESS] == 0.0) else 1.0
    valid[PROGRESS] = True
    known = step < row[LOG_N]
    valid[TO_GT] = known
    valid[ALONG_TRACK] = known
    if known:
        values[TO_GT] = math.hypot(state[0] - log[step, 0], state[1] - log[step, 1])
        _, log_arc, _ = project(bank, scene, segment, log[step, 0], log[step, 1], 80.0, 80.0)
        values[ALONG_TRACK] = arc - log_arc
    acceleration, lateral = state[EGO_ACCELERATION], state[EGO_LATERAL]
    values[DEVIATION] = abs(offset)
    values[SPEED] = state[EGO_SPEED]
    values[ACCELERATION] = acceleration
    values[LATERAL] = lateral
    values[YAW_RATE] = state[EGO_YAW_RATE]
    values[JERK] = math.hypot(acceleration - acceleration_before, lateral - lateral_before) / STEP_S
    for m in (DEVIATION, SPEED, ACCELERATION, LATERAL, YAW_RATE):
        valid[m] = True
