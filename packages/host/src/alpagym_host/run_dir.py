"""Run directories: made once, owned by one process at a time, described by one frozen config.

    <run.root>/<run.name>-<YYYYmmdd-HHMMSS>-<6 hex digits>/
        config.yaml    the frozen config; never written again
        command        train, evaluate or rollout: what `resume` continues
        state.json     what it is doing (alpagym_host.run_state)
        .lock          held by the process that works here
    <run.root>/latest  a link to the newest

mkdir decides who owns a name, so runs that start in the same second never share a directory. The kernel drops a lock
with its last holder; a lock file that is left behind is no lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal, cast, get_args

from alpagym_host import run_state
from alpagym_host.compose import check_run_name, to_yaml
from alpagym_plugins import ConfigError
from alpagym_runtime.files import write_atomic
from alpagym_runtime.run_config import RunConfig

Command = Literal["train", "evaluate", "rollout"]
LATEST = "latest"
_LOCK = ".lock"
_CONFIG = "config.yaml"
_COMMAND = "command"


def create(
    config: RunConfig, command: Command, directory: Path | None = None, *, now: Callable[[], datetime] = datetime.now
) -> Path:
    """A new run directory that holds the frozen config; absolute.

    Args:
        config: the run; its name and root say where.
        command: what it is for.
        directory: exactly this one in place of a generated name; it must not exist.
        now: the clock of the generated name.

    Raises:
        ConfigError: the directory exists or cannot be made; says path, owner and mode of what is in the way.

    """
    root = Path(config.run.root).expanduser().absolute()
    if directory is None:
        made = _make_unique(root, config.run.name, now())
    else:
        made = directory.expanduser().absolute()
        _make(made.parent, made, exclusive=True)
    _fill(made, config, command)
    if made.parent == root:
        _point_latest(root, made.name)
    return made


def create_several(
    configs: Sequence[RunConfig], command: Command, *, now: Callable[[], datetime] = datetime.now
) -> list[Path]:
    """Run directories of one name, in order: the number of each is the end of its name; absolute.

    Args:
        configs: the runs, all of one name and root.
        command: what they are for.
        now: the clock of the generated name.

    Raises:
        ConfigError: one cannot be made; none is left behind.

    """
    root, name = Path(configs[0].run.root).expanduser().absolute(), configs[0].run.name
    first = _make_unique(root, name, now(), "-0")
    made = [first]
    try:
        for index, config in enumerate(configs):
            if index:
                directory = first.with_name(f"{first.name.removesuffix('0')}{index}")
                _make(root, directory, exclusive=True)
                made.append(directory)
            _fill(made[index], config, command)
    except Exception:
        for directory in made:
            discard(directory)
        raise
    _point_latest(root, made[-1].name)
    return made


def discard(directory: Path) -> None:
    """Remove a new run directory whose request turned out wrong; one that holds a run's files stays."""
    ours = {_CONFIG, _COMMAND, _LOCK, run_state.FILE, "job.sbatch"}
    with contextlib.suppress(OSError):
        (directory / "logs").rmdir()  # if it is empty
    if {path.name for path in directory.iterdir()} <= ours:
        for name in ours:
            (directory / name).unlink(missing_ok=True)
        directory.rmdir()
        latest = directory.parent / LATEST
        if latest.is_symlink() and os.readlink(latest) == directory.name:
            latest.unlink()


def open_existing(path: Path) -> Path:
    """The absolute path of a run directory that `create` made; nothing in it is written.

    Raises:
        ConfigError: it is no run directory, or holds a symbolic link that writes would follow out of it.

    """
    directory = path.expanduser()
    if not (directory / _CONFIG).is_file():
        what = "is no run directory (no config.yaml)" if directory.exists() else "does not exist"
        raise ConfigError(f"{path} {what}; a run directory is what `alpagym train` prints when it starts")
    directory = directory.resolve()
    for found in (*directory.iterdir(), *directory.glob("*/*")):
        if found.is_symlink() and not found.resolve().is_relative_to(directory):
            raise ConfigError(f"{found} is a symbolic link to {os.readlink(found)}; put the real file or folder there")
    return directory


def command_of(directory: Path) -> Command:
    """What a run directory was made for: "train", "evaluate" or "rollout"."""
    command = (directory / _COMMAND).read_text().strip() if (directory / _COMMAND).is_file() else ""
    if command not in get_args(Command):
        raise ConfigError(
            f"{directory / _COMMAND} holds {command!r}, not train, evaluate or rollout; is this a run directory?"
        )
    return cast("Command", command)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[int]:
    """Hold a run directory for this process, and for children that inherit the file descriptor that it gives.

    Raises:
        ConfigError: another process works in it; says which, where and since when.

    """
    path = directory / _LOCK
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as err:
        raise ConfigError(f"cannot lock {directory}: {err.strerror}; {_describe(directory)}") from err
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            raise ConfigError(
                f"{directory} is in use by {_holder(handle)}; stop it first: alpagym stop {directory}, and if that "
                f"process was killed: alpagym clean {directory}"
            ) from err
        except OSError:
            pass  # Some cluster filesystems have no locks; a run there is still the only one that mkdir gave this name.
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps(_myself()).encode())
        yield handle
        os.ftruncate(handle, 0)
    finally:
        os.close(handle)


def _fill(made: Path, config: RunConfig, command: Command) -> None:
    write_atomic(made / _COMMAND, command.encode())
    write_atomic(made / _CONFIG, to_yaml(config).encode())


def _make_unique(root: Path, name: str, now: datetime, end: str = "") -> Path:
    check_run_name(name)
    while True:
        directory = root / f"{name}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}{end}"
        if _make(root, directory, exclusive=False):
            return directory


def _make(parent: Path, directory: Path, *, exclusive: bool) -> bool:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir()
    except OSError as err:
        if isinstance(err, FileExistsError) and os.path.lexists(directory):
            if not exclusive:
                return False
            raise ConfigError(f"{directory} exists; to continue it: alpagym resume {directory}") from err
        raise ConfigError(
            f"cannot make {directory}: {err.strerror}; {_describe(parent)}; choose another folder: run.root=DIR"
        ) from err
    return True


def _describe(path: Path) -> str:
    """Owner and mode of a path or of its nearest parent that exists."""
    while True:
        try:
            info = path.stat()
            break
        except OSError:
            if path == path.parent:
                return f"{path} cannot be read"
            path = path.parent
    try:
        owner = pwd.getpwuid(info.st_uid).pw_name
    except KeyError:
        owner = str(info.st_uid)
    return f"{path} belongs to {owner} and has mode {stat.filemode(info.st_mode)}"


def _point_latest(root: Path, name: str) -> None:
    temporary = root / f".{LATEST}.{secrets.token_hex(6)}"
    # A convenience: some filesystems have no links, and a folder of the user's may be called so.
    try:
        temporary.symlink_to(name)
        os.replace(temporary, root / LATEST)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _myself() -> dict[str, str | int]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}


def _holder(handle: int) -> str:
    try:
        found = json.loads(os.pread(handle, 4096, 0))
        return f"process {found['pid']} on {found['host']} since {found['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
