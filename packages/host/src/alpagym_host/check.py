"""`alpagym check ENV_ID`: whether an environment keeps Gymnasium's promises, for ours and for those of plugins.

Each check is a function of the subject that returns what it saw, or raises. Episodes are cut off after `LIMIT` steps by
Gymnasium's own time limit, so any environment ends some.
"""

from __future__ import annotations

import gc
import importlib.util
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import psutil  # type: ignore[import-untyped]
import yaml  # type: ignore[import-untyped]
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env
from rich.console import Console
from rich.text import Text

from alpagym_plugins import ConfigError
from alpagym_runtime.testing.vector_env import MODES, assert_equal, difference, trace

LIMIT = 10
WARM_UP, WINDOW = 200, 200
SEEDS = 50
GROWTH_MB, STRAYS, SLOWER = 50.0, 5, 1.5


class Skipped(Exception):
    """A check that does not apply; the text says why."""


@dataclass(frozen=True)
class Finding:
    """What a check saw: state ok | failed | skipped."""

    check: str
    state: str
    detail: str
    seconds: float


@dataclass
class Subject:
    """An environment to check: its id (`package:namespace/Name-v0` imports the package first) and arguments."""

    env_id: str
    arguments: dict[str, Any]
    episodes: int = 2000
    seconds: float = 3.0
    slots: int = 3

    def make(self, **arguments: Any) -> gymnasium.Env[Any, Any]:
        """A single environment."""
        return gymnasium.make(self.env_id, **{**self.arguments, **arguments})

    @property
    def native(self) -> bool:
        """Whether it has a vector environment of its own."""
        return gymnasium.spec(self.env_id.rpartition(":")[2]).vector_entry_point is not None

    def vector(self, kind: str, mode: str, slots: int, **more: Any) -> Any:
        """A vector environment, Gymnasium's (`sync`) or its own (`native`)."""
        arguments = {**self.arguments, **more}
        if kind == "native":
            return gymnasium.make_vec(self.env_id, slots, autoreset_mode=mode, **arguments)
        options = {"autoreset_mode": MODES[mode]}
        return gymnasium.make_vec(self.env_id, slots, vectorization_mode="sync", vector_kwargs=options, **arguments)


def check_environment(subject: Subject) -> Iterator[Finding]:
    """Run all checks, each as it is asked for; one that fails does not stop the others.

    Raises:
        ConfigError: there is no such environment, or its arguments are wrong.

    """
    _first_make(subject)
    for name, check in CHECKS.items():
        begun = time.monotonic()
        try:
            state, detail = "ok", check(subject)
        except Skipped as reason:
            state, detail = "skipped", str(reason)
        except Exception as err:
            state, detail = "failed", f"{type(err).__name__}: {err}"
        yield Finding(name, state, detail, time.monotonic() - begun)


def report(subject: Subject, console: Console) -> bool:
    """Print each finding as it comes; whether none failed."""
    console.print(f"{subject.env_id} {subject.arguments or ''}", markup=False, highlight=False)
    colours = {"ok": "green", "failed": "red", "skipped": "yellow"}
    failed = 0
    for found in check_environment(subject):
        failed += found.state == "failed"
        line = Text(f"{found.state:8}", style=colours[found.state])
        line.append(f"{found.check:28}{found.seconds:6.1f} s  {found.detail}", style="default")
        console.print(line, soft_wrap=True)
    console.print(f"{failed} checks failed" if failed else "all checks passed", highlight=False)
    return not failed


def parse_arguments(items: list[str]) -> dict[str, Any]:
    """`key=value` with YAML values, as keyword arguments of the environment."""
    arguments = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"must be KEY=VALUE, got {item!r}", key="KEY=VALUE")
        try:
            arguments[key] = yaml.safe_load(value)
        except yaml.YAMLError as err:
            raise ConfigError(f"{value!r} is no YAML value: {err}", key=key) from err
    return arguments


def _first_make(subject: Subject) -> None:
    try:
        subject.make().close()
    except (gymnasium.error.Error, ImportError, TypeError) as err:
        raise ConfigError(f"{subject.env_id} cannot be made: {err}", key="ENV_ID") from err


# ---------------------------------------------------------------- the checks


