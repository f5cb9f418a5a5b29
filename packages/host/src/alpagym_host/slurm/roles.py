"""Who works on which nodes of a job: trainer, rollout workers, AlpaSim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from alpagym_host.alpasim import starts_alpasim
from alpagym_runtime.run_config import RunConfig


@dataclass(frozen=True)
class Role:
    """Processes of one kind.

    Attributes:
        name: trainer | rollout | simulator; its logs are called so.
        first, nodes: which nodes of the job, counted from 0.
        tasks: processes on all of them.

    """

    name: Literal["trainer", "rollout", "simulator"]
    first: int
    nodes: int
    tasks: int

    @property
    def tasks_per_node(self) -> int:
        """The most on one node."""
        return -(-self.tasks // self.nodes)


def roles(config: RunConfig, command: str) -> list[Role]:
    """The roles of a run, the trainer first; those that share a node overlap."""
    topology = config.topology
    # Only training is done by several processes; Cosmos-RL starts its own on each node.
    nodes = topology.train_nodes if command == "train" else 1
    processes = topology.processes if command == "train" and config.trainer.type != "cosmos" else 1
    found = [Role("trainer", 0, nodes, nodes * processes)]
    further = nodes
    if config.has_workers:
        shared = topology.rollout_nodes == 0
        first, wide = (0, nodes) if shared else (further, topology.rollout_nodes)
        # No node without a worker.
        found.append(Role("rollout", first, min(wide, config.rollout.workers), config.rollout.workers))
        further += topology.rollout_nodes
    if starts_alpasim(config):
        shared = topology.alpasim_nodes == 0
        first, wide = (0, nodes) if shared else (further, topology.alpasim_nodes)
        found.append(Role("simulator", first, wide, wide))
    return found


def node_count(found: list[Role]) -> int:
    """Nodes that the job asks for."""
    return max(role.first + role.nodes for role in found)
