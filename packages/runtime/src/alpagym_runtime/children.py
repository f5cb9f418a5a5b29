"""Child processes that do not outlive their owner's wish.

Each child leads a session of its own, so a terminal's Ctrl-C reaches its owner only, and one signal reaches all that it
started. What leaves that session on purpose is found by a token that every descendant inherits in its environment, and
comes back to the owner when its parent ends (a subreaper, on Linux). Processes are told apart by their start time, not
by name, and signalled through a pidfd where the system has one: a number that another process has got is left alone.

Whoever starts programs stands on this: the host's supervisor, or a trainer with workers. It knows nothing of runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

OWNERS = "ALPAGYM_OWNERS"
"""The variable of the tokens; an owner inside an owner adds its own."""

_SET_CHILD_SUBREAPER = 36  # prctl(2)
_SET_PARENT_DEATH_SIGNAL = 1
_POLL_S = 0.05
_SETTLE_S = 1.0
_KILL_S = 5.0  # a process that survives SIGKILL longer waits for hardware


@dataclass(frozen=True)
class Identity:
    """Which process a number means: `started` differs if another one has got it, `boot` if the machine restarted."""

    pid: int
    started: str
    boot: str

    @property
    def alive(self) -> bool:
        """Whether exactly this process runs (a zombie does not)."""
        return self == identify(self.pid) and _runs(self.pid)

    def signal(self, number: int) -> bool:
        """Send a signal to this process and to no other; False if it is gone."""
        try:
            handle = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None
        except OSError:
            return False
        try:
            if not self.alive:
                return False
            if handle is None:
                os.kill(self.pid, number)
            else:
                signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return False
        finally:
            if handle is not None:
                os.close(handle)
        return True


def identify(pid: int) -> Identity | None:
    """The process that has a number now; None for none."""
    try:
        if sys.platform == "linux":
            # Ticks since boot: psutil's seconds move with the clock. The name before them may hold anything but a ')'.
            started = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        else:
            started, boot = str(psutil.Process(pid).create_time()), str(int(psutil.boot_time()))
    except (OSError, IndexError, psutil.Error):
        return None
    return Identity(pid, started, boot)


@dataclass(eq=False)
class Child:
    """A process that was started here.

    Attributes:
        name: for people.
        argv: its command line.
        log: where its output goes; None: where ours does.
        identity: which process it is.
        token: what its descendants carry.
        process, handle: to wait for it; a pidfd, or None.

    """

    name: str
    argv: tuple[str, ...]
    log: Path | None
    identity: Identity
    token: str
    process: subprocess.Popen[bytes] = field(repr=False)
    handle: int | None = field(repr=False, default=None)

    @property
    def pid(self) -> int:
        """Its number, and that of its session and process group."""
        return self.process.pid

    @property
    def code(self) -> int | None:
        """Exit code, negative for the signal that ended it; None while it runs."""
        return self.process.poll()

    def signal(self, number: int) -> None:
        """Send a signal to this process alone, not to what it started."""
        self.process.send_signal(number)

    def describe(self) -> dict[str, Any]:
        """Plain data for a file: name, command line, log, identity."""
        log = None if self.log is None else str(self.log)
        return {"name": self.name, "argv": list(self.argv), "log": log, **asdict(self.identity)}


class Children:
    """The processes of one owner; see the module's text.

    `close` (or leaving a `with` block) ends all of them. Not thread-safe: one thread starts, waits and stops.

    Args:
        token: marks every descendant; a new one by default.

    """

    def __init__(self, token: str | None = None) -> None:
        self.token = token or secrets.token_hex(16)
        self.started: list[Child] = []
        self._reported: set[int] = set()
        self._adopted: set[int] = set()
        if sys.platform == "linux":
            _prctl(_SET_CHILD_SUBREAPER, 1)

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log: Path | None = None,
        show: bool = False,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        keep_open: Sequence[int] = (),
    ) -> Child:
        """Start a program in a session of its own, its input empty.

        Args:
            name: for people.
            argv: program and arguments; no shell reads them.
            log: a file that its output is appended to; None leaves it where ours goes.
            show: with `log`: only errors go there, the rest where ours goes.
            environment: in place of ours; the owner's token is added.
            folder: its working directory.
            keep_open: file descriptors that it inherits.

        Raises:
            OSError: the program cannot be started; names it.

        """
        variables = dict(os.environ if environment is None else environment)
        token = f"{self.token}.{len(self.started)}"
        variables[OWNERS] = ":".join(part for part in (variables.get(OWNERS), token) if part)
        with contextlib.ExitStack() as stack:
            file = None if log is None else stack.enter_context(log.open("ab"))
            try:
                process = subprocess.Popen(
                    list(argv),
                    stdin=subprocess.DEVNULL,
                    stdout=None if show else file,
                    stderr=file,
                    env=variables,
                    cwd=folder,
                    pass_fds=tuple(keep_open),
                    start_new_session=True,
                )
            except OSError as err:
                raise OSError(err.errno, f"cannot start {name}: {err.strerror}", argv[0]) from err
        identity = identify(process.pid)
        assert identity is not None  # it is not reaped before we wait for it
        handle = None
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(process.pid)
        child = Child(name, tuple(argv), log, identity, token, process, handle)
        self.started.append(child)
        return child

    def ended(self, timeout_s: float) -> list[Child]:
        """Children that have ended and were not reported yet; waits up to `timeout_s` for one."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            found = [child for child in self.started if child.pid not in self._reported and child.code is not None]
            if found or left_s <= 0:
                self._reported.update(child.pid for child in found)
                return found
            running = [child for child in self.started if child.code is None]
            handles = [child.handle for child in running if child.handle is not None]
            if running and len(handles) == len(running):
                poll = select.poll()
                for handle in handles:
                    poll.register(handle, select.POLLIN)
                poll.poll(left_s * 1000.0)
            else:
                time.sleep(min(left_s, _POLL_S))

    def stop(self, children: Iterable[Child], grace_s: float) -> None:
        """End children and all that they started: SIGTERM, after `grace_s` SIGKILL; returns when none lives."""
        chosen = list(children)
        tokens, roots = [child.token for child in chosen], [child.identity for child in chosen]

        def alive() -> list[Identity]:
            self._reap()
            found = family(tokens, roots)
            self._adopted.update(identity.pid for identity in found)
            return found

        if chosen:
            end(alive, grace_s, roots)
            self._reap()

    def close(self, grace_s: float = 0.0) -> None:
        """End every child and everything that it started; idempotent."""
        self.stop(self.started, grace_s)
        for child in self.started:
            if child.handle is not None:
                os.close(child.handle)
                child.handle = None

    def _reap(self) -> None:
        """Let go of orphans that came to us; children are left to their own `code`."""
        own = {child.pid for child in self.started if child.code is None}
        for pid in self._adopted - own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def family(tokens: Iterable[str], roots: Iterable[Identity] = ()) -> list[Identity]:
    """Living processes, except this one, that carry one of the tokens, or descend from one of `roots` that lives."""
    wanted = tuple(tokens)
    top = {root.pid for root in roots if root == identify(root.pid)}
    parents: dict[int, int] = {}
    marked = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            parents[process.pid] = process.ppid()
            carried = process.environ().get(OWNERS, "").split(":")
            if any(part == token or part.startswith(f"{token}.") for part in carried for token in wanted):
                marked.add(process.pid)
    found = []
    for pid in parents:
        line, above = {pid}, parents[pid]
        while above in parents and above not in line:
            line.add(above)
            above = parents[above]
        identity = identify(pid) if pid in marked or line & top else None
        if identity is not None and pid != os.getpid() and _runs(pid):
            found.append(identity)
    return found


