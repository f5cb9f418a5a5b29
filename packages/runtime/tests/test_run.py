from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from alpagym_runtime.errors import ConfigError, CorruptFileError, SimulatorError
from alpagym_runtime.rewards.base import Term
from alpagym_runtime.rollouts.statistics import summarise
from alpagym_runtime.run_config import Plugin, TermSection, from_mapping
from alpagym_runtime.telemetry.metrics import describe
from alpagym_runtime.testing.conformance import TrainerConformance, run_results, training_rows
from alpagym_runtime.testing.examples import assert_same
from alpagym_runtime.trainers.checkpoints import Checkpoint, CheckpointStore, load_checkpoint, load_weights
from alpagym_runtime.trainers.run import Run
from alpagym_runtime.trainers.sft.config import SftConfig
from alpagym_runtime.trainers.sft.stored import hold_out
from alpagym_runtime.trainers.sft.trainer import _share_of_rate
from alpagym_runtime.types import EpisodeRequest
from alpagym_waypoint.config import WaypointConfig

SFT = {"drives_per_scene": 1, "epochs": 3, "batch": 32}
GRPO = {"type": "grpo", "updates": 5, "minibatch": 32, "warm_start": SFT}
TERMS = {"progress": {"type": "progress", "scale": 1.0}, "collision": {"type": "collision", "scale": -1.0}}


def mapping(trainer=GRPO, **sections):
    """A run of less than a second: 3 epochs of imitation, 5 updates, 9 scenes of 12 decisions."""
    return {
        "run": {"seed": 3},
        "simulator": {"type": "toy"},
        "dataset": {"train_scenes": 4, "val_scenes": 2, "test_scenes": 3},
        "expected_valid_steps": 12,
        "policy": {"type": "waypoint", "hidden": 16, "actors": 1},
        "reward": {"terms": TERMS},
        "rollout": {"slots": 8, "group_size": 3, "scenes_per_step": 2},
        "transport": {"type": "memory"},
        "trainer": trainer,
        "evaluation": {"bootstrap": 100, "every_updates": 2, "videos": False},
        "checkpoint": {"every_updates": 2},
    } | sections


def configure(trainer=GRPO, **sections):
    return from_mapping(mapping(trainer, **sections))


class TestSft(TrainerConformance):
    stops = (1, 2, 3)

    def config(self):
        return configure({"type": "sft"} | SFT | {"epochs": 4})


class TestSftWithACoolDown(TrainerConformance):
    stops = (1, 3, 4)  # at the peak, and twice while the rate falls

    def config(self):
        return configure({"type": "sft"} | SFT | {"epochs": 5, "cool_down": 3})


class TestGrpo(TrainerConformance):
    # 1 and 3: in imitation and at its end; 4: before the first checkpoint of grpo; 5: when val is due.
    stops = (1, 3, 4, 5)

    def config(self):
        return configure()


class TestGrpoWithAReference(TrainerConformance):
    stops = (4, 6)

    def config(self):
        trainer = GRPO | {"kl_weight": 0.5, "epochs": 2, "micro_batch": 5, "credit": "episode", "learning_rate": 0.01}
        return configure(trainer, checkpoint={"every_updates": 3, "keep": 1})


class TestGrpoThatChoosesItsScenesAndCools(TrainerConformance):
    stops = (4, 6)

    def config(self):
        trainer = GRPO | {"scene_focus": 0.5, "final_temperature_share": 0.5, "learning_rate": 0.01}
        return configure(trainer, checkpoint={"every_updates": 3, "keep": 1})


