"""The open-loop world beside the Alpamayo package: the same tokens, and a judge that transformers loads."""

from __future__ import annotations

import json

import numpy as np
import pytest

from alpagym_runtime.rewards.pai_config import PaiJointConfig
from alpagym_runtime.rewards.reasoning import make_grader
from alpagym_runtime.simulators.pai.codec import TrajectoryCodec
from alpagym_runtime.types import SimulatorSpec


def test_both_codecs_mean_the_same_plans():
    torch = pytest.importorskip("torch", reason="an extra of the policies: pip install 'alpagym-alpamayo-r1[torch]'")
    from alpagym_alpamayo_r1.trajectory_tokens import future_tokenizer

    ours = TrajectoryCodec()
    names = ("accel_mean", "accel_std", "curvature_mean", "curvature_std")
    theirs = future_tokenizer({"action_space_cfg": {name: getattr(ours, name) for name in names}})
    rng = np.random.default_rng(4)
    speed, bend = rng.uniform(0.0, 20.0, 6), rng.uniform(-0.05, 0.05, 6)
    time = np.arange(-15, 65) * 0.1
    yaw = bend[:, None] * speed[:, None] * time
    step = np.diff(np.concatenate([yaw[:, :1], yaw], axis=1), axis=1)
    x = np.cumsum(speed[:, None] * 0.1 * np.cos(yaw - step / 2.0), axis=1)
    y = np.cumsum(speed[:, None] * 0.1 * np.sin(yaw - step / 2.0), axis=1)
    path = np.stack([x - x[:, 15:16], y - y[:, 15:16], yaw], axis=-1)
    history, future = path[:, :16], path[:, 16:]
    flat = lambda xy: torch.from_numpy(np.concatenate([xy[..., :2], np.zeros_like(xy[..., :1])], -1))  # noqa: E731
    tensors = (flat(history), torch.from_numpy(history[..., 2]), flat(future), torch.from_numpy(future[..., 2]))
    np.testing.assert_allclose(
        ours.initial_speed(history[..., :2], history[..., 2]),
        theirs.action_space.initial_speed(*tensors[:2]).numpy(),
        atol=1e-9,
    )
    bins = ours.encode(history[..., :2], history[..., 2], future)
    assert np.abs(bins - theirs.encode(*tensors).numpy()).max() <= 1
    decoded = theirs.decode(torch.from_numpy(bins), *tensors[:2])
    plan = ours.decode(bins, ours.initial_speed(history[..., :2], history[..., 2]))
    np.testing.assert_allclose(plan[..., :2], decoded.xy.numpy(), atol=1e-3)  # its bins are single precision
    np.testing.assert_allclose(plan[..., 2], decoded.yaw.numpy(), atol=1e-4)


def save_judge(folder, labels: int = 1) -> None:
    """A random classifier of a few thousand weights, and a tokenizer of whole words."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "question", "answer", "student", "slow", "keep"]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(vocab_file=str(folder / "vocab.txt")).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=256,
        num_labels=labels,
    )
    BertForSequenceClassification(config).save_pretrained(folder)


@pytest.mark.slow
def test_a_local_judge_grades_pairs(tmp_path):
    pytest.importorskip("transformers", reason="pip install torch transformers")
    save_judge(tmp_path)
    judge = make_grader("lingo_judge", str(tmp_path), "cpu")
    assert make_grader("lingo_judge", str(tmp_path), "cpu") is judge
    pairs = [("slow", "keep"), ("keep " * 400, "keep"), ("slow", "keep")]
    scores = judge.score(*zip(*pairs, strict=True))
    assert scores.dtype == np.float32
    assert ((scores > 0.0) & (scores < 1.0)).all()
    assert scores[0] == scores[2]
    assert judge.score(["slow"], ["keep"])[0] == scores[0]  # alone or in a batch
    spec = SimulatorSpec(False, 6_400_000, 1, ("s",), {"ade_m": "tick", "comfort": "tick"})
    assert PaiJointConfig(grader_path=str(tmp_path), grader_device="cpu").build(spec).needs == {"ade_m", "comfort"}


@pytest.mark.slow
def test_a_classifier_of_several_classes_is_no_judge(tmp_path):
    pytest.importorskip("transformers", reason="pip install torch transformers")
    save_judge(tmp_path, labels=3)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["BertForSequenceClassification"]
    with pytest.raises(ValueError, match="3 labels; a judge has one"):
        make_grader("lingo_judge", str(tmp_path), "cpu")
