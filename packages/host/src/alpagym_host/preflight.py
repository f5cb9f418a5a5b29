"""What would make a run fail, found before anything starts: all of it at once, each with what to do.

From first principles: what the config asks for against what this machine has. Login-node safe: no torch, no simulator,
no write. Plugins add their own with an optional method `preflight` (see `alpagym_plugins.Problem`), and say with `gpus`
how many GPUs each of their roles needs.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from alpagym_host.alpasim import starts_alpasim
from alpagym_host.alpasim.checkout import present
from alpagym_host.alpasim.scenes import chosen
from alpagym_host.alpasim.wizard import check_topology, topology_facts
from alpagym_plugins import ConfigError, Problem
from alpagym_runtime.machine import Machine
from alpagym_runtime.run_config import RunConfig, to_mapping
from alpagym_runtime.secrets import redacted
from alpagym_runtime.trainers.sft.config import SftConfig

_PLACEHOLDER = re.compile(r"\bYOUR_[A-Z_]+\b")
_LEAST_DISK_BYTES = 1 << 30


class PreflightError(ConfigError):
    """A run that cannot start; `problems` says why, and the text is the list for people."""

    def __init__(self, problems: Sequence[Problem], width: int = 100) -> None:
        super().__init__(describe(problems, width))
        self.problems = list(problems)


def require(
    config: RunConfig, command: str, machine: Machine | None = None, width: int = 100, in_job: bool = False
) -> None:
    """Refuse a run that cannot start.

    Raises:
        PreflightError: with everything that was found.

    """
    problems = preflight(config, command, machine or Machine(), in_job)
    if problems:
        raise PreflightError(problems, width)


def preflight(config: RunConfig, command: str, machine: Machine, in_job: bool = False) -> list[Problem]:
    """Everything that stands in the way of a run, in the order of the config.

    With deploy=slurm there are two places: where it is submitted, whose memory and GPUs do not matter, and `in_job`.
    """
    found: list[Problem] = []
    for key, section in _plugins(config, command):
        check = getattr(section, "preflight", None)
        if check is not None:
            found += [problem.under(key) for problem in check(config, machine)]
    for checks in (_placeholders, _files, _scenes, _team, _workers, _gpus, _gpu_memory, _disk):
        found += checks(config, command, machine)
    if config.deploy.kind != "slurm" or in_job:
        found += _memory(config, command, machine)
    if config.deploy.kind == "slurm" and not in_job:
        found += _slurm(config, command, machine)
    return found


def describe(problems: Sequence[Problem], width: int = 100) -> str:
    """The list for people: key and value, what is wrong, what to do. Only the middle part is wrapped."""
    count = len(problems)
    head = "one thing stands" if count == 1 else f"{count} things stand"
    lines = [f"{head} in the way of this run; nothing was started"]
    for number, problem in enumerate(problems, 1):
        shown = "null" if problem.value is None else str(problem.value) or "''"
        lines += ["", f"{number:>2}  {problem.key} = {shown}"]
        lines += textwrap.wrap(problem.message, max(40, width - 4), initial_indent="    ", subsequent_indent="    ")
        lines.append(f"    → {problem.remedy}")
    return redacted("\n".join(lines))


def _plugins(config: RunConfig, command: str) -> Iterator[tuple[str, Any]]:
    yield "policy", config.policy.config
    yield "simulator", config.simulator.config
    if config.trainer.type != "cosmos" or config.has_workers:  # the trainer looks at it: its own workers are the ends
        yield "transport", config.transport.config
    if command == "train":
        yield "trainer", config.trainer.config
    for name, term in config.reward.terms.items():
        yield f"reward.terms.{name}", term.config
    for name, logger in config.logging.loggers.items():
        yield f"logging.loggers.{name}", logger.config


def _placeholders(config: RunConfig, command: str, machine: Machine) -> Iterator[Problem]:
    for key, value in leaves(to_mapping(config), ""):
        if isinstance(value, str) and _PLACEHOLDER.search(value):
            yield Problem(key, value, "a template's placeholder is still there", f"{key.partition('[')[0]}=…")


def _files(config: RunConfig, command: str, machine: Machine) -> Iterator[Problem]:
    dataset = config.dataset
    if dataset.test_suite_id is not None and config.simulator.type != "alpasim":
        yield Problem(
            "dataset.test_suite_id",
            dataset.test_suite_id,
            f"only AlpaSim has test suites, and simulator={config.simulator.type}",
            "dataset.test_suite_id=null",
        )
    if dataset.path is not None and not _PLACEHOLDER.search(dataset.path) and not Path(dataset.path).exists():
        yield Problem("dataset.path", dataset.path, "there is no such file or folder", "dataset.path=DIR")
    path = config.checkpoint.path
    if path is not None and not Path(path).exists():
        yield Problem("checkpoint.path", path, "there is no such checkpoint", "a run directory, or one of its step_*")


def _team(config: RunConfig, command: str, machine: Machine) -> Iterator[Problem]:
    """Whether several processes can train together."""
    topology, groups = config.topology, config.rollout.scenes_per_step
    processes = topology.processes * (topology.train_nodes if config.trainer.type != "cosmos" else 1)
    if command != "train" or processes == 1:
        return
    if config.trainer.type == "cosmos":
        yield Problem("topology.processes", processes, "Cosmos-RL starts its own processes", "topology.processes=1")
        return
    if starts_alpasim(config):
        yield Problem(
            "topology.processes",
            processes,
            "an AlpaSim that is started for a run serves one process",
            "topology.processes=1, or an AlpaSim that runs already: simulator.address=HOST:PORT",
        )
    if config.has_workers:
        yield Problem(
            "topology.processes",
            processes,
            "each process of a team drives its own episodes, and rollout.workers belong to a trainer of one process",
            "rollout.workers=0, or topology.processes=1",
        )
    if config.trainer.type in ("grpo", "ppo") and groups < processes:
        yield Problem(
            "rollout.scenes_per_step",
            groups,
            f"{processes} processes share the groups of a step, whole ones",
            f"rollout.scenes_per_step={processes}",
        )
    yield from _team_imitates(config, processes)


def _team_imitates(config: RunConfig, processes: int) -> Iterator[Problem]:
    """Whether there is an expert's drive for each process of a team; what a store holds is seen when it is read."""
    trainer, dataset = config.trainer, config.dataset
    key = "trainer" if trainer.type == "sft" else "trainer.warm_start"
    sft = trainer.config if trainer.type == "sft" else getattr(trainer.config, "warm_start", None)
    # Other worlds and sources have as many scenes as they have.
    endless = config.simulator.type in ("embedded", "toy") and dataset.source in ("procedural", "road")
    if not isinstance(sft, SftConfig) or sft.store is not None or not endless or dataset.scene_ids is not None:
        return
    drives = dataset.train_scenes * sft.drives_per_scene
    if drives < processes:
        yield Problem(
            f"{key}.drives_per_scene",
            sft.drives_per_scene,
            f"{processes} processes share the expert's drives, and {dataset.train_scenes} scenes × "
            f"{sft.drives_per_scene} are {drives}",
            f"{key}.drives_per_scene={-(-processes // dataset.train_scenes)}, or topology.processes={drives}",
        )
    validation = min(sft.validation_scenes, dataset.val_scenes)
    if sft.patience and validation < processes:
        few = "dataset.val_scenes" if dataset.val_scenes < processes else f"{key}.validation_scenes"
        yield Problem(
            few,
            validation,
            f"{processes} processes share the expert's validation drives, one in each of {validation} scenes",
            f"{few}={processes}, or {key}.patience=0",
        )


