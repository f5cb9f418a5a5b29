"""`alpagym check`: what it says of a sound environment, and that it sees each fault."""

from __future__ import annotations

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from typer.testing import CliRunner

from alpagym_host import check
from alpagym_host.check import Subject, check_environment, parse_arguments
from alpagym_host.cli import app
from alpagym_plugins import ConfigError

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),
]


class Counter(gym.Env):
    """Counts steps; each fault breaks one promise."""

    metadata = {"render_modes": []}  # noqa: RUF012
    observation_space = gym.spaces.Box(0, 1000, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    hoard: list[np.ndarray] = []  # noqa: RUF012

    def __init__(self, fault: str = "", render_mode: str | None = None):
        self.fault, self.render_mode, self.total = fault, render_mode, 0
        self.buffer = np.zeros(1, np.float32)

    def observe(self):
        if self.fault == "shared":
            self.buffer[0] = self.count
            return self.buffer
        return np.array([self.count], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = float(self.np_random.integers(5))
        if self.fault == "leaks":
            self.hoard.append(np.ones(40_000))
        return self.observe(), {}

    def step(self, action):
        self.count += 1
        self.total += 1
        info = {"total": self.total} if self.fault == "remembers" else {}
        reward = float(action[0]) if self.fault != "reward" else np.float32(action[0])
        return self.observe(), reward, False, False, info


@pytest.fixture(autouse=True)
def registered():
    gym.register("test/Counter-v0", lambda **kwargs: Counter(**kwargs))
    yield
    del gym.registry["test/Counter-v0"]
    Counter.hoard.clear()


def states(fault: str, monkeypatch, episodes: int = 0) -> dict[str, str]:
    # A callable as entry point has no JSON; that is not what is tested here.
    monkeypatch.delitem(check.CHECKS, "spec")
    subject = Subject("test/Counter-v0", {"fault": fault}, episodes, seconds=0.01)
    return {found.check: found.state for found in check_environment(subject)}


def test_a_sound_environment_passes_everything(monkeypatch):
    found = states("", monkeypatch, episodes=600)
    assert set(found.values()) == {"ok"}, found


@pytest.mark.parametrize(
    ("fault", "fails"),
    [
        ("shared", {"gymnasium's checker", "ownership"}),
        ("remembers", {"replay"}),
        ("reward", {"stable-baselines3's checker"}),
    ],
)
def test_a_fault_is_seen(fault, fails, monkeypatch):
    found = states(fault, monkeypatch)
    assert fails <= {name for name, state in found.items() if state == "failed"}, found


def test_a_leak_is_seen(monkeypatch):
    # 400 episodes of 0.32 MB after the first 200 are 128 MB
    assert states("leaks", monkeypatch, episodes=600)["leak"] == "failed"


def test_our_environments_pass(monkeypatch):
    # Speed and the checkers that load torch are measured elsewhere.
    for name in ("throughput", "stable-baselines3's checker"):
        monkeypatch.delitem(check.CHECKS, name)
    done = CliRunner().invoke(app, ["check", "alpagym_runtime:alpagym/Embedded-v0", "scenes=6", "--episodes", "0"])
    assert done.exit_code == 0, done.output
    assert "its own gives the bytes of SyncVectorEnv" in done.output
    assert "all checks passed" in done.output
    assert [line.split()[0] for line in done.output.splitlines() if "leak" in line] == ["skipped"]


def test_a_failure_has_exit_code_1(monkeypatch):
    def broken(subject):
        raise AssertionError("as expected")

    monkeypatch.setattr(check, "CHECKS", {"broken": broken})
    done = CliRunner().invoke(app, ["check", "alpagym_runtime:alpagym/Embedded-v0"])
    assert (done.exit_code, "as expected" in done.output, "1 checks failed" in done.output) == (1, True, True)


@pytest.mark.parametrize(
    ("env_id", "arguments", "words"),
    [
        ("alpagym_runtime:alpagym/Embeded-v0", {}, "Embeded"),
        ("no_such_package:a/B-v0", {}, "no_such_package"),
        ("alpagym_runtime:alpagym/Embedded-v0", {"horizn": 3}, "horizn"),
        ("alpagym_runtime:alpagym/Embedded-v0", {"horizon": 0}, "horizon"),
    ],
)
def test_what_cannot_be_made_is_refused_before_any_check(env_id, arguments, words):
    with pytest.raises(ConfigError, match=words):
        next(check_environment(Subject(env_id, arguments)))


def test_arguments_are_yaml_values():
    assert parse_arguments(["a=1", "b=[front]", "c=null", "d=x"]) == {"a": 1, "b": ["front"], "c": None, "d": "x"}
    for bad in ("a", "=1", "a b=1", "a=[1"):
        with pytest.raises(ConfigError):
            parse_arguments([bad])


def test_a_missing_checker_is_skipped(monkeypatch):
    monkeypatch.setattr(check, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None)))
    with pytest.raises(check.Skipped, match="not installed"):
        check.CHECKS["stable-baselines3's checker"](Subject("test/Counter-v0", {}))
