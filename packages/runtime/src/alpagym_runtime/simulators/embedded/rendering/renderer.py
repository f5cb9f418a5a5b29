"""Renders batches of pictures: jobs grouped by scene, spread over threads; no picture depends on its neighbours."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.cameras import MountedCamera
from alpagym_runtime.simulators.embedded.rendering import textures
from alpagym_runtime.simulators.embedded.rendering.labels import ground_classes, label
from alpagym_runtime.simulators.embedded.rendering.paint import grain, render
from alpagym_runtime.simulators.embedded.rendering.quads import COLUMNS, MOST
from alpagym_runtime.simulators.embedded.rendering.raster import CORNERS, FAR, LANES
from alpagym_runtime.simulators.embedded.rendering.rays import Table, build_table, padded
from alpagym_runtime.simulators.embedded.rendering.scenery import Scenery
from alpagym_runtime.simulators.embedded.rendering.weather import DENSITY, Air

SMALL_PIXELS, TINY_PIXELS = 100 * 180, 64 * 128
"""Up to so many the ground is coarse; and an object takes four samples a pixel."""
FINE_TEXEL_M, COARSE_TEXEL_M = 0.05, 0.1


@dataclass(frozen=True)
class Jobs:
    """Pictures of one scene by one camera; J jobs, A road users.

    Attributes:
        places: [J] i64, index of each picture in the output.
        poses: [J,3] f64 x, y m, yaw rad of the rig, local.
        times_s: [J] f64, for the signals.
        actors: [J,A,5] f64 x, y m, yaw rad, speed m/s, 1 if braking; local.
        present: [J,A] bool.

    """

    places: NDArray[np.int64]
    poses: NDArray[np.float64]
    times_s: NDArray[np.float64]
    actors: NDArray[np.float64]
    present: NDArray[np.bool_]


class Eye:
    """A camera for pictures of one size: its tables, made once."""

    def __init__(self, camera: MountedCamera, height: int, width: int, antialias: int = 0) -> None:
        small = height * width <= SMALL_PIXELS
        self.camera, self.height, self.width = camera, height, width
        self.samples = antialias or (2 if height * width <= TINY_PIXELS else 1)
        self.texel_m = COARSE_TEXEL_M if small else FINE_TEXEL_M
        self.table: Table = build_table(camera, height, width, self.samples, self.texel_m, 4 if small else 1)
        self.most_taps = int(np.diff(self.table.starts[:, 1]).max(initial=1))
        # What working arrays depend on.
        self.size = height, width, self.samples, self.most_taps
        self._air: dict[str, tuple[NDArray[np.uint32], NDArray[np.float32]]] = {}

    def air(self, weather: str, air: Air) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
        """A weather's sky (packed colours, black without a ray), and the share of the ground's light that arrives.

        Both as the kernels read pixels; the share is 0 where there is no ground.
        """
        if weather not in self._air:
            table = self.table
            rays = np.stack([table.middle_x, table.middle_y, table.middle_z])
            sky = air.sky[np.clip(rays[2] * 255.0, 0.0, 255.0).astype(np.int64)].astype(np.uint32)
            sky[~rays.any(axis=0)] = 0
            colours = sky[:, 0] | (sky[:, 1] << 8) | (sky[:, 2] << 16)
            haze = table.distance.astype(np.float64) * air.numbers[DENSITY]
            # As `raster.shade` has it.
            share = np.where(table.distance > 0.0, 1.0 / (1.0 + haze + 0.5 * haze * haze), 0.0)
            self._air[weather] = colours, padded(share.astype(np.float32))
        return self._air[weather]


class Renderer:
    """Draws jobs; `threads` of them beside each other."""

    def __init__(self, threads: int = 1) -> None:
        self._pool = ThreadPoolExecutor(threads, "render") if threads > 1 else None
        self._threads = threads
        self._own = threading.local()
        self.quads = 0

    def draw(self, eye: Eye, groups: Sequence[tuple[Scenery, Jobs]], out: NDArray[np.uint8]) -> None:
        """Fill out[places] [*,h,w,3] uint8 RGB, contiguous."""
        if self._pool is None:
            for scenery, jobs in groups:
                self.quads += self._draw(eye, scenery, jobs, out)
            return
        parts = [(scenery, part) for scenery, jobs in groups for part in _split(jobs, self._threads)]
        futures = [self._pool.submit(self._draw, eye, *part, out) for part in parts]
        self.quads += sum(future.result() for future in futures)

    def labels(
        self, eye: Eye, scenery: Scenery, jobs: Jobs
    ) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.uint8]]:
        """Depth (m along the ray, inf: sky), instance and semantic class [h,w] of the first job; one sample a pixel."""
        assert eye.samples == 1, "labels are taken at the pixels' centres"
        size = (eye.height, eye.width)
        depth, instance, kind = np.empty(size, np.float32), np.empty(size, np.int32), np.empty(size, np.uint8)
        label(
            depth, instance, kind, jobs.poses[0], float(jobs.times_s[0]), jobs.actors[0], jobs.present[0],
            *scenery.users, eye.table, scenery.ground, scenery.walls, scenery.trees, scenery.heads, *scenery.signals,
            scenery.air, self._scratch(eye), textures.texels(), ground_classes(),
        )  # fmt: skip
        depth[depth >= FAR] = np.inf
        return depth, instance, kind

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _draw(self, eye: Eye, scenery: Scenery, jobs: Jobs, out: NDArray[np.uint8]) -> int:
        sky, clear = eye.air(scenery.weather, scenery.air)
        return int(
            render(
                out.reshape(len(out), -1), sky, clear, jobs.places, jobs.poses, jobs.times_s, jobs.actors,
                jobs.present, *scenery.users, eye.table, scenery.ground, scenery.walls, scenery.trees, scenery.heads,
                *scenery.signals, scenery.air, self._scratch(eye), textures.texels(), grain(),
            )
        )  # fmt: skip

    def _scratch(self, eye: Eye) -> tuple[Any, ...]:
        """Working arrays of this thread for a size of picture."""
        size, kept = eye.size, getattr(self._own, "kept", None)
        if kept is None:
            kept = self._own.kept = {}
        if size not in kept:
            rows = eye.height * eye.samples
            wide, wide_pixels = eye.table.wide.tolist()
            samples = eye.samples * wide
            kept[size] = (
                np.empty((MOST, COLUMNS), np.float32),
                np.empty((MOST, 16), np.float32),
                np.empty((64 * rows, 4), np.int32),
                np.empty(rows, np.int64),
                np.empty((CORNERS, 2)),
                np.empty((4, 3)),
                np.empty((8, 3)),
                np.empty(rows, np.int64),
                np.empty(rows, np.int64),
                # A row of samples, and of pixels.
                np.zeros(samples, np.float32),
                np.zeros(samples, np.int32),
                np.zeros(samples // LANES, np.float32),
                np.zeros(samples, np.uint32),
                np.zeros(wide, np.bool_),
                np.zeros(wide_pixels // LANES, np.int32),
                np.zeros(wide_pixels, np.uint32),
                np.zeros(wide_pixels, np.int64),
                np.zeros(wide_pixels, np.float32),
                np.zeros(eye.most_taps, np.int32),
                np.zeros(eye.most_taps, np.int32),
                np.zeros(eye.most_taps, np.int32),
                np.zeros((eye.height + 1) * wide_pixels, np.float32),
                np.empty(eye.height, np.bool_),
            )
        return kept[size]  # type: ignore[no-any-return]


def _split(jobs: Jobs, parts: int) -> list[Jobs]:
    bounds = np.linspace(0, len(jobs.places), min(parts, len(jobs.places)) + 1).astype(int)
    return [
        Jobs(*(getattr(jobs, name)[a:b] for name in ("places", "poses", "times_s", "actors", "present")))
        for a, b in pairwise(bounds)
        if b > a
    ]
