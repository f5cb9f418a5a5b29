"""What a tick of an Alpamayo-sized policy costs on one GPU, whole and by part. Random weights, made on the device.

    python benchmarks/vla.py [--rows 8] [--reasoning 32] [--repeats 5] [--eager] [--profile FILE] [--out FILE]
    python benchmarks/vla.py --learn [--rows 8] [--memory-gb 80] [--out FILE]

The backbone is Qwen3-VL-8B's; of the action expert only the total of 10 billion is published: 36 layers of 2,048 and
6,144 are assumed. 4 cameras × 4 frames of 320 × 576 px, prompts of about 3,000 tokens.
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

from alpagym_alpamayo_r1.architecture import _QWEN3_VL_8B, RELEASE_1_5, read_architecture
from alpagym_alpamayo_r1.config import Alpamayo15Config
from alpagym_alpamayo_r1.model import AlpamayoModel
from alpagym_alpamayo_r1.policy import AlpamayoPolicy
from alpagym_alpamayo_r1.processing import Processor, make_image_processor
from alpagym_alpamayo_r1.tiny import TinySize, make_config, make_tokenizer
from alpagym_alpamayo_r1.vocabulary import MARKERS_1_5
from alpagym_runtime.testing.examples import example_observation
from alpagym_runtime.types import Sampling

VOCABULARY = 155_697
EXPERT = {"hidden_size": 2048, "intermediate_size": 6144}


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


def learn(model: AlpamayoModel, processor: Processor, rows: int) -> dict[str, float]:
    """Act and learn in turns as experiment=alpamayo_1_5_clrl_test_run does; times, and memory beside its plan."""
    from alpagym_alpamayo_r1.memory import Use, memory_plan
    from alpagym_runtime.deploy_config import LoraSection
    from alpagym_runtime.trainers.lora import add_adapters

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
        print(f"{name:48} {value:10.3f}", flush=True)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--reasoning", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="also without the engine")
    parser.add_argument("--profile", type=Path, help="write each part's kernels there")
    parser.add_argument("--learn", action="store_true", help="act, and step on one decision at a time, by adapters")
    parser.add_argument("--memory-gb", type=float, default=0.0, help="take no more of the GPU's memory")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.memory_gb:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(options.memory_gb * 1e9 / whole, 1.0))
    model, processor = full_size()
    if options.learn:
        found = learn(model, processor, options.rows)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1))
        return
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": options.rows,
        "parameters_billion": round(sum(p.numel() for p in model.parameters()) / 1e9, 2),
    }

    def show(name: str, value: float) -> None:
        results[name] = round(value, 3)
        print(f"{name:48} {value:10.2f}", flush=True)

    print(results, flush=True)
    config = Alpamayo15Config(
        head="expert", reasoning_tokens=options.reasoning, rows=options.rows, engine="graph", context=3584
    )
    observation = example_observation(config.spec(), options.rows)
    names = [name for name in observation if name.endswith("_frame_id")]
    seeds, sampling = np.arange(options.rows, dtype=np.uint64), Sampling(temperature=0.6, top_p=0.98)
    ticks = iter(range(10**6))

    def next_tick(new_frames: int) -> dict[str, Any]:
        """The observation with the oldest frames gone and `new_frames` of each camera never seen before."""
        tick = next(ticks)
        frames = observation[names[0]].shape[1]
        ids = np.arange(frames) + tick * new_frames + 1
        cameras = np.arange(len(names) * options.rows).reshape(len(names), options.rows) + 1
        return observation | {
            name: (cameras[c][:, None] * 10**6 + ids).astype(np.uint64) for c, name in enumerate(names)
        }

    policies = [("engine", AlpamayoPolicy(config, model, processor, "cuda"))]
    if options.eager:
        plain = Alpamayo15Config(head="expert", reasoning_tokens=options.reasoning, rows=options.rows)
        policies.append(("eager", AlpamayoPolicy(plain, model, processor, "cuda")))
    for label, policy in policies:
        for new in (4, 1) if label == "engine" else (4,):
            wall = milliseconds(lambda p=policy, n=new: p.act(next_tick(n), seeds, sampling), options.repeats)
            show(f"{label}: tick, {4 * new} new pictures a row, ms", wall)
    policy = policies[0][1]
    engine = policy._engine
    with torch.no_grad():
        for new in (4, 1):
            share = busy_share(lambda p=policy, n=new: p.act(next_tick(n), seeds, sampling))
            show(f"engine: GPU busy, {4 * new} new pictures, %", 100.0 * share)
        _, batch = next(policy._forwards(observation, options.rows))
        show("prompt, tokens", batch.input_ids.shape[1])
        show(
            "vision, 16 pictures a row, ms",
            milliseconds(lambda: engine.see(batch.pixel_values, batch.image_grid_thw), 3),
        )
        quarter = len(batch.image_grid_thw) // 4
        few = batch.pixel_values[: len(batch.pixel_values) // 4]
        show("vision, 4 pictures a row, ms", milliseconds(lambda: engine.see(few, batch.image_grid_thw[:quarter]), 3))
        features = engine.see(batch.pixel_values, batch.image_grid_thw)
        show("prefill, ms", milliseconds(lambda: engine.read(batch, features), 3))
        prefix = engine.read(batch, features)
        engine.write(prefix, lambda logits, step: logits.argmax(-1), 2)
        show("decode step, ms", milliseconds(engine._decode, 20))
        velocity = engine.velocity(prefix)
        noise, clock = torch.randn(options.rows, 64, 2, device="cuda"), torch.zeros(options.rows, device="cuda")
        show("expert step, ms", milliseconds(lambda: velocity(noise, clock), 20))
        if options.profile:
            parts: dict[str, Callable[[], Any]] = {
                "vision, 16 pictures": lambda: engine.see(batch.pixel_values, batch.image_grid_thw),
                "prefill": lambda: engine.read(batch, features),
                "decode step": engine._decode,
                "expert step": lambda: velocity(noise, clock),
            }
            options.profile.write_text("\n\n".join(f"{name}\n{kernels(part)}" for name, part in parts.items()))
            velocity = engine.velocity(prefix)  # `read` and `_decode` went over its cache
        ids = torch.zeros(options.rows, options.reasoning + 1, dtype=torch.long, device="cuda")
        show("reading the reasoning again, ms", milliseconds(lambda: model.extend(prefix, ids, ids == 0), 5))
        # The engine against the plain model: largest difference of logits in bfloat16.
        logits: list[torch.Tensor] = []
        plain_logits: list[torch.Tensor] = []
        forced = torch.randint(0, 4000, (8, options.rows), device="cuda")
        engine.write(prefix, lambda x, step: (logits.append(x.clone()), forced[step])[1], 8)
        model.write(prefix, lambda x, step: (plain_logits.append(x.clone()), forced[step])[1], 8)
        worst = max(float((a - b).abs().max()) for a, b in zip(logits, plain_logits, strict=True))
        show("largest difference of logits to the plain model", worst)
        show("spread of logits", float(logits[-1].std()))
        difference = velocity_difference(model, engine, prefix, noise, clock)
        show("largest difference of velocities", difference)
    tokens = Alpamayo15Config(head="tokens", rows=options.rows, engine="graph", context=3584)
    show("peak memory, GB", torch.cuda.max_memory_allocated() / 1e9)
    by_tokens = AlpamayoPolicy(tokens, model, processor, "cuda")
    wall = milliseconds(lambda: by_tokens.act(next_tick(1), seeds, sampling), 3)
    show("head tokens: tick, 4 new pictures a row, ms", wall)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


def velocity_difference(
    model: AlpamayoModel, engine: Any, prefix: Any, noise: torch.Tensor, clock: torch.Tensor
) -> float:
    """Largest difference between the engine's velocities and the plain model's."""
    return float((engine.velocity(prefix)(noise, clock) - model.velocity(prefix)(noise, clock).float()).abs().max())


if __name__ == "__main__":
    main()
