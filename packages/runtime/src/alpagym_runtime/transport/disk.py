"""Episodes as files in a folder that both ends see; the format is that of stored episodes, checksums included.

A file appears under its name whole or not at all. Nothing is synced: an episode on its way need not survive a power
cut. Whoever discards a handle removes the file. What nobody discards goes by rule: by the sender, for room and by age;
and by age also when an end starts in the folder, so that a killed sender's files do not stay.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from pathlib import Path
from uuid import uuid4

from alpagym_runtime.episodes.format import read, save
from alpagym_runtime.files import remove_partials
from alpagym_runtime.transport.config import DiskConfig
from alpagym_runtime.transport.rules import Ledger
from alpagym_runtime.types import Episode

_HANDLE = re.compile(r"disk-[0-9a-f]{16}-[0-9]{1,12}")
LONGEST_WRITE_S = 3600.0


class DiskTransport:
    """See `types.Transport`; many processes and machines may use one folder."""

    def __init__(self, folder: Path, config: DiskConfig) -> None:
        self._folder = folder
        self._token = uuid4().hex[:16]
        self._numbers = itertools.count()
        self._ledger = Ledger(config.limit_mb * 1_000_000, config.expire_s)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise OSError(f"cannot make {folder}: {err.strerror}; choose another folder: transport.path=DIR") from err
        remove_partials(folder, older_than_s=LONGEST_WRITE_S)
        oldest = time.time() - config.expire_s
        for path in folder.glob("disk-*.arrow"):
            try:
                if path.lstat().st_mtime < oldest:
                    path.unlink()
            except FileNotFoundError:
                continue

    def send(self, episode: Episode) -> str:
        """Write an episode; its handle names the file.

        Raises:
            OSError: the folder is full, read-only or gone; names path, size and remedy.

        """
        handle = f"disk-{self._token}-{next(self._numbers)}"
        remedy = "free some space, lower transport.limit_mb, or choose another folder: transport.path=DIR"
        size = save(episode, self._path(handle), "all", durable=False, remedy=remedy)
        self._ledger.keep_only(lambda other: other == handle or self._path(other).exists())
        for old in self._ledger.add(handle, size):
            self._path(old).unlink(missing_ok=True)
        return handle

    def receive(self, handle: str) -> Episode:
        """The episode behind a handle, mapped and its checksums compared.

        Raises:
            KeyError: it was discarded, released by rule, or never sent.
            CorruptFileError: the file is damaged.

        """
        if not _HANDLE.fullmatch(handle):
            raise self._ledger.missing(handle)
        try:
            return read(self._path(handle))
        except FileNotFoundError:
            pass
        # A network filesystem may remember that the name was free; reading the folder makes it look again.
        os.listdir(self._folder)
        try:
            return read(self._path(handle))
        except FileNotFoundError:
            raise self._ledger.missing(handle) from None

    def discard(self, handle: str) -> None:
        """Remove the file; an unknown handle is fine."""
        if _HANDLE.fullmatch(handle):
            self._path(handle).unlink(missing_ok=True)
            self._ledger.remove(handle)

    def close(self) -> None:
        """Remove everything that this end sent."""
        for handle in self._ledger.handles():
            self.discard(handle)

    def _path(self, handle: str) -> Path:
        return self._folder / f"{handle}.arrow"
