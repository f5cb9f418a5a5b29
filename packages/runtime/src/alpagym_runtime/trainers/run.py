"""A run: one config, one directory, everything that a trainer needs and everything that lasts.

The directory is the truth: `config.yaml` (the host's, never rewritten), `metrics.jsonl`, `per_scene.parquet`,
`summary.json`, `checkpoints/`. A run that is started again in its directory goes on where its newest checkpoint stands,
to the numbers of an unbroken run.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alpagym_runtime.envs.core import DrivingCore, build_terms
from alpagym_runtime.errors import ConfigError, CorruptFileError
from alpagym_runtime.files import remove_partials, replacing, strict, write_atomic, write_json
from alpagym_runtime.rollouts.collector import Collector, environment
from alpagym_runtime.rollouts.evaluation import Row, evaluate, paired_gain, summarise
from alpagym_runtime.run_config import RunConfig
from alpagym_runtime.telemetry.reporter import Reporter, Silent
from alpagym_runtime.trainers.base import StopTraining
from alpagym_runtime.trainers.checkpoints import (
    Checkpoint,
    CheckpointStore,
    load_checkpoint,
    load_weights,
    optimiser_tensors,
    restore_optimiser,
)
from alpagym_runtime.types import Episode, Policy, PolicySpec, TrainablePolicy, Transport

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer


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

    """

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        reporter: Reporter | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config, self.directory = config, directory
        self.reporter: Reporter = reporter or Silent()
        self._stop_requested = stop_requested
        _refuse_links(directory)
        remove_partials(directory)
        self.transport: Transport = config.transport.config.build("trainer", directory)
        self._cores: dict[tuple[str, str, tuple[str, ...]], DrivingCore] = {}
        self._rows: dict[str, list[Row]] = _read_rows(directory / "per_scene.parquet")
        self._checkpoints = CheckpointStore(directory / "checkpoints", config.checkpoint.keep)
        # `evaluations`: name -> total_steps at which it was made, for every one that metrics.jsonl lists.
        self._state: dict[str, Any] = {
            "stage": "",
            "step": 0,
            "total_steps": 0,
            "metrics_rows": 0,
            "done": [],
            "evaluations": {},
        }
        self._restored: Checkpoint | None = None
        self._unit = ""
        self._save_now: Callable[[], None] | None = None  # keeps the steps since the last checkpoint
        self._policy: Any = None
        self._started = time.perf_counter()
        self._cpu = _cpu_seconds()

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
        self._restore()
        return self._finish("train", lambda: self.config.trainer.config.build(self).fit(self))

    def evaluate(self) -> Outcome:
        """Evaluate the config's policy on `dataset.split`."""
        if "final" in self._rows:
            self._state["evaluations"]["final"] = 0
        return self._finish("evaluate", lambda: self.evaluate_policy("final", self.config.dataset.split))

    # ------------------------------------------------------------ what trainers use

    @property
    def policy(self) -> Any:
        """The policy, built at first use; from `checkpoint.path` where that is set."""
        if self._policy is None:
            self._policy = self.config.policy.config.build("cpu")
            if "torch" in sys.modules:
                sys.modules["torch"].set_num_threads(self.config.run.torch_threads)
            path = self.config.checkpoint.path
            if path is not None:
                if not isinstance(self._policy, TrainablePolicy):
                    raise ConfigError(f"{self.config.policy.type!r} has no weights to load", key="checkpoint.path")
                _load(self._policy, load_weights(Path(path)), 0, path)
        return self._policy

    def core(self, split: str, policy_spec: PolicySpec, labels: Sequence[str] = ()) -> DrivingCore:
        """A core over a split of the dataset; made once, with its scenes loaded under a progress bar."""
        # Specs hold mappings, so their text is the key.
        key = (split, json.dumps(strict(_plain(policy_spec)), sort_keys=True), tuple(labels))
        if key not in self._cores:
            config = self.config
            dataset = replace(config.dataset, split=split)
            simulator = config.simulator.config.build(policy_spec, dataset, config.rollout.slots, tuple(labels))
            core = DrivingCore(simulator, build_terms(config.reward, simulator), policy_spec)
            self.reporter.stage(f"scenes {split}", len(core.spec.scenes), "scenes")
            for scene_id in core.spec.scenes:
                simulator.scene_hash(scene_id)
                self.reporter.advance()
                self.check_stop()
            self._cores[key] = core
        return self._cores[key]

    def collector(self, core: DrivingCore, policy: Policy, actor: str = "policy") -> Collector:
        """A collector with the config's settings."""
        rollout = self.config.rollout
        return Collector(
            core,
            policy,
            min_ready=rollout.min_ready,
            timeout_s=rollout.timeout_s,
            retries=rollout.retries,
            config_hash=self.config.config_hash,
            actor=actor,
        )

    def check_stop(self) -> None:
        """Raise `StopTraining` if the run was asked to stop."""
        if self._stop_requested():
            raise StopTraining

    def evaluate_policy(self, name: str, split: str = "test") -> None:
        """Evaluate under a name, unless this directory has that evaluation already."""
        made, steps = self._state["evaluations"], self._state["total_steps"]
        if name in made and (name in self._rows or made[name] != steps):
            if name not in self._rows:
                self.reporter.note(f"evaluation {name!r} is lost: the weights of step {made[name]} are gone")
            return
        if name not in self._rows:
            self._rows[name] = self._evaluate(name, split)
            _write_rows(self.directory / "per_scene.parquet", self._rows)
        if name not in made:
            made[name] = steps
            score = summarise(self._rows[name], 100)["driving_score"]
            self._log(f"evaluate/{name}", steps, {"driving_score": score["mean"], "n": score["n"]})

    def _evaluate(self, name: str, split: str) -> list[Row]:
        core = self.core(split, self.policy.spec)
        seeds = self.config.evaluation.seeds
        self.reporter.stage(f"evaluate {name}", len(core.spec.scenes) * len(seeds), "drives")

        def watch(_: Episode) -> None:
            self.reporter.advance()
            self.check_stop()

        collector = self.collector(core, self.policy)
        return evaluate(collector, core.spec.scenes, seeds, self.config.expected_valid_steps, watch)

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
            weights = dict(self._restored.optimiser)
            if reference is not None:
                kept = {
                    k.removeprefix("reference."): weights.pop(k) for k in list(weights) if k.startswith("reference.")
                }
                reference.load_state_dict(kept)
            restore_optimiser(optimiser, weights)
        self._restored = None
        self._state["stage"], self._state["step"] = stage, first
        self._unit = unit
        self._evaluate_if_due(stage, first, total)
        self._show_stage(stage, first, total)
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
    ) -> None:
        """Log a finished step, keep a checkpoint when one is due, evaluate when due, stop when asked to."""
        self._state["step"] = step
        self._state["total_steps"] += 1
        self._log(stage, step, {**numbers, "seconds": seconds})
        shown = {k: numbers[k] for k in ("loss", "reward", "driving_score", "kl") if k in numbers}
        self.reporter.advance(1, **shown)
        last = step == total
        if last:
            self._state["done"].append(stage)
        self._save_now = lambda: self._save(optimiser, reference)
        if last or step % self.config.checkpoint.every_updates == 0:
            self._save_now()
            self._save_now = None
        self.check_stop()
        if self._evaluate_if_due(stage, step, total):
            self._show_stage(stage, step, total)

    # ------------------------------------------------------------ inside

    def _evaluate_if_due(self, stage: str, step: int, total: int) -> bool:
        every = self.config.evaluation.every_updates
        due = stage != "imitation" and every > 0 and step > 0 and step % every == 0 and step != total
        if due:
            self.evaluate_policy(f"val_{step:06d}", "val")
        return due

    def _show_stage(self, stage: str, step: int, total: int) -> None:
        self.reporter.stage(stage, total, self._unit)
        if step:
            self.reporter.advance(step)

    def _save(self, optimiser: Optimizer, reference: Module | None) -> None:
        tensors = optimiser_tensors(optimiser)
        if reference is not None:
            tensors |= {f"reference.{name}": value for name, value in reference.state_dict().items()}
        state = {**self._state, "version": self.policy.version, "config_hash": self.config.config_hash}
        self._checkpoints.save(self._state["total_steps"], Checkpoint(self.policy.module.state_dict(), tensors, state))

    def _restore(self) -> None:
        newest = self._checkpoints.latest()
        if newest is None:
            write_atomic(self.directory / "metrics.jsonl", b"")
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
        _load(self.policy, checkpoint.weights, int(checkpoint.state["version"]), str(newest))
        self._state = {k: checkpoint.state[k] for k in self._state}
        self._restored = checkpoint
        # Rows and evaluations made after the checkpoint are made again.
        self._rows = {name: rows for name, rows in self._rows.items() if name in self._state["evaluations"]}
        metrics = self.directory / "metrics.jsonl"
        lines = metrics.read_bytes().splitlines(keepends=True) if metrics.exists() else []
        kept = lines[: self._state["metrics_rows"]]
        self._state["metrics_rows"] = len(kept)
        write_atomic(metrics, b"".join(kept))
        self.reporter.note(f"resuming from {newest.name}: {self._state['stage']} step {self._state['step']}")

    def _log(self, stage: str, step: int, numbers: Mapping[str, Any]) -> None:
        line = json.dumps(strict({"stage": stage, "step": step, **numbers}), allow_nan=False)
        with (self.directory / "metrics.jsonl").open("a") as file:
            file.write(line + "\n")
        self._state["metrics_rows"] += 1

    def _finish(self, command: str, work: Callable[[], None]) -> Outcome:
        completed = True
        try:
            work()
        except StopTraining:
            completed = False
            if self._save_now is not None:
                self._save_now()
        finally:
            for core in self._cores.values():
                core.close()
        summary = self._summary(command, completed)
        write_json(self.directory / "summary.json", summary)
        return Outcome(completed, summary)

    def _summary(self, command: str, completed: bool) -> dict[str, Any]:
        resamples = self.config.evaluation.bootstrap
        rows = self._rows
        summary: dict[str, Any] = {
            "status": "completed" if completed else "stopped",
            "command": command,
            "stage": self._state["stage"],
            "step": self._state["step"],
            "evaluations": {name: summarise(rows[name], resamples) for name in rows},
            "dataset": _plain(self.config.dataset),
            "reward": {
                name: {"type": term.type, "scale": term.scale, **_plain(term.config)}
                for name, term in self.config.reward.terms.items()
            },
            "config_hash": self.config.config_hash,
            "versions": environment()[0],
            "cpu": environment()[1],
            "wall_s": time.perf_counter() - self._started,
            "cpu_s": _cpu_seconds() - self._cpu,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            * (1 if os.uname().sysname == "Darwin" else 1024),
        }
        before = rows.get("warm_start") or rows.get("start")
        if before and "final" in rows:
            summary["paired_gain"] = paired_gain(before, rows["final"], resamples)
            summary["paired_gain"]["against"] = "warm_start" if "warm_start" in rows else "start"
        return summary


