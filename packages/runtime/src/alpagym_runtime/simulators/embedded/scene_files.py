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
    area_of_boundary,
    yaw_from_quaternion,
)
from alpagym_runtime.simulators.embedded.archive import Members
from alpagym_runtime.simulators.embedded.commonroad_xml import Track, corners
from alpagym_runtime.simulators.embedded.lane_map import LaneMap, Signals
from alpagym_runtime.simulators.embedded.map_paths import lead_on
from alpagym_runtime.simulators.embedded.map_placement import map_placement
from alpagym_runtime.simulators.embedded.opendrive import read_opendrive_map
from alpagym_runtime.simulators.embedded.opendrive_notes import check_signals
from alpagym_runtime.simulators.embedded.opendrive_xml import FILE_BYTES_MAX
from alpagym_runtime.simulators.embedded.scene import KINDS, MAX_ACTORS, STEP_US, Actors, Scene, Vehicle
from alpagym_runtime.simulators.embedded.scene_layout import (
    KINDS_BY_CLASS,
    MAP,
    METADATA,
    OWN,
    RIG,
    TRACKS,
    VERSION,
)
from alpagym_runtime.simulators.embedded.scene_values import (
    Value,
    read_agent,
    read_stops,
    read_vehicle,
    vehicle_of_box,
)

Float = NDArray[np.float64]

METADATA_BYTES_MAX = 1_000_000
LOG_S_MIN, LOG_S_MAX = 1.5, 600.0
HISTORY_STEPS = 16
TRAFFIC_AFTER_LOG = 50
ROUTE_BEHIND_M, ROUTE_AHEAD_M = 5.0, 110.0
SWEPT_MARGIN_M = 0.3
AREA_MARGIN_M = 100.0
BAND_ENTRIES_MAX = 5_000_000


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
        self.rig = Value(members.json(RIG), RIG)
        self.own = Value(members.json(OWN), OWN) if OWN in members.names else None
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

    def _ours(self, own: Value, times: NDArray[np.int64], states: Float) -> Scene:
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
            vehicle=read_vehicle(own["vehicle"]),
            speed_limit_mps=own["speed_limit_mps"].number(0.1, 200.0),
            agents=tuple(read_agent(agent, groups) for agent in agents),
            signals=signals,
            stops=read_stops(own["stops"], groups),
            lane_map=self._lane_map(),
        )

    def _own_actors(self, own: Value, start_us: int, log_steps: int) -> Actors:
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

    def _signals(self, value: Value) -> Signals:
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
        document = Value(self.members.json(TRACKS), TRACKS)
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
        placement = map_placement(opened.geo_reference, self.rig.get("T_world_base"))
        return opened.lane_map if placement is None else read_opendrive_map(data, MAP, placement).lane_map

    # ---- AlpaSim's recordings

    def _recorded(self, trajectory: Value, times: NDArray[np.int64], states: Float) -> Scene:
        lane_map = self._lane_map()
        if lane_map is None:
            raise SceneError(f"neither {MAP} nor {OWN}; parquet maps are not read")
        ego = Track("ego", 0, True, False, times, _moving(times, states), 1.0, 1.0)
        log = ego.own_grid()
        vehicle = vehicle_of_box(trajectory)
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
            kind = KINDS.index(KINDS_BY_CLASS.get(label, "car"))
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
        value = Value(data, METADATA)["scene_id"]
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


def _area(segments: Value, band_height: Value) -> Area:
    """The area whose boundary was written."""
    table = segments.array(None, 4)
    if not len(table):
        raise SceneError(f"{segments.place}: no segment; an empty area is an error, never on the road")
    try:
        return area_of_boundary(table, band_height.number(0.1, 1e3), BAND_ENTRIES_MAX)
    except ValueError as err:
        raise SceneError(f"{segments.place}: {err}") from err


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
