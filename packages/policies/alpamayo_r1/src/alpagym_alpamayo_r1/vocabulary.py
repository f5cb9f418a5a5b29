"""The words that Alpamayo adds to its backbone's vocabulary: trajectory tokens `<i0>` … and markers `<|name|>`.

Their order decides their ids, so both lists are the releases' own. With the public Qwen3-VL tokenizer (151,669 words)
they give the released ids: `<i0>` 151,669, `<|traj_future_start|>` 155,681, 155,697 words in all (`<|image_pad|>` is
one of the backbone's words already).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alpagym_alpamayo_r1.architecture import MARKER_NAMES, RELEASE_1, Architecture
from alpagym_plugins import ConfigError

_COMMON_HEAD = ("prompt_start", "prompt_end", "image_start")
_COMMON_TAIL = ("route_start", "route_pad", "route_end", "question_start", "question_end", "answer_start", "answer_end")
MARKERS_1 = (
    *_COMMON_HEAD,
    "image_pre_tkn",
    "image_end",
    "traj_history_start",
    "traj_history_pre_tkn",
    "traj_history_end",
    "cot_start",
    "cot_end",
    "meta_action_start",
    "meta_action_end",
    "traj_future_start",
    "traj_future_pre_tkn",
    "traj_future_end",
    "traj_history",
    "traj_future",
    "image_pad",
    "vectorized_wm",
    "vectorized_wm_start",
    "vectorized_wm_end",
    "vectorized_wm_pre_tkn",
    *_COMMON_TAIL,
)
# 1.5 keeps the places of the words that it no longer uses.
_RETIRED = (
    "image_pre_tkn",
    "traj_history_pre_tkn",
    "meta_action_start",
    "meta_action_end",
    "traj_future_pre_tkn",
    "vectorized_wm",
    "vectorized_wm_start",
    "vectorized_wm_end",
    "vectorized_wm_pre_tkn",
)
MARKERS_1_5 = tuple(f"_padding_{_RETIRED.index(name)}" if name in _RETIRED else name for name in MARKERS_1)


def marker(name: str) -> str:
    """The word of a marker."""
    return f"<|{name}|>"


def extend_tokenizer(tokenizer: Any, architecture: Architecture) -> Any:
    """Add trajectory tokens and markers, in place; words that are there already stay where they are.

    Returns:
        The same tokenizer.

    Raises:
        ConfigError: the ids that result differ from the checkpoint's.

    """
    words = [f"<i{number}>" for number in range(architecture.traj_vocab_size)]
    # Plain words, so that decoding keeps them where special ones are dropped.
    tokenizer.add_tokens([word for word in words if word not in tokenizer.get_vocab()])
    names = markers_of(architecture)
    known = tokenizer.get_vocab()
    tokenizer.add_tokens([marker(name) for name in names if marker(name) not in known], special_tokens=True)
    tokenizer.padding_side = "left"
    check_tokenizer(tokenizer, architecture)
    return tokenizer


def markers_of(architecture: Architecture) -> tuple[str, ...]:
    """Marker names in the order of their ids: the full list of the release, or the six of a plain backbone."""
    if not architecture.raw.get("add_special_tokens", True):
        return tuple(f"traj_{name}" for name in MARKER_NAMES)
    version = architecture.raw.get("alpamayo_version")
    is_first = architecture.layout is RELEASE_1 if version is None else version == "1"
    return MARKERS_1 if is_first else MARKERS_1_5


def check_tokenizer(tokenizer: Any, architecture: Architecture) -> None:
    """Refuse a tokenizer whose ids are not the checkpoint's.

    Raises:
        ConfigError: names the config key and both ids.

    """
    last = architecture.first_id + architecture.traj_vocab_size - 1
    expected = {
        "traj_token_start_idx": ("<i0>", architecture.first_id),
        "traj_vocab_size": (f"<i{architecture.traj_vocab_size - 1}>", last),
        **{f"traj_token_ids.{name}": (marker(f"traj_{name}"), architecture.marker_ids[name]) for name in MARKER_NAMES},
        "vlm_config.image_token_id": ("<|image_pad|>", architecture.vlm["image_token_id"]),
    }
    known = tokenizer.get_vocab()
    for key, (word, number) in expected.items():
        if known.get(word) != number:
            raise ConfigError(f"says {number}, the tokenizer gives {word} the id {known.get(word)}", key=key)
    if len(tokenizer) > architecture.vocab_size:
        raise ConfigError(
            f"is {architecture.vocab_size}, the tokenizer has {len(tokenizer)} words: the last ones have no weights",
            key="vocab_size",
        )


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer of a local directory; the hub is never asked.

    Raises:
        ConfigError: the directory holds none.

    """
    if not (directory / "tokenizer_config.json").is_file():
        raise ConfigError(f"{directory} has no tokenizer_config.json; give the backbone's local directory")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, local_files_only=True)
