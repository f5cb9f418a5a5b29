"""The job's script: its text, and what bash makes of it with stand-ins of Slurm's tools."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from alpagym_host.compose import compose
from alpagym_host.slurm.script import render
from alpagym_plugins import ConfigError
from alpagym_runtime.slurm_config import SlurmSection

WORDS = ("deploy=slurm", "deploy.slurm.partition=main", "run.root=/shared/runs")
TEMPLATE = "experiment=alpamayo_1_5_slurm_template"


def script(*words, command="train"):
    return render(compose([*WORDS, *words]), command, "/venv/bin/python")


def options(text):
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


# ---------------------------------------------------------------- text


def test_the_same_config_gives_the_same_bytes():
    words = ("deploy.slurm.env={B: '2', A: '1'}", "rollout.workers=2", "deploy.slurm.export_env=[HF_TOKEN,A_TOKEN]")
    assert script(*words) == script(*words)
    other = ("deploy.slurm.export_env=[A_TOKEN,HF_TOKEN]", "rollout.workers=2", "deploy.slurm.env={A: '1', B: '2'}")
    assert script(*words) == script(*other, "run.name=another", "run.seed=7")


def test_every_option_stands_once():
    text = script(
        *("deploy.slurm.account=me", "deploy.slurm.qos=high", "deploy.slurm.constraint=a100&nvme", "deploy.requeues=2"),
        *("deploy.slurm.time=1-12", "deploy.slurm.cpus_per_task=8", "deploy.slurm.mem=64G", "topology.gpus_per_node=8"),
        *("topology.train_nodes=2", "topology.processes=8", "deploy.slurm.extra=[--reservation=r 1,--spread-job]"),
        *("learner.device=cuda", "deploy.slurm.export_env=[HF_TOKEN]"),
    )
    assert options(text) == [
        "--job-name=alpagym",
        "--partition=main",
        "--account=me",
        "--qos=high",
        '--constraint="a100&nvme"',
        "--time=1-12",
        "--nodes=2",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--cpus-per-task=8",
        "--mem=64G",
        "--signal=B:USR1@120",
        "--open-mode=append",
        "--export=HF_TOKEN,HOME,LANG,LOGNAME,PATH,SHELL,USER",
        "--exclusive",
        "--requeue",
        '--reservation="r 1"',
        "--spread-job",
    ]


@pytest.mark.parametrize(
    ("words", "command", "nodes", "steps"),
    [
        ((), "train", 1, ["--relative=0 --nodes=1 --ntasks=1"]),
        (("topology.train_nodes=3", "topology.processes=4"), "train", 3, ["--relative=0 --nodes=3 --ntasks=12"]),
        (("topology.train_nodes=3", "topology.processes=4"), "evaluate", 1, ["--relative=0 --nodes=1 --ntasks=1"]),
        # The trainer on node 0, five workers on nodes 1 and 2.
        (
            ("topology.rollout_nodes=2", "rollout.workers=5"),
            "train",
            3,
            ["--relative=1 --nodes=2 --ntasks=5", "--relative=0 --nodes=1 --ntasks=1"],
        ),
        # Without nodes of their own they share the trainer's.
        (
            ("rollout.workers=4",),
            "train",
            1,
            ["--relative=0 --nodes=1 --ntasks=4", "--relative=0 --nodes=1 --ntasks=1"],
        ),
    ],
)
def test_roles_have_their_nodes(words, command, nodes, steps):
    text = script(*words, command=command)
    assert f"#SBATCH --nodes={nodes}\n" in text
    found = [line.split('"${step[@]}" ')[1].split(" --kill")[0] for line in text.splitlines() if '"${step[@]}"' in line]
    assert found == steps


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ((), "train"),
        (("rollout.workers=3", "topology=slurm_cpu_1_1"), "rollout"),
        (("deploy=slurm_container", "deploy.slurm.container_image=reg.io/a/b:1"), "train"),
        (("deploy=slurm_container", "deploy.slurm.container=apptainer", "topology.gpus_per_node=1"), "train"),
        *(((f"topology={name}", TEMPLATE), "train") for name in ("slurm_full_node_1_3_4", "slurm_distributed_1_1_1")),
    ],
)
def test_bash_reads_what_we_write(words, command, tmp_path):
    file = tmp_path / "job"
    file.write_text(script(*words, command=command))
    done = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


HARD = ["x (1) [y]", "a'b", 'say "hi"', "$(touch evil) `touch evil` $HOME", "#1 \\ back%j;|&<>*?~", "ünïcode"]


@pytest.mark.parametrize("name", HARD)
def test_a_job_may_be_called_anything_in_one_line(name):
    lines = options(render(_renamed(name), "train", "python"))
    assert len([line for line in lines if line.startswith("--job-name=")]) == 1


def _renamed(name):
    config = compose(list(WORDS))
    config.deploy.slurm.job_name = name
    type(config.deploy.slurm).__post_init__(config.deploy.slurm)
    return config


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ('deploy.slurm.job_name="two\nlines"', "job_name: must be one line of printable text"),
        ('deploy.slurm.partition="a\n#SBATCH --uid=0"', "partition: must be one line"),
        ("deploy.slurm.extra=[--nodes=3]", "--nodes is set from topology"),
        ("deploy.slurm.extra=[-N3]", "must be --OPTION or --OPTION=VALUE"),
        ("deploy.slurm.extra=[--wrap=rm]", "--wrap is set from the script itself"),
        ("deploy.slurm.env.HF_TOKEN=abc", "is the name of a secret"),
        ("deploy.slurm.env.a-b=abc", "unknown key|is no name of a variable"),
        ("deploy.slurm.container_mounts=['/a:/b,/c:/d']", "has a comma"),
        ("deploy.slurm.container=docker", "must be one of 'pyxis', 'apptainer'"),
        ("deploy.slurm.warn_s=0", "warn_s"),
        ("deploy.slurm.time=2", "must be below time=2 .120 s., got 120"),
    ],
)
def test_what_a_script_cannot_hold_is_refused(word, said):
    with pytest.raises(ConfigError, match=said):
        compose([*WORDS, word])


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("10:30", 630), ("04:00:00", 14400), ("1-12", 129600), ("1-0:30", 88200), ("2-01:02:03", 176523)],
)
def test_a_time_limit_is_read_as_slurm_reads_it(time, seconds):
    assert SlurmSection(time=time).limit_s == seconds


# ---------------------------------------------------------------- containers


def test_pyxis_gets_enroots_spelling_and_our_variables():
    text = script(
        *(
            "deploy=slurm_container",
            "deploy.slurm.partition=main",
            "deploy.slurm.container_image=nvcr.io/nvidia/pytorch:25.06-py3",
        ),
        *(
            "deploy.slurm.container_cache=/cache",
            "deploy.slurm.container_mounts=[/a:/b:ro,/c d]",
            "deploy.slurm.env.X=1",
        ),
        "deploy.slurm.export_env=[HF_TOKEN]",
    )
    assert "enroot import --output \"$image.$SLURM_JOB_ID\" 'docker://nvcr.io#nvidia/pytorch:25.06-py3'" in text
    assert '--container-image="$image"' in text
    assert "--container-mounts='/a:/b:ro,/c d' --container-env=HF_TOKEN,X" in text
    assert " \\\n    python3 -m alpagym_host.launch.job" in text


def test_apptainer_executes_a_file_as_it_is():
    text = script(
        *(
            "deploy.slurm.container=apptainer",
            "deploy.slurm.container_image=/images/a b.sif",
            "topology.gpus_per_node=1",
        ),
        *(
            "deploy.slurm.container_mounts=[/a:/b]",
            "deploy.slurm.container_cache=/cache",
            "deploy.slurm.python=/opt/py",
        ),
    )
    assert (
        "apptainer exec --pwd=\"$PWD\" --bind=/a:/b --nv '/images/a b.sif' /opt/py -m alpagym_host.launch.job" in text
    )
    assert "pull" not in text


def test_two_images_never_share_a_file():
    names = set()
    for image in ("a/b:1", "a_b:1", "a/b_1", "x" * 200 + "/b:1", "x" * 201 + "/b:1"):
        text = script(
            "deploy=slurm_container", "deploy.slurm.container_cache=/c", f"deploy.slurm.container_image={image}"
        )
        names.add(next(line for line in text.splitlines() if line.startswith("image=")))
    assert len(names) == 5


# ---------------------------------------------------------------- what bash makes of it

SRUN = r"""
n=1
while [[ $1 == --* ]]; do case $1 in --ntasks=*) n=${1#*=};; --output=*) out=${1#*=};; esac; shift; done
out=$(sed 's/%N/here/; s/%%/%/g' <<<"$out")
pids=()
pass() { kill -s "$1" "${pids[@]}" 2>/dev/null; }
trap 'pass USR1' USR1; trap 'pass USR2' USR2
for ((i = 0; i < n; i++)); do
  SLURM_PROCID=$i SLURM_STEP_NUM_TASKS=$n "$@" >>"$out" 2>&1 & pids+=($!)
done
highest=0
for pid in "${pids[@]}"; do
  wait "$pid"; code=$?
  while kill -0 "$pid" 2>/dev/null; do wait "$pid"; code=$?; done
  ((code > highest)) && highest=$code
done
exit $highest
"""
# Plays the interpreter: -m MODULE RUN_DIR. What it does is in files of the run directory.
PYTHON = r"""
run=${@: -1}
case $2 in
  alpagym_host.launch.simulator)
    trap 'echo down >"$run/simulator"; exit 0' USR2
    echo up >"$run/simulator"; code=$(cat "$run/simulator-code"); [ "$code" = 0 ] || exit "$code"
    while :; do sleep 0.05; done ;;
  alpagym_host.launch.job)
    printf '%s' "$VALUE" >"$run/value"; echo "$SECRET_TOKEN" | sha256sum >"$run/secret"; printf '%s\n' "$@" >"$run/argv"
    pwd >"$run/folder"
    trap 'echo USR1 >>"$run/got"; exit 138' USR1
    trap 'echo USR2 >>"$run/got"; exit 140' USR2
    touch "$run/started"
    for ((i = 0; i < $(cat "$run/lasts"); i++)); do sleep 0.05; done
    exit "$(cat "$run/code")" ;;
  *)
    echo "$SLURM_PROCID" >>"$run/workers"
    exit "$(cat "$run/worker-code")" ;;
