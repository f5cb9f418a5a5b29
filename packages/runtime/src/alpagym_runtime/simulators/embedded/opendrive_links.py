"""Who follows whom and who lies beside whom among an OpenDRIVE map's lanes.

Junctions are seen through: a lane's successors are the connecting roads' lanes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded.opendrive_draft import Draft, Key

Float = NDArray[np.float64]

LINK_GAP_MAX_M = 2.0
JUMP_M, TAPER_M = 0.02, 40.0


def link(draft: Draft) -> None:
    """Successors of each lane, from both lanes' links, across sections, roads and junctions."""
    by_incoming: dict[tuple[str, str], list[Any]] = {}
    for junction in draft.file.junctions.values():
        for connection in junction.connections:
            by_incoming.setdefault((junction.junction_id, connection.incoming), []).append(connection)
    follow: list[dict[int, None]] = [{} for _ in draft.lanes]
    for lane_id, key in enumerate(draft.keys):
        for target, entered_forward in _targets(draft, key, draft.forward(key), by_incoming):
            _join(draft, follow, lane_id, target, entered_forward)
        # A link may stand in one of the two lanes only: read backwards as well.
        for target, left_forward in _targets(draft, key, not draft.forward(key), {}):
            source = draft.ids.get(target)
            if source is not None and draft.forward(target) != left_forward:
                _join_ids(draft, follow, source, lane_id)
    draft.lanes = [replace(lane, successors=tuple(ways)) for lane, ways in zip(draft.lanes, follow, strict=True)]


def _targets(
    draft: Draft, key: Key, towards_end: bool, by_incoming: dict[tuple[str, str], list[Any]]
) -> list[tuple[Key, bool]]:
    """Lanes beyond a lane's end (or start), and whether each is entered at its own start."""
    road_id, index, number = key
    road = draft.file.roads[road_id]
    lane = draft.road_lane(key)
    numbers = lane.successors if towards_end else lane.predecessors
    beyond = index + (1 if towards_end else -1)
    if 0 <= beyond < len(road.sections):
        return [((road_id, beyond, n), towards_end) for n in numbers]
    link = road.successor if towards_end else road.predecessor
    if link is None:
        return []
    if link.kind == "road":
        other = draft.file.roads.get(link.target)
        if other is None:
            draft.remark(f"road {road_id}: no road {link.target}, which it is linked to")
            return []
        at_start = link.contact == "start"
        section = 0 if at_start else len(other.sections) - 1
        return [((other.road_id, section, n), at_start) for n in numbers]
    found = []
    for connection in by_incoming.get((link.target, road_id), ()):
        other = draft.file.roads.get(connection.road)
        if other is None:
            draft.remark(f"junction {link.target}: no road {connection.road}, which a connection names")
            continue
        at_start = connection.contact == "start"
        section = 0 if at_start else len(other.sections) - 1
        found += [((other.road_id, section, to), at_start) for start, to in connection.lanes if start == number]
    return found


def _join(draft: Draft, follow: list[dict[int, None]], lane_id: int, target: Key, entered_forward: bool) -> None:
    other = draft.ids.get(target)
    if other is not None and draft.forward(target) == entered_forward:
        _join_ids(draft, follow, lane_id, other)


def _join_ids(draft: Draft, follow: list[dict[int, None]], lane_id: int, other: int) -> None:
    cars = ("driving", "turn")
    a, b = draft.lanes[lane_id], draft.lanes[other]
    if a.kind != b.kind and not (a.kind in cars and b.kind in cars):
        return
    gap = math.hypot(*(a.centre[-1] - b.centre[0]))
    if gap <= LINK_GAP_MAX_M:
        follow[lane_id][other] = None
    elif other not in follow[lane_id]:
        draft.remark(f"lanes {draft.keys[lane_id]} and {draft.keys[other]} are linked but {gap:.1f} m apart")


def meet(draft: Draft) -> None:
    """Bend lanes that begin or end beside the lane they are linked to: tapers, which shrink to their edge.

    The narrower of the two gives way, over up to `TAPER_M` and half its length.
    """
    for lane_id, lane in enumerate(draft.lanes):
        for other in lane.successors:
            end, start = draft.lanes[lane_id].centre, draft.lanes[other].centre
            jump = start[0] - end[-1]
            if math.hypot(*jump) <= JUMP_M:
                continue
            if draft.end_widths[other][0] < draft.end_widths[lane_id][1]:
                bent = start - _fading(start, jump)
                draft.lanes[other] = replace(draft.lanes[other], centre=bent)
            else:
                bent = end + _fading(end[::-1], jump)[::-1]
                draft.lanes[lane_id] = replace(draft.lanes[lane_id], centre=bent)


def _fading(points: Float, shift: Float) -> Float:
    """[K,2]: `shift` at the first point, smoothly nothing from `TAPER_M` or half way on."""
    along = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(points, axis=0).T))])
    left = np.clip(1.0 - along / min(TAPER_M, along[-1] / 2.0), 0.0, 1.0)
    return (left * left * (3.0 - 2.0 * left))[:, None] * shift


def find_neighbours(draft: Draft) -> None:
    """Each lane's left and right neighbour that traffic may change to."""
    for lane_id, key in enumerate(draft.keys):
        lane = draft.lanes[lane_id]
        forward = draft.forward(key)
        found = []
        for step in (1, -1):  # larger t first: the left of forward traffic
            other = (key[0], key[1], key[2] + step)
            beside = draft.ids.get(other)
            allowed = (
                beside is not None
                and draft.forward(other) == forward
                and draft.lanes[beside].kind == lane.kind
                and lane.kind in ("driving", "turn")
                and _may_change(draft, key, step)
            )
            found.append(beside if allowed and beside is not None else -1)
        left, right = found if forward else found[::-1]
        draft.lanes[lane_id] = replace(lane, left=left, right=right)


def _may_change(draft: Draft, key: Key, step: int) -> bool:
    """Whether paint lets traffic go from a lane to the next larger (step 1) or smaller number."""
    inner = min((key[2], key[2] + step), key=abs)
    marks = draft.file.roads[key[0]].sections[key[1]].lanes[inner].marks
    way = "increase" if step > 0 else "decrease"
    return not marks or any(mark.lane_change in ("both", way) for mark in marks)
