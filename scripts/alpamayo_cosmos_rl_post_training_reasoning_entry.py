#!/usr/bin/env python3
"""The recipe's name for a process of `trainer=cosmos reward=pai_joint`: `cosmos-rl --config recipe.toml alpamayo_cosmos_rl_post_training_reasoning_entry.py`."""

from __future__ import annotations

from alpagym_host.recipe import main

if __name__ == "__main__":
    main("pai_joint")
