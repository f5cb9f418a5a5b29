from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from alpagym_plugins import ConfigError
from alpagym_runtime.policies.base import bucket
from alpagym_runtime.policies.unicycle import KNOT_TIMES_S, knots_of_plan, roll_out
from alpagym_runtime.random import normal
from alpagym_runtime.testing.conformance import TrainablePolicyConformance
from alpagym_runtime.testing.examples import assert_same, example_observation
from alpagym_runtime.types import ImitatingPolicy, Sampling
from alpagym_waypoint.config import ModelSection, WaypointConfig
from alpagym_waypoint.network import CELLS, actor_features, cells_taken, ego_features
from alpagym_waypoint.policy import UNITS

MEAN, SAMPLE = Sampling("mean"), Sampling("sample")


class TestWaypoint(TrainablePolicyConformance):
    def make(self):
        return WaypointConfig(hidden=16).build()


class TestWaypointHotWithWhiteNoise(TrainablePolicyConformance):
    sampling = Sampling("sample", 2.5)

    def make(self):
        return WaypointConfig(hidden=16, actors=1, noise_correlation=0.0, seed=3).build()


SMALL_CAMERA = {"camera_height": 16, "camera_width": 24, "channels": [8, 8, 8], "hidden": 16}


class TestWaypointWithACamera(TrainablePolicyConformance):
    def make(self):
        return WaypointConfig(cameras=["front"]).build()


class TestWaypointWithTwoCamerasOfOneFrame(TrainablePolicyConformance):
    sampling = Sampling("sample", 1.5)

    def make(self):
        return WaypointConfig(cameras=["left", "right"], frames=1, **SMALL_CAMERA).build()


class TestWaypointWithAValueHead(TrainablePolicyConformance):
    def make(self):
        return WaypointConfig(value_head=True).build()


class TestWaypointWithACameraAndAValueHead(TrainablePolicyConformance):
    def make(self):
        return camera_policy(value_head=True)


@pytest.fixture(scope="module")
def policy():
    return WaypointConfig(hidden=16).build()


def observe(policy, count=5, *, first_tick=False):
    observation = example_observation(policy.spec, count, 1)
    observation["ego_dynamics_rig"][:, 0] += 5.0
    if first_tick:
        observation["carry_noise"][:] = 0.0
    return observation


def seeds(count):
    return np.arange(count, dtype=np.uint64) + np.uint64(7)


def knots_of(decision, observation):
    return knots_of_plan(decision.plan_rig, observation["ego_dynamics_rig"][:, 0].astype(np.float64))


# ---------------------------------------------------------------- plans and their knots


def test_a_plan_from_knots_gives_its_knots_back():
    random = np.random.default_rng(0)
    knots = random.uniform(-1.0, 1.0, (32, 2, 8)) * np.array([0.8, 0.02])[None, :, None]
    speed = random.uniform(8.0, 20.0, 32)
    plan = roll_out(knots, speed)
    assert plan.dtype == np.float32
    found = knots_of_plan(plan, speed)
    # The ridges of the least squares and float32 positions cost a little.
    np.testing.assert_allclose(found[:, 0], knots[:, 0], atol=0.1)
    np.testing.assert_allclose(found[:, 1], knots[:, 1], atol=1e-3)
    np.testing.assert_allclose(roll_out(found, speed), plan, atol=0.1)


def test_zero_knots_keep_speed_and_heading():
    plan = roll_out(np.zeros((1, 2, 8)), np.array([10.0]))
    # 10 m/s · 0.1 s = 1 m a step
    np.testing.assert_allclose(plan[0, :, 0], np.arange(1, 65), rtol=1e-6)
    assert not plan[0, :, 1:].any()


def test_a_positive_curvature_turns_left():
    knots = np.zeros((1, 2, 8))
    knots[0, 1] = 0.01
    plan = roll_out(knots, np.array([10.0]))
    # 64 m on a circle of 100 m: 0.64 rad
    np.testing.assert_allclose(plan[0, -1, 2], 0.64, atol=1e-6)
    np.testing.assert_allclose(plan[0, -1, :2], [100 * np.sin(0.64), 100 * (1 - np.cos(0.64))], atol=0.01)


def test_a_plan_stops_and_never_reverses():
    knots = np.zeros((1, 2, 8))
    knots[0, 0] = -5.0
    plan = roll_out(knots, np.array([10.0]))
    # v²/2a = 100/10 = 10 m, reached after 2 s
    np.testing.assert_allclose(plan[0, 20:, 0], 10.0, atol=1e-4)


