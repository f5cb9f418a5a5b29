"""What the trainer's process and its rollout workers say to each other: lines of JSON over one TCP connection a worker.

The run directory says where: `workers/rendezvous.json` holds address and token, readable by its owner alone. Episodes
and weights do not go this way: episodes go through a transport, weights through files (`rollouts.weights`).

To a worker: `drive` (a task, requests by number, the weights they want) · `end`.
From a worker: `hello` · `done` (a request's number, its handle) · `beat` · `error` (why it ends).
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from alpagym_runtime.errors import ConfigError, CorruptFileError
from alpagym_runtime.files import read_json, replacing
from alpagym_runtime.policies.noisy_expert import Noise, NoisyExpert
from alpagym_runtime.rollouts.cores import World
from alpagym_runtime.types import Policy, Sampling

FOLDER = "workers"
LONGEST_LINE = 1 << 24
LONGEST_HELLO = 1 << 12
"""Bytes that a stranger may send."""

Message = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What requests have in common: where, who, how.

    Attributes:
        world: split and labels.
        sampling: how the driver draws.
        noise: of the expert, which then drives; None: the run's policy does.
        keep_frames: whether episodes hold the encoded frames that arrived.

    """

    world: World
    sampling: Sampling
    noise: Noise | None = None
    keep_frames: bool = False

    @property
    def actor(self) -> str:
        """Who drives, for the episodes."""
        return "policy" if self.noise is None else "expert"

    def to_plain(self) -> Message:
        """As JSON holds it."""
        return asdict(self)

    @staticmethod
    def from_plain(data: Message) -> Task:
        """The inverse of `to_plain`."""
        world = World(data["world"]["split"], tuple(data["world"]["labels"]))
        noise = None if data["noise"] is None else Noise(**data["noise"])
        return Task(world, Sampling(**data["sampling"]), noise, data["keep_frames"])


def noise_of(driver: Policy) -> Noise | None:
    """What a worker needs to know of a driver besides the config and the weights."""
    return driver.noise if isinstance(driver, NoisyExpert) else None


@dataclass(frozen=True)
class Rendezvous:
    """Where workers of a run report.

    Attributes:
        host, port: address of the trainer's process.
        token: what a worker must know.
        pid: of that process.

    """

    host: str
    port: int
    token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    pid: int = field(default_factory=os.getpid)

    def write(self, directory: Path) -> None:
        """Into a run directory, for its owner's eyes."""
        path = directory / FOLDER / "rendezvous.json"
        path.parent.mkdir(exist_ok=True)
        path.parent.chmod(0o700)  # the folder keeps the token from others
        with replacing(path, durable=False) as temporary:
            temporary.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(directory: Path) -> Rendezvous:
        """From a run directory.

        Raises:
            FileNotFoundError: nobody awaits workers there.

        """
        data = read_json(directory / FOLDER / "rendezvous.json")
        try:
            return Rendezvous(str(data["host"]), int(data["port"]), str(data["token"]), int(data["pid"]))
        except (KeyError, TypeError, ValueError) as err:
            raise CorruptFileError(f"{directory / FOLDER / 'rendezvous.json'} is not whole: {err}") from err

    def admits(self, message: Message) -> bool:
        """Whether a hello knows the token."""
        return hmac.compare_digest(str(message.get("token", "")).encode(), self.token.encode())


class Link:
    """One end of a connection; any thread may send, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._rest, self._lock = b"", threading.Lock()

    def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            OSError: the other end is gone, or does not read.

        """
        data = json.dumps(message, allow_nan=False).encode() + b"\n"
        with self._lock:
            self.socket.sendall(data)

    def receive(self, longest: int = LONGEST_LINE) -> Iterator[Message]:
        """Messages of the next bytes that arrive; waits for them.

        Raises:
            EOFError: the other end is gone.
            ValueError: what came is no message.

        """
        try:
            data = self.socket.recv(1 << 20)
        except (ConnectionError, TimeoutError) as err:
            raise EOFError(str(err)) from err
        if not data:
            raise EOFError("the connection was closed")
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > longest:
            raise ValueError(f"a line of more than {longest} bytes")
        for line in lines:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("a message must be a mapping")
            yield message

    def close(self) -> None:
        """Hang up."""
        self.socket.close()


def require_config(directory: Path) -> None:
    """Workers start from the frozen config, so it must be there."""
    if not (directory / "config.yaml").is_file():
        raise ConfigError(f"{directory / 'config.yaml'} is missing, and workers start from it", key="rollout.workers")
