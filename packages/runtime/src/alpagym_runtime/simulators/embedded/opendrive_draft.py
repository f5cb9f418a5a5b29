"""What is known of a map while it is made of an OpenDRIVE file; each of its makers adds a part."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded.lane_map import Lane, Marking
from alpagym_runtime.simulators.embedded.opendrive_xml import OpenDrive, RoadLane

Float = NDArray[np.float64]
Key = tuple[str, int, int]
"""A lane of the file: road id, index of the section, lane number."""

REMARKS_MAX = 100


@dataclass
class Draft:
    """A map that is being made of a file; what belongs to a lane has its place in `lanes`.

    Attributes:
        file: the contents.
        own: written by us, so that it says itself what is derived otherwise.
        lanes: in driving direction.
        keys, ids: each lane's place in the file, and back.
        junction_of: the junction that each lane lies in, or "".
        end_widths: m, at each lane's start and end.
        surface, junction_surface: rings [P,2] that may be driven on, all and by junction.
        sidewalks, markings: beside and on them.
        remarks: what was left out, with reasons.

    """

    file: OpenDrive
    own: bool
    lanes: list[Lane] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    ids: dict[Key, int] = field(default_factory=dict)
    junction_of: list[str] = field(default_factory=list)
    end_widths: list[tuple[float, float]] = field(default_factory=list)
    surface: list[Float] = field(default_factory=list)
    junction_surface: dict[str, list[Float]] = field(default_factory=dict)
    sidewalks: list[Float] = field(default_factory=list)
    markings: list[Marking] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def road_lane(self, key: Key) -> RoadLane:
        """What the file says of a lane."""
        return self.file.roads[key[0]].sections[key[1]].lanes[key[2]]

    def forward(self, key: Key) -> bool:
        """Whether traffic runs along the road."""
        lane = self.road_lane(key)
        forward = (key[2] < 0) != self.file.roads[key[0]].left_hand
        return not forward if lane.direction == "reversed" else forward

    def remark(self, text: str) -> None:
        """Note something once; no more than a hundred."""
        if len(self.remarks) < REMARKS_MAX and text not in self.remarks:
            self.remarks.append(text)


def end_yaw(lane: Lane) -> float:
    """Heading rad, local, of a lane's end."""
    return math.atan2(*(lane.centre[-1] - lane.centre[-2])[::-1])
