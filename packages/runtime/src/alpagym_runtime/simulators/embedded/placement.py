"""Places road users around an ego: nobody overlaps anybody, and nobody begins too fast for what lies ahead."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import shapely
from numpy.typing import NDArray

from alpagym_runtime.geometry import boxes_overlap
from alpagym_runtime.simulators.embedded.lane_map import GREEN, MERGE, ZEBRA, Agent
from alpagym_runtime.simulators.embedded.maps import RoadPlan
from alpagym_runtime.simulators.embedded.maps.lines import arc_lengths, at_arc
from alpagym_runtime.simulators.embedded.maps.paths import Path, onward, path_over, start_box
from alpagym_runtime.simulators.embedded.scene import KINDS
from alpagym_runtime.simulators.embedded.start_speeds import meet_at_merge

Float = NDArray[np.float64]

CAR, TRUCK, BUS = KINDS.index("car"), KINDS.index("truck"), KINDS.index("bus")
BICYCLE, PEDESTRIAN = KINDS.index("bicycle"), KINDS.index("pedestrian")

SCENE_S = 15.0
"""Paths are long enough for so long at the desired speed."""

REACH_M = 150.0
"""How far from the ego traffic is placed."""

EMPTY_SHARE = 0.15
"""Share of lanes without traffic."""

LONGEST_M = 12.0
"""Length of the longest vehicle."""

BRAKE_MPS2 = 2.0
EGO_BRAKE_MPS2 = 3.5
GAP_M = 2.5
ON_ROUTE_M = 1.8


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


class Placement:
    """The road users of one situation so far, and ways to add some.

    Attributes:
        kind: of the map.
        plan, map: where they are.
        ego: where the ego is.
        rng: the stream of the traffic.
        agents: what has been placed.
        ways_across: where people will cross; nobody stands there.

    """

    def __init__(self, kind: str, plan: RoadPlan, ego: EgoStart, rng: np.random.Generator) -> None:
        self.kind = kind
        self.plan = plan
        self.map = plan.lane_map
        self.ego = ego
        self.rng = rng
        self.agents: list[Agent] = []
        self._boxes = ego.room
        self._paths: dict[tuple[int, ...], Path] = {}
        self.ways_across: list[shapely.LineString] = []

    def add(self, agent: Agent, margin_m: float = 0.3) -> bool:
        """Add an agent unless it would be too near to another one or to the ego; whether it was added."""
        box = start_box(agent)
        grown = box + np.array([0.0, 0.0, 0.0, 2.0 * margin_m, 2.0 * min(margin_m, 0.3)])
        away = self._boxes[:, :2] - box[:2]
        near = np.hypot(away[:, 0], away[:, 1]) < (grown[3] + self._boxes[:, 3]) / 2.0 + 3.0
        if near.any() and boxes_overlap(grown, self._boxes[near]).any():
            return False
        if any(meet_at_merge(agent, other) for other in self.agents):
            return False
        self.agents.append(agent)
        self._boxes = np.concatenate([self._boxes, box[None]])
        return True

    def vehicles(self, spacing_m: float, reach_m: float) -> None:
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
                agent = self.vehicle(lane.lane_id, at, leader)
                rear = at - agent.length_m / 2.0
                if self.fits_ego(agent) and self.add(agent, 1.5):
                    leader = rear, agent.start_speed_mps
                at = rear - GAP_M - 3.0 - float(self.rng.exponential(max(spacing_m - 9.0, 2.0)))

    def path(self, lane: int, length_m: float) -> Path:
        """Along a lane and on, at random."""
        lanes = onward(self.map, lane, length_m, self.rng)
        if lanes not in self._paths:
            self._paths[lanes] = path_over(self.map, lanes, self.plan.zebras)
        return self._paths[lanes]

    def size(self) -> tuple[int, float, float]:
        """A random vehicle: kind, length m, width m."""
        kind = int(self.rng.choice([CAR, TRUCK, BUS], p=[0.88, 0.09, 0.03]))
        length = {CAR: (4.0, 5.2), TRUCK: (6.5, 9.0), BUS: (10.5, LONGEST_M)}[kind]
        width = {CAR: (1.7, 2.0), TRUCK: (2.2, 2.45), BUS: (2.45, 2.55)}[kind]
        return kind, float(self.rng.uniform(*length)), float(self.rng.uniform(*width))

    def vehicle(self, lane: int, arc_m: float, leader: tuple[float, float] | None) -> Agent:
        """A vehicle on a lane, behind a leader's rear (arc length, speed) or nobody."""
        kind, length, width = self.size()
        limit = self.map.lanes[lane].speed_limit_mps
        desired = limit * float(self.rng.uniform(0.75, 1.05)) * (1.0 if kind == CAR else 0.85)
        path = self.path(lane, arc_m + SCENE_S * desired + 20.0)
        speed = min(desired * float(self.rng.uniform(0.8, 1.0)), self.start_speed(path, arc_m + length / 2.0))
        if leader is not None:
            gap = max(leader[0] - arc_m - length / 2.0 - GAP_M, 0.0)
            speed = min(speed, math.sqrt(leader[1] ** 2 + 2.0 * BRAKE_MPS2 * gap))
        return self.on_path(path, arc_m, speed, desired, kind, length, width, float(self.rng.uniform(-0.2, 0.2)))

    def start_speed(self, path: Path, front_m: float) -> float:
        """What a vehicle whose front is at an arc length may drive, for bends and for where it may have to stop."""
        speed = path.speed_for_bends(front_m)
        for stop in path.stops:
            ahead = stop.arc_m - front_m
            if ahead < -1.0 or stop.signal_group in (ZEBRA, MERGE):
                continue
            waits = not math.isnan(stop.conflict[0])
            if stop.signal_group >= 0:
                arrival_us = round(1e6 * ahead / max(speed, 3.0))
                waits |= self.map.signals.state(stop.signal_group, min(arrival_us, 3_000_000)) != GREEN
            if waits:
                speed = min(speed, math.sqrt(2.0 * BRAKE_MPS2 * max(ahead - 1.0, 0.0)))
        return speed

    def on_path(
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
        """An agent whose centre is at an arc length of a path; the path is cut to what it may need.

        Args:
            path: from its lanes come its stops and the lanes that it may change to.
            arc_m: where its centre is.
            speed: m/s, at the start.
            desired: m/s.
            kind: index into `scene.KINDS`.
            length: m.
            width: m.
            lateral: m to the left of the path.

        """
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
            lane_width_m=self.map.lanes[path.lanes[0]].width_m,
            stops=stops,
        )

    def fits_ego(self, agent: Agent) -> bool:
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
        return gap > 3.0 + max(ego * ego - other * other, 0.0) / (2.0 * EGO_BRAKE_MPS2)

    def stand(self, points: Float, arc_m: float, length: float, width: float, *, backwards: bool = False) -> bool:
        """A vehicle that stays where it is, at an arc length from a line's start (or end)."""
        arcs = arc_lengths(points)
        at = arcs[-1] - arc_m if backwards else arc_m
        near = (arcs > at - 5.0) & (arcs < at + 5.0)
        agent = Agent(points[near].copy(), float(at - arcs[near][0]), 0.0, 0.0, CAR, length, width)
        return not any(self.blocks(agent, way) for way in self.ways_across) and self.add(agent, 0.25)

    def blocks(self, agent: Agent, way: shapely.LineString) -> bool:
        """Whether a standing vehicle stands in somebody's way."""
        x, y, _, length, width = start_box(agent)
        return bool(way.distance(shapely.Point(x, y)) < math.hypot(length, width) / 2.0 + 0.4)

    def cyclist(self) -> None:
        """Someone on a bicycle at the right edge of an outer lane."""
        outer = [lane for lane in self.map.lanes if lane.kind == "driving" and lane.right < 0 and len(lane.centre) > 30]
        if not outer:
            return
        lane = outer[int(self.rng.integers(len(outer)))]
        arcs = arc_lengths(lane.centre)
        arc = float(self.rng.uniform(5.0, arcs[-1] - 20.0))
        desired = float(self.rng.uniform(3.5, 6.0))
        path = self.path(lane.lane_id, arc + SCENE_S * desired + 20.0)
        speed = min(desired, self.start_speed(path, arc + 1.0))
        lateral = -(lane.width_m / 2.0 - 0.6)
        agent = self.on_path(path, arc, speed, desired, BICYCLE, 1.8, 0.6, lateral)
        if np.hypot(*(start_box(agent)[:2] - self.ego.place[:2])) < REACH_M and self.fits_ego(agent):
            self.add(agent, 0.8)

    def keep_free(self, points: Float, begin_m: float, end_m: float) -> None:
        """Nobody starts on a line between two arc lengths from now on."""
        poses = at_arc(points, np.arange(begin_m, end_m, 3.0))
        boxes = np.column_stack([poses, np.full(len(poses), 4.0), np.full(len(poses), 2.6)])
        self._boxes = np.concatenate([self._boxes, boxes])

    def keep_nearest(self, count: int) -> None:
        """Without moving road users beyond the `count` nearest to the ego's handover."""
        moving = [k for k, agent in enumerate(self.agents) if agent.desired_speed_mps > 0.0]
        away = [float(np.hypot(*(start_box(self.agents[k])[:2] - self.ego.place[:2]))) for k in moving]
        dropped = {moving[k] for k in np.argsort(away, kind="stable")[count:]}
        self.agents = [agent for k, agent in enumerate(self.agents) if k not in dropped]

    def moving(self) -> int:
        """How many road users are not parked."""
        return sum(agent.desired_speed_mps > 0.0 for agent in self.agents)

    @cached_property
    def surface(self) -> shapely.Geometry:
        """Where vehicles may be, as one prepared shape."""
        shape = shapely.union_all([shapely.Polygon(polygon) for polygon in self.map.surface])
        shapely.prepare(shape)
        return shape
