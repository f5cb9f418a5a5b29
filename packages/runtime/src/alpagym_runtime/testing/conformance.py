"""Suites that every implementation of the contract passes: inherit one, say how to make yours, and run pytest.

    class TestMyWorld(SimulatorConformance):
        def make(self, slots):
            return MyConfig().build(self.policy_spec, DatasetSection(), slots, self.labels)

They need numpy only; the parts about training import torch when they run.
"""

# ruff: noqa: D102 (the name of a test says the behaviour)

from __future__ import annotations

import copy
import itertools
import json
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import SkipTest

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.envs.core import take_rows
from alpagym_runtime.policies.base import plan_decision, validate_decision
from alpagym_runtime.run_config import RunConfig
from alpagym_runtime.simulators.base import MASKED_FIELDS
from alpagym_runtime.testing.examples import (
    assert_same,
    example_camera_episode,
    example_episode,
    example_observation,
    example_series,
    finite,
    ticks_of,
)
from alpagym_runtime.types import (
    Decision,
    Ended,
    Episode,
    EpisodeRequest,
    Failure,
    Measures,
    MeasureSeries,
    Observation,
    Policy,
    PolicySpec,
    RewardTerm,
    Sampling,
    Simulator,
    SimulatorSpec,
    TickBatch,
    TrainablePolicy,
    Transport,
)

# ---------------------------------------------------------------- simulators


