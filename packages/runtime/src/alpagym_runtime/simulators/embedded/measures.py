"""Measures that are functions of the present state."""

from __future__ import annotations

import math

from alpagym_runtime.kernels import inlined
from alpagym_runtime.simulators.embedded.route import project
from alpagym_runtime.simulators.embedded.scene import STANDING_REFERENCE_M
from alpagym_runtime.simulators.embedded.scene_bank import (
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
    SPEED,
    TO_GT,
    YAW_RATE,
)
from alpagym_runtime.simulators.embedded.vehicle import (
    EGO_ACCELERATION,
    EGO_LATERAL,
    EGO_SPEED,
    EGO_YAW_RATE,
    STEP_S,
)


@inlined
def report(bank, slots, i, acceleration_before, lateral_before):
    """Measures of the present step that are functions of the state."""
    scene, step = slots.scene[i], slots.step[i]
    state, values, valid = slots.state[i], slots.measures[i], slots.valid[i]
    row = bank.rows[scene]
    segment, arc, offset = project(bank, scene, slots.segment[i], state[0], state[1], 10.0, 40.0)
    slots.segment[i] = segment
    slots.arc[i, 0] = arc
    if slots.frozen[i]:
        return
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
