"""What every simulator shares: who computes which fields, and small builders of empty batches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.types import Failure

MASKED_FIELDS = {
    "ego_history_rig": "ego_history_mask",
    "route_rig": "route_mask",
    "actors_rig": "actors_mask",
}
"""Observation fields and the mask that comes with each."""


def no_failures(count: int) -> list[Failure | None]:
    """A list for `TickBatch.failure` in which every slot is well."""
    return [None] * count


def rows_of(slots: NDArray[np.int64] | list[int]) -> NDArray[np.int64]:
    """Slot indices as int64 [n]."""
    return np.atleast_1d(np.asarray(slots, np.int64))
