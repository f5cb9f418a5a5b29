"""State-only speed of the embedded world, in CPU seconds, beside highway-env where that is installed.

    uv run --with highway-env python benchmarks/world.py

Counts decisions of 0.1 s through the batch API (start, receive, send), before rewards; scenes of the suite `bench` have
32 moving, reacting road users each. `--agents 8 16 32 64 128` adds rows with so many of them on the same roads, which
grow ever fuller, and with 32 on each of several copies of the roads.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import numpy as np

from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
from alpagym_runtime.simulators.embedded.dataset import open_source
from alpagym_runtime.simulators.embedded.lane_map import Agent
from alpagym_runtime.simulators.embedded.scene import Actors, Scene
from alpagym_runtime.simulators.embedded.scene_bank import arc_lengths
from alpagym_runtime.simulators.embedded.simulator import EmbeddedSimulator
from alpagym_runtime.types import EpisodeRequest, PolicySpec

SPEC = PolicySpec(fields=("ego_dynamics_rig",))
COPY_M = 5_000.0


class Crowds:
    """The scenes of the suite `bench`, each with so many agents: the first of its own, or more on their paths.

    With `apart` those are on copies of the paths, `COPY_M` away from each other.
    """

    skipped = ()

    def __init__(self, dataset: DatasetSection, agents: int, apart: bool = False) -> None:
        self._source, self._agents, self._apart = open_source(dataset), agents, apart

    def ids(self, split: str) -> tuple[str, ...]:
        """Those whose road users all move: parked cars cost less."""
        return tuple(name for name in self._source.ids(split) if self._source.load(name).family != "parked_street")

    def load(self, scene_id: str) -> Scene:
        """The scene; who is too many starts 17 m, 34 m, … behind or ahead of its model."""
        scene, count = self._source.load(scene_id), self._agents
        agents = []
        for k in range(count):
            model, round_ = scene.agents[k % len(scene.agents)], k // len(scene.agents)
            if self._apart:
                agents.append(moved(model, round_ * COPY_M))
                continue
            room = arc_lengths(model.path)[-1] - 20.0
            agents.append(replace(model, start_arc_m=(model.start_arc_m + 17.0 * round_) % room))
        sizes, kinds = np.array([[a.length_m, a.width_m] for a in agents]), np.array([a.kind for a in agents])
        nowhere = np.zeros(count, np.int64)
        actors = Actors(np.zeros((count, 1, 4)), nowhere, nowhere, sizes, kinds)
        return replace(scene, agents=tuple(agents), actors=actors)


def moved(agent: Agent, x: float) -> Agent:
    """The agent and where it waits, x m farther east."""
    stops = tuple(replace(stop, conflict=(stop.conflict[0] + x, stop.conflict[1])) for stop in agent.stops)
    return replace(agent, path=agent.path + np.array([x, 0.0]), stops=stops)


def batch_steps_per_cpu_s(
    slots: int, scenes: int, seconds: float, agents: int | None = None, apart: bool = False
) -> float:
    """Env-steps a CPU second with every slot driving on, started again where it ended."""
    config = EmbeddedConfig(control_period_us=100_000, end_on=[])
    dataset = DatasetSection("road", split="bench", test_scenes=scenes)
    source = None if agents is None else Crowds(dataset, agents, apart)
    simulator = EmbeddedSimulator(config, SPEC, dataset, slots, source=source)
    ids = simulator.spec.scenes
    for scene_id in ids:
        simulator.scene_hash(scene_id)
    requests = [EpisodeRequest(ids[k % len(ids)], horizon_ticks=60) for k in range(slots)]
    everyone = np.arange(slots)
    straight = np.zeros((slots, 64, 3), np.float32)
    straight[:, :, 0] = 6.0 * 0.1 * np.arange(1, 65)
    decisions, go = plan_decision(straight), np.zeros(slots, bool)
    simulator.start(everyone, requests)
    steps, begun = 0, None
    while True:
        batch = simulator.receive(slots, 1.0)
        over = batch.slots[batch.ended > 0]
        if len(over):
            simulator.start(over, [requests[slot] for slot in over])
        alive = batch.slots[batch.ended == 0]
        simulator.send(alive, decisions if len(alive) == slots else decisions.take(alive), go[: len(alive)])
        steps += len(alive)
        if begun is None:
            # The first pass compiles.
            begun, steps = time.process_time(), 0
        elif time.process_time() - begun > seconds:
            return steps / (time.process_time() - begun)


def highway_steps_per_cpu_s(seconds: float) -> float | None:
    """Decisions a CPU second of highway-v0 with its default traffic."""
    try:
        import gymnasium
        import highway_env  # noqa: F401
    except ImportError:
        return None
    env = gymnasium.make("highway-v0")
    env.reset(seed=1)
    steps, begun = 0, time.process_time()
    while time.process_time() - begun < seconds:
        _, _, terminated, truncated, _ = env.step(1)
        steps += 1
        if terminated or truncated:
            env.reset()
    return steps / (time.process_time() - begun)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="CPU seconds a row")
    parser.add_argument("--scenes", type=int, default=33, help="scenes of the suite bench")
    parser.add_argument("--agents", type=int, nargs="*", default=[], help="further rows with so many agents a scene")
    options = parser.parse_args()
    for slots in (1, 16, 256):
        rate = batch_steps_per_cpu_s(slots, min(options.scenes, max(slots, 11)), options.seconds)
        print(f"embedded, {slots:3d} slots x 32 agents   {rate:10.0f} env-steps/CPU-s")
    for agents in options.agents:
        for apart in (False, True) if agents > 32 else (False,):
            rate = batch_steps_per_cpu_s(256, options.scenes, options.seconds, agents, apart)
            steps = f"{rate:10.0f} env-steps/CPU-s {1e6 / rate:7.1f} us a step"
            print(f"embedded, 256 slots x {agents:3d} agents  {steps}{', on more roads' if apart else ''}")
    highway = highway_steps_per_cpu_s(options.seconds)
    if highway is None:
        print("highway-env is not installed: uv run --with highway-env python benchmarks/world.py")
    else:
        print(f"highway-v0, its own traffic     {highway:10.1f} decisions/CPU-s")


if __name__ == "__main__":
    main()
