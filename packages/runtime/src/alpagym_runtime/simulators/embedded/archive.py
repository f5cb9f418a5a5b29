"""Members of a scene file: a zip (`.usdz`) or a folder, read without trusting it and written in one step.

A file from a stranger may hold absolute names, names that climb out of it, links, or members that swell when unpacked.
Nothing is ever unpacked to disk; members are read by name, bounded, and a container with such names is refused whole.
"""

from __future__ import annotations

import json
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from alpagym_runtime.errors import SceneError
from alpagym_runtime.files import TEMPORARY_PREFIX, replacing, sync_folder

JSON_BYTES_MAX = 20_000_000
"""Parsed JSON takes up to twenty times its bytes in memory."""

DIRECTORY_BYTES_MAX = 16_000_000


class Members:
    """The members of one container; `path` is a zip or a folder.

    Raises:
        SceneError: not a container, or one that is refused; names file and reason.

    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._zip: zipfile.ZipFile | None = None
        try:
            if path.is_dir():
                self.names = frozenset(child.name for child in path.iterdir())
                return
            size = path.stat().st_size
            if size == 0:
                raise SceneError(f"{path}: the file is empty")
            _check_directory(path, size)
            self._zip = zipfile.ZipFile(path)
        except zipfile.BadZipFile as err:
            raise SceneError(f"{path}: not a whole zip, perhaps cut: {err}") from err
        except (ValueError, NotImplementedError, EOFError, UnicodeDecodeError) as err:
            if isinstance(err, SceneError):
                raise
            raise SceneError(f"{path}: its zip directory cannot be read: {err}") from err
        except OSError as err:
            raise SceneError(f"{path}: cannot be read: {err.strerror or err}") from err
        try:
            self.names = frozenset(self._checked())
        except SceneError:
            self.close()
            raise

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._zip is not None:
            self._zip.close()

    def _checked(self) -> list[str]:
        assert self._zip is not None
        names: set[str] = set()
        for info in self._zip.infolist():
            name = info.orig_filename
            parts = PurePosixPath(name).parts
            if name.startswith("/") or "\\" in name or "\0" in name or ".." in parts or name[1:2] == ":":
                raise SceneError(f"{self.path}: member {name[:80]!r} leads out of the file; refused")
            kind = stat.S_IFMT(info.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise SceneError(f"{self.path}: member {name[:80]!r} is a link or device; refused")
            if name in names:
                raise SceneError(f"{self.path}: member {name[:80]!r} occurs twice")
            names.add(name)
        return list(names)

    def read(self, name: str, limit: int) -> bytes:
        """A member's bytes, at most `limit` of them."""
        where = f"{self.path}: {name}"
        if name not in self.names:
            raise SceneError(f"{where}: no such member")
        try:
            if self._zip is None:
                member = self.path / name
                if member.is_symlink() or not member.is_file():
                    raise SceneError(f"{where}: a link or no plain file; refused")
                if member.stat().st_size > limit:
                    raise SceneError(f"{where}: {member.stat().st_size} bytes are more than {limit}")
                data = member.read_bytes()
            else:
                info = self._zip.getinfo(name)
                if info.file_size > limit:
                    raise SceneError(f"{where}: {info.file_size} bytes are more than {limit}")
                with self._zip.open(info) as file:
                    # The size that a bomb declares is not the size that it has.
                    data = file.read(limit + 1)
        except OSError as err:
            raise SceneError(f"{where}: cannot be read: {err.strerror or err}") from err
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, ValueError) as err:
            if isinstance(err, SceneError):
                raise
            raise SceneError(f"{where}: cannot be unpacked: {err}") from err
        if len(data) > limit:
            raise SceneError(f"{where}: more than {limit} bytes")
        return data

    def json(self, name: str) -> Any:
        """A member as strict JSON: no NaN, no infinity, at most `JSON_BYTES_MAX`."""
        data = self.read(name, JSON_BYTES_MAX)
        if not data.strip():
            raise SceneError(f"{self.path}: {name}: is empty")
        try:
            return json.loads(data, parse_constant=_refuse)
        except (ValueError, RecursionError) as err:
            raise SceneError(f"{self.path}: {name}: not whole, strict JSON: {str(err)[:200]}") from err


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _check_directory(path: Path, size: int) -> None:
    """Bound the central directory before `zipfile` reads it: a record of 46 bytes becomes an object of 500."""
    with path.open("rb") as file:
        tail = min(size, 65_557)
        file.seek(size - tail)
        data = file.read(tail)
    at = data.rfind(b"PK\x05\x06")
    if at < 0 or len(data) - at < 22:
        raise SceneError(f"{path}: not a whole zip, perhaps cut: no end record in its last {tail} of {size} bytes")
    count = int.from_bytes(data[at + 10 : at + 12], "little")
    length = int.from_bytes(data[at + 12 : at + 16], "little")
    if length > DIRECTORY_BYTES_MAX or (count == 0xFFFF and length == 0xFFFFFFFF):
        raise SceneError(f"{path}: a zip directory of {length} bytes; expected at most {DIRECTORY_BYTES_MAX}")


def write_members(path: Path, members: Mapping[str, bytes]) -> None:
    """Write a zip with stored entries (`.usdz`) or a folder (any other name); it appears whole or not at all.

    The same members give the same bytes. A folder that exists is an error.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".usdz":
        with replacing(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as file:
            for name, data in members.items():
                info = zipfile.ZipInfo(name)  # dated 1980
                info.external_attr = (stat.S_IFREG | 0o644) << 16
                file.writestr(info, data)
        return
    if path.exists():
        raise FileExistsError(f"{path} exists; give a new name or one that ends in .usdz")
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=path.parent))
    try:
        for name, data in members.items():
            (folder / name).write_bytes(data)
        folder.chmod(0o755)
        sync_folder(folder)
        folder.rename(path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    sync_folder(path.parent)
