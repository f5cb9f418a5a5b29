from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from alpagym_alpamayo_r1.architecture import LAYOUTS
from alpagym_alpamayo_r1.conversion import convert
from alpagym_alpamayo_r1.tiny import TinySize, make_tiny, save_tiny

# Two threads are slower than one at these sizes, and far slower on a busy machine.
torch.set_num_threads(1)

SMALL = TinySize(future_bins=300, history_bins=100)


@pytest.fixture(scope="session")
def tiny():
    """Model and processor of the tiny 1.5, never changed by a test."""
    return make_tiny(SMALL)


@pytest.fixture(scope="session")
def release(tmp_path_factory):
    """version -> a release-like directory in several shards, never changed by a test."""
    folder = tmp_path_factory.mktemp("releases")
    made = {}
    for version in ("1", "1.5"):
        model, processor = make_tiny(SMALL, LAYOUTS[version])
        made[version] = folder / version
        save_tiny(made[version], model, processor, max_shard_bytes=400_000)
    return made


@pytest.fixture(scope="session")
def training(release, tmp_path_factory):
    """The tiny 1.5 as a training checkpoint, never changed by a test."""
    output = tmp_path_factory.mktemp("training") / "converted"
    convert(release["1.5"], output, "training")
    return output
