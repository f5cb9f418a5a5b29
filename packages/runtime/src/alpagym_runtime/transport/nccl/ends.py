"""The two ends: many senders, one receiver.

An episode is announced in the store (its header), granted by the receiver, and travels as one buffer. What is on its
way is bounded: a sender announces number n only once its episode n - in_flight was taken, so a slow trainer holds its
workers up and no memory grows. A grant is also where transfers yield to a weight sync: inside `paused()` none is given
and none is under way.

Keys of link L: c/k control messages of the sender in order, r/n grant of episode n, t/k the k-th episode was taken.
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from alpagym_runtime.transport.config import NcclConfig
from alpagym_runtime.transport.nccl.channel import Channel, Slot, current_device
from alpagym_runtime.transport.nccl.message import Message, copy_into, copy_pieces, header_size, pack, unpack
from alpagym_runtime.transport.nccl.rendezvous import Session, find, forget, listen, me, put, take, wait_for
from alpagym_runtime.transport.rules import Ledger
from alpagym_runtime.types import Episode

_HANDLE = re.compile(r"nccl-(?P<session>[0-9a-f]{16})-(?P<link>[0-9]{1,9})-(?P<number>[0-9]{1,12})")
EPISODE, DISCARD, CLOSE = b"e", b"d", b"c"
SLOWER = "if it is only slow, raise transport.timeout_s"


class Receiver:
    """The trainer's end; see `types.Transport`. Takes episodes as they come, from any number of senders."""

    def __init__(self, folder: Path, config: NcclConfig) -> None:
        self._config = config
        self._device = current_device(config.backend)
        self._folder = folder
        self._session, store = listen(folder, config.host, config.port)
        self._store: dist.TCPStore | None = store
        self._accepting = self._session.connect(config.timeout_s)
        self._threads = ThreadPoolExecutor(config.copy_threads, "alpagym-copy")
        self._ledger = Ledger(config.limit_mb * 1_000_000, config.expire_s)
        self._changed = threading.Condition()
        self._links: dict[int, _Link] = {}
        # Reentrant: arrays can end, and give their memory back, wherever Python collects garbage.
        self._pinned, self._lent = threading.RLock(), 0
        self._under_way, self._holding, self._closed = 0, False, False
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
        with self._changed:
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
                    self._ledger.remove(handle)

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
            links = list(self._links.values())
        self._tell(f"join/{len(self._links)}", b"")  # wakes the acceptor
        self._acceptor.join(self._config.timeout_s)
        for link in links:
            link.close()
        self._threads.shutdown()
        forget(self._folder, self._session)
        self._store = None  # with it the store ends, and whoever waits there

    # ------------------------------------------------------------ for links

    def _begin(self) -> None:
        """Wait until transfers are let, and count one."""
        with self._changed:
            self._changed.wait_for(lambda: not self._holding or self._closed)
            self._under_way += 1

    def _lend(self, size: int) -> bool:
        """Count pinned memory that an episode is to hold; False where it would be too much."""
        if self._device is None:
            return True
        with self._pinned:
            if self._lent + size > self._config.pinned_mb * 1_000_000:
                return False
            self._lent += size
            return True

    def _given_back(self, size: int) -> None:
        with self._pinned:
            self._lent -= size

    def _tell(self, key: str, value: bytes = b"1") -> None:
        if self._store is not None:
            with contextlib.suppress(ConnectionError):
                put(self._store, key, value)

    def _end(self) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    # ------------------------------------------------------------

    def _parse(self, handle: str) -> tuple[int, int]:
        match = _HANDLE.fullmatch(handle)
        if match is None or match["session"] != self._session.token:
            raise self._ledger.missing(handle)
        return int(match["link"]), int(match["number"])

    def _accept(self) -> None:
        while not self._closed:
            number = len(self._links)
            try:
                if not wait_for(self._accepting, f"join/{number}", None):
                    continue
                peer = take(self._accepting, f"join/{number}").decode()
            except ConnectionError:
                return  # the store ended with this process
            with self._changed:
                if self._closed:
                    return
                self._links[number] = _Link(self, number, peer)
                self._changed.notify_all()


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

    def __init__(self, receiver: Receiver, number: int, peer: str) -> None:
        self._receiver, self._number, self.peer = receiver, number, peer
        self._config, self._changed = receiver._config, receiver._changed
        self.held: dict[int, Episode] = {}
        self.pending: set[int] = set()
        self.taken: set[int] = set()
        self.gone = _Numbers()
        self.broken: str | None = None
        self.closed = False
        self._taken_count, self._turn = 0, 0
        self._channel: Channel | None = None
        self._posted: queue.SimpleQueue[tuple[int, bytes, int, Slot] | None] = queue.SimpleQueue()
        self._control = threading.Thread(target=self._run, name=f"alpagym-link-{number}", daemon=True)
        self._finisher = threading.Thread(target=self._finish, name=f"alpagym-arrive-{number}", daemon=True)
        self._control.start()
        self._finisher.start()

    def take(self, number: int) -> None:
        """Tell the sender that one more was taken (the condition is held)."""
        self.taken.add(number)
        self._receiver._tell(f"{self._number}/t/{self._taken_count}")
        self._taken_count += 1

    def drop(self, number: int) -> None:
        """Free an episode, or do so when it arrives (the condition is held)."""
        if number in self.gone:
            return
        self.gone.add(number)
        self.held.pop(number, None)
        if number not in self.taken:
            self.take(number)
        self.taken.discard(number)
        self._changed.notify_all()

    def close(self) -> None:
        """End the link from the receiver's side."""
        self._break(f"{self._receiver._session.peer} closed")
        self._receiver._tell(f"{self._number}/c/{self._turn}", CLOSE)  # wakes the thread that waits for it
        self._posted.put(None)
        for thread in (self._control, self._finisher):
            thread.join(self._config.timeout_s)

    # ------------------------------------------------------------ threads

    def _run(self) -> None:
        config = self._config
        try:
            store = self._receiver._session.connect(config.timeout_s)
            pair = dist.PrefixStore(f"{self._number}/pair", store)
            self._channel = Channel(pair, 0, self._receiver._device, config.host, config.timeout_s)
            while True:
                key = f"{self._number}/c/{self._turn}"
                wait_for(store, key, None)
                message = take(store, key)
                self._turn += 1
                if message[:1] == CLOSE:
                    break
                if message[:1] == DISCARD:
                    with self._changed:
                        self.drop(int(message[1:]))
                    continue
                place, _, header = message[1:].partition(b" ")
                if not self._grant(store, int(place), header):
                    return
        except (ConnectionError, RuntimeError, ValueError) as err:
            self._break(str(err))
            return
        self._posted.put(None)
        self._finisher.join()
        with self._changed:
            for number in list(self.held):
                self.drop(number)
            self.closed = True
            self._changed.notify_all()
        self._channel.abort()

    def _grant(self, store: Any, number: int, header: bytes) -> bool:
        """Let the sender send an episode, and await its buffer."""
        size, config = header_size(header), self._config
        with self._changed:
            self.pending.add(number)
        assert self._channel is not None
        slot = self._channel.acquire(size, 10.0 * config.timeout_s)
        if slot is None:
            self._break("earlier buffers did not arrive")
            return False
        self._receiver._begin()
        try:
            put(store, f"{self._number}/r/{number}")
            self._channel.start_receive(slot, size)
        except Exception:
            self._receiver._end()
            raise
        self._posted.put((number, header, size, slot))
        return True

    def _finish(self) -> None:
        while (item := self._posted.get()) is not None:
            number, header, size, slot = item
            why = None
            try:
                assert self._channel is not None
                if not self._channel.finish(slot, size, self._config.timeout_s):
                    why = f"nothing came within {self._config.timeout_s:g} s after it was granted; {SLOWER}"
                else:
                    self._arrived(number, unpack(header, self._take_out(slot, size)), size)
                self._channel.release(slot)
            except (RuntimeError, ValueError) as err:
                why = str(err)
            finally:
                self._receiver._end()
            if why is not None:
                self._break(why)
                return

    def _take_out(self, slot: Slot, size: int) -> NDArray[np.uint8]:
        """The bytes that arrived in a slot: its memory itself, or a copy where episodes hold enough pinned memory."""
        receiver = self._receiver
        if receiver._lend(size):
            buffer = slot.give(size)
            # Every array of the episode is a view of it, so it goes with the last of them.
            weakref.finalize(buffer, receiver._given_back, size)
            return buffer
        buffer = np.empty(size, np.uint8)
        copy_pieces([(buffer, slot.array(size))], receiver._threads)
        return buffer

    def _arrived(self, number: int, episode: Episode, size: int) -> None:
        ledger, token = self._receiver._ledger, self._receiver._session.token
        with self._changed:
            self.pending.discard(number)
            if number not in self.gone:
                self.held[number] = episode
                for old in ledger.add(f"nccl-{token}-{self._number}-{number}", size):
                    link, released = self._receiver._parse(old)
                    self._receiver._links[link].drop(released)
            self._changed.notify_all()

    def _break(self, why: str) -> None:
        with self._changed:
            if self.broken is None and not self.closed:
                self.broken = why
            self._changed.notify_all()
        if self._channel is not None:
            self._channel.abort()


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
        self._threads = ThreadPoolExecutor(config.copy_threads, "alpagym-copy")
        self._lock = threading.Lock()
        self._outgoing: _Outgoing | None = None
        self._left: str | None = None
        self._closed = False

    def send(self, episode: Episode) -> str:
        """Announce an episode and queue its buffer; waits while `in_flight` earlier ones are on their way.

        Raises:
            TimeoutError: the trainer took none in time, or there is none; names peer, handle, seconds and remedy.
            ConnectionError: the trainer is gone, or an earlier transfer failed.

        """
        message = pack(episode)
        with self._lock:
            assert not self._closed, "send after close"
            try:
                if self._outgoing is None:
                    self._outgoing = _Outgoing(self._folder, self._config, self._device, self._threads, self._left)
                return self._outgoing.send(message)
            except (TimeoutError, ConnectionError) as err:
                # A trainer that only is slow may be joined again; one that is gone is not waited for twice.
                if self._outgoing is not None:
                    self._left = self._outgoing.session.token if isinstance(err, ConnectionError) else None
                    self._outgoing.abort()
                    self._outgoing = None
                raise

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
            self._threads.shutdown()


