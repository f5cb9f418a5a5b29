"""The recorded drive as a plan."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.policies.config import LogReplayConfig
from alpagym_runtime.types import Decision, Observation, Sampling


class LogReplay:
    """Plans the recording; beyond its end it goes straight on at the last speed, so that nobody brakes for the end."""

    def __init__(self, config: LogReplayConfig) -> None:
        self.spec = config.spec()

    def act(self, observations: Observation, seeds: NDArray[np.uint64], sampling: Sampling) -> Decision:
        """Plans [N,T,3] from the label recorded_plan_rig [N,T,3] and its mask [N,T], given beside the observations."""
        plan, mask = observations["recorded_plan_rig"], observations["recorded_plan_rig_mask"]
        count, steps = mask.shape
        # The present pose is the point before the first one, so that one recorded pose suffices.
        points = np.concatenate([np.zeros((count, 1, 3), np.float32), plan], axis=1)
        known = mask.sum(axis=1)
        rows = np.arange(count)
        end, before = points[rows, known], points[rows, np.maximum(known - 1, 0)]
        travelled = np.where(known > 0, np.hypot(*(end - before)[:, :2].T), 0.0)
        speed = observations["ego_dynamics_rig"][:, 0] * self.spec.plan_step_us * 1e-6
        step = np.where(known > 0, travelled, speed)[:, None]
        beyond = np.maximum(np.arange(1, steps + 1)[None] - known[:, None], 0)
        ahead = np.stack([np.cos(end[:, 2]), np.sin(end[:, 2]), np.zeros(count)], axis=-1)
        straight = end[:, None] + (step * beyond)[..., None] * ahead[:, None]
        return plan_decision(np.where(mask[..., None], plan, straight))
