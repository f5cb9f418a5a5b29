"""The batch core: rewards that add up, late worlds, ends by a term, and what reaches the policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from alpagym_runtime.envs.core import CoreBatch, DrivingCore, ScaledTerm, build_terms, driving_score
from alpagym_runtime.envs.presets import PRESETS, reward_section
from alpagym_runtime.errors import ConfigError, SimulatorError
from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.policies.config import RouteFollowerConfig
from alpagym_runtime.rewards.base import Term
from alpagym_runtime.rollouts.collector import Collector
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.testing.examples import assert_same
from alpagym_runtime.testing.scenes import RoadUser, simulator_of, standing, straight_drive
from alpagym_runtime.testing.toy_config import ToyConfig
from alpagym_runtime.types import (
    Decision,
    Ended,
    Episode,
    EpisodeRequest,
    MeasureSeries,
    Observation,
    PolicySpec,
    Sampling,
)

SPEC = PolicySpec(fields=("ego_history_rig", "ego_dynamics_rig", "route_rig", "actors_rig"))


def toy_core(reward="driving", slots=4, terms=None, spec=SPEC, **config) -> DrivingCore:
    simulator = ToyConfig(**config).build(spec, DatasetSection(), slots, ())
    return DrivingCore(simulator, build_terms(reward_section(reward), simulator) if terms is None else terms, spec)


class Swerve:
    """Straight on at a speed and a curvature that the request's seed sets."""

    spec = SPEC

    def act(self, observations: Observation, seeds, sampling: Sampling) -> Decision:
        x = 12.0 * np.arange(1, 65) * 0.1
        bend = (seeds % np.uint64(7)).astype(np.float64)[:, None] * 0.002
        return plan_decision(np.stack([x + 0.0 * bend, bend * x * x, 2.0 * bend * x], axis=-1))


def requests(count: int, horizon: int = 40) -> list[EpisodeRequest]:
    return [EpisodeRequest(f"toy-{i}", -1, horizon, i, i) for i in range(count)]


def collect(core: DrivingCore, policy=None, count: int = 12) -> list[Episode]:
    return Collector(core, policy or Swerve()).collect(requests(count), Sampling())


class Constant(Term):
    """Pays the same each tick."""

    def __init__(self, value: float, needs: tuple[str, ...] = ()) -> None:
        self.value, self.needs = value, frozenset(needs)

    def tick(self, batch, decisions):
        return np.full(len(batch), self.value)


# ---------------------------------------------------------------- rewards add up


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_the_reward_is_the_sum_of_its_scaled_terms(preset):
    core = toy_core(preset)
    for episode in collect(core):
        assert episode.terms.keys() == core.terms.keys()
        np.testing.assert_allclose(episode.rewards, np.sum(list(episode.terms.values()), axis=0), atol=1e-9)


def test_a_term_earns_the_same_alone_as_beside_others():
    core = toy_core("progress_safety")
    together = collect(core, count=3)
    for name, scaled in core.terms.items():
        for alone, episode in zip(collect(toy_core(terms={name: scaled}), count=3), together, strict=True):
            np.testing.assert_allclose(alone.rewards, episode.terms[name], atol=1e-12)


def test_distance_is_paid_with_the_last_tick():
    for episode in collect(toy_core("distance_to_gt")):
        distance = episode.measures["distance_to_gt_m"].value
        assert not episode.rewards[:-1].any()
        assert episode.rewards[-1] == pytest.approx(-0.01 * np.sqrt(np.mean(distance**2)), abs=1e-9)


def test_sums_over_an_episode_are_what_its_measures_say():
    episodes = collect(toy_core("driving"), count=20)
    assert {e.ended for e in episodes} >= {Ended.COLLISION, Ended.OFFROAD}
    for episode in episodes:
        m = episode.measures
        assert episode.terms["collision"].sum() == -m["collision_count"].aggregate()
        assert episode.terms["off_road"].sum() == -m["offroad_count"].aggregate()
        share = np.minimum(m["progress"].value / 0.8, 1.0)
        assert episode.terms["progress"].sum() == pytest.approx(share[-1] - share[0], abs=1e-9)


def test_driving_on_earns_what_stopping_at_the_event_earns():
    users = [RoadUser(standing(20.0, 0.5, 0.0, 150))]
    earned = []
    for end_on in (["collision", "offroad", "goal"], []):
        simulator = simulator_of([straight_drive(users=users).build()], SPEC, end_on=end_on)
        core = DrivingCore(simulator, build_terms(reward_section("progress_safety"), simulator), SPEC)
        (episode,) = Collector(core, Swerve()).collect([EpisodeRequest("hand-made")], Sampling())
        earned.append((len(episode), {name: paid.sum() for name, paid in episode.terms.items()}))
    (stopped, first), (on, second) = earned
    assert on > stopped
    assert second == pytest.approx(first, abs=1e-9)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_late_world_pays_what_a_timely_one_pays(preset):
    timely, late = collect(toy_core(preset)), collect(toy_core(preset, late_measures=True))
    assert toy_core(preset, late_measures=True).reward_is_late
    assert not toy_core(preset).reward_is_late
    for a, b in zip(timely, late, strict=True):
        np.testing.assert_allclose(b.rewards, a.rewards, atol=1e-12)
        for name, paid in a.terms.items():
            np.testing.assert_allclose(b.terms[name], paid, atol=1e-12)
        assert (b.ended, b.driving_score) == (a.ended, a.driving_score)