class SimulatorConformance:
    """What holds for every world. Drives constant speed straight on, with a small swerve that depends on the request.

    Attributes:
        policy_spec: what the world is to compute; pass it to `build`.
        labels: the labels it is to compute; pass them to `build`.
        timeout_s: longest wait for all slots.
        horizon: decisions of an episode, so few that driving straight on ends no drive sooner.

    """

    policy_spec: PolicySpec = PolicySpec(fields=("ego_history_rig", "ego_dynamics_rig", "route_rig", "actors_rig"))
    labels: Sequence[str] = ("target_plan_rig", "recorded_plan_rig")
    timeout_s: float = 60.0
    horizon: int = 4

    def make(self, slots: int) -> Simulator:
        """A fresh simulator with at least two scenes' worth of driving."""
        raise NotImplementedError

    # ------------------------------------------------------------ the contract

    def test_a_slot_is_delivered_once(self) -> None:
        with closing(self.make(3)) as simulator:
            simulator.start(np.arange(3), self.requests(simulator, 3))
            seen = [slot for batch in self.receive_all(simulator, 3) for slot in batch.slots.tolist()]
            assert sorted(seen) == [0, 1, 2]
            began = time.monotonic()
            again = simulator.receive(1, 0.05)
            assert len(again) == 0, f"slots {again.slots.tolist()} were delivered twice"
            assert time.monotonic() - began < 5.0, "receive outlasts its timeout"
            check_shapes(again, simulator.spec, self.policy_spec)

    def test_min_ready_waits_for_so_many_slots(self) -> None:
        with closing(self.make(3)) as simulator:
            simulator.start(np.arange(3), self.requests(simulator, 3))
            assert len(simulator.receive(3, self.timeout_s)) == 3

    def test_shapes_and_types(self) -> None:
        with closing(self.make(3)) as simulator:
            for rows in self.drive(simulator, self.requests(simulator, 3)):
                for row in rows:
                    check_shapes(row, simulator.spec, self.policy_spec)

    def test_only_labels_that_were_asked_for(self) -> None:
        wanted = {*self.labels, *self.policy_spec.privileged}
        with closing(self.make(1)) as simulator:
            for row in self.drive(simulator, self.requests(simulator, 1))[0]:
                assert row.labels.keys() == wanted | {f"{name}_mask" for name in wanted}

    def test_every_number_is_finite_even_where_masked(self) -> None:
        with closing(self.make(3)) as simulator:
            for row in chain(self.drive(simulator, self.requests(simulator, 3))):
                for name, array in (row.observation | row.labels).items():
                    assert finite(array), f"{name} at tick {row.tick} is not finite"
                for measures in (row.measures, row.measures_previous):
                    for name, value in measures.values.items():
                        assert finite(value[measures.valid[name]]), f"{name} is valid but not finite"

    def test_the_handover_has_no_previous_measures(self) -> None:
        with closing(self.make(2)) as simulator:
            for rows in self.drive(simulator, self.requests(simulator, 2)):
                handover = rows[0]
                assert handover.tick[0] == 0
                assert not any(valid.any() for valid in handover.measures_previous.valid.values())

    def test_previous_measures_are_those_of_the_last_tick(self) -> None:
        with closing(self.make(2)) as simulator:
            for rows in self.drive(simulator, self.requests(simulator, 2)):
                for before, after in itertools.pairwise(rows):
                    assert_same(after.measures_previous.valid, before.measures.valid, "measures_previous.valid")
                    for name, valid in before.measures.valid.items():
                        old, new = before.measures.values[name], after.measures_previous.values[name]
                        assert (old[valid] == new[valid]).all(), name

    def test_ticks_and_times_follow_the_control_period(self) -> None:
        with closing(self.make(2)) as simulator:
            for rows in self.drive(simulator, self.requests(simulator, 2)):
                assert [int(row.tick[0]) for row in rows] == list(range(len(rows)))
                times = [int(row.observation["time_us"][0]) for row in rows]
                assert all(b > a for a, b in itertools.pairwise(times))
                if simulator.spec.closed_loop:
                    # The last tick may be cut short by an event.
                    steps = np.diff(times)[: len(times) - 2]
                    assert (steps == simulator.spec.control_period_us).all(), f"steps of {steps.tolist()} us"

    def test_the_horizon_is_exact(self) -> None:
        for horizon in (1, self.horizon):
            with closing(self.make(1)) as simulator:
                rows = self.drive(simulator, [replace(self.requests(simulator, 1)[0], horizon_ticks=horizon)])[0]
                assert (Ended(int(rows[-1].ended[0])), int(rows[-1].tick[0])) == (Ended.HORIZON, horizon)
                assert len(rows) == horizon + 1

    def test_an_ended_row_is_complete(self) -> None:
        with closing(self.make(2)) as simulator:
            for rows in self.drive(simulator, self.requests(simulator, 2)):
                last = rows[-1]
                assert last.observation_valid[0]
                assert list(last.episode_measures) == [0]
                series = last.episode_measures[0]
                assert series.keys() >= simulator.spec.measures.keys()
                for name, when in simulator.spec.measures.items():
                    self.check_series(name, series[name], rows if when == "tick" else None)
                for row in rows[:-1]:
                    assert not row.episode_measures

    def test_counts_never_fall(self) -> None:
        with closing(self.make(2)) as simulator:
            for rows in self.drive(simulator, self.requests(simulator, 2, swerve=0.05, horizon=200)):
                for name, series in rows[-1].episode_measures[0].items():
                    if name.endswith("_count"):
                        value = series.value[series.valid]
                        assert (np.diff(value) >= 0.0).all(), name
                        assert value[0] == 0.0, f"{name} at the handover: what is true there is an initial fault"
                        assert (value == np.rint(value)).all(), name

    def test_arrays_belong_to_the_receiver(self) -> None:
        with closing(self.make(2)) as simulator:
            kept = self.drive(simulator, self.requests(simulator, 2))
        with closing(self.make(2)) as simulator:
            spoiled = self.drive(simulator, self.requests(simulator, 2), spoil=True)
        self.check_same_episodes(kept, spoiled)

    def test_decisions_belong_to_the_sender(self) -> None:
        with closing(self.make(1)) as simulator:
            kept = self.drive(simulator, self.requests(simulator, 1))
        with closing(self.make(1)) as simulator:
            spoiled = self.drive(simulator, self.requests(simulator, 1), spoil_decisions=True)
        self.check_same_episodes(kept, spoiled)

    def test_same_bytes_alone_and_in_a_batch(self) -> None:
        with closing(self.make(7)) as simulator:
            requests = self.requests(simulator, 7)
            together = self.drive(simulator, requests)
            # The same simulator again, in other slots and with other neighbours.
            moved = self.drive(simulator, requests[:5], slots=[6, 0, 5, 1, 3])
        self.check_same_episodes(together[:5], moved)
        for request, rows in zip(requests[:2], together[:2], strict=True):
            with closing(self.make(1)) as simulator:
                self.check_same_episodes([rows], self.drive(simulator, [request]))

    def test_equal_requests_give_equal_episodes(self) -> None:
        with closing(self.make(2)) as simulator:
            request = self.requests(simulator, 1)[0]
            first, second = self.drive(simulator, [request, replace(request, policy_seed=99)])
            for a, b in zip(first, second, strict=True):
                assert_same(a.observation, b.observation, "observation: the policy's seed is no business of the world")

    def test_a_start_on_a_running_slot_abandons_it(self) -> None:
        with closing(self.make(1)) as simulator:
            first, second = self.requests(simulator, 2)
            expected = self.drive(simulator, [second])
            for decisions in (0, 1):
                simulator.start(np.array([0]), [first])
                for _ in range(decisions):
                    batch = simulator.receive(1, self.timeout_s)
                    simulator.send(batch.slots, self.decide(batch), np.zeros(1, bool))
                self.check_same_episodes(expected, self.drive(simulator, [second]))

    def test_stop_ends_a_slot_as_scored(self) -> None:
        with closing(self.make(2)) as simulator:
            requests = self.requests(simulator, 2)
            expected = self.drive(simulator, requests)[1]
            simulator.start(np.arange(2), requests)
            waiting = self.handovers(simulator, 2)
            for batch in waiting:
                simulator.send(batch.slots, self.decide(batch), batch.slots == 0)
            delivered = {int(b.slots[0]): b for whole in self.receive_all(simulator, 2) for b in rows_of_batch(whole)}
            stopped, other = delivered[0], delivered[1]
            assert (Ended(int(stopped.ended[0])), int(stopped.tick[0])) == (Ended.SCORED, 0)
            assert stopped.observation_valid[0]
            assert stopped.episode_measures.keys() == {0}
            before = next(b for whole in waiting for b in rows_of_batch(whole) if b.slots[0] == 0)
            assert_same(stopped.observation, before.observation, "the observation of a slot that was stopped")
            assert_same(other.observation, expected[1].observation, "the observation of its neighbour")

    def test_an_unknown_scene_fails_for_good_and_alone(self) -> None:
        with closing(self.make(3)) as simulator:
            requests = self.requests(simulator, 3)
            expected = self.drive(simulator, requests)
            requests[1] = replace(requests[1], scene_id="no such scene")
            rows = self.drive(simulator, requests)
            (failed,) = rows[1]
            assert failed.ended[0] == Ended.FAILED
            failure = failed.failure[0]
            assert failure is not None
            assert failure.kind == "permanent"
            assert "no such scene" in failure.text
            assert not failed.observation_valid[0]
            check_shapes(failed, simulator.spec, self.policy_spec)
            self.check_same_episodes([expected[0], expected[2]], [rows[0], rows[2]])

    def test_a_scene_has_one_hash(self) -> None:
        with closing(self.make(1)) as simulator, closing(self.make(1)) as other:
            first, *rest = simulator.spec.scenes[:2]
            assert simulator.scene_hash(first) == other.scene_hash(first)
            assert all(simulator.scene_hash(scene) != simulator.scene_hash(first) for scene in rest)

    def test_close_twice(self) -> None:
        simulator = self.make(1)
        simulator.start(np.array([0]), self.requests(simulator, 1))
        simulator.close()
        simulator.close()

    # ------------------------------------------------------------ how it drives

    def requests(
        self, simulator: Simulator, count: int, *, swerve: float = 0.0, horizon: int = 0
    ) -> list[EpisodeRequest]:
        """Requests over the first scenes, each with a world seed of its own; `member` sets the swerve's size."""
        scenes = simulator.spec.scenes
        return [
            EpisodeRequest(
                scenes[i % len(scenes)],
                horizon_ticks=horizon or self.horizon,
                world_seed=i,
                policy_seed=i,
                group_id=0,
                member=i + round(1000 * swerve),
            )
            for i in range(count)
        ]

    def decide(self, batch: TickBatch) -> Decision:
        """The suite's driver: present speed, and a curvature of member / 1000 per m."""
        speed = np.maximum(batch.observation["ego_dynamics_rig"][:, :1].astype(np.float64), 2.0)
        bend = np.array([request.member / 1000.0 for request in batch.requests])[:, None]
        x = speed * np.arange(1, self.policy_spec.plan_steps + 1) * (self.policy_spec.plan_step_us * 1e-6)
        return plan_decision(np.stack([x, bend * x * x / 2.0, np.arctan(bend * x)], axis=-1))

    def drive(
        self,
        simulator: Simulator,
        requests: Sequence[EpisodeRequest],
        *,
        slots: Sequence[int] | None = None,
        spoil: bool = False,
        spoil_decisions: bool = False,
    ) -> list[list[TickBatch]]:
        """Every row of every episode from the handover on, as batches of one; `spoil` overwrites what was received."""
        where = np.arange(len(requests)) if slots is None else np.array(slots)
        place = {int(slot): i for i, slot in enumerate(where)}
        episodes: list[list[TickBatch]] = [[] for _ in requests]
        simulator.start(where, requests)
        left = len(requests)
        while left:
            batch = simulator.receive(1, self.timeout_s)
            assert len(batch), f"{left} slots stay silent for {self.timeout_s} s"
            for row in rows_of_batch(batch):
                if row.tick[0] >= 0 or row.ended[0]:
                    episodes[place[int(row.slots[0])]].append(row)
            left -= int(np.count_nonzero(batch.ended))
            waiting = take_rows(batch, np.flatnonzero(batch.ended == Ended.RUNNING))
            decisions = self.decide(waiting)
            if spoil:
                spoil_arrays(batch)
            if len(waiting):
                simulator.send(waiting.slots, decisions, np.zeros(len(waiting), bool))
            if spoil_decisions:
                decisions.plan_rig[:] = -1000.0
        return episodes

    def receive_all(self, simulator: Simulator, count: int) -> list[TickBatch]:
        """Batches until `count` rows came."""
        batches: list[TickBatch] = []
        while sum(map(len, batches)) < count:
            batches.append(simulator.receive(1, self.timeout_s))
            assert len(batches[-1]), f"fewer than {count} slots answer in {self.timeout_s} s"
        return batches

    def handovers(self, simulator: Simulator, count: int) -> list[TickBatch]:
        """Batches in which `count` started slots stand at their handover; warm-up is answered on the way."""
        found: list[TickBatch] = []
        while sum(map(len, found)) < count:
            batch = simulator.receive(1, self.timeout_s)
            assert len(batch), f"fewer than {count} slots answer in {self.timeout_s} s"
            warm = np.flatnonzero(~batch.controls)
            if len(warm):
                rows = take_rows(batch, warm)
                simulator.send(rows.slots, self.decide(rows), np.zeros(len(rows), bool))
            if len(warm) < len(batch):
                found.append(take_rows(batch, np.flatnonzero(batch.controls)))
        return found

    def check_series(self, name: str, series: MeasureSeries, rows: list[TickBatch] | None) -> None:
        """A complete series: well-formed, and equal to what the ticks delivered."""
        shapes = (series.time_us.shape, series.value.shape, series.valid.shape)
        assert len(set(shapes)) == 1, f"{name}: shapes {shapes}"
        assert (series.time_us.dtype, series.value.dtype, series.valid.dtype) == (np.int64, np.float64, bool), name
        assert (np.diff(series.time_us) > 0).all(), f"{name}: times {series.time_us.tolist()}"
        if rows is None:
            return
        assert series.time_us.tolist() == [int(row.observation["time_us"][0]) for row in rows], name
        assert series.valid.tolist() == [bool(row.measures.valid[name][0]) for row in rows], name
        ticks = np.array([row.measures.values[name][0] for row in rows])
        assert (ticks[series.valid] == series.value[series.valid]).all(), name

    def check_same_episodes(self, first: list[list[TickBatch]], second: list[list[TickBatch]]) -> None:
        """Equal to the bit, but for the slots and what is undefined."""
        assert [len(rows) for rows in first] == [len(rows) for rows in second]
        for a, b in zip(chain(first), chain(second), strict=True):
            assert_same(comparable(a), comparable(b), f"tick {a.tick.tolist()}")