# ---------------------------------------------------------------- distribution


def test_exploration_moves_four_values_only(policy):
    observation = observe(policy, first_tick=True)
    mean = policy.act(observation, seeds(5), MEAN)
    drawn = policy.act(observation, seeds(5), Sampling())
    noise = normal(seeds(5), 4)
    np.testing.assert_allclose(drawn.carry["noise"], noise, atol=1e-6)
    # Knots before 1 s shift together, those from 1 to 2 s together, the later ones not at all.
    std = np.repeat([0.7, 0.1], 2)
    np.testing.assert_allclose(drawn.trace["action"] - mean.trace["action"], noise * std, atol=1e-5)
    early, late = KNOT_TIMES_S < 1.0, KNOT_TIMES_S > 2.0
    next_ = ~early & ~late
    shift = np.zeros((5, 2, 8))
    for kind in range(2):
        shift[:, kind, early] = (noise * std * np.repeat(UNITS, 2))[:, 2 * kind, None]
        shift[:, kind, next_] = (noise * std * np.repeat(UNITS, 2))[:, 2 * kind + 1, None]
    speed = observation["ego_dynamics_rig"][:, 0].astype(np.float64)
    knots = policy.forward(observation).detach().numpy().reshape(5, 2, 8) * UNITS[None, :, None]
    np.testing.assert_allclose(drawn.plan_rig, roll_out(knots + shift, speed), atol=2e-3)


def test_the_mean_plan_uses_all_knots(policy):
    observation = observe(policy)
    other = WaypointConfig(hidden=16).build()
    with torch.no_grad():
        other.module.head.bias.copy_(torch.linspace(-0.2, 0.2, 16))
    decision = other.act(observation, seeds(5), MEAN)
    wanted = other.forward(observation).detach().numpy().reshape(5, 2, 8) * UNITS[None, :, None]
    speed = observation["ego_dynamics_rig"][:, 0].astype(np.float64)
    np.testing.assert_allclose(decision.plan_rig, roll_out(wanted, speed), atol=1e-4)
    assert len(np.unique(np.round(wanted[0].ravel(), 4))) == 16
    assert not decision.carry["noise"].any()


def test_the_first_plan_of_fresh_weights_keeps_about_its_speed_and_heading(policy):
    observation = observe(policy)
    knots = policy.forward(observation).detach().numpy().reshape(5, 2, 8) * UNITS[None, :, None]
    assert np.abs(knots[:, 0]).max() < 0.5
    assert np.abs(knots[:, 1]).max() < 0.01


def test_noise_is_correlated_over_ticks_with_unit_variance(policy):
    count = 4000
    observation = observe(policy, 1, first_tick=True)
    observation = {name: np.repeat(array, count, axis=0) for name, array in observation.items()}
    history = []
    for tick in range(4):
        decision = policy.act(observation, seeds(count) + np.uint64(100_000 * tick), Sampling())
        observation["carry_noise"] = decision.carry["noise"]
        history.append(decision.carry["noise"].ravel())
    # 16000 values: the error of a standard deviation is 1/sqrt(2·16000) = 0.006, of a correlation 0.008.
    np.testing.assert_allclose([h.std() for h in history], 1.0, atol=0.03)
    np.testing.assert_allclose(np.corrcoef(history)[0], [1.0, 0.9, 0.81, 0.729], atol=0.03)


def test_the_log_probability_by_hand(policy):
    # Four independent Gaussians: -Σ z²/2 - Σ ln σ - 2 ln 2π, σ = temperature · (0.7, 0.7, 0.1, 0.1).
    observation = observe(policy, first_tick=True)
    decision = policy.act(observation, seeds(5), Sampling("sample", 2.0))
    z = normal(seeds(5), 4)
    wanted = -0.5 * (z**2).sum(axis=1) - 2 * np.log(1.4) - 2 * np.log(0.2) - 2 * np.log(2 * np.pi)
    np.testing.assert_allclose(decision.log_prob[:, 0], wanted, atol=1e-4)
    # Entropy of a Gaussian: ln σ + (1 + ln 2π)/2, four times.
    score = policy.score(observation, decision, Sampling("sample", 2.0))
    wanted = 2 * np.log(1.4) + 2 * np.log(0.2) + 2 * (1 + np.log(2 * np.pi))
    np.testing.assert_allclose(score.entropy.numpy(), wanted, atol=1e-5)


