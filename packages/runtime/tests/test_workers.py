"""Rollout workers: processes that drive for a trainer, and what becomes of a run when one side is killed.

A process that dies kills itself when it gets to the phase. One case of each side runs by default, all of them with
`-m slow`. After each: nothing is counted twice, nothing is lost, and no process, port or memory is left.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from omegaconf import OmegaConf

from alpagym_runtime.envs.core import DrivingCore
from alpagym_runtime.errors import ConfigError, SimulatorError
from alpagym_runtime.machine import Machine
from alpagym_runtime.policies.config import ConstantSpeedConfig
from alpagym_runtime.rollouts.collector import Collector
from alpagym_runtime.rollouts.cores import Cores
from alpagym_runtime.rollouts.launchers import LocalLauncher, make_launcher
from alpagym_runtime.rollouts.pool import WorkerPool
from alpagym_runtime.rollouts.wire import Rendezvous
from alpagym_runtime.run_config import from_mapping, to_mapping
from alpagym_runtime.testing.conformance import run_results, training_rows
from alpagym_runtime.testing.examples import assert_same
from alpagym_runtime.trainers.run import Run
from alpagym_runtime.transport.between import build_transport
from alpagym_runtime.types import Ended, EpisodeRequest, Sampling

TERMS = {"progress": {"type": "progress", "scale": 1.0}, "collision": {"type": "collision", "scale": -1.0}}
STANDING = {"type": "constant_speed"}
MEAN = Sampling("mean")


def configure(workers=2, trainer=(), rollout=(), **sections):
    """A run of less than a second besides its workers' start: 2 epochs of imitation, 3 updates, 9 scenes."""
    warm_start = {"drives_per_scene": 1, "epochs": 2, "batch": 32}
    return from_mapping(
        {
            "run": {"seed": 3},
            "simulator": {"type": "toy"},
            "dataset": {"train_scenes": 4, "val_scenes": 2, "test_scenes": 3},
            "expected_valid_steps": 12,
            "policy": {"type": "waypoint", "hidden": 16, "actors": 1},
            "reward": {"terms": TERMS},
            "rollout": {"slots": 8, "group_size": 3, "scenes_per_step": 2, "workers": workers, **dict(rollout)},
            "transport": {"type": "memory"},
            "trainer": {"type": "grpo", "updates": 3, "minibatch": 32, "warm_start": warm_start, **dict(trainer)},
            "evaluation": {"bootstrap": 100, "every_updates": 2, "videos": False},
            "checkpoint": {"every_updates": 2},
        }
        | sections
    )


def freeze(directory, config):
    """The config as the host writes it."""
    directory.mkdir(exist_ok=True)
    (directory / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(to_mapping(config))))


def train(directory, config, **arguments):
    freeze(directory, config)
    return Run(config, directory, **arguments).train()


def results(directory):
    """What a run leaves, but for times, and for what is said of the workers."""
    found = run_results(directory)
    found["metrics"] = [{k: v for k, v in row.items() if not k.startswith("workers/")} for row in found["metrics"]]
    found["summary"].pop("workers", None)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The results of the run in one process."""
    directory = tmp_path_factory.mktemp("alone")
    train(directory, configure(workers=0))
    return results(directory)


# ---------------------------------------------------------------- training


def test_workers_leave_the_results_of_one_process(tmp_path, alone):
    outcome = train(tmp_path, configure(workers=2))
    assert_same(results(tmp_path), alone, "the run with two workers")
    workers = outcome.summary["workers"]
    assert (workers["count"], workers["restarts"], workers["lost"]) == (2, 0, 0)
    assert 0.0 < workers["cpu_s"] < outcome.summary["cpu_s"]
    assert not (tmp_path / "workers").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "transport", [{"type": "disk"}, {"type": "shared_memory"}, {"type": "nccl", "backend": "gloo"}]
)
def test_neither_the_number_of_workers_nor_the_transport_changes_results(tmp_path, alone, transport):
    train(tmp_path, configure(workers=3, transport=transport))
    found = results(tmp_path)
    for part in ("summary", "state"):  # the transport is part of the config
        found[part]["config_hash"] = alone[part]["config_hash"]
    assert_same(found, alone, f"the run with three workers over {transport['type']}")
    assert not list(tmp_path.glob("transport/*"))


def test_steps_that_are_driven_ahead_lag_by_what_is_allowed(tmp_path):
    outcome = train(tmp_path, configure(trainer={"on_policy": False, "max_lag": 2, "updates": 5, "warm_start": None}))
    assert outcome.completed
    rows = training_rows(tmp_path)
    ages = [row["staleness_max"] for row in rows]
    # Steps 0, 1 and 2 are asked for at once; each later one when the step two before it has been trained on.
    assert ages[0] == 0
    assert max(ages) in (1, 2)
    assert all("episodes_stale" not in row for row in rows)
    assert [row["episodes_episodes"] for row in rows] == [6] * 5


# ---------------------------------------------------------------- a worker dies

# A worker that kills itself, once, when it gets to a phase; worker 1 never does.
WORKER = """
import os, signal, sys, time
from pathlib import Path
from alpagym_runtime.rollouts import worker
from alpagym_runtime.rollouts.collector import Collector
from alpagym_runtime.rollouts.cores import Cores
from alpagym_runtime.rollouts.wire import Link
from alpagym_runtime.transport.shared_memory import SharedMemoryTransport
phase, directory, index = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
died = directory / "died"
def die():
    if index == 0 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
