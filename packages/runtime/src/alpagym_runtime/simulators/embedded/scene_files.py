"""Scenes as files, in the layout of AlpaSim's artifacts without the neural parts.

A `.usdz` (a zip with stored entries) or a folder holds `metadata.yaml`, `rig_trajectories.json`,
`sequence_tracks.json`, `map.xodr` and, in files of ours, `alpagym.json` for what that layout cannot say: handover,
route, exact headings and speeds, drivable area, reactive agents, signals. Without it, AlpaSim's recordings load too:
the rig's track is the log, tracks are put on our grid, the route is the driven path led on along the lanes, the area
is that of the map.

The world frame of the files is the scene's local frame. A map with `lat_0` and `lon_0` in its geo reference lies in the
plane that touches the Earth there (x east, y north); `T_world_base`, the pose of the local frame in ECEF, moves it.
Meshes, parquet maps, camera calibrations and images are not read.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import shapely
from numpy.typing import NDArray

from alpagym_runtime.errors import SceneError
from alpagym_runtime.geometry import (
    Area,
    angle_difference,
    area_from_polygons,
    check_times,
    yaw_from_quaternion,
)
from alpagym_runtime.simulators.embedded.archive import Members, write_members
from alpagym_runtime.simulators.embedded.commonroad_xml import Track, corners
from alpagym_runtime.simulators.embedded.lane_map import Agent, LaneMap, Signals, Stop
from alpagym_runtime.simulators.embedded.map_paths import lead_on
from alpagym_runtime.simulators.embedded.opendrive import read_opendrive_map
from alpagym_runtime.simulators.embedded.opendrive_notes import check_signals
from alpagym_runtime.simulators.embedded.opendrive_writer import write_opendrive
from alpagym_runtime.simulators.embedded.opendrive_xml import FILE_BYTES_MAX, Placement
from alpagym_runtime.simulators.embedded.scene import KINDS, MAX_ACTORS, STEP_US, Actors, Scene, Vehicle

Float = NDArray[np.float64]

VERSION = 1
OWN = "alpagym.json"
RIG, TRACKS, MAP, METADATA = "rig_trajectories.json", "sequence_tracks.json", "map.xodr", "metadata.yaml"

START_US = 1_700_000_000_000_000
"""Time of a written log's first sample: AlpaSim's clients take 0 for "not set"."""

CLASSES = {
    **{"car": "automobile", "truck": "heavy_truck", "bus": "bus", "motorcycle": "motorcycle"},
    **{"bicycle": "bicycle", "pedestrian": "person", "static": "protruding_object"},
}
"""AlpaSim's `label_class` by our kind."""

_KINDS = {name: kind for kind, name in CLASSES.items()} | {
    **{"other_vehicle": "car", "trailer": "truck", "train_or_tram_car": "bus", "trolley_bus": "bus"},
    **{"rider": "bicycle", "cyclist": "bicycle", "stroller": "pedestrian", "pedestrian": "pedestrian"},
    **{"car": "car", "truck": "truck", "animal": "pedestrian"},
}

METADATA_BYTES_MAX = 1_000_000
LOG_S_MIN, LOG_S_MAX = 1.5, 600.0
HISTORY_STEPS = 16
TRAFFIC_AFTER_LOG = 50
PLACE_MAX_M = 1e7
ROUTE_BEHIND_M, ROUTE_AHEAD_M = 5.0, 110.0
SWEPT_MARGIN_M = 0.3
AREA_MARGIN_M = 100.0
BAND_ENTRIES_MAX = 5_000_000
TILT_MAX_RAD = 0.1
HEIGHT_M = 1.5
"""Of every box: the embedded world has no heights."""


# ---------------------------------------------------------------- writing


