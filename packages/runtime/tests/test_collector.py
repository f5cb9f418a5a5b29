"""The collector: episodes depend on their requests only, failures stay where they belong, weights change in pauses."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from alpagym_runtime.envs.core import DrivingCore, build_terms
from alpagym_runtime.envs.presets import reward_section
from alpagym_runtime.errors import SimulatorError
from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.random import mix_int, uniform
from alpagym_runtime.rollouts.collector import Collector
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
from alpagym_runtime.testing.examples import assert_same
from alpagym_runtime.testing.toy_config import ToyConfig
from alpagym_runtime.types import Decision, Ended, Episode, EpisodeRequest, PolicySpec, Ragged, Sampling


class Wander:
    """Draws a curvature from each seed; keeps a count as carry and a trace of as many numbers as the tick."""

    spec = PolicySpec(
        fields=("ego_history_rig", "ego_dynamics_rig", "route_rig", "actors_rig"),
        privileged=("recorded_plan_rig",),
        carry={"count": (1,)},
    )

    def __init__(self) -> None:
        self.version = 0
        self.rows: list[int] = []
        self.seeds: list[np.ndarray] = []

    def act(self, observations, seeds, sampling) -> Decision:
        self.rows.append(len(seeds))
        self.seeds.append(seeds)
        x = 9.0 * np.arange(1, 65) * 0.1
        draw = uniform(seeds, 1)
        bend = 0.02 * (draw - 0.5)
        decision = plan_decision(np.stack([x + 0.0 * bend, bend * x * x / 2.0, bend * x], axis=-1))
        count = observations["carry_count"][:, 0].astype(int)
        lengths = count % 4
        decision.trace["draw"] = draw
        decision.trace["tokens"] = Ragged(
            np.concatenate([np.arange(n) + 100 * c for n, c in zip(lengths, count, strict=True)]).astype(np.int64),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        )
        decision.carry["count"] = observations["carry_count"] + np.float32(1.0)
        decision.version[:] = self.version
        return decision


class Changed(Wander):
    """`Wander` whose decisions are changed where `when(observations, seeds)` [N] says so."""

    def __init__(self, when, change) -> None:
        super().__init__()
        self.when, self.change = when, change

    def act(self, observations, seeds, sampling) -> Decision:
        decision = super().act(observations, seeds, sampling)
        self.change(decision, np.flatnonzero(self.when(observations, seeds)))
        return decision


def core_of(slots: int, world=None, spec=Wander.spec, split="train") -> DrivingCore:
    simulator = (world or ToyConfig()).build(spec, DatasetSection(split=split, train_scenes=8), slots, ())
    return DrivingCore(simulator, build_terms(reward_section("driving"), simulator), spec)


def requests(count: int, horizon: int = 8, name: str = "toy-{}") -> list[EpisodeRequest]:
    return [EpisodeRequest(name.format(i % 5), -1, horizon - i % 3, i, 100 + i, i // 4, i % 4) for i in range(count)]


def collect(count: int = 12, *, slots: int = 4, policy=None, world=None, **options) -> list[Episode]:
    return Collector(core_of(slots, world), policy or Wander(), **options).collect(requests(count), Sampling())


# ---------------------------------------------------------------- the same episodes, whatever runs beside them


@pytest.mark.parametrize("world", [ToyConfig(), EmbeddedConfig(), EmbeddedConfig(threads=1, warmup_ticks=2)])
def test_episodes_do_not_depend_on_the_number_of_slots(world):
    name = "toy-{}" if isinstance(world, ToyConfig) else "procedural-train-{:06d}"
    wanted = requests(16, name=name)
    expected = Collector(core_of(1, world), Wander()).collect(wanted, Sampling())
    for slots in (7, 64):
        found = Collector(core_of(slots, world), Wander(), min_ready=slots // 3).collect(wanted, Sampling())
        for i, (a, b) in enumerate(zip(expected, found, strict=True)):
            assert_same(a, b, f"episode {i} with {slots} slots")


def test_episodes_come_in_the_order_of_their_requests():
    wanted = requests(20)
    heard: list[Episode] = []
    collector = Collector(core_of(3), Wander())
    episodes = collector.collect(wanted, Sampling(), heard.append)
    assert [episode.request for episode in episodes] == wanted
    # The callback hears each once, when it ends.
    assert sorted(map(id, heard)) == sorted(map(id, episodes))
    assert collector.counts["episodes"] == 20


def test_no_requests_give_no_episodes():
    assert Collector(core_of(2), Wander()).collect([], Sampling()) == []


def test_an_episode_has_one_more_observation_than_decisions():
    for episode in collect():
        ticks = len(episode)
        assert ticks == len(episode.decisions) == len(episode.controls) == len(episode.rewards) > 0
        assert {len(array) for array in episode.observation.values()} == {ticks + 1}
        assert {len(array) for array in episode.labels.values()} == {ticks}
        assert {len(series.value) for series in episode.measures.values()} == {ticks + 1}


def test_a_decisions_seed_is_mixed_from_policy_seed_tick_and_attempt():
    policy = Wander()
    request = EpisodeRequest("toy-0", -1, 3, 0, 2**63 + 5)
    Collector(core_of(1), policy).collect([request], Sampling())
    assert [int(seeds[0]) for seeds in policy.seeds] == [mix_int(2**63 + 5, tick, 0) for tick in range(3)]


def test_warm_up_ticks_have_seeds_of_their_own():
    policy = Wander()
    world = EmbeddedConfig(warmup_ticks=3, control_period_us=300_000)
    request = EpisodeRequest("procedural-train-000000", -1, 3, 0, 4)
    Collector(core_of(1, world), policy).collect([request], Sampling())
    assert len({int(seeds[0]) for seeds in policy.seeds}) == len(policy.seeds) == 6


def test_ragged_traces_keep_their_rows():
    for episode in collect(9, slots=2):
        tokens = episode.decisions.trace["tokens"]
        # tick k holds k % 4 numbers from 100 k on
        rows = np.split(tokens.values, tokens.offsets[1:-1])
        assert [row.tolist() for row in rows] == [[100 * k + n for n in range(k % 4)] for k in range(len(episode))]


def test_episodes_share_no_memory():
    first, second = collect(2, slots=1)
    kept = {name: array.copy() for name, array in second.observation.items()}
    for array in (*first.observation.values(), first.rewards, first.decisions.plan_rig, *first.terms.values()):
        array[...] = 7
    assert_same(second.observation, kept, "the second episode")


def test_what_the_policy_was_given_never_changes():
    policy, kept = Wander(), []
    act = policy.act

    def keep(observations, seeds, sampling):
        kept.append((observations, {name: array.copy() for name, array in observations.items()}))
        return act(observations, seeds, sampling)

    policy.act = keep
    Collector(core_of(4, EmbeddedConfig()), policy).collect(requests(9, name="procedural-train-{:06d}"), Sampling())
    for given, copied in kept:
        assert_same(given, copied, "the observation")


def test_a_used_collector_makes_the_same_episodes():
    collector = Collector(core_of(3), Wander())
    expected = collector.collect(requests(7), Sampling())
    collector.collect(requests(20, horizon=90), Sampling())  # longer ones make its arrays grow
    for a, b in zip(expected, collector.collect(requests(7), Sampling()), strict=True):
        assert_same(a, b, "the episode")


# ---------------------------------------------------------------- failures of the world


def test_a_transient_failure_is_retried_with_the_same_seeds():
    collector = Collector(core_of(4, ToyConfig(fail_every=3)), Wander())
    wanted = requests(12)
    episodes = collector.collect(wanted, Sampling())
    retried = [episode for episode in episodes if episode.request.attempt]
    assert len(retried) == collector.counts["retried"] == 4
    for request, episode in zip(wanted, episodes, strict=True):
        assert episode.ended != Ended.FAILED
        assert replace(episode.request, attempt=0) == request
    # nothing of the failed attempt is left in the episode
    assert all(len(episode.observation["time_us"]) == len(episode) + 1 for episode in retried)
    fine = [episode for episode in episodes if not episode.request.attempt]
    for episode in fine:
        assert_same(episode, collect()[wanted.index(episode.request)], "an episode beside retried ones")


class AlwaysFails:
    """The toy world, in which one scene's attempts all fail."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.attempts: list[int] = []

    def build(self, *args):
        simulator = ToyConfig().build(*args)
        begin = simulator._begin

        def counted(slot, request):
            begin(slot, request)
            if request.scene_id == "toy-2":
                self.attempts.append(request.attempt)
                simulator._fails[slot] = True

        simulator._begin = counted
        fail = simulator._fail
        simulator._fail = lambda slot, failure: fail(slot, replace(failure, kind=self.kind))
        return simulator


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_retries_are_bounded(retries):
    world = AlwaysFails("transient")
    collector = Collector(core_of(2, world), Wander(), retries=retries)
    episodes = collector.collect(requests(5), Sampling())
    assert world.attempts == list(range(retries + 1))
    assert [e.ended == Ended.FAILED for e in episodes] == [False, False, True, False, False]
    failed = episodes[2]
    assert failed.failure.kind == "transient"
    assert np.isnan(failed.driving_score)
    assert not failed.trainable
    assert (collector.counts["failed"], collector.counts["retried"]) == (1, retries)


