"""What Cosmos-RL hands out: numbers of prompts; a number stands for a scene, a start and all seeds of a group.

The list of scenes is a file in the run directory, so that controller and workers, on any node, mean the same by a
number. Passes over the scenes are part of the numbering: each has an order and seeds of its own, and a run that is
resumed goes on in the same order. Scenes and seeds are those of `trainer=grpo` at the same seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from alpagym_runtime.errors import CorruptFileError
from alpagym_runtime.files import read_json, write_json
from alpagym_runtime.random import mix_int
from alpagym_runtime.run_config import RunConfig
from alpagym_runtime.trainers.cosmos.tables import FOLDER
from alpagym_runtime.trainers.scenes import scenes_of_step
from alpagym_runtime.types import EpisodeRequest

FILE = "prompts.json"


class Prompts(Dataset[dict[str, int]]):
    """See the module's text; a dataset as torch's and Cosmos-RL's loaders read one.

    Args:
        config: the run's.
        scenes: of the training split.

    """

    def __init__(self, config: RunConfig, scenes: Sequence[str]) -> None:
        self._config, self.scenes = config, tuple(scenes)
        self._groups = max(config.cosmos.global_batch // config.rollout.group_size, 1)
        self._chosen: dict[int, list[str]] = {}

    @classmethod
    def read(cls, config: RunConfig, directory: Path) -> Prompts:
        """Those of a run directory."""
        path = directory / FOLDER / FILE
        data = read_json(path)
        if not isinstance(data, dict) or not isinstance(data.get("scenes"), list):
            raise CorruptFileError(f"{path} holds no list of scenes; start the run again with alpagym resume")
        return cls(config, [str(scene) for scene in data["scenes"]])

    def write(self, directory: Path) -> None:
        """Put the scenes where workers read them."""
        write_json(directory / FOLDER / FILE, {"scenes": list(self.scenes)})

    def __len__(self) -> int:
        return self._config.cosmos.train.epoch * len(self.scenes)

    def __getitem__(self, number: int) -> dict[str, int]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        return {"number": int(number)}

    def get_reference_answer(self, number: int) -> str:
        """Cosmos-RL asks for one; the reward is read from the drive."""
        return ""

    def request(self, number: int, member: int, world: int = 0, redraw: int = 0) -> EpisodeRequest:
        """A drive of a prompt's group.

        Args:
            number: the prompt's.
            member: of the group, from 0.
            world: 0, and 1 more each time that the whole group is begun in another way.
            redraw: 0, and 1 more each time that this member is driven anew.

        """
        config, seed = self._config, self._config.run.seed
        step, group = divmod(number, self._groups)
        again_world, again = ([world] if world else []), ([world, redraw] if world or redraw else [])
        return EpisodeRequest(
            scene_id=self._scene(step, group),
            horizon_ticks=config.expected_valid_steps,
            world_seed=mix_int(seed, 4, step, group, *again_world),
            policy_seed=mix_int(seed, 5, step, group, member, *again),
            group_id=number,
            member=member,
        )

    def _scene(self, step: int, group: int) -> str:
        if step not in self._chosen:
            if len(self._chosen) > 16:
                self._chosen.clear()
            self._chosen[step] = scenes_of_step(self.scenes, {}, self._groups, 0.0, self._config.run.seed, step)
        return self._chosen[step][group]


def number_of(prompt: Any) -> int:
    """The number in what Cosmos-RL calls a prompt."""
    if isinstance(prompt, Mapping) and isinstance(prompt.get("number"), int):
        return int(prompt["number"])
    raise ValueError(f"expected a prompt of ours, {{'number': …}}, got {prompt!r}")
