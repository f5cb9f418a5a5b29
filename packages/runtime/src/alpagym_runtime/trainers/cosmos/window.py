"""Tensors from one process to another of this machine, through memory that both see: of one GPU, or else of the host.

NCCL refuses two ranks on one GPU. The sender makes a buffer, the receiver opens it, and each tensor passes through it
in pieces; a piece is overwritten only once the receiver has it. Nothing is pickled: the connection carries numbers and
JSON, to a port of loopback that a token guards.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alpagym_runtime.files import read_json, write_json
from alpagym_runtime.transport.nccl.line import WELCOME, Line, caller, introduce

SIZE = 64 << 20
"""Bytes of a buffer."""
_LOOPBACK = "127.0.0.1"
_ANSWER_S = 120.0
_POLL_S = 0.02
_STRANGER_S = 5.0
_NOTHING = torch.empty(0, dtype=torch.uint8)
WHERE, BUFFER, FULL, TAKEN = b"p", b"b", b"f", b"t"


class Outlet:
    """The sending end of one pair.

    Args:
        path: where the receiving end finds the address; in a folder that others cannot read.
        device: of the tensors.
        size: bytes of the buffer.

    """

    def __init__(self, path: Path, device: torch.device, size: int = SIZE) -> None:
        self._path, self._device, self._size = path, device, size
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server((_LOOPBACK, 0))
        self._line: Line | None = None
        self._buffer = _NOTHING
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        write_json(path, {"port": self._listener.getsockname()[1], "token": self._token})

    def meet(self, timeout_s: float) -> None:
        """Wait for the receiving end, and show it the buffer.

        Raises:
            TimeoutError: it did not come.
            ConnectionError: it came and went.

        """
        deadline_s = time.monotonic() + timeout_s
        while self._line is None:
            self._listener.settimeout(max(deadline_s - time.monotonic(), 0.001))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                raise TimeoutError(f"nobody came for weights within {timeout_s:g} s ({self._path})") from None
            line = Line(connection, _ANSWER_S)
            try:
                caller(line, self._token, _STRANGER_S)
            except ConnectionError:
                line.hang_up()
                continue
            self._line = line
        self._listener.close()
        self._path.unlink(missing_ok=True)
        self._line.say(WELCOME)
        _, _, where = _expect(self._line, WHERE)
        if where and where.decode() == _gpu(self._device):
            self._buffer, about = _on_the_gpu(self._device, self._size)
            self._show(about)
            return
        with open(os.memfd_create("alpagym-weights"), "r+b") as file:
            file.truncate(self._size)
            self._buffer = _mapped(file.fileno(), self._size)
            self._show({"process": os.getpid(), "file": file.fileno()})

    def _show(self, about: dict[str, Any]) -> None:
        assert self._line is not None
        self._line.say(BUFFER, self._size, json.dumps(about).encode())
        _expect(self._line, TAKEN)

    def send(self, tensor: Tensor) -> None:
        """Returns when the other end has it.

        Raises:
            ConnectionError: the other end is gone, or does not take it.

        """
        assert self._line is not None
        data = _bytes(tensor)
        for start in range(0, len(data), self._size):
            piece = data[start : start + self._size]
            self._buffer[: len(piece)].copy_(piece)
            _finish(self._device)
            self._line.say(FULL, len(piece))
            _expect(self._line, TAKEN)

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        self._listener.close()
        self._path.unlink(missing_ok=True)
        self._buffer = _NOTHING
        if self._line is not None:
            self._line.hang_up()


class Inlet:
    """The receiving end of one pair; waits for the sending one.

    Args:
        path: where that left its address.
        device: of the tensors.
        timeout_s: longest wait.

    Raises:
        TimeoutError: it left none in time.
        ConnectionError: it is gone, or does not know the token.

    """

    def __init__(self, path: Path, device: torch.device, timeout_s: float) -> None:
        self._device = device
        deadline_s = time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"nobody offered weights within {timeout_s:g} s ({path})")
            time.sleep(_POLL_S)
        found = read_json(path)
        try:
            connection = socket.create_connection((_LOOPBACK, int(found["port"])), _ANSWER_S)
        except OSError as err:
            raise ConnectionError(f"who offered weights in {path} is gone: {err}") from err
        self._line = Line(connection, _ANSWER_S)
        try:
            introduce(self._line, str(found["token"]), f"process {os.getpid()}", _ANSWER_S)
            self._line.say(WHERE, 0, _gpu(device).encode())
            _, size, about = _expect(self._line, BUFFER)
            self._buffer = _open(json.loads(about), device, size)
            self._line.say(TAKEN)
        except Exception:
            self._line.hang_up()
            raise

    def receive(self, tensor: Tensor) -> None:
        """Fill a tensor, which has no gaps.

        Raises:
            ConnectionError: the other end is gone, or sends one of another size.

        """
        data = _bytes(tensor)
        for start in range(0, len(data), len(self._buffer)):
            piece = data[start : start + len(self._buffer)]
            _, count, _ = _expect(self._line, FULL)
            if count != len(piece):
                self.close()
                raise ConnectionError(f"a piece of {count} bytes came where {len(piece)} were expected")
            piece.copy_(self._buffer[:count])
            _finish(self._device)
            self._line.say(TAKEN)

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        self._buffer = _NOTHING
        self._line.hang_up()


def _expect(line: Line, kind: bytes) -> tuple[bytes, int, bytes]:
    found = line.hear(_ANSWER_S, 1 << 16)
    if found[0] != kind:
        line.hang_up()
        raise ConnectionError(f"an answer {found[0]!r} where {kind!r} was expected")
    return found


def _bytes(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor {tuple(tensor.shape)} with strides {tensor.stride()} has gaps")
    return tensor.detach().reshape(-1).view(torch.uint8)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _gpu(device: torch.device) -> str:
    """Which GPU it is, whatever number a process knows it by; nothing for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _mapped(file: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


def _on_the_gpu(device: torch.device, size: int) -> tuple[Tensor, dict[str, Any]]:
    """A buffer, and what another process opens it by."""
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    _, handle, length, offset, counter, counter_offset, event, waits = buffer.untyped_storage()._share_cuda_()
    about = {"length": length, "offset": offset, "counter_offset": counter_offset, "waits": waits}
    for name, data in (("handle", handle), ("counter", counter), ("event", event)):
        about[name] = base64.b64encode(data).decode()
    return buffer, about


def _open(about: dict[str, Any], device: torch.device, size: int) -> Tensor:
    """A buffer that another process made."""
    if "handle" not in about:
        with Path(f"/proc/{int(about['process'])}/fd/{int(about['file'])}").open("r+b") as file:
            return _mapped(file.fileno(), size)
    handle, counter, event = (base64.b64decode(about[name]) for name in ("handle", "counter", "event"))
    storage = torch.UntypedStorage._new_shared_cuda(
        torch.cuda.current_device() if device.index is None else device.index,
        handle,
        int(about["length"]),
        int(about["offset"]),
        counter,
        int(about["counter_offset"]),
        event,
        bool(about["waits"]),
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)  # type: ignore[call-overload]
