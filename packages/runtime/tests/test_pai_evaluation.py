"""Open-loop evaluation: sets of drawn plans, the published names, deviations over sets, pairs."""

from __future__ import annotations

import json

import numpy as np
import pytest

from alpagym_runtime.envs.core import DrivingCore, build_terms
from alpagym_runtime.envs.presets import reward_section
from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.random import normal
from alpagym_runtime.rollouts.collector import Collector
from alpagym_runtime.rollouts.open_loop import TARGET, evaluate_open_loop, summarise_open_loop
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.pai.config import PaiConfig
from alpagym_runtime.testing.pai import shared_tree
from alpagym_runtime.types import PolicySpec, Sampling


class Beside:
    """The recording, moved sideways by 1 m in the mean, and by 1 m + a normal draw in a sample."""

    def __init__(self) -> None:
        self.spec = PolicySpec(fields=("ego_dynamics_rig",), privileged=(TARGET,))

    def act(self, observations, seeds, sampling):
        plan = observations[TARGET].copy()
        draws = normal(seeds, 1)[:, 0] * sampling.temperature if sampling.mode == "sample" else np.zeros(len(plan))
        plan[..., 1] += (1.0 + draws)[:, None]
        decision = plan_decision(plan)
        decision.log_prob[:, 0], decision.log_prob_mask[:] = -(draws**2) / 2.0, True
        return decision


def measure(samples: int, seeds=(1,)):
    policy = Beside()
    dataset = DatasetSection(source="pai", path=str(shared_tree()), split="val")
    simulator = PaiConfig(workers=0).build(policy.spec, dataset, 4, (TARGET,))
    core = DrivingCore(simulator, build_terms(reward_section("pai_motion"), simulator), policy.spec)
    rows = evaluate_open_loop(
        Collector(core, policy), simulator.spec.scenes, list(seeds), samples, Sampling("sample", temperature=0.5)
    )
    simulator.close()
    return rows


def test_without_drawn_plans_the_mean_plan_is_measured():
    rows = measure(0)
    assert len(rows) == 3
    for row in rows:
        # 1 m beside the recording all the way.
        for name in ("ade_m", "min_ade", "min_ade/by_t=3.0", "min_ade@3.0s", "fde_m"):
            assert row[f"measure/{name}"] == pytest.approx(1.0, abs=1e-5), name
    summary = summarise_open_loop(rows)
    assert (summary["count"], summary["samples"]) == (3, 1)
    assert summary["ade"] == pytest.approx(1.0, abs=1e-5)
    assert "ade_std" not in summary


def test_more_plans_never_make_the_best_one_worse():
    few, many = measure(2), measure(8)
    for a, b in zip(few, many, strict=True):
        assert b["measure/min_ade"] <= a["measure/min_ade"] + 1e-9  # the first two are the same draws
        assert a["measure/ade_first"] == pytest.approx(b["measure/ade_first"])
        # The likeliest draw is the smallest one, so its plan is nearest to 1 m beside.
        assert abs(b["measure/ade_likeliest"] - 1.0) <= abs(b["measure/ade_first"] - 1.0) + 1e-9
        assert b["measure/min_ade@1.0s"] == pytest.approx(b["measure/min_ade"], abs=1e-5)  # offsets are constant
        assert b["samples"] == 8


def test_the_deviation_is_over_the_sets_of_a_scene():
    rows = measure(1, seeds=(1, 2))
    assert len(rows) == 6
    assert {row["seed"] for row in rows} == {1, 2}
    summary = summarise_open_loop(rows)
    by_scene: dict[str, list[float]] = {}
    for row in rows:
        by_scene.setdefault(row["scene_id"], []).append(row["measure/min_ade"])
    # Two numbers a, b: mean (a + b) / 2, population deviation |a - b| / 2.
    assert summary["min_ade"] == pytest.approx(np.mean([(a + b) / 2 for a, b in by_scene.values()]))
    assert summary["min_ade_std"] == pytest.approx(np.mean([abs(a - b) / 2 for a, b in by_scene.values()]))
    assert summary["min_ade_std"] > 0.0


def test_the_same_seeds_give_the_same_rows():
    assert json.dumps(measure(3)) == json.dumps(measure(3))  # as text: NaN equals NaN


def test_rows_of_a_closed_loop_have_no_such_summary():
    assert summarise_open_loop([{"failed": False, "scene_id": "a", "measure/progress": 1.0}]) == {}


def test_a_metric_that_is_defined_nowhere_is_undefined():
    row = {"failed": False, "scene_id": "a", "measure/ade_m": 1.0, "measure/min_ade": None}
    assert summarise_open_loop([row])["min_ade"] is None
