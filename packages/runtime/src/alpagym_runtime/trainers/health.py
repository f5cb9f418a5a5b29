"""Signs of sickness while a policy learns from its drives, each said once, with what to do, the best remedy first.

The order of the remedies is that of the published RL skill; where it names a setting of its engine, ours that does the
same stands in its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

WINDOW = 10
"""Steps that are looked at together."""

COLLAPSE = (
    "a higher trainer.temperature (or trainer.top_p), a reward that tells more plans apart, scenes whose drives differ "
    "more (trainer.scene_focus)"
)
TOO_FAST = (
    "samples decoded ahead (simulator.workers, simulator.cache_mb), fewer drives a step (rollout.group_size, "
    "rollout.scenes_per_step), more processes that train (topology.processes), weights spread over them "
    "(learner.shard=always), fewer steps (trainer.updates)"
)
TOO_SLOW = "more workers (rollout.workers), or less training a step (trainer.epochs, trainer.minibatch)"
REFUSED = "a lower trainer.learning_rate, a lower trainer.gradient_clip; with bfloat16 weights, float32"


class Health:
    """Watches the numbers of a stage's steps.

    Args:
        note: takes a line for the user.
        ahead: whether drives are made while a step trains.

    """

    def __init__(self, note: Callable[[str], None], ahead: bool) -> None:
        self._note, self._ahead = note, ahead
        self._rows: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        self._said: set[str] = set()

    def see(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of step 1, 2, …, by the names of `telemetry.metrics`."""
        self._rows.append(numbers)
        if numbers.get("steps_refused"):
            self._say("refused", step, "a number was not finite, so that an optimiser step was left out", REFUSED)
        if len(self._rows) < WINDOW:
            return
        groups = self._sum("groups")
        if groups and self._sum("groups_informative") < 0.1 * groups:
            told = f"in {self._sum('groups_informative'):.0f} of {groups:.0f} groups the rewards differ"
            self._say("groups", step, f"groups have collapsed: {told}, and the others teach nothing", COLLAPSE)
        if not self._ahead:
            return
        drive, train = self._sum("seconds_drive"), self._sum("seconds_train")
        if self._sum("episodes_stale") > 0 or (self._pending_grows() and drive < 0.1 * train):
            text = "driving is faster than training: drives wait, and were made by older weights"
            self._say("fast", step, text, TOO_FAST)
        elif drive > train:
            share = drive / max(drive + train, 1e-9)
            text = f"driving is slower than training, which waits {share:.0%} of the time"
            self._say("slow", step, text, TOO_SLOW)

    def _pending_grows(self) -> bool:
        pending = [row["pending"] for row in self._rows if "pending" in row]
        return len(pending) == WINDOW and min(pending[WINDOW // 2 :]) > max(pending[: WINDOW // 2])

    def _sum(self, name: str) -> float:
        return float(sum(row.get(name, 0.0) for row in self._rows))

    def _say(self, sign: str, step: int, text: str, remedies: str) -> None:
        if sign not in self._said:
            self._said.add(sign)
            self._note(f"step {step}: {text}. In this order: {remedies}")
