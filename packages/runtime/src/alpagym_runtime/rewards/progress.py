"""Progress along the recorded drive."""

from __future__ import annotations

from alpagym_runtime.rewards.base import Float, Term, gain, require
from alpagym_runtime.rewards.config import ProgressConfig
from alpagym_runtime.types import Decision, SimulatorSpec, TickBatch


class Progress(Term):
    """The gain of min(progress / full_at, 1). Sums to its value at the end less that at the handover, so at most 1."""

    def __init__(self, config: ProgressConfig, simulator_spec: SimulatorSpec) -> None:
        self.needs = require(simulator_spec, "progress", "progress")
        self._full_at = config.full_at

    def tick(self, batch: TickBatch, decisions: Decision | None) -> Float:
        """[n], share of 1."""
        return gain(batch, "progress", span=self._full_at)
