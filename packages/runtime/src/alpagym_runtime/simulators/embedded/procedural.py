"""Scenes from a seed: two-lane roads, straight or curved, with scripted traffic that is worth reacting to.

The families and their shares follow measurements of what a small policy learns from (lead cars that stand, crawl or
brake; cars parked into the lane; crossing road users; cut-ins; starts off the centre line; free roads at most 8 %).
The recorded drive is the expert's, rolled out in the same world; a draw that the expert cannot drive is drawn again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.errors import SceneError
from alpagym_runtime.geometry import area_from_polygons
from alpagym_runtime.random import generator, text_seed
from alpagym_runtime.simulators.embedded.lane_map import Marking
from alpagym_runtime.simulators.embedded.recording import record
from alpagym_runtime.simulators.embedded.scene import KINDS, STEP_US, Actors, Scene, Vehicle

Float = NDArray[np.floating[Any]]

LANE_WIDTH_M = 3.5
SHOULDER_M = 0.4
HISTORY_STEPS = 16
DRIVE_STEPS = 72
FAMILIES = {"free": 0.06, "lead": 0.14, "parked": 0.24, "cross": 0.36, "cut_in": 0.20}
OFF_CENTRE_SHARE = 0.35
ATTEMPTS = 40
LEAST_DRIVE_M = 8.0

CAR, PEDESTRIAN, BICYCLE = KINDS.index("car"), KINDS.index("pedestrian"), KINDS.index("bicycle")


@dataclass(frozen=True)
class _Road:
    """A centre line: samples [K,4] x, y m, yaw rad, arc length m; the ego drives on its right side."""

    samples: Float

    def at(self, arc: Float, left: Float | float) -> NDArray[np.float64]:
        """[..., 3] x, y, yaw at an arc length, `left` m left of the line."""
        s = self.samples
        x, y, yaw = (np.interp(arc, s[:, 3], s[:, k]) for k in range(3))
        return np.stack([x - left * np.sin(yaw), y + left * np.cos(yaw), yaw + 0.0 * x], axis=-1)


def _road(rng: np.random.Generator) -> _Road:
    """Line, clothoid, arc, clothoid, line; 40 % nearly straight, the rest of radius 22 to 80 m."""
    ds = 1.0
    length = 420
    if rng.uniform() < 0.4:
        curvature = rng.uniform(-0.002, 0.002) * np.ones(length)
    else:
        peak = rng.choice([-1.0, 1.0]) / rng.uniform(22.0, 80.0)
        start, ramp = rng.uniform(50.0, 110.0), rng.uniform(12.0, 25.0)
        turn = rng.uniform(0.4, 1.6)
        hold = max(turn / abs(peak) - ramp, 5.0)
        s = np.arange(length) * ds
        knots = [0.0, start, start + ramp, start + ramp + hold, start + 2 * ramp + hold, length * ds]
        curvature = np.interp(s, knots, [0.0, 0.0, peak, peak, 0.0, 0.0])
    yaw = np.concatenate([[0.0], np.cumsum((curvature[1:] + curvature[:-1]) / 2.0 * ds)])
    middle = (yaw[1:] + yaw[:-1]) / 2.0
    x = np.concatenate([[0.0], np.cumsum(np.cos(middle) * ds)])
    y = np.concatenate([[0.0], np.cumsum(np.sin(middle) * ds)])
    return _Road(np.stack([x, y, yaw, np.arange(length) * ds], axis=1))


@dataclass
class _Script:
    """One road user: arc length and lateral place by time, [K] each; heading relative to the road."""

    arc: Float
    left: Float
    turn: Float
    size: tuple[float, float]
    kind: int


STEPS = HISTORY_STEPS + DRIVE_STEPS + 45
TIMES_S = np.arange(STEPS) * STEP_US * 1e-6
ZERO = np.zeros(STEPS)
HANDOVER_S = HISTORY_STEPS * STEP_US * 1e-6
EGO_LEFT_M = -LANE_WIDTH_M / 2.0
START_M = 40.0


def _braking(start_mps: float, brake_at_s: float, deceleration: float, final_mps: float) -> Float:
    """Distance [K] m of a car that keeps its speed, then brakes to `final_mps`."""
    speed = np.maximum(start_mps - deceleration * np.maximum(TIMES_S - brake_at_s, 0.0), min(final_mps, start_mps))
    travelled = np.cumsum((speed[1:] + speed[:-1]) / 2.0 * STEP_US * 1e-6)
    return np.concatenate([np.zeros(1), travelled])


def _car(rng: np.random.Generator) -> tuple[float, float]:
    return float(rng.uniform(4.0, 5.2)), float(rng.uniform(1.7, 2.0))


def _traffic(rng: np.random.Generator, family: str, speed: float) -> list[_Script]:
    """The road users of a family, and clutter; `speed` m/s is the ego's at the handover."""
    scripts = {"free": _free, "lead": _lead, "parked": _parked, "cross": _cross, "cut_in": _cut_in}[family](rng, speed)
    if family != "cut_in":
        scripts += [_oncoming(rng, speed) for _ in range(int(rng.integers(0, 3)))]
    scripts += [_kerbside_car(rng, speed) for _ in range(int(rng.integers(0, 3)))]
    scripts += [_walker(rng, speed) for _ in range(int(rng.integers(0, 3)))]
    return scripts