def rows_of_batch(batch: TickBatch) -> list[TickBatch]:
    """The rows as batches of one, with their frames; copies."""
    return [
        copy.deepcopy(
            replace(take_rows(batch, np.array([i])), frames=tuple(f for f in batch.frames if f.slot == batch.slots[i]))
        )
        for i in range(len(batch))
    ]


def chain(episodes: Iterable[Iterable[TickBatch]]) -> list[TickBatch]:
    """All rows, episode by episode."""
    return [row for rows in episodes for row in rows]


def comparable(batch: TickBatch) -> TickBatch:
    """The batch as if it had driven in slot 0, and with zeros for undefined measures, which nobody reads."""
    return replace(
        batch,
        slots=np.zeros(len(batch), np.int64),
        frames=tuple(replace(frame, slot=0) for frame in batch.frames),
        measures=_defined(batch.measures),
        measures_previous=_defined(batch.measures_previous),
    )


def _defined(measures: Measures) -> Measures:
    values = {name: np.where(measures.valid[name], value, 0.0) for name, value in measures.values.items()}
    return Measures(values, measures.valid)


def spoil_arrays(batch: TickBatch) -> None:
    """Overwrite every array of a batch that can be written."""
    series = [s for by_name in batch.episode_measures.values() for s in by_name.values()]
    measures = (batch.measures, batch.measures_previous)
    arrays: list[NDArray[Any]] = [batch.slots, batch.tick, batch.controls, batch.observation_valid, batch.ended]
    arrays += [*batch.observation.values(), *batch.labels.values()]
    arrays += [array for m in measures for array in (*m.values.values(), *m.valid.values())]
    arrays += [array for s in series for array in (s.time_us, s.value, s.valid)]
    for array in arrays:
        if array.flags.writeable:
            array[...] = 1


