"""What is optimised: the policy's own module, or a twin of it whose weights are spread over the team (FSDP2).

Driving needs forwards that no other process takes part in, so the policy keeps its weights whole. The twin holds a
share of weights, gradients and the optimiser's state; `score` runs on it while training, and it is copied back after.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from alpagym_runtime.deploy_config import LearnerSection
from alpagym_runtime.trainers.team import Team
from alpagym_runtime.types import TrainablePolicy

LARGE = 3_000_000_000
"""Parameters above which `shard=auto` spreads them."""


class Learner:
    """See the module's text.

    Args:
        policy: whose weights are trained.
        section: how they are held.
        team: over whom they are spread.

    """

    def __init__(self, policy: TrainablePolicy, section: LearnerSection, team: Team) -> None:
        self._policy, self._twin = policy, None
        team.same_weights(policy.module)
        count = sum(p.numel() for p in policy.module.parameters())
        large = count > LARGE and section.lora is None  # adapters are small
        if team.size > 1 and (section.shard == "always" or (section.shard == "auto" and large)):
            self._twin = spread(copy.deepcopy(policy.module), team)

    @property
    def spread_out(self) -> bool:
        """Whether the weights are spread over the team: all take part in each forward and backward pass."""
        return self._twin is not None

    def parameters(self) -> list[Tensor]:
        """Those that are trained."""
        return list(self.named_parameters().values())

    def named_parameters(self) -> dict[str, Tensor]:
        """Those that are trained, by name."""
        module = self._policy.module if self._twin is None else self._twin
        return {name: p for name, p in module.named_parameters() if p.requires_grad}

    def adopt(self) -> None:
        """Take the policy's weights, which were loaded meanwhile."""
        if self._twin is None:
            return
        whole = self._policy.module.state_dict()
        with torch.no_grad():
            for name, value in self._twin.state_dict().items():
                value.copy_(like_parameter(whole[name], value))

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Inside, the policy scores with the module that is optimised; at the end it drives with its weights."""
        if self._twin is None:
            yield
            return
        whole, self._policy.module = self._policy.module, self._twin
        try:
            yield
        finally:
            self._policy.module = whole
            self._publish(whole)

    def _publish(self, whole: nn.Module) -> None:
        assert self._twin is not None
        own = whole.state_dict()
        with torch.no_grad():
            for name, value in self._twin.state_dict().items():
                own[name].copy_(whole_tensor(value))


def spread(module: nn.Module, team: Team) -> nn.Module:
    """Spread a module's weights over the team, block by block: items of lists, the root's own parts, the rest.

    Weights come together in the forward of their block. A module that is used in another way than by its forward names
    the methods in `spread_entries`; its own parts, which such a method may call by themselves, are then no blocks.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    device = next(module.parameters()).device.type
    mesh = init_device_mesh(device, (team.size,))
    blocks = [item for part in module.modules() if isinstance(part, nn.ModuleList) for item in part]
    entries: tuple[str, ...] = getattr(module, "spread_entries", ())
    if not entries:
        blocks += [part for part in module.children() if not isinstance(part, nn.ModuleList)]
    chosen = {id(block) for block in blocks}
    # What is inside comes first: a root's own part may hold lists.
    for block in reversed([part for part in module.modules() if id(part) in chosen]):
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    for entry in entries:
        register_fsdp_forward_method(module, entry)
    return module


def whole_tensor(value: Tensor) -> Tensor:
    """A tensor that is spread over the team, gathered; all must call it. Another one is returned as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def like_parameter(value: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor of an optimiser's state, spread as its parameter is."""
    if not hasattr(parameter, "full_tensor") or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(value.to(parameter.device), mesh, placements)


def named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin so, without the beginning."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
