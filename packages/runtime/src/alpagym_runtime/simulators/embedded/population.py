"""Fills a map with road users around an ego, as usual for its kind; and makes trouble on request."""

from __future__ import annotations

from alpagym_runtime.simulators.embedded import obstacles, people
from alpagym_runtime.simulators.embedded.placement import REACH_M, EgoStart, Placement

__all__ = ["EgoStart", "Population"]

MOST_MOVING = 40

SLOW_LEADER_SHARE = {
    "multilane": 0.6,
    "curve": 0.35,
    "crosswalk": 0.35,
    "lane_drop": 0.3,
    "merge": 0.25,
    "parked_street": 0.3,
    "priority_crossing": 0.4,
}
STANDING_CAR_SHARE = {"curve": 0.3}
JAYWALKED = ("curve", "parked_street", "priority_crossing")
WITHOUT_BICYCLES = ("merge", "lane_drop", "multilane", "stop_and_go")


class Population(Placement):
    """Road users of one situation; `fill` and its like add to `agents`."""

    def make_trouble(self) -> None:
        """One road user that the ego will have to answer: it cuts in, brakes in front, or steps onto the road."""
        obstacles.make_trouble(self)

    def fill(self, spacing_m: float) -> None:
        """Traffic as usual for the kind of map."""
        if self.kind == "parked_street":
            obstacles.park(self)
        if self.kind == "stop_and_go":
            obstacles.queue(self)
        if self.rng.uniform() < STANDING_CAR_SHARE.get(self.kind, 0.0):
            obstacles.standing_car(self)
        if self.rng.uniform() < SLOW_LEADER_SHARE.get(self.kind, 0.0):
            obstacles.slow_leader(self)
        for crossing in self.plan.crossings:
            for track in self.rng.permutation(4)[: self.rng.integers(0, 4)]:
                people.crossing_person(self, crossing, int(track))
        if self.kind in JAYWALKED:
            for _ in range(int(self.rng.integers(0, 3))):
                people.jaywalker(self)
        self.vehicles(spacing_m * float(self.rng.uniform(0.7, 1.6)), REACH_M)
        if self.kind not in WITHOUT_BICYCLES:
            for _ in range(int(self.rng.integers(0, 3))):
                self.cyclist()
        for _ in range(int(self.rng.integers(2, 7))):
            people.walker(self)
        self.keep_nearest(MOST_MOVING)

    def fill_up_to(self, count: int) -> None:
        """Exactly `count` moving road users: more vehicles, or without those farthest from the ego."""
        spacing = 20.0
        while self.moving() < count and spacing > 4.0:
            self.vehicles(spacing, 320.0)
            spacing *= 0.7
        for _ in range(200):
            if self.moving() >= count:
                break
            people.walker(self)
        self.keep_nearest(count)
