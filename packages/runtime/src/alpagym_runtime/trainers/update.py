"""One training step on decisions that were driven: passes in minibatches, a clipped loss, guards before each step.

What is learnt from them is the caller's: the advantages are in `StepData`, a further part of the loss comes as a
function. In a team, each process holds some of the step's decisions; gradients and numbers are those of all of them, as
if one held them all. Axes: B decisions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alpagym_runtime.random import generator
from alpagym_runtime.trainers.base import Observations, decision_batch
from alpagym_runtime.trainers.closed_loop_config import ClosedLoopConfig
from alpagym_runtime.trainers.learner import whole_tensor
from alpagym_runtime.trainers.policy_loss import LossParts, policy_loss
from alpagym_runtime.trainers.team import ALONE, Team, is_shard
from alpagym_runtime.types import Decision, Episode, Sampling, Score, TrainablePolicy

FurtherLoss = Callable[[Score, NDArray[np.int64], float], tuple[Tensor, dict[str, float]]]
"""A part of the loss besides the policy's, for (score, rows of the step's data, count): a scalar, the rows' sum divided
by `count`; and numbers to log, means over the rows. A loss that is not finite refuses the optimiser step."""


@dataclass
class StepData:
    """The decisions of a step that are worth a gradient, this process's; and what to log.

    `counts` add up over a team, `numbers` are the whole team's already. With `stands_in` there is one decision, which
    teaches nothing: this process of a policy that is spread over the team has none, and takes part in the forwards.
    """

    observation: Observations
    decisions: Decision | None
    advantage_B: NDArray[np.float32]
    sampling: Sampling
    counts: dict[str, float] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    stands_in: bool = False

    @property
    def taught(self) -> int:
        """Decisions that teach."""
        return 0 if self.stands_in else len(self.advantage_B)


def taking_part(data: StepData, episodes: Sequence[Episode]) -> StepData:
    """A step's data with a decision that teaches nothing where none does, if any was made at all."""
    decided = [episode for episode in episodes if episode.decisions is not None and len(episode)]
    if len(data.advantage_B) or not decided:
        return data
    made = max(decided, key=lambda episode: episode.trainable)  # the first of those that are not void, if any is not
    observation, decisions = decision_batch([made])
    first = np.zeros(1, np.int64)
    return replace(
        data,
        observation=observation.keep(first),
        decisions=decisions.take(first),
        advantage_B=np.zeros(1, np.float32),
        sampling=made.sampling,
        stands_in=True,
    )


