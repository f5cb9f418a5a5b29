"""Ways to start a composed run."""
