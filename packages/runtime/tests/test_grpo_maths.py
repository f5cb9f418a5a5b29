from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.trainers.base import Observations
from alpagym_runtime.trainers.grpo.advantages import group_advantages, returns_to_go, tick_advantages
from alpagym_runtime.trainers.grpo.config import GrpoConfig
from alpagym_runtime.trainers.grpo.trainer import select
from alpagym_runtime.trainers.policy_loss import kl_k3, masked_mean, policy_loss
from alpagym_runtime.trainers.update import StepData, optimise
from alpagym_runtime.types import Decision, Ended, Episode, EpisodeRequest, Failure, Sampling, Score

CLIP = {"clip_low": 0.2, "clip_high": 0.2}
WARM = Sampling("sample", 0.7)
ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True, width=64)


def column(*values):
    """[B,1] log-probabilities that collect gradients."""
    return torch.tensor(values, dtype=torch.float32)[:, None].requires_grad_()


def loss_of(new, old=None, mask=None, advantage=(1.0,), **options):
    old = torch.zeros_like(new) if old is None else old
    mask = torch.ones_like(new, dtype=torch.bool) if mask is None else mask
    return policy_loss(new, old, mask, torch.tensor(advantage, dtype=torch.float32), **(CLIP | options))


def gradient(parts, new):
    (found,) = torch.autograd.grad(parts.loss, new, retain_graph=True)
    return found


# ---------------------------------------------------------------- advantages of a group


def test_advantages_of_a_group():
    # rewards 1, 2, 3: mean 2, population std sqrt(2/3) = 0.8165  ->  -1.2247, 0, 1.2247
    np.testing.assert_allclose(group_advantages([1.0, 2.0, 3.0]), [-1.2247, 0, 1.2247], atol=1e-4)


def test_equal_rewards_have_no_advantage():
    assert group_advantages([1.0, 1.0, 1.0, 1.0]).tolist() == [0.0, 0.0, 0.0, 0.0]


def test_rounding_of_equal_float32_rewards_is_no_advantage():
    # The float32 mean of seven times 0.1 is one ulp off; over an epsilon of 1e-8 that would be -0.41.
    assert np.abs(group_advantages(np.full(7, 0.1, np.float32))).max() <= 1e-3


def test_statistics_are_the_groups_own():
    # [0, 1]: mean 0.5, std 0.5 -> -1, +1; over the batch (sample std) they would be ∓0.948, ∓0.776.
    first, second = group_advantages([0.0, 1.0]), group_advantages([10.0, 11.0])
    np.testing.assert_allclose(first, [-1.0, 1.0], atol=1e-6)
    np.testing.assert_allclose(second, first, atol=1e-6)
    batch = np.array([0.0, 1.0, 10.0, 11.0])
    np.testing.assert_allclose((batch - batch.mean()) / batch.std(ddof=1), [-0.948, -0.776, 0.776, 0.948], atol=1e-3)


def test_a_shift_of_all_rewards_changes_nothing():
    rewards = np.array([0.0, 0.25, 0.5, 3.0])
    np.testing.assert_allclose(group_advantages(rewards + 1000.0), group_advantages(rewards), atol=1e-4)


def test_the_order_of_a_group_does_not_matter():
    rewards, order = np.array([0.3, -1.0, 2.0, 0.3]), np.array([2, 0, 3, 1])
    np.testing.assert_allclose(group_advantages(rewards[order]), group_advantages(rewards)[order], atol=1e-12)


def test_a_reward_that_is_not_finite_stays_out_and_changes_no_other():
    found = group_advantages([1.0, math.nan, 2.0, math.inf, 3.0])
    np.testing.assert_allclose(found[[0, 2, 4]], group_advantages([1.0, 2.0, 3.0]))
    assert found[[1, 3]].tolist() == [0.0, 0.0]