def write_scene(scene: Scene, path: Path, lane_map: LaneMap | None = None) -> None:
    """Write one scene; `.usdz` gives a zip, another name a new folder.

    Args:
        scene: any scene of the embedded world.
        path: written whole or not at all; a zip is replaced, a folder must not exist.
        lane_map: the map; the scene's own if None. Without any, AlpaSim cannot load the file, we can.

    """
    lane_map = scene.lane_map if lane_map is None else lane_map
    times = (START_US + STEP_US * np.arange(len(scene.ego_log))).tolist()
    members = {
        METADATA: _metadata(scene, times),
        RIG: _json(_rig(scene, times)),
        TRACKS: _json(_tracks(scene)),
        OWN: _json(_own(scene)),
    }
    if lane_map is not None:
        members[MAP] = write_opendrive(lane_map, scene.scene_id)
    write_members(path, members)


def _json(data: Any) -> bytes:
    return json.dumps(data, allow_nan=False, separators=(",", ":")).encode()


def _metadata(scene: Scene, times: list[int]) -> bytes:
    """YAML that is JSON too, so that every id stays the text that it is."""
    content_hash = scene.content_hash
    data = {
        "scene_id": scene.scene_id,
        "version_string": f"alpagym-{VERSION}",
        "training_date": "2026-01-01",
        "dataset_hash": content_hash,
        "uuid": str(uuid.uuid5(uuid.NAMESPACE_OID, content_hash)),
        "is_resumable": False,
        "sensors": {"camera_ids": [], "lidar_ids": []},
        "logger": {"name": "none", "run_id": "none", "run_url": "none"},
        "time_range": {"start": float(times[0]), "end": float(times[-1])},
        "training_step_outputs": {},
    }
    return (json.dumps(data, indent=2) + "\n").encode()


