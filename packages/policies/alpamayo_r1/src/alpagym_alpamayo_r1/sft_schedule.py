"""How fast each weight learns, and when: groups by name, warm-up and cosine.

Source: the trainer of NVlabs/alpamayo-recipes (groups by prefix) and transformers' `cosine_warmup_with_min_lr`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from alpagym_alpamayo_r1.sft_config import AlpamayoSftConfig
from alpagym_plugins import ConfigError


def parameter_groups(parameters: Mapping[str, Tensor], config: AlpamayoSftConfig) -> list[dict[str, Any]]:
    """Groups for AdamW: one a factor of the rate and kind (matrices decay; biases and norms do not).

    Each group has `factor` beside what AdamW reads.

    Raises:
        ConfigError: a prefix fits no weight that is trained.

    """
    prefixes = sorted(config.lr_multiplier, key=len, reverse=True)
    groups: dict[tuple[str, bool], list[Tensor]] = {}
    for name, parameter in parameters.items():
        prefix = next((p for p in prefixes if name == p or name.startswith(f"{p}.")), "")
        groups.setdefault((prefix, parameter.dim() >= 2), []).append(parameter)
    unused = set(prefixes) - {prefix for prefix, _ in groups}
    if unused:
        tops = sorted({".".join(name.split(".")[:3]) for name in parameters})
        raise ConfigError(
            f"{sorted(unused)[0]!r} fits no weight that is trained; there are {', '.join(tops[:8])}",
            key="trainer.lr_multiplier",
        )
    return [
        {
            "params": group,
            "factor": config.lr_multiplier.get(prefix, 1.0),
            "weight_decay": config.weight_decay if decays else 0.0,
        }
        for (prefix, decays), group in groups.items()
    ]


def rate_share(step: int, steps: int, config: AlpamayoSftConfig) -> float:
    """Share of the peak rate at step 0 … steps - 1: up linearly, then down by a cosine to the least rate."""
    if step < config.warmup_steps:
        return (step + 1.0) / config.warmup_steps
    floor = config.min_learning_rate / config.learning_rate
    progress = min((step - config.warmup_steps + 1.0) / max(steps - config.warmup_steps, 1), 1.0)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
