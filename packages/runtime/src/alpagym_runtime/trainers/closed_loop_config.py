"""Options that trainers which learn from their own drives have in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from alpagym_plugins import Problem, check_range
from alpagym_runtime.trainers.sft.config import SftConfig


@dataclass
class ClosedLoopConfig:
    """Drive, then step on the drives, again and again, after a warm start by imitation.

    Attributes:
        updates: training steps; each makes rollout.scenes_per_step × rollout.group_size episodes.
        on_policy: each step drives with the weights that it trains. Else the next steps' episodes are driven by workers
            while a step trains.
        max_lag: versions by which weights that drove may be older than those they train, where not on policy; so many
            steps are driven ahead.
        budget_s: CPU seconds of this process and its workers after which the stage ends, whatever `updates` says; 0 for
            no bound. Where it ends then depends on the machine.
        scene_focus: share of a step's groups that drive scenes whose last group's rewards differed most.
        learning_rate: of Adam; falls linearly to `final_rate_share` of it.
        epochs: passes over a step's decisions.
        minibatch: decisions an optimiser step.
        micro_batch: decisions a forward; 0 is a whole minibatch. Any value gives the same gradient.
        clip_low, clip_high: of the probability ratio.
        gradient_clip: norm of the gradient.
        discount: per decision.
        kl_weight: of the penalty against the policy as the stage began; 0 for none.
        kl_stop: a step's passes end when its KL to the weights that drove exceeds this.
        weight_decay: of AdamW; at 0 it is Adam.
        temperature: of exploration; goes linearly to `final_temperature_share` of it.
        top_p: of exploration, for policies that draw tokens: only the likeliest, until they hold this share.
        warm_start: imitation before the first step; null starts from the weights as they are.

    """

    updates: int = 40
    on_policy: bool = True
    max_lag: int = 1
    budget_s: float = 0.0
    scene_focus: float = 0.0
    learning_rate: float = 5e-4
    final_rate_share: float = 0.1
    epochs: int = 1
    minibatch: int = 512
    micro_batch: int = 0
    clip_low: float = 0.2
    clip_high: float = 0.2
    gradient_clip: float = 1.0
    discount: float = 0.97
    kl_weight: float = 0.0
    kl_stop: float = 0.05
    weight_decay: float = 0.0
    temperature: float = 1.0
    top_p: float = 1.0
    final_temperature_share: float = 1.0
    warm_start: SftConfig | None = field(default_factory=SftConfig)

    def __post_init__(self) -> None:
        check_range("updates", self.updates, minimum=0)
        check_range("max_lag", self.max_lag, minimum=1, maximum=1000)
        check_range("budget_s", self.budget_s, minimum=0)
        check_range("scene_focus", self.scene_focus, minimum=0, maximum=1)
        check_range("learning_rate", self.learning_rate, above=0, maximum=10)
        check_range("final_rate_share", self.final_rate_share, minimum=0, maximum=1)
        check_range("epochs", self.epochs, minimum=1, maximum=1000)
        check_range("minibatch", self.minibatch, minimum=1)
        check_range("micro_batch", self.micro_batch, minimum=0, maximum=self.minibatch)
        check_range("clip_low", self.clip_low, above=0, below=1)
        check_range("clip_high", self.clip_high, above=0, maximum=100)
        check_range("gradient_clip", self.gradient_clip, above=0)
        check_range("discount", self.discount, minimum=0, maximum=1)
        check_range("kl_weight", self.kl_weight, minimum=0)
        check_range("kl_stop", self.kl_stop, above=0)
        check_range("weight_decay", self.weight_decay, minimum=0)
        check_range("temperature", self.temperature, above=0, maximum=100)
        check_range("top_p", self.top_p, above=0, maximum=1)
        check_range("final_temperature_share", self.final_temperature_share, above=0, maximum=100)

    def preflight(self, config: Any, machine: Any) -> Iterator[Problem]:
        """What its warm start needs, and who drives while it trains."""
        if not self.on_policy and not config.has_workers:
            why = "episodes are driven while a step trains, and nobody but the trainer's process drives in this run"
            yield Problem(".on_policy", False, why, "rollout.workers=2, or trainer.on_policy=true")
        if self.warm_start is not None:
            for problem in self.warm_start.preflight(config, machine):
                yield problem.under(".warm_start")