esac
"""


class Node:
    """A place where the script runs: a folder of stand-ins before PATH, and a run directory that is hard to quote."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "a 'b' \"c\" $HOME %j (1) [y]"
        self.tools = folder / "tools"
        self.tools.mkdir()
        self.run.mkdir()
        self.tool("srun", SRUN)
        self.tool("python", PYTHON)
        self.tool("squeue", "echo RUNNING")
        # Slurm ends a job that is queued again; here its script has another tool do that.
        self.tool("scontrol", f'echo "$*" >>"{folder}/scontrol"; kill -KILL $PPID')
        self.says(code=0, lasts=0, worker_code=0, simulator_code=0)

    def tool(self, name: str, text: str) -> None:
        (self.tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (self.tools / name).chmod(0o755)

    def says(self, **values: int) -> None:
        for name, value in values.items():
            (self.run / name.replace("_", "-")).write_text(str(value))

    def start(self, *words: str, **environment: str) -> subprocess.Popen:
        file = self.folder / "job"
        file.write_text(script(f"deploy.slurm.python={self.tools / 'python'}", *words))
        variables = {
            "PATH": f"{self.tools}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "n1",
            "SLURM_SUBMIT_DIR": str(self.folder),
            **environment,
        }
        return subprocess.Popen(
            ["bash", str(file), str(self.run)],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def goes(self, *words: str, **environment: str) -> tuple[int, str]:
        process = self.start(*words, **environment)
        said, _ = process.communicate(timeout=60)
        return process.returncode, said

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 30
        while not (self.run / name).exists() and time.monotonic() < deadline:
            time.sleep(0.02)


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


@pytest.mark.parametrize(
    "value", ["a b \"c\" $HOME 'd'", "mlx5_0:1,mlx5_3:1", "two\nlines\n", "", "$(touch evil)`x`\\"]
)
def test_the_trainer_sees_each_value_byte_for_byte(node, value):
    config = compose([*WORDS, f"deploy.slurm.python={node.tools / 'python'}"])
    config.deploy.slurm.env["VALUE"] = value
    (node.folder / "job").write_text(render(config, "train", "python"))
    environment = {"PATH": f"{node.tools}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(node.folder)}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n", "SECRET_TOKEN": "of the submission"}
    done = subprocess.run(
        ["bash", str(node.folder / "job"), str(node.run)], env=environment, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (node.run / "value").read_text() == value
    assert (node.run / "argv").read_text().splitlines() == ["-m", "alpagym_host.launch.job", str(node.run)]
    assert (node.run / "folder").read_text().strip() == str(node.folder)
    assert not list(node.folder.rglob("evil"))


def test_an_arrays_index_is_the_end_of_the_directory(node):
    node.run = node.run.with_name(node.run.name + "3")
    node.run.mkdir()
    node.says(code=0, lasts=0)
    whole, node.run = node.run, node.run.with_name(node.run.name[:-1])
    code, said = node.goes(SLURM_ARRAY_TASK_ID="3")
    assert code == 0, said
    assert (whole / "started").exists()
    assert (whole / "logs" / "trainer-here.log").exists()


def test_a_script_without_its_argument_says_so(node):
    file = node.folder / "job"
    file.write_text(script())
    done = subprocess.run(["bash", str(file)], capture_output=True, text=True, check=False)
    assert "is missing: the directory of the run" in done.stderr
    assert done.returncode not in (0, 138)


def test_each_worker_has_its_number_and_the_code_is_the_trainers(node):
    node.says(code=7, lasts=4)
    old = node.run / "endpoints" / "alpasim-0.json"
    old.parent.mkdir()
    old.touch()
    code, said = node.goes("rollout.workers=3")
    assert code == 7, said
    assert not old.exists()  # where those of an earlier start listened
    assert sorted((node.run / "workers").read_text().split()) == ["0", "1", "2"]


def test_a_worker_is_started_again_so_often_and_then_the_trainer_is_asked_to_stop(node):
    node.says(lasts=400, worker_code=9)
    code, said = node.goes("rollout.workers=2", "rollout.restarts=2")
    # 2 workers × (1 start + 2 restarts)
    assert len((node.run / "workers").read_text().split()) == 6
    assert "rollout ended with code 9" in said
    assert (node.run / "got").read_text() == "USR1\n"
    assert code == 138


ALPASIM = ("simulator=alpasim", "topology.alpasim_nodes=2", "dataset.scene_ids=[a]")


def test_alpasim_has_nodes_of_its_own_and_is_taken_down_when_the_trainer_has_ended(node):
    assert "--relative=1 --nodes=2 --ntasks=2" in script(*ALPASIM)
    node.says(lasts=20, code=5)
    code, said = node.goes(*ALPASIM)
    assert (code, (node.run / "simulator").read_text()) == (5, "down\n"), said


def test_a_trainer_without_its_alpasim_is_asked_to_stop(node):
    node.says(lasts=400, simulator_code=4)
    code, said = node.goes(*ALPASIM)
    assert (code, "simulator ended with code 4" in said) == (138, True)


@pytest.mark.parametrize("code", [0, 3])
def test_a_worker_that_ends_with_its_trainer_is_not_started_again(node, code):
    node.says(lasts=10, worker_code=code)
    assert node.goes("rollout.workers=2")[0] == 0
    assert len((node.run / "workers").read_text().split()) == 2


@pytest.mark.parametrize(
    ("number", "restarts", "state", "queued"),
    [
        (signal.SIGUSR1, "0", "RUNNING", True),
        (signal.SIGUSR1, "1", "RUNNING", True),
        (signal.SIGUSR1, "2", "RUNNING", False),  # that was the last of deploy.requeues=2
        (signal.SIGUSR1, "0", "CANCELLED", False),
        (signal.SIGUSR2, "0", "RUNNING", False),  # alpagym stop
    ],
)
def test_signals_reach_the_trainer_and_the_job_is_queued_again(node, number, restarts, state, queued):
    node.says(lasts=400)
    node.tool("squeue", f"echo {state}")
    process = node.start("deploy.requeues=2", SLURM_RESTART_COUNT=restarts)
    node.wait_for("started")
    process.send_signal(number)
    said, _ = process.communicate(timeout=30)
    assert (node.run / "got").read_text() == signal.Signals(number).name.removeprefix("SIG") + "\n"
    assert (node.folder / "scontrol").exists() == queued
    if queued:
        assert (node.folder / "scontrol").read_text() == "requeue 77\n"
        assert f"queued again, {int(restarts) + 1} of deploy.requeues=2" in said
    else:
        assert process.returncode == 128 + number


def test_a_preemptions_sigterm_queues_again_too(node):
    node.says(code=143)
    assert node.goes("deploy.requeues=1")[0] == -signal.SIGKILL
    assert (node.folder / "scontrol").read_text() == "requeue 77\n"


def test_a_failure_is_never_queued_again(node):
    node.says(code=1)
    assert node.goes("deploy.requeues=9")[0] == 1
    assert not (node.folder / "scontrol").exists()


def test_a_job_that_slurm_has_queued_too_often_does_not_begin(node):
    code, said = node.goes("deploy.requeues=1", SLURM_RESTART_COUNT="2")
    assert code == 1
    assert "not begun: more than deploy.requeues=1" in said
    assert not (node.run / "started").exists()


APPTAINER = r"""
if [ "$1" = pull ]; then echo "$3" >>pulled; touch "$2"; exit; fi
shift; while [[ $1 == --* ]]; do printf '%s\n' "$1" >>options; shift; done
[ -e "$1" ] || exit 255; shift; exec "$@"
"""


def test_both_roles_run_in_the_container_and_its_image_is_fetched_once(node):
    node.tool("apptainer", APPTAINER)
    words = ("deploy.slurm.container=apptainer", "deploy.slurm.container_image=reg.io/a/b:1", "rollout.workers=2")
    words += (f"deploy.slurm.container_cache={node.folder / 'the cache'}", "deploy.slurm.container_mounts=[/a b:/c]")
    for _ in range(2):
        node.says(lasts=4)
        assert node.goes(*words)[0] == 0
    assert (node.folder / "pulled").read_text() == "docker://reg.io/a/b:1\n"
    assert len((node.run / "workers").read_text().split()) == 4
    told = (node.folder / "options").read_text().splitlines()
    # Twice a trainer and two workers.
    assert told.count("--bind=/a b:/c") == told.count(f"--pwd={node.folder}") == 6


def test_an_image_that_cannot_be_fetched_ends_the_job_before_it_begins(node):
    node.tool("enroot", 'echo "[ERROR] 401 Unauthorized" >&2; exit 1')
    words = ("deploy.slurm.container_image=reg.io/a/b:1", f"deploy.slurm.container_cache={node.folder / 'cache'}")
    code, said = node.goes(*words)
    assert (code, "401 Unauthorized" in said) == (1, True)
    assert not (node.run / "started").exists()
    assert list((node.folder / "cache").iterdir()) == []


def test_a_stop_before_the_trainer_starts_is_obeyed(node):
    # A container that takes a while to be fetched; the signal comes meanwhile.
    node.tool("apptainer", 'if [ "$1" = pull ]; then touch fetching; sleep 1; touch "$2"; fi')
    process = node.start(
        *("deploy.slurm.container=apptainer", "deploy.slurm.container_image=a/b:1"),
        f"deploy.slurm.container_cache={node.folder / 'cache'}",
    )
    deadline = time.monotonic() + 20
    while not (node.folder / "fetching").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR2)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 140, said
    assert not (node.run / "started").exists()
    assert [path.suffix for path in (node.folder / "cache").iterdir()] == [".sif"]


def test_the_nodes_of_a_cosmos_job_share_a_secret_that_the_script_makes():
    text = script("trainer=cosmos", "topology.train_nodes=2", "topology.gpus_per_node=1", "rollout.group_size=8")
    (line,) = [line for line in text.splitlines() if "ALPAGYM_JOB_SECRET" in line]
    tell = ["bash", "-c", f"{line}; echo $ALPAGYM_JOB_SECRET"]
    made = [subprocess.run(tell, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert all(len(bytes.fromhex(secret)) == 32 for secret in made)
    assert made[0] != made[1]
    assert "ALPAGYM_JOB_SECRET" not in script()
