"""Roads without junctions: curves, many lanes, merges, lanes that end, zebras, parked cars, queues."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded.maps.builder import LANE_WIDTH_M, SHOULDER_M, MapBuilder, Road, RoadPlan, Route
from alpagym_runtime.simulators.embedded.maps.lines import STEP_M, blend, clothoids, offset

Float = NDArray[np.float64]

FOCUS_M = 160.0
"""Arc length of what a road is about: room for traffic behind the ego."""

TOWN_AFTER_M = 300.0
FAST_AFTER_M = 420.0
"""Road beyond the focus: ten seconds at the limit, and the route that must go on from there."""

ORIGIN = (0.0, 0.0, 0.0)


def curve(rng: np.random.Generator, dressing: np.random.Generator) -> RoadPlan:
    """One or two bends of radius 24 to 90 m, one or two lanes on the ego's side."""
    knots, curvature = [0.0, FOCUS_M], [0.0, 0.0]
    side = rng.choice([-1.0, 1.0])
    turned = 0.0
    for k in range(int(rng.integers(1, 3))):
        radius = rng.uniform(24.0, 90.0)
        ramp = rng.uniform(14.0, 26.0)
        # A second bend turns back, and a road never meets itself.
        turn = min(rng.uniform(0.5, 1.5), 1.5 if k == 0 else turned + 0.6)
        hold = max(turn * radius - ramp, 4.0)
        turned = (ramp + hold) / radius
        peak = side / radius
        knots += [knots[-1] + ramp, knots[-1] + ramp + hold, knots[-1] + 2.0 * ramp + hold]
        curvature += [peak, peak, 0.0]
        knots.append(knots[-1] + rng.uniform(5.0, 40.0))
        curvature.append(0.0)
        side = -side
    knots.append(max(knots[-1] + 60.0, FOCUS_M + TOWN_AFTER_M))
    curvature.append(0.0)
    builder = MapBuilder()
    limit = float(rng.uniform(9.0, 13.9))
    road = builder.road(clothoids(ORIGIN, knots, curvature), int(rng.integers(1, 3)), 1, speed_limit_mps=limit)
    return _plan("curve", builder, dressing, [Route((lane,), FOCUS_M) for lane in road.forward], limit)


def multilane(rng: np.random.Generator, dressing: np.random.Generator) -> RoadPlan:
    """Two or three lanes a direction, nearly straight."""
    builder, limit = MapBuilder(), float(rng.uniform(12.0, 19.0))
    line = _gentle(rng, FOCUS_M + FAST_AFTER_M)
    lanes = int(rng.integers(2, 4))
    road = builder.road(line, lanes, lanes, speed_limit_mps=limit)
    return _plan("multilane", builder, dressing, [Route((lane,), FOCUS_M) for lane in road.forward], limit)


def stop_and_go(rng: np.random.Generator, dressing: np.random.Generator) -> RoadPlan:
    """One to three lanes a direction, for dense queues."""
    builder, limit = MapBuilder(), float(rng.uniform(9.0, 13.9))
    lanes = int(rng.integers(1, 4))
    road = builder.road(
        _gentle(rng, FOCUS_M + TOWN_AFTER_M), lanes, int(rng.integers(1, lanes + 1)), speed_limit_mps=limit
    )
    return _plan("stop_and_go", builder, dressing, [Route((lane,), FOCUS_M) for lane in road.forward], limit)


def crosswalk(rng: np.random.Generator, dressing: np.random.Generator) -> RoadPlan:
    """A street with one or two zebras without signals."""
    builder, limit = MapBuilder(), float(rng.uniform(8.3, 13.9))
    lanes = int(rng.choice([1, 1, 2]))
    road = builder.road(_gentle(rng, FOCUS_M + TOWN_AFTER_M), lanes, lanes, speed_limit_mps=limit)
    builder.crossing(road, FOCUS_M)
    if rng.uniform() < 0.5:
        builder.crossing(road, FOCUS_M + float(rng.uniform(35.0, 80.0)))
    return _plan("crosswalk", builder, dressing, [Route((lane,), FOCUS_M) for lane in road.forward], limit)


PARKING_M = 2.1
"""Width of a parking strip beside the lanes."""


def parked_street(rng: np.random.Generator, dressing: np.random.Generator) -> RoadPlan:
    """A narrow street with parking strips on both sides."""
    builder, limit = MapBuilder(), float(rng.uniform(7.5, 11.0))
    width = float(rng.uniform(3.0, 3.4))
    road = builder.road(
        _gentle(rng, FOCUS_M + TOWN_AFTER_M), 1, 1, width_m=width, speed_limit_mps=limit, strip_m=PARKING_M
    )
    return _plan("parked_street", builder, dressing, [Route(road.forward, FOCUS_M)], limit)


RAMP_GAP_M = 9.0
RAMP_LIMIT_MPS = 16.7


