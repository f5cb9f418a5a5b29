"""The real Cosmos-RL 0.4.7, from launcher to Redis, on a CPU: a stand-in takes the place of CUDA and NCCL only.

uv sync --all-packages --extra cosmos && uv run pytest -m cosmos_cpu tests/test_cosmos_cpu.py
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from alpagym_host import run_dir
from alpagym_host.compose import compose
from alpagym_runtime.trainers.checkpoints import load_weights
from alpagym_runtime.trainers.cosmos.journal import Journal
from alpagym_runtime.trainers.cosmos.supervisor import newest_checkpoint

pytestmark = [pytest.mark.cosmos_cpu, pytest.mark.timeout(1800), pytest.mark.usefixtures("real_cosmos")]

WORDS = (
    *("simulator=toy", "policy=waypoint_actors", "policy.hidden=16", "policy.actors=1"),
    *("trainer.type=cosmos", "trainer.warm_start=null"),
    *("dataset.train_scenes=12", "dataset.val_scenes=2", "dataset.test_scenes=2", "expected_valid_steps=10"),
    *("rollout.slots=16", "rollout.group_size=4", "evaluation.videos=false", "evaluation.references=false"),
    *("evaluation.bootstrap=100", "evaluation.every_updates=0", "checkpoint.every_updates=3", "logging=console"),
    *("cosmos.device=cpu", "cosmos.train.train_batch_per_replica=8", "cosmos.train.optm_lr=0.01"),
    *("cosmos.train.param_dtype=float32", "cosmos.train.max_num_steps=6", "cosmos.train.epoch=100"),
    *("cosmos.train.train_policy.mini_batch=2", "cosmos.watchdog_s=600", "cosmos.register_timeout_s=1500"),
)
COLOCATED = ("cosmos.mode=colocated", "cosmos.train.train_policy.on_policy=true", "cosmos.rollout.batch_size=2")


def command(run, *words):
    return [sys.executable, "-m", "alpagym_host.cli", "train", *WORDS, *words, "--directory", str(run)]


def train(run, *words, code=0):
    done = subprocess.run(command(run, *words), capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-6000:]
    return done


def begin(run, *words):
    """A run in the background, its output in a file beside it."""
    with run.with_suffix(".log").open("w") as log:
        return subprocess.Popen(command(run, *words), stdout=log, stderr=subprocess.STDOUT)


def wait_for_step(run, process, step, limit_s=1200.0):
    end_s = time.monotonic() + limit_s
    while not any(found.step >= step for found in Journal(run).steps(0)):
        assert process.poll() is None, run.with_suffix(".log").read_text()[-6000:]
        assert time.monotonic() < end_s
        time.sleep(0.2)


def left_behind(run):
    """Processes of a run: they name its directory in their command line or environment."""
    found = []
    for process in psutil.process_iter():
        try:
            named = str(run) in " ".join(process.cmdline()) or process.environ().get("ALPAGYM_COSMOS_RUN") == str(run)
            if named and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                found.append(process)
        except psutil.Error:
            continue
    return found


def steps(run):
    return Journal(run).steps(0)


def has_ended_well(run, count=6):
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert [step.step for step in steps(run)] == list(range(1, count + 1))
    assert newest_checkpoint(run) == count
    assert left_behind(run) == []
    assert not list((run / "transport").glob("disk-*"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    made = [row for row in rows if row["stage"] == "cosmos"]
    assert [row["step"] for row in made] == list(range(1, count + 1))
    assert all(row["decisions"] > 0 for row in made)
    return made


def between_first_and_last_step_s(log):
    """By the clock of the controller's log."""
    stamp = re.compile(r"(\d\d):(\d\d):(\d\d),(\d{3}) .*Step: \d+/\d+, ")
    times = [
        3600 * int(found[1]) + 60 * int(found[2]) + int(found[3]) + int(found[4]) / 1000.0
        for line in log.splitlines()
        if (found := stamp.search(line))
    ]
    return (times[-1] - times[0]) % 86400.0


