"""What the policy asks of vLLM, and makes of its answers; vLLM is a stand-in with its documented arguments."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from alpagym_alpamayo_r1.config import AlpamayoTinyConfig
from alpagym_alpamayo_r1.vllm_engine import one_pad_each
from alpagym_plugins import ConfigError
from alpagym_runtime.deploy_config import LoraSection
from alpagym_runtime.testing.examples import example_observation
from alpagym_runtime.trainers.lora import add_adapters
from alpagym_runtime.types import Sampling

OPTIONS = {"decided_s": 0.4, "future_bins": 300, "rows": 2, "context": 512}
SAMPLING = Sampling(temperature=0.6, top_p=0.98)
CAMERA = {"cameras": ["front_wide_120fov"], "frames": 2}


@pytest.fixture
def vllm(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "stand_ins"))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm

    yield vllm
    sys.modules.pop("vllm")


def seeds(count):
    return np.arange(count, dtype=np.uint64) + np.uint64(2**63)


@pytest.mark.parametrize("options", [{}, CAMERA | {"reasoning_tokens": 3}], ids=["tokens", "words, pictures"])
def test_the_likeliest_tokens_are_the_models(vllm, options):
    policy = AlpamayoTinyConfig(**OPTIONS, **options, engine="vllm").build()
    plain = AlpamayoTinyConfig(**OPTIONS, **options).build()
    observation, mean = example_observation(policy.spec, 3), Sampling("mean")
    got, expected = policy.act(observation, seeds(3), mean), plain.act(observation, seeds(3), mean)
    np.testing.assert_array_equal(got.trace["tokens"], expected.trace["tokens"])
    np.testing.assert_allclose(got.plan_rig, expected.plan_rig, atol=1e-5)
    if options:
        np.testing.assert_array_equal(got.trace["reasoning"], expected.trace["reasoning"])
    assert not got.log_prob_mask.any()  # of a choice that is certain


@pytest.mark.parametrize("options", [{}, CAMERA | {"reasoning_tokens": 3}], ids=["tokens", "words, pictures"])
def test_scores_are_what_was_drawn_with(vllm, options):
    policy = AlpamayoTinyConfig(**OPTIONS, **options, engine="vllm").build()
    observation = example_observation(policy.spec, 3)
    decision = policy.act(observation, seeds(3), SAMPLING)
    assert decision.log_prob_mask[:, -8:].all()
    scored = policy.score(observation, decision, SAMPLING).log_prob.detach().numpy()
    change = np.where(decision.log_prob_mask, scored - decision.log_prob, 0.0)
    np.testing.assert_allclose(np.exp(change.sum(1)), 1.0, atol=1e-5)
    again = policy.act(observation, seeds(3), SAMPLING)
    np.testing.assert_array_equal(again.trace["tokens"], decision.trace["tokens"])
    other = policy.act(observation, seeds(3) + np.uint64(9), SAMPLING)
    assert (other.trace["tokens"] != decision.trace["tokens"]).any(1).all()


def test_new_weights_and_adapters_are_handed_over_once_a_version(vllm):
    policy = AlpamayoTinyConfig(**OPTIONS, **CAMERA, engine="vllm").build()
    engine = vllm.LLM.made[-1]
    observation, mean = example_observation(policy.spec, 2), Sampling("mean")
    # The second row's first picture is the first row's second one.
    observation["camera_front_wide_120fov_frame_id"][:] = [[5, 6], [6, 7]]
    observation["camera_front_wide_120fov"][1, 0] = observation["camera_front_wide_120fov"][0, 1]
    policy.act(observation, seeds(2), mean)
    policy.act(observation, seeds(2), mean)
    assert (engine.loads, engine.resets, engine.looked) == (1, 1, 3)
    add_adapters(policy.module, LoraSection(rank=2, alpha=4.0, targets=["vlm.*"]), seed=1)
    with torch.no_grad():
        for name, parameter in policy.module.named_parameters():
            if name.endswith("lora_up"):
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    policy.version += 1
    decision = policy.act(observation, seeds(2), SAMPLING)
    assert (engine.loads, engine.resets, engine.looked) == (2, 2, 6)
    scored = policy.score(observation, decision, SAMPLING).log_prob.detach().numpy()
    np.testing.assert_allclose(scored, decision.log_prob, atol=1e-4)
    policy.load(policy.module.state_dict(), policy.version)
    policy.act(observation, seeds(2), mean)
    assert engine.loads == 3


def test_words_end_at_the_marker(vllm):
    policy = AlpamayoTinyConfig(**OPTIONS, reasoning_tokens=4, engine="vllm").build()
    observation, mean = example_observation(policy.spec, 2), Sampling("mean")
    before = policy.act(observation, seeds(2), mean).trace["reasoning"]
    architecture, head = policy.module.architecture, policy.module.vlm.lm_head
    marker, second = architecture.marker_ids["future_start"], int(before[0, 1])
    with torch.no_grad():
        # What stood second now is the marker.
        head.weight[[marker, second]] = head.weight[[second, marker]]
    policy.version += 1
    after = policy.act(observation, seeds(2), mean)
    assert after.trace["reasoning"][0].tolist() == [before[0, 0], marker, -1, -1]
    drawn = policy.act(observation, seeds(2), SAMPLING)
    valid = drawn.trace["reasoning"] >= 0
    np.testing.assert_array_equal(drawn.log_prob_mask, np.concatenate([valid, np.ones((2, 8), bool)], 1))
    trajectory = np.arange(architecture.first_id, architecture.first_id + architecture.traj_vocab_size)
    assert not np.isin(drawn.trace["reasoning"], trajectory).any()


def test_a_run_of_picture_tokens_is_one():
    assert list(one_pad_each([1, 9, 9, 2, 9, 3, 3], 9)) == [1, 9, 2, 9, 3, 3]


def test_what_vllm_cannot_do_is_refused():
    with pytest.raises(ConfigError, match="serves no action expert"):
        AlpamayoTinyConfig(head="expert", engine="vllm")
    with pytest.raises(ConfigError, match="--extra vllm"):
        AlpamayoTinyConfig(engine="vllm").build()
