"""What Cosmos-RL's controller prints, as numbers; and what they mean, in words, with what to do.

Sick and healthy patterns are those of NVIDIA's recipe for Alpamayo; the order of remedies is the recipe's.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alpagym_runtime.files import read_json
from alpagym_runtime.trainers.cosmos.journal import Journal, Worker
from alpagym_runtime.trainers.cosmos.tables import FOLDER

if TYPE_CHECKING:
    from alpagym_runtime.run_config import RunConfig

STATUS = "status.json"
"""Below FOLDER: `plain(seen)`, as the supervisor writes it."""
_STAT = re.compile(
    r"Stat: (\d+) samples, .*?(\d+) pending rollouts, (\d+) in-flight, (\d+) filtered.*?([\d.]+)s elapsed"
)
_STALENESS = re.compile(r"weight staleness: accepted p50=(\S+) p99=(\S+) max=(\d+), discarded=(\d+)/(\d+)")
_STEP = re.compile(r"Step: (\d+)/(\d+), Reward Mean: (\S+?), ")
_THROTTLE = re.compile(r"Soft throttle (ENGAGED|RELEASED)")
_REJECTED = re.compile(r"prompt rejected")
_DIED = re.compile(r"Process (\d+) failed with return code (-?\d+)")
_WINDOW = 64


@dataclass
class Seen:
    """What was read so far.

    Attributes:
        samples: episodes that the controller got.
        pending: finished episodes that nobody has trained on yet, the newest last.
        in_flight: prompts under way, as episodes.
        step, total: training steps done, and how many there will be.
        discarded: episodes that were too old.
        staleness_max: largest version gap of the last report.
        throttles: how often the controller held the rollouts back.
        rejected: how often a rollout waited for newer weights, since the last step.
        died: exit codes of workers that the launcher reported, by process.

    """

    samples: int = 0
    pending: deque[int] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    in_flight: int = 0
    step: int = 0
    total: int = 0
    discarded: int = 0
    staleness_max: int = 0
    throttles: int = 0
    rejected: int = 0
    died: dict[int, int] = field(default_factory=dict)

    def read(self, line: str) -> None:
        """Take in a line of the controller's, a rollout's or the launcher's log."""
        if found := _STAT.search(line):
            self.samples = int(found[1])
            self.pending.append(int(found[2]))
            self.in_flight = int(found[3])
        elif found := _STALENESS.search(line):
            self.staleness_max = int(found[3])
            self.discarded += int(found[4])
        elif found := _STEP.search(line):
            self.step, self.total, self.rejected = int(found[1]), int(found[2]), 0
        elif (found := _THROTTLE.search(line)) and found[1] == "ENGAGED":
            self.throttles += 1
        elif _REJECTED.search(line):
            self.rejected += 1
        elif found := _DIED.search(line):
            self.died[int(found[1])] = int(found[2])


class Logs:
    """The logs of a job, read as they grow.

    Args:
        folder: that Cosmos-RL's launcher was given for them.
        launcher: the launcher's own.

    """

    def __init__(self, folder: Path, launcher: Path) -> None:
        self._folder, self._launcher = folder, launcher
        self._read: dict[Path, int] = {}
        self.seen = Seen()

    @property
    def newest(self) -> Path | None:
        """The folder of the last start."""
        link = self._folder / "logs_latest"
        return link.resolve() if link.exists() else None

    def look(self) -> Seen:
        """Read what is new."""
        files = [self._launcher]
        if (newest := self.newest) is not None:
            files += sorted(newest.glob("*.log"))
        for path in files:
            for line in self._lines(path):
                self.seen.read(line)
        return self.seen

    def _lines(self, path: Path) -> list[str]:
        try:
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(whole)
        return whole.decode(errors="replace").splitlines()

    def skip(self) -> None:
        """Pass over everything that is there: it is of an earlier start."""
        for path in (self._launcher, *self._folder.glob("logs_*/*.log")):
            if path.is_file():
                self._read[path] = path.stat().st_size


@dataclass(frozen=True)
class Sign:
    """A pattern that was recognised: healthy or not, in words, and what to do, first things first."""

    name: str
    healthy: bool
    text: str
    remedies: tuple[str, ...] = ()


