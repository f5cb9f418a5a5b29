"""What two ends say to each other: frames over one TCP connection a link, in order, and none waits for an answer.

A frame is a kind, a number and bytes. Which kinds there are is said in `ends`.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import socket
import struct
import threading
import time

_HEAD = struct.Struct("<cQI")
LONGEST_HELLO = 1 << 12
"""Bytes that a stranger may send."""
HELLO, WELCOME = b"h", b"w"


class Line:
    """One end of a connection; any thread may say something, one hears.

    Args:
        connection: to the other end.
        timeout_s: until a frame must have been taken by the other end's machine.

    """

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.settimeout(timeout_s)
        self._socket, self._lock = connection, threading.Lock()

    def say(self, kind: bytes, number: int = 0, text: bytes = b"") -> None:
        """Send a frame.

        Raises:
            ConnectionError: the other end is gone, or does not read.

        """
        data = _HEAD.pack(kind, number, len(text)) + text
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError as err:
            self.hang_up()  # half a frame may have gone
            raise ConnectionError(f"the connection ended: {err}") from err

    def hear(self, timeout_s: float | None = None, longest: int = 1 << 30) -> tuple[bytes, int, bytes]:
        """The next frame; waits for ever where no time is given.

        Raises:
            ConnectionError: the other end is gone, is too slow, or this one hung up.

        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        kind, number, length = _HEAD.unpack(self._exactly(_HEAD.size, end))
        if length > longest:
            raise ConnectionError(f"a frame of {length} bytes came, {longest} at most were expected")
        return kind, number, self._exactly(length, end)

    def has_news(self, timeout_s: float = 0.0) -> bool:
        """Whether `hear` would find something within so long: bytes, or the end."""
        poll = select.poll()
        with contextlib.suppress(OSError, ValueError):
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(max(1000.0 * timeout_s, 0.0)))
        return True

    def hang_up(self) -> None:
        """End the connection; who hears, at either end, is woken. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, count: int, end: float | None) -> bytes:
        found = bytearray(count)
        view, have = memoryview(found), 0
        while have < count:
            # The socket's own time is that of `say`.
            if end is not None and not self.has_news(end - time.monotonic()):
                raise ConnectionError("no answer came in time")
            try:
                got = self._socket.recv_into(view[have:])
            except TimeoutError:
                continue
            except OSError as err:
                raise ConnectionError(f"the connection ended: {err}") from err
            if got == 0:
                raise ConnectionError("the connection was closed")
            have += got
        return bytes(found)


def introduce(line: Line, token: str, name: str, timeout_s: float) -> int:
    """Say who one is, to a receiving end; the number of the link.

    Raises:
        ConnectionError: it does not answer.

    """
    line.say(HELLO, 0, f"{token} {name}".encode())
    kind, number, _ = line.hear(timeout_s, LONGEST_HELLO)
    if kind != WELCOME:
        raise ConnectionError(f"an answer {kind!r} where {WELCOME!r} was expected")
    return number


def caller(line: Line, token: str, timeout_s: float) -> str:
    """Who has called; its name.

    Raises:
        ConnectionError: it says nothing in time, or does not know the token.

    """
    kind, _, text = line.hear(timeout_s, LONGEST_HELLO)
    said, _, name = text.partition(b" ")
    if kind != HELLO or not hmac.compare_digest(said, token.encode()):
        raise ConnectionError("a stranger called")
    return name.decode(errors="replace")