def test_warm_up_ticks_earn_nothing():
    simulator = simulator_of([straight_drive().build()], SPEC, warmup_ticks=3)
    core = DrivingCore(simulator, {"alive": ScaledTerm(1.0, Constant(1.0))}, SPEC)
    (episode,) = Collector(core, Swerve()).collect([EpisodeRequest("hand-made", -1, 4)], Sampling())
    assert episode.controls.tolist() == [False] * 3 + [True] * 4
    # The tick that ends at the handover was driven by the recording.
    assert episode.terms["alive"].tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("late", [False, True])
def test_a_reward_that_is_not_a_number_stays_visible(late):
    needs = ("progress",) if late else ()
    core = toy_core(terms={"bad": ScaledTerm(1.0, Constant(np.nan, needs))}, late_measures=late)
    for episode in collect(core, count=3):
        assert np.isnan(episode.rewards).all()
        assert np.isfinite(episode.driving_score)


# ---------------------------------------------------------------- a term that stops


class StopAt(Term):
    """Pays 1 a tick and stops a drive after some."""

    def __init__(self, ticks: int) -> None:
        self.ticks = ticks

    def tick(self, batch, decisions):
        return np.ones(len(batch))

    def stop(self, batch):
        return batch.tick >= self.ticks


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("ticks", [1, 4])
def test_a_term_ends_a_drive_as_scored(late, ticks):
    core = toy_core(terms={"stop": ScaledTerm(2.0, StopAt(ticks))}, late_measures=late)
    for episode in collect(core, count=9):
        assert (episode.ended, len(episode)) == (Ended.SCORED, ticks)
        assert episode.ended.terminated
        # each tick pays once, the last one too
        assert episode.rewards.tolist() == [2.0] * ticks
        assert len(episode.observation["time_us"]) == ticks + 1


def test_stopping_one_slot_leaves_its_neighbours_alone():
    class StopFirst(StopAt):
        def stop(self, batch):
            return (batch.tick >= 2) & np.array([r.scene_id == "toy-1" for r in batch.requests])

    expected = collect(toy_core(terms={"one": ScaledTerm(1.0, Constant(1.0))}), count=4)
    found = collect(toy_core(terms={"one": ScaledTerm(1.0, StopFirst(2))}), count=4)
    assert [e.ended for e in found][1] == Ended.SCORED
    for i in (0, 2, 3):
        assert_same(replace(found[i], receipt=None), replace(expected[i], receipt=None), f"episode {i}")


def test_an_end_of_the_world_wins_over_a_stop_in_the_same_tick():
    horizon = 3
    core = toy_core(terms={"stop": ScaledTerm(1.0, StopAt(horizon))})
    (episode,) = Collector(core, Swerve()).collect(requests(1, horizon), Sampling())
    assert episode.ended == Ended.HORIZON


# ---------------------------------------------------------------- wrong measures


def test_an_unknown_measure_is_an_error_before_anything_drives():
    simulator = ToyConfig().build(SPEC, DatasetSection(), 1, ())
    reward = reward_section({"comfy": {"type": "measure", "scale": 1.0, "measure": "progres"}})
    with pytest.raises(ConfigError) as error:
        build_terms(reward, simulator)
    assert "reward.terms.comfy" in str(error.value)
    assert "'progress'" in str(error.value)
    assert "offroad_count" in str(error.value)


@pytest.mark.parametrize("how", ["absent", "never valid", "empty"])
@pytest.mark.parametrize("late", [False, True])
def test_a_measure_that_is_not_delivered_is_an_error_with_its_term_and_scene(how, late):
    core = toy_core("driving", slots=1, late_measures=late)
    receive = core.simulator.receive

    class Forgetful:
        spec = core.simulator.spec
        start, send, scene_hash = core.simulator.start, core.simulator.send, core.simulator.scene_hash

        def receive(self, min_ready, timeout_s):
            batch = receive(min_ready, timeout_s)
            for series in batch.episode_measures.values():
                old = series.pop("offroad_count")
                if how == "never valid":
                    series["offroad_count"] = replace(old, valid=np.zeros_like(old.valid))
                elif how == "empty":
                    series["offroad_count"] = MeasureSeries(old.time_us[:0], old.value[:0], old.valid[:0])
            return batch

    core.simulator = Forgetful()
    with pytest.raises(SimulatorError, match="off_road.*offroad_count.*toy-0") as error:
        Collector(core, Swerve()).collect(requests(1), Sampling())
    assert error.value.permanent


