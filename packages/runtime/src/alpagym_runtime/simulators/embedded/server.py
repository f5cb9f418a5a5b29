"""The embedded world as an AlpaSim: `RuntimeService` over gRPC, calling external egodrivers.

So a policy for AlpaSim is developed on a laptop, and a client written for AlpaSim can use this. What AlpaSim does is
done alike: a request's rollouts run as far as world and drivers have room, in the order of the requests; a failed one
is tried again under its id; cancelling `simulate` stops nothing. Beyond AlpaSim: session ids are checked, since they
name folders, and no call to a driver waits for ever.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import threading
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from alpagym_runtime.errors import ConfigError
from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.alpasim import services
from alpagym_runtime.simulators.alpasim.calibration import write_camera
from alpagym_runtime.simulators.alpasim.server import SESSION_ID, is_loopback
from alpagym_runtime.simulators.alpasim.trajectories import read_poses
from alpagym_runtime.simulators.alpasim.wire import common_pb2, runtime_pb2, sensorsim_pb2
from alpagym_runtime.simulators.embedded.camera_config import STEP_US, CamerasConfig
from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
from alpagym_runtime.simulators.embedded.measures_alpasim import NAMES as ALPASIM_MEASURES
from alpagym_runtime.simulators.embedded.server_messages import RolloutError
from alpagym_runtime.simulators.embedded.server_rollout import (
    PLAN_STEP_US,
    PLAN_STEPS,
    Rollout,
    RolloutLog,
    RolloutOptions,
)
from alpagym_runtime.simulators.embedded.server_world import SharedWorld
from alpagym_runtime.simulators.embedded.simulator import EmbeddedSimulator
from alpagym_runtime.types import Ended, EpisodeRequest, PolicySpec

log = logging.getLogger(__name__)

Return = runtime_pb2.SimulationReturn.RolloutReturn
INVALID = grpc.StatusCode.INVALID_ARGUMENT
HOST_NAME = re.compile(r"[0-9A-Za-z_.:\[\]-]{1,253}")
MOST_ROLLOUTS = 100_000
"""In one request."""


@dataclass(frozen=True)
class ServeOptions:
    """How the world is served.

    Attributes:
        rollout: what all rollouts share.
        host, port: where to listen; 0 takes a free port.
        drivers: HOST:PORT of drivers for requests that name none.
        sessions_per_driver: of those.
        max_rollout_retries: further attempts of a failed rollout.
        max_message_mib: largest gRPC message.
        identity: what the scenes are a function of, for their hashes.

    """

    rollout: RolloutOptions
    host: str = "127.0.0.1"
    port: int = 0
    drivers: tuple[str, ...] = ()
    sessions_per_driver: int = 1
    max_rollout_retries: int = 2
    max_message_mib: int = 64
    identity: str = ""


@dataclass
class ServeCounts:
    """What became of the rollouts so far."""

    succeeded: int = 0
    failed: int = 0
    attempts: int = 0
    running: int = 0
    errors: dict[str, int] = field(default_factory=dict)


class WorldServer:
    """See the module's text.

    Args:
        options: see `ServeOptions`.
        simulator: the world; one rollout a slot. It is closed with the server.
        open_log: makes the log of a rollout's attempt, given scene and session; None: nothing is logged.

    """

    def __init__(
        self,
        options: ServeOptions,
        simulator: EmbeddedSimulator,
        open_log: Callable[[str, str], RolloutLog] | None = None,
    ) -> None:
        self.options, self.simulator = options, simulator
        self.port = 0
        self.counts = ServeCounts()
        self._open_log = open_log
        self._scenes = frozenset(simulator.spec.scenes)
        self._running: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Listen.

        Raises:
            OSError: the port is taken or the host is not ours; names both.

        """
        if not is_loopback(self.options.host):
            log.warning("the world is served on %s: anybody on that network can use it, unencrypted", self.options.host)
        started = threading.Event()
        failure: list[BaseException] = []

        def run() -> None:
            try:
                asyncio.run(self._serve(started))
            except BaseException as err:
                failure.append(err)
            finally:
                started.set()
                self._ended.set()

        self._thread = threading.Thread(target=run, name="served-world", daemon=True)
        self._thread.start()
        started.wait()
        if failure:
            self._thread.join()
            raise OSError(
                f"cannot listen on {self.options.host}:{self.options.port} (is the port taken?): {failure[0]}"
            ) from failure[0]

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until `shut_down` was called or the server ended; False at the timeout."""
        return self._ended.wait(timeout_s)

    def stop(self) -> None:
        """End all rollouts and the server; idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            if not self._ended.is_set():
                self._loop.call_soon_threadsafe(self._stopped.set)
            thread.join()

    async def _serve(self, started: threading.Event) -> None:
        options = self.options
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        limit = options.max_message_mib * 2**20
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
            ]
        )
        methods = {"simulate": self._simulate, "get_runtime_info": self._info, "shut_down": self._shut_down}
        handlers = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(services.RUNTIME, handlers),))
        servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        host = f"[{options.host}]" if ":" in options.host else options.host
        self.port = server.add_insecure_port(f"{host}:{options.port}")
        await server.start()
        for name in ("", services.RUNTIME):
            await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
        interval_us = options.rollout.pose_reporting_interval_us
        world = SharedWorld(self.simulator, PLAN_STEPS, interval_us, self._loop, look=self._open_log is not None)
        self._world = world
        self._slots: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(self.simulator.spec.slots):
            self._slots.put_nowait(slot)
        self._pool = _DriverPool(options.drivers, options.sessions_per_driver)
        started.set()
        try:
            await self._stopped.wait()
            await servicer.enter_graceful_shutdown()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await server.stop(1.0)
        finally:
            world.close()

    # ------------------------------------------------------------ RuntimeService

    async def _info(self, data: bytes, context: Any) -> bytes:
        version = _version()
        info = runtime_pb2.RuntimeInfo(
            max_supported_concurrent_rollouts=self.simulator.spec.slots,
            nr_workers=1,
            renderer_type="sensorsim",
            runtime_version=version,
        )
        cameras = [camera.logical_id for camera in self.options.rollout.cameras]
        for scene_id in sorted(self._scenes):
            scene = info.scenes.add(scene_id=scene_id, provider_kind="alpagym")
            digest = hashlib.sha256(f"{self.options.identity}\n{scene_id}".encode()).hexdigest()
            scene.metadata.dataset_hash, scene.metadata.uuid = digest, digest[:32]
            scene.metadata.version_string = version.version_id
            scene.metadata.camera_ids.extend(cameras)
        for name in ("controller", "driver", "physics", "renderer", "trafficsim"):
            served = name in ("controller", "renderer")
            capacity = self.simulator.spec.slots if served else 0
            info.service_capacities.add(service_name=name, total_capacity=capacity, skipped=not served)
        for part in ("physics_version", "driver_version", "traffic_version"):
            getattr(info, part).version_id = "<skip>"
        return info.SerializeToString()

    async def _shut_down(self, data: bytes, context: Any) -> bytes:
        self._stopped.set()
        return b""

    async def _simulate(self, data: bytes, context: Any) -> bytes:
        try:
            request = runtime_pb2.SimulationRequest.FromString(data)
        except DecodeError as err:
            await context.abort(INVALID, f"the message cannot be parsed: {err}")
        wrong = self._wrong(request)
        if wrong:
            await context.abort(*wrong)
        pool = self._pool
        if request.available_drivers:
            addresses = [f"{driver.ip}:{driver.port}" for driver in request.available_drivers]
            pool = _DriverPool(addresses, request.n_concurrent_per_driver)
        jobs = []
        for spec in request.rollout_specs:
            ids = list(spec.session_uuids) or [uuid.uuid4().hex for _ in range(spec.nr_rollouts)]
            self._running.update(ids)
            jobs += [self._keep(self._job(spec, session_id, pool)) for session_id in ids[: spec.nr_rollouts]]
        # As in AlpaSim, a client that gives up stops nothing: the rollouts go on.
        answers = await asyncio.shield(asyncio.gather(*jobs))
        version = _version()
        out = runtime_pb2.SimulationReturn(runtime_version=version, rollout_returns=answers)
        for part in ("physics_version", "driver_version", "traffic_version"):
            getattr(out, part).version_id = "<skip>"
        return out.SerializeToString()

    def _wrong(self, request: runtime_pb2.SimulationRequest) -> tuple[grpc.StatusCode, str] | None:
        """Why a request cannot be begun."""
        seen = set(self._running)
        if sum(spec.nr_rollouts for spec in request.rollout_specs) > MOST_ROLLOUTS:
            return INVALID, f"at most {MOST_ROLLOUTS} rollouts fit in a request"
        for spec in request.rollout_specs:
            if spec.scenario_id not in self._scenes:
                return INVALID, f"No data source found for scene_id: {spec.scenario_id}"
            if spec.session_uuids and len(spec.session_uuids) != spec.nr_rollouts:
                text = f"session_uuids has {len(spec.session_uuids)} entries for nr_rollouts = {spec.nr_rollouts}"
                return grpc.StatusCode.UNKNOWN, text
            for session_id in spec.session_uuids:
                if not SESSION_ID.fullmatch(session_id):
                    text = f"session uuid {session_id[:80]!r} must be 1 to 64 letters, digits or '-', not '-' first"
                    return INVALID, text
                if session_id in seen:
                    return INVALID, f"session {session_id!r} is running or named twice"
                seen.add(session_id)
        for driver in request.available_drivers:
            if not HOST_NAME.fullmatch(driver.ip) or not 0 < driver.port < 65536:
                return INVALID, f"driver {driver.ip[:80]!r}, port {driver.port}: not HOST and PORT"
        if request.available_drivers and request.n_concurrent_per_driver < 1:
            return INVALID, "n_concurrent_per_driver must be at least 1 where available_drivers is set"
        if not request.available_drivers and not self.options.drivers and request.rollout_specs:
            return INVALID, "no driver: name available_drivers, or serve with --driver HOST:PORT"
        return None

    # ------------------------------------------------------------ rollouts

    def _keep(self, work: Coroutine[Any, Any, Return]) -> asyncio.Task[Return]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _job(self, spec: runtime_pb2.RolloutSpec, session_id: str, pool: _DriverPool) -> Return:
        """A rollout until it succeeds or its attempts are used up; a retry queues again behind the others."""
        failed = Return(rollout_spec=spec, rollout_uuid=session_id)
        try:
            for _ in range(self.options.max_rollout_retries + 1):
                # The driver first: who waits for one keeps no slot from others.
                driver = await pool.take()
                try:
                    slot = await self._slots.get()
                    try:
                        self.counts.running += 1
                        self.counts.attempts += 1
                        answer = await self._attempt(spec, session_id, slot, driver)
                    finally:
                        self.counts.running -= 1
                        self._slots.put_nowait(slot)
                finally:
                    pool.give_back(driver)
                if answer.success:
                    self.counts.succeeded += 1
                    return answer
                failed.error, failed.error_code = answer.error, answer.error_code
                if answer.error_code == runtime_pb2.ROLLOUT_ERROR_CODE_INVALID_SCENE:
                    break
            self.counts.failed += 1
            return failed
        finally:
            self._running.discard(session_id)

    async def _attempt(self, spec: runtime_pb2.RolloutSpec, session_id: str, slot: int, driver: str) -> Return:
        answer = Return()
        try:
            record = None if self._open_log is None else self._open_log(spec.scenario_id, session_id)
            try:
                rollout = Rollout(self.options.rollout, self._world, slot, spec.scenario_id, session_id, record)
                answer = await rollout.run(driver)
                answer.rollout_spec.CopyFrom(spec)
                return answer
            finally:
                if record is not None:
                    record.close()
        except RolloutError as err:
            kind, answer.error, answer.error_code = "ROLLOUT", str(err), err.code  # type: ignore[assignment]
        except grpc.aio.AioRpcError as err:
            kind, answer.error = err.code().name, f"driver {driver}: {err.code().name}: {err.details()}"
            answer.error_code = runtime_pb2.ROLLOUT_ERROR_CODE_UNSPECIFIED
        except Exception as err:
            # Ours, or the disk's: this rollout fails, the others and the server go on.
            log.exception("session %s in scene %s", session_id, spec.scenario_id)
            kind, answer.error = type(err).__name__, f"{type(err).__name__}: {err}"
            answer.error_code = runtime_pb2.ROLLOUT_ERROR_CODE_UNSPECIFIED
        answer.success = False
        self.counts.errors[kind] = self.counts.errors.get(kind, 0) + 1
        log.warning("session %s in scene %s failed: %s", session_id, spec.scenario_id, answer.error)
        return answer


