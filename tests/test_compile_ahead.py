"""Kernels are compiled in a child of the run, once; a stop ends it."""

from __future__ import annotations

import psutil
import pytest

from alpagym_host.compose import compose, to_yaml
from alpagym_runtime.kernels import cache_folder
from alpagym_runtime.rollouts.compile_ahead import compile_ahead
from alpagym_runtime.simulators.embedded.rendering.compiled import picture_folder
from alpagym_runtime.telemetry.reporter import Silent
from alpagym_runtime.trainers.base import StopTraining


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    for folder in (cache_folder, picture_folder):
        folder.cache_clear()
    yield tmp_path / "cache"
    for folder in (cache_folder, picture_folder):
        folder.cache_clear()


def marks(cache):
    return [p.name for p in cache.rglob("*") if p.is_file() and (p.name == "compiled" or p.name.startswith("with-"))]


def never():
    pass


def test_a_stop_ends_the_child(cache, tmp_path):
    def stop():
        raise StopTraining

    config = compose(["experiment=lowdim"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    with pytest.raises(StopTraining):
        compile_ahead(config, tmp_path, Silent(), stop)
    assert not psutil.Process().children(recursive=True)
    assert not marks(cache)


def test_a_child_that_fails_leaves_no_mark_and_the_run_goes_on(cache, tmp_path):
    assert compile_ahead(compose(["experiment=lowdim"]), tmp_path, Silent(), never) > 0.0  # there is no config.yaml
    assert "config.yaml" in (tmp_path / "logs" / "compile.log").read_text()
    assert not marks(cache)


def test_a_marked_cache_needs_no_child(cache, tmp_path):
    (cache_folder() / "compiled").touch()
    assert compile_ahead(compose(["experiment=lowdim"]), tmp_path, Silent(), never) == 0.0
    assert not (tmp_path / "logs").exists()


def test_other_worlds_compile_nothing_ahead(cache, tmp_path):
    config = compose(["simulator=alpasim"])
    assert compile_ahead(config, tmp_path, Silent(), never) == 0.0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("experiment", ["lowdim", "smoke"])
def test_kernels_are_compiled_once(cache, tmp_path, experiment):
    config = compose([f"experiment={experiment}"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert compile_ahead(config, tmp_path, Silent(), never) > 10.0
    assert len(marks(cache)) == 1
    assert compile_ahead(config, tmp_path, Silent(), never) == 0.0
