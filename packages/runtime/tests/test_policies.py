from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from alpagym_runtime.errors import ConfigError
from alpagym_runtime.policies.base import plan_decision, validate_decision
from alpagym_runtime.policies.config import ConstantSpeedConfig, LogReplayConfig, RouteFollowerConfig
from alpagym_runtime.policies.route_follower import make_route
from alpagym_runtime.testing.conformance import PolicyConformance
from alpagym_runtime.testing.examples import assert_same, example_decision, example_observation
from alpagym_runtime.types import PolicySpec, Ragged, Sampling


class TestConstantSpeed(PolicyConformance):
    def make(self):
        return ConstantSpeedConfig().build()


class TestParkedCar(PolicyConformance):
    def make(self):
        return ConstantSpeedConfig(speed_factor=0.0).build()


class TestRouteFollower(PolicyConformance):
    def make(self):
        return RouteFollowerConfig().build()


class TestLogReplay(PolicyConformance):
    def make(self):
        return LogReplayConfig().build()


def act(config, **observation):
    policy = config.build()
    fresh = {name: np.asarray(value) for name, value in observation.items()}
    return policy.act(fresh, np.zeros(len(next(iter(fresh.values()))), np.uint64), Sampling()).plan_rig


def dynamics(*speeds_mps):
    array = np.zeros((len(speeds_mps), 7), np.float32)
    array[:, 0] = speeds_mps
    return array


# ---------------------------------------------------------------- constant speed


def test_constant_speed_goes_straight_at_the_present_speed():
    plan = act(ConstantSpeedConfig(), ego_dynamics_rig=dynamics(10.0, 0.0))
    # 10 m/s · 0.1 s = 1 m, · 6.4 s = 64 m
    np.testing.assert_allclose(plan[0, [0, 63], 0], [1.0, 64.0], rtol=1e-6)
    assert (plan[..., 1:] == 0.0).all()
    assert (plan[1] == 0.0).all()


def test_a_speed_factor_scales_the_plan():
    plan = act(ConstantSpeedConfig(0.5), ego_dynamics_rig=dynamics(10.0))
    np.testing.assert_allclose(plan[0, 63, 0], 32.0, rtol=1e-6)


def test_factor_zero_brakes_to_a_stop_and_stays():
    plan = act(ConstantSpeedConfig(0.0), ego_dynamics_rig=dynamics(6.0, 0.0))
    # 6 t - 3/2 t²: 4.5 m at 1 s; stands after 2 s at 36 / (2 · 3) = 6 m
    np.testing.assert_allclose(plan[0, [9, 19, 20, 63], 0], [4.5, 6.0, 6.0, 6.0], rtol=1e-6)
    assert (plan[1] == 0.0).all()


def test_a_negative_speed_factor_is_refused():
    with pytest.raises(ConfigError, match="speed_factor"):
        ConstantSpeedConfig(-1.0)


# ---------------------------------------------------------------- log replay


def test_log_replay_returns_the_recording_and_goes_straight_on_where_it_ends():
    plan = np.zeros((4, 64, 3), np.float32)
    plan[:, :, 0] = 0.5 * np.arange(1, 65)
    plan[2, 0] = 0.0, 0.0, np.pi / 2
    mask = np.arange(64) < np.array([[64], [10], [1], [0]])
    answer = act(
        LogReplayConfig(),
        ego_dynamics_rig=dynamics(8.0, 8.0, 8.0, 8.0),
        recorded_plan_rig=np.where(mask[:, :, None], plan, np.float32(0.0)),
        recorded_plan_rig_mask=mask,
    )
    assert (answer[0] == plan[0]).all()
    assert (answer[1] == plan[1]).all()  # 0.5 m a step goes on
    assert (answer[2, :, :2] == 0.0).all()  # one pose left, and that is where it stands
    assert (answer[2, :, 2] == np.float32(np.pi / 2)).all()
    np.testing.assert_allclose(answer[3, [0, 63], 0], [0.8, 51.2], rtol=1e-6)  # nothing left: 8 m/s · 0.1 s a step


def test_log_replay_reads_the_recording_so_it_is_no_trainee():
    assert LogReplayConfig().spec().privileged == ("recorded_plan_rig",)


# ---------------------------------------------------------------- route follower


def world(route, speed, actors=()):
    """A row on a route [R,2] with actors (x, y, yaw, vx, vy)."""
    spec = RouteFollowerConfig().spec()
    boxes = np.zeros((1, spec.actors, 9), np.float32)
    for i, actor in enumerate(actors):
        boxes[0, i, :5], boxes[0, i, 5:7] = actor, (4.0, 2.0)
    return {
        "ego_dynamics_rig": dynamics(speed),
        "route_rig": np.asarray(route, np.float32)[None],
        "route_mask": np.ones((1, len(route)), bool),
        "actors_rig": boxes,
        "actors_mask": np.arange(spec.actors)[None] < len(actors),
    }


