"""The open-loop world: the contract, scores and rewards against golden numbers, the environment, half-settings."""

from __future__ import annotations

import json
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from alpagym_plugins import load
from alpagym_runtime.envs.core import DrivingCore, ScaledTerm, build_terms, reward_labels
from alpagym_runtime.envs.pai_env import with_heading
from alpagym_runtime.envs.presets import reward_section
from alpagym_runtime.errors import ConfigError, ResetNeededError, SimulatorError
from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.policies.config import LogReplayConfig
from alpagym_runtime.rewards.pai import GATES, PaiDistance, PaiJoint, PaiMotion
from alpagym_runtime.rewards.pai_config import PaiDistanceConfig, PaiJointConfig, PaiMotionConfig
from alpagym_runtime.rewards.reasoning import WordOverlap
from alpagym_runtime.rollouts.collector import Collector
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.pai.codec import TrajectoryCodec
from alpagym_runtime.simulators.pai.completion import bins_of, completion_text, reasoning_of
from alpagym_runtime.simulators.pai.config import PaiConfig
from alpagym_runtime.simulators.pai.scoring import (
    average,
    comfort_checks,
    comfort_score,
    corner_distance,
    displacements,
    minimum_displacements,
)
from alpagym_runtime.simulators.pai.simulator import PaiSimulator, text_trace, texts_of
from alpagym_runtime.testing.conformance import SimulatorConformance
from alpagym_runtime.testing.pai import CAMERAS, REASONING, copy_of_tree, shared_tree
from alpagym_runtime.types import Ended, EpisodeRequest, Measures, PolicySpec, Sampling, SimulatorSpec, TickBatch

GOLDEN = Path(__file__).parents[3] / ".." / "shared" / "golden" / "open_loop.json"
DATA = json.loads(GOLDEN.read_text()) if GOLDEN.is_file() else {"cases": {}, "rewards": {"completions": {}}}
needs_golden = pytest.mark.skipif(
    not GOLDEN.is_file(), reason="no golden numbers beside this checkout: ../shared/golden"
)
CODEC = TrajectoryCodec()
FIELDS = ("ego_history_rig", "ego_dynamics_rig")
SEEING = PolicySpec(fields=FIELDS, cameras={"front_wide_120fov": (36, 64), "front_tele_30fov": (36, 64)}, frames=4)


def section(**settings) -> DatasetSection:
    return DatasetSection(source="pai", **{"path": str(shared_tree()), "split": "train", **settings})


def world(policy=PolicySpec(fields=FIELDS), *, slots=2, labels=(), dataset=None, **config) -> PaiSimulator:  # noqa: B008
    return PaiConfig(workers=config.pop("workers", 0), **config).build(policy, dataset or section(), slots, labels)


# ---------------------------------------------------------------- the contract


class TestPaiWorld(SimulatorConformance):
    policy_spec = SEEING
    horizon = 1

    def make(self, slots):
        return world(self.policy_spec, slots=slots, labels=self.labels, cache_mb=16)

    def test_the_horizon_is_exact(self):
        # One plan a sample, whatever the horizon.
        for horizon in (1, 4):
            simulator = self.make(1)
            request = EpisodeRequest(simulator.spec.scenes[0], horizon_ticks=horizon)
            rows = self.drive(simulator, [request])[0]
            assert [int(row.tick[0]) for row in rows] == [0, 1]
            assert Ended(int(rows[-1].ended[0])) == Ended.SCORED
            simulator.close()


# ---------------------------------------------------------------- scores against golden numbers


def golden_plan(name: str, source: str) -> np.ndarray:
    case = DATA["cases"][name]
    if source == "decoded":
        speed = CODEC.initial_speed(case["history_xyz"], case["history_yaw"])
        return CODEC.decode(case["future_tokens"], speed)
    return np.concatenate([np.array(case["future_xyz"])[:, :2], np.array(case["future_yaw"])[:, None]], axis=1)


