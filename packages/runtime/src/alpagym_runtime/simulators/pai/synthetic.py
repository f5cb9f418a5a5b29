"""A small tree in the dataset's layout that holds nothing of the dataset: drives from formulas, pictures drawn of them.

Names, index levels, types and units are those that readers expect, so the same code reads this and the real data. Every
picture carries its frame number as a bar code. The same flags give the same bytes of every table and picture; videos
are the same bytes for one build of FFmpeg.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import uuid
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from alpagym_runtime.errors import ConfigError
from alpagym_runtime.geometry import local_to_rig, quaternion_from_yaw, quaternion_product, quaternion_to_xyzw
from alpagym_runtime.simulators.pai.clips import CLIP_US
from alpagym_runtime.simulators.pai.tree import REPOSITORY

Float = NDArray[np.float64]
U8 = NDArray[np.uint8]

REVISION = "0" * 39 + "1"
"""Forty hex digits, as a commit of the hub has."""

EGO_STEP_US, EGO_START_US, EGO_SAMPLES = 10_000, -1_120_000, 2224
CAMERA_HZ = 30
BITS = 16
PLATFORM = {
    "length": 4.9,
    "width": 1.95,
    "height": 1.55,
    "rear_axle_to_bbox_center": 1.42,
    "wheelbase": 2.85,
    "track_width": 1.63,
}
# Name: horizontal field of view and yaw in degrees, mount x, y, z in m.
CAMERAS = {
    "camera_front_wide_120fov": (120.0, 0.0, 1.75, 0.0, 1.45),
    "camera_front_tele_30fov": (30.0, 0.0, 1.78, 0.05, 1.45),
    "camera_cross_left_120fov": (120.0, 70.0, 2.45, 0.95, 0.95),
    "camera_cross_right_120fov": (120.0, -70.0, 2.45, -0.95, 0.95),
    "camera_rear_left_70fov": (70.0, 150.0, 2.1, 1.0, 1.0),
    "camera_rear_right_70fov": (70.0, -150.0, 2.1, -1.0, 1.0),
    "camera_rear_tele_30fov": (30.0, 180.0, -0.5, 0.0, 1.4),
}
DEFAULT_CAMERAS = tuple(CAMERAS)[:4]
CLUSTERS = ("WORK_ZONES_TEMP_TRAFFIC_CONTROL", "COMPLEX_INTERSECTION_INTERACTION", "OTHER_LONGTAIL")
TRACES = {
    "brake": "Slow down because the lead vehicle ahead is braking.",
    "left": "Keep to the left-hand curve since the lane bends left.",
    "right": "Keep to the right-hand curve since the lane bends right.",
    "cruise": "Keep the current speed because the lane ahead is clear.",
}
OBSTACLE_STEP_US = 100_000


@dataclass(frozen=True)
class SyntheticFlags:
    """What is made.

    Attributes:
        chunks: chunk numbers; even places are train, odd ones val.
        clips_per_chunk: clips of each.
        cameras: of `CAMERAS`.
        width, height: of the pictures, px.
        seed: of everything.
        event_text_key: coc | cot, the key of an event's text.
        empty_reasoning: so many clips, the last ones, have no event.
        gop: frames from one key frame to the next.
        obstacles: also write labels of other road users (`obstacle.offline`).

    """

    chunks: Sequence[int] = (0, 1)
    clips_per_chunk: int = 3
    cameras: Sequence[str] = field(default_factory=lambda: DEFAULT_CAMERAS)
    width: int = 320
    height: int = 180
    seed: int = 0
    event_text_key: str = "cot"
    empty_reasoning: int = 1
    gop: int = 30
    obstacles: bool = True

    def __post_init__(self) -> None:
        unknown = [name for name in self.cameras if name not in CAMERAS]
        if unknown:
            raise ConfigError(f"no camera {unknown[0]!r}; there are {', '.join(CAMERAS)}", key="cameras")
        if self.event_text_key not in ("coc", "cot"):
            raise ConfigError(f"must be coc or cot, got {self.event_text_key!r}", key="event_text_key")
        if self.width % 2 or self.height % 2 or self.width < 64 or self.height < 36:
            raise ConfigError(f"must be even, at least 64 x 36, got {self.width} x {self.height}", key="width")
        if self.clips_per_chunk < 1 or not self.chunks or self.gop < 1:
            raise ConfigError("needs at least one chunk, clip and frame", key="chunks")


# ---------------------------------------------------------------- motion


@dataclass(frozen=True)
class Drive:
    """A planar drive on the ego log's clock [M]; the anchor is its pose at time 0."""

    time_us: NDArray[np.int64]
    x: Float
    y: Float
    yaw: Float
    speed: Float
    acceleration: Float
    curvature: Float

    def at(self, time_us: NDArray[np.int64]) -> Float:
        """[...,4]: x, y m, yaw rad, speed m/s."""
        return np.stack([np.interp(time_us, self.time_us, a) for a in (self.x, self.y, self.yaw, self.speed)], axis=-1)


