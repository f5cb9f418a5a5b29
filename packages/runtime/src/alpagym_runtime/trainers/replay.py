"""Drive a stored episode again from its seeds, and say whether the same bytes come out.

Everything that an episode depends on is named in it: the config by its hash, the request with both seeds, the version
of the weights. What replay needs besides are the config and the weights themselves; a store keeps the config, a run
directory the checkpoints.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alpagym_runtime.envs.core import DrivingCore, build_terms
from alpagym_runtime.episodes.format import EpisodeFile, save
from alpagym_runtime.errors import ConfigError
from alpagym_runtime.files import read_json
from alpagym_runtime.rollouts.collector import Collector
from alpagym_runtime.run_config import DatasetSection, RunConfig, load_run_config
from alpagym_runtime.trainers.checkpoints import CheckpointStore, load_weights
from alpagym_runtime.trainers.run import build_policy, load_into
from alpagym_runtime.types import Episode, Policy, Ragged, Sampling


@dataclass(frozen=True)
class Replayed:
    """What replay found.

    Attributes:
        same: the new file has the same bytes as the stored one.
        differences: where not, a line a column or fact; the first is the one to look at.
        episode: the new drive.

    """

    same: bool
    differences: list[str]
    episode: Episode


class Replayer:
    """Drives stored episodes again; what episodes of one config share is built once.

    Args:
        config: in place of the config that the store keeps for an episode.

    """

    def __init__(self, config: RunConfig | None = None) -> None:
        self._given = config
        self._configs: dict[Path, RunConfig] = {}
        self._cores: dict[str, tuple[DrivingCore, Policy]] = {}

    def replay(self, file: EpisodeFile) -> Replayed:
        """Drive an episode again.

        Raises:
            ConfigError: config or weights are gone; says which and where they were looked for.

        """
        config = self._config_of(file)
        core, policy = self._driver(file, config)
        mode = file.meta["frames"]
        collector = Collector(
            core,
            policy,
            min_ready=config.rollout.min_ready,
            timeout_s=config.rollout.timeout_s,
            # A retry changes the attempt, and with it the seeds of the decisions.
            retries=0,
            config_hash=config.config_hash,
            actor=file.meta["actor"],
            keep_frames=mode in ("arrived", "all"),
        )
        (episode,) = collector.collect([file.request], Sampling(**file.meta["sampling"]))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "again.arrow"
            save(episode, path, mode, durable=False, remedy="set TMPDIR to a folder with room")
            same = path.read_bytes() == file.path.read_bytes()
            differences = [] if same else compare(file, EpisodeFile(path)) or ["the files differ in their layout only"]
        return Replayed(same, differences, episode)

    def close(self) -> None:
        """Close the simulators."""
        for core, _ in self._cores.values():
            core.close()
        self._cores.clear()

    # ------------------------------------------------------------

    def _config_of(self, file: EpisodeFile) -> RunConfig:
        if self._given is not None:
            return self._given
        receipt = file.meta["receipt"]
        if receipt is None:
            raise ConfigError(f"{file.path} has no receipt, so nothing says how to drive it again; give --config")
        path = file.path.parent.parent / "configs" / f"{receipt['config_hash']}.yaml"
        if path not in self._configs:
            if not path.is_file():
                raise ConfigError(f"the config of {file.path} is not at {path}; give it with --config FILE_OR_RUN_DIR")
            config = load_run_config(path)
            if config.config_hash != receipt["config_hash"]:
                raise ConfigError(
                    f"{path} has hash {config.config_hash[:12]} in this version of AlpaGym: its options have changed "
                    f"since; replay with the versions in the receipt: {receipt['versions']}"
                )
            self._configs[path] = config
        return self._configs[path]

    def _driver(self, file: EpisodeFile, config: RunConfig) -> tuple[DrivingCore, Policy]:
        columns = file.columns
        versions = np.unique(file.column("decision.version")).tolist() if "decision.version" in columns else [0]
        if len(versions) > 1:
            raise ConfigError(
                f"{file.path} was decided by several versions of the weights ({versions}); not replayable"
            )
        version = versions[0] if versions else 0
        privileged = build_labels(file)
        key = f"{config.config_hash} {version} {file.meta['actor']} {privileged} {self._folder(file)}"
        if key not in self._cores:
            policy = build_policy(config)
            if version != getattr(policy, "version", version) and file.meta["actor"] == "policy":
                load_into(policy, self._weights(file, version), version, str(self._folder(file)))
            if file.meta["actor"] == "expert":
                policy = _expert(policy, config)
            # Any scene of the dataset can be asked for, whatever split the run drove.
            dataset: DatasetSection = config.dataset
            simulator = config.simulator.config.build(policy.spec, dataset, 1, tuple(privileged))
            self._cores[key] = DrivingCore(simulator, build_terms(config.reward, simulator), policy.spec), policy
        return self._cores[key]

    @staticmethod
    def _folder(file: EpisodeFile) -> Path:
        """Checkpoints beside a store that lies in its run directory."""
        return file.path.parent.parent.parent / "checkpoints"

    def _weights(self, file: EpisodeFile, version: int) -> dict[str, Any]:
        folder = self._folder(file)
        for step in CheckpointStore(folder, 1).steps():
            place = folder / f"step_{step:08d}"
            if read_json(place / "state.json")["version"] == version:
                return load_weights(place)
        raise ConfigError(
            f"{file.path} was decided by version {version} of the weights, and no checkpoint in {folder} holds it; "
            f"keep more of them with checkpoint.every_updates and checkpoint.keep"
        )


def build_labels(file: EpisodeFile) -> list[str]:
    """Labels that a file holds, less their masks."""
    names = [name.removeprefix("label.") for name in file.columns if name.startswith("label.")]
    return sorted(name for name in names if not (name.endswith("_mask") and name.removesuffix("_mask") in names))


def compare(old: EpisodeFile, new: EpisodeFile) -> list[str]:
    """Facts and columns in which two files differ, facts first."""
    found = []
    a, b = _facts(old.meta), _facts(new.meta)
    for name in sorted(a.keys() | b.keys()):
        if a.get(name) != b.get(name):
            found.append(f"{name}: {a.get(name)!r} stored, {b.get(name)!r} now")
    for name in old.columns.keys() | new.columns.keys():
        if name not in old.columns or name not in new.columns:
            found.append(f"column {name} is only in the {'stored' if name in old.columns else 'new'} episode")
        elif old.columns[name] != new.columns[name]:
            found.append(f"column {name}: {_difference(old, new, name)}")
    order = {name: i for i, name in enumerate(old.columns)}
    return sorted(found, key=lambda line: order.get(line.split()[1].rstrip(":"), -1) if "column" in line[:6] else -2)


def _facts(data: Any, name: str = "") -> dict[str, Any]:
    """Leaves of a file's description by dotted name, columns left out."""
    if isinstance(data, dict):
        return {
            k: v
            for key in data
            if key != "columns"
            for k, v in _facts(data[key], f"{name}.{key}" if name else key).items()
        }
    return {name: data}


def _difference(old: EpisodeFile, new: EpisodeFile, name: str) -> str:
    if old.columns[name]["kind"] in ("frames", "measure"):
        return "its values differ"
    a, b = old.column(name), new.column(name)
    if isinstance(a, Ragged) or isinstance(b, Ragged):
        return "its values differ"
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype} {list(a.shape)} stored, {b.dtype} {list(b.shape)} now"
    rows = np.flatnonzero((a != b).reshape(len(a), -1).any(axis=1))
    if a.dtype.kind not in "iuf" or not len(rows):
        return f"from row {int(rows[0])} on" if len(rows) else "its bits differ"
    size = np.nanmax(np.abs(a.astype(np.float64) - b.astype(np.float64)))
    return f"from row {int(rows[0])} on, by up to {size:.3g}"


def _expert(policy: Any, config: RunConfig) -> Policy:
    trainer = config.trainer.config
    options = trainer if config.trainer.type == "sft" else getattr(trainer, "warm_start", None)
    if options is None:
        raise ConfigError("an expert drove this episode, and its config has no section for one", key="trainer")
    driver: Policy = options.expert(policy.spec)
    return driver
