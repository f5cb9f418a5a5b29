"""The published SFT recipes under their own keys: `--config-name sft_stage1 key=value …` to a run of ours.

A key that the published trainer has, and that decides nothing here, is taken and answered with the reason (`MOOT`), so
that published command lines run as they are; every other unknown key is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from alpagym_alpamayo_r1.architecture import RELEASE_1, load_architecture
from alpagym_alpamayo_r1.config import CAMERA_NAMES
from alpagym_plugins import ConfigError, nearest
from alpagym_runtime.run_config import DatasetSection, RunConfig, build_section, from_mapping
from alpagym_runtime.simulators.pai.clips import PaiDataset

RECIPES = ("sft_stage1", "sft_stage2")
PLAN_TOKENS = 128
MOOT = {
    "model.vlm_name_or_path": "the checkpoint brings its backbone's config and words",
    "trainer.ddp_find_unused_parameters": "a gradient that one process lacks counts as 0",
    "trainer.gradient_checkpointing_kwargs.use_reentrant": "never",
    "trainer.dataloader_pin_memory": "pictures come through shared memory",
    "trainer.remove_unused_columns": "there are none",
}


@dataclass
class Recipe:
    """A recipe's keys, all of them given.

    Attributes:
        name: sft_stage1 | sft_stage2.
        values: nested, as in the YAML.
        notes: what to tell the user.

    """

    name: str
    values: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    @property
    def stage(self) -> int:
        """1 or 2."""
        return RECIPES.index(self.name) + 1

    @property
    def base(self) -> str:
        """The checkpoint that training begins with."""
        model = self.values["model"]
        return str(model["checkpoint_path" if self.stage == 1 else "pretrained_model_name_or_path"])

    def paths(self, evaluating: bool) -> dict[str, str]:
        """By key, the paths that must exist on every node."""
        model, data, evaluate = (self.values[name] for name in ("model", "data", "evaluate"))
        key = "checkpoint_path" if self.stage == 1 else "pretrained_model_name_or_path"
        wanted = {f"model.{key}": self.base}
        if evaluating and evaluate["eval_ckpt"] is not None:
            wanted = {"evaluate.eval_ckpt": evaluate["eval_ckpt"]}
        elif model.get("stage1_vlm_checkpoint_path") is not None:
            wanted["model.stage1_vlm_checkpoint_path"] = model["stage1_vlm_checkpoint_path"]
        for split in ("val",) if evaluating else ("train", "val"):
            section = data[f"{split}_dataset"]
            folder = Path(section["local_dir"]).expanduser()
            wanted[f"data.{split}_dataset.local_dir"] = str(folder)
        return {name: str(Path(path).expanduser()) for name, path in wanted.items()}


def read_recipe(name: str, overrides: Sequence[str], folder: str | None = None, evaluating: bool = False) -> Recipe:
    """A recipe with overrides on top.

    Args:
        name: of a recipe, or of a YAML in `folder` whose `defaults` list names one.
        overrides: key=value, +key=value or ~key (null); values are YAML.
        folder: a folder or `pkg://package/folder` with YAML of the user's own.
        evaluating: what only training reads may then be missing; of a checkpoint that is named, so may the base model.

    Raises:
        ConfigError: an unknown recipe or key, or ??? that was not given.

    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    own: Any = OmegaConf.create({})
    known = name
    if folder is not None:
        own = OmegaConf.load(_own_file(folder, name))
        bases = [base for base in own.pop("defaults", []) if base in RECIPES]
        if len(bases) != 1:
            raise ConfigError(f"must name one of {', '.join(RECIPES)} in its defaults", key=f"{name}.yaml")
        known = bases[0]
    if known not in RECIPES:
        raise ConfigError(f"no recipe is named {known!r}; there are {', '.join(RECIPES)}", key="--config-name")
    files = resources.files("alpagym_alpamayo_r1.recipes")
    parts = [OmegaConf.create((files / f"{part}.yaml").read_text()) for part in ("sft_base", known)]
    config = OmegaConf.merge(*parts)
    recipe = Recipe(known, {})
    given = _flat(OmegaConf.to_container(own))
    for text in overrides:
        key, found, value = text.lstrip("+~").partition("=")
        if text.startswith("~"):
            given[key] = None
        elif not found:
            raise ConfigError(f"must be key=value, got {text!r}", key=key)
        else:
            given[key] = OmegaConf.to_container(OmegaConf.from_dotlist([f"x={value}"]))["x"]  # type: ignore[index,call-overload]
    keys = _flat(OmegaConf.to_container(config))
    for key, value in given.items():
        if key in MOOT:
            recipe.notes.append(f"{key} decides nothing here: {MOOT[key]}")
        elif key not in keys:
            near = nearest(key, keys)
            raise ConfigError("unknown key" + (f"; did you mean {near}?" if near else ""), key=key)
        elif value == "None":
            raise ConfigError("is the text 'None'; use null", key=key)
        else:
            OmegaConf.update(config, key, value, merge=False)
    unread = {"data.train_dataset.local_dir"} if evaluating else set()
    if evaluating and config.evaluate.eval_ckpt is not None:
        unread |= {"model.checkpoint_path", "model.pretrained_model_name_or_path"}
    for key in unread & set(OmegaConf.missing_keys(config)):
        OmegaConf.update(config, key, None)
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ConfigError("must be given", key=missing[0])
    try:
        recipe.values = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as err:
        raise ConfigError(str(err)) from err
    return recipe


