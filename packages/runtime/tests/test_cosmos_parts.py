"""Our side of a Cosmos-RL job, without Cosmos-RL: prompts, groups, parcels, steps, digests, the TOML."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from alpagym_plugins import ConfigError
from alpagym_runtime.envs.core import DrivingCore, build_terms
from alpagym_runtime.errors import SimulatorError
from alpagym_runtime.machine import Machine
from alpagym_runtime.rollouts.collector import Collector
from alpagym_runtime.run_config import from_mapping
from alpagym_runtime.testing.examples import assert_same
from alpagym_runtime.testing.toy_config import ToyConfig
from alpagym_runtime.trainers.checkpoints import load_weights
from alpagym_runtime.trainers.cosmos.digests import Digests, WeightsError, digest, refuse_buffers
from alpagym_runtime.trainers.cosmos.double import Mail
from alpagym_runtime.trainers.cosmos.groups import Driven, Groups, credited
from alpagym_runtime.trainers.cosmos.housekeeping import redis_text
from alpagym_runtime.trainers.cosmos.journal import Journal, Presence, Step
from alpagym_runtime.trainers.cosmos.learning import (
    Lesson,
    _collapsed,
    fresh_enough,
    learn,
    loop_config,
    rate_share,
    step_data,
)
from alpagym_runtime.trainers.cosmos.parcels import receive, send
from alpagym_runtime.trainers.cosmos.place import transport_of
from alpagym_runtime.trainers.cosmos.prompts import Prompts, number_of
from alpagym_runtime.trainers.cosmos.replicas import Replicas
from alpagym_runtime.trainers.cosmos.tables import cosmos_config, to_toml
from alpagym_runtime.trainers.cosmos.trainer import CosmosTrainer
from alpagym_runtime.trainers.grpo.advantages import group_advantages
from alpagym_runtime.trainers.scenes import scenes_of_step
from alpagym_runtime.trainers.team import Team
from alpagym_runtime.trainers.update import taking_part
from alpagym_runtime.transport.between import build_transport, remove_leftovers
from alpagym_runtime.transport.disk import DiskTransport
from alpagym_runtime.transport.memory import MemoryTransport
from alpagym_runtime.types import Sampling

SCENES = ("toy-0", "toy-1", "toy-2", "toy-3")


def mapping(**sections):
    return {
        "run": {"seed": 3},
        "simulator": {"type": "toy"},
        "dataset": {"train_scenes": 4, "val_scenes": 2, "test_scenes": 3},
        "expected_valid_steps": 12,
        "policy": {"type": "waypoint", "hidden": 16, "actors": 1},
        "reward": {
            "terms": {"progress": {"type": "progress", "scale": 1.0}, "collision": {"type": "collision", "scale": -1.0}}
        },
        "rollout": {"slots": 8, "group_size": 4, "scenes_per_step": 2},
        "transport": {"type": "memory"},
        "trainer": {"type": "cosmos", "least_advantage": 0.0},
        "evaluation": {"bootstrap": 100, "every_updates": 2, "videos": False},
        "checkpoint": {"every_updates": 2},
        "cosmos": {"train": {"train_batch_per_replica": 8, "param_dtype": "float32", "optm_lr": 0.01}},
    } | sections


def configure(**sections):
    return from_mapping(mapping(**sections))


def policy_of(config):
    return config.policy.config.build("cpu")


def groups_of(config, policy=None, world=None, redraws=2, batch_s=60.0):
    """Groups in the toy world, and how many simulators were built for them."""
    built = []
    policy = policy or policy_of(config)

    def make():
        simulator = (world or ToyConfig()).build(policy.spec, config.dataset, 8, ())
        built.append(simulator)
        core = DrivingCore(simulator, build_terms(config.reward, simulator), policy.spec)
        return Collector(core, policy, retries=0), core.close

    return Groups(Prompts(config, SCENES), make, config.rollout.group_size, redraws, batch_s), built


def drives(config, numbers=(0, 1), **options):
    groups, _ = groups_of(config, **options)
    return groups.drive(numbers, Sampling())


# ---------------------------------------------------------------- prompts


def test_a_prompt_means_the_scene_and_seeds_of_grpo():
    prompts = Prompts(configure(), SCENES)
    # 8 episodes a step are 2 groups of 4: prompts 0 and 1 are step 0, prompt 5 is group 1 of step 2.
    assert prompts.request(5, 0).scene_id == scenes_of_step(SCENES, {}, 2, 0.0, 3, 2)[1]
    world = {prompts.request(5, member).world_seed for member in range(4)}
    assert len(world) == 1
    assert len({prompts.request(5, member).policy_seed for member in range(4)}) == 4
    assert prompts.request(5, 1) == Prompts(configure(), SCENES).request(5, 1)


def test_every_pass_over_the_scenes_has_prompts_of_its_own():
    config = configure(cosmos={"train": {"train_batch_per_replica": 8, "epoch": 3}})
    prompts = Prompts(config, SCENES)
    assert len(prompts) == 12
    passes = [sorted(prompts.request(4 * k + i, 0).scene_id for i in range(4)) for k in range(3)]
    assert passes == [sorted(SCENES)] * 3
    assert len({prompts.request(i, 0).world_seed for i in range(12)}) == 12
    with pytest.raises(IndexError):
        prompts[12]


def test_workers_read_the_prompts_that_were_written(tmp_path):
    (tmp_path / "cosmos").mkdir()
    config = configure()
    Prompts(config, SCENES).write(tmp_path)
    assert Prompts.read(config, tmp_path).scenes == SCENES
    assert number_of(Prompts.read(config, tmp_path)[3]) == 3
    with pytest.raises(ValueError, match="a prompt of ours"):
        number_of("what is 2 + 2?")


# ---------------------------------------------------------------- groups


def test_a_group_is_whole_and_a_function_of_its_prompt():
    config = configure()
    first, second = drives(config), drives(config, (1,))
    assert [len(members) for members in first] == [4, 4]
    assert all(episode.trainable for members in first for episode in members)
    for one, other in zip(first[1], second[0], strict=True):
        assert_same(one, other)


def test_drives_that_failed_are_made_again():
    config = configure()
    groups, _ = groups_of(config, world=ToyConfig(fail_every=3))
    (members,) = groups.drive([0], Sampling())
    assert len(members) == 4
    assert {episode.request.world_seed for episode in members} == {Prompts(config, SCENES).request(0, 0).world_seed}
    # Of 4 first attempts the third fails, and is driven once more: 5 drives.
    assert dict(groups.counts) == {"episodes": 5, "void": 1}


def test_a_group_that_is_not_to_be_had_ends_the_run_with_its_reason():
    groups, _ = groups_of(configure(), world=ToyConfig(fail_every=1), redraws=1)
    with pytest.raises(SimulatorError, match=r"fewer than 4 drives .* after 2 rounds .*8 × void: the toy world failed"):
        groups.drive([0], Sampling())


class Silent:
    """A collector whose simulator gives up the first time."""

    def __init__(self, inner, fails):
        self._inner, self._fails = inner, fails

    def stream(self, *args):
        if self._fails:
            raise SimulatorError("8 slots stayed silent for 30 s", code="TIMEOUT")
        self._inner.stream(*args)


def test_a_simulator_that_gave_up_is_replaced_by_a_fresh_one():
    config = configure()
    real, built = groups_of(config)
    closed = []

    def make():
        collector, close = real._make()
        number = len(built)
        return Silent(collector, fails=number == 1), lambda: (closed.append(number), close())

    groups = Groups(Prompts(config, SCENES), make, 4, 2, 60.0)
    (members,) = groups.drive([0], Sampling())
    assert (len(members), len(built), closed) == (4, 2, [1])
    groups.close()
    assert closed == [1, 2]


def test_a_batch_that_takes_too_long_ends_the_run():
    groups, _ = groups_of(configure(), batch_s=0.0)
    with pytest.raises(SimulatorError, match=r"4 of 4 drives are not over after cosmos.rollout.episode_s = 0 s"):
        groups.drive([0], Sampling())


def test_credit_by_tick_travels_and_credit_by_episode_is_left_to_cosmos():
    config = configure()
    (members,) = drives(config, (0,))
    by_tick = credited(members, config.trainer.config)
    assert [len(d.advantage_T) for d in by_tick] == [len(e) for e in members]
    by_episode = credited(members, replace(config.trainer.config, credit="episode"))
    assert [len(d.advantage_T) for d in by_episode] == [0] * 4
    assert by_tick[0].reward == pytest.approx(members[0].rewards.sum())
    assert set(by_tick[0].numbers) == {"driving_score", "term/progress", "term/collision"}


def test_a_reward_that_is_no_number_is_driven_again_and_then_ends_the_run():
    class Broken:
        """A collector whose first drives are paid NaN."""

        def __init__(self, inner, count):
            self._inner, self._left = inner, [count]

        def stream(self, requests, sampling, put, tick):
            def spoilt(index, episode):
                if self._left[0] > 0:
                    self._left[0] -= 1
                    rewards = episode.rewards.copy()
                    rewards[-1] = np.nan
                    episode = replace(episode, rewards=rewards)
                put(index, episode)

            self._inner.stream(requests, sampling, spoilt, tick)

    config = configure(rollout={"slots": 8, "group_size": 3, "scenes_per_step": 2, "minimum_group": 2})
    for spoilt, ends in ((2, False), (99, True)):
        real, _ = groups_of(config)
        collector, close = real._make()
        broken = Broken(collector, spoilt)
        groups = Groups(Prompts(config, SCENES), lambda b=broken, c=close: (b, c), 3, 1, 60.0)
        if ends:
            with pytest.raises(SimulatorError, match=r"fewer than 3 drives .* after 2 rounds .*: 6 × non_finite"):
                groups.drive([0], Sampling())
        else:
            (members,) = groups.drive([0], Sampling())
            assert all(np.isfinite(member.rewards).all() for member in members)
            assert dict(groups.counts) == {"episodes": 5, "non_finite": 2}


# ---------------------------------------------------------------- parcels


def test_a_drive_arrives_as_it_was_sent(tmp_path):
    config = configure()
    (members,) = drives(config, (0,))
    driven = credited(members, config.trainer.config)[1]
    rollout, policy = build_transport(config, "trainer", tmp_path), build_transport(config, "trainer", tmp_path)
    text = send(driven, rollout)
    assert len(text) < 400
    got, handle = receive(text, policy)
    np.testing.assert_array_equal(got.advantage_T, driven.advantage_T)
    np.testing.assert_array_equal(got.episode.decisions.log_prob, driven.episode.decisions.log_prob)
    policy.discard(handle)
    with pytest.raises(KeyError):
        receive(text, policy)


def test_drives_that_nobody_took_go_with_the_job(tmp_path):
    config = configure()
    (members,) = drives(config, (0,))
    send(credited(members, config.trainer.config)[0], build_transport(config, "trainer", tmp_path))
    assert len(list((tmp_path / "transport").iterdir())) == 1
    remove_leftovers(config, tmp_path)
    assert list((tmp_path / "transport").iterdir()) == []


def test_where_the_drives_of_a_worker_go(tmp_path):
    colocated = configure(cosmos={**mapping()["cosmos"], "mode": "colocated"})
    # One process drives and trains: nothing is written.
    assert isinstance(transport_of(colocated, tmp_path, "Policy"), MemoryTransport)
    assert isinstance(transport_of(configure(), tmp_path, "Rollout"), DiskTransport)
    assert isinstance(transport_of(configure(transport={"type": "disk"}), tmp_path, "Policy"), DiskTransport)
    gloo = configure(transport={"type": "nccl", "backend": "gloo"})
    # The controller passes handles on; an end of its own would stand in the way of the policy's.
    assert isinstance(transport_of(gloo, tmp_path, "Controller"), MemoryTransport)
    assert not (tmp_path / "transport" / "nccl.json").exists()


def test_a_whole_step_fits_on_its_way_through_nccl(tmp_path):
    config = configure(transport={"type": "nccl", "backend": "gloo", "in_flight": 1, "timeout_s": 10.0})
    members = [driven for group in drives(config, (0, 1)) for driven in credited(group, config.trainer.config)]
    policy, rollout = transport_of(config, tmp_path, "Policy"), transport_of(config, tmp_path, "Rollout")
    try:
        # Handles of all of them go to the controller before the policy takes the first.
        texts = [send(driven, rollout) for driven in members]
        for text, driven in zip(texts, members, strict=True):
            got, handle = receive(text, policy)
            np.testing.assert_array_equal(got.episode.decisions.log_prob, driven.episode.decisions.log_prob)
            policy.discard(handle)
    finally:
        rollout.close()
        policy.close()


@pytest.mark.parametrize("text", ["", "{}", '{"episode": "disk-0", "advantage_T": "%"}', 7])
def test_what_is_no_parcel_is_named(text, tmp_path):
    with pytest.raises(ValueError, match="expected a drive"):
        receive(text, build_transport(configure(), "trainer", tmp_path))


# ---------------------------------------------------------------- steps


def lessons_of(config, policy, advantage=None):
    groups = drives(config, policy=policy)
    per_group = [credited(members, config.trainer.config) for members in groups]
    if advantage is None:
        return [Lesson(driven, 0.0) for members in per_group for driven in members]
    return [Lesson(Driven(d.episode, np.zeros(0, np.float32)), advantage) for members in per_group for d in members]


def at_version(lesson, version):
    decisions = lesson.driven.episode.decisions
    decisions = replace(decisions, version=np.full(len(decisions.version), version))
    episode = replace(lesson.driven.episode, decisions=decisions)
    return Lesson(Driven(episode, lesson.driven.advantage_T), lesson.advantage)


def test_stale_drives_are_counted_and_drives_of_the_future_refused():
    config = configure()
    lesson = lessons_of(config, policy_of(config))[0]
    # Version 10, four steps allowed: 5 is too old, 6 and 10 are not.
    kept, outdated = fresh_enough([at_version(lesson, v) for v in (5, 6, 10)], 10, 4)
    assert [int(k.driven.episode.decisions.version[0]) for k in kept] == [6, 10]
    assert outdated == 1
    with pytest.raises(WeightsError, match="version 11 of the weights, and the policy is at 10"):
        fresh_enough([at_version(lesson, 11)], 10, 4)


def test_a_step_of_stale_drives_alone_says_so():
    config = configure()
    policy = policy_of(config)
    lessons = [at_version(lesson, 3) for lesson in lessons_of(config, policy)]
    policy.version = 9
    optimiser = torch.optim.Adam(policy.module.parameters())
    with pytest.raises(WeightsError, match="all 8 drives of step 10 were decided by weights more than 1 steps old"):
        learn(config, policy, optimiser, lessons, 10)


def test_a_drive_through_which_weights_changed_counts_as_its_oldest():
    config = configure()
    lesson = lessons_of(config, policy_of(config))[0]
    decisions = lesson.driven.episode.decisions
    mixed = np.where(np.arange(len(decisions.version)) < 3, 5, 7)
    episode = replace(lesson.driven.episode, decisions=replace(decisions, version=mixed))
    assert fresh_enough([Lesson(Driven(episode, lesson.driven.advantage_T), 0.0)], 7, 1) == ([], 1)


def test_cosmos_advantages_spread_over_the_decisions_of_an_episode():
    config = configure()
    lessons = lessons_of(config, policy_of(config), advantage=0.5)
    data = step_data(lessons, config.trainer.config)
    ticks = sum(int(lesson.driven.episode.controls.sum()) for lesson in lessons)
    assert data.advantage_B.tolist() == [0.5] * ticks
    assert data.counts == {"decisions": float(sum(len(x.driven.episode) for x in lessons)), "decisions_kept": ticks}


def test_our_episode_advantage_is_cosmos_own():
    # Cosmos-RL 0.4.7: (r - mean) / (std + 1e-6), population std. Rewards 1, 2, 3: ±1.2247, 0.
    rewards = np.array([1.0, 2.0, 3.0])
    theirs = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    np.testing.assert_allclose(group_advantages(rewards), theirs, atol=1e-5)


def test_a_step_moves_the_policy_towards_what_fared_better():
    config = configure()
    policy = policy_of(config)
    lessons = lessons_of(config, policy)
    optimiser = torch.optim.Adam(policy.module.parameters(), lr=0.01)
    data = step_data(lessons, config.trainer.config)

    def objective():
        with torch.no_grad():
            score = policy.score(data.observation.take(np.arange(len(data.advantage_B))), data.decisions, data.sampling)
        return float((score.log_prob[:, 0] * torch.from_numpy(data.advantage_B)).mean())

    before = objective()
    numbers = learn(config, policy, optimiser, lessons, 1)
    assert objective() > before
    assert policy.version == 1
    # One optimiser step on the whole batch, at the weights that drove: every ratio is 1.
    assert numbers["ratio_min"] == pytest.approx(1.0, abs=1e-5)
    assert numbers["staleness_max"] == 0.0
    assert numbers["episodes_stale"] == 0.0
    assert {"reward", "driving_score", "term/progress", "groups_collapsed", "kl"} <= set(numbers)


def test_micro_batches_and_optimiser_steps_are_counted_in_episodes():
    config = configure()
    step = replace(config.cosmos.train.train_policy, mini_batch=2, batch_size_per_optimize=4)
    cosmos = replace(config.cosmos, train=replace(config.cosmos.train, train_policy=step))
    # 8 episodes with 80 decisions: 10 each; 2 episodes a forward are 20, 4 an optimiser step are 40.
    options = loop_config(cosmos, config.trainer.config, 8, 80)
    assert (options.micro_batch, options.minibatch) == (20, 40)
    whole = loop_config(config.cosmos, config.trainer.config, 8, 80)
    assert (whole.micro_batch, whole.minibatch) == (10, 80)


def test_the_learning_rate_rises_and_then_falls_to_its_share():
    config = configure(
        cosmos={"train": {"train_batch_per_replica": 8, "optm_warmup_steps": 4, "optm_min_lr_factor": 0.5}}
    )
    shares = [rate_share(config.cosmos, step, 11) for step in range(1, 12)]
    # Step 2 of 11: half of the rise, 1/10 of the way from 1 to 0.5: 0.5 · 0.95.
    assert shares[1] == pytest.approx(0.475)
    assert shares[-1] == pytest.approx(0.5)
    assert max(shares) == shares[3]


# ---------------------------------------------------------------- weights


def test_a_replica_with_other_weights_is_refused(tmp_path):
    config = configure()
    policy, replica = policy_of(config), config.policy.config
    seeded = replace(replica, seed=99).build("cpu")
    digests = Digests(tmp_path)
    digests.put(0, dict(policy.module.named_parameters()))
    digests.require(0, dict(policy_of(config).module.named_parameters()))
    with pytest.raises(WeightsError, match="other weights than version 0"):
        digests.require(0, dict(seeded.module.named_parameters()))
    with pytest.raises(WeightsError, match="version 3 are to drive, and the policy never made it"):
        digests.require(3, dict(policy.module.named_parameters()), wait_s=0.1)


def test_a_digest_survives_the_cast_to_bfloat16_and_one_changed_bit_does_not():
    weights = {"a": torch.randn(33, 7, generator=torch.Generator().manual_seed(1)), "b": torch.zeros(0)}
    cast = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    assert digest(weights.items()) == digest(reversed(list(cast.items())))
    cast["a"][3, 3] *= 1.01
    assert digest(weights.items()) != digest(cast.items())


def test_running_statistics_are_refused_and_tied_weights_and_constants_are_not(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[1].weight = module[0].weight
    module.register_buffer("table", torch.ones(3), persistent=False)
    refuse_buffers(module)
    (tmp_path / "cosmos").mkdir()
    Journal(tmp_path).export(1, module.state_dict())
    assert set(load_weights(Journal(tmp_path).exported(1))) == set(module.state_dict())
    with pytest.raises(ConfigError, match=r"keeps 2.running_mean"):
        refuse_buffers(torch.nn.Sequential(*module, torch.nn.BatchNorm1d(2)))


# ---------------------------------------------------------------- journal


def test_a_number_that_was_not_measured_stays_one(tmp_path):
    journal = Journal(tmp_path)
    (tmp_path / "cosmos").mkdir()
    journal.add(Step(1, 1, 0.5, {"driving_score": math.nan, "reward": 0.25}))  # an open-loop world has no score
    (step,) = journal.steps(0)
    assert math.isnan(step.numbers["driving_score"])
    assert step.numbers["reward"] == 0.25


def test_steps_are_read_as_far_as_they_follow_each_other(tmp_path):
    (tmp_path / "cosmos").mkdir()
    journal = Journal(tmp_path)
    for number in (1, 2, 4):
        journal.add(Step(number, 5, 0.1, {"reward": float(number), "nothing": float("nan")}))
    with (tmp_path / "cosmos" / "steps.jsonl").open("a") as file:
        file.write('{"step": 3')  # being written
    assert [step.step for step in journal.steps(0)] == [1, 2]
    assert [step.step for step in journal.steps(1)] == [2]


def test_steps_that_a_resumed_job_makes_again_are_taken_back(tmp_path):
    (tmp_path / "cosmos").mkdir()
    journal = Journal(tmp_path)
    for number in (1, 2, 3):
        journal.add(Step(number, 5, 0.1, {}))
        journal.export(number, {"w": torch.full((2,), float(number))})
    journal.forget(2)
    assert [step.step for step in journal.steps(0)] == [1, 2]
    assert journal.exported(2) is not None
    assert journal.exported(3) is None
    journal.release(2)
    assert journal.exported(1) is None


def test_a_step_whose_worker_was_killed_before_it_told_of_it_is_not_waited_for(tmp_path):
    (tmp_path / "cosmos").mkdir()
    journal = Journal(tmp_path)
    for number in (1, 2):
        journal.add(Step(number, 9, 0.1, {"reward": 1.0}))
    before = journal.told
    journal.complete(3, 9)  # its checkpoint is whole
    assert [(step.step, step.total, step.numbers) for step in journal.steps(1)] == [
        (2, 9, {"reward": 1.0}),
        (3, 9, {}),
    ]
    assert journal.told > before
    journal.complete(2, 9)
    assert len(journal.steps(0)) == 3


FULL = """
import resource, sys
from pathlib import Path
import torch
from alpagym_runtime.trainers.cosmos.journal import Journal, Presence