class TestPpo(TrainerConformance):
    # 3: at the end of imitation; 4: after the step in which only the value learns.
    stops = (3, 4)

    def config(self):
        policy = {"type": "waypoint", "hidden": 16, "actors": 1, "value_head": True}
        trainer = GRPO | {"type": "ppo", "epochs": 2, "value_clip": 0.2, "learning_rate": 0.01}
        return configure(trainer, policy=policy, checkpoint={"every_updates": 3, "keep": 1})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A completed run; not to be written to."""
    directory = tmp_path_factory.mktemp("trained")
    outcome = Run(configure(), directory).train()
    assert outcome.completed
    return directory


@pytest.fixture
def copied(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


class Notes:
    """A reporter that keeps what is said."""

    def __init__(self):
        self.notes, self.stages = [], []

    def stage(self, name, total, unit):
        self.stages.append([name, 0, total])

    def advance(self, count=1, **numbers):
        self.stages[-1][1] += count

    def note(self, text):
        self.notes.append(text)


# ---------------------------------------------------------------- results


def test_a_run_directory_holds_whole_files_only(trained):
    names = {path.relative_to(trained).as_posix() for path in trained.rglob("*") if path.is_file()}
    steps = [f"checkpoints/step_{step:08d}" for step in (5, 7, 8)]  # keep 3 of 2, 3, 5, 7 and 8
    files = ("model.safetensors", "optimizer.safetensors", "state.json")
    wanted = {f"{step}/{file}" for step in steps for file in files}
    wanted |= {f"checkpoints/best/{file}" for file in ("model.safetensors", "state.json")}
    assert names == wanted | {"metrics.jsonl", "per_scene.parquet", "summary.json"}


def test_the_summary_follows_from_the_rows(trained):
    summary = json.loads((trained / "summary.json").read_text())
    rows = defaultdict(list)
    for row in pq.read_table(trained / "per_scene.parquet").to_pylist():
        rows[row["evaluation"]].append(row)
    names = ["start", "warm_start", *(f"val_{step:06d}" for step in (0, 2, 4, 5)), "final", "best"]
    assert list(rows) == list(summary["evaluations"]) == names
    for name, drives in rows.items():
        evaluation = summary["evaluations"][name]
        assert evaluation["driving_score"]["n"] == len(drives) == (2 if name.startswith("val") else 3)
        for key in ("driving_score", "reward"):
            assert evaluation[key]["mean"] == pytest.approx(np.mean([d[key] for d in drives]), abs=1e-9)
            assert evaluation[key]["low"] <= evaluation[key]["mean"] <= evaluation[key]["high"]
        for term, mean in evaluation["terms"].items():
            assert mean == pytest.approx(np.mean([d[f"term/{term}"] for d in drives]), abs=1e-9)
        for measure, numbers in evaluation["measures"].items():
            values = np.array([d[f"measure/{measure}"] for d in drives])
            assert numbers["n"] == len(values)
            assert numbers["mean"] == pytest.approx(values.mean(), abs=1e-9)
            assert numbers["std"] == pytest.approx(values.std(), abs=1e-9)
        for d in drives:
            assert d["reward"] == pytest.approx(d["term/progress"] + d["term/collision"], abs=1e-9)
    gain = [
        after["driving_score"] - before["driving_score"]
        for before, after in zip(rows["warm_start"], rows["final"], strict=True)
    ]
    assert summary["paired_gain"]["mean"] == pytest.approx(np.mean(gain), abs=1e-9)


def test_the_metrics_hold_a_row_a_step_and_an_evaluation(trained):
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((trained / "summary.json").read_text())
    grpo = [f"grpo {k}" for k in range(1, 6)]
    wanted = ["evaluate/start 0", *(f"imitation {k}" for k in (1, 2, 3)), "evaluate/warm_start 3"]
    wanted += ["evaluate/val_000000 3", *grpo[:2], "evaluate/val_000002 5", *grpo[2:4], "evaluate/val_000004 7"]
    wanted += [grpo[4], "evaluate/val_000005 8", "evaluate/final 8", f"evaluate/best {summary['best']['total_steps']}"]
    assert [f"{row['stage']} {row['step']}" for row in rows] == wanted
    for row in rows:
        if row["stage"].startswith("evaluate/"):
            score = summary["evaluations"][row["stage"].removeprefix("evaluate/")]["driving_score"]
            assert (row["driving_score"], row["n"]) == (score["mean"], score["n"])
        elif row["stage"] == "grpo":
            assert row["reward"] == pytest.approx(row["term/progress"] + row["term/collision"], abs=1e-9)


def test_the_summary_names_what_it_depends_on(trained):
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["config_hash"] == configure().config_hash
    assert summary["reward"]["collision"] == {"type": "collision", "scale": -1.0, "at_fault": False, "once": False}
    assert summary["dataset"]["test_scenes"] == 3
    assert summary["versions"].keys() >= {"python", "alpagym-runtime", "numpy", "torch"}
    assert {e["filter"] for e in summary["evaluations"].values()} == {"not failed and not initial_fault"}
    assert min(summary["wall_s"], summary["cpu_s"], summary["peak_rss_bytes"]) > 0


def test_one_drive_less_is_one_less_in_the_summary(trained):
    rows = [row for row in pq.read_table(trained / "per_scene.parquet").to_pylist() if row["evaluation"] == "final"]
    whole, less = summarise(rows, 100), summarise(rows[1:], 100)
    for key in ("driving_score", "reward", "progress"):
        assert less[key]["n"] == whole[key]["n"] - 1
    assert less["measures"]["progress"]["n"] == whole["measures"]["progress"]["n"] - 1
    assert less["reward"]["mean"] == pytest.approx(np.mean([row["reward"] for row in rows[1:]]), abs=1e-9)
    # A row that is changed afterwards changes the total: nothing stale is kept.
    changed = [row | {"reward": row["reward"] + 1.0} for row in rows]
    assert summarise(changed, 100)["reward"]["mean"] == pytest.approx(whole["reward"]["mean"] + 1.0, abs=1e-9)


def test_failed_and_faulty_drives_are_counted_and_never_scored(trained):
    rows = [row for row in pq.read_table(trained / "per_scene.parquet").to_pylist() if row["evaluation"] == "final"]
    failed = rows[0] | {"failed": True, "driving_score": None, "reward": None, "family": ""}
    found = summarise([failed, rows[1] | {"initial_fault": True}, rows[2]], 100)
    assert (found["failed"], found["initial_fault"], found["driving_score"]["n"]) == (1, 1, 1)
    assert found["driving_score"]["mean"] == rows[2]["driving_score"]
    empty = summarise([failed], 100)
    assert (empty["driving_score"]["mean"], empty["driving_score"]["n"]) == (None, 0)


def test_a_reward_that_is_not_finite_is_left_out_of_the_mean_and_counted(trained):
    rows = [row for row in pq.read_table(trained / "per_scene.parquet").to_pylist() if row["evaluation"] == "final"]
    found = summarise([rows[0] | {"reward": float("nan")}, *rows[1:]], 100)
    assert (found["non_finite_reward"], found["reward"]["n"], found["driving_score"]["n"]) == (1, 2, 3)
    assert found["reward"]["mean"] == pytest.approx(np.mean([row["reward"] for row in rows[1:]]))


def test_imitation_learns_the_toy_worlds_expert(tmp_path):
    trainer = {"type": "sft", "drives_per_scene": 2, "epochs": 40, "batch": 64, "learning_rate": 5e-3}
    outcome = Run(
        configure(trainer, dataset={"train_scenes": 24, "test_scenes": 8}, expected_valid_steps=30), tmp_path
    ).train()
    losses = [row["loss"] for row in training_rows(tmp_path)]
    assert losses[-1] < 0.7 * losses[0]
    score = {name: e["driving_score"]["mean"] for name, e in outcome.summary["evaluations"].items()}
    # The parked car stands in the way of who keeps straight on.
    assert score["final"] > score["start"] + 0.5


def test_progress_is_shown_under_its_own_stage(tmp_path):
    reporter = Notes()
    Run(configure(), tmp_path, reporter=reporter).train()
    assert [stage for stage in reporter.stages if stage[1] > stage[2]] == []
    assert [stage for stage in reporter.stages if stage[0] == "grpo"] == [
        ["grpo", 2, 5],
        ["grpo", 4, 5],
        ["grpo", 5, 5],
    ]


# ---------------------------------------------------------------- what is refused


def test_a_policy_without_weights_is_no_trainee(tmp_path):
    with pytest.raises(ConfigError, match="policy: 'log_replay' has no weights to train"):
        Run(configure(policy={"type": "log_replay"}), tmp_path).train()


@dataclass
class PeekingConfig(WaypointConfig):
    """A trainable policy that reads the expert's plan."""

    def spec(self):
        from dataclasses import replace

        return replace(super().spec(), privileged=("target_plan_rig",))


