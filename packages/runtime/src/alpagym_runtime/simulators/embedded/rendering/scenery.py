"""What a scene looks like: its ground, and what stands on it for good; made once, kept within a bound.

Scenes without a dressed map (recordings) get edge lines, trees and houses from their id.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import shapely
from numpy.typing import NDArray

from alpagym_runtime.random import generator, text_seed
from alpagym_runtime.simulators.embedded.lane_map import LaneMap
from alpagym_runtime.simulators.embedded.map_picture import dashes, zebra_bars
from alpagym_runtime.simulators.embedded.maps.dressing import place
from alpagym_runtime.simulators.embedded.maps.lines import arc_lengths, with_yaw
from alpagym_runtime.simulators.embedded.rendering import textures
from alpagym_runtime.simulators.embedded.rendering.ground import Ground, Patch, draw_ground, strip
from alpagym_runtime.simulators.embedded.rendering.looks import looks_of
from alpagym_runtime.simulators.embedded.rendering.materials import ASPHALT, KERB, SIDEWALK, WHITE, YELLOW
from alpagym_runtime.simulators.embedded.rendering.weather import APPEARANCE, DRESSING, Air, air_of, look_of
from alpagym_runtime.simulators.embedded.scene import Scene

F64 = NDArray[np.float64]

# Columns of `Scenery.walls`: corner, edges to the right and down as seen from outside; colour; texture and its repeats;
# instance id; semantic class; middle and radius of what it belongs to.
WALL_COLUMNS = 21
# Columns of `Scenery.trees`: x, y, width, height, tint, texture, instance id.
# Columns of `Scenery.heads`: x, y, yaw, group, instance id.

CLASSES = (
    "sky", "road", "marking", "sidewalk", "terrain", "building", "vegetation", "pole", "signal", "car", "large_vehicle",
    "two_wheeler", "person", "obstacle",
)  # fmt: skip
"""Semantic classes by number."""

SKY, ROAD, MARKING, WALK, TERRAIN, HOUSE, VEGETATION, POLE, SIGNAL, CAR, LARGE, TWO_WHEELER, PERSON, OBSTACLE = range(
    14
)

FIRST_STATIC_ID = 1000
"""Instance ids: 0 ground and sky, 1 + index for road users, from here on what stands."""

FACADES = ("facade", "facade_wide", "facade_tall")
PALE = (
    (196, 184, 160),
    (168, 150, 128),
    (150, 82, 66),
    (178, 176, 172),
    (120, 128, 140),
    (206, 198, 184),
    (140, 120, 96),
)
POLE_M = 3.4
HEAD_M = 1.0


@dataclass(frozen=True)
class Scenery:
    """Arrays that the kernels read; local frame."""

    ground: Ground
    walls: F64  # [W,21]
    trees: F64  # [T,7]
    heads: F64  # [H,5]
    air: Air
    weather: str
    users: tuple[F64, NDArray[np.int64], F64]  # road users' sizes [A,2] m, kinds [A], looks [A,10]
    signals: tuple[F64, float, float]  # green times [*,2], cycle and yellow time, s

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        parts = (self.ground, self.walls, self.trees, self.heads, *self.users, self.signals[0])
        return sum(part.nbytes for part in parts) + 8192


def make_scenery(scene: Scene, texel_m: float, weather: str) -> Scenery:
    """The scenery of a scene; the same arrays in every process of one build."""
    patches = list(_patches(scene))
    walls, trees, heads = _standing(scene)
    look = look_of(scene.scene_id, weather)
    ground = draw_ground(patches, _way(scene), texel_m)
    actors, lights = scene.actors, scene.lane_map.signals if scene.lane_map is not None else scene.signals
    users = (
        np.ascontiguousarray(actors.size, np.float64),
        np.ascontiguousarray(actors.kind, np.int64),
        looks_of(scene.scene_id, len(actors.first)),
    )
    green = np.ascontiguousarray(lights.green_s if len(lights.green_s) else np.zeros((1, 2)), np.float64)
    signals = green, float(lights.cycle_s or 1.0), float(lights.yellow_s)
    return Scenery(ground, walls, trees, heads, air_of(look), look.kind, users, signals)


class SceneryStore:
    """Sceneries by scene, texel and weather, the least recently used ones dropped beyond a bound.

    One store serves all simulators of a process, whose threads may ask at once.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str, float, str], Scenery] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, scene: Scene, texel_m: float, weather: str, limit_bytes: int) -> Scenery:
        """The scenery, made if it is not there; the newest always stays."""
        key = (scene.scene_id, scene.content_hash, texel_m, weather)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = make_scenery(scene, texel_m, weather)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = made
                self._bytes += made.nbytes
            while self._bytes > limit_bytes and len(self._kept) > 1:
                _, dropped = self._kept.popitem(last=False)
                self._bytes -= dropped.nbytes
            return self._kept.get(key, made)

    @property
    def nbytes(self) -> int:
        """Memory that is held."""
        return self._bytes