def run_config(recipe: Recipe, *, evaluating: bool, device: str, processes: int) -> RunConfig:
    """The run that a recipe means.

    Args:
        recipe: complete.
        evaluating: on data.val_dataset, else training on data.train_dataset.
        device: cpu | cuda.
        processes: of the team.

    Raises:
        ConfigError: a value is wrong; keys are ours where they say the same.

    """
    values = recipe.values
    model, trainer, words, evaluate = (values[name] for name in ("model", "trainer", "vla_processor", "evaluate"))
    data = values["data"]["val_dataset" if evaluating else "train_dataset"]
    base = recipe.base
    if evaluating and evaluate["eval_ckpt"] is not None:
        base = evaluate["eval_ckpt"]
    elif evaluating and model.get("stage1_vlm_checkpoint_path") is not None:
        raise ConfigError("belongs to training; give evaluate.eval_ckpt", key="model.stage1_vlm_checkpoint_path")
    if bool(words["include_camera_ids"]) != bool(words["include_frame_nums"]):
        raise ConfigError("and include_frame_nums go together", key="vla_processor.include_camera_ids")
    if trainer["lr_scheduler_type"] != "cosine_warmup_with_min_lr":
        raise ConfigError("must be cosine_warmup_with_min_lr", key="trainer.lr_scheduler_type")
    reasons = "cot" in words["components_order"]
    policy = {
        "type": _policy_type(Path(base).expanduser()),
        "model": {
            "path": str(Path(base).expanduser()),
            "dtype": model["dtype"],
            "attention": model["attn_implementation"],
        },
        "head": "tokens" if recipe.stage == 1 else "expert",
        "picture_words": "numbered" if words["include_camera_ids"] else "none",
        "gradient_checkpointing": bool(trainer["gradient_checkpointing"]) and not evaluating,
        "reasoning_tokens": max(evaluate["max_generation_length"] - PLAN_TOKENS, 1) if evaluating and reasons else 0,
        "rows": trainer["per_device_eval_batch_size"],
        "frames": values["data"]["num_frames"],
    }
    if values["data"]["camera_features"] is not None:
        named = {str(name).removeprefix("camera_") for name in values["data"]["camera_features"]}
        policy["cameras"] = sorted(named, key=lambda name: (*CAMERA_NAMES, name).index(name))
    shard, clip = _spreading(trainer)
    learning = {
        "type": "alpamayo_sft",
        "stage": recipe.stage,
        "components_order": words["components_order"],
        "components_prompt": words["components_prompt"],
        "label_components": words["label_components"],
        "epochs": trainer["num_train_epochs"],
        "max_steps": max(trainer["max_steps"], 0),
        "per_device_batch": trainer["per_device_train_batch_size"],
        "gradient_accumulation_steps": trainer["gradient_accumulation_steps"],
        "learning_rate": trainer["learning_rate"],
        "min_learning_rate": (trainer["lr_scheduler_kwargs"] or {}).get("min_lr", 0.0),
        "warmup_steps": trainer["warmup_steps"],
        "lr_multiplier": trainer["lr_multiplier"] or {},
        "weight_decay": trainer["weight_decay"],
        "beta1": trainer["adam_beta1"],
        "beta2": trainer["adam_beta2"],
        "epsilon": trainer["adam_epsilon"],
        "gradient_clip": trainer["max_grad_norm"] if clip is None else clip,
        "bf16": trainer["bf16"],
        "evaluate": False,
    }
    if recipe.stage == 2:
        learning |= {name: model[name] for name in ("cotrain_vlm", "stop_grad_from_vlm")}
        learning["stage1_path"] = model["stage1_vlm_checkpoint_path"]
    batch = trainer["per_device_eval_batch_size" if evaluating else "per_device_train_batch_size"]
    dataset = _dataset(data)
    if evaluating and evaluate["max_eval_steps"] >= 0:
        dataset["scene_ids"] = _first_scenes(dataset, evaluate["max_eval_steps"] * batch * processes)
    return from_mapping(
        {
            "run": {
                "name": recipe.name,
                "seed": trainer["seed"],
                "root": str(Path(values["paths"]["output_dir"]).expanduser().absolute().parent),
            },
            "expected_valid_steps": 1,
            "simulator": {"type": "pai", "workers": trainer["dataloader_num_workers"]},
            "dataset": dataset,
            "policy": policy,
            "reward": {"terms": {"pai_motion": {"type": "pai_motion", "scale": 1.0}}},
            "rollout": {"slots": max(batch, 2 * trainer["per_device_eval_batch_size"])},
            "transport": {"type": "memory"},
            "trainer": learning,
            "evaluation": {
                "seeds": list(range(1, evaluate["num_traj_sets"] + 1)),
                "samples": evaluate["num_traj_samples"],
                "temperature": evaluate["temperature"],
                "top_p": evaluate["top_p"],
                "every_updates": 0,
                "videos": False,
                "references": False,
            },
            "checkpoint": {"every_updates": trainer["save_steps"], "keep": trainer["save_total_limit"]},
            "learner": {"device": device, "shard": shard},
            "logging": {"loggers": _loggers(trainer, values["wandb"], recipe.name)},
        }
    )


