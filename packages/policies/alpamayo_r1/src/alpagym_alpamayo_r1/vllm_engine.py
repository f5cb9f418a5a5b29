"""Words and tokens written by vLLM, which batches continuously and keeps prompts and pictures that it has read.

vLLM serves the language model, not the action expert. It gets a directory that describes the backbone and no weights:
those are handed over in the process, by the policy's own names, whenever their version is another one, so its graphs
stay. It draws with generators of its own, seeded by ours: what it writes follows from the seeds, and is not what the
other engines write.

Written against vLLM's documented interface (0.20 to 0.22: `LLM`, `SamplingParams`, `apply_model`, `multi_modal_uuids`,
`logprobs_mode`) and tested with a stand-in of it; it was not run with vLLM itself.
"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers import Qwen3VLConfig

from alpagym_alpamayo_r1.architecture import Architecture
from alpagym_alpamayo_r1.processing import Processor
from alpagym_plugins import ConfigError
from alpagym_runtime.files import write_json
from alpagym_runtime.types import Sampling

_BARRED = -100.0
"""Added to logits of words that must not come: e^-100 of any probability; a request has no mask for "all but these"."""


@dataclass(frozen=True)
class Prompt:
    """What one row reads.

    Attributes:
        ids: tokens, one for each picture.
        pictures: [P,h,w,3] u8.
        names: of the pictures, the same for the same picture; None where it has none.

    """

    ids: list[int]
    pictures: NDArray[np.uint8]
    names: list[str | None]

    def then(self, ids: Sequence[int]) -> Prompt:
        """The same with more tokens behind it."""
        return Prompt([*self.ids, *ids], self.pictures, self.names)


class VllmEngine:
    """See the module's text.

    Args:
        architecture: of the model.
        processor: its words and pictures.
        dtype: of the weights.
        context: most tokens of prompt and completion together.
        pictures: of a prompt.
        memory_share: of the GPU that vLLM takes.

    Attributes:
        version: of the weights that it has; None before the first.

    """

    def __init__(
        self,
        architecture: Architecture,
        processor: Processor,
        *,
        dtype: torch.dtype,
        context: int,
        pictures: int,
        memory_share: float,
    ) -> None:
        # In this process: weights are handed over as they are, not as messages.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        try:
            vllm = importlib.import_module("vllm")
        except ImportError as err:
            raise ConfigError(
                "vllm is not installed: uv sync --all-packages --extra vllm", key="policy.engine"
            ) from err
        self._first, self._not_text = architecture.first_id, architecture.not_text
        self.version: int | None = None
        self._params = vllm.SamplingParams
        folder = tempfile.mkdtemp(prefix="alpagym-vllm-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        _describe(Path(folder), architecture, processor)
        self._llm = vllm.LLM(
            model=folder,
            load_format="dummy",
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=context,
            gpu_memory_utilization=memory_share,
            limit_mm_per_prompt={"image": pictures},
            logprobs_mode="processed_logprobs",  # under temperature, top-p and the words that are allowed
        )

    def use(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take the policy's weights, and forget prompts that were read with others."""
        backbone = [(name.removeprefix("vlm."), value) for name, value in weights.items() if name.startswith("vlm.")]
        self._llm.apply_model(lambda model: model.load_weights(backbone) and None)
        self._llm.reset_prefix_cache()
        self.version = version

    def write(
        self,
        prompts: Sequence[Prompt],
        seeds: NDArray[np.uint64],
        sampling: Sampling,
        *,
        steps: int,
        bins: int | None = None,
        stop_id: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Ids [N,S] i64 (-1 behind the end) and their log-probabilities [N,S] f32 (0 there).

        Args:
            prompts: N of them.
            seeds: [N].
            sampling: temperature, top-p, or mean: the likeliest, whose log-probabilities mean nothing.
            steps: S, most tokens; exactly so many without a `stop_id`.
            bins: only trajectory tokens below this; None: text only (`Architecture.not_text`).
            stop_id: ends a row, and stands in it.

        """
        likeliest = sampling.mode == "mean"
        words: dict[str, Any] = {"logit_bias": dict.fromkeys(self._not_text, _BARRED)}
        if bins is not None:
            words = {"allowed_token_ids": list(range(self._first, self._first + bins))}
        params = [
            self._params(
                temperature=0.0 if likeliest else sampling.temperature,
                top_p=1.0 if likeliest else sampling.top_p,
                seed=int(seed) & (2**63 - 1),
                max_tokens=steps,
                stop_token_ids=None if stop_id is None else [stop_id],
                ignore_eos=True,
                logprobs=0,  # of the token that was drawn
                detokenize=False,
                **words,
            )
            for seed in seeds
        ]
        outputs = self._llm.generate(list(map(self._request, prompts)), params, use_tqdm=False)
        ids = torch.full((len(prompts), steps), -1)
        log_prob = torch.zeros(len(prompts), steps)
        for row, output in enumerate(outputs):
            written = output.outputs[0]
            tokens = list(written.token_ids)
            ended = written.finish_reason == "stop"
            if ended != (stop_id is not None and tokens[-1:] == [stop_id]) or (not ended and len(tokens) != steps):
                raise RuntimeError(
                    f"vLLM wrote {len(tokens)} of {steps} tokens and says {written.finish_reason!r}; expected all of "
                    f"them, or to stop with token {stop_id} as the last"
                )
            ids[row, : len(tokens)] = torch.tensor(tokens)
            each = [chosen[token].logprob for token, chosen in zip(tokens, written.logprobs, strict=True)]
            log_prob[row, : len(tokens)] = torch.tensor(each)
        return ids, log_prob

    def _request(self, prompt: Prompt) -> dict[str, Any]:
        request: dict[str, Any] = {"prompt_token_ids": prompt.ids}
        if len(prompt.pictures):
            request["multi_modal_data"] = {"image": [Image.fromarray(picture) for picture in prompt.pictures]}
            # What vLLM keeps of a picture is good for one version of the weights.
            named = [None if name is None else f"{name}-{self.version}" for name in prompt.names]
            request["multi_modal_uuids"] = {"image": named}
        return request


def _describe(folder: Path, architecture: Architecture, processor: Processor) -> None:
    """Write what vLLM wants to know of the backbone: its config, words and pictures."""
    config = Qwen3VLConfig(**architecture.vlm).to_dict()
    write_json(folder / "config.json", config | {"architectures": ["Qwen3VLForConditionalGeneration"]})
    processor.save(folder)


def one_pad_each(ids: Sequence[int], pad: int) -> Iterator[int]:
    """Token ids in which a run of picture tokens, one picture, is one token."""
    before = None
    for token in ids:
        if token != pad or before != pad:
            yield token
        before = token
