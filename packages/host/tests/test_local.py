import io
import os
import signal
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest
from rich.console import Console

from alpagym_host import run_dir
from alpagym_host.compose import compose
from alpagym_host.launch.local import launch
from alpagym_plugins import ConfigError, PluginError


@dataclass
class FakeRun:
    """A run that does what a test says."""

    signals: tuple[int, ...] = ()
    error: Exception | None = None
    seen: list = field(default_factory=list)

    def __call__(self, config, directory, *, reporter, stop_requested):
        self.reporter, self.stop_requested = reporter, stop_requested
        return self

    def train(self):
        return self._run("train")

    def evaluate(self):
        return self._run("evaluate")

    def rollout(self):
        return self._run("rollout")

    def _run(self, command):
        self.seen.append(command)
        self.reporter.stage("grpo", 1, "updates")
        if self.error is not None:
            raise self.error
        for number in self.signals:
            os.kill(os.getpid(), number)
        score = {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 8}
        summary = {"evaluations": {"final": {"driving_score": score}}}
        return SimpleNamespace(completed=not self.stop_requested(), summary=summary)


@pytest.fixture(scope="module")
def config():
    return compose([])


@pytest.fixture
def start(config, tmp_path):
    def start(run, command="train"):
        config.run.root = str(tmp_path)
        made = run_dir.create(config, command)
        file = io.StringIO()
        code = launch(config, made, command, Console(file=file), run)
        return code, file.getvalue(), made

    return start


def test_a_whole_run_prints_directory_result_and_next_step(start):
    run = FakeRun()
    code, text, made = start(run)
    assert (code, run.seen) == (0, ["train"])
    for line in (f"run directory: {made}", "0.500 [0.400, 0.600]", f"results: {made}/summary.json"):
        assert line in text
    assert f"alpagym evaluate --run {made}" in text


def test_evaluate_evaluates(start):
    run = FakeRun()
    code, text, _ = start(run, "evaluate")
    assert (code, run.seen) == (0, ["evaluate"])
    run = FakeRun()
    assert start(run, "rollout")[0] == 0
    assert run.seen == ["rollout"]
    assert "--run" not in text


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138), (signal.SIGHUP, 129)]
)
def test_a_signal_stops_in_order_and_says_how_to_go_on(start, number, code, request):
    if signal.getsignal(number) is signal.SIG_IGN:  # these tests were started by nohup
        request.addfinalizer(partial(signal.signal, number, signal.SIG_IGN))
        signal.signal(number, signal.SIG_DFL)
    before = signal.getsignal(number)
    found, text, made = start(FakeRun((number,)))
    assert found == code
    assert "stopping after the work in hand" in text
    assert f"alpagym resume {made}" in text
    assert "0.500" in text
    assert signal.getsignal(number) is before


def test_a_second_interrupt_stops_at_once(start):
    code, text, made = start(FakeRun((signal.SIGINT, signal.SIGINT)))
    assert code == 130
    assert f"to continue from the last checkpoint:\n  alpagym resume {made}" in text


def test_a_second_process_cannot_work_in_the_same_directory(config, tmp_path):
    with run_dir.locked(tmp_path), pytest.raises(ConfigError, match="in use"):
        launch(config, tmp_path, "train", Console(file=io.StringIO()), FakeRun())


def test_missing_torch_names_the_extra(start):
    with pytest.raises(PluginError, match=r"pip install 'alpagym-runtime\[torch\]'"):
        start(FakeRun(error=ModuleNotFoundError("No module named 'torch'", name="torch")))


def test_the_lock_is_free_after_a_failure(start, tmp_path):
    with pytest.raises(RuntimeError, match="boom"):
        start(FakeRun(error=RuntimeError("boom")))
    with run_dir.locked(tmp_path / "latest"):
        pass


def test_a_hang_up_that_nohup_ignores_stays_ignored(start):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert start(FakeRun((signal.SIGHUP,)))[0] == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("requeues", "restarts", "said"),
    [
        (0, "0", ""),  # opt-in
        (2, "0", "job 77 is queued again"),
        (2, "1", "job 77 is queued again"),
        (2, "2", "not queued again: that was start 2 of deploy.requeues=2"),
    ],
)
def test_a_job_that_slurm_ends_is_queued_again_so_often(start, config, tools, monkeypatch, requeues, restarts, said):
    tools("scontrol", '[ "$1 $2" = "requeue 77" ]')
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    monkeypatch.setattr(config.deploy, "requeues", requeues)
    code, text, _ = start(FakeRun((signal.SIGUSR1,)))
    assert code == 138
    assert (said in text) if said else ("queued" not in text)


def test_a_job_that_is_cancelled_is_not_queued_again(start, config, tools, monkeypatch):
    tools("scontrol")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setattr(config.deploy, "requeues", 5)
    assert "queued" not in start(FakeRun((signal.SIGTERM,)))[1]
