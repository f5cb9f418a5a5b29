"""The Gymnasium environment of NVIDIA's AlpaSim: slot 0 of its simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from alpagym_runtime.envs.core import CoreBatch
from alpagym_runtime.envs.driving_env import DrivingEnv
from alpagym_runtime.envs.spaces import observation_space
from alpagym_runtime.errors import ConfigError
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.alpasim.config import AlpasimConfig, ServerConfig
from alpagym_runtime.types import PolicySpec


class AlpasimEnv(DrivingEnv):
    """Drive a car along a route in AlpaSim, photoreal, at the runtime's `address`.

    ## Action space
    As `alpagym/Embedded-v0`, without `control`: AlpaSim drives plans.

    ## Observation space
    As there, without `actors_rig` (AlpaSim reports no road users), and a picture a camera: `camera_<name>`, flat
    [h,w,3K] uint8 RGB, nested [K,h,w,3].

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
        driver_host: name under which AlpaSim reaches this process, if it is not this machine.
        others: as `DrivingEnv`.

    Raises:
        SimulatorError: no runtime answers, or the rollout failed; the episode is void.

    """

    # A rollout waits for a free place in the runtime, loads its scene and renders the warm-up.
    _timeout_s = 600.0

    def __init__(
        self,
        *,
        address: str,
        cameras: Sequence[str] = (),
        height: int = 320,
        width: int = 512,
        frames: int = 1,
        frame_step_us: int = 100_000,
        scene_id: str | None = None,
        action_type: str = "unicycle",
        reward: str | dict[str, Any] = "driving",
        horizon: int = 35,
        control_period_us: int = 100_000,
        force_gt_duration_us: int = 1_700_000,
        driver_host: str | None = None,
        nested: bool = False,
        debug: bool = False,
        render_mode: str | None = None,
    ) -> None:
        if action_type == "control":
            raise ConfigError("AlpaSim drives plans; use unicycle or plan", key="action_type")
        if render_mode is not None:
            raise ConfigError("AlpaSim's pictures are in the observation; it must be null", key="render_mode")
        super().__init__(
            scene_id=scene_id,
            action_type=action_type,
            reward=reward,
            horizon=horizon,
            control_period_us=control_period_us,
            nested=nested,
            debug=debug,
        )
        sizes: Mapping[str, tuple[int, int]] = dict.fromkeys(cameras, (height, width))
        self._policy = PolicySpec(cameras=sizes, frames=frames, frame_step_us=frame_step_us)
        self._dataset = DatasetSection(scene_ids=None if scene_id is None else [scene_id])
        outside = driver_host is not None
        self._simulator_config = AlpasimConfig(  # type: ignore[assignment]
            address=address,
            control_period_us=control_period_us,
            force_gt_duration_us=force_gt_duration_us,
            driver_host=driver_host,
            frames="none",
            server=ServerConfig(host="0.0.0.0" if outside else "127.0.0.1"),
        )
        parts = dict(observation_space(self._policy, self._flat).spaces)
        for name, size in sizes.items():
            shape = (*size, 3 * frames) if self._flat else (frames, *size, 3)
            parts[f"camera_{name}"] = spaces.Box(0, 255, shape, np.uint8)
        self._space = spaces.Dict(parts)
        self.observation_space = self._space  # type: ignore[assignment]  # Gymnasium's Dict is typed by Any

    def _observe(self, batch: CoreBatch) -> dict[str, NDArray[Any]]:
        debug, self._debug = self._debug, False
        observation = super()._observe(batch)
        self._debug = debug
        for name in self._policy.cameras:
            picture = batch.observation[f"camera_{name}"][0]
            observation[f"camera_{name}"] = np.concatenate(list(picture), axis=-1) if self._flat else picture
        if debug:
            assert self._space.contains(observation), {k: (v.shape, v.dtype) for k, v in observation.items()}
        return observation
