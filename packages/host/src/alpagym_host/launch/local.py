"""Runs a composed run in this process, and turns signals into an orderly stop.

The first SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 asks the runtime to stop; it writes a checkpoint and the summary
so far and returns. A second SIGINT interrupts it at once; `alpagym resume` then goes on from the last checkpoint.
SIGUSR1 is what Slurm sends before its time limit: the job then goes back into the queue, where the config allows it.
SIGUSR2 is how `alpagym stop` asks a Slurm job, through srun, which passes on no other signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from rich.console import Console

from alpagym_host.progress import make_reporter, print_summary
from alpagym_host.report_command import write_own
from alpagym_host.run_dir import Command, locked
from alpagym_host.run_state import tracked
from alpagym_plugins import PluginError
from alpagym_runtime.machine import Machine
from alpagym_runtime.run_config import RunConfig


class Outcome(Protocol):
    """What a run leaves besides its files."""

    @property
    def completed(self) -> bool:
        """Whether it reached its end; False after a stop."""
        ...

    @property
    def summary(self) -> Mapping[str, Any]:
        """The content of `summary.json`."""
        ...


class Runnable(Protocol):
    """The part of `alpagym_runtime.trainers.run.Run` that a launcher calls."""

    def train(self) -> Outcome:
        """Train, or go on from the last checkpoint."""
        ...

    def evaluate(self) -> Outcome:
        """Evaluate the policy on the dataset's split."""
        ...

    def rollout(self) -> Outcome:
        """Drive the policy and keep the episodes."""
        ...


class Stop:
    """Remembers the signal that asked for a stop."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self) -> bool:
        """Whether a stop was asked for."""
        return self.signal is not None


def launch(
    config: RunConfig,
    directory: Path,
    command: Command,
    console: Console,
    make_run: Callable[..., Runnable] | None = None,
) -> int:
    """Run in this process until the end or a signal; prints the result and what to do next.

    Args:
        config: the frozen config of `directory`.
        directory: a run directory, new or to be continued.
        command: what to do.
        console: where progress and the result go.
        make_run: builds the run, with the arguments of the runtime's `Run`, which is the default.

    Returns:
        Exit code: 0, or 128 + the signal that stopped it.

    """
    with locked(directory), tracked(directory, command) as tracker:
        console.print(f"run directory: {directory}", markup=False, highlight=False, soft_wrap=True)
        code = work(config, directory, command, console, make_run)
        tracker.update(code=code)
    return requeued(config, directory, code, console)


def work(
    config: RunConfig,
    directory: Path,
    command: Command,
    console: Console,
    make_run: Callable[..., Runnable] | None = None,
) -> int:
    """The same for whoever holds the directory already: this process, or the supervisor that started it."""
    with stop_signals(console) as stop:
        try:
            build = make_run or _runtime()
            with make_reporter(console) as reporter:
                run = build(config, directory, reporter=reporter, stop_requested=stop)
                outcome: Outcome = getattr(run, command)()
        except KeyboardInterrupt:
            _say(console, f"interrupted; to continue from the last checkpoint:\n  alpagym resume {directory}")
            return 128 + signal.SIGINT
        except ModuleNotFoundError as err:
            if err.name != "torch":
                raise
            raise PluginError(
                "this run needs torch, which is not installed: pip install 'alpagym-runtime[torch]'"
            ) from err
    print_summary(console, outcome.summary)
    if not outcome.completed:
        _say(console, f"stopped before the end; to continue:\n  alpagym resume {directory}")
        return 128 + (stop.signal or signal.SIGTERM)
    _say(console, f"results: {directory / 'summary.json'}")
    if command != "rollout":
        _say(console, f"report: {write_own(directory)}")
    episodes = outcome.summary.get("episodes")
    if episodes:
        for problem in episodes["problems"]:
            _say(console, f"left out: {problem}")
        ends = ", ".join(f"{name} {count}" for name, count in sorted(episodes["ended"].items()))
        _say(console, f"episodes: {episodes['count']} ({ends}), {episodes['bytes'] / 1e6:.1f} MB in {episodes['path']}")
        _say(console, f"next:\n  alpagym episodes list {episodes['path']}")
    if command == "train":
        _say(console, f"next:\n  alpagym evaluate --run {directory} dataset.split=val")
    return 0


def _runtime() -> Callable[..., Runnable]:
    from alpagym_runtime.trainers.run import Run

    return Run


def requeued(config: RunConfig, directory: Path, code: int, console: Console) -> int:
    """Put a Slurm job that SIGUSR1 has stopped back into the queue, if `deploy.requeues` allows it; the exit code.

    That is for a command in a script of the user's own; a job that we submitted does it in its own script.
    """
    if config.deploy.kind == "slurm":
        return code
    job = os.environ.get("SLURM_JOB_ID")
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    if code != 128 + signal.SIGUSR1 or job is None or not job.isdigit() or config.deploy.requeues == 0:
        return code
    if not restarts.isdigit() or int(restarts) >= config.deploy.requeues:
        _say(console, f"not queued again: that was start {restarts} of deploy.requeues={config.deploy.requeues}")
        return code
    answer = Machine().ask("scontrol", "requeue", job)
    _say(console, f"job {job} is queued again" if answer.ok else f"job {job} is not queued again: {answer.first_line}")
    return code


@contextlib.contextmanager
def stop_signals(
    console: Console, said: str = "stopping after the work in hand; Ctrl-C again stops at once"
) -> Iterator[Stop]:
    """Turn signals into a request to stop, and say so; a second SIGINT is a KeyboardInterrupt."""
    stop = Stop()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop() and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not stop():
            stop.signal = number
            _say(console, said)

    wanted = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup means it
        wanted.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in wanted}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
