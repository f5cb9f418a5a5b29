"""What changes while episodes run: slots as structs of arrays, and the names of what is measured."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded.controller_gains import controller_gains
from alpagym_runtime.simulators.embedded.scene import MAX_ACTORS
from alpagym_runtime.simulators.embedded.vehicle import ALPASIM, EGO_COLUMNS, KINEMATIC

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
    "time_to_collision_s",
    "red_light_count",
)
"""Columns of the measure arrays; docs/concepts.md defines each."""

COLLISIONS, AT_FAULT, OFFROAD, PROGRESS, ALONG_TRACK, TO_GT, DEVIATION = range(7)
SPEED, ACCELERATION, LATERAL, JERK, YAW_RATE, INITIAL, TO_COLLISION, RED_LIGHTS = range(7, 15)

# Columns of `Slots.actors`: centre, heading, speed, and cos and sin of the heading, which many ask for.
ACTOR_X, ACTOR_Y, ACTOR_YAW, ACTOR_SPEED, ACTOR_COS, ACTOR_SIN = range(6)

# Bits of `Slots.end_on` and of the events that a step reports.
EVENT_COLLISION, EVENT_OFFROAD, EVENT_GOAL = 1, 2, 4


class Slots(NamedTuple):
    """Everything that changes while an episode runs; leading axis N, A places for actors."""

    scene: NDArray[np.int64]
    step: NDArray[np.int64]  # grid index of now
    start: NDArray[np.int64]  # grid index of the first tick, in warm-up
    handover: NDArray[np.int64]  # grid index of the handover
    state: NDArray[np.float64]  # [N,10] of the ego, columns in `vehicle`; local
    trail: NDArray[np.float64]  # [N,K,10] state by grid index, the log before the handover
    segment: NDArray[np.int64]  # nearest route segment
    arc: NDArray[np.float64]  # [N,2] present and furthest arc length on the route
    reference: NDArray[np.float64]  # [N,2] arc lengths between which progress is measured
    actors: NDArray[np.float64]  # [N,A,6] of the scene's road users now, columns below; local
    actors_before: NDArray[np.float64]  # [N,A,4] x, y, yaw, speed one inner step ago; NaN: it was not there
    present: NDArray[np.bool_]  # [N,A] whether each exists now
    reactive: NDArray[np.bool_]  # traffic reacts in this slot, if the scene has agents
    agents: NDArray[np.float64]  # [N,A,8] what `traffic` keeps of each agent
    leader: NDArray[np.int64]  # [N,A] whom each agent follows
    hit: NDArray[np.bool_]  # [N,A] touched before
    off: NDArray[np.bool_]  # outside the area at the last step
    frozen: NDArray[np.bool_]  # the first end event is past: counts and progress stay
    measures: NDArray[np.float64]  # [N,M]
    valid: NDArray[np.bool_]  # [N,M]
    plan: NDArray[np.float64]  # [N,T,3] in the rig frame of `plan_pose`
    plan_pose: NDArray[np.float64]  # [N,3]
    plan_age: NDArray[np.int64]  # grid steps that the plan was old when it was sent
    control: NDArray[np.float64]  # [N,2] acceleration, steering; NaN where the plan counts
    vehicle: NDArray[np.int64]  # KINEMATIC or ALPASIM
    quirks: NDArray[np.bool_]  # measures and observations as AlpaSim has them
    longitudinal: NDArray[np.float64]  # of `controller_gains`, shared by all slots
    lateral: NDArray[np.float64]


def make_slots(
    count: int,
    steps: int,
    plan_steps: int,
    vehicle: str = "kinematic",
    quirks: bool = False,
    actors: int = MAX_ACTORS,
) -> Slots:
    """Zeroed slots for logs of up to `steps` grid samples and so many actors; `vehicle` is "kinematic" or "alpasim"."""
    gains = controller_gains()
    return Slots(
        scene=np.zeros(count, np.int64),
        step=np.zeros(count, np.int64),
        start=np.zeros(count, np.int64),
        handover=np.zeros(count, np.int64),
        state=np.zeros((count, EGO_COLUMNS)),
        trail=np.zeros((count, steps, EGO_COLUMNS)),
        segment=np.zeros(count, np.int64),
        arc=np.zeros((count, 2)),
        reference=np.zeros((count, 2)),
        actors=np.zeros((count, actors, 6)),
        actors_before=np.zeros((count, actors, 4)),
        present=np.zeros((count, actors), bool),
        reactive=np.zeros(count, bool),
        agents=np.zeros((count, actors, 8)),
        leader=np.zeros((count, actors), np.int64),
        hit=np.zeros((count, actors), bool),
        off=np.zeros(count, bool),
        frozen=np.zeros(count, bool),
        measures=np.zeros((count, len(MEASURES))),
        valid=np.zeros((count, len(MEASURES)), bool),
        plan=np.zeros((count, plan_steps, 3)),
        plan_pose=np.zeros((count, 3)),
        plan_age=np.zeros(count, np.int64),
        control=np.full((count, 2), np.nan),
        vehicle=np.full(count, {"kinematic": KINEMATIC, "alpasim": ALPASIM}[vehicle], np.int64),
        quirks=np.full(count, quirks),
        longitudinal=gains.longitudinal,
        lateral=gains.lateral,
    )


def with_room(slots: Slots, steps: int, actors: int) -> Slots:
    """The slots, or a copy with longer arrays, for logs of at least `steps` grid samples and for so many actors."""
    grown = {}
    for name in ("trail", "actors", "actors_before", "present", "agents", "leader", "hit"):
        old = getattr(slots, name)
        needed, length = (steps, 2 * steps) if name == "trail" else (actors, -(-actors // 8) * 8)
        if needed > old.shape[1]:
            grown[name] = np.zeros((len(old), length, *old.shape[2:]), old.dtype)
            grown[name][:, : old.shape[1]] = old
    return slots._replace(**grown) if grown else slots
