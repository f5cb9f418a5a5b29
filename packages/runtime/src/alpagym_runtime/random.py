"""Counter-based randomness: every number is a pure function of (seed, counter), whatever the batch or the process.

`mix` folds integers into one u64 seed; `uniform` and `normal` give row i of a batch from seeds[i] alone. Torch code
copies these arrays to its device, so both worlds see the same noise. The mixer is splitmix64's finaliser
(Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _scramble(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


def mix(*parts: ArrayLike) -> NDArray[np.uint64]:
    """Fold integers (scalars or arrays that broadcast, any sign) into u64 seeds; order matters."""
    shape = np.broadcast_shapes(*(np.shape(part) for part in parts))
    state = np.zeros(shape, np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            state = _scramble(state + _GOLDEN + _as_u64(part))
    return state


def mix_int(*parts: int) -> int:
    """`mix` of plain integers, as a plain integer in [0, 2**64)."""
    return int(mix(*parts))


def text_seed(text: str) -> int:
    """A u64 seed from text; unlike `hash`, the same in every process."""
    import hashlib

    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _as_u64(part: Any) -> NDArray[np.uint64]:
    if isinstance(part, int):
        return np.asarray(part & 0xFFFFFFFFFFFFFFFF, np.uint64)
    return np.asarray(part).astype(np.uint64)


def _bits(seeds: NDArray[np.uint64], size: int, stream: int) -> NDArray[np.uint64]:
    counters = np.arange(size, dtype=np.uint64)
    with np.errstate(over="ignore"):
        base = _scramble(np.asarray(seeds, np.uint64) + _GOLDEN * np.uint64(2 * stream + 1))
        return _scramble(base[..., None] + _GOLDEN * (counters + np.uint64(1)))


def uniform(seeds: NDArray[np.uint64], size: int, stream: int = 0) -> NDArray[np.float64]:
    """[N, size] float64 in [0, 1), 53 random bits each; `stream` separates uses of one seed."""
    return (_bits(seeds, size, stream) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normal(seeds: NDArray[np.uint64], size: int, stream: int = 0) -> NDArray[np.float64]:
    """[N, size] float64 standard normal (Box-Muller)."""
    half = (size + 1) // 2
    pairs = uniform(seeds, 2 * half, stream)
    radius = np.sqrt(-2.0 * np.log1p(-pairs[..., :half]))
    angle = 2.0 * math.pi * pairs[..., half:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)[..., :size]


def generator(*parts: int) -> np.random.Generator:
    """A numpy generator seeded by `mix`, for set-up code that draws many kinds of numbers in order."""
    return np.random.Generator(np.random.PCG64(mix_int(*parts)))