here = Path(sys.argv[1])
presence = Presence(here, "policy")
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # as a full disk: files are made, and nothing can be written
presence.did(8, 0.5)
try:
    Journal(here).export(3, {"w": torch.zeros(100_000)})
except Exception as err:
    presence.failed(f"{type(err).__name__}: {err}")
    raise
"""


def test_a_worker_on_a_full_disk_says_so_and_leaves_no_half_of_an_export(tmp_path):
    (tmp_path / "cosmos").mkdir()
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "policy worker ends: " in done.stderr
    assert "File too large" in done.stderr.rstrip().splitlines()[-1]  # its own error, not that of telling
    assert list((tmp_path / "cosmos" / "exports").iterdir()) == []
    (worker,) = Journal(tmp_path).workers().values()
    assert (worker.episodes, worker.failure) == (0, "")  # what was told before


def test_what_a_killed_writer_left_of_an_export_goes_with_the_next_start(tmp_path):
    torn = tmp_path / "cosmos" / "exports" / ".step_4-4711"
    torn.mkdir(parents=True)
    (torn / "model.safetensors").write_bytes(b"half")
    Journal(tmp_path).forget(0)
    assert not torn.exists()


def test_workers_tell_what_they_did_and_why_they_end(tmp_path):
    (tmp_path / "cosmos").mkdir()
    presence = Presence(tmp_path, "rollout")
    presence.did(8, 0.5)
    presence.did(8, 0.25)
    presence.failed("no more slots")
    (worker,) = Journal(tmp_path).workers().values()
    assert (worker.role, worker.episodes, worker.busy_s, worker.failure) == ("rollout", 16, 0.75, "no more slots")
    assert worker.process.alive


# ---------------------------------------------------------------- the TOML


def test_the_toml_says_what_the_config_says(tmp_path):
    config = configure(
        cosmos={
            "mode": "colocated",
            "train": {
                "train_batch_per_replica": 48,
                "sync_weight_interval": 2,
                "optm_lr": 2e-6,
                "max_num_steps": 60,
                "train_policy": {"mini_batch": 3, "variant": "dapo", "data_dispatch_as_rank_in_mesh": True},
            },
            "rollout": {"batch_size": 2, "sampling_config": {"temperature": 0.6, "top_p": 0.98}},
            "policy": {"parallelism": {"n_init_replicas": 2}},
        }
    )
    table = cosmos_config(config, tmp_path / "run")
    assert tomllib.loads(to_toml(table)) == table
    assert table["mode"] == "colocated"
    assert table["train"]["sync_weight_interval"] == 2
    assert table["train"]["max_num_steps"] == 60
    assert table["train"]["train_policy"]["variant"] == "dapo"
    assert table["train"]["train_policy"]["data_dispatch_as_rank_in_mesh"] is True
    assert table["rollout"]["n_generation"] == 4
    assert table["rollout"]["sampling_config"] == {"temperature": 0.6, "top_p": 0.98}
    assert table["policy"]["parallelism"]["n_init_replicas"] == 2


def test_dangerous_defaults_are_always_written(tmp_path):
    table = cosmos_config(configure(), tmp_path / "run")
    train = table["train"]
    assert (train["compile"], train["non_text"], train["timestamp"]) == (False, True, "run")
    assert train["train_policy"]["type"] == "grpo"
    assert {table[role]["parallelism"]["tp_size"] for role in ("policy", "rollout")} == {1}
    assert train["train_policy"]["dataloader_shuffle"] is False
    assert train["output_dir"] == str(tmp_path / "run" / "cosmos" / "run")


def test_what_comes_before_the_first_table_stays_there():
    text = to_toml({"mode": "x", "a": {"b": {"c": [1, 2.0]}, "d": True}})
    assert text == 'mode = "x"\n\n[a]\nd = true\n\n[a.b]\nc = [1, 2.0]\n'


@pytest.mark.parametrize("name", ["my run", "a'b", "a$b", "a;b", "a:b", "~a", "a*b", "a(1)", "a\nb"])
def test_a_path_that_a_shell_would_split_is_refused_before_anything_is_driven(name, tmp_path):
    # A colon: the folder of the job's `python` is put on PATH.
    with pytest.raises(ConfigError, match="through a shell without quotes"):
        cosmos_config(configure(), tmp_path / name)
    config = configure(run={"seed": 3, "root": str(tmp_path / name)})
    assert "run.root" in {problem.key for problem in config.trainer.config.preflight(config, Machine())}
    with pytest.raises(ConfigError, match="through a shell without quotes"):
        CosmosTrainer(config.trainer.config).fit(SimpleNamespace(directory=tmp_path / name))


@pytest.mark.parametrize("name", ["run-1", "seed=3,x", "a@b+c%d", "größe"])
def test_other_paths_are_fine(name, tmp_path):
    assert str(tmp_path / name) in cosmos_config(configure(), tmp_path / name)["train"]["output_dir"]


REDIS = "bind 0.0.0.0\nport 12800\nprotected-mode no\ndir /opt\n"


def test_redis_listens_to_this_machine_alone_and_asks_for_a_password(tmp_path):
    text = redis_text(REDIS, tmp_path, "secret", everywhere=False)
    own = f"bind 127.0.0.1\nport 12800\nprotected-mode yes\ndir {tmp_path}\n"
    assert text == f"{own}\npidfile {tmp_path}/redis.pid\nrequirepass secret\n"
    assert "bind 0.0.0.0\n" in redis_text(REDIS, tmp_path, "secret", everywhere=True)
    with pytest.raises(RuntimeError, match="0 lines"):
        redis_text("port 1\n", tmp_path, None, everywhere=False)


# ---------------------------------------------------------------- the stand-in for NCCL


def test_the_stand_in_carries_tensors_between_ranks_in_order(tmp_path):
    one, two = Mail(tmp_path), Mail(tmp_path)
    uid = one.create_nccl_uid()
    assert len(uid) == 128
    joined = []
    thread = threading.Thread(target=lambda: joined.append(two.create_nccl_comm(uid, 1, 2)))
    thread.start()
    first = one.create_nccl_comm(uid, 0, 2)
    thread.join()
    for value in (1.0, 2.0):
        one.nccl_send(torch.full((3,), value), 1, first)
    got = torch.zeros(3)
    two.nccl_recv(got, 0, joined[0])
    assert got.tolist() == [1.0] * 3
    two.nccl_recv(got, 0, joined[0])
    assert got.tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="waited 0.05 s for rank 0"):
        two.nccl_recv(got, 0, joined[0], timeout_ms=50)


class Communicator:
    """As Cosmos-RL's between policy replicas."""

    def __init__(self, mail, uid, rank):
        self._mail, self._rank = mail, rank
        self._comm = mail.create_nccl_comm(uid, rank, 2)

    def get_replica_rank(self, name):
        return self._rank

    def world_size(self):
        return 2

    def allreduce(self, sendbuff, recvbuff, op):
        self._mail.nccl_allreduce(sendbuff, recvbuff, op, self._comm)


