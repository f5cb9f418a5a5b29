"""Observation spaces, and observations that fit them."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from alpagym_runtime.types import Observation, PolicySpec

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


def _rows(spec: PolicySpec) -> dict[str, int]:
    return {"ego_history_rig": spec.history_steps, "route_rig": spec.route_points, "actors_rig": spec.actors}


def observation_space(spec: PolicySpec, flat: bool) -> spaces.Dict:
    """One row's space: vectors and pictures [h,w,3K] if flat, else the contract's shapes with `time_us`."""
    parts: dict[str, spaces.Space[Any]] = {}
    for name in spec.fields:
        low, high = (np.array(side, np.float32) for side in LIMITS[name])
        count = _rows(spec).get(name)
        if count is not None:
            low, high = np.tile(low, (count, 1)), np.tile(high, (count, 1))
        if flat:
            low, high = low.reshape(-1), high.reshape(-1)
        parts[name] = spaces.Box(low, high, dtype=np.float32)
        if name in MASKS:
            parts[MASKS[name]] = spaces.MultiBinary(_rows(spec)[name])
    for name, (height, width) in spec.cameras.items():
        shape = (height, width, 3 * spec.frames) if flat else (spec.frames, height, width, 3)
        parts[f"camera_{name}"] = spaces.Box(0, 255, shape, np.uint8)
        if not flat:
            parts[f"camera_{name}_time_us"] = spaces.Box(0, np.iinfo(np.int64).max, (spec.frames,), np.int64)
    if not flat:
        # One element: Stable-Baselines3 cannot read arrays without an axis.
        parts["time_us"] = spaces.Box(0, np.iinfo(np.int64).max, (1,), np.int64)
    return spaces.Dict(parts)


def fit(observation: Observation, spec: PolicySpec, flat: bool, row: int) -> dict[str, NDArray[Any]]:
    """Row `row` of a batch as a member of `observation_space`; fresh arrays."""
    out: dict[str, NDArray[Any]] = {}
    for name in spec.fields:
        low, high = LIMITS[name]
        values = np.clip(observation[name][row], np.array(low, np.float32), np.array(high, np.float32))
        out[name] = values.reshape(-1) if flat else values
        if name in MASKS:
            out[MASKS[name]] = observation[MASKS[name]][row].astype(np.int8)
    for camera in spec.cameras:
        field = f"camera_{camera}"
        picture = observation[field][row]
        # Flat: the frames' channels behind each other, oldest first.
        out[field] = np.concatenate(picture, axis=-1) if flat else picture.copy()
        if not flat:
            out[f"{field}_time_us"] = observation[f"{field}_time_us"][row].copy()
    if not flat:
        out["time_us"] = np.array(observation["time_us"][row : row + 1], np.int64)
    return out


def explain(space: spaces.Dict, observation: dict[str, NDArray[Any]]) -> str | None:
    """Why an observation is not in the space, or None: key, expected and actual dtype, shape, bounds."""
    for name, part in space.spaces.items():
        if name not in observation:
            return f"key {name!r} is missing; there are {sorted(observation)}"
        value = observation[name]
        if value.dtype != part.dtype or value.shape != part.shape:
            return f"{name}: expected {part.dtype} {part.shape}, got {value.dtype} {value.shape}"
        if not part.contains(value):
            return (
                f"{name}: outside {part}: range [{np.min(value)}, {np.max(value)}], finite {np.isfinite(value).all()}"
            )
    extra = sorted(set(observation) - set(space.spaces))
    return f"keys {extra} are not in the space" if extra else None
