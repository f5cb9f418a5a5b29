"""The supervisor of a Cosmos-RL job against programs that behave as its launcher and workers do, well and badly."""

from __future__ import annotations

import hmac
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import psutil
import pytest

from alpagym_plugins import ConfigError
from alpagym_runtime.run_config import from_mapping
from alpagym_runtime.trainers.cosmos.commands import launch_command
from alpagym_runtime.trainers.cosmos.housekeeping import end_redis
from alpagym_runtime.trainers.cosmos.journal import Journal
from alpagym_runtime.trainers.cosmos.monitor import Seen, signs
from alpagym_runtime.trainers.cosmos.nodes import DOWN, OVER, RUNS, Call, call, called, other_options, take_part
from alpagym_runtime.trainers.cosmos.supervisor import Job, JobError, newest_checkpoint, remove_torn_checkpoints
from alpagym_runtime.trainers.run import Run
from alpagym_runtime.transport.memory import MemoryTransport

WORKER = """
import sys, time
from pathlib import Path
from alpagym_runtime.trainers.cosmos.journal import Journal, Presence, Step
here = Path(sys.argv[1])
"""
"""Begins a program that stands for launcher and workers in one."""
WAIT = "time.sleep(60)"


def configure(cosmos, **sections):
    return from_mapping(
        sections
        | {
            "run": {"seed": 3},
            "simulator": {"type": "toy"},
            "dataset": {"train_scenes": 4, "val_scenes": 2, "test_scenes": 3},
            "expected_valid_steps": 12,
            "policy": {"type": "waypoint", "hidden": 16, "actors": 1},
            "reward": {"terms": {"progress": {"type": "progress", "scale": 1.0}}},
            "rollout": {"slots": 8, "group_size": 4},
            "transport": {"type": "memory"},
            "trainer": {"type": "cosmos"},
            "evaluation": {},
            "checkpoint": {},
            "cosmos": cosmos,
        }
    )


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A PATH with a redis-server that is never called."""
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "redis-server").write_text("#!/bin/sh\n")
    (folder / "redis-server").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def job_of(tmp_path, program, **cosmos):
    train = {"train_batch_per_replica": 8, "param_dtype": "float32"}
    config = configure(cosmos={"mode": "colocated", "train": train, **cosmos})
    run = tmp_path / "run"
    (run / "cosmos").mkdir(parents=True, exist_ok=True)
    return Job(config, run, [sys.executable, "-c", WORKER + program, str(run)]), run


def watch(job, run, total=3, limit_s=60.0):
    """Steps until the job's end."""
    job.start(resume=False)
    done, began_s, running = 0, time.monotonic(), True
    try:
        while running:
            assert time.monotonic() - began_s < limit_s
            running = job.check(0.05, done, total)
            done = max([done, *(step.step for step in Journal(run).steps(done))])
    finally:
        job.stop()
    return done


def ours(run):
    """Processes that name this run directory, but for this one."""
    found = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
        except psutil.Error:
            continue
        if str(run) in line and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


THREE_STEPS = """
Presence(here, "policy"), Presence(here, "rollout")
for number in (1, 2, 3):
    Journal(here).add(Step(number, 3, 0.1, {}))
"""


def test_a_job_that_makes_its_steps_ends_well_and_leaves_nothing(tools, tmp_path):
    job, run = job_of(tmp_path, THREE_STEPS)
    assert watch(job, run) == 3
    assert ours(run) == []
    assert not (run / "cosmos" / "mail").exists()


def test_a_start_forgets_the_redis_of_one_that_was_killed_whole(tools, tmp_path):
    """Its number would say that the new Redis has read its file, which would be removed too early."""
    job, run = job_of(tmp_path, THREE_STEPS)
    (run / "cosmos" / "redis.pid").write_text("4194304\n")  # above the largest number that a process has
    assert watch(job, run) == 3
    assert not (run / "cosmos" / "redis.pid").exists()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_finished_jobs_own_workers_and_process_meet_at_one_transport(tmp_path, workers):
    config = configure({})
    (tmp_path / "config.yaml").touch()  # from which workers would start
    transport = Run(replace(config, rollout=replace(config.rollout, workers=workers)), tmp_path).transport
    assert isinstance(transport, MemoryTransport) is (workers == 0)
    transport.close()


