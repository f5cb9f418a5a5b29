"""AlpaSim's own measures, computed from what an episode recorded when it ends; never under the names of ours.

Definitions and their peculiarities are AlpaSim's (docs/concepts.md): boxes 2 % smaller with rounded corners, touching
counts as contact, points are box centres, progress is a share of the *whole* recording, and the first two logged poses
(the recording's first, and the first tick's) get made-up values. What differs: a series holds the samples from the
handover on, one a reported pose; the path driven in warm-up still counts for the distance travelled.

Not here: what needs pictures (img_is_black), a driver's debug output (safety_monitor_triggered) or several candidate
plans (min_ade takes the one plan as its only candidate).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import shapely
from numpy.typing import NDArray

from alpagym_runtime.geometry import Area, rig_to_local, wrap_angle
from alpagym_runtime.simulators.embedded.lane_map import LaneMap
from alpagym_runtime.simulators.embedded.reported_poses import others_between
from alpagym_runtime.simulators.embedded.scene import STEP_US
from alpagym_runtime.simulators.embedded.stranded import STRANDED
from alpagym_runtime.types import MeasureSeries

Float = NDArray[np.float64]

PREFIX = "alpasim/"
ADE_S = (0.5, 1.0, 2.5, 5.0)

AGGREGATION: dict[str, Literal["last", "max", "mean", "min"]] = {
    "collision_front": "max",
    "collision_rear": "max",
    "collision_lateral": "max",
    "collision_any": "max",
    "collision_at_fault": "max",
    "offroad": "max",
    "wrong_lane": "max",
    "min_distance_to_lane_boundary_m": "min",
    "min_distance_to_obstacle_m": "min",
    "open_loop_collision": "mean",
    "progress": "last",
    "progress_rel": "min",
    "progress_rel_to_total": "last",
    "dist_to_gt_trajectory": "max",
    "dist_to_gt_location": "max",
    "dist_traveled_m": "last",
    "gt_dist_traveled_m": "last",
    "plan_deviation": "mean",
    **{f"min_ade@{seconds}s(gt)": "mean" for seconds in ADE_S},
    "scene_score": "last",
}
"""By AlpaSim's name; ours is the same behind `PREFIX`."""

NAMES = tuple(PREFIX + name for name in AGGREGATION)

SHRINK = 0.02
ROUNDNESS = 0.5
QUARTER_SEGMENTS = 16
NEARBY_LANE_M = 6.0
EDGE_M = 1e-3
WRONG_WAY_RAD = 2.0 * math.pi / 3.0
FORESIGHT_US = 3_000_000
DEVIATION_DECAY = 0.1
LEFT_GT_M = 4.0
SHORT_GT_M = 5.0
FULL_SCORE_PROGRESS = 0.8


class MeasuresOnDemand(dict[str, Literal["tick", "end"]]):
    """A simulator's measures, to which those of AlpaSim's family and `STRANDED` join when somebody asks for them.

    They cost more than a tick, so only those that a reward term or the config names are computed.
    """

    def __contains__(self, name: object) -> bool:
        if (name in NAMES or name == STRANDED) and not super().__contains__(name):
            self[str(name)] = "end"
        return super().__contains__(name)


@dataclass
class Sample:
    """The world at one time: [A,3] box centres x, y, yaw with [A,2] sizes of who is there by [A] id."""

    time_us: int
    ids: NDArray[np.int64]
    poses: Float
    sizes: Float


@dataclass
class Record:
    """What one episode leaves for these measures.

    Attributes:
        log: [K,3] rig x, y, yaw of the recorded drive, by grid index.
        area: the drivable area.
        lane_map: lanes, if the scene has them.
        size: length and width of the ego, m.
        centre_offset_m: from its rig origin forward to its box's centre.
        plan_step_us: time between a plan's points.
        period_us: control period.
        logged: times us that AlpaSim would have logged before the handover: the log's start and warm-up ticks.
        samples: from the handover on, one a reported pose.
        ego: [3] rig poses by time us, of `logged` and `samples`.
        plans: time us, rig pose [3] and plan_rig [T,3] of every decision, warm-up included.

    """

    log: Float
    area: Area
    lane_map: LaneMap | None
    size: tuple[float, float]
    centre_offset_m: float
    plan_step_us: int
    period_us: int
    logged: list[int] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    ego: dict[int, Float] = field(default_factory=dict)
    plans: list[tuple[int, Float, Float]] = field(default_factory=list)


