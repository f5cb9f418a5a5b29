"""The Gymnasium environments of the open-loop world: slots of its simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from alpagym_plugins import check_choice
from alpagym_runtime.envs.actions import ACTION_SIZES, PLAN_SCALE, decision_from_actions
from alpagym_runtime.envs.core import CoreBatch, DrivingCore
from alpagym_runtime.envs.driving_env import DrivingEnv
from alpagym_runtime.envs.infos import StepInfos, put_all, text_column
from alpagym_runtime.envs.presets import reward_section
from alpagym_runtime.envs.setup import DrivingSetup
from alpagym_runtime.envs.vector_env import DrivingVectorEnv
from alpagym_runtime.errors import ConfigError
from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.policies.unicycle import PLAN_STEPS
from alpagym_runtime.rewards.pai import GATES
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.pai.codec import TrajectoryCodec
from alpagym_runtime.simulators.pai.config import PaiConfig
from alpagym_runtime.simulators.pai.simulator import text_trace
from alpagym_runtime.types import Decision, Ended, PolicySpec

CODEC = TrajectoryCodec()
CHARACTERS = frozenset(map(chr, range(32, 127))) | {"\n"}
MAX_TEXT = 8192

# What the simulator scores for each kind of action.
SCORED = {"unicycle": "plan", "plan": "plan", "xy": "plan", "tokens": "tokens", "text": "text"}


@dataclass(frozen=True)
class PaiSetup(DrivingSetup):
    """The open-loop world with its own kinds of action."""

    def __post_init__(self) -> None:
        check_choice("action_type", self.action_type, SCORED)
        check_choice("layout", self.layout, ("flat", "nested"))

    @property
    def action_space(self) -> spaces.Space[Any]:
        """Of one environment."""
        if self.action_type == "tokens":
            return spaces.MultiDiscrete(np.full(CODEC.tokens, CODEC.bins, np.int64))
        if self.action_type == "text":
            return spaces.Text(MAX_TEXT, min_length=0, charset=CHARACTERS)
        size = 2 * PLAN_STEPS if self.action_type == "xy" else ACTION_SIZES[self.action_type]
        return spaces.Box(-1.0, 1.0, (size,), np.float32)

    @property
    def render_fps(self) -> int:
        """Nothing is rendered."""
        return 1

    def decisions(self, actions: Any, speed_mps: NDArray[Any]) -> Decision:
        """See `DrivingSetup`; N texts where the action is text."""
        blank = plan_decision(np.zeros((len(actions), PLAN_STEPS, 3)))
        if self.action_type == "text":
            blank.trace["text"] = text_trace([str(action) for action in actions])
            return blank
        values, shape = np.asarray(actions), self.action_space.shape
        if values.shape[1:] != shape or not np.isfinite(values).all():
            raise ValueError(f"action must be {shape} finite numbers, got {values.shape[1:]}: {values}")
        if self.action_type == "tokens":
            blank.trace["tokens"] = values.astype(np.int64)
            return blank
        if self.action_type == "xy":
            path = np.clip(values.astype(np.float64), -1.0, 1.0).reshape(-1, PLAN_STEPS, 2) * PLAN_SCALE[:2]
            return plan_decision(with_heading(path))
        return decision_from_actions(self.action_type, values.astype(np.float32), speed_mps)


def pai_setup(
    *,
    path: str,
    cameras: Sequence[str] = (),
    height: int = 320,
    width: int = 576,
    frames: int = 4,
    action_type: str = "plan",
    reward: str | Mapping[str, Any] = "pai_motion",
    scene_id: str | None = None,
    round_trip: bool = False,
    workers: int = 0,
    cache_mb: int = 256,
    timeout_s: float = 120.0,
    layout: str = "flat",
    dataset: Mapping[str, Any] | None = None,
) -> DrivingSetup:
    """The open-loop world; `PaiEnv` documents the arguments."""
    check_choice("action_type", action_type, SCORED)
    if round_trip and SCORED[action_type] != "plan":
        raise ConfigError(f"{action_type!r} are tokens already", key="round_trip")
    chosen = {"scene_ids": None if scene_id is None else [scene_id], "split": "train", **(dataset or {})}
    scored = "round_trip" if round_trip else SCORED[action_type]
    return PaiSetup(
        policy=PolicySpec(
            fields=("ego_history_rig", "ego_dynamics_rig"),
            cameras=dict.fromkeys(cameras, (height, width)),
            frames=frames,
        ),
        dataset=DatasetSection(source="pai", path=path, **chosen),
        simulator=PaiConfig(scored=scored, workers=workers, cache_mb=cache_mb),
        reward=reward_section(reward),
        action_type=action_type,
        layout=layout,
        horizon=1,
        timeout_s=timeout_s,
    )


class PaiEnv(DrivingEnv):
    """See one sample of the PhysicalAI-AV dataset, answer one plan, and be scored against what was driven.

    ## Action space
    `action_type`: `plan` (Box(-1, 1, (192,)): 64 poses, x × 100 m, y × 50 m, yaw × π in the rig frame of the key frame,
    10 Hz), `xy` (Box(-1, 1, (128,)): the same without yaw, which is the path's direction), `unicycle` (as in
    `alpagym/Embedded-v0`), `tokens` (MultiDiscrete: 128 trajectory tokens), `text` (Text: a completion; its tokens and
    its reasoning are scored; not in the vector environment).

    ## Observation space
    `Dict`, rig frame: `ego_history_rig` [16,7] with `ego_history_mask`, `ego_dynamics_rig` [7], and a picture a camera,
    `camera_<name>`: flat [h,w,3K] uint8 RGB, nested [K,h,w,3]. The recording's reasoning is never in it.

    ## Rewards
    `pai_motion`, `pai_joint`, `pai_joint_published`, or a mapping of terms, as in the run config.

    ## Starting state
    A sample of the split, drawn from the seed, or `options={"scene_id": …}` at reset.

    ## Episode end
    Terminated after one step. `info` holds, beside the terms, every measure (`measures`: ade_m, min_ade, comfort, …)
    and, for each published reward, `details`: traj_L2, comfort_reward, reasoning_score, and `gate`, which one failed.
    There is no driving score: nothing was driven.

    ## Arguments
    All are plain JSON values.

    Args:
        path: the dataset: a plain tree or a hub cache.
        cameras: names without `camera_`, in the order of the observation.
        height, width: of the pictures, px.
        frames: pictures a camera, 0.1 s apart.
        round_trip: score plans through the trajectory tokens and back, as the published rewards do.
        workers, cache_mb: of the loader; 0 workers decode in this process.
        timeout_s: longest wait for a sample.
        layout: flat | nested.
        dataset: further keys of the config section `dataset`, such as split, chunk_ids, reasoning, key_frame.

    Raises:
        ResetNeededError: `step` before `reset` or after the end.
        SimulatorError: the sample cannot be read; the episode is void.

    """

    metadata = {"render_modes": [], "render_fps": 1}  # noqa: RUF012 (Gymnasium's own convention)
    make_setup = staticmethod(pai_setup)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Score an answer; the episode ends."""
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, _without_score(info)

    def _at_end(self, batch: CoreBatch) -> dict[str, Any]:
        assert self._core is not None
        measures, details = scored_parts(self._core, batch)
        texts: dict[str, dict[str, Any]] = {
            name: {key: float(values[0]) for key, values in parts.items()} for name, parts in details.items()
        }
        for parts in texts.values():
            parts["gate"] = GATES[int(parts["gate"])]
        return {"measures": {name: float(values[0]) for name, values in measures.items()}, "details": texts}


