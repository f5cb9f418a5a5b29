"""A rollout's log as a video or as a Rerun recording: what the driver was sent, and what it planned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.episodes.birds_eye import STATIC_KIND, draw
from alpagym_runtime.episodes.export import library, log_lines, side_by_side
from alpagym_runtime.errors import ConfigError
from alpagym_runtime.files import replacing
from alpagym_runtime.geometry import local_to_rig, rig_to_local
from alpagym_runtime.pictures import BadFrameError, decode, frame_format, frame_size
from alpagym_runtime.simulators.alpasim.asl import EGO, kind_of, planar
from alpagym_runtime.simulators.alpasim.wire import asl_pb2
from alpagym_runtime.video import VideoWriter

Float = NDArray[np.float64]

HISTORY_US = 2_000_000
"""How long a trail of past poses is drawn."""

PANEL_PX = 480
"""Height of every picture of a video: that of the bird's-eye picture."""

UNKNOWN_BOX = (4.5, 1.9, "car")
"""Length m, width m, label of an actor that the metadata do not name."""


@dataclass
class Moment:
    """One call of `drive`.

    Attributes:
        time_us: the decision's time in the scene's clock.
        row: one row of what `birds_eye.draw` draws, in the rig frame at `time_us`.
        pictures: the newest file of each camera so far.
        plan_rig: [T,3] f64 (m, m, rad), the answer in the same frame; None where there was none.

    """

    time_us: int
    row: dict[str, NDArray[Any]]
    pictures: dict[str, bytes]
    plan_rig: Float | None = None


@dataclass
class _Sent:
    """What the entries so far have told; poses [3] are planar, in the log's local frame."""

    ego: dict[int, Float] = field(default_factory=dict)
    route_rig: Float = field(default_factory=lambda: np.zeros((0, 2)))
    route_us: int = 0
    actors: dict[str, Float] = field(default_factory=dict)
    boxes: dict[str, tuple[float, float, str]] = field(default_factory=dict)
    pictures: dict[str, bytes] = field(default_factory=dict)

    def add(self, entry: asl_pb2.LogEntry) -> None:
        kind = kind_of(entry)
        if kind == "rollout_metadata":
            for box in entry.rollout_metadata.actor_definitions.actor_aabb:
                self.boxes[box.actor_id] = (box.aabb.size_x, box.aabb.size_y, box.actor_label)
        elif kind == "driver_ego_trajectory":
            for item in entry.driver_ego_trajectory.trajectory.poses:
                self.ego[item.timestamp_us] = np.array(planar(item.pose))
        elif kind == "route_request":
            route = entry.route_request.route
            points = np.array([(point.x, point.y) for point in route.waypoints]).reshape(-1, 2)
            # AlpaSim pads a short route with NaN.
            self.route_rig, self.route_us = points[np.isfinite(points).all(axis=1)], route.timestamp_us
        elif kind == "actor_poses":
            poses = entry.actor_poses.actor_poses
            self.actors = {item.actor_id: np.array(planar(item.actor_pose)) for item in poses if item.actor_id != EGO}
        elif kind == "driver_camera_image":
            image = entry.driver_camera_image.camera_image
            self.pictures[image.logical_id] = image.image_bytes

    def row(self, time_us: int) -> tuple[dict[str, NDArray[Any]], Float]:
        """What to draw at a time, and the rig's pose then (the newest one known)."""
        known = sorted(t for t in self.ego if t <= time_us) or sorted(self.ego)[:1]
        rig = self.ego[known[-1]]
        trail = np.array([self.ego[t] for t in known if t >= time_us - HISTORY_US])
        # The route is about its own time.
        route = local_to_rig(rig_to_local(self.route_rig, self.ego.get(self.route_us, rig)), rig)
        actors = np.zeros((len(self.actors), 9))
        for at, (name, pose) in enumerate(self.actors.items()):
            length, width, label = self.boxes.get(name, UNKNOWN_BOX)
            actors[at, :2], actors[at, 2] = local_to_rig(pose[:2], rig), pose[2] - rig[2]
            actors[at, 5:8] = length, width, STATIC_KIND if label == "static" else 0
        fields = {"ego_history": local_to_rig(trail[:, :2], rig), "route": route, "actors": actors}
        row = {f"{name}_rig": array for name, array in fields.items()}
        return row | {f"{name}_mask": np.ones(len(array), bool) for name, array in fields.items()}, rig


