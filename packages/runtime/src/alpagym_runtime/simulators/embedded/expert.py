"""The expert: a planner that knows the traffic's recorded future; what imitation copies, and who drives the recordings.

It searches constant accelerations and lateral offsets from the route, predicts four seconds of each against every
road user's true future, and takes the fastest one that stays clear; if none does, it brakes as hard as it can.
"""

from __future__ import annotations

import math

import numpy as np

from alpagym_runtime.geometry_kernels import box_inside_kernel, box_penetration_kernel
from alpagym_runtime.kernels import kernel
from alpagym_runtime.simulators.embedded.lane_map import GREEN
from alpagym_runtime.simulators.embedded.route import project
from alpagym_runtime.simulators.embedded.scene import MAX_ACTORS
from alpagym_runtime.simulators.embedded.scene_bank import (
    ACTOR,
    ACTOR_N,
    BAND,
    BAND_HEIGHT,
    BAND_LOW,
    BAND_N,
    BAND_SEGMENT,
    BAND_SEGMENT_N,
    CENTRE_OFFSET,
    EGO_STOP,
    EGO_STOP_N,
    LENGTH,
    ROUTE,
    ROUTE_N,
    SEGMENT,
    SEGMENT_N,
    SPEED_LIMIT,
    WIDTH,
)
from alpagym_runtime.simulators.embedded.traffic import forecast
from alpagym_runtime.simulators.embedded.traffic.columns import STOP_ARC, STOP_GROUP
from alpagym_runtime.simulators.embedded.traffic.right_of_way import signal_state
from alpagym_runtime.simulators.embedded.vehicle import STEP_S

ACCELERATIONS = np.array([2.0, 1.0, 0.4, 0.0, -0.7, -1.5, -2.5, -4.0, -6.0, -8.0])
OFFSETS = np.array([0.0, 0.6, -0.6, 1.2, -1.2, 1.9])
HORIZON_STEPS = 40
CHECK_EVERY = 2
LATERAL_MAX_MPS2 = 3.0
MARGIN_LENGTH_M = 1.2
MARGIN_WIDTH_M = 0.4
STOP_BEFORE_M = 0.5
LATERAL_RATE = 0.9  # 1/s, how fast an offset is closed
OFFSET_COST = 1.5  # m of progress in four seconds that an offset of 1 m must win


@kernel
def _route_at(route, segment, arc):
    """x, y, yaw, curvature of the route at an arc length, and the segment, searched from `segment` on."""
    last = len(route) - 2
    while segment < last and route[segment + 1, 2] < arc:
        segment += 1
    length = route[segment + 1, 2] - route[segment, 2]
    t = (arc - route[segment, 2]) / length
    x = route[segment, 0] + t * (route[segment + 1, 0] - route[segment, 0])
    y = route[segment, 1] + t * (route[segment + 1, 1] - route[segment, 1])
    yaw = math.atan2(route[segment + 1, 1] - route[segment, 1], route[segment + 1, 0] - route[segment, 0])
    # Heading and curvature vary linearly between the middles of segments.
    other = segment + 1 if t > 0.5 else segment - 1
    if other < 0 or other > last:
        return x, y, yaw, 0.0, segment
    heading = math.atan2(route[other + 1, 1] - route[other, 1], route[other + 1, 0] - route[other, 0])
    turn = (heading - yaw + math.pi) % (2.0 * math.pi) - math.pi
    between = (route[other + 1, 2] - route[other, 2] + length) / 2.0
    curvature = turn / between if other > segment else -turn / between
    return x, y, yaw + turn * abs(t - 0.5) * length / between, curvature, segment


@kernel
def _roll(route, segment, arc, offset, slope, speed, limit, acceleration, target, step_s, path):
    """Predict path [K,5] (x, y, yaw, speed, arc) of a candidate; returns (m driven, worst lateral acceleration)."""
    driven, worst = 0.0, 0.0
    for k in range(len(path)):
        before = speed
        speed = speed + acceleration * step_s
        # Over the limit it coasts down instead of holding the excess.
        ceiling = limit if before <= limit else before - 1.0 * step_s
        if acceleration >= 0.0 and speed > ceiling:
            speed = ceiling
        speed = max(speed, 0.0)
        ds = (before + speed) / 2.0 * step_s
        driven += ds
        # A critically damped spring over distance closes the lateral offset.
        rate = LATERAL_RATE / max(speed, 4.0)
        bend = -2.0 * rate * slope - rate * rate * (offset - target)
        slope += bend * ds
        offset += slope * ds
        x, y, yaw, curvature, segment = _route_at(route, segment, arc + driven)
        if k % 4 == 3:
            worst = max(worst, speed * speed * abs(curvature + bend))
        path[k, 0] = x - offset * math.sin(yaw)
        path[k, 1] = y + offset * math.cos(yaw)
        path[k, 2] = yaw + math.atan(slope)
        path[k, 3] = speed
        path[k, 4] = arc + driven
    return driven, worst


