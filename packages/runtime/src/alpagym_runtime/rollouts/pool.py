"""Rollout workers as the trainer sees them: requests go in, episodes come out, whatever happens to the processes.

Memory is bounded by what was asked for: the trainer asks for no more steps than it may lag behind. Who starts workers,
and what happens when one dies, is the supervisor's (`rollouts.supervisor`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from alpagym_runtime.rollouts.collector import Pending
from alpagym_runtime.rollouts.cores import World
from alpagym_runtime.rollouts.launchers import Launcher
from alpagym_runtime.rollouts.queue import FRESH, Job, JobQueue
from alpagym_runtime.rollouts.supervisor import State, Supervisor, Worker, clear
from alpagym_runtime.rollouts.weights import Publisher
from alpagym_runtime.rollouts.wire import Task, noise_of, require_config
from alpagym_runtime.run_config import RunConfig
from alpagym_runtime.types import Ended, Episode, EpisodeRequest, Policy, Sampling, TrainablePolicy, Transport


@dataclass
class Batch:
    """Requests that somebody waits for.

    Attributes:
        requests: in order.
        arrived: numbers and episodes that nobody has taken yet.

    """

    requests: Sequence[EpisodeRequest]
    arrived: deque[tuple[int, Episode]] = field(default_factory=deque)


class WorkerPool:
    """See the module's text; started by its first request.

    Args:
        config: the frozen config.
        directory: the run's; it holds that config.
        transport: the trainer's end.
        make_launcher: how workers are started.
        note: is given lines for people, in the thread that waits for episodes.

    """

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        transport: Transport,
        make_launcher: Callable[[], Launcher],
        note: Callable[[str], None],
    ) -> None:
        require_config(directory)
        rollout = config.rollout
        self._config, self._directory, self._transport, self._note = config, directory, transport, note
        self._make_launcher = make_launcher
        slots = rollout.slots_of_worker
        queue = JobQueue(slots, ahead=max(2, slots // 8))
        self._state = State(queue, [Worker(index) for index in range(max(rollout.workers, 1))])
        self._lock = self._state.lock
        self._publisher = Publisher(directory)
        self._numbers = 0
        self._supervisor: Supervisor | None = None

    def collector(
        self,
        world: World,
        driver: Policy,
        *,
        priority: int = FRESH,
        keep_frames: bool = False,
        sink: Callable[[Episode], None] | None = None,
    ) -> PoolCollector:
        """What makes episodes of a driver in a world."""
        return PoolCollector(self, world, driver, priority, keep_frames, sink)

    def submit(self, task: Task, requests: Sequence[EpisodeRequest], driver: Policy, priority: int) -> Batch:
        """Ask for episodes, driven by the driver's present weights or later ones."""
        supervisor = self._start()
        if task.noise is None and isinstance(driver, TrainablePolicy):
            self._publisher.publish(driver)
        batch = Batch(requests)
        with self._lock:
            self._state.weights = self._publisher.number
            for place, request in enumerate(requests):
                self._numbers += 1
                self._state.queue.add(Job(self._numbers, task, request, batch, place, priority))
        supervisor.wake()
        return batch

    def next(self, batch: Batch) -> tuple[int, Episode]:
        """An episode of a batch and the place of its request; waits for it.

        Raises:
            SimulatorError, ConfigError: what the workers could not go on from; names worker, cause and log.

        """
        while True:
            with self._lock:
                self._lock.wait_for(lambda: batch.arrived or self._state.failure or self._state.notes)
                notes, found = list(self._state.notes), batch.arrived.popleft() if batch.arrived else None
                self._state.notes.clear()
            for text in notes:
                self._note(text)
            if found is not None:
                return found
            if self._state.failure is not None:
                raise self._state.failure

    def cancel(self, batch: Batch) -> None:
        """Want no more of a batch; what is being driven is thrown away when it comes."""
        with self._lock:
            self._state.queue.drop(batch)
            for worker in self._state.workers:
                for job in worker.jobs.values():
                    if job.batch is batch:
                        job.batch = None

    def family(self, scene_id: str) -> str:
        """What kind of situation a scene is, as a worker said that drove in it."""
        return self._state.families.get(scene_id, "")

    @property
    def restarts(self) -> int:
        """Workers that were started again."""
        return self._state.restarts

    @property
    def lost(self) -> int:
        """Episodes that were lost with their worker, and driven again or given up."""
        return self._state.lost

    @property
    def alive(self) -> int:
        """Workers that are connected."""
        with self._lock:
            return sum(worker.link is not None for worker in self._state.workers)

    def numbers(self) -> dict[str, float]:
        """What metrics.jsonl holds of the workers with every training step."""
        with self._lock:
            return {
                "workers/alive": float(sum(worker.link is not None for worker in self._state.workers)),
                "workers/restarts": float(self._state.restarts),
                "workers/lost": float(self._state.lost),
                "workers/queued": float(len(self._state.queue)),
            }

    def summary(self) -> dict[str, Any]:
        """What summary.json says: count, restarts, lost episodes, CPU seconds and peak memory of all workers."""
        with self._lock:
            return {
                "count": len(self._state.workers),
                "restarts": self._state.restarts,
                "lost": self._state.lost,
                "cpu_s": sum(worker.cpu_before_s + worker.cpu_s for worker in self._state.workers),
                "peak_rss_bytes": sum(worker.peak_rss_bytes for worker in self._state.workers),
            }

    def close(self) -> None:
        """End the workers, and everything that was kept for them; idempotent."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.close()

    def _start(self) -> Supervisor:
        if self._supervisor is None:
            clear(self._config, self._directory)
            self._supervisor = Supervisor(
                self._config, self._directory, self._transport, self._make_launcher(), self._state
            )
        return self._supervisor


class PoolCollector:
    """Makes episodes in the workers; used as a `Collector` is."""

    def __init__(
        self,
        pool: WorkerPool,
        world: World,
        driver: Policy,
        priority: int,
        keep_frames: bool,
        sink: Callable[[Episode], None] | None,
    ) -> None:
        self._pool, self._world, self._driver, self._sink = pool, world, driver, sink
        self._priority, self._keep_frames = priority, keep_frames
        self.counts: Counter[str] = Counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Workers have copies of the weights, so nothing needs to stop while they change here."""
        yield

    def scene_family(self, scene_id: str) -> str:
        """What kind of situation a scene is; known once it was driven in."""
        return self._pool.family(scene_id)

    def collect(
        self,
        requests: Sequence[EpisodeRequest],
        sampling: Sampling,
        on_episode: Callable[[Episode], None] | None = None,
    ) -> list[Episode]:
        """One episode a request, in the order of the requests; failed ones are void, never missing."""
        return self._gather(self._submit(requests, sampling), on_episode)

    def submit(self, requests: Sequence[EpisodeRequest], sampling: Sampling) -> Pending:
        """Begin, with the present weights, and return."""
        batch = self._submit(requests, sampling)
        return Pending(
            partial(self._gather, batch, None), partial(self._pool.cancel, batch), lambda: len(batch.arrived)
        )

    def _submit(self, requests: Sequence[EpisodeRequest], sampling: Sampling) -> Batch:
        task = Task(self._world, sampling, noise_of(self._driver), self._keep_frames)
        return self._pool.submit(task, requests, self._driver, self._priority)

    def _gather(self, batch: Batch, on_episode: Callable[[Episode], None] | None) -> list[Episode]:
        done: dict[int, Episode] = {}
        try:
            while len(done) < len(batch.requests):
                place, episode = self._pool.next(batch)
                done[place] = episode
                self._count(batch.requests[place], episode)
                for taker in (self._sink, on_episode):
                    if taker is not None:
                        taker(episode)
        finally:
            self._pool.cancel(batch)
        return [done[place] for place in range(len(batch.requests))]

    def _count(self, request: EpisodeRequest, episode: Episode) -> None:
        """As a collector counts."""
        for name, amount in (
            ("retried", episode.request.attempt - request.attempt),
            ("failed", int(episode.ended == Ended.FAILED)),
            ("episodes", int(episode.ended != Ended.FAILED and len(episode) > 0)),
        ):
            if amount:
                self.counts[name] += amount