def simulate(kind: str, rng: np.random.Generator) -> Drive:
    """A drive of a kind in `TRACES`: a bump of speed or curvature around 8 s."""
    time_us = EGO_START_US + np.arange(EGO_SAMPLES, dtype=np.int64) * EGO_STEP_US
    t, dt = time_us * 1e-6, EGO_STEP_US * 1e-6
    base = float(rng.uniform(8.0, 13.0))
    bump = np.exp(-0.5 * ((t - 8.0) / 2.0) ** 2)
    speed = base + 0.4 * np.sin(0.5 * t) - (0.55 * base * bump if kind == "brake" else 0.0)
    curvature = 0.002 * np.sin(0.35 * t) + {"left": 0.03, "right": -0.03}.get(kind, 0.0) * bump

    def integral(rate: Float) -> Float:
        total = np.concatenate([[0.0], np.cumsum(0.5 * (rate[1:] + rate[:-1]) * dt)])
        return total - np.interp(0.0, t, total)

    yaw = integral(speed * curvature)
    x, y = integral(speed * np.cos(yaw)), integral(speed * np.sin(yaw))
    return Drive(time_us, x, y, yaw, speed, np.gradient(speed, dt), curvature)


def egomotion_columns(drive: Drive) -> dict[str, Any]:
    """The egomotion table of a drive; velocity and acceleration in the anchor frame."""
    quaternion = quaternion_to_xyzw(quaternion_from_yaw(drive.yaw))
    cos, sin, zero = np.cos(drive.yaw), np.sin(drive.yaw), np.zeros_like(drive.yaw)
    lateral = drive.speed**2 * drive.curvature
    return {
        "timestamp": drive.time_us,
        **{name: quaternion[:, i] for i, name in enumerate(("qx", "qy", "qz", "qw"))},
        "x": drive.x,
        "y": drive.y,
        "z": zero,
        "vx": drive.speed * cos,
        "vy": drive.speed * sin,
        "vz": zero,
        "ax": drive.acceleration * cos - lateral * sin,
        "ay": drive.acceleration * sin + lateral * cos,
        "az": zero,
        "curvature": drive.curvature,
    }


