"""Situations from a scene id: a map, where the ego comes from and has to go, and the road users around it.

Plain data; driving them is the world's task. `road-<suite>-<number>` names one; its kind is the number modulo the
number of kinds, so each kind is equally frequent. Roads, dressing, traffic and weather draw from their own streams.

Many scenes, and each of the suite `hard`, have a road user that makes trouble where the ego will be; `bench` has 32
moving ones in each scene.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.errors import SceneError
from alpagym_runtime.random import generator, mix_int, text_seed
from alpagym_runtime.simulators.embedded.lane_map import MERGE, ZEBRA, Agent, LaneMap, Stop
from alpagym_runtime.simulators.embedded.maps import KINDS, RoadPlan, fixed_time, make_map
from alpagym_runtime.simulators.embedded.maps.lines import at_arc
from alpagym_runtime.simulators.embedded.maps.paths import Path, path_over
from alpagym_runtime.simulators.embedded.population import EgoStart, Population
from alpagym_runtime.simulators.embedded.scene import STEP_US, Vehicle
from alpagym_runtime.simulators.embedded.start_speeds import with_room_to_brake

Float = NDArray[np.float64]

SUITES = ("train", "val", "test", "hard", "bench")
TRAFFIC, WEATHER = 3, 4
"""Streams of a scene's seed; a map uses 1 and 2."""

HANDOVER_STEPS = 16
ROUTE_BEHIND_M = 34.0
ROUTE_BEYOND_M = 115.0
DRIVE_S = 8.0
BENCH_AGENTS = 32
OFF_CENTRE_SHARE = 0.35
TROUBLE_SHARE = 0.4
"""Share of everyday scenes that have a trouble-maker too."""
TIMELY_SIGNALS_SHARE = 0.8
"""Share of signalled crossings that change when the ego arrives; with 0.5, constant speed scored 0.40 on `test`."""
STEP_S = STEP_US * 1e-6
VEHICLE = Vehicle(4.7, 1.9, 1.0, 2.8)

JUNCTIONS = ("crossing3", "crossing4", "priority_crossing", "roundabout")

BEFORE_FOCUS_M = {
    "curve": (5.0, 60.0),
    "crosswalk": (20.0, 60.0),
    "merge": (-20.0, 60.0),
    "lane_drop": (25.0, 110.0),
    **dict.fromkeys(JUNCTIONS, (16.0, 55.0)),
}
"""How far before the route's focus the handover is, least and most."""

SPACING_M = {
    "curve": 42.0,
    "multilane": 34.0,
    "merge": 36.0,
    "lane_drop": 30.0,
    "stop_and_go": 26.0,
    "crosswalk": 38.0,
    "parked_street": 48.0,
    "crossing3": 42.0,
    "crossing4": 44.0,
    "priority_crossing": 36.0,
    "roundabout": 36.0,
}
"""Mean distance between vehicles on a lane."""


@dataclass(frozen=True)
class Situation:
    """Where a scene begins.

    Attributes:
        scene_id: its name.
        family: the kind of its map.
        lane_map: the map.
        approach: [17,4] rig x, y m, yaw rad, speed m/s of the ego from grid index 0 to the handover.
        route: [P,2] m that the ego has to follow, from 30 m or more behind its start.
        route_stops: where it may have to wait on it.
        agents: the road users.
        vehicle: the ego's size.
        speed_limit_mps: for the ego.
        weather_seed: for who draws pictures.

    """

    scene_id: str
    family: str
    lane_map: LaneMap
    approach: Float
    route: Float
    route_stops: tuple[Stop, ...]
    agents: tuple[Agent, ...]
    vehicle: Vehicle
    speed_limit_mps: float
    weather_seed: int

    @property
    def handover(self) -> int:
        """Grid index at which the policy takes over."""
        return len(self.approach) - 1

    @property
    def ego_box(self) -> Float:
        """[5] centre x, y, yaw, length, width of the ego at grid index 0."""
        x, y, yaw, _ = self.approach[0]
        ahead = self.vehicle.centre_offset_m
        return np.array(
            [x + ahead * math.cos(yaw), y + ahead * math.sin(yaw), yaw, self.vehicle.length_m, self.vehicle.width_m]
        )


def scene_name(suite: str, number: int) -> str:
    """The id of a scene."""
    return f"road-{suite}-{number:06d}"


def suite_and_number(scene_id: str) -> tuple[str, int]:
    """What an id says.

    Raises:
        SceneError: it is no id of a road scene.

    """
    family, _, rest = scene_id.partition("-")
    suite, _, number = rest.partition("-")
    if family != "road" or suite not in SUITES or not (number.isascii() and number.isdigit()):
        raise SceneError(f"no scene {scene_id!r}: road scenes are named road-<{'|'.join(SUITES)}>-<number>")
    return suite, int(number)


def kind_of(scene_id: str) -> str:
    """The kind of a scene's map."""
    return KINDS[suite_and_number(scene_id)[1] % len(KINDS)]


