"""What a person sees of a run: progress while it works, and one table when it ends.

On a terminal each stage is a bar; elsewhere (a log file, CI) it is a line at its start, at its end, and every few
seconds. The table shows numbers of `summary.json`, rounded, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from alpagym_runtime.telemetry.reporter import Reporter

EVALUATIONS = {"start": "start", "warm_start": "warm start", "final": "final", "best": "best on val"}
"""Keys of `summary.json` in the order of a run -> heading."""

_RATES = {"collision_at_fault": "collision at fault", "collision": "collision", "offroad": "off-road", "goal": "goal"}


class RunReporter(Reporter, AbstractContextManager["RunReporter"], Protocol):
    """A reporter that is closed when the run is over."""


def make_reporter(console: Console) -> RunReporter:
    """Bars on a terminal, lines elsewhere."""
    return BarReporter(console) if console.is_terminal else LineReporter(console.file.write)


class LineReporter:
    """Lines of text: each stage's start and end, and in between at most one every `every_s` seconds."""

    def __init__(
        self, write: Callable[[str], Any], every_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write, self._every_s, self._clock = write, every_s, clock
        self._stage: str | None = None
        self._total, self._done, self._unit = 0, 0, ""
        self._began = self._last = 0.0
        self._numbers: dict[str, float] = {}

    def stage(self, name: str, total: int, unit: str) -> None:
        """Begin a stage of `total` units; ends the last one."""
        self._end()
        self._stage, self._total, self._done, self._unit = name, total, 0, unit
        self._numbers = {}
        self._began = self._last = self._clock()
        self.note(f"{name}: {total} {unit}")

    def advance(self, amount: int = 1, **numbers: float) -> None:
        """`amount` more units are done; `numbers` are the newest values."""
        self._done += amount
        self._numbers.update(numbers)
        if self._clock() - self._last >= self._every_s:
            self._line()

    def note(self, text: str) -> None:
        """One line that stays."""
        self._write(f"{text}\n")

    def __enter__(self) -> LineReporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        if self._stage is not None:
            self._line(end=True)
            self._stage = None

    def _line(self, end: bool = False) -> None:
        self._last = self._clock()
        word = "" if not end else "done, " if self._done >= self._total else "stopped, "
        line = f"{self._stage}: {word}{self._done}/{self._total} {self._unit}, {self._last - self._began:.0f} s"
        self.note(line + (f" | {_numbers(self._numbers)}" if self._numbers else ""))


class BarReporter:
    """A bar a stage; finished ones stay."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[numbers]}", style="dim"),
            console=console,
        )
        self._task: TaskID | None = None

    def stage(self, name: str, total: int, unit: str) -> None:
        """Begin a stage of `total` units; ends the last one."""
        if self._task is not None:
            self._progress.stop_task(self._task)
        self._task = self._progress.add_task(escape(name), total=total, unit=unit, numbers="")

    def advance(self, amount: int = 1, **numbers: float) -> None:
        """`amount` more units are done; `numbers` are the newest values."""
        if self._task is None:
            return
        self._progress.advance(self._task, amount)
        if numbers:
            self._progress.update(self._task, numbers=_numbers(numbers))

    def note(self, text: str) -> None:
        """One line that stays."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> BarReporter:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self._progress.stop()


def _numbers(numbers: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())


def summary_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """The closing table as text: the first row holds the headings, the first column says what a row is."""
    found = [key for key in EVALUATIONS if key in summary.get("evaluations", {})]
    evaluations = [summary["evaluations"][key] for key in found]
    rows = [["", *(EVALUATIONS[key] for key in found)]]
    rows.append(["driving score", *(_interval(item["driving_score"]) for item in evaluations)])
    for rate, words in _RATES.items():
        if any(rate in item.get("rates", {}) for item in evaluations):
            rows.append([words, *(_percent(item.get("rates", {}).get(rate)) for item in evaluations)])
    families = sorted({family for item in evaluations for family in item.get("by_family", {})})
    for family in families:
        scores = [item.get("by_family", {}).get(family, {}).get("driving_score") for item in evaluations]
        rows.append([f"  {family}", *(_score(score) for score in scores)])
    rows.append(["scenes × seeds", *(str(item["driving_score"]["n"]) for item in evaluations)])
    return rows


def print_summary(console: Console, summary: Mapping[str, Any]) -> None:
    """Print the closing table and the gain over the warm start."""
    rows = summary_rows(summary)
    # Not a rich table: it cuts numbers to the width that it guesses for a log file.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    gain = summary.get("paired_gain")
    if gain:
        against = EVALUATIONS[gain.get("against", "warm_start")]
        lines.append(f"gain over the {against}, scene by scene: {_interval(gain, sign='+')}")
    if summary.get("evaluations"):
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _score(value: Any) -> str:
    mean = value["mean"] if isinstance(value, Mapping) else value
    return "–" if mean is None else f"{mean:.3f}"


def _interval(value: Mapping[str, Any], sign: str = "") -> str:
    if value["mean"] is None:
        return "–"
    text = f"{value['mean']:{sign}.3f}"
    if value.get("low") is not None and value.get("high") is not None:
        text += f" [{value['low']:{sign}.3f}, {value['high']:{sign}.3f}]"
    return text


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"
