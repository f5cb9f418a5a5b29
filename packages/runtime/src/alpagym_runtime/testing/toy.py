"""A toy world behind the `Simulator` protocol: the contract in a page of numpy, to read and to test against.

A road runs along the local frame's x axis, 10 m wide; a car is parked on it and the recording drives around it at
constant speed. The ego is where its plan's first control period puts it, within limits; there are no dynamics. Each
slot's arithmetic is elementwise, so an episode is the same bits whatever runs beside it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.errors import ConfigError, SceneError
from alpagym_runtime.geometry import boxes_overlap, local_to_rig, rig_to_local, wrap_angle
from alpagym_runtime.random import text_seed, uniform
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.base import no_failures, rows_of
from alpagym_runtime.testing.toy_config import ToyConfig
from alpagym_runtime.types import (
    GOAL_PROGRESS,
    Decision,
    Ended,
    EpisodeRequest,
    Failure,
    Labels,
    Measures,
    MeasureSeries,
    Observation,
    PolicySpec,
    SimulatorSpec,
    TickBatch,
)

Float = NDArray[np.float64]

SPLITS = {"train": range(64), "test": range(64, 128), "val": range(128, 192)}
SCENES = {f"toy-{i}" for ids in SPLITS.values() for i in ids}
LABELS = ("target_plan_rig", "recorded_plan_rig")
FIELDS = ("ego_history_rig", "ego_dynamics_rig", "route_rig", "actors_rig")
AGGREGATION: dict[str, Literal["last", "max", "mean"]] = {
    "collision_count": "last",
    "collision_at_fault_count": "last",
    "offroad_count": "last",
    "progress": "last",
    "along_track_error_m": "last",
    "distance_to_gt_m": "mean",
    "speed_mps": "mean",
    "initial_fault": "last",
}
COLLISION, AT_FAULT, OFFROAD, PROGRESS, ALONG_TRACK, TO_GT, SPEED, INITIAL = range(8)

HANDOVER_US = 2_000_000
REFERENCE_M, AFTER_S, ROAD_END_M, ROAD_HALF_WIDTH_M = 60.0, 4.0, 80.0, 5.0
CAR_LENGTH_M, CAR_WIDTH_M, CENTRE_OFFSET_M = 4.0, 2.0, 1.4
SPEED_MAX_MPS, LATERAL_MAX_MPS, YAW_RATE_MAX_RADPS = 30.0, 3.0, 1.0
ROUTE_SPACING_M = 4.0

IDLE, READY, WAITING, DECIDED = range(4)


class ToySimulator:
    """See `types.Simulator`. It drives when it is asked for results, so `receive` never has to wait."""

    def __init__(
        self,
        config: ToyConfig,
        policy_spec: PolicySpec,
        dataset: DatasetSection,
        slots: int,
        labels: Sequence[str] = (),
    ) -> None:
        unknown = {*policy_spec.fields} - {*FIELDS} | {*labels, *policy_spec.privileged} - {*LABELS}
        if unknown or policy_spec.cameras:
            raise ConfigError(
                f"the toy world has no {', '.join(sorted({*unknown, *policy_spec.cameras}))}", key="policy"
            )
        split = SPLITS[dataset.split][: getattr(dataset, f"{dataset.split}_scenes")]
        self.spec = SimulatorSpec(
            closed_loop=True,
            control_period_us=config.control_period_us,
            slots=slots,
            scenes=tuple(dataset.scene_ids or [f"toy-{i}" for i in split]),
            measures=dict.fromkeys(AGGREGATION, "end" if config.late_measures else "tick"),
        )
        self._config, self._policy = config, policy_spec
        self._labels = sorted({*labels, *policy_spec.privileged})
        self._first_attempts = 0
        self._requests: list[EpisodeRequest | None] = [None] * slots
        self._failures: list[Failure | None] = no_failures(slots)
        self._phase, self._ended = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self._tick, self._horizon = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self._fails = np.zeros(slots, bool)
        self._start_us, self._end_us = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self._speed = np.ones(slots)  # of the recording
        self._car = np.zeros((slots, 2))  # where it is parked: x, y of its centre
        self._around = np.zeros((slots, 2))  # the scene's own x, and the offset with which the recording passes
        self._hit, self._off = np.zeros(slots, bool), np.zeros(slots, bool)
        self._trail = np.zeros((slots, 0, 4))  # x, y, yaw, speed a tick; local
        self._values = np.zeros((slots, 0, len(AGGREGATION)))
        self._reserve(64)
        self._plan = np.zeros((slots, policy_spec.plan_steps, 3))

    # ------------------------------------------------------------ protocol

    def start(self, slots: NDArray[np.int64], requests: Sequence[EpisodeRequest]) -> None:
        """Put slots on the recorded drive at their start."""
        for slot, request in zip(rows_of(slots).tolist(), requests, strict=True):
            self._requests[slot], self._failures[slot] = request, None
            self._phase[slot], self._ended[slot], self._tick[slot] = READY, Ended.RUNNING, 0
            try:
                self._begin(slot, request)
            except SceneError as err:
                self._fail(slot, Failure("permanent", "INVALID_SCENE", str(err)))
        rows = rows_of([slot for slot in rows_of(slots).tolist() if self._failures[slot] is None])
        self._reserve(int(self._horizon[rows].max(initial=0)) + 1)
        pose = self._recorded(rows, self._start_us[rows])
        self._trail[rows, 0, :3], self._trail[rows, 0, 3] = pose, self._speed[rows]
        self._hit[rows], self._off[rows] = self._touches(rows, pose), np.abs(pose[:, 1]) > ROAD_HALF_WIDTH_M
        self._values[rows, 0] = 0.0
        self._values[rows, 0, INITIAL] = self._hit[rows] | self._off[rows]
        self._report(rows)

    def receive(self, min_ready: int, timeout_s: float) -> TickBatch:
        """Drive what was decided; then all slots that wait or have ended, each once."""
        decided = np.flatnonzero(self._phase == DECIDED)
        self._phase[decided] = READY
        self._drive(decided[self._ended[decided] == Ended.RUNNING])
        return self._batch(np.flatnonzero(self._phase == READY))

    def send(self, slots: NDArray[np.int64], decisions: Decision, stop: NDArray[np.bool_]) -> None:
        """Queue decisions for slots that were delivered and have not ended."""
        rows = rows_of(slots)
        assert (self._phase[rows] == WAITING).all(), f"some of slots {rows.tolist()} do not wait for a decision"
        self._plan[rows] = decisions.plan_rig
        self._phase[rows] = DECIDED
        self._ended[rows[np.asarray(stop, bool)]] = Ended.SCORED

    def scene_family(self, scene_id: str) -> str:
        """All scenes show the same situation."""
        return "obstacle"

    def scene_hash(self, scene_id: str) -> str:
        """SHA-256 of the scene's numbers."""
        return hashlib.sha256(np.array(self._scene(scene_id)).tobytes()).hexdigest()

    def close(self) -> None:
        """Forget all episodes."""
        self._phase[:] = IDLE

    # ------------------------------------------------------------ scenes

    def _scene(self, scene_id: str) -> tuple[float, float, float]:
        """The parked car's x and y in m, and the recorded speed in m/s."""
        if scene_id not in SCENES:
            raise SceneError(f"no scene {scene_id!r} in the toy world; it has toy-0 to toy-{len(SCENES) - 1}")
        draw = uniform(np.array(text_seed(scene_id), np.uint64), 3)
        return 22.0 + 14.0 * float(draw[0]), 2.4 * float(draw[1]) - 1.2, 7.0 + 4.0 * float(draw[2])

    def _begin(self, slot: int, request: EpisodeRequest) -> None:
        x, y, speed = self._scene(request.scene_id)
        start_us = HANDOVER_US if request.start_us < 0 else request.start_us
        end_us = HANDOVER_US + round((REFERENCE_M / speed + AFTER_S) * 1e6)
        if start_us >= end_us:
            raise SceneError(f"scene {request.scene_id!r} ends at {end_us} us and cannot start at {start_us} us")
        self._horizon[slot], self._speed[slot] = request.horizon_ticks, speed
        self._start_us[slot], self._end_us[slot] = start_us, end_us
        shift = uniform(np.array(request.world_seed & 0xFFFFFFFFFFFFFFFF, np.uint64), 2) - 0.5
        self._car[slot] = x + 2.0 * shift[0], y + 0.2 * shift[1]
        self._around[slot] = x, y - 3.0 if y >= 0.0 else y + 3.0
        self._fails[slot] = False
        if request.attempt == 0 and self._config.fail_every:
            self._first_attempts += 1
            self._fails[slot] = self._first_attempts % self._config.fail_every == 0

    def _recorded_y(self, rows: NDArray[np.int64], x: Float) -> tuple[Float, Float]:
        """Offset and heading of the recording at x [n] or [n,T]: smooth steps out before the car and back behind it."""
        shape = (-1,) + (1,) * (x.ndim - 1)
        car_x, offset = self._around[rows, 0].reshape(shape), self._around[rows, 1].reshape(shape)
        out, back = np.clip((x - car_x + 20.0) / 13.0, 0.0, 1.0), np.clip((x - car_x - 5.0) / 13.0, 0.0, 1.0)
        y = offset * (out * out * (3.0 - 2.0 * out) - back * back * (3.0 - 2.0 * back))
        return y, np.arctan(offset * (6.0 * out * (1.0 - out) - 6.0 * back * (1.0 - back)) / 13.0)

    def _recorded(self, rows: NDArray[np.int64], time_us: NDArray[np.int64]) -> Float:
        """Poses [...,3] (x, y, yaw; local) of the recording at times [n] or [n,T]; x is 0 at the scene's handover."""
        shape = (-1,) + (1,) * (time_us.ndim - 1)
        x = self._speed[rows].reshape(shape) * ((time_us - HANDOVER_US) * 1e-6)
        return np.stack([x, *self._recorded_y(rows, x)], axis=-1)

    # ------------------------------------------------------------ driving

    def _reserve(self, samples: int) -> None:
        """Room for a row of trail and measures a tick."""
        missing = samples - self._trail.shape[1]
        if missing > 0:
            self._trail = np.pad(self._trail, ((0, 0), (0, samples + missing), (0, 0)))
            self._values = np.pad(self._values, ((0, 0), (0, samples + missing), (0, 0)))

    def _fail(self, slot: int, failure: Failure) -> None:
        self._ended[slot], self._failures[slot] = Ended.FAILED, failure

    def _time_us(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._start_us[rows] + self._tick[rows] * self.spec.control_period_us

    def _touches(self, rows: NDArray[np.int64], pose: Float) -> NDArray[np.bool_]:
        """Whether the ego's box at poses [n,3] overlaps the parked car's."""
        size = np.broadcast_to([CAR_LENGTH_M, CAR_WIDTH_M], (len(rows), 2))
        centre = rig_to_local(np.array([CENTRE_OFFSET_M, 0.0]), pose)
        ego = np.concatenate([centre, pose[:, 2:], size], axis=1)
        return boxes_overlap(ego, np.concatenate([self._car[rows], np.zeros((len(rows), 1)), size], axis=1))

    def _plan_at(self, rows: NDArray[np.int64], seconds: float) -> Float:
        """Plans [n,3] at a time: linear between points, from the origin at 0, the last point held."""
        place = min(max(seconds / self._policy.plan_step_us * 1e6, 0.0), float(self._policy.plan_steps))
        later = max(math.ceil(place - 1e-9), 1)
        earlier = self._plan[rows, later - 2] if later > 1 else np.zeros((len(rows), 3))
        return earlier + (place - (later - 1)) * (self._plan[rows, later - 1] - earlier)

    def _drive(self, rows: NDArray[np.int64]) -> None:
        """One control period for rows that have a plan."""
        seconds, step_s = self.spec.control_period_us * 1e-6, self._policy.plan_step_us * 1e-6
        before = self._trail[rows, self._tick[rows]]
        move = self._plan_at(rows, seconds)
        # By central differences, so that a plan that brakes is slower at the tick's end than on average.
        slope = (self._plan_at(rows, seconds + step_s) - self._plan_at(rows, seconds - step_s)) / (2.0 * step_s)
        reach = seconds * np.array([SPEED_MAX_MPS, LATERAL_MAX_MPS, YAW_RATE_MAX_RADPS])
        move = np.clip(move, reach * [0.0, -1.0, -1.0], reach)
        pose = np.concatenate([rig_to_local(move[:, :2], before[:, :3]), before[:, 2:3] + move[:, 2:]], axis=1)
        pose[:, 2] = wrap_angle(pose[:, 2])
        self._tick[rows] += 1
        tick = self._tick[rows]
        self._trail[rows, tick, :3], self._trail[rows, tick, 3] = pose, np.clip(slope[:, 0], 0.0, SPEED_MAX_MPS)
        self._values[rows, tick] = self._values[rows, tick - 1]
        touches, off = self._touches(rows, pose), np.abs(pose[:, 1]) > ROAD_HALF_WIDTH_M
        collides, leaves = touches & ~self._hit[rows], off & ~self._off[rows]
        self._hit[rows] |= touches
        self._off[rows] = off
        self._values[rows, tick, COLLISION] += collides
        # A parked car is never at fault, and a standing ego hits nothing.
        self._values[rows, tick, AT_FAULT] += collides
        self._values[rows, tick, OFFROAD] += leaves
        self._report(rows)
        code = np.full(len(rows), int(Ended.RUNNING))
        code[self._time_us(rows) + self.spec.control_period_us > self._end_us[rows]] = Ended.SCENE_END
        code[tick >= self._horizon[rows]] = Ended.HORIZON
        code[self._values[rows, tick, PROGRESS] >= GOAL_PROGRESS] = Ended.GOAL
        code[leaves] = Ended.OFFROAD
        code[collides] = Ended.COLLISION
        self._ended[rows] = code
        for slot in rows[self._fails[rows] & (tick == 3)].tolist():
            self._fail(slot, Failure("transient", "TOY", "the toy world failed, as fail_every asks"))

    def _report(self, rows: NDArray[np.int64]) -> None:
        """The present tick's measures that are functions of the state."""
        tick = self._tick[rows]
        x, y = self._trail[rows, tick, 0], self._trail[rows, tick, 1]
        recorded = self._recorded(rows, self._time_us(rows))
        values = self._values
        values[rows, tick, PROGRESS] = np.maximum(values[rows, tick, PROGRESS], np.clip(x / REFERENCE_M, 0.0, 1.0))
        values[rows, tick, ALONG_TRACK] = x - recorded[:, 0]
        values[rows, tick, TO_GT] = np.hypot(x - recorded[:, 0], y - recorded[:, 1])
        values[rows, tick, SPEED] = self._trail[rows, tick, 3]

    # ------------------------------------------------------------ results

    def _batch(self, rows: NDArray[np.int64]) -> TickBatch:
        ended, tick = self._ended[rows].copy(), self._tick[rows].copy()
        well = ended != Ended.FAILED
        self._phase[rows] = np.where(ended == Ended.RUNNING, WAITING, IDLE)
        requests = [self._requests[slot] for slot in rows]
        late = self._config.late_measures
        # A stopped slot drove nothing: its last tick gained nothing.
        before = np.where(ended == Ended.SCORED, tick, tick - 1)
        return TickBatch(
            slots=rows.astype(np.int64),
            requests=[request for request in requests if request is not None],
            tick=tick,
            controls=well.copy(),
            observation=self._observe(rows, well),
            observation_valid=well.copy(),
            measures=self._measures(rows, tick, well & (not late)),
            measures_previous=self._measures(rows, before, well & (before >= 0) & (not late)),
            labels=self._label(rows),
            ended=ended,
            failure=[self._failures[slot] for slot in rows],
            episode_measures={int(i): self._series(rows[i]) for i in np.flatnonzero(well & (ended != Ended.RUNNING))},
        )

    def _measures(self, rows: NDArray[np.int64], tick: NDArray[np.int64], valid: NDArray[np.bool_]) -> Measures:
        values = np.where(valid[:, None], self._values[rows, np.maximum(tick, 0)], 0.0)
        return Measures(
            {name: values[:, m].copy() for m, name in enumerate(AGGREGATION)},
            {name: valid.copy() for name in AGGREGATION},
        )

    def _series(self, slot: int) -> dict[str, MeasureSeries]:
        count = int(self._tick[slot]) + 1
        times = self._start_us[slot] + np.arange(count) * self.spec.control_period_us
        return {
            name: MeasureSeries(times.copy(), self._values[slot, :count, m].copy(), np.ones(count, bool), aggregation)
            for m, (name, aggregation) in enumerate(AGGREGATION.items())
        }

    def _observe(self, rows: NDArray[np.int64], well: NDArray[np.bool_]) -> Observation:
        spec, tick = self._policy, self._tick[rows]
        now = self._trail[rows, tick]
        pose = np.ascontiguousarray(now[:, :3])
        out: Observation = {"time_us": np.where(well, self._time_us(rows), 0)}
        if "ego_history_rig" in spec.fields:
            steps = np.arange(1 - spec.history_steps, 1) * spec.history_step_us
            time_us = self._time_us(rows)[:, None] + steps
            since = time_us - self._start_us[rows][:, None]
            index = np.clip(since // self.spec.control_period_us, 0, np.maximum(tick - 1, 0)[:, None])
            share = np.clip(since / self.spec.control_period_us - index, 0.0, 1.0)[..., None]
            left = self._trail[rows[:, None], index, :3]
            step = self._trail[rows[:, None], np.minimum(index + 1, tick[:, None]), :3] - left
            step[..., 2] = wrap_angle(step[..., 2])
            past = np.where((since < 0)[..., None], self._recorded(rows, time_us), left + share * step)
            half = wrap_angle(past[..., 2] - pose[:, None, 2]) / 2.0
            history = np.zeros((len(rows), spec.history_steps, 7), np.float32)
            history[..., :2] = local_to_rig(past[..., :2], pose[:, None])
            history[..., 3], history[..., 6] = np.cos(half), np.sin(half)
            out["ego_history_rig"], out["ego_history_mask"] = history, time_us >= 0
        if "ego_dynamics_rig" in spec.fields:
            previous = self._trail[rows, np.maximum(tick - 1, 0)]
            seconds = self.spec.control_period_us * 1e-6
            dynamics = np.zeros((len(rows), 7), np.float32)
            dynamics[:, 0] = now[:, 3]
            dynamics[:, 3] = (now[:, 3] - previous[:, 3]) / seconds
            dynamics[:, 6] = wrap_angle(now[:, 2] - previous[:, 2]) / seconds
            out["ego_dynamics_rig"] = dynamics
        if "route_rig" in {*spec.fields, *spec.optional}:
            x = pose[:, :1] + np.arange(spec.route_points) * ROUTE_SPACING_M
            mask = x <= ROAD_END_M
            ahead = np.stack([np.minimum(x, ROAD_END_M), np.zeros_like(x)], axis=-1)
            out["route_rig"], out["route_mask"] = local_to_rig(ahead, pose[:, None]).astype(np.float32), mask
        if "actors_rig" in {*spec.fields, *spec.optional}:
            actors = np.zeros((len(rows), spec.actors, 9), np.float32)
            actors[:, 0, :2] = local_to_rig(self._car[rows], pose)
            actors[:, 0, 2] = wrap_angle(-pose[:, 2])
            actors[:, 0, 5:7] = CAR_LENGTH_M, CAR_WIDTH_M
            out["actors_rig"] = actors
            out["actors_mask"] = np.repeat(np.arange(spec.actors)[None] == 0, len(rows), axis=0)
        return _zero_where(out, ~well)

    def _label(self, rows: NDArray[np.int64]) -> Labels:
        pose = np.ascontiguousarray(self._trail[rows, self._tick[rows], :3])
        time_us = self._time_us(rows)[:, None] + np.arange(1, self._policy.plan_steps + 1) * self._policy.plan_step_us
        known = time_us <= self._end_us[rows][:, None]
        out: Labels = {}
        for name in self._labels:
            if name == "recorded_plan_rig":
                local, mask = self._recorded(rows, time_us), known
            else:  # the expert: the recorded line at the recorded speed, whatever offset it starts with closed over 6 m
                x = pose[:, :1] + self._speed[rows][:, None] * (
                    (time_us - time_us[:, :1] + self._policy.plan_step_us) * 1e-6
                )
                offset = pose[:, 1] - self._recorded_y(rows, pose[:, 0])[0]
                y, yaw = self._recorded_y(rows, x)
                y = y + offset[:, None] * np.exp((pose[:, :1] - x) / 6.0)
                local, mask = np.stack([x, y, yaw], axis=-1), np.ones_like(known)
            plan = np.concatenate(
                [local_to_rig(local[..., :2], pose[:, None]), local[..., 2:] - pose[:, None, 2:]], axis=2
            )
            plan[..., 2] = wrap_angle(plan[..., 2])
            out[name] = np.where(mask[..., None], plan, 0.0).astype(np.float32)
            out[f"{name}_mask"] = mask
        return _zero_where(out, self._ended[rows] == Ended.FAILED)


def _zero_where(arrays: Labels, failed: NDArray[np.bool_]) -> Labels:
    for array in arrays.values():
        array[failed] = 0
    return arrays