def rounded_boxes(poses: Float, sizes: Float) -> NDArray[Any]:
    """[N] polygons of boxes [N,3] (centre x, y, yaw) with sizes [N,2]: 2 % smaller, corners rounded."""
    length, width = sizes[:, 0] * (1.0 - SHRINK), sizes[:, 1] * (1.0 - SHRINK)
    radius = ROUNDNESS * np.minimum(length, width) / 2.0
    return shapely.buffer(
        _boxes(poses, length - 2.0 * radius, width - 2.0 * radius), radius, quad_segs=QUARTER_SEGMENTS
    )


def _corners(poses: Float, length: Float, width: Float) -> Float:
    """[N,4,2]: front left, front right, rear right, rear left."""
    x = np.stack([length, length, -length, -length], axis=1) / 2.0
    y = np.stack([width, -width, -width, width], axis=1) / 2.0
    return rig_to_local(np.stack([x, y], axis=2), poses[:, None, :])


def _boxes(poses: Float, length: Float, width: Float) -> NDArray[Any]:
    return shapely.polygons(_corners(poses, length, width))


def _bumpers(pose: Float, size: tuple[float, float], polygon: Any) -> tuple[Any, Any]:
    """Front and rear: the parts of the rounded box within its corner radius of the square box's ends."""
    length, width = np.array([size[0]]) * (1.0 - SHRINK), np.array([size[1]]) * (1.0 - SHRINK)
    corners = _corners(pose[None], length, width)[0]
    radius = float(ROUNDNESS * min(length[0], width[0]) / 2.0)
    lines = [shapely.LineString(corners[:2]), shapely.LineString(corners[2:])]
    front, rear = (shapely.intersection(line.buffer(radius, quad_segs=QUARTER_SEGMENTS), polygon) for line in lines)
    return front, rear


