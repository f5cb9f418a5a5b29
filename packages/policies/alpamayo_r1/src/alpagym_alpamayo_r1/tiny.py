"""A whole Alpamayo of a few hundred thousand random weights, made locally: config, tokenizer, processor, model.

Same architecture, words and layouts as the releases, so whatever runs on it runs on them. The tokenizer is trained on
five sentences of our own; every text encodes, bytes being words too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alpagym_alpamayo_r1 import compat
from alpagym_alpamayo_r1.architecture import MARKER_NAMES, RELEASE_1, RELEASE_1_5, Layout, read_architecture
from alpagym_alpamayo_r1.model import AlpamayoModel
from alpagym_alpamayo_r1.processing import Processor, Sample, make_image_processor
from alpagym_alpamayo_r1.prompt import DEFAULT_CAMERAS, REQUESTS, SYSTEM
from alpagym_alpamayo_r1.vocabulary import MARKERS_1, MARKERS_1_5, marker
from alpagym_plugins import check_choice
from alpagym_runtime.files import write_json

BASE_WORDS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
SENTENCES = (
    f"system\n{SYSTEM}",
    "user\n" + ", then ".join(text for text in REQUESTS.values() if text) + ".",
    "assistant\nSlow down because the lead vehicle ahead is braking.",
    "assistant\nKeep the present speed because the lane ahead is clear.",
    "Front left camera: frame 0 frame 1 frame 2 frame 3 Front camera: Front right camera: Front telephoto camera: ",
)
RELEASED_ACTION_SPACE = {
    "accel_mean": 0.02902694707164455,
    "accel_std": 0.6810426736454882,
    "curvature_mean": 0.0002692167976330542,
    "curvature_std": 0.026148280660833106,
    "accel_bounds": [-9.8, 9.8],
    "curvature_bounds": [-0.33, 0.33],
    "dt": 0.1,
    "n_waypoints": 64,
}


@dataclass(frozen=True)
class TinySize:
    """How small: widths of backbone and expert, layers, bins of both tokenizers, way-points and steps, pixels."""

    hidden: int = 64
    expert_hidden: int = 48
    layers: int = 2
    future_bins: int = 3000
    history_bins: int = 1000
    waypoints: int = 64
    denoising_steps: int = 10
    pixels: int = 64 * 96
    tied: bool = False


def make_tokenizer(markers: tuple[str, ...], trajectory_words: int) -> Any:
    """A byte-level tokenizer with the base words, `<i0>` … and the markers, in the releases' order."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(SENTENCES * 20, trainer)
    tokenizer = compat.tokenizer_class()(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token=None, bos_token=None
    )
    words = [AddedToken(word, special=True, normalized=False) for word in BASE_WORDS]
    tokenizer.add_tokens(words, special_tokens=True)
    tokenizer.add_tokens([f"<i{k}>" for k in range(trajectory_words)])
    known = tokenizer.get_vocab()
    tokenizer.add_tokens([marker(name) for name in markers if marker(name) not in known], special_tokens=True)
    tokenizer.padding_side = "left"
    return tokenizer


