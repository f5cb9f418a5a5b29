"""Videos written a frame at a time: any length in the memory of one picture, whole or absent on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.errors import ConfigError
from alpagym_runtime.files import replacing

CODECS = {
    "h264": ("libx264", "yuv420p", {"crf": "20", "preset": "medium"}),
    "vp9": ("libvpx-vp9", "yuv420p", {"crf": "32", "b": "0", "row-mt": "0"}),
    "webp": ("libwebp_anim", "yuv420p", {"quality": "75", "loop": "0"}),
}
"""Name -> encoder of FFmpeg, pixel format, options."""

CONTAINERS = {"mp4": ("h264", "vp9"), "mkv": ("h264", "vp9"), "webm": ("vp9",), "webp": ("webp",)}
"""File ending -> codecs that it may hold, the usual one first."""


class VideoWriter:
    """A context manager that encodes pictures as they come.

    The file appears under its name when the block ends well; if it raises, or no picture was written, nothing is left.

    Args:
        path: its ending (mp4, mkv, webm, webp) names the container, unless `container` does.
        fps: pictures a second.
        codec: h264 | vp9 | webp; None takes the container's usual one.
        options: further options of the encoder, such as {"crf": "28"}.
        container: one of the endings.

    Raises:
        ConfigError: an ending or codec that there is not, or that do not go together; a rate of 0 or less.

    """

    def __init__(
        self,
        path: Path | str,
        fps: float | Fraction,
        codec: str | None = None,
        options: Mapping[str, str] | None = None,
        container: str | None = None,
    ) -> None:
        self._path = Path(path)
        ending = container or self._path.suffix.removeprefix(".")
        if ending not in CONTAINERS:
            raise ConfigError(f"no video is named {self._path.name!r}; endings: {', '.join(CONTAINERS)}", key="path")
        codec = codec or CONTAINERS[ending][0]
        if codec not in CONTAINERS[ending]:
            raise ConfigError(f".{ending} holds {' or '.join(CONTAINERS[ending])}, got {codec!r}", key="codec")
        if not fps > 0:
            raise ConfigError(f"must be above 0, got {fps}", key="fps")
        self._ending, self._codec, self._options = ending, codec, dict(options or {})
        self._rate = Fraction(fps).limit_denominator(1_000_000)
        self._place: AbstractContextManager[Path] | None = None
        self._container: Any = None
        self._stream: Any = None
        self._size = (0, 0)

    def __enter__(self) -> VideoWriter:
        import av

        self._place = replacing(self._path)
        temporary = self._place.__enter__()
        self._container = av.open(str(temporary), "w", format={"mkv": "matroska"}.get(self._ending, self._ending))
        return self

    def write(self, frame: NDArray[np.uint8]) -> None:
        """Encode the next picture [h,w,3] uint8 RGB. All have the first one's size; an odd edge is repeated once.

        Raises:
            ValueError: another shape or type.

        """
        import av

        assert self._container is not None, "write() belongs inside the with block"
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise ValueError(f"a picture is [h,w,3] uint8 RGB, got {frame.dtype} {frame.shape} for {self._path}")
        if self._stream is None:
            self._size = frame.shape[:2]
            encoder, pixels, options = CODECS[self._codec]
            self._stream = self._container.add_stream(encoder, rate=self._rate)
            # Colour is stored at half size: both sides must be even.
            self._stream.height, self._stream.width = (n + n % 2 for n in self._size)
            self._stream.pix_fmt = pixels
            # One thread: the bytes do not depend on the machine's cores.
            self._stream.codec_context.thread_count = 1
            self._stream.options = options | self._options
        if frame.shape[:2] != self._size:
            raise ValueError(f"a picture of {frame.shape[:2]} in a video of {self._size} ({self._path})")
        even = np.pad(frame, ((0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)), mode="edge")
        picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(even), format="rgb24")
        self._container.mux(self._stream.encode(picture))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._place is not None
        try:
            if kind is None:
                if self._stream is None:
                    raise ValueError(f"no picture was written to {self._path}")
                self._container.mux(self._stream.encode())
        except BaseException as err:
            self._abandon(type(err), err)
            raise
        if kind is not None:
            self._abandon(kind, error)
            return
        self._container.close()
        self._place.__exit__(None, None, None)

    def _abandon(self, kind: type[BaseException], error: BaseException | None) -> None:
        """Close and remove the partial file; the caller raises the error."""
        assert self._place is not None
        with contextlib.suppress(Exception):  # a container without a stream cannot be finished
            self._container.close()
        with contextlib.suppress(kind):
            self._place.__exit__(kind, error, None)
