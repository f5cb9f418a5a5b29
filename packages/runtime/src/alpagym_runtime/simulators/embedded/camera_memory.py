"""Where everybody was at a slot's last steps, and which of its frames are seen now; compiled, for all slots at once.

A ring holds the last R steps of each slot: `known` [N,R] which step a place holds, `crowd` [N,R,A,5] the road users'
x, y m, yaw rad, speed m/s (local) and 1 if their brake lamps shine, `there` [N,R,A] whether they existed.
"""

from __future__ import annotations

import math

import numpy as np

from alpagym_runtime.kernels import kernel
from alpagym_runtime.simulators.embedded.camera_config import BRAKES_MPS2, STEP_US

NEVER = -(10**9)
STANDS_MPS = 0.2
STEPS_A_SECOND = 1e6 / STEP_US


@kernel
def remember(rows, step, start, actors, before, present, known, crowd, there):
    """Keep where everybody is at `step` [N] in slots `rows`, and was a step before where that is not known.

    `actors` [N,A,>=4] and `before` [N,A,4] are x, y, yaw, speed now and a step ago (NaN: was not there).
    """
    ring = known.shape[1]
    for row in rows:
        now = step[row]
        at, earlier = now % ring, (now - 1) % ring
        linked = known[row, earlier] == now - 1
        fill = not linked and now - 1 >= start[row]
        for a in range(present.shape[1]):
            here, speed = present[row, a], actors[row, a, 3]
            slower = (before[row, a, 3] - speed) * STEPS_A_SECOND > BRAKES_MPS2
            braked = slower if fill else linked and crowd[row, earlier, a, 4] > 0.0
            if fill:
                was = here and not math.isnan(before[row, a, 0])
                there[row, earlier, a] = was
                for k in range(4):
                    crowd[row, earlier, a, k] = before[row, a, k] if was else 0.0
                crowd[row, earlier, a, 4] = 1.0 if slower else 0.0
            there[row, at, a] = here
            for k in range(4):
                crowd[row, at, a, k] = actors[row, a, k] if here else 0.0
            # Who stands keeps the lamps that shone.
            crowd[row, at, a, 4] = 1.0 if slower or (speed < STANDS_MPS and braked) else 0.0
        if fill:
            known[row, earlier] = now - 1
        known[row, at] = now


@kernel
def choose(rows, step, back, period, known, held, steps, places, old, new):
    """Which frames slots `rows` see at `step` [N], and where they are kept; returns how many are new.

    Args:
        rows: [n] slots.
        step: [N] the slots' present steps.
        back: [F] how many steps ago each frame is wanted, oldest first; the newest frame at or before then counts.
        period: steps between frames.
        known: [N,R] steps that can be rendered.
        held: [N,F] steps of the frames that are kept; updated.
        steps: [n,F] becomes each frame's step.
        places: [n,F] becomes its place among those kept.
        old: [n,F] becomes whether it stands in for an older one that there is not.
        new: [n*F,3] becomes slot, place and step of each frame that is not kept yet.

    """
    count, frames = 0, len(back)
    for r in range(len(rows)):
        row = rows[r]
        for f in range(frames):
            wanted = (step[row] - back[f]) // period * period
            best, oldest = NEVER, -NEVER
            for k in range(known.shape[1]):
                there = known[row, k]
                if there < 0 or there % period != 0:
                    continue
                oldest = min(oldest, there)
                if best < there <= wanted:
                    best = there
            old[r, f] = best == NEVER
            steps[r, f] = oldest if best == NEVER else best
        for f in range(frames):
            place, free = -1, -1
            for k in range(frames):
                if held[row, k] == steps[r, f]:
                    place = k
                if free < 0 and not (steps[r] == held[row, k]).any():
                    free = k
            if place < 0:
                # A new frame takes the place of one that is not seen any more.
                place = free
                held[row, place] = steps[r, f]
                new[count, 0], new[count, 1], new[count, 2] = row, place, steps[r, f]
                count += 1
            places[r, f] = place
    return count


def empty_ring(slots: int, length: int, actors: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`known`, `crowd` and `there`, with nothing in them."""
    return (
        np.full((slots, length), NEVER, np.int64),
        np.zeros((slots, length, actors, 5)),
        np.zeros((slots, length, actors), bool),
    )