def _spec(subject: Subject) -> str:
    env = subject.make()
    assert env.spec is not None
    text = env.spec.to_json()
    again = gymnasium.make(EnvSpec.from_json(text))
    assert (again.observation_space, again.action_space) == (env.observation_space, env.action_space)
    env.close()
    again.close()
    return f"{len(text)} characters of JSON make the same spaces"


def _gymnasium(subject: Subject) -> str:
    env = subject.make()
    with closing(env), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        check_env(env.unwrapped)
    return "no warning"


def _stable_baselines(subject: Subject) -> str:
    if importlib.util.find_spec("stable_baselines3") is None:
        raise Skipped("stable-baselines3 is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from stable_baselines3.common.env_checker import check_env as check_sb3
    env = subject.make()
    space = env.observation_space
    if isinstance(space, gymnasium.spaces.Dict) and any(
        isinstance(part, gymnasium.spaces.Dict) for part in space.values()
    ):
        raise Skipped("a Dict in a Dict, which Stable-Baselines3 does not read")
    with closing(env), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        check_sb3(env.unwrapped)
    texts = [str(warning.message) for warning in heard if issubclass(warning.category, UserWarning)]
    wrong = [text for text in texts if "unconventional shape" not in text]
    assert not wrong, wrong[0]
    return f"{len(texts)} allowed warnings: matrices" if texts else "no warning"


def _actions(space: gymnasium.Space[Any], seed: int, count: int) -> list[Any]:
    space.seed(seed)
    return [space.sample() for _ in range(count)]


def _each(env: gymnasium.Env[Any, Any], seed: int, actions: list[Any]) -> Iterator[Any]:
    yield env.reset(seed=seed)
    for action in actions:
        result = env.step(action)
        yield result
        if result[2] or result[3]:
            yield env.reset()


def _replay(subject: Subject) -> str:
    env, fresh = subject.make(), subject.make()
    actions = _actions(env.action_space, 3, 200)
    with closing(env), closing(fresh):
        expected = list(_each(env, 11, actions))
        others = [list(_each(env, seed, actions[:7])) for seed in (1, 2, 3)]
        assert_equal(list(_each(env, 11, actions)), expected, "the same environment, seed 11 again")
        assert_equal(list(_each(fresh, 11, actions)), expected, "another environment, seed 11")
    alike = all(difference(other[0], expected[0]) is None for other in others)
    return "200 steps from seed 11, three times the same bytes" + ("; all seeds start alike" if alike else "")


def _ownership(subject: Subject) -> str:
    env, other = subject.make(), subject.make()
    actions = _actions(env.action_space, 4, 40)
    with closing(env), closing(other):
        kept = list(_each(env, 5, actions))
        assert_equal(kept, [_frozen(one) for one in _each(other, 5, actions)], "what was handed out has changed later")
    return f"{len(kept)} results stay what they were"


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _frozen(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_frozen(part) for part in value)
    return value.copy() if isinstance(value, np.ndarray) else value


def _autoreset(mode: str) -> Callable[[Subject], str]:
    def check(subject: Subject) -> str:
        kinds = ("native", "sync") if subject.native else ("sync",)
        results = []
        for kind in kinds:
            with closing(subject.vector(kind, mode, subject.slots, max_episode_steps=LIMIT)) as envs:
                assert envs.metadata["autoreset_mode"] is MODES[mode], f"{kind}: metadata say {envs.metadata}"
                assert envs.autoreset_mode is MODES[mode], f"{kind}: the attribute says {envs.autoreset_mode}"
                actions = np.stack(_actions(envs.action_space, 5, 3 * LIMIT))
                results.append(list(trace(envs, actions, 7)))
                _check_tuples(mode, results[-1], kind)
                if mode == "disabled":
                    _refuses_ended(envs, actions)
        if len(results) == 2:
            assert_equal(results[0], results[1], "its own vector environment and SyncVectorEnv")
        what = (
            "its own gives the bytes of SyncVectorEnv" if subject.native else "SyncVectorEnv (it has none of its own)"
        )
        return f"{3 * LIMIT} steps of {subject.slots} slots, {what}"

    return check


def _check_tuples(mode: str, results: list[Any], kind: str) -> None:
    steps = [result for result in results if len(result) == 5]
    assert any((t | u).any() for _, _, t, u, _ in steps), f"{kind}: no episode has ended in {len(steps)} steps"
    if mode == "same_step":
        for _, _, terminated, truncated, info in steps:
            over = terminated | truncated
            final = info.get("_final_obs", np.zeros_like(over))
            assert (final == over).all(), f"{kind}: final_obs is there for {final}, ended are {over}"
        return
    for _, _, _, _, info in steps:
        assert "final_obs" not in info, f"{kind}: final_obs does not belong to {mode}"
    if mode == "next_step":
        for (_, _, terminated, truncated, _), (_, rewards, after_t, after_u, _) in pairwise(steps):
            over = terminated | truncated
            quiet = not rewards[over].any() and not (after_t | after_u)[over].any()
            assert quiet, f"{kind}: the step after an end is not a plain reset"


def _refuses_ended(envs: Any, actions: Any) -> None:
    envs.reset(seed=7)
    for action in actions:
        _, _, terminated, truncated, _ = envs.step(action)
        if (terminated | truncated).any():
            try:
                envs.step(action)
            except Exception:
                return
            raise AssertionError("a step of an ended slot was accepted")
    raise AssertionError(f"no episode has ended in {len(actions)} steps")


def _leak(subject: Subject) -> str:
    if subject.episodes < WARM_UP + 2 * WINDOW:
        raise Skipped(f"needs at least {WARM_UP + 2 * WINDOW} episodes, got {subject.episodes}")
    process = psutil.Process()
    env = subject.make(max_episode_steps=LIMIT)
    seconds = np.zeros(subject.episodes)
    actions = _actions(env.action_space, 6, LIMIT)
    before = (0.0, 0, 0)
    for episode in range(subject.episodes):
        if episode == WARM_UP:
            before = _usage(process)
        begun = time.process_time()
        env.reset(seed=episode % SEEDS)
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                break
        seconds[episode] = time.process_time() - begun
    after = _usage(process)
    env.close()
    growth, threads, files = (b - a for a, b in zip(before, after, strict=True))
    first, last = (float(np.median(part)) for part in (seconds[WARM_UP : WARM_UP + WINDOW], seconds[-WINDOW:]))
    seen = (
        f"{subject.episodes} episodes: {growth:+.1f} MB, {threads:+d} threads, {files:+d} files after the first "
        f"{WARM_UP}; CPU time an episode {1e3 * first:.2f} ms, at the end {1e3 * last:.2f} ms"
    )
    assert growth < GROWTH_MB, seen
    assert abs(threads) <= STRAYS, seen
    assert abs(files) <= STRAYS, seen
    assert last <= SLOWER * first, seen
    return seen


def _usage(process: psutil.Process) -> tuple[float, int, int]:
    gc.collect()
    return process.memory_info().rss / 1e6, process.num_threads(), process.num_fds()


def _throughput(subject: Subject) -> str:
    env = subject.make()
    action = _actions(env.action_space, 0, 1)[0]

    def single() -> int:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
        return 1

    env.reset(seed=1)
    rates = [f"single {_rate(single, subject.seconds):,.0f} steps a CPU s"]
    env.close()
    for slots in (16, 256) if subject.native else (16,):
        kind = "native" if subject.native else "sync"
        with closing(subject.vector(kind, "next_step", slots)) as envs:
            envs.reset(seed=1)
            actions = envs.action_space.sample()

            def vector(envs: Any = envs, actions: Any = actions) -> int:
                envs.step(actions)
                return int(envs.num_envs)

            rates.append(f"{kind} × {slots} {_rate(vector, subject.seconds):,.0f}")
    return ", ".join(rates)


def _rate(step: Callable[[], int], seconds: float) -> float:
    """The best of three spans: in the first ones scenes are made and kernels compiled."""
    best = 0.0
    for _ in range(3):
        begun, steps = time.process_time(), 0
        while time.process_time() - begun < seconds:
            steps += step()
        best = max(best, steps / max(time.process_time() - begun, 1e-9))
    return best


CHECKS: dict[str, Callable[[Subject], str]] = {
    "spec": _spec,
    "gymnasium's checker": _gymnasium,
    "stable-baselines3's checker": _stable_baselines,
    "replay": _replay,
    "ownership": _ownership,
    "autoreset next_step": _autoreset("next_step"),
    "autoreset same_step": _autoreset("same_step"),
    "autoreset disabled": _autoreset("disabled"),
    "leak": _leak,
    "throughput": _throughput,
}
