"""What the `_target_` strings of a checkpoint's config may name: rows of a table of ours, never code to import.

Released configs name Python classes by path. Importing what a data file says would run code that came with a download,
so each path is looked up here, and an unknown one is refused with its key. The same table moves the paths between the
families of the releases and of training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from alpagym_plugins import ConfigError, nearest

FAMILIES = ("alpamayo_r1", "alpamayo1_5")

UNICYCLE = "unicycle action space"
FUTURE_TOKENIZER = "future tokenizer"
HISTORY_TOKENIZER = "history tokenizer"
FLOW_MATCHING = "flow matching"
ACTION_IN = "action input projection"
LINEAR = "linear layer"

# Path below a family -> what it means here. Some releases spell the package, some the module.
_BELOW_FAMILY = {
    "action_space.UnicycleAccelCurvatureActionSpace": UNICYCLE,
    "action_space.unicycle_accel_curvature.UnicycleAccelCurvatureActionSpace": UNICYCLE,
    "action_space.DiscreteTrajectoryTokenizer": FUTURE_TOKENIZER,
    "action_space.discrete_action_space.DiscreteTrajectoryTokenizer": FUTURE_TOKENIZER,
    "models.delta_tokenizer.DeltaTrajectoryTokenizer": HISTORY_TOKENIZER,
    "diffusion.flow_matching.FlowMatching": FLOW_MATCHING,
    "models.action_in_proj.PerWaypointActionInProjV2": ACTION_IN,
}
TARGETS: dict[str, str] = {
    **{f"{family}.{path}": kind for family in FAMILIES for path, kind in _BELOW_FAMILY.items()},
    # As checkpoints that were converted for NVIDIA's own AlpaGym spell it.
    "alpagym_alpamayo_r1.submodules.action_in_proj.PerWaypointActionInProjV2": ACTION_IN,
    "torch.nn.Linear": LINEAR,
}

# Which part of a config may be what.
EXPECTED = {
    "action_space_cfg": UNICYCLE,
    "traj_tokenizer_cfg": FUTURE_TOKENIZER,
    "traj_tokenizer_cfg.action_space_cfg": UNICYCLE,
    "hist_traj_tokenizer_cfg": HISTORY_TOKENIZER,
    "diffusion_cfg": FLOW_MATCHING,
    "action_in_proj_cfg": ACTION_IN,
    "action_out_proj_cfg": LINEAR,
}


def find_targets(config: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key of the section, path) of every `_target_` in nested mappings and lists."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            if name == "_target_":
                yield key, str(value)
            else:
                yield from find_targets(value, f"{key}.{name}" if key else str(name))
    elif isinstance(config, (list, tuple)):
        for i, value in enumerate(config):
            yield from find_targets(value, f"{key}[{i}]")


def check_targets(config: Mapping[str, Any]) -> None:
    """Refuse a config with a target that the table lacks, or one in the wrong place.

    Raises:
        ConfigError: names the key, the path and the nearest known one.

    """
    for key, path in find_targets(config):
        full = f"{key}._target_" if key else "_target_"
        if path not in TARGETS:
            near = nearest(path, TARGETS)
            hint = f"; the nearest known one is {near!r}" if near else ""
            raise ConfigError(f"{path!r} is unknown and is not imported{hint}", key=full)
        if key not in EXPECTED:
            raise ConfigError(f"no target belongs here, got {path!r}", key=full)
        if TARGETS[path] != EXPECTED[key]:
            raise ConfigError(f"must name a {EXPECTED[key]}, {path!r} is a {TARGETS[path]}", key=full)


def move_targets(config: Any, family: str) -> Any:
    """A copy of nested data whose targets of any family are those of `family`; others stay."""
    if isinstance(config, Mapping):
        return {k: _move(v, family) if k == "_target_" else move_targets(v, family) for k, v in config.items()}
    if isinstance(config, (list, tuple)):
        return [move_targets(value, family) for value in config]
    return config


def _move(path: str, family: str) -> str:
    head, _, rest = path.partition(".")
    return f"{family}.{rest}" if head in FAMILIES and rest in _BELOW_FAMILY else path
