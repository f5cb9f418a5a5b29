"""Stand-ins for what Cosmos-RL wants to know of a Hugging Face model; our policies are built from the run's config."""

from __future__ import annotations

from typing import Any

from cosmos_rl.policy.model.base import IdentityWeightMapper, ModelRegistry
from cosmos_rl.utils.model_config import register_local_model_config
from cosmos_rl.utils.no_op_tokenizer import NoOpTokenizer
from cosmos_rl.utils.util import register_tokenizer_loader
from transformers import PretrainedConfig

from alpagym_runtime.trainers.cosmos.tables import MODEL

_TYPE = "alpagym"


class _Config(PretrainedConfig):
    model_type = _TYPE


class _Model:
    @staticmethod
    def supported_model_types() -> list[str]:
        """The names under which the registry finds it."""
        return [_TYPE]


def register_model() -> None:
    """Make Cosmos-RL take our model's path for one of its own kind, without a look at the network."""

    def ours(path: Any) -> bool:
        return str(path).endswith(MODEL)

    register_tokenizer_loader(ours, lambda path: NoOpTokenizer())
    register_local_model_config(ours, lambda path: _Config())
    if _TYPE not in ModelRegistry._MODEL_REGISTRY:
        ModelRegistry.register_model(_Model, IdentityWeightMapper)
