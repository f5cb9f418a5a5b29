"""A run of `trainer=grpo`, as Cosmos-RL is told it: what `trainer=cosmos` makes of a preset that was written for grpo.

Composition validates the run as one of grpo first, so that a wrong key is named as it was written, and freezes what
comes out of here: no other part knows of it, and nothing is translated twice. Explicit words `cosmos.*` win, and so
does what a preset or a topology sets there away from the defaults.

What Cosmos-RL has no counterpart of is named, and the run goes without it, where that changes how a policy learns;
where it would change when the run ends, it is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from alpagym_plugins import ConfigError
from alpagym_runtime.run_config import Plugin, RunConfig, build_section
from alpagym_runtime.trainers.cosmos.config import CosmosSection, CosmosTrainerConfig
from alpagym_runtime.trainers.grpo.config import GrpoConfig

SAME_MEANING = {
    "updates": "train.max_num_steps",
    "learning_rate": "train.optm_lr",
    "final_rate_share": "train.optm_min_lr_factor",
    "gradient_clip": "train.optm_grad_norm_clip",
    "epochs": "train.train_policy.mu_iterations",
    "clip_low": "train.train_policy.epsilon_low",
    "clip_high": "train.train_policy.epsilon_high",
    "kl_weight": "train.train_policy.kl_beta",
    "temperature": "rollout.sampling_config.temperature",
    "top_p": "rollout.sampling_config.top_p",
}
"""Keys of trainer=grpo, and those of the section `cosmos` that take the same values."""

_LAG = ("train.train_policy.on_policy", "train.train_policy.allowed_outdated_steps", "train.sync_weight_interval")
_NEUTRAL = {"scene_focus": 0.0, "weight_decay": 0.0, "final_temperature_share": 1.0}
_SHARED = [field.name for field in fields(CosmosTrainerConfig)]
ONLY_GRPO = {field.name for field in fields(GrpoConfig)} - set(_SHARED)


def as_cosmos(run: RunConfig, said: Collection[str]) -> tuple[RunConfig, list[str]]:
    """The run for Cosmos-RL, and what is left out.

    Args:
        run: whose trainer is grpo.
        said: keys of the user's words; what is said of the section `cosmos` stays.

    Raises:
        ConfigError: the run would end at another time, or Cosmos-RL does not take a value.

    """
    grpo = run.trainer.config
    assert isinstance(grpo, GrpoConfig)
    if grpo.budget_s:
        why = "trainer=cosmos ends after a number of steps, not of seconds: trainer.budget_s=0 and trainer.updates=N"
        raise ConfigError(why, key="trainer.budget_s")
    if not grpo.updates:
        raise ConfigError("trainer=cosmos makes at least one training step", key="trainer.updates")
    section = _Section(run.cosmos, said)
    for key, target in SAME_MEANING.items():
        section.put(target, getattr(grpo, key))
    if not any(map(section.is_given, _LAG)):
        section.put("train.train_policy.on_policy", grpo.on_policy)
        section.put("train.train_policy.allowed_outdated_steps", 0 if grpo.on_policy else grpo.max_lag)
    # grpo computes in the type of the weights, which is float32 where no file says otherwise.
    held = getattr(getattr(run.policy.config, "model", None), "dtype", "float32")
    section.put("train.param_dtype", "bfloat16" if held == "auto" else held)
    _put_batches(section, run, grpo)
    cosmos = section.built()
    trainer = CosmosTrainerConfig(**{name: getattr(grpo, name) for name in _SHARED})
    left_out = [f"trainer.{key}={value}" for key, none in _NEUTRAL.items() if (value := getattr(grpo, key)) != none]
    if 0 < grpo.micro_batch < run.expected_valid_steps:
        left_out.append(f"trainer.micro_batch={grpo.micro_batch} (a forward there is of whole episodes)")
    return replace(run, trainer=Plugin("cosmos", trainer), cosmos=cosmos), left_out


def _put_batches(section: _Section, run: RunConfig, grpo: GrpoConfig) -> None:
    """What Cosmos-RL counts in episodes of `expected_valid_steps` decisions: a step, its parts, the rollouts' share."""
    policies, shards = (section[f"policy.parallelism.{key}"] for key in ("n_init_replicas", "dp_shard_size"))
    members, ticks = run.rollout.group_size, run.expected_valid_steps
    # Where it does not divide, preflight says so, with the numbers and what does.
    section.put("train.train_batch_per_replica", -(-run.rollout.scenes_per_step * members // policies))
    batch = section["train.train_batch_per_replica"]
    groups = max(batch * policies // members, 1)
    section.put("rollout.batch_size", -(-groups // section["rollout.parallelism.n_init_replicas"]))
    if (steps := section["train.max_num_steps"]) is not None:
        section.put("train.epoch", min(steps * groups, 1_000_000))  # even one scene lasts to the last step
    if (part := max(round(grpo.minibatch / ticks / policies), 1)) < batch:
        section.put("train.train_policy.batch_size_per_optimize", part)
    rank = max(batch // shards, 1)
    most = max(grpo.micro_batch // ticks, 1) if grpo.micro_batch else rank
    section.put("train.train_policy.mini_batch", next(n for n in range(min(most, rank), 0, -1) if rank % n == 0))


class _Section:
    """The section `cosmos` by dotted keys; what is given already is not put."""

    def __init__(self, cosmos: CosmosSection, said: Collection[str]) -> None:
        self._data, self._defaults, self._said = asdict(cosmos), asdict(CosmosSection()), said

    def __getitem__(self, key: str) -> Any:
        return _leaf(self._data, key)

    def is_given(self, key: str) -> bool:
        """Whether the user, a preset or a topology decided it."""
        whole = f"cosmos.{key}"
        return any(whole == word or whole.startswith(f"{word}.") for word in self._said) or self[key] != _leaf(
            self._defaults, key
        )

    def put(self, key: str, value: Any) -> None:
        """Set what is not given."""
        if not self.is_given(key):
            above, _, name = key.rpartition(".")
            _leaf(self._data, above)[name] = value

    def built(self) -> CosmosSection:
        """As a validated section."""
        built: CosmosSection = build_section(CosmosSection, self._data, "cosmos")
        return built


def _leaf(data: Mapping[str, Any], key: str) -> Any:
    node: Any = data
    for name in key.split("."):
        node = node[name]
    return node
