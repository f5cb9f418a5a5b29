"""The tiny policy keeps the contract, by both heads, with and without cameras."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from alpagym_alpamayo_r1.config import Alpamayo1Config, Alpamayo15Config, AlpamayoTinyConfig
from alpagym_alpamayo_r1.policy import known_history
from alpagym_plugins import ConfigError
from alpagym_runtime.testing.conformance import PolicyConformance, TrainablePolicyConformance
from alpagym_runtime.testing.examples import example_observation
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


class TestExpert(PolicyConformance):
    sizes = (1, 3, 8, 9)

    def make(self):
        return AlpamayoTinyConfig(head="expert").build()


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


def test_the_expert_has_no_log_probability():
    policy = AlpamayoTinyConfig(head="expert").build()
    observation = example_observation(policy.spec, 2)
    decision = policy.act(observation, np.arange(2, dtype=np.uint64), Sampling())
    assert not decision.log_prob_mask.any()
    with pytest.raises(ConfigError, match="policy.head"):
        policy.score(observation, decision, Sampling())


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