@pytest.mark.parametrize("trainer", [GRPO, {"type": "sft"} | SFT])
def test_a_policy_that_reads_privileged_labels_is_no_trainee(trainer, tmp_path):
    config = configure(trainer)
    config.policy = Plugin("peeking", PeekingConfig(hidden=16, actors=1))
    with pytest.raises(ConfigError, match=r"policy: 'peeking' reads privileged labels \(target_plan_rig\)"):
        Run(config, tmp_path).train()
    assert list(tmp_path.iterdir()) == []


def test_a_reward_of_an_unknown_measure_stops_before_the_first_drive(tmp_path):
    terms = {"x": {"type": "measure", "scale": 1.0, "measure": "offroad_cuont"}}
    with pytest.raises(ConfigError, match="reward.terms.x.measure: .*did you mean 'offroad_count'.*known: along_track"):
        Run(configure(reward={"terms": terms}), tmp_path).train()
    assert not (tmp_path / "summary.json").exists()


@dataclass
class StubConfig:
    """A term that pays `value` at the second tick to the chosen members of groups, and 0 else."""

    value: float = 0.0
    groups: tuple[int, ...] = ()
    members: tuple[int, ...] = ()
    broken: bool = False

    def build(self, simulator_spec):
        if self.broken:
            raise ImportError("No module named 'scorer'")
        return Stub(self)


class Stub(Term):
    def __init__(self, config):
        self._config = config

    def tick(self, batch, decisions):
        chosen = [r.group_id in self._config.groups and r.member in self._config.members for r in batch.requests]
        return np.where(np.array(chosen, bool) & (batch.tick == 2), self._config.value, 0.0)


