"""From composed configs to runs: checked first, then a directory each, then one after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from alpagym_host import run_dir
from alpagym_host.alpasim import starts_alpasim
from alpagym_host.compose import compose, to_yaml
from alpagym_host.preflight import PreflightError, leaves, preflight, require
from alpagym_host.progress import print_summary
from alpagym_host.run_dir import Command
from alpagym_host.sweep import expand, varied
from alpagym_plugins import ConfigError
from alpagym_runtime.files import read_json
from alpagym_runtime.machine import Machine
from alpagym_runtime.run_config import RunConfig, load_run_config, to_mapping
from alpagym_runtime.secrets import redacted


def start(
    config: RunConfig,
    command: Command,
    dry_run: bool,
    directory: Path | None,
    console: Console,
    again: bool = False,
    options: Sequence[str] = (),
) -> int:
    """Print the config, or check it and run it; the exit code.

    Args:
        config: the run.
        command: what it is for.
        dry_run: print it only.
        directory: the run directory itself; None makes a name.
        console: where progress and the result go.
        again: go on in `directory` if that is there and was made for the same request.
        options: further ones of sbatch, with deploy=slurm.

    Raises:
        ConfigError: the request is wrong; nothing is left behind.

    """
    if dry_run:
        print(_shown(config, command), end="")
        return 0
    if again and directory is not None and directory.expanduser().exists():
        return resume(_same_request(directory, config, command), console, options)
    require(config, command, width=console.width)
    if config.deploy.kind == "slurm":
        from alpagym_host.slurm.submit import submit

        return submit(config, command, directory, console, options)
    return _run(config, command, directory, console)


def resume(directory: Path, console: Console, options: Sequence[str] = ()) -> int:
    """Go on with the run of a directory; the exit code. One that has completed shows its results."""
    config, command = load_run_config(directory), run_dir.command_of(directory)
    summary = directory / "summary.json"
    if summary.is_file() and (found := read_json(summary)).get("status") == "completed":
        print_summary(console, found)
        print(f"already completed; results: {summary}")
        return 0
    require(config, command, width=console.width)
    if config.deploy.kind == "slurm":
        from alpagym_host.slurm.submit import submit_again

        return submit_again(config, command, directory, console, options)
    return go_on(config, command, console, lambda: directory)


def _shown(config: RunConfig, command: Command) -> str:
    """What --dry-run prints: the config, and the script of a job."""
    text = to_yaml(config)
    if config.deploy.kind == "slurm":
        from alpagym_host.slurm.submit import SCRIPT, script_of

        text += f"---\n# {SCRIPT}\n{script_of(config, command)}"
    return redacted(text)


def _same_request(directory: Path, config: RunConfig, command: Command) -> Path:
    """The directory, if it was made for this config and command.

    Raises:
        ConfigError: names the keys that differ.

    """
    found = run_dir.open_existing(directory)
    if (made_for := run_dir.command_of(found)) != command:
        raise ConfigError(f"{found} was made to {made_for}, not to {command}", key="--resume")
    there, here = dict(leaves(to_mapping(load_run_config(found)))), dict(leaves(to_mapping(config)))
    other = [key for key in there.keys() | here.keys() if there.get(key) != here.get(key)]
    if other:
        key = min(other)
        raise ConfigError(
            f"{found} was made for another request: {key} is {there.get(key)!r} there and {here.get(key)!r} here"
            + (f", and {len(other) - 1} more keys differ" if len(other) > 1 else "")
            + f"; what it was made for goes on with: alpagym resume {found}",
            key="--resume",
        )
    return found


def sweep(
    overrides: Sequence[str],
    command: Command,
    dry_run: bool,
    directory: Path | None,
    console: Console,
    options: Sequence[str] = (),
) -> int:
    """A run for every combination of values; 0 if all ended well, else the first code that is not 0.

    Raises:
        ConfigError: one of the runs cannot be; none was started.

    """
    if directory is not None:
        raise ConfigError("--directory names one directory, and --multirun makes several; set run.root or run.name")
    runs = expand(overrides)
    several = varied(overrides)
    labels = [" ".join(words[i] for i in several) or "one run" for words in runs]
    configs = []
    notes: list[str] = []
    for words, label in zip(runs, labels, strict=True):
        try:
            configs.append(compose(words, tell=notes.append))
        except ConfigError as err:
            raise ConfigError(f"{label}: {err}") from err
    for note in dict.fromkeys(notes):
        print(note, file=sys.stderr)
    if dry_run:
        shown = (f"# {label}\n{_shown(config, command)}" for label, config in zip(labels, configs, strict=True))
        print("\n---\n".join(shown))
        return 0
    machine = Machine()
    for label, config in zip(labels, configs, strict=True):
        problems = preflight(config, command, machine)
        if problems:
            console.print(f"{label}:", markup=False, highlight=False, soft_wrap=True)
            raise PreflightError(problems, console.width)
    if "slurm" in (kinds := {config.deploy.kind for config in configs}):
        if len(kinds) > 1:
            raise ConfigError("some of these runs are Slurm jobs and some are not; submit them apart", key="deploy")
        from alpagym_host.slurm.submit import submit_sweep

        return submit_sweep(configs, labels, command, console, options)
    codes = []
    for number, (label, config) in enumerate(zip(labels, configs, strict=True), 1):
        console.print(f"run {number} of {len(runs)}: {label}", markup=False, highlight=False, soft_wrap=True)
        try:
            codes.append(_run(config, command, None, console))
        except (ConfigError, OSError, RuntimeError) as err:
            # The others do not depend on it.
            console.print(f"error: {redacted(str(err))}", markup=False, highlight=False, soft_wrap=True)
            codes.append(1)
        if codes[-1] > 128:
            break  # stopped by a signal: the user means the sweep
    done = sum(code == 0 for code in codes)
    console.print(f"{done} of {len(runs)} runs completed", markup=False, highlight=False)
    return next((code for code in codes if code), 0)


def go_on(config: RunConfig, command: Command, console: Console, directory: Callable[[], Path]) -> int:
    """Work in a run directory, with a supervisor where an AlpaSim is started for the run, or as a team; the exit code.

    What is missing is found before `directory` is called, which makes it or has it already.
    """
    if command == "train" and config.topology.processes > 1:
        from alpagym_host.launch.torchrun import launch_team

        return launch_team(config, directory(), console)
    if not starts_alpasim(config):
        from alpagym_host.launch.local import launch

        return launch(config, directory(), command, console)
    from alpagym_host.launch.supervise import prepare, supervise

    checkout = prepare(config, console)
    return supervise(config, directory(), command, console, checkout)


def _run(config: RunConfig, command: Command, directory: Path | None, console: Console) -> int:
    made: list[Path] = []

    def make() -> Path:
        made.append(run_dir.create(config, command, directory))
        return made[0]

    try:
        return go_on(config, command, console, make)
    except Exception:
        for path in made:
            run_dir.discard(path)
        raise
