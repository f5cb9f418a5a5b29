"""Stored episodes behind Gymnasium's interface: what offline reinforcement learning and tests of algorithms read."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray

from alpagym_plugins import check_choice
from alpagym_runtime.envs.actions import PLAN_SCALE
from alpagym_runtime.envs.spaces import LIMITS, MASKS, Observer, take_row
from alpagym_runtime.envs.vector_env import parse_mode
from alpagym_runtime.episodes.format import EpisodeFile
from alpagym_runtime.episodes.store import EpisodeStore, find_store
from alpagym_runtime.errors import ConfigError, ResetNeededError
from alpagym_runtime.types import Episode, PolicySpec


class OfflineEnv(gymnasium.Env[dict[str, NDArray[Any]], NDArray[np.float32]]):
    """Go through recorded drives: T decisions, T + 1 observations.

    ## Action space
    `Box(-1, 1, (3 T,), float32)`, plans as in `alpagym/Embedded-v0`'s `plan`. The action of `step` changes nothing: the
    recorded one was driven, and `info["action"]` says which.

    ## Observation space
    `Dict`, as `alpagym/Embedded-v0` (`layout="flat"`) or `alpagym/Embedded-Nested-v0` (`nested`), with
    `camera_<name>` uint8, flat [h,w,3K], nested [K,h,w,3], where the store holds pictures.

    ## Rewards
    The recorded ones; `info["terms"]` has their parts.

    ## Starting state
    An episode drawn from the seed, or `options={"episode": ID}` at reset; `order=True` takes them oldest first.

    ## Episode end
    As recorded: terminated by collision, leaving the road, goal or a reward term; truncated at the horizon or the
    recording's end. Void episodes are left out.

    ## Info
    `reset` and `step` give, for the decision that is next, `action` (the recorded plan in action units), `plan_rig`
    [T,3] f32, `log_prob` (the behaviour policy's, summed over its factors), `version`, and `episode`, its id. The last
    step has none of these, but `ended`, `driving_score` and `is_success`.

    ## Arguments
    `store`: a store's folder or a run directory. `where`: conditions that all hold, such as `driving_score>=0.8`.

    Raises:
        ConfigError: no episode is left, or they are of several kinds.
        ResetNeededError: `step` before `reset` or after the end.

    """

    metadata = {"render_modes": []}  # noqa: RUF012 (Gymnasium's own convention)

    def __init__(
        self,
        *,
        store: str,
        where: list[str] | None = None,
        order: bool = False,
        layout: str = "flat",
        render_mode: str | None = None,
    ) -> None:
        if render_mode is not None:
            raise ConfigError("recorded drives are shown by `alpagym episodes view`", key="render_mode")
        self._store = EpisodeStore(find_store(Path(store)))
        self._ids: list[str] = self._store.rows(["ended!=failed", "ticks>0", *(where or ())])["id"].to_pylist()
        if not self._ids:
            raise ConfigError(f"no episode of {self._store.path} is left by where={where}", key="where")
        check_choice("layout", layout, ("flat", "nested"))
        self._order, self.render_mode = order, render_mode
        self._next = 0
        self._spec = _shapes(self._store.open(self._ids[0]))
        self._observer = Observer(self._spec, layout)
        self.observation_space = self._observer.space
        self.action_space = spaces.Box(-1.0, 1.0, (3 * self._spec.plan_steps,), np.float32)
        self._episode: Episode | None = None
        self._id = ""
        self._tick = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Begin a recorded drive."""
        super().reset(seed=seed)
        if options and "episode" in options:
            self._id = str(options["episode"])
        elif self._order:
            self._id = self._ids[self._next % len(self._ids)]
            self._next += 1
        else:
            self._id = self._ids[int(self.np_random.integers(len(self._ids)))]
        file = self._store.open(self._id)
        if _shapes(file) != self._spec:
            raise ConfigError(
                f"{file.path} has observations of other shapes than the first episode; choose episodes of one kind "
                f"with where=['config_hash=…']"
            )
        self._episode, self._tick = file.episode(frames=bool(self._spec.cameras)), 0
        return self._observe(), self._decision()

    def step(self, action: NDArray[np.float32]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Go on by one recorded decision, whatever `action` is."""
        episode = self._episode
        if episode is None:
            raise ResetNeededError("call reset() before step(): the episode has not begun or is over")
        reward = float(episode.rewards[self._tick])
        terms = {name: float(values[self._tick]) for name, values in episode.terms.items()}
        self._tick += 1
        observation, last = self._observe(), self._tick == len(episode)
        if not last:
            return observation, reward, False, False, {"terms": terms} | self._decision()
        self._episode = None
        ended = episode.ended
        info = {"terms": terms, "ended": ended.name.lower(), "driving_score": episode.driving_score}
        return (
            observation,
            reward,
            ended.terminated,
            ended.truncated,
            info | {"is_success": bool(episode.driving_score >= 1.0)},
        )

    def _observe(self) -> dict[str, NDArray[Any]]:
        assert self._episode is not None
        out = self._observer.empty(1)
        now = {name: array[self._tick : self._tick + 1] for name, array in self._episode.observation.items()}
        self._observer.write(now, slice(None), out)
        return take_row(out, 0)

    def _decision(self) -> dict[str, Any]:
        assert self._episode is not None
        assert self._episode.decisions is not None
        decisions, t = self._episode.decisions, self._tick
        plan = decisions.plan_rig[t]
        counted = np.where(decisions.log_prob_mask[t], decisions.log_prob[t], 0.0)
        return {
            "episode": self._id,
            "action": np.clip(plan / PLAN_SCALE, -1.0, 1.0).reshape(-1).astype(np.float32),
            "plan_rig": plan.copy(),
            "log_prob": float(counted.sum(dtype=np.float64)),
            "version": int(decisions.version[t]),
        }


def offline_vector_env(
    num_envs: int = 1,
    *,
    autoreset_mode: str | AutoresetMode = "next_step",
    copy: bool = True,
    max_episode_steps: int | None = None,
    **arguments: Any,
) -> SyncVectorEnv[Any, Any]:
    """SyncVectorEnv of `OfflineEnv`, with the arguments of `DrivingVectorEnv`; reading files is the work."""
    make = partial(gymnasium.make, "alpagym/Offline-v0", max_episode_steps=max_episode_steps, **arguments)
    return SyncVectorEnv([make] * num_envs, copy=copy, autoreset_mode=parse_mode(autoreset_mode))


def _shapes(file: EpisodeFile) -> PolicySpec:
    """What a file's observations are shaped like: fields, cameras, steps of a plan."""
    shapes = {
        name.removeprefix("observation."): tuple(about["shape"])
        for name, about in file.columns.items()
        if name.startswith("observation.") and about["kind"] == "array"
    }
    names = [name for name in LIMITS if name in shapes and (name not in MASKS or MASKS[name] in shapes)]
    cameras = file.meta["cameras"]
    frames = {file.columns[f"frame.{name}"]["shape"][0] for name in cameras}
    if len(frames) > 1:
        raise ConfigError(f"{file.path} has {sorted(frames)} pictures a camera; they must be equally many")
    return PolicySpec(
        fields=tuple(names),
        cameras={name: (about["height"], about["width"]) for name, about in cameras.items()},
        frames=frames.pop() if frames else 1,
        history_steps=shapes.get("ego_history_rig", (16,))[0],
        route_points=shapes.get("route_rig", (20,))[0],
        actors=shapes.get("actors_rig", (8,))[0],
        plan_steps=file.columns["decision.plan_rig"]["shape"][0],
    )
