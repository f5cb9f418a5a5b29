"""What is wrong with a checkpoint directory, how many parameters it holds, and whether a GPU has room for it.

From its config and headers alone; no torch.
"""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alpagym_plugins import ConfigError, Problem

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
EXPERT_PARTS = ("expert.", "action_in_proj.", "action_out_proj.")


def checkpoint_problems(path: str, release: str) -> Iterator[Problem]:
    """Why a converted checkpoint cannot be loaded; keys are relative to the policy's section."""
    key = ".model.path"
    if not path:
        yield Problem(
            key,
            path,
            "a converted checkpoint is needed",
            f"hf download {release} --local-dir RELEASE && alpagym checkpoint convert RELEASE DIR, "
            f"then policy.model.path=DIR",
        )
        return
    folder = Path(path).expanduser()
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        yield Problem(
            key,
            path,
            f"{what}; a converted checkpoint directory is needed",
            f"hf download {release} --local-dir RELEASE && alpagym checkpoint convert RELEASE {folder}",
        )
        return
    if not (folder / "config.json").is_file():
        yield Problem(key, path, "has no config.json", f"alpagym checkpoint convert RELEASE {folder} --overwrite")
    try:
        missing = [name for name in _files(folder) if not (folder / name).is_file()]
    except (OSError, ValueError, KeyError, AttributeError) as err:
        yield Problem(key, path, f"its {INDEX} cannot be read: {err}", f"hf download {release} again, and convert it")
        return
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        yield Problem(key, path, f"lacks weights: {shown}", f"hf download {release} again, and convert it")


def memory_problems(policy: Any, config: Any, machine: Any) -> Iterator[Problem]:
    """Whether each GPU has room for what a process of this run does on it, by `memory_plan`.

    Args:
        policy: an Alpamayo's config.
        config: the run's.
        machine: its GPUs.

    """
    on_gpu = "cuda" in (config.learner.device, config.rollout.device)
    if not machine.gpus or not on_gpu or config.trainer.type not in ("grpo", "ppo", "sft"):
        return
    try:
        plan = _plan(policy, config)
    except (OSError, ValueError, KeyError, AttributeError, ConfigError):
        return  # `checkpoint_problems` says what is wrong
    least = min(gpu.memory_bytes for gpu in machine.gpus)
    if plan["total"] > least:
        parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in plan.items() if size and name != "total")
        yield Problem(
            ".rows",
            policy.rows,
            f"the run needs {plan['total'] / 1e9:.1f} GB of a GPU ({parts}); the smallest has {least / 1e9:.1f} GB",
            "fewer policy.rows, trainer.micro_batch=1, adapters (learner.lora.rank=16), or policy.head=expert",
        )


def _plan(policy: Any, config: Any) -> dict[str, int]:
    from alpagym_alpamayo_r1.architecture import load_architecture
    from alpagym_alpamayo_r1.memory import Use, count_parameters, memory_plan

    architecture = load_architecture(Path(policy.model.path).expanduser())
    through = policy.head == "tokens" or policy.train_backbone
    trained, graph = 0, policy.engine == "graph"
    if config.learner.device == "cuda" and config.learner.lora is not None:
        trained = adapter_count(policy.model.path, config.learner.lora.rank, config.learner.lora.targets)
    elif config.learner.device == "cuda":
        count = count_parameters(architecture)
        trained = count.backbone * through + count.expert * (policy.head == "expert")
    trainer = config.trainer.config
    batch = getattr(trainer, "micro_batch", 0) or getattr(trainer, "minibatch", None) or trainer.batch
    use = Use(
        rows=policy.rows,
        context=policy.context,
        pictures=2 * policy.rows * len(policy.cameras) * policy.frames if graph else 0,
        picture_tokens=policy.height * policy.width // 32**2,
        static_cache=graph,
        trained=trained,
        micro_batch=batch,
        through_backbone=through,
        expert_steps=0 if policy.head == "tokens" else policy.noise_steps or 10,
    )
    return memory_plan(architecture, use, architecture.dtype if policy.model.dtype == "auto" else policy.model.dtype)


def adapter_count(path: str, rank: int, targets: list[str]) -> int:
    """Weights of adapters at the linear layers of a checkpoint whose names match."""
    count = 0
    for name, shape in _shapes(Path(path).expanduser()).items():
        layer = name.removesuffix(".weight")
        linear = len(shape) == 2 and "embed" not in layer.rpartition(".")[2]
        if linear and any(fnmatch.fnmatchcase(layer, pattern) for pattern in targets):
            count += rank * sum(shape)
    return count


def parameter_counts(path: str) -> tuple[int, int] | None:
    """Parameters of the language model (trainable) and of the action expert (frozen); None if a file is not whole."""
    from safetensors import SafetensorError

    counts = [0, 0]
    try:
        for name, shape in _shapes(Path(path).expanduser()).items():
            counts[name.startswith(EXPERT_PARTS)] += math.prod(shape)
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError):
        return None
    return counts[0], counts[1]


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Shapes by name, from the headers."""
    from safetensors import safe_open

    found: dict[str, list[int]] = {}
    for file in _files(folder):
        with safe_open(folder / file, framework="numpy") as handle:
            found |= {name: handle.get_slice(name).get_shape() for name in handle.keys()}  # noqa: SIM118 (no mapping)
    return found


def _files(folder: Path) -> list[str]:
    index = folder / INDEX
    if not index.is_file():
        return [SINGLE]
    return sorted(set(json.loads(index.read_text())["weight_map"].values()))