def obstacle_columns(drive: Drive, rng: np.random.Generator) -> dict[str, Any]:
    """Labels of a leader 2.5 s ahead, a parked car beside the road and a walker; ten a second, each track's own phase.

    A label is in the rig frame at its own time.
    """
    rows: dict[str, list[Any]] = {name: [] for name in OBSTACLE_COLUMNS}
    parked, walker = drive.at(np.array([11_000_000, 14_000_000]))
    side = rng.uniform(4.5, 6.0)
    beside = parked[:2] + side * np.array([np.sin(parked[2]), -np.cos(parked[2])])
    away = walker[:2] + 7.0 * np.array([-np.sin(walker[2]), np.cos(walker[2])])
    forward = np.array([np.cos(walker[2]), np.sin(walker[2])])
    for k, (name, label, size) in enumerate(OBSTACLES):
        times = np.arange(k * 30_000, CLIP_US + 1, OBSTACLE_STEP_US, dtype=np.int64)
        if name == "leader":
            states = drive.at(np.minimum(times + 2_500_000, drive.time_us[-1]))
            xy, yaw = states[:, :2], states[:, 2]
        elif name == "parked":
            xy, yaw = np.tile(beside, (len(times), 1)), np.full(len(times), parked[2])
        else:
            xy, yaw = away + 1.2 * (times * 1e-6)[:, None] * forward, np.full(len(times), walker[2])
        rig = drive.at(times)
        seen = local_to_rig(xy, rig[:, :3])
        xyzw = quaternion_to_xyzw(quaternion_from_yaw(yaw - rig[:, 2]))
        values: dict[str, Any] = {"timestamp_us": times, "source": "synthetic", "track_id": name, "label_class": label}
        values |= {"center_x": seen[:, 0], "center_y": seen[:, 1], "center_z": size[2] / 2.0}
        values |= dict(zip(("size_x", "size_y", "size_z"), size, strict=True))
        values |= {f"orientation_{axis}": xyzw[:, i] for i, axis in enumerate("xyzw")}
        values |= {"reference_frame": "rig", "reference_frame_timestamp_us": times}
        for key, value in values.items():
            rows[key] += value.tolist() if isinstance(value, np.ndarray) else [value] * len(times)
    return rows


OBSTACLES = (
    ("leader", "automobile", (4.6, 1.9, 1.5)),
    ("parked", "automobile", (4.4, 1.8, 1.5)),
    ("walker", "person", (0.6, 0.6, 1.75)),
)
OBSTACLE_COLUMNS = (
    *("timestamp_us", "source", "track_id", "label_class", "center_x", "center_y", "center_z"),
    *("size_x", "size_y", "size_z", "orientation_x", "orientation_y", "orientation_z", "orientation_w"),
    *("reference_frame", "reference_frame_timestamp_us"),
)


# ---------------------------------------------------------------- pictures


def camera_times(rng: np.random.Generator) -> NDArray[np.int64]:
    """Times of a camera's frames: its own phase, and jitter that keeps the order."""
    count = CLIP_US * CAMERA_HZ // 1_000_000 + 2
    start = -int(rng.integers(5_000, 33_000))
    regular = start + np.round(np.arange(count) * 1e6 / CAMERA_HZ).astype(np.int64)
    return regular + rng.integers(-300, 300, size=count)