STORE = SceneryStore()


def _way(scene: Scene) -> F64:
    """[*,2] points of the route that the ego can reach while the recording lasts, and of the recording."""
    log = scene.ego_log
    behind = np.hypot(*(scene.route - log[0, :2]).T).argmin()
    arcs = arc_lengths(scene.route) - arc_lengths(scene.route)[behind]
    reach = (float(log[:, 3].max()) + scene.speed_limit_mps) / 2.0 * 0.1 * len(log) + 20.0
    return np.concatenate([scene.route[(arcs > -30.0) & (arcs < reach)], log[::4, :2]])


# ---------------------------------------------------------------- ground


def _patches(scene: Scene) -> Iterator[Patch]:
    """What lies on the ground, lowest first."""
    lane_map = scene.lane_map
    surface = list(lane_map.surface) if lane_map is not None and lane_map.surface else scene.area.rings()
    if lane_map is not None:
        for outline in lane_map.sidewalks:
            yield Patch(SIDEWALK, outline)
    for outline in surface:
        yield Patch(KERB, strip(_closed(outline), 0.36))
    for outline in surface:
        yield Patch(ASPHALT, outline)
        # Seams between neighbouring outlines would shine through.
        yield Patch(ASPHALT, strip(_closed(outline), 0.06))
    markings = scene.markings if lane_map is None else lane_map.markings
    if not any(marking.kind in ("edge", "yellow") for marking in markings) and (lane_map is None or not markings):
        yield from _edge_lines(surface)
    for polygon in lane_map.crosswalks if lane_map is not None else ():
        for bar in zebra_bars(polygon):
            yield Patch(WHITE, bar)
    for marking in markings:
        if marking.kind == "dashed":
            for dash in dashes(marking.points):
                yield Patch(WHITE, strip(dash, 0.15))
        elif marking.kind == "yellow":
            for left in (-0.14, 0.14):
                yield Patch(YELLOW, strip(marking.points, 0.13, left))
        else:
            yield Patch(WHITE, strip(marking.points, 0.4 if marking.kind == "stop" else 0.15))


def _closed(outline: F64) -> F64:
    points = outline[:, :2]
    return points if (points[0] == points[-1]).all() else np.concatenate([points, points[:1]])


def _edge_lines(surface: list[F64]) -> Iterator[Patch]:
    """White lines along the border of a bare area."""
    inner = shapely.union_all([shapely.Polygon(ring).buffer(0.05) for ring in surface]).buffer(-0.4)
    for polygon in shapely.get_parts(inner):
        for ring in (polygon.exterior, *polygon.interiors):
            points = np.asarray(shapely.segmentize(ring, 4.0).coords)
            if len(points) > 8:
                yield Patch(WHITE, strip(points, 0.13))


# ---------------------------------------------------------------- what stands


def _standing(scene: Scene) -> tuple[F64, F64, F64]:
    seed = text_seed(scene.scene_id)
    rng = generator(seed, APPEARANCE, 1)
    lane_map = scene.lane_map
    if lane_map is None or not (lane_map.buildings or len(lane_map.trees)):
        lane_map = _dressed(scene)
    walls: list[F64] = []
    name = FIRST_STATIC_ID
    for building in lane_map.buildings:
        colour = np.array(PALE[int(rng.integers(len(PALE)))]) * rng.uniform(0.86, 1.06)
        walls += _house(building.footprint, building.height_m, colour, FACADES[int(rng.integers(3))], name)
        name += 1
    trees = np.zeros((len(lane_map.trees), 7))
    for k, (x, y, radius) in enumerate(lane_map.trees):
        kind = ("tree", "tree_wide", "tree_fir")[int(rng.choice(3, p=[0.5, 0.32, 0.18]))]
        height = radius * (2.7 if kind == "tree_fir" else 2.2) + rng.uniform(0.6, 1.8)
        width = radius * {"tree": 2.9, "tree_wide": 2.5, "tree_fir": 2.0}[kind]
        trees[k] = x, y, width, height, rng.uniform(0.78, 1.12), textures.index(kind), name
        name += 1
    signals = scene.lane_map.signals if scene.lane_map is not None else scene.signals
    heads = np.zeros((len(signals.heads), 5))
    for k, (x, y, yaw, group) in enumerate(signals.heads):
        walls += _box(np.array([x, y, yaw]), (0.14, 0.14), 0.0, POLE_M, (58, 60, 62), name, POLE)
        heads[k] = x, y, yaw, group, name
        name += 1
    return (
        np.array(walls, np.float64).reshape(-1, WALL_COLUMNS),
        trees.reshape(-1, 7),
        heads,
    )


