"""Options of Cosmos-RL, under Cosmos-RL's own names, and the trainer `cosmos` that stands for it.

Composition and preflight read this: how many GPUs, how a batch divides, how long, in which precision. What the run says
elsewhere is not said again here: a group's size is `rollout.group_size`, a checkpoint's interval
`checkpoint.every_updates`, the weights to begin with `policy.model.path`, the place of everything the run directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alpagym_plugins import ConfigError, Problem, check_choice, check_range
from alpagym_runtime.trainers.sft.config import SftConfig

if TYPE_CHECKING:
    from alpagym_runtime.machine import Machine
    from alpagym_runtime.run_config import RunConfig
    from alpagym_runtime.trainers.cosmos.trainer import CosmosTrainer

VERSION = "0.4.7"
INSTALL = "uv sync --all-packages --extra cosmos"
MODES = ("colocated", "colocated_separated", "disaggregated")
_MOST_IN_FLIGHT = 1024  # of transport.in_flight
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass
class Parallelism:
    """How many replicas, and how one is spread over GPUs.

    Attributes:
        n_init_replicas: replicas.
        dp_shard_size: GPUs that a replica's weights are sharded over.
        tp_size: GPUs that share each layer.
        pp_size: stages of a pipeline.
        cp_size: GPUs that share a sequence.

    """

    n_init_replicas: int = 1
    dp_shard_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            check_range(key, value, minimum=1, maximum=65536)

    @property
    def gpus_per_replica(self) -> int:
        """GPUs of one replica."""
        return self.dp_shard_size * self.tp_size * self.pp_size * self.cp_size

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return self.n_init_replicas * self.gpus_per_replica


@dataclass
class Role:
    """The section `policy` of Cosmos-RL."""

    parallelism: Parallelism = field(default_factory=Parallelism)


@dataclass
class SamplingSection:
    """The section `rollout.sampling_config`: how the policy explores.

    Attributes:
        temperature: of its exploration.
        top_p: mass of the most likely tokens that are drawn from, for policies that draw tokens.

    """

    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_range("temperature", self.temperature, above=0, maximum=100)
        check_range("top_p", self.top_p, above=0, maximum=1)


@dataclass
class RolloutRole(Role):
    """The section `rollout` of Cosmos-RL.

    Attributes:
        batch_size: prompts (groups) that a replica drives side by side.
        prefetch_rollout: fetch the next prompts while one batch is driven; disaggregated, one GPU a replica.
        prefetch_queue_maxsize: batches of prompts that are fetched ahead.
        redraws: how often a member that cannot be trained on is driven anew, and a scene begun at another moment where
            it begins with a fault, before the run fails.
        episode_s: longest time that one batch of prompts may take, s; a simulator that hangs must not hold the weights.
        sampling_config: how the policy explores.

    """

    batch_size: int = 1
    prefetch_rollout: bool = False
    prefetch_queue_maxsize: int = 2
    redraws: int = 3
    episode_s: float = 900.0
    sampling_config: SamplingSection = field(default_factory=SamplingSection)

    def __post_init__(self) -> None:
        check_range("batch_size", self.batch_size, minimum=1)
        check_range("prefetch_queue_maxsize", self.prefetch_queue_maxsize, minimum=1, maximum=1024)
        check_range("redraws", self.redraws, minimum=0, maximum=1000)
        check_range("episode_s", self.episode_s, above=0)


@dataclass
class TrainPolicy:
    """The section `train.train_policy`.

    Attributes:
        mini_batch: episodes of one forward, in each data-parallel rank.
        batch_size_per_optimize: episodes of one optimiser step, in each replica; null: all of a training step.
        mu_iterations: passes over a training step's episodes.
        allowed_outdated_steps: training steps by which weights that drove may be older than those they train.
        on_policy: rollouts wait for the weights of each step.
        variant: grpo | dapo (a group whose rewards are all equal is dropped, and another driven).
        epsilon_low, epsilon_high: clipping of the probability ratio.
        kl_beta: weight of the penalty against the policy as training began; 0 for none.
        unbiased_advantage: advantages are not divided by the group's spread (trainer.credit=episode).
        data_dispatch_as_rank_in_mesh: each policy rank gets prompts of its own; for several policy replicas.

    """

    mini_batch: int = 1
    batch_size_per_optimize: int | None = None
    mu_iterations: int = 1
    allowed_outdated_steps: int = 1
    on_policy: bool = False
    variant: str = "grpo"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    kl_beta: float = 0.0
    unbiased_advantage: bool = False
    data_dispatch_as_rank_in_mesh: bool = False

    def __post_init__(self) -> None:
        check_range("mini_batch", self.mini_batch, minimum=1)
        if self.batch_size_per_optimize is not None:
            check_range("batch_size_per_optimize", self.batch_size_per_optimize, minimum=1)
        check_range("mu_iterations", self.mu_iterations, minimum=1, maximum=1000)
        check_range("allowed_outdated_steps", self.allowed_outdated_steps, minimum=0, maximum=1000)
        check_choice("variant", self.variant, ("grpo", "dapo"))
        check_range("epsilon_low", self.epsilon_low, above=0, below=1)
        check_range("epsilon_high", self.epsilon_high, above=0, maximum=100)
        check_range("kl_beta", self.kl_beta, minimum=0)


@dataclass
class Train:
    """The section `train`.

    Attributes:
        train_batch_per_replica: episodes that a policy replica consumes a step.
        max_num_steps: training steps; null: as many as the epochs give.
        epoch: passes over the scenes; training ends at whichever comes first.
        sync_weight_interval: steps between two times that rollouts get the weights.
        optm_lr: of Adam.
        optm_warmup_steps: steps over which it rises from 0.
        optm_min_lr_factor: share of it that is left at the last step; it falls linearly.
        optm_grad_norm_clip: norm of the gradient.
        master_dtype: of the weights: float32 | bfloat16.
        param_dtype: of forward and backward: float32 | bfloat16 | float16.
        train_policy: batches, staleness, the loss.

    """

    train_batch_per_replica: int = 8
    max_num_steps: int | None = None
    epoch: int = 1
    sync_weight_interval: int = 1
    optm_lr: float = 2e-6
    optm_warmup_steps: int = 0
    optm_min_lr_factor: float = 1.0
    optm_grad_norm_clip: float = 1.0
    master_dtype: str = "float32"
    param_dtype: str = "bfloat16"
    train_policy: TrainPolicy = field(default_factory=TrainPolicy)

    def __post_init__(self) -> None:
        check_range("train_batch_per_replica", self.train_batch_per_replica, minimum=1)
        if self.max_num_steps is not None:
            check_range("max_num_steps", self.max_num_steps, minimum=1)
        check_range("epoch", self.epoch, minimum=1, maximum=1_000_000)
        check_range("sync_weight_interval", self.sync_weight_interval, minimum=1, maximum=1000)
        check_range("optm_lr", self.optm_lr, above=0, maximum=1)
        check_range("optm_warmup_steps", self.optm_warmup_steps, minimum=0)
        check_range("optm_min_lr_factor", self.optm_min_lr_factor, minimum=0, maximum=1)
        check_range("optm_grad_norm_clip", self.optm_grad_norm_clip, above=0)
        check_choice("master_dtype", self.master_dtype, ("float32", "bfloat16"))
        check_choice("param_dtype", self.param_dtype, tuple(_BYTES))


@dataclass
class CosmosSection:
    """Cosmos-RL's topology and training parameters; read by `trainer=cosmos` only.

    Attributes:
        mode: colocated (policy and rollout are one process and take turns) | colocated_separated (a process each, on
            the same GPUs) | disaggregated (GPUs of their own).
        device: cuda | cpu (the real Cosmos-RL with a stand-in for CUDA and NCCL, to try a run; slow).
        controller_port: of its controller; the next free one from here on, and exactly this one where a job has
            several nodes.
        host: address at which other nodes reach the first one; null: that of its host name, or of its main route.
        register_timeout_s: longest time until every worker has said that it is there, s.
        watchdog_s: longest time without a training step, s.
        restarts: how often in a row the job is started again from its last checkpoint after a worker ended.
        train, policy, rollout: as in Cosmos-RL.

    """

    mode: str = "disaggregated"
    device: str = "cuda"
    controller_port: int = 8000
    host: str | None = None
    register_timeout_s: float = 600.0
    watchdog_s: float = 1800.0
    restarts: int = 0
    train: Train = field(default_factory=Train)
    policy: Role = field(default_factory=Role)
    rollout: RolloutRole = field(default_factory=RolloutRole)

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, MODES)
        check_choice("device", self.device, ("cuda", "cpu"))
        check_range("controller_port", self.controller_port, minimum=1, maximum=65535)
        check_range("register_timeout_s", self.register_timeout_s, above=0)
        check_range("watchdog_s", self.watchdog_s, above=0)
        check_range("restarts", self.restarts, minimum=0, maximum=1000)

    @property
    def global_batch(self) -> int:
        """Episodes of one training step, over all policy replicas."""
        return self.train.train_batch_per_replica * self.policy.parallelism.n_init_replicas

    @property
    def gpus(self) -> dict[str, int]:
        """GPUs of each role."""
        policy = self.policy.parallelism.gpus
        if self.mode == "disaggregated":
            return {"policy": policy, "rollout": self.rollout.parallelism.gpus}
        return {"policy and rollout": policy}

    def gpu_bytes(self, trainable: int, frozen: int) -> tuple[int, int]:
        """Least memory of one policy GPU and of one rollout GPU, bytes, for so many parameters.

        A trainable parameter of a policy is there four times in master_dtype (weight, gradient, the two moments of
        Adam), a frozen one once; both are divided by the GPUs of a replica, and where those are several each holds
        every parameter besides, for the rollouts. A rollout holds every parameter once in master_dtype, and with
        mode=colocated_separated it is on a policy's GPU. Activations and pictures come on top.
        """
        size, gpus = _BYTES[self.train.master_dtype], self.policy.parallelism.gpus_per_replica
        policy = (4 * trainable + frozen) * size // gpus + (trainable + frozen) * size * (gpus > 1)
        rollout = (trainable + frozen) * size // self.rollout.parallelism.gpus_per_replica
        return policy + rollout * (self.mode == "colocated_separated"), rollout


@dataclass
class CosmosTrainerConfig:
    """Training by NVIDIA's Cosmos-RL, whose options are the section `cosmos`; here is what Cosmos-RL has no name for.

    Attributes:
        credit: tick (return-to-go less the group's mean at that tick) | episode (Cosmos-RL's own advantage).
        discount: per decision, of credit by tick.
        spread_floor: added to the standard deviation of credit by tick, in units of reward.
        least_advantage: decisions below it in size are left out before the backward pass.
        kl_stop: a step's passes end when its KL to the weights that drove exceeds this.
        warm_start: imitation before the first step, in this process; null starts from the weights as they are.

    """

    credit: str = "tick"
    discount: float = 0.97
    spread_floor: float = 0.05
    least_advantage: float = 0.1
    kl_stop: float = 0.05
    warm_start: SftConfig | None = None

    def __post_init__(self) -> None:
        check_choice("credit", self.credit, ("tick", "episode"))
        check_range("discount", self.discount, minimum=0, maximum=1)
        check_range("spread_floor", self.spread_floor, minimum=0)
        check_range("least_advantage", self.least_advantage, minimum=0)
        check_range("kl_stop", self.kl_stop, above=0)

    def gpus(self, config: RunConfig) -> dict[str, int]:
        """GPUs of each role; none where the stand-in for CUDA is used (cosmos.device=cpu)."""
        return {} if config.cosmos.device == "cpu" else config.cosmos.gpus

    def preflight(self, config: RunConfig, machine: Machine) -> Iterator[Problem]:
        """Batches that do not divide, roles that do not fit each other, and what is not installed."""
        yield from _divides(config)
        yield from _fits(config)
        yield from _is_plain(config)
        if self.warm_start is not None:
            for problem in self.warm_start.preflight(config, machine):
                yield problem.under(".warm_start")
        if config.deploy.kind == "local":
            yield from not_installed(machine)

    def build(self, run: Any) -> CosmosTrainer:
        """The trainer of a run.

        Raises:
            ConfigError: Cosmos-RL or its Redis is not there; names the command that brings it.

        """
        from alpagym_runtime.machine import Machine

        for problem in not_installed(Machine()):
            raise ConfigError(f"{problem.message}: {problem.remedy}", key="trainer")
        from alpagym_runtime.trainers.cosmos.trainer import CosmosTrainer

        return CosmosTrainer(self)


def is_spread(config: RunConfig) -> bool:
    """Whether Cosmos-RL trains on several nodes."""
    return config.trainer.type == "cosmos" and config.deploy.kind == "slurm" and config.topology.train_nodes > 1


def _is_plain(config: RunConfig) -> Iterator[Problem]:
    from alpagym_runtime.trainers.cosmos.tables import require_plain

    try:
        require_plain(Path(config.run.root).expanduser())
    except ConfigError as err:
        yield Problem("run.root", config.run.root, err.message, "run.root=DIR")


def _divides(config: RunConfig) -> Iterator[Problem]:
    cosmos, members = config.cosmos, config.rollout.group_size
    key, batch = "cosmos.train.train_batch_per_replica", cosmos.train.train_batch_per_replica
    shards, mini = cosmos.policy.parallelism.dp_shard_size, cosmos.train.train_policy.mini_batch
    replicas = cosmos.policy.parallelism.n_init_replicas
    if batch % (shards * mini):
        yield Problem(
            key,
            batch,
            f"must be a multiple of policy.parallelism.dp_shard_size × train.train_policy.mini_batch = "
            f"{shards} × {mini} = {shards * mini}",
            f"{key}={_next_multiple(batch, shards * mini)}",
        )
    elif cosmos.global_batch % members:
        fitting = _next_multiple(batch, shards * mini)
        while fitting * replicas % members:
            fitting += shards * mini
        yield Problem(
            key,
            batch,
            f"a training step takes {batch} × {replicas} policy replicas = {cosmos.global_batch} episodes, which must "
            f"be whole groups of rollout.group_size = {members}",
            f"{key}={fitting}",
        )


def _fits(config: RunConfig) -> Iterator[Problem]:
    cosmos = config.cosmos
    policy, rollout = cosmos.policy.parallelism, cosmos.rollout.parallelism
    if cosmos.mode == "colocated" and policy != rollout:
        yield Problem(
            "cosmos.rollout.parallelism",
            rollout.gpus,
            f"colocated roles share their GPUs, so both need the same parallelism; the policy has {policy.gpus} "
            f"GPUs in {policy.n_init_replicas} replicas, the rollout {rollout.gpus} in {rollout.n_init_replicas}",
            "make cosmos.policy.parallelism and cosmos.rollout.parallelism equal, or cosmos.mode=disaggregated",
        )
    if cosmos.mode == "colocated_separated" and policy.n_init_replicas != rollout.n_init_replicas:
        yield Problem(
            "cosmos.rollout.parallelism.n_init_replicas",
            rollout.n_init_replicas,
            f"on shared GPUs there are as many rollouts as policy replicas, and those are {policy.n_init_replicas}",
            f"cosmos.rollout.parallelism.n_init_replicas={policy.n_init_replicas}, or cosmos.mode=disaggregated",
        )
    for role, parallelism in (("policy", policy), ("rollout", rollout)):
        shared = () if role == "policy" else ("dp_shard_size",)
        for key in ("tp_size", "pp_size", "cp_size", *shared):
            size = getattr(parallelism, key)
            if size > 1:
                yield Problem(
                    f"cosmos.{role}.parallelism.{key}",
                    size,
                    "our policies are not split so: only the policy's dp_shard_size spreads what is trained",
                    f"cosmos.{role}.parallelism.{key}=1, and more of n_init_replicas",
                )
    if config.rollout.group_size < 2:
        yield Problem("rollout.group_size", config.rollout.group_size, "a group compares at least two", "…=2")
    yield from _carries(config)
    if config.has_workers:
        why = "Cosmos-RL's rollout replicas drive; it starts them itself"
        yield Problem("rollout.workers", config.rollout.workers, why, "rollout.workers=0")
    if config.learner.lora is not None:
        why = "adapters are not passed through Cosmos-RL's weight sync"
        yield Problem("learner.lora", "set", why, "learner.lora=null")


def episodes_under_way(config: RunConfig) -> int:
    """Most episodes that are driven and not trained on yet: the steps that may be ahead, and a rollout's last batch."""
    cosmos, step = config.cosmos, config.cosmos.train.train_policy
    ahead = 0 if step.on_policy else step.allowed_outdated_steps
    replicas = cosmos.rollout.parallelism.n_init_replicas
    return (ahead + 1) * cosmos.global_batch + replicas * cosmos.rollout.batch_size * config.rollout.group_size


