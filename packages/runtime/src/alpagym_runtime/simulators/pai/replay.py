"""Clips with labels of other road users as scenes of the embedded world: closed loop, the traffic replayed.

The local frame is the clip's anchor frame, in the plane; time 0 is the clip's. A label stands in the rig's frame at its
own time, so it is placed by the recorded pose at that time; tracks are staggered, and are brought to the grid by
interpolation within their interval. The dataset has no map: the drivable area is a corridor around the driven path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import shapely
from numpy.typing import NDArray

from alpagym_runtime.errors import ConfigError, CorruptFileError, OutOfRangeError, SceneError
from alpagym_runtime.geometry import (
    area_from_polygons,
    boxes_overlap,
    quaternion_from_xyzw,
    quaternion_product,
    rig_to_local,
    rotate,
    unit_quaternion,
    yaw_from_quaternion,
)
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.embedded.scene import KINDS, MAX_ACTORS, STEP_US, Actors, Scene, Vehicle
from alpagym_runtime.simulators.pai.calibration import read_vehicle
from alpagym_runtime.simulators.pai.clips import CLIP_US, PaiDataset, Sample
from alpagym_runtime.simulators.pai.egomotion import EgoLog

if TYPE_CHECKING:
    from alpagym_runtime.simulators.embedded.commonroad import Skipped

Float = NDArray[np.float64]

LABELS = "obstacle.offline"
COLUMNS = ("timestamp_us", "track_id", "label_class")
NUMBERS = ("center_x", "center_y", "center_z", "size_x", "size_y", "size_z")
QUATERNION = ("orientation_x", "orientation_y", "orientation_z", "orientation_w")

KIND_OF_CLASS = {
    "automobile": "car",
    "heavy_truck": "truck",
    "bus": "bus",
    "other_vehicle": "truck",
    "trailer": "truck",
    "person": "pedestrian",
    "rider": "bicycle",
    "stroller": "pedestrian",
    "animal": "pedestrian",
    "protruding_object": "static",
}
CORRIDOR_HALF_M = 8.0
HANDOVER = 16
"""1.6 s into the clip: as much history as a sample has."""
ROUTE_BEHIND_M, ROUTE_AHEAD_M, ROUTE_STEP_M = 5.0, 110.0, 1.0
TRACK_GAP_US = 1_000_000
AFTER = "pai.no_map"


@dataclass(frozen=True)
class Track:
    """One labelled road user: times [M] i64, states [M,3] x, y m, yaw rad in the anchor frame, size, kind."""

    time_us: NDArray[np.int64]
    states: Float
    length_m: float
    width_m: float
    kind: str


class PaiReplay:
    """The clips of a dataset section as scenes; see `embedded.dataset.SceneSource`."""

    def __init__(self, dataset: DatasetSection) -> None:
        from alpagym_runtime.simulators.embedded.commonroad import Skipped

        self._data = PaiDataset(dataset)
        if LABELS not in self._data.tree.features:
            raise ConfigError(
                f"{self._data.tree.root} has no labels of road users; download them: alpagym pai download --labels "
                f"egomotion {LABELS} --chunk-ids …",
                key="dataset.path",
            )
        self._aliases = [("egomotion", "egomotion"), (LABELS, next(iter(self._data.tree.features[LABELS].members)))]
        self._skip_bad = dataset.skip_bad
        self._found: dict[str, tuple[str, ...]] = {}
        self.skipped: Sequence[Skipped] = []
        self._make_skipped = Skipped
        self.dropped: Counter[str] = Counter()

    def ids(self, split: str) -> tuple[str, ...]:
        """Clips of the split; ConfigError where files are missing, unless dataset.skip_bad leaves them out."""
        if split not in self._found:
            try:
                samples = {sample.clip_id: sample for sample in self._data.samples(split)}
            except ConfigError:
                return ()
            problems = {clip: self._data.problems_of(sample, self._aliases) for clip, sample in samples.items()}
            bad = {clip: texts for clip, texts in problems.items() if texts}
            if bad and not self._skip_bad:
                clip, texts = next(iter(bad.items()))
                raise ConfigError(
                    f"{len(bad)} of {len(samples)} clips cannot be replayed, such as {clip}: {texts[0]} (leave them "
                    "out with dataset.skip_bad=true)",
                    key="dataset.path",
                )
            self.skipped = [*self.skipped, *(self._make_skipped(clip, texts[0]) for clip, texts in bad.items())]
            self._found[split] = tuple(clip for clip in samples if clip not in bad)
        return self._found[split]

    def load(self, scene_id: str) -> Scene:
        """A clip's scene; SceneError names the clip and why it cannot be driven."""
        sample = self._data.find(scene_id)
        try:
            return self._scene(sample)
        except (CorruptFileError, OutOfRangeError) as err:
            raise SceneError(f"clip {sample.clip_id}: {err}") from err

    def _scene(self, sample: Sample) -> Scene:
        clip, chunk, tree = sample.clip_id, sample.chunk, self._data.tree
        log = EgoLog.from_table(tree.table("egomotion", chunk, clip, "egomotion"), f"egomotion of clip {clip}")
        vehicle = _vehicle(vars(read_vehicle(tree, chunk, clip)))
        steps = min(int(log.time_us[-1]), CLIP_US) // STEP_US + 1
        grid = np.arange(steps, dtype=np.int64) * STEP_US
        ego = _ego_log(log, grid)
        feature, alias = self._aliases[1]
        tracks = read_tracks(tree.table(feature, chunk, clip, alias), log, f"{LABELS} of clip {clip}")
        actors = self._actors(tracks, grid, ego, vehicle)
        route = _route(ego)
        corridor = shapely.LineString(route).buffer(CORRIDOR_HALF_M, cap_style="flat")
        polygons = [np.asarray(part.exterior.coords) for part in shapely.get_parts(corridor)]
        return Scene(
            scene_id=clip,
            family=AFTER if not sample.cluster else f"{AFTER}.{sample.cluster.lower()}",
            ego_log=ego,
            handover=HANDOVER,
            route=route,
            area=area_from_polygons(list(polygons)),
            actors=actors,
            vehicle=vehicle,
        )

    def _actors(self, tracks: Sequence[Track], grid: NDArray[np.int64], ego: Float, vehicle: Vehicle) -> Actors:
        """Tracks on the grid; those that overlap the recorded ego are label noise, and left out."""
        placed = [(track, *on_grid(track, grid)) for track in tracks]
        centre = rig_to_local(np.array([vehicle.centre_offset_m, 0.0]), ego[:, :3])
        size = np.broadcast_to([vehicle.length_m, vehicle.width_m], (len(ego), 2))
        ego_boxes = np.concatenate([centre, ego[:, 2:3], size], axis=1)
        kept = []
        for track, states, first, last in placed:
            if last < first:
                self.dropped["shorter than the grid"] += 1
                continue
            span = slice(first, last + 1)
            own = np.broadcast_to([track.length_m, track.width_m], (last + 1 - first, 2))
            if boxes_overlap(np.concatenate([states[span, :3], own], axis=1), ego_boxes[span]).any():
                self.dropped["overlap the recorded ego"] += 1
                continue
            near = float(np.hypot(*(states[span, :2] - ego[span, :2]).T).min())
            kept.append((near, track, states, first, last))
        if len(kept) > MAX_ACTORS:
            self.dropped["beyond the nearest"] += len(kept) - MAX_ACTORS
            kept = sorted(kept, key=lambda item: item[0])[:MAX_ACTORS]
        if not kept:
            return Actors.none()
        return Actors(
            np.stack([states for _, _, states, _, _ in kept]),
            np.array([first for *_, first, _ in kept], np.int64),
            np.array([last for *_, last in kept], np.int64),
            np.array([[track.length_m, track.width_m] for _, track, *_ in kept]),
            np.array([KINDS.index(track.kind) for _, track, *_ in kept], np.int64),
        )


