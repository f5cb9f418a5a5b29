"""Any measure as a reward term."""

from __future__ import annotations

from alpagym_runtime.rewards.base import Float, Term, gain, require, shaped
from alpagym_runtime.rewards.config import MeasureConfig
from alpagym_runtime.types import Decision, SimulatorSpec, TickBatch


class Measure(Term):
    """A shaped measure, or with `difference` its gain over the last tick. See `MeasureConfig`."""

    def __init__(self, config: MeasureConfig, simulator_spec: SimulatorSpec) -> None:
        self.needs = require(simulator_spec, "measure", config.measure, key="measure")
        self._config = config

    def tick(self, batch: TickBatch, decisions: Decision | None) -> Float:
        """[n], in the measure's unit, or a share where `span` is set."""
        config = self._config
        pays = gain if config.difference else shaped
        return pays(batch, config.measure, config.absolute, config.dead_band, config.span)
