"""`alpagym drive` as a user runs it: a process, a client that is not ours, a signal."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from carla_driver_interface.testing import FakeCamera, FakeLoop
from typer.testing import CliRunner

from alpagym_host.cli import app
from alpagym_host.compose import compose
from alpagym_host.launch import drive
from alpagym_plugins import ConfigError
from alpagym_runtime.simulators.alpasim.config import AlpasimConfig
from alpagym_runtime.simulators.alpasim.wire import runtime_pb2
from alpagym_runtime.testing.fake_alpasim import FakeAlpaSim


def start(*arguments, cwd):
    command = [sys.executable, "-m", "alpagym_host.cli", "drive", *arguments]
    return subprocess.Popen(command, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_policy_is_served_until_a_signal(tmp_path):
    server = start(
        "--policy", "fake_vla", "policy.cameras=[camera_front]", "--port", "0", "--stats", "s.json", cwd=tmp_path
    )
    try:
        said = server.stdout.readline()
        assert said.startswith("fake_vla drives at 127.0.0.1:")
        port = int(said.rpartition(":")[2])
        camera = FakeCamera(width=128, height=96)
        with FakeLoop(f"127.0.0.1:{port}", (camera,), initial_speed_mps=5.0) as loop:
            assert loop.run(20).steps == 20
        # Nobody else can reach it, and nobody else can take its port.
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with start("--policy", "constant_speed", "--port", str(port), cwd=tmp_path) as second:
            _, complaint = second.communicate(timeout=60)
        assert second.returncode == 1
        assert str(port) in complaint
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    assert server.returncode == 0
    stats = json.loads((tmp_path / "s.json").read_text())
    assert stats["decisions"] == 20
    assert stats["batch_histogram"] == {"1": 20}
    assert stats["calls"]["decoded"] == 20
    assert 0.0 <= stats["model_busy_share"] < 1.0
    assert stats["sessions"] == {"opened": 1, "closed": 1, "failed": 0}


def test_a_trained_policy_is_found_by_its_run(tmp_path):
    pytest.importorskip("torch")
    from safetensors.torch import save_file

    from alpagym_host.compose import to_yaml

    config = compose(["policy.hidden=16"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    step = tmp_path / "checkpoints" / "step_00000001"
    step.mkdir(parents=True)
    weights = config.policy.config.build("cpu").module.state_dict()
    save_file({name: 0.0 * value + 0.5 for name, value in weights.items()}, step / "model.safetensors")
    for place in (tmp_path, step):
        policy, name = drive.build_policy(None, place, [], "cpu")
        assert name == "waypoint"
        assert all(bool((value == 0.5).all()) for value in policy.module.state_dict().values())


@pytest.mark.parametrize(
    ("name", "checkpoint", "text"),
    [
        (None, None, "--policy NAME"),
        ("constant_speed", Path("x"), "no weights"),
        (None, Path("/nowhere"), "config.yaml"),
    ],
)
def test_wrong_requests_say_what_to_write(name, checkpoint, text):
    with pytest.raises(ConfigError, match=text):
        drive.build_policy(name, checkpoint, [], "cpu")


def test_the_preset_takes_an_address_and_options():
    config = compose(["simulator=alpasim", "simulator.address=sim:6007", "simulator.server.max_message_mib=128"])
    assert isinstance(config.simulator.config, AlpasimConfig)
    assert config.simulator.config.warmup_ticks == 17
    assert config.simulator.config.server.max_message_mib == 128


@pytest.mark.slow  # a whole run, twice
@pytest.mark.parametrize(
    "arguments",
    [
        ("evaluate", "policy=constant_speed"),
        ("train", "policy=waypoint_actors", "rollout.scenes_per_step=2", "rollout.group_size=2", "trainer.updates=2"),
    ],
    ids=["evaluate", "train"],
)
def test_runs_drive_in_alpasim(tmp_path, arguments):
    options = ["simulator=alpasim", "simulator.force_gt_duration_us=300000", "expected_valid_steps=8"]
    options += ["rollout.slots=4", "reward=progress_safety", f"run.root={tmp_path}"]
    with FakeAlpaSim(n_sim_steps=60) as fake:
        command = [sys.executable, "-m", "alpagym_host.cli", *arguments, *options, f"simulator.address={fake.address}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    summary = next(tmp_path.glob("*/summary.json"))
    final = json.loads(summary.read_text())["evaluations"]["final"]
    assert 0.9 < final["driving_score"]["mean"] <= 1.0


def test_the_world_is_served_to_drivers_until_a_signal(tmp_path):
    command = [sys.executable, "-m", "alpagym_host.cli", "serve", "--port", "0", "--slots", "2"]
    server = subprocess.Popen(command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    driver = start("--policy", "constant_speed", "--port", "0", cwd=tmp_path)
    try:
        assert "compiling" in server.stdout.readline()
        said = server.stdout.readline()
        assert said.startswith("256 scenes at 127.0.0.1:")
        port = int(said.partition("127.0.0.1:")[2].partition(",")[0])
        drives = int(driver.stdout.readline().rpartition(":")[2])
        request = runtime_pb2.SimulationRequest(n_concurrent_per_driver=2)
        request.available_drivers.add(ip="127.0.0.1", port=drives)
        request.rollout_specs.add(scenario_id="procedural-test-000000", nr_rollouts=2)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            data = channel.unary_unary("/RuntimeService/simulate")(request.SerializeToString(), timeout=60)
        answers = runtime_pb2.SimulationReturn.FromString(data).rollout_returns
        assert [answer.success for answer in answers] == [True, True]
    finally:
        for process in (server, driver):
            process.send_signal(signal.SIGTERM)
        told = server.communicate(timeout=60)[0]
        driver.communicate(timeout=60)
    assert server.returncode == 0
    assert "2 rollouts, 0 failed" in told


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--force-gt-ms", "1700"], "multiple of simulator.control_period_us"),
        (["--steps", "8"], "exceed the 8 steps"),
        (["--driver", "nowhere"], "HOST:PORT"),
        (["simulator.planner_delay_us=200000"], "--ask-in-warm-up"),
        (["--camera", "front=320"], "NAME=HEIGHTxWIDTH"),
        (["--camera", "frnt=32x64"], "did you mean 'front'"),
        (["simulator=alpasim", "simulator.address=localhost:1"], "embedded world only"),
    ],
)
def test_wrong_requests_to_serve_are_named_before_anything_starts(arguments, text):
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert text in str(result.exception)


def test_logs_of_served_rollouts_are_printed_converted_and_scored(tmp_path):
    from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
    from alpagym_runtime.simulators.embedded.server import ServeOptions, WorldServer, build_world
    from alpagym_runtime.simulators.embedded.server_asl import AslLog
    from alpagym_runtime.simulators.embedded.server_rollout import RolloutOptions

    options = RolloutOptions(200_000, 1_600_000, 14)
    world = build_world(EmbeddedConfig(), compose([]).dataset, 1, options)
    server = WorldServer(ServeOptions(options), world, lambda *names: AslLog(tmp_path, *names))
    driver = start("--policy", "constant_speed", "--port", "0", cwd=tmp_path)
    server.start()
    try:
        request = runtime_pb2.SimulationRequest(n_concurrent_per_driver=1)
        request.available_drivers.add(ip="127.0.0.1", port=int(driver.stdout.readline().rpartition(":")[2]))
        request.rollout_specs.add(scenario_id="procedural-test-000000", nr_rollouts=1, session_uuids=["one"])
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            data = channel.unary_unary("/RuntimeService/simulate")(request.SerializeToString(), timeout=60)
    finally:
        server.stop()
        driver.send_signal(signal.SIGTERM)
        driver.communicate(timeout=60)
    (answer,) = runtime_pb2.SimulationReturn.FromString(data).rollout_returns
    log = str(tmp_path / "rollouts/procedural-test-000000/one/rollout.asl")
    run = CliRunner().invoke
    lines = run(app, ["asl", "print", log]).output.splitlines()
    assert "rollout_metadata" in lines[0]
    assert "'procedural-test-000000'" in lines[0]
    # Six decisions: 14 steps, 8 of them recorded.
    assert len(run(app, ["asl", "print", log, "--kind", "driver_return"]).output.splitlines()) == 6
    assert isinstance(run(app, ["asl", "print", log, "--kind", "nothing"]).exception, ConfigError)
    assert run(app, ["asl", "json", log, str(tmp_path / "log.jsonl")]).exit_code == 0
    entries = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(entries) == len(lines)
    assert entries[0]["rollout_metadata"]["session_metadata"]["session_uuid"] == "one"
    assert run(app, ["asl", "frames", log, str(tmp_path / "pictures")]).output.startswith("0 pictures")
    scored = json.loads(run(app, ["asl", "score", log]).output)
    assert scored["alpasim/dist_traveled_m"] == pytest.approx(answer.aggregated_metrics["dist_traveled_m"], abs=1e-3)
