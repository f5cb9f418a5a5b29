from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpagym_runtime.random import generator, mix, mix_int, normal, text_seed, uniform

MASK = 2**64 - 1
integers = st.integers(-(2**63), 2**64 - 1)


def reference_mix(*parts: int) -> int:
    """The same fold in plain Python integers: splitmix64's finaliser after adding each part."""
    state = 0
    for part in parts:
        state = (state + 0x9E3779B97F4A7C15 + part) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state


def test_the_mixer_is_splitmix64():
    # The first output of splitmix64 seeded with 0 (Vigna's splitmix64.c).
    assert mix_int(0) == 0xE220A8397B1DCDAF


@given(st.lists(integers, min_size=1, max_size=5))
def test_mix_is_its_reference(parts):
    assert mix_int(*parts) == reference_mix(*parts)


@given(integers, integers)
def test_order_matters(a, b):
    assert (mix_int(a, b) == mix_int(b, a)) == ((a - b) & MASK == 0)


def test_arrays_mix_like_their_elements():
    seeds = np.array([[0, 1], [2**64 - 1, 7]], np.uint64)
    ticks = np.array([-1, 3])
    mixed = mix(seeds, ticks, 5)
    assert (mixed.shape, mixed.dtype) == ((2, 2), np.uint64)
    assert mixed.tolist() == [
        [reference_mix(int(s), int(t), 5) for s, t in zip(row, ticks, strict=True)] for row in seeds
    ]


def test_neighbouring_seeds_give_unrelated_numbers():
    seeds = mix(np.arange(20_000), 0)
    assert len(np.unique(seeds)) == len(seeds)
    draws = uniform(seeds, 2)
    # Standard error of a correlation: 1 / sqrt(20000) = 0.007
    assert abs(np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]) < 0.03
    assert abs(np.corrcoef(draws[:, 0], draws[:, 1])[0, 1]) < 0.03


def test_uniform_numbers_fill_the_unit_interval():
    draws = uniform(mix(np.arange(1000)), 100)
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    # Mean 1/2, variance 1/12; standard errors 0.289 / 316 = 0.0009
    assert draws.mean() == pytest.approx(0.5, abs=0.004)
    assert draws.var() == pytest.approx(1 / 12, abs=0.002)
    assert np.histogram(draws, 10, (0.0, 1.0))[0] == pytest.approx(np.full(10, 10_000), rel=0.05)


def test_normal_numbers_are_standard_normal():
    draws = normal(mix(np.arange(1000)), 101)
    assert draws.shape == (1000, 101)
    assert np.isfinite(draws).all()
    assert draws.mean() == pytest.approx(0.0, abs=0.015)
    assert draws.std() == pytest.approx(1.0, abs=0.01)
    # P(|z| < 1.959964) = 0.95; kurtosis 3
    assert (np.abs(draws) < 1.959964).mean() == pytest.approx(0.95, abs=0.004)
    assert (draws**4).mean() == pytest.approx(3.0, abs=0.1)
    correlations = np.corrcoef(draws.T) - np.eye(101)
    assert np.abs(correlations).max() < 0.2  # 5000 pairs, standard error 0.032


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=40), st.integers(1, 9), st.integers(0, 5))
def test_a_row_depends_on_its_seed_only(seeds, size, stream):
    whole = np.array(seeds, np.uint64)
    for draw in (uniform, normal):
        together = draw(whole, size, stream)
        for i in range(len(whole)):
            assert draw(whole[i : i + 1], size, stream).tobytes() == together[i].tobytes()
        assert draw(whole[::-1], size, stream).tobytes() == together[::-1].tobytes()


def test_streams_separate_uses_of_one_seed():
    seeds = mix(np.arange(10_000))
    a, b = uniform(seeds, 1, stream=0)[:, 0], uniform(seeds, 1, stream=1)[:, 0]
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.05
    assert (a != b).all()


def test_counters_and_streams_do_not_overlap():
    draws = [uniform(np.array([seed], np.uint64), 64, stream) for seed in range(8) for stream in range(8)]
    assert len(np.unique(draws)) == 8 * 8 * 64


def test_a_longer_draw_begins_with_the_shorter_one():
    seeds = mix(np.arange(5))
    assert (uniform(seeds, 9)[:, :4] == uniform(seeds, 4)).all()


def test_text_and_numbers_are_the_same_in_every_process():
    # SHA-256 of nothing begins with e3b0c44298fc1c14, read as little endian.
    assert text_seed("") == 0x141CFC9842C4B0E3
    code = (
        "from alpagym_runtime.random import *; import numpy as np;"
        "print(text_seed('scène'), mix_int(1, -2), normal(np.array([3], np.uint64), 3).tobytes().hex(),"
        " generator(4).random())"
    )
    here = f"{text_seed('scène')} {mix_int(1, -2)} {normal(np.array([3], np.uint64), 3).tobytes().hex()} "
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == here + str(generator(4).random())


def test_generators_follow_their_parts():
    assert generator(1, 2).random() == generator(1, 2).random()
    assert generator(1, 2).random() != generator(2, 1).random()
