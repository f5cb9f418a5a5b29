"""Which worker gets which episode, and which episodes may train: no processes."""

from __future__ import annotations

import numpy as np
import pytest

from alpagym_runtime.errors import SimulatorError
from alpagym_runtime.rollouts.cores import World
from alpagym_runtime.rollouts.queue import FRESH, URGENT, Job, JobQueue
from alpagym_runtime.rollouts.wire import Task
from alpagym_runtime.testing.examples import example_episode
from alpagym_runtime.trainers.ahead import admit
from alpagym_runtime.types import Ended, EpisodeRequest, Sampling

TASK = Task(World("train", ()), Sampling())


def job(number, scene="a", priority=FRESH, batch="batch"):
    return Job(number, TASK, EpisodeRequest(scene), batch, 0, priority)


def queue_of(jobs, slots=8, ahead=2):
    queue = JobQueue(slots, ahead)
    for each in jobs:
        queue.add(each)
    return queue


def numbers(jobs):
    return [each.number for each in jobs]


def test_evaluations_go_before_training_and_lost_episodes_before_both():
    lost = job(9)
    queue = queue_of([job(1), job(2), job(3, priority=URGENT)])
    queue.take_back(lost)
    # Beside a lost one a worker holds a quarter of its slots: 8 / 4.
    assert numbers(queue.take(0, [], share=10)) == [9, 3]
    assert numbers(queue.take(0, [], share=10)) == [1, 2]


def test_a_worker_holds_its_slots_and_a_few_ahead():
    queue = queue_of([job(n) for n in range(30)])
    assert len(queue.take(0, [], share=30)) == 10
    assert len(queue) == 20


def test_a_worker_takes_its_share_of_what_is_left():
    queue = queue_of([job(n) for n in range(6)])
    assert len(queue.take(0, [], share=3)) == 3


def test_a_scene_stays_with_the_worker_that_loaded_it():
    queue = queue_of([job(n, scene) for n, scene in enumerate("abab")])
    assert numbers(queue.take(0, [], share=1)) == [0]
    # The other takes scene b, which nobody has, and leaves 2 to the one that has scene a.
    held = queue.take(1, [job(n, "b") for n in range(10, 14)], share=6)
    assert numbers(held) == [1, 3]
    assert numbers(queue.take(0, [], share=4)) == [2]


def test_a_worker_whose_slots_stand_still_takes_scenes_of_others():
    queue = queue_of([job(n, "a") for n in range(8)])
    assert numbers(queue.take(0, [], share=1)) == [0]
    # Of 8 slots half are filled with the other's scene; the rest waits for it.
    assert numbers(queue.take(1, [], share=8)) == [1, 2, 3, 4]
    assert queue.take(1, [job(n, "a") for n in range(4)], share=8) == []
    queue.move_out(0)
    assert numbers(queue.take(1, [job(n, "a") for n in range(4)], share=8)) == [5, 6, 7]


def test_an_episode_that_may_kill_workers_takes_few_others_with_it():
    queue = queue_of([job(50)], slots=64)
    for n in range(20):
        queue.take_back(job(n))
    first = queue.take(0, [], share=100)  # 64 / 4
    assert numbers(first) == list(range(16))
    assert queue.take(0, first, share=100) == []
    for each in first:
        queue.take_back(each)
    assert numbers(queue.take(0, [], share=100)) == [16, 17, 18, 19]  # 64 / 16: the next has been lost twice
    assert len(queue.take(0, [], share=100)) == 4


def test_a_cancelled_batch_is_not_handed_out():
    queue = queue_of([job(1, batch="x"), job(2, batch="y"), job(3, batch="x")])
    queue.drop("x")
    assert numbers(queue.take(0, [], share=10)) == [2]


# ---------------------------------------------------------------- age of the weights


def decided_by(*versions):
    """An episode whose decisions were made by these versions of the weights, in turn."""
    episode = example_episode()
    assert episode.decisions is not None
    episode.decisions.version = np.resize(np.array(versions, np.int64), len(episode.decisions))
    return episode


def test_episodes_of_too_old_weights_are_void_and_counted():
    # 10 trains and may lag by 4: 5 is too old, 6 and 10 are not.
    episodes, stale = admit([decided_by(5), decided_by(6), decided_by(10)], version=10, lag=4)
    assert stale == 1
    assert [episode.ended == Ended.FAILED for episode in episodes] == [True, False, False]
    assert episodes[0].failure.text == "decided by version 5, too old for version 10 (trainer.max_lag=4)"


def test_an_episode_is_as_old_as_its_oldest_decision():
    assert admit([decided_by(5, 10)], version=10, lag=4)[1] == 1


def test_weights_that_do_not_exist_yet_are_an_error():
    with pytest.raises(SimulatorError, match="decided by version 11 of the weights, and version 10 is about to train"):
        admit([decided_by(11)], version=10, lag=4)
