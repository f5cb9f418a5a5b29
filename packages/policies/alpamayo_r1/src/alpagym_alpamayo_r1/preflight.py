"""What is wrong with a checkpoint directory, and how many parameters it holds, from its headers alone; no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

from alpagym_plugins import Problem

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
EXPERT_PARTS = ("expert.", "action_in_proj.", "action_out_proj.")


def checkpoint_problems(path: str, release: str) -> Iterator[Problem]:
    """Why a converted checkpoint cannot be loaded; keys are relative to the policy's section."""
    key = ".model.path"
    if not path:
        yield Problem(
            key,
            path,
            "a converted checkpoint is needed",
            f"hf download {release} --local-dir RELEASE && alpagym checkpoint convert RELEASE DIR, "
            f"then policy.model.path=DIR",
        )
        return
    folder = Path(path).expanduser()
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        yield Problem(
            key,
            path,
            f"{what}; a converted checkpoint directory is needed",
            f"hf download {release} --local-dir RELEASE && alpagym checkpoint convert RELEASE {folder}",
        )
        return
    if not (folder / "config.json").is_file():
        yield Problem(key, path, "has no config.json", f"alpagym checkpoint convert RELEASE {folder} --overwrite")
    try:
        missing = [name for name in _files(folder) if not (folder / name).is_file()]
    except (OSError, ValueError, KeyError, AttributeError) as err:
        yield Problem(key, path, f"its {INDEX} cannot be read: {err}", f"hf download {release} again, and convert it")
        return
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        yield Problem(key, path, f"lacks weights: {shown}", f"hf download {release} again, and convert it")


def parameter_counts(path: str) -> tuple[int, int] | None:
    """Parameters of the language model (trainable) and of the action expert (frozen); None if a file is not whole."""
    from safetensors import SafetensorError, safe_open

    folder = Path(path).expanduser()
    counts = [0, 0]
    try:
        for file in _files(folder):
            with safe_open(folder / file, framework="numpy") as handle:
                for name in handle.keys():  # noqa: SIM118 (no mapping)
                    counts[name.startswith(EXPERT_PARTS)] += math.prod(handle.get_slice(name).get_shape())
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError):
        return None
    return counts[0], counts[1]


def _files(folder: Path) -> list[str]:
    index = folder / INDEX
    if not index.is_file():
        return [SINGLE]
    return sorted(set(json.loads(index.read_text())["weight_map"].values()))
