"""Episodes in the memory of one machine: an end writes a segment once, any other maps it without a copy.

A segment is an episode file in a folder of /dev/shm that belongs to one owner, the process that sent. Whoever discards
the handle unlinks it; the memory goes with the last view of it. When the owner dies, by whatever signal, a guardian
(one `sh` that waits on a pipe from the owner) removes its folder; should that be killed too, the next end that starts
on the machine does it, for it finds the owner's lock free.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import shutil
import stat
import subprocess
import tempfile
import weakref
from functools import lru_cache
from pathlib import Path
from threading import Lock
from uuid import uuid4

from alpagym_runtime.episodes.format import read, save
from alpagym_runtime.transport.config import SharedMemoryConfig
from alpagym_runtime.transport.rules import Ledger
from alpagym_runtime.types import Episode

_HANDLE = re.compile(r"shm-(?P<owner>[0-9a-f]{16})-(?P<number>[0-9]{1,12})")
_LOCK = "owner.lock"
SWEEP = 32
"""Handles that are looked for at a time, at least, to see which are gone."""


@lru_cache(maxsize=1)
def root() -> Path:
    """Where segments live: /dev/shm, or the folder of temporary files where a system has none."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def _prefix() -> str:
    return f"alpagym-{os.getuid()}-"


class SharedMemoryTransport:
    """See `types.Transport`; for processes of one user on one machine."""

    def __init__(self, config: SharedMemoryConfig) -> None:
        self._numbers = itertools.count()
        self._room = config.limit_mb * 1_000_000
        self._ledger = Ledger(self._room, config.expire_s)
        self._left = SWEEP
        self._lock = Lock()
        self._owned: _OwnedFolder | None = None
        remove_orphans()

    def send(self, episode: Episode) -> str:
        """Write a segment; arrays go in as they are, overlapping pictures included, so that a receiver maps them.

        Raises:
            OSError: there is no room; names path, size and remedy.

        """
        with self._lock:
            if self._owned is None:
                self._owned = _OwnedFolder()
            owned = self._owned
        handle = f"shm-{owned.token}-{next(self._numbers)}"
        path = _path(handle)
        assert path is not None
        remedy = "discard episodes sooner, lower transport.limit_mb, give /dev/shm more room, or use transport=disk"
        size = save(episode, path, "dense", durable=False, remedy=remedy)
        # What others discarded is gone without a word; asking after each costs as much as a small episode.
        if self._ledger.held_bytes + size > self._room or len(self._ledger.handles()) >= 2 * self._left:
            self._ledger.keep_only(_exists)
            self._left = max(SWEEP, len(self._ledger.handles()))
        for old in self._ledger.add(handle, size):
            _unlink(old)
        return handle

    def receive(self, handle: str) -> Episode:
        """The episode behind a handle: views of the segment, private to the receiver if it writes to them.

        Raises:
            KeyError: it was discarded, released by rule, never sent, or its owner is gone.

        """
        path = _path(handle)
        if path is None:
            raise self._ledger.missing(handle)
        try:
            return read(path, verify=False)
        except (FileNotFoundError, NotADirectoryError):
            raise self._ledger.missing(handle) from None

    def discard(self, handle: str) -> None:
        """Unlink it; its memory is free when the last view is gone. An unknown handle is fine."""
        _unlink(handle)
        self._ledger.remove(handle)

    def close(self) -> None:
        """Free everything that this end sent; a later send starts anew."""
        with self._lock:
            owned, self._owned = self._owned, None
        if owned is not None:
            owned.close()
        for handle in self._ledger.handles():
            self._ledger.remove(handle)


class _OwnedFolder:
    """A folder of segments, a lock that says its owner lives, and the guardian that outlives the owner."""

    def __init__(self) -> None:
        self.token = uuid4().hex[:16]
        self.path = root() / f"{_prefix()}{self.token}"
        # Locked before it has its name, so that nobody takes it for an orphan.
        temporary = Path(tempfile.mkdtemp(prefix=f".{_prefix()}", dir=root()))
        handle = os.open(temporary / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
        temporary.rename(self.path)
        guardian = subprocess.Popen(
            ["/bin/sh", "-c", 'cat >/dev/null; rm -rf -- "$1"', "alpagym-guardian", str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a signal to the owner's group spares it
        )
        self.close = weakref.finalize(self, _close_owned, self.path, handle, guardian, os.getpid())


def _close_owned(path: Path, handle: int, guardian: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child that ends is not the owner's end
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.close(handle)
    assert guardian.stdin is not None
    guardian.stdin.close()
    guardian.wait()


def remove_orphans() -> list[Path]:
    """Remove folders of this user whose owner is gone; returns them."""
    removed = []
    for folder in root().glob(f"{_prefix()}*"):
        if not _is_ours(folder):
            continue
        try:
            handle = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue  # its owner is just removing it
        except OSError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
        finally:
            os.close(handle)
    return removed


def _is_ours(folder: Path) -> bool:
    """A real folder of this user: another's could hold anything."""
    try:
        info = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()


def _path(handle: str) -> Path | None:
    match = _HANDLE.fullmatch(handle)
    if match is None:
        return None
    folder = root() / f"{_prefix()}{match['owner']}"
    return folder / f"{match['number']}.arrow" if _is_ours(folder) else None


def _exists(handle: str) -> bool:
    path = _path(handle)
    return path is not None and path.exists()


def _unlink(handle: str) -> None:
    path = _path(handle)
    if path is not None:
        path.unlink(missing_ok=True)
