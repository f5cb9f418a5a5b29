"""`alpagym status` and the report say how a Cosmos-RL job stands and what its numbers are a sign of."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from alpagym_host import run_dir
from alpagym_host.cli import app
from alpagym_host.compose import compose
from alpagym_host.report.page import page
from alpagym_host.report.run_data import load_run
from alpagym_runtime.trainers.cosmos.journal import Journal, Presence, Step

WORDS = ("trainer.type=cosmos", "rollout.group_size=8", "cosmos.train.train_batch_per_replica=48", "run.name=job")


@pytest.fixture
def run(tmp_path):
    """A run at step 2 of 60, whose rollouts are too fast: the recipe's own sick log, at a global batch of 48."""
    directory = run_dir.create(compose([*WORDS, f"run.root={tmp_path}"]), "train")
    (directory / "cosmos").mkdir()
    numbers = {"reward": 0.5, "term/progress": 0.7, "term/collision": -0.2, "staleness_max": 1.0, "kl": 0.01}
    for number in (1, 2):
        Journal(directory).add(Step(number, 60, 4.0, {**numbers, "groups_collapsed": 0.6}))
    Presence(directory, "rollout").did(984, 30.0)
    seen = {"pending": [24, 264, 552, 984], "in_flight": 96, "discarded": 3}
    (directory / "cosmos" / "status.json").write_text(json.dumps(seen))
    row = {"stage": "cosmos", "step": 1, "total_steps": 1, **numbers}
    (directory / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return directory


def test_status_names_the_sick_pattern_and_its_remedies_in_order(run):
    shown = CliRunner().invoke(app, ["status", str(run)]).output
    assert "step       2 of 60, 4.00 s each to train" in shown
    assert "reward     0.500 (progress 0.700, collision -0.200)" in shown
    assert "weights    version gap 1, 1 allowed" in shown
    assert "groups     60 % with equal rewards" in shown
    assert "pending    984 finished episodes wait, 96 under way, 3 were too old" in shown
    assert "rollout    1 workers, 984 episodes" in shown
    # 984 / 48 = 20.5 steps.
    assert "sick       rollouts too fast: 984 finished episodes wait for training (20.5 steps)" in shown
    assert shown.index("1. cosmos.rollout.prefetch_rollout=true") < shown.index("3. more cosmos.policy.parallelism")
    assert "sick       groups collapse" in shown


def test_the_report_has_the_same_signs(run):
    html = page([load_run(run)])
    assert "Cosmos-RL: rollouts too fast" in html
    assert "Cosmos-RL: pending" in html


def test_a_run_without_a_job_says_nothing_of_one(tmp_path):
    directory = run_dir.create(compose([f"run.root={tmp_path}"]), "train")
    assert "Cosmos" not in CliRunner().invoke(app, ["status", str(directory)]).output
