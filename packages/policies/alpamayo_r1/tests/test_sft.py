from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from alpagym_alpamayo_r1 import evaluate, train
from alpagym_alpamayo_r1.checkpoints import load_backbone
from alpagym_alpamayo_r1.recipe import read_recipe, run_config
from alpagym_alpamayo_r1.sft_config import AlpamayoSftConfig
from alpagym_alpamayo_r1.sft_data import Plan
from alpagym_alpamayo_r1.sft_schedule import parameter_groups, rate_share
from alpagym_alpamayo_r1.tiny import make_tiny
from alpagym_plugins import ConfigError
from alpagym_runtime.run_config import from_mapping, to_mapping
from alpagym_runtime.testing.pai import REASONING, shared_tree
from alpagym_runtime.trainers.run import Run

CAMERA = "camera_front_wide_120fov"


def tiny_run(directory, stage: int, **trainer) -> Run:
    """A run of the tiny model on one clip of the synthetic tree, one camera of one picture."""
    dataset = {"source": "pai", "path": str(shared_tree()), "scene_ids": trainer.pop("scene_ids", [clip()])}
    config = {
        "run": {"seed": 3},
        "expected_valid_steps": 1,
        "simulator": {"type": "pai", "workers": 0},
        "dataset": dataset | trainer.pop("dataset", {}),
        "policy": {
            "type": "alpamayo_tiny",
            "head": "tokens" if stage == 1 else "expert",
            "cameras": ["front_wide_120fov"],
            "frames": 1,
            "future_bins": 256,
        },
        "reward": {"terms": {"pai_motion": {"type": "pai_motion", "scale": 1.0}}},
        "rollout": {"slots": 2},
        "transport": {"type": "memory"},
        "trainer": {"type": "alpamayo_sft", "stage": stage, "evaluate": False, "bf16": False, **trainer},
        "evaluation": {"every_updates": 0, "videos": False},
        "checkpoint": {"every_updates": 4, "keep": 2},
        "logging": {"loggers": {"jsonl": {"type": "jsonl"}}},
    }
    directory.mkdir(exist_ok=True)
    return Run(from_mapping(config), directory)


def clip(row: int = 0) -> str:
    from alpagym_runtime.simulators.pai.clips import ClipIndex

    return str(ClipIndex.read(shared_tree() / "clip_index.parquet").clip_id[row])


