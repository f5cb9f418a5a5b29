"""Where a run runs: machines and GPUs, how weights are held, and the AlpaSim that is to be started for it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from alpagym_plugins import ConfigError, check_choice, check_range
from alpagym_runtime.slurm_config import SlurmSection

_GROUP = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*")
# What the launcher gets from the run itself: two truths would disagree.
_OURS = {
    "wizard.log_dir": "the run directory",
    "wizard.run_mode": "being a server",
    "wizard.run_method": "deploy.kind",
    "driver_source": "the run's own drivers",
    "scenes.scene_ids": "dataset.scene_ids",
    "scenes.test_suite_id": "dataset.test_suite_id",
    "runtime.simulation_config.n_sim_steps": "expected_valid_steps",
    "runtime.simulation_config.control_timestep_us": "simulator.control_period_us",
    "runtime.simulation_config.force_gt_duration_us": "simulator.force_gt_duration_us",
    "runtime.simulation_config.skip_driver_during_force_gt": "simulator.skip_driver_during_force_gt",
}


@dataclass
class TopologySection:
    """How many nodes and GPUs a run has, and who gets them.

    Attributes:
        train_nodes: nodes of the trainer; with Cosmos-RL, of its policies and rollouts.
        rollout_nodes: further nodes for rollout workers (deploy=slurm); 0: they share those of the trainer.
        gpus_per_node: GPUs of each node; 0: the run uses the CPU only.
        alpasim_nodes: further nodes, whole, for AlpaSim.
        alpasim_gpus: GPUs of each training node that are AlpaSim's alone; 0: it shares those of the rollouts.
        processes: of each node that train together (grpo, ppo, sft), started by torchrun; 1: the command itself.

    """

    train_nodes: int = 1
    rollout_nodes: int = 0
    gpus_per_node: int = 0
    alpasim_nodes: int = 0
    alpasim_gpus: int = 0
    processes: int = 1

    def __post_init__(self) -> None:
        check_range("processes", self.processes, minimum=1, maximum=1024)
        check_range("train_nodes", self.train_nodes, minimum=1, maximum=10_000)
        check_range("rollout_nodes", self.rollout_nodes, minimum=0, maximum=10_000)
        check_range("gpus_per_node", self.gpus_per_node, minimum=0, maximum=64)
        check_range("alpasim_nodes", self.alpasim_nodes, minimum=0, maximum=10_000)
        check_range("alpasim_gpus", self.alpasim_gpus, minimum=0, maximum=self.gpus_per_node)
        if self.alpasim_nodes and self.alpasim_gpus:
            raise ConfigError("AlpaSim has nodes of its own (alpasim_nodes); must be 0", key="alpasim_gpus")

    @property
    def nodes(self) -> int:
        """All nodes."""
        return self.train_nodes + self.rollout_nodes + self.alpasim_nodes

    @property
    def train_gpus(self) -> int:
        """GPUs for trainer and rollouts, over all nodes."""
        return self.train_nodes * (self.gpus_per_node - self.alpasim_gpus)


@dataclass
class LoraSection:
    """Low-rank adapters: all other weights are frozen, and checkpoints hold the product.

    Attributes:
        rank: of each adapter.
        alpha: an adapter counts alpha / rank.
        targets: names of linear layers, * for any characters.

    """

    rank: int = 16
    alpha: float = 32.0
    targets: list[str] = field(default_factory=lambda: ["*"])

    def __post_init__(self) -> None:
        check_range("rank", self.rank, minimum=1, maximum=4096)
        check_range("alpha", self.alpha, above=0)
        if not self.targets:
            raise ConfigError("must name a layer; * takes all", key="targets")


@dataclass
class LearnerSection:
    """How grpo, ppo and sft hold the weights that they train.

    Attributes:
        device: cpu | cuda (in a team each process has a GPU of its own).
        shard: whether processes spread weights, gradients and optimiser over each other (FSDP): auto (above 3 billion
            parameters, without lora) | always | never.
        lora: adapters in place of the weights themselves; null trains all.

    """

    device: str = "cpu"
    shard: str = "auto"
    lora: LoraSection | None = None

    def __post_init__(self) -> None:
        check_choice("device", self.device, ("cpu", "cuda"))
        check_choice("shard", self.shard, ("auto", "always", "never"))
        if self.lora is not None and self.shard == "always":
            raise ConfigError("and lora exclude each other: adapters are small", key="shard")


@dataclass
class DeploySection:
    """On which kind of machine, and how a run ends there.

    Attributes:
        kind: local (this one) | slurm | ray (rollout workers are actors of a Ray cluster).
        grace_s: longest that a run may take to keep a checkpoint after SIGINT, SIGTERM or SIGUSR1, where it has a
            supervisor; then it is killed.
        requeues: how often a Slurm job goes back into the queue after its time limit, preemption or the loss of a
            node; 0 never.
        slurm: the job.

    """

    kind: str = "local"
    grace_s: float = 60.0
    requeues: int = 0
    slurm: SlurmSection = field(default_factory=SlurmSection)

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, ("local", "slurm", "ray"))
        check_range("grace_s", self.grace_s, minimum=0, maximum=86_400)
        check_range("requeues", self.requeues, minimum=0, maximum=1000)


@dataclass
class WizardSection:
    """Choices of AlpaSim's own launcher, the Wizard; the names are AlpaSim's.

    Attributes:
        deploy: its group `deploy`, such as local, or the preset of your cluster.
        topology: its group `topology`: one of alpagym_alpasim_configs, such as alpagym_2gpu, or of its own.
        driver: its group `driver`, for the cameras that come with it; the driver itself is ours. null leaves it out.
        cameras: its group `cameras`, such as 4cam_1080; null takes its own default.
        renderer: its group `renderer`; null takes its own default.
        extra_overrides: further overrides for it, one an item.

    """

    deploy: str = "local"
    topology: str = "alpagym_1gpu"
    driver: str | None = None
    cameras: str | None = None
    renderer: str | None = None
    extra_overrides: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for key in ("deploy", "topology", "driver", "cameras", "renderer"):
            if (value := getattr(self, key)) is not None and not _GROUP.fullmatch(value):
                raise ConfigError(f"must be the name of one of its presets, got {value!r}", key=key)
        for i, override in enumerate(self.extra_overrides):
            key = override.lstrip("+~").partition("=")[0]
            if key in _OURS:
                raise ConfigError(f"{key} is set for every run, from {_OURS[key]}", key=f"extra_overrides[{i}]")


@dataclass
class AlpasimSection:
    """The AlpaSim to be started for a run with `simulator=alpasim` that names none in `simulator.address`.

    Attributes:
        repo_path: a checkout to use as it is; null clones `repo_ref` of `repo_url`.
        repo_url, repo_ref: what to clone.
        checkout_cache: folder of clones; null is `alpagym/alpasim` below $XDG_CACHE_HOME.
        startup_timeout_s: longest wait for it to answer.
        stop_timeout_s: longest wait for its containers to stop; then they are killed.
        wizard_args: choices of its launcher.

    """

    repo_path: str | None = None
    repo_url: str = "https://github.com/NVlabs/alpasim.git"
    repo_ref: str = "3032e0c"
    checkout_cache: str | None = None
    startup_timeout_s: float = 1200.0
    stop_timeout_s: float = 10.0
    wizard_args: WizardSection = field(default_factory=WizardSection)

    def __post_init__(self) -> None:
        check_range("startup_timeout_s", self.startup_timeout_s, above=0)
        check_range("stop_timeout_s", self.stop_timeout_s, minimum=0, maximum=3600)
        if self.repo_path == "":
            raise ConfigError("must not be empty; null clones repo_url", key="repo_path")
        for key in ("repo_url", "repo_ref"):
            # git would read a leading dash as an option.
            if not getattr(self, key) or getattr(self, key).startswith("-"):
                raise ConfigError(f"must be a name, got {getattr(self, key)!r}", key=key)
