"""Whether an AlpaSim answers, and what it offers: one call, and no channel left behind."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

from alpagym_runtime.errors import SimulatorError
from alpagym_runtime.simulators.alpasim import services
from alpagym_runtime.simulators.alpasim.wire import common_pb2, runtime_pb2


@dataclass(frozen=True)
class RuntimeFacts:
    """What `get_runtime_info` tells: rollouts at once, scene ids sorted, version."""

    capacity: int
    scenes: tuple[str, ...]
    version: str


def runtime_facts(address: str, timeout_s: float) -> RuntimeFacts:
    """Ask the runtime at HOST:PORT.

    Raises:
        SimulatorError: it does not answer in time, or answers something else.

    """
    options = [("grpc.max_receive_message_length", 256 * 2**20), ("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(address, options=options) as channel:
        call = channel.unary_unary(services.path(services.RUNTIME, "get_runtime_info"))
        try:
            data = call(common_pb2.Empty().SerializeToString(), timeout=timeout_s)
            info = runtime_pb2.RuntimeInfo.FromString(data)
        except grpc.RpcError as err:
            raise SimulatorError(f"{address}: {err.code().name}: {err.details()}", code=err.code().name) from err
        except DecodeError as err:
            raise SimulatorError(
                f"{address} answers something that is no RuntimeInfo: {err}", code="MALFORMED"
            ) from err
    scenes = tuple(sorted(scene.scene_id for scene in info.scenes))
    return RuntimeFacts(max(info.max_supported_concurrent_rollouts, 1), scenes, info.runtime_version.version_id)
