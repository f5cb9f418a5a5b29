"""Observations and recorded plans in the rig frame."""

from __future__ import annotations

import math

import numpy as np

from alpagym_runtime.kernels import kernel
from alpagym_runtime.simulators.embedded.dynamic_vehicle import body_acceleration
from alpagym_runtime.simulators.embedded.route import project
from alpagym_runtime.simulators.embedded.scene import MAX_ACTORS
from alpagym_runtime.simulators.embedded.scene_bank import (
    ACTOR,
    ACTOR_N,
    LOG,
    LOG_N,
    ROUTE,
    ROUTE_N,
    WHEELBASE,
)
from alpagym_runtime.simulators.embedded.vehicle import (
    EGO_ACCELERATION,
    EGO_LATERAL,
    EGO_SLIP,
    EGO_SPEED,
    EGO_YAW_RATE,
    KINEMATIC,
)

QUIRK_SPACING_M = 80.0 / 19.0
QUIRK_SEGMENT_M = (3.5, 4.5)


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
        dynamics[r, 0], dynamics[r, 1] = state[EGO_SPEED], state[EGO_SLIP]
        dynamics[r, 3], dynamics[r, 4] = state[EGO_ACCELERATION], state[EGO_LATERAL]
        dynamics[r, 6] = state[EGO_YAW_RATE]
        if slots.quirks[i]:
            if slots.vehicle[i] != KINEMATIC:
                wheelbase = bank.numbers[slots.scene[i], WHEELBASE]
                dynamics[r, 3], dynamics[r, 4] = body_acceleration(state, wheelbase)
            if slots.start[i] < slots.handover[i] and now <= slots.handover[i]:
                dynamics[r] = 0.0


@kernel
def observe_route(bank, slots, rows, route_rig, mask, spacing):
    """route_rig [n,R,2]: points `spacing` m apart along the route, from the ego's projection on.

    As AlpaSim sends it: 80/19 m apart, NaN from the first segment on that is not 3.5 to 4.5 m long.
    """
    for r in range(len(rows)):
        i = rows[r]
        state, scene = slots.state[i], slots.scene[i]
        first, count = bank.rows[scene, ROUTE], bank.rows[scene, ROUTE_N]
        route = bank.route[first : first + count]
        cos, sin = math.cos(state[2]), math.sin(state[2])
        segment, arc, _ = project(bank, scene, slots.segment[i], state[0], state[1], 10.0, 40.0)
        for p in range(route_rig.shape[1]):
            target = arc + p * (QUIRK_SPACING_M if slots.quirks[i] else spacing)
            while segment < count - 2 and route[segment + 1, 2] < target:
                segment += 1
            t = (target - route[segment, 2]) / (route[segment + 1, 2] - route[segment, 2])
            mask[r, p] = t <= 1.0
            t = min(t, 1.0)
            dx = route[segment, 0] + t * (route[segment + 1, 0] - route[segment, 0]) - state[0]
            dy = route[segment, 1] + t * (route[segment + 1, 1] - route[segment, 1]) - state[1]
            route_rig[r, p, 0] = dx * cos + dy * sin
            route_rig[r, p, 1] = dy * cos - dx * sin
            if slots.quirks[i] and p > 0:
                ax, ay = route_rig[r, p, 0] - route_rig[r, p - 1, 0], route_rig[r, p, 1] - route_rig[r, p - 1, 1]
                # A NaN before it makes the comparison false.
                if not QUIRK_SEGMENT_M[0] <= math.hypot(ax, ay) <= QUIRK_SEGMENT_M[1]:
                    route_rig[r, p] = np.nan
                    mask[r, p] = False


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
            actor = slots.actors[i, a]
            away = (actor[0] - state[0]) ** 2 + (actor[1] - state[1]) ** 2
            distances[a] = away if slots.present[i, a] else 1e18
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
            x, y, yaw, speed = slots.actors[i, nearest, :4]
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
