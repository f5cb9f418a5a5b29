"""What CommonRoad XML files of the versions 2018b and 2020a hold: lanelets and the recorded motion of obstacles.

Numbers are read as the file has them: m, rad counter-clockwise from x, m/s, time in steps of `timeStepSize`; intervals
become their middles. Files come from strangers: entities, DTDs and the network stay closed, sizes are bounded, and a
wrong value is an error that names its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import shapely
from lxml import etree
from numpy.typing import NDArray

from alpagym_runtime.errors import SceneError
from alpagym_runtime.geometry import angle_difference, check_times, interpolate, interpolate_angle
from alpagym_runtime.simulators.embedded.scene import KINDS, STEP_US
from alpagym_runtime.simulators.embedded.scene_bank import arc_lengths

Float = NDArray[np.float64]

VERSIONS = ("2018b", "2020a")
FILE_BYTES_MAX = 200_000_000
LOG_S_MAX = 600.0
MAP_EXTENT_MAX_M = 100_000.0

_KIND_OF_TYPE = {
    **{"car": "car", "taxi": "car", "priorityVehicle": "car", "parkedVehicle": "car"},
    **{"truck": "truck", "train": "truck", "bus": "bus", "motorcycle": "motorcycle"},
    **{"bicycle": "bicycle", "pedestrian": "pedestrian"},
}
_EGO_TYPES = {"car", "taxi", "priorityVehicle", "truck", "bus", "motorcycle"}
_NOT_FOR_CARS = {"sidewalk", "crosswalk", "bicycleLane", "border", "restricted"}
_MOTOR_USERS = {"vehicle", "car", "truck", "bus", "priorityVehicle", "motorcycle", "taxi"}


@dataclass(frozen=True)
class Lanelet:
    """A piece of lane."""

    lanelet_id: str
    centre: Float  # [P,2] m, in driving direction
    left: Float  # [K,2] m, its left bound
    ring: Float  # [K,2] m, its outline
    polygon: Any  # the same as a valid shapely geometry
    successors: tuple[str, ...]
    for_cars: bool


@dataclass(frozen=True)
class Track:
    """The recorded motion of one obstacle."""

    obstacle_id: str
    kind: int
    can_be_ego: bool
    stands: bool  # a static obstacle: there all the time
    times_us: NDArray[np.int64]  # [K]
    states: Float  # [K,4] box centre x, y m, yaw rad (unwrapped), speed m/s
    length_m: float
    width_m: float

    def on_grid(self, start_us: int, steps: int) -> tuple[int, Float]:
        """First grid index of `start_us` + k·STEP_US, k < `steps`, at which it exists, and its states from there on."""
        if self.stands:
            return 0, np.repeat(self.states[:1], steps, axis=0)
        first = max(-((start_us - int(self.times_us[0])) // STEP_US), 0)
        last = min((int(self.times_us[-1]) - start_us) // STEP_US, steps - 1)
        if last < first:
            return first, np.zeros((0, 4))
        query = start_us + np.arange(first, last + 1) * STEP_US
        states = interpolate(self.times_us, self.states, query)
        states[:, 2] = np.unwrap(interpolate_angle(self.times_us, self.states[:, 2], query))
        return first, states

    def own_grid(self) -> Float:
        """[K,4] states at k·STEP_US from its first sample on."""
        return self.on_grid(int(self.times_us[0]), int(self.times_us[-1] - self.times_us[0]) // STEP_US + 1)[1]


def _at(element: Any) -> str:
    return f"line {element.sourceline} <{element.tag}>"


def _number(parent: Any, tag: str) -> float:
    """The number in a child, directly, as <exact> or as the middle of an interval."""
    element = parent.find(tag)
    if element is None:
        raise SceneError(f"{_at(parent)}: no <{tag}>")
    if element.find("intervalStart") is not None:
        return (_number(element, "intervalStart") + _number(element, "intervalEnd")) / 2.0
    if element.find("exact") is not None:
        return _number(element, "exact")
    try:
        value = float(element.text or "")
    except ValueError:
        raise SceneError(f"{_at(element)}: {element.text!r}, expected a number") from None
    if not abs(value) <= 1e9:
        raise SceneError(f"{_at(element)}: {value}, expected a finite number up to 1e9")
    return value


def _angle(state: Any) -> float:
    """An orientation, rad; NaN where there is none, or an interval of all directions."""
    element = state.find("orientation")
    if element is None:
        return np.nan
    if element.find("intervalStart") is None:
        return _number(state, "orientation")
    start, end = (_number(element, tag) for tag in ("intervalStart", "intervalEnd"))
    return np.nan if abs(end - start) >= 2.0 * np.pi - 1e-6 else start + np.mod(end - start, 2.0 * np.pi) / 2.0


def _point(element: Any) -> tuple[float, float]:
    return _number(element, "x"), _number(element, "y")


def _centre(shape: Any) -> tuple[float, float]:
    return _point(shape.find("center")) if shape.find("center") is not None else (0.0, 0.0)


def _points(element: Any, what: str, at_least: int) -> Float:
    points = [_point(p) for p in element.iterfind("point")] if element is not None else []
    if len(points) < at_least:
        raise SceneError(f"{what} has {len(points)} points, expected at least {at_least}")
    return np.array(points)


def corners(box: Float) -> Float:
    """[...,4,2] corners of boxes [...,5] (centre x, y, yaw, length, width), counter-clockwise."""
    forward = np.stack([np.cos(box[..., 2]), np.sin(box[..., 2])], axis=-1)[..., None, :]
    left = np.stack([-forward[..., 1], forward[..., 0]], axis=-1)
    along = np.array([1.0, 1.0, -1.0, -1.0])[:, None] * box[..., 3, None, None] / 2.0
    across = np.array([-1.0, 1.0, 1.0, -1.0])[:, None] * box[..., 4, None, None] / 2.0
    return box[..., None, :2] + along * forward + across * left


def _box(shape: Any, turned: bool) -> Float:
    """[5] centre x, y, yaw, length, width of one shape or several, in the shape's frame.

    Several shapes and polygons become their bounding box: along the frame's x axis, or `turned` to be the smallest.
    """
    boxes, points = [], []
    for part in shape if shape is not None else ():
        if part.tag == "rectangle":
            yaw = _number(part, "orientation") if part.find("orientation") is not None else 0.0
            boxes.append(np.array([*_centre(part), yaw, _number(part, "length"), _number(part, "width")]))
        elif part.tag == "circle":
            side = 2.0 * _number(part, "radius")
            boxes.append(np.array([*_centre(part), 0.0, side, side]))
        elif part.tag == "polygon":
            points.append(_points(part, _at(part), 3))
    if not boxes and not points:
        raise SceneError("no shape: expected a rectangle, a circle or a polygon")
    box = boxes[0] if len(boxes) == 1 and not points else None
    if box is None:
        cloud = np.concatenate([*(corners(b) for b in boxes), *points])
        low, high = cloud.min(axis=0), cloud.max(axis=0)
        box = np.array([*(low + high) / 2.0, 0.0, *(high - low)])
        rectangle = shapely.oriented_envelope(shapely.multipoints(cloud)) if turned else None
        if rectangle is not None and rectangle.geom_type == "Polygon":
            ring = np.asarray(rectangle.exterior.coords)
            sides = np.diff(ring[:3], axis=0)
            longer, shorter = sorted(sides, key=lambda side: -float(np.hypot(*side)))
            yaw = np.arctan2(longer[1], longer[0])
            box = np.array([*ring[:4].mean(axis=0), yaw, np.hypot(*longer), np.hypot(*shorter)])
    if not (box[3:] > 0.0).all():
        raise SceneError(f"line {shape.sourceline}: a shape of {box[3]:g} m x {box[4]:g} m has no area")
    return box


def _state(element: Any) -> tuple[float, float, float, float, float]:
    """Time in steps, x, y m, orientation rad and velocity m/s (NaN where absent) of one recorded state."""
    position = element.find("position")
    if position is None:
        raise SceneError(f"{_at(element)}: no <position>")
    point = position.find("point")
    x, y = _point(point) if point is not None else _box(position, False)[:2]
    speed = _number(element, "velocity") if element.find("velocity") is not None else np.nan
    return _number(element, "time"), float(x), float(y), _angle(element), speed


def _motion_states(times_us: NDArray[np.int64], xy: Float, yaw: Float, speed: Float) -> Float:
    """[K,4] states that agree with the recorded positions.

    The velocity comes from a parabola fitted to +-0.4 s of positions, three at least. Recorded speeds are taken unless
    they miss it by more than 1 m/s somewhere; recorded headings unless they miss its direction by more than 20 degrees
    at more than 2 m/s somewhere. Then the whole track takes the fitted ones, headings of slower samples interpolated.

    NGSIM needs this: its recorded speeds miss the driven distance by up to 5 m/s.
    """
    count = len(times_us)
    velocity = np.zeros((count, 2))
    times_s = (times_us - times_us[0]) * 1e-6
    for k in range(count if count > 1 else 0):
        near = np.abs(times_s - times_s[k]) <= 0.4 + 1e-9
        first = min(max(k - 1, 0), max(count - 3, 0))
        near[first : first + 3] = True
        t = times_s[near] - times_s[k]
        powers = np.stack([np.ones_like(t), t, t * t][: min(3, len(t))], axis=1)
        velocity[k] = np.linalg.lstsq(powers, xy[near], rcond=None)[0][1]
    fitted_speed = np.hypot(velocity[:, 0], velocity[:, 1])
    direction = np.arctan2(velocity[:, 1], velocity[:, 0])
    backwards = np.isfinite(speed) & (speed < 0.0)
    direction = np.where(backwards, direction + np.pi, direction)
    fast = fitted_speed > 2.0
    if not np.isfinite(yaw).all() or (np.abs(angle_difference(yaw, direction))[fast] > np.deg2rad(20.0)).any():
        moving = np.flatnonzero(fast if fast.any() else fitted_speed > 0.2)
        if len(moving):
            held = np.clip(times_us, times_us[moving[0]], times_us[moving[-1]])
            yaw = interpolate_angle(times_us[moving], direction[moving], held)
        else:
            yaw = np.where(np.isfinite(yaw), yaw, 0.0)
    along = velocity[:, 0] * np.cos(yaw) + velocity[:, 1] * np.sin(yaw)
    if not np.isfinite(speed).all() or (count > 2 and (np.abs(speed - along) > 1.0).any()):
        speed = along
    return np.column_stack([xy, np.unwrap(yaw), speed])


def _occupancies(element: Any, box: Float) -> list[tuple[float, float, float, float, float]] | None:
    """States from an occupancy set whose every shape is the obstacle's own box; None for sets of reachable places."""
    states = []
    for occupancy in element.iterfind("occupancy"):
        shape = occupancy.find("shape")
        if shape is None or len(shape) != 1 or shape[0].tag != "rectangle":
            return None
        x, y, yaw, length, width = _box(shape, False)
        if abs(length - box[3]) > 0.01 or abs(width - box[4]) > 0.01:
            return None
        states.append((_number(occupancy, "time"), float(x), float(y), float(yaw), np.nan))
    return states


