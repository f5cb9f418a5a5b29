"""Alpamayo as a policy of the contract: observations in, plans out, by trajectory tokens or by the action expert.

`tokens`: 128 tokens, each drawn among the future's bins only (an unconstrained completion need not be a plan at all),
with temperature and top-p of the sampling; `log_prob` has a factor a token, and `score` computes the same factors from
one forward over the written tokens. `expert`: ten Euler steps from counter-based noise; acts only.

A batch is cut into forwards of exactly `rows` observations: a row's bits then do not depend on what stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from alpagym_alpamayo_r1.checkpoints import load_model
from alpagym_alpamayo_r1.config import CAMERA_NAMES, Alpamayo1Config, Alpamayo15Config, AlpamayoTinyConfig
from alpagym_alpamayo_r1.model import AlpamayoModel
from alpagym_alpamayo_r1.processing import Batch, Processor, Sample
from alpagym_alpamayo_r1.prompt import PromptLayout
from alpagym_alpamayo_r1.sampling import inverse_draw, log_distribution
from alpagym_alpamayo_r1.tiny import TinySize, make_tiny
from alpagym_plugins import ConfigError
from alpagym_runtime.geometry import wrap_angle
from alpagym_runtime.random import normal, uniform
from alpagym_runtime.types import Decision, Observation, PolicySpec, Sampling, Score

Config = Alpamayo1Config | Alpamayo15Config | AlpamayoTinyConfig


class AlpamayoPolicy:
    """See the module's text; implements `alpagym_runtime.types.ImitatingPolicy` (head "tokens")."""

    def __init__(self, config: Config, model: AlpamayoModel, processor: Processor, device: str = "cpu") -> None:
        self.spec: PolicySpec = config.spec()
        self.version = 0
        self.device = torch.device(device)
        self.processor = processor
        self._model = model.to(self.device).eval()
        self.module: nn.Module = self._model
        self._rows = config.rows
        self._head = config.head
        self._cameras = tuple(CAMERA_NAMES.index(name) for name in config.cameras)
        if config.head == "expert" and not model.with_expert:
            raise ConfigError("'expert' needs a checkpoint with an action expert; this one has none", key="head")
        architecture = model.architecture
        pictures = ("image",) if self._cameras else ()
        self.layout = PromptLayout(
            (*pictures, "traj_history", "prompt", "traj_future"),
            camera_names=architecture.camera_names,
            frames="numbered" if architecture.frame_numbers else "none",
        )

    # ---------------------------------------------------------------- acting

    def act(self, observations: Observation, seeds: NDArray[np.uint64], sampling: Sampling) -> Decision:
        """Plans [N,64,3]; the bins of the tokens [N,128] stay in the trace as `tokens`."""
        count = len(seeds)
        parts = [
            self._tokens(batch, seeds[rows], sampling) if self._head == "tokens" else self._denoise(batch, seeds[rows],
                                                                                                    sampling)
            for rows, batch in self._forwards(observations, count)
        ]  # fmt: skip
        return Decision.concatenate(parts).take(np.arange(count))

    def score(self, observations: Observation, decisions: Decision, sampling: Sampling) -> Score:
        """Log-probability [N,128] of the recorded tokens and the mean entropy [N] of their distributions.

        Raises:
            ConfigError: the head is the expert, whose plans have no density here.

        """
        self._need_tokens("score")
        bins = np.asarray(decisions.trace["tokens"])
        factors, entropies = [], []
        for rows, batch in self._forwards(observations, len(bins)):
            log_probs = log_distribution(self._logits(batch, bins[rows]), sampling, self._tensor(bins[rows]))
            chosen = log_probs.gather(-1, self._tensor(bins[rows])[..., None])[..., 0]
            factors.append(chosen)
            # exp(-inf) · -inf is NaN, also in the gradient.
            safe = torch.where(log_probs.isfinite(), log_probs, torch.zeros_like(log_probs))
            entropies.append(-(log_probs.exp() * safe).sum(-1).mean(-1))
        count = len(bins)
        return Score(torch.cat(factors)[:count].float(), torch.cat(entropies)[:count].float())

    def imitation_loss(self, observations: Observation, target_plan_rig: NDArray[np.float32]) -> Tensor:
        """[N] mean cross-entropy of the tokens of target plans [N,64,3], among the future's bins."""
        self._need_tokens("be imitated")
        losses = []
        for rows, batch in self._forwards(observations, len(target_plan_rig)):
            plan = torch.from_numpy(np.asarray(target_plan_rig[rows], np.float32)).to(self.device)
            xyz = torch.cat([plan[..., :2], torch.zeros_like(plan[..., :1])], -1)
            bins = self._model.future.encode(batch.history_xyz, batch.history_yaw, xyz, plan[..., 2])
            logits = self._logits(batch, bins.cpu().numpy())
            each = nn.functional.cross_entropy(logits.flatten(0, 1), bins.flatten(), reduction="none")
            losses.append(each.view_as(bins).mean(-1))
        return torch.cat(losses)[: len(target_plan_rig)]

    def load(self, state: Mapping[str, Any], version: int) -> None:
        """Take new weights, all of them; there are no caches."""
        self.module.load_state_dict(state)
        self.version = version

    # ---------------------------------------------------------------- parts

    def _tokens(self, batch: Batch, seeds: NDArray[np.uint64], sampling: Sampling) -> Decision:
        first = self._model.architecture.first_id
        bins_of, tokens = self._model.architecture.future_bins, self._model.architecture.future_tokens
        draws = torch.from_numpy(uniform(seeds, tokens)).to(self.device)
        log_probs: list[Tensor] = []

        def choose(logits: Tensor, step: int) -> Tensor:
            among = log_distribution(logits[:, first : first + bins_of], sampling, None)
            bins = among.argmax(-1) if sampling.mode == "mean" else inverse_draw(among, draws[:, step])
            log_probs.append(among.gather(-1, bins[:, None])[:, 0])
            return bins + first

        with torch.no_grad():
            ids = self._model.write(self._model.read(batch), choose, tokens)
            path = self._model.decode_tokens(ids, batch)
        plan = torch.cat([path.xy, path.yaw[..., None]], -1).cpu().numpy()
        factors = torch.stack(log_probs, -1).float().cpu().numpy()
        trace = {"tokens": (ids - first).cpu().numpy()}
        return self._decision(plan, factors, np.ones_like(factors, bool), trace)

    def _denoise(self, batch: Batch, seeds: NDArray[np.uint64], sampling: Sampling) -> Decision:
        waypoints = self._model.future.action_space.waypoints
        noise = normal(seeds, 2 * waypoints).reshape(len(seeds), waypoints, 2) * sampling.temperature
        if sampling.mode == "mean":
            noise = np.zeros_like(noise)
        with torch.no_grad():
            actions = self._model.sample_actions(
                self._model.read(batch), torch.from_numpy(noise.astype(np.float32)).to(self.device)
            )
            speed = self._model.action_space.initial_speed(batch.history_xyz, batch.history_yaw)
            path = self._model.action_space.decode(actions, speed)
        plan = torch.cat([path.xy, path.yaw[..., None]], -1).cpu().numpy()
        nothing = np.zeros((len(seeds), 1), np.float32)
        return self._decision(plan, nothing, nothing.astype(bool), {"actions": actions.cpu().numpy()})

    def _decision(
        self,
        plan: NDArray[Any],
        log_prob: NDArray[np.float32],
        mask: NDArray[np.bool_],
        trace: dict[str, NDArray[Any]],
    ) -> Decision:
        plan = plan.astype(np.float32)
        plan[..., 2] = wrap_angle(plan[..., 2])
        version = np.full(len(plan), self.version, np.int64)
        return Decision(plan, log_prob, mask, version, trace=dict(trace))

    def _logits(self, batch: Batch, bins: NDArray[np.int64]) -> Tensor:
        """Logits [B,128,bins] of each token, given those before it; differentiable."""
        architecture = self._model.architecture
        written = self._tensor(bins)[:, :-1] + architecture.first_id
        ids = torch.cat([batch.input_ids, written], 1)
        mask = torch.cat([batch.attention_mask, torch.ones_like(written)], 1)
        logits = self._model(replace(batch, input_ids=ids, attention_mask=mask))[:, -bins.shape[1] :]
        return logits[..., architecture.first_id : architecture.first_id + architecture.future_bins].float()

    def _forwards(self, observations: Observation, count: int) -> Iterator[tuple[NDArray[np.int64], Batch]]:
        """Rows of each forward (the last row repeated to fill it up), and what the model reads of them."""
        for start in range(0, count, self._rows):
            rows = np.minimum(np.arange(start, start + self._rows), count - 1)
            batch = self.processor.encode(self._samples(observations, rows), self.layout, generate=True)
            yield rows, batch.to(self.device)

    def _samples(self, observations: Observation, rows: NDArray[np.int64]) -> list[Sample]:
        history, yaw = known_history(
            observations["ego_history_rig"][rows],
            observations["ego_history_mask"][rows],
            observations["ego_dynamics_rig"][rows, 0],
            self.spec.history_step_us * 1e-6,
        )
        fields: Sequence[str] = [f"camera_{name}" for name in self.spec.cameras]
        none = np.zeros((0, self.spec.frames, 1, 1, 3), np.uint8)
        return [
            Sample(
                np.stack([observations[name][row] for name in fields]) if fields else none,
                history[i],
                yaw[i],
                cameras=self._cameras,
            )
            for i, row in enumerate(rows)
        ]

    def _need_tokens(self, what: str) -> None:
        if self._head != "tokens":
            raise ConfigError(f"'expert' cannot {what}: only head 'tokens' has a log-probability", key="policy.head")

    def _tensor(self, bins: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.asarray(bins, np.int64)).to(self.device)


