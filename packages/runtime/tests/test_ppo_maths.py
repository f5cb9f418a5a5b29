from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from alpagym_runtime.errors import ConfigError
from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.trainers.ppo.advantages import (
    explained_variance,
    generalised_advantages,
    normalised,
    value_loss,
)
from alpagym_runtime.trainers.ppo.config import PpoConfig
from alpagym_runtime.trainers.ppo.trainer import PpoTrainer, select
from alpagym_runtime.trainers.team import ALONE
from alpagym_runtime.trainers.update import optimise, taking_part
from alpagym_runtime.types import Ended, Episode, EpisodeRequest, Failure, Sampling, Score

PLAIN = PpoConfig(normalise=False, discount=0.9, trace_decay=1.0, value_first=0)


# ---------------------------------------------------------------- advantages


@pytest.mark.parametrize(("terminated", "wanted"), [(False, [10.0, 10.0]), (True, [1.9, 1.0])])
def test_only_a_drive_that_was_cut_off_is_worth_what_would_follow(terminated, wanted):
    # Rewards 1, 1, values 0, 0, then 10; discount 0.9, decay 1.
    # Cut off: 1 + 0.9·10 = 10 at the second, 1 + 0.9·10 = 10 at the first. Ended: 1, and 1 + 0.9·1 = 1.9.
    found = generalised_advantages(np.ones(2), np.array([0.0, 0.0, 10.0]), terminated, 0.9, 1.0)
    np.testing.assert_allclose(found, wanted, atol=1e-12)


def test_advantages_by_hand():
    # discount 0.5, decay 0.5, so traces fade by 0.25. δ2 = 3 + 0.5·4 - 2 = 3; δ1 = 0 + 0.5·2 - 1 = 0;
    # δ0 = 1 + 0.5·1 - 0.5 = 1. Then 3; 0 + 0.25·3 = 0.75; 1 + 0.25·0.75 = 1.1875.
    found = generalised_advantages(np.array([1.0, 0.0, 3.0]), np.array([0.5, 1.0, 2.0, 4.0]), False, 0.5, 0.5)
    np.testing.assert_allclose(found, [1.1875, 0.75, 3.0], atol=1e-12)


def weighted_n_step(rewards, values, terminated, discount, decay):
    """The definition, not the recursion: the weighted mean of the n-step advantages (arXiv:1506.02438, eq. 16)."""
    count = len(rewards)
    values = np.append(values[:-1], 0.0 if terminated else values[-1])
    out = []
    for t in range(count):
        steps = [
            sum(discount**k * rewards[t + k] for k in range(n)) + discount**n * values[t + n] - values[t]
            for n in range(1, count - t + 1)
        ]
        weights = [(1 - decay) * decay ** (n - 1) for n in range(1, count - t)] + [decay ** (count - t - 1)]
        out.append(float(np.dot(weights, steps)))
    return out


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("terminated", [False, True])
def test_advantages_are_the_weighted_mean_of_all_n_step_returns(terminated, decay):
    random = np.random.default_rng(4)
    rewards, values = random.normal(size=12), random.normal(size=13)
    found = generalised_advantages(rewards, values, terminated, 0.97, decay)
    np.testing.assert_allclose(found, weighted_n_step(rewards, values, terminated, 0.97, decay), atol=1e-12)


def test_normalised_advantages_by_hand():
    # 1, 2, 3: mean 2, population std 0.8165
    values = np.array([1.0, 2.0, 3.0])
    mean, deviation = ALONE.moments(values)
    assert (mean, deviation) == (2.0, pytest.approx(0.8165, abs=1e-4))
    np.testing.assert_allclose(normalised(values, mean, deviation), [-1.2247, 0.0, 1.2247], atol=1e-4)
    assert normalised(np.full(3, 0.5), 0.5, 0.0).tolist() == [0.0, 0.0, 0.0]


def test_explained_variance_by_hand():
    # Deviation of the target 2; of what is missed 0: 1 - 0; 2: 1 - 4/4; 1: 1 - 1/4; 4: 1 - 16/4.
    assert [explained_variance(2.0, rest) for rest in (0.0, 2.0, 1.0, 4.0)] == [1.0, 0.0, 0.75, -3.0]
    assert explained_variance(0.0, 1.0) == 0.0


def test_the_values_loss_by_hand():
    # Errors 1 and 2: 0.5 · (1 + 4) / 2 = 1.25
    value, target = torch.tensor([1.0, 3.0], requires_grad=True), torch.tensor([0.0, 1.0])
    loss = value_loss(value, torch.zeros(2), target, 0.0, 2.0)
    loss.backward()
    assert loss.item() == 1.25
    assert value.grad.tolist() == [0.5, 1.0]