def _track(element: Any, obstacle_id: str, step_s: float) -> Track | None:
    """One obstacle; None where its motion is known as reachable sets only."""
    role = element.findtext("role", element.tag.removesuffix("Obstacle")).strip()
    kind = element.findtext("type", "unknown").strip()
    if role not in ("static", "dynamic"):
        raise SceneError(f"role {role!r} is not known; expected static or dynamic")
    stands = role == "static"
    box = _box(element.find("shape"), stands)
    if element.find("initialState") is None:
        raise SceneError("no initialState")
    states = [_state(element.find("initialState"))]
    if not stands and element.find("trajectory") is not None:
        later = [_state(state) for state in element.iterfind("trajectory/state")]
        # Some writers repeat the initial state as the trajectory's first.
        states = states + later if not later or later[0][0] != states[0][0] else later
    elif not stands and element.find("occupancySet") is not None:
        occupied = _occupancies(element.find("occupancySet"), box)
        if occupied is None:
            return None
        states += occupied
    table = np.array(states)
    if (table[-1, 0] - table[0, 0]) * step_s > LOG_S_MAX:
        raise SceneError(f"its recording lasts more than {LOG_S_MAX:g} s; cut it into several")
    try:
        times_us = check_times(np.round(table[:, 0] * step_s * 1e6).astype(np.int64), "its trajectory")
    except ValueError as err:
        raise SceneError(str(err)) from err
    motion = _motion_states(times_us, table[:, 1:3], table[:, 3], table[:, 4])
    cos, sin = np.cos(motion[:, 2]), np.sin(motion[:, 2])
    motion[:, 0] += cos * box[0] - sin * box[1]
    motion[:, 1] += sin * box[0] + cos * box[1]
    motion[:, 2] += box[2]
    code = KINDS.index(_KIND_OF_TYPE.get(kind, "static" if stands else "car"))
    can_be_ego = not stands and kind in _EGO_TYPES
    return Track(obstacle_id, code, can_be_ego, stands, times_us, motion, float(box[3]), float(box[4]))


