"""The life of a supervised run: nothing outlives it, whatever ends it, and its first cause is the last thing said.

One case of each kind runs by default, all of them with `-m "slow or not slow"`.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from alpagym_runtime.endpoints import Registry

STAND_INS = Path(__file__).parent / "stand_ins"
RUN = ["simulator=alpasim", "policy=waypoint", "dataset.scene_ids=[clip-a]", "deploy.grace_s=8"]
WEIRD = "runs of 'a' \"b\" = # [c] {d}, e"


class Run:
    """A supervised run in a process of its own, and everything that carries its mark."""

    def __init__(self, root, mark, words, place=None):
        self.root, self.mark = root, mark
        argv = [sys.executable, str(STAND_INS / "supervised.py"), str(place or root), *words]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    @property
    def directory(self):
        (found,) = [path.parent for path in self.root.glob("*/config.yaml") if not path.parent.is_symlink()]
        return found

    def until(self, name, timeout_s=60.0):
        """Wait for a file in the run directory."""
        deadline_s = time.monotonic() + timeout_s
        while not list(self.root.glob(f"*/{name}")):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline_s, f"no {name}"
            time.sleep(0.05)

    def end(self, timeout_s=20.0):
        """Wait for its end: code, stdout, stderr."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def state(self):
        return json.loads((self.directory / "state.json").read_text())

    def port(self):
        (file,) = self.directory.glob("alpasim/wizard_*/generated-runtime-server.yaml")
        return int(file.read_text().split("port:")[1])

    def container(self, name):
        (file,) = self.directory.glob("alpasim/wizard_*/docker-compose.pids")
        return json.loads(file.read_text())[name]

    def living(self):
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("ALPAGYM_TEST_MARK") == self.mark and process.pid != os.getpid():
                    found.append(process)
        return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def begin(tmp_path, alpasim_machine, checkout, monkeypatch):
    """Starts runs; whatever a failing test leaves is killed."""
    _, mark = alpasim_machine
    monkeypatch.setenv("ALPAGYM_TEST_WIZARD", "fake")
    begun = []

    def begin(*words, root=None, place=None):
        run = Run(
            root or tmp_path / "runs",
            mark,
            [*RUN, f"alpasim.repo_path={checkout}", f"alpasim.checkout_cache={tmp_path}", *words],
            place,
        )
        begun.append(run)
        return run

    yield begin
    for run in begun:
        for process in run.living():
            with contextlib.suppress(psutil.Error):
                process.kill()
        run.process.communicate()


@pytest.fixture
def decoy():
    """Somebody else's trainer of the same name."""
    clean = {name: value for name, value in os.environ.items() if name != "ALPAGYM_TEST_MARK"}
    with subprocess.Popen(
        [sys.executable, "-c", "import threading; threading.Event().wait()", "trainer.py"], env=clean
    ) as process:
        yield process
        assert process.poll() is None, "the decoy was touched"
        process.kill()


def is_free(port):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
    return True


def test_a_whole_run_ends_with_nothing_left_and_paths_arrive_unchanged(begin, decoy, tmp_path, monkeypatch):
    monkeypatch.setenv("ALPAGYM_TEST_TRAINER", "done")
    run = begin(root=tmp_path / WEIRD)
    code, out, err = run.end(60)
    assert (code, err) == (0, "")
    assert "trainer: works" in out
    assert run.living() == []
    assert is_free(run.port())
    assert run.state()["phase"] == "ended"
    assert Registry(run.directory).all() == []
    received = json.loads((run.directory / "alpasim" / "wizard_0" / "received.json").read_text())
    assert received["config"]["wizard.log_dir"] == str(run.directory / "alpasim" / "wizard_0")
    assert "launcher: composing" in (run.directory / "logs" / "alpasim.log").read_text()
    # Compose would name each of our projects wizard_0: two runs would stop each other's containers.
    told = [json.loads(line) for line in (tmp_path / "docker.log").read_text().splitlines()]
    (down,) = [words for words in told if "down" in words]
    assert down[:5] == [
        "compose",
        "-p",
        received["project"],
        "-f",
        str(run.directory / "alpasim/wizard_0/docker-compose.yaml"),
    ]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGUSR1, 138, marks=pytest.mark.slow),
    ],
)
def test_a_signal_keeps_a_checkpoint_and_ends_everything(begin, decoy, number, code, monkeypatch):
    run = begin()
    run.until("begun")
    began_s = time.monotonic()
    run.process.send_signal(number)
    found, _, err = run.end()
    assert time.monotonic() - began_s < 20
    assert (found, err) == (code, "")
    assert (run.directory / "checkpoint").read_text() == "kept"
    assert run.living() == []
    assert is_free(run.port())
    if number == signal.SIGTERM:  # the same directory goes on, with another AlpaSim
        monkeypatch.setenv("ALPAGYM_TEST_TRAINER", "done")
        again = begin(root=run.root, place=run.directory)
        assert again.end(60)[0] == 0
        assert (run.directory / "alpasim" / "wizard_1").is_dir()


