from __future__ import annotations

import json

import av
import numpy as np
import pyarrow.parquet as pq
import pytest

from alpagym_runtime.rollouts.filming import SIZE_PX, beside, choose
from alpagym_runtime.run_config import from_mapping
from alpagym_runtime.trainers.run import Run

TERMS = {"progress": {"type": "progress", "scale": 1.0}, "collision": {"type": "collision", "scale": -1.0}}


def config(**sections):
    data = {
        "run": {"seed": 3},
        "simulator": {"type": "toy"},
        "dataset": {"train_scenes": 4, "val_scenes": 2, "test_scenes": 9},
        "expected_valid_steps": 30,
        "policy": {"type": "constant_speed"},
        "reward": {"terms": TERMS},
        "rollout": {"slots": 2},
        "transport": {"type": "memory"},
        "trainer": {"type": "grpo"},
        "evaluation": {"bootstrap": 100},
        "checkpoint": {},
    }
    return from_mapping(data | sections)


def row(scene, score, reward=0.0, **more):
    return {
        "scene_id": scene, "seed": 1, "driving_score": score, "reward": reward, "ticks": 5, "failed": False,
        "initial_fault": False, **more,
    }  # fmt: skip


def frames_of(path):
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def test_the_best_the_median_and_the_worst_are_chosen_by_score_then_reward():
    rows = [row("a", 1.0, 0.5), row("b", 1.0, 0.9), row("c", 0.0), row("d", 0.4), row("e", 0.7)]
    chosen = choose([*rows, row("void", None, failed=True), row("faulty", 0.0, -9.0, initial_fault=True)])
    assert {which: found["scene_id"] for which, found in chosen.items()} == {"best": "b", "median": "e", "worst": "c"}


def test_few_drives_are_filmed_once():
    assert list(choose([row("a", 1.0)])) == ["best"]
    assert {which: r["scene_id"] for which, r in choose([row("a", 1.0), row("b", 0.0)]).items()} == {
        "best": "a", "median": "b"
    }  # fmt: skip
    assert choose([]) == {}


def test_an_evaluation_films_the_drives_that_it_measured(tmp_path):
    Run(config(), tmp_path).evaluate()
    rows = {r["scene_id"]: r for r in pq.read_table(tmp_path / "per_scene.parquet").to_pylist()}
    told = json.loads((tmp_path / "videos" / "final.json").read_text())
    assert [about["which"] for about in told] == ["best", "median", "worst"]
    for about in told:
        measured = rows[about["scene_id"]]
        assert (about["driving_score"], about["ended"]) == (measured["driving_score"], measured["ended"])
        # A picture a tick and one of the end; the terms add up to what the evaluation says.
        ticks = measured["ticks"]
        frames = frames_of(tmp_path / "videos" / about["file"])
        assert len(frames) == len(about["time_s"]) == ticks + 1
        assert frames[0].shape == (SIZE_PX, SIZE_PX, 3)
        for name, values in about["terms"].items():
            assert sum(values) == pytest.approx(measured[f"term/{name}"], abs=1e-9)
    assert told[0]["driving_score"] >= told[1]["driving_score"] >= told[2]["driving_score"]


def test_late_rewards_are_told_tick_by_tick_too(tmp_path):
    Run(config(simulator={"type": "toy", "late_measures": True}), tmp_path).evaluate()
    rows = {r["scene_id"]: r for r in pq.read_table(tmp_path / "per_scene.parquet").to_pylist()}
    for about in json.loads((tmp_path / "videos" / "final.json").read_text()):
        for name, values in about["terms"].items():
            assert len(values) == len(about["time_s"])
            assert sum(values) == pytest.approx(rows[about["scene_id"]][f"term/{name}"], abs=1e-9)


def test_videos_that_are_there_are_not_made_again(tmp_path):
    Run(config(), tmp_path).evaluate()
    file = tmp_path / "videos" / "final_best.mp4"
    made = file.stat().st_mtime_ns
    Run(config(), tmp_path).evaluate()
    assert file.stat().st_mtime_ns == made


def test_no_videos_where_none_are_asked_for(tmp_path):
    Run(config(evaluation={"bootstrap": 100, "videos": False}), tmp_path).evaluate()
    assert not (tmp_path / "videos").exists()


def test_a_simulator_that_fails_costs_the_videos_and_nothing_else(tmp_path):
    outcome = Run(config(simulator={"type": "toy", "fail_every": 10}, rollout={"slots": 2}), tmp_path).evaluate()
    # Of ten first attempts the tenth fails: the nine of the evaluation pass, the first of the videos does not.
    assert outcome.completed
    assert outcome.summary["evaluations"]["final"]["driving_score"]["n"] == 9
    assert not list(tmp_path.glob("videos/*"))


def test_cameras_stand_beside_the_picture_from_above_in_whole_pixels():
    above = np.zeros((400, 400, 3), np.uint8)
    front = np.full((2, 48, 96, 3), 200, np.uint8)
    front[1, 0, 0] = (9, 8, 7)
    shown = beside(above, {"camera_front": front, "camera_rear": front[:, ::2, ::2], "ego_dynamics_rig": np.zeros(7)})
    assert shown.shape == (400, 800, 3)
    # The newest picture, 48 x 96 by 4; its first pixel is a block of 4 x 4.
    assert (shown[:4, 400:404] == (9, 8, 7)).all()
    assert (shown[4:192, 404:784] == 200).all()
    assert (shown[0:192, 784:] == 24).all()
    # Below it the second camera, 24 x 48 by 8.
    assert (shown[208:392, 408:784] == 200).all()
    assert beside(above, {"ego_dynamics_rig": np.zeros(7)}) is above
