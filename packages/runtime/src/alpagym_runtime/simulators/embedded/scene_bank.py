"""Scenes as flat arrays that the compiled kernels read: one arena, a row of offsets a scene.

Slots of one group share a scene, so starting an episode copies nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded.scene import Scene, stop_array


class Bank(NamedTuple):
    """Flat arrays; `rows` and `numbers` are indexed by scene, the rest by the offsets in `rows`."""

    rows: NDArray[np.int64]  # [S,17], columns below
    numbers: NDArray[np.float64]  # [S,9], columns below
    route: NDArray[np.float64]  # [*,3] x, y, arc length
    segments: NDArray[np.float64]  # [*,4]
    band_offsets: NDArray[np.int64]
    band_segments: NDArray[np.int64]
    log: NDArray[np.float64]  # [*,4]
    actors: NDArray[np.int64]  # [*,4] track offset, first, last, kind
    signals: NDArray[np.float64]  # [*,2] start and end of green within the cycle, s
    ego_stops: NDArray[np.float64]  # [*,4] as `stops`
    sizes: NDArray[np.float64]  # [*,2]
    tracks: NDArray[np.float64]  # [*,6] x, y, yaw, speed, cos and sin of yaw
    agents: NDArray[np.int64]  # [*,7] one a row of `actors`: path offset and length, stops', lanes left, right, yields
    agent_numbers: NDArray[np.float64]  # [*,5] start arc, start speed, desired speed, lateral, lane width
    paths: NDArray[np.float64]  # [*,6] x, y, yaw (unwrapped), sharpest bend, cos and sin of yaw, every metre
    stops: NDArray[np.float64]  # [*,4] arc, signal group, conflict x, y


# Columns of `rows`: offset and count of each part.
ROUTE, ROUTE_N, SEGMENT, SEGMENT_N, BAND, BAND_N, BAND_SEGMENT, BAND_SEGMENT_N, LOG, LOG_N, ACTOR, ACTOR_N = range(12)
SIGNAL, SIGNAL_N, EGO_STOP, EGO_STOP_N, REACTIVE = range(12, 17)
# Columns of `numbers`.
BAND_LOW, BAND_HEIGHT, LENGTH, WIDTH, CENTRE_OFFSET, WHEELBASE, SPEED_LIMIT = range(7)
SIGNAL_CYCLE, SIGNAL_YELLOW = 7, 8

_PARTS = ("route", "segments", "band_offsets", "band_segments", "log", "actors", "signals", "ego_stops")
"""Parts with an offset in `rows`."""

BEND_SIGHT_M = 16

_EMPTY = {
    "rows": ((0, 17), np.int64),
    "numbers": ((0, 9), np.float64),
    "route": ((0, 3), np.float64),
    "segments": ((0, 4), np.float64),
    "band_offsets": ((0,), np.int64),
    "band_segments": ((0,), np.int64),
    "log": ((0, 4), np.float64),
    "actors": ((0, 4), np.int64),
    "signals": ((0, 2), np.float64),
    "ego_stops": ((0, 4), np.float64),
    "sizes": ((0, 2), np.float64),
    "tracks": ((0, 6), np.float64),
    "agents": ((0, 7), np.int64),
    "agent_numbers": ((0, 5), np.float64),
    "paths": ((0, 6), np.float64),
    "stops": ((0, 4), np.float64),
}


class SceneBank:
    """Holds up to `capacity` scenes; when it overflows, scenes that no slot uses are dropped and the rest is packed."""

    def __init__(self, capacity: int = 2048) -> None:
        self._capacity = capacity
        self._scenes: dict[str, Scene] = {}
        self._index: dict[str, int] = {}
        self.bank = Bank(**{name: np.zeros(shape, kind) for name, (shape, kind) in _EMPTY.items()})

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
        base = {name: len(getattr(bank, name)) for name in Bank._fields}
        rows = []
        for scene, part in zip(fresh, parts, strict=True):
            row = np.zeros(17, np.int64)
            row[0:16:2] = [base[name] for name in _PARTS]
            row[1:16:2] = [len(part[name]) for name in _PARTS]
            row[REACTIVE] = len(scene.agents) > 0
            part["actors"][:, 0] += base["tracks"]
            part["agents"][:, [0, 2]] += [base["paths"], base["stops"]]
            rows.append(row)
            base = {name: start + len(part[name]) if name in part else start for name, start in base.items()}
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


def every_metre(path: NDArray[np.float64]) -> NDArray[np.float64]:
    """[P,6] x, y m, yaw rad (unwrapped), bend, cos and sin of yaw of a polyline, every metre; P ≥ 2.

    The bend is the largest curvature, 1/m, found 0, 4, … `BEND_SIGHT_M` ahead: what a driver slows down for.
    """
    lengths = arc_lengths(path)
    at = np.arange(0.0, max(lengths[-1], 1.0) + 1e-9, 1.0)
    points = np.stack([np.interp(at, lengths, path[:, k]) for k in range(2)], axis=1)
    step = np.diff(points, axis=0)
    heading = np.unwrap(np.arctan2(step[:, 1], step[:, 0]))
    # Between two segments the heading is their mean.
    yaw = np.concatenate([heading[:1], (heading[1:] + heading[:-1]) / 2.0, heading[-1:]])
    curvature, here = np.abs(np.gradient(yaw)), np.arange(len(yaw))
    bend = np.max([curvature[np.minimum(here + d, len(yaw) - 2)] for d in range(0, BEND_SIGHT_M + 1, 4)], axis=0)
    return np.column_stack([points, yaw, bend, np.cos(yaw), np.sin(yaw)])


def _flatten(scene: Scene) -> dict[str, NDArray]:
    lengths = arc_lengths(scene.route)
    actors, vehicle = scene.actors, scene.vehicle
    steps = actors.tracks.shape[1]
    tracks = actors.tracks.reshape(-1, 4)
    # Rows outside a track's interval may hold anything.
    yaw = np.where(np.isfinite(tracks[:, 2:3]), tracks[:, 2:3], 0.0)
    count = len(actors.first)
    meta = np.stack([np.arange(count) * steps, actors.first, actors.last, actors.kind], axis=1).astype(np.int64)
    numbers = [scene.area.band_low_m, scene.area.band_height_m, vehicle.length_m, vehicle.width_m]
    numbers += [vehicle.centre_offset_m, vehicle.wheelbase_m, scene.speed_limit_mps]
    numbers += [scene.signals.cycle_s, scene.signals.yellow_s]
    agents, agent_numbers = np.zeros((count, 7), np.int64), np.zeros((count, 5))
    paths, stops = [np.zeros((0, 6))], [np.zeros((0, 4))]
    for a, agent in enumerate(scene.agents):
        path, stop = every_metre(agent.path), stop_array(agent.stops)
        agents[a] = [
            sum(map(len, paths)),
            len(path),
            sum(map(len, stops)),
            len(stop),
            agent.lanes_left,
            agent.lanes_right,
            agent.yields_to_cars,
        ]
        agent_numbers[a] = [
            agent.start_arc_m,
            agent.start_speed_mps,
            agent.desired_speed_mps,
            agent.lateral_m,
            agent.lane_width_m,
        ]
        paths.append(path)
        stops.append(stop)
    return {
        "numbers": np.array([numbers]),
        "route": np.column_stack([scene.route, lengths]),
        "segments": scene.area.segments,
        "band_offsets": scene.area.band_offsets,
        "band_segments": scene.area.band_segments,
        "log": scene.ego_log,
        "actors": meta,
        "signals": scene.signals.green_s,
        "ego_stops": stop_array(scene.stops),
        "agents": agents,
        "agent_numbers": agent_numbers,
        "paths": np.concatenate(paths),
        "stops": np.concatenate(stops),
        "sizes": actors.size,
        "tracks": np.concatenate([tracks, np.cos(yaw), np.sin(yaw)], axis=1),
    }
