"""What is secret in the environment reaches the programs that need it, and no file, output or process list of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

MARKERS = {
    "HF_TOKEN": "hf_marker_one_0123456789",
    "WANDB_API_KEY": "marker_two_" + "0123456789" * 3,
    "REGISTRY_PASSWORD": "marker_three_0123456789",
}
PROXY_PASSWORD = "marker_four"
TINY = (
    *("policy=constant_speed", "simulator=toy", "dataset.test_scenes=1", "expected_valid_steps=3"),
    *("evaluation.bootstrap=100", "rollout.slots=2"),
)
# A stand-in for docker that keeps what it was started with, and tells secrets to whoever listens.
STAND_IN = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["SEEN"], "a") as file:
    file.write(json.dumps({{"argv": sys.argv, "token": os.environ["HF_TOKEN"]}}) + "\\n")
print("cannot log in with", os.environ["REGISTRY_PASSWORD"], file=sys.stderr)
sys.exit(1)
"""


@pytest.fixture
def world(tmp_path):
    """A home, a working folder and a PATH of our own, and what is seen outside them."""
    for name in ("home", "work", "tools"):
        (tmp_path / name).mkdir()
    docker = tmp_path / "tools" / "docker"
    docker.write_text(STAND_IN)
    docker.chmod(0o755)
    environment = os.environ | MARKERS
    environment |= {
        "HOME": str(tmp_path / "home"),
        "XDG_CACHE_HOME": str(tmp_path / "home" / ".cache"),
        "PATH": str(tmp_path / "tools"),
        "SEEN": str(tmp_path / "seen.jsonl"),
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "http_proxy": f"http://me:{PROXY_PASSWORD}@127.0.0.1:9",
        "no_proxy": "",
        "COLUMNS": "100",
    }
    # Compiled kernels are no business of this test, and cost half a minute to make again.
    environment.setdefault("NUMBA_CACHE_DIR", str(Path.home() / ".cache" / "alpagym"))

    def alpagym(*words):
        return subprocess.run(
            [sys.executable, "-m", "alpagym_host.cli", *words],
            cwd=tmp_path / "work",
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    return tmp_path, alpagym


def leaks(folder, *texts):
    secrets = [*MARKERS.values(), PROXY_PASSWORD]
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    found = [f"{path}: {s}" for path, data in files.items() for s in secrets if s.encode() in data]
    return found + [f"output: {s}" for text in texts for s in secrets if s in text]


def test_nothing_that_a_run_a_dry_run_a_refusal_and_a_doctor_leave_holds_a_secret(world):
    tmp_path, alpagym = world
    done = [
        alpagym("train", "--dry-run", "logging=wandb"),
        alpagym("evaluate", "logging=wandb", *TINY),
        alpagym("evaluate", f"dataset.path={MARKERS['HF_TOKEN']}", *TINY),
        alpagym("train", f"logging.loggers.console.api_key={MARKERS['WANDB_API_KEY']}"),
        alpagym("doctor", "experiment=alpamayo_1_5_local_2gpu_smoke", "--timeout-s", "5"),
    ]
    assert [part.returncode for part in done] == [0, 0, 2, 2, 1], [part.stderr for part in done]
    assert "holds the value of the environment variable HF_TOKEN" in done[2].stderr
    assert "cannot log in with ***" in " ".join(done[4].stdout.split())
    texts = [text for part in done for text in (part.stdout, part.stderr)]
    assert leaks(tmp_path / "work", *texts) == []
    assert leaks(tmp_path / "home") == []
    assert list((tmp_path / "work").rglob("*.wandb"))
    # The program that we started had the variable, and not in its arguments.
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert {part["token"] for part in seen} == {MARKERS["HF_TOKEN"]}
    assert not any(secret in word for part in seen for word in part["argv"] for secret in MARKERS.values())


def test_the_process_that_speaks_to_wandb_has_the_key_in_its_environment_only(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs wandb: uv sync --extra wandb")
    from alpagym_runtime.telemetry.config import WandbConfig
    from alpagym_runtime.telemetry.wandb_logger import WandbLogger

    for name, value in MARKERS.items():
        monkeypatch.setenv(name, value)
    logger = WandbLogger(WandbConfig(), tmp_path, {})
    try:
        place = Path(f"/proc/{logger._child.pid}")
        if not place.exists():
            pytest.skip("needs /proc")
        end_s = time.monotonic() + 5.0
        # The kernel shows an environment a moment after the program is begun.
        while not (environment := (place / "environ").read_bytes()) and time.monotonic() < end_s:
            time.sleep(0.01)
        assert MARKERS["WANDB_API_KEY"].encode() in environment
        assert MARKERS["WANDB_API_KEY"].encode() not in (place / "cmdline").read_bytes()
    finally:
        logger.close()
    assert leaks(tmp_path) == []
