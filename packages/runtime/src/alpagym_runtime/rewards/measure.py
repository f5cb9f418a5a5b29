"""Any measure as a reward term."""

from __future__ import annotations

import numpy as np

from alpagym_runtime.rewards.base import Float, Term, require, sample
from alpagym_runtime.rewards.config import MeasureConfig
from alpagym_runtime.types import Decision, SimulatorSpec, TickBatch


class Measure(Term):
    """A shaped measure, or with `difference` its gain over the last tick. See `MeasureConfig`."""

    def __init__(self, config: MeasureConfig, simulator_spec: SimulatorSpec) -> None:
        self.needs = require(simulator_spec, "measure", config.measure, key="measure")
        self._config = config

    def tick(self, batch: TickBatch, decisions: Decision | None) -> Float:
        """[n], in the measure's unit, or a share where `span` is set."""
        now, now_valid = sample(batch, batch.measures, self._config.measure)
        if not self._config.difference:
            return np.where(now_valid, self._shape(now), 0.0)
        before, before_valid = sample(batch, batch.measures_previous, self._config.measure)
        return np.where(now_valid & before_valid, self._shape(now) - self._shape(before), 0.0)

    def _shape(self, value: Float) -> Float:
        config = self._config
        if config.absolute:
            value = np.abs(value)
        if config.dead_band > 0.0:
            value = np.maximum(value - config.dead_band, 0.0)
        if config.span > 0.0:
            value = np.minimum(np.maximum(value / config.span, 0.0), 1.0)
        return value
