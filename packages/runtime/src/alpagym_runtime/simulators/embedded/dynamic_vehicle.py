"""AlpaSim's vehicle: a planar dynamic bicycle with lagging actuators, and its controller with gains from a table.

The plant: longitudinal and lateral motion are decoupled; below 5 m/s slip and yaw rate relax to the kinematic ones;
steering and acceleration follow their commands with a lag of 0.1 s; second-order Runge-Kutta at 10 ms; it never
reverses. The controller sees the plan one to two seconds ahead only (`controller_gains`).

A vehicle of another wheelbase L is the stock one stretched: its axles lie L / 2.85 m times as far from the centre of
gravity, its yaw inertia grows with the square, mass and tyres stay; the controller steers by the same curvature, so
that angles scale with L.
"""

from __future__ import annotations

import math

from alpagym_runtime.kernels import kernel
from alpagym_runtime.simulators.embedded.controller_gains import (
    ACCELERATION_LAG_S,
    FIRST_COUNTED,
    FRONT_STIFFNESS_NPRAD,
    INERTIA_KGM2,
    KINEMATIC_BELOW_MPS,
    KINEMATIC_RATE,
    KINEMATIC_ROWS,
    MASS_KG,
    POINTS,
    REAR_AXLE_TO_CG_M,
    REAR_STIFFNESS_NPRAD,
    SPEED_STEP_MPS,
    STEER_LAG_S,
    WHEELBASE_M,
)
from alpagym_runtime.simulators.embedded.vehicle import (
    EGO_ACCELERATION,
    EGO_LATERAL,
    EGO_SLIP,
    EGO_SPEED,
    EGO_STEER,
    EGO_THROTTLE,
    EGO_YAW_RATE,
    STEP_S,
)

STEER_COMMAND_MAX_RAD = 2.0
STEER_MAX_RAD = math.pi / 4.0
COMMAND_MIN_MPS2, COMMAND_MAX_MPS2 = -9.0, 6.0
ACCELERATION_MIN_MPS2, ACCELERATION_MAX_MPS2 = -8.0, 6.0
SUBSTEPS = 10
LOOKAHEAD_S = FIRST_COUNTED * STEP_S
REAR_SHARE = REAR_AXLE_TO_CG_M / WHEELBASE_M
STEER_DECAY = math.exp(-STEP_S / STEER_LAG_S)
ACCELERATION_DECAY = math.exp(-STEP_S / ACCELERATION_LAG_S)


@kernel
def _clip(command, present, decay, low, high, value_low, value_high):
    """The command within [low, high], and such that the lagging value is in [value_low, value_high] a step later."""
    least, most = (value_low - present * decay) / (1.0 - decay), (value_high - present * decay) / (1.0 - decay)
    return min(max(min(max(command, least), most), low), high)


@kernel
def clip_commands(steer_command, acceleration_command, steer, throttle):
    """Both commands within the controller's bounds, given the present values of what they move."""
    return (
        _clip(
            steer_command,
            steer,
            STEER_DECAY,
            -STEER_COMMAND_MAX_RAD,
            STEER_COMMAND_MAX_RAD,
            -STEER_MAX_RAD,
            STEER_MAX_RAD,
        ),
        _clip(
            acceleration_command,
            throttle,
            ACCELERATION_DECAY,
            COMMAND_MIN_MPS2,
            COMMAND_MAX_MPS2,
            ACCELERATION_MIN_MPS2,
            ACCELERATION_MAX_MPS2,
        ),
    )


@kernel
def command_for_plan(longitudinal, lateral, plan, pose, elapsed, plan_step, state, wheelbase):
    """Steering and acceleration commands that follow a plan; see `controller_gains.Gains` for the two tables.

    plan [T,3] is x, y, yaw in the rig frame of `pose` (x, y, yaw local), (k + 1)·plan_step s after it; `elapsed` s have
    passed since. Poses between points are interpolated, and the last one stays.
    """
    speed, rate = state[EGO_SPEED], state[EGO_YAW_RATE]
    stretch = wheelbase / WHEELBASE_M
    if speed < KINEMATIC_BELOW_MPS:
        first, last, at = 0, KINEMATIC_ROWS - 1, speed / SPEED_STEP_MPS
    else:
        first, last = KINEMATIC_ROWS, len(lateral) - 1
        at = KINEMATIC_ROWS + (speed - KINEMATIC_BELOW_MPS) / SPEED_STEP_MPS
    low = min(max(int(at), first), last - 1)
    share = min(max(at - low, 0.0), 1.0)
    below, above = lateral[low], lateral[low + 1]
    slip = state[EGO_SLIP] + rate * REAR_AXLE_TO_CG_M
    wheel = state[EGO_STEER] / stretch
    pull = 3 + 2 * POINTS
    steer = below[0] * slip + below[1] * rate + below[2] * wheel
    more = above[0] * slip + above[1] * rate + above[2] * wheel
    steer += wheel * (below[pull] * speed + below[pull + 1] * state[EGO_THROTTLE])
    more += wheel * (above[pull] * speed + above[pull + 1] * state[EGO_THROTTLE])
    acceleration = longitudinal[0] * speed + longitudinal[1] * state[EGO_THROTTLE]
    turn = pose[2] - state[2]
    cos, sin = math.cos(turn), math.sin(turn)
    wx, wy = pose[0] - state[0], pose[1] - state[1]
    ex = wx * math.cos(state[2]) + wy * math.sin(state[2])
    ey = wy * math.cos(state[2]) - wx * math.sin(state[2])
    for k in range(POINTS):
        place = (elapsed + LOOKAHEAD_S + k * STEP_S) / plan_step - 1.0
        # Point -1 is the pose at which the plan was made.
        left = min(max(math.floor(place + 1e-9), -1), len(plan) - 1)
        part = min(max(place - left, 0.0), 1.0) if left < len(plan) - 1 else 0.0
        px, py, pyaw = 0.0, 0.0, 0.0
        if left >= 0:
            px, py, pyaw = plan[left, 0], plan[left, 1], plan[left, 2]
        if part > 1e-9:
            swing = (plan[left + 1, 2] - pyaw + math.pi) % (2.0 * math.pi) - math.pi
            px += part * (plan[left + 1, 0] - px)
            py += part * (plan[left + 1, 1] - py)
            pyaw += part * swing
        x, y = ex + cos * px - sin * py, ey + sin * px + cos * py
        yaw = (pyaw + turn + math.pi) % (2.0 * math.pi) - math.pi
        acceleration += longitudinal[2 + k] * x
        steer += below[3 + k] * y + below[3 + POINTS + k] * yaw + wheel * below[pull + 2 + k] * x
        more += above[3 + k] * y + above[3 + POINTS + k] * yaw + wheel * above[pull + 2 + k] * x
    steer = stretch * (steer + share * (more - steer))
    return clip_commands(steer, acceleration, state[EGO_STEER], state[EGO_THROTTLE])


