"""Compiled code is never older than what it was compiled from."""

from __future__ import annotations

from pathlib import Path

import pytest

import alpagym_runtime
from alpagym_runtime import kernels

PACKAGE = Path(alpagym_runtime.__file__).parent


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of three files; the kernel takes a constant of one and a class of the other."""
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "kernels.py"))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "__init__.py").write_text("WIDTH_M = 1.9\n")
    (tmp_path / "types.py").write_text("class Scene: ...\n")
    kernel = tmp_path / "world.py"
    kernel.write_text(
        "from alpagym_runtime.deep import (\n    WIDTH_M,\n)\nfrom alpagym_runtime.types import Scene\n"
        "from alpagym_runtime.missing import scene\n"
    )
    return tmp_path, lambda: kernels.sources_digest([kernel])


def test_a_constant_of_another_module_renames_the_cache(package):
    folder, digest = package
    before = digest()
    (folder / "deep" / "__init__.py").write_text("WIDTH_M = 2.0\n")
    assert digest() != before


def test_a_module_without_constants_does_not(package):
    folder, digest = package
    before = digest()
    (folder / "types.py").write_text("class Scene: size = 1\n")
    assert digest() == before


def test_a_kernels_own_change_renames_it(package):
    folder, digest = package
    before = digest()
    (folder / "world.py").write_text("x = 1\n")
    assert digest() != before


@pytest.mark.parametrize("module", ["simulators/embedded/state.py", "simulators/embedded/scene.py", "types.py"])
def test_the_modules_of_the_worlds_columns_count(module, monkeypatch):
    """State columns and bounds are constants that the world's kernels take from modules without a kernel."""
    files = [PACKAGE / "simulators/embedded/world.py", PACKAGE / "simulators/embedded/traffic/columns.py"]
    before, read = kernels.sources_digest(files), Path.read_bytes

    def changed(path):
        return read(path) + (b"#" if path == PACKAGE / module else b"")

    monkeypatch.setattr(Path, "read_bytes", changed)
    assert kernels.sources_digest(files) != before