def test_huge_rewards_do_not_overflow():
    # Their squares do: 1e200² = inf in float64.
    np.testing.assert_allclose(group_advantages([1e200, 2e200, 3e200]), [-1.2247, 0, 1.2247], atol=1e-4)
    np.testing.assert_allclose(group_advantages([-1.7e308, 1.7e308]), [-1.0, 1.0], atol=1e-6)


@given(st.lists(ANY_FLOAT, max_size=16))
def test_advantages_are_finite_for_any_rewards(rewards):
    found = group_advantages(rewards)
    assert found.shape == (len(rewards),)
    assert np.isfinite(found).all()


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=16))
def test_advantages_of_a_group_have_mean_zero(rewards):
    assert abs(group_advantages(rewards).mean()) <= 1e-6


@given(st.lists(st.lists(ANY_FLOAT, min_size=1, max_size=6), min_size=1, max_size=5), st.sampled_from([0.0, 0.05]))
def test_advantages_by_tick_are_finite_for_any_rewards(rewards, spread_floor):
    found = tick_advantages([np.array(r) for r in rewards], 0.97, spread_floor)
    assert [len(a) for a in found] == [len(r) for r in rewards]
    assert all(np.isfinite(a).all() for a in found)


def test_returns_to_go_by_hand():
    # 3 -> 3;  2 + 0.5·3 = 3.5;  1 + 0.5·3.5 = 2.75
    assert returns_to_go([1.0, 2.0, 3.0], 0.5).tolist() == [2.75, 3.5, 3.0]
    assert returns_to_go([], 0.5).tolist() == []


def test_advantages_by_tick_by_hand():
    # Returns to go with discount 1: first [3, 2], second [0, 0, 0], third [6].
    # Tick 0: mean 3, deviations 0, -3, 3, std sqrt(18/3) = 2.44949; with floor 0.05: 0, -1.200245, 1.200245.
    # Tick 1, two left: mean 1, deviations ±1, std 1: ±1/1.05 = ±0.952381. Tick 2, one left: 0.
    rewards = [np.array([1.0, 2.0]), np.array([0.0, 0.0, 0.0]), np.array([6.0])]
    first, second, third = tick_advantages(rewards, 1.0, 0.05)
    np.testing.assert_allclose(first, [0.0, 0.952381], atol=1e-6)
    np.testing.assert_allclose(second, [-1.200245, -0.952381, 0.0], atol=1e-6)
    np.testing.assert_allclose(third, [1.200245], atol=1e-6)


def test_members_that_earn_the_same_at_each_tick_have_no_advantage_without_a_floor():
    for advantage in tick_advantages([np.array([0.1, 0.3])] * 3, 0.97, 0.0):
        assert advantage.tolist() == [0.0, 0.0]


@given(st.lists(st.lists(st.floats(-100, 100), min_size=4, max_size=4), min_size=2, max_size=6))
def test_advantages_by_tick_have_mean_zero_at_each_tick(rewards):
    found = np.array(tick_advantages([np.array(r) for r in rewards], 0.97, 0.05))
    assert np.abs(found.mean(axis=0)).max() <= 1e-6


# ---------------------------------------------------------------- masks


def test_masked_losses_neither_add_nor_dilute():
    # (1 + 1) / 2 = 1; the unmasked numerator would give (1 + 100 + 1 - 50) / 2 = 26.
    values = torch.tensor([[1.0, 100.0], [1.0, -50.0]], requires_grad=True)
    mask = torch.tensor([[True, False], [True, False]])
    mean = masked_mean(values, mask)
    mean.backward()
    assert mean.item() == 1.0
    assert values.grad.tolist() == [[0.5, 0.0], [0.5, 0.0]]


