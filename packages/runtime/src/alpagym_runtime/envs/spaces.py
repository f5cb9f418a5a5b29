"""Observation spaces, and observations that fit them.

A layout says how the contract's arrays become what a learner reads: `flat` (1-D vectors), `nested` (the contract's
shapes), `low_dim` (one scaled vector), `lerobot` (pictures and state under LeRobot's names).
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from alpagym_plugins import check_choice
from alpagym_runtime.errors import ConfigError
from alpagym_runtime.types import Observation, PolicySpec

Arrays = dict[str, Any]
"""Arrays by key, or dicts of arrays (`pixels`)."""

# True bounds by clipping: a car past the map's edge, or an actor far away, stays inside the space.
FAR_M = 1000.0
FAST_MPS = 100.0
LIMITS = {
    "ego_history_rig": ([-FAR_M] * 3 + [-1.0] * 4, [FAR_M] * 3 + [1.0] * 4),
    "ego_dynamics_rig": ([-FAST_MPS] * 3 + [-50.0] * 3 + [-20.0], [FAST_MPS] * 3 + [50.0] * 3 + [20.0]),
    "route_rig": ([-FAR_M] * 2, [FAR_M] * 2),
    "actors_rig": (
        [-FAR_M] * 2 + [-4.0] + [-FAST_MPS] * 2 + [0.0] * 4,
        [FAR_M] * 2 + [4.0] + [FAST_MPS] * 2 + [FAR_M] * 4,
    ),
}
MASKS = {"ego_history_rig": "ego_history_mask", "route_rig": "route_mask", "actors_rig": "actors_mask"}
LAYOUTS = ("flat", "nested", "low_dim", "lerobot")

# What `low_dim` keeps, and the size that becomes 1. Near route points lie densely, far ones tell of the next bend.
DYNAMICS_COLUMNS = [0, 3, 4, 6]
DYNAMICS_SCALE = np.array([20.0, 8.0, 8.0, 1.0], np.float32)
ROUTE_POINTS = [1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 19]
ROUTE_SCALE = np.array([80.0, 20.0], np.float32)
ACTOR_COLUMNS = [0, 1, 3, 4, 5, 6]
ACTOR_SCALE = np.array([50.0, 20.0, 20.0, 10.0, 12.0, 4.0], np.float32)


def _rows(spec: PolicySpec, name: str) -> int | None:
    counts = {"ego_history_rig": spec.history_steps, "route_rig": spec.route_points, "actors_rig": spec.actors}
    return counts.get(name)


def observation_space(spec: PolicySpec, flat: bool) -> spaces.Dict:
    """One row's space of the layouts `flat` and `nested`, without pictures."""
    parts: dict[str, spaces.Space[Any]] = {}
    for name in spec.fields:
        low, high = _limits(spec, name)
        if flat:
            low, high = low.reshape(-1), high.reshape(-1)
        parts[name] = spaces.Box(low, high, dtype=np.float32)
        if name in MASKS:
            parts[MASKS[name]] = spaces.MultiBinary(_rows(spec, name) or 0)
    if not flat:
        # One element: Stable-Baselines3 cannot read arrays without an axis.
        parts["time_us"] = spaces.Box(0, np.iinfo(np.int64).max, (1,), np.int64)
    return spaces.Dict(parts)