def test_a_permanent_failure_is_never_retried():
    world = AlwaysFails("permanent")
    collector = Collector(core_of(2, world), Wander(), retries=5)
    episodes = collector.collect([*requests(3), replace(requests(1)[0], scene_id="no such scene")], Sampling())
    assert world.attempts == [0]
    assert [e.ended == Ended.FAILED for e in episodes] == [False, False, True, True]
    assert "no such scene" in episodes[3].failure.text
    assert collector.counts["retried"] == 0


def test_a_silent_simulator_is_a_timeout():
    core = core_of(2)
    nothing = core.simulator.receive(0, 0.0)  # no slot has begun
    core.simulator.receive = lambda min_ready, timeout_s: nothing
    with pytest.raises(SimulatorError, match="silent") as error:
        Collector(core, Wander(), timeout_s=0.01).collect(requests(2), Sampling())
    assert error.value.code == "TIMEOUT"


# ---------------------------------------------------------------- failures of the policy


def some_in_the_third_tick(observations, seeds):
    return (observations["carry_count"][:, 0] == 2.0) & (seeds % np.uint64(3) == 0)


def spoil_plan(value: float):
    def change(decision, rows):
        decision.plan_rig[rows, 5, 1] = value

    return change


def say_error(decision, rows):
    decision.error = np.full(len(decision), None, object)
    decision.error[rows] = "out of tokens"