def _workers(config: RunConfig, command: str, machine: Machine) -> Iterator[Problem]:
    rollout, kind = config.rollout, config.deploy.kind
    if not config.has_workers:
        if rollout.device != "cpu":
            why = f"the device of workers, and rollout.workers={rollout.workers} drives in the trainer's process"
            yield Problem("rollout.device", rollout.device, why, "rollout.workers=2")
        if kind == "ray":
            yield Problem(
                "rollout.workers", rollout.workers, "Ray drives with at least one worker", "rollout.workers=2"
            )
    elif command == "train" and config.learner.lora is not None:
        why = "workers read whole weights, and these are frozen ones with adapters beside them"
        yield Problem("learner.lora", "…", why, "rollout.workers=0")
    if kind == "ray" and machine.version("ray") is None:
        yield Problem("deploy.kind", "ray", "needs Ray, and it is not installed", "uv sync --extra ray")


def _gpus(config: RunConfig, command: str, machine: Machine) -> Iterator[Problem]:
    topology = config.topology
    parts: dict[str, dict[str, int]] = {
        key: section.gpus(config) for key, section in _plugins(config, command) if hasattr(section, "gpus")
    }
    if command == "train" and config.learner.device == "cuda" and config.trainer.type != "cosmos":
        parts["trainer"] = {"trainer": config.topology.train_nodes * config.topology.processes}
    if config.has_workers and config.rollout.device == "cuda":
        parts["rollout"] = {"rollout workers": 1}  # at least; they take turns on what there is
    own = sum(parts.get("trainer", {}).values())
    needed = sum(count for part in parts.values() for count in part.values())
    spelt = " + ".join(f"{count} {role}" for part in parts.values() for role, count in part.items() if count)
    tries = command == "train" and config.trainer.type == "cosmos" and needed == own and not starts_alpasim(config)
    if not needed:
        shares = config.simulator.type == "alpasim" and not getattr(config.simulator.config, "addresses", None)
        # Cosmos-RL with its stand-in for CUDA, or what it trained: the same experiment, roles and all, on a CPU.
        stands_in = config.trainer.type == "cosmos" and (config.cosmos.device == "cpu" or command != "train")
        if topology.gpus_per_node and not (shares or stands_in):
            yield Problem(
                "topology.gpus_per_node",
                topology.gpus_per_node,
                f"no part of this run uses a GPU (simulator={config.simulator.type}, trainer={config.trainer.type})",
                "topology=local_cpu",
            )
        yield from _alpasim_gpus(config, machine)
        return
    if own > topology.train_gpus:
        yield Problem(
            "topology.gpus_per_node",
            topology.gpus_per_node,
            f"{own} GPUs needed for policy and rollouts; {topology.train_nodes} nodes × ({topology.gpus_per_node} - "
            f"{topology.alpasim_gpus} of AlpaSim) = {topology.train_gpus} planned",
            "choose another topology=…, or fewer replicas in cosmos.policy and cosmos.rollout",
        )
    elif config.deploy.kind == "local" and needed > len(machine.gpus):
        yield Problem(
            "topology.gpus_per_node",
            topology.gpus_per_node,
            f"{needed} GPU{'s' if needed > 1 else ''} needed ({spelt}), {machine.gpus_text}",
            f"run it on a machine with {needed} NVIDIA GPU{'s' if needed > 1 else ''}"
            + (", or topology=local_colocated_1gpu" if needed > len(machine.gpus) == 1 else "")
            + (", or, slowly, without one: cosmos.device=cpu" if tries and not machine.gpus else ""),
        )
    else:
        yield from _alpasim_gpus(config, machine)
    if config.deploy.kind == "local" and topology.nodes > 1:
        yield Problem(
            "topology.train_nodes", topology.train_nodes, f"{topology.nodes} nodes need a scheduler", "deploy=slurm"
        )


