"""Options of imitation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alpagym_plugins import ConfigError, Problem, check_choice, check_range

if TYPE_CHECKING:
    from alpagym_runtime.policies.noisy_expert import NoisyExpert
    from alpagym_runtime.trainers.sft.trainer import SftTrainer
    from alpagym_runtime.types import PolicySpec


@dataclass
class SftConfig:
    """Imitation of the world's expert (`target_plan_rig`) on drives that noise pushes off its path, or of a store.

    Attributes:
        store: a store of episodes, or a run directory, to learn from; null drives the expert.
        where: conditions on stored episodes, such as driving_score>=0.8; all must hold.
        best_of_group: of each group's stored episodes, only so many with the highest driving score; 0 takes all.
        target: with a store: plan (imitate what was driven) | expert (the label target_plan_rig).
        drives_per_scene: expert drives of each training scene, each with other noise.
        acceleration_noise_mps2, curvature_noise_pm: of the noise that drives off the expert's path.
        noise_correlation: from one tick to the next.
        epochs: passes over the data; the most, where `patience` is set.
        patience: imitation ends after so many epochs in which the loss on validation drives did not fall, and keeps the
            weights of the best one; 0 makes all epochs and keeps the last weights.
        cool_down: epochs that follow once `patience` has run out, or at the end of `epochs`: the rate, until then at
            its peak, falls to nothing in them, and the last weights are kept; fewer where `epochs` has no room for
            them after a first one; 0: the rate is one cycle over `epochs`.
        validation_scenes: scenes of val in which the expert drives for that; of a store, this share of its scenes is
            held out instead: `validation_share`.
        validation_share: see `validation_scenes`.
        batch: decisions an optimiser step.
        learning_rate: the peak of a one-cycle schedule (AdamW).
        weight_decay: of AdamW.
        gradient_clip: norm of the gradient.

    """

    store: str | None = None
    where: list[str] = field(default_factory=list)
    best_of_group: int = 0
    target: str = "plan"
    drives_per_scene: int = 3
    acceleration_noise_mps2: float = 1.5
    curvature_noise_pm: float = 0.012
    noise_correlation: float = 0.9
    epochs: int = 10
    patience: int = 3
    cool_down: int = 0
    validation_scenes: int = 64
    validation_share: float = 0.1
    batch: int = 256
    learning_rate: float = 2e-3
    weight_decay: float = 1e-4
    gradient_clip: float = 1.0

    def __post_init__(self) -> None:
        check_range("best_of_group", self.best_of_group, minimum=0)
        check_choice("target", self.target, ("plan", "expert"))
        if self.store is None:
            for key in ("where", "best_of_group"):
                if getattr(self, key):
                    raise ConfigError("chooses among stored episodes, and there is no store", key=key)
        check_range("drives_per_scene", self.drives_per_scene, minimum=1)
        check_range("acceleration_noise_mps2", self.acceleration_noise_mps2, minimum=0)
        check_range("curvature_noise_pm", self.curvature_noise_pm, minimum=0)
        check_range("noise_correlation", self.noise_correlation, minimum=0, below=1)
        check_range("epochs", self.epochs, minimum=1)
        check_range("patience", self.patience, minimum=0)
        check_range("cool_down", self.cool_down, minimum=0)
        check_range("validation_scenes", self.validation_scenes, minimum=1)
        check_range("validation_share", self.validation_share, above=0, below=1)
        check_range("batch", self.batch, minimum=1)
        check_range("learning_rate", self.learning_rate, above=0, maximum=10)
        check_range("weight_decay", self.weight_decay, minimum=0)
        check_range("gradient_clip", self.gradient_clip, above=0)

    @property
    def cool_down_epochs(self) -> int:
        """`cool_down`, as far as `epochs` has room for it."""
        return min(self.cool_down, self.epochs - 1)

    def preflight(self, config: Any, machine: Any) -> Iterator[Problem]:
        """Whether the store is there."""
        if self.store is not None and not Path(self.store).is_dir():
            yield Problem(
                ".store", self.store, "there is no such folder", "alpagym rollout, then name its run directory"
            )

    def expert(self, trainee: PolicySpec) -> NoisyExpert:
        """The driver whose drives a policy of this spec imitates."""
        from alpagym_runtime.policies.noisy_expert import Noise, NoisyExpert

        noise = Noise(self.acceleration_noise_mps2, self.curvature_noise_pm, self.noise_correlation)
        return NoisyExpert(trainee, noise)

    def build(self, run: Any) -> SftTrainer:
        """The trainer of a run."""
        from alpagym_runtime.trainers.sft.trainer import SftTrainer

        return SftTrainer(self)
