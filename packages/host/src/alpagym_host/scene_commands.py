"""The commands `alpagym scenes …`: look at datasets, check them, and turn them into files."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from alpagym_plugins import ConfigError

if TYPE_CHECKING:
    from alpagym_runtime.run_config import DatasetSection
    from alpagym_runtime.simulators.embedded.dataset import SceneSource
    from alpagym_runtime.simulators.embedded.scene import Scene

scenes = typer.Typer(help="Look at datasets, check them, write scenes as files.", no_args_is_help=True)


class Format(StrEnum):
    """How a scene is written."""

    USDZ = "usdz"
    FOLDER = "folder"


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="OVERRIDES", help="dataset=procedural|commonroad|files; dataset.path=DIR; …", show_default=False
    ),
]
Out = Annotated[Path, typer.Option("--out", help="Folder for what is written; made if absent.", metavar="DIR")]
As = Annotated[Format, typer.Option("--format", help="One zip a scene, or one folder.")]


@scenes.command("list")
def list_scenes(overrides: Overrides = None) -> None:
    """Print split, id and family of each scene of the dataset; counts and what was skipped go to stderr."""
    from collections import Counter

    dataset, source = _open(overrides)
    for split, ids in _splits(dataset, source).items():
        families = Counter[str]()
        for scene_id in ids:
            family = source.load(scene_id).family
            families[family] += 1
            print(f"{split}\t{scene_id}\t{family}")
        counts = ", ".join(f"{family} {count}" for family, count in sorted(families.items()))
        print(f"{split}: {len(ids)} scenes" + (f" ({counts})" if counts else ""), file=sys.stderr)
    _tell_skipped(source)


@scenes.command()
def draw(
    out: Out,
    overrides: Overrides = None,
    count: Annotated[int, typer.Option(help="How many scenes of dataset.split.", min=1)] = 12,
    size: Annotated[int, typer.Option(help="Side of a picture, pixels.", min=64, max=8192)] = 800,
    span: Annotated[float, typer.Option(help="Side of what it shows, m; 0: the whole drive.", min=0.0)] = 0.0,
) -> None:
    """Draw scenes from above, one PNG each: map, route, traffic and the ego at the handover."""
    import cv2

    from alpagym_runtime.files import write_atomic
    from alpagym_runtime.simulators.embedded.scene_check import draw_scene

    def write(scene: Scene) -> Path:
        path = out / f"{_file_name(scene.scene_id)}.png"
        write_atomic(path, cv2.imencode(".png", draw_scene(scene, size, span)[..., ::-1])[1].tobytes())
        return path

    dataset, source = _open(overrides)
    _write_each(_first(dataset, source, count), write, out)
    _tell_skipped(source)


@scenes.command()
def check(overrides: Overrides = None) -> None:
    """Load every scene and report what is wrong: files skipped, initial faults, recorded drives that collide.

    Leaves with 1 if a file was skipped or a scene cannot be loaded or starts with a fault.
    """
    from alpagym_runtime.errors import SceneError
    from alpagym_runtime.simulators.embedded.scene_check import problems

    dataset, source = _open(overrides)
    bad = len(source.skipped)
    ids = list(dict.fromkeys(scene_id for ids in _splits(dataset, source).values() for scene_id in ids))
    for scene_id in ids:
        try:
            found = problems(source.load(scene_id))
        except SceneError as err:
            found = [f"cannot be loaded: {err}"]
        bad += any(text.startswith(("initial fault", "cannot be loaded")) for text in found)
        for text in found:
            print(f"{scene_id}\t{text}")
    _tell_skipped(source)
    print(f"{len(ids)} scenes, {bad} files or scenes that cannot be used", file=sys.stderr)
    if bad:
        raise typer.Exit(1)


@scenes.command()
def make(
    out: Out,
    overrides: Overrides = None,
    count: Annotated[int, typer.Option(help="How many scenes of dataset.split.", min=1)] = 12,
    form: As = Format.USDZ,
) -> None:
    """Write scenes of the dataset as files in AlpaSim's layout; `dataset=files dataset.path=DIR` reads them."""
    dataset, source = _open(overrides)
    _write_each(_first(dataset, source, count), lambda scene: _write_scene(scene, out, form), out)
    _tell_skipped(source)


@scenes.command("import")
def import_scenes(
    files: Annotated[list[Path], typer.Argument(help="CommonRoad .xml, OpenDRIVE .xodr, .usdz, or folders of them.")],
    out: Out,
    form: As = Format.USDZ,
) -> None:
    """Turn recordings and maps of other formats into scene files; leaves with 1 if one cannot be used."""
    from alpagym_runtime.errors import SceneError

    failed = 0
    for path in files:
        try:
            ids, load, skipped = _importer(path)
            _write_each((load(scene_id) for scene_id in ids), lambda scene: _write_scene(scene, out, form), out)
        except SceneError as err:
            failed += 1
            print(f"error: {err}", file=sys.stderr)
            continue
        failed += len(skipped)
        for text in skipped:
            print(text, file=sys.stderr)
    if failed:
        raise typer.Exit(1)


def _importer(path: Path) -> tuple[Iterable[str], Callable[[str], Scene], list[str]]:
    """Ids, loader and what was skipped of one path; a folder with .xml files is CommonRoad's."""
    if path.suffix == ".xml" or (path.is_dir() and any(path.glob("*.xml"))):
        from alpagym_runtime.simulators.embedded.commonroad import CommonRoadScenes

        recordings = CommonRoadScenes(path)
        return recordings.ids, recordings.load, [f"skipped {s.file}: {s.reason}" for s in recordings.skipped]
    from alpagym_runtime.simulators.embedded.scene_folder import SceneFolder

    folder = SceneFolder(path)
    return folder.ids, folder.load, [f"skipped {s.file}: {s.reason}" for s in folder.skipped]


def _open(overrides: list[str] | None) -> tuple[DatasetSection, SceneSource]:
    from alpagym_host.compose import compose
    from alpagym_runtime.simulators.embedded.dataset import open_source

    config = compose(overrides or [])
    if config.simulator.type != "embedded":
        raise ConfigError(f"{config.simulator.type!r} has scenes of its own; use embedded", key="simulator")
    return config.dataset, open_source(config.dataset)


def _splits(dataset: DatasetSection, source: SceneSource) -> dict[str, tuple[str, ...]]:
    if dataset.scene_ids is not None:
        return {"chosen": tuple(dataset.scene_ids)}
    return {split: source.ids(split) for split in ("train", "val", "test")}


def _first(dataset: DatasetSection, source: SceneSource, count: int) -> Iterator[Scene]:
    from alpagym_runtime.simulators.embedded.dataset import scene_ids

    for scene_id in scene_ids(dataset, source)[:count]:
        yield source.load(scene_id)


def _write_each(found: Iterable[Scene], write: Callable[[Scene], Path], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for scene in found:
        print(write(scene))


def _write_scene(scene: Scene, out: Path, form: Format) -> Path:
    from alpagym_runtime.simulators.embedded.scene_writer import write_scene

    name = _file_name(scene.scene_id)
    path = out / (f"{name}.usdz" if form is Format.USDZ else name)
    write_scene(scene, path)
    return path


def _file_name(scene_id: str) -> str:
    """An id as a file name: ids come from files, and must not lead out of the folder."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", scene_id).lstrip(".") or "_"


def _tell_skipped(source: SceneSource) -> None:
    for bad in source.skipped:
        print(f"skipped {bad.file}: {bad.reason}", file=sys.stderr)
    for part in getattr(source, "remarks", ()):
        print(f"{part.file}: {part.reason}", file=sys.stderr)
