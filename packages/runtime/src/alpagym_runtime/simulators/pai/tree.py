"""Where the dataset's files are: a plain tree, or a hub cache read offline; nothing is ever fetched.

A tree holds `features.csv`, a clip index, `metadata/` and, per feature and chunk, a zip whose members are stored (not
compressed) or a parquet table. Zips are opened once, members are read as windows of the file.
"""

from __future__ import annotations

import csv
import io
import json
import os
import struct
import weakref
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from alpagym_runtime.errors import ConfigError, CorruptFileError, SceneError

REPOSITORY = "nvidia/PhysicalAI-Autonomous-Vehicles"
_CACHED = "datasets--" + REPOSITORY.replace("/", "--")
_OPEN_ZIPS = 64
_REMEDY = "download it again (alpagym pai download)"


@dataclass(frozen=True)
class Feature:
    """A row of features.csv.

    Attributes:
        name: such as `camera_front_wide_120fov`.
        directory: `camera`, `labels`, `calibration`, ….
        chunk_path: template with `{chunk_id:04d}`.
        members: alias -> member name in the zip with `{clip_id}`; empty for a table a chunk.

    """

    name: str
    directory: str
    chunk_path: str
    members: dict[str, str]

    def path(self, chunk: int) -> str:
        """Of a chunk's file, relative to the tree."""
        return self.chunk_path.format(chunk_id=chunk)


def find_root(path: Path, revision: str | None = None) -> Path:
    """The folder that holds features.csv: `path` itself, or a snapshot of the hub cache that it is.

    Args:
        path: a plain tree, a hub cache (`…/hub`), the dataset's folder in one, or a snapshot.
        revision: of a hub cache; null takes `refs/main`, or the only snapshot.

    Raises:
        ConfigError: none of these.

    """
    if (path / "features.csv").is_file():
        return path
    for repository in (path / _CACHED, path / "hub" / _CACHED, path):
        snapshots = repository / "snapshots"
        if not snapshots.is_dir():
            continue
        main = repository / "refs" / "main"
        there = sorted(p.name for p in snapshots.iterdir() if p.is_dir())
        wanted = revision or (main.read_text().strip() if main.is_file() else there[0] if len(there) == 1 else "")
        if wanted not in there:
            raise ConfigError(
                f"{repository} has the snapshots {', '.join(there) or 'none'}, not {wanted or 'a refs/main'}",
                key="dataset.revision",
            )
        if not (snapshots / wanted / "features.csv").is_file():
            raise ConfigError(f"{snapshots / wanted} has no features.csv; {_REMEDY}", key="dataset.path")
        return snapshots / wanted
    raise ConfigError(
        f"{path} is neither a tree with features.csv nor a hub cache of {REPOSITORY}; make a synthetic one with "
        f"`alpagym pai make-synthetic {path}`, or `alpagym pai download --output-dir {path}`",
        key="dataset.path",
    )


class Tree:
    """Reads one dataset folder. Not safe for threads: each worker opens its own."""

    def __init__(self, path: Path, revision: str | None = None) -> None:
        self.root = find_root(path, revision)
        self.features = _features(self.root / "features.csv")
        self._zips: OrderedDict[Path, ZipWindows] = OrderedDict()

    def feature(self, name: str) -> Feature:
        """A feature by name; ConfigError lists the known ones."""
        if name not in self.features:
            raise ConfigError(f"{self.root} has no feature {name!r}; it has {', '.join(sorted(self.features))}")
        return self.features[name]

    @property
    def cameras(self) -> tuple[str, ...]:
        """Names of the camera features."""
        return tuple(name for name, feature in self.features.items() if feature.directory == "camera")

    def chunk_file(self, feature: str, chunk: int) -> Path:
        """A chunk's file of a feature; SceneError names it where it is missing, and the chunks that are there."""
        path = self.root / self.feature(feature).path(chunk)
        if not path.is_file():
            there = self.chunks_on_disk(feature)
            raise SceneError(
                f"chunk {chunk} of {feature} is not on disk ({path}); there are {_spell(there)}: change "
                f"dataset.chunk_ids, or download it: alpagym pai download --chunk-ids {chunk}"
            )
        return path

    def chunks_on_disk(self, feature: str) -> list[int]:
        """Chunks of a feature whose file is there, ascending."""
        found = self.feature(feature)
        folder = (self.root / found.path(0)).parent
        head, tail = Path(found.path(0)).name.split("0000", 1)
        names = os.listdir(folder) if folder.is_dir() else []
        middle = [n[len(head) : len(n) - len(tail)] for n in names if n.startswith(head) and n.endswith(tail)]
        return sorted(int(m) for m in middle if m.isdigit())

    def member(self, feature: str, chunk: int, clip_id: str, alias: str) -> Window:
        """A clip's file in a chunk's zip, as a window of it; SceneError where the zip lacks it."""
        members = self.feature(feature).members
        name = members[alias].format(clip_id=clip_id)
        zipped = self.zip(feature, chunk)
        if name not in zipped.names:
            raise SceneError(
                f"{zipped.path} has no {name}: clip {clip_id} was recorded without {feature}; leave it out "
                "(dataset.skip_bad=true) or the camera (policy.cameras)"
            )
        return zipped.open(name)

    def has_member(self, feature: str, chunk: int, clip_id: str, alias: str) -> bool:
        """Whether the chunk's zip holds a clip's file; errors as `zip`."""
        return self.feature(feature).members[alias].format(clip_id=clip_id) in self.zip(feature, chunk).names

    def zip(self, feature: str, chunk: int) -> ZipWindows:
        """A chunk's zip; SceneError where it is missing, CorruptFileError where it is torn."""
        path = self.chunk_file(feature, chunk)
        if path in self._zips:
            self._zips.move_to_end(path)
            return self._zips[path]
        opened = ZipWindows(path)
        self._zips[path] = opened
        while len(self._zips) > _OPEN_ZIPS:
            self._zips.popitem(last=False)
        return opened

    def table(self, feature: str, chunk: int, clip_id: str, alias: str) -> pa.Table:
        """A clip's parquet table."""
        window = self.member(feature, chunk, clip_id, alias)
        return read_table(io.BytesIO(window.read()), f"{window.name} in {window.path}")

    def chunk_table(self, feature: str, chunk: int) -> pa.Table:
        """A chunk's parquet table."""
        return read_parquet(self.chunk_file(feature, chunk))

    def parquet(self, relative: str, key: str) -> pa.Table:
        """A table of the tree by its relative path; ConfigError names the setting where it is missing."""
        path = self.root / relative
        if not path.is_file():
            raise ConfigError(f"{path} does not exist (the path is relative to dataset.path)", key=key)
        return read_parquet(path)

    def close(self) -> None:
        """Let go of all files; idempotent."""
        self._zips.clear()


