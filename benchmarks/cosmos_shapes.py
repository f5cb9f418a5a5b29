"""What a Cosmos-RL job of so many policies and rollouts does: its pace, what waits, how old weights are, a loss healed.

    python benchmarks/cosmos_shapes.py --policies 4 --rollouts 4 --kill            # eight GPUs
    python benchmarks/cosmos_shapes.py --policies 4 --rollouts 1                   # the recipe's local shape
    python benchmarks/cosmos_shapes.py --policies 4 --rollouts 4 --case large      # a GRPO step of 8.8 billion weights
    python benchmarks/cosmos_shapes.py --policies 4 --rollouts 4 --kill --small --device cpu     # no GPU: a toy world

One policy replica is spread over the policies' GPUs (FSDP2); each rollout is a replica. `waypoint` is
`experiment=cosmos_waypoint_disaggregated_2gpu` without a warm start. `large` is open-loop GRPO of Alpamayo 1.5's
language model on synthetic clips, random weights, four groups of twelve a step. `--kill` ends a rollout worker once;
the job goes on from its last checkpoint.

Beside what was measured stands what `alpagym_host.sizing` makes of the job's own times by part; above 1.25 between
the two something else than the parts costs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from process_tree import Tree

from alpagym_host.sizing import PartTimes, simulate
from alpagym_runtime.run_config import RunConfig, load_run_config
from alpagym_runtime.trainers.cosmos.journal import Journal
from alpagym_runtime.trainers.cosmos.monitor import Seen

CASES = ("waypoint", "large")
TOY = (
    *("simulator=toy", "policy=waypoint_actors", "policy.hidden=16", "policy.actors=1", "trainer.type=cosmos"),
    "trainer.warm_start=null",
    *("dataset.train_scenes=12", "dataset.val_scenes=2", "dataset.test_scenes=2", "expected_valid_steps=10"),
    *("rollout.slots=16", "rollout.group_size=4", "evaluation.videos=false", "evaluation.references=false"),
    *("evaluation.bootstrap=100", "evaluation.every_updates=0", "logging=console", "cosmos.train.epoch=1000"),
    *("cosmos.train.train_batch_per_replica=16", "cosmos.train.optm_lr=0.01", "cosmos.train.param_dtype=float32"),
    *("cosmos.watchdog_s=900", "cosmos.register_timeout_s=1500"),
)
WAYPOINT = (
    *("experiment=cosmos_waypoint_disaggregated_2gpu", "trainer.warm_start=null", "evaluation.every_updates=0"),
    *("evaluation.videos=false", "evaluation.references=false", "dataset.test_scenes=32", "logging=console"),
)
LARGE = (
    *("simulator=pai", "dataset=pai", "policy=alpamayo_1_5", "reward=pai_motion", "trainer.type=cosmos"),
    "trainer.warm_start=null",
    *("expected_valid_steps=1", "policy.gradient_checkpointing=true", "policy.reasoning_tokens=32"),
    *("rollout.group_size=12", "rollout.slots=12", "trainer.credit=episode", "trainer.least_advantage=0.0"),
    *("trainer.kl_stop=1000.0", "cosmos.train.train_batch_per_replica=48", "cosmos.train.epoch=1000"),
    *("cosmos.train.master_dtype=bfloat16", "cosmos.train.param_dtype=bfloat16", "cosmos.train.optm_lr=1.0e-6"),
    *("cosmos.rollout.sampling_config.temperature=0.6", "cosmos.rollout.sampling_config.top_p=0.98"),
    *("evaluation.every_updates=0", "evaluation.samples=1", "evaluation.videos=false", "logging=console"),
    *("dataset.train_chunks=0", "dataset.val_chunks=1", "dataset.test_chunks=1", "checkpoint.keep=1"),
    # The recipe's reward is -1 for every plan of random weights, from which nothing is learnt and no step is made.
    "reward.terms.pai_distance={type: pai_distance, scale: 1.0}",
)
_STEP = re.compile(r"(\d\d):(\d\d):(\d\d),(\d{3}) .*Step: (\d+)/\d+, ")
_SENT = re.compile(r"send operations.* finished in ([\d.]+) seconds")
WARM_UP = 3
"""Steps that are left out of means: scenes are made, kernels compiled."""


def words_of(options: argparse.Namespace, folder: Path) -> list[str]:
    """The words of `alpagym train` for a job whose inputs lie in a folder."""
    policies, rollouts = options.policies, options.rollouts
    if options.case == "large":
        rows = 2 if options.small else 12
        words = [*LARGE, f"dataset.path={folder / 'clips'}", f"policy.model.path={folder / 'weights'}"]
        words += [f"policy.rows={rows}", f"cosmos.train.train_policy.mini_batch={rows}"]
    elif options.small:
        words = [*TOY, "cosmos.train.train_policy.mini_batch=2"]
    else:
        # A step of 256 drives, 32 groups: a share for each GPU of the policy and for each rollout.
        words = [*WAYPOINT, f"cosmos.train.train_policy.mini_batch={256 // policies}"]
        words += [f"cosmos.rollout.batch_size={max(1, 32 // rollouts)}"]
    cpu = options.device == "cpu"
    words += [
        "cosmos.mode=disaggregated",
        f"cosmos.device={options.device}",
        f"cosmos.policy.parallelism.dp_shard_size={options.policies}",
        "cosmos.policy.parallelism.n_init_replicas=1",
        f"cosmos.rollout.parallelism.n_init_replicas={options.rollouts}",
        "cosmos.rollout.parallelism.dp_shard_size=1",
        "cosmos.rollout.prefetch_rollout=true",
        "cosmos.train.train_policy.on_policy=false",
        f"cosmos.train.train_policy.allowed_outdated_steps={options.outdated}",
        f"cosmos.train.max_num_steps={options.steps}",
        f"cosmos.restarts={int(options.kill)}",
        f"checkpoint.every_updates={options.keep_every}",
        "topology=local_disaggregated_2gpu",
        f"topology.gpus_per_node={options.policies + options.rollouts}",
        f"learner.device={'cpu' if cpu else 'cuda'}",
        f"run.root={folder}",
    ]
    return words


def make_inputs(options: argparse.Namespace, folder: Path) -> None:
    """Clips and a checkpoint of random weights for `large`."""
    import torch
    from pai_real_size import backbone

    from alpagym_alpamayo_r1.architecture import TRAINING
    from alpagym_alpamayo_r1.tiny import save_tiny

    clips, weights = folder / "clips", folder / "weights"
    picture = ("--width", "160", "--height", "90") if options.small else ()
    make = [sys.executable, "-m", "alpagym_host.cli", "pai", "make-synthetic", str(clips), "--chunks", "0-2"]
    subprocess.run([*make, "--clips-per-chunk", "4", "--no-obstacles", *picture], check=True, stdout=subprocess.DEVNULL)
    model, processor = backbone(TRAINING, small=options.small)
    save_tiny(weights, model.cpu(), processor)
    if not options.small:
        torch.cuda.empty_cache()  # the first GPU is a policy's


def kill_one(run: Path, after: int, child: subprocess.Popen[bytes], told: dict[str, Any]) -> None:
    """Kill a rollout worker once a step is made; how long until the next step that was not made before."""
    journal = Journal(run)
    while not any(step.step >= after for step in journal.steps(0)):
        if child.poll() is not None:
            return
        time.sleep(0.2)
    workers = journal.workers()
    victim = next(worker.process.pid for worker in workers.values() if worker.role == "rollout")
    before = len(workers)
    made = journal.steps(0)[-1].step
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    while child.poll() is None:
        if "job_again_s" not in told and victim not in {w.process.pid for w in journal.workers().values()}:
            told["job_again_s"] = round(time.monotonic() - began, 1)
        if "job_again_s" in told and any(step.step > made for step in journal.steps(0)):
            told |= {"killed_after_step": made, "workers": before, "next_step_s": round(time.monotonic() - began, 1)}
            return
        time.sleep(0.2)


def cut(run: Path, after: int, child: subprocess.Popen[bytes]) -> None:
    """Kill a run once a step is made: checkpoints of a large model, which nobody wants, are a hundred gigabytes."""
    while child.poll() is None:
        if any(row["step"] >= after for row in rows_of(run)):
            child.kill()
        time.sleep(0.2)


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Rows of the job's steps, as the run logged them."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if row["stage"] == "cosmos"]


def between_steps(text: str) -> list[float]:
    """Seconds between the steps of a controller's log."""
    times = []
    for found in map(_STEP.search, text.splitlines()):
        if found:
            hours, minutes, seconds, thousandths = map(int, found.groups()[:4])
            times.append(3600 * hours + 60 * minutes + seconds + thousandths / 1000.0)
    return [(b - a) % 86400.0 for a, b in itertools.pairwise(times)]