def merge(rng: np.random.Generator, dressing: np.random.Generator) -> RoadPlan:
    """A fast road of two or three lanes, joined from the right by a ramp with an acceleration lane."""
    builder, limit = MapBuilder(), float(rng.uniform(17.0, 22.0))
    line = _gentle(rng, FOCUS_M + FAST_AFTER_M, 0.0012)
    begin, end = FOCUS_M, FOCUS_M + float(rng.uniform(80.0, 130.0))
    before, after, lane = _with_side_lane(builder, line, int(rng.integers(2, 4)), 0, -1.0, begin, end, limit)
    first = round(begin / STEP_M)
    gap = RAMP_GAP_M * (1.0 - blend(np.linspace(-0.5, 1.0, first + 1)))
    ramp_line = offset(line[: first + 1], -before.right_m - LANE_WIDTH_M / 2.0 - gap)
    ramp = builder.lane(ramp_line, speed_limit_mps=RAMP_LIMIT_MPS)
    builder.join(ramp, lane[0])
    half = LANE_WIDTH_M / 2.0
    builder.paint(offset(ramp_line, -half), "edge")
    apart = gap > 0.5
    builder.paint(offset(ramp_line, half)[apart], "edge")
    builder.paint(offset(line[: first + 1], -before.right_m)[apart], "edge")
    right = (before.forward[-1], after.forward[-1])
    routes = [Route((ramp, *lane, right[1]), FOCUS_M)] * 2 + [Route(right, FOCUS_M)]
    return _plan("merge", builder, dressing, routes, limit, open_country=True)


def lane_drop(rng: np.random.Generator, dressing: np.random.Generator) -> RoadPlan:
    """Two or three lanes of which the right or the left one ends."""
    builder, limit = MapBuilder(), float(rng.uniform(11.0, 19.0))
    side = float(rng.choice([-1.0, 1.0]))
    staying = int(rng.integers(1, 3))
    line = _gentle(rng, FOCUS_M + FAST_AFTER_M)
    opposite = staying if side < 0.0 else 0
    before, after, lane = _with_side_lane(builder, line, staying, opposite, side, 0.0, FOCUS_M, limit)
    beside = -1 if side < 0.0 else 0
    routes = [Route((*lane, after.forward[beside]), FOCUS_M)] * 2
    routes += [Route((before.forward[beside], after.forward[beside]), FOCUS_M)]
    return _plan("lane_drop", builder, dressing, routes, limit)


TAPER_S = 2.6
"""Length of a taper, as the time it takes at the limit."""


def _with_side_lane(
    builder: MapBuilder,
    line: Float,
    staying: int,
    opposite: int,
    side: float,
    begin_m: float,
    end_m: float,
    limit_mps: float,
) -> tuple[Road, Road, tuple[int, int]]:
    """A road, and beside it a lane that ends.

    The lane runs from `begin_m` to `end_m` on one side (1 left, -1 right), then tapers into the outer lane there.

    Returns:
        the road until the taper's end, the road from there, and the side lane's two parts.

    """
    first, last = round(begin_m / STEP_M), round(end_m / STEP_M)
    tapered = last + round(TAPER_S * limit_mps / STEP_M)
    before = builder.road(
        line[: tapered + 1], staying, opposite, speed_limit_mps=limit_mps, edges=False, walkways=False
    )
    after = builder.road(line[tapered:], staying, opposite, speed_limit_mps=limit_mps)
    for k in range(staying):
        builder.join(before.forward[k], after.forward[k])
    for k in range(opposite):
        builder.join(after.backward[k], before.backward[k])

    edge = before.left_m if side > 0.0 else -before.right_m
    outside = edge + side * LANE_WIDTH_M / 2.0
    inside = edge - side * LANE_WIDTH_M / 2.0
    parallel = offset(line[first : last + 1], outside)
    shape = outside + (inside - outside) * blend(np.linspace(0.0, 1.0, tapered - last + 1))
    taper_line = offset(line[last : tapered + 1], shape)
    lane = builder.lane(parallel, speed_limit_mps=limit_mps)
    taper = builder.lane(taper_line, speed_limit_mps=limit_mps)
    beside = before.forward[0 if side > 0.0 else -1]
    builder.join(lane, taper)
    builder.join(taper, after.forward[0 if side > 0.0 else -1])
    builder.yields(taper, beside)
    if side > 0.0:
        builder.neighbours((lane, beside))
    else:
        builder.neighbours((beside, lane))
    # The lane may be left for its neighbour, but nobody should move into it.
    builder.closed(beside, lane)

    builder.paint(offset(line[first : last + 1], edge), "dashed")
    builder.paint(offset(parallel, side * LANE_WIDTH_M / 2.0), "edge")
    builder.paint(offset(taper_line, side * LANE_WIDTH_M / 2.0), "edge")
    other = -before.right_m if side > 0.0 else before.left_m
    builder.paint(offset(line[: tapered + 1], other), "edge")
    kerb = edge + side * (LANE_WIDTH_M + SHOULDER_M)
    builder.roadsides.append((line[first : tapered + 1], kerb))
    builder.walkway(line[first : last + 1], kerb)
    builder.walkway(line[: tapered + 1], other + math.copysign(SHOULDER_M, other - edge))
    return before, after, (lane, taper)


def _gentle(rng: np.random.Generator, length_m: float, most: float = 0.002) -> Float:
    """A line whose curvature changes slowly and stays below `most` 1/m."""
    knots = np.linspace(0.0, length_m, 5)
    return clothoids(ORIGIN, knots, rng.uniform(-most, most, len(knots)))


def _plan(
    kind: str,
    builder: MapBuilder,
    dressing: np.random.Generator,
    routes: list[Route],
    limit_mps: float,
    *,
    open_country: bool = False,
) -> RoadPlan:
    lane_map = builder.finish(
        dressing,
        kerb_radius_m=1.0,
        sidewalk_m=0.0 if open_country else 2.8,
        buildings=6 if open_country else 34,
        trees=60,
    )
    return RoadPlan(kind, lane_map, tuple(routes), tuple(builder.crossings), (), limit_mps)
