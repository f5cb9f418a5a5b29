"""Procedural maps and situations: what every seed must give, and the geometry below them."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import subprocess
import sys
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st

from alpagym_runtime.errors import SceneError
from alpagym_runtime.geometry import angle_difference, boxes_overlap
from alpagym_runtime.simulators.embedded.lane_map import GREEN, RED, LaneMap
from alpagym_runtime.simulators.embedded.map_picture import ROAD, box_corners, draw_map
from alpagym_runtime.simulators.embedded.maps import KINDS, Phase, RoadPlan, fixed_time, make_map
from alpagym_runtime.simulators.embedded.maps.lines import (
    arc_lengths,
    at_arc,
    clothoids,
    connect,
    minimum_radius,
    offset,
    quintic,
)
from alpagym_runtime.simulators.embedded.maps.paths import path_over, start_box
from alpagym_runtime.simulators.embedded.placement import PEDESTRIAN
from alpagym_runtime.simulators.embedded.scene import STEP_US
from alpagym_runtime.simulators.embedded.situations import (
    SUITES,
    Situation,
    kind_of,
    make_situation,
    scene_name,
    suite_and_number,
)

SEEDS = (0, 1, 2)

every_map = pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind in KINDS for seed in SEEDS])
bounded = settings(max_examples=20, deadline=None, derandomize=True)


@lru_cache
def map_of(kind: str, seed: int) -> RoadPlan:
    return make_map(kind, seed)


@lru_cache
def situation_of(suite: str, number: int) -> Situation:
    return make_situation(scene_name(suite, number))


def surface_of(lane_map: LaneMap) -> shapely.Geometry:
    return shapely.union_all([shapely.Polygon(polygon) for polygon in lane_map.surface])


def digest(value: Any) -> str:
    """SHA-256 of everything in nested dataclasses, tuples and arrays."""
    total = hashlib.sha256()

    def add(part: Any) -> None:
        if dataclasses.is_dataclass(part):
            for field in dataclasses.fields(part):
                add(getattr(part, field.name))
        elif isinstance(part, tuple):
            for item in part:
                add(item)
        elif isinstance(part, np.ndarray):
            total.update(str((part.shape, part.dtype)).encode() + part.tobytes())
        else:
            total.update(repr(part).encode())

    add(value)
    return total.hexdigest()


# ---------------------------------------------------------------- maps


@every_map
def test_lanes_do_not_leave_the_surface(kind, seed):
    plan = map_of(kind, seed)
    surface = surface_of(plan.lane_map).buffer(0.02)
    for lane in plan.lane_map.lanes:
        if lane.kind == "walkway":
            continue
        line = np.column_stack([lane.centre, np.unwrap(np.arctan2(*np.gradient(lane.centre, axis=0).T[::-1]))])
        for left in (0.0, lane.width_m / 2.0, -lane.width_m / 2.0):
            inside = shapely.contains_xy(surface, *offset(line, left)[:, :2].T)
            assert inside.all(), (lane.lane_id, left, np.flatnonzero(~inside))


@every_map
def test_successors_meet(kind, seed):
    lanes = map_of(kind, seed).lane_map.lanes
    for lane in lanes:
        assert lane.lane_id == lanes.index(lane)
        for after in (lanes[successor] for successor in lane.successors):
            assert np.hypot(*(lane.centre[-1] - after.centre[0])) < 0.1
            ends = [np.arctan2(*(p[1] - p[0])[::-1]) for p in (lane.centre[-2:], after.centre[:2])]
            # A sample's chord turns by half the bend of one step; ring lanes bend by 4 degrees a step.
            assert abs(angle_difference(ends[0], ends[1])) < math.radians(5.0)


@every_map
def test_points_are_one_to_two_metres_apart(kind, seed):
    for lane in map_of(kind, seed).lane_map.lanes:
        steps = np.diff(arc_lengths(lane.centre))
        assert steps.min() > 0.3
        assert steps.max() < 2.4


@every_map
def test_a_car_can_drive_every_lane(kind, seed):
    for lane in map_of(kind, seed).lane_map.lanes:
        assert lane.kind == "walkway" or minimum_radius(lane.centre) > 6.0, lane


@every_map
def test_neighbours_lie_beside_each_other(kind, seed):
    lanes = map_of(kind, seed).lane_map.lanes
    for lane in lanes:
        for side, neighbour in ((1.0, lane.left), (-1.0, lane.right)):
            if neighbour < 0:
                continue
            other = lanes[neighbour]
            k = min(len(lane.centre), len(other.centre)) // 2
            x, y, yaw = at_arc(lane.centre, arc_lengths(lane.centre)[k])
            expected = [x - side * lane.width_m * math.sin(yaw), y + side * lane.width_m * math.cos(yaw)]
            assert shapely.LineString(other.centre).distance(shapely.Point(expected)) < 0.05


@every_map
def test_routes_are_chains_without_kinks(kind, seed):
    plan = map_of(kind, seed)
    assert plan.routes
    for route in plan.routes:
        for a, b in pairwise(route.lanes):
            assert b in plan.lane_map.lanes[a].successors
        path = path_over(plan.lane_map, route.lanes)
        assert minimum_radius(path.points) > 6.0
        assert 30.0 < route.focus_m < path.arcs[-1] - 200.0


@every_map
def test_who_yields_meets_who_goes_first_and_not_the_other_way(kind, seed):
    lanes = map_of(kind, seed).lane_map.lanes
    for lane in lanes:
        for other in lane.yields_to:
            assert lane.lane_id not in lanes[other].yields_to
            gap = shapely.LineString(lane.centre).distance(shapely.LineString(lanes[other].centre))
            assert gap < 0.5 or lane.kind == "driving"


@pytest.mark.parametrize("seed", range(6))
def test_traffic_of_a_crossing_without_signals_always_knows_who_goes_first(seed):
    plan = make_map("priority_crossing", seed)
    starts = {turn: lane.lane_id for lane in plan.lane_map.lanes for turn in lane.successors}
    turns = [lane for lane in plan.lane_map.lanes if lane.kind == "turn"]
    for a, b in combinations(turns, 2):
        crosses = shapely.LineString(a.centre).intersects(shapely.LineString(b.centre))
        same_start = np.hypot(*(a.centre[0] - b.centre[0])) < 8.0 and starts[a.lane_id] == starts[b.lane_id]
        if crosses and not same_start:
            beside = plan.lane_map.lanes[starts[a.lane_id]]
            if starts[b.lane_id] in (beside.left, beside.right):
                continue
            assert b.lane_id in a.yields_to or a.lane_id in b.yields_to


@every_map
def test_conflicting_signals_are_never_green_together(kind, seed):
    plan = map_of(kind, seed)
    lanes, signals = plan.lane_map.lanes, plan.lane_map.signals
    assert (signals.cycle_s > 0.0) == kind.startswith("crossing")
    if not signals.cycle_s:
        return
    assert (signals.green_s[:, 0] < signals.green_s[:, 1]).all()
    assert (signals.green_s <= signals.cycle_s).all()
    approaches = [lane for lane in lanes if lane.signal_group >= 0]
    conflicts = set()
    for a, b in combinations(approaches, 2):
        for turn, other in ((lanes[i], lanes[j]) for i in a.successors for j in b.successors):
            ordered = other.lane_id in turn.yields_to or turn.lane_id in other.yields_to
            side_by_side = b.lane_id in (a.left, a.right)
            crosses = shapely.LineString(turn.centre).intersects(shapely.LineString(other.centre))
            if crosses and not ordered and not side_by_side and a.signal_group != b.signal_group:
                conflicts.add((a.signal_group, b.signal_group))
    # People and the traffic that starts over their crossing.
    for approach in approaches:
        for crossing in plan.crossings:
            if shapely.LineString(crossing.line).distance(shapely.Point(approach.centre[-1])) < 4.0:
                conflicts.add((approach.signal_group, crossing.signal_group))
    assert (0, 1) in conflicts or (1, 0) in conflicts
    for time_us in range(0, round(signals.cycle_s * 1e6), 500_000):
        for a, b in conflicts:
            assert RED in (signals.state(a, time_us), signals.state(b, time_us)), (a, b, time_us)


@every_map
def test_nothing_stands_on_the_road(kind, seed):
    lane_map = map_of(kind, seed).lane_map
    surface = surface_of(lane_map)
    assert lane_map.buildings
    for building in lane_map.buildings:
        assert not shapely.Polygon(building.footprint).intersects(surface)
    assert shapely.distance(surface, shapely.points(lane_map.trees[:, :2])).min() > 0.5
    walks = shapely.union_all([shapely.Polygon(polygon) for polygon in lane_map.sidewalks])
    assert walks.intersection(surface).area < 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_area_is_the_surface(kind):
    lane_map = map_of(kind, 0).lane_map
    area = sum(shapely.Polygon(ring).area * (1 if k == 0 else -1) for k, ring in enumerate(lane_map.area().rings()))
    assert area == pytest.approx(surface_of(lane_map).area, rel=0.002)


def test_a_roundabout_has_an_island():
    lane_map = map_of("roundabout", 0).lane_map
    assert not surface_of(lane_map).contains(shapely.Point(0.0, 0.0))
    assert len(lane_map.area().rings()) == 2


def test_fixed_time_signals_by_hand():
    # Phases of 10 and 6 s, 3 s yellow and 1.5 s red between. Phase 0 has 4 s left:
    # green 0 to 4, then the second from 4 + 4.5 = 8.5 to 14.5; cycle 14.5 + 4.5 = 19.
    phases = (Phase((0,), (2,), 10.0), Phase((1,), (), 6.0))
    signals = fixed_time(phases, np.zeros((0, 4)), 0, 4.0)
    np.testing.assert_allclose(signals.green_s, [[0.0, 4.0], [8.5, 14.5], [0.0, 0.4]])
    assert signals.cycle_s == 19.0
    # Phase 0 is over: the second begins after the red of 1.5 s.
    signals = fixed_time(phases, np.zeros((0, 4)), 0, 0.0)
    np.testing.assert_allclose(signals.green_s[1], [1.5, 7.5])


def test_an_unknown_kind_is_named():
    with pytest.raises(ValueError, match="no kind of map 'moon'"):
        make_map("moon", 0)


@given(st.sampled_from(KINDS), st.integers(0, 2**64 - 1))
@bounded
def test_any_seed_gives_a_drivable_map(kind, seed):
    plan = make_map(kind, seed)
    surface = surface_of(plan.lane_map).buffer(0.01)
    for lane in plan.lane_map.lanes:
        if lane.kind != "walkway":
            assert shapely.contains_xy(surface, *lane.centre.T).all()
            assert minimum_radius(lane.centre) > 6.0


# ---------------------------------------------------------------- lines

pose = st.tuples(st.floats(-40.0, 40.0), st.floats(-40.0, 40.0), st.floats(-3.0, 3.0))


@given(pose, pose)
@bounded
def test_connections_start_and_end_at_their_poses(start, end):
    a, b = np.array(start), np.array(end)
    if np.hypot(*(b[:2] - a[:2])) < 3.0:
        return
    for line in (connect(a, b), quintic(a, b)):
        np.testing.assert_allclose(line[0], a, atol=1e-9)
        np.testing.assert_allclose(line[-1, :2], b[:2], atol=1e-6)
        assert abs(angle_difference(line[-1, 2], b[2])) < 1e-6


@given(pose, pose)
@bounded
def test_a_mirrored_connection_is_the_connection_of_mirrored_poses(start, end):
    a, b = np.array(start), np.array(end)
    if np.hypot(*(b[:2] - a[:2])) < 3.0:
        return
    mirror = np.array([1.0, -1.0, -1.0])
    np.testing.assert_allclose(connect(a * mirror, b * mirror)[:, :2], (connect(a, b) * mirror)[:, :2], atol=1e-6)


def test_a_right_angle_turns_on_clothoids():
    # From (0, 0) east to (10, 10) north: the curvature's ramps take 0.3 of the length each, so its peak is
    # 90 degrees / (0.7 L); L is a little more than a circle's 10 pi / 2 = 15.7 m.
    line = connect([0.0, 0.0, 0.0], [10.0, 10.0, math.pi / 2.0])
    length = arc_lengths(line)[-1]
    assert minimum_radius(line) == pytest.approx(0.7 * length / (math.pi / 2.0), rel=0.02)
    assert 15.7 < length < 17.0


def test_a_clothoid_turns_by_the_integral_of_its_curvature():
    # Ramps of 20 m and an arc of 30 m at 1/50: (10 + 30 + 10) / 50 = 1 rad.
    line = clothoids([0.0, 0.0, 0.0], [0.0, 20.0, 50.0, 70.0], [0.0, 0.02, 0.02, 0.0])
    assert line[-1, 2] == pytest.approx(1.0, abs=1e-9)


# ---------------------------------------------------------------- situations

numbers = pytest.mark.parametrize("number", range(2 * len(KINDS)))


@numbers
@pytest.mark.parametrize("suite", ["train", "hard", "bench"])
def test_nobody_overlaps_at_the_start(suite, number):
    situation = situation_of(suite, number)
    boxes = np.array([start_box(agent) for agent in situation.agents] + [situation.ego_box])
    first, second = np.triu_indices(len(boxes), 1)
    hit = boxes_overlap(boxes[first], boxes[second])
    assert not hit.any(), list(zip(first[hit], second[hit], strict=True))


@numbers
@pytest.mark.parametrize("suite", ["train", "hard", "bench"])
def test_vehicles_start_on_the_road_and_people_beside_or_on_a_crossing(suite, number):
    situation = situation_of(suite, number)
    area = situation.lane_map.area()
    boxes = np.array([start_box(agent) for agent in situation.agents if agent.kind != PEDESTRIAN] + [situation.ego_box])
    outside = ~area.contains(boxes)
    assert not outside.any(), boxes[outside]


@numbers
@pytest.mark.parametrize("suite", ["val", "hard"])
def test_the_route_leads_from_behind_the_ego_to_far_beyond(suite, number):
    situation = situation_of(suite, number)
    route, approach = situation.route, situation.approach
    line = shapely.LineString(route)
    assert approach.shape == (17, 4)
    assert situation.handover == 16
    start, handover = (line.project(shapely.Point(approach[k, :2])) for k in (0, -1))
    assert start >= 30.0
    assert line.length - handover >= 110.0 + 8.0 * approach[-1, 3]
    assert handover - start == pytest.approx(1.6 * approach[0, 3], abs=0.2)
    assert max(line.distance(shapely.Point(p)) for p in approach[:, :2]) < 0.55
    assert minimum_radius(route) > 6.0
    steps = np.diff(arc_lengths(route))
    assert steps.min() > 0.3
    # The approach is a drive: it moves the way that it looks.
    moved = np.diff(approach[:, :2], axis=0)
    heading = np.arctan2(moved[:, 1], moved[:, 0])
    assert np.abs(angle_difference(heading, approach[:-1, 2])).max() < 0.1
    np.testing.assert_allclose(np.hypot(*moved.T) / (STEP_US * 1e-6), approach[0, 3], rtol=0.05)


@numbers
def test_agents_are_well_formed(number):
    situation = situation_of("train", number)
    groups = len(situation.lane_map.signals.green_s)
    for agent in situation.agents:
        steps = np.diff(arc_lengths(agent.path))
        assert steps.min() > 0.01
        assert steps.max() < 2.4
        assert 0.0 <= agent.start_arc_m <= steps.sum()
        assert 0.0 <= agent.start_speed_mps <= max(agent.desired_speed_mps, 25.0)
        arcs = [stop.arc_m for stop in agent.stops]
        assert arcs == sorted(arcs)
        assert all(stop.signal_group < groups for stop in agent.stops)
    for stop in situation.route_stops:
        assert stop.signal_group >= 0 or not math.isnan(stop.conflict[0])


@numbers
def test_bench_scenes_have_32_moving_road_users(number):
    assert sum(agent.desired_speed_mps > 0.0 for agent in situation_of("bench", number).agents) == 32


def test_traffic_has_a_stream_of_its_own():
    for number in range(len(KINDS)):
        name = scene_name("train", number)
        one, other = make_situation(name), make_situation(name, traffic_seed=7)
        assert digest(one.agents) != digest(other.agents)
        # When the signals change belongs to the situation; everything else belongs to the map.
        maps = [dataclasses.replace(s.lane_map, signals=map_of("curve", 0).lane_map.signals) for s in (one, other)]
        assert digest(maps[0]) == digest(maps[1])


def test_dressing_does_not_touch_the_roads():
    from alpagym_runtime.random import generator
    from alpagym_runtime.simulators.embedded.maps import junctions

    one, other = (junctions.crossing4(generator(5, 1), generator(5, stream)) for stream in (2, 9))
    assert digest(one.lane_map.lanes) == digest(other.lane_map.lanes)
    assert digest(one.lane_map.surface) == digest(other.lane_map.surface)
    assert digest(one.lane_map.trees) != digest(other.lane_map.trees)


def test_attempts_and_suites_differ():
    names = [scene_name(suite, 0) for suite in SUITES]
    assert len({digest(make_situation(name).lane_map) for name in names}) == len(names)
    assert digest(make_situation(names[0], 1).lane_map) != digest(make_situation(names[0], 0).lane_map)


def test_same_id_same_bytes_in_another_process():
    names = [scene_name("hard", number) for number in (3, 7, 9)]
    here = [digest(make_situation(name)) for name in names]
    script = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('maps_test', {__file__!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(*(module.digest(module.make_situation(name)) for name in sys.argv[1:]))\n"
    )
    run = subprocess.run([sys.executable, "-c", script, *names], capture_output=True, text=True, check=True)
    assert run.stdout.split() == here


def test_kinds_are_balanced_by_number():
    kinds = [kind_of(scene_name("test", number)) for number in range(10 * len(KINDS))]
    assert {kind: kinds.count(kind) for kind in KINDS} == dict.fromkeys(KINDS, 10)


@pytest.mark.parametrize("name", ["road-moon-1", "road-train", "procedural-train-1", "road-train-x", "road-train--1"])
def test_names_of_no_scene_are_refused(name):
    with pytest.raises(SceneError, match="no scene"):
        suite_and_number(name)


@given(st.integers(0, 10**6), st.sampled_from(["train", "hard"]))
@bounded
def test_any_situation_starts_without_contact(number, suite):
    situation = make_situation(scene_name(suite, number))
    boxes = np.array([start_box(agent) for agent in situation.agents])
    assert not boxes_overlap(boxes, situation.ego_box).any()
    assert situation.lane_map.area().contains(situation.ego_box)


def test_red_signals_are_drawn_where_the_heads_are():
    situation = situation_of("train", KINDS.index("crossing4"))
    picture = draw_map(situation.lane_map, situation.agents, situation.route, situation.ego_box, size_px=400)
    assert picture.shape == (400, 400, 3)
    corners = box_corners(situation.ego_box)
    assert corners.mean(axis=0) == pytest.approx(situation.ego_box[:2])
    plain = draw_map(situation.lane_map, lanes=False, size_px=400)
    assert (plain[200, 200] == ROAD).all()
    states = {situation.lane_map.signals.state(int(group), 0) for group in situation.lane_map.signals.heads[:, 3]}
    assert states <= {GREEN, 2, RED}