def optimise(
    policy: TrainablePolicy,
    optimiser: torch.optim.Optimizer,
    data: StepData,
    config: ClosedLoopConfig,
    order_seed: int,
    reference: torch.nn.Module | None = None,
    further: FurtherLoss | None = None,
    team: Team = ALONE,
) -> dict[str, float]:
    """`epochs` passes in minibatches over a step's decisions, the whole team's; returns numbers to log.

    A minibatch whose loss, log-probabilities or gradient are not finite makes no optimiser step and is counted; one in
    which no factor of any decision counts makes none either.
    """
    own: NDArray[np.bool_] = np.zeros(0, bool)
    if data.decisions is not None and data.taught:
        own = np.any(data.decisions.log_prob_mask, axis=1)
    parts = team.gather(own.tolist())
    valid = np.array([row for part in parts for row in part], bool)
    bounds = np.cumsum([0, *map(len, parts)])
    count = len(valid)
    sharded = any(map(is_shard, policy.module.parameters()))
    assert not sharded or data.decisions is not None, "each process of a sharded policy needs a decision to take part"
    logged: list[dict[str, float]] = []
    stopped, refused = 0.0, 0.0
    for epoch in range(config.epochs):
        order = generator(order_seed, epoch).permutation(count)
        for rows in np.array_split(order, max(1, round(count / config.minibatch))):
            optimiser.zero_grad()
            rows = rows[valid[rows]]
            if not len(rows):
                continue
            shares = [rows[(rows >= low) & (rows < high)] - low for low, high in itertools.pairwise(bounds)]
            mine = shares[team.rank]
            micro = config.micro_batch or len(rows)
            # Forwards and backwards of a sharded policy are taken by all at once: who has no row left repeats one.
            rounds = max(-(-len(share) // micro) for share in (shares if sharded else [mine]))
            finite, pieces = True, []
            for turn in range(rounds):
                some = mine[turn * micro : (turn + 1) * micro]
                if not len(some):
                    piece, _ = _loss(policy, data, np.zeros(1, np.int64), len(rows), config, reference, further)
                    (piece.loss * 0.0).backward()
                    continue
                piece, more = _loss(policy, data, some, len(rows), config, reference, further)
                finite = finite and piece.finite
                if sharded:
                    (piece.loss * team.size).backward()  # shards take the mean over the team
                elif finite:
                    piece.loss.backward()
                pieces.append(_plain(piece, more))
            everybody = team.gather({"finite": finite, "pieces": pieces})
            finite = all(one["finite"] for one in everybody)
            team.add_gradients(policy.module.parameters())
            norm = whole_tensor(torch.nn.utils.clip_grad_norm_(policy.module.parameters(), config.gradient_clip))
            if not finite or not bool(torch.isfinite(norm)):
                refused += 1
                optimiser.zero_grad()
                continue
            optimiser.step()
            merged = _merge([piece for one in everybody for piece in one["pieces"]])
            logged.append(merged | {"gradient_norm": float(norm), "valid": float(len(rows))})
            if logged[-1]["kl"] > config.kl_stop:
                stopped = 1.0
                break
        if stopped:
            break
    return {"steps_refused": refused, "kl_stopped": stopped} | _summarise(logged)


def _summarise(minibatches: list[dict[str, float]]) -> dict[str, float]:
    """The numbers of a step from those of its minibatches."""
    if not minibatches:
        return {}
    weights = [part["valid"] for part in minibatches]
    numbers = {
        name: float(np.average([part[name] for part in minibatches], weights=weights))
        for name in minibatches[0]
        if name not in ("valid", "ratio_min", "ratio_max", "gradient_norm")
    }
    numbers["ratio_min"] = min(part["ratio_min"] for part in minibatches)
    numbers["ratio_max"] = max(part["ratio_max"] for part in minibatches)
    numbers["gradient_norm"] = float(np.mean([part["gradient_norm"] for part in minibatches]))
    return numbers


def _plain(part: LossParts, more: Mapping[str, float]) -> dict[str, Any]:
    """What a micro-batch says, without tensors."""
    return {
        "valid": part.valid,
        "loss": float(part.loss.detach()),
        "ratios": [part.ratio_min, part.ratio_max],
        "means": {"kl": part.kl_old, "clip_share": part.clip_share, "ratio_mean": part.ratio_mean, **more},
    }


def _merge(pieces: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The numbers of a minibatch from its micro-batches, whose losses are shares of one sum."""
    weights = [part["valid"] for part in pieces]
    names = pieces[0]["means"]
    return {
        "loss": sum(part["loss"] for part in pieces),
        **{name: float(np.average([part["means"][name] for part in pieces], weights=weights)) for name in names},
        "ratio_min": min(part["ratios"][0] for part in pieces),
        "ratio_max": max(part["ratios"][1] for part in pieces),
    }


def _loss(
    policy: TrainablePolicy,
    data: StepData,
    rows: NDArray[np.int64],
    count: int,
    config: ClosedLoopConfig,
    reference: torch.nn.Module | None,
    further: FurtherLoss | None,
) -> tuple[LossParts, dict[str, float]]:
    """The loss of some rows as their share of `count` rows, and means over the rows to log."""
    assert data.decisions is not None
    observation, decisions = data.observation.take(rows), data.decisions.take(rows)
    score = policy.score(observation, decisions, data.sampling)
    device = score.log_prob.device
    before = None
    if reference is not None:
        with torch.no_grad():
            own, policy.module = policy.module, reference
            try:
                before = policy.score(observation, decisions, data.sampling).log_prob
            finally:
                policy.module = own
    parts = policy_loss(
        score.log_prob,
        torch.from_numpy(decisions.log_prob).to(device),
        torch.from_numpy(decisions.log_prob_mask).to(device),
        torch.from_numpy(data.advantage_B[rows]).to(device),
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        kl_weight=config.kl_weight,
        reference_log_prob_BJ=before,
        count=count,
    )
    numbers = {"entropy": float(score.entropy.detach().mean())}
    if further is not None:
        loss, more = further(score, rows, count)
        finite = parts.finite and bool(torch.isfinite(loss))
        parts, numbers = replace(parts, loss=parts.loss + loss, finite=finite), numbers | more
    return parts, numbers