def test_a_scorer_that_cannot_be_imported_fails_the_run():
    class Broken(Constant):
        def tick(self, batch, decisions):
            raise ImportError("no module named scorer")

    with pytest.raises(ImportError, match="scorer"):
        collect(toy_core(terms={"broken": ScaledTerm(1.0, Broken(0.0))}))


# ---------------------------------------------------------------- the driving score


def measured(**values: float) -> dict[str, MeasureSeries]:
    time = np.arange(2)
    return {name: MeasureSeries(time, np.array([0.0, value]), np.ones(2, bool)) for name, value in values.items()}


@pytest.mark.parametrize(
    ("values", "score"),
    [
        ({"progress": 0.4}, 0.5),  # 0.4 / 0.8
        ({"progress": 0.9}, 1.0),
        ({"progress": 0.4, "collision_count": 1.0, "collision_at_fault_count": 0.0}, 0.5),
        ({"progress": 0.9, "collision_count": 1.0, "collision_at_fault_count": 1.0}, 0.0),
        ({"progress": 0.9, "offroad_count": 2.0}, 0.0),
        ({"progress": 0.8, "initial_fault": 1.0}, 1.0),
    ],
)
def test_the_driving_score(values, score):
    assert driving_score(measured(**values)) == pytest.approx(score, abs=1e-12)


def test_what_is_undefined_is_no_driving_score():
    assert np.isnan(driving_score(measured(offroad_count=0.0)))
    undefined = MeasureSeries(np.arange(2), np.zeros(2), np.zeros(2, bool))
    assert np.isnan(driving_score({"progress": undefined}))
    # Unknown is not the same as none.
    assert np.isnan(driving_score(measured(progress=1.0) | {"collision_at_fault_count": undefined}))


def test_an_initial_fault_is_reported_apart_and_not_trained_on():
    users = [RoadUser(standing(3.0, 0.0, 0.0, 150))]
    simulator = simulator_of([straight_drive(users=users).build()], SPEC)
    core = DrivingCore(simulator, build_terms(reward_section("driving"), simulator), SPEC)
    (episode,) = Collector(core, Swerve()).collect([EpisodeRequest("hand-made", -1, 3)], Sampling())
    assert episode.initial_fault
    assert not episode.trainable
    assert episode.terms["collision"].tolist() == [0.0] * 3
    assert episode.driving_score > 0.0


# ---------------------------------------------------------------- what the policy gets


class Carrying:
    """Counts its own ticks in a carry and reads privileged labels."""

    spec = PolicySpec(fields=("ego_dynamics_rig",), privileged=("recorded_plan_rig",), carry={"count": (2,)})

    def __init__(self) -> None:
        self.seen: list[Observation] = []

    def act(self, observations: Observation, seeds, sampling: Sampling) -> Decision:
        self.seen.append(observations)
        decision = plan_decision(observations["recorded_plan_rig"])
        decision.carry["count"] = observations["carry_count"] + np.float32([1.0, 10.0])
        return decision


def test_carry_and_privileged_labels_reach_the_policy():
    policy = Carrying()
    core = toy_core(slots=3, spec=policy.spec)
    # twice, so that slots are used again: a new episode starts from zeros
    for _ in range(2):
        for episode in Collector(core, policy).collect(requests(5, 6), Sampling()):
            assert episode.ended == Ended.HORIZON
            counts = episode.observation["carry_count"]
            assert counts[:, 0].tolist() == list(range(7))
            assert counts[:, 1].tolist() == [10.0 * k for k in range(7)]
            assert episode.observation["recorded_plan_rig"].shape == (7, 64, 3)
    assert all("recorded_plan_rig_mask" in observation for observation in policy.seen)


def test_a_policy_may_spoil_what_it_is_given():
    class Spoiling(Carrying):
        def act(self, observations, seeds, sampling):
            decision = super().act(observations, seeds, sampling)
            decision.plan_rig = decision.plan_rig.copy()
            kept = {name: array.copy() for name, array in observations.items()}
            for array in observations.values():
                array[...] = 0
            observations.update(kept)
            return decision

    expected = Collector(toy_core(slots=2, spec=Carrying.spec), Carrying()).collect(requests(3, 5), Sampling())
    found = Collector(toy_core(slots=2, spec=Carrying.spec), Spoiling()).collect(requests(3, 5), Sampling())
    for a, b in zip(expected, found, strict=True):
        assert_same(a.decisions.plan_rig, b.decisions.plan_rig, "plan_rig")


def test_running_episodes_can_be_started_over():
    core = toy_core(slots=1)
    policy = RouteFollowerConfig().build()
    expected = Collector(toy_core(slots=1), policy).collect(requests(1, 5), Sampling())[0]
    core.start(np.array([0]), [EpisodeRequest("toy-9")])
    batch: CoreBatch = core.receive(1, 1.0)
    core.send(np.array([0]), policy.act(batch.observation, np.zeros(1, np.uint64), Sampling()))
    found = Collector(core, policy).collect(requests(1, 5), Sampling())[0]
    assert_same(found, expected, "the episode")
