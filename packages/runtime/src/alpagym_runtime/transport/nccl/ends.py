"""The two ends: many senders, one receiver.

An episode is copied into a buffer, announced on the line (its header), granted by the receiver, and travels as one
message. What is on its way is bounded: a sender takes episode n up only once fewer than `in_flight` before it are not
taken, so a slow trainer holds its workers up and no memory grows. Nor is one granted while those of all senders that
are not taken fill `limit_mb`, unless somebody waits for it. A grant is also where transfers yield to a weight sync:
inside `paused()` none is given and none is under way.

Frames of a sender: episode (number, header), discard (number), close. Of the receiver: grant (number), taken (how many
so far), full (MB that there is room for). Nothing waits for an answer but a granted buffer for its grant.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from alpagym_runtime.telemetry.timers import timed
from alpagym_runtime.transport.config import NcclConfig
from alpagym_runtime.transport.nccl.blocks import Blocks, page_locked, plain
from alpagym_runtime.transport.nccl.channel import PARTS, Channel, Slot, current_device
from alpagym_runtime.transport.nccl.copiers import Copiers
from alpagym_runtime.transport.nccl.line import WELCOME, Line, caller, introduce
from alpagym_runtime.transport.nccl.message import Bytes, Message, Part, closed_up, header_size, pack, parts, unpack
from alpagym_runtime.transport.nccl.rendezvous import Session, find, forget, listen, me
from alpagym_runtime.transport.rules import Ledger
from alpagym_runtime.types import Episode

_HANDLE = re.compile(r"nccl-(?P<session>[0-9a-f]{16})-(?P<link>[0-9]{1,9})-(?P<number>[0-9]{1,12})")
EPISODE, DISCARD, CLOSE, GRANT, TAKEN, FULL = b"e", b"d", b"c", b"g", b"t", b"f"
LOOK_S = 0.5
"""Between two looks whether a sender that waits for room is still there."""
DIRECT = 1 << 20
"""Bytes from which on an array goes to the GPU by itself, if the GPU can read it."""
SLOWER = "if it is only slow, raise transport.timeout_s"


class Receiver:
    """The trainer's end; see `types.Transport`. Takes episodes as they come, from any number of senders."""

    def __init__(self, folder: Path, config: NcclConfig) -> None:
        self._config = config
        self._device = current_device(config.backend)
        self._folder = folder
        self._session, store, self._listener = listen(folder, config.host, config.port)
        self._store: dist.TCPStore | None = store
        self._copiers = Copiers(config.copy_threads)
        self._ledger = Ledger(config.limit_mb * 1_000_000, config.expire_s)
        self._changed = threading.Condition()
        self._links: dict[int, _Link] = {}
        self._blocks = _blocks(config, self._device)
        self._under_way, self._holding, self._closed = 0, False, False
        self._untaken = 0  # bytes of episodes that were granted and not taken
        self._callers: list[threading.Thread] = []
        self._strangers: set[Line] = set()
        self._acceptor = threading.Thread(target=self._accept, name="alpagym-accept", daemon=True)
        self._acceptor.start()

    def send(self, episode: Episode) -> str:
        """Refused: this end receives."""
        raise RuntimeError("the trainer's end of transport=nccl receives; episodes are sent by rollout processes")

    def receive(self, handle: str) -> Episode:
        """The episode behind a handle; waits for one that is announced or about to be.

        Raises:
            KeyError: it was discarded, released by rule, or never sent.
            TimeoutError: it did not arrive in time; names peer, handle, seconds and remedy.
            ConnectionError: its sender broke off.

        """
        link_number, number = self._parse(handle)
        end = time.monotonic() + self._config.timeout_s
        with self._changed, contextlib.ExitStack() as stack:
            waits_at = None
            while True:
                link = self._links.get(link_number)
                if link is not None:
                    if number in link.held:
                        if number not in link.taken:
                            link.take(number)
                        return link.held[number]
                    if number in link.gone or (link.closed and number not in link.pending):
                        raise self._ledger.missing(handle)
                    if link.broken is not None:
                        raise ConnectionError(f"{handle} did not arrive from {link.peer}: {link.broken}")
                    if waits_at is None:
                        waits_at = stack.enter_context(link.awaiting(number))
                if not self._changed.wait(max(end - time.monotonic(), 0.0)):
                    who = "no such sender has joined" if link is None else f"its sender is {link.peer}"
                    raise TimeoutError(
                        f"{handle} did not arrive within {self._config.timeout_s:g} s: {who}; is it alive? {SLOWER}"
                    )

    def discard(self, handle: str) -> None:
        """Free an episode, here or as soon as it arrives; an unknown handle is fine."""
        with contextlib.suppress(KeyError):
            link_number, number = self._parse(handle)
            with self._changed:
                link = self._links.get(link_number)
                if link is not None:
                    link.drop(number)

    def discard_older(self, handle: str) -> None:
        """Free what the sender of an episode sent `in_flight` or more before it, and nobody received.

        For whoever receives in the order of sending and leaves some out: those would keep their places for ever.
        """
        with contextlib.suppress(KeyError):
            link_number, number = self._parse(handle)
            with self._changed:
                link = self._links.get(link_number)
                if link is not None:
                    for old in [*link.held, *link.pending]:
                        if old <= number - self._config.in_flight:
                            link.drop(old)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for the transfers under way and grant none: weights may be sent to GPUs inside this block.

        Raises:
            TimeoutError: a transfer did not end in time.

        """
        with self._changed:
            assert not self._holding, "paused() does not nest"
            self._holding = True
            if not self._changed.wait_for(lambda: self._under_way == 0, self._config.timeout_s):
                self._holding = False
                raise TimeoutError(f"{self._under_way} transfers did not end within {self._config.timeout_s:g} s")
        try:
            yield
        finally:
            with self._changed:
                self._holding = False
                self._changed.notify_all()

    def close(self) -> None:
        """End the session: senders fail at their next send. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the acceptor
        self._acceptor.join(self._config.timeout_s)
        self._listener.close()
        for line in list(self._strangers):
            line.hang_up()
        for link in list(self._links.values()):
            link.close()
        for thread in self._callers:
            thread.join(self._config.timeout_s)
        self._copiers.close()
        self._blocks.close()
        forget(self._folder, self._session)
        self._store = None  # with it the store ends, and whoever waits there

    # ------------------------------------------------------------ for links

    def _begin(self) -> None:
        """Wait until transfers are let, and count one."""
        with self._changed:
            self._changed.wait_for(lambda: not self._holding or self._closed)
            self._under_way += 1

    def _end(self) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def _release(self, handles: Iterable[str]) -> None:
        """Drop episodes (the condition is held)."""
        for handle in handles:
            link, number = self._parse(handle)
            self._links[link].drop(number)

    # ------------------------------------------------------------

    def _parse(self, handle: str) -> tuple[int, int]:
        match = _HANDLE.fullmatch(handle)
        if match is None or match["session"] != self._session.token:
            raise self._ledger.missing(handle)
        return int(match["link"]), int(match["number"])

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            line = Line(connection, self._config.timeout_s)
            thread = threading.Thread(target=self._greet, args=(line,), name="alpagym-link", daemon=True)
            self._callers = [*(old for old in self._callers if old.is_alive()), thread]
            thread.start()

    def _greet(self, line: Line) -> None:
        """Serve one who calls, to the end; a stranger is let go of."""
        try:
            self._strangers.add(line)
            try:
                peer = caller(line, self._session.token, min(self._config.timeout_s, 10.0))
            finally:
                self._strangers.discard(line)
            with self._changed:
                if self._closed:
                    raise ConnectionError("this end closed")
                number = len(self._links)
                link = self._links[number] = _Link(self, number, peer, line)
                self._changed.notify_all()
            link.run()
        except ConnectionError:
            pass
        finally:
            line.hang_up()


