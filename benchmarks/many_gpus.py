"""What N GPUs of one host do: a team's numbers and times, episodes beside a weight sync, one step of a large model.

    python benchmarks/many_gpus.py --gpus 8                         # everything; 2 and 4 are only other numbers
    python benchmarks/many_gpus.py --gpus 8 --parts team            # one part of those below
    python benchmarks/many_gpus.py --gpus 8 --small --device cpu    # the same lines in small, where there is no GPU

scaling: updates of the default run by 1, 2, 4, … processes with 32 groups each: decisions a second.
team: imitation and GRPO by 1, 2, 4, … processes, a GPU each, same global batch: how far the numbers of every row are
from one process's, and whether that is within `TOLERANCE`, without TF32; seconds a step. `waypoint` is the default run,
`tiny` is `experiment=alpamayo_tiny`.
transport: half of the GPUs send episodes of mixed sizes to the other half, while weights are broadcast to all; every
sender is killed and replaced once.
model: stage 1 of SFT of an 8-billion backbone, random weights, spread over 1, 2, 4, … GPUs (FSDP2).
cosmos: Cosmos-RL with half of the GPUs for the policy (FSDP2) and the other half, then one, for rollouts; with the half
a rollout worker is killed once (`cosmos_shapes.py`).
large: GRPO of the 8-billion backbone by Cosmos-RL, half of the GPUs for the policy, half for rollouts.

Results are written as they come, to `--out`; a part that fails says how, and the others follow.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from process_tree import Tree

from alpagym_runtime.transport.config import NcclConfig
from alpagym_runtime.transport.nccl.ends import Receiver, Sender
from alpagym_runtime.types import Ended, Episode, EpisodeRequest

QUIET = [
    *("evaluation.every_updates=0", "evaluation.references=false", "evaluation.videos=false", "logging=console"),
    *("dataset.train_scenes=128", "dataset.val_scenes=32", "dataset.test_scenes=32"),
]
CASES = {
    "waypoint": ["trainer.updates=6", "trainer.warm_start.epochs=2", "trainer.warm_start.drives_per_scene=1"],
    # Compiling its engine takes minutes on a GPU, for each number of rows.
    "tiny": ["experiment=alpamayo_tiny", "trainer.updates=4", "trainer.warm_start.epochs=1", "policy.engine=eager"],
    "growing": ["trainer.updates=12", "trainer.warm_start=null"],
}
FEW = ["dataset.train_scenes=16", "dataset.val_scenes=8", "dataset.test_scenes=8"]
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-3}
"""How far a number may be from that of one process, as a share of it and besides: the order in which sums are taken;
on GPUs also other kernels for other numbers of rows."""
WEIGHTS = 200_000_000
"""Bytes of a weight sync."""


def counts(gpus: int) -> list[int]:
    """1, 2, 4, … and all."""
    return sorted({*(1 << k for k in range(gpus.bit_length()) if 1 << k <= gpus), gpus})


# ---------------------------------------------------------------- team


def words_of_team(name: str, size: int, folder: Path, options: argparse.Namespace, groups: int = 0) -> list[str]:
    """The words of `alpagym train` for a run by `size` processes; each step with so many groups, if that is said."""
    words = [*CASES[name], *QUIET, f"topology.processes={size}", f"learner.device={options.device}"]
    if options.device == "cuda":
        words += [f"topology.gpus_per_node={size}"]
    if options.small:
        # Processes share whole groups: the same batch for all, with one each for the most.
        words += [*FEW, f"rollout.scenes_per_step={max(4, options.gpus)}"]
        words += ["trainer.updates=2", *([] if groups else ["trainer.warm_start.epochs=1"])]
    if groups:
        words += [f"rollout.scenes_per_step={groups}", f"trainer.minibatch={16 * groups}"]
    return [*words, f"simulator.cameras.threads={options.threads}", f"run.root={folder}"]


def run_team(
    name: str, size: int, folder: Path, options: argparse.Namespace, groups: int = 0
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of a run by `size` processes, and what they took."""
    directory = folder / f"{name}-{size}"
    words = words_of_team(name, size, folder, options, groups)
    command = [sys.executable, "-m", "alpagym_host.cli", "train", "--directory", str(directory), *words]
    with (folder / f"{name}-{size}.log").open("w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if not groups:
            # Convolutions round to 10 bits by default, in kernels that depend on how many rows a process has.
            environment |= {"NVIDIA_TF32_OVERRIDE": "0"}
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        tree = Tree(child.pid, options.device == "cuda" and not options.together)
        tree.start()
        try:
            code = child.wait(options.limit)
        finally:
            end_all(child)
            took = tree.end()
    if code:
        raise subprocess.CalledProcessError(code, command)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "evaluate" not in row["stage"]], took