def check_shapes(batch: TickBatch, simulator_spec: SimulatorSpec, spec: PolicySpec) -> None:
    """Shapes and types of a batch of n rows are those of the contract."""
    n = len(batch)
    for name, array, dtype in (
        ("slots", batch.slots, np.int64),
        ("tick", batch.tick, np.int64),
        ("controls", batch.controls, bool),
        ("observation_valid", batch.observation_valid, bool),
        ("ended", batch.ended, np.int64),
    ):
        check_array(name, array, (n,), dtype)
    assert (len(batch.requests), len(batch.failure)) == (n, n)
    assert [failure is not None for failure in batch.failure] == (batch.ended == Ended.FAILED).tolist()
    for measures in (batch.measures, batch.measures_previous):
        assert measures.values.keys() == measures.valid.keys()
        for name, when in simulator_spec.measures.items():
            assert when == "end" or name in measures.values, f"measure {name!r} is missing"
        for name, value in measures.values.items():
            check_array(name, value, (n,), np.float64)
            check_array(f"validity of {name}", measures.valid[name], (n,), bool)
            late = simulator_spec.measures.get(name) == "end"
            assert not (late and measures.valid[name].any()), f"{name} is said to come at the end only"
    expected: dict[str, tuple[tuple[int, ...], Any]] = {
        "time_us": ((), np.int64),
        "ego_history_rig": ((spec.history_steps, 7), np.float32),
        "ego_dynamics_rig": ((7,), np.float32),
        "route_rig": ((spec.route_points, 2), np.float32),
        "actors_rig": ((spec.actors, 9), np.float32),
    }
    for field in ("time_us", *spec.fields):
        shape, dtype = expected[field]
        check_array(field, batch.observation[field], (n, *shape), dtype)
        if field in MASKED_FIELDS:
            check_array(MASKED_FIELDS[field], batch.observation[MASKED_FIELDS[field]], (n, shape[0]), bool)
    for camera, (height, width) in spec.cameras.items():
        check_array(camera, batch.observation[f"camera_{camera}"], (n, spec.frames, height, width, 3), np.uint8)
        check_array(camera, batch.observation[f"camera_{camera}_time_us"], (n, spec.frames), np.int64)
        check_array(camera, batch.observation[f"camera_{camera}_frame_id"], (n, spec.frames), np.uint64)
    for name, label in batch.labels.items():
        mask = name.endswith("_mask")
        check_array(name, label, (n, spec.plan_steps, *(() if mask else (3,))), bool if mask else np.float32)