@pytest.mark.parametrize("padding", [1e30, -1e30, math.nan, math.inf])
def test_masked_cells_may_hold_anything(padding):
    mask = torch.tensor([[True, False], [True, False]])
    values = torch.tensor([[1.0, padding], [1.0, padding]], requires_grad=True)
    mean = masked_mean(values, mask)
    mean.backward()
    assert mean.item() == 1.0
    assert values.grad.tolist() == [[0.5, 0.0], [0.5, 0.0]]

    new = torch.tensor([[0.1, padding], [padding, -0.1]], requires_grad=True)
    clean = torch.tensor([[0.1, 0.0], [0.0, -0.1]], requires_grad=True)
    mask = torch.tensor([[True, False], [False, True]])
    options = {"advantage": (1.0, -1.0), "kl_weight": 0.5, "mask": mask}
    dirty = loss_of(new, torch.where(mask, 0.0, padding), reference_log_prob_BJ=new.detach().clone(), **options)
    wanted = loss_of(clean, reference_log_prob_BJ=clean.detach().clone(), **options)
    assert dirty.finite
    assert dirty.loss.item() == wanted.loss.item()
    assert gradient(dirty, new).tolist() == gradient(wanted, clean).tolist()


def test_a_row_without_valid_factors_does_not_count():
    new = torch.tensor([[0.5], [math.nan]], requires_grad=True)
    parts = loss_of(new, mask=torch.tensor([[True], [False]]), advantage=(1.0, math.nan))
    assert (parts.valid, parts.finite) == (1, True)
    assert parts.loss.item() == pytest.approx(-1.2)


def test_all_padding_is_a_loss_of_zero_without_gradient():
    new = column(0.3, math.nan)
    parts = loss_of(new, mask=torch.zeros(2, 1, dtype=torch.bool), advantage=(1.0, 1.0))
    assert (parts.loss.item(), parts.valid, parts.kl_old, parts.clip_share) == (0.0, 0, 0.0, 0.0)
    assert gradient(parts, new).tolist() == [[0.0], [0.0]]


def padded(rows, factors, *, junk):
    """Eight decisions with two factors each, padded to `rows` by `factors`."""
    random = np.random.default_rng(0)
    new, old = np.full((2, rows, factors), junk, np.float32)
    advantage = np.full(rows, junk, np.float32)
    new[:8, :2], old[:8, :2] = random.normal(0.0, 0.2, (2, 8, 2))
    advantage[:8] = random.normal(size=8)
    mask = np.zeros((rows, factors), bool)
    mask[:8, :2] = True
    return torch.from_numpy(new).requires_grad_(), torch.from_numpy(old), torch.from_numpy(mask), advantage.tolist()


@pytest.mark.parametrize("factors", [2, 5])
@pytest.mark.parametrize("rows", [8, 16, 64])
def test_padding_changes_no_number(rows, factors):
    new, old, mask, advantage = padded(8, 2, junk=0.0)
    wanted = loss_of(new, old, mask, advantage, kl_weight=0.1, reference_log_prob_BJ=old)
    wide, *rest = padded(rows, factors, junk=7.0)
    found = loss_of(wide, *rest, kl_weight=0.1, reference_log_prob_BJ=rest[0])
    assert found.loss.item() == pytest.approx(wanted.loss.item(), abs=1e-6)
    for name in ("valid", "ratio_min", "ratio_max", "clip_share", "kl_old"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), abs=1e-6), name
    np.testing.assert_allclose(gradient(found, wide)[:8, :2], gradient(wanted, new), atol=1e-6)
    assert not gradient(found, wide)[~rest[1]].any()


# ---------------------------------------------------------------- ratio, clip, KL


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    # -min(r A, clip(r, 0.8, 1.2) A): -min(1.5, 1.2); -min(-1.5, -1.2); -min(0.5, 0.8); -min(-0.5, -0.8)
    [(1.5, 1.0, -1.2), (1.5, -1.0, 1.5), (0.5, 1.0, -0.5), (0.5, -1.0, 0.8)],
)
def test_clipping_by_hand(ratio, advantage, loss):
    assert loss_of(column(math.log(ratio)), advantage=(advantage,)).loss.item() == pytest.approx(loss, abs=1e-6)


def test_a_clipped_decision_has_no_gradient():
    new = column(math.log(1.5), math.log(1.5), math.log(0.5), math.log(0.5))
    # r A's gradient by log r is r A; the mean over 4 divides it.
    found = gradient(loss_of(new, advantage=(1.0, -1.0, 1.0, -1.0)), new)
    np.testing.assert_allclose(found[:, 0], [0.0, 1.5 / 4, -0.5 / 4, 0.0], atol=1e-6)


@settings(deadline=None)  # the first call starts torch
@given(st.floats(-30, 30), st.floats(-100, 100), st.floats(0.01, 0.9), st.floats(0.01, 10.0))
def test_clipping_never_increases_the_objective(log_ratio, advantage, low, high):
    new = column(log_ratio)
    clipped = loss_of(new, advantage=(advantage,), clip_low=low, clip_high=high).loss.item()
    free = math.exp(min(max(log_ratio, -20.0), 20.0)) * advantage
    assert -clipped <= free + 1e-5 * max(1.0, abs(free))


def test_a_decisions_log_probability_is_the_sum_of_its_factors():
    # log r = 0.1 + 0.05 - 0.02 = 0.13
    new = torch.tensor([[0.1, 0.05, -0.02]])
    assert loss_of(new).loss.item() == pytest.approx(-math.exp(0.13), abs=1e-6)


def test_equal_rewards_give_no_gradient():
    new = column(0.1, -0.1, 0.2, 0.0)
    parts = loss_of(new, advantage=tuple(group_advantages([1.0, 1.0, 1.0, 1.0])))
    assert parts.loss.item() == 0.0
    assert gradient(parts, new).abs().max() == 0.0


@pytest.mark.parametrize("log_ratio", [100.0, -100.0, 1e30, -1e30])
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_a_huge_log_ratio_overflows_nothing(log_ratio, advantage):
    # In float32 exp(100) = inf, and inf · 0 = NaN.
    new = column(log_ratio)
    parts = loss_of(new, advantage=(advantage,), kl_weight=0.1, reference_log_prob_BJ=torch.zeros(1, 1))
    assert parts.finite
    assert torch.isfinite(parts.loss)
    assert torch.isfinite(gradient(parts, new)).all()
    if advantage == 0.0:
        alone = loss_of(new, advantage=(0.0,))
        assert alone.loss.item() == 0.0
        assert gradient(alone, new).item() == 0.0


def test_kl_by_hand():
    # r - ln r - 1 with r = reference / policy: 1 - 0 - 1 = 0; 2 - 0.693147 - 1 = 0.306853
    assert kl_k3(torch.tensor(0.0), torch.tensor(0.0)).item() == 0.0
    assert kl_k3(torch.tensor(math.log(2.0)), torch.tensor(0.0)).item() == pytest.approx(0.306853, abs=1e-6)
    for log_ratio in (100.0, -100.0):
        policy = torch.tensor(0.0, requires_grad=True)
        kl = kl_k3(torch.tensor(log_ratio), policy)
        kl.backward()
        assert torch.isfinite(kl)
        assert torch.isfinite(policy.grad)


