"""A fake AlpaSim: the calls of the real runtime in the same order, on a road of a few lines, with faults on demand.

    with FakeAlpaSim(scenes=("clip-a", "clip-b"), faults=(Fault("hang", tick=3, rollouts=(0,)),)) as fake:
        simulator = AlpasimConfig(address=fake.address).build(spec, DatasetSection(), 2, ())

The ego is where its plan says it is (perfect tracking); the recording drives in the warm-up. What the real runtime
checks in a driver's answer is checked here: unit quaternions, strictly increasing times, the first pose at
`time_now_us`. A failed rollout is tried again under its old session id, as there. Everything is a function of the scene
and the plans; nothing is drawn.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import grpc
import numpy as np
import simplejpeg
from numpy.typing import NDArray

from alpagym_runtime.random import text_seed
from alpagym_runtime.simulators.alpasim import services
from alpagym_runtime.simulators.alpasim.wire import common_pb2, egodriver_pb2, runtime_pb2, sensorsim_pb2

EPOCH_US = 1_700_000_000_000_000
"""Recorded clips count from the Unix epoch: no float32 bears such times."""

FaultKind = Literal[
    "crash",
    "hang",
    "delay",
    "reorder",
    "duplicate",
    "wrong_scene",
    "oversize",
    "malformed",
    "bad_image",
    "fail",
    "no_eval",
]


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        kind: crash (the whole server dies), hang (the rollout stops for good), delay (every call comes `seconds` late),
            reorder (observations one by one, backwards, frames last), duplicate (every call twice), wrong_scene (the
            session opens with another scene), oversize (a message above `bytes` first), malformed (bytes that are no
            message, to every method), bad_image (a cut picture), fail (the rollout raises), no_eval (no measures).
        tick: control step, warm-up included, at which it strikes; delay, reorder and duplicate last from there on.
        rollouts: which rollouts of this server, counted from 0; empty: all.
        seconds: of delay.
        bytes: size of an oversize message.
        attempts: it strikes in so many attempts of a rollout, so a retry may succeed.

    """

    kind: FaultKind
    tick: int = 0
    rollouts: tuple[int, ...] = ()
    seconds: float = 0.05
    bytes: int = 64 * 2**20 + 1
    attempts: int = 1_000_000


class RolloutError(Exception):
    """A rollout failed, as AlpaSim says it: in `RolloutReturn.error`."""


class _Crash(Exception):
    pass


@dataclass
class Rollout:
    """What one rollout did: for tests to look at."""

    index: int
    scene_id: str
    session_id: str
    attempt: int = 0
    drives: int = 0
    statuses: list[tuple[str, str]] = field(default_factory=list)
    replies: list[bytes] = field(default_factory=list)
    terminated: bool = False