def check_array(name: str, array: NDArray[Any], shape: tuple[int, ...], dtype: Any) -> None:
    """Exact shape and type."""
    assert array.shape == shape, f"{name} must have shape {list(shape)}, got {list(array.shape)}"
    assert array.dtype == dtype, f"{name} must be {np.dtype(dtype)}, got {array.dtype}"


# ---------------------------------------------------------------- policies


class PolicyConformance:
    """What holds for every policy, bit for bit on the CPU.

    Attributes:
        sampling: how the policy draws.
        sizes: batch sizes whose rows must agree; the largest is the whole batch.

    """

    sampling: Sampling = Sampling()
    sizes: Sequence[int] = (1, 7, 8, 33)

    def make(self) -> Policy:
        """A policy on the CPU; called twice, it gives equal ones."""
        raise NotImplementedError

    def observe(self, spec: PolicySpec, count: int) -> Observation:
        """Observations to decide on."""
        return example_observation(spec, count, 1)

    def test_decisions_fit_the_spec(self) -> None:
        policy = self.make()
        for size in self.sizes:
            decision = validate_decision(self.act(policy, size), policy.spec, size)
            assert decision.error is None, decision.error
            assert decision.plan_rig.dtype == np.float32
            assert decision.version.dtype == np.int64

    def test_rows_do_not_depend_on_the_batch(self) -> None:
        policy = self.make()
        whole = max(self.sizes)
        observation, seeds = self.observe(policy.spec, whole), self.seeds(whole)
        expected = policy.act(observation, seeds, self.sampling)
        order = np.argsort(uniform_order(whole))
        for size in self.sizes:
            rows = order[:size]
            part = policy.act({k: v[rows] for k, v in observation.items()}, seeds[rows], self.sampling)
            assert_same(part, expected.take(rows), f"{size} of {whole} rows")

    def test_same_seeds_same_bytes(self) -> None:
        size = max(self.sizes)
        assert_same(self.act(self.make(), size), self.act(self.make(), size), "the decision")

    def test_mean_mode_ignores_the_seeds(self) -> None:
        policy, size = self.make(), self.sizes[1]
        mean = replace(self.sampling, mode="mean")
        observation = self.observe(policy.spec, size)
        first = policy.act(observation, self.seeds(size), mean)
        assert_same(first.plan_rig, policy.act(observation, self.seeds(size) + np.uint64(1), mean).plan_rig, "plan_rig")

    def test_observations_are_left_alone(self) -> None:
        policy, size = self.make(), self.sizes[1]
        observation = self.observe(policy.spec, size)
        before = {name: array.copy() for name, array in observation.items()}
        policy.act(observation, self.seeds(size), self.sampling)
        assert_same(observation, before, "the observation")

    # ------------------------------------------------------------

    def seeds(self, count: int) -> NDArray[np.uint64]:
        """Seeds [count], all different."""
        return np.arange(count, dtype=np.uint64) * np.uint64(2) + np.uint64(11)

    def act(self, policy: Policy, count: int) -> Decision:
        """Decide on the suite's observations."""
        return policy.act(self.observe(policy.spec, count), self.seeds(count), self.sampling)


