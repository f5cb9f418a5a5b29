"""Where an episode's pictures are put together: in memory that the transport sends from without a copy, if it has any.

When a drive ends its pictures are copied out of the slots once, wherever to; this says where to.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.types import Transport

Allocate = Callable[[int], NDArray[np.uint8]]
"""Memory for so many bytes."""


def plain_memory(count: int) -> NDArray[np.uint8]:
    """As numpy has it."""
    return np.empty(count, np.uint8)


def picture_memory(transport: Transport) -> Allocate:
    """That of a sending end, if it has a method `allocate`."""
    found: Allocate = getattr(transport, "allocate", plain_memory)
    return found
