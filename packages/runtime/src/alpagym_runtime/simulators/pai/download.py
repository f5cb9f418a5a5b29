"""Fetching parts of the dataset: which files a choice means, whether they fit on the disk, and only then the files.

The hub is behind a small protocol, so that everything but the transfer is tested without it. An interrupted download
goes on where it stopped; what is on disk with the right size is not fetched again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from alpagym_plugins import nearest
from alpagym_runtime.errors import ConfigError
from alpagym_runtime.files import replacing
from alpagym_runtime.simulators.pai.clips import ClipIndex, PaiDataset, Reasoning, Span
from alpagym_runtime.simulators.pai.tree import REPOSITORY, Tree, column, read_parquet

METADATA = ("features.csv", "clip_index.parquet", "metadata/**")
REASONING_FOLDER = "reasoning"
REASONING_TABLE = "ood_reasoning.parquet"
REASONING_INDEX = "clip_index_reasoning_mini.parquet"
SPARE_BYTES = 2**30


class Hub(Protocol):
    """Where the files come from."""

    def fetch(self, patterns: Sequence[str], folder: Path) -> None:
        """Bring files below `folder`, whole; those that are there already stay."""
        ...

    def sizes(self, paths: Sequence[str]) -> dict[str, int]:
        """Bytes of each path that exists there."""
        ...


@dataclass
class DownloadChoice:
    """What to fetch.

    Attributes:
        chunks: numbers; None means all.
        features: features by name, of any directory.
        reasoning: files below `reasoning/`.
        only_reasoning_chunks: only chunks that hold clips with reasoning; with `reasoning_clips` those of the sample.
        reasoning_clips: so many clips with a usable event, sampled; they become `clip_index_reasoning_mini.parquet`.
        seed: of the sample.

    """

    chunks: list[int] | None = None
    features: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    only_reasoning_chunks: bool = False
    reasoning_clips: int = 0
    seed: int = 11


@dataclass(frozen=True)
class DownloadPlan:
    """Files by relative path with their bytes; `missing_bytes` of them are not on disk, `free_bytes` there are."""

    files: dict[str, int]
    missing_bytes: int
    free_bytes: int
    chunks: list[int]
    clips: list[str]

    @property
    def fits(self) -> bool:
        """Whether what is missing fits, with a spare GiB."""
        return self.missing_bytes + SPARE_BYTES <= self.free_bytes


def plan_download(hub: Hub, folder: Path, choice: DownloadChoice) -> DownloadPlan:
    """Fetch the small tables, then say what the choice means.

    Raises:
        ConfigError: an unknown feature or chunk, a file that the hub lacks, or fewer clips with reasoning than wanted.

    """
    folder.mkdir(parents=True, exist_ok=True)
    hub.fetch(METADATA, folder)
    tree = Tree(folder)
    for name in choice.features:
        if name not in tree.features:
            near = nearest(name, tree.features)
            hint = f"; did you mean {near!r}?" if near else f"; there are {', '.join(sorted(tree.features))}"
            raise ConfigError(f"no feature {name!r}{hint}", key="features")
    index = ClipIndex.read(folder / "clip_index.parquet")
    chunks, clips = _chunks(hub, folder, index, choice)
    paths = [tree.features[name].path(chunk) for name in choice.features for chunk in chunks]
    paths += [f"{REASONING_FOLDER}/{name}" for name in choice.reasoning]
    sizes = hub.sizes(paths)
    absent = [path for path in paths if path not in sizes]
    if absent:
        raise ConfigError(f"the hub has no {absent[0]} ({len(absent)} of {len(paths)} files)", key="chunk_ids")
    missing = sum(size for path, size in sizes.items() if not _is_there(folder / path, size))
    return DownloadPlan(sizes, missing, shutil.disk_usage(folder).free, chunks, clips)


def carry_out(hub: Hub, folder: Path, plan: DownloadPlan, note: Callable[[str], None] = print) -> None:
    """Fetch a plan's files, a chunk after the other, and write the index of its sampled clips.

    Raises:
        ConfigError: they do not fit on the disk; nothing was fetched.

    """
    if not plan.fits:
        raise ConfigError(
            f"{plan.missing_bytes / 1e9:.1f} GB are missing and {folder} has {plan.free_bytes / 1e9:.1f} GB free; take "
            "fewer chunks or cameras, or another --output-dir",
            key="output_dir",
        )
    left = [path for path, size in plan.files.items() if not _is_there(folder / path, size)]
    for i, path in enumerate(left):
        note(f"{i + 1}/{len(left)} {path} ({plan.files[path] / 1e6:.1f} MB)")
        hub.fetch([path], folder)
    if plan.clips:
        select_rows(folder / "clip_index.parquet", folder / REASONING_INDEX, plan.clips)


def _is_there(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _chunks(hub: Hub, folder: Path, index: ClipIndex, choice: DownloadChoice) -> tuple[list[int], list[str]]:
    known = sorted(set(index.chunk.tolist()))
    chunks = known if choice.chunks is None else choice.chunks
    unknown = [chunk for chunk in chunks if chunk not in known]
    if unknown:
        raise ConfigError(f"there are chunks {known[0]} to {known[-1]}, not {unknown[0]}", key="chunk_ids")
    if not (choice.only_reasoning_chunks or choice.reasoning_clips):
        return chunks, []
    hub.fetch([f"{REASONING_FOLDER}/{REASONING_TABLE}"], folder)
    usable = clips_with_reasoning(folder / REASONING_FOLDER / REASONING_TABLE, index, chunks)
    if len(usable) < max(choice.reasoning_clips, 1):
        raise ConfigError(
            f"{len(usable)} clips of these chunks have reasoning with room around it, {choice.reasoning_clips} wanted",
            key="num_reasoning_clips",
        )
    if choice.reasoning_clips:
        usable = draw_clips(usable, choice.reasoning_clips, choice.seed)
    rows = [index.row(clip) for clip in usable]
    return sorted({int(index.chunk[row]) for row in rows}), usable if choice.reasoning_clips else []


def clips_with_reasoning(table: Path, index: ClipIndex, chunks: Sequence[int] | None = None) -> list[str]:
    """Valid clips of the index, in its order, with an event that has 1.6 s before and 6.4 s after it."""
    reasoning, span = Reasoning(table), Span()
    wanted = None if chunks is None else set(chunks)
    found = []
    for row, clip in enumerate(index.clip_id.tolist()):
        if not index.valid[row] or clip not in reasoning or (wanted and int(index.chunk[row]) not in wanted):
            continue
        if any(span.fits(event.time_us) for event in reasoning.events(clip)):
            found.append(clip)
    return found


def draw_clips(clips: Sequence[str], count: int, seed: int) -> list[str]:
    """A sample without replacement, in the order of `clips`; ConfigError where there are fewer."""
    if count > len(clips):
        raise ConfigError(f"there are {len(clips)} clips to draw from, {count} are wanted", key="num_samples")
    chosen = np.random.default_rng(seed).choice(len(clips), count, replace=False)
    return [clips[i] for i in sorted(chosen.tolist())]


def select_rows(source: Path, target: Path, clips: Sequence[str]) -> None:
    """Write an index of some clips of another one, whole or not at all; columns and types stay."""
    import pyarrow.parquet as pq

    table = read_parquet(source)
    place = {clip: row for row, clip in enumerate(column(table, "clip_id", str(source)).to_pylist())}
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        pq.write_table(table.take(pa.array([place[clip] for clip in clips], pa.int64())), temporary)


def curate(
    index_path: Path,
    target: Path,
    count: int,
    chunks: Sequence[int] | None = None,
    reasoning_table: Path | None = None,
    seed: int = 11,
) -> list[str]:
    """Write an index of `count` clips of another one; returns them.

    Args:
        index_path: of all clips.
        target: of the sample; replaced if it exists.
        count: how many clips; 0 takes all that are left by the filters.
        chunks: only clips of these; ConfigError where the index lacks one.
        reasoning_table: only clips with a usable event in this table.
        seed: of the sample.

    """
    if not index_path.is_file():
        raise ConfigError(f"{index_path} does not exist", key="clip_index_path")
    index = ClipIndex.read(index_path)
    known = sorted(set(index.chunk.tolist()))
    unknown = [chunk for chunk in chunks or () if chunk not in known]
    if unknown:
        raise ConfigError(f"{index_path} has the chunks {known[0]} to {known[-1]}, not {unknown[0]}", key="chunk")
    if reasoning_table is not None:
        clips = clips_with_reasoning(reasoning_table, index, chunks)
    else:
        inside = index.valid if chunks is None else index.valid & np.isin(index.chunk, chunks)
        clips = [str(clip) for clip in index.clip_id[inside]]
    chosen = draw_clips(clips, count, seed) if count else clips
    if not chosen:
        raise ConfigError(f"no clip of {index_path} is left by these filters", key="chunk")
    select_rows(index_path, target, chosen)
    return chosen


class HuggingFaceHub:
    """The real hub, through `huggingface_hub`; needs a token whose owner has accepted the dataset's licence."""

    def __init__(self, revision: str = "main") -> None:
        try:
            import huggingface_hub
            from huggingface_hub import constants, errors
        except ImportError as err:
            raise ConfigError("the download needs huggingface_hub: pip install 'alpagym-runtime[pai]'") from err
        if constants.HF_HUB_OFFLINE:
            raise ConfigError("HF_HUB_OFFLINE is set; unset it for the download")
        self._hub: Any = huggingface_hub
        self._errors: Any = errors
        self._revision = revision

    def fetch(self, patterns: Sequence[str], folder: Path) -> None:
        """See `Hub`; resumes."""
        where = {"repo_id": REPOSITORY, "repo_type": "dataset", "revision": self._revision, "local_dir": folder}
        if any("*" in pattern for pattern in patterns):
            self._call(self._hub.snapshot_download, **where, allow_patterns=list(patterns))
            return
        for name in patterns:
            self._call(self._hub.hf_hub_download, **where, filename=name)

    def sizes(self, paths: Sequence[str]) -> dict[str, int]:
        """See `Hub`."""
        found: dict[str, int] = {}
        for start in range(0, len(paths), 100):
            part = list(paths[start : start + 100])
            infos = self._call(
                self._hub.HfApi().get_paths_info, REPOSITORY, part, repo_type="dataset", revision=self._revision
            )
            found |= {info.path: int(info.size) for info in infos if hasattr(info, "size")}
        return found

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        errors = self._errors
        try:
            return function(*args, **kwargs)
        except errors.GatedRepoError as err:
            raise ConfigError(
                f"{REPOSITORY} is gated: accept its licence on the hub's page, then `hf auth login`"
            ) from err
        except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError) as err:
            raise ConfigError(
                f"the hub did not answer: {str(err).splitlines()[0]}; run the same command again, it goes on where it "
                "stopped"
            ) from err


