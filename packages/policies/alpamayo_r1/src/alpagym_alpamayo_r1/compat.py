"""The places where transformers 4.57 and 5.x differ, and nothing else."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from torch import Tensor
from transformers import DynamicCache, Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel, Qwen3VLTextModel

_TEXT_FORWARD = inspect.signature(Qwen3VLTextModel.forward).parameters
# 5.x renames the argument on its way (5.24 has `cache`, and warns about the old name).
CACHE = "cache" if "cache" in _TEXT_FORWARD else "past_key_values"
# 5.x wants to be told which tokens are pictures; 4.57 works it out.
WANTS_TOKEN_TYPES = "mm_token_type_ids" in inspect.signature(Qwen3VLModel.get_rope_index).parameters


def image_processor_class() -> Any:
    """The Pillow-based Qwen2-VL processor: the default one of 5.x needs torchvision."""
    family = "transformers.models.qwen2_vl.image_processing"
    try:
        return importlib.import_module(f"{family}_pil_qwen2_vl").Qwen2VLImageProcessorPil
    except ModuleNotFoundError:
        return importlib.import_module(f"{family}_qwen2_vl").Qwen2VLImageProcessor


def tokenizer_class() -> Any:
    """The Qwen2 tokenizer that takes a `tokenizers.Tokenizer`."""
    import transformers

    return getattr(transformers, "Qwen2TokenizerFast", None) or transformers.Qwen2Tokenizer


def with_cache(cache: DynamicCache) -> dict[str, DynamicCache]:
    """The keyword argument that hands a cache to a model."""
    return {CACHE: cache}


def token_types(input_ids: Tensor, image_token_id: int) -> dict[str, Tensor]:
    """The keyword argument that says which tokens are pictures, where one is wanted."""
    return {"mm_token_type_ids": (input_ids == image_token_id).int()} if WANTS_TOKEN_TYPES else {}


def rope_positions(
    vlm: Qwen3VLForConditionalGeneration, input_ids: Tensor, attention_mask: Tensor, image_grid_thw: Tensor | None
) -> Tensor:
    """Positions [3,B,L] (time, height, width) of tokens; padding gets numbers that mean nothing."""
    kinds = token_types(input_ids, vlm.config.image_token_id)
    positions, _ = vlm.model.get_rope_index(
        input_ids=input_ids, image_grid_thw=image_grid_thw, attention_mask=attention_mask, **kinds
    )
    return positions


def image_features(
    vlm: Qwen3VLForConditionalGeneration, pixel_values: Tensor, image_grid_thw: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Embeddings [P,W] of pictures, and the features [P,W] that go into each of the first layers."""
    out = vlm.model.visual(pixel_values, grid_thw=image_grid_thw)
    if isinstance(out, tuple):  # 4.57
        return out[0], out[1]
    return out.pooler_output, out.deepstack_features


def rows_of_cache(cache: DynamicCache, rows: Tensor) -> DynamicCache:
    """A new cache of some rows, each as often as it is named."""
    taken = DynamicCache()
    for index, layer in enumerate(cache.layers):
        assert layer.keys is not None
        assert layer.values is not None
        taken.update(layer.keys[rows], layer.values[rows], index)
    return taken


def copy_cache(cache: DynamicCache) -> DynamicCache:
    """A new cache over the same keys and values; extending one leaves the other."""
    copied = DynamicCache()
    for index, layer in enumerate(cache.layers):
        assert layer.keys is not None
        assert layer.values is not None
        copied.update(layer.keys, layer.values, index)
    return copied
