"""Where a run runs: machines and GPUs, how weights are held, Slurm, and the AlpaSim that is to be started for it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from alpagym_plugins import ConfigError, check_choice, check_range

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
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

_OPTION = re.compile(r"--(?P<name>[a-z][a-z0-9-]*)(=.+)?")
# Options of sbatch that have a key of their own: given twice, the later one would win unseen.
_OPTION_KEYS = {
    **{
        name: f"deploy.slurm.{name.replace('-', '_')}" for name in ("partition", "account", "qos", "constraint", "time")
    },
    **{name: f"deploy.slurm.{name.replace('-', '_')}" for name in ("job-name", "exclusive", "cpus-per-task", "mem")},
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node", "gpus", "gpus-per-node", "gres"), "topology"),
    **dict.fromkeys(("requeue", "no-requeue"), "deploy.requeues"),
    **dict.fromkeys(("output", "error", "chdir", "open-mode"), "the run directory"),
    **dict.fromkeys(("wrap", "parsable", "test-only", "no-kill", "hold"), "the script itself"),
    "signal": "deploy.slurm.warn_s",
    "export": "deploy.slurm.export_env",
    "export-file": "deploy.slurm.export_env",
    "array": "the values of a sweep: --multirun",
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
class SlurmSection:
    """A Slurm job: where it runs, in which container, with which environment.

    Attributes:
        partition, account, qos, constraint: as sbatch takes them; null leaves them out.
        time: limit, such as 04:00:00.
        warn_s: how long before that limit the run is asked to keep a checkpoint, s.
        job_name: any line of text.
        exclusive: whole nodes.
        cpus_per_task: of each task; null leaves it to Slurm.
        mem: of each node, such as 64G; null leaves it to Slurm.
        extra: further options of sbatch, one an item, such as --reservation=NAME.
        parallel: of a sweep, how many jobs may run at once; 0: as many as there is room for.
        python: the interpreter that has AlpaGym on the nodes; null: the one that submits, in a container python3.
        container: what runs container_image: pyxis (srun --container-image, with enroot) | apptainer.
        container_image: a .sqsh or .sif file, or a registry's reference with tag; null runs without a container.
        container_cache: folder that a reference is fetched into, once; null leaves that to the container's own cache.
        container_mounts: SRC[:DST[:FLAGS]], absolute. The run directory and the folder of the submission need one.
        env: variables of the job, written into its script; not for secrets.
        export_env: NAMES of variables that the job gets from where it is submitted; values are never written down.

    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: str = "04:00:00"
    warn_s: int = 120
    job_name: str = "alpagym"
    exclusive: bool = True
    cpus_per_task: int | None = None
    mem: str | None = None
    extra: list[str] = field(default_factory=list)
    parallel: int = 0
    python: str | None = None
    container: str = "pyxis"
    container_image: str | None = None
    container_cache: str | None = None
    container_mounts: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    export_env: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        from alpagym_runtime.secrets import is_secret_name

        if not re.fullmatch(r"(\d+-)?\d{1,2}(:\d{2}){0,2}|\d+", self.time):
            raise ConfigError(f"must be a Slurm time limit such as 04:00:00 or 1-12, got {self.time!r}", key="time")
        check_range("warn_s", self.warn_s, minimum=1, maximum=65_535)  # sbatch's own limit
        if self.warn_s >= self.limit_s:
            raise ConfigError(
                f"the run would be asked to stop as it begins: must be below time={self.time} ({self.limit_s} s), "
                f"got {self.warn_s}",
                key="warn_s",
            )
        check_range("parallel", self.parallel, minimum=0, maximum=100_000)
        check_choice("container", self.container, ("pyxis", "apptainer"))
        if self.cpus_per_task is not None:
            check_range("cpus_per_task", self.cpus_per_task, minimum=1)
        for key in (
            *("partition", "account", "qos", "constraint", "job_name", "mem"),
            *("python", "container_image", "container_cache"),
        ):
            if (value := getattr(self, key)) is not None:
                _check_line(key, value)
        for i, mount in enumerate(self.container_mounts):
            if not mount.startswith("/") and not mount.startswith("YOUR_"):
                raise ConfigError(f"must be absolute: /SRC[:/DST[:FLAGS]], got {mount!r}", key=f"container_mounts[{i}]")
            if "," in mount:
                raise ConfigError("has a comma, which separates mounts; one an item", key=f"container_mounts[{i}]")
            _check_line(f"container_mounts[{i}]", mount)
        for name, value in self.env.items():
            if not _NAME.fullmatch(name):
                raise ConfigError(f"{name!r} is no name of a variable: letters, digits and _", key="env")
            if "\0" in value:
                raise ConfigError("holds a NUL byte, which no variable can", key=f"env.{name}")
            if is_secret_name(name):
                text = "is the name of a secret, and this value would be written into the job's script"
                raise ConfigError(f"{text}; set it where you submit, and name it in export_env", key=f"env.{name}")
            if name in self.export_env:
                raise ConfigError("is in export_env too; which of the two holds?", key=f"env.{name}")
        for i, name in enumerate(self.export_env):
            if not _NAME.fullmatch(name):
                # The text may be NAME=SECRET, so it is not repeated.
                raise ConfigError(
                    "must be the name of a variable and nothing else; its value is taken when the job is submitted",
                    key=f"export_env[{i}]",
                )
        for i, option in enumerate(self.extra):
            _check_line(f"extra[{i}]", option)
            found = _OPTION.match(option)
            if found is None:
                raise ConfigError(f"must be --OPTION or --OPTION=VALUE of sbatch, got {option!r}", key=f"extra[{i}]")
            if (name := found["name"]) in _OPTION_KEYS:
                raise ConfigError(f"--{name} is set from {_OPTION_KEYS[name]}", key=f"extra[{i}]")

    @property
    def limit_s(self) -> int:
        """The time limit, s. Slurm's forms: M | M:S | H:M:S | D-H | D-H:M | D-H:M:S."""
        days, dash, rest = self.time.rpartition("-")
        parts = [int(part) for part in rest.split(":")]
        if dash:
            hours, minutes, seconds = (*parts, 0, 0)[:3]
        else:
            # Without days the last two are minutes and seconds, and one number is minutes.
            hours, minutes, seconds = [(0, *parts, 0), (0, *parts), tuple(parts)][len(parts) - 1]
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _check_line(key: str, text: str) -> None:
    """What becomes a line of a script, or part of one."""
    if not text or not text.isprintable():
        raise ConfigError(f"must be one line of printable text, got {text!r}", key=key)


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
