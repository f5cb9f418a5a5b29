"""A planner that takes time: the controller follows plans that are a while old, as in AlpaSim."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]


class PlanDelay:
    """Keeps each slot's last plans, and gives the newest one that is at least `ticks` control periods old.

    Early in an episode no plan is that old: then the oldest is given. Answers of the warm-up count as plans.
    """

    def __init__(self, slots: int, ticks: int, plan_steps: int) -> None:
        self._plans = np.zeros((slots, ticks + 1, plan_steps, 3))
        self._poses = np.zeros((slots, ticks + 1, 3))
        self._steps = np.zeros((slots, ticks + 1), np.int64)
        self._count = np.zeros(slots, np.int64)

    def forget(self, slots: NDArray[np.int64]) -> None:
        """Episodes begin in these slots."""
        self._count[slots] = 0

    def exchange(
        self, slots: NDArray[np.int64], plan_rig: Float, pose_local: Float, step: NDArray[np.int64]
    ) -> tuple[Float, Float, NDArray[np.int64]]:
        """Take this tick's plans, give those to follow.

        Args:
            slots: [n].
            plan_rig: [n,T,3] in the rig frames of `pose_local`.
            pose_local: [n,3] x, y, yaw at which they were made.
            step: [n] grid index at which they were made.

        Returns:
            plan [n,T,3], the pose [n,3] at which it was made, and its age [n] in grid steps.

        """
        for store, new in ((self._plans, plan_rig), (self._poses, pose_local), (self._steps, step)):
            store[slots, 1:] = store[slots, :-1]
            store[slots, 0] = new
        self._count[slots] = np.minimum(self._count[slots] + 1, self._plans.shape[1])
        oldest = self._count[slots] - 1
        return self._plans[slots, oldest], self._poses[slots, oldest], step - self._steps[slots, oldest]
