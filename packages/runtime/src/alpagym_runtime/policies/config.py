"""Options of the baseline policies. `spec()` tells what a policy reads and answers; `build` makes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from alpagym_plugins import ConfigError, check_range

if TYPE_CHECKING:
    from alpagym_runtime.policies.expert import Expert
    from alpagym_runtime.types import Policy, PolicySpec


@dataclass
class ConstantSpeedConfig:
    """Drives straight ahead: the simplest thing that moves, and with factor 0 the one that stops.

    Attributes:
        speed_factor: planned speed as a multiple of the present one. It applies anew at each tick, so below 1 the speed
            decays. 0 brakes to a stop at 3 m/s² and stays there: a parked car.

    """

    speed_factor: float = 1.0

    def __post_init__(self) -> None:
        check_range("speed_factor", self.speed_factor, minimum=0, maximum=10)

    def spec(self) -> PolicySpec:
        """Reads the speed only."""
        from alpagym_runtime.types import PolicySpec

        return PolicySpec(fields=("ego_dynamics_rig",))

    def build(self, device: str = "cpu") -> Policy:
        """The policy; it runs on the CPU whatever the device."""
        from alpagym_runtime.policies.constant_speed import ConstantSpeed

        return ConstantSpeed(self)


@dataclass
class RouteFollowerConfig:
    """Follows the route, keeps its distance by the intelligent driver model (IDM) and slows down for curves.

    Attributes:
        desired_speed_mps: speed on a free, straight road.
        acceleration_mps2: IDM a, most acceleration.
        comfortable_deceleration_mps2: IDM b; also how it slows down before curves.
        emergency_deceleration_mps2: most deceleration.
        headway_s: IDM T, time gap to the car ahead.
        standstill_gap_m: IDM s0, gap at standstill.
        lateral_acceleration_mps2: most lateral acceleration in curves.
        corridor_half_width_m: an actor whose box comes this close to the route is ahead of us.
        front_m: from the rig origin forward to the ego's bumper.
        sees_traffic: False follows the route as if it were alone; for tables.
        weave_m: swings so far to both sides of the route, once in `weave_period_s`; for tables.
        weave_period_s: of a whole swing.

    """

    desired_speed_mps: float = 12.0
    acceleration_mps2: float = 1.5
    comfortable_deceleration_mps2: float = 2.0
    emergency_deceleration_mps2: float = 8.0
    headway_s: float = 1.2
    standstill_gap_m: float = 2.0
    lateral_acceleration_mps2: float = 2.5
    corridor_half_width_m: float = 1.3
    front_m: float = 4.1
    sees_traffic: bool = True
    weave_m: float = 0.0
    weave_period_s: float = 3.0

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            if key not in ("sees_traffic", "weave_m"):
                check_range(key, value, above=0, maximum=100)
        check_range("weave_m", self.weave_m, minimum=0, maximum=10)

    def spec(self) -> PolicySpec:
        """Reads speed, route and actors."""
        from alpagym_runtime.types import PolicySpec

        return PolicySpec(fields=("ego_dynamics_rig", "route_rig", "actors_rig"))

    def build(self, device: str = "cpu") -> Policy:
        """The policy; it runs on the CPU whatever the device."""
        from alpagym_runtime.policies.route_follower import RouteFollower

        return RouteFollower(self)


@dataclass
class LogReplayConfig:
    """Drives as the recording did: an upper baseline, and a check of the simulator's controller."""

    def spec(self) -> PolicySpec:
        """Reads the recording, so it can never be trained, and the speed for where that has ended."""
        from alpagym_runtime.types import PolicySpec

        return PolicySpec(fields=("ego_dynamics_rig",), privileged=("recorded_plan_rig",))

    def build(self, device: str = "cpu") -> Policy:
        """The policy; it runs on the CPU whatever the device."""
        from alpagym_runtime.policies.log_replay import LogReplay

        return LogReplay(self)


@dataclass
class ExpertConfig:
    """Drives what the world's expert would: it knows the traffic's plans. For tables, never a trainee."""

    def spec(self) -> PolicySpec:
        """Reads the label target_plan_rig."""
        from alpagym_runtime.types import PolicySpec

        return PolicySpec(fields=("ego_dynamics_rig",), privileged=("target_plan_rig",))

    def build(self, device: str = "cpu") -> Expert:
        """The policy."""
        from alpagym_runtime.policies.expert import Expert

        return Expert(self)


@dataclass
class FakeVlaConfig:
    """The load of a vision-language-action model without one: wants pictures, takes its time, drives on.

    Attributes:
        delay_ms: how long one forward takes, whatever the batch.
        cameras: names of the cameras that it wants.
        height: of the pictures that it wants, px.
        width: likewise.
        frames: pictures a camera, 0.1 s apart.

    """

    delay_ms: float = 0.0
    cameras: list[str] = field(default_factory=lambda: ["camera_front_wide_120fov", "camera_front_tele_30fov"])
    height: int = 320
    width: int = 512
    frames: int = 1

    def __post_init__(self) -> None:
        check_range("delay_ms", self.delay_ms, minimum=0, maximum=600_000)
        check_range("height", self.height, minimum=8, maximum=8192)
        check_range("width", self.width, minimum=8, maximum=8192)
        check_range("frames", self.frames, minimum=1, maximum=64)
        if len(set(self.cameras)) != len(self.cameras):
            raise ConfigError(f"names a camera twice: {self.cameras}", key="cameras")

    def spec(self) -> PolicySpec:
        """Reads the speed and the pictures."""
        from alpagym_runtime.types import PolicySpec

        cameras = dict.fromkeys(self.cameras, (self.height, self.width))
        return PolicySpec(fields=("ego_dynamics_rig",), cameras=cameras, frames=self.frames)

    def build(self, device: str = "cpu") -> Policy:
        """The policy; it runs on the CPU whatever the device."""
        from alpagym_runtime.policies.fake_vla import FakeVla

        return FakeVla(self)
