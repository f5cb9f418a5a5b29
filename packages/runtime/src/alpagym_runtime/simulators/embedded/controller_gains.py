"""AlpaSim's default controller as a table of gains, built once a process.

Its linear MPC solves, every 0.1 s, a quadratic programme over 20 steps of the vehicle linearised at the present state:
minimise Σ_k≥10 (2 Δx² + Δy² + Δyaw² + 0.1 a²) + Σ_k (5 steer_command² + acceleration_command²). In the rig frame and
without its bounds the minimiser is linear in the state and the reference, and splits in two: the longitudinal half does
not depend on the state at all, the lateral half on the speed only. So its first command is a row of gains, tabulated on
speed, and the bounds are kept by clipping (ADR 13). `tests/test_vehicle.py` holds it against the bounded programme.

AlpaSim's kinematic model (below 5 m/s) is linearised at the present steering, so that the predicted speed turns the
vehicle: that is a further row of gains, times the steering. Not here: that the longitudinal commands could help the
lateral half through it, and the slip at the point of linearisation.

The constants are compiled into the functions marked `@kernel` of `dynamic_vehicle`; that word here makes this file part
of their cache's key.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]

# The vehicle: a Ford Fusion by AlpaSim's numbers.
MASS_KG = 2014.4
INERTIA_KGM2 = 3414.2
REAR_AXLE_TO_CG_M = 1.59
WHEELBASE_M = 2.85
FRONT_STIFFNESS_NPRAD = 93534.5
REAR_STIFFNESS_NPRAD = 176162.1
STEER_LAG_S = 0.1
ACCELERATION_LAG_S = 0.1
KINEMATIC_BELOW_MPS = 5.0
KINEMATIC_RATE = 10.0  # 1/s, how fast slip and yaw rate relax to the kinematic ones

# The programme.
HORIZON = 20
FIRST_COUNTED = 10
STEP_S = 0.1
LONGITUDINAL_WEIGHT, LATERAL_WEIGHT, HEADING_WEIGHT = 2.0, 1.0, 1.0
ACCELERATION_WEIGHT, STEER_COMMAND_WEIGHT, ACCELERATION_COMMAND_WEIGHT = 0.1, 5.0, 1.0
REGULARISATION = 1e-6

POINTS = HORIZON - FIRST_COUNTED + 1
"""Reference poses that count: 1.0, 1.1, … 2.0 s ahead."""

SPEED_STEP_MPS = 0.25
KINEMATIC_ROWS = int(KINEMATIC_BELOW_MPS / SPEED_STEP_MPS) + 1
SPEED_MAX_MPS = 60.0


class Gains(NamedTuple):
    """The first command as a linear function.

    acceleration command = longitudinal @ l with l = [speed, acceleration, x of POINTS reference poses];
    steering command = lateral[row] @ [lateral speed at the centre of gravity, yaw rate, steering, y of POINTS, yaw of
    POINTS, steering · l]. Rows of `lateral` are speeds `SPEED_STEP_MPS` apart: `KINEMATIC_ROWS` from 0 to 5 m/s for the
    kinematic model, then from 5 m/s on for the dynamic one, whose last columns are 0.
    """

    longitudinal: Float  # [2 + POINTS]
    lateral: Float  # [*, 3 + 2 POINTS + 2 + POINTS]


def exponential(matrix: Float) -> Float:
    """Matrix exponential by scaling and squaring of its Taylor series; for the small matrices here, to 1e-14."""
    halvings = max(int(np.ceil(np.log2(max(np.abs(matrix).sum(axis=1).max(), 1e-9)))) + 2, 0)
    small = matrix / 2.0**halvings
    term, total = np.eye(len(matrix)), np.eye(len(matrix))
    for k in range(1, 18):
        term = term @ small / k
        total = total + term
    for _ in range(halvings):
        total = total @ total
    return total


def tyre_matrices(speed: float) -> tuple[Float, Float]:
    """The dynamic bicycle's [2,2] and [2]: d(lateral speed, yaw rate)/dt = A (lateral speed, yaw rate) + b steering."""
    front, rear = WHEELBASE_M - REAR_AXLE_TO_CG_M, REAR_AXLE_TO_CG_M
    f, r = 2.0 * FRONT_STIFFNESS_NPRAD, 2.0 * REAR_STIFFNESS_NPRAD
    a = np.array(
        [
            [-(f + r) / (MASS_KG * speed), -speed - (f * front - r * rear) / (MASS_KG * speed)],
            [
                -(f * front - r * rear) / (INERTIA_KGM2 * speed),
                -(f * front**2 + r * rear**2) / (INERTIA_KGM2 * speed),
            ],
        ]
    )
    return a, np.array([f / MASS_KG, f * front / INERTIA_KGM2])


class _Half(NamedTuple):
    """One half's programme, condensed: what it predicts and how its commands follow from what is wanted.

    For the half's n states: `free` [POINTS·n, n] on the initial state, `forced` [POINTS·n, HORIZON] on the commands,
    `solve` [HORIZON, POINTS·n] from wanted minus free to the commands.
    """

    free: Float
    forced: Float
    solve: Float


