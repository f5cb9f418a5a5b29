"""Colours and heights of a scene's road users, drawn from its id."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.random import generator, text_seed
from alpagym_runtime.simulators.embedded.rendering.weather import APPEARANCE

PAINTS = np.array(
    [(222, 222, 220), (32, 32, 36), (120, 124, 130), (176, 180, 184), (158, 32, 30), (30, 62, 128), (70, 86, 72),
     (214, 168, 42), (96, 72, 56), (54, 100, 140)]
) / 255.0  # fmt: skip
CLOTHES = np.array(
    [(40, 44, 62), (30, 30, 32), (120, 36, 40), (58, 92, 70), (196, 188, 170),
     (70, 90, 140), (150, 120, 60), (90, 60, 100)]
) / 255.0  # fmt: skip
HAIR = np.array([(40, 30, 24), (74, 52, 34), (128, 96, 54), (24, 22, 22), (150, 146, 142)]) / 255.0


def looks_of(scene_id: str, count: int) -> NDArray[np.float64]:
    """[A,10] colours and height of a scene's road users: legs or paint, body, hair, share of the height."""
    rng = generator(text_seed(scene_id), APPEARANCE, 2)
    looks = np.zeros((count, 10))
    for a in range(count):
        looks[a, :3] = PAINTS[int(rng.integers(len(PAINTS)))]
        looks[a, 3:6] = CLOTHES[int(rng.integers(len(CLOTHES)))]
        looks[a, 6:9] = HAIR[int(rng.integers(len(HAIR)))]
        looks[a, 9] = rng.uniform(0.0, 1.0)
    return looks
