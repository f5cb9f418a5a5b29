"""The synthetic tree that the tests of the PhysicalAI-AV dataset share; made once a process, never changed."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

from alpagym_runtime.simulators.pai.synthetic import SyntheticFlags, lay_out_hub_cache, make_tree

# The golden samples belong to the default flags; smaller pictures change neither motion nor times.
FLAGS = SyntheticFlags(width=96, height=54)
CAMERAS = ("cross_left_120fov", "front_wide_120fov", "cross_right_120fov", "front_tele_30fov")
REASONING = {
    "reasoning": "reasoning/ood_reasoning.parquet",
    "clip_index": "clip_index_reasoning_mini.parquet",
    "key_frame": "events",
}


@lru_cache(maxsize=1)
def folder() -> Path:
    """Where they lie; removed with the process."""
    path = Path(tempfile.mkdtemp(prefix="alpagym-pai-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@lru_cache(maxsize=1)
def shared_tree() -> Path:
    """Six clips in two chunks, four cameras."""
    make_tree(folder() / "tree", FLAGS)
    return folder() / "tree"


@lru_cache(maxsize=1)
def shared_hub() -> Path:
    """The same as a hub cache."""
    lay_out_hub_cache(shared_tree(), folder() / "hub")
    return folder() / "hub"


def copy_of_tree(target: Path) -> Path:
    """A tree of links that a test may break: replace files, never write into them."""
    shutil.copytree(shared_tree(), target, copy_function=lambda a, b: Path(b).hardlink_to(a))
    return target
