"""Cosmos-RL with four GPUs of a policy beside one and four rollouts, on a CPU: `benchmarks/cosmos_shapes.py` in small.

PATH needs redis-server. Sixteen processes that each import all of Cosmos-RL: 11 GB of memory, ten minutes of two cores.

uv sync --all-packages --extra cosmos && uv run pytest -m cosmos_cpu tests/test_cosmos_cpu_many.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cosmos_cpu, pytest.mark.timeout(3600), pytest.mark.usefixtures("real_cosmos")]

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "cosmos_shapes.py"


def job(folder, *words):
    out = folder / "found.json"
    small = ("--small", "--device", "cpu", "--limit", "3000", "--out", str(out))
    done = subprocess.run([sys.executable, str(SCRIPT), *small, *words], capture_output=True, text=True, check=False)
    assert out.is_file(), done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["code"] == 0, found["log"]
    return found


def is_in_step(found, steps, rollouts):
    """Every step with its whole batch, by weights that are not too old; nothing piles up, nobody is left."""
    assert found["steps"] == steps
    assert found["episodes_trained"] == [16.0]
    assert found["version_gap"]["most"] <= found["version_gap"]["allowed"] == 1
    assert max(found["pending"]["all"]) <= found["pending"]["room"] == 32
    assert found["episodes_stale"] == found["steps_refused"] == 0.0
    assert sum(name.startswith("policy") for name in found["workers"]) == 4
    drove = [worker["episodes"] for name, worker in found["workers"].items() if name.startswith("rollout")]
    assert len(drove) == rollouts
    assert all(drove)
    assert found["left_behind"] == 0


def test_four_policies_and_four_rollouts_one_of_which_is_killed(tmp_path):
    steps = ("--steps", "16", "--kill", "--kill-after", "6", "--keep-every", "3")
    found = job(tmp_path, "--policies", "4", "--rollouts", "4", *steps)
    is_in_step(found, 16, 4)
    assert found["starts"] == 2
    assert found["killed"]["killed_after_step"] >= 6
    assert found["killed"]["workers"] == 8
    assert found["killed"]["next_step_s"] > found["killed"]["job_again_s"] > 0.0


def test_four_policies_and_one_rollout(tmp_path):
    is_in_step(job(tmp_path, "--policies", "4", "--rollouts", "1", "--steps", "12", "--keep-every", "6"), 12, 1)
