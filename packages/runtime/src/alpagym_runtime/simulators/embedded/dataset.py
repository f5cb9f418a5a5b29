"""Which scenes a dataset section means, and where each comes from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from alpagym_runtime.errors import SceneError
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.embedded.scene import Scene

if TYPE_CHECKING:
    from alpagym_runtime.simulators.embedded.commonroad import Skipped


class SceneSource(Protocol):
    """A place where scenes come from."""

    @property
    def skipped(self) -> Sequence[Skipped]:
        """Files that were left out, with reasons."""
        ...

    def ids(self, split: str) -> tuple[str, ...]:
        """Scene ids of a split: train | val | test."""
        ...

    def load(self, scene_id: str) -> Scene:
        """The scene; SceneError if there is none."""
        ...


class Procedural:
    """Endless seeded roads: `procedural-<split>-<number>`; the splits' seeds are disjoint."""

    skipped: Sequence[Skipped] = ()

    def __init__(self, counts: dict[str, int]) -> None:
        self._counts = counts

    def ids(self, split: str) -> tuple[str, ...]:
        """The first scenes of the split."""
        return tuple(f"procedural-{split}-{i:06d}" for i in range(self._counts[split]))

    def load(self, scene_id: str) -> Scene:
        """Any number is a scene, whatever the dataset's counts."""
        head, _, number = scene_id.rpartition("-")
        if head not in {f"procedural-{split}" for split in ("train", "val", "test")} or not number.isdigit():
            raise SceneError(f"no scene {scene_id!r}: procedural scenes are named procedural-<train|val|test>-<number>")
        return _procedural_scene(scene_id)


@lru_cache(maxsize=4096)
def _procedural_scene(scene_id: str) -> Scene:
    """Drawing a scene takes 15 ms, keeping one about 100 KB; the splits of a run share this."""
    from alpagym_runtime.simulators.embedded.procedural import make_scene

    return make_scene(scene_id)


class Roads:
    """Whole maps with reacting traffic: `road-<suite>-<number>`; the suites' seeds are disjoint."""

    skipped: Sequence[Skipped] = ()

    def __init__(self, counts: dict[str, int]) -> None:
        self._counts = counts

    def ids(self, split: str) -> tuple[str, ...]:
        """The first scenes of the suite: train | val | test | hard | bench."""
        return tuple(f"road-{split}-{i:06d}" for i in range(self._counts[split]))

    def load(self, scene_id: str) -> Scene:
        """Any number is a scene, whatever the dataset's counts."""
        return _road_scene(scene_id)


@lru_cache(maxsize=2048)
def _road_scene(scene_id: str) -> Scene:
    from alpagym_runtime.simulators.embedded.road_scenes import make_road_scene

    return make_road_scene(scene_id)


class CommonRoad:
    """Recordings in the CommonRoad XML format."""

    def __init__(self, path: str) -> None:
        from alpagym_runtime.simulators.embedded.commonroad import CommonRoadScenes

        self.scenes = CommonRoadScenes(Path(path))
        self.skipped: Sequence[Skipped] = self.scenes.skipped

    def ids(self, split: str) -> tuple[str, ...]:
        """Scenes of the split's files."""
        return tuple(self.scenes.split(split))

    def load(self, scene_id: str) -> Scene:
        """One recorded vehicle as the ego."""
        return self.scenes.load(scene_id)


class Files:
    """Scene files in AlpaSim's layout and OpenDRIVE maps."""

    def __init__(self, path: str) -> None:
        from alpagym_runtime.simulators.embedded.scene_folder import SceneFolder

        self.scenes = SceneFolder(Path(path))
        self.skipped: Sequence[Skipped] = self.scenes.skipped
        self.remarks: Sequence[Skipped] = self.scenes.remarks

    def ids(self, split: str) -> tuple[str, ...]:
        """Scenes of the split's files."""
        return self.scenes.split(split)

    def load(self, scene_id: str) -> Scene:
        """The scene that a file holds, or a drive on a map."""
        return self.scenes.load(scene_id)


def open_source(dataset: DatasetSection) -> SceneSource:
    """The source that a dataset section names."""
    if dataset.source == "commonroad":
        assert dataset.path is not None
        return CommonRoad(dataset.path)
    if dataset.source == "files":
        assert dataset.path is not None
        return Files(dataset.path)
    if dataset.source == "pai":
        from alpagym_runtime.simulators.pai.replay import PaiReplay

        return PaiReplay(dataset)
    if dataset.source == "road":
        counts = {"train": dataset.train_scenes, "val": dataset.val_scenes}
        return Roads(counts | dict.fromkeys(("test", "hard", "bench"), dataset.test_scenes))
    return Procedural({"train": dataset.train_scenes, "val": dataset.val_scenes, "test": dataset.test_scenes})


def scene_ids(dataset: DatasetSection, source: SceneSource) -> Sequence[str]:
    """What the section's `scene_ids` or its split selects; an empty choice is an error."""
    if dataset.scene_ids is not None:
        return tuple(dataset.scene_ids)
    ids = source.ids(dataset.split)
    if not ids:
        raise SceneError(f"the split {dataset.split!r} of dataset {dataset.source!r} ({dataset.path}) has no scene")
    return ids
