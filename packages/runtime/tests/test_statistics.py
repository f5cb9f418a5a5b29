from __future__ import annotations

import numpy as np
import pytest

from alpagym_runtime.rollouts.bootstrap import Bootstrap, bounds, interval
from alpagym_runtime.rollouts.drive_facts import drive_facts
from alpagym_runtime.rollouts.statistics import compare, hit, summarise
from alpagym_runtime.rollouts.table import read_rows, write_rows
from alpagym_runtime.types import MeasureSeries


def row(scene, score, seed=1, family="lead", **more):
    return {
        "scene_id": scene,
        "scene_hash": f"hash of {scene}",
        "family": family,
        "seed": seed,
        "ended": "goal" if score else "collision",
        "failed": False,
        "failure_code": None,
        "failure": None,
        "attempt": 0,
        "ticks": 35,
        "driving_score": score,
        "initial_fault": False,
        "reward": score - 0.5,
        "term/progress": score,
        "measure/progress": 0.8 * score,
        "measure/collision_count": 0.0 if score else 2.0,
        "measure/collision_at_fault_count": 0.0 if score else 1.0,
        "measure/offroad_count": 0.0,
        "drive/speed_ratio": 1.0,
    } | more


def failed(scene, code="TIMEOUT"):
    lost = dict.fromkeys(("driving_score", "reward"))
    return row(scene, 0.0) | lost | {"failed": True, "failure_code": code, "failure": "it broke", "family": ""}


# ---------------------------------------------------------------- the bootstrap


def test_an_interval_over_scenes_is_that_of_the_mean():
    # 400 scenes, half 0 and half 1: standard error sqrt(0.25/400) = 0.025, so 0.5 ± 1.96 · 0.025 = [0.451, 0.549].
    found = interval(np.tile([0.0, 1.0], 200), np.arange(400), 4000)
    assert (found["mean"], found["n"]) == (0.5, 400)
    assert (found["low"], found["high"]) == pytest.approx((0.451, 0.549), abs=0.006)


def test_many_drives_of_few_scenes_are_no_more_certain_than_their_scenes():
    # Four scenes that always give their own value: 25 drives of each add nothing.
    scenes = np.repeat(np.arange(4), 25)
    values = np.array([0.0, 0.0, 1.0, 1.0])[scenes]
    many, few = interval(values, scenes, 4000), interval(values[::25], np.arange(4), 4000)
    assert (many["low"], many["high"]) == (few["low"], few["high"]) == (0.0, 1.0)


def test_drives_within_a_scene_are_drawn_again():
    # One scene, 100 drives, half of them 1: nothing but the drives can vary; standard error 0.05.
    found = interval(np.tile([0.0, 1.0], 50), np.zeros(100, np.int64), 4000)
    assert (found["low"], found["high"]) == pytest.approx((0.402, 0.598), abs=0.02)


def test_scenes_with_different_numbers_of_drives_keep_their_own():
    # Scenes of 1, 2 and 3 drives; a mean can only be that of whole scenes whose drives are all equal.
    scenes, values = np.array([0, 1, 1, 2, 2, 2]), np.array([0.0, 1.0, 1.0, 2.0, 2.0, 2.0])
    means = Bootstrap(scenes, 2000).means(values[:, None])[:, 0]
    # 27 ordered draws of three scenes; weights 1, 2, 3 a scene.
    possible = {(b + b + 6 * c) / (a + 2 * b + 3 * c) for a in range(4) for b in range(4 - a) for c in [3 - a - b]}
    assert {round(m, 9) for m in means} == {round(m, 9) for m in possible}


def test_training_runs_are_drawn_too():
    # Three training seeds, one of them much better: with 300 scenes each, the seeds are what is uncertain.
    runs, scenes = np.repeat(np.arange(3), 300), np.tile(np.arange(300), 3)
    values = np.where(runs == 2, 1.0, 0.0)
    means = Bootstrap(scenes, 3000, runs).means(values[:, None])[:, 0]
    assert {round(m, 6) for m in means} == {round(k / 3, 6) for k in range(4)}
    assert bounds(means) == (0.0, 1.0)
    # P(no good run in three draws) = (2/3)^3 = 0.296
    assert np.mean(means == 0.0) == pytest.approx(0.296, abs=0.03)


def test_equal_seeds_give_equal_intervals_whatever_is_computed_beside_them():
    rng = np.random.default_rng(3)
    columns, scenes = rng.random((60, 5)), np.repeat(np.arange(20), 3)
    together = Bootstrap(scenes, 300).means(columns)
    alone = Bootstrap(scenes, 300).means(columns[:, 2:3])
    np.testing.assert_allclose(together[:, 2:3], alone, rtol=1e-12)


