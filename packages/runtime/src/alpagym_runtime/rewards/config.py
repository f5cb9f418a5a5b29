"""Options of the reward terms that come with AlpaGym.

A term's value is not scaled here: a preset gives each term a `scale`, negative for what is to be avoided, and the
reward is the sum of scale · term.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from alpagym_plugins import ConfigError, check_range

if TYPE_CHECKING:
    from alpagym_runtime.types import RewardTerm, SimulatorSpec


@dataclass
class ProgressConfig:
    """Pays how much further the drive has come; at most 1 over an episode.

    Attributes:
        full_at: progress, a share of the reference, that earns the whole 1; the driving score uses 0.8.

    """

    full_at: float = 1.0

    def __post_init__(self) -> None:
        check_range("full_at", self.full_at, above=0, maximum=1)

    def build(self, simulator_spec: SimulatorSpec) -> RewardTerm:
        """The term for this simulator; ConfigError where it has no such measure."""
        from alpagym_runtime.rewards.progress import Progress

        return Progress(self, simulator_spec)


@dataclass
class CollisionConfig:
    """1 for each object that is newly hit.

    Attributes:
        at_fault: count only collisions that are the ego's doing.
        once: 1 a drive at most, however many objects are hit.

    """

    at_fault: bool = False
    once: bool = False

    def build(self, simulator_spec: SimulatorSpec) -> RewardTerm:
        """The term for this simulator; ConfigError where it has no such measure."""
        from alpagym_runtime.rewards.events import Event

        name = "collision_at_fault_count" if self.at_fault else "collision_count"
        return Event("collision", name, simulator_spec, self.once)


@dataclass
class OffRoadConfig:
    """1 each time the ego leaves the drivable area.

    Attributes:
        once: 1 a drive at most.

    """

    once: bool = False

    def build(self, simulator_spec: SimulatorSpec) -> RewardTerm:
        """The term for this simulator; ConfigError where it has no such measure."""
        from alpagym_runtime.rewards.events import Event

        return Event("off_road", "offroad_count", simulator_spec, self.once)


@dataclass
class DistanceToGtConfig:
    """Root mean square of the distance in m to the recorded drive, from the handover to the horizon; paid at the end.

    Where a contact or the road's edge ends a drive in the embedded world, the car counts as standing there.
    """

    def build(self, simulator_spec: SimulatorSpec) -> RewardTerm:
        """The term for this simulator; ConfigError where it has no such measure."""
        from alpagym_runtime.rewards.distance_to_gt import DistanceToGt

        return DistanceToGt(simulator_spec)


@dataclass
class ComfortConfig:
    """1 for each tick that exceeds any limit of comfort.

    The defaults are nuPlan's comfort limits (arXiv:2106.11810, `ego_is_comfortable`).

    Attributes:
        acceleration_mps2: most longitudinal acceleration.
        deceleration_mps2: most longitudinal deceleration, as a positive number.
        lateral_acceleration_mps2: most lateral acceleration, to either side.
        jerk_mps3: most magnitude of jerk.
        yaw_rate_radps: most yaw rate, to either side.

    """

    acceleration_mps2: float = 2.40
    deceleration_mps2: float = 4.05
    lateral_acceleration_mps2: float = 4.89
    jerk_mps3: float = 8.37
    yaw_rate_radps: float = 0.95

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            check_range(key, value, above=0)

    def build(self, simulator_spec: SimulatorSpec) -> RewardTerm:
        """The term for this simulator; ConfigError where it has no such measure."""
        from alpagym_runtime.rewards.comfort import Comfort

        return Comfort(self, simulator_spec)


@dataclass
class MeasureConfig:
    """Pays any measure m of the simulator, each tick: shaped as |m|, then less a dead band, then a share of a span.

    Attributes:
        measure: its name in the simulator's spec.
        absolute: take |m|.
        dead_band: what is free, in the measure's unit; m - dead_band, not below 0. 0 changes nothing.
        span: divide by this and clip to [0, 1]; 0 changes nothing.
        difference: pay what the shaped value gained since the last tick instead of the value, so that an episode's sum
            is its last value less the one at the handover.

    """

    measure: str
    absolute: bool = False
    dead_band: float = 0.0
    span: float = 0.0
    difference: bool = False

    def __post_init__(self) -> None:
        if not self.measure:
            raise ConfigError("must name a measure of the simulator", key="measure")
        check_range("dead_band", self.dead_band, minimum=0)
        check_range("span", self.span, minimum=0)

    def build(self, simulator_spec: SimulatorSpec) -> RewardTerm:
        """The term for this simulator; ConfigError where it has no such measure."""
        from alpagym_runtime.rewards.measure import Measure

        return Measure(self, simulator_spec)
