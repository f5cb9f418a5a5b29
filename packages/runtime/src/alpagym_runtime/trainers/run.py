"""A run: one config, one directory, everything that a trainer needs and everything that lasts.

The directory is the truth: `config.yaml` (the host's, never rewritten), `metrics.jsonl`, `per_scene.parquet`,
`summary.json`, `checkpoints/`. A run that is started again in its directory goes on where its newest checkpoint stands,
to the numbers of an unbroken run.
"""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alpagym_runtime.envs.core import DrivingCore
from alpagym_runtime.episodes.store import EpisodeStore, Keep
from alpagym_runtime.errors import ConfigError, CorruptFileError, SimulatorError
from alpagym_runtime.files import read_json, remove_partials, write_json
from alpagym_runtime.random import mix_int
from alpagym_runtime.rollouts.collector import Collector, Collects, environment
from alpagym_runtime.rollouts.compile_ahead import compile_ahead
from alpagym_runtime.rollouts.cores import Cores, make_policy, plain
from alpagym_runtime.rollouts.evaluation import evaluate
from alpagym_runtime.rollouts.filming import FOLDER, choose, film
from alpagym_runtime.rollouts.launchers import make_launcher
from alpagym_runtime.rollouts.open_loop import TARGET, evaluate_open_loop, summarise_open_loop
from alpagym_runtime.rollouts.pool import WorkerPool
from alpagym_runtime.rollouts.queue import FRESH, URGENT
from alpagym_runtime.rollouts.references import FILE as REFERENCES
from alpagym_runtime.rollouts.references import drive_references, hold_against, reference_spec
from alpagym_runtime.rollouts.statistics import compare, summarise
from alpagym_runtime.rollouts.table import FILE as TABLE
from alpagym_runtime.rollouts.table import Row, read_rows, write_rows
from alpagym_runtime.run_config import RunConfig, StoreSection, to_mapping
from alpagym_runtime.telemetry.loggers import Row as LoggedRow
from alpagym_runtime.telemetry.loggers import build_loggers
from alpagym_runtime.telemetry.reporter import Reporter, Silent
from alpagym_runtime.telemetry.timers import TIMERS
from alpagym_runtime.trainers.base import StopTraining
from alpagym_runtime.trainers.checkpoints import (
    Checkpoint,
    CheckpointStore,
    load_checkpoint,
    load_weights,
    optimiser_tensors,
    restore_optimiser,
)
from alpagym_runtime.transport.between import build_transport
from alpagym_runtime.transport.memory import MemoryTransport
from alpagym_runtime.types import Episode, EpisodeRequest, Policy, PolicySpec, Sampling, TrainablePolicy, Transport

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer


ADAPTER = "adapter."
"""Names of adapters in a checkpoint's optimiser file begin so."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended: False where it was asked to stop; the summary so far."""

    completed: bool
    summary: dict[str, Any]