def _rig(scene: Scene, times: list[int]) -> Any:
    vehicle = scene.vehicle
    poses = []
    for x, y, yaw, _ in scene.ego_log.tolist():
        c, s = math.cos(yaw), math.sin(yaw)
        poses.append([[c, -s, 0.0, x], [s, c, 0.0, y], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    box = {
        "centroid": [vehicle.centre_offset_m, 0.0, HEIGHT_M / 2.0],
        "dim": [vehicle.length_m, vehicle.width_m, HEIGHT_M],
        "rot": [0.0, 0.0, 0.0],
    }
    trajectory = {
        "sequence_id": "sequence",
        "T_rig_world_timestamps_us": times,
        "T_rig_worlds": poses,
        "cameras_frame_timestamps_us": {},
        "rig_bbox": box,
    }
    identity = np.eye(4).tolist()
    return {
        "world_to_nre": {"matrix": identity},
        "T_world_base": identity,
        "camera_calibrations": {},
        "rig_trajectories": [trajectory],
    }


def _tracks(scene: Scene) -> Any:
    actors = scene.actors
    data: dict[str, list[Any]] = {
        name: [] for name in ("tracks_id", "tracks_label_class", "tracks_flags", "tracks_timestamps_us", "tracks_poses")
    }
    for a in range(len(actors.first)):
        steps = range(int(actors.first[a]), int(actors.last[a]) + 1)
        data["tracks_id"].append(str(a))
        data["tracks_label_class"].append(CLASSES[KINDS[actors.kind[a]]])
        data["tracks_flags"].append(["CONTROLLABLE"] if KINDS[actors.kind[a]] != "static" else [])
        data["tracks_timestamps_us"].append([START_US + STEP_US * k for k in steps])
        rows = actors.tracks[a, steps.start : steps.stop].tolist()
        data["tracks_poses"].append(
            [[x, y, HEIGHT_M / 2.0, 0.0, 0.0, math.sin(yaw / 2.0), math.cos(yaw / 2.0)] for x, y, yaw, _ in rows]
        )
    sizes = [[length, width, HEIGHT_M] for length, width in actors.size.tolist()]
    return {"sequence": {"tracks_data": data, "cuboidtracks_data": {"cuboids_dims": sizes}}}


def _stops(stops: tuple[Stop, ...]) -> list[list[float | None]]:
    return [[s.arc_m, s.signal_group, *(v if math.isfinite(v) else None for v in s.conflict)] for s in stops]


def _own(scene: Scene) -> Any:
    actors = scene.actors
    valid = [slice(int(f), int(last) + 1) for f, last in zip(actors.first, actors.last, strict=True)]
    agents = [
        dataclasses.asdict(agent) | {"path": agent.path.tolist(), "stops": _stops(agent.stops)}
        for agent in scene.agents
    ]
    signals = scene.signals
    return {
        "version": VERSION,
        "scene_id": scene.scene_id,
        "family": scene.family,
        "handover": int(scene.handover),
        "speed_limit_mps": float(scene.speed_limit_mps),
        "vehicle": dataclasses.asdict(scene.vehicle),
        "route": scene.route.tolist(),
        "area": {"band_height_m": float(scene.area.band_height_m), "segments": scene.area.segments.tolist()},
        "ego": scene.ego_log[:, 2:].tolist(),
        "tracks": {
            "steps": int(actors.tracks.shape[1]),
            "kinds": [KINDS[k] for k in actors.kind],
            "yaw_speed": [actors.tracks[a, part, 2:].tolist() for a, part in enumerate(valid)],
        },
        "agents": agents,
        "signals": {
            "cycle_s": float(signals.cycle_s),
            "yellow_s": float(signals.yellow_s),
            "green_s": signals.green_s.tolist(),
            "heads": signals.heads.tolist(),
        },
        "stops": _stops(scene.stops),
    }


# ---------------------------------------------------------------- reading: values


class _Value:
    """A place in a JSON document, for errors that name it."""

    def __init__(self, data: Any, place: str) -> None:
        self.data = data
        self.place = place

    def wrong(self, expected: str) -> SceneError:
        shown = repr(self.data)[:60] if not isinstance(self.data, (list, dict)) else type(self.data).__name__
        return SceneError(f"{self.place}: {shown}, expected {expected}")

    def __getitem__(self, key: str) -> _Value:
        if not isinstance(self.data, dict):
            raise self.wrong("an object")
        if key not in self.data:
            raise SceneError(f"{self.place}: no {key!r}")
        return _Value(self.data[key], f"{self.place}.{key}")

    def get(self, key: str) -> _Value | None:
        return self[key] if isinstance(self.data, dict) and self.data.get(key) is not None else None

    def items(self, count: int | None = None, limit: int = 100_000) -> list[_Value]:
        if not isinstance(self.data, list) or len(self.data) > limit:
            raise self.wrong(f"a list of at most {limit}")
        if count is not None and len(self.data) != count:
            raise SceneError(f"{self.place}: {len(self.data)} entries, expected {count}")
        return [_Value(item, f"{self.place}[{k}]") for k, item in enumerate(self.data)]

    def text(self) -> str:
        if not isinstance(self.data, str) or not self.data or len(self.data) > 1000:
            raise self.wrong("a text")
        return self.data

    def number(self, low: float = -1e12, high: float = 1e12) -> float:
        if isinstance(self.data, bool) or not isinstance(self.data, (int, float)) or not low <= self.data <= high:
            raise self.wrong(f"a number from {low:g} to {high:g}")
        return float(self.data)

    def whole(self, low: int, high: int) -> int:
        if type(self.data) is not int or not low <= self.data <= high:
            raise self.wrong(f"a whole number from {low} to {high}")
        return self.data

    def array(self, *shape: int | None, bound: float = PLACE_MAX_M) -> Float:
        """A float array of a shape (None: any), finite and up to `bound` in size."""
        try:
            table = np.array(self.data, np.float64)
        except (TypeError, ValueError, OverflowError):
            raise self.wrong(f"numbers of shape {_shape(shape)}") from None
        if table.size == 0 and len(shape) > 1 and shape[0] is None and self.data == []:
            table = np.zeros((0, *(n or 0 for n in shape[1:])))
        fits = table.ndim == len(shape) and all(n is None or n == m for n, m in zip(shape, table.shape, strict=True))
        if not fits:
            raise SceneError(f"{self.place}: numbers of shape {list(table.shape)}, expected {_shape(shape)}")
        bad = np.argwhere(~(np.abs(table) <= bound))
        if len(bad):
            raise SceneError(f"{self.place}{bad[0].tolist()}: not a finite number up to {bound:g}")
        return table

    def times(self) -> NDArray[np.int64]:
        values = [item.whole(0, 2**62) for item in self.items()]
        try:
            return check_times(np.array(values, np.int64), self.place)
        except ValueError as err:
            raise SceneError(str(err)) from err


def _shape(shape: tuple[int | None, ...]) -> str:
    return "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"


# ---------------------------------------------------------------- reading: a scene


def read_scene(path: Path) -> Scene:
    """The scene in a `.usdz` or folder; its map is `Scene.lane_map`.

    Raises:
        SceneError: naming file, place and reason.

    """
    with Members(path) as members:
        try:
            # Numbers of strangers overflow; what comes out is checked.
            with np.errstate(all="ignore"):
                return _Reader(members).scene()
        except SceneError as err:
            raise err if str(err).startswith(str(path)) else SceneError(f"{path}: {err}") from None
        except (ValueError, shapely.errors.GEOSException) as err:
            raise SceneError(f"{path}: {err}") from err


class _Reader:
    def __init__(self, members: Members) -> None:
        self.members = members
        if RIG not in members.names:
            raise SceneError(f"no {RIG}: not a scene of AlpaSim's layout")
        self.rig = _Value(members.json(RIG), RIG)
        self.own = _Value(members.json(OWN), OWN) if OWN in members.names else None
        if self.own is not None:
            version = self.own["version"].whole(0, 10**9)
            if version != VERSION:
                raise SceneError(f"{OWN}.version: {version}; this reader knows {VERSION}, a newer program wrote it")

    def scene(self) -> Scene:
        trajectory = self.rig["rig_trajectories"].items(count=1)[0]
        times = trajectory["T_rig_world_timestamps_us"].times()
        poses = trajectory["T_rig_worlds"].array(len(times), 4, 4)
        if not LOG_S_MIN <= (times[-1] - times[0]) * 1e-6 <= LOG_S_MAX:
            duration = (times[-1] - times[0]) * 1e-6
            raise SceneError(f"{RIG}: a log of {duration:g} s, expected {LOG_S_MIN:g} to {LOG_S_MAX:g}")
        tilt = poses[:, :3, :3] @ np.swapaxes(poses[:, :3, :3], 1, 2) - np.eye(3)
        if np.abs(tilt).max() > 0.01 or (poses[:, 2, 2] < 0.5).any():
            raise SceneError(f"{trajectory.place}.T_rig_worlds: not all are poses of an upright car")
        states = np.column_stack([poses[:, 0, 3], poses[:, 1, 3], np.arctan2(poses[:, 1, 0], poses[:, 0, 0])])
        if self.own is not None:
            return self._ours(self.own, times, states)
        return self._recorded(trajectory, times, states)

    # ---- files of ours

    def _ours(self, own: _Value, times: NDArray[np.int64], states: Float) -> Scene:
        if (np.diff(times) != STEP_US).any():
            raise SceneError(f"{RIG}: samples are not {STEP_US} us apart, as those beside {OWN} are")
        rest = own["ego"].array(len(times), 2)
        _same_heading(states[:, 2], rest[:, 0], f"{OWN}.ego")
        signals = self._signals(own["signals"])
        groups = len(signals.green_s)
        actors = self._own_actors(own["tracks"], int(times[0]), len(times))
        agents = own["agents"].items(limit=MAX_ACTORS)
        return Scene(
            scene_id=own["scene_id"].text(),
            family=own["family"].text(),
            ego_log=np.column_stack([states[:, :2], rest]),
            handover=own["handover"].whole(0, len(times) - 2),
            route=own["route"].array(None, 2),
            area=_area(own["area"]["segments"], own["area"]["band_height_m"]),
            actors=actors,
            vehicle=_vehicle(own["vehicle"]),
            speed_limit_mps=own["speed_limit_mps"].number(0.1, 200.0),
            agents=tuple(_agent(agent, groups) for agent in agents),
            signals=signals,
            stops=_read_stops(own["stops"], groups),
            lane_map=self._lane_map(),
        )

    def _own_actors(self, own: _Value, start_us: int, log_steps: int) -> Actors:
        steps = own["steps"].whole(1, log_steps + 10_000)
        tracks = self._track_values()
        kinds = [kind.text() for kind in own["kinds"].items(count=len(tracks))]
        rest = own["yaw_speed"].items(count=len(tracks))
        if not tracks:
            return Actors.none()
        table = np.zeros((len(tracks), steps, 4))
        first, last = np.zeros(len(tracks), np.int64), np.zeros(len(tracks), np.int64)
        for a, (times, places, yaws, _, _) in enumerate(tracks):
            first[a], off = divmod(int(times[0]) - start_us, STEP_US)
            last[a] = first[a] + len(times) - 1
            if off or (np.diff(times) != STEP_US).any() or not 0 <= first[a] <= last[a] < steps:
                raise SceneError(f"{TRACKS}: track {a} does not lie on the grid of {steps} steps")
            exact = rest[a].array(len(times), 2)
            _same_heading(yaws, exact[:, 0], rest[a].place)
            if kinds[a] not in KINDS:
                raise SceneError(f"{own.place}.kinds[{a}]: {kinds[a]!r}, expected {' | '.join(KINDS)}")
            table[a, first[a] : last[a] + 1] = np.column_stack([places, exact])
        sizes = np.array([size for *_, size in tracks])
        return Actors(table, first, last, sizes, np.array([KINDS.index(kind) for kind in kinds], np.int64))

    def _signals(self, value: _Value) -> Signals:
        signals = Signals(
            value["cycle_s"].number(0.0, 1e6),
            value["green_s"].array(None, 2),
            value["yellow_s"].number(0.0, 1e3),
            value["heads"].array(None, 4),
        )
        check_signals(signals, value.place)
        return signals

    # ---- what both have

    def _track_values(self) -> list[tuple[NDArray[np.int64], Float, Float, str, tuple[float, float]]]:
        """Of each track: times [K], places [K,2], yaws [K], class, (length, width)."""
        if TRACKS not in self.members.names:
            return []
        document = _Value(self.members.json(TRACKS), TRACKS)
        if not isinstance(document.data, dict) or len(document.data) != 1:
            raise document.wrong("an object with exactly one sequence")
        sequence = document[next(iter(document.data))]
        data = sequence["tracks_data"]
        names = data["tracks_id"].items()
        ids = [str(name.data) for name in names]
        if len(set(ids)) != len(ids):
            twice = next(name for k, name in enumerate(ids) if name in ids[:k])
            raise SceneError(f"{data.place}.tracks_id: id {twice[:40]!r} occurs twice")
        columns = [
            data[name].items(len(ids)) for name in ("tracks_label_class", "tracks_timestamps_us", "tracks_poses")
        ]
        sizes = sequence["cuboidtracks_data"]["cuboids_dims"].array(len(ids), 3) if ids else np.zeros((0, 3))
        if not (sizes > 0.0).all() or (sizes > 100.0).any():
            raise SceneError(f"{TRACKS}: cuboids_dims must be above 0 and at most 100 m")
        found = []
        for label, stamps, poses, size in zip(*columns, sizes, strict=True):
            times = stamps.times()
            table = poses.array(len(times), 7)
            try:
                yaw = yaw_from_quaternion(table[:, [6, 3, 4, 5]])
            except ValueError as err:
                raise SceneError(f"{poses.place}: {err}") from err
            found.append((times, table[:, :2], yaw, label.text(), (float(size[0]), float(size[1]))))
        return found

    def _lane_map(self) -> LaneMap | None:
        if MAP not in self.members.names:
            return None
        data = self.members.read(MAP, FILE_BYTES_MAX)
        opened = read_opendrive_map(data, MAP)
        placement = _placement(opened.geo_reference, self.rig.get("T_world_base"))
        return opened.lane_map if placement is None else read_opendrive_map(data, MAP, placement).lane_map

    # ---- AlpaSim's recordings

    def _recorded(self, trajectory: _Value, times: NDArray[np.int64], states: Float) -> Scene:
        lane_map = self._lane_map()
        if lane_map is None:
            raise SceneError(f"neither {MAP} nor {OWN}; parquet maps are not read")
        ego = Track("ego", 0, True, False, times, _moving(times, states), 1.0, 1.0)
        log = ego.own_grid()
        vehicle = _vehicle_of_box(trajectory)
        turn = float(log[-1, 2] - log[0, 2])
        family = ("turn_left" if turn > 0.0 else "turn_right") if abs(turn) > 0.5 else "straight"
        area, widened = _recorded_area(log, vehicle, lane_map)
        return Scene(
            scene_id=self._scene_id(),
            family=f"recorded.{family}{widened}",
            ego_log=log,
            handover=min(HISTORY_STEPS, (len(log) - 1) // 4),
            route=lead_on(log[:, :3], lane_map, ROUTE_BEHIND_M, ROUTE_AHEAD_M),
            area=area,
            actors=self._recorded_actors(int(times[0]), log),
            vehicle=vehicle,
            speed_limit_mps=max(float(np.abs(log[:, 3]).max()) * 1.05, 5.0),
            signals=lane_map.signals,
            lane_map=lane_map,
        )

    def _recorded_actors(self, start_us: int, log: Float) -> Actors:
        """On the log's grid; of more than `MAX_ACTORS`, those that come nearest."""
        steps = len(log) + TRAFFIC_AFTER_LOG
        rows: list[tuple[float, int, int, Float, tuple[float, float], int]] = []
        for times, places, yaws, label, size in self._track_values():
            kind = KINDS.index(_KINDS.get(label, "car"))
            states = _moving(times, np.column_stack([places, yaws]))
            first, there = Track("", kind, False, False, times, states, *size).on_grid(start_us, steps)
            if len(there):
                own = log[np.minimum(np.arange(first, first + len(there)), len(log) - 1), :2]
                nearest = float(np.hypot(*(there[:, :2] - own).T).min())
                rows.append((nearest, len(rows), first, there, size, kind))
        rows = sorted(sorted(rows, key=lambda row: row[:2])[:MAX_ACTORS], key=lambda row: row[1])
        if not rows:
            return Actors.none()
        table = np.zeros((len(rows), steps, 4))
        for row, (_, _, first, there, _, _) in zip(table, rows, strict=True):
            row[first : first + len(there)] = there
        firsts = np.array([row[2] for row in rows], np.int64)
        lasts = firsts + np.array([len(row[3]) for row in rows]) - 1
        return Actors(table, firsts, lasts, np.array([row[4] for row in rows]), np.array([row[5] for row in rows]))

    def _scene_id(self) -> str:
        import yaml  # type: ignore[import-untyped]

        if METADATA not in self.members.names:
            raise SceneError(f"no {METADATA}")
        text = self.members.read(METADATA, METADATA_BYTES_MAX)
        try:
            data = yaml.safe_load(text)
        except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as err:
            raise SceneError(f"{METADATA}: not YAML: {str(err)[:200]}") from err
        value = _Value(data, METADATA)["scene_id"]
        return str(value.data) if type(value.data) is int else value.text()


def _moving(times: NDArray[np.int64], states: Float) -> Float:
    """[K,4] x, y, unwrapped yaw and speed along it, m/s, by central differences."""
    yaw = np.unwrap(states[:, 2])
    if len(times) == 1:
        return np.column_stack([states[:, :2], yaw, np.zeros(1)])
    velocity = np.gradient(states[:, :2], (times - times[0]) * 1e-6, axis=0)
    return np.column_stack([states[:, :2], yaw, velocity[:, 0] * np.cos(yaw) + velocity[:, 1] * np.sin(yaw)])


def _same_heading(coarse: Float, exact: Float, place: str) -> None:
    """The exact heading must be the one in the standard member: an edit of that alone would be lost."""
    off = np.abs(angle_difference(coarse, exact))
    if (off > 1e-6).any():
        raise SceneError(f"{place}[{int(np.argmax(off > 1e-6))}]: not the heading that the trajectory has")


def _vehicle(value: _Value) -> Vehicle:
    names = [field.name for field in dataclasses.fields(Vehicle)]
    unknown = set(value.data) - set(names) if isinstance(value.data, dict) else set()
    if unknown:
        raise SceneError(f"{value.place}: {sorted(unknown)[0]!r} is not known; a newer program wrote it")
    vehicle = Vehicle(**{name: value[name].number(-100.0, 1e6) for name in names})
    if not (0.1 <= vehicle.length_m <= 50.0 and 0.1 <= vehicle.width_m <= 10.0 and 0.05 <= vehicle.wheelbase_m <= 50.0):
        raise SceneError(f"{value.place}: {vehicle}, expected the size of a vehicle in m")
    return vehicle


def _vehicle_of_box(trajectory: _Value) -> Vehicle:
    box = trajectory.get("rig_bbox")
    if box is None:
        return Vehicle()
    centre, size = box["centroid"].array(3), box["dim"].array(3)
    if not (0.5 <= size[0] <= 50.0 and 0.3 <= size[1] <= 10.0 and abs(centre[0]) < size[0] / 2.0):
        raise SceneError(f"{box.place}: {size[0]:g} m x {size[1]:g} m around {centre[0]:g} m, expected a car's box")
    scaled = Vehicle.of_size(float(size[0]), float(size[1]))
    return dataclasses.replace(scaled, rear_overhang_m=float(size[0] / 2.0 - centre[0]))


def _read_stops(value: _Value, groups: int) -> tuple[Stop, ...]:
    stops = []
    for item in value.items(limit=10_000):
        arc, group, x, y = item.items(count=4)
        conflict = tuple(float("nan") if v.data is None else v.number(-PLACE_MAX_M, PLACE_MAX_M) for v in (x, y))
        stops.append(
            Stop(arc.number(-PLACE_MAX_M, PLACE_MAX_M), group.whole(-1, groups - 1), (conflict[0], conflict[1]))
        )
    if any(b.arc_m < a.arc_m for a, b in itertools.pairwise(stops)):
        raise SceneError(f"{value.place}: arc lengths do not ascend")
    return tuple(stops)


def _agent(value: _Value, groups: int) -> Agent:
    path = value["path"].array(None, 2)
    if not 2 <= len(path) <= 100_000 or not (np.hypot(*np.diff(path, axis=0).T) > 1e-6).all():
        raise SceneError(f"{value.place}.path: needs 2 to 100000 points, all distinct from their neighbours")
    yields = value["yields_to_cars"]
    if not isinstance(yields.data, bool):
        raise yields.wrong("true or false")
    return Agent(
        path=path,
        start_arc_m=value["start_arc_m"].number(-PLACE_MAX_M, PLACE_MAX_M),
        start_speed_mps=value["start_speed_mps"].number(0.0, 200.0),
        desired_speed_mps=value["desired_speed_mps"].number(0.0, 200.0),
        kind=value["kind"].whole(0, len(KINDS) - 1),
        length_m=value["length_m"].number(0.01, 100.0),
        width_m=value["width_m"].number(0.01, 100.0),
        lateral_m=value["lateral_m"].number(-1e3, 1e3),
        lanes_left=value["lanes_left"].whole(0, 20),
        lanes_right=value["lanes_right"].whole(0, 20),
        lane_width_m=value["lane_width_m"].number(0.1, 100.0),
        stops=_read_stops(value["stops"], groups),
        yields_to_cars=yields.data,
    )


# ---------------------------------------------------------------- the area


def _area(segments: _Value, band_height: _Value) -> Area:
    """The area whose boundary was written, with its bands made again as `area_from_polygons` makes them."""
    table = segments.array(None, 4)
    height = band_height.number(0.1, 1e3)
    if not len(table):
        raise SceneError(f"{segments.place}: no segment; an empty area is an error, never on the road")
    low = float(table[:, [1, 3]].min())
    first = np.floor((table[:, [1, 3]].min(axis=1) - low) / height).astype(np.int64)
    last = np.floor((table[:, [1, 3]].max(axis=1) - low) / height).astype(np.int64)
    counts = last - first + 1
    if counts.sum() > BAND_ENTRIES_MAX or last.max() > BAND_ENTRIES_MAX:
        raise SceneError(f"{segments.place}: an area that spreads over {table[:, [1, 3]].max() - low:g} m")
    index = np.repeat(np.arange(len(table)), counts)
    band = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    order = np.lexsort((index, band))
    offsets = np.zeros(int(last.max()) + 2, np.int64)
    np.add.at(offsets, band + 1, 1)
    return Area(table, np.cumsum(offsets), index[order].astype(np.int64), low, height)


def near(lane_map: LaneMap, places: Float) -> list[Any]:
    """The surface polygons within `AREA_MARGIN_M` of places [K,2]: an area need not be larger than its drive."""
    low, high = places.min(axis=0) - AREA_MARGIN_M, places.max(axis=0) + AREA_MARGIN_M
    return [ring for ring in lane_map.surface if (ring.max(axis=0) > low).all() and (ring.min(axis=0) < high).all()]


def _recorded_area(log: Float, vehicle: Vehicle, lane_map: LaneMap) -> tuple[Area, str]:
    """The map's surface, grown by the driven strip where a recorded box sticks out; and what the family says of it."""
    rings = near(lane_map, log[:, :2])
    cos, sin = np.cos(log[:, 2]), np.sin(log[:, 2])
    centre = log[:, :2] + vehicle.centre_offset_m * np.stack([cos, sin], axis=-1)
    size = np.broadcast_to([vehicle.length_m, vehicle.width_m], (len(log), 2))
    boxes = np.column_stack([centre, log[:, 2], size])
    if rings:
        area = area_from_polygons(rings)
        if area.contains(boxes).all():
            return area, ""
    points = corners(boxes)
    hulls = shapely.convex_hull(shapely.multipoints(np.concatenate([points[:-1], points[1:]], axis=1)))
    grown = shapely.buffer(hulls, SWEPT_MARGIN_M, join_style="mitre")
    return area_from_polygons([*rings, *(np.asarray(hull.exterior.coords) for hull in grown)]), ".widened"


# ---------------------------------------------------------------- maps on the Earth


def _placement(geo_reference: str | None, base: _Value | None) -> Placement | None:
    """Where a map with `lat_0` and `lon_0` lies in the local frame; None: the frames are one.

    AlpaSim's rule: map coordinates are east and north of that point; `T_world_base` is the local frame's pose in ECEF.
    """
    found = [re.search(rf"\+{name}=(-?[0-9.]+)", geo_reference or "") for name in ("lat_0", "lon_0")]
    if base is None or None in found:
        return None
    matrix = base.array(4, 4)
    if np.allclose(matrix, np.eye(4)):
        return None  # not said
    try:
        latitude, longitude = (math.radians(float(match[1])) for match in found if match is not None)
    except ValueError as err:
        raise SceneError(f"{MAP}: geoReference {geo_reference!r}: {err}") from err
    local = np.linalg.inv(matrix) @ east_north_up(latitude, longitude) if np.linalg.det(matrix) else None
    if local is None or not np.isfinite(local).all() or abs(local[2, 2] - 1.0) > TILT_MAX_RAD**2 / 2.0:
        raise SceneError(f"{MAP}: its geoReference and T_world_base are planes that tilt against each other")
    if max(abs(local[0, 3]), abs(local[1, 3])) > PLACE_MAX_M:
        raise SceneError(f"{MAP}: its geoReference lies beyond {PLACE_MAX_M / 1000.0:g} km of T_world_base")
    return Placement(float(local[0, 3]), float(local[1, 3]), math.atan2(local[1, 0], local[0, 0]))


def east_north_up(latitude_rad: float, longitude_rad: float) -> Float:
    """[4,4] pose in ECEF (WGS 84, height 0) of the frame whose x is east, y north and z up at a place."""
    a, e2 = 6_378_137.0, 6.694379990141316e-3
    sin_lat, cos_lat = math.sin(latitude_rad), math.cos(latitude_rad)
    sin_lon, cos_lon = math.sin(longitude_rad), math.cos(longitude_rad)
    n = a / math.sqrt(1.0 - e2 * sin_lat * sin_lat)
    return np.array(
        [
            [-sin_lon, -sin_lat * cos_lon, cos_lat * cos_lon, n * cos_lat * cos_lon],
            [cos_lon, -sin_lat * sin_lon, cos_lat * sin_lon, n * cos_lat * sin_lon],
            [0.0, cos_lat, sin_lat, n * (1.0 - e2) * sin_lat],
            [0.0, 0.0, 0.0, 1.0],
        ]
    )