def along_line(points: Float, count: int) -> Float:
    """[count,2] points evenly spaced along a polyline."""
    lengths = arc_lengths(points)
    wanted = np.linspace(0.0, lengths[-1], count)
    return np.column_stack([np.interp(wanted, lengths, points[:, axis]) for axis in range(2)])


def _lanelet(element: Any, lanelet_id: str) -> Lanelet:
    left, right = (_points(element.find(f"{side}Bound"), f"its {side} bound", 2) for side in ("left", "right"))
    count = max(len(left), len(right))
    sides = (left, right) if len(left) == len(right) else (along_line(left, count), along_line(right, count))
    types = {(t.text or "").strip() for t in element.iterfind("laneletType")}
    users = {(u.text or "").strip() for tag in ("userOneWay", "userBidirectional") for u in element.iterfind(tag)}
    for_cars = not (types and types <= _NOT_FOR_CARS) and (not users or bool(users & _MOTOR_USERS))
    centre = thin((sides[0] + sides[1]) / 2.0, 1e-3)
    ring = np.concatenate([left, right[::-1]])
    polygon = shapely.make_valid(shapely.Polygon(ring))
    successors = tuple(s.get("ref", "") for s in element.iterfind("successor"))
    return Lanelet(lanelet_id, centre, left, ring, polygon, successors, for_cars)


