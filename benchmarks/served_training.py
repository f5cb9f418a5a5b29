#!/usr/bin/env python3
"""Whether training against `alpagym serve` gives what training in the process gives; figures as JSON, 1 if it does not.

One checkpoint imitates the expert on the first procedural training scenes. From its weights GRPO trains in the process
once a seed, and once against a served world. The runs in the process span the interval in which a further one would lie
with 95 % (Student's, of the seeds' final driving scores); the served run must lie inside.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ALPAGYM = [sys.executable, "-m", "alpagym_host.cli"]
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""The 97.5 % quantile for n - 1 degrees of freedom, by n."""


def train(root: Path, name: str, overrides: list[str]) -> dict[str, Any]:
    """One run's evaluations, wall time and CPU time; its folder as `directory`."""
    began_s = time.monotonic()
    command = [*ALPAGYM, "train", f"run.name={name}", f"run.root={root}", *overrides]
    with tempfile.TemporaryFile("w+") as told:
        process = subprocess.Popen(command, stdout=told, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            told.seek(0)
            raise RuntimeError(f"{' '.join(command)}\n{told.read()[-6000:]}")
    (summary,) = root.glob(f"{name}-*/summary.json")
    scores = json.loads(summary.read_text())["evaluations"]
    out = {stage: found["driving_score"] for stage, found in scores.items()}
    out |= {"wall_s": round(time.monotonic() - began_s), "cpu_s": round(used.ru_utime + used.ru_stime)}
    print(json.dumps({name: out}), flush=True)
    return out | {"directory": str(summary.parent)}


@contextmanager
def served(slots: int, overrides: list[str]) -> Any:
    """The address of a served world that sees as the default policy does."""
    options = ["--port", "0", "--slots", str(slots), "--camera", "front=48x96"]
    command = [*ALPAGYM, "serve", *options, "simulator.control_period_us=200000", *overrides]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            found = re.search(r"scenes at (\S+:\d+),", line)
            if found:
                break
        else:
            raise RuntimeError(f"{' '.join(command)} ended with {server.wait()}")
        yield found[1]
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


def main() -> int:
    """Run it; 1 if the served run lies outside."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenes", type=int, default=64)
    parser.add_argument("--updates", type=int, default=15)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, on a machine with cores to spare")
    parser.add_argument("--root", type=Path, help="keep the run directories here")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    scenes = f"dataset.scene_ids=[{','.join(f'procedural-train-{i:06d}' for i in range(arguments.scenes))}]"
    quick = ["evaluation.every_updates=0", "evaluation.videos=false", "evaluation.references=false"]
    inside = ["simulator.end_on=[]", "simulator.cameras.encoding=jpeg95"]
    common = [scenes, *quick, "rollout.slots=32"]
    with tempfile.TemporaryDirectory() as folder:
        root = arguments.root or Path(folder)
        warm = train(root, "warm", [*common, *inside, "trainer=sft", "trainer.drives_per_scene=2", "trainer.epochs=8"])
        weights = sorted(Path(warm["directory"], "checkpoints").glob("step_*"))[-1]
        grpo = [
            *common,
            "trainer.warm_start=null",
            f"checkpoint.path={weights}",
            f"trainer.updates={arguments.updates}",
        ]
        grpo += ["rollout.scenes_per_step=8", "rollout.group_size=8"]
        with served(32, [scenes]) as address:
            there = ["simulator=alpasim", f"simulator.address={address}", "simulator.control_period_us=200000"]
            there += ["simulator.force_gt_duration_us=1600000", f"run.seed={arguments.seeds[0]}"]
            with ThreadPoolExecutor(arguments.jobs) as pool:
                outside_run = pool.submit(train, root, "served", [*grpo, *there])
                inside_runs = [
                    pool.submit(train, root, f"inside{seed}", [*grpo, *inside, f"run.seed={seed}"])
                    for seed in arguments.seeds
                ]
                outside, runs = outside_run.result(), [run.result() for run in inside_runs]
    finals = [run["final"]["mean"] for run in runs]
    mean, count = statistics.fmean(finals), len(finals)
    half = STUDENT[count] * statistics.stdev(finals) * math.sqrt(1.0 + 1.0 / count)
    result = {
        "warm_start": runs[0]["start"]["mean"],
        "served_start": outside["start"]["mean"],
        "served": outside["final"]["mean"],
        "in_process": finals,
        "interval": [mean - half, mean + half],
        "inside": abs(outside["final"]["mean"] - mean) <= half,
    }
    print(json.dumps(result))
    if arguments.out:
        arguments.out.write_text(json.dumps(result | {"warm": warm, "served_run": outside, "runs": runs}, indent=1))
    return int(not result["inside"])


if __name__ == "__main__":
    sys.exit(main())
