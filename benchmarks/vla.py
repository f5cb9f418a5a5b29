"""What a tick of an Alpamayo-sized policy costs on one GPU, whole and by part. Random weights, made on the device.

    python benchmarks/vla.py [--rows 8] [--reasoning 32] [--repeats 5] [--eager] [--products library tuned]
        [--profile FILE] [--out FILE]
    python benchmarks/vla.py --adapters [--rows 8] [--out FILE]
    python benchmarks/vla.py --learn [--rows 8] [--memory-gb 80] [--out FILE]

The engine is measured with the library's products and then with tuned ones, whose tuning takes minutes; each figure is
printed, and kept in `--out`, as soon as it is there. The backbone is Qwen3-VL-8B's; of the action expert only the total
of 10 billion is published: 36 layers of 2,048 and 6,144 are assumed. 4 cameras × 4 frames of 320 × 576 px, prompts of
about 3,000 tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alpagym_alpamayo_r1 import engine as engine_module
from alpagym_alpamayo_r1.architecture import _QWEN3_VL_8B, RELEASE_1_5, read_architecture
from alpagym_alpamayo_r1.config import Alpamayo15Config
from alpagym_alpamayo_r1.engine import GraphEngine
from alpagym_alpamayo_r1.memory import Use, memory_plan
from alpagym_alpamayo_r1.model import AlpamayoModel, Prefix
from alpagym_alpamayo_r1.policy import AlpamayoPolicy
from alpagym_alpamayo_r1.processing import Processor, make_image_processor
from alpagym_alpamayo_r1.tiny import TinySize, make_config, make_tokenizer
from alpagym_alpamayo_r1.vocabulary import MARKERS_1_5
from alpagym_runtime.deploy_config import LoraSection
from alpagym_runtime.files import write_json
from alpagym_runtime.testing.examples import example_observation
from alpagym_runtime.trainers import lora
from alpagym_runtime.trainers.lora import add_adapters
from alpagym_runtime.types import Sampling

VOCABULARY = 155_697
EXPERT = {"hidden_size": 2048, "intermediate_size": 6144}
Show = Callable[[str, float], None]
"""Prints and keeps a figure."""


def full_size() -> tuple[AlpamayoModel, Processor]:
    """The model with random bfloat16 weights, on the GPU."""
    tokenizer = make_tokenizer(MARKERS_1_5, 4000)
    config = make_config(tokenizer, TinySize(), RELEASE_1_5)
    words = {k: v for k, v in config["vlm_config"].items() if k.endswith("_token_id")}
    config["vlm_config"] = _QWEN3_VL_8B | words
    config |= {"vocab_size": VOCABULARY, "expert_cfg": EXPERT, "model_dtype": "bfloat16"}
    config |= {"min_pixels": 163_840, "max_pixels": 196_608}
    architecture = read_architecture(config)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = AlpamayoModel(architecture).eval()
    torch.set_default_dtype(torch.float32)
    return model, Processor(tokenizer, make_image_processor(architecture), architecture)


def milliseconds(function: Callable[[], Any], repeats: int) -> float:
    """Median time of a call, the GPU's work included."""
    function()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return float(np.median(times))


def busy_share(function: Callable[[], Any]) -> float:
    """Share of a call's time in which the GPU computes or copies."""
    from torch.profiler import ProfilerActivity, profile

    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        wall_us = (time.perf_counter() - start) * 1e6
    busy_us = sum(event.self_device_time_total for event in recorded.key_averages() if not event.is_user_annotation)
    return float(busy_us / wall_us)


def kernels(function: Callable[[], Any], most: int = 12) -> str:
    """The kernels that take most of a call's GPU time: ms, share, launches, name."""
    from torch.profiler import ProfilerActivity, profile

    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        function()
        torch.cuda.synchronize()
    events = [event for event in recorded.key_averages() if not event.is_user_annotation]
    events.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events) or 1.0
    rows = [
        f"{event.self_device_time_total / 1e3:9.3f} {100.0 * event.self_device_time_total / total:5.1f} % "
        f"{event.count:6d}  {event.key[:90]}"
        for event in events[:most]
    ]
    return "\n".join([f"{total / 1e3:9.3f} ms of kernels", *rows])


