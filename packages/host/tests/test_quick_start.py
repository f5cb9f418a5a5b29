"""The quick start, whole: AlpaSim is brought up, a real drive is scored and trained on, everything is taken down.

Docker, uv and AlpaSim's launcher are stand-ins; the runtime that this launcher starts is `alpagym serve`, the embedded
world behind AlpaSim's wire. Policy, rewards, trainer, transport and the whole lifecycle are real.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

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