@pytest.mark.parametrize(
    "who",
    [
        pytest.param("launcher", marks=pytest.mark.slow),
        "runtime",
        pytest.param("trainer", marks=pytest.mark.slow),
    ],
)
def test_a_crash_ends_everything_and_its_cause_is_said_last(begin, decoy, who):
    run = begin()
    run.until("begun")
    began_s = time.monotonic()
    if who == "runtime":
        pid = run.container("runtime-0")
    else:
        names = {child["name"]: child["pid"] for child in run.state()["children"]}
        pid = names["alpasim" if who == "launcher" else who]
    os.kill(pid, signal.SIGKILL)
    code, _, err = run.end()
    assert time.monotonic() - began_s < 20
    assert code == 1
    said = {
        "launcher": "error: AlpaSim was ended by SIGKILL",
        "runtime": f"error: AlpaSim's runtime at 127.0.0.1:{run.port()} no longer listens",
        "trainer": "error: the trainer was ended by SIGKILL",
    }[who]
    assert err.startswith(said)
    assert run.state()["cause"] in err
    assert run.living() == []
    assert is_free(run.port())


@pytest.mark.slow
def test_a_trainer_that_gives_up_is_quoted(begin, monkeypatch):
    monkeypatch.setenv("ALPAGYM_TEST_TRAINER", "crash")
    run = begin()
    code, _, err = run.end(60)
    assert code == 3
    assert err.startswith("error: the trainer ended with code 3; last in ")
    assert err.endswith("error: the weights are all NaN\n")
    assert run.living() == []


@pytest.mark.slow
def test_a_trainer_that_does_not_stop_is_killed_after_its_grace(begin, monkeypatch):
    monkeypatch.setenv("ALPAGYM_TEST_TRAINER", "stubborn")
    run = begin("deploy.grace_s=1", "alpasim.stop_timeout_s=1")
    run.until("begun")
    run.process.send_signal(signal.SIGTERM)
    code, out, _ = run.end()
    assert code == 143
    assert "did not end within deploy.grace_s = 1 s" in out
    assert run.living() == []


def test_what_a_killed_supervisor_leaves_is_cleared_up(begin, decoy, monkeypatch):
    monkeypatch.setenv("ALPAGYM_TEST_TRAINER", "stubborn")
    run = begin()
    run.until("begun")
    run.process.kill()
    run.process.wait()
    alpagym = [sys.executable, "-m", "alpagym_host.cli"]
    status = subprocess.run([*alpagym, "status", run.directory], capture_output=True, text=True)
    assert "train: killed" in status.stdout
    began_s = time.monotonic()
    clean = subprocess.run([*alpagym, "clean", run.directory], capture_output=True, text=True)
    assert time.monotonic() - began_s < 20
    assert (clean.returncode, clean.stderr) == (0, "")
    assert clean.stdout.startswith("ended ")
    assert run.living() == []
    assert is_free(run.port())


@pytest.mark.slow
def test_a_run_is_stopped_from_another_terminal(begin):
    run = begin()
    run.until("begun")
    alpagym = [sys.executable, "-m", "alpagym_host.cli"]
    status = subprocess.run([*alpagym, "status", run.directory], capture_output=True, text=True).stdout
    assert "train: running" in status
    assert f"endpoint   alpasim-0 at 127.0.0.1:{run.port()}: scenes: 1, 16 at once; answers" in status
    refused = subprocess.run([*alpagym, "clean", run.directory], capture_output=True, text=True)
    assert (refused.returncode, "is running; stop it: alpagym stop" in refused.stderr) == (2, True)
    locked = begin(root=run.root, place=run.directory)
    assert "is in use by process" in locked.end(30)[2]
    stop = subprocess.run([*alpagym, "stop", run.directory], capture_output=True, text=True)
    assert stop.stdout.startswith("stopped; to continue:")
    assert run.living() == []  # "stopped" is said when it is
    assert run.end()[0] == 143


@pytest.mark.parametrize(
    ("mode", "words", "said"),
    [
        ("die", (), "error: AlpaSim did not start: its launcher ended with code 1"),
        pytest.param(
            "silent",
            ("alpasim.startup_timeout_s=3",),
            "error: AlpaSim is not ready after 3 s (alpasim.startup_timeout_s)",
            marks=pytest.mark.slow,
        ),
        pytest.param("deaf", ("alpasim.startup_timeout_s=3",), "accepts no connection", marks=pytest.mark.slow),
    ],
)
def test_an_alpasim_that_does_not_come_up_ends_the_run(begin, mode, words, said, monkeypatch):
    monkeypatch.setenv("ALPAGYM_TEST_WIZARD", mode)
    run = begin(*words)
    code, _, err = run.end(40)
    assert code == 1
    assert said in err
    if mode == "die":  # the cause, not the 300 lines after it
        assert "renderer-0  | RuntimeError: CUDA error: out of memory" in err
        assert len(err.splitlines()) <= 14
    assert run.living() == []


@pytest.mark.slow
def test_scenes_that_alpasim_does_not_offer_are_counted(begin, checkout, monkeypatch):
    # The launcher takes the scene, its runtime does not list it.
    launcher = checkout / "src/wizard/alpasim_wizard/__main__.py"
    launcher.write_text(launcher.read_text().replace('config.get("scenes.scene_ids", ', 'config.get("no", '))
    monkeypatch.setenv("ALPAGYM_TEST_TRAINER", "done")
    run = begin("dataset.scene_ids=[clip-c,clip-a]")
    code, _, err = run.end(40)
    assert code == 1
    assert "2 scenes needed, 2 there; missing: clip-c" in err
