"""The same command again, and what `resume` finds."""

import json

import pytest

from alpagym_host import run_dir
from alpagym_host.cli import app
from alpagym_host.compose import compose
from alpagym_plugins import ConfigError

WORDS = [
    "simulator=toy",
    "policy=constant_speed",
    "rollout.slots=4",
    "dataset.test_scenes=2",
    "evaluation.videos=false",
]


def call(*words):
    """Exit code of a command in this process; its errors are raised."""
    try:
        app([str(word) for word in words], prog_name="alpagym", standalone_mode=False)
    except SystemExit as leave:
        return leave.code


def test_the_same_command_goes_on_in_its_directory(tmp_path, capsys):
    words = ["evaluate", *WORDS, "--directory", tmp_path / "run", "--resume"]
    call(*words)
    first = (tmp_path / "run" / "summary.json").read_bytes()
    assert json.loads(first)["status"] == "completed"
    call(*words)
    assert "already completed" in capsys.readouterr().out
    assert (tmp_path / "run" / "summary.json").read_bytes() == first


def test_another_request_does_not_go_on_in_it(tmp_path):
    directory = run_dir.create(compose(WORDS), "evaluate", tmp_path / "run")
    with pytest.raises(ConfigError, match=r"another request: run.seed is 1 there and 7 here; .*alpagym resume"):
        call("evaluate", *WORDS, "run.seed=7", "--directory", directory, "--resume")
    with pytest.raises(ConfigError, match="was made to evaluate, not to rollout"):
        call("rollout", *WORDS, "--directory", directory, "--resume")
    with pytest.raises(ConfigError, match="exists; to continue it"):
        call("evaluate", *WORDS, "--directory", directory)


def test_going_on_needs_a_directory():
    with pytest.raises(ConfigError, match="--resume: goes on with one run"):
        call("train", "--resume")
