"""The embedded world behind the `Simulator` protocol: queues, scenes and results; the arithmetic is in `world`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.errors import ConfigError, SceneError
from alpagym_runtime.geometry import rig_to_local
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.base import rows_of
from alpagym_runtime.simulators.embedded import observe, state
from alpagym_runtime.simulators.embedded.begun import Begun
from alpagym_runtime.simulators.embedded.camera_config import BRAKES_MPS2
from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
from alpagym_runtime.simulators.embedded.dataset import SceneSource, open_source, scene_ids
from alpagym_runtime.simulators.embedded.expert import target_plan
from alpagym_runtime.simulators.embedded.ledger import (
    DELIVERED,
    DRIVING,
    FAILED,
    IDLE,
    RUNNING,
    WAITING,
    begin_from,
    deliver,
    drive,
    make_ledger,
    take_decisions,
    with_room,
)
from alpagym_runtime.simulators.embedded.measures_alpasim import NAMES as ALPASIM_MEASURES
from alpagym_runtime.simulators.embedded.measures_alpasim import MeasuresOnDemand, alpasim_measures
from alpagym_runtime.simulators.embedded.plan_delay import PlanDelay
from alpagym_runtime.simulators.embedded.recorder import Recorder
from alpagym_runtime.simulators.embedded.reported_poses import ego_poses
from alpagym_runtime.simulators.embedded.scene import STEP_US, Scene
from alpagym_runtime.simulators.embedded.scene_bank import ACTOR, ACTOR_N, SceneBank
from alpagym_runtime.simulators.embedded.stranded import STRANDED, stranded
from alpagym_runtime.telemetry.timers import timed
from alpagym_runtime.types import (
    Decision,
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
_Sent = tuple[NDArray[np.int64], NDArray[np.bool_]]
"""Slots [n] that drive on, and which of them stop instead."""

NOTHING: _Sent = np.zeros(0, np.int64), np.zeros(0, bool)
NO_CONTROLS = np.zeros((0, 2), np.float32)
BEGINNINGS = 512
"""How many starts of episodes are kept."""


class EmbeddedSimulator:
    """See `alpagym_runtime.types.Simulator`.

    Scenes load when they are first asked for and stay while there is room. A scene that cannot be loaded ends its
    episode FAILED, permanent; the other slots go on. `source` replaces the dataset's own, for scenes made by hand.
    `files_only` leaves pictures out of observations and delivers their files alone (`TickBatch.frames`).
    """

    def __init__(
        self,
        config: EmbeddedConfig,
        policy_spec: PolicySpec,
        dataset: DatasetSection,
        slots: int,
        labels: Sequence[str] = (),
        source: SceneSource | None = None,
        *,
        files_only: bool = False,
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
        self._plan_step_s = policy_spec.plan_step_us * 1e-6
        self._end_on = sum(_EVENTS[name] for name in set(config.end_on))
        self._bank = SceneBank()
        kind = config.vehicle, config.alpasim_quirks
        # Close together, so that many slots fit the processor's cache.
        self._slots = state.make_slots(slots, 128, policy_spec.plan_steps, *kind, actors=40)
        delay_ticks = -(-config.planner_delay_us // config.control_period_us)
        self._fields = {*policy_spec.fields, *policy_spec.optional}
        self._route_points = policy_spec.route_points if "route_rig" in self._fields else 0
        self._actors = policy_spec.actors if "actors_rig" in self._fields else 0
        self._delay = PlanDelay(slots, delay_ticks, policy_spec.plan_steps) if delay_ticks else None
        self._requests: list[EpisodeRequest | None] = [None] * slots
        self._ledger = make_ledger(slots)
        reactive = config.traffic == "reactive"
        self._slots.reactive[:] = reactive
        self._begun = Begun(max(slots, BEGINNINGS), *kind, reactive)
        self._failures: list[Failure | None] = [None] * slots
        self._queue: list[_Sent] = []
        self._pool = ThreadPoolExecutor(1, "embedded") if config.threads else None
        self._running: list[tuple[Future[None], _Sent]] = []
        self._recorder = Recorder(config.control_period_us, policy_spec.plan_step_us, config.pose_reporting_interval_us)
        self._cameras: CameraStream | None = None
        if policy_spec.cameras:
            # Only who looks loads the renderer.
            from alpagym_runtime.simulators.embedded.camera_stream import CameraStream

            self._cameras = CameraStream(
                config.cameras,
                policy_spec,
                slots,
                lambda slot: self._bank[self.request(slot).scene_id],
                files_only=files_only,
            )
        measures = MeasuresOnDemand(dict.fromkeys(state.MEASURES, "tick"))
        for name in config.measures:
            if name not in measures:
                raise ConfigError(
                    f"no measure {name!r}; there are {', '.join((*state.MEASURES, STRANDED, *ALPASIM_MEASURES))}",
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
        self._ledger.ended[slots], self._ledger.phase[slots], self._ledger.samples[slots] = RUNNING, WAITING, 0
        fine: list[int] = []
        scenes: dict[str, Scene] = {}
        handovers, lengths, horizons, crowd = [], [], [], 0
        for slot, request in zip(slots.tolist(), requests, strict=True):
            self._requests[slot], self._failures[slot] = request, None
            try:
                scene = scenes[request.scene_id] = self._load(request.scene_id, scenes)
                handovers.append(self._handover(scene, request))
            except SceneError as err:
                self._fail(slot, Failure("permanent", "INVALID_SCENE", str(err)))
                continue
            fine.append(slot)
            lengths.append(len(scene.ego_log))
            horizons.append(request.horizon_ticks)
            crowd = max(crowd, len(scene.actors.first))
        if not fine:
            return
        self._keep(scenes)
        rows = rows_of(fine)
        places = [self._bank.index(self.request(slot).scene_id) for slot in fine]
        starts = [max(handover - self._config.warmup_ticks * self._inner, 0) for handover in handovers]
        # No more samples than the recordings have steps, however far the horizon.
        most = max(length - handover for length, handover in zip(lengths, handovers, strict=True))
        self._ledger = with_room(self._ledger, min(max(horizons), most) + 1)
        self._slots = state.with_room(self._slots, max(lengths), crowd)
        begun = self._begun.places(self._bank.bank, list(zip(places, starts, handovers, strict=True)), crowd)
        ends = rows_of(lengths) - 1, rows_of(handovers) + rows_of(horizons) * self._inner
        begin_from(self._bank.bank, self._begun.slots, begun, self._slots, self._ledger, rows, rows_of(places), *ends)
        if self._delay is not None:
            self._delay.forget(rows)
        if self._cameras is not None:
            self._cameras.start(rows)
        if self._late_measures():
            for slot, start, handover in zip(fine, starts, handovers, strict=True):
                self._recorder.begin(slot, self._bank[self.request(slot).scene_id], start, handover)
            self._recorder.samples(rows, self._slots)

    def receive(self, min_ready: int, timeout_s: float) -> TickBatch:
        """Slots that wait or have ended, each once. Without a thread of its own the world is stepped here."""
        phase = self._ledger.phase
        if self._pool is None:
            return self._batch((phase >= DRIVING).nonzero()[0], self._take_queue())
        while self._running and np.count_nonzero(phase == WAITING) < min_ready:
            done, _ = wait([future for future, _ in self._running], timeout_s, return_when="FIRST_COMPLETED")
            if not done:
                break
            self._collect()
        self._collect()
        return self._batch((phase == WAITING).nonzero()[0], NOTHING)

    def send(self, slots: NDArray[np.int64], decisions: Decision, stop: NDArray[np.bool_]) -> None:
        """Queue decisions for slots that were delivered and have not ended."""
        rows, stop, s = np.array(slots, np.int64, ndmin=1), np.array(stop, bool), self._slots
        plan, control = decisions.plan_rig, decisions.control
        waited = take_decisions(
            *(s.plan, s.plan_pose, s.plan_age, s.control, s.state, s.measures, s.valid, s.step, s.handover),
            *(self._ledger.phase, self._ledger.ended, self._ledger.previous, self._ledger.previous_valid),
            *(rows, _plain(plan), NO_CONTROLS if control is None else _plain(control)),
        )
        assert waited, f"slots {self._not_waiting(rows)} do not wait for a decision"
        if self._recorder.active:
            self._recorder.plans(rows[~stop], s, plan[~stop])
        if self._delay is not None:
            old = self._delay.exchange(rows, s.plan[rows], s.plan_pose[rows], s.step[rows])
            s.plan[rows], s.plan_pose[rows], s.plan_age[rows] = old
        sent = rows, stop
        if self._pool is None:
            self._queue.append(sent)
        else:
            self._running.append((self._pool.submit(self._advance, *sent), sent))

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

    def poses(self, slot: int, times_us: NDArray[np.int64]) -> NDArray[np.float64]:
        """[T,3] x, y m, yaw rad local: where the ego of a slot was at times of its clock, from 0 to now."""
        return ego_poses(self._slots.trail[slot, : self._slots.step[slot] + 1], times_us)

    def actor_boxes(self, slot: int) -> NDArray[np.float64]:
        """[A,5] centre x, y, yaw, length, width of the road users that exist now, local."""
        s, bank = self._slots, self._bank.bank
        first, count = bank.rows[s.scene[slot], [ACTOR, ACTOR_N]]
        present = np.flatnonzero(s.present[slot, :count])
        return np.concatenate([s.actors[slot, present, :3], bank.sizes[first + present]], 1)

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
        actors[:, :4] = s.actors[slot, :count, :4]
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

    def _keep(self, scenes: dict[str, Scene]) -> None:
        """Make scenes resident."""
        fresh = [scene for name, scene in scenes.items() if name not in self._bank]
        if not fresh:
            return
        driving = (self._ledger.phase != IDLE).nonzero()[0].tolist()
        # A failed slot's scene may be none.
        busy = {slot: request.scene_id for slot in driving if (request := self._requests[slot]) is not None}
        if self._bank.add(fresh, {*busy.values()}):
            self._begun.forget()
            for slot, scene_id in busy.items():
                if scene_id in self._bank:
                    self._slots.scene[slot] = self._bank.index(scene_id)

    # ------------------------------------------------------------ stepping

    def _fail(self, slot: int, failure: Failure) -> None:
        self._ledger.ended[slot], self._failures[slot] = FAILED, failure

    def _settle(self) -> None:
        """Finish everything that was sent."""
        if self._queue:
            sent = self._take_queue()
            self._advance(*sent)
            self._arrive(sent)
        if self._running:
            wait([future for future, _ in self._running])
            self._collect()

    def _not_waiting(self, rows: NDArray[np.int64]) -> list[int]:
        return [i for i in rows.tolist() if self._ledger.phase[i] != DELIVERED or self._ledger.ended[i] != RUNNING]

    def _take_queue(self) -> _Sent:
        queue, self._queue = self._queue, []
        if len(queue) < 2:
            return queue[0] if queue else NOTHING
        return np.concatenate([rows for rows, _ in queue]), np.concatenate([stop for _, stop in queue])

    def _collect(self) -> None:
        """Take what the thread has done."""
        running, self._running = self._running, []
        for future, sent in running:
            if future.done():
                future.result()
                self._arrive(sent)
            else:
                self._running.append((future, sent))

    @timed("simulate")
    def _advance(self, rows: NDArray[np.int64], stop: NDArray[np.bool_]) -> None:
        drive(self._bank.bank, self._slots, self._ledger, rows, stop, self._inner, self._plan_step_s, self._end_on)

    def _arrive(self, sent: _Sent) -> None:
        rows, stop = sent
        self._ledger.phase[rows] = WAITING
        if self._recorder.active:
            self._recorder.samples(rows[~stop], self._slots)

    # ------------------------------------------------------------ results

    def _batch(self, rows: NDArray[np.int64], sent: _Sent) -> TickBatch:
        """Drive what was sent and deliver rows."""
        count, requests, failures = len(rows), self._requests, self._failures
        slots = rows.tolist()
        failure = [failures[slot] for slot in slots]
        well, good = np.ones(count, bool), rows
        if failure.count(None) < count:
            well[:] = [one is None for one in failure]
            good = rows[well]
        tick, time_us, ended = np.empty((3, count), np.int64)
        controls, shape = np.empty(count, bool), (2, len(state.MEASURES), count)
        values, valid = np.empty(shape), np.empty(shape, bool)
        ego, route, actors = self._room(len(good))
        with timed("simulate" if len(sent[0]) else "observe"):
            deliver(
                *(self._bank.bank, self._slots, self._ledger, *sent, self._inner, self._plan_step_s, self._end_on),
                *(rows, good, tick, time_us, ended, controls, values, valid, ego, route, actors),
            )
        if self._recorder.active:
            self._recorder.samples(sent[0][~sent[1]], self._slots)
        observation = self._observation(time_us, ego, route, actors, well)
        frames: tuple[Frame, ...] = ()
        if self._cameras is not None:
            with timed("render"):
                seen, frames = self._cameras.observe(self._slots, good)
            observation |= {name: _spread(array, well, count) for name, array in seen.items()}
        over = ended.nonzero()[0].tolist() if ended.any() else []
        return TickBatch(
            slots=rows,
            requests=[request for slot in slots if (request := requests[slot]) is not None],
            tick=tick,
            controls=controls,
            observation=observation,
            observation_valid=well,
            measures=_columns(values[0], valid[0]),
            measures_previous=_columns(values[1], valid[1]),
            labels=self._label(good, well) if self._labels else {},
            ended=ended,
            failure=failure,
            frames=frames,
            episode_measures={row: self._complete(slots[row]) for row in over if well[row]},
        )

    def _complete(self, slot: int) -> dict[str, MeasureSeries]:
        books = self._ledger
        count = int(books.samples[slot])
        times = books.series_time[slot, :count].copy()
        values, valid = books.series[slot, :count].T.copy(), books.series_valid[slot, :count].T.copy()
        out = {
            name: MeasureSeries(times, values[m], valid[m], _AGGREGATION.get(name, "last"))  # type: ignore[arg-type]
            for m, name in enumerate(state.MEASURES)
        }
        if self.spec.measures.get(STRANDED):
            request = self.request(slot)
            last = int(self._slots.handover[slot]) + request.horizon_ticks * self._inner
            log, distance = self._bank[request.scene_id].ego_log, out["distance_to_gt_m"]
            out[STRANDED] = stranded(self._slots, slot, log, distance, last, self._inner)
        record = self._recorder.finish(slot, self._slots)
        return out if record is None else out | alpasim_measures(record, self._late_measures())

    def _late_measures(self) -> list[str]:
        """Those of AlpaSim's measures that somebody asked for."""
        return [name for name, when in self.spec.measures.items() if when == "end" and name != STRANDED]

    def _room(self, count: int) -> tuple[tuple, tuple, tuple]:
        """Arrays for the observations of so many slots, as `deliver` fills them."""
        spec, float32 = self._policy, np.float32
        history, route, actors = spec.history_steps, self._route_points, self._actors
        return (
            (
                np.empty((count, history, 7), float32),
                np.empty((count, history), bool),
                np.empty((count, 7), float32),
                spec.history_step_us // STEP_US,
            ),
            (np.empty((count, route, 2), float32), np.empty((count, route), bool), self._config.route_spacing_m),
            (np.empty((count, actors, 9), float32), np.empty((count, actors), bool)),
        )

    def _observation(
        self, time_us: NDArray[np.int64], ego: tuple, route: tuple, actors: tuple, well: NDArray[np.bool_]
    ) -> Observation:
        fields = {"ego_history_rig": ego[0], "ego_history_mask": ego[1], "ego_dynamics_rig": ego[2]}
        if "route_rig" in self._fields:
            fields |= {"route_rig": route[0], "route_mask": route[1]}
        if "actors_rig" in self._fields:
            fields |= {"actors_rig": actors[0], "actors_mask": actors[1]}
        if len(ego[0]) < len(well):
            fields = {name: _spread(array, well, len(well)) for name, array in fields.items()}
        out: Observation = {"time_us": time_us}
        return out | fields

    @timed("observe")
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
    """Measures [M,n] by name."""
    return Measures(dict(zip(state.MEASURES, values, strict=True)), dict(zip(state.MEASURES, valid, strict=True)))


def _plain(array: NDArray) -> NDArray:
    """The array in the one form that kernels are compiled for."""
    return array if array.flags.c_contiguous and array.flags.writeable else np.array(array, order="C")


def _spread(array: NDArray, well: NDArray[np.bool_], count: int) -> NDArray:
    """Rows of the slots that are well at their places among `count`, zeros elsewhere."""
    if len(array) == count:
        return array
    out = np.zeros((count, *array.shape[1:]), array.dtype)
    out[well] = array
    return out