def _spell(chunks: list[int]) -> str:
    return f"{', '.join(map(str, chunks[:20]))}{', …' if len(chunks) > 20 else ''}" if chunks else "none"


def _features(path: Path) -> dict[str, Feature]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    needed = {"feature", "directory", "chunk_path", "clip_files_in_zip"}
    if not rows or not needed <= rows[0].keys():
        raise CorruptFileError(f"{path} ({path.stat().st_size} bytes) lacks the columns {sorted(needed)}; {_REMEDY}")
    try:
        return {
            row["feature"]: Feature(
                row["feature"], row["directory"], row["chunk_path"], json.loads(row["clip_files_in_zip"] or "{}")
            )
            for row in rows
        }
    except json.JSONDecodeError as err:
        raise CorruptFileError(f"{path}: clip_files_in_zip is no JSON: {err}; {_REMEDY}") from err


# ---------------------------------------------------------------- tables


def read_parquet(path: Path) -> pa.Table:
    """A table of a file; CorruptFileError names path, size and remedy where it is cut."""
    return read_table(path, f"{path} ({path.stat().st_size} bytes)")


def read_table(source: Any, what: str) -> pa.Table:
    """A parquet table, its pandas index as plain columns."""
    try:
        return pq.read_table(source)
    except (pa.ArrowInvalid, OSError) as err:
        raise CorruptFileError(f"{what} is no whole parquet file: {err}; {_REMEDY}") from err


def column(table: pa.Table, name: str, what: str) -> pa.ChunkedArray:
    """A column; CorruptFileError lists what there is. An index without a name counts as `clip_id`."""
    if name == "clip_id" and name not in table.column_names and "__index_level_0__" in table.column_names:
        name = "__index_level_0__"
    if name not in table.column_names:
        raise CorruptFileError(f"{what} has no column {name!r}; it has {', '.join(table.column_names)}")
    return table[name]


# ---------------------------------------------------------------- zips


class ZipWindows:
    """A zip of stored members, each readable as a window of the file without copying the rest.

    The file is closed when neither this nor a window of it is in use any more.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as zipped:
                self._infos = {info.filename: info for info in zipped.infolist()}
        except (zipfile.BadZipFile, OSError, EOFError) as err:
            raise CorruptFileError(f"{path} ({path.stat().st_size} bytes) is no whole zip: {err}; {_REMEDY}") from err
        self.handle = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.handle)

    @property
    def names(self) -> dict[str, zipfile.ZipInfo]:
        """Members by name."""
        return self._infos

    def open(self, name: str) -> Window:
        """A member; CorruptFileError where the file ends before it does, or where it is compressed."""
        info, size = self._infos[name], os.fstat(self.handle).st_size
        if info.compress_type != zipfile.ZIP_STORED:
            raise CorruptFileError(f"{name} in {self.path} is compressed; the dataset's members are stored")
        head = os.pread(self.handle, 30, info.header_offset)
        if len(head) < 30 or head[:4] != b"PK\x03\x04":
            raise CorruptFileError(f"{name} in {self.path} ({size} bytes) has no header; {_REMEDY}")
        names, extra = struct.unpack_from("<HH", head, 26)
        begin = info.header_offset + 30 + names + extra
        if begin + info.file_size > size:
            raise CorruptFileError(f"{self.path} ({size} bytes) ends within {name}; {_REMEDY}")
        return Window(self, begin, info.file_size, name)


class Window(io.RawIOBase):
    """Part of a zip as a file of its own."""

    def __init__(self, owner: ZipWindows, begin: int, size: int, name: str) -> None:
        super().__init__()
        self._owner, self._begin, self.size = owner, begin, size
        self.name, self.path = name, owner.path
        self._at = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As `io.IOBase.seek`."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def read(self, size: int = -1) -> bytes:  # type: ignore[override]  # RawIOBase may give None; a file never does
        """Up to `size` bytes, all that are left if negative."""
        left = max(self.size - self._at, 0)
        data = os.pread(self._owner.handle, left if size < 0 else min(size, left), self._begin + self._at)
        self._at += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        """As `io.RawIOBase.readinto`."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
