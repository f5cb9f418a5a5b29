"""The tiny policy keeps the contract, by both heads, with and without cameras."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from alpagym_alpamayo_r1.action_expert import Chain
from alpagym_alpamayo_r1.config import Alpamayo1Config, Alpamayo15Config, AlpamayoTinyConfig
from alpagym_alpamayo_r1.policy import known_history, plan_draws
from alpagym_plugins import ConfigError
from alpagym_runtime.deploy_config import LoraSection
from alpagym_runtime.random import uniform
from alpagym_runtime.testing.conformance import TrainablePolicyConformance
from alpagym_runtime.testing.examples import example_observation
from alpagym_runtime.trainers.lora import add_adapters
from alpagym_runtime.types import ImitatingPolicy, Sampling


# A decision is 128 forwards: few rows by default.
class TestTokens(TrainablePolicyConformance):
    sampling = Sampling(temperature=0.6, top_p=0.98)
    sizes = (1, 2, 3)

    def make(self):
        return AlpamayoTinyConfig(cameras=["front_wide_120fov"], frames=2, rows=2).build()


@pytest.mark.slow
class TestTokensWithoutPictures(TrainablePolicyConformance):
    def make(self):
        return AlpamayoTinyConfig().build()


class TestExpert(TrainablePolicyConformance):
    sizes = (1, 3, 8, 9)
    # A factor is the density of 128 coordinates: float32 rounding of each mean, over a noise of 0.05 to 0.16.
    score_tolerance = 1e-5

    def make(self):
        return AlpamayoTinyConfig(head="expert").build()


class TestReasoningThenTokens(TrainablePolicyConformance):
    sampling = Sampling(temperature=0.6, top_p=0.98)
    sizes = (1, 2, 3)

    def make(self):
        return AlpamayoTinyConfig(reasoning_tokens=6, rows=2).build()


class TestReasoningThenExpert(TrainablePolicyConformance):
    sampling = Sampling(temperature=0.6, top_p=0.98)
    sizes = (1, 2, 3)
    score_tolerance = 2e-5  # a unit in the last place of a factor of 128 to 256

    def make(self):
        return AlpamayoTinyConfig(head="expert", reasoning_tokens=6, rows=2, train_backbone=True).build()


def test_imitation_lowers_the_loss():
    policy = AlpamayoTinyConfig(rows=4).build()
    assert isinstance(policy, ImitatingPolicy)
    observation = example_observation(policy.spec, 4)
    speed = observation["ego_dynamics_rig"][:, 0]
    target = np.zeros((4, 64, 3), np.float32)
    target[..., 0] = speed[:, None] * np.arange(1, 65) * 0.1
    optimiser = torch.optim.AdamW(policy.module.parameters(), lr=3e-3)
    losses = []
    for _ in range(25):
        loss = policy.imitation_loss(observation, target).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(np.log(3000), abs=0.5)  # random weights: all bins alike
    assert losses[-1] < losses[0] - 2.0
    # Straight ahead at constant speed is what was learned: 6.4 s later the car is where it should be.
    plan = policy.act(observation, np.arange(4, dtype=np.uint64), Sampling(mode="mean")).plan_rig
    assert np.abs(plan[:, :10] - target[:, :10]).max() < 1.0


def test_without_noise_the_expert_has_no_log_probability():
    policy = AlpamayoTinyConfig(head="expert", noise_level=0.0).build()
    observation = example_observation(policy.spec, 2)
    decision = policy.act(observation, np.arange(2, dtype=np.uint64), Sampling())
    assert not decision.log_prob_mask.any()
    with pytest.raises(ConfigError, match="policy.noise_level"):
        policy.score(observation, decision, Sampling())


def test_draws_of_a_plan_follow_each_other_in_time():
    draws = plan_draws(np.arange(20_000, dtype=np.uint64), 6, 0.8)
    noise = torch.special.ndtri(torch.from_numpy(draws)).numpy()
    assert ((draws >= 0.0) & (draws < 1.0)).all()
    # Standard errors: 0.29 / sqrt(20000) = 0.002 of a mean, 0.007 of a correlation.
    np.testing.assert_allclose(draws.mean(0), 0.5, atol=0.01)
    np.testing.assert_allclose(noise.std(0), 1.0, atol=0.02)
    # a0 k0 a1 k1 a2 k2: 0.8 from an acceleration to the next, 0.64 to the one after; none across coordinates.
    expected = [1.0, 0.0, 0.8, 0.0, 0.64, 0.0]
    np.testing.assert_allclose(np.corrcoef(noise.T)[0], expected, atol=0.03)
    np.testing.assert_array_equal(
        plan_draws(np.arange(3, dtype=np.uint64), 6, 0.0), uniform(np.arange(3, dtype=np.uint64), 6)
    )


@pytest.mark.parametrize("wrong", [{"head": "expert"}, {"engine": "vllm"}])
def test_only_tokens_of_our_own_are_drawn_with_correlation(wrong):
    with pytest.raises(ConfigError, match="noise_correlation"):
        AlpamayoTinyConfig(noise_correlation=0.5, **wrong)


def test_only_the_expert_learns_unless_asked():
    for train_backbone in (False, True):
        policy = AlpamayoTinyConfig(head="expert", rows=2, train_backbone=train_backbone).build()
        observation = example_observation(policy.spec, 2)
        decision = policy.act(observation, np.arange(2, dtype=np.uint64), Sampling())
        policy.score(observation, decision, Sampling()).log_prob.sum().backward()
        learns = {
            name.split(".")[0] for name, p in policy.module.named_parameters() if p.grad is not None and p.grad.any()
        }
        assert learns == {"expert", "action_in_proj", "action_out_proj"} | ({"vlm"} if train_backbone else set())


def test_the_chain_keeps_the_distribution_of_the_flow():
    # Data N(3, 0.5²) and noise N(0, 1): x_t ~ N(3 t, s²) with s² = 0.25 t² + (1 - t)², and the exact velocity is
    # E[data - noise | x_t] = 3 + (0.25 t - (1 - t)) / s² · (x - 3 t). 200 steps: x_1 ~ N(3, 0.5²) with any noise.
    def velocity(x, time):
        t = time[:, None, None]
        return 3 + (0.25 * t - (1 - t)) / (0.25 * t**2 + (1 - t) ** 2) * (x - 3 * t)

    noise = torch.randn(2000, 201, 2, 1, generator=torch.Generator().manual_seed(1))
    for level, modes in ((0.3, None), (1.0, None), (1.0, 1)):
        for drawn in (None, 60):
            chain = Chain(200, level, drawn, modes=modes)
            x, end, log_prob = chain.sample(velocity, noise[:, : chain.factors + 1])
            # Standard errors: 0.5 / sqrt(4000) = 0.008 of the mean, 0.0056 of the deviation.
            assert end.mean() == pytest.approx(3.0, abs=0.03)
            assert end.std() == pytest.approx(0.5, abs=0.025)
            assert log_prob.shape == (2000, drawn or 200)
            assert torch.equal(chain.log_prob(velocity, x), log_prob)


def test_the_density_of_a_step():
    # One step from x = 1 with v = 2, level 0.5: t = 0, dt = 1, mean = 1 + 2 - 0.125 · 1 = 2.875, std = 0.5. Noise 1:
    # x_1 = 3.375, log-density = -1/2 - ln 0.5 - ln(2 pi) / 2 = -0.72579.
    x, end, log_prob = Chain(1, 0.5).sample(lambda x, t: torch.full_like(x, 2.0), torch.ones(1, 2, 1, 1))
    assert x[0, 1].item() == end.item() == pytest.approx(3.375)
    assert log_prob.item() == pytest.approx(-0.72579, abs=1e-5)
    # Three way-points of two coordinates, the first two counted: four such densities.
    _, _, log_prob = Chain(1, 0.5, counted=2).sample(lambda x, t: torch.full_like(x, 2.0), torch.ones(1, 2, 3, 2))
    assert log_prob.item() == pytest.approx(4 * -0.72579, abs=1e-5)


def test_noise_of_one_mode_moves_all_way_points_alike():
    # As above, two way-points at 1, noises 2 and 0: the constant cosine (1, 1) / sqrt 2 holds sqrt 2 of them, that is 1
    # each. mean = 2.875, x_1 = 3.375 each; log-density of the one coordinate: -(sqrt 2)² / 2 - ln 0.5 - ln(2 pi) / 2.
    noise = torch.tensor([[[1.0, 1.0], [2.0, 0.0]]])[..., None]
    x, _, log_prob = Chain(1, 0.5, modes=1).sample(lambda x, t: torch.full_like(x, 2.0), noise)
    np.testing.assert_allclose(x[0, 1, :, 0], [3.375, 3.375])
    assert log_prob.item() == pytest.approx(-1.22579, abs=1e-5)
    # Noise that sums to 0 moves nothing.
    noise[0, 1, :, 0] = torch.tensor([1.0, -1.0])
    x, _, log_prob = Chain(1, 0.5, modes=1).sample(lambda x, t: torch.full_like(x, 2.0), noise)
    np.testing.assert_allclose(x[0, 1, :, 0], [2.875, 2.875])
    x, _, _ = Chain(1, 0.5, counted=1, modes=1).sample(lambda x, t: torch.full_like(x, 2.0), noise)
    # The second has no noise and no drift back: 1 + 2.
    np.testing.assert_allclose(x[0, 1, :, 0], [3.375, 3.0])


def test_what_follows_the_drawn_steps_is_certain():
    # From x = 1, v = 2, two steps of 1/2, level 0.5, noise 1, one drawn: mean = 1 + 0.5 (2 - 0.125) = 1.9375,
    # std = 0.5 sqrt 0.5 = 0.35355, x_1 = 2.29105; then 0.5 · 2 more: 3.29105. Density: -1/2 - ln 0.35355 - 0.91894.
    x, end, log_prob = Chain(2, 0.5, 1).sample(lambda x, t: torch.full_like(x, 2.0), torch.ones(1, 2, 1, 1))
    assert x[0, 1].item() == pytest.approx(2.29105, abs=1e-5)
    assert end.item() == pytest.approx(3.29105, abs=1e-5)
    assert log_prob.tolist() == [pytest.approx([-0.37922], abs=1e-5)]


def test_tokens_of_the_first_seconds_can_be_a_plan():
    # Of 6.4 s, 2 s: 20 way-points of two tokens, those of the whole plan; behind them speed and curvature stay.
    whole, part = AlpamayoTinyConfig(rows=2).build(), AlpamayoTinyConfig(rows=2, decided_s=2.0).build()
    observation, seeds = example_observation(whole.spec, 2), np.arange(2, dtype=np.uint64)
    a, b = whole.act(observation, seeds, Sampling()), part.act(observation, seeds, Sampling())
    np.testing.assert_array_equal(b.trace["tokens"], a.trace["tokens"][:, :40])
    np.testing.assert_array_equal(b.log_prob, a.log_prob[:, :40])
    np.testing.assert_allclose(b.plan_rig[:, :20], a.plan_rig[:, :20], rtol=1e-6)
    steps = np.diff(b.plan_rig[:, 20:], axis=1)
    length, turn = np.hypot(steps[..., 0], steps[..., 1]), (steps[..., 2] + np.pi) % (2 * np.pi) - np.pi
    np.testing.assert_allclose(length, np.broadcast_to(length[:, :1], length.shape), rtol=1e-4)
    np.testing.assert_allclose(turn, np.broadcast_to(turn[:, :1], turn.shape), atol=1e-5)
    np.testing.assert_allclose(part.score(observation, b, Sampling()).log_prob.detach(), b.log_prob, atol=1e-6)


def test_a_small_plan_has_fewer_way_points_and_steps():
    small = {"rows": 2, "waypoints": 20, "denoising_steps": 5}
    for head, name, shape in (("tokens", "tokens", (2, 40)), ("expert", "denoising", (2, 6, 20, 2))):
        policy = AlpamayoTinyConfig(head=head, **small).build()
        assert policy.spec.plan_steps == 20
        observation, seeds = example_observation(policy.spec, 2), np.arange(2, dtype=np.uint64)
        decision = policy.act(observation, seeds, Sampling())
        assert decision.plan_rig.shape == (2, 20, 3)
        assert decision.trace[name].shape == shape
        assert policy.imitation_loss(observation, decision.plan_rig).shape == (2,)


def test_some_steps_and_some_way_points_of_the_expert_count():
    # Three of ten steps, 20 of 64 way-points: the plan is the same as with all way-points, the density is of fewer.
    options = {"head": "expert", "rows": 2, "noise_steps": 3}
    whole, part = AlpamayoTinyConfig(**options).build(), AlpamayoTinyConfig(**options, decided_s=2.0).build()
    observation, seeds = example_observation(whole.spec, 2), np.arange(2, dtype=np.uint64)
    a, b = whole.act(observation, seeds, Sampling()), part.act(observation, seeds, Sampling())
    assert a.trace["denoising"].shape == (2, 4, 64, 2)
    assert b.log_prob.shape == (2, 3)
    np.testing.assert_array_equal(a.plan_rig, b.plan_rig)
    assert (np.abs(b.log_prob) < np.abs(a.log_prob)).all()
    np.testing.assert_allclose(part.score(observation, b, Sampling()).log_prob.detach(), b.log_prob, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"head": "expert", "train_backbone": True}], ids=["tokens", "expert"])
def test_adapters_count_in_acting_and_scoring(options):
    policy = AlpamayoTinyConfig(rows=2, reasoning_tokens=3, decided_s=1.0, **options).build()
    observation, seeds = example_observation(policy.spec, 2), np.arange(2, dtype=np.uint64)
    plain = policy.act(observation, seeds, Sampling())
    add_adapters(policy.module, LoraSection(rank=2, alpha=4.0, targets=["*"]), seed=1)
    with torch.no_grad():
        for name, parameter in policy.module.named_parameters():
            if name.endswith("lora_up"):
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    decision = policy.act(observation, seeds, Sampling())
    score = policy.score(observation, decision, Sampling())
    np.testing.assert_allclose(score.log_prob.detach(), decision.log_prob, atol=1e-5)
    assert np.abs(decision.log_prob - plain.log_prob).max() > 0.1
    score.log_prob.sum().backward()
    learns = {name for name, p in policy.module.named_parameters() if p.grad is not None and p.grad.any()}
    assert learns
    assert all("lora_" in name for name in learns)
    assert any(name.startswith("vlm.lm_head") for name in learns)


def test_scores_are_those_of_the_module_that_is_set():
    # The KL to a reference, and weights that are spread over a team, are scored by exchanging the module.
    policy, other = AlpamayoTinyConfig(decided_s=1.0).build(), AlpamayoTinyConfig(decided_s=1.0, seed=1).build()
    observation = example_observation(policy.spec, 2)
    decision = policy.act(observation, np.arange(2, dtype=np.uint64), Sampling())
    expected = other.score(observation, decision, Sampling()).log_prob
    policy.module = other.module
    assert torch.equal(policy.score(observation, decision, Sampling()).log_prob, expected)


@pytest.mark.parametrize("head", ["tokens", "expert"])
def test_a_row_that_is_not_finite_fails_alone(head):
    policy = AlpamayoTinyConfig(head=head, rows=1, noise_level=0.5).build()
    observation = example_observation(policy.spec, 2)
    whole = policy.act(observation, np.arange(2, dtype=np.uint64), Sampling())
    observation["ego_history_rig"][1, -2, 0] = np.nan
    decision = policy.act(observation, np.arange(2, dtype=np.uint64), Sampling())
    assert decision.error is not None
    assert decision.error[0] is None
    assert "not finite" in decision.error[1]
    np.testing.assert_array_equal(decision.plan_rig[0], whole.plan_rig[0])


@pytest.mark.parametrize(
    "options", [{"decided_s": 1.0, "reasoning_tokens": 2}, {"head": "expert"}], ids=["tokens", "expert"]
)
def test_a_row_of_which_the_model_makes_no_number_fails_alone(options):
    # The embedding of a token that only the second row's history has is not finite: neither time it is decided.
    policy = AlpamayoTinyConfig(rows=4, **options).build()
    observation, seeds = example_observation(policy.spec, 3), np.arange(3, dtype=np.uint64)
    whole = policy.act(observation, seeds, Sampling(temperature=0.6, top_p=0.98))
    _, batch = next(policy._forwards(observation, 3))
    own = set(batch.input_ids[1].tolist()) - {*batch.input_ids[0].tolist(), *batch.input_ids[2].tolist()}
    with torch.no_grad():
        policy.module.vlm.model.language_model.embed_tokens.weight[min(own)] = torch.nan
    decision = policy.act(observation, seeds, Sampling(temperature=0.6, top_p=0.98))
    assert decision.error.tolist() == [None, "the model gave numbers that are not finite, twice", None]
    assert not decision.plan_rig[1].any()
    for row in (0, 2):
        np.testing.assert_array_equal(decision.plan_rig[row], whole.plan_rig[row])
        np.testing.assert_array_equal(decision.log_prob[row], whole.log_prob[row])


def test_reasoning_is_text_in_the_trace():
    policy = AlpamayoTinyConfig(reasoning_tokens=5, rows=2).build()
    decision = policy.act(example_observation(policy.spec, 2), np.arange(2, dtype=np.uint64), Sampling())
    ids, text = decision.trace["reasoning"], decision.trace["text"]
    assert ids.shape == (2, 5)
    row = bytes(text.values[text.offsets[0] : text.offsets[1]]).decode()
    assert row == policy.processor.tokenizer.decode(ids[0][ids[0] >= 0].tolist())
    assert decision.log_prob.shape == (2, 5 + 128)


@pytest.mark.slow
def test_the_expert_imitates():
    policy = AlpamayoTinyConfig(head="expert", rows=16, train_backbone=True).build()
    observation = example_observation(policy.spec, 16)
    target = np.zeros((16, 64, 3), np.float32)
    target[..., 0] = observation["ego_dynamics_rig"][:, :1] * np.arange(1, 65) * 0.1
    optimiser = torch.optim.AdamW(policy.module.parameters(), lr=1e-3)
    losses = []
    for _ in range(250):
        loss = policy.imitation_loss(observation, target).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    # The targets are actions near 0, so the velocity to learn is -noise, of power 1.
    assert np.mean(losses[:10]) == pytest.approx(1.0, abs=0.2)
    assert np.mean(losses[-20:]) < 0.7


def test_flow_matching_draws_new_noise_with_new_weights_only():
    policy = AlpamayoTinyConfig(head="expert", rows=2).build()
    observation, target = example_observation(policy.spec, 2), np.zeros((2, 64, 3), np.float32)
    first = policy.imitation_loss(observation, target)
    assert torch.equal(policy.imitation_loss(observation, target), first)
    with torch.no_grad():
        policy.module.action_out_proj.weight.mul_(1.0 + 1e-6)
    # 1e-6 more weight is no other loss; other noise is.
    assert (policy.imitation_loss(observation, target) - first).abs().min() > 1e-3


def test_a_converted_checkpoint_drives(training):
    config = Alpamayo15Config(cameras=["front_wide_120fov"], frames=1, height=64, width=96, rows=2)
    config.model.path = str(training)
    policy = config.build()
    observation = example_observation(policy.spec, 2)
    decision = policy.act(observation, np.arange(2, dtype=np.uint64), Sampling(temperature=0.6, top_p=0.98))
    assert decision.plan_rig.shape == (2, 64, 3)
    assert decision.trace["tokens"].max() < 300


def test_released_policies_need_a_path():
    with pytest.raises(ConfigError, match="policy.model.path"):
        Alpamayo1Config().build()


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"head": "diffusion"}, "head"),
        ({"cameras": ["front"]}, "cameras"),
        ({"cameras": ["front_wide_120fov", "cross_left_120fov"]}, "cameras"),
        ({"hidden": 20}, "hidden"),
        ({"frames": 0}, "frames"),
        ({"noise_steps": 0}, "noise_steps"),
        ({"decided_s": 6.5}, "decided_s"),
        ({"waypoints": 65}, "waypoints"),
        ({"denoising_steps": 0}, "denoising_steps"),
        ({"noise_modes": 0}, "noise_modes"),
    ],
)
def test_wrong_options_name_their_key(values, key):
    with pytest.raises(ConfigError) as caught:
        AlpamayoTinyConfig(**values)
    assert caught.value.key == key


def test_unknown_history_goes_on_straight():
    # Known: now and 0.1 s ago, 1 m behind; heading 0. Speed 10 m/s: 1 m a step.
    history = np.zeros((1, 4, 7), np.float32)
    history[..., 3] = 1.0
    history[0, :2, :3] = 99.0
    history[0, 2, 0] = -1.0
    xyz, yaw = known_history(history, np.array([[True, False, True, True]]), np.array([10.0], np.float32), 0.1)
    np.testing.assert_allclose(xyz[0], [[-3, 0, 0], [-2, 0, 0], [-1, 0, 0], [0, 0, 0]])
    assert (yaw == 0).all()
