"""What a run is doing, for whoever looks at its directory from elsewhere: `state.json`, and whether it still beats.

Written by the one process that holds the directory: which process that is, what it has started, which phase it is in,
and how it ended. A run that was killed says nothing of it: then the process is gone, and the phase is not `ended`. On
another machine processes cannot be looked at; there the file's age tells, by the file system's own clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from alpagym_runtime.children import Identity, identify
from alpagym_runtime.errors import CorruptFileError
from alpagym_runtime.files import read_json, strict
from alpagym_runtime.secrets import redacted

FILE = "state.json"
BEAT_S = 5.0
STALE_S = 60.0


@dataclass(frozen=True)
class RunState:
    """The content of `state.json`.

    Attributes:
        host: name of the machine.
        process: who holds the run.
        token: what everything that it started carries in its environment; "" where it starts nothing.
        phase: bring up | train | evaluate | rollout | tear down | ended.
        since: when the phase began, seconds since the epoch.
        children: what it started: name, command line, log, identity.
        containers: files of Docker Compose and the project's name, for what outlives its processes.
        facts: what there is to know, such as AlpaSim's commit.
        code, cause: how it ended: exit code, and the first cause of a failure.

    """

    host: str
    process: Identity
    token: str = ""
    phase: str = "bring up"
    since: float = 0.0
    children: tuple[dict[str, Any], ...] = ()
    containers: tuple[tuple[str, str], ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    code: int | None = None
    cause: str = ""

    @property
    def here(self) -> bool:
        """Whether this is its machine, not restarted since."""
        mine = identify(os.getpid())
        return self.host == socket.gethostname() and mine is not None and mine.boot == self.process.boot


class Tracker:
    """Keeps `state.json` of a directory; see `tracked`."""

    def __init__(self, directory: Path, state: RunState) -> None:
        self._path, self.state = directory / FILE, state
        self.update()

    def update(self, **changes: Any) -> None:
        """Write changed values; a new phase begins now."""
        if "phase" in changes:
            changes["since"] = time.time()
        if "cause" in changes:
            changes["cause"] = redacted(changes["cause"])
        self.state = replace(self.state, **changes)
        # One process writes here, so one name will do; a trainer clears away other temporary files as it starts.
        temporary = self._path.with_name(f".{FILE}.new")
        temporary.write_text(json.dumps(strict(asdict(self.state)), indent=2, allow_nan=False) + "\n")
        temporary.replace(self._path)

    def beat(self) -> None:
        """Say that we live."""
        with contextlib.suppress(OSError):
            os.utime(self._path)


@contextlib.contextmanager
def tracked(directory: Path, phase: str, token: str = "") -> Iterator[Tracker]:
    """Keep the state of a run that this process holds; at the end `code` says how it went.

    An exception that leaves the block is its cause, with code 1, unless the block has noted how it ended.
    """
    me = identify(os.getpid())
    assert me is not None
    tracker = Tracker(directory, RunState(socket.gethostname(), me, token, phase, time.time()))
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            tracker.beat()

    thread = threading.Thread(target=beat, name="run-state", daemon=True)
    thread.start()
    try:
        yield tracker
    except BaseException as err:
        if tracker.state.code is None:
            tracker.update(code=1, cause=f"{err}" or type(err).__name__)
        raise
    finally:
        over.set()
        thread.join()
        with contextlib.suppress(OSError):  # the directory may be gone, or the disk full
            tracker.update(phase="ended")


def read_state(directory: Path) -> RunState | None:
    """The state of a run directory; None where there is none that can be read."""
    try:
        data = read_json(directory / FILE)
        process = Identity(**data.pop("process"))
        pairs = tuple((str(file), str(project)) for file, project in data.pop("containers"))
        return RunState(process=process, containers=pairs, children=tuple(data.pop("children")), **data)
    except (OSError, CorruptFileError, TypeError, KeyError, ValueError, AttributeError):
        return None


Condition = Literal["running", "completed", "stopped", "failed", "killed", "lost", "new"]


def condition(directory: Path, state: RunState | None) -> Condition:
    """How a run stands: running; completed, stopped or failed by itself; killed; lost (on a machine that is silent)."""
    if state is None:
        return "new"
    if state.phase != "ended":
        if state.here:
            return "running" if state.process.alive else "killed"
        if state.host == socket.gethostname():
            return "killed"  # the machine was restarted
        return "running" if _age_s(directory) <= STALE_S else "lost"
    if state.code == 0:
        return "completed"
    return "stopped" if state.code is not None and state.code > 128 else "failed"


def _age_s(directory: Path) -> float:
    """Seconds since the last beat, by the clock of the file system."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".probe-", dir=directory) as probe:
            now_s = Path(probe.name).stat().st_mtime
    except OSError:
        now_s = time.time()
    try:
        return max(0.0, now_s - (directory / FILE).stat().st_mtime)
    except OSError:
        return float("inf")
