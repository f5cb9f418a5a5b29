"""Features of pictures that were seen before, by frame id.

A policy with four frames a camera sees three of them again at the next tick, and what the vision tower makes of a
picture depends on nothing else. The features stay on the device, in one array of fixed size; the ones used longest ago
make room. They are good for one version of the weights.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alpagym_alpamayo_r1.processing import Patches

See = Callable[[Tensor, Tensor], tuple[Tensor, list[Tensor]]]
"""(pixel_values, image_grid_thw) to embeddings [P,W] and the deep layers' [P,W]."""


class VisionCache:
    """Features by frame id.

    Args:
        see: the vision tower.
        patches: cuts pictures up.
        capacity: pictures that are kept; at least those of one forward.

    Attributes:
        seen, reused: pictures so far that the tower saw, and that it did not have to.

    """

    def __init__(self, see: See, patches: Patches, capacity: int) -> None:
        self._see, self._patches, self.capacity = see, patches, capacity
        self._place: OrderedDict[int, int] = OrderedDict()
        self._pool: Tensor | None = None  # [capacity, 1 + deep layers, tokens, W]
        self._version: int | None = None
        self.seen = self.reused = 0

    def features(
        self, pictures: NDArray[np.uint8], frame_ids: NDArray[np.uint64], version: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Embeddings [P·n,W] of pictures [P,h,w,3] and the deep layers', n tokens a picture.

        A frame id of 0 says nothing of a picture, which is then seen again; other ids name one picture for good.
        """
        if version != self._version:
            self.forget()
            self._version = version
        ids = frame_ids.tolist()
        if len(ids) > self.capacity:
            raise ValueError(f"{len(ids)} pictures at once, room for {self.capacity}")
        for frame_id in ids:
            if frame_id in self._place:
                self._place.move_to_end(frame_id)
        # One of each unknown id, and every picture without one.
        missing = list(
            {(frame_id or -1 - k): k for k, frame_id in enumerate(ids) if frame_id not in self._place}.values()
        )
        where = [self._place.get(frame_id, -1) for frame_id in ids]
        if missing:
            fresh = self._look(pictures[missing])
            for picture, row in zip(missing, self._store([ids[k] for k in missing], fresh), strict=True):
                where[picture] = row
            where = [self._place[i] if row < 0 else row for i, row in zip(ids, where, strict=True)]
        self.seen += len(missing)
        self.reused += len(ids) - len(missing)
        assert self._pool is not None
        rows = self._pool[torch.tensor(where, device=self._pool.device)]
        return rows[:, 0].flatten(0, 1), [rows[:, 1 + k].flatten(0, 1) for k in range(rows.shape[1] - 1)]

    def forget(self) -> None:
        """Keep nothing: the weights are others."""
        self._place.clear()

    def _look(self, pictures: NDArray[np.uint8]) -> Tensor:
        """Features [M,1+deep,n,W]."""
        values, grid = self._patches(pictures)
        embedded, deep = self._see(values, grid)
        return torch.stack([x.unflatten(0, (len(pictures), -1)) for x in (embedded, *deep)], 1)

    def _store(self, frame_ids: list[int], fresh: Tensor) -> list[int]:
        if self._pool is None:
            self._pool = fresh.new_zeros(self.capacity, *fresh.shape[1:])
        free = sorted(set(range(self.capacity)) - set(self._place.values()), reverse=True)
        rows = []
        for frame_id in frame_ids:
            row = free.pop() if free else self._place.popitem(last=False)[1]
            rows.append(row)
            if frame_id:
                self._place[frame_id] = row
        self._pool[torch.tensor(rows, device=fresh.device)] = fresh
        return rows
