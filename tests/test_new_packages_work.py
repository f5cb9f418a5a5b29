"""Packages of `alpagym new`, one of each kind: installed, tested by their own tests, and used together in a run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KINDS = ("policy", "reward", "simulator", "trainer")
TRAIN = [
    *("train", "--directory", "run", "simulator=my_simulator", "policy=my_policy", "reward=my_reward"),
    *(
        "trainer=my_trainer",
        "trainer.updates=2",
        "trainer.warm_start.epochs=2",
        "trainer.warm_start.drives_per_scene=1",
    ),
    *("dataset.train_scenes=4", "dataset.val_scenes=2", "dataset.test_scenes=3", "expected_valid_steps=12"),
    *("rollout.slots=8", "rollout.group_size=3", "rollout.scenes_per_step=2"),
    *("evaluation.bootstrap=100", "evaluation.every_updates=0", "evaluation.videos=false"),
]
# In the process of the packages' tests, which has imported all that a run needs.
RUN_TEST = f"""
import sys

from alpagym_host.cli import main


def test_a_run_of_all_of_them(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["alpagym", *{TRAIN!r}])
    try:
        main()
    except SystemExit as left:
        assert not left.code
"""

pytestmark = pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv: python3 -m pip install uv")


def run(*command, cwd, **environment):
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A folder outside any workspace with a package of each kind, and `site`, into which they are installed."""
    folder = tmp_path_factory.mktemp("packages")
    code = "from alpagym_host.cli import main; import sys; sys.argv[0] = 'alpagym'; main()"
    for kind in KINDS:
        run(sys.executable, "-c", code, "new", kind, f"my-{kind}", cwd=folder)
    # Not into the environment that runs this test; uv builds with its own backend, so that nothing is downloaded.
    where = ("--python", sys.executable, "--no-deps", "--target", "site")
    run("uv", "pip", "install", "--quiet", *where, *(f"./my-{kind}" for kind in KINDS), cwd=folder)
    return folder


def test_they_are_built_as_ours_are(packages):
    ours = tomllib.loads((ROOT / "packages/host/pyproject.toml").read_text())["build-system"]
    for kind in KINDS:
        assert tomllib.loads((packages / f"my-{kind}/pyproject.toml").read_text())["build-system"] == ours


def test_they_are_clean(packages):
    if shutil.which("ruff") is None:
        pytest.skip("needs ruff: uv sync")
    rules = ("--select", "E,F,I,UP,B,SIM,RUF,PT", "--line-length", "120")
    run("ruff", "check", "--isolated", *rules, *(f"my-{kind}" for kind in KINDS), cwd=packages)
    run("ruff", "format", "--isolated", "--check", "--line-length", "120", *(f"my-{k}" for k in KINDS), cwd=packages)


def test_their_tests_pass_and_a_run_uses_them(packages):
    (packages / "test_run.py").write_text(RUN_TEST)
    folders = [f"my-{kind}/tests" for kind in KINDS]
    shown = run(
        *(sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", *folders, "test_run.py"),
        cwd=packages,
        PYTHONPATH="site",
    )
    # Four suites, and what each package tests besides.
    assert int(re.search(r"^(\d+) passed", shown, re.MULTILINE)[1]) > 40, shown
    rows = [json.loads(line) for line in (packages / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["stage"] == "my_trainer"]
    assert len(steps) == 2
    # The world's cars start at 7 m/s or more and the term counts ticks above 1 m/s: each of 12 ticks pays -0.02.
    assert [row["term/my_reward"] for row in steps] == pytest.approx([-0.24, -0.24], abs=1e-9)
    summary = json.loads((packages / "run/summary.json").read_text())
    assert summary["status"] == "completed"


def test_the_plugins_are_listed(packages):
    code = "from alpagym_host.cli import main; import sys; sys.argv[0] = 'alpagym'; main()"
    shown = run(sys.executable, "-c", code, "plugins", cwd=packages, PYTHONPATH="site")
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    for group, kind in zip(("policies", "rewards", "simulators", "trainers"), KINDS, strict=True):
        assert f"{group} my_{kind} my-{kind} 0.1.0 loads" in lines
        assert f"configs my_{kind} my-{kind} 0.1.0 YAML in my_{kind}.conf" in lines
