"""Cosmos-RL's TOML, written from the frozen config; nobody edits it.

Cosmos-RL ignores keys that it does not know, and some of its defaults are traps (tensor parallelism over two GPUs,
compilation, half precision, text mode, a directory named after the time). So every key that matters here is written,
whatever its default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alpagym_plugins import ConfigError
from alpagym_runtime.run_config import RunConfig
from alpagym_runtime.trainers.cosmos.config import Parallelism

TRAINER = ROLLOUT = "alpagym"
"""Under which name our parts are registered with Cosmos-RL."""
FOLDER = "cosmos"
"""Of the run directory: everything of Cosmos-RL's."""
OUTPUT = "run"
"""Below FOLDER: its output; resuming looks for siblings of it, so it has none that is not its own."""
WINDOWS = "windows"
"""Below FOLDER: where workers of one GPU find each other (see `window`)."""
MODEL = "model.alpagym"
"""Below FOLDER: what stands for a model's path."""
INITIAL = "initial.safetensors"
"""Below FOLDER: the weights that training begins with, and that the KL penalty refers to."""


def cosmos_config(config: RunConfig, directory: Path, resume: bool = False) -> dict[str, Any]:
    """Everything that Cosmos-RL is told, as nested tables.

    Args:
        config: the run's.
        directory: the run's; Cosmos-RL passes paths through a shell without quotes.
        resume: go on from the newest checkpoint.

    Raises:
        ConfigError: the run directory's path holds what a shell would split or expand.

    """
    require_plain(directory)
    folder = directory.absolute() / FOLDER
    cosmos, step = config.cosmos, config.cosmos.train.train_policy
    train, rollout = cosmos.train, cosmos.rollout
    steps = {} if train.max_num_steps is None else {"max_num_steps": train.max_num_steps}
    optimise = {} if step.batch_size_per_optimize is None else {"batch_size_per_optimize": step.batch_size_per_optimize}
    return {
        "mode": cosmos.mode,
        "train": {
            "output_dir": str(folder / OUTPUT),
            "timestamp": OUTPUT,  # else the time becomes a part of output_dir
            "resume": resume,
            "epoch": 1,  # the dataset holds all passes, each with seeds of its own
            **steps,
            "train_batch_per_replica": train.train_batch_per_replica,
            "sync_weight_interval": train.sync_weight_interval,
            "optm_name": "Adam",
            "optm_lr": train.optm_lr,
            "optm_warmup_steps": train.optm_warmup_steps,
            "optm_decay_type": "linear",
            "optm_decay_ratio": 1.0,
            "optm_min_lr_factor": train.optm_min_lr_factor,
            "optm_grad_norm_clip": train.optm_grad_norm_clip,
            "master_dtype": train.master_dtype,
            "param_dtype": train.param_dtype,
            "transfer_dtype": train.master_dtype,
            "compile": False,
            "non_text": True,
            "local_dataset": True,
            "seed": config.run.seed % 2**31,
            "save_ckpt_at_exit": True,
            "train_policy": {
                "type": "grpo",
                "trainer_type": TRAINER,
                "variant": step.variant,
                "mini_batch": step.mini_batch,
                **optimise,
                "mu_iterations": step.mu_iterations,
                "allowed_outdated_steps": 0 if step.on_policy else step.allowed_outdated_steps,
                "on_policy": step.on_policy,
                "epsilon_low": step.epsilon_low,
                "epsilon_high": step.epsilon_high,
                "kl_beta": 0.0,  # ours is in the loss; Cosmos-RL would load a reference model for its own
                "unbiased_advantage": step.unbiased_advantage,
                "data_dispatch_as_rank_in_mesh": step.data_dispatch_as_rank_in_mesh,
                "dataloader_shuffle": False,  # the order is the dataset's: a function of seed and number
            },
            "ckpt": {
                "enable_checkpoint": True,
                "save_freq": config.checkpoint.every_updates,
                "save_mode": "sync",  # a step that was reported has its checkpoint
                "max_keep": config.checkpoint.keep,
                "export_safetensors": False,
            },
        },
        "rollout": {
            "backend": ROLLOUT,
            "mode": "sync",
            "n_generation": config.rollout.group_size,
            "batch_size": rollout.batch_size,
            "prefetch_rollout": rollout.prefetch_rollout,
            "prefetch_queue_maxsize": rollout.prefetch_queue_maxsize,
            "seed": config.run.seed % 2**31,
            "sampling_config": {
                "temperature": rollout.sampling_config.temperature,
                "top_p": rollout.sampling_config.top_p,
            },
            "parallelism": _parallelism(rollout.parallelism),
        },
        "policy": {
            "model_name_or_path": str(folder / MODEL),
            "model_gradient_checkpointing": False,
            "parallelism": _parallelism(cosmos.policy.parallelism),
        },
        "validation": {"enable": False},  # the run's own process evaluates, on the weights of its checkpoints
        "logging": {
            "logger": ["console"],
            "project_name": "alpagym",
            "experiment_name": config.run.name,
        },
        "custom": {"alpagym": {"run": str(directory.absolute())}},
    }


def require_plain(directory: Path) -> None:
    """Refuse a path that launch_all.py, which builds its commands as text for a shell, or PATH would take apart.

    Raises:
        ConfigError: says what a path may hold.

    """
    path = str(directory.absolute())
    if any(not (c.isalnum() or c in "/._-+,@%=") for c in path):
        raise ConfigError(
            f"Cosmos-RL passes {path!r} through a shell without quotes; choose a path of letters, digits and "
            "/._-+,@%= with run.root=… and run.name=…, or --directory",
            key="run.root",
        )


def _parallelism(section: Parallelism) -> dict[str, Any]:
    # Cosmos-RL's own default of tp_size is 2, while its launcher counts 1 where the key is missing.
    return {**vars(section), "dp_replicate_size": 1}


def to_toml(table: Mapping[str, Any], name: str = "") -> str:
    """Tables as TOML: plain values first, since what follows a [table] belongs to it."""
    lines = [f"[{name}]"] if name else []
    lines += [f"{key} = {_value(value)}" for key, value in table.items() if not isinstance(value, Mapping)]
    parts = ["\n".join(lines)] if lines else []
    for key, value in table.items():
        if isinstance(value, Mapping):
            parts.append(to_toml(value, f"{name}.{key}" if name else key))
    return "\n\n".join(parts) + ("\n" if not name else "")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        text = repr(value)
        return text if any(c in text for c in ".en") else f"{text}.0"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which no path or name holds.
        return json.dumps(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(item) for item in value)}]"
    raise TypeError(f"TOML has no value for {value!r}")


def placeholder_model() -> str:
    """The content of MODEL."""
    return "The policy of this run is built from its config.yaml; Cosmos-RL wants a path for a model.\n"