@needs_golden
@pytest.mark.parametrize("name", DATA["cases"])
def test_tokens_and_comfort_are_the_published_ones(name):
    case = DATA["cases"][name]
    bins = CODEC.encode(np.array(case["history_xyz"])[:, :2], case["history_yaw"], golden_plan(name, "input"))
    assert np.abs(bins - case["future_tokens"]).max() <= 1
    decoded = golden_plan(name, "decoded")
    np.testing.assert_allclose(decoded[:, :2], case["decoded_xy"], atol=1e-3)
    np.testing.assert_allclose(decoded[:, 2], case["decoded_yaw"], atol=1e-4)
    error = displacements(decoded, golden_plan(name, "input")).mean()
    assert error == pytest.approx(case["roundtrip_ade"], abs=1e-3)
    for source, key in (("decoded", "comfort_of_decoded"), ("input", "comfort_of_input")):
        checks = comfort_checks(golden_plan(name, source))
        assert {check: float(passed) for check, passed in checks.items()} == case[key]


@needs_golden
@pytest.mark.parametrize(("key", "count"), [("one_set_of_6", 6), ("first_only", 1)])
def test_metrics_are_the_published_ones(key, count):
    golden = DATA["metrics"]
    target = golden_plan(golden["target"], "input")
    plans = np.stack([golden_plan(name, "decoded") for name in golden["candidates"][:count]])
    found = minimum_displacements(plans, target) | {"corner_distance": corner_distance(plans, target)}
    expected = dict(golden[key])
    np.testing.assert_allclose(
        displacements(plans, target).mean(axis=1), expected.pop("ade_per_candidate")[0], atol=1e-4
    )
    for name, value in expected.items():
        assert float(found[name]) == pytest.approx(value, abs=3e-5), name


def test_the_best_plan_of_a_horizon_is_chosen_anew():
    # Plan 0 is off by 0 m for 1 s and then by 4 m (mean 54 · 4 / 64 = 3.375); plan 1 by 1 m throughout.
    target = np.zeros((64, 3))
    plans = np.zeros((2, 64, 3))
    plans[0, 10:, 1], plans[1, :, 1] = 4.0, 1.0
    found = minimum_displacements(plans, target)
    assert found["min_ade"] == pytest.approx(1.0)
    assert found["min_ade/by_t=1.0"] == pytest.approx(1.0)  # the same plan's first second
    assert found["min_ade@1.0s"] == 0.0  # another plan's


def test_undefined_steps_are_left_out_and_no_step_is_undefined():
    distances = np.array([[1.0, 9.0, 3.0], [5.0, 5.0, 5.0]])
    valid = np.array([[True, False, True], [False, False, False]])
    mean = average(distances, valid)
    assert mean[0] == 2.0
    assert np.isnan(mean[1])


def test_a_box_turned_in_place_has_a_corner_distance():
    # Turned by 90°, the corner (2, 1.5) goes to (-1.5, 2): sqrt(3.5² + 0.5²) = 3.5355 m; all eight move alike.
    turned = np.zeros((1, 64, 3))
    turned[..., 2] = np.pi / 2
    assert corner_distance(turned, np.zeros((64, 3))) == pytest.approx(np.hypot(3.5, 0.5))


def test_comfort_bounds_are_strict():
    # A constant yaw rate of exactly 0.95 rad/s is not inside (-0.95, 0.95).
    at = np.arange(64) * 0.1
    for rate, passed in ((0.95, False), (0.949, True)):
        plan = np.stack([0 * at, 0 * at, np.mod(rate * at + np.pi, 2 * np.pi) - np.pi], axis=-1)
        assert bool(comfort_checks(plan)["yaw_rate"]) == passed


# ---------------------------------------------------------------- rewards against golden numbers


class Fixed:
    def __init__(self, probability: float) -> None:
        self.probability = probability

    def score(self, predictions, references):
        return np.full(len(predictions), self.probability, np.float32)


