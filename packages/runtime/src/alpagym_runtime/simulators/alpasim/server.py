"""The driver side of AlpaSim's contract: an asyncio gRPC server in its own thread that fills sessions.

AlpaSim pushes; this is the one place where that is turned round. Calls fill `SessionTable`; a `drive` marks its session
as ready once its pictures are decoded, and is answered when somebody decides. Whoever decides calls `wait`, `observe`
and `reply` from a thread of its own. Nothing here knows requests, episodes or policies: an `Owner` says which sessions
are welcome.

Status codes, each with the session's id and the cause: INVALID_ARGUMENT (the message is wrong), NOT_FOUND (no such
session), ALREADY_EXISTS (it is open), PERMISSION_DENIED (nobody asked for it), RESOURCE_EXHAUSTED (no room, or the
message is too large), FAILED_PRECONDITION (out of order, or the session has failed), DEADLINE_EXCEEDED (nobody
decided, or the session fell silent), UNAVAILABLE (shutting down), INTERNAL (our error; the trace is in the log).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Protocol, TypeVar

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from numpy.typing import NDArray

from alpagym_runtime.pictures import BadFrameError, decode, frame_id
from alpagym_runtime.simulators.alpasim import services
from alpagym_runtime.simulators.alpasim.calibration import RAY_SHAPES, Calibration, read_calibration
from alpagym_runtime.simulators.alpasim.config import ServerConfig
from alpagym_runtime.simulators.alpasim.frames import CameraFrames, DecodePool, Picture
from alpagym_runtime.simulators.alpasim.image_message import read_image
from alpagym_runtime.simulators.alpasim.replies import TERMINATE, drive_replies
from alpagym_runtime.simulators.alpasim.session_table import Ego, SessionTable
from alpagym_runtime.simulators.alpasim.trajectories import read_poses
from alpagym_runtime.simulators.alpasim.wire import common_pb2, egodriver_pb2
from alpagym_runtime.types import Labels, Observation, PolicySpec

log = logging.getLogger(__name__)
T = TypeVar("T")

SESSION_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z-]{0,63}")
LATEST_US = 2**62
"""Later times are refused: they leave no room for a horizon in int64."""

MANY = 4096
"""Most poses or waypoints in a message."""

CAMERA_RAYS = "camera_rays"


class Refused(Exception):
    """A call that is answered with a status; `text` is completed with the session's id; `permanent`: never retry."""

    def __init__(self, code: grpc.StatusCode, text: str, *, permanent: bool = False) -> None:
        super().__init__(text)
        self.code, self.text, self.permanent = code, text, permanent


INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


class Owner(Protocol):
    """Who the sessions belong to; called with the server's lock held, so it must be quick."""

    def admit(self, session_id: str, scene_id: str) -> int:
        """The table row for a session that opens; raises `Refused`."""
        ...

    def ended(self, session: Session, failure: Refused | None) -> None:
        """A session was closed (None) or failed."""
        ...


@dataclass(eq=False, slots=True)
class Session:
    """One open session.

    Attributes:
        id: the client's session_uuid.
        row: its place in the table.
        scene_id: what the client says it drives.
        declared: all cameras, by name, with their calibration messages.
        frames: frames of the cameras that the policy wants.
        calibration: rays, their mask and the position of those cameras, if the policy reads `camera_rays`.
        now_us: the decision in hand, or the last one.
        next_us: the decision after that; 0 before the first.
        drives: how many `drive` calls were taken.
        pending: the `drive` call that waits.
        missing: pictures that it still waits for.
        terminate: every further `drive` ends the rollout.

    """

    id: str
    row: int
    scene_id: str
    declared: dict[str, Any]
    frames: dict[str, CameraFrames]
    calibration: dict[str, Calibration]
    seen_s: float
    now_us: int = -1
    next_us: int = 0
    drives: int = 0
    pending: asyncio.Future[bytes] | None = None
    pending_s: float = 0.0
    missing: set[int] = field(default_factory=set)
    terminate: bool = False
    reply: bytes | None = None


