"""The Gymnasium environment of the open-loop world: slot 0 of its simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from alpagym_plugins import check_choice
from alpagym_runtime.envs.actions import ACTION_SIZES, PLAN_SCALE, decision_from_actions
from alpagym_runtime.envs.core import CoreBatch, DrivingCore, build_terms, reward_labels
from alpagym_runtime.envs.presets import reward_section
from alpagym_runtime.envs.spaces import fit, observation_space
from alpagym_runtime.errors import ConfigError, ResetNeededError, SimulatorError
from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.policies.unicycle import PLAN_STEPS
from alpagym_runtime.rewards.pai import GATES
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.pai.codec import TrajectoryCodec
from alpagym_runtime.simulators.pai.config import PaiConfig
from alpagym_runtime.simulators.pai.simulator import text_trace
from alpagym_runtime.types import Decision, EpisodeRequest, PolicySpec

SLOT = np.zeros(1, np.int64)
CODEC = TrajectoryCodec()
CHARACTERS = frozenset(map(chr, range(32, 127))) | {"\n"}
MAX_TEXT = 8192

# What the simulator scores for each kind of action.
SCORED = {"unicycle": "plan", "plan": "plan", "xy": "plan", "tokens": "tokens", "text": "text"}


class PaiEnv(gymnasium.Env[dict[str, NDArray[Any]], Any]):
    """See one sample of the PhysicalAI-AV dataset, answer one plan, and be scored against what was driven.

    ## Action space
    `action_type`: `plan` (Box(-1, 1, (192,)): 64 poses, x × 100 m, y × 50 m, yaw × π in the rig frame of the key frame,
    10 Hz), `xy` (Box(-1, 1, (128,)): the same without yaw, which is the path's direction), `unicycle` (as in
    `alpagym/Embedded-v0`), `tokens` (MultiDiscrete: 128 trajectory tokens), `text` (Text: a completion; its tokens and
    its reasoning are scored).

    ## Observation space
    `Dict`, rig frame: `ego_history_rig` [16,7] with `ego_history_mask`, `ego_dynamics_rig` [7], and a picture a camera,
    `camera_<name>`: flat [h,w,3K] uint8 RGB, nested [K,h,w,3]. The recording's reasoning is never in it.

    ## Rewards
    `pai_motion`, `pai_joint`, `pai_joint_published`, or a mapping of terms, as in the run config.

    ## Starting state
    A sample of the split, drawn from the seed, or `options={"scene_id": …}` at reset.

    ## Episode end
    Terminated after one step. `info` holds the terms, every measure (`measures`: ade_m, min_ade, comfort, …) and, for
    each published reward, `details`: traj_L2, comfort_reward, reasoning_score, and `gate`, the gate that failed.

    ## Arguments
    All are plain JSON values.

    Args:
        path: the dataset: a plain tree or a hub cache.
        cameras: names without `camera_`, in the order of the observation.
        height, width: of the pictures, px.
        frames: pictures a camera, 0.1 s apart.
        round_trip: score plans through the trajectory tokens and back, as the published rewards do.
        workers, cache_mb: of the loader; 0 workers decode in this process.
        dataset: further keys of the config section `dataset`, such as split, chunk_ids, reasoning, key_frame.

    Raises:
        ResetNeededError: `step` before `reset` or after the end.
        SimulatorError: the sample cannot be read; the episode is void.

    """

    metadata = {"render_modes": []}  # noqa: RUF012 (Gymnasium's own convention)
    _timeout_s = 120.0

    def __init__(
        self,
        *,
        path: str,
        cameras: Sequence[str] = (),
        height: int = 320,
        width: int = 576,
        frames: int = 4,
        action_type: str = "plan",
        reward: str | dict[str, Any] = "pai_motion",
        scene_id: str | None = None,
        round_trip: bool = False,
        workers: int = 0,
        cache_mb: int = 256,
        nested: bool = False,
        dataset: dict[str, Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        check_choice("action_type", action_type, SCORED)
        if render_mode is not None:
            raise ConfigError("samples are shown by `alpagym pai show`; it must be null", key="render_mode")
        if round_trip and SCORED[action_type] != "plan":
            raise ConfigError(f"{action_type!r} are tokens already", key="round_trip")
        self.render_mode, self.action_type, self._flat = render_mode, action_type, not nested
        self._policy = PolicySpec(
            fields=("ego_history_rig", "ego_dynamics_rig"),
            cameras=dict.fromkeys(cameras, (height, width)),
            frames=frames,
        )
        chosen = {"scene_ids": None if scene_id is None else [scene_id], "split": "train", **(dataset or {})}
        self._dataset = DatasetSection(source="pai", path=path, **chosen)
        scored = "round_trip" if round_trip else SCORED[action_type]
        self._config = PaiConfig(scored=scored, workers=workers, cache_mb=cache_mb)
        self._reward = reward_section(reward)
        parts = dict(observation_space(self._policy, self._flat).spaces)
        for name, size in self._policy.cameras.items():
            shape = (*size, 3 * frames) if self._flat else (frames, *size, 3)
            parts[f"camera_{name}"] = spaces.Box(0, 255, shape, np.uint8)
        self.observation_space = spaces.Dict(parts)  # type: ignore[assignment]  # Gymnasium's Dict is typed by Any
        self.action_space = action_space(action_type)
        self._core: DrivingCore | None = None
        self._batch: CoreBatch | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Show a sample."""
        super().reset(seed=seed)
        if self._core is None:
            simulator = self._config.build(self._policy, self._dataset, 1, reward_labels(self._reward))
            self._core = DrivingCore(simulator, build_terms(self._reward, simulator), self._policy)
        scenes = self._core.spec.scenes
        scene_id = str((options or {}).get("scene_id", scenes[int(self.np_random.integers(len(scenes)))]))
        self._core.start(SLOT, [EpisodeRequest(scene_id, -1, 1)])
        return self._observe(self._receive()), {"scene_id": scene_id}

    def step(self, action: Any) -> tuple[dict[str, NDArray[Any]], float, bool, bool, dict[str, Any]]:
        """Score an answer; the episode ends."""
        if self._core is None or self._batch is None:
            raise ResetNeededError("call reset() before step(): the episode has not begun or is over")
        speed = self._batch.observation["ego_dynamics_rig"][:, 0].astype(np.float64)
        self._core.send(SLOT, decision_of(self.action_type, [action], speed))
        batch = self._receive()
        observation = self._observe(batch)
        info = info_of(self._core, batch, 0)
        self._batch = None
        return observation, float(batch.rewards[0]), True, False, info

    def close(self) -> None:
        """Give the simulator back; reset makes a new one."""
        if self._core is not None:
            self._core.close()
        self._core = self._batch = None

    def _receive(self) -> CoreBatch:
        assert self._core is not None
        batch = self._core.receive(1, self._timeout_s)
        if not len(batch.tick):
            raise SimulatorError(f"the sample was not decoded in {self._timeout_s} s", code="TIMEOUT")
        return batch

    def _observe(self, batch: CoreBatch) -> dict[str, NDArray[Any]]:
        failure = batch.tick.failure[0]
        if failure is not None:
            self._batch = None
            raise SimulatorError(failure.text, code=failure.code, permanent=failure.kind == "permanent")
        self._batch = batch
        observation = fit(batch.observation, self._policy, self._flat, 0)
        for name in self._policy.cameras:
            picture = batch.observation[f"camera_{name}"][0]
            observation[f"camera_{name}"] = np.concatenate(list(picture), axis=-1) if self._flat else picture
        return observation