def part_times(
    config: RunConfig, rows: Sequence[Mapping[str, Any]], busy_s: float, episodes: float, sent_s: Sequence[float]
) -> PartTimes:
    """What a job says of its own parts, as `alpagym_host.sizing` takes it."""
    batch = config.cosmos.rollout.batch_size * config.rollout.group_size
    return PartTimes(
        rollout_s=busy_s / episodes * batch,
        train_s=statistics.mean(row["seconds_train"] for row in rows),
        sync_s=statistics.mean(sent_s) if sent_s else 0.0,
        transport_s=statistics.mean(row["seconds_fetch"] for row in rows),
    )


def measured(run: Path) -> dict[str, Any]:
    """What a finished job left."""
    config, journal, rows = load_run_config(run), Journal(run), rows_of(run)
    folders = sorted({log.parent.resolve() for log in (run / "cosmos" / "logs").glob("logs_*/controller.log")})
    seen, gaps = Seen(pending=deque()), list[float]()
    for folder in folders:  # one a start
        text = (folder / "controller.log").read_text(errors="replace")
        for line in text.splitlines():
            seen.read(line)
        gaps += between_steps(text)[WARM_UP - 1 :]
    logs = [log.read_text(errors="replace") for log in folders[-1].glob("policy*.log")]
    sent = [float(found) for text in logs for found in _SENT.findall(text)]
    logs_mb = sum(log.stat().st_size for log in (run / "cosmos" / "logs").rglob("*.log")) / 1e6
    rollouts = [worker for worker in journal.workers().values() if worker.role == "rollout"]
    busy_s, episodes = (sum(getattr(w, name) for w in rollouts) for name in ("busy_s", "episodes"))
    late = rows[WARM_UP:] or rows
    times = part_times(config, late, busy_s, episodes, sent)
    played = simulate(config, times)
    step_s = statistics.mean(gaps)
    pending, batch = list(seen.pending), config.cosmos.global_batch
    half = pending[len(pending) // 2 :]
    allowed = config.cosmos.train.train_policy.allowed_outdated_steps
    return {
        "steps": [row["step"] for row in rows] == list(range(1, len(rows) + 1)) and len(rows),
        "starts": len(folders),
        "logs_mb": round(logs_mb, 1),
        "syncs_s": sent[:3] + sent[-3:],
        "global_batch": batch,
        "step_s": {"median": statistics.median(gaps), "mean": step_s, "all": [round(gap, 2) for gap in gaps]},
        "episodes_per_s": batch / step_s,
        "parts_s": {name: round(value, 4) for name, value in vars(times).items()},
        "sizing": {"step_s": played.step_s, "gap_mean": played.gap_mean, "gap_max": played.gap_max},
        "measured_over_sizing": step_s / played.step_s,
        "rollout_busy": busy_s / max(sum(worker.lived_s for worker in rollouts), 1e-9),
        "pending": {
            "all": pending,
            "second_half": [min(half), statistics.mean(half), max(half)] if half else None,
            "room": (allowed + 1) * batch,
        },
        "version_gap": {
            "most": max(row["staleness_max"] for row in rows),
            "mean": statistics.mean(row["staleness_mean"] for row in rows),
            "allowed": allowed,
        },
        "episodes_stale": sum(row["episodes_stale"] for row in rows),
        "episodes_trained": sorted({row["episodes_trained"] for row in rows}),
        "throttles": seen.throttles,
        "loss": [row.get("loss") for row in rows],
        "gradient_norm": [row.get("gradient_norm") for row in rows],
        "decisions_kept": [row.get("decisions_kept") for row in rows],
        "steps_refused": sum(row.get("steps_refused", 0.0) for row in rows),
        "seconds_train": [round(row["seconds_train"], 3) for row in rows],
        "seconds_fetch": [round(row["seconds_fetch"], 3) for row in rows],
        "workers": {
            name: {"episodes": worker.episodes, "busy_s": round(worker.busy_s, 1), "lived_s": round(worker.lived_s, 1)}
            for name, worker in sorted(journal.workers().items())
        },
    }


def left_behind(run: Path) -> int:
    """Processes that work for a run."""
    found = 0
    for process in psutil.process_iter():
        try:
            found += process.environ().get("ALPAGYM_COSMOS_RUN") == str(run) and process.status() != "zombie"
        except psutil.Error:
            continue
    return found


def job(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run a job to its end; what it did, or how it failed."""
    run = folder / "run"
    log = folder / "run.log"
    began = time.monotonic()
    if options.case == "large":
        make_inputs(options, folder)
    command = [sys.executable, "-m", "alpagym_host.cli", "train", *words_of(options, folder), *options.words]
    made_s = time.monotonic() - began
    told: dict[str, Any] = {}
    with log.open("w") as file:
        # How long weights take is said at this level only.
        environment = os.environ | {"COSMOS_LOG_LEVEL": "DEBUG"}
        words = [*command, "--directory", str(run)]
        child = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=environment)
    tree = Tree(child.pid, options.device == "cuda")
    tree.start()
    killer = threading.Thread(target=kill_one, args=(run, options.kill_after, child, told), daemon=True)
    if options.kill:
        killer.start()
    if options.cut_after:
        threading.Thread(target=cut, args=(run, options.cut_after, child), daemon=True).start()
    try:
        code: int | str = child.wait(options.limit)
    except subprocess.TimeoutExpired:
        child.terminate()
        code = f"still running after {options.limit:g} s"
        try:
            child.wait(60)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    result: dict[str, Any] = {"code": code, "seconds": round(time.monotonic() - began, 1), "inputs_s": round(made_s, 1)}
    if options.kill:
        result["killed"] = told
    if options.cut_after and code == -signal.SIGKILL:
        result["code"] = code = 0
    deadline = time.monotonic() + 30.0
    while left_behind(run) and time.monotonic() < deadline:
        time.sleep(0.5)
    result |= tree.end() | {"left_behind": left_behind(run)}
    try:
        result |= measured(run)
    except (OSError, ValueError, KeyError, ArithmeticError, IndexError) as err:
        result["unmeasured"] = f"{type(err).__name__}: {err}"
    if code != 0:
        result["log"] = log.read_text(errors="replace")[-3000:]
    return result


def options_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", type=int, default=4, help="GPUs of the policy replica")
    parser.add_argument("--rollouts", type=int, default=4, help="rollout replicas, a GPU each")
    parser.add_argument("--case", choices=CASES, default="waypoint")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--outdated", type=int, default=1, help="allowed_outdated_steps")
    parser.add_argument("--kill", action="store_true", help="a rollout worker, once")
    parser.add_argument("--kill-after", type=int, default=12, help="the step after which")
    parser.add_argument("--keep-every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--cut-after", type=int, default=0, help="end the run after this step, by force")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds of the run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("words", nargs="*", help="further words of alpagym train")
    return parser.parse_args(argv)


def main() -> None:
    """Run one job and print what it did."""
    options = options_of()
    with tempfile.TemporaryDirectory() as folder:
        found = job(options, Path(folder))
    print(json.dumps(found), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(found["code"] != 0)


if __name__ == "__main__":
    main()
