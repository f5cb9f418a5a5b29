"""A scene: everything that an episode's start needs, immutable and free of randomness.

The local frame is the scene's own. Time 0 is the log's first sample; every track lies on one grid of `STEP_US`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.errors import SceneError
from alpagym_runtime.geometry import Area
from alpagym_runtime.simulators.embedded.lane_map import Agent, LaneMap, Marking, Signals, Stop

STEP_US = 100_000
"""Grid of the tracks and length of one inner step of the world."""

KINDS = ("car", "truck", "bus", "motorcycle", "bicycle", "pedestrian", "static")
"""Kind codes of `actors_rig`, by index."""

MAX_ACTORS = 256
"""Road users that a scene may have; kernels keep flags of this size a slot."""

STANDING_REFERENCE_M = 5.0
"""A recorded drive shorter than this is standing: progress means staying within this distance."""


@dataclass(frozen=True)
class Vehicle:
    """Size of the driven vehicle, m. Defaults: AlpaSim's `VehicleConfig`."""

    length_m: float = 5.393
    width_m: float = 2.109
    rear_overhang_m: float = 1.3
    wheelbase_m: float = 2.85

    @property
    def centre_offset_m(self) -> float:
        """From the rig origin (rear axle) forward to the box's centre."""
        return self.length_m / 2.0 - self.rear_overhang_m

    @staticmethod
    def of_size(length_m: float, width_m: float) -> Vehicle:
        """The default vehicle's axle proportions, scaled to a recorded vehicle's length."""
        scale = length_m / 5.393
        return Vehicle(length_m, width_m, 1.3 * scale, 2.85 * scale)


@dataclass(frozen=True)
class Actors:
    """A recorded road users: pure functions of time, each only inside its interval.

    Attributes:
        tracks: [A,K,4] f64: centre x, y m, yaw rad (unwrapped), speed m/s, at k·STEP_US; rows outside are ignored.
        first, last: [A] i64, first and last grid index of each.
        size: [A,2] f64 length, width m.
        kind: [A] i64, index into `KINDS`.

    """

    tracks: NDArray[np.float64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    size: NDArray[np.float64]
    kind: NDArray[np.int64]

    @staticmethod
    def none() -> Actors:
        """No traffic."""
        return Actors(np.zeros((0, 1, 4)), np.zeros(0, int), np.zeros(0, int), np.zeros((0, 2)), np.zeros(0, int))


def stop_array(stops: tuple[Stop, ...]) -> NDArray[np.float64]:
    """[S,4] arc length m, signal group or -1, conflict x, y m or NaN."""
    return np.array([[s.arc_m, s.signal_group, *s.conflict] for s in stops], np.float64).reshape(-1, 4)


@dataclass(frozen=True)
class Scene:
    """Where an episode starts.

    Attributes:
        scene_id: unique in its dataset.
        family: what kind of situation, for tables.
        ego_log: [K,4] f64: rig x, y m, yaw rad (unwrapped), speed m/s, at k·STEP_US; the recorded drive.
        handover: grid index at which the policy takes over.
        route: [P,2] f64 m, local; from behind the log's start to beyond its end, distinct points.
        area: the drivable area.
        actors: the recorded traffic.
        vehicle: size of the ego.
        speed_limit_mps: what the expert keeps.
        agents: one for each of `actors`, in its order, or none: how they drive where traffic reacts.
        signals: fixed-time signals.
        stops: stop lines on the route that the ego has to mind, ascending.
        lane_map: lanes and dressing, where the scene has them.
        markings: painted lines of scenes without a lane map; for pictures.

    """

    scene_id: str
    family: str
    ego_log: NDArray[np.float64]
    handover: int
    route: NDArray[np.float64]
    area: Area
    actors: Actors = field(default_factory=Actors.none)
    vehicle: Vehicle = field(default_factory=Vehicle)
    speed_limit_mps: float = 13.9
    agents: tuple[Agent, ...] = ()
    signals: Signals = field(default_factory=Signals)
    stops: tuple[Stop, ...] = ()
    lane_map: LaneMap | None = None
    markings: tuple[Marking, ...] = ()

    def __post_init__(self) -> None:
        where = f"scene {self.scene_id!r}"
        if self.ego_log.ndim != 2 or self.ego_log.shape[1] != 4 or not np.isfinite(self.ego_log).all():
            raise SceneError(f"{where}: the ego log must be finite [K, 4], got {self.ego_log.shape}")
        if not 0 <= self.handover < len(self.ego_log) - 1:
            raise SceneError(f"{where}: handover {self.handover} leaves no log to drive ({len(self.ego_log)} samples)")
        if len(self.route) < 2 or not (np.linalg.norm(np.diff(self.route, axis=0), axis=1) > 1e-6).all():
            raise SceneError(f"{where}: the route needs at least two points, all distinct from their neighbours")
        if self.agents and len(self.agents) != len(self.actors.first):
            raise SceneError(f"{where}: {len(self.agents)} agents for {len(self.actors.first)} actors")
        if len(self.actors.first) > MAX_ACTORS:
            raise SceneError(f"{where}: {len(self.actors.first)} actors; at most {MAX_ACTORS} fit, keep the nearest")
        actors, steps = self.actors, self.actors.tracks.shape[1]
        for a, (first, last) in enumerate(zip(actors.first, actors.last, strict=True)):
            if not 0 <= first <= last < steps:
                raise SceneError(f"{where}: actor {a} exists at [{first}, {last}], its track has {steps} samples")
            if not np.isfinite(actors.tracks[a, first : last + 1]).all():
                raise SceneError(f"{where}: the track of actor {a} is not finite")

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of everything that drives the episode, for receipts."""
        digest = hashlib.sha256()
        vehicle = self.vehicle
        numbers = [self.handover, self.speed_limit_mps, vehicle.length_m, vehicle.width_m]
        numbers += [vehicle.rear_overhang_m, vehicle.wheelbase_m]
        actors = self.actors
        arrays = [np.array(numbers, np.float64), self.ego_log, self.route, self.area.segments]
        for agent in self.agents:
            plain = [
                agent.start_arc_m,
                agent.start_speed_mps,
                agent.desired_speed_mps,
                agent.lateral_m,
                agent.lane_width_m,
            ]
            plain += [agent.lanes_left, agent.lanes_right, agent.yields_to_cars]
            arrays += [agent.path, np.array(plain, np.float64), stop_array(agent.stops)]
        signals = self.signals
        arrays += [np.array([signals.cycle_s, signals.yellow_s]), signals.green_s, stop_array(self.stops)]
        for array in [*arrays, actors.tracks, actors.first, actors.last, actors.size, actors.kind]:
            digest.update(str(array.shape).encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()
