#!/usr/bin/env python3
"""The recipe's entry script for Cosmos-RL's launcher: a process of `trainer=cosmos reward=pai_joint`."""

from __future__ import annotations

from alpagym_host.recipe import main

if __name__ == "__main__":
    main("pai_joint")
