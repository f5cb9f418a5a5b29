"""Graders of reasoning: how well a text says what a reference says, as a probability.

Lingo-Judge is a public sequence classifier (wayveai/Lingo-Judge) that is read from a local directory; torch and
transformers are imported when it is built. Each process has one grader a checkpoint; calls are serialised by a lock.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.errors import ConfigError

QUESTION = "What is the reasoning process of driving?"
MAX_TOKENS = 256
BATCH = 32
KEPT = 65_536


class ReasoningGrader(Protocol):
    """What every grader offers."""

    def score(self, predictions: Sequence[str], references: Sequence[str]) -> NDArray[np.float32]:
        """Probability [N] f32 that each prediction says what its reference says."""
        ...


def make_grader(name: str, path: str, device: str) -> ReasoningGrader:
    """A grader by name; ConfigError where the checkpoint is not on disk."""
    return WordOverlap() if name == "word_overlap" else _lingo_judge(path, device)


class WordOverlap:
    """Twice the common words over all words, case and punctuation apart: 1 for equal texts. No judge of meaning."""

    def score(self, predictions: Sequence[str], references: Sequence[str]) -> NDArray[np.float32]:
        """[N] f32 in [0, 1]."""
        return np.array([_overlap(a, b) for a, b in zip(predictions, references, strict=True)], np.float32)


def _overlap(a: str, b: str) -> float:
    first, second = (Counter(re.findall(r"\w+", text.lower())) for text in (a, b))
    total = first.total() + second.total()
    return 2.0 * (first & second).total() / total if total else 0.0


@lru_cache(maxsize=4)
def _lingo_judge(path: str, device: str) -> LingoJudge:
    return LingoJudge(Path(path), device)


class LingoJudge:
    """A classifier with one logit over question, reference answer and the student's answer."""

    def __init__(self, path: Path, device: str = "auto") -> None:
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"{path} holds no checkpoint; fetch it once: hf download wayveai/Lingo-Judge --local-dir {path}",
                key="grader_path",
            )
        try:
            import torch
            from transformers import AutoModelForSequenceClassification, AutoTokenizer
        except ImportError as err:
            raise ConfigError(f"lingo_judge needs {err.name}: pip install torch transformers", key="grader") from err
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model: Any = AutoModelForSequenceClassification.from_pretrained(path, local_files_only=True)
        if model.config.num_labels != 1:
            raise ConfigError(f"{path} has {model.config.num_labels} labels; a judge has one", key="grader_path")
        self._model = model.to(self._device).eval()
        self._lock = threading.Lock()
        # Members of a group often say the same.
        self._known: dict[tuple[str, str], float] = {}

    def score(self, predictions: Sequence[str], references: Sequence[str]) -> NDArray[np.float32]:
        """[N] f32 in [0, 1]."""
        with self._lock:
            pairs = list(zip(predictions, references, strict=True))
            new = [pair for pair in dict.fromkeys(pairs) if pair not in self._known]
            if len(self._known) + len(new) > KEPT:
                self._known.clear()
                new = list(dict.fromkeys(pairs))
            for start in range(0, len(new), BATCH):
                part = new[start : start + BATCH]
                self._known |= dict(zip(part, self._grade(part), strict=True))
            return np.array([self._known[pair] for pair in pairs], np.float32)

    def _grade(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        import torch

        head = f"{self._tokenizer.cls_token}\nQuestion: {QUESTION}\nAnswer: "
        texts = [f"{head}{reference}\nStudent: {prediction}" for prediction, reference in pairs]
        encoded = self._tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=MAX_TOKENS).to(
            self._device
        )
        with torch.no_grad():
            logits = self._model(**encoded).logits[:, 0]
        probabilities: list[float] = torch.sigmoid(logits.float()).cpu().tolist()
        return probabilities
