"""Speeds at which road users may begin: nobody has to brake hard for what is ahead of it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded.lane_map import MERGE, Agent, Stop
from alpagym_runtime.simulators.embedded.maps.lines import arc_lengths, with_yaw
from alpagym_runtime.simulators.embedded.maps.paths import start_box
from alpagym_runtime.simulators.embedded.scene import KINDS

Float = NDArray[np.float64]

Ahead = tuple[int, float, float]
"""Index, free distance m, and cosine of the angle between both."""

PEDESTRIAN = KINDS.index("pedestrian")

BRAKE_MPS2 = 3.0
GAP_M = 1.0
SIDE_M = 0.25
SIGHT_M = 60.0
BETWEEN_M = 2.0
SAME_WAY = 0.5
"""Cosine of the largest angle between two who follow each other; who crosses will have gone."""


def merge_ahead(agent: Agent) -> tuple[Stop, float] | None:
    """Where an agent's lane becomes one with another next, and how far that is."""
    for stop in agent.stops:
        to_go = stop.arc_m - agent.start_arc_m
        if stop.signal_group == MERGE and 0.0 < to_go < SIGHT_M:
            return stop, to_go
    return None


def meet_at_merge(agent: Agent, other: Agent) -> bool:
    """Whether two would come side by side to where their lanes become one."""
    mine, theirs = merge_ahead(agent), merge_ahead(other)
    if mine is None or theirs is None or mine[0].conflict != theirs[0].conflict:
        return False
    return abs(mine[1] - theirs[1]) < (agent.length_m + other.length_m) / 2.0 + BETWEEN_M


def with_room_to_brake(agents: list[Agent]) -> list[Agent]:
    """The agents, slower where they could not brake at 3 m/s² for who is ahead on their path or merges before them."""
    speeds = np.array([agent.start_speed_mps for agent in agents])
    boxes = np.array([start_box(agent) for agent in agents]).reshape(-1, 5)
    # Who walks is no leader: people and cars mind each other when they meet.
    far = np.array([agent.kind == PEDESTRIAN for agent in agents], bool)
    drive = [a for a, agent in enumerate(agents) if agent.start_speed_mps > 0.0 and not far[a]]
    ahead = {a: _in_corridor(agents, boxes, far, a) + _merging_before(agents, a) for a in drive}
    while True:
        before = speeds.copy()
        for a, found in ahead.items():
            for o, gap, same_way in found:
                pace = speeds[o] * same_way
                speeds[a] = min(speeds[a], math.sqrt(pace * pace + 2.0 * BRAKE_MPS2 * max(gap - GAP_M, 0.0)))
        if np.array_equal(before, speeds):
            break
    return [replace(agent, start_speed_mps=float(speed)) for agent, speed in zip(agents, speeds, strict=True)]


def _in_corridor(agents: list[Agent], boxes: Float, far: NDArray[np.bool_], a: int) -> list[Ahead]:
    """Who is ahead of an agent on its path."""
    agent, (x, y, _, length, width) = agents[a], boxes[a]
    near = ~far & (np.abs(boxes[:, 0] - x) < SIGHT_M) & (np.abs(boxes[:, 1] - y) < SIGHT_M)
    near[a] = False
    others = np.flatnonzero(near)
    arcs = arc_lengths(agent.path)
    part = (arcs >= agent.start_arc_m - 3.0) & (arcs <= agent.start_arc_m + SIGHT_M)
    if not len(others) or not part.any():
        return []
    path, arcs, box = with_yaw(agent.path)[part], arcs[part], boxes[others]
    nearest = np.hypot(path[:, 0] - box[:, :1], path[:, 1] - box[:, 1:2]).argmin(axis=1)
    foot = path[nearest]
    cos, sin = np.cos(foot[:, 2]), np.sin(foot[:, 2])
    dx, dy = box[:, 0] - foot[:, 0], box[:, 1] - foot[:, 1]
    lateral = dy * cos - dx * sin - agent.lateral_m
    same_way = np.cos(box[:, 2] - foot[:, 2])
    c, s = np.abs(same_way), np.abs(np.sin(box[:, 2] - foot[:, 2]))
    reach = arcs[nearest] + dx * cos + dy * sin - agent.start_arc_m
    inside = np.abs(lateral) <= (width + box[:, 3] * s + box[:, 4] * c) / 2.0 + SIDE_M
    stands = np.array([agents[o].desired_speed_mps == 0.0 for o in others])
    found = (reach > 0.0) & inside & (stands | (same_way > SAME_WAY))
    gap = reach - (length + box[:, 3] * c + box[:, 4] * s) / 2.0
    return [(int(others[k]), float(gap[k]), float(c[k])) for k in np.flatnonzero(found)]


def _merging_before(agents: list[Agent], a: int) -> list[Ahead]:
    """Who comes before an agent to where their lanes become one."""
    mine, found = merge_ahead(agents[a]), []
    for o, other in enumerate(agents):
        theirs = merge_ahead(other) if mine is not None else None
        if mine is None or theirs is None or theirs[0].conflict != mine[0].conflict or theirs[1] >= mine[1]:
            continue
        found.append((o, mine[1] - theirs[1] - (agents[a].length_m + other.length_m) / 2.0, 1.0))
    return found