def with_stub(**options):
    config = configure(GRPO | {"updates": 1, "warm_start": None, "least_advantage": 0.0})
    config.reward.terms["stub"] = TermSection("stub", 1.0, StubConfig(**options))
    return config


def test_a_scorer_that_does_not_import_fails_the_run(tmp_path):
    with pytest.raises(ImportError, match="scorer"):
        Run(with_stub(broken=True), tmp_path).train()
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_removes_its_episode_only_and_is_counted(value, tmp_path):
    Run(with_stub(value=value, groups=(0, 1), members=(1,)), tmp_path).train()
    (row,) = training_rows(tmp_path)
    wanted = {"non_finite": 2, "groups": 2, "groups_dropped": 0, "groups_informative": 2, "steps_refused": 0}
    assert {name: row[name] for name in wanted} == wanted
    assert row["decisions"] == row["ticks"]
    assert np.isfinite([row["loss"], row["reward"], row["term/stub"]]).all()


def test_a_group_below_its_minimum_is_dropped_and_counted(tmp_path):
    Run(with_stub(value=float("nan"), groups=(0,), members=(0, 2)), tmp_path).train()
    (row,) = training_rows(tmp_path)
    assert (row["non_finite"], row["groups"], row["groups_dropped"]) == (2, 2, 1)


def test_a_step_without_any_usable_episode_says_so(tmp_path):
    with pytest.raises(SimulatorError, match="none of the 6 episodes of this step is usable: .* not finite"):
        Run(with_stub(value=float("nan"), groups=(0, 1), members=(0, 1, 2)), tmp_path).train()


def test_equal_rewards_train_nothing_and_are_reported(tmp_path):
    config = with_stub()
    config.reward.terms = {"stub": config.reward.terms["stub"]}
    reporter = Notes()
    Run(config, tmp_path, reporter=reporter).train()
    (row,) = training_rows(tmp_path)
    assert (row["groups_informative"], row["groups"], row["decisions_kept"]) == (0, 2, 0)
    assert "loss" not in row
    assert reporter.notes == [
        "step 1: nothing to learn from: 0 of 2 groups have too few valid episodes, the rewards of the others are equal"
    ]
    fresh = WaypointConfig(hidden=16, actors=1).build().module.state_dict()
    assert_same(weights_of(tmp_path), {name: tensor.numpy() for name, tensor in fresh.items()}, "the weights")


def weights_of(directory):
    return {name: tensor.numpy() for name, tensor in sorted_like(load_weights(directory)).items()}


def sorted_like(weights):
    return {name: weights[name] for name in WaypointConfig(hidden=16, actors=1).build().module.state_dict()}


def test_a_budget_ends_the_stage_and_the_run_goes_on_to_its_end(tmp_path):
    outcome = Run(configure(GRPO | {"updates": 500, "budget_s": 0.01}), tmp_path).train()
    assert outcome.completed
    assert "final" in outcome.summary["evaluations"]
    # The first step takes more than 10 ms.
    assert [row["step"] for row in training_rows(tmp_path) if row["stage"] == "grpo"] == [1]


def test_exploration_cools_to_its_share(tmp_path):
    trainer = GRPO | {"updates": 3, "temperature": 2.0, "final_temperature_share": 0.25}
    config = configure(trainer, store={"record": ["train"]})
    run = Run(config, tmp_path)
    run.train()
    rows = run.store.rows(["actor=policy"])
    temperatures = {run.store.open(name).meta["sampling"]["temperature"] for name in rows["id"].to_pylist()}
    # 2 to 0.5 in three steps
    assert temperatures == {2.0, 1.25, 0.5}


def test_ppo_logs_what_its_value_knows(tmp_path):
    policy = {"type": "waypoint", "hidden": 16, "actors": 1, "value_head": True}
    assert Run(configure(GRPO | {"type": "ppo"}, policy=policy), tmp_path).train().completed
    rows = [row for row in training_rows(tmp_path) if row["stage"] == "ppo"]
    assert len(rows) == 5
    for row in rows:
        assert row["explained_variance"] <= 1.0
        assert row["value_loss"] >= 0.0
        assert all(describe(name) for name in row if name not in ("stage", "step", "total_steps"))
    assert any(name.startswith("value.") for name in load_weights(tmp_path))


def test_retried_episodes_are_counted(tmp_path):
    Run(
        configure(GRPO | {"updates": 1, "warm_start": None}, simulator={"type": "toy", "fail_every": 3}), tmp_path
    ).train()
    (row,) = training_rows(tmp_path)
    # Of six first attempts every third fails; the second attempt of a request never does.
    assert (row["episodes_retried"], row["episodes_episodes"], row["void"]) == (2, 6, 0)


