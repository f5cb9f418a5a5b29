"""Scenes on whole maps: a situation, driven by the expert among reacting traffic.

The recording is what expert and traffic did in this same world, so replayed and reactive traffic begin alike, and the
ground truth is a drive that the vehicle can make.
"""

from __future__ import annotations

import numpy as np

from alpagym_runtime.errors import SceneError
from alpagym_runtime.simulators.embedded.recording import record
from alpagym_runtime.simulators.embedded.scene import Actors, Scene
from alpagym_runtime.simulators.embedded.situations import Situation, make_situation

DRIVE_STEPS = 80
ATTEMPTS = 12


def make_road_scene(scene_id: str) -> Scene:
    """The scene behind `road-<suite>-<number>`; the same bytes in every process of one build.

    Raises:
        SceneError: the id names none, or no draw of it can be driven.

    """
    for attempt in range(ATTEMPTS):
        scene = record(scene_of(make_situation(scene_id, attempt)))
        if scene is not None:
            return scene
    raise SceneError(f"scene {scene_id!r}: no drivable draw in {ATTEMPTS} attempts")


def scene_of(situation: Situation) -> Scene:
    """A situation as a scene that is still to be recorded: its log stands still after the approach."""
    still = np.repeat(situation.approach[-1:], DRIVE_STEPS, axis=0)
    agents = situation.agents
    count = len(agents)
    zero = np.zeros(count, np.int64)
    sizes = np.array([[agent.length_m, agent.width_m] for agent in agents]).reshape(-1, 2)
    kinds = np.array([agent.kind for agent in agents], np.int64)
    return Scene(
        scene_id=situation.scene_id,
        family=situation.family,
        ego_log=np.concatenate([situation.approach, still]),
        handover=situation.handover,
        route=situation.route,
        area=situation.lane_map.area(),
        actors=Actors(np.zeros((count, 1, 4)), zero, zero, sizes, kinds),
        vehicle=situation.vehicle,
        speed_limit_mps=situation.speed_limit_mps,
        agents=agents,
        signals=situation.lane_map.signals,
        stops=situation.route_stops,
        lane_map=situation.lane_map,
    )