class Run:
    """Everything that a trainer needs; see the module's text.

    Args:
        config: the frozen config.
        directory: the run's own, existing directory.
        reporter: who shows progress.
        stop_requested: turns True when the run shall end at the next safe point.
        team: the processes that train together (torchrun); one that does not write reads what rank 0 writes.

    """

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        reporter: Reporter | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
        team: Any = None,
    ) -> None:
        self.config, self.directory = config, directory
        self._given_team = team
        self.reporter: Reporter = reporter or Silent()
        self._stop_requested = stop_requested
        _refuse_links(directory)
        if self._writes:
            remove_partials(directory)
        # Cosmos-RL's workers have ends of their own; what this process drives without workers, it drives alone.
        alone = config.trainer.type == "cosmos" and not config.has_workers
        self.transport: Transport = MemoryTransport() if alone else build_transport(config, "trainer", directory)
        self._cores = Cores(config, config.rollout.slots, directory)
        self.pool: WorkerPool | None = None
        if config.has_workers:
            launch = partial(make_launcher, config, directory)
            self.pool = WorkerPool(config, directory, self.transport, launch, self.reporter.note)
        self._rows: dict[str, list[Row]] = read_rows(directory / TABLE)
        self._references: dict[str, list[Row]] = read_rows(directory / REFERENCES)
        self._summaries: dict[str, dict[str, Any]] = {}
        self._checkpoints = CheckpointStore(directory / "checkpoints", config.checkpoint.keep)
        # `evaluations`: name -> total_steps at which it was made, for every one that metrics.jsonl lists. `best`: the
        # val evaluation with the highest driving score so far. `stage_state`: see the property.
        self._state: dict[str, Any] = {
            "stage": "",
            "step": 0,
            "total_steps": 0,
            "metrics_rows": 0,
            "done": [],
            "evaluations": {},
            "best": None,
            "stage_state": {},
        }
        self._restored: Checkpoint | None = None
        self._unit = ""
        self._save_now: Callable[[], None] | None = None  # keeps the steps since the last checkpoint
        self._policy: Any = None
        self._store: EpisodeStore | None = None
        self._started = time.perf_counter()
        self._cpu, self._compiling_s = _cpu_seconds(), 0.0
        # Before the first simulator: a logging service that refuses this run does so now.
        self._loggers = build_loggers(config.logging.loggers if self._writes else {}, self)

    # ------------------------------------------------------------ commands

    def train(self) -> Outcome:
        """Train with the config's trainer; on a request to stop, keep a checkpoint and say so."""
        if not isinstance(self.policy, TrainablePolicy):
            raise ConfigError(
                f"{self.config.policy.type!r} has no weights to train; choose another policy", key="policy"
            )
        if self.policy.spec.privileged:
            raise ConfigError(
                f"{self.config.policy.type!r} reads privileged labels ({', '.join(self.policy.spec.privileged)})",
                key="policy",
            )
        if self.config.learner.lora is not None:
            from alpagym_runtime.trainers.lora import add_adapters

            add_adapters(self.policy.module, self.config.learner.lora, mix_int(self.config.run.seed, 41))
        self._restore()
        return self._finish("train", lambda: self.config.trainer.config.build(self).fit(self))

    def rollout(self) -> Outcome:
        """Drive the config's policy and keep the episodes; those that the store has already are not driven again."""
        if "rollout" not in self.config.store.record:
            raise ConfigError("lacks rollout: the episodes would be thrown away", key="store.record")
        return self._finish("rollout", self._roll_out)

    def evaluate(self) -> Outcome:
        """Evaluate the config's policy on `dataset.split`."""
        if "final" in self._rows:
            self._state["evaluations"]["final"] = 0
        split = self.config.dataset.split

        def work() -> None:
            self.evaluate_policy("final", split)
            self._film("final", split)
            self._refer(split)

        return self._finish("evaluate", work)

    # ------------------------------------------------------------ what trainers use

    @property
    def policy(self) -> Any:
        """The policy, built at first use; from `checkpoint.path` where that is set."""
        if self._policy is None:
            self._policy = build_policy(self.config, self._device)
        return self._policy

    @property
    def _device(self) -> str:
        if self.config.learner.device == "cpu":
            return "cpu"
        from alpagym_runtime.trainers.team import own_device

        return own_device(self.config.learner.device)

    @cached_property
    def team(self) -> Any:
        """The processes that train together, a `trainers.team.Team`; without torchrun this one alone."""
        if self._given_team is not None:
            return self._given_team
        from alpagym_runtime.trainers.team import ALONE

        return ALONE

    @property
    def _writes(self) -> bool:
        return self._given_team is None or self._given_team.writes

    def learner(self) -> Any:
        """What a trainer optimises in a stage, a `trainers.learner.Learner`."""
        from alpagym_runtime.trainers.learner import Learner

        return Learner(self.policy, self.config.learner, self.team)

    @property
    def stage_state(self) -> dict[str, Any]:
        """Plain values that a trainer keeps of its stage; they travel in checkpoints, and a new stage starts empty."""
        found: dict[str, Any] = self._state["stage_state"]
        return found

    @property
    def cpu_s(self) -> float:
        """CPU seconds of this process and, as far as they have told, its workers."""
        return time.process_time() + (0.0 if self.pool is None else self.pool.summary()["cpu_s"])

    @property
    def resuming(self) -> bool:
        """Whether this process goes on where another stopped."""
        return self._restored is not None or bool(self._state["total_steps"])

    @property
    def store(self) -> EpisodeStore:
        """Where episodes are kept, as the section `store` says."""
        if self._store is None:
            self._store = open_store(self.config.store, self.directory)
        return self._store

    def core(
        self, split: str, policy_spec: PolicySpec, labels: Sequence[str] = (), scenes: int | None = None
    ) -> DrivingCore:
        """A core over a split of the dataset; made once.

        Its first `scenes` (None: all, 0: none) are loaded under a bar, unless workers drive: they load what they are
        given.
        """
        core, new = self._cores.core(self._cores.world(split, labels), policy_spec)
        if new and self.pool is None and scenes != 0:
            loaded = core.spec.scenes[:scenes]
            self.reporter.stage(f"scenes {split}", len(loaded), "scenes")
            for scene_id in loaded:
                core.simulator.scene_hash(scene_id)
                self.reporter.advance()
                self.check_stop_alone()
        return core

    def collector(self, core: DrivingCore, policy: Policy, actor: str = "policy", purpose: str = "train") -> Collects:
        """A collector with the config's settings; `store.record` says whether episodes of a purpose are kept."""
        rollout, store = self.config.rollout, self.config.store
        record = purpose in store.record
        keep_frames, sink = record and store.frames == "arrived", self._record if record else None
        # Workers have the run's policy and its expert; the references drive here.
        if self.pool is not None and purpose != "reference":
            priority = URGENT if purpose == "evaluate" else FRESH
            world = self._cores.world_of(core)
            return self.pool.collector(world, policy, priority=priority, keep_frames=keep_frames, sink=sink)
        return Collector(
            core,
            policy,
            min_ready=rollout.min_ready,
            timeout_s=rollout.timeout_s,
            retries=rollout.retries,
            config_hash=self.config.config_hash,
            actor=actor,
            keep_frames=keep_frames,
            sink=sink,
        )

    def check_stop(self) -> None:
        """Raise `StopTraining` if the run was asked to stop; all of a team call it at the same place."""
        requested = self._stop_requested()
        if requested if self._given_team is None else self._given_team.any(requested):
            raise StopTraining

    def check_stop_alone(self) -> None:
        """The same where the others of a team may be elsewhere: there it waits for the next common place."""
        if self._given_team is None or self._given_team.size == 1:
            self.check_stop()

    def evaluate_policy(self, name: str, split: str = "test") -> None:
        """Evaluate under a name, unless this directory has that evaluation already."""
        made, steps = self._state["evaluations"], self._state["total_steps"]
        if name in made and (name in self._rows or made[name] != steps):
            if name not in self._rows:
                self.reporter.note(f"evaluation {name!r} is lost: the weights of step {made[name]} are gone")
            return
        if name not in self._rows:
            self._keep_rows(name, self._evaluate(name, split))
        if name not in made:
            made[name] = steps
            self._log(f"evaluate/{name}", steps, _evaluation_numbers(self.evaluation_summary(name)))
        TIMERS.take()  # an evaluation is no part of a training step

    def evaluation_summary(self, name: str) -> dict[str, Any]:
        """What summary.json will say of an evaluation that was made."""
        if name not in self._summaries:
            self._summaries[name] = summarise(self._rows[name], self.config.evaluation.bootstrap)
            if open_loop := summarise_open_loop(self._rows[name]):
                self._summaries[name]["open_loop"] = open_loop
        return self._summaries[name]

    def conclude(self) -> None:
        """The evaluations at the end of training: the last weights on val and test, the best on val on test."""
        # A run that was stopped right after its last step has no evaluation of it on val yet.
        self._evaluate_if_due(self._state["stage"], self._state["step"], self._state["step"])
        self.evaluate_policy("final")
        self._film("final", "test")
        self._refer("test")
        best = self._state["best"]
        if best is None or "best" in self._rows:
            return
        if best["total_steps"] == self._state["total_steps"]:
            self._keep_rows("best", self._rows["final"])
        elif (weights := self._best_weights(best)) is not None:
            last, version = {k: v.clone() for k, v in self.policy.module.state_dict().items()}, self.policy.version
            load_into(self.policy, weights, int(best["version"]), "checkpoints/best")
            try:
                self._keep_rows("best", self._evaluate("best", "test"))
            finally:
                load_into(self.policy, last, version, "the last step")
        if "best" in self._rows:
            self._state["evaluations"]["best"] = best["total_steps"]
            self._log("evaluate/best", best["total_steps"], _evaluation_numbers(self.evaluation_summary("best")))

    def _refer(self, split: str) -> None:
        """Drive the scenes of the final evaluation with the reference policies, unless the directory has that."""
        wanted = self.config.evaluation.references and self.config.simulator.type == "embedded" and self._writes
        if not wanted or self._references:
            return
        evaluation = self.config.evaluation
        core = self.core(split, reference_spec())
        self.reporter.stage("references", 4 * len(core.spec.scenes) * len(evaluation.seeds), "drives")

        def watch(_: Episode) -> None:
            self.reporter.advance()
            self.check_stop_alone()

        def drive(policy: Policy) -> list[Row]:
            collector = self.collector(core, policy, purpose="reference")
            return evaluate(collector, core.spec.scenes, evaluation.seeds, self.config.expected_valid_steps, watch)

        self._references = drive_references(drive)
        write_rows(self.directory / REFERENCES, self._references)

    def _film(self, name: str, split: str) -> None:
        """Film drives of an evaluation, unless the directory has those videos already."""
        drives = choose(self._rows.get(name, ())) if self.config.evaluation.videos and self._writes else {}
        about = self.directory / FOLDER / f"{name}.json"
        wanted = {which: [row["scene_id"], row["seed"], row["driving_score"]] for which, row in drives.items()}
        if about.is_file():
            made = {d["which"]: [d["scene_id"], d["seed"], d["evaluated_score"]] for d in read_json(about)}
            if made == wanted:
                return
        if not drives:
            return
        core, rollout = self.core(split, self.policy.spec), self.config.rollout
        if not core.spec.closed_loop:
            return
        self.reporter.stage("videos", len(drives), "drives")
        try:
            film(core, self.policy, drives, self.config.expected_valid_steps, self.directory, name, rollout.timeout_s)
            self.reporter.advance(len(drives))
        except SimulatorError as err:
            self.reporter.note(f"no videos: {err}")  # they are a help; the results stand without them

    def _best_weights(self, best: Mapping[str, Any]) -> dict[str, Any] | None:
        found = self._checkpoints.best()
        if found is None or found[1].get("total_steps") != best["total_steps"]:
            self.reporter.note(f"the best weights, of step {best['total_steps']}, are not in checkpoints/best any more")
            return None
        return found[0]

    def _keep_rows(self, name: str, rows: list[Row]) -> None:
        self._rows[name] = rows
        self._summaries.pop(name, None)
        if self._writes:
            write_rows(self.directory / TABLE, self._rows)

    def _evaluate(self, name: str, split: str) -> list[Row]:
        evaluation, seeds = self.config.evaluation, self.config.evaluation.seeds
        core = self.core(split, self.policy.spec)
        open_loop = not core.spec.closed_loop
        if open_loop and evaluation.samples:
            core = self.core(split, self.policy.spec, (TARGET,))
        elif evaluation.samples:
            raise ConfigError("draws plans in open-loop worlds only", key="evaluation.samples")
        scenes = core.spec.scenes
        if self._given_team is not None:
            mine = self.team.part(len(scenes))
            scenes = scenes[mine.start : mine.stop]
        drives = len(scenes) * len(seeds) * (1 + evaluation.samples)
        self.reporter.stage(f"evaluate {name}", drives, "drives")

        def watch(_: Episode) -> None:
            self.reporter.advance()
            self.check_stop_alone()

        collector = self.collector(core, self.policy, purpose="evaluate")
        if open_loop:
            draws = Sampling("sample", evaluation.temperature, evaluation.top_p)
            rows = evaluate_open_loop(collector, scenes, seeds, evaluation.samples, draws, watch)
        else:
            rows = evaluate(collector, scenes, seeds, self.config.expected_valid_steps, watch)
        return rows if self._given_team is None else self._rows_of_all(rows)

    def _rows_of_all(self, rows: list[Row]) -> list[Row]:
        """A team's rows as one process would have made them: seed by seed, each over all scenes."""
        seeds, parts = len(self.config.evaluation.seeds), self.team.gather(rows)
        counts = [len(part) // seeds for part in parts]
        return [
            row
            for seed in range(seeds)
            for part, count in zip(parts, counts, strict=True)
            for row in part[seed * count : (seed + 1) * count]
        ]

    def stage_done(self, stage: str) -> bool:
        """Whether a stage was finished before this process began."""
        return stage in self._state["done"]

    def begin_stage(
        self,
        stage: str,
        total: int,
        unit: str,
        optimiser: Optimizer,
        reference: Module | None = None,
    ) -> int:
        """Start or continue a stage: restores the optimiser and the reference; returns the first step to make."""
        first = 0
        if self._restored is not None and self._state["stage"] == stage:
            first = int(self._state["step"])
            weights = {k: v for k, v in self._restored.optimiser.items() if not k.startswith(ADAPTER)}
            if reference is not None:
                kept = {
                    k.removeprefix("reference."): weights.pop(k) for k in list(weights) if k.startswith("reference.")
                }
                reference.load_state_dict(kept)
            restore_optimiser(optimiser, weights)
        if self._state["stage"] != stage:
            self.stage_state.clear()  # in place: a trainer may hold it already
        self._restored = None
        self._state["stage"], self._state["step"] = stage, first
        self._unit = unit
        self._evaluate_if_due(stage, first, total)
        self._show_stage(stage, first, total)
        TIMERS.take()
        return first

    def end_step(
        self,
        stage: str,
        step: int,
        total: int,
        numbers: Mapping[str, float],
        seconds: float,
        optimiser: Optimizer,
        reference: Module | None = None,
        last: bool = False,
    ) -> None:
        """Log a finished step, keep a checkpoint when one is due, evaluate when due, stop when asked to.

        Args:
            stage: the one that was begun.
            step: the number of the finished step, from 1.
            total: number of the last step; one with `last` is too.
            numbers: what to log, by the names of `alpagym_runtime.telemetry.metrics`.
            seconds: that the step took.
            optimiser: its state goes into checkpoints.
            reference: likewise, another module's weights.
            last: ends the stage before `total`.

        """
        self._state["step"] = step
        self._state["total_steps"] += 1
        spent = {f"seconds_{name}": value for name, value in TIMERS.take().items()}
        if self.pool is not None:
            spent |= self.pool.numbers()
        self._log(stage, step, {**numbers, **throughput(numbers, seconds), **spent, "seconds": seconds})
        self.reporter.advance(1, **self._shown(numbers))
        last = last or step == total
        if last:
            self._state["done"].append(stage)
        self._save_now = lambda: self._save(optimiser, reference)
        if last or step % self.config.checkpoint.every_updates == 0:
            self._save_now()
            self._save_now = None
        self.check_stop()
        if self._evaluate_if_due(stage, step, total, last) and not last:
            self._show_stage(stage, step, total)

    # ------------------------------------------------------------ inside

    def _evaluate_if_due(self, stage: str, step: int, total: int, last: bool = False) -> bool:
        """On val at the start, every so many steps and at the end of a stage, but for imitation as a warm start."""
        every = self.config.evaluation.every_updates
        due = stage != "imitation" and every > 0 and (step % every == 0 or step == total or last)
        if due:
            name = f"val_{step:06d}"
            self.evaluate_policy(name, "val")
            if name in self._rows:
                self._note_best(name)
        return due

    def _note_best(self, name: str) -> None:
        """Keep the weights in hand as the best if their evaluation is; of equals the first."""
        score, best = self.evaluation_summary(name)["driving_score"]["mean"], self._state["best"]
        made = self._state["evaluations"][name]
        if score is None or made != self._state["total_steps"] or (best is not None and score <= best["driving_score"]):
            return
        best = {"evaluation": name, "driving_score": score, "total_steps": made, "version": self.policy.version}
        self._state["best"] = best
        if self._writes:
            self._checkpoints.save_best(self._weights(), best | {"config_hash": self.config.config_hash})

    def _show_stage(self, stage: str, step: int, total: int) -> None:
        self.reporter.stage(stage, total, self._unit)
        if step:
            self.reporter.advance(step)

    def _shown(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """What a bar says of the workers."""
        if self.pool is None:
            return {}
        shown = {"workers": float(self.pool.alive), "restarts": float(self.pool.restarts)}
        return shown | {"staleness": numbers["staleness_mean"]} if "staleness_mean" in numbers else shown

    def _record(self, episode: Episode) -> None:
        self.store.add(episode, self._config_text)

    def _roll_out(self) -> None:
        rollout, seed = self.config.rollout, self.config.run.seed
        core = self.core(self.config.dataset.split, self.policy.spec, scenes=rollout.groups or None)
        scenes = core.spec.scenes
        members = 1 if rollout.mode == "mean" else rollout.group_size
        requests = [
            EpisodeRequest(
                scene_id=scenes[group % len(scenes)],
                horizon_ticks=self.config.expected_valid_steps,
                world_seed=mix_int(seed, 21, group),
                policy_seed=mix_int(seed, 22, group, member),
                group_id=group,
                member=member,
            )
            for group in range(rollout.groups or len(scenes))
            for member in range(members)
        ]
        made = self._made()
        self.reporter.stage("rollout", len(requests), "drives")
        self.reporter.advance(sum((r.group_id, r.member) in made for r in requests))

        def watch(_: Episode) -> None:
            self.reporter.advance()
            self.check_stop()

        collector = self.collector(core, self.policy, purpose="rollout")
        missing = [r for r in requests if (r.group_id, r.member) not in made]
        # In portions, so that memory holds a few rounds of slots and not the whole rollout.
        portion = 4 * rollout.slots
        for start in range(0, len(missing), portion):
            part = missing[start : start + portion]
            collector.collect(part, Sampling(rollout.mode, rollout.temperature), watch)  # type: ignore[arg-type]

    def _made(self) -> set[tuple[int, int]]:
        """Groups and members of this config that were driven into the store, whatever its rules kept."""
        if not (self.store.path / "data").is_dir():
            return set()
        rows = self.store.rows([f"config_hash={self.config.config_hash}"], removed=True)
        return set(zip(rows["group_id"].to_pylist(), rows["member"].to_pylist(), strict=True))

    def _save(self, optimiser: Optimizer, reference: Module | None) -> None:
        tensors = optimiser_tensors(optimiser)  # gathers what is spread over the team
        if not self._writes:
            return
        if self.config.learner.lora is not None:
            from alpagym_runtime.trainers.lora import adapters

            tensors |= {ADAPTER + name: value for name, value in adapters(self.policy.module).items()}
        if reference is not None:
            tensors |= {f"reference.{name}": value for name, value in reference.state_dict().items()}
        state = {**self._state, "version": self.policy.version, "config_hash": self.config.config_hash}
        self._checkpoints.save(self._state["total_steps"], Checkpoint(self._weights(), tensors, state))

    def _weights(self) -> dict[str, Any]:
        """The policy's weights as any policy of its kind reads them, adapters multiplied in."""
        from alpagym_runtime.trainers.lora import merged

        return merged(self.policy.module)

    def _restore(self) -> None:
        newest = self._checkpoints.latest()
        if newest is None:
            self._loggers.rewind(0, 0)
            self._rows = {name: rows for name, rows in self._rows.items() if name == "start"}
            return
        checkpoint = load_checkpoint(newest)
        missing = sorted({*self._state, "version", "config_hash"} - set(checkpoint.state))
        if missing:
            raise CorruptFileError(
                f"{newest / 'state.json'} lacks {', '.join(missing)}; remove {newest}, resume from an older checkpoint"
            )
        if checkpoint.state["config_hash"] != self.config.config_hash:
            raise ConfigError(f"{newest} belongs to another config; resume with the run's own config.yaml", key="run")
        version = int(checkpoint.state["version"])
        if self.config.learner.lora is None:
            load_into(self.policy, checkpoint.weights, version, str(newest))
        else:
            from alpagym_runtime.trainers.learner import named
            from alpagym_runtime.trainers.lora import restore_adapters

            # The weights beneath are those that the config names; the checkpoint's have the adapters in them.
            restore_adapters(self.policy.module, named(checkpoint.optimiser, ADAPTER))
            self.policy.version = version
        self._state = {k: checkpoint.state[k] for k in self._state}
        self._restored = checkpoint
        # Rows and evaluations made after the checkpoint are made again.
        self._rows = {name: rows for name, rows in self._rows.items() if name in self._state["evaluations"]}
        self._loggers.rewind(self._state["metrics_rows"], self._state["total_steps"])
        self.reporter.note(f"resuming from {newest.name}: {self._state['stage']} step {self._state['step']}")

    def _log(self, stage: str, step: int, numbers: Mapping[str, Any]) -> None:
        self._loggers.log(LoggedRow(stage, step, self._state["total_steps"], numbers))
        self._state["metrics_rows"] += 1

    def _finish(self, command: str, work: Callable[[], None]) -> Outcome:
        completed = True
        try:
            if self._writes:
                self._compiling_s = compile_ahead(self.config, self.directory, self.reporter, self.check_stop_alone)
            work()
        except StopTraining:
            completed = False
            if self._save_now is not None:
                self._save_now()
        finally:
            if self.pool is not None:
                self.pool.close()
            self._cores.close()
            self.transport.close()
            if self._store is not None:
                self._store.close()
            self._loggers.close()
        summary = self._summary(command, completed)
        if self._given_team is not None:
            summary |= {"processes": self.team.size, "cpu_s": sum(self.team.gather(summary["cpu_s"]))}
        if self._writes:
            write_json(self.directory / "summary.json", summary)
        return Outcome(completed, summary)

    def _describe_store(self, store: EpisodeStore) -> dict[str, Any]:
        rows = store.rows([f"config_hash={self.config.config_hash}"])
        scores = [score for score in rows["driving_score"].to_pylist() if score is not None]
        return {
            "path": str(store.path),
            "count": len(rows),
            "bytes": sum(rows["bytes"].to_pylist()),
            "ended": dict(Counter(rows["ended"].to_pylist())),
            "driving_score": sum(scores) / len(scores) if scores else None,
            "problems": store.problems,
        }

    @cached_property
    def _config_text(self) -> str:
        from omegaconf import OmegaConf

        return OmegaConf.to_yaml(OmegaConf.create(to_mapping(self.config)))

    def _summary(self, command: str, completed: bool) -> dict[str, Any]:
        resamples = self.config.evaluation.bootstrap
        rows = self._rows
        summary: dict[str, Any] = {
            "status": "completed" if completed else "stopped",
            "command": command,
            "stage": self._state["stage"],
            "step": self._state["step"],
            "evaluations": {name: self.evaluation_summary(name) for name in rows},
            "dataset": plain(self.config.dataset),
            "reward": {
                name: {"type": term.type, "scale": term.scale, **plain(term.config)}
                for name, term in self.config.reward.terms.items()
            },
            "config_hash": self.config.config_hash,
            "versions": environment()[0],
            "cpu": environment()[1],
            "wall_s": time.perf_counter() - self._started,
            "cpu_s": _cpu_seconds() - self._cpu + self._compiling_s,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            * (1 if os.uname().sysname == "Darwin" else 1024),
        }
        if self._store is not None:
            summary["episodes"] = self._describe_store(self._store)
        if self.pool is not None:
            summary["workers"] = self.pool.summary()
            for name in ("cpu_s", "peak_rss_bytes"):
                summary[name] += summary["workers"][name]
        if self._references:
            shown = ("start", "warm_start", "final", "best")
            held = {name: group for name, group in rows.items() if name in shown}
            summary["references"] = hold_against(self._references, held, resamples)
        before = rows.get("warm_start") or rows.get("start")
        if self._state["best"] is not None:
            summary["best"] = self._state["best"]
        if before:
            against = "warm_start" if rows.get("warm_start") else "start"
            summary["comparisons"] = [
                {"before": against, "after": name, **compare([before], [rows[name]], resamples)}
                for name in ("final", "best")
                if name in rows
            ]
            if "final" in rows:
                summary["paired_gain"] = summary["comparisons"][0]["driving_score"] | {"against": against}
        return summary


def throughput(numbers: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Decisions driven, or samples imitated, a second of a step."""
    known = {"ticks": "decisions_per_s", "samples": "samples_per_s"}
    return {f"throughput/{known[k]}": numbers[k] / seconds for k in known if k in numbers and seconds > 0.0}


def _evaluation_numbers(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What metrics.jsonl keeps of an evaluation."""
    score = summary["driving_score"]
    numbers = {"driving_score": score["mean"], "low": score["low"], "high": score["high"], "n": score["n"]}
    numbers |= {"reward": summary["reward"]["mean"], "failed": summary["failed"]}
    numbers |= {f"open_loop/{name}": value for name, value in summary.get("open_loop", {}).items()}
    return numbers | {f"rate/{name}": value for name, value in summary["rates"].items()}


def _refuse_links(directory: Path) -> None:
    """What is appended to, or made below, must not lead out of the run directory."""
    for name in ("metrics.jsonl", "checkpoints", "logs", "transport", "workers", FOLDER):
        if (directory / name).is_symlink():
            raise ConfigError(f"{directory / name} is a symbolic link; put the real file or folder there", key="run")


def build_policy(config: RunConfig, device: str = "cpu") -> Any:
    """A config's policy, with the weights of `checkpoint.path` where that is set."""
    policy = make_policy(config, device)
    path = config.checkpoint.path
    if path is not None:
        if not isinstance(policy, TrainablePolicy):
            raise ConfigError(f"{config.policy.type!r} has no weights to load", key="checkpoint.path")
        load_into(policy, load_weights(Path(path)), 0, path)
    return policy


def open_store(section: StoreSection, directory: Path) -> EpisodeStore:
    """The store of a section; `directory` is the run's."""
    keep = Keep(section.keep_last, section.keep_best, section.keep_worst, section.keep_failures)
    path = Path(section.path) if section.path else directory / "episodes"
    return EpisodeStore(path, frames=section.frames, keep=keep)  # type: ignore[arg-type]


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def load_into(policy: TrainablePolicy, weights: Mapping[str, Any], version: int, place: str) -> None:
    """Give a policy weights; ConfigError names their place where they do not fit."""
    try:
        policy.load(weights, version)
    except (RuntimeError, KeyError) as err:
        raise ConfigError(
            f"the weights in {place} do not fit this policy: {err}; with the config of the run that made them: "
            "alpagym evaluate --run RUN_DIR",
            key="checkpoint.path",
        ) from err
