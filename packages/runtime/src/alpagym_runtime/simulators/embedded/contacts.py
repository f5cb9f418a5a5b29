"""Collisions, whose fault they are, and whether the ego is on the road."""

from __future__ import annotations

import math

import numpy as np

from alpagym_runtime.geometry import CONTACT_TOLERANCE_M
from alpagym_runtime.geometry_kernels import box_inside_kernel, box_penetration_kernel
from alpagym_runtime.kernels import inlined, kernel
from alpagym_runtime.simulators.embedded.route import project
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
    SEGMENT,
    SEGMENT_N,
    WIDTH,
)
from alpagym_runtime.simulators.embedded.state import (
    ACTOR_COS,
    ACTOR_SIN,
    ACTOR_SPEED,
    ACTOR_X,
    ACTOR_Y,
    ACTOR_YAW,
)
from alpagym_runtime.simulators.embedded.vehicle import EGO_SLIP, EGO_SPEED, STEP_S

STANDING_MPS = 0.05
SIDEWAYS_MPS = 0.1
"""Slower motion across the road is noise: a polyline route bends by some centimetres a step."""
FORESIGHT_S = 5.0
"""Collisions later than this do not count for the time to collision."""


@inlined
def on_the_road(bank, scene, state):
    """Whether the box of an ego at state (rig x, y, yaw first) lies inside the scene's area."""
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


@inlined
def new_contacts(bank, slots, i, before, count_new):
    """Mark and count road users that newly overlap the ego: (collisions, at fault); `before`: its state a step ago."""
    scene, state, hit = slots.scene[i], slots.state[i], slots.hit[i]
    actors, present = slots.actors[i], slots.present[i]
    number, first, count = bank.numbers[scene], bank.rows[scene, ACTOR], bank.rows[scene, ACTOR_N]
    offset, length, width = number[CENTRE_OFFSET], number[LENGTH], number[WIDTH]
    cx, cy = state[0] + offset * math.cos(state[2]), state[1] + offset * math.sin(state[2])
    new, fault = 0, 0
    for a in range(count):
        x, y = actors[a, ACTOR_X], actors[a, ACTOR_Y]
        reach = (length + width + bank.sizes[first + a, 0] + bank.sizes[first + a, 1]) / 2.0
        if abs(x - cx) > reach or abs(y - cy) > reach or hit[a] or not present[a]:
            continue
        yaw, size = actors[a, ACTOR_YAW], bank.sizes[first + a]
        depth, _, _ = box_penetration_kernel(cx, cy, state[2], length, width, x, y, yaw, size[0], size[1])
        if depth <= CONTACT_TOLERANCE_M:
            continue
        hit[a] = True
        if count_new:
            new += 1
            if math.isnan(slots.actors_before[i, a, 0]):
                # It appeared where the ego is: a contact, and nobody's doing.
                continue
            ego_before = np.array(
                [before[0] + offset * math.cos(before[2]), before[1] + offset * math.sin(before[2]), before[2]]
            )
            if at_fault(
                bank,
                scene,
                slots.segment[i],
                ego_before,
                np.array([cx, cy, state[2]]),
                np.array([length, width]),
                slots.actors_before[i, a, :3],
                np.array([x, y, yaw]),
                size,
            ):
                fault += 1
        else:
            new += 1
    return new, fault


@kernel
def seconds_to_contact(ax, ay, ayaw, alength, awidth, bx, by, byaw, blength, bwidth, vx, vy):
    """When two boxes begin to overlap if b moves at (vx, vy) m/s as a sees it and neither turns; 1e18 for never.

    Boxes are apart while one of their four axes separates them, so they overlap while no axis does.
    """
    enter, leave = 0.0, 1e18
    ca, sa, cb, sb = math.cos(ayaw), math.sin(ayaw), math.cos(byaw), math.sin(byaw)
    cross, dot = abs(ca * sb - sa * cb), abs(ca * cb + sa * sb)
    dx, dy = bx - ax, by - ay
    for axis in range(4):
        if axis == 0:
            ux, uy, reach = ca, sa, (alength + blength * dot + bwidth * cross) / 2.0
        elif axis == 1:
            ux, uy, reach = -sa, ca, (awidth + blength * cross + bwidth * dot) / 2.0
        elif axis == 2:
            ux, uy, reach = cb, sb, (blength + alength * dot + awidth * cross) / 2.0
        else:
            ux, uy, reach = -sb, cb, (bwidth + alength * cross + awidth * dot) / 2.0
        gap, closing = dx * ux + dy * uy, vx * ux + vy * uy
        if abs(closing) < 1e-12:
            if abs(gap) >= reach - CONTACT_TOLERANCE_M:
                return 1e18
            continue
        first, last = (-reach - gap) / closing, (reach - gap) / closing
        if first > last:
            first, last = last, first
        enter, leave = max(enter, first), min(leave, last)
    return enter if enter < leave - 1e-12 else 1e18


@inlined
def time_to_collision(bank, slots, i):
    """Seconds until the ego's box meets the first of the others', all at their present velocities; 1e18: not soon."""
    scene, state = slots.scene[i], slots.state[i]
    number, first = bank.numbers[scene], bank.rows[scene, ACTOR]
    cos, sin = math.cos(state[2]), math.sin(state[2])
    x, y = state[0] + number[CENTRE_OFFSET] * cos, state[1] + number[CENTRE_OFFSET] * sin
    speed, slip = state[EGO_SPEED], state[EGO_SLIP]
    ego_vx, ego_vy, length, width = speed * cos - slip * sin, speed * sin + slip * cos, number[LENGTH], number[WIDTH]
    soonest, actors, present = 1e18, slots.actors[i], slots.present[i]
    for a in range(bank.rows[scene, ACTOR_N]):
        if not present[a]:
            continue
        pace, long, wide = actors[a, ACTOR_SPEED], bank.sizes[first + a, 0], bank.sizes[first + a, 1]
        vx, vy = pace * actors[a, ACTOR_COS] - ego_vx, pace * actors[a, ACTOR_SIN] - ego_vy
        other_x, other_y, other_yaw = actors[a, ACTOR_X], actors[a, ACTOR_Y], actors[a, ACTOR_YAW]
        dx, dy = other_x - x, other_y - y
        reach = (length + width + long + wide) / 2.0
        if max(abs(dx) - abs(vx) * FORESIGHT_S, abs(dy) - abs(vy) * FORESIGHT_S) > reach:
            continue
        # Circles around both boxes that are apart, and part or pass by, spare the exact test.
        if dx * dx + dy * dy > reach * reach:
            passing = dx * vy - dy * vx
            if dx * vx + dy * vy >= 0.0 or passing * passing > reach * reach * (vx * vx + vy * vy):
                continue
        seconds = seconds_to_contact(x, y, state[2], length, width, other_x, other_y, other_yaw, long, wide, vx, vy)
        soonest = min(soonest, seconds)
    return soonest if soonest <= FORESIGHT_S else 1e18