def test_every_number_that_is_logged_has_a_meaning(trained):
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert {name for row in rows for name in row if describe(name) is None} == {"stage", "step"}


def test_a_step_says_where_its_time_went_and_how_old_its_decisions_are(trained):
    for row in training_rows(trained):
        if row["stage"] == "grpo":
            assert 0 < row["seconds_act"] < row["seconds_drive"] < row["seconds"]
            assert row["throughput/decisions_per_s"] == pytest.approx(row["ticks"] / row["seconds"])
            # One process that drives, then trains, then drives again.
            assert (row["staleness_mean"], row["staleness_max"]) == (0.0, 0.0)
            assert row["ratio_min"] <= row["ratio_mean"] <= row["ratio_max"]


# ---------------------------------------------------------------- the best checkpoint, and when imitation ends


def test_the_best_on_val_is_kept_and_shown_beside_the_last(trained):
    summary = json.loads((trained / "summary.json").read_text())
    val = {n: e["driving_score"]["mean"] for n, e in summary["evaluations"].items() if n.startswith("val_")}
    best = summary["best"]
    assert best["driving_score"] == max(val.values())
    assert best["evaluation"] == next(name for name, score in val.items() if score == max(val.values()))
    found = CheckpointStore(trained / "checkpoints", 1).best()
    assert found is not None
    assert found[1]["total_steps"] == best["total_steps"]
    assert summary["comparisons"][1]["after"] == "best"
    assert summary["comparisons"][0]["driving_score"].items() <= summary["paired_gain"].items()


def test_the_best_weights_are_those_that_scored(trained, tmp_path):
    summary = json.loads((trained / "summary.json").read_text())
    again = Run(configure(checkpoint={"path": str(trained / "checkpoints" / "best")}), tmp_path).evaluate()
    wanted, found = summary["evaluations"]["best"], again.summary["evaluations"]["final"]
    assert found == wanted


