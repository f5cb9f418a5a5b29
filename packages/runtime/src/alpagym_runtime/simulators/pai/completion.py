"""A completion's text: the reasoning before its end marker, the trajectory tokens between theirs.

Source: how the published reward path reads text (NVlabs/alpamayo-recipes), rule by rule.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

COT_START, COT_END = "<|cot_start|>", "<|cot_end|>"
FUTURE_START, FUTURE_END = "<|traj_future_start|>", "<|traj_future_end|>"

_TOKEN = re.compile(r"<i(\d{1,9})>")


def reasoning_of(text: str) -> str:
    """Words before the first `<|cot_end|>`, after the last `<|cot_start|>` before it; "" without an end marker."""
    head, found, _ = text.partition(COT_END)
    return head.rpartition(COT_START)[2].strip() if found else ""


def bins_of(text: str, tokens: int, bins: int) -> NDArray[np.int64]:
    """Bins [tokens] of a completion, whatever it holds.

    Right of the last start marker, left of the next end marker; without a start marker the whole text counts. Numbers
    outside the range become its end, what is missing becomes bin 0, what is too much is dropped.
    """
    inside = text.rpartition(FUTURE_START)[2].partition(FUTURE_END)[0]
    found = [int(number) for number in _TOKEN.findall(inside)[:tokens]]
    out = np.zeros(tokens, np.int64)
    out[: len(found)] = np.clip(found, 0, bins - 1)
    return out


def completion_text(cot: str, bins: NDArray[np.int64]) -> str:
    """The completion that says `cot` and drives `bins`, as a policy writes it after the reasoning's start marker."""
    words = "".join(f"<i{number}>" for number in np.asarray(bins).tolist())
    return f"{cot}{COT_END}{FUTURE_START}{words}{FUTURE_END}"
