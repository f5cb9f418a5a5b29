"""kill -9 of either side at each phase of a rollout: the survivor notices within 10 s, says who, frees all, goes on.

The side that dies kills itself when it gets to the phase, in a process of its own. One case of each side runs by
default, all of them with `-m slow`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing

import grpc
import psutil
import pytest

from alpagym_runtime.envs.core import DrivingCore
from alpagym_runtime.policies.config import ConstantSpeedConfig
from alpagym_runtime.rollouts.collector import Collector
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.alpasim.config import AlpasimConfig, ServerConfig
from alpagym_runtime.simulators.alpasim.drive import PolicyDriver
from alpagym_runtime.simulators.alpasim.wire import runtime_pb2
from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
from alpagym_runtime.simulators.embedded.server import ServeOptions, WorldServer, build_world
from alpagym_runtime.simulators.embedded.server_rollout import RolloutOptions
from alpagym_runtime.types import Ended, EpisodeRequest, Sampling

PHASES = ["start", "warm-up", "drive", "evaluation", "close"]
SCENES = ["procedural-test-000000", "procedural-test-000001"]
STEPS = 14  # 8 recorded, 6 driven
OPTIONS = RolloutOptions(200_000, 1_600_000, STEPS)

# A driver that dies when it gets to the phase: at its n-th call of a method, before it answers (evaluation: after).
DRIVER = """
import os, signal, sys, threading
from alpagym_runtime.policies.config import ConstantSpeedConfig
from alpagym_runtime.simulators.alpasim.config import ServerConfig
from alpagym_runtime.simulators.alpasim.drive import PolicyDriver
phase, port = sys.argv[1], int(sys.argv[2])
driver = PolicyDriver(ConstantSpeedConfig().build(), ServerConfig(port=port))
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
method, count = {
    "start": ("_start_session", 1), "warm-up": ("_egomotion", 3), "drive": ("_begin", 3), "evaluation": ("_begin", 6),
    "close": ("_close_session", 1),
}[phase]
inner, calls = getattr(driver.server, method), []
def called(*arguments):
    calls.append(0)
    if len(calls) < count:
        return inner(*arguments)
    if phase != "evaluation":
        die()
    threading.Timer(0.02, die).start()
    return inner(*arguments)
setattr(driver.server, method, called)
driver.start()
print("ready", flush=True)
driver.serve()
"""

# A world that dies when a log entry of the phase is due.
WORLD = """
import os, signal, sys
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
from alpagym_runtime.simulators.embedded.server import ServeOptions, WorldServer, build_world
from alpagym_runtime.simulators.embedded.server_rollout import RolloutLog, RolloutOptions
phase, port = sys.argv[1], int(sys.argv[2])
class Deadly(RolloutLog):
    def __init__(self, scene, session):
        self.seen = []
    def write(self, kind, message):
        self.seen.append(kind)
        wanted = {"start": "driver_session_request 1", "warm-up": "route_request 3", "drive": "driver_request 3"}
        kind, count = wanted.get(phase, "none 1").split()
        if self.seen.count(kind) >= int(count):
            os.kill(os.getpid(), signal.SIGKILL)
    def actors(self, time_us, *rest):
        if phase == "evaluation" and time_us == 1_600_000 + 6 * 200_000:
            os.kill(os.getpid(), signal.SIGKILL)
    def close(self):
        if phase == "close":
            os.kill(os.getpid(), signal.SIGKILL)
options = RolloutOptions(200_000, 1_600_000, 14)
world = build_world(EmbeddedConfig(), DatasetSection(), 2, options)
server = WorldServer(ServeOptions(options, port=port), world, Deadly)
server.start()
print("ready", flush=True)
server.wait()
"""


def cases():
    """The default run has one; the marker takes the others."""
    return [phase if phase == "drive" else pytest.param(phase, marks=pytest.mark.slow) for phase in PHASES]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(text, phase, port):
    process = subprocess.Popen([sys.executable, "-c", text, phase, str(port)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.stdout.close()
    return process


def reap(process):
    if process.poll() is None:
        process.kill()
    assert process.wait(10) == -9


def things():
    process = psutil.Process(os.getpid())
    return process.num_threads(), process.num_fds()


def settled(before, allowed):
    """Threads and descriptors return to what they were, within gRPC's own few."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        now = things()
        if all(b - a <= allowed for a, b in zip(before, now, strict=True)):
            return
        time.sleep(0.1)
    raise AssertionError(f"threads and descriptors were {before}, are {now}")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("phase", cases())
def test_the_world_survives_its_driver(phase):
    world = build_world(EmbeddedConfig(), DatasetSection(), 2, OPTIONS)
    server = WorldServer(ServeOptions(OPTIONS, max_rollout_retries=0), world)
    server.start()
    fine = PolicyDriver(ConstantSpeedConfig().build(), ServerConfig())
    fine.start()
    serving = threading.Thread(target=fine.serve)
    serving.start()

    def simulate(port, count):
        request = runtime_pb2.SimulationRequest(n_concurrent_per_driver=2)
        request.available_drivers.add(ip="127.0.0.1", port=port)
        request.rollout_specs.add(scenario_id=SCENES[0], nr_rollouts=count)
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            data = channel.unary_unary("/RuntimeService/simulate")(request.SerializeToString(), timeout=60)
        return runtime_pb2.SimulationReturn.FromString(data).rollout_returns

    try:
        assert all(answer.success for answer in simulate(fine.server.port, 2))
        before = things()
        port = free_port()
        deadly = start(DRIVER, phase, port)
        began = time.monotonic()
        answers = simulate(port, 2)
        took_s = time.monotonic() - began
        reap(deadly)
        lost = [answer for answer in answers if not answer.success]
        assert lost
        assert took_s < 10.0
        assert all(f"127.0.0.1:{port}" in answer.error for answer in lost)
        assert server.counts.running == 0
        assert sum(server.counts.errors.values()) == len(lost) == server.counts.failed
        settled(before, allowed=6)
        assert all(answer.success for answer in simulate(fine.server.port, 4))
    finally:
        fine.stop()
        serving.join()
        fine.close()
        server.stop()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("phase", cases())
def test_the_driver_survives_its_world(phase):
    port = free_port()
    policy = ConstantSpeedConfig().build()
    deadly = start(WORLD, phase, port)
    config = AlpasimConfig(address=f"127.0.0.1:{port}", control_period_us=200_000, force_gt_duration_us=1_600_000)
    simulator = config.build(policy.spec, DatasetSection(), 2, ())
    requests = [EpisodeRequest(scene, horizon_ticks=20) for scene in SCENES]
    again = None
    with closing(simulator):
        collector = Collector(DrivingCore(simulator, {}, policy.spec), policy, min_ready=1, timeout_s=30.0, retries=0)
        before = things()
        began = time.monotonic()
        episodes = collector.collect(requests, Sampling("mean"))
        took_s = time.monotonic() - began
        reap(deadly)
        assert took_s < 10.0
        lost = [episode for episode in episodes if episode.ended == Ended.FAILED]
        assert lost
        assert {episode.failure.kind for episode in lost} == {"transient"}
        assert all(f"127.0.0.1:{port}" in episode.failure.text for episode in lost)
        assert collector.counts["failed"] == len(lost)
        assert not simulator._server.sessions
        settled(before, allowed=6)
        try:
            again = start(WORLD, "never", port)
            # It is asked again every 2 s, and used again once it answers.
            episodes = collector.collect(requests, Sampling("mean"))
            assert [episode.ended for episode in episodes] == [Ended.SCENE_END] * 2
            assert not simulator._server.sessions
        finally:
            if again is not None:
                reap(again)
