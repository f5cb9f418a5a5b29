"""The embedded world's physics and its judgement, on scenes made by hand.

The ego's box reaches from 1 m behind to 3 m ahead of its rig origin and is 2 m wide; at the handover it stands at the
origin. Decisions are controls or plans; a control period is one grid step of 0.1 s.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from alpagym_runtime.errors import SceneError
from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.simulators.embedded.lane_map import Signals, Stop
from alpagym_runtime.testing.scenes import Draft, RoadUser, moving, simulator_of, standing, straight_drive
from alpagym_runtime.types import Decision, Ended, EpisodeRequest, TickBatch

FOREVER = 150


def drive(draft: Draft, decide, ticks: int = 60, **config) -> list[TickBatch]:
    """Rows from the handover to the end; `decide(batch)` answers a plan [T,3] or a control (acceleration, steering)."""
    simulator = simulator_of([draft.build()], **({"control_period_us": 100_000} | config))
    simulator.start(np.array([0]), [EpisodeRequest("hand-made", horizon_ticks=ticks)])
    rows = []
    while True:
        rows.append(simulator.receive(1, 1.0))
        if rows[-1].ended[0]:
            return rows
        simulator.send(np.array([0]), decision(decide(rows[-1])), np.array([False]))


def decision(answer) -> Decision:
    answer = np.asarray(answer, np.float64)
    if answer.ndim == 2:
        return plan_decision(answer[None])
    out = plan_decision(np.zeros((1, 64, 3)))
    out.control = answer[None].astype(np.float32)
    return out


def control(acceleration_mps2: float, steering_rad: float):
    return lambda batch: (acceleration_mps2, steering_rad)


def last(rows: list[TickBatch], name: str) -> float:
    return float(rows[-1].episode_measures[0][name].aggregate())


def verdict(rows: list[TickBatch]) -> tuple[float, float]:
    """(collisions, of which at fault)."""
    return last(rows, "collision_count"), last(rows, "collision_at_fault_count")


def straight_on(batch):
    return 0.0, 0.0


def turned(draft: Draft, angle: float) -> Draft:
    return draft.moved(37.0, -21.0, angle)


ANGLES = (0.0, 0.6, math.pi / 2, 2.9, -2.2)


def both_ways_round(draft: Draft, decide, mirrored_decide=None, **config) -> set[tuple[float, float]]:
    """Verdicts of the scene as it is, mirrored, and turned by some angles."""
    found = {verdict(drive(turned(draft, angle), decide, **config)) for angle in ANGLES}
    other = mirrored_decide or decide
    return found | {verdict(drive(turned(draft.mirrored(), angle), other, **config)) for angle in ANGLES}


# ---------------------------------------------------------------- whose fault


def test_a_standing_ego_that_is_hit_from_behind_is_not_at_fault():
    # its rear is at -1 m; the car's front starts at -20 + 2 = -18 m and comes at 8 m/s: 17 m take 2.2 s
    rear = RoadUser(moving(-28.0, 0.0, 0.0, 8.0, FOREVER))
    assert both_ways_round(straight_drive(0.0, users=[rear]), straight_on) == {(1.0, 0.0)}


def test_driving_into_a_standing_car_is_at_fault():
    # the front is at 3 m, the car's rear at 10 - 2 = 8 m; 5 m at 5 m/s take 1 s
    car = RoadUser(standing(10.0, 0.0, 0.0, FOREVER))
    assert both_ways_round(straight_drive(5.0, users=[car]), straight_on) == {(1.0, 1.0)}


@pytest.mark.parametrize("yaw", [0.0, 0.5, 1.5708, 3.1416, -2.0])
@pytest.mark.parametrize("lateral_m", [0.0, 1.0, 1.7, 1.95, -1.95])
def test_any_part_of_a_standing_car_is_at_fault(lateral_m, yaw):
    # A clip of a few centimetres counts as well: at 13 m/s the ego is up to 1.3 m deep when it is noticed.
    car = RoadUser(standing(20.0, lateral_m, yaw, FOREVER))
    assert verdict(drive(straight_drive(13.0, users=[car]), straight_on)) == (1.0, 1.0)


def test_a_faster_car_from_behind_is_not_the_egos_fault():
    # ego at 5, the car at 12 m/s: 7 m/s over a gap of 13 m (rear at -1, front at -16 + 2 = -14)
    car = RoadUser(moving(-16.0 - 12.0, 0.0, 0.0, 12.0, FOREVER))
    assert both_ways_round(straight_drive(5.0, users=[car]), straight_on) == {(1.0, 0.0)}


@pytest.mark.parametrize("lateral_m", [-1.9, -1.0, 0.5, 1.95])
def test_a_corner_from_behind_is_not_the_egos_fault(lateral_m):
    car = RoadUser(moving(-28.0, lateral_m, 0.0, 12.0, FOREVER))
    assert verdict(drive(straight_drive(5.0, users=[car]), straight_on)) == (1.0, 0.0)


def test_braking_hard_before_a_follower_is_not_at_fault():
    # the follower keeps 10 m/s, 6 m behind; the ego brakes to a stop (9 m/s2: 1.1 s, 5.6 m)
    car = RoadUser(moving(-9.0 - 10.0, 0.0, 0.0, 10.0, FOREVER))
    assert both_ways_round(straight_drive(10.0, users=[car]), control(-9.0, 0.0)) == {(1.0, 0.0)}


def lane_change(lateral_m: float, seconds: float = 2.0, speed_mps: float = 10.0):
    """Plans for a smooth move to y = lateral_m of the road, from wherever the ego is in its own frame."""
    t = np.arange(1, 65) * 0.1

    def decide(batch):
        now = batch.tick[0] * 0.1
        share = np.clip((np.append(now, now + t)) / seconds, 0.0, 1.0)
        y = lateral_m * share * share * (3.0 - 2.0 * share)
        x = speed_mps * np.append(0.0, t)
        slope = lateral_m * 6.0 * share * (1.0 - share) / seconds / speed_mps
        # into the present rig frame, which looks along the slope
        yaw = np.arctan(slope)
        dx, dy, c, s = x[1:], y[1:] - y[0], np.cos(yaw[0]), np.sin(yaw[0])
        return np.stack([dx * c + dy * s, dy * c - dx * s, yaw[1:] - yaw[0]], axis=1)

    return decide


@pytest.mark.parametrize("ahead_m", [-3.0, 0.0, 1.0, 3.0])
def test_moving_sideways_into_a_car_alongside_is_at_fault(ahead_m):
    # alongside at 3 m to the left, 1 m between the sides; the same speed
    car = RoadUser(moving(1.0 + ahead_m - 10.0, 3.0, 0.0, 10.0, FOREVER))
    draft = straight_drive(10.0, users=[car])
    assert both_ways_round(draft, lane_change(3.0), lane_change(-3.0)) == {(1.0, 1.0)}


@pytest.mark.parametrize("ahead_m", [-3.0, 0.0, 1.0, 3.5])
def test_a_car_that_moves_sideways_into_the_ego_is_to_blame(ahead_m):
    # from 3 m to the left it slides over at 1 m/s while both go 10 m/s
    track = moving(1.0 + ahead_m - 10.0, 3.0, 0.0, 10.0, FOREVER)
    sideways = np.maximum(np.arange(FOREVER) - 10, 0) * 0.1
    track[:, 1] -= sideways
    track[:, 2] = np.where(sideways > 0, -0.1, 0.0)
    assert both_ways_round(straight_drive(10.0, users=[RoadUser(track)]), straight_on) == {(1.0, 0.0)}


def test_two_that_come_together_blame_who_came_faster():
    track = moving(1.0 - 10.0, 4.0, 0.0, 10.0, FOREVER)
    track[:, 1] -= np.maximum(np.arange(FOREVER) - 10, 0) * 0.02  # 0.2 m/s against the ego's 4 / 2 s
    assert verdict(drive(straight_drive(10.0, users=[RoadUser(track)]), lane_change(4.0))) == (1.0, 1.0)


def test_turning_into_a_car_beside_the_ego_is_at_fault():
    car = RoadUser(moving(1.0 - 5.0, 2.5, 0.0, 5.0, FOREVER))
    draft = straight_drive(5.0, users=[car])
    assert both_ways_round(draft, control(0.0, 0.15), control(0.0, -0.15)) == {(1.0, 1.0)}


def test_head_on_is_at_fault_while_moving_and_not_while_standing():
    oncoming = RoadUser(moving(40.0, 0.3, math.pi, 8.0, FOREVER))
    assert both_ways_round(straight_drive(8.0, users=[oncoming]), straight_on) == {(1.0, 1.0)}
    assert both_ways_round(straight_drive(0.0, users=[oncoming]), straight_on) == {(1.0, 0.0)}


def test_a_car_that_reverses_into_a_standing_ego_is_to_blame():
    # it looks along x and goes backwards: its rear meets the ego's front
    reversing = RoadUser(moving(20.0, 0.0, 0.0, -3.0, FOREVER))
    assert both_ways_round(straight_drive(0.0, users=[reversing]), straight_on) == {(1.0, 0.0)}


def test_a_car_that_drives_into_the_egos_side_is_to_blame():
    # It crosses from the left at 10 m/s and meets the ego's flank: at 1.5 s the ego's box is 6.5 to 10.5 m, y to 1 m;
    # the car's front, 2 m before its centre, comes from y = 16 + 1 and passes 1 m then.
    crossing = RoadUser(moving(8.0, 19.0 - 1.0 + 10.0, -math.pi / 2, 10.0, FOREVER))
    assert both_ways_round(straight_drive(5.0, users=[crossing]), straight_on) == {(1.0, 0.0)}


def test_driving_into_the_side_of_a_crossing_car_is_at_fault():
    # Its near side is at x = 14: the ego's front, at 3 m, is there after 11 / 8 = 1.375 s, that is 2.375 s from the
    # track's start, when the car, at 2 m/s, has come down from y = 4.75 to 0.
    crossing = RoadUser(moving(15.0, 4.75, -math.pi / 2, 2.0, FOREVER))
    assert both_ways_round(straight_drive(8.0, users=[crossing]), straight_on) == {(1.0, 1.0)}


def test_what_appears_on_top_of_the_ego_is_a_contact_and_nobodys_fault():
    ghost = RoadUser(standing(10.0, 0.0, 0.0, FOREVER), first=20)  # the ego is there at 1 s
    assert verdict(drive(straight_drive(10.0, users=[ghost]), straight_on)) == (1.0, 0.0)


def test_a_curve_alone_makes_nobody_move_sideways():
    # Both follow circles about (0, 40): the ego of 40 m, the car of 36.6 m, which drifts out at 0.5 m/s into the ego.
    steps = np.arange(100)
    angle = (steps - 10) * 0.1 * 10.0 / 40.0
    log = np.stack([40.0 * np.sin(angle), 40.0 - 40.0 * np.cos(angle), angle, np.full(100, 10.0)], axis=1)
    around = np.arange(-1.2, 3.5, 0.05)
    route = np.stack([40.0 * np.sin(around), 40.0 - 40.0 * np.cos(around)], axis=1)
    radius = 36.6 + 0.05 * np.maximum(steps - 15, 0)
    car = np.stack(
        [radius * np.sin(angle + 0.03), 40.0 - radius * np.cos(angle + 0.03), angle + 0.03, 0.0 * steps], axis=1
    )
    road = np.array([[-90.0, -30.0], [90.0, -30.0], [90.0, 100.0], [-90.0, 100.0]])
    draft = Draft(log, route, [road], [RoadUser(car)], 10)
    steer = math.atan(2.0 / 40.0)  # wheelbase 2 m
    assert both_ways_round(draft, control(0.0, steer), control(0.0, -steer)) == {(1.0, 0.0)}


def test_a_contact_that_lasts_counts_once_and_each_car_for_itself():
    first, second = RoadUser(standing(10.0, 0.5, 0.0, FOREVER)), RoadUser(standing(16.0, -0.5, 0.0, FOREVER))
    # 5 m/s: the first is touched at 1.0 s, the second, with its rear at 14 m, at 2.2 s; 40 ticks are 4 s
    rows = drive(straight_drive(5.0, users=[first, second]), straight_on, ticks=40)
    assert verdict(rows) == (1.0, 1.0)
    assert rows[-1].ended[0] == Ended.COLLISION
    # beside each other at the same time: two objects in one tick
    pair = [RoadUser(standing(10.0, side, 0.0, FOREVER)) for side in (-1.2, 1.2)]
    assert verdict(drive(straight_drive(5.0, users=pair), straight_on)) == (2.0, 2.0)


def test_touching_is_not_a_collision():
    # the sides are at y = 1 and the car's at 2 - 1 = 1
    beside = RoadUser(standing(10.0, 2.0, 0.0, FOREVER))
    assert verdict(drive(straight_drive(5.0, users=[beside]), straight_on)) == (0.0, 0.0)


# ---------------------------------------------------------------- controller and vehicle


def states(rows: list[TickBatch]) -> np.ndarray:
    """[T+1,3] x, y, yaw of the ego in the rig frame of the handover, from consecutive histories."""
    poses = [np.zeros(3)]
    for row in rows[1:]:
        x, y, _, w, _, _, z = row.observation["ego_history_rig"][0, -2].astype(np.float64)
        # The last pose seen from here: here = last ∘ inverse(seen).
        back = 2.0 * math.atan2(z, w)
        c, s = math.cos(-back), math.sin(-back)
        yaw = poses[-1][2]
        dx, dy = -(c * x - s * y), -(s * x + c * y)
        poses.append(
            poses[-1] + [dx * math.cos(yaw) - dy * math.sin(yaw), dx * math.sin(yaw) + dy * math.cos(yaw), -back]
        )
    return np.array(poses)


ARC_RADIUS_M, ARC_SPEED_MPS = 30.0, 8.0


def arc_plan(batch):
    angle = ARC_SPEED_MPS * np.arange(1, 65) * 0.1 / ARC_RADIUS_M
    return np.stack([ARC_RADIUS_M * np.sin(angle), ARC_RADIUS_M * (1.0 - np.cos(angle)), angle], axis=1)


@pytest.mark.parametrize("decide", [control(0.0, 0.1), arc_plan], ids=["control", "plan"])
@pytest.mark.parametrize("angle", [0.0, 2.5])
def test_a_left_turn_makes_yaw_and_y_grow_in_the_rig_frame(decide, angle):
    road = straight_drive(8.0, half_width_m=60.0)
    found = states(drive(turned(road, angle), decide, ticks=20))
    assert (np.diff(found[:, 2]) > 0.0).all()
    assert (np.diff(found[:, 1]) > 0.0).all()
    # and the world turns the same way: yaw rate and lateral acceleration are positive
    rows = drive(turned(road, angle), decide, ticks=3)
    assert rows[-1].observation["ego_dynamics_rig"][0, 6] > 0.0
    assert last(rows, "lateral_acceleration_mps2") > 0.0


def test_steering_gives_the_bicycles_radius():
    # tan(steering) = wheelbase / radius: 2 / 40; after 10 m the heading is 10 / 40 = 0.25 rad, the place on the circle
    found = states(drive(straight_drive(10.0, half_width_m=60.0), control(0.0, math.atan(2.0 / 40.0)), ticks=10))
    np.testing.assert_allclose(found[-1], [40.0 * math.sin(0.25), 40.0 * (1.0 - math.cos(0.25)), 0.25], atol=2e-3)


def test_acceleration_adds_speed():
    # v = 10 + 2 · 1 = 12 m/s, s = 10 + 2/2 = 11 m
    rows = drive(straight_drive(10.0), control(2.0, 0.0), ticks=10)
    assert rows[-1].observation["ego_dynamics_rig"][0, 0] == pytest.approx(12.0, abs=1e-5)
    assert states(rows)[-1, 0] == pytest.approx(11.0, abs=1e-4)


@pytest.mark.parametrize("angle", [0.0, 1.9])
def test_an_arc_is_followed_within_five_centimetres(angle):
    road = turned(straight_drive(8.0, half_width_m=60.0), angle)
    # 2 s of one plan, renewed in the present frame each tick: the distance to the circle stays small
    found = states(drive(road, arc_plan, ticks=20))
    radius = np.hypot(found[:, 0], found[:, 1] - ARC_RADIUS_M)
    # The curvature steps from 0 to 1/30 at the first tick, so nothing else is to be made up.
    assert np.abs(radius - ARC_RADIUS_M).max() < 0.05


@pytest.mark.parametrize("period_us", [100_000, 200_000, 500_000])
def test_a_recorded_lane_change_is_followed_within_a_decimetre(period_us):
    draft = straight_drive(10.0, half_width_m=20.0)
    # 3 m to the left between 0.5 and 3 s after the handover
    share = np.clip((np.arange(100) - 15) / 25.0, 0.0, 1.0)
    log = draft.log.copy()
    log[:, 1] = 3.0 * share * share * (3.0 - 2.0 * share)
    log[:, 2] = np.arctan(3.0 * 6.0 * share * (1.0 - share) / 2.5 / 10.0)
    simulator = simulator_of(
        [replace(draft, log=log).build()], labels=("recorded_plan_rig",), control_period_us=period_us
    )
    simulator.start(np.array([0]), [EpisodeRequest("hand-made", horizon_ticks=4_000_000 // period_us)])
    rows = [simulator.receive(1, 1.0)]
    while not rows[-1].ended[0]:
        simulator.send(np.array([0]), plan_decision(rows[-1].labels["recorded_plan_rig"]), np.array([False]))
        rows.append(simulator.receive(1, 1.0))
    assert rows[-1].episode_measures[0]["distance_to_gt_m"].value.max() < 0.1
    assert last(rows, "route_deviation_m") == pytest.approx(3.0, abs=0.1)


@pytest.mark.parametrize("plan", ["behind", "backing", "still"])
def test_it_never_reverses(plan):
    t = np.arange(1, 65)[:, None] * 0.1
    plans = {
        "behind": np.repeat([[-20.0, 0.0, 0.0]], 64, axis=0),
        "backing": np.concatenate([-5.0 * t, 0.0 * t, 0.0 * t], axis=1),
        "still": np.zeros((64, 3)),
    }
    rows = drive(straight_drive(6.0), lambda batch: plans[plan], ticks=40)
    speeds = np.array([row.observation["ego_dynamics_rig"][0, 0] for row in rows])
    assert (speeds >= 0.0).all()
    assert speeds[-1] < 0.05
    assert (np.diff(states(rows)[:, 0]) >= -1e-6).all()


@pytest.mark.parametrize("decide", [control(1e30, 0.0), control(0.0, 1e30), control(-1e30, -2.0), control(0.0, 1.6)])
def test_controls_beyond_the_vehicle_are_limited(decide):
    rows = drive(straight_drive(8.0, half_width_m=60.0), decide, ticks=10)
    acceleration, lateral = (
        rows[-1].episode_measures[0][f"{name}acceleration_mps2"].value for name in ("", "lateral_")
    )
    assert -9.0 - 1e-6 <= acceleration.min() <= acceleration.max() <= 6.0 + 1e-6
    assert np.abs(lateral).max() <= 9.0 * (8.6 / 8.0) ** 2  # the limit holds for the speed at a step's start


def test_steering_further_than_the_lock_does_not_turn_the_other_way():
    # tan(2 rad) is negative
    rows = drive(straight_drive(3.0, half_width_m=60.0), control(0.0, 2.0), ticks=5)
    assert rows[-1].observation["ego_dynamics_rig"][0, 6] > 0.0


@pytest.mark.parametrize("size", [1e3, 1e6, 1e20, 3e38])
def test_any_finite_plan_leaves_the_world_finite(size):
    rng = np.random.default_rng(3)
    plans = [rng.uniform(-1.0, 1.0, (64, 3)) * size for _ in range(8)] + [np.full((64, 3), size)]
    rows = drive(straight_drive(8.0, half_width_m=60.0), lambda batch: plans[batch.tick[0] % len(plans)], ticks=30)
    for row in rows:
        assert all(np.isfinite(array).all() for array in row.observation.values())
        assert all(np.isfinite(value).all() for value in row.measures.values.values())


# ---------------------------------------------------------------- the expert


def expert(batch):
    return batch.labels["target_plan_rig"][0]


def expert_drives(draft: Draft, ticks: int = 70) -> list[TickBatch]:
    simulator = simulator_of([draft.build()], labels=("target_plan_rig",), control_period_us=100_000)
    simulator.start(np.array([0]), [EpisodeRequest("hand-made", horizon_ticks=ticks)])
    rows = [simulator.receive(1, 1.0)]
    while not rows[-1].ended[0]:
        simulator.send(np.array([0]), plan_decision(expert(rows[-1])[None]), np.array([False]))
        rows.append(simulator.receive(1, 1.0))
    return rows


@pytest.mark.parametrize("lateral_m", [-1.5, 0.0, 1.0])
def test_the_expert_avoids_a_standing_car(lateral_m):
    # 25 m ahead at 10 m/s: 4 m/s2 stop within 12.5 m
    draft = straight_drive(10.0, users=[RoadUser(standing(28.0, lateral_m, 0.0, FOREVER))], half_width_m=4.0)
    rows = expert_drives(draft)
    assert verdict(rows) == (0.0, 0.0)
    assert last(rows, "offroad_count") == 0.0


def test_the_expert_does_not_brake_for_what_is_gone():
    # it stands in the way until the handover and is gone from then on
    gone = RoadUser(standing(28.0, 0.0, 0.0, FOREVER), last=9)
    free = expert_drives(straight_drive(10.0), ticks=20)
    rows = expert_drives(straight_drive(10.0, users=[gone]), ticks=20)
    for a, b in zip(free, rows, strict=True):
        np.testing.assert_array_equal(expert(a), expert(b))


# ---------------------------------------------------------------- scenes that cannot be


@pytest.mark.parametrize(("first", "last_"), [(5, 200), (-1, 5), (9, 8)])
def test_an_actor_outside_its_track_is_refused(first, last_):
    user = RoadUser(standing(9.0, 0.0, 0.0, 20), first=first, last=last_)
    with pytest.raises(SceneError, match="actor 0"):
        straight_drive(users=[user]).build()


def test_an_actor_that_is_not_finite_where_it_exists_is_refused():
    track = standing(9.0, 0.0, 0.0, 20)
    track[7, 1] = np.nan
    with pytest.raises(SceneError, match="actor 0"):
        straight_drive(users=[RoadUser(track)]).build()
    straight_drive(users=[RoadUser(track, first=8)]).build()


# ---------------------------------------------------------------- red lights


@pytest.mark.parametrize(
    ("green_s", "aside_m", "count"),
    [((50.0, 60.0), 0.0, 1.0), ((0.0, 5.0), 0.0, 0.0), ((0.0, 2.5), 0.0, 0.0), ((50.0, 60.0), 6.0, 0.0)],
    ids=["red", "green", "yellow", "away from the route"],
)
def test_a_stop_line_passed_at_red_counts_once(green_s, aside_m, count):
    # The front is 3 m ahead of the rig, which makes 1 m a step: from x = 20 m after 17 steps to 21 m after 18, at
    # (10 + 18) · 0.1 s = 2.8 s; yellow lasts 3 s. The route starts at x = -40 m, so x = 20.5 m is its arc 60.5 m.
    scene = straight_drive(10.0).build()
    scene = replace(
        scene,
        route=scene.route + np.array([0.0, aside_m]),
        signals=Signals(100.0, np.array([green_s]), 3.0, np.zeros((0, 4))),
        stops=(Stop(60.5, 0), Stop(61.5, -1)),
    )
    simulator = simulator_of([scene], control_period_us=100_000, end_on=[])
    simulator.start(np.array([0]), [EpisodeRequest("hand-made", horizon_ticks=30)])
    for _ in range(30):
        simulator.receive(1, 1.0)
        simulator.send(np.array([0]), decision((0.0, 0.0)), np.array([False]))
    passed = simulator.receive(1, 1.0).episode_measures[0]["red_light_count"]
    assert passed.valid.all()
    assert passed.value[17] == 0.0
    assert passed.value[18:].tolist() == [count] * 13
