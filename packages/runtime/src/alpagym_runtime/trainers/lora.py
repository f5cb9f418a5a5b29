"""Low-rank adapters: each chosen linear layer keeps its weights and learns a product of two thin matrices beside them.

y = W x + (alpha / rank) · U D x; U starts at zero, so training starts at the policy as it was. Weights keep their
names, so a state without adapters loads (they are then zero), and `merged` gives one that every policy reads.

Source: arXiv:2106.09685.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from alpagym_runtime.deploy_config import LoraSection
from alpagym_runtime.errors import ConfigError

UP, DOWN = "lora_up", "lora_down"


class LoraLinear(nn.Linear):
    """A linear layer with an adapter; takes the place of one, whose weights it shares and freezes."""

    def __init__(self, layer: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self._scale = alpha / rank
        like: dict[str, Any] = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        down = torch.empty(rank, layer.in_features).uniform_(-1.0, 1.0, generator=generator)
        self.lora_down = nn.Parameter((down / math.sqrt(layer.in_features)).to(**like))
        self.lora_up = nn.Parameter(torch.zeros(layer.out_features, rank, **like))

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return super().forward(input) + self.adapted(input)

    def adapted(self, input: Tensor, outputs: slice = slice(None)) -> Tensor:
        """What the adapter adds to a range of the outputs, for who multiplies by `weight` itself."""
        return self._scale * nn.functional.linear(nn.functional.linear(input, self.lora_down), self.lora_up[outputs])

    def merged_weight(self) -> Tensor:
        """[out, in], of a plain layer that does the same."""
        return (self.weight + self._scale * (self.lora_up @ self.lora_down)).detach()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        if prefix + UP not in state_dict and prefix + "weight" in state_dict:
            state_dict[prefix + UP] = torch.zeros_like(self.lora_up)
            state_dict[prefix + DOWN] = self.lora_down.detach()
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def add_adapters(module: nn.Module, section: LoraSection, seed: int) -> None:
    """Give the linear layers whose names match an adapter and freeze everything else, in place.

    Raises:
        ConfigError: none matches; names those there are.

    """
    names = [name for name, layer in module.named_modules() if type(layer) is nn.Linear]
    chosen = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in section.targets)]
    if not chosen:
        raise ConfigError(
            f"matches no linear layer of the policy: {section.targets}; it has {', '.join(names[:12])}"
            + (f" and {len(names) - 12} more" if len(names) > 12 else ""),
            key="learner.lora.targets",
        )
    generator = torch.Generator().manual_seed(seed)
    module.requires_grad_(False)
    for name in chosen:
        parent, _, own = name.rpartition(".")
        layer = module.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        setattr(module.get_submodule(parent), own, LoraLinear(layer, section.rank, section.alpha, generator))


def merged(module: nn.Module) -> dict[str, Tensor]:
    """The state of a module with its adapters multiplied into the weights; without adapters its own state."""
    weights = {f"{name}.weight".lstrip("."): layer.merged_weight() for name, layer in _layers(module)}
    state = {name: value for name, value in module.state_dict().items() if not _is_adapter(name)}
    return state | weights


def adapters(module: nn.Module) -> dict[str, Tensor]:
    """The adapters' tensors by name; empty without any."""
    return {name: value for name, value in module.state_dict().items() if _is_adapter(name)}


def restore_adapters(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `adapters`."""
    module.load_state_dict({**module.state_dict(), **tensors})


def _layers(module: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    return ((name, layer) for name, layer in module.named_modules() if isinstance(layer, LoraLinear))


def _is_adapter(name: str) -> bool:
    return name.rpartition(".")[2] in (UP, DOWN)