def check_tree(data: PaiDataset, splits: Sequence[str], cameras: Sequence[str], decode: bool) -> list[str]:
    """What is wrong with a tree's samples: files, motion, times and, with `decode`, the pictures at each key frame."""
    from alpagym_runtime.errors import CorruptFileError, OutOfRangeError, SceneError
    from alpagym_runtime.simulators.pai.samples import Layout, read_motion, read_pictures
    from alpagym_runtime.simulators.pai.video import ClipVideo

    layout = Layout(dict.fromkeys(cameras, (0, 0)))
    samples = dict.fromkeys(sample for split in splits for sample in data.samples(split))
    problems: dict[str, None] = dict.fromkeys(data.check(list(samples), cameras))
    for sample in samples:
        for camera in ("", *cameras):
            try:
                if not camera:
                    read_motion(data.tree, sample, layout)
                elif decode:
                    read_pictures(data.tree, sample, camera, layout)
                else:
                    video = ClipVideo.open(data.tree, camera, sample.chunk, sample.clip_id)
                    video.numbers(np.array([sample.t0_us - layout.before_us, sample.t0_us]))
            except (SceneError, CorruptFileError, OutOfRangeError) as err:
                problems[str(err) if sample.clip_id in str(err) else f"clip {sample.clip_id}: {err}"] = None
    return list(problems)
