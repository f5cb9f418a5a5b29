"""The batch core: a simulator plus reward terms, ends and the driving score.

Everything that drives stands on this one object: the collector with many slots, the Gymnasium environment with one.
It completes observations (privileged labels, carry), pays rewards tick by tick, and ends drives that a term stops.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.errors import ConfigError, SimulatorError
from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.run_config import RewardSection
from alpagym_runtime.types import (
    Decision,
    Ended,
    Episode,
    EpisodeRequest,
    Measures,
    MeasureSeries,
    Observation,
    PolicySpec,
    Ragged,
    RewardTerm,
    Simulator,
    TickBatch,
)

FULL_SCORE_PROGRESS = 0.8

# As plain integers: reading a member of an enum costs as much as a small array operation.
RUNNING, SCORED = int(Ended.RUNNING), int(Ended.SCORED)


def driving_score(measures: Mapping[str, MeasureSeries]) -> float:
    """In [0, 1]: 0 after an at-fault collision or off-road, else min(progress / 0.8, 1); NaN where undefined."""
    if "progress" not in measures:
        return float("nan")
    for name in ("collision_at_fault_count", "offroad_count"):
        count = measures[name].aggregate() if name in measures else 0.0
        if math.isnan(count):
            return math.nan
        if count > 0.0:
            return 0.0
    return min(measures["progress"].aggregate() / FULL_SCORE_PROGRESS, 1.0)


@dataclass(frozen=True)
class ScaledTerm:
    """A reward term with its weight in the sum."""

    scale: float
    term: RewardTerm


def reward_labels(reward: RewardSection) -> tuple[str, ...]:
    """Labels that the terms of a config read; whoever builds their simulator asks it for them."""
    return tuple(sorted({name for term in reward.terms.values() for name in getattr(term.config, "labels", ())}))


def build_terms(reward: RewardSection, simulator: Simulator) -> dict[str, ScaledTerm]:
    """The terms of a config; an unknown measure is a ConfigError that names the term."""
    terms = {}
    for name, section in reward.terms.items():
        try:
            terms[name] = ScaledTerm(section.scale, section.config.build(simulator.spec))
        except ConfigError as err:
            raise err.under(f"reward.terms.{name}") from err
    return terms


@dataclass
class CoreBatch:
    """A `TickBatch` and what it earned.

    Attributes:
        tick: rows that wait for a decision or have ended.
        observation: complete, as `Policy.act` reads it.
        terms: [n] f64 by term name, scaled, of the tick that just ended (and, for an ended row, the end parts).
        rewards: [n] f64, the sum of `terms`.
        episodes: by row index, for ended rows: outcome, measures, score; the arrays are the collector's to add.
        late_terms: by row index, [T] a term, where the world delivered its measures only at the end.

    """

    tick: TickBatch
    observation: Observation
    terms: dict[str, NDArray[np.float64]]
    rewards: NDArray[np.float64]
    episodes: dict[int, Episode] = field(default_factory=dict)
    late_terms: dict[int, dict[str, NDArray[np.float64]]] = field(default_factory=dict)


class DrivingCore:
    """Drives slots of one simulator and scores them; see the module's text."""

    def __init__(self, simulator: Simulator, terms: Mapping[str, ScaledTerm], policy_spec: PolicySpec) -> None:
        self.simulator = simulator
        self.spec = simulator.spec
        self.terms = dict(terms)
        self._privileged = policy_spec.privileged
        count = self.spec.slots
        self._carry = {name: np.zeros((count, *shape), np.float32) for name, shape in policy_spec.carry.items()}
        self._plan = np.zeros((count, policy_spec.plan_steps, 3), np.float32)
        # Slots that a term stopped: what their last tick earned, until the simulator hands them back as SCORED.
        self._stopped: dict[int, dict[str, float]] = {}
        late = {name for name, when in self.spec.measures.items() if when == "end"}
        self._late = {name for name, scaled in self.terms.items() if scaled.term.needs & late}
        # Completions are kept only for terms that read them: a loop over slots, in worlds of one tick an episode.
        self._reads_text = any(getattr(scaled.term, "reads_text", False) for scaled in self.terms.values())
        self._text: dict[int, NDArray[np.uint8]] = {}

    @property
    def reward_is_late(self) -> bool:
        """Whether some term can only be paid at the end of the episode in this world."""
        return bool(self._late)

    def start(self, slots: NDArray[np.int64], requests: Sequence[EpisodeRequest]) -> None:
        """Begin episodes; running ones are abandoned."""
        for name in self._carry:
            self._carry[name][slots] = 0.0
        for slot in np.asarray(slots).tolist():
            self._stopped.pop(slot, None)
            self._text.pop(slot, None)
        self.simulator.start(slots, requests)

    def receive(self, min_ready: int, timeout_s: float) -> CoreBatch:
        """The next rows with their rewards; rows that a term stops come back once, as SCORED."""
        batch = self.simulator.receive(min_ready, timeout_s)
        terms = self._pay(batch)
        asked = [asked for scaled in self.terms.values() if (asked := scaled.term.stop(batch)) is not None]
        stop = np.any(asked, axis=0) & (batch.ended == RUNNING) & (batch.tick > 0) if asked else None
        if stop is not None and stop.any():
            rows = np.flatnonzero(stop)
            for row in rows:
                self._stopped[int(batch.slots[row])] = {name: float(values[row]) for name, values in terms.items()}
            nothing = plan_decision(np.zeros((len(rows), *self._plan.shape[1:])))
            self.simulator.send(batch.slots[rows], nothing, np.ones(len(rows), bool))
            kept = np.flatnonzero(~stop)
            if not len(kept):
                later = self.receive(min_ready, timeout_s)
                later.tick.frames = batch.frames + later.tick.frames
                return later
            batch, terms = take_rows(batch, kept), {name: values[kept] for name, values in terms.items()}
        episodes, late = self._finish(batch, terms)
        rewards = np.zeros(len(batch))
        for paid in terms.values():
            rewards += paid
        return CoreBatch(batch, self._complete(batch), terms, rewards, episodes, late)

    def send(self, slots: NDArray[np.int64], decisions: Decision) -> None:
        """Decide for slots that wait."""
        for name, store in self._carry.items():
            store[slots] = decisions.carry[name]
        self._plan[slots] = decisions.plan_rig
        if self._reads_text:
            text = decisions.trace.get("text")
            if not isinstance(text, Ragged):
                reading = [name for name, s in self.terms.items() if getattr(s.term, "reads_text", False)]
                there = ", ".join(sorted(decisions.trace)) or "none"
                raise ConfigError(
                    f"reads the policy's completion (its trace 'text'); its traces are: {there}. Take a policy that "
                    "reasons, or reward=pai_motion",
                    key=f"reward.terms.{reading[0]}",
                )
            for i, slot in enumerate(np.asarray(slots).tolist()):
                self._text[slot] = text.values[text.offsets[i] : text.offsets[i + 1]].copy()
        self.simulator.send(slots, decisions, np.zeros(len(slots), bool))

    def close(self) -> None:
        """Close the simulator."""
        self.simulator.close()

    # ------------------------------------------------------------

    def _complete(self, batch: TickBatch) -> Observation:
        observation = dict(batch.observation)
        for name in self._privileged:
            observation[name] = batch.labels[name]
            observation[f"{name}_mask"] = batch.labels[f"{name}_mask"]
        for name, store in self._carry.items():
            observation[f"carry_{name}"] = store[batch.slots]
        return observation

    def explain(self, batch: TickBatch) -> dict[str, dict[str, NDArray[np.float64]]]:
        """Parts [n] by name of each term that can tell how it came to its value, before the scale."""
        able = {name: explain for name, s in self.terms.items() if (explain := getattr(s.term, "explain", None))}
        decisions = self._driven_by(batch) if able else None
        return {name: explain(batch, decisions) for name, explain in able.items()}

    def _driven_by(self, batch: TickBatch) -> Decision:
        """What the last tick was driven by, as far as terms read it."""
        decisions = plan_decision(self._plan[batch.slots])
        if self._reads_text:
            parts = [self._text.get(slot, np.zeros(0, np.uint8)) for slot in batch.slots.tolist()]
            offsets = np.cumsum([0] + [len(part) for part in parts]).astype(np.int64)
            decisions.trace["text"] = Ragged(np.concatenate([*parts, np.zeros(0, np.uint8)]), offsets)
        return decisions

    def _pay(self, batch: TickBatch) -> dict[str, NDArray[np.float64]]:
        """What each term earns for the tick that just ended; 0 at the handover, in warm-up and for failed slots."""
        driven = batch.driven
        some, every = bool(driven.any()), bool(driven.all())
        decisions = self._driven_by(batch) if some else None
        terms = {}
        for name, scaled in self.terms.items():
            if name in self._late or not some:
                terms[name] = np.zeros(len(batch))
                continue
            paid = scaled.scale * scaled.term.tick(batch, decisions)
            terms[name] = paid if every else np.where(driven, paid, 0.0)
        if self._stopped:
            for row, slot in enumerate(batch.slots.tolist()):
                if batch.ended[row] == SCORED and slot in self._stopped:
                    for name, value in self._stopped.pop(slot).items():
                        terms[name][row] = value
        return terms

    def _finish(
        self, batch: TickBatch, terms: dict[str, NDArray[np.float64]]
    ) -> tuple[dict[int, Episode], dict[int, dict[str, NDArray[np.float64]]]]:
        episodes: dict[int, Episode] = {}
        late: dict[int, dict[str, NDArray[np.float64]]] = {}
        if not batch.ended.any():
            return episodes, late
        for row in np.flatnonzero(batch.ended).tolist():
            request, measures = batch.requests[row], batch.episode_measures.get(row, {})
            episode = Episode(request, Ended(int(batch.ended[row])), batch.failure[row], measures, float("nan"), False)
            episodes[row] = episode
            if episode.ended == Ended.FAILED:
                continue
            episode.driving_score = driving_score(measures)
            episode.initial_fault = "initial_fault" in measures and measures["initial_fault"].aggregate() > 0.0
            late[row] = {}
            for name, scaled in self.terms.items():
                self._require_delivered(name, scaled.term, episode)
                if name in self._late:
                    values = scaled.scale * self._late_pay(scaled.term, measures, request)
                    late[row][name] = values
                    terms[name][row] = values.sum()
                paid = scaled.scale * float(scaled.term.end(episode))
                terms[name][row] += paid
                if name in self._late and len(late[row][name]):
                    late[row][name][-1] += paid
        return episodes, late

    def _late_pay(
        self, term: RewardTerm, measures: Mapping[str, MeasureSeries], request: EpisodeRequest
    ) -> NDArray[np.float64]:
        """[T] what a term pays for each tick, of series that came when all was over.

        Poses may be reported, and measures sampled, several times a tick: what those pay belongs to their tick.
        """
        times = max((measures[name].time_us for name in sorted(term.needs)), key=len)
        values = term.tick(_series_batch({name: measures[name] for name in term.needs}, times, request), None)
        timely = [name for name, when in self.spec.measures.items() if when == "tick" and name in measures]
        if not timely or len(measures[timely[0]].time_us) == len(times):
            return values
        ends = measures[timely[0]].time_us[1:]
        paid = np.zeros(len(ends))
        np.add.at(paid, np.searchsorted(ends, times[1:]), values)
        return paid

    @staticmethod
    def _require_delivered(name: str, term: RewardTerm, episode: Episode) -> None:
        for measure in sorted(term.needs):
            series = episode.measures.get(measure)
            if series is None or not series.valid.any():
                raise SimulatorError(
                    f"reward term {name!r} needs the measure {measure!r}, which the simulator did not deliver in "
                    f"scene {episode.request.scene_id!r}; remove the term or the scene",
                    code="MISSING_MEASURE",
                    permanent=True,
                )


