"""What a run directory holds, as a report reads it.

Evaluations are summarised anew from their rows, never from an older summary, so a page cannot disagree with the table
beside it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alpagym_host.run_dir import open_existing
from alpagym_plugins import ConfigError
from alpagym_runtime.errors import CorruptFileError
from alpagym_runtime.files import read_json
from alpagym_runtime.rollouts.references import FILE as REFERENCES
from alpagym_runtime.rollouts.references import hold_against
from alpagym_runtime.rollouts.statistics import compare, summarise
from alpagym_runtime.rollouts.table import FILE as TABLE
from alpagym_runtime.rollouts.table import Row, read_rows
from alpagym_runtime.run_config import load_run_config
from alpagym_runtime.secrets import redacted
from alpagym_runtime.trainers.cosmos.monitor import JobState, job_state

RESAMPLES = 2000
WARM = ("warm_start", "start")
NAMES = {"start": "start", "warm_start": "warm start", "final": "last", "best": "best on val"}
"""Evaluations that are compared, in the order of a run -> heading."""


@dataclass
class RunData:
    """A run as its directory tells it.

    Attributes:
        directory: its path.
        config_text: the frozen YAML, without secrets.
        summary: summary.json; empty for a run that has not ended.
        metrics: lines of metrics.jsonl.
        rows: evaluated drives by evaluation.
        evaluations: their summaries.
        comparisons: of `final` and `best` with what training started from.
        references: the recording and policies that cheat in the same scenes, as `hold_against` has them.
        videos: what `videos/final.json` says.
        cosmos: how a job of Cosmos-RL went; None where there was none.

    """

    directory: Path
    config_text: str
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    rows: dict[str, list[Row]]
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    references: dict[str, dict[str, Any]] = field(default_factory=dict)
    videos: list[dict[str, Any]] = field(default_factory=list)
    cosmos: JobState | None = None

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.directory.name

    def shown(self) -> dict[str, dict[str, Any]]:
        """Evaluations on the test scenes, in the order of a run."""
        return {name: self.evaluations[name] for name in NAMES if name in self.evaluations}

    def training(self, stage: str | None = None) -> list[dict[str, Any]]:
        """Lines of training steps, of one stage or of all."""
        found = [row for row in self.metrics if not row["stage"].startswith("evaluate/")]
        return found if stage is None else [row for row in found if row["stage"] == stage]

    def stages(self) -> list[str]:
        """Training stages in order."""
        return list(dict.fromkeys(row["stage"] for row in self.training()))


def load_run(path: Path) -> RunData:
    """Read a run directory.

    Raises:
        ConfigError: it is none, or nothing was evaluated or trained in it yet.
        CorruptFileError: a file in it is cut.

    """
    directory = open_existing(path)
    summary = read_json(directory / "summary.json") if (directory / "summary.json").is_file() else {}
    rows = read_rows(directory / TABLE)
    metrics = _lines(directory / "metrics.jsonl")
    if not rows and not metrics:
        raise ConfigError(f"{directory} has nothing to report yet: no evaluation and no training step")
    run = RunData(directory, redacted((directory / "config.yaml").read_text()), summary, metrics, rows)
    run.evaluations = {name: summarise(group, RESAMPLES) for name, group in rows.items()}
    before = next((name for name in WARM if name in rows), None)
    for after in ("final", "best"):
        if before is not None and after in rows:
            run.comparisons.append(
                {"before": before, "after": after, **compare([rows[before]], [rows[after]], RESAMPLES)}
            )
    held = {name: rows[name] for name in NAMES if name in rows}
    run.references = hold_against(read_rows(directory / REFERENCES), held, RESAMPLES)
    about = directory / "videos" / "final.json"
    run.videos = read_json(about) if about.is_file() else []
    if (directory / "cosmos").is_dir():
        run.cosmos = job_state(directory, load_run_config(directory))
    return run


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    lines = path.read_text().splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as err:
            if number == len(lines):
                break  # a run that works at this moment may be in the middle of its last line
            raise CorruptFileError(f"{path}, line {number} is no JSON: {err}; remove the line") from err
    return found