class TrainablePolicyConformance(PolicyConformance):
    """What holds, on top of that, for policies that can be trained.

    Attributes:
        score_tolerance: most difference of a re-scored log-probability, one factor.

    """

    score_tolerance: float = 1e-6

    def test_other_seeds_other_samples(self) -> None:
        policy, size = self.trainable(), self.sizes[1]
        observation = self.observe(policy.spec, size)
        first = policy.act(observation, self.seeds(size), self.sampling)
        second = policy.act(observation, self.seeds(size) + np.uint64(1), self.sampling)
        changed = (first.plan_rig != second.plan_rig).reshape(size, -1).any(axis=1)
        assert changed.all(), f"rows {np.flatnonzero(~changed).tolist()} ignore their seed"

    def test_score_gives_the_sampled_log_probability(self) -> None:
        policy, size = self.trainable(), max(self.sizes)
        decision = self.act(policy, size)
        assert decision.log_prob_mask.any(), "no factor of the log-probability counts"
        score = policy.score(self.observe(policy.spec, size), decision, self.sampling)
        assert tuple(score.log_prob.shape) == decision.log_prob.shape
        assert tuple(score.entropy.shape) == (size,)
        again = score.log_prob.detach().cpu().numpy()
        worst = np.abs(again - decision.log_prob)[decision.log_prob_mask].max()
        assert worst <= self.score_tolerance, f"the log-probability is off by {worst}"

    def test_score_does_not_depend_on_the_batch(self) -> None:
        policy, size = self.trainable(), max(self.sizes)
        observation, decision = self.observe(policy.spec, size), self.act(policy, size)
        whole = policy.score(observation, decision, self.sampling).log_prob.detach().cpu().numpy()
        rows = np.arange(size)[::-3].copy()
        part = policy.score({k: v[rows] for k, v in observation.items()}, decision.take(rows), self.sampling)
        difference = np.abs(part.log_prob.detach().cpu().numpy() - whole[rows])[decision.log_prob_mask[rows]]
        assert difference.max() <= self.score_tolerance

    def test_score_is_differentiable(self) -> None:
        policy, size = self.trainable(), self.sizes[1]
        score = policy.score(self.observe(policy.spec, size), self.act(policy, size), self.sampling)
        score.log_prob.sum().backward()
        gradients = [p.grad for p in policy.module.parameters() if p.grad is not None]
        policy.module.zero_grad(set_to_none=True)
        assert gradients, "no parameter has a gradient"
        assert all(bool(g.isfinite().all()) for g in gradients)
        assert any(bool((g != 0).any()) for g in gradients)

    def test_a_value_is_of_the_observation_alone(self) -> None:
        policy, size = self.trainable(), self.sizes[1]
        observation, decision = self.observe(policy.spec, size), self.act(policy, size)
        value = policy.score(observation, decision, self.sampling).value
        if value is None:
            raise SkipTest("the policy gives no values")
        assert tuple(value.shape) == (size,)
        assert bool(value.isfinite().all())
        # The value of a drive's last observation is asked for beside another tick's decision.
        turned = policy.score(observation, decision.take(np.arange(size)[::-1].copy()), self.sampling).value
        assert turned is not None
        assert float((turned - value).detach().abs().max()) <= self.score_tolerance

    def test_load_takes_weights_and_version(self) -> None:
        policy, size = self.trainable(), self.sizes[1]
        before = self.act(policy, size)
        state = {name: value.clone() for name, value in policy.module.state_dict().items()}
        policy.load({name: value * 0.9 if value.is_floating_point() else value for name, value in state.items()}, 5)
        assert (self.act(policy, size).version == 5).all()
        policy.load(state, 6)
        after = self.act(policy, size)
        assert (after.version == 6).all()
        assert_same(after.plan_rig, before.plan_rig, "the plan with the old weights back")

    def trainable(self) -> TrainablePolicy:
        """A fresh policy, as what it must be."""
        policy = self.make()
        assert isinstance(policy, TrainablePolicy), f"{type(policy).__name__} lacks a part of TrainablePolicy"
        assert not policy.spec.privileged, "a policy that reads privileged labels is refused as a trainee"
        return policy


def uniform_order(count: int) -> NDArray[np.float64]:
    """Numbers [count] whose order is far from sorted, the same each time."""
    return np.modf(np.arange(count) * 0.6180339887498949)[0]


# ---------------------------------------------------------------- reward terms


