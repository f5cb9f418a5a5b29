"""What a run tells while it works: progress, metrics, time spent."""