def _at_handover(speed: float) -> float:
    """Arc length at which the ego takes over."""
    return START_M + speed * HANDOVER_S


def _free(rng: np.random.Generator, speed: float) -> list[_Script]:
    return []


def _lead(rng: np.random.Generator, speed: float) -> list[_Script]:
    """A car ahead that stands, crawls, or brakes when nobody expects it."""
    mode = rng.choice(["standing", "slower", "braking"], p=[0.25, 0.25, 0.5])
    size = _car(rng)
    arc: Float
    if mode == "standing":
        arc = _at_handover(speed) + rng.uniform(16.0, 20.0 + 2.4 * speed) + ZERO
    elif mode == "slower":
        pace = speed * rng.uniform(0.1, 0.5)
        arc = _at_handover(speed) + rng.uniform(10.0, 24.0) + pace * (TIMES_S - HANDOVER_S)
    else:
        brake_s = rng.uniform(HANDOVER_S, HANDOVER_S + 4.0)
        profile = _braking(speed, brake_s, rng.uniform(4.0, 7.5), rng.choice([0.0, 0.0, 2.0]))
        arc = START_M + rng.uniform(5.0, 13.0) + size[0] + profile
    return [_Script(arc, EGO_LEFT_M + rng.uniform(-0.3, 0.3) + ZERO, ZERO, size, CAR)]


def _parked(rng: np.random.Generator, speed: float) -> list[_Script]:
    """A car parked into the lane; perhaps with oncoming traffic beside it, or somebody behind it."""
    size = _car(rng)
    place = _at_handover(speed) + rng.uniform(20.0, 50.0)
    arrival_s = HANDOVER_S + (place - _at_handover(speed)) / speed
    left = -LANE_WIDTH_M + rng.uniform(0.4, 1.7) - size[1] / 2.0
    scripts = [_Script(place + ZERO, left + ZERO, rng.uniform(-0.06, 0.06) + ZERO, size, CAR)]
    if rng.uniform() < 0.5:
        pace = rng.uniform(6.0, 12.0)
        arc = place - pace * (TIMES_S - arrival_s - rng.uniform(-1.5, 1.5))
        scripts.append(_Script(arc, -EGO_LEFT_M + ZERO, math.pi + ZERO, _car(rng), CAR))
    if rng.uniform() < 0.4:
        begin_s = arrival_s + rng.uniform(-2.2, 0.3)
        walk = np.maximum(TIMES_S - begin_s, 0.0) * rng.uniform(1.0, 2.2) * (rng.uniform() < 0.6)
        behind = place + size[0] / 2.0 + 0.8 + ZERO
        scripts.append(_Script(behind, left - 0.3 + walk, math.pi / 2.0 + ZERO, (0.6, 0.6), PEDESTRIAN))
    return scripts


def _cross(rng: np.random.Generator, speed: float) -> list[_Script]:
    return [_crossing(rng, speed) for _ in range(int(rng.choice([1, 2], p=[0.65, 0.35])))]