def test_workers_that_never_come_end_the_job(tools, tmp_path):
    job, run = job_of(tmp_path, "Presence(here, 'policy'); time.sleep(60)", register_timeout_s=3.0)
    with pytest.raises(JobError, match=r"0 of 1 rollout workers said .* within 3 s \(cosmos.register_timeout_s\)"):
        watch(job, run)
    assert ours(run) == []


def test_a_job_without_steps_is_ended_by_the_watchdog(tools, tmp_path):
    job, run = job_of(
        tmp_path,
        "Presence(here, 'policy'), Presence(here, 'rollout')\n"
        "(here / 'cosmos' / 'logs' / 'logs_1').mkdir(parents=True)\n"
        "(here / 'cosmos' / 'logs' / 'logs_latest').symlink_to('logs_1')\n"
        "log = here / 'cosmos' / 'logs' / 'logs_1' / 'rollout_0.log'\n"
        "log.write_text('prompt rejected: prompt.weight_version=11 current=9 allowed_outdated=1\\n' * 7)\n"
        "time.sleep(60)",
        watchdog_s=1.0,
    )
    with pytest.raises(JobError, match=r"no training step for 1 s .* after step 0 of 3; rollouts waited 7 times"):
        watch(job, run)
    assert ours(run) == []


def test_steps_that_are_made_again_are_progress(tools, tmp_path):
    # Five steps are known; from the checkpoint on they are made again, one each 0.6 s, with a watchdog of 2 s.
    job, run = job_of(
        tmp_path,
        "Presence(here, 'policy'), Presence(here, 'rollout')\n"
        "for number in range(1, 7):\n"
        "    time.sleep(0.6)\n"
        "    Journal(here).add(Step(number, 6, 0.1, {}))\n",
        watchdog_s=2.0,
    )
    job.start(resume=False)
    try:
        began_s, running = time.monotonic(), True
        while running:
            running = job.check(0.05, 6 if any(step.step == 6 for step in Journal(run).steps(5)) else 5, 6)
            assert time.monotonic() - began_s < 60.0
    finally:
        job.stop()


def test_an_evaluation_that_takes_longer_than_the_watchdog_is_no_standstill(tools, tmp_path):
    job, run = job_of(
        tmp_path,
        "Presence(here, 'policy'), Presence(here, 'rollout')\n"
        "for number in (1, 2, 3):\n"
        "    time.sleep(0.5)\n"
        "    Journal(here).add(Step(number, 3, 0.1, {}))\n"
        "time.sleep(4.0)",
        watchdog_s=1.0,
    )
    job.start(resume=False)
    try:
        done, running = 0, True
        while running:
            running = job.check(0.05, done, 3)
            for step in Journal(run).steps(done):
                done = step.step
                time.sleep(1.5)  # the run's process evaluates
    finally:
        job.stop()
    assert done == 3


class Controller(BaseHTTPRequestHandler):
    """Takes a request to stop."""

    asked: ClassVar[list[str]] = []

    def do_POST(self):
        self.asked.append(self.path)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"accepted": true}')

    def log_message(self, *args):
        pass


def test_only_the_own_controller_is_asked_to_stop(tools, tmp_path):
    # Another job's controller has the configured port; ours is at the next one, as its launcher says, a little later.
    with ThreadingHTTPServer(("127.0.0.1", 0), Controller) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        try:
            port = other.server_address[1]
            said = "print('Controller will be launched locally on port {}.', flush=True)"
            job, run = job_of(tmp_path, f"time.sleep(1.0); {said.format(port)}; time.sleep(60)", controller_port=port)
            # What an earlier start said counts for nothing.
            (run / "cosmos" / "launcher.log").write_text(f"Controller will be launched locally on port {port}.\n")
            job.start(resume=False)
            assert job.ask_to_stop() is False
            assert Controller.asked == []
            end_s = time.monotonic() + 30.0
            while not job.ask_to_stop():
                assert time.monotonic() < end_s
                time.sleep(0.1)
            assert Controller.asked == ["/api/request_stop"]
        finally:
            job.stop()
            other.shutdown()
            thread.join()