def _dataset(data: Mapping[str, Any]) -> dict[str, Any]:
    """Our section for one of the two published ones: chunks say which clips are meant, whatever the index's split."""
    events = not data["use_default_keyframe"]
    if events and data["reasoning_metadata"] is None:
        raise ConfigError(
            "is null, and use_default_keyframe=false takes the key frames from it", key="data.*.reasoning_metadata"
        )
    return {
        "source": "pai",
        "path": str(Path(data["local_dir"]).expanduser()),
        "clip_index": data["clip_index_metadata"],
        "split": "val",
        "chunk_ids": data["chunk_ids"],
        "every_split": True,
        "reasoning": data["reasoning_metadata"],
        "key_frame": "events" if events else "default",
        "events": "first",
        "skip_bad": events,
    }


def _first_scenes(dataset: Mapping[str, Any], count: int) -> list[str]:
    data = PaiDataset(build_section(DatasetSection, dataset, "dataset"))
    found = [sample.scene_id for sample in data.samples(str(dataset["split"]))[: max(count, 1)]]
    data.close()
    return found


def _policy_type(base: Path) -> str:
    architecture = load_architecture(base)
    version = architecture.raw.get("alpamayo_version")
    is_first = architecture.layout is RELEASE_1 or version == "1"
    return "alpamayo_1" if is_first else "alpamayo_1_5"


def _spreading(trainer: Mapping[str, Any]) -> tuple[str, float | None]:
    """How weights are spread, and the gradient's clip where a DeepSpeed file gives one."""
    if trainer["deepspeed"] is None:
        return trainer["fsdp"], None
    path = Path(trainer["deepspeed"]).expanduser()
    try:
        wanted = json.loads(path.read_text())
        zero = dict(wanted.get("zero_optimization") or {})
    except (OSError, ValueError, AttributeError, TypeError) as err:
        raise ConfigError(
            f"{path} cannot be read: {err}; null spreads weights by FSDP", key="trainer.deepspeed"
        ) from err
    for name in ("offload_optimizer", "offload_param"):
        if (zero.get(name) or {}).get("device", "none") != "none":
            raise ConfigError(f"{path}: {name} is not supported; take more GPUs", key="trainer.deepspeed")
    clip = wanted.get("gradient_clipping", "auto")
    return ("always" if int(zero.get("stage", 0)) else "never"), None if clip == "auto" else float(clip)


def _loggers(trainer: Mapping[str, Any], wandb: Mapping[str, Any], name: str) -> dict[str, Any]:
    shown = ["loss", "gradient_norm", "learning_rate", "epoch"]
    loggers: dict[str, Any] = {
        "console": {"type": "console", "names": shown, "every_rows": trainer["logging_steps"]},
        "jsonl": {"type": "jsonl"},
    }
    kind = trainer["report_to"]
    if kind == "wandb":
        about = {"entity": wandb["team"], "project": wandb["project"], "name": wandb["name"] or name}
        loggers["wandb"] = {"type": "wandb", "mode": "online", **about}
    elif kind == "tensorboard":
        loggers["tensorboard"] = {"type": "tensorboard"}
    elif kind != "none":
        raise ConfigError(f"must be none, tensorboard or wandb, got {kind!r}", key="trainer.report_to")
    return loggers


def _own_file(folder: str, name: str) -> Any:
    place: Any = Path(folder).expanduser()
    if folder.startswith("pkg://"):
        package, *inside = folder.removeprefix("pkg://").split("/")
        try:
            place = resources.files(package).joinpath(*inside)
        except ModuleNotFoundError as err:
            raise ConfigError(
                f"no package {package!r} is installed; the recipes here are {', '.join(RECIPES)} and need no "
                "--config-path",
                key="--config-path",
            ) from err
    file = place / f"{name}.yaml"
    if not file.is_file():
        raise ConfigError(f"{file} does not exist", key="--config-path")
    return str(file)


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys of a nested mapping. Factors by name are one value: their names have dots."""
    if not isinstance(values, Mapping) or prefix.endswith("lr_multiplier"):
        return {prefix: values} if prefix else {}
    out: dict[str, Any] = {}
    for name, value in values.items():
        out |= _flat(value, f"{prefix}.{name}" if prefix else str(name))
    return out
