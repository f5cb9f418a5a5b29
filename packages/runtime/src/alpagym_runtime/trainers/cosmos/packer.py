"""Our data packer: drives leave a rollout worker and arrive at a policy worker here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cosmos_rl.dispatcher.data.packer.base import BaseDataPacker

from alpagym_runtime.trainers.cosmos.groups import Driven
from alpagym_runtime.trainers.cosmos.parcels import receive, send
from alpagym_runtime.transport.nccl.ends import Receiver
from alpagym_runtime.types import Transport


class Packer(BaseDataPacker):
    """See the module's text.

    Args:
        transport: of this process; a policy worker receives, a rollout worker sends, a colocated one does both.

    Attributes:
        transport: the same.

    """

    def __init__(self, transport: Transport) -> None:
        super().__init__()
        self.transport = transport

    def get_rollout_input(self, item: Any) -> Any:
        """A prompt is its number; nothing is to be prepared."""
        return item

    def get_rollout_output(
        self,
        completions: list[Driven],
        completed_conversations: list[Any],
        logprobs: list[Any],
        token_ids: list[Any],
        **kwargs: Any,
    ) -> Any:
        """Send the drives of a group, after rewards and filters; texts stand for them from here on."""
        texts = [send(driven, self.transport) for driven in completions]
        return texts, completed_conversations, logprobs, token_ids, kwargs

    def get_policy_input(self, sample: Any, rollout_output: Any, n_ignore_prefix_tokens: int = 0) -> Driven:
        """The drive behind a text; its room is free again, what is read stays readable."""
        driven, handle = receive(rollout_output, self.transport)
        self.transport.discard(handle)
        if isinstance(self.transport, Receiver):
            # The controller drops drives that are too old, and tells nobody.
            self.transport.discard_older(handle)
        return driven

    def policy_compute_max_len(self, processed_samples: Sequence[Driven]) -> int:
        """Nothing is padded."""
        return max(len(driven.episode) for driven in processed_samples)

    def policy_collate_fn(self, processed_samples: list[Driven], computed_max_len: int) -> Any:
        """Drives stay apart; the trainer lays their decisions end to end."""
        return processed_samples


def reward(to_be_evaluated: Any, reference: Any, **_: Any) -> tuple[float, dict[str, float]]:
    """The drive's own reward, and its terms for Cosmos-RL's log."""
    if not isinstance(to_be_evaluated, Driven):
        raise TypeError(f"expected a drive, got {type(to_be_evaluated).__name__}; is train.non_text true?")
    return to_be_evaluated.reward, to_be_evaluated.numbers