def known_history(
    history_rig: NDArray[np.float32], mask: NDArray[np.bool_], speed_mps: NDArray[np.float32], step_s: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Positions [N,H,3] m and yaw [N,H] rad; poses that are not known go on straight, at the present speed.

    Args:
        history_rig: [N,H,7], position and quaternion wxyz, the last row the identity.
        mask: [N,H], True where known; the last is.
        speed_mps: [N], now.
        step_s: between poses.

    """
    count = mask.shape[1]
    w, x, y, z = (history_rig[..., 3 + k] for k in range(4))
    yaw = np.arctan2(2.0 * (w * z + x * y), 1.0 - 2.0 * (y * y + z * z))
    # What is known is an unbroken run up to now.
    known = np.logical_and.accumulate(mask[:, ::-1], axis=1)[:, ::-1]
    first = np.where(known.any(1), known.argmax(1), count - 1)[:, None]
    steps = np.maximum(first - np.arange(count), 0) * (step_s * speed_mps[:, None])
    start = np.take_along_axis(history_rig[..., :3], first[..., None], 1)
    start_yaw = np.take_along_axis(yaw, first, 1)
    back = np.stack([steps * np.cos(start_yaw), steps * np.sin(start_yaw), np.zeros_like(steps)], -1)
    xyz = np.where(known[..., None], history_rig[..., :3], start - back)
    return xyz.astype(np.float32), np.where(known, yaw, start_yaw).astype(np.float32)


def tiny_policy(config: AlpamayoTinyConfig, device: str) -> AlpamayoPolicy:
    """The tiny model with fresh weights."""
    size = TinySize(
        hidden=config.hidden, expert_hidden=config.hidden * 3 // 4, pixels=max(config.height * config.width, 32 * 32)
    )
    return AlpamayoPolicy(config, *make_tiny(size, seed=config.seed), device=device)


def load_policy(config: Alpamayo1Config | Alpamayo15Config, device: str) -> AlpamayoPolicy:
    """A converted checkpoint."""
    directory = Path(config.model.path)
    dtype = None if config.model.dtype == "auto" else getattr(torch, config.model.dtype)
    model = load_model(directory, dtype=dtype, attention=config.model.attention)
    return AlpamayoPolicy(config, model, Processor.load(directory, model.architecture), device)
