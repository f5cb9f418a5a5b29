"""What a drive misses that an event ended: the car stands where it was, the recorded one drives on.

In AlpaSim a drive goes on after a contact, so the distance to the recording goes on too. Here it ends, and whatever
averages that distance over a drive would otherwise be best for the car that crashes first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded.scene import STEP_US
from alpagym_runtime.simulators.embedded.state import PROGRESS, Slots
from alpagym_runtime.types import GOAL_PROGRESS, MeasureSeries

STRANDED = "distance_to_gt_stranded_m"


def stranded(
    slots: Slots, slot: int, log: NDArray[np.float64], distance: MeasureSeries, last_step: int, inner_steps: int
) -> MeasureSeries:
    """Distance in m from where a contact or the road's edge ended a drive to the recording, once a control period.

    Args:
        slots: the state as the drive ended.
        slot: whose drive.
        log: [K,4] of the recorded drive by grid index; its first two columns are x and y.
        distance: the drive's own `distance_to_gt_m`; its last valid sample is that of the event.
        last_step: grid index of the horizon.
        inner_steps: grid steps of a control period.

    Returns:
        Samples after the event up to the horizon or the recording's end; none for a drive that nothing ended, or
        that reached its goal.

    """
    known = np.flatnonzero(distance.valid)
    steps = np.zeros(0, np.int64)
    event = int(slots.step[slot])
    if slots.frozen[slot] and len(known) and slots.measures[slot, PROGRESS] < GOAL_PROGRESS:
        # The sample bears the time of its tick's end; the event may lie before it, where the distance was this one.
        event -= int(distance.time_us[-1] - distance.time_us[known[-1]]) // STEP_US
        period = np.arange(max(event - inner_steps + 1, 0), event + 1)
        there = np.hypot(*(log[period, :2] - slots.trail[slot, period, :2]).T)
        event = int(period[np.abs(there - distance.value[known[-1]]).argmin()])
        steps = np.arange(event + inner_steps, min(last_step, len(log) - 1) + 1, inner_steps)
    away = log[steps, :2] - slots.trail[slot, event, :2]
    return MeasureSeries(steps * STEP_US, np.hypot(away[:, 0], away[:, 1]), np.ones(len(steps), bool), "mean")