def _vehicle(dimensions: dict[str, float]) -> Vehicle:
    length = dimensions["length"]
    overhang = length / 2.0 - dimensions["rear_axle_to_bbox_center"]
    return Vehicle(length, dimensions["width"], overhang, dimensions["wheelbase"])


def _ego_log(log: EgoLog, grid: NDArray[np.int64]) -> Float:
    """[K,4] x, y m, yaw rad (unwrapped), speed m/s along the heading, on the grid."""
    pose = log.poses(grid)
    yaw = np.unwrap(yaw_from_quaternion(pose.quaternion_wxyz))
    velocity = log.velocities(grid)
    speed = np.cos(yaw) * velocity[:, 0] + np.sin(yaw) * velocity[:, 1]
    return np.concatenate([pose.position[:, :2], yaw[:, None], speed[:, None]], axis=1)


def _route(ego: Float) -> Float:
    """The driven path every metre, straight on at both ends; a standing car's goes straight through it."""
    kept = [0]
    for k in range(1, len(ego)):
        if np.hypot(*(ego[k, :2] - ego[kept[-1], :2])) >= ROUTE_STEP_M:
            kept.append(k)
    path = ego[kept, :2]
    first, last = (np.array([np.cos(yaw), np.sin(yaw)]) for yaw in (ego[0, 2], ego[-1, 2]))
    ahead = np.arange(1.0, ROUTE_AHEAD_M / 5.0 + 1.0)[:, None] * 5.0 * last
    return np.concatenate([path[:1] - ROUTE_BEHIND_M * first, path, path[-1:] + ahead])


