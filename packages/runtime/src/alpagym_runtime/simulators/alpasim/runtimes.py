"""The client side: AlpaSim runtimes that are asked for rollouts, each as many at once as it bears.

A rollout that is asked for runs on even if we give up the call, so nothing here cancels one. A runtime that does not
answer is lost: its rollouts are void, the others go on, and it is asked again every few seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from alpagym_runtime.errors import SimulatorError
from alpagym_runtime.simulators.alpasim import services
from alpagym_runtime.simulators.alpasim.wire import common_pb2, runtime_pb2
from alpagym_runtime.types import Failure

PROBE_S = 2.0


@dataclass(eq=False)
class Runtime:
    """One AlpaSim: its address, how many rollouts it bears, how many of ours it has."""

    address: str
    channel: grpc.aio.Channel
    info: runtime_pb2.RuntimeInfo
    capacity: int
    in_flight: int = 0
    lost: bool = False


@dataclass(frozen=True)
class Order:
    """A rollout to ask for; `still_wanted` is asked before it goes out."""

    scene_id: str
    session_id: str
    still_wanted: Callable[[], bool]
    done: Callable[[runtime_pb2.SimulationReturn.RolloutReturn | Failure], None]
    since_s: float = field(default_factory=time.monotonic)


class RuntimePool:
    """Deals orders to runtimes by free capacity; lives in one event loop."""

    def __init__(self, driver: tuple[str, int], max_message_mib: int, rollout_timeout_s: float, lost_s: float) -> None:
        self.runtimes: list[Runtime] = []
        self._driver, self._timeout_s, self._lost_s = driver, rollout_timeout_s, lost_s
        limit = max_message_mib * 2**20
        self._options = [
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_send_message_length", limit),
            ("grpc.enable_http_proxy", 0),
        ]
        self._queue: deque[Order] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    async def connect(self, addresses: list[str], timeout_s: float) -> None:
        """Wait for every runtime to answer.

        Raises:
            SimulatorError: one does not within the time, or they offer different scenes.

        """
        for address in addresses:
            channel = grpc.aio.insecure_channel(address, options=self._options)
            try:
                info = await self._info(channel, timeout_s, wait=True)
            except (grpc.aio.AioRpcError, DecodeError) as err:
                await channel.close()
                raise SimulatorError(
                    f"no AlpaSim runtime answers at {address} within {timeout_s} s: {_text(err)}", code="UNAVAILABLE"
                ) from err
            capacity = max(info.max_supported_concurrent_rollouts, 1)
            self.runtimes.append(Runtime(address, channel, info, capacity))
        first = self.runtimes[0]
        for other in self.runtimes[1:]:
            here, there = ({scene.scene_id for scene in runtime.info.scenes} for runtime in (first, other))
            if here != there:
                odd = sorted(here ^ there)
                raise SimulatorError(
                    f"the runtimes at {first.address} and {other.address} offer different scenes: "
                    f"{', '.join(odd[:3])}{' …' if len(odd) > 3 else ''} only one of them",
                    code="SCENES_DIFFER",
                    permanent=True,
                )

    async def submit(self, orders: list[Order]) -> None:
        """Queue orders; each is told once how it ended."""
        self._queue.extend(orders)
        self._deal()

    async def close(self) -> None:
        """Forget all orders and hang up."""
        self._queue.clear()
        for task in list(self._tasks):
            task.cancel()
        for runtime in self.runtimes:
            await runtime.channel.close()

    # ------------------------------------------------------------ inside

    def _deal(self) -> None:
        while self._queue:
            free = [r for r in self.runtimes if not r.lost and r.in_flight < r.capacity]
            if not free:
                return
            order = self._queue.popleft()
            if order.still_wanted():
                runtime = max(free, key=lambda r: r.capacity - r.in_flight)
                runtime.in_flight += 1
                self._spawn(self._rollout(runtime, order))

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _rollout(self, runtime: Runtime, order: Order) -> None:
        spec = runtime_pb2.RolloutSpec(scenario_id=order.scene_id, nr_rollouts=1, session_uuids=[order.session_id])
        host, port = self._driver
        request = runtime_pb2.SimulationRequest(
            available_drivers=[runtime_pb2.SimulationRequest.DriverAddress(ip=host, port=port)],
            rollout_specs=[spec],
            n_concurrent_per_driver=1,
        )
        call = runtime.channel.unary_unary(services.path(services.RUNTIME, "simulate"))
        answer: runtime_pb2.SimulationReturn.RolloutReturn | Failure
        try:
            data = await call(request.SerializeToString(), timeout=self._timeout_s)
            answer = _read_return(data, order, runtime.address)
        except grpc.aio.AioRpcError as err:
            answer = _failure(err, runtime.address)
            if err.code() == grpc.StatusCode.UNAVAILABLE and not runtime.lost:
                runtime.lost = True
                self._spawn(self._probe(runtime))
        finally:
            runtime.in_flight -= 1
        order.done(answer)
        self._deal()

    async def _probe(self, runtime: Runtime) -> None:
        while runtime.lost:
            if all(other.lost for other in self.runtimes):
                for order in [o for o in self._queue if time.monotonic() - o.since_s > self._lost_s]:
                    self._queue.remove(order)
                    order.done(
                        Failure("transient", "NO_RUNTIME", f"no AlpaSim runtime has answered for {self._lost_s} s")
                    )
            await asyncio.sleep(PROBE_S)
            try:
                runtime.info = await self._info(runtime.channel, PROBE_S, wait=False)
            except (grpc.aio.AioRpcError, DecodeError):
                continue
            runtime.capacity = max(runtime.info.max_supported_concurrent_rollouts, 1)
            runtime.lost = False
        self._deal()

    async def _info(self, channel: grpc.aio.Channel, timeout_s: float, wait: bool) -> runtime_pb2.RuntimeInfo:
        call = channel.unary_unary(services.path(services.RUNTIME, "get_runtime_info"))
        data = await call(common_pb2.Empty().SerializeToString(), timeout=timeout_s, wait_for_ready=wait)
        return runtime_pb2.RuntimeInfo.FromString(data)


def _read_return(data: bytes, order: Order, address: str) -> runtime_pb2.SimulationReturn.RolloutReturn | Failure:
    try:
        returns = runtime_pb2.SimulationReturn.FromString(data).rollout_returns
    except DecodeError as err:
        return Failure("transient", "MALFORMED", f"the answer of {address} cannot be parsed: {err}")
    if len(returns) != 1:
        return Failure("transient", "MALFORMED", f"{address} answered {len(returns)} rollouts for one")
    (found,) = returns
    if found.success and found.rollout_uuid not in ("", order.session_id):
        return Failure("transient", "MALFORMED", f"{address} answered rollout {found.rollout_uuid!r} for another")
    if not found.success:
        bad_scene = found.error_code == runtime_pb2.ROLLOUT_ERROR_CODE_INVALID_SCENE
        reason = found.error.strip()[:2000] or "no reason given"
        text = f"the rollout failed in scene {order.scene_id!r} at {address}: {reason}"
        return Failure("permanent" if bad_scene else "transient", "INVALID_SCENE" if bad_scene else "ROLLOUT", text)
    return found


def _failure(err: grpc.aio.AioRpcError, address: str) -> Failure:
    permanent = err.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
    return Failure("permanent" if permanent else "transient", err.code().name, f"{address}: {_text(err)}")


def _text(err: Exception) -> str:
    return f"{err.code().name}: {err.details()}" if isinstance(err, grpc.aio.AioRpcError) else str(err)
