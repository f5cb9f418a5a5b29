#!/usr/bin/env python3
"""The floor: an egodriver that keeps the last pose and answers 65 straight poses; --decode: it decodes pictures too.

Nothing is checked, batched, kept or decided. `benchmarks/egodriver.py` measures our server beside it.
"""

from __future__ import annotations

import argparse
import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import simplejpeg

from alpagym_runtime.simulators.alpasim import services
from alpagym_runtime.simulators.alpasim.wire import common_pb2, egodriver_pb2


class Bare:
    """See the module's text."""

    def __init__(self, decode: bool) -> None:
        self.poses: dict[str, Any] = {}
        self.pool = ThreadPoolExecutor(2) if decode else None

    async def empty(self, request: Any, context: Any) -> Any:
        return common_pb2.Empty()

    async def start(self, request: Any, context: Any) -> Any:
        return common_pb2.SessionRequestStatus()

    async def image(self, request: Any, context: Any) -> Any:
        if self.pool is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self.pool, simplejpeg.decode_jpeg, request.camera_image.image_bytes)
        return common_pb2.Empty()

    async def egomotion(self, request: Any, context: Any) -> Any:
        self.poses[request.session_uuid] = request.trajectory.poses[-1].pose
        return common_pb2.Empty()

    async def drive(self, request: Any, context: Any) -> Any:
        pose, out = self.poses[request.session_uuid], egodriver_pb2.DriveResponse()
        for k in range(65):
            item = out.trajectory.poses.add(timestamp_us=request.time_now_us + 100_000 * k)
            item.pose.vec.x, item.pose.vec.y = pose.vec.x + k, pose.vec.y
            item.pose.quat.w = 1.0
        return out


async def main() -> None:
    """Serve on --port."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--decode", action="store_true")
    arguments = parser.parse_args()
    bare = Bare(arguments.decode)
    methods = {
        "start_session": (bare.start, egodriver_pb2.DriveSessionRequest),
        "close_session": (bare.empty, egodriver_pb2.DriveSessionCloseRequest),
        "submit_image_observation": (bare.image, egodriver_pb2.RolloutCameraImage),
        "submit_egomotion_observation": (bare.egomotion, egodriver_pb2.RolloutEgoTrajectory),
        "submit_route": (bare.empty, egodriver_pb2.RouteRequest),
        "submit_recording_ground_truth": (bare.empty, egodriver_pb2.GroundTruthRequest),
        "drive": (bare.drive, egodriver_pb2.DriveRequest),
    }
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            method,
            request_deserializer=message.FromString,
            response_serializer=lambda answer: answer.SerializeToString(),
        )
        for name, (method, message) in methods.items()
    }
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 * 2**20)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(services.EGODRIVER, handlers),))
    server.add_insecure_port(f"127.0.0.1:{arguments.port}")
    await server.start()
    print(f"bare egodriver at 127.0.0.1:{arguments.port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
