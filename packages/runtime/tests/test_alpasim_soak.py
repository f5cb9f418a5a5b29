"""Thousands of episodes through one driver server leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import uuid

import grpc
import psutil
import pytest
from carla_driver_interface._proto import egodriver_pb2 as ego
from carla_driver_interface._proto import egodriver_pb2_grpc as ego_grpc

from alpagym_runtime.policies.config import ConstantSpeedConfig
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.alpasim.config import ServerConfig
from alpagym_runtime.simulators.alpasim.drive import PolicyDriver
from alpagym_runtime.simulators.alpasim.wire import runtime_pb2
from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
from alpagym_runtime.simulators.embedded.server import ServeOptions, WorldServer, build_world
from alpagym_runtime.simulators.embedded.server_rollout import RolloutOptions


@pytest.mark.slow  # 2000 episodes of 10 ticks, some minutes
@pytest.mark.timeout(1200)
def test_two_thousand_episodes_leave_nothing_behind():
    driver = PolicyDriver(ConstantSpeedConfig().build(), ServerConfig(), sessions=8)
    driver.start()
    thread = threading.Thread(target=driver.serve)
    thread.start()
    seconds: list[float] = []
    marks = {}

    def mark(name):
        process = psutil.Process(os.getpid())
        marks[name] = (process.memory_info().rss, process.num_threads(), process.num_fds())

    async def episode(stub):
        name, now = uuid.uuid4().hex, 1_700_000_000_000_000
        await stub.start_session(ego.DriveSessionRequest(session_uuid=name))
        for k in range(10):
            time_us = now + 100_000 * k
            motion = ego.RolloutEgoTrajectory(session_uuid=name)
            motion.trajectory.poses.add(timestamp_us=time_us).pose.quat.w = 1.0
            await stub.submit_egomotion_observation(motion)
            await stub.drive(ego.DriveRequest(session_uuid=name, time_now_us=time_us, time_query_us=time_us + 100_000))
        await stub.close_session(ego.DriveSessionCloseRequest(session_uuid=name))

    async def run():
        async with grpc.aio.insecure_channel(f"127.0.0.1:{driver.server.port}") as channel:
            stub = ego_grpc.EgodriverServiceStub(channel)
            for done in range(0, 2000, 8):
                began = time.perf_counter()
                await asyncio.gather(*(episode(stub) for _ in range(8)))
                seconds.append(time.perf_counter() - began)
                if done == 200:
                    mark("warm")

    try:
        asyncio.run(run())
        mark("end")
        assert not driver.server.sessions
        assert driver.stats()["sessions"] == {"opened": 2000, "closed": 2000, "failed": 0}
    finally:
        driver.stop()
        thread.join()
        driver.close()
    (rss_0, threads_0, files_0), (rss_1, threads_1, files_1) = marks["warm"], marks["end"]
    assert rss_1 - rss_0 < 50 * 2**20
    assert abs(threads_1 - threads_0) <= 5
    assert abs(files_1 - files_0) <= 5
    assert sorted(seconds[-25:])[12] < 1.5 * sorted(seconds[25:50])[12]


@pytest.mark.slow  # 2000 rollouts of 10 control steps, some minutes
@pytest.mark.timeout(1800)
def test_two_thousand_served_rollouts_leave_nothing_behind():
    options = RolloutOptions(200_000, 1_600_000, 10)
    world = build_world(EmbeddedConfig(), DatasetSection(), 8, options)
    server = WorldServer(ServeOptions(options), world)
    server.start()
    driver = PolicyDriver(ConstantSpeedConfig().build(), ServerConfig(), sessions=8)
    driver.start()
    thread = threading.Thread(target=driver.serve)
    thread.start()
    seconds: list[float] = []
    marks = {}
    process = psutil.Process(os.getpid())
    request = runtime_pb2.SimulationRequest(n_concurrent_per_driver=8)
    request.available_drivers.add(ip="127.0.0.1", port=driver.server.port)
    request.rollout_specs.add(scenario_id="procedural-test-000000", nr_rollouts=8)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            simulate = channel.unary_unary("/RuntimeService/simulate")
            for done in range(0, 2000, 8):
                began = time.process_time()
                answer = runtime_pb2.SimulationReturn.FromString(simulate(request.SerializeToString(), timeout=120))
                seconds.append(time.process_time() - began)
                assert all(rollout.success for rollout in answer.rollout_returns)
                if done in (200, 1992):
                    marks[done] = (process.memory_info().rss, process.num_threads(), process.num_fds())
        assert not driver.server.sessions
        assert driver.stats()["sessions"] == {"opened": 2000, "closed": 2000, "failed": 0}
        assert (server.counts.succeeded, server.counts.failed, server.counts.running) == (2000, 0, 0)
    finally:
        driver.stop()
        thread.join()
        driver.close()
        server.stop()
    (rss_0, threads_0, files_0), (rss_1, threads_1, files_1) = marks[200], marks[1992]
    assert rss_1 - rss_0 < 50 * 2**20
    assert abs(threads_1 - threads_0) <= 5
    assert abs(files_1 - files_0) <= 5
    assert sorted(seconds[-25:])[12] < 1.5 * sorted(seconds[25:50])[12]