def _refuse_links(directory: Path) -> None:
    """What is appended to, or made below, must not lead out of the run directory."""
    for name in ("metrics.jsonl", "checkpoints"):
        if (directory / name).is_symlink():
            raise ConfigError(f"{directory / name} is a symbolic link; put the real file or folder there", key="run")


def _plain(value: Any) -> dict[str, Any]:
    return {k: sorted(v) if isinstance(v, frozenset) else v for k, v in vars(value).items()}


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _load(policy: TrainablePolicy, weights: Mapping[str, Any], version: int, place: str) -> None:
    try:
        policy.load(weights, version)
    except (RuntimeError, KeyError) as err:
        raise ConfigError(f"the weights in {place} do not fit this policy: {err}", key="checkpoint.path") from err


def _write_rows(path: Path, rows: Mapping[str, list[Row]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    merged = [{"evaluation": name, **row} for name, group in rows.items() for row in group]
    columns: dict[str, None] = {}
    for row in merged:
        columns |= dict.fromkeys(row)
    table = pa.table({name: [row.get(name) for row in merged] for name in columns})
    with replacing(path) as temporary:
        pq.write_table(table, temporary)


def _read_rows(path: Path) -> dict[str, list[Row]]:
    """Evaluations of an earlier part of this run.

    Raises:
        CorruptFileError: the file is cut; names path, size and the remedy.

    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.exists():
        return {}
    try:
        merged = pq.read_table(path).to_pylist()
    except (pa.ArrowInvalid, OSError) as err:
        raise CorruptFileError(
            f"{path} ({path.stat().st_size} bytes) is not whole: {err}; remove it and resume"
        ) from err
    rows: dict[str, list[Row]] = {}
    for row in merged:
        rows.setdefault(row.pop("evaluation"), []).append(row)
    return rows