def golden_text(name: str) -> str:
    tokens = [f"<i{t}>" for t in DATA["cases"][DATA["rewards"]["reference_drive"]]["future_tokens"]]
    other = [f"<i{t}>" for t in DATA["cases"]["straight_10"]["future_tokens"]]
    head, start, end = "turn left<|cot_end|>", "<|traj_future_start|>", "<|traj_future_end|>"
    history = [f"<i{3000 + i}>" for i in range(128)]
    return {
        "exact": head + start + "".join(tokens) + end,
        "no_end_marker": head + start + "".join(tokens),
        "half_the_tokens": head + start + "".join(tokens[:64]) + end,
        "one_extra_token": head + start + "".join([*tokens, "<i5>"]) + end,
        "history_range_tokens": head + start + "".join(history) + end,
        "no_start_marker": "".join(tokens) + end,
        "other_drive": head + start + "".join(other) + end,
    }.get(name) or DATA["rewards"]["completions"][name]["text"]


def scored_batch(plan: np.ndarray, target: np.ndarray, reference: str) -> TickBatch:
    values = {"ade_m": displacements(plan, target).mean(), "comfort": comfort_score(comfort_checks(plan))}
    data = np.frombuffer(reference.encode(), np.uint8)[None]
    one = np.ones(1, bool)
    measures = Measures({k: np.array([float(v)]) for k, v in values.items()}, dict.fromkeys(values, one))
    labels = {"cot_utf8": data, "cot_utf8_mask": np.ones_like(data, bool)}
    zero = np.zeros(1, np.int64)
    request = EpisodeRequest("golden")
    return TickBatch(zero, [request], zero + 1, one, {}, one, measures, measures, labels, zero + 4, [None])


SPEC = SimulatorSpec(False, 6_400_000, 1, ("golden",), {"ade_m": "tick", "comfort": "tick"})


@needs_golden
@pytest.mark.parametrize("name", DATA["rewards"]["completions"])
def test_rewards_are_the_published_ones(name):
    golden, case = DATA["rewards"], DATA["cases"][DATA["rewards"]["reference_drive"]]
    text = golden_text(name)
    speed = CODEC.initial_speed(case["history_xyz"], case["history_yaw"])
    plan = CODEC.decode(bins_of(text, CODEC.tokens, CODEC.bins), speed)
    expected = golden["completions"][name]
    if name == "history_range_tokens":  # which of that range they were is not told; any of them are far off
        assert expected["motion"]["reward"] == -1.0
        expected = {"motion": {"reward": -1.0}, "joint": {p: {"reward": -1.0} for p in expected["joint"]}}
    else:
        np.testing.assert_allclose(plan[-1, :2], expected["last_xy"], atol=2e-3)
    batch = scored_batch(plan, golden_plan(golden["reference_drive"], "input"), "turn left")
    decision = plan_decision(plan[None])
    decision.trace["text"] = text_trace([text])
    motion = PaiMotion(PaiMotionConfig(), SPEC).explain(batch, decision)
    for key, value in expected["motion"].items():
        assert motion[key][0] == pytest.approx(value, abs=1e-5), key
    for probability, joint in expected["joint"].items():
        term = PaiJoint(PaiJointConfig(variant="published"), SPEC, Fixed(float(probability)))
        found = term.explain(batch, decision)
        for key, value in joint.items():
            assert found[key][0] == pytest.approx(value, abs=1e-5), (probability, key)


def joint_at(probability: float, variant: str, text: str = "brake<|cot_end|>") -> dict[str, float]:
    plan = np.zeros((64, 3))
    decision = plan_decision(plan[None])
    decision.trace["text"] = text_trace([text])
    term = PaiJoint(PaiJointConfig(variant=variant), SPEC, Fixed(probability))
    return {key: float(value[0]) for key, value in term.explain(scored_batch(plan, plan, "brake"), decision).items()}


def test_the_corrected_sign_pays_better_words_more():
    # Score 0.8 - 1 = -0.2: 0.3 · -0.2 / 0.4 = -0.15, published +0.15; score 0 pays 0 in both.
    assert joint_at(0.8, "corrected")["reward"] == pytest.approx(-0.15, abs=1e-6)
    assert joint_at(0.8, "published")["reward"] == pytest.approx(0.15, abs=1e-6)
    assert joint_at(1.0, "corrected")["reward"] == joint_at(1.0, "published")["reward"] == 0.0
    rising = [joint_at(p, "corrected")["reward"] for p in (0.0, 0.61, 0.8, 1.0)]
    assert rising == sorted(rising)


