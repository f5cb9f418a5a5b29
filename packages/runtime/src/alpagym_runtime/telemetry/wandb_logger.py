"""Weights & Biases, in a process of its own.

Its client has crashed its caller when the server went away, and may retry for minutes at the end of a run. So it lives
in a child that gets rows as lines of JSON: whatever happens to it, the run goes on, and ends in bounded time. Its files
stay in `wandb/` of the run directory, from where `wandb sync` sends what the server did not take.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alpagym_runtime.errors import ConfigError, SimulatorError
from alpagym_runtime.files import strict
from alpagym_runtime.machine import Machine
from alpagym_runtime.run_config import to_mapping
from alpagym_runtime.secrets import redacted
from alpagym_runtime.telemetry.loggers import Row, number_items

if TYPE_CHECKING:
    from alpagym_runtime.telemetry.config import WandbConfig
    from alpagym_runtime.telemetry.loggers import Logger

_CHILD = "alpagym_runtime.telemetry.wandb_child"
_PIPE_BYTES = 1 << 20
_START_S = 30.0  # importing the client takes seconds of its own, and many on a busy machine


class WandbLogger:
    """Hands rows to the child; see the module's text."""

    essential = False

    def __init__(self, config: WandbConfig, directory: Path, run_config: dict[str, Any]) -> None:
        self._config, self._folder = config, directory / "wandb"
        if self._folder.is_symlink():
            raise ConfigError(f"{self._folder} is a symbolic link; put the real folder there", key="run")
        self._is_new = not self._folder.exists()
        self._folder.mkdir(exist_ok=True)
        self._log = self._folder / "client.log"
        with self._log.open("ab") as log:
            self._child: subprocess.Popen[bytes] | None = subprocess.Popen(
                [sys.executable, "-m", _CHILD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # Ctrl-C is for the run, which then closes its loggers in order.
                start_new_session=True,
            )
        assert self._child.stdin is not None
        self._pipe = self._child.stdin.fileno()
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(self._pipe, False)
        online = config.mode_now == "online"
        self._send(
            {
                "mode": config.mode_now,
                "directory": str(directory),
                "name": config.name or directory.name,
                "project": config.project,
                "entity": config.entity,
                "tags": config.tags,
                "base_url": config.base_url,
                "timeout_s": config.timeout_s,
                "config": run_config,
            }
        )
        if online:
            self._wait_for_the_server()

    def log(self, row: Row) -> None:
        """Hand over one row.

        Raises:
            SimulatorError: the child is gone or no longer reads.

        """
        numbers = {f"{row.stage}/{name}": value for name, value in number_items(row.numbers)}
        self._send({"row": strict({**numbers, "total_steps": row.total_steps})})

    def rewind(self, rows: int, total_steps: int) -> None:
        """The server has no way back: curves over `total_steps` overlap where a resumed run made steps again."""

    def close(self) -> None:
        """End the child; a server that does not answer is waited for `timeout_s` and no longer."""
        child, self._child = self._child, None
        if child is None:
            return
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(OSError):
            child.stdin.close()  # the end of its input: it finishes
        try:
            # Offline nobody is waited for but the client itself, which may still be starting.
            patience_s = 0.0 if self._config.mode_now == "online" else _START_S
            code: int | None = child.wait(self._config.timeout_s + patience_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill(child)
            child.stdout.close()
        if code != 0:
            raise SimulatorError(f"not everything was sent; what is missing is kept: wandb sync {self._folder}/*run-*")

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message, allow_nan=False).encode() + b"\n"
        if self._child is None or self._child.poll() is not None:
            raise SimulatorError(f"its process has ended: {self._last_line()}; see {self._log}")
        try:
            written = os.write(self._pipe, data)
        except (BlockingIOError, BrokenPipeError) as err:
            raise SimulatorError(f"its process does not read: {err}; see {self._log}") from err
        if written != len(data):
            raise SimulatorError(f"its process does not read fast enough; see {self._log}")

    def _wait_for_the_server(self) -> None:
        answer = self._answer()
        if answer.get("ready"):
            return
        why = redacted(str(answer.get("error") or self._last_line() or "no answer"))
        child, self._child = self._child, None
        assert child is not None
        _kill(child)
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(OSError):
            child.stdin.close()
        child.stdout.close()
        if self._is_new:
            shutil.rmtree(self._folder, ignore_errors=True)
        entity = self._config.entity or "(the key's default)"
        raise ConfigError(
            f"W&B refused the run: {why} (entity {entity}, project {self._config.project!r}); change entity or project "
            f"to one that the key may write to, or mode=offline",
            key="logging.loggers.<wandb>.{entity,project,mode}",
        )

    def _answer(self) -> dict[str, Any]:
        assert self._child is not None
        assert self._child.stdout is not None
        deadline, text = time.monotonic() + self._config.timeout_s + _START_S, b""
        while b"\n" not in text:
            ready, _, _ = select.select([self._child.stdout], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._child.stdout.fileno(), 65536) if ready else b""
            if not part:
                return {} if ready else {"error": f"no answer within {self._config.timeout_s:g} s"}
            text += part
        return dict(json.loads(text.splitlines()[0]))

    def _last_line(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        return redacted(lines[-1]) if lines else ""


class _Disabled:
    """Mode disabled: no process, no file."""

    essential = False

    def log(self, row: Row) -> None:
        """Nothing."""

    def rewind(self, rows: int, total_steps: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def make_wandb_logger(config: WandbConfig, run: Any) -> Logger:
    """The logger that a section describes; see `WandbConfig.build`."""
    if config.mode_now == "disabled":
        return _Disabled()
    if Machine().version("wandb") is None:
        raise ConfigError("wandb is not installed: uv sync --extra wandb", key="logging.loggers")
    return WandbLogger(config, run.directory, to_mapping(run.config))


def _kill(child: subprocess.Popen[bytes]) -> None:
    # The client starts a server process of its own; both are in the child's session.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, 9)
    child.wait()
