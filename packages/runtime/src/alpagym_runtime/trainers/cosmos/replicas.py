"""The policy replicas of a job as a team; what they exchange goes through Cosmos-RL's communicator, which only sums."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alpagym_runtime.trainers.team import Team


class Replicas(Team):
    """See the module's text.

    Args:
        communicator: Cosmos-RL's between replicas: their ranks, their number, `allreduce(send, receive, op)`.
        replica: this one's name.
        device: where what is exchanged lies.

    """

    def __init__(self, communicator: Any, replica: str, device: torch.device) -> None:
        super().__init__(communicator.get_replica_rank(replica), communicator.world_size())
        self._communicator, self._device = communicator, device

    def _exchange(self, message: bytes, room: int) -> list[bytes]:
        # There is no gather: each adds its row to zeros.
        rows = torch.zeros((self.size, room), dtype=torch.float32, device=self._device)
        own = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        rows[self.rank, : len(message)] = own.to(self._device, torch.float32)
        return [row.to(torch.uint8).cpu().numpy().tobytes() for row in self._sum(rows)]

    def add_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace each gradient by its sum over the replicas; one that a replica lacks counts as 0."""
        trained = [p for p in parameters if p.requires_grad]
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        total = self._sum(torch.cat([gradient.reshape(-1).float() for gradient in gradients]))
        for gradient, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.reshape(gradient.shape))

    def _sum(self, tensor: Tensor) -> Tensor:
        total = torch.empty_like(tensor)
        self._communicator.allreduce(tensor, total, dist.ReduceOp.SUM)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        return total