class PaiVectorEnv(DrivingVectorEnv):
    """Many samples at once, as `DrivingVectorEnv`; the arguments are those of `PaiEnv`, without text actions.

    `info["measures"]` and `info["details"]` hold arrays [N] with masks, as Gymnasium batches the single one's.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 (Gymnasium's own convention)
    make_setup = staticmethod(pai_setup)

    def __init__(self, num_envs: int = 1, **arguments: Any) -> None:
        if arguments.get("action_type") == "text":
            raise ConfigError("texts are no arrays; use the single environment, or tokens", key="action_type")
        super().__init__(num_envs, **arguments)
        self._scored: dict[str, dict[str, NDArray[np.float64]]] = {}

    def step(self, actions: Any) -> tuple[Any, NDArray[np.float64], Any, Any, dict[str, Any]]:
        """Score every slot's answer; what follows is the autoreset mode's."""
        self._scored = {}
        observation, rewards, terminated, truncated, info = super().step(actions)
        place = _without_score(info.get("final_info", info))
        if self._scored:
            put_all(place, "measures", self._scored.pop("measures"), terminated)
            details: dict[str, Any] = {}
            for term, parts in self._scored.items():
                gate = parts.pop("gate")
                put_all(details, term, parts, terminated)
                rows = np.flatnonzero(terminated).tolist()
                texts = text_column(len(gate), {row: GATES[int(gate[row])] for row in rows})
                details[term] |= {"gate": texts, "_gate": terminated.copy()}
            place |= {"details": details, "_details": terminated.copy()}
        return observation, rewards, terminated, truncated, info

    def _take_in(self, batch: CoreBatch, infos: StepInfos) -> None:
        super()._take_in(batch, infos)
        rows = np.flatnonzero(batch.tick.ended == Ended.SCORED)
        if not len(rows):
            return
        assert self._core is not None
        measures, details = scored_parts(self._core, batch)
        for group, columns in {"measures": measures, **details}.items():
            store = self._scored.setdefault(group, {})
            for name, values in columns.items():
                store.setdefault(name, np.zeros(self.num_envs))[batch.tick.slots[rows]] = values[rows]


def scored_parts(
    core: DrivingCore, batch: CoreBatch
) -> tuple[dict[str, NDArray[np.float64]], dict[str, dict[str, NDArray[np.float64]]]]:
    """Measures [n] by name, and the parts [n] of each term that explains itself."""
    return batch.tick.measures.values, core.explain(batch.tick)


def _without_score(info: dict[str, Any]) -> dict[str, Any]:
    for name in ("driving_score", "is_success"):
        info.pop(name, None)
        info.pop(f"_{name}", None)
    return info


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
