"""How the two ends find each other: a key-value store in the trainer's process; its address lies in the run directory.

The store's socket is bound to one address (loopback by default), which torch's own would not be. A session is one life
of the receiving end, a link one life of a sending end; both are numbered anew when their process starts again.
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

FILE = "nccl.json"
FOREVER = timedelta(days=365)


@dataclass(frozen=True)
class Session:
    """Where a receiving end listens, and which one it is."""

    host: str
    port: int
    token: str
    peer: str

    def connect(self, timeout_s: float) -> dist.TCPStore:
        """A connection of its own: a store that waits answers nobody else.

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


def listen(folder: Path, host: str, port: int) -> tuple[Session, dist.TCPStore]:
    """Open a session; its address replaces an older one in `folder`.

    Raises:
        OSError: the address cannot be had; names it and the keys.

    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as err:
            raise OSError(
                f"cannot listen on {host}:{port}: {err.strerror}; transport.port=0 takes a free one, "
                f"transport.host=ADDRESS another address"
            ) from err
        listener.listen(1024)
        port = listener.getsockname()[1]
        # The store takes the descriptor over.
        handle = os.dup(listener.fileno())
        store = dist.TCPStore(
            host, port, None, True, timedelta(seconds=60), wait_for_workers=False, master_listen_fd=handle
        )
    session = Session(host, port, uuid4().hex[:16], f"trainer ({me()})")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FILE, vars(session))
    return session, store


def forget(folder: Path, session: Session) -> None:
    """Remove a session's address, unless another one stands there."""
    with contextlib.suppress(FileNotFoundError, CorruptFileError):
        if read_json(folder / FILE) == vars(session):
            (folder / FILE).unlink()


def find(folder: Path, timeout_s: float, not_this: str | None = None) -> tuple[Session, dist.TCPStore]:
    """The session whose address lies in `folder`, and a connection to it; waits for one to open.

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
                return session, session.connect(left)
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


def wait_for(store: dist.TCPStore, key: str, timeout_s: float | None) -> bool:
    """Wait until a key is there; False at the time's end. None waits for ever.

    Raises:
        ConnectionError: the store is gone.

    """
    try:
        store.wait([key], FOREVER if timeout_s is None else timedelta(seconds=max(timeout_s, 0.001)))
    except dist.DistNetworkError as err:
        raise ConnectionError(_short(err)) from err
    except dist.DistStoreError:
        return False
    except RuntimeError as err:
        raise ConnectionError(_short(err)) from err
    return True


def take(store: dist.TCPStore, key: str) -> bytes:
    """The value of a key that is there; the key goes."""
    try:
        value = store.get(key)
        store.delete_key(key)
    except RuntimeError as err:
        raise ConnectionError(_short(err)) from err
    return bytes(value)


def put(store: dist.TCPStore, key: str, value: bytes = b"1") -> None:
    """Set a key."""
    try:
        store.set(key, value)  # type: ignore[arg-type]  # bytes are fine, whatever its stub says
    except RuntimeError as err:
        raise ConnectionError(_short(err)) from err


def _short(err: Exception) -> str:
    return str(err).splitlines()[0][:200]
