"""How fast a Cosmos-RL job will be on so many GPUs, from times that were measured on few; before they are rented.

    python -m alpagym_host.sizing experiment=… topology=… --rollout-s 22 --train-s 6 --sync-s 1.5 --transport-s 0.2

An event simulation of what the controller does: rollout replicas make groups while they may, a step trains when a
global batch is there, weights go out every so many steps. It knows no failures and no contention between nodes, so it
is a bound, and the place to see which role waits for which.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from alpagym_host.compose import compose
from alpagym_plugins import ConfigError, check_range
from alpagym_runtime.run_config import RunConfig
from alpagym_runtime.trainers.cosmos.config import rollouts_at_work

STEPS = 200
WARM_UP = 20  # steps that are left out of the means: the first finds nobody at work yet


@dataclass(frozen=True)
class PartTimes:
    """Measured seconds of one replica.

    Attributes:
        rollout_s: a rollout replica makes `cosmos.rollout.batch_size` groups.
        train_s: a policy replica trains on `train_batch_per_replica` episodes.
        sync_s: weights go from the policy to all rollouts.
        transport_s: an episode batch goes from a rollout to a policy; it holds nobody up but the step that needs it.

    """

    rollout_s: float
    train_s: float
    sync_s: float = 0.0
    transport_s: float = 0.0

    def __post_init__(self) -> None:
        check_range("rollout_s", self.rollout_s, above=0)
        check_range("train_s", self.train_s, above=0)
        check_range("sync_s", self.sync_s, minimum=0)
        check_range("transport_s", self.transport_s, minimum=0)


@dataclass(frozen=True)
class Throughput:
    """What a job does in the long run.

    Attributes:
        step_s: seconds of a training step, all waits included.
        episodes_per_s: that are trained on.
        policy_busy, rollout_busy: shares of the time that a role's GPUs work.
        gap_mean, gap_max: versions between the weights that drove and those that are trained.
        gpus: of both roles.
        rollouts, at_work: rollout replicas, and how many of them can drive at once.

    """

    step_s: float
    episodes_per_s: float
    policy_busy: float
    rollout_busy: float
    gap_mean: float
    gap_max: int
    gpus: int
    rollouts: int
    at_work: int

    @property
    def waits(self) -> str:
        """Which role waits for the other, or for what."""
        if self.at_work < self.rollouts and self.policy_busy < 0.9:
            there = f"{self.at_work} of {self.rollouts} rollouts"
            return f"{there} can drive at once: smaller batches, a larger step, or fewer"
        if self.policy_busy < 0.9 * self.rollout_busy:
            return "policies wait for episodes: more rollout replicas"
        if self.rollout_busy < 0.9 * self.policy_busy:
            return "rollouts wait for training: more policy replicas, or fewer rollouts"
        return "both roles are about equally busy"


def simulate(config: RunConfig, times: PartTimes, steps: int = STEPS) -> Throughput:
    """Play a job.

    Args:
        config: its numbers of replicas, batches and allowed staleness count.
        times: of one replica.
        steps: training steps to play.

    """
    cosmos, members = config.cosmos, config.rollout.group_size
    step_options = cosmos.train.train_policy
    colocated = cosmos.mode == "colocated"
    replicas, batch = cosmos.rollout.parallelism.n_init_replicas, cosmos.global_batch
    portion = min(cosmos.rollout.batch_size * members, batch)
    allowed = 0 if step_options.on_policy else step_options.allowed_outdated_steps
    room = (allowed + 1) * batch  # episodes between being asked for and being trained on
    ready: deque[int] = deque()  # versions of finished episodes, oldest first
    events: list[tuple[float, int, str, int, int]] = []
    now, number, version, synced, started, trained, done = 0.0, 0, 0, 0, 0, 0, 0
    idle = deque(range(replicas))
    training, policy_busy, rollout_busy, began = False, 0.0, 0.0, 0.0
    gaps: list[int] = []

    def later(seconds: float, what: str, who: int = 0, made: int = 0) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (now + seconds, number, what, who, made))

    while done < steps:
        # Colocated GPUs drive or train, never both.
        while idle and started - trained + portion <= room and not (colocated and training):
            who = idle.popleft()
            started += portion
            later(times.rollout_s, "driven", who, synced)
            rollout_busy += times.rollout_s if done >= WARM_UP else 0.0
        if not training and len(ready) >= batch and not (colocated and len(idle) < replicas):
            used = [ready.popleft() for _ in range(batch)]
            gaps += [version - made for made in used] if done >= WARM_UP else []
            training = True
            later(times.train_s, "trained")
            policy_busy += times.train_s if done >= WARM_UP else 0.0
        if not events:
            raise ConfigError(
                f"a batch of {cosmos.rollout.batch_size} groups × {members} episodes never fills a step of {batch} "
                f"with {allowed} outdated steps allowed; make cosmos.rollout.batch_size smaller",
                key="cosmos.rollout.batch_size",
            )
        now, _, what, who, made = heapq.heappop(events)
        if what == "driven":
            idle.append(who)
            later(times.transport_s, "arrived", made=made)
        elif what == "arrived":
            ready.extend([made] * portion)
        elif what == "trained":
            version += 1
            trained += batch
            wait_s = 0.0
            if version % cosmos.train.sync_weight_interval == 0:
                wait_s = 0.0 if colocated else times.sync_s
                synced = version
            later(wait_s, "free")
        else:
            training = False
            done += 1
            if done == WARM_UP:
                began = now
    spent, counted = now - began, done - WARM_UP
    return Throughput(
        step_s=spent / counted,
        episodes_per_s=counted * batch / spent,
        policy_busy=min(policy_busy / spent, 1.0),
        rollout_busy=min(rollout_busy / (spent * replicas), 1.0),
        gap_mean=sum(gaps) / max(len(gaps), 1),
        gap_max=max(gaps, default=0),
        gpus=sum(config.trainer.config.gpus(config).values()) if config.trainer.type == "cosmos" else 0,
        rollouts=replicas,
        at_work=rollouts_at_work(config),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print what a composed run would do."""
    parser = argparse.ArgumentParser(prog="python -m alpagym_host.sizing", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="as for alpagym train: experiment=… topology=… key=value")
    for name in ("rollout-s", "train-s", "sync-s", "transport-s"):
        needed = name in ("rollout-s", "train-s")
        parser.add_argument(f"--{name}", type=float, required=needed, default=0.0, help="see PartTimes")
    given = parser.parse_args(argv)
    config = compose(["trainer=cosmos", *given.words])
    found = simulate(config, PartTimes(given.rollout_s, given.train_s, given.sync_s, given.transport_s))
    cosmos = config.cosmos
    policy, rollout = cosmos.policy.parallelism, cosmos.rollout.parallelism
    print(
        f"{policy.n_init_replicas} policy replicas × {policy.gpus_per_replica} GPUs, {rollout.n_init_replicas} rollout "
        f"replicas × {rollout.gpus_per_replica} GPUs, {cosmos.mode}: {found.gpus} GPUs\n"
        f"global batch   {cosmos.global_batch} episodes\n"
        f"step           {found.step_s:.2f} s, {3600.0 / found.step_s:.0f} steps/h\n"
        f"episodes       {found.episodes_per_s:.1f}/s\n"
        f"GPUs busy      policy {100.0 * found.policy_busy:.0f} %, rollout {100.0 * found.rollout_busy:.0f} %\n"
        f"version gap    {found.gap_mean:.2f} on average, {found.gap_max} at most\n"
        f"{found.waits}"
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as err:
        print(f"error: {err}", file=sys.stderr)
        sys.exit(2)
