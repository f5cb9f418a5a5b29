"""`trainer=cosmos` on top of presets that were written for grpo."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import pytest

from alpagym_host.as_cosmos import ONLY_GRPO, SAME_MEANING
from alpagym_host.cli import main
from alpagym_host.compose import compose
from alpagym_host.preflight import leaves
from alpagym_host.sweep import expand
from alpagym_plugins import ConfigError
from alpagym_runtime.machine import Machine
from alpagym_runtime.run_config import load_run_config, to_mapping
from alpagym_runtime.trainers.cosmos.config import CosmosSection
from alpagym_runtime.trainers.grpo.config import GrpoConfig

OF_GRPO = (
    *("smoke", "lowdim", "alpamayo_tiny", "alpamayo_tiny_expert", "alpamayo_1_5_clrl_test_run"),
    *("pai_rl_motion", "pai_rl_motion_tiny", "pai_rl_joint", "pai_rl_joint_tiny"),
)


def refusal(*words):
    with pytest.raises(ConfigError) as caught:
        compose(words)
    return str(caught.value)


def batches(config):
    """Problems of batches and roles; not of what is installed, nor of files and GPUs."""
    found = config.trainer.config.preflight(config, Machine())
    return [problem.key for problem in found if problem.key.startswith(("cosmos", "rollout"))]


@pytest.mark.parametrize("name", [None, *OF_GRPO])
def test_cosmos_takes_over_every_run_of_grpo(name):
    words = [f"experiment={name}"] if name else []
    words += ["dataset.path=recordings"] if name in ("pai_rl_motion", "pai_rl_joint") else []
    ours, theirs = compose(words), compose([*words, "trainer=cosmos"])
    grpo, cosmos, trainer = ours.trainer.config, theirs.cosmos, theirs.trainer.config
    assert (ours.trainer.type, theirs.trainer.type) == ("grpo", "cosmos")
    assert batches(theirs) == []
    assert theirs.topology.gpus_per_node == 1
    found = dict(leaves(to_mapping(theirs)["cosmos"]))
    assert all(found[target] == getattr(grpo, key) for key, target in SAME_MEANING.items())
    for field in fields(trainer):
        assert getattr(trainer, field.name) == getattr(grpo, field.name), field.name
    # A step has the same episodes, and all of its groups are driven at once.
    assert cosmos.global_batch == ours.rollout.scenes_per_step * ours.rollout.group_size
    assert cosmos.rollout.batch_size == ours.rollout.scenes_per_step
    # Even of one scene there are prompts to the last step.
    assert cosmos.train.epoch * ours.rollout.group_size >= grpo.updates * cosmos.global_batch
    # Nothing else differs.
    same = replace(theirs, trainer=ours.trainer, cosmos=ours.cosmos, topology=ours.topology, alpasim=ours.alpasim)
    assert same == ours


def test_every_key_of_grpo_is_taken_over_or_named():
    elsewhere = {"on_policy", "max_lag", "minibatch", "micro_batch"}
    named = {"budget_s", "scene_focus", "weight_decay", "final_temperature_share"}
    assert SAME_MEANING.keys() | elsewhere | named == ONLY_GRPO
    assert {field.name for field in fields(GrpoConfig)} > ONLY_GRPO


def test_the_preset_of_the_pair_is_its_parent_taken_over():
    word, preset = (
        compose(["experiment=pai_rl_motion_tiny", "trainer=cosmos"]),
        compose(["experiment=pai_rl_motion_tiny_cosmos", "run.name=pai_rl_motion_tiny"]),
    )
    assert word == preset
    train = preset.cosmos.train
    assert (train.train_batch_per_replica, train.max_num_steps, train.optm_lr, train.param_dtype) == (
        *(48, 200, 1e-3, "float32"),
    )
    assert (train.train_policy.mini_batch, train.train_policy.batch_size_per_optimize) == (48, None)
    # And the other way round the preset is one of grpo.
    assert (
        compose(["experiment=pai_rl_motion_tiny_cosmos", "trainer=grpo"]).trainer
        == compose(["experiment=pai_rl_motion_tiny"]).trainer
    )


def test_the_order_of_words_does_not_matter():
    words = ("experiment=smoke", "trainer=cosmos", "trainer.updates=7", "cosmos.train.optm_lr=0.001")
    first, *others = (compose(order) for order in itertools.permutations(words))
    assert (first.cosmos.train.max_num_steps, first.cosmos.train.optm_lr) == (7, 0.001)
    assert all(other == first for other in others)


def test_batches_are_counted_in_episodes():
    # 4 policies share a step of 16 × 8 = 128 episodes: 32 each, 16 a shard. 512 decisions are 51.2 episodes of 10, 12.8
    # a policy. A forward of 45 decisions is 4 episodes, which divide a shard's 16. 6 rollouts drive 16 groups: 3 each.
    words = (
        *(
            "trainer=cosmos",
            "topology=slurm_distributed_1_1_1",
            "expected_valid_steps=10",
            "rollout.scenes_per_step=16",
        ),
        *("trainer.micro_batch=45", "cosmos.rollout.parallelism.n_init_replicas=6"),
    )
    cosmos = compose(words).cosmos
    step = cosmos.train.train_policy
    assert (cosmos.mode, cosmos.train.train_batch_per_replica, cosmos.rollout.batch_size) == ("disaggregated", 32, 3)
    assert (step.batch_size_per_optimize, step.mini_batch) == (13, 4)


@pytest.mark.parametrize("word", ["cosmos.train.train_batch_per_replica=16", "rollout.scenes_per_step=2"])
def test_what_follows_from_a_word_follows_the_word(word):
    cosmos = compose(["trainer=cosmos", word]).cosmos
    assert (cosmos.global_batch, cosmos.rollout.batch_size) == (16, 2)
    assert (cosmos.train.epoch, cosmos.train.train_policy.mini_batch) == (40 * 2, 16)


def test_words_of_cosmos_win_and_so_does_a_topology():
    config = compose(["trainer=cosmos", "experiment=smoke", "cosmos.train.epoch=2", "~cosmos.train.param_dtype"])
    assert (config.cosmos.train.epoch, config.cosmos.train.max_num_steps) == (2, 4)
    assert config.cosmos.train.param_dtype == "bfloat16"
    config = compose(["trainer=cosmos", "cosmos.train.train_policy={mini_batch: 4, epsilon_low: 0.2}"])
    assert config.cosmos.train.train_policy == replace(CosmosSection().train.train_policy, mini_batch=4)
    plan = compose(["trainer=cosmos", "topology=slurm_640gpu_64_128", "rollout.group_size=12"]).cosmos
    assert (plan.train.train_batch_per_replica, plan.rollout.batch_size) == (40, 6)
    # The lag is one decision: its plan has it in two keys.
    assert (plan.train.train_policy.on_policy, plan.train.train_policy.allowed_outdated_steps) == (False, 4)


def test_a_run_that_drives_ahead_still_does():
    step = compose(["trainer=cosmos", "trainer.on_policy=false", "trainer.max_lag=3"]).cosmos.train.train_policy
    assert (step.on_policy, step.allowed_outdated_steps) == (False, 3)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ((), "local_colocated_1gpu"),
        (("topology=local_disaggregated_2gpu",), "local_disaggregated_2gpu"),
        (("topology=local_cpu",), "local_cpu"),
        (("topology.gpus_per_node=2", "cosmos.mode=disaggregated"), "local_disaggregated_2gpu"),
    ],
)
def test_one_gpu_where_no_topology_is_chosen(words, wanted):
    config, like = compose(["trainer=cosmos", *words]), compose([f"topology={wanted}"])
    assert (config.topology, config.cosmos.mode) == (like.topology, like.cosmos.mode)


def test_what_has_no_counterpart_is_named_once():
    said = []
    words = ("trainer=cosmos", "trainer.weight_decay=0.01", "trainer.scene_focus=0.5", "trainer.micro_batch=2")
    compose(words, tell=said.append)
    (line,) = said
    assert line == (
        "trainer=cosmos has no counterpart of, and goes without: trainer.scene_focus=0.5, trainer.weight_decay=0.01, "
        "trainer.micro_batch=2 (a forward there is of whole episodes)"
    )
    said.clear()
    compose(["trainer=cosmos", "experiment=smoke"], tell=said.append)
    compose(["experiment=pai_rl_motion_tiny"], tell=said.append)
    assert said == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("trainer.budget_s=60",), "trainer.budget_s: trainer=cosmos ends after a number of steps, not of seconds"),
        (("trainer.updates=0",), "trainer.updates: trainer=cosmos makes at least one training step"),
        (("experiment=imitation",), "trainer: cosmos takes over runs of trainer=grpo, and this preset trains with sft"),
        (("experiment=pai_sft_stage1_tiny",), "this preset trains with alpamayo_sft:"),
        (("experiment=smoke", "trainer.updatse=3"), "trainer.updatse: unknown key; did you mean trainer.updates?"),
        (("trainer.learning_rate=5",), "cosmos.train.optm_lr: must be a finite number above 0 and at most 1"),
    ],
)
def test_what_cannot_be_taken_over_is_refused(words, message):
    assert message in refusal("trainer=cosmos", *words)


def own(tmp_path, text):
    """A preset of the user's, by its path."""
    path = tmp_path / "experiment" / "own.yaml"
    path.parent.mkdir()
    path.write_text(f"# @package _global_\n{text}")
    return f"experiment={path}"


