"""Options of Cosmos-RL, under Cosmos-RL's own names, and the trainer `cosmos` that stands for it.

Only what composition and preflight read is here: how many GPUs, how a batch divides, how long, in which precision.
A group's size is `rollout.group_size`, in every trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from alpagym_plugins import ConfigError, Problem, check_choice, check_range

if TYPE_CHECKING:
    from alpagym_runtime.machine import Machine
    from alpagym_runtime.run_config import RunConfig

VERSION = "0.4.7"
INSTALL = "uv sync --all-packages --extra cosmos"
MODES = ("colocated", "disaggregated")
_NOT_YET = "this version composes and checks a Cosmos-RL run, and does not launch it yet"
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
    """The section `policy` or `rollout` of Cosmos-RL."""

    parallelism: Parallelism = field(default_factory=Parallelism)


@dataclass
class TrainPolicy:
    """The section `train.train_policy`.

    Attributes:
        mini_batch: episodes of one forward, in each data-parallel rank.

    """

    mini_batch: int = 1

    def __post_init__(self) -> None:
        check_range("mini_batch", self.mini_batch, minimum=1)


@dataclass
class Train:
    """The section `train`.

    Attributes:
        train_batch_per_replica: episodes that a policy replica consumes a step.
        max_num_steps: training steps; null: as many as the epochs give.
        epoch: passes over the scenes.
        optm_lr: of AdamW.
        master_dtype: of the weights that the optimiser changes: float32 | bfloat16.
        param_dtype: of forward and backward: float32 | bfloat16 | float16.
        train_policy: batches.

    """

    train_batch_per_replica: int = 8
    max_num_steps: int | None = None
    epoch: int = 1
    optm_lr: float = 2e-6
    master_dtype: str = "float32"
    param_dtype: str = "bfloat16"
    train_policy: TrainPolicy = field(default_factory=TrainPolicy)

    def __post_init__(self) -> None:
        check_range("train_batch_per_replica", self.train_batch_per_replica, minimum=1)
        if self.max_num_steps is not None:
            check_range("max_num_steps", self.max_num_steps, minimum=1)
        check_range("epoch", self.epoch, minimum=1)
        check_range("optm_lr", self.optm_lr, above=0, maximum=1)
        check_choice("master_dtype", self.master_dtype, ("float32", "bfloat16"))
        check_choice("param_dtype", self.param_dtype, tuple(_BYTES))


@dataclass
class CosmosSection:
    """Cosmos-RL's topology and training parameters; read by `trainer=cosmos` only.

    Attributes:
        mode: colocated (policy and rollout take turns on the same GPUs) | disaggregated (GPUs of their own).
        controller_port: of its controller, on this machine.
        train, policy, rollout: as in Cosmos-RL.

    """

    mode: str = "disaggregated"
    controller_port: int = 8000
    train: Train = field(default_factory=Train)
    policy: Role = field(default_factory=Role)
    rollout: Role = field(default_factory=Role)

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, MODES)
        check_range("controller_port", self.controller_port, minimum=1, maximum=65535)

    def gpu_bytes(self, trainable: int, frozen: int) -> tuple[int, int]:
        """Least memory of one policy GPU and of one rollout GPU, bytes, for so many parameters.

        A trainable parameter of a policy is there four times in master_dtype (weight, gradient, the two moments of
        AdamW), a frozen one once; both are divided by the GPUs of a replica. A rollout holds every parameter once in
        param_dtype. Activations and pictures come on top.
        """
        master, forward = _BYTES[self.train.master_dtype], _BYTES[self.train.param_dtype]
        policy = (4 * trainable + frozen) * master // self.policy.parallelism.gpus_per_replica
        rollout = (trainable + frozen) * forward // self.rollout.parallelism.gpus_per_replica
        return policy, rollout


@dataclass
class CosmosTrainerConfig:
    """Training by NVIDIA's Cosmos-RL; its options are the section `cosmos`."""

    def gpus(self, config: RunConfig) -> dict[str, int]:
        """GPUs of each role."""
        cosmos = config.cosmos
        policy, rollout = cosmos.policy.parallelism.gpus, cosmos.rollout.parallelism.gpus
        if cosmos.mode == "colocated":
            return {"policy and rollout": policy}
        return {"policy": policy, "rollout": rollout}

    def preflight(self, config: RunConfig, machine: Machine) -> Iterator[Problem]:
        """Batches that do not divide, roles that do not fit each other, and what is not installed."""
        cosmos = config.cosmos
        policy, rollout = cosmos.policy.parallelism, cosmos.rollout.parallelism
        batch, mini = cosmos.train.train_batch_per_replica, cosmos.train.train_policy.mini_batch
        if batch % (policy.dp_shard_size * mini):
            yield Problem(
                "cosmos.train.train_batch_per_replica",
                batch,
                f"must be a multiple of policy.parallelism.dp_shard_size × train.train_policy.mini_batch = "
                f"{policy.dp_shard_size} × {mini} = {policy.dp_shard_size * mini}",
                f"cosmos.train.train_batch_per_replica={_next_multiple(batch, policy.dp_shard_size * mini)}",
            )
        if cosmos.mode == "colocated" and policy != rollout:
            yield Problem(
                "cosmos.rollout.parallelism",
                rollout.gpus,
                f"colocated roles share their GPUs, so both need the same parallelism; the policy has {policy.gpus} "
                f"GPUs in {policy.n_init_replicas} replicas, the rollout {rollout.gpus} in {rollout.n_init_replicas}",
                "make cosmos.policy.parallelism and cosmos.rollout.parallelism equal, or cosmos.mode=disaggregated",
            )
        if config.deploy.kind == "local":
            missing = list(_not_installed(machine))
            yield from missing
            if not missing:
                yield Problem("trainer", "cosmos", _NOT_YET, "trainer=grpo")

    def build(self, run: Any) -> NoReturn:
        """Refuse: this version composes and checks a Cosmos-RL run, and does not launch it.

        Raises:
            ConfigError: names the extra that is missing, or says that the launch is not there yet.

        """
        from alpagym_runtime.machine import Machine

        for problem in _not_installed(Machine()):
            raise ConfigError(f"{problem.message}: {problem.remedy}", key="trainer")
        raise ConfigError(_NOT_YET, key="trainer")


def _not_installed(machine: Machine) -> Iterator[Problem]:
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