class _Episode:
    """A record with what several measures share; arrays are by sample, M of them."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.times = np.array([sample.time_us for sample in record.samples], np.int64)
        # Whatever AlpaSim logs: before the handover too.
        self.logged = np.array([*record.logged, *self.times.tolist()], np.int64)
        self.centres_logged = self._centres(np.array([record.ego[time] for time in self.logged.tolist()]))
        self.centres = self.centres_logged[len(record.logged) :]
        self.gt = self._centres(record.log)
        self._reached: dict[int, tuple[Float, Float, Float]] = {}
        gt_us = STEP_US * np.arange(len(self.gt))
        # After the recording's end its last place.
        self.gt_logged = np.stack([np.interp(self.logged, gt_us, self.gt[:, k]) for k in range(2)], axis=1)
        self.in_recording = self.logged <= gt_us[-1]

    def _centres(self, rig: Float) -> Float:
        offset = np.array([self.record.centre_offset_m, 0.0])
        return np.column_stack([rig_to_local(np.broadcast_to(offset, (len(rig), 2)), rig), rig[:, 2]])

    @cached_property
    def boxes(self) -> NDArray[Any]:
        return rounded_boxes(self.centres, np.tile(self.record.size, (len(self.centres), 1)))

    @cached_property
    def others(self) -> list[NDArray[Any]]:
        return [rounded_boxes(sample.poses, sample.sizes) for sample in self.record.samples]

    @cached_property
    def contacts(self) -> Float:
        """[M,3] front, rear, lateral as 0 or 1; of several contacts the last one that the tree finds decides."""
        out = np.zeros((len(self.boxes), 3))
        for m, (ego, others) in enumerate(zip(self.boxes, self.others, strict=True)):
            tree = shapely.STRtree([ego, *others])
            found = [i for i in tree.query(ego, predicate="intersects") if i != 0]
            if not found:
                continue
            other = others[found[-1] - 1]
            front, rear = _bumpers(self.centres[m], self.record.size, ego)
            out[m, 0 if other.intersects(front) else 1 if other.intersects(rear) else 2] = 1.0
        return out

    @cached_property
    def gt_line(self) -> Any:
        return shapely.LineString(self.gt[:, :2])

    @cached_property
    def points(self) -> NDArray[Any]:
        return shapely.points(self.centres_logged[:, :2])

    @cached_property
    def progress(self) -> Float:
        """[M] share of the whole recording; the first two logged values lie on the way from 0 to the third."""
        share = np.asarray(shapely.line_locate_point(self.gt_line, self.points, normalized=True), np.float64)
        if len(share) > 2:
            share[:2] = 0.0, share[2] / 2.0
        return self._sampled(share)

    @cached_property
    def distance_to_path(self) -> Float:
        return self._sampled(np.asarray(shapely.distance(self.gt_line, self.points)), 0.0)

    @cached_property
    def lanes(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Centre lines and polygons of the lanes that a car may drive on; empty without a map."""
        lane_map = self.record.lane_map
        chosen = [] if lane_map is None else [lane for lane in lane_map.lanes if lane.kind in ("driving", "turn")]
        lines = np.array([shapely.LineString(lane.centre) for lane in chosen], object)
        widths = np.array([lane.width_m for lane in chosen])
        return lines, shapely.buffer(
            lines, widths / 2.0, quad_segs=QUARTER_SEGMENTS, cap_style="flat"
        ) if chosen else lines

    @cached_property
    def nearby(self) -> list[NDArray[np.int64]]:
        """Indices of the lanes within 6 m of each sample's ego centre."""
        tree = shapely.STRtree(self.lanes[0])
        points = self.points[len(self.record.logged) :]
        return [np.sort(tree.query(point, predicate="dwithin", distance=NEARBY_LANE_M)) for point in points]

    @cached_property
    def offroad(self) -> Float:
        """[M]; in a scene without lanes the drivable area stands for the union of those nearby."""
        edges = np.array([shapely.LinearRing(ring) for ring in self.record.area.rings()], object)
        everything = None if len(self.lanes[0]) else _area_polygon(self.record.area)
        out = np.zeros(len(self.boxes))
        for m, ego in enumerate(self.boxes):
            if everything is None:
                polygons = self.lanes[1][self.nearby[m]]
                inside = any(shapely.contains(polygons, ego)) or (
                    len(polygons) > 1 and shapely.contains(shapely.union_all(polygons), ego)
                )
            else:
                inside = everything.contains(ego)
            if not inside:
                nearest = edges[np.argmin(shapely.distance(edges, shapely.Point(self.centres[m, :2])))]
                out[m] = nearest.distance(ego) < EDGE_M
        return out

    def _sampled(self, logged: Float, made_up: float | None = None) -> Float:
        """The samples' part of logged values; the first two logged ones are replaced if `made_up` is given."""
        if made_up is not None:
            logged = logged.copy()
            logged[:2] = made_up
        return logged[len(self.record.logged) :]

    # ------------------------------------------------------------ one function a measure: values [M], valid [M]

    def collision_front(self) -> Float:
        return self.contacts[:, 0]

    def collision_rear(self) -> Float:
        return self.contacts[:, 1]

    def collision_lateral(self) -> Float:
        return self.contacts[:, 2]

    def collision_any(self) -> Float:
        return self.contacts.max(axis=1)

    def collision_at_fault(self) -> Float:
        return np.maximum(self.contacts[:, 0], self.contacts[:, 2])

    def wrong_lane(self) -> Float:
        if not len(self.lanes[0]):
            return np.full(len(self.boxes), np.nan)
        out = np.zeros(len(self.boxes))
        for m, near in enumerate(self.nearby):
            point = shapely.Point(self.centres[m, :2])
            yaw = float(wrap_angle(self.centres[m, 2]))
            for line in self.lanes[0][near][shapely.contains(self.lanes[1][near], point)]:
                along = line.project(point)
                ahead, behind = line.interpolate(min(along + 0.01, line.length)), line.interpolate(max(along - 0.01, 0))
                # The difference is not wrapped, as in AlpaSim.
                out[m] = max(out[m], abs(math.atan2(ahead.y - behind.y, ahead.x - behind.x) - yaw) > WRONG_WAY_RAD)
        return out

    def min_distance_to_lane_boundary_m(self) -> Float:
        if not len(self.lanes[0]):
            return np.full(len(self.boxes), np.nan)
        out = np.zeros(len(self.boxes))
        for m, (ego, near) in enumerate(zip(self.boxes, self.nearby, strict=True)):
            union = shapely.union_all(self.lanes[1][near])
            out[m] = union.boundary.distance(ego) if union.contains(ego) else 0.0
        return out

    def min_distance_to_obstacle_m(self) -> Float:
        pairs = zip(self.boxes, self.others, strict=True)
        return np.array([shapely.distance(ego, others).min() if len(others) else np.nan for ego, others in pairs])

    def open_loop_collision(self) -> Float:
        out = np.full(len(self.boxes), np.nan)
        for m, now in enumerate(self.times.tolist()):
            plan = self._plans.get(now)
            if plan is None:
                continue
            times, poses = plan
            counted = (times <= now + FORESIGHT_US) & (times <= self.times[-1])
            ego = self._centres(poses[counted])
            out[m] = any(self._meets(int(time), pose) for time, pose in zip(times[counted], ego, strict=True))
        return out

    def progress_rel(self) -> Float:
        along = np.ones(len(self.logged))
        at = self.gt_logged
        for k in range(2, len(self.logged)):
            line = shapely.LineString(at[: k + 1])
            along[k] = line.project(self.points[k], normalized=True) if line.length > 0.0 else 1.0
        return self._sampled(along)

    def progress_rel_to_total(self) -> Float:
        return self.progress

    def dist_to_gt_trajectory(self) -> Float:
        return self.distance_to_path

    def dist_to_gt_location(self) -> Float:
        apart = np.linalg.norm(self.centres_logged[:, :2] - self.gt_logged, axis=1)
        return self._sampled(np.where(self.in_recording, apart, np.nan), 0.0)

    def dist_traveled_m(self) -> Float:
        line = shapely.LineString(self.centres_logged[:, :2]) if len(self.logged) > 1 else None
        along = np.zeros(len(self.logged)) if line is None else shapely.line_locate_point(line, self.points)
        return self._sampled(np.asarray(along, np.float64), 0.0)

    def gt_dist_traveled_m(self) -> Float:
        return np.full(len(self.times), self.gt_line.length)

    def plan_deviation(self) -> Float:
        out = np.full(len(self.times), np.nan)
        plans = self.record.plans
        for before, (now, *_) in itertools.pairwise(plans):
            m = np.flatnonzero(self.times == now)
            plan, previous = self._plans.get(now), self._plans.get(before[0])
            if not len(m) or plan is None or previous is None:
                continue
            times, here = plan[0], self._centres(plan[1])[:, :2]
            # The previous plan begins with the pose at which it was made.
            known = np.concatenate([[before[0]], previous[0]])
            there = self._centres(np.concatenate([before[1][None], previous[1]]))[:, :2]
            both = times <= known[-1]
            then = np.stack([np.interp(times[both], known, there[:, k]) for k in range(2)], axis=1)
            weights = np.exp(-DEVIATION_DECAY * np.arange(both.sum()))
            if len(weights):
                out[m[0]] = np.average(np.linalg.norm(here[both] - then, axis=1), weights=weights)
        return out

    def min_ade(self, seconds: float) -> Float:
        """The one plan's mean distance to the recording from the next tick to `seconds` from now."""
        out = np.full(len(self.times), np.nan)
        for m, now in enumerate(self.times.tolist()):
            plan = self._plans.get(now)
            # Decisions are made on the grid.
            at = np.arange(now + self.record.period_us, now + round(seconds * 1e6) + 1, STEP_US) // STEP_US
            if plan is None or not len(at) or at[-1] >= len(self.gt) or at[-1] * STEP_US > plan[0][-1]:
                continue
            pose = self.record.ego[now]
            known = np.concatenate([[now], plan[0]])
            centres = self._centres(np.concatenate([pose[None], plan[1]]))
            here = np.stack([np.interp(at * STEP_US, known, centres[:, k]) for k in range(2)], axis=1)
            out[m] = np.linalg.norm(here - self.gt[at, :2], axis=1).mean()
        return out

    def scene_score(self) -> Float:
        """On the last sample only: AlpaSim's score of the rollout up to its first incident or to 4 m off the path."""
        incident = np.maximum(self.offroad, self.contacts.max(axis=1)) > 0.0
        kept = len(self.times)
        for stop in (incident, self.distance_to_path >= LEFT_GT_M):
            first = np.flatnonzero(stop[:kept])
            kept = int(first[0]) + 1 if len(first) else kept
        out = np.full(len(self.times), np.nan)
        length = self.gt_line.length
        if self.collision_at_fault()[:kept].any() or self.offroad[:kept].any():
            out[-1] = 0.0
        elif length < SHORT_GT_M:
            out[-1] = 1.0
        else:
            out[-1] = min(float(np.clip(self.progress[kept - 1], 0.0, 1.0)) / FULL_SCORE_PROGRESS, 1.0)
        return out

    @cached_property
    def _plans(self) -> dict[int, tuple[NDArray[np.int64], Float]]:
        """Times us [T] and rig poses [T,3] local of each plan, by the time us when it was made."""
        out: dict[int, tuple[NDArray[np.int64], Float]] = {}
        for made, pose, plan in self.record.plans:
            times = made + self.record.plan_step_us * np.arange(1, len(plan) + 1)
            local = np.column_stack([rig_to_local(plan[:, :2], pose), plan[:, 2] + pose[2]])
            out.setdefault(made, (times, local))
        return out

    def _meets(self, time_us: int, ego: Float) -> bool:
        """Whether the ego's box, centre x, y, yaw, would meet those that are there at that time."""
        if time_us not in self._reached:
            # Thirty plans ask for the same time.
            poses, sizes = self._others_at(time_us)
            reach = (np.hypot(*self.record.size) + np.hypot(sizes[:, 0], sizes[:, 1])) / 2.0
            self._reached[time_us] = poses, sizes, reach
        poses, sizes, reach = self._reached[time_us]
        # Boxes are drawn only for those that are near enough.
        near = np.hypot(poses[:, 0] - ego[0], poses[:, 1] - ego[1]) <= reach
        if not near.any():
            return False
        box = rounded_boxes(ego[None], np.array([self.record.size]))[0]
        return bool(shapely.intersects(box, rounded_boxes(poses[near], sizes[near])).any())

    def _others_at(self, time_us: int) -> tuple[Float, Float]:
        """Poses and sizes of who is there at a time; between two samples, of those in both, between their poses."""
        k = int(np.searchsorted(self.times, time_us, side="right")) - 1
        before, after = self.record.samples[k], self.record.samples[min(k + 1, len(self.times) - 1)]
        if after.time_us == before.time_us or time_us == before.time_us:
            return before.poses, before.sizes
        part = (time_us - before.time_us) / (after.time_us - before.time_us)
        _, rows, poses = others_between((before.ids, before.poses), (after.ids, after.poses), part)
        return poses, before.sizes[rows]


