"""The tiny model learns, writes and denoises; both layouts, both stages of SFT."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from alpagym_alpamayo_r1 import compat
from alpagym_alpamayo_r1.action_expert import FourierFeatures, euler, flow_loss, training_times
from alpagym_alpamayo_r1.architecture import BACKBONES, LAYOUTS, read_architecture
from alpagym_alpamayo_r1.checkpoints import expected_shapes
from alpagym_alpamayo_r1.prompt import LAYOUTS as PROMPTS
from alpagym_alpamayo_r1.sampling import complete, log_distribution
from alpagym_alpamayo_r1.targets import TARGETS
from alpagym_alpamayo_r1.tiny import TinySize, make_config, make_tiny
from alpagym_alpamayo_r1.tiny import example_drive as drive
from alpagym_plugins import ConfigError
from alpagym_runtime.types import Sampling

SMALL = TinySize(future_bins=300, history_bins=100)


def generated(tiny, *speeds):
    return tiny[1].encode([drive(speed) for speed in speeds], PROMPTS["sft"], generate=True)


@pytest.mark.parametrize("version", ["1", "1.5"])
def test_first_stage_lowers_the_loss(version):
    model, processor = make_tiny(SMALL, LAYOUTS[version])
    batch = processor.encode(
        [drive(8.0, cot="Keep the present speed because the lane ahead is clear."), drive(12.0, cot="Slow down.")],
        PROMPTS["sft_cot"],
        generate=False,
    )
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        loss = model.language_loss(batch).total
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    # Two means of cross-entropy at random weights: 2 ln V.
    assert losses[0] == pytest.approx(2 * math.log(len(processor.tokenizer)), rel=0.05)
    assert losses[-1] < 0.6 * losses[0]


def test_second_stage_trains_the_expert_only(tiny):
    model, processor = make_tiny(SMALL)
    batch = processor.encode([drive(8.0), drive(3.0)], PROMPTS["sft"], generate=False)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, 64, 2, generator=generator)
    time = training_times(torch.rand(2, generator=generator))
    optimiser = torch.optim.AdamW([p for n, p in model.named_parameters() if not n.startswith("vlm.")], lr=3e-3)
    losses = []
    for _ in range(12):
        loss = model.expert_loss(batch, noise, time).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert all(p.grad is None for p in model.vlm.parameters())
    model.expert_loss(batch, noise, time, train_backbone=True).mean().backward()
    assert any(p.grad is not None and bool(p.grad.any()) for p in model.vlm.parameters())


def test_writing_agrees_with_transformers_generate(tiny):
    model, _ = tiny
    batch = generated(tiny, 8.0, 12.0)
    with torch.no_grad():
        written = model.write(model.read(batch), lambda logits, _: logits.argmax(-1), 40)
        theirs = model.vlm.generate(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            pixel_values=batch.pixel_values,
            image_grid_thw=batch.image_grid_thw,
            max_new_tokens=40,
            min_new_tokens=40,
            do_sample=False,
            pad_token_id=0,
            **compat.token_types(batch.input_ids, model.vlm.config.image_token_id),
        )[:, batch.input_ids.shape[1] :]
    assert torch.equal(written, theirs)


def test_writing_agrees_with_reading(tiny):
    model, _ = tiny
    batch = generated(tiny, 8.0)
    logits = []

    def choose(values, _):
        logits.append(values)
        return values.argmax(-1)

    with torch.no_grad():
        written = model.write(model.read(batch), choose, 20)
        ids = torch.cat([batch.input_ids, written], 1)
        whole = model(replace(batch, input_ids=ids, attention_mask=torch.ones_like(ids)))
    np.testing.assert_allclose(torch.stack(logits, 1), whole[:, -21:-1], atol=1e-5)


def test_writing_stops_at_a_token(tiny):
    model, _ = tiny
    batch = generated(tiny, 8.0, 12.0)
    script = torch.tensor([[1, 2, 9, 3, 9], [1, 9, 4, 5, 9]])
    with torch.no_grad():
        written = model.write(model.read(batch), lambda _, step: script[:, step], 5, stop_id=9)
    assert written.tolist() == [[1, 2, 9], [1, 9, 9]]


def test_top_p_keeps_the_smallest_set_that_holds_it():
    # 0.5, 0.3, 0.2 at top-p 0.6: the first two, renormalised to 5/8 and 3/8.
    logits = torch.tensor([0.2, 0.5, 0.3]).log()
    kept = log_distribution(logits, Sampling(top_p=0.6), None).exp()
    np.testing.assert_allclose(kept, [0, 0.625, 0.375], atol=1e-6)
    # A token that was chosen stays in, whatever the last bits say: 0.2, 0.5, 0.3 again.
    forced = log_distribution(logits, Sampling(top_p=0.6), torch.tensor(0)).exp()
    np.testing.assert_allclose(forced, [0.2, 0.5, 0.3], atol=1e-6)
    # Temperature 0.5 squares: 0.25, 0.09, 0.04 over 0.38.
    np.testing.assert_allclose(
        log_distribution(logits, Sampling(temperature=0.5), None).exp(), [0.04 / 0.38, 0.25 / 0.38, 0.09 / 0.38],
        atol=1e-6,
    )  # fmt: skip


def test_completions_follow_their_seeds(tiny):
    model, processor = tiny
    batch = processor.encode([drive(8.0)] * 3, PROMPTS["rl_1_5"], generate=True)
    stop = processor.id_of("traj_future_end")
    with torch.no_grad():
        prefix = model.read(batch)
    sampling = Sampling(temperature=0.6, top_p=0.98)
    seeds = np.array([1, 2, 1], np.uint64)
    one = complete(model, prefix, seeds, sampling, steps=12, stop_id=stop)
    assert torch.equal(one.ids[0], one.ids[2])
    assert not torch.equal(one.ids[0], one.ids[1])
    assert (one.log_prob <= 0).all()
    text = complete(model, prefix, np.arange(3, dtype=np.uint64), sampling, steps=48, stop_id=stop, text_only=True)
    assert not torch.isin(text.ids, torch.tensor(model.architecture.not_text)).any()
    assert {processor.id_of(name) for name in ("image_pad", "vision_start")} < set(model.architecture.not_text)


def test_a_prefix_ends_at_the_last_marker_whatever_follows(tiny):
    model, processor = tiny
    samples = [drive(8.0, cot="Stop."), drive(9.0, cot="Go on. " * 5)]
    closed = processor.encode(samples, PROMPTS["sft_cot"], generate=False)
    noise, time = torch.randn(1, 64, 2, generator=torch.Generator().manual_seed(1)), torch.zeros(2)
    with torch.no_grad():
        # One step only: random weights behind Fourier features of 100 Hz make 1e-7 into 0.2 within ten Euler steps.
        both = model.velocity(model.read_up_to(closed, model.architecture.marker_ids["future_start"]))
        together = both(noise.expand(2, -1, -1), time)
        for row, sample in enumerate(samples):
            alone = processor.encode([sample], PROMPTS["sft_cot"], generate=True)
            np.testing.assert_allclose(model.velocity(model.read(alone))(noise, time[:1])[0], together[row], atol=1e-5)


def test_actions_see_each_other_and_the_prefix(tiny):
    model, _ = tiny
    noise = torch.randn(1, 64, 2, generator=torch.Generator().manual_seed(2))
    other = noise.clone()
    other[:, -1] += 1.0
    time = torch.zeros(1)
    with torch.no_grad():
        prefix = model.read(generated(tiny, 8.0))
        velocity = model.velocity(prefix)
        length = prefix.cache.get_seq_length()
        change = (velocity(noise, time) - velocity(other, time)).abs()
        assert change[0, 0].max() > 0  # not causal: the first sees the last
        assert prefix.cache.get_seq_length() == length  # nothing is left behind
        elsewhere = model.velocity(model.read(generated(tiny, 20.0)))
        assert (velocity(noise, time) - elsewhere(noise, time)).abs().max() > 0


def test_euler_follows_a_straight_flow_exactly():
    goal, noise = torch.full((1, 2, 2), 3.0), torch.zeros(1, 2, 2)
    np.testing.assert_allclose(euler(lambda x, t: goal - noise, noise, 10), goal, rtol=1e-6)
    # The velocity of the straight path has no loss, wherever on it.
    assert flow_loss(lambda x, t: goal - noise, goal, noise, torch.tensor([0.3])).item() == 0


def test_training_times_are_mostly_early():
    # t = 0.999 (1 - Beta(1.5, 1)); the mean of Beta(1.5, 1) is 0.6.
    time = training_times((torch.arange(10_000) + 0.5) / 10_000)
    assert time.mean() == pytest.approx(0.999 * 0.4, abs=1e-3)
    assert time.min() >= 0
    assert time.max() < 0.999


def test_fourier_features():
    # f = 1, 10, 100 of x = 1/8: angles 45°, 450° = 90°, 4500° = 180°.
    features = FourierFeatures(6, 100.0, rounded=False)(torch.tensor(0.125))
    r = math.sqrt(2)
    np.testing.assert_allclose(features, [1, r, 0, 1, 0, -r], atol=1e-4)


def test_released_shapes():
    """The released 1.5 by its published config, without allocating it: names, sizes, and ten billion weights."""
    config = make_config(make_tiny(SMALL)[1].tokenizer, SMALL)
    del config["vlm_config"]
    config |= {"vlm_name_or_path": "nvidia/Cosmos-Reason2-8B", "vocab_size": 155_697, "model_dtype": "bfloat16"}
    config |= {"traj_vocab_size": 4000, "traj_token_start_idx": 151_669}
    config["expert_cfg"] = {"hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": 8192}
    config["action_in_proj_cfg"] |= {"hidden_size": 512, "num_enc_layers": 4}
    shapes = expected_shapes(read_architecture(config), with_expert=True)
    assert shapes["vlm.model.language_model.embed_tokens.weight"] == (155_697, 4096)
    assert shapes["expert.layers.35.self_attn.k_proj.weight"] == (1024, 2048)
    assert shapes["action_in_proj.encoder.trunk.0.weight"] == (512, 60)
    assert "expert.embed_tokens.weight" not in shapes
    total = sum(math.prod(shape) for shape in shapes.values())
    assert 10.5e9 < total < 11.5e9


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"model_type": "alpamayo_r2"}, "model_type"),
        ({"vlm_config": None, "vlm_name_or_path": "nvidia/Other"}, "vlm_name_or_path"),
        ({"traj_vocab_size": 350}, "traj_vocab_size"),
        ({"traj_token_ids": {"history": 1}}, "traj_token_ids"),
        ({"tokens_per_future_traj": 100}, "tokens_per_future_traj"),
        ({"tokens_per_history_traj": 47}, "tokens_per_history_traj"),
        ({"expert_cfg": None}, "expert_cfg"),
        ({"model_dtype": "int4"}, "model_dtype"),
        ({"diffusion_cfg": {"int_method": "heun"}}, "diffusion_cfg.int_method"),
        ({"diffusion_cfg": {"_target_": "torch.nn.Linear"}}, "diffusion_cfg._target_"),
        ({"extra": [{"_target_": "subprocess.run"}]}, "extra[0]._target_"),
        ({"model_hook": {"_target_": "torch.nn.Linear"}}, "model_hook._target_"),
    ],
)
def test_configs_are_refused_by_key(tiny, change, key):
    with pytest.raises(ConfigError) as caught:
        read_architecture(tiny[0].architecture.raw | change)
    assert caught.value.key == key


def test_known_targets_cover_both_families():
    families = {path.partition(".")[0] for path in TARGETS}
    assert {"alpamayo_r1", "alpamayo1_5"} <= families
    assert {"nvidia/Cosmos-Reason2-8B", "Qwen/Qwen3-VL-8B-Instruct"} == set(BACKBONES)