def end(alive: Callable[[], list[Identity]], grace_s: float, groups: Iterable[Identity] = ()) -> list[Identity]:
    """End the processes that `alive()` lists: SIGTERM, after `grace_s` SIGKILL; what is left after that.

    Those in `groups` come first. Others left their group on purpose, and may be there to clear up after it, so they get
    a second more before each signal.

    Args:
        alive: lists them anew, since they may start others while they end.
        grace_s: between the signals; 0 sends SIGKILL alone.
        groups: leaders of process groups; the group gets its SIGTERM as one.

    """
    leaders = {leader.pid for leader in groups}
    left = alive()

    def grouped() -> list[Identity]:
        return [identity for identity in left if _group(identity.pid) in leaders]

    if grace_s > 0:
        # A group that has members keeps its number, so this meets nobody else.
        for pid in leaders & {_group(identity.pid) for identity in left}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGTERM)
        deadline_s, alone_s, told = time.monotonic() + grace_s, None, False
        while left and time.monotonic() < deadline_s:
            if alone_s is None and not grouped():
                alone_s = time.monotonic()
            if alone_s is not None and not told and time.monotonic() - alone_s > _SETTLE_S:
                told = True
                for identity in left:
                    identity.signal(signal.SIGTERM)
            time.sleep(_POLL_S)
            left = alive()
    settled_s = time.monotonic() + _SETTLE_S
    deadline_s = settled_s + _KILL_S
    while left and time.monotonic() < deadline_s:
        for identity in left if time.monotonic() > settled_s or not leaders else grouped():
            identity.signal(signal.SIGKILL)
        time.sleep(_POLL_S)
        left = alive()
    return left


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Get a signal when the thread that started this process ends; Linux only, elsewhere nothing."""
    if sys.platform == "linux":
        parent = os.getppid()
        _prctl(_SET_PARENT_DEATH_SIGNAL, number)
        if os.getppid() != parent:  # it ended before we asked
            os.kill(os.getpid(), number)


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    except (psutil.Error, OSError):
        return False


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