def declare_cameras(
    config: CamerasConfig, sizes: Mapping[str, tuple[int, int]]
) -> tuple[sensorsim_pb2.AvailableCamerasReturn.AvailableCamera, ...]:
    """What sessions declare of cameras, name -> (height, width) px; ConfigError for one that is not mounted."""
    from alpagym_runtime.simulators.embedded.rendering.rays import mounted

    return tuple(write_camera(mounted(name, config.mount(name), size)) for name, size in sizes.items())


def build_world(
    config: EmbeddedConfig,
    dataset: DatasetSection,
    slots: int,
    options: RolloutOptions,
    cameras: Mapping[str, tuple[int, int]] | None = None,
) -> EmbeddedSimulator:
    """The world that is served: AlpaSim drives on after every event, and reports its own measures.

    Pictures are JPEGs of quality 95, every 0.1 s or as slowly as a camera is.

    Raises:
        ConfigError: planner_delay_us without plans from the warm-up, or what the world itself refuses.

    """
    if config.planner_delay_us and options.skip_driver_during_force_gt and options.warmup_ticks:
        raise ConfigError(
            f"is {config.planner_delay_us}, so the driver must be asked in the warm-up too (--ask-in-warm-up): at the "
            "handover there is no plan of that age else",
            key="simulator.planner_delay_us",
        )
    spec = PolicySpec(
        fields=("ego_dynamics_rig", "route_rig"),
        cameras=cameras or {},
        # All pictures since the last control step.
        frames=options.control_period_us // STEP_US if cameras else 1,
        frame_step_us=STEP_US,
        history_steps=1,
        plan_steps=PLAN_STEPS,
        plan_step_us=PLAN_STEP_US,
    )
    measures = sorted({*config.measures, *ALPASIM_MEASURES})
    served = replace(
        config,
        end_on=[],
        threads=0,
        warmup_ticks=options.warmup_ticks,
        measures=measures,
        pose_reporting_interval_us=options.pose_reporting_interval_us,
        cameras=replace(config.cameras, encoding="jpeg95"),
    )
    simulator = EmbeddedSimulator(served, spec, dataset, slots, files_only=True)
    _compile(simulator)
    return simulator