def test_a_preset_on_top_of_one_has_a_gpu_too(tmp_path):
    config = compose([own(tmp_path, "defaults:\n  - lowdim\n  - override /trainer: cosmos\n  - _self_\n")])
    assert config == compose(["experiment=lowdim", "trainer=cosmos"])
    assert config.topology.gpus_per_node == 1


def test_a_preset_that_names_its_trainer_by_key_is_taken_over(tmp_path):
    config = compose([own(tmp_path, "trainer: {type: grpo, updates: 7}\n"), "trainer=cosmos"])
    assert config.trainer.type == "cosmos"
    assert config.cosmos.train.max_num_steps == 7


def test_ppo_is_refused(tmp_path):
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "mine.yaml").write_text("# @package _global_\ndefaults:\n  - override /trainer: ppo\n")
    text = refusal(f"experiment={folder}/mine.yaml", "trainer=cosmos")
    assert "this preset trains with ppo: Cosmos-RL compares the drives of a group, and learns neither values" in text


def test_a_preset_of_cosmos_own_is_left_as_it_is():
    for name in ("cosmos_waypoint_colocated", "cosmos_waypoint_disaggregated_2gpu", "alpamayo_1_5_local_2gpu_smoke"):
        assert compose([f"experiment={name}", "trainer=cosmos"]) == compose([f"experiment={name}"])
    text = refusal("experiment=cosmos_waypoint_colocated", "trainer.updates=3")
    assert text == "trainer.updates: unknown key; trainer=cosmos has cosmos.train.max_num_steps"
    # The type alone brings Cosmos-RL's own defaults.
    assert compose(["trainer.type=cosmos"]).cosmos == CosmosSection()


