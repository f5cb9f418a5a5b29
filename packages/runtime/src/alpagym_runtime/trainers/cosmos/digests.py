"""Whether the weights that drive are the weights that they are taken for.

Cosmos-RL records that a sync was meant, not that it arrived: a replica whose first sync failed drove with the weights
it was built with, and passed them on as current. So the policy leaves a digest of each version in the run directory,
and a rollout compares before it drives with one.

The digest is the sum of each tensor's bits as bfloat16, so it is the same on a CPU and a GPU and costs one pass.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from alpagym_plugins import ConfigError
from alpagym_runtime.files import replacing
from alpagym_runtime.trainers.cosmos.tables import FOLDER

_WAIT_S = 30.0  # a network filesystem shows a new name late
_KEPT = 64


class WeightsError(RuntimeError):
    """A worker has other weights than it should."""


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Of named tensors, in any order and precision of at least bfloat16."""
    sums = []
    with torch.no_grad():
        for name, tensor in tensors:
            bits = tensor.detach().to(torch.bfloat16).contiguous().view(torch.int16)
            sums.append((name, bits.sum(dtype=torch.int64)))
    values = torch.stack([value.cpu() for _, value in sums]).tolist() if sums else []
    text = json.dumps(sorted((name, value) for (name, _), value in zip(sums, values, strict=True)))
    return hashlib.sha256(text.encode()).hexdigest()


def refuse_buffers(module: torch.nn.Module) -> None:
    """Refuse a policy with state that Cosmos-RL does not bring to rollouts, such as running means.

    What is no parameter and is not saved either is a function of the config, the same in every process.

    Raises:
        ConfigError: names some of it.

    """
    known = {parameter.data_ptr() for parameter in module.parameters()}
    loose = [n for n, value in module.state_dict().items() if value.numel() and value.data_ptr() not in known]
    if loose:
        raise ConfigError(
            f"the policy keeps {', '.join(loose[:3])} in buffers, which Cosmos-RL does not bring to rollouts; make "
            "them parameters without gradient",
            key="policy",
        )


class Digests:
    """Those of a run, a file a version: `cosmos/weights/<version>.json`."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / FOLDER / "weights"

    def put(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Leave the digest of a version; the oldest go."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with replacing(self._path(version), durable=False) as temporary:
            temporary.write_text(json.dumps({"digest": digest(tensors.items())}))
        if version >= _KEPT:
            self._path(version - _KEPT).unlink(missing_ok=True)

    def require(self, version: int, tensors: Mapping[str, Tensor], wait_s: float = _WAIT_S) -> None:
        """Refuse weights that are not those of a version.

        Raises:
            WeightsError: names the version, and what was compared.

        """
        deadline_s, path = time.monotonic() + wait_s, self._path(version)
        while not path.is_file():
            if time.monotonic() > deadline_s:
                raise WeightsError(
                    f"weights of version {version} are to drive, and the policy never made it: there is no {path}"
                )
            time.sleep(0.05)
        if json.loads(path.read_text())["digest"] != digest(tensors.items()):
            raise WeightsError(
                f"this rollout replica holds other weights than version {version} of the policy (compared with "
                f"{path}): a weight sync did not arrive. Nothing was driven with them"
            )

    def _path(self, version: int) -> Path:
        return self._folder / f"{version}.json"
