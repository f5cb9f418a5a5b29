"""GRPO: configuration, advantages, loss, the loop."""
