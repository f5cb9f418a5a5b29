"""Checkpoint directories: what must be in one, checking that it is, and loading it bit for bit.

Nothing is ever loaded "non-strictly": a tensor that is missing, extra or of another shape is an error that names it. A
part that would keep random values (the action expert of an export, say) therefore cannot pass unnoticed. Only constants
that the config determines (`action_space.*`, Fourier frequencies) may be present or absent.
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alpagym_alpamayo_r1.architecture import Architecture, load_architecture
from alpagym_alpamayo_r1.model import AlpamayoModel
from alpagym_alpamayo_r1.shards import (
    INDEX,
    SINGLE,
    SafetensorsSource,
    Source,
    TensorInfo,
    listing,
    same_bits,
    sha256,
    write_shards,
)
from alpagym_alpamayo_r1.vocabulary import check_tokenizer, load_tokenizer
from alpagym_plugins import ConfigError
from alpagym_runtime.errors import CorruptFileError
from alpagym_runtime.files import read_json, sync_folder, write_json

PROVENANCE = "alpagym_provenance.json"
EXPERT_PARTS = ("expert.", "action_in_proj.", "action_out_proj.")
HEAD, EMBEDDING = "vlm.lm_head.weight", "vlm.model.language_model.embed_tokens.weight"
_FREQUENCIES = re.compile(r"action_in_proj\.(sinus\.\d+|timestep_fourier_encoder)\.freqs")
_CONSTANTS = re.compile(r"action_space\.(accel|curvature)_(mean|std)")
# bfloat16 keeps 8 bits of a constant.
CONSTANT_TOLERANCE = 2.0**-7


@dataclass
class Findings:
    """What a check of a directory found; `problems` is empty where all is well.

    Attributes:
        directory: what was checked.
        layout: 1, 1.5 or training.
        tensors: how many.
        bytes: their size.
        has_expert: the action expert's weights are there.
        problems: one sentence each, with names.
        notes: what else is worth saying.

    """

    directory: Path
    layout: str
    tensors: int = 0
    bytes: int = 0
    has_expert: bool = False
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raise if there are problems.

        Raises:
            CorruptFileError: names them all.

        """
        if self.problems:
            raise CorruptFileError(f"{self.directory}: " + "; ".join(self.problems))


