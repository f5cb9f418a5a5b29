"""One rollout of the served world: AlpaSim's calls to a driver, in its order.

Pictures, ego motion, route and recording go out together and are acknowledged before `drive`; the recording drives the
warm-up; after the last step one more picture a camera comes, then the evaluation, and only then `close_session`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from alpagym_runtime.errors import SceneError
from alpagym_runtime.random import text_seed
from alpagym_runtime.simulators.alpasim import services
from alpagym_runtime.simulators.alpasim.measures import END_MEASURES, EXACT
from alpagym_runtime.simulators.alpasim.wire import egodriver_pb2, runtime_pb2, sensorsim_pb2
from alpagym_runtime.simulators.embedded import server_messages as messages
from alpagym_runtime.simulators.embedded.reported_poses import others_between
from alpagym_runtime.simulators.embedded.scene import STEP_US, Scene
from alpagym_runtime.simulators.embedded.server_messages import RolloutError
from alpagym_runtime.simulators.embedded.server_world import SharedWorld, Tick
from alpagym_runtime.types import Ended, EpisodeRequest, MeasureSeries

log = logging.getLogger(__name__)

PLAN_STEPS, PLAN_STEP_US = 64, 100_000
NOT_SENT = {"alpasim/scene_score", "alpasim/collision_at_fault"}
"""AlpaSim makes these of the others when it aggregates."""

METHODS = (
    *("start_session", "close_session", "drive", "submit_image_observation", "submit_egomotion_observation"),
    *("submit_route", "submit_recording_ground_truth"),
)

Call: TypeAlias = grpc.aio.UnaryUnaryCall
"""It runs whether it is awaited or not, so several go out together without tasks of their own."""

TIME_AGGREGATION = {"mean": 1, "median": 2, "max": 3, "min": 4, "last": 5}


class RolloutLog(Protocol):
    """Takes what a rollout says and hears, in the order of the calls."""

    def begin(self, scene: Scene, session_id: str, frame: NDArray[np.float64], options: RolloutOptions) -> None:
        """The rollout starts; `frame` [3] is where the wire's local frame lies in the scene's."""
        ...

    def actors(
        self, time_us: int, ego: NDArray[np.float64], ids: NDArray[np.int64], poses: NDArray[np.float64]
    ) -> None:
        """Box centres in the wire's local frame: the ego's [3] and the others' [A,3] with their indices [A]."""
        ...

    def write(self, kind: str, message: bytes) -> None:
        """One message; `kind` names the field of AlpaSim's LogEntry."""
        ...

    def close(self) -> None:
        """The attempt is over."""
        ...


@dataclass(frozen=True)
class RolloutOptions:
    """What all rollouts of a server share.

    Attributes:
        control_period_us, force_gt_duration_us, n_sim_steps, pose_reporting_interval_us, skip_driver_during_force_gt,
            send_recording_ground_truth: AlpaSim's own options of these names.
        zero_dynamics: report zero dynamics in the warm-up, as AlpaSim does.
        drive_timeout_s: longest wait for an answer to `drive`.
        call_timeout_s: longest wait for any other answer.
        cameras: what `start_session` declares.

    """

    control_period_us: int
    force_gt_duration_us: int
    n_sim_steps: int
    pose_reporting_interval_us: int = 100_000
    skip_driver_during_force_gt: bool = True
    send_recording_ground_truth: bool = True
    zero_dynamics: bool = False
    drive_timeout_s: float = 60.0
    call_timeout_s: float = 30.0
    cameras: tuple[sensorsim_pb2.AvailableCamerasReturn.AvailableCamera, ...] = field(default_factory=tuple)

    @property
    def warmup_ticks(self) -> int:
        """Control steps that the recording drives."""
        return self.force_gt_duration_us // self.control_period_us


