"""Prompts and labels as published, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from alpagym_alpamayo_r1.architecture import LAYOUTS as RELEASES
from alpagym_alpamayo_r1.processing import Patches, Processor, make_image_processor, place, trajectory_bins
from alpagym_alpamayo_r1.prompt import IMAGE, LAYOUTS, PromptLayout, render
from alpagym_alpamayo_r1.tiny import TinySize, make_tiny
from alpagym_alpamayo_r1.tiny import example_drive as drive
from alpagym_alpamayo_r1.vocabulary import MARKERS_1, MARKERS_1_5
from alpagym_plugins import ConfigError


def text(name, generate=False, cameras=(0, 1, 2, 6), frames=4, **texts):
    return render(
        LAYOUTS[name], cameras=cameras, frames=frames, history_tokens=2, future_tokens=3, texts=texts, generate=generate
    )


def test_the_whole_conversation():
    assert text("sft", cameras=(1,), frames=2) == (
        "<|im_start|>system\nYou are a driving assistant that generates safe and accurate actions.<|im_end|>\n"
        f"<|im_start|>user\n{IMAGE}{IMAGE}"
        "<|traj_history_start|><|traj_history|><|traj_history|><|traj_history_end|>"
        "output the future trajectory.<|im_end|>\n"
        "<|im_start|>assistant\n<|traj_future_start|><|traj_future|><|traj_future|><|traj_future|><|traj_future_end|>"
        "<|im_end|>\n"
    )


def test_generation_opens_the_last_component_only():
    assert text("sft", generate=True).endswith("<|im_start|>assistant\n<|traj_future_start|>")
    assert text("rl_1", generate=True).endswith(
        "output the chain-of-thought reasoning of the driving process, then output the future trajectory.<|im_end|>\n"
        "<|im_start|>assistant\n<|cot_start|>"
    )
    assert "<|cot_start|>Brake.<|cot_end|><|traj_future_start|>" in text("sft_cot", generate=True, cot="Brake.")


def test_frames_are_numbered_within_a_camera():
    numbers = "".join(f"frame {k} {IMAGE}" for k in range(4))
    user = text("rl_1_5", generate=True).split("<|traj_history_start|>")[0].split("user\n")[1]
    assert user == "".join(
        f"{name} camera: {numbers}" for name in ("Front left", "Front", "Front right", "Front telephoto")
    )


def test_upstreams_rl_numbering_is_a_switch():
    user = text("rl_1_5_published", generate=True).split("<|traj_history_start|>")[0].split("user\n")[1]
    names = ("Front left", "Front", "Front right", "Front telephoto")
    assert user == "".join(f"{name} camera: frame 0 {IMAGE}" * 4 for name in names)


def test_route_and_question():
    assert "<|route_start|>Turn left in 40 m.<|route_end|>" in text("sft_1_5_nav", route="Turn left in 40 m.")
    asked = text("sft_1_5_vqa", question="Why?", answer="Red light.")
    assert "<|question_start|>Why?<|question_end|><|im_end|>" in asked
    assert asked.endswith("<|answer_start|>Red light.<|answer_end|><|im_end|>\n")


@pytest.mark.parametrize(
    ("act", "key"),
    [
        (lambda: PromptLayout(order=("image", "traj_histroy", "traj_future")), "order"),
        (lambda: PromptLayout(order=("traj_future", "image")), "order"),
        (lambda: PromptLayout(labels=("cot",)), "labels"),
        (lambda: PromptLayout(frames="published_rl"), "camera_names"),
        (lambda: text("sft_cot"), "order"),
        (lambda: text("sft_cot", cot="a<|cot_end|>b"), "cot"),
        (lambda: text("sft", cameras=(9,)), "cameras"),
    ],
)
def test_refusals_name_their_key(act, key):
    with pytest.raises(ConfigError) as caught:
        act()
    assert caught.value.key == key


# ---------------------------------------------------------------- batches


def test_the_default_labels_are_131(tiny):
    # start + 128 bins + end + the end of the turn.
    batch = tiny[1].encode([drive()], LAYOUTS["sft"], generate=False)
    assert batch.labels_mask.sum() == 131
    assert not tiny[1].encode([drive()], LAYOUTS["sft"], generate=True).labels_mask.any()


def test_labels_of_reasoning_are_its_words_and_markers(tiny):
    _, processor = tiny
    words = "Slow down because the lead vehicle ahead is braking."
    batch = processor.encode([drive(cot=words)], LAYOUTS["sft_cot"], generate=False)
    length = len(processor.tokenizer.encode(words, add_special_tokens=False))
    assert batch.labels_mask.sum() == 131 + length + 2
    learned = processor.tokenizer.decode(batch.input_ids[batch.labels_mask])
    assert learned.startswith(f"<|cot_start|>{words}<|cot_end|><|traj_future_start|><i")
    assert learned.endswith("<|traj_future_end|><|im_end|>")


def test_rows_are_padded_on_the_left(tiny):
    _, processor = tiny
    batch = processor.encode([drive(cot="Stop."), drive(cot="Stop. " * 9)], LAYOUTS["sft_cot"], generate=False)
    padded = int((batch.attention_mask[0] == 0).sum())
    assert padded > 0
    assert (batch.attention_mask[0, :padded] == 0).all()
    assert (batch.attention_mask[1] == 1).all()
    assert not batch.labels_mask[0, :padded].any()


def test_trajectories_stand_in_place_of_their_placeholders(tiny):
    model, processor = tiny
    batch = processor.encode([drive(10.0)], LAYOUTS["sft"], generate=False)
    first = model.architecture.first_id
    ids = batch.input_ids[0]
    history = ids[(ids >= first + 300) & (ids < first + 400)] - first - 300
    assert history.tolist() == processor.history.encode(batch.history_xyz)[0].tolist()
    start = ids.tolist().index(processor.id_of("traj_future_start"))
    future = ids[start + 1 : start + 129] - first
    expected = processor.future.encode(batch.history_xyz, batch.history_yaw, batch.future_xyz, batch.future_yaw)[0]
    assert future.tolist() == expected.tolist()


def test_pictures_are_resized_without_torchvision(tiny):
    _, processor = tiny
    batch = processor.encode([drive()], LAYOUTS["sft"], generate=True)
    # 90x160 into at most 6,144 px, sides multiples of 32: 32x96, that is 2x6 patches of 16 px.
    assert batch.image_grid_thw.tolist() == [[1, 2, 6]] * 16
    assert (batch.input_ids == processor.architecture.vlm["image_token_id"]).sum() == 16 * 3
    assert batch.pixel_values.shape == (16 * 12, 3 * 2 * 16 * 16)
    assert batch.pixel_values.abs().max() <= 1.0


def test_released_picture_size(tiny):
    # 1080x1920 in 163,840 … 196,608 px: 320x576, 180 tokens a picture.
    _, processor = tiny
    released = replace(processor.architecture, min_pixels=163_840, max_pixels=196_608)
    again = Processor(processor.tokenizer, make_image_processor(released), released)
    _, grid = again.images([np.zeros((1080, 1920, 3), np.uint8)])
    assert grid.tolist() == [[1, 20, 36]]


def test_a_component_without_its_words_is_refused():
    _, processor = make_tiny(TinySize(future_bins=3, history_bins=3), RELEASES["1.5"])
    layout = PromptLayout(("traj_history", "prompt", "meta_action"), ("meta_action",), ())
    with pytest.raises(ConfigError, match="meta_action_start"):
        processor.encode([drive(meta_action="keep")], layout, generate=False)


def test_words_in_the_releases_order():
    # Ids from 155,669 on, less `<|image_pad|>`, which the backbone has: the released ids of six markers.
    names = [name for name in MARKERS_1_5 if name != "image_pad"]
    ids = {name: 155_669 + k for k, name in enumerate(names)}
    assert len(MARKERS_1) == len(MARKERS_1_5) == 29
    assert 155_669 + len(names) == 155_697
    assert ids["traj_history_start"] == 155_674
    assert ids["traj_future_start"] == 155_681
    assert ids["traj_history"] == 155_684
    assert "_padding_8" in MARKERS_1_5


def test_placeholders_must_fit():
    with pytest.raises(ValueError, match=r"\[2\] placeholders for 3"):
        place(torch.tensor([[7, 7, 1]]), 7, torch.tensor([[1, 2, 3]]))


START, END, FIRST = 5001, 5002, 1000


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([START, 1001, 1002, 1003, 1004, END], [1, 2, 3, 4]),
        ([START, 1001, 1002, 1003, 1004], [1, 2, 3, 4]),
        ([1001, 1002, 1003, 1004, END], [1, 2, 3, 4]),
        ([START, 1001, 1002, 1003, 1004, 1009, END], [1, 2, 3, 4]),
        ([START, 1009, END, START, 1001, 1002, 1003, 1004, END], [1, 2, 3, 4]),
        ([START, 1001, 1002, END], [1, 2, 0, 0]),
        ([START, 4000, 4000, 12, 1004, END], [9, 9, 0, 4]),
        ([START, END], [0, 0, 0, 0]),
        ([3, 4, 5], [0, 0, 0, 0]),
    ],
    ids=["plain", "no end", "no start", "one more", "two", "half", "outside", "empty", "words"],
)
def test_reading_of_a_completion(ids, expected):
    bins = trajectory_bins(ids, first_id=FIRST, bins=10, count=4, start_id=START, end_id=END)
    assert bins.tolist() == expected


def test_prompts_of_histories_are_those_of_samples():
    model, processor = make_tiny()
    samples = [drive(8.0, 1, cameras=(1, 3), frames=2), drive(12.0, 2, cameras=(1, 3), frames=2)]
    layout = LAYOUTS["rl_1_5"]
    expected = processor.encode(samples, layout, generate=True)
    got = processor.prompts(
        layout,
        np.stack([s.history_xyz for s in samples]).astype(np.float32),
        np.stack([s.history_yaw for s in samples]).astype(np.float32),
        (1, 3),
        2,
        tuple(expected.image_grid_thw[0].tolist()),
    )
    assert torch.equal(got.input_ids, expected.input_ids)
    assert torch.equal(got.image_grid_thw, expected.image_grid_thw)
    # All rows have the first one's positions.
    assert torch.equal(model.positions(got.first()).expand(-1, 2, -1), model.positions(expected))


@pytest.mark.parametrize(
    ("height", "width", "fits"), [(64, 96, True), (96, 64, True), (60, 96, False), (128, 128, False)]
)
def test_patches_are_the_image_processors(height, width, fits):
    _, processor = make_tiny()
    patches = Patches(processor.image_processor)
    assert patches.fits(height, width) is fits
    if fits:
        pictures = np.random.default_rng(0).integers(0, 256, (3, height, width, 3), np.uint8)
        values, grid = patches(pictures)
        expected, expected_grid = processor.images(list(pictures))
        assert torch.equal(grid, expected_grid)
        np.testing.assert_allclose(values, expected, atol=1e-6)