def _limits(spec: PolicySpec, name: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    low, high = (np.array(side, np.float32) for side in LIMITS[name])
    count = _rows(spec, name)
    return (low, high) if count is None else (np.tile(low, (count, 1)), np.tile(high, (count, 1)))


class Observer:
    """Writes batches of the contract's observations as members of one layout's space."""

    def __init__(self, spec: PolicySpec, layout: str) -> None:
        check_choice("layout", layout, LAYOUTS)
        self._spec, self._layout = spec, layout
        self._limits = {name: _limits(spec, name) for name in spec.fields}
        pictures = {name: (spec.frames, *size, 3) for name, size in spec.cameras.items()}
        if layout == "low_dim":
            if pictures:
                raise ConfigError("low_dim has no pictures; use flat, nested or pixels", key="layout")
            missing = {"ego_dynamics_rig", "route_rig", "actors_rig"} - {*spec.fields}
            if missing:
                raise ConfigError(f"low_dim needs {', '.join(sorted(missing))}", key="layout")
            size = len(DYNAMICS_COLUMNS) + 2 * len(ROUTE_POINTS) + spec.actors * (len(ACTOR_COLUMNS) + 1)
            self.space: spaces.Space[Any] = spaces.Box(-1.0, 1.0, (size,), np.float32)
        elif layout == "lerobot":
            if spec.frames != 1:
                raise ConfigError(f"lerobot takes one frame a camera, got {spec.frames}", key="layout")
            low, high = self._limits["ego_dynamics_rig"]
            states = [self._limits[name][1].reshape(-1) for name in self._state_fields()]
            far = np.concatenate(states)
            parts: dict[str, spaces.Space[Any]] = {
                "agent_pos": spaces.Box(low, high, dtype=np.float32),
                "environment_state": spaces.Box(-far, far, dtype=np.float32),
            }
            if pictures:
                frames: dict[str, spaces.Space[Any]] = {
                    name: spaces.Box(0, 255, shape[1:], np.uint8) for name, shape in pictures.items()
                }
                parts["pixels"] = spaces.Dict(frames)
            self.space = spaces.Dict(parts)
        else:
            parts = dict(observation_space(spec, layout == "flat").spaces)
            for name, shape in pictures.items():
                flat = (*shape[1:3], 3 * spec.frames)
                parts[f"camera_{name}"] = spaces.Box(0, 255, flat if layout == "flat" else shape, np.uint8)
                if layout == "nested":
                    latest = np.iinfo(np.int64).max
                    parts[f"camera_{name}_time_us"] = spaces.Box(0, latest, (spec.frames,), np.int64)
            self.space = spaces.Dict(parts)
        self._plain_keys = [key for key in getattr(self.space, "spaces", ()) if not key.startswith("camera_")]
        self._empty = _maker(self.space)
        self._empty_fields = _maker(self.space, {"pixels", *(f"camera_{name}" for name in spec.cameras)})

    def empty(self, count: int) -> Any:
        """Zeros for `count` rows: an array, or a dict of arrays."""
        return self._empty(count)

    def read(self, observation: Observation) -> Any:
        """A batch [n,…] as rows of the space; pictures of one frame are the batch's own arrays, not copies."""
        if self._layout == "flat":
            out: Any = {key: self._flat(observation, key) for key in self._plain_keys}
        else:
            out = self._empty_fields(len(observation["time_us"]))
            self._write_fields(observation, slice(None), out)
        pictures = {name: self._pictures(observation, name) for name in self._spec.cameras}
        if pictures and self._layout == "lerobot":
            out["pixels"] = pictures
        for name in pictures if self._layout != "lerobot" else ():
            out[f"camera_{name}"] = pictures[name]
        return out

    def write(self, observation: Observation, rows: Any, out: Any) -> None:
        """Put a batch [n,…] into `rows` (a slice, or indices [n]) of what `empty` made."""
        self._write_fields(observation, rows, out)
        for name in self._spec.cameras:
            place = out["pixels"][name] if self._layout == "lerobot" else out[f"camera_{name}"]
            place[rows] = self._pictures(observation, name)

    def _pictures(self, observation: Observation, name: str) -> NDArray[np.uint8]:
        """A camera's pictures [n,…] as the layout has them."""
        pictures: NDArray[np.uint8] = observation[f"camera_{name}"]
        if self._layout == "nested":
            return pictures
        n, frames, height, width, _ = pictures.shape
        if frames == 1:
            return pictures.reshape(n, height, width, 3)
        return np.moveaxis(pictures, 1, 3).reshape(n, height, width, 3 * frames)

    def _write_fields(self, observation: Observation, rows: Any, out: Any) -> None:
        """All but the pictures."""
        if self._layout == "low_dim":
            self._write_low_dim(observation, rows, out)
        elif self._layout == "lerobot":
            self._clip(observation, "ego_dynamics_rig", rows, out["agent_pos"])
            states = [observation[name] * observation[MASKS[name]][..., None] for name in self._state_fields()]
            state = np.concatenate([part.reshape(len(part), -1) for part in states], axis=1)
            high = self.space["environment_state"].high  # type: ignore[index]
            out["environment_state"][rows] = np.minimum(np.maximum(state, -high), high)
        else:
            for name in self._spec.fields:
                self._clip(observation, name, rows, out[name])
                if name in MASKS:
                    out[MASKS[name]][rows] = observation[MASKS[name]]
            if self._layout == "nested":
                out["time_us"][rows, 0] = observation["time_us"]
                for name in self._spec.cameras:
                    out[f"camera_{name}_time_us"][rows] = observation[f"camera_{name}_time_us"]

    def _flat(self, observation: Observation, key: str) -> NDArray[Any]:
        """A field's or a mask's rows as new vectors, as `_write_fields` writes them: fewer calls for a single row."""
        values = observation[key]
        if key not in self._limits:
            return values.astype(np.int8)
        low, high = self._limits[key]
        clipped = np.maximum(values, low)
        return np.minimum(clipped, high, out=clipped).reshape(len(values), low.size)

    def _state_fields(self) -> list[str]:
        return [name for name in ("route_rig", "actors_rig") if name in self._spec.fields]

    def _clip(self, observation: Observation, name: str, rows: Any, out: NDArray[Any]) -> None:
        values, (low, high) = observation[name], self._limits[name]
        if isinstance(rows, slice):
            place = out[rows].reshape(values.shape)
            np.maximum(values, low, out=place)
            np.minimum(place, high, out=place)
        else:
            out[rows] = np.minimum(np.maximum(values, low), high).reshape(len(values), *out.shape[1:])

    def _write_low_dim(self, observation: Observation, rows: Any, out: NDArray[np.float32]) -> None:
        dynamics = observation["ego_dynamics_rig"][:, DYNAMICS_COLUMNS] / DYNAMICS_SCALE
        route = observation["route_rig"][:, ROUTE_POINTS] / ROUTE_SCALE
        route *= observation["route_mask"][:, ROUTE_POINTS, None]
        mask = observation["actors_mask"][..., None]
        actors = observation["actors_rig"][:, :, ACTOR_COLUMNS]
        # Closing speeds: what a small network would have to subtract first.
        actors[..., 2] -= observation["ego_dynamics_rig"][:, :1]
        actors = np.concatenate([actors / ACTOR_SCALE * mask, mask], axis=2, dtype=np.float32)
        n = len(dynamics)
        parts = [dynamics, route.reshape(n, -1), actors.reshape(n, -1)]
        out[rows] = np.clip(np.concatenate(parts, axis=1), -1.0, 1.0)


def _maker(space: spaces.Space[Any], without: Set[str] = frozenset()) -> Callable[[int], Any]:
    """A function that makes zeros for so many rows of a space, less some keys; shapes are looked up once."""
    if isinstance(space, spaces.Dict):
        makers = {name: _maker(part) for name, part in space.spaces.items() if name not in without}
        return lambda count: {name: make(count) for name, make in makers.items()}
    shape, dtype = space.shape or (), space.dtype
    return lambda count: np.zeros((count, *shape), dtype)


def take_row(batch: Any, row: int) -> Any:
    """One row of what `Observer` wrote, as views."""
    return {name: take_row(part, row) for name, part in batch.items()} if isinstance(batch, dict) else batch[row]


def copied(batch: Any) -> Any:
    """The same arrays, owned by the caller."""
    return {name: copied(part) for name, part in batch.items()} if isinstance(batch, dict) else batch.copy()


def explain(space: spaces.Space[Any], observation: Any, key: str = "observation") -> str | None:
    """Why an observation is not in the space, or None: key, expected and actual dtype, shape, bounds."""
    if isinstance(space, spaces.Dict):
        for name, part in space.spaces.items():
            if name not in observation:
                return f"key {name!r} is missing; there are {sorted(observation)}"
            problem = explain(part, observation[name], name)
            if problem is not None:
                return problem
        extra = sorted(set(observation) - set(space.spaces))
        return f"keys {extra} are not in the space" if extra else None
    if observation.dtype != space.dtype or observation.shape != space.shape:
        return f"{key}: expected {space.dtype} {space.shape}, got {observation.dtype} {observation.shape}"
    if not space.contains(observation):
        low, high = np.min(observation), np.max(observation)
        return f"{key}: outside {space}: range [{low}, {high}], finite {np.isfinite(observation).all()}"
    return None
