"""Who goes first on an OpenDRIVE map: traffic lights, and who yields without them.

Lights get a fixed plan, two phases a junction by the direction of approach: files say which lights go together
(controllers) but never when. Who yields follows, in this order: separate phases, the junction's priorities, signs at
the approaches, turning after straight on, left after right, right before left.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import shapely

from alpagym_runtime.errors import SceneError
from alpagym_runtime.geometry import wrap_angle
from alpagym_runtime.simulators.embedded.lane_map import Lane, Signals
from alpagym_runtime.simulators.embedded.opendrive_draft import Draft, Key, end_yaw
from alpagym_runtime.simulators.embedded.opendrive_line import poses
from alpagym_runtime.simulators.embedded.opendrive_sheet import offset_points
from alpagym_runtime.simulators.embedded.opendrive_xml import Road, Signal

JUNCTION_LANES_MAX = 500
SIGNAL_REACH_M = 30.0
CYCLE_S, YELLOW_S = 60.0, 3.0
GREEN_S = ((0.0, 25.0), (30.0, 55.0))
PRIORITY_SIGNS = {"301": 1, "306": 1, "205": -1, "206": -1}
"""Signs of the German catalogue, which the format's examples use: goes first, yields."""
PEOPLE_LIGHT = "1000002"


def plan_signals(draft: Draft) -> Signals:
    """A fixed plan of the lights; sets the group of each lane that ends at one."""
    groups: dict[tuple[str, int], int] = {}
    phase_of_controller: dict[str, int] = {}
    first_heading: dict[str, float] = {}
    greens: list[tuple[float, float]] = []
    heads = []
    into: dict[int, list[int]] = {}
    for lane in draft.lanes:
        for successor in lane.successors:
            into.setdefault(successor, []).append(lane.lane_id)
    for road in draft.file.roads.values():
        for signal in road.signals:
            if not signal.dynamic or signal.kind == PEOPLE_LIGHT:
                continue
            governed = _governed(draft, road, signal, into)
            if not governed:
                continue
            heading = end_yaw(draft.lanes[governed[0]])
            place = _junction_after(draft, governed[0])
            first = first_heading.setdefault(place, heading)
            phase = 0 if abs(math.cos(heading - first)) > math.sqrt(0.5) else 1
            controller = draft.file.controllers.get(signal.signal_id)
            if controller is not None:
                phase = phase_of_controller.setdefault(f"{place}/{controller}", phase)
            if (place, phase) not in groups:
                groups[place, phase] = len(greens)
                greens.append(GREEN_S[phase])
            group = groups[place, phase]
            for lane_id in governed:
                if draft.lanes[lane_id].signal_group == -1:
                    draft.lanes[lane_id] = replace(draft.lanes[lane_id], signal_group=group)
            pose = poses(road.pieces, np.array([min(max(signal.s, 0.0), road.length)]))
            heads.append([*offset_points(pose, signal.t)[0], heading, group])
    if not greens:
        return Signals()
    return Signals(CYCLE_S, np.array(greens), YELLOW_S, np.array(heads, np.float64))


def _governed(draft: Draft, road: Road, signal: Signal, into: dict[int, list[int]]) -> list[int]:
    """Lanes whose end a light governs: its own road's before a junction, or those that lead into its road."""
    governed: dict[int, None] = {}
    for lane_id, key in _of_road(draft, road):
        lane = draft.lanes[lane_id]
        forward = draft.forward(key)
        if lane.kind not in ("driving", "turn") or signal.orientation == ("-" if forward else "+"):
            continue
        if signal.lanes and not any(min(a, b) <= key[2] <= max(a, b) for a, b in signal.lanes):
            continue
        if road.junction != "-1":
            if abs(signal.s - (0.0 if forward else road.length)) <= SIGNAL_REACH_M:
                governed.update(dict.fromkeys(into.get(lane_id, ())))
        elif abs(signal.s - (road.length if forward else 0.0)) <= SIGNAL_REACH_M and any(
            draft.junction_of[s] for s in lane.successors
        ):
            governed[lane_id] = None
    return list(governed)


def _of_road(draft: Draft, road: Road) -> list[tuple[int, Key]]:
    """A road's lanes at the end that their traffic leaves (or, in junctions, enters) by."""
    last = len(road.sections) - 1
    found = []
    for index in {0, last}:
        for number in road.sections[index].lanes:
            key = (road.road_id, index, number)
            if key in draft.ids:
                at_end = draft.forward(key) == (road.junction == "-1")
                if index == (last if at_end else 0):
                    found.append((draft.ids[key], key))
    return found