def _dressed(scene: Scene) -> LaneMap:
    """Trees and houses for a scene that has none, along its border."""
    rings = scene.area.rings()
    shape = shapely.union_all([shapely.Polygon(ring).buffer(0.3) for ring in rings]).buffer(-0.2)
    roadsides = []
    for polygon in shapely.get_parts(shape):
        ring = np.asarray(shapely.segmentize(polygon.exterior, 3.0).coords)
        near = np.hypot(*(ring[:, None] - scene.route[None, ::4]).transpose(2, 0, 1)).min(axis=1) < 90.0
        # The exterior of a shapely polygon may run either way round; outside is right of a counter-clockwise one.
        outside = -1.0 if shapely.is_ccw(polygon.exterior) else 1.0
        for part in np.split(np.arange(len(ring)), np.flatnonzero(np.diff(near.astype(int))) + 1):
            if len(part) > 6 and near[part[0]]:
                roadsides.append((with_yaw(ring[part]), outside * 0.2))
    if not roadsides:
        return LaneMap((), ())
    kept_free = shapely.simplify(shape, 0.3).buffer(2.0)
    placed = place(generator(text_seed(scene.scene_id), DRESSING), kept_free, roadsides, 26, 44)
    return LaneMap((), (), buildings=placed.buildings, trees=placed.trees)


def _house(footprint: F64, height: float, colour: F64, facade: str, name: int) -> list[F64]:
    """Walls of a prism, seen from outside; the lowest floor of a third are shops."""
    outline = footprint if shapely.is_ccw(shapely.LinearRing(footprint)) else footprint[::-1]
    middle = outline.mean(axis=0)
    radius = float(np.hypot(*(outline - middle).T).max())
    floors = max(round(height / 3.1), 1)
    floor_m = height / floors
    walls = []
    for start, end in zip(outline, np.roll(outline, -1, axis=0), strict=True):
        length = float(np.hypot(*(end - start)))
        if length < 0.3:
            continue
        # Counter-clockwise corners: seen from outside, the wall runs from `start` on the left to `end`.
        repeats = max(round(length / 3.0), 1)
        bands = [(height, floor_m, facade, floors - 1), (floor_m, 0.0, "shop" if name % 3 == 0 else facade, 1)]
        for top, bottom, texture, rows in bands:
            if rows:
                walls.append(
                    np.array([
                        *start, top, *(end - start), 0.0, 0.0, 0.0, bottom - top, *(colour / 255.0),
                        textures.index(texture), repeats, rows, name, HOUSE, *middle, radius, height,
                    ])
                )  # fmt: skip
    return walls


def _box(
    pose: F64, size: tuple[float, float], low: float, high: float, colour: tuple[int, int, int], name: int, kind: int
) -> list[F64]:
    """Four sides of an upright box."""
    cos, sin = math.cos(pose[2]), math.sin(pose[2])
    corners = np.array([[1, -1], [1, 1], [-1, 1], [-1, -1]]) * np.array(size) / 2.0
    at = pose[:2] + np.stack([cos * corners[:, 0] - sin * corners[:, 1], sin * corners[:, 0] + cos * corners[:, 1]], 1)
    radius = math.hypot(*size) / 2.0
    return [
        np.array([
            *at[k], high, *(at[(k + 1) % 4] - at[k]), 0.0, 0.0, 0.0, low - high, *(np.array(colour) / 255.0), 0, 1, 1,
            name, kind, *pose[:2], radius, high,
        ])
        for k in range(4)
    ]  # fmt: skip