def test_an_exported_model_in_shards_is_read_whole(trained, tmp_path):
    weights = load_weights(trained / "checkpoints" / "best")
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, keys in parts.items():
        save_file({key: weights[key] for key in keys}, tmp_path / file)
    index = {"weight_map": {key: file for file, keys in parts.items() for key in keys}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same(
        {k: v.numpy() for k, v in sorted(load_weights(tmp_path).items())},
        {name: weights[name].numpy() for name in names},
        "the weights",
    )
    save_file({key: weights[key] for key in names[4:]}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(
        CorruptFileError, match=f"00002.safetensors and .* disagree about {re.escape(names[3])}; export"
    ):
        load_weights(tmp_path)
    index["weight_map"][names[0]] = "../elsewhere.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptFileError, match="names '../elsewhere.safetensors', which is not beside it"):
        load_weights(tmp_path)


def test_imitation_ends_when_validation_stops_improving_and_keeps_the_best_epoch(tmp_path):
    # At this rate it is soon as good as it gets, long before 200 epochs.
    trainer = {"type": "sft"} | SFT | {"epochs": 200, "patience": 2, "learning_rate": 0.05}
    Run(configure(trainer), tmp_path).train()
    losses = [row["validation_loss"] for row in training_rows(tmp_path)]
    assert len(losses) < 200
    best = int(np.argmin(losses))
    assert len(losses) == best + 1 + 2
    assert [row["epochs_waited"] for row in training_rows(tmp_path)][-3:] == [0, 1, 2]
    state = load_checkpoint(CheckpointStore(tmp_path / "checkpoints", 1).latest()).state["stage_state"]
    assert state == {"best_loss": losses[best], "best_epoch": best + 1}


def test_a_cool_down_follows_the_best_epoch_and_its_last_weights_stay(tmp_path):
    trainer = {"type": "sft"} | SFT | {"epochs": 200, "patience": 1, "cool_down": 3, "learning_rate": 0.05}
    run = Run(configure(trainer), tmp_path)
    run.train()
    losses = [row["validation_loss"] for row in training_rows(tmp_path)]
    # Up to the first epoch that is no better than the best before it; then three more.
    first = next(k for k in range(1, len(losses)) if losses[k] >= min(losses[:k]))
    assert len(losses) == first + 1 + 3
    checkpoint = load_checkpoint(CheckpointStore(tmp_path / "checkpoints", 1).latest())
    assert checkpoint.state["stage_state"]["cooling"] == first + 1
    last = {name: value.numpy() for name, value in checkpoint.weights.items()}
    assert_same({n: v.numpy() for n, v in run.policy.module.state_dict().items()}, last, "the weights")


def test_a_cool_down_ends_with_the_epochs(tmp_path):
    Run(configure({"type": "sft"} | SFT | {"epochs": 5, "patience": 0, "cool_down": 2}), tmp_path).train()
    assert len(training_rows(tmp_path)) == 5
    state = load_checkpoint(CheckpointStore(tmp_path / "checkpoints", 1).latest()).state["stage_state"]
    assert state == {"cooling": 3}


def test_the_rate_rises_stays_and_falls():
    config = SftConfig(epochs=10, cool_down=2)
    shares = [_share_of_rate(config, made, None) for made in (0.0, 0.375, 0.75, 5.0)]
    assert shares == pytest.approx([0.1, 0.55, 1.0, 1.0])
    # A cosine from 1 to 0.01 over the epochs 5 and 6: half way 0.505.
    assert [_share_of_rate(config, made, 5) for made in (5.0, 6.0, 7.0)] == pytest.approx([1.0, 0.505, 0.01])
    assert [SftConfig(epochs=most, cool_down=3).cool_down_epochs for most in (1, 2, 4, 9)] == [0, 1, 3, 3]


def test_without_patience_imitation_makes_all_epochs_and_validates_nothing(tmp_path):
    Run(configure({"type": "sft"} | SFT | {"patience": 0}), tmp_path).train()
    rows = training_rows(tmp_path)
    assert len(rows) == SFT["epochs"]
    assert not any("validation_loss" in row for row in rows)


@dataclass
class File:
    """What `hold_out` reads of an episode file."""

    request: EpisodeRequest


def test_a_tenth_of_a_stores_scenes_is_held_out_whole():
    files = [File(EpisodeRequest(f"s{i % 20}", member=i)) for i in range(60)]
    train, held = hold_out(files, 0.1)
    assert len({file.request.scene_id for file in held}) == 2
    assert len(held) == 6
    assert {f.request.scene_id for f in train} & {f.request.scene_id for f in held} == set()
    # The order of the files does not matter, and few scenes are all needed.
    assert {f.request.scene_id for f in hold_out(files[::-1], 0.1)[1]} == {f.request.scene_id for f in held}
    assert hold_out(files[:9], 0.1) == (files[:9], [])


# ---------------------------------------------------------------- evaluate


def test_a_checkpoint_is_evaluated_as_it_was_trained(trained, tmp_path):
    config = configure(checkpoint={"path": str(trained)})
    outcome = Run(config, tmp_path).evaluate()
    final = json.loads((trained / "summary.json").read_text())["evaluations"]["final"]
    assert outcome.summary["evaluations"] == {"final": final}
    again = Run(config, tmp_path).evaluate()
    assert again.summary["evaluations"] == outcome.summary["evaluations"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_references_drive_the_same_scenes_and_policies_are_held_against_them(tmp_path):
    embedded = {
        "simulator": {"type": "embedded", "control_period_us": 200_000},
        "policy": {"type": "constant_speed", "speed_factor": 0.0},
        "dataset": {"train_scenes": 1, "val_scenes": 1, "test_scenes": 3},
    }
    summary = Run(configure(**embedded), tmp_path).evaluate().summary
    found = summary["references"]
    assert list(found) == ["recording", "parking", "creeping", "weaving"]
    # The policy is the one that parks: nobody is ahead.
    final = summary["evaluations"]["final"]
    assert found["parking"]["driving_score"]["mean"] == final["driving_score"]["mean"]
    assert found["parking"]["ahead"]["final"]["reward"] == {"mean": 0.0, "low": 0.0, "high": 0.0, "n": 3}
    behind = final["driving_score"]["mean"] - found["recording"]["driving_score"]["mean"]
    assert found["recording"]["ahead"]["final"]["driving_score"]["mean"] == pytest.approx(behind)
    assert behind < 0.0
    # A second process finds them driven; without the option nobody drives.
    again = Notes()
    assert Run(configure(**embedded), tmp_path, again).evaluate().summary["references"] == found
    assert again.stages == []
    off = embedded | {"evaluation": {"bootstrap": 100, "videos": False, "references": False}}
    (tmp_path / "off").mkdir()
    assert "references" not in Run(configure(**off), tmp_path / "off").evaluate().summary


def test_evaluate_drives_the_split_that_was_asked_for(trained, tmp_path):
    dataset = {"train_scenes": 4, "val_scenes": 2, "test_scenes": 3, "split": "val"}
    Run(configure(dataset=dataset, checkpoint={"path": str(trained)}), tmp_path).evaluate()
    scenes = pq.read_table(tmp_path / "per_scene.parquet")["scene_id"].to_pylist()
    assert scenes == ["toy-128", "toy-129"]


def test_an_evaluation_can_be_stopped(tmp_path):
    outcome = Run(configure(), tmp_path, stop_requested=lambda: True).evaluate()
    assert (outcome.completed, outcome.summary["evaluations"]) == (False, {})


def test_weights_of_another_policy_are_refused(trained, tmp_path):
    config = configure(policy={"type": "waypoint", "hidden": 24}, checkpoint={"path": str(trained)})
    with pytest.raises(ConfigError, match="checkpoint.path: the weights in .* do not fit this policy"):
        Run(config, tmp_path).evaluate()
    with pytest.raises(CorruptFileError, match="model.safetensors does not exist"):
        Run(configure(checkpoint={"path": str(tmp_path)}), tmp_path).evaluate()


# ---------------------------------------------------------------- resume


def test_a_completed_run_is_not_made_again(copied):
    before = run_results(copied)
    assert Run(configure(), copied).train().completed
    assert_same(run_results(copied), before, "the run")


def test_a_checkpoint_of_another_config_is_refused(copied):
    with pytest.raises(ConfigError, match="step_00000008 belongs to another config"):
        Run(configure(GRPO | {"learning_rate": 1e-3}), copied).train()
    # The name and the place of a run are no part of it.
    assert Run(configure(run={"seed": 3, "name": "other", "root": "elsewhere"}), copied).train().completed


def test_a_broken_newest_checkpoint_is_named_and_the_one_before_it_serves(copied):
    whole = run_results(copied)
    file = copied / "checkpoints" / "step_00000008" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CorruptFileError, match=r"step_00000008/model.safetensors \(\d+ bytes\) is not whole: .*remove"):
        Run(configure(), copied).train()
    shutil.rmtree(file.parent)
    Run(configure(), copied).train()
    assert_same(run_results(copied), whole, "the run")


def test_a_cut_table_of_drives_is_named_and_no_wrong_evaluation_replaces_it(copied):
    file = copied / "per_scene.parquet"
    for data in (file.read_bytes()[:-10], b"", b"PAR1"):
        file.write_bytes(data)
        with pytest.raises(
            CorruptFileError, match=rf"per_scene.parquet \({len(data)} bytes\) is not whole: .*remove it"
        ):
            Run(configure(), copied)
    file.unlink()
    final = json.loads((copied / "summary.json").read_text())["evaluations"]["final"]
    reporter = Notes()
    outcome = Run(configure(), copied, reporter=reporter).train()
    # The weights that `start` measured are gone; those of `final` and of `best` are in checkpoints.
    assert list(outcome.summary["evaluations"]) == ["val_000005", "final", "best"]
    assert outcome.summary["evaluations"]["final"] == final
    assert "evaluation 'start' is lost: the weights of step 0 are gone" in reporter.notes


def test_a_stop_between_checkpoints_keeps_the_steps_that_were_made(tmp_path):
    calls = 0

    def stop_requested():
        # Turns true inside the evaluation that follows update 2, where no checkpoint was due.
        nonlocal calls
        calls += len(training_rows(tmp_path)) == 5
        return calls > 1

    config = configure(checkpoint={"every_updates": 100})
    assert not Run(config, tmp_path, stop_requested=stop_requested).train().completed
    newest = CheckpointStore(tmp_path / "checkpoints", 1).latest()
    assert newest is not None
    assert newest.name == "step_00000005"


KILLED = """
import json, os, random, signal, sys, time
from pathlib import Path
from alpagym_runtime.run_config import from_mapping
from alpagym_runtime.telemetry.metrics import describe
from alpagym_runtime.testing.conformance import run_results
from alpagym_runtime.testing.examples import assert_same
from alpagym_runtime.trainers.checkpoints import CheckpointStore, load_checkpoint
from alpagym_runtime.rollouts.table import read_rows
from alpagym_runtime.trainers.run import Run

config = from_mapping(json.loads(sys.argv[1]))
whole, broken = Path("whole"), Path("broken")
whole.mkdir(), broken.mkdir()
Run(config, whole).train()
draw = random.Random(int(sys.argv[2]))
for attempt in range(6):
    child = os.fork()
    if child == 0:
        Run(config, broken).train()
        os._exit(0)
    time.sleep(draw.uniform(0.02, 0.3))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    # Whatever has its final name is whole.
    store = CheckpointStore(broken / "checkpoints", 9)
    for step in store.steps():
        load_checkpoint(store.folder / f"step_{step:08d}")
    read_rows(broken / "per_scene.parquet")
    print("killed", attempt, store.steps(), flush=True)
Run(config, broken).train()
assert_same(run_results(broken), run_results(whole), "the killed run")
left = [path for path in broken.rglob(".partial-*")]
assert not left, left
"""


def test_a_run_that_is_killed_at_random_moments_gives_the_results_of_an_unbroken_one(tmp_path):
    data = mapping(checkpoint={"every_updates": 1})
    done = subprocess.run(
        [sys.executable, "-c", KILLED, json.dumps(data), "1"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed") == 6


# ---------------------------------------------------------------- checkpoints


def small_checkpoint(value=1.0):
    return Checkpoint({"w": torch.full((100,), value)}, {"0.step": torch.tensor(3.0)}, {"step": 3})


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path):
    weights = {
        "w": torch.randn(3, 4),
        "half": torch.randn(5).bfloat16(),
        "count": torch.arange(3),
        "none": torch.zeros(0),
    }
    place = CheckpointStore(tmp_path / "checkpoints", 1).save(7, Checkpoint(weights, {}, {"a": [1, None]}))
    found = load_checkpoint(place)
    assert found.state == {"a": [1, None]}
    assert found.weights.keys() == weights.keys()
    for name, tensor in weights.items():
        assert found.weights[name].dtype == tensor.dtype
        assert torch.equal(found.weights[name], tensor)


def test_the_newest_checkpoints_are_kept(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", 2)
    for step in (1, 5, 9, 30):
        store.save(step, small_checkpoint(step))
    assert store.steps() == [9, 30]
    store.save(30, small_checkpoint(31.0))
    assert load_checkpoint(store.latest()).weights["w"][0] == 31.0
    assert sorted(path.name for path in store.folder.iterdir()) == ["step_00000009", "step_00000030"]


class Bomb:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "empty", "missing", "pickle"])
def test_a_damaged_checkpoint_is_named_with_what_to_do(name, damage, tmp_path):
    place = CheckpointStore(tmp_path / "checkpoints", 1).save(1, small_checkpoint())
    file, marker = place / name, tmp_path / "marker"
    if damage == "missing":
        file.unlink()
    else:
        whole = file.read_bytes()
        file.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "pickle": pickle.dumps(Bomb(marker))}[damage])
    size = "" if damage == "missing" else rf" \({file.stat().st_size} bytes\)"
    with pytest.raises(CorruptFileError, match=rf"{name}{size} (is not whole|is missing|does not exist).*(remove|is)"):
        load_checkpoint(place)
    assert not marker.exists()