def spoil_carry(decision, rows):
    decision.carry["count"] = decision.carry["count"].copy()
    decision.carry["count"][rows] = np.nan


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (spoil_plan(np.nan), "finite"),
        (spoil_plan(np.inf), "finite"),
        (say_error, "out of tokens"),
        (spoil_carry, "carry.count"),
    ],
    ids=["nan", "inf", "error", "carry"],
)
def test_a_row_that_the_policy_fails_voids_its_episode_only(change, words):
    policy = Changed(some_in_the_third_tick, change)
    collector = Collector(core_of(4), policy)
    episodes = collector.collect(requests(12), Sampling())
    failed = [e.ended == Ended.FAILED for e in episodes]
    assert 0 < sum(failed) < 12
    assert collector.counts["failed"] == sum(failed)
    assert collector.counts["episodes"] == 12 - sum(failed)
    for episode, void, expected in zip(episodes, failed, collect(), strict=True):
        if void:
            assert (episode.failure.code, episode.failure.kind) == ("POLICY", "permanent")
            assert words in episode.failure.text
            assert not episode.trainable
        else:
            assert_same(episode, expected, "an episode beside void ones")


def test_when_every_row_fails_every_episode_is_void():
    policy = Changed(lambda observations, seeds: np.ones(len(seeds), bool), spoil_plan(np.nan))
    episodes = Collector(core_of(3), policy).collect(requests(7), Sampling())
    assert {episode.ended for episode in episodes} == {Ended.FAILED}
    assert len(episodes) == 7


