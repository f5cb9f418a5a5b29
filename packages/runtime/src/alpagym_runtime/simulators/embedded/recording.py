"""Recorded drives from the world itself: the expert drives the ego, the traffic does what it does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from alpagym_runtime.simulators.embedded import state, world
from alpagym_runtime.simulators.embedded.expert import target_plan
from alpagym_runtime.simulators.embedded.scene import Actors, Scene
from alpagym_runtime.simulators.embedded.scene_bank import SceneBank

PLAN_STEPS = 64


def record(scene: Scene, drive_from: int | None = None) -> Scene | None:
    """The scene with the expert's drive as its log and, where its traffic reacts, what that did as its tracks.

    The log up to `drive_from`, a grid index (default: the handover), is kept; its length is the recording's. None if
    the drive touches somebody, leaves the road, or begins with a fault.
    """
    begin = scene.handover if drive_from is None else drive_from
    bank = SceneBank()
    bank.add([scene], set())
    steps = len(scene.ego_log)
    slots = state.make_slots(1, steps, PLAN_STEPS)
    slots.reactive[0] = True
    row = np.zeros(1, np.int64)
    world.begin(bank.bank, slots, row, row, np.array([begin]), row)
    count = len(scene.actors.first)
    tracks, there = np.zeros((count, steps, 4)), np.zeros((count, steps), bool)
    plan = np.zeros((1, PLAN_STEPS, 3), np.float32)
    last, events = np.array([steps - 1]), np.zeros(1, np.int64)
    while True:
        k = int(slots.step[0])
        tracks[:, k], there[:, k] = slots.actors[0, :count, :4], slots.present[0, :count]
        if events[0] or (k == begin and slots.measures[0, state.INITIAL]):
            return None
        if k == last[0]:
            break
        if k >= begin:
            target_plan(bank.bank, slots, row, plan, 0.1)
            slots.plan[0], slots.plan_pose[0] = plan[0], slots.state[0, :3]
        world.advance(bank.bank, slots, row, 1, 0.1, state.EVENT_COLLISION | state.EVENT_OFFROAD, last, events)
    log = slots.trail[0, :steps, :4].copy()
    if not scene.agents:
        return replace(scene, ego_log=log)
    # An agent leaves at its path's end and never comes back.
    length = np.maximum(there.cumprod(axis=1).sum(axis=1), 1)
    tracks[:, :, 2] = np.unwrap(tracks[:, :, 2], axis=1)
    # What nobody reads shall not differ between a scene and its copy read from a file.
    tracks[np.arange(steps) >= length[:, None]] = 0.0
    actors = Actors(tracks, np.zeros(count, np.int64), length - 1, scene.actors.size, scene.actors.kind)
    return replace(scene, ego_log=log, actors=actors)
