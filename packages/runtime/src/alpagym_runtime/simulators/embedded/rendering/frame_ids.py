"""Names of pictures by their content: equal pictures have equal ids in every process."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded.rendering.compiled import picture_kernel


def frame_ids(pictures: NDArray[np.uint8], slots: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.uint64]:
    """[j] u64, never 0, of pictures[slots, places] [N,F,h,w,3]; 64 bits, not against an adversary."""
    flat = pictures.reshape(len(pictures), pictures.shape[1], -1)
    out = np.empty(len(slots), np.uint64)
    if flat.shape[2] % 8 == 0:
        _hash(flat.view(np.uint64), slots, places, out)
    else:
        padded = np.zeros((len(slots), 1, -(-flat.shape[2] // 8) * 8), np.uint8)
        padded[:, 0, : flat.shape[2]] = flat[slots, places]
        _hash(padded.view(np.uint64), np.arange(len(slots)), np.zeros(len(slots), np.int64), out)
    return out


@picture_kernel
def _hash(words, slots, places, out):
    """Eight lanes that take a word each, turn and multiply (as in wyhash and xxHash64, whose primes these are)."""
    p1, p2, p3 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
    r29, r32, r35 = np.uint64(29), np.uint64(32), np.uint64(35)
    for j in range(len(slots)):
        row = words[slots[j], places[j]]
        count = len(row)
        a, b, c, d = p1, p2, p3, p1 ^ p2
        e, f, g, h = p1 ^ p3, p2 ^ p3, p1 + p2, p2 + p3
        k = 0
        while k + 8 <= count:
            # A lane's step can be undone, so two pictures that differ in one word differ here.
            a = (((a ^ row[k]) << r29) | ((a ^ row[k]) >> r35)) * p1
            b = (((b ^ row[k + 1]) << r29) | ((b ^ row[k + 1]) >> r35)) * p1
            c = (((c ^ row[k + 2]) << r29) | ((c ^ row[k + 2]) >> r35)) * p1
            d = (((d ^ row[k + 3]) << r29) | ((d ^ row[k + 3]) >> r35)) * p1
            e = (((e ^ row[k + 4]) << r29) | ((e ^ row[k + 4]) >> r35)) * p1
            f = (((f ^ row[k + 5]) << r29) | ((f ^ row[k + 5]) >> r35)) * p1
            g = (((g ^ row[k + 6]) << r29) | ((g ^ row[k + 6]) >> r35)) * p1
            h = (((h ^ row[k + 7]) << r29) | ((h ^ row[k + 7]) >> r35)) * p1
            k += 8
        while k < count:
            a = (((a ^ row[k]) << r29) | ((a ^ row[k]) >> r35)) * p3
            k += 1
        total = np.uint64(count)
        for lane in (a, b, c, d, e, f, g, h):
            total = (total ^ lane) * p1
            total ^= total >> r29
            total *= p2
            total ^= total >> r32
        out[j] = total if total != np.uint64(0) else np.uint64(1)
