import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from typer.testing import CliRunner

from alpagym_host import run_dir, run_state
from alpagym_host.cli import app
from alpagym_host.compose import compose
from alpagym_host.leftovers import clear
from alpagym_host.run_state import RunState, condition, read_state, tracked
from alpagym_plugins import ConfigError
from alpagym_runtime.children import Identity, identify


@pytest.fixture(scope="module")
def composed():
    return compose([])


@pytest.fixture
def directory(composed, tmp_path):
    composed.run.root = str(tmp_path / "runs")
    return run_dir.create(composed, "train")


def call(*words):
    """Exit code and output of a command; its errors are raised."""
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=True)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def write_state(directory, **changes):
    """A state that another process wrote."""
    values = {"host": "node-7", "process": vars(identify(os.getpid())), "phase": "train", "since": 1.0, **changes}
    state = {"token": "", "children": [], "containers": [], "facts": {}, "code": None, "cause": "", **values}
    (directory / "state.json").write_text(json.dumps(state))
    return read_state(directory)


# ---------------------------------------------------------------- state


def test_a_run_that_is_held_is_running_and_then_has_ended(directory):
    assert condition(directory, read_state(directory)) == "new"
    with tracked(directory, "train") as tracker:
        assert condition(directory, read_state(directory)) == "running"
        tracker.update(code=0)
    assert condition(directory, read_state(directory)) == "completed"


def test_what_raises_is_the_cause_without_its_secrets(directory, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")
    with pytest.raises(RuntimeError), tracked(directory, "train"):
        raise RuntimeError("refused hf_0123456789abcdef")
    state = read_state(directory)
    assert (condition(directory, state), state.code, state.cause) == ("failed", 1, "refused ***")


def test_a_run_that_was_stopped_is_told_from_one_that_failed(directory):
    with tracked(directory, "train") as tracker:
        tracker.update(code=143)
    assert condition(directory, read_state(directory)) == "stopped"


def test_a_process_that_is_gone_was_killed(directory):
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        gone = identify(process.pid)
    me = RunState(run_state.socket.gethostname(), gone, phase="train")
    assert condition(directory, me) == "killed"


def test_a_number_that_another_process_has_now_is_no_sign_of_life(directory):
    mine = identify(os.getpid())
    state = RunState(run_state.socket.gethostname(), Identity(mine.pid, "1", mine.boot), phase="train")
    assert condition(directory, state) == "killed"


def test_another_machines_run_is_judged_by_its_beat(directory):
    state = write_state(directory)
    assert condition(directory, state) == "running"
    past_s = time.time() - 120.0
    os.utime(directory / "state.json", (past_s, past_s))
    assert condition(directory, state) == "lost"


def test_a_state_that_is_torn_is_none(directory):
    (directory / "state.json").write_text('{"host": "a"')
    assert read_state(directory) is None


# ---------------------------------------------------------------- commands


def test_runs_are_listed_newest_first_with_how_they_stand(composed, directory):
    with tracked(directory, "train") as tracker:
        tracker.update(code=0)
    (directory / "summary.json").write_text(
        json.dumps(
            {
                "status": "completed",
                "stage": "grpo",
                "step": 40,
                "evaluations": {"final": {"driving_score": {"mean": 0.61}}},
            }
        )
    )
    os.utime(directory / "config.yaml", (1.0, 1.0))
    newest = run_dir.create(composed, "evaluate")
    code, text = call("list", directory.parent)
    lines = text.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines] == ["run", newest.name, directory.name]
    assert lines[1].split()[1:3] == ["evaluate", "new"]
    assert lines[2].split()[1:7] == ["train", "completed", "grpo", "step", "40", "0.610"]
    assert "1 older ones" in call("list", directory.parent, "--limit", 1)[1]


def test_no_runs_are_said(tmp_path):
    assert call("list", tmp_path / "none") == (0, f"no runs in {tmp_path / 'none'}\n")


