"""Camera frames of an episode: each picture once, and a table which tick shows which.

Histories overlap, so a frame stands in up to K rows of `camera_<name>`. A frame is named by its id, but the id is never
trusted alone: pixels that differ under one id are kept as two frames, so nothing that was seen is lost.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.types import Frame, Observation

PIXELS = "rgb8"
"""Format of a frame that is kept as it was seen: h·w·3 bytes, RGB, row by row."""


@dataclass(frozen=True)
class StoredFrame:
    """A row of an episode's frame table.

    Attributes:
        camera: name without `camera_`.
        frame_id: u64; 0 where the simulator gave none.
        time_us: of exposure.
        tick: the first row of the episode that shows it, or that follows its arrival.
        format: `rgb8` | `jpeg` | `raw`.
        height, width: px, of the pixels as seen; 0 where nobody saw it.
        pixels_crc32: of those pixels; 0 where nobody saw it.
        slot: the simulator's slot.
        data: the bytes, any object with the buffer interface.

    """

    camera: str
    frame_id: int
    time_us: int
    tick: int
    format: str
    height: int
    width: int
    pixels_crc32: int
    slot: int
    data: Any


def camera_fields(observation: Observation) -> list[str]:
    """Names `camera_<name>` of the fields that hold pixels [N,K,h,w,3] u8 with frame ids beside them."""
    return [
        name
        for name, array in observation.items()
        if f"{name}_frame_id" in observation
        and array.ndim == 5
        and array.dtype == np.uint8
        and array.size
        and array.shape[4] == 3
    ]


def unique_frames(observation: Observation, field: str) -> tuple[list[StoredFrame], NDArray[np.int32]]:
    """The different pictures of a camera in the order of their first use, and the index [N,K] of each row's.

    No pixel is copied: `data` are views of the observation.
    """
    pixels, ids = observation[field], observation[f"{field}_frame_id"]
    times = observation.get(f"{field}_time_us", np.zeros(ids.shape, np.int64))
    rows, count, height, width, _ = pixels.shape
    flat = np.ascontiguousarray(pixels).reshape(rows, count, -1)
    words = flat.view(np.uint64) if flat.shape[2] % 8 == 0 else flat
    index = np.zeros((rows, count), np.int32)
    found: list[StoredFrame] = []
    by_id: dict[int, list[tuple[int, NDArray[Any]]]] = {}
    for t in range(rows):
        known = [int(i) for i in ids[t] if i]
        for k in range(count):
            # Id 0 repeats the oldest picture of its row.
            name = int(ids[t, k]) or (known[0] if known else 0)
            same = (j for j, other in by_id.get(name, ()) if np.array_equal(other, words[t, k]))
            j = next(same, -1)
            if j < 0:
                j = len(found)
                by_id.setdefault(name, []).append((j, words[t, k]))
                data = flat[t, k]
                crc = zlib.crc32(data)
                camera = field.removeprefix("camera_")
                found.append(StoredFrame(camera, name, int(times[t, k]), t, PIXELS, height, width, crc, -1, data))
            index[t, k] = j
    return found, index


def arrived_frames(frames: tuple[Frame, ...], time_us: NDArray[np.int64] | None) -> list[StoredFrame]:
    """Encoded frames as rows of the table, in their order; `tick` never falls."""
    rows: list[StoredFrame] = []
    last, top = 0, 0 if time_us is None or not len(time_us) else len(time_us) - 1
    for frame in frames:
        if time_us is not None:
            last = max(last, min(int(np.searchsorted(time_us, frame.time_us)), top))
        rows.append(
            StoredFrame(
                frame.camera, frame.frame_id, frame.time_us, last, frame.format, 0, 0, 0, frame.slot, frame.data
            )
        )
    return rows


def decode(data: Any, format: str, height: int, width: int) -> NDArray[np.uint8]:
    """Pixels [height,width,3] RGB of an encoded frame, as whoever saw it got them; see `alpagym_runtime.pictures`.

    Raises:
        ValueError: the bytes are no whole picture of that format.

    """
    if format in (PIXELS, "raw"):
        pixels = np.frombuffer(data, np.uint8)
        if pixels.size != height * width * 3:
            raise ValueError(f"a raw frame of {height}x{width} px has {height * width * 3} bytes, got {pixels.size}")
        return pixels.reshape(height, width, 3)
    from alpagym_runtime import pictures

    found = pictures.frame_format(memoryview(data))
    if format != found:
        raise ValueError(f"a frame of format {format!r} holds {found}; there are jpeg, png, raw")
    return pictures.decode(memoryview(data), height, width)
