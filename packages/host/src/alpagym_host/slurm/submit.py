"""From a composed config to a job in the queue: a run directory, the script in it, sbatch, and the job's number.

A sweep is one array: run directories of one name with the index behind it, and one script, which is why all runs of a
sweep ask Slurm for the same.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from alpagym_host import run_dir
from alpagym_host.run_dir import Command
from alpagym_host.slurm import jobs
from alpagym_host.slurm.script import render
from alpagym_plugins import ConfigError
from alpagym_runtime.files import write_atomic
from alpagym_runtime.run_config import RunConfig

SCRIPT = "job.sbatch"


def script_of(config: RunConfig, command: Command) -> str:
    """The job's script."""
    return render(config, command, sys.executable)


def dependency(after: Sequence[str]) -> list[str]:
    """The option of sbatch for jobs that must end well before: numbers, or the directories of their runs.

    Raises:
        ConfigError: it is neither.

    """
    numbers = []
    for text in after:
        number = text if re.fullmatch(r"[0-9]+(_[0-9]+)?", text) else jobs.read(Path(text).expanduser())
        if number is None:
            raise ConfigError(
                f"{text!r} is neither a job's number nor the directory of a run with a job", key="--after"
            )
        numbers.append(number)
    return [f"--dependency=afterok:{':'.join(numbers)}", "--kill-on-invalid-dep=yes"] if numbers else []


def submit(
    config: RunConfig, command: Command, directory: Path | None, console: Console, options: Sequence[str] = ()
) -> int:
    """Make a run directory and queue its job; 0.

    Args:
        config: the run, checked.
        command: what it is for.
        directory: the run directory itself; None makes a name.
        console: for the job's number and what to do next.
        options: further ones of sbatch.

    Raises:
        ConfigError: sbatch refuses; nothing is left behind.

    """
    made = run_dir.create(config, command, directory)
    _submit_or_discard([made], config, command, console, options)
    return 0


def submit_again(
    config: RunConfig, command: Command, directory: Path, console: Console, options: Sequence[str] = ()
) -> int:
    """Queue another job for a run that goes on; 0.

    Raises:
        ConfigError: its job still waits or runs, or sbatch refuses.

    """
    job = jobs.of(directory)
    if job is not None and job.active:
        raise ConfigError(
            f"job {job.id} has this run already, and is {job.state}: alpagym status {directory}, and to end it: "
            f"alpagym stop {directory}"
        )
    number = _call([directory], config, command, options)
    jobs.write(directory, number)
    _tell(console, number, [directory])
    return 0


def submit_sweep(
    configs: Sequence[RunConfig],
    labels: Sequence[str],
    command: Command,
    console: Console,
    options: Sequence[str] = (),
) -> int:
    """Queue an array, a run directory for each task; 0.

    Raises:
        ConfigError: the runs ask Slurm for different things, or sbatch refuses; nothing is left behind.

    """
    scripts = [script_of(config, command) for config in configs]
    for label, config, script in zip(labels, configs, scripts, strict=True):
        if script != scripts[0] or (config.run.root, config.run.name) != (configs[0].run.root, configs[0].run.name):
            other = next(
                (
                    line[1:]
                    for line in difflib.ndiff(scripts[0].splitlines(), script.splitlines())
                    if line.startswith("+")
                ),
                " run.root or run.name",
            )
            raise ConfigError(
                f"{label}: a sweep is one job array, and its runs share a script, name and root; this one differs:"
                f"{other}; submit it by itself"
            )
    made = run_dir.create_several(configs, command)
    limit = configs[0].deploy.slurm.parallel
    array = [f"--array=0-{len(made) - 1}" + (f"%{limit}" if limit else "")] if len(made) > 1 else []
    _submit_or_discard(made, configs[0], command, console, [*options, *array])
    return 0


def _submit_or_discard(
    made: Sequence[Path], config: RunConfig, command: Command, console: Console, options: Sequence[str]
) -> None:
    try:
        number = _call(made, config, command, options)
    except jobs.SubmissionUnknownError as err:
        raise ConfigError(f"{err.message}; its run directory: {made[0]}") from err
    except Exception:
        for directory in made:
            run_dir.discard(directory)
        raise
    for index, directory in enumerate(made):
        jobs.write(directory, number if len(made) == 1 else f"{number}_{index}")
    _tell(console, number, made)


def _call(made: Sequence[Path], config: RunConfig, command: Command, options: Sequence[str]) -> str:
    """Write the script and call sbatch; the job's number."""
    script = script_of(config, command).encode()
    for directory in made:
        # sbatch would read a backslash as "take % as it stands", and no line of a log can hold a line break.
        if "\\" in str(directory) or not str(directory).isprintable():
            raise ConfigError(f"{str(directory)!r} has a character that Slurm's file names cannot; set run.root")
        write_atomic(directory / SCRIPT, script)
        (directory / "logs").mkdir(exist_ok=True)
    # The index takes the place of the first one's, in the file's name as in the argument.
    last = "" if len(made) == 1 else "0"
    path, array = str(made[0]).removesuffix(last), "%a" if last else ""
    output = f"{path.replace('%', '%%')}{array}/logs/job.log"
    return jobs.submit(made[0] / SCRIPT, made[0], output, path, list(options))


def _tell(console: Console, number: str, made: Sequence[Path]) -> None:
    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    first = made[0]
    if len(made) == 1:
        say(f"run directory: {first}\nsubmitted as job {number}; to see how it stands:\n  alpagym status {first}")
        return
    for index, directory in enumerate(made):
        say(f"job {number}_{index}: {directory}")
    say(f"submitted as job array {number}; to see how they stand:\n  alpagym list {first.parent}")
