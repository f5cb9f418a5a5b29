"""What workers tell the run's own process: files in the run directory, so that it needs no port and no Cosmos-RL.

cosmos/steps.jsonl            a line a training step: its numbers
cosmos/exports/step_N/        weights of a step with a checkpoint, until the run's process has taken them
cosmos/workers/NAME.json      a worker that is there, what it did so far, and why it ended
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from alpagym_runtime.children import Identity, identify
from alpagym_runtime.files import replacing, strict
from alpagym_runtime.trainers.cosmos.tables import FOLDER

_STEP = re.compile(r"step_(\d+)")
_LITTLE_BYTES = 1 << 30


@dataclass(frozen=True)
class Step:
    """A finished training step: its number from 1, of how many, its seconds, and what to log."""

    step: int
    total: int
    seconds: float
    numbers: dict[str, float]


@dataclass
class Worker:
    """A worker process of Cosmos-RL.

    Attributes:
        role: policy | rollout.
        host, process: where it is.
        episodes: that it made or trained on.
        busy_s: seconds that it spent on them, since it began.
        lived_s: seconds since it began.
        failure: why it ended; "" while it has not failed.
        ended: whether it has come to its end, and was not killed.

    """

    role: str
    host: str
    process: Identity
    episodes: int = 0
    busy_s: float = 0.0
    lived_s: float = 0.0
    failure: str = ""
    ended: bool = False


class Journal:
    """See the module's text."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / FOLDER
        self._steps = self._folder / "steps.jsonl"

    # ------------------------------------------------------------ steps

    def add(self, step: Step) -> None:
        """Tell of a step."""
        with self._steps.open("a") as file:
            file.write(json.dumps(strict(asdict(step)), allow_nan=False) + "\n")

    def steps(self, after: int) -> list[Step]:
        """Steps beyond a number, in order, as far as they follow each other."""
        try:
            text = self._steps.read_text()
        except FileNotFoundError:
            return []
        found: dict[int, Step] = {}
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):  # the last one may be half written
                data = json.loads(line)
                # JSON has no NaN: it was written as null.
                numbers = {name: math.nan if value is None else value for name, value in data["numbers"].items()}
                found[data["step"]] = Step(data["step"], data["total"], data["seconds"], numbers)
        out: list[Step] = []
        while (number := after + 1 + len(out)) in found:
            out.append(found[number])
        return out

    @property
    def told(self) -> int:
        """Grows with each step that is told of, be it for the first time or again."""
        return self._steps.stat().st_size if self._steps.is_file() else 0

    def complete(self, upto: int, total: int) -> None:
        """Tell of the steps up to a number of which nobody did: a worker was killed between checkpoint and telling."""
        for number in range(len(self.steps(0)) + 1, upto + 1):
            self.add(Step(number, total, 0.0, {}))

    def forget(self, after: int) -> None:
        """Take back the steps beyond a number: they will be made again."""
        self._folder.mkdir(exist_ok=True)
        kept = [step for step in self.steps(0) if step.step <= after]
        lines = [json.dumps(strict(asdict(step)), allow_nan=False) + "\n" for step in kept]
        with replacing(self._steps) as temporary:
            temporary.write_text("".join(lines))
        for step in self._exported():
            if step > after:
                shutil.rmtree(self._export(step))
        for torn in (self._folder / "exports").glob(".step_*"):  # of a writer that was killed
            shutil.rmtree(torn, ignore_errors=True)

    # ------------------------------------------------------------ weights

    def export(self, step: int, weights: Mapping[str, Any]) -> None:
        """Leave the weights of a step, whole or not at all."""
        from safetensors.torch import save_file

        place = self._export(step)
        temporary = place.with_name(f".{place.name}-{os.getpid()}")
        temporary.mkdir(parents=True, exist_ok=True)
        # Copies: weights that are tied share their memory, of which safetensors takes none.
        tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in weights.items()}
        try:
            save_file(tensors, temporary / "model.safetensors")
            shutil.rmtree(place, ignore_errors=True)
            temporary.replace(place)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)  # on a full disk it would be in everybody's way
            raise

    def exported(self, step: int) -> Path | None:
        """The folder of a step's weights; None where they were not kept."""
        place = self._export(step)
        return place if place.is_dir() else None

    def release(self, before: int) -> None:
        """Remove the weights of steps before a number."""
        for step in self._exported():
            if step < before:
                shutil.rmtree(self._export(step), ignore_errors=True)

    def _exported(self) -> list[int]:
        folder = self._folder / "exports"
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return sorted(int(match[1]) for name in names if (match := _STEP.fullmatch(name)))

    def _export(self, step: int) -> Path:
        return self._folder / "exports" / f"step_{step}"

    # ------------------------------------------------------------ workers

    def workers(self) -> dict[str, Worker]:
        """Workers that said that they are there, by name."""
        out = {}
        for path in sorted((self._folder / "workers").glob("[!.]*.json")):
            try:
                data = json.loads(path.read_text())
            except (FileNotFoundError, json.JSONDecodeError):
                continue
            out[path.stem] = Worker(**{**data, "process": Identity(**data["process"])})
        return out

    def clear_workers(self) -> None:
        """Before a new start."""
        shutil.rmtree(self._folder / "workers", ignore_errors=True)


@dataclass
class Presence:
    """This process as a worker of a run; it tells what it does.

    Attributes:
        directory: the run's.
        role: policy | rollout.

    """

    directory: Path
    role: str
    _episodes: int = 0
    _busy_s: float = 0.0
    _failure: str = ""
    _began_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._tell()
        atexit.register(self._leave)

    def did(self, episodes: int, busy_s: float) -> None:
        """Count episodes that were made or trained on, and the time they took."""
        self._episodes += episodes
        self._busy_s += busy_s
        self._try_to_tell()

    def failed(self, why: str) -> None:
        """Say why this process is about to end."""
        self._failure = why
        with contextlib.suppress(OSError):
            # Writers of tensors hide the reason: "unexpected pos 64 vs 0".
            if (free := shutil.disk_usage(self.directory).free) < _LITTLE_BYTES:
                self._failure += f" ({free / 1e9:.2f} GB free at {self.directory})"
        print(f"{self.role} worker ends: {self._failure}", file=sys.stderr, flush=True)
        self._try_to_tell()

    def _leave(self) -> None:
        """Tell of the end, or of the error that nobody caught: such as that of a transport on a full disk."""
        error = getattr(sys, "last_value", None)
        if error is None or self._failure:
            self._try_to_tell(ended=not self._failure)
        else:
            self.failed(f"{type(error).__name__}: {error}")

    def _try_to_tell(self, ended: bool = False) -> None:
        """What is told helps people; on a full disk the work, or its own error, goes on without."""
        with contextlib.suppress(OSError):
            self._tell(ended)

    def _tell(self, ended: bool = False) -> None:
        me = identify(os.getpid())
        assert me is not None
        lived_s = time.monotonic() - self._began_s
        host = socket.gethostname()
        worker = Worker(self.role, host, me, self._episodes, self._busy_s, lived_s, self._failure, ended)
        folder = self.directory / FOLDER / "workers"
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / f"{self.role}-{host}-{os.getpid()}.json", durable=False) as temporary:
            temporary.write_text(json.dumps(asdict(worker)))
