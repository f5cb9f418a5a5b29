"""Options of the loggers: where the numbers of a run go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from alpagym_plugins import ConfigError, Problem, check_choice, check_range

if TYPE_CHECKING:
    from alpagym_runtime.machine import Machine
    from alpagym_runtime.run_config import RunConfig
    from alpagym_runtime.telemetry.loggers import Logger

WANDB_MODES = ("offline", "online", "disabled")


@dataclass
class ConsoleConfig:
    """The newest numbers beside the progress bar, and a line that stays every so many rows.

    Attributes:
        names: which numbers are shown.
        every_rows: a line that stays every so many rows of a stage; 0 none.

    """

    names: list[str] = field(default_factory=lambda: ["loss", "reward", "driving_score", "kl"])
    every_rows: int = 0

    def __post_init__(self) -> None:
        check_range("every_rows", self.every_rows, minimum=0)

    def build(self, run: Any) -> Logger:
        """The logger of a run; it shows through the run's reporter."""
        from alpagym_runtime.telemetry.loggers import ConsoleLogger

        return ConsoleLogger(self, run.reporter)


@dataclass
class JsonlConfig:
    """A line of JSON a row in `metrics.jsonl` of the run directory: what reports read, and what resume goes on with."""

    def build(self, run: Any) -> Logger:
        """The logger of a run."""
        from alpagym_runtime.telemetry.loggers import JsonlLogger

        return JsonlLogger(run.directory / "metrics.jsonl")


@dataclass
class TensorboardConfig:
    """Curves for TensorBoard, in `tensorboard/` of the run directory."""

    def build(self, run: Any) -> Logger:
        """The logger of a run."""
        from alpagym_runtime.telemetry.tensorboard_logger import TensorboardLogger

        return TensorboardLogger(run.directory / "tensorboard")


@dataclass
class WandbConfig:
    """Weights & Biases. The key is $WANDB_API_KEY or the one that `wandb login` keeps; $WANDB_MODE wins over `mode`.

    Attributes:
        mode: offline (files in the run directory, `wandb sync` sends them) | online | disabled (nothing at all).
        project: where the run appears.
        entity: user or team that it belongs to; null: the key's own default.
        name: what it is called; null: the run directory's name.
        tags: to find it by.
        base_url: of the server; null: $WANDB_BASE_URL, or the public one.
        timeout_s: longest wait for the server at the start, and again at the end.

    """

    mode: str = "offline"
    project: str = "alpagym"
    entity: str | None = None
    name: str | None = None
    tags: list[str] = field(default_factory=list)
    base_url: str | None = None
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, WANDB_MODES)
        if not self.project:
            raise ConfigError("must not be empty", key="project")
        check_range("timeout_s", self.timeout_s, above=0, maximum=600)

    @property
    def mode_now(self) -> str:
        """The mode that holds: $WANDB_MODE where that is set."""
        asked = os.environ.get("WANDB_MODE") or self.mode
        return asked if asked in WANDB_MODES else self.mode

    def preflight(self, config: RunConfig, machine: Machine) -> Iterator[Problem]:
        """Whether wandb is installed and, online, whether the server takes the key for this entity."""
        if self.mode_now == "disabled":
            return
        if machine.version("wandb") is None:
            yield Problem(".type", "wandb", "wandb is not installed", "uv sync --extra wandb")
        elif self.mode_now == "online":
            from alpagym_runtime.telemetry.wandb_access import access_trouble

            trouble = access_trouble(self)
            if trouble is not None:
                yield Problem(f".{trouble.key}", getattr(self, trouble.key), trouble.message, trouble.remedy)

    def build(self, run: Any) -> Logger:
        """The logger of a run; online, the server has accepted it when this returns.

        Raises:
            ConfigError: wandb is missing, or the server refuses; names entity, project and the keys to change.

        """
        from alpagym_runtime.telemetry.wandb_logger import make_wandb_logger

        return make_wandb_logger(self, run)