def at(owner, name, number=1, after=False, when=lambda *arguments: True):
    inner, calls = getattr(owner, name), []
    def called(*arguments):
        calls.extend([0] * when(*arguments))
        if len(calls) >= number and not after:
            die()
        result = inner(*arguments)
        if len(calls) >= number and after:
            die()
        return result
    setattr(owner, name, called)
def is_done(link, message):
    return message["type"] == "done"
if phase == "start": die()
if phase == "report": at(worker, "_die_with")
if phase == "build": at(Cores, "core")
if phase == "drive": at(Collector, "_decide", 5)
if phase == "hand over": at(SharedMemoryTransport, "send", 2)
if phase == "announce": at(Link, "send", 2, when=is_done)
if phase == "go on": at(Link, "send", 2, after=True, when=is_done)
if phase == "hang":
    def hang(*arguments):
        if index == 0 and not died.exists():
            died.touch()
            time.sleep(1000)
        return inner(*arguments)
    inner, Collector._decide = Collector._decide, hang
if phase.startswith("poison "):
    inner_start = Collector._expect
    from alpagym_runtime.testing.toy import ToySimulator
    inner_begin = ToySimulator._begin
    def begin(self, slot, request):
        if request.scene_id == phase.removeprefix("poison "):
            os.kill(os.getpid(), signal.SIGKILL)
        inner_begin(self, slot, request)
    ToySimulator._begin = begin
sys.exit(worker.serve(directory, index))
"""


class Deadly(LocalLauncher):
    def __init__(self, directory, phase):
        super().__init__(directory)
        self._phase = phase

    def command(self, index):
        return [sys.executable, "-c", WORKER, self._phase, str(self._directory), str(index)]


@contextmanager
def pool_of(directory, phase=None, rollout=(), **sections):
    """A pool whose workers drive a policy without weights, and what it says; afterwards nothing of it is left."""
    config = configure(rollout=rollout, policy=STANDING, **sections)
    freeze(directory, config)
    transport, notes = build_transport(config, "trainer", directory), []
    launch = (lambda: make_launcher(config, directory)) if phase is None else lambda: Deadly(directory, phase)
    pool = WorkerPool(config, directory, transport, launch, notes.append)
    try:
        yield pool, notes
    finally:
        processes, segments, port = left_behind(directory)
        pool.close()
        transport.close()
    assert gone(processes, segments, port), f"left: {processes}, {segments}, port {port}"
    assert not (directory / "workers").exists()


def left_behind(directory):
    """Processes, folders in shared memory and the port of a run that works now."""
    processes = [p for p in psutil.process_iter(["cmdline"]) if str(directory) in (p.info["cmdline"] or [])]
    segments = set()
    for process in processes:
        with psutil.Process(process.pid).oneshot():
            segments |= {Path(file.path).parent for file in process.open_files() if file.path.endswith("owner.lock")}
    return processes, segments, Rendezvous.read(directory).port


def gone(processes, segments, port, within_s=5.0):
    """Whether all of it disappears; a zombie of a test's own child is gone too."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        alive = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if not alive and not any(folder.exists() for folder in segments) and Machine().port_is_free(port):
            return True
        time.sleep(0.05)
    return False