def make_config(tokenizer: Any, size: TinySize, layout: Layout = RELEASE_1_5) -> dict[str, Any]:
    """`config.json` in a release's layout, with the backbone written out."""
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad", "vision_start",
           "vision_end")}  # fmt: skip
    family = layout.family
    space = {
        "_target_": f"{family}.action_space.UnicycleAccelCurvatureActionSpace",
        **RELEASED_ACTION_SPACE,
        "n_waypoints": size.waypoints,
    }
    return {
        "model_type": layout.model_type,
        "architectures": [layout.architecture],
        "vlm_backend": "qwenvl3",
        "vlm_name_or_path": "tiny",
        "vlm_config": {
            "image_token_id": ids["image_pad"],
            "video_token_id": ids["video_pad"],
            "vision_start_token_id": ids["vision_start"],
            "vision_end_token_id": ids["vision_end"],
            "tie_word_embeddings": size.tied,
            "text_config": {
                "vocab_size": len(tokenizer),
                "hidden_size": size.hidden,
                "intermediate_size": 2 * size.hidden,
                "num_hidden_layers": size.layers,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "max_position_embeddings": 4096,
                "rope_theta": 10000.0,
                # Three sections that sum to head_dim / 2.
                "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]},
                "tie_word_embeddings": size.tied,
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_heads": 2,
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "out_hidden_size": size.hidden,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0],
            },
        },
        "vocab_size": len(tokenizer),
        "traj_vocab_size": size.future_bins + size.history_bins,
        "traj_token_start_idx": tokenizer.convert_tokens_to_ids("<i0>"),
        "traj_token_ids": {name: tokenizer.convert_tokens_to_ids(marker(f"traj_{name}")) for name in MARKER_NAMES},
        "tokens_per_history_traj": 48,
        "tokens_per_future_traj": 2 * size.waypoints,
        "add_special_tokens": True,
        "model_dtype": "float32",
        "attn_implementation": "sdpa",
        "min_pixels": size.pixels // 2,
        "max_pixels": size.pixels,
        "include_camera_ids": layout is RELEASE_1_5,
        "include_frame_nums": layout is RELEASE_1_5,
        "expert_non_causal_attention": True,
        "traj_tokenizer_cfg": {
            "_target_": f"{family}.action_space.discrete_action_space.DiscreteTrajectoryTokenizer",
            "_recursive_": False,
            "action_space_cfg": space,
            "dims_min": [-10.0, -10.0],
            "dims_max": [10.0, 10.0],
            "num_bins": size.future_bins,
        },
        "hist_traj_tokenizer_cfg": {
            "_target_": f"{family}.models.delta_tokenizer.DeltaTrajectoryTokenizer",
            "num_bins": size.history_bins,
        },
        "action_space_cfg": space,
        "diffusion_cfg": {
            "_target_": f"{family}.diffusion.flow_matching.FlowMatching",
            "int_method": "euler",
            "num_inference_steps": size.denoising_steps,
        },
        "action_in_proj_cfg": {
            "_target_": f"{family}.models.action_in_proj.PerWaypointActionInProjV2",
            "hidden_size": 32,
            "num_enc_layers": 2,
            "num_fourier_feats": 20,
            "max_freq": 100.0,
        },
        "action_out_proj_cfg": {"_target_": "torch.nn.Linear"},
        # Head size and key heads must be the backbone's: the expert reads its cache.
        "expert_cfg": {
            "hidden_size": size.expert_hidden,
            "intermediate_size": 2 * size.expert_hidden,
            "num_attention_heads": 4,
        },
    }


def make_tiny(
    size: TinySize | None = None, layout: Layout = RELEASE_1_5, seed: int = 0
) -> tuple[AlpamayoModel, Processor]:
    """A model with random float32 weights, and its processor; torch's generator is left as it was."""
    size = size or TinySize()
    markers = MARKERS_1 if layout is RELEASE_1 else MARKERS_1_5
    tokenizer = make_tokenizer(markers, size.future_bins + size.history_bins)
    architecture = read_architecture(make_config(tokenizer, size, layout))
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = AlpamayoModel(architecture).eval()
    torch.random.set_rng_state(state)
    return model, Processor(tokenizer, make_image_processor(architecture), architecture)


def release_layout(version: str) -> Layout:
    """The layout of a release by its version, "1" or "1.5"."""
    releases = {layout.name: layout for layout in (RELEASE_1, RELEASE_1_5)}
    check_choice("release", version, releases)
    return releases[version]


def save_tiny(directory: Path, model: AlpamayoModel, processor: Processor, *, max_shard_bytes: int = 1 << 32) -> None:
    """Write a release-like directory: config, shards with their index, tokenizer, image processor."""
    from alpagym_alpamayo_r1.checkpoints import write_weights

    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", model.architecture.raw)
    write_json(directory / "generation_config.json", {"do_sample": True, "temperature": 0.6, "top_p": 0.98})
    write_weights(directory, model, max_shard_bytes=max_shard_bytes)
    processor.save(directory)


def example_drive(
    speed_mps: float = 8.0,
    seed: int = 0,
    *,
    cameras: tuple[int, ...] = DEFAULT_CAMERAS,
    frames: int = 4,
    **texts: str,
) -> Sample:
    """Straight ahead at a constant speed: 16 poses of history, 64 of future, pictures [C,K,90,160,3] of noise."""
    time = np.arange(-15, 65) * 0.1
    path = np.stack([speed_mps * time, np.zeros(80), np.zeros(80)], -1)
    images = np.random.default_rng(seed).integers(0, 256, (len(cameras), frames, 90, 160, 3), np.uint8)
    return Sample(images, path[:16], np.zeros(16), path[16:], np.zeros(64), cameras, texts)