@kernel
def _runs_red(bank, scene, path, k, step, check_every, front):
    """Whether the ego's front passes a stop line in the check that ends at sample k while its signal is not green."""
    row = bank.rows[scene]
    for stop in bank.ego_stops[row[EGO_STOP] : row[EGO_STOP] + row[EGO_STOP_N]]:
        before = path[k - check_every, 4] if k >= check_every else path[0, 4] - path[0, 3] * STEP_S
        line = stop[STOP_ARC] - front - STOP_BEFORE_M
        if stop[STOP_GROUP] >= 0.0 and before < line <= path[k, 4]:
            return signal_state(bank, scene, int(stop[STOP_GROUP]), (step + k + 1) * STEP_S) != GREEN
    return False


@kernel
def _clear_steps(bank, scene, path, step, others, exists, check_every, inside_too):
    """How many checks of a path stay clear of the traffic's future, of red lights and, if asked, inside the area."""
    number, row = bank.numbers[scene], bank.rows[scene]
    length, width, forward = number[LENGTH], number[WIDTH], number[CENTRE_OFFSET]
    checks = len(path) // check_every
    first = row[ACTOR]
    for c in range(checks):
        k = (c + 1) * check_every - 1
        cos, sin = math.cos(path[k, 2]), math.sin(path[k, 2])
        x, y, yaw = path[k, 0] + forward * cos, path[k, 1] + forward * sin, path[k, 2]
        for a in range(row[ACTOR_N]):
            if not exists[a, c]:
                continue
            other, size = others[a, c], bank.sizes[first + a]
            reach = (length + width + size[0] + size[1]) / 2.0 + MARGIN_LENGTH_M
            if abs(other[0] - x) > reach or abs(other[1] - y) > reach:
                continue
            depth, _, _ = box_penetration_kernel(
                x,
                y,
                yaw,
                length + 2.0 * MARGIN_LENGTH_M,
                width + 2.0 * MARGIN_WIDTH_M,
                other[0],
                other[1],
                other[2],
                size[0],
                size[1],
            )
            if depth > 0.0:
                return c
        if row[EGO_STOP_N] > 0 and _runs_red(bank, scene, path, k, step, check_every, forward + length / 2.0):
            return c
        if inside_too and not box_inside_kernel(
            x,
            y,
            yaw,
            length,
            width + 0.1,
            bank.segments[row[SEGMENT] : row[SEGMENT] + row[SEGMENT_N]],
            bank.band_offsets[row[BAND] : row[BAND] + row[BAND_N]],
            bank.band_segments[row[BAND_SEGMENT] : row[BAND_SEGMENT] + row[BAND_SEGMENT_N]],
            number[BAND_LOW],
            number[BAND_HEIGHT],
        ):
            return c
    return checks


@kernel
def target_plan(bank, slots, rows, plan_rig, plan_step_s):
    """target_plan_rig [n,T,3]: the expert's answer from each slot's present state."""
    steps = plan_rig.shape[1]
    path, best_path = np.empty((HORIZON_STEPS, 5)), np.empty((steps, 5))
    checks = HORIZON_STEPS // CHECK_EVERY
    others, exists = np.empty((MAX_ACTORS, checks, 3)), np.empty((MAX_ACTORS, checks), np.bool_)
    for r in range(len(rows)):
        i = rows[r]
        scene, state = slots.scene[i], slots.state[i]
        first, count = bank.rows[scene, ROUTE], bank.rows[scene, ROUTE_N]
        route = bank.route[first : first + count]
        segment, arc, offset = project(bank, scene, slots.segment[i], state[0], state[1], 10.0, 40.0)
        _, _, yaw, _, _ = _route_at(route, segment, arc)
        slope = math.tan(min(max((state[2] - yaw + math.pi) % (2.0 * math.pi) - math.pi, -1.0), 1.0))
        limit = bank.numbers[scene, SPEED_LIMIT]
        forecast(bank, slots, i, checks, CHECK_EVERY, others, exists)
        best, best_a, best_offset = -1e18, ACCELERATIONS[-1], 0.0
        longest, longest_a, longest_offset = -1.0, ACCELERATIONS[-1], 0.0
        for o in range(len(OFFSETS)):
            target = OFFSETS[o]
            for c in range(len(ACCELERATIONS)):
                a = ACCELERATIONS[c]
                driven, worst = _roll(route, segment, arc, offset, slope, state[3], limit, a, target, 0.1, path)
                value = driven - OFFSET_COST * abs(target) - 0.02 * a * a
                if value <= best:
                    continue
                if worst > LATERAL_MAX_MPS2 and a > -2.5:
                    continue
                # Near a start off the centre line the box may be outside for a moment: only offsets are checked.
                clear = _clear_steps(bank, scene, path, slots.step[i], others, exists, CHECK_EVERY, target != 0.0)
                if clear == checks:
                    best, best_a, best_offset = value, a, target
                elif clear > longest or (clear == longest and a < longest_a):
                    longest, longest_a, longest_offset = clear, a, target
        if best == -1e18:
            best_a, best_offset = longest_a, longest_offset
        _roll(route, segment, arc, offset, slope, state[3], limit, best_a, best_offset, plan_step_s, best_path)
        cos, sin = math.cos(state[2]), math.sin(state[2])
        for t in range(steps):
            dx, dy = best_path[t, 0] - state[0], best_path[t, 1] - state[1]
            plan_rig[r, t, 0] = dx * cos + dy * sin
            plan_rig[r, t, 1] = dy * cos - dx * sin
            plan_rig[r, t, 2] = (best_path[t, 2] - state[2] + math.pi) % (2.0 * math.pi) - math.pi
