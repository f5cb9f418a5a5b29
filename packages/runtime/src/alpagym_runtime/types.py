"""The contract: what flows between simulators, policies, rewards, transports and trainers. Read this first.

Two ideas. *Batch first*: observations, decisions and measures are structs of arrays with a leading axis N (slots); a
single environment is N = 1. *Pull*: whoever wants episodes calls `Simulator.receive`, decides, and calls `send`.

Frames: `rig` is the vehicle frame at the observation's `time_us` (x forward, y left, z up, origin on the ground under
the rear axle); `local` is the scene's fixed frame. Times are int64 microseconds. Nothing here computes anything; the
protocols' implementations live in `simulators`, `policies`, `rewards`, `transport` and `trainers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Observation = dict[str, NDArray[Any]]
"""Arrays with a leading axis N, by field name.

`time_us` [N] i64 · `ego_history_rig` [N,H,7] f32 (xyz m, quaternion wxyz; `history_step_us` apart, oldest first, last
row identity) · `ego_history_mask` [N,H] bool · `ego_dynamics_rig` [N,7] f32 (velocity xyz m/s, acceleration xyz m/s2,
yaw rate rad/s) · `route_rig` [N,R,2] f32 m, `route_mask` [N,R] · `actors_rig` [N,A,9] f32 (x, y, yaw, velocity x,
velocity y, length, width, kind, signal state), `actors_mask` [N,A] · `camera_<name>` [N,K,h,w,3] u8,
`camera_<name>_time_us` [N,K] i64, `camera_<name>_frame_id` [N,K] u64 · with the field `camera_rays`, each camera's
<<<<<<< HEAD
calibration: `camera_<name>_rays_rig` [N,9,16,3] f32 unit rays through a grid of its picture,
`camera_<name>_rays_mask` [N,9,16] bool, and `camera_<name>_position_rig` [N,3] f32 m (see `cameras.ray_grid`) ·
`carry_<name>` [N,...], what the policy gave on this slot's last tick, zeros at first.
=======
calibration: `camera_<name>_rays_rig` [N,9,16,3] f32 unit rays through a grid of its picture, `camera_<name>_rays_mask`
[N,9,16] bool, and `camera_<name>_position_rig` [N,3] f32 m (see `cameras.ray_grid`) · `carry_<name>` [N,...], what the
policy gave on this slot's last tick, zeros at first.
>>>>>>> i14
"""

Labels = dict[str, NDArray[Any]]
"""Privileged arrays [N,...]: target_plan_rig [N,T,3] f32 and recorded_plan_rig [N,T,3] f32, each with `<name>_mask`."""


class Ended(IntEnum):
    """How an episode ended. COLLISION to SCORED terminate, HORIZON and SCENE_END truncate, FAILED is void."""

    RUNNING = 0
    COLLISION = 1
    OFFROAD = 2
    GOAL = 3
    SCORED = 4
    HORIZON = 5
    SCENE_END = 6
    FAILED = 7

    @property
    def terminated(self) -> bool:
        """The task itself ended; the value of what would follow is 0."""
        return Ended.COLLISION <= self <= Ended.SCORED

    @property
    def truncated(self) -> bool:
        """The drive was cut off; a failed simulator counts as cut off for Gymnasium's two flags."""
        return self >= Ended.HORIZON


GOAL_PROGRESS = 0.99
"""Share of the recorded way at which a drive has reached its goal, in every world."""


@dataclass(frozen=True)
class Failure:
    """Why a simulator or a policy row could not go on. Only `transient` failures are retried."""

    kind: Literal["transient", "permanent"]
    code: str
    text: str


