"""The embedded world behind the `Simulator` protocol: slots, starts, ends, measures, and the facts it reports."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from alpagym_runtime.envs.core import driving_score
from alpagym_runtime.errors import ConfigError, SceneError
from alpagym_runtime.geometry import boxes_overlap, rig_to_local
from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.policies.noisy_expert import Noise, NoisyExpert
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.embedded.birds_eye import PLAN
from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
from alpagym_runtime.simulators.embedded.scene_bank import SceneBank
from alpagym_runtime.simulators.embedded.simulator import EmbeddedSimulator
from alpagym_runtime.testing.conformance import SimulatorConformance, rows_of_batch
from alpagym_runtime.testing.examples import assert_same
from alpagym_runtime.testing.scenes import Draft, RoadUser, moving, simulator_of, standing, straight_drive
from alpagym_runtime.types import Decision, Ended, EpisodeRequest, PolicySpec, TickBatch

FOREVER = 150
DATASET = DatasetSection(split="train", train_scenes=6)
SPEC = PolicySpec(fields=("ego_history_rig", "ego_dynamics_rig", "route_rig", "actors_rig"))


class TestEmbedded(SimulatorConformance):
    def make(self, slots: int) -> EmbeddedSimulator:
        return EmbeddedConfig().build(self.policy_spec, DATASET, slots, self.labels)


class TestEmbeddedInItsOwnThread(SimulatorConformance):
    def make(self, slots: int) -> EmbeddedSimulator:
        return EmbeddedConfig(threads=1).build(self.policy_spec, DATASET, slots, self.labels)


class TestEmbeddedAfterAWarmUp(SimulatorConformance):
    def make(self, slots: int) -> EmbeddedSimulator:
        return EmbeddedConfig(warmup_ticks=5).build(self.policy_spec, DATASET, slots, self.labels)


class TestEmbeddedAtTenHertz(SimulatorConformance):
    policy_spec = PolicySpec(("ego_history_rig", "ego_dynamics_rig"), ("target_plan_rig",), plan_steps=20)
    labels = ()

    def make(self, slots: int) -> EmbeddedSimulator:
        config = EmbeddedConfig(control_period_us=100_000, warmup_ticks=3, threads=1)
        return config.build(self.policy_spec, DATASET, slots, self.labels)


class TestEmbeddedDrivingOn(SimulatorConformance):
    def make(self, slots: int) -> EmbeddedSimulator:
        return EmbeddedConfig(end_on=[]).build(self.policy_spec, DATASET, slots, self.labels)


# ---------------------------------------------------------------- helpers


def control_decision(*rows: tuple[float, float]) -> Decision:
    out = plan_decision(np.zeros((len(rows), 64, 3)))
    out.control = np.array(rows, np.float32)
    return out


def drive(
    simulator: EmbeddedSimulator,
    requests: list[EpisodeRequest],
    control: tuple[float, float] = (0.0, 0.0),
    slots: list[int] | None = None,
) -> list[list[TickBatch]]:
    """All rows of each request, warm-up too, as batches of one; every tick by the same control."""
    where = np.arange(len(requests)) if slots is None else np.array(slots)
    place = {int(slot): i for i, slot in enumerate(where)}
    episodes: list[list[TickBatch]] = [[] for _ in requests]
    simulator.start(where, requests)
    left = len(requests)
    while left:
        batch = simulator.receive(1, 10.0)
        assert len(batch)
        for row in rows_of_batch(batch):
            episodes[place[int(row.slots[0])]].append(row)
            left -= bool(row.ended[0])
        waiting = batch.slots[batch.ended == Ended.RUNNING]
        if len(waiting):
            simulator.send(waiting, control_decision(*[control] * len(waiting)), np.zeros(len(waiting), bool))
    return episodes


def one(draft: Draft, control=(0.0, 0.0), *, horizon=40, start_us=-1, labels=(), **config) -> list[TickBatch]:
    simulator = simulator_of([draft.build()], labels=labels, **config)
    return drive(simulator, [EpisodeRequest("hand-made", start_us, horizon)], control)[0]


def series(rows: list[TickBatch], name: str):
    return rows[-1].episode_measures[0][name]


def ended(rows: list[TickBatch]) -> str:
    return Ended(int(rows[-1].ended[0])).name


def fingerprint(rows: list[TickBatch]) -> str:
    """SHA-256 of all that an episode delivers, but for its slot and undefined values."""
    digest = hashlib.sha256()
    for row in rows:
        arrays = {**row.observation, **row.labels, "tick": row.tick, "ended": row.ended, "controls": row.controls}
        for name, valid in row.measures.valid.items():
            arrays |= {f"valid {name}": valid, name: np.where(valid, row.measures.values[name], 0.0)}
        for name in sorted(arrays):
            digest.update(name.encode() + arrays[name].tobytes())
        for name, s in sorted(row.episode_measures.get(0, {}).items()):
            digest.update(name.encode() + s.time_us.tobytes() + s.value.tobytes() + s.valid.tobytes())
    return digest.hexdigest()


# ---------------------------------------------------------------- same request, same bytes


def example_requests(count: int) -> list[EpisodeRequest]:
    return [EpisodeRequest(f"procedural-train-{i % 5:06d}", -1, 12, i, i) for i in range(count)]


def build(slots: int, **config) -> EmbeddedSimulator:
    return EmbeddedConfig(**config).build(SPEC, DATASET, slots, ("target_plan_rig",))


def print_fingerprint() -> None:
    """What `test_an_episode_is_the_same_in_another_process` runs there."""
    print(fingerprint(drive(build(1), example_requests(4)[3:], (1.0, 0.02))[0]))


def test_an_episode_is_the_same_alone_in_a_crowd_and_after_others():
    request = example_requests(4)[3]
    alone = fingerprint(drive(build(1), [request], (1.0, 0.02))[0])
    crowd = [*example_requests(31), request, *example_requests(32)]
    assert fingerprint(drive(build(64), crowd, (1.0, 0.02))[31]) == alone
    used = build(1, threads=1)
    for other in example_requests(3):
        drive(used, [other], (2.0, -0.1))
    assert fingerprint(drive(used, [request], (1.0, 0.02))[0]) == alone
    assert fingerprint(drive(used, [example_requests(5)[4]], (1.0, 0.02))[0]) != alone


def test_an_episode_is_the_same_in_another_process():
    here = fingerprint(drive(build(1), example_requests(4)[3:], (1.0, 0.02))[0])
    code = f"import runpy; runpy.run_path({__file__!r})['print_fingerprint']()"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    there = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=100
    )
    assert there.stdout.strip() == here


def test_scenes_that_leave_the_bank_do_not_disturb_those_that_drive():
    scenes = [straight_drive(5.0 + i).build(f"scene-{i}") for i in range(6)]
    requests = [EpisodeRequest(scene.scene_id, -1, 20) for scene in scenes]
    expected = drive(simulator_of(scenes, slots=6), requests)
    simulator = simulator_of(scenes, slots=2)
    simulator._bank = SceneBank(capacity=2)
    simulator.start(np.array([0]), requests[:1])
    rows = []
    for other in range(20):
        # Slot 1 begins another scene each tick, while slot 0 drives on.
        simulator.start(np.array([1]), [requests[1 + other % 5]])
        batch = simulator.receive(2, 1.0)
        rows.append(next(row for row in rows_of_batch(batch) if row.slots[0] == 0))
        simulator.send(np.array([0]), control_decision((0.0, 0.0)), np.array([False]))
    for a, b in zip(rows, expected[0], strict=False):
        assert_same(a.observation, b.observation, "the observation of slot 0")


# ---------------------------------------------------------------- how a drive ends


def wall_at(x_m: float) -> RoadUser:
    """A standing car whose rear is at x_m."""
    return RoadUser(standing(x_m + 2.0, 0.0, 0.0, FOREVER))


def test_the_horizon_wins_over_the_recordings_end_in_the_same_tick():
    # 21 samples, handover at 10: the recording ends 10 steps, 5 ticks of 0.2 s, later
    draft = straight_drive(3.0, 21)
    # 3 m/s · 1 s = 3 m: a standing reference, so there is no goal
    assert ended(one(draft, horizon=5)) == "HORIZON"
    assert ended(one(draft, horizon=4)) == "HORIZON"
    assert ended(one(draft, horizon=6)) == "SCENE_END"
    assert len(one(draft, horizon=100_000)) == 6


def test_a_horizon_far_beyond_the_recording_costs_no_memory():
    simulator = simulator_of([straight_drive().build()], slots=64)
    requests = [EpisodeRequest("hand-made", horizon_ticks=10**9)] * 64
    assert {ended(rows) for rows in drive(simulator, requests)} == {"GOAL"}
    assert simulator._ledger.series.nbytes < 20e6


def test_an_end_event_wins_over_the_horizon():
    # 10 m/s: the front, at 3 m, is 0.5 m deep in the wall at 8.5 m after 0.6 s: the third tick
    rows = one(straight_drive(users=[wall_at(8.5)]), horizon=3)
    assert (ended(rows), len(rows)) == ("COLLISION", 4)


def test_the_goal_is_ninety_nine_hundredths_of_the_reference():
    # 89 steps of 1 m after the handover: 0.99 · 89 = 88.11 m, reached in step 89, that is tick 45
    rows = one(straight_drive(), horizon=99)
    assert (ended(rows), len(rows) - 1) == ("GOAL", 45)
    assert series(rows, "progress").value[-1] >= 0.99


def test_leaving_the_road_ends_the_drive():
    rows = one(straight_drive(half_width_m=4.0), (0.0, 0.2))
    assert ended(rows) == "OFFROAD"
    assert series(rows, "offroad_count").value.tolist()[-2:] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("control", "users", "name"),
    [
        ((0.0, 0.0), [wall_at(20.3)], "COLLISION"),
        ((0.0, 0.05), [], "OFFROAD"),
        ((2.0, 0.0), [], "GOAL"),
        ((0.0, 0.05), [RoadUser(standing(18.0, y, 0.0, FOREVER)) for y in (1.0, 3.5, 6.0)], "COLLISION"),
    ],
)
def test_driving_on_counts_up_to_the_first_end_event_only(control, users, name):
    draft = straight_drive(10.0, 90, users=users)
    stopped, on = one(draft, control), one(draft, control, end_on=[])
    assert ended(stopped) == name
    assert ended(on) == "SCENE_END"
    assert len(on) > len(stopped)
    assert driving_score(on[-1].episode_measures[0]) == driving_score(stopped[-1].episode_measures[0])
    for measure, expected in stopped[-1].episode_measures[0].items():
        # NaN where neither has a valid sample.
        np.testing.assert_equal(series(on, measure).aggregate(), expected.aggregate(), measure)
        known = len(expected.value)
        np.testing.assert_array_equal(series(on, measure).value[:known][expected.valid], expected.value[expected.valid])


def test_after_the_first_end_event_counts_stay_and_the_rest_is_undefined():
    users = [wall_at(10.0), RoadUser(standing(24.0, 0.0, 0.0, FOREVER))]
    rows = one(straight_drive(half_width_m=4.0, users=users), (0.0, 0.05), end_on=[])
    count = series(rows, "collision_count").value
    at = int(np.argmax(count))
    assert count.max() == 1.0
    assert series(rows, "offroad_count").value.max() == 0.0
    progress = series(rows, "progress")
    assert (progress.value[at:] == progress.value[at]).all()
    assert progress.valid.all()
    for name in ("distance_to_gt_m", "jerk_mps3", "speed_mps"):
        assert series(rows, name).valid[1 : at + 1].all()
        assert not series(rows, name).valid[at + 1 :].any()


def test_an_event_that_is_not_in_end_on_freezes_without_ending():
    rows = one(straight_drive(users=[wall_at(10.0)], half_width_m=4.0), (0.0, 0.05), end_on=["offroad"])
    # the collision came first, so the road's edge no longer counts
    assert ended(rows) == "HORIZON"
    assert series(rows, "collision_count").value[-1] == 1.0
    assert series(rows, "offroad_count").value[-1] == 0.0


@pytest.mark.parametrize("end_on", [["collision", "offroad", "goal"], []])
def test_a_car_that_crashed_falls_behind_the_recording_until_the_horizon(end_on):
    # Contact 6 m after the handover, in tick 3 of 0.2 s; at ticks 4 to 8 the recording is at 8, 10, … 16 m.
    asked = {"measures": ["distance_to_gt_stranded_m"], "end_on": end_on}
    rows = one(straight_drive(users=[wall_at(8.5)]), horizon=8, **asked)
    behind = series(rows, "distance_to_gt_stranded_m")
    np.testing.assert_allclose(behind.value, [2.0, 4.0, 6.0, 8.0, 10.0], atol=1e-6)
    contact_us = series(rows, "distance_to_gt_m").time_us[3]
    assert (behind.time_us - contact_us).tolist() == [200_000 * k for k in (1, 2, 3, 4, 5)]


@pytest.mark.parametrize("horizon", [8, 99])
def test_who_drives_to_the_horizon_or_the_goal_is_not_stranded(horizon):
    rows = one(straight_drive(), horizon=horizon, measures=["distance_to_gt_stranded_m"])
    assert ended(rows) == {8: "HORIZON", 99: "GOAL"}[horizon]
    assert len(series(rows, "distance_to_gt_stranded_m").value) == 0


def test_what_a_crash_misses_is_measured_for_those_who_ask():
    rows = one(straight_drive(users=[wall_at(8.5)]))
    assert "distance_to_gt_stranded_m" not in rows[-1].episode_measures[0]


# ---------------------------------------------------------------- where a drive starts


def test_a_start_time_moves_the_handover():
    rows = one(straight_drive(), start_us=3_000_000, horizon=3)
    assert series(rows, "progress").time_us.tolist() == [3_000_000, 3_200_000, 3_400_000, 3_600_000]
    # 10 m/s for 0.6 s of the 99 - 30 = 69 m that are left
    assert series(rows, "progress").value[0] == 0.0
    assert series(rows, "progress").value[-1] == pytest.approx(6.0 / 69.0, abs=1e-6)


@pytest.mark.parametrize("start_us", [150_000, 100, 9_900_000, 10**12, -2, -100_000])
def test_a_start_that_is_not_in_the_recording_fails_for_good(start_us):
    # 100 samples: the last start that leaves something to drive is 9.8 s
    (failed,) = one(straight_drive(), start_us=start_us)
    assert failed.failure[0].kind == "permanent"
    assert str(start_us) in failed.failure[0].text
    assert ended(one(straight_drive(), start_us=9_800_000)) == "SCENE_END"


def test_a_start_at_zero_has_no_history():
    rows = one(straight_drive(), start_us=0, horizon=1)
    assert rows[0].observation["ego_history_mask"][0].tolist() == [False] * 15 + [True]


def test_the_warm_up_follows_the_recording_and_is_asked():
    draft = straight_drive(handover=9)
    rows = one(draft, (6.0, 0.5), warmup_ticks=100, horizon=2)
    # 9 steps before the handover: ticks of 2 steps, the last one of 1
    assert [int(row.tick[0]) for row in rows] == [-5, -4, -3, -2, -1, 0, 1, 2]
    warm = [row for row in rows if row.tick[0] < 0]
    assert not any(row.controls[0] for row in warm)
    assert not any(valid.any() for row in warm for valid in row.measures.valid.values())
    handover = next(row for row in rows if row.tick[0] == 0)
    assert handover.observation["time_us"][0] == 900_000
    assert series(rows, "distance_to_gt_m").value[0] == 0.0
    without = one(draft, (6.0, 0.5), horizon=2)
    assert [fingerprint([row]) for row in rows[len(warm) :]] == [fingerprint([row]) for row in without]


def test_a_long_warm_up_keeps_its_place_on_the_route():
    # 10 m/s for 7 s: 70 m, more than a projection's window
    draft = straight_drive(handover=70)
    rows = one(draft, warmup_ticks=35, horizon=1)
    for row in rows:
        np.testing.assert_allclose(row.observation["route_rig"][0, 0], 0.0, atol=1e-5)
    assert series(rows, "progress").value[0] == 0.0
    assert series(rows, "along_track_error_m").value[0] == pytest.approx(0.0, abs=1e-9)


# ---------------------------------------------------------------- initial faults


def test_what_overlaps_at_the_handover_never_counts():
    # It stays in contact for 1 s, leaves at 15 m/s, stands at 60 m and is reached again.
    track = standing(3.0, 0.0, 0.0, FOREVER)
    track[:, 0] = np.clip(3.0 + 1.5 * (np.arange(FOREVER) - 20), 3.0, 60.0)
    rows = one(straight_drive(users=[RoadUser(track)]), horizon=99)
    assert series(rows, "initial_fault").value.tolist() == [1.0] * len(rows)
    assert series(rows, "collision_count").value.max() == 0.0
    assert series(rows, "collision_at_fault_count").value.max() == 0.0
    assert driving_score(rows[-1].episode_measures[0]) == 1.0


def test_a_second_car_counts_beside_one_that_overlapped_at_the_handover():
    users = [RoadUser(standing(3.0, 0.0, 0.0, FOREVER)), wall_at(10.0)]
    rows = one(straight_drive(users=users))
    assert series(rows, "collision_count").value[-1] == 1.0
    assert series(rows, "initial_fault").value[-1] == 1.0


def test_being_off_the_road_at_the_handover_is_an_initial_fault():
    # the recording drives 4 m beside the road's middle: its box reaches to 5 m, the road to 4.5 m
    draft = straight_drive(half_width_m=4.5)
    log = draft.log + np.array([0.0, 4.0, 0.0, 0.0])
    rows = one(replace(draft, log=log), horizon=5)
    assert series(rows, "initial_fault").value[0] == 1.0
    assert series(rows, "offroad_count").value.max() == 0.0
    # Back on the road and off again is the drive's own doing.
    back = one(replace(draft, log=log), (0.0, -0.1), horizon=99)
    assert ended(back) == "OFFROAD"
    assert series(back, "offroad_count").value[-1] == 1.0


@pytest.mark.parametrize("warmup_ticks", [0, 3])
def test_a_contact_in_the_warm_up_is_no_matter(warmup_ticks):
    # It stands where the recording drives through 0.8 to 0.3 s before the handover, and is gone at the handover.
    ghost = RoadUser(standing(-5.0, 0.0, 0.0, FOREVER), last=9)
    rows = one(straight_drive(users=[ghost]), warmup_ticks=warmup_ticks, horizon=5)
    assert series(rows, "initial_fault").value.max() == 0.0
    assert series(rows, "collision_count").value.max() == 0.0
    assert len(series(rows, "collision_count").value) == 6


# ---------------------------------------------------------------- progress


def assert_progress(rows: list[TickBatch]) -> np.ndarray:
    value = series(rows, "progress").value
    assert np.isfinite(value).all()
    assert ((value >= 0.0) & (value <= 1.0)).all()
    assert (np.diff(value) >= 0.0).all()
    return value


@pytest.mark.parametrize("control", [(0.0, 0.0), (6.0, 0.0), (-9.0, 0.0), (0.0, 0.3), (-2.0, -0.5), (3.0, 0.05)])
def test_progress_is_a_share_that_never_falls(control):
    # steering 0.3 rad at wheelbase 2 m drives circles of 6.5 m: forward, and back again
    for angle in (0.0, 2.0):
        draft = straight_drive(half_width_m=60.0).moved(5.0, 8.0, angle)
        assert_progress(one(draft, control, end_on=[], horizon=99))


def test_progress_is_the_share_of_the_recordings_way():
    # 1 s at 10 m/s of 89 m
    assert assert_progress(one(straight_drive(), horizon=5))[-1] == pytest.approx(10.0 / 89.0, abs=1e-9)


def test_progress_where_the_route_passes_itself():
    # One lap and a quarter of a circle of 20 m: the end is where the drive has been before.
    angle = np.arange(0.0, 2.5 * np.pi, 0.05)
    log = np.stack([20.0 * np.sin(angle), 20.0 - 20.0 * np.cos(angle), angle, np.full(len(angle), 10.0)], axis=1)
    around = np.arange(-0.3, 2.5 * np.pi + 0.8, 0.1)
    route = np.stack([20.0 * np.sin(around), 20.0 - 20.0 * np.cos(around)], axis=1)
    road = np.array([[-40.0, -20.0], [40.0, -20.0], [40.0, 60.0], [-40.0, 60.0]])
    rows = one(Draft(log, route, [road]), (0.0, float(np.arctan(2.0 / 20.0))), horizon=99)
    value = assert_progress(rows)
    # after 10 of 15.7 s: 100 of 157 m
    assert value[50] == pytest.approx(100.0 / 157.0, abs=0.01)
    assert ended(rows) == "GOAL"


def test_a_standing_reference_is_kept_within_five_metres_only():
    draft = straight_drive(0.0)
    rows = one(draft, horizon=5)
    assert assert_progress(rows).tolist() == [1.0] * 6
    assert ended(rows) == "HORIZON", "a standing reference has no goal"
    # a = 2 m/s2: 4.84 m after 2.2 s, 5.76 m after 2.4 s
    away = series(one(draft, (2.0, 0.0), horizon=20), "progress").value
    assert away.tolist() == [1.0] * 12 + [0.0] * 9


def test_a_standing_reference_that_was_left_is_not_kept_by_coming_back():
    # a circle of radius 2 / tan(0.5) = 3.7 m leads 7.3 m away and back
    value = series(one(straight_drive(0.0), (1.0, 0.5), horizon=44), "progress").value
    assert value[0] == 1.0
    assert (np.diff(value) <= 0.0).all()
    assert value[-1] == 0.0


@pytest.mark.parametrize("speed_mps", [0.0, 0.2, 0.5])
def test_a_short_reference_is_standing(speed_mps):
    # 89 steps: 0, 1.8 and 4.5 m
    rows = one(straight_drive(speed_mps), horizon=60)
    assert ended(rows) == "SCENE_END"
    assert series(rows, "progress").value[-1] == 1.0


def test_a_start_near_the_end_makes_the_reference_standing():
    # 4 of 100 samples are left: 10 m/s · 0.4 s = 4 m
    rows = one(straight_drive(), start_us=9_500_000)
    assert ended(rows) == "SCENE_END"
    assert series(rows, "progress").value[-1] == 1.0


# ---------------------------------------------------------------- what is observed


def test_an_expert_observes_what_its_trainee_is_told_while_it_imitates():
    trainee = PolicySpec(fields=("ego_dynamics_rig",), lesson=("actors_rig",), actors=3)
    draft = straight_drive(users=[RoadUser(standing(30.0, -3.0, 0.0, FOREVER))])
    driver = NoisyExpert(trainee, Noise(0.0, 0.0, 0.0))
    assert driver.spec.fields == trainee.fields
    for spec, told in ((trainee, False), (driver.spec, True)):
        simulator = simulator_of([draft.build()], policy_spec=spec)
        simulator.start(np.array([0]), [EpisodeRequest("hand-made", horizon_ticks=2)])
        observation = simulator.receive(1, 1.0).observation
        assert ("actors_rig" in observation) is told
        assert "route_rig" not in observation
    assert observation["actors_mask"].tolist() == [[True, False, False]]


# ---------------------------------------------------------------- the traffic is a recording


def test_an_actor_exists_inside_its_interval_only_and_for_everybody():
    # at x = 20 + 2 t, from 0.8 to 1.6 s; the world starts at 1.0 s
    user = RoadUser(moving(20.0, 3.0, 0.2, 2.0, 17), first=8)
    late = RoadUser(standing(30.0, -3.0, 1.0, FOREVER), first=14, kind="pedestrian", size=(0.6, 0.6))
    draft = straight_drive(users=[user, late])
    simulator = simulator_of([draft.build()], control_period_us=100_000)
    simulator.start(np.array([0]), [EpisodeRequest("hand-made", horizon_ticks=12)])
    for step in range(10, 22):
        batch = simulator.receive(1, 1.0)
        drawn = simulator.actor_boxes(0)
        expected = [u for u in (user, late) if u.first <= step <= (len(u.track) - 1 if u.last < 0 else u.last)]
        assert batch.observation["actors_mask"][0].sum() == len(expected) == len(drawn)
        seen = batch.observation["actors_rig"][0][: len(expected)].astype(np.float64)
        ego = simulator.trail(0)[-1]
        for box, u in zip(drawn, expected, strict=True):
            np.testing.assert_allclose(box, [*u.track[step, :3], *u.size])
            nearest = np.argmin(np.hypot(*(rig_to_local(seen[:, :2], ego) - box[:2]).T))
            np.testing.assert_allclose(rig_to_local(seen[nearest, :2], ego), box[:2], atol=1e-5)
            np.testing.assert_allclose(seen[nearest, 5:7], u.size, atol=1e-6)
        simulator.send(np.array([0]), control_decision((0.0, 0.0)), np.array([False]))


def test_a_slot_shows_nobody_of_its_last_scene():
    crowded = straight_drive(users=[RoadUser(standing(30.0 + 5 * i, -3.0, 0.0, FOREVER)) for i in range(4)]).build()
    empty = replace(straight_drive().build(), scene_id="empty")
    simulator = simulator_of([crowded, empty])
    for scene, count in ((crowded, 4), (empty, 0), (crowded, 4)):
        simulator.start(np.array([0]), [EpisodeRequest(scene.scene_id, horizon_ticks=3)])
        simulator.receive(1, 1.0)
        assert len(simulator.actor_boxes(0)) == count


def test_a_picture_shows_the_plan_that_is_given_to_it():
    simulator = simulator_of([straight_drive().build()])
    simulator.start(np.array([0]), [EpisodeRequest("hand-made")])
    simulator.receive(1, 1.0)
    plan = np.zeros((64, 3), np.float32)
    plan[:, 0] = np.linspace(0.5, 32.0, 64)
    bare, drawn = simulator.picture(0), simulator.picture(0, plan)
    # 400 px are 80 m, the ego stands at (0.5, 0.72): 20 m ahead is 100 px above it.
    changed = np.argwhere((bare != drawn).any(axis=2))
    assert tuple(drawn[288 - 100, 200]) == PLAN
    assert np.abs(changed[:, 1] - 200).max() <= 3
    assert changed[:, 0].min() == pytest.approx(288 - 160, abs=3)


def test_the_traffic_does_not_react_to_the_ego():
    draft = straight_drive(users=[RoadUser(moving(5.0, 3.0, 0.0, 9.0, FOREVER))], half_width_m=30.0)
    boxes = []
    for control in ((0.0, 0.0), (-9.0, 0.3)):
        simulator = simulator_of([draft.build()])
        simulator.start(np.array([0]), [EpisodeRequest("hand-made", world_seed=len(boxes))])
        for _ in range(6):
            simulator.receive(1, 1.0)
            simulator.send(np.array([0]), control_decision(control), np.array([False]))
        simulator.receive(1, 1.0)
        boxes.append(simulator.actor_boxes(0))
    np.testing.assert_array_equal(*boxes)


def test_the_score_judges_what_the_picture_shows():
    # Crossing traffic of many sizes; in every step the collision count and the drawn boxes agree.
    rng = np.random.default_rng(5)
    users = [
        RoadUser(
            moving(x, -side * 14.0, side * np.pi / 2, rng.uniform(3, 9), FOREVER),
            (rng.uniform(0.6, 9.0), rng.uniform(0.5, 2.5)),
            first=int(rng.integers(0, 20)),
            last=int(rng.integers(25, 60)),
        )
        for x in np.arange(5.0, 60.0, 4.0)
        for side in (-1.0, 1.0)
    ]
    scene = straight_drive(users=users, half_width_m=30.0).build()
    simulator = simulator_of([scene], control_period_us=100_000)
    simulator.start(np.array([0]), [EpisodeRequest("hand-made", horizon_ticks=60)])
    while True:
        batch = simulator.receive(1, 1.0)
        pose = simulator.trail(0)[-1]
        boxes = simulator.actor_boxes(0)
        centre = rig_to_local(np.array([scene.vehicle.centre_offset_m, 0.0]), pose)
        ego = np.array([*centre, pose[2], scene.vehicle.length_m, scene.vehicle.width_m])
        touching = boxes_overlap(np.broadcast_to(ego, boxes.shape), boxes).any()
        assert touching == (batch.measures.values["collision_count"][0] > 0.0)
        if batch.ended[0]:
            break
        simulator.send(np.array([0]), control_decision((0.0, 0.0)), np.array([False]))
    assert ended([batch]) == "COLLISION"


# ---------------------------------------------------------------- the route points where the car must go


def branch_scene() -> Draft:
    """A straight road along x and a branch to the left at x = 30; the recording takes the branch."""
    turn = np.linspace(0.0, np.pi / 2, 20)
    bend = np.stack([30.0 + 15.0 * np.sin(turn), 15.0 - 15.0 * np.cos(turn)], axis=1)
    line = np.concatenate(
        [
            np.stack([np.arange(-30.0, 30.0, 1.0), np.zeros(60)], axis=1),
            bend,
            np.stack([np.full(60, 45.0), np.arange(16.0, 76.0)], axis=1),
        ]
    )
    way = np.concatenate([[0.0], np.cumsum(np.linalg.norm(np.diff(line, axis=0), axis=1))])
    at = 30.0 + np.arange(0.0, 80.0, 1.0)
    x, y = np.interp(at, way, line[:, 0]), np.interp(at, way, line[:, 1])
    yaw = np.unwrap(np.arctan2(np.gradient(y), np.gradient(x)))
    log = np.stack([x, y, yaw, np.full(len(x), 10.0)], axis=1)
    straight = np.array([[-40.0, -6.0], [120.0, -6.0], [120.0, 6.0], [-40.0, 6.0]])
    branch = np.array([[30.0, -6.0], [55.0, -6.0], [55.0, 90.0], [30.0, 90.0]])
    return Draft(log, line, [straight, branch])


def first_observation(draft: Draft, ticks: int = 0, control=(0.0, 0.0), **config) -> dict[str, np.ndarray]:
    return one(draft, control, horizon=max(ticks, 1), **config)[ticks].observation


def test_the_route_follows_the_branch_and_starts_at_the_ego():
    route = first_observation(branch_scene())["route_rig"][0].astype(np.float64)
    assert np.hypot(*route[0]) <= 2.0
    gaps = np.linalg.norm(np.diff(route, axis=0), axis=1)
    assert (gaps > 0.0).all()
    beyond = route[route[:, 0] > 30.0]
    # on the circle of 15 m about (30, 15) or on x = 45
    on_bend = np.abs(np.hypot(beyond[:, 0] - 30.0, beyond[:, 1] - 15.0) - 15.0) <= 0.5
    assert (on_bend | (np.abs(beyond[:, 0] - 45.0) <= 0.5)).all()
    assert not (route[:, 0] > 45.5).any(), "nothing lies on the straight lane beyond"


def test_a_mirrored_map_mirrors_the_observation_to_the_bit():
    draft = replace(branch_scene(), users=[RoadUser(moving(20.0, 2.0, 0.0, 4.0, FOREVER))])
    for ticks in (0, 8):
        left = first_observation(draft, ticks, (0.5, 0.02))
        right = first_observation(draft.mirrored(), ticks, (0.5, -0.02))
        np.testing.assert_array_equal(left["route_rig"] * np.float32([1, -1]), right["route_rig"])
        np.testing.assert_array_equal(left["route_mask"], right["route_mask"])
        np.testing.assert_array_equal(left["actors_rig"][..., :2] * np.float32([1, -1]), right["actors_rig"][..., :2])


@pytest.mark.parametrize("angle", [0.9, 2.2, -3.0])
def test_a_turned_map_looks_the_same_to_the_ego(angle):
    draft = replace(branch_scene(), users=[RoadUser(moving(20.0, 2.0, 0.4, 4.0, FOREVER))])
    here = first_observation(draft, 5, (0.5, 0.02))
    there = first_observation(draft.moved(-300.0, 70.0, angle), 5, (0.5, 0.02))
    for name, array in here.items():
        np.testing.assert_allclose(array, there[name], atol=2e-4, err_msg=name)


def test_an_ego_beside_the_lane_keeps_the_branch():
    draft = branch_scene()
    aside = replace(draft, log=draft.log + np.array([0.0, 3.0, 0.0, 0.0]))
    here, there = (first_observation(d)["route_rig"][0] for d in (draft, aside))
    np.testing.assert_allclose(there, here - np.float32([0.0, 3.0]), atol=1e-4)


def test_the_route_ends_where_it_ends():
    # the straight drive's route goes 60 m beyond the recording's end, 10 s · 10 m/s from its start
    draft = straight_drive()
    observation = one(draft, start_us=9_800_000, horizon=1)[0].observation
    # at x = 88 of 149 to 150: points at 0, 4, … 60 m lie on the route, those from 64 m on do not
    end = draft.route[-1, 0] - 88.0
    known = np.arange(20) * 4.0 <= end
    assert observation["route_mask"][0].tolist() == known.tolist()
    np.testing.assert_allclose(observation["route_rig"][0, ~known], [[end, 0.0]] * int((~known).sum()), atol=1e-4)


# ---------------------------------------------------------------- what is refused


def test_what_it_cannot_do_is_refused_by_name():
    for spec, labels, words in (
        (PolicySpec(cameras={"frnt": (48, 96)}), (), "frnt"),
        (PolicySpec(), ("no_such_plan",), "no_such_plan"),
        (PolicySpec(privileged=("oracle",)), (), "oracle"),
        (PolicySpec(history_step_us=70_000), (), "history_step_us"),
        (PolicySpec(plan_step_us=130_000), (), "plan_step_us"),
    ):
        with pytest.raises(ConfigError, match=words):
            EmbeddedConfig().build(spec, DATASET, 1, labels)
    for options, words in (
        ({"control_period_us": 150_000}, "control_period_us"),
        ({"end_on": ["colision"]}, "collision"),
        ({"threads": 2}, "threads"),
        ({"warmup_ticks": -1}, "warmup_ticks"),
    ):
        with pytest.raises(ConfigError, match=words):
            EmbeddedConfig(**options)


def test_a_decision_for_a_slot_that_does_not_wait_is_a_programs_error():
    simulator = simulator_of([straight_drive().build()], slots=2)
    simulator.start(np.array([0]), [EpisodeRequest("hand-made")])
    with pytest.raises(AssertionError, match="do not wait"):
        simulator.send(np.array([0]), control_decision((0.0, 0.0)), np.array([False]))
    simulator.receive(1, 1.0)
    with pytest.raises(AssertionError, match=r"\[1\]"):
        simulator.send(np.arange(2), control_decision((0.0, 0.0), (0.0, 0.0)), np.zeros(2, bool))


def test_an_empty_map_is_an_error():
    with pytest.raises(ValueError, match="drivable area"):
        replace(straight_drive(), polygons=[]).build()
    with pytest.raises(SceneError, match="handover"):
        replace(straight_drive(), handover=99).build()