def test_a_shape_that_is_wrong_stops_everything():
    def shorten(decision, rows):
        decision.plan_rig = decision.plan_rig[:, :-1]

    with pytest.raises(ValueError, match=r"plan_rig.*64"):
        collect(policy=Changed(some_in_the_third_tick, shorten))


def test_what_was_left_driving_disturbs_no_collection():
    wanted = requests(6, name="procedural-train-{:06d}")
    core = core_of(6, EmbeddedConfig())
    # a collection that broke off: slots 2 to 5 have decisions in hand, and are about to end
    core.start(np.arange(6), [replace(request, horizon_ticks=1 + i % 2) for i, request in enumerate(wanted)])
    batch = core.receive(6, 1.0)
    decisions = Wander().act(batch.observation, np.zeros(6, np.uint64), Sampling())
    core.send(np.arange(2, 6), decisions.take(np.arange(2, 6)))
    found = Collector(core, Wander()).collect(wanted[:2], Sampling())
    expected = Collector(core_of(2, EmbeddedConfig()), Wander()).collect(wanted[:2], Sampling())
    for a, b in zip(found, expected, strict=True):
        assert_same(a, b, "the episode")


# ---------------------------------------------------------------- weights


def test_each_tick_records_the_version_that_decided_it():
    policy = Wander()
    collector = Collector(core_of(1), policy)
    act = policy.act

    def newer_each_time(*args):
        decision = act(*args)
        policy.version += 1
        return decision

    policy.act = newer_each_time
    (episode,) = collector.collect([EpisodeRequest("toy-0", -1, 5)], Sampling())
    assert episode.decisions.version.tolist() == [0, 1, 2, 3, 4]


def test_a_pause_waits_for_the_forward_in_hand_and_holds_the_next():
    policy = Wander()
    inside, go_on = threading.Event(), threading.Event()
    act, calls = policy.act, []

    def slow(*args):
        calls.append(policy.version)
        if len(calls) == 2:
            inside.set()
            assert go_on.wait(10.0)
        assert policy.version == calls[-1], "weights changed within a forward"
        return act(*args)

    policy.act = slow
    collector = Collector(core_of(2), policy)
    episodes: list[Episode] = []
    worker = threading.Thread(target=lambda: episodes.extend(collector.collect(requests(4), Sampling())))
    worker.start()
    assert inside.wait(10.0)
    paused = threading.Event()
    seen: list[int] = []

    def load():
        with collector.paused():
            paused.set()
            before = len(calls)
            policy.version = 1
            worker.join(0.1)  # time in which a forward could begin
            seen.append(len(calls) - before)

    loader = threading.Thread(target=load)
    loader.start()
    assert not paused.wait(0.1), "the pause began while a forward was running"
    go_on.set()
    loader.join(10.0)
    worker.join(10.0)
    assert not worker.is_alive()
    assert seen == [0], "a forward began in the pause"
    assert len(episodes) == 4
    versions = np.concatenate([episode.decisions.version for episode in episodes])
    assert set(versions.tolist()) == {0, 1}
    for episode in episodes:
        assert (np.diff(episode.decisions.version) >= 0).all()


# ---------------------------------------------------------------- what is kept about an episode


def test_the_sampling_the_actor_and_the_receipt_are_kept():
    sampling = Sampling("mean", 0.5, 0.9)
    collector = Collector(core_of(2), Wander(), config_hash="abc", actor="expert")
    for episode in collector.collect(requests(3), sampling):
        assert (episode.sampling, episode.actor) == (sampling, "expert")
        assert episode.receipt.config_hash == "abc"
        assert episode.receipt.scene_hash == collector.core.simulator.scene_hash(episode.request.scene_id)
        assert {"python", "numpy", "alpagym-runtime"} <= episode.receipt.versions.keys()
        assert episode.receipt.cpu
