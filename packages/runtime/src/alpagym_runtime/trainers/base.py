"""What trainers share: batches of decisions from episodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.rollouts.pictures import successive
from alpagym_runtime.types import Decision, Episode, Observation

__all__ = ["Observations", "StopTraining", "decision_batch", "join_pictures"]


class StopTraining(Exception):
    """Somebody asked the run to stop; raised between units of work, after which nothing is half done."""


@dataclass(frozen=True)
class Observations:
    """Observations of B decisions; a picture that stands in several of them is held once, as u8.

    Attributes:
        arrays: [B,...] by field, without pictures.
        frames: [M,h,w,3] u8 by field `camera_<name>`.
        shown: [B,K] i64 by field: which frames a row shows.

    """

    arrays: Observation
    frames: dict[str, NDArray[np.uint8]] = field(default_factory=dict)
    shown: dict[str, NDArray[np.int64]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def take(self, rows: NDArray[np.int64]) -> Observation:
        """The given rows as a policy reads them, pictures [n,K,h,w,3]."""
        out = {name: array[rows] for name, array in self.arrays.items()}
        return out | {name: frames[self.shown[name][rows]] for name, frames in self.frames.items()}

    def keep(self, rows: NDArray[np.int64]) -> Observations:
        """The given rows only; pictures are shared, not copied."""
        arrays = {name: array[rows] for name, array in self.arrays.items()}
        return replace(self, arrays=arrays, shown={name: index[rows] for name, index in self.shown.items()})

    @staticmethod
    def concatenate(parts: list[Observations]) -> Observations:
        """All rows of `parts`, in order; empties the list as it goes, so that memory never holds pictures twice."""
        names, cameras = list(parts[0].arrays), list(parts[0].frames)
        arrays = {name: np.concatenate([part.arrays[name] for part in parts]) for name in names}
        sizes = {name: np.cumsum([0, *(len(part.frames[name]) for part in parts)]) for name in cameras}
        shown = {
            name: np.concatenate([part.shown[name] + first for part, first in zip(parts, sizes[name], strict=False)])
            for name in cameras
        }
        frames = {name: np.empty((sizes[name][-1], *parts[0].frames[name].shape[1:]), np.uint8) for name in cameras}
        number = 0
        while parts:
            part = parts.pop(0)
            for name in cameras:
                frames[name][sizes[name][number] : sizes[name][number + 1]] = part.frames[name]
            number += 1
        return Observations(arrays, frames, shown)

    @staticmethod
    def of(observation: Observation) -> Observations:
        """Rows [B,...] of which each shows its own pictures; nothing is copied."""
        pictures = {name: array for name, array in observation.items() if _is_picture(name, array)}
        frames = {name: array.reshape(-1, *array.shape[2:]) for name, array in pictures.items()}
        shown = {name: np.arange(len(frames[name])).reshape(array.shape[:2]) for name, array in pictures.items()}
        return Observations({n: array for n, array in observation.items() if n not in pictures}, frames, shown)


def decision_batch(
    episodes: Sequence[Episode], drop: Sequence[str] = (), consume: bool = False
) -> tuple[Observations, Decision]:
    """Observations and decisions [B,...] of all ticks of all episodes, in order (the last observation is left out).

    Args:
        episodes: with arrays of the same names and shapes.
        drop: observation fields to leave out.
        consume: take the pictures out of the episodes, so that memory never holds them twice.

    """
    names = [name for name in episodes[0].observation if name not in drop]
    pictures = [name for name in names if _is_picture(name, episodes[0].observation[name])]
    arrays = {
        name: np.concatenate([e.observation[name][:-1] for e in episodes]) for name in names if name not in pictures
    }
    ticks = [len(episode.observation[name]) - 1 for episode in episodes for name in pictures[:1]]
    joined = {name: join_pictures(_pictures(episodes, name, consume), ticks) for name in pictures}
    frames, shown = ({name: pair[k] for name, pair in joined.items()} for k in range(2))
    decided = [episode.decisions for episode in episodes if episode.decisions is not None]
    return Observations(arrays, frames, shown), Decision.concatenate(decided)  # type: ignore[arg-type]


def _pictures(episodes: Sequence[Episode], name: str, consume: bool) -> Iterator[NDArray[np.uint8]]:
    for episode in episodes:
        yield (episode.observation.pop(name) if consume else episode.observation[name])[:-1]


def join_pictures(
    parts: Iterable[NDArray[np.uint8]], ticks: Sequence[int]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Frames [M,h,w,3] of a camera in several drives, each once, and the index [B,K] of those that each row shows.

    Args:
        parts: pictures [T,K,h,w,3] of each drive, asked for one after the other.
        ticks: T of each; their sum is B.

    """
    frames, shown, count, row = None, None, 0, 0
    for seen in parts:
        _, histories, *shape = seen.shape
        if frames is None or shown is None:
            # Room for the worst case, of which untouched pages take no memory.
            frames = np.empty((sum(ticks) * histories, *shape), np.uint8)
            shown = np.empty((sum(ticks), histories), np.int64)
        once = successive(seen)
        kept, apart = (seen.reshape(-1, *shape), histories) if once is None else (once, 1)
        frames[count : count + len(kept)] = kept
        shown[row : row + len(seen)] = count + apart * np.arange(len(seen))[:, None] + np.arange(histories)
        count, row = count + len(kept), row + len(seen)
    assert frames is not None, "no drive"
    assert shown is not None
    return frames[:count], shown


def _is_picture(name: str, array: NDArray[np.generic]) -> bool:
    return name.startswith("camera_") and array.ndim == 5