def test_a_value_that_moved_further_than_the_clip_towards_its_target_has_no_gradient():
    # Old 0, clip 0.2, targets 1 and -1. First: moved to 0.5, held at 0.2: max(0.25, 0.64) = 0.64, no gradient.
    # Second: moved the wrong way to 0.5: max(2.25, 1.44) = 2.25, gradient 1.5.
    value = torch.tensor([0.5, 0.5], requires_grad=True)
    loss = value_loss(value, torch.zeros(2), torch.tensor([1.0, -1.0]), 0.2, 1.0)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (0.64 + 2.25))
    assert value.grad.tolist() == [0.0, 1.5]


# ---------------------------------------------------------------- what of a step is trained on


class Seeing:
    """A value that is the feature itself, a Gaussian around a line of it."""

    def __init__(self, values=True):
        self.module = torch.nn.Linear(1, 2).double()
        torch.nn.init.constant_(self.module.weight, 0.1)
        torch.nn.init.zeros_(self.module.bias)
        self.version, self._values = 0, values

    def score(self, observations, decisions, sampling):
        x = torch.from_numpy(observations["x"])
        out = self.module(x)
        action = torch.from_numpy(decisions.log_prob).double()
        value = x[:, 0] + 0.0 * out[:, 0] + out[:, 1] - out[:, 1].detach()
        return Score(action + out[:, :1] - out[:, :1].detach(), out[:, 0], value if self._values else None)


def episode(rewards, values, ended=Ended.HORIZON, *, initial_fault=False):
    rewards = np.asarray(rewards, np.float64)
    count = len(rewards)
    decisions = plan_decision(np.zeros((count, 4, 3)))
    decisions.log_prob_mask[:] = True
    return Episode(
        EpisodeRequest("scene"),
        ended,
        Failure("permanent", "X", "broken") if ended == Ended.FAILED else None,
        {},
        0.5,
        initial_fault,
        observation={"x": np.asarray(values, np.float64)[:, None]},
        decisions=decisions,
        controls=np.ones(count, bool),
        rewards=rewards,
        sampling=Sampling("sample"),
    )


def test_the_value_of_the_last_observation_stands_for_what_a_cut_off_drive_missed():
    # MTH-07 through the episodes: rewards 1, 1, values 0, 0, 10, discount 0.9; the neighbours change nothing.
    ends = {Ended.HORIZON: [10.0, 10.0], Ended.SCENE_END: [10.0, 10.0]}
    ends |= {ended: [1.9, 1.0] for ended in (Ended.COLLISION, Ended.OFFROAD, Ended.GOAL, Ended.SCORED)}
    for ended, wanted in ends.items():
        alone, target, value = select(Seeing(), [episode([1, 1], [0, 0, 10], ended)], PLAIN)
        np.testing.assert_allclose(alone.advantage_B, wanted, atol=1e-6)
        np.testing.assert_allclose(target, wanted, atol=1e-6)  # values are 0
        assert value.tolist() == [0.0, 0.0]
        others = [episode([5], [3, 8]), episode([1, 1], [0, 0, 10], ended), episode([7], [2, 9], Ended.COLLISION)]
        among, _, _ = select(Seeing(), others, PLAIN)
        np.testing.assert_array_equal(among.advantage_B[1:3], alone.advantage_B)


def test_void_faulty_and_non_finite_episodes_are_left_out_and_counted():
    good = episode([1, 2], [0, 1, 2])
    wanted, _, _ = select(Seeing(), [good], PLAIN)
    bad = [
        episode([], [0], Ended.FAILED),
        episode([1], [0, 1], initial_fault=True),
        episode([math.nan], [0, 1]),
    ]
    found, _, _ = select(Seeing(), [bad[0], good, *bad[1:]], PLAIN)
    np.testing.assert_array_equal(found.advantage_B, wanted.advantage_B)
    assert {name: found.counts[name] for name in ("void", "initial_fault", "non_finite")} == {
        "void": 1.0,
        "initial_fault": 1.0,
        "non_finite": 1.0,
    }
    nothing, _, _ = select(Seeing(), bad, PLAIN)
    assert not len(nothing.advantage_B)


def test_warm_up_is_never_trained_on():
    row = episode([0, 1, 2], [0, 1, 2, 3])
    row.controls[0] = False
    found, target, value = select(Seeing(), [row], PLAIN)
    assert [len(part) for part in (found.advantage_B, target, value)] == [2, 2, 2]
    assert value.tolist() == [1.0, 2.0]


