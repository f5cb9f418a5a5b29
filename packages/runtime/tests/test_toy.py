from __future__ import annotations

import numpy as np
import pytest

from alpagym_runtime.errors import ConfigError
from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.policies.config import ConstantSpeedConfig, LogReplayConfig, RouteFollowerConfig
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.testing.conformance import SimulatorConformance
from alpagym_runtime.testing.toy import SPLITS, ToySimulator
from alpagym_runtime.testing.toy_config import ToyConfig
from alpagym_runtime.types import Ended, EpisodeRequest, Policy, PolicySpec, Sampling, TickBatch


class TestToy(SimulatorConformance):
    def make(self, slots: int) -> ToySimulator:
        return ToyConfig().build(self.policy_spec, DatasetSection(), slots, self.labels)


class TestToyWithLateMeasures(SimulatorConformance):
    def make(self, slots: int) -> ToySimulator:
        return ToyConfig(late_measures=True).build(self.policy_spec, DatasetSection(), slots, self.labels)


class TestToyWithTicksBetweenPlanPoints(SimulatorConformance):
    policy_spec = PolicySpec(("ego_history_rig", "ego_dynamics_rig"), plan_steps=9, plan_step_us=70_000)

    def make(self, slots: int) -> ToySimulator:
        config = ToyConfig(control_period_us=180_000)
        return config.build(self.policy_spec, DatasetSection(split="test"), slots, self.labels)


def drive(policy: Policy, simulator: ToySimulator, requests: list[EpisodeRequest]) -> list[list[TickBatch]]:
    """Deliveries by request, as batches of one."""
    from alpagym_runtime.testing.conformance import rows_of_batch

    episodes: list[list[TickBatch]] = [[] for _ in requests]
    simulator.start(np.arange(len(requests)), requests)
    while batch := simulator.receive(1, 1.0):
        for row in rows_of_batch(batch):
            episodes[int(row.slots[0])].append(row)
        rows = np.flatnonzero(batch.ended == Ended.RUNNING)
        observation = {name: array[rows] for name, array in (batch.observation | batch.labels).items()}
        decision = policy.act(observation, np.zeros(len(rows), np.uint64), Sampling())
        simulator.send(batch.slots[rows], decision, np.zeros(len(rows), bool))
    return episodes


def drive_all(policy: Policy, split: str = "train", **config: object) -> list[list[TickBatch]]:
    simulator = ToyConfig(**config).build(policy.spec, DatasetSection(split=split), 64, ())
    requests = [EpisodeRequest(scene, horizon_ticks=80, world_seed=i) for i, scene in enumerate(simulator.spec.scenes)]
    return drive(policy, simulator, requests)


def outcomes(episodes: list[list[TickBatch]]) -> set[str]:
    return {Ended(int(rows[-1].ended[0])).name for rows in episodes}


def test_the_recording_reaches_its_end_in_every_split():
    for split, ids in SPLITS.items():
        episodes = drive_all(LogReplayConfig().build(), split)
        assert outcomes(episodes) == {"GOAL"}
        assert len(episodes) == len(ids)
        for rows in episodes:
            # float32 plans: 64 m · 2^-24 = 4e-6 m a tick, some 40 ticks.
            assert rows[-1].episode_measures[0]["distance_to_gt_m"].value.max() < 1e-4


def test_the_expert_drives_around_the_car_from_wherever_it_is():
    class Expert:
        spec = PolicySpec(fields=(), privileged=("target_plan_rig",))

        def act(self, observations, seeds, sampling):
            return plan_decision(observations["target_plan_rig"])

    assert outcomes(drive_all(Expert())) == {"GOAL"}


def test_straight_on_hits_the_parked_car_and_is_at_fault():
    for rows in drive_all(ConstantSpeedConfig().build()):
        assert rows[-1].ended[0] == Ended.COLLISION
        assert rows[-1].measures.values["collision_count"][0] == 1.0
        assert rows[-1].measures.values["collision_at_fault_count"][0] == 1.0


def test_the_route_follower_stops_behind_the_car():
    for rows in drive_all(RouteFollowerConfig().build()):
        assert rows[-1].ended[0] == Ended.SCENE_END
        assert rows[-1].measures.values["collision_count"][0] == 0.0
        assert rows[-1].measures.values["speed_mps"][0] < 0.1


