"""The episode file: one Arrow IPC file an episode.

One record batch, a row a tick; row T holds the last observation, and what exists for decisions only is null there. An
array [T,...] is one column of fixed-shape tensors, a `Ragged` a list column, so any Arrow reader opens the file. What
is no array (request, outcome, receipt) is JSON in the schema's metadata, together with each column's numpy type, shape
and CRC-32. Truth values are bytes, times int64: everything comes back with the type it had.

Frames are stored once each (`frames`, see `alpagym_runtime.episodes.frames`), never copied on the way out, and never
touched by a reader that does not ask for them: the file is mapped. Mapped arrays can be written to; the file never
changes. Nothing in a file is code.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
import os
import shutil
import weakref
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from alpagym_runtime.episodes.frames import (
    PIXELS,
    StoredFrame,
    arrived_frames,
    camera_fields,
    decode,
    unique_frames,
)
from alpagym_runtime.errors import CorruptFileError
from alpagym_runtime.files import replacing
from alpagym_runtime.types import (
    Ended,
    Episode,
    EpisodeRequest,
    Failure,
    Frame,
    MeasureSeries,
    Ragged,
    Receipt,
    Sampling,
    column_names,
    column_of,
    decision_from_columns,
)

FORMAT_VERSION = 1
META, META_CRC = b"alpagym.episode", b"alpagym.episode.crc32"

FrameMode = Literal["seen", "arrived", "none", "all", "dense"]
"""What becomes of pictures. seen: the pixels, each frame once. arrived: the encoded bytes, decoded when read; pixels
where none arrived. none: no pictures. all: the pixels once and the encoded bytes (transports). dense: pixels as the
array has them, overlaps included, so that a reader maps the array itself (shared memory)."""

_FRAME_TYPE = pa.struct(
    [
        ("camera", pa.string()),
        ("frame_id", pa.uint64()),
        ("time_us", pa.int64()),
        ("format", pa.string()),
        ("height", pa.int32()),
        ("width", pa.int32()),
        ("pixels_crc32", pa.uint32()),
        ("slot", pa.int64()),
        ("crc32", pa.uint32()),
        ("data", pa.binary_view()),
    ]
)
_VIEW = np.dtype([("length", "<i4"), ("prefix", "u1", 4), ("buffer", "<i4"), ("offset", "<i4")])


@dataclass
class _Table:
    """Columns under construction; every one is padded with nulls to `rows`."""

    rows: int
    arrays: list[pa.Array] = field(default_factory=list)
    fields: list[pa.Field] = field(default_factory=list)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, name: str, value: Any) -> None:
        if isinstance(value, Ragged):
            array, about = self._ragged(name, value)
        elif value.dtype.kind in "OUS":
            array, about = self._text(name, value)
        else:
            array, about = self._dense(name, value)
        self.about[name] = about
        if array is not None:
            self.arrays.append(array)
            self.fields.append(pa.field(name, array.type))

    def add_measure(self, name: str, series: MeasureSeries) -> None:
        """A series with a sample a row: null where undefined; the number below the null stays."""
        value = np.ascontiguousarray(series.value)
        bitmap = np.packbits(series.valid, bitorder="little")
        self.about[name] = {"kind": "measure", "rows": len(value), "crc32": _crc(value, bitmap)}
        if not len(value):
            return
        array = pa.Array.from_buffers(pa.float64(), len(value), [pa.py_buffer(bitmap), pa.py_buffer(value)])
        self.arrays.append(array)
        self.fields.append(pa.field(name, pa.float64()))

    def _validity(self, rows: int) -> pa.Buffer | None:
        if rows == self.rows:
            return None
        return pa.py_buffer(np.packbits(np.arange(self.rows) < rows, bitorder="little"))

    def _dense(self, name: str, value: NDArray[Any]) -> tuple[pa.Array | None, dict[str, Any]]:
        value = np.ascontiguousarray(value)
        rows, shape = len(value), value.shape[1:]
        about = {"kind": "array", "dtype": value.dtype.str, "shape": list(shape), "rows": rows, "crc32": _crc(value)}
        if not value.size:
            return None, about
        item = _arrow_type(name, value.dtype)
        little = value if value.dtype.byteorder != ">" else value.astype(value.dtype.newbyteorder("<"))
        if rows < self.rows:
            padded = np.zeros((self.rows, *shape), little.dtype)
            padded[:rows] = little
            little = padded
        validity = self._validity(rows)
        if not shape:
            return pa.Array.from_buffers(item, self.rows, [validity, pa.py_buffer(little)]), about
        return _tensor(item, shape, self.rows, little, validity), about

    def _ragged(self, name: str, value: Ragged) -> tuple[pa.Array | None, dict[str, Any]]:
        offsets = np.ascontiguousarray(value.offsets, np.int64)
        values = np.ascontiguousarray(value.values[offsets[0] : offsets[-1]])
        offsets = offsets - offsets[0]
        rows, shape = len(offsets) - 1, values.shape[1:]
        about = {"kind": "ragged", "dtype": values.dtype.str, "shape": list(shape), "rows": rows}
        about["crc32"] = _crc(values, offsets)
        if not rows:
            return None, about
        little = values if values.dtype.byteorder != ">" else values.astype(values.dtype.newbyteorder("<"))
        item = _arrow_type(name, values.dtype)
        if math.prod(shape) == 0:
            raise ValueError(f"column {name!r}: rows of a ragged array must not be of size 0, got shape {shape}")
        if shape:
            child = _tensor(item, shape, len(values), little, None)
        else:
            child = pa.Array.from_buffers(item, len(values), [None, pa.py_buffer(little)])
        full = np.concatenate([offsets, np.full(self.rows - rows, offsets[-1])])
        buffers = [self._validity(rows), pa.py_buffer(full)]
        array = pa.Array.from_buffers(pa.large_list(child.type), self.rows, buffers, children=[child])
        return array, about

    def _text(self, name: str, value: NDArray[Any]) -> tuple[pa.Array | None, dict[str, Any]]:
        items = value.tolist()
        kind = pa.large_binary() if value.dtype.kind == "S" else pa.large_string()
        wrong = [v for v in items if not (v is None or isinstance(v, (str, bytes)))]
        if value.ndim != 1 or wrong:
            raise ValueError(
                f"column {name!r}: object arrays must be [rows] of text or None, got {value.shape} with "
                f"{type(wrong[0]).__name__ if wrong else 'text'}; files hold data, never objects"
            )
        array = pa.array(items + [None] * (self.rows - len(items)), kind)
        about = {"kind": "text", "dtype": value.dtype.str, "rows": len(items), "crc32": _crc_text(items)}
        return array if len(items) else None, about


def to_batch(episode: Episode, frames: FrameMode = "all") -> pa.RecordBatch:
    """An episode as one Arrow record batch that shares the episode's memory; equal episodes give equal batches.

    Raises:
        ValueError: a column is of a kind that files do not hold; names it.

    """
    observation = dict(episode.observation)
    # Fields that only a camera's own pixels have; ids and times always stay.
    pictures = camera_fields(observation) if frames != "dense" else []
    columns: dict[str, Any] = {f"observation.{n}": a for n, a in observation.items() if n not in pictures}
    if episode.decisions is not None:
        columns |= {f"decision.{n}": column_of(episode.decisions, n) for n in column_names(episode.decisions)}
    columns |= {f"label.{name}": array for name, array in episode.labels.items()}
    columns |= {"controls": episode.controls, "reward": episode.rewards}
    columns |= {f"term.{name}": array for name, array in episode.terms.items()}
    for name, array in columns.items():
        if not isinstance(array, Ragged) and np.ndim(array) == 0:
            raise ValueError(f"column {name!r} needs a leading axis of ticks, got a single {type(array).__name__}")
    clock = observation.get("time_us")
    aligned = {n: s for n, s in episode.measures.items() if _aligned(s, clock)}
    for name, series in episode.measures.items():
        if name not in aligned:
            for part in ("time_us", "value", "valid"):
                array = getattr(series, part)
                columns[f"series.{name}.{part}"] = Ragged(array, np.array([0, len(array)], np.int64))

    rows = max((len(a.offsets) - 1 if isinstance(a, Ragged) else len(a) for a in columns.values()), default=0)
    cameras, stored = _pictures(episode, pictures, frames)
    rows = max(rows, max((len(camera["index"]) for camera in cameras.values()), default=0), 1 if stored else 0)
    table = _Table(rows)
    for name, array in columns.items():
        table.add(name, array)
    for name, series in aligned.items():
        table.add_measure(f"measure.{name}", series)
    for name, camera in cameras.items():
        table.add(f"frame.{name}", camera.pop("index"))
    if stored:
        array, about = _frame_column(stored, rows)
        table.arrays.append(array)
        table.fields.append(pa.field("frames", array.type))
        table.about["frames"] = about
    meta = {
        "format": FORMAT_VERSION,
        "request": asdict(episode.request),
        "ended": episode.ended.name.lower(),
        "failure": None if episode.failure is None else asdict(episode.failure),
        "driving_score": _number(episode.driving_score),
        "initial_fault": bool(episode.initial_fault),
        "actor": episode.actor,
        "sampling": asdict(episode.sampling),
        "receipt": None if episode.receipt is None else {**vars(episode.receipt)},
        "decisions": episode.decisions is not None,
        "series": {n: {"aggregation": s.aggregation, "aligned": n in aligned} for n, s in episode.measures.items()},
        "frames": frames,
        "decoder": _decoder() if any(frame.format in ("jpeg", "png") for frame in stored) else None,
        "cameras": cameras,
        "columns": table.about,
    }
    text = json.dumps(meta, allow_nan=False, default=_plain, separators=(",", ":")).encode()
    schema = pa.schema(table.fields, metadata={META: text, META_CRC: str(zlib.crc32(text)).encode()})
    return pa.RecordBatch.from_arrays(table.arrays, schema=schema)


def write(episode: Episode, sink: Any, frames: FrameMode = "all") -> None:
    """Write an episode to an open binary file or a path; not atomic, see `alpagym_runtime.files.replacing`."""
    batch = to_batch(episode, frames)
    with pa.OSFile(str(sink), "wb") if isinstance(sink, (str, Path)) else pa.PythonFile(sink, "w") as file:  # noqa: SIM117
        with pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)


def to_bytes(episode: Episode, frames: FrameMode = "seen") -> bytes:
    """The file's content."""
    sink = pa.BufferOutputStream()
    batch = to_batch(episode, frames)
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def save(episode: Episode, path: Path, frames: FrameMode, *, durable: bool = True, remedy: str) -> int:
    """Write an episode under its final name in one step, whole or not at all; returns the file's size in bytes.

    Args:
        episode: what to write.
        path: where; a file there is replaced.
        frames: what becomes of its pictures.
        durable: whether it survives a power cut.
        remedy: what the user can do if the disk refuses, for the error.

    Raises:
        OSError: the disk is full, read-only or gone; names path, size, what is free, and the remedy.

    """
    try:
        with replacing(path, durable=durable) as temporary:
            write(episode, temporary, frames)
            size = temporary.stat().st_size
    except OSError as err:
        free = ""
        with contextlib.suppress(OSError):
            free = f"; {shutil.disk_usage(path.parent).free / 1e6:.0f} MB are free there"
        reason = os.strerror(err.errno) if err.errno else str(err)
        raise OSError(
            f"cannot write {path} ({episode_bytes(episode) / 1e6:.1f} MB of arrays): {reason}{free}; {remedy}"
        ) from err
    return size