@pytest.mark.parametrize(
    ("probability", "text", "gate"),
    [(0.5, "brake<|cot_end|>", "score"), (0.9, "brake", "reasoning"), (0.9, "<|cot_end|>", "reasoning")],
)
def test_the_gate_that_failed_is_named(probability, text, gate):
    found = joint_at(probability, "corrected", text)
    assert GATES[int(found["gate"])] == gate
    assert found["reward"] == -1.0


@pytest.mark.parametrize(("off_m", "reward"), [(2.999, -0.4 * 2.999 / 3.0), (3.0, -1.0)])
def test_the_gate_at_three_metres_is_strict(off_m, reward):
    target, plan = np.zeros((64, 3)), np.zeros((64, 3))
    plan[:, 1] = off_m  # beside it all the time: comfort 0, though the first step is no change
    batch = scored_batch(plan, target, "x")
    assert PaiMotion(PaiMotionConfig(), SPEC).tick(batch, None)[0] == pytest.approx(reward)


@pytest.mark.parametrize(("off_m", "reward"), [(0.0, 0.0), (1.0, -0.25), (3.0, -0.5), (27.0, -0.9)])
def test_distance_is_told_beyond_the_gate(off_m, reward):
    # - d / (d + 3 m): 1 / 4, 3 / 6, 27 / 30.
    target, plan = np.zeros((64, 3)), np.zeros((64, 3))
    plan[:, 1] = off_m
    batch = scored_batch(plan, target, "x")
    assert PaiDistance(PaiDistanceConfig(), SPEC).tick(batch, None)[0] == pytest.approx(reward)


def test_an_undefined_distance_costs_all():
    batch = scored_batch(np.zeros((64, 3)), np.zeros((64, 3)), "x")
    batch.measures.valid["ade_m"] = np.zeros(1, bool)
    assert PaiDistance(PaiDistanceConfig(), SPEC).tick(batch, None)[0] == -1.0


def test_words_of_the_stand_in_grader():
    # {keep, left} and {keep, right, lane}: one common word, 2 · 1 / 5.
    score = WordOverlap().score(["Keep left.", "", "same words"], ["keep right lane", "x", "Same, words!"])
    np.testing.assert_allclose(score, [0.4, 0.0, 1.0])


# ---------------------------------------------------------------- completions


def test_reasoning_is_what_stands_before_the_first_end_marker():
    assert reasoning_of("a<|cot_end|>b<|cot_end|>") == "a"
    assert reasoning_of("x<|cot_start|>y<|cot_start|>z <|cot_end|>") == "z"
    assert reasoning_of("no end") == ""


@given(st.text(max_size=40), st.lists(st.integers(0, 2999), min_size=128, max_size=128))
@settings(max_examples=50, deadline=None)
def test_a_completion_is_read_as_it_was_written(cot, bins):
    text = completion_text(cot.replace("<|", ""), np.array(bins))
    assert bins_of(text, 128, 3000).tolist() == bins
    assert reasoning_of(text) == cot.replace("<|", "").strip()