class _Outgoing:
    """One life of a link, as its sender sees it."""

    def __init__(
        self, folder: Path, config: NcclConfig, device: Any, threads: ThreadPoolExecutor, left: str | None
    ) -> None:
        self._config, self._threads = config, threads
        self.session, self._store = find(folder, config.timeout_s, left)
        self._granting = self.session.connect(config.timeout_s)
        self._link = self._store.add("links", 1) - 1
        put(self._store, f"join/{self._link}", me().encode())
        pair = dist.PrefixStore(f"{self._link}/pair", self._store)
        self._channel = _join(pair, self.session, device, config)
        self._turn, self._sent = 0, 0
        self._failed: Exception | None = None
        self._announced: queue.SimpleQueue[tuple[int, Message, Slot] | None] = queue.SimpleQueue()
        self._filled: queue.SimpleQueue[tuple[int, int, Slot] | None] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[tuple[int, int, Slot] | None] = queue.SimpleQueue()
        self._workers = [
            threading.Thread(target=work, name=f"alpagym-{name}", daemon=True)
            for name, work in (("fill", self._fill), ("send", self._transfer), ("sent", self._finish))
        ]
        for worker in self._workers:
            worker.start()

    def send(self, message: Message) -> str:
        number = self._sent
        if self._failed is not None:
            raise self._failed
        try:
            slot = self._room(number, message.size)
            self._say(EPISODE + str(number).encode() + b" " + message.header)
        except ConnectionError as err:
            if self._failed is None:
                raise self._lost(number, err) from err
            raise self._failed from None
        self._sent += 1
        self._announced.put((number, message, slot))
        return self._handle(number)

    def _room(self, number: int, size: int) -> Slot:
        """A buffer for episode `number`, once few enough are on their way."""
        config, handle = self._config, self._handle(number)
        before = number - config.in_flight
        key = f"{self._link}/t/{before}"
        if before >= 0:
            if not wait_for(self._store, key, config.timeout_s):
                raise self._failed or TimeoutError(
                    f"{self.session.peer} took no episode within {config.timeout_s:g} s, and {config.in_flight} are on "
                    f"their way before {handle} (transport.in_flight); is it alive? {SLOWER}"
                )
            take(self._store, key)
        slot = self._channel.acquire(size, config.timeout_s)
        if slot is None:
            raise self._failed or TimeoutError(
                f"no buffer got free within {config.timeout_s:g} s for {handle} to {self.session.peer}; {SLOWER}"
            )
        return slot

    def discard(self, handle: str) -> None:
        match = _HANDLE.fullmatch(handle)
        ours = match is not None and (match["session"], int(match["link"])) == (self.session.token, self._link)
        if match is not None and ours and int(match["number"]) < self._sent:
            self._say(DISCARD + match["number"].encode())

    def close(self) -> None:
        self._announced.put(None)
        for worker in self._workers:
            worker.join(self._config.timeout_s)
        if self._failed is None:
            with contextlib.suppress(ConnectionError):
                self._say(CLOSE)
        self.abort()

    def abort(self) -> None:
        self._announced.put(None)
        self._filled.put(None)
        self._started.put(None)
        self._channel.abort()

    # ------------------------------------------------------------

    def _handle(self, number: int) -> str:
        return f"nccl-{self.session.token}-{self._link}-{number}"

    def _say(self, message: bytes) -> None:
        put(self._store, f"{self._link}/c/{self._turn}", message)
        self._turn += 1

    def _fail(self, err: Exception) -> None:
        self._failed = self._failed or err
        self._started.put(None)
        self._channel.abort()

    def _fill(self) -> None:
        """Copy episodes into their buffers, beside send() and what travels; nobody writes into an episode."""
        while (item := self._announced.get()) is not None:
            number, message, slot = item
            copy_into(slot.array(message.size), message, self._threads)
            self._filled.put((number, message.size, slot))
        self._filled.put(None)

    def _transfer(self) -> None:
        """Send what is granted, in order."""
        seconds = self._config.timeout_s
        while (item := self._filled.get()) is not None:
            number, size, slot = item
            key = f"{self._link}/r/{number}"
            try:
                if not wait_for(self._granting, key, seconds):
                    raise TimeoutError(
                        f"{self.session.peer} did not ask for {self._handle(number)} within {seconds:g} s; "
                        f"is it alive? {SLOWER}"
                    )
                take(self._granting, key)
                self._channel.start_send(slot, size)
            except (ConnectionError, RuntimeError) as err:
                self._fail(self._lost(number, err))
                return
            except TimeoutError as err:
                self._fail(err)
                return
            self._started.put(item)
        self._started.put(None)

    def _finish(self) -> None:
        """Free the buffers that have gone."""
        seconds = self._config.timeout_s
        while (item := self._started.get()) is not None:
            number, size, slot = item
            try:
                done = self._channel.finish(slot, size, seconds)
            except RuntimeError as err:
                self._fail(self._lost(number, err))
                return
            if not done:
                where = f"{self.session.peer} did not take the buffer of {self._handle(number)}"
                self._fail(TimeoutError(f"{where} within {seconds:g} s; is it alive? {SLOWER}"))
                return
            self._channel.release(slot)

    def _lost(self, number: int, err: Exception) -> ConnectionError:
        reason = str(err).splitlines()[0][:200]
        return ConnectionError(f"{self.session.peer} broke off before {self._handle(number)} was sent: {reason}")


def _join(pair: dist.Store, session: Session, device: Any, config: NcclConfig) -> Channel:
    try:
        return Channel(pair, 1, device, config.host, config.timeout_s)
    except RuntimeError as err:
        reason = str(err).splitlines()[0][:200]
        raise ConnectionError(f"no {config.backend} connection to {session.peer}: {reason}") from err
