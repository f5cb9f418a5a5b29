"""Alpamayo as one module: a Qwen3-VL backbone that reads and writes trajectory tokens, and the action expert.

Two ways to a plan. *Tokens*: the backbone writes 128 trajectory tokens (what RL and the first SFT stage train).
*Expert*: the backbone reads up to `<|traj_future_start|>`, and the expert denoises actions over its cache (the second
stage).

State-dict names are those of the releases: `vlm.*`, `expert.*`, `action_in_proj.*`, `action_out_proj.*`. Nothing here
opens a file or the hub; `checkpoints` loads weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

from alpagym_alpamayo_r1 import compat
from alpagym_alpamayo_r1.action_expert import ActionInput, Velocity, euler, flow_loss
from alpagym_alpamayo_r1.action_space import Path, UnicycleActionSpace
from alpagym_alpamayo_r1.architecture import Architecture
from alpagym_alpamayo_r1.processing import Batch
from alpagym_alpamayo_r1.trajectory_tokens import future_tokenizer, history_tokenizer
from alpagym_plugins import ConfigError
from alpagym_runtime.trainers.lora import LoraLinear

T = TypeVar("T")
ACTION_DIMENSIONS = 2
Choose = Callable[[Tensor, int], Tensor]
"""(logits [B,V] f32, step) to chosen ids [B]."""


@dataclass
class Prefix:
    """What the backbone remembers of B rows of L tokens.

    Attributes:
        cache: keys and values; never extended in place by who reads it.
        valid: [B,L] bool, False at padding and behind a cut.
        next_position: [B] rope position of the token that follows the last valid one.
        logits: [B,V] f32 for that token.

    """

    cache: DynamicCache
    valid: Tensor
    next_position: Tensor
    logits: Tensor

    def take(self, rows: Tensor) -> Prefix:
        """Some rows, each as often as it is named."""
        cache = compat.rows_of_cache(self.cache, rows)
        return Prefix(cache, self.valid[rows], self.next_position[rows], self.logits[rows])


@dataclass(frozen=True)
class LanguageLoss:
    """Mean cross-entropies of a batch: `total` = trajectory + text, each 0 where there is no such label."""

    total: Tensor
    trajectory: Tensor
    text: Tensor


class AlpamayoModel(nn.Module):
    """See the module's text.

    Attributes:
        architecture: the config it was built from.
        vlm: the backbone.
        expert, action_in_proj, action_out_proj: the action expert, or absent where `with_expert` is False.

    """

    spread_entries: ClassVar[tuple[str, ...]] = ("within",)
    """Methods through which weights that are spread over processes come together (`trainers.learner.spread`)."""

    def __init__(self, architecture: Architecture, *, with_expert: bool = True, attention: str = "sdpa") -> None:
        super().__init__()
        self.architecture = architecture
        self.future = future_tokenizer(architecture.future)
        self.history = history_tokenizer(architecture.history)
        config = Qwen3VLConfig(**copy.deepcopy(architecture.vlm))
        config._attn_implementation = attention
        self.vlm = Qwen3VLForConditionalGeneration(config)
        self.with_expert = with_expert
        if with_expert:
            if architecture.expert is None:
                raise ConfigError("is missing: this checkpoint has no action expert", key="expert_cfg")
            # flash-attn has no mask that lets way-points see each other and only what is valid of a prompt.
            self.expert = _expert(architecture, "sdpa" if attention == "flash_attention_2" else attention)
            width = self.expert.config.hidden_size
            self.action_in_proj = ActionInput(
                ACTION_DIMENSIONS, width, rounded=architecture.dtype == "bfloat16", **architecture.action_in
            )
            self.action_out_proj = nn.Linear(width, ACTION_DIMENSIONS)

    @property
    def action_space(self) -> UnicycleActionSpace:
        """What the expert's actions mean."""
        return UnicycleActionSpace.from_config(self.architecture.action_space)

    @property
    def denoising_steps(self) -> int:
        """Steps from noise to actions at inference."""
        return int(self.architecture.diffusion.get("num_inference_steps", 10))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.vlm.device

    def within(self, work: Callable[[], T]) -> T:
        """What `work` gives: tensors, or a tuple of them; whatever it does with this model must go through here.

        Its parts are called one by one (backbone, head, expert), so there is no single forward that gathers weights
        which are spread over processes. This is that forward.
        """
        return work()

    # ---------------------------------------------------------------- the backbone

    def forward(self, batch: Batch) -> Tensor:
        """Logits [B,L,V] of every next token."""
        return self.logits(self.hidden(batch))

    def hidden(self, batch: Batch, cache: DynamicCache | None = None) -> Tensor:
        """The last layer [B,L,W]; `logits` of the positions and words that are wanted comes after."""
        arguments: dict[str, Any] = {} if cache is None else compat.with_cache(cache)
        out = self.vlm.model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            position_ids=self.positions(batch),
            pixel_values=None if batch.pixel_values is None else batch.pixel_values.to(self.vlm.dtype),
            image_grid_thw=batch.image_grid_thw,
            use_cache=cache is not None,
            **arguments,
            **compat.token_types(batch.input_ids, self.vlm.config.image_token_id),
        )
        return out.last_hidden_state

    def logits(self, hidden: Tensor, words: slice = slice(None)) -> Tensor:
        """Logits [...,V] of hidden states [...,W] for a range of the vocabulary.

        A release has 155,000 words, of which a plan's token is one of 3,000: all of them at each of 3,000 positions
        would be 0.9 GB a row in bfloat16.
        """
        head = self.vlm.lm_head
        out = nn.functional.linear(hidden, head.weight[words], None if head.bias is None else head.bias[words])
        return out + head.adapted(hidden, words) if isinstance(head, LoraLinear) else out

    def language_loss(self, batch: Batch) -> LanguageLoss:
        """Mean cross-entropy over trajectory labels (markers and bins) plus that over the other labels.

        The first stage of SFT; at random weights about 2 ln V. Logits are made of the labelled places only: of 3,200
        places of a release's prompt 131 are. Source: NVlabs/alpamayo-recipes.
        """
        hidden = self.hidden(batch)[:, :-1]
        learned = batch.labels_mask[:, 1:]
        targets = batch.input_ids[:, 1:][learned]
        each = nn.functional.cross_entropy(self.logits(hidden[learned]).float(), targets, reduction="none")
        trajectory = self._is_trajectory(targets)
        parts = [_mean_where(each, mask) for mask in (trajectory, ~trajectory)]
        return LanguageLoss(parts[0] + parts[1], *parts)

    def read(self, batch: Batch) -> Prefix:
        """Read a batch whose rows end where the model goes on."""
        cache = DynamicCache()
        logits = self.logits(self.hidden(batch, cache)[:, -1]).float()
        positions = self.positions(batch)
        return Prefix(cache, batch.attention_mask.bool(), positions[:, :, -1].amax(0) + 1, logits)

    def read_up_to(self, batch: Batch, token_id: int) -> Prefix:
        """Read a batch, and forget what follows the last `token_id` of each row (that token stays)."""
        cache = DynamicCache()
        hidden = self.hidden(batch, cache)
        is_it = batch.input_ids == token_id
        if not is_it.any(-1).all():
            lacking = torch.nonzero(~is_it.any(-1))[:, 0].tolist()
            raise ValueError(f"rows {lacking} have no token {token_id} to cut at")
        index = torch.arange(is_it.shape[1], device=is_it.device)
        last = torch.where(is_it, index, -1).amax(-1)
        valid = batch.attention_mask.bool() & (index <= last[:, None])
        positions = self.positions(batch)
        at = positions.gather(2, last[None, :, None].expand(3, -1, 1))[:, :, 0].amax(0)
        rows = torch.arange(len(last), device=last.device)
        return Prefix(cache, valid, at + 1, self.logits(hidden[rows, last]).float())

    def extend(self, prefix: Prefix, ids: Tensor, valid: Tensor) -> Prefix:
        """Read further tokens [B,M] behind a prefix, which stays as it is.

        Args:
            prefix: of B rows.
            ids: [B,M]; anything where not valid.
            valid: [B,M] bool, the first of each row True.

        """
        cache = compat.copy_cache(prefix.cache)
        both = torch.cat([prefix.valid, valid], 1)
        count = valid.long().cumsum(-1)
        out = self.vlm(
            input_ids=torch.where(valid, ids, 0),
            attention_mask=both.long(),
            position_ids=(prefix.next_position[:, None] + count - 1).expand(3, -1, -1),
            use_cache=True,
            **compat.with_cache(cache),
        )
        index = torch.arange(ids.shape[1], device=ids.device)
        last = torch.where(valid, index, -1).amax(-1)
        rows = torch.arange(len(ids), device=ids.device)
        return Prefix(cache, both, prefix.next_position + count[:, -1], out.logits[rows, last].float())

    def write(self, prefix: Prefix, choose: Choose, steps: int, stop_id: int | None = None) -> Tensor:
        """Write up to `steps` tokens after a prefix: ids [B,S]; the prefix stays as it is.

        Args:
            prefix: of B rows.
            choose: picks the ids; what it may pick is its business.
            steps: most tokens.
            stop_id: rows that wrote it go on with it; all rows having done so ends the writing.

        """
        cache, valid, logits = compat.copy_cache(prefix.cache), prefix.valid, prefix.logits
        written: list[Tensor] = []
        ended = torch.zeros(len(valid), dtype=torch.bool, device=valid.device)
        for step in range(steps):
            ids = choose(logits, step)
            if stop_id is not None:
                ids = torch.where(ended, stop_id, ids)
                ended = ended | (ids == stop_id)
            written.append(ids)
            if ended.all() or step == steps - 1:
                break
            valid = torch.cat([valid, valid.new_ones(len(valid), 1)], 1)
            position = (prefix.next_position + step).expand(3, -1)[..., None]
            out = self.vlm(
                input_ids=ids[:, None],
                attention_mask=valid.long(),
                position_ids=position,
                use_cache=True,
                logits_to_keep=1,
                **compat.with_cache(cache),
            )
            logits = out.logits[:, -1].float()
        return torch.stack(written, 1)

    def decode_tokens(self, ids: Tensor, batch: Batch) -> Path:
        """Plans of trajectory ids [B,2K], K <= T (vocabulary ids)."""
        bins = (ids - self.architecture.first_id).clamp(0, self.architecture.future_bins - 1)
        return self.future.decode(bins, batch.history_xyz, batch.history_yaw)

    # ---------------------------------------------------------------- the expert

    def velocity(self, prefix: Prefix) -> Velocity:
        """The expert over a prefix, as a function of noisy actions and time."""
        waypoints = self.future.action_space.waypoints
        rows, length = prefix.valid.shape
        allowed = torch.cat([prefix.valid, prefix.valid.new_ones(rows, waypoints)], 1)[:, None, None]
        allowed = allowed.expand(rows, 1, waypoints, length + waypoints)
        if self.architecture.expert_is_causal:
            own = torch.ones(waypoints, length + waypoints, dtype=torch.bool, device=allowed.device)
            allowed = allowed & own.tril(length)
        dtype = self.action_out_proj.weight.dtype
        mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        mask = mask.masked_fill(~allowed, torch.finfo(dtype).min)
        steps = torch.arange(waypoints, device=mask.device)
        position = (prefix.next_position[:, None] + steps).expand(3, -1, -1)

        def predict(actions: Tensor, time: Tensor) -> Tensor:
            embedded = self.action_in_proj(actions, time)
            # Of its own: the expert appends its keys and values to whatever it is given.
            memory = compat.copy_cache(prefix.cache)
            out = self.expert(
                inputs_embeds=embedded.to(dtype),
                attention_mask=mask,
                position_ids=position,
                use_cache=True,
                **compat.with_cache(memory),
            )
            return self.action_out_proj(out.last_hidden_state)

        return predict

    def sample_actions(self, prefix: Prefix, noise: Tensor, steps: int | None = None) -> Tensor:
        """Normalised actions [B,T,2] f32 from noise [B,T,2]; by default as many steps as the config says."""
        return euler(self.velocity(prefix), noise, self.denoising_steps if steps is None else steps)

    def expert_loss(self, batch: Batch, noise: Tensor, time: Tensor, *, train_backbone: bool = False) -> Tensor:
        """[B] flow-matching loss of the second stage; by default no gradient reaches the backbone.

        Args:
            batch: with futures, in training form.
            noise: [B,T,2] standard normal.
            time: [B], `action_expert.training_times`.
            train_backbone: let gradients through the cache.

        """
        if batch.future_xyz is None or batch.future_yaw is None:
            raise ValueError("the expert learns from futures: the batch has none")
        with torch.set_grad_enabled(train_backbone and torch.is_grad_enabled()):
            prefix = self.read_up_to(batch, self.architecture.marker_ids["future_start"])
        actions = self.action_space.encode(batch.history_xyz, batch.history_yaw, batch.future_xyz, batch.future_yaw)
        return flow_loss(self.velocity(prefix), actions.to(noise.dtype), noise, time)

    # ---------------------------------------------------------------- parts

    def positions(self, batch: Batch) -> Tensor:
        """Rope positions [3,B,L] (time, height, width) of a batch's tokens."""
        if batch.positions is not None:
            return batch.positions
        return compat.rope_positions(self.vlm, batch.input_ids, batch.attention_mask, batch.image_grid_thw)

    def _is_trajectory(self, ids: Tensor) -> Tensor:
        first, markers = self.architecture.first_id, self.architecture.marker_ids
        inside = (ids >= first) & (ids < first + self.architecture.traj_vocab_size)
        for name in ("future_start", "future_end"):
            inside = inside | (ids == markers[name])
        return inside


def _expert(architecture: Architecture, attention: str) -> Qwen3VLTextModel:
    text = {**copy.deepcopy(architecture.vlm["text_config"]), **copy.deepcopy(architecture.expert or {})}
    config = Qwen3VLTextConfig(**text)
    config._attn_implementation = attention
    expert = Qwen3VLTextModel(config)
    # It is fed embeddings only, and the releases hold no table for it.
    del expert.embed_tokens
    return expert


def _mean_where(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)
