"""Unchanged weights give ratio 1 for drives that went through a file, in any order of decisions (MTH-05)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from alpagym_alpamayo_r1.config import AlpamayoTinyConfig
from alpagym_runtime.envs.core import DrivingCore, build_terms
from alpagym_runtime.envs.presets import reward_section
from alpagym_runtime.episodes.format import read, save
from alpagym_runtime.rollouts.collector import Collector
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
from alpagym_runtime.trainers.base import decision_batch
from alpagym_runtime.trainers.closed_loop import common_sampling
from alpagym_runtime.types import EpisodeRequest, Sampling

SAMPLING = Sampling(temperature=0.6, top_p=0.98)


def stored_drives(options, folder):
    """Three drives of two or three decisions in the embedded world, written to files and read from them."""
    policy = AlpamayoTinyConfig(**options).build()
    simulator = EmbeddedConfig().build(policy.spec, DatasetSection(train_scenes=2), 3, ())
    core = DrivingCore(simulator, build_terms(reward_section("driving"), simulator), policy.spec)
    scenes = core.spec.scenes
    wanted = [EpisodeRequest(scenes[i % 2], -1, 2 + i % 2, i, 100 + i) for i in range(3)]
    for i, episode in enumerate(Collector(core, policy).collect(wanted, SAMPLING)):
        save(episode, folder / f"{i}.arrow", "seen", remedy="free some space")
    return [read(folder / f"{i}.arrow") for i in range(3)]


@pytest.mark.timeout(900)  # it may be the first to compile the world's kernels
@pytest.mark.parametrize(
    "options",
    [
        {"reasoning_tokens": 4, "cameras": ["front_wide_120fov"], "frames": 2},
        {"head": "expert"},
        {"head": "expert", "cameras": ["front_wide_120fov"], "frames": 2, "reasoning_tokens": 4},
        {"engine": "graph", "waypoints": 20},
        {
            "engine": "graph",
            "waypoints": 20,
            "denoising_steps": 5,
            "noise_modes": 2,
            "noise_level": 2.0,
            "head": "expert",
        },
    ],
    ids=["words and tokens", "expert", "words and expert", "engine, tokens", "engine, expert"],
)
def test_ratios_are_one_after_a_file(options, tmp_path):
    options = {"rows": 2} | options
    episodes = stored_drives(options, tmp_path)
    observations, decisions = decision_batch(episodes)
    assert len(decisions) == 2 + 3 + 2
    order = np.random.default_rng(1).permutation(len(decisions))
    decisions = decisions.take(order)
    again = AlpamayoTinyConfig(**options).build()  # the same weights, elsewhere
    sampling = common_sampling(episodes)
    assert (sampling.temperature, sampling.top_p) == (0.6, 0.98)

    def ratios(with_sampling):
        with torch.no_grad():
            scored = again.score(observations.take(order), decisions, with_sampling).log_prob.numpy()
        change = np.where(decisions.log_prob_mask, scored.astype(np.float64) - decisions.log_prob, 0.0)
        return np.exp(change.sum(axis=1))

    np.testing.assert_allclose(ratios(sampling), 1.0, atol=1e-5)
    # At another temperature it is another distribution.
    assert np.abs(ratios(Sampling(temperature=0.7, top_p=0.98)) - 1.0).max() > 1e-2
