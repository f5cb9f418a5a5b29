"""Traffic that reacts, on hand-made roads along x: who follows, waits, merges and makes way, with arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from alpagym_runtime.geometry import boxes_overlap
from alpagym_runtime.simulators.embedded import state, world
from alpagym_runtime.simulators.embedded.lane_map import MERGE, ZEBRA, Agent, Stop
from alpagym_runtime.simulators.embedded.maps import make_map
from alpagym_runtime.simulators.embedded.maps.paths import path_over
from alpagym_runtime.simulators.embedded.road_scenes import make_road_scene
from alpagym_runtime.simulators.embedded.scene import KINDS, Actors
from alpagym_runtime.simulators.embedded.scene_bank import SceneBank, arc_lengths
from alpagym_runtime.simulators.embedded.start_speeds import meet_at_merge, with_room_to_brake
from alpagym_runtime.simulators.embedded.traffic.following import idm
from alpagym_runtime.testing.scenes import straight_drive

CAR, PERSON = KINDS.index("car"), KINDS.index("pedestrian")
ROAD = np.column_stack([np.arange(0.0, 400.0), np.zeros(400)])


def car(x_m: float, speed_mps: float, desired_mps: float | None = None, path=ROAD, **fields) -> Agent:
    """4 m long and 2 m wide, on a path from x = 0 on."""
    return Agent(path, x_m, speed_mps, speed_mps if desired_mps is None else desired_mps, CAR, 4.0, 2.0, **fields)


def person(points, pace_mps: float, arc_m: float = 0.0, **fields) -> Agent:
    ends = np.asarray(points, np.float64)
    count = int(math.hypot(*(ends[1] - ends[0]))) + 1
    path = np.linspace(ends[0], ends[1], count)
    return Agent(path, arc_m, pace_mps, pace_mps, PERSON, 0.6, 0.6, **fields)


def drives(agents: list[Agent], steps: int = 150) -> tuple[np.ndarray, np.ndarray]:
    """What agents do by themselves: [K,A,4] x, y, yaw, speed, and whether each is there [K,A]. The ego is far away."""
    count = len(agents)
    draft = straight_drive(0.0, steps + 2).moved(-2000.0, 0.0, 0.0)
    sizes = np.array([[agent.length_m, agent.width_m] for agent in agents])
    nowhere = np.zeros(count, np.int64)
    actors = Actors(np.zeros((count, 1, 4)), nowhere, nowhere, sizes, np.array([agent.kind for agent in agents]))
    bank = SceneBank()
    bank.add([replace(draft.build(), actors=actors, agents=tuple(agents))], set())
    slots = state.make_slots(1, steps + 2, 64)
    slots.reactive[0] = True
    row, poses, there = np.zeros(1, np.int64), np.zeros((steps, count, 4)), np.zeros((steps, count), bool)
    world.begin(bank.bank, slots, row, row, np.array([steps]), row)
    for k in range(steps):
        poses[k], there[k] = slots.actors[0, :count, :4], slots.present[0, :count]
        world.advance(bank.bank, slots, row, 1, 0.1, 0, np.array([steps]), np.zeros(1, np.int64))
    return poses, there


def touches(poses: np.ndarray, there: np.ndarray, agents: list[Agent]) -> list[tuple[int, int, int]]:
    """(step, one, other) of every contact."""
    found = []
    size = np.array([[agent.length_m, agent.width_m] for agent in agents])
    for k in range(len(poses)):
        here = np.flatnonzero(there[k])
        boxes = np.concatenate([poses[k, here, :3], size[here]], axis=1)
        for i in range(len(here)):
            hit = boxes_overlap(boxes[i], boxes[i + 1 :])
            found += [(k, int(here[i]), int(here[i + 1 + j])) for j in np.flatnonzero(hit)]
    return found


# ---------------------------------------------------------------- following


def test_the_drivers_acceleration_by_hand():
    # wanted gap 2 + 10 · 1.2 + 10 · 2 / (2 sqrt(1.6 · 2.2)) = 14 + 5.330 = 19.330 m
    # 1.6 (1 - (10 / 15)^4 - (19.330 / 30)^2) = 1.6 (1 - 0.1975 - 0.4152) = 0.6197
    assert idm(10.0, 15.0, 30.0, 2.0) == pytest.approx(0.6197, abs=1e-3)
    assert idm(0.0, 15.0, 1e9, 0.0) == pytest.approx(1.6)
    assert idm(20.0, 15.0, 1.0, 10.0) == -8.0


def test_a_car_behind_a_standing_one_stops_two_metres_short():
    agents = [car(10.0, 10.0), car(100.0, 0.0)]
    poses, _ = drives(agents)
    # The standing one's rear is at 98 m; the front of the other one comes to 96 m, within half a metre.
    assert poses[-1, 0, 3] < 0.2
    assert poses[-1, 0, 0] + 2.0 == pytest.approx(96.0, abs=0.5)


# ---------------------------------------------------------------- people at a zebra

ZEBRA_AT = Stop(57.0, ZEBRA, (60.0, 0.0))
"""A car's front stops 3 m before the middle of a zebra at x = 60."""