class RewardTermConformance:
    """What holds for every reward term, on made-up measures of an episode.

    Attributes:
        ticks: T of that episode.
        measures: what the simulator is said to deliver, besides the usual.

    """

    ticks: int = 12
    measures: Sequence[str] = ()
    usual: ClassVar[Sequence[str]] = (
        "collision_count",
        "collision_at_fault_count",
        "offroad_count",
        "progress",
        "along_track_error_m",
        "distance_to_gt_m",
        "route_deviation_m",
        "speed_mps",
        "acceleration_mps2",
        "lateral_acceleration_mps2",
        "jerk_mps3",
        "yaw_rate_radps",
        "initial_fault",
    )

    def make(self, simulator_spec: SimulatorSpec) -> RewardTerm:
        """The term for a simulator."""
        raise NotImplementedError

    def value(self, measures: dict[str, MeasureSeries]) -> float:
        """What the term is worth over an episode, computed from its whole series in the plainest way."""
        raise SkipTest("the suite was given no reference value")

    def test_it_needs_only_what_the_simulator_has(self) -> None:
        spec = self.simulator_spec()
        assert self.make(spec).needs <= spec.measures.keys()

    def test_ticks_and_end_add_up_to_the_value(self) -> None:
        for seed in range(20):
            term, episode = self.make(self.simulator_spec()), self.episode(seed)
            paid = float(term.tick(ticks_of(episode.measures), None).sum()) + term.end(episode)
            assert abs(paid - self.value(episode.measures)) <= 1e-9, f"seed {seed}"

    def test_ticks_have_no_memory(self) -> None:
        term, batch = self.make(self.simulator_spec()), ticks_of(self.episode().measures)
        paid = term.tick(batch, None)
        assert (paid.shape, paid.dtype) == ((self.ticks,), np.float64)
        order = np.argsort(uniform_order(self.ticks))
        assert_same(term.tick(take_rows(batch, order), None), paid[order], "shuffled ticks")
        for k in order.tolist():
            assert_same(term.tick(take_rows(batch, np.array([k])), None), paid[[k]], f"tick {k} alone")

    def test_what_it_pays_is_finite_where_measures_are_not(self) -> None:
        term, episode = self.make(self.simulator_spec()), self.episode()
        assert finite(term.tick(ticks_of(episode.measures), None))
        assert finite(np.array(term.end(episode)))

    def test_undefined_measures_pay_nothing(self) -> None:
        term, batch = self.make(self.simulator_spec()), ticks_of(self.episode().measures)
        for measures in (batch.measures, batch.measures_previous):
            for valid in measures.valid.values():
                valid[:] = False
        assert (term.tick(batch, None) == 0.0).all()

    def test_the_handover_pays_nothing(self) -> None:
        term, batch = self.make(self.simulator_spec()), ticks_of(self.episode().measures)
        batch.tick[:] = 0
        for valid in batch.measures_previous.valid.values():
            valid[:] = False
        assert (term.tick(batch, None) == 0.0).all()

    def test_batches_are_left_alone(self) -> None:
        term, episode = self.make(self.simulator_spec()), self.episode()
        batch, before = ticks_of(episode.measures), ticks_of(episode.measures)
        term.tick(batch, None)
        term.stop(batch)
        assert_same(batch, before, "the batch")

    def test_stop_is_a_row_of_truth_values_or_none(self) -> None:
        term, batch = self.make(self.simulator_spec()), ticks_of(self.episode().measures)
        stop = term.stop(batch)
        if stop is not None:
            check_array("stop", stop, (self.ticks,), bool)

    # ------------------------------------------------------------

    def simulator_spec(self) -> SimulatorSpec:
        """A world that delivers all the measures each tick."""
        return SimulatorSpec(True, 200_000, 1, ("example",), dict.fromkeys((*self.usual, *self.measures), "tick"))

    def episode(self, seed: int = 0) -> Episode:
        """An episode with made-up series of all the measures."""
        series = {name: example_series(name, self.ticks, seed) for name in self.simulator_spec().measures}
        return replace(example_episode(self.ticks, seed), measures=series)


# ---------------------------------------------------------------- transports


class TransportConformance:
    """What holds for every transport."""

    def make(self, directory: Path) -> tuple[Transport, Transport]:
        """The sender's and the receiver's end; one object may be both."""
        raise NotImplementedError

    def test_what_arrives_equals_what_was_sent(self, tmp_path: Path) -> None:
        sender, receiver = self.make(tmp_path)
        examples = (example_episode(), example_episode(1, 2), empty_episode())
        pictures = (example_camera_episode(), example_camera_episode(4, 1, jpeg=True))
        for episode in (*examples, *pictures):
            assert_same(receiver.receive(sender.send(episode)), episode, "the episode")

    def test_receive_does_not_consume(self, tmp_path: Path) -> None:
        sender, receiver = self.make(tmp_path)
        handle = sender.send(example_episode())
        assert_same(receiver.receive(handle), receiver.receive(handle), "the episode")

    def test_two_equal_episodes_have_two_handles(self, tmp_path: Path) -> None:
        sender, receiver = self.make(tmp_path)
        first, second = sender.send(example_episode()), sender.send(example_episode())
        assert first != second
        receiver.discard(first)
        assert_same(receiver.receive(second), example_episode(), "the episode that was not discarded")

    def test_discard_is_idempotent(self, tmp_path: Path) -> None:
        sender, receiver = self.make(tmp_path)
        handle = sender.send(example_episode())
        receiver.discard(handle)
        receiver.discard(handle)
        receiver.discard("never sent")

    def test_a_discarded_or_unknown_handle_is_a_key_error(self, tmp_path: Path) -> None:
        sender, receiver = self.make(tmp_path)
        handle = sender.send(example_episode())
        receiver.discard(handle)
        for gone in (handle, "never sent"):
            refused = ""
            try:
                receiver.receive(gone)
            except KeyError as err:
                refused = str(err)
            assert gone in refused, f"receive({gone!r}) must raise a KeyError that names the handle, got {refused!r}"

    def test_an_episode_outlives_its_handle(self, tmp_path: Path) -> None:
        sender, receiver = self.make(tmp_path)
        handle = sender.send(example_camera_episode())
        episode = receiver.receive(handle)
        receiver.discard(handle)
        sender.close()
        assert_same(episode, example_camera_episode(), "an episode that is still held")

    def test_a_reader_may_write_to_what_it_received(self, tmp_path: Path) -> None:
        sender, receiver = self.make(tmp_path)
        sent = example_episode()
        received = receiver.receive(sender.send(sent))
        for array in (received.rewards, received.observation["ego_history_rig"]):
            array += 1.0  # a read-only view would raise

    def test_a_handle_is_no_path(self, tmp_path: Path) -> None:
        sender, receiver = self.make(tmp_path)
        sender.send(example_episode())
        outside = tmp_path.parent / "outside.arrow"
        outside.write_bytes(b"precious")
        for handle in ("../outside", "../outside.arrow", str(outside), "", ".", "a/b", "a\0b", "x" * 5000):
            receiver.discard(handle)
            try:
                receiver.receive(handle)
            except KeyError:
                continue
            raise AssertionError(f"receive({handle!r}) found something")
        assert outside.read_bytes() == b"precious"

    def test_closing_frees_what_nobody_discarded(self, tmp_path: Path) -> None:
        sender, _ = self.make(tmp_path)
        handle = sender.send(example_episode())
        sender.close()
        sender.close()
        try:
            self.make(tmp_path)[1].receive(handle)
        except KeyError:
            return
        raise AssertionError(f"{handle!r} is still there after its sender closed")


