"""What `python -m alpagym_alpamayo_r1.train` and `.evaluate` have in common: arguments, the team, paths, signals.

They run under torchrun, on one node or many, and alone. Nothing is staged: paths must exist under the same names on
every node, which each process checks before anything is loaded.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import torch

from alpagym_alpamayo_r1.recipe import RECIPES, Recipe, read_recipe
from alpagym_plugins import ConfigError
from alpagym_runtime.errors import CorruptFileError, SimulatorError
from alpagym_runtime.trainers.team import ALONE, Team


class Lines:
    """A reporter that prints lines; implements `alpagym_runtime.telemetry.reporter.Reporter`."""

    def stage(self, name: str, total: int, unit: str) -> None:
        """Its title."""
        print(f"{name}: {total} {unit}", flush=True)

    def advance(self, amount: int = 1, **numbers: float) -> None:
        """Nothing: the logger `console` prints lines of its own."""

    def note(self, text: str) -> None:
        """The line."""
        print(text, flush=True)


class Stop:
    """True once a signal has asked for the end."""

    def __init__(self) -> None:
        self.number = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def __call__(self) -> bool:
        """Whether it has."""
        return self.number != 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.number = number


def start(work: Callable[[Recipe, Team, str], int], program: str, arguments: Sequence[str], evaluating: bool) -> None:
    """Run `work` in this process of the team, and leave with its exit code; 2 for a wrong request."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description="Overrides are key=value, as in docs/pai.md; under torchrun, all processes do it together.",
    )
    parser.add_argument("--config-name", required=True, metavar="NAME", help=f"{' | '.join(RECIPES)}, or your own YAML")
    parser.add_argument("--config-path", metavar="FOLDER", help="of your own YAML, whose defaults name a recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args(arguments)
    code = 2
    try:
        recipe = read_recipe(options.config_name, options.overrides, options.config_path, evaluating)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.set_num_threads(1)
        team = Team.join(device) if "RANK" in os.environ else ALONE
        _check_paths(team, recipe.paths(evaluating))
        if team.writes:
            for note in recipe.notes:
                print(note, flush=True)
        code = work(recipe, team, device)
        team.leave()
    except (ConfigError, CorruptFileError, SimulatorError) as err:
        print(f"error: {err}", file=sys.stderr, flush=True)
        code = 2 if isinstance(err, ConfigError) else 1
    sys.stdout.flush()
    # As alpagym_host.launch.torchrun does: a thread of gloo's aborts an interpreter that takes itself down.
    if "RANK" in os.environ:
        os._exit(code)
    sys.exit(code)


def _check_paths(team: Team, paths: dict[str, str]) -> None:
    """Raise in every process what any of them lacks; names process, host, key and path."""
    missing = [f"{key}={path}" for key, path in paths.items() if not Path(path).exists()]
    place = f"process {team.rank} on {socket.gethostname()}"
    found = [line for line in team.gather(f"{place} has no {', '.join(missing)}" if missing else "") if line]
    if found:
        raise ConfigError(
            f"{'; '.join(found[:4])}{'; …' if len(found) > 4 else ''}: paths must exist under the same name on every "
            "node; mount or copy them, nothing is fetched"
        )
