"""The native vector environment: all slots of one batch core, stepped as arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from alpagym_runtime.envs.core import CoreBatch, DrivingCore
from alpagym_runtime.envs.infos import StepInfos
from alpagym_runtime.envs.setup import TASK, DrivingSetup, draw_requests, embedded_setup, seeded_base
from alpagym_runtime.envs.spaces import copied, take_row
from alpagym_runtime.errors import ConfigError, ResetNeededError, SimulatorError
from alpagym_runtime.types import Failure

START_ATTEMPTS = 10
"""Scenes that an automatic reset draws for a slot before it gives up."""

Flags = NDArray[np.bool_]
Rows = NDArray[np.int64]


def parse_mode(mode: str | AutoresetMode) -> AutoresetMode:
    """The mode behind next_step, same_step, disabled or Gymnasium's own values; else a ConfigError."""
    if isinstance(mode, AutoresetMode):
        return mode
    for known in AutoresetMode:
        if mode in (known.value, known.name, known.name.lower()):
            return known
    names = ", ".join(known.name.lower() for known in AutoresetMode)
    raise ConfigError(f"must be one of {names}, got {mode!r}", key="autoreset_mode")


class DrivingVectorEnv(VectorEnv[Any, NDArray[np.float32], NDArray[Any]]):
    """N environments like `DrivingEnv` in one world: the same bytes as Gymnasium's Sync- or AsyncVectorEnv of it.

    ## Resets
    `autoreset_mode`: `next_step` (the step after an end is a reset: its action is ignored, its reward 0), `same_step`
    (the step that ends returns the next start; `info["final_obs"]` and `info["final_info"]` hold the end) or
    `disabled` (`step` raises until `reset(options={"reset_mask": …})`, bool [N]).

    `reset(seed=7)` gives slot i the seed 7 + i; a list has one for each. `options={"scenes": […]}` chooses each slot's
    scene (None draws it), so a group of the same drives is `reset(seed=[7] * n, options={"scenes": [name] * n})`.

    ## Failures
    A slot whose world fails is truncated with reward 0, `info["failed"]` and `info["failure"]`; keep its episode out of
    datasets. A scene that an automatic reset cannot start is replaced by the next draw and counted in
    `info["failed_starts"]`. `reset` itself raises.

    Args:
        num_envs: N.
        autoreset_mode: see above.
        copy: False returns the environment's own arrays of observations, which the next call overwrites.
        max_episode_steps: as Gymnasium's time limit: truncates without the numbers of an episode's end. `horizon` is
            the world's own.
        render_mode: None or rgb_array.
        arguments: those of `DrivingEnv`.

    Raises:
        ResetNeededError: `step` before `reset`, or in mode `disabled` with ended slots.
        SimulatorError: a scene of `reset` cannot be driven, or the world stays silent.

    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012 (Gymnasium's own convention)
    make_setup: ClassVar[Callable[..., DrivingSetup]] = staticmethod(embedded_setup)

    task = TASK
    task_description = TASK

    def __init__(
        self,
        num_envs: int = 1,
        *,
        autoreset_mode: str | AutoresetMode = "next_step",
        copy: bool = True,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
        **arguments: Any,
    ) -> None:
        if num_envs < 1:
            raise ConfigError(f"must be at least 1, got {num_envs}", key="num_envs")
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ConfigError(f"must be one of {self.metadata['render_modes']}, got {render_mode!r}", key="render_mode")
        self._setup = self.make_setup(**arguments)
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.autoreset_mode = parse_mode(autoreset_mode)
        self.metadata = {
            **self.metadata,
            "render_fps": self._setup.render_fps,
            "autoreset_mode": self.autoreset_mode,
        }
        self._copy = copy
        self._limit = max_episode_steps
        self._observer = self._setup.observer()
        self.single_observation_space = self._observer.space
        self.single_action_space = self._setup.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._core: DrivingCore | None = None
        self._observation = self._observer.empty(num_envs)
        self._speed_mps = np.zeros(num_envs, np.float32)
        self._bases = np.zeros(num_envs, np.uint64)
        self._seeded = np.zeros(num_envs, bool)
        self._episodes = np.zeros(num_envs, np.int64)
        self._elapsed = np.zeros(num_envs, np.int64)
        self._over = np.ones(num_envs, bool)  # waits for a reset
        self._begun = False
        self._everyone = np.arange(num_envs)
        self._scenes = np.full(num_envs, None, object)
        self._sums: dict[str, NDArray[np.float64]] = {}

    @property
    def _max_episode_steps(self) -> int:
        """LeRobot asks for it by this name."""
        return self._setup.horizon if self._limit is None else min(self._limit, self._setup.horizon)

    # ------------------------------------------------------------ Gymnasium

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every slot, or in those of `options["reset_mask"]`; `options` is left as it is."""
        options = options or {}
        mask = self._reset_mask(options.get("reset_mask"))
        rows = np.flatnonzero(mask)
        if not mask.all() and not self._begun:
            raise ResetNeededError("the first reset must be of all slots, without reset_mask")
        if self._core is None:
            self._core = self._setup.core(self.num_envs)
            self._sums = {name: np.zeros(self.num_envs) for name in self._core.terms}
            self.closed = False
        self._seed(rows, seed)
        chosen = self._chosen(options)
        self._begun = False
        self._over = self._over & ~mask
        failures = self._begin(rows, [chosen[row] for row in rows.tolist()], self._new_infos())
        if failures:
            row, failure = next(iter(failures.items()))
            raise SimulatorError(
                f"slot {row}: {failure.text}", code=failure.code, permanent=failure.kind == "permanent"
            )
        self._begun = True
        return self._handed_out(), self._started(mask)

    def step(self, actions: NDArray[np.float32]) -> tuple[Any, NDArray[np.float64], Flags, Flags, dict[str, Any]]:
        """Drive every slot one tick; what happens to ended slots is the autoreset mode's."""
        if self._core is None or not self._begun:
            raise ResetNeededError("call reset() before step()")
        waiting = self._over  # replaced below, never written to
        if waiting.any() and self.autoreset_mode == AutoresetMode.DISABLED:
            raise ResetNeededError(
                f"slots {np.flatnonzero(waiting).tolist()} have ended: reset(options={{'reset_mask': …}}) them first"
            )
        values = self._checked(actions, waiting)
        infos = self._new_infos()
        driving = np.flatnonzero(~waiting)
        if len(driving):
            decisions = self._setup.decisions(values[driving], self._speed_mps[driving])
            self._core.send(driving, decisions)
        if waiting.any():
            self._begin_for_sure(np.flatnonzero(waiting), infos, also=len(driving))
        else:
            self._receive(len(driving), infos)
        self._elapsed[driving] += 1
        if self._limit is not None:
            infos.truncated |= self._elapsed >= self._limit
        self._over = infos.terminated | infos.truncated
        if self.autoreset_mode == AutoresetMode.SAME_STEP and self._over.any():
            info = self._same_step(infos)
        else:
            info = infos.driven(~waiting) | self._started(waiting, infos)
        return self._handed_out(), infos.rewards, infos.terminated, infos.truncated, info

    def render(self) -> tuple[NDArray[np.uint8], ...] | None:
        """Pictures [400,*,3] uint8 RGB, one a slot, by `view`."""
        if self.render_mode is None:
            return None
        if self._core is None:
            raise ResetNeededError("call reset() before render()")
        return tuple(self._setup.show(self._core, slot) for slot in range(self.num_envs))

    def close_extras(self, **kwargs: Any) -> None:
        """Give the simulator back; reset makes a new one."""
        if self._core is not None:
            self._core.close()
        self._core, self._begun = None, False

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """An attribute, or what a method returns, once a slot: `SyncVectorEnv.call` for code that expects it."""
        value = getattr(self, name)
        return ((value(*args, **kwargs) if callable(value) else value),) * self.num_envs

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """`call` without arguments."""
        return self.call(name)

    # ------------------------------------------------------------ arguments

    def _reset_mask(self, mask: Any) -> Flags:
        if mask is None:
            return np.ones(self.num_envs, bool)
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
            kind = getattr(mask, "dtype", type(mask).__name__)
            raise TypeError(f"options['reset_mask'] must be a numpy array of bool, got {kind}")
        if mask.shape != (self.num_envs,) or not mask.any():
            raise ValueError(
                f"options['reset_mask'] must have shape ({self.num_envs},) and a True in it, got {mask.shape}: {mask}"
            )
        return mask.copy()

    def _chosen(self, options: Mapping[str, Any]) -> list[str | None]:
        scenes = options.get("scenes")
        if scenes is None:
            name = options.get("scene_id")
            return [None if name is None else str(name)] * self.num_envs
        if isinstance(scenes, str) or len(scenes) != self.num_envs:
            raise ValueError(f"options['scenes'] must have one scene id a slot, {self.num_envs}; got {scenes!r}")
        return [None if name is None else str(name) for name in scenes]

    def _seed(self, rows: Rows, seed: int | list[int | None] | None) -> None:
        """Seeds of the slots `rows`; a slot without one goes on from its last, or begins with one of its own."""
        if seed is None:
            fresh = rows[~self._seeded[rows]]
            entropy = np.random.SeedSequence().generate_state(len(fresh), np.uint64)
            self._bases[fresh], self._episodes[fresh] = entropy >> np.uint64(1), 0
            self._seeded[fresh] = True
            return
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int | np.integer) else list(seed)
        if len(seeds) != self.num_envs:
            raise ValueError(f"seeds must be one a slot, {self.num_envs}; got {len(seeds)}")
        if all(seeds[row] is None for row in rows.tolist()):
            self._seed(rows, None)
            return
        for row in rows.tolist():
            one = seeds[row]
            if one is None:
                self._seed(np.array([row]), None)
            else:
                self._bases[row], self._episodes[row], self._seeded[row] = seeded_base(int(one)), 0, True

    def _checked(self, actions: Any, ignored: Flags) -> NDArray[np.float32]:
        values = np.asarray(actions, np.float32)
        expected = self.action_space.shape
        if values.shape != expected:
            raise ValueError(f"actions must have shape {expected}, got {values.shape}")
        wrong = ~np.isfinite(values).all(axis=1) & ~ignored
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise ValueError(f"action of slot {row} must be {expected[1]} finite numbers, got {values[row]}")
        return values

    # ------------------------------------------------------------ driving

    def _new_infos(self) -> StepInfos:
        assert self._core is not None
        return StepInfos(self.num_envs, list(self._core.terms), self._core.reward_is_late)

    def _begin(self, rows: Rows, chosen: list[str | None], infos: StepInfos, also: int = 0) -> dict[int, Failure]:
        """Start an episode in each of `rows` and receive them and `also` others; what could not start, by slot."""
        assert self._core is not None
        requests = draw_requests(
            self._bases[rows], self._episodes[rows], self._core.spec.scenes, chosen, self._setup.horizon
        )
        self._episodes[rows] += 1
        self._core.start(rows, requests)
        self._scenes[rows] = [request.scene_id for request in requests]
        self._elapsed[rows] = 0
        for sums in self._sums.values():
            sums[rows] = 0.0
        self._receive(len(rows) + also, infos)
        begun = set(rows.tolist())
        return {slot: failure for slot, failure in infos.failures.items() if slot in begun}

    def _begin_for_sure(self, rows: Rows, infos: StepInfos, also: int = 0) -> None:
        """As `_begin`, drawing again where a scene cannot be started."""
        for _ in range(START_ATTEMPTS):
            failures = self._begin(rows, [None] * len(rows), infos, also)
            if not failures:
                return
            rows, also = np.array(sorted(failures)), 0
            infos.forget(rows)
        self._begun = False
        text = next(iter(failures.values())).text
        raise SimulatorError(f"slots {rows.tolist()}: {START_ATTEMPTS} scenes could not be started; the last: {text}")

    def _receive(self, count: int, infos: StepInfos) -> None:
        """Take in what `count` slots deliver."""
        assert self._core is not None
        while count > 0:
            batch = self._core.receive(count, self._setup.timeout_s)
            if not len(batch.tick):
                self._begun = False
                raise SimulatorError(f"{count} slots stayed silent for {self._setup.timeout_s} s", code="TIMEOUT")
            count -= len(batch.tick)
            self._take_in(batch, infos)

    def _take_in(self, batch: CoreBatch, infos: StepInfos) -> None:
        slots = batch.tick.slots
        full = len(slots) == self.num_envs and (slots == self._everyone).all()
        rows: Any = slice(None) if full else slots
        if batch.tick.observation_valid.all():
            self._observer.write(batch.observation, rows, self._observation)
            self._speed_mps[rows] = batch.observation["ego_dynamics_rig"][:, 0]
        else:
            good = np.flatnonzero(batch.tick.observation_valid)
            kept = {name: array[good] for name, array in batch.observation.items()}
            self._observer.write(kept, slots[good], self._observation)
            self._speed_mps[slots[good]] = kept["ego_dynamics_rig"][:, 0]
        infos.take_in(batch, rows, self._sums)

    def _same_step(self, infos: StepInfos) -> dict[str, Any]:
        over = self._over
        final = np.full(self.num_envs, None, object)
        for row in np.flatnonzero(over).tolist():
            final[row] = copied(take_row(self._observation, row))
        fresh = self._new_infos()
        self._begin_for_sure(np.flatnonzero(over), fresh)
        self._over = np.zeros(self.num_envs, bool)
        final_info: dict[str, Any] = {"final_obs": final, "_final_obs": over.copy()}
        final_info |= {"final_info": infos.driven(over), "_final_info": over.copy()}
        return infos.driven(~over) | self._started(over, fresh) | final_info

    def _started(self, started: Flags, infos: StepInfos | None = None) -> dict[str, Any]:
        """The info of slots that have just begun an episode."""
        if not started.any():
            return {}
        names = self._scenes.copy()
        names[~started] = None
        info: dict[str, Any] = {"scene_id": names, "_scene_id": started.copy()}
        if infos is not None and infos.failed_starts.any():
            info |= {"failed_starts": infos.failed_starts, "_failed_starts": infos.failed_starts > 0}
        return info

    def _handed_out(self) -> Any:
        return copied(self._observation) if self._copy else self._observation
