"""Memory and time of one SFT step (stage 1) and one GRPO step of an 8-billion backbone on one GPU. Random weights.

    python benchmarks/pai_real_size.py [--forwards 4] [--group 12] [--reasoning 32] [--out FILE] [--tiny]

Weights, gradients and AdamW's two moments are bfloat16; activations are computed again in the backward pass. Nothing is
loaded: weights are made on the device. `--tiny` runs the same lines with the tiny model on a CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alpagym_alpamayo_r1.architecture import _QWEN3_VL_8B, RELEASE_1_5, Layout, read_architecture
from alpagym_alpamayo_r1.config import Alpamayo15Config
from alpagym_alpamayo_r1.model import AlpamayoModel
from alpagym_alpamayo_r1.policy import AlpamayoPolicy
from alpagym_alpamayo_r1.processing import Processor, make_image_processor
from alpagym_alpamayo_r1.prompt import LAYOUTS
from alpagym_alpamayo_r1.sft_config import AlpamayoSftConfig
from alpagym_alpamayo_r1.sft_schedule import parameter_groups
from alpagym_alpamayo_r1.tiny import TinySize, make_config, make_tiny, make_tokenizer
from alpagym_alpamayo_r1.vocabulary import MARKERS_1_5
from alpagym_runtime.testing.examples import example_observation
from alpagym_runtime.trainers.base import Observations
from alpagym_runtime.trainers.grpo.config import GrpoConfig
from alpagym_runtime.trainers.update import StepData, optimise
from alpagym_runtime.types import Sampling

VOCABULARY = 155_697


def backbone(layout: Layout = RELEASE_1_5, *, small: bool = False) -> tuple[AlpamayoModel, Processor]:
    """Alpamayo 1.5 without its action expert, random bfloat16 weights, on the GPU; `small`: a tiny one on the CPU."""
    tokenizer = make_tokenizer(MARKERS_1_5, 4000)
    config = make_config(tokenizer, TinySize(), layout) | {"model_dtype": "bfloat16"}
    if not small:
        words = {k: v for k, v in config["vlm_config"].items() if k.endswith("_token_id")}
        config["vlm_config"] = _QWEN3_VL_8B | words
        config |= {"vocab_size": VOCABULARY, "min_pixels": 163_840, "max_pixels": 196_608}
    architecture = read_architecture(config)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cpu" if small else "cuda"):
        model = AlpamayoModel(architecture, with_expert=False)
    torch.set_default_dtype(torch.float32)
    return model, Processor(tokenizer, make_image_processor(architecture), architecture)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forwards", type=int, default=4, help="of one SFT step")
    parser.add_argument("--group", type=int, default=12)
    parser.add_argument("--reasoning", type=int, default=32, help="tokens before the plan in the GRPO step")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    model, processor = make_tiny() if options.tiny else backbone()
    size = {"height": 64, "width": 96} if options.tiny else {}
    config = Alpamayo15Config(
        rows=options.group, reasoning_tokens=options.reasoning, gradient_checkpointing=True, **size
    )
    policy = AlpamayoPolicy(config, model, processor, device)
    results: dict[str, Any] = {"torch": torch.__version__, "device": device}
    if not options.tiny:
        results["device"] = torch.cuda.get_device_name()
    results["parameters_billion"] = sum(p.numel() for p in model.parameters()) / 1e9

    def show(name: str, value: float) -> None:
        results[name] = round(value, 3)
        print(f"{name:56} {value:10.3f}", flush=True)

    def timed(name: str, work: Callable[[], Any]) -> Any:
        """Run, and show seconds and the most memory so far."""
        if not options.tiny:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        out = work()
        if not options.tiny:
            torch.cuda.synchronize()
            show(f"{name}, peak memory GB", torch.cuda.max_memory_allocated() / 1e9)
        show(f"{name}, s", time.perf_counter() - began)
        return out

    observation = example_observation(policy.spec, 1)
    target = np.zeros((1, 64, 3), np.float32)
    target[0, :, 0] = np.arange(1, 65) * 0.8
    sft = AlpamayoSftConfig(learning_rate=1e-5, warmup_steps=500, lr_multiplier={"vlm.model.visual": 0.1})
    trained = {name: p for name, p in model.named_parameters() if name.startswith("vlm.")}
    optimiser = torch.optim.AdamW(parameter_groups(trained, sft), lr=1e-5, fused=not options.tiny)

    def forward() -> float:
        batch = policy.labelled(observation, target, [{}], LAYOUTS["sft"])
        results["sft tokens"] = int(batch.input_ids.shape[1])
        with policy.recomputing():
            loss = model.language_loss(batch).total
            (loss / options.forwards).backward()
        return float(loss.detach())

    def sft_step() -> None:
        optimiser.zero_grad()
        losses = [forward() for _ in range(options.forwards)]
        torch.nn.utils.clip_grad_norm_(list(trained.values()), 1.0)
        optimiser.step()
        show("stage 1, loss", float(np.mean(losses)))

    for turn in range(options.repeats):
        timed(f"stage 1 step of {options.forwards} samples, {turn + 1}", sft_step)
    # Moments as in stage 1 are kept: memory is that of a run in its middle.
    group, sampling = options.group, Sampling("sample", 0.6, 0.98)
    repeated = {name: np.repeat(values, group, 0) for name, values in observation.items()}
    grpo = GrpoConfig(minibatch=group, micro_batch=group, credit="episode", clip_high=0.28, kl_stop=1e9)
    for turn in range(options.repeats):
        seeds = np.arange(group, dtype=np.uint64) + turn * group
        decisions = timed(f"GRPO: {group} completions, {turn + 1}", lambda s=seeds: policy.act(repeated, s, sampling))
        advantage = np.linspace(-1.5, 1.5, group).astype(np.float32)
        data = StepData(Observations(repeated), decisions, advantage, sampling)
        numbers = timed(
            f"GRPO: update on {group} completions, {turn + 1}", lambda d=data: optimise(policy, optimiser, d, grpo, 1)
        )
        show("GRPO: ratio_max", numbers.get("ratio_max", float("nan")))
        show("GRPO: steps_refused", numbers["steps_refused"])
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
