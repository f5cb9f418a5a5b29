"""How the two ends find each other: the trainer's process listens, and its address lies in the run directory.

It listens twice on one address (loopback by default): for lines, and for the key-value store through which gloo and
NCCL connect, whose socket torch itself would not bind to one address. A session is one life of the receiving end, a
link one life of a sending end; both are numbered anew when their process starts again.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import torch.distributed as dist

from alpagym_runtime.errors import CorruptFileError
from alpagym_runtime.files import read_json, write_json
from alpagym_runtime.transport.nccl.line import Line

FILE = "nccl.json"


@dataclass(frozen=True)
class Session:
    """Where a receiving end listens, and which one it is.

    Attributes:
        host: the address.
        port: of the store.
        line_port: where senders call.
        token: names the session.
        peer: the process, for messages.

    """

    host: str
    port: int
    line_port: int
    token: str
    peer: str

    def call(self, connect_s: float, timeout_s: float) -> Line:
        """A line to the receiving end.

        Args:
            connect_s: longest wait for it to answer.
            timeout_s: of the line.

        Raises:
            ConnectionError: nobody listens there any more.

        """
        try:
            connection = socket.create_connection((self.host, self.line_port), connect_s)
        except OSError as err:
            raise ConnectionError(f"{self.peer} does not answer at {self.host}:{self.line_port}: {err}") from err
        return Line(connection, timeout_s)

    def connect(self, timeout_s: float) -> dist.TCPStore:
        """A connection to the store, of its own: a store that waits answers nobody else.

        Raises:
            ConnectionError: nobody listens there any more.

        """
        try:
            limit = timedelta(seconds=timeout_s)
            return dist.TCPStore(self.host, self.port, None, False, limit, wait_for_workers=False)
        except RuntimeError as err:
            raise ConnectionError(f"{self.peer} does not answer at {self.host}:{self.port}: {_short(err)}") from err


def me() -> str:
    """This process, for messages of others."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def listen(folder: Path, host: str, port: int) -> tuple[Session, dist.TCPStore, socket.socket]:
    """Open a session; its address replaces an older one in `folder`.

    Args:
        folder: of the transport.
        host: the address to listen on.
        port: of the store, and the next one that senders call; 0 takes two free ones.

    Raises:
        OSError: the address cannot be had; names it and the keys.

    """
    with _listener(host, port) as listener:
        lines = _listener(host, port + 1 if port else 0)
        port = listener.getsockname()[1]
        # The store takes the descriptor over.
        handle = os.dup(listener.fileno())
        store = dist.TCPStore(
            host, port, None, True, timedelta(seconds=60), wait_for_workers=False, master_listen_fd=handle
        )
    session = Session(host, port, lines.getsockname()[1], uuid4().hex[:16], f"trainer ({me()})")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FILE, vars(session))
    return session, store, lines


def _listener(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as err:
        listener.close()
        raise OSError(
            f"cannot listen on {host}:{port}: {err.strerror}; transport.port=0 takes free ones, transport.host=ADDRESS "
            f"another address"
        ) from err
    listener.listen(1024)
    return listener


def forget(folder: Path, session: Session) -> None:
    """Remove a session's address, unless another one stands there."""
    with contextlib.suppress(FileNotFoundError, CorruptFileError):
        if read_json(folder / FILE) == vars(session):
            (folder / FILE).unlink()


def find(folder: Path, timeout_s: float, not_this: str | None = None) -> tuple[Session, Line]:
    """The session whose address lies in `folder`, and a line to it; waits for one to open.

    Args:
        folder: of the transport.
        timeout_s: longest wait.
        not_this: the token of a session that is known to be gone.

    Raises:
        TimeoutError: none opened in time; names folder, seconds and remedy.

    """
    end, why = time.monotonic() + timeout_s, "no address is there"
    while True:
        try:
            session = Session(**read_json(folder / FILE))
            if session.token != not_this:
                left = max(0.5, min(2.0, end - time.monotonic()))
                return session, session.call(left, timeout_s)
            why = "the trainer that was there is gone"
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (ConnectionError, CorruptFileError, TypeError) as err:
            why = str(err)
        if time.monotonic() > end:
            raise TimeoutError(
                f"no trainer opened {folder / FILE} within {timeout_s:g} s: {why}; start the trainer first, or raise "
                f"transport.timeout_s"
            )
        time.sleep(0.05)


def _short(err: Exception) -> str:
    return str(err).splitlines()[0][:200]
