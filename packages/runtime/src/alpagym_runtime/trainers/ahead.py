"""The episodes of training steps, asked for before they are due.

On policy each step's episodes are asked for when the step begins. Otherwise those of the next `lag` steps are being
driven while a step trains: episodes then were decided by weights of up to `lag` versions ago, which every decision
names, and no more than `lag` + 1 steps of episodes exist at a time, however fast they are driven.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from alpagym_runtime.errors import SimulatorError
from alpagym_runtime.rollouts.collector import Collects, Pending
from alpagym_runtime.types import Ended, Episode, EpisodeRequest, Failure, Sampling

if TYPE_CHECKING:
    from alpagym_runtime.trainers.run import Run


class Ahead:
    """See the module's text.

    Args:
        run: whose transport episodes go through, unless workers have sent them that way already.
        collector: who drives.
        ask: requests and sampling of a step, 0, 1, …; asked once each, in order.
        steps: the first one and the number after the last.
        lag: steps that may be asked for before they are due.

    """

    def __init__(
        self,
        run: Run,
        collector: Collects,
        ask: Callable[[int], tuple[list[EpisodeRequest], Sampling]],
        steps: tuple[int, int],
        lag: int,
    ) -> None:
        self._run, self._collector, self._ask, self._lag = run, collector, ask, lag
        self._next, self._end = steps
        self._pending: deque[Pending] = deque()

    def take(self) -> list[Episode]:
        """Episodes of the next step, in the order of its requests; those that are too old are void and counted."""
        while len(self._pending) <= self._lag and self._next < self._end:
            self._pending.append(self._collector.submit(*self._ask(self._next)))
            self._next += 1
        episodes = self._pending.popleft().wait()
        if self._run.pool is None:
            transport = self._run.transport
            handles = [transport.send(episode) for episode in episodes]
            episodes = [transport.receive(handle) for handle in handles]
            for handle in handles:
                transport.discard(handle)
        episodes, stale = admit(episodes, self._run.policy.version, self._lag)
        if stale:
            self._collector.counts["stale"] += stale
        return episodes

    @property
    def pending(self) -> int:
        """Episodes that are driven and wait to be trained on."""
        return sum(pending.ready() for pending in self._pending)

    def cancel(self) -> None:
        """Want no further steps."""
        for pending in self._pending:
            pending.cancel()


def admit(episodes: Sequence[Episode], version: int, lag: int) -> tuple[list[Episode], int]:
    """Episodes that may train weights of a version; older ones than `lag` versions become void, and are counted.

    An episode is as old as its oldest decision.

    Raises:
        SimulatorError: one was decided by weights that do not exist yet.

    """
    admitted, stale = [], 0
    for episode in episodes:
        if episode.decisions is not None and len(episode.decisions):
            oldest, newest = int(episode.decisions.version.min()), int(episode.decisions.version.max())
            if newest > version:
                raise SimulatorError(
                    f"an episode of scene {episode.request.scene_id!r} was decided by version {newest} of the weights, "
                    f"and version {version} is about to train on it",
                    code="VERSION",
                    permanent=True,
                )
            if oldest < version - lag:
                stale += 1
                text = f"decided by version {oldest}, too old for version {version} (trainer.max_lag={lag})"
                failure = Failure("permanent", "STALE", text)
                episode = replace(episode, ended=Ended.FAILED, failure=failure)
        admitted.append(episode)
    return admitted, stale