STRAIGHT = np.stack([np.arange(20) * 4.0, np.zeros(20)], axis=-1)


def speeds(plan):
    steps = np.diff(np.concatenate([np.zeros((1, 2)), plan[:, :2]]), axis=0)
    return np.hypot(steps[:, 0], steps[:, 1]) / 0.1


def test_on_a_free_straight_road_it_reaches_the_desired_speed():
    plan = act(RouteFollowerConfig(), **world(STRAIGHT, 8.0))[0]
    assert (plan[:, 1:] == 0.0).all()
    assert (np.diff(speeds(plan)) > -1e-3).all()
    assert 11.0 < speeds(plan)[-1] < 12.0


def test_weaving_swings_about_the_route():
    config = RouteFollowerConfig(weave_m=0.8, weave_period_s=4.0)
    plan = act(config, time_us=np.array([8_000_000]), **world(STRAIGHT, 12.0))[0]
    # sin(2π t / 4): its highest at 1 s, back at 2 s, its lowest at 3 s; at 8 s the swing is on the route
    np.testing.assert_allclose(plan[[9, 19, 29, 39], 1], [0.8, 0.0, -0.8, 0.0], atol=0.05)
    # slope at the route: 0.8 · 2π/4 / 12 = 0.105, first to the left
    np.testing.assert_allclose(plan[[0, 19], 2], [0.105, -0.105], atol=0.02)
    np.testing.assert_allclose(plan[:, 0], act(RouteFollowerConfig(), **world(STRAIGHT, 12.0))[0][:, 0], atol=0.1)


def test_weaving_goes_on_where_the_swing_stands():
    config = RouteFollowerConfig(weave_m=0.8, weave_period_s=4.0)
    shifted = STRAIGHT - np.array([0.0, 0.8])
    # 1 s into the swing the ego is 0.8 m to the left of the route; half a period later 0.8 m to the right
    plan = act(config, time_us=np.array([9_000_000]), **world(shifted, 12.0))[0]
    np.testing.assert_allclose(plan[[9, 19], 1], [-0.8, -1.6], atol=0.05)


def test_at_the_desired_speed_it_keeps_it():
    plan = act(RouteFollowerConfig(), **world(STRAIGHT, 12.0))[0]
    # 12 m/s · 6.4 s = 76.8 m
    assert plan[-1, 0] == pytest.approx(76.8, abs=0.01)


def test_above_the_desired_speed_it_slows_down_comfortably():
    plan = act(RouteFollowerConfig(), **world(STRAIGHT, 20.0))[0]
    assert (np.diff(speeds(plan)) >= -0.2 - 1e-3).all()  # 2 m/s² · 0.1 s
    assert speeds(plan)[-1] < 15.0


def test_it_stops_behind_a_standing_car():
    plan = act(RouteFollowerConfig(), **world(STRAIGHT, 10.0, [(40.0, 0.3, 0.0, 0.0, 0.0)]))[0]
    # The car's rear is at 38 m, our front 4.1 m ahead of the rig: 33.9 m touches, less 2 m standstill gap = 31.9 m.
    assert 25.0 < plan[-1, 0] < 33.0
    assert speeds(plan)[-1] < 1.0


def test_a_masked_car_is_not_there():
    scene = world(STRAIGHT, 10.0, [(40.0, 0.3, 0.0, 0.0, 0.0)])
    scene["actors_mask"][:] = False
    assert act(RouteFollowerConfig(), **scene)[0, -1, 0] > 60.0


def test_a_car_beside_the_corridor_or_behind_does_not_matter():
    free = act(RouteFollowerConfig(), **world(STRAIGHT, 10.0))
    # 3.5 m to the side: 3.5 - 1 half width = 2.5 m > 1.3 m corridor
    for actor in ((30.0, 3.5, 0.0, 0.0, 0.0), (-10.0, 0.0, 0.0, 15.0, 0.0)):
        assert_same(act(RouteFollowerConfig(), **world(STRAIGHT, 10.0, [actor])), free, "the plan")


def test_a_car_across_the_corridor_matters():
    # Turned by 90° its half length, 2 m, counts: 3 - 2 = 1 m < 1.3 m.
    plan = act(RouteFollowerConfig(), **world(STRAIGHT, 10.0, [(30.0, 3.0, np.pi / 2, 0.0, 0.0)]))[0]
    assert plan[-1, 0] < 26.0


