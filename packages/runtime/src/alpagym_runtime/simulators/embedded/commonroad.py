"""Scenes from recorded traffic in the CommonRoad XML format, versions 2018b and 2020a.

Every recorded vehicle that drives far enough is an ego once: it leaves the traffic, and its track becomes the log.
The local frame is the file's own (m, yaw counter-clockwise from x); time 0 is the ego's first sample.

A recorded drive is drivable by definition. Where a recorded box sticks out of the lanelets, which is common in maps
narrower than the road, that scene's area is the lanelets and the ego's swept path grown by `SWEPT_MARGIN_M`; its family
ends in `.widened`. A vehicle that sticks out by more than `EXCESS_MAX_M` is not an ego.

Not read: traffic lights and signs, planning problems, environment and phantom obstacles, predictions as occupancy sets
other than exact boxes (`CommonRoadScenes.dropped` lists these obstacles).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import shapely
from numpy.typing import NDArray

from alpagym_runtime.errors import SceneError
from alpagym_runtime.geometry import SEAM_M, area_from_polygons, boxes_overlap
from alpagym_runtime.simulators.embedded.commonroad_xml import (
    Lanelet,
    Track,
    along_line,
    corners,
    read,
    thin,
)
from alpagym_runtime.simulators.embedded.lane_map import Marking
from alpagym_runtime.simulators.embedded.scene import MAX_ACTORS, STEP_US, Actors, Scene, Vehicle
from alpagym_runtime.simulators.embedded.scene_bank import arc_lengths
from alpagym_runtime.simulators.embedded.splits import deal

Float = NDArray[np.float64]

EGOS_PER_FILE = 6
EGO_PATH_MIN_M = 10.0
EGO_LOG_MIN_US = 1_500_000
REVERSE_MAX_M = 1.0
EXCESS_MAX_M = 1.0
ACCELERATION_MAX_MPS2 = 7.0
BEND_MAX_PM = 0.3
SMOOTHING_HALF_WINDOWS = (3, 4, 5, 6, 8, 10, 12)
SWEPT_MARGIN_M = 0.3
ROUTE_BEHIND_M = 5.0
ROUTE_AHEAD_M = 110.0
TRAFFIC_AFTER_LOG = 50
"""Grid steps of traffic kept after the ego's last sample, for planners that look ahead."""


@dataclass(frozen=True)
class Skipped:
    """A file, or an obstacle of one, that gives nothing, and why."""

    file: str
    reason: str


