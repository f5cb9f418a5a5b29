"""Options of imitation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from alpagym_plugins import check_range

if TYPE_CHECKING:
    from alpagym_runtime.trainers.sft.trainer import SftTrainer


@dataclass
class SftConfig:
    """Imitation of the world's expert (`target_plan_rig`) on drives that noise pushes off its path.

    Attributes:
        drives_per_scene: expert drives of each training scene, each with other noise.
        acceleration_noise_mps2, curvature_noise_pm: of the noise that drives off the expert's path.
        noise_correlation: from one tick to the next.
        epochs: passes over the data.
        batch: decisions an optimiser step.
        learning_rate: the peak of a one-cycle schedule (AdamW).
        weight_decay: of AdamW.
        gradient_clip: norm of the gradient.

    """

    drives_per_scene: int = 3
    acceleration_noise_mps2: float = 1.5
    curvature_noise_pm: float = 0.012
    noise_correlation: float = 0.9
    epochs: int = 10
    batch: int = 256
    learning_rate: float = 2e-3
    weight_decay: float = 1e-4
    gradient_clip: float = 1.0

    def __post_init__(self) -> None:
        check_range("drives_per_scene", self.drives_per_scene, minimum=1)
        check_range("acceleration_noise_mps2", self.acceleration_noise_mps2, minimum=0)
        check_range("curvature_noise_pm", self.curvature_noise_pm, minimum=0)
        check_range("noise_correlation", self.noise_correlation, minimum=0, below=1)
        check_range("epochs", self.epochs, minimum=1)
        check_range("batch", self.batch, minimum=1)
        check_range("learning_rate", self.learning_rate, above=0, maximum=10)
        check_range("weight_decay", self.weight_decay, minimum=0)
        check_range("gradient_clip", self.gradient_clip, above=0)

    def build(self, run: Any) -> SftTrainer:
        """The trainer of a run."""
        from alpagym_runtime.trainers.sft.trainer import SftTrainer

        return SftTrainer(self)
