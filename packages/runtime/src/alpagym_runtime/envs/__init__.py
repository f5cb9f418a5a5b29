"""Environments: the batch core, Gymnasium environments on it, action types."""