def _alpasim_gpus(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    """AlpaSim's topology names GPUs of this machine by number."""
    name = config.alpasim.wizard_args.topology
    facts = topology_facts(name) if starts_alpasim(config) and config.deploy.kind == "local" else None
    if facts is not None and (needed := max(facts.gpus, default=-1) + 1) > len(machine.gpus):
        yield Problem(
            "alpasim.wizard_args.topology",
            name,
            f"puts AlpaSim on GPU {', '.join(map(str, sorted(facts.gpus)))}, so {needed} needed; {machine.gpus_text}",
            "alpasim.wizard_args.topology=alpagym_1gpu, or an AlpaSim elsewhere: simulator.address=HOST:PORT",
        )


def _scenes(config: RunConfig, command: str, machine: Machine) -> Iterator[Problem]:
    """Scenes and topology against a checkout that is on disk already; one that has to be cloned is asked after that."""
    if not starts_alpasim(config) or (folder := present(config.alpasim)) is None:
        return
    for check in (
        lambda: check_topology(config.alpasim.wizard_args.topology, folder),
        lambda: chosen(config, folder),
    ):
        try:
            check()
        except ConfigError as err:
            key = err.key or "alpasim.repo_path"
            yield Problem(key, dict(leaves(to_mapping(config))).get(key, "…"), err.message, f"{key}=…")


def _gpu_memory(config: RunConfig, command: str, machine: Machine) -> Iterator[Problem]:
    count = getattr(config.policy.config, "parameters", None)
    if command != "train" or config.trainer.type != "cosmos" or count is None or not machine.gpus:
        return
    counts = count()
    if counts is None or config.deploy.kind != "local":
        return
    policy, rollout = config.cosmos.gpu_bytes(*counts)
    least = min(gpu.memory_bytes for gpu in machine.gpus)
    train, size = config.cosmos.train, sum(counts) / 1e9
    for role, needed, remedy in (
        ("policy", policy, "cosmos.policy.parallelism.dp_shard_size=… or cosmos.train.master_dtype=bfloat16"),
        ("rollout", rollout, "cosmos.rollout.parallelism.dp_shard_size=…"),
    ):
        if needed > least:
            yield Problem(
                f"cosmos.{role}.parallelism.dp_shard_size",
                getattr(config.cosmos, role).parallelism.dp_shard_size,
                f"{size:.2f} billion parameters in {train.master_dtype} need at least {needed / 1e9:.1f} GB on each "
                f"{role} GPU before activations, and the smallest has {least / 1e9:.1f} GB",
                remedy,
            )


def _memory(config: RunConfig, command: str, machine: Machine) -> Iterator[Problem]:
    """A training step of our own trainers holds every picture of its episodes, once."""
    if command != "train" or config.trainer.type not in ("grpo", "ppo") or machine.memory_bytes is None:
        return
    spec, rollout = config.policy.config.spec(), config.rollout
    picture = sum(height * width * 3 for height, width in spec.cameras.values())
    if not picture:
        return
    episodes = rollout.scenes_per_step * rollout.group_size
    frames = config.expected_valid_steps + spec.frames
    needed = episodes * frames * picture
    if needed > machine.memory_bytes:
        yield Problem(
            "rollout.scenes_per_step",
            rollout.scenes_per_step,
            f"a step holds {episodes} episodes × {frames} frames × {picture / 1e6:.2f} MB of pictures = "
            f"{needed / 1e9:.1f} GB; {machine.memory_bytes / 1e9:.1f} GB of memory are available",
            f"rollout.scenes_per_step={max(1, int(rollout.scenes_per_step * machine.memory_bytes / needed))}",
        )


def _disk(config: RunConfig, command: str, machine: Machine) -> Iterator[Problem]:
    root = config.run.root
    if _PLACEHOLDER.search(root):
        return
    free = machine.free_bytes(Path(root).expanduser().absolute())
    if free is not None and free < _LEAST_DISK_BYTES:
        yield Problem(
            "run.root",
            root,
            f"{free / 1e9:.2f} GB free on its file system; a run wants {_LEAST_DISK_BYTES / 1e9:.0f} GB at least",
            "alpagym episodes prune, or run.root=DIR on another disk",
        )


def _slurm(config: RunConfig, command: str, machine: Machine) -> Iterator[Problem]:
    """What keeps a job from being submitted, or from doing what it is for."""
    slurm, topology = config.deploy.slurm, config.topology
    for name in ("sbatch", "squeue", "scancel"):
        if machine.tool(name) is None:
            yield Problem("deploy.kind", "slurm", f"{name} is not on PATH", "start it on a login node of the cluster")
    for i, name in enumerate(slurm.export_env):
        if name not in os.environ:
            why = "is not set here, so the job would not have it"
            yield Problem(f"deploy.slurm.export_env[{i}]", name, why, f"export {name}=…, or take the name out")
    if config.trainer.type == "cosmos" and topology.train_nodes > 1:
        if config.cosmos.mode != "disaggregated":
            why = "on several nodes policy and rollouts have GPUs of their own"
            yield Problem("cosmos.mode", config.cosmos.mode, why, "topology=slurm_…, or topology.train_nodes=1")
        if config.transport.type == "nccl":
            why = "the policy listens on an address that is known when its node is"
            yield Problem("transport", "nccl", f"on several nodes: {why}", "transport=disk")
    if topology.alpasim_nodes and not starts_alpasim(config):
        yield Problem(
            "topology.alpasim_nodes",
            topology.alpasim_nodes,
            "nodes for an AlpaSim, and this run brings none up",
            "topology.alpasim_nodes=0",
        )
    if topology.rollout_nodes and not config.has_workers:
        yield Problem(
            "topology.rollout_nodes",
            topology.rollout_nodes,
            "nodes for rollout workers, and there are none",
            f"rollout.workers={topology.rollout_nodes}, or topology.rollout_nodes=0",
        )
    elif config.rollout.workers < topology.rollout_nodes:
        yield Problem(
            "rollout.workers",
            config.rollout.workers,
            f"{topology.rollout_nodes} nodes for rollout workers (topology.rollout_nodes) have at least one each",
            f"rollout.workers={topology.rollout_nodes}",
        )
    if config.deploy.requeues and config.deploy.slurm.warn_s < config.deploy.grace_s:
        yield Problem(
            "deploy.slurm.warn_s",
            slurm.warn_s,
            f"the run is asked {slurm.warn_s} s before the limit, and may need deploy.grace_s = "
            f"{config.deploy.grace_s:g} s to keep a checkpoint",
            f"deploy.slurm.warn_s={config.deploy.grace_s:.0f}",
        )


def leaves(data: Any, key: str = "") -> Iterable[tuple[str, Any]]:
    """Every value of nested plain data with its dotted key."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(data, list):
        for i, value in enumerate(data):
            yield from leaves(value, f"{key}[{i}]")
    else:
        yield key, data
