"""What a checkpoint's `config.json` says, checked and without torch: the one description that everything is built from.

A release names its backbone (`vlm_name_or_path`) without describing it. The two names that the releases use are a table
here, so nothing is fetched; a config that carries `vlm_config` (ours do) needs no name.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alpagym_alpamayo_r1.targets import check_targets
from alpagym_plugins import ConfigError, nearest
from alpagym_runtime.files import read_json


@dataclass(frozen=True)
class Layout:
    """How one kind of checkpoint directory writes its config: model type, class and family of the targets."""

    name: str
    model_type: str
    architecture: str
    family: str


RELEASE_1 = Layout("1", "alpamayo_r1", "AlpamayoR1", "alpamayo_r1")
RELEASE_1_5 = Layout("1.5", "alpamayo1_5", "Alpamayo1_5", "alpamayo1_5")
TRAINING = Layout("training", "alpamayo_reasoning_vla", "ReasoningVLA", "alpamayo_r1")
LAYOUTS = {layout.name: layout for layout in (RELEASE_1, RELEASE_1_5, TRAINING)}

# Qwen3-VL-8B and Cosmos-Reason2-8B have one architecture (public config.json of Qwen/Qwen3-VL-8B-Instruct).
_QWEN3_VL_8B: dict[str, Any] = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "tie_word_embeddings": False,
    "text_config": {
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "vocab_size": 151936,
    },
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "intermediate_size": 4304,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
BACKBONES = {"nvidia/Cosmos-Reason2-8B": _QWEN3_VL_8B, "Qwen/Qwen3-VL-8B-Instruct": _QWEN3_VL_8B}

MARKER_NAMES = ("history", "future", "history_start", "future_start", "history_end", "future_end")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Architecture:
    """A checkpoint's config, read and checked.

    Attributes:
        layout: which kind of directory it came from.
        vlm: arguments of a Qwen3-VL config, `vocab_size` included.
        expert: overrides of the text config for the action expert; None where a training checkpoint has none.
        action_space, future, history, action_in, diffusion: the sections, without `_target_`.
        history_tokens, future_tokens: tokens that stand for a trajectory.
        future_bins: bins of the future tokenizer; ids of the history follow them.
        traj_vocab_size: trajectory tokens `<i0>` … in the vocabulary.
        first_id: id of `<i0>`.
        marker_ids: ids of the six trajectory markers, by `MARKER_NAMES`.
        min_pixels, max_pixels: of a resized picture.
        camera_names, frame_numbers: what the prompt says of pictures at inference.
        expert_is_causal: the released experts are not.
        dtype: of the weights when they are made anew; files keep their own.
        raw: the whole config.

    """

    layout: Layout
    vlm: dict[str, Any]
    expert: dict[str, Any] | None
    action_space: dict[str, Any]
    future: dict[str, Any]
    history: dict[str, Any]
    action_in: dict[str, Any]
    diffusion: dict[str, Any]
    history_tokens: int
    future_tokens: int
    future_bins: int
    traj_vocab_size: int
    first_id: int
    marker_ids: dict[str, int]
    min_pixels: int
    max_pixels: int
    camera_names: bool
    frame_numbers: bool
    expert_is_causal: bool
    dtype: str
    raw: dict[str, Any]

    @property
    def first_history_id(self) -> int:
        """Id of the history's bin 0."""
        return self.first_id + self.future_bins

    @property
    def not_text(self) -> list[int]:
        """Ids that reasoning must not hold: trajectory tokens, and stand-ins of pictures, which would be looked for."""
        pictures = [self.vlm[f"{name}_token_id"] for name in ("image", "video", "vision_start")]
        return [*range(self.first_id, self.first_id + self.traj_vocab_size), *pictures]

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self.vlm["text_config"]["vocab_size"])

    @property
    def tied(self) -> bool:
        """The output layer is the embedding."""
        return bool(self.vlm.get("tie_word_embeddings", False))


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint directory.

    Raises:
        ConfigError: the directory or the file is missing, or holds no mapping.

    """
    file = directory / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"{file} does not exist; give a directory that holds a checkpoint (the hub is never asked: download it "
            "first, for example with `hf download NAME --local-dir DIR`)"
        )
    data = read_json(file)
    if not isinstance(data, dict):
        raise ConfigError(f"{file} holds no mapping")
    return data


def load_architecture(directory: Path) -> Architecture:
    """The architecture of a checkpoint directory; errors name the file."""
    try:
        return read_architecture(read_config(directory))
    except ConfigError as err:
        if not err.key:
            raise
        raise ConfigError(f"{err.message} ({directory / 'config.json'})", key=err.key) from err


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Check a config and read it.

    Raises:
        ConfigError: names the key that is missing, unknown or wrong.

    """
    layout = layout_of(config)
    check_targets(config)
    future = _section(config, "traj_tokenizer_cfg")
    space = _section(config, "action_space_cfg") or _section(future, "action_space_cfg")
    future = future | {"action_space_cfg": _section(future, "action_space_cfg") or space}
    expert = config.get("expert_cfg")
    if expert is None and layout is not TRAINING:
        raise ConfigError(f"is required in a {layout.model_type} checkpoint", key="expert_cfg")
    bins, vocabulary = int(future.get("num_bins", 3000)), _count(config, "traj_vocab_size")
    history = _section(config, "hist_traj_tokenizer_cfg")
    if bins + int(history.get("num_bins", 1000)) > vocabulary:
        raise ConfigError(
            f"must hold the bins of both tokenizers, {bins} + {history.get('num_bins', 1000)}, got {vocabulary}",
            key="traj_vocab_size",
        )
    ids = config.get("traj_token_ids")
    if not isinstance(ids, Mapping) or set(ids) != set(MARKER_NAMES):
        raise ConfigError(f"must give ids for {', '.join(MARKER_NAMES)}, got {ids!r}", key="traj_token_ids")
    dtype = str(config.get("model_dtype", "bfloat16"))
    if dtype not in DTYPES:
        raise ConfigError(f"must be one of {', '.join(DTYPES)}, got {dtype!r}", key="model_dtype")
    waypoints = int(future["action_space_cfg"].get("n_waypoints", 64))
    future_tokens = _count(config, "tokens_per_future_traj")
    if future_tokens != 2 * waypoints:
        raise ConfigError(f"must be two a waypoint, 2 · {waypoints}, got {future_tokens}", key="tokens_per_future_traj")
    history_tokens = _count(config, "tokens_per_history_traj")
    if history_tokens % 3:
        raise ConfigError(f"must be three a pose, got {history_tokens}", key="tokens_per_history_traj")
    vlm = _backbone(config)
    return Architecture(
        layout=layout,
        vlm=vlm,
        expert=None if expert is None else dict(expert),
        action_space=space,
        future=future,
        history=history,
        action_in=_section(config, "action_in_proj_cfg"),
        diffusion=_diffusion(config),
        history_tokens=history_tokens,
        future_tokens=future_tokens,
        future_bins=bins,
        traj_vocab_size=vocabulary,
        first_id=_count(config, "traj_token_start_idx"),
        marker_ids={name: int(ids[name]) for name in MARKER_NAMES},
        min_pixels=int(config.get("min_pixels") or 163_840),
        max_pixels=int(config.get("max_pixels") or 196_608),
        camera_names=bool(config.get("include_camera_ids", layout is RELEASE_1_5)),
        frame_numbers=bool(config.get("include_frame_nums", layout is RELEASE_1_5)),
        expert_is_causal=not config.get("expert_non_causal_attention", True),
        dtype=dtype,
        raw=copy.deepcopy(dict(config)),
    )


