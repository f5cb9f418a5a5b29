"""Stands for vLLM: the documented arguments and results that `vllm_engine` uses, over the backbone itself.

Reads the directory that it is given, draws by its own generators in the documented order (allowed words, bias,
temperature, top-p), and takes no argument that it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from alpagym_alpamayo_r1 import compat


@dataclass
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    detokenize: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        assert 0 < self.top_p <= 1
        assert self.temperature >= 0
        assert self.seed is None or -(2**63) <= self.seed < 2**63


@dataclass
class Logprob:
    logprob: float


@dataclass
class CompletionOutput:
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    finish_reason: str | None = None


@dataclass
class RequestOutput:
    outputs: list[CompletionOutput] = field(default_factory=list)


class Model(Qwen3VLForConditionalGeneration):
    def load_weights(self, weights):
        loaded = dict(weights)
        self.load_state_dict(loaded)
        return set(loaded)


class LLM:
    made: ClassVar[list[LLM]] = []

    def __init__(
        self, model, *, load_format, dtype, max_model_len, gpu_memory_utilization, limit_mm_per_prompt, logprobs_mode
    ):
        assert load_format == "dummy"
        assert logprobs_mode == "processed_logprobs"
        assert not list(Path(model).glob("*.safetensors"))
        config = Qwen3VLConfig.from_pretrained(model)
        assert config.architectures == ["Qwen3VLForConditionalGeneration"]
        self.model = Model(config).to(getattr(torch, dtype)).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.images = compat.image_processor_class().from_pretrained(model)
        self.most_tokens, self.most_images = max_model_len, limit_mm_per_prompt["image"]
        self.share = gpu_memory_utilization
        self.seen, self.looked, self.resets, self.loads = {}, 0, 0, 0
        LLM.made.append(self)

    def apply_model(self, function):
        self.loads += 1
        return [function(self.model)]

    def reset_prefix_cache(self):
        self.resets += 1
        return True

    def generate(self, prompts, sampling_params, *, use_tqdm=True):
        assert not use_tqdm
        with torch.no_grad():
            # The last first: a request's tokens do not depend on the order.
            done = [self._one(*pair) for pair in list(zip(prompts, sampling_params, strict=True))[::-1]]
        return done[::-1]

    def _one(self, prompt, params):
        data = prompt.get("multi_modal_data", {}).get("image", [])
        named = prompt.get("multi_modal_uuids", {}).get("image", [None] * len(data))
        assert len(named) == len(data) <= self.most_images
        ids, pixels, grids = [], [], []
        pictures = iter(zip(data, named, strict=True))
        pad = self.model.config.image_token_id
        for token in prompt["prompt_token_ids"]:
            if token != pad:
                ids.append(token)
                continue
            values, grid = self._look(*next(pictures))
            pixels.append(values)
            grids.append(grid)
            ids += [pad] * (int(grid.prod()) // self.images.merge_size**2)
        assert next(pictures, None) is None, "a picture without its token"
        generator = torch.Generator().manual_seed(params.seed)
        out = CompletionOutput([], [])
        while len(out.token_ids) < params.max_tokens:
            assert len(ids) < self.most_tokens
            token, log_prob = self._draw(self._logits(ids, pixels, grids), params, generator)
            ids.append(token)
            out.token_ids.append(token)
            out.logprobs.append({token: Logprob(log_prob)})
            if token in (params.stop_token_ids or []):
                out.finish_reason = "stop"
                return RequestOutput([out])
        out.finish_reason = "length"
        return RequestOutput([out])

    def _look(self, image, name):
        if name is None or name not in self.seen:
            self.looked += 1
            made = self.images(images=[np.asarray(image)], return_tensors="pt", input_data_format="channels_last")
            found = made["pixel_values"], made["image_grid_thw"]
            if name is None:
                return found
            self.seen[name] = found
        return self.seen[name]

    def _logits(self, ids, pixels, grids):
        words = torch.tensor([ids])
        pictures = {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.cat(grids)} if pixels else {}
        kinds = compat.token_types(words, self.model.config.image_token_id)
        return self.model(input_ids=words, attention_mask=torch.ones_like(words), **pictures, **kinds).logits[0, -1]

    @staticmethod
    def _draw(logits, params, generator):
        logits = logits.double()
        if params.allowed_token_ids is not None:
            allowed = torch.zeros(len(logits), dtype=torch.bool)
            allowed[params.allowed_token_ids] = True
            logits = logits.masked_fill(~allowed, -torch.inf)
        for token, bias in (params.logit_bias or {}).items():
            logits[token] += bias
        if params.temperature < 1e-5:
            token = int(logits.argmax())
            return token, float(logits.log_softmax(-1)[token])
        probability = (logits / params.temperature).softmax(-1)
        ordered, order = probability.sort(descending=True)
        probability[order[ordered.cumsum(0) - ordered >= params.top_p]] = 0.0
        probability /= probability.sum()
        token = int(torch.multinomial(probability, 1, generator=generator))
        return token, float(probability[token].log())
