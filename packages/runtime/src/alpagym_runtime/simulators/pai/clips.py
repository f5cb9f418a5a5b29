"""Which samples a dataset section means: clips of an index, dealt to splits, each with its key frames.

Every half-setting fails here, before anything is decoded, and names the setting to change.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.errors import ConfigError, CorruptFileError, SceneError
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.pai.config import parse_chunks
from alpagym_runtime.simulators.pai.tree import Tree, column, read_parquet

CLIP_US = 20_000_000
TEXT_KEYS = ("coc", "cot")
PRESENCE = ("metadata/feature_presence.parquet", "metadata/sensor_presence.parquet")
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Event:
    """A key frame with its reasoning: time_us i64 clip-relative, text as stored."""

    time_us: int
    text: str


@dataclass(frozen=True)
class Sample:
    """One key frame of one clip: a scene of the open-loop world.

    Attributes:
        scene_id: the clip's id; `CLIP@MICROSECONDS` for an event.
        clip_id, chunk, split: as in the index.
        t0_us: the key frame, clip-relative.
        cot: the recording's reasoning at it, or "".
        cluster: its kind of event, or "".

    """

    scene_id: str
    clip_id: str
    chunk: int
    split: str
    t0_us: int
    cot: str = ""
    cluster: str = ""


@dataclass
class ClipIndex:
    """Rows of a clip index: clip_id [N] text, valid [N] bool, chunk [N] i64, split [N] text."""

    clip_id: NDArray[np.object_]
    valid: NDArray[np.bool_]
    chunk: NDArray[np.int64]
    split: NDArray[np.object_]
    _row: dict[str, int] = field(default_factory=dict, repr=False)

    @staticmethod
    def read(path: Path) -> ClipIndex:
        """From a parquet file; CorruptFileError names a missing column or a clip that stands twice."""
        table = read_parquet(path)
        ids = np.array(column(table, "clip_id", str(path)).to_pylist(), object)
        count = len(ids)
        optional = lambda name, other: (  # noqa: E731
            np.array(table[name].to_pylist()) if name in table.column_names else np.full(count, other)
        )
        # Older curated indices call the column chunk_id.
        chunk = "chunk" if "chunk" in table.column_names else "chunk_id"
        index = ClipIndex(
            ids,
            optional("clip_is_valid", True).astype(bool),
            np.array(column(table, chunk, str(path)).to_pylist(), np.int64),
            optional("split", "train").astype(object),
        )
        index._row = {clip: row for row, clip in enumerate(ids.tolist())}
        if len(index._row) != count:
            twice = [clip for clip, times in Counter(ids.tolist()).items() if times > 1]
            raise CorruptFileError(f"{path} holds {len(twice)} clips twice, such as {twice[0]}")
        return index

    def __len__(self) -> int:
        return len(self.clip_id)

    def row(self, clip_id: str) -> int:
        """A clip's row; KeyError if it is not in the index."""
        return self._row[clip_id]


class Reasoning:
    """The table of reasoning: per clip its kind of event and all events, by time."""

    def __init__(self, path: Path) -> None:
        table = read_parquet(path)
        what = str(path)
        ids = column(table, "clip_id", what).to_pylist()
        events = column(table, "events", what).to_pylist()
        clusters = table["event_cluster"].to_pylist() if "event_cluster" in table.column_names else [""] * len(ids)
        self._events = dict(zip(ids, events, strict=True))
        self._clusters = dict(zip(ids, clusters, strict=True))
        self.path = path

    def __contains__(self, clip_id: str) -> bool:
        return clip_id in self._events

    @property
    def clips(self) -> list[str]:
        """Clips that stand in it."""
        return list(self._events)

    def cluster(self, clip_id: str) -> str:
        """A clip's kind of event."""
        return self._clusters[clip_id] or ""

    def events(self, clip_id: str) -> list[Event]:
        """All events of a clip, by time; the text is `coc`, else `cot`, byte for byte."""
        raw = self._events[clip_id]
        try:
            items: list[dict[str, Any]] = json.loads(raw) if isinstance(raw, str) else list(raw or [])
            found = [Event(int(item["event_start_timestamp"]), _text_of(item)) for item in items]
        except (json.JSONDecodeError, KeyError, TypeError) as err:
            raise CorruptFileError(
                f"{self.path}: the events of clip {clip_id} need event_start_timestamp and {' or '.join(TEXT_KEYS)}: "
                f"{type(err).__name__} {err}"
            ) from err
        return sorted(found, key=lambda event: event.time_us)


