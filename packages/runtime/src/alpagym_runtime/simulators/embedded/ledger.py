"""What the simulator keeps of each slot's episode beside the world, and the kernels that move it: one call a batch.

Of a step at one slot, numpy calls cost more than the world itself; so sending, driving and delivering are one compiled
call each.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.kernels import inlined, kernel
from alpagym_runtime.simulators.embedded.observe import observe_actors, observe_ego, observe_route
from alpagym_runtime.simulators.embedded.scene import STEP_US
from alpagym_runtime.simulators.embedded.scene_bank import ACTOR_N
from alpagym_runtime.simulators.embedded.state import EVENT_COLLISION, EVENT_GOAL, EVENT_OFFROAD, MEASURES
from alpagym_runtime.simulators.embedded.world import advance
from alpagym_runtime.types import Ended

IDLE, DELIVERED, DRIVING, WAITING = range(4)
"""Phases of a slot: it has no episode, waits for a decision, has one and drives, waits to be delivered."""

PLAN_LIMIT = 1e4
"""m and rad; plans are cut to this, so that the controller's sums of sixth powers stay finite."""

RUNNING, COLLISION, OFFROAD, GOAL, SCORED, HORIZON, SCENE_END, FAILED = (int(code) for code in Ended)


class Ledger(NamedTuple):
    """Leading axis N, slots; K samples, M measures."""

    phase: NDArray[np.int64]
    ended: NDArray[np.int64]  # codes of `Ended`
    last_step: NDArray[np.int64]  # grid index at which the recording ends
    horizon_step: NDArray[np.int64]  # grid index at which the horizon is reached
    samples: NDArray[np.int64]  # how many of the series' rows count
    previous: NDArray[np.float64]  # [N,M] measures one tick earlier
    previous_valid: NDArray[np.bool_]
    series: NDArray[np.float64]  # [N,K,M] measures since the handover
    series_valid: NDArray[np.bool_]
    series_time: NDArray[np.int64]  # [N,K] us


def make_ledger(slots: int, samples: int = 64) -> Ledger:
    """A ledger of idle slots with room for `samples`."""
    one, many = (slots, len(MEASURES)), (slots, samples, len(MEASURES))
    return Ledger(
        phase=np.zeros(slots, np.int64),
        ended=np.zeros(slots, np.int64),
        last_step=np.zeros(slots, np.int64),
        horizon_step=np.zeros(slots, np.int64),
        samples=np.zeros(slots, np.int64),
        previous=np.zeros(one),
        previous_valid=np.zeros(one, bool),
        series=np.zeros(many),
        series_valid=np.zeros(many, bool),
        series_time=np.zeros((slots, samples), np.int64),
    )


def with_room(ledger: Ledger, samples: int) -> Ledger:
    """The ledger, or a copy with more room, for at least `samples`."""
    have = ledger.series.shape[1]
    if samples <= have:
        return ledger
    grown = {}
    for name in ("series", "series_valid", "series_time"):
        old = getattr(ledger, name)
        grown[name] = np.zeros((len(old), 2 * samples, *old.shape[2:]), old.dtype)
        grown[name][:, :have] = old
    return ledger._replace(**grown)


@inlined
def _sample(slots, ledger, i):
    """Keep the present measures of a slot at or after its handover."""
    if slots.step[i] < slots.handover[i]:
        return
    k = ledger.samples[i]
    for m in range(slots.measures.shape[1]):
        ledger.series[i, k, m], ledger.series_valid[i, k, m] = slots.measures[i, m], slots.valid[i, m]
    ledger.series_time[i, k] = slots.step[i] * STEP_US
    ledger.samples[i] = k + 1


@kernel
def begin_from(bank, begun, places, slots, ledger, rows, scenes, last_steps, horizon_steps):
    """Put slots where the slots `places` of `begun` are, and begin their books."""
    for r in range(len(rows)):
        i, j, scene = rows[r], places[r], scenes[r]
        count = bank.rows[scene, ACTOR_N]
        slots.scene[i], slots.step[i], slots.start[i] = scene, begun.step[j], begun.start[j]
        slots.handover[i], slots.segment[i] = begun.handover[j], begun.segment[j]
        slots.off[i], slots.frozen[i] = begun.off[j], begun.frozen[j]
        slots.state[i], slots.arc[i], slots.reference[i] = begun.state[j], begun.arc[j], begun.reference[j]
        slots.measures[i], slots.valid[i], slots.control[i] = begun.measures[j], begun.valid[j], np.nan
        known = begun.handover[j] + 1
        slots.trail[i, :known] = begun.trail[j, :known]
        slots.actors[i, :count], slots.actors_before[i, :count] = (
            begun.actors[j, :count],
            begun.actors_before[j, :count],
        )
        slots.agents[i, :count], slots.leader[i, :count] = begun.agents[j, :count], begun.leader[j, :count]
        slots.present[i] = False
        slots.present[i, :count], slots.hit[i, :count] = begun.present[j, :count], begun.hit[j, :count]
        ledger.last_step[i], ledger.horizon_step[i] = last_steps[r], horizon_steps[r]
        ledger.samples[i] = 0
        ledger.previous_valid[i] = False
        _sample(slots, ledger, i)


