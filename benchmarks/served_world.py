#!/usr/bin/env python3
"""Simulated seconds a CPU second of `alpagym serve`, beside the same world in this process; 1 if the target is missed.

The driver is ours (`constant_speed`) in a process of its own, and its CPU time does not count. Both sides drive the
same scenes to their end with two cameras, and count from the first step of the warm-up on, for it has pictures too.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import psutil

from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.alpasim import services
from alpagym_runtime.simulators.alpasim.wire import runtime_pb2
from alpagym_runtime.simulators.embedded.camera_config import CamerasConfig
from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
from alpagym_runtime.types import EpisodeRequest, PolicySpec

PERIOD_US, WARM_UP_US = 100_000, 1_600_000
CAMERAS = {"front": (320, 512), "camera_cross_left_120fov": (320, 512)}
TARGET = 15.0


@contextmanager
def command(*arguments: str) -> Iterator[tuple[psutil.Process, str]]:
    """A command of ours that says where it listens, and its address."""
    line = [sys.executable, "-m", "alpagym_host.cli", *arguments]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for text in process.stdout:
            found = re.search(r"127\.0\.0\.1:\d+", text)
            if found:
                yield psutil.Process(process.pid), found[0]
                return
        raise RuntimeError(f"{' '.join(line)} ended with {process.wait()}")
    finally:
        process.terminate()
        process.wait(60)


def cpu_s(process: psutil.Process) -> float:
    """User and system CPU seconds of a process so far."""
    used = process.cpu_times()
    return float(used.user + used.system)


def simulate(channel: grpc.Channel, driver: str, scenes: list[str], slots: int) -> float:
    """Drive the scenes; simulated seconds, warm-up included."""
    host, port = driver.split(":")
    request = runtime_pb2.SimulationRequest(n_concurrent_per_driver=slots)
    request.available_drivers.add(ip=host, port=int(port))
    for scene_id in scenes:
        request.rollout_specs.add(scenario_id=scene_id, nr_rollouts=1)
    call = channel.unary_unary(services.path(services.RUNTIME, "simulate"))
    answer = runtime_pb2.SimulationReturn.FromString(call(request.SerializeToString(), timeout=600.0))
    total_us = 0
    for rollout in answer.rollout_returns:
        if not rollout.success:
            raise RuntimeError(rollout.error)
        times = rollout.timestep_metrics[0].timestamps_us
        total_us += times[-1] - times[0] + WARM_UP_US
    return total_us * 1e-6


class Inside:
    """The same world in this process, driven straight ahead at the present speed."""

    def __init__(self, dataset: DatasetSection, slots: int) -> None:
        config = EmbeddedConfig(
            control_period_us=PERIOD_US,
            warmup_ticks=WARM_UP_US // PERIOD_US,
            end_on=[],
            threads=0,
            cameras=CamerasConfig(encoding="jpeg95"),
        )
        fields = ("ego_dynamics_rig", "route_rig")
        spec = PolicySpec(fields=fields, cameras=CAMERAS, frames=1, history_steps=1)
        self._world = config.build(spec, dataset, slots, ())
        self.scenes, self._slots = list(self._world.spec.scenes), slots
        self._ahead = np.zeros((64, 3), np.float32)
        self._ahead[:, 0] = 0.1 * np.arange(1, 65)

    def drive(self, scenes: list[str]) -> tuple[float, float]:
        """Simulated seconds and CPU seconds."""
        world, waiting = self._world, list(scenes)
        began_s, ticks = time.process_time(), 0
        slots = np.arange(min(self._slots, len(waiting)))
        world.start(slots, [self._request(waiting.pop(0)) for _ in slots])
        running = len(slots)
        while running:
            batch = world.receive(running, 60.0)
            over = batch.ended > 0
            ticks += int((~over).sum())
            again = batch.slots[over][: len(waiting)]
            running -= int(over.sum()) - len(again)
            if len(again):
                world.start(again, [self._request(waiting.pop(0)) for _ in again])
            speed = batch.observation["ego_dynamics_rig"][~over, 0]
            plans = self._ahead * speed[:, None, None]
            if len(plans):
                world.send(batch.slots[~over], plan_decision(plans), np.zeros(len(plans), bool))
        return ticks * PERIOD_US * 1e-6, time.process_time() - began_s

    def _request(self, scene_id: str) -> EpisodeRequest:
        scene = self._world.scene(scene_id)
        return EpisodeRequest(scene_id, horizon_ticks=len(scene.ego_log) - 1 - scene.handover)


def main() -> int:
    """Measure in turn; 1 if the median of the served rounds misses the target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenes", type=int, default=24)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dataset", default="procedural")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    dataset = DatasetSection(arguments.dataset, split="test")
    world = Inside(dataset, arguments.slots)
    scenes = world.scenes[: arguments.scenes]
    serve = ["serve", "--port", "0", "--slots", str(arguments.slots), f"dataset={arguments.dataset}"]
    serve += [f"simulator.control_period_us={PERIOD_US}", *cameras()]
    rounds = []
    with (
        command("drive", "--policy", "constant_speed", "--port", "0") as (_, driver),
        command(*serve) as (server, at),
        grpc.insecure_channel(at, options=[("grpc.max_receive_message_length", 2**28)]) as channel,
    ):
        simulate(channel, driver, scenes, arguments.slots)
        world.drive(scenes)
        for _ in range(arguments.rounds):
            before_s = cpu_s(server)
            simulated_s = simulate(channel, driver, scenes, arguments.slots)
            served = simulated_s / (cpu_s(server) - before_s)
            inside_s, spent_s = world.drive(scenes)
            rounds.append({"served": served, "in_process": inside_s / spent_s, "simulated_s": simulated_s})
            print(json.dumps(rounds[-1]), flush=True)
    median = float(np.median([found["served"] for found in rounds]))
    print(json.dumps({"served_x_real_time_a_cpu_second": median, "target": TARGET, "met": median >= TARGET}))
    if arguments.out:
        arguments.out.write_text(json.dumps(rounds, indent=1))
    return int(median < TARGET)


def cameras() -> list[str]:
    """The options of `serve` for `CAMERAS`."""
    return [part for name, (h, w) in CAMERAS.items() for part in ("--camera", f"{name}={h}x{w}")]


if __name__ == "__main__":
    sys.exit(main())
