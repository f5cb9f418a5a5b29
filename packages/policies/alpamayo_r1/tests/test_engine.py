"""The engine writes and denoises what the model does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from alpagym_alpamayo_r1.config import AlpamayoTinyConfig
from alpagym_alpamayo_r1.engine import GraphEngine
from alpagym_alpamayo_r1.processing import Patches
from alpagym_alpamayo_r1.prompt import LAYOUTS
from alpagym_alpamayo_r1.tiny import example_drive, make_tiny
from alpagym_alpamayo_r1.vision_cache import VisionCache
from alpagym_plugins import ConfigError
from alpagym_runtime.deploy_config import LoraSection
from alpagym_runtime.testing.examples import example_observation
from alpagym_runtime.trainers.lora import adapters, add_adapters, merged, restore_adapters
from alpagym_runtime.types import Sampling


@pytest.fixture(scope="module")
def prompts():
    model, processor = make_tiny(seed=3)
    # Texts of unequal length: the rows are padded.
    samples = [example_drive(8.0, 1, cameras=(1,), frames=2), example_drive(12.0, 2, cameras=(1, 3), frames=2)]
    return model, processor.encode(samples, LAYOUTS["rl_1_5"], generate=True)


def greedy(logits, step):
    return logits.argmax(-1)


def test_reading_gives_the_models_logits(prompts):
    model, batch = prompts
    with torch.no_grad():
        expected, got = model.read(batch), GraphEngine(model, 2, 400).read(batch)
    np.testing.assert_allclose(got.logits, expected.logits, atol=1e-5)
    assert torch.equal(got.next_position, expected.next_position)


def test_features_of_pictures_can_come_from_elsewhere(prompts):
    model, batch = prompts
    engine = GraphEngine(model, 2, 400)
    with torch.no_grad():
        features = engine.see(batch.pixel_values, batch.image_grid_thw)
        assert torch.equal(engine.read(batch, features).logits, engine.read(batch).logits)
        with pytest.raises(ValueError, match="features"):
            engine.read(batch, (features[0][1:], features[1]))


def test_writing_gives_the_models_tokens(prompts):
    model, batch = prompts
    seen = {"model": [], "engine": []}

    def choose(name):
        def pick(logits, step):
            seen[name].append(logits)
            return logits.argmax(-1)

        return pick

    with torch.no_grad():
        prefix, engine = model.read(batch), GraphEngine(model, 2, 400)
        expected = model.write(prefix, choose("model"), 12)
        assert torch.equal(engine.write(prefix, choose("engine"), 12), expected)
        # Again from the same prefix: nothing of the first writing is left.
        assert torch.equal(engine.write(prefix, greedy, 12), expected)
    for a, b in zip(seen["model"], seen["engine"], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_rows_end_at_the_same_token(prompts):
    # One row ends with its second token, the other with its fourth; the engine looks at every eighth step.
    model, batch = prompts
    with torch.no_grad():
        prefix, engine = model.read(batch), GraphEngine(model, 2, 400)
        free = model.write(prefix, greedy, 12)
        script = free.clone()
        script[0, 1] = script[1, 3] = stop = int(free.max()) + 1

        def choose(logits, step):
            return script[:, step]

        expected, got = (who.write(prefix, choose, 12, stop) for who in (model, engine))
    assert expected.shape == (2, 4)
    assert got.shape == (2, 8)
    assert torch.equal(got[:, :4], expected)
    assert (got[:, 4:] == stop).all()


def test_denoising_gives_the_models_velocity(prompts):
    model, batch = prompts
    noise = torch.randn(2, 64, 2, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        prefix, engine = model.read(batch), GraphEngine(model, 2, 400)
        engine.write(prefix, greedy, 5)
        got = engine.velocity(prefix)
        for time in (torch.zeros(2), torch.full((2,), 0.5)):
            np.testing.assert_allclose(got(noise, time), model.velocity(prefix)(noise, time), atol=1e-4)
        other = model.read(batch)
        engine.velocity(other)
        with pytest.raises(RuntimeError, match="another prompt"):
            got(noise, torch.zeros(2))


def test_the_engine_reads_weights_that_are_loaded_later(prompts):
    _, batch = prompts
    model, _ = make_tiny(seed=3)
    engine = GraphEngine(model, 2, 400)
    other, _ = make_tiny(seed=4)
    model.load_state_dict(other.state_dict())
    with torch.no_grad():
        prefix = other.read(batch)
        assert torch.equal(engine.write(prefix, greedy, 8), other.write(prefix, greedy, 8))


def test_the_engine_reads_adapters_that_are_added_later(prompts):
    _, batch = prompts
    model, _ = make_tiny(seed=3)
    engine, before = GraphEngine(model, 2, 400), {}
    add_adapters(model, LoraSection(rank=2, alpha=4.0, targets=["*"]), seed=1)
    noise, time = torch.randn(2, 64, 2, generator=torch.Generator().manual_seed(1)), torch.zeros(2)
    with torch.no_grad():
        prefix = model.read(batch)
        before = {"tokens": engine.write(prefix, greedy, 8), "velocity": engine.velocity(prefix)(noise, time)}
        for name, parameter in model.named_parameters():
            if name.endswith("lora_up"):
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
        prefix = model.read(batch)
        assert torch.equal(engine.write(prefix, greedy, 8), model.write(prefix, greedy, 8))
        velocity = engine.velocity(prefix)(noise, time)
        np.testing.assert_allclose(velocity, model.velocity(prefix)(noise, time), atol=1e-4)
    assert not torch.equal(engine.write(prefix, greedy, 8), before["tokens"])
    assert (velocity - before["velocity"]).abs().max() > 0.01


def test_swapped_adapters_do_what_weights_with_them_multiplied_in_do(prompts):
    _, batch = prompts
    model, _ = make_tiny(seed=3)
    engine = GraphEngine(model, 2, 400)
    add_adapters(model, LoraSection(rank=2, alpha=4.0, targets=["*"]), seed=1)
    noise, time = torch.randn(2, 64, 2, generator=torch.Generator().manual_seed(1)), torch.zeros(2)
    dice = torch.Generator().manual_seed(2)
    swapped = {name: torch.randn(value.shape, generator=dice) * 0.2 for name, value in adapters(model).items()}

    def numbers():
        prefix = engine.read(batch)
        return prefix.logits, engine.velocity(prefix)(noise, time)

    with torch.no_grad():
        before = numbers()
        restore_adapters(model, swapped)
        got = numbers()
        model.load_state_dict(merged(model) | {name: torch.zeros_like(value) for name, value in swapped.items()})
        expected = numbers()
    for a, b, c in zip(before, got, expected, strict=True):
        assert (b - a).abs().max() > 0.01
        np.testing.assert_allclose(b, c, atol=1e-4)


def test_too_small_a_context_is_refused(prompts):
    model, batch = prompts
    length = batch.input_ids.shape[1]
    engine = GraphEngine(model, 2, length + 3)
    with torch.no_grad():
        prefix = model.read(batch)
        engine.write(prefix, greedy, 4)
        with pytest.raises(ConfigError, match=rf"the prompt has {length} and up to 5"):
            engine.write(prefix, greedy, 5)


class Tower:
    """Stands for the vision tower: a picture's only feature is its first value; counts what it sees."""

    def __init__(self):
        self.saw = []

    def __call__(self, values, grid):
        each = values.view(len(grid), -1)
        self.saw.append([round((v.item() * 0.5 + 0.5) * 255) for v in each[:, 0]])
        return each[:, :1], [each[:, :1] * 2.0]


