"""Road maps from a seed: `make_map(kind, seed)` gives a `LaneMap`, the ego's routes and where people cross.

The roads and what stands beside them draw from streams of their own. A map knows no traffic (see `situations`).
"""

from __future__ import annotations

from alpagym_runtime.random import generator
from alpagym_runtime.simulators.embedded.maps import junctions, roads
from alpagym_runtime.simulators.embedded.maps.builder import Crossing, Phase, RoadPlan, Route, fixed_time

__all__ = ["KINDS", "Crossing", "Phase", "RoadPlan", "Route", "fixed_time", "make_map"]

_MAKERS = {
    "curve": roads.curve,
    "multilane": roads.multilane,
    "crossing3": junctions.crossing3,
    "crossing4": junctions.crossing4,
    "priority_crossing": junctions.priority_crossing,
    "merge": roads.merge,
    "lane_drop": roads.lane_drop,
    "roundabout": junctions.roundabout,
    "crosswalk": roads.crosswalk,
    "parked_street": roads.parked_street,
    "stop_and_go": roads.stop_and_go,
}

KINDS = tuple(_MAKERS)
"""What kinds of maps there are."""

ROADS, DRESSING = 1, 2


def make_map(kind: str, seed: int) -> RoadPlan:
    """The map of a kind behind a seed; the same bytes in every process of one build.

    Raises:
        ValueError: there is no such kind.

    """
    if kind not in _MAKERS:
        raise ValueError(f"no kind of map {kind!r}; there are {', '.join(KINDS)}")
    return _MAKERS[kind](generator(seed, ROADS), generator(seed, DRESSING))
