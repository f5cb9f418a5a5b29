"""From composed configs to runs: checked first, then a directory each, then one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from alpagym_host import run_dir
from alpagym_host.compose import compose, to_yaml
from alpagym_host.preflight import PreflightError, preflight, require
from alpagym_host.run_dir import Command
from alpagym_host.sweep import expand, varied
from alpagym_plugins import ConfigError
from alpagym_runtime.machine import Machine
from alpagym_runtime.run_config import RunConfig
from alpagym_runtime.secrets import redacted


def start(config: RunConfig, command: Command, dry_run: bool, directory: Path | None, console: Console) -> int:
    """Print the config, or check it and run it; the exit code.

    Raises:
        ConfigError: the request is wrong; nothing is left behind.

    """
    if dry_run:
        print(to_yaml(config), end="")
        return 0
    require(config, command, width=console.width)
    return _run(config, command, directory, console)


def sweep(overrides: Sequence[str], command: Command, dry_run: bool, directory: Path | None, console: Console) -> int:
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
    for words, label in zip(runs, labels, strict=True):
        try:
            configs.append(compose(words))
        except ConfigError as err:
            raise ConfigError(f"{label}: {err}") from err
    if dry_run:
        print("\n---\n".join(f"# {label}\n{to_yaml(config)}" for label, config in zip(labels, configs, strict=True)))
        return 0
    machine = Machine()
    for label, config in zip(labels, configs, strict=True):
        problems = preflight(config, command, machine)
        if problems:
            console.print(f"{label}:", markup=False, highlight=False, soft_wrap=True)
            raise PreflightError(problems, console.width)
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


def _run(config: RunConfig, command: Command, directory: Path | None, console: Console) -> int:
    from alpagym_host.launch.local import launch
    from alpagym_host.launch.torchrun import launch_team

    made = run_dir.create(config, command, directory)
    if command == "train" and config.topology.processes > 1:
        console.print(f"run directory: {made}", markup=False, highlight=False, soft_wrap=True)
        return launch_team(config, made)
    try:
        return launch(config, made, command, console)
    except Exception:
        run_dir.discard(made)
        raise
