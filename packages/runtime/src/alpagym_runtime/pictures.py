"""Encoded pictures: one decoder for all worlds and for stored episodes, so that what was seen can be seen again.

A file is decoded whole to height x width x 3 uint8 RGB or reported as bad; nothing is invented. The pixels are a
function of the file, the wanted size and `decoder()`.
"""

from __future__ import annotations

import struct
import zlib
from functools import lru_cache
from importlib import metadata
from typing import Literal

import cv2
import numpy as np
import simplejpeg
import xxhash
from numpy.typing import NDArray

MAX_PIXELS = 64_000_000
"""Larger pictures are refused before memory is taken for them."""

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class BadFrameError(ValueError):
    """Bytes that are no whole JPEG or PNG file."""


def frame_format(data: bytes | memoryview) -> Literal["jpeg", "png"]:
    """The kind of file by its first bytes; BadFrameError for any other."""
    if data[:3] == b"\xff\xd8\xff":
        return "jpeg"
    if data[:8] == PNG_SIGNATURE:
        return "png"
    if not data:
        raise BadFrameError("is empty; is the renderer skipped?")
    raise BadFrameError(f"is neither JPEG nor PNG: {len(data)} bytes that begin with {data[:8].hex()}")


def decode(data: bytes | memoryview, height: int, width: int) -> NDArray[np.uint8]:
    """The picture as uint8 RGB [height,width,3], resized if it came in another size.

    Raises:
        BadFrameError: it is not whole, or larger than `MAX_PIXELS`.

    """
    if frame_format(data) == "jpeg":
        rows, columns = _jpeg_size(data)
        _check_size(rows, columns)
        eighths = _eighths(rows, columns, height, width)
        try:
            image = simplejpeg.decode_jpeg(
                data, "RGB", min_height=_scaled(rows, eighths), min_width=_scaled(columns, eighths)
            )
        except ValueError as err:
            raise BadFrameError(f"is no whole JPEG: {err}") from err
    else:
        _check_png(data)
        decoded = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
        if decoded is None:
            raise BadFrameError("is no whole PNG")
        image = cv2.cvtColor(decoded, cv2.COLOR_BGR2RGB)
    if image.shape[:2] != (height, width):
        # Averaging over areas costs 3 ms of a 1080p frame's 11; below half the size linear loses nothing to see.
        shrinks = min(image.shape[0] / height, image.shape[1] / width) >= 2.0
        image = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
    return image


def frame_size(data: bytes | memoryview) -> tuple[int, int]:
    """Height and width in px as the file says; BadFrameError where its beginning is no JPEG's or PNG's."""
    if frame_format(data) == "png":
        if len(data) < 24:
            raise BadFrameError(f"is no whole PNG: cut at byte {len(data)}")
        width, height = struct.unpack_from(">II", data, 16)
    else:
        height, width = _jpeg_size(data)
    _check_size(height, width)
    return height, width


@lru_cache(maxsize=1)
def decoder() -> str:
    """What decodes and scales, with versions: the pixels are a function of it."""
    versions = [f"{name} {metadata.version(name)}" for name in ("simplejpeg", "opencv-python-headless")]
    return ", ".join([*versions, "scales 1/8 1/4 1/2"])


def describe(data: bytes | memoryview, height: int, width: int) -> str:
    """How `decode` gets from a whole file to a size: decoder, its version, the sizes and the scale, for receipts."""
    rows, columns = frame_size(data)
    if frame_format(data) == "png":
        return f"{decoder()}: PNG {rows}x{columns} to {height}x{width}"
    eighths = _eighths(rows, columns, height, width)
    return f"{decoder()}: JPEG {rows}x{columns} by {eighths}/8 to {height}x{width}"


def frame_id(data: bytes | memoryview) -> int:
    """A u64 of a file's content or of raw pixels, never 0: equal for equal frames everywhere.

    XXH3, so not against an adversary.
    """
    return xxhash.xxh3_64_intdigest(data) or 1


def _eighths(rows: int, columns: int, height: int, width: int) -> int:
    """In which scale of the DCT, in eighths, a JPEG is decoded: the least that is no smaller than what is wanted.

    Only 1, 2, 4 and 8, for which libjpeg-turbo has vector code: a 1080p frame takes 6.3 ms by 4/8, 6.9 by 3/8, 14 by
    7/8 and 7.5 as it is.
    """
    return next((k for k in (1, 2, 4) if _scaled(rows, k) >= height and _scaled(columns, k) >= width), 8)


def _scaled(pixels: int, eighths: int) -> int:
    return -(-pixels * eighths // 8)


def _jpeg_size(data: bytes | memoryview) -> tuple[int, int]:
    """Height and width in px, of the frame header; libjpeg's way to them lets other threads take the interpreter."""
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        kind = data[at + 1]
        if kind == 0xFF:  # a fill byte
            at += 1
        elif 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            return int.from_bytes(data[at + 5 : at + 7], "big"), int.from_bytes(data[at + 7 : at + 9], "big")
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    raise BadFrameError(f"is no whole JPEG: no frame header up to byte {at} of {len(data)}")


def _check_size(rows: int, columns: int) -> None:
    if rows < 1 or columns < 1 or rows * columns > MAX_PIXELS:
        raise BadFrameError(f"is {columns} x {rows}; at most {MAX_PIXELS} pixels are decoded")


def _check_png(data: bytes | memoryview) -> None:
    """Chunks whole and checked, up to the end mark: OpenCV decodes what there is of a cut file without a word."""
    at, first = 8, True
    while at + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind = bytes(data[at + 4 : at + 8])
        end = at + 12 + length
        if end > len(data):
            break
        (checksum,) = struct.unpack_from(">I", data, end - 4)
        if zlib.crc32(memoryview(data)[at + 4 : end - 4]) != checksum:
            raise BadFrameError(f"is no whole PNG: the checksum of its {kind!r} chunk at byte {at} is wrong")
        if first:
            if kind != b"IHDR" or length != 13:
                raise BadFrameError("is no PNG: it does not begin with its header")
            columns, rows = struct.unpack_from(">II", data, at + 8)
            _check_size(rows, columns)
            first = False
        if kind == b"IEND":
            return
        at = end
    raise BadFrameError(f"is no whole PNG: cut at byte {len(data)}")
