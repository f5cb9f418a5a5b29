"""Drivable scenes on a bare map: where to start, where to go and who else is there come from the scene's id.

The recorded drive is the expert's among reactive traffic, as in procedural scenes; a draw that it cannot drive, or
that hardly moves, is drawn again.
"""

from __future__ import annotations

import math

import numpy as np
import shapely
from numpy.typing import NDArray

from alpagym_runtime.errors import SceneError
from alpagym_runtime.geometry import area_from_polygons
from alpagym_runtime.random import generator, text_seed
from alpagym_runtime.simulators.embedded.lane_map import LaneMap
from alpagym_runtime.simulators.embedded.maps import RoadPlan
from alpagym_runtime.simulators.embedded.maps.lines import arc_lengths, at_arc
from alpagym_runtime.simulators.embedded.maps.paths import Path, path_over
from alpagym_runtime.simulators.embedded.population import EgoStart, Population
from alpagym_runtime.simulators.embedded.recording import record
from alpagym_runtime.simulators.embedded.scene import STEP_US, Actors, Scene, Vehicle
from alpagym_runtime.simulators.embedded.scene_files import near
from alpagym_runtime.simulators.embedded.start_speeds import with_room_to_brake

Float = NDArray[np.float64]

VEHICLE = Vehicle(4.7, 1.9, 1.0, 2.8)
HISTORY_STEPS, DRIVE_STEPS = 16, 72
ROUTE_MIN_M = 120.0
ROUTE_BEHIND_M, ROUTE_MAX_M = 10.0, 420.0
SPEED_MIN_MPS = 4.0
LEAST_DRIVE_M = 8.0
ATTEMPTS = 60
LANES_MAX = 200
SPACING_M = 60.0