def test_another_temperature_is_another_density(policy):
    observation = observe(policy)
    decision = policy.act(observation, seeds(5), Sampling("sample", 2.0))
    again = policy.score(observation, decision, Sampling("sample", 2.0)).log_prob.detach().numpy()
    other = policy.score(observation, decision, Sampling("sample", 1.0)).log_prob.detach().numpy()
    np.testing.assert_allclose(np.exp(again - decision.log_prob), 1.0, atol=1e-6)
    assert np.abs(other - decision.log_prob).min() > 0.1


# ---------------------------------------------------------------- forwards


@pytest.mark.parametrize(("count", "rows"), [(0, 16), (1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (257, 512)])
def test_forwards_are_padded_to_buckets(count, rows):
    assert bucket(count) == rows


@pytest.mark.parametrize("junk", [0.0, 1e30, np.nan, np.inf])
def test_what_is_masked_is_not_read(policy, junk):
    observation = observe(policy)
    for mask, field in (
        ("ego_history_mask", "ego_history_rig"),
        ("route_mask", "route_rig"),
        ("actors_mask", "actors_rig"),
    ):
        observation[mask] = np.zeros_like(observation[mask])
        observation[field] = np.full_like(observation[field], junk)
    clean = observation | {
        name: np.zeros_like(observation[name]) for name in ("ego_history_rig", "route_rig", "actors_rig")
    }
    with np.errstate(all="ignore"):
        found = policy.act(observation, seeds(5), Sampling())
        score = policy.score(observation, found, Sampling())
    assert_same(found, policy.act(clean, seeds(5), Sampling()), "the decision")
    assert np.isfinite(found.plan_rig).all()
    score.log_prob.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in policy.module.parameters())
    policy.module.zero_grad(set_to_none=True)


def test_the_order_of_road_users_does_not_matter(policy):
    observation = observe(policy)
    shuffled = observation | {name: observation[name][:, ::-1].copy() for name in ("actors_rig", "actors_mask")}
    assert_same(policy.act(shuffled, seeds(5), MEAN), policy.act(observation, seeds(5), MEAN), "the decision")


def test_inputs_far_out_of_range_are_bounded(policy):
    observation = observe(policy)
    observation["actors_rig"][..., :5] = 1e6
    observation["route_rig"][:] = -1e6
    ego, actors = ego_features(observation), actor_features(observation)
    assert max(np.abs(ego).max(), np.abs(actors).max()) <= 6.0


