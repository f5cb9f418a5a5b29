"""The collector makes episodes; its loop is also the batched inference engine.

One forward serves all slots that wait. `min_ready` and the timeout trade latency for batch size. An episode depends on
its request only: not on its slot, nor on what runs beside it, nor on the order in which slots come back.
"""

from __future__ import annotations

import platform
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.envs.core import CoreBatch, DrivingCore
from alpagym_runtime.errors import SceneError, SimulatorError
from alpagym_runtime.policies.base import validate_decision
from alpagym_runtime.random import mix
from alpagym_runtime.rollouts.pictures import PictureTrack
from alpagym_runtime.telemetry.timers import timed
from alpagym_runtime.transport.picture_memory import Allocate, plain_memory
from alpagym_runtime.types import (
    Decision,
    Ended,
    Episode,
    EpisodeRequest,
    Failure,
    Frame,
    Policy,
    Ragged,
    Receipt,
    Sampling,
    column_names,
    column_of,
    decision_from_columns,
)


@lru_cache(maxsize=1)
def environment() -> tuple[dict[str, str], str]:
    """Versions of what computes results, and the CPU family."""
    versions = {"python": platform.python_version()}
    for name in ("alpagym-runtime", "numpy", "numba", "torch"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line.partition(":")[2].strip() for line in info.read_text().splitlines()[:40] if "model name" in line]
        model = lines[0] if lines else model
    return versions, f"{platform.machine()} {model}"


def decision_seeds(requests: Sequence[EpisodeRequest], ticks: NDArray[np.int64]) -> NDArray[np.uint64]:
    """[n] u64: the seed of each slot's decision at its tick."""
    return mix(
        np.array([r.policy_seed for r in requests], np.uint64),
        ticks.astype(np.uint64),
        np.array([r.attempt for r in requests], np.uint64),
    )


class _Store:
    """What slots have seen and decided so far: arrays [slots, capacity, ...] by name, grown when needed."""

    def __init__(self, slots: int, capacity: int, allocate: Allocate) -> None:
        self._slots, self._capacity, self._allocate = slots, capacity, allocate
        self._arrays: dict[str, NDArray[Any]] = {}
        self._ragged: dict[str, list[list[NDArray[Any]]]] = {}
        self._pictures: dict[str, PictureTrack] = {}

    def write(self, name: str, slots: NDArray[np.int64], at: NDArray[np.int64], values: NDArray[Any]) -> None:
        if int(at.max(initial=0)) >= self._capacity:
            self._grow(2 * int(at.max()) + 2)
        if name not in self._arrays:
            self._arrays[name] = np.zeros((self._slots, self._capacity, *values.shape[1:]), values.dtype)
        self._arrays[name][slots, at] = values

    def write_pictures(
        self, name: str, slots: NDArray[np.int64], at: NDArray[np.int64], pictures: NDArray[np.uint8]
    ) -> None:
        if name not in self._pictures:
            _, histories, *shape = pictures.shape
            self._pictures[name] = PictureTrack(self._slots, self._capacity, histories, tuple(shape))
        self._pictures[name].write(slots, at, pictures)

    def write_ragged(self, name: str, slots: NDArray[np.int64], at: NDArray[np.int64], values: Ragged) -> None:
        rows = self._ragged.setdefault(name, [[] for _ in range(self._slots)])
        for i, (slot, k) in enumerate(zip(slots.tolist(), at.tolist(), strict=True)):
            del rows[slot][k:]
            rows[slot].append(values.values[values.offsets[i] : values.offsets[i + 1]])

    def read(self, name: str, slot: int, count: int) -> Any:
        if name in self._ragged:
            parts = self._ragged[name][slot][:count]
            offsets = np.cumsum([0] + [len(part) for part in parts]).astype(np.int64)
            return Ragged(np.concatenate(parts) if parts else np.zeros(0), offsets)
        return self._arrays[name][slot, :count].copy()

    def read_with_last(self, name: str, slot: int, count: int, last: NDArray[Any]) -> NDArray[Any]:
        if name in self._pictures:
            return self._pictures[name].read(slot, count, last, self._allocate)
        return np.concatenate([self._arrays[name][slot, :count], last[None]])

    def _grow(self, capacity: int) -> None:
        for name, old in self._arrays.items():
            new = np.zeros((self._slots, capacity, *old.shape[2:]), old.dtype)
            new[:, : self._capacity] = old
            self._arrays[name] = new
        self._capacity = capacity