class MapScenes:
    """Scenes on one map; `name` begins their ids.

    Raises:
        SceneError: no way along the lanes is `ROUTE_MIN_M` long.

    """

    def __init__(self, lane_map: LaneMap, name: str) -> None:
        self.lane_map = lane_map
        self.name = name
        self._lengths = np.array([float(arc_lengths(lane.centre)[-1]) for lane in lane_map.lanes])
        self._onward = _longest_onward(lane_map, self._lengths)
        drivable = np.array([lane.kind == "driving" for lane in lane_map.lanes])
        enough = self._onward >= ROUTE_MIN_M + ROUTE_BEHIND_M
        self._weights = np.where(drivable & enough, self._lengths, 0.0)
        if not self._weights.any():
            longest = float(np.where(drivable, self._onward, 0.0).max(initial=0.0))
            need = ROUTE_MIN_M + ROUTE_BEHIND_M
            raise SceneError(f"too short: its longest way along the lanes has {longest:.0f} m, {need:g} m are needed")

    def make(self, scene_id: str) -> Scene:
        """The scene behind an id; the same bytes in every process of one build."""
        for attempt in range(ATTEMPTS):
            try:
                scene = self._draw(scene_id, attempt)
            except (SceneError, ValueError, shapely.errors.GEOSException) as err:
                raise SceneError(f"scene {scene_id!r}: {err}") from err
            if scene is not None:
                return scene
        raise SceneError(f"scene {scene_id!r}: no drivable draw in {ATTEMPTS} attempts")

    def _way(self, rng: np.random.Generator) -> tuple[Path, float] | None:
        """A path and the arc length on it at which the drive begins."""
        lane = int(rng.choice(len(self._weights), p=self._weights / self._weights.sum()))
        latest = min(self._lengths[lane], self._onward[lane] - ROUTE_MIN_M)
        start = float(rng.uniform(ROUTE_BEHIND_M, max(latest, ROUTE_BEHIND_M + 1e-6)))
        lanes, length = [lane], float(self._lengths[lane])
        while length < start + ROUTE_MAX_M and len(lanes) < LANES_MAX:
            # Ways that end before the drive would are left out.
            need = start + ROUTE_MIN_M - length
            ways = [s for s in self.lane_map.lanes[lanes[-1]].successors if self._onward[s] >= need]
            if not ways:
                break
            lanes.append(int(rng.choice(ways)))
            length += float(self._lengths[lanes[-1]])
        return (path_over(self.lane_map, tuple(lanes)), start) if length >= start + ROUTE_MIN_M else None

    def _draw(self, scene_id: str, attempt: int) -> Scene | None:
        """One draw; None where the expert cannot drive it."""
        seed = text_seed(scene_id)
        rng = generator(seed, attempt, 1)
        way = self._way(rng)
        if way is None:
            return None
        path, start = way
        # As far as a drive at the limit can come; lanes behind its end do not slow it down.
        begins = np.concatenate([[0.0], np.cumsum(self._lengths[list(path.lanes)])])
        limit = min(
            self.lane_map.lanes[lane].speed_limit_mps
            for lane, begin in zip(path.lanes, begins, strict=False)
            if begin < start + ROUTE_MIN_M
        )
        seconds = (HISTORY_STEPS + DRIVE_STEPS) * STEP_US * 1e-6
        room = (float(path.arcs[-1]) - start - 15.0) / seconds
        speed = min(limit * float(rng.uniform(0.55, 0.95)), room, path.speed_for_bends(start))
        if speed < SPEED_MIN_MPS:
            return None
        x, y, yaw = at_arc(path.points, start)
        handover = start + speed * HISTORY_STEPS * STEP_US * 1e-6
        population = Population(
            "multilane",
            RoadPlan("multilane", self.lane_map, ()),
            EgoStart(path, start, handover, speed),
            generator(seed, attempt, 2),
        )
        population.fill(SPACING_M)
        route, stops, _ = path.cut(start - ROUTE_BEHIND_M, start + ROUTE_MAX_M)
        agents = tuple(with_room_to_brake(population.agents))
        tracks = np.zeros((len(agents), HISTORY_STEPS + DRIVE_STEPS + 1, 4))
        zeros = np.zeros(len(agents), np.int64)
        scene = Scene(
            scene_id=scene_id,
            family=_family(path, start, speed * seconds),
            ego_log=np.repeat([[x, y, yaw, speed]], HISTORY_STEPS + DRIVE_STEPS + 1, axis=0),
            handover=HISTORY_STEPS,
            route=route,
            area=area_from_polygons(near(self.lane_map, route)),
            actors=Actors(
                tracks,
                zeros,
                zeros + tracks.shape[1] - 1,
                np.array([(agent.length_m, agent.width_m) for agent in agents]).reshape(-1, 2),
                np.array([agent.kind for agent in agents], np.int64),
            ),
            vehicle=VEHICLE,
            speed_limit_mps=min(limit, room, speed * float(rng.uniform(1.0, 1.2))),
            agents=agents,
            signals=self.lane_map.signals,
            stops=stops,
            lane_map=self.lane_map,
        )
        recorded = record(scene, 0)
        if recorded is None:
            return None
        log = recorded.ego_log
        if np.hypot(*(log[-1, :2] - log[HISTORY_STEPS, :2])) < LEAST_DRIVE_M:
            return None
        return recorded


def _family(path: Path, start_m: float, length_m: float) -> str:
    """What the drive does, by how far its path turns."""
    arcs = np.arange(start_m, start_m + length_m, 1.0)
    yaw = np.unwrap(at_arc(path.points, arcs)[:, 2])
    turn = float(yaw[-1] - yaw[0])
    if abs(turn) < math.radians(30.0):
        return "map.straight"
    return "map.left" if turn > 0.0 else "map.right"


def _longest_onward(lane_map: LaneMap, lengths: Float) -> Float:
    """[L] m that one can drive from each lane's start on, up to `ROUTE_MAX_M` and `LANES_MAX` lanes."""
    onward = lengths.copy()
    for _ in range(LANES_MAX):
        best = np.array([max((onward[s] for s in lane.successors), default=0.0) for lane in lane_map.lanes])
        longer = np.minimum(lengths + best, np.maximum(lengths, ROUTE_MAX_M))
        if np.allclose(longer, onward):
            break
        onward = longer
    return onward
