"""The Gymnasium environment: slot 0 of a batch core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.envs.core import CoreBatch, DrivingCore
from alpagym_runtime.envs.setup import TASK, DrivingSetup, base_seed, draw_requests, embedded_setup
from alpagym_runtime.envs.spaces import explain, take_row
from alpagym_runtime.errors import ConfigError, ResetNeededError, SimulatorError
from alpagym_runtime.types import Ended

SLOT = np.zeros(1, np.int64)


class DrivingEnv(gymnasium.Env[Any, NDArray[np.float32]]):
    """Drive a car along a route, past other traffic, in the embedded world.

    ## Action space
    `Box(-1, 1, (D,), float32)`. `action_type`: `unicycle` (D = 16: acceleration × 6 m/s² and curvature × 0.25 1/m at
    the plan's knots 0, 0.5, 1, 1.5, 2, 3, 4.5 and 6.4 s; zero keeps speed and heading), `plan` (D = 192: 64 poses,
    x × 100 m, y × 50 m, yaw × π in the rig frame), `control` (D = 2: acceleration × 6 m/s², steering × 0.6 rad for
    one tick).

    ## Observation space
    Rig frame (x forward, y left); `layout` says how. `flat` and `nested`: `Dict` of `ego_history_rig` [16,7] with
    `ego_history_mask`, `ego_dynamics_rig` [7], `route_rig` [20,2] with `route_mask`, `actors_rig` [8,9] with
    `actors_mask`; flat are 1-D vectors, nested have `time_us` [1] too. `low_dim`: one `Box(-1, 1)` of speed, route and
    nearest actors, scaled. `lerobot`: `agent_pos` (dynamics), `environment_state` (route, actors; 0 where masked) and
    with cameras `pixels` (a picture each), as LeRobot names them.

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
    All are plain JSON values. `dataset`: procedural | road | commonroad | files, with `dataset_path`. `suite`: train |
    val | test, for roads also hard | bench. `scenes`: how many of it. `cameras`: names (`front`, `front_wide`, `left`,
    `right`, `rear`, the four of PAI); `camera_size` [h,w], `camera_frames` K, `frame_step_us` between them;
    `camera_options`: the keys of `simulator.cameras`. `view`: what `render()` shows: birds_eye | camera | both. `debug`
    checks every observation. The others are named above.

    Raises:
        ResetNeededError: `step` before `reset` or after the end.
        SimulatorError: the scene cannot be driven; the episode is void.

    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012 (Gymnasium's own convention)
    make_setup: ClassVar[Callable[..., DrivingSetup]] = staticmethod(embedded_setup)

    task = TASK
    task_description = TASK

    def __init__(self, *, debug: bool = False, render_mode: str | None = None, **arguments: Any) -> None:
        self._setup = self.make_setup(**arguments)
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ConfigError(f"must be one of {self.metadata['render_modes']}, got {render_mode!r}", key="render_mode")
        self.render_mode = render_mode
        self.action_type = self._setup.action_type
        self.metadata = {**self.metadata, "render_fps": self._setup.render_fps}
        self._debug = debug
        self._observer = self._setup.observer()
        self.observation_space = self._observer.space
        self.action_space = self._setup.action_space  # type: ignore[assignment]  # Box is typed by any number
        # Made at the first reset: vector environments build one in the parent that is never used.
        self._core: DrivingCore | None = None
        self._batch: CoreBatch | None = None
        self._sums: dict[str, float] = {}
        self._generator: np.random.Generator | None = None
        self._base, self._episode = 0, 0

    @property
    def _max_episode_steps(self) -> int:
        """LeRobot asks for it by this name."""
        return self._setup.horizon

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; all of its randomness comes from the seed, or goes on from the last one."""
        super().reset(seed=seed)
        if self._core is None:
            self._core = self._setup.core(1)
        if self._generator is not self.np_random:
            self._generator, self._episode = self.np_random, 0
            self._base = base_seed(self.np_random)
        chosen = (options or {}).get("scene_id")
        [request] = draw_requests(
            np.array([self._base], np.uint64),
            np.array([self._episode]),
            self._core.spec.scenes,
            [None if chosen is None else str(chosen)],
            self._setup.horizon,
        )
        self._episode += 1
        self._core.start(SLOT, [request])
        self._sums = dict.fromkeys(self._core.terms, 0.0)
        return self._observe(self._receive()), {"scene_id": request.scene_id}

    def step(self, action: NDArray[np.float32]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Drive one tick."""
        if self._core is None or self._batch is None:
            raise ResetNeededError("call reset() before step(): the episode has not begun or is over")
        speed = self._batch.observation["ego_dynamics_rig"][:, 0]
        self._core.send(SLOT, self._setup.decisions([action], speed))
        batch = self._receive()
        observation = self._observe(batch)
        terms = {name: float(paid[0]) for name, paid in batch.terms.items()}
        for name, paid in terms.items():
            self._sums[name] += paid
        info: dict[str, Any] = {"terms": terms}
        if self._core.reward_is_late:
            info["reward_is_late"] = True
        reward, code = float(batch.rewards[0]), int(batch.tick.ended[0])
        if not code:
            return observation, reward, False, False, info
        ended, episode = Ended(code), batch.episodes[0]
        score = episode.driving_score
        info |= {"ended": ended.name.lower(), "driving_score": score, "is_success": bool(score >= 1.0)}
        info["initial_fault"] = episode.initial_fault
        info["episode_terms"] = dict(self._sums)
        info |= self._at_end(batch)
        self._batch = None
        return observation, reward, ended.terminated, ended.truncated, info

    def _at_end(self, batch: CoreBatch) -> dict[str, Any]:
        """What a world adds to the last `info`."""
        return {}

    def render(self) -> NDArray[np.uint8] | None:
        """Picture [400,*,3] uint8 RGB of the present moment, by `view`, with the plan that is being driven."""
        if self.render_mode is None:
            gymnasium.logger.warn("render() needs render_mode='rgb_array' at construction")
            return None
        if self._core is None:
            raise ResetNeededError("call reset() before render()")
        return self._setup.show(self._core, 0)

    def close(self) -> None:
        """Give the simulator back; reset makes a new one."""
        if self._core is not None:
            self._core.close()
        self._core = self._batch = None

    def _receive(self) -> CoreBatch:
        assert self._core is not None
        batch = self._core.receive(1, self._setup.timeout_s)
        if not len(batch.tick):
            self._batch = None
            raise SimulatorError(f"the simulator stayed silent for {self._setup.timeout_s} s", code="TIMEOUT")
        return batch

    def _observe(self, batch: CoreBatch) -> Any:
        failure = batch.tick.failure[0]
        if failure is not None:
            self._batch = None
            raise SimulatorError(failure.text, code=failure.code, permanent=failure.kind == "permanent")
        self._batch = batch
        observation = take_row(self._observer.read(batch.observation), 0)
        if self._debug:
            problem = explain(self.observation_space, observation)
            assert problem is None, problem
        return observation
