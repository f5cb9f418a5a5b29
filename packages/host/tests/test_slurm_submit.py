"""Submission and what follows it, against stand-ins of sbatch, squeue and scancel."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from alpagym_host import run_dir
from alpagym_host.cli import app
from alpagym_host.compose import compose
from alpagym_host.launch.start import resume, start, sweep
from alpagym_host.slurm import jobs
from alpagym_host.slurm.submit import dependency
from alpagym_plugins import ConfigError
from alpagym_runtime.run_config import load_run_config

SBATCH = r"""
printf '%s\0' "$@" >"$LOG/argv"; env -0 >"$LOG/environment"; cat "${@: -2:1}" >"$LOG/script"
if [ -e "$LOG/refuses" ]; then echo "sbatch: error: $(cat "$LOG/refuses")" >&2; exit 1; fi
echo 41
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Stand-ins before the real PATH; gives the folder where they keep what they were told."""
    folder, log = tmp_path / "tools", tmp_path / "log"
    folder.mkdir()
    log.mkdir()
    for name, text in {
        "sbatch": SBATCH,
        "squeue": '[ ! -e "$LOG/down" ] || { echo "slurm_load_jobs error: Unable to contact" >&2; exit 1; }\n'
        'cat "$LOG/queue" 2>/dev/null; exit 0',
        "scancel": 'printf "%s\\n" "$*" >>"$LOG/scancel"; sed -i "s/RUNNING\\|PENDING/COMPLETED/" "$LOG/queue"',
        "srun": "exit 1",
    }.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(log))
    monkeypatch.setattr(sys.modules["alpagym_host.run_commands"], "_JOB_POLL_S", 0.05)
    return log


def words(tmp_path, *more):
    return ["experiment=smoke", "deploy=slurm", "deploy.slurm.partition=main", f"run.root={tmp_path / 'runs a'}", *more]


def submit(tmp_path, *more, directory=None, again=False):
    out = io.StringIO()
    code = start(compose(words(tmp_path, *more)), "train", False, directory, Console(file=out, width=400), again)
    return code, out.getvalue()


def argv(log):
    return (log / "argv").read_text().split("\0")[:-1]


def queue(log, *rows):
    (log / "queue").write_text("".join(f"{row}\n" for row in rows))


def ask(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


# ---------------------------------------------------------------- submission


def test_a_submitted_run_has_its_config_script_and_number(slurm, tmp_path):
    code, said = submit(tmp_path)
    made = (tmp_path / "runs a" / "latest").resolve()
    assert code == 0
    assert "submitted as job 41" in said
    assert f"alpagym status {made}" in said
    assert jobs.read(made) == "41"
    assert (made / "job.sbatch").read_text() == (slurm / "script").read_text()
    assert load_run_config(made).deploy.kind == "slurm"
    assert argv(slurm) == [
        *("--parsable", f"--chdir={made}", f"--output={made}/logs/job.log"),
        *(str(made / "job.sbatch"), str(made)),
    ]


def test_train_submit_and_the_module_are_the_same(slurm, tmp_path):
    texts = []
    for command in (["train", *words(tmp_path)], ["submit", *(w for w in words(tmp_path) if w != "deploy=slurm")]):
        assert ask(*command).exit_code == 0
        texts.append((slurm / "script").read_text())
    assert texts[0] == texts[1]


def test_dry_run_shows_config_and_script_and_makes_nothing(slurm, tmp_path):
    done = ask("submit", "--dry-run", *words(tmp_path))
    config, script = done.stdout.split("---\n# job.sbatch\n")
    assert "kind: slurm" in config
    assert script.startswith("#!/bin/bash\n")
    assert not (tmp_path / "runs a").exists()
    assert not (slurm / "argv").exists()


def test_what_sbatch_refuses_leaves_nothing_behind(slurm, tmp_path):
    (slurm / "refuses").write_text("invalid partition specified: main")
    with pytest.raises(ConfigError, match="sbatch refuses the job: sbatch: error: invalid partition specified: main"):
        submit(tmp_path)
    assert [path.name for path in (tmp_path / "runs a").iterdir()] == []


def test_without_slurm_preflight_says_so(tmp_path, tools):
    with pytest.raises(ConfigError, match="sbatch is not on PATH"):
        submit(tmp_path)
    assert not (tmp_path / "runs a").exists()


def test_a_root_that_cannot_be_written_is_named_and_nothing_is_submitted(slurm, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot make .*Not a directory.*choose another folder: run.root=DIR"):
        submit(tmp_path, f"run.root={tmp_path / 'file' / 'runs'}")
    assert not (slurm / "argv").exists()


def test_options_of_sbatch_in_the_environment_do_not_reach_it(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("SBATCH_PARTITION", "other")
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # submitted from within a job
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    submit(tmp_path)
    names = {line.partition("=")[0] for line in (slurm / "environment").read_text().split("\0")}
    assert "SLURM_CONF" in names
    assert not {"SBATCH_PARTITION", "SLURM_JOB_ID"} & names


def test_a_second_request_in_the_same_directory_waits_for_the_job(slurm, tmp_path):
    made = tmp_path / "run"
    submit(tmp_path, directory=made)
    with pytest.raises(ConfigError, match="exists; to continue it"):
        submit(tmp_path, directory=made)
    queue(slurm, "41|PENDING|Priority||0:00|4:00:00|N/A")
    with pytest.raises(ConfigError, match="job 41 has this run already, and is PENDING"):
        submit(tmp_path, directory=made, again=True)
    with pytest.raises(ConfigError, match="job 41 has this run already"):
        resume(made, Console())
    queue(slurm, "41|TIMEOUT|TimeLimit||4:00:00|4:00:00|N/A")
    assert submit(tmp_path, directory=made, again=True)[0] == 0


def test_dependencies_are_numbers_or_runs(slurm, tmp_path):
    made = tmp_path / "run"
    submit(tmp_path, directory=made)
    assert dependency([str(made), "7_3"]) == ["--dependency=afterok:41:7_3", "--kill-on-invalid-dep=yes"]
    with pytest.raises(ConfigError, match="neither a job's number nor the directory of a run"):
        dependency(["7;touch x"])
    assert ask("submit", "--after", made, *words(tmp_path)).exit_code == 0
    assert "--dependency=afterok:41" in argv(slurm)


def test_what_the_job_would_lack_is_found_before(slurm, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    more = ("deploy.slurm.export_env=[HF_TOKEN]", "topology.rollout_nodes=3", "rollout.workers=2", "trainer=cosmos")
    more += ("topology.train_nodes=2", "cosmos.mode=colocated")
    config = compose([*words(tmp_path, *more), "experiment=null"])
    with pytest.raises(ConfigError) as caught:
        start(config, "train", False, None, Console())
    for said in (
        "HF_TOKEN\n    is not set here",
        "3 nodes for rollout workers",
        "on several nodes policy and rollouts",
    ):
        assert said in str(caught.value)


def test_the_login_nodes_memory_and_gpus_do_not_matter(slurm, tmp_path):
    more = ("topology.gpus_per_node=8", "learner.device=cuda", "rollout.scenes_per_step=65536", "policy=waypoint")
    assert submit(tmp_path, *more)[0] == 0


# ---------------------------------------------------------------- sweeps


def test_a_sweep_is_one_array_and_a_directory_for_each_run(slurm, tmp_path):
    out = io.StringIO()
    more = ("run.seed=5,6,7", "deploy.slurm.parallel=2")
    assert sweep(words(tmp_path, *more), "train", False, None, Console(file=out, width=400)) == 0
    made = sorted(path for path in (tmp_path / "runs a").iterdir() if not path.is_symlink())
    assert [load_run_config(path).run.seed for path in made] == [5, 6, 7]
    assert [jobs.read(path) for path in made] == ["41_0", "41_1", "41_2"]
    told, stem = argv(slurm), str(made[0]).removesuffix("0")
    assert told[-1] == stem
    assert [f"{stem}{index}" for index in range(3)] == [str(path) for path in made]
    assert "--array=0-2%2" in told
    assert f"--output={stem}%a/logs/job.log" in told
    assert "job 41_2: " in out.getvalue()


def test_a_sweep_over_what_slurm_is_asked_for_is_refused(slurm, tmp_path):
    with pytest.raises(ConfigError, match=r"deploy.slurm.time=02:00:00: a sweep is one job array.*--time=02:00:00"):
        sweep(words(tmp_path, "deploy.slurm.time=01:00:00,02:00:00"), "train", False, None, Console())
    assert not (tmp_path / "runs a").exists()


def test_a_refused_sweep_leaves_nothing_behind(slurm, tmp_path):
    (slurm / "refuses").write_text("no")
    with pytest.raises(ConfigError, match="sbatch refuses"):
        sweep(words(tmp_path, "run.seed=1,2"), "train", False, None, Console())
    assert list((tmp_path / "runs a").iterdir()) == []


# ---------------------------------------------------------------- what follows


@pytest.fixture
def made(slurm, tmp_path):
    directory = tmp_path / "run"
    submit(tmp_path, directory=directory)
    return directory


@pytest.mark.parametrize(
    ("row", "shown", "job"),
    [
        ("41|PENDING|Resources||0:00|4:00:00|N/A", "train: queued", "job        41 PENDING (Resources)"),
        ("41|RUNNING|None|n[1-2]|0:07|4:00:00|N/A", "train: starting", "41 RUNNING, on n[1-2], 0:07 of 4:00:00"),
        ("41|CANCELLED|None||0:00|4:00:00|N/A", "train: not begun", "41 CANCELLED"),
        ("410|RUNNING|None|n1|0:07|4:00:00|N/A", "train: not begun", "41 is no longer known to Slurm"),
    ],
)
def test_status_knows_the_job(slurm, made, row, shown, job):
    queue(slurm, row)
    text = ask("status", made).output
    assert shown in text
    assert job in text


def test_status_and_list_without_slurm_say_what_the_directory_says(slurm, made):
    (slurm / "down").touch()
    for command in (("status", made), ("list", made.parent)):
        done = ask(*command)
        assert done.exit_code == 0
        assert "Slurm does not answer: slurm_load_jobs error: Unable to contact" in done.output


def test_a_run_that_was_silent_when_its_job_ended_was_killed(slurm, made):
    state = {"host": "elsewhere", "process": {"pid": 1, "started": "1", "boot": "x"}, "phase": "train"}
    state |= {"containers": [], "children": [], "since": 1.0}
    (made / "state.json").write_text(json.dumps(state))
    queue(slurm, "41|RUNNING|None|n1|0:07|4:00:00|N/A")
    assert "train: running" in ask("status", made).output
    queue(slurm, "41|TIMEOUT|TimeLimit|n1|4:00:00|4:00:00|N/A")
    text = ask("status", made).output
    assert "train: killed" in text
    assert f"to go on   alpagym resume {made}" in text
    assert "Slurm ends all that a job has started" in ask("clean", made).output


@pytest.mark.parametrize(
    ("state", "options", "told", "said"),
    [
        ("PENDING", (), "41", "cancelled before it began"),
        ("RUNNING", (), "--batch --signal=USR2 41", "stopped; to continue"),
        ("RUNNING", ("--now",), "41", "stopped; to continue"),
    ],
)
def test_stop_asks_the_job_and_waits_for_its_end(slurm, made, state, options, told, said):
    queue(slurm, f"41|{state}|None||0:00|4:00:00|N/A")
    done = ask("stop", *options, made)
    assert (done.exit_code, (slurm / "scancel").read_text()) == (0, f"{told}\n")
    assert said in done.output
    assert "is not running: job 41 COMPLETED" in ask("stop", made).output


def test_a_job_that_does_not_end_is_an_error_with_the_next_step(slurm, made):
    queue(slurm, "41|SUSPENDED|None||0:00|4:00:00|N/A")
    done = ask("stop", "--timeout-s", "0.2", made)
    assert done.exit_code == 1
    assert f"alpagym stop --now {made}" in done.output
    with pytest.raises(ConfigError, match="job 41 of .* is SUSPENDED; stop it"):
        app(["clean", str(made)], standalone_mode=False)


# ---------------------------------------------------------------- secrets


def test_secrets_are_nowhere_but_in_the_jobs_environment(slurm, tmp_path, monkeypatch):
    token, key = "hf-marker-0123456789", "wandb-marker-9876543210"
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("HTTPS_PROXY", "http://me:pass-marker@proxy:3128")
    more = ("deploy.slurm.export_env=[HF_TOKEN,WANDB_API_KEY,HTTPS_PROXY]", f"run.root={tmp_path / 'runs'}")
    for command in (["submit"], ["submit", "--dry-run"], ["submit", "run.seed=1,2", "--multirun"]):
        done = ask(*command, *words(tmp_path), *more)
        assert done.exit_code == 0, done.output
        assert "marker" not in done.output
        if "--dry-run" not in command:
            sent = dict(line.split("=", 1) for line in (slurm / "environment").read_text().split("\0") if line)
            assert (sent["HF_TOKEN"], sent["WANDB_API_KEY"]) == (token, key)
            assert "marker" not in (slurm / "argv").read_text() + (slurm / "script").read_text()
    (slurm / "refuses").write_text(f"denied for {token}")
    refused = ask("submit", *words(tmp_path), *more)
    assert "marker" not in refused.output
    kept = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert len(kept) == 3 * 4  # config.yaml, command, job.sbatch, job.json
    for path in kept:
        assert "marker" not in path.read_text(), path
    for word in (f"deploy.slurm.env.X={token}", f"deploy.slurm.extra=[--comment={key}]", f"run.name={token}"):
        with pytest.raises(ConfigError) as caught:
            compose(words(tmp_path, word))
        assert "marker" not in str(caught.value)


# ---------------------------------------------------------------- the login node


def test_submitting_imports_nothing_heavy(slurm, tmp_path):
    code = (
        "import sys\nfrom alpagym_host import cli\n"
        "try:\n    cli.main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'numba', 'pyarrow', 'matplotlib', 'transformers', 'grpc', 'cv2', 'av', 'ray', 'wandb'}\n"
        "print('heavy', sorted(heavy & sys.modules.keys()))"
    )
    for command in (["submit", *words(tmp_path)], ["list", str(tmp_path / "runs a")]):
        argv = [sys.executable, "-c", code, *command]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.stdout.endswith("heavy []\n"), done.stdout + done.stderr


def test_the_job_itself_refuses_to_begin_outside_of_one(made, monkeypatch):
    from alpagym_host.launch import job

    monkeypatch.delenv("SLURM_PROCID", raising=False)
    with pytest.raises(ConfigError, match="alpagym submit"):
        job.main()


def test_directories_of_a_sweep_end_with_their_number(tmp_path):
    configs = [compose([f"run.root={tmp_path}", f"run.seed={seed}"]) for seed in range(3)]
    made = run_dir.create_several(configs, "train")
    stem = str(made[0]).removesuffix("0")
    assert [str(path) for path in made] == [f"{stem}{index}" for index in range(3)]
    assert (Path(tmp_path) / "latest").resolve() == made[-1]
