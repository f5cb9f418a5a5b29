"""What every native vector environment passes: inherit the suite, name yours, and run pytest.

    class TestMine(VectorEnvConformance):
        env_id = "my_package:mine/World-v0"
        arguments = {"horizon": 9}

The measure is Gymnasium's own `SyncVectorEnv` over the single environment: same seeds and actions, same bytes.
"""

# ruff: noqa: D102 (the name of a test says the behaviour)

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

MODES = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP, "disabled": AutoresetMode.DISABLED}


def difference(a: Any, b: Any, place: str = "") -> str | None:
    """Where two results of `step` or `reset` differ in a type, a shape or a bit; None if nowhere."""
    if isinstance(a, Mapping) or isinstance(b, Mapping):
        if not (isinstance(a, Mapping) and isinstance(b, Mapping)) or a.keys() != b.keys():
            return f"{place}: keys {sorted(a) if isinstance(a, Mapping) else a} and {sorted(b) if b else b}"
        return _first(difference(a[name], b[name], f"{place}/{name}") for name in a)
    if isinstance(a, tuple | list):
        if not isinstance(b, tuple | list) or len(a) != len(b):
            return f"{place}: {a!r} and {b!r}"
        return _first(difference(x, y, f"{place}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)))
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)) or (a.dtype, a.shape) != (b.dtype, b.shape):
            kinds = [f"{getattr(x, 'dtype', type(x).__name__)} {np.shape(x)}" for x in (a, b)]
            return f"{place}: {kinds[0]} and {kinds[1]}"
        if a.dtype == object:
            return difference(a.tolist(), b.tolist(), place)
        return None if a.tobytes() == b.tobytes() else f"{place}: {a} and {b}"
    same = type(a) is type(b) and (a == b or (isinstance(a, float) and np.isnan(a) and np.isnan(b)))
    return None if same else f"{place}: {a!r} and {b!r}"


def _first(problems: Iterator[str | None]) -> str | None:
    return next((problem for problem in problems if problem is not None), None)


def assert_equal(a: Any, b: Any, place: str) -> None:
    """Fail with the place of the first difference."""
    problem = difference(a, b, place)
    assert problem is None, problem


def take(batch: Any, row: int) -> Any:
    """Row of a batch of observations."""
    return {k: take(v, row) for k, v in batch.items()} if isinstance(batch, Mapping) else batch[row]


def trace(envs: VectorEnv, actions: NDArray[Any], seed: Any, options: dict[str, Any] | None = None) -> Iterator[Any]:
    """Everything that comes back for actions [T,N,…]; in mode `disabled`, ended slots are reset by their mask."""
    yield envs.reset(seed=seed, options=options)
    disabled = envs.metadata["autoreset_mode"] == AutoresetMode.DISABLED
    for action in actions:
        result = envs.step(action)
        yield result
        over = result[2] | result[3]
        if disabled and over.any():
            yield envs.reset(options={"reset_mask": over})


