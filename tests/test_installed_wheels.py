"""What a user gets: the wheels, installed without torch into a fresh environment, used outside the repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What these presets cannot know; a dry run neither reads nor calls it.
MORE = {f"dataset={source}": ["dataset.path=recordings"] for source in ("commonroad", "files", "pai")}
SMALL = ("dataset.test_scenes=1", "expected_valid_steps=3", "evaluation.bootstrap=100", "rollout.slots=2")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv: python3 -m pip install uv"),
]


def run(*command, cwd, code=0):
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=clean, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory):
    """`bin` of an environment that holds our wheels and what they depend on, at the lock's versions."""
    work = tmp_path_factory.mktemp("installed")
    run("uv", "build", "--quiet", "--all-packages", "--wheel", "--out-dir", work / "dist", cwd=ROOT)
    locked = ("--frozen", "--package", "alpagym-host", "--no-emit-workspace", "--no-hashes")
    run("uv", "export", "--quiet", *locked, "--output-file", work / "locked.txt", cwd=ROOT)
    run("uv", "venv", "--quiet", work / "venv", cwd=work)
    python = work / "venv" / "bin" / "python"
    wheels = sorted((work / "dist").glob("*.whl"))
    assert len(wheels) == len(list(ROOT.glob("packages/*/pyproject.toml"))) + len(
        list(ROOT.glob("packages/policies/*/pyproject.toml"))
    )
    options = ("--quiet", "--python", python, "--constraints", work / "locked.txt")
    run("uv", "pip", "install", *options, *wheels, cwd=work)
    return python.parent


def test_the_packages_come_from_the_environment_and_torch_is_absent(bin_folder, tmp_path):
    code = """
import importlib.util, alpagym_plugins, alpagym_runtime, alpagym_host, alpagym_waypoint, alpagym_alpasim_configs
for module in (alpagym_plugins, alpagym_runtime, alpagym_host, alpagym_waypoint, alpagym_alpasim_configs):
    assert "site-packages" in module.__file__, module.__file__
assert importlib.util.find_spec("torch") is None
"""
    run(bin_folder / "python", "-c", code, cwd=tmp_path)


def test_every_module_imports_with_the_declared_dependencies_only(bin_folder, tmp_path):
    # Without the extra, a module may miss torch and nothing else.
    code = """
import importlib, pkgutil
import alpagym_plugins, alpagym_runtime, alpagym_host, alpagym_waypoint, alpagym_alpasim_configs
count = 0
for package in (alpagym_plugins, alpagym_runtime, alpagym_host, alpagym_waypoint, alpagym_alpasim_configs):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        try:
            importlib.import_module(found.name)
            count += 1
        except ModuleNotFoundError as err:
            allowed = found.name.startswith(("alpagym_runtime.trainers.", "alpagym_waypoint.policy"))
            assert err.name == "torch" and allowed, (found.name, err)
print(count)
"""
    assert int(run(bin_folder / "python", "-c", code, cwd=tmp_path).stdout) > 50


def test_help(bin_folder, tmp_path):
    assert "evaluate" in run(bin_folder / "alpagym", "--help", cwd=tmp_path).stdout
    for command in ("train", "evaluate", "resume", "plugins", "scenes"):
        run(bin_folder / "alpagym", command, "--help", cwd=tmp_path)


def test_every_preset_of_every_group_composes(bin_folder, tmp_path):
    compose_every_preset(bin_folder, tmp_path)
    assert list(tmp_path.iterdir()) == []


def compose_every_preset(bin_folder, cwd):
    """Dry runs of every preset, those of the Alpamayo package too, in one process: starting Python takes the time."""
    presets = [
        f"{path.parent.name}={path.stem}"
        for conf in ("packages/host/src/alpagym_host/conf", "packages/policies/*/src/*/conf")
        for path in sorted(ROOT.glob(f"{conf}/*/*.yaml"))
    ]
    assert len(presets) > 40
    assert "experiment=alpamayo_1_5_local_2gpu_smoke" in presets
    code = """
import contextlib, io, json, sys
from alpagym_host.cli import main
for preset, more in json.loads(sys.argv[1]).items():
    sys.argv = ["alpagym", "train", preset, *more, "--dry-run"]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        try:
            main()
        except SystemExit as leave:
            assert not leave.code, (preset, leave.code)
    assert "schema_version" in shown.getvalue(), preset
assert "torch" not in sys.modules
"""
    words = json.dumps({preset: MORE.get(preset, []) for preset in presets})
    run(bin_folder / "python", "-c", code, words, cwd=cwd)


