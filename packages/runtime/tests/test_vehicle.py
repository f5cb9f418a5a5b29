"""AlpaSim's vehicle: the plant by hand numbers, the gain table against the programme that it stands for."""

from __future__ import annotations

import math

import numpy as np
import pytest

from alpagym_runtime.simulators.embedded.controller_gains import WHEELBASE_M, controller_gains, exponential
from alpagym_runtime.simulators.embedded.dynamic_vehicle import clip_commands, command_for_plan, drive_dynamic
from alpagym_runtime.simulators.embedded.plan_delay import PlanDelay
from alpagym_runtime.simulators.embedded.vehicle import (
    EGO_ACCELERATION,
    EGO_COLUMNS,
    EGO_LATERAL,
    EGO_SLIP,
    EGO_SPEED,
    EGO_STEER,
    EGO_THROTTLE,
    EGO_YAW_RATE,
)

GAINS = controller_gains()


def ego(speed: float) -> np.ndarray:
    state = np.zeros(EGO_COLUMNS)
    state[EGO_SPEED] = speed
    return state


# ---------------------------------------------------------------- the plant


def test_actuators_lag_by_a_tenth_of_a_second():
    state = ego(10.0)
    drive_dynamic(state, 0.1, 2.0, WHEELBASE_M)
    # One time constant: 1 - 1/e = 0.632 of each command; the speed gains 2 (0.1 - 0.1 (1 - 1/e)) = 0.0736 m/s.
    assert state[EGO_STEER] == pytest.approx(0.0632, abs=2e-4)
    assert state[EGO_THROTTLE] == pytest.approx(1.264, abs=3e-3)
    assert state[EGO_SPEED] == pytest.approx(10.0736, abs=7e-4)
    assert state[EGO_ACCELERATION] == pytest.approx(0.736, abs=7e-3)


def test_below_5_mps_it_turns_as_a_kinematic_bicycle():
    state = ego(4.0)
    for _ in range(50):
        drive_dynamic(state, 0.1, 0.0, WHEELBASE_M)
    # Small angles: 4 * 0.1 / 2.85 = 0.14035 rad/s, no slip at the rear axle, 4 * 0.14035 m/s2 to the left.
    assert state[EGO_YAW_RATE] == pytest.approx(0.14035, abs=1e-5)
    assert state[EGO_SLIP] == pytest.approx(0.0, abs=1e-6)
    assert state[EGO_LATERAL] == pytest.approx(0.5614, abs=1e-4)


def test_at_speed_it_understeers_and_slips():
    state = ego(20.0)
    for _ in range(80):
        drive_dynamic(state, 0.02, 0.0, WHEELBASE_M)
    # Steady turn: rate = v steer / (L + m v^2 (b Cr - a Cf) / (2 L Cf Cr)), a = 1.26 m, b = 1.59 m:
    # m v^2 = 805760; b Cr - a Cf = 280097.7 - 117853.5 = 162244.3; 2 L Cf Cr = 9.3919e10  ->  1.39196 m
    # 20 * 0.02 / (2.85 + 1.39196) = 0.094296 rad/s
    assert state[EGO_YAW_RATE] == pytest.approx(0.094296, abs=1e-5)
    # The rear axle carries a / L of m v rate = 2014.4 * 20 * 0.094296 * 1.26 / 2.85 = 1679.6 N by its slip angle:
    # 1679.6 / (2 * 176162.1) = 0.0047671 rad, so it moves 20 * 0.0047671 = 0.095342 m/s to the right.
    assert state[EGO_SLIP] == pytest.approx(-0.095342, abs=1e-5)
    assert state[EGO_LATERAL] == pytest.approx(20.0 * 0.094296, abs=1e-3)


def test_it_stops_and_never_reverses():
    state = ego(3.0)
    for _ in range(30):
        drive_dynamic(state, 0.0, -5.0, WHEELBASE_M)
    assert state[EGO_SPEED] == 0.0
    assert state[EGO_ACCELERATION] == 0.0
    standing = state[0]
    drive_dynamic(state, 0.0, -5.0, WHEELBASE_M)
    assert state[0] == standing


def test_left_steering_turns_left():
    state = ego(15.0)
    for _ in range(10):
        drive_dynamic(state, 0.05, 0.0, WHEELBASE_M)
    assert state[1] > 0.1
    assert state[2] > 0.1