def requests_of(scenes=range(64, 80)):
    return [EpisodeRequest(f"toy-{i}", horizon_ticks=12, policy_seed=i) for i in scenes]


def drives(pool, requests):
    policy = ConstantSpeedConfig().build()
    config = configure(policy=STANDING)
    return pool.collector(Cores(config, 8, Path()).world("test"), policy).collect(requests, MEAN)


def expected(requests):
    """The same drives in this process."""
    config, policy = configure(workers=0, policy=STANDING), ConstantSpeedConfig().build()
    cores = Cores(config, 8, Path())
    core: DrivingCore = cores.core(cores.world("test"), policy.spec)[0]
    return Collector(core, policy, config_hash=config.config_hash).collect(requests, MEAN)


def cases(phases, default):
    """The default run has one; the marker takes the others."""
    return [phase if phase == default else pytest.param(phase, marks=pytest.mark.slow) for phase in phases]


PHASES = ["start", "report", "build", "drive", "hand over", "announce", "go on"]


@pytest.mark.parametrize("phase", cases(PHASES, "drive"))
def test_a_run_survives_a_worker(tmp_path, phase):
    requests = requests_of()
    with pool_of(tmp_path, phase) as (pool, notes):
        assert_same(drives(pool, requests), expected(requests), f"the drives, of which a worker lost some at {phase!r}")
        assert pool.restarts == 1
        assert (pool.lost > 0) == (phase not in ("start", "report"))
        assert pool.lost <= 8 / 2 + 2  # what one worker holds: its slots and two ahead
    assert notes[0].startswith("worker 0 was killed by SIGKILL (log: ")
    assert notes[0].endswith("it is started again (1 of 3 times in a row)")


def test_the_end_of_a_worker_is_noticed_within_two_seconds(tmp_path):
    with pool_of(tmp_path) as (pool, _):
        drives(pool, requests_of(range(64, 66)))
        (victim, *_), *_ = left_behind(tmp_path)
        began = time.monotonic()
        victim.send_signal(signal.SIGKILL)
        while pool.restarts == 0 and time.monotonic() < began + 10.0:
            time.sleep(0.01)
        assert time.monotonic() - began < 2.0


def test_strangers_are_hung_up_on(tmp_path):
    with pool_of(tmp_path) as (pool, _):
        drives(pool, requests_of(range(64, 66)))
        there = Rendezvous.read(tmp_path)
        hello = {"type": "hello", "index": 0, "config_hash": configure(policy=STANDING).config_hash}
        # One that does not know the token, one that says what is no message, a second worker 0.
        for line in (json.dumps(hello | {"token": "0" * 64}), "{", json.dumps(hello | {"token": there.token})):
            with socket.create_connection((there.host, there.port), timeout=10.0) as stranger:
                stranger.sendall(line.encode() + b"\n")
                assert stranger.recv(1) == b""
        assert (pool.alive, pool.restarts) == (2, 0)


def test_what_a_worker_finds_wrong_ends_the_run_and_is_not_tried_again(tmp_path):
    terms = {"speeding": {"type": "measure", "scale": 1.0, "measure": "speeding_count"}}
    with pool_of(tmp_path, reward={"terms": terms}) as (pool, _):
        with pytest.raises(ConfigError, match="reward.terms.speeding.*speeding_count"):
            drives(pool, requests_of())
        assert pool.restarts == 0


@pytest.mark.slow
def test_a_worker_that_hangs_is_ended_at_the_deadline(tmp_path):
    requests = requests_of()
    with pool_of(tmp_path, "hang", {"straggler_s": 5.0}) as (pool, notes):
        assert_same(drives(pool, requests), expected(requests), "the drives")
    assert "was not done with scene 'toy-" in notes[0]
    assert "after 5 s (rollout.straggler_s)" in notes[0]


@pytest.mark.slow
def test_an_episode_that_kills_its_worker_each_time_becomes_void(tmp_path):
    requests = requests_of()
    with pool_of(tmp_path, "poison toy-70", {"retries": 2, "restarts": 5}) as (pool, _):
        episodes = drives(pool, requests)
    void = [episode for episode in episodes if episode.ended == Ended.FAILED]
    assert "toy-70" in {episode.request.scene_id for episode in void}
    assert all(e.failure.text.startswith("lost 3 times with its worker, the last time as that worker") for e in void)
    assert {episode.failure.code for episode in void} == {"WORKER"}
    # 4 slots hold one episode each time after a loss (4 / 4), so it dies alone but for the first time.
    assert len(void) == 1