def moments(entries: Iterable[asl_pb2.LogEntry]) -> Iterator[Moment]:
    """One a `drive` that had an ego pose before it, in the log's order."""
    sent = _Sent()
    waits: Moment | None = None
    rig = np.zeros(3)
    for entry in entries:
        sent.add(entry)
        kind = kind_of(entry)
        if kind == "driver_request":
            if waits is not None:  # that call was never answered
                yield waits
            waits = None
            if sent.ego:
                time_us = entry.driver_request.time_now_us
                row, rig = sent.row(time_us)
                waits = Moment(time_us, row, dict(sent.pictures))
        elif kind == "driver_return" and waits is not None:
            poses = np.array([planar(item.pose) for item in entry.driver_return.trajectory.poses]).reshape(-1, 3)
            if len(poses):
                plan = local_to_rig(poses[:, :2], rig)
                waits.plan_rig = np.concatenate([plan, poses[:, 2:] - rig[2]], axis=1)
            yield waits
            waits = None
    if waits is not None:
        yield waits


def to_video(entries: Iterable[asl_pb2.LogEntry], output: Path) -> int:
    """A video with a picture a `drive`: the cameras' newest frames and the bird's-eye view with the plan, 480 px high.

    Its pace is the log's clock (the first two decisions tell it). Returns the number of pictures.

    Raises:
        ConfigError: the log holds no `drive` with an ego pose before it, or the ending names no video.

    """
    shown = moments(entries)
    first = next(shown, None)
    if first is None:
        raise ConfigError("the log holds no call of drive to show", key="LOG")
    second = next(shown, None)
    step_us = second.time_us - first.time_us if second is not None else 0
    size: tuple[int, ...] | None = None
    count = 0
    with VideoWriter(output, Fraction(1_000_000, step_us) if step_us > 0 else Fraction(5)) as video:
        for moment in (m for part in ([first, second], shown) for m in part if m is not None):
            picture = side_by_side([*_panels(moment), draw(moment.row, moment.plan_rig)])
            size = size or picture.shape
            if picture.shape != size:  # a camera that joined late or sent a bad file has no place in this video
                picture = _cropped(picture, size)
            video.write(picture)
            count += 1
    return count


def _panels(moment: Moment) -> list[NDArray[np.uint8]]:
    """Each camera's picture by name, `PANEL_PX` high; a file that cannot be decoded is black."""
    panels = []
    for name in sorted(moment.pictures):
        data = moment.pictures[name]
        try:
            height, width = frame_size(data)
            panels.append(decode(data, PANEL_PX, round(width * PANEL_PX / height)))
        except BadFrameError:
            panels.append(np.zeros((PANEL_PX, PANEL_PX, 3), np.uint8))
    return panels


def _cropped(picture: NDArray[np.uint8], size: tuple[int, ...]) -> NDArray[np.uint8]:
    """The bird's-eye side of a picture in another one's size."""
    out = np.zeros(size, np.uint8)
    width = min(size[1], picture.shape[1])
    out[:, size[1] - width :] = picture[:, picture.shape[1] - width :]
    return out


def to_rerun(entries: Iterable[asl_pb2.LogEntry], output: Path) -> int:
    """A Rerun recording (.rrd): route, road users, trail and plan in the rig frame, pictures as they were sent.

    Returns the number of moments.

    Raises:
        PluginError: rerun-sdk is not installed.
        ConfigError: the log holds no `drive` with an ego pose before it.

    """
    rr = library("rerun", "export to Rerun", "pip install 'alpagym-runtime[rerun]'")
    rr.init("alpagym", spawn=False)
    begun: int | None = None
    count = 0
    with replacing(output) as temporary:
        rr.save(str(temporary))
        for moment in moments(entries):
            begun = moment.time_us if begun is None else begun
            rr.set_time("drive", duration=(moment.time_us - begun) * 1e-6)
            for name, data in moment.pictures.items():
                try:
                    kind = frame_format(data)
                except BadFrameError:
                    continue
                rr.log(f"rollout/{name}", rr.EncodedImage(contents=data, media_type=f"image/{kind}"))
            row = moment.row
            lines = {"route": row["route_rig"], "history": row["ego_history_rig"]}
            if moment.plan_rig is not None:
                lines["plan"] = moment.plan_rig[:, :2]
            log_lines(rr, "rollout", lines, row["actors_rig"])
            count += 1
        rr.disconnect()
        if not count:
            raise ConfigError("the log holds no call of drive to show", key="LOG")
    return count