def rollouts_at_work(config: RunConfig) -> int:
    """Rollout replicas that can drive at once: the steps that may be ahead have room for so many of their batches."""
    cosmos, step = config.cosmos, config.cosmos.train.train_policy
    room = ((0 if step.on_policy else step.allowed_outdated_steps) + 1) * cosmos.global_batch
    batch = min(cosmos.rollout.batch_size * config.rollout.group_size, cosmos.global_batch)
    return min(cosmos.rollout.parallelism.n_init_replicas, max(room // batch, 1))


def _carries(config: RunConfig) -> Iterator[Problem]:
    """Whether the transport brings episodes from rollouts to policies."""
    cosmos, kind = config.cosmos, config.transport.type
    if kind not in ("memory", "disk", "nccl"):
        why = "a drive must outlive the rollout worker that made it, so it passes through a file or to the policy's GPU"
        yield Problem("transport", kind, why, "transport=disk")
    if kind != "nccl":
        return
    if cosmos.mode == "colocated":
        why = "colocated roles are one process, and NCCL connects two"
        yield Problem("transport", kind, why, "transport=memory, or another cosmos.mode")
    for name, role in (("policy", cosmos.policy), ("rollout", cosmos.rollout)):
        if role.parallelism.n_init_replicas > 1:
            why = (
                "a rollout does not know which policy will train on a drive"
                if name == "policy"
                else "weights pass from rollout to rollout too, and episodes must not be on their way meanwhile"
            )
            key = f"cosmos.{name}.parallelism.n_init_replicas"
            yield Problem(key, role.parallelism.n_init_replicas, f"transport=nccl: {why}", "transport=disk")
    if (shards := cosmos.policy.parallelism.dp_shard_size) > 1:
        why = "transport=nccl: a rollout does not know which GPU of the policy will train on a drive"
        yield Problem("cosmos.policy.parallelism.dp_shard_size", shards, why, "transport=disk")
    backend = getattr(config.transport.config, "backend", "nccl")
    if backend == "nccl" and (cosmos.device == "cpu" or cosmos.mode == "colocated_separated"):
        why = "cosmos.device=cpu has no GPU" if cosmos.device == "cpu" else "NCCL takes no GPU twice"
        yield Problem("transport.backend", backend, why, "transport.backend=gloo")
    if (count := episodes_under_way(config)) > _MOST_IN_FLIGHT:
        why = (
            f"transport=nccl has room for {_MOST_IN_FLIGHT} episodes on their way; the steps that may be ahead and a "
            f"rollout's batch are {count}"
        )
        key = "cosmos.train.train_batch_per_replica"
        yield Problem(key, cosmos.train.train_batch_per_replica, why, "transport=disk, or smaller batches")
    spec, limit_mb = config.policy.config.spec(), getattr(config.transport.config, "limit_mb", 0)
    frames, picture = config.expected_valid_steps + spec.frames, sum(h * w * 3 for h, w in spec.cameras.values())
    if (needed := count * frames * picture) > limit_mb * 1_000_000:
        why = (
            f"the steps that may be ahead and a rollout's batch are {count} episodes × {frames} frames × "
            f"{picture / 1e6:.2f} MB of pictures = {needed / 1e9:.2f} GB in the policy's process, where there is room "
            f"for {limit_mb / 1e3:.2f}"
        )
        remedy = f"transport.limit_mb={-(-needed // 1_000_000)}, transport=disk, or smaller batches"
        yield Problem("transport.limit_mb", limit_mb, why, remedy)


def not_installed(machine: Machine) -> Iterator[Problem]:
    """What Cosmos-RL needs on this machine and is not there."""
    found = machine.version("cosmos-rl")
    if found != VERSION:
        what = f"cosmos-rl {found} is installed" if found else "cosmos-rl is not installed"
        yield Problem("trainer", "cosmos", f"needs cosmos-rl {VERSION}, and {what}", INSTALL)
    if machine.tool("redis-server") is None:
        yield Problem(
            "trainer",
            "cosmos",
            "Cosmos-RL starts one, and redis-server is not on PATH",
            "apt-get install redis-server",
        )


def _next_multiple(value: int, of: int) -> int:
    return -(-value // of) * of