def _compile(simulator: EmbeddedSimulator) -> None:
    """Drive a first scene for two ticks, so that no rollout waits for the compiler."""
    slot = np.zeros(1, np.int64)
    simulator.start(slot, [EpisodeRequest(simulator.spec.scenes[0], horizon_ticks=1)])
    batch = simulator.receive(1, 600.0)
    while batch.ended[0] == Ended.RUNNING:
        simulator.send(slot, plan_decision(np.zeros((1, PLAN_STEPS, 3), np.float32)), np.zeros(1, bool))
        batch = simulator.receive(1, 600.0)
    read_poses(common_pb2.Trajectory())


class _DriverPool:
    """Drivers, each as often as it takes sessions."""

    def __init__(self, addresses: Sequence[str], sessions_each: int) -> None:
        self._free: asyncio.Queue[str] = asyncio.Queue()
        for address in addresses:
            for _ in range(min(sessions_each, 4096)):
                self._free.put_nowait(address)

    async def take(self) -> str:
        return await self._free.get()

    def give_back(self, driver: str) -> None:
        self._free.put_nowait(driver)


def _version() -> common_pb2.VersionId:
    version = common_pb2.VersionId(version_id=f"alpagym-world-{metadata.version('alpagym-runtime')}")
    version.grpc_api_version.minor = 54
    return version