@kernel
def take_decisions(
    plan,
    plan_pose,
    plan_age,
    control,
    state,
    measures,
    valid,
    step,
    handover,
    phase,
    ended,
    previous,
    previous_valid,
    rows,
    plans,
    controls,
):
    """Decisions of slots that were delivered and run on: plans [n,T,3], controls [n,2] or [0,2] where plans count.

    The rest are arrays of `Slots` and `Ledger`, one by one: handing over both costs 4 us. Returns False, and does
    nothing, if a slot does not wait for a decision.
    """
    for r in range(len(rows)):
        if phase[rows[r]] != DELIVERED or ended[rows[r]] != RUNNING:
            return False
    for r in range(len(rows)):
        i = rows[r]
        for t in range(plans.shape[1]):
            for k in range(3):
                value = plans[r, t, k]
                plan[i, t, k] = value if math.isnan(value) else min(max(value, -PLAN_LIMIT), PLAN_LIMIT)
        for k in range(3):
            plan_pose[i, k] = state[i, k]
        plan_age[i] = 0
        for k in range(2):
            control[i, k] = controls[r, k] if len(controls) > 0 else np.nan
        phase[i] = DRIVING
        counts = step[i] >= handover[i]
        for m in range(measures.shape[1]):
            previous[i, m], previous_valid[i, m] = measures[i, m], counts and valid[i, m]
    return True


@kernel
def _by_scene(scene, rows, scenes):
    """The rows, those of one scene together: its lanes stay in the processor's cache."""
    if len(rows) < 3:
        return rows
    place, out = np.zeros(scenes + 1, np.int64), np.empty(len(rows), np.int64)
    for i in rows:
        place[scene[i] + 1] += 1
    for k in range(1, scenes):
        place[k] += place[k - 1]
    for i in rows:
        out[place[scene[i]]] = i
        place[scene[i]] += 1
    return out


@kernel
def drive(bank, slots, ledger, rows, stop, inner_steps, plan_step_s, end_on):
    """One tick of slots that have decisions; those to stop end as SCORED and stay where they are."""
    moving, count = np.empty(len(rows), np.int64), 0
    for r in range(len(rows)):
        if stop[r]:
            ledger.ended[rows[r]] = SCORED
        else:
            moving[count] = rows[r]
            count += 1
    moving = _by_scene(slots.scene, moving[:count], len(bank.rows))
    last, events = np.empty(count, np.int64), np.empty(count, np.int64)
    for r in range(count):
        i = moving[r]
        last[r] = min(ledger.last_step[i], max(ledger.horizon_step[i], slots.handover[i]))
    advance(bank, slots, moving, inner_steps, plan_step_s, end_on, last, events)
    for r in range(count):
        i, code = moving[r], RUNNING
        if events[r] & EVENT_COLLISION:
            code = COLLISION
        elif events[r] & EVENT_OFFROAD:
            code = OFFROAD
        elif events[r] & EVENT_GOAL:
            code = GOAL
        elif slots.step[i] >= ledger.horizon_step[i]:
            code = HORIZON
        elif slots.step[i] >= ledger.last_step[i]:
            code = SCENE_END
        ledger.ended[i] = code
        _sample(slots, ledger, i)


@kernel
def deliver(
    bank,
    slots,
    ledger,
    sent,
    stop,
    inner_steps,
    plan_step_s,
    end_on,
    rows,
    good,
    tick,
    time_us,
    ended,
    controls,
    values,
    valid,
    ego,
    route,
    actors,
):
    """Drive what was `sent`, then fill a batch's columns for rows [n] that wait and observations of the good ones [g].

    values, valid: [2,M,n], now and one tick earlier. ego, route, actors: what the kernels of `observe` fill, and their
    last argument; with no columns where nobody reads it.
    """
    drive(bank, slots, ledger, sent, stop, inner_steps, plan_step_s, end_on)
    for r in range(len(rows)):
        i = rows[r]
        well = ledger.ended[i] != FAILED
        since = slots.step[i] - slots.handover[i] if well else 0
        # Away from the handover, which alone is 0: a tick at either end may be cut short.
        tick[r] = since // inner_steps if since < 0 else -(-since // inner_steps)
        time_us[r], ended[r] = slots.step[i] * STEP_US if well else 0, ledger.ended[i]
        controls[r] = since >= 0 and well
        ledger.phase[i] = DELIVERED if ledger.ended[i] == RUNNING else IDLE
    for m in range(values.shape[1]):
        for r in range(len(rows)):
            i, well = rows[r], ended[r] != FAILED
            values[0, m, r], valid[0, m, r] = slots.measures[i, m], well and slots.valid[i, m]
            values[1, m, r], valid[1, m, r] = ledger.previous[i, m], well and ledger.previous_valid[i, m]
    observe_ego(bank, slots, good, ego[0], ego[1], ego[2], ego[3])
    if route[0].shape[1] > 0:
        observe_route(bank, slots, good, route[0], route[1], route[2])
    if actors[0].shape[1] > 0:
        observe_actors(bank, slots, good, actors[0], actors[1])
