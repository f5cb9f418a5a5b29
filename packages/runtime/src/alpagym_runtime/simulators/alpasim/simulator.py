"""AlpaSim behind the `Simulator` protocol: we ask its runtimes for rollouts, and its sessions fill our slots.

A slot is one rollout at a time, named by a fresh session id. It waits when AlpaSim calls `drive`, and it has ended when
`simulate` has returned, because the measures come with that answer. At the horizon the next `drive` is answered with
`terminate_session`; so a T-tick episode has T + 1 observations if AlpaSim's own limit is one step longer. If AlpaSim
ends first (SCENE_END), it sends no ego pose after the last decision: the last observation then repeats the one before.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import grpc
import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.errors import ConfigError
from alpagym_runtime.pictures import frame_format
from alpagym_runtime.simulators.alpasim.config import AlpasimConfig
from alpagym_runtime.simulators.alpasim.measures import (
    POSE_MEASURES,
    STANDING_M,
    UNTIL_EVENT,
    end_measures,
    measures_of,
    ticks_until_event,
)
from alpagym_runtime.simulators.alpasim.runtimes import Order, RuntimePool
from alpagym_runtime.simulators.alpasim.server import DriverServer, Refused, Session
from alpagym_runtime.simulators.alpasim.wire import runtime_pb2
from alpagym_runtime.simulators.base import rows_of
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

log = logging.getLogger(__name__)

LABELS = ("target_plan_rig", "recorded_plan_rig")
FIELDS = ("ego_history_rig", "ego_dynamics_rig", "route_rig", "actors_rig", "camera_rays")
NAMES = tuple(POSE_MEASURES)
PROGRESS = len(NAMES)  # column of the furthest share, beside them


@dataclass
class _Slot:
    """One rollout of ours.

    Attributes:
        session_id: its name; "" while the slot is idle.
        request: what it drives.
        session: AlpaSim's session, once it has called `drive`.
        tick: decisions since the handover (negative in warm-up).
        delivered: rows handed out, so the rollout cannot begin again unnoticed.
        outcome: how we ended it; RUNNING: AlpaSim did.
        last: the observation and labels that an ended row will hold.
        answer: what `simulate` returned.

    """

    session_id: str = ""
    request: EpisodeRequest | None = None
    session: Session | None = None
    tick: int = 0
    delivered: int = 0
    waits: bool = False
    outcome: Ended = Ended.RUNNING
    last: tuple[Observation, Labels] | None = None
    last_frames: tuple[Frame, ...] = ()
    answer: runtime_pb2.SimulationReturn.RolloutReturn | Failure | None = None
    reported: bool = False
    time_us: list[int] = field(default_factory=list)
    values: list[NDArray[np.float64]] = field(default_factory=list)
    valid: list[NDArray[np.bool_]] = field(default_factory=list)
    arc_m: tuple[float, float] = (0.0, 0.0)  # the ego's on the recording at the handover; the reference's length


class AlpasimSimulator:
    """See `types.Simulator` and the module's text.

    Raises:
        ConfigError: no address, or the policy wants what AlpaSim does not have.
        SimulatorError: no runtime answers.
        OSError: the driver server cannot listen.

    """

    def __init__(
        self, config: AlpasimConfig, policy_spec: PolicySpec, dataset: Any, slots: int, labels: Sequence[str] = ()
    ) -> None:
        if not config.addresses:
            raise ConfigError("is needed: HOST:PORT of a running AlpaSim runtime", key="simulator.address")
        if "plan" not in policy_spec.action_kinds:
            raise ConfigError("AlpaSim drives plans, the policy answers none", key="policy")
        unknown = sorted({*labels, *policy_spec.privileged} - {*LABELS} | {*policy_spec.fields} - {*FIELDS})
        if unknown:
            raise ConfigError(f"AlpaSim has no {unknown[0]!r}; there are {', '.join(LABELS + FIELDS)}", key="policy")
        self._config, self._policy = config, policy_spec
        self._labels = tuple(sorted({*labels, *policy_spec.privileged}))
        self._warm = 0 if config.skip_driver_during_force_gt else config.warmup_ticks
        self._slots = [_Slot() for _ in range(slots)]
        self._expected: dict[str, int] = {}
        self._news: list[tuple[int, str]] = []
        self._closed = False
        self._previous, self._previous_valid = np.zeros((slots, PROGRESS)), np.zeros((slots, PROGRESS), bool)
        self._server = DriverServer(
            config.server, policy_spec, self, slots, keep_recording=True, keep_encoded=config.frames == "arrived"
        )
        self._server.start()
        server = config.server
        host = config.driver_host or (socket.gethostname() if server.host in ("0.0.0.0", "::") else server.host)
        self._pool = RuntimePool(
            (host, self._server.port), server.max_message_mib, config.rollout_timeout_s, config.connect_timeout_s
        )
        try:
            self._server.run(self._pool.connect(config.addresses, config.connect_timeout_s)).result()
            scenes = {scene.scene_id: scene for scene in self._pool.runtimes[0].info.scenes}
            wanted = list(scenes) if dataset.scene_ids is None else list(dataset.scene_ids)
            if not wanted:
                raise ConfigError(f"the AlpaSim at {config.address} has no scenes", key="simulator.address")
        except BaseException:
            self.close()
            raise
        self._scenes = scenes
        self.spec = SimulatorSpec(
            closed_loop=True,
            control_period_us=config.control_period_us,
            slots=slots,
            scenes=tuple(wanted),
            measures=end_measures(),
            cameras=tuple(sorted({camera for scene in scenes.values() for camera in scene.metadata.camera_ids})),
        )

    # ------------------------------------------------------------ protocol

    def start(self, slots: NDArray[np.int64], requests: Sequence[EpisodeRequest]) -> None:
        """Ask for a rollout a slot; a running one is told to end and forgotten."""
        slots = rows_of(slots)
        orders = []
        self._abandon(slots.tolist())
        for index, request in zip(slots.tolist(), requests, strict=True):
            slot = _Slot(uuid.uuid4().hex, request, tick=-self._warm)
            self._previous_valid[index] = False
            with self._server.lock:
                self._slots[index] = slot
                if request.scene_id not in self._scenes:
                    text = f"AlpaSim has no scene {request.scene_id!r}; it has {len(self._scenes)} others"
                    self._end(index, slot, Failure("permanent", "INVALID_SCENE", text))
                    continue
                if request.start_us >= 0:
                    text = f"scene {request.scene_id!r}: AlpaSim starts its scenes itself, start_us must be -1"
                    self._end(index, slot, Failure("permanent", "START", text))
                    continue
                self._expected[slot.session_id] = index
            orders.append(self._order(index, slot))
        self._server.run(self._pool.submit(orders))

    def receive(self, min_ready: int, timeout_s: float) -> TickBatch:
        """Slots whose `drive` waits or whose rollout has come back, each once."""
        deadline_s = time.monotonic() + timeout_s
        waiting: list[int] = []
        ended: list[int] = []
        while True:
            left_s = max(deadline_s - time.monotonic(), 0.0)
            missing = max(min_ready - len(waiting) - len(ended), 0)
            sessions = self._server.wait(missing, left_s, lambda: len(self._news))
            with self._server.lock:
                news, self._news = self._news, []
            waiting += self._take(sessions)
            for index, session_id in news:
                slot = self._slots[index]
                if slot.session_id == session_id and not slot.reported:
                    slot.reported = True
                    ended.append(index)
            # A slot may fail between its drive and our look at it.
            waiting = [index for index in waiting if index not in ended]
            if len(waiting) + len(ended) >= min_ready or time.monotonic() >= deadline_s:
                return self._batch(sorted(waiting), sorted(ended))

    def send(self, slots: NDArray[np.int64], decisions: Decision, stop: NDArray[np.bool_]) -> None:
        """Answer the `drive` calls that wait; `stop` ends the rollout instead."""
        slots, stop = rows_of(slots), np.asarray(stop, bool)
        wrong = [i for i in slots.tolist() if not self._slots[i].waits]
        assert not wrong, f"slots {wrong} do not wait for a decision"
        good = np.flatnonzero(~stop)
        for index in slots[stop].tolist():
            self._slots[index].outcome = Ended.SCORED
        self._keep_last(slots[stop].tolist())
        for index in slots.tolist():
            slot = self._slots[index]
            slot.waits = False
            if slot.values:
                self._previous[index], self._previous_valid[index] = (
                    slot.values[-1][:PROGRESS],
                    slot.valid[-1][:PROGRESS],
                )
        for index in slots[good].tolist():
            self._slots[index].tick += 1
        self._server.terminate([self._session(index) for index in slots[stop].tolist()])
        if len(good):
            plan = decisions.plan_rig if len(good) == len(slots) else decisions.plan_rig[good]
            self._server.reply([self._session(index) for index in slots[good].tolist()], plan)

    def scene_hash(self, scene_id: str) -> str:
        """Hash of what AlpaSim says of a scene: its dataset, version and times."""
        return hashlib.sha256(self._scenes[scene_id].SerializeToString(deterministic=True)).hexdigest()

    def scene_family(self, scene_id: str) -> str:
        """AlpaSim names no families."""
        return ""

    @property
    def address(self) -> str:
        """HOST:PORT of our driver server."""
        return f"{self._config.server.host}:{self._server.port}"

    def close(self) -> None:
        """Tell running rollouts to end, hang up, and stop the server; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._abandon(range(len(self._slots)))
        try:
            self._server.run(self._pool.close()).result(5.0)
        except Exception as err:
            log.warning("hanging up on AlpaSim: %r", err)
        self._server.stop()

    # ------------------------------------------------------------ the owner of sessions (the server's thread, locked)

    def admit(self, session_id: str, scene_id: str) -> int:
        """Only sessions that we asked for, and again only while nobody has seen anything of them."""
        index = self._expected.get(session_id)
        if index is None:
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, "nobody here asked for it")
        slot = self._slots[index]
        assert slot.request is not None
        if slot.delivered or slot.answer is not None:
            text = "its rollout began again after decisions were made, and is void"
            self._end(index, slot, Failure("transient", "RESTARTED", f"session {session_id!r}: {text}"))
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, text)
        if scene_id and scene_id != slot.request.scene_id:
            text = f"it drives scene {scene_id!r}, {slot.request.scene_id!r} was asked for"
            self._end(index, slot, Failure("transient", "WRONG_SCENE", f"session {session_id!r}: {text}"))
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, text)
        return index

    def ended(self, session: Session, failure: Refused | None) -> None:
        """A session that failed voids its slot; one that was closed waits for the rollout's answer."""
        index = self._expected.get(session.id)
        if index is None or failure is None:
            return
        kind: Literal["permanent", "transient"] = "permanent" if failure.permanent else "transient"
        text = f"session {session.id!r}: {failure.text}"
        self._end(index, self._slots[index], Failure(kind, failure.code.name, text))

    def _end(self, index: int, slot: _Slot, answer: runtime_pb2.SimulationReturn.RolloutReturn | Failure) -> None:
        """A rollout's fate, the first word counts; the lock is held."""
        if slot.answer is None:
            slot.answer = answer
            self._news.append((index, slot.session_id))
            self._server.lock.notify_all()

    # ------------------------------------------------------------ rollouts

    def _order(self, index: int, slot: _Slot) -> Order:
        def wanted() -> bool:
            return self._slots[index] is slot

        def done(answer: runtime_pb2.SimulationReturn.RolloutReturn | Failure) -> None:
            with self._server.lock:
                self._expected.pop(slot.session_id, None)
                session = self._server.sessions.get(slot.session_id)
                if wanted():
                    self._end(index, slot, answer)
            if session is not None and isinstance(answer, Failure) and answer.code == "UNAVAILABLE":
                # Nobody is left to close it.
                self._server.fail(session, grpc.StatusCode.UNAVAILABLE, "its runtime is lost")

        assert slot.request is not None
        return Order(slot.request.scene_id, slot.session_id, wanted, done)

    def _abandon(self, slots: Sequence[int]) -> None:
        with self._server.lock:
            ids = [self._slots[index].session_id for index in slots]
            for index, session_id in zip(slots, ids, strict=True):
                self._expected.pop(session_id, None)
                self._slots[index] = _Slot()
            sessions = [self._server.sessions[name] for name in ids if name in self._server.sessions]
        self._server.terminate(sessions)

    def _session(self, index: int) -> Session:
        session = self._slots[index].session
        assert session is not None
        return session

    # ------------------------------------------------------------ ticks

    def _take(self, sessions: list[Session]) -> list[int]:
        """Sessions whose drive waits: those to deliver; at the horizon they are ended here."""
        waiting: list[int] = []
        final: list[int] = []
        for session in sessions:
            slot = self._slots[session.row]
            if slot.session_id != session.id:
                self._server.terminate([session])
                continue
            period_us = session.next_us - session.now_us
            if period_us != self._config.control_period_us:
                self._server.fail(session, grpc.StatusCode.FAILED_PRECONDITION, (
                    f"AlpaSim steps by {period_us} us, simulator.control_period_us is {self._config.control_period_us}"
                ))  # fmt: skip
                continue
            slot.session = session
            assert slot.request is not None
            (final if slot.tick >= slot.request.horizon_ticks else waiting).append(session.row)
        self._measure([index for index in (*waiting, *final) if self._slots[index].tick >= 0])
        if final:
            for index in final:
                self._slots[index].outcome = Ended.HORIZON
            self._keep_last(final)
            self._server.terminate([self._session(index) for index in final])
        for index in waiting:
            self._slots[index].waits = True
        return waiting

    def _keep_last(self, slots: list[int]) -> None:
        """The observation that the ended rows will hold, as it is now."""
        if not slots:
            return
        sessions = [self._session(index) for index in slots]
        observation, labels = self._server.observe(sessions), self._server.label(sessions, self._labels)
        for i, index in enumerate(slots):
            one = slice(i, i + 1)
            self._slots[index].last = (
                {name: array[one] for name, array in observation.items()},
                {name: array[one] for name, array in labels.items()},
            )
            self._slots[index].last_frames = self._frames(index)

    def _measure(self, slots: list[int]) -> None:
        """Take the present sample of slots at or after their handover."""
        if not slots:
            return
        rows = rows_of(slots)
        table, period_us = self._server.table, self._config.control_period_us
        with self._server.lock:
            along, known = table.along_recording(rows)
            dynamics = table.observe_dynamics(rows)
            for i, index in enumerate(slots):
                slot = self._slots[index]
                assert slot.request is not None
                now_us = int(table.now_us[index])
                if slot.tick == 0:
                    end_us = now_us + slot.request.horizon_ticks * period_us
                    slot.arc_m = (float(along[i, 0]), table.recorded_arc(index, end_us) - float(along[i, 1]))
                started, length = slot.arc_m
                share, moved = 0.0, float(along[i, 0]) - started
                if known[i, 0]:
                    share = (
                        float(abs(moved) <= STANDING_M) if length < STANDING_M else min(max(moved / length, 0.0), 1.0)
                    )
                furthest = max(share, slot.values[-1][PROGRESS] if slot.values and length >= STANDING_M else 0.0)
                speed = float(np.hypot(dynamics[i, 0], dynamics[i, 1]))
                slot.time_us.append(now_us)
                slot.values.append(np.array([along[i, 0] - along[i, 1], along[i, 2], speed, furthest]))
                slot.valid.append(np.array([known[i, 1], known[i, 1], True, known[i, 0]]))

    def _frames(self, index: int) -> tuple[Frame, ...]:
        if self._config.frames != "arrived":
            return ()
        return tuple(
            Frame(index, p.camera, p.time_us, p.frame_id, frame_format(p.data), bytes(p.data))
            for p in self._server.new_frames(self._session(index))
        )

    # ------------------------------------------------------------ results

    def _batch(self, waiting: list[int], ended: list[int]) -> TickBatch:
        slots = [*waiting, *ended]
        codes = [int(Ended.RUNNING)] * len(waiting)
        failures: list[Failure | None] = [None] * len(waiting)
        for index in ended:
            code, failure = self._outcome(self._slots[index])
            codes.append(int(code))
            failures.append(failure)
        well = np.array([failure is None for failure in failures], bool)
        tick = np.array([self._slots[index].tick if ok else 0 for index, ok in zip(slots, well, strict=True)], np.int64)
        observation, labels, frames = self._observe(waiting, ended, well)
        values, valid = np.zeros((len(slots), PROGRESS)), np.zeros((len(slots), PROGRESS), bool)
        episode_measures = {}
        for row, index in enumerate(slots):
            slot = self._slots[index]
            if not well[row]:
                continue
            if row >= len(waiting):
                episode_measures[row] = self._complete(slot)
            if slot.values and (row < len(waiting) or slot.outcome != Ended.RUNNING) and tick[row] >= 0:
                values[row], valid[row] = slot.values[-1][:PROGRESS], slot.valid[-1][:PROGRESS]
        previous_valid = self._previous_valid[slots] & well[:, None] & (tick > 0)[:, None]
        if len(ended):
            stopped = np.array(codes) == Ended.SCORED
            previous_valid[stopped] = self._previous_valid[slots][stopped]
        batch = TickBatch(
            slots=np.array(slots, np.int64),
            requests=[request for request in (self._slots[index].request for index in slots) if request is not None],
            tick=tick,
            controls=(tick >= 0) & well,
            observation=observation,
            observation_valid=well.copy(),
            measures=_columns(values, valid),
            measures_previous=_columns(self._previous[slots], previous_valid),
            labels=labels,
            ended=np.array(codes, np.int64),
            failure=failures,
            frames=frames,
            episode_measures=episode_measures,
        )
        for index in waiting:
            self._slots[index].delivered += 1
        return batch

    def _outcome(self, slot: _Slot) -> tuple[Ended, Failure | None]:
        answer = slot.answer
        assert answer is not None
        if isinstance(answer, Failure):
            return Ended.FAILED, answer
        if slot.outcome != Ended.RUNNING:
            return slot.outcome, None
        if slot.session is None or slot.waits or slot.tick <= 0:
            text = f"session {slot.session_id!r}: AlpaSim reports a success, but its last drive call is not answered"
            return Ended.FAILED, Failure("transient", "NO_DRIVE", text if slot.waits else f"{text}, or there was none")
        return Ended.SCENE_END, None

    def _complete(self, slot: _Slot) -> dict[str, MeasureSeries]:
        assert isinstance(slot.answer, runtime_pb2.SimulationReturn.RolloutReturn)
        times, values, valid = list(slot.time_us), list(slot.values), list(slot.valid)
        if slot.outcome == Ended.RUNNING:
            # The tick after the last decision: AlpaSim measured it, but told us no pose.
            assert slot.session is not None
            times.append(slot.session.next_us)
            values.append(values[-1])
            valid.append(np.array([False] * PROGRESS + [bool(valid[-1][PROGRESS])]))
        time_us, column, known = np.array(times, np.int64), np.array(values), np.array(valid)
        out = measures_of(
            slot.answer.timestep_metrics,
            time_us,
            self._config.control_period_us,
            column[:, PROGRESS].copy(),
            known[:, PROGRESS].copy(),
            standing=(standing := slot.arc_m[1] < STANDING_M),
        )
        kept = ticks_until_event(out, standing=standing)
        for m, (name, aggregation) in enumerate(POSE_MEASURES.items()):
            if name in UNTIL_EVENT:
                known[kept:, m] = False
            out[name] = MeasureSeries(time_us.copy(), column[:, m].copy(), known[:, m].copy(), aggregation)
        return out

    def _observe(
        self, waiting: list[int], ended: list[int], well: NDArray[np.bool_]
    ) -> tuple[Observation, Labels, tuple[Frame, ...]]:
        sessions = [self._session(index) for index in waiting]
        observation, labels = self._server.observe(sessions), self._server.label(sessions, self._labels)
        frames: list[Frame] = []
        for index in waiting:
            frames += self._frames(index)
        if not ended:
            return observation, labels, tuple(frames)
        n = len(waiting)
        observation = {name: _more_rows(array, len(ended)) for name, array in observation.items()}
        labels = {name: _more_rows(array, len(ended)) for name, array in labels.items()}
        for i, index in enumerate(ended):
            slot = self._slots[index]
            if not well[n + i]:
                continue
            if slot.last is None:
                session = self._session(index)
                last = self._server.observe([session], [session.next_us])
                frames += self._frames(index)
                slot.last = (last, {name: np.zeros_like(array[:1]) for name, array in labels.items()})
            frames += slot.last_frames
            for target, source in zip((observation, labels), slot.last, strict=True):
                for name, array in source.items():
                    target[name][n + i] = array[0]
            slot.last = None
        return observation, labels, tuple(frames)


def _more_rows(array: NDArray[Any], count: int) -> NDArray[Any]:
    return np.concatenate([array, np.zeros((count, *array.shape[1:]), array.dtype)])


def _columns(values: NDArray[np.float64], valid: NDArray[np.bool_]) -> Measures:
    """Those that come each tick; [n,PROGRESS] in the order of `NAMES`."""
    timely = [(m, name) for m, name in enumerate(NAMES) if name not in UNTIL_EVENT]
    return Measures(
        {name: np.where(valid[:, m], values[:, m], 0.0) for m, name in timely},
        {name: valid[:, m].copy() for m, name in timely},
    )