def signs(pending: Sequence[int], global_batch: int, numbers: Mapping[str, float], allowed: int) -> list[Sign]:
    """What a job's numbers look like.

    Args:
        pending: finished episodes that wait for training, report after report.
        global_batch: episodes of a training step.
        numbers: of the last training step: staleness_max, groups_collapsed, outdated.
        allowed: version gap that the config allows.

    """
    found = []
    recent = list(pending)[-12:]
    if len(recent) >= 4 and recent[-1] > 4 * global_batch and all(b > a for a, b in itertools.pairwise(recent)):
        found.append(
            Sign(
                "rollouts too fast",
                False,
                f"{recent[-1]} finished episodes wait for training ({recent[-1] / global_batch:.1f} steps), more each "
                "time: training will be on old weights",
                (
                    "cosmos.rollout.prefetch_rollout=true",
                    "smaller cosmos.rollout.batch_size or rollout.group_size",
                    "more cosmos.policy.parallelism.n_init_replicas",
                    "more cosmos.policy.parallelism.dp_shard_size",
                    "smaller cosmos.train.epoch, or cosmos.train.max_num_steps",
                ),
            )
        )
    elif len(recent) >= 3 and all(count == 0 for count in recent[-3:]):
        found.append(
            Sign(
                "rollouts too slow",
                False,
                "nothing waits for training at the last 3 reports: the policy idles",
                (
                    "more cosmos.rollout.parallelism.n_init_replicas",
                    "smaller cosmos.train.train_batch_per_replica",
                ),
            )
        )
    elif recent:
        found.append(Sign("balanced", True, f"{recent[-1]} finished episodes wait for training"))
    if numbers.get("staleness_max", 0.0) > allowed:
        found.append(
            Sign(
                "stale weights",
                False,
                f"an episode was driven by weights {numbers['staleness_max']:.0f} steps old, {allowed} are allowed",
                ("smaller cosmos.train.sync_weight_interval", "cosmos.train.train_policy.on_policy=true"),
            )
        )
    if numbers.get("groups_collapsed", 0.0) >= 0.5:
        found.append(
            Sign(
                "groups collapse",
                False,
                f"the rewards of {100.0 * numbers['groups_collapsed']:.0f} % of the groups are all equal: they teach "
                "nothing",
                (
                    "higher cosmos.rollout.sampling_config.temperature",
                    "a denser reward",
                    "cosmos.train.train_policy.variant=dapo",
                ),
            )
        )
    return found


def plain(seen: Seen) -> dict[str, Any]:
    """For a file."""
    return {**vars(seen), "pending": list(seen.pending), "died": {str(k): v for k, v in seen.died.items()}}


@dataclass(frozen=True)
class JobState:
    """How a job stands: lines for people as (what, text), and signs."""

    lines: tuple[tuple[str, str], ...]
    signs: tuple[Sign, ...]


def job_state(directory: Path, config: RunConfig) -> JobState | None:
    """What the run directory tells of a job; None where there has been none."""
    path, journal = directory / FOLDER / STATUS, Journal(directory)
    if not path.is_file():
        return None
    seen, cosmos = read_json(path), config.cosmos
    steps = journal.steps(0)
    lines = []
    numbers = steps[-1].numbers if steps else {}
    if steps:
        recent = steps[-10:]
        pace = sum(step.seconds for step in recent) / len(recent)
        gap, collapsed = numbers.get("staleness_max", 0.0), 100.0 * numbers.get("groups_collapsed", 0.0)
        lines.append(("step", f"{steps[-1].step} of {steps[-1].total}, {pace:.2f} s each to train"))
        terms = ", ".join(f"{k.removeprefix('term/')} {v:.3f}" for k, v in numbers.items() if k.startswith("term/"))
        lines.append(("reward", f"{numbers.get('reward', float('nan')):.3f} ({terms})"))
        lines.append(("weights", f"version gap {gap:.0f}, {cosmos.train.train_policy.allowed_outdated_steps} allowed"))
        lines.append(("groups", f"{collapsed:.0f} % with equal rewards"))
    if seen["pending"]:
        waiting, late = seen["pending"][-1], seen["discarded"]
        lines.append(
            ("pending", f"{waiting} finished episodes wait, {seen['in_flight']} under way, {late} were too old")
        )
    by_role: dict[str, list[Worker]] = {}
    for worker in journal.workers().values():
        by_role.setdefault(worker.role, []).append(worker)
    for role, workers in sorted(by_role.items()):
        episodes = sum(worker.episodes for worker in workers)
        busy = sum(worker.busy_s for worker in workers) / max(sum(worker.lived_s for worker in workers), 1e-9)
        rate = sum(worker.episodes / max(worker.lived_s, 1e-9) for worker in workers)
        lines.append((role, f"{len(workers)} workers, {episodes} episodes, {rate:.2f}/s, busy {100.0 * busy:.0f} %"))
    allowed = cosmos.train.train_policy.allowed_outdated_steps + cosmos.train.sync_weight_interval - 1
    # Where roles take turns nothing ever waits.
    overlap = cosmos.mode != "colocated" and not cosmos.train.train_policy.on_policy
    pending = seen["pending"] if overlap else ()
    return JobState(tuple(lines), tuple(signs(pending, cosmos.global_batch, numbers, allowed)))