def crosser(pace_mps: float, arc_m: float, *, yields: bool = True) -> Agent:
    """Walks along y at x = 60; the kerb, at y = -4, is 6 m from the path's start."""
    stop = Stop(6.0, -1, (60.0, 0.0))
    return person([[60.0, -10.0], [60.0, 20.0]], pace_mps, arc_m, stops=(stop,), yields_to_cars=yields)


def test_a_car_stops_for_somebody_who_waits_at_a_zebra_and_then_goes_on():
    agents = [car(10.0, 10.0, stops=(ZEBRA_AT,)), crosser(1.4, 5.2)]
    poses, there = drives(agents)
    front, y = poses[:, 0, 0] + 2.0, poses[:, 1, 1]
    # While the person is on the car's side of the road (y < 1), the car has not passed its line.
    on_the_way = y < 1.0
    assert front[on_the_way].max() < 57.5
    assert y[-1] > 4.0
    assert front[-1] > 63.0
    assert not touches(poses, there, agents)


def test_without_a_zebra_the_person_waits():
    # The car, 20 m away at 10 m/s, is there in 2 s; to the middle it is 4.8 m, or 2.4 s with a second to spare.
    agents = [car(40.0, 10.0), crosser(1.4, 5.2)]
    poses, _ = drives(agents)
    passed = int(np.argmax(poses[:, 0, 0] - 2.0 > 60.0))
    assert poses[:passed, 1, 1].max() < -4.0
    assert poses[:passed, 0, 3].min() > 9.0


def test_a_car_does_not_stop_for_somebody_far_from_the_kerb_or_on_another_way():
    # 6 m before the kerb and standing; and someone who walks along the road on the sidewalk.
    away = replace(crosser(1.4, 0.0), desired_speed_mps=0.0, start_speed_mps=0.0)
    along = person([[40.0, -5.5], [90.0, -5.5]], 1.4)
    poses, _ = drives([car(10.0, 10.0, stops=(ZEBRA_AT,)), away, along], 80)
    assert poses[:, 0, 3].min() > 9.0


def test_a_driver_does_not_wait_for_ever():
    # Who stands at the kerb never goes: after 8 s at the line the driver does.
    stands = replace(crosser(1.4, 5.5), desired_speed_mps=0.0, start_speed_mps=0.0)
    poses, _ = drives([car(30.0, 8.0, stops=(ZEBRA_AT,)), stands], 220)
    waits = np.flatnonzero(poses[:, 0, 3] < 0.5)
    assert 75 <= len(waits) <= 115
    assert poses[-1, 0, 0] > 70.0


def test_who_cannot_stop_any_more_goes_on():
    # 12 m/s needs 12^2 / 8 = 18 m; the line is 10 m ahead of the front.
    poses, _ = drives([car(45.0, 12.0, stops=(ZEBRA_AT,)), replace(crosser(1.4, 5.0), desired_speed_mps=0.0)], 10)
    assert poses[:, 0, 3].min() > 11.5


# ---------------------------------------------------------------- lanes that become one


