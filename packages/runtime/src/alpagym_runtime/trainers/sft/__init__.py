"""Imitation: configuration, expert data, the loop."""