@pytest.fixture(scope="module", params=["lowest-direct", "highest"])
def other_versions(request, bin_folder, tmp_path_factory):
    """`bin` of an environment with the oldest, or the newest, versions that our wheels allow."""
    dist = bin_folder.parents[1] / "dist"
    work = tmp_path_factory.mktemp(request.param)
    run("uv", "venv", "--quiet", work / "venv", cwd=work)
    python = work / "venv" / "bin" / "python"
    # Named on the command line, so that they are direct, and the lowest applies to them.
    code = "import sys\nfrom importlib.metadata import requires\nfor name in sys.argv[1:]:\n"
    code += "    print(*(r for r in requires(name) or [] if 'extra ==' not in r and 'alpagym' not in r), sep='\\n')"
    ours = ("alpagym-plugins", "alpagym-runtime", "alpagym-host", "alpagym-waypoint", "alpagym-alpamayo-r1")
    needs = [line for line in run(bin_folder / "python", "-c", code, *ours, cwd=work).stdout.splitlines() if line]
    assert len(needs) > 15
    options = ("--quiet", "--python", python, "--resolution", request.param)
    run("uv", "pip", "install", *options, *sorted(dist.glob("*.whl")), *needs, cwd=work)
    return python.parent


def test_the_oldest_and_the_newest_versions_compose_every_preset_and_drive(other_versions, tmp_path):
    compose_every_preset(other_versions, tmp_path)
    # Deprecated calls of our own are errors; those that libraries make of each other are theirs.
    code = """
import sys, warnings
warnings.filterwarnings("error", category=DeprecationWarning, module=r"alpagym_.*")
warnings.filterwarnings("error", category=FutureWarning, module=r"alpagym_.*")
import gymnasium
env = gymnasium.make("alpagym_runtime:alpagym/Embedded-v0")
env.reset(seed=1)
env.step(env.action_space.sample())
env.close()
from alpagym_host.cli import main
sys.argv = ["alpagym", *sys.argv[1:]]
main()
"""
    words = ("evaluate", "policy=route_follower", *SMALL, "--directory", "run")
    run(other_versions / "python", "-c", code, *words, cwd=tmp_path)
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_what_is_optional_is_named_when_it_is_asked_for(bin_folder, tmp_path):
    words = ("evaluate", "policy=constant_speed", "simulator=toy", "logging=wandb")
    done = run(bin_folder / "alpagym", *words, cwd=tmp_path, code=2)
    assert "wandb is not installed" in done.stderr
    assert "uv sync --extra wandb" in done.stderr
    words = ("train", "experiment=alpamayo_1_5_local_2gpu_smoke")
    done = run(bin_folder / "alpagym", *words, cwd=tmp_path, code=2)
    assert "uv sync --all-packages --extra cosmos" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("policy", ["constant_speed", "route_follower", "log_replay"])
@pytest.mark.parametrize("simulator", ["toy", "embedded"])
def test_a_baseline_drives_without_torch(bin_folder, tmp_path, simulator, policy):
    words = (f"policy={policy}", f"simulator={simulator}", *SMALL)
    run(bin_folder / "alpagym", "evaluate", *words, "--directory", "run", cwd=tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["evaluations"]["final"]["driving_score"]["n"] == 1
    assert "torch" not in summary["versions"]


def test_the_gymnasium_environment_runs_without_torch(bin_folder, tmp_path):
    code = """
import gymnasium
env = gymnasium.make("alpagym_runtime:alpagym/Embedded-v0")
env.reset(seed=1)
env.step(env.action_space.sample())
env.close()
"""
    run(bin_folder / "python", "-c", code, cwd=tmp_path)


def test_training_without_torch_says_what_to_install_and_leaves_nothing(bin_folder, tmp_path):
    for words in (["train"], ["evaluate", "policy=waypoint"]):
        done = run(bin_folder / "alpagym", *words, "simulator=toy", "--directory", "run", cwd=tmp_path, code=2)
        assert done.stderr.startswith("error: ")
        assert "pip install 'alpagym-waypoint[torch]'" in done.stderr.splitlines()[0]
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["/", ROOT / "packages" / "plugins"])
def test_it_runs_from_any_folder(bin_folder, folder, tmp_path):
    words = ("policy=constant_speed", "simulator=toy", *SMALL)
    run(bin_folder / "alpagym", "evaluate", *words, "--directory", tmp_path / "run", cwd=folder)
    assert (tmp_path / "run" / "summary.json").is_file()