def test_a_worker_that_is_killed_ends_the_job_within_30_s(tools, tmp_path):
    job, run = job_of(
        tmp_path,
        "import os, signal, subprocess\n"
        "code = ('import sys, os, signal\\n'\n"
        "        'from pathlib import Path\\n'\n"
        "        'from alpagym_runtime.trainers.cosmos.journal import Presence\\n'\n"
        "        'Presence(Path(sys.argv[1]), \"rollout\")\\nos.kill(os.getpid(), signal.SIGKILL)')\n"
        "Presence(here, 'policy')\n"
        "subprocess.run([sys.executable, '-c', code, str(here)])\n"
        "time.sleep(60)",
    )
    began_s = time.monotonic()
    with pytest.raises(JobError, match=r"a worker has died \(rollout-"):
        watch(job, run)
    assert time.monotonic() - began_s < 30.0
    assert ours(run) == []


def test_a_worker_that_says_why_it_ends_is_quoted(tools, tmp_path):
    job, run = job_of(tmp_path, "Presence(here, 'rollout').failed('SimulatorError: no slots'); time.sleep(60)")
    with pytest.raises(JobError, match=r"rollout-.* ended: SimulatorError: no slots"):
        watch(job, run)


RAISES = """
import subprocess
code = '''import sys
from pathlib import Path
from alpagym_runtime.trainers.cosmos.journal import Presence
Presence(Path(sys.argv[1]), "rollout")
raise OSError(28, "No space left on device")'''
subprocess.run([sys.executable, "-c", code, str(here)])
"""


def test_an_error_of_a_worker_that_nobody_catches_is_quoted(tools, tmp_path):
    job, run = job_of(tmp_path, f"{RAISES}{WAIT}")
    with pytest.raises(JobError, match=r"rollout-.* ended: OSError: \[Errno 28\] No space left on device"):
        watch(job, run)


def test_an_error_after_the_last_step_is_none_of_the_run(tools, tmp_path):
    steps = "for number in (1, 2, 3):\n    Journal(here).add(Step(number, 3, 0.1, {}))\n"
    job, run = job_of(tmp_path, f"Presence(here, 'policy')\n{steps}{RAISES}")
    assert watch(job, run) == 3


def test_a_launcher_that_ends_early_is_quoted(tools, tmp_path):
    job, run = job_of(tmp_path, "print('Traceback: not enough GPUs', flush=True); sys.exit(3)")
    with pytest.raises(JobError, match=r"ended with code 3 after step 0; last in .*launcher.log:\n.*not enough GPUs"):
        watch(job, run)


def test_a_workers_error_is_quoted_and_not_torchruns_summary(tools, tmp_path):
    said = "Traceback (most recent call last):\nRuntimeError: Rollout report failed\n"
    summary = "E1130 18:43:01 api.py:986] failed (exitcode: 1) local_rank: 0\n" + "Root Cause\n" * 20
    job, _ = job_of(tmp_path, f"print({said + summary!r}, flush=True); sys.exit(1)")
    with pytest.raises(JobError, match=r"RuntimeError: Rollout report failed$"):
        watch(job, tmp_path / "run")


def test_a_worker_that_comes_to_its_end_before_the_last_step_is_no_failure(tools, tmp_path):
    # Rollouts have nothing left to do while the policy still trains on what they made.
    job, run = job_of(
        tmp_path,
        "import subprocess\n"
        "code = ('import sys\\nfrom pathlib import Path\\n'\n"
        "        'from alpagym_runtime.trainers.cosmos.journal import Presence\\n'\n"
        "        'Presence(Path(sys.argv[1]), \"rollout\")')\n"
        "subprocess.run([sys.executable, '-c', code, str(here)])\n"
        "Presence(here, 'policy')\n"
        "time.sleep(2.0)\n"
        "for number in (1, 2, 3):\n"
        "    Journal(here).add(Step(number, 3, 0.1, {}))\n",
    )
    assert watch(job, run) == 3


def test_without_redis_the_run_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    job, _ = job_of(tmp_path, THREE_STEPS)
    with pytest.raises(ConfigError, match="apt-get install redis-server"):
        job.start(resume=False)


