"""What slots have seen through one camera, each picture once.

A row of `camera_<name>` holds K frames. Where the frames lie one tick apart, K - 1 of them stood in the row before
already: then only the newest is kept, and an episode's [T,K,h,w,3] is a read-only view that shows each picture up to K
times. The pixels themselves say whether it is so (an id could be wrong; comparing costs 2 us a row of two 48 x 96
pictures); from the first row on where it is not, all K frames of every row are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from alpagym_runtime.transport.picture_memory import Allocate, plain_memory

Pictures = NDArray[np.uint8]


def overlapping(frames: Pictures, histories: int) -> Pictures:
    """[T,K,h,w,3] view of T + K - 1 successive frames: row t shows frames t to t + K - 1."""
    rows, step = len(frames) - histories + 1, frames.strides[0]
    shape, strides = (rows, histories, *frames.shape[1:]), (step, step, *frames.strides[1:])
    return as_strided(frames, shape, strides, writeable=False)


def successive(pictures: Pictures) -> Pictures | None:
    """The T + K - 1 frames that rows [T,K,h,w,3] show, without a copy where the rows are `overlapping`.

    None where some row does not show the last K - 1 frames of the row before and one more.
    """
    if pictures.strides[0] == pictures.strides[1] and len(pictures):
        shape = (len(pictures) + pictures.shape[1] - 1, *pictures.shape[2:])
        return as_strided(pictures, shape, pictures.strides[1:], writeable=False)
    if not len(pictures) or not np.array_equal(pictures[1:, :-1], pictures[:-1, 1:]):
        return None
    return np.concatenate([pictures[0], pictures[1:, -1]])


class PictureTrack:
    """Pictures of one camera in the rows that slots have had so far; see the module's text.

    Args:
        slots, capacity: how many slots, and rows of each; more rows make it grow.
        histories: K.
        shape: h, w, 3.

    """

    def __init__(self, slots: int, capacity: int, histories: int, shape: tuple[int, ...]) -> None:
        self._histories = histories
        self._frames = np.zeros((slots, capacity + histories - 1, *shape), np.uint8)
        self._count = np.zeros(slots, np.int64)
        self._dense: Pictures | None = None

    def write(self, slots: NDArray[np.int64], at: NDArray[np.int64], pictures: Pictures) -> None:
        """Row `at` [n] of slots [n], pictures [n,K,h,w,3]; row 0 begins an episode, others follow the row before."""
        self._reserve(int(at.max(initial=0)) + 1)
        older = np.arange(self._histories - 1)
        begins = at == 0
        if self._dense is None and self._histories > 1:
            self._frames[slots[begins, None], older] = pictures[begins, :-1]
            if not np.array_equal(self._frames[slots[:, None], at[:, None] + older], pictures[:, :-1]):
                self._spread()
        self._count[slots] = at + 1
        if self._dense is not None:
            self._dense[slots, at] = pictures
        else:
            self._frames[slots, at + self._histories - 1] = pictures[:, -1]

    def read(self, slot: int, count: int, last: Pictures, allocate: Allocate = plain_memory) -> Pictures:
        """The first `count` rows of a slot and its last, [K,h,w,3]: a copy, read-only where rows share frames.

        A drive can end between two ticks; its last row then shares no frame, and all rows of this one are whole.
        """
        if self._dense is not None:
            return _joined([self._dense[slot, :count], last[None]], allocate)
        frames = self._frames[slot, : count + self._histories - 1]
        if np.array_equal(frames[count:], last[:-1]):
            return overlapping(_joined([frames, last[-1:]], allocate), self._histories)
        return _joined([overlapping(frames, self._histories), last[None]], allocate)

    def _spread(self) -> None:
        """From now on rows are kept whole."""
        slots, length, *shape = self._frames.shape
        self._dense = np.zeros((slots, length - self._histories + 1, self._histories, *shape), np.uint8)
        for slot, count in enumerate(self._count.tolist()):
            self._dense[slot, :count] = overlapping(self._frames[slot], self._histories)[:count]
        self._frames = self._frames[:, :0]

    def _reserve(self, rows: int) -> None:
        if self._dense is None:
            self._frames = _grown(self._frames, rows + self._histories - 1)
        else:
            self._dense = _grown(self._dense, rows)


def _joined(arrays: Sequence[Pictures], allocate: Allocate) -> Pictures:
    """The arrays behind one another, in new memory."""
    shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
    return np.concatenate(arrays, out=allocate(math.prod(shape)).reshape(shape))


def _grown(array: Pictures, rows: int) -> Pictures:
    """The array itself if it has so many rows on its second axis, else a larger copy."""
    if rows <= array.shape[1]:
        return array
    new = np.zeros((len(array), 2 * rows, *array.shape[2:]), np.uint8)
    new[:, : array.shape[1]] = array
    return new