@dataclass(frozen=True)
class Sampling:
    """How a policy draws from its distribution; stored in the episode, and `score` reads it there."""

    mode: Literal["sample", "mean"] = "sample"
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class EpisodeRequest:
    """One drive to make: where it starts, how long it lasts, and all of its randomness.

    Attributes:
        scene_id: names a scene of the simulator's `spec.scenes`.
        start_us: the handover's time in the scene's clock; -1 takes the scene's own.
        horizon_ticks: decisions after the handover, > 0.
        world_seed: u64; a GRPO group shares it.
        policy_seed: u64; the seed of decision k is mix(policy_seed, k, attempt).
        group_id: the episodes of one scene and start that GRPO compares; -1 outside a group.
        member: index in the group.
        attempt: 0, and 1 more for each retry after a transient failure; the seeds stay.

    """

    scene_id: str
    start_us: int = -1
    horizon_ticks: int = 35
    world_seed: int = 0
    policy_seed: int = 0
    group_id: int = -1
    member: int = 0
    attempt: int = 0


@dataclass(frozen=True)
class Ragged:
    """Rows of unequal length: row i is `values[offsets[i]:offsets[i + 1]]`; offsets [N+1] i64."""

    values: NDArray[Any]
    offsets: NDArray[np.int64]

    def take(self, rows: NDArray[np.int64]) -> Ragged:
        """The given rows, in the given order."""
        lengths = self.offsets[1:][rows] - self.offsets[:-1][rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        index = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][rows] - offsets[:-1], lengths)
        return Ragged(self.values[index], offsets)

    @staticmethod
    def concatenate(parts: Sequence[Ragged]) -> Ragged:
        """All rows of `parts`, in order."""
        shift = np.cumsum([0] + [int(part.offsets[-1]) for part in parts])
        starts = [part.offsets[:-1] + base for part, base in zip(parts, shift, strict=False)]
        return Ragged(np.concatenate([p.values for p in parts]), np.concatenate([*starts, shift[-1:]]).astype(np.int64))


@dataclass
class Decision:
    """What a policy answers for N rows.

    Attributes:
        plan_rig: [N,T,3] f32: x m, y m, yaw rad at t0 + step … t0 + T·step, in the rig frame of t0.
        log_prob: [N,J] f32, one factor a token or denoising step; J = 1 for a density over plans.
        log_prob_mask: [N,J] bool, True where the factor counts.
        version: [N] i64, the weights that decided.
        control: [N,2] f32 or None: acceleration m/s2, steering angle rad; replaces `plan_rig`.
        trace: what `score` needs to re-compute the log-probability, by name, leading axis N.
        carry: [N,...] by name, handed back as `carry_<name>` at the slot's next tick.
        error: [N] object (None or text) or None when no row failed; a failed row's episode is void, the others stand.

    """

    plan_rig: NDArray[np.float32]
    log_prob: NDArray[np.float32]
    log_prob_mask: NDArray[np.bool_]
    version: NDArray[np.int64]
    control: NDArray[np.float32] | None = None
    trace: dict[str, NDArray[Any] | Ragged] = field(default_factory=dict)
    carry: dict[str, NDArray[Any]] = field(default_factory=dict)
    error: NDArray[np.object_] | None = None

    def __len__(self) -> int:
        return len(self.version)

    def take(self, rows: NDArray[np.int64]) -> Decision:
        """The given rows as a new decision (copies)."""
        return map_rows(self, lambda value: value.take(rows) if isinstance(value, Ragged) else value[rows])

    @staticmethod
    def concatenate(parts: Sequence[Decision]) -> Decision:
        """All rows of `parts`, in order; the parts have the same fields."""
        columns = {name: [column_of(part, name) for part in parts] for name in column_names(parts[0])}
        merged = {
            name: Ragged.concatenate(values) if isinstance(values[0], Ragged) else np.concatenate(values)
            for name, values in columns.items()
        }
        return decision_from_columns(merged)


def column_names(decision: Decision) -> list[str]:
    """Flat names of the decision's arrays: fields, then `trace.<name>` and `carry.<name>`; None is left out."""
    plain = [
        f.name for f in fields(decision) if f.name not in ("trace", "carry") and getattr(decision, f.name) is not None
    ]
    return plain + [f"trace.{name}" for name in decision.trace] + [f"carry.{name}" for name in decision.carry]


def column_of(decision: Decision, name: str) -> Any:
    """The array behind a flat name of `column_names`."""
    head, _, tail = name.partition(".")
    return getattr(decision, head)[tail] if tail else getattr(decision, name)


