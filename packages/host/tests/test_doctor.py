import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from alpagym_host import doctor_machine, doctor_packages
from alpagym_host.cli import main
from alpagym_host.compose import compose
from alpagym_host.doctor import examine, render
from alpagym_host.doctor_types import Context, Finding
from alpagym_host.hugging_face import check as check_hugging_face
from alpagym_runtime.machine import Machine

SMOKE = ["experiment=alpamayo_1_5_local_2gpu_smoke"]
TOKEN = "hf_5ecretmarker0123456789"


@pytest.fixture
def quiet(monkeypatch, tmp_path):
    """No account of the person who runs the tests."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "HF_HUB_OFFLINE", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def context(*overrides, ids=(), timeout_s=5.0):
    return Context(compose(overrides), Machine(timeout_s), timeout_s, tuple(ids))


def states(findings):
    return [(finding.state, finding.text) for finding in findings]


# ---------------------------------------------------------------- the machine


def test_a_machine_with_everything_for_the_run(good_tools, quiet, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = {check: list(getattr(doctor_machine, check)(context(*SMOKE))) for check in ("containers", "redis", "slurm")}
    assert states(found["containers"]) == [("ok", "Docker 28.2.2, Compose 2.36.0")]
    assert states(found["redis"]) == [("ok", "Redis server v=7.0.15")]
    assert states(found["slurm"]) == [("off", "sbatch is not on PATH")]


def test_what_is_absent_is_wrong_only_where_the_run_needs_it(tools, quiet):
    for check in (doctor_machine.gpus, doctor_machine.containers, doctor_machine.redis):
        (finding,) = check(context())
        assert finding.state == "off"
        (finding,) = check(context(*SMOKE))
        assert finding.state == "wrong"
        assert finding.remedy


def test_another_container_tool_is_named(tools, quiet):
    tools("apptainer")
    (finding,) = doctor_machine.containers(context(*SMOKE))
    assert finding.text == "docker is not on PATH; there is apptainer, which AlpaSim's launcher does not use"


def test_docker_without_the_nvidia_runtime_is_named(good_tools):
    script = 'case "$1" in version) echo 28;; compose) echo 2;; info) echo \'{"runc": {}}\';; esac'
    good_tools("docker", script)
    assert states(doctor_machine.containers(context(*SMOKE)))[1] == ("wrong", "Docker has no NVIDIA runtime")


class Answers(Machine):
    """A machine whose GPU probe says what a test wants."""

    def __init__(self, basics, nccl):
        super().__init__()
        self._said = {"basics": basics, "nccl": nccl}

    def _ask(self, argv, timeout_s):
        from alpagym_runtime.machine import Answer

        if "alpagym_runtime.trainers.gpu_probe" in argv:
            said = self._said["nccl" if "--nccl" in argv else "basics"]
            return Answer(0, json.dumps(said)) if isinstance(said, dict) else Answer(None, said)
        return super()._ask(argv, timeout_s)


BASICS = {"torch": "2.11.0", "cuda": "13.0", "available": True, "error": "", "nccl": "2.28.9", "devices": 2}


@pytest.mark.parametrize(
    ("basics", "nccl", "wanted"),
    [
        (
            BASICS | {"peers": [[0, 1], [1, 0]]},
            {"gigabytes_per_s": 300.4},
            [
                ("ok", "torch 2.11.0, CUDA 13.0, NCCL 2.28.9, 2 usable"),
                ("ok", "peer-to-peer: 2 of 2 pairs"),
                ("ok", "NCCL between two GPUs: 300 GB/s of all-reduce, sums are right"),
            ],
        ),
        (
            BASICS | {"peers": []},
            "it did not answer within 70 s",
            [
                ("ok", "torch 2.11.0, CUDA 13.0, NCCL 2.28.9, 2 usable"),
                ("warn", "peer-to-peer: 0 of 2 pairs"),
                ("wrong", "NCCL between two GPUs: it did not answer within 70 s"),
            ],
        ),
        (
            BASICS | {"available": False, "error": "driver too old"},
            {},
            [("wrong", "torch 2.11.0 sees no GPU: driver too old")],
        ),
        ("did not answer within 70 s", {}, [("wrong", "torch does not answer: did not answer within 70 s")]),
    ],
)
def test_gpus_are_tried_and_not_only_listed(good_tools, basics, nccl, wanted):
    found = states(doctor_machine.gpus(Context(compose(SMOKE), Answers(basics, nccl), 10.0)))
    assert found == [("ok", "2 found (NVIDIA H200, 151 GB), driver 570.1"), *wanted]


def test_a_taken_port_names_who_has_it_and_the_next(good_tools):
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    port = server.server_port
    try:
        (finding,) = doctor_machine.ports(context(*SMOKE, f"cosmos.controller_port={port}"))
    finally:
        server.server_close()
    assert finding.state == "wrong"
    assert finding.text.startswith(f"{port} (cosmos.controller_port) is taken")
    assert finding.remedy == f"cosmos.controller_port={port + 1}"
    (finding,) = doctor_machine.ports(context(*SMOKE, f"cosmos.controller_port={port}"))
    assert finding.state == "ok"


def test_an_alpasim_that_does_not_answer_and_one_that_does(tools):
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    addresses = f"127.0.0.1:{server.server_port},127.0.0.1:9"
    try:
        found = list(doctor_machine.alpasim(context("simulator=alpasim", f"simulator.address={addresses}")))
    finally:
        server.server_close()
    assert [finding.state for finding in found] == ["ok", "wrong"]
    assert "127.0.0.1:9 does not answer" in found[1].text


def test_a_checkout_shows_its_revision(good_tools, tmp_path):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "src").mkdir()
    found = list(doctor_machine.alpasim(context(*SMOKE, f"alpasim.repo_path={tmp_path}")))
    assert states(found) == [("ok", f"{tmp_path} at abc1234"), ("warn", "it has no .venv yet")]


def test_slurm_names_partitions_and_one_that_is_not_there(tools):
    tools("sbatch", "echo slurm 23.11.4")
    tools("sinfo", "printf 'cpu\\ngpu\\ngpu\\n'")
    words = ["deploy=slurm", "deploy.slurm.partition=gpus"]
    found = list(doctor_machine.slurm(context(*words)))
    assert states(found) == [("ok", "slurm 23.11.4, partitions: cpu, gpu"), ("wrong", "there is no partition 'gpus'")]
    tools("sinfo", "echo 'Unable to contact slurm controller' >&2; exit 1")
    (finding,) = doctor_machine.slurm(context(*words))
    assert (finding.state, finding.text) == (
        "wrong",
        "slurm 23.11.4, but sinfo says: Unable to contact slurm controller",
    )


def test_a_folder_that_cannot_be_written_and_little_shared_memory(tools, tmp_path, monkeypatch):
    monkeypatch.setattr(Machine, "free_bytes", lambda self, path: 64_000_000 if str(path) == "/dev/shm" else 5 << 30)
    words = ("transport=shared_memory", "transport.limit_mb=8192", f"run.root={tmp_path}")
    found = list(doctor_machine.disk(context(*words)))
    assert states(found) == [
        ("ok", f"5 GB free for {tmp_path}"),
        ("warn", "/dev/shm has 64 MB free; transport.limit_mb is 8192"),
    ]


# ---------------------------------------------------------------- packages


def test_a_version_that_does_not_fit_is_named_with_its_range(monkeypatch):
    found = {"numpy": "1.26.4", "tensorboard": None, "nvidia-nccl-cu12": "2.27", "nvidia-nccl-cu13": "2.28"}
    real = Machine.version
    monkeypatch.setattr(Machine, "version", lambda self, name: found[name] if name in found else real(self, name))
    texts = [text for state, text in states(doctor_packages.packages(context())) if state == "wrong"]
    assert "numpy 1.26.4 is installed; alpagym-runtime needs <3,>=2.1" in texts
    assert "alpagym-runtime needs tensorboard, which is not installed" in texts
    assert "nvidia-nccl-cu12 and nvidia-nccl-cu13 overwrite each other's libnccl.so.2" in texts


def test_this_environment_is_whole():
    assert {state for state, _ in states(doctor_packages.packages(context()))} == {"ok"}


def test_a_broken_plugin_is_a_warning_with_its_distribution(install):
    install({"acme_broken.py": "import no_such_module_x"}, "[alpagym.rewards]\nbroken = acme_broken:Config\n")
    fine, broken = doctor_packages.plugins(context())
    assert (fine.state, broken.state) == ("ok", "warn")
    assert "'broken' of group 'rewards' from acme 1.2" in broken.text
    assert "No module named 'no_such_module_x'" in broken.text
    assert broken.remedy == "pip uninstall acme"


def test_another_python_is_refused(monkeypatch):
    monkeypatch.setattr("sys.version_info", (3, 10, 1))
    (finding,) = doctor_packages.python(context())
    assert finding.state == "wrong"
    assert "3.11 to 3.13 is needed" in finding.text


# ---------------------------------------------------------------- Hugging Face


@pytest.fixture
def hub(quiet, monkeypatch):
    """A hub of ours: `answers[path] = (status, X-Error-Code)`."""
    answers, asked = {}, []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers.get("Authorization")))
            status, code = answers.get(self.path, (200, ""))
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.end_headers()
            self.wfile.write(b'{"name": "somebody"}')

        def log_message(self, *_): ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield answers, asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_access_to_what_the_run_needs(hub, good_tools):
    _, asked = hub
    found = list(check_hugging_face(context(*SMOKE)))
    assert states(found) == [
        ("ok", "logged in as somebody"),
        ("ok", "nvidia/PhysicalAI-Autonomous-Vehicles-NuRec: access"),
        ("ok", "nvidia/Alpamayo-1.5-10B: access"),
    ]
    assert {token for _, token in asked} == {f"Bearer {TOKEN}"}


@pytest.mark.parametrize(
    ("status", "code", "text", "remedy"),
    [
        (403, "GatedRepo", "403: a/b is gated, and this account may not read it", "accept its terms: http"),
        (404, "RepoNotFound", "404: there is no models/a/b, or it is private", "look at http"),
        (401, "RepoNotFound", "401: there is no models/a/b, or it is private", "look at http"),
        (401, "GatedRepo", "401: a/b wants a valid token", "hf auth login, then accept its terms"),
        (503, "", "a/b: 503  Service Unavailable", "try again"),
    ],
)
def test_a_refusal_says_which_one_it_is(hub, status, code, text, remedy):
    hub[0]["/api/models/a/b/auth-check"] = (status, code)
    finding = list(check_hugging_face(context(ids=["models/a/b"])))[-1]
    assert (finding.state, finding.text) == ("wrong", text)
    assert finding.remedy.startswith(remedy)
    assert TOKEN not in str(finding)


def test_a_token_that_is_not_valid_ends_the_questions(hub):
    hub[0]["/api/whoami-v2"] = (401, "")
    assert states(check_hugging_face(context(ids=["models/a/b"]))) == [("wrong", "401: the token is not valid")]
    assert len(hub[1]) == 1


def test_no_token_offline_and_an_id_that_is_none(hub, monkeypatch):
    (finding,) = list(check_hugging_face(context(ids=["nvidia/x"])))[1:]
    assert finding.text == "'nvidia/x' is no id"
    monkeypatch.delenv("HF_TOKEN")
    assert states(check_hugging_face(context())) == [("off", "no token")]
    assert states(check_hugging_face(context(ids=["models/a/b"])))[0] == ("wrong", "no token")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (finding,) = check_hugging_face(context(ids=["models/a/b"]))
    assert finding.state == "off"


def test_a_hub_that_does_not_answer_is_said_once(quiet, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    (finding,) = check_hugging_face(context(ids=["models/a/b", "models/c/d"]))
    assert finding.text.startswith("http://127.0.0.1:9 does not answer: ")


# ---------------------------------------------------------------- the command


def test_doctor_lists_everything_and_leaves_with_one_where_something_is_wrong(tools, quiet, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tools("docker", "exec /bin/sleep 60")
    begun = time.perf_counter()
    for words, code in ((["doctor"], 0), (["doctor", *SMOKE, "--timeout-s", "0.5"], 1)):
        monkeypatch.setattr("sys.argv", ["alpagym", *words])
        with pytest.raises(SystemExit) as leave:
            main()
        assert leave.value.code == code, capsys.readouterr().out
    assert time.perf_counter() - begun < 40
    shown = capsys.readouterr().out
    names = ("Python", "packages", "plugins", "GPUs", "containers", "Redis", "disk", "ports", "AlpaSim", "Hugging Face")
    for name in (*names, "W&B", "Slurm", "this run"):
        assert f" {name} " in shown
    assert "docker did not answer within 0.5 s" in " ".join(shown.split())
    assert "→ uv sync --all-packages --extra cosmos" in shown


def test_doctor_as_json(tools, quiet, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("sys.argv", ["alpagym", "doctor", "--json"])
    with pytest.raises(SystemExit):
        main()
    found = json.loads(capsys.readouterr().out)
    assert {"name", "state", "text", "remedy"} == set(found[0])
    assert found[-1] == {
        "name": "this run",
        "state": "ok",
        "text": "nothing else stands in its way",
        "remedy": "",
    }


def test_what_a_check_found_already_is_not_said_twice(tools, quiet, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = examine(compose(SMOKE), Machine(1.0), 1.0)
    texts = [finding.text for finding in found if finding.state == "wrong"]
    assert sum("nvidia-smi is not on PATH" in text for text in texts) == 1
    assert sum("docker is not on PATH" in text for text in texts) == 1
    assert sum("redis-server is not on PATH" in text for text in texts) == 1


def test_a_check_that_breaks_does_not_hide_the_others(tools, quiet, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(Machine, "port_is_free", lambda *_: 1 / 0)
    found = examine(compose(SMOKE), Machine(1.0), 1.0)
    (finding,) = [f for f in found if f.name == "ports"]
    assert finding.text == "could not be checked: ZeroDivisionError: division by zero"
    assert found[-1].name == "this run"


def test_lines_fit_the_screen_and_remedies_are_not_cut(capsys):
    console = Console(width=60, force_terminal=False)
    command = "run " * 30
    render([Finding("a", "wrong", "word " * 40, command), Finding("a", "ok", "fine")], console)
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines() if "word" in line) <= 60
    assert f"→ {command.strip()}" in shown
    assert shown.rstrip().endswith("1 thing is wrong")
