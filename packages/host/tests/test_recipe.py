"""The recipe's TOML and entry scripts lead to the run that they describe."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from alpagym_host.compose import compose
from alpagym_host.recipe import words_of
from alpagym_plugins import ConfigError

RECIPE = """
[train]
output_dir = "/data/out"
epoch = 8
max_num_steps = 60
train_batch_per_replica = 48
sync_weight_interval = 2
optm_lr = 2.0e-6
[train.train_policy]
type = "grpo"
trainer_type = "alpamayo"
data_dispatch_as_rank_in_mesh = true
mini_batch = 4
[policy]
model_name_or_path = "/data/model"
model_max_length = 4096
model_gradient_checkpointing = true
[policy.parallelism]
n_init_replicas = 1
dp_shard_size = 4
[rollout]
backend = "vllm"
n_generation = 12
batch_size = 2
gpu_memory_utilization = 0.8
[rollout.sampling_config]
temperature = 0.6
top_p = 0.98
repetition_penalty = 1.0
[rollout.parallelism]
n_init_replicas = 1
dp_shard_size = 1
[logging]
logger = ["console"]
project_name = "Alpamayo_RL"
experiment_name = "Post_Training"
[custom.alpamayo.prefetch]
capacity = 16
num_workers = 5
[custom.alpamayo.reward]
traj_l2_weight = 0.5
comfort_weight = 0.2
"""


def test_every_value_of_the_cheat_sheet_arrives():
    words, notes = words_of(tomllib.loads(RECIPE), "pai_motion", "/data/pai")
    config = compose(words)
    train = config.cosmos.train
    assert (train.epoch, train.max_num_steps, train.train_batch_per_replica) == (8, 60, 48)
    assert (train.sync_weight_interval, train.optm_lr, train.train_policy.mini_batch) == (2, 2e-6, 4)
    assert train.train_policy.data_dispatch_as_rank_in_mesh
    assert config.policy.config.model.path == "/data/model"
    assert config.cosmos.policy.parallelism.dp_shard_size == 4
    assert (config.rollout.group_size, config.cosmos.rollout.batch_size) == (12, 2)
    assert (config.cosmos.rollout.sampling_config.temperature, config.cosmos.rollout.sampling_config.top_p) == (
        0.6,
        0.98,
    )
    assert config.cosmos.rollout.prefetch_rollout
    reward = config.reward.terms["pai_motion"].config
    assert (reward.l2_weight, reward.comfort_weight) == (0.5, 0.2)
    assert config.run.name == "Post_Training"
    assert (config.dataset.path, config.dataset.clip_index) == ("/data/pai", "clip_index_mini.parquet")
    # What means nothing here is said, not passed over.
    said = " ".join(notes)
    assert all(key in said for key in ("gpu_memory_utilization", "repetition_penalty", "model_max_length"))


def test_the_joint_reward_has_its_grader_and_weights():
    table = {"custom": {"alpamayo": {"reasoning_grading_model_path": "/judge", "reward": {"reasoning_weight": 0.3}}}}
    words, _ = words_of(table, "pai_joint", "/data/pai")
    term = compose(words).reward.terms["pai_joint_corrected"].config
    assert (term.grader_path, term.reasoning_weight) == ("/judge", 0.3)


def test_a_key_that_nobody_knows_is_refused():
    with pytest.raises(ConfigError, match=r"train\.optm_rl is neither an option"):
        words_of({"train": {"optm_rl": 1.0}}, "pai_motion", "/data/pai")


@pytest.mark.parametrize("reasoning", ["", "reasoning_"])
def test_the_scripts_say_how_they_are_started(reasoning):
    script = Path(__file__).parents[3] / "scripts" / f"alpamayo_cosmos_rl_post_training_{reasoning}entry.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cosmos-rl --config recipe.toml" in done.stderr