def decision_from_columns(columns: Mapping[str, Any]) -> Decision:
    """The inverse of `column_names` and `column_of`."""
    nested: dict[str, dict[str, Any]] = {"trace": {}, "carry": {}}
    plain: dict[str, Any] = {}
    for name, value in columns.items():
        head, _, tail = name.partition(".")
        if tail:
            nested[head][tail] = value
        else:
            plain[name] = value
    return Decision(**plain, trace=nested["trace"], carry=nested["carry"])


def map_rows(decision: Decision, function: Any) -> Decision:
    """A decision whose every array is `function(array)`."""
    return decision_from_columns({name: function(column_of(decision, name)) for name in column_names(decision)})


@dataclass
class Measures:
    """Facts that the simulator reports for N rows, by name.

    `values[name]` is float64 [N]; `valid[name]` is bool [N], False where the measure is undefined (never read as 0).
    Measures of events are counts of objects so far, so a rising edge is an increase.
    """

    values: dict[str, NDArray[np.float64]]
    valid: dict[str, NDArray[np.bool_]]

    def take(self, rows: NDArray[np.int64]) -> Measures:
        """The given rows (copies)."""
        return Measures({k: v[rows] for k, v in self.values.items()}, {k: v[rows] for k, v in self.valid.items()})


@dataclass(frozen=True)
class MeasureSeries:
    """One measure over an episode, from the handover's sample on: time_us [M] i64, value [M] f64, valid [M] bool."""

    time_us: NDArray[np.int64]
    value: NDArray[np.float64]
    valid: NDArray[np.bool_]
    aggregation: Literal["last", "max", "min", "mean", "median"] = "last"

    def aggregate(self) -> float:
        """One number for the episode; NaN where no sample is valid."""
        good = self.value[self.valid]
        if not len(good):
            return float("nan")
        if self.aggregation == "last":
            return float(good[-1])
        if self.aggregation in ("max", "min"):
            return float(good.max() if self.aggregation == "max" else good.min())
        return float(np.mean(good) if self.aggregation == "mean" else np.median(good))


@dataclass(frozen=True)
class Frame:
    """A camera frame as the simulator encoded it; stored once, named by `frame_id`."""

    slot: int
    camera: str
    time_us: int
    frame_id: int
    format: Literal["raw", "jpeg", "png"]
    data: bytes


@dataclass
class TickBatch:
    """The slots that wait for a decision or have ended, n rows; its arrays belong to the receiver.

    Attributes:
        slots: [n] i64, each delivered once.
        requests: n episode requests.
        tick: [n] i64, decisions made so far since the handover (0 at the handover; negative in warm-up).
        controls: [n] bool, False in warm-up: asked, not driven, never trained on.
        observation: an ended row holds the last one.
        observation_valid: [n] bool, False where a failed slot has none.
        measures: of the tick that just ended; at tick 0 the initial state.
        measures_previous: one tick earlier; invalid at the handover and in warm-up.
        labels: only those that `build` asked for.
        ended: [n] `Ended` codes.
        failure: n entries, None where the slot is well.
        frames: frames encoded since the last delivery.
        episode_measures: by row index, for ended rows, complete series from the handover on.

    """

    slots: NDArray[np.int64]
    requests: list[EpisodeRequest]
    tick: NDArray[np.int64]
    controls: NDArray[np.bool_]
    observation: Observation
    observation_valid: NDArray[np.bool_]
    measures: Measures
    measures_previous: Measures
    labels: Labels
    ended: NDArray[np.int64]
    failure: list[Failure | None]
    frames: tuple[Frame, ...] = ()
    episode_measures: dict[int, dict[str, MeasureSeries]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.slots)

    @cached_property
    def driven(self) -> NDArray[np.bool_]:
        """[n], True where a tick of the policy has just ended: no warm-up, no initial state, no void episode."""
        return np.asarray((self.tick > 0) & (self.ended != int(Ended.FAILED)))