class EpisodeFile:
    """A mapped episode file: its description at once, columns when asked for.

    Args:
        path: the file.

    Raises:
        CorruptFileError: it is cut, empty, of another kind or of a newer format; names path, size and the remedy.
        FileNotFoundError: there is no such file.

    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        with self.path.open("rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            if self.size < 16:
                raise self._corrupt("it ends before its header")
            self._map = _map_private(file.fileno(), self.size)
        self._base = pa.py_buffer(self._map)
        try:
            reader = pa.ipc.open_file(pa.BufferReader(self._base))
            found = reader.schema.metadata or {}
            if META not in found:
                raise self._corrupt("it is an Arrow file, but no episode")
            if str(zlib.crc32(found[META])).encode() != found.get(META_CRC):
                raise self._corrupt("the checksum of its description differs")
            self.meta: dict[str, Any] = json.loads(found[META])
            if self.meta["format"] != FORMAT_VERSION:
                raise CorruptFileError(
                    f"{self.path} ({self.size} bytes) has episode format {self.meta['format']}, this program reads "
                    f"{FORMAT_VERSION}; read it with the AlpaGym that wrote it, or a newer one"
                )
            self._batch = reader.get_batch(0)
            # Arrow looks a name up by making a list of all of them, each time.
            self._places = {name: place for place, name in enumerate(self._batch.schema.names)}
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as err:
            if isinstance(err, CorruptFileError):
                raise
            raise self._corrupt(str(err).splitlines()[0] if str(err) else type(err).__name__) from err

    @property
    def columns(self) -> dict[str, dict[str, Any]]:
        """What is known of each column: kind, numpy type, shape of a row, rows, checksum."""
        return self.meta["columns"]

    @property
    def request(self) -> EpisodeRequest:
        """What was asked for."""
        return EpisodeRequest(**self.meta["request"])

    def column(self, name: str, *, verify: bool = True) -> Any:
        """One column as the array or `Ragged` that was written: a view of the file, no other byte is read.

        Raises:
            KeyError: there is no such column; lists those there are.
            CorruptFileError: its checksum differs.

        """
        about = self.columns.get(name)
        if about is None or about["kind"] == "frames":
            raise KeyError(f"{self.path} has no column {name!r}; there are {', '.join(self.columns)}")
        try:
            value, crc = self._read(name, about, verify)
        except (pa.ArrowException, ValueError, KeyError, IndexError, TypeError, OverflowError) as err:
            raise self._corrupt(f"column {name!r} does not fit its description: {err}") from err
        if verify and crc != about["crc32"]:
            raise self._corrupt(f"the checksum of column {name!r} differs")
        return value

    def frames(self, *, verify: bool = True) -> list[StoredFrame]:
        """The frame table in file order; `data` are views of the file."""
        if "frames" not in self.columns:
            return []
        try:
            return self._frames(verify)
        except (pa.ArrowException, ValueError, KeyError, IndexError, TypeError) as err:
            if isinstance(err, CorruptFileError):
                raise
            raise self._corrupt(f"the frame table does not fit its description: {err}") from err

    def pixels(self, camera: str, frames: list[StoredFrame] | None = None) -> NDArray[np.uint8]:
        """Pictures [N,K,h,w,3] RGB of a camera as the policy saw them, frames that arrived encoded decoded again.

        Raises:
            CorruptFileError: a frame is damaged, or decodes to other pixels than when it was stored.

        """
        about = self.meta["cameras"][camera]
        index = self.column(f"frame.{camera}")
        table = self.frames() if frames is None else frames
        height, width = about["height"], about["width"]
        rows, count = index.shape
        flat = index.reshape(-1)
        whole = self._evenly_spaced(table, flat, height * width * 3)
        if whole is not None:
            return whole.reshape(rows, count, height, width, 3)
        out = np.empty((rows * count, height, width, 3), np.uint8)
        used, first, inverse = np.unique(flat, return_index=True, return_inverse=True)
        if any(table[j].format not in (PIXELS, "raw") for j in used.tolist()):

            def work(at: int) -> None:
                out[first[at]] = self._decode(table[used[at]], height, width)

            # Decoding releases the interpreter; a frame is one task.
            with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
                list(pool.map(work, range(len(used))))
        else:
            for at, j in enumerate(used.tolist()):
                out[first[at]] = self._decode(table[j], height, width)
        for place in np.setdiff1d(np.arange(len(flat)), first).tolist():
            out[place] = out[first[inverse[place]]]
        return out.reshape(rows, count, height, width, 3)

    def episode(self, *, frames: bool = True, verify: bool = True) -> Episode:
        """The whole episode; without `frames`, everything but its pictures (and their bytes are not read)."""
        meta = self.meta
        groups: dict[str, dict[str, Any]] = {}
        for name in self.columns:
            head, dot, tail = name.partition(".")
            if dot and head in ("observation", "decision", "label", "term"):
                groups.setdefault(head, {})[tail] = self.column(name, verify=verify)
        observation = groups.get("observation", {})
        stored: tuple[Frame, ...] = ()
        if frames:
            table = self.frames(verify=verify)
            for camera in meta["cameras"]:
                observation[f"camera_{camera}"] = self.pixels(camera, table)
            if meta["frames"] in ("arrived", "all", "dense"):
                stored = tuple(
                    Frame(f.slot, f.camera, f.time_us, f.frame_id, f.format, bytes(f.data))  # type: ignore[arg-type]
                    for f in table
                    if f.format != PIXELS
                )
        receipt, failure = meta["receipt"], meta["failure"]
        score = meta["driving_score"]
        return Episode(
            self.request,
            Ended[meta["ended"].upper()],
            None if failure is None else Failure(**failure),
            {name: self._series(name, about, verify) for name, about in meta["series"].items()},
            float("nan") if score is None else float(score),
            meta["initial_fault"],
            meta["actor"],
            observation=observation,
            decisions=decision_from_columns(groups.get("decision", {})) if meta["decisions"] else None,
            labels=groups.get("label", {}),
            controls=self.column("controls", verify=verify),
            rewards=self.column("reward", verify=verify),
            terms=groups.get("term", {}),
            sampling=Sampling(**meta["sampling"]),
            receipt=None if receipt is None else Receipt(**receipt),
            frames=stored,
        )

    # ------------------------------------------------------------ inside

    def _corrupt(self, reason: str) -> CorruptFileError:
        return CorruptFileError(
            f"{self.path} ({self.size} bytes) is no whole episode: {reason}; remove it, and record the drive again"
        )

    def _view(self, buffer: pa.Buffer, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        """A writable numpy view of a buffer inside the map."""
        offset = buffer.address - self._base.address
        if count * dtype.itemsize > buffer.size or not 0 <= offset <= self.size - count * dtype.itemsize:
            raise ValueError(f"{count} x {dtype} do not fit {buffer.size} bytes")
        return np.frombuffer(self._map, dtype, count, offset)

    def _read(self, name: str, about: Mapping[str, Any], verify: bool) -> tuple[Any, int]:
        rows = int(about["rows"])
        place = self._places.get(name)
        array = None if place is None else self._batch.column(place)
        if about["kind"] == "measure":
            return self._read_measure(array, rows, verify)
        dtype = np.dtype(about["dtype"])
        if about["kind"] == "text":
            items = [] if array is None else array.to_pylist()[:rows]
            return np.array(items, dtype).reshape(rows), _crc_text(items)
        shape = tuple(about["shape"])
        size = math.prod(shape)
        if about["kind"] == "ragged":
            if array is None:
                offsets, values = np.zeros(rows + 1, np.int64), np.zeros((0, *shape), dtype)
            else:
                offsets = self._view(array.buffers()[1], np.dtype("<i8"), rows + 1)
                length = int(offsets[-1])
                if length < 0 or (np.diff(offsets) < 0).any():
                    raise ValueError("its offsets fall")
                flat = self._data(array, length * size, dtype)
                values = flat.reshape(length, *shape)
            return Ragged(values, offsets), _crc(values, offsets) if verify else 0
        if array is None:
            value = np.zeros((rows, *shape), dtype)
        else:
            value = self._data(array, rows * size, dtype).reshape(rows, *shape)
        return value, _crc(value) if verify else 0

    def _data(self, array: pa.Array, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        if count == 0:
            return np.zeros(0, dtype)
        flat = self._view(array.buffers()[-1], dtype.newbyteorder("<"), count)
        return flat.astype(dtype) if dtype.byteorder == ">" else flat

    def _read_measure(
        self, array: pa.Array | None, rows: int, verify: bool
    ) -> tuple[tuple[NDArray[Any], NDArray[Any]], int]:
        if array is None:
            return (np.zeros(0), np.zeros(0, bool)), _crc(np.zeros(0), np.zeros(0, np.uint8))
        validity, data = array.buffers()
        value = self._view(data, np.dtype("<f8"), rows)
        if validity is None:
            # Arrow leaves the bitmap out where every sample is valid.
            bitmap = np.packbits(np.ones(rows, bool), bitorder="little")
        else:
            bitmap = self._view(validity, np.dtype("u1"), -(-rows // 8))
        valid = np.unpackbits(bitmap, count=rows, bitorder="little").astype(bool)
        return (value, valid), _crc(value, bitmap) if verify else 0

    def _series(self, name: str, about: Mapping[str, Any], verify: bool) -> MeasureSeries:
        if about["aligned"]:
            value, valid = self.column(f"measure.{name}", verify=verify)
            time_us = self.column("observation.time_us", verify=verify).copy()
            return MeasureSeries(time_us, value, valid, about["aggregation"])
        time_us, value, valid = (
            self.column(f"series.{name}.{part}", verify=verify).values for part in ("time_us", "value", "valid")
        )
        return MeasureSeries(time_us, value, valid, about["aggregation"])

    def _frames(self, verify: bool) -> list[StoredFrame]:
        column = self._batch.column("frames")
        offsets = self._view(column.buffers()[1], np.dtype("<i8"), len(column) + 1)
        ticks = np.repeat(np.arange(len(column)), np.diff(offsets))
        rows = column.values
        # A flipped bit of the schema may make whole numbers durations, which Python cannot hold.
        if rows.type != _FRAME_TYPE:
            raise self._corrupt(f"its frame table is of type {rows.type}")
        plain = {f.name: rows.field(f.name).to_pylist() for f in _FRAME_TYPE if f.name != "data"}
        buffers = rows.field("data").buffers()
        views = self._view(buffers[1], _VIEW, len(rows))
        if verify and _crc_frames(plain) != self.columns["frames"]["crc32"]:
            raise self._corrupt("the checksum of its frame table differs")
        out = []
        for i in range(len(rows)):
            length = int(views["length"][i])
            if length <= 12:  # Arrow keeps short data inside the view
                data = views[i : i + 1].view(np.uint8)[4 : 4 + length]
            else:
                start, end = int(views["offset"][i]), int(views["offset"][i]) + length
                data = self._view(buffers[2 + int(views["buffer"][i])], np.dtype("u1"), end)[start:]
            if verify and _crc(data) != plain["crc32"][i]:
                raise self._corrupt(f"the checksum of frame {plain['frame_id'][i]} ({plain['camera'][i]}) differs")
            row = {n: values[i] for n, values in plain.items() if n != "crc32"}
            out.append(StoredFrame(**row, tick=int(ticks[i]), data=data.view(np.uint8)))
        return out

    def _evenly_spaced(self, table: list[StoredFrame], index: NDArray[Any], size: int) -> NDArray[np.uint8] | None:
        """Frames [n,size] of `index` as one view, where they are pixels that follow each other at one distance.

        So it is where each row shows one new frame a camera: the frames of the cameras take turns in the file.
        """
        if not len(index) or any(table[j].format != PIXELS for j in index.tolist()):
            return None
        places = np.array([table[j].data.ctypes.data for j in index.tolist()])
        steps = np.diff(places)
        step = int(steps[0]) if len(steps) else size
        if step < size or (steps != step).any():
            return None
        span = step * (len(index) - 1) + size
        flat = np.frombuffer(self._map, np.uint8, span, int(places[0]) - self._base.address)
        return np.lib.stride_tricks.as_strided(flat, (len(index), size), (step, 1))

    def _decode(self, frame: StoredFrame, height: int, width: int) -> NDArray[np.uint8]:
        try:
            pixels = decode(frame.data, frame.format, height, width)
        except ValueError as err:
            raise self._corrupt(f"frame {frame.frame_id} of camera {frame.camera!r}: {err}") from err
        # Pixels kept as they are were checked with their data.
        if frame.format != PIXELS and frame.pixels_crc32 and _crc(pixels) != frame.pixels_crc32:
            raise CorruptFileError(
                f"{self.path} ({self.size} bytes): frame {frame.frame_id} of camera {frame.camera!r} decodes to other "
                f"pixels here ({_decoder()}) than where it was stored ({self.meta['decoder']}); read it with that "
                f"decoder, or store pictures with store.frames=seen"
            )
        return pixels


def read(path: Path, *, frames: bool = True, verify: bool = True) -> Episode:
    """The episode of a file; see `EpisodeFile`."""
    return EpisodeFile(path).episode(frames=frames, verify=verify)


def episode_bytes(episode: Episode) -> int:
    """Bytes that an episode's arrays and frames take in memory."""
    arrays: list[Any] = [*episode.observation.values(), *episode.labels.values(), *episode.terms.values()]
    arrays += [episode.controls, episode.rewards]
    for series in episode.measures.values():
        arrays += [series.time_us, series.value, series.valid]
    if episode.decisions is not None:
        arrays += [column_of(episode.decisions, name) for name in column_names(episode.decisions)]
    total = sum(a.values.nbytes + a.offsets.nbytes if isinstance(a, Ragged) else a.nbytes for a in arrays)
    return total + sum(len(frame.data) for frame in episode.frames)


