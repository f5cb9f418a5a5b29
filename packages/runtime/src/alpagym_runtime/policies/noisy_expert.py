"""The expert as a driver, with noise that pushes it off its path, so that imitation sees how to come back."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.random import normal
from alpagym_runtime.types import Decision, Observation, PolicySpec, Sampling

LABEL = "target_plan_rig"


@dataclass(frozen=True)
class Noise:
    """What pushes the expert off its path.

    Attributes:
        acceleration_mps2, curvature_pm: standard deviations.
        correlation: from one tick to the next, AR(1).

    """

    acceleration_mps2: float
    curvature_pm: float
    correlation: float


class NoisyExpert:
    """Drives the expert's plan, bent by noise in acceleration and curvature.

    It observes what the trainee observes and what the trainee's imitation is told besides.
    """

    def __init__(self, trainee: PolicySpec, noise: Noise) -> None:
        carry = {**trainee.carry, "expert_noise": (2,)}
        self.spec = replace(trainee, privileged=(LABEL,), optional=trainee.lesson, carry=carry)
        self.noise = noise
        self._trainee_carry = dict(trainee.carry)

    def act(self, observations: Observation, seeds: NDArray[np.uint64], sampling: Sampling) -> Decision:
        """Plans [N,T,3]; in mean mode the expert's own."""
        carried = observations["carry_expert_noise"].astype(np.float64)
        rho = np.where(np.any(carried != 0.0, axis=1, keepdims=True), self.noise.correlation, 0.0)
        noise = rho * carried + np.sqrt(1.0 - rho * rho) * normal(seeds, 2)
        plan = observations[LABEL].astype(np.float64)
        if sampling.mode == "sample":
            speed = np.abs(observations["ego_dynamics_rig"][:, :1].astype(np.float64))
            # No noise at standstill: a stopped car that jerks teaches nothing.
            size = np.minimum(speed / 3.0, 1.0)
            time_s = np.minimum((np.arange(plan.shape[1]) + 1) * self.spec.plan_step_us * 1e-6, 2.0)
            travelled = speed * time_s
            plan[..., 0] += size * noise[:, :1] * self.noise.acceleration_mps2 * time_s**2 / 2.0
            bend = size * noise[:, 1:] * self.noise.curvature_pm
            plan[..., 1] += bend * travelled**2 / 2.0
            plan[..., 2] += bend * travelled
        decision = plan_decision(plan)
        count = len(seeds)
        decision.carry = {n: np.zeros((count, *shape), np.float32) for n, shape in self._trainee_carry.items()}
        decision.carry["expert_noise"] = noise.astype(np.float32)
        return decision
