"""What the served world tells a driver, as bytes, and how it reads plans.

The wire's local frame is the rig frame of the recorded drive at the handover: poses near it keep float32's full
precision, and the pose at the handover is exactly 0. Trajectories are laid out by hand (`replies.pose_records`), for
the recording goes out every tick.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.geometry import wrap_angle
from alpagym_runtime.simulators.alpasim.replies import pose_records, varint
from alpagym_runtime.simulators.alpasim.trajectories import read_poses
from alpagym_runtime.simulators.alpasim.wire import common_pb2, egodriver_pb2

Float = NDArray[np.float64]

NORM_TOLERANCE = 1e-4
"""How far from 1 AlpaSim lets a quaternion's squared norm be."""


class RolloutError(Exception):
    """A rollout failed; `code` is AlpaSim's RolloutErrorCode."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


def into_frame(poses: Float, frame: Float) -> Float:
    """Planar poses [K,3] (x, y, yaw) in the frame of a planar pose [3]."""
    cos, sin = math.cos(frame[2]), math.sin(frame[2])
    dx, dy = poses[:, 0] - frame[0], poses[:, 1] - frame[1]
    return np.stack([dx * cos + dy * sin, dy * cos - dx * sin, poses[:, 2] - frame[2]], axis=1)


def out_of_frame(poses: Float, frame: Float) -> Float:
    """The inverse of `into_frame`."""
    cos, sin = math.cos(frame[2]), math.sin(frame[2])
    x, y = poses[:, 0], poses[:, 1]
    return np.stack([frame[0] + cos * x - sin * y, frame[1] + sin * x + cos * y, poses[:, 2] + frame[2]], axis=1)


def trajectory(poses: Float, time_us: NDArray[np.int64]) -> bytes:
    """A `Trajectory` of planar poses [K,3]."""
    full = np.zeros((len(poses), 7))
    full[:, :2] = poses[:, :2]
    full[:, 3], full[:, 6] = np.cos(poses[:, 2] / 2.0), np.sin(poses[:, 2] / 2.0)
    return pose_records(full, time_us).tobytes()


def field(tag: int, body: bytes) -> bytes:
    """A length-delimited field whose number is below 16."""
    return bytes([tag << 3 | 2]) + varint(len(body)) + body


def egomotion(session_id: str, poses: Float, time_us: NDArray[np.int64], dynamics: NDArray[Any]) -> bytes:
    """`RolloutEgoTrajectory`: poses [K,3] in the wire's local frame, dynamics [K,7] in the rig frame."""
    states = b"".join(field(5, _state(row)) for row in dynamics.tolist())
    return field(1, session_id.encode()) + field(3, trajectory(poses, time_us)) + states


def _state(row: list[float]) -> bytes:
    state = common_pb2.DynamicState()
    state.linear_velocity.x, state.linear_velocity.y, state.linear_velocity.z = row[:3]
    state.linear_acceleration.x, state.linear_acceleration.y, state.linear_acceleration.z = row[3:6]
    state.angular_velocity.z = row[6]
    return state.SerializeToString()


def route(session_id: str, time_us: int, points: NDArray[np.float32]) -> bytes:
    """`RouteRequest`: points [R,2] in the rig frame, NaN beyond the route's end."""
    request = egodriver_pb2.RouteRequest(session_uuid=session_id)
    request.route.timestamp_us = time_us
    for x, y in points.tolist():
        request.route.waypoints.add(x=x, y=y)
    return request.SerializeToString()


def recording(session_id: str, now_us: int, poses_rig: Float, time_us: NDArray[np.int64]) -> bytes:
    """`GroundTruthRequest`: the whole recorded drive [K,3] in the rig frame at `now_us`."""
    stamp = b"\x11" + now_us.to_bytes(8, "little")
    return field(1, session_id.encode()) + field(2, field(1, trajectory(poses_rig, time_us)) + stamp)


def image(session_id: str, camera: str, start_us: int, end_us: int, data: bytes) -> bytes:
    """`RolloutCameraImage`."""
    times = b"\x11" + start_us.to_bytes(8, "little") + b"\x19" + end_us.to_bytes(8, "little")
    head, tail = times + b"\x22" + varint(len(data)), field(5, camera.encode())
    # Put together once: a picture is large.
    size = varint(len(head) + len(data) + len(tail))
    return b"".join((field(1, session_id.encode()), b"\x1a", size, head, data, tail))


def read_plan(plan: common_pb2.Trajectory, now_us: int, query_us: int) -> tuple[NDArray[np.uint64], Float]:
    """Times [K] and planar poses [K,3] of an answer, after AlpaSim's own checks.

    Raises:
        RolloutError: empty, times that do not increase strictly, a first pose after now or a last one before the query,
            numbers that are not finite, or a quaternion that is not of norm 1.

    """
    times_us, poses = read_poses(plan)
    times = times_us.tolist()
    if not times:
        raise RolloutError(f"drive at {now_us} us answered an empty plan where the policy drives")
    if any(b <= a for a, b in itertools.pairwise(times)):
        raise RolloutError(f"drive at {now_us} us answered a plan whose times do not increase strictly")
    if not times[0] <= now_us <= query_us <= times[-1]:
        raise RolloutError(
            f"Interpolation timestamp {query_us if times[0] <= now_us else now_us} is outside range "
            f"[{times[0]}, {times[-1]}] of the plan"
        )
    # What AlpaSim's controller and measures read; it leaves z alone.
    rows = poses[:, [0, 1, 3, 4, 5, 6]]
    w, x, y, z = rows[:, 2:].T
    # A comparison with NaN is false.
    good = np.isfinite(rows).all(axis=1) & (np.abs(w * w + x * x + y * y + z * z - 1.0) <= NORM_TOLERANCE)
    if not good.all():
        at = int(np.flatnonzero(~good)[0])
        what = f"{tuple(rows[at].tolist())} (x, y; quaternion w, x, y, z)"
        raise RolloutError(f"the plan's pose at {times[at]} us is none: {what}")
    yaw = np.arctan2(2.0 * (w * z + x * y), 1.0 - 2.0 * (y * y + z * z))
    if (np.abs(np.diff(yaw)) > np.pi).any():
        yaw = np.unwrap(yaw)
    return times_us, np.stack([rows[:, 0], rows[:, 1], yaw], axis=1)


def plan_at_steps(times: NDArray[np.integer], poses_rig: Float, now_us: int, step_us: int, steps: int) -> Float:
    """A plan [T,3] at now + step … now + T·step; after its end the last pose is held, so the car brakes to it."""
    at = now_us + step_us * np.arange(1, steps + 1)
    out = np.stack([np.interp(at, times, poses_rig[:, c]) for c in range(3)], axis=1)
    out[:, 2] = wrap_angle(out[:, 2])
    return out