def _predict(dynamics: Float, inputs: Float) -> tuple[Float, Float]:
    """Free and forced response of dx/dt = dynamics x + inputs u at the steps that count."""
    n = len(dynamics)
    block = np.zeros((n + 1, n + 1))
    block[:n, :n], block[:n, n] = dynamics * STEP_S, inputs * STEP_S
    discrete = exponential(block)
    a, b = discrete[:n, :n], discrete[:n, n]
    powers = [np.eye(n)]
    for _ in range(HORIZON):
        powers.append(a @ powers[-1])
    counted = range(FIRST_COUNTED, HORIZON + 1)
    forced = np.zeros((POINTS * n, HORIZON))
    for i, k in enumerate(counted):
        for j in range(k):
            forced[i * n : (i + 1) * n, j] = powers[k - 1 - j] @ b
    return np.concatenate([powers[k] for k in counted]), forced


def _half(dynamics: Float, inputs: Float, weights: Float, command_weight: float) -> _Half:
    free, forced = _predict(dynamics, inputs)
    weight = np.tile(weights, POINTS)
    hessian = forced.T @ (weight[:, None] * forced) + (command_weight + REGULARISATION) * np.eye(HORIZON)
    return _Half(free, forced, np.asarray(np.linalg.solve(hessian, forced.T * weight), np.float64))


@lru_cache(maxsize=1)
def _longitudinal() -> tuple[Float, Float, Float, Float]:
    """The half's matrices (state x, speed, acceleration) and its HORIZON commands [HORIZON, 2 + POINTS]."""
    a, b = np.zeros((3, 3)), np.array([0.0, 0.0, 1.0 / ACCELERATION_LAG_S])
    a[0, 1], a[1, 2], a[2, 2] = 1.0, 1.0, -1.0 / ACCELERATION_LAG_S
    half = _half(a, b, np.array([LONGITUDINAL_WEIGHT, 0.0, ACCELERATION_WEIGHT]), ACCELERATION_COMMAND_WEIGHT)
    commands = np.concatenate([-half.solve @ half.free[:, 1:], half.solve[:, ::3]], axis=1)
    return a, b, commands, commands[0]


def _lateral_row(speed: float, kinematic: bool) -> Float:
    """Gains at one speed; the half's state is y, yaw, lateral speed, yaw rate, steering."""
    a, b = np.zeros((5, 5)), np.zeros(5)
    a[0, 1], a[1, 3] = speed, 1.0
    a[4, 4], b[4] = -1.0 / STEER_LAG_S, 1.0 / STEER_LAG_S
    if kinematic:
        a[2, 2] = a[3, 3] = -KINEMATIC_RATE
        a[2, 4] = KINEMATIC_RATE * speed * REAR_AXLE_TO_CG_M / WHEELBASE_M
        a[3, 4] = KINEMATIC_RATE * speed / WHEELBASE_M
    else:
        a[0, 2], a[0, 3] = 1.0, -REAR_AXLE_TO_CG_M
        a[2:4, 2:4], a[2:4, 4] = tyre_matrices(speed)
    weights = np.array([LATERAL_WEIGHT, HEADING_WEIGHT, 0.0, 0.0, 0.0])
    half = _half(a, b, weights, STEER_COMMAND_WEIGHT)
    first = half.solve[0]
    row = np.concatenate([-first @ half.free[:, 2:], first[::5], first[1::5], np.zeros(2 + POINTS)])
    if kinematic:
        # Eight states: the longitudinal three drive slip and yaw rate, here by a steering angle of 1 rad.
        along, push, commands, _ = _longitudinal()
        joint, inputs = np.zeros((8, 8)), np.zeros(8)
        joint[:3, :3], joint[3:, 3:], inputs[:3] = along, a, push
        joint[5, 1], joint[6, 1] = KINEMATIC_RATE * REAR_AXLE_TO_CG_M / WHEELBASE_M, KINEMATIC_RATE / WHEELBASE_M
        free, forced = _predict(joint, inputs)
        moved = forced @ commands
        moved[:, :2] += free[:, 1:3]
        pushed = moved.reshape(POINTS, 8, -1)[:, 3:].reshape(POINTS * 5, -1)
        row[-(2 + POINTS) :] = -first @ pushed
    return row


@lru_cache(maxsize=1)
def controller_gains() -> Gains:
    """The table; 0.1 s to build."""
    slow = [_lateral_row(k * SPEED_STEP_MPS, True) for k in range(KINEMATIC_ROWS)]
    dynamic = np.arange(KINEMATIC_BELOW_MPS, SPEED_MAX_MPS + 1e-9, SPEED_STEP_MPS)
    return Gains(_longitudinal()[3], np.stack(slow + [_lateral_row(float(speed), False) for speed in dynamic]))
