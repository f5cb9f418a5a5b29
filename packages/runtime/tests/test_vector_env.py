"""The native vector environment: the suite for each layout, and what is ours alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import gymnasium as gym
import numpy as np
import pytest

from alpagym_runtime.envs.vector_env import DrivingVectorEnv
from alpagym_runtime.errors import ConfigError, ResetNeededError, SimulatorError
from alpagym_runtime.testing.vector_env import VectorEnvConformance


class TestFlat(VectorEnvConformance):
    env_id = "alpagym_runtime:alpagym/Embedded-v0"
    arguments = {"scenes": 6, "horizon": 9}  # noqa: RUF012


class TestNestedControl(VectorEnvConformance):
    env_id = "alpagym_runtime:alpagym/Embedded-Nested-v0"
    arguments = {"scenes": 6, "horizon": 9, "action_type": "control", "reward": "progress_safety"}  # noqa: RUF012


class TestLowDim(VectorEnvConformance):
    env_id = "alpagym_runtime:alpagym/Embedded-LowDim-v0"
    arguments = {"scenes": 6, "horizon": 9, "action_type": "control"}  # noqa: RUF012


class TestLeRobot(VectorEnvConformance):
    env_id = "alpagym_runtime:alpagym/Embedded-LeRobot-v0"
    arguments = {"scenes": 6, "horizon": 9, "action_type": "plan"}  # noqa: RUF012


class TestPixels(VectorEnvConformance):
    env_id = "alpagym_runtime:alpagym/Embedded-LeRobot-v0"
    arguments = {"scenes": 3, "horizon": 5, "cameras": ["front", "rear"], "camera_size": [24, 40]}  # noqa: RUF012
    steps = 14


class TestFrames(VectorEnvConformance):
    env_id = "alpagym_runtime:alpagym/Embedded-v0"
    arguments = {"scenes": 3, "horizon": 5, "cameras": ["front"], "camera_size": [24, 40], "camera_frames": 2}  # noqa: RUF012
    steps = 14


@pytest.mark.slow  # pytest -m slow packages/runtime/tests/test_vector_env.py
@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_subprocesses_give_the_same_bytes(mode):
    TestFlat().check_equal("async", mode)


@pytest.mark.slow  # pytest -m slow packages/runtime/tests/test_vector_env.py
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", ["error", "killed", "stuck"])
def test_a_worker_process_that_fails_ends_the_parents_wait(fault):
    # Gymnasium's subprocesses: what is ours is that nothing of the environment keeps them or the parent.
    envs = TestFlat().make_generic("async")
    try:
        envs.reset(seed=1)
        actions = np.zeros((3, 16), np.float32)
        begun = time.monotonic()
        if fault == "error":
            with pytest.raises(ValueError, match="action must be 16"):
                envs.step(np.where(np.arange(3)[:, None] == 1, np.float32(np.nan), actions))
        else:
            os.kill(envs.processes[1].pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
            envs.step_async(actions)
            with pytest.raises((EOFError, ConnectionError, multiprocessing.TimeoutError)):
                envs.step_wait(timeout=2.0)
        assert time.monotonic() - begun < 10.0
    finally:
        for process in envs.processes:
            if process.is_alive() and fault == "stuck":
                os.kill(process.pid, signal.SIGCONT)
        envs.close(terminate=True)
    assert not any(process.is_alive() for process in envs.processes)


def make(count: int = 1, **arguments) -> gym.vector.VectorEnv:
    return gym.make_vec("alpagym_runtime:alpagym/Embedded-Nested-v0", count, **{"scenes": 6, "horizon": 3} | arguments)


def ticks(envs: gym.vector.VectorEnv, count: int) -> list[tuple[int, bool]]:
    """(ticks since the episode's start, whether it ended) after each of `count` steps of slot 0."""
    period_us = 200_000
    observation, _ = envs.reset(seed=1, options={"scene_id": "procedural-train-000000"})
    start, found = int(observation["time_us"][0, 0]), []
    for _ in range(count):
        observation, _, terminated, truncated, info = envs.step(np.zeros(envs.action_space.shape, np.float32))
        over = bool(terminated[0] or truncated[0])
        found.append(((int(observation["time_us"][0, 0]) - start) // period_us, over))
        if "final_obs" in info:
            found[-1] = (*found[-1], (int(info["final_obs"][0]["time_us"][0]) - start) // period_us)
    return found


def test_autoreset_tuples():
    # an episode of 3 ticks; all scenes hand over at the same time of their clock
    assert ticks(make(autoreset_mode="next_step"), 5) == [(1, False), (2, False), (3, True), (0, False), (1, False)]
    assert ticks(make(autoreset_mode="same_step"), 5) == [(1, False), (2, False), (0, True, 3), (1, False), (2, False)]
    with pytest.raises(ResetNeededError, match=r"\[0\]"):
        ticks(make(autoreset_mode="disabled"), 4)


def test_each_slot_can_have_its_scene():
    envs = make(4)
    names = ["procedural-val-000001", None, "procedural-test-000002", "procedural-val-000001"]
    _, info = envs.reset(seed=1, options={"scenes": names, "whatever": 1})
    assert [info["scene_id"][i] for i in (0, 2, 3)] == [names[i] for i in (0, 2, 3)]
    assert info["scene_id"][1].startswith("procedural-train-")
    with pytest.raises(ValueError, match="one scene id a slot, 4"):
        envs.reset(options={"scenes": names[:3]})


def test_a_scene_that_is_not_there_is_an_error_of_its_slot_and_the_next_reset_works():
    envs = make(3)
    with pytest.raises(SimulatorError, match="slot 1: .*nowhere"):
        envs.reset(seed=1, options={"scenes": [None, "nowhere", None]})
    with pytest.raises(ResetNeededError):
        envs.step(np.zeros((3, 16), np.float32))
    envs.reset(seed=1)
    envs.step(np.zeros((3, 16), np.float32))


def toy(count: int, scenes: list[str] | None = None, **options) -> DrivingVectorEnv:
    """The environment over the toy world, which fails on demand."""
    from dataclasses import replace

    from alpagym_runtime.envs.setup import embedded_setup
    from alpagym_runtime.run_config import DatasetSection
    from alpagym_runtime.testing.toy_config import ToyConfig

    class ToyVectorEnv(DrivingVectorEnv):
        @staticmethod
        def make_setup(**arguments):
            dataset = DatasetSection(scene_ids=scenes)
            return replace(embedded_setup(**arguments), simulator=ToyConfig(**options), dataset=dataset)

    return ToyVectorEnv(count, horizon=6, autoreset_mode="next_step")


def test_a_slot_whose_world_fails_is_cut_off_and_named_while_the_others_drive_on():
    envs = toy(4, fail_every=3)
    envs.reset(seed=1)
    failed = np.zeros(4, int)
    for step in range(12):
        _, rewards, terminated, truncated, info = envs.step(np.zeros((4, 16), np.float32))
        if "failed" in info:
            rows = np.flatnonzero(info["failed"])
            assert truncated[rows].all()
            assert not terminated[rows].any()
            assert not rewards[rows].any()
            assert all(info["failure"][row] for row in rows)
            assert not info["failed"][np.flatnonzero(~info["_failed"])].any()
            assert "ended" not in info or not info["_ended"][rows].any()
            failed[rows] += 1
            if step < 6:
                assert len(rows) < 4
    assert failed.sum() > 0


def test_an_automatic_reset_replaces_scenes_that_cannot_be_started():
    # two of three scenes do not exist: sooner or later each slot draws one, and drives another
    envs = toy(4, scenes=["toy-1", "gone-1", "gone-2"])
    envs.reset(seed=1, options={"scenes": ["toy-1"] * 4})
    replaced = 0
    for _ in range(30):
        info = envs.step(np.zeros((4, 16), np.float32))[4]
        replaced += int(info.get("failed_starts", np.zeros(1)).sum())
        assert set(info.get("scene_id", [])) <= {"toy-1", None}
    assert replaced > 0
    gone = toy(2, scenes=["gone-1"])
    gone.reset(seed=1, options={"scene_id": "toy-1"})
    over = np.zeros(2, bool)
    while not over.any():
        _, _, terminated, truncated, _ = gone.step(np.zeros((2, 16), np.float32))
        over = terminated | truncated
    with pytest.raises(SimulatorError, match="10 scenes could not be started"):
        gone.step(np.zeros((2, 16), np.float32))


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_gymnasiums_statistics_count_our_episodes(mode):
    envs = gym.wrappers.vector.RecordEpisodeStatistics(make(5, horizon=4, autoreset_mode=mode), buffer_length=1000)
    envs.reset(seed=1)
    ends, total, rewards = 0, 0.0, 0.0
    for _ in range(23):
        _, reward, terminated, truncated, info = envs.step(np.zeros((5, 16), np.float32))
        over = terminated | truncated
        ends += int(over.sum())
        rewards += reward.sum()
        if over.any():
            total += info["episode"]["r"][over].sum()
    assert envs.episode_count == ends > 5
    assert total == pytest.approx(sum(envs.return_queue))
    assert set(envs.length_queue) == {4}


def test_the_end_of_an_episode_in_numbers():
    envs = make(3, horizon=2)
    envs.reset(seed=2)
    paid = np.zeros(3)
    for step in range(2):
        _, rewards, _, truncated, info = envs.step(np.zeros((3, 16), np.float32))
        paid += rewards
        assert truncated.all() == ("ended" in info) == (step == 1)
    assert info["ended"].tolist() == ["horizon"] * 3
    sums = sum(values for name, values in info["episode_terms"].items() if not name.startswith("_"))
    np.testing.assert_allclose(sums, paid, atol=1e-9)
    assert ((info["driving_score"] >= 0) & (info["driving_score"] <= 1)).all()


def test_pictures_of_each_slot():
    envs = make(2, render_mode="rgb_array")
    envs.reset(seed=1)
    pictures = envs.render()
    assert [(p.shape, p.dtype) for p in pictures] == [((400, 400, 3), np.uint8)] * 2


def test_attributes_by_name_as_sync_has_them():
    envs = make(2)
    assert envs.call("_max_episode_steps") == (3, 3)
    assert envs.get_attr("task_description")[0] == gym.make("alpagym/Embedded-v0").unwrapped.task_description
    assert gym.make("alpagym/Embedded-v0", horizon=3).get_wrapper_attr("_max_episode_steps") == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"autoreset_mode": "sometimes"}, "autoreset_mode"),
        ({"num_envs": 0}, "num_envs"),
        ({"render_mode": "human"}, "render_mode"),
        ({"layout": "flatt"}, "'flat'"),
        ({"horizon": 0}, "horizon"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(arguments, words):
    with pytest.raises(ConfigError, match=words):
        DrivingVectorEnv(**{"num_envs": 2} | arguments)
