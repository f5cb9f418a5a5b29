"""Fills a map with road users around an ego: vehicles, people, cyclists, parked cars, and trouble on request.

Nobody overlaps anybody at the start, the ego has room, and a vehicle begins slowly enough for what lies ahead of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import shapely
from numpy.typing import NDArray

from alpagym_runtime.geometry import boxes_overlap
from alpagym_runtime.simulators.embedded.lane_map import GREEN, Agent, Stop
from alpagym_runtime.simulators.embedded.maps import Crossing, RoadPlan
from alpagym_runtime.simulators.embedded.maps.lines import arc_lengths, at_arc, blend, offset, with_yaw
from alpagym_runtime.simulators.embedded.maps.paths import Path, onward, path_over, start_box
from alpagym_runtime.simulators.embedded.scene import KINDS

Float = NDArray[np.float64]

CAR, TRUCK, BUS = KINDS.index("car"), KINDS.index("truck"), KINDS.index("bus")
BICYCLE, PEDESTRIAN = KINDS.index("bicycle"), KINDS.index("pedestrian")

SCENE_S = 15.0
"""Paths are long enough for so long at the desired speed."""

REACH_M = 150.0
"""How far from the ego traffic is placed."""

EMPTY_SHARE = 0.15
"""Share of lanes without traffic."""

MOST_MOVING = 40

LONGEST_M = 12.0
"""Length of the longest vehicle."""

SLOW_LEADER_SHARE = {
    "multilane": 0.45,
    "curve": 0.25,
    "crosswalk": 0.2,
    "lane_drop": 0.2,
    "parked_street": 0.25,
    "priority_crossing": 0.25,
}

BRAKE_MPS2 = 2.0
GAP_M = 2.5
WIDEST_ROAD_M = 18.0
"""Nobody crosses more than this without a crossing; a junction's middle is wider."""

ON_ROUTE_M = 1.8
WALKWAY_M = 1.4


@dataclass(frozen=True)
class EgoStart:
    """The ego's path, and arc lengths of its start and handover on it, at constant speed in between."""

    path: Path
    start_m: float
    handover_m: float
    speed_mps: float

    @cached_property
    def room(self) -> Float:
        """[M,5] boxes on its path that stay free: some metres behind, and what it needs ahead."""
        behind, ahead = 9.0 + 0.5 * self.speed_mps, 11.0 + 0.5 * self.speed_mps
        arcs = np.arange(self.start_m - behind, self.start_m + ahead, 3.0)
        poses = at_arc(self.path.points, arcs)
        return np.column_stack([poses, np.full(len(arcs), 4.0), np.full(len(arcs), 2.6)])

    @cached_property
    def place(self) -> Float:
        """[3] x, y, yaw at the handover."""
        return at_arc(self.path.points, self.handover_m)


