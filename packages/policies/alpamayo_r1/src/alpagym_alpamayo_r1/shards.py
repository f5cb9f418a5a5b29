"""Weights in files: where each tensor lies, what its header says, and writing new shards.

Three sources look alike (`Source`): a directory of safetensors with an index, one safetensors file, and the per-rank
`.pth` files that a sharded trainer leaves. All are mapped into memory and give one tensor at a time. Pickles are opened
with `weights_only=True`, which builds tensors and nothing else; an index may name plain files beside it only.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from alpagym_plugins import ConfigError
from alpagym_runtime.errors import CorruptFileError
from alpagym_runtime.files import read_json, write_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LISTED = 12
_RANK_FILE = re.compile(r"model_rank_(\d+)\.pth")
_SHARD_FILE = re.compile(r"model-\d{5}-of-\d{5}\.safetensors|model\.safetensors")
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Wrappers of trainers, wherever they stand in a name.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_PREFIXES = ("reasoning_vla.", "module.")


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of a tensor."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of its data."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


class Source(Protocol):
    """Tensors by name, in files."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """What the headers say."""
        ...

    def tensor(self, name: str) -> Tensor:
        """One whole tensor, on the CPU, in the dtype of its file."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


def listing(names: Iterable[str]) -> str:
    """The first names of many, for a message."""
    found = sorted(names)
    more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
    return ", ".join(found[:LISTED]) + more


