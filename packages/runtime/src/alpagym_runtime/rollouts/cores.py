"""What a process needs to drive a run's episodes: the config's policy, and a core for each split that is asked for.

The trainer's process and every worker build them here, from the same config.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from alpagym_runtime.envs.core import DrivingCore, build_terms, reward_labels
from alpagym_runtime.files import strict
from alpagym_runtime.run_config import RunConfig
from alpagym_runtime.types import PolicySpec


@dataclass(frozen=True)
class World:
    """Which scenes, and which labels the simulator computes for them."""

    split: str
    labels: tuple[str, ...]


class Cores:
    """The cores of a config, each built at first use.

    Args:
        config: the run's.
        slots: episodes that drive side by side in each.
        directory: the run's; a simulator that was started for the run says in it where it listens.

    """

    def __init__(self, config: RunConfig, slots: int, directory: Path) -> None:
        self._config, self._slots, self._directory = config, slots, directory
        self._built: dict[tuple[World, str], DrivingCore] = {}

    def world(self, split: str, labels: Sequence[str] = ()) -> World:
        """A split with the labels that rewards and the store want besides the given ones."""
        config = self._config
        return World(split, tuple(sorted({*labels, *config.store.labels, *reward_labels(config.reward)})))

    def core(self, world: World, spec: PolicySpec) -> tuple[DrivingCore, bool]:
        """A core for a driver that reads and answers `spec`, and whether it is new."""
        # Specs hold mappings, so their text is the key.
        key = world, json.dumps(strict(plain(spec)), sort_keys=True)
        new = key not in self._built
        if new:
            config = self._config
            dataset = replace(config.dataset, split=world.split)
            section = config.simulator.config
            if hasattr(section, "located"):
                section = section.located(self._directory)
            simulator = section.build(spec, dataset, self._slots, world.labels)
            self._built[key] = DrivingCore(simulator, build_terms(config.reward, simulator), spec)
        return self._built[key], new

    def world_of(self, core: DrivingCore) -> World:
        """The world behind one of these cores."""
        return next(world for (world, _), built in self._built.items() if built is core)

    def close(self) -> None:
        """Close the simulators."""
        for core in self._built.values():
            core.close()


def make_policy(config: RunConfig, device: str = "cpu") -> Any:
    """A config's policy as it is built, without the weights of `checkpoint.path`; sets torch's threads."""
    policy = config.policy.config.build(device)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(config.run.torch_threads)
    return policy


def plain(value: Any) -> dict[str, Any]:
    """Fields of a dataclass by name; sets become sorted lists."""
    return {k: sorted(v) if isinstance(v, frozenset) else v for k, v in vars(value).items()}
