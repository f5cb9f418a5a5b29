"""The embedded world for many rollouts at once: a thread steps together what is ready together.

Rollouts are coroutines; the world is arrays. `SharedWorld` stands between: each rollout has a slot, asks for its next
tick and awaits it, and one pass of the world serves all that asked meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.simulators.embedded.reported_poses import reported_times
from alpagym_runtime.simulators.embedded.scene import STEP_US, Scene
from alpagym_runtime.simulators.embedded.simulator import EmbeddedSimulator
from alpagym_runtime.types import Ended, EpisodeRequest, Failure, Frame, MeasureSeries, TickBatch

log = logging.getLogger(__name__)

NOBODY = np.zeros(0, np.int64), np.zeros((0, 3))


@dataclass(frozen=True)
class Tick:
    """What a rollout learns of its slot at one decision time.

    Attributes:
        time_us: now, in the scene's clock.
        reported_us: [P] times of the poses since the tick before, the last one now; at the first tick all from 0 on.
        reported: [P,3] those poses, rig x, y, yaw in the scene's local frame.
        dynamics: [7] velocity xyz, acceleration xyz, yaw rate, rig frame.
        route: [R,2] m, rig frame; NaN beyond its end.
        actors: who is there, by index among the scene's actors [A], and box centres [A,3], local; nobody unless asked
            for.
        controls: the policy decides; False: the recording drives.
        ended: how, or RUNNING.
        failure: why it cannot go on.
        frames: new pictures.
        measures: complete series, once it has ended.

    """

    time_us: int
    reported_us: NDArray[np.int64]
    reported: NDArray[np.float64]
    dynamics: NDArray[np.float32]
    route: NDArray[np.float32]
    actors: tuple[NDArray[np.int64], NDArray[np.float64]]
    controls: bool
    ended: Ended
    failure: Failure | None
    frames: tuple[Frame, ...]
    measures: Mapping[str, MeasureSeries]


@dataclass(frozen=True)
class _Ask:
    slot: int
    request: EpisodeRequest | None  # None: go on
    plan_rig: NDArray[np.float32]
    stop: bool
    answer: asyncio.Future[Tick]


@dataclass(frozen=True)
class _Load:
    scene_id: str
    answer: asyncio.Future[Scene]


class SharedWorld:
    """Slots of a simulator for coroutines of one event loop.

    Args:
        simulator: stepped by this thread only.
        interval_us: between the poses that it reports; 0: only each tick's.
        loop: where the rollouts live.
        look: tell who else is there.

    """

    def __init__(
        self,
        simulator: EmbeddedSimulator,
        plan_steps: int,
        interval_us: int,
        loop: asyncio.AbstractEventLoop,
        *,
        look: bool,
    ) -> None:
        self.simulator, self._look = simulator, look
        self._interval_us = interval_us
        self._told: dict[int, int] = {}  # slot: time of its last tick
        self._loop = loop
        # Where the recording drives there is no plan, and what is measured of plans must not find one.
        self._no_plan = np.full((plan_steps, 3), np.nan, np.float32)
        self._asks: queue.SimpleQueue[_Ask | _Load | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="world", daemon=True)
        self._thread.start()

    async def scene(self, scene_id: str) -> Scene:
        """A scene; SceneError if there is none."""
        answer: asyncio.Future[Scene] = self._loop.create_future()
        self._asks.put(_Load(scene_id, answer))
        return await answer

    async def begin(self, slot: int, request: EpisodeRequest) -> Tick:
        """Start an episode in a free slot; its first tick."""
        return await self._ask(slot, request, None, False)

    async def step(self, slot: int, plan_rig: NDArray[np.float32] | None) -> Tick:
        """Drive one control period by a plan [T,3]; None where the recording drives."""
        return await self._ask(slot, None, plan_rig, False)

    async def stop(self, slot: int) -> Tick:
        """End an episode here, with the measures so far."""
        return await self._ask(slot, None, None, True)

    def close(self) -> None:
        """End the thread and the simulator; nobody may wait any more."""
        self._asks.put(None)
        self._thread.join()
        self.simulator.close()

    async def _ask(
        self, slot: int, request: EpisodeRequest | None, plan_rig: NDArray[np.float32] | None, stop: bool
    ) -> Tick:
        answer: asyncio.Future[Tick] = self._loop.create_future()
        self._asks.put(_Ask(slot, request, self._no_plan if plan_rig is None else plan_rig, stop, answer))
        return await answer

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            asks: list[_Ask] = []
            ask = self._asks.get()
            while ask is not None:
                if isinstance(ask, _Load):
                    self._load(ask)
                else:
                    asks.append(ask)
                try:
                    ask = self._asks.get_nowait()
                except queue.Empty:
                    break
            if asks:
                self._serve(asks)
            if ask is None:
                return

    def _load(self, load: _Load) -> None:
        try:
            scene = self.simulator.scene(load.scene_id)
        except Exception as err:
            self._loop.call_soon_threadsafe(_settle, [(load.answer, err)])
            return
        self._loop.call_soon_threadsafe(_settle, [(load.answer, scene)])

    def _serve(self, asks: list[_Ask]) -> None:
        try:
            ticks = self._step(asks)
        except Exception as err:
            # A fault of the world's: its rollouts fail, the others and the server go on.
            log.exception("a step of %d slots failed", len(asks))
            failed = RuntimeError(f"the world failed: {type(err).__name__}: {err}")
            self._loop.call_soon_threadsafe(_settle, [(ask.answer, failed) for ask in asks])
            return
        self._loop.call_soon_threadsafe(_settle, [(ask.answer, ticks[ask.slot]) for ask in asks])

    def _step(self, asks: list[_Ask]) -> dict[int, Tick]:
        fresh = [ask for ask in asks if ask.request is not None]
        if fresh:
            requests = [ask.request for ask in fresh if ask.request is not None]
            self.simulator.start(np.array([ask.slot for ask in fresh], np.int64), requests)
            for ask in fresh:
                self._told.pop(ask.slot, None)
        going = [ask for ask in asks if ask.request is None]
        if going:
            decision = plan_decision(np.stack([ask.plan_rig for ask in going]))
            stop = np.array([ask.stop for ask in going])
            self.simulator.send(np.array([ask.slot for ask in going], np.int64), decision, stop)
        batch = self.simulator.receive(len(asks), 60.0)
        return {int(slot): self._tick(batch, row) for row, slot in enumerate(batch.slots)}

    def _actors(self, slot: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        moment = self.simulator.moment(slot)
        here = np.flatnonzero(moment.present)
        return here, moment.actors[here, :3]

    def _tick(self, batch: TickBatch, row: int) -> Tick:
        slot, failure, now_us = int(batch.slots[row]), batch.failure[row], int(batch.observation["time_us"][row])
        observation: dict[str, NDArray[Any]] = batch.observation
        route = observation["route_rig"][row].copy()
        route[~observation["route_mask"][row]] = np.nan
        # What was recorded before the first tick goes out as densely as it is.
        before_us, interval_us = -STEP_US, STEP_US
        if slot in self._told:
            before_us, interval_us = self._told[slot], self._interval_us
        times = reported_times(before_us, now_us, interval_us)
        self._told[slot] = now_us
        return Tick(
            time_us=now_us,
            reported_us=times,
            reported=np.zeros((0, 3)) if failure is not None else self.simulator.poses(slot, times),
            dynamics=observation["ego_dynamics_rig"][row],
            route=route,
            actors=self._actors(slot) if self._look and failure is None else NOBODY,
            controls=bool(batch.controls[row]),
            ended=Ended(int(batch.ended[row])),
            failure=failure,
            frames=tuple(frame for frame in batch.frames if frame.slot == slot),
            measures=batch.episode_measures.get(row, {}),
        )


def _settle(answers: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, answer in answers:
        if future.done():
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
