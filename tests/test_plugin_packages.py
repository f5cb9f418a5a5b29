"""Packages of `alpagym new`, one of each kind, and those of the two guides: installed, tested, and used in runs.

Everything that imports torch happens in one process, that of the packages' own tests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[1]
KINDS = ("policy", "reward", "simulator", "trainer")
GUIDES = {"idle": "reward", "cautious": "policy"}
PACKAGES = (*(f"my-{kind}" for kind in KINDS), *GUIDES)
CLI = "from alpagym_host.cli import main; import sys; sys.argv[0] = 'alpagym'; main()"

# Runs of seconds in place of the guides'.
TINY = (
    *("dataset.train_scenes=4", "dataset.val_scenes=2", "dataset.test_scenes=3", "rollout.slots=8"),
    *("rollout.group_size=2", "rollout.scenes_per_step=2", "trainer.updates=1", "evaluation.bootstrap=100"),
    *("evaluation.every_updates=0", "evaluation.videos=false"),
)
TOY = ("simulator=toy", "policy=waypoint_actors", "policy.hidden=16", "expected_valid_steps=6", *TINY)
OURS_ALL = (
    *("simulator=my_simulator", "policy=my_policy", "reward=my_reward", "trainer=my_trainer", *TINY),
    *("trainer.updates=2", "trainer.warm_start.epochs=2", "trainer.warm_start.drives_per_scene=1"),
    *("reward.terms.my_reward.above_mps=1", "expected_valid_steps=12"),
)
CAUTIOUS = ("policy=cautious", *TINY, "trainer.warm_start.epochs=2", "trainer.warm_start.drives_per_scene=1")

pytestmark = [
    pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv: python3 -m pip install uv"),
    pytest.mark.timeout(900),
]


def guide(name: str) -> str:
    return (ROOT / f"docs/guides/{GUIDES[name]}-plugin.md").read_text("utf-8")


def commands_of_guide(name: str) -> list[str]:
    return "".join(re.findall(r"^```bash\n(.*?)^```$", guide(name), re.MULTILINE | re.DOTALL)).splitlines()


def follow_guide(name: str, folder: Path) -> None:
    """Make its changes: whole files, a line, or the last function of a file."""
    changes = re.findall(r"^`([\w./]+)`([^\n]*)\n\n```\w+\n(.*?)^```$", guide(name), re.MULTILINE | re.DOTALL)
    assert len(changes) == {"idle": 4, "cautious": 3}[name]
    for path, how, block in changes:
        file = folder / path
        text = file.read_text()  # each is there already
        if "its line with" in how:
            start = re.search(r"with `(.*?)`", how)[1]
            text, count = re.subn(rf"^.*{re.escape(start)}.*\n", block, text, flags=re.MULTILINE)
            assert count == 1, how
        elif "its function" in how:
            text = text[: text.index("def features(")] + block
        else:
            text = block
        file.write_text(text)


def run(*command, cwd, **environment):
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A folder outside any workspace with all packages, and `site`, into which they are installed."""
    folder = tmp_path_factory.mktemp("packages")
    for kind in KINDS:
        run(sys.executable, "-c", CLI, "new", kind, f"my-{kind}", cwd=folder)
    for name in GUIDES:
        (made,) = [command for command in commands_of_guide(name) if command.startswith("alpagym new ")]
        run(sys.executable, "-c", CLI, *made.split()[1:], cwd=folder)
        follow_guide(name, folder / name)
    # Not into the environment that runs this test; uv builds with its own backend, so that nothing is downloaded.
    where = ("--python", sys.executable, "--no-deps", "--target", "site")
    run("uv", "pip", "install", "--quiet", *where, *(f"./{name}" for name in PACKAGES), cwd=folder)
    return folder


