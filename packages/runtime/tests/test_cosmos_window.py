"""Tensors through memory that two processes see; the GPU's own memory in the test that is marked so."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading

import psutil
import pytest
import torch

from alpagym_runtime.trainers.cosmos import window
from alpagym_runtime.trainers.cosmos.window import Inlet, Outlet
from alpagym_runtime.transport.nccl.line import Line, introduce

CPU = torch.device("cpu")
TAKER = """
import sys, torch
from pathlib import Path
from alpagym_runtime.trainers.cosmos.window import Inlet
inlet = Inlet(Path(sys.argv[1]), torch.device(sys.argv[2]), 20.0)
single, half = torch.float32, torch.bfloat16
for shape, dtype in (((3, 1000), single), ((), single), ((0, 4), single), ((2049,), half)):
    tensor = torch.empty(shape, dtype=dtype, device=sys.argv[2])
    inlet.receive(tensor)
    print(tensor.double().sum().item(), flush=True)
"""


def pass_four(path, device, size):
    taker = subprocess.Popen([sys.executable, "-c", TAKER, str(path), device], stdout=subprocess.PIPE, text=True)
    try:
        outlet = Outlet(path, torch.device(device), size)
        outlet.meet(60.0)
        sent = [
            torch.arange(3000, dtype=torch.float32, device=device).reshape(3, 1000),
            torch.tensor(7.5, device=device),
            torch.empty(0, 4, device=device),
            torch.full((2049,), 2.0, dtype=torch.bfloat16, device=device),
        ]
        for tensor in sent:
            outlet.send(tensor)
            tensor.zero_()  # the next training step may begin at once
        outlet.close()
        return [float(line) for line in taker.communicate(timeout=30)[0].split()]
    finally:
        taker.kill()
        taker.wait()


def test_tensors_pass_between_two_processes_in_pieces(tmp_path):
    path = tmp_path / "windows" / "a_b-0.json"
    # 12,000 bytes pass a buffer of 4,096 in three pieces, the last shorter; 0 + 1 + … + 2999 = 4,498,500; 2049 × 2.
    assert pass_four(path, "cpu", 4096) == [4498500.0, 7.5, 0.0, 4098.0]
    assert list(path.parent.iterdir()) == []
    assert path.parent.stat().st_mode & 0o077 == 0


@pytest.mark.gpu
def test_tensors_pass_within_a_gpu(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    assert pass_four(tmp_path / "a_b-0.json", "cuda", 4096) == [4498500.0, 7.5, 0.0, 4098.0]


def ends(tmp_path, size=1024):
    path = tmp_path / "a_b-0.json"
    outlet = Outlet(path, CPU, size)
    meeting = threading.Thread(target=outlet.meet, args=(20.0,))
    meeting.start()
    inlet = Inlet(path, CPU, 20.0)
    meeting.join()
    return outlet, inlet


def test_a_sender_goes_on_only_when_the_tensor_has_been_taken(tmp_path):
    outlet, inlet = ends(tmp_path)
    sending = threading.Thread(target=outlet.send, args=(torch.ones(10),))
    sending.start()
    sending.join(0.2)
    assert sending.is_alive()
    tensor = torch.zeros(10)
    inlet.receive(tensor)
    sending.join(5.0)
    assert not sending.is_alive()
    assert tensor.sum() == 10.0
    outlet.close(), inlet.close()


def test_a_tensor_of_another_size_is_an_error_at_both_ends(tmp_path):
    outlet, inlet = ends(tmp_path)
    failed = []

    def send():
        try:
            outlet.send(torch.ones(10))
        except ConnectionError as err:
            failed.append(err)

    sending = threading.Thread(target=send)
    sending.start()
    with pytest.raises(ConnectionError, match="40 bytes came where 80 were expected"):
        inlet.receive(torch.zeros(20))
    sending.join(5.0)
    assert len(failed) == 1
    outlet.close()


def test_a_receiver_that_goes_is_noticed(tmp_path):
    outlet, inlet = ends(tmp_path)
    inlet.close()
    with pytest.raises(ConnectionError):
        outlet.send(torch.ones(10))
    outlet.close()


def test_a_stranger_gets_nothing_and_stops_nobody(tmp_path):
    path = tmp_path / "a_b-0.json"
    outlet = Outlet(path, CPU, 1024)
    about = json.loads(path.read_text())
    meeting = threading.Thread(target=outlet.meet, args=(20.0,))
    meeting.start()
    stranger = Line(socket.create_connection(("127.0.0.1", about["port"])), 5.0)
    with pytest.raises(ConnectionError):
        introduce(stranger, "no such token", "stranger", 5.0)
    stranger.hang_up()
    inlet = Inlet(path, CPU, 20.0)
    meeting.join(5.0)
    assert not meeting.is_alive()
    outlet.close(), inlet.close()


def test_a_silent_stranger_does_not_keep_the_other_end_out(tmp_path, monkeypatch):
    monkeypatch.setattr(window, "_STRANGER_S", 0.2)
    path = tmp_path / "a_b-0.json"
    outlet = Outlet(path, CPU, 1024)
    with socket.create_connection(("127.0.0.1", json.loads(path.read_text())["port"])):
        meeting = threading.Thread(target=outlet.meet, args=(20.0,))
        meeting.start()
        inlet = Inlet(path, CPU, 20.0)
        meeting.join(5.0)
    assert not meeting.is_alive()
    outlet.close(), inlet.close()


def test_nobody_comes(tmp_path):
    path = tmp_path / "a_b-0.json"
    with pytest.raises(TimeoutError, match=r"nobody offered weights within 0\.05 s"):
        Inlet(path, CPU, 0.05)
    outlet = Outlet(path, CPU, 1024)
    with pytest.raises(TimeoutError, match=r"nobody came for weights within 0\.05 s"):
        outlet.meet(0.05)
    outlet.close()
    assert not path.exists()


def test_a_tensor_with_gaps_is_refused(tmp_path):
    outlet, inlet = ends(tmp_path)
    with pytest.raises(ValueError, match="has gaps"):
        inlet.receive(torch.zeros(4, 4)[:, :2])
    outlet.close(), inlet.close()


def test_files_and_memory_go_with_the_ends(tmp_path):
    process = psutil.Process()
    before = process.num_fds(), len(process.memory_maps(grouped=False))
    for _ in range(5):
        outlet, inlet = ends(tmp_path, 1 << 20)
        outlet.close(), inlet.close()
        del outlet, inlet
    assert process.num_fds() <= before[0]
    assert len(process.memory_maps(grouped=False)) <= before[1] + 3  # threads' stacks are kept for the next