def read_tracks(table: pa.Table, log: EgoLog, what: str) -> list[Track]:
    """Labelled road users in the anchor frame; a track with a gap longer than 1 s becomes two.

    Raises:
        CorruptFileError: a column is missing, or a label is in another frame than the rig's at its own time.

    """
    missing = [name for name in (*COLUMNS, *NUMBERS, *QUATERNION) if name not in table.column_names]
    if missing:
        raise CorruptFileError(f"{what} lacks {', '.join(missing)}; it has {', '.join(table.column_names)}")
    for name, wanted in (("reference_frame", "rig"), ("reference_frame_timestamp_us", None)):
        if name in table.column_names:
            values = table[name].to_pylist()
            own = table["timestamp_us"].to_pylist() if wanted is None else [wanted] * len(values)
            if values != own:
                raise CorruptFileError(f"{what}: {name} must be {wanted or 'timestamp_us'} in every row")
    times = table["timestamp_us"].to_numpy().astype(np.int64)
    inside = (times >= log.time_us[0]) & (times <= log.time_us[-1])
    columns: dict[str, Any] = {
        name: table[name].to_numpy().astype(np.float64)[inside] for name in (*NUMBERS, *QUATERNION)
    }
    times = times[inside]
    if not len(times):
        return []
    rig = log.poses(times)
    own = quaternion_from_xyzw(np.stack([columns[name] for name in QUATERNION], axis=-1))
    centre = np.stack([columns[name] for name in NUMBERS[:3]], axis=-1)
    position = rotate(rig.quaternion_wxyz, centre) + rig.position
    yaw = yaw_from_quaternion(quaternion_product(rig.quaternion_wxyz, unit_quaternion(own)))
    ids = np.array([str(value) for value in table["track_id"].to_pylist()])[inside]
    classes = np.array([str(value) for value in table["label_class"].to_pylist()])[inside]
    tracks = []
    for name in dict.fromkeys(ids.tolist()):
        rows = np.flatnonzero(ids == name)
        rows = rows[np.argsort(times[rows], kind="stable")]
        rows = rows[np.concatenate([[True], np.diff(times[rows]) > 0])]  # of two labels of one time the first
        kind = KIND_OF_CLASS.get(str(classes[rows[0]]), "static")
        size = [float(np.median(columns[key][rows])) for key in ("size_x", "size_y")]
        for part in np.split(rows, np.flatnonzero(np.diff(times[rows]) > TRACK_GAP_US) + 1):
            states = np.concatenate([position[part, :2], np.unwrap(yaw[part])[:, None]], axis=1)
            tracks.append(Track(times[part], states, max(size[0], 0.1), max(size[1], 0.1), kind))
    return tracks


def on_grid(track: Track, grid: NDArray[np.int64]) -> tuple[Float, int, int]:
    """[K,4] x, y m, yaw rad, speed m/s along the heading, and the first and last grid index within the interval."""
    inside = np.flatnonzero((grid >= track.time_us[0]) & (grid <= track.time_us[-1]))
    states = np.zeros((len(grid), 4))
    if not len(inside):
        return states, 0, -1
    at = grid[inside]
    for k in range(3):
        states[inside, k] = np.interp(at, track.time_us, track.states[:, k])
    if len(inside) > 1:
        velocity = np.gradient(states[inside, :2], STEP_US * 1e-6, axis=0)
        yaw = states[inside, 2]
        states[inside, 3] = np.cos(yaw) * velocity[:, 0] + np.sin(yaw) * velocity[:, 1]
    return states, int(inside[0]), int(inside[-1])
