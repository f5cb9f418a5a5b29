"""Scenes as flat arrays that the compiled kernels read: one arena, a row of offsets a scene.

Slots of one group share a scene, so starting an episode copies nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded.scene import Scene


class Bank(NamedTuple):
    """Flat arrays; `rows` and `numbers` are indexed by scene, the rest by the offsets in `rows`."""

    rows: NDArray[np.int64]  # [S,12] see Row
    numbers: NDArray[np.float64]  # [S,7] see Number
    route: NDArray[np.float64]  # [*,3] x, y, arc length
    segments: NDArray[np.float64]  # [*,4]
    band_offsets: NDArray[np.int64]
    band_segments: NDArray[np.int64]
    log: NDArray[np.float64]  # [*,4]
    actors: NDArray[np.int64]  # [*,4] track offset, first, last, kind
    sizes: NDArray[np.float64]  # [*,2]
    tracks: NDArray[np.float64]  # [*,4]


# Columns of `rows`.
ROUTE, ROUTE_N, SEGMENT, SEGMENT_N, BAND, BAND_N, BAND_SEGMENT, BAND_SEGMENT_N, LOG, LOG_N, ACTOR, ACTOR_N = range(12)
# Columns of `numbers`.
BAND_LOW, BAND_HEIGHT, LENGTH, WIDTH, CENTRE_OFFSET, WHEELBASE, SPEED_LIMIT = range(7)


class SceneBank:
    """Holds up to `capacity` scenes; when it overflows, scenes that no slot uses are dropped and the rest is packed."""

    def __init__(self, capacity: int = 2048) -> None:
        self._capacity = capacity
        self._scenes: dict[str, Scene] = {}
        self._index: dict[str, int] = {}
        self._pending: list[Scene] = []
        self.bank = Bank(
            np.zeros((0, 12), np.int64),
            np.zeros((0, 7)),
            route=np.zeros((0, 3)),
            segments=np.zeros((0, 4)),
            band_offsets=np.zeros(0, np.int64),
            band_segments=np.zeros(0, np.int64),
            log=np.zeros((0, 4)),
            actors=np.zeros((0, 4), np.int64),
            sizes=np.zeros((0, 2)),
            tracks=np.zeros((0, 4)),
        )

    def __contains__(self, scene_id: str) -> bool:
        return scene_id in self._scenes

    def __getitem__(self, scene_id: str) -> Scene:
        return self._scenes[scene_id]

    def add(self, scenes: list[Scene], in_use: set[str]) -> bool:
        """Make scenes resident; returns True when the indices of resident scenes changed."""
        fresh = [scene for scene in scenes if scene.scene_id not in self._scenes]
        if not fresh:
            return False
        repacked = len(self._scenes) + len(fresh) > self._capacity
        if repacked:
            kept = [scene for name, scene in self._scenes.items() if name in in_use]
            self._scenes, self._index = {}, {}
            self.bank = Bank._make(array[:0] for array in self.bank)
            fresh = kept + fresh
        parts = [_flatten(scene) for scene in fresh]
        bank = self.bank
        base = [len(bank.route), len(bank.segments), len(bank.band_offsets), len(bank.band_segments)]
        base += [len(bank.log), len(bank.actors), len(bank.tracks)]
        rows = []
        for scene, part in zip(fresh, parts, strict=True):
            counts = [
                len(part[name]) for name in ("route", "segments", "band_offsets", "band_segments", "log", "actors")
            ]
            row = np.zeros(12, np.int64)
            row[0::2], row[1::2] = base[:6], counts
            part["actors"][:, 0] += base[6]
            rows.append(row)
            base = [b + c for b, c in zip(base, [*counts, len(part["tracks"])], strict=True)]
            self._index[scene.scene_id] = len(self._index)
            self._scenes[scene.scene_id] = scene
        columns = {name: [getattr(bank, name)] + [part[name] for part in parts] for name in Bank._fields[1:]}
        merged = {name: np.concatenate(arrays) for name, arrays in columns.items()}
        self.bank = Bank(np.concatenate([bank.rows, np.stack(rows)]), **merged)
        return repacked

    def index(self, scene_id: str) -> int:
        """Row of a resident scene."""
        return self._index[scene_id]


def arc_lengths(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """[P] m from the first point along a polyline [P,2]."""
    return np.concatenate([[0.0], np.cumsum(np.linalg.norm(np.diff(points, axis=0), axis=1))])


def _flatten(scene: Scene) -> dict[str, NDArray]:
    lengths = arc_lengths(scene.route)
    actors, vehicle = scene.actors, scene.vehicle
    steps = actors.tracks.shape[1]
    count = len(actors.first)
    meta = np.stack([np.arange(count) * steps, actors.first, actors.last, actors.kind], axis=1).astype(np.int64)
    numbers = [scene.area.band_low_m, scene.area.band_height_m, vehicle.length_m, vehicle.width_m]
    numbers += [vehicle.centre_offset_m, vehicle.wheelbase_m, scene.speed_limit_mps]
    return {
        "numbers": np.array([numbers]),
        "route": np.column_stack([scene.route, lengths]),
        "segments": scene.area.segments,
        "band_offsets": scene.area.band_offsets,
        "band_segments": scene.area.band_segments,
        "log": scene.ego_log,
        "actors": meta,
        "sizes": actors.size,
        "tracks": actors.tracks.reshape(-1, 4),
    }
