import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from alpagym_runtime.children import OWNERS, Children, Identity, end, family, identify

SLEEP = "import threading; threading.Event().wait()"
DEAF = "import signal, threading; signal.signal(signal.SIGTERM, signal.SIG_IGN); threading.Event().wait()"
# Starts a process in another session, says its number, and ends: an orphan that left its group.
LEAVES = f"""
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", {DEAF!r}], start_new_session=True).pid, flush=True)
"""


def python(code):
    return [sys.executable, "-c", code]


def started(log, timeout_s=20.0):
    """The number that a program has written into its log."""
    deadline_s = time.monotonic() + timeout_s
    while not (text := log.read_text()).endswith("\n"):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    return identify(int(text))


@pytest.mark.skipif(sys.platform != "linux", reason="a subreaper is Linux's")
def test_an_orphan_that_left_its_session_and_ignores_sigterm_is_ended(tmp_path):
    log = tmp_path / "log"
    with Children() as children:
        child = children.start("leaver", python(LEAVES), log=log)
        orphan = started(log)
        child.process.wait(20)
        assert orphan.alive
        children.stop([child], 0.3)
        assert not orphan.alive
    assert not Path(f"/proc/{orphan.pid}").exists()  # reaped, too


@pytest.mark.parametrize("grace_s", [0.0, 3.0])
def test_what_clears_up_after_its_owner_has_the_time_to(tmp_path, grace_s):
    # As the guardian of shared memory: in a session of its own, it acts when its owner's end of a pipe closes.
    tidied = tmp_path / "tidied"
    code = (
        "import subprocess, threading\n"
        f"guardian = ['/bin/sh', '-c', 'cat; sleep 0.2; echo done > \"$1\"', 'guardian', {str(tidied)!r}]\n"
        "process = subprocess.Popen(guardian, stdin=subprocess.PIPE, start_new_session=True)\n"
        "print(process.pid, flush=True)\nthreading.Event().wait()\n"
    )
    log = tmp_path / "log"
    with Children() as children:
        child = children.start("owner", python(code), log=log)
        started(log)
        children.stop([child], grace_s)
    assert tidied.read_text() == "done\n"


def test_other_processes_are_not_touched(tmp_path):
    with subprocess.Popen(python(SLEEP)) as decoy:
        with Children() as children:
            children.start("sleeper", python(SLEEP))
        assert decoy.poll() is None
        decoy.kill()


def test_one_child_ends_and_the_other_goes_on():
    with Children() as children:
        first, second = (children.start(name, python(SLEEP)) for name in ("first", "second"))
        children.stop([first], 5.0)
        assert (first.code, second.code) == (-signal.SIGTERM, None)


def test_a_child_that_ends_is_reported_once():
    with Children() as children:
        ends, _ = children.start("ends", python("raise SystemExit(3)")), children.start("stays", python(SLEEP))
        assert children.ended(20.0) == [ends]
        assert ends.code == 3
        assert children.ended(0.0) == []


def test_waiting_wakes_up_when_a_child_ends():
    with Children() as children:
        children.start("ends", python("import time; time.sleep(0.2)"))
        began_s = time.monotonic()
        assert len(children.ended(60.0)) == 1
        assert time.monotonic() - began_s < 30


def test_a_program_that_is_not_there_is_named():
    with Children() as children, pytest.raises(FileNotFoundError, match="cannot start trainer: .*'/no/such'"):
        children.start("trainer", ["/no/such"])


def test_arguments_arrive_as_they_are(tmp_path):
    words = ["a b", "c='d'", '"e"', "#f", "$HOME", "g\\h", ""]
    log = tmp_path / "a log"
    with Children() as children:
        child = children.start("echo", [*python("import sys; print(sys.argv[1:])"), *words], log=log)
        child.process.wait(20)
    assert log.read_text() == f"{words}\n"


def test_errors_alone_go_to_the_log_of_a_child_that_is_shown(tmp_path, capfd):
    log = tmp_path / "log"
    with Children() as children:
        code = "import sys; print('progress'); print('trouble', file=sys.stderr)"
        children.start("shown", python(code), log=log, show=True).process.wait(20)
    assert log.read_text() == "trouble\n"
    assert capfd.readouterr().out == "progress\n"


def test_an_owner_inside_an_owner_adds_its_token(monkeypatch):
    monkeypatch.setenv(OWNERS, "outer.0")
    with Children("inner") as children:
        child = children.start("sleeper", python(SLEEP))
        assert child.identity in family(["outer"])
        assert child.identity in family(["inner"])
        assert child.identity not in family(["inner.1"])


def test_a_number_that_another_process_has_got_is_not_signalled():
    with subprocess.Popen(python(SLEEP)) as other:
        mine = identify(other.pid)
        former = Identity(mine.pid, "1", mine.boot)
        assert not former.alive
        assert not former.signal(signal.SIGKILL)
        assert other.poll() is None
        assert mine.signal(signal.SIGKILL)
        assert other.wait(20) == -signal.SIGKILL


def test_what_a_killed_owner_leaves_is_found_by_its_token(tmp_path):
    owner = (
        "import sys, time\nfrom alpagym_runtime.children import Children\n"
        f"children = Children('feed')\nchild = children.start('sleeper', {python(DEAF)!r})\n"
        "print(child.pid, flush=True)\ntime.sleep(60)\n"
    )
    log = tmp_path / "log"
    with log.open("w") as file, subprocess.Popen(python(owner), stdout=file) as process:
        child = started(log)
        process.kill()
        process.wait()
    assert family(["feed"]) == [child]
    assert end(lambda: family(["feed"]), 0.2) == []
    assert not child.alive


def test_the_owner_is_not_of_its_own_family():
    assert os.getpid() not in {identity.pid for identity in family([], [identify(os.getpid())])}