def test_longer_vehicle_turns_in_proportion():
    short, long = ego(4.0), ego(4.0)
    for _ in range(50):
        drive_dynamic(short, 0.1, 0.0, 2.85)
        drive_dynamic(long, 0.1, 0.0, 5.7)
    assert long[EGO_YAW_RATE] == pytest.approx(short[EGO_YAW_RATE] / 2.0, rel=1e-9)


def test_commands_keep_the_actuators_in_bounds():
    # From -7 m/s2 a step keeps e^-1 = 0.36788 of it: the command may not take the rest below -8,
    # (-8 + 7 * 0.36788) / 0.63212 = -8.582.
    _, acceleration = clip_commands(0.0, -50.0, 0.0, -7.0)
    assert acceleration == pytest.approx(-8.582, abs=1e-3)
    # From rest -8 / 0.632 = -12.7 would be allowed, but the command's own bound is -9.
    assert clip_commands(5.0, -50.0, 0.0, 0.0)[1] == -9.0
    # 45 degrees after a step from 0: 0.7854 / 0.63212 = 1.2425 rad.
    assert clip_commands(5.0, 0.0, 0.0, 0.0)[0] == pytest.approx(1.2425, abs=1e-4)


# ---------------------------------------------------------------- the programme

L, REAR = 2.85, 1.59
FRONT = L - REAR
MASS, INERTIA, CF, CR = 2014.4, 3414.2, 93534.5, 176162.1
N, FIRST, DT = 20, 10, 0.1
BOUNDED = [2, 3, 6, 7]  # yaw, speed, steering, acceleration
LOW = np.array([-math.pi / 2.0, 0.0, -math.pi / 4.0, -8.0])
HIGH = np.array([math.pi / 2.0, 35.0, math.pi / 4.0, 6.0])


class Exact:
    """The bounded programme and the plant, written from AlpaSim's numbers; state x, y, yaw, vx, vy, rate, steer, a."""

    def __init__(self) -> None:
        import osqp
        import scipy.sparse

        self.osqp, self.sparse = osqp, scipy.sparse

    def rates(self, s, u):
        _, _, yaw, v, w, r, d, a = s
        if v < 5.0:
            across, dw, dr = 0.0, 10.0 * (v * d * REAR / L - w), 10.0 * (v * d / L - r)
        else:
            across = w - r * REAR
            m, j = MASS * v, INERTIA * v
            dw = -2 * (CF + CR) / m * w + (-v - 2 * (FRONT * CF - REAR * CR) / m) * r + 2 * CF / MASS * d
            dr = -2 * (FRONT * CF - REAR * CR) / j * w - 2 * (FRONT**2 * CF + REAR**2 * CR) / j * r
            dr += 2 * FRONT * CF / INERTIA * d
        c, n = math.cos(yaw), math.sin(yaw)
        return np.array([v * c - across * n, v * n + across * c, r, a, dw, dr, (u[0] - d) / 0.1, (u[1] - a) / 0.1])

    def drive(self, s, u):
        for _ in range(10):
            s = s + 0.01 * self.rates(s + 0.005 * self.rates(s, u), u)
            s[3] = max(s[3], 0.0)
        return s

    def command(self, s, reference):
        """First command for state [8] in the rig frame and reference [21,3] x, y, yaw."""
        v, w, r, d = s[3], s[4], s[5], s[6]
        a = np.zeros((8, 8))
        a[0, 3], a[2, 5], a[3, 7] = 1.0, 1.0, 1.0
        if v < 5.0:
            a[1, 2] = v
            a[4, [3, 4, 6]] = 10.0 * np.array([d * REAR / L, -1.0, v * REAR / L])
            a[5, [3, 5, 6]] = 10.0 * np.array([d / L, -1.0, v / L])
        else:
            m, j = MASS * v, INERTIA * v
            a[0, 2], a[1, [2, 4, 5]] = -(w - REAR * r), [v, 1.0, -REAR]
            a[4, [4, 5, 6]] = -2 * (CF + CR) / m, -v - 2 * (FRONT * CF - REAR * CR) / m, 2 * CF / MASS
            a[5, 4] = -2 * (FRONT * CF - REAR * CR) / j
            a[5, 5] = -2 * (FRONT**2 * CF + REAR**2 * CR) / j
            a[5, 6] = 2 * FRONT * CF / INERTIA
        a[6, 6] = a[7, 7] = -10.0
        block = np.zeros((10, 10))
        block[:8, :8], block[6, 8], block[7, 9] = a * DT, 10.0 * DT, 10.0 * DT
        block = exponential(block)
        a, b = block[:8, :8], block[:8, 8:]
        free, forced = np.zeros((N, 8)), np.zeros((N, 8, 2 * N))
        x, m = s.copy(), np.zeros((8, 2 * N))
        for k in range(N):
            x, m = a @ x, a @ m
            m[:, 2 * k : 2 * k + 2] += b
            free[k], forced[k] = x, m
        weights, target = np.array([2.0, 1.0, 1.0, 0, 0, 0, 0, 0.1]), np.zeros((N, 8))
        target[:, :3] = reference[1:]
        p, q = np.diag(np.tile([5.0, 1.0], N)) + 1e-6 * np.eye(2 * N), np.zeros(2 * N)
        for k in range(FIRST - 1, N):
            p += forced[k].T @ (weights[:, None] * forced[k])
            q += forced[k].T @ (weights * (free[k] - target[k]))
        rows = forced[:, BOUNDED].reshape(-1, 2 * N)
        start = free[:, BOUNDED]
        low = np.concatenate([np.tile([-2.0, -9.0], N), (LOW - start).ravel()])
        high = np.concatenate([np.tile([2.0, 6.0], N), (HIGH - start).ravel()])
        solver = self.osqp.OSQP()
        matrix = self.sparse.csc_matrix(np.concatenate([np.eye(2 * N), rows]))
        solver.setup(
            self.sparse.csc_matrix((p + p.T) / 2.0),
            q,
            matrix,
            low,
            high,
            verbose=False,
            eps_abs=1e-4,
            eps_rel=1e-4,
            max_iter=500,
            polishing=False,
        )
        result = solver.solve(raise_error=False)
        return result.x[:2] if result.info.status.startswith("solved") else np.zeros(2)