def _junction_after(draft: Draft, lane_id: int) -> str:
    return next((j for s in draft.lanes[lane_id].successors if (j := draft.junction_of[s])), "")


def decide_yields(draft: Draft) -> None:
    """Set for each lane in a junction who goes first.

    Raises:
        SceneError: a junction with more than `JUNCTION_LANES_MAX` lanes.

    """
    members: dict[str, list[int]] = {}
    for lane_id, junction in enumerate(draft.junction_of):
        if junction and draft.lanes[lane_id].kind == "turn":
            members.setdefault(junction, []).append(lane_id)
    before: dict[int, int] = {}
    for lane in draft.lanes:
        for successor in lane.successors:
            before.setdefault(successor, lane.lane_id)
    waits: dict[int, list[int]] = {}
    for junction, ids in members.items():
        if len(ids) > JUNCTION_LANES_MAX:
            raise SceneError(f"junction {junction}: {len(ids)} lanes are more than {JUNCTION_LANES_MAX}")
        lines = [shapely.linestrings(draft.lanes[i].centre) for i in ids]
        first, second = shapely.STRtree(lines).query(lines, predicate="intersects")
        meets = set(zip(first.tolist(), second.tolist(), strict=True))
        ends = np.array([draft.lanes[i].centre[-1] for i in ids])
        close = np.argwhere(np.hypot(*(ends[:, None] - ends[None]).T) < 1.0)
        meets |= {(int(a), int(b)) for a, b in close}
        for a, b in sorted(meets):
            one, other = ids[a], ids[b]
            if a < b and before.get(one) != before.get(other):
                loser = _loser(draft, junction, one, other, before)
                if loser is not None:
                    waits.setdefault(loser, []).append(other if loser == one else one)
    for lane_id, others in waits.items():
        draft.lanes[lane_id] = replace(draft.lanes[lane_id], yields_to=tuple(sorted(others)))


def _loser(draft: Draft, junction: str, one: int, other: int, before: dict[int, int]) -> int | None:
    """Which of two lanes that meet waits; None where lights part them or they stand in one line."""
    approaches = (before.get(one), before.get(other))
    groups = [draft.lanes[a].signal_group if a is not None else -1 for a in approaches]
    if -1 not in groups and groups[0] != groups[1]:
        return None
    found = draft.file.junctions.get(junction)
    for high, low in found.priorities if found is not None else ():
        roads = [
            {draft.keys[i][0]} | ({draft.keys[a][0]} if a is not None else set())
            for i, a in zip((one, other), approaches, strict=True)
        ]
        if high in roads[0] and low in roads[1]:
            return other
        if high in roads[1] and low in roads[0]:
            return one
    ranks = [_rank(draft, a) for a in approaches]
    if ranks[0] != ranks[1]:
        return one if ranks[0] < ranks[1] else other
    turns = [_turn(draft.lanes[i]) for i in (one, other)]
    if abs(abs(turns[0]) - abs(turns[1])) > 0.35:
        return one if abs(turns[0]) > abs(turns[1]) else other
    left_hand = draft.file.roads[draft.keys[one][0]].left_hand
    if abs(turns[0] - turns[1]) > 0.35:
        across = turns if not left_hand else [-turn for turn in turns]
        return one if across[0] > across[1] else other
    # Right before left (left before right on left-hand roads), by where the other comes from.
    bearing = float(wrap_angle(_start_yaw(draft.lanes[other]) - _start_yaw(draft.lanes[one])))
    if abs(bearing) < 0.2:
        return max(one, other)
    comes_from_right = (bearing > 0.0) != left_hand
    return one if comes_from_right else other


def _rank(draft: Draft, approach: int | None) -> int:
    """1 where a priority sign stands at the approach, -1 where it must yield."""
    if approach is None:
        return 0
    key = draft.keys[approach]
    forward = draft.forward(key)
    for signal in draft.file.roads[key[0]].signals:
        if signal.kind in PRIORITY_SIGNS and signal.orientation != ("-" if forward else "+"):
            return PRIORITY_SIGNS[signal.kind]
    return 0


def _start_yaw(lane: Lane) -> float:
    return math.atan2(*(lane.centre[1] - lane.centre[0])[::-1])


def _turn(lane: Lane) -> float:
    """How far a lane turns, rad, left positive."""
    step = np.diff(lane.centre, axis=0)
    return float(np.sum(wrap_angle(np.diff(np.arctan2(step[:, 1], step[:, 0])))))
