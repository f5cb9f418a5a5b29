"""A run's job: its number, and what Slurm says of it.

`job.json` in the run directory holds the number. Slurm is asked with squeue, and with sacct, where there is accounting,
once the queue has forgotten a job.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from alpagym_plugins import ConfigError
from alpagym_runtime.errors import CorruptFileError
from alpagym_runtime.files import read_json, write_atomic
from alpagym_runtime.machine import Answer, Machine

FILE = "job.json"
WAITS = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
WORKS = frozenset(
    {"CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT", "COMPLETING"}
)
_FORMAT = "%i|%T|%r|%N|%M|%l|%S"


@dataclass(frozen=True)
class Job:
    """What Slurm says of a job.

    Attributes:
        id: number, of an array with its index: 12_3.
        state: Slurm's word, such as PENDING; "" where nobody remembers it.
        reason: why it waits, or why it ended.
        nodes: where it runs.
        elapsed, limit, start: as squeue prints them.

    """

    id: str
    state: str = ""
    reason: str = ""
    nodes: str = ""
    elapsed: str = ""
    limit: str = ""
    start: str = ""

    @property
    def waits(self) -> bool:
        """Whether it is in the queue and does not run."""
        return self.state in WAITS

    @property
    def active(self) -> bool:
        """Whether it waits or runs."""
        return self.waits or self.state in WORKS


def write(directory: Path, job: str) -> None:
    """Note a run's job."""
    write_atomic(directory / FILE, (json.dumps({"job": job}) + "\n").encode())


def read(directory: Path) -> str | None:
    """The number of a run's newest job; None for a run without."""
    try:
        found = read_json(directory / FILE)
        return str(found["job"])
    except (OSError, CorruptFileError, KeyError, TypeError):
        return None


def own_number() -> str:
    """The number of the job that this process is in."""
    array, index = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array and index else os.environ["SLURM_JOB_ID"]


def ask(numbers: Iterable[str], machine: Machine | None = None) -> dict[str, Job]:
    """What Slurm says of jobs, by number.

    Raises:
        ConfigError: it does not answer.

    """
    wanted, machine = set(numbers), machine or Machine()
    if not wanted:
        return {}
    answer = machine.ask("squeue", "--noheader", "--me", "--array", "--states=all", f"--format={_FORMAT}")
    if not answer.ok:
        raise ConfigError(f"Slurm does not answer: {answer.first_line}")
    found = {number: Job(number) for number in wanted}
    for line in answer.text.splitlines():
        cells = line.strip().split("|")
        if len(cells) == 7 and cells[0] in wanted:
            found[cells[0]] = Job(*cells)
    lost = sorted(number for number, job in found.items() if not job.state)
    if lost:
        # Without accounting it fails, and nobody remembers them.
        fields = "--format=JobID,State"
        told = machine.ask("sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={','.join(lost)}", fields)
        for line in told.text.splitlines() if told.ok else ():
            number, _, state = line.strip().partition("|")
            if number in found:
                found[number] = Job(number, *state.split(" ", 1))  # "CANCELLED by 1000"
    return found


def of(directory: Path) -> Job | None:
    """What Slurm says of a run's job; None for a run without one.

    Raises:
        ConfigError: it does not answer.

    """
    number = read(directory)
    return None if number is None else ask([number])[number]


def cancel(job: str, *options: str) -> Answer:
    """Call scancel."""
    return Machine(timeout_s=30.0).ask("scancel", *options, job)


def submit(script: Path, folder: Path, output: str, argument: str, options: list[str]) -> str:
    """Call sbatch; the job's number.

    Variables that sbatch would read as options (`SBATCH_PARTITION`, …) are kept from it: what the config says holds.

    Raises:
        ConfigError: sbatch refuses, is absent or does not answer.

    """
    kept = ("SLURM_CONF", "SLURM_CONF_SERVER")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("SBATCH_", "SLURM_")) or name in kept
    }
    argv = ["sbatch", "--parsable", f"--chdir={folder}", f"--output={output}", *options, str(script), argument]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", env=environment, timeout=120.0, check=False
        )
    except FileNotFoundError as err:
        raise ConfigError("sbatch is not on PATH; start it on a login node of the cluster") from err
    except subprocess.TimeoutExpired as err:
        raise SubmissionUnknownError(
            "sbatch did not answer within 120 s, and may have submitted the job all the same: squeue --me"
        ) from err
    number = done.stdout.strip().splitlines()[-1].partition(";")[0] if done.stdout.strip() else ""
    if done.returncode or not number.isdigit():
        said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise ConfigError(f"sbatch refuses the job: {said}")
    return number


class SubmissionUnknownError(ConfigError):
    """Whether a job was submitted is not known."""
