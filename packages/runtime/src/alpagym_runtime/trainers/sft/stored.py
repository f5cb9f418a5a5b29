"""Stored episodes as data for imitation: which of them, and which columns; nothing else of a file is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.episodes.format import EpisodeFile
from alpagym_runtime.episodes.store import EpisodeStore, best_of_group, find_store
from alpagym_runtime.errors import ConfigError
from alpagym_runtime.files import read_json, write_json
from alpagym_runtime.random import text_seed
from alpagym_runtime.simulators.base import MASKED_FIELDS
from alpagym_runtime.trainers.base import Observations, join_pictures
from alpagym_runtime.trainers.sft.config import SftConfig
from alpagym_runtime.types import PolicySpec

RECORD = "imitation_data.json"


def choose(config: SftConfig) -> list[EpisodeFile]:
    """The episodes that a config means, oldest first: neither void nor at fault before they began.

    Raises:
        ConfigError: no store, or none of its episodes is left.

    """
    assert config.store is not None
    store = EpisodeStore(find_store(Path(config.store)))
    rows = store.rows(["ended!=failed", "initial_fault=false", "ticks>0", *config.where])
    if config.best_of_group:
        rows = best_of_group(rows, config.best_of_group)
    if not len(rows):
        total = len(store.rows())
        raise ConfigError(
            f"none of the {total} episodes in {store.path} is left by where={config.where} "
            f"and best_of_group={config.best_of_group}",
            key="trainer.store",
        )
    return [store.open(name) for name in rows["id"].to_pylist()]


def hold_out(files: list[EpisodeFile], share: float) -> tuple[list[EpisodeFile], list[EpisodeFile]]:
    """Files to learn from and files to validate on: a share of the scenes, by the hash of their ids, rounded down."""
    scenes = sorted({file.request.scene_id for file in files}, key=text_seed)
    held = set(scenes[: int(share * len(scenes))])
    return (
        [file for file in files if file.request.scene_id not in held],
        [file for file in files if file.request.scene_id in held],
    )


def hold_still(files: list[EpisodeFile], directory: Path, resuming: bool) -> None:
    """Write down which data a run trains on; a run that goes on must find the same.

    The order of samples is a function of (data, seed, epoch), so other data would be another run.

    Raises:
        ConfigError: the data has changed since the run began.

    """
    checksums = [[file.path.stem, file.size, [about["crc32"] for about in file.columns.values()]] for file in files]
    now = {"episodes": len(files), "sha256": hashlib.sha256(json.dumps(checksums).encode()).hexdigest()}
    path = directory / RECORD
    if resuming and path.exists():
        then = read_json(path)
        if then != now:
            raise ConfigError(
                f"the episodes have changed since this run began: {then['episodes']} then, {now['episodes']} now; "
                f"bring them back, or start a new run",
                key="trainer.store",
            )
    write_json(path, now)


def read_data(files: list[EpisodeFile], spec: PolicySpec, target: str) -> tuple[Observations, NDArray[np.float32]]:
    """All driven decisions of the episodes: observations that a policy reads, and target plans [B,T,3].

    Args:
        files: the episodes.
        spec: of the policy that learns.
        target: plan (the episode's own decision) or expert (the label target_plan_rig).

    Raises:
        ConfigError: an episode lacks a column, or has it in another shape than the first; names episode and column.

    """
    names = [*spec.fields, *(MASKED_FIELDS[name] for name in spec.fields if name in MASKED_FIELDS)]
    carries = [f"carry_{name}" for name in spec.carry]
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in ("target", *names, *carries)}
    kept: list[NDArray[np.bool_]] = []
    label = "decision.plan_rig" if target == "plan" else "label.target_plan_rig"
    for file in files:
        keep = file.column("controls") & np.isfinite(_column(file, label)).all(axis=(1, 2))
        if target == "expert":
            keep &= _column(file, "label.target_plan_rig_mask").all(axis=1)
        rows = np.flatnonzero(keep)
        arrays = {"target": _column(file, label)[rows]}
        arrays |= {name: _column(file, f"observation.{name}")[:-1][rows] for name in names}
        for carry, shape in spec.carry.items():
            # Another driver carried nothing; zeros are what a first tick sees.
            known = f"observation.carry_{carry}" in file.columns
            carried = (
                file.column(f"observation.carry_{carry}")[:-1] if known else np.zeros((len(keep), *shape), np.float32)
            )
            arrays[f"carry_{carry}"] = carried[rows]
        for name in _pictures(spec):
            if name.removeprefix("camera_") not in file.meta["cameras"]:
                raise ConfigError(f"{file.path} holds no pictures of {name}; store them with store.frames=seen")
        for name, array in arrays.items():
            if parts[name]:
                _check_alike(file, files[0], name, array.shape[1:], parts[name][0].shape[1:])
            parts[name].append(array)
        kept.append(keep)
    merged = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    if not len(merged["target"]):
        raise ConfigError(f"none of the {len(files)} episodes holds a decision with a whole {label}")
    frames, shown, rows = {}, {}, np.flatnonzero(np.concatenate(kept))
    for name in _pictures(spec):
        every = (file.pixels(name.removeprefix("camera_"))[:-1] for file in files)
        frames[name], index = join_pictures(_alike(every, files, name), [len(keep) for keep in kept])
        shown[name] = index[rows]
    target_plan = merged.pop("target")
    return Observations(merged, frames, shown), target_plan


def _alike(pictures: Iterable[NDArray[np.uint8]], files: list[EpisodeFile], name: str) -> Iterator[NDArray[np.uint8]]:
    """The pictures of each file, of which all must have the first one's shape."""
    first: tuple[int, ...] | None = None
    for file, seen in zip(files, pictures, strict=True):
        first = first or seen.shape[1:]
        _check_alike(file, files[0], name, seen.shape[1:], first)
        yield seen


def _check_alike(
    file: EpisodeFile, other: EpisodeFile, name: str, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    if shape != expected:
        raise ConfigError(
            f"{file.path}: {name} is {list(shape)} a decision, in {other.path} it is {list(expected)}; "
            f"choose episodes of one kind with trainer.where=[config_hash=…]"
        )


def _pictures(spec: PolicySpec) -> list[str]:
    return [f"camera_{name}" for name in spec.cameras]


def _column(file: EpisodeFile, name: str) -> NDArray[Any]:
    if name not in file.columns:
        hint = ""
        if name.startswith("label."):
            hint = "; record it with store.labels=[target_plan_rig], or imitate the episodes' own plans: target=plan"
        raise ConfigError(f"{file.path} has no {name}, which the trainee needs{hint}", key="trainer.store")
    column: NDArray[Any] = file.column(name)
    return column
