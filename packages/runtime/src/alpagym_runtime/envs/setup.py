"""What the single and the vector environment of a world share: its parts, built from plain JSON arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from numpy.typing import NDArray

from alpagym_plugins import check_choice
from alpagym_runtime.envs.actions import ACTION_SIZES, check_action_type, decision_from_actions
from alpagym_runtime.envs.core import DrivingCore, build_terms, reward_labels
from alpagym_runtime.envs.presets import reward_section
from alpagym_runtime.envs.spaces import Observer
from alpagym_runtime.errors import ConfigError
from alpagym_runtime.random import mix, uniform
from alpagym_runtime.run_config import DatasetSection, RewardSection, build_section
from alpagym_runtime.simulators.embedded.camera_config import CamerasConfig, check_cameras
from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
from alpagym_runtime.types import Decision, EpisodeRequest, PolicySpec

if TYPE_CHECKING:
    from alpagym_runtime.simulators.embedded.simulator import EmbeddedSimulator

TASK = "Drive along the route; do not touch anything and stay on the road."
FIELDS = ("ego_history_rig", "ego_dynamics_rig", "route_rig")
VIEWS = ("birds_eye", "camera", "both")


@dataclass(frozen=True)
class DrivingSetup:
    """A world, what is seen of it, how it is driven and what that pays.

    Attributes:
        policy: fields and cameras to observe.
        dataset: where scenes come from.
        simulator: config of the world; has `build` and `control_period_us`.
        reward: the terms.
        action_type: unicycle | plan | control.
        layout: of observations, see `spaces`.
        horizon: ticks after which an episode is cut off.
        timeout_s: longest wait for the world.
        view: what `render()` shows: birds_eye | camera | both.

    """

    policy: PolicySpec
    dataset: DatasetSection
    simulator: Any
    reward: RewardSection
    action_type: str
    layout: str
    horizon: int
    timeout_s: float = 60.0
    view: str = "birds_eye"

    def __post_init__(self) -> None:
        check_action_type(self.action_type)
        if self.horizon < 1:
            raise ConfigError(f"must be at least 1, got {self.horizon}", key="horizon")

    @property
    def action_space(self) -> spaces.Space[Any]:
        """Of one environment."""
        return spaces.Box(-1.0, 1.0, (ACTION_SIZES[self.action_type],), np.float32)

    @property
    def render_fps(self) -> int:
        """Control periods a second."""
        return round(1e6 / self.simulator.control_period_us)

    def show(self, core: DrivingCore, slot: int) -> NDArray[np.uint8]:
        """A slot's picture [400,*,3] uint8 RGB by `view`, with the plan that it is driving by."""
        from alpagym_runtime.simulators.embedded.views import show

        return show(cast("EmbeddedSimulator", core.simulator), slot, self.view)

    def decisions(self, actions: Any, speed_mps: NDArray[Any]) -> Decision:
        """What actions [N,…] of the space mean, from the present speeds [N]; ValueError for other shapes and NaN."""
        values, size = np.asarray(actions, np.float32), ACTION_SIZES[self.action_type]
        if values.shape != (len(speed_mps), size) or not np.isfinite(values).all():
            raise ValueError(f"action must be {size} finite numbers, got {values.shape[1:]}: {values}")
        return decision_from_actions(self.action_type, values, speed_mps)

    def observer(self) -> Observer:
        """What writes observations."""
        return Observer(self.policy, self.layout)

    def core(self, slots: int) -> DrivingCore:
        """A running world with so many slots."""
        simulator = self.simulator.build(self.policy, self.dataset, slots, reward_labels(self.reward))
        return DrivingCore(simulator, build_terms(self.reward, simulator), self.policy)


def embedded_setup(
    *,
    suite: str = "train",
    scene_id: str | None = None,
    scenes: int = 448,
    dataset: str = "procedural",
    dataset_path: str | None = None,
    action_type: str = "unicycle",
    reward: str | Mapping[str, Any] = "driving",
    horizon: int = 35,
    control_period_us: int = 200_000,
    cameras: Sequence[str] | None = None,
    camera_size: Sequence[int] = (96, 160),
    camera_frames: int = 1,
    frame_step_us: int = 100_000,
    camera_options: Mapping[str, Any] | None = None,
    view: str = "birds_eye",
    layout: str = "flat",
) -> DrivingSetup:
    """The embedded world; `DrivingEnv` documents the arguments."""
    names = list(cameras or [])
    if len(set(names)) != len(names):
        raise ConfigError(f"names a camera twice: {names}", key="cameras")
    if len(camera_size) != 2:
        raise ConfigError(f"must be height and width, got {camera_size!r}", key="camera_size")
    height, width = camera_size
    policy = PolicySpec(
        FIELDS if names else (*FIELDS, "actors_rig"),
        cameras=dict.fromkeys(names, (int(height), int(width))),
        frames=camera_frames,
        frame_step_us=frame_step_us,
    )
    seen = build_section(CamerasConfig, camera_options or {}, "camera_options")
    check_cameras(seen, policy)
    check_choice("view", view, VIEWS)
    return DrivingSetup(
        policy=policy,
        view=view,
        dataset=DatasetSection(
            source=dataset,
            path=dataset_path,
            scene_ids=None if scene_id is None else [scene_id],
            split=suite,
            train_scenes=scenes,
            val_scenes=scenes,
            test_scenes=scenes,
        ),
        simulator=EmbeddedConfig(control_period_us=control_period_us, cameras=seen),
        reward=reward_section(reward),
        action_type=action_type,
        layout=layout,
        horizon=horizon,
    )


def base_seed(generator: np.random.Generator) -> int:
    """The number from which a seeded environment's episodes are counted."""
    return int(generator.integers(2**63))


def seeded_base(seed: int) -> int:
    """`base_seed` of an environment that is reset with `seed`."""
    return base_seed(seeding.np_random(seed)[0])


def draw_requests(
    bases: NDArray[np.uint64],
    episodes: NDArray[np.int64],
    scenes: tuple[str, ...],
    chosen: list[str | None],
    horizon: int,
) -> list[EpisodeRequest]:
    """Episode number `episodes[i]` of the environment with base `bases[i]`, for n environments.

    A pure function of both, so a slot of a vector environment starts what the single one with its seed would.

    Args:
        bases: [n], `base_seed`.
        episodes: [n], how many episodes each has begun before.
        scenes: to draw from.
        chosen: n scene ids that replace the drawn ones; None draws.
        horizon: in ticks.

    """
    drawn = (uniform(mix(bases, episodes, 0), 1)[:, 0] * len(scenes)).astype(np.int64).tolist()
    # 63 bits: signed integers hold them too.
    worlds, policies = ((mix(bases, episodes, stream) >> np.uint64(1)).tolist() for stream in (1, 2))
    return [
        EpisodeRequest(scenes[index] if name is None else name, -1, horizon, world, policy)
        for index, name, world, policy in zip(drawn, chosen, worlds, policies, strict=True)
    ]