def test_colocated(tmp_path):
    run = tmp_path / "run"
    train(run, *COLOCATED)
    rows = has_ended_well(run)
    # On policy: the weights that drove are those that were trained, and ratios begin at 1.
    assert all(row["staleness_max"] == 0.0 for row in rows)
    assert all(abs(row["ratio_min"] - 1.0) < 1e-3 for row in rows)
    log = (run / "cosmos" / "logs" / "logs_latest" / "controller.log").read_text()
    assert "Step: 6/6" in log
    # With Cosmos-RL's own 10 s of waiting for commands the five steps between would take 50 s.
    assert between_first_and_last_step_s(log) < 45.0
    # What the run kept is what the job trained.
    first, last = load_weights(run / "cosmos" / "initial.safetensors"), load_weights(run)
    assert any(not torch.equal(first[name], last[name]) for name in first)


def test_disaggregated_with_prefetch(tmp_path):
    run = tmp_path / "run"
    train(run, "cosmos.rollout.prefetch_rollout=true", "cosmos.train.train_policy.allowed_outdated_steps=1")
    rows = has_ended_well(run)
    # Rollouts drive ahead of training, by no more than is allowed.
    assert all(row["staleness_max"] <= 1.0 for row in rows)


@pytest.mark.parametrize("dispatch", [False, True])
def test_two_rollouts_and_two_policies(tmp_path, dispatch):
    run = tmp_path / "run"
    words = (
        "cosmos.rollout.parallelism.n_init_replicas=2",
        "cosmos.policy.parallelism.n_init_replicas=2",
        "cosmos.train.train_batch_per_replica=4",
        f"cosmos.train.train_policy.data_dispatch_as_rank_in_mesh={dispatch}",
    )
    train(run, *words)
    rows = has_ended_well(run)
    # Both policies' decisions are in the numbers: 2 × 4 episodes a step.
    assert all(row["episodes_trained"] == 8.0 for row in rows)
    workers = Journal(run).workers().values()
    assert sorted(worker.role for worker in workers) == ["policy", "policy", "rollout", "rollout"]
    assert all(worker.episodes > 0 for worker in workers)


@pytest.mark.parametrize(("replicas", "shards"), [(1, 1), (1, 2), (2, 1)])
def test_roles_of_their_own_on_the_same_gpus(tmp_path, replicas, shards):
    run = tmp_path / "run"
    words = [f"cosmos.{role}.parallelism.n_init_replicas={replicas}" for role in ("policy", "rollout")]
    words += ["cosmos.mode=colocated_separated", f"cosmos.policy.parallelism.dp_shard_size={shards}"]
    words += [f"cosmos.train.train_batch_per_replica={8 // replicas}"]
    train(run, *words)
    rows = has_ended_well(run)
    workers = Journal(run).workers().values()
    assert len({worker.process.pid for worker in workers}) == replicas * shards + replicas
    # As many GPUs as the policy has, for both.
    assert f"Detected {replicas * shards} GPUs" in (run / "cosmos" / "launcher.log").read_text()
    # The next step was driven while one trained.
    assert max(row["staleness_max"] for row in rows) == 1.0
    assert not (run / "cosmos" / "windows").exists()
    first, last = load_weights(run / "cosmos" / "initial.safetensors"), load_weights(run)
    assert any(not torch.equal(first[name], last[name]) for name in first)


