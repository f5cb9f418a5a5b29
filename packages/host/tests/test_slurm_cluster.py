"""Runs as jobs of a real Slurm: two nodes on this machine (`slurm_cluster.py`). `pytest -m slurm`."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from alpagym_host.slurm import jobs
from alpagym_runtime.files import read_json

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]

# The waypoint policy, told the road users: no pictures to render, so a training step is a fraction of a second.
TINY = (
    *("experiment=smoke", "policy=waypoint_actors", "dataset.train_scenes=8", "dataset.val_scenes=4"),
    *("dataset.test_scenes=4", "expected_valid_steps=10", "rollout.slots=8", "rollout.scenes_per_step=2"),
    *("rollout.group_size=2", "trainer.warm_start=null", "evaluation.every_updates=0", "evaluation.videos=false"),
    *("evaluation.references=false", "evaluation.bootstrap=100"),
    *("deploy.slurm.partition=main", "deploy.slurm.exclusive=false"),
)
LONG = ("trainer.updates=100000", "checkpoint.every_updates=100000")
TWO_NODES = ("topology=slurm_cpu_1_1", "rollout.workers=2")


@pytest.fixture
def slurm(slurm_cluster, tmp_path, monkeypatch):
    """A cluster without jobs, in the environment of the test."""
    cluster = slurm_cluster
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    yield cluster
    cluster.run("scancel", "--user", os.environ.get("USER", "root"))
    assert cluster.until(lambda: not cluster.run("squeue", "-h").strip(), 60.0)


def alpagym(*words):
    argv = [sys.executable, "-m", "alpagym_host.cli", *(str(word) for word in words)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, done.stdout + done.stderr


def submit(tmp_path, *words, name="run"):
    """Submit a tiny run; its directory and its job."""
    directory = tmp_path / f"{name} a%j"
    code, said = alpagym("submit", *TINY, f"run.root={tmp_path}", "--directory", directory, *words)
    assert code == 0, said
    job = jobs.read(directory)
    assert f"submitted as job {job}" in said
    return directory, job


def log(directory, name="job"):
    return "".join(path.read_text() for path in sorted((directory / "logs").glob(f"{name}*.log")))


def trains(slurm, directory, job):
    """Wait until a run trains."""

    def begun():
        file, about = directory / "metrics.jsonl", jobs.ask([job])[job]
        # A run that goes on has its rows before its job runs.
        return not about.active or (about.state == "RUNNING" and file.is_file() and '"grpo"' in file.read_text())

    assert slurm.until(begun, 600.0)
    assert jobs.ask([job])[job].state == "RUNNING", log(directory) + log(directory, "trainer")


def steps(directory):
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if row.get("stage") == "grpo"]


# ---------------------------------------------------------------- the run of two nodes


def test_a_trainer_on_one_node_and_workers_on_the_other_train_and_report(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret-marker-0123456789")
    more = ("trainer.updates=2", "deploy.slurm.export_env=[HF_TOKEN]", "deploy.slurm.env={A_B: 'a \"b\" $HOME'}")
    directory, job = submit(tmp_path, *TWO_NODES, *more)
    assert slurm.wait(job, "COMPLETED", "FAILED", timeout_s=900) == "COMPLETED", log(directory, "")
    summary = read_json(directory / "summary.json")
    assert summary["status"] == "completed"
    assert summary["workers"]["count"] == 2
    assert steps(directory) == [1, 2]
    assert (directory / "report.html").stat().st_size > 10_000
    # The trainer's node and the workers', as Slurm placed their steps.
    assert {path.name.split("-")[0] for path in (directory / "logs").iterdir()} == {
        "job.log",
        "trainer",
        "rollout",
        "worker",
    }
    assert not (directory / "workers").exists()
    code, said = alpagym("status", directory)
    assert code == 0
    assert "train: completed" in said
    assert f"job        {job} COMPLETED" in said
    # The same numbers as without Slurm and without workers.
    here = tmp_path / "here"
    code, said = alpagym(
        "train", *TINY, "trainer.updates=2", "deploy=local", f"run.root={tmp_path}", "--directory", here
    )
    assert code == 0, said
    assert read_json(here / "summary.json")["evaluations"]["final"] == summary["evaluations"]["final"]
    for path in directory.rglob("*"):
        if path.is_file():
            assert b"secret-marker" not in path.read_bytes(), path


def test_an_alpasim_on_a_node_of_its_own_is_driven_and_taken_down(
    slurm, tmp_path, alpasim_machine, make_checkout, monkeypatch
):
    # Docker, uv and AlpaSim's launcher are stand-ins; what the launcher starts is `alpagym serve`, on all addresses as
    # AlpaSim does.
    monkeypatch.setenv("ALPAGYM_TEST_WIZARD", "serve")
    monkeypatch.setenv("ALPAGYM_TEST_HOST", "0.0.0.0")
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{slurm.environment['PATH']}")
    scene = "procedural-train-000000"
    directory, job = submit(
        tmp_path,
        *("experiment=alpamayo_1_5_local_2gpu_smoke", "reward=progress_safety", "policy=waypoint", "trainer=grpo"),
        *("trainer.updates=1", "dataset.scene_ids=[procedural-train-000000]", "simulator.force_gt_duration_us=1600000"),
        *("topology=local_cpu", "topology.alpasim_nodes=1", "deploy.slurm.warn_s=60"),
        *(f"alpasim.repo_path={make_checkout(tmp_path / 'alpasim', (scene,))}", "dataset.train_scenes=448"),
        "deploy.slurm.export_env=[ALPAGYM_TEST_WIZARD,ALPAGYM_TEST_HOST,ALPAGYM_TEST_DOCKER_LOG,ALPAGYM_TEST_MARK]",
    )
    assert slurm.wait(job, "COMPLETED", "FAILED", timeout_s=600) == "COMPLETED", log(directory, "")
    assert steps(directory) == [1]
    (received,) = directory.glob("alpasim/wizard-0_*/received.json")
    assert read_json(received)["config"]["wizard.run_method"] == "SLURM"
    assert not list((directory / "endpoints").iterdir())
    assert "AlpaSim: 1 scene at" in log(directory, "simulator")


# ---------------------------------------------------------------- how it ends


def test_stop_keeps_a_checkpoint_and_resume_submits_again(slurm, tmp_path):
    directory, job = submit(tmp_path, *TWO_NODES, *LONG)
    trains(slurm, directory, job)
    assert slurm.until(lambda: "grpo: " in alpagym("logs", directory, "trainer")[1], 60)
    code, said = alpagym("resume", directory)
    assert (code, f"job {job} has this run already, and is RUNNING" in said) == (2, True)
    code, said = alpagym("stop", directory)
    assert (code, "stopped; to continue" in said) == (0, True), said
    kept = sorted((directory / "checkpoints").glob("step_*"))
    assert kept
    assert "train: stopped" in alpagym("status", directory)[1]
    assert "trainer ended with code 140" in log(directory)
    code, said = alpagym("resume", directory)
    again = jobs.read(directory)
    assert (code, again != job) == (0, True), said
    trains(slurm, directory, again)
    code, said = alpagym("stop", "--now", directory)
    assert (code, slurm.state(again)) == (0, "CANCELLED"), said
    code, said = alpagym("clean", directory)
    assert code == 0
    made = steps(directory)
    assert made == list(range(1, len(made) + 1))


def test_a_pending_job_is_cancelled(slurm, tmp_path):
    blocker = slurm.run("sbatch", "--parsable", "-N2", "--exclusive", "-o/dev/null", "--wrap", "sleep 600").strip()
    slurm.wait(blocker, "RUNNING")
    directory, job = submit(tmp_path)
    assert "train: queued" in alpagym("status", directory)[1]
    assert "queued" in alpagym("list", tmp_path)[1]
    code, said = alpagym("stop", directory)
    assert (code, "cancelled before it began" in said) == (0, True)
    assert slurm.state(job) == "CANCELLED"
    assert "train: not begun" in alpagym("status", directory)[1]


def test_sigusr1_keeps_a_checkpoint_and_queues_the_job_again(slurm, tmp_path):
    directory, job = submit(tmp_path, *TWO_NODES, *LONG, "deploy.requeues=1")
    trains(slurm, directory, job)
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    assert slurm.until(lambda: "queued again, 1 of deploy.requeues=1" in log(directory), 240)
    before = max(steps(directory))
    assert slurm.until(lambda: "start 1:" in log(directory), 240)
    assert slurm.until(lambda: max(steps(directory)) > before, 300), log(directory, "")
    # All steps once and in order: it went on where it stopped.
    made = steps(directory)
    assert made == list(range(1, len(made) + 1))
    # The second time is one too many: the checkpoint is kept, and the job ends.
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    assert slurm.wait(job, "FAILED", "COMPLETED") == "FAILED"
    assert log(directory).count("queued again") == 1
    assert "train: stopped" in alpagym("status", directory)[1]


def test_the_time_limit_is_announced_and_the_run_goes_on(slurm, tmp_path):
    # Slurm looks at limits every half minute; a limit of 3 min announced 150 s before is asked for after 30 to 60 s.
    directory, _ = submit(tmp_path, *LONG, "deploy.requeues=1", "deploy.slurm.time=00:03:00", "deploy.slurm.warn_s=150")
    assert slurm.until(lambda: "queued again" in log(directory), 170), log(directory, "")
    assert "trainer ended with code 138" in log(directory)
    assert slurm.until(lambda: "start 1:" in log(directory), 240)


def test_a_job_that_is_preempted_twice_goes_on_twice(slurm, tmp_path):
    directory, job = submit(tmp_path, *LONG, "topology=slurm_cpu_1_1", "rollout.workers=2", "deploy.requeues=2")
    for number in (1, 2):
        trains(slurm, directory, job)
        before = max(steps(directory))
        urgent = slurm.run(
            *("sbatch", "--parsable", "-purgent", "-N2", "--exclusive", "-o/dev/null", "--wrap", "sleep 3")
        ).strip()
        assert slurm.wait(urgent, "COMPLETED", timeout_s=200) == "COMPLETED"
        assert slurm.until(lambda number=number: f"start {number}:" in log(directory), 240), log(directory, "")
        assert slurm.until(lambda before=before: max(steps(directory)) > before, 300), log(directory, "")
    made = steps(directory)
    assert made == list(range(1, len(made) + 1))


def test_cancelled_by_scancel_the_last_checkpoint_holds(slurm, tmp_path):
    directory, job = submit(tmp_path, "trainer.updates=100000", "checkpoint.every_updates=5", "deploy.requeues=3")
    assert slurm.until(lambda: list((directory / "checkpoints").glob("step_*")), 600)
    slurm.run("scancel", job)
    assert slurm.wait(job, "CANCELLED") == "CANCELLED"
    time.sleep(3)
    assert slurm.state(job) == "CANCELLED"  # and is not queued again
    code, said = alpagym("resume", directory)
    assert code == 0, said


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_slurm_queues_a_job_again_that_has_lost_a_node(slurm, tmp_path, node):
    more = ("trainer.updates=100000", "checkpoint.every_updates=5", "deploy.requeues=1")
    directory, job = submit(tmp_path, *TWO_NODES, *more)
    assert slurm.until(lambda: list((directory / "checkpoints").glob("step_*")), 600)
    try:
        slurm.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
        assert slurm.wait(job, "PENDING", timeout_s=120) == "PENDING"
        assert "train: queued" in alpagym("status", directory)[1]
    finally:
        slurm.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    assert slurm.until(lambda: "start 1:" in log(directory), 240)
    kept = max(int(path.name[-8:]) for path in (directory / "checkpoints").glob("step_*"))
    assert slurm.until(lambda: max(steps(directory)) > kept + 5, 300), log(directory, "")
    assert "resuming from step_" in log(directory, "trainer")
    made = steps(directory)
    assert made == list(range(1, len(made) + 1))


# ---------------------------------------------------------------- sweeps, dependencies


def test_a_sweep_is_an_array_that_stop_reaches_one_by_one(slurm, tmp_path):
    words = ("deploy.slurm.parallel=1", f"run.root={tmp_path / 'runs'}", "run.seed=5,6", "trainer.updates=1")
    code, said = alpagym("submit", *TINY, *words, "--multirun")
    assert code == 0, said
    first, second = sorted(path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    assert jobs.read(second) == jobs.read(first).removesuffix("0") + "1"
    code, said = alpagym("stop", second)
    assert (code, "cancelled before it began" in said) == (0, True), said
    assert slurm.wait(jobs.read(first), "COMPLETED", "FAILED", timeout_s=600) == "COMPLETED", log(first, "")
    assert read_json(first / "summary.json")["status"] == "completed"
    assert slurm.state(jobs.read(second)) == "CANCELLED"
    listed = alpagym("list", tmp_path / "runs")[1]
    assert "completed" in listed
    assert "not begun" in listed
    # A dependency on what has ended well begins; on what was cancelled it is refused or cancelled by Slurm.
    code, said = alpagym("submit", *TINY, "--after", first, f"run.root={tmp_path}", "--directory", tmp_path / "next")
    assert code == 0, said
    assert slurm.wait(jobs.read(tmp_path / "next"), "RUNNING") == "RUNNING"


# ---------------------------------------------------------------- several processes


def test_a_team_over_two_nodes_stops_together_and_goes_on(slurm, tmp_path):
    team = ("topology.train_nodes=2", "topology.processes=1", "deploy.requeues=1")
    directory, job = submit(tmp_path, *LONG, *team, name="team")
    trains(slurm, directory, job)
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    assert slurm.until(lambda: "queued again" in log(directory), 240), log(directory, "")
    before = max(steps(directory))
    assert slurm.until(lambda: max(steps(directory)) > before, 400), log(directory, "")
    made = steps(directory)
    assert made == list(range(1, len(made) + 1))
    code, said = alpagym("stop", directory)
    assert code == 0, said
    assert not list((directory / "endpoints").glob("team-*"))


# ---------------------------------------------------------------- presets

# Eighty nodes that Slurm believes it could start: enough for --test-only, which allocates and runs nothing.
EIGHTY = (
    "NodeName=n[1-80] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[26001-26080] CPUs=64 RealMemory=1000000 "
    "Gres=gpu:8 State=CLOUD\nGresTypes=gpu\nResumeProgram=/bin/true\nSuspendProgram=/bin/true\nSuspendTime=3600"
)
TEMPLATE = "experiment=alpamayo_1_5_slurm_template"


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        ((TEMPLATE, "topology=slurm_partial_node_1_2_1"), 1),
        ((TEMPLATE, "topology=slurm_full_node_1_3_4"), 1),
        (("experiment=smoke", "topology=slurm_cpu_1_1", "rollout.workers=8"), 2),
        ((TEMPLATE,), 3),
        ((TEMPLATE, "topology=slurm_distributed_1_2_2"), 5),
        ((TEMPLATE, "topology=slurm_distributed_shared_cosmos_2_3"), 5),
        (("experiment=alpamayo_1_5_pai_80_nodes",), 80),
    ],
)
def test_slurm_would_take_every_preset(eighty, tmp_path, words, nodes):
    code, said = alpagym("submit", "--dry-run", *words, "deploy.slurm.partition=main", "deploy.slurm.account=null")
    assert code == 0, said
    (tmp_path / "job").write_text(said.split("# job.sbatch\n")[1])
    test = ("sbatch", "--test-only", f"--output={tmp_path}/log")
    answer = eighty.run(*test, str(tmp_path / "job"), str(tmp_path))
    assert "to start at" in answer, answer
    found = eighty.run("scontrol", "show", "hostnames", answer.split(" on nodes ")[1].split()[0]).split()
    assert len(found) == nodes
    # What does not fit is refused, so the answer means something.
    assert "not available" in eighty.run(*test, "--gpus-per-node=9", str(tmp_path / "job"), str(tmp_path))


@pytest.fixture(scope="module")
def eighty(make_slurm):
    cluster = make_slurm(EIGHTY)
    cluster.start_controller("-c")
    assert cluster.until(lambda: "main" in cluster.run("sinfo", "-h"), 30.0)
    return cluster


# ---------------------------------------------------------------- what is wrong


def test_what_slurm_refuses_is_said_and_leaves_nothing(slurm, tmp_path):
    directory = tmp_path / "run"
    code, said = alpagym(
        "submit", *TINY, "deploy.slurm.partition=absent", f"run.root={tmp_path}", "--directory", directory
    )
    assert code == 2
    assert "sbatch refuses the job: sbatch: error: invalid partition specified: absent" in said
    assert not directory.exists()


HARD = ["x (1) [y]", "a'b", 'say "hi"', "$(touch evil) `touch evil` $HOME", "#1 \\ back%j;|&<>*?~"]


@pytest.mark.parametrize("name", HARD)
def test_a_name_arrives_as_it_was_written(slurm, tmp_path, name):
    from alpagym_host.compose import compose
    from alpagym_host.slurm.script import render

    config = compose([*TINY, "deploy=slurm", f"run.root={tmp_path}"])
    config.deploy.slurm.job_name = name
    config.deploy.slurm.extra = [f"--comment={name}"]
    (tmp_path / "job").write_text(render(config, "train", "true"))
    job = slurm.run("sbatch", "--parsable", "--hold", "-o/dev/null", str(tmp_path / "job"), str(tmp_path)).strip()
    assert slurm.run("squeue", "-h", f"-j{job}", "-o", "%j") == f"{name}\n"
    assert slurm.run("squeue", "-h", f"-j{job}", "-O", "Comment:100").strip() == name
    assert not list(tmp_path.rglob("evil"))


VALUES = ["a b \"c\" $HOME 'd'", "mlx5_0:1,mlx5_3:1", "two\nlines\n", "", "$(touch evil)`x`\\"]


@pytest.mark.parametrize("value", VALUES)
def test_variables_arrive_byte_for_byte_whichever_way_they_go(slurm, tmp_path, monkeypatch, value):
    from alpagym_host.compose import compose
    from alpagym_host.slurm.script import render

    monkeypatch.setenv("GIVEN", value)
    monkeypatch.setenv("UNNAMED", "stays here")
    stub = tmp_path / "python"
    stub.write_text('#!/bin/bash\nprintf %s "$GIVEN" >"$3/given"; printf %s "$SET" >"$3/set"; env >"$3/all"\n')
    stub.chmod(0o755)
    config = compose([*TINY, "deploy=slurm", f"run.root={tmp_path}", "deploy.slurm.export_env=[GIVEN]"])
    config.deploy.slurm.env["SET"] = value
    (tmp_path / "job").write_text(render(config, "train", str(stub)))
    run = tmp_path / "run 'a' \"b\" $HOME %j [y]"
    run.mkdir()
    job = slurm.run("sbatch", "--parsable", f"--output={tmp_path}/log", str(tmp_path / "job"), str(run)).strip()
    assert slurm.wait(job, "COMPLETED", "FAILED") == "COMPLETED", (tmp_path / "log").read_text()
    assert ((run / "given").read_text(), (run / "set").read_text()) == (value, value)
    assert "UNNAMED" not in (run / "all").read_text()
    assert not list(tmp_path.rglob("evil"))


def test_a_controller_that_is_down_is_named(slurm, tmp_path):
    directory, job = submit(tmp_path, *LONG)
    slurm.end_daemon("slurmctld")
    try:
        code, said = alpagym("submit", *TINY, f"run.root={tmp_path}", "--directory", tmp_path / "other")
        assert code == 2
        assert "sbatch refuses the job" in said
        assert "Unable to contact slurm controller" in said
        assert not (tmp_path / "other").exists()
        code, said = alpagym("status", directory)
        assert (code, "Slurm does not answer" in said) == (0, True)
        code, said = alpagym("stop", directory)
        assert (code, "Slurm does not answer" in said) == (2, True)
    finally:
        slurm.start_controller()
    assert slurm.until(lambda: slurm.state(job) in ("RUNNING", "COMPLETED", "PENDING"), 60)


def test_a_run_directory_that_the_nodes_cannot_write_fails_with_its_name(slurm, tmp_path):
    directory, job = submit(tmp_path, *LONG, "deploy.slurm.extra=[--begin=now+2]")
    (directory / "logs").rmdir()
    (directory / "logs").write_text("in the way")
    assert slurm.wait(job, "FAILED", "COMPLETED") == "FAILED"
    said = alpagym("status", directory)[1]
    assert "JobLaunchFailure" in said
    assert "train: not begun" in said


def test_the_batch_shell_ignores_a_stray_signal(slurm, tmp_path):
    directory, job = submit(tmp_path, *LONG)
    trains(slurm, directory, job)
    slurm.run("scancel", "--batch", f"--signal={signal.Signals.SIGTERM.name.removeprefix('SIG')}", job)
    before = max(steps(directory))
    assert slurm.until(lambda: max(steps(directory)) > before, 120)
