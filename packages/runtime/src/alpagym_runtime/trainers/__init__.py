"""Training: imitation (sft), group-relative policy optimisation (grpo), checkpoints, the run itself."""
