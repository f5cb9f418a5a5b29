"""Weights on their way to the workers: `workers/weights/<number>.safetensors` in the run directory, whole or absent.

Numbers only rise: a publication may bring back older weights (the best on validation), whose version then is an older
one. The file's metadata holds the version and a digest of the tensors, which a worker compares: no episode carries a
version that its worker never had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alpagym_runtime.errors import CorruptFileError
from alpagym_runtime.files import replacing
from alpagym_runtime.rollouts.wire import FOLDER
from alpagym_runtime.types import TrainablePolicy

if TYPE_CHECKING:
    from torch import Tensor

KEPT = 2
"""Publications that stay: a worker may just be reading the last but one."""


def _path(directory: Path, number: int) -> Path:
    return directory / FOLDER / "weights" / f"{number:09d}.safetensors"


class Publisher:
    """The trainer's side.

    Args:
        directory: the run's.

    Attributes:
        number: of the last publication.

    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._digest = ""
        self.number = 0

    def publish(self, policy: TrainablePolicy) -> None:
        """Write the policy's present weights under the next number, unless they are the last ones.

        Raises:
            OSError: no room; names the file.

        """
        from safetensors.torch import save_file

        tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in policy.module.state_dict().items()}
        digest = _digest(tensors, policy.version)
        if digest == self._digest:
            return
        path = _path(self._directory, self.number + 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=False) as temporary:
            save_file(tensors, temporary, {"version": str(policy.version), "digest": digest})
        self.number, self._digest = self.number + 1, digest
        _path(self._directory, self.number - KEPT).unlink(missing_ok=True)


def take(directory: Path, at_least: int, policy: TrainablePolicy) -> int:
    """Give a policy the newest publication, between two forwards; returns its number.

    Raises:
        CorruptFileError: there is none with this number or a later one, it is cut, or holds other tensors than were
            published.

    """
    for _ in range(3):
        found = sorted(int(path.stem) for path in _path(directory, 0).parent.glob("[0-9]*.safetensors"))
        if not found or found[-1] < at_least:
            break
        try:
            _take(_path(directory, found[-1]), policy)
        except FileNotFoundError:
            continue  # replaced by later ones since
        return found[-1]
    raise CorruptFileError(f"weights {at_least} are not in {_path(directory, 0).parent}")


def _take(path: Path, policy: TrainablePolicy) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            about: dict[str, Any] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as err:
        raise CorruptFileError(f"{path} cannot be read: {err}") from err
    version = int(about.get("version", -1))
    if about.get("digest") != _digest(tensors, version):
        raise CorruptFileError(f"{path} does not hold the weights that were published under its name")
    policy.load(tensors, version)


def _digest(tensors: Mapping[str, Tensor], version: int) -> str:
    """SHA-256 of names, types, shapes and bytes."""
    import torch

    found = hashlib.sha256(str(version).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        # numpy has no bfloat16, bytes every type has.
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