class Road:
    """The recorded drive of a scene: constant speed along a gentle bend, from its id."""

    def __init__(self, scene_id: str, seconds: float = 20.0) -> None:
        draw = text_seed(scene_id)
        self.speed_mps = 6.0 + draw % 64 / 16.0
        self.bend_per_m = (draw // 64 % 64 - 32) / 32.0 * 2e-3
        self.length_m = self.speed_mps * seconds
        self.seconds = seconds

    def pose(self, time_us: int) -> NDArray[np.float64]:
        """x, y, yaw of the rig in local at a time since the recording began."""
        s, k = self.speed_mps * time_us * 1e-6, self.bend_per_m
        if abs(k) < 1e-9:
            return np.array([s, 0.0, 0.0])
        return np.array([math.sin(k * s) / k, (1.0 - math.cos(k * s)) / k, k * s])

    def station(self, xy: NDArray[np.float64]) -> tuple[float, float]:
        """Arc length along and offset to the left of the path."""
        k = self.bend_per_m
        if abs(k) < 1e-9:
            return float(xy[0]), float(xy[1])
        # Distance to the centre of the circle (0, 1/k).
        dx, dy = float(xy[0]), float(xy[1]) - 1.0 / k
        radius = math.hypot(dx, dy)
        return math.atan2(dx * math.copysign(1.0, k), -dy * math.copysign(1.0, k)) / k, (abs(1.0 / k) - radius) * (
            1.0 if k > 0 else -1.0
        )


class FakeAlpaSim:
    """See the module's text.

    Args:
        scenes: ids on offer.
        capacity: rollouts side by side.
        n_sim_steps: control steps, warm-up included.
        cameras: name -> (height, width) of the pictures that are sent.
        image_format: jpeg or png.
        control_period_us, force_gt_duration_us, skip_driver_during_force_gt: as in AlpaSim's config.
        camera_interval_us: between frames.
        route_points: points of a route; 12 of 20 are known in the scenes whose id ends in "short".
        send_ground_truth: send the recording each tick.
        max_rollout_retries: further attempts of a failed rollout.
        faults: what goes wrong.
        port: 0 takes a free one.

    """

    def __init__(
        self,
        scenes: Sequence[str] = ("clip-a", "clip-b", "clip-c-short"),
        *,
        capacity: int = 16,
        n_sim_steps: int = 80,
        cameras: dict[str, tuple[int, int]] | None = None,
        image_format: Literal["jpeg", "png"] = "jpeg",
        control_period_us: int = 100_000,
        force_gt_duration_us: int = 300_000,
        skip_driver_during_force_gt: bool = True,
        camera_interval_us: int = 100_000,
        route_points: int = 20,
        send_ground_truth: bool = True,
        max_rollout_retries: int = 2,
        faults: Sequence[Fault] = (),
        port: int = 0,
    ) -> None:
        self.scenes, self.capacity, self.n_sim_steps = tuple(scenes), capacity, n_sim_steps
        self.cameras, self.image_format = dict(cameras or {}), image_format
        self.period_us, self.force_gt_us = control_period_us, force_gt_duration_us
        self.skip, self.camera_interval_us = skip_driver_during_force_gt, camera_interval_us
        self.route_points, self.send_ground_truth = route_points, send_ground_truth
        self.retries, self.faults, self.port = max_rollout_retries, tuple(faults), port
        self.rollouts: list[Rollout] = []
        self.in_flight = 0
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """HOST:PORT of its RuntimeService."""
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> FakeAlpaSim:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Serve in a thread of its own."""
        started = threading.Event()
        failure: list[BaseException] = []

        def run() -> None:
            try:
                asyncio.run(self._serve(started))
            except BaseException as err:
                failure.append(err)
                started.set()

        self._thread = threading.Thread(target=run, name="fake-alpasim", daemon=True)
        self._thread.start()
        started.wait()
        if failure:
            raise failure[0]

    def stop(self) -> None:
        """Die at once, whatever runs; idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            if thread.is_alive():
                self._loop.call_soon_threadsafe(self._stopped.set)
            thread.join(30.0)

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        self._free = asyncio.Semaphore(self.capacity)
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        methods = {"simulate": self._simulate, "get_runtime_info": self._info, "shut_down": self._shut_down}
        handlers = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(services.RUNTIME, handlers),))
        self.port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        await server.start()
        started.set()
        await self._stopped.wait()
        await server.stop(None)

    # ------------------------------------------------------------ RuntimeService

    async def _info(self, data: bytes, context: Any) -> bytes:
        info = runtime_pb2.RuntimeInfo(
            max_supported_concurrent_rollouts=self.capacity, nr_workers=1, renderer_type="sensorsim"
        )
        for scene_id in self.scenes:
            scene = info.scenes.add(scene_id=scene_id, provider_kind="usdz")
            scene.metadata.dataset_hash, scene.metadata.uuid = f"{text_seed(scene_id):016x}", scene_id
            scene.metadata.camera_ids.extend(sorted(self.cameras))
            scene.metadata.start_time_us = EPOCH_US
            scene.metadata.end_time_us = EPOCH_US + 20_000_000
        return info.SerializeToString()

    async def _shut_down(self, data: bytes, context: Any) -> bytes:
        self._stopped.set()
        return b""

    async def _simulate(self, data: bytes, context: Any) -> bytes:
        request = runtime_pb2.SimulationRequest.FromString(data)
        for spec in request.rollout_specs:
            if spec.scenario_id not in self.scenes:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT, f"No data source found for scene_id: {spec.scenario_id}"
                )
            if spec.session_uuids and len(spec.session_uuids) != spec.nr_rollouts:
                raise ValueError("session_uuids must be none or one a rollout")
        if not request.available_drivers or request.n_concurrent_per_driver < 1:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "drivers and n_concurrent_per_driver >= 1 are needed")
        driver = request.available_drivers[0]
        jobs = [
            self._job(spec, spec.session_uuids[i], f"{driver.ip}:{driver.port}")
            for spec in request.rollout_specs
            for i in range(spec.nr_rollouts)
        ]
        try:
            answer = runtime_pb2.SimulationReturn(rollout_returns=await asyncio.gather(*jobs))
        except _Crash:
            self._stopped.set()
            await asyncio.Event().wait()
            raise AssertionError from None
        return answer.SerializeToString()

    async def _job(
        self, spec: runtime_pb2.RolloutSpec, session_id: str, driver: str
    ) -> runtime_pb2.SimulationReturn.RolloutReturn:
        out = runtime_pb2.SimulationReturn.RolloutReturn(rollout_spec=spec, rollout_uuid=session_id)
        async with self._free:
            self.in_flight += 1
            index = len({r.session_id for r in self.rollouts} | {session_id}) - 1
            try:
                for attempt in range(self.retries + 1):
                    rollout = Rollout(index, spec.scenario_id, session_id, attempt)
                    self.rollouts.append(rollout)
                    try:
                        await _Drive(self, rollout, driver, out).run()
                        out.success, out.error = True, ""
                        return out
                    except (RolloutError, grpc.aio.AioRpcError) as err:
                        out.error, out.error_code = str(err), runtime_pb2.ROLLOUT_ERROR_CODE_UNSPECIFIED
                return out
            finally:
                self.in_flight -= 1