# ---------------------------------------------------------------- helpers


@lru_cache(maxsize=1)
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _map_private(handle: int, size: int) -> Any:
    """The bytes of an open file, mapped copy on write: writable, and the file never changes.

    Python's own `mmap` keeps a file descriptor as long as the map, so a training step with 1000 episodes in hand would
    run out of them. The map ends with the last array that looks into it.
    """
    libc = _libc()
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, handle, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {size} bytes: {os.strerror(code)}")
    mapped = (ctypes.c_ubyte * size).from_address(address)
    # Not at exit: other threads may still read.
    weakref.finalize(mapped, libc.munmap, address, size).atexit = False
    return mapped


def _decoder() -> str:
    from alpagym_runtime.pictures import decoder

    return decoder()


def _pictures(
    episode: Episode, fields: Iterable[str], mode: FrameMode
) -> tuple[dict[str, dict[str, Any]], list[StoredFrame]]:
    """Cameras (size, index [N,K] into the table) and the frame table, ordered by tick."""
    clock = episode.observation.get("time_us")
    arrived = arrived_frames(episode.frames, clock) if mode in ("arrived", "all", "dense") else []
    if mode == "none":
        return {}, []
    table = list(arrived)
    by_name = {(frame.camera, frame.frame_id): i for i, frame in enumerate(arrived)}
    cameras: dict[str, dict[str, Any]] = {}
    for name in fields:
        found, index = unique_frames(episode.observation, name)
        place = np.zeros(len(found), np.int32)
        used: set[int] = set()
        for j, frame in enumerate(found):
            at = by_name.get((frame.camera, frame.frame_id), -1) if mode == "arrived" else -1
            if at >= 0 and at not in used:
                used.add(at)
                place[j] = at
                table[at] = replace(table[at], height=frame.height, width=frame.width, pixels_crc32=frame.pixels_crc32)
            else:
                place[j] = len(table)
                table.append(frame)
        height, width = episode.observation[name].shape[2:4]
        cameras[name.removeprefix("camera_")] = {"height": height, "width": width, "index": place[index]}
    order = sorted(range(len(table)), key=lambda i: table[i].tick)  # stable: frames that arrived keep their order
    new = np.zeros(len(table), np.int32)
    new[order] = np.arange(len(table), dtype=np.int32)
    for camera in cameras.values():
        camera["index"] = new[camera["index"]]
    return cameras, [table[i] for i in order]