def empty_episode() -> Episode:
    """A void episode: it failed before its first observation."""
    failure = Failure("permanent", "INVALID_SCENE", "no scene")
    return Episode(EpisodeRequest("no scene"), Ended.FAILED, failure, {}, float("nan"), False)


# ---------------------------------------------------------------- trainers


class TrainerConformance:
    """What holds for every trainer: a run is a function of its config, however often it is stopped and resumed.

    Attributes:
        stops: the run is stopped after so many training steps, in turn; all must come before its last step.

    """

    stops: Sequence[int] = (1, 2)

    def config(self) -> RunConfig:
        """A run with this trainer that takes about a second; the toy world serves."""
        raise NotImplementedError

    def test_same_config_same_results(self, tmp_path: Path) -> None:
        first, second = (self.train(tmp_path / name) for name in ("first", "second"))
        assert_same(first, second, "the run")

    def test_a_stopped_run_resumes_to_the_results_of_an_unbroken_one(self, tmp_path: Path) -> None:
        whole = self.train(tmp_path / "whole")
        for stop in self.stops:
            directory = tmp_path / f"stop_{stop}"
            self.stop(directory, stop)
            assert_same(self.train(directory), whole, f"the run that was stopped after {stop} steps")

    def test_a_run_that_is_stopped_again_and_again_gets_there(self, tmp_path: Path) -> None:
        for stop in sorted(self.stops):
            self.stop(tmp_path / "broken", stop)
        assert_same(self.train(tmp_path / "broken"), self.train(tmp_path / "whole"), "the run")

    # ------------------------------------------------------------

    def train(self, directory: Path) -> dict[str, Any]:
        """Train to the end, from where the directory stands; everything that lasts, but for times."""
        from alpagym_runtime.trainers.run import Run

        directory.mkdir(exist_ok=True)
        outcome = Run(self.config(), directory).train()
        assert outcome.completed
        return run_results(directory)

    def stop(self, directory: Path, steps: int) -> None:
        """Train until so many steps are done."""
        from alpagym_runtime.trainers.run import Run

        directory.mkdir(exist_ok=True)
        outcome = Run(self.config(), directory, stop_requested=lambda: len(training_rows(directory)) >= steps).train()
        assert not outcome.completed
        assert outcome.summary["status"] == "stopped"
        assert len(training_rows(directory)) == steps, "a stop waits for the step in hand only"


def training_rows(directory: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl that are training steps."""
    file = directory / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row for row in rows if not row["stage"].startswith("evaluate/")]


def run_results(directory: Path) -> dict[str, Any]:
    """What a training run leaves, but for times and machine: metrics, evaluated drives, summary, newest checkpoint."""
    import pyarrow.parquet as pq

    from alpagym_runtime.trainers.checkpoints import CheckpointStore, load_checkpoint

    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((directory / "summary.json").read_text())
    newest = CheckpointStore(directory / "checkpoints", 1).latest()
    assert newest is not None, "a run keeps a checkpoint"
    checkpoint = load_checkpoint(newest)
    tensors = checkpoint.weights | {f"optimiser.{name}": value for name, value in checkpoint.optimiser.items()}
    timed = ("seconds", "throughput")
    return {
        "metrics": [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines],
        "per_scene": pq.read_table(directory / "per_scene.parquet").to_pylist(),
        "summary": {k: v for k, v in summary.items() if k not in ("wall_s", "cpu_s", "peak_rss_bytes")},
        "checkpoint": newest.name,
        "state": checkpoint.state,
        "tensors": {name: tensor.numpy() for name, tensor in sorted(tensors.items())},
    }
