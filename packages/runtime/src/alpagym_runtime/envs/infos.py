"""What a step of the vector environment found out, and Gymnasium's way to say it: arrays with masks beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.envs.core import CoreBatch
from alpagym_runtime.types import Ended, Failure

Flags = NDArray[np.bool_]
ENDED_NAMES = [ended.name.lower() for ended in Ended]
FAILED = int(Ended.FAILED)
TERMINATED = np.array([ended.terminated for ended in Ended])
TRUNCATED = np.array([ended.truncated for ended in Ended])


def text_column(count: int, texts: Mapping[int, str]) -> NDArray[np.object_]:
    """[count] of text by row, None elsewhere."""
    column = np.full(count, None, object)
    for row, text in texts.items():
        column[row] = text
    return column


class StepInfos:
    """Rewards, flags and infos of one step of N slots, gathered from the batches that make it up.

    Attributes:
        rewards: [N] f64.
        terminated, truncated: [N].
        failures: by slot.
        failed_starts: [N], scenes that could not be started in this step.

    """

    def __init__(self, count: int, terms: list[str], late: bool) -> None:
        self.rewards = np.zeros(count)
        self.terminated, self.truncated = np.zeros(count, bool), np.zeros(count, bool)
        self.failures: dict[int, Failure] = {}
        self.failed_starts = np.zeros(count, np.int64)
        self._terms = {name: np.zeros(count) for name in terms}
        self._late = late
        self._ended = np.zeros(count, np.int64)
        self._score = np.zeros(count)
        self._initial_fault = np.zeros(count, bool)
        self._sums: dict[str, NDArray[np.float64]] = {}

    def take_in(self, batch: CoreBatch, rows: Any, sums: Mapping[str, NDArray[np.float64]]) -> None:
        """Add a delivered batch; `rows` are its slots (slice or indices), `sums` [N] the episodes' terms so far."""
        ended = batch.tick.ended
        self.rewards[rows] = batch.rewards
        for name, paid in batch.terms.items():
            self._terms[name][rows] = paid
            sums[name][rows] += paid
        if not ended.any():
            return
        self._ended[rows] = ended
        self.terminated[rows], self.truncated[rows] = TERMINATED[ended], TRUNCATED[ended]
        self._sums = {name: values.copy() for name, values in sums.items()}
        slots = batch.tick.slots.tolist()
        for row, episode in batch.episodes.items():
            slot = slots[row]
            if episode.failure is not None:
                self.failures[slot] = episode.failure
                continue
            self._score[slot], self._initial_fault[slot] = episode.driving_score, episode.initial_fault

    def forget(self, rows: NDArray[np.int64]) -> None:
        """Slots whose start failed and is tried again."""
        self.failed_starts[rows] += 1
        self._ended[rows] = self.rewards[rows] = 0
        self.terminated[rows] = self.truncated[rows] = False
        for row in rows.tolist():
            self.failures.pop(row, None)

    def driven(self, mask: Flags) -> dict[str, Any]:
        """The info of slots [N] that drove, as Gymnasium's vector environments batch that of single ones."""
        info: dict[str, Any] = {}
        if not mask.any():
            return info
        put_all(info, "terms", self._terms, mask)
        if self._late:
            _put(info, "reward_is_late", np.ones(len(mask), bool), mask)
        over = mask & (self._ended > 0) & (self._ended != FAILED)
        if over.any():
            rows = np.flatnonzero(over)
            ended = text_column(len(mask), {r: ENDED_NAMES[self._ended[r]] for r in rows.tolist()})
            info |= {"ended": ended, "_ended": over.copy()}
            _put(info, "driving_score", self._score, over)
            _put(info, "is_success", self._score >= 1.0, over)
            _put(info, "initial_fault", self._initial_fault, over)
            put_all(info, "episode_terms", self._sums, over)
        if self.failures:
            failed = np.zeros(len(mask), bool)
            failed[list(self.failures)] = True
            failed &= mask
            texts = {slot: failure.text for slot, failure in self.failures.items() if mask[slot]}
            _put(info, "failed", failed, failed)
            info |= {"failure": text_column(len(mask), texts), "_failure": failed.copy()}
        return info


def _put(info: dict[str, Any], name: str, values: NDArray[Any], mask: Flags) -> None:
    info[name] = np.where(mask, values, np.zeros((), values.dtype))
    info[f"_{name}"] = mask.copy()


def put_all(info: dict[str, Any], name: str, columns: Mapping[str, NDArray[np.float64]], mask: Flags) -> None:
    """A dict of columns [N] under a name, with the masks that Gymnasium puts beside each."""
    part: dict[str, Any] = {}
    for key, values in columns.items():
        _put(part, key, values, mask)
    info[name], info[f"_{name}"] = part, mask.copy()