def draw(width: int, height: int, number: int, camera: str, state: Float) -> U8:
    """A frame: sky, ground, stripes that turn with the heading, and its number as a bar code of 16 cells."""
    fov, camera_yaw = CAMERAS[camera][:2]
    picture = np.empty((height, width, 3), np.uint8)
    horizon = int(height * 0.45)
    picture[:horizon], picture[horizon:] = (110, 150, 205), (80, 84, 80)
    azimuth = np.deg2rad(np.linspace(-0.5, 0.5, width) * fov + camera_yaw) - state[2]
    picture[horizon - height // 10 : horizon, np.sin(9.0 * azimuth) > 0.6] = (45, 95, 50)
    dashes = (np.linspace(0, 12, height - horizon) + number * max(state[3], 0.0) / 90.0) % 2 < 1
    middle = width // 2
    picture[horizon:, middle - 2 : middle + 2][dashes] = (235, 235, 220)
    cell, bar = _bar(width, height)
    for bit in range(BITS):
        picture[:bar, bit * cell : (bit + 1) * cell] = 255 * (number >> bit & 1)
    return picture


def read_bar_code(picture: U8) -> int:
    """The number of a frame that `draw` made, from the picture [h,w,3] in any size of at least 64 x 36."""
    height, width = picture.shape[:2]
    cell, bar = width / BITS, _bar(width, height)[1]
    value = 0
    for bit in range(BITS):
        patch = picture[1 : max(bar - 1, 2), int(bit * cell + cell / 4) : int(bit * cell + 3 * cell / 4) + 1]
        value |= int(patch.mean() > 127) << bit
    return value


def _bar(width: int, height: int) -> tuple[int, int]:
    return max(width // BITS, 1), max(height // 8, 4)


def encode_video(frames: Iterator[U8], width: int, height: int, gop: int) -> bytes:
    """H.264 in MP4 without B frames, key frames every `gop`."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream: Any = container.add_stream("h264", rate=CAMERA_HZ)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"preset": "ultrafast", "crf": "23", "bf": "0", "g": str(gop)}
        for picture in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


# ---------------------------------------------------------------- calibration


def intrinsics(camera: str, width: int, height: int) -> dict[str, Any]:
    """An equidistant camera: r px = f · angle, in both directions."""
    f = (width / 2) / np.deg2rad(CAMERAS[camera][0] / 2)
    row: dict[str, Any] = {"width": width, "height": height, "cx": width / 2, "cy": height / 2}
    row |= {f"bw_poly_{i}": 1.0 / f if i == 1 else 0.0 for i in range(5)}
    return row | {f"fw_poly_{i}": float(f) if i == 1 else 0.0 for i in range(5)}


def extrinsics(camera: str) -> dict[str, float]:
    """The optical frame's pose in the rig."""
    _, yaw, x, y, z = CAMERAS[camera]
    # The optical z axis is the rig's x, its x axis the rig's -y.
    optical = np.array([0.5, -0.5, 0.5, -0.5])
    xyzw = quaternion_to_xyzw(quaternion_product(quaternion_from_yaw(np.deg2rad(yaw)), optical)).tolist()
    return dict(zip(("qx", "qy", "qz", "qw", "x", "y", "z"), (*xyzw, x, y, z), strict=True))


# ---------------------------------------------------------------- tables


def table_bytes(columns: Mapping[str, Any], index: Sequence[str] = ()) -> bytes:
    """A parquet file whose columns named by `index` pandas takes for its index."""
    arrays = {name: pa.array(values) for name, values in columns.items()}
    table = pa.table(arrays)
    about = [
        {
            "name": name,
            "field_name": name,
            "pandas_type": _pandas_type(array.type),
            "numpy_type": _numpy_type(array.type),
            "metadata": None,
        }
        for name, array in arrays.items()
    ]
    names = [{"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object", "metadata": None}]
    described = {"index_columns": list(index), "column_indexes": names, "columns": about, "pandas_version": "2.0.0"}
    if not index:
        count = len(table)
        described["index_columns"] = [{"kind": "range", "name": None, "start": 0, "stop": count, "step": 1}]
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(described)}), buffer)
    return buffer.getvalue()


def _pandas_type(kind: pa.DataType) -> str:
    return {"string": "unicode", "double": "float64"}.get(str(kind), str(kind))


def _numpy_type(kind: pa.DataType) -> str:
    return {"double": "float64", "int64": "int64", "bool": "bool"}.get(str(kind), "object")


def features_rows(flags: SyntheticFlags) -> list[tuple[str, str, str, str]]:
    """Rows of features.csv."""
    rows = []
    for camera in flags.cameras:
        members = {
            "video": f"{{clip_id}}.{camera}.mp4",
            "frame_timestamps": f"{{clip_id}}.{camera}.timestamps.parquet",
            "blurred_boxes": f"{{clip_id}}.{camera}.blurred_boxes.parquet",
        }
        rows.append((camera, "camera", f"camera/{camera}/{camera}.chunk_{{chunk_id:04d}}.zip", json.dumps(members)))
    for name in ("camera_intrinsics", "sensor_extrinsics", "vehicle_dimensions"):
        rows.append((name, "calibration", f"calibration/{name}/{name}.chunk_{{chunk_id:04d}}.parquet", ""))
    for label in ("egomotion", *(("obstacle.offline",) if flags.obstacles else ())):
        members = {label: f"{{clip_id}}.{label}.parquet"}
        rows.append((label, "labels", f"labels/{label}/{label}.chunk_{{chunk_id:04d}}.zip", json.dumps(members)))
    return rows


