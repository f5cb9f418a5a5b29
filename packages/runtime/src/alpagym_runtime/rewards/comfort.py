"""Comfort: limits of acceleration, jerk and yaw rate."""

from __future__ import annotations

import numpy as np

from alpagym_runtime.rewards.base import Float, Term, require, sample
from alpagym_runtime.rewards.config import ComfortConfig
from alpagym_runtime.types import Decision, SimulatorSpec, TickBatch


class Comfort(Term):
    """1 for a tick that exceeds any limit. An undefined measure exceeds nothing; the others of its tick still count."""

    def __init__(self, config: ComfortConfig, simulator_spec: SimulatorSpec) -> None:
        self._limits = {  # lowest and highest value
            "acceleration_mps2": (-config.deceleration_mps2, config.acceleration_mps2),
            "lateral_acceleration_mps2": (-config.lateral_acceleration_mps2, config.lateral_acceleration_mps2),
            "jerk_mps3": (-config.jerk_mps3, config.jerk_mps3),
            "yaw_rate_radps": (-config.yaw_rate_radps, config.yaw_rate_radps),
        }
        self.needs = require(simulator_spec, "comfort", *self._limits)

    def tick(self, batch: TickBatch, decisions: Decision | None) -> Float:
        """[n], 0 or 1."""
        exceeded = np.zeros(len(batch), bool)
        for name, (lowest, highest) in self._limits.items():
            value, valid = sample(batch, batch.measures, name)
            exceeded |= valid & ((value < lowest) | (value > highest))
        return exceeded.astype(np.float64)
