"""The state kernel: slots as structs of arrays, stepped by compiled code; no Python loop over slots.

Each slot depends on its scene and its decisions only, so an episode is the same bits whatever runs beside it. Compiled
without fast maths for that reason.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.geometry import CONTACT_TOLERANCE_M
from alpagym_runtime.geometry_kernels import box_inside_kernel, box_penetration_kernel
from alpagym_runtime.kernels import kernel
from alpagym_runtime.simulators.embedded.scene import MAX_ACTORS, STANDING_REFERENCE_M
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
    LENGTH,
    LOG,
    LOG_N,
    ROUTE,
    ROUTE_N,
    SEGMENT,
    SEGMENT_N,
    WHEELBASE,
    WIDTH,
)
from alpagym_runtime.simulators.embedded.vehicle import (
    ACCELERATION_MAX_MPS2,
    STEERING_MAX_RAD,
    STEP_S,
    drive,
    track,
)

MEASURES = (
    "collision_count",
    "collision_at_fault_count",
    "offroad_count",
    "progress",
    "along_track_error_m",
    "distance_to_gt_m",
    "route_deviation_m",
    "speed_mps",
    "acceleration_mps2",
    "lateral_acceleration_mps2",
    "jerk_mps3",
    "yaw_rate_radps",
    "initial_fault",
)
"""Columns of the measure arrays; docs/concepts.md defines each."""

COLLISIONS, AT_FAULT, OFFROAD, PROGRESS, ALONG_TRACK, TO_GT, DEVIATION = range(7)
SPEED, ACCELERATION, LATERAL, JERK, YAW_RATE, INITIAL = range(7, 13)
STANDING_MPS = 0.05
SIDEWAYS_MPS = 0.1
"""Slower motion across the road is noise: a polyline route bends by some centimetres a step."""

# Bits of `Slots.end_on` and of the events that a step reports.
EVENT_COLLISION, EVENT_OFFROAD, EVENT_GOAL = 1, 2, 4


class Slots(NamedTuple):
    """Everything that changes while an episode runs; leading axis N."""

    scene: NDArray[np.int64]
    step: NDArray[np.int64]  # grid index of now
    handover: NDArray[np.int64]  # grid index of the handover
    state: NDArray[np.float64]  # [N,6] rig x, y, yaw, speed, acceleration, curvature; local
    trail: NDArray[np.float64]  # [N,K,6] state by grid index, the log before the handover
    segment: NDArray[np.int64]  # nearest route segment
    arc: NDArray[np.float64]  # [N,2] present and furthest arc length on the route
    reference: NDArray[np.float64]  # [N,2] arc length of the recorded drive at the handover and at its end
    hit: NDArray[np.bool_]  # [N,MAX_ACTORS] touched before
    off: NDArray[np.bool_]  # outside the area at the last step
    frozen: NDArray[np.bool_]  # the first end event is past: counts and progress stay, the rest is undefined
    measures: NDArray[np.float64]  # [N,M]
    valid: NDArray[np.bool_]  # [N,M]
    plan: NDArray[np.float64]  # [N,T,3] in the rig frame of `plan_pose`
    plan_pose: NDArray[np.float64]  # [N,3]
    control: NDArray[np.float64]  # [N,2] acceleration, steering; NaN where the plan counts


def make_slots(count: int, steps: int, plan_steps: int) -> Slots:
    """Zeroed slots for logs of up to `steps` grid samples."""
    return Slots(
        scene=np.zeros(count, np.int64),
        step=np.zeros(count, np.int64),
        handover=np.zeros(count, np.int64),
        state=np.zeros((count, 6)),
        trail=np.zeros((count, steps, 6)),
        segment=np.zeros(count, np.int64),
        arc=np.zeros((count, 2)),
        reference=np.zeros((count, 2)),
        hit=np.zeros((count, MAX_ACTORS), bool),
        off=np.zeros(count, bool),
        frozen=np.zeros(count, bool),
        measures=np.zeros((count, len(MEASURES))),
        valid=np.zeros((count, len(MEASURES)), bool),
        plan=np.zeros((count, plan_steps, 3)),
        plan_pose=np.zeros((count, 3)),
        control=np.full((count, 2), np.nan),
    )


@kernel
def actor_pose(bank, actor, step):
    """Centre x, y, yaw, speed of an actor (a row of bank.actors) at a grid index; exists tells if it is there."""
    row = bank.actors[actor]
    if step < row[1] or step > row[2]:
        return 0.0, 0.0, 0.0, 0.0, False
    sample = bank.tracks[row[0] + step]
    return sample[0], sample[1], sample[2], sample[3], True


@kernel
def project(bank, scene, segment, x, y, behind, ahead):
    """Nearest route point from `behind` m before to `ahead` m after a segment: (segment, arc length, lateral offset).

    The window keeps the projection on its own branch where a route passes itself; the offset is positive to the left.
    """
    first = bank.rows[scene, ROUTE]
    count = bank.rows[scene, ROUTE_N]
    route = bank.route[first : first + count]
    here = route[segment, 2]
    low = segment
    while low > 0 and here - route[low, 2] < behind:
        low -= 1
    best, best_arc, best_offset, best_segment = 1e18, 0.0, 0.0, segment
    k = low
    while k < count - 1 and route[k, 2] - here < ahead:
        dx, dy = route[k + 1, 0] - route[k, 0], route[k + 1, 1] - route[k, 1]
        length = route[k + 1, 2] - route[k, 2]
        px, py = x - route[k, 0], y - route[k, 1]
        t = (px * dx + py * dy) / (length * length)
        # Open at both ends of the route, so that behind and beyond it arc length goes on.
        if t < 0.0 and k > 0:
            t = 0.0
        if t > 1.0 and k < count - 2:
            t = 1.0
        ex, ey = px - t * dx, py - t * dy
        distance = ex * ex + ey * ey
        if distance < best - 1e-12:
            best, best_segment = distance, k
            best_arc = route[k, 2] + t * length
            best_offset = (dx * py - dy * px) / length
        k += 1
    return best_segment, best_arc, best_offset


@kernel
def _inside(bank, scene, state):
    row, number = bank.rows[scene], bank.numbers[scene]
    cos, sin = math.cos(state[2]), math.sin(state[2])
    offset = number[CENTRE_OFFSET]
    return box_inside_kernel(
        state[0] + offset * cos,
        state[1] + offset * sin,
        state[2],
        number[LENGTH],
        number[WIDTH],
        bank.segments[row[SEGMENT] : row[SEGMENT] + row[SEGMENT_N]],
        bank.band_offsets[row[BAND] : row[BAND] + row[BAND_N]],
        bank.band_segments[row[BAND_SEGMENT] : row[BAND_SEGMENT] + row[BAND_SEGMENT_N]],
        number[BAND_LOW],
        number[BAND_HEIGHT],
    )


@kernel
def _gaps(ego, ego_size, other, other_size):
    """Distances between two boxes along and across the ego (negative: they overlap on that axis), and along itself."""
    cos, sin = math.cos(ego[2]), math.sin(ego[2])
    dx, dy, turn = other[0] - ego[0], other[1] - ego[1], other[2] - ego[2]
    c, s = abs(math.cos(turn)), abs(math.sin(turn))
    along, across = dx * cos + dy * sin, dy * cos - dx * sin
    gap_x = abs(along) - (ego_size[0] + other_size[0] * c + other_size[1] * s) / 2.0
    gap_y = abs(across) - (ego_size[1] + other_size[0] * s + other_size[1] * c) / 2.0
    return gap_x, gap_y, along


@kernel
def at_fault(bank, scene, segment, ego_before, ego_after, ego_size, other_before, other_after, other_size):
    """Whether a new contact is the ego's doing. Boxes move from [3] (centre x, y, yaw) before to after in one step.

    A standing ego is never at fault; a moving one that touches something that stands is. Where both move, the axis of
    the ego on which the gap closed last tells front and rear from sides: at the front the ego is at fault, at the rear
    it is not, and side by side it is whoever came nearer across the road (the route; `segment` is the ego's).
    Source: nuPlan's collision classes, with the route in place of lanes.
    """
    ego_x, ego_y = ego_after[0] - ego_before[0], ego_after[1] - ego_before[1]
    turned = abs((ego_after[2] - ego_before[2] + math.pi) % (2.0 * math.pi) - math.pi)
    if math.hypot(ego_x, ego_y) < STANDING_MPS * STEP_S and turned < 1e-6:
        return False
    if math.hypot(other_after[0] - other_before[0], other_after[1] - other_before[1]) < STANDING_MPS * STEP_S:
        return True
    before_x, before_y, _ = _gaps(ego_before, ego_size, other_before, other_size)
    after_x, after_y, along = _gaps(ego_after, ego_size, other_after, other_size)
    # When in the step each gap closed; a gap that was closed before did not close last.
    closed_x = before_x / (before_x - after_x) if before_x > 0.0 else -1.0
    closed_y = before_y / (before_y - after_y) if before_y > 0.0 else -1.0
    cos, sin = math.cos(ego_after[2]), math.sin(ego_after[2])
    if closed_x > closed_y or (closed_x == closed_y and after_x >= after_y):
        return along > 0.0 and ego_x * cos + ego_y * sin > STANDING_MPS * STEP_S
    # The end of the ego that is beside the other also swings.
    end = min(max(along, -ego_size[0] / 2.0), ego_size[0] / 2.0)
    place = np.empty(4)
    for k in range(4):
        pose = (ego_before, ego_after, other_before, other_after)[k]
        reach = end if k < 2 else 0.0
        x, y = pose[0] + reach * math.cos(pose[2]), pose[1] + reach * math.sin(pose[2])
        _, _, place[k] = project(bank, scene, segment, x, y, 30.0, 40.0)
    side = 1.0 if place[3] >= place[1] else -1.0
    ego_nearer, other_nearer = side * (place[1] - place[0]), -side * (place[3] - place[2])
    return ego_nearer > SIDEWAYS_MPS * STEP_S and ego_nearer >= other_nearer


@kernel
def _contacts(bank, scene, segment, before, state, step, hit, count_new):
    """Mark and count actors that newly overlap the ego: (collisions, at fault)."""
    number, first, count = bank.numbers[scene], bank.rows[scene, ACTOR], bank.rows[scene, ACTOR_N]
    offset, length, width = number[CENTRE_OFFSET], number[LENGTH], number[WIDTH]
    cx, cy = state[0] + offset * math.cos(state[2]), state[1] + offset * math.sin(state[2])
    new, fault = 0, 0
    for a in range(count):
        if hit[a]:
            continue
        x, y, yaw, _, exists = actor_pose(bank, first + a, step)
        if not exists:
            continue
        size = bank.sizes[first + a]
        reach = (length + width + size[0] + size[1]) / 2.0
        if abs(x - cx) > reach or abs(y - cy) > reach:
            continue
        depth, _, _ = box_penetration_kernel(cx, cy, state[2], length, width, x, y, yaw, size[0], size[1])
        if depth <= CONTACT_TOLERANCE_M:
            continue
        hit[a] = True
        if count_new:
            new += 1
            bx, by, byaw, _, existed = actor_pose(bank, first + a, step - 1)
            if not existed:
                # It appeared where the ego is: a contact, and nobody's doing.
                continue
            ego_before = np.array(
                [before[0] + offset * math.cos(before[2]), before[1] + offset * math.sin(before[2]), before[2]]
            )
            if at_fault(
                bank,
                scene,
                segment,
                ego_before,
                np.array([cx, cy, state[2]]),
                np.array([length, width]),
                np.array([bx, by, byaw]),
                np.array([x, y, yaw]),
                size,
            ):
                fault += 1
        else:
            new += 1
    return new, fault


@kernel
def _report(bank, slots, i, acceleration_before, lateral_before):
    """Measures of the present step that are functions of the state."""
    scene, step = slots.scene[i], slots.step[i]
    state, values, valid = slots.state[i], slots.measures[i], slots.valid[i]
    row = bank.rows[scene]
    segment, arc, offset = project(bank, scene, slots.segment[i], state[0], state[1], 10.0, 40.0)
    slots.segment[i] = segment
    slots.arc[i, 0] = arc
    if slots.frozen[i]:
        return
    start, end = slots.reference[i]
    log = bank.log[row[LOG] : row[LOG] + row[LOG_N]]
    slots.arc[i, 1] = max(slots.arc[i, 1], arc)
    if end - start >= STANDING_REFERENCE_M:
        values[PROGRESS] = min(max((slots.arc[i, 1] - start) / (end - start), 0.0), 1.0)
    else:
        # To stay means not to have been away either.
        origin = log[slots.handover[i]]
        away = math.hypot(state[0] - origin[0], state[1] - origin[1]) > STANDING_REFERENCE_M
        values[PROGRESS] = 0.0 if away or (valid[PROGRESS] and values[PROGRESS] == 0.0) else 1.0
    valid[PROGRESS] = True
    known = step < row[LOG_N]
    valid[TO_GT] = known
    valid[ALONG_TRACK] = known
    if known:
        values[TO_GT] = math.hypot(state[0] - log[step, 0], state[1] - log[step, 1])
        _, log_arc, _ = project(bank, scene, segment, log[step, 0], log[step, 1], 80.0, 80.0)
        values[ALONG_TRACK] = arc - log_arc
    lateral = state[3] * state[3] * state[5]
    values[DEVIATION] = abs(offset)
    values[SPEED] = state[3]
    values[ACCELERATION] = state[4]
    values[LATERAL] = lateral
    values[YAW_RATE] = state[3] * state[5]
    values[JERK] = math.hypot(state[4] - acceleration_before, lateral - lateral_before) / STEP_S
    for m in (DEVIATION, SPEED, ACCELERATION, LATERAL, YAW_RATE):
        valid[m] = True


@kernel
def begin(bank, slots, rows, scenes, handovers, starts):
    """Put slots on the recorded drive at grid index `starts` (≤ handover; earlier ones are warm-up)."""
    for r in range(len(rows)):
        i, scene = rows[r], scenes[r]
        slots.scene[i], slots.step[i], slots.handover[i] = scene, starts[r], handovers[r]
        row = bank.rows[scene]
        log = bank.log[row[LOG] : row[LOG] + row[LOG_N]]
        for k in range(handovers[r] + 1):
            _log_state(log, k, slots.trail[i, k], bank.numbers[scene, WHEELBASE])
        slots.state[i] = slots.trail[i, starts[r]]
        slots.hit[i] = False
        slots.frozen[i] = False
        slots.control[i] = np.nan
        slots.measures[i] = 0.0
        slots.valid[i] = False
        # Along the log, so that each place is found on its own branch where the route passes itself.
        segment, arc, _ = project(bank, scene, 0, log[0, 0], log[0, 1], 0.0, 1e18)
        for k in range(len(log)):
            segment, arc, _ = project(bank, scene, segment, log[k, 0], log[k, 1], 10.0, 40.0)
            if k == starts[r]:
                slots.segment[i] = segment
            if k == handovers[r]:
                slots.reference[i, 0] = arc
        slots.reference[i, 1] = arc
        if starts[r] == handovers[r]:
            _hand_over(bank, slots, i)


@kernel
def _hand_over(bank, slots, i):
    """The initial sample: what overlaps or is outside now is an initial fault, not the policy's doing."""
    scene, state = slots.scene[i], slots.state[i]
    slots.off[i] = not _inside(bank, scene, state)
    touching, _ = _contacts(bank, scene, slots.segment[i], state, state, slots.step[i], slots.hit[i], False)
    slots.arc[i] = -1e18
    slots.measures[i] = 0.0
    slots.valid[i] = False
    for m in (COLLISIONS, AT_FAULT, OFFROAD, INITIAL):
        slots.valid[i, m] = True
    slots.measures[i, INITIAL] = 1.0 if (slots.off[i] or touching > 0) else 0.0
    _report(bank, slots, i, state[4], state[3] * state[3] * state[5])


@kernel
def _log_state(log, k, out, wheelbase):
    """State [6] of the recorded drive at a sample; acceleration and curvature by differences."""
    out[0], out[1], out[2], out[3] = log[k, 0], log[k, 1], log[k, 2], log[k, 3]
    a, b = max(k - 1, 0), min(k + 1, len(log) - 1)
    seconds = (b - a) * STEP_S
    out[4] = min((log[b, 3] - log[a, 3]) / seconds, ACCELERATION_MAX_MPS2)
    travelled = math.hypot(log[b, 0] - log[a, 0], log[b, 1] - log[a, 1])
    out[5] = (log[b, 2] - log[a, 2]) / travelled if travelled > 0.2 else 0.0
    limit = math.tan(0.6) / wheelbase
    out[5] = min(max(out[5], -limit), limit)


@kernel
def advance(bank, slots, rows, inner_steps, plan_step_s, end_on, last_steps, events):
    """Drive `rows` for `inner_steps` grid steps by their plans; stops a slot early at an end event or its last step.

    events [n] returns the EVENT bits that ended the slot, 0 otherwise; bits not in `end_on` freeze the measures only.
    """
    ahead = np.empty((64, 3))
    for r in range(len(rows)):
        i = rows[r]
        scene, state = slots.scene[i], slots.state[i]
        number = bank.numbers[scene]
        row = bank.rows[scene]
        events[r] = 0
        if slots.frozen[i]:
            # An end event is past: what counts up to it is kept, the rest is no longer defined.
            for m in range(ALONG_TRACK, INITIAL):
                slots.valid[i, m] = False
        for inner in range(inner_steps):
            if slots.step[i] < slots.handover[i]:
                slots.step[i] += 1
                slots.state[i] = slots.trail[i, slots.step[i]]
                segment, _, _ = project(bank, scene, slots.segment[i], state[0], state[1], 10.0, 40.0)
                slots.segment[i] = segment
                if slots.step[i] == slots.handover[i]:
                    _hand_over(bank, slots, i)
                    break
                continue
            before = state.copy()
            lateral_before = before[3] * before[3] * before[5]
            if not math.isnan(slots.control[i, 0]):
                acceleration = slots.control[i, 0]
                steering = min(max(slots.control[i, 1], -STEERING_MAX_RAD), STEERING_MAX_RAD)
                curvature = math.tan(steering) / number[WHEELBASE]
            else:
                # The plan in the present rig frame, from its first point that lies ahead in time.
                elapsed = inner * STEP_S
                plan, pose = slots.plan[i], slots.plan_pose[i]
                skip = math.floor(elapsed / plan_step_s + 1e-9)
                count = min(len(plan) - skip, 64)
                turn = pose[2] - state[2]
                cos, sin = math.cos(turn), math.sin(turn)
                wx, wy = pose[0] - state[0], pose[1] - state[1]
                ex = wx * math.cos(state[2]) + wy * math.sin(state[2])
                ey = wy * math.cos(state[2]) - wx * math.sin(state[2])
                for k in range(count):
                    p = plan[skip + k]
                    ahead[k, 0] = ex + cos * p[0] - sin * p[1]
                    ahead[k, 1] = ey + sin * p[0] + cos * p[1]
                    ahead[k, 2] = p[2] + turn
                acceleration, curvature = track(
                    ahead, count, (skip + 1) * plan_step_s - elapsed, plan_step_s, state[3], state[5]
                )
            drive(state, acceleration, curvature, number[WHEELBASE])
            slots.step[i] += 1
            slots.trail[i, slots.step[i]] = state
            happened = 0
            if not slots.frozen[i]:
                new, fault = _contacts(bank, scene, slots.segment[i], before, state, slots.step[i], slots.hit[i], True)
                slots.measures[i, COLLISIONS] += new
                slots.measures[i, AT_FAULT] += fault
                outside = not _inside(bank, scene, state)
                if outside and not slots.off[i]:
                    slots.measures[i, OFFROAD] += 1.0
                    happened |= EVENT_OFFROAD
                slots.off[i] = outside
                if new > 0:
                    happened |= EVENT_COLLISION
            _report(bank, slots, i, before[4], lateral_before)
            if not slots.frozen[i]:
                slots.valid[i, JERK] = True
                standing = slots.reference[i, 1] - slots.reference[i, 0] < STANDING_REFERENCE_M
                if not standing and slots.measures[i, PROGRESS] >= 0.99:
                    happened |= EVENT_GOAL
                slots.frozen[i] = happened != 0
            events[r] = happened & end_on
            if events[r] != 0 or slots.step[i] >= last_steps[r]:
                break
            if slots.step[i] + 1 > row[LOG_N] - 1:
                break


@kernel
def observe_ego(bank, slots, rows, history, mask, dynamics, stride):
    """ego_history_rig [n,H,7] with its mask, ego_dynamics_rig [n,7]; history rows lie `stride` grid steps apart."""
    steps = history.shape[1]
    for r in range(len(rows)):
        i = rows[r]
        state, now = slots.state[i], slots.step[i]
        cos, sin = math.cos(state[2]), math.sin(state[2])
        for h in range(steps):
            k = now - (steps - 1 - h) * stride
            mask[r, h] = k >= 0
            history[r, h] = 0.0
            history[r, h, 3] = 1.0
            if k < 0:
                continue
            past = slots.trail[i, k]
            dx, dy, turn = past[0] - state[0], past[1] - state[1], past[2] - state[2]
            history[r, h, 0] = dx * cos + dy * sin
            history[r, h, 1] = dy * cos - dx * sin
            history[r, h, 3] = math.cos(turn / 2.0)
            history[r, h, 6] = math.sin(turn / 2.0)
        dynamics[r] = 0.0
        dynamics[r, 0] = state[3]
        dynamics[r, 3] = state[4]
        dynamics[r, 4] = state[3] * state[3] * state[5]
        dynamics[r, 6] = state[3] * state[5]


@kernel
def observe_route(bank, slots, rows, route_rig, mask, spacing):
    """route_rig [n,R,2]: points `spacing` m apart along the route, from the ego's projection on."""
    for r in range(len(rows)):
        i = rows[r]
        state, scene = slots.state[i], slots.scene[i]
        first, count = bank.rows[scene, ROUTE], bank.rows[scene, ROUTE_N]
        route = bank.route[first : first + count]
        cos, sin = math.cos(state[2]), math.sin(state[2])
        segment, arc, _ = project(bank, scene, slots.segment[i], state[0], state[1], 10.0, 40.0)
        for p in range(route_rig.shape[1]):
            target = arc + p * spacing
            while segment < count - 2 and route[segment + 1, 2] < target:
                segment += 1
            t = (target - route[segment, 2]) / (route[segment + 1, 2] - route[segment, 2])
            mask[r, p] = t <= 1.0
            t = min(t, 1.0)
            dx = route[segment, 0] + t * (route[segment + 1, 0] - route[segment, 0]) - state[0]
            dy = route[segment, 1] + t * (route[segment + 1, 1] - route[segment, 1]) - state[1]
            route_rig[r, p, 0] = dx * cos + dy * sin
            route_rig[r, p, 1] = dy * cos - dx * sin


@kernel
def observe_actors(bank, slots, rows, actors_rig, mask):
    """actors_rig [n,A,9]: nearest first; x, y, yaw, velocity x, y, length, width, kind, signal state (0: none)."""
    wanted = actors_rig.shape[1]
    distances = np.empty(MAX_ACTORS)
    for r in range(len(rows)):
        i = rows[r]
        state, scene = slots.state[i], slots.scene[i]
        first, count = bank.rows[scene, ACTOR], bank.rows[scene, ACTOR_N]
        cos, sin = math.cos(state[2]), math.sin(state[2])
        for a in range(count):
            x, y, _, _, exists = actor_pose(bank, first + a, slots.step[i])
            distances[a] = (x - state[0]) ** 2 + (y - state[1]) ** 2 if exists else 1e18
        actors_rig[r] = 0.0
        for p in range(wanted):
            nearest, best = -1, 1e17
            for a in range(count):
                if distances[a] < best:
                    nearest, best = a, distances[a]
            mask[r, p] = nearest >= 0
            if nearest < 0:
                continue
            distances[nearest] = 1e18
            x, y, yaw, speed, _ = actor_pose(bank, first + nearest, slots.step[i])
            dx, dy = x - state[0], y - state[1]
            turn = (yaw - state[2] + math.pi) % (2.0 * math.pi) - math.pi
            out = actors_rig[r, p]
            out[0], out[1], out[2] = dx * cos + dy * sin, dy * cos - dx * sin, turn
            out[3], out[4] = speed * math.cos(turn), speed * math.sin(turn)
            out[5], out[6] = bank.sizes[first + nearest, 0], bank.sizes[first + nearest, 1]
            out[7] = bank.actors[first + nearest, 3]


@kernel
def recorded_plan(bank, slots, rows, plan_rig, mask, stride):
    """recorded_plan_rig [n,T,3] with its mask: the recorded drive from now on, `stride` grid steps a point."""
    for r in range(len(rows)):
        i = rows[r]
        state, row = slots.state[i], bank.rows[slots.scene[i]]
        log = bank.log[row[LOG] : row[LOG] + row[LOG_N]]
        cos, sin = math.cos(state[2]), math.sin(state[2])
        for t in range(plan_rig.shape[1]):
            k = slots.step[i] + (t + 1) * stride
            mask[r, t] = k < len(log)
            if k >= len(log):
                plan_rig[r, t] = 0.0
                if t > 0:
                    plan_rig[r, t] = plan_rig[r, t - 1]
                continue
            dx, dy = log[k, 0] - state[0], log[k, 1] - state[1]
            plan_rig[r, t, 0] = dx * cos + dy * sin
            plan_rig[r, t, 1] = dy * cos - dx * sin
            plan_rig[r, t, 2] = (log[k, 2] - state[2] + math.pi) % (2.0 * math.pi) - math.pi