class Population:
    """Road users of one situation; `fill` and its like add to `agents`."""

    def __init__(self, kind: str, plan: RoadPlan, ego: EgoStart, rng: np.random.Generator) -> None:
        self.kind = kind
        self.plan = plan
        self.map = plan.lane_map
        self.ego = ego
        self.rng = rng
        self.agents: list[Agent] = []
        self._boxes = ego.room
        self._paths: dict[tuple[int, ...], Path] = {}
        self._ways_across: list[shapely.LineString] = []

    def add(self, agent: Agent, margin_m: float = 0.3) -> bool:
        """Add an agent unless it would be too near to another one or to the ego; whether it was added."""
        box = start_box(agent)
        grown = box + np.array([0.0, 0.0, 0.0, 2.0 * margin_m, 2.0 * min(margin_m, 0.3)])
        away = self._boxes[:, :2] - box[:2]
        near = np.hypot(away[:, 0], away[:, 1]) < (grown[3] + self._boxes[:, 3]) / 2.0 + 3.0
        if near.any() and boxes_overlap(grown, self._boxes[near]).any():
            return False
        self.agents.append(agent)
        self._boxes = np.concatenate([self._boxes, box[None]])
        return True

    # ------------------------------------------------------------ everyday traffic

    def fill(self, spacing_m: float) -> None:
        """Traffic as usual for the kind of map."""
        if self.kind == "parked_street":
            self._park()
        if self.kind == "stop_and_go":
            self._queue()
        if self.kind == "curve" and self.rng.uniform() < 0.3:
            self._standing_car()
        if self.rng.uniform() < SLOW_LEADER_SHARE.get(self.kind, 0.0):
            self._slow_leader()
        for crossing in self.plan.crossings:
            for place in self.rng.permutation(4)[: self.rng.integers(0, 4)]:
                self._crossing_person(crossing, int(place))
        if self.kind in ("curve", "parked_street", "priority_crossing"):
            for _ in range(int(self.rng.integers(0, 3))):
                self._jaywalker()
        self._vehicles(spacing_m * float(self.rng.uniform(0.7, 1.6)), REACH_M)
        if self.kind not in ("merge", "lane_drop", "multilane", "stop_and_go"):
            for _ in range(int(self.rng.integers(0, 3))):
                self._cyclist()
        for _ in range(int(self.rng.integers(2, 7))):
            self._walker()
        self._keep_nearest(MOST_MOVING)

    def fill_up_to(self, count: int) -> None:
        """Exactly `count` moving road users: more vehicles, or without those farthest from the ego."""
        spacing = 20.0
        while self._moving() < count and spacing > 4.0:
            self._vehicles(spacing, 320.0)
            spacing *= 0.7
        for _ in range(200):
            if self._moving() >= count:
                break
            self._walker()
        self._keep_nearest(count)

    def _keep_nearest(self, count: int) -> None:
        """Without moving road users beyond the `count` nearest to the ego's handover."""
        moving = [k for k, agent in enumerate(self.agents) if agent.desired_speed_mps > 0.0]
        away = [float(np.hypot(*(start_box(self.agents[k])[:2] - self.ego.place[:2]))) for k in moving]
        dropped = {moving[k] for k in np.argsort(away, kind="stable")[count:]}
        self.agents = [agent for k, agent in enumerate(self.agents) if k not in dropped]

    def _moving(self) -> int:
        return sum(agent.desired_speed_mps > 0.0 for agent in self.agents)

    def _vehicles(self, spacing_m: float, reach_m: float) -> None:
        """Vehicles on all lanes within reach, each lane from its end backwards."""
        continued = {successor for lane in self.map.lanes for successor in lane.successors}
        for lane in self.map.lanes:
            if lane.kind != "driving" or self.rng.uniform() < EMPTY_SHARE:
                continue
            arcs = arc_lengths(lane.centre)
            away = np.hypot(*(lane.centre - self.ego.place[:2]).T)
            near = arcs[away < reach_m]
            if not len(near):
                continue
            # Behind the stop line or the map's end, but anywhere on the short lanes of a roundabout.
            from_end = min(LONGEST_M / 2.0 + 1.0, 0.2 * float(arcs[-1]))
            at = min(float(near[-1]), float(arcs[-1]) - from_end) - float(self.rng.uniform(0.0, spacing_m))
            first = max(float(near[0]), 0.0 if lane.lane_id in continued else LONGEST_M / 2.0 + 1.0)
            leader: tuple[float, float] | None = None
            while at > first:
                agent = self._vehicle(lane.lane_id, at, leader)
                rear = at - agent.length_m / 2.0
                if self._fits_ego(agent) and self.add(agent, 1.5):
                    leader = rear, agent.start_speed_mps
                at = rear - GAP_M - 3.0 - float(self.rng.exponential(max(spacing_m - 9.0, 2.0)))

    def _path(self, lane: int, length_m: float) -> Path:
        """Along a lane and on, at random."""
        lanes = onward(self.map, lane, length_m, self.rng)
        if lanes not in self._paths:
            self._paths[lanes] = path_over(self.map, lanes)
        return self._paths[lanes]

    def _size(self) -> tuple[int, float, float]:
        kind = int(self.rng.choice([CAR, TRUCK, BUS], p=[0.88, 0.09, 0.03]))
        length = {CAR: (4.0, 5.2), TRUCK: (6.5, 9.0), BUS: (10.5, LONGEST_M)}[kind]
        width = {CAR: (1.7, 2.0), TRUCK: (2.2, 2.45), BUS: (2.45, 2.55)}[kind]
        return kind, float(self.rng.uniform(*length)), float(self.rng.uniform(*width))

    def _vehicle(self, lane: int, arc_m: float, leader: tuple[float, float] | None) -> Agent:
        """A vehicle on a lane, behind a leader's rear (arc length, speed) or nobody."""
        kind, length, width = self._size()
        limit = self.map.lanes[lane].speed_limit_mps
        desired = limit * float(self.rng.uniform(0.75, 1.05)) * (1.0 if kind == CAR else 0.85)
        path = self._path(lane, arc_m + SCENE_S * desired + 20.0)
        speed = min(desired * float(self.rng.uniform(0.8, 1.0)), self._start_speed(path, arc_m + length / 2.0))
        if leader is not None:
            gap = max(leader[0] - arc_m - length / 2.0 - GAP_M, 0.0)
            speed = min(speed, math.sqrt(leader[1] ** 2 + 2.0 * BRAKE_MPS2 * gap))
        return self._on_path(path, arc_m, speed, desired, kind, length, width, float(self.rng.uniform(-0.2, 0.2)))

    def _start_speed(self, path: Path, front_m: float) -> float:
        """What a vehicle whose front is at an arc length may drive, for bends and for where it may have to stop."""
        speed = path.speed_for_bends(front_m)
        for stop in path.stops:
            ahead = stop.arc_m - front_m
            if ahead < -1.0:
                continue
            waits = not math.isnan(stop.conflict[0])
            if stop.signal_group >= 0:
                arrival_us = round(1e6 * ahead / max(speed, 3.0))
                waits |= self.map.signals.state(stop.signal_group, min(arrival_us, 3_000_000)) != GREEN
            if waits:
                speed = min(speed, math.sqrt(2.0 * BRAKE_MPS2 * max(ahead - 1.0, 0.0)))
        return speed

    def _on_path(
        self,
        path: Path,
        arc_m: float,
        speed: float,
        desired: float,
        kind: int,
        length: float,
        width: float,
        lateral: float = 0.0,
    ) -> Agent:
        points, stops, shift = path.cut(arc_m - 12.0, arc_m + SCENE_S * max(desired, speed) + 20.0)
        return Agent(
            path=points,
            start_arc_m=arc_m - shift,
            start_speed_mps=speed,
            desired_speed_mps=desired,
            kind=kind,
            length_m=length,
            width_m=width,
            lateral_m=lateral,
            lanes_left=path.lanes_left,
            lanes_right=path.lanes_right,
            stops=stops,
        )

    def _fits_ego(self, agent: Agent) -> bool:
        """Whether the ego could brake for an agent ahead on its route at 3.5 m/s2 after the handover."""
        box = start_box(agent)
        arcs = self.ego.path.arcs
        distance = np.hypot(*(self.ego.path.points - box[:2]).T)
        nearest = int(np.argmin(distance))
        ahead = float(arcs[nearest]) - self.ego.start_m
        if distance[nearest] > ON_ROUTE_M or ahead < 0.0:
            return True
        ego, other = self.ego.speed_mps, agent.start_speed_mps
        gap = ahead - 3.4 - agent.length_m / 2.0 - (self.ego.handover_m - self.ego.start_m)
        gap += other * (self.ego.handover_m - self.ego.start_m) / ego
        return gap > 3.0 + max(ego * ego - other * other, 0.0) / (2.0 * 3.5)

    def _cyclist(self) -> None:
        """Someone on a bicycle at the right edge of an outer lane."""
        outer = [lane for lane in self.map.lanes if lane.kind == "driving" and lane.right < 0 and len(lane.centre) > 30]
        lane = outer[int(self.rng.integers(len(outer)))]
        arcs = arc_lengths(lane.centre)
        arc = float(self.rng.uniform(5.0, arcs[-1] - 20.0))
        desired = float(self.rng.uniform(3.5, 6.0))
        path = self._path(lane.lane_id, arc + SCENE_S * desired + 20.0)
        speed = min(desired, self._start_speed(path, arc + 1.0))
        lateral = -(lane.width_m / 2.0 - 0.6)
        agent = self._on_path(path, arc, speed, desired, BICYCLE, 1.8, 0.6, lateral)
        if np.hypot(*(start_box(agent)[:2] - self.ego.place[:2])) < REACH_M and self._fits_ego(agent):
            self.add(agent, 0.8)

    # ------------------------------------------------------------ people

    def _walker(self) -> None:
        """Someone on a sidewalk, near the ego if there is one there."""
        ways = [lane.centre for lane in self.map.lanes if lane.kind == "walkway"]
        if not ways:
            return
        points = ways[int(self.rng.integers(len(ways)))]
        if self.rng.uniform() < 0.5:
            points = points[::-1]
        arcs = arc_lengths(points)
        away = np.hypot(*(points - self.ego.place[:2]).T)
        near = arcs[(away < 110.0) & (arcs < arcs[-1] - 45.0)]
        if not len(near):
            return
        pace, arc = float(self.rng.uniform(0.9, 1.7)), float(self.rng.choice(near))
        keep = (arcs > arc - 5.0) & (arcs < arc + 1.7 * SCENE_S + 10.0)
        shift = float(arcs[keep][0])
        lateral = -float(self.rng.uniform(0.1, 0.8))
        self.add(Agent(points[keep].copy(), arc - shift, pace, pace, PEDESTRIAN, 0.6, 0.6, lateral))

    def _crossing_person(self, crossing: Crossing, place: int) -> None:
        """Someone on the way to a crossing or waiting at it; `place` 0 to 3 is a direction and a track of their own."""
        line = crossing.line if place < 2 else crossing.line[::-1]
        pace = float(self.rng.uniform(0.9, 1.9))
        path, kerb = _way_across(line, float(self.rng.uniform(0.0, 9.0)), outward=_outward(crossing))
        free = crossing.signal_group < 0
        middle = line.mean(axis=0)
        stop = Stop(kerb, crossing.signal_group, (float(middle[0]), float(middle[1])) if free else (math.nan, math.nan))
        before = kerb - 0.3
        if crossing.signal_group >= 0 and self.map.signals.state(crossing.signal_group, 0) != GREEN:
            arc = float(self.rng.uniform(max(before - 8.0, 0.0), before))
        else:
            arc = float(self.rng.uniform(0.0, before))
        # Everybody keeps to the right.
        lateral = -0.4 - 0.75 * (place % 2)
        yields = bool(free and self.rng.uniform() < 0.85)
        self.add(Agent(path, arc, pace, pace, PEDESTRIAN, 0.6, 0.6, lateral, stops=(stop,), yields_to_cars=yields))

    def _jaywalker(self) -> None:
        """Someone who crosses the ego's road anywhere, most after a gap."""
        arc = self.ego.handover_m + float(self.rng.uniform(20.0, 90.0))
        self._across_route(arc, float(self.rng.uniform(0.5, 7.0)), yields=bool(self.rng.uniform() < 0.75))

    def _across_route(self, arc_m: float, after_s: float, *, yields: bool) -> bool:
        """Someone who steps off the right or left kerb at an arc length of the route, `after_s` from grid index 0."""
        x, y, yaw = at_arc(self.ego.path.points, arc_m)
        left = np.array([-math.sin(yaw), math.cos(yaw)])
        right_m, left_m = self._kerbs(np.array([x, y]), left)
        if right_m + left_m > WIDEST_ROAD_M:
            return False
        line = np.array([x, y]) + np.array([[-right_m], [left_m]]) * left
        way = shapely.LineString(line)
        if any(agent.desired_speed_mps == 0.0 and self._blocks(agent, way) for agent in self.agents):
            return False
        if self.rng.uniform() < 0.4:
            line = line[::-1]
        pace = float(self.rng.uniform(1.1, 2.2))
        path, kerb = _way_across(line, max(pace * after_s, 0.0), outward=np.array([math.cos(yaw), math.sin(yaw)]))
        stop = Stop(kerb, -1, (float(x), float(y)))
        arc = max(kerb - 0.3 - pace * after_s, 0.0)
        stops = (stop,) if yields else ()
        person = Agent(path, arc, pace, pace, PEDESTRIAN, 0.6, 0.6, stops=stops, yields_to_cars=yields)
        if not self.add(person):
            return False
        self._ways_across.append(way)
        return True

    def _blocks(self, agent: Agent, way: shapely.LineString) -> bool:
        """Whether a standing vehicle stands in somebody's way."""
        x, y, _, length, width = start_box(agent)
        return bool(way.distance(shapely.Point(x, y)) < math.hypot(length, width) / 2.0 + 0.4)

    def _kerbs(self, point: Float, left: Float) -> tuple[float, float]:
        """Distances from a point of the road to the kerbs on its right and left."""
        surface = self._surface
        reach = []
        for side in (-1.0, 1.0):
            away = 1.0
            while away < 25.0 and surface.contains(shapely.Point(point + side * away * left)):
                away += 0.5
            reach.append(away)
        return reach[0], reach[1]

    @cached_property
    def _surface(self) -> shapely.Geometry:
        shape = shapely.union_all([shapely.Polygon(polygon) for polygon in self.map.surface])
        shapely.prepare(shape)
        return shape

    # ------------------------------------------------------------ standing and slow vehicles

    def _park(self) -> None:
        """Cars on the parking strips, some of them into the lane."""
        lane = self.map.lanes[self.ego.path.lanes[0]]
        line = with_yaw(lane.centre)
        share = float(self.rng.uniform(0.45, 0.9))
        for left in (-lane.width_m / 2.0 - 1.15, 1.5 * lane.width_m + 1.15):
            arc = self.ego.start_m - 25.0 + float(self.rng.uniform(0.0, 8.0))
            while arc < self.ego.handover_m + 120.0:
                length, width = float(self.rng.uniform(4.0, 5.0)), float(self.rng.uniform(1.7, 1.95))
                inward = float(self.rng.uniform(0.4, 1.7)) if self.rng.uniform() < 0.18 else 0.0
                place = left - math.copysign(inward, left) + float(self.rng.uniform(-0.1, 0.1))
                if self.rng.uniform() < share:
                    strip = offset(line, place)[:, :2]
                    self._stand(strip if left < 0.0 else strip[::-1], arc, length, width, backwards=left > 0.0)
                arc += length + float(self.rng.uniform(0.9, 2.5))

    def _stand(self, points: Float, arc_m: float, length: float, width: float, *, backwards: bool = False) -> bool:
        """A vehicle that stays where it is, at an arc length from a line's start (or end)."""
        arcs = arc_lengths(points)
        at = arcs[-1] - arc_m if backwards else arc_m
        near = (arcs > at - 5.0) & (arcs < at + 5.0)
        agent = Agent(points[near].copy(), float(at - arcs[near][0]), 0.0, 0.0, CAR, length, width)
        return not any(self._blocks(agent, way) for way in self._ways_across) and self.add(agent, 0.25)

    def _standing_car(self) -> None:
        """A car that stands at the right edge of the ego's lane."""
        path = self.ego.path
        arc = self.ego.handover_m + float(self.rng.uniform(30.0, 80.0))
        aside = offset(with_yaw(path.points), -float(self.rng.uniform(0.9, 1.15)))[:, :2]
        self._stand(aside, arc, float(self.rng.uniform(4.0, 4.8)), float(self.rng.uniform(1.7, 1.85)))

    def _slow_leader(self) -> None:
        """A vehicle in front of the ego that is much slower."""
        kind, length, width = self._size()
        pace = self.ego.speed_mps * float(self.rng.uniform(0.3, 0.65))
        at = self.ego.start_m + 16.0 + 1.2 * self.ego.speed_mps + float(self.rng.uniform(0.0, 25.0))
        leader = self._on_path(self.ego.path, at, pace, pace, kind, length, width)
        if self._fits_ego(leader):
            self.add(replace(leader, lanes_left=0, lanes_right=0))

    def _queue(self) -> None:
        """A slow queue on every lane of the ego's direction; its heads set the pace."""
        own = self.ego.path.lanes[0]
        lanes = [own]
        for side in ("left", "right"):
            there = getattr(self.map.lanes[own], side)
            while there >= 0:
                lanes.append(there)
                there = getattr(self.map.lanes[there], side)
        for lane in lanes:
            at = self.ego.handover_m + float(self.rng.uniform(35.0, 80.0))
            pace = float(self.rng.uniform(0.5, 4.5))
            leader: tuple[float, float] | None = None
            while at > self.ego.start_m - 45.0:
                agent = self._vehicle(lane, at, leader)
                path = self._path(lane, 0.0)
                speed = min(agent.start_speed_mps, pace * float(self.rng.uniform(0.3, 1.4)))
                desired = pace if leader is None else agent.desired_speed_mps
                slow = self._on_path(path, at, speed, desired, agent.kind, agent.length_m, agent.width_m)
                rear = at - agent.length_m / 2.0
                if self.add(slow, 0.8):
                    leader = rear, speed
                at = rear - GAP_M - float(self.rng.uniform(1.5, 7.0)) - 2.2

    # ------------------------------------------------------------ trouble

    def make_trouble(self) -> None:
        """One road user that the ego will have to answer: it cuts in, brakes in front, or steps onto the road."""
        left, right = self.ego.path.lanes_left, self.ego.path.lanes_right
        choices = [self._late_person, self._sudden_stop]
        if left + right:
            choices += [self._cut_in] * 3
        if self.kind in ("merge", "lane_drop", "multilane", "stop_and_go"):
            choices.remove(self._late_person)
        for k in self.rng.permutation(len(choices)):
            if choices[int(k)]():
                return

    def _late_person(self) -> bool:
        """Someone steps off the kerb one or two seconds before the ego is there."""
        ego = self.ego
        arc = ego.handover_m + float(self.rng.uniform(14.0, 20.0 + 3.0 * ego.speed_mps))
        arrival_s = (arc - ego.start_m) / ego.speed_mps
        return self._across_route(arc, max(arrival_s - float(self.rng.uniform(1.2, 2.6)), 0.3), yields=False)

    def _sudden_stop(self) -> bool:
        """A car in front that runs into standing or crawling traffic."""
        ego = self.ego
        gap = 9.0 + 0.9 * ego.speed_mps + float(self.rng.uniform(0.0, 6.0))
        leader_m = ego.start_m + gap + 6.0
        clear = leader_m + 8.0 + ego.speed_mps**2 / (2.0 * 3.5) + ego.speed_mps * float(self.rng.uniform(1.0, 3.0))
        if self.rng.uniform() < 0.5:
            added = self._stand(ego.path.points, clear, 4.6, 1.85)
        else:
            pace = float(self.rng.uniform(0.7, 2.5))
            added = self.add(self._on_path(ego.path, clear, pace, pace, CAR, 4.6, 1.85))
        leader = self._on_path(ego.path, leader_m, ego.speed_mps, ego.speed_mps * 1.1, CAR, 4.6, 1.85)
        return self.add(leader, 0.5) or added

    def _cut_in(self) -> bool:
        """A slower car beside the ego that changes into its lane, ahead of it."""
        ego = self.ego
        sides = [1.0] * (ego.path.lanes_left > 0) + [-1.0] * (ego.path.lanes_right > 0)
        side = sides[int(self.rng.integers(len(sides)))]
        pace = ego.speed_mps * float(self.rng.uniform(0.6, 0.9))
        start = ego.start_m + float(self.rng.uniform(8.0, 16.0)) + 1.6 * (ego.speed_mps - pace)
        begin = start + pace * float(self.rng.uniform(1.2, 3.0))
        lasts = max(pace * float(self.rng.uniform(1.8, 3.0)), 12.0)
        arcs = ego.path.arcs
        width = self.map.lanes[ego.path.lanes[0]].width_m
        line = offset(with_yaw(ego.path.points), side * width * (1.0 - blend((arcs - begin) / lasts)))
        # Its arc lengths differ from the ego's by less than a metre.
        path = Path(line[:, :2], ego.path.lanes, ego.path.stops, 0, 0)
        return self.add(self._on_path(path, start, pace, pace, CAR, 4.5, 1.85), 0.3)


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