def layout_of(config: Mapping[str, Any]) -> Layout:
    """Which layout a config is written in, by its `model_type`."""
    kind = config.get("model_type")
    for layout in LAYOUTS.values():
        if kind == layout.model_type:
            return layout
    known = [layout.model_type for layout in LAYOUTS.values()]
    near = nearest(str(kind), known)
    hint = f"; did you mean {near!r}?" if near else ""
    raise ConfigError(f"must be one of {', '.join(known)}, got {kind!r}{hint}", key="model_type")


def _section(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    section = config.get(key)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"must be a mapping, got {section!r}", key=key)
    return {name: value for name, value in section.items() if not name.startswith("_")}


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"must be a whole number above 0, got {value!r}", key=key)
    return value


def _diffusion(config: Mapping[str, Any]) -> dict[str, Any]:
    section = _section(config, "diffusion_cfg")
    method = section.get("int_method", "euler")
    if method != "euler":
        raise ConfigError(f"must be 'euler', got {method!r}", key="diffusion_cfg.int_method")
    if section.get("use_classifier_free_guidance", False):
        raise ConfigError("guidance is not read", key="diffusion_cfg.use_classifier_free_guidance")
    return section


def _backbone(config: Mapping[str, Any]) -> dict[str, Any]:
    inline = config.get("vlm_config")
    name = config.get("vlm_name_or_path")
    if isinstance(inline, Mapping):
        vlm = copy.deepcopy(dict(inline))
    elif name in BACKBONES:
        vlm = copy.deepcopy(BACKBONES[name])
    else:
        raise ConfigError(
            f"{name!r} is not a known backbone ({', '.join(BACKBONES)}) and the config has no vlm_config; "
            "put the backbone's config.json there",
            key="vlm_name_or_path",
        )
    for part in ("text_config", "vision_config"):
        if not isinstance(vlm.get(part), Mapping):
            raise ConfigError("is required", key=f"vlm_config.{part}")
    if "vocab_size" in config:
        vlm["text_config"] = dict(vlm["text_config"]) | {"vocab_size": _count(config, "vocab_size")}
    return vlm