@pytest.mark.slow
def test_a_run_whose_workers_cannot_start_ends_and_says_why(tmp_path):
    class Broken(LocalLauncher):
        def command(self, index):
            return [sys.executable, "-c", "raise SystemExit(7)"]

    config = configure(rollout={"restarts": 1}, policy=STANDING)
    freeze(tmp_path, config)
    transport = build_transport(config, "trainer", tmp_path)
    pool = WorkerPool(config, tmp_path, transport, lambda: Broken(tmp_path), lambda text: None)
    with pytest.raises(SimulatorError, match="no worker is left: worker . ended with exit code 7 .log: .*restarts=1"):
        drives(pool, requests_of())
    pool.close()


# ---------------------------------------------------------------- the trainer dies

# A trainer that kills itself when it gets to a phase.
TRAINER = """
import os, signal, sys
from pathlib import Path
from alpagym_runtime.rollouts import weights
from alpagym_runtime.rollouts.supervisor import Supervisor
from alpagym_runtime.run_config import load_run_config
from alpagym_runtime.trainers.checkpoints import CheckpointStore
from alpagym_runtime.trainers.run import Run
phase, command, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
def at(owner, name, number=1):
    inner, calls = getattr(owner, name), []
    def called(*arguments, **named):
        calls.append(0)
        if len(calls) >= number:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(*arguments, **named)
    setattr(owner, name, called)
if phase == "start": at(Supervisor, "_welcome")
if phase == "hand out": at(Supervisor, "_hand_out", 40)
if phase == "take over": at(Supervisor, "_take_over", 3)
if phase == "publish": at(weights, "replacing", 2)
if phase == "train":
    from alpagym_runtime.trainers import closed_loop
    at(closed_loop, "optimise", 2)
if phase == "keep": at(CheckpointStore, "save", 2)
if phase == "end": at(Supervisor, "_end")
run = Run(load_run_config(directory), directory)
getattr(run, command)()
"""


def watch(directory, process, found):
    """Keep what a run has, as long as it lives."""
    while process.poll() is None:
        try:
            now = left_behind(directory)
        except (OSError, ValueError, psutil.Error):
            continue
        found["processes"] = {p.pid: p for p in (*found.get("processes", {}).values(), *now[0])}
        found["segments"] = found.get("segments", set()) | now[1]
        found["port"] = now[2]
        time.sleep(0.02)


def run_until_killed(directory, config, phase, command):
    freeze(directory, config)
    process = subprocess.Popen([sys.executable, "-c", TRAINER, phase, command, str(directory)])
    found = {}
    watching = threading.Thread(target=watch, args=(directory, process, found))
    watching.start()
    assert process.wait(120) == -signal.SIGKILL
    watching.join()
    assert len(found["processes"]) >= 2
    assert gone(found["processes"].values(), found["segments"], found["port"])


def test_workers_end_with_their_trainer(tmp_path):
    run_until_killed(tmp_path, configure(policy=STANDING), "take over", "evaluate")
    # What the dead one left is no hindrance, and is cleared away.
    outcome = Run(configure(policy=STANDING), tmp_path).evaluate()
    assert outcome.completed
    assert not (tmp_path / "workers").exists()


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["start", "hand out", "take over", "publish", "train", "keep", "end"])
def test_a_run_whose_trainer_was_killed_resumes_to_the_same_results(tmp_path, alone, phase):
    run_until_killed(tmp_path, configure(), phase, "train")
    assert train(tmp_path, configure()).completed
    assert_same(results(tmp_path), alone, f"the run whose trainer was killed at {phase!r}")


@pytest.mark.slow
def test_a_stopped_trainer_that_is_killed_leaves_no_worker(tmp_path):
    """Workers that do not get to read: the kernel kills them with the process that started them."""
    freeze(tmp_path, configure(policy=STANDING))
    process = subprocess.Popen([sys.executable, "-c", TRAINER, "never", "evaluate", str(tmp_path)])
    deadline = time.monotonic() + 60.0
    logs = [tmp_path / "logs" / f"worker-{index}.log" for index in range(2)]
    # A worker says its number once the kernel knows with whom it ends.
    while not all(log.exists() and log.stat().st_size for log in logs) and time.monotonic() < deadline:
        time.sleep(0.02)
    workers = [p for p in psutil.Process(process.pid).children() if "--index" in p.cmdline()]
    assert len(workers) == 2
    for worker in workers:
        worker.send_signal(signal.SIGSTOP)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert gone(workers, set(), 0)