def test_a_table_of_drives_that_is_a_pickle_is_an_error(tmp_path):
    (tmp_path / "per_scene.parquet").write_bytes(pickle.dumps(Bomb(tmp_path / "marker")))
    with pytest.raises(CorruptFileError, match="is not whole"):
        Run(configure(), tmp_path)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("state", ["{}", "[]", "3"])
def test_a_state_of_another_kind_is_an_error(state, copied):
    (copied / "checkpoints" / "step_00000008" / "state.json").write_text(state)
    with pytest.raises(CorruptFileError, match=r"state.json (lacks|holds no mapping).*remove .*step_00000008"):
        Run(configure(), copied).train()


# ---------------------------------------------------------------- links


@pytest.fixture
def outside(tmp_path):
    """A file and a folder that nothing may touch."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "mine").write_text("mine")
    yield folder
    assert [path.name for path in folder.iterdir()] == ["mine"]
    assert (folder / "mine").read_text() == "mine"


@pytest.mark.parametrize(("name", "target"), [("metrics.jsonl", "mine"), ("checkpoints", ".")])
def test_a_link_that_leads_out_of_the_run_directory_is_refused(name, target, outside, tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / name).symlink_to(outside / target)
    with pytest.raises(ConfigError, match=f"{name} is a symbolic link"):
        Run(configure(), directory)


def test_links_are_replaced_and_never_followed(outside, copied):
    for name in ("summary.json", "per_scene.parquet"):
        (copied / name).unlink()
        (copied / name).symlink_to(outside / "mine" if name == "summary.json" else outside / "absent")
    (copied / ".partial-x").symlink_to(outside / "mine")
    Run(configure(), copied).train()
    assert not (copied / "summary.json").is_symlink()


def test_links_among_the_checkpoints_are_no_checkpoints_and_are_not_cleaned_through(outside, tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", 1)
    store.folder.mkdir()
    (store.folder / "step_00000009").symlink_to(outside)
    (store.folder / ".partial-x").symlink_to(outside)
    assert (store.steps(), store.latest()) == ([], None)
    store.save(9, small_checkpoint())
    store.save(10, small_checkpoint())
    assert store.steps() == [10]
    assert [path.name for path in store.folder.iterdir()] == ["step_00000010"]


def test_the_run_directory_is_all_that_a_run_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = Path("run")
    directory.mkdir()
    Run(configure(GRPO | {"updates": 1, "warm_start": None}), directory).train()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
