"""Events: collisions and leaving the road."""

from __future__ import annotations

from alpagym_runtime.rewards.base import Float, Term, edge, gain, require
from alpagym_runtime.types import Decision, SimulatorSpec, TickBatch


class Event(Term):
    """1 for each event that a count gained, on its rising edge; a contact that lasts pays once.

    With `once` the first tick that has any pays 1 and the rest of the drive nothing: the maximum over the drive, which
    is what AlpaSim's aggregate of such a metric is.
    """

    def __init__(self, term: str, measure: str, simulator_spec: SimulatorSpec, once: bool = False) -> None:
        self.needs = require(simulator_spec, term, measure)
        self._measure, self._once = measure, once

    def tick(self, batch: TickBatch, decisions: Decision | None) -> Float:
        """[n], number of new events."""
        # The count, cut off at 1, gains 1 at most.
        return gain(batch, self._measure, span=1.0) if self._once else edge(batch, self._measure)