def test_a_seed_gives_the_weights_and_leaves_the_global_generator_alone():
    state = torch.random.get_rng_state()
    first, second, other = (WaypointConfig(hidden=16, seed=seed).build().module.state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


# ---------------------------------------------------------------- cameras


def camera_policy(device="cpu", **options):
    return WaypointConfig(**({"cameras": ["front"]} | SMALL_CAMERA | options)).build(device)


def test_with_a_camera_it_reads_pictures_and_no_road_users():
    spec = WaypointConfig(cameras=["left", "right"], camera_height=32, camera_width=64, frames=3).spec()
    assert spec.fields == ("ego_history_rig", "ego_dynamics_rig", "route_rig")
    assert dict(spec.cameras) == {"left": (32, 64), "right": (32, 64)}
    assert (spec.frames, spec.frame_step_us, spec.privileged) == (3, 200_000, ())


def test_the_default_camera_network_has_fewer_than_a_million_weights():
    module = WaypointConfig(cameras=["front"]).build().module
    assert sum(p.numel() for p in module.parameters()) < 200_000


@pytest.mark.parametrize("frame", [0, 1])
@pytest.mark.parametrize("camera", ["left", "right"])
def test_every_frame_of_every_camera_counts(camera, frame):
    policy = camera_policy(cameras=["left", "right"])
    observation = observe(policy)
    other = {name: array.copy() for name, array in observation.items()}
    other[f"camera_{camera}"][:, frame] = 255 - other[f"camera_{camera}"][:, frame]
    with torch.no_grad():
        assert (policy.forward(observation) != policy.forward(other)).any(dim=1).all()


def test_the_first_layer_is_a_convolution_over_the_channels_of_all_frames():
    policy = camera_policy(frames=3)
    pictures = observe(policy)["camera_front"]
    encoder = policy.module.encoders[0]
    seen = []
    handle = encoder.rest.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        encoder(torch.from_numpy(pictures))
        handle.remove()
        channels = torch.from_numpy(pictures).permute(0, 1, 4, 2, 3).flatten(1, 2).float()
        weight = torch.cat([layer.weight for layer in encoder.stem], dim=1)
        wanted = torch.nn.functional.conv2d((channels - 128) / 64, weight, encoder.stem[0].bias, stride=4)
    torch.testing.assert_close(seen[0], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_row_has_the_same_bits_in_every_bucket(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    policy = camera_policy(device=device)
    observation = observe(policy, 300)
    whole = policy.act(observation, seeds(300), Sampling())
    for count in (1, 7, 8, 17, 100, 256):
        rows = np.arange(count)[::-1].copy()
        part = policy.act({name: array[rows] for name, array in observation.items()}, seeds(300)[rows], Sampling())
        assert_same(part, whole.take(rows), f"{count} rows")


def test_a_blanked_camera_hides_the_pictures_and_nothing_else():
    seeing, blind = camera_policy(), camera_policy(blank_cameras=True)
    observation = observe(seeing)
    black = observation | {"camera_front": np.zeros_like(observation["camera_front"])}
    found = blind.act(observation, seeds(5), Sampling())
    assert_same(found, seeing.act(black, seeds(5), Sampling()), "the decision on black pictures")
    assert (found.plan_rig != seeing.act(observation, seeds(5), Sampling()).plan_rig).any()
    torch.testing.assert_close(blind.score(observation, found, Sampling()).log_prob.detach().numpy(), found.log_prob)


def test_pictures_that_may_not_be_written_are_read():
    policy = camera_policy()
    observation = observe(policy)
    locked = {name: array.copy() for name, array in observation.items()}
    locked["camera_front"].flags.writeable = False
    assert_same(policy.act(locked, seeds(5), MEAN), policy.act(observation, seeds(5), MEAN), "the decision")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cameras": ["a", "a"]}, r"cameras\[1\]: must be the name of another camera"),
        ({"cameras": [""]}, r"cameras\[0\]"),
        ({"camera_height": 50}, "camera_height: must be a multiple of 4, got 50"),
        ({"camera_width": 8}, "camera_width"),
        ({"channels": [16, 32]}, "channels: must be three numbers"),
        ({"channels": [16, 32, 4]}, r"channels\[2\]"),
        ({"frames": 0}, "frames"),
        ({"blank_cameras": True}, "blank_cameras: there is no camera to blank"),
    ],
)
def test_a_wrong_camera_option_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        WaypointConfig(**options)


# ---------------------------------------------------------------- weights


def test_weights_come_from_a_file(tmp_path):
    other = camera_policy(seed=5)
    save_file(other.module.state_dict(), tmp_path / "model.safetensors")
    observation = observe(other)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        policy = camera_policy(model=ModelSection(str(path)))
        assert_same(policy.act(observation, seeds(5), MEAN), other.act(observation, seeds(5), MEAN), "the decision")


def test_weights_of_another_shape_are_refused_with_their_place(tmp_path):
    save_file(camera_policy().module.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"(?s)policy\.model\.path: the weights in .* do not fit .*ego\.0\.weight"):
        camera_policy(hidden=32, model=ModelSection(str(tmp_path)))


def test_the_bundled_weights_are_those_of_the_default_camera_policy():
    fresh = WaypointConfig(cameras=["front"]).build()
    bundled = WaypointConfig(cameras=["front"], model=ModelSection("bundled")).build()
    assert any(
        not torch.equal(a, b) for a, b in zip(fresh.module.parameters(), bundled.module.parameters(), strict=True)
    )
    assert all(torch.isfinite(p).all() for p in bundled.module.parameters())
    with pytest.raises(ConfigError, match=r"bundled\.safetensors do not fit"):
        WaypointConfig(model=ModelSection("bundled")).build()


@pytest.mark.slow  # pytest -m slow packages/policies/waypoint; compiles and renders
@pytest.mark.timeout(900)
def test_the_bundled_policy_drives(tmp_path):
    words = ["policy=waypoint_trained", "dataset.test_scenes=64", "--directory", str(tmp_path / "run")]
    command = [sys.executable, "-m", "alpagym_host.cli", "evaluate", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    score = json.loads((tmp_path / "run" / "summary.json").read_text())["evaluations"]["final"]["driving_score"]
    # 0.83 on 256 scenes (docs/benchmarks.md); a fresh network 0.23. The standard error of 64 scenes is 0.05.
    assert score["mean"] > 0.68


def test_missing_weights_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"policy\.model\.path: .*nowhere.* does not exist"):
        camera_policy(model=ModelSection(str(tmp_path / "nowhere")))


# ---------------------------------------------------------------- value head


def test_a_value_head_changes_no_decision(policy):
    valued, observation = WaypointConfig(hidden=16, value_head=True).build(), observe(policy)
    assert_same(valued.act(observation, seeds(5), SAMPLE), policy.act(observation, seeds(5), SAMPLE), "the decision")
    score = valued.score(observation, valued.act(observation, seeds(5), SAMPLE), SAMPLE)
    assert score.value.shape == (5,)
    score.value.sum().backward()
    assert all((p.grad is not None) == name.startswith("value.") for name, p in valued.module.named_parameters())
    assert policy.score(observation, policy.act(observation, seeds(5), SAMPLE), SAMPLE).value is None


def test_weights_serve_with_and_without_a_value_head():
    plain, valued = (WaypointConfig(value_head=head, seed=4).build() for head in (False, True))
    other = WaypointConfig(value_head=True, seed=5).build()
    own = {name: value.clone() for name, value in other.module.state_dict().items()}
    other.load(plain.module.state_dict(), 1)
    for name, value in other.module.state_dict().items():
        wanted = own[name] if name.startswith("value.") else plain.module.state_dict()[name]
        assert torch.equal(value, wanted), name
    other.load(valued.module.state_dict(), 2)
    assert_same(
        {n: v.numpy() for n, v in other.module.state_dict().items()},
        {n: v.numpy() for n, v in valued.module.state_dict().items()},
        "the weights",
    )
    plain.load(valued.module.state_dict(), 3)
    with pytest.raises(RuntimeError, match="value.head.bias"):
        other.load({n: v for n, v in valued.module.state_dict().items() if n != "value.head.bias"}, 4)


# ---------------------------------------------------------------- imitation


def test_imitation_learns_an_experts_plans():
    policy = WaypointConfig(hidden=32).build()
    assert isinstance(policy, ImitatingPolicy)
    observation = observe(policy, 64)
    speed = observation["ego_dynamics_rig"][:, 0].astype(np.float64)
    knots = np.zeros((64, 2, 8))
    knots[:, 0] = np.clip((12.0 - speed) / 4.0, -1.5, 1.5)[:, None]
    target = roll_out(knots, speed)
    optimiser = torch.optim.Adam(policy.module.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        loss = policy.imitation_loss(observation, target)
        assert tuple(loss.shape) == (64,)
        optimiser.zero_grad()
        loss.mean().backward()
        optimiser.step()
        losses.append(loss.mean().item())
    assert losses[-1] < 0.3 * losses[0]
    found = policy.act(observation, seeds(64), MEAN).plan_rig
    before = WaypointConfig(hidden=32).build().act(observation, seeds(64), MEAN).plan_rig
    assert np.abs(found - target)[:, 20].mean() < np.abs(before - target)[:, 20].mean()


def test_a_plan_of_its_own_costs_nothing(policy):
    observation = observe(policy)
    plan = policy.act(observation, seeds(5), MEAN).plan_rig
    assert policy.imitation_loss(observation, plan).max().item() < 1e-3


# ---------------------------------------------------------------- what is around, while it imitates


def around_policy(**options):
    return WaypointConfig(cameras=["front"], around_weight=2.0, **SMALL_CAMERA, **options).build()


def lesson(policy, count=5):
    """An observation with what the policy's imitation is told besides."""
    observation = observe(policy, count)
    told = example_observation(replace(policy.spec, fields=policy.spec.lesson, cameras={}, carry={}), count, 1)
    return observation | {name: told[name] for name in ("actors_rig", "actors_mask")}


def test_cells_say_where_road_users_are_and_will_be():
    actors = np.zeros((1, 2, 9), np.float32)
    # Of 4 m by 2 m, 14.5 m ahead in the lane, 10 m/s: x 12.5 to 16.5, 22.5 to 26.5 (over the edge at 23), 32.5 to 36.5.
    actors[0, 0, [0, 3, 5, 6]] = 14.5, 10.0, 4.0, 2.0
    # Across, so 2 m by 4 m, 6 m to the left and leaving the cells at once: y 4 to 8, then 14 to 18.
    actors[0, 1, [0, 1, 2, 4, 5, 6]] = 6.0, 6.0, np.pi / 2, 10.0, 4.0, 2.0
    found = cells_taken({"actors_rig": actors, "actors_mask": np.ones((1, 2), bool)}).reshape(3, 7, 7)
    ahead = {(0, 3, 3), (1, 4, 3), (1, 5, 3), (2, 6, 3)}
    assert {*map(tuple, np.argwhere(found))} == ahead | {(0, 1, 5), (0, 1, 6)}
    hidden = cells_taken({"actors_rig": actors, "actors_mask": np.zeros((1, 2), bool)})
    assert hidden.shape == (1, CELLS)
    assert not hidden.any()


def test_what_is_around_is_a_lesson_and_nothing_to_drive_by():
    policy, plain = around_policy(), WaypointConfig(cameras=["front"], **SMALL_CAMERA).build()
    assert policy.spec.lesson == ("actors_rig",)
    assert "actors_rig" not in policy.spec.fields
    observation = lesson(policy)
    assert_same(policy.act(observation, seeds(5), SAMPLE), plain.act(observe(plain), seeds(5), SAMPLE), "the decision")


def test_the_lesson_adds_its_cross_entropy():
    policy, plain = around_policy(), WaypointConfig(cameras=["front"], **SMALL_CAMERA).build()
    observation, target = lesson(policy), policy.act(observe(policy), seeds(5), SAMPLE).plan_rig
    untold = {name: value for name, value in observation.items() if not name.startswith("actors")}
    torch.testing.assert_close(policy.imitation_loss(untold, target), plain.imitation_loss(untold, target))
    with torch.no_grad():
        policy.module.around.weight.zero_()
        policy.module.around.bias.zero_()
    # Logits of 0 cost ln 2 a cell, whatever is there; the weight is 2.
    more = policy.imitation_loss(observation, target) - policy.imitation_loss(untold, target)
    torch.testing.assert_close(more, torch.full((5,), 2.0 * float(np.log(2.0))), rtol=1e-4, atol=1e-5)
    policy.imitation_loss(observation, target).sum().backward()
    assert all(p.grad is not None for p in policy.module.parameters())


def test_weights_serve_with_and_without_what_is_around():
    plain, taught = WaypointConfig(cameras=["front"], seed=4, **SMALL_CAMERA).build(), around_policy(seed=5)
    own = taught.module.around.weight.clone()
    taught.load(plain.module.state_dict(), 1)
    assert torch.equal(taught.module.around.weight, own)
    plain.load(around_policy(seed=6).module.state_dict(), 2)
    assert "around.weight" not in plain.module.state_dict()


def test_without_pictures_there_is_nothing_to_find():
    with pytest.raises(ConfigError, match="around_weight: there are no pictures"):
        WaypointConfig(around_weight=1.0)


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("option", "value"),
    [("hidden", 15), ("actors", 0), ("acceleration_std", 0.0), ("curvature_std", -1.0), ("noise_correlation", 1.0)],
)
def test_an_option_out_of_range_is_named(option, value):
    with pytest.raises(ConfigError, match=f"{option}: must be a finite number"):
        WaypointConfig(**{option: value})


def run_without_torch(code):
    """Runs code in a process where torch cannot be imported."""
    block = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torch':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from alpagym_waypoint.config import WaypointConfig\n"
    )
    return subprocess.run([sys.executable, "-c", block + code], capture_output=True, text=True, check=False)


def test_the_spec_needs_no_torch():
    done = run_without_torch("spec = WaypointConfig(actors=3).spec()\nprint(spec.actors, 'torch' in sys.modules)")
    assert (done.returncode, done.stdout) == (0, "3 False\n"), done.stderr


def test_building_without_torch_says_what_to_install():
    done = run_without_torch("WaypointConfig().build()")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "ConfigError: policy: policy 'waypoint' needs the module 'torch': pip install 'alpagym-waypoint[torch]'"
    )


def test_weights_are_spread_from_the_inside_out():
    """A value network lies in the root as a whole and has lists of its own: those come first."""
    program = """
import os
from types import SimpleNamespace
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
import torch
from alpagym_runtime.trainers.learner import spread
from alpagym_waypoint.config import WaypointConfig
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
module = spread(WaypointConfig(cameras=["front"], value_head=True).build().module, SimpleNamespace(size=1))
print(sum(hasattr(p, "full_tensor") for p in module.parameters()) == len(list(module.parameters())))
"""
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert made.stdout.strip() == "True", made.stderr