def test_leaving_the_road_ends_the_drive():
    simulator = ToyConfig().build(PolicySpec(), DatasetSection(), 1, ())
    simulator.start(np.array([0]), [EpisodeRequest("toy-0")])
    plan = np.zeros((1, 64, 3))
    plan[0, :, 1] = 10.0  # at most 3 m/s · 0.2 s = 0.6 m a tick: |y| > 5 in the 9th (5.4 m)
    for _ in range(9):
        assert simulator.receive(1, 1.0).ended[0] == Ended.RUNNING
        simulator.send(np.array([0]), plan_decision(plan), np.array([False]))
    last = simulator.receive(1, 1.0)
    assert last.ended[0] == Ended.OFFROAD
    assert last.measures.values["offroad_count"][0] == 1.0
    assert last.measures_previous.values["offroad_count"][0] == 0.0


def test_progress_is_the_share_of_sixty_metres():
    simulator = ToyConfig().build(PolicySpec(), DatasetSection(), 1, ())
    simulator.start(np.array([0]), [EpisodeRequest("toy-0")])
    simulator.receive(1, 1.0)
    plan = np.zeros((1, 64, 3))
    plan[0, :, 0] = 1.5 * np.arange(1, 65)  # 3 m in a tick of 0.2 s: 3 / 60 = 0.05, at 15 m/s
    simulator.send(np.array([0]), plan_decision(plan), np.array([False]))
    batch = simulator.receive(1, 1.0)
    assert batch.measures.values["progress"][0] == pytest.approx(0.05, abs=1e-12)
    assert batch.measures.values["speed_mps"][0] == pytest.approx(15.0, abs=1e-12)


def test_the_world_seed_moves_the_parked_car_a_little():
    simulator = ToyConfig().build(PolicySpec(("actors_rig",)), DatasetSection(), 3, ())
    simulator.start(np.arange(3), [EpisodeRequest("toy-5", world_seed=seed) for seed in (1, 2, 1)])
    cars = simulator.receive(3, 1.0).observation["actors_rig"][:, 0]
    assert 0.0 < np.abs(cars[0] - cars[1]).max() <= 2.0
    assert (cars[0] == cars[2]).all()


def test_an_episode_can_start_anywhere_in_its_log():
    simulator = ToyConfig().build(LogReplayConfig().spec(), DatasetSection(), 2, ())
    requests = [EpisodeRequest("toy-3", 4_000_000, 3), EpisodeRequest("toy-3", 60_000_000, 3)]
    good, late = drive(LogReplayConfig().build(), simulator, requests)
    series = good[-1].episode_measures[0]["along_track_error_m"]
    assert series.time_us.tolist() == [4_000_000, 4_200_000, 4_400_000, 4_600_000]
    np.testing.assert_allclose(series.value, 0.0, atol=1e-5)
    assert late[0].failure[0].kind == "permanent"
    assert "60000000" in late[0].failure[0].text


def test_every_third_first_attempt_fails_once_in_its_third_tick():
    simulator = ToyConfig(fail_every=3).build(LogReplayConfig().spec(), DatasetSection(), 6, ())
    requests = [EpisodeRequest(scene, horizon_ticks=5) for scene in simulator.spec.scenes[:6]]
    episodes = drive(LogReplayConfig().build(), simulator, requests)
    failed = [i for i, rows in enumerate(episodes) if rows[-1].ended[0] == Ended.FAILED]
    assert failed == [2, 5]
    for i in failed:
        assert len(episodes[i]) == 4  # the handover, two good ticks, the failure
        assert episodes[i][-1].failure[0].kind == "transient"
    retry = EpisodeRequest(requests[2].scene_id, horizon_ticks=5, attempt=1)
    assert outcomes(drive(LogReplayConfig().build(), simulator, [retry])) == {"HORIZON"}


def test_what_it_cannot_compute_is_refused():
    with pytest.raises(ConfigError, match="camera_front"):
        ToyConfig().build(PolicySpec(cameras={"camera_front": (4, 4)}), DatasetSection(), 1, ())
    with pytest.raises(ConfigError, match="no_such_plan"):
        ToyConfig().build(PolicySpec(), DatasetSection(), 1, ("no_such_plan",))
    with pytest.raises(ConfigError, match="control_period_us"):
        ToyConfig(control_period_us=300_000)