def test_undefined_values_are_left_out_of_their_own_mean():
    values = np.array([[1.0, np.nan], [1.0, 4.0], [1.0, np.nan]])
    means = Bootstrap(np.arange(3), 500).means(values)
    assert (means[:, 0] == 1.0).all()
    # NaN only where the one known drive was not drawn: (2/3)^3 = 0.296.
    assert set(means[~np.isnan(means[:, 1]), 1]) == {4.0}
    assert np.isnan(means[:, 1]).mean() == pytest.approx(0.296, abs=0.06)


def test_bounds_that_are_infinite_are_none():
    assert bounds(np.full(100, np.nan)) == (None, None)
    assert bounds(np.concatenate([np.ones(50), np.full(50, np.inf)])) == (1.0, None)


# ---------------------------------------------------------------- summaries


def test_a_summary_has_intervals_for_rates_and_kinds_of_scene():
    rows = [row(f"a{i}", 1.0, family="free") for i in range(30)] + [row(f"b{i}", float(i % 2)) for i in range(10)]
    found = summarise(rows, 1000)
    # 5 of 40 collide, all of them among the 10 of kind lead.
    assert found["rates"] == {"collision": 0.125, "collision_at_fault": 0.125, "offroad": 0.0, "goal": 0.875}
    assert found["rate_intervals"]["collision"]["low"] < 0.125 < found["rate_intervals"]["collision"]["high"]
    assert found["by_family"]["free"] | {"rates": None} == {
        "driving_score": 1.0, "low": 1.0, "high": 1.0, "n": 30, "rates": None
    }  # fmt: skip
    lead = found["by_family"]["lead"]
    assert (lead["driving_score"], lead["n"], lead["rates"]["collision_at_fault"]) == (0.5, 10, 0.5)
    assert lead["low"] < 0.5 < lead["high"]
    assert found["scenes"] == 40


def test_void_drives_are_counted_by_their_reason():
    rows = [row("a", 1.0), row("b", 1.0, attempt=1), failed("c"), failed("d", "GONE"), failed("e")]
    found = summarise(rows, 100)
    assert (found["failed"], found["driving_score"]["n"]) == (3, 2)
    assert found["failures"] == {"TIMEOUT": 2, "GONE": 1, "retried": 1}


def test_a_measure_that_a_world_does_not_report_makes_no_rate():
    rows = [row("a", 1.0)]
    del rows[0]["measure/offroad_count"]
    assert "offroad" not in summarise(rows, 100)["rates"]
    assert np.isnan(hit(rows[0], "offroad"))


# ---------------------------------------------------------------- comparisons


def test_a_comparison_is_paired_by_scene_and_seed():
    # Scores differ a lot between scenes and by exactly 0.1 within each: the paired interval is a point.
    before = [row(f"s{i}", i / 100, seed) for i in range(50) for seed in (1, 2)]
    after = [row(f"s{i}", i / 100 + 0.1, seed) for i in range(50) for seed in (1, 2)][::-1]
    found = compare([before], [after], 500)
    assert (found["n"], found["scenes"], found["left_out"]) == (100, 50, {})
    gain = found["driving_score"]
    assert (gain["mean"], gain["low"], gain["high"]) == pytest.approx((0.1, 0.1, 0.1))


def test_a_comparison_gives_rates_their_difference_and_ratio():
    # 40 of 100 collide before, 10 of the same after: difference -0.3, ratio 0.25.
    before = [row(f"s{i}", 0.0 if i < 40 else 1.0) for i in range(100)]
    after = [row(f"s{i}", 0.0 if i < 10 else 1.0) for i in range(100)]
    rate = compare([before], [after], 4000)["rates"]["collision_at_fault"]
    assert (rate["before"]["mean"], rate["after"]["mean"]) == (0.4, 0.1)
    assert rate["difference"]["mean"] == pytest.approx(-0.3)
    # The difference's standard error is sqrt(0.3 · 0.7 / 100) = 0.046.
    assert (rate["difference"]["low"], rate["difference"]["high"]) == pytest.approx((-0.39, -0.21), abs=0.025)
    assert rate["ratio"]["mean"] == pytest.approx(0.25)
    # log ratio: given 40 collisions, the share that stays is binomial, sd sqrt(0.25 · 0.75 / 40) = 0.068.
    assert (rate["ratio"]["low"], rate["ratio"]["high"]) == pytest.approx((0.125, 0.39), abs=0.04)


def test_a_ratio_to_nothing_is_no_number():
    rows = [row(f"s{i}", 1.0) for i in range(5)]
    ratio = compare([rows], [rows], 100)["rates"]["collision"]["ratio"]
    assert (ratio["mean"], ratio["low"], ratio["high"]) == (None, None, None)


def test_drives_that_do_not_pair_are_left_out_by_reason():
    before = [row("same", 0.5), row("void", 0.5), row("faulty", 0.5), row("changed", 0.5), row("only before", 0.5)]
    after = [
        row("same", 1.0),
        failed("void"),
        row("faulty", 0.5, initial_fault=True),
        row("changed", 0.5, scene_hash="another"),
        row("only after", 0.5),
    ]
    found = compare([before], [after], 100)
    assert (found["n"], found["driving_score"]["mean"]) == (1, 0.5)
    assert found["left_out"] == {"initial_fault": 1, "other_scene": 1, "unmatched": 2, "void": 1}


