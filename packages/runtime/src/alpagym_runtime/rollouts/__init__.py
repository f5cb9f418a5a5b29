"""Making episodes: the collector and evaluation."""