def path(speed, curvature, seconds=18.0):
    """[K,3] poses every 0.1 s of a drive with speed(t) and curvature(t)."""
    x = y = yaw = 0.0
    out = [(x, y, yaw)]
    for k in range(round(seconds * 1000)):
        t = k * 1e-3
        ds = speed(t) * 1e-3
        x, y, yaw = x + ds * math.cos(yaw), y + ds * math.sin(yaw), yaw + ds * curvature(t)
        if k % 100 == 99:
            out.append((x, y, yaw))
    return np.array(out)


def constant(value):
    return lambda _t: value


def after(time, value):
    return lambda t: value if t >= time else 0.0


def bend(t):
    """Curvature of a lane change of 3.5 m in 4 s at 15 m/s: y = 3.5 (t/4 - sin(2 pi t/4) / 2 pi)."""
    return 3.5 * math.pi / 8.0 * math.sin(math.pi * (t - 1.0) / 2.0) / 225.0 if 1.0 <= t < 5.0 else 0.0


def stop_go(t):
    return max(8.0 - 2.0 * t, 0.0) if t < 5.0 else min(1.5 * (t - 5.0), 7.0)


MANOEUVRES = {
    "straight, 10 m/s": (constant(10.0), constant(0.0)),
    "straight, 25 m/s": (constant(25.0), constant(0.0)),
    "turn of 20 m": (constant(7.0), after(1.0, 1 / 20)),
    "turn of 60 m": (constant(11.0), after(1.0, 1 / 60)),
    "turn of 200 m at 20 m/s": (constant(20.0), after(1.0, 1 / 200)),
    "accelerate": (lambda t: min(5.0 + 2.0 * t, 22.0), constant(0.0)),
    "brake to a stop": (lambda t: max(12.0 - 2.0 * t, 0.0), constant(0.0)),
    "stop, go, turn": (stop_go, after(5.0, 1 / 20)),
    "lane change": (constant(15.0), bend),
    "brake hard from 20 m/s": (lambda t: max(20.0 - 7.0 * max(t - 1.0, 0.0), 0.0), constant(0.0)),
    "turn of 10 m at 6 m/s": (constant(6.0), after(1.0, 1 / 10)),
}