@dataclass(frozen=True)
class Pending:
    """Episodes that were asked for: `wait` gives them, once; `ready` counts those that are there; `cancel` ends it."""

    wait: Callable[[], list[Episode]]
    cancel: Callable[[], None] = lambda: None
    ready: Callable[[], int] = lambda: 0


class Collects(Protocol):
    """Who makes episodes, in this process or in workers.

    Attributes:
        counts: episodes, retried and failed ones, since somebody cleared them.

    """

    counts: Counter[str]

    def collect(
        self,
        requests: Sequence[EpisodeRequest],
        sampling: Sampling,
        on_episode: Callable[[Episode], None] | None = None,
    ) -> list[Episode]:
        """One episode a request, in the order of the requests; failed ones are void (`Ended.FAILED`), never missing."""
        ...

    def submit(self, requests: Sequence[EpisodeRequest], sampling: Sampling) -> Pending:
        """The same in two parts: ask, then wait."""
        ...

    def scene_family(self, scene_id: str) -> str:
        """What kind of situation a scene is that was driven in; "" where that is unknown."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """No forward reads the weights inside this block."""
        ...


class Collector:
    """Drives a policy through episode requests on one core.

    Args:
        core: where to drive.
        policy: who drives.
        min_ready: rows to wait for before a forward; 0 takes half of the running slots.
        timeout_s: longest wait for them; a simulator that stays silent this long fails its slots.
        retries: further attempts of an episode after a transient failure.
        config_hash: for receipts.
        actor: who the policy is, for the episodes: "policy", "expert" or "log".
        keep_frames: whether episodes hold the encoded frames that arrived.
        sink: is given each finished episode, void ones too, before `collect` returns.
        allocate: gives the memory of an episode's pictures; a transport's own spares it a copy.

    """

    def __init__(
        self,
        core: DrivingCore,
        policy: Policy,
        *,
        min_ready: int = 0,
        timeout_s: float = 30.0,
        retries: int = 2,
        config_hash: str = "",
        actor: str = "policy",
        keep_frames: bool = False,
        sink: Callable[[Episode], None] | None = None,
        allocate: Allocate = plain_memory,
    ) -> None:
        self.core = core
        self.policy = policy
        self.counts: Counter[str] = Counter()
        self._min_ready, self._timeout_s, self._retries = min_ready, timeout_s, retries
        self._config_hash, self._actor = config_hash, actor
        self._keep_frames, self._sink = keep_frames, sink
        self._frames: dict[int, list[Frame]] = {}
        self._decoded: dict[int, dict[str, str]] = {}
        self._gate = threading.Lock()
        self._store = _Store(core.spec.slots, 64, allocate)
        self._cameras = frozenset(f"camera_{name}" for name in policy.spec.cameras)
        self._observed: tuple[str, ...] = ()
        self._columns: tuple[str, ...] = ()
        self._labels: tuple[str, ...] = ()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for the forward in hand and hold the next one; weights change inside this block only."""
        with self._gate:
            yield

    def collect(
        self,
        requests: Sequence[EpisodeRequest],
        sampling: Sampling,
        on_episode: Callable[[Episode], None] | None = None,
    ) -> list[Episode]:
        """One episode a request, in the order of the requests; failed ones are void (`Ended.FAILED`), never missing."""
        done: dict[int, Episode] = {}

        def keep(index: int, episode: Episode) -> None:
            done[index] = episode
            for taker in (self._sink, on_episode):
                if taker is not None:
                    taker(episode)

        self.stream(requests, sampling, keep)
        return [done[index] for index in range(len(requests))]

    def submit(self, requests: Sequence[EpisodeRequest], sampling: Sampling) -> Pending:
        """The same in two parts, as workers do it; here nothing drives before somebody waits."""
        return Pending(partial(self.collect, requests, sampling))

    def scene_family(self, scene_id: str) -> str:
        """What kind of situation a scene is; "" where that is unknown."""
        return self.core.simulator.scene_family(scene_id)

    def stream(
        self,
        requests: Iterable[EpisodeRequest],
        sampling: Sampling,
        on_episode: Callable[[int, Episode], None],
        more: Callable[[], Iterable[EpisodeRequest]] | None = None,
    ) -> None:
        """Drive requests and those that come meanwhile; keeps no episode.

        Args:
            requests: the first ones.
            sampling: how all of them are driven.
            on_episode: is given the number of a request, in the order of their coming, and its episode.
            more: asked between forwards for further requests, so it may change weights too; the stream ends when
                everything is driven and it has none.

        """
        waiting = deque(enumerate(requests))
        count_asked = len(waiting)
        owner: dict[int, tuple[int, EpisodeRequest]] = {}
        free = list(range(self.core.spec.slots))[::-1]
        count = np.zeros(self.core.spec.slots, np.int64)
        while True:
            for request in more() if more is not None else ():
                waiting.append((count_asked, request))
                count_asked += 1
            if not waiting and not owner:
                return
            fresh = []
            while waiting and free:
                slot = free.pop()
                owner[slot] = waiting.popleft()
                count[slot] = 0
                self._frames[slot], self._decoded[slot] = [], {}
                fresh.append(slot)
            if fresh:
                self._expect([request for _, request in waiting])
                self.core.start(np.array(fresh, np.int64), [owner[slot][1] for slot in fresh])
            batch = self.core.receive(self._min_ready or max(1, len(owner) // 2), self._timeout_s)
            if not len(batch.tick):
                raise SimulatorError(f"{len(owner)} slots stayed silent for {self._timeout_s} s", code="TIMEOUT")
            for frame in batch.tick.frames:
                if self._keep_frames:
                    self._frames.setdefault(frame.slot, []).append(frame)
                self._note_decoder(frame)
            for row, episode in batch.episodes.items():
                slot = int(batch.tick.slots[row])
                if slot not in owner:
                    continue
                index, request = owner.pop(slot)
                free.append(slot)
                if episode.failure is not None and self._may_retry(episode.failure, request):
                    self.counts["retried"] += 1
                    waiting.appendleft((index, replace(request, attempt=request.attempt + 1)))
                    continue
                on_episode(index, self._close(batch, row, slot, int(count[slot]), episode, sampling))
            # What an earlier collection left driving when it broke off is delivered too; nobody asks for it any more.
            asked = np.isin(batch.tick.slots, list(owner))
            for slot, failure in self._decide(batch, asked, count, sampling).items():
                index, request = owner.pop(slot)
                free.append(slot)
                void = Episode(request, Ended.FAILED, failure, {}, float("nan"), False, self._actor)
                self.counts["failed"] += 1
                on_episode(index, void.with_arrays(sampling=sampling, receipt=self._receipt(request, slot)))

    def _expect(self, requests: Sequence[EpisodeRequest]) -> None:
        """Tell a world that loads its scenes what comes next."""
        expect = getattr(self.core.simulator, "expect", None)
        if expect is not None:
            expect(requests[: 4 * self.core.spec.slots])

    def _note_decoder(self, frame: Frame) -> None:
        """What makes pixels of a camera's encoded pictures, by the first one of an episode."""
        found = self._decoded.setdefault(frame.slot, {})
        if frame.format != "raw" and frame.camera not in found and frame.camera in self.policy.spec.cameras:
            from alpagym_runtime.pictures import describe

            found[frame.camera] = describe(frame.data, *self.policy.spec.cameras[frame.camera])

    def _receipt(self, request: EpisodeRequest, slot: int) -> Receipt:
        versions, cpu = environment()
        try:
            scene = self.core.simulator.scene_hash(request.scene_id)
        except (SceneError, KeyError):
            scene = ""  # an unknown scene has no content
        return Receipt(self._config_hash, scene, versions, cpu, dict(self._decoded.get(slot, {})))

    def _may_retry(self, failure: Failure, request: EpisodeRequest) -> bool:
        return failure.kind == "transient" and request.attempt < self._retries

    def _decide(
        self, batch: CoreBatch, asked: NDArray[np.bool_], count: NDArray[np.int64], sampling: Sampling
    ) -> dict[int, Failure]:
        """One forward for the rows that wait; returns the slots whose row the policy failed."""
        tick = batch.tick
        rows = np.flatnonzero(asked & (tick.ended == Ended.RUNNING))
        if not len(rows):
            return {}
        whole = len(rows) == len(tick)
        observation = batch.observation if whole else {name: array[rows] for name, array in batch.observation.items()}
        chosen = [tick.requests[row] for row in rows]
        seeds = decision_seeds(chosen, tick.tick[rows])
        with self._gate, timed("act"):
            decisions = self.policy.act(observation, seeds, sampling)
        decisions = validate_decision(decisions, self.policy.spec, len(rows))
        slots = tick.slots[rows]
        failures: dict[int, Failure] = {}
        if decisions.error is not None:
            bad = np.array([text is not None for text in decisions.error])
            texts = [str(text) for text in decisions.error[bad]]
            failures = {
                int(slot): Failure("permanent", "POLICY", text) for slot, text in zip(slots[bad], texts, strict=True)
            }
            rows, slots = rows[~bad], slots[~bad]
            observation = {name: array[~bad] for name, array in observation.items()}
            decisions = decisions.take(np.flatnonzero(~bad))
            decisions.error = None
        if len(rows):
            labels = {name: array[rows] for name, array in tick.labels.items()}
            self._keep(batch, rows, slots, count, observation, labels, decisions)
            self.core.send(slots, decisions)
            count[slots] += 1
        return failures

    def _keep(
        self,
        batch: CoreBatch,
        rows: NDArray[np.int64],
        slots: NDArray[np.int64],
        count: NDArray[np.int64],
        observation: dict[str, Any],
        labels: dict[str, Any],
        decisions: Decision,
    ) -> None:
        at = count[slots]
        self._observed, self._labels = tuple(observation), tuple(labels)
        self._columns = tuple(column_names(decisions))
        for name, array in observation.items():
            keep: Callable[..., None] = self._store.write_pictures if name in self._cameras else self._store.write
            keep(f"observation.{name}", slots, at, array)
        for name, array in labels.items():
            self._store.write(f"label.{name}", slots, at, array)
        for name in self._columns:
            value = column_of(decisions, name)
            write: Callable[..., None] = self._store.write_ragged if isinstance(value, Ragged) else self._store.write
            write(f"decision.{name}", slots, at, value)
        self._store.write("controls", slots, at, batch.tick.controls[rows])
        # What the tick before earned belongs to the decision before; row 0 earned nothing.
        for name, values in batch.terms.items():
            self._store.write(f"term.{name}", slots, at, values[rows])

    def _close(
        self, batch: CoreBatch, row: int, slot: int, ticks: int, episode: Episode, sampling: Sampling
    ) -> Episode:
        if episode.ended == Ended.FAILED or ticks == 0:
            self.counts["failed"] += episode.ended == Ended.FAILED
            return episode.with_arrays(
                actor=self._actor, sampling=sampling, receipt=self._receipt(episode.request, slot)
            )
        self.counts["episodes"] += 1
        read = self._store.read
        observation = {
            name: self._store.read_with_last(f"observation.{name}", slot, ticks, batch.observation[name][row])
            for name in self._observed
        }
        terms = {}
        for name in batch.terms:
            paid = np.concatenate([read(f"term.{name}", slot, ticks)[1:], batch.terms[name][row : row + 1]])
            if name in batch.late_terms.get(row, {}):
                late = batch.late_terms[row][name]
                paid = np.concatenate([np.zeros(ticks - len(late)), late])
            terms[name] = paid
        return episode.with_arrays(
            actor=self._actor,
            observation=observation,
            decisions=decision_from_columns({c: read(f"decision.{c}", slot, ticks) for c in self._columns}),
            labels={name: read(f"label.{name}", slot, ticks) for name in self._labels},
            controls=read("controls", slot, ticks),
            rewards=np.sum(list(terms.values()), axis=0) if terms else np.zeros(ticks),
            terms=terms,
            sampling=sampling,
            receipt=self._receipt(episode.request, slot),
            frames=tuple(self._frames[slot]),
        )
