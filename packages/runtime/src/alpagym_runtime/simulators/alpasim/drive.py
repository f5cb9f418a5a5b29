"""Any policy as a plain AlpaSim driver: sessions come and go, one model serves all that wait.

There is no simulator of ours behind it: a stock AlpaSim, or any client of the egodriver contract, drives. A policy that
raises, or marks a row as failed, ends that session with a status; the others and the process go on.

A slow model works in two halves: while it answers one batch, a second thread gathers and observes the next. The policy
itself is only ever called from the thread that serves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from alpagym_runtime.files import strict, write_json
from alpagym_runtime.policies.base import validate_decision
from alpagym_runtime.random import mix, text_seed
from alpagym_runtime.simulators.alpasim.config import ServerConfig
from alpagym_runtime.simulators.alpasim.server import DriverServer, Refused, Session
from alpagym_runtime.types import Decision, Observation, Policy, Sampling

log = logging.getLogger(__name__)

LABELS = ("recorded_plan_rig", "target_plan_rig")

SLOW_S = 0.002
"""A forward that takes longer is worth a hand-over to the gathering thread."""

LONGEST_WINDOW_S = 0.1


class PolicyDriver:
    """Serves a policy until `stop`.

    Args:
        policy: who drives.
        config: where to listen.
        sessions: at most so many at once; further ones get RESOURCE_EXHAUSTED.
        sampling: how it draws.
        max_batch: most sessions in one forward.
        seed: of the decisions, with the session's id and the count of its decisions.
        window_s: longest wait for a third of the open sessions once one waits; None: half of a forward, at most 0.1 s.

    """

    def __init__(
        self,
        policy: Policy,
        config: ServerConfig,
        *,
        sessions: int = 64,
        sampling: Sampling | None = None,
        max_batch: int = 64,
        seed: int = 0,
        window_s: float | None = None,
    ) -> None:
        self.policy = policy
        self.server = DriverServer(config, policy.spec, self, sessions, keep_recording=bool(policy.spec.privileged))
        self._sampling = sampling or Sampling("mean")
        self._max_batch, self._seed, self._window_s = max_batch, seed, window_s
        self._free = list(range(sessions))[::-1]
        self._capacity = sessions
        self._carry = {name: np.zeros((sessions, *shape), np.float32) for name, shape in policy.spec.carry.items()}
        self._seeds = np.zeros(sessions, np.uint64)
        self._stop = threading.Event()
        self._backlog: list[Session] = []
        self._gatherer = ThreadPoolExecutor(1, thread_name_prefix="gather")
        self._next: Future[tuple[list[Session], Observation]] | None = None
        self._model_busy = False
        self._forwards_s: deque[float] = deque([0.0], maxlen=16)
        self._batches: Counter[int] = Counter()
        self._latency: Counter[int] = Counter()
        self._opened = self._closed = self._failed = 0
        self._busy_s, self._began_s = 0.0, time.monotonic()

    # ------------------------------------------------------------ the owner of sessions (the server's thread)

    def admit(self, session_id: str, scene_id: str) -> int:
        """Any session, while there is room."""
        if not self._free:
            text = f"all {self._capacity} sessions are taken; close one or serve with more"
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        row = self._free.pop()
        for array in self._carry.values():
            array[row] = 0.0
        self._seeds[row] = mix(self._seed, text_seed(session_id))
        self._opened += 1
        return row

    def ended(self, session: Session, failure: Refused | None) -> None:
        """Its room is free again."""
        self._free.append(session.row)
        if failure is None:
            self._closed += 1
        else:
            self._failed += 1
            log.warning("session %r failed: %s", session.id, failure.text)

    # ------------------------------------------------------------ serving

    def start(self) -> None:
        """Listen; `serve` answers."""
        self.server.start()
        self._began_s = time.monotonic()

    def serve(self, stats: Path | None = None) -> None:
        """Answer until `stop`; writes `stats` every 5 s and at the end."""
        written_s = time.monotonic()
        while not self._stop.is_set():
            self.step(0.5)
            if stats is not None and time.monotonic() - written_s > 5.0:
                write_json(stats, strict(self.stats()))
                written_s = time.monotonic()
        if stats is not None:
            write_json(stats, strict(self.stats()))

    def stop(self) -> None:
        """Let `serve` return; safe in a signal handler."""
        self._stop.set()

    def close(self) -> None:
        """Stop listening; calls in flight end with UNAVAILABLE."""
        self.server.stop()
        self._gatherer.shutdown()

    def step(self, timeout_s: float) -> int:
        """Decide once for the sessions that wait; returns how many there were."""
        batch, observation = self._next.result() if self._next is not None else self._prepare(timeout_s)
        self._next = None
        if not batch:
            return 0
        try:
            self._decide(batch, observation)
        except Exception as err:
            # Not the policy's: `_act` has caught that. These sessions end, the process goes on.
            log.exception("a batch of %d failed", len(batch))
            for session in batch:
                self.server.fail(session, grpc.StatusCode.INTERNAL, f"{type(err).__name__}: {err}")
        return len(batch)

    def _prepare(self, timeout_s: float) -> tuple[list[Session], Observation]:
        """The next batch and what it sees; while the model works, it waits until half of the sessions are ready.

        A model that is free goes with a third: sessions that are slower than it (pictures to decode, a busy client)
        never come to half in one forward, and waiting for that leaves it idle.
        """
        server, ready = self.server, self._backlog
        missing = (self._share(2) if self._model_busy else 1) - len(ready)
        if missing > 0:
            # Once the model is free, one session that waits is enough.
            enough = missing if ready else missing - 1
            ready += server.wait(missing, timeout_s, lambda: 0 if self._model_busy else enough)
        window_s = min(self._forward_s / 2.0, LONGEST_WINDOW_S) if self._window_s is None else self._window_s
        more = self._share(3) - len(ready)
        if ready and window_s and more > 0:
            ready += server.wait(more, window_s)
        self._backlog = ready[self._max_batch :]
        # A session may have failed or closed since it was ready.
        batch = [session for session in ready[: self._max_batch] if session.pending is not None]
        return batch, self._observe(batch) if batch else {}

    @property
    def _forward_s(self) -> float:
        """What a forward takes: the shortest of late, as any may have waited for the interpreter."""
        return min(self._forwards_s)

    def _share(self, parts: int) -> int:
        """The open sessions' `parts`-th part, rounded up; no more than fit in a forward."""
        return max(1, min(self._max_batch, -(-len(self.server.sessions) // parts)))

    def _decide(self, batch: list[Session], observation: Observation) -> None:
        server = self.server
        self._model_busy = True
        if self._forward_s > SLOW_S:
            self._next = self._gatherer.submit(self._prepare, 0.5)
        began_s = time.monotonic()
        decision = self._act(batch, observation)
        done_s = time.monotonic()
        self._model_busy = False
        if self._next is not None:
            server.notify()
        self._busy_s += done_s - began_s
        self._forwards_s.append(done_s - began_s)
        self._batches[len(batch)] += 1
        if decision.error is None:
            good = batch
        else:
            for session, error in zip(batch, decision.error, strict=True):
                if error is not None:
                    server.fail(session, grpc.StatusCode.INTERNAL, f"the policy failed: {error}")
            rows = np.flatnonzero([error is None for error in decision.error])
            good, decision = [batch[row] for row in rows], decision.take(rows)
        good_rows = [i for i, session in enumerate(good) if server.sessions.get(session.id) is session]
        if len(good_rows) < len(good):
            # Closed meanwhile: its row may be another's by now.
            good, decision = [good[i] for i in good_rows], decision.take(np.array(good_rows, np.int64))
        if good:
            slots = np.array([session.row for session in good])
            for name, array in self._carry.items():
                array[slots] = decision.carry[name]
            waited_s = [done_s - session.pending_s for session in good]
            server.reply(good, decision.plan_rig)
            self._latency.update(round(1e3 * seconds) for seconds in waited_s)

    def _observe(self, batch: Sequence[Session]) -> Observation:
        observation = self.server.observe(batch)
        privileged = self.policy.spec.privileged
        if privileged:
            observation |= self.server.label(batch, privileged)
        slots = np.array([session.row for session in batch])
        for name, array in self._carry.items():
            observation[f"carry_{name}"] = array[slots]
        return observation

    def _act(self, batch: Sequence[Session], observation: Observation) -> Decision:
        slots = np.array([session.row for session in batch])
        ticks = np.array([session.drives for session in batch], np.uint64)
        seeds = mix(self._seeds[slots], ticks, 0)
        try:
            decision = self.policy.act(observation, seeds, self._sampling)
            return validate_decision(decision, self.policy.spec, len(batch))
        except Exception as err:
            log.exception("the policy raised on a batch of %d", len(batch))
            if len(batch) == 1:
                return self._failed_decision(f"{type(err).__name__}: {err}")
        # One by one, so that only the session at fault ends.
        singles = []
        for i in range(len(batch)):
            row = {name: array[i : i + 1] for name, array in observation.items()}
            try:
                decision = self.policy.act(row, seeds[i : i + 1], self._sampling)
                single = validate_decision(decision, self.policy.spec, 1)
            except Exception as err:
                single = self._failed_decision(f"{type(err).__name__}: {err}")
            single.trace = {}
            single.log_prob = single.log_prob_mask = np.zeros((1, 0), np.float32)  # type: ignore[assignment]
            single.error = np.array([None], object) if single.error is None else single.error
            single.control = None
            singles.append(single)
        return Decision.concatenate(singles)

    def _failed_decision(self, text: str) -> Decision:
        spec = self.policy.spec
        return Decision(
            np.zeros((1, spec.plan_steps, 3), np.float32),
            np.zeros((1, 0), np.float32),
            np.zeros((1, 0), bool),
            np.zeros(1, np.int64),
            carry={name: np.zeros((1, *shape), np.float32) for name, shape in spec.carry.items()},
            error=np.array([text], object),
        )

    def stats(self) -> dict[str, Any]:
        """Numbers since the start: sessions, decisions, batch sizes, how busy the model was, waits of `drive`."""
        wall_s = time.monotonic() - self._began_s
        batches, drives = sum(self._batches.values()), sum(size * n for size, n in self._batches.items())
        return {
            "wall_s": wall_s,
            "sessions": {"opened": self._opened, "closed": self._closed, "failed": self._failed},
            "calls": dict(self.server.counts),
            "decisions": drives,
            "batches": batches,
            "batch_mean": drives / batches if batches else 0.0,
            "batch_histogram": {str(size): self._batches[size] for size in sorted(self._batches)},
            "model_busy_share": self._busy_s / wall_s if wall_s else 0.0,
            "drive_wait_ms": {f"p{q}": _quantile(self._latency, q / 100.0) for q in (50, 90, 99)},
        }


def _quantile(histogram: Counter[int], share: float) -> int | None:
    total, seen = sum(histogram.values()), 0
    for value in sorted(histogram):
        seen += histogram[value]
        if seen >= share * total:
            return value
    return None