def test_what_a_drive_is_reported_with_is_json():
    # In an open-loop world there is no driving score.
    config = configure()
    driven = lessons_of(config, policy_of(config))[0].driven
    assert "driving_score" in driven.numbers
    open_loop = Driven(replace(driven.episode, driving_score=math.nan), driven.advantage_T)
    assert open_loop.numbers == {k: v for k, v in driven.numbers.items() if k != "driving_score"}
    json.dumps(open_loop.numbers, allow_nan=False)


def test_a_gpu_of_a_spread_policy_always_has_a_decision(tmp_path):
    config = configure(trainer={"type": "cosmos", "least_advantage": 1e9})
    lessons = lessons_of(config, policy_of(config))
    episodes = [lesson.driven.episode for lesson in lessons]
    for left in (lessons, []):  # none is worth a gradient; all were too old
        nothing = step_data(left, config.trainer.config)
        assert len(nothing.advantage_B) == 0
        data = taking_part(nothing, episodes)
        assert data.advantage_B.tolist() == [0.0]  # takes part, and teaches nothing
        assert data.taught == data.counts["decisions_kept"] == 0.0
    assert taking_part(nothing, []) is nothing


class Beside(Team):
    """Two processes, of which the other says always the same."""

    def __init__(self, other):
        super().__init__(0, 2)
        self._other = other

    def gather(self, value):
        return [value, self._other]


