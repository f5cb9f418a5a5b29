"""The embedded world behind the `Simulator` protocol: queues, scenes and results; the arithmetic is in `world`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.errors import ConfigError, SceneError
from alpagym_runtime.geometry import rig_to_local
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.base import no_failures, rows_of
from alpagym_runtime.simulators.embedded import observe, state, world
from alpagym_runtime.simulators.embedded.camera_config import BRAKES_MPS2
from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
from alpagym_runtime.simulators.embedded.dataset import SceneSource, open_source, scene_ids
from alpagym_runtime.simulators.embedded.expert import target_plan
from alpagym_runtime.simulators.embedded.measures_alpasim import NAMES as ALPASIM_MEASURES
from alpagym_runtime.simulators.embedded.measures_alpasim import MeasuresOnDemand, alpasim_measures
from alpagym_runtime.simulators.embedded.plan_delay import PlanDelay
from alpagym_runtime.simulators.embedded.recorder import Recorder
from alpagym_runtime.simulators.embedded.scene import STEP_US, Scene
from alpagym_runtime.simulators.embedded.scene_bank import SceneBank
from alpagym_runtime.simulators.embedded.vehicle import EGO_COLUMNS
from alpagym_runtime.telemetry.timers import timed
from alpagym_runtime.types import (
    Decision,
    Ended,
    EpisodeRequest,
    Failure,
    Frame,
    Labels,
    Measures,
    MeasureSeries,
    Observation,
    PolicySpec,
    SimulatorSpec,
    TickBatch,
)

if TYPE_CHECKING:
    from alpagym_runtime.simulators.embedded.camera_config import CamerasConfig
    from alpagym_runtime.simulators.embedded.camera_stream import CameraStream
    from alpagym_runtime.simulators.embedded.views import Moment

_EVENTS = {"collision": state.EVENT_COLLISION, "offroad": state.EVENT_OFFROAD, "goal": state.EVENT_GOAL}
_AGGREGATION = {
    "acceleration_mps2": "mean",
    "along_track_error_m": "last",
    "distance_to_gt_m": "mean",
    "lateral_acceleration_mps2": "mean",
    "jerk_mps3": "max",
    "route_deviation_m": "max",
    "speed_mps": "mean",
    "time_to_collision_s": "min",
    "yaw_rate_radps": "mean",
}
LABELS = ("target_plan_rig", "recorded_plan_rig")
PLAN_LIMIT = 1e4
"""m and rad; plans are cut to this, so that the controller's sums of sixth powers stay finite."""

IDLE, DRIVING, WAITING, DELIVERED = range(4)


@dataclass
class _Result:
    """A slot's step is done: codes [n] of `Ended` for rows [n]."""

    rows: NDArray[np.int64]
    ended: NDArray[np.int64]


