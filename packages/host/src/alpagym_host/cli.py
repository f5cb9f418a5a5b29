"""The command `alpagym`.

Each command imports what it needs when it runs: `--help` stays fast, and works without torch, Hydra or a simulator.
Exit codes: 0 done, 1 the run failed, 2 the request is wrong (nothing was made), 128 + n stopped by signal n.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from alpagym_host import episodes
from alpagym_host.alpasim_commands import asl, serve_world
from alpagym_host.checkpoint_commands import checkpoint
from alpagym_host.doctor_command import doctor
from alpagym_host.new_command import new
from alpagym_host.pai_commands import pai
from alpagym_host.report_command import report
from alpagym_host.run_commands import clean, list_runs, logs, status, stop
from alpagym_host.scene_commands import scenes
from alpagym_plugins import GROUPS, ConfigError, PluginError

if TYPE_CHECKING:
    from alpagym_host.run_dir import Command
    from alpagym_runtime.run_config import RunConfig

app = typer.Typer(
    name="alpagym",
    help="Reinforcement learning of driving policies in closed loop.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(scenes, name="scenes")
app.add_typer(asl, name="asl")
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(pai, name="pai")
app.add_typer(episodes.app, name="episodes")
app.command("replay")(episodes.replay)
app.command("serve")(serve_world)
app.command("report")(report)
app.command("doctor")(doctor)
app.command("new")(new)
app.command("list")(list_runs)
app.command("status")(status)
app.command("logs")(logs)
app.command("stop")(stop)
app.command("clean")(clean)

_COMMANDS = (
    *("train", "evaluate", "rollout", "resume", "submit", "drive", "serve", "check"),
    *("list", "status", "logs", "stop", "clean"),
    *("plugins", "new", "doctor", "asl", "scenes", "episodes", "replay", "checkpoint", "report", "pai"),
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="OVERRIDES",
        help="group=choice, such as experiment=smoke; key.path=value; ~key.path deletes.",
        show_default=False,
    ),
]
MultiRun = Annotated[bool, typer.Option("--multirun", "-m", help="A run for each combination of key=a,b,c.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and make nothing.")]
Best = Annotated[bool, typer.Option("--best", help="With --run: its best checkpoint on val, not the last one.")]
Directory = Annotated[
    Path | None,
    typer.Option("--directory", help="The run directory itself, in place of a new name below run.root.", metavar="DIR"),
]

GoOn = Annotated[
    bool,
    typer.Option("--resume", help="With --directory: go on with it if it is there, as a job that is started again."),
]


def main() -> None:
    """Entry point of `alpagym` and of `python -m alpagym_host.cli`, which takes overrides without a command too."""
    arguments = sys.argv[1:]
    show_traceback = "--traceback" in arguments or os.environ.get("ALPAGYM_TRACEBACK", "0") not in ("", "0")
    arguments = [argument for argument in arguments if argument != "--traceback"]
    if not set(arguments) & {*_COMMANDS, "--help"} and any("=" in argument for argument in arguments):
        arguments.insert(0, "train")
    with errors_as_messages(show_traceback):
        app(arguments, prog_name="alpagym")


@contextlib.contextmanager
def errors_as_messages(show_traceback: bool = False) -> Iterator[None]:
    """What a user can mend leaves the program as one line and an exit code, not as a traceback."""
    try:
        yield
    except Exception as err:
        code = _exit_code(err)
        if code is None or show_traceback:
            raise
        from alpagym_runtime.secrets import redacted

        print(f"error: {redacted(str(err))}", file=sys.stderr)
        sys.exit(code)


def _exit_code(err: Exception) -> int | None:
    """2 for a wrong request, 1 for a wrong world or what a failed run says, None for a wrong program."""
    from alpagym_host.errors import RunFailedError
    from alpagym_runtime.errors import CorruptFileError, SceneError, SimulatorError

    if isinstance(err, (ConfigError, PluginError)):
        return 2
    if isinstance(err, RunFailedError):
        return err.code
    return 1 if isinstance(err, (CorruptFileError, SceneError, SimulatorError, OSError)) else None


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"alpagym {version('alpagym-host')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show Python's traceback with an error; also ALPAGYM_TRACEBACK=1.")
    ] = False,
) -> None:
    """Options before any command; `main` reads --traceback, wherever it stands."""


@app.command()
def train(
    overrides: Overrides = None,
    dry_run: DryRun = False,
    directory: Directory = None,
    go_on: GoOn = False,
    multirun: MultiRun = False,
) -> None:
    """Train a policy and evaluate it."""
    _start(overrides or [], "train", dry_run, directory, multirun, go_on=go_on)


@app.command()
def evaluate(
    overrides: Overrides = None,
    run: Annotated[
        Path | None,
        typer.Option(help="Take config and last checkpoint of this run; overrides go on top.", metavar="DIR"),
    ] = None,
    best: Best = False,
    dry_run: DryRun = False,
    directory: Directory = None,
    go_on: GoOn = False,
    multirun: MultiRun = False,
) -> None:
    """Evaluate a policy on the scenes of dataset.split; any weights: checkpoint.path=RUN, CHECKPOINT or MODEL."""
    _start(overrides or [], "evaluate", dry_run, directory, multirun, run, best, go_on)


@app.command()
def rollout(
    overrides: Overrides = None,
    run: Annotated[
        Path | None,
        typer.Option(help="Take config and last checkpoint of this run; overrides go on top.", metavar="DIR"),
    ] = None,
    best: Best = False,
    dry_run: DryRun = False,
    directory: Directory = None,
    go_on: GoOn = False,
    multirun: MultiRun = False,
) -> None:
    """Drive a policy in the scenes of dataset.split and keep the episodes in a store."""
    _start(overrides or [], "rollout", dry_run, directory, multirun, run, best, go_on)


@app.command()
def resume(run_directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False)]) -> None:
    """Go on with a run that was stopped; its frozen config holds."""
    from rich.console import Console

    from alpagym_host.launch.start import resume as go_on
    from alpagym_host.run_dir import open_existing

    raise typer.Exit(go_on(open_existing(run_directory), Console()))


@app.command()
def submit(
    overrides: Overrides = None,
    command: Annotated[str, typer.Option(help="What the job does: train, evaluate or rollout.", metavar="NAME")] = (
        "train"
    ),
    after: Annotated[
        list[str] | None,
        typer.Option(
            help="Begin once this has ended well: a job's number, or the directory of its run.", metavar="JOB"
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved config and the job's script, and make nothing.")
    ] = False,
    directory: Directory = None,
    go_on: GoOn = False,
    multirun: Annotated[
        bool, typer.Option("--multirun", "-m", help="A job array: a run for each combination of key=a,b,c.")
    ] = False,
) -> None:
    """Write a Slurm job and submit it; the same as a command with deploy=slurm."""
    from typing import get_args

    from alpagym_host.run_dir import Command
    from alpagym_host.slurm.submit import dependency

    words = list(overrides or [])
    if command not in get_args(Command):
        raise ConfigError(f"must be train, evaluate or rollout, got {command!r}", key="--command")
    if not any(word.startswith("deploy=") for word in words):
        words.insert(0, "deploy=slurm")
    options = dependency(after or [])
    _start(words, cast("Command", command), dry_run, directory, multirun, go_on=go_on, options=options)


@app.command()
def drive(
    overrides: Overrides = None,
    policy: Annotated[
        str | None, typer.Option(help="An installed policy; its options are policy.KEY=VALUE.", metavar="NAME")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="A run directory, or one of its checkpoints.", metavar="DIR")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; other than loopback it is open to all.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one, and prints it.", min=0, max=65535)] = 50051,
    stats: Annotated[
        Path | None, typer.Option(help="Write batch sizes, waits and counts here, every 5 s.", metavar="FILE")
    ] = None,
    sessions: Annotated[int, typer.Option(help="Most sessions at once.", min=1)] = 64,
    max_batch: Annotated[int, typer.Option(help="Most sessions in one forward.", min=1)] = 64,
    window_ms: Annotated[
        float | None,
        typer.Option(help="Longest wait for a third of the sessions once one waits; default: half a forward.", min=0),
    ] = None,
    samples: Annotated[bool, typer.Option(help="Send the plan as a sample too, for AlpaSim's minADE.")] = False,
    decode_threads: Annotated[int, typer.Option(help="Threads that decode pictures.", min=1)] = 2,
    device: Annotated[str, typer.Option(help="Where the policy runs, such as cuda:0.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of the policy's draws.")] = 0,
) -> None:
    """Serve a policy as a driver for AlpaSim, until SIGINT or SIGTERM."""
    from rich.console import Console

    from alpagym_host.launch.drive import build_policy, serve

    built, name = build_policy(policy, checkpoint, overrides or [], device)
    serve(
        built,
        name,
        Console(),
        host=host,
        port=port,
        sessions=sessions,
        max_batch=max_batch,
        window_ms=window_ms,
        seed=seed,
        samples=samples,
        decode_threads=decode_threads,
        stats=stats,
    )


@app.command()
def check(
    env_id: Annotated[
        str,
        typer.Argument(metavar="ENV_ID", help="Such as alpagym/Embedded-v0, or package:namespace/Name-v0 of a plugin."),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="The environment's own arguments, YAML values.")
    ] = None,
    episodes: Annotated[int, typer.Option(help="Episodes of the search for leaks; 0 leaves it out.", min=0)] = 2000,
    seconds: Annotated[float, typer.Option(help="CPU seconds of each measurement of speed.", min=0.01)] = 3.0,
) -> None:
    """Check a Gymnasium environment: checkers, same bytes again, autoreset, leaks, speed; exit code 1 if it fails."""
    from rich.console import Console

    from alpagym_host.check import Subject, parse_arguments, report

    subject = Subject(env_id, parse_arguments(arguments or []), episodes, seconds)
    raise typer.Exit(0 if report(subject, Console()) else 1)


@app.command()
def plugins() -> None:
    """List the installed plugins, and why one does not load."""
    from alpagym_plugins import entries, load

    rows = [("group", "name", "distribution", "version", "state")]
    for group in GROUPS:
        for entry in entries(group):
            state = "loads"
            if group == "configs":
                state = f"YAML in {entry.target}"
            else:
                try:
                    load(group, entry.name)
                except PluginError as err:
                    state = str(err).splitlines()[0]
            rows.append((group, entry.name, entry.distribution, entry.version, state))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]))


def _start(
    overrides: list[str],
    command: Command,
    dry_run: bool,
    directory: Path | None,
    multirun: bool,
    run: Path | None = None,
    best: bool = False,
    go_on: bool = False,
    options: Sequence[str] = (),
) -> None:
    from rich.console import Console

    from alpagym_host.compose import compose
    from alpagym_host.launch.start import start, sweep

    if go_on and (directory is None or multirun):
        raise ConfigError("goes on with one run; name its directory with --directory", key="--resume")
    if multirun:
        if run is not None:
            raise ConfigError("--run takes one config and --multirun makes several; choose one of them")
        raise typer.Exit(sweep(overrides, command, dry_run, directory, Console(), options))
    if best and run is None:
        raise ConfigError("chooses among the checkpoints of a run; name it with --run", key="--best")
    config = compose(overrides) if run is None else _on_top_of(run, overrides, best)
    raise typer.Exit(start(config, command, dry_run, directory, Console(), go_on, options))


def _on_top_of(run: Path, overrides: list[str], best: bool) -> RunConfig:
    """The frozen config of a run, its last or best checkpoint, and overrides on top."""
    from alpagym_host.compose import compose
    from alpagym_host.run_dir import command_of, open_existing
    from alpagym_runtime.run_config import load_run_config

    directory = open_existing(run)
    base = load_run_config(directory)
    config = compose(overrides, base)
    own_weights = config.policy.type == base.policy.type and config.checkpoint.path == base.checkpoint.path
    if own_weights and command_of(directory) == "train":
        # The step itself, so that the frozen config says which weights were measured.
        steps = sorted((directory / "checkpoints").glob("step_" + "[0-9]" * 8))
        if not steps:
            raise ConfigError(f"{directory} has no checkpoint yet; continue it: alpagym resume {directory}")
        chosen = directory / "checkpoints" / "best" if best else steps[-1]
        if not chosen.is_dir():
            raise ConfigError(f"{directory} keeps none; it comes with evaluation.every_updates > 0", key="--best")
        config.checkpoint.path = str(chosen)
    return config


if __name__ == "__main__":
    main()