@pytest.fixture(scope="module")
def tried(packages):
    """The folder, after the packages' tests and four runs; and what pytest printed."""
    (presetless,) = [c for c in commands_of_guide("idle") if "reward.terms.idle.type" in c]
    words = presetless.split()
    words = words[words.index("experiment=smoke") + 1 :]
    runs = {
        "all": OURS_ALL,
        # The toy's cars start at 7 to 11 m/s and keep going: below 1000 m/s every tick pays 1 · -0.05.
        "preset": ("reward=idle", *TOY, "trainer.warm_start=null", "reward.terms.idle.below_mps=1000"),
        "by_hand": ("reward=metrics", *TOY, "trainer.warm_start=null", *words, "reward.terms.idle.below_mps=1000"),
        "seeing": CAUTIOUS,
    }
    (packages / "test_runs.py").write_text(
        "import sys\n\nimport pytest\nfrom alpagym_host.cli import main\n\n\n"
        f"@pytest.mark.parametrize(('name', 'words'), {[*runs.items()]!r})\n"
        "def test_run(name, words, monkeypatch):\n"
        "    monkeypatch.setattr(sys, 'argv', ['alpagym', 'train', '--directory', name, *words])\n"
        "    try:\n        main()\n    except SystemExit as left:\n        assert not left.code\n"
    )
    folders = [f"{name}/tests" for name in PACKAGES]
    shown = run(
        *(sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", *folders, "test_runs.py"),
        cwd=packages,
        PYTHONPATH="site",
    )
    return packages, shown


def steps_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["stage"] in ("grpo", "my_trainer")]


def test_they_are_built_as_ours_are(packages):
    ours = tomllib.loads((ROOT / "packages/host/pyproject.toml").read_text())["build-system"]
    for name in PACKAGES:
        assert tomllib.loads((packages / name / "pyproject.toml").read_text())["build-system"] == ours


def test_they_are_clean(packages):
    if shutil.which("ruff") is None:
        pytest.skip("needs ruff: uv sync")
    rules = ("--select", "E,F,I,UP,B,SIM,RUF,PT", "--line-length", "120")
    for name in PACKAGES:
        run("ruff", "check", "--isolated", *rules, ".", cwd=packages / name)
        run("ruff", "format", "--isolated", "--check", "--line-length", "120", ".", cwd=packages / name)


def test_their_own_tests_pass(tried):
    _, shown = tried
    # Six suites, what each package tests besides, and four runs.
    assert int(re.search(r"^(\d+) passed", shown, re.MULTILINE)[1]) > 60, shown


def test_a_run_uses_one_of_each_kind(tried):
    folder, _ = tried
    steps = steps_of(folder / "all")
    # The world's cars start at 7 m/s or more and the term counts ticks above 1 m/s: each of 12 ticks pays -0.02.
    assert [row["term/my_reward"] for row in steps] == pytest.approx([-0.24, -0.24], abs=1e-9)
    assert json.loads((folder / "all/summary.json").read_text())["status"] == "completed"


@pytest.mark.parametrize("name", ["preset", "by_hand"])
def test_the_term_of_the_guide_is_paid(name, tried):
    folder = tried[0] / name
    (step,) = steps_of(folder)
    # Four drives of six ticks, none of which ends early: mean -0.05 · 6.
    assert step["ticks"] == 24
    assert step["term/idle"] == pytest.approx(-0.3, abs=1e-9)
    drives = pq.read_table(folder / "per_scene.parquet").to_pylist()
    for drive in drives:
        assert drive["term/idle"] == pytest.approx(-0.05 * drive["ticks"], abs=1e-9)
        assert drive["reward"] == pytest.approx(sum(v for k, v in drive.items() if k.startswith("term/")))
    reward = json.loads((folder / "summary.json").read_text())["reward"]
    assert reward["idle"] == {"type": "idle", "scale": -0.05, "below_mps": 1000.0}


def test_the_policy_of_the_guide_trains(tried):
    folder, _ = tried
    (step,) = steps_of(folder / "seeing")
    assert step["ticks"] > 0
    assert "actors_rig" in (folder / "cautious/src/cautious/config.py").read_text()


def test_the_plugins_are_listed(packages):
    shown = run(sys.executable, "-c", CLI, "plugins", cwd=packages, PYTHONPATH="site")
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    for group, kind in zip(("policies", "rewards", "simulators", "trainers"), KINDS, strict=True):
        assert f"{group} my_{kind} my-{kind} 0.1.0 loads" in lines
        assert f"configs my_{kind} my-{kind} 0.1.0 YAML in my_{kind}.conf" in lines
    assert "rewards idle idle 0.1.0 loads" in lines


def test_a_typo_in_the_terms_options_is_named(packages, tmp_path):
    words = ["train", "reward.terms.idle.type=idle", "reward.terms.idle.scale=1", "reward.terms.idle.below_mp=1"]
    done = subprocess.run(
        [sys.executable, "-c", CLI, *words, *TOY],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(packages / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: reward.terms.idle.below_mp: unknown key; did you mean reward.terms.idle.below_mps?"
    )
    assert list(tmp_path.iterdir()) == []