def make_situation(scene_id: str, attempt: int = 0, traffic_seed: int | None = None) -> Situation:
    """The situation behind an id; the same bytes in every process of one build.

    Args:
        scene_id: `road-<suite>-<number>`.
        attempt: another draw of the same kind, for when one cannot be driven.
        traffic_seed: other traffic on the same map.

    """
    suite, number = suite_and_number(scene_id)
    seed = mix_int(text_seed(f"road-{suite}-{number}"), attempt)
    plan = make_map(KINDS[number % len(KINDS)], seed)
    rng = generator(seed if traffic_seed is None else traffic_seed, TRAFFIC)
    hard = suite == "hard"
    path, handover_m, speed, limit = _ego(plan, rng)
    lane_map = plan.lane_map
    if plan.phases and (hard or rng.uniform() < TIMELY_SIGNALS_SHARE):
        lane_map = _with_signals_for(plan, path, handover_m, speed, rng)
    start_m = handover_m - HANDOVER_STEPS * STEP_S * speed
    begin, end = start_m - ROUTE_BEHIND_M, handover_m + DRIVE_S * limit + ROUTE_BEYOND_M
    route, stops, _ = path.cut(begin, end)
    ego = EgoStart(path, start_m, handover_m, speed)
    population = Population(plan.kind, replace(plan, lane_map=lane_map), ego, rng)
    if hard or rng.uniform() < TROUBLE_SHARE:
        population.make_trouble()
    population.fill(SPACING_M[plan.kind])
    if suite == "bench":
        population.fill_up_to(BENCH_AGENTS)
    return Situation(
        scene_id=scene_id,
        family=plan.kind,
        lane_map=lane_map,
        approach=_approach(path, start_m, handover_m, speed, rng),
        route=route,
        route_stops=stops,
        agents=tuple(with_room_to_brake(population.agents)),
        vehicle=VEHICLE,
        speed_limit_mps=limit,
        weather_seed=mix_int(seed, WEATHER),
    )


def _ego(plan: RoadPlan, rng: np.random.Generator) -> tuple[Path, float, float, float]:
    """The ego's path, the arc length of its handover, its speed there and its limit."""
    choice = plan.routes[int(rng.integers(len(plan.routes)))]
    path = path_over(plan.lane_map, choice.lanes, plan.zebras)
    limit = min(plan.lane_map.lanes[choice.lanes[0]].speed_limit_mps, plan.speed_limit_mps)
    low, high = BEFORE_FOCUS_M.get(plan.kind, (-20.0, 20.0))
    handover_m = choice.focus_m - float(rng.uniform(low, high))
    speed = limit * float(rng.uniform(0.7, 1.0))
    if plan.kind == "stop_and_go":
        speed = float(rng.uniform(2.0, 7.0))
    speed = min(speed, path.speed_for_bends(handover_m))
    for stop in path.stops:
        if stop.arc_m > handover_m and stop.signal_group not in (ZEBRA, MERGE):
            # It can stop there at 3 m/s2.
            speed = min(speed, math.sqrt(2.0 * 3.0 * max(stop.arc_m - handover_m - 5.0, 1.0)))
    return path, handover_m, max(speed, 1.0), limit


def _approach(path: Path, start_m: float, handover_m: float, speed: float, rng: np.random.Generator) -> Float:
    """[17,4] along the path at constant speed; some drift to one side."""
    share = np.linspace(0.0, 1.0, HANDOVER_STEPS + 1)
    off_centre = rng.uniform() < OFF_CENTRE_SHARE
    left_from, left_to = rng.uniform(-0.5, 0.5, 2)
    travelled = handover_m - start_m
    steepest = 0.08 * travelled
    left_to = left_from + min(max(left_to - left_from, -steepest), steepest)
    left = (left_from + (left_to - left_from) * share) * float(off_centre)
    pose = at_arc(path.points, start_m + share * travelled)
    yaw = pose[:, 2] + math.atan2(left[-1] - left[0], travelled)
    x = pose[:, 0] - left * np.sin(pose[:, 2])
    y = pose[:, 1] + left * np.cos(pose[:, 2])
    return np.stack([x, y, yaw, np.full(len(share), speed)], axis=1)


def _with_signals_for(plan: RoadPlan, path: Path, handover_m: float, speed: float, rng: np.random.Generator) -> LaneMap:
    """The map with signals that matter to the ego: about to change, or just changed, when it arrives."""
    stop = next((stop for stop in path.stops if stop.signal_group >= 0 and stop.arc_m > handover_m), None)
    if stop is None:
        return plan.lane_map
    mine = next(k for k, phase in enumerate(plan.phases) if stop.signal_group in phase.groups)
    arrival_s = HANDOVER_STEPS * STEP_S + (stop.arc_m - handover_m) / speed
    if rng.uniform() < 0.6:
        # Its green ends shortly before it arrives.
        first, left_s = mine, max(arrival_s - float(rng.uniform(0.0, 3.5)), 0.5)
    else:
        # The phase before its own ends, so that red turns to green.
        first, left_s = (mine - 1) % len(plan.phases), float(rng.uniform(0.5, max(arrival_s, 1.0)))
    signals = fixed_time(plan.phases, plan.lane_map.signals.heads, first, left_s)
    return replace(plan.lane_map, signals=signals)
