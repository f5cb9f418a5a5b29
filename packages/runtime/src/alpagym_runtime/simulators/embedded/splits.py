"""One rule for splitting a folder of recordings: by file, so that no traffic is in two splits."""

from __future__ import annotations

from collections.abc import Sequence

DEAL = ("train", "val", "test", "train", "train")


def deal(files: Sequence[tuple[str, ...]], name: str) -> tuple[str, ...]:
    """Scene ids of the split "train", "val" or "test".

    Args:
        files: scene ids of each usable file, the files in order of name; at least one.
        name: files are dealt train, val, test, train, train, and again. Of two files the second is both val and test; a
            single one is all three.

    """
    if name not in DEAL:
        raise ValueError(f"no split named {name!r}; expected train, val or test")
    if len(files) < 3:
        return files[0 if name == "train" else len(files) - 1]
    return tuple(scene_id for k, ids in enumerate(files) if DEAL[k % len(DEAL)] == name for scene_id in ids)
