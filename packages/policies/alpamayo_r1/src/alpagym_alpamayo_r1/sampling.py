"""Drawing tokens: temperature, top-p and counter-based noise, the same for writing and for re-scoring.

A row's draws are a function of its seed and the step alone, so a completion does not depend on what is written beside
it (beyond the last bits of the logits).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alpagym_alpamayo_r1.architecture import Architecture
from alpagym_alpamayo_r1.model import Choose, Prefix
from alpagym_runtime.random import uniform
from alpagym_runtime.types import Sampling


@dataclass(frozen=True)
class Completion:
    """What a model wrote after B prompts.

    Attributes:
        ids: [B,S] i64.
        log_prob: [B,S] f32 under the sampling it was drawn with.
        mask: [B,S] bool, True up to and with the stop token.

    """

    ids: Tensor
    log_prob: Tensor
    mask: Tensor


class Writer(Protocol):
    """Who writes tokens after a prefix: the model, or an engine."""

    architecture: Architecture

    def write(self, prefix: Prefix, choose: Choose, steps: int, stop_id: int | None = None) -> Tensor:
        """See `AlpamayoModel.write`."""
        ...


def complete(
    model: Writer,
    prefix: Prefix,
    seeds: NDArray[np.uint64],
    sampling: Sampling,
    *,
    steps: int,
    stop_id: int,
    text_only: bool = False,
) -> Completion:
    """Write freely until the stop token, for example reasoning and then a plan's tokens.

    Args:
        model: who writes.
        prefix: B prompts, read.
        seeds: [B] u64.
        sampling: temperature, top-p and mode.
        steps: most tokens.
        stop_id: ends a row.
        text_only: never write what is no text (`Architecture.not_text`): the plan comes after it.

    """
    draws = torch.from_numpy(uniform(seeds, steps)).to(prefix.valid.device)
    barred = torch.tensor(model.architecture.not_text, device=prefix.valid.device)
    log_probs: list[Tensor] = []

    def choose(logits: Tensor, step: int) -> Tensor:
        if text_only:
            logits = logits.index_fill(-1, barred, -torch.inf)
        among = log_distribution(logits, sampling, None)
        ids = among.argmax(-1) if sampling.mode == "mean" else inverse_draw(among, draws[:, step])
        log_probs.append(among.gather(-1, ids[:, None])[:, 0])
        return ids

    with torch.no_grad():
        ids = model.write(prefix, choose, steps, stop_id)
    stops = (ids == stop_id).long()
    return Completion(ids, torch.stack(log_probs, -1).float(), stops.cumsum(-1) - stops == 0)


def log_distribution(logits: Tensor, sampling: Sampling, chosen: Tensor | None) -> Tensor:
    """Log-probabilities [...,V] f64 after temperature and top-p; -inf outside the nucleus.

    The nucleus is the smallest set of the most likely bins that holds `top_p`; `chosen` [...] is always in it, since a
    re-scored logit may differ in its last bit from the one that was sampled from.
    """
    log_probs = torch.log_softmax(logits.double() / sampling.temperature, -1)
    if sampling.top_p >= 1.0:
        return log_probs
    ordered, order = torch.sort(log_probs.detach(), dim=-1, descending=True, stable=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    inside = torch.zeros_like(log_probs, dtype=torch.bool).scatter(-1, order, before < sampling.top_p)
    if chosen is not None:
        inside = inside.scatter(-1, chosen[..., None], True)
    return torch.log_softmax(torch.where(inside, log_probs, -torch.inf), -1)


def inverse_draw(log_probs: Tensor, draws: Tensor) -> Tensor:
    """Bins [B] whose cumulative probability passes uniform numbers [B]."""
    cumulative = log_probs.exp().cumsum(-1)
    at = torch.searchsorted(cumulative, (draws * cumulative[:, -1])[:, None], right=True)[:, 0]
    # Rounding may point behind the last bin that is possible.
    last = log_probs.shape[-1] - 1 - torch.isfinite(log_probs).flip(-1).int().argmax(-1)
    return torch.minimum(at, last)