def thin(points: Float, spacing_m: float) -> Float:
    """The points that lie at least `spacing_m` from the last one kept."""
    kept = [points[0]]
    for point in points[1:]:
        if np.hypot(*(point - kept[-1])) >= spacing_m:
            kept.append(point)
    return np.array(kept)


def _root(path: Path) -> Any:
    """The document's root element; entities, DTDs and the network stay closed."""
    try:
        size = path.stat().st_size
        if size > FILE_BYTES_MAX:
            raise SceneError(f"{size} bytes are more than {FILE_BYTES_MAX}; cut the recording")
        if size == 0:
            raise SceneError("the file is empty")
        content = path.read_bytes()
    except OSError as err:
        raise SceneError(f"cannot be read: {err.strerror or err}") from err
    closed = {"resolve_entities": False, "no_network": True, "load_dtd": False}
    try:
        root = etree.fromstring(content, etree.XMLParser(**closed, remove_comments=True, remove_pis=True))
    except etree.XMLSyntaxError as err:
        raise SceneError(f"line {err.lineno}: not well-formed XML, perhaps cut: {err.msg}") from err
    if root.getroottree().docinfo.doctype:
        raise SceneError("has a document type declaration; CommonRoad files need none")
    if root.tag != "commonRoad":
        raise SceneError(f"root element <{root.tag}>, expected <commonRoad>")
    version = root.get("commonRoadVersion")
    if version not in VERSIONS:
        raise SceneError(f"format version {version!r}; this reader knows {', '.join(VERSIONS)}")
    return root


def _named(root: Any, tags: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Children with their ids, which must be unique."""
    seen: set[str] = set()
    for element in root.iterchildren(*tags):
        name = element.get("id", "")
        if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
            raise SceneError(f"{_at(element)}: id {name!r}; expected letters, digits, '.', '_' or '-'")
        if name in seen:
            raise SceneError(f"{_at(element)}: id {name!r} occurs twice")
        seen.add(name)
        yield name, element


@contextmanager
def errors_at(place: object) -> Iterator[None]:
    """Put a place before the message of what goes wrong with a scene inside."""
    try:
        yield
    except (SceneError, shapely.errors.GEOSException) as err:
        raise SceneError(f"{place}: {err}") from err


@dataclass(frozen=True)
class Contents:
    """A file's lanelets by id, its obstacles in order, and remarks on those whose motion it does not tell."""

    lanelets: dict[str, Lanelet]
    tracks: list[Track]
    dropped: list[str]


def read(path: Path) -> Contents:
    """Read one file.

    Raises:
        SceneError: naming place and reason; the caller adds the file.

    """
    root = _root(path)
    try:
        step_s = float(root.get("timeStepSize", ""))
    except ValueError:
        step_s = np.nan
    if not 1e-3 <= step_s <= 10.0:
        raise SceneError(f"timeStepSize is {root.get('timeStepSize')!r}, expected 0.001 to 10 s")
    lanelets: dict[str, Lanelet] = {}
    tracks: list[Track] = []
    dropped: list[str] = []
    for name, element in _named(root, ("lanelet",)):
        with errors_at(f"lanelet {name}"):
            lanelets[name] = _lanelet(element, name)
    for name, element in _named(root, ("obstacle", "staticObstacle", "dynamicObstacle")):
        with errors_at(f"obstacle {name}"):
            track = _track(element, name, step_s)
        if track is None:
            dropped.append(f"obstacle {name}: only an occupancy set of reachable places, no recorded motion")
        else:
            tracks.append(track)
    if not lanelets:
        raise SceneError("no lanelets")
    if not any(not track.stands for track in tracks):
        raise SceneError("no moving obstacles, so no recorded drive to take as the ego's")
    bounds = np.array([lanelet.polygon.bounds for lanelet in lanelets.values()])
    if (bounds[:, 2:].max(axis=0) - bounds[:, :2].min(axis=0) > MAP_EXTENT_MAX_M).any():
        raise SceneError(f"the lanelets spread over more than {MAP_EXTENT_MAX_M / 1000.0:g} km")
    return Contents(lanelets, tracks, dropped)