def pictures(*values):
    return np.stack([np.full((32, 32, 3), value, np.uint8) for value in values])


def test_a_picture_is_seen_once_a_version():
    _, processor = make_tiny()
    tower = Tower()
    cache = VisionCache(tower, Patches(processor.image_processor), capacity=4)

    def look(values, ids, version=0):
        embedded, deep = cache.features(pictures(*values), np.array(ids, np.uint64), version)
        assert torch.equal(deep[0], embedded * 2.0)
        return [round((v.item() * 0.5 + 0.5) * 255) for v in embedded[:, 0]]

    assert look([10, 20, 10], [1, 2, 1]) == [10, 20, 10]
    assert look([20, 30], [2, 3]) == [20, 30]
    # 0 names no picture: seen each time, and kept for nobody.
    assert look([7, 8, 20], [0, 0, 2]) == [7, 8, 20]
    assert tower.saw == [[10, 20], [30], [7, 8]]
    assert look([20], [2], version=1) == [20]
    assert tower.saw[-1] == [20]
    assert (cache.seen, cache.reused) == (6, 3)


def test_the_longest_unused_picture_makes_room():
    _, processor = make_tiny()
    tower = Tower()
    cache = VisionCache(tower, Patches(processor.image_processor), capacity=2)
    for values in ([1, 2], [1], [3], [1, 3], [2]):
        cache.features(pictures(*values), np.array(values, np.uint64), 0)
    # 3 takes the place of 2, which is then unknown.
    assert tower.saw == [[1, 2], [3], [2]]
    with pytest.raises(ValueError, match="room for 2"):
        cache.features(pictures(1, 2, 3), np.array([1, 2, 3], np.uint64), 0)