def rows(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------- when, how fast, in which order


def test_rate_climbs_over_the_warm_up_and_falls_by_a_cosine():
    config = AlpamayoSftConfig(learning_rate=1e-4, min_learning_rate=1e-6, warmup_steps=4)
    # (step + 1) / 4 in the warm-up; of the 6 steps after it the third is half way: 0.01 + 0.99 / 2 = 0.505
    shares = [rate_share(step, 10, config) for step in range(10)]
    np.testing.assert_allclose(shares[:4], [0.25, 0.5, 0.75, 1.0])
    np.testing.assert_allclose([shares[6], shares[9]], [0.505, 0.01])


def test_longest_prefix_gives_the_factor_and_only_matrices_decay():
    weights = {
        "vlm.model.visual.weight": torch.zeros(2, 2),
        "vlm.model.visual.bias": torch.zeros(2),
        "vlm.model.visual_like": torch.zeros(2, 2),
        "vlm.lm_head.weight": torch.zeros(2, 2),
    }
    config = AlpamayoSftConfig(lr_multiplier={"vlm": 0.5, "vlm.model.visual": 0.1}, weight_decay=0.01)
    groups = [(g["factor"], g["weight_decay"], len(g["params"])) for g in parameter_groups(weights, config)]
    assert groups == [(0.1, 0.01, 1), (0.1, 0.0, 1), (0.5, 0.01, 2)]
    with pytest.raises(ConfigError, match=r"'vlm.visual' fits no weight.*vlm.model.visual"):
        parameter_groups(weights, AlpamayoSftConfig(lr_multiplier={"vlm.visual": 0.1}))


def test_a_pass_has_every_sample_and_each_process_as_many_forwards():
    # 5 samples on 2 processes: 3 forwards each, so one sample comes twice; with 2 forwards a step: 2 steps of 2 and 1
    plan = Plan(samples=5, batch=1, accumulate=2, processes=2, epochs=2, max_steps=0, seed=1)
    assert (plan.steps_an_epoch, plan.steps) == (2, 4)
    passes = [[plan.of_step(step, rank) for step in (0, 1) for rank in (0, 1)] for _ in range(2)]
    assert [len(forwards) for forwards in passes[0]] == [2, 2, 1, 1]
    seen = sorted(sample for forwards in passes[0] for rows in forwards for sample in rows)
    assert set(seen) == set(range(5))
    assert len(seen) == 6
    assert passes[0] == passes[1]
    assert [plan.of_step(2, 0), plan.of_step(3, 0)] != [plan.of_step(0, 0), plan.of_step(1, 0)]
    # One process with twice the forwards learns from the same samples in a step that needs no filling up.
    alone = dataclasses.replace(plan, processes=1, accumulate=4)
    both = [plan.of_step(0, 0), plan.of_step(0, 1)]
    flat = lambda parts: {sample for rows in parts for sample in rows}  # noqa: E731
    assert flat(alone.of_step(0, 0)) == flat(both[0]) | flat(both[1])


# ---------------------------------------------------------------- weights of stage 1


def test_a_language_model_is_taken_whole_or_not_at_all(tmp_path):
    model, _ = make_tiny()
    other = make_tiny(seed=5)[0].state_dict()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stripped = {name.removeprefix("vlm."): value for name, value in other.items() if name.startswith("vlm.")}
    cut = dict(stripped)
    gone = sorted(cut)[3]
    del cut[gone]
    save_file(cut, tmp_path / "cut.safetensors")
    with pytest.raises(ConfigError, match=rf"none of it was taken: 1 of \d+ missing: vlm.{gone}"):
        load_backbone(model, tmp_path / "cut.safetensors")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    save_file(stripped, tmp_path / "stripped.safetensors")
    save_file(other, tmp_path / "whole.safetensors")  # with an expert, which stays the model's own
    for name in ("stripped", "whole"):
        load_backbone(model, tmp_path / f"{name}.safetensors")
        for key, value in model.state_dict().items():
            assert torch.equal(value, other[key] if key.startswith("vlm.") else before[key])


# ---------------------------------------------------------------- the two stages


def test_one_sample_is_learnt_by_heart_in_100_steps_and_a_resumed_run_ends_the_same(tmp_path):
    settings = {"max_steps": 100, "epochs": 100, "learning_rate": 2e-2, "min_learning_rate": 1e-3, "warmup_steps": 10}
    run = tiny_run(tmp_path / "whole", 1, beta2=0.99, **settings)
    assert run.train().completed
    losses = [row["loss"] for row in rows(tmp_path / "whole")]
    # Random weights: about 2 ln V, V = 1,969 words: 15.2.
    assert losses[0] == pytest.approx(2.0 * np.log(run.policy.module.architecture.vocab_size), abs=0.5)
    assert losses[-1] < 0.1
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step_00000100")
    assert tiny_run(tmp_path / "cut", 1, beta2=0.99, **settings).train().completed  # from step 96
    weights = [load_file(tmp_path / name / "checkpoint-100" / "model.safetensors") for name in ("whole", "cut")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert [row["loss"] for row in rows(tmp_path / "cut")] == losses
    assert sorted(place.name for place in (tmp_path / "cut").glob("checkpoint-*")) == [
        "checkpoint-100",
        "checkpoint-96",
    ]


def test_stage_2_trains_the_expert_over_the_language_model_of_stage_1(tmp_path):
    model, _ = make_tiny(run_size(), seed=9)
    save_file(model.state_dict(), tmp_path / "stage1.safetensors")
    run = tiny_run(
        tmp_path / "run", 2, stage1_path=str(tmp_path / "stage1.safetensors"), max_steps=4, epochs=9, learning_rate=1e-3
    )
    before = {name: value.clone() for name, value in run.policy.module.state_dict().items()}
    assert run.train().completed
    moved = {n for n, v in run.policy.module.state_dict().items() if not torch.equal(v, before[n])}
    taken = {n for n, v in model.state_dict().items() if n.startswith("vlm.") and not torch.equal(v, before[n])}
    assert {name.partition(".")[0] for name in moved - taken} == {"expert", "action_in_proj", "action_out_proj"}
    after = run.policy.module.state_dict()
    assert all(torch.equal(after[n], v) for n, v in model.state_dict().items() if n.startswith("vlm."))
    assert {"loss", "learning_rate", "epoch"} <= rows(tmp_path / "run")[-1].keys()


def run_size():
    from alpagym_alpamayo_r1.tiny import TinySize

    return TinySize(future_bins=256, pixels=64 * 96)


def test_reasoning_is_learnt_where_all_switches_are_set(tmp_path):
    order = {"components_order": ["image", "traj_history", "prompt", "cot", "traj_future"]}
    order |= {"components_prompt": ["cot", "traj_future"], "label_components": ["cot", "traj_future"]}
    run = tiny_run(tmp_path / "run", 1, dataset=REASONING, scene_ids=None, max_steps=2, **order)
    assert run.train().completed
    assert rows(tmp_path / "run")[0]["loss_text"] > 1.0
    with pytest.raises(ConfigError, match=r"'cot' is to be learned.*dataset.reasoning="):
        tiny_run(tmp_path / "half", 1, max_steps=2, **order).train()


def test_scores_come_from_the_module_in_hand(tmp_path):
    run = tiny_run(tmp_path / "run", 1)
    policy, other = run.policy, tiny_run(tmp_path / "other", 1).policy.module
    from alpagym_runtime.testing.examples import example_observation
    from alpagym_runtime.types import Sampling

    observation = example_observation(policy.spec, 1)
    decision = policy.act(observation, np.arange(1, dtype=np.uint64), Sampling())
    own = policy.score(observation, decision, Sampling()).log_prob.detach()
    with torch.no_grad():
        other.vlm.lm_head.weight.mul_(3.0)
    policy.module = other
    assert not torch.equal(policy.score(observation, decision, Sampling()).log_prob, own)


# ---------------------------------------------------------------- the published command lines


def given(base, tmp_path, *more: str) -> list[str]:
    return [
        f"model.checkpoint_path={base}",
        f"data.train_dataset.local_dir={shared_tree()}",
        f"data.val_dataset.local_dir={shared_tree()}",
        "data.train_dataset.chunk_ids=0-1",
        "data.val_dataset.chunk_ids=1-2",
        f"paths.output_dir={tmp_path / 'out'}",
        *more,
    ]


def test_published_keys_mean_a_run_of_ours(training, tmp_path):
    zero = tmp_path / "zero2.json"
    zero.write_text(json.dumps({"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5}))
    more = ("trainer.per_device_train_batch_size=2", "+trainer.ddp_find_unused_parameters=true")
    recipe = read_recipe("sft_stage1", given(training, tmp_path, *more, f"trainer.deepspeed={zero}"))
    assert len(recipe.notes) == 1
    config = run_config(recipe, evaluating=False, device="cpu", processes=1)
    learning = config.trainer.config
    # The published stage 1: 1e-5 after 500 steps, the vision tower at a tenth, 4 forwards a step, 3 passes.
    assert (learning.learning_rate, learning.warmup_steps, learning.lr_multiplier) == (
        1e-5,
        500,
        {"vlm.model.visual": 0.1},
    )
    assert (learning.gradient_accumulation_steps, learning.epochs, learning.per_device_batch) == (4, 3, 2)
    assert (config.checkpoint.every_updates, config.checkpoint.keep, config.run.seed) == (500, 2, 42)
    assert (config.learner.shard, learning.gradient_clip) == ("always", 0.5)
    assert config.policy.type == "alpamayo_1_5"
    assert config.policy.config.gradient_checkpointing
    assert from_mapping(to_mapping(config)).config_hash == config.config_hash


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.learning_rat=1", r"trainer.learning_rat.*did you mean trainer.learning_rate"),
        ("data.train_dataset.local_dir=None", "use null"),
        ("data.train_dataset.local_dir=???", r"data.train_dataset.local_dir.*must be given"),
        ("trainer", "must be key=value"),
    ],
)
def test_wrong_overrides_are_named(training, tmp_path, override, says):
    with pytest.raises(ConfigError, match=says):
        read_recipe("sft_stage1", given(training, tmp_path, override))


def test_a_recipe_of_ones_own_stands_on_a_published_one(training, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [sft_stage2]\ntrainer: {learning_rate: 0.5, lr_multiplier: {expert.layers: 2.0}}"
    )
    base = given(training, tmp_path)[1:]
    recipe = read_recipe("mine", [*base, f"model.pretrained_model_name_or_path={training}"], str(tmp_path))
    assert recipe.stage == 2
    learning = run_config(recipe, evaluating=False, device="cpu", processes=1).trainer.config
    assert (learning.learning_rate, learning.lr_multiplier, learning.warmup_steps) == (0.5, {"expert.layers": 2.0}, 100)
    with pytest.raises(ConfigError, match="leave|need no --config-path"):
        read_recipe("sft_stage1", base, "pkg://alpamayo1_sft/configs")


def test_a_published_command_line_trains_goes_on_and_evaluates(training, tmp_path, capsys):
    few = (f"data.camera_features=[{CAMERA}]", "data.num_frames=1", "trainer.dataloader_num_workers=0")
    few += ("trainer.bf16=false", "trainer.save_steps=1", "trainer.logging_steps=1", "trainer.warmup_steps=1")
    arguments = ["--config-name", "sft_stage1", *given(training, tmp_path, *few, "trainer.max_steps=2")]
    for _ in range(2):  # the second one finds all of it done
        with pytest.raises(SystemExit) as ended:
            train.main(arguments)
        assert ended.value.code == 0
    assert len(rows(tmp_path / "out")) == 2
    with pytest.raises(SystemExit) as ended:
        train.main([*arguments, "trainer.learning_rate=1e-3"])
    assert ended.value.code == 2
    assert "holds a run with other settings" in capsys.readouterr().err
    checkpoint = tmp_path / "out" / "checkpoint-2"
    more = (f"evaluate.eval_ckpt={checkpoint}", "evaluate.num_traj_samples=2", "evaluate.max_eval_steps=1")
    more += ("trainer.per_device_eval_batch_size=1",)
    with pytest.raises(SystemExit) as ended:
        evaluate.main(["--config-name", "sft_stage1", *given(training, tmp_path, *few, *more)[2:]])  # no base, no train
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "val/count 1\n" in said
    assert "val/metric/min_ade/by_t=3.0 " in said


def test_a_path_that_is_missing_is_named_with_its_key_and_host(training, tmp_path, capsys):
    arguments = given(training, tmp_path, f"data.val_dataset.local_dir={tmp_path / 'nowhere'}")
    with pytest.raises(SystemExit) as ended:
        train.main(["--config-name", "sft_stage1", *arguments])
    assert ended.value.code == 2
    assert "process 0 on" in (said := capsys.readouterr().err)
    assert "data.val_dataset.local_dir=" in said
