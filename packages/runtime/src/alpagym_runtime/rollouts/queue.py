"""The episodes that are to be driven, and which worker drives them: order, retries, scenes kept together.

No threads and no processes here. What a worker loses comes back and goes first. As a crash may be an episode's own
doing, a worker that holds lost ones holds few: a quarter of its slots after the first loss, a sixteenth after the next,
so that an episode which kills workers takes few others with it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from alpagym_runtime.rollouts.wire import Task
from alpagym_runtime.types import EpisodeRequest

RETRY, URGENT, FRESH = range(3)
"""Priorities: lost episodes, evaluations, training."""


@dataclass
class Job:
    """One episode to be driven.

    Attributes:
        number: names it between the trainer and the workers.
        task: what it has in common with others.
        request: the episode.
        batch: whose it is; None: nobody's any more.
        place: of its request there.
        priority: RETRY is for jobs that come back.
        losses: workers that were lost with it.
        since: when it was handed out, s.

    """

    number: int
    task: Task
    request: EpisodeRequest
    batch: Any
    place: int
    priority: int = FRESH
    losses: int = 0
    since: float = 0.0


@dataclass
class JobQueue:
    """Jobs that wait.

    Attributes:
        slots: episodes that a worker drives side by side.
        ahead: further ones that it holds, so that a slot that ends is filled at once.

    """

    slots: int
    ahead: int
    _waiting: list[deque[Job]] = field(default_factory=lambda: [deque(), deque(), deque()])
    _homes: dict[tuple[str, str], int] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self._waiting))

    def add(self, job: Job) -> None:
        """Behind those of its priority."""
        self._waiting[job.priority].append(job)

    def take_back(self, job: Job) -> None:
        """A job whose worker was lost; it goes first."""
        job.losses += 1
        self._waiting[RETRY].append(job)

    def drop(self, batch: Any) -> None:
        """Forget what a batch still wants."""
        for jobs in self._waiting:
            kept = [job for job in jobs if job.batch is not batch]
            jobs.clear()
            jobs.extend(kept)

    def take(self, worker: int, held: list[Job], share: int) -> list[Job]:
        """Jobs for a worker.

        Args:
            worker: its index.
            held: what it has.
            share: how many it may hold besides the limit of its slots: its part of all that is left.

        """
        taken: list[Job] = []
        for jobs in self._waiting:
            losses = max([job.losses for job in (*held, *taken)], default=0)
            while jobs and jobs[0].losses:  # in their order, however long that takes
                losses = max(losses, jobs[0].losses)
                if len(held) + len(taken) >= max(1, self.slots >> 2 * losses):
                    return taken
                taken.append(jobs.popleft())
            limit = max(1, self.slots >> 2 * losses) if losses else self.slots + self.ahead
            room = min(limit, share) - len(held) - len(taken)
            taken += self._at_home(worker, jobs, room)
            # A scene costs to load: another worker's are driven only where half of the slots would stand still.
            half = min(limit, share, max(1, self.slots // 2)) - len(held) - len(taken)
            taken += [jobs.popleft() for _ in range(min(half, len(jobs)))]
        return taken

    def _at_home(self, worker: int, jobs: deque[Job], room: int) -> list[Job]:
        """Jobs in scenes that this worker has or nobody has yet."""
        found: list[Job] = []
        passed: list[Job] = []
        while jobs and len(found) < room:
            job = jobs.popleft()
            home = self._homes.setdefault((job.task.world.split, job.request.scene_id), worker)
            (found if home == worker else passed).append(job)
        jobs.extendleft(reversed(passed))
        return found

    def move_out(self, worker: int) -> None:
        """A worker is gone for good, and its scenes with it."""
        self._homes = {scene: home for scene, home in self._homes.items() if home != worker}
