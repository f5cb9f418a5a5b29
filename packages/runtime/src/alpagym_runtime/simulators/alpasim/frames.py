"""Camera frames: kept sorted by their own time, decoded off the drive path, and only if a policy will see them."""

from __future__ import annotations

import queue
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.pictures import BadFrameError, decode, frame_id


@dataclass(slots=True, eq=False)
class Picture:
    """One frame of one camera as it arrived, and, once decoded, as the policy sees it."""

    camera: str
    time_us: int
    data: bytes | memoryview
    image: NDArray[np.uint8] | None = None
    frame_id: int = 0
    error: str | None = None
    queued: bool = False
    delivered: bool = False

    @property
    def done(self) -> bool:
        """Decoded or known to be bad."""
        return self.image is not None or self.error is not None


class CameraFrames:
    """Frames of one camera of one session, by their own time."""

    def __init__(self, count: int, step_us: int) -> None:
        self._count, self._step_us = count, step_us
        self._times: list[int] = []
        self._pictures: list[Picture] = []
        self._limit = 64 + 4 * count
        self.interval_us = 0

    def __len__(self) -> int:
        return len(self._times)

    def add(self, picture: Picture) -> bool:
        """Take a frame in any order; False where its time is known already."""
        at = bisect_left(self._times, picture.time_us)
        if at < len(self._times) and self._times[at] == picture.time_us:
            return False
        self._times.insert(at, picture.time_us)
        self._pictures.insert(at, picture)
        if len(self._times) > 1:
            self.interval_us = self._times[-1] - self._times[-2]
        if len(self._times) > self._limit:
            self._drop(len(self._times) - self._limit)
        return True

    def choose(self, now_us: int) -> list[Picture] | None:
        """The frames that a policy sees at a time, oldest first; None if none is that old.

        Frame k is the newest at or before now - (K - 1 - k) * step; where none is that old, the oldest stands in.
        """
        chosen = []
        for k in range(self._count - 1, -1, -1):
            at = bisect_right(self._times, now_us - k * self._step_us) - 1
            chosen.append(self._pictures[max(at, 0)] if self._times else None)
        if chosen[-1] is None or chosen[-1].time_us > now_us:
            return None
        return [picture for picture in chosen if picture is not None]

    def is_old_enough(self, picture: Picture, now_us: int, k: int) -> bool:
        """Whether a frame chosen at place k is no stand-in."""
        return picture.time_us <= now_us - (self._count - 1 - k) * self._step_us

    def will_be_seen(self, time_us: int, next_us: int, period_us: int) -> bool:
        """Whether a frame of this time will be chosen at `next_us` or a multiple of the period later."""
        if not self.interval_us:
            return True
        return any((next_us - k * self._step_us - time_us) % period_us < self.interval_us for k in range(self._count))

    def prune(self, now_us: int) -> None:
        """Forget frames that no decision at or after `now_us` will see."""
        oldest = now_us - (self._count - 1) * self._step_us
        self._drop(bisect_right(self._times, oldest) - 1)

    def prune_to_newest(self) -> None:
        """`prune` before the first decision, which cannot lie before the newest frame by more than an interval."""
        self.prune(self._times[-1] - self.interval_us)

    def _drop(self, count: int) -> None:
        if count > 0:
            del self._times[:count], self._pictures[:count]


class DecodePool:
    """A few threads that decode pictures; libjpeg and OpenCV let go of the interpreter while they work."""

    def __init__(self, threads: int, done: Callable[[object, Picture], None]) -> None:
        self._done = done
        self._jobs: queue.SimpleQueue[tuple[object, Picture, tuple[int, int]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=f"decode-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, owner: object, picture: Picture, size: tuple[int, int]) -> None:
        """Queue a picture; `done(owner, picture)` is called from a thread of the pool."""
        picture.queued = True
        self._jobs.put((owner, picture, size))

    def close(self) -> None:
        """End the threads once the jobs at hand are done; the queue is dropped."""
        with suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            owner, picture, size = job
            try:
                image = decode(picture.data, *size)
                picture.frame_id = frame_id(picture.data)
                picture.image = image
            except Exception as err:  # a decoder's own error is the frame's fault, and the pool must live
                picture.error = str(err) if isinstance(err, BadFrameError) else f"cannot be decoded: {err}"
            self._done(owner, picture)
