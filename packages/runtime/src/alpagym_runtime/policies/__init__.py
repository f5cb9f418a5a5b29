"""Baseline policies, which need no weights, and the checks that every policy's output goes through."""
