"""Poses between ticks: where they lie, and that AlpaSim's measures are sampled at them."""

from __future__ import annotations

import numpy as np
import pytest

from alpagym_runtime.envs.core import DrivingCore, ScaledTerm
from alpagym_runtime.errors import ConfigError
from alpagym_runtime.policies.config import ConstantSpeedConfig
from alpagym_runtime.rewards.config import MeasureConfig
from alpagym_runtime.rollouts.collector import Collector
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
from alpagym_runtime.simulators.embedded.dynamic_vehicle import _derivatives, drive_dynamic
from alpagym_runtime.simulators.embedded.reported_poses import ego_poses, others_between, reported_times
from alpagym_runtime.simulators.embedded.vehicle import EGO_COLUMNS, EGO_SLIP, EGO_SPEED, EGO_STEER, EGO_YAW_RATE, drive
from alpagym_runtime.types import EpisodeRequest, Sampling

PERIOD = 200_000
SCENES = [f"procedural-test-{i:06d}" for i in range(4)]


def test_times_that_are_reported():
    assert reported_times(0, 200_000, 0).tolist() == [200_000]
    assert reported_times(0, 200_000, 100_000).tolist() == [100_000, 200_000]
    # A tick that an event cut short ends with the pose of the event.
    assert reported_times(200_000, 300_000, 40_000).tolist() == [240_000, 280_000, 300_000]


@pytest.mark.parametrize("interval", [-100_000, 5_000, 30_000, 400_000])
def test_interval_divides_the_control_period(interval):
    with pytest.raises(ConfigError, match="pose_reporting_interval_us: must be 0 or a divisor of control_period_us"):
        EmbeddedConfig(control_period_us=PERIOD, pose_reporting_interval_us=interval)


def state(speed, steer=0.0, yaw_rate=0.0):
    out = np.zeros(EGO_COLUMNS)
    out[EGO_SPEED], out[EGO_STEER], out[EGO_YAW_RATE] = speed, steer, yaw_rate
    return out


def test_poses_on_an_arc_of_the_kinematic_vehicle():
    # 10 m/s on curvature 0.05 for 0.1 s: after 40 ms 0.4 m along, yaw 0.02, y = 20 (1 - cos 0.02) = 0.004 m.
    before = state(10.0, yaw_rate=0.5)
    after = before.copy()
    drive(after, 0.0, 0.05, 2.85)
    pose = ego_poses(np.array([before, after]), np.array([40_000]))[0]
    np.testing.assert_allclose(pose, [20.0 * np.sin(0.02), 20.0 * (1.0 - np.cos(0.02)), 0.02], atol=1e-5)


@pytest.mark.parametrize(
    ("speed", "steer", "steer_command", "acceleration"),
    [(20.0, 0.0, 0.1, -9.0), (8.0, 0.1, -0.3, 6.0), (4.0, 0.0, 0.5, 6.0), (0.3, 0.0, 0.0, -9.0)],
)
def test_poses_between_lie_on_the_dynamic_vehicles_own_path(speed, steer, steer_command, acceleration):
    before = state(speed, steer)
    after = before.copy()
    drive_dynamic(after, steer_command, acceleration, 2.85)
    # The same integration, stopped after 50 of its 100 ms: second-order Runge-Kutta at 10 ms.
    x = np.array([0.0, 0.0, 0.0, speed, before[EGO_SLIP], 0.0, steer, 0.0])
    for _ in range(5):
        a = np.array(_derivatives(*x[2:], steer_command, acceleration, 2.85))
        half = x + 0.005 * a
        half[3] = max(half[3], 0.0)
        x = x + 0.01 * np.array(_derivatives(*half[2:], steer_command, acceleration, 2.85))
        x[3] = max(x[3], 0.0)
    pose = ego_poses(np.array([before, after]), np.array([50_000]))[0]
    np.testing.assert_allclose(pose[:2], x[:2], atol=1e-3)
    np.testing.assert_allclose(pose[2], x[2], atol=2e-3)


def test_poses_at_the_worlds_times_are_its_own():
    states = np.random.default_rng(1).normal(size=(5, EGO_COLUMNS))
    np.testing.assert_array_equal(ego_poses(states, 100_000 * np.arange(5)), states[:, :3])
    with pytest.raises(ValueError, match="400001"):
        ego_poses(states, np.array([400_001]))


def test_others_between_turn_the_short_way_and_only_where_they_are_there_at_both():
    before = np.array([1, 4]), np.array([[0.0, 0.0, 3.1], [9.0, 9.0, 0.0]])
    after = np.array([1, 2]), np.array([[2.0, -4.0, -3.1], [0.0, 0.0, 0.0]])
    ids, rows, poses = others_between(before, after, 0.25)
    # From 3.1 to -3.1 is 2 pi - 6.2 = 0.0832 to the left, a quarter of it 0.0208.
    assert ids.tolist() == [1]
    assert rows.tolist() == [0]
    np.testing.assert_allclose(poses, [[0.5, -1.0, 3.1208]], atol=1e-4)


def drive_all(interval, measures=("alpasim/progress", "alpasim/min_distance_to_obstacle_m"), terms=None):
    policy = ConstantSpeedConfig().build("cpu")
    config = EmbeddedConfig(
        control_period_us=PERIOD, pose_reporting_interval_us=interval, measures=list(measures), end_on=[]
    )
    world = config.build(policy.spec, DatasetSection(), 4, ())
    built = {name: ScaledTerm(1.0, term.build(world.spec)) for name, term in (terms or {}).items()}
    core = DrivingCore(world, built, policy.spec)
    episodes = list(Collector(core, policy).collect([EpisodeRequest(i, horizon_ticks=10) for i in SCENES], Sampling()))
    world.close()
    return episodes


def test_samples_lie_at_the_reported_poses_and_agree_where_both_have_one():
    coarse, grid, fine = (drive_all(interval) for interval in (0, 100_000, 40_000))
    for a, b, c in zip(coarse, grid, fine, strict=True):
        ours = a.measures["progress"].time_us
        for episode, step in ((a, PERIOD), (b, 100_000), (c, 40_000)):
            times = episode.measures["alpasim/progress"].time_us
            np.testing.assert_array_equal(times, np.arange(ours[0], ours[-1] + 1, step))
        for name in ("alpasim/progress", "alpasim/min_distance_to_obstacle_m"):
            np.testing.assert_array_equal(b.measures[name].value[2::2], a.measures[name].value[1:])
            np.testing.assert_allclose(c.measures[name].value[5::5], a.measures[name].value[1:], atol=1e-12)


def test_pay_for_samples_between_ticks_falls_to_their_tick():
    terms = {"progress": MeasureConfig(measure="alpasim/progress", difference=True)}
    coarse, fine = drive_all(0, terms=terms), drive_all(40_000, terms=terms)
    for a, b in zip(coarse, fine, strict=True):
        assert len(a.terms["progress"]) == len(b.terms["progress"]) == 10
        # The first two logged values are made up, so that what the first tick earns differs.
        np.testing.assert_allclose(b.terms["progress"][1:], a.terms["progress"][1:], atol=1e-12)