@dataclass(frozen=True)
class SimulatorSpec:
    """What a simulator offers. `measures`: name -> "tick", or "end" where it comes only with the episode's end."""

    closed_loop: bool
    control_period_us: int
    slots: int
    scenes: tuple[str, ...]
    measures: Mapping[str, Literal["tick", "end"]]
    cameras: tuple[str, ...] = ()
    action_kinds: frozenset[str] = frozenset({"plan"})


@dataclass(frozen=True)
class PolicySpec:
    """What a policy reads and answers; a simulator computes and renders only this.

    Attributes:
        fields: observation arrays that `act` reads (masks come with their field); "camera_rays": the calibration.
        privileged: labels that `act` reads; such a policy is refused as a trainee.
        optional: further arrays that it gets from a world that has them.
        lesson: arrays that `imitation_loss` reads besides `fields` where the demonstration has them; `act` never does.
        cameras: name -> (height, width) px.
        frames: K, frames a camera; `frame_step_us` apart.
        history_steps: H; `history_step_us` apart.
        route_points: R.
        actors: A, nearest actors.
        plan_steps: T; `plan_step_us` apart.
        carry: name -> shape of one row.
        action_kinds: "plan", "control".

    """

    fields: tuple[str, ...] = ("ego_history_rig", "ego_dynamics_rig", "route_rig")
    privileged: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    lesson: tuple[str, ...] = ()
    cameras: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    frames: int = 1
    frame_step_us: int = 100_000
    history_steps: int = 16
    history_step_us: int = 100_000
    route_points: int = 20
    actors: int = 8
    plan_steps: int = 64
    plan_step_us: int = 100_000
    carry: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    action_kinds: frozenset[str] = frozenset({"plan"})


@dataclass(frozen=True)
class Receipt:
    """What an episode's bytes depend on. "Same seed, same bytes" holds for one build and CPU family; both are named.

    `pictures`: by camera whose pictures came encoded, what made pixels of them: decoder, versions, sizes and scale.
    """

    config_hash: str
    scene_hash: str
    versions: Mapping[str, str]
    cpu: str
    pictures: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Episode:
    """What one drive leaves behind; T decisions and T + 1 observations.

    Attributes:
        request: what was asked for.
        ended: how it ended.
        failure: set when `ended` is FAILED; such an episode is void.
        measures: complete series (T + 1 samples for tick measures).
        driving_score: in [0, 1]; NaN for a failed episode.
        initial_fault: a violation was already true at the handover; reported apart, never trained on.
        actor: "policy", "expert" or "log": who drove.
        observation: [T+1,...] by field.
        decisions: T rows.
        labels: [T,...] by name.
        controls: [T] bool.
        rewards: [T] f64, of the tick that follows decision t; the sum of `terms`.
        terms: [T] f64 by term name, scaled.
        sampling: what `score` must re-apply.
        receipt: see `Receipt`.
        frames: encoded camera frames as they arrived, where the run keeps them (`store.frames=arrived`).

    """

    request: EpisodeRequest
    ended: Ended
    failure: Failure | None
    measures: dict[str, MeasureSeries]
    driving_score: float
    initial_fault: bool
    actor: str = "policy"
    observation: Observation = field(default_factory=dict)
    decisions: Decision | None = None
    labels: Labels = field(default_factory=dict)
    controls: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    rewards: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    terms: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    receipt: Receipt | None = None
    frames: tuple[Frame, ...] = ()

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def trainable(self) -> bool:
        """Neither void, nor at fault before the policy acted, nor empty."""
        return self.ended != Ended.FAILED and not self.initial_fault and len(self) > 0

    def with_arrays(self, **arrays: Any) -> Episode:
        """A copy with the given fields replaced."""
        return replace(self, **arrays)


@dataclass
class Score:
    """A re-scored batch: log_prob [N,J], entropy [N], value [N] or None; torch tensors, differentiable."""

    log_prob: Tensor
    entropy: Tensor
    value: Tensor | None = None