def test_a_worker_ends_when_the_process_that_it_works_for_is_gone(tmp_path):
    code = (
        "import os, subprocess, sys\n"
        "from alpagym_runtime.children import identify\n"
        "from alpagym_runtime.trainers.cosmos.housekeeping import owner_variables\n"
        "worker = 'import time\\nfrom alpagym_runtime.trainers.cosmos.housekeeping import end_with_owner\\n'\n"
        'worker += \'import subprocess\\nsubprocess.Popen(["sleep", "60"])\\nend_with_owner()\\ntime.sleep(60)\'\n'
        "environment = {**os.environ, **owner_variables(identify(os.getpid()))}\n"
        "print(subprocess.Popen([sys.executable, '-c', worker], env=environment).pid)"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    psutil.Process(pid).wait(timeout=30) if psutil.pid_exists(pid) else None
    assert not psutil.pid_exists(pid)


def test_a_redis_that_outlived_its_controller_is_found_by_its_file(tools, tmp_path):
    program = tools / "redis-server"
    program.unlink()
    shutil.copy(shutil.which("sleep"), program)
    orphan, other = (subprocess.Popen([name, "60"]) for name in (str(program), "sleep"))
    try:
        for process, ends in ((orphan, True), (other, False)):
            (tmp_path / "redis.pid").write_text(f"{process.pid}\n")
            end_redis(tmp_path)
            assert (process.poll() is not None) == ends  # not any process that has the number
            assert not (tmp_path / "redis.pid").exists()
    finally:
        for process in (orphan, other):
            process.kill()
            process.wait()


def test_the_command_line_names_replicas_and_where_things_go(tmp_path):
    config = configure(
        cosmos={
            "controller_port": 8123,
            "train": {"train_batch_per_replica": 8},
            "policy": {"parallelism": {"n_init_replicas": 2}},
            "rollout": {"parallelism": {"n_init_replicas": 3}},
        }
    )
    argv = launch_command(config, tmp_path)
    assert argv[argv.index("--policy") + 1] == "2"
    assert argv[argv.index("--rollout") + 1] == "3"
    assert argv[argv.index("--port") + 1] == "8123"
    assert argv[-1] == "alpagym_runtime.trainers.cosmos.entry"


def test_only_a_whole_checkpoint_is_gone_on_from_and_torn_ones_make_room(tmp_path):
    assert newest_checkpoint(tmp_path) == 0
    remove_torn_checkpoints(tmp_path, 0)
    for step, files in ((3, ("cosmos_config", ".rank_0_complete")), (6, ("cosmos_config",))):
        place = tmp_path / "cosmos" / "run" / "checkpoints" / f"step_{step}" / "policy"
        place.mkdir(parents=True)
        for name in files:
            (place / name).touch()
    assert newest_checkpoint(tmp_path) == 3
    # Cosmos-RL refuses to write over what is left of step 6: a job that came to it again would end there each time.
    remove_torn_checkpoints(tmp_path, 3)
    assert [place.name for place in (tmp_path / "cosmos" / "run" / "checkpoints").iterdir()] == ["step_3"]


# ---------------------------------------------------------------- what the controller prints

STAT = (
    "[Controller] Stat: {} samples, 0 completion tokens, {} pending rollouts, 16 in-flight, 0 filtered (outdated), "
    "0.00s elapsed"
)


def test_the_controllers_lines_are_read():
    seen = Seen()
    for line in (
        STAT.format(8, 24),
        STAT.format(16, 48),
        "[Controller] weight staleness: accepted p50=0 p99=2 max=2, discarded=3/8 (allowed_outdated_steps=1, "
        "sync_weight_interval=1)",
        "[Controller] Soft throttle ENGAGED: samples_on_the_fly=16 >= threshold=16 (…)",
        "prompt rejected: prompt.weight_version=11 current=9 allowed_outdated=1",
        "Step: 2/16, Reward Mean: 0.5469, Reward Std: 0.1, Average loss: 0.1",
        "Process 4711 failed with return code -9",
    ):
        seen.read(line)
    assert (seen.samples, list(seen.pending), seen.in_flight) == (16, [24, 48], 16)
    assert (seen.staleness_max, seen.discarded, seen.throttles) == (2, 3, 1)
    assert (seen.step, seen.total, seen.rejected) == (2, 16, 0)  # a step is progress
    assert seen.died == {4711: -9}


@pytest.mark.parametrize(
    ("pending", "numbers", "name", "first"),
    [
        # The recipe's own logs at a global batch of 48: healthy, too fast, too slow.
        ((24, 48, 72, 48), {}, "balanced", None),
        ((24, 264, 552, 984), {}, "rollouts too fast", "cosmos.rollout.prefetch_rollout=true"),
        ((24, 0, 0, 0), {}, "rollouts too slow", "more cosmos.rollout.parallelism.n_init_replicas"),
        ((), {"staleness_max": 5.0}, "stale weights", "smaller cosmos.train.sync_weight_interval"),
        ((), {"groups_collapsed": 0.6}, "groups collapse", "higher cosmos.rollout.sampling_config.temperature"),
    ],
)
def test_sick_and_healthy_patterns_are_named_with_their_fix(pending, numbers, name, first):
    (sign,) = signs(pending, 48, numbers, allowed=4)
    assert sign.name == name
    assert sign.healthy == (first is None)
    assert (sign.remedies or (None,))[0] == first


# ---------------------------------------------------------------- several nodes


@pytest.fixture
def two_nodes(tmp_path, monkeypatch):
    """The config of a job on two nodes, and its run directory."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setenv("ALPAGYM_JOB_SECRET", "shared")
    train = {"train_batch_per_replica": 8, "param_dtype": "float32"}
    cosmos = {"mode": "disaggregated", "host": "head", "train": train, "device": "cpu"}
    config = configure(cosmos, deploy={"kind": "slurm"}, topology={"train_nodes": 2, "gpus_per_node": 1})
    run = tmp_path / "run"
    (run / "cosmos").mkdir(parents=True)
    return config, run


NODE = """
import os, sys, time
from pathlib import Path
(Path(sys.argv[1]) / os.environ["ALPAGYM_COSMOS_SECRET"]).write_text(str(os.getpid()))
time.sleep(60)
"""


def password(start):
    return hmac.new(b"shared", f"start {start}".encode(), "sha256").hexdigest()


def pid_in(path):
    end_s = time.monotonic() + 30.0
    while not (path.is_file() and path.read_text()):
        assert time.monotonic() < end_s, path
        time.sleep(0.05)
    return int(path.read_text())


def test_the_first_node_calls_the_others_and_says_when_the_job_is_down(two_nodes, tools):
    config, run = two_nodes
    tell = f"(here / os.environ['ALPAGYM_COSMOS_SECRET']).write_text(str(os.getpid())); {WAIT}"
    job = Job(config, run, [sys.executable, "-c", f"import os\n{WORKER}{tell}", str(run)])
    for start in (1, 2):
        job.start(resume=False)
        pid_in(run / password(start))
        assert called(run) == Call("7-1", start, RUNS, "head:8000")
        # No password is written down.
        assert all(password(start) not in path.read_text() for path in (run / "cosmos").iterdir() if path.is_file())
        job.stop()
        assert called(run).state == DOWN


def test_a_job_on_several_nodes_has_a_secret_of_its_script(two_nodes, tools, monkeypatch):
    config, run = two_nodes
    monkeypatch.delenv("ALPAGYM_JOB_SECRET")
    with pytest.raises(ConfigError, match="ALPAGYM_JOB_SECRET is not set"):
        Job(config, run, ["true"]).start(resume=False)


def test_another_node_works_at_each_start_of_the_job_to_the_end_of_the_run(two_nodes):
    config, run = two_nodes
    call(run, Call("7-0", 9, RUNS, "head:8000"))  # of an earlier start of the Slurm job
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(take_part, config, run, 1, [sys.executable, "-c", NODE, str(run)])
        time.sleep(1.0)
        assert not (run / password(9)).exists()
        call(run, Call("7-1", 1, RUNS, "head:8000"))
        first = pid_in(run / password(1))
        call(run, Call("7-1", 2, RUNS, "head:8000"))
        second = pid_in(run / password(2))
        assert not psutil.pid_exists(first)
        call(run, Call("7-1", 2, DOWN))
        call(run, Call("7-1", 0, OVER))
        assert working.result(timeout=30) == 0
    assert not psutil.pid_exists(second)
    options = other_options(config, "head:8000", 1)
    assert options == ["--url", "head:8000", "--num-workers", "2", "--worker-idx", "1"]


def test_a_node_whose_launcher_fails_ends_the_job(two_nodes, tools):
    config, run = two_nodes
    job = Job(config, run, [sys.executable, "-c", WORKER + WAIT, str(run)])
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(take_part, config, run, 1, [sys.executable, "-c", "raise SystemExit(5)"])
        with pytest.raises(JobError, match="launcher on node 1 ended with code 5"):
            watch(job, run)
        call(run, Call("7-1", 0, OVER))
        assert working.result(timeout=30) == 0
