"""The report of a run, or of two side by side: one HTML page that needs nothing else."""
