"""Cosmos-RL's own launcher, kept to this machine: `-m alpagym_runtime.trainers.cosmos.launcher OPTIONS`."""

from __future__ import annotations

from alpagym_runtime.children import end_with_parent
from alpagym_runtime.trainers.cosmos.place import run_of
from alpagym_runtime.trainers.cosmos.version import require_version


def main() -> None:
    """Start controller and workers, and wait for them."""
    require_version()
    end_with_parent()
    _, directory = run_of()
    from cosmos_rl.launcher.launch_all import main as launch

    from alpagym_runtime.trainers.cosmos.housekeeping import keep_to_this_machine

    keep_to_this_machine(directory)
    launch()


if __name__ == "__main__":
    main()
