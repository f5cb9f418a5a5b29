"""What tests of several files need."""

from __future__ import annotations

import shutil
from importlib import metadata

import pytest

from alpagym_runtime.trainers.cosmos.config import INSTALL, VERSION


@pytest.fixture
def real_cosmos():
    """Skip with the command that brings what is missing."""
    try:
        found = metadata.version("cosmos-rl")
    except metadata.PackageNotFoundError:
        found = None
    if found != VERSION:
        pytest.skip(f"cosmos-rl {VERSION} is not installed: {INSTALL}")
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not on PATH: apt-get install redis-server")