class VectorEnvConformance:
    """See the module's text.

    Attributes:
        env_id: with the module that registers it, `package:namespace/Name-v0`.
        arguments: of the environment; with them an episode ends within `steps`, and more than one scene is drawn.
        steps: of each trace.
        slots: of each vector environment.

    """

    env_id: str
    arguments: ClassVar[dict[str, Any]] = {}
    steps: int = 30
    slots: int = 3

    def make(self, mode: Any = "next_step", **arguments: Any) -> Any:
        """The native vector environment; untyped, for Gymnasium types a list of seeds out."""
        return gymnasium.make_vec(self.env_id, self.slots, autoreset_mode=mode, **{**self.arguments, **arguments})

    def make_generic(self, kind: str, mode: str = "next_step", **arguments: Any) -> VectorEnv:
        """Gymnasium's own over the single environment; `kind` is sync or async."""
        options: dict[str, Any] = {"autoreset_mode": MODES[mode]}
        if kind == "async":
            options["context"] = "spawn"
        return gymnasium.make_vec(
            self.env_id, self.slots, vectorization_mode=kind, vector_kwargs=options, **{**self.arguments, **arguments}
        )

    def actions(self, envs: VectorEnv, seed: int = 0, scale: float = 1.0) -> NDArray[np.float32]:
        """[T,N,D] random actions."""
        shape = (self.steps, *(envs.action_space.shape or ()))
        return (np.random.default_rng(seed).uniform(-scale, scale, shape)).astype(np.float32)

    def check_equal(self, kind: str, mode: str, **arguments: Any) -> None:
        """The native one and Gymnasium's give the same bytes."""
        with (
            closing(self.make(mode, **arguments)) as native,
            closing(self.make_generic(kind, mode, **arguments)) as other,
        ):
            # Wild actions end episodes early, gentle ones by the horizon.
            for seed, scale in ((7, 1.0), (8, 0.1)):
                actions = self.actions(native, seed, scale)
                ends = 0
                pairs = zip(trace(native, actions, seed), trace(other, actions, seed), strict=True)
                for k, (ours, theirs) in enumerate(pairs):
                    assert_equal(ours, theirs, f"{mode}, result {k}")
                    ends += int((ours[2] | ours[3]).sum()) if len(ours) == 5 else 0
                assert ends, "no episode has ended: the trace compares too little"

    # ------------------------------------------------------------ Gymnasium's own, bit for bit

    def test_next_step_gives_the_bytes_of_sync(self) -> None:
        self.check_equal("sync", "next_step")

    def test_same_step_gives_the_bytes_of_sync(self) -> None:
        self.check_equal("sync", "same_step")

    def test_disabled_gives_the_bytes_of_sync(self) -> None:
        self.check_equal("sync", "disabled")

    def test_a_time_limit_gives_the_bytes_of_sync(self) -> None:
        for mode in ("next_step", "same_step"):
            self.check_equal("sync", mode, max_episode_steps=4)

    def test_spaces_are_those_of_sync(self) -> None:
        with closing(self.make()) as native, closing(self.make_generic("sync")) as other:
            for name in ("observation_space", "action_space", "single_observation_space", "single_action_space"):
                assert getattr(native, name) == getattr(other, name), name
            for name in other.metadata:
                assert native.metadata[name] == other.metadata[name], name

    # ------------------------------------------------------------ autoreset modes

    def test_the_mode_is_an_attribute_and_in_the_metadata(self) -> None:
        for name, mode in MODES.items():
            for given in (name, mode.value, mode):
                with closing(self.make(given)) as envs:
                    assert envs.metadata["autoreset_mode"] is mode
                    assert envs.autoreset_mode is mode

    def test_an_unknown_mode_is_refused(self) -> None:
        for given in ("nextstep", "", None):
            self.refuses(lambda mode=given: self.make(mode), (ValueError, TypeError), "autoreset_mode")

    def test_a_reset_ignores_the_action(self) -> None:
        with closing(self.make("next_step")) as envs:
            actions = self.actions(envs)
            envs.reset(seed=1)
            over = np.zeros(self.slots, bool)
            seen = 0
            for action in actions:
                action[over] = np.nan
                _, rewards, terminated, truncated, _ = envs.step(action)
                assert not rewards[over].any()
                assert not (terminated | truncated)[over].any()
                seen += int(over.sum())
                over = terminated | truncated
            assert seen

    def test_disabled_refuses_a_step_of_ended_slots(self) -> None:
        with closing(self.make("disabled")) as envs:
            over = self.drive_until_some_end(envs)
            for _ in range(2):
                self.refuses(lambda: envs.step(self.actions(envs)[0]), Exception, str(np.flatnonzero(over)[0]))
            envs.reset(options={"reset_mask": over})
            envs.step(self.actions(envs)[0])

    # ------------------------------------------------------------ resets

    def test_step_before_reset_is_refused(self) -> None:
        with closing(self.make()) as envs:
            self.refuses(lambda: envs.step(self.actions(envs)[0]), Exception, "reset")

    def test_a_mask_resets_its_slots_only_and_options_stay(self) -> None:
        with closing(self.make("disabled")) as envs:
            before = envs.reset(seed=3)[0]
            mask = np.zeros(self.slots, bool)
            mask[1] = True
            options = {"reset_mask": mask}
            after, info = envs.reset(options=options)
            assert options == {"reset_mask": mask}
            assert options["reset_mask"] is mask
            for row in range(self.slots):
                if row != 1:
                    assert_equal(take(before, row), take(after, row), f"slot {row}")
            for name, value in info.items():
                if name.startswith("_"):
                    assert value.tolist() == mask.tolist(), name

    def test_a_wrong_mask_is_refused(self) -> None:
        with closing(self.make()) as envs:
            envs.reset(seed=3)
            for mask in (
                [True] * self.slots,
                np.ones(self.slots, np.int64),
                np.zeros(self.slots, bool),
                np.ones(99, bool),
            ):
                self.refuses(
                    lambda m=mask: envs.reset(options={"reset_mask": m}), (TypeError, ValueError), "reset_mask"
                )
            envs.step(self.actions(envs)[0])

    def test_a_whole_number_seeds_slots_one_apart_and_a_list_each(self) -> None:
        with closing(self.make()) as envs:
            apart = envs.reset(seed=5)[0]
            listed = envs.reset(seed=[7, 5, 5, *range(self.slots)][: self.slots])[0]
            for row in (1, 2):
                assert_equal(take(apart, 0), take(listed, row), f"slot {row}, seed 5")
            assert_equal(take(apart, 2), take(listed, 0), "seed 7")
            self.refuses(lambda: envs.reset(seed=[1]), ValueError, str(self.slots))

    def test_a_group_shares_its_drive(self) -> None:
        with closing(self.make("same_step")) as envs:
            action = self.actions(envs)[:, :1].repeat(self.slots, axis=1)
            for result in trace(envs, action, [4] * self.slots):
                for row in range(1, self.slots):
                    assert_equal(take(result[0], 0), take(result[0], row), f"slot {row}")

    def test_episodes_go_on_from_the_seed(self) -> None:
        with closing(self.make()) as envs:
            runs = [[envs.reset(seed=6)[0], *(envs.reset()[0] for _ in range(5))] for _ in range(2)]
            assert_equal(runs[0], runs[1], "six episodes")
            assert any(difference(runs[0][0], other) for other in runs[0][1:]), "all episodes begin alike"

    def test_unseeded_ones_differ(self) -> None:
        starts = []
        for _ in range(2):
            with closing(self.make()) as envs:
                starts.append([envs.reset()[0] for _ in range(4)])
        assert difference(starts[0], starts[1]) is not None

    # ------------------------------------------------------------ what is handed out, and life cycle

    def test_what_was_handed_out_never_changes(self) -> None:
        with closing(self.make("same_step")) as envs, closing(self.make("same_step")) as spoiled:
            actions = self.actions(envs)
            kept = list(trace(envs, actions, 5))
            copies = []
            for result in trace(spoiled, actions, 5):
                copies.append(_deep_copy(result))
                _spoil(result)
            assert_equal(kept, copies, "trace")

    def test_without_copies_the_same_arrays_come_back(self) -> None:
        with closing(self.make(copy=False)) as envs, closing(self.make()) as copying:
            actions = self.actions(envs)
            first = None
            for ours, theirs in zip(trace(envs, actions, 5), trace(copying, actions, 5), strict=True):
                assert_equal(ours, theirs, "copy=False")
                leaf = _leaf(ours[0])
                assert first is None or leaf is first
                first = leaf

    def test_observations_stay_in_the_space(self) -> None:
        with closing(self.make()) as envs:
            for seed in (1, 2):
                for result in trace(envs, self.actions(envs, seed), seed):
                    assert result[0] in envs.observation_space

    def test_a_wrong_action_is_refused_by_slot_and_changes_nothing(self) -> None:
        with closing(self.make()) as envs, closing(self.make()) as other:
            envs.reset(seed=1)
            other.reset(seed=1)
            action = self.actions(envs, 0, 0.1)[0]
            wrong = action.copy()
            wrong[1, 0] = np.inf
            self.refuses(lambda: envs.step(wrong), ValueError, "slot 1")
            self.refuses(lambda: envs.step(action[:, :-1]), ValueError, "shape")
            assert_equal(envs.step(action), other.step(action), "the next step")

    def test_the_spec_makes_the_same_again(self) -> None:
        with closing(self.make()) as envs:
            assert envs.spec is not None
            text = envs.spec.to_json()
            actions = self.actions(envs)
            expected = list(trace(envs, actions, 2))
        for spec in (envs.spec, EnvSpec.from_json(text)):
            with closing(gymnasium.make_vec(spec)) as again:
                assert again.num_envs == self.slots
                assert_equal(list(trace(again, actions, 2)), expected, "the spec's")

    def test_close_twice_and_reset_after_close(self) -> None:
        envs = self.make()
        expected = envs.reset(seed=3)
        envs.close()
        envs.close()
        self.refuses(lambda: envs.step(self.actions(envs)[0]), Exception, "reset")
        assert_equal(envs.reset(seed=3), expected, "after close")
        envs.close()

    # ------------------------------------------------------------ helpers

    def drive_until_some_end(self, envs: VectorEnv) -> NDArray[np.bool_]:
        """[N], the slots that have ended."""
        envs.reset(seed=1)
        for action in self.actions(envs):
            _, _, terminated, truncated, _ = envs.step(action)
            if (terminated | truncated).any():
                return terminated | truncated
        raise AssertionError(f"no episode has ended in {self.steps} steps")

    @staticmethod
    def refuses(call: Any, kinds: Any, words: str) -> None:
        """`call` raises one of `kinds` with `words` in its message."""
        try:
            call()
        except kinds as err:
            if words not in str(err):
                raise AssertionError(f"expected {words!r} in: {err}") from err
        else:
            raise AssertionError("nothing was raised")


def _leaf(batch: Any) -> NDArray[Any]:
    while isinstance(batch, Mapping):
        batch = next(iter(batch.values()))
    return batch


def _deep_copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _deep_copy(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_deep_copy(part) for part in value)
    if isinstance(value, np.ndarray) and value.dtype == object:
        copy = value.copy()
        for i, part in enumerate(value):
            copy[i] = _deep_copy(part)
        return copy
    return value.copy() if isinstance(value, np.ndarray) else value


def _spoil(value: Any) -> None:
    if isinstance(value, Mapping):
        for part in value.values():
            _spoil(part)
    elif isinstance(value, tuple):
        for part in value:
            _spoil(part)
    elif isinstance(value, np.ndarray):
        if value.dtype == object:
            for part in value:
                _spoil(part)
        value[...] = None if value.dtype == object else 1