class Rollout:
    """One attempt of one rollout in one slot."""

    def __init__(
        self,
        options: RolloutOptions,
        world: SharedWorld,
        slot: int,
        scene_id: str,
        session_id: str,
        record: RolloutLog | None,
    ) -> None:
        self._options, self._world, self._slot = options, world, slot
        self._scene_id, self._session_id, self._log = scene_id, session_id, record
        self._last: Tick | None = None  # the tick before
        self._sampled = False  # whether the driver sends candidate plans

    async def run(self, driver: str) -> runtime_pb2.SimulationReturn.RolloutReturn:
        """Drive it through a driver at HOST:PORT.

        Raises:
            RolloutError: the scene, the driver's answers or the world failed.
            grpc.aio.AioRpcError: the driver refused a call or did not answer.

        """
        await self._begin()
        channel_options = [
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", 64 * 2**20),
            # Answers are small: probing the bandwidth that they need takes 0.08 ms of processor a tick.
            ("grpc.http2.bdp_probe", 0),
        ]
        try:
            async with grpc.aio.insecure_channel(driver, options=channel_options) as channel:
                self._methods = {name: channel.unary_unary(services.path(services.EGODRIVER, name)) for name in METHODS}
                try:
                    await self._start_session()
                    answer = self._evaluate(await self._loop())
                except BaseException:
                    await self._close_session(quietly=True)
                    raise
                await self._close_session(quietly=False)
                return answer
        finally:
            if self._tick.ended == Ended.RUNNING:
                await self._world.stop(self._slot)

    async def _begin(self) -> None:
        options = self._options
        try:
            scene = await self._world.scene(self._scene_id)
        except SceneError as err:
            raise RolloutError(str(err), runtime_pb2.ROLLOUT_ERROR_CODE_INVALID_SCENE) from err
        before_us = scene.handover * STEP_US - options.force_gt_duration_us
        steps = (len(scene.ego_log) - 1 - scene.handover) * STEP_US // options.control_period_us
        steps = min(steps, options.n_sim_steps - options.warmup_ticks)
        if before_us < 0 or steps < 1:
            raise RolloutError(
                f"scene {self._scene_id!r} hands over at {scene.handover * STEP_US} us and ends at "
                f"{(len(scene.ego_log) - 1) * STEP_US} us: too short for force_gt_duration_us = "
                f"{options.force_gt_duration_us} and a step of {options.control_period_us}",
                runtime_pb2.ROLLOUT_ERROR_CODE_INVALID_SCENE,
            )
        self._recording = scene.ego_log[:, :3]
        self._recording_us = np.arange(len(scene.ego_log)) * STEP_US
        self._frame = self._recording[scene.handover].copy()
        self._tick = await self._world.begin(self._slot, EpisodeRequest(self._scene_id, horizon_ticks=steps))
        if self._tick.failure is not None:
            raise RolloutError(self._tick.failure.text, runtime_pb2.ROLLOUT_ERROR_CODE_INVALID_SCENE)
        self._centre = np.array([[scene.vehicle.centre_offset_m, 0.0, 0.0]])
        if self._log is not None:
            self._log.begin(scene, self._session_id, self._frame, options)

    async def _loop(self) -> Mapping[str, MeasureSeries]:
        """Drive to the end; the measures."""
        options = self._options
        while self._tick.ended == Ended.RUNNING:
            tick = self._tick
            self._log_actors(tick)
            query_us = tick.time_us + options.control_period_us
            await self._observe(tick)
            plan: NDArray[np.float32] | None = None
            if tick.controls or not options.skip_driver_during_force_gt:
                answer = await self._drive(tick.time_us, query_us)
                if answer.terminate_session:
                    self._tick = await self._world.stop(self._slot)
                    return self._tick.measures
                self._sampled |= bool(answer.debug_info.sampled_trajectories)
                if tick.controls or answer.trajectory.poses:
                    plan = self._plan(answer, tick, query_us)
            self._last = tick
            self._tick = await self._world.step(self._slot, plan)
        if self._tick.failure is not None:
            raise RolloutError(self._tick.failure.text)
        self._log_actors(self._tick)
        await _all(self._images(self._tick))
        return self._tick.measures

    def _log_actors(self, tick: Tick) -> None:
        """Everybody at each pose reported since the tick before; at the first tick, now."""
        if self._log is None:
            return
        before = self._last
        first = 0 if before is not None else len(tick.reported) - 1
        for time_us, pose in zip(tick.reported_us[first:].tolist(), tick.reported[first:], strict=True):
            centre = messages.into_frame(messages.out_of_frame(self._centre, pose), self._frame)[0]
            ids, poses = tick.actors
            if before is not None and time_us < tick.time_us:
                part = (time_us - before.time_us) / (tick.time_us - before.time_us)
                ids, _, poses = others_between(before.actors, tick.actors, part)
            self._log.actors(time_us, centre, ids, messages.into_frame(poses, self._frame))

    # ------------------------------------------------------------ calls

    async def _start_session(self) -> None:
        request = egodriver_pb2.DriveSessionRequest(
            session_uuid=self._session_id, random_seed=text_seed(self._session_id) % 2**32
        )
        request.debug_info.scene_id = self._scene_id
        request.rollout_spec.vehicle.available_cameras.extend(self._options.cameras)
        await self._submit("start_session", request.SerializeToString(), "driver_session_request")

    async def _close_session(self, *, quietly: bool) -> None:
        close = egodriver_pb2.DriveSessionCloseRequest(session_uuid=self._session_id)
        try:
            await self._submit("close_session", close.SerializeToString(), None)
        except grpc.aio.AioRpcError as err:
            if not quietly:
                raise
            log.warning("session %s: close_session: %s %s", self._session_id, err.code().name, err.details())

    def _images(self, tick: Tick) -> list[Call]:
        calls = []
        for frame in tick.frames:
            # Rendered at one instant, so the shutter opens and closes at once.
            data = messages.image(self._session_id, frame.camera, frame.time_us, frame.time_us, frame.data)
            calls.append(self._submit("submit_image_observation", data, "driver_camera_image"))
        return calls

    def _submit(self, method: str, data: bytes, kind: str | None, timeout_s: float = 0.0) -> Call:
        """A call that is under way; await it for the answer."""
        if self._log is not None and kind is not None:
            self._log.write(kind, data)
        return self._methods[method](data, timeout=timeout_s or self._options.call_timeout_s)

    async def _observe(self, tick: Tick) -> None:
        now_us, session = tick.time_us, self._session_id
        calls = self._images(tick)
        poses = messages.into_frame(tick.reported, self._frame)
        data = messages.egomotion(session, poses, tick.reported_us, self._dynamics(tick))
        calls.append(self._submit("submit_egomotion_observation", data, "driver_ego_trajectory"))
        calls.append(self._submit("submit_route", messages.route(session, now_us, tick.route), "route_request"))
        if self._options.send_recording_ground_truth:
            seen = messages.into_frame(self._recording, tick.reported[-1])
            data = messages.recording(session, now_us, seen, self._recording_us)
            calls.append(self._submit("submit_recording_ground_truth", data, "ground_truth_request"))
        await _all(calls)

    def _dynamics(self, tick: Tick) -> NDArray[np.float64]:
        """[P,7] for the reported poses: by differences, the newest as the world has it."""
        count = len(tick.reported)
        out = np.zeros((count, 7))
        if self._options.zero_dynamics and not tick.controls:
            return out
        if count > 1:
            here, times = tick.reported, tick.reported_us
            if self._last is not None:
                here = np.concatenate([self._last.reported[-1:], here])
                times = np.concatenate([self._last.reported_us[-1:], times])
            moved = np.diff(here, axis=0) / (np.diff(times)[:, None] * 1e-6)
            cos, sin = np.cos(here[1:, 2]), np.sin(here[1:, 2])
            speeds = np.stack([moved[:, 0] * cos + moved[:, 1] * sin, moved[:, 1] * cos - moved[:, 0] * sin], axis=1)
            out[count - len(speeds) :, :2], out[count - len(speeds) :, 6] = speeds, moved[:, 2]
        out[-1] = tick.dynamics
        return out

    async def _drive(self, now_us: int, query_us: int) -> egodriver_pb2.DriveResponse:
        request = egodriver_pb2.DriveRequest(
            session_uuid=self._session_id, time_now_us=now_us, time_query_us=query_us
        ).SerializeToString()
        answer = await self._submit("drive", request, "driver_request", self._options.drive_timeout_s)
        if self._log is not None:
            self._log.write("driver_return", answer)
        try:
            return egodriver_pb2.DriveResponse.FromString(answer)
        except DecodeError as err:
            raise RolloutError(f"the answer to drive at {now_us} us cannot be parsed: {err}") from err

    def _plan(self, answer: egodriver_pb2.DriveResponse, tick: Tick, query_us: int) -> NDArray[np.float32]:
        times, poses = messages.read_plan(answer.trajectory, tick.time_us, query_us)
        local = messages.out_of_frame(poses, self._frame)
        rig = messages.into_frame(local, tick.reported[-1])
        return messages.plan_at_steps(times, rig, tick.time_us, PLAN_STEP_US, PLAN_STEPS).astype(np.float32)

    # ------------------------------------------------------------ result

    def _evaluate(self, measures: Mapping[str, MeasureSeries]) -> runtime_pb2.SimulationReturn.RolloutReturn:
        """AlpaSim's metrics and our own counts, from the handover on; without candidate plans minADE is NaN."""
        out = runtime_pb2.SimulationReturn.RolloutReturn(success=True, rollout_uuid=self._session_id)
        for name, series in measures.items():
            short = EXACT + name if name in END_MEASURES else name.removeprefix("alpasim/")
            if name == short or name in NOT_SENT:
                continue
            if short.startswith("min_ade") and not self._sampled:
                out.aggregated_metrics[short] = math.nan
                continue
            metric = out.timestep_metrics.add(name=short, time_aggregation=TIME_AGGREGATION[series.aggregation])  # type: ignore[arg-type]
            metric.timestamps_us.extend(series.time_us.tolist())
            metric.values.extend(np.where(series.valid, series.value, math.nan).tolist())
            metric.valid.extend(series.valid.tolist())
            out.aggregated_metrics[short] = series.aggregate()
        if measures:
            times = max((series.time_us for series in measures.values()), key=len)
            relevant = out.timestep_metrics.add(name="eval_relevant", time_aggregation=TIME_AGGREGATION["max"])  # type: ignore[arg-type]
            relevant.timestamps_us.extend(times.tolist())
            relevant.values.extend([1.0] * len(times))
            relevant.valid.extend([True] * len(times))
        return out


async def _all(calls: Sequence[Call]) -> None:
    """Wait for calls that are under way; once one fails, the others are given up."""
    try:
        for call in calls:
            await call
    except BaseException:
        for call in calls:
            call.cancel()
        raise