def _frame_column(frames: list[StoredFrame], rows: int) -> tuple[pa.Array, dict[str, Any]]:
    views = np.zeros(len(frames), _VIEW)
    buffers: list[pa.Buffer] = []
    for i, frame in enumerate(frames):
        data = np.frombuffer(frame.data, np.uint8)
        views["length"][i] = len(data)
        if len(data) <= 12:
            views[i : i + 1].view(np.uint8)[4 : 4 + len(data)] = data
        else:
            views["prefix"][i] = data[:4]
            views["buffer"][i] = len(buffers)
            buffers.append(pa.py_buffer(data))
    data_array = pa.Array.from_buffers(pa.binary_view(), len(frames), [None, pa.py_buffer(views), *buffers])
    crc = [f.pixels_crc32 if f.format == PIXELS else zlib.crc32(f.data) for f in frames]
    plain = {
        f.name: crc if f.name == "crc32" else [getattr(frame, f.name) for frame in frames]
        for f in _FRAME_TYPE
        if f.name != "data"
    }
    children = [data_array if f.name == "data" else pa.array(plain[f.name], f.type) for f in _FRAME_TYPE]
    values = pa.StructArray.from_arrays(children, fields=list(_FRAME_TYPE))
    offsets = np.searchsorted([frame.tick for frame in frames], np.arange(rows + 1)).astype(np.int64)
    offsets[-1] = len(frames)
    array = pa.Array.from_buffers(pa.large_list(values.type), rows, [None, pa.py_buffer(offsets)], children=[values])
    return array, {"kind": "frames", "rows": rows, "count": len(frames), "crc32": _crc_frames(plain)}


