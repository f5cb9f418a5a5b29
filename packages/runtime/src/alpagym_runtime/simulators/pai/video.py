"""Pictures of a clip by time: the last frame at or before, decoded in one pass from the key frame before it.

Frames have their own timestamps table; the constant-rate video only numbers them (number = round(pts / duration of a
frame)). A pass decodes forward and seeks only where another key frame lies between two wanted frames.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from alpagym_runtime.errors import CorruptFileError, OutOfRangeError
from alpagym_runtime.geometry import check_times
from alpagym_runtime.simulators.pai.tree import Tree, column

U8 = NDArray[np.uint8]


def frame_numbers(timestamps_us: NDArray[np.int64], query_us: ArrayLike, what: str) -> NDArray[np.int64]:
    """Numbers [...] of the last frames at or before times [...]; OutOfRangeError outside the clip."""
    query = np.asarray(query_us, np.int64)
    outside = (query < timestamps_us[0]) | (query > timestamps_us[-1])
    if outside.any():
        raise OutOfRangeError(int(query[outside][0]), int(timestamps_us[0]), int(timestamps_us[-1]), what)
    return np.searchsorted(timestamps_us, query, side="right") - 1


@dataclass
class ClipVideo:
    """One camera of one clip.

    Attributes:
        timestamps_us: [F] i64, clip-relative, one a frame.
        what: names the clip and camera in messages.

    """

    timestamps_us: NDArray[np.int64]
    what: str
    _source: Any

    @staticmethod
    def open(tree: Tree, camera: str, chunk: int, clip_id: str) -> ClipVideo:
        """From the chunk's zip; the video is opened when frames are wanted."""
        what = f"{camera} of clip {clip_id}"
        table = tree.table(camera, chunk, clip_id, "frame_timestamps")
        try:
            times = check_times(column(table, "timestamp", what).to_numpy(), what)
        except ValueError as err:
            raise CorruptFileError(f"timestamps: {err}") from err
        return ClipVideo(times, what, tree.member(camera, chunk, clip_id, "video"))

    def numbers(self, query_us: ArrayLike) -> NDArray[np.int64]:
        """Numbers of the last frames at or before times."""
        return frame_numbers(self.timestamps_us, query_us, self.what)

    def decode(self, numbers: NDArray[np.int64], size: tuple[int, int] | None = None) -> U8:
        """Pictures [K,h,w,3] u8 RGB of frames by number, resized to `size` (height, width) if given.

        Raises:
            CorruptFileError: the video is cut, or lacks a frame that the timestamps name.

        """
        out: list[U8 | None] = [None] * len(numbers)
        places: dict[int, list[int]] = {}
        for place, number in enumerate(numbers.tolist()):
            places.setdefault(number, []).append(place)

        def take(number: int, picture: U8) -> None:
            for place in places[number]:
                out[place] = picture

        _decode(self._source, sorted(places), size, take, self.what)
        return np.stack([picture for picture in out if picture is not None])


def _decode(
    source: Any, wanted: list[int], size: tuple[int, int] | None, take: Callable[[int, U8], None], what: str
) -> None:
    import av

    source.seek(0)
    left = list(wanted)
    try:
        with av.open(source) as container:
            stream = container.streams.video[0]
            # Threads of a frame each would delay the first picture; the caller spreads cameras over processes.
            stream.codec_context.thread_count = 1
            if stream.average_rate is None or stream.time_base is None:
                raise CorruptFileError(f"{what}: the video does not say its frame rate")
            step = int(1 / stream.average_rate / stream.time_base)
            start = stream.start_time or 0
            at = -(10**9)
            while left:
                target = start + left[0] * step
                if target > at:
                    container.seek(target, stream=stream, backward=True)
                for frame in container.decode(stream):
                    if frame.pts is None:
                        continue
                    number = round((frame.pts - start) / step)
                    at = frame.pts
                    if number == left[0]:
                        take(number, picture_of(frame, size))
                        left.pop(0)
                        if not left or _far(stream, frame.pts, start + left[0] * step, step):
                            break
                    elif number > left[0]:
                        raise CorruptFileError(f"{what}: the video has no frame {left[0]}, after it comes {number}")
                else:
                    raise CorruptFileError(f"{what}: the video ends before frame {left[0]}")
    except av.FFmpegError as err:
        raise CorruptFileError(f"{what}: the video cannot be decoded: {err}; download its chunk again") from err


def _far(stream: Any, pts: int, target: int, step: int) -> bool:
    """Whether a key frame lies between here and the target, so that seeking saves decoding."""
    entries = getattr(stream, "index_entries", None)
    if entries is None:  # before PyAV 17; two seconds are further than any usual group of pictures
        return target - pts > 60 * step
    entry = entries.search_timestamp(target, backward=True)
    return entry >= 0 and entries[entry].timestamp > pts


def picture_of(frame: Any, size: tuple[int, int] | None) -> U8:
    """A decoded frame as RGB [h,w,3], in its own size or resized."""
    if size is None or size == (frame.height, frame.width):
        picture: U8 = frame.to_ndarray(format="rgb24")
        return picture
    from av.video.reformatter import Interpolation

    # Averaging over areas while the colours are converted: one pass over the large picture.
    small: U8 = frame.reformat(size[1], size[0], "rgb24", interpolation=Interpolation.AREA).to_ndarray()
    return small
