"""How a drive gets from a rollout worker to a policy worker: by our transport; Cosmos-RL carries a short text.

The text is JSON: the transport's handle, and the advantages of the drive's decisions (4 bytes each), which are known
where its whole group is.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

from alpagym_runtime.trainers.cosmos.groups import Driven
from alpagym_runtime.types import Transport


def send(driven: Driven, transport: Transport) -> str:
    """Hand a drive over; the text that stands for it."""
    advantages = base64.b64encode(np.ascontiguousarray(driven.advantage_T, np.dtype("<f4")).tobytes()).decode()
    return json.dumps({"episode": transport.send(driven.episode), "advantage_T": advantages})


def receive(text: Any, transport: Transport) -> tuple[Driven, str]:
    """The drive behind a text, and its handle, to be discarded when it was used.

    Raises:
        ValueError: not a text of ours.
        KeyError: the drive was released meanwhile; see `Transport.receive`.

    """
    try:
        data = json.loads(text)
        handle, packed = str(data["episode"]), base64.b64decode(data["advantage_T"], validate=True)
    except (TypeError, KeyError, ValueError) as err:
        raise ValueError(f"expected a drive that was sent by a rollout worker, got {text!r:.200}: {err}") from err
    advantage_T = np.frombuffer(packed, np.dtype("<f4")).astype(np.float32)
    episode = transport.receive(handle)
    if len(advantage_T) not in (0, len(episode)):
        raise ValueError(f"{len(advantage_T)} advantages came with a drive of {len(episode)} decisions ({handle})")
    return Driven(episode, advantage_T), handle