def test_a_group_that_is_spread_over_gpus_is_one_group():
    config = configure()
    lessons = lessons_of(config, policy_of(config))[:2]
    group, reward = lessons[0].driven.episode.request.group_id, lessons[0].driven.reward
    alike = [Lesson(lesson.driven, 0.0) for lesson in (lessons[0], lessons[0])]
    assert _collapsed(alike, Beside([])) == 1.0
    assert _collapsed(alike, Beside([[group, reward + 1.0]])) == 0.0
    # Alone here and alone there, together a group of two; one of another group compares with nobody.
    assert _collapsed(alike[:1], Beside([[group, reward], [group + 1, reward]])) == 1.0
    assert _collapsed(alike[:1], Beside([])) == 0.0


def test_two_policy_replicas_learn_as_one_that_has_all_drives(tmp_path):
    config = configure()
    alone = policy_of(config)
    lessons = lessons_of(config, alone)
    optimiser = torch.optim.SGD(alone.module.parameters(), lr=0.1)
    expected = learn(config, alone, optimiser, lessons, 1)

    uid, results = Mail(tmp_path).create_nccl_uid(), {}
    shares = [[*lessons[:3]], [*lessons[3:]]]
    policies = [policy_of(config), policy_of(config)]  # not in threads: they draw from torch's own generator

    def replica(rank):
        policy = policies[rank]
        team = Replicas(Communicator(Mail(tmp_path), uid, rank), "replica", torch.device("cpu"))
        own = torch.optim.SGD(policy.module.parameters(), lr=0.1)
        results[rank] = policy, learn(config, policy, own, shares[rank], 1, team=team)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(replica, (0, 1)))
    for policy, numbers in results.values():
        for one, other in zip(policy.module.parameters(), alone.module.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        for name in ("reward", "decisions_kept", "episodes_trained", "groups_collapsed", "loss", "gradient_norm"):
            assert numbers[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6)


def test_the_config_of_a_run_with_cosmos_is_read_back(tmp_path):
    config = configure()
    assert json.loads(json.dumps(mapping()))["trainer"]["type"] == "cosmos"
    assert config.trainer.type == "cosmos"
    assert config.cosmos.global_batch == 8
