"""Weights between two workers of one GPU (cosmos.mode=colocated_separated): through a `window`.

Cosmos-RL would send each tensor's CUDA handle as a pickle over TCP, to a port that is open to the network, and let the
next training step begin while the rollout still copies.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from cosmos_rl.collective import collective
from cosmos_rl.dispatcher.protocol import Role
from torch import Tensor

from alpagym_runtime.trainers.cosmos.housekeeping import replace_everywhere
from alpagym_runtime.trainers.cosmos.place import device_of, run_of
from alpagym_runtime.trainers.cosmos.tables import FOLDER, WINDOWS
from alpagym_runtime.trainers.cosmos.window import Inlet, Outlet

if TYPE_CHECKING:
    from cosmos_rl.dispatcher.command import PolicyToRolloutUnicastCommand


class SharedGpu(collective.P2RCollectiveManager):  # type: ignore[misc]
    """In the place of Cosmos-RL's own manager, in workers of both roles."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        config, directory = run_of(self.config)
        self._device = torch.device(device_of(config))
        self._folder = directory.absolute() / FOLDER / WINDOWS
        self._outlets: dict[str, Outlet] = {}
        self._inlets: dict[tuple[str, int], Inlet] = {}

    def setup_manager(self, command: PolicyToRolloutUnicastCommand) -> None:
        """Meet the other end, once for each pair of replicas."""
        self._wait_transfer_ready(command, needs_build=False)
        limit_s, mesh = max(command.ready_deadline - time.time(), 1.0), self.generate_mesh_key(command)
        if self.role == Role.ROLLOUT:
            for rank in range(command.src_replica_size):
                if (mesh, rank) not in self._inlets:
                    self._inlets[mesh, rank] = Inlet(self._path(mesh, rank), self._device, limit_s)
        elif mesh not in self._outlets:
            outlet = Outlet(self._path(mesh, self.global_rank), self._device)
            try:
                outlet.meet(limit_s)
            except Exception:
                outlet.close()
                raise
            self._outlets[mesh] = outlet

    def send(self, mesh_key: str, tensor: Tensor, r_rank: int) -> None:
        """Returns when the rollout has the tensor."""
        self._outlets[mesh_key].send(tensor)

    def recv(self, mesh_key: str, tensor: Tensor, p_rank: int) -> None:
        """Fill a tensor with what the policy sends."""
        self._inlets[mesh_key, p_rank].receive(tensor)

    def _path(self, mesh: str, rank: int) -> Path:
        return self._folder / f"{mesh}-{rank}.json"


def pass_weights_within_the_gpu() -> None:
    """Let this worker send or receive weights so."""
    replace_everywhere(collective, "P2RCollectiveManager", SharedGpu)