@given(st.lists(st.text(max_size=20), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_texts_survive_a_trace(texts):
    assert texts_of(text_trace(texts)) == texts


@given(st.lists(st.integers(0, 2999), min_size=128, max_size=128), st.floats(0.0, 30.0))
@settings(max_examples=25, deadline=None)
def test_decoding_keeps_its_distance(bins, speed):
    # A step is at most the mean of its ends' speeds long: |Δ| <= (|v0| + |v1|) dt / 2.
    plan = CODEC.decode(bins, speed)
    a = np.array(bins[0::2]) / 2999 * 20 - 10
    speeds = speed + np.concatenate([[0.0], np.cumsum((a * CODEC.accel_std + CODEC.accel_mean) * 0.1)])
    steps = np.hypot(*np.diff(np.concatenate([np.zeros((1, 2)), plan[:, :2]]), axis=0).T)
    assert (steps <= (np.abs(speeds[:-1]) + np.abs(speeds[1:])) * 0.05 + 1e-9).all()


# ---------------------------------------------------------------- driving it


def collect(simulator: PaiSimulator, reward="pai_motion", policy=None, count=3):
    policy = policy or LogReplayConfig().build()
    core = DrivingCore(simulator, build_terms(reward_section(reward), simulator), policy.spec)
    requests = [EpisodeRequest(scene, horizon_ticks=1) for scene in simulator.spec.scenes[:count]]
    return Collector(core, policy).collect(requests, Sampling(mode="mean"))


def test_the_recording_itself_earns_all_there_is():
    policy = LogReplayConfig().build()
    for scored, tolerance in (("plan", 1e-6), ("round_trip", 0.05)):
        simulator = world(policy.spec, scored=scored)
        for episode in collect(simulator):
            assert episode.ended == Ended.SCORED
            assert len(episode) == 1
            assert episode.measures["ade_m"].aggregate() < tolerance
            assert episode.rewards[0] == pytest.approx(episode.terms["pai_motion"][0])
            assert episode.rewards[0] > -0.1
            assert np.isnan(episode.driving_score)
        simulator.close()


class Talker:
    """Says the recording's words and drives the recording's tokens."""

    def __init__(self) -> None:
        self.spec = PolicySpec(fields=FIELDS, privileged=("recorded_plan_rig", "cot_utf8"))

    def act(self, observations, seeds, sampling):
        history = observations["ego_history_rig"]
        yaw = 2.0 * np.arctan2(history[..., 6], history[..., 3])
        bins = CODEC.encode(history[..., :2], yaw, observations["recorded_plan_rig"])
        decision = plan_decision(observations["recorded_plan_rig"])
        words = [
            row[mask].tobytes().decode()
            for row, mask in zip(observations["cot_utf8"], observations["cot_utf8_mask"], strict=True)
        ]
        decision.trace["text"] = text_trace([completion_text(w, b) for w, b in zip(words, bins, strict=True)])
        return decision


JOINT = {"pai_joint": {"type": "pai_joint", "scale": 1.0, "grader": "word_overlap"}}


def test_words_and_tokens_are_scored_together():
    simulator = world(Talker().spec, dataset=section(**REASONING), labels=("cot_utf8",), scored="text")
    episodes = collect(simulator, JOINT, Talker())
    assert len(episodes) == 3
    for episode in episodes:
        # Equal words: score 0. Only the round trip's error is left: -0.2 ADE / 3.
        assert episode.rewards[0] == pytest.approx(-0.2 * episode.measures["ade_m"].aggregate() / 3.0, abs=1e-9)
        assert episode.measures["ade_m"].aggregate() < 0.02
    simulator.close()


def test_a_policy_without_words_is_refused_at_the_first_batch():
    policy = LogReplayConfig().build()
    simulator = world(policy.spec, dataset=section(**REASONING), labels=("cot_utf8",))
    with pytest.raises(ConfigError, match=r"reward\.terms\.pai_joint: reads the policy's completion"):
        collect(simulator, JOINT, policy)
    simulator.close()


def test_reasoning_is_a_label_and_never_observed():
    simulator = world(SEEING, dataset=section(**REASONING), labels=("cot_utf8",))
    simulator.start(np.array([0]), [EpisodeRequest(simulator.spec.scenes[0])])
    batch = simulator.receive(1, 10.0)
    assert not any("cot" in name for name in batch.observation)
    text = batch.labels["cot_utf8"][0][batch.labels["cot_utf8_mask"][0]].tobytes().decode()
    assert text == simulator.data.find(simulator.spec.scenes[0]).cot
    simulator.close()


# ---------------------------------------------------------------- half-settings


def test_joint_reward_without_a_table_names_the_setting():
    labels = reward_labels(reward_section(JOINT))
    with pytest.raises(ConfigError, match=r"dataset\.reasoning"):
        world(labels=labels)


def test_a_judge_without_a_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match=r"grader_path.*Lingo-Judge"):
        PaiJointConfig().build(SPEC)
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        PaiJointConfig(grader_path=str(tmp_path)).build(SPEC)


def test_what_this_world_does_not_have_is_refused():
    for policy, text in (
        (PolicySpec(fields=("route_rig",)), "no route_rig"),
        (PolicySpec(fields=FIELDS, cameras={"front": (36, 64)}), "has no camera_front; it has front_wide_120fov"),
        (PolicySpec(fields=FIELDS, plan_step_us=200_000), "10 Hz"),
    ):
        with pytest.raises(ConfigError, match=text):
            world(policy)
    with pytest.raises(ConfigError, match=r"dataset\.source"):
        world(dataset=DatasetSection())
    with pytest.raises(ConfigError, match=r"cache_mb=\d+"):
        world(PolicySpec(fields=FIELDS, cameras={"front_wide_120fov": (1080, 1920)}), cache_mb=1)


def test_tokens_that_a_policy_does_not_answer():
    simulator = world(PolicySpec(fields=FIELDS, privileged=("recorded_plan_rig",)), scored="tokens")
    with pytest.raises(ConfigError, match=r"simulator\.scored: 'tokens' needs the policy's trace 'tokens'"):
        collect(simulator)
    simulator.close()


def test_torn_files_stop_the_run_before_it_starts_or_are_left_out(tmp_path):
    tree = copy_of_tree(tmp_path / "tree")
    path = tree / "camera/camera_front_wide_120fov/camera_front_wide_120fov.chunk_0000.zip"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-100])
    dataset = section(path=str(tree), allow_overlap=True, train_chunks="0-2")
    with pytest.warns(UserWarning, match="in train and in val"), pytest.raises(ConfigError, match="no whole zip"):
        world(SEEING, dataset=dataset)
    dataset.skip_bad = True
    with pytest.warns(UserWarning, match="in train and in val"):
        simulator = world(SEEING, dataset=dataset)
    assert len(simulator.spec.scenes) == 3  # those of chunk 1
    assert simulator.data.dropped["bad files"] == 3
    simulator.close()


