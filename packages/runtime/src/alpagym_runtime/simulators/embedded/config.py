"""Options of the embedded simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from alpagym_plugins import ConfigError, check_choice, check_range
from alpagym_runtime.simulators.embedded.camera_config import CamerasConfig

if TYPE_CHECKING:
    from alpagym_runtime.simulators.embedded.simulator import EmbeddedSimulator


@dataclass
class EmbeddedConfig:
    """The world that runs in the process.

    Attributes:
        control_period_us: time between decisions, a multiple of 100,000.
        warmup_ticks: control periods before the handover in which the policy is asked and the recording drives.
        end_on: events that end the drive: collision, offroad, goal; with [] it drives on, uncounted after the first.
        vehicle: alpasim | kinematic: AlpaSim's dynamic bicycle and controller, or a kinematic one that follows plans
            more closely (ADR 13, ADR 14).
        planner_delay_us: the controller follows the newest plan that is at least this old, or the oldest there is.
        pose_reporting_interval_us: time between the poses that are reported, as samples of alpasim/ measures and by
            `alpagym serve`; a divisor of the control period, or 0: one a period.
        alpasim_quirks: also copy what one would call faults of AlpaSim (docs/concepts.md lists them).
        measures: further measures to compute at each episode's end, such as alpasim/progress; what reward terms
            need is computed in any case.
        traffic: reactive | replay; scenes without agents are always replayed.
        route_spacing_m: distance between route points in the observation.
        cameras: how the world is seen, where the policy asks for pictures.
        threads: 0 steps the world when it is asked for results; 1 steps it in a thread of its own, beside the policy.

    """

    control_period_us: int = 200_000
    warmup_ticks: int = 0
    end_on: list[str] = field(default_factory=lambda: ["collision", "offroad", "goal"])
    vehicle: str = "kinematic"
    planner_delay_us: int = 0
    pose_reporting_interval_us: int = 100_000
    alpasim_quirks: bool = False
    measures: list[str] = field(default_factory=list)
    traffic: str = "reactive"
    route_spacing_m: float = 4.0
    cameras: CamerasConfig = field(default_factory=CamerasConfig)
    threads: int = 0

    def __post_init__(self) -> None:
        check_range("control_period_us", self.control_period_us, minimum=100_000, maximum=2_000_000)
        if self.control_period_us % 100_000:
            raise ConfigError(f"must be a multiple of 100000, got {self.control_period_us}", key="control_period_us")
        check_range("warmup_ticks", self.warmup_ticks, minimum=0, maximum=1000)
        for i, event in enumerate(self.end_on):
            check_choice(f"end_on[{i}]", event, ("collision", "offroad", "goal"))
        check_choice("vehicle", self.vehicle, ("alpasim", "kinematic"))
        check_range("planner_delay_us", self.planner_delay_us, minimum=0, maximum=10_000_000)
        interval_us = self.pose_reporting_interval_us
        if interval_us and (interval_us < 10_000 or self.control_period_us % interval_us):
            raise ConfigError(
                f"must be 0 or a divisor of control_period_us = {self.control_period_us} from 10000 on, "
                f"got {interval_us}",
                key="pose_reporting_interval_us",
            )
        check_choice("traffic", self.traffic, ("reactive", "replay"))
        check_range("route_spacing_m", self.route_spacing_m, above=0, maximum=100)
        check_range("threads", self.threads, minimum=0, maximum=1)

    def build(self, policy_spec: Any, dataset: Any, slots: int, labels: Sequence[str]) -> EmbeddedSimulator:
        """A simulator with `slots` slots over the dataset's split, computing what `policy_spec` and `labels` name."""
        from alpagym_runtime.simulators.embedded.simulator import EmbeddedSimulator

        return EmbeddedSimulator(self, policy_spec, dataset, slots, labels)