@pytest.mark.parametrize("head", ["tokens", "expert"])
def test_a_policy_with_the_engine_decides_the_same(head):
    options = {"head": head, "cameras": ["front_wide_120fov"], "frames": 2, "rows": 2, "reasoning_tokens": 4}
    plain = AlpamayoTinyConfig(**options).build()
    quick = AlpamayoTinyConfig(**options, engine="graph", context=512).build()
    observation, seeds = example_observation(plain.spec, 3), np.arange(3, dtype=np.uint64)
    sampling = Sampling(temperature=0.6, top_p=0.98)
    expected, got = plain.act(observation, seeds, sampling), quick.act(observation, seeds, sampling)
    for name in expected.trace:
        if name != "denoising":
            np.testing.assert_array_equal(got.trace[name], expected.trace[name]) if name != "text" else None
    np.testing.assert_allclose(got.log_prob, expected.log_prob, atol=1e-2 if head == "expert" else 1e-3)
    scored = quick.score(observation, got, sampling).log_prob.detach().numpy()
    np.testing.assert_allclose(scored, got.log_prob, atol=1e-2 if head == "expert" else 1e-3)


@pytest.mark.parametrize("cameras", [[], ["front_wide_120fov"]])
def test_samples_of_one_scene_read_its_prompt_once(cameras):
    options = {"cameras": cameras, "frames": 2, "decided_s": 1.0, "engine": "graph", "context": 512, "rows": 6}
    policy = AlpamayoTinyConfig(**options).build()
    two = example_observation(policy.spec, 2)
    scene = np.array([0, 0, 1, 0, 1, 0])
    observation = {name: values[scene] for name, values in two.items()}
    seeds, sampling = np.arange(6, dtype=np.uint64), Sampling(temperature=0.6, top_p=0.98)
    decision = policy.act(observation, seeds, sampling)
    assert policy.prompts_read == 2
    alone = AlpamayoTinyConfig(**options | {"engine": "eager"}).build().act(observation, seeds, sampling)
    np.testing.assert_array_equal(decision.trace["tokens"], alone.trace["tokens"])
    np.testing.assert_allclose(decision.log_prob, alone.log_prob, atol=1e-3)
    assert len(np.unique(decision.trace["tokens"], axis=0)) == 6
    if cameras:
        # Another picture, whose id differs in the last of 64 bits.
        observation["camera_front_wide_120fov_frame_id"][0, 1] ^= np.uint64(1)
        policy.act(observation, seeds, sampling)
        assert policy.prompts_read == 2 + 3
        # Pictures without an id may be any: each row is read.
        observation["camera_front_wide_120fov_frame_id"][:] = 0
        policy.act(observation, seeds, sampling)
        assert policy.prompts_read == 2 + 3 + 6


def test_pictures_that_would_be_resized_are_refused_by_the_engine():
    with pytest.raises(ConfigError, match="policy.height"):
        AlpamayoTinyConfig(cameras=["front_wide_120fov"], height=60, engine="graph").build()