def _aligned(series: MeasureSeries, clock: NDArray[Any] | None) -> bool:
    """Whether a series has one sample a row of the file, of the usual types."""
    return (
        clock is not None
        and np.array_equal(series.time_us, clock)
        and series.time_us.dtype == clock.dtype
        and (series.value.dtype, series.valid.dtype) == (np.float64, np.bool_)
    )


def _tensor(
    item: pa.DataType, shape: tuple[int, ...], rows: int, values: NDArray[Any], validity: pa.Buffer | None
) -> pa.Array:
    kind = pa.fixed_shape_tensor(item, shape)
    child = pa.Array.from_buffers(item, rows * math.prod(shape), [None, pa.py_buffer(values)])
    storage = pa.Array.from_buffers(kind.storage_type, rows, [validity], children=[child])
    return pa.ExtensionArray.from_storage(kind, storage)


def _arrow_type(name: str, dtype: np.dtype[Any]) -> pa.DataType:
    if dtype.kind == "b":
        return pa.uint8()
    if dtype.kind in "iuf" and dtype.itemsize <= 8:
        return pa.from_numpy_dtype(dtype.newbyteorder("="))
    raise ValueError(f"column {name!r}: arrays of type {dtype} cannot be stored; use bool, int, uint or float")


def _crc(*arrays: NDArray[Any]) -> int:
    crc = 0
    for array in arrays:
        if array.size:
            crc = zlib.crc32(_bytes_of(array), crc)
    return crc


def _bytes_of(array: NDArray[Any]) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _crc_text(items: list[Any]) -> int:
    return zlib.crc32(json.dumps([v.hex() if isinstance(v, bytes) else v for v in items]).encode())


def _crc_frames(plain: Mapping[str, list[Any]]) -> int:
    return zlib.crc32(json.dumps({name: list(map(str, values)) for name, values in plain.items()}).encode())


def _number(value: float) -> float | str | None:
    """A number of strict JSON: null for NaN, text for an infinity."""
    value = float(value)
    return None if math.isnan(value) else value if math.isfinite(value) else str(value)


def _plain(value: Any) -> Any:
    """Numpy's numbers and mappings that are no dictionaries, for JSON."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no plain data")
