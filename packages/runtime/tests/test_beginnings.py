"""Kept beginnings of episodes, room for actors, and the search along routes: faster ways to the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.simulators.embedded.begun import Begun
from alpagym_runtime.simulators.embedded.route import nearest_on_route
from alpagym_runtime.simulators.embedded.scene_bank import SceneBank, arc_lengths
from alpagym_runtime.simulators.embedded.simulator import EmbeddedSimulator
from alpagym_runtime.testing.conformance import rows_of_batch
from alpagym_runtime.testing.examples import assert_same
from alpagym_runtime.testing.scenes import RoadUser, moving, simulator_of, straight_drive
from alpagym_runtime.types import EpisodeRequest, TickBatch


def drive(simulator: EmbeddedSimulator, slot: int, request: EpisodeRequest) -> list[TickBatch]:
    """What a slot delivers, driven straight on by 5 m/s."""
    simulator.start(np.array([slot]), [request])
    rows = []
    while True:
        rows += [row for row in rows_of_batch(simulator.receive(1, 1.0)) if row.slots[0] == slot]
        if rows[-1].ended[0]:
            return rows
        plan = np.zeros((1, 64, 3))
        plan[0, :, 0] = 0.5 * np.arange(1, 65)
        simulator.send(np.array([slot]), plan_decision(plan), np.array([False]))


@pytest.mark.parametrize("warmup_ticks", [0, 3])
def test_an_episode_that_begins_where_another_did_is_the_same(warmup_ticks):
    scenes = [straight_drive(6.0, users=[RoadUser(moving(30.0, 0.0, 0.0, 3.0, 150))]).build()]
    scenes.append(straight_drive(4.0).build("other"))
    simulator = simulator_of(scenes, slots=2, warmup_ticks=warmup_ticks)
    first = drive(simulator, 0, EpisodeRequest("hand-made"))
    # A later handover is another beginning of the same scene.
    later = drive(simulator, 0, EpisodeRequest("hand-made", start_us=1_500_000))
    drive(simulator, 1, EpisodeRequest("other"))
    again = drive(simulator, 1, EpisodeRequest("hand-made"))
    assert len(first) == len(again)
    for a, b in zip(first, again, strict=True):
        assert_same(a.observation, b.observation, "observation")
        assert_same(a.measures.values, b.measures.values, "measures")
        assert_same(a.measures.valid, b.measures.valid, "measures' validity")
    assert later[0].observation["time_us"][0] == 1_500_000 - 200_000 * warmup_ticks


def test_the_beginning_used_longest_ago_makes_room():
    bank = SceneBank()
    bank.add([straight_drive(3.0 + i).build(f"scene-{i}") for i in range(3)], set())
    begun = Begun(2, "kinematic", False, True)
    handover = 10
    keys = [(i, handover, handover) for i in range(3)]
    assert begun.places(bank.bank, keys[:2], 0).tolist() == [0, 1]
    assert begun.places(bank.bank, keys[:1], 0).tolist() == [0]
    # Scene 1 was used before scene 0 was used again.
    assert begun.places(bank.bank, keys[2:], 0).tolist() == [1]
    assert begun.slots.scene.tolist() == [0, 2]
    # Scene 2 drives 5 m/s.
    assert begun.slots.state[1, 3] == pytest.approx(5.0)
    assert begun.places(bank.bank, [keys[2], keys[2]], 0).tolist() == [1, 1]


def test_a_scene_with_more_actors_than_fit_does_not_disturb_those_that_drive():
    few = straight_drive(5.0, users=[RoadUser(moving(40.0, 0.0, 0.0, 4.0, 150))]).build()
    crowd = [RoadUser(moving(60.0 + 6.0 * k, 3.5, 0.0, 0.0, 150)) for k in range(90)]
    many = straight_drive(5.0, users=crowd).build("many")
    alone = drive(simulator_of([few, many], slots=2), 0, EpisodeRequest("hand-made"))
    simulator = simulator_of([few, many], slots=2)
    simulator.start(np.array([0]), [EpisodeRequest("hand-made")])
    beside = drive(simulator, 1, EpisodeRequest("many"))
    # 8 of 90 are observed.
    assert beside[0].observation["actors_mask"].all()
    assert len(simulator.actor_boxes(1)) == 90
    again = drive(simulator, 0, EpisodeRequest("hand-made"))
    for a, b in zip(alone, again, strict=True):
        assert_same(a.observation, b.observation, "observation")


def exhaustive(route: NDArray, segment: int, x: float, y: float, behind: float, ahead: float) -> tuple:
    """The definition, segment by segment."""
    best = (1e18, segment, 0.0, 0.0)
    low = segment
    while low > 0 and route[segment, 2] - route[low, 2] < behind:
        low -= 1
    for k in range(low, len(route) - 1):
        if route[k, 2] - route[segment, 2] >= ahead:
            break
        (dx, dy), length = route[k + 1, :2] - route[k, :2], route[k + 1, 2] - route[k, 2]
        px, py = x - route[k, 0], y - route[k, 1]
        t = (px * dx + py * dy) / (length * length)
        t = max(t, 0.0) if k > 0 else t
        t = min(t, 1.0) if k < len(route) - 2 else t
        distance = (px - t * dx) ** 2 + (py - t * dy) ** 2
        if distance < best[0] - 1e-12:
            best = (distance, k, route[k, 2] + t * length, (dx * py - dy * px) / length)
    return best[1:]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(-0.4, 0.4), st.floats(-60.0, 60.0), st.floats(-60.0, 60.0))
def test_the_nearest_point_of_a_route_is_that_of_an_exhaustive_search(seed, bend, dx, dy):
    # A winding route of segments of 0.5 to 3 m, which may cross itself.
    rng = np.random.default_rng(seed)
    yaw = np.cumsum(rng.normal(bend, 0.2, 60))
    points = np.cumsum(rng.uniform(0.5, 3.0, 60)[:, None] * np.stack([np.cos(yaw), np.sin(yaw)], 1), axis=0)
    route = np.column_stack([points, arc_lengths(points)])
    segment = int(rng.integers(0, 59))
    x, y = points[segment] + [dx, dy]
    for behind, ahead in ((10.0, 40.0), (80.0, 80.0), (0.0, 1e18)):
        found = nearest_on_route(route, 0, len(route), segment, x, y, behind, ahead)
        assert found == exhaustive(route, segment, x, y, behind, ahead)