class _Link:
    """One life of a sender, as the receiver sees it; its fields belong to the receiver's condition.

    Attributes:
        held: episodes that arrived and were not discarded.
        pending: numbers that were announced and have not arrived.
        taken: numbers that were received, or dropped before.
        gone: numbers that were discarded or released.
        broken: why nothing comes any more.
        closed: its sender closed.

    """

    def __init__(self, receiver: Receiver, number: int, peer: str, line: Line) -> None:
        self._receiver, self._number, self.peer, self._line = receiver, number, peer, line
        self._config, self._changed = receiver._config, receiver._changed
        self.held: dict[int, Episode] = {}
        self.pending: set[int] = set()
        self.taken: set[int] = set()
        self.gone = _Numbers()
        self._awaited: list[int] = []
        self.broken: str | None = None
        self.closed = False
        self._taken_count = 0
        self._sizes: dict[int, int] = {}  # of what was granted and not taken
        self._heard: deque[tuple[bytes, int, bytes]] = deque()  # while it waited for room
        self._channel: Channel | None = None
        self._posted: queue.SimpleQueue[tuple[int, bytes, int, Slot] | None] = queue.SimpleQueue()

    @contextlib.contextmanager
    def awaiting(self, number: int) -> Iterator[_Link]:
        """Let an episode come, and those before it, although there is no room (the condition is held)."""
        self._awaited.append(number)
        self._changed.notify_all()
        try:
            yield self
        finally:
            self._awaited.remove(number)

    def take(self, number: int) -> None:
        """Tell the sender that one more was taken (the condition is held)."""
        self.taken.add(number)
        self._taken_count += 1
        self._receiver._ledger.taken(self._handle(number))
        self._leave_room(number)
        with contextlib.suppress(ConnectionError):
            self._line.say(TAKEN, self._taken_count)

    def drop(self, number: int) -> None:
        """Free an episode, or do so when it arrives (the condition is held)."""
        if number in self.gone:
            return
        self.gone.add(number)
        self.held.pop(number, None)
        if number not in self.taken:
            self.take(number)
        self.taken.discard(number)
        self._receiver._ledger.remove(self._handle(number))
        self._changed.notify_all()

    def close(self) -> None:
        """End the link from the receiver's side."""
        self._break(f"{self._receiver._session.peer} closed")
        self._line.hang_up()  # wakes the thread that hears

    def run(self) -> None:
        """Serve the sender until it closes or breaks off."""
        config = self._config
        finisher = threading.Thread(target=self._finish, name=f"alpagym-arrive-{self._number}", daemon=True)
        finisher.start()
        try:
            self._line.say(WELCOME, self._number)
            pair = dist.PrefixStore(f"{self._number}/pair", self._receiver._session.connect(config.timeout_s))
            self._channel = Channel(
                pair, 0, self._receiver._device, config.host, config.timeout_s, self._receiver._blocks
            )
            while True:
                kind, number, text = self._heard.popleft() if self._heard else self._line.hear()
                if kind == CLOSE:
                    break
                if kind == DISCARD:
                    with self._changed:
                        self.drop(number)
                elif not self._grant(number, text):
                    break
        except (ConnectionError, RuntimeError, ValueError) as err:
            self._break(str(err))
        self._posted.put(None)
        finisher.join()
        with self._changed:
            if self.broken is None:
                for number in list(self.held):
                    self.drop(number)
                self.closed = True
            for number in list(self._sizes):  # what will not come, and what may never be asked for
                self._receiver._ledger.taken(self._handle(number))
                self._leave_room(number)
            self._changed.notify_all()
        if self._channel is not None:
            self._channel.abort()
            self._channel = None  # its buffers go

    # ------------------------------------------------------------

    def _grant(self, number: int, header: bytes) -> bool:
        """Let the sender send an episode, and await its buffer."""
        size, config = header_size(header), self._config
        with self._changed:
            self.pending.add(number)
        self._await_room(number, size)
        assert self._channel is not None
        with timed("receiver: wait for a buffer", PARTS):
            slot = self._channel.acquire(size, 10.0 * config.timeout_s)
        if slot is None:
            self._break("earlier buffers did not arrive")
            return False
        self._receiver._begin()
        try:
            with timed("receiver: grant", PARTS):
                self._line.say(GRANT, number)
                self._channel.start_receive(slot, size)
        except Exception:
            self._receiver._end()
            raise
        self._posted.put((number, header, size, slot))
        return True

    def _await_room(self, number: int, size: int) -> None:
        """Wait until an episode may be held that nobody took, and count it."""
        receiver, limit = self._receiver, self._config.limit_mb * 1_000_000

        def may_come() -> bool:
            fits = receiver._untaken == 0 or receiver._untaken + size <= limit
            wanted = any(number <= asked for asked in self._awaited)
            return fits or wanted or self.broken is not None or number in self.gone

        told = False
        with timed("receiver: wait for room", PARTS):
            while True:
                with self._changed:
                    if self._changed.wait_for(may_come, LOOK_S if told else 0.0):
                        if number not in self.gone:
                            self._sizes[number] = size
                            receiver._untaken += size
                        return
                    receiver._release(receiver._ledger.expired())
                if not told:
                    self._line.say(FULL, self._config.limit_mb)
                    told = True
                while self._line.has_news():
                    kind, said, text = self._line.hear(self._config.timeout_s)
                    if kind == DISCARD:
                        with self._changed:
                            self.drop(said)
                    else:
                        self._heard.append((kind, said, text))

    def _leave_room(self, number: int) -> None:
        """Count an episode no more (the condition is held)."""
        self._receiver._untaken -= self._sizes.pop(number, 0)
        self._changed.notify_all()

    def _handle(self, number: int) -> str:
        return f"nccl-{self._receiver._session.token}-{self._number}-{number}"

    def _finish(self) -> None:
        """Take in what arrives; after the first that does not, only count what was granted as over."""
        while (item := self._posted.get()) is not None:
            number, header, size, slot = item
            why = None
            try:
                assert self._channel is not None
                with timed("receiver: wire, copy from the GPU", PARTS):
                    done = self.broken is None and self._channel.finish(slot, size, self._config.timeout_s)
                if done:
                    with timed("receiver: unpack", PARTS):
                        self._arrived(number, unpack(header, self._take_out(slot, size)), size)
                    self._channel.release(slot)
                else:
                    why = f"nothing came within {self._config.timeout_s:g} s after it was granted; {SLOWER}"
            except (RuntimeError, ValueError) as err:
                why = str(err)
            finally:
                self._receiver._end()
            if why is not None:
                self._break(why)

    def _take_out(self, slot: Slot, size: int) -> NDArray[np.uint8]:
        """The bytes that arrived in a slot: its memory itself, or a copy where episodes hold enough of it."""
        receiver = self._receiver
        # Every array of the episode is a view of it, so it comes back with the last of them.
        lent = receiver._blocks.lend(slot.memory, size)
        if lent is not None:
            slot.memory = slot.memory[:0]
            return lent
        buffer = np.empty(size, np.uint8)
        receiver._copiers.copy(buffer, slot.array(size))
        return buffer

    def _arrived(self, number: int, episode: Episode, size: int) -> None:
        ledger = self._receiver._ledger
        with self._changed:
            self.pending.discard(number)
            if number not in self.gone:
                self.held[number] = episode
                self._receiver._release(ledger.add(self._handle(number), size, wanted=True))
            self._changed.notify_all()

    def _break(self, why: str) -> None:
        with self._changed:
            if self.broken is None and not self.closed:
                self.broken = why
            self._changed.notify_all()
        channel = self._channel
        if channel is not None:
            channel.abort()
        self._line.hang_up()


