"""A road map as lanes, signals and what stands beside them; makers and readers of maps give this.

Plain data in the scene's local frame (m, rad). The world's kernels see parts of it as flat arrays, pictures all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.geometry import Area, area_from_polygons

Float = NDArray[np.float64]

GREEN, YELLOW, RED = 1, 2, 3
"""Signal states, as `actors_rig` gives them; 0 is no signal."""

ZEBRA, MERGE = -2, -3
"""Instead of a stop's signal group: people who want to cross go first; lanes become one here, by turns."""


@dataclass(frozen=True)
class Lane:
    """A lane in driving direction.

    Attributes:
        lane_id: index in `LaneMap.lanes`.
        centre: [K,2] m, distinct points about 1 to 2 m apart.
        width_m: its width.
        speed_limit_mps: its limit.
        successors: lanes that begin where this one ends.
        left, right: neighbours in the same direction that may be changed to; -1 for none.
        kind: driving | turn (inside a junction) | walkway | bicycle.
        signal_group: group of `Signals` that governs this lane's end; -1 for none.
        yields_to: lanes whose traffic goes first where this lane crosses or joins them.

    """

    lane_id: int
    centre: Float
    width_m: float = 3.5
    speed_limit_mps: float = 13.9
    successors: tuple[int, ...] = ()
    left: int = -1
    right: int = -1
    kind: Literal["driving", "turn", "walkway", "bicycle"] = "driving"
    signal_group: int = -1
    yields_to: tuple[int, ...] = ()


@dataclass(frozen=True)
class Signals:
    """Fixed-time signals.

    Attributes:
        cycle_s: length of the cycle; 0 means there are none.
        green_s: [G,2] start and end of each group's green within the cycle, start < end ≤ cycle_s.
        yellow_s: how long yellow follows green; then red.
        heads: [H,4] x, y m, yaw rad (the way that traffic looks at it from), group.

    """

    cycle_s: float = 0.0
    green_s: Float = field(default_factory=lambda: np.zeros((0, 2)))
    yellow_s: float = 3.0
    heads: Float = field(default_factory=lambda: np.zeros((0, 4)))

    def state(self, group: int, time_us: int) -> int:
        """GREEN, YELLOW or RED of a group at a time."""
        start, end = self.green_s[group]
        since = (time_us * 1e-6 - start) % self.cycle_s
        if since < end - start:
            return GREEN
        return YELLOW if since < end - start + self.yellow_s else RED


@dataclass(frozen=True)
class Marking:
    """A painted line [K,2]: solid | dashed | yellow (double centre line) | edge | stop."""

    points: Float
    kind: Literal["solid", "dashed", "yellow", "edge", "stop"]


@dataclass(frozen=True)
class Building:
    """A prism: footprint [K,2] m and height."""

    footprint: Float
    height_m: float


@dataclass(frozen=True)
class LaneMap:
    """Lanes, surface, and dressing.

    Attributes:
        lanes: by `lane_id`.
        surface: polygons [K,2] whose union may be driven on.
        signals: see `Signals`.
        markings, crosswalks, sidewalks, buildings: for pictures; crosswalks also tell where people cross.
        trees: [T,3] x, y m and crown radius m.

    """

    lanes: tuple[Lane, ...]
    surface: tuple[Float, ...]
    signals: Signals = field(default_factory=Signals)
    markings: tuple[Marking, ...] = ()
    crosswalks: tuple[Float, ...] = ()
    sidewalks: tuple[Float, ...] = ()
    buildings: tuple[Building, ...] = ()
    trees: Float = field(default_factory=lambda: np.zeros((0, 3)))

    @cached_property
    def predecessors(self) -> dict[int, list[int]]:
        """Which lanes go on as a lane, for those that some do."""
        found: dict[int, list[int]] = {}
        for lane in self.lanes:
            for successor in lane.successors:
                found.setdefault(successor, []).append(lane.lane_id)
        return found

    def area(self) -> Area:
        """The drivable area."""
        return area_from_polygons(list(self.surface))


@dataclass(frozen=True)
class Stop:
    """A place on an agent's path where it may have to wait.

    Attributes:
        arc_m: arc length of the stop line on the path.
        signal_group: waits while this group is not green; -1: none; or ZEBRA or MERGE.
        conflict: x, y m where its path meets traffic that goes first, a zebra's middle, or where lanes become one, the
            same point for all whom it concerns; NaN: none (a signal only).

    """

    arc_m: float
    signal_group: int = -1
    conflict: tuple[float, float] = (float("nan"), float("nan"))


@dataclass(frozen=True)
class Agent:
    """A road user of the reactive traffic.

    Attributes:
        path: [P,2] m that it follows, distinct points about 1 to 2 m apart, long enough for the whole scene.
        start_arc_m, start_speed_mps: at grid index 0.
        desired_speed_mps: on a free path.
        kind: index into `scene.KINDS`.
        length_m, width_m: size.
        lateral_m: offset to the left of the path.
        lanes_left, lanes_right: neighbouring lanes (`lane_width_m` apart) that it may change to.
        lane_width_m: distance between them.
        stops: ascending arc lengths.
        yields_to_cars: a person at the kerb who waits for a gap.

    """

    path: Float
    start_arc_m: float
    start_speed_mps: float
    desired_speed_mps: float
    kind: int
    length_m: float
    width_m: float
    lateral_m: float = 0.0
    lanes_left: int = 0
    lanes_right: int = 0
    lane_width_m: float = 3.5
    stops: tuple[Stop, ...] = ()
    yields_to_cars: bool = False