def test_the_nearest_of_two_cars_counts():
    near, far = (30.0, 0.0, 0.0, 0.0, 0.0), (60.0, 0.0, 0.0, 0.0, 0.0)
    first = act(RouteFollowerConfig(), **world(STRAIGHT, 10.0, [near, far]))
    assert_same(first, act(RouteFollowerConfig(), **world(STRAIGHT, 10.0, [far, near])), "the plan")


def test_it_follows_a_slower_car_at_its_speed():
    plan = act(RouteFollowerConfig(), **world(STRAIGHT, 8.0, [(20.0, 0.0, 0.0, 6.0, 0.0)]))[0]
    assert 4.5 < speeds(plan)[-1] < 7.5
    # Bumper to bumper at 6.4 s: 20 + 6 · 6.4 - 2 - 4.1 - x
    assert 20.0 + 6.0 * 6.4 - 2.0 - 4.1 - plan[-1, 0] > 2.0


def test_a_route_to_the_left_gives_positive_yaw_and_slows_down():
    # A quarter circle to the left, R = 15 m, after 20 m straight: v = sqrt(2.5 · 15) = 6.1 m/s
    arc = np.linspace(0.0, np.pi / 2, 12)[1:]
    left = np.concatenate([STRAIGHT[:6], np.stack([20.0 + 15.0 * np.sin(arc), 15.0 - 15.0 * np.cos(arc)], axis=-1)])
    plan = act(RouteFollowerConfig(), **world(left, 10.0))[0]
    assert plan[-1, 1] > 5.0
    assert plan[-1, 2] > 1.0
    in_bend = (plan[:, 2] > 0.3) & (plan[:, 2] < 1.2)
    lateral = speeds(plan)[1:] * np.diff(plan[:, 2]) / 0.1
    assert 4.0 < speeds(plan)[in_bend].mean() < 7.0
    assert np.abs(lateral).max() < 3.5  # the 2.5 asked for, and corners of a polyline
    mirrored = act(RouteFollowerConfig(), **world(left * [1.0, -1.0], 10.0))[0]
    np.testing.assert_allclose(mirrored, plan * [1.0, -1.0, -1.0], atol=1e-4)


@pytest.mark.parametrize("offset", [1.0, -1.0, 3.0])
def test_an_offset_is_closed_smoothly(offset):
    plan = act(RouteFollowerConfig(), **world(STRAIGHT + np.array([0.0, offset]), 10.0))[0].astype(np.float64)
    assert abs(plan[0, 1]) < 0.02
    assert plan[-1, 1] == pytest.approx(offset, abs=0.02)
    assert plan[-1, 2] == pytest.approx(0.0, abs=0.01)
    assert np.abs(np.diff(plan[:, 2])).max() < 0.03
    # Heading and direction of motion agree.
    steps = np.diff(plan[:, :2], axis=0)
    np.testing.assert_allclose(np.arctan2(steps[:, 1], steps[:, 0]), (plan[1:, 2] + plan[:-1, 2]) / 2, atol=0.02)


def test_a_heading_error_is_turned_out_without_a_jump():
    turned = STRAIGHT @ np.array([[np.cos(0.2), np.sin(0.2)], [-np.sin(0.2), np.cos(0.2)]])
    plan = act(RouteFollowerConfig(), **world(turned, 10.0))[0]
    assert abs(plan[0, 2]) < 0.05
    assert plan[-1, 2] == pytest.approx(0.2, abs=0.01)
    assert abs(plan[0, 1]) < 0.02


def test_standing_at_the_route_with_a_car_in_front_it_stays():
    plan = act(RouteFollowerConfig(), **world(STRAIGHT, 0.0, [(8.0, 0.0, 0.0, 0.0, 0.0)]))[0]
    # 8 - 2 - 4.1 = 1.9 m gap, less than the 2 m standstill gap
    assert (plan == 0.0).all()


def test_without_a_route_it_goes_straight_on():
    scene = world(np.full((20, 2), 7.0), 10.0)
    scene["route_mask"][:] = False
    plan = act(RouteFollowerConfig(), **scene)[0]
    assert (plan[:, 1:] == 0.0).all()
    assert plan[-1, 0] > 60.0


def test_masked_waypoints_go_on_straight_from_the_last_two():
    points = np.zeros((1, 5, 2), np.float32)
    points[0, :3] = [[0, 0], [0, 1], [0, 2]]
    points[0, 3:] = 99.0
    route = make_route(points, np.array([[True, True, True, False, False]]))
    np.testing.assert_allclose(route.points[0], [[0, 0], [0, 1], [0, 2], [0, 7], [0, 12]])
    np.testing.assert_allclose(route.arc[0], [0, 1, 2, 7, 12])
    projection = route.project(np.array([[[1.0, 30.0], [-1.0, -3.0], [0.5, 1.5]]]))
    np.testing.assert_allclose(projection.arc[0], [30.0, -3.0, 1.5])
    np.testing.assert_allclose(projection.offset[0], [-1.0, 1.0, -0.5])  # left of +y is -x
    np.testing.assert_allclose(route.at(np.array([[-3.0, 1.5, 30.0]]))[0], [[0, -3], [0, 1.5], [0, 30]])


