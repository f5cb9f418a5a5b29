"""Keeps what AlpaSim's measures need of each running episode; only where some of them are asked for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded.measures_alpasim import Record, Sample
from alpagym_runtime.simulators.embedded.scene import Scene
from alpagym_runtime.simulators.embedded.state import Slots


class Recorder:
    """One `Record` a slot, filled as the episode goes."""

    def __init__(self, inner_steps: int, plan_step_us: int) -> None:
        self._inner, self._plan_step_us = inner_steps, plan_step_us
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
        logged += range(start, handover, self._inner)
        self._sizes[slot] = scene.actors.size
        self._records[slot] = Record(
            log=scene.ego_log[:, :3],
            area=scene.area,
            lane_map=scene.lane_map,
            size=(vehicle.length_m, vehicle.width_m),
            centre_offset_m=vehicle.centre_offset_m,
            plan_step_us=self._plan_step_us,
            period=self._inner,
            logged=logged,
        )

    def plans(self, slots: NDArray[np.int64], state: Slots, plan_rig: NDArray[np.floating]) -> None:
        """Decisions [n,T,3] made now, before the world moves on."""
        for slot, plan in zip(slots.tolist(), plan_rig, strict=True):
            if slot in self._records:
                made = int(state.step[slot]), state.state[slot, :3].copy(), np.asarray(plan, np.float64)
                self._records[slot].plans.append(made)

    def samples(self, slots: NDArray[np.int64], state: Slots) -> None:
        """The world now, of slots at or after their handover."""
        for slot in slots[state.step[slots] >= state.handover[slots]].tolist():
            if slot not in self._records:
                continue
            sizes = self._sizes[slot]
            here = np.flatnonzero(state.present[slot, : len(sizes)])
            poses = state.actors[slot, here, :3].copy()
            self._records[slot].samples.append(Sample(int(state.step[slot]), here, poses, sizes[here]))

    def finish(self, slot: int, state: Slots) -> Record | None:
        """The slot's record, complete; None where the episode began before anybody asked."""
        record = self._records.pop(slot, None)
        if record is not None:
            steps = {*record.logged, *(sample.step for sample in record.samples), *(made[0] for made in record.plans)}
            record.ego = {step: state.trail[slot, step, :3].copy() for step in steps}
        return record