class _Numbers:
    """A set of whole numbers from 0 on that were nearly all added in order: a bound and what lies beyond it."""

    def __init__(self) -> None:
        self._below, self._others = 0, set[int]()

    def __contains__(self, number: int) -> bool:
        return number < self._below or number in self._others

    def add(self, number: int) -> None:
        self._others.add(number)
        while self._below in self._others:
            self._others.remove(self._below)
            self._below += 1


class Sender:
    """A rollout process's end; see `types.Transport`. Joins the trainer at its first episode.

    After an error the next `send` joins again, as a new link: a trainer that was started again finds its workers back.
    """

    def __init__(self, folder: Path, config: NcclConfig) -> None:
        self._folder, self._config = folder, config
        self._device = current_device(config.backend)
        self._copiers = Copiers(config.copy_threads)
        self._blocks = _blocks(config, self._device)
        self._lock = threading.Lock()
        self._outgoing: _Outgoing | None = None
        self._left: str | None = None
        self._closed = False

    def send(self, episode: Episode) -> str:
        """Begin to send an episode, which nobody may change any more; waits while `in_flight` are on their way.

        Raises:
            TimeoutError: the trainer took none in time, or there is none; names peer, handle, seconds and remedy.
            ConnectionError: the trainer is gone, or an earlier transfer failed.

        """
        with timed("sender: pack", PARTS):
            message = pack(episode)
        with self._lock:
            assert not self._closed, "send after close"
            try:
                if self._outgoing is None:
                    self._outgoing = _Outgoing(
                        self._folder, self._config, self._device, self._copiers, self._blocks, self._left
                    )
                return self._outgoing.send(message)
            except (TimeoutError, ConnectionError) as err:
                # A trainer that only is slow may be joined again; one that is gone is not waited for twice.
                if self._outgoing is not None:
                    self._left = self._outgoing.session.token if isinstance(err, ConnectionError) else None
                    self._outgoing.abort()
                    self._outgoing = None
                raise

    def allocate(self, count: int) -> Bytes:
        """Memory for `count` bytes of an episode to be sent; where the GPU can read it, sending copies nothing.

        Page-locked while no more than `pinned_mb` of it is in use, for NCCL; else memory as any other.
        """
        found = self._blocks.allocate(count)
        return np.empty(count, np.uint8) if found is None else found

    def receive(self, handle: str) -> Episode:
        """Refused: this end sends."""
        raise RuntimeError("a rollout process's end of transport=nccl sends; episodes are received by the trainer")

    def discard(self, handle: str) -> None:
        """Tell the trainer to free an episode of this end; an unknown handle is fine."""
        with self._lock, contextlib.suppress(ConnectionError):
            if self._outgoing is not None:
                self._outgoing.discard(handle)

    def close(self) -> None:
        """Wait for what is under way, then free everything that this end sent. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._outgoing is not None:
                self._outgoing.close()
            self._copiers.close()
            self._blocks.close()


@dataclass
class _Job:
    """An episode on its way.

    Attributes:
        header, size: of its message.
        slot: where its bytes are.
        direct: those that the GPU reads from where they are.
        copied: from where to where bytes of the message are copied to, and how much earlier in the slot they lie.
        left: parts that are not yet copied.
        announced: when, s; None until then.
        granted: when, s; None until then.

    """

    header: bytes
    size: int
    slot: Slot
    direct: list[Tensor]
    copied: list[tuple[int, int, int]]
    left: int
    announced: float | None = None
    granted: float | None = None


class _Outgoing:
    """One life of a link, as its sender sees it; its fields belong to the condition."""

    def __init__(
        self, folder: Path, config: NcclConfig, device: Any, copiers: Copiers, blocks: Blocks, left: str | None
    ) -> None:
        self._config, self._copiers = config, copiers
        self.session, self._line = find(folder, config.timeout_s, left)
        self._link = introduce(self._line, self.session.token, me(), config.timeout_s)
        pair = dist.PrefixStore(f"{self._link}/pair", self.session.connect(config.timeout_s))
        self._channel = _join(pair, self.session, device, config, blocks)
        self._changed = threading.Condition()
        self._jobs: dict[int, _Job] = {}
        self._sent, self._taken, self._over = 0, 0, False
        self._full_mb: int | None = None  # of the receiver, which said that there is no room for more
        self._failed: Exception | None = None
        self._started: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        for name, work in (("hear", self._hear), ("sent", self._finish)):
            threading.Thread(target=work, name=f"alpagym-{name}", daemon=True).start()

    def send(self, message: Message) -> str:
        number, config = self._sent, self._config
        self._check_grants()
        self._await_room(number)
        large = [(at, data) for at, data in message.pieces if len(data) >= DIRECT]
        direct = {at: memory for at, data in large if (memory := self._channel.readable(data)) is not None}
        todo = closed_up(parts((at, data) for at, data in message.pieces if at not in direct))
        with timed("sender: wait for a buffer", PARTS):
            on_cpu = todo[-1].end - todo[-1].before if todo else 0
            slot = self._channel.acquire(message.size, config.timeout_s, on_cpu if direct else None)
        if slot is None:
            raise self._failed or TimeoutError(
                f"no buffer got free within {config.timeout_s:g} s for {self._handle(number)} to {self.session.peer}"
                f"{self._full()}; {SLOWER}"
            )
        with timed("sender: begin copies to the GPU", PARTS):
            self._channel.load(slot, list(direct.items()))
        job = _Job(message.header, message.size, slot, list(direct.values()), _ranges(todo), len(todo))
        with self._changed:
            self._jobs[number] = job
            self._sent += 1
        here = sum(part.end - part.start for part in todo) < DIRECT
        # Threads copy what is large beside send() and what travels; nobody writes into an episode.
        for part in todo:
            work = functools.partial(self._fill, number, job, part)
            work() if here else self._copiers.give(work)
        if not todo:
            self._filled(number, job)
        return self._handle(number)

    def discard(self, handle: str) -> None:
        match = _HANDLE.fullmatch(handle)
        ours = match is not None and (match["session"], int(match["link"])) == (self.session.token, self._link)
        if match is not None and ours and int(match["number"]) < self._sent:
            self._line.say(DISCARD, int(match["number"]))

    def close(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failed or not self._jobs, self._config.timeout_s)
            gone = self._failed is None
        if gone:
            with contextlib.suppress(ConnectionError):
                self._line.say(CLOSE)
        self.abort()

    def abort(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._started.put(None)
        self._channel.abort()
        self._line.hang_up()

    # ------------------------------------------------------------

    def _handle(self, number: int) -> str:
        return f"nccl-{self.session.token}-{self._link}-{number}"

    def _await_room(self, number: int) -> None:
        """Wait until episode `number` may be taken up."""
        config = self._config
        with timed("sender: wait until fewer are on their way", PARTS), self._changed:
            came = self._changed.wait_for(
                lambda: self._failed or number - self._taken < config.in_flight, config.timeout_s
            )
            if self._failed is not None:
                raise self._failed
        if not came:
            raise TimeoutError(
                f"{self.session.peer} took no episode within {config.timeout_s:g} s, and {config.in_flight} are on "
                f"their way before {self._handle(number)} (transport.in_flight){self._full()}; is it alive? {SLOWER}"
            )

    def _check_grants(self) -> None:
        """Raise where an episode was announced too long ago and not asked for."""
        late = time.perf_counter() - self._config.timeout_s
        with self._changed:
            waiting = [n for n, job in self._jobs.items() if job.announced and not job.granted and job.announced < late]
        if waiting and self._failed is None:
            raise TimeoutError(
                f"{self.session.peer} did not ask for {self._handle(waiting[0])} within {self._config.timeout_s:g} s"
                f"{self._full()}; is it alive? {SLOWER}"
            )

    def _full(self) -> str:
        if self._full_mb is None:
            return ""
        return f": {self._full_mb} MB of episodes that it did not take are there already (transport.limit_mb)"

    def _fail(self, err: Exception) -> None:
        with self._changed:
            if self._over:
                return
            self._failed = self._failed or err
            self._changed.notify_all()
        self._started.put(None)
        self._channel.abort()

    def _fill(self, number: int, job: _Job, part: Part) -> None:
        """Copy a part of an episode into its buffer."""
        try:
            with timed("sender: copy into the buffer, all threads", PARTS):
                part.fill(job.slot.memory.numpy())
            with self._changed:
                job.left -= 1
                last = job.left == 0
            if last:
                self._filled(number, job)
        except Exception as err:  # the thread copies for others too
            self._fail(self._lost(number, err))

    def _filled(self, number: int, job: _Job) -> None:
        """Send on to the GPU what was copied, and announce the episode."""
        with timed("sender: begin copies to the GPU", PARTS):
            memory = job.slot.memory
            self._channel.load(job.slot, [(start, memory[start - k : end - k]) for start, end, k in job.copied])
        job.announced = time.perf_counter()
        self._line.say(EPISODE, number, job.header)

    def _hear(self) -> None:
        """Send what is granted, in that order, and count what was taken."""
        try:
            while True:
                kind, number, _ = self._line.hear()
                if kind == GRANT:
                    self._full_mb = None
                    self._granted(number, self._jobs[number])
                    continue
                if kind == FULL:
                    self._full_mb = number
                    continue
                with self._changed:
                    self._taken = number
                    self._changed.notify_all()
        except (ConnectionError, RuntimeError, KeyError) as err:
            self._fail(self._lost(self._sent, err))

    def _granted(self, number: int, job: _Job) -> None:
        job.granted = time.perf_counter()
        PARTS.add("sender: wait for the grant", job.granted - (job.announced or job.granted))
        with timed("sender: begin to send", PARTS):
            self._channel.start_send(job.slot, job.size)
        self._started.put(number)

    def _finish(self) -> None:
        """Free the buffers that have gone."""
        seconds = self._config.timeout_s
        while (number := self._started.get()) is not None:
            job = self._jobs[number]
            try:
                with timed("sender: copies to the GPU, wire", PARTS):
                    done = self._channel.finish(job.slot, job.size, seconds)
            except RuntimeError as err:
                self._fail(self._lost(number, err))
                return
            if not done:
                where = f"{self.session.peer} did not take the buffer of {self._handle(number)}"
                self._fail(TimeoutError(f"{where} within {seconds:g} s; is it alive? {SLOWER}"))
                return
            job.direct.clear()  # before its stream has other work, which freed memory would wait for
            self._channel.release(job.slot)
            with self._changed:
                del self._jobs[number]
                self._changed.notify_all()

    def _lost(self, number: int, err: Exception) -> ConnectionError:
        reason = (str(err) or type(err).__name__).splitlines()[0][:200]
        return ConnectionError(f"{self.session.peer} broke off before {self._handle(number)} was sent: {reason}")


def _ranges(found: list[Part]) -> list[tuple[int, int, int]]:
    """Where the parts lie, those beside each other as one, and how much earlier in the buffer."""
    ranges: list[tuple[int, int, int]] = []
    for part in found:
        if ranges and part.before == ranges[-1][2]:
            ranges[-1] = ranges[-1][0], part.end, part.before
        else:
            ranges.append((part.start, part.end, part.before))
    return ranges


def _blocks(config: NcclConfig, device: Any) -> Blocks:
    return Blocks(config.pinned_mb * 1_000_000, plain if device is None else page_locked)


def _join(pair: dist.Store, session: Session, device: Any, config: NcclConfig, blocks: Blocks) -> Channel:
    try:
        return Channel(pair, 1, device, config.host, config.timeout_s, blocks)
    except RuntimeError as err:
        reason = str(err).splitlines()[0][:200]
        raise ConnectionError(f"no {config.backend} connection to {session.peer}: {reason}") from err
