"""The world's expert as a policy, to say what a scene allows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.policies.config import ExpertConfig
from alpagym_runtime.types import Decision, Observation, Sampling


class Expert:
    """Plans the label target_plan_rig."""

    def __init__(self, config: ExpertConfig) -> None:
        self.spec = config.spec()

    def act(self, observations: Observation, seeds: NDArray[np.uint64], sampling: Sampling) -> Decision:
        """Plans [N,T,3], given beside the observations."""
        return plan_decision(observations["target_plan_rig"])