class Simulator(Protocol):
    """A world with slots that drive side by side. All randomness comes from the requests."""

    @property
    def spec(self) -> SimulatorSpec:
        """What this world offers."""
        ...

    def start(self, slots: NDArray[np.int64], requests: Sequence[EpisodeRequest]) -> None:
        """Begin an episode in each slot; a running one is abandoned first. An unknown scene ends FAILED, permanent."""
        ...

    def receive(self, min_ready: int, timeout_s: float) -> TickBatch:
        """Wait until `min_ready` slots wait or have ended, or the time is up; then all of them, each once."""
        ...

    def send(self, slots: NDArray[np.int64], decisions: Decision, stop: NDArray[np.bool_]) -> None:
        """Decide for slots that wait; returns at once. `stop` [n] ends a slot as SCORED without driving."""
        ...

    def scene_hash(self, scene_id: str) -> str:
        """Content hash of a scene, for receipts."""
        ...

    def scene_family(self, scene_id: str) -> str:
        """What kind of situation a scene is, for tables; "" where that is unknown."""
        ...

    def close(self) -> None:
        """Give everything back; idempotent."""
        ...


class Policy(Protocol):
    """Stateless: the observation is complete, so a batch mixes slots freely."""

    @property
    def spec(self) -> PolicySpec:
        """What it reads and answers."""
        ...

    def act(self, observations: Observation, seeds: NDArray[np.uint64], sampling: Sampling) -> Decision:
        """Decide for N rows; row i depends on row i of the observations and on `seeds[i]` (u64) only."""
        ...


@runtime_checkable
class TrainablePolicy(Policy, Protocol):
    """A policy with weights."""

    module: Any
    version: int

    def score(self, observations: Observation, decisions: Decision, sampling: Sampling) -> Score:
        """Log-probability of the recorded decisions under the present weights; for unchanged weights the ratio is 1."""
        ...

    def load(self, state: Mapping[str, Any], version: int) -> None:
        """Take new weights, between forwards; drops every cache that depends on weights."""
        ...


@runtime_checkable
class ImitatingPolicy(TrainablePolicy, Protocol):
    """A policy that `sft` can train."""

    def imitation_loss(self, observations: Observation, target_plan_rig: NDArray[np.float32]) -> Tensor:
        """[N] loss against target plans [N,T,3] in the rig frame; differentiable."""
        ...


@runtime_checkable
class AsyncPolicy(Policy, Protocol):
    """Optional, for engines that batch continuously."""

    def submit(
        self, rows: NDArray[np.int64], observations: Observation, seeds: NDArray[np.uint64], sampling: Sampling
    ) -> None:
        """Queue rows; returns at once."""
        ...

    def collect(self, timeout_s: float) -> tuple[NDArray[np.int64], Decision]:
        """Rows that are done, with their decisions."""
        ...


class RewardTerm(Protocol):
    """One part of a reward; stateless. Over an episode, the sum of `tick` plus `end` is its value, before the scale."""

    needs: frozenset[str]

    def tick(self, batch: TickBatch, decisions: Decision | None) -> NDArray[np.float64]:
        """[n], for the tick that just ended; `decisions` drove it (None where the world reports only at the end)."""
        ...

    def end(self, episode: Episode) -> float:
        """The part that is not additive; paid on the last tick."""
        ...

    def stop(self, batch: TickBatch) -> NDArray[np.bool_] | None:
        """[n], True where the drive shall end as SCORED; None if this term never stops one."""
        ...


class Transport(Protocol):
    """Carries episodes from where they are made to where they are trained on."""

    def send(self, episode: Episode) -> str:
        """Hand an episode over; returns its handle."""
        ...

    def receive(self, handle: str) -> Episode:
        """The episode behind a handle; KeyError if it was discarded or never sent."""
        ...

    def discard(self, handle: str) -> None:
        """Free it; idempotent."""
        ...

    def close(self) -> None:
        """Free everything that this end sent and nobody discarded; idempotent."""
        ...


class Trainer(Protocol):
    """Trains a policy; everything it needs is in the run."""

    def fit(self, run: Any) -> None:
        """Train until done or asked to stop; the run keeps checkpoints, metrics and evaluations."""
        ...