class EmbeddedSimulator:
    """See `alpagym_runtime.types.Simulator`.

    Scenes load when they are first asked for and stay while there is room. A scene that cannot be loaded ends its
    episode FAILED, permanent; the other slots go on. `source` replaces the dataset's own, for scenes made by hand.
    """

    def __init__(
        self,
        config: EmbeddedConfig,
        policy_spec: PolicySpec,
        dataset: DatasetSection,
        slots: int,
        labels: Sequence[str] = (),
        source: SceneSource | None = None,
    ) -> None:
        for key in ("history_step_us", "plan_step_us"):
            step = getattr(policy_spec, key)
            if step % STEP_US:
                raise ConfigError(
                    f"the policy's {key} is {step}; this world needs a multiple of {STEP_US}", key="policy"
                )
        unknown = [name for name in (*labels, *policy_spec.privileged) if name not in LABELS]
        if unknown:
            raise ConfigError(
                f"unknown label {unknown[0]!r}; the embedded simulator has {', '.join(LABELS)}", key="labels"
            )
        self._config = config
        self._policy = policy_spec
        self._labels = tuple(sorted({*labels, *policy_spec.privileged}))
        self._source = source or open_source(dataset)
        self._inner = config.control_period_us // STEP_US
        self._end_on = sum(_EVENTS[name] for name in set(config.end_on))
        self._bank = SceneBank()
        self._slots = state.make_slots(slots, 128, policy_spec.plan_steps, config.vehicle, config.alpasim_quirks)
        delay_ticks = -(-config.planner_delay_us // config.control_period_us)
        self._delay = PlanDelay(slots, delay_ticks, policy_spec.plan_steps) if delay_ticks else None
        self._requests: list[EpisodeRequest | None] = [None] * slots
        self._phase = np.zeros(slots, np.int64)
        self._last_step = np.zeros(slots, np.int64)
        self._horizon_step = np.zeros(slots, np.int64)
        self._ended = np.zeros(slots, np.int64)
        self._failures: list[Failure | None] = [None] * slots
        self._previous = np.zeros((slots, len(state.MEASURES)))
        self._previous_valid = np.zeros((slots, len(state.MEASURES)), bool)
        self._series = np.zeros((slots, 64, len(state.MEASURES)))
        self._series_valid = np.zeros((slots, 64, len(state.MEASURES)), bool)
        self._series_time = np.zeros((slots, 64), np.int64)
        self._samples = np.zeros(slots, np.int64)
        self._queue: list[tuple[NDArray[np.int64], NDArray[np.bool_]]] = []
        self._pool = ThreadPoolExecutor(1, "embedded") if config.threads else None
        self._running: list[Future[_Result]] = []
        self._recorder = Recorder(self._inner, policy_spec.plan_step_us)
        self._cameras: CameraStream | None = None
        if policy_spec.cameras:
            # Only who looks loads the renderer.
            from alpagym_runtime.simulators.embedded.camera_stream import CameraStream

            self._cameras = CameraStream(
                config.cameras, policy_spec, slots, lambda slot: self._bank[self.request(slot).scene_id]
            )
        measures = MeasuresOnDemand(dict.fromkeys(state.MEASURES, "tick"))
        for name in config.measures:
            if name not in measures:
                raise ConfigError(
                    f"no measure {name!r}; there are {', '.join((*state.MEASURES, *ALPASIM_MEASURES))}",
                    key="simulator.measures",
                )
        self.spec = SimulatorSpec(
            closed_loop=True,
            control_period_us=config.control_period_us,
            slots=slots,
            scenes=tuple(scene_ids(dataset, self._source)),
            measures=measures,
            cameras=tuple(policy_spec.cameras),
            action_kinds=frozenset({"plan", "control"}),
        )

    # ------------------------------------------------------------ protocol

    def start(self, slots: NDArray[np.int64], requests: Sequence[EpisodeRequest]) -> None:
        """Begin an episode in each slot, on the recorded drive `warmup_ticks` before the handover."""
        slots = rows_of(slots)
        self._settle()
        fine: list[int] = []
        scenes: dict[str, Scene] = {}
        for slot, request in zip(slots.tolist(), requests, strict=True):
            self._requests[slot], self._failures[slot] = request, None
            self._ended[slot], self._phase[slot], self._samples[slot] = Ended.RUNNING, WAITING, 0
            try:
                scenes[request.scene_id] = self._load(request.scene_id, scenes)
                self._handover(scenes[request.scene_id], request)
                fine.append(slot)
            except SceneError as err:
                self._fail(slot, Failure("permanent", "INVALID_SCENE", str(err)))
        if not fine:
            return
        busy = {r.scene_id for r, p in zip(self._requests, self._phase, strict=True) if r is not None and p != IDLE}
        if self._bank.add(list(scenes.values()), busy):
            for slot in np.flatnonzero(self._phase != IDLE):
                request = self._requests[slot]
                if request is not None and request.scene_id in self._bank:
                    self._slots.scene[slot] = self._bank.index(request.scene_id)
        rows = rows_of(fine)
        chosen = [self._requests[slot] for slot in fine]
        handovers = rows_of([self._handover(self._bank[r.scene_id], r) for r in chosen if r is not None])
        lengths = rows_of([len(self._bank[r.scene_id].ego_log) for r in chosen if r is not None])
        horizon = rows_of([r.horizon_ticks for r in chosen if r is not None])
        # No more samples than the recordings have steps, however far the horizon.
        self._reserve(int(lengths.max()), min(int(horizon.max()), int((lengths - handovers).max())) + 1)
        self._last_step[rows] = lengths - 1
        self._horizon_step[rows] = handovers + horizon * self._inner
        starts = np.maximum(handovers - self._config.warmup_ticks * self._inner, 0)
        indices = rows_of([self._bank.index(r.scene_id) for r in chosen if r is not None])
        self._slots.reactive[rows] = self._config.traffic == "reactive"
        world.begin(self._bank.bank, self._slots, rows, indices, handovers, starts)
        if self._delay is not None:
            self._delay.forget(rows)
        if self._cameras is not None:
            self._cameras.start(rows)
        if self._late_measures():
            for slot, start, handover in zip(fine, starts.tolist(), handovers.tolist(), strict=True):
                self._recorder.begin(slot, self._bank[self.request(slot).scene_id], start, handover)
        self._previous_valid[rows] = False
        self._sample(rows)

    def receive(self, min_ready: int, timeout_s: float) -> TickBatch:
        """Slots that wait or have ended, each once. Without a thread of its own the world is stepped here."""
        if self._pool is None:
            self._settle()
        while self._running and np.count_nonzero(self._phase == WAITING) < min_ready:
            done, _ = wait(self._running, timeout_s, return_when="FIRST_COMPLETED")
            if not done:
                break
            self._collect(done)
        self._collect({future for future in self._running if future.done()})
        return self._batch(np.flatnonzero(self._phase == WAITING))

    def send(self, slots: NDArray[np.int64], decisions: Decision, stop: NDArray[np.bool_]) -> None:
        """Queue decisions for slots that were delivered and have not ended."""
        slots, stop = rows_of(slots), np.asarray(stop, bool)
        wrong = slots[(self._phase[slots] != DELIVERED) | (self._ended[slots] != Ended.RUNNING)]
        assert not len(wrong), f"slots {wrong.tolist()} do not wait for a decision"
        s = self._slots
        self._recorder.plans(slots[~stop], s, decisions.plan_rig[~stop])
        s.plan[slots] = np.clip(decisions.plan_rig, -PLAN_LIMIT, PLAN_LIMIT)
        s.plan_pose[slots], s.plan_age[slots] = s.state[slots, :3], 0
        if self._delay is not None:
            old = self._delay.exchange(slots, s.plan[slots], s.plan_pose[slots], s.step[slots])
            s.plan[slots], s.plan_pose[slots], s.plan_age[slots] = old
        s.control[slots] = np.nan if decisions.control is None else decisions.control
        self._phase[slots] = DRIVING
        self._previous[slots], self._previous_valid[slots] = s.measures[slots], s.valid[slots]
        self._previous_valid[slots[s.step[slots] < s.handover[slots]]] = False
        if self._pool is None:
            self._queue.append((slots.copy(), stop.copy()))
        else:
            self._running.append(self._pool.submit(self._advance, slots.copy(), stop.copy()))

    def scene_hash(self, scene_id: str) -> str:
        """Content hash of a scene."""
        return self._load(scene_id, {}).content_hash

    def scene_family(self, scene_id: str) -> str:
        """The situation that a scene shows, such as lead, parked or cross."""
        return self._load(scene_id, {}).family

    def close(self) -> None:
        """End the thread; the object can be closed twice."""
        self._settle()
        if self._pool is not None:
            self._pool.shutdown()
        if self._cameras is not None:
            self._cameras.close()

    # ------------------------------------------------------------ scenes

    def scene(self, scene_id: str) -> Scene:
        """A scene, for drawing and tables."""
        return self._load(scene_id, {})

    def request(self, slot: int) -> EpisodeRequest:
        """What a slot drives."""
        request = self._requests[slot]
        assert request is not None, f"slot {slot} has no episode"
        return request

    def trail(self, slot: int) -> NDArray[np.float64]:
        """[K,3] x, y m, yaw rad local: the ego's path in a slot, from the log's start to now."""
        return self._slots.trail[slot, : self._slots.step[slot] + 1, :3].copy()

    def actor_boxes(self, slot: int) -> NDArray[np.float64]:
        """[A,5] centre x, y, yaw, length, width of the road users that exist now, local."""
        size = self._load(self.request(slot).scene_id, {}).actors.size
        present = np.flatnonzero(self._slots.present[slot, : len(size)])
        return np.concatenate([self._slots.actors[slot, present, :3], size[present]], 1)

    def picture(self, slot: int, plan_rig: NDArray[np.float32] | None = None) -> NDArray[np.uint8]:
        """[400,400,3] uint8 RGB of a slot from above, driving direction up, with a plan [T,3]."""
        from alpagym_runtime.simulators.embedded.birds_eye import draw

        return draw(self, slot, plan_rig)

    def moment(self, slot: int) -> Moment:
        """Where everybody is in a slot now, for pictures."""
        from alpagym_runtime.simulators.embedded.views import Moment

        scene, s = self._load(self.request(slot).scene_id, {}), self._slots
        count = len(scene.actors.first)
        actors = np.zeros((count, 5))
        actors[:, :4] = s.actors[slot, :count]
        slower = (s.actors_before[slot, :count, 3] - actors[:, 3]) * (1e6 / STEP_US)
        actors[:, 4] = slower > BRAKES_MPS2
        return Moment(
            scene, s.state[slot, :3].copy(), int(s.step[slot]) * STEP_US, actors, s.present[slot, :count].copy()
        )

    def plan(self, slot: int) -> NDArray[np.float64] | None:
        """[T,3] x, y m, yaw rad local: what a slot drives by since its last decision; None before the first."""
        s = self._slots
        if s.step[slot] <= s.start[slot] or not np.isnan(s.control[slot, 0]):
            return None
        pose, plan = s.plan_pose[slot], s.plan[slot]
        return np.column_stack([rig_to_local(plan[:, :2], pose), plan[:, 2] + pose[2]])

    @property
    def camera_options(self) -> CamerasConfig:
        """How this world is seen."""
        return self._config.cameras

    def _load(self, scene_id: str, loaded: dict[str, Scene]) -> Scene:
        if scene_id in loaded:
            return loaded[scene_id]
        return self._bank[scene_id] if scene_id in self._bank else self._source.load(scene_id)

    def _handover(self, scene: Scene, request: EpisodeRequest) -> int:
        if request.start_us == -1:
            return scene.handover
        step, rest = divmod(request.start_us, STEP_US)
        if rest or not 0 <= step < len(scene.ego_log) - 1:
            raise SceneError(
                f"scene {scene.scene_id!r} cannot start at {request.start_us} us: "
                f"a multiple of {STEP_US} in [0, {(len(scene.ego_log) - 2) * STEP_US}] is needed"
            )
        return step

    def _reserve(self, steps: int, samples: int) -> None:
        """Grow the arrays that hold one row a grid step or a tick."""
        have = self._slots.trail.shape[1]
        if steps > have:
            grown = np.zeros((len(self._requests), 2 * steps, EGO_COLUMNS))
            grown[:, :have] = self._slots.trail
            self._slots = self._slots._replace(trail=grown)
        have = self._series.shape[1]
        if samples > have:
            for name in ("_series", "_series_valid", "_series_time"):
                old = getattr(self, name)
                new = np.zeros((len(old), 2 * samples, *old.shape[2:]), old.dtype)
                new[:, :have] = old
                setattr(self, name, new)

    # ------------------------------------------------------------ stepping

    def _fail(self, slot: int, failure: Failure) -> None:
        self._ended[slot], self._failures[slot], self._phase[slot] = Ended.FAILED, failure, WAITING

    def _settle(self) -> None:
        """Finish everything that was sent."""
        queue, self._queue = self._queue, []
        for slots, stop in queue:
            self._apply(self._advance(slots, stop))
        self._collect(set(self._running))

    def _collect(self, futures: set[Future[_Result]]) -> None:
        for future in [f for f in self._running if f in futures]:
            self._running.remove(future)
            self._apply(future.result())

    @timed("simulate")
    def _advance(self, slots: NDArray[np.int64], stop: NDArray[np.bool_]) -> _Result:
        rows = slots[~stop]
        ended = np.where(stop, np.int64(Ended.SCORED), np.int64(Ended.RUNNING))
        events = np.zeros(len(rows), np.int64)
        s = self._slots
        last = np.minimum(self._last_step[rows], np.maximum(self._horizon_step[rows], s.handover[rows]))
        plan_step_s = self._policy.plan_step_us * 1e-6
        world.advance(self._bank.bank, s, rows, self._inner, plan_step_s, self._end_on, last, events)
        code = np.full(len(rows), np.int64(Ended.RUNNING))
        code[s.step[rows] >= self._last_step[rows]] = Ended.SCENE_END
        code[s.step[rows] >= self._horizon_step[rows]] = Ended.HORIZON
        code[events & state.EVENT_GOAL != 0] = Ended.GOAL
        code[events & state.EVENT_OFFROAD != 0] = Ended.OFFROAD
        code[events & state.EVENT_COLLISION != 0] = Ended.COLLISION
        ended[~stop] = code
        return _Result(slots, ended)

    def _apply(self, result: _Result) -> None:
        self._ended[result.rows] = result.ended
        self._phase[result.rows] = WAITING
        moved = result.rows[result.ended != Ended.SCORED]
        self._sample(moved)

    def _sample(self, rows: NDArray[np.int64]) -> None:
        """Keep the present measures of rows at or after their handover."""
        s = self._slots
        rows = rows[s.step[rows] >= s.handover[rows]]
        k = self._samples[rows]
        self._series[rows, k], self._series_valid[rows, k] = s.measures[rows], s.valid[rows]
        self._series_time[rows, k] = s.step[rows] * STEP_US
        self._samples[rows] += 1
        self._recorder.samples(rows, s)

    # ------------------------------------------------------------ results

    def _batch(self, rows: NDArray[np.int64]) -> TickBatch:
        s = self._slots
        requests = [self._requests[slot] for slot in rows]
        ended = self._ended[rows].copy()
        well = ended != Ended.FAILED
        measures = _columns(s.measures[rows], s.valid[rows] & well[:, None])
        previous = _columns(self._previous[rows], self._previous_valid[rows] & well[:, None])
        warm = s.step[rows] < s.handover[rows]
        since = s.step[rows] - s.handover[rows]
        # Away from the handover, which alone is 0: a tick at either end may be cut short.
        tick = np.where(warm, since // self._inner, -(-since // self._inner))
        observation = self._observe(rows, well)
        frames: tuple[Frame, ...] = ()
        if self._cameras is not None:
            with timed("render"):
                seen, frames = self._cameras.observe(s, rows[well])
            observation |= {name: _spread(array, well, len(rows)) for name, array in seen.items()}
        batch = TickBatch(
            slots=rows.astype(np.int64),
            requests=[r for r in requests if r is not None],
            tick=np.where(well, tick, 0),
            controls=~warm & well,
            observation=observation,
            observation_valid=well.copy(),
            measures=measures,
            measures_previous=previous,
            labels=self._label(rows[well], well),
            ended=ended,
            failure=[self._failures[slot] for slot in rows] if not well.all() else no_failures(len(rows)),
            frames=frames,
            episode_measures={int(r): self._complete(rows[r]) for r in np.flatnonzero((ended != Ended.RUNNING) & well)},
        )
        self._phase[rows] = np.where(ended == Ended.RUNNING, DELIVERED, IDLE)
        return batch

    def _complete(self, slot: int) -> dict[str, MeasureSeries]:
        count = int(self._samples[slot])
        times = self._series_time[slot, :count].copy()
        values, valid = self._series[slot, :count].T.copy(), self._series_valid[slot, :count].T.copy()
        out = {
            name: MeasureSeries(times, values[m], valid[m], _AGGREGATION.get(name, "last"))  # type: ignore[arg-type]
            for m, name in enumerate(state.MEASURES)
        }
        record = self._recorder.finish(slot, self._slots)
        return out if record is None else out | alpasim_measures(record, self._late_measures())

    def _late_measures(self) -> list[str]:
        """Those of AlpaSim's measures that somebody asked for."""
        return [name for name, when in self.spec.measures.items() if when == "end"]

    @timed("observe")
    def _observe(self, rows: NDArray[np.int64], well: NDArray[np.bool_]) -> Observation:
        bank, s, spec, n = self._bank.bank, self._slots, self._policy, len(rows)
        good = rows[well]
        out: Observation = {"time_us": np.where(well, s.step[rows] * STEP_US, 0)}
        history = np.zeros((len(good), spec.history_steps, 7), np.float32)
        mask = np.zeros((len(good), spec.history_steps), bool)
        dynamics = np.zeros((len(good), 7), np.float32)
        observe.observe_ego(bank, s, good, history, mask, dynamics, spec.history_step_us // STEP_US)
        fields = {"ego_history_rig": history, "ego_history_mask": mask, "ego_dynamics_rig": dynamics}
        if "route_rig" in spec.fields:
            route = np.zeros((len(good), spec.route_points, 2), np.float32)
            route_mask = np.zeros((len(good), spec.route_points), bool)
            observe.observe_route(bank, s, good, route, route_mask, self._config.route_spacing_m)
            fields |= {"route_rig": route, "route_mask": route_mask}
        if "actors_rig" in spec.fields:
            actors = np.zeros((len(good), spec.actors, 9), np.float32)
            actors_mask = np.zeros((len(good), spec.actors), bool)
            observe.observe_actors(bank, s, good, actors, actors_mask)
            fields |= {"actors_rig": actors, "actors_mask": actors_mask}
        return out | {name: _spread(array, well, n) for name, array in fields.items()}

    def _label(self, rows: NDArray[np.int64], well: NDArray[np.bool_]) -> Labels:
        bank, s, spec = self._bank.bank, self._slots, self._policy
        out: Labels = {}
        for name in self._labels:
            plan = np.zeros((len(rows), spec.plan_steps, 3), np.float32)
            mask = np.ones((len(rows), spec.plan_steps), bool)
            if name == "target_plan_rig":
                target_plan(bank, s, rows, plan, spec.plan_step_us * 1e-6)
            else:
                observe.recorded_plan(bank, s, rows, plan, mask, spec.plan_step_us // STEP_US)
            out[name] = _spread(plan, well, len(well))
            out[f"{name}_mask"] = _spread(mask, well, len(well))
        return out


def _columns(values: NDArray[np.float64], valid: NDArray[np.bool_]) -> Measures:
    return Measures(dict(zip(state.MEASURES, values.T, strict=True)), dict(zip(state.MEASURES, valid.T, strict=True)))


def _spread(array: NDArray, well: NDArray[np.bool_], count: int) -> NDArray:
    """Rows of the slots that are well at their places among `count`, zeros elsewhere."""
    if len(array) == count:
        return array
    out = np.zeros((count, *array.shape[1:]), array.dtype)
    out[well] = array
    return out