def take_rows(batch: TickBatch, rows: NDArray[np.int64]) -> TickBatch:
    """The given rows of a batch."""
    place = {int(old): new for new, old in enumerate(rows)}
    return replace(
        batch,
        slots=batch.slots[rows],
        requests=[batch.requests[row] for row in rows],
        tick=batch.tick[rows],
        controls=batch.controls[rows],
        observation={name: array[rows] for name, array in batch.observation.items()},
        observation_valid=batch.observation_valid[rows],
        measures=batch.measures.take(rows),
        measures_previous=batch.measures_previous.take(rows),
        labels={name: array[rows] for name, array in batch.labels.items()},
        ended=batch.ended[rows],
        failure=[batch.failure[row] for row in rows],
        episode_measures={place[row]: series for row, series in batch.episode_measures.items() if row in place},
    )


def _series_batch(
    measures: Mapping[str, MeasureSeries], times_us: NDArray[np.int64], request: EpisodeRequest
) -> TickBatch:
    """An episode's samples after the first as the rows of one batch, so that late rewards run timely ones' code.

    A measure that was sampled more seldom keeps its last value.
    """
    count = len(times_us) - 1
    at = {name: np.searchsorted(series.time_us, times_us, side="right") - 1 for name, series in measures.items()}
    value = {name: series.value[at[name]] for name, series in measures.items()}
    valid = {name: series.valid[at[name]] for name, series in measures.items()}

    def side(part: slice) -> Measures:
        return Measures({k: v[part] for k, v in value.items()}, {k: v[part] for k, v in valid.items()})

    rows: Any = np.arange(count, dtype=np.int64)
    return TickBatch(
        slots=rows,
        requests=[request] * count,
        tick=rows + 1,
        controls=np.ones(count, bool),
        observation={},
        observation_valid=np.zeros(count, bool),
        measures=side(slice(1, None)),
        measures_previous=side(slice(None, -1)),
        labels={},
        ended=np.zeros(count, np.int64),
        failure=[None] * count,
    )
