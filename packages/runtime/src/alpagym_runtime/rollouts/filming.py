"""Videos of a few drives: driven again from their requests, seen from above with the plan, cameras beside it.

`videos/<evaluation>.json` says what each video shows and what the drive earned tick by tick; reports read it. Worlds
that repeat themselves show the very drives that were evaluated; in others the score told is that of the new drive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.envs.core import CoreBatch, DrivingCore
from alpagym_runtime.episodes import birds_eye
from alpagym_runtime.errors import SimulatorError
from alpagym_runtime.files import write_json
from alpagym_runtime.policies.base import validate_decision
from alpagym_runtime.rollouts.collector import decision_seeds
from alpagym_runtime.rollouts.evaluation import MEAN, evaluation_request
from alpagym_runtime.rollouts.statistics import usable
from alpagym_runtime.rollouts.table import Row
from alpagym_runtime.types import Ended, Episode, Observation, Policy
from alpagym_runtime.video import VideoWriter

FOLDER = "videos"
SIZE_PX = 400
ENCODER = {"crf": "27"}
"""About 100 kB for 4 s: a page with six of them stays small."""


@runtime_checkable
class Drawable(Protocol):
    """A simulator that can draw a slot from above, with what the policy does not see, such as the road."""

    def picture(self, slot: int, plan_rig: NDArray[np.float32] | None = None) -> NDArray[np.uint8]:
        """[400,400,3] uint8 RGB, driving direction up."""
        ...


@dataclass
class _Take:
    """One drive in the making."""

    which: str
    row: Row
    writer: VideoWriter
    times_s: list[float] = field(default_factory=list)
    speeds_mps: list[float] = field(default_factory=list)
    terms: dict[str, list[float]] = field(default_factory=dict)
    episode: Episode | None = None


def choose(rows: Sequence[Row]) -> dict[str, Row]:
    """The best, the median and the worst drive by driving score, then reward; fewer where there are fewer."""
    good = sorted(
        (row for row in rows if usable(row) and row["ticks"]),
        key=lambda row: (row["driving_score"], row["reward"], row["scene_id"], row["seed"]),
    )
    if not good:
        return {}
    chosen = {"best": len(good) - 1, "median": (len(good) - 1) // 2, "worst": 0}
    first: dict[int, str] = {}
    for which, index in chosen.items():
        first.setdefault(index, which)
    return {which: good[index] for index, which in first.items()}


def film(
    core: DrivingCore,
    policy: Policy,
    drives: Mapping[str, Row],
    horizon_ticks: int,
    directory: Path,
    evaluation: str,
    timeout_s: float = 30.0,
) -> list[dict[str, Any]]:
    """Drive again and write `videos/<evaluation>_<which>.mp4` below a run directory, and what they show.

    Args:
        core: of the evaluation, with no slot driving.
        policy: with the weights that were evaluated.
        drives: what to film, by which of the drives it is.
        horizon_ticks: of the evaluation.
        directory: the run's.
        evaluation: its name.
        timeout_s: longest wait for the simulator.

    Raises:
        SimulatorError: the simulator stays silent or fails a drive.

    """
    folder = directory / FOLDER
    folder.mkdir(exist_ok=True)
    fps = 1e6 / core.spec.control_period_us
    told = []
    names = list(drives)
    for start in range(0, len(names), core.spec.slots):
        with ExitStack() as files:
            takes = {}
            for slot, which in enumerate(names[start : start + core.spec.slots]):
                path = folder / f"{evaluation}_{which}.mp4"
                takes[slot] = _Take(which, drives[which], files.enter_context(VideoWriter(path, fps, options=ENCODER)))
            _drive(core, policy, takes, horizon_ticks, timeout_s)
        told += [_describe(take, evaluation) for take in takes.values()]
    write_json(folder / f"{evaluation}.json", told)
    return told


def _drive(core: DrivingCore, policy: Policy, takes: dict[int, _Take], horizon_ticks: int, timeout_s: float) -> None:
    slots = np.array(sorted(takes), np.int64)
    rows = [takes[slot].row for slot in slots.tolist()]
    core.start(slots, [evaluation_request(row["scene_id"], row["seed"], horizon_ticks) for row in rows])
    running = set(takes)
    while running:
        batch = core.receive(len(running), timeout_s)
        if not len(batch.tick):
            raise SimulatorError(f"{len(running)} filmed slots stayed silent for {timeout_s} s", code="TIMEOUT")
        waiting = np.flatnonzero(np.isin(batch.tick.slots, slots) & (batch.tick.ended == Ended.RUNNING))
        plans: dict[int, NDArray[np.float32]] = {}
        decisions = None
        if len(waiting):
            observation = {name: array[waiting] for name, array in batch.observation.items()}
            seeds = decision_seeds([batch.tick.requests[row] for row in waiting], batch.tick.tick[waiting])
            decisions = validate_decision(policy.act(observation, seeds, MEAN), policy.spec, len(waiting))
            plans = dict(zip(waiting.tolist(), decisions.plan_rig, strict=True))
        for row, slot in enumerate(batch.tick.slots.tolist()):
            if slot in running and batch.tick.observation_valid[row]:
                _expose(core, batch, row, takes[slot], plans.get(row))
            if slot in running and row in batch.episodes:
                failure = batch.episodes[row].failure
                if failure is not None:
                    raise SimulatorError(f"a filmed drive failed: {failure.text}", code=failure.code)
                takes[slot].episode = batch.episodes[row]
                for name, values in batch.late_terms.get(row, {}).items():
                    takes[slot].terms[name] = [0.0, *values.tolist()]
                running.discard(slot)
        if decisions is not None:
            core.send(batch.tick.slots[waiting], decisions)


def _expose(core: DrivingCore, batch: CoreBatch, row: int, take: _Take, plan: NDArray[np.float32] | None) -> None:
    """One picture, and what the tick before it earned."""
    observation = {name: array[row] for name, array in batch.observation.items()}
    if int(batch.tick.tick[row]) < 0:
        return  # warm-up: somebody else drives
    speed = batch.tick.measures.values.get("speed_mps")
    now_s = float(batch.tick.tick[row]) * core.spec.control_period_us * 1e-6
    take.times_s.append(now_s)
    take.speeds_mps.append(float(speed[row]) if speed is not None else _speed(observation))
    for name, values in batch.terms.items():
        take.terms.setdefault(name, []).append(float(values[row]))
    slot = int(batch.tick.slots[row])
    simulator = core.simulator
    above = simulator.picture(slot, plan) if isinstance(simulator, Drawable) else _from_observation(observation, plan)
    take.writer.write(_caption(beside(above, observation), f"{now_s:.1f} s  {take.speeds_mps[-1]:.1f} m/s"))


def _speed(observation: Observation) -> float:
    return float(np.hypot(*observation["ego_dynamics_rig"][:2])) if "ego_dynamics_rig" in observation else float("nan")


def _from_observation(observation: Observation, plan: NDArray[np.float32] | None) -> NDArray[np.uint8]:
    import cv2

    drawn = birds_eye.draw(observation, plan)
    return np.asarray(cv2.resize(drawn, (SIZE_PX, SIZE_PX), interpolation=cv2.INTER_AREA), np.uint8)


def beside(above: NDArray[np.uint8], observation: Observation) -> NDArray[np.uint8]:
    """The newest picture of each camera, enlarged by a whole factor, stacked to the right of the picture from above."""
    cameras = [
        array[-1] for name, array in sorted(observation.items()) if name.startswith("camera_") and array.ndim == 4
    ]
    if not cameras:
        return above
    room = above.shape[0] // len(cameras)
    column = np.full((above.shape[0], above.shape[1], 3), 24, np.uint8)
    for k, picture in enumerate(cameras):
        shown = _fit(picture, room, above.shape[1])
        column[k * room : k * room + shown.shape[0], : shown.shape[1]] = shown
    return np.concatenate([above, column], axis=1)


def _fit(picture: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """As large as fits; small pictures by whole factors, so that their pixels stay square and sharp."""
    import cv2

    factor = min(height / picture.shape[0], width / picture.shape[1])
    if factor >= 1.0:
        return picture.repeat(int(factor), axis=0).repeat(int(factor), axis=1)
    size = (int(picture.shape[1] * factor), int(picture.shape[0] * factor))
    return np.asarray(cv2.resize(picture, size, interpolation=cv2.INTER_AREA), np.uint8)


def _caption(picture: NDArray[np.uint8], text: str) -> NDArray[np.uint8]:
    import cv2

    out = np.ascontiguousarray(picture)
    for colour, width in (((20, 20, 20), 3), ((240, 240, 240), 1)):
        cv2.putText(out, text, (8, 20), cv2.FONT_HERSHEY_SIMPLEX, 0.5, colour, width, cv2.LINE_AA)
    return out


def _describe(take: _Take, evaluation: str) -> dict[str, Any]:
    episode, row = take.episode, take.row
    assert episode is not None
    return {
        "which": take.which,
        "file": f"{evaluation}_{take.which}.mp4",
        "scene_id": row["scene_id"],
        "family": row["family"],
        "seed": row["seed"],
        "evaluated_score": row["driving_score"],
        "driving_score": episode.driving_score,
        "ended": episode.ended.name.lower(),
        "time_s": take.times_s,
        "speed_mps": take.speeds_mps,
        # Row k is what the tick that ended at time k earned; the first earned nothing.
        "terms": take.terms,
    }
