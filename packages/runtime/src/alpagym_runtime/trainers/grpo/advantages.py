"""Group-relative advantages: how much better an episode, or a moment of it, went than its group's.

Axes: G members of a group, T ticks. Statistics are the group's own; the standard deviation is the population's.
Source: group advantages, arXiv:2402.03300. A return-to-go per tick against the group's mean at the same tick is our
choice, measured to keep easy scenes intact (docs/adr/0004).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

EPSILON = 1e-8


def group_advantages(rewards_G: ArrayLike, epsilon: float = EPSILON) -> NDArray[np.float64]:
    """(r - mean) / (std + epsilon) within one group; exactly 0 where all are equal. NaN rewards stay out and get 0."""
    rewards = np.asarray(rewards_G, np.float64)
    finite = np.isfinite(rewards)
    advantages = np.zeros(rewards.shape)
    good, exponent = _scaled(rewards[finite])
    if len(good) < 2 or good.max() - good.min() <= _rounding(good, exponent):
        return advantages
    centred = good - good.mean()
    advantages[finite] = centred / (np.sqrt(np.mean(centred * centred)) + np.ldexp(epsilon, -exponent))
    return advantages


def _scaled(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], int]:
    """Finite values over a power of two that brings them into [-1, 1], exactly; squares of 1e200 would overflow."""
    exponent = max(int(np.frexp(np.abs(values).max(initial=0.0))[1]), 0)
    return np.ldexp(values, -exponent), exponent


def _rounding(scaled: NDArray[np.float64], exponent: int) -> float:
    """Equal up to float32 rounding is equal: a spread of one ulp must not become an advantage."""
    return 1e-7 * max(float(np.ldexp(1.0, -exponent)), float(np.abs(scaled).max(initial=0.0)))


def returns_to_go(rewards_T: ArrayLike, discount: float) -> NDArray[np.float64]:
    """[T] discounted sum of the rewards from each tick on."""
    rewards = np.asarray(rewards_T, np.float64)
    out = np.zeros(len(rewards))
    ahead = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        ahead = rewards[t] + discount * ahead
        out[t] = ahead
    return out


def tick_advantages(
    rewards_G: list[NDArray[np.float64]], discount: float, spread_floor: float
) -> list[NDArray[np.float64]]:
    """Advantages [T] a member: return-to-go less the mean of the members still driving at that tick, over their spread.

    A member with a non-finite reward stays out and gets 0.

    Args:
        rewards_G: G arrays [T] of unequal length.
        discount: per decision.
        spread_floor: added to the standard deviation, in units of reward, so that tiny differences stay tiny.

    """
    longest = max((len(r) for r in rewards_G), default=0)
    returns = np.full((len(rewards_G), longest), np.nan)
    good = [g for g, rewards in enumerate(rewards_G) if np.isfinite(rewards).all()]
    _, exponent = _scaled(np.concatenate([np.zeros(1), *(rewards_G[g] for g in good)]))
    for g in good:
        returns[g, : len(rewards_G[g])] = returns_to_go(np.ldexp(rewards_G[g], -exponent), discount)
    alive = np.isfinite(returns)
    count = np.maximum(alive.sum(axis=0), 1)
    filled = np.where(alive, returns, 0.0)
    centred = np.where(alive, filled - filled.sum(axis=0) / count, 0.0)
    spread = np.sqrt((centred**2).sum(axis=0) / count)
    differ = spread > _rounding(filled, exponent)
    scaled = np.where(differ, centred / np.where(differ, spread + np.ldexp(spread_floor, -exponent), 1.0), 0.0)
    return [scaled[g, : len(rewards)] for g, rewards in enumerate(rewards_G)]