# ---------------------------------------------------------------- workers of others


@pytest.mark.slow
def test_workers_that_somebody_else_starts_report_and_come_back(tmp_path):
    """As srun does: the trainer waits for them and starts none."""
    config = configure(deploy={"kind": "slurm"}, policy=STANDING)
    freeze(tmp_path, config)
    requests, notes, started = requests_of(), [], []
    transport = build_transport(config, "trainer", tmp_path)
    pool = WorkerPool(config, tmp_path, transport, lambda: make_launcher(config, tmp_path), notes.append)

    def start(index):
        command = [sys.executable, "-m", "alpagym_runtime.rollouts.worker", str(tmp_path)]
        environment = os.environ | {"SLURM_PROCID": str(index)}
        started.append(subprocess.Popen(command, env=environment))

    for index in range(2):
        start(index)
    assert_same(drives(pool, requests), expected(requests), "the drives")
    started[0].kill()
    start(0)
    assert_same(drives(pool, requests), expected(requests), "the drives after one was killed and started again")
    pool.close()
    transport.close()
    assert [process.wait(10) for process in started] == [-signal.SIGKILL, 0, 0]
    assert not list(tmp_path.glob("transport/*"))


# Two nodes with room for one worker each: when one is lost, the other drives on alone. In a process of its own, for Ray
# takes over signals.
CLUSTER = """
import json, os, subprocess, sys
from pathlib import Path
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
from ray.cluster_utils import Cluster
phase, directory, trainer = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
kept, doomed = (cluster.add_node(num_cpus=1) for _ in range(2))
os.environ["RAY_ADDRESS"] = cluster.address
from alpagym_runtime.rollouts.supervisor import Supervisor
from alpagym_runtime.run_config import load_run_config
from alpagym_runtime.trainers.run import Run
owner, number = {
    "report": ("_welcome", 1), "hand out": ("_hand_out", 60), "drive": ("_take_over", 5), "late": ("_take_over", 30),
}.get(phase, ("", 0))
calls = []
def called(*arguments):
    calls.append(0)
    if len(calls) == number:
        cluster.remove_node(doomed, allow_graceful=False)
    return inner(*arguments)
if owner:
    inner = getattr(Supervisor, owner)
    setattr(Supervisor, owner, called)
try:
    if phase == "trainer":
        killed = subprocess.run([sys.executable, "-c", trainer, "take over", "train", str(directory)])
        assert killed.returncode == -9
    outcome = Run(load_run_config(directory), directory).train()
    (directory / "told.json").write_text(json.dumps(outcome.summary["workers"]))
finally:
    cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("phase", ["none", "report", "hand out", "drive", "late", "trainer"])
def test_a_lost_node_of_a_ray_cluster_costs_its_running_episodes(tmp_path, alone, phase):
    if not importlib.util.find_spec("ray"):
        pytest.skip("Ray is not installed: uv sync --extra ray")
    freeze(tmp_path, configure(deploy={"kind": "ray"}))
    with (tmp_path / "printed").open("w") as printed:
        process = subprocess.run(
            [sys.executable, "-c", CLUSTER, phase, str(tmp_path), TRAINER],
            stdout=printed,
            stderr=printed,
            timeout=500,
        )
    assert process.returncode == 0, (tmp_path / "printed").read_text()[-3000:]
    assert_same(results(tmp_path), alone, f"the run on a cluster that lost a node at {phase!r}")
    told = json.loads((tmp_path / "told.json").read_text())
    if phase == "late":  # the run may be over before the lost node's worker has died
        assert told["restarts"] <= 1
    else:
        assert told["restarts"] == (phase not in ("none", "trainer"))
    assert told["lost"] <= told["restarts"] * (8 / 2 + 2)  # what one worker holds at most: its slots and two ahead
    numbers = [line.rsplit(" ", 1)[1] for log in tmp_path.glob("logs/*") for line in log.read_text().splitlines()]
    assert not [number for number in numbers if number.isdigit() and psutil.pid_exists(int(number))]
    assert not list(tmp_path.glob("transport/*"))