def end_all(child: subprocess.Popen[bytes]) -> None:
    """End a process that is not over, with all that it started."""
    if child.poll() is None:
        everybody = [*psutil.Process(child.pid).children(recursive=True), child]
        for process in everybody:
            with contextlib.suppress(psutil.Error):
                process.kill()
        child.wait()


def compared(rows: list[dict[str, Any]], first: list[dict[str, Any]], tolerance: float) -> dict[str, Any]:
    """By stage: losses, differences from one process and whether they are within a tolerance, seconds a step."""
    about: dict[str, Any] = {}
    for stage in dict.fromkeys(row["stage"] for row in rows):
        pairs = [(a, b) for a, b in zip(first, rows, strict=True) if a["stage"] == stage]
        keys = [
            key
            for key in ("loss", "kl", "reward", "driving_score", "gradient_norm")
            if all(isinstance(row.get(key), float) for pair in pairs for row in pair)
        ]
        # The first step of a stage loads scenes and starts CUDA.
        seconds, of_one = (
            {
                key: statistics.median(pair[which][key] for pair in pairs[1:] or pairs)
                for key in pairs[0][1]
                if key.startswith("seconds")
            }
            for which in (1, 0)
        )
        about[stage] = {
            "loss_of_one": [a.get("loss") for a, _ in pairs],
            "loss": [b.get("loss") for _, b in pairs],
            "gradient_norm": [b.get("gradient_norm") for _, b in pairs],
            "largest_difference": {key: max(abs(a[key] - b[key]) for a, b in pairs) for key in keys},
            "within_tolerance": all(
                abs(a[key] - b[key]) <= tolerance * (1.0 + abs(a[key])) for key in keys for a, b in pairs
            ),
            "seconds": seconds,
            "times_as_fast": {key: of_one[key] / value for key, value in seconds.items() if value and key in of_one},
        }
    return about