def expected_shapes(architecture: Architecture, *, with_expert: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all weights of an architecture; nothing is allocated."""
    with torch.device("meta"):
        model = AlpamayoModel(architecture, with_expert=with_expert)
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def compare(
    infos: Mapping[str, TensorInfo], architecture: Architecture, *, with_expert: bool, allow_extra: tuple[str, ...] = ()
) -> list[str]:
    """Problems of names and shapes against an architecture, one sentence each.

    Args:
        infos: what is there.
        architecture: what should be.
        with_expert: the action expert is part of it.
        allow_extra: names that may be there besides.

    """
    expected = expected_shapes(architecture, with_expert=with_expert)
    needed = set(expected) - ({HEAD} if architecture.tied else set())
    problems = []
    if lost := needed - infos.keys():
        problems.append(f"{len(lost)} missing: {listing(lost)}")
    extra = {name for name in infos.keys() - expected.keys() if not is_constant(name)} - set(allow_extra)
    if extra:
        problems.append(f"{len(extra)} that the config does not know: {listing(extra)}")
    shapes = [
        f"{name} {list(infos[name].shape)} in place of {list(expected[name])}"
        for name in expected.keys() & infos.keys()
        if infos[name].shape != expected[name]
    ]
    if shapes:
        problems.append(f"{len(shapes)} of another shape: {listing(shapes)}")
    return problems


def is_constant(name: str) -> bool:
    """A value that the config determines; some releases store it, nothing is read from it."""
    return bool(_CONSTANTS.fullmatch(name) or _FREQUENCIES.fullmatch(name))


def check_constants(source: Source, architecture: Architecture) -> list[str]:
    """Stored constants that contradict the config."""
    problems = []
    for name in source.infos:
        if _CONSTANTS.fullmatch(name):
            said = float(architecture.action_space.get(name.partition(".")[2], math.nan))
            stored = float(source.tensor(name).float())
            if not abs(stored - said) <= CONSTANT_TOLERANCE * abs(said):
                problems.append(f"{name} is {stored}, the config says {said}")
    return problems


def check_tie(source: Source, architecture: Architecture) -> list[str]:
    """Tied weights that differ."""
    both = architecture.tied and {HEAD, EMBEDDING} <= source.infos.keys()
    if both and not same_bits(source.tensor(HEAD), source.tensor(EMBEDDING)):
        return [f"{HEAD} and {EMBEDDING} are tied by the config, but differ"]
    return []


def holds_expert(infos: Mapping[str, TensorInfo], architecture: Architecture) -> bool:
    """The expert must be checked for: any of it is there, or the layout is a release."""
    any_part = any(name.startswith(EXPERT_PARTS) for name in infos)
    return any_part or architecture.layout.name != "training"


def verify(directory: Path, *, against: Path | None = None, read_all: bool = True) -> Findings:
    """Check a checkpoint directory; one tensor in memory at a time.

    Names and shapes against the config, shards against the index, tied weights, stored constants, the tokenizer's ids,
    hashes of the provenance where there is one, and, with `read_all`, that every number is finite.

    Args:
        directory: what to check.
        against: another directory that must hold the same tensors, bit for bit.
        read_all: read the data too, not only headers.

    Raises:
        ConfigError: no checkpoint, or its config is wrong.
        CorruptFileError: a shard is missing, cut or swapped.

    """
    architecture = load_architecture(directory)
    source = SafetensorsSource(directory)
    with contextlib.closing(source):
        with_expert = holds_expert(source.infos, architecture)
        found = Findings(directory, architecture.layout.name, len(source.infos), has_expert=with_expert)
        found.bytes = sum(info.bytes for info in source.infos.values())
        found.problems += compare(source.infos, architecture, with_expert=with_expert)
        found.problems += check_tie(source, architecture) + check_constants(source, architecture)
        if read_all:
            broken = [n for n in source.infos if not bool(torch.isfinite(source.tensor(n).float()).all())]
            if broken:
                found.problems.append(f"not finite: {listing(broken)}")
        found.problems += _check_hashes(directory)
        if (directory / "tokenizer_config.json").is_file():
            try:
                check_tokenizer(load_tokenizer(directory), architecture)
            except ConfigError as err:
                found.problems.append(str(err))
        else:
            found.notes.append("no tokenizer: convert adds it")
        if against is not None:
            found.problems += _differences(source, against, architecture)
    return found


def load_model(
    directory: Path, *, with_expert: bool | None = None, dtype: torch.dtype | None = None, attention: str = "sdpa"
) -> AlpamayoModel:
    """The model of a checkpoint directory, on the CPU, in evaluation mode; one shard is open at a time.

    Args:
        directory: a release's, a converted or an exported one.
        with_expert: build the action expert; None: if its weights are there.
        dtype: of floating weights; None keeps each file's own, bit for bit.
        attention: an implementation of transformers' attention.

    Raises:
        ConfigError: the config is wrong, or the expert was asked for and is not there.
        CorruptFileError: names what is missing, extra, swapped or of another shape.

    """
    from accelerate import init_empty_weights

    architecture = load_architecture(directory)
    source = SafetensorsSource(directory)
    with contextlib.closing(source):
        there = holds_expert(source.infos, architecture)
        if with_expert and not there:
            raise ConfigError(f"{directory} holds the backbone only: no expert.*, action_in_proj.*, action_out_proj.*")
        problems = compare(source.infos, architecture, with_expert=there)
        problems += check_tie(source, architecture) + check_constants(source, architecture)
        Findings(directory, architecture.layout.name, problems=problems).check()
        build = there if with_expert is None else with_expert
        # Buffers are made for real: they follow from the config and are in no file.
        with init_empty_weights(include_buffers=False):
            model = AlpamayoModel(architecture, with_expert=build, attention=attention)
        names = set(model.state_dict())
        for name in source.infos:
            if name in names:
                value = source.tensor(name)
                _assign(model, name, value.to(dtype) if dtype is not None and value.is_floating_point() else value)
        if architecture.tied:
            model.vlm.lm_head.weight = model.vlm.model.language_model.embed_tokens.weight
    left = [name for name, value in model.state_dict().items() if value.is_meta]
    assert not left, left
    return model.eval()


def load_backbone(model: AlpamayoModel, place: Path) -> None:
    """Replace a model's language model by that of another checkpoint (stage 1 of SFT), whole or not at all.

    Args:
        model: as its base was loaded; its other parts stay.
        place: a checkpoint directory or safetensors file, whose names begin with `vlm.`, or are those behind it.
            Tensors of an action expert are not looked at.

    Raises:
        ConfigError: names what is missing, unknown or of another shape; nothing was replaced.
        CorruptFileError: a file is missing or cut.

    """
    own = {name: value for name, value in model.state_dict().items() if name.startswith("vlm.")}
    with contextlib.closing(SafetensorsSource(place)) as source:
        prefix = "" if any(name.startswith("vlm.") for name in source.infos) else "vlm."
        names = {prefix + name: name for name in source.infos if not name.startswith(EXPERT_PARTS)}
        needed = own.keys() - ({HEAD} if model.architecture.tied else set())
        problems = []
        if lost := needed - names.keys():
            problems.append(f"{len(lost)} of {len(needed)} missing: {listing(lost)}")
        if extra := {name for name in names.keys() - own.keys() if not is_constant(name)}:
            problems.append(f"{len(extra)} unknown: {listing(extra)}")
        wrong = [n for n in needed & names.keys() if source.infos[names[n]].shape != tuple(own[n].shape)]
        if wrong:
            problems.append(f"{len(wrong)} of another shape: {listing(wrong)}")
        if empty := [name for name, value in own.items() if value.is_meta]:
            problems.append(f"{len(empty)} without memory in the model: {listing(empty)}")
        if problems:
            raise ConfigError(
                f"{place} is no language model for this one, and none of it was taken: {'; '.join(problems)}",
                key="trainer.stage1_path",
            )
        with torch.no_grad():
            for name in sorted(needed):
                own[name].copy_(source.tensor(names[name]))


def publish(run_directory: Path, policy: Any, *, write: bool) -> None:
    """Give each checkpoint of a run a directory `checkpoint-<step>` in the releases' layout, and take stale ones away.

    Weights are hard links to the run's own files where the filesystem has them, so nothing is written twice.

    Args:
        run_directory: with `checkpoints/step_<number>`.
        policy: an `AlpamayoPolicy`: its config and words go beside the weights.
        write: whether this process of a team writes.

    """
    if not write:
        return
    for rest in run_directory.glob(".partial-*/"):
        shutil.rmtree(rest)  # of a process that was killed
    steps = {int(place.name[5:]): place for place in (run_directory / "checkpoints").glob("step_" + "[0-9]" * 8)}
    there = {int(place.name[11:]): place for place in run_directory.glob("checkpoint-*") if place.name[11:].isdigit()}
    # A run that goes on makes a step again: links and copies have the time of the file that they are of.
    current = {step for step in there.keys() & steps.keys() if _made(there[step]) == _made(steps[step])}
    for step in there.keys() - current:
        shutil.rmtree(there[step])
    for step in steps.keys() - current:
        temporary = Path(tempfile.mkdtemp(prefix=".partial-", dir=run_directory))
        write_json(temporary / "config.json", policy.module.architecture.raw)
        policy.processor.save(temporary)
        weights, link = steps[step] / SINGLE, temporary / SINGLE
        try:
            link.hardlink_to(weights)
        except OSError:
            shutil.copy2(weights, link)
        with contextlib.closing(SafetensorsSource(weights)) as source:
            size = sum(info.bytes for info in source.infos.values())
            write_json(
                temporary / INDEX,
                {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(sorted(source.infos), SINGLE)},
            )
        temporary.chmod(0o755)
        temporary.replace(run_directory / f"checkpoint-{step}")


def _made(folder: Path) -> tuple[int, int]:
    """Size and time of a folder's weights."""
    info = (folder / SINGLE).stat()
    return info.st_size, info.st_mtime_ns


def write_weights(directory: Path, model: AlpamayoModel, *, max_shard_bytes: int) -> None:
    """Write a model's weights as shards; of tied ones, the embedding only."""
    state = model.state_dict()
    if model.architecture.tied:
        del state[HEAD]
    infos = {name: TensorInfo("", value.dtype, tuple(value.shape)) for name, value in state.items()}
    write_shards(directory, infos, state.__getitem__, max_shard_bytes)


@contextlib.contextmanager
def building(output: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder beside `output`, renamed to it if the block ends well and removed if not.

    Raises:
        ConfigError: `output` exists and may not be replaced.

    """
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise ConfigError(f"{output} is no directory; give another name")
    if output.is_dir() and any(output.iterdir()):
        if not overwrite:
            raise ConfigError(f"{output} exists and is not empty; give another name, or --overwrite")
        if not (output / "config.json").is_file():
            raise ConfigError(f"{output} is no checkpoint (no config.json): it is not overwritten")
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".partial-", dir=output.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        if output.exists():
            old = Path(tempfile.mkdtemp(prefix=".partial-", dir=output.parent))
            output.replace(old / "old")
            temporary.replace(output)
            shutil.rmtree(old)
        else:
            temporary.replace(output)
        sync_folder(output.parent)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)


def _assign(module: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    parent = module.get_submodule(path)
    if leaf in parent._parameters:
        parent._parameters[leaf] = nn.Parameter(value, requires_grad=value.is_floating_point())
    else:
        parent._buffers[leaf] = value


def _check_hashes(directory: Path) -> list[str]:
    file = directory / PROVENANCE
    if not file.is_file():
        return []
    stored: Any = read_json(file)
    hashes = stored.get("sha256", {}) if isinstance(stored, dict) else {}
    wrong = []
    for name, digest in hashes.items():
        path = directory / Path(name).name
        if not path.is_file() or sha256(path) != digest:
            wrong.append(name)
    return [f"not the bytes that {PROVENANCE} names: {listing(wrong)}"] if wrong else []


def _differences(source: SafetensorsSource, against: Path, architecture: Architecture) -> list[str]:
    problems = []
    other = SafetensorsSource(against)
    with contextlib.closing(other):
        mine, theirs = set(source.infos), set(other.infos)
        if architecture.tied:
            mine, theirs = mine - {HEAD}, theirs - {HEAD}
        if lost := theirs - mine:
            problems.append(f"only in {against}: {listing(lost)}")
        if extra := mine - theirs:
            problems.append(f"not in {against}: {listing(extra)}")
        differ = [n for n in sorted(mine & theirs) if not same_bits(source.tensor(n), other.tensor(n))]
        if differ:
            problems.append(f"{len(differ)} differ from {against}: {listing(differ)}")
    return problems
