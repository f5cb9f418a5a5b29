"""Keeps what AlpaSim's measures need of each running episode; only where some of them are asked for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded.measures_alpasim import Record, Sample
from alpagym_runtime.simulators.embedded.reported_poses import ego_poses, others_between, reported_times
from alpagym_runtime.simulators.embedded.scene import STEP_US, Scene
from alpagym_runtime.simulators.embedded.state import Slots


class Recorder:
    """One `Record` a slot, filled as the episode goes."""

    def __init__(self, period_us: int, plan_step_us: int, interval_us: int) -> None:
        self._period_us, self._plan_step_us, self._interval_us = period_us, plan_step_us, interval_us
        self._records: dict[int, Record] = {}
        self._sizes: dict[int, NDArray[np.float64]] = {}

    @property
    def active(self) -> bool:
        """Whether it keeps anything."""
        return bool(self._records)

    def begin(self, slot: int, scene: Scene, start: int, handover: int) -> None:
        """An episode starts at grid index `start`, `handover` is where the policy takes over."""
        vehicle = scene.vehicle
        # AlpaSim logs the recording's first pose, then one a tick.
        logged = [0] if start > 0 else []
        logged += range(start * STEP_US, handover * STEP_US, self._period_us)
        self._sizes[slot] = scene.actors.size
        self._records[slot] = Record(
            log=scene.ego_log[:, :3],
            area=scene.area,
            lane_map=scene.lane_map,
            size=(vehicle.length_m, vehicle.width_m),
            centre_offset_m=vehicle.centre_offset_m,
            plan_step_us=self._plan_step_us,
            period_us=self._period_us,
            logged=logged,
        )

    def plans(self, slots: NDArray[np.int64], state: Slots, plan_rig: NDArray[np.floating]) -> None:
        """Decisions [n,T,3] made now, before the world moves on."""
        for slot, plan in zip(slots.tolist(), plan_rig, strict=True):
            if slot in self._records:
                made = int(state.step[slot]) * STEP_US, state.state[slot, :3].copy(), np.asarray(plan, np.float64)
                self._records[slot].plans.append(made)

    def samples(self, slots: NDArray[np.int64], state: Slots) -> None:
        """The world now, of slots at or after their handover."""
        for slot in slots[state.step[slots] >= state.handover[slots]].tolist():
            if slot not in self._records:
                continue
            sizes, samples = self._sizes[slot], self._records[slot].samples
            here = np.flatnonzero(state.present[slot, : len(sizes)])
            now = Sample(int(state.step[slot]) * STEP_US, here, state.actors[slot, here, :3].copy(), sizes[here])
            if samples:
                samples += _between(samples[-1], now, self._interval_us)
            samples.append(now)

    def finish(self, slot: int, state: Slots) -> Record | None:
        """The slot's record, complete; None where the episode began before anybody asked."""
        record = self._records.pop(slot, None)
        if record is not None:
            times = {
                *record.logged,
                *(sample.time_us for sample in record.samples),
                *(made[0] for made in record.plans),
            }
            at = np.array(sorted(times), np.int64)
            # A drive that was stopped in the warm-up is known up to the handover.
            known = max(state.step[slot], state.handover[slot]) + 1
            poses = ego_poses(state.trail[slot, :known], at)
            record.ego = dict(zip(at.tolist(), poses, strict=True))
        return record


def _between(before: Sample, now: Sample, interval_us: int) -> list[Sample]:
    """Samples at the poses that are reported between two ticks."""
    found = []
    for time in reported_times(before.time_us, now.time_us, interval_us)[:-1].tolist():
        part = (time - before.time_us) / (now.time_us - before.time_us)
        ids, rows, poses = others_between((before.ids, before.poses), (now.ids, now.poses), part)
        found.append(Sample(time, ids, poses, before.sizes[rows]))
    return found
