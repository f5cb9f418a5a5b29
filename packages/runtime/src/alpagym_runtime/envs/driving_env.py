"""The Gymnasium environment: slot 0 of a batch core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from alpagym_plugins import check_choice
from alpagym_runtime.envs.actions import ACTION_SIZES, check_action_type, decision_from_actions
from alpagym_runtime.envs.core import CoreBatch, DrivingCore, build_terms
from alpagym_runtime.envs.presets import reward_section
from alpagym_runtime.envs.spaces import explain, fit, observation_space
from alpagym_runtime.errors import ConfigError, ResetNeededError, SimulatorError
from alpagym_runtime.run_config import DatasetSection, build_section
from alpagym_runtime.simulators.embedded.camera_config import CamerasConfig, check_cameras
from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
from alpagym_runtime.types import Ended, EpisodeRequest, PolicySpec

if TYPE_CHECKING:
    from alpagym_runtime.simulators.embedded.simulator import EmbeddedSimulator

VIEWS = ("birds_eye", "camera", "both")
SLOT = np.zeros(1, np.int64)


class DrivingEnv(gymnasium.Env[dict[str, NDArray[Any]], NDArray[np.float32]]):
    """Drive a car along a route, past recorded traffic, in the embedded world.

    ## Action space
    `Box(-1, 1, (D,), float32)`. `action_type`: `unicycle` (D = 16: acceleration × 6 m/s² and curvature × 0.25 1/m at
    the plan's knots 0, 0.5, 1, 1.5, 2, 3, 4.5 and 6.4 s; zero keeps speed and heading), `plan` (D = 192: 64 poses,
    x × 100 m, y × 50 m, yaw × π in the rig frame), `control` (D = 2: acceleration × 6 m/s², steering × 0.6 rad for
    one tick).

    ## Observation space
    `Dict`, rig frame (x forward, y left): `ego_history_rig` [16,7] with `ego_history_mask`, `ego_dynamics_rig` [7],
    `route_rig` [20,2] with `route_mask`, `actors_rig` [8,9] with `actors_mask`; flat vectors unless `nested`.

    With `cameras`, `actors_rig` gives way to a picture a camera, `camera_<name>`: uint8 RGB [h,w,3K], the K frames'
    channels behind each other, oldest first; nested [K,h,w,3] with `camera_<name>_time_us`.

    ## Rewards
    The sum of the terms of `reward`: a preset's name or a mapping of terms, as in the run config.

    ## Starting state
    A scene of the suite, drawn from the seed, or `scene_id`; `options={"scene_id": …}` at reset chooses one.

    ## Episode end
    Terminated by a collision, leaving the road, the goal, or a reward term; truncated at `horizon` ticks or where the
    recording ends. `info` at the end holds `ended`, `driving_score`, `is_success`, `initial_fault` (a violation that
    was already true at the start; it is not scored) and the terms' sums.

    ## Arguments
    All are plain JSON values. `suite`: train | val | test. `cameras`: names (`front`, `front_wide`, `left`, `right`,
    `rear`, the four of PAI); `camera_size` [h,w], `camera_frames` K, `frame_step_us` between them; `camera_options`:
    the keys of `simulator.cameras`. `view`: what `render()` shows: birds_eye | camera | both.

    Raises:
        ResetNeededError: `step` before `reset` or after the end.
        SimulatorError: the scene cannot be driven; the episode is void.

    """

    _timeout_s = 60.0
    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012 (Gymnasium's own convention)

    def __init__(
        self,
        *,
        suite: str = "train",
        scene_id: str | None = None,
        scenes: int = 448,
        dataset: str = "procedural",
        dataset_path: str | None = None,
        action_type: str = "unicycle",
        reward: str | dict[str, Any] = "driving",
        horizon: int = 35,
        control_period_us: int = 200_000,
        cameras: list[str] | None = None,
        camera_size: tuple[int, int] | list[int] = (96, 160),
        camera_frames: int = 1,
        frame_step_us: int = 100_000,
        camera_options: dict[str, Any] | None = None,
        view: str = "birds_eye",
        nested: bool = False,
        debug: bool = False,
        render_mode: str | None = None,
    ) -> None:
        check_action_type(action_type)
        names = list(cameras or [])
        if len(set(names)) != len(names):
            raise ConfigError(f"names a camera twice: {names}", key="cameras")
        if len(camera_size) != 2:
            raise ConfigError(f"must be height and width, got {camera_size!r}", key="camera_size")
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ConfigError(f"must be one of {self.metadata['render_modes']}, got {render_mode!r}", key="render_mode")
        if horizon < 1:
            raise ConfigError(f"must be at least 1, got {horizon}", key="horizon")
        self.render_mode = render_mode
        self.action_type = action_type
        self.metadata = {**self.metadata, "render_fps": round(1e6 / control_period_us)}
        self._horizon, self._flat, self._debug = horizon, not nested, debug
        fields = ("ego_history_rig", "ego_dynamics_rig", "route_rig")
        self._policy = PolicySpec(
            fields if names else (*fields, "actors_rig"),
            cameras=dict.fromkeys(names, (int(camera_size[0]), int(camera_size[1]))),
            frames=camera_frames,
            frame_step_us=frame_step_us,
        )
        self._dataset = DatasetSection(
            source=dataset,
            path=dataset_path,
            scene_ids=None if scene_id is None else [scene_id],
            split=suite,
            train_scenes=scenes,
            val_scenes=scenes,
            test_scenes=scenes,
        )
        seen = build_section(CamerasConfig, camera_options or {}, "camera_options")
        check_choice("view", view, VIEWS)
        check_cameras(seen, self._policy)
        self._view = view
        self._simulator_config = EmbeddedConfig(control_period_us=control_period_us, cameras=seen)
        self._reward = reward_section(reward)
        self._space = observation_space(self._policy, self._flat)
        self.observation_space = self._space  # type: ignore[assignment]  # Gymnasium's Dict is typed by Any
        self.action_space = spaces.Box(-1.0, 1.0, (ACTION_SIZES[action_type],), np.float32)
        # Made at the first reset: vector environments build one in the parent that is never used.
        self._core: DrivingCore | None = None
        self._batch: CoreBatch | None = None
        self._sums: dict[str, float] = {}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Begin an episode; all of its randomness comes from the seed, or goes on from the last one."""
        super().reset(seed=seed)
        if self._core is None:
            simulator = self._simulator_config.build(self._policy, self._dataset, 1, ())
            self._core = DrivingCore(simulator, build_terms(self._reward, simulator), self._policy)
        scenes = self._core.spec.scenes
        drawn = self.np_random.integers(0, [len(scenes), 2**63, 2**63])
        scene_id = str((options or {}).get("scene_id", scenes[int(drawn[0])]))
        request = EpisodeRequest(scene_id, -1, self._horizon, int(drawn[1]), int(drawn[2]))
        self._core.start(SLOT, [request])
        self._sums = dict.fromkeys(self._core.terms, 0.0)
        return self._observe(self._receive()), {"scene_id": scene_id}

    def step(self, action: NDArray[np.float32]) -> tuple[dict[str, NDArray[Any]], float, bool, bool, dict[str, Any]]:
        """Drive one tick."""
        if self._core is None or self._batch is None:
            raise ResetNeededError("call reset() before step(): the episode has not begun or is over")
        speed = self._batch.observation["ego_dynamics_rig"][:, 0].astype(np.float64)
        values = np.asarray(action, np.float32).reshape(1, -1)
        if values.shape[1] != ACTION_SIZES[self.action_type] or not np.isfinite(values).all():
            raise ValueError(
                f"action must be {ACTION_SIZES[self.action_type]} finite numbers, got {np.shape(action)}: {action}"
            )
        self._core.send(SLOT, decision_from_actions(self.action_type, values, speed))
        batch = self._receive()
        observation = self._observe(batch)
        ended = Ended(int(batch.tick.ended[0]))
        terms = {name: float(paid[0]) for name, paid in batch.terms.items()}
        for name, paid in terms.items():
            self._sums[name] += paid
        info: dict[str, Any] = {"terms": terms}
        if self._core.reward_is_late:
            info["reward_is_late"] = True
        if ended != Ended.RUNNING:
            episode = batch.episodes[0]
            score = episode.driving_score
            info |= {"ended": ended.name.lower(), "driving_score": score, "is_success": bool(score >= 1.0)}
            info["initial_fault"] = episode.initial_fault
            info["episode_terms"] = dict(self._sums)
            self._batch = None
        return observation, float(batch.rewards[0]), ended.terminated, ended.truncated, info

    def render(self) -> NDArray[np.uint8] | None:
        """Picture [400,*,3] uint8 RGB of the present moment, by `view`, with the plan that is being driven."""
        if self.render_mode is None:
            gymnasium.logger.warn("render() needs render_mode='rgb_array' at construction")
            return None
        if self._core is None:
            raise ResetNeededError("call reset() before render()")
        from alpagym_runtime.simulators.embedded.views import show

        return show(cast("EmbeddedSimulator", self._core.simulator), 0, self._view)

    def close(self) -> None:
        """Give the simulator back; reset makes a new one."""
        if self._core is not None:
            self._core.close()
        self._core = self._batch = None

    def _receive(self) -> CoreBatch:
        assert self._core is not None
        batch = self._core.receive(1, self._timeout_s)
        if not len(batch.tick):
            self._batch = None
            raise SimulatorError(f"the simulator stayed silent for {self._timeout_s} s", code="TIMEOUT")
        return batch

    def _observe(self, batch: CoreBatch) -> dict[str, NDArray[Any]]:
        failure = batch.tick.failure[0]
        if failure is not None:
            self._batch = None
            raise SimulatorError(failure.text, code=failure.code, permanent=failure.kind == "permanent")
        self._batch = batch
        observation = fit(batch.observation, self._policy, self._flat, 0)
        if self._debug:
            problem = explain(self._space, observation)
            assert problem is None, problem
        return observation
