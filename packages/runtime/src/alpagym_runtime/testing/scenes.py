"""Scenes made by hand for the embedded world: small enough to check a measure or a reward with arithmetic.

    draft = straight_drive(users=[RoadUser(standing(30.0, 0.0, 0.0, 120), (4.0, 2.0))])
    simulator = simulator_of([draft.build(), draft.mirrored().build("mirrored")])

A draft can be mirrored and moved as a whole, so that a fact can be checked both ways round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.errors import SceneError
from alpagym_runtime.geometry import area_from_polygons
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
from alpagym_runtime.simulators.embedded.scene import KINDS, Actors, Scene, Vehicle
from alpagym_runtime.simulators.embedded.simulator import EmbeddedSimulator
from alpagym_runtime.types import PolicySpec

Float = NDArray[np.float64]

BOX = Vehicle(length_m=4.0, width_m=2.0, rear_overhang_m=1.0, wheelbase_m=2.0)
"""The ego of the drafts: its box reaches from 1 m behind to 3 m ahead of the rig's origin."""


def moving(x_m: float, y_m: float, yaw_rad: float, speed_mps: float, count: int) -> Float:
    """[count,4] x, y, yaw, speed by grid step: straight on at constant speed; at (x, y) in the first."""
    way = speed_mps * 0.1 * np.arange(count)
    x, y = x_m + way * np.cos(yaw_rad), y_m + way * np.sin(yaw_rad)
    return np.stack([x, y, np.full(count, yaw_rad), np.full(count, abs(speed_mps))], axis=1)


def standing(x_m: float, y_m: float, yaw_rad: float, count: int) -> Float:
    """[count,4]: `moving` at no speed."""
    return moving(x_m, y_m, yaw_rad, 0.0, count)


@dataclass(frozen=True)
class RoadUser:
    """One actor: track [K,4] centre x, y, yaw, speed by grid step from 0; it exists at first … last, both included."""

    track: Float
    size: tuple[float, float] = (4.0, 2.0)
    first: int = 0
    last: int = -1
    kind: str = "car"


@dataclass(frozen=True)
class Draft:
    """A scene's parts before they are frozen; see `Scene` for the fields."""

    log: Float
    route: Float
    polygons: Sequence[Float]
    users: Sequence[RoadUser] = ()
    handover: int = 0
    vehicle: Vehicle = BOX
    family: str = "hand-made"
    speed_limit_mps: float = 13.9

    def build(self, scene_id: str = "hand-made") -> Scene:
        """The scene."""
        steps = max([len(user.track) for user in self.users], default=1)
        tracks = np.zeros((len(self.users), steps, 4))
        for a, user in enumerate(self.users):
            tracks[a, : len(user.track)] = user.track
        last = [len(user.track) - 1 if user.last < 0 else user.last for user in self.users]
        actors = Actors(
            tracks,
            np.array([user.first for user in self.users], np.int64),
            np.array(last, np.int64),
            np.array([user.size for user in self.users], np.float64).reshape(-1, 2),
            np.array([KINDS.index(user.kind) for user in self.users], np.int64),
        )
        return Scene(
            scene_id,
            self.family,
            self.log,
            self.handover,
            self.route,
            area_from_polygons(list(self.polygons)),
            actors,
            self.vehicle,
            self.speed_limit_mps,
        )

    def mirrored(self) -> Draft:
        """Left and right exchanged, about the x axis."""
        pose = np.array([1.0, -1.0, -1.0, 1.0])
        return replace(
            self,
            log=self.log * pose,
            route=self.route * pose[:2],
            polygons=[np.asarray(polygon) * pose[:2] for polygon in self.polygons],
            users=[replace(user, track=user.track * pose) for user in self.users],
        )

    def moved(self, x_m: float, y_m: float, yaw_rad: float) -> Draft:
        """Turned about the origin, then shifted."""
        cos, sin = np.cos(yaw_rad), np.sin(yaw_rad)

        def points(xy: Float) -> Float:
            return np.asarray(xy) @ np.array([[cos, sin], [-sin, cos]]) + [x_m, y_m]

        def track(poses: Float) -> Float:
            return np.column_stack([points(poses[:, :2]), poses[:, 2] + yaw_rad, poses[:, 3]])

        return replace(
            self,
            log=track(self.log),
            route=points(self.route),
            polygons=[points(polygon) for polygon in self.polygons],
            users=[replace(user, track=track(user.track)) for user in self.users],
        )


def straight_drive(
    speed_mps: float = 10.0,
    steps: int = 100,
    *,
    handover: int = 10,
    users: Sequence[RoadUser] = (),
    half_width_m: float = 8.0,
    vehicle: Vehicle = BOX,
) -> Draft:
    """A straight road along x; the recording drives along y = 0 and stands at x = 0 at the handover."""
    log = moving(-speed_mps * 0.1 * handover, 0.0, 0.0, speed_mps, steps)
    x = np.arange(log[0, 0] - 30.0, log[-1, 0] + 61.0, 2.0)
    side = half_width_m
    road = np.array([[x[0] - 9.0, -side], [x[-1] + 9.0, -side], [x[-1] + 9.0, side], [x[0] - 9.0, side]])
    route = np.stack([x, np.zeros_like(x)], axis=1)
    return Draft(log, route, [road], users, handover, vehicle)


class SceneList:
    """A `SceneSource` over scenes that are there already."""

    skipped = ()

    def __init__(self, scenes: Sequence[Scene]) -> None:
        self._scenes = {scene.scene_id: scene for scene in scenes}

    def ids(self, split: str) -> tuple[str, ...]:
        """All of them, in every split."""
        return tuple(self._scenes)

    def load(self, scene_id: str) -> Scene:
        """The scene; SceneError if there is none."""
        if scene_id not in self._scenes:
            raise SceneError(f"no scene {scene_id!r} in the list; it has {', '.join(self._scenes)}")
        return self._scenes[scene_id]


def simulator_of(
    scenes: Sequence[Scene],
    policy_spec: PolicySpec | None = None,
    *,
    slots: int = 1,
    labels: Sequence[str] = (),
    **config: Any,
) -> EmbeddedSimulator:
    """The embedded world over these scenes; `config` are the options of `EmbeddedConfig`."""
    spec = PolicySpec(fields=("ego_history_rig", "ego_dynamics_rig", "route_rig", "actors_rig"))
    return EmbeddedSimulator(
        EmbeddedConfig(**config), policy_spec or spec, DatasetSection(), slots, labels, SceneList(scenes)
    )