def _cut_in(rng: np.random.Generator, speed: float) -> list[_Script]:
    """A car in the other lane that changes into the ego's and slows down; a fifth only drifts and stays."""
    size = _car(rng)
    pace = speed * rng.uniform(0.6, 1.0)
    begin_s = HANDOVER_S + rng.uniform(-0.3, 2.5)
    gap = rng.uniform(1.5, 9.0) + size[0]
    lasts_s = rng.uniform(1.2, 2.6)
    blend = np.clip((TIMES_S - begin_s) / lasts_s, 0.0, 1.0)
    blend = blend * blend * (3.0 - 2.0 * blend) * (0.15 if rng.uniform() < 0.2 else 1.0)
    start = _at_handover(speed) + gap - (pace - speed) * max(begin_s - HANDOVER_S, 0.0)
    brake_s = begin_s + lasts_s * rng.uniform(0.3, 1.5)
    profile = _braking(pace, brake_s, rng.uniform(2.0, 6.0), pace * rng.uniform(0.0, 0.6))
    arc = start - pace * HANDOVER_S + profile
    left = -EGO_LEFT_M + blend * (2.0 * EGO_LEFT_M)
    turn = np.arctan2(np.gradient(left), np.maximum(np.gradient(arc), 1e-3))
    return [_Script(arc, left, turn, size, CAR)]


def _oncoming(rng: np.random.Generator, speed: float) -> _Script:
    pace = rng.uniform(6.0, 13.0)
    arc = _at_handover(speed) + rng.uniform(25.0, 160.0) - pace * TIMES_S
    return _Script(arc, -EGO_LEFT_M + rng.uniform(-0.2, 0.2) + ZERO, math.pi + ZERO, _car(rng), CAR)


def _kerbside_car(rng: np.random.Generator, speed: float) -> _Script:
    size = _car(rng)
    left = rng.choice([-1.0, 1.0]) * (LANE_WIDTH_M + SHOULDER_M + 0.3 + size[1] / 2.0) + ZERO
    return _Script(_at_handover(speed) + rng.uniform(-20.0, 120.0) + ZERO, left, ZERO, size, CAR)


def _walker(rng: np.random.Generator, speed: float) -> _Script:
    pace = rng.uniform(-1.6, 1.6)
    left = rng.choice([-1.0, 1.0]) * rng.uniform(4.3, 6.0) + ZERO
    arc = _at_handover(speed) + rng.uniform(-10.0, 90.0) + pace * TIMES_S
    return _Script(arc, left, (0.0 if pace >= 0 else math.pi) + ZERO, (0.6, 0.6), PEDESTRIAN)


def _crossing(rng: np.random.Generator, speed: float) -> _Script:
    """Somebody who crosses the ego's lane, starts to from the kerb, or stops before it; only time will tell."""
    meet_s = rng.uniform(1.2, 5.0)
    side = rng.choice([-1.0, 1.0])
    kind = int(rng.choice([PEDESTRIAN, BICYCLE, CAR], p=[0.6, 0.2, 0.2]))
    pace = {PEDESTRIAN: rng.uniform(1.0, 3.0), BICYCLE: rng.uniform(2.5, 5.5), CAR: rng.uniform(4.0, 9.0)}[kind]
    size = {PEDESTRIAN: (0.6, 0.6), BICYCLE: (1.8, 0.6), CAR: _car(rng)}[kind]
    late = rng.uniform(-1.0, 0.6)
    from_lane_m = pace * (TIMES_S - HANDOVER_S - meet_s - late)
    manner = rng.choice(["passes", "starts", "stops"], p=[0.4, 0.35, 0.25])
    kerb = -(rng.uniform(2.3, 3.4) + size[1] / 2.0)
    if manner == "starts":
        from_lane_m = np.maximum(from_lane_m, kerb)
    elif manner == "stops":
        from_lane_m = np.minimum(from_lane_m, kerb)
    arc = _at_handover(speed) + speed * meet_s + rng.uniform(-4.0, 5.0) + ZERO
    return _Script(arc, EGO_LEFT_M + side * from_lane_m, side * math.pi / 2.0 + ZERO, size, kind)


