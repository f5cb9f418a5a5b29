"""Files that are whole or absent: written beside their place, synced, then renamed into it."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alpagym_runtime.errors import CorruptFileError

TEMPORARY_PREFIX = ".partial-"


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` under the final name in one step; a link at `path` is replaced, never followed."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A temporary name in the same folder; renamed to `path` if the block ends well, removed if not.

    Without `durable` nothing is synced: whole for every process at once, but perhaps lost with the machine's power.
    """
    handle, name = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        if durable:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
        if durable:
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_partials(folder: Path, *, older_than_s: float = 0.0) -> None:
    """Remove what a killed writer left; nothing else. Where others may be writing, give an age that no write takes."""
    for path in folder.glob(f"{TEMPORARY_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            info = path.lstat()
            if stat.S_ISREG(info.st_mode) and (not older_than_s or time.time() - info.st_mtime > older_than_s):
                path.unlink()


def write_json(path: Path, data: Any) -> None:
    """Strict JSON (no NaN token), indented, atomically."""
    write_atomic(path, (json.dumps(strict(data), indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """The data of a JSON file.

    Raises:
        CorruptFileError: empty or cut; the message names path, size and the remedy.

    """
    try:
        return json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as err:
        raise CorruptFileError(
            f"{path} ({path.stat().st_size} bytes) is not whole JSON: {err}; remove it and run again"
        ) from err


def strict(data: Any) -> Any:
    """Plain data for strict JSON: numpy scalars become Python's, NaN and infinities null."""
    if isinstance(data, dict):
        return {str(key): strict(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [strict(value) for value in data]
    if hasattr(data, "item") and getattr(data, "ndim", 0) == 0:
        data = data.item()
    if isinstance(data, float) and not (data == data and abs(data) != float("inf")):
        return None
    return data
