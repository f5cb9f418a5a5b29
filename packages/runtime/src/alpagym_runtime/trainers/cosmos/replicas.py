"""The policy replicas of a job as a team; what they exchange goes through Cosmos-RL's communicator, which only sums.

A replica of several GPUs is a team in itself, and each of its ranks has a communicator to the same rank of the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alpagym_runtime.trainers.cosmos.sharing import own_part
from alpagym_runtime.trainers.team import ALONE, Team


class Replicas(Team):
    """See the module's text. Ranks are counted replica by replica.

    Args:
        communicator: Cosmos-RL's between replicas: their ranks, their number, `allreduce(send, receive, op)`.
        replica: this one's name.
        device: where what is exchanged lies.
        ranks: the GPUs of this replica.

    """

    def __init__(self, communicator: Any, replica: str, device: torch.device, ranks: Team = ALONE) -> None:
        self._number, self._count = communicator.get_replica_rank(replica), communicator.world_size()
        super().__init__(self._number * ranks.size + ranks.rank, self._count * ranks.size)
        self._communicator, self._device, self._ranks = communicator, device, ranks

    def _exchange(self, message: bytes, room: int) -> list[bytes]:
        # There is no gather: each adds its row to zeros.
        rows = torch.zeros((self._count, room), dtype=torch.float32, device=self._device)
        own = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        rows[self._number, : len(message)] = own.to(self._device, torch.float32)
        mine = self._sum(rows).to(torch.uint8).cpu().numpy()
        if self._ranks.size == 1:
            return [row.tobytes() for row in mine]
        everybody = self._ranks._exchange(mine.tobytes(), mine.size)
        return [all_[n * room : (n + 1) * room] for n in range(self._count) for all_ in everybody]

    def add_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace each gradient by its sum over the replicas; one that a replica lacks counts as 0.

        Of a parameter that is spread over a replica's GPUs, each sums its part. FSDP has summed it in the replica, as a
        mean of losses that were scaled by the whole team's size.
        """
        trained = [p for p in parameters if p.requires_grad]
        self._ranks.add_gradients(trained)
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [own_part(parameter.grad) for parameter in trained if parameter.grad is not None]
        shares = [1.0 / self._count if hasattr(p, "to_local") else 1.0 for p in trained]
        total = self._sum(torch.cat([gradient.reshape(-1).float() for gradient in gradients]))
        parts = total.split([gradient.numel() for gradient in gradients])
        for gradient, part, share in zip(gradients, parts, shares, strict=True):
            gradient.copy_(part.reshape(gradient.shape) * share)

    def _sum(self, tensor: Tensor) -> Tensor:
        total = torch.empty_like(tensor)
        self._communicator.allreduce(tensor, total, dist.ReduceOp.SUM)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        return total
