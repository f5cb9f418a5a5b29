"""The same writing and denoising as `AlpamayoModel`, over a cache of fixed size, so that a GPU can replay it.

Eager decoding of an 8-billion model launches some 2,000 kernels a token, 64 ms of which 60 are waiting. Here a decode
step and a denoising step are one function each over static arrays; on a GPU they are compiled (norms, rotary embedding
and gates become one kernel each), captured as CUDA graphs and replayed. Query, key and value weights of a layer, and
its gate and up weights, lie in one array, of which the model's parameters become views: one product instead of three,
and weights that are loaded or stepped in place, adapters too, are what the graphs read. On a CPU the same functions run
as they are.

Reading a prompt stays with the backbone: it is compute-bound. `read` only takes the pictures' features from `features`
where they are known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache

from alpagym_alpamayo_r1 import compat
from alpagym_alpamayo_r1.action_expert import Velocity
from alpagym_alpamayo_r1.model import ACTION_DIMENSIONS, AlpamayoModel, Choose, Prefix
from alpagym_alpamayo_r1.processing import Batch
from alpagym_plugins import ConfigError
from alpagym_runtime.trainers.lora import LoraLinear

WARM_UP = 3  # runs before a capture, as CUDA graphs want them
# For eight rows the library products reach half of the bandwidth in two of four shapes: 7.6 ms a decode step,
# 6.5 with tuned ones (H200). Tuning takes 80 s, once a machine: the compiler keeps what it found. The expert's
# products, of 512 rows, reach 0.8 of the GPU's rate as they are.
TUNED: dict[str, Any] = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON"}


class GraphEngine:
    """Writes and denoises for exactly `rows` rows with at most `capacity` keys each.

    Args:
        model: whose weights are used; its layers' weights are laid out anew, in place.
        rows: B of every call.
        capacity: most tokens of prompt and completion together.

    """

    def __init__(self, model: AlpamayoModel, rows: int, capacity: int) -> None:
        self.model, self.architecture, self.rows, self.capacity = model, model.architecture, rows, capacity
        text = model.vlm.model.language_model
        config = text.config
        self._decoder = _Layers(text)
        self._heads, self._width = config.num_key_value_heads, config.head_dim
        self._tail = model.future.action_space.waypoints if model.with_expert else 0
        device, dtype = model.device, model.vlm.dtype
        # The expert's own keys stand behind everything that can be written.
        shape = (rows, self._heads, capacity + self._tail, self._width)
        self._keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in self._decoder.layers]
        self._values = [torch.zeros(shape, device=device, dtype=dtype) for _ in self._decoder.layers]
        self._valid = torch.zeros(rows, capacity + self._tail, device=device, dtype=torch.uint8)
        self._ids = torch.zeros(rows, device=device, dtype=torch.long)
        self._position = torch.zeros(rows, device=device, dtype=torch.long)
        self._cursor = torch.zeros(1, device=device, dtype=torch.long)
        self._decode = _Replayed(self._decode_step, device, TUNED)
        if model.with_expert:
            self._expert = _Layers(model.expert)
            own = torch.ones(self._tail, self._tail, device=device, dtype=torch.bool)
            self._own = own.tril() if model.architecture.expert_is_causal else own
            self._noisy = torch.zeros(rows, self._tail, ACTION_DIMENSIONS, device=device)
            self._time = torch.zeros(rows, device=device)
            self._denoise = _Replayed(self._denoise_step, device)
        self._holds: Prefix | None = None

    def read(self, batch: Batch, features: tuple[Tensor, list[Tensor]] | None = None) -> Prefix:
        """Read a batch whose rows end where the model goes on.

        Args:
            batch: B rows.
            features: what the vision tower makes of the batch's pictures, in order: embeddings [P,W] and one [P,W] for
                each deep layer (`see`); None: it is asked now.

        """
        if features is None and batch.pixel_values is not None:
            features = self.see(batch.pixel_values, batch.image_grid_thw)
        text = self.model.vlm.model.language_model
        embedded = text.embed_tokens(batch.input_ids)
        pictures: dict[str, Any] = {}
        if features is not None:
            where = batch.input_ids == self.model.vlm.config.image_token_id
            if int(where.sum()) != len(features[0]):
                raise ValueError(f"{int(where.sum())} picture tokens in the prompts, {len(features[0])} features")
            embedded = embedded.masked_scatter(where[..., None], features[0].to(embedded.dtype))
            pictures = {"visual_pos_masks": where, "deepstack_visual_embeds": features[1]}
        positions = self.model.positions(batch)
        cache = DynamicCache()
        hidden = text(
            inputs_embeds=embedded,
            attention_mask=batch.attention_mask,
            position_ids=positions,
            use_cache=True,
            **compat.with_cache(cache),
            **pictures,
        ).last_hidden_state
        logits = self.model.vlm.lm_head(hidden[:, -1]).float()
        return Prefix(cache, batch.attention_mask.bool(), positions[:, :, -1].amax(0) + 1, logits)

    def see(self, pixel_values: Tensor, image_grid_thw: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Embeddings [P,W] of pictures and the deep layers' [P,W], P tokens in all."""
        return compat.image_features(self.model.vlm, pixel_values.to(self.model.vlm.dtype), image_grid_thw)

    def write(self, prefix: Prefix, choose: Choose, steps: int, stop_id: int | None = None) -> Tensor:
        """As `AlpamayoModel.write`."""
        length = self._take(prefix)
        if length + steps - 1 > self.capacity:
            raise ConfigError(
                f"holds {self.capacity} tokens a row, the prompt has {length} and up to {steps} are written",
                key="policy.context",
            )
        logits = prefix.logits
        written: list[Tensor] = []
        ended = torch.zeros(self.rows, dtype=torch.bool, device=self._ids.device)
        for step in range(steps):
            ids = choose(logits, step)
            if stop_id is not None:
                ids = torch.where(ended, stop_id, ids)
                ended = ended | (ids == stop_id)
            written.append(ids)
            # Asking a GPU whether all rows have ended waits for it; every eighth step is often enough.
            if step == steps - 1 or (stop_id is not None and step % 8 == 7 and bool(ended.all())):
                break
            self._ids.copy_(ids)
            self._position.copy_(prefix.next_position + step)
            self._cursor.fill_(length + step)
            logits = self._decode()
        self._holds = None  # keys of what was written lie behind it now
        return torch.stack(written, 1)

    def velocity(self, prefix: Prefix) -> Velocity:
        """As `AlpamayoModel.velocity`; good until the next call of `write` or `velocity`."""
        self._take(prefix)
        self._position.copy_(prefix.next_position)
        self._valid[:, self.capacity :] = 1

        def predict(actions: Tensor, time: Tensor) -> Tensor:
            if self._holds is not prefix:
                raise RuntimeError("the engine has read another prompt since this velocity was made")
            self._noisy.copy_(actions)
            self._time.copy_(time)
            return self._denoise().clone()

        return predict

    # ---------------------------------------------------------------- parts

    def _take(self, prefix: Prefix) -> int:
        """Copy a prefix into the static arrays; its length."""
        rows, length = prefix.valid.shape
        if rows != self.rows or length > self.capacity:
            raise ConfigError(
                f"is made for {self.rows} rows of {self.capacity} tokens, got {rows} of {length}", key="policy.context"
            )
        if self._holds is not prefix:
            for keys, values, layer in zip(self._keys, self._values, prefix.cache.layers, strict=True):
                assert layer.keys is not None
                assert layer.values is not None
                keys[:, :, :length] = layer.keys
                values[:, :, :length] = layer.values
        self._valid.zero_()
        self._valid[:, :length] = prefix.valid
        self._holds = prefix
        return length

    def _decode_step(self) -> Tensor:
        """Logits [B,V] f32 of the token behind `_ids`, whose keys go to `_cursor`."""
        text = self.model.vlm.model.language_model
        self._valid.index_fill_(1, self._cursor, 1)
        hidden = text.embed_tokens(self._ids)
        cos, sin = self._decoder.rotation(self._position, hidden.dtype)

        def attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self._keys[layer], self._values[layer]
            keys.index_copy_(2, self._cursor, key[:, :, None])
            values.index_copy_(2, self._cursor, value[:, :, None])
            grouped = query.view(self.rows, self._heads, -1, self._width)
            return _attend_one(grouped, keys, values, self._valid, self._cursor, self._decoder.scale)

        hidden = self._decoder.run(hidden, cos, sin, attention)
        return self.model.vlm.lm_head(hidden).float()

    def _denoise_step(self) -> Tensor:
        """Velocities [B,T,2] of `_noisy` at `_time`."""
        model, expert = self.model, self._expert
        dtype = model.action_out_proj.weight.dtype
        hidden = model.action_in_proj(self._noisy, self._time).to(dtype)
        steps = torch.arange(self._tail, device=hidden.device)
        cos, sin = expert.rotation(self._position[:, None] + steps, hidden.dtype)
        seen = self._valid[:, None, : self.capacity].bool().expand(-1, self._tail, -1)
        seen = torch.cat([seen, self._own.expand(self.rows, -1, -1)], -1)

        def attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self._keys[layer], self._values[layer]
            keys[:, :, self.capacity :] = key.transpose(1, 2)
            values[:, :, self.capacity :] = value.transpose(1, 2)
            # Query heads of one key head as rows of one query: each key is read once.
            group = query.shape[2] // self._heads
            packed = query.view(self.rows, self._tail, self._heads, group, self._width).permute(0, 2, 3, 1, 4)
            packed = packed.reshape(self.rows, self._heads, group * self._tail, self._width)
            mask = seen[:, None].expand(-1, group, -1, -1).reshape(self.rows, 1, group * self._tail, -1)
            out = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=expert.scale)
            out = out.view(self.rows, self._heads, group, self._tail, self._width).permute(0, 3, 1, 2, 4)
            return out.reshape(self.rows, self._tail, -1)

        return model.action_out_proj(expert.run(hidden, cos, sin, attention)).float()


Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [...,H·G,D], keys [...,H,D], values [...,H,D]), rotated, to [...,H·G·D]."""


class _Layers:
    """A Qwen3 decoder's layers as plain functions, with joined weights."""

    def __init__(self, text: Any) -> None:
        self.layers = list(text.layers)
        self._norm = text.norm
        self._rotary = text.rotary_emb
        first = self.layers[0].self_attn
        self.scale, self._width = first.scaling, first.head_dim
        self._sizes = [getattr(first, f"{name}_proj").weight.shape[0] for name in "qkv"]
        if first.q_proj.bias is not None:
            raise ConfigError("biases of attention are not supported by this engine", key="policy.engine")
        self._qkv = [_join([getattr(x.self_attn, f"{name}_proj") for name in "qkv"]) for x in self.layers]
        self._gate_up = [_join([x.mlp.gate_proj, x.mlp.up_proj]) for x in self.layers]

    def rotation(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [...,1,D] at positions [...] of text, where time, height and width are the same."""
        angle = position[..., None].float() * self._rotary.inv_freq.float()
        angle = torch.cat([angle, angle], -1)[..., None, :]
        scaling = self._rotary.attention_scaling
        return (angle.cos() * scaling).to(dtype), (angle.sin() * scaling).to(dtype)

    def run(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        """Hidden states [...,W] through all layers and the last norm."""
        for index, layer in enumerate(self.layers):
            block, mlp = layer.self_attn, layer.mlp
            normed = _normed(hidden, layer.input_layernorm)
            joined = _product(normed, self._qkv[index], block.q_proj, block.k_proj, block.v_proj)
            query, key, value = (x.unflatten(-1, (-1, self._width)) for x in joined.split(self._sizes, -1))
            query = _rotated(_normed(query, block.q_norm), cos, sin)
            key = _rotated(_normed(key, block.k_norm), cos, sin)
            hidden = hidden + block.o_proj(attention(index, query, key, value).flatten(hidden.dim() - 1))
            normed = _normed(hidden, layer.post_attention_layernorm)
            gate, up = _product(normed, self._gate_up[index], mlp.gate_proj, mlp.up_proj).chunk(2, -1)
            hidden = hidden + mlp.down_proj(mlp.act_fn(gate) * up)
        return _normed(hidden, self._norm)


class _Replayed:
    """A function over static arrays: on a GPU compiled and captured at its first call, elsewhere called."""

    def __init__(
        self, function: Callable[[], Tensor], device: torch.device, options: dict[str, Any] | None = None
    ) -> None:
        self._function, self._options = function, options
        self._on_gpu = device.type == "cuda"
        self._graph: Any = None
        self._output: Tensor | None = None

    def __call__(self) -> Tensor:
        """The output; on a GPU overwritten by the next call."""
        if not self._on_gpu:
            return self._function()
        if self._graph is None:
            self._capture()
        self._graph.replay()
        assert self._output is not None
        return self._output

    def _capture(self) -> None:
        compiled = torch.compile(self._function, fullgraph=True, dynamic=False, options=self._options)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                compiled()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = compiled()


def _attend_one(query: Tensor, keys: Tensor, values: Tensor, valid: Tensor, cursor: Tensor, scale: float) -> Tensor:
    if query.is_cuda:
        from alpagym_alpamayo_r1.decoder_kernels import attend

        return attend(query, keys, values, valid, cursor, scale).flatten(1)
    written = int(cursor) + 1  # keys behind are not looked at: half of the time of a small model's step
    keys, values, seen = keys[:, :, :written], values[:, :, :written], valid[:, None, None, :written].bool()
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=scale)
    return out.flatten(1)


def _join(parts: list[nn.Linear]) -> Tensor:
    """One array [sum of outputs, inputs] over the weights of linear layers, which become views of it."""
    joined = torch.cat([part.weight.detach() for part in parts])
    for part, piece in zip(parts, joined.split([part.weight.shape[0] for part in parts]), strict=True):
        part.weight.data = piece
    return joined


def _product(x: Tensor, joined: Tensor, *parts: nn.Linear) -> Tensor:
    """Outputs of linear layers side by side, by their joined weights; and what adapters add, given them since."""
    out = F.linear(x, joined)
    if not any(isinstance(part, LoraLinear) for part in parts):
        return out
    zeros = [x.new_zeros(*x.shape[:-1], part.out_features) for part in parts]
    more = [part.adapted(x) if isinstance(part, LoraLinear) else zero for part, zero in zip(parts, zeros, strict=True)]
    return out + torch.cat(more, -1)


def _normed(x: Tensor, norm: Any) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * wide.to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin
