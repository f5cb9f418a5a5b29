"""Alpamayo 1 and 1.5: trajectory tokenizers, prompts, models and checkpoints."""