def _text_of(item: dict[str, Any]) -> str:
    for key in TEXT_KEYS:
        if item.get(key):
            return str(item[key])
    raise KeyError(f"neither {' nor '.join(TEXT_KEYS)} holds a text; there are {', '.join(map(str, item))}")


@dataclass(frozen=True)
class Span:
    """How much of a clip a sample needs around its key frame, in us: history and pictures before, the plan after."""

    before_us: int = 1_600_000
    after_us: int = 6_400_000

    def fits(self, time_us: int) -> bool:
        """Whether a clip has so much around a time."""
        return self.before_us <= time_us and time_us + self.after_us <= CLIP_US


class PaiDataset:
    """The samples of a dataset section, over all splits.

    Args:
        dataset: the section; `path` is a tree or a hub cache.
        span: what a sample needs around its key frame.

    Raises:
        ConfigError: names the setting to change: no tree, no index, unknown chunks, reasoning switched on by half,
            splits that overlap, no clip left (with the counts of each filter).

    """

    def __init__(self, dataset: DatasetSection, span: Span | None = None) -> None:
        if not dataset.path:
            raise ConfigError("give the dataset's folder: dataset.path=DIR", key="dataset.path")
        self.section, self.span = dataset, span or Span()
        self.tree = Tree(Path(dataset.path), dataset.revision)
        self.dropped: Counter[str] = Counter()
        self.problems: list[str] = []
        path = self.tree.root / dataset.clip_index
        if not path.is_file():
            made = sorted(p.name for p in self.tree.root.glob("clip_index*.parquet"))
            raise ConfigError(
                f"{path} does not exist; there are {', '.join(made) or 'none'}. A curated index is made by "
                "`alpagym pai curate`, one of clips with reasoning by `alpagym pai download --num-reasoning-clips`",
                key="dataset.clip_index",
            )
        self.index = ClipIndex.read(path)
        self.reasoning = self._reasoning()
        self._splits = self._deal()
        self._samples: dict[str, tuple[Sample, ...]] = {}

    # ------------------------------------------------------------ what users ask

    def samples(self, split: str) -> tuple[Sample, ...]:
        """Samples of a split, in the order of the index; ConfigError with the filters' counts if none is left."""
        if split not in SPLITS:
            raise ConfigError(f"must be one of {', '.join(SPLITS)}, got {split!r}", key="dataset.split")
        if split not in self._samples:
            self._samples[split] = self._list(split)
        return self._samples[split]

    def find(self, scene_id: str) -> Sample:
        """A sample by `CLIP` (its first key frame) or `CLIP@MICROSECONDS`.

        Raises:
            SceneError: an unknown clip, or a time at which no sample can stand; names the times there are.

        """
        clip_id, _, time = scene_id.partition("@")
        try:
            row = self.index.row(clip_id)
        except KeyError:
            raise SceneError(f"no clip {clip_id!r} in {self.section.clip_index} ({len(self.index)} clips)") from None
        there = self._of_clip(row)
        if not time:
            if not there:
                raise SceneError(f"clip {clip_id} has no key frame with {_spell(self.span)} around it")
            return there[0]
        for sample in there:
            if str(sample.t0_us) == time:
                return sample
        if self.reasoning is None and time.isdigit() and self._fits(int(time)):
            return Sample(scene_id, clip_id, int(self.index.chunk[row]), self._split_of(row), int(time))
        raise SceneError(f"scene {scene_id!r}: clip {clip_id} has the key frames {[s.t0_us for s in there]} us")

    @cached_property
    def presence(self) -> dict[str, dict[str, bool]]:
        """By feature and clip, whether it was recorded; empty where the tree has no such table."""
        for relative in PRESENCE:
            path = self.tree.root / relative
            if path.is_file():
                table = read_parquet(path)
                ids = column(table, "clip_id", str(path)).to_pylist()
                names = [name for name in table.column_names if name in self.tree.features]
                return {name: dict(zip(ids, map(bool, table[name].to_pylist()), strict=True)) for name in names}
        return {}

    def check(self, samples: Sequence[Sample], cameras: Sequence[str]) -> list[str]:
        """Problems that would stop the first batches: missing or torn files, clips without a camera.

        Opens every zip that the samples need, decodes nothing. One text a problem, each with its remedy.
        """
        problems: dict[str, None] = {}
        aliases = [("egomotion", "egomotion")]
        aliases += [(camera, alias) for camera in cameras for alias in ("video", "frame_timestamps")]
        for sample in samples:
            for text in self.problems_of(sample, aliases):
                problems[text] = None
        return list(problems)

    def problems_of(self, sample: Sample, aliases: Sequence[tuple[str, str]]) -> list[str]:
        """What one sample lacks, of (feature, member) pairs."""
        found: dict[str, None] = {}
        for feature, alias in aliases:
            if not self.presence.get(feature, {}).get(sample.clip_id, True):
                found[
                    f"clip {sample.clip_id} was recorded without {feature}: leave it out (dataset.skip_bad=true) or "
                    "the camera (policy.cameras)"
                ] = None
                continue
            try:
                self.tree.member(feature, sample.chunk, sample.clip_id, alias)
            except (SceneError, CorruptFileError) as err:
                found[str(err)] = None
        return list(found)

    def close(self) -> None:
        """Close all files."""
        self.tree.close()

    # ------------------------------------------------------------ filters

    def _reasoning(self) -> Reasoning | None:
        section = self.section
        if section.reasoning is None:
            if section.key_frame == "events":
                raise ConfigError(
                    "events are key frames of the reasoning table, and there is none; set "
                    "dataset.reasoning=reasoning/ood_reasoning.parquet too",
                    key="dataset.key_frame",
                )
            return None
        path = self.tree.root / section.reasoning
        if not path.is_file():
            raise ConfigError(
                f"{path} does not exist (it is relative to dataset.path); download it: alpagym pai download "
                "--reasoning ood_reasoning.parquet",
                key="dataset.reasoning",
            )
        return Reasoning(path)

    def _deal(self) -> dict[str, NDArray[np.bool_]]:
        """Rows of the index of each split. Chunks given for a split stand above the index's own column."""
        section, index = self.section, self.index
        if section.every_split:
            return {split: np.ones(len(index), bool) for split in SPLITS}
        chosen = {
            split: parse_chunks(getattr(section, f"{split}_chunks"), f"dataset.{split}_chunks") for split in SPLITS
        }
        rows = {}
        for split in SPLITS:
            chunks = chosen[split]
            rows[split] = index.split == split if chunks is None else np.isin(index.chunk, chunks)
            self._require_chunks(chunks, f"dataset.{split}_chunks")
        for a, b in (("train", "val"), ("train", "test"), ("val", "test")):
            shared = rows[a] & rows[b]
            if shared.any() and a == "train":
                text = (
                    f"{int(shared.sum())} clips are in {a} and in {b}: {_few(index.clip_id[shared])} (chunks "
                    f"{sorted(set(index.chunk[shared].tolist()))[:20]})"
                )
                if not section.allow_overlap:
                    raise ConfigError(f"{text}; allow it with dataset.allow_overlap=true", key=f"dataset.{b}_chunks")
                warnings.warn(text, stacklevel=4)
        return rows

    def _require_chunks(self, chunks: Sequence[int] | None, key: str) -> None:
        if chunks is None:
            return
        known = set(self.index.chunk.tolist())
        missing = [chunk for chunk in chunks if chunk not in known]
        if missing:
            raise ConfigError(
                f"chunks {_few(missing)} are not in {self.section.clip_index}, which has {_few(sorted(known))}", key=key
            )

    def _list(self, split: str) -> tuple[Sample, ...]:
        section, index = self.section, self.index
        chunks = parse_chunks(section.chunk_ids, "dataset.chunk_ids")
        self._require_chunks(chunks, "dataset.chunk_ids")
        in_chunks = np.ones(len(index), bool) if chunks is None else np.isin(index.chunk, chunks)
        kept = self._splits[split] & in_chunks & index.valid
        self._require_reasoning(kept)
        found = [sample for row in np.flatnonzero(kept).tolist() for sample in self._of_clip(row)]
        if not found:
            raise ConfigError(
                f"no sample of split {split!r} is left: {len(index)} clips in {section.clip_index}, "
                f"{int(self._splits[split].sum())} of the split, {int((self._splits[split] & in_chunks).sum())} of "
                f"those in chunk_ids={section.chunk_ids}, {int(kept.sum())} of those valid, with key frames: "
                f"{len(found)}",
                key="dataset.split",
            )
        return tuple(found)

    def _require_reasoning(self, kept: NDArray[np.bool_]) -> None:
        """Every clip stands in the table; with the default key frame every clip has an event exactly there."""
        if self.reasoning is None:
            return
        ids = self.index.clip_id[kept].tolist()
        absent = [clip for clip in ids if clip not in self.reasoning]
        if absent and not self.section.skip_bad:
            raise ConfigError(
                f"{len(absent)} of {len(ids)} clips have no row in {self.section.reasoning}, such as {absent[0]}; take "
                "an index of clips with reasoning (dataset.clip_index=clip_index_reasoning_mini.parquet) or leave them "
                "out (dataset.skip_bad=true)",
                key="dataset.clip_index",
            )
        self.dropped["without reasoning"] = len(absent)
        if self.section.key_frame == "default":
            for clip in ids:
                times = [event.time_us for event in self.reasoning.events(clip)] if clip in self.reasoning else []
                if times and self.section.key_frame_us not in times:
                    raise ConfigError(
                        f"clip {clip} has reasoning at {', '.join(map(str, times))} us, not at the fixed key frame "
                        f"{self.section.key_frame_us} us; set dataset.key_frame=events, or dataset.reasoning=null",
                        key="dataset.key_frame",
                    )

    def _of_clip(self, row: int) -> list[Sample]:
        clip, chunk, split = str(self.index.clip_id[row]), int(self.index.chunk[row]), self._split_of(row)
        section = self.section
        if self.reasoning is None:
            at = section.key_frame_us
            return [Sample(clip, clip, chunk, split, at)] if self._fits(at) else []
        if clip not in self.reasoning:
            return []
        events = [event for event in self.reasoning.events(clip) if self._fits(event.time_us)]
        if section.key_frame == "default":
            events = [event for event in events if event.time_us == section.key_frame_us]
        elif section.events == "first":
            events = events[:1]
        cluster = self.reasoning.cluster(clip)
        return [Sample(f"{clip}@{e.time_us}", clip, chunk, split, e.time_us, e.text, cluster) for e in events]

    def _split_of(self, row: int) -> str:
        return next((split for split in SPLITS if self._splits[split][row]), "")

    def _fits(self, time_us: int) -> bool:
        return self.span.fits(time_us)


def _few(items: Any, most: int = 8) -> str:
    listed = list(items)
    return ", ".join(map(str, listed[:most])) + (f", … ({len(listed)} in all)" if len(listed) > most else "")


def _spell(span: Span) -> str:
    return f"{span.before_us * 1e-6} s before and {span.after_us * 1e-6} s after"