# ---------------------------------------------------------------- the environment


def make(**settings) -> gymnasium.Env:
    return gymnasium.make("alpagym_runtime:alpagym/PAI-v0", path=str(shared_tree()), **settings)


@pytest.mark.parametrize("layout", ["flat", "nested"])
def test_gymnasiums_checker_is_content(layout):
    env = make(cameras=["front_wide_120fov"], height=36, width=64, frames=2, layout=layout)
    check_env(env.unwrapped, skip_render_check=True)
    env.close()


@pytest.mark.parametrize("action_type", ["plan", "xy", "unicycle", "tokens", "text"])
def test_one_step_and_terminated(action_type):
    env = make(action_type=action_type)
    env.reset(seed=1)
    env.action_space.seed(1)
    _, reward, terminated, truncated, info = env.step(env.action_space.sample())
    assert (terminated, truncated) == (True, False)
    assert -1.0 <= reward <= 0.0
    assert reward == info["terms"]["pai_motion"]
    details = info["details"]["pai_motion"]
    assert details["traj_L2"] == info["measures"]["ade_m"] == pytest.approx(info["measures"]["min_ade"])
    assert details["gate"] == ("ade" if details["traj_L2"] >= 3.0 else "")
    assert set(info["measures"]) >= {"comfort/jerk", "min_ade/by_t=3.0", "min_ade@3.0s", "corner_distance"}
    with pytest.raises(ResetNeededError):
        env.unwrapped.step(env.action_space.sample())
    env.close()


def test_a_completion_of_the_recording_is_scored_with_its_words():
    dataset = {**REASONING, "split": "train"}
    env = make(action_type="text", reward=JOINT, dataset=dataset)
    _, info = env.reset(seed=3)
    simulator = env.unwrapped._core.simulator
    sample = simulator.data.find(info["scene_id"])
    batch = env.unwrapped._batch
    history = batch.observation["ego_history_rig"][0]
    target = simulator._loaded[0].motion.plan_rig
    bins = CODEC.encode(history[:, :2], 2.0 * np.arctan2(history[:, 6], history[:, 3]), target)
    _, reward, _, _, info = env.step(completion_text(sample.cot, bins))
    assert info["details"]["pai_joint"]["reasoning_score"] == 0.0
    assert reward > -0.002
    env.close()


