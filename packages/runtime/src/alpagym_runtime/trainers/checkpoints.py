"""Checkpoints: a folder a step with safetensors and JSON, whole or absent.

torch is imported inside functions: evaluating a policy without weights needs none.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alpagym_runtime.errors import CorruptFileError
from alpagym_runtime.files import read_json, sync_folder, write_json

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

_NAME = re.compile(r"step_\d{8}")
BEST = "best"
INDEX = "model.safetensors.index.json"


@dataclass
class Checkpoint:
    """What training needs to go on exactly: weights, the optimiser's tensors, and where it stood."""

    weights: dict[str, Tensor]
    optimiser: dict[str, Tensor]
    state: dict[str, Any]


class CheckpointStore:
    """The checkpoints of a run: `step_<number>/{model.safetensors, optimizer.safetensors, state.json}`.

    Beside them `best/{model.safetensors, state.json}`: the weights that scored best on the validation scenes.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self._keep = folder, keep

    def save(self, step: int, checkpoint: Checkpoint) -> Path:
        """Write beside, then rename; older ones beyond `keep` go. An existing step is replaced."""
        files = {"model.safetensors": checkpoint.weights, "optimizer.safetensors": checkpoint.optimiser}
        place = self._write(f"step_{step:08d}", files, checkpoint.state)
        for stale in self.steps()[: -self._keep]:
            shutil.rmtree(self.folder / f"step_{stale:08d}")
        return place

    def save_best(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
        """Replace `best`; `state` says where the weights come from."""
        return self._write(BEST, {"model.safetensors": weights}, state)

    def best(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Weights and state of `best`; None where none was kept.

        Raises:
            CorruptFileError: a file is missing or cut.

        """
        place = self.folder / BEST
        return (_tensors(place / "model.safetensors"), _state(place)) if place.is_dir() else None

    def _write(self, name: str, files: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> Path:
        from safetensors.torch import save_file

        self.folder.mkdir(exist_ok=True)
        self._remove_partials()
        temporary = Path(tempfile.mkdtemp(prefix=".partial-", dir=self.folder))
        for file, tensors in files.items():
            save_file({key: tensor.contiguous().cpu() for key, tensor in tensors.items()}, temporary / file)
        write_json(temporary / "state.json", state)
        for written in temporary.iterdir():
            with written.open("rb") as handle:
                os.fsync(handle.fileno())
        place = self.folder / name
        if os.path.lexists(place):
            old = Path(tempfile.mkdtemp(prefix=".partial-", dir=self.folder))
            place.replace(old / "old")
        temporary.chmod(0o755)
        temporary.replace(place)
        sync_folder(self.folder)
        self._remove_partials()
        return place

    def _remove_partials(self) -> None:
        for rest in self.folder.glob(".partial-*"):
            if rest.is_dir() and not rest.is_symlink():
                shutil.rmtree(rest)
            else:
                rest.unlink()

    def steps(self) -> list[int]:
        """Steps that are there, oldest first."""
        if not self.folder.is_dir():
            return []
        names = [p.name for p in self.folder.iterdir() if _NAME.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]
        return sorted(int(name.removeprefix("step_")) for name in names)

    def latest(self) -> Path | None:
        """The newest one, or None."""
        steps = self.steps()
        return self.folder / f"step_{steps[-1]:08d}" if steps else None


def load_checkpoint(place: Path) -> Checkpoint:
    """Read a checkpoint folder.

    Raises:
        CorruptFileError: a file is missing or cut; names it and the remedy.

    """
    parts = []
    for name in ("model.safetensors", "optimizer.safetensors"):
        parts.append(_tensors(place / name))
    return Checkpoint(parts[0], parts[1], _state(place))


def _state(place: Path) -> dict[str, Any]:
    file = place / "state.json"
    if not file.is_file():
        raise CorruptFileError(f"{file} is missing; remove {place} and resume from an older checkpoint")
    state = read_json(file)
    if not isinstance(state, dict):
        raise CorruptFileError(f"{file} holds no mapping; remove {place}, resume from an older checkpoint")
    return state


def load_weights(path: Path) -> dict[str, Tensor]:
    """Weights from any place that holds them.

    Args:
        path: a checkpoint folder, a run directory (its newest checkpoint), an exported model's folder (one
            model.safetensors, or shards with their index), or a safetensors file.

    Raises:
        CorruptFileError: there are none, or they are not whole; says what is missing.

    """
    if path.is_dir() and (path / "checkpoints").is_dir():
        newest = CheckpointStore(path / "checkpoints", 1).latest()
        if newest is None:
            raise CorruptFileError(f"{path} has no checkpoint yet")
        path = newest
    if path.is_dir() and (path / INDEX).is_file() and not (path / "model.safetensors").is_file():
        return _shards(path)
    return _tensors(path / "model.safetensors" if path.is_dir() else path)


def _shards(folder: Path) -> dict[str, Tensor]:
    """The tensors of a model in several files, each from the file that the index names for it."""
    index = read_json(folder / INDEX)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CorruptFileError(f"{folder / INDEX} holds no weight_map of tensors and files; export the model again")
    found: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise CorruptFileError(f"{folder / INDEX} names {name!r}, which is not beside it; export the model again")
        shard = _tensors(folder / name)
        wanted = {key for key, place in places.items() if place == name}
        if wanted != shard.keys():
            wrong = ", ".join(sorted(wanted ^ shard.keys())[:5])
            raise CorruptFileError(f"{folder / name} and {INDEX} disagree about {wrong}; export the model again")
        found |= shard
    return found


def _tensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        # load_file maps the file into memory: a copy outlives whatever happens to it.
        return {name: tensor.clone() for name, tensor in load_file(file).items()}
    except FileNotFoundError as err:
        raise CorruptFileError(f"{file} does not exist; is {file.parent} a checkpoint?") from err
    except (SafetensorError, OSError) as err:
        size = file.stat().st_size if file.exists() else 0
        raise CorruptFileError(
            f"{file} ({size} bytes) is not whole: {err}; remove its folder and resume from an older checkpoint"
        ) from err


def optimiser_tensors(optimiser: Optimizer) -> dict[str, Tensor]:
    """An optimiser's state as flat tensors, `<parameter index>.<name>`; whole, so all of a team must ask for them."""
    import torch

    from alpagym_runtime.trainers.learner import whole_tensor

    state = optimiser.state_dict()["state"]
    return {
        f"{index}.{name}": whole_tensor(torch.as_tensor(value))
        for index, entry in state.items()
        for name, value in entry.items()
    }


def restore_optimiser(optimiser: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `optimiser_tensors`; the groups' settings stay as they are."""
    from alpagym_runtime.trainers.learner import like_parameter

    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = like_parameter(value, parameters[int(index)])
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