class DriverServer:
    """See the module's text.

    Args:
        config: where to listen.
        spec: what the policy reads; only that is kept.
        owner: who the sessions belong to.
        rows: room for so many sessions.
        keep_recording: keep the ground truth, for labels and measures.
        keep_encoded: keep the bytes of pictures that were seen until `new_frames` hands them out.

    """

    def __init__(
        self,
        config: ServerConfig,
        spec: PolicySpec,
        owner: Owner,
        rows: int,
        *,
        keep_recording: bool,
        keep_encoded: bool = False,
    ) -> None:
        self.config, self.spec = config, spec
        self.table = SessionTable(rows, spec)
        self.lock = threading.Condition(threading.Lock())
        self.sessions: dict[str, Session] = {}
        self.port = 0
        self.counts = {"drives": 0, "images": 0, "decoded": 0, "unseen": 0, "refused": 0}
        self._owner, self._keep_encoded, self._keep_recording = owner, keep_encoded, keep_recording
        self._ready: list[Session] = []
        self._enough: Callable[[], bool] | None = None
        self._failed: OrderedDict[str, Refused] = OrderedDict()
        self._decoders = DecodePool(config.decode_threads, self._decoded) if spec.cameras else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: grpc.aio.Server | None = None
        self._thread: threading.Thread | None = None
        self._stopped: asyncio.Event | None = None
        self._health = health.aio.HealthServicer()
        self._tasks: set[asyncio.Task[Any]] = set()

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Listen.

        Raises:
            OSError: the port is taken or the host is not ours; names both.

        """
        _warm_up(self.spec)
        if "actors_rig" in self.spec.fields:
            log.warning("the policy reads actors_rig, and AlpaSim reports no road users: all rows stay masked")
        if not is_loopback(self.config.host):
            log.warning(
                "the driver server listens on %s: anybody on that network can open sessions, unencrypted",
                self.config.host,
            )
        started = threading.Event()
        failure: list[BaseException] = []

        def run() -> None:
            try:
                asyncio.run(self._serve(started))
            except BaseException as err:
                failure.append(err)
                started.set()

        self._thread = threading.Thread(target=run, name="egodriver", daemon=True)
        self._thread.start()
        started.wait()
        if failure:
            self._thread.join()
            self._thread = None
            raise OSError(
                f"cannot listen on {self.config.host}:{self.config.port} (is the port taken?): {failure[0]}"
            ) from failure[0]

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the server's thread; it is cancelled when the server stops."""
        assert self._loop is not None, "the server has not started"
        return asyncio.run_coroutine_threadsafe(self._keep(work), self._loop)

    async def _keep(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await task

    def stop(self, grace_s: float = 1.0) -> None:
        """End all calls with a status and the thread; idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            assert self._loop is not None
            assert self._stopped is not None
            with self.lock:
                for session in list(self.sessions.values()):
                    self._fail(session, Refused(grpc.StatusCode.UNAVAILABLE, "the driver shuts down"))
            self._loop.call_soon_threadsafe(self._stopped.set)
            thread.join(grace_s + 30.0)
        if self._decoders is not None:
            self._decoders.close()
            self._decoders = None

    async def _serve(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        limit = self.config.max_message_mib * 2**20
        options = [
            # Without this a second server on the port succeeds, and the kernel deals the calls between both.
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_send_message_length", limit),
        ]
        self._server = grpc.aio.server(options=options)
        self._server.add_generic_rpc_handlers((self._handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        self.port = self._server.add_insecure_port(f"{host}:{self.config.port}")
        await self._server.start()
        for name in ("", services.EGODRIVER):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        watch = asyncio.create_task(self._watch())
        started.set()
        await self._stopped.wait()
        watch.cancel()
        for task in list(self._tasks):
            task.cancel()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(1.0)

    # ------------------------------------------------------------ deciding (any thread)

    def wait(self, min_ready: int, timeout_s: float, also: Callable[[], int] = lambda: 0) -> list[Session]:
        """Sessions whose `drive` waits for us: at least `min_ready` (with `also()`, other news), or at the timeout."""
        with self.lock:
            self._enough = lambda: len(self._ready) + also() >= min_ready
            self.lock.wait_for(self._enough, timeout_s)
            self._enough = None
            ready, self._ready = self._ready, []
        return ready

    def notify(self) -> None:
        """Wake `wait`: other news came."""
        with self.lock:
            self.lock.notify_all()

    def observe(self, sessions: Sequence[Session], now_us: Sequence[int] | None = None) -> Observation:
        """The observation of sessions at the decision in hand [n,...]; pictures are decoded if they are not yet.

        `now_us` replaces the observations' `time_us` and the cameras' time, where a drive ended without a decision.
        """
        rows = np.array([session.row for session in sessions], np.int64)
        with self.lock:
            out = self.table.observe(rows)
            times = out["time_us"].tolist() if now_us is None else list(now_us)
            chosen = {
                name: [session.frames[name].choose(at) for session, at in zip(sessions, times, strict=True)]
                for name in self.spec.cameras
            }
        out["time_us"] = np.array(times, np.int64)
        for name, (height, width) in self.spec.cameras.items():
            shape = (len(sessions), self.spec.frames)
            images = np.zeros((*shape, height, width, 3), np.uint8)
            frame_time_us, frame_ids = np.zeros(shape, np.int64), np.zeros(shape, np.uint64)
            for n, (session, pictures) in enumerate(zip(sessions, chosen[name], strict=True)):
                for k, picture in enumerate(pictures or ()):
                    if not picture.done:
                        self._decode_here(picture, (height, width))
                    if picture.image is None:
                        continue
                    images[n, k] = picture.image
                    frame_time_us[n, k] = picture.time_us
                    if session.frames[name].is_old_enough(picture, times[n], k):
                        frame_ids[n, k] = picture.frame_id
            out[f"camera_{name}"] = images
            out[f"camera_{name}_time_us"], out[f"camera_{name}_frame_id"] = frame_time_us, frame_ids
            if CAMERA_RAYS in self.spec.fields:
                known = [session.calibration[name] for session in sessions]
                for i, part in enumerate(("rays_rig", "rays_mask", "position_rig")):
                    empty = np.zeros((0, *RAY_SHAPES[i][0]), RAY_SHAPES[i][1])
                    out[f"camera_{name}_{part}"] = np.stack([c[i] for c in known]) if known else empty
        return out

    def label(self, sessions: Sequence[Session], names: tuple[str, ...]) -> Labels:
        """What is recorded from the decision in hand on; see `SessionTable.label`."""
        with self.lock:
            return self.table.label(np.array([session.row for session in sessions], np.int64), names)

    def new_frames(self, session: Session) -> list[Picture]:
        """Pictures that the decision in hand sees and no one before did, as they arrived."""
        out = []
        with self.lock:
            for name in self.spec.cameras:
                for picture in session.frames[name].choose(session.now_us) or ():
                    if picture.image is not None and not picture.delivered:
                        picture.delivered = True
                        out.append(Picture(name, picture.time_us, picture.data, frame_id=picture.frame_id))
                        picture.data = b""
        return out

    def reply(self, sessions: Sequence[Session], plan_rig: NDArray[np.float32]) -> None:
        """Answer waiting `drive` calls with plans [n,T,3] in the rig frame; finite numbers only. Returns at once."""
        rows = np.array([session.row for session in sessions], np.int64)
        with self.lock:
            pose = self.table.pose_at_now(rows)
            now_us = self.table.now_us[rows]
        replies = drive_replies(plan_rig, pose, now_us, self.spec.plan_step_us, self.config.samples)
        with self.lock:
            answers = []
            for session, data in zip(sessions, replies, strict=True):
                session.reply = data
                answers += self._answered(session, data)
        self._deliver(answers)

    def terminate(self, sessions: Iterable[Session]) -> None:
        """End rollouts now, as AlpaSim's successes; a waiting `drive` and all further ones say so."""
        with self.lock:
            answers = []
            for session in sessions:
                session.terminate = True
                answers += self._answered(session, TERMINATE)
        self._deliver(answers)

    def fail(self, session: Session, code: grpc.StatusCode, text: str) -> None:
        """End one session with a status; its waiting `drive` gets it, and every further call."""
        with self.lock:
            if self.sessions.get(session.id) is session:
                self._fail(session, Refused(code, text))

    # ------------------------------------------------------------ inside; with the lock held

    def _answered(self, session: Session, data: bytes | Refused) -> list[tuple[asyncio.Future[bytes], bytes | Refused]]:
        future, session.pending = session.pending, None
        session.seen_s = time.monotonic()
        session.missing.clear()
        if session in self._ready:
            self._ready.remove(session)
        return [] if future is None else [(future, data)]

    def _deliver(self, answers: list[tuple[asyncio.Future[bytes], bytes | Refused]]) -> None:
        if answers and self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(_settle, answers)
            except RuntimeError:  # the loop has ended, and the calls with it
                return

    def _fail(self, session: Session, refused: Refused) -> None:
        self.counts["refused"] += 1
        self.sessions.pop(session.id, None)
        self._failed[session.id] = refused
        while len(self._failed) > MANY:
            self._failed.popitem(last=False)
        self._deliver(self._answered(session, refused))
        self._owner.ended(session, refused)

    def _push(self, session: Session) -> None:
        self._ready.append(session)
        # A wake-up costs more than the question: each one takes the interpreter from this thread and gives it back.
        if self._enough is not None and self._enough():
            self.lock.notify_all()

    def _find(self, session_id: str) -> Session:
        session = self.sessions.get(session_id)
        if session is None:
            if session_id in self._failed:
                refused = self._failed[session_id]
                raise Refused(PRECONDITION, f"it has failed: {refused.text}")
            raise Refused(grpc.StatusCode.NOT_FOUND, "no such session is open")
        session.seen_s = time.monotonic()
        return session

    # ------------------------------------------------------------ calls (the server's thread)

    def _handlers(self) -> grpc.GenericRpcHandler:
        plain: dict[str, Callable[[bytes], bytes]] = {
            "start_session": self._start_session,
            "close_session": self._close_session,
            "submit_image_observation": self._image,
            "submit_egomotion_observation": self._egomotion,
            "submit_route": self._route,
            "submit_recording_ground_truth": self._recording,
        }
        handlers = {name: grpc.unary_unary_rpc_method_handler(self._guard(call)) for name, call in plain.items()}
        handlers["drive"] = grpc.unary_unary_rpc_method_handler(self._drive)
        handlers["get_version"] = grpc.unary_unary_rpc_method_handler(self._get_version)
        return grpc.method_handlers_generic_handler(services.EGODRIVER, handlers)

    def _guard(self, call: Callable[[bytes], bytes]) -> Callable[[bytes, Any], Awaitable[bytes]]:
        async def guarded(data: bytes, context: Any) -> bytes:
            try:
                return call(data)
            except Exception as err:
                return await self._abort(data, context, err)

        return guarded

    async def _abort(self, data: bytes, context: Any, err: Exception) -> bytes:
        if isinstance(err, Refused):
            code, text = err.code, err.text
        elif isinstance(err, DecodeError):
            code, text = INVALID, f"the message cannot be parsed: {err}"
        else:
            log.exception("session %r: our error", session_id_of(data))
            code, text = grpc.StatusCode.INTERNAL, f"{type(err).__name__}: {err}"
            with self.lock:
                session = self.sessions.get(session_id_of(data))
                if session is not None:
                    self._fail(session, Refused(code, text))
        self.counts["refused"] += 1
        await context.abort(code, f"session {session_id_of(data)!r}: {text}")
        raise AssertionError("abort raises")

    async def _get_version(self, data: bytes, context: Any) -> bytes:
        await context.send_initial_metadata(services.CONTRACT_METADATA)
        version = common_pb2.VersionId(version_id=f"alpagym-egodriver-{metadata.version('alpagym-runtime')}")
        version.grpc_api_version.minor = 54
        return version.SerializeToString()

    def _start_session(self, data: bytes) -> bytes:
        request = egodriver_pb2.DriveSessionRequest.FromString(data)
        session_id, scene_id = request.session_uuid, request.debug_info.scene_id
        if not SESSION_ID.fullmatch(session_id):
            raise Refused(INVALID, "session_uuid must be 1 to 64 letters, digits or '-', not '-' first")
        cameras = request.rollout_spec.vehicle.available_cameras
        declared = {self._camera(camera.logical_id): camera for camera in cameras}
        spec, wrong = self.spec, ""
        missing = [name for name in spec.cameras if name not in declared]
        calibration: dict[str, Calibration] = {}
        if missing:
            have = ", ".join(repr(camera.logical_id) for camera in cameras) or "none"
            wrong = f"the policy wants camera {missing[0]!r}; the session declares {have}"
        elif CAMERA_RAYS in spec.fields:
            try:
                calibration = {name: read_calibration(declared[name], size) for name, size in spec.cameras.items()}
            except ValueError as err:
                wrong = f"the policy reads {CAMERA_RAYS}, and {err}"
        with self.lock:
            if session_id in self.sessions:
                raise Refused(grpc.StatusCode.ALREADY_EXISTS, "is open already; close it first")
            row = self._owner.admit(session_id, scene_id)
            self._failed.pop(session_id, None)
            self.table.clear(row)
            frames = {name: CameraFrames(spec.frames, spec.frame_step_us) for name in spec.cameras}
            session = Session(session_id, row, scene_id, declared, frames, calibration, time.monotonic())
            if wrong:
                refused = Refused(PRECONDITION, wrong, permanent=True)
                self._fail(session, refused)
                raise refused
            self.sessions[session_id] = session
        return b""

    def _close_session(self, data: bytes) -> bytes:
        request = egodriver_pb2.DriveSessionCloseRequest.FromString(data)
        with self.lock:
            self._failed.pop(request.session_uuid, None)
            session = self.sessions.pop(request.session_uuid, None)
            if session is not None:
                self._deliver(self._answered(session, Refused(PRECONDITION, "it was closed")))
                self._owner.ended(session, None)
        return b""

    def _camera(self, logical_id: str) -> str:
        """The policy's name of a camera: AlpaSim's, or that without `camera_`, as the PAI dataset's readers say."""
        short = logical_id.removeprefix("camera_")
        return short if logical_id not in self.spec.cameras and short in self.spec.cameras else logical_id

    def _image(self, data: bytes) -> bytes:
        if not self.spec.cameras:
            with self.lock:
                self._find(session_id_of(data))
            self.counts["images"] += 1
            return b""
        image = read_image(data)
        name = self._camera(image.camera)
        with self.lock:
            session = self._find(image.session_id)
            if name not in session.declared:
                raise Refused(INVALID, f"camera {image.camera!r} was not declared at start_session")
            self.counts["images"] += 1
            frames = session.frames.get(name)
            if frames is None:
                return b""
            time_us = _time(image.frame_end_us, "frame_end_us")
            if session.terminate:
                return b""
            picture = Picture(name, time_us, image.data)
            if not frames.add(picture):
                return b""
            if not session.next_us:
                frames.prune_to_newest()
                return b""
            period_us = session.next_us - session.now_us
            if frames.will_be_seen(time_us, session.next_us, period_us):
                self._decode(session, picture)
            else:
                self.counts["unseen"] += 1
        return b""

    def _egomotion(self, data: bytes) -> bytes:
        request = egodriver_pb2.RolloutEgoTrajectory.FromString(data)
        states = request.dynamic_states
        ego = read_ego(request.trajectory, "the egomotion")
        if len(states) not in (0, len(request.trajectory.poses)):
            raise Refused(INVALID, f"{len(states)} dynamic_states for {len(request.trajectory.poses)} poses")
        state = None
        if states:
            last = states[-1]
            v, a, w = last.linear_velocity, last.linear_acceleration, last.angular_velocity
            state = (v.x, v.y, v.z, a.x, a.y, a.z, w.z)
            if not all(map(math.isfinite, state)):
                raise Refused(INVALID, f"the last dynamic state is not finite: {state}")
        with self.lock:
            session = self._find(request.session_uuid)
            if ego is not None and not session.terminate:
                self.table.add_poses(session.row, ego, state)
        return b""

    def _route(self, data: bytes) -> bytes:
        request = egodriver_pb2.RouteRequest.FromString(data)
        waypoints = request.route.waypoints
        if len(waypoints) > MANY:
            raise Refused(INVALID, f"{len(waypoints)} waypoints; at most {MANY} are taken")
        time_us = _time(request.route.timestamp_us, "route.timestamp_us")
        points = np.array([(point.x, point.y) for point in waypoints], np.float64).reshape(-1, 2)
        with self.lock:
            session = self._find(request.session_uuid)
            if not session.terminate:
                self.table.set_route(session.row, points, time_us)
        return b""

    def _recording(self, data: bytes) -> bytes:
        with self.lock:
            session = self.sessions.get(session_id_of(data))
            if session is not None and (not self._keep_recording or self.table.recording_count[session.row]):
                session.seen_s = time.monotonic()
                return b""  # the same drive as before, seen from another place
        request = egodriver_pb2.GroundTruthRequest.FromString(data)
        anchor_us = _time(request.ground_truth.timestamp_us, "ground_truth.timestamp_us")
        ego = read_ego(request.ground_truth.trajectory, "the ground truth")
        with self.lock:
            session = self._find(request.session_uuid)
            if ego is not None and not session.terminate:
                self.table.set_recording(session.row, anchor_us, ego)
        return b""

    async def _drive(self, data: bytes, context: Any) -> bytes:
        session = None
        try:
            request = egodriver_pb2.DriveRequest.FromString(data)
            now_us = _time(request.time_now_us, "time_now_us")
            query_us = _time(request.time_query_us, "time_query_us")
            with self.lock:
                session = self._find(request.session_uuid)
                if session.terminate:
                    return TERMINATE
                if now_us == session.now_us and session.reply is not None:
                    return session.reply  # the same call again
                if now_us == session.now_us and session.pending is not None:
                    future = asyncio.shield(session.pending)
                else:
                    future = self._begin(session, now_us, query_us)
            return await future
        except asyncio.CancelledError:
            if session is not None:
                with self.lock:
                    if self.sessions.get(session.id) is session and session.pending is not None:
                        self._fail(session, Refused(grpc.StatusCode.CANCELLED, "the client gave up a drive call"))
            raise
        except Exception as err:
            return await self._abort(data, context, err)

    def _begin(self, session: Session, now_us: int, query_us: int) -> asyncio.Future[bytes]:
        if session.pending is not None:
            raise Refused(PRECONDITION, f"the drive at {session.now_us} us is not answered yet")
        if now_us <= session.now_us:
            raise Refused(INVALID, f"time_now_us {now_us} does not follow {session.now_us}")
        if query_us <= now_us:
            raise Refused(INVALID, f"time_query_us {query_us} does not follow time_now_us {now_us}")
        if not self.table.covers(session.row, now_us):
            n = int(self.table.count[session.row])
            have = self.table.time_us[session.row, [0, n - 1]].tolist() if n else "none"
            raise Refused(PRECONDITION, f"no ego pose at time_now_us {now_us} us; there are {have}")
        wanted: list[Picture] = []
        for name, frames in session.frames.items():
            chosen = frames.choose(now_us)
            if chosen is None:
                raise Refused(PRECONDITION, f"no frame of camera {name!r} at or before {now_us} us")
            wanted += chosen
        bad = next((picture for picture in wanted if picture.error is not None), None)
        if bad is not None:
            raise self._bad_frame(session, bad)
        assert self._loop is not None
        session.pending, session.pending_s = self._loop.create_future(), time.monotonic()
        session.now_us, session.next_us, session.reply = now_us, query_us, None
        session.drives += 1
        self.counts["drives"] += 1
        self.table.now_us[session.row] = now_us
        self.table.place(np.array([session.row]))
        for frames in session.frames.values():
            frames.prune(now_us)
        session.missing = {id(picture) for picture in wanted if not picture.done}
        for picture in wanted:
            if not picture.queued and not picture.done:
                self._decode(session, picture)
        if not session.missing:
            self._push(session)
        return session.pending

    # ------------------------------------------------------------ pictures

    def _decode(self, session: Session, picture: Picture) -> None:
        assert self._decoders is not None
        self.counts["decoded"] += 1
        self._decoders.submit(session, picture, self.spec.cameras[picture.camera])

    def _decode_here(self, picture: Picture, size: tuple[int, int]) -> None:
        """Decode in the caller's thread; only the frame after the last decision comes this way."""
        try:
            image = decode(picture.data, *size)
            picture.frame_id, picture.image = frame_id(picture.data), image
        except BadFrameError as err:
            picture.error = str(err)

    def _decoded(self, owner: object, picture: Picture) -> None:
        session = owner
        assert isinstance(session, Session)
        with self.lock:
            if not self._keep_encoded:
                picture.data = b""
            if id(picture) not in session.missing:
                return
            if picture.error is not None:
                self._bad_frame(session, picture)
                return
            session.missing.discard(id(picture))
            if not session.missing and session.pending is not None:
                self._push(session)

    def _bad_frame(self, session: Session, picture: Picture) -> Refused:
        refused = Refused(INVALID, f"the frame of camera {picture.camera!r} at {picture.time_us} us {picture.error}")
        self._fail(session, refused)
        return refused

    # ------------------------------------------------------------ time-outs

    async def _watch(self) -> None:
        config = self.config
        pause_s = min(1.0, config.idle_timeout_s / 4.0, config.drive_timeout_s / 4.0)
        while True:
            await asyncio.sleep(pause_s)
            now_s = time.monotonic()
            with self.lock:
                for session in list(self.sessions.values()):
                    if session.pending is not None:
                        if now_s - session.pending_s > config.drive_timeout_s:
                            text = f"nobody decided within {config.drive_timeout_s} s"
                            self._fail(session, Refused(grpc.StatusCode.DEADLINE_EXCEEDED, text))
                    elif now_s - session.seen_s <= config.idle_timeout_s:
                        continue
                    elif session.terminate:
                        # It was told to end; AlpaSim may score it for long, or has forgotten it.
                        self.sessions.pop(session.id)
                    else:
                        text = f"it was silent for {config.idle_timeout_s} s and is closed"
                        self._fail(session, Refused(grpc.StatusCode.DEADLINE_EXCEEDED, text))


# ---------------------------------------------------------------- reading messages


def read_ego(trajectory: common_pb2.Trajectory, what: str) -> Ego | None:
    """A message's poses as arrays, sorted by time, rotations of norm 1; None without any.

    Raises:
        Refused: a number is not finite, or a quaternion is no rotation (its time is named).

    """
    count = len(trajectory.poses)
    if not count:
        return None
    if count > MANY:
        raise Refused(INVALID, f"{what} has {count} poses; at most {MANY} are taken")
    times, pose = read_poses(trajectory)
    _time(int(times.max()), f"a pose of {what}")
    time_us = times.astype(np.int64)
    norm = np.sqrt((pose[:, 3:] * pose[:, 3:]).sum(axis=1))
    bad = ~(np.isfinite(pose).all(axis=1) & (norm > 1e-6))
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise Refused(INVALID, f"{what} at {time_us[at]} us is no pose: {pose[at].tolist()} (x, y, z; w, x, y, z)")
    # What is of norm 1 as far as float32 can say stays as it came: a pose that is sent is a pose that is seen.
    pose[:, 3:] /= np.where(np.abs(norm - 1.0) < 3e-7, 1.0, norm)[:, None]
    if count > 1 and (np.diff(time_us) <= 0).any():
        time_us, first = np.unique(time_us, return_index=True)
        pose = pose[first]
    return Ego(time_us, pose)


def session_id_of(data: bytes) -> str:
    """The session_uuid, field 1 of every message, without parsing the rest; "" where it does not stand first."""
    if len(data) < 2 or data[0] != 0x0A or data[1] >= 0x80 or len(data) < 2 + data[1]:
        return ""
    return data[2 : 2 + data[1]].decode("utf-8", "replace")


def _time(value: int, what: str) -> int:
    if value > LATEST_US:
        raise Refused(INVALID, f"{what} is {value} us, beyond every clock")
    return value


def _settle(answers: list[tuple[asyncio.Future[bytes], bytes | Refused]]) -> None:
    for future, answer in answers:
        if future.done():
            continue
        if isinstance(answer, Refused):
            future.set_exception(answer)
        else:
            future.set_result(answer)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address; names other than localhost count as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _warm_up(spec: PolicySpec) -> None:
    """Compile the kernels, so that no first drive pays for it."""
    table = SessionTable(1, spec)
    row, identity = np.zeros(1, np.int64), np.array([[0.0, 0, 0, 1, 0, 0, 0], [1.0, 0, 0, 1, 0, 0, 0]])
    table.add_poses(0, Ego(np.array([0, 100_000]), identity), None)
    table.set_route(0, np.array([[0.0, 0.0], [100.0, 0.0]]), 0)
    table.set_recording(0, 0, Ego(np.array([0, 100_000]), identity))
    table.now_us[0] = 100_000
    table.observe(row)
    table.label(row, ("recorded_plan_rig",))
    table.along_recording(row)
    drive_replies(np.zeros((1, spec.plan_steps, 3), np.float32), table.pose_at_now(row), row, 100_000, False)
    read_poses(common_pb2.Trajectory())
