"""The clipped policy loss with its masks and guards. Axes: B decisions, J factors of a decision's probability."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""|log ratio| is bounded before exp: exp(88) overflows float32, and inf · 0 is NaN even where the advantage is 0."""


@dataclass(frozen=True)
class LossParts:
    """The loss and what to report of it; all but `loss` are detached.

    Attributes:
        loss: scalar, to be minimised; 0 with zero gradient where nothing is valid.
        valid: number of decisions that count.
        ratio_min, ratio_mean, ratio_max, clip_share: over valid decisions.
        kl_old: k3 estimate against the weights that drove, over valid decisions.
        finite: False if a log-probability or the loss is NaN or infinite; the caller must not step.

    """

    loss: Tensor
    valid: int
    ratio_min: float
    ratio_mean: float
    ratio_max: float
    clip_share: float
    kl_old: float
    finite: bool


def masked_mean(values_B: Tensor, mask_B: Tensor, count: float | None = None) -> Tensor:
    """Sum over the selected values divided by `count` (default: how many there are; 0 gives 0).

    Masked cells may hold anything, NaN too: they are selected away, not multiplied by 0.
    """
    kept = torch.where(mask_B, values_B, torch.zeros_like(values_B))
    return kept.sum() / max(float(mask_B.sum()) if count is None else count, 1.0)


def kl_k3(reference_log_prob: Tensor, log_prob: Tensor) -> Tensor:
    """Unbiased estimate of KL(policy ‖ reference) from the policy's samples: r - ln r - 1, r = reference / policy.

    Source: J. Schulman, "Approximating KL divergence" (2020), estimator k3.
    """
    log_ratio = (reference_log_prob - log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.exp(log_ratio) - log_ratio - 1.0


def policy_loss(
    new_log_prob_BJ: Tensor,
    old_log_prob_BJ: Tensor,
    mask_BJ: Tensor,
    advantage_B: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    kl_weight: float = 0.0,
    reference_log_prob_BJ: Tensor | None = None,
    count: float | None = None,
) -> LossParts:
    """-mean(min(r A, clip(r, 1 - low, 1 + high) A)) + kl_weight · KL, over decisions whose mask selects any factor.

    A decision's log-probability is the sum of its selected factors. Gradients flow through `new_log_prob_BJ` only.
    `count` divides instead of the number of valid decisions: with the whole batch's count, micro-batches add up to
    exactly the unsplit gradient.

    Source: clipping, arXiv:1707.06347; the group-relative form, arXiv:2402.03300.
    """
    zero = torch.zeros_like(new_log_prob_BJ)
    valid_B = mask_BJ.any(dim=-1)
    new_B = torch.where(mask_BJ, new_log_prob_BJ, zero).sum(dim=-1)
    old_B = torch.where(mask_BJ, old_log_prob_BJ, zero).sum(dim=-1).detach()
    raw = new_B - old_B
    ratio_B = torch.exp(raw.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    clipped_B = ratio_B.clamp(1.0 - clip_low, 1.0 + clip_high)
    surrogate_B = torch.minimum(ratio_B * advantage_B, clipped_B * advantage_B)
    loss = -masked_mean(surrogate_B, valid_B, count)
    # A clamp keeps NaN, but says so here, before the caller steps.
    watched = [
        torch.where(valid_B, raw, torch.zeros_like(raw)),
        torch.where(valid_B, advantage_B, torch.zeros_like(raw)),
    ]
    if kl_weight > 0.0:
        assert reference_log_prob_BJ is not None, "a KL weight needs the reference's log-probabilities"
        reference_B = torch.where(mask_BJ, reference_log_prob_BJ, zero).sum(dim=-1).detach()
        loss = loss + kl_weight * masked_mean(kl_k3(reference_B, new_B), valid_B, count)
        watched.append(torch.where(valid_B, reference_B, torch.zeros_like(raw)))
    with torch.no_grad():
        valid = int(valid_B.sum())
        finite = bool(torch.isfinite(loss)) and all(bool(torch.isfinite(w).all()) for w in watched)
        chosen = ratio_B[valid_B]
        outside = (chosen < 1.0 - clip_low) | (chosen > 1.0 + clip_high)
        kl_old = masked_mean(kl_k3(new_B, old_B), valid_B)
    return LossParts(
        loss=loss,
        valid=valid,
        ratio_min=float(chosen.min()) if valid else 1.0,
        ratio_mean=float(chosen.mean()) if valid else 1.0,
        ratio_max=float(chosen.max()) if valid else 1.0,
        clip_share=float(outside.float().mean()) if valid else 0.0,
        kl_old=float(kl_old),
        finite=finite,
    )