def merging(x_m: float, speed_mps: float, *, side: bool) -> Agent:
    """On y = 0, or on y = -3.5 until x = 100 and from there on half a cosine that ends at x = 140."""
    x = ROAD[:, 0]
    path = np.column_stack([x, -1.75 * (1.0 + np.cos(np.pi * np.clip((x - 100.0) / 40.0, 0.0, 1.0)))])
    stops = (Stop(float(arc_lengths(path)[140]) if side else 140.0, MERGE, (140.0, 0.0)),)
    return car(x_m, speed_mps, path=path if side else ROAD, stops=stops)


@pytest.mark.parametrize("ahead_m", [-3.0, -1.0, 0.5, 2.0, 4.0])
def test_two_lanes_close_up_by_turns(ahead_m):
    agents = [merging(20.0, 12.0, side=False), merging(20.0 + ahead_m, 12.0, side=True)]
    poses, there = drives(agents)
    assert not touches(poses, there, agents)
    # Who was ahead stays ahead, by a length and what is kept between cars.
    order = math.copysign(1.0, ahead_m)
    assert order * (poses[-1, 1, 0] - poses[-1, 0, 0]) > 8.0
    # In 0.1 s nobody loses more than 2.5 m/s2 make.
    assert np.diff(poses[:, :, 3], axis=0).min() > -0.251


def test_a_queue_on_both_lanes_merges_without_contact():
    places = (60.0, 48.0, 36.0, 24.0)
    agents = [merging(x, 8.0, side=False) for x in places] + [merging(x + 5.0, 9.0, side=True) for x in places]
    poses, there = drives(agents, 220)
    assert not touches(poses, there, agents)


def test_the_ego_is_let_in_as_well():
    # An agent beside the ego falls behind it; `drives` has the ego far away, so this one is in the scene's recording.
    draft = straight_drive(12.0, 130, handover=0).moved(20.0, 0.0, 0.0)
    agent = merging(19.0, 12.0, side=True)
    actors = Actors(np.zeros((1, 1, 4)), np.zeros(1, int), np.zeros(1, int), np.array([[4.0, 2.0]]), np.zeros(1, int))
    bank = SceneBank()
    bank.add([replace(draft.build(), actors=actors, agents=(agent,))], set())
    slots = state.make_slots(1, 130, 64)
    slots.reactive[0] = True
    row = np.zeros(1, np.int64)
    world.begin(bank.bank, slots, row, row, np.array([100]), np.array([100]))
    # The ego's rig is at 20 + 120 = 140 m, its rear 1 m behind.
    assert slots.actors[0, 0, 0] + 2.0 < 139.0 - 2.0


def test_both_ways_into_a_lane_know_where_it_becomes_one():
    plan = make_map("lane_drop", 3)
    lanes = plan.lane_map.lanes
    side, straight = plan.routes[0].lanes, plan.routes[2].lanes
    merges = [[s for s in path_over(plan.lane_map, way).stops if s.signal_group == MERGE] for way in (side, straight)]
    assert [len(found) for found in merges] == [1, 1]
    assert merges[0][0].conflict == merges[1][0].conflict == tuple(lanes[side[1]].centre[-1])


def test_a_path_stops_three_metres_before_a_zebra():
    plan = make_map("crosswalk", 5)
    path = path_over(plan.lane_map, plan.routes[0].lanes, plan.zebras)
    stops = [stop for stop in path.stops if stop.signal_group == ZEBRA]
    assert len(stops) == len(plan.zebras)
    # The first zebra is at the route's focus, measured along the road's middle line.
    assert stops[0].arc_m == pytest.approx(plan.routes[0].focus_m - 3.0, abs=1.0)
    assert stops[0].conflict == tuple(plan.zebras[0].mean(axis=0))


# ---------------------------------------------------------------- lane changes


def test_two_do_not_change_into_one_lane_side_by_side():
    # Both come up behind a slow car on the outer lanes; the middle one is free.
    left, right = (np.column_stack([ROAD[:, 0], np.full(len(ROAD), y)]) for y in (3.5, -3.5))
    agents = [
        car(20.0, 14.0, path=left, lanes_right=1),
        car(20.5, 14.0, path=right, lanes_left=1),
        car(60.0, 4.0, path=left),
        car(60.0, 4.0, path=right),
    ]
    poses, there = drives(agents)
    assert not touches(poses, there, agents)
    assert (np.abs(poses[:, :2, 1]) < 1.0).any()