def learn(model: AlpamayoModel, processor: Processor, rows: int, show: Show) -> None:
    """Act and learn in turns as experiment=alpamayo_1_5_clrl_test_run does; times, and memory beside its plan."""
    config = Alpamayo15Config(head="tokens", rows=rows, engine="graph", context=3584, decided_s=2.0)
    policy = AlpamayoPolicy(config, model, processor, "cuda")
    add_adapters(policy.module, LoraSection(rank=16, alpha=32.0, targets=["vlm.model.language_model.*"]), seed=1)
    trained = [p for p in policy.module.parameters() if p.requires_grad]
    optimiser = torch.optim.Adam(trained, lr=1e-4)
    observation = example_observation(config.spec(), rows)
    seeds, sampling = np.arange(rows, dtype=np.uint64), Sampling(temperature=0.6, top_p=0.98)
    pictures = 2 * rows * len(config.cameras) * config.frames
    use = Use(rows, config.context, pictures, config.height * config.width // 32**2, static_cache=True,
              trained=sum(p.numel() for p in trained))  # fmt: skip
    found = {f"plan, {name}, GB": size / 1e9 for name, size in memory_plan(model.architecture, use).items()}
    one = {name: values[:1] for name, values in observation.items()}

    def step(decision: Any) -> float:
        score = policy.score(one, decision.take(np.arange(1)), sampling)
        (-score.log_prob.sum()).backward()
        optimiser.step()
        optimiser.zero_grad()
        return float(score.log_prob.detach().sum())

    before = policy.act(observation, seeds, sampling)
    found["peak of acting, GB"] = torch.cuda.max_memory_allocated() / 1e9
    first = step(before)
    ratio = first - float(before.log_prob[0].sum())
    found["peak of acting and learning, GB"] = torch.cuda.max_memory_allocated() / 1e9
    found["reserved, GB"] = torch.cuda.max_memory_reserved() / 1e9
    found["log ratio before a step"] = ratio
    found["a decision learned from, ms"] = milliseconds(lambda: step(before), 5)
    found["log-probability gained by 7 steps"] = step(before) - first
    after = policy.act(observation, seeds, sampling)  # graphs read the adapters that were stepped
    found["tokens that changed, %"] = 100.0 * float((after.trace["tokens"] != before.trace["tokens"]).mean())
    found["log ratio after the steps"] = step(after) - float(after.log_prob[0].sum())
    found["tick, head tokens, 40 of a plan, ms"] = milliseconds(lambda: policy.act(observation, seeds, sampling), 3)
    for name, value in found.items():
        show(name, value)


class Ticks:
    """Ticks of `rows` sessions, whose pictures are known by their frames' names."""

    def __init__(self, config: Alpamayo15Config) -> None:
        self.observation = example_observation(config.spec(), config.rows)
        self.seeds, self.sampling = np.arange(config.rows, dtype=np.uint64), Sampling(temperature=0.6, top_p=0.98)
        self._tick = 0

    def act(self, policy: AlpamayoPolicy, new_frames: int) -> None:
        """Decide on the observation without its oldest frames, and with `new_frames` of each camera never seen."""
        self._tick += 1
        names = [name for name in self.observation if name.endswith("_frame_id")]
        rows, frames = self.observation[names[0]].shape
        ids = np.arange(frames) + self._tick * new_frames + 1
        cameras = np.arange(len(names) * rows).reshape(len(names), rows, 1) + 1
        shown = {name: (camera * 10**6 + ids).astype(np.uint64) for name, camera in zip(names, cameras, strict=True)}
        policy.act(self.observation | shown, self.seeds, self.sampling)


