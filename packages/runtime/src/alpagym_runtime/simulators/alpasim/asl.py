"""AlpaSim's logs (ASL): one file a rollout, of entries [4-byte big-endian length][LogEntry].

There is no footer and no checksum, so a cut file is read up to the cut, with a warning. Entries hold messages as they
were on the wire; writing one costs no parsing. Kinds that only AlpaSim's other services write are kept as "other".
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError

from alpagym_runtime.errors import CorruptFileError
from alpagym_runtime.simulators.alpasim.replies import varint
from alpagym_runtime.simulators.alpasim.wire import asl_pb2, common_pb2

log = logging.getLogger(__name__)

NUMBERS = {field.name: field.number for field in asl_pb2.LogEntry.DESCRIPTOR.fields}
"""Field of LogEntry by kind."""

LONGEST = 2**28
"""Bytes; a longer entry is taken for damage, before memory is taken for it."""

EGO = "EGO"
"""The driven vehicle among the actors."""

SAFE = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]{0,99}")
HASHED = re.compile(r"id-[0-9a-f]{32}")


def safe_name(name: str) -> str:
    """A file name for any id, one to one: the id itself where that is harmless, else `id-` and its hash."""
    if SAFE.fullmatch(name) and not HASHED.fullmatch(name):
        return name
    return f"id-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


def rollout_path(folder: Path, scene_id: str, session_id: str) -> Path:
    """Where a rollout's log lies, as AlpaSim has it: `rollouts/<scene>/<session>/rollout.asl`."""
    return folder / "rollouts" / safe_name(scene_id) / safe_name(session_id) / "rollout.asl"


class AslWriter:
    """Appends entries to a new log; an old one of that name (an earlier attempt's) is replaced.

    Raises:
        OSError: the file cannot be written; the entry that failed may be cut.

    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self._path = path
        self._file = path.open("xb")

    def write(self, kind: str, message: bytes) -> None:
        """One serialised message; `kind` names the field of LogEntry."""
        head = varint(NUMBERS[kind] << 3 | 2) + varint(len(message))
        with self._named():
            self._file.write((len(head) + len(message)).to_bytes(4, "big") + head + message)

    def close(self) -> None:
        """Flush; idempotent. Raises as `write` does; the descriptor is given back in any case."""
        with self._named():
            self._file.close()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """An error of the disk with the log's name: Python's buffered files name none."""
        try:
            yield
        except OSError as err:
            raise OSError(err.errno, f"{err.strerror}: the rollout's log cannot be written", str(self._path)) from err


def read_asl(path: Path) -> Iterator[asl_pb2.LogEntry]:
    """Entries in their order, up to the end or to where the file is cut.

    Raises:
        CorruptFileError: an entry cannot be parsed, or its length is absurd; names path and byte.

    """
    with path.open("rb") as file:
        at = 0
        while head := file.read(4):
            length = int.from_bytes(head, "big")
            if length > LONGEST:
                raise CorruptFileError(f"{path}: an entry of {length} bytes at byte {at}; this is no ASL log")
            body = file.read(length)
            if len(head) < 4 or len(body) < length:
                log.warning("%s is cut at byte %d: its last entry is left out", path, at)
                return
            try:
                entry = asl_pb2.LogEntry.FromString(body)
            except DecodeError as err:
                raise CorruptFileError(f"{path}: the entry at byte {at} cannot be parsed; this is no ASL log") from err
            at += 4 + length
            yield entry


def kind_of(entry: asl_pb2.LogEntry) -> str:
    """The entry's kind, "other" for those of other services."""
    return entry.WhichOneof("log_entry") or "other"


def time_us(entry: asl_pb2.LogEntry) -> int | None:
    """When an entry's content is about, where it says so."""
    kind = kind_of(entry)
    if kind == "actor_poses":
        return entry.actor_poses.timestamp_us
    if kind == "driver_request":
        return entry.driver_request.time_now_us
    if kind == "driver_camera_image":
        return entry.driver_camera_image.camera_image.frame_end_us
    if kind == "route_request":
        return entry.route_request.route.timestamp_us
    if kind == "ground_truth_request":
        return entry.ground_truth_request.ground_truth.timestamp_us
    poses = None
    if kind == "driver_ego_trajectory":
        poses = entry.driver_ego_trajectory.trajectory.poses
    elif kind == "driver_return":
        poses = entry.driver_return.trajectory.poses
    if poses:
        return poses[-1 if kind == "driver_ego_trajectory" else 0].timestamp_us
    return None


def planar(pose: common_pb2.Pose) -> tuple[float, float, float]:
    """A pose of a message on the ground plane: x m, y m, yaw rad."""
    q = pose.quat
    return pose.vec.x, pose.vec.y, math.atan2(2.0 * (q.w * q.z + q.x * q.y), 1.0 - 2.0 * (q.y * q.y + q.z * q.z))


def describe(entry: asl_pb2.LogEntry) -> str:
    """What an entry says, in a few words."""
    kind = kind_of(entry)
    if kind == "rollout_metadata":
        session = entry.rollout_metadata.session_metadata
        return f"scene {session.scene_id!r}, session {session.session_uuid}, {session.n_sim_steps} steps"
    if kind == "actor_poses":
        return f"{len(entry.actor_poses.actor_poses)} actors"
    if kind == "driver_session_request":
        cameras = entry.driver_session_request.rollout_spec.vehicle.available_cameras
        return f"cameras: {', '.join(camera.logical_id for camera in cameras) or 'none'}"
    if kind == "driver_camera_image":
        image = entry.driver_camera_image.camera_image
        return f"{image.logical_id}, {len(image.image_bytes)} bytes"
    if kind == "driver_ego_trajectory":
        return f"{len(entry.driver_ego_trajectory.trajectory.poses)} poses"
    if kind == "driver_return":
        return (
            "terminate"
            if entry.driver_return.terminate_session
            else (f"{len(entry.driver_return.trajectory.poses)} poses")
        )
    if kind == "route_request":
        return f"{len(entry.route_request.route.waypoints)} waypoints"
    if kind == "ground_truth_request":
        return f"{len(entry.ground_truth_request.ground_truth.trajectory.poses)} poses"
    return f"{entry.ByteSize()} bytes" if kind == "other" else ""


def to_dict(entry: asl_pb2.LogEntry) -> dict[str, Any]:
    """An entry as plain data for strict JSON: names as in the protos, bytes in base64, NaN and infinity as text."""
    return MessageToDict(entry, preserving_proto_field_name=True)