# ---------------------------------------------------------------- validation


SPEC = PolicySpec(carry={"noise": (2,)})


def test_a_good_decision_passes_as_it_is():
    decision = example_decision(4)
    assert validate_decision(decision, SPEC, 4) is decision


def test_a_row_that_is_not_finite_is_marked_and_the_others_stand():
    decision = example_decision(4)
    before = example_decision(4)
    decision.plan_rig[1, 7, 2] = np.nan
    decision.carry["noise"][2, 0] = np.inf
    checked = validate_decision(decision, SPEC, 4)
    assert checked.error is not None
    assert [error is None for error in checked.error] == [True, False, False, True]
    assert checked.error[1] == "plan_rig at [7, 2] is nan: every number must be finite"
    assert "carry.noise at [0] is inf" in checked.error[2]
    assert (checked.plan_rig[1:3] == 0.0).all()
    for rows in ([0], [3]):
        good = replace(checked, error=None).take(np.array(rows))
        assert_same(good, before.take(np.array(rows)), f"rows {rows}")
    assert np.isnan(decision.plan_rig[1, 7, 2]), "the decision that was given is left alone"


def test_log_probabilities_count_only_under_their_mask():
    decision = example_decision(2)
    decision.log_prob_mask[:] = [[True, False], [True, True]]
    decision.log_prob[0, 1] = decision.log_prob[1, 1] = -np.inf
    checked = validate_decision(decision, SPEC, 2)
    assert checked.error is not None
    assert checked.error[0] is None
    assert "log_prob at [1] is -inf" in checked.error[1]


def test_an_error_of_the_policy_itself_is_kept():
    decision = replace(example_decision(2), error=np.array([None, "engine died"], object))
    decision.plan_rig[1] = np.nan
    checked = validate_decision(decision, SPEC, 2)
    assert checked.error is not None
    assert checked.error.tolist() == [None, "engine died"]
    assert np.isfinite(checked.plan_rig).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan_rig": np.zeros((3, 63, 3), np.float32)}, r"plan_rig must be \[3, 64, 3\].*got \[3, 63, 3\]"),
        ({"plan_rig": np.zeros((2, 64, 3), np.float32)}, "plan_rig must be"),
        ({"plan_rig": np.zeros((3, 64, 3), np.int64)}, "int64"),
        ({"log_prob": np.zeros(3, np.float32)}, "log_prob must be"),
        ({"log_prob_mask": np.zeros((3, 5), bool)}, "log_prob_mask must be"),
        ({"version": np.zeros(3)}, "version must be"),
        ({"control": np.zeros((3, 2), np.float32)}, "action_kinds"),
        ({"carry": {}}, "carry must be"),
        ({"carry": {"noise": np.zeros((3, 3), np.float32)}}, "carry.*noise"),
        ({"trace": {"tokens": Ragged(np.zeros(0), np.zeros(3, np.int64))}}, "trace 'tokens' must have 3 rows, got 2"),
        ({"error": np.array([None], object)}, "error must be"),
    ],
)
def test_a_wrong_shape_is_an_error_of_the_whole(change, message):
    with pytest.raises(ValueError, match=message):
        validate_decision(replace(example_decision(3), **change), SPEC, 3)


def test_control_is_checked_where_the_spec_has_it():
    spec = PolicySpec(action_kinds=frozenset({"plan", "control"}))
    decision = replace(plan_decision(np.zeros((2, 64, 3))), control=np.array([[0, 0], [np.nan, 0]], np.float32))
    checked = validate_decision(decision, spec, 2)
    assert checked.error is not None
    assert "control at [0] is nan" in checked.error[1]
    with pytest.raises(ValueError, match="control must be"):
        validate_decision(replace(decision, control=np.zeros((2, 3), np.float32)), spec, 2)


def test_no_rows_are_fine():
    decision = plan_decision(np.zeros((0, 64, 3)))
    assert validate_decision(decision, PolicySpec(), 0) is decision


@pytest.mark.parametrize("config", [ConstantSpeedConfig(), RouteFollowerConfig(), LogReplayConfig()])
def test_no_rows_give_no_plans(config):
    policy = config.build()
    decision = policy.act(example_observation(policy.spec, 0), np.zeros(0, np.uint64), Sampling())
    assert decision.plan_rig.shape == (0, 64, 3)