def test_each_run_of_a_sweep_is_taken_over_by_itself():
    runs = expand(["experiment=smoke", "trainer=grpo,cosmos", "trainer.updates=3,5"])
    made = [compose(words) for words in runs]
    steps = [c.cosmos.train.max_num_steps if c.trainer.type == "cosmos" else c.trainer.config.updates for c in made]
    assert steps == [3, 5, 3, 5]


def alpagym(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["alpagym", *words])
    with pytest.raises(SystemExit) as leave:
        main()
    return leave.value.code


@pytest.mark.parametrize("command", [("train",), ("submit", "deploy.slurm.partition=gpu"), ("train", "-m")])
def test_the_command_line_prints_what_would_run_and_the_note_beside_it(command, monkeypatch, tmp_path, capsys):
    words = ("experiment=pai_rl_motion_tiny", "trainer=cosmos", f"run.root={tmp_path}", "--dry-run")
    assert alpagym(monkeypatch, *command, *words, *(["run.seed=1,2"] if "-m" in command else [])) == 0
    shown = capsys.readouterr()
    assert "max_num_steps: 200" in shown.out
    assert shown.err.count("goes without: trainer.weight_decay=0.01, trainer.final_temperature_share=0.5") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_frozen_config_is_complete(tmp_path):
    from alpagym_host.run_dir import create

    config = compose(["experiment=smoke", "trainer=cosmos"])
    run = create(config, "train", tmp_path / "run")
    assert load_run_config(run) == config
    # On top of it nothing is translated either: grpo's keys are gone.
    assert compose(["run.name=again"], config).cosmos == config.cosmos
    with pytest.raises(ConfigError, match=r"trainer\.updates: unknown key"):
        compose(["trainer.updates=3"], config)


def test_without_a_gpu_preflight_names_the_way_to_try_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert alpagym(monkeypatch, "train", "experiment=smoke", "trainer=cosmos", f"run.root={tmp_path / 'runs'}") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "1 GPU needed (1 policy and rollout), 0 found" in said
    assert "run it on a machine with 1 NVIDIA GPU, or, slowly, without one: cosmos.device=cpu" in said
