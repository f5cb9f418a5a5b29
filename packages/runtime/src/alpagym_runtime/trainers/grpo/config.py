"""Options of the GRPO trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from alpagym_plugins import check_choice, check_range
from alpagym_runtime.trainers.closed_loop_config import ClosedLoopConfig

if TYPE_CHECKING:
    from alpagym_runtime.trainers.grpo.trainer import GrpoTrainer


@dataclass
class GrpoConfig(ClosedLoopConfig):
    """Group-relative policy optimisation in closed loop, after a warm start by imitation.

    Attributes:
        credit: tick (return-to-go less the group's mean at that tick) | episode (one advantage an episode).
        spread_floor: added to the standard deviation of credit by tick, in units of reward.
        least_advantage: decisions below it in size are left out before the backward pass.

    """

    credit: str = "tick"
    spread_floor: float = 0.05
    least_advantage: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("credit", self.credit, ("tick", "episode"))
        check_range("spread_floor", self.spread_floor, minimum=0)
        check_range("least_advantage", self.least_advantage, minimum=0)

    def build(self, run: Any) -> GrpoTrainer:
        """The trainer of a run."""
        from alpagym_runtime.trainers.grpo.trainer import GrpoTrainer

        return GrpoTrainer(self)
