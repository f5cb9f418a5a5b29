"""Where the numbers of a run go: one row a training step and an evaluation, to every logger of the config.

A logger that fails is a nuisance, not the end of a run: it is named once and left out from then on. The file
`metrics.jsonl` is the exception, since resume and reports read it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from alpagym_runtime.files import strict, write_atomic

if TYPE_CHECKING:
    from alpagym_runtime.telemetry.config import ConsoleConfig
    from alpagym_runtime.telemetry.reporter import Reporter


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        stage: imitation, grpo, evaluate/final, …
        step: within the stage, from 1; of an evaluation, the total.
        total_steps: training steps of all stages so far; the common axis of all curves.
        numbers: name -> value; NaN where a value does not exist.

    """

    stage: str
    step: int
    total_steps: int
    numbers: Mapping[str, Any]


class Logger(Protocol):
    """Takes rows. `essential` loggers may stop a run; the error of any other is reported and forgotten."""

    essential: bool

    def log(self, row: Row) -> None:
        """Take one row."""
        ...

    def rewind(self, rows: int, total_steps: int) -> None:
        """Forget what came after the first `rows` rows of the run, which end at `total_steps`: it is made again."""
        ...

    def close(self) -> None:
        """Finish; idempotent."""
        ...


class Loggers:
    """All loggers of a run as one; see the module's text for what happens when one fails."""

    def __init__(self, loggers: Mapping[str, Logger], note: Callable[[str], None]) -> None:
        self._loggers, self._note = dict(loggers), note

    def log(self, row: Row) -> None:
        """Give a row to each."""
        self._each("log", row)

    def rewind(self, rows: int, total_steps: int) -> None:
        """Take each back to a checkpoint."""
        self._each("rewind", rows, total_steps)

    def close(self) -> None:
        """Close each."""
        self._each("close")

    def _each(self, method: str, *arguments: object) -> None:
        for name, logger in list(self._loggers.items()):
            try:
                getattr(logger, method)(*arguments)
            except Exception as err:
                if logger.essential:
                    raise
                del self._loggers[name]
                if method != "close":
                    # What it holds (a process, a file) is let go; that it does not work is said below.
                    with contextlib.suppress(Exception):
                        logger.close()
                self._note(f"logger {name} failed and is left out from now on: {type(err).__name__}: {err}")


class ConsoleLogger:
    """Shows chosen numbers through the reporter."""

    essential = False

    def __init__(self, config: ConsoleConfig, reporter: Reporter) -> None:
        self._config, self._reporter = config, reporter
        self._rows = 0

    def log(self, row: Row) -> None:
        """Show the newest numbers."""
        shown = {k: row.numbers[k] for k in self._config.names if k in row.numbers}
        if not row.stage.startswith("evaluate/"):
            self._reporter.advance(0, **shown)
        self._rows += 1
        if self._config.every_rows and self._rows % self._config.every_rows == 0:
            words = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
            self._reporter.note(f"{row.stage} {row.step}: {words}")

    def rewind(self, rows: int, total_steps: int) -> None:
        """What was shown stays."""

    def close(self) -> None:
        """Nothing is held."""


class JsonlLogger:
    """A line of JSON a row; NaN is null."""

    essential = True

    def __init__(self, path: Path) -> None:
        self._path = path

    def log(self, row: Row) -> None:
        """Append a line."""
        line = json.dumps(strict({"stage": row.stage, "step": row.step, **row.numbers}), allow_nan=False)
        with self._path.open("a") as file:
            file.write(line + "\n")

    def rewind(self, rows: int, total_steps: int) -> None:
        """Keep the first `rows` lines."""
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        write_atomic(self._path, b"".join(lines[:rows]))

    def close(self) -> None:
        """Nothing is held."""


def build_loggers(sections: Mapping[str, Any], run: Any) -> Loggers:
    """The loggers of a config's section; what they raise here stops the run before it starts."""
    built: dict[str, Logger] = {}
    try:
        for name, section in sections.items():
            built[name] = section.config.build(run)
    except BaseException:
        Loggers(built, run.reporter.note).close()
        raise
    return Loggers(built, run.reporter.note)


def number_items(numbers: Mapping[str, Any]) -> Sequence[tuple[str, float]]:
    """The entries that are numbers."""
    return [(k, float(v)) for k, v in numbers.items() if isinstance(v, (int, float)) and not isinstance(v, bool)]
