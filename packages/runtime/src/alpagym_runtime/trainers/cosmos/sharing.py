"""What one GPU of a policy replica keeps of the optimiser's state: its own share, as plain tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Own:
    """An optimiser as Cosmos-RL's checkpoints take it: each rank writes its share, and reads it back.

    Args:
        optimiser: of parameters that are spread over a replica's GPUs, or are not.

    """

    def __init__(self, optimiser: torch.optim.Optimizer) -> None:
        self._optimiser = optimiser

    def state_dict(self) -> dict[str, Any]:
        """The state; of what is spread, this rank's part."""
        plain = self._optimiser.state_dict()
        state = {index: {k: own_part(value) for k, value in entry.items()} for index, entry in plain["state"].items()}
        return {**plain, "state": state}

    def load_state_dict(self, plain: dict[str, Any]) -> None:
        """Take a state that this rank has written."""
        parameters = [p for group in self._optimiser.param_groups for p in group["params"]]
        state = {
            index: {k: _spread(value, parameters[index]) for k, value in entry.items()}
            for index, entry in plain["state"].items()
        }
        self._optimiser.load_state_dict({**plain, "state": state})


def own_part(value: Any) -> Any:
    """The memory of this rank's part of a tensor that is spread; anything else as it is."""
    return value.to_local() if hasattr(value, "to_local") else value


def _spread(value: Any, parameter: Tensor) -> Any:
    """A rank's part of a tensor that is spread as a parameter is."""
    if not hasattr(parameter, "to_local") or not isinstance(value, Tensor) or not value.ndim:
        return value
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(value.to(parameter.device), mesh, placements, shape=shape, stride=stride)