def measure(policy: AlpamayoPolicy, ticks: Ticks, reasoning: int, repeats: int, show: Show) -> str:
    """Ticks of the engine, their parts and what is left; the parts' kernels."""
    engine, model, rows = policy._engine, policy._model, len(ticks.seeds)
    assert engine is not None
    whole = {new: milliseconds(lambda n=new: ticks.act(policy, n), repeats) for new in (4, 1)}
    for new, wall in whole.items():
        show(f"tick, {4 * new} new pictures a row, ms", wall)
    _, batch = next(policy._forwards(ticks.observation, rows))
    assert batch.pixel_values is not None
    assert batch.image_grid_thw is not None
    show("prompt, tokens", batch.input_ids.shape[1])
    values, grid = batch.pixel_values, batch.image_grid_thw
    vision = {
        new: milliseconds(lambda k=4 // new: engine.see(values[: len(values) // k], grid[: len(grid) // k]), 3)
        for new in whole
    }
    for new, wall in vision.items():
        show(f"vision, {4 * new} pictures a row, ms", wall)
    features = engine.see(values, grid)
    prefill = milliseconds(lambda: engine.read(batch, features), 3)
    show("prefill, ms", prefill)
    prefix = engine.read(batch, features)
    engine.write(prefix, lambda logits, step: logits.argmax(-1), 2)
    decode = milliseconds(engine._decode, 20)
    show("decode step, ms", decode)
    ids = torch.zeros(rows, reasoning + 1, dtype=torch.long, device="cuda")
    again = milliseconds(lambda: model.extend(prefix, ids, ids == 0), 5)
    show("reading the reasoning again, ms", again)
    velocity = engine.velocity(prefix)
    noise, clock = torch.randn(rows, 64, 2, device="cuda"), torch.zeros(rows, device="cuda")
    denoise = milliseconds(lambda: velocity(noise, clock), 20)
    show("expert step, ms", denoise)
    # The first token comes with the prompt.
    computed = prefill + (reasoning - 1) * decode + again + model.denoising_steps * denoise
    for new, wall in whole.items():
        rest = wall - computed - vision[new]
        show(f"rest of a tick, {4 * new} new pictures, ms", rest)
        show(f"rest of a tick, {4 * new} new pictures, %", 100.0 * rest / wall)
        idle = 1.0 - busy_share(lambda n=new: ticks.act(policy, n))
        show(f"GPU idle, {4 * new} new pictures, %", 100.0 * idle)
    prefix = engine.read(batch, features)
    velocity = engine.velocity(prefix)
    parts: dict[str, Callable[[], Any]] = {
        "expert step": lambda: velocity(noise, clock),
        "vision, 16 pictures": lambda: engine.see(values, grid),
        "prefill": lambda: engine.read(batch, features),
        "decode step": engine._decode,
    }
    spent = "\n\n".join(f"{name}\n{kernels(part)}" for name, part in parts.items())
    # The engine against the plain model, in bfloat16.
    prefix = engine.read(batch, features)
    forced = torch.randint(0, 4000, (8, rows), device="cuda")
    got, expected = logits_of(engine, prefix, forced), logits_of(model, prefix, forced)
    show("largest difference of logits to the plain model", float((got - expected).abs().max()))
    show("spread of logits", float(expected[-1].std()))
    difference = engine.velocity(prefix)(noise, clock) - model.velocity(prefix)(noise, clock).float()
    show("largest difference of velocities", float(difference.abs().max()))
    return spent


def logits_of(writer: GraphEngine | AlpamayoModel, prefix: Prefix, forced: torch.Tensor) -> torch.Tensor:
    """Logits [S,B,V] before each of the tokens [S,B] that are written."""
    seen: list[torch.Tensor] = []

    def choose(logits: torch.Tensor, step: int) -> torch.Tensor:
        seen.append(logits.clone())
        return forced[step]

    writer.write(prefix, choose, len(forced))
    return torch.stack(seen)


def drive(model: AlpamayoModel, processor: Processor, options: argparse.Namespace, show: Show) -> None:
    """Ticks and their parts, with the library's products and then with tuned ones."""
    config = Alpamayo15Config(head="expert", reasoning_tokens=options.reasoning, rows=options.rows, context=3584)
    ticks = Ticks(config)
    if options.eager:
        eager = AlpamayoPolicy(config, model, processor, "cuda")
        wall = milliseconds(lambda: ticks.act(eager, 4), options.repeats)
        show("eager: tick, 16 new pictures a row, ms", wall)
    kinds, kernels_of = {"library": {}, "tuned": engine_module.TUNED}, []
    for label in options.products:
        engine_module.TUNED = kinds[label]
        own = partial(_show_with, show, label)
        policy = AlpamayoPolicy(replace(config, engine="graph"), model, processor, "cuda")
        with torch.no_grad():
            spent = measure(policy, ticks, options.reasoning, options.repeats, own)
        kernels_of.append(f"== {label}\n\n{spent}\n")
        if options.profile:
            options.profile.write_text("\n".join(kernels_of))
        by_tokens = replace(config, head="tokens", reasoning_tokens=0, engine="graph")
        policy = AlpamayoPolicy(by_tokens, model, processor, "cuda")
        own("head tokens: tick, 4 new pictures a row, ms", milliseconds(lambda p=policy: ticks.act(p, 1), 3))
    show("peak memory, GB", torch.cuda.max_memory_allocated() / 1e9)


def _show_with(show: Show, label: str, name: str, value: float) -> None:
    show(f"{label}: {name}", value)


def adapters(model: AlpamayoModel, processor: Processor, rows: int, show: Show) -> None:
    """Swap adapters of rank 16 below captured graphs; logits beside those of weights into which they are multiplied."""
    config = Alpamayo15Config(head="tokens", rows=rows, engine="graph", context=3584)
    engine_module.TUNED = {}  # tuning the thin products as well takes minutes
    policy = AlpamayoPolicy(config, model, processor, "cuda")
    engine = policy._engine
    assert engine is not None
    add_adapters(policy.module, LoraSection(rank=16, alpha=32.0, targets=["vlm.model.language_model.*"]), seed=1)
    sets = []
    for seed in (1, 2):
        dice = torch.Generator("cuda").manual_seed(seed)
        # About 4 % of what the weights themselves give.
        own = {name: torch.empty_like(value).normal_(std=0.01, generator=dice) if name.endswith("lora_up") else value
               for name, value in lora.adapters(policy.module).items()}  # fmt: skip
        sets.append(own)
    with torch.no_grad():
        _, batch = next(policy._forwards(example_observation(config.spec(), rows), rows))
        forced = torch.randint(0, 4000, (8, rows), device="cuda")

        def logits() -> torch.Tensor:
            return logits_of(engine, engine.read(batch), forced)

        lora.restore_adapters(policy.module, sets[0])
        first = logits()  # captures
        show("adapters: decode step, ms", milliseconds(engine._decode, 20))
        show("adapters: swap, ms", milliseconds(lambda: lora.restore_adapters(policy.module, sets[1]), 5))
        second = logits()
        show("adapters: largest change of a logit by the swap", float((second - first).abs().max()))
        whole = lora.merged(policy.module)
        show("adapters: multiply into the weights, ms", milliseconds(lambda: lora.merged(policy.module), 1))
        policy.module.load_state_dict(whole | {n: torch.zeros_like(v) for n, v in sets[1].items()})
        multiplied = logits()
        show("adapters: largest difference to multiplied weights", float((second - multiplied).abs().max()))
        show("adapters: mean difference to multiplied weights", float((second - multiplied).abs().mean()))
        show("adapters: spread of logits", float(second.std()))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--reasoning", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="also without the engine")
    parser.add_argument("--products", nargs="+", default=["library", "tuned"], choices=("library", "tuned"))
    parser.add_argument("--profile", type=Path, help="write each part's kernels there")
    parser.add_argument("--adapters", action="store_true", help="swap adapters below captured graphs")
    parser.add_argument("--learn", action="store_true", help="act, and step on one decision at a time, by adapters")
    parser.add_argument("--memory-gb", type=float, default=0.0, help="take no more of the GPU's memory")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.memory_gb:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(options.memory_gb * 1e9 / whole, 1.0))
    model, processor = full_size()
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": options.rows,
        "parameters_billion": round(sum(p.numel() for p in model.parameters()) / 1e9, 2),
    }

    def show(name: str, value: float) -> None:
        results[name] = round(value, 3)
        print(f"{name:56} {value:10.3f}", flush=True)
        if options.out:
            write_json(options.out, results)

    print(results, flush=True)
    if options.learn:
        learn(model, processor, options.rows, show)
    elif options.adapters:
        adapters(model, processor, options.rows, show)
    else:
        drive(model, processor, options, show)


if __name__ == "__main__":
    main()