@kernel
def lateral_rates(speed, slip, rate, steer, wheelbase):
    """Time derivatives of the lateral speed at the centre of gravity (`slip`, m/s) and of the yaw rate."""
    rear = REAR_SHARE * wheelbase
    if speed < KINEMATIC_BELOW_MPS:
        steady = speed * steer / wheelbase
        return KINEMATIC_RATE * (steady * rear - slip), KINEMATIC_RATE * (steady - rate)
    front = wheelbase - rear
    inertia = INERTIA_KGM2 * (wheelbase / WHEELBASE_M) ** 2
    # Tyre forces by slip angles: front steer - (slip + front·rate) / speed, rear -(slip - rear·rate) / speed.
    f = 2.0 * FRONT_STIFFNESS_NPRAD * (steer - (slip + front * rate) / speed)
    r = -2.0 * REAR_STIFFNESS_NPRAD * (slip - rear * rate) / speed
    return (f + r) / MASS_KG - speed * rate, (front * f - rear * r) / inertia


@kernel
def body_acceleration(state, wheelbase):
    """Forward and left rates of change of the rig's velocity in its own, turning axes: what AlpaSim reports."""
    rear, rate = REAR_SHARE * wheelbase, state[EGO_YAW_RATE]
    slip = state[EGO_SLIP] + rear * rate
    slip_rate, turn_rate = lateral_rates(state[EGO_SPEED], slip, rate, state[EGO_STEER], wheelbase)
    return state[EGO_THROTTLE] + rate * rate * rear, slip_rate - rear * turn_rate


@kernel
def _derivatives(yaw, speed, slip, rate, steer, throttle, steer_command, acceleration_command, wheelbase):
    """d/dt of x, y, yaw, speed, slip, yaw rate, steer, throttle."""
    slip_rate, turn_rate = lateral_rates(speed, slip, rate, steer, wheelbase)
    across = 0.0 if speed < KINEMATIC_BELOW_MPS else slip - REAR_SHARE * wheelbase * rate
    cos, sin = math.cos(yaw), math.sin(yaw)
    return (
        speed * cos - across * sin,
        speed * sin + across * cos,
        rate,
        throttle,
        slip_rate,
        turn_rate,
        (steer_command - steer) / STEER_LAG_S,
        (acceleration_command - throttle) / ACCELERATION_LAG_S,
    )


@kernel
def drive_dynamic(state, steer_command, acceleration_command, wheelbase):
    """Advance an ego state by one inner step under constant commands, in place."""
    rear = REAR_SHARE * wheelbase
    x, y, yaw, speed = state[0], state[1], state[2], state[EGO_SPEED]
    rate, steer, throttle = state[EGO_YAW_RATE], state[EGO_STEER], state[EGO_THROTTLE]
    slip = state[EGO_SLIP] + rear * rate
    dt = STEP_S / SUBSTEPS
    half = dt / 2.0
    for _ in range(SUBSTEPS):
        a = _derivatives(yaw, speed, slip, rate, steer, throttle, steer_command, acceleration_command, wheelbase)
        b = _derivatives(
            yaw + half * a[2],
            max(speed + half * a[3], 0.0),  # AlpaSim's own creeps back by 2.5 mm in 0.1 s when it stands at -5 m/s2
            slip + half * a[4],
            rate + half * a[5],
            steer + half * a[6],
            throttle + half * a[7],
            steer_command,
            acceleration_command,
            wheelbase,
        )
        x += dt * b[0]
        y += dt * b[1]
        yaw += dt * b[2]
        speed = max(speed + dt * b[3], 0.0)
        slip += dt * b[4]
        rate += dt * b[5]
        steer += dt * b[6]
        throttle += dt * b[7]
    across = slip - rear * rate
    # What an accelerometer at the rig's origin reads, averaged over the step for what changes fast.
    state[EGO_ACCELERATION] = (speed - state[EGO_SPEED]) / STEP_S - across * rate
    state[EGO_LATERAL] = (across - state[EGO_SLIP]) / STEP_S + speed * rate
    state[0], state[1], state[2], state[EGO_SPEED] = x, y, yaw, speed
    state[EGO_YAW_RATE], state[EGO_SLIP], state[EGO_STEER], state[EGO_THROTTLE] = rate, across, steer, throttle
