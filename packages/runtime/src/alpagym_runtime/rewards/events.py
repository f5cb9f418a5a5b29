"""Events: collisions and leaving the road."""

from __future__ import annotations

from alpagym_runtime.rewards.base import Float, Term, edge, require
from alpagym_runtime.types import Decision, SimulatorSpec, TickBatch


class Event(Term):
    """1 for each event that a count gained, on its rising edge; a contact that lasts pays once."""

    def __init__(self, term: str, measure: str, simulator_spec: SimulatorSpec) -> None:
        self.needs = require(simulator_spec, term, measure)
        self._measure = measure

    def tick(self, batch: TickBatch, decisions: Decision | None) -> Float:
        """[n], number of new events."""
        return edge(batch, self._measure)
