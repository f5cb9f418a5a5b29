"""An episode as one message: a header of plain JSON, and one buffer that holds every array's bytes.

Nothing in a header is code, and a receiver believes none of its numbers: each array must lie inside the buffer.
Pictures whose rows overlap are sent once and overlap again at the other end. Arrays without elements take no byte.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from alpagym_runtime.transport.nccl.copiers import PIECE
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

VERSION = 1
ALIGNMENT = 64
"""Bytes at whose multiples arrays begin, so that views of the buffer are aligned."""
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Message:
    """A packed episode: the header's text, where each piece of memory goes, and how long the buffer is, in bytes."""

    header: bytes
    pieces: list[tuple[int, Bytes]]
    size: int


@dataclass(frozen=True)
class Part:
    """Bytes `start` to `end` of a message: what is copied where. In the buffer they lie `before` bytes earlier."""

    start: int
    end: int
    copies: list[tuple[int, Bytes]]
    before: int = 0

    def fill(self, buffer: Bytes) -> None:
        """Copy into the buffer; numpy lets go of the interpreter while it copies."""
        for at, data in self.copies:
            np.copyto(buffer[at - self.before : at - self.before + len(data)], data)


def parts(pieces: Iterable[tuple[int, Bytes]], longest: int = PIECE) -> list[Part]:
    """Pieces in parts of at most so many bytes, in order; only padding lies between the pieces of a part."""
    found: list[Part] = []
    for at, data in pieces:
        done = 0
        while done < len(data):
            here = at + done
            last = found[-1] if found else None
            if last is None or here - last.end >= ALIGNMENT or here - last.start >= longest:
                last = Part(here, here, [])
                found.append(last)
            count = min(len(data) - done, last.start + longest - here)
            last.copies.append((here, data[done : done + count]))
            done += count
            found[-1] = replace(last, end=here + count)
    return found


