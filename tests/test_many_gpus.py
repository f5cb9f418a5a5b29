"""What `benchmarks/many_gpus.py` starts on four and eight GPUs passes the checks that stand before a run."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from alpagym_host.compose import compose
from alpagym_host.preflight import preflight
from alpagym_host.sizing import PartTimes, simulate
from alpagym_runtime.machine import Machine

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def script(name, monkeypatch):
    """A benchmark as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def problems(words):
    """What stands in the way besides GPUs and Cosmos-RL, which this machine need not have."""
    absent = ("needed (", "cosmos-rl", "Cosmos-RL starts one")
    found = preflight(compose(words), "train", Machine())
    return [problem for problem in found if not any(text in problem.message for text in absent)]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("case", ["waypoint", "large"])
@pytest.mark.parametrize("shape", [(4, 4), (4, 1), (2, 2), (2, 1), (1, 1)])
def test_shapes_of_cosmos_are_ready_to_start(tmp_path, monkeypatch, shape, case, device):
    shapes = script("cosmos_shapes", monkeypatch)
    (tmp_path / "clips").mkdir()
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    save_file({"vlm.model.weight": np.zeros(10, np.float16)}, tmp_path / "weights" / "model.safetensors")
    argv = ["--policies", str(shape[0]), "--rollouts", str(shape[1]), "--case", case, "--device", device]
    options = shapes.options_of([*argv, "--small"] if device == "cpu" else argv)
    words = shapes.words_of(options, tmp_path)
    assert problems(words) == []
    config = compose(words)
    assert config.topology.train_gpus == sum(shape)
    assert config.trainer.config.warm_start is None
    # Every rollout has something to do at the same time.
    assert simulate(config, PartTimes(100.0, 0.1)).rollout_busy > 0.95


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("case", ["waypoint", "tiny", "growing"])
def test_teams_are_ready_to_start(tmp_path, monkeypatch, size, case):
    many = script("many_gpus", monkeypatch)
    for small in (["--small", "--device", "cpu"], []):
        options = many.options_of(["--gpus", "8", *small])
        words = many.words_of_team(case, size, tmp_path, options, 32 * size if case == "growing" else 0)
        assert problems(words) == []


def test_results_are_added_to_the_file_part_by_part(tmp_path, monkeypatch):
    many = script("many_gpus", monkeypatch)
    options = many.options_of(["--gpus", "8", "--out", str(tmp_path / "out.json")])
    many.save(options, {"team": {"1": 1}})
    many.save(options, {"cosmos": {"4+4": 2}})
    many.save(options, {"team": {"1": 1, "2": 3}})
    assert json.loads((tmp_path / "out.json").read_text()) == {"team": {"1": 1, "2": 3}, "cosmos": {"4+4": 2}}
    assert many.counts(8) == [1, 2, 4, 8]
