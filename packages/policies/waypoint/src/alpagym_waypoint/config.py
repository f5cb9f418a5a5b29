"""Options of the waypoint policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from alpagym_plugins import ConfigError, check_range

if TYPE_CHECKING:
    from alpagym_runtime.types import PolicySpec
    from alpagym_waypoint.policy import WaypointPolicy

SMALLEST_PICTURE_PX = 16
BUNDLED = "bundled"


@dataclass
class ModelSection:
    """Which weights to begin with.

    Attributes:
        path: a checkpoint folder or a .safetensors file; bundled: the weights that come with the package, for one
            camera of the default size; empty: fresh ones. `checkpoint.path` goes over it.

    """

    path: str = ""


@dataclass
class WaypointConfig:
    """The small policy that the default run trains: ego history, route and what is around in, a plan out.

    What is around it sees either in pictures or, without a camera, as a list of the nearest road users.

    Attributes:
        cameras: names of the cameras that it sees with; none: it gets the nearest road users instead.
        camera_height, camera_width: of a picture, px; multiples of 4.
        frames: pictures of each camera at a time, `frame_step_us` apart.
        frame_step_us: time between them; equal to simulator.control_period_us, each is rendered and stored once.
        channels: of the three convolutions.
        hidden: width of the other layers.
        actors: nearest road users that it sees without a camera, or that it is told about while it imitates.
        around_weight: of a second task while it imitates with a camera: to find in the pictures which cells of the
            ground around the car are taken, where the demonstration says so; 0: none. Driving does without it.
        acceleration_std, curvature_std: exploration in units of 3 m/s2 and 0.06 1/m.
        noise_correlation: of the exploration from one tick to the next, AR(1); 0 is white.
        seed: of fresh weights.
        model: weights to begin with.
        blank_cameras: pictures arrive black, to measure what they are worth.
        value_head: a second network of the same kind estimates the value of what is seen, for trainer=ppo; driving
            does without it.

    """

    cameras: list[str] = field(default_factory=list)
    camera_height: int = 48
    camera_width: int = 96
    frames: int = 2
    frame_step_us: int = 200_000
    channels: list[int] = field(default_factory=lambda: [16, 32, 32])
    hidden: int = 96
    actors: int = 8
    around_weight: float = 0.0
    acceleration_std: float = 0.7
    curvature_std: float = 0.1
    noise_correlation: float = 0.9
    seed: int = 0
    blank_cameras: bool = False
    value_head: bool = False
    model: ModelSection = field(default_factory=ModelSection)

    def __post_init__(self) -> None:
        for i, name in enumerate(self.cameras):
            if not name or name in self.cameras[:i]:
                raise ConfigError(f"must be the name of another camera, got {name!r}", key=f"cameras[{i}]")
        for key in ("camera_height", "camera_width"):
            check_range(key, getattr(self, key), minimum=SMALLEST_PICTURE_PX, maximum=1024)
            if getattr(self, key) % 4:
                raise ConfigError(f"must be a multiple of 4, got {getattr(self, key)}", key=key)
        check_range("frames", self.frames, minimum=1, maximum=8)
        check_range("frame_step_us", self.frame_step_us, minimum=1, maximum=10_000_000)
        if len(self.channels) != 3:
            raise ConfigError(f"must be three numbers, one a convolution, got {self.channels}", key="channels")
        for i, channels in enumerate(self.channels):
            check_range(f"channels[{i}]", channels, minimum=8, maximum=256)
        # Measured (torch 2.11, x86): below 12 columns a row's last bits depend on its place in the batch.
        check_range("hidden", self.hidden, minimum=16, maximum=4096)
        check_range("actors", self.actors, minimum=1, maximum=64)
        check_range("around_weight", self.around_weight, minimum=0)
        if self.around_weight and not self.cameras:
            raise ConfigError("there are no pictures to find the road users in", key="around_weight")
        check_range("acceleration_std", self.acceleration_std, above=0, maximum=10)
        check_range("curvature_std", self.curvature_std, above=0, maximum=10)
        check_range("noise_correlation", self.noise_correlation, minimum=0, below=1)
        if self.blank_cameras and not self.cameras:
            raise ConfigError("there is no camera to blank", key="blank_cameras")

    def spec(self) -> PolicySpec:
        """What it reads and answers; needs no torch."""
        from alpagym_runtime.types import PolicySpec

        around = () if self.cameras else ("actors_rig",)
        lesson = ("actors_rig",) if self.around_weight else ()
        return PolicySpec(
            fields=("ego_history_rig", "ego_dynamics_rig", "route_rig", *around),
            lesson=lesson,
            cameras=dict.fromkeys(self.cameras, (self.camera_height, self.camera_width)),
            frames=self.frames if self.cameras else 1,
            frame_step_us=self.frame_step_us if self.cameras else 100_000,
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
