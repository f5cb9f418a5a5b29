"""What an Alpamayo takes of a GPU, from its shapes alone: nothing is allocated, and torch is not needed.

Acting: weights; the engine's keys and values; those of the prompt as it was read; kept features of pictures; the widest
layer of reading a prompt. Learning: gradients and Adam's two moments of what is trained, in the weights' number format
(our trainers keep no other copy), and what a layer keeps of each token for the backward pass. Both alternate in one
process, so the plan is the sum of what stays and the larger of what comes and goes.

Not in it: torch's own context (about 0.5 GB), fragmentation, a world that renders on the same GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from alpagym_alpamayo_r1.architecture import Architecture

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Parameters:
    """Weights of the language model with its vision tower, and of the action expert (0 without one)."""

    backbone: int
    expert: int


@dataclass(frozen=True)
class Use:
    """How a policy is used.

    Attributes:
        rows: of a forward.
        context: tokens of prompt and completion.
        pictures: kept features, pictures; 0 without the graph engine.
        picture_tokens: of a picture.
        static_cache: the graph engine's.
        trained: weights that are learned; 0 only acts.
        micro_batch: decisions of a forward that is learned from.
        through_backbone: gradients reach the backbone (head tokens, or policy.train_backbone).
        expert_steps: of a scored decision; 0 with head tokens.

    """

    rows: int
    context: int
    pictures: int = 0
    picture_tokens: int = 0
    static_cache: bool = False
    trained: int = 0
    micro_batch: int = 1
    through_backbone: bool = True
    expert_steps: int = 0


def count_parameters(architecture: Architecture, *, with_expert: bool = True) -> Parameters:
    """From the config; the same numbers as the model's own."""
    text = architecture.vlm["text_config"]
    table = architecture.vocab_size * text["hidden_size"]
    backbone = _decoder(text) + table * (1 if architecture.tied else 2) + _vision(architecture.vlm["vision_config"])
    expert = 0
    if with_expert and architecture.expert is not None:
        section = text | architecture.expert
        width, head = section["hidden_size"], architecture.action_in
        expert = _decoder(section) + _action_in(width, head) + 2 * width + 2
    return Parameters(backbone, expert)


def memory_plan(architecture: Architecture, use: Use, dtype: str = "bfloat16") -> dict[str, int]:
    """Bytes by part, `total` last."""
    size = _BYTES[dtype]
    text = architecture.vlm["text_config"]
    vision = architecture.vlm["vision_config"]
    count = count_parameters(architecture)
    token = 2 * text["num_hidden_layers"] * text["num_key_value_heads"] * text["head_dim"] * size
    tail = architecture.future_tokens // 2 if count.expert else 0
    deep = 1 + len(vision["deepstack_visual_indexes"])
    width, inner = text["hidden_size"], text["intermediate_size"]
    stays = {
        "weights": (count.backbone + count.expert) * size,
        "engine's keys and values": use.rows * (use.context + tail) * token if use.static_cache else 0,
        "features of pictures": use.pictures * use.picture_tokens * deep * width * size,
        "gradients and moments": 3 * use.trained * size,
    }
    # Hidden states before and after, normalised in float32, and gate, up and their product.
    reading = use.rows * use.context * ((2 * size + 4) * width + 3 * inner * size)
    acting = use.rows * use.context * token + reading
    learning = 0
    if use.trained:
        learning = use.micro_batch * use.context * token
        if use.through_backbone:
            learning += use.micro_batch * use.context * text["num_hidden_layers"] * _kept(text, size)
        if use.expert_steps:
            section = text | (architecture.expert or {})
            step = (use.context + tail) * token + tail * section["num_hidden_layers"] * _kept(section, size)
            learning += use.micro_batch * use.expert_steps * step
    plan = stays | {"acting or learning": max(acting, learning)}
    return plan | {"total": sum(plan.values())}


def _kept(text: dict[str, Any], size: int) -> int:
    """Bytes that a layer keeps of a token: two norms and their results, queries, keys, values, gate, up, product."""
    queries, keys = (text[f"num_{name}_heads"] * text["head_dim"] for name in ("attention", "key_value"))
    return (
        text["hidden_size"] * 2 * (4 + size)
        + queries * (4 + 4 * size)  # normalised in float32; rotated, attended, and keys and values once a query head
        + keys * (4 + 2 * size)
        + text["intermediate_size"] * 4 * size
    )


def _decoder(text: dict[str, Any]) -> int:
    width, head = text["hidden_size"], text["head_dim"]
    queries, keys = text["num_attention_heads"] * head, text["num_key_value_heads"] * head
    attention = width * (2 * queries + 2 * keys) + 2 * head
    layer = attention + 3 * width * text["intermediate_size"] + 2 * width
    return int(text["num_hidden_layers"] * layer + width)


def _vision(vision: dict[str, Any]) -> int:
    width, inner, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    pixels = vision.get("in_channels", 3) * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    block = 4 * width + width * 4 * width + 4 * width + 2 * width * inner + inner + width
    joined = width * vision["spatial_merge_size"] ** 2
    merger = joined * joined + joined + joined * out + out
    mergers = (merger + 2 * width) + len(vision["deepstack_visual_indexes"]) * (merger + 2 * joined)
    return int((pixels + 1) * width + vision["num_position_embeddings"] * width + vision["depth"] * block + mergers)


def _action_in(width: int, section: dict[str, Any]) -> int:
    hidden, layers = section.get("hidden_size", 1024), section.get("num_enc_layers", 4)
    features = 3 * section.get("num_fourier_feats", 20)
    first, further = features * hidden + hidden, (layers - 1) * (hidden * hidden + 2 * hidden)
    return int(first + further + hidden + hidden * width + width + 2 * width)
