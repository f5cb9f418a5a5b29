"""How workers come to be: the same command, started on this machine, by somebody else, or by Ray."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from alpagym_runtime.endpoints import own_address
from alpagym_runtime.run_config import RunConfig


class Started(Protocol):
    """A worker that was started."""

    def ended(self) -> str | None:
        """How it ended, in words; None while it works."""
        ...

    def kill(self) -> None:
        """End it at once; idempotent."""
        ...


class Launcher(Protocol):
    """Starts workers.

    Attributes:
        host: address at which this process listens for them.
        restarts: whether a worker that ended can be started again.

    """

    host: str
    restarts: bool

    def start(self, index: int) -> Started:
        """Start a worker, or start it again."""
        ...

    def close(self) -> None:
        """Give back what starting workers took; they have ended."""
        ...


def make_launcher(config: RunConfig, directory: Path) -> Launcher:
    """The launcher of `deploy.kind`."""
    if config.deploy.kind == "ray":
        from alpagym_runtime.rollouts.ray_launcher import RayLauncher

        return RayLauncher(config, directory)
    return LocalLauncher(directory) if config.deploy.kind == "local" else OthersLauncher()


class LocalLauncher:
    """Child processes; the kernel tells how they end, and kills them with the process that started them."""

    host, restarts = "127.0.0.1", True

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def start(self, index: int) -> Started:
        """See `Launcher`."""
        folder = self._directory / "logs"
        folder.mkdir(exist_ok=True)
        with (folder / f"worker-{index}.log").open("ab") as log:  # for what goes wrong before it opens its log itself
            # In a session of its own: Ctrl-C is for the trainer, which then ends its workers in order.
            return _Child(
                subprocess.Popen(
                    self.command(index),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def command(self, index: int) -> list[str]:
        """What is run."""
        return [sys.executable, "-m", "alpagym_runtime.rollouts.worker", str(self._directory), "--index", str(index)]

    def close(self) -> None:
        """Nothing is held."""


class _Child:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def ended(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        if code >= 0:
            return f"ended with exit code {code}"
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class OthersLauncher:
    """Workers that somebody else starts, such as srun: they are waited for, and nobody here can start them again."""

    restarts = False

    def __init__(self) -> None:
        self.host = own_address()

    def start(self, index: int) -> Started:
        """See `Launcher`."""
        return _Elsewhere()

    def close(self) -> None:
        """Nothing is held."""


class _Elsewhere:
    def ended(self) -> str | None:
        return None

    def kill(self) -> None:
        """It ends by itself once its connection is closed."""