def scaling(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Updates of 1, 2, 4, … processes with as many groups each: decisions a second, and as a share of so many ones."""
    found: dict[str, Any] = {}
    for size in counts(options.gpus):
        try:
            rows, took = run_team("growing", size, folder, options, (4 if options.small else 32) * size)
        except (subprocess.SubprocessError, OSError, ValueError) as err:
            found[str(size)] = {"failed": str(err)[:500]}
            save(options, {"scaling": found})
            continue
        late = rows[2:] or rows[1:]  # the first ones load scenes and start CUDA
        rate = statistics.median(row["throughput/decisions_per_s"] for row in late)
        found[str(size)] = {
            "decisions_per_s": rate,
            "seconds_drive": statistics.median(row["seconds_drive"] for row in late),
            "seconds_train": statistics.median(row["seconds_train"] for row in late),
            "took": took,
        }
        if "decisions_per_s" in found["1"]:
            found[str(size)]["efficiency"] = rate / (size * found["1"]["decisions_per_s"])
        save(options, {"scaling": found})
    return found


def team(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Every case by 1, 2, … processes; what failed says how."""
    found: dict[str, Any] = {}
    plans = [(name, size) for name in options.cases for size in counts(options.gpus)]
    with ThreadPoolExecutor(len(plans) if options.together else 1) as pool:
        runs = {(name, size): pool.submit(run_team, name, size, folder, options) for name, size in plans}
        for name, size in plans:
            began = time.monotonic()
            try:
                first, _ = runs[name, 1].result()
                rows, took = runs[name, size].result()
                found[f"{name}-{size}"] = compared(rows, first, TOLERANCE[options.device]) | {"took": took}
            except (subprocess.SubprocessError, OSError, ValueError) as err:
                log = folder / f"{name}-{size}.log"
                said = log.read_text()[-1500:] if log.is_file() else ""
                found[f"{name}-{size}"] = {"failed": str(err)[:500], "log": said}
            print(f"{name}-{size}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            save(options, {"team": found})
    return found


# ---------------------------------------------------------------- transport


def drive(number: int, size: int, sender: Sender) -> Episode:
    """An episode of `size` bytes that is known by its number; every other one in memory of the sender."""
    request = EpisodeRequest("benchmark", policy_seed=number)
    array = sender.allocate(size) if number % 2 else np.empty(size, np.uint8)
    array[:] = number % 251
    return Episode(request, Ended.HORIZON, None, {}, 1.0, False, observation={"x": array}, rewards=np.zeros(0))


def open_store(address: str) -> dist.TCPStore:
    """A connection to the parent's store."""
    return dist.TCPStore("127.0.0.1", int(address), None, False, timedelta(seconds=600), wait_for_workers=False)


class Weights(threading.Thread):
    """Takes part in weight syncs beside what the process does; rank 0 begins one every second.

    A process group is of one generation: a sender that is killed ends it, between two syncs.
    """

    def __init__(self, options: argparse.Namespace, rank: int, device: torch.device | None, pause: Any) -> None:
        super().__init__(name="weights", daemon=True)
        self._options, self._rank, self._device, self._pause = options, rank, device, pause
        self._store = open_store(options.store)
        self.syncs, self.seconds, self.wrong = 0, 0.0, 0

    def run(self) -> None:
        """Until the parent says stop."""
        size, generation = self._options.gpus, self._options.life
        weights = torch.zeros(WEIGHTS // (50 if self._device is None else 1), dtype=torch.uint8, device=self._device)
        while True:
            generation += 1
            self._store.wait([f"generation/{generation}"])
            where = dist.PrefixStore(f"weights/{generation}", self._store)
            if self._device is None:
                group: Any = dist.ProcessGroupGloo(where, self._rank, size, timedelta(seconds=120))
            else:
                torch.cuda.set_device(self._device)
                group = dist.ProcessGroupNCCL(where, self._rank, size, dist.ProcessGroupNCCL.Options())
            for turn in range(1_000_000):
                key = f"sync/{generation}/{turn}"
                if self._rank == 0:
                    time.sleep(1.0)
                    end = self._store.check([f"halt/{generation}"])
                    self._store.set(key, "end" if end else "go")
                self._store.wait([key])
                if self._store.get(key) == b"end":
                    break
                if self._rank == 0:
                    weights.fill_(turn % 251)
                with self._pause():
                    # All have paused before anybody begins.
                    self._store.add(f"{key}/ready", 1)
                    while self._store.add(f"{key}/ready", 0) < size:
                        time.sleep(0.002)
                    began = time.perf_counter()
                    group.broadcast([weights]).wait()
                    right = int(weights[0]) == int(weights[-1]) == turn % 251
                    self.seconds += time.perf_counter() - began
                self.wrong += not right
                self.syncs += 1
            group.abort()
            self._store.add(f"left/{generation}", 1)
            if self._store.check(["stop"]):
                return


def transport_process(options: argparse.Namespace) -> None:
    """A sender (the upper half of the GPUs) or a receiver (the lower half); prints a line of JSON at the end."""
    rank, pairs = options.rank, options.gpus // 2
    device = torch.device("cuda", rank) if options.device == "cuda" else None
    if device is not None:
        torch.cuda.set_device(device)
    folder = Path(options.folder) / str(rank % pairs)
    config = NcclConfig("nccl" if device else "gloo", timeout_s=60.0)
    end = config.build("trainer" if rank < pairs else "rollout", folder)
    pause = end.paused if isinstance(end, Receiver) else contextlib.nullcontext
    weights = Weights(options, rank, device, pause)
    store = open_store(options.store)
    draw = random.Random(rank + 100 * options.life)
    top = 1_000_000 if options.small else 64_000_000
    weights.start()
    if isinstance(end, Sender):
        # The receiver learns handles from the store, in order, and takes episodes behind a few others.
        number = 0
        while not store.check(["quiet"]):
            size = draw.choice([0, 1, 4096, 100_000, 1_000_000, draw.randrange(top), top])
            handle = end.send(drive(number, size, end))
            store.set(f"handle/{rank}/{options.life}/{number}", f"{handle} {size}")
            number += 1
        store.set(f"sent/{rank}/{options.life}", str(number))
        weights.join()
        print(json.dumps({"sent": number, "syncs": weights.syncs, "wrong": weights.wrong}), flush=True)
        end.close()
        return
    process, sender, life, number = psutil.Process(), rank + pairs, 0, 0
    got, total, longest, wrong, lost, memory = 0, 0, 0.0, 0, 0, list[list[float]]()
    began = last = time.monotonic()
    restart_s = 0.0
    while True:
        key = f"handle/{sender}/{life}/{number}"
        if not store.check([key]):
            if store.check([f"dead/{sender}"]) and life == 0:
                life, number, restart_s = 1, 0, time.monotonic()
            elif store.check([f"sent/{sender}/1"]) and number >= int(store.get(f"sent/{sender}/1")):
                break
            time.sleep(0.001)
            continue
        handle, size = store.get(key).decode().split()
        store.delete_key(key)
        number += 1
        try:
            found = end.receive(handle).observation["x"]
        except (ConnectionError, KeyError):
            lost += 1  # on its way when its sender was killed
            continue
        if life == 1 and number == 1:
            restart_s = time.monotonic() - restart_s
        sample = found[:: max(1, len(found) // 1000)]
        wrong += len(found) != int(size) or not (sample == (number - 1) % 251).all()
        end.discard(handle)
        del found, sample
        now = time.monotonic()
        if not (life == 1 and number == 1):  # the new sender's first: `first_of_the_new_sender_s`
            longest = max(longest, now - last)
        last = now
        got, total = got + 1, total + int(size)
        if got % 200 == 50:
            on_gpu = torch.cuda.memory_allocated() / 1e6 if device else 0.0
            memory.append([round(now - began, 1), round(process.memory_info().rss / 1e6), round(on_gpu)])
    seconds = last - began
    weights.join()
    result = {
        "episodes": got,
        "wrong": wrong,
        "lost_with_the_killed_sender": lost,
        "seconds": seconds,
        "gb_per_s": total / 1e9 / seconds,
        "longest_gap_s": longest,
        "first_of_the_new_sender_s": restart_s,
        "syncs": weights.syncs,
        "syncs_wrong": weights.wrong,
        "seconds_a_sync": weights.seconds / max(weights.syncs, 1),
        "memory_s_rss_mb_gpu_mb": [*memory[:2], *memory[-2:]],
        "rss_mb_most": max((entry[1] for entry in memory), default=0.0),
    }
    print(json.dumps(result), flush=True)
    end.close()


def transport(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the processes, kill every sender once; what each end says."""
    pairs = options.gpus // 2
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=600), wait_for_workers=False)

    def start(rank: int, life: int) -> subprocess.Popen[str]:
        words = ["--rank", str(rank), "--life", str(life), "--store", str(store.port), "--folder", str(folder)]
        log = (folder / f"end-{rank}-{life}.log").open("w")
        command = [sys.executable, __file__, *sys.argv[1:], *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)

    def generation_ends(number: int) -> None:
        store.set(f"halt/{number}", "1")
        while store.add(f"left/{number}", 0) < options.gpus:
            dead = [child.args for child in (*receivers, *senders) if child.poll() not in (None, 0)]
            if dead or time.monotonic() > deadline:
                raise RuntimeError(f"an end died or hangs: {dead}")
            time.sleep(0.05)

    deadline = time.monotonic() + options.seconds + 120.0
    receivers = [start(rank, 0) for rank in range(pairs)]
    senders = [start(rank, 0) for rank in range(pairs, 2 * pairs)]
    everybody = [*receivers, *senders]
    try:
        store.set("generation/1", "1")
        time.sleep(options.seconds / 2)
        generation_ends(1)
        time.sleep(1.0)  # full speed again: it dies with episodes on their way
        for sender in senders:
            sender.send_signal(signal.SIGKILL)
            sender.wait()
        for rank in range(pairs, 2 * pairs):
            store.set(f"dead/{rank}", "1")
        senders = [start(rank, 1) for rank in range(pairs, 2 * pairs)]
        everybody += senders
        store.set("generation/2", "1")
        time.sleep(options.seconds / 2)
        store.set("quiet", "1")
        store.set("stop", "1")
        generation_ends(2)
        ends = [json.loads(child.communicate(timeout=90)[0].splitlines()[-1]) for child in (*receivers, *senders)]
    finally:
        for child in everybody:
            child.kill()
            child.wait()
    return {"pairs": pairs, "receivers": ends[:pairs], "senders": ends[pairs:]}


# ---------------------------------------------------------------- model


def model_process(options: argparse.Namespace) -> None:
    """A few steps of stage 1; rank 0 prints a line of JSON."""
    sys.path.insert(0, str(Path(__file__).parent))
    from pai_real_size import backbone

    from alpagym_alpamayo_r1.config import Alpamayo15Config
    from alpagym_alpamayo_r1.policy import AlpamayoPolicy
    from alpagym_alpamayo_r1.prompt import LAYOUTS
    from alpagym_alpamayo_r1.sft_config import AlpamayoSftConfig
    from alpagym_alpamayo_r1.sft_schedule import parameter_groups
    from alpagym_alpamayo_r1.tiny import make_tiny
    from alpagym_runtime.deploy_config import LearnerSection
    from alpagym_runtime.testing.examples import example_observation
    from alpagym_runtime.trainers.learner import Learner, whole_tensor
    from alpagym_runtime.trainers.team import Team

    cuda = options.device == "cuda"
    team = Team.join(options.device)
    device = f"cuda:{torch.cuda.current_device()}" if cuda else "cpu"
    model, processor = make_tiny() if options.small else backbone()
    if options.wide:
        model = model.float()
    size = {"height": 64, "width": 96} if options.small else {}
    config = Alpamayo15Config(rows=1, gradient_checkpointing=True, **size)
    policy = AlpamayoPolicy(config, model, processor, device)
    learner = Learner(policy, LearnerSection(shard="always"), team)
    sft = AlpamayoSftConfig(learning_rate=1e-5, warmup_steps=500, lr_multiplier={"vlm.model.visual": 0.1})
    trained = {name: p for name, p in learner.named_parameters().items() if name.startswith("vlm.")}
    optimiser = torch.optim.AdamW(parameter_groups(trained, sft), lr=1e-5, fused=cuda)
    forwards = max(4, options.gpus) // team.size  # of one step: the same samples by any power of two of processes
    target = np.zeros((1, 64, 3), np.float32)
    target[0, :, 0] = np.arange(1, 65) * 0.8
    observation = example_observation(policy.spec, 1)

    def peak() -> float:
        return torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0

    def now() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    steps = []
    for _ in range(3):
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        began, losses = now(), []
        with learner.training():
            optimiser.zero_grad()
            for _ in range(forwards):
                batch = policy.labelled(observation, target, [{}], LAYOUTS["sft"])
                with policy.recomputing(), torch.autocast(device.split(":")[0], torch.bfloat16, enabled=options.wide):
                    module = policy.module
                    loss = module.within(lambda b=batch, m=module: m.language_loss(b).total)
                    (loss / forwards).backward()
                losses.append(float(loss.detach()))
            norm = float(whole_tensor(torch.nn.utils.clip_grad_norm_(list(trained.values()), 1.0)))
            optimiser.step()
            stepped = now()
        numbers = {"seconds": stepped - began, "seconds_publish": now() - stepped, "peak_gb": peak()}
        steps.append({"loss": float(np.mean(losses)), "gradient_norm": norm, **numbers})
    if team.writes:
        about = {
            "parameters_billion": sum(p.numel() for p in model.parameters()) / 1e9,
            "forwards_a_process": forwards,
            "samples": forwards * team.size,
        }
        print(
            "RESULT " + json.dumps({"processes": team.size, "float32": options.wide, **about, "steps": steps}),
            flush=True,
        )
    team.leave()
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo's may abort an interpreter that takes itself down (alpagym_host/launch/torchrun.py)


def model(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Steps by so many GPUs; the same samples a step, four or one for each GPU."""
    found: dict[str, Any] = {}
    plans = [(size, False) for size in counts(options.gpus)] + [(options.gpus, True)]
    for size, wide in plans:
        name = f"{size}-{'float32' if wide else 'bfloat16'}"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        command = [*torchrun, __file__, *sys.argv[1:], "--rank", "-1", *(["--wide"] if wide else [])]
        log, said = folder / f"model-{name}.log", folder / f"model-{name}.out"
        with log.open("w") as errors, said.open("w") as output:
            child = subprocess.Popen(command, stdout=output, stderr=errors)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(options.limit)
            end_all(child)
        lines = [line for line in said.read_text().splitlines() if line.startswith("RESULT ")]
        log_end = log.read_text()[-1500:]
        found[name] = json.loads(lines[-1].removeprefix("RESULT ")) if lines else {"failed": log_end}
        save(options, {"model": found})
    return found


# ---------------------------------------------------------------- Cosmos-RL


def shapes(options: argparse.Namespace, folder: Path, part: str, wanted: dict[str, list[str]]) -> dict[str, Any]:
    """Jobs of Cosmos-RL, one after the other; what each did, or how it failed."""
    found: dict[str, Any] = {}
    for name, words in wanted.items():
        out = folder / f"{name}.json"
        command = [sys.executable, str(Path(__file__).with_name("cosmos_shapes.py")), "--out", str(out), *words]
        command += ["--device", options.device, "--limit", str(options.limit), *(["--small"] if options.small else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found[name] = json.loads(out.read_text()) if out.is_file() else {"failed": done.stderr[-1500:]}
        save(options, {part: found})
    return found


def cosmos(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Half for the policy and half for rollouts, of which one is killed; and one rollout alone."""
    half = options.gpus // 2
    size = [
        "--policies",
        str(half),
        *(["--steps", "16", "--kill-after", "6", "--keep-every", "3"] if options.small else []),
    ]
    wanted = {f"{half}+{half}": [*size, "--rollouts", str(half), "--kill"]}
    if half > 1:
        wanted[f"{half}+1"] = [*size, "--rollouts", "1"]
    return shapes(options, folder, "cosmos", wanted)


def large(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Six GRPO steps of the 8-billion backbone."""
    half = options.gpus // 2
    words = ["--case", "large", "--policies", str(half), "--rollouts", str(half)]
    words += ["--cut-after", "6", "--steps", "1000", "--keep-every", "1000"]
    return shapes(options, folder, "large", {f"{half}+{half}": words})


# ----------------------------------------------------------------


def save(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Add to the file of results."""
    known = json.loads(options.out.read_text()) if options.out.is_file() else {}
    options.out.write_text(json.dumps(known | results, indent=1) + "\n")


PARTS = {"cosmos": cosmos, "transport": transport, "model": model, "large": large, "scaling": scaling, "team": team}
"""In the order in which they run."""


def options_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument(
        "--cases", nargs="+", choices=("waypoint", "tiny"), default=["waypoint", "tiny"], help="of the team"
    )
    parser.add_argument("--seconds", type=float, default=150.0, help="of the transport's part")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds of one run")
    parser.add_argument("--threads", type=int, default=8, help="of each process's renderer")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--together", action="store_true", help="all runs of the team's part side by side")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("many_gpus.json"))
    for name, kind, default in (("rank", int, None), ("life", int, 0), ("store", str, ""), ("folder", str, "")):
        parser.add_argument(f"--{name}", type=kind, default=default, help=argparse.SUPPRESS)
    parser.add_argument("--wide", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> None:
    """Run the parts."""
    options = options_of()
    if options.rank is not None:
        model_process(options) if options.rank < 0 else transport_process(options)
        return
    for part in options.parts:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = PARTS[part](options, Path(folder))
            except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as err:
                logs = {log.name: log.read_text()[-600:] for log in sorted(Path(folder).glob("*.log"))}
                found = {"failed": f"{type(err).__name__}: {err}"[:1500], "logs": logs}
        found["seconds_of_the_part"] = round(time.monotonic() - began, 1)
        save(options, {part: found})
        print(json.dumps({part: found}), flush=True)


if __name__ == "__main__":
    main()
