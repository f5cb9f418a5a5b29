"""The simulation of a Cosmos-RL job against cases whose answer is arithmetic."""

from __future__ import annotations

import pytest

from alpagym_host.compose import compose
from alpagym_host.sizing import PartTimes, main, simulate

BASE = ("trainer.type=cosmos", "rollout.group_size=4", "cosmos.train.train_batch_per_replica=8")


def throughput(*words, **times):
    return simulate(compose([*BASE, *words]), PartTimes(**times))


def test_colocated_gpus_take_turns():
    # A step of 8 episodes: 2 batches of 4 at 3 s, then 2 s of training: 8 s.
    found = throughput("topology=local_colocated_1gpu", "cosmos.device=cuda", rollout_s=3.0, train_s=2.0)
    assert found.step_s == pytest.approx(8.0)
    assert (found.policy_busy, found.rollout_busy) == (pytest.approx(0.25), pytest.approx(0.75))
    assert found.gpus == 1


def test_roles_of_their_own_overlap_and_the_slower_one_sets_the_pace():
    words = ("topology=local_disaggregated_2gpu",)
    # 2 batches of 3 s a step against 2 s of training.
    slow_rollout = throughput(*words, rollout_s=3.0, train_s=2.0)
    assert slow_rollout.step_s == pytest.approx(6.0)
    assert slow_rollout.rollout_busy == pytest.approx(1.0)
    assert "more rollout replicas" in slow_rollout.waits
    # 2 batches of 1 s against 5 s of training.
    slow_policy = throughput(*words, rollout_s=1.0, train_s=5.0)
    assert slow_policy.step_s == pytest.approx(5.0)
    assert slow_policy.policy_busy == pytest.approx(1.0)
    assert "more policy replicas" in slow_policy.waits
    assert slow_policy.gap_max <= 1


def test_more_rollouts_shorten_a_step_until_training_sets_the_pace():
    found = [
        throughput("cosmos.rollout.parallelism.n_init_replicas=" + str(n), rollout_s=8.0, train_s=2.0).step_s
        for n in (1, 2, 4, 8)
    ]
    assert found[0] == pytest.approx(16.0)
    assert found[1] == pytest.approx(8.0)
    assert found[0] > found[1] > found[2]
    assert all(step_s >= 2.0 for step_s in found)


def test_rollouts_for_whose_batches_there_is_no_room_are_named():
    # Two steps of 8 episodes may be under way: room for 4 batches of 4, and for 2 of 8.
    replicas = "cosmos.rollout.parallelism.n_init_replicas=4"
    assert throughput(replicas, rollout_s=8.0, train_s=2.0).at_work == 4
    found = throughput(replicas, "cosmos.rollout.batch_size=2", rollout_s=16.0, train_s=2.0)
    assert found.at_work == 2
    assert found.waits == "2 of 4 rollouts can drive at once: smaller batches, a larger step, or fewer"
    # On policy one step is; a batch is never more than a step.
    on_policy = ("cosmos.train.train_policy.on_policy=true", "cosmos.rollout.batch_size=5")
    assert throughput(replicas, *on_policy, rollout_s=16.0, train_s=2.0).at_work == 1
    # Where training sets the pace nobody misses them.
    assert "more policy" in throughput(replicas, "cosmos.rollout.batch_size=2", rollout_s=1.0, train_s=9.0).waits


def test_on_policy_nothing_overlaps():
    # 2 batches of 3 s one after the other, then 2 s and a sync of 1 s: 9 s.
    words = ("cosmos.train.train_policy.on_policy=true",)
    assert throughput(*words, rollout_s=3.0, train_s=2.0, sync_s=1.0).step_s == pytest.approx(9.0, abs=1.0)


def test_the_640_gpu_plan(capsys):
    words = ["topology=slurm_640gpu_64_128", "rollout.group_size=12"]
    assert main([*words, "--rollout-s", "60", "--train-s", "15", "--sync-s", "3", "--transport-s", "0.5"]) == 0
    said = capsys.readouterr().out
    # 64 × 8 + 128 × 1 GPUs; 64 × 40 episodes.
    assert "640 GPUs" in said
    assert "global batch   2560 episodes" in said