@pytest.mark.parametrize("action_type", ["plan", "xy", "tokens"])
def test_the_vector_environment_gives_what_single_ones_give(action_type):
    settings = {"action_type": action_type, "path": str(shared_tree())}
    vector = gymnasium.make_vec(
        "alpagym_runtime:alpagym/PAI-v0", num_envs=3, vectorization_mode="vector_entry_point", **settings
    )
    singles = [make(action_type=action_type) for _ in range(3)]
    vector.action_space.seed(5)
    seen, info = vector.reset(seed=7)
    starts = [env.reset(seed=7 + i) for i, env in enumerate(singles)]
    assert info["scene_id"].tolist() == [start["scene_id"] for _, start in starts]
    actions = vector.action_space.sample()
    _, rewards, terminated, truncated, info = vector.step(actions)
    assert terminated.all()
    assert not truncated.any()
    for i, env in enumerate(singles):
        for name, array in starts[i][0].items():
            assert (seen[name][i] == array).all(), name
        _, reward, _, _, own = env.step(actions[i])
        assert rewards[i] == reward
        assert row_of(info["measures"], i) == own["measures"]
        assert row_of(info["details"]["pai_motion"], i) == own["details"]["pai_motion"]
        env.close()
    vector.step(actions)  # resets: the next samples
    vector.close()


def row_of(info, row):
    """One environment's values of a batched info whose masks say that they are there."""
    assert all(info[f"_{name}"][row] for name in info if not name.startswith("_"))
    return {name: values[row] for name, values in info.items() if not name.startswith("_")}


def test_texts_are_for_the_single_environment():
    with pytest.raises(ConfigError, match="texts are no arrays"):
        gymnasium.make_vec("alpagym_runtime:alpagym/PAI-v0", num_envs=2, action_type="text", path=str(shared_tree()))


def test_an_unknown_scene_is_an_error():
    env = make()
    with pytest.raises(SimulatorError, match="no clip 'nobody'"):
        env.reset(options={"scene_id": "nobody"})
    env.close()


def test_headings_are_those_of_the_path():
    # East, north, then standing: 0, 90°, and 90° held.
    path = np.zeros((64, 2))
    path[:, 0], path[1:, 1] = 1.0, 1.0
    heading = with_heading(path)[:, 2]
    np.testing.assert_allclose(heading[:3], [0.0, np.pi / 2, np.pi / 2])


def test_presets_name_their_variant():
    for preset, term in (("pai_joint", "pai_joint_corrected"), ("pai_joint_published", "pai_joint_published")):
        (name,) = reward_section(preset).terms
        assert name == term
        assert name.endswith(reward_section(preset).terms[name].config.variant)
    assert load("simulators", "pai") is PaiConfig


def test_group_members_share_one_sample():
    simulator = world(SEEING, slots=4, cache_mb=8)
    requests = [EpisodeRequest(simulator.spec.scenes[0], member=i) for i in range(4)]
    simulator.start(np.arange(4), requests)
    batch = simulator.receive(4, 30.0)
    assert len(batch) == 4
    pictures = batch.observation["camera_front_wide_120fov"]
    assert (pictures == pictures[0]).all()
    assert simulator._loaded[0] is simulator._loaded[3]
    simulator.close()


def test_scales_are_applied_and_terms_add_up():
    simulator = world(LogReplayConfig().build().spec)
    terms = {"half": ScaledTerm(0.5, PaiMotion(PaiMotionConfig(), simulator.spec))}
    terms["whole"] = ScaledTerm(1.0, PaiMotion(PaiMotionConfig(), simulator.spec))
    core = DrivingCore(simulator, terms, LogReplayConfig().build().spec)
    scene = simulator.spec.scenes[1]
    (episode,) = Collector(core, LogReplayConfig().build()).collect([EpisodeRequest(scene)], Sampling(mode="mean"))
    assert episode.terms["half"][0] == pytest.approx(0.5 * episode.terms["whole"][0])
    assert episode.rewards[0] == pytest.approx(episode.terms["half"][0] + episode.terms["whole"][0])
    assert CAMERAS[1] in simulator.spec.cameras
    simulator.close()