def _actors(road: _Road, scripts: list[_Script]) -> Actors:
    if not scripts:
        return Actors.none()
    tracks = np.zeros((len(scripts), STEPS, 4))
    first, last = np.zeros(len(scripts), np.int64), np.zeros(len(scripts), np.int64)
    for a, script in enumerate(scripts):
        pose = road.at(script.arc, script.left)
        velocity = np.gradient(pose[:, :2], STEP_US * 1e-6, axis=0)
        tracks[a, :, :2] = pose[:, :2]
        tracks[a, :, 2] = np.unwrap(pose[:, 2] + script.turn)
        tracks[a, :, 3] = np.hypot(velocity[:, 0], velocity[:, 1])
        # A road user exists while it is on the modelled part of the road.
        on = np.flatnonzero((script.arc > 1.0) & (script.arc < road.samples[-1, 3] - 1.0))
        first[a], last[a] = (on[0], on[-1]) if len(on) else (0, 0)
        if not len(on):
            tracks[a] = tracks[a, 0]
    sizes = np.array([script.size for script in scripts])
    return Actors(tracks, first, last, sizes, np.array([script.kind for script in scripts]))


def _markings(road: _Road) -> tuple[Marking, ...]:
    """A broken line between the lanes, solid ones at the edges."""
    arcs = road.samples[:, 3]
    places = ((0.0, "dashed"), (LANE_WIDTH_M, "edge"), (-LANE_WIDTH_M, "edge"))
    return tuple(Marking(road.at(arcs, left)[:, :2], kind) for left, kind in places)  # type: ignore[arg-type]


def _draw(scene_id: str, attempt: int) -> Scene | None:
    """One draw of a scene; None where the expert cannot drive it."""
    seed = text_seed(scene_id)
    # Independent streams: another family mix leaves the roads as they are.
    road_rng, traffic_rng, start_rng = (generator(seed, attempt, stream) for stream in (1, 2, 3))
    family = str(generator(seed, 0).choice(list(FAMILIES), p=list(FAMILIES.values())))
    road = _road(road_rng)
    speed = float(start_rng.uniform(6.0, 12.5))
    scripts = _traffic(traffic_rng, family, speed)
    half = LANE_WIDTH_M + SHOULDER_M
    arcs = road.samples[:, 3]
    outline = np.concatenate([road.at(arcs, half)[:, :2], road.at(arcs, -half)[::-1, :2]])
    route_arcs = np.arange(START_M - 30.0, arcs[-1] - 10.0, 2.0)
    off_centre = start_rng.uniform() < OFF_CENTRE_SHARE
    offset = float(start_rng.uniform(-0.8, 0.8)) if off_centre else 0.0
    heading = float(start_rng.uniform(-0.12, 0.12)) if off_centre else 0.0
    # Before the handover the ego arrives on a straight line through its start, at constant speed.
    handover = road.at(np.array(_at_handover(speed)), EGO_LEFT_M + offset)
    yaw = handover[2] + heading
    back = speed * STEP_US * 1e-6 * (np.arange(HISTORY_STEPS + 1) - HISTORY_STEPS)[:, None]
    history = np.concatenate(
        [handover[:2] + back * np.array([math.cos(yaw), math.sin(yaw)]), np.zeros_like(back) + yaw], 1
    )
    log = np.concatenate([history, np.full((len(history), 1), speed)], axis=1)
    still = np.repeat(log[-1:], DRIVE_STEPS, axis=0)
    scene = Scene(
        scene_id=scene_id,
        family=family,
        ego_log=np.concatenate([log, still]),
        handover=HISTORY_STEPS,
        route=road.at(route_arcs, EGO_LEFT_M)[:, :2],
        area=area_from_polygons([outline]),
        actors=_actors(road, scripts),
        vehicle=Vehicle(4.7, 1.9, 1.0, 2.8),
        speed_limit_mps=speed * float(start_rng.uniform(1.0, 1.2)),
        markings=_markings(road),
    )
    recorded = record(scene)
    if recorded is None or np.hypot(*(recorded.ego_log[-1, :2] - recorded.ego_log[HISTORY_STEPS, :2])) < LEAST_DRIVE_M:
        return None
    return recorded


def make_scene(scene_id: str) -> Scene:
    """The scene behind an id; the same bytes in every process of one build."""
    for attempt in range(ATTEMPTS):
        scene = _draw(scene_id, attempt)
        if scene is not None:
            return scene
    raise SceneError(f"scene {scene_id!r}: no drivable draw in {ATTEMPTS} attempts")
