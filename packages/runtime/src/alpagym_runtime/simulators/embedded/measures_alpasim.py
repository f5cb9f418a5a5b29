"""AlpaSim's own measures, computed from what an episode recorded when it ends; never under the names of ours.

Definitions and their peculiarities are AlpaSim's (docs/concepts.md): boxes 2 % smaller with rounded corners, touching
counts as contact, points are box centres, progress is a share of the *whole* recording, and the first two logged poses
(the recording's first, and the first tick's) get made-up values. What differs: a series holds the samples from the
handover on, one a reported pose; the path driven in warm-up still counts for the distance travelled.

Not here: what needs pictures (img_is_black), a driver's debug output (safety_monitor_triggered) or several candidate
plans (min_ade takes the one plan as its only candidate).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import shapely
from numpy.typing import NDArray

from alpagym_runtime.geometry import Area, rig_to_local, wrap_angle
from alpagym_runtime.simulators.embedded.lane_map import Lane, LaneMap
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
    """A record with what several measures share; arrays are by sample, M of them.

    Geometry is asked for all samples at once, and boxes are drawn only where they can matter: 0.33 ms a sample, where a
    loop over samples takes 0.87.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self.times = np.array([sample.time_us for sample in record.samples], np.int64)
        # Whatever AlpaSim logs: before the handover too.
        self.logged = np.array([*record.logged, *self.times.tolist()], np.int64)
        self.centres_logged = self._centres(np.array([record.ego[time] for time in self.logged.tolist()]))
        self.centres = self.centres_logged[len(record.logged) :]
        self.gt = self._centres(record.log)
        gt_us = STEP_US * np.arange(len(self.gt))
        # After the recording's end its last place.
        self.gt_logged = np.stack([np.interp(self.logged, gt_us, self.gt[:, k]) for k in range(2)], axis=1)
        self.in_recording = self.logged <= gt_us[-1]

    def _centres(self, rig: Float) -> Float:
        """Box centres [...,3] of rig poses [...,3]."""
        offset = np.array([self.record.centre_offset_m, 0.0])
        return np.concatenate([rig_to_local(offset, rig), rig[..., 2:]], axis=-1)

    # ------------------------------------------------------------ boxes

    def _drawn(self, centres: Float) -> NDArray[Any]:
        """The ego's boxes at [N,3]."""
        return rounded_boxes(centres, np.tile(self.record.size, (len(centres), 1)))

    @cached_property
    def boxes(self) -> NDArray[Any]:
        return self._drawn(self.centres)

    def _reach(self, sizes: Float) -> Float:
        """How far from the ego's centre the centres of boxes [N,2] are at most if they touch it."""
        return (np.hypot(*self.record.size) + np.hypot(sizes[:, 0], sizes[:, 1])) / 2.0

    @cached_property
    def closest(self) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Of everybody at each sample, those who may be nearest to the ego: samples [N], rising, and boxes [N]."""
        samples = self.record.samples
        poses = np.concatenate([sample.poses for sample in samples])
        sizes = np.concatenate([sample.sizes for sample in samples])
        at = np.repeat(np.arange(len(samples)), [len(sample.poses) for sample in samples])
        apart = np.hypot(poses[:, 0] - self.centres[at, 0], poses[:, 1] - self.centres[at, 1])
        # A gap is no longer than the way between the centres, and no shorter than that less the reach.
        bound = np.full(len(samples), np.inf)
        np.minimum.at(bound, at, apart)
        may = apart - self._reach(sizes) <= bound[at]
        return at[may], rounded_boxes(poses[may], sizes[may])

    @cached_property
    def contacts(self) -> Float:
        """[M,3] front, rear, lateral as 0 or 1; of several contacts the last one that a tree finds decides."""
        at, boxes = self.closest
        meets = shapely.intersects(self.boxes[at], boxes)
        out = np.zeros((len(self.boxes), 3))
        for m in np.unique(at[meets]).tolist():
            ego, sample = self.boxes[m], self.record.samples[m]
            touched = boxes[meets & (at == m)]
            if len(touched) > 1:
                others = rounded_boxes(sample.poses, sample.sizes)
                touched = others[[i - 1 for i in shapely.STRtree([ego, *others]).query(ego, "intersects") if i]]
            front, rear = _bumpers(self.centres[m], self.record.size, ego)
            out[m, 0 if touched[-1].intersects(front) else 1 if touched[-1].intersects(rear) else 2] = 1.0
        return out

    # ------------------------------------------------------------ the recording

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

    # ------------------------------------------------------------ lanes

    @cached_property
    def lanes(self) -> list[Lane]:
        """Those that a car may drive on; none without a map."""
        lane_map = self.record.lane_map
        return [] if lane_map is None else [lane for lane in lane_map.lanes if lane.kind in ("driving", "turn")]

    @cached_property
    def nearby(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any], NDArray[Any]]:
        """Lanes within 6 m of the ego's centre: samples [N], rising, numbers [N], centre lines [N] and polygons [N]."""
        lines = np.array([shapely.LineString(lane.centre) for lane in self.lanes], object)
        points = self.points[len(self.record.logged) :]
        at, number = shapely.STRtree(lines).query(points, predicate="dwithin", distance=NEARBY_LANE_M)
        order = np.lexsort((number, at))
        at, number = at[order], number[order]
        polygons = np.empty(len(lines), object)
        used = np.unique(number)
        widths = np.array([self.lanes[lane].width_m for lane in used.tolist()])
        polygons[used] = shapely.buffer(lines[used], widths / 2.0, quad_segs=QUARTER_SEGMENTS, cap_style="flat")
        return at, number, lines[number], polygons[number]

    @cached_property
    def unions(self) -> list[tuple[Any, Any, int]]:
        """The nearby lanes of each sample as one geometry, its border, and how many they are."""
        at, number, _, polygons = self.nearby
        made: dict[bytes, tuple[Any, Any, int]] = {}
        out = []
        for m in range(len(self.boxes)):
            first, last = np.searchsorted(at, [m, m + 1]).tolist()
            key = number[first:last].tobytes()
            if key not in made:
                union = shapely.union_all(polygons[first:last])
                shapely.prepare(union)
                made[key] = union, union.boundary, last - first
            out.append(made[key])
        return out

    @cached_property
    def inside(self) -> NDArray[np.bool_]:
        """[M] one lane holds the box or all nearby do; in a scene without lanes the drivable area does."""
        if not self.lanes:
            whole = _area_polygon(self.record.area)
            shapely.prepare(whole)
            return np.asarray(shapely.contains(whole, self.boxes))
        at, _, _, polygons = self.nearby
        out = np.zeros(len(self.boxes), bool)
        out[at[shapely.contains(polygons, self.boxes[at])]] = True
        for m in np.flatnonzero(~out).tolist():
            union, _, count = self.unions[m]
            out[m] = count > 1 and shapely.contains(union, self.boxes[m])
        return out

    @cached_property
    def offroad(self) -> Float:
        out = np.zeros(len(self.boxes))
        outside = np.flatnonzero(~self.inside)
        if len(outside):
            edges = np.array([shapely.LinearRing(ring) for ring in self.record.area.rings()], object)
            apart = shapely.distance(edges[:, None], self.points[len(self.record.logged) :][outside])
            out[outside] = shapely.distance(edges[apart.argmin(axis=0)], self.boxes[outside]) < EDGE_M
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
        if not self.lanes:
            return np.full(len(self.boxes), np.nan)
        at, _, lines, polygons = self.nearby
        points = self.points[len(self.record.logged) :]
        holds = shapely.contains(polygons, points[at])
        at, lines = at[holds], lines[holds]
        along, length = shapely.line_locate_point(lines, points[at]), shapely.length(lines)
        ahead = shapely.line_interpolate_point(lines, np.minimum(along + 0.01, length))
        behind = shapely.line_interpolate_point(lines, np.maximum(along - 0.01, 0.0))
        x, y = shapely.get_x(ahead) - shapely.get_x(behind), shapely.get_y(ahead) - shapely.get_y(behind)
        out = np.zeros(len(self.boxes))
        # The difference is not wrapped, as in AlpaSim.
        out[at[np.abs(np.arctan2(y, x) - wrap_angle(self.centres[at, 2])) > WRONG_WAY_RAD]] = 1.0
        return out

    def min_distance_to_lane_boundary_m(self) -> Float:
        if not self.lanes:
            return np.full(len(self.boxes), np.nan)
        unions, borders = (np.array([one[k] for one in self.unions], object) for k in range(2))
        return np.where(shapely.contains(unions, self.boxes), shapely.distance(borders, self.boxes), 0.0)

    def min_distance_to_obstacle_m(self) -> Float:
        at, boxes = self.closest
        out = np.full(len(self.boxes), np.inf)
        np.minimum.at(out, at, shapely.distance(self.boxes[at], boxes))
        return out

    def open_loop_collision(self) -> Float:
        made, centres = self.plans
        plan_us = made[:, None] + self._plan_us
        counted = (plan_us <= made[:, None] + FORESIGHT_US) & (plan_us <= self.times[-1])
        counted[:, 0] = False
        counted &= np.isin(made, self.times)[:, None]
        plan, step = counted.nonzero()
        times = plan_us[plan, step]
        pairs: list[tuple[NDArray[np.int64], Float, Float]] = []
        for time in np.unique(times):
            here = np.flatnonzero(times == time)
            ego = centres[plan[here], step[here]]
            poses, sizes = self._others_at(int(time))
            apart = np.hypot(ego[:, None, 0] - poses[:, 0], ego[:, None, 1] - poses[:, 1])
            who, other = (apart <= self._reach(sizes)).nonzero()
            pairs.append((here[who], poses[other], sizes[other]))
        out = np.full(len(self.boxes), np.nan)
        out[np.isin(self.times, made)] = 0.0
        if pairs:
            who, poses, sizes = (np.concatenate(part) for part in zip(*pairs, strict=True))
            meets = shapely.intersects(self._drawn(centres[plan[who], step[who]]), rounded_boxes(poses, sizes))
            out[np.searchsorted(self.times, made[plan[who[meets]]])] = 1.0
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
        made, centres = self.plans
        gaps = np.diff(made)
        for gap in np.unique(gaps).tolist():
            now = np.flatnonzero(gaps == gap) + 1
            now = now[np.isin(made[now], self.times)]
            # The previous plan begins with the pose at which it was made, this one after it.
            both = 1 + np.flatnonzero(self._plan_us[1:] + gap <= self._plan_us[-1])
            if not len(both) or not len(now):
                continue
            then = _between(self._plan_us, centres[now - 1, :, :2], self._plan_us[both] + gap)
            apart = np.linalg.norm(centres[now][:, both, :2] - then, axis=2)
            weights = np.exp(-DEVIATION_DECAY * np.arange(len(both)))
            out[np.searchsorted(self.times, made[now])] = np.average(apart, axis=1, weights=weights)
        return out

    def min_ade(self, seconds: float) -> Float:
        """The one plan's mean distance to the recording from the next tick to `seconds` from now."""
        out = np.full(len(self.times), np.nan)
        made, centres = self.plans
        ahead_us = np.arange(self.record.period_us, round(seconds * 1e6) + 1, STEP_US)
        if not len(ahead_us) or ahead_us[-1] > self._plan_us[-1]:
            return out
        # Decisions are made on the grid.
        at = (made[:, None] + ahead_us) // STEP_US
        known = np.flatnonzero(np.isin(made, self.times) & (at[:, -1] < len(self.gt)))
        here = _between(self._plan_us, centres[known, :, :2], ahead_us)
        apart = np.linalg.norm(here - self.gt[at[known], :2], axis=2).mean(axis=1)
        out[np.searchsorted(self.times, made[known])] = apart
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

    # ------------------------------------------------------------ plans

    @cached_property
    def plans(self) -> tuple[NDArray[np.int64], Float]:
        """When plans were made, us [P], rising, and their box centres [P,T+1,3], the pose at that time first."""
        plans = self.record.plans
        if not plans:
            return np.zeros(0, np.int64), np.zeros((0, 1, 3))
        made, first = np.unique(np.array([time for time, *_ in plans], np.int64), return_index=True)
        poses = np.array([plans[k][1] for k in first]).reshape(-1, 1, 3)
        plan = np.array([plans[k][2] for k in first]).reshape(len(first), -1, 3)
        there = np.concatenate([rig_to_local(plan[..., :2], poses), plan[..., 2:] + poses[..., 2:]], axis=2)
        return made, self._centres(np.concatenate([poses, there], axis=1))

    @cached_property
    def _plan_us(self) -> NDArray[np.int64]:
        """[T+1] times of a plan's poses after it was made."""
        return self.record.plan_step_us * np.arange(self.plans[1].shape[1])

    def _others_at(self, time_us: int) -> tuple[Float, Float]:
        """Poses and sizes of who is there at a time; between two samples, of those in both, between their poses."""
        k = int(np.searchsorted(self.times, time_us, side="right")) - 1
        before, after = self.record.samples[k], self.record.samples[min(k + 1, len(self.times) - 1)]
        if after.time_us == before.time_us or time_us == before.time_us:
            return before.poses, before.sizes
        part = (time_us - before.time_us) / (after.time_us - before.time_us)
        _, rows, poses = others_between((before.ids, before.poses), (after.ids, after.poses), part)
        return poses, before.sizes[rows]


def _between(known_us: NDArray[np.int64], values: Float, at_us: NDArray[np.int64]) -> Float:
    """[N,Q,C]: values [N,K,C] at K known times, linearly between them at Q times within."""
    k = np.clip(np.searchsorted(known_us, at_us, side="right") - 1, 0, len(known_us) - 2)
    part = ((at_us - known_us[k]) / (known_us[k + 1] - known_us[k]))[:, None]
    return values[:, k] + part * (values[:, k + 1] - values[:, k])


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
