"""The Alpamayo recipe's RL configs and entry scripts, as thin fronts of `trainer=cosmos`.

    cosmos-rl --config recipe.toml --policy 1 --rollout 1 scripts/alpamayo_cosmos_rl_post_training_entry.py

The TOML is translated to the words of `alpagym train`, a run directory is made below its `train.output_dir`, and every
process plays its part from there. A key that means nothing here is named, not passed over.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from alpagym_plugins import ConfigError
from alpagym_runtime.trainers.cosmos.config import CosmosSection

FOLDER = "alpagym"
"""Below the TOML's output_dir: the run directory."""
DATA = {"pai_motion": "ALPAMAYO_PAI_LOCAL_DIR", "pai_joint": "ALPAMAYO_PAI_REASONING_LOCAL_DIR"}
_TERMS = {"pai_motion": "pai_motion", "pai_joint": "pai_joint_corrected"}
_CLIPS = {"pai_motion": "clip_index_mini.parquet", "pai_joint": "clip_index_reasoning_mini.parquet"}
_SAME_MEANING = {
    "rollout.n_generation": ("rollout.group_size",),
    "policy.model_name_or_path": ("policy.model.path",),
    "logging.experiment_name": ("run.name",),
    "train.ckpt.save_freq": ("checkpoint.every_updates",),
    "train.ckpt.max_keep": ("checkpoint.keep",),
    "train.seed": ("run.seed",),
    "custom.alpamayo.reward.traj_l2_weight": ("reward.terms.{term}.l2_weight",),
    "custom.alpamayo.reward.comfort_weight": ("reward.terms.{term}.comfort_weight",),
    "custom.alpamayo.reward.reasoning_weight": ("reward.terms.{term}.reasoning_weight",),
    "custom.alpamayo.reasoning_grader_type": ("reward.terms.{term}.grader",),
    "custom.alpamayo.reasoning_grading_model_path": ("reward.terms.{term}.grader_path",),
    "custom.alpamayo.reasoning_grading_device": ("reward.terms.{term}.grader_device",),
}
_WITHOUT_MEANING = {
    "train.output_dir": "the run directory lies there",
    "train.timestamp": "the run directory has its own name",
    "train.resume": "alpagym resume RUN_DIR",
    "train.compile": "never",
    "train.fsdp_offload": "a replica is one GPU",
    "train.optm_name": "always Adam",
    "train.transfer_dtype": "always master_dtype",
    "train.train_policy.type": "always grpo",
    "train.train_policy.trainer_type": "always ours",
    "train.train_policy.dataloader_shuffle": "the order follows from run.seed",
    "train.ckpt.enable_checkpoint": "always",
    "train.ckpt.save_mode": "always sync",
    "train.ckpt.export_safetensors": "alpagym checkpoint export",
    "policy.model_max_length": "our policies take what the config of the policy says",
    "policy.model_gradient_checkpointing": "an option of the policy",
    "rollout.backend": "always ours",
    "rollout.gpu_memory_utilization": "vLLM's",
    "rollout.sampling_config.repetition_penalty": "vLLM's",
    "rollout.sampling_config.top_k": "vLLM's",
    "custom.alpamayo.prefetch.num_workers": "one thread fetches",
    "logging.project_name": "logging.loggers.wandb.project",
}


