"""What the ground is made of: a byte a texel, an entry in a palette of mixtures.

The palette's entries are shares of materials, not colours: one picture of a road serves every season and light, and a
texel that averages asphalt, paint and grass is as small as any other.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

ASPHALT, WHITE, YELLOW, GRASS, SIDEWALK, KERB = range(6)
MATERIALS = ("asphalt", "white", "yellow", "grass", "sidewalk", "kerb")

CODES = np.array([[0, 0, 0], [255, 255, 255], [255, 230, 0], [0, 190, 40], [40, 60, 255], [255, 40, 160]], np.float64)
"""What a material is drawn as before it becomes a mixture: far apart, so that no two common mixtures coincide."""

_STEPS = {
    (ASPHALT, WHITE): 40,
    (ASPHALT, YELLOW): 26,
    (ASPHALT, GRASS): 26,
    (ASPHALT, KERB): 18,
    (ASPHALT, SIDEWALK): 22,
    (SIDEWALK, GRASS): 22,
    (KERB, GRASS): 14,
    (KERB, SIDEWALK): 14,
    (YELLOW, WHITE): 5,
    (WHITE, GRASS): 10,
    (WHITE, SIDEWALK): 8,
    (WHITE, KERB): 5,
}
"""Mixtures between two materials, ends left out."""


@lru_cache(maxsize=1)
def mixtures() -> NDArray[np.float64]:
    """[256,6] shares of the materials in each entry; the first six are pure."""
    rows = list(np.eye(len(MATERIALS)))
    for (a, b), count in _STEPS.items():
        for share in np.arange(1, count + 1) / (count + 1):
            rows.append(np.eye(len(MATERIALS))[a] * (1.0 - share) + np.eye(len(MATERIALS))[b] * share)
    # The rest: asphalt, kerb or sidewalk, and grass in thirds and with a little paint, as distant roads average.
    rng = np.random.default_rng(7)
    while len(rows) < 256:
        rows.append(rng.dirichlet([0.9, 0.15, 0.1, 0.9, 0.4, 0.2]))
    return np.array(rows[:256])


@lru_cache(maxsize=1)
def nearest_mixture() -> NDArray[np.uint8]:
    """[32768] entry for a drawn colour, by its upper five bits a channel: r, g, b."""
    known = (mixtures() @ CODES).astype(np.float32)
    axis = np.arange(32, dtype=np.float32) * (255.0 / 31.0)
    table = np.empty(32768, np.uint8)
    square = (known**2).sum(axis=1)
    for r in range(32):
        g, b = np.meshgrid(axis, axis, indexing="ij")
        asked = np.stack([np.full(1024, axis[r]), g.ravel(), b.ravel()], axis=1)
        table[r * 1024 : (r + 1) * 1024] = np.argmin(square - 2.0 * asked @ known.T, axis=1)
    return table
