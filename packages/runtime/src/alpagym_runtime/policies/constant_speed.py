"""Straight ahead at the present speed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.policies.config import ConstantSpeedConfig
from alpagym_runtime.types import Decision, Observation, Sampling

BRAKE_MPS2 = 3.0


class ConstantSpeed:
    """See `ConstantSpeedConfig`."""

    def __init__(self, config: ConstantSpeedConfig) -> None:
        self.spec = config.spec()
        self._factor = config.speed_factor
        self._times_s = np.arange(1, self.spec.plan_steps + 1) * (self.spec.plan_step_us * 1e-6)

    def act(self, observations: Observation, seeds: NDArray[np.uint64], sampling: Sampling) -> Decision:
        """Plans [N,T,3] along the rig's x axis; nothing is drawn."""
        speed = observations["ego_dynamics_rig"][:, 0].astype(np.float64)[:, None]
        plan = np.zeros((len(speed), len(self._times_s), 3), np.float32)
        if self._factor > 0.0:
            plan[:, :, 0] = self._factor * speed * self._times_s
        else:
            braking_s = np.minimum(self._times_s, np.abs(speed) / BRAKE_MPS2)
            plan[:, :, 0] = speed * braking_s - np.sign(speed) * BRAKE_MPS2 / 2.0 * braking_s * braking_s
        return plan_decision(plan)