def test_nothing_in_common_gives_no_numbers():
    found = compare([[row("a", 1.0)]], [[row("b", 1.0)]], 100)
    assert (found["n"], found["driving_score"]["mean"], found["rates"]) == (0, None, {})


def test_kinds_of_scene_are_compared_each():
    before = [row(f"a{i}", 0.0, family="cross") for i in range(10)] + [row(f"b{i}", 1.0) for i in range(10)]
    after = [row(f"a{i}", 1.0, family="cross") for i in range(10)] + [row(f"b{i}", 1.0) for i in range(10)]
    by = compare([before], [after], 200)["by_family"]
    assert {name: (gain["mean"], gain["n"]) for name, gain in by.items()} == {"cross": (1.0, 10), "lead": (0.0, 10)}


def test_training_seeds_are_pooled_run_by_run():
    # Gains of 0.1 and 0.3 in two training seeds: pooled 0.2, and the interval spans both.
    before = [[row(f"s{i}", 0.2) for i in range(50)] for _ in range(2)]
    after = [[row(f"s{i}", 0.2 + gain) for i in range(50)] for gain in (0.1, 0.3)]
    found = compare(before, after, 1000)
    assert (found["n"], found["runs"], found["scenes"]) == (100, 2, 50)
    assert [found["driving_score"][k] for k in ("mean", "low", "high")] == pytest.approx([0.2, 0.1, 0.3])


def test_rows_that_were_written_give_the_same_numbers(tmp_path):
    rows = {"final": [row("a", 1.0), failed("b"), row("c", 0.5, **{"drive/speed_ratio": float("nan")})]}
    write_rows(tmp_path / "t.parquet", rows)
    assert summarise(read_rows(tmp_path / "t.parquet")["final"], 100) == summarise(rows["final"], 100)


# ---------------------------------------------------------------- the manner of a drive


def series(values, valid=None, step_us=100_000):
    values = np.asarray(values, np.float64)
    valid = np.ones(len(values), bool) if valid is None else np.asarray(valid)
    return MeasureSeries(np.arange(len(values)) * step_us, values, valid)


def test_a_drive_at_half_the_recorded_speed_has_ratio_one_half():
    # 2 s at 5 m/s is 10 m; the recording drove 20 m, so the ego ends 10 m behind it.
    measures = {"speed_mps": series(np.full(21, 5.0)), "along_track_error_m": series(np.linspace(0, -10, 21))}
    facts = drive_facts(measures)
    assert facts["drive/distance_m"] == pytest.approx(10.0)
    assert facts["drive/speed_ratio"] == pytest.approx(0.5)
    assert np.isnan(facts["drive/weaving_per_s"])


def test_the_speed_ratio_ends_with_the_recording():
    # The recording ends after 1 s, the ego goes on: 10 m against 8 m then.
    valid = np.arange(21) <= 10
    ahead = np.where(valid, np.linspace(0, 4, 21), 0.0)
    facts = drive_facts({"speed_mps": series(np.full(21, 10.0)), "along_track_error_m": series(ahead, valid)})
    assert facts["drive/speed_ratio"] == pytest.approx(10.0 / 8.0)
    assert facts["drive/distance_m"] == pytest.approx(20.0)


def test_time_below_half_a_metre_a_second_is_standing():
    # Brakes from 2 m/s to 0 within 10 of 20 samples, 0.2 m/s less each: 2.0, …, 0.6 drive, 0.4 and below stand.
    speed = np.maximum(2.0 - 0.2 * np.arange(20), 0.0)
    assert drive_facts({"speed_mps": series(speed)})["drive/standing_share"] == pytest.approx(12 / 20)


def test_a_standing_recording_has_no_speed_ratio():
    measures = {"speed_mps": series(np.zeros(11)), "along_track_error_m": series(np.zeros(11))}
    assert np.isnan(drive_facts(measures)["drive/speed_ratio"])


def test_weaving_counts_changes_of_direction_and_no_small_corrections():
    # 4 s of a swing of 1 Hz: left and right change twice a second, 7 times between 8 half waves.
    time_s = np.arange(41) * 0.1
    swing = np.sin(2 * np.pi * time_s + 1e-3)
    assert drive_facts({"yaw_rate_radps": series(0.2 * swing)})["drive/weaving_per_s"] == pytest.approx(7 / 4, abs=0.3)
    assert drive_facts({"yaw_rate_radps": series(0.04 * swing)})["drive/weaving_per_s"] == 0.0
    assert drive_facts({"yaw_rate_radps": series(np.full(41, 0.3))})["drive/weaving_per_s"] == 0.0
