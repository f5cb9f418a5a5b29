"""The quick start, whole: AlpaSim is brought up, a real drive is scored and trained on, everything is taken down.

Docker, uv and AlpaSim's launcher are stand-ins; the runtime that this launcher starts is `alpagym serve`, the embedded
world behind AlpaSim's wire. Policy, rewards, trainer, transport and the whole lifecycle are real.
"""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata

import psutil
import pytest
import torch
from safetensors.torch import load_file

from alpagym_runtime.trainers.cosmos.config import INSTALL, VERSION

SCENE = "procedural-train-000000"
QUICK_START = [
    *("experiment=alpamayo_1_5_local_2gpu_smoke", "reward=progress_safety", "policy=waypoint", "trainer=grpo"),
    *("trainer.updates=1", "trainer.warm_start=null", "evaluation.every_updates=0", "evaluation.videos=false"),
    # A scene of the embedded world, which hands over after 1.6 s.
    *(f"dataset.scene_ids=[{SCENE}]", "simulator.force_gt_duration_us=1600000"),
]
CLI = [sys.executable, "-m", "alpagym_host.cli"]


@pytest.fixture
def served(alpasim_machine, make_checkout, tmp_path, monkeypatch):
    """Overrides of a run whose AlpaSim is the served world."""
    monkeypatch.setenv("ALPAGYM_TEST_WIZARD", "serve")
    folder = make_checkout(tmp_path / "alpasim", (SCENE,))
    return [*QUICK_START, f"alpasim.repo_path={folder}", f"alpasim.checkout_cache={tmp_path}"]


def cosmos_or_skip():
    try:
        found = metadata.version("cosmos-rl")
    except metadata.PackageNotFoundError:
        found = None
    if found != VERSION or shutil.which("redis-server") is None:
        pytest.skip(f"needs redis-server and cosmos-rl {VERSION}: {INSTALL}")


def living(mark):
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("ALPAGYM_TEST_MARK") == mark and process.pid != os.getpid():
                found.append(process)
    return found


def test_the_quick_start_drives_scores_and_trains(served, alpasim_machine, tmp_path):
    done = subprocess.run([*CLI, *served], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    run = (tmp_path / "tmp" / "alpagym-runs" / "latest").resolve()
    assert json.loads((run / "summary.json").read_text())["status"] == "completed"
    (step,) = steps_of(run)
    assert math.isfinite(step["reward"])
    assert step["driving_score"] > 0  # it drove on: the embedded world measured it, AlpaSim's wire brought it
    assert (run / "checkpoints" / "step_00000001" / "model.safetensors").is_file()
    assert living(alpasim_machine[1]) == []
    assert list((run / "endpoints").iterdir()) == []


@pytest.mark.cosmos_cpu
@pytest.mark.timeout(1800)
def test_a_small_alpamayo_is_trained_by_cosmos_and_exported(served, alpasim_machine, tmp_path, monkeypatch):
    """The quick start as it stands, with 0.8 million weights and a stand-in for CUDA and NCCL."""
    cosmos_or_skip()
    cameras = ("cross_left_120fov", "front_wide_120fov", "cross_right_120fov", "front_tele_30fov")
    monkeypatch.setenv("ALPAGYM_TEST_CAMERAS", ",".join(f"camera_{name}=320x576" for name in cameras))
    for words in (["tiny", "tiny"], ["convert", "tiny", "training"]):
        subprocess.run([*CLI, "checkpoint", *words], cwd=tmp_path, check=True, timeout=300)
    chosen = [word for word in served if word.partition("=")[0] not in ("policy", "trainer", "trainer.updates")]
    chosen = [word for word in chosen if word != "trainer.warm_start=null"]
    words = [*chosen, f"policy.model.path={tmp_path / 'training'}", "cosmos.device=cpu"]
    run = tmp_path / "run"
    done = subprocess.run([*CLI, "train", *words, "--directory", run], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    rows = [json.loads(line) for line in read(run / "metrics.jsonl").splitlines()]
    (step,) = [row for row in rows if row["stage"] == "cosmos"]
    assert math.isfinite(step["loss"])
    assert step["decisions_kept"] > 0
    assert step["gradient_norm"] > 0
    export = [*CLI, "checkpoint", "export", run, "exported", "--base", "training"]
    subprocess.run(export, cwd=tmp_path, check=True, timeout=300)
    trained, base = (load_file(next((tmp_path / name).glob("model-*"))) for name in ("exported", "training"))
    assert trained.keys() == base.keys()
    assert any(not torch.equal(trained[name], base[name]) for name in base)
    # The export drives, in the embedded world.
    policy = ("policy=alpamayo_1_5", f"policy.model.path={tmp_path / 'exported'}", "policy.rows=1")
    drive = ("expected_valid_steps=2", "rollout.slots=1", f"dataset.scene_ids=[{SCENE}]", "evaluation.videos=false")
    made = subprocess.run([*CLI, "rollout", *policy, *drive], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    assert living(alpasim_machine[1]) == []


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_with_the_same_command(served, alpasim_machine, tmp_path):
    words = ["train", *served, "trainer.updates=40", "--directory", tmp_path / "run", "--resume"]
    with subprocess.Popen([*CLI, *map(str, words)], cwd=tmp_path) as process:
        deadline_s = time.monotonic() + 200
        while '"stage": "grpo"' not in (read(tmp_path / "run" / "metrics.jsonl")):
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == 138
    kept = sorted((tmp_path / "run" / "checkpoints").glob("step_*"))
    assert kept
    assert living(alpasim_machine[1]) == []
    done = subprocess.run([*CLI, *map(str, words)], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert f"resuming from {kept[-1].name}" in done.stdout
    steps = [row["step"] for row in steps_of(tmp_path / "run")]
    assert steps == list(range(1, 41))


def steps_of(run):
    rows = [json.loads(line) for line in read(run / "metrics.jsonl").splitlines()]
    return [row for row in rows if row["stage"] == "grpo"]


def read(path):
    return path.read_text() if path.is_file() else ""
