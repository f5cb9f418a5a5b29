"""Recorded drives from the world itself: the expert drives the ego, the traffic does what it does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from alpagym_runtime.simulators.embedded import state, world
from alpagym_runtime.simulators.embedded.expert import target_plan
from alpagym_runtime.simulators.embedded.scene import Actors, Scene
from alpagym_runtime.simulators.embedded.scene_bank import SceneBank

PLAN_STEPS = 64


def record(scene: Scene, drive_from: int) -> Scene | None:
    """The scene with the expert's drive as its log and, where its traffic reacts, what that did as its tracks.

    Args:
        scene: its log up to `drive_from` is kept; the length of its log is the recording's.
        drive_from: grid index at which the expert takes over.

    Returns:
        None if the drive touches somebody, leaves the road, or begins with a fault.

    """
    bank = SceneBank()
    bank.add([scene], set())
    steps = len(scene.ego_log)
    slots = state.make_slots(1, steps, PLAN_STEPS)
    slots.reactive[0] = True
    row, start = np.zeros(1, np.int64), np.array([drive_from])
    world.begin(bank.bank, slots, row, row, start, start)
    if slots.measures[0, state.INITIAL]:
        return None
    count = len(scene.actors.first)
    tracks, there = np.zeros((count, steps, 4)), np.zeros((count, steps), bool)
    tracks[:, drive_from], there[:, drive_from] = slots.actors[0, :count], slots.present[0, :count]
    plan = np.zeros((1, PLAN_STEPS, 3), np.float32)
    last, events = np.array([steps - 1]), np.zeros(1, np.int64)
    while slots.step[0] < last[0]:
        target_plan(bank.bank, slots, row, plan, 0.1)
        slots.plan[0], slots.plan_pose[0] = plan[0], slots.state[0, :3]
        world.advance(bank.bank, slots, row, 1, 0.1, state.EVENT_COLLISION | state.EVENT_OFFROAD, last, events)
        if events[0]:
            return None
        k = int(slots.step[0])
        tracks[:, k], there[:, k] = slots.actors[0, :count], slots.present[0, :count]
    log = slots.trail[0, :steps, :4].copy()
    if not scene.agents:
        return replace(scene, ego_log=log)
    # An agent leaves at its path's end and never comes back.
    length = there.cumprod(axis=1).sum(axis=1)
    tracks[:, :, 2] = np.unwrap(tracks[:, :, 2], axis=1)
    actors = Actors(tracks, np.zeros(count, np.int64), length - 1, scene.actors.size, scene.actors.kind)
    return replace(scene, ego_log=log, actors=actors)