def test_status_of_a_failed_run_names_the_cause_and_how_to_go_on(directory):
    with tracked(directory, "train") as tracker:
        tracker.update(code=1, cause="the trainer ended with code 1")
    (directory / "metrics.jsonl").write_text('{"stage": "grpo", "step": 7}\n')
    code, text = call("status", directory)
    assert code == 0
    assert text.splitlines()[1:] == [
        "train: failed",
        "progress   grpo step 7",
        "cause      the trainer ended with code 1",
        f"to go on   alpagym resume {directory}",
    ]


def test_logs_are_told_apart_and_chosen_by_the_beginning_of_their_name(directory):
    for path, text in (
        ("logs/alpasim.log", "one\ntwo\nthree\n"),
        ("logs/trainer.log", "loss\n"),
        ("alpasim/wizard_0/txt-logs/runtime_worker_0.log", "rollout\n"),
    ):
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text)
    _, everything = call("logs", directory, "-n", 1)
    assert [line for line in everything.splitlines() if not line.startswith("==")] == ["three", "loss", "rollout"]
    assert call("logs", directory, "alpa", "-n", "0") == (0, "one\ntwo\nthree\n")
    with pytest.raises(ConfigError, match="has no log 'x'; there are: alpasim, trainer, wizard_0/runtime_worker_0"):
        call("logs", directory, "x")


def test_following_ends_with_the_run(directory):
    (directory / "logs").mkdir()
    log = directory / "logs" / "trainer.log"
    log.write_text("first\n")
    going, release = threading.Event(), threading.Event()

    def work():
        with tracked(directory, "train") as tracker:
            going.set()
            release.wait(20)
            with log.open("a") as file:
                file.write("second\n")
            tracker.update(code=0)

    thread = threading.Thread(target=work)
    thread.start()
    going.wait(20)
    threading.Timer(0.5, release.set).start()
    assert call("logs", directory, "--follow") == (0, "first\ntrainer: second\n")
    thread.join()


HOLD = """
import signal, sys, threading
from pathlib import Path
from alpagym_host.run_state import tracked
asked = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: None if sys.argv[2:] else asked.set())
with tracked(Path(sys.argv[1]), "train") as tracker:
    print("held", flush=True)
    while not asked.wait(0.05):
        pass
    tracker.update(code=143)
"""


def test_stop_waits_until_the_run_has_ended(directory):
    with subprocess.Popen([sys.executable, "-c", HOLD, directory], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        # Reap it as a shell would: a zombie has not ended for its parent.
        reaper = threading.Thread(target=process.wait)
        reaper.start()
        code, text = call("stop", directory)
        reaper.join(20)
    assert (code, text) == (0, f"stopped; to continue:\n  alpagym resume {directory}\n")
    assert condition(directory, read_state(directory)) == "stopped"
    assert call("stop", directory)[1] == f"{directory} is not running: stopped\n"


def test_a_run_that_does_not_stop_is_said_and_forced(directory):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, directory, "deaf"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        code, text = call("stop", directory, "--timeout-s", 0.3)
        assert code == 1
        assert f"still running after 0.3 s: process {process.pid}" in text
        with pytest.raises(ConfigError, match="is running; stop it: alpagym stop"):
            call("clean", directory)
        reaper = threading.Thread(target=process.wait)
        reaper.start()
        assert call("clean", "--force", directory)[0] == 0
        reaper.join(20)
        assert process.returncode == -signal.SIGKILL


def test_a_run_on_another_machine_is_left_to_it(directory):
    write_state(directory)
    for command in (["stop"], ["clean", "--force"]):
        with pytest.raises(ConfigError, match="node-7"):
            call(*command, directory)


def test_nothing_is_cleared_of_a_run_that_ended_by_itself(directory):
    with subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"]) as other:
        children = [{"name": "alpasim", "argv": [], "log": None, **vars(identify(other.pid))}]
        write_state(directory, host=run_state.socket.gethostname(), phase="ended", code=0, token="t", children=children)
        assert clear(directory, print) == 0
        assert call("clean", directory) == (0, "nothing was left\n")
        assert other.poll() is None
        other.kill()