def closed_up(found: Iterable[Part]) -> list[Part]:
    """The parts, with no more than padding between them in the buffer, however far apart they are in the message."""
    moved: list[Part] = []
    for part in found:
        gap = part.start - (moved[-1].end if moved else 0)
        before = moved[-1].before if moved else 0
        moved.append(replace(part, before=before + gap // ALIGNMENT * ALIGNMENT))
    return moved


def pack(episode: Episode) -> Message:
    """The message of an episode; shares the episode's memory.

    Raises:
        ValueError: an array holds objects other than text and None; names it.

    """
    buffer = _Buffer()
    place, describe = buffer.place, buffer.describe
    decisions = episode.decisions
    names = column_names(decisions) if decisions is not None else []
    arrays = {
        "observation": {name: describe(name, array) for name, array in episode.observation.items()},
        "decisions": {name: describe(name, column_of(decisions, name)) for name in names} if decisions else None,
        "labels": {name: describe(name, array) for name, array in episode.labels.items()},
        "terms": {name: describe(name, array) for name, array in episode.terms.items()},
        "controls": describe("controls", episode.controls),
        "rewards": describe("rewards", episode.rewards),
        "measures": {
            name: [describe(name, part) for part in (series.time_us, series.value, series.valid)]
            for name, series in episode.measures.items()
        },
    }
    header = {
        "version": VERSION,
        "request": asdict(episode.request),
        "ended": int(episode.ended),
        "failure": None if episode.failure is None else asdict(episode.failure),
        "driving_score": float(episode.driving_score),
        "initial_fault": bool(episode.initial_fault),
        "actor": episode.actor,
        "sampling": asdict(episode.sampling),
        "receipt": None if episode.receipt is None else vars(episode.receipt),
        "aggregations": {name: series.aggregation for name, series in episode.measures.items()},
        "arrays": arrays,
        "frames": [
            [f.slot, f.camera, f.time_us, f.frame_id, f.format, place(np.frombuffer(f.data, np.uint8)), len(f.data)]
            for f in episode.frames
        ],
    }
    header["size"] = buffer.size
    text = json.dumps(header, default=_plain, separators=(",", ":")).encode()
    return Message(text, buffer.pieces, buffer.size)


class _Buffer:
    """A buffer that grows by an episode's arrays; no copy of them.

    No functions inside `pack`: one that calls itself is a cycle, and an episode's memory would wait for the garbage
    collector (43 page-locked arrays of 64 MB were lost to 200 episodes).
    """

    def __init__(self) -> None:
        self.pieces: list[tuple[int, Bytes]] = []
        self.size = 0

    def place(self, data: Bytes) -> int:
        """Where the bytes go."""
        at = self.size
        if len(data):
            self.pieces.append((at, data))
            self.size = -(-(at + len(data)) // ALIGNMENT) * ALIGNMENT
        return at

    def describe(self, name: str, value: Any) -> Any:
        """What a header says of an array."""
        if isinstance(value, Ragged):
            return {"ragged": [self.describe(name, value.values), self.describe(name, value.offsets)]}
        if value.dtype.kind == "O":
            texts = value.tolist()
            if value.ndim != 1 or not all(text is None or isinstance(text, str) for text in texts):
                raise ValueError(f"{name!r}: object arrays must be [rows] of text or None; messages hold data only")
            return {"text": texts}
        data, strides = _memory(value)
        return {"type": value.dtype.str, "shape": value.shape, "strides": strides, "at": self.place(data)}


def unpack(header: bytes, buffer: Bytes) -> Episode:
    """The episode of a message; its arrays are views of `buffer`.

    Raises:
        ValueError: the header is no header, or an array lies outside the buffer.

    """
    try:
        data = json.loads(header)
        if data["version"] != VERSION or data["size"] != len(buffer):
            raise ValueError(f"version {data['version']} and {data['size']} bytes, got {len(buffer)} bytes")
        arrays = data["arrays"]

        def group(name: str) -> dict[str, Any]:
            return {key: _rebuild(about, buffer) for key, about in arrays[name].items()}

        measures = {
            name: MeasureSeries(
                _rebuild(time_us, buffer), _rebuild(value, buffer), _rebuild(valid, buffer), data["aggregations"][name]
            )
            for name, (time_us, value, valid) in arrays["measures"].items()
        }
        return Episode(
            request=EpisodeRequest(**data["request"]),
            ended=Ended(data["ended"]),
            failure=None if data["failure"] is None else Failure(**data["failure"]),
            measures=measures,
            driving_score=data["driving_score"],
            initial_fault=data["initial_fault"],
            actor=data["actor"],
            observation=group("observation"),
            decisions=None if arrays["decisions"] is None else decision_from_columns(group("decisions")),
            labels=group("labels"),
            controls=_rebuild(arrays["controls"], buffer),
            rewards=_rebuild(arrays["rewards"], buffer),
            terms=group("terms"),
            sampling=Sampling(**data["sampling"]),
            receipt=None if data["receipt"] is None else Receipt(**data["receipt"]),
            frames=tuple(
                Frame(slot, camera, time_us, frame_id, kind, _part(buffer, at, length).tobytes())
                for slot, camera, time_us, frame_id, kind, at, length in data["frames"]
            ),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise ValueError(f"a header of {len(header)} bytes does not describe its buffer: {err}") from err


def header_size(header: bytes) -> int:
    """Bytes of the buffer that belongs to a header."""
    size = json.loads(header)["size"]
    if not isinstance(size, int) or size < 0:
        raise ValueError(f"a buffer of {size!r} bytes")
    return size


def _memory(array: NDArray[Any]) -> tuple[Bytes, list[int] | None]:
    """The bytes behind an array, each once, and its strides where they are not those of a plain array."""
    extent = sum((n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)) + array.itemsize
    if array.size and min(array.strides, default=0) > 0 and extent < array.nbytes:
        first = as_strided(array, (1,), (array.itemsize,), writeable=False).view(np.uint8)
        return as_strided(first, (extent,), (1,), writeable=False), list(array.strides)
    plain = np.ascontiguousarray(array)
    return (plain.reshape(-1).view(np.uint8) if array.size else np.zeros(0, np.uint8)), None


def _rebuild(about: Any, buffer: Bytes) -> Any:
    if "ragged" in about:
        values, offsets = (_rebuild(part, buffer) for part in about["ragged"])
        return Ragged(values, offsets)
    if "text" in about:
        texts = np.empty(len(about["text"]), object)
        texts[:] = about["text"]
        return texts
    kind, shape = np.dtype(about["type"]), tuple(about["shape"])
    if kind.kind not in "biufSU" or any(not isinstance(n, int) or n < 0 for n in shape):
        raise ValueError(f"an array of {kind} {shape}")
    strides = about["strides"]
    if strides is None:
        return _part(buffer, about["at"], math.prod(shape) * kind.itemsize).view(kind).reshape(shape)
    if len(strides) != len(shape) or any(not isinstance(step, int) or step < 1 for step in strides):
        raise ValueError(f"strides {strides} of {shape}")
    extent = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + kind.itemsize
    data = _part(buffer, about["at"], -(-extent // kind.itemsize) * kind.itemsize).view(kind)
    return as_strided(data, shape, strides, writeable=False)


def _part(buffer: Bytes, at: int, length: int) -> Bytes:
    if at < 0 or length < 0 or at + length > len(buffer):
        raise ValueError(f"bytes {at} to {at + length} of {len(buffer)}")
    return buffer[at : at + length]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else dict(value)
