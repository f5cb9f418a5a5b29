"""Samples to the arrays that the model reads: resized pictures, token ids with trajectories in place, label masks.

The Pillow image processor of transformers does the resizing (Qwen2-VL's smart resize), so torchvision is not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alpagym_alpamayo_r1.architecture import Architecture
from alpagym_alpamayo_r1.compat import image_processor_class
from alpagym_alpamayo_r1.prompt import DEFAULT_CAMERAS, TURN_END, PromptLayout, render
from alpagym_alpamayo_r1.trajectory_tokens import future_tokenizer, history_tokenizer
from alpagym_alpamayo_r1.vocabulary import check_tokenizer, load_tokenizer, marker
from alpagym_plugins import ConfigError


@dataclass(frozen=True)
class Sample:
    """One drive up to t0; everything in the rig frame of t0.

    Attributes:
        images: [C,K,h,w,3] u8, oldest first; C = 0 without pictures.
        history_xyz, history_yaw: [H,3] m and [H] rad; the last pose is the origin.
        future_xyz, future_yaw: [T,3] m and [T] rad, where there is a label.
        cameras: index of each of the C cameras (`prompt.CAMERAS`).
        texts: cot, meta_action, route, question, answer.

    """

    images: NDArray[np.uint8]
    history_xyz: NDArray[np.floating[Any]]
    history_yaw: NDArray[np.floating[Any]]
    future_xyz: NDArray[np.floating[Any]] | None = None
    future_yaw: NDArray[np.floating[Any]] | None = None
    cameras: tuple[int, ...] = DEFAULT_CAMERAS
    texts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """B samples, padded on the left to L tokens.

    Attributes:
        input_ids: [B,L] i64, trajectories in place.
        attention_mask: [B,L] i64.
        labels_mask: [B,L] bool, True where a token is learned.
        pixel_values: [P,D] f32 patches of all pictures, in order; None without pictures.
        image_grid_thw: [I,3] i64 patches a picture: time, height, width; None without pictures.
        history_xyz: [B,H,3] f32 m.
        history_yaw: [B,H] f32 rad.
        future_xyz: [B,T,3] f32 m or None.
        future_yaw: [B,T] f32 rad or None.
        positions: [3,B,L] i64 of the tokens where they are known already; they follow from the other arrays.

    """

    input_ids: Tensor
    attention_mask: Tensor
    labels_mask: Tensor
    pixel_values: Tensor | None
    image_grid_thw: Tensor | None
    history_xyz: Tensor
    history_yaw: Tensor
    future_xyz: Tensor | None = None
    future_yaw: Tensor | None = None
    positions: Tensor | None = None

    def first(self) -> Batch:
        """The first row's words, without pixels and futures."""
        pictures = (
            None
            if self.image_grid_thw is None
            else self.image_grid_thw[: len(self.image_grid_thw) // len(self.input_ids)]
        )
        return Batch(
            self.input_ids[:1],
            self.attention_mask[:1],
            self.labels_mask[:1],
            None,
            pictures,
            self.history_xyz[:1],
            self.history_yaw[:1],
        )

    def take(self, rows: Tensor) -> Batch:
        """Some rows, of a batch that has no pixels and in which all rows have pictures of one size."""
        assert self.pixel_values is None
        grid = self.image_grid_thw
        names = ("input_ids", "attention_mask", "labels_mask", "history_xyz", "history_yaw")
        return replace(
            self,
            **{name: getattr(self, name)[rows] for name in names},
            image_grid_thw=None if grid is None else grid[: len(grid) // len(self.input_ids) * len(rows)],
            positions=None if self.positions is None else self.positions[:, rows],
        )

    def to(self, device: torch.device | str) -> Batch:
        """All arrays on a device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)


class Processor:
    """Tokenizer, image processor and trajectory tokenizers of one checkpoint."""

    def __init__(self, tokenizer: Any, image_processor: Any, architecture: Architecture) -> None:
        check_tokenizer(tokenizer, architecture)
        if len(tokenizer.encode("assistant", add_special_tokens=False)) != 1:
            raise ConfigError("must have 'assistant' as one word: labels are found by it", key="tokenizer")
        tokenizer.padding_side = "left"
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.architecture = architecture
        self.future = future_tokenizer(architecture.future)
        self.history = history_tokenizer(architecture.history)
        self._templates: dict[tuple[PromptLayout, tuple[int, ...], int, tuple[int, int, int]], Tensor] = {}

    @staticmethod
    def load(directory: Path, architecture: Architecture) -> Processor:
        """From a converted checkpoint's directory; the hub is never asked."""
        if not (directory / "preprocessor_config.json").is_file():
            raise ConfigError(f"{directory} has no preprocessor_config.json; is it a converted checkpoint?")
        images = image_processor_class().from_pretrained(directory, local_files_only=True)
        return Processor(load_tokenizer(directory), images, architecture)

    def encode(self, samples: Sequence[Sample], layout: PromptLayout, *, generate: bool) -> Batch:
        """Samples as one batch.

        Args:
            samples: B of them.
            layout: the prompt's components.
            generate: leave the last component open, nothing is a label; else the futures and texts are filled in.

        Raises:
            ConfigError: a text or a marker that the layout needs is missing.
            ValueError: shapes differ from the checkpoint's.

        """
        pixels, grid = self.images([p for sample in samples for p in sample.images.reshape(-1, *_hwc(sample))])
        counts = iter([] if grid is None else (grid.prod(-1) // self.image_processor.merge_size**2).tolist())
        texts = []
        for sample in samples:
            text = render(
                layout,
                cameras=sample.cameras,
                frames=sample.images.shape[1],
                history_tokens=self.architecture.history_tokens,
                future_tokens=self.architecture.future_tokens,
                texts=sample.texts,
                generate=generate,
            )
            head, *rest = text.split("<|image_pad|>")
            texts.append(head + "".join("<|image_pad|>" * next(counts) + piece for piece in rest))
        self._check_markers(layout)
        encoded = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        ids, mask = encoded["input_ids"], encoded["attention_mask"]
        history_xyz = _stack([sample.history_xyz for sample in samples])
        history_yaw = _stack([sample.history_yaw for sample in samples])
        batch = Batch(ids, mask, torch.zeros_like(ids, dtype=torch.bool), pixels, grid, history_xyz, history_yaw)
        if "traj_history" in layout.order:
            bins = self.history.encode(history_xyz)
            ids = place(ids, self.id_of("traj_history"), bins + self.architecture.first_history_id)
        futures = [sample.future_xyz for sample in samples if sample.future_xyz is not None]
        if len(futures) == len(samples):
            future_xyz, future_yaw = _stack(futures), _stack([sample.future_yaw for sample in samples])
            batch = replace(batch, future_xyz=future_xyz, future_yaw=future_yaw)
        elif "traj_future" in layout.order and not (generate and layout.answers[-1] == "traj_future"):
            raise ValueError("the layout has traj_future, a sample has no future_xyz")
        if batch.future_xyz is not None and batch.future_yaw is not None and self.id_of("traj_future") in ids:
            bins = self.future.encode(history_xyz, history_yaw, batch.future_xyz, batch.future_yaw)
            ids = place(ids, self.id_of("traj_future"), bins + self.architecture.first_id)
        labels = torch.zeros_like(batch.labels_mask) if generate else self.label_mask(ids, layout.labels)
        return replace(batch, input_ids=ids, labels_mask=labels)

    def prompts(
        self,
        layout: PromptLayout,
        history_xyz: NDArray[np.float32],
        history_yaw: NDArray[np.float32],
        cameras: tuple[int, ...],
        frames: int,
        grid: tuple[int, int, int],
    ) -> Batch:
        """Prompts that differ in their histories only, without the pictures' pixels.

        Args:
            layout: the prompt's components; no texts.
            history_xyz: [B,H,3] m.
            history_yaw: [B,H] rad.
            cameras: index of each camera.
            frames: pictures a camera.
            grid: patches of a picture: time, height, width.

        """
        key = (layout, cameras, frames, grid)
        if key not in self._templates:
            text = render(
                layout,
                cameras=cameras,
                frames=frames,
                history_tokens=self.architecture.history_tokens,
                future_tokens=self.architecture.future_tokens,
                texts={},
                generate=True,
            )
            self._check_markers(layout)
            words = int(np.prod(grid)) // self.image_processor.merge_size**2
            text = text.replace("<|image_pad|>", "<|image_pad|>" * words)
            self._templates[key] = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        rows = len(history_xyz)
        ids = self._templates[key].expand(rows, -1)
        xyz = _stack(list(history_xyz))
        bins = self.history.encode(xyz)
        ids = place(ids, self.id_of("traj_history"), bins + self.architecture.first_history_id)
        pictures = rows * len(cameras) * frames
        return Batch(
            ids,
            torch.ones_like(ids),
            torch.zeros_like(ids, dtype=torch.bool),
            None,
            torch.tensor([grid] * pictures) if pictures else None,
            xyz,
            _stack(list(history_yaw)),
        )

    def images(self, pictures: Sequence[NDArray[np.uint8]]) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """`pixel_values` and `image_grid_thw` of pictures [h,w,3] u8; values in [-1, 1] before patching."""
        if not pictures:
            return None, None
        out = self.image_processor(images=list(pictures), return_tensors="pt", input_data_format="channels_last")
        return out["pixel_values"], out["image_grid_thw"]

    def label_mask(self, input_ids: Tensor, components: Sequence[str]) -> Tensor:
        """True [B,L] from start to end marker of each component, and at the `<|im_end|>` that ends the turn.

        Only the last turn is looked at, so that words of the user are never labels.
        """
        mask = torch.zeros_like(input_ids, dtype=torch.bool)
        if not components:
            return mask
        assistant = self.tokenizer.encode("assistant", add_special_tokens=False)[0]
        opening = self.tokenizer.convert_tokens_to_ids("<|im_start|>")
        closing = self.tokenizer.convert_tokens_to_ids(TURN_END)
        for row, ids in enumerate(input_ids.tolist()):
            turn = max(i for i in range(len(ids) - 1) if ids[i] == opening and ids[i + 1] == assistant)
            for name in components:
                start = ids.index(self.id_of(f"{name}_start"), turn)
                end = ids.index(self.id_of(f"{name}_end"), start)
                mask[row, start : end + 1] = True
            mask[row, ids.index(closing, turn)] = True
        return mask

    def id_of(self, name: str) -> int:
        """Id of a marker's word."""
        return int(self.tokenizer.convert_tokens_to_ids(marker(name)))

    def save(self, directory: Path) -> None:
        """Write tokenizer and image processor."""
        self.tokenizer.save_pretrained(directory)
        self.image_processor.save_pretrained(directory)

    def _check_markers(self, layout: PromptLayout) -> None:
        known = self.tokenizer.get_vocab()
        for name in layout.order:
            for word in (marker(f"{name}_start"), marker(f"{name}_end")):
                if name not in ("image", "prompt") and word not in known:
                    raise ConfigError(f"{name!r} needs the word {word}, which this checkpoint lacks", key="order")


class Patches:
    """Cuts pictures that need no resizing into the patches that the vision tower reads, on the device it runs on.

    The same numbers as the image processor's; at 128 pictures a tick that one takes longer than the tower.
    """

    def __init__(self, image_processor: Any, device: torch.device | str = "cpu") -> None:
        self._size, self._merge = image_processor.patch_size, image_processor.merge_size
        self._repeat = image_processor.temporal_patch_size
        self._processor = image_processor
        self._device = torch.device(device)

    def fits(self, height: int, width: int) -> bool:
        """Whether a picture of this size is read as it is."""
        blank = np.zeros((height, width, 3), np.uint8)
        out = self._processor(images=[blank], return_tensors="pt", input_data_format="channels_last")
        return out["image_grid_thw"][0].tolist() == [1, height // self._size, width // self._size] and not (
            height % (self._size * self._merge) or width % (self._size * self._merge)
        )

    def __call__(self, pictures: NDArray[np.uint8]) -> tuple[Tensor, Tensor]:
        """Patches [P·rows·columns, 3·2·16·16] f32 and grid [P,3] i64 of pictures [P,h,w,3]."""
        count, height, width, _ = pictures.shape
        size, merge = self._size, self._merge
        rows, columns = height // size, width // size
        image = torch.from_numpy(np.ascontiguousarray(pictures)).to(self._device).float()
        image = (image * (1.0 / 255.0) - 0.5) / 0.5
        image = image.view(count, rows // merge, merge, size, columns // merge, merge, size, 3)
        # picture, block row, block column, row and column in the block, channel, [time], pixel row, pixel column
        image = image.permute(0, 1, 4, 2, 5, 7, 3, 6)[:, :, :, :, :, :, None].expand(*[-1] * 6, self._repeat, -1, -1)
        grid = torch.tensor([[1, rows, columns]] * count, device=self._device)
        return image.reshape(count * rows * columns, -1), grid


def make_image_processor(architecture: Architecture) -> Any:
    """The image processor that a checkpoint's config describes."""
    vision = architecture.vlm["vision_config"]
    return image_processor_class()(
        patch_size=vision["patch_size"],
        temporal_patch_size=vision["temporal_patch_size"],
        merge_size=vision["spatial_merge_size"],
        min_pixels=architecture.min_pixels,
        max_pixels=architecture.max_pixels,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def place(input_ids: Tensor, placeholder: int, values: Tensor) -> Tensor:
    """A copy of ids [B,L] whose placeholders hold values [B,M], in order.

    Raises:
        ValueError: a row has another number of placeholders than M.

    """
    where = input_ids == placeholder
    counts = where.sum(-1)
    if (counts != values.shape[-1]).any():
        raise ValueError(f"rows have {counts.tolist()} placeholders for {values.shape[-1]} trajectory tokens")
    return input_ids.masked_scatter(where, values)


def trajectory_bins(
    ids: Sequence[int], *, first_id: int, bins: int, count: int, start_id: int, end_id: int
) -> NDArray[np.int64]:
    """The published reading of generated ids as `count` bins, whatever they are.

    After the last start marker (else from the beginning), before the first end marker that follows (else to the end);
    ids outside the range become its ends, what is missing becomes bin 0, what is too much is dropped.
    """
    found = list(ids)
    if start_id in found:
        found = found[len(found) - found[::-1].index(start_id) :]
    if end_id in found:
        found = found[: found.index(end_id)]
    out = np.zeros(count, np.int64)
    values = np.clip(np.asarray(found[:count], np.int64) - first_id, 0, bins - 1)
    out[: len(values)] = values
    return out


def _hwc(sample: Sample) -> tuple[int, ...]:
    shape = sample.images.shape
    if len(shape) != 5 or shape[-1] != 3 or shape[0] != len(sample.cameras):
        raise ValueError(f"images must be [{len(sample.cameras)}, K, h, w, 3], got {list(shape)}")
    return shape[2:]


def _stack(rows: Sequence[Any]) -> Tensor:
    return torch.from_numpy(np.stack([np.asarray(row, np.float32) for row in rows]))
