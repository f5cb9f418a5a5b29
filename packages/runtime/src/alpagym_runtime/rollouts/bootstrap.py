"""Intervals by a hierarchical bootstrap: scenes are drawn anew, training runs too where there are several, then drives.

Scenes and training runs are crossed (every run drives the same scenes), drives are nested in them. One set of draws
serves all quantities of an evaluation, so that differences and ratios of them are consistent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.random import generator

Float = NDArray[np.float64]
LEVEL = 0.95
CHUNK_BYTES = 32_000_000


class Bootstrap:
    """Draws of M drives.

    Args:
        scenes: [M], the scene of each drive, any integers.
        resamples: number of draws, B.
        runs: [M], the training run of each; None: all of one.
        seed: of the draws; equal seeds and shapes give equal draws.

    """

    def __init__(
        self, scenes: NDArray[np.int64], resamples: int, runs: NDArray[np.int64] | None = None, seed: int = 0
    ) -> None:
        runs = np.zeros(len(scenes), np.int64) if runs is None else runs
        self._resamples, self._seed, self._drives = resamples, seed, len(scenes)
        self._scenes, scene = np.unique(scenes, return_inverse=True)
        self._runs, run = np.unique(runs, return_inverse=True)
        cells, cell, count = np.unique(scene * len(self._runs) + run, return_inverse=True, return_counts=True)
        self._cell_scene, self._cell_run = np.divmod(cells, len(self._runs))
        order = np.argsort(cell, kind="stable")
        first = np.concatenate([[0], np.cumsum(count)[:-1]])
        # Cells by how many drives they hold: (cells [C], drives of each [C,c]).
        self._blocks = [
            (chosen, order[first[chosen, None] + np.arange(size)])
            for size in np.unique(count).tolist()
            for chosen in [np.flatnonzero(count == size)]
        ]

    def means(self, columns: Float, where: NDArray[np.bool_] | None = None) -> Float:
        """[B,K] resampled means of K columns [M,K]; cells outside `where` [M,K] are left out, NaN where all are."""
        kept = np.isfinite(columns) if where is None else where & np.isfinite(columns)
        values, kept = np.where(kept, columns, 0.0), kept.astype(np.float64)
        out = np.full((self._resamples, columns.shape[1]), np.nan)
        for start, weights in self._weights():
            total, weight = weights @ values, weights @ kept
            np.divide(total, weight, out=out[start : start + len(weights)], where=weight > 0.0)
        return out

    def _weights(self) -> Iterator[tuple[int, Float]]:
        """How often each drive is drawn: (first resample, [b,M]) in portions."""
        rng = generator(self._seed, 95)
        portion = max(1, CHUNK_BYTES // (8 * max(self._drives, 1)))
        for start in range(0, self._resamples, portion):
            size = min(portion, self._resamples - start)
            scenes = _draw(rng, len(self._scenes), size)
            runs = _draw(rng, len(self._runs), size)
            times = scenes[:, self._cell_scene] * runs[:, self._cell_run]
            weights = np.zeros((size, self._drives))
            for cells, drives in self._blocks:
                count = drives.shape[1]
                if count == 1:
                    weights[:, drives[:, 0]] = times[:, cells]
                else:
                    # Each time that a cell is drawn, its drives are drawn again.
                    weights[:, drives] = rng.multinomial(times[:, cells] * count, np.full(count, 1.0 / count))
            yield start, weights


def _draw(rng: np.random.Generator, count: int, size: int) -> NDArray[np.int64]:
    """[size,count]: how often each of `count` things comes up in `count` draws with replacement."""
    if count == 1:
        return np.ones((size, 1), np.int64)
    picks = rng.integers(0, count, (size, count)) + np.arange(size)[:, None] * count
    return np.bincount(picks.ravel(), minlength=size * count).reshape(size, count)


def bounds(samples: Float) -> tuple[float | None, float | None]:
    """The 95 % interval of resampled values [B]; None for a bound that is not finite."""
    known = samples[~np.isnan(samples)]
    if not len(known):
        return None, None
    # "lower" and "higher": no arithmetic between a finite value and an infinite ratio.
    low = float(np.quantile(known, (1.0 - LEVEL) / 2.0, method="lower"))
    high = float(np.quantile(known, (1.0 + LEVEL) / 2.0, method="higher"))
    return (low if np.isfinite(low) else None), (high if np.isfinite(high) else None)


def with_bounds(mean: float, samples: Float, count: int) -> dict[str, Any]:
    """mean, low, high and n; None where nothing was driven."""
    if not count or np.isnan(mean):
        return {"mean": None, "low": None, "high": None, "n": 0}
    low, high = bounds(samples)
    return {"mean": float(mean), "low": low, "high": high, "n": count}


def interval(values: Float, scenes: NDArray[np.int64], resamples: int, seed: int = 0) -> dict[str, Any]:
    """Mean of drives [M] with its 95 % interval: mean, low, high and n (drives); None where nothing was driven."""
    if not len(values):
        return with_bounds(np.nan, np.zeros(0), 0)
    samples = Bootstrap(scenes, resamples, seed=seed).means(values[:, None])[:, 0]
    return with_bounds(float(values.mean()), samples, len(values))