def test_a_policy_without_values_is_named():
    with pytest.raises(ConfigError, match="policy: gives no value .* policy.value_head=true"):
        select(Seeing(values=False), [episode([1], [0, 1])], PLAIN)


def test_preflight_asks_for_the_value_head():
    config = SimpleNamespace(policy=SimpleNamespace(config=SimpleNamespace(value_head=False)))
    problems = list(PpoConfig(warm_start=None).preflight(config, None))
    assert [(p.key, p.remedy) for p in problems] == [("policy.value_head", "policy.value_head=true")]
    config.policy.config.value_head = True
    assert not list(PpoConfig(warm_start=None).preflight(config, None))


# ---------------------------------------------------------------- the step


def one_step(config, step=0):
    """Gradient of both outputs' biases after a step of SGD, and what was logged."""
    policy = Seeing()
    run = SimpleNamespace(policy=policy, team=ALONE)
    data, further = PpoTrainer(config).learn_from(run, [episode([1, 1], [0, 0, 10]), episode([0], [1, 2])], step)
    optimiser = torch.optim.SGD(policy.module.parameters(), lr=0.0)
    numbers = optimise(policy, optimiser, data, config, 0, None, further)
    return policy.module.bias.grad.numpy(), numbers


def plain(**options):
    return PpoConfig(
        **({"normalise": False, "discount": 0.9, "trace_decay": 1.0, "value_first": 0, "gradient_clip": 1e9} | options)
    )


def test_a_steps_gradient_by_hand():
    # Advantages 10, 10 and 0 + 0.9·2 - 1 = 0.8; ratio 1, so the first output's gradient is -(10 + 10 + 0.8) / 3.
    # Values 0, 0, 1 miss the targets 10, 10, 1.8 by -10, -10, -0.8: times the weight 0.5, over 3.
    gradient, numbers = one_step(plain(epochs=1))
    np.testing.assert_allclose(gradient, [-20.8 / 3, 0.5 * -20.8 / 3], atol=1e-5)
    # 0.5 · (100 + 100 + 0.64) / 3
    assert numbers["value_loss"] == pytest.approx(33.44, abs=1e-4)


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_the_gradient_does_not_depend_on_the_micro_batch(micro_batch):
    whole, numbers = one_step(plain(epochs=1))
    parts, same = one_step(plain(epochs=1, micro_batch=micro_batch))
    np.testing.assert_allclose(parts, whole, atol=1e-6)
    assert same == pytest.approx(numbers, abs=1e-5)


def test_in_the_first_steps_only_the_value_learns():
    gradient, _ = one_step(plain(epochs=1, value_first=1))
    np.testing.assert_allclose(gradient, [0.0, 0.5 * -20.8 / 3], atol=1e-5)
    later, _ = one_step(plain(epochs=1, value_first=1), step=1)
    assert later[0] != 0.0


def test_a_value_that_is_not_finite_stops_the_step():
    policy, config = Seeing(), plain(epochs=1)
    data, further = PpoTrainer(config).learn_from(
        SimpleNamespace(policy=policy, team=ALONE), [episode([1, 1], [0, math.nan, 1])], 0
    )
    optimiser = torch.optim.SGD(policy.module.parameters(), lr=0.1)
    before = policy.module.bias.detach().clone()
    assert optimise(policy, optimiser, data, config, 0, None, further)["steps_refused"] == 1.0
    assert torch.equal(policy.module.bias, before)


def test_a_drive_that_teaches_nothing_can_stand_in_for_one_that_does():
    # All of this process's drives are void: the first one's decision is scored, and its loss has no weight.
    policy, config = Seeing(), plain(epochs=1)
    void = replace(episode([1, 1], [0, 0, 10]), ended=Ended.FAILED, failure=Failure("permanent", "X", "gone"))
    data, further = PpoTrainer(config).learn_from(SimpleNamespace(policy=policy, team=ALONE), [void], 0)
    assert data.decisions is None
    data = taking_part(data, [void])
    assert (data.taught, data.advantage_B.tolist()) == (0, [0.0])
    rows = np.zeros(1, np.int64)
    score = policy.score(data.observation.take(rows), data.decisions.take(rows), data.sampling)
    loss, numbers = further(score, rows, 3)
    (loss * 0.0).backward()
    assert np.isfinite(float(loss.detach()))
    assert policy.module.bias.grad.tolist() == [0.0, 0.0]
    assert numbers["value_loss"] >= 0.0