def events_of(kind: str, place: int, text_key: str) -> list[dict[str, Any]]:
    """Key frames of a clip: one with room around it, one too early, one too late."""
    usable = 5_200_000 + 400_000 * place
    texts = ((900_000, "Too early to have a full history."), (usable, TRACES[kind]))
    return [
        {"event_start_frame": time * CAMERA_HZ // 1_000_000, "event_start_timestamp": time, text_key: text}
        for time, text in (*texts, (16_000_000, "Too late to have a full future."))
    ]


# ---------------------------------------------------------------- the tree


def make_tree(out: Path, flags: SyntheticFlags | None = None) -> dict[str, Any]:
    """Write a tree; returns counts of clips, chunks, cameras and bytes.

    Raises:
        ConfigError: the folder holds something already.

    """
    flags = flags or SyntheticFlags()
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; give a new folder", key="out")
    rng, other = np.random.default_rng(flags.seed), np.random.default_rng([flags.seed, 1])
    kinds = list(TRACES)
    index: list[tuple[str, int, str]] = []
    reasoning: list[tuple[str, str, str, str]] = []
    for place, chunk in enumerate(flags.chunks):
        split = ("train", "val")[place % 2]
        ids = [str(uuid.UUID(bytes=rng.bytes(16), version=4)) for _ in range(flags.clips_per_chunk)]
        drives = {}
        for j, clip in enumerate(ids):
            kind = kinds[(place * flags.clips_per_chunk + j) % len(kinds)]
            drives[clip] = simulate(kind, rng)
            index.append((clip, chunk, split))
            events = json.dumps(events_of(kind, j, flags.event_text_key))
            reasoning.append((clip, split, CLUSTERS[j % len(CLUSTERS)], events))
        _write_chunk(out, flags, chunk, drives, rng, other)
    _write_tables(out, flags, index, reasoning)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return {"clips": len(index), "chunks": list(flags.chunks), "cameras": list(flags.cameras), "bytes": size}


def _write_chunk(
    out: Path,
    flags: SyntheticFlags,
    chunk: int,
    drives: Mapping[str, Drive],
    rng: np.random.Generator,
    other: np.random.Generator,
) -> None:
    labels = {f"{clip}.egomotion.parquet": table_bytes(egomotion_columns(drive)) for clip, drive in drives.items()}
    _write_zip(out / f"labels/egomotion/egomotion.chunk_{chunk:04d}.zip", labels)
    if flags.obstacles:
        labels = {
            f"{clip}.obstacle.offline.parquet": table_bytes(obstacle_columns(drive, other))
            for clip, drive in drives.items()
        }
        _write_zip(out / f"labels/obstacle.offline/obstacle.offline.chunk_{chunk:04d}.zip", labels)
    boxes = table_bytes({name: pa.array([], pa.int64()) for name in ("frame_idx", "x1", "y1", "x2", "y2")})
    for camera in flags.cameras:
        members = {}
        for clip, drive in drives.items():
            times = camera_times(rng)
            states = drive.at(times)
            frames = (draw(flags.width, flags.height, i, camera, state) for i, state in enumerate(states))
            members[f"{clip}.{camera}.mp4"] = encode_video(frames, flags.width, flags.height, flags.gop)
            members[f"{clip}.{camera}.timestamps.parquet"] = table_bytes({"timestamp": times})
            members[f"{clip}.{camera}.blurred_boxes.parquet"] = boxes
        _write_zip(out / f"camera/{camera}/{camera}.chunk_{chunk:04d}.zip", members)
    both = [(clip, camera) for clip in drives for camera in flags.cameras]
    for name, level, rows in (
        ("camera_intrinsics", "camera_name", [intrinsics(camera, flags.width, flags.height) for _, camera in both]),
        ("sensor_extrinsics", "sensor_name", [extrinsics(camera) for _, camera in both]),
    ):
        columns: dict[str, Any] = {"clip_id": [clip for clip, _ in both], level: [camera for _, camera in both]}
        columns |= {key: [row[key] for row in rows] for key in rows[0]}
        _write_calibration(out, name, chunk, table_bytes(columns, ("clip_id", level)))
    dimensions: dict[str, Any] = {"clip_id": list(drives)} | {
        key: [value] * len(drives) for key, value in PLATFORM.items()
    }
    _write_calibration(out, "vehicle_dimensions", chunk, table_bytes(dimensions, ("clip_id",)))


def _write_tables(
    out: Path, flags: SyntheticFlags, index: list[tuple[str, int, str]], reasoning: list[tuple[str, str, str, str]]
) -> None:
    rows = features_rows(flags)
    with (out / "features.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([("feature", "directory", "chunk_path", "clip_files_in_zip"), *rows])
    write_index(out / "clip_index.parquet", index)
    ids = [clip for clip, _, _ in index]
    (out / "metadata").mkdir()
    presence: dict[str, Any] = {name: [True] * len(ids) for name, _, _, _ in rows} | {"clip_id": ids}
    (out / "metadata/feature_presence.parquet").write_bytes(table_bytes(presence, ("clip_id",)))
    about = {"country": "Nowhere", "month": 6, "hour_of_day": 12, "platform_class": "synthetic", "radar_config": "none"}
    collection: dict[str, Any] = {name: [value] * len(ids) for name, value in about.items()} | {"clip_id": ids}
    (out / "metadata/data_collection.parquet").write_bytes(table_bytes(collection, ("clip_id",)))
    empty = len(reasoning) - flags.empty_reasoning
    events = ["[]" if i >= empty else row[3] for i, row in enumerate(reasoning)]
    columns: dict[str, Any] = {
        "clip_id": ids,
        "split": [row[1] for row in reasoning],
        "event_cluster": [row[2] for row in reasoning],
    }
    (out / "reasoning").mkdir()
    (out / "reasoning/ood_reasoning.parquet").write_bytes(table_bytes(columns | {"events": events}, ("clip_id",)))
    write_index(out / "clip_index_mini.parquet", index[: max(2, len(index) // 2)])
    write_index(out / "clip_index_reasoning_mini.parquet", index[:empty])


def write_index(path: Path, rows: Sequence[tuple[str, int, str]]) -> None:
    """A clip index of (clip id, chunk, split)."""
    columns = {
        "clip_is_valid": [True] * len(rows),
        "chunk": [chunk for _, chunk, _ in rows],
        "split": [split for _, _, split in rows],
        "clip_id": [clip for clip, _, _ in rows],
    }
    path.write_bytes(table_bytes(columns, ("clip_id",)))


def _write_zip(path: Path, members: Mapping[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as zipped:
        for name, data in members.items():
            # A fixed date: the bytes shall not depend on when they are made.
            zipped.writestr(zipfile.ZipInfo(name, (2025, 1, 1, 0, 0, 0)), data)


def _write_calibration(out: Path, name: str, chunk: int, data: bytes) -> None:
    path = out / f"calibration/{name}/{name}.chunk_{chunk:04d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def lay_out_hub_cache(tree: Path, cache: Path, revision: str = REVISION) -> Path:
    """Link (or copy) a tree into a hub cache, the only form that the devkit reads offline; returns the snapshot."""
    repository = cache / ("datasets--" + REPOSITORY.replace("/", "--"))
    snapshot = repository / "snapshots" / revision
    if snapshot.exists():
        raise ConfigError(f"{snapshot} exists already; give another folder", key="hf_cache")
    for source in sorted(path for path in tree.rglob("*") if path.is_file()):
        target = snapshot / source.relative_to(tree)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(revision)
    return snapshot
