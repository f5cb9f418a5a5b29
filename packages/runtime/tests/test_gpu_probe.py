from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from alpagym_runtime.trainers.gpu_probe import describe, main


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_without_a_gpu_it_says_so_and_does_not_fail(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu_probe"])
    assert main() == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["available"], found["devices"], found["peers"]) == (False, 0, [])
    assert found["torch"] == torch.__version__


def test_a_driver_that_fails_is_a_finding(monkeypatch):
    def fail():
        raise RuntimeError("CUDA driver is too old\nmore")

    monkeypatch.setattr(torch.cuda, "device_count", fail)
    assert describe()["error"] == "CUDA driver is too old"


@pytest.mark.gpu
def test_two_gpus_add_up_over_nccl():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: pytest -m gpu on a machine that has them")
    command = [sys.executable, "-m", "alpagym_runtime.trainers.gpu_probe", "--nccl", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["gigabytes_per_s"] > 1
