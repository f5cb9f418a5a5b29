"""The Gymnasium environment: the API's checkers, its life cycle, its determinism, and its arguments."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import warnings
from functools import lru_cache, partial
from pathlib import Path

import cv2
import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import alpagym_runtime.envs.setup as setup
from alpagym_runtime.envs.actions import ACTION_SIZES
from alpagym_runtime.envs.driving_env import DrivingEnv
from alpagym_runtime.envs.presets import PRESETS
from alpagym_runtime.envs.spaces import explain
from alpagym_runtime.errors import ConfigError, PluginError, ResetNeededError, SimulatorError

FLAT, NESTED = "alpagym/Embedded-v0", "alpagym/Embedded-Nested-v0"
LOW_DIM, LEROBOT = "alpagym/Embedded-LowDim-v0", "alpagym/Embedded-LeRobot-v0"
IDS = (FLAT, NESTED)


def make(env_id: str = FLAT, **kwargs) -> gym.Env:
    return gym.make(f"alpagym_runtime:{env_id}", **{"scenes": 6, "horizon": 20} | kwargs)


def hash_arrays(observation: dict[str, np.ndarray]) -> bytes:
    return b"".join(name.encode() + observation[name].tobytes() for name in sorted(observation))


def trace(env: gym.Env, seed: int | None, actions: np.ndarray) -> str:
    """SHA-256 of all that comes back for `actions` from one seed; a new episode begins where one ends."""
    digest = hashlib.sha256()
    observation, info = env.reset(seed=seed)
    digest.update(hash_arrays(observation) + repr(info).encode())
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(action)
        digest.update(hash_arrays(observation) + repr((reward, terminated, truncated, info)).encode())
        if terminated or truncated:
            observation, info = env.reset()
            digest.update(hash_arrays(observation) + repr(info).encode())
    return digest.hexdigest()


def random_actions(count: int, seed: int = 0, size: int = 16) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1.0, 1.0, (count, size)).astype(np.float32)


def drive_to_the_end(env: gym.Env, action: np.ndarray | None = None) -> tuple[int, bool, bool, dict]:
    action = np.zeros(env.action_space.shape, np.float32) if action is None else action
    steps = 0
    while True:
        _, _, terminated, truncated, info = env.step(action)
        steps += 1
        if terminated or truncated:
            return steps, terminated, truncated, info


# ---------------------------------------------------------------- the checkers


@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.parametrize("action_type", sorted(ACTION_SIZES))
def test_gymnasiums_checker_has_nothing_to_say(env_id, action_type):
    env = make(env_id, action_type=action_type, render_mode="rgb_array")
    check_env(env.unwrapped)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*", "ignore::FutureWarning")
@pytest.mark.parametrize("action_type", sorted(ACTION_SIZES))
def test_stable_baselines_checker_has_nothing_to_say(action_type):
    from stable_baselines3.common.env_checker import check_env as check_sb3

    check_sb3(make(FLAT, action_type=action_type).unwrapped)
    # The nested one has matrices by design; this one warning is allowed.
    with pytest.warns(UserWarning, match="unconventional shape") as heard:
        check_sb3(make(NESTED, action_type=action_type).unwrapped)
    assert all("unconventional shape" in str(warning.message) for warning in heard)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*", "ignore::FutureWarning")
@pytest.mark.parametrize("env_id", [LOW_DIM, LEROBOT])
def test_the_checkers_have_nothing_to_say_of_other_layouts(env_id):
    from stable_baselines3.common.env_checker import check_env as check_sb3

    check_env(make(env_id).unwrapped)
    check_sb3(make(env_id).unwrapped)


def test_low_dim_is_the_flat_observation_scaled():
    options = {"scene_id": "procedural-train-000003"}
    low, _ = make(LOW_DIM).reset(seed=1, options=options)
    flat, _ = make(FLAT).reset(seed=1, options=options)
    dynamics, route = flat["ego_dynamics_rig"], flat["route_rig"].reshape(20, 2)
    np.testing.assert_allclose(low[:4], dynamics[[0, 3, 4, 6]] / [20, 8, 8, 1], atol=1e-6)
    # points 1 to 6, then 8, 10, 13, 16 and 19; 80 m ahead and 20 m aside are 1
    np.testing.assert_allclose(low[4:6], route[1] / [80, 20], atol=1e-6)
    np.testing.assert_allclose(low[24:26], np.clip(route[19] / [80, 20], -1, 1) * flat["route_mask"][19], atol=1e-6)
    actors, rows = low[26:].reshape(8, 7), flat["actors_rig"].reshape(8, 9)
    assert flat["actors_mask"].any()
    np.testing.assert_array_equal(actors[:, 6], flat["actors_mask"])
    for actor, row, there in zip(actors, rows, flat["actors_mask"], strict=True):
        seen = [row[0] / 50, row[1] / 20, (row[3] - dynamics[0]) / 20, row[4] / 10, row[5] / 12, row[6] / 4]
        np.testing.assert_allclose(actor[:6], np.clip(seen, -1, 1) * there, atol=1e-6)


def test_lerobots_names_hold_the_flat_observation():
    ours, _ = make(LEROBOT).reset(seed=1)
    flat, _ = make(FLAT).reset(seed=1)
    np.testing.assert_array_equal(ours["agent_pos"], flat["ego_dynamics_rig"])
    route = flat["route_rig"].reshape(20, 2) * flat["route_mask"][:, None]
    actors = flat["actors_rig"].reshape(8, 9) * flat["actors_mask"][:, None]
    np.testing.assert_allclose(ours["environment_state"], np.concatenate([route.ravel(), actors.ravel()]), atol=1e-5)


@pytest.mark.parametrize("env_id", IDS)
def test_a_thousand_random_steps_stay_in_the_space(env_id):
    env = make(env_id, horizon=100)
    space = env.observation_space
    observation, _ = env.reset(seed=1)
    for action in random_actions(1000):
        assert space.contains(observation), explain(space, observation)
        assert {name: array.dtype for name, array in observation.items()} == {
            name: part.dtype for name, part in space.spaces.items()
        }
        observation, reward, terminated, truncated, _ = env.step(action)
        assert type(reward) is float
        assert type(terminated) is type(truncated) is bool
        if terminated or truncated:
            assert space.contains(observation)
            observation, _ = env.reset()


@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.parametrize("control", [(1.0, 0.0), (1.0, 0.15), (0.5, 1.0), (-1.0, -1.0)])
def test_driving_past_the_edge_stays_in_the_space(env_id, control, monkeypatch):
    # The world that drives on after every event takes the car far outside the map.
    config = setup.EmbeddedConfig
    monkeypatch.setattr(setup, "EmbeddedConfig", lambda **options: config(**options, end_on=[]))
    env = make(env_id, action_type="control", horizon=100, debug=True)
    env.reset(seed=3)
    steps, _, truncated, _ = drive_to_the_end(env, np.float32(control))
    assert truncated
    assert steps > 20


def test_what_does_not_fit_the_space_is_explained():
    env = make()
    observation, _ = env.reset(seed=1)
    space = env.observation_space
    assert explain(space, observation) is None
    speed = observation["ego_dynamics_rig"]
    cases = {
        "float32 .7,.*float64": speed.astype(np.float64),
        r"got float32 \(6,\)": speed[:6],
        r"range \[.*finite True": speed + np.float32(200.0),
        "finite False": np.full(7, np.nan, np.float32),
    }
    for words, value in cases.items():
        assert re.search(f"ego_dynamics_rig: .*{words}", explain(space, {**observation, **{"ego_dynamics_rig": value}}))
    assert "'route_rig' is missing" in explain(space, {k: v for k, v in observation.items() if k != "route_rig"})
    assert "extra" in explain(space, {**observation, "extra": speed})


# ---------------------------------------------------------------- who owns what comes back


@pytest.mark.parametrize("env_id", IDS)
def test_what_was_handed_out_never_changes(env_id):
    actions = random_actions(20, 4) * np.float32(0.2)

    def run(spoil: bool) -> tuple[list, list]:
        env = make(env_id)
        kept, copies = [], []
        for item in env.reset(seed=4), *((o, i) for o, _, _, _, i in map(env.step, actions[:8])):
            kept.append(item)
            copies.append(({k: v.copy() for k, v in item[0].items()}, json.loads(json.dumps(item[1]))))
            if spoil:
                for array in item[0].values():
                    array[...] = 1
                for value in item[1].values():
                    if isinstance(value, dict):
                        value.clear()
                item[1].clear()
        return kept, copies

    kept, copies = run(spoil=False)
    for (observation, info), (first, info_first) in zip(kept, copies, strict=True):
        assert hash_arrays(observation) == hash_arrays(first)
        assert info == info_first
    # and what the caller does with them changes nothing that comes later
    _, spoiled = run(spoil=True)
    assert [(hash_arrays(o), i) for o, i in spoiled] == [(hash_arrays(o), i) for o, i in copies]


def test_actions_belong_to_the_caller():
    env = make()
    env.reset(seed=1)
    action = np.full(16, 2.0, np.float32)
    env.step(action)
    assert (action == 2.0).all()


# ---------------------------------------------------------------- life cycle


def test_step_before_reset_is_refused():
    with pytest.raises(ResetNeededError, match="reset"):
        make(disable_env_checker=True).unwrapped.step(np.zeros(16, np.float32))
    with pytest.raises(gym.error.ResetNeeded):
        make().step(np.zeros(16, np.float32))


@pytest.mark.parametrize("how", ["terminated", "truncated"])
def test_step_after_the_end_is_refused(how):
    env = make(horizon=3 if how == "truncated" else 100)
    env.reset(seed=1)
    action = np.zeros(16, np.float32)
    if how == "terminated":
        action[8:] = 0.5
    _, terminated, truncated, _ = drive_to_the_end(env, action)
    assert (terminated, truncated) == (how == "terminated", how == "truncated")
    for _ in range(2):
        with pytest.raises(ResetNeededError):
            env.step(action)
    env.reset()
    env.step(action)


@pytest.mark.parametrize("how", ["horizon", "max_episode_steps"])
def test_the_time_limit_truncates_at_its_step_after_every_reset(how):
    env = make(horizon=5) if how == "horizon" else make(horizon=20, max_episode_steps=5)
    for before in (0, 3, 4):
        env.reset(seed=1)
        for _ in range(before):
            env.step(np.zeros(16, np.float32))
        env.reset(seed=1)
        assert drive_to_the_end(env)[:3] == (5, False, True)


def test_a_crash_in_the_last_step_is_terminated():
    action = np.zeros(16, np.float32)
    action[8:] = 0.5
    env = make(horizon=100)
    env.reset(seed=1)
    crash, terminated, truncated, info = drive_to_the_end(env, action)
    assert (terminated, truncated, info["ended"]) == (True, False, "offroad")
    same = make(horizon=crash)
    same.reset(seed=1)
    assert drive_to_the_end(same, action)[:3] == (crash, True, False)
    sooner = make(horizon=crash - 1)
    sooner.reset(seed=1)
    assert drive_to_the_end(sooner, action)[:3] == (crash - 1, False, True)


def test_info_at_the_end_says_how_it_went():
    env = make(horizon=6)
    env.reset(seed=1)
    total, paid = 0.0, {}
    for step in range(6):
        _, reward, _, truncated, info = env.step(np.zeros(16, np.float32))
        assert sum(info["terms"].values()) == pytest.approx(reward, abs=1e-9)
        total += reward
        paid = {name: paid.get(name, 0.0) + value for name, value in info["terms"].items()}
        assert ("ended" in info) == truncated == (step == 5)
    assert info["ended"] == "horizon"
    assert info["episode_terms"] == pytest.approx(paid, abs=1e-9)
    assert sum(info["episode_terms"].values()) == pytest.approx(total, abs=1e-9)
    assert 0.0 <= info["driving_score"] <= 1.0
    assert info["is_success"] is (info["driving_score"] >= 1.0)
    assert info["initial_fault"] is False


def read_video(path: Path) -> list[np.ndarray]:
    video, frames = cv2.VideoCapture(str(path)), []
    while True:
        good, frame = video.read()
        if not good:
            return frames
        frames.append(frame)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore:.*Overwriting:UserWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_every_episode_leaves_a_video(tmp_path):
    for again in ("first", "second"):
        folder = tmp_path / again
        env = gym.wrappers.RecordVideo(
            make(render_mode="rgb_array", horizon=6), str(folder), episode_trigger=lambda _: True, disable_logger=True
        )
        steps = []
        for seed in range(3):
            env.reset(seed=seed)
            steps.append(drive_to_the_end(env)[0])
        env.close()
        files = sorted(folder.glob("*.mp4"))
        assert len(files) == 3
        for file, count in zip(files, steps, strict=True):
            frames = read_video(file)
            assert abs(len(frames) - (count + 1)) <= 1
            assert all(frame.max() > 50 for frame in frames)


def test_a_picture_shows_the_present_moment():
    env = make(render_mode="rgb_array")
    env.reset(seed=1)
    before = env.render()
    assert (before.shape, before.dtype) == ((400, 400, 3), np.uint8)
    np.testing.assert_array_equal(before, env.render())
    env.step(np.zeros(16, np.float32))
    after = env.render()
    assert (before != after).any()
    assert after.max() > 0


def test_two_environments_know_nothing_of_each_other():
    actions = random_actions(12, 2)
    alone = [trace(make(), seed, actions) for seed in (1, 2)]
    first, second = make(), make()
    digests = [hashlib.sha256(), hashlib.sha256()]
    for env, seed, digest in zip((first, second), (1, 2), digests, strict=True):
        observation, info = env.reset(seed=seed)
        digest.update(hash_arrays(observation) + repr(info).encode())
    for action in actions:
        for env, digest in zip((first, second), digests, strict=True):
            observation, *rest = env.step(action)
            digest.update(hash_arrays(observation) + repr(tuple(rest)).encode())
            if rest[1] or rest[2]:
                observation, info = env.reset()
                digest.update(hash_arrays(observation) + repr(info).encode())
    assert [digest.hexdigest() for digest in digests] == alone
    first.close()
    second.reset(seed=1)
    second.step(actions[0])


def test_close_twice_and_reset_after_close():
    env = make(disable_env_checker=True).unwrapped
    env.close()
    expected, _ = env.reset(seed=3)
    env.step(np.zeros(16, np.float32))
    env.close()
    env.close()
    with pytest.raises(ResetNeededError):
        env.step(np.zeros(16, np.float32))
    again, _ = env.reset(seed=3)
    assert hash_arrays(again) == hash_arrays(expected)


# ---------------------------------------------------------------- determinism


TRACE_ACTIONS = 200


def print_trace() -> None:
    """What another process runs: the trace, and what of the heavy libraries that loaded."""
    print(trace(make(), 11, random_actions(TRACE_ACTIONS)))
    print([name for name in ("torch", "transformers", "cosmos_rl", "grpc", "ray") if name in sys.modules])


@lru_cache
def other_process(hash_seed: str) -> list[str]:
    code = f"import runpy; runpy.run_path({__file__!r})['print_trace']()"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert out.returncode == 0, out.stderr
    return out.stdout.splitlines()


def test_a_trace_depends_on_its_seed_only():
    actions = random_actions(TRACE_ACTIONS)
    fresh = trace(make(), 11, actions)
    used = make()
    assert trace(used, 11, actions) == fresh
    assert trace(used, 11, actions) == fresh
    for seed in (1, 2, 3):
        trace(used, seed, actions[:7])
    crash = np.zeros(16, np.float32)
    crash[8:] = 0.5
    used.reset(seed=9)
    while not used.step(crash)[2]:
        pass
    assert trace(used, 11, actions) == fresh
    assert trace(used, 12, actions) != fresh


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_a_trace_is_the_same_in_another_process(hash_seed):
    assert other_process(hash_seed)[0] == trace(make(), 11, random_actions(TRACE_ACTIONS))


def test_driving_loads_neither_torch_nor_a_trainer():
    assert other_process("0")[1] == "[]"


def test_global_generators_are_neither_read_nor_written():
    torch = pytest.importorskip("torch")

    def state() -> tuple:
        return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()

    actions, traces = random_actions(25, 1), []
    for seed in (0, 1):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        before = state()
        traces.append(trace(make(), 4, actions))
        assert state() == before
    assert traces[0] == traces[1]


def test_unseeded_environments_differ():
    first, second = make(scenes=100), make(scenes=100)
    pairs = {tuple(env.reset()[1]["scene_id"] for _ in range(3)) for env in (first, second)}
    assert len(pairs) == 2


# ---------------------------------------------------------------- Gymnasium's vector environments


STILL = np.zeros(16, np.float32)


def vector_env(kind: str, count: int) -> gym.vector.VectorEnv:
    # No function of this file: a spawned process could not import it.
    thunks = [partial(gym.make, "alpagym_runtime:alpagym/Embedded-v0", scenes=40, horizon=2)] * count
    if kind == "sync":
        return gym.vector.SyncVectorEnv(thunks)
    return gym.vector.AsyncVectorEnv(thunks, context="spawn")


def rows(observations: dict[str, np.ndarray]) -> list[bytes]:
    count = len(observations["ego_dynamics_rig"])
    return [hash_arrays({name: array[i] for name, array in observations.items()}) for i in range(count)]


def episodes_of(envs: gym.vector.VectorEnv, seed, count: int) -> list[list[bytes]]:
    """First observations of `count` episodes of each sub-environment, after a reset with `seed` and unseeded ones."""
    found = [rows(envs.reset(seed=seed)[0])]
    for _ in range(count - 1):
        envs.step(np.tile(STILL, (envs.num_envs, 1)))
        found.append(rows(envs.reset()[0]))
    return [list(column) for column in zip(*found, strict=True)]


def single_episodes(seed: int, count: int) -> list[bytes]:
    env = make(scenes=40, horizon=2)
    found = [hash_arrays(env.reset(seed=seed)[0])]
    for _ in range(count - 1):
        env.step(STILL)
        found.append(hash_arrays(env.reset()[0]))
    return found


def test_sub_environments_have_seeds_of_their_own():
    envs = vector_env("sync", 3)
    columns = episodes_of(envs, 7, 5)
    assert columns == [single_episodes(seed, 5) for seed in (7, 8, 9)]
    for column in columns:
        assert len(set(column)) > 1, "the second episode repeats the first"
        assert column[1] != column[0]
    assert episodes_of(envs, 7, 5) == columns
    same = episodes_of(envs, [5, 5, 6], 3)
    assert same[0] == same[1] != same[2]
    with pytest.raises((AssertionError, ValueError)):
        envs.reset(seed=[1, 2])
    envs.close()


def test_subprocesses_give_the_same_bytes():
    envs, expected = vector_env("async", 2), vector_env("sync", 2)
    try:
        assert episodes_of(envs, 7, 3) == episodes_of(expected, 7, 3)
        for action in random_actions(5 * 2, 3).reshape(5, 2, 16):
            here, there = expected.step(action), envs.step(action)
            assert rows(here[0]) == rows(there[0])
            for a, b in zip(here[1:4], there[1:4], strict=True):
                np.testing.assert_array_equal(a, b)
    finally:
        envs.close()


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize("env_id", IDS)
def test_the_spec_makes_the_same_environment_again(env_id):
    env = make(env_id, action_type="control", reward={"only": {"type": "progress", "scale": 2.0}}, horizon=7)
    text = env.spec.to_json()
    assert json.loads(text)["kwargs"]["horizon"] == 7
    actions = random_actions(7, size=2)
    expected = trace(env, 3, actions)
    assert trace(gym.make(env.spec), 3, actions) == expected
    assert trace(gym.make(gym.envs.registration.EnvSpec.from_json(text)), 3, actions) == expected
    env.spec.pprint(disable_print=True)


def test_options_choose_the_scene_and_unknown_ones_are_ignored():
    env = make()
    _, info = env.reset(seed=1, options={"scene_id": "procedural-val-000003", "whatever": [1]})
    assert info["scene_id"] == "procedural-val-000003"
    assert make(scene_id="procedural-test-000002").reset(seed=1)[1]["scene_id"] == "procedural-test-000002"
    assert make(suite="val").reset(seed=1)[1]["scene_id"].startswith("procedural-val-")


def test_a_scene_that_is_not_there_is_an_error_and_the_next_reset_works():
    # Gymnasium's passive checker does not survive an error in the first reset.
    env = make(disable_env_checker=True)
    with pytest.raises(SimulatorError, match="nowhere") as error:
        env.reset(seed=1, options={"scene_id": "nowhere"})
    assert error.value.permanent
    with pytest.raises((ResetNeededError, gym.error.ResetNeeded)):
        env.step(np.zeros(16, np.float32))
    env.reset(seed=1)
    env.step(np.zeros(16, np.float32))


def test_an_action_that_is_no_action_is_refused_and_changes_nothing():
    env, same = (make(disable_env_checker=True).unwrapped for _ in range(2))
    env.reset(seed=1)
    same.reset(seed=1)
    for bad in (np.full(16, np.nan), np.zeros(15), np.zeros((2, 16)), np.float32(np.inf)):
        with pytest.raises(ValueError, match="action must be 16"):
            env.step(bad)
    action = np.zeros(16, np.float32)
    assert hash_arrays(env.step(action)[0]) == hash_arrays(same.step(action)[0])


def test_zero_keeps_speed_and_heading():
    env = make()
    observation, _ = env.reset(seed=4, options={"scene_id": "procedural-train-000000"})
    speed = observation["ego_dynamics_rig"][0]
    observation, *_ = env.step(np.zeros(16, np.float32))
    assert observation["ego_dynamics_rig"][0] == pytest.approx(speed, abs=0.05)
    assert observation["ego_dynamics_rig"][6] == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("action_type", sorted(ACTION_SIZES))
def test_a_left_turn_action_turns_left(action_type):
    env = make(action_type=action_type, horizon=3)
    env.reset(seed=1)
    action = np.zeros(ACTION_SIZES[action_type], np.float32)
    if action_type == "unicycle":
        action[8:] = 0.1
    elif action_type == "control":
        action[1] = 0.1
    else:
        x = 8.0 * np.arange(1, 65) * 0.1
        action[:] = (np.stack([x, 0.01 * x * x, 0.02 * x], axis=1) / [100.0, 50.0, np.pi]).reshape(-1)
    for _ in range(2):
        observation, *_ = env.step(action)
    assert observation["ego_dynamics_rig"][6] > 0.01


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"cameras": ["frnt"]}, "cameras"),
        ({"reward": "drivng"}, "'driving'"),
        ({"reward": "progress_safty"}, "'progress_safety'"),
        ({"reward": {"a": {"type": "progres", "scale": 1.0}}}, "'progress'"),
        ({"reward": {"a": {"type": "progress", "scale": 1.0, "ful_at": 0.5}}}, "full_at"),
        ({"action_type": "unicylce"}, "unicycle"),
        ({"horizon": 0}, "horizon"),
        ({"suite": "tset"}, "'test'"),
        ({"dataset": "comonroad"}, "'commonroad'"),
        ({"control_period_us": 150_000}, "control_period_us"),
        ({"scenes": 0}, "scenes"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(kwargs, words):
    with pytest.raises((ConfigError, PluginError), match=words):
        make(**kwargs)


def test_an_unknown_measure_is_refused_before_anything_drives():
    env = make(reward={"a": {"type": "measure", "scale": 1.0, "measure": "speed"}})
    with pytest.raises(ConfigError, match="speed_mps"):
        env.reset(seed=1)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets_by_name(preset):
    env = make(reward=preset, horizon=3)
    env.reset(seed=1)
    assert drive_to_the_end(env)[3]["episode_terms"].keys() == PRESETS[preset].keys()


def test_no_environment_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for env_id in IDS:
            env = make(env_id)
            env.reset(seed=1)
            env.step(env.action_space.sample())
            env.close()


@pytest.mark.timeout(600)  # it may have to compile the renderer
def test_a_camera_takes_the_place_of_the_actors_and_passes_the_checkers():
    env = DrivingEnv(cameras=["front"], camera_size=[48, 96], camera_frames=2, frame_step_us=200_000, scenes=3)
    observation, _ = env.reset(seed=3)
    assert "actors_rig" not in observation
    # Two frames of three channels.
    assert observation["camera_front"].shape == (48, 96, 6)
    assert observation["camera_front"].dtype == np.uint8
    assert observation["camera_front"].std() > 10.0
    after, *_ = env.step(np.zeros(16, np.float32))
    assert (after["camera_front"][..., :3] == observation["camera_front"][..., 3:]).all()
    env.reset(seed=3)
    check_env(env, skip_render_check=True)
    env.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["flat", "nested", "lerobot"])
def test_a_picture_belongs_to_the_caller(layout):
    def picture(observation):
        return observation["pixels"]["front"] if layout == "lerobot" else observation["camera_front"]

    def drive(spoil):
        env = DrivingEnv(cameras=["front"], camera_size=[24, 40], layout=layout, scenes=3)
        seen = [picture(env.reset(seed=3)[0])]
        kept = [seen[0].copy()]
        for _ in range(2):
            if spoil:
                seen[-1][:] = 0
            seen.append(picture(env.step(np.zeros(16, np.float32))[0]))
            kept.append(seen[-1].copy())
        env.close()
        return seen, kept

    seen, kept = drive(spoil=False)
    # Later steps write nothing into earlier pictures, nor do changes to those reach later ones.
    assert all((a == b).all() for a, b in zip(seen, kept, strict=True))
    assert all((a == b).all() for a, b in zip(kept, drive(spoil=True)[1], strict=True))


@pytest.mark.timeout(600)
def test_the_nested_environment_gives_frames_with_their_times():
    env = DrivingEnv(cameras=["front"], camera_frames=2, layout="nested", scenes=3, debug=True)
    observation, _ = env.reset(seed=3)
    assert observation["camera_front"].shape == (2, 96, 160, 3)
    assert observation["camera_front_time_us"].tolist() == [
        int(observation["time_us"][0]) - 100_000,
        int(observation["time_us"][0]),
    ]
    env.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("view", "width"), [("camera", 640), ("both", 1040)])
def test_the_picture_can_be_the_front_camera_with_the_plan(view, width):
    env = make(render_mode="rgb_array", view=view)
    env.reset(seed=1)
    before = env.render()
    assert (before.shape, before.dtype) == ((400, width, 3), np.uint8)
    env.step(np.zeros(16, np.float32))
    after = env.render()
    # The plan is a green band in front of the car, and was not there before a decision.
    green = (after[..., 1].astype(int) - np.maximum(after[..., 0], after[..., 2]) > 30)[330:, 250:390]
    none = (before[..., 1].astype(int) - np.maximum(before[..., 0], before[..., 2]) > 30)[330:, 250:390]
    assert green.sum() > none.sum() + 500
    env.close()


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_episode_with_both_views_leaves_a_video(tmp_path):
    env = make(render_mode="rgb_array", view="both", horizon=3)
    env = gym.wrappers.RecordVideo(env, str(tmp_path / "videos"), episode_trigger=lambda _: True, disable_logger=True)
    env.reset(seed=1)
    drive_to_the_end(env)
    env.close()
    (file,) = (tmp_path / "videos").glob("*.mp4")
    frames = read_video(file)
    assert len(frames) >= 3
    assert frames[0].shape == (400, 1040, 3)
