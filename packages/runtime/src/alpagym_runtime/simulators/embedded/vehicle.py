"""The driven vehicle's state, and the simpler of two vehicles: a kinematic bicycle at the rear axle.

`dynamic_vehicle` is the other. The controller here fits, by least squares over the next two seconds of the plan, near
points counting most, a linear acceleration in time and a linear curvature in arc length, and applies their present
values. Both fits are exact for plans of constant jerk on clothoids; the recorded drives are followed within 13 cm
(`tests/test_commonroad.py`).
"""

from __future__ import annotations

import math

from alpagym_runtime.kernels import kernel

ACCELERATION_MIN_MPS2 = -9.0
ACCELERATION_MAX_MPS2 = 6.0
STEERING_MAX_RAD = 0.6
LATERAL_ACCELERATION_MAX_MPS2 = 9.0
LOOKAHEAD_S = 2.0
FADE_S = 0.2
"""Points this much later count 1/e: with 0.5 s a recorded turn at 14 m/s was cut by 0.4 m, with 0.2 s by 0.1 m."""
STEP_S = 0.1
SUBSTEPS = 10

# Columns of an ego's state after x, y m and yaw rad (local, of the rig): speed forward m/s, acceleration m/s2 forward,
# yaw rate rad/s, speed to the left m/s and acceleration m/s2 to the left (all of the rig's origin), steering angle of
# the front wheel rad, acceleration m/s2 that the drive train gives.
EGO_SPEED, EGO_ACCELERATION, EGO_YAW_RATE, EGO_SLIP, EGO_LATERAL, EGO_STEER, EGO_THROTTLE = range(3, 10)
EGO_COLUMNS = 10

KINEMATIC, ALPASIM = 0, 1
"""Values of `Slots.vehicle`."""


@kernel
def track(plan, count, time_first, time_step, speed, curvature):
    """Acceleration m/s2 and curvature 1/m that follow a plan.

    plan [count,3] is x, y, yaw in the present rig frame, time_first + k·time_step s from now (all > 0); `curvature` is
    the present one and is kept while the plan stands still.
    """
    # Longitudinal: s(t) = v t + a t^2/2 + j t^3/6, fitted for (a, j).
    a11 = a12 = a22 = b1 = b2 = 0.0
    # Lateral: y(s) = k s^2/2 + c s^3/6 and heading(s) = k s + c s^2/2, fitted for (k, c).
    c11 = c12 = c22 = d1 = d2 = 0.0
    s = y = 0.0
    x_before = y_before = yaw_before = 0.0
    for k in range(count):
        t = time_first + k * time_step
        if t > LOOKAHEAD_S + 1e-9:
            break
        dx, dy, yaw = plan[k, 0] - x_before, plan[k, 1] - y_before, plan[k, 2]
        # Shorter way round from the last heading.
        turn = (yaw - yaw_before + math.pi) % (2.0 * math.pi) - math.pi
        middle = yaw_before + turn / 2.0
        yaw = yaw_before + turn
        ds = dx * math.cos(middle) + dy * math.sin(middle)
        across = dy * math.cos(middle) - dx * math.sin(middle)
        s += ds
        # Lateral offsets add up as if the heading were a small angle: exact for arcs of any length.
        y += across + ds * middle
        weight = math.exp(-t / FADE_S)
        f1, f2, e = t * t / 2.0, t * t * t / 6.0, s - speed * t
        a11 += weight * f1 * f1
        a12 += weight * f1 * f2
        a22 += weight * f2 * f2
        b1 += weight * f1 * e
        b2 += weight * f2 * e
        if s > 0.0:
            g1, g2 = s * s / 2.0, s * s * s / 6.0
            c11 += weight * (g1 * g1 + s * s)
            c12 += weight * (g1 * g2 + s * g1)
            c22 += weight * (g2 * g2 + g1 * g1)
            d1 += weight * (g1 * y + s * yaw)
            d2 += weight * (g2 * y + g1 * yaw)
        x_before, y_before, yaw_before = plan[k, 0], plan[k, 1], yaw
    det = a11 * a22 - a12 * a12
    if det > 1e-12:
        jerk = (b2 * a11 - b1 * a12) / det
        acceleration = (b1 * a22 - b2 * a12) / det + jerk * STEP_S / 2.0
    elif a11 > 0.0:
        acceleration = b1 / a11
    else:
        acceleration = 0.0
    acceleration = min(max(acceleration, ACCELERATION_MIN_MPS2), ACCELERATION_MAX_MPS2)
    if s > 0.3:
        # The ridge matters only for plans of a few centimetres, where the fit is ill posed.
        c11 += 1e-6
        c22 += 1e-6
        det = c11 * c22 - c12 * c12
        slope = (d2 * c11 - d1 * c12) / det
        curvature = (d1 * c22 - d2 * c12) / det + slope * speed * STEP_S / 2.0
    return acceleration, curvature


@kernel
def drive(state, acceleration, curvature, wheelbase):
    """Advance an ego state by one inner step, in place."""
    limit = math.tan(STEERING_MAX_RAD) / wheelbase
    acceleration = min(max(acceleration, ACCELERATION_MIN_MPS2), ACCELERATION_MAX_MPS2)
    speed = state[EGO_SPEED]
    if speed > 1.0:
        limit = min(limit, LATERAL_ACCELERATION_MAX_MPS2 / (speed * speed))
    curvature = min(max(curvature, -limit), limit)
    x, y, yaw = state[0], state[1], state[2]
    dt = STEP_S / SUBSTEPS
    for _ in range(SUBSTEPS):
        after = max(speed + acceleration * dt, 0.0)
        middle = (speed + after) / 2.0
        heading = yaw + middle * curvature * dt / 2.0
        x += middle * math.cos(heading) * dt
        y += middle * math.sin(heading) * dt
        yaw += middle * curvature * dt
        speed = after
    state[EGO_ACCELERATION] = (speed - state[EGO_SPEED]) / STEP_S
    state[0], state[1], state[2], state[EGO_SPEED] = x, y, yaw, speed
    state[EGO_YAW_RATE], state[EGO_SLIP], state[EGO_LATERAL] = speed * curvature, 0.0, speed * speed * curvature
    state[EGO_STEER], state[EGO_THROTTLE] = math.atan(curvature * wheelbase), state[EGO_ACCELERATION]
