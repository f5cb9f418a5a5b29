"""Scenes from a folder of files: `.usdz`, folders of the same layout, and bare OpenDRIVE maps.

A file that cannot be used is left out and listed with the reason; a single file that cannot be used is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

from alpagym_runtime.errors import SceneError
from alpagym_runtime.files import TEMPORARY_PREFIX
from alpagym_runtime.simulators.embedded.commonroad import Skipped
from alpagym_runtime.simulators.embedded.map_scenes import MapScenes
from alpagym_runtime.simulators.embedded.opendrive import read_opendrive_map
from alpagym_runtime.simulators.embedded.opendrive_xml import FILE_BYTES_MAX
from alpagym_runtime.simulators.embedded.scene import Scene
from alpagym_runtime.simulators.embedded.scene_files import read_scene
from alpagym_runtime.simulators.embedded.scene_layout import METADATA, RIG
from alpagym_runtime.simulators.embedded.splits import deal

SCENES_PER_MAP = 8
KEPT_SCENES = 512


class SceneFolder:
    """The scenes of one file or of all in a folder; every file is read once when it is opened.

    Attributes:
        ids: ids as the files say; of a bare map `<file stem>.drive-<number>`, `SCENES_PER_MAP` of them.
        skipped: what cannot be used, with reasons.
        remarks: what was left out of maps that can.

    Raises:
        SceneError: the path does not exist or nothing in it can be used; the message names file, place and reason.

    """

    def __init__(self, path: Path) -> None:
        self._loaders: dict[str, Callable[[], Scene]] = {}
        self._files: list[tuple[str, ...]] = []
        self._remarks: list[Skipped] = []
        skipped = []
        files = _files(path)
        for file in files:
            try:
                self._add(file)
            except SceneError as err:
                if files == [path]:
                    raise
                reason = str(err).removeprefix(f"{file}: ").removeprefix(f"{file.name}: ")
                skipped.append(Skipped(file.name, reason))
        if not self._loaders:
            reasons = "; ".join(f"{bad.file}: {bad.reason}" for bad in skipped[:5])
            raise SceneError(f"{path}: none of {len(skipped)} files can be used: {reasons}")
        self.ids = tuple(self._loaders)
        self.skipped, self.remarks = tuple(skipped), tuple(self._remarks)
        self._cached = lru_cache(maxsize=KEPT_SCENES)(self._load)

    def _add(self, file: Path) -> None:
        if file.suffix == ".xodr":
            stem = re.sub(r"[^A-Za-z0-9._-]", "_", file.stem)
            try:
                read = read_opendrive_map(_bytes(file), str(file))
                scenes = MapScenes(read.lane_map, stem)
            except SceneError as err:
                raise err if str(err).startswith(str(file)) else SceneError(f"{file}: {err}") from None
            self._remarks += [Skipped(file.name, remark) for remark in read.remarks]
            names = [f"{stem}.drive-{k:03d}" for k in range(SCENES_PER_MAP)]
            found: dict[str, Callable[[], Scene]] = {name: partial(scenes.make, name) for name in names}
        else:
            found = {read_scene(file).scene_id: partial(read_scene, file)}
        twice = next((name for name in found if name in self._loaders), None)
        if twice is not None:
            raise SceneError(f"{file}: scene id {twice!r} is that of another file; change one")
        self._loaders.update(found)
        self._files.append(tuple(found))

    def split(self, name: str) -> tuple[str, ...]:
        """Scene ids of "train", "val" or "test", dealt by file (`splits.deal`)."""
        return deal(self._files, name)

    def load(self, scene_id: str) -> Scene:
        """One scene of `ids`; the same every time."""
        if scene_id not in self._loaders:
            raise SceneError(f"no scene {scene_id!r}; there are {len(self.ids)}, {self.ids[0]!r} first")
        return self._cached(scene_id)

    def _load(self, scene_id: str) -> Scene:
        return self._loaders[scene_id]()


def _bytes(file: Path) -> bytes:
    try:
        size = file.stat().st_size
        if size > FILE_BYTES_MAX:
            raise SceneError(f"{file}: {size} bytes are more than {FILE_BYTES_MAX}; cut the map")
        return file.read_bytes()
    except OSError as err:
        raise SceneError(f"{file}: cannot be read: {err.strerror or err}") from err


def _is_scene_folder(path: Path) -> bool:
    return path.is_dir() and any((path / name).exists() for name in (METADATA, RIG))


def _files(path: Path) -> list[Path]:
    """The scene files of a path, by name."""
    if not path.exists():
        raise SceneError(f"{path}: no such file or folder")
    if not path.is_dir() or _is_scene_folder(path):
        if path.is_file() and path.suffix not in (".usdz", ".xodr"):
            raise SceneError(f"{path}: expected .usdz, .xodr or a folder")
        return [path]
    inside = sorted(child for child in path.iterdir() if not child.name.startswith(TEMPORARY_PREFIX))
    found = [child for child in inside if child.suffix in (".usdz", ".xodr") or _is_scene_folder(child)]
    if not found:
        raise SceneError(f"{path}: no .usdz, no .xodr and no folder with {METADATA} in this folder")
    return found
