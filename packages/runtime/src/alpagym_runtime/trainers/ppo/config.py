"""Options of the PPO trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from alpagym_plugins import Problem, check_range
from alpagym_runtime.trainers.closed_loop_config import ClosedLoopConfig

if TYPE_CHECKING:
    from alpagym_runtime.trainers.ppo.trainer import PpoTrainer


@dataclass
class PpoConfig(ClosedLoopConfig):
    """Proximal policy optimisation in closed loop: a learnt value of each state stands where GRPO has the group.

    Attributes:
        trace_decay: λ of the advantages: 0 trusts the value after one tick, 1 the rewards to the end of the drive.
        value_weight: of the value's loss beside the policy's.
        value_clip: most that a value moves in a step's passes, in units of reward; 0 for no bound.
        value_first: training steps at the stage's start in which only the value learns.
        normalise: advantages of a step get mean 0 and standard deviation 1.

    """

    learning_rate: float = 2e-4
    epochs: int = 2
    minibatch: int = 1024
    trace_decay: float = 0.95
    value_weight: float = 0.5
    value_clip: float = 0.0
    value_first: int = 3
    normalise: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("trace_decay", self.trace_decay, minimum=0, maximum=1)
        check_range("value_weight", self.value_weight, above=0)
        check_range("value_clip", self.value_clip, minimum=0)
        check_range("value_first", self.value_first, minimum=0)

    def preflight(self, config: Any, machine: Any) -> Iterator[Problem]:
        """What its warm start needs, and whether the policy knows values."""
        yield from super().preflight(config, machine)
        if getattr(config.policy.config, "value_head", True) is False:
            yield Problem(
                "policy.value_head", False, "trainer=ppo learns the value of states", "policy.value_head=true"
            )

    def build(self, run: Any) -> PpoTrainer:
        """The trainer of a run."""
        from alpagym_runtime.trainers.ppo.trainer import PpoTrainer

        return PpoTrainer(self)
