"""What a vision-language-action model costs those around it: see `FakeVlaConfig`."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.policies.config import FakeVlaConfig
from alpagym_runtime.types import Decision, Observation, Sampling


class FakeVla:
    """Looks at one pixel of each picture, waits, and plans straight ahead at the present speed."""

    def __init__(self, config: FakeVlaConfig) -> None:
        self.spec = config.spec()
        self._delay_s = config.delay_ms * 1e-3
        self._times_s = np.arange(1, self.spec.plan_steps + 1) * (self.spec.plan_step_us * 1e-6)

    def act(self, observations: Observation, seeds: NDArray[np.uint64], sampling: Sampling) -> Decision:
        """Plans [N,T,3] along the rig's x axis; `trace` holds the mean brightness [N] of the pixels it looked at."""
        if self._delay_s:
            time.sleep(self._delay_s)
        speed = observations["ego_dynamics_rig"][:, 0].astype(np.float64)[:, None]
        plan = np.zeros((len(speed), len(self._times_s), 3), np.float32)
        plan[:, :, 0] = speed * self._times_s
        decision = plan_decision(plan)
        seen = [observations[f"camera_{name}"][:, -1, 0, 0].mean(axis=-1) for name in self.spec.cameras]
        if seen:
            decision.trace = {"brightness": np.stack(seen, axis=-1).astype(np.float32)}
        return decision