_EMPTY = (np.zeros(0, np.int64), np.zeros(0), np.zeros(0, bool))


def _area_polygon(area: Area) -> Any:
    """The area as one geometry: a ring inside another one is a hole."""
    rings = [shapely.Polygon(ring) for ring in area.rings()]
    out = shapely.Polygon()
    for ring in sorted(rings, key=lambda polygon: -polygon.area):
        out = out.symmetric_difference(ring)
    return out


def alpasim_measures(record: Record, names: Iterable[str]) -> dict[str, MeasureSeries]:
    """Series of the named measures (of `NAMES`), from the handover's sample on; undefined samples are invalid.

    An episode that was stopped in the warm-up has no sample, so its series are empty.
    """
    if not record.samples:
        return {name: MeasureSeries(*_EMPTY, AGGREGATION[name.removeprefix(PREFIX)]) for name in names}
    episode = _Episode(record)
    out = {}
    for name in names:
        plain = name.removeprefix(PREFIX)
        if plain.startswith("min_ade@"):
            value = episode.min_ade(float(plain[len("min_ade@") : plain.index("s(")]))
        else:
            found = getattr(episode, plain)
            value = found() if callable(found) else found
        valid = np.isfinite(value)
        out[name] = MeasureSeries(episode.times.copy(), np.where(valid, value, 0.0), valid, AGGREGATION[plain])
    return out
