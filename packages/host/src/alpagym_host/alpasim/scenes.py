"""Which scenes a checkout of AlpaSim knows, and whether Hugging Face will let it have them: asked before it starts."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from alpagym_plugins import ConfigError, nearest
from alpagym_runtime.run_config import RunConfig

DATASET = "datasets/nvidia/PhysicalAI-Autonomous-Vehicles-NuRec"
_SCENES, _SUITES = "data/scenes/sim_scenes.csv", "data/scenes/sim_suites.csv"


def chosen(config: RunConfig, checkout: Path) -> list[dict[str, str]]:
    """Rows of AlpaSim's table for the scenes of a run; empty where the run brings tables or files of its own.

    Raises:
        ConfigError: a scene or suite that the tables lack, or tables that cannot be read.

    """
    if any(word.lstrip("+").startswith("scenes.") for word in config.alpasim.wizard_args.extra_overrides):
        return []
    suite, ids = config.dataset.test_suite_id, config.dataset.scene_ids
    rows = list(_rows(checkout / _SCENES, ("uuid", "scene_id")))
    if suite is not None:
        suites = list(_rows(checkout / _SUITES, ("test_suite_id", "uuid")))
        known = {row["test_suite_id"] for row in suites}
        if suite not in known:
            raise ConfigError(
                f"{checkout / _SUITES} has no {suite!r}{_hint(suite, known)}", key="dataset.test_suite_id"
            )
        uuids = {row["uuid"] for row in suites if row["test_suite_id"] == suite}
        return [row for row in rows if row["uuid"] in uuids]
    known = {row["scene_id"] for row in rows}
    missing = [name for name in ids or [] if name not in known]
    if missing:
        more = f" and {len(missing) - 1} more of the {len(ids or [])} asked for" if len(missing) > 1 else ""
        raise ConfigError(
            f"{checkout / _SCENES} has {len(known)} scenes, and not {missing[0]!r}{more}{_hint(missing[0], known)}; "
            "files of yours: alpasim.wizard_args.extra_overrides=[scenes.local_usdz_dir=DIR]",
            key="dataset.scene_ids",
        )
    # Of several versions of a scene AlpaSim takes the newest.
    newest: dict[str, dict[str, str]] = {}
    for row in sorted(rows, key=lambda row: row.get("last_modified", "")):
        newest[row["scene_id"]] = row
    return [newest[name] for name in ids or []]


def to_fetch(rows: list[dict[str, str]], checkout: Path) -> list[dict[str, str]]:
    """Those of `rows` that come from Hugging Face and are not in the checkout's own cache."""
    cache = checkout / "data/nre-artifacts/all-usdzs"
    gated = [row for row in rows if row.get("artifact_repository", "huggingface") == "huggingface"]
    return [row for row in gated if not (cache / f"{row['uuid']}.usdz").is_file()]


def require_access(rows: list[dict[str, str]], timeout_s: float = 10.0) -> None:
    """Refuse a run whose scenes Hugging Face would not give; asks nothing where none is to be fetched.

    Raises:
        ConfigError: what it said, and what helps.

    """
    from alpagym_host.hugging_face import access

    if not rows:
        return
    found = access(DATASET, timeout_s)
    if found.state == "wrong":
        raise ConfigError(
            f"{len(rows)} scene{'s' if len(rows) > 1 else ''} would be fetched from Hugging Face, and: {found.text}; "
            f"{found.remedy}",
            key="dataset",
        )


def _hint(name: str, known: set[str]) -> str:
    near = nearest(name, sorted(known))
    return f"; did you mean {near!r}?" if near else f"; it has {', '.join(sorted(known)[:5])}"


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[dict[str, str]]:
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            names = reader.fieldnames or []
            if names and names[0].startswith("version https://git-lfs"):
                folder = path.parents[2]
                raise ConfigError(f"{path} is a pointer of Git LFS: git lfs install && git -C {folder} lfs pull")
            if missing := [name for name in columns if name not in names]:
                raise ConfigError(f"{path} has no column {missing[0]!r}; is this AlpaSim's table?")
            yield from reader
    except OSError as err:
        raise ConfigError(f"{path} cannot be read: {err.strerror}") from err
