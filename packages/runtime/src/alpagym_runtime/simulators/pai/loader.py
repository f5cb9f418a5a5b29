"""Samples, decoded ahead by worker processes into a cache in shared memory.

A sample is cut into parts (each camera, the motion) that any worker may take, so a single cold sample uses all of them.
What was asked for goes before what is only expected. The cache drops what was used longest ago; what is waited for
stays. A worker that dies is started again, and its parts are given out once more.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.errors import ConfigError, CorruptFileError, OutOfRangeError, SceneError
from alpagym_runtime.simulators.pai.clips import Sample
from alpagym_runtime.simulators.pai.samples import Layout, Motion, frame_ids, motion_of, part_bytes
from alpagym_runtime.simulators.pai.tree import Tree
from alpagym_runtime.simulators.pai.worker import read_part

ALIGNMENT = 4096
IN_FLIGHT = 2  # parts a worker holds: one in work, one so that it does not wait for us
ATTEMPTS = 3

Key = tuple[str, int]


@dataclass(frozen=True)
class Loaded:
    """A sample's arrays, owned by whoever took them.

    Attributes:
        motion: see `samples.Motion`.
        images: camera feature -> [K,h,w,3] u8.
        time_us, frame_id: camera feature -> [K] i64 and [K] u64.

    """

    motion: Motion
    images: dict[str, NDArray[np.uint8]]
    time_us: dict[str, NDArray[np.int64]]
    frame_id: dict[str, NDArray[np.uint64]]


@dataclass
class _Entry:
    sample: Sample
    place: int
    missing: set[str]
    waiting: int = 0  # takes to come
    promised: bool = False  # expected, and not taken yet
    error: str = ""
    about: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return not self.missing

    @property
    def idle(self) -> bool:
        return self.done and not self.waiting and not self.promised


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: socket.socket
    jobs: dict[int, tuple[Key, str, int]] = field(default_factory=dict)
    buffer: bytes = b""


class SampleLoader:
    """See the module's text.

    Args:
        root: the tree's folder (`Tree.root`).
        layout: what of a sample is wanted; every camera has a size.
        workers: processes; 0 decodes in the caller's, when a sample is taken.
        cache_mb: of shared memory, MiB; at least two samples.
        max_gap_us: see `samples.read_motion`.

    """

    def __init__(self, root: Path, layout: Layout, workers: int, cache_mb: int, max_gap_us: int = 500_000) -> None:
        self._root, self._layout, self._max_gap_us = root, layout, max_gap_us
        self._sizes = part_bytes(layout)
        if not all(self._sizes.values()):
            raise ConfigError("every camera needs a size", key="policy.cameras")
        self._offsets, offset = {}, 0
        for name, size in self._sizes.items():
            self._offsets[name] = offset
            offset += -(-size // ALIGNMENT) * ALIGNMENT
        self._stride = offset
        self.capacity = cache_mb * 2**20 // self._stride
        if self.capacity < 2:
            raise ConfigError(
                f"two samples of {self._stride / 2**20:.0f} MiB do not fit in {cache_mb} MiB; "
                f"set simulator.cache_mb={-(-2 * self._stride // 2**20)}",
                key="simulator.cache_mb",
            )
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (lives as long as this)
        self._file.truncate(self.capacity * self._stride)
        self._arena = mmap.mmap(self._file.fileno(), self.capacity * self._stride)
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._free = list(range(self.capacity))[::-1]
        self._asked: deque[Sample] = deque()
        self._expected: deque[Sample] = deque()
        self._parts: deque[tuple[Key, str, int]] = deque()
        self._lock = threading.Condition()
        self._next_job, self._closed = 0, False
        self._tree: Tree | None = None
        self._workers: list[_Worker] = []
        self._count = workers
        self._selector = selectors.DefaultSelector()
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------ asking

    def submit(self, sample: Sample) -> None:
        """Want a sample; each call is followed by one `take` or `release`."""
        with self._lock:
            self._asked.append(sample)
            self._fill()
        self._wake()

    def release(self, sample: Sample) -> None:
        """Want a sample no longer."""
        with self._lock:
            if sample in self._asked:
                self._asked.remove(sample)
            elif _key(sample) in self._entries:
                entry = self._entries[_key(sample)]
                entry.waiting -= 1
                if entry.error and not entry.waiting:
                    self._drop(_key(sample))
            self._fill()

    def expect(self, samples: Sequence[Sample]) -> None:
        """Samples that will be wanted, soonest first; they are decoded where nothing else is to do."""
        with self._lock:
            self._expected = deque(samples)
            keys = {_key(sample) for sample in samples}
            for key, entry in self._entries.items():
                entry.promised = key in keys
            self._fill()
        self._wake()

    def ready(self, sample: Sample) -> bool:
        """Whether `take` returns at once."""
        if self._count == 0:
            return True
        with self._lock:
            entry = self._entries.get(_key(sample))
            return entry is not None and entry.done

    def wait(self, timeout_s: float) -> None:
        """Wait until a part has been decoded, or the time is up."""
        with self._lock:
            if not self._closed:
                self._lock.wait(timeout_s)

    def take(self, sample: Sample, timeout_s: float = 60.0) -> Loaded:
        """A sample that was submitted, as arrays of the caller's own.

        Raises:
            SceneError: it cannot be read; names file, place and remedy.
            TimeoutError: it was not decoded in time.

        """
        key = _key(sample)
        deadline = time.monotonic() + timeout_s
        with self._lock:
            if self._count == 0:
                self._decode_here(key)
            while not (key in self._entries and self._entries[key].done):
                left = deadline - time.monotonic()
                if left <= 0 or self._closed:
                    raise TimeoutError(f"sample {sample.scene_id} was not decoded in {timeout_s} s")
                self._lock.wait(left)
            entry = self._entries[key]
            self._entries.move_to_end(key)
            entry.promised = False
            if entry.error:
                entry.waiting -= 1
                if not entry.waiting:
                    self._drop(key)
                raise SceneError(entry.error)
        # It still counts as waited for: nobody reuses its place while it is copied.
        loaded = self._copy(entry)
        with self._lock:
            entry.waiting -= 1
            self._fill()
        self._wake()
        return loaded

    def close(self) -> None:
        """End the workers and give the memory back; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._lock.notify_all()
        for worker in self._workers:
            worker.connection.close()
        self._wake()
        if self._thread is not None:
            self._thread.join()
        for worker in self._workers:
            try:
                worker.process.wait(timeout=20.0)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        if self._thread is not None:
            self._bell[0].close()
            self._bell[1].close()
        self._selector.close()
        if self._tree is not None:
            self._tree.close()
        self._arena.close()
        self._file.close()

    # ------------------------------------------------------------ the cache; all under the lock

    def _fill(self) -> None:
        """Give places to what was asked for, then to what is expected, as far as there are any."""
        while self._asked:
            if not self._admit(self._asked[0], True):
                return
            self._asked.popleft()
        while self._expected and self._count:
            # One place stays free for what is asked for next.
            idle = sum(entry.idle for entry in self._entries.values())
            if _key(self._expected[0]) not in self._entries and len(self._free) + idle < 2:
                return
            self._admit(self._expected.popleft(), False)

    def _admit(self, sample: Sample, waits: bool) -> bool:
        key = _key(sample)
        entry = self._entries.get(key)
        if entry is None:
            if not self._free and not self._evict(waits):
                return False
            entry = _Entry(sample, self._free.pop(), set(self._sizes))
            self._entries[key] = entry
            parts = [(key, name, 0) for name in self._sizes]
            # The motion is the last part: it is quick, and pictures shall begin.
            parts.append(parts.pop(0))
            self._parts.extendleft(reversed(parts)) if waits else self._parts.extend(parts)
        elif waits and not entry.done:
            mine = [part for part in self._parts if part[0] == key]
            self._parts = deque([*mine, *(part for part in self._parts if part[0] != key)])
        entry.waiting += waits
        entry.promised |= not waits
        self._entries.move_to_end(key)
        return True

    def _evict(self, waits: bool) -> bool:
        """Drop what was used longest ago; for what is waited for, if need be, the last of what is only expected."""
        idle = next((key for key, entry in self._entries.items() if entry.idle), None)
        if idle is None and waits:
            idle = next((key for key, e in reversed(self._entries.items()) if e.done and not e.waiting), None)
        if idle is not None:
            self._drop(idle)
        return idle is not None

    def _drop(self, key: Key) -> None:
        self._free.append(self._entries.pop(key).place)

    def _decode_here(self, key: Key) -> None:
        self._fill()
        entry = self._entries[key]
        if self._tree is None:
            self._tree = Tree(self._root)
        self._parts.clear()
        for name in sorted(entry.missing):
            begin = self._place(entry, name)
            view = memoryview(self._arena)[begin : begin + self._sizes[name]]
            try:
                entry.about[name] = read_part(self._tree, self._layout, entry.sample, name, self._max_gap_us, view)
            except (SceneError, CorruptFileError, OutOfRangeError, ValueError, OSError) as err:
                entry.error = str(err)
            finally:
                del view
        entry.missing.clear()

    def _place(self, entry: _Entry, name: str) -> int:
        return entry.place * self._stride + self._offsets[name]

    def _copy(self, entry: _Entry) -> Loaded:
        def array(name: str, dtype: Any) -> Any:
            begin = self._place(entry, name)
            return np.frombuffer(self._arena[begin : begin + self._sizes[name]], dtype)

        layout = self._layout
        images, times, ids = {}, {}, {}
        for name, (height, width) in layout.cameras.items():
            images[name] = array(name, np.uint8).reshape(layout.frames, height, width, 3)
            times[name] = np.array(entry.about[name]["time_us"], np.int64)
            ids[name] = frame_ids(entry.sample.clip_id, name, np.array(entry.about[name]["number"], np.int64))
        return Loaded(motion_of(array("", np.float64), layout), images, times, ids)

    # ------------------------------------------------------------ the workers

    def _wake(self) -> None:
        """Start the workers at the first request, and tell the thread that there may be work."""
        if self._count == 0:
            return
        if self._thread is None:
            self._bell = socket.socketpair()
            self._bell[0].setblocking(False)
            self._selector.register(self._bell[1], selectors.EVENT_READ)
            self._workers = [self._start() for _ in range(self._count)]
            self._thread = threading.Thread(target=self._serve, name="pai-loader", daemon=True)
            self._thread.start()
        # It has been rung often enough, or is closed.
        with contextlib.suppress(BlockingIOError, OSError):
            self._bell[0].send(b"x")

    def _start(self) -> _Worker:
        ours, theirs = socket.socketpair()
        handles = (theirs.fileno(), self._file.fileno())
        command = [sys.executable, "-m", "alpagym_runtime.simulators.pai.worker", *map(str, handles)]
        process = subprocess.Popen(
            [*command, str(self.capacity * self._stride)], pass_fds=handles, stdin=subprocess.DEVNULL
        )
        theirs.close()
        setup = {"root": str(self._root), "layout": asdict(self._layout), "max_gap_us": self._max_gap_us}
        ours.sendall(json.dumps(setup).encode() + b"\n")
        worker = _Worker(process, ours)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        return worker

    def _serve(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                self._give_out()
            for found, _ in self._selector.select(timeout=1.0):
                if found.data is None:
                    self._bell[1].recv(4096)
                else:
                    self._read(found.data)

    def _give_out(self) -> None:
        for worker in self._workers:
            while self._parts and len(worker.jobs) < IN_FLIGHT:
                key, name, attempt = self._parts.popleft()
                entry = self._entries.get(key)
                if entry is None or name not in entry.missing:
                    continue
                self._next_job += 1
                worker.jobs[self._next_job] = (key, name, attempt)
                sample = entry.sample
                job = {"job": self._next_job, "clip_id": sample.clip_id, "chunk": sample.chunk, "t0_us": sample.t0_us}
                job |= {"camera": name, "offset": self._place(entry, name), "size": self._sizes[name]}
                try:
                    worker.connection.sendall(json.dumps(job).encode() + b"\n")
                except OSError:
                    break  # it has died; its end of the socket will say so

    def _read(self, worker: _Worker) -> None:
        try:
            data = worker.connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._replace(worker)
            return
        *lines, worker.buffer = (worker.buffer + data).split(b"\n")
        with self._lock:
            for line in lines:
                reply = json.loads(line)
                key, name, _ = worker.jobs.pop(reply["job"])
                self._finish(key, name, reply)
            self._fill()
            self._give_out()
            self._lock.notify_all()

    def _finish(self, key: Key, name: str, reply: dict[str, Any]) -> None:
        entry = self._entries[key]
        entry.missing.discard(name)
        entry.about[name] = reply
        entry.error = entry.error or reply.get("error", "")

    def _replace(self, worker: _Worker) -> None:
        """A worker has ended: its parts go to the others, up to a number of attempts."""
        with self._lock:
            if self._closed:
                return
            self._selector.unregister(worker.connection)
            worker.connection.close()
            code = worker.process.wait()
            for key, name, attempt in worker.jobs.values():
                if attempt + 1 < ATTEMPTS:
                    self._parts.appendleft((key, name, attempt + 1))
                else:
                    text = f"the process that decoded {name or 'the motion'} of clip {key[0]} ended with {code}"
                    self._finish(key, name, {"error": f"{text}, {ATTEMPTS} times"})
            self._workers[self._workers.index(worker)] = self._start()
            self._lock.notify_all()


def _key(sample: Sample) -> Key:
    return sample.clip_id, sample.t0_us
