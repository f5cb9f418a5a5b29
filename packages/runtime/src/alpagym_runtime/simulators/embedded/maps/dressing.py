"""What stands beside a road: buildings and trees, placed by rejection."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import shapely
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded.lane_map import Building
from alpagym_runtime.simulators.embedded.maps.lines import arc_lengths

Float = NDArray[np.float64]

BUILDING_CLEARANCE_M = 3.0
TREE_CLEARANCE_M = 1.0


@dataclass(frozen=True)
class Dressing:
    """Buildings, and trees [T,3]: x, y m, crown radius m."""

    buildings: tuple[Building, ...]
    trees: Float


def place(
    rng: np.random.Generator,
    kept_free: shapely.Geometry,
    roadsides: list[tuple[Float, float]],
    buildings: int,
    trees: int,
) -> Dressing:
    """Objects near the edges of roads that do not overlap each other or `kept_free`.

    Args:
        rng: its stream.
        kept_free: pavement and sidewalks.
        roadsides: lines [K,3] and the signed offset (m, positive left) of an edge of the road from each.
        buildings: at most so many.
        trees: at most so many.

    """
    shapely.prepare(kept_free)
    # All candidates at once: shapely is fast in bulk only.
    count = 3 * buildings
    size = np.stack([rng.uniform(10.0, 28.0, count), rng.uniform(9.0, 18.0, count)], axis=1)
    poses = _beside(rng, roadsides, size[:, 1] / 2.0 + rng.uniform(3.0, 16.0, count))
    height = rng.uniform(5.0, 22.0, count)
    outlines = _rectangles(poses, size)
    clear = shapely.distance(shapely.polygons(outlines), kept_free) > BUILDING_CLEARANCE_M
    radius = np.hypot(size[:, 0], size[:, 1]) / 2.0
    chosen: list[int] = []
    for k in np.flatnonzero(clear):
        if len(chosen) == buildings:
            break
        if _apart(poses[k], radius[k], poses[chosen], radius[chosen], 0.85):
            chosen.append(int(k))
    houses = tuple(Building(outlines[k], float(height[k])) for k in chosen)

    count = 2 * trees
    places = _beside(rng, roadsides, rng.uniform(2.0, 14.0, count))[:, :2]
    crown = rng.uniform(1.2, 2.8, count)
    clear = shapely.distance(shapely.points(places), kept_free) > TREE_CLEARANCE_M
    if houses:
        footprints = shapely.multipolygons([shapely.Polygon(house.footprint) for house in houses])
        clear &= shapely.distance(shapely.points(places), footprints) > crown + 0.3
    kept: list[int] = []
    for k in np.flatnonzero(clear):
        if len(kept) == trees:
            break
        if _apart(places[k], crown[k], places[kept], crown[kept], 0.9):
            kept.append(int(k))
    return Dressing(houses, np.column_stack([places[kept], crown[kept]]))


def _apart(at: Float, radius: float, others: Float, other_radius: Float, share: float) -> bool:
    """Whether a circle is clear of others; `share` < 1 lets their rims overlap a little."""
    distance = np.hypot(others[:, 0] - at[0], others[:, 1] - at[1])
    return bool((distance > share * (radius + other_radius)).all())


def _beside(rng: np.random.Generator, roadsides: list[tuple[Float, float]], from_edge_m: Float) -> Float:
    """[N,3] poses along the road at distances [N] outside of random edges."""
    count = len(from_edge_m)
    which = rng.integers(0, len(roadsides), count)
    share, poses = rng.uniform(0.0, 1.0, count), np.zeros((count, 3))
    for k, (line, edge) in enumerate(roadsides):
        rows = which == k
        arcs = arc_lengths(line)
        x, y, yaw = (np.interp(share[rows] * arcs[-1], arcs, line[:, c]) for c in range(3))
        left = edge + np.sign(edge) * from_edge_m[rows]
        poses[rows] = np.stack([x - left * np.sin(yaw), y + left * np.cos(yaw), yaw], axis=1)
    return poses


def _rectangles(poses: Float, size: Float) -> Float:
    """[N,4,2] corners of boxes with poses [N,3] and sizes [N,2]."""
    corners = np.array([[1, 1], [1, -1], [-1, -1], [-1, 1]]) * size[:, None, :] / 2.0
    cos, sin = np.cos(poses[:, None, 2]), np.sin(poses[:, None, 2])
    x = poses[:, None, 0] + cos * corners[..., 0] - sin * corners[..., 1]
    y = poses[:, None, 1] + sin * corners[..., 0] + cos * corners[..., 1]
    return np.stack([x, y], axis=-1)
