"""The memory plan counts what the model has, and states what fits on one GPU of 80 GB."""

from __future__ import annotations

import math

import pytest

from alpagym_alpamayo_r1.architecture import LAYOUTS, read_architecture
from alpagym_alpamayo_r1.checkpoints import expected_shapes
from alpagym_alpamayo_r1.memory import Use, count_parameters, memory_plan
from alpagym_alpamayo_r1.model import AlpamayoModel
from alpagym_alpamayo_r1.tiny import TinySize, make_config, make_tiny

SMALL = TinySize(future_bins=300, history_bins=100)


def released():
    """1.5 by its published sizes; the expert's are assumed."""
    config = make_config(make_tiny(SMALL)[1].tokenizer, SMALL)
    del config["vlm_config"]
    config |= {"vlm_name_or_path": "nvidia/Cosmos-Reason2-8B", "vocab_size": 155_697, "model_dtype": "bfloat16"}
    config |= {"traj_vocab_size": 4000, "traj_token_start_idx": 151_669}
    config["expert_cfg"] = {"hidden_size": 2048, "intermediate_size": 6144}
    return read_architecture(config)


def tiny(tied):
    return make_tiny(TinySize(future_bins=300, history_bins=100, tied=tied), LAYOUTS["1.5"])[0].architecture


@pytest.mark.parametrize("architecture", [tiny(False), tiny(True), released()], ids=["tiny", "tied", "released"])
def test_parameters_are_the_models(architecture):
    import torch

    with torch.device("meta"):
        model = AlpamayoModel(architecture)
    own = {name: p.numel() for name, p in model.named_parameters()}  # tied ones once
    counted = count_parameters(architecture)
    assert counted.backbone == sum(n for name, n in own.items() if name.startswith("vlm."))
    assert counted.expert == sum(n for name, n in own.items() if not name.startswith("vlm."))
    assert count_parameters(architecture, with_expert=False).expert == 0
    if not architecture.tied:
        shapes = expected_shapes(architecture, with_expert=True)
        assert counted.backbone + counted.expert == sum(map(math.prod, shapes.values()))


def test_the_parts_of_a_plan():
    # Qwen3-VL-8B keeps 2 · 36 layers · 8 heads · 128 · 2 bytes = 147,456 bytes of a token.
    plan = memory_plan(released(), Use(rows=8, context=3584, static_cache=True, pictures=256, picture_tokens=180))
    assert plan["engine's keys and values"] == 8 * (3584 + 64) * 147_456
    assert plan["features of pictures"] == 256 * 180 * 4 * 4096 * 2  # an embedding and three deep layers
    assert plan["gradients and moments"] == 0
    assert sum(plan.values()) == 2 * plan["total"]


def test_closed_loop_training_fits_on_80_gb():
    architecture = released()
    count = count_parameters(architecture)
    # Adapters of rank 16 at seven linear layers of 36: 16 · (inputs + outputs) each.
    layer = 16 * sum(map(sum, [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), *2 * [(4096, 12288)],
                               (12288, 4096)]))  # fmt: skip
    acting = {"rows": 8, "context": 3584, "static_cache": True, "pictures": 256, "picture_tokens": 180}
    adapters = memory_plan(architecture, Use(**acting, trained=36 * layer))
    expert = memory_plan(architecture, Use(**acting, trained=count.expert, through_backbone=False, expert_steps=10))
    everything = memory_plan(architecture, Use(**acting, trained=count.backbone))
    assert adapters["total"] < 72e9
    assert expert["total"] < 72e9
    assert everything["total"] > 80e9