def test_a_policy_that_is_spread_over_two_gpus_heals_too(tmp_path):
    run = tmp_path / "run"
    words = ("cosmos.policy.parallelism.dp_shard_size=2", "cosmos.restarts=1", "cosmos.train.max_num_steps=9")
    process = begin(run, *words)
    wait_for_step(run, process, 4)
    victim = next(worker.process.pid for worker in Journal(run).workers().values() if worker.role == "policy")
    os.kill(victim, signal.SIGKILL)
    assert process.wait() == 0, run.with_suffix(".log").read_text()[-6000:]
    rows = has_ended_well(run, 9)
    # The numbers are of both halves, and every rollout had the weights that both made.
    assert all(row["episodes_trained"] == 8.0 for row in rows)
    assert sorted(w.role for w in Journal(run).workers().values()) == ["policy", "policy", "rollout"]
    kept = run / "cosmos" / "run" / "checkpoints" / "step_9" / "policy"
    halves = [torch.load(kept / f"optimizer_rank_{rank}.pth", weights_only=True) for rank in (0, 1)]
    sizes = [sum(t.numel() for entry in half["state"].values() for t in entry.values()) for half in halves]
    whole = 2 * sum(t.numel() for t in load_weights(run).values())
    assert max(sizes) < 0.75 * whole


@pytest.mark.parametrize("mode", ["disaggregated", "colocated_separated"])
def test_drives_through_the_nccl_transport_wait_for_weights(tmp_path, mode):
    run = tmp_path / "run"
    # Few buffers and many drives: without turns, policy and rollout would wait for each other at a weight sync.
    words = ("transport=nccl", "transport.backend=gloo", "cosmos.rollout.prefetch_rollout=true")
    train(run, *words, f"cosmos.mode={mode}")
    rows = has_ended_well(run)
    assert all(row["episodes_trained"] == 8.0 for row in rows)
    assert list((run / "cosmos" / "ready").iterdir()) == []


def test_dapo_drives_again_where_rewards_are_equal(tmp_path):
    run = tmp_path / "run"
    train(run, "cosmos.train.train_policy.variant=dapo", "cosmos.train.train_policy.on_policy=true")
    rows = has_ended_well(run)
    assert all(row["groups_collapsed"] == 0.0 for row in rows)


def test_simulators_that_fail_cost_no_episode(tmp_path):
    run = tmp_path / "run"
    train(run, "simulator.fail_every=3", "rollout.retries=0", "cosmos.rollout.prefetch_rollout=true")
    rows = has_ended_well(run)
    assert all(row["episodes_trained"] == 8.0 for row in rows)


def test_simulators_that_always_fail_end_the_run_with_the_reason(tmp_path):
    run = tmp_path / "run"
    began_s = time.monotonic()
    words = ("simulator.fail_every=1", "rollout.retries=0", "cosmos.rollout.redraws=1")
    process = begin(run, *words)
    assert process.wait() == 1
    text = run.with_suffix(".log").read_text()
    assert "fewer than 4 drives to train on after 2 rounds" in text or "NO_EPISODE" in text, text[-3000:]
    assert left_behind(run) == []
    assert time.monotonic() - began_s < 1500


def test_a_rollout_worker_that_is_killed_is_healed_from_the_checkpoint(tmp_path):
    run = tmp_path / "run"
    process = begin(run, *COLOCATED, "cosmos.restarts=1", "cosmos.train.max_num_steps=9")
    wait_for_step(run, process, 4)
    (victim,) = {worker.process.pid for worker in Journal(run).workers().values() if worker.role == "rollout"}
    os.kill(victim, signal.SIGKILL)
    assert process.wait() == 0, run.with_suffix(".log").read_text()[-6000:]
    has_ended_well(run, 9)
    assert "started again from the last checkpoint" in run.with_suffix(".log").read_text()


