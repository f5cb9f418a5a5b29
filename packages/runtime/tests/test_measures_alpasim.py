"""AlpaSim's measures and the time to collision, by hand numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from alpagym_runtime.envs.core import DrivingCore, ScaledTerm
from alpagym_runtime.errors import ConfigError
from alpagym_runtime.geometry import area_from_polygons
from alpagym_runtime.policies.config import ConstantSpeedConfig, LogReplayConfig
from alpagym_runtime.rewards.config import MeasureConfig
from alpagym_runtime.rollouts.collector import Collector
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.embedded import observe, state, world
from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
from alpagym_runtime.simulators.embedded.contacts import seconds_to_contact
from alpagym_runtime.simulators.embedded.lane_map import Lane, LaneMap
from alpagym_runtime.simulators.embedded.measures_alpasim import (
    NAMES,
    MeasuresOnDemand,
    Record,
    Sample,
    alpasim_measures,
    rounded_boxes,
)
from alpagym_runtime.simulators.embedded.scene import Actors, Scene, Vehicle
from alpagym_runtime.simulators.embedded.scene_bank import SceneBank
from alpagym_runtime.simulators.embedded.vehicle import EGO_SPEED
from alpagym_runtime.types import EpisodeRequest, Sampling

ROAD = np.array([[-20.0, -5.25], [220.0, -5.25], [220.0, 5.25], [-20.0, 5.25]])


def lanes(*specification):
    """(y, heading sign) of straight lanes 3.5 m wide from x = -20 to 220."""
    x = np.arange(-20.0, 221.0, 2.0)
    made = [Lane(i, np.column_stack([x, 0 * x + y])[::sign]) for i, (y, sign) in enumerate(specification)]
    return LaneMap(tuple(made), (ROAD,))


THREE = lanes((-3.5, 1), (0.0, 1), (3.5, 1))


def record(path, others=(), log=None, lane_map=THREE, plans=(), start=0, handover=1, period=1, plan_step_us=100_000):
    """A drive of a 4 x 2 m ego whose rig origin is its box's centre; path [M,3] by sample from the handover on.

    `others`: (centre x, y, yaw, length, width), the same at all samples, or one list a sample.
    """
    path = np.array(path, float)
    log = np.array([[10.0 * k * 0.1, 0.0, 0.0] for k in range(101)]) if log is None else np.array(log, float)
    per_sample = others if others and isinstance(others[0], list) else [list(others)] * len(path)
    steps = [handover + k * period for k in range(len(path))]
    samples = []
    for step, boxes in zip(steps, per_sample, strict=True):
        array = np.array(boxes, float).reshape(-1, 5)
        samples.append(Sample(step * 100_000, np.arange(len(array)), array[:, :3], array[:, 3:]))
    logged = ([0] if start > 0 else []) + list(range(start, handover, period))
    ego = {step * 100_000: log[step] for step in logged}
    ego |= {step * 100_000: pose for step, pose in zip(steps, path, strict=True)}
    made = [(step * 100_000, ego[step * 100_000], np.array(plan, float)) for step, plan in plans]
    return Record(
        log,
        area_from_polygons([ROAD]),
        lane_map,
        size=(4.0, 2.0),
        centre_offset_m=0.0,
        plan_step_us=plan_step_us,
        period_us=100_000 * period,
        logged=[100_000 * step for step in logged],
        samples=samples,
        ego=ego,
        plans=made,
    )


def values(name, rec):
    series = alpasim_measures(rec, [f"alpasim/{name}"])[f"alpasim/{name}"]
    return np.where(series.valid, series.value, np.nan)


def aggregate(name, rec):
    return alpasim_measures(rec, [f"alpasim/{name}"])[f"alpasim/{name}"].aggregate()


def along(*xs, y=0.0):
    return [(x, y, 0.0) for x in xs]


# ---------------------------------------------------------------- boxes and contacts


def test_boxes_are_two_percent_smaller_and_rounded():
    box = rounded_boxes(np.zeros((1, 3)), np.array([[4.0, 2.0]]))[0]
    # 3.92 x 1.96 less the corners: radius 0.5 * 1.96 / 2 = 0.49, (4 - pi) 0.49^2 = 0.2061 of 7.6832 m2.
    assert box.bounds == pytest.approx((-1.96, -0.98, 1.96, 0.98))
    assert box.area == pytest.approx(7.6832 - 0.2061, abs=2e-3)


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        ((3.9, 0.0, 0.0, 4.0, 2.0), "front"),  # it begins at 3.9 - 1.96 = 1.94 < 1.96
        ((-3.9, 0.0, 0.0, 4.0, 2.0), "rear"),
        ((0.0, 1.9, 0.0, 1.0, 2.0), "lateral"),  # beside the middle, away from both bumpers
    ],
)
def test_contact_is_classed_by_the_bumper_it_touches(other, kind):
    rec = record(along(0.0, 0.0), [other])
    found = [name for name in ("front", "rear", "lateral") if aggregate(f"collision_{name}", rec) == 1.0]
    assert found == [kind]
    assert aggregate("collision_any", rec) == 1.0
    assert aggregate("collision_at_fault", rec) == float(kind != "rear")


def test_shrunk_boxes_do_not_meet_where_exact_ones_do():
    # Exact boxes overlap by 5 cm, shrunk ones are 3.95 - 3.92 = 3 cm apart.
    rec = record(along(0.0, 0.0), [(3.95, 0.0, 0.0, 4.0, 2.0)])
    assert aggregate("collision_any", rec) == 0.0
    assert aggregate("min_distance_to_obstacle_m", rec) == pytest.approx(0.03, abs=1e-9)


def test_distance_to_the_nearest_obstacle():
    # 10 - 3.92 m, then 8 - 3.92 = 4.08 m; nobody at last: undefined there.
    rec = record(along(0.0, 2.0, 4.0), [[(10.0, 0, 0, 4, 2)], [(10.0, 0, 0, 4, 2)], []])
    np.testing.assert_allclose(values("min_distance_to_obstacle_m", rec), [6.08, 4.08, np.nan], atol=1e-9)
    assert aggregate("min_distance_to_obstacle_m", rec) == pytest.approx(4.08)
    assert math.isnan(aggregate("min_distance_to_obstacle_m", record(along(0.0, 1.0))))


# ---------------------------------------------------------------- lanes


def test_straddling_two_lanes_is_on_the_road():
    np.testing.assert_array_equal(values("offroad", record(along(0.0, 1.0, y=1.75))), [0.0, 0.0])


def test_over_the_edge_is_offroad():
    # Half the shrunk width is 0.98: at y = 4.3 it reaches 5.28, over the edge at 5.25; at 4.2 it does not (5.18).
    rec = record([(0.0, 4.2, 0.0), (1.0, 4.3, 0.0)])
    np.testing.assert_array_equal(values("offroad", rec), [0.0, 1.0])


def test_far_outside_without_touching_an_edge_is_not_offroad():
    # AlpaSim's: an ego that is wholly outside touches no edge.
    assert aggregate("offroad", record(along(0.0, 1.0, y=20.0))) == 0.0


def test_scene_without_lanes_uses_its_area_and_has_no_lane_measures():
    rec = record([(0.0, 4.2, 0.0), (1.0, 4.3, 0.0)], lane_map=None)
    np.testing.assert_array_equal(values("offroad", rec), [0.0, 1.0])
    assert np.isnan(values("wrong_lane", rec)).all()
    assert np.isnan(values("min_distance_to_lane_boundary_m", rec)).all()


def test_wrong_lane_is_against_a_lane_that_holds_the_centre():
    two = lanes((0.0, 1), (3.5, -1))
    rec = record([(0.0, 0.0, 0.0), (1.0, 3.5, 0.0), (2.0, 3.5, 2.0)], lane_map=two)
    # On the opposite lane: 180 degrees; at yaw 2.0 the lane's pi is 1.14 rad away.
    np.testing.assert_array_equal(values("wrong_lane", rec), [0.0, 1.0, 0.0])


def test_wrong_lane_does_not_wrap_the_difference():
    # Along the lane of yaw pi, but as -3.1: |3.1416 + 3.1| = 6.24 > 2.09. AlpaSim's fault, kept.
    assert aggregate("wrong_lane", record([(0, 0, -3.1), (1, 0, -3.1)], lane_map=lanes((0.0, -1)))) == 1.0


def test_gap_to_the_lanes_border():
    # One lane of 3.5 m: 1.75 - 0.98 = 0.77; at y = 0.5 0.27; at y = 1 it sticks out: 0.
    rec = record([(0.0, 0.0, 0.0), (1.0, 0.5, 0.0), (2.0, 1.0, 0.0)], lane_map=lanes((0.0, 1)))
    np.testing.assert_allclose(values("min_distance_to_lane_boundary_m", rec), [0.77, 0.27, 0.0], atol=1e-6)
    assert aggregate("min_distance_to_lane_boundary_m", rec) == 0.0


# ---------------------------------------------------------------- the recording


def test_progress_is_a_share_of_the_whole_recording():
    # The log drives 100 m in 10 s. Without warm-up AlpaSim logs index 0, then 1 (the handover) and so on:
    # the second logged value is half the third, 12 / 100 / 2.
    rec = record(along(1.0, 12.0, 30.0))
    np.testing.assert_allclose(values("progress", rec), [0.06, 0.12, 0.30], atol=1e-9)
    np.testing.assert_allclose(values("progress_rel_to_total", rec), [0.06, 0.12, 0.30], atol=1e-9)
    assert aggregate("progress", rec) == pytest.approx(0.30)


def test_made_up_values_are_gone_after_a_warm_up():
    # Logged: 0, warm-up at 2, 4, 6, 8, then the handover at 10 with its true place: 10 m of 100.
    rec = record(along(10.0, 12.0), start=2, handover=10, period=2)
    np.testing.assert_allclose(values("progress", rec), [0.10, 0.12], atol=1e-9)


def test_progress_rel_compares_with_the_recording_so_far():
    # At 0.2 s the recording has come 2 m, the ego 1.5; at 0.3 s 3 m and 3 m.
    rec = record(along(1.0, 1.5, 3.0))
    np.testing.assert_allclose(values("progress_rel", rec), [1.0, 0.75, 1.0], atol=1e-9)
    assert aggregate("progress_rel", rec) == pytest.approx(0.75)


def test_distances_to_the_recording():
    # 0.2 s: recorded at 2 m, the ego at (5, 4): 4 m from the path, 5 m from the place. The second logged value is 0.
    rec = record([(1.0, 9.0, 0.0), (5.0, 4.0, 0.0), (3.0, 0.0, 0.0)])
    np.testing.assert_allclose(values("dist_to_gt_trajectory", rec), [0.0, 4.0, 0.0], atol=1e-9)
    np.testing.assert_allclose(values("dist_to_gt_location", rec), [0.0, 5.0, 0.0], atol=1e-9)
    assert aggregate("dist_to_gt_location", rec) == pytest.approx(5.0)


def test_distance_travelled_is_along_the_own_path():
    # From the recording's first pose (0, 0): 3 m along, then 4 m across.
    rec = record([(3.0, 0.0, 0.0), (3.0, 4.0, 0.0)])
    assert aggregate("dist_traveled_m", rec) == pytest.approx(7.0)
    assert aggregate("gt_dist_traveled_m", rec) == pytest.approx(100.0)


def test_points_are_box_centres():
    rec = record(along(1.0, 2.0, 3.0))
    rec.centre_offset_m = 1.5
    rec.ego[300_000] = np.array([3.0, 0.0, math.pi / 2.0])
    # Turned to the left the centre is at (3, 1.5); the recorded centre at (4.5, 0).
    assert values("dist_to_gt_location", rec)[2] == pytest.approx(math.hypot(1.5, 1.5))


# ---------------------------------------------------------------- plans


def test_plan_that_drives_into_an_obstacle_is_an_open_loop_collision():
    slow = [((k + 1) * 0.5, 0.0, 0.0) for k in range(64)]
    fast = [((k + 1) * 4.0, 0.0, 0.0) for k in range(64)]
    # The obstacle begins at 20 - 1.96 = 18.04. From x = 2 the second plan is at 10, 14 and 18 m after 0.2, 0.3, 0.4 s,
    # its front at 19.96; only times until the last sample count, and the last sample has no plan.
    rec = record(along(1.0, 2.0, 3.0, 4.0, 5.0, 6.0), [(20.0, 0, 0, 4, 2)], plans=[(1, slow), (2, fast)])
    np.testing.assert_array_equal(values("open_loop_collision", rec), [0.0, 1.0, *[np.nan] * 4])
    assert aggregate("open_loop_collision", rec) == pytest.approx(0.5)


def test_plan_deviation_weighs_near_points_more():
    # Both straight at 1 m a point; the second is 0.3 m to the left for its first three points, then as the first.
    # The first plan ends 0.4 s after 0.1 s, so of the second's points (0.3, 0.4, 0.5, 0.6 s) three are compared.
    first = [(k + 1.0, 0.0, 0.0) for k in range(4)]
    second = [(k + 1.0, 0.3 * (k < 2), 0.0) for k in range(4)]
    rec = record(along(1.0, 2.0, 3.0), plans=[(1, first), (2, second)])
    weights = np.exp([0.0, -0.1, -0.2])
    expected = 0.3 * weights[:2].sum() / weights.sum()
    np.testing.assert_allclose(values("plan_deviation", rec), [np.nan, expected, np.nan], atol=1e-9)


def test_min_ade_is_the_mean_from_the_next_tick_on():
    # The plan leaves the recording by 0.1 m a point: from the next tick (0.1 s) to 0.5 s: mean of 0.1 … 0.5 = 0.3.
    plan = [(k + 1.0, 0.1 * (k + 1), 0.0) for k in range(64)]
    rec = record(along(1.0, 2.0), plans=[(1, plan)])
    assert aggregate("min_ade@0.5s(gt)", rec) == pytest.approx(0.3)
    # With a tick of 0.2 s it begins there: mean of 0.2 … 0.5.
    rec = record(along(1.0, 3.0), plans=[(1, plan)], period=2)
    assert aggregate("min_ade@0.5s(gt)", rec) == pytest.approx(0.35)
    # Beyond the recording it is undefined.
    rec = record(along(97.0, 98.0), plans=[(97, plan)], start=96, handover=97)
    assert math.isnan(aggregate("min_ade@0.5s(gt)", rec))


@pytest.mark.parametrize("name", ["open_loop_collision", "plan_deviation", "min_ade@0.5s(gt)"])
def test_without_a_plan_nothing_is_said_of_plans(name):
    rec = record(along(1.0, 2.0), [(20.0, 0, 0, 4, 2)])
    assert np.isnan(values(name, rec)).all()


# ---------------------------------------------------------------- the scene score


def test_scene_score():
    # 40 of 100 m: 0.4 / 0.8.
    assert aggregate("scene_score", record(along(1.0, 20.0, 40.0))) == pytest.approx(0.5)
    assert aggregate("scene_score", record(along(1.0, 45.0, 90.0))) == 1.0
    front = [(3.9, 0.0, 0.0, 4.0, 2.0)]
    assert aggregate("scene_score", record(along(0.0, 0.0, 0.0), front)) == 0.0
    assert aggregate("scene_score", record([(0, 0, 0), (1, 4.3, 0), (40, 0, 0)])) == 0.0


def test_scene_score_stops_at_the_first_incident_and_at_4_m():
    # Hit from behind at 20 m: not at fault, but what follows does not count: 0.2 / 0.8.
    behind = [[], [(16.1, 0.0, 0.0, 4.0, 2.0)], [(100.0, 0.0, 0.0, 4.0, 2.0)]]
    assert aggregate("scene_score", record(along(1.0, 20.0, 98.0), behind)) == pytest.approx(0.25)
    # 4 m off the path at 40 m (on a wide road: without lanes or edges there): 0.4 / 0.8.
    rec = record([(1.0, 0.0, 0.0), (40.0, 4.0, 0.0), (90.0, 0.0, 0.0)])
    assert aggregate("scene_score", rec) == pytest.approx(0.5)


def test_scene_score_of_a_standing_recording_is_1():
    log = [(0.01 * k, 0.0, 0.0) for k in range(101)]
    assert aggregate("scene_score", record(along(0.0, 0.0, 0.0), log=log)) == 1.0


# ---------------------------------------------------------------- in the world


def scene(actors=None, speed=10.0, count=80, name="flat"):
    log = np.array([[0.1 * speed * k, 0.0, 0.0, speed] for k in range(count)])
    route = np.column_stack([np.arange(-30.0, 221.0, 2.0), np.zeros(126)])
    road = np.array([[-40.0, -5.25], [230.0, -5.25], [230.0, 5.25], [-40.0, 5.25]])
    vehicle = Vehicle(4.0, 2.0, 2.0 - 1.0, 2.0)
    return Scene(name, "test", log, 20, route, area_from_polygons([road]), actors or Actors.none(), vehicle)


def standing_at(x, count=80):
    tracks = np.tile(np.array([x, 0.0, 0.0, 0.0]), (1, count, 1))
    return Actors(tracks, np.array([0]), np.array([count - 1]), np.array([[4.0, 2.0]]), np.array([0]))


def begin(a_scene, start=None, vehicle="kinematic", quirks=False):
    bank, slots, row = SceneBank(), state.make_slots(1, 128, 64, vehicle, quirks), np.zeros(1, np.int64)
    bank.add([a_scene], set())
    handover = np.array([a_scene.handover])
    world.begin(bank.bank, slots, row, row, handover, handover if start is None else np.array([start]))
    return bank.bank, slots, row


def test_time_to_collision_of_the_ego_and_a_standing_car():
    # At 2 s the ego's rig is at 20 m, its centre 1 m ahead of it, its front at 23; the other's rear at 60 - 2 = 58:
    # 35 m at 10 m/s.
    _, slots, _ = begin(scene(standing_at(60.0)))
    assert slots.measures[0, state.TO_COLLISION] == pytest.approx(3.5)
    assert slots.valid[0, state.TO_COLLISION]
    # 5.1 s are too many, and so is nobody.
    assert not begin(scene(standing_at(76.0)))[1].valid[0, state.TO_COLLISION]
    assert not begin(scene())[1].valid[0, state.TO_COLLISION]


def test_seconds_to_contact_of_crossing_and_passing_boxes():
    # Crossing: the other, 4 x 2 m across the way, comes from the right at 5 m/s to where the ego stands.
    args = (0.0, 0.0, 0.0, 4.0, 2.0)
    assert seconds_to_contact(*args, 0.0, -13.0, math.pi / 2, 4.0, 2.0, 0.0, 5.0) == pytest.approx(2.0)
    # Beside it, 2.1 m apart in y, it passes; at 1.9 m it meets: (10 - 4) / 3.
    assert seconds_to_contact(*args, 10.0, 2.1, 0.0, 4.0, 2.0, -3.0, 0.0) == 1e18
    assert seconds_to_contact(*args, 10.0, 1.9, 0.0, 4.0, 2.0, -3.0, 0.0) == pytest.approx(2.0)
    # Overlapping now: 0; moving apart: never.
    assert seconds_to_contact(*args, 1.0, 0.0, 0.0, 4.0, 2.0, 1.0, 0.0) == 0.0
    assert seconds_to_contact(*args, 5.0, 0.0, 0.0, 4.0, 2.0, 1.0, 0.0) == 1e18


def test_quirks_zero_the_dynamics_in_warm_up_and_at_the_handover():
    bank, slots, row = begin(scene(), start=18, quirks=True)
    out = np.zeros((1, 16, 7), np.float32), np.zeros((1, 16), bool), np.zeros((1, 7), np.float32)
    observe.observe_ego(bank, slots, row, *out, 1)
    assert not out[2].any()
    for _ in range(3):
        world.advance(bank, slots, row, 1, 0.1, 0, np.array([79]), np.zeros(1, np.int64))
        observe.observe_ego(bank, slots, row, *out, 1)
        assert bool(out[2].any()) == (slots.step[0] > 20)
    bank, slots, row = begin(scene(), start=18)
    observe.observe_ego(bank, slots, row, *out, 1)
    assert out[2][0, 0] == 10.0


def test_quirks_measure_progress_over_the_whole_recording():
    # At the handover 20 of 79 m are driven; ours begins there.
    assert begin(scene(), quirks=True)[1].measures[0, state.PROGRESS] == pytest.approx(20.0 / 79.0)
    assert begin(scene())[1].measures[0, state.PROGRESS] == 0.0


def test_quirks_send_the_route_as_alpasim_does():
    bank, slots, row = begin(scene(), quirks=True)
    route, mask = np.zeros((1, 20, 2), np.float32), np.zeros((1, 20), bool)
    observe.observe_route(bank, slots, row, route, mask, 4.0)
    # 80 / 19 = 4.2105 m apart.
    np.testing.assert_allclose(route[0, :, 0], 80.0 / 19.0 * np.arange(20), atol=1e-4)
    assert mask.all()
    # A hairpin 10 m ahead: the third segment (8.4 to 12.6 m) is 1.6 + (-2.6) m long as the crow flies.
    a_scene = scene()
    back = np.array([[30.0, 0.0], [29.9, 0.05], [-30.0, 0.05]])
    hairpin = np.concatenate([np.column_stack([np.arange(-30.0, 29.0, 2.0), np.zeros(30)]), back])
    bank, slots, row = begin(
        Scene("h", "test", a_scene.ego_log, 20, hairpin, a_scene.area, a_scene.actors, a_scene.vehicle), quirks=True
    )
    observe.observe_route(bank, slots, row, route, mask, 4.0)
    assert np.isfinite(route[0, :3]).all()
    assert np.isnan(route[0, 3:]).all()
    assert mask[0].tolist() == [True] * 3 + [False] * 17


def test_dynamics_are_those_of_the_rig():
    bank, slots, row = begin(scene(), vehicle="alpasim")
    slots.control[0] = 0.0, 0.05
    world.advance(bank, slots, row, 5, 0.1, 0, np.array([79]), np.zeros(1, np.int64))
    out = np.zeros((1, 16, 7), np.float32), np.zeros((1, 16), bool), np.zeros((1, 7), np.float32)
    observe.observe_ego(bank, slots, row, *out, 1)
    before, now = slots.trail[0, slots.step[0] - 1], slots.trail[0, slots.step[0]]
    # Velocity at the rear axle by differences of its path, in the axes half-way.
    yaw = (before[2] + now[2]) / 2.0
    dx, dy = (now[:2] - before[:2]) / 0.1
    across = dy * math.cos(yaw) - dx * math.sin(yaw)
    assert out[2][0, 0] == pytest.approx(dx * math.cos(yaw) + dy * math.sin(yaw), abs=0.01)
    assert out[2][0, 1] == pytest.approx(across, abs=0.05)
    assert out[2][0, 6] == pytest.approx((now[2] - before[2]) / 0.1, abs=0.05)
    assert out[2][0, 4] == pytest.approx(now[EGO_SPEED] * out[2][0, 6], abs=0.5)


# ---------------------------------------------------------------- asked for


def test_measures_join_when_asked_for():
    measures = MeasuresOnDemand({"progress": "tick"})
    assert "alpasim/nonsense" not in measures
    assert list(measures) == ["progress"]
    assert "alpasim/progress" in measures
    assert dict(measures) == {"progress": "tick", "alpasim/progress": "end"}


def one_episode(config, terms=(), policy=None, warmup=0):
    policy = policy or LogReplayConfig()
    spec = policy.spec()
    simulator = config.build(spec, DatasetSection(train_scenes=2, val_scenes=2, test_scenes=2), 1, ())
    scaled = {term.measure: ScaledTerm(1.0, term.build(simulator.spec)) for term in terms}
    core = DrivingCore(simulator, scaled, spec)
    [episode] = Collector(core, policy.build()).collect(
        [EpisodeRequest(simulator.spec.scenes[0], horizon_ticks=20)], Sampling("mean")
    )
    return episode


def test_all_measures_of_an_episode():
    config = EmbeddedConfig(
        measures=list(NAMES),
        end_on=[],
        warmup_ticks=2,
        vehicle="alpasim",
        planner_delay_us=200_000,
        pose_reporting_interval_us=0,
    )
    measures = one_episode(config).measures
    assert set(NAMES) <= measures.keys()
    count = len(measures["progress"].value)
    for name in NAMES:
        series = measures[name]
        assert len(series.value) == len(series.time_us) == count, name
        np.testing.assert_array_equal(series.time_us, measures["progress"].time_us)
    assert measures["alpasim/dist_to_gt_location"].aggregate() < 1.5
    assert measures["alpasim/collision_any"].aggregate() == 0.0
    assert 0.0 < measures["alpasim/scene_score"].aggregate() <= 1.0


def test_reward_term_brings_its_measure():
    term = MeasureConfig("alpasim/progress", difference=True)
    episode = one_episode(EmbeddedConfig(end_on=[]), [term], ConstantSpeedConfig())
    series = episode.measures["alpasim/progress"].value
    assert episode.rewards.sum() == pytest.approx(series[-1] - series[0])
    assert "alpasim/offroad" not in episode.measures


def test_unknown_measure_is_refused():
    with pytest.raises(ConfigError, match="no measure 'alpasim/offraod'"):
        one_episode(EmbeddedConfig(measures=["alpasim/offraod"]))
