"""Options of Alpamayo's supervised fine-tuning; the presets `alpamayo_sft_stage1|2` hold the published numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alpagym_plugins import ConfigError, Problem, check_range

if TYPE_CHECKING:
    from alpagym_alpamayo_r1.sft_trainer import AlpamayoSftTrainer

POLICIES = ("alpamayo_1", "alpamayo_1_5", "alpamayo_tiny")


@dataclass
class AlpamayoSftConfig:
    """Imitation of recorded drives, streamed from a world with the label target_plan_rig; a step is an optimiser step.

    Stage 1 trains the language model to write trajectory tokens, and reasoning where the components say so. Stage 2
    freezes it and trains the action expert by flow matching.

    Attributes:
        stage: 1 | 2.
        stage1_path: (2) checkpoint whose language model replaces the policy's, whole or not at all; null keeps it.
        cotrain_vlm: (2) train the language model too, by the loss of stage 1.
        stop_grad_from_vlm: (2, with cotrain_vlm) the expert's loss does not reach the language model.
        components_order: parts of the conversation; `image` is left out where the policy has no camera.
        components_prompt: parts that the prompt asks for.
        label_components: parts whose tokens are learned.
        epochs: passes over the training split.
        max_steps: optimiser steps after which it ends; 0: as many as the epochs have.
        per_device_batch: samples of one forward in each process.
        gradient_accumulation_steps: forwards of one optimiser step in each process.
        learning_rate: the peak (AdamW).
        min_learning_rate: at the end of the cosine.
        warmup_steps: to the peak, linearly.
        lr_multiplier: name prefix -> factor of the rate; the longest that fits counts.
        weight_decay: of matrices; biases and norms have none.
        beta1, beta2, epsilon: of AdamW.
        gradient_clip: norm of the gradient.
        bf16: forwards in bfloat16 where weights are float32. Weights in bfloat16 are trained as they are.
        evaluate: measure before and after, as `evaluation` says.

    """

    stage: int = 1
    stage1_path: str | None = None
    cotrain_vlm: bool = False
    stop_grad_from_vlm: bool = True
    components_order: list[str] = field(default_factory=lambda: ["image", "traj_history", "prompt", "traj_future"])
    components_prompt: list[str] = field(default_factory=lambda: ["traj_future"])
    label_components: list[str] = field(default_factory=lambda: ["traj_future"])
    epochs: int = 3
    max_steps: int = 0
    per_device_batch: int = 1
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-4
    min_learning_rate: float = 1e-6
    warmup_steps: int = 100
    lr_multiplier: dict[str, float] = field(default_factory=dict)
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    gradient_clip: float = 1.0
    bf16: bool = True
    evaluate: bool = True

    def __post_init__(self) -> None:
        if self.stage not in (1, 2):
            raise ConfigError(f"must be 1 or 2, got {self.stage}", key="stage")
        for key, needs in (("stage1_path", None), ("cotrain_vlm", False)):
            if self.stage == 1 and getattr(self, key) != needs:
                raise ConfigError("belongs to stage 2", key=key)
        check_range("epochs", self.epochs, minimum=1)
        check_range("max_steps", self.max_steps, minimum=0)
        check_range("per_device_batch", self.per_device_batch, minimum=1)
        check_range("gradient_accumulation_steps", self.gradient_accumulation_steps, minimum=1)
        check_range("learning_rate", self.learning_rate, above=0, maximum=10)
        check_range("min_learning_rate", self.min_learning_rate, minimum=0, maximum=self.learning_rate)
        check_range("warmup_steps", self.warmup_steps, minimum=0)
        for prefix, factor in self.lr_multiplier.items():
            check_range(f"lr_multiplier.{prefix}", factor, minimum=0)
        check_range("weight_decay", self.weight_decay, minimum=0)
        check_range("beta1", self.beta1, minimum=0, below=1)
        check_range("beta2", self.beta2, minimum=0, below=1)
        check_range("epsilon", self.epsilon, above=0)
        check_range("gradient_clip", self.gradient_clip, above=0)
        if self.stage == 2 and "traj_future" not in self.components_order:
            raise ConfigError("lacks traj_future, behind whose start the expert begins", key="components_order")

    def preflight(self, config: Any, machine: Any) -> Iterator[Problem]:
        """Whether policy, dataset and components fit each other, and the weights of stage 1 are there."""
        if config.policy.type not in POLICIES:
            yield Problem(".stage", self.stage, f"trains {', '.join(POLICIES)} only", "policy=alpamayo_1_5")
        if self.stage1_path is not None and not Path(self.stage1_path).expanduser().exists():
            yield Problem(".stage1_path", self.stage1_path, "does not exist", "name a checkpoint-N folder of stage 1")
        if why := reasoning_problem(self.components_order, config.dataset):
            yield Problem(".components_order", self.components_order, *why)

    def build(self, run: Any) -> AlpamayoSftTrainer:
        """The trainer of a run."""
        from alpagym_alpamayo_r1.sft_trainer import AlpamayoSftTrainer

        return AlpamayoSftTrainer(self)


def reasoning_problem(order: list[str], dataset: Any) -> tuple[str, str] | None:
    """What is wrong where reasoning is switched on by half, and the remedy; None where nothing is."""
    if "cot" in order and dataset.reasoning is None:
        return (
            "'cot' is to be learned, and no recorded reasoning is read",
            "dataset.reasoning=reasoning/ood_reasoning.parquet dataset.key_frame=events "
            "dataset.clip_index=clip_index_reasoning_mini.parquet",
        )
    for name in ("meta_action", "route", "question", "answer"):
        if name in order:
            return f"{name!r} has no source: recorded drives come with a plan and reasoning only", "leave it out"
    return None