def seen_from(pose, poses):
    dx, dy = poses[:, 0] - pose[0], poses[:, 1] - pose[1]
    c, n = math.cos(pose[2]), math.sin(pose[2])
    return np.stack([c * dx + n * dy, c * dy - n * dx, poses[:, 2] - pose[2]], axis=1)


@pytest.mark.parametrize("name", MANOEUVRES)
def test_table_drives_as_the_exact_programme(name):
    drive = path(*MANOEUVRES[name])
    exact = Exact()
    speed = MANOEUVRES[name][0](0.0)
    reference = np.array([0.0, 0.0, 0.0, speed, 0.0, 0.0, 0.0, 0.0])
    state = ego(speed)
    apart = turned = 0.0
    for k in range(100):
        seen = seen_from(reference[:3], drive[k : k + N + 1])
        command = exact.command(np.concatenate([np.zeros(3), reference[3:]]), seen)
        reference = exact.drive(reference, command)
        pose = state[:3].copy()
        plan = seen_from(pose, drive[k + 1 : k + 65])
        ours = command_for_plan(GAINS.longitudinal, GAINS.lateral, plan, pose, 0.0, 0.1, state, WHEELBASE_M)
        drive_dynamic(state, ours[0], ours[1], WHEELBASE_M)
        apart = max(apart, math.hypot(*(state[:2] - reference[:2])))
        turned = max(turned, abs(state[2] - reference[2]))
    print(f"{name}: {apart:.4f} m, {math.degrees(turned):.3f} deg")
    assert apart <= 0.1
    assert turned <= math.radians(1.0)


# ---------------------------------------------------------------- plans


def commands(plan, pose, elapsed, step, state):
    return np.array(command_for_plan(GAINS.longitudinal, GAINS.lateral, plan, pose, elapsed, step, state, WHEELBASE_M))


def test_plan_is_read_in_its_own_frame_and_time():
    drive = path(constant(10.0), constant(0.02))
    state = ego(10.0)
    state[:3] = drive[2]
    fresh = commands(seen_from(drive[2], drive[3:67]), drive[2].copy(), 0.0, 0.1, state)
    old = commands(seen_from(drive[0], drive[1:65]), drive[0].copy(), 0.2, 0.1, state)
    np.testing.assert_allclose(old, fresh, atol=1e-9)


def test_coarse_plan_is_interpolated_and_its_last_pose_stays():
    state = ego(10.0)
    straight = np.array([[10.0 * 0.5 * (k + 1), 0.0, 0.0] for k in range(8)])
    fine = np.array([[min(1.0 * (k + 1), 40.0), 0.0, 0.0] for k in range(64)])
    np.testing.assert_allclose(
        commands(straight, np.zeros(3), 0.0, 0.5, state), commands(fine, np.zeros(3), 0.0, 0.1, state), atol=1e-9
    )
    # A plan of 1 s at 10 m/s ends 10 m ahead: the car brakes to be there.
    assert commands(straight[:2], np.zeros(3), 0.0, 0.5, state)[1] < -2.0


def test_what_a_plan_says_before_one_second_does_not_matter():
    plan = np.array([[1.0 * (k + 1), 0.0, 0.0] for k in range(64)])
    other = plan.copy()
    other[:9, 1] = 3.0
    state = ego(10.0)
    np.testing.assert_array_equal(
        commands(plan, np.zeros(3), 0.0, 0.1, state), commands(other, np.zeros(3), 0.0, 0.1, state)
    )


def test_delayed_plan_is_the_newest_old_enough():
    # Two ticks of delay: the oldest until one is old enough, then always the plan before the last.
    delay, row = PlanDelay(1, 2, 4), np.zeros(1, np.int64)
    given = []
    for k in range(5):
        plan, pose, age = delay.exchange(
            row, np.full((1, 4, 3), float(k)), np.full((1, 3), float(k)), np.array([2 * k])
        )
        given.append((plan[0, 0, 0], pose[0, 0], age[0]))
    assert given == [(0, 0, 0), (0, 0, 2), (0, 0, 4), (1, 1, 4), (2, 2, 4)]
    delay.forget(row)
    assert delay.exchange(row, np.full((1, 4, 3), 9.0), np.zeros((1, 3)), np.array([0]))[2][0] == 0