def action_space(action_type: str) -> spaces.Space[Any]:
    """One row's space."""
    if action_type == "tokens":
        return spaces.MultiDiscrete(np.full(CODEC.tokens, CODEC.bins, np.int64))
    if action_type == "text":
        return spaces.Text(MAX_TEXT, min_length=0, charset=CHARACTERS)
    size = 2 * PLAN_STEPS if action_type == "xy" else ACTION_SIZES[action_type]
    return spaces.Box(-1.0, 1.0, (size,), np.float32)


def decision_of(action_type: str, actions: Sequence[Any], speed_mps: NDArray[np.float64]) -> Decision:
    """Decisions of N rows; ValueError where an action has another shape or is not finite."""
    if action_type == "text":
        decision = plan_decision(np.zeros((len(actions), PLAN_STEPS, 3)))
        decision.trace["text"] = text_trace([str(action) for action in actions])
        return decision
    values = np.stack([np.asarray(action) for action in actions])
    shape = action_space(action_type).shape
    if values.shape[1:] != shape or not np.isfinite(values).all():
        raise ValueError(f"action must be {shape} finite numbers, got {values.shape[1:]}: {values}")
    if action_type == "tokens":
        decision = plan_decision(np.zeros((len(actions), PLAN_STEPS, 3)))
        decision.trace["tokens"] = values.astype(np.int64)
        return decision
    if action_type == "xy":
        path = np.clip(values.astype(np.float64), -1.0, 1.0).reshape(-1, PLAN_STEPS, 2) * PLAN_SCALE[:2]
        return plan_decision(with_heading(path))
    return decision_from_actions(action_type, values.astype(np.float32), speed_mps)


def with_heading(path: NDArray[np.float64]) -> NDArray[np.float64]:
    """Plans [...,T,3] of points [...,T,2]: yaw is the direction from the point before; where it stands, the last one's.

    Steps below 1 cm say nothing about a direction.
    """
    step = np.diff(path, axis=-2, prepend=np.zeros_like(path[..., :1, :]))
    moves = np.hypot(step[..., 0], step[..., 1]) > 0.01
    yaw = np.arctan2(step[..., 1], step[..., 0])
    last = np.maximum.accumulate(np.where(moves, np.arange(path.shape[-2]), -1), axis=-1)
    held = np.where(last < 0, 0.0, np.take_along_axis(yaw, np.maximum(last, 0), axis=-1))
    return np.concatenate([path, held[..., None]], axis=-1)


def info_of(core: DrivingCore, batch: CoreBatch, row: int) -> dict[str, Any]:
    """What a scored row's `info` holds."""
    measures = batch.tick.measures
    info: dict[str, Any] = {
        "terms": {name: float(paid[row]) for name, paid in batch.terms.items()},
        "measures": {name: float(v[row]) for name, v in measures.values.items() if measures.valid[name][row]},
        "ended": "scored",
        "details": {},
    }
    for name, parts in core.explain(batch.tick).items():
        details: dict[str, Any] = {key: float(values[row]) for key, values in parts.items()}
        details["gate"] = GATES[int(details["gate"])]
        info["details"][name] = details
    return info
