"""Control plane of AlpaGym: composes a run, launches it and reports on it; never imports torch."""