def test_a_stopped_run_goes_on_where_it_stood(tmp_path):
    run = tmp_path / "run"
    process = begin(run, *COLOCATED, "cosmos.train.max_num_steps=9")
    wait_for_step(run, process, 4)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    assert left_behind(run) == []
    assert newest_checkpoint(run) >= 3
    # A worker was killed while it kept step 9: Cosmos-RL would refuse to write over that.
    torn = run / "cosmos" / "run" / "checkpoints" / "step_9" / "policy"
    torn.mkdir(parents=True)
    (torn / "model_rank_0.pth").write_bytes(b"half")
    again = [sys.executable, "-m", "alpagym_host.cli", "resume", str(run)]
    done = subprocess.run(again, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    has_ended_well(run, 9)


def test_two_nodes_of_a_slurm_job(tmp_path, monkeypatch):
    """The policy on one node, the rollout on another; both are this machine, which Slurm's variables do not say."""
    words = (
        *("deploy=slurm", "deploy.slurm.partition=main", "topology.train_nodes=2", "topology.gpus_per_node=1"),
        *("cosmos.host=127.0.0.2", "cosmos.controller_port=8431"),  # not this machine's main address
    )
    config = compose([*WORDS, *words, f"run.root={tmp_path}"])
    run = run_dir.create(config, "train", tmp_path / "run")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("ALPAGYM_JOB_SECRET", "what the job's script makes")
    started = []
    for rank in ("1", "0"):
        monkeypatch.setenv("SLURM_PROCID", rank)
        with (tmp_path / f"node-{rank}.log").open("w") as log:
            argv = [sys.executable, "-m", "alpagym_host.launch.job", str(run)]
            started.append(subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT))
    other, first = started
    try:
        assert first.wait() == 0, (tmp_path / "node-0.log").read_text()[-6000:]
        assert other.wait(60) == 0, (tmp_path / "node-1.log").read_text()[-6000:]
    finally:
        for process in started:
            process.kill()
            process.wait()
    has_ended_well(run)
    logs = {path.name for path in (run / "cosmos").glob("logs*/logs_latest/*.log")}
    assert {"controller.log", "policy_0.log", "rollout_0.log"} <= logs
    assert list((run / "cosmos").glob("logs-1/logs_latest/rollout_0.log"))


def test_controller_and_redis_are_for_this_machine_alone_and_end_with_their_owner(tmp_path):
    run = tmp_path / "run"
    process = begin(run, *COLOCATED, "cosmos.train.max_num_steps=100000", "cosmos.train.epoch=100000")
    wait_for_step(run, process, 1)
    redis_pid = int((run / "cosmos" / "redis.pid").read_text())
    # Its configuration, which has the password, is gone: it has been read.
    assert [p for p in Path("/tmp").glob("*redis_config.conf") if str(run) in p.read_text()] == []
    controllers = [child.pid for child in left_behind(run) if "--port" in child.cmdline() and "python" in child.name()]
    listening = [
        connection.laddr
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.pid in {redis_pid, *controllers}
    ]
    assert listening
    assert {address.ip for address in listening} == {"127.0.0.1"}
    (redis,) = [a.port for a in listening if a.port >= 12800]
    with socket.create_connection(("127.0.0.1", redis), timeout=5.0) as connection:
        connection.sendall(b"PING\r\n")
        assert connection.recv(64).startswith(b"-NOAUTH")
    process.kill()  # the run's own process: nothing is left to take the job down
    process.wait()
    end_s = time.monotonic() + 60.0
    while left_behind(run) and time.monotonic() < end_s:
        time.sleep(0.5)
    assert left_behind(run) == []
    assert not psutil.pid_exists(redis_pid)


def test_every_key_that_we_write_is_one_of_cosmos(tmp_path):
    code = (
        "import json, sys, tomllib\n"
        "from pathlib import Path\n"
        "from cosmos_rl.policy.config import Config\n"
        "table = tomllib.loads(Path(sys.argv[1]).read_text())\n"
        "read = Config.from_dict(json.loads(json.dumps(table))).model_dump()\n"
        "def lost(ours, theirs, at=''):\n"
        "    for key, value in ours.items():\n"
        "        if key not in theirs: yield at + key\n"
        "        elif isinstance(value, dict): yield from lost(value, theirs[key], at + key + '.')\n"
        "        elif theirs[key] != value: yield f'{at}{key}: {value!r} became {theirs[key]!r}'\n"
        "print(json.dumps(list(lost(table, read))))"
    )
    from alpagym_runtime.trainers.cosmos.tables import cosmos_config, to_toml

    words = (*WORDS, "cosmos.train.train_policy.batch_size_per_optimize=4")
    path = Path(tmp_path / "config.toml")
    path.write_text(to_toml(cosmos_config(compose(words), tmp_path)))
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []
