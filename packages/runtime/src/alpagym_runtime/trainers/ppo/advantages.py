"""Advantages from a learnt value, and the value's loss. Axes: T ticks of a drive, B decisions.

A drive that was cut off (horizon, the recording's end) would have gone on: what it still had to earn is the value of
its last observation. A drive that ended by itself (collision, off the road, goal) had nothing more to earn.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def generalised_advantages(
    rewards_T: NDArray[np.float64],
    values_T1: NDArray[np.float64],
    terminated: bool,
    discount: float,
    trace_decay: float,
) -> NDArray[np.float64]:
    """[T] sums of (discount · trace_decay)^k δ_{t+k} with δ_t = r_t + discount · v_{t+1} - v_t.

    Args:
        rewards_T: of the tick that follows each decision.
        values_T1: [T+1], of each observation, the last one included.
        terminated: the task itself ended, so that v_T counts as 0.
        discount: per decision.
        trace_decay: λ.

    Source: arXiv:1506.02438, equation 16.
    """
    after = values_T1[1:].copy()
    if terminated:
        after[-1] = 0.0
    errors = rewards_T + discount * after - values_T1[:-1]
    out = np.zeros(len(errors))
    ahead = 0.0
    for t in range(len(errors) - 1, -1, -1):
        ahead = errors[t] + discount * trace_decay * ahead
        out[t] = ahead
    return out


def normalised(advantage_B: NDArray[np.float64], mean: float, deviation: float) -> NDArray[np.float64]:
    """Less the mean, over the population standard deviation, both those of the whole step; 0 where all are equal."""
    return (advantage_B - mean) / (deviation + 1e-8)


def explained_variance(target_deviation: float, error_deviation: float) -> float:
    """1 - Var(target - value) / Var(target): 1 for a perfect value, 0 for a constant; 0 where all targets are equal."""
    return 1.0 - (error_deviation / target_deviation) ** 2 if target_deviation != 0.0 else 0.0


def value_loss(value_B: Tensor, old_value_B: Tensor, target_B: Tensor, clip: float, count: float) -> Tensor:
    """Half the squared error, summed over B and divided by `count`; scalar, differentiable in `value_B`.

    With `clip` > 0 the larger of that error and the one of a value at most `clip` away from the one before the step:
    a value that has moved that far towards its target gets no further gradient.

    Source: the clipped form, github.com/openai/baselines, ppo2/model.py.
    """
    error = (value_B - target_B) ** 2
    if clip > 0.0:
        near = old_value_B + (value_B - old_value_B).clamp(-clip, clip)
        error = torch.maximum(error, (near - target_B) ** 2)
    return 0.5 * error.sum() / count
