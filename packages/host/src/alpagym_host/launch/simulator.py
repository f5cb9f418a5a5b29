"""What srun starts on the nodes of AlpaSim: `python -m alpagym_host.launch.simulator RUN_DIR`, a process a node.

It brings one AlpaSim up, with AlpaSim's own launcher, publishes where it listens in the run directory, and keeps it
until the job's shell sends SIGUSR2. The launcher sees this node only: it would take all nodes of the job for its own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rich.console import Console

from alpagym_host.launch.supervise import prepare, simulate
from alpagym_host.run_dir import open_existing
from alpagym_plugins import ConfigError
from alpagym_runtime.run_config import load_run_config


def main() -> int:
    """Keep an AlpaSim until a signal; the exit code."""
    if "SLURM_PROCID" not in os.environ or len(sys.argv) != 2:
        raise ConfigError("is started by a Slurm job; to submit one: alpagym submit")
    directory = open_existing(Path(sys.argv[1]))
    config, console = load_run_config(directory), Console()
    here = os.environ["SLURMD_NODENAME"]
    os.environ |= {name: here for name in os.environ if name.startswith("SLURM_") and name.endswith("NODELIST")}
    os.environ |= {name: "1" for name in os.environ if name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")}
    return simulate(config, directory, console, prepare(config, console), int(os.environ["SLURM_PROCID"]))


if __name__ == "__main__":
    from alpagym_host.cli import errors_as_messages

    with errors_as_messages():
        sys.exit(main())
