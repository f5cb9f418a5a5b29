"""Slots as they are when an episode begins, kept: one that begins where another did costs a copy, not a drive."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded import state, world
from alpagym_runtime.simulators.embedded.scene_bank import Bank

Key = tuple[int, int, int]
"""Row of the scene in its bank, grid indices of the start and of the handover: all that a beginning depends on."""


class Begun:
    """Keeps up to `capacity` beginnings, the least recently used go first.

    Args:
        capacity: at least as many as episodes that begin at once.
        vehicle: as in `make_slots`.
        quirks: as in `make_slots`.
        reactive: whether traffic reacts.

    """

    def __init__(self, capacity: int, vehicle: str, quirks: bool, reactive: bool) -> None:
        self.slots = state.make_slots(capacity, 32, 1, vehicle, quirks, actors=40)
        self.slots.reactive[:] = reactive
        self._place: dict[Key, int] = {}
        self._capacity = capacity

    def forget(self) -> None:
        """Scenes have other rows in the bank now."""
        self._place.clear()

    def places(self, bank: Bank, keys: list[Key], actors: int) -> NDArray[np.int64]:
        """Indices [n] in `slots` of n beginnings, with at most so many actors; those that are not kept are driven."""
        fresh = []
        for key in keys:
            place = self._place.pop(key, None)
            if place is None:
                place = len(self._place)
                if len(self._place) == self._capacity:
                    place = self._place.pop(next(iter(self._place)))
                fresh.append(key)
            # Back in as the most recently used.
            self._place[key] = place
        places = np.array([self._place[key] for key in keys], np.int64)
        if fresh:
            scenes, starts, handovers = np.array(fresh, np.int64).T.copy()
            self.slots = state.with_room(self.slots, int(handovers.max()) + 1, actors)
            world.begin(bank, self.slots, np.array([self._place[k] for k in fresh]), scenes, handovers, starts)
        return places