class SafetensorsSource:
    """A checkpoint directory (index or single file), or one safetensors file."""

    def __init__(self, place: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._stack = ExitStack()
        folder, wanted = _files(place)
        self.folder = folder
        self.files = sorted(set(wanted.values())) if wanted is not None else [place.name if place.is_file() else SINGLE]
        missing = [name for name in self.files if not (folder / name).is_file()]
        if missing:
            lost = [] if wanted is None else [name for name, file in wanted.items() if file in missing]
            raise CorruptFileError(f"{folder} lacks {listing(missing)}, and with them {len(lost)} tensors: "
                                   f"{listing(lost)}")  # fmt: skip
        self.infos: dict[str, TensorInfo] = {}
        self._open: dict[str, Any] = {}
        twice = []
        for file in self.files:
            try:
                handle = self._stack.enter_context(safe_open(folder / file, framework="pt", device="cpu"))
                for name in handle.keys():  # noqa: SIM118 (no mapping)
                    part = handle.get_slice(name)
                    if name in self.infos:
                        twice.append(name)
                    self.infos[name] = TensorInfo(file, _DTYPES[part.get_dtype()], tuple(part.get_shape()))
            except (SafetensorError, OSError, KeyError) as err:
                size = (folder / file).stat().st_size
                raise CorruptFileError(f"{folder / file} ({size} bytes) is not whole: {err}; fetch it again") from err
            self._open[file] = handle
        if twice:
            raise CorruptFileError(f"{folder}: in two shards: {listing(twice)}")
        if wanted is not None:
            _compare_with_index(folder, wanted, self.infos)

    def tensor(self, name: str) -> Tensor:
        """See `Source`."""
        return self._open[self.infos[name].file].get_tensor(name)

    def close(self) -> None:
        """See `Source`."""
        self._open.clear()
        self._stack.close()


class RankSource:
    """`model_rank_<r>.pth` of all ranks of a 1-D mesh, joined by name; placements are Shard or Replicate.

    Files are memory-mapped: a tensor is joined when it is asked for. Trainer prefixes are dropped from the names.
    """

    def __init__(self, folder: Path) -> None:
        found = {int(match[1]): path for path in folder.iterdir() if (match := _RANK_FILE.fullmatch(path.name))}
        if not found:
            raise ConfigError(f"{folder} has no model_rank_<r>.pth")
        lost = sorted(set(range(max(found) + 1)) - found.keys())
        if lost:
            raise CorruptFileError(f"{folder} lacks the files of ranks {lost}")
        self._ranks = [_load_pickle(found[rank]) for rank in range(len(found))]
        names = [set(values) for values in self._ranks]
        differ = set[str]().union(*names) - names[0].intersection(*names)
        if differ:
            raise CorruptFileError(f"{folder}: not in every rank's file: {listing(differ)}")
        self.infos: dict[str, TensorInfo] = {}
        self._names: dict[str, str] = {}
        for raw, value in self._ranks[0].items():
            name = clean_name(raw)
            if name in self._names:
                raise CorruptFileError(f"{folder}: {raw} and {self._names[name]} are both {name}")
            self._names[name] = raw
            self.infos[name] = TensorInfo(found[0].name, value.dtype, tuple(value.shape))
        wrong = [name for name, raw in self._names.items() if not self._ranks_fit(raw)]
        if wrong:
            raise CorruptFileError(
                f"{folder}: the parts of {len(wrong)} tensors do not belong to their files' ranks (files swapped, or "
                f"from runs of another size): {listing(wrong)}"
            )

    def tensor(self, name: str) -> Tensor:
        """See `Source`; plain and replicated tensors must be equal in all files."""
        from torch.distributed.tensor import DTensor, Shard

        parts = [values[self._names[name]] for values in self._ranks]
        first = parts[0]
        if isinstance(first, DTensor) and isinstance(first.placements[0], Shard):
            return torch.cat([_local(part) for part in parts], first.placements[0].dim)
        whole = [_local(part) for part in parts]
        if not all(same_bits(whole[0], other) for other in whole[1:]):
            raise CorruptFileError(f"{name} is replicated, but the ranks hold different values")
        return whole[0]

    def close(self) -> None:
        """See `Source`."""
        self._ranks.clear()

    def _ranks_fit(self, raw: str) -> bool:
        """Placements are readable, and every rank's part is the one that its file's number says."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        parts = [values[raw] for values in self._ranks]
        first = parts[0]
        if not isinstance(first, DTensor):
            return all(not isinstance(p, DTensor) and p.shape == first.shape and p.dtype == first.dtype for p in parts)
        for rank, part in enumerate(parts):
            if not isinstance(part, DTensor) or part.shape != first.shape or part.dtype != first.dtype:
                return False
            if part.placements != first.placements or len(part.placements) != 1:
                return False
            placement, mesh = part.placements[0], part.device_mesh
            if mesh.size() != len(parts) or tuple(mesh.get_coordinate() or ()) != (rank,):
                return False
            if type(placement) is Shard:
                # torch.chunk's sizes, the last ones smaller or empty.
                length = part.shape[placement.dim]
                step = -(-length // len(parts))
                size = max(0, min(step, length - rank * step))
                expected = (*part.shape[: placement.dim], size, *part.shape[placement.dim + 1 :])
            elif type(placement) is Replicate:
                expected = tuple(part.shape)
            else:
                raise CorruptFileError(f"{raw}: the placement {placement} is not read; Shard and Replicate are")
            if tuple(_local(part).shape) != expected:
                return False
        return True


def open_source(place: Path) -> SafetensorsSource | RankSource:
    """What lies at a place: a rank folder, a checkpoint directory, or a safetensors file.

    Raises:
        ConfigError: nothing of the kind is there.
        CorruptFileError: a file is cut, missing or swapped.

    """
    if place.is_dir() and any(_RANK_FILE.fullmatch(path.name) for path in place.iterdir()):
        return RankSource(place)
    return SafetensorsSource(place)


def clean_name(name: str) -> str:
    """A tensor's name without what trainers wrap around it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _local(part: Any) -> Tensor:
    """This rank's part; `to_local` would want a process group."""
    return getattr(part, "_local_tensor", part)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Same shape, dtype and bytes; NaNs compare by their bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


# ---------------------------------------------------------------- writing


def write_shards(
    folder: Path, infos: Mapping[str, TensorInfo], tensor: Callable[[str], Tensor], max_shard_bytes: int
) -> dict[str, str]:
    """Write tensors as numbered shards with an index, one shard in memory at a time.

    Args:
        folder: exists; files in it are replaced.
        infos: names, sizes and order.
        tensor: gives a tensor when its shard is due.
        max_shard_bytes: a tensor that is larger gets a shard of its own.

    Returns:
        Name of the file of each tensor.

    """
    from safetensors.torch import save_file

    shards: list[list[str]] = [[]]
    size = 0
    for name, info in infos.items():
        if shards[-1] and size + info.bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += info.bytes
    where: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        # clone: two names may share storage, and a file's storage is read-only.
        tensors = {name: tensor(name).detach().contiguous().cpu().clone() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
        where |= dict.fromkeys(names, file)
    write_json(folder / INDEX, {"metadata": {"total_size": sum(i.bytes for i in infos.values())}, "weight_map": where})
    return where


def sha256(file: Path) -> str:
    """Hash of a file's bytes, hexadecimal."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def parse_size(text: str) -> int:
    """Bytes of `4GB`, `500MB`, `1GiB` or a plain number.

    Raises:
        ConfigError: it is none of these.

    """
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise ConfigError(f"must be a size such as 4GB, got {text!r}", key="max_shard_size")
    base = 1024 if match[3] else 1000
    return int(match[1]) * base ** ("KMGT".index(match[2].upper()) + 1 if match[2] else 0)


# ---------------------------------------------------------------- reading


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def _files(place: Path) -> tuple[Path, dict[str, str] | None]:
    """Folder, and tensor name -> file name where there is an index."""
    if place.is_file():
        return place.parent, None
    if (place / INDEX).is_file():
        index = read_json(place / INDEX)
        wanted = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(wanted, dict) or not wanted:
            raise CorruptFileError(f"{place / INDEX} has no weight_map")
        for name, file in wanted.items():
            if not isinstance(file, str) or not _SAFE_NAME.fullmatch(file):
                raise CorruptFileError(f"{place / INDEX}: {name} lies in {file!r}, which is no plain file name")
        return place, wanted
    if (place / SINGLE).is_file():
        return place, None
    raise ConfigError(f"{place} holds no weights: neither {INDEX} nor {SINGLE} nor model_rank_<r>.pth")


def _compare_with_index(folder: Path, wanted: Mapping[str, str], found: Mapping[str, TensorInfo]) -> None:
    problems = []
    lost = wanted.keys() - found.keys()
    if lost:
        problems.append(f"in the index but in no shard: {listing(lost)}")
    extra = found.keys() - wanted.keys()
    if extra:
        problems.append(f"in a shard but not in the index: {listing(extra)}")
    moved = [name for name in wanted.keys() & found.keys() if wanted[name] != found[name].file]
    if moved:
        problems.append(f"in another shard than the index says (swapped?): {listing(moved)}")
    if problems:
        raise CorruptFileError(f"{folder}: " + "; ".join(problems))


def _load_pickle(path: Path) -> dict[str, Tensor]:
    import torch.distributed.tensor  # registers DTensor with the safe loader

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    # torch raises pickle's own UnpicklingError, and pickle is imported nowhere here.
    except Exception as err:
        reason = str(err).splitlines()[0]
        raise CorruptFileError(f"{path} is no file of plain tensors, and nothing else is loaded: {reason}") from err
    if isinstance(data, dict) and isinstance(data.get("model"), dict):
        data = data["model"]
    if not isinstance(data, dict) or not all(isinstance(value, Tensor) for value in data.values()):
        raise CorruptFileError(f"{path} must hold tensors by name")
    return data


def shard_files(names: Sequence[str]) -> list[str]:
    """Those of the names that are weights in safetensors."""
    return [name for name in names if _SHARD_FILE.fullmatch(name)]
