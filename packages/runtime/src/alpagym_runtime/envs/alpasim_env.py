"""The Gymnasium environment of NVIDIA's AlpaSim: slots of its simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from alpagym_runtime.envs.driving_env import DrivingEnv
from alpagym_runtime.envs.presets import reward_section
from alpagym_runtime.envs.setup import DrivingSetup
from alpagym_runtime.envs.vector_env import DrivingVectorEnv
from alpagym_runtime.errors import ConfigError
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.alpasim.config import AlpasimConfig, ServerConfig
from alpagym_runtime.types import PolicySpec


def alpasim_setup(
    *,
    address: str,
    cameras: Sequence[str] = (),
    height: int = 320,
    width: int = 512,
    frames: int = 1,
    frame_step_us: int = 100_000,
    scene_id: str | None = None,
    action_type: str = "unicycle",
    reward: str | Mapping[str, Any] = "driving",
    horizon: int = 35,
    control_period_us: int = 100_000,
    force_gt_duration_us: int = 1_700_000,
    driver_host: str | None = None,
    timeout_s: float = 600.0,
    layout: str = "flat",
) -> DrivingSetup:
    """AlpaSim's world; `AlpasimEnv` documents the arguments."""
    if action_type == "control":
        raise ConfigError("AlpaSim drives plans; use unicycle or plan", key="action_type")
    sizes = dict.fromkeys(cameras, (height, width))
    return DrivingSetup(
        policy=PolicySpec(cameras=sizes, frames=frames, frame_step_us=frame_step_us),
        dataset=DatasetSection(scene_ids=None if scene_id is None else [scene_id]),
        simulator=AlpasimConfig(
            address=address,
            control_period_us=control_period_us,
            force_gt_duration_us=force_gt_duration_us,
            driver_host=driver_host,
            frames="none",
            server=ServerConfig(host="127.0.0.1" if driver_host is None else "0.0.0.0"),
        ),
        reward=reward_section(reward),
        action_type=action_type,
        layout=layout,
        horizon=horizon,
        timeout_s=timeout_s,
    )


class AlpasimEnv(DrivingEnv):
    """Drive a car along a route in AlpaSim, photoreal, at the runtime's `address`.

    ## Action space
    As `alpagym/Embedded-v0`, without `control`: AlpaSim drives plans.

    ## Observation space
    As there, without `actors_rig` (AlpaSim reports no road users) and so without `low_dim`, and a picture a camera:
    `camera_<name>`, flat [h,w,3K] uint8 RGB, nested [K,h,w,3].

    ## Rewards
    As there. Events come with the episode's end, so terms that read them are paid on the last tick
    (`info["reward_is_late"]`).

    ## Starting state
    A scene of AlpaSim's, drawn from the seed, or `scene_id`, at the handover from the recorded drive.

    ## Episode end
    Truncated at `horizon` or where AlpaSim ends; AlpaSim does not end a drive at a collision.

    ## Arguments
    All are plain JSON values.

    Args:
        address: HOST:PORT of a running AlpaSim runtime that was started with `driver_source=external_dynamic`.
        cameras: names of the cameras to see.
        height, width: of the pictures, px.
        frames: pictures a camera, `frame_step_us` apart.
        control_period_us, force_gt_duration_us: AlpaSim's own.
        timeout_s: longest silence; a rollout waits for a free place in the runtime, loads its scene and renders the
            warm-up.
        driver_host: name under which AlpaSim reaches this process, if it is not this machine.
        others: as `DrivingEnv`.

    Raises:
        SimulatorError: no runtime answers, or the rollout failed; the episode is void.

    """

    metadata = {"render_modes": [], "render_fps": 10}  # noqa: RUF012 (Gymnasium's own convention)
    make_setup = staticmethod(alpasim_setup)


class AlpasimVectorEnv(DrivingVectorEnv):
    """Many rollouts of AlpaSim at once, as `DrivingVectorEnv`; the arguments are those of `AlpasimEnv`."""

    metadata = {"render_modes": []}  # noqa: RUF012 (Gymnasium's own convention)
    make_setup = staticmethod(alpasim_setup)
