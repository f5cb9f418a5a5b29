"""What srun starts on the nodes of the trainer: `python -m alpagym_host.launch.job RUN_DIR`, a process a task.

It begins the run, or goes on with it: after a requeue the same command is called again. Several tasks are a team
(`trainers.team`) that srun has started in torchrun's place, so each gets the signals of the job by itself.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from rich.console import Console

from alpagym_host.alpasim import starts_alpasim
from alpagym_host.errors import RunFailedError
from alpagym_host.launch.local import launch
from alpagym_host.launch.torchrun import end_process, train_in_team
from alpagym_host.preflight import require
from alpagym_host.run_dir import Command, command_of, open_existing
from alpagym_host.slurm import jobs
from alpagym_host.slurm.roles import roles
from alpagym_plugins import ConfigError
from alpagym_runtime.endpoints import Registry
from alpagym_runtime.files import read_json
from alpagym_runtime.run_config import RunConfig, load_run_config


def main() -> int:
    """Work until the end or a signal; the exit code."""
    if "SLURM_PROCID" not in os.environ or len(sys.argv) != 2:
        raise ConfigError("is started by a Slurm job; to submit one: alpagym submit")
    rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_STEP_NUM_TASKS"])
    directory = open_existing(Path(sys.argv[1]))
    if rank == 0:
        # Also where somebody called sbatch by hand, or who submitted it did not live to write it down.
        jobs.write(directory, jobs.own_number())
    config, command = load_run_config(directory), command_of(directory)
    summary = directory / "summary.json"
    if summary.is_file() and read_json(summary).get("status") == "completed":
        if rank == 0:
            print(f"already completed; results: {summary}")
        return 0
    console = Console()
    require(config, command, width=console.width, in_job=True)
    if starts_alpasim(config):
        _wait_for_alpasim(config, directory, command)
    if size == 1:
        return launch(config, directory, command, console)
    if config.trainer.type == "cosmos":
        return _train_with_cosmos(config, directory, rank, console)
    os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
    from alpagym_runtime.trainers.team import Team

    start = f"{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    return train_in_team(config, directory, Team.meet(config.learner.device, directory, f"team-{start}", rank, size))


def _train_with_cosmos(config: RunConfig, directory: Path, rank: int, console: Console) -> int:
    """The run itself on the first node; on each other one, Cosmos-RL's launcher for its GPUs."""
    from alpagym_runtime.trainers.cosmos import nodes

    if rank == 0:
        try:
            return launch(config, directory, "train", console)
        finally:
            nodes.call(directory, nodes.Call(nodes.job_start(), 0, nodes.OVER))
    # The first node asks the job to stop. It also hears of a preemption, and says when it is over.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN not passed on to what is started
    return nodes.take_part(config, directory, rank)


def _wait_for_alpasim(config: RunConfig, directory: Path, command: Command) -> None:
    """Wait until the nodes of AlpaSim have published all of theirs.

    Raises:
        RunFailedError: they have not within alpasim.startup_timeout_s.

    """
    wanted = next(role.tasks for role in roles(config, command) if role.name == "simulator")
    limit_s = config.alpasim.startup_timeout_s
    found = Registry(directory).wait("alpasim", limit_s, wanted)
    if len(found) < wanted:
        raise RunFailedError(
            f"{len(found)} of {wanted} AlpaSims are ready after {limit_s:g} s (alpasim.startup_timeout_s); "
            f"see {directory / 'logs'}/alpasim-*.log"
        )


if __name__ == "__main__":
    end_process(main)
