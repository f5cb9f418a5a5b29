"""Options of the waypoint policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from alpagym_plugins import ConfigError, check_range

if TYPE_CHECKING:
    from alpagym_runtime.types import PolicySpec
    from alpagym_waypoint.policy import WaypointPolicy


@dataclass
class WaypointConfig:
    """The small policy that the default run trains: ego history, route and nearest road users in, a plan out.

    Attributes:
        hidden: width of its layers.
        actors: nearest road users that it sees.
        acceleration_std, curvature_std: exploration in units of 3 m/s2 and 0.06 1/m.
        noise_correlation: of the exploration from one tick to the next, AR(1); 0 is white.
        seed: of the first weights.

    """

    hidden: int = 96
    actors: int = 8
    acceleration_std: float = 0.7
    curvature_std: float = 0.1
    noise_correlation: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        # Measured (torch 2.11, x86): below 12 columns a row's last bits depend on its place in the batch.
        check_range("hidden", self.hidden, minimum=16, maximum=4096)
        check_range("actors", self.actors, minimum=1, maximum=64)
        check_range("acceleration_std", self.acceleration_std, above=0, maximum=10)
        check_range("curvature_std", self.curvature_std, above=0, maximum=10)
        check_range("noise_correlation", self.noise_correlation, minimum=0, below=1)

    def spec(self) -> PolicySpec:
        """What it reads and answers; needs no torch."""
        from alpagym_runtime.types import PolicySpec

        return PolicySpec(
            fields=("ego_history_rig", "ego_dynamics_rig", "route_rig", "actors_rig"),
            actors=self.actors,
            carry={"noise": (4,)},
        )

    def build(self, device: str = "cpu") -> WaypointPolicy:
        """The policy with fresh weights."""
        try:
            from alpagym_waypoint.policy import WaypointPolicy
        except ImportError as err:
            raise ConfigError(
                f"policy 'waypoint' needs the module {err.name!r}: pip install 'alpagym-waypoint[torch]'", key="policy"
            ) from err
        return WaypointPolicy(self, device)
