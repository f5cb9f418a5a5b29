"""Vehicles in the ego's way: parked, standing, slow, in a queue; and those that make trouble on purpose."""

from __future__ import annotations

import math
from dataclasses import replace

from alpagym_runtime.simulators.embedded.maps.lines import blend, offset, with_yaw
from alpagym_runtime.simulators.embedded.maps.paths import Path
from alpagym_runtime.simulators.embedded.people import across_route
from alpagym_runtime.simulators.embedded.placement import CAR, GAP_M, Placement


def park(place: Placement) -> None:
    """Cars on the parking strips, some of them into the lane."""
    lane = place.map.lanes[place.ego.path.lanes[0]]
    line = with_yaw(lane.centre)
    share = float(place.rng.uniform(0.45, 0.9))
    for left in (-lane.width_m / 2.0 - 1.15, 1.5 * lane.width_m + 1.15):
        arc = place.ego.start_m - 25.0 + float(place.rng.uniform(0.0, 8.0))
        while arc < place.ego.handover_m + 120.0:
            length, width = float(place.rng.uniform(4.0, 5.0)), float(place.rng.uniform(1.7, 1.95))
            inward = float(place.rng.uniform(0.4, 1.7)) if place.rng.uniform() < 0.18 else 0.0
            where = left - math.copysign(inward, left) + float(place.rng.uniform(-0.1, 0.1))
            if place.rng.uniform() < share:
                strip = offset(line, where)[:, :2]
                place.stand(strip if left < 0.0 else strip[::-1], arc, length, width, backwards=left > 0.0)
            arc += length + float(place.rng.uniform(0.9, 2.5))


def standing_car(place: Placement) -> None:
    """A car that stands at the right edge of the ego's lane."""
    path = place.ego.path
    arc = place.ego.handover_m + float(place.rng.uniform(30.0, 80.0))
    aside = offset(with_yaw(path.points), -float(place.rng.uniform(0.9, 1.15)))[:, :2]
    place.stand(aside, arc, float(place.rng.uniform(4.0, 4.8)), float(place.rng.uniform(1.7, 1.85)))


def slow_leader(place: Placement) -> None:
    """A vehicle in front of the ego that is much slower."""
    kind, length, width = place.size()
    pace = place.ego.speed_mps * float(place.rng.uniform(0.3, 0.65))
    at = place.ego.start_m + 16.0 + 1.2 * place.ego.speed_mps + float(place.rng.uniform(0.0, 25.0))
    speed = min(pace, place.start_speed(place.ego.path, at + length / 2.0))
    leader = place.on_path(place.ego.path, at, speed, pace, kind, length, width)
    if place.fits_ego(leader):
        place.add(replace(leader, lanes_left=0, lanes_right=0))


def queue(place: Placement) -> None:
    """A slow queue on every lane of the ego's direction; its heads set the pace."""
    own = place.ego.path.lanes[0]
    lanes = [own]
    for side in ("left", "right"):
        there = getattr(place.map.lanes[own], side)
        while there >= 0:
            lanes.append(there)
            there = getattr(place.map.lanes[there], side)
    for lane in lanes:
        at = place.ego.handover_m + float(place.rng.uniform(35.0, 80.0))
        pace = float(place.rng.uniform(0.5, 4.5))
        leader: tuple[float, float] | None = None
        while at > place.ego.start_m - 45.0:
            agent = place.vehicle(lane, at, leader)
            path = place.path(lane, 0.0)
            speed = min(agent.start_speed_mps, pace * float(place.rng.uniform(0.3, 1.4)))
            desired = pace if leader is None else agent.desired_speed_mps
            slow = place.on_path(path, at, speed, desired, agent.kind, agent.length_m, agent.width_m)
            rear = at - agent.length_m / 2.0
            if place.add(slow, 0.8):
                leader = rear, speed
            at = rear - GAP_M - float(place.rng.uniform(1.5, 7.0)) - 2.2


def make_trouble(place: Placement) -> None:
    """One road user that the ego will have to answer: it cuts in, brakes in front, or steps onto the road."""
    left, right = place.ego.path.lanes_left, place.ego.path.lanes_right
    choices = [late_person, sudden_stop]
    if left + right:
        choices += [cut_in] * 3
    if place.kind in ("merge", "lane_drop", "multilane", "stop_and_go"):
        choices.remove(late_person)
    for k in place.rng.permutation(len(choices)):
        if choices[int(k)](place):
            return


def late_person(place: Placement) -> bool:
    """Someone steps off the kerb one or two seconds before the ego is there."""
    ego = place.ego
    arc = ego.handover_m + float(place.rng.uniform(14.0, 20.0 + 3.0 * ego.speed_mps))
    arrival_s = (arc - ego.start_m) / ego.speed_mps
    return across_route(place, arc, max(arrival_s - float(place.rng.uniform(1.2, 2.6)), 0.3), yields=False)


def sudden_stop(place: Placement) -> bool:
    """A car in front that runs into standing or crawling traffic."""
    ego = place.ego
    gap = 9.0 + 0.9 * ego.speed_mps + float(place.rng.uniform(0.0, 6.0))
    leader_m = ego.start_m + gap + 6.0
    clear = leader_m + 8.0 + ego.speed_mps**2 / (2.0 * 3.5) + ego.speed_mps * float(place.rng.uniform(1.0, 3.0))
    if place.rng.uniform() < 0.5:
        added = place.stand(ego.path.points, clear, 4.6, 1.85)
    else:
        pace = float(place.rng.uniform(0.7, 2.5))
        added = place.add(place.on_path(ego.path, clear, pace, pace, CAR, 4.6, 1.85))
    speed = min(ego.speed_mps, place.start_speed(ego.path, leader_m + 2.3))
    leader = place.on_path(ego.path, leader_m, speed, ego.speed_mps * 1.1, CAR, 4.6, 1.85)
    return place.add(leader, 0.5) or added


def cut_in(place: Placement) -> bool:
    """A slower car beside the ego that changes into its lane, ahead of it."""
    ego = place.ego
    sides = [1.0] * (ego.path.lanes_left > 0) + [-1.0] * (ego.path.lanes_right > 0)
    side = sides[int(place.rng.integers(len(sides)))]
    pace = ego.speed_mps * float(place.rng.uniform(0.6, 0.9))
    start = ego.start_m + float(place.rng.uniform(8.0, 16.0)) + 1.6 * (ego.speed_mps - pace)
    begin = start + pace * float(place.rng.uniform(1.2, 3.0))
    lasts = max(pace * float(place.rng.uniform(1.8, 3.0)), 12.0)
    arcs = ego.path.arcs
    width = place.map.lanes[ego.path.lanes[0]].width_m
    line = offset(with_yaw(ego.path.points), side * width * (1.0 - blend((arcs - begin) / lasts)))
    # Its arc lengths differ from the ego's by less than a metre.
    path = Path(line[:, :2], ego.path.lanes, ego.path.stops, 0, 0)
    added = place.add(place.on_path(path, start, pace, pace, CAR, 4.5, 1.85), 0.3)
    # Nobody else is where it will come in.
    place.keep_free(ego.path.points, start - 10.0, start + 16.0)
    return added