def words_of(table: Mapping[str, Any], reward: str, data: str) -> tuple[list[str], list[str]]:
    """A recipe's TOML as words of `alpagym train`, and notes on keys that mean nothing here.

    Args:
        table: the TOML.
        reward: pai_motion | pai_joint, as the entry script says.
        data: the dataset's folder.

    Raises:
        ConfigError: a key that neither Cosmos-RL's section here nor the recipe has.

    """
    policy = "alpamayo_1" if os.environ.get("ALPAMAYO_VERSION") == "1" else "alpamayo_1_5"
    words = ["trainer.type=cosmos", "trainer.warm_start=null"]  # what the TOML leaves out has Cosmos-RL's own defaults
    words += ["simulator=pai", "dataset=pai", f"policy={policy}", f"reward={reward}", "transport=disk"]
    words += [f"dataset.path={_word(data)}", f"dataset.clip_index={_CLIPS[reward]}"]
    words += ["dataset.reasoning=reasoning/ood_reasoning.parquet"] if reward == "pai_joint" else []
    notes = []
    known = set(_keys(CosmosSection))
    for key, value in _leaves(table):
        if key in _SAME_MEANING:
            words += [f"{target.format(term=_TERMS[reward])}={_word(value)}" for target in _SAME_MEANING[key]]
        elif key == "custom.alpamayo.prefetch.capacity":
            words.append(f"cosmos.rollout.prefetch_rollout={_word(value > 0)}")
        elif key == "logging.logger":
            words += ["logging=wandb"] if "wandb" in value else []
        elif key in known:
            words.append(f"cosmos.{key}={_word(value)}")
        elif key in _WITHOUT_MEANING:
            notes.append(f"{key} has no effect: {_WITHOUT_MEANING[key]}")
        else:
            raise ConfigError(
                f"{key} is neither an option of trainer=cosmos nor of the recipe (docs/cosmos.md)", key=key
            )
    return words, notes


def main(reward: str, argv: Sequence[str] | None = None) -> None:
    """Play the role that Cosmos-RL's launcher gave this process."""
    given = list(sys.argv[1:] if argv is None else argv)
    if "COSMOS_ROLE" not in os.environ or "--config" not in given:
        raise SystemExit(f"start it with Cosmos-RL's launcher: cosmos-rl --config recipe.toml {sys.argv[0]}")
    place = given.index("--config") + 1
    table = tomllib.loads(Path(given[place]).read_text())
    directory = Path(table["train"]["output_dir"]).absolute() / FOLDER
    os.environ["ALPAGYM_COSMOS_RUN"] = str(directory)
    if os.environ["COSMOS_ROLE"] == "Controller":
        # The launcher starts workers once the controller answers, so they find everything there.
        given[place] = str(_make_run(table, reward, directory))
        sys.argv[1:] = given
    from alpagym_runtime.trainers.cosmos.entry import main as play

    play()


def _make_run(table: Mapping[str, Any], reward: str, directory: Path) -> Path:
    """The run directory with everything that workers read; the path of the TOML that counts."""
    from alpagym_host import run_dir
    from alpagym_host.compose import compose
    from alpagym_runtime.trainers.cosmos.supervisor import (
        newest_checkpoint,
        remove_torn_checkpoints,
        write_config,
    )
    from alpagym_runtime.trainers.cosmos.trainer import prepare
    from alpagym_runtime.trainers.run import Run

    if (data := os.environ.get(DATA[reward])) is None:
        raise ConfigError(f"the recipe reads the dataset's folder from {DATA[reward]}, which is not set")
    words, notes = words_of(table, reward, data)
    words += os.environ.get("ALPAGYM_WORDS", "").split()
    for note in notes:
        print(note, file=sys.stderr)
    config = compose(words)
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        run_dir.create(config, "train", directory)
    prepare(Run(config, directory))
    newest = newest_checkpoint(directory, config.cosmos.policy.parallelism.gpus_per_replica)
    remove_torn_checkpoints(directory, newest)
    return write_config(config, directory, newest > 0)


def _keys(section: type, name: str = "") -> Iterator[str]:
    import typing

    hints = typing.get_type_hints(section)
    for field in fields(section):
        kind = hints[field.name]
        if is_dataclass(kind) and isinstance(kind, type):
            yield from _keys(kind, f"{name}{field.name}.")
        else:
            yield f"{name}{field.name}"


def _leaves(table: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{name}{key}.")
        else:
            yield f"{name}{key}", value


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"'{value}'" if isinstance(value, str) and any(c in value for c in " ,=:{}[]()") else str(value)