def _lane_lines(lanelets: list[Lanelet]) -> tuple[Marking, ...]:
    """Lines between neighbouring lanes, for pictures: broken in one direction, solid between two; none in junctions."""
    lines = []
    polygons = [lanelet.polygon for lanelet in lanelets]
    tree = shapely.STRtree(polygons)
    for k, lanelet in enumerate(lanelets):
        points = thin(lanelet.left, 0.05)
        if len(points) < 2:
            continue
        i = min(len(points) // 2, len(points) - 2)
        ahead = points[i + 1] - points[i]
        ahead /= np.hypot(*ahead)
        middle = (points[i] + points[i + 1]) / 2.0
        beside = shapely.Point(middle + 0.6 * np.array([-ahead[1], ahead[0]]))
        there = [j for j in tree.query(beside, "intersects").tolist() if j != k]
        # Inside a junction the line runs through other lanes.
        inside = any(polygons[j].buffer(-0.5).contains(shapely.Point(middle)) for j in there)
        if not there or inside:
            continue
        other = lanelets[there[0]].centre
        nearest = min(int(np.hypot(*(other - middle).T).argmin()), len(other) - 2)
        same = float((other[nearest + 1] - other[nearest]) @ ahead) > 0.0
        if same or k < there[0]:
            lines.append(Marking(points, "dashed" if same else "solid"))
    return tuple(lines)


class _Recording:
    """One file's map, traffic and usable egos."""

    def __init__(self, path: Path) -> None:
        contents = read(path)
        self.lanelets = contents.lanelets
        self.tracks = contents.tracks
        self.dropped = contents.dropped
        self.road_lanelets = self._road_lanelets()
        grown = [lanelet.polygon.buffer(SEAM_M / 2.0, join_style="mitre") for lanelet in self.road_lanelets]
        self.road = shapely.union_all(grown)
        if self.road.is_empty:
            raise SceneError("no lanelet that a car may drive on has an area")
        self.egos = self._egos()
        self.markings = _lane_lines(self.road_lanelets)

    def _road_lanelets(self) -> list[Lanelet]:
        """Those for cars, and others where a recorded vehicle drives beside those."""
        road = [lanelet for lanelet in self.lanelets.values() if lanelet.for_cars]
        others = [lanelet for lanelet in self.lanelets.values() if not lanelet.for_cars]
        centres = [track.states[:, :2] for track in self.tracks if track.can_be_ego]
        if others and centres:
            points = np.concatenate(centres)
            beside = points[~shapely.contains_xy(shapely.union_all([lanelet.polygon for lanelet in road]), points)]
            road += [lanelet for lanelet in others if shapely.contains_xy(lanelet.polygon, beside).any()]
        return road

    def _egos(self) -> dict[str, Track]:
        """Usable egos by obstacle id, the longest drive first."""
        reasons: Counter[str] = Counter()
        ordered: list[tuple[float, int, Track]] = []
        for track in self.tracks:
            if not track.can_be_ego:
                reasons["not a motor vehicle"] += 1
            elif track.times_us[-1] - track.times_us[0] < EGO_LOG_MIN_US:
                reasons[f"recorded for less than {EGO_LOG_MIN_US / 1e6:g} s"] += 1
            else:
                driven = float(arc_lengths(thin(track.own_grid()[:, :2], 0.5))[-1])
                ordered.append((-driven, len(ordered), track))
        egos: dict[str, Track] = {}
        for negative, _, track in sorted(ordered):
            reason = self._objection(track, -negative)
            if reason:
                reasons[reason] += 1
            elif len(egos) < EGOS_PER_FILE:
                egos[track.obstacle_id] = track
        if not egos:
            table = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
            raise SceneError(f"no usable ego among {len(self.tracks)} obstacles: {table}")
        return egos

    def _objection(self, ego: Track, driven_m: float) -> str | None:
        """Why a recorded vehicle cannot be an ego."""
        log, states = _recording(ego)
        if _hardest(log) >= ACCELERATION_MAX_MPS2:
            return "moved as no car can"
        if driven_m < EGO_PATH_MIN_M:
            return f"drive less than {EGO_PATH_MIN_M:g} m"
        steps = np.diff(states[:, :2], axis=0)
        forward = steps[:, 0] * np.cos(states[:-1, 2]) + steps[:, 1] * np.sin(states[:-1, 2])
        if -forward[forward < 0.0].sum() > REVERSE_MAX_M:
            return f"reverse for more than {REVERSE_MAX_M:g} m"
        boxes = _boxes(states, ego)
        leftover = shapely.difference(shapely.polygons(corners(boxes)), self.road)
        outside = shapely.get_coordinates(leftover)
        if len(outside) and shapely.distance(shapely.points(outside), self.road).max() > EXCESS_MAX_M:
            return f"leave the lanelets by more than {EXCESS_MAX_M:g} m"
        for other in self.tracks:
            if other is not ego:
                first, there = other.on_grid(int(ego.times_us[0]), len(states))
                own = boxes[first : first + len(there)]
                if len(there) and boxes_overlap(own, _boxes(there, other)).any():
                    return "overlap another recorded object"
        return None

    def scene(self, scene_id: str, ego: Track) -> Scene:
        """The scene in which one of `egos` is driven."""
        log, centre = _recording(ego)
        vehicle = Vehicle.of_size(ego.length_m, ego.width_m)
        turn = centre[-1, 2] - centre[0, 2]
        kind = ("turn_left" if turn > 0.0 else "turn_right") if abs(turn) > 0.5 else "straight"
        family = "commonroad." + ("stop" if kind == "straight" and centre[:, 3].min() < 0.5 else kind)
        rings = [lanelet.ring for lanelet in self.road_lanelets]
        area = area_from_polygons([*rings])
        boxes = _boxes(centre, ego)
        if not area.contains(boxes).all():
            points = corners(boxes)
            swept = shapely.convex_hull(shapely.multipoints(np.concatenate([points[:-1], points[1:]], axis=1)))
            grown = shapely.buffer(swept, SWEPT_MARGIN_M, join_style="mitre")
            area = area_from_polygons([*rings, *(np.asarray(hull.exterior.coords) for hull in grown)])
            family += ".widened"
        return Scene(
            scene_id=scene_id,
            family=family,
            ego_log=log,
            handover=min(EGO_LOG_MIN_US // STEP_US, (len(log) - 1) // 4),
            route=self._route(log),
            area=area,
            actors=self._actors(ego, centre),
            vehicle=vehicle,
            speed_limit_mps=max(float(np.abs(log[:, 3]).max()) * 1.05, 5.0),
            markings=self.markings,
        )

    def _actors(self, ego: Track, centre: Float) -> Actors:
        """The others on the ego's grid; of more than `MAX_ACTORS`, those that come nearest."""
        steps = len(centre) + TRAFFIC_AFTER_LOG
        rows: list[tuple[float, int, Track, int, Float]] = []
        for track in self.tracks:
            first, states = track.on_grid(int(ego.times_us[0]), steps)
            if track is not ego and len(states):
                own = centre[np.minimum(np.arange(first, first + len(states)), len(centre) - 1)]
                nearest = float(np.hypot(*(states[:, :2] - own[:, :2]).T).min())
                rows.append((nearest, len(rows), track, first, states))
        rows = sorted(sorted(rows, key=lambda row: row[:2])[:MAX_ACTORS], key=lambda row: row[1])
        if not rows:
            return Actors.none()
        tracks = np.zeros((len(rows), steps, 4))
        for row, (_, _, _, first, states) in zip(tracks, rows, strict=True):
            row[first : first + len(states)] = states
        return Actors(
            tracks,
            np.array([first for _, _, _, first, _ in rows], np.int64),
            np.array([first + len(states) - 1 for _, _, _, first, states in rows], np.int64),
            np.array([(track.length_m, track.width_m) for _, _, track, _, _ in rows]),
            np.array([track.kind for _, _, track, _, _ in rows], np.int64),
        )

    def _route(self, log: Float) -> Float:
        """[P,2] m: the driven path from `ROUTE_BEHIND_M` before its start to `ROUTE_AHEAD_M` beyond its end.

        Evenly spaced by about 1 m and smoothed, so that the noise of recorded positions does not fold it.
        """
        path = thin(log[:, :2], 0.5)
        start, end = (_unit(path[min(4, len(path) - 1)] - path[0]), _unit(path[-1] - path[max(len(path) - 5, 0)]))
        parts = [path[:1] - ROUTE_BEHIND_M * start, path, self._ahead(path[-1], end)]
        points = thin(np.concatenate(parts), 0.3)
        points = along_line(points, int(arc_lengths(points)[-1]) + 1)
        for _ in range(6):
            points[1:-1] = 0.25 * points[:-2] + 0.5 * points[1:-1] + 0.25 * points[2:]
        return thin(points, 0.5)

    def _ahead(self, point: Float, direction: Float) -> Float:
        """Where a drive goes on: along lane centres, easing onto them over 20 m; straight on where no lane is."""
        here, best = None, np.inf
        for lanelet in self.lanelets.values():
            if len(lanelet.centre) < 2 or shapely.distance(lanelet.polygon, shapely.Point(point)) > 0.5:
                continue
            foot, rest = _foot(lanelet.centre, point)
            cosine = float(_unit(rest[0] - foot) @ direction)
            cost = float(np.arccos(np.clip(cosine, -1.0, 1.0)) + np.hypot(*(point - foot)) / 3.0)
            if cosine > 0.5 and cost < best:
                here, best = lanelet, cost
        if here is None:
            return point + direction * np.arange(1.0, ROUTE_AHEAD_M)[:, None]
        foot, rest = _foot(here.centre, point)
        pieces, heading = [foot[None], rest], _unit(here.centre[-1] - here.centre[max(len(here.centre) - 3, 0)])
        # Bounded, because lanelets of no length may follow each other in a ring.
        for _ in range(200):
            line = np.concatenate(pieces)
            following = [self.lanelets[s] for s in here.successors if s in self.lanelets]
            following = [lanelet for lanelet in following if len(lanelet.centre) > 1]
            if arc_lengths(line)[-1] > ROUTE_AHEAD_M or not following:
                break
            here = max(following, key=lambda lanelet: float(_entry(lanelet.centre) @ heading))
            pieces.append(here.centre)
            heading = _unit(here.centre[-1] - here.centre[max(len(here.centre) - 3, 0)])
        line = thin(np.concatenate([*pieces, pieces[-1][-1:] + heading * ROUTE_AHEAD_M]), 0.1)
        lengths = arc_lengths(line)
        wanted = np.arange(1.0, ROUTE_AHEAD_M)
        centre = np.column_stack([np.interp(wanted, lengths, line[:, axis]) for axis in range(2)])
        return centre + np.maximum(1.0 - wanted / 20.0, 0.0)[:, None] * (point - foot)


def _boxes(states: Float, track: Track) -> Float:
    size = np.broadcast_to([track.length_m, track.width_m], (len(states), 2))
    return np.concatenate([states[:, :3], size], axis=1)


def _unit(vector: Float) -> Float:
    return vector / max(float(np.hypot(*vector)), 1e-9)


def _recording(ego: Track) -> tuple[Float, Float]:
    """The ego's drive as poses of its rig (rear axle) and of its box's centre, each [K,4] on the grid."""
    centre = ego.own_grid()
    offset = Vehicle.of_size(ego.length_m, ego.width_m).centre_offset_m

    def moved(states: Float, by_m: float) -> Float:
        out = states.copy()
        out[:, 0] += by_m * np.cos(states[:, 2])
        out[:, 1] += by_m * np.sin(states[:, 2])
        return out

    log = _drivable(moved(centre, -offset))
    return log, moved(log, offset)


def _drivable(log: Float) -> Float:
    """A recording [K,4] that a car can have driven: smoothed just enough, or as it is.

    Positions of video recordings jump by decimetres (NGSIM: implied accelerations above 30 m/s2), and no vehicle
    follows them. Local parabolas over ever wider windows replace such a log until no sample needs more acceleration,
    along or across, than tyres give; then the rear axle moves where it points, and never backwards.
    Source: the noise of NGSIM trajectories, Punzo, Borzacchiello, Ciuffo 2011, doi:10.1016/j.trc.2010.12.007.
    """
    smooth = log
    for half in SMOOTHING_HALF_WINDOWS:
        if _hardest(smooth) < ACCELERATION_MAX_MPS2:
            return smooth
        smooth = _rolling(_parabolas(log, half))
    return smooth


def _hardest(log: Float) -> float:
    """The largest acceleration m/s2 that a log needs, of its positions, its speeds and its turns."""
    step_s = STEP_US * 1e-6
    jolt = np.linalg.norm(np.diff(log[:, :2], n=2, axis=0), axis=1) / step_s**2
    change = np.abs(np.diff(log[:, 3])) / step_s
    turn = np.abs(np.diff(log[:, 2])) / step_s * log[1:, 3]
    # A bend tighter than the steering's lock counts as beyond all tyres; creeping headings are noise.
    bend = np.abs(np.diff(log[:, 2])) / np.maximum(log[1:, 3] * step_s, 0.1)
    if bend.max(initial=0.0) > BEND_MAX_PM:
        return np.inf
    return float(max(jolt.max(initial=0.0), change.max(initial=0.0), turn.max(initial=0.0)))


def _parabolas(log: Float, half: int) -> Float:
    """Each sample of x, y and yaw on the parabola through its 2·half + 1 nearest."""
    count = len(log)
    width = min(2 * half + 1, count)
    out = log.copy()
    for k in range(count):
        first = min(max(k - half, 0), count - width)
        time_s = (np.arange(first, first + width) - k) * STEP_US * 1e-6
        out[k, :3] = np.polyfit(time_s, log[first : first + width, :3], 2)[2]
    return out


def _rolling(log: Float) -> Float:
    """The same path with steps that only go forward, headings along it and the speed of the steps."""
    step = np.diff(log[:, :2], axis=0)
    ahead = np.stack([np.cos(log[:-1, 2]), np.sin(log[:-1, 2])], axis=1)
    step = np.where(np.sum(step * ahead, axis=1, keepdims=True) > 0.0, step, 0.0)
    out = log.copy()
    out[1:, :2] = log[0, :2] + np.cumsum(step, axis=0)
    length = np.hypot(step[:, 0], step[:, 1])
    speed = length / (STEP_US * 1e-6)
    out[:, 3] = np.concatenate([speed[:1], (speed[1:] + speed[:-1]) / 2.0, speed[-1:]])
    moving = np.flatnonzero(length > 0.05)
    if len(moving):
        heading = np.unwrap(np.arctan2(step[moving, 1], step[moving, 0]))
        out[:, 2] = np.interp(np.arange(len(log)), moving + 0.5, heading)
        out[:, 2] += 2.0 * np.pi * np.round((log[0, 2] - out[0, 2]) / (2.0 * np.pi))
    return out


def _entry(centre: Float) -> Float:
    """Unit direction from a centre line's start to its point 15 m on."""
    return _unit(centre[min(int(np.searchsorted(arc_lengths(centre), 15.0)), len(centre) - 1)] - centre[0])


def _foot(line: Float, point: Float) -> tuple[Float, Float]:
    """The nearest point of a polyline, and the line's points after it (at least one)."""
    start, delta = line[:-1], np.diff(line, axis=0)
    t = np.clip(np.sum((point - start) * delta, axis=1) / np.sum(delta * delta, axis=1), 0.0, 1.0)
    feet = start + t[:, None] * delta
    k = int(np.argmin(np.sum((feet - point) ** 2, axis=1)))
    foot = feet[k]
    rest = line[k + 1 :]
    # At the very end the direction is that of the last segment.
    return foot, rest if np.hypot(*(rest[-1] - foot)) > 1e-6 else foot + delta[k][None]


# ---------------------------------------------------------------- a file or a folder


class CommonRoadScenes:
    """The scenes of one CommonRoad file or of all `*.xml` in a folder, each file parsed once.

    Attributes:
        ids: `<file stem>.ego-<obstacle id>`, files by name, in a file the longest drive first.
        skipped: the files of a folder that cannot be used, with reasons; a single bad file raises instead.
        dropped: obstacles left out of files that are used.

    Raises:
        SceneError: the path does not exist or no file in it can be used; the message names file, place and reason.

    """

    def __init__(self, path: Path) -> None:
        files = sorted(path.glob("*.xml")) if path.is_dir() else [path]
        if not files:
            raise SceneError(f"{path}: no *.xml in this folder")
        self._files: list[tuple[str, ...]] = []
        self._found: dict[str, tuple[_Recording, Track]] = {}
        skipped: list[Skipped] = []
        dropped: list[Skipped] = []
        for file in files:
            try:
                self._add(file, dropped)
            except SceneError as err:
                if not path.is_dir():
                    raise SceneError(f"{file}: {err}") from err
                skipped.append(Skipped(file.name, str(err)))
        if not self._found:
            reasons = "; ".join(f"{bad.file}: {bad.reason}" for bad in skipped[:5])
            raise SceneError(f"{path}: none of {len(skipped)} files can be used: {reasons}")
        self.ids = tuple(self._found)
        self.skipped = tuple(skipped)
        self.dropped = tuple(dropped)

    def _add(self, file: Path, dropped: list[Skipped]) -> None:
        try:
            recording = _Recording(file)
        except shapely.errors.GEOSException as err:
            raise SceneError(f"the lanelets' shapes cannot be used: {err}") from err
        stem = re.sub(r"[^A-Za-z0-9._-]", "_", file.stem)
        found = {f"{stem}.ego-{name}": (recording, ego) for name, ego in recording.egos.items()}
        if not self._found.keys().isdisjoint(found):
            raise SceneError(f"its scene ids, {next(iter(found))!r} first, are those of another file; rename one")
        self._found.update(found)
        self._files.append(tuple(found))
        dropped += [Skipped(file.name, reason) for reason in recording.dropped]

    def split(self, name: str) -> tuple[str, ...]:
        """Scene ids of "train", "val" or "test", dealt by file (`splits.deal`)."""
        return deal(self._files, name)

    def load(self, scene_id: str) -> Scene:
        """One scene of `ids`; the same every time."""
        if scene_id not in self._found:
            raise SceneError(f"no scene {scene_id!r}; there are {len(self.ids)}, {self.ids[0]!r} first")
        recording, ego = self._found[scene_id]
        try:
            return recording.scene(scene_id, ego)
        except (ValueError, shapely.errors.GEOSException) as err:
            raise SceneError(f"scene {scene_id!r}: {err}") from err