class _Drive:
    """One attempt of one rollout."""

    def __init__(
        self, fake: FakeAlpaSim, rollout: Rollout, driver: str, out: runtime_pb2.SimulationReturn.RolloutReturn
    ) -> None:
        self.fake, self.rollout, self.out, self.driver = fake, rollout, out, driver
        self.road = Road(rollout.scene_id)
        self.context_us = EPOCH_US
        self.policy_us = EPOCH_US + fake.period_us
        self.handover_us = self.policy_us + fake.force_gt_us
        self.poses = {time: self.road.pose(time - EPOCH_US) for time in (self.context_us, self.policy_us)}
        self.sent_us = 0
        self.moved = False  # whether the last step was the policy's

    def fault(self, kind: FaultKind, tick: int, lasting: bool = False) -> Fault | None:
        for fault in self.fake.faults:
            hits = not fault.rollouts or self.rollout.index in fault.rollouts
            when = tick >= fault.tick if lasting else tick == fault.tick
            if fault.kind == kind and hits and when and self.rollout.attempt < fault.attempts:
                return fault
        return None

    async def run(self) -> None:
        fake, session_id = self.fake, self.rollout.session_id
        options = [("grpc.enable_http_proxy", 0), ("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(self.driver, options=options) as channel:
            self.channel = channel
            start = egodriver_pb2.DriveSessionRequest(session_uuid=session_id, random_seed=1)
            start.debug_info.scene_id = "another" if self.fault("wrong_scene", 0) else self.rollout.scene_id
            for name, (height, width) in fake.cameras.items():
                start.rollout_spec.vehicle.available_cameras.append(_camera(name, height, width))
            try:
                await self.call("start_session", start.SerializeToString(), 0)
                await self._loop()
            finally:
                close = egodriver_pb2.DriveSessionCloseRequest(session_uuid=session_id)
                await self.call("close_session", close.SerializeToString(), 0)

    async def _loop(self) -> None:
        fake, recorded_us = self.fake, int(self.road.seconds * 1e6) + EPOCH_US
        steps = min(fake.n_sim_steps, (recorded_us - self.policy_us) // fake.period_us)
        end_us = self.policy_us + steps * fake.period_us
        frames_us = self.policy_us
        for k in range(steps):
            now_us = self.policy_us + k * fake.period_us
            query_us = now_us + fake.period_us
            if self.fault("crash", k):
                raise _Crash
            if self.fault("hang", k):
                await asyncio.Event().wait()
            if self.fault("fail", k):
                raise RolloutError("the fake was told to fail")
            frames = list(range(frames_us, now_us + 1, fake.camera_interval_us))
            frames_us = frames[-1] + fake.camera_interval_us if frames else frames_us
            await self._observe(k, now_us, frames)
            recorded = query_us <= self.handover_us
            if not (recorded and fake.skip):
                drive = egodriver_pb2.DriveRequest(
                    session_uuid=self.rollout.session_id, time_now_us=now_us, time_query_us=query_us
                )
                reply = await self.call("drive", drive.SerializeToString(), k)
                self.rollout.drives += 1
                self.rollout.replies.append(reply)
                answer = egodriver_pb2.DriveResponse.FromString(reply)
                if answer.terminate_session:
                    self.rollout.terminated = True
                    self._score()
                    return
                if not recorded:
                    self.poses[query_us] = self._follow(answer.trajectory, now_us, query_us)
            if recorded:
                self.poses[query_us] = self.road.pose(query_us - EPOCH_US)
            self.moved = not recorded
        for name in fake.cameras:
            await self.call("submit_image_observation", self._image(name, end_us, steps), steps)
        self._score()

    async def call(self, method: str, data: bytes, tick: int, again: bool = True) -> bytes:
        delay = self.fault("delay", tick, lasting=True)
        if delay:
            await asyncio.sleep(delay.seconds)
        call = self.channel.unary_unary(services.path(services.EGODRIVER, method))
        try:
            if again and self.fault("duplicate", tick, lasting=True) and method != "start_session":
                first, _ = await asyncio.gather(call(data), call(data))
                return bytes(first)
            return bytes(await call(data))
        except grpc.aio.AioRpcError as err:
            self.rollout.statuses.append((method, err.code().name))
            raise

    async def _refused(self, method: str, data: bytes) -> None:
        """A call that the driver is expected to refuse; how it does is kept."""
        try:
            await self.channel.unary_unary(services.path(services.EGODRIVER, method))(data)
            self.rollout.statuses.append((method, "OK"))
        except grpc.aio.AioRpcError as err:
            self.rollout.statuses.append((method, err.code().name))

    async def _observe(self, tick: int, now_us: int, frames_us: list[int]) -> None:
        oversize = self.fault("oversize", tick)
        if oversize:
            await self._refused("submit_image_observation", self._image("any", now_us, tick, bytes(oversize.bytes)))
        if self.fault("malformed", tick):
            for method in (
                "start_session", "submit_image_observation", "submit_egomotion_observation", "submit_route",
                "submit_recording_ground_truth", "drive", "close_session",
            ):  # fmt: skip
                await self._refused(method, b"\xff\xff\xff\xff not a message")
        calls = [
            ("submit_image_observation", self._image(name, time_us, tick))
            for time_us in frames_us
            for name in self.fake.cameras
        ]
        calls.append(("submit_egomotion_observation", self._egomotion(now_us)))
        calls.append(("submit_route", self._route(now_us)))
        if self.fake.send_ground_truth:
            calls.append(("submit_recording_ground_truth", self._recording(now_us)))
        if self.fault("reorder", tick, lasting=True):
            for method, data in calls[::-1]:
                await self.call(method, data, tick)
        else:
            await asyncio.gather(*(self.call(method, data, tick) for method, data in calls))

    # ------------------------------------------------------------ messages

    def _image(self, camera: str, time_us: int, tick: int, data: bytes | None = None) -> bytes:
        if data is None:
            height, width = self.fake.cameras[camera]
            data = picture(self.rollout.scene_id, camera, time_us, height, width, self.fake.image_format)
            if self.fault("bad_image", tick):
                data = data[: len(data) // 2]
        image = egodriver_pb2.RolloutCameraImage(session_uuid=self.rollout.session_id)
        image.camera_image.logical_id = camera
        image.camera_image.frame_start_us, image.camera_image.frame_end_us = time_us - 30_000, time_us
        image.camera_image.image_bytes = data
        return image.SerializeToString()

    def _egomotion(self, now_us: int) -> bytes:
        request = egodriver_pb2.RolloutEgoTrajectory(session_uuid=self.rollout.session_id)
        for time_us in sorted(time for time in self.poses if self.sent_us < time <= now_us):
            _set_pose(request.trajectory.poses.add(timestamp_us=time_us).pose, self.poses[time_us])
            state = request.dynamic_states.add()
            if self.moved:
                before = self.poses[time_us - self.fake.period_us]
                here, step_s = self.poses[time_us], self.fake.period_us * 1e-6
                dx, dy = (here - before)[:2] / step_s
                cos, sin = math.cos(here[2]), math.sin(here[2])
                state.linear_velocity.x, state.linear_velocity.y = cos * dx + sin * dy, cos * dy - sin * dx
                state.angular_velocity.z = (here - before)[2] / step_s
        self.sent_us = now_us
        return request.SerializeToString()

    def _route(self, now_us: int) -> bytes:
        request = egodriver_pb2.RouteRequest(session_uuid=self.rollout.session_id)
        request.route.timestamp_us = now_us
        here = self.poses[now_us]
        station, _ = self.road.station(here[:2])
        known = 12 if self.rollout.scene_id.endswith("short") else self.fake.route_points
        for k in range(self.fake.route_points):
            at = self.road.pose(round((station + k * 80.0 / 19.0) / self.road.speed_mps * 1e6))
            x, y = _into_rig(at, here)[:2] if k < known else (math.nan, math.nan)
            request.route.waypoints.add(x=x, y=y)
        return request.SerializeToString()

    def _recording(self, now_us: int) -> bytes:
        request = egodriver_pb2.GroundTruthRequest(session_uuid=self.rollout.session_id)
        request.ground_truth.timestamp_us = now_us
        for time_us in range(0, int(self.road.seconds * 1e6) + 1, 100_000):
            item = request.ground_truth.trajectory.poses.add(timestamp_us=EPOCH_US + time_us)
            _set_pose(item.pose, _into_rig(self.road.pose(time_us), self.poses[now_us]))
        return request.SerializeToString()

    def _follow(self, plan: common_pb2.Trajectory, now_us: int, query_us: int) -> NDArray[np.float64]:
        """The plan's pose at the query, after AlpaSim's own checks."""
        times = [item.timestamp_us for item in plan.poses]
        if not times:
            raise RolloutError("the plan is empty")
        if any(b <= a for a, b in itertools.pairwise(times)):
            raise RolloutError("plan times do not increase strictly")
        if times[0] != now_us or query_us > times[-1]:
            raise RolloutError(f"Interpolation timestamp {query_us} is outside range [{times[0]}, {times[-1]}]")
        poses = []
        for item in plan.poses:
            q, v = item.pose.quat, item.pose.vec
            if abs(q.w * q.w + q.x * q.x + q.y * q.y + q.z * q.z - 1.0) > 1e-4:
                raise RolloutError("a quaternion of the plan is not of norm 1")
            poses.append([v.x, v.y, math.atan2(2.0 * (q.w * q.z + q.x * q.y), 1.0 - 2.0 * (q.y * q.y + q.z * q.z))])
        at = max(i for i, time in enumerate(times) if time <= query_us)
        after = min(at + 1, len(times) - 1)
        f = 0.0 if after == at else (query_us - times[at]) / (times[after] - times[at])
        a, b = np.array(poses[at]), np.array(poses[after])
        turn = (b[2] - a[2] + math.pi) % (2.0 * math.pi) - math.pi
        return np.array([*(a[:2] + f * (b - a)[:2]), a[2] + f * turn])

    def _score(self) -> None:
        """AlpaSim's metrics in spirit: a parked car 3 m left of the path at 60 m, road edges 6 m to each side."""
        del self.out.timestep_metrics[:]
        self.out.aggregated_metrics.clear()
        if self.fault("no_eval", 0, lasting=True):
            return
        times = sorted(self.poses)
        stations = np.array([self.road.station(self.poses[time][:2]) for time in times])
        recorded = np.array([self.road.pose(time - EPOCH_US) for time in times])
        here = np.array([self.poses[time] for time in times])
        hits = (np.abs(stations[:, 0] - 60.0) < 4.5) & (np.abs(stations[:, 1] - 3.0) < 1.9)
        share = np.clip(stations[:, 0] / self.road.length_m, 0.0, 1.0)
        series: dict[str, tuple[NDArray[Any], int]] = {
            "collision_any": (hits, runtime_pb2.TIME_AGGREGATION_MAX),
            "collision_front": (hits, runtime_pb2.TIME_AGGREGATION_MAX),
            "collision_lateral": (hits & False, runtime_pb2.TIME_AGGREGATION_MAX),
            "collision_rear": (hits & False, runtime_pb2.TIME_AGGREGATION_MAX),
            "offroad": (np.abs(stations[:, 1]) > 6.0, runtime_pb2.TIME_AGGREGATION_MAX),
            "dist_to_gt_trajectory": (np.abs(stations[:, 1]), runtime_pb2.TIME_AGGREGATION_MAX),
            "dist_to_gt_location": (np.hypot(*(here - recorded)[:, :2].T), runtime_pb2.TIME_AGGREGATION_MAX),
            "progress": (share, runtime_pb2.TIME_AGGREGATION_LAST),
            "progress_rel_to_total": (share, runtime_pb2.TIME_AGGREGATION_LAST),
            "gt_dist_traveled_m": (np.full(len(times), self.road.length_m), runtime_pb2.TIME_AGGREGATION_LAST),
        }
        for name, (values, aggregation) in series.items():
            self.out.timestep_metrics.add(
                name=name,
                timestamps_us=times,
                values=values.astype(float).tolist(),
                valid=[True] * len(times),
                time_aggregation=aggregation,  # type: ignore[arg-type]
            )
            worst = values.max() if aggregation == runtime_pb2.TIME_AGGREGATION_MAX else values[-1]
            self.out.aggregated_metrics[name] = float(worst)
        self.out.aggregated_metrics["min_ade@5.0s(gt)"] = math.nan


def picture(scene_id: str, camera: str, time_us: int, height: int, width: int, image_format: str) -> bytes:
    """An encoded frame whose colours tell scene, camera and time: red moves with time, green is the camera's."""
    out = np.zeros((height, width, 3), np.uint8)
    out[..., 0] = (time_us // 10_000 + np.arange(width)) % 256
    out[..., 1] = text_seed(camera) % 256
    out[..., 2] = text_seed(scene_id) % 256
    if image_format == "jpeg":
        return bytes(simplejpeg.encode_jpeg(out, quality=95))
    import cv2

    return bytes(cv2.imencode(".png", out[..., ::-1])[1].tobytes())


def _camera(name: str, height: int, width: int) -> sensorsim_pb2.AvailableCamerasReturn.AvailableCamera:
    camera = sensorsim_pb2.AvailableCamerasReturn.AvailableCamera(logical_id=name)
    pinhole = camera.intrinsics.opencv_pinhole_param
    pinhole.focal_length_x = pinhole.focal_length_y = width / 2.0
    pinhole.principal_point_x, pinhole.principal_point_y = width / 2.0, height / 2.0
    camera.intrinsics.logical_id = name
    camera.intrinsics.resolution_h, camera.intrinsics.resolution_w = height, width
    quat = camera.rig_to_camera.quat
    quat.w, quat.x, quat.y, quat.z = 0.5, -0.5, 0.5, -0.5
    camera.rig_to_camera.vec.x, camera.rig_to_camera.vec.z = 1.5, 1.5
    return camera


def _set_pose(pose: common_pb2.Pose, xyyaw: NDArray[np.float64]) -> None:
    pose.vec.x, pose.vec.y = float(xyyaw[0]), float(xyyaw[1])
    pose.quat.w, pose.quat.z = math.cos(xyyaw[2] / 2.0), math.sin(xyyaw[2] / 2.0)


def _into_rig(xyyaw: NDArray[np.float64], rig: NDArray[np.float64]) -> NDArray[np.float64]:
    dx, dy = xyyaw[0] - rig[0], xyyaw[1] - rig[1]
    cos, sin = math.cos(rig[2]), math.sin(rig[2])
    return np.array([cos * dx + sin * dy, cos * dy - sin * dx, xyyaw[2] - rig[2]])