@pytest.mark.parametrize("place", ["new", "old", "advantage", "reference"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_reported_and_not_hidden_by_the_clamp(place, value):
    parts = loss_of(
        column(value if place == "new" else 0.0),
        torch.tensor([[value if place == "old" else 0.0]]),
        advantage=(value if place == "advantage" else 1.0,),
        kl_weight=0.1,
        reference_log_prob_BJ=torch.tensor([[value if place == "reference" else 0.0]]),
    )
    assert not parts.finite


def test_shares_of_micro_batches_add_up():
    random = torch.Generator().manual_seed(0)
    new = (torch.randn(7, 1, generator=random) * 0.3).requires_grad_()
    advantage = torch.randn(7, generator=random).tolist()
    mask = torch.tensor([True, True, False, True, True, False, True])[:, None]
    whole = gradient(loss_of(new, mask=mask, advantage=advantage), new)
    for size in (1, 2, 3, 7):
        total = torch.zeros_like(new)
        for start in range(0, 7, size):
            rows = slice(start, start + size)
            total += gradient(loss_of(new[rows], mask=mask[rows], advantage=advantage[rows], count=5.0), new)
        np.testing.assert_allclose(total, whole, atol=1e-6)


# ---------------------------------------------------------------- an optimiser step


class LinePolicy:
    """A Gaussian around a line of one feature; J = 2 factors."""

    def __init__(self, dtype=torch.float64):
        self.module = torch.nn.Linear(3, 2).to(dtype)
        with torch.no_grad():
            self.module.weight.copy_(torch.linspace(-0.3, 0.4, 6).reshape(2, 3))
            self.module.bias.copy_(torch.tensor([0.1, -0.2]))
        self.version = 0
        self.samplings = []

    def score(self, observations, decisions, sampling):
        self.samplings.append(sampling)
        means = self.module(torch.from_numpy(observations["x"]))
        action = torch.from_numpy(decisions.trace["action"])
        log_prob = -0.5 * ((action - means) / sampling.temperature) ** 2
        return Score(log_prob, means[:, 0])


def step_data(policy, count=11, padding=0, sampling=WARM):
    """Decisions drawn around slightly other weights, so that ratios differ from 1; then rows of padding."""
    random = np.random.default_rng(3)
    x, action, advantage = random.normal(size=(count, 3)), random.normal(size=(count, 2)), random.normal(size=count)
    mask = np.stack([np.ones(count, bool), random.uniform(size=count) < 0.5], axis=1)
    moved = random.normal(0.0, 0.1, (count, 2))
    x, action, advantage, mask, moved = (
        np.concatenate([array, np.zeros((padding, *array.shape[1:]), array.dtype)])
        for array in (x, action, advantage, mask, moved)
    )
    decisions = Decision(
        np.zeros((count + padding, 4, 3), np.float32),
        np.zeros((count + padding, 2)),
        mask,
        np.zeros(count + padding, np.int64),
        trace={"action": action},
    )
    with torch.no_grad():
        decisions.log_prob = policy.score({"x": x}, decisions, sampling).log_prob.numpy()
    decisions.log_prob += moved
    decisions.log_prob[~mask] = 1e30
    x[count:], advantage[count:] = 1e3, 1e3
    return StepData(Observations({"x": x}), decisions, advantage, sampling, {})


def one_step(micro_batch, *, padding=0, kl_weight=0.0, **options):
    """Numbers, gradient and weights after one optimiser step over everything."""
    policy = LinePolicy()
    data = step_data(policy, padding=padding)
    optimiser = torch.optim.SGD(policy.module.parameters(), lr=0.1)
    reference = None
    if kl_weight:
        reference = copy.deepcopy(policy.module)
        with torch.no_grad():
            reference.weight.mul_(1.1)
    config = GrpoConfig(minibatch=64, micro_batch=micro_batch, gradient_clip=1e9, kl_weight=kl_weight, **options)
    numbers = optimise(policy, optimiser, data, config, 5, reference)
    return numbers, [p.grad.numpy().copy() for p in policy.module.parameters()], policy


@pytest.mark.parametrize("kl_weight", [0.0, 0.3])
@pytest.mark.parametrize("micro_batch", [1, 3, 4])
def test_the_gradient_does_not_depend_on_the_micro_batch(micro_batch, kl_weight):
    numbers, gradients, policy = one_step(micro_batch, kl_weight=kl_weight)
    wanted, expected, whole = one_step(0, kl_weight=kl_weight)
    for found, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(found, other, atol=1e-12)
    for found, other in zip(policy.module.parameters(), whole.module.parameters(), strict=True):
        np.testing.assert_allclose(found.detach(), other.detach(), atol=1e-12)
    assert numbers.keys() == wanted.keys()
    for name, value in numbers.items():
        assert value == pytest.approx(wanted[name], abs=1e-6), name


@pytest.mark.parametrize("micro_batch", [0, 1, 4])
def test_padding_rows_change_neither_a_step_nor_its_numbers(micro_batch):
    # The order of the rows differs, so sums round differently.
    numbers, gradients, _ = one_step(micro_batch, padding=9)
    wanted, expected, _ = one_step(0)
    for found, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(found, other, atol=1e-12)
    for name, value in numbers.items():
        assert value == pytest.approx(wanted[name], abs=1e-6), name


def test_a_step_of_nothing_but_padding_moves_nothing():
    policy = LinePolicy()
    before = copy.deepcopy(policy.module.state_dict())
    data = step_data(policy)
    data.decisions.log_prob_mask[:] = False
    optimiser = torch.optim.Adam(policy.module.parameters(), lr=0.1)
    numbers = optimise(policy, optimiser, data, GrpoConfig(), 0)
    assert numbers == {"steps_refused": 0.0, "kl_stopped": 0.0}
    assert all(torch.equal(before[name], value) for name, value in policy.module.state_dict().items())
    assert not optimiser.state


@pytest.mark.parametrize("place", ["log_prob", "advantage", "observation"])
def test_a_number_that_is_not_finite_stops_the_step_and_is_counted(place):
    policy = LinePolicy()
    before = copy.deepcopy(policy.module.state_dict())
    data = step_data(policy)
    array = {
        "log_prob": data.decisions.log_prob,
        "advantage": data.advantage_B,
        "observation": data.observation.arrays["x"],
    }
    array[place][4] = math.nan
    optimiser = torch.optim.Adam(policy.module.parameters(), lr=0.1)
    numbers = optimise(policy, optimiser, data, GrpoConfig(micro_batch=3), 0)
    assert numbers["steps_refused"] == 1.0
    assert all(torch.equal(before[name], value) for name, value in policy.module.state_dict().items())


def test_a_gradient_that_is_not_finite_stops_the_step():
    policy = LinePolicy()
    policy.module.weight.register_hook(lambda grad: grad * math.inf)
    optimiser = torch.optim.SGD(policy.module.parameters(), lr=0.1)
    numbers = optimise(policy, optimiser, step_data(policy), GrpoConfig(), 0)
    assert numbers["steps_refused"] == 1.0
    assert all(torch.isfinite(p).all() for p in policy.module.parameters())


def test_one_bad_minibatch_stops_no_other():
    policy = LinePolicy()
    data = step_data(policy, count=12)
    data.advantage_B[0] = math.nan
    optimiser = torch.optim.SGD(policy.module.parameters(), lr=0.01)
    before = policy.module.weight.detach().clone()
    numbers = optimise(policy, optimiser, data, GrpoConfig(minibatch=4, kl_stop=1e9), 0)
    assert numbers["steps_refused"] == 1.0
    assert not torch.equal(before, policy.module.weight)
    assert math.isfinite(numbers["loss"])


def test_passes_end_when_the_policy_has_moved_far():
    policy = LinePolicy()
    optimiser = torch.optim.SGD(policy.module.parameters(), lr=10.0)
    numbers = optimise(policy, optimiser, step_data(policy), GrpoConfig(epochs=50, kl_stop=1e-4), 0)
    assert numbers["kl_stopped"] == 1.0
    assert len(policy.samplings) <= 4


def test_the_ratio_is_one_for_unchanged_weights():
    policy = LinePolicy(torch.float32)
    data = step_data(LinePolicy())
    data.observation.arrays["x"] = data.observation.arrays["x"].astype(np.float32)
    data.decisions.trace["action"] = data.decisions.trace["action"].astype(np.float32)
    with torch.no_grad():
        data.decisions.log_prob = policy.score(data.observation.arrays, data.decisions, data.sampling).log_prob.numpy()
    optimiser = torch.optim.SGD(policy.module.parameters(), lr=0.1)
    numbers = optimise(policy, optimiser, data, GrpoConfig(), 0)
    assert abs(numbers["ratio_min"] - 1.0) <= 1e-6
    assert abs(numbers["ratio_max"] - 1.0) <= 1e-6
    assert (numbers["clip_share"], numbers["kl"]) == (0.0, pytest.approx(0.0, abs=1e-6))


# ---------------------------------------------------------------- what of a step is trained on


def episode(rewards, group=0, *, ended=Ended.HORIZON, initial_fault=False, sampling=WARM):
    rewards = np.asarray(rewards, np.float64)
    count = len(rewards)
    decisions = plan_decision(np.zeros((count, 4, 3)))
    failure = Failure("permanent", "X", "broken") if ended == Ended.FAILED else None
    return Episode(
        EpisodeRequest("scene", group_id=group),
        ended,
        failure,
        {},
        0.5,
        initial_fault,
        observation={"x": np.zeros((count + 1, 3))},
        decisions=decisions,
        controls=np.ones(count, bool),
        rewards=rewards,
        sampling=sampling,
    )


def test_informative_groups_are_counted():
    # Of four groups only the last has a spread.
    episodes = [episode([float(g == 3 and m == 0)], g) for g in range(4) for m in range(3)]
    counts = select(episodes, GrpoConfig(), 2).counts
    assert (counts["groups_informative"], counts["groups"]) == (1.0, 4.0)


@pytest.mark.parametrize("credit", ["tick", "episode"])
def test_an_episode_whose_reward_is_not_finite_leaves_alone(credit):
    config = GrpoConfig(credit=credit, least_advantage=0.0)
    good = [episode([0.0, 1.0]), episode([0.0, 3.0])]
    wanted = select(good, config, 2)
    for bad in (math.nan, math.inf, -math.inf):
        found = select([good[0], episode([bad, 0.0]), good[1]], config, 2)
        assert found.counts["non_finite"] == 1.0
        assert found.counts["decisions"] == 4.0
        np.testing.assert_array_equal(found.advantage_B, wanted.advantage_B)


def test_void_and_faulty_episodes_and_small_groups_are_left_out_and_counted():
    episodes = [
        *(episode([1.0], 0), episode([2.0], 0)),
        *(episode([1.0], 1), episode([], 1, ended=Ended.FAILED)),
        *(episode([], 2, ended=Ended.FAILED), episode([1.0], 2, initial_fault=True)),
    ]
    data = select(episodes, GrpoConfig(), 2)
    wanted = {"void": 2, "initial_fault": 1, "non_finite": 0, "groups": 3, "groups_dropped": 2, "groups_informative": 1}
    assert {name: data.counts[name] for name in wanted} == wanted
    np.testing.assert_allclose(np.sort(data.advantage_B), [-0.5 / 0.55, 0.5 / 0.55], atol=1e-6)


def test_warm_up_is_never_trained_on():
    rows = [episode([0.0, 0.0, 1.0]), episode([0.0, 0.0, 3.0])]
    for row in rows:
        row.controls[0] = False
    assert len(select(rows, GrpoConfig(), 2).advantage_B) == 4


def test_the_sampling_travels_with_the_episodes():
    hot = Sampling("sample", 1.7)
    data = select([episode([1.0], sampling=hot), episode([2.0], sampling=hot)], GrpoConfig(), 2)
    assert data.sampling == hot
    policy = LinePolicy()
    optimise(
        policy, torch.optim.SGD(policy.module.parameters(), lr=0.1), step_data(policy, sampling=hot), GrpoConfig(), 0
    )
    assert set(policy.samplings) == {hot}
    with pytest.raises(AssertionError, match="sampled in different ways"):
        select([episode([1.0]), replace(episode([2.0]), sampling=hot)], GrpoConfig(), 2)
