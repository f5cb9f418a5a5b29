"""Episodes through NCCL wait while weights are sent: two communicators of a pair of GPUs must not be in use at once.

A rollout says that it is ready to receive weights, by a file in the run directory: it hands over no episodes meanwhile.
Only then the policy holds episodes back. The other way round it would wait for a rollout that waits for room to send.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cosmos_rl.comm.base import CommMixin
from cosmos_rl.dispatcher.command import PolicyToRolloutUnicastCommand

from alpagym_runtime.trainers.cosmos.digests import WeightsError
from alpagym_runtime.trainers.cosmos.tables import FOLDER

if TYPE_CHECKING:
    from alpagym_runtime.transport.nccl.ends import Receiver

_POLL_S = 0.002


def hold_episodes_while_sending(receiver: Receiver, directory: Path) -> None:
    """Let this policy worker send weights only while no episode is on its way, and none begin before they are there.

    Args:
        receiver: this worker's end of the transport.
        directory: the run's.

    """
    import cosmos_rl.policy.worker.rl_worker  # noqa: F401 - it registers its handlers

    registry = CommMixin.policy_command_handler_registry
    plain = _handler(registry.get_command_handler(PolicyToRolloutUnicastCommand))

    def send_weights(worker: Any, command: Any) -> Any:
        path = _ready(directory, command)
        while not path.exists():
            if time.time() > command.ready_deadline:
                raise WeightsError(
                    f"the rollout was not ready for the weights of step {command.weight_step}: no {path}"
                )
            time.sleep(_POLL_S)
        # It returns once its stream is drained: the weights have left the GPU.
        with receiver.paused():
            result = plain(worker, command)
        path.unlink(missing_ok=True)
        return result

    registry.register(PolicyToRolloutUnicastCommand, send_weights)


def tell_when_ready(directory: Path) -> None:
    """Let this rollout worker say when it is ready to receive weights.

    Args:
        directory: the run's.

    """
    import cosmos_rl.rollout.worker.rollout_control  # noqa: F401 - it registers its handlers

    registry = CommMixin.rollout_command_handler_registry
    plain = _handler(registry.get_command_handler(PolicyToRolloutUnicastCommand, "vllm"))

    def receive_weights(worker: Any, command: Any) -> Any:
        if command.dst_replica_name == worker.replica_name:
            path = _ready(directory, command)
            path.parent.mkdir(exist_ok=True)
            path.touch()
        return plain(worker, command)

    # Cosmos-RL's name for all workers that are not TensorRT's.
    registry.register(PolicyToRolloutUnicastCommand, receive_weights, "vllm")


def _handler(found: Callable[..., Any] | None) -> Callable[..., Any]:
    if found is None:
        raise RuntimeError("this Cosmos-RL sends weights in another way; it is not the release that was checked")
    return found


def _ready(directory: Path, command: Any) -> Path:
    return directory / FOLDER / "ready" / str(command.uuid_value)