# ---------------------------------------------------------------- people among others


def test_nobody_walks_into_a_standing_car():
    agents = [crosser(1.5, 0.0, yields=False), replace(car(60.0, 0.0))]
    poses, there = drives(agents)
    # The car covers y from -1 to 1; his front comes to -1 m, but for a little.
    assert not touches(poses, there, agents)
    assert -2.5 < poses[-1, 0, 1] < -1.3


def test_two_who_meet_pass_on_the_right():
    agents = [person([[0.0, 0.0], [40.0, 0.0]], 1.4), person([[20.0, 0.1], [-20.0, 0.1]], 1.2)]
    poses, there = drives(agents)
    assert not touches(poses, there, agents)
    meet = int(np.argmin(np.abs(poses[:, 0, 0] - poses[:, 1, 0])))
    # The first one looks along x: his right is -y.
    assert poses[meet, 0, 1] < poses[meet, 1, 1] - 0.6
    assert poses[-1, 0, 0] > 16.0
    assert poses[-1, 0, 1] == pytest.approx(0.0, abs=0.05)


def test_the_faster_one_overtakes():
    agents = [person([[0.0, 0.0], [60.0, 0.0]], 1.8), person([[6.0, 0.0], [60.0, 0.0]], 0.9)]
    poses, there = drives(agents)
    assert not touches(poses, there, agents)
    assert poses[-1, 0, 0] > poses[-1, 1, 0] + 2.0


# ---------------------------------------------------------------- how it begins


def test_nobody_begins_faster_than_it_can_brake():
    # Free distance 40 - 10 - 4 = 26 m of which 1 m is kept: sqrt(2 · 3 · 25) = 12.25 m/s to a standing car's rear.
    agents = with_room_to_brake([car(10.0, 20.0), car(40.0, 0.0)])
    assert agents[0].start_speed_mps == pytest.approx(12.247, abs=1e-3)
    # Behind one that drives at 10 m/s: sqrt(10^2 + 150) = 15.8; and a third one behind both.
    agents = with_room_to_brake([car(10.0, 20.0), car(40.0, 10.0), car(5.0, 20.0)])
    assert agents[0].start_speed_mps == pytest.approx(15.811, abs=1e-3)
    # Free distance 5 - 4 = 1 m, none beyond what is kept.
    assert agents[2].start_speed_mps == agents[0].start_speed_mps


def test_who_merges_behind_another_begins_no_faster_than_that_allows():
    # The side lane is 0.187 m longer: 55.187 m and 50 m to go. 5.187 - 4 = 1.187 m are between the two, of which
    # 1 m is kept: sqrt(8^2 + 2 · 3 · 0.187) = 8.070.
    late, early = merging(85.0, 15.0, side=True), merging(90.0, 8.0, side=False)
    assert late.stops[0].arc_m == pytest.approx(140.187, abs=0.01)
    assert with_room_to_brake([late, early])[0].start_speed_mps == pytest.approx(8.070, abs=0.005)
    # Side by side is less than a length and 2 m: 6 m.
    assert meet_at_merge(late, early)
    assert not meet_at_merge(merging(83.0, 15.0, side=True), early)


# ---------------------------------------------------------------- whole scenes


def test_road_users_of_everyday_scenes_do_not_touch():
    # Two of each kind; of all everyday scenes 2 % have a contact (docs/worlds.md).
    for number in range(22):
        scene = make_road_scene(f"road-test-{number:06d}")
        steps = np.arange(scene.actors.tracks.shape[1])[:, None]
        there = (scene.actors.first <= steps) & (steps <= scene.actors.last)
        assert not [
            contact
            for contact in touches(scene.actors.tracks.transpose(1, 0, 2), there, list(scene.agents))
            if max(scene.agents[a].desired_speed_mps for a in contact[1:]) > 0.0
        ], scene.scene_id
