"""People on foot: on sidewalks, at crossings, and anywhere across the ego's road."""

from __future__ import annotations

import math

import numpy as np
import shapely
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded.lane_map import GREEN, Agent, Stop
from alpagym_runtime.simulators.embedded.maps import Crossing
from alpagym_runtime.simulators.embedded.maps.lines import arc_lengths, at_arc
from alpagym_runtime.simulators.embedded.placement import PEDESTRIAN, SCENE_S, Placement

Float = NDArray[np.float64]

WALKWAY_M = 1.4
"""How far from the kerb people walk."""

WIDEST_ROAD_M = 18.0
"""Nobody crosses more than this without a crossing; a junction's middle is wider."""


def walker(place: Placement) -> None:
    """Someone on a sidewalk, near the ego if there is one there."""
    ways = [lane.centre for lane in place.map.lanes if lane.kind == "walkway"]
    if not ways:
        return
    points = ways[int(place.rng.integers(len(ways)))]
    if place.rng.uniform() < 0.5:
        points = points[::-1]
    arcs = arc_lengths(points)
    away = np.hypot(*(points - place.ego.place[:2]).T)
    near = arcs[(away < 110.0) & (arcs < arcs[-1] - 45.0)]
    if not len(near):
        return
    pace, arc = float(place.rng.uniform(0.9, 1.7)), float(place.rng.choice(near))
    keep = (arcs > arc - 5.0) & (arcs < arc + 1.7 * SCENE_S + 10.0)
    shift = float(arcs[keep][0])
    lateral = -float(place.rng.uniform(0.1, 0.8))
    place.add(Agent(points[keep].copy(), arc - shift, pace, pace, PEDESTRIAN, 0.6, 0.6, lateral))


def crossing_person(place: Placement, crossing: Crossing, track: int) -> None:
    """Someone on the way to a crossing or waiting at it; `track` 0 to 3 is a direction and a track of their own."""
    line = crossing.line if track < 2 else crossing.line[::-1]
    pace = float(place.rng.uniform(0.9, 1.9))
    path, kerb = _way_across(line, float(place.rng.uniform(0.0, 9.0)), outward=_outward(crossing))
    free = crossing.signal_group < 0
    middle = line.mean(axis=0)
    stop = Stop(kerb, crossing.signal_group, (float(middle[0]), float(middle[1])) if free else (math.nan, math.nan))
    before = kerb - 0.3
    if crossing.signal_group >= 0 and place.map.signals.state(crossing.signal_group, 0) != GREEN:
        arc = float(place.rng.uniform(max(before - 8.0, 0.0), before))
    else:
        arc = float(place.rng.uniform(0.0, before))
    # Everybody keeps to the right.
    lateral = -0.4 - 0.75 * (track % 2)
    yields = bool(free and place.rng.uniform() < 0.85)
    place.add(Agent(path, arc, pace, pace, PEDESTRIAN, 0.6, 0.6, lateral, stops=(stop,), yields_to_cars=yields))


def jaywalker(place: Placement) -> None:
    """Someone who crosses the ego's road anywhere, most after a gap."""
    arc = place.ego.handover_m + float(place.rng.uniform(20.0, 90.0))
    across_route(place, arc, float(place.rng.uniform(0.5, 7.0)), yields=bool(place.rng.uniform() < 0.75))


def across_route(place: Placement, arc_m: float, after_s: float, *, yields: bool) -> bool:
    """Someone who steps off the right or left kerb at an arc length of the route, `after_s` from grid index 0."""
    x, y, yaw = at_arc(place.ego.path.points, arc_m)
    left = np.array([-math.sin(yaw), math.cos(yaw)])
    right_m, left_m = _kerbs(place, np.array([x, y]), left)
    if right_m + left_m > WIDEST_ROAD_M:
        return False
    line = np.array([x, y]) + np.array([[-right_m], [left_m]]) * left
    way = shapely.LineString(line)
    if any(agent.desired_speed_mps == 0.0 and place.blocks(agent, way) for agent in place.agents):
        return False
    if place.rng.uniform() < 0.4:
        line = line[::-1]
    pace = float(place.rng.uniform(1.1, 2.2))
    path, kerb = _way_across(line, max(pace * after_s, 0.0), outward=np.array([math.cos(yaw), math.sin(yaw)]))
    stop = Stop(kerb, -1, (float(x), float(y)))
    arc = max(kerb - 0.3 - pace * after_s, 0.0)
    stops = (stop,) if yields else ()
    person = Agent(path, arc, pace, pace, PEDESTRIAN, 0.6, 0.6, stops=stops, yields_to_cars=yields)
    if not place.add(person):
        return False
    place.ways_across.append(way)
    return True


def _kerbs(place: Placement, point: Float, left: Float) -> tuple[float, float]:
    """Distances from a point of the road to the kerbs on its right and left."""
    reach = []
    for side in (-1.0, 1.0):
        away = 1.0
        while away < 25.0 and place.surface.contains(shapely.Point(point + side * away * left)):
            away += 0.5
        reach.append(away)
    return reach[0], reach[1]


def _outward(crossing: Crossing) -> Float:
    """The way along the crossed road, away from a junction."""
    across = crossing.line[1] - crossing.line[0]
    return np.array([across[1], -across[0]]) / np.hypot(*across)


def _way_across(line: Float, along_m: float, outward: Float) -> tuple[Float, float]:
    """A path [P,2] along the sidewalk for some metres, over the road and away; and the arc length of its kerb."""
    across = (line[1] - line[0]) / np.hypot(*(line[1] - line[0]))
    near, far = line[0] - WALKWAY_M * across, line[1] + WALKWAY_M * across
    corners = np.stack([near + (along_m + 1.0) * outward, near, far, far + 30.0 * outward])
    arcs = arc_lengths(corners)
    samples = np.unique(np.concatenate([np.arange(0.0, arcs[-1], 1.0), arcs]))
    samples = samples[np.concatenate([[True], np.diff(samples) > 0.05])]
    points = np.stack([np.interp(samples, arcs, corners[:, k]) for k in range(2)], axis=1)
    return points, float(arcs[1] + WALKWAY_M)
