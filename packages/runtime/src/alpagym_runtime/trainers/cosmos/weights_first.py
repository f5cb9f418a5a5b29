"""Episodes through NCCL wait while weights are sent: two communicators of a pair of GPUs must not be in use at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cosmos_rl.comm.base import CommMixin
from cosmos_rl.dispatcher.command import PolicyToRolloutUnicastCommand

if TYPE_CHECKING:
    from alpagym_runtime.transport.nccl.ends import Receiver


def weights_go_first(receiver: Receiver) -> None:
    """Let a policy worker send weights only while no episode is on its way, and none begin before they are there.

    Args:
        receiver: this worker's end of the transport.

    """
    registry = CommMixin.policy_command_handler_registry
    plain = registry.get_command_handler(PolicyToRolloutUnicastCommand)
    if plain is None:
        raise RuntimeError("this Cosmos-RL sends weights in another way; it is not the release that was checked")

    def send_weights(worker: Any, command: Any) -> Any:
        # It returns once its stream is drained: the weights have left the GPU.
        with receiver.paused():
            return plain(worker, command)

    registry.register(PolicyToRolloutUnicastCommand, send_weights)
