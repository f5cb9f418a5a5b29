"""The package of docs/guides/reward-plugin.md, made from that page alone, is installed and trained with."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

GUIDE = (Path(__file__).parents[1] / "docs" / "guides" / "reward-plugin.md").read_text("utf-8")
# A run of seconds in place of the default one.
TINY = (
    *("simulator=toy", "dataset.train_scenes=2", "dataset.val_scenes=1", "dataset.test_scenes=2", "reward=metrics"),
    *(
        "expected_valid_steps=6",
        "policy=waypoint_actors",
        "policy.hidden=16",
        "evaluation.every_updates=0",
        "rollout.slots=4",
        "rollout.group_size=2",
    ),
    *("rollout.scenes_per_step=2", "trainer.updates=1", "trainer.warm_start=null", "evaluation.bootstrap=100"),
)

pytestmark = pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv: python3 -m pip install uv")


def files_of_guide() -> dict[str, str]:
    """Code blocks that stand under a line with nothing but a path."""
    return dict(re.findall(r"^`([\w./]+)`\n\n```\w+\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL))


def commands_of_guide() -> list[str]:
    (block,) = re.findall(r"^```bash\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    return block.splitlines()


def run(*command, cwd, **environment):
    # Colours and widths of the terminal around us would reach into the output.
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The package's folder, and the folder that it is installed into."""
    folder = tmp_path_factory.mktemp("idle-term")
    files = files_of_guide()
    assert sorted(files) == ["pyproject.toml", "src/idle_term/config.py", "src/idle_term/idle.py", "tests/test_idle.py"]
    for name, text in (files | {"src/idle_term/__init__.py": ""}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    # The guide's `uv pip install -e .`, but not into the environment that runs this test. uv builds with its own
    # backend, so it downloads nothing as long as its version satisfies the page's `requires`.
    site = folder / "site"
    run("uv", "pip", "install", "--quiet", "--python", sys.executable, "--no-deps", "--target", site, ".", cwd=folder)
    return folder, site


def test_the_guides_commands_are_those_that_are_tested():
    assert commands_of_guide() == [
        "uv pip install -e .",
        "pytest",
        "alpagym plugins",
        "alpagym train reward.terms.idle.type=idle reward.terms.idle.scale=-0.05 reward.terms.idle.below_mps=1.0",
    ]


def test_the_packages_own_tests_pass(package):
    folder, site = package
    shown = run(sys.executable, "-m", "pytest", "-q", "-W", "error", "tests", cwd=folder, PYTHONPATH=str(site))
    assert re.search(r"^\d+ passed", shown, re.MULTILINE), shown


def test_the_plugin_is_listed(package, tmp_path):
    _, site = package
    shown = run(sys.executable, "-m", "alpagym_host.cli", "plugins", cwd=tmp_path, PYTHONPATH=str(site))
    assert "rewards idle idle-term 0.1.0 loads" in [" ".join(line.split()) for line in shown.splitlines()]


def test_a_run_pays_the_term(package, tmp_path):
    _, site = package
    (command,) = [line for line in commands_of_guide() if line.startswith("alpagym train ")]
    # The toy's cars start at 7 to 11 m/s and keep going: below 1000 m/s every tick pays 1 · -0.05.
    words = [*command.removeprefix("alpagym ").split(), "reward.terms.idle.below_mps=1000", *TINY]
    run(*(sys.executable, "-m", "alpagym_host.cli", *words, "--directory", "run"), cwd=tmp_path, PYTHONPATH=str(site))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (step,) = [row for row in rows if row["stage"] == "grpo"]
    # Four drives of six ticks, none of which ends early: mean -0.05 · 6.
    assert step["ticks"] == 24
    assert step["term/idle"] == pytest.approx(-0.3, abs=1e-9)
    drives = pq.read_table(tmp_path / "run" / "per_scene.parquet").to_pylist()
    assert len(drives) == 4
    for drive in drives:
        assert drive["term/idle"] == pytest.approx(-0.05 * drive["ticks"], abs=1e-9)
        assert drive["reward"] == pytest.approx(drive["term/progress"] + drive["term/collision"] + drive["term/idle"])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["reward"]["idle"] == {"type": "idle", "scale": -0.05, "below_mps": 1000.0}


def test_a_typo_in_the_terms_options_is_named(package, tmp_path):
    _, site = package
    words = ["train", "reward.terms.idle.type=idle", "reward.terms.idle.scale=1", "reward.terms.idle.below_mp=1"]
    done = subprocess.run(
        [sys.executable, "-m", "alpagym_host.cli", *words, *TINY],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: reward.terms.idle.below_mp: unknown key; did you mean reward.terms.idle.below_mps?"
    )
    assert list(tmp_path.iterdir()) == []
