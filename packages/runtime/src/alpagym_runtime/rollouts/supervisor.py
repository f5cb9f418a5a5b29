"""The thread that looks after rollout workers.

It starts workers, hands out jobs, takes episodes over, notices a worker's end by its connection (at once, whoever
started it), names the cause and starts it again. A lost worker's episodes are driven again under the same seeds, so a
crash changes no result; one that was lost too often is void. An episode counts when it has arrived, and only for the
worker that held its job.
"""

from __future__ import annotations

import contextlib
import selectors
import shutil
import socket
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from alpagym_runtime.errors import ConfigError, CorruptFileError, SimulatorError
from alpagym_runtime.rollouts.collector import environment
from alpagym_runtime.rollouts.launchers import Launcher, Started
from alpagym_runtime.rollouts.queue import Job, JobQueue
from alpagym_runtime.rollouts.wire import FOLDER, LONGEST_HELLO, LONGEST_LINE, Link, Message, Rendezvous
from alpagym_runtime.run_config import RunConfig
from alpagym_runtime.telemetry.timers import TIMERS
from alpagym_runtime.transport.between import remove_leftovers
from alpagym_runtime.types import Ended, Episode, Failure, Receipt, Transport

LOOK_S = 0.1
HELLO_S = 10.0
SILENT_S = 60.0
"""A worker whose beats stop for so long is lost: its machine hangs, or is gone without a word."""
REPORT_S = 600.0
"""Longest wait for a worker that was started to report."""
CLOSE_S = 5.0


@dataclass
class Worker:
    """What the supervisor knows of a worker.

    Attributes:
        index: its number.
        started: its process; None before the first and after the last.
        link: while it is connected.
        jobs: what it was given, by number.
        error: what it said why it ends.
        failures: its ends since it last delivered an episode.
        gone: for good.
        since, heard: when it was started, and last heard of.
        cpu_before_s, cpu_s: of its processes that ended, and of the present one.
        peak_rss_bytes: the most of any.

    """

    index: int
    started: Started | None = None
    link: Link | None = None
    jobs: dict[int, Job] = field(default_factory=dict)
    error: Message | None = None
    failures: int = 0
    gone: bool = False
    since: float = 0.0
    heard: float = 0.0
    cpu_before_s: float = 0.0
    cpu_s: float = 0.0
    peak_rss_bytes: int = 0


@dataclass
class State:
    """What the trainer's thread and the supervisor's share; both hold `lock` to look at it.

    Attributes:
        queue: what waits to be driven.
        workers: all of them.
        weights: number of the newest publication.
        notes: lines for people.
        failure: what the supervisor could not go on from.
        families: kind of situation by scene, as workers said.
        restarts, lost: of workers, and of episodes with them.

    """

    queue: JobQueue
    workers: list[Worker]
    weights: int = 0
    notes: deque[str] = field(default_factory=deque)
    failure: Exception | None = None
    families: dict[str, str] = field(default_factory=dict)
    restarts: int = 0
    lost: int = 0
    lock: threading.Condition = field(default_factory=threading.Condition)


class Supervisor:
    """See the module's text; it works from its making to `close`.

    Args:
        config: the frozen config.
        directory: the run's.
        transport: the trainer's end.
        launcher: how workers are started.
        state: what it shares with the trainer's thread.

    """

    def __init__(
        self, config: RunConfig, directory: Path, transport: Transport, launcher: Launcher, state: State
    ) -> None:
        self._config, self._directory, self._transport = config, directory, transport
        self._launcher, self._state = launcher, state
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server((launcher.host, 0))
        self._rendezvous = Rendezvous(launcher.host, self._listener.getsockname()[1])
        self._rendezvous.write(directory)
        self._bell = socket.socketpair()
        for end in self._bell:
            end.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._bell[1], selectors.EVENT_READ, None)
        self._strangers: dict[Link, float] = {}
        # Workers are its children: they are killed with it (PR_SET_PDEATHSIG goes by thread), and it outlives them.
        self._thread = threading.Thread(target=self._supervise, name="workers", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There may be something to hand out."""
        # It has been rung often enough, or is closed.
        with contextlib.suppress(BlockingIOError, OSError):
            self._bell[0].send(b"x")

    def close(self) -> None:
        """End the workers, and everything that was kept for them."""
        self._closing = True
        self.wake()
        self._thread.join()

    # ------------------------------------------------------------ in the thread

    def _supervise(self) -> None:
        try:
            for worker in self._state.workers:
                self._launch(worker)
            while not self._closing:
                for key, _ in self._selector.select(LOOK_S):
                    if key.fileobj is self._bell[1]:
                        self._bell[1].recv(4096)
                    elif key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._hear(key.data)
                self._look_after()
                self._hand_out()
        except Exception as err:
            self._fail(err)
        finally:
            self._end()

    def _launch(self, worker: Worker) -> None:
        worker.started = self._launcher.start(worker.index)
        worker.since = worker.heard = time.monotonic()
        worker.error = None

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(HELLO_S)
        link = Link(connection)
        self._strangers[link] = time.monotonic() + HELLO_S
        self._selector.register(connection, selectors.EVENT_READ, link)

    def _hear(self, link: Link) -> None:
        worker = next((worker for worker in self._state.workers if worker.link is link), None)
        try:
            for message in link.receive(LONGEST_LINE if worker else LONGEST_HELLO):
                if worker is None:
                    worker = self._welcome(link, message)
                    if worker is None:
                        return
                else:
                    self._take_message(worker, message)
        except (EOFError, OSError, ValueError, KeyError, TypeError) as err:
            if worker is not None and worker.link is link:
                self._bury(worker, "" if isinstance(err, EOFError) else f"sent what is no message: {err}")
            else:
                self._hang_up(link)

    def _hang_up(self, link: Link) -> None:
        self._strangers.pop(link, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.socket)
        link.close()

    def _welcome(self, link: Link, message: Message) -> Worker | None:
        """The worker behind a hello; strangers and second ones of a name are hung up on."""
        index = message.get("index")
        known = message.get("type") == "hello" and self._rendezvous.admits(message)
        free = (worker for worker in self._state.workers if worker.link is None and not worker.gone)
        worker = next((worker for worker in free if worker.index == index), None)
        if not known or worker is None or message.get("config_hash") != self._config.config_hash:
            self._hang_up(link)
            return None
        self._strangers.pop(link, None)
        with self._state.lock:
            worker.link, worker.heard = link, time.monotonic()
            self._state.lock.notify_all()
        return worker

    def _take_message(self, worker: Worker, message: Message) -> None:
        worker.heard = time.monotonic()
        if message["type"] == "done":
            self._take_over(worker, int(message["number"]), str(message["handle"]), str(message["family"]))
        elif message["type"] == "beat":
            worker.cpu_s = float(message["cpu_s"])
            worker.peak_rss_bytes = max(worker.peak_rss_bytes, int(message["peak_rss_bytes"]))
            for name, seconds in message["seconds"].items():
                TIMERS.add(str(name), float(seconds))
        elif message["type"] == "error":
            worker.error = message

    def _take_over(self, worker: Worker, number: int, handle: str, family: str) -> None:
        """An episode has arrived: it is the trainer's from here on, whatever becomes of its worker."""
        job = worker.jobs.get(number)
        if job is None:  # of a job that was given up meanwhile
            self._transport.discard(handle)
            return
        try:
            episode = self._transport.receive(handle)
        except (KeyError, CorruptFileError, OSError) as err:
            with self._state.lock:
                del worker.jobs[number]
            self._retry(job, f"its episode did not arrive: {err}")
            return
        self._transport.discard(handle)
        worker.failures = 0
        with self._state.lock:
            del worker.jobs[number]
            if family:
                self._state.families[episode.request.scene_id] = family
            self._deliver(job, episode)

    def _deliver(self, job: Job, episode: Episode) -> None:
        if job.batch is not None:
            job.batch.arrived.append((job.place, episode))
            self._state.lock.notify_all()

    def _retry(self, job: Job, why: str) -> None:
        """A job that came back without an episode: again, or void after too many times."""
        with self._state.lock:
            self._state.lost += 1
            if job.batch is None:
                return
            if job.losses < self._config.rollout.retries:
                self._state.queue.take_back(job)
                return
            text = f"lost {job.losses + 1} times with its worker, the last time as that {why}"
            versions, cpu = environment()
            void = Episode(job.request, Ended.FAILED, Failure("transient", "WORKER", text), {}, float("nan"), False)
            receipt = Receipt(self._config.config_hash, "", versions, cpu)
            self._deliver(job, replace(void, actor=job.task.actor, sampling=job.task.sampling, receipt=receipt))

    def _look_after(self) -> None:
        """Ends, deadlines and silence."""
        now, rollout = time.monotonic(), self._config.rollout
        for link, deadline in list(self._strangers.items()):
            if now > deadline:
                self._hang_up(link)
        for worker in self._state.workers:
            if worker.gone or worker.started is None:
                continue
            late = next((job for job in worker.jobs.values() if now - job.since > rollout.straggler_s), None)
            if worker.link is None:
                if worker.started.ended() is not None:
                    self._bury(worker, "")
                elif now - worker.since > REPORT_S and self._launcher.restarts:
                    self._bury(worker, f"did not report within {REPORT_S:.0f} s")
                elif now - worker.since > REPORT_S and all(other.link is None for other in self._state.workers):
                    command = f"python -m alpagym_runtime.rollouts.worker {self._directory} --index I"
                    raise SimulatorError(f"no worker has reported for {REPORT_S:.0f} s: {command}", code="WORKERS")
            elif late is not None:
                what = f"scene {late.request.scene_id!r}, group {late.request.group_id}, member {late.request.member}"
                self._bury(worker, f"was not done with {what} after {rollout.straggler_s:g} s (rollout.straggler_s)")
            elif now - worker.heard > SILENT_S:
                self._bury(worker, f"was silent for {SILENT_S:.0f} s")

    def _bury(self, worker: Worker, why: str) -> None:
        """A worker has ended or is ended; its jobs come back, and it is started again if it may be."""
        link, error, started = worker.link, worker.error, worker.started
        assert started is not None
        if link is not None:
            self._hang_up(link)
        if not why:
            deadline = time.monotonic() + 1.0  # its connection may be closed before the kernel says how it ended
            while started.ended() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            why = started.ended() or "closed its connection"
        started.kill()
        if error is not None:
            why = f"{why}: {error['text']}"
        with self._state.lock:
            worker.link = None
            lost, worker.jobs = list(worker.jobs.values()), {}
            worker.cpu_before_s, worker.cpu_s = worker.cpu_before_s + worker.cpu_s, 0.0
            worker.failures += 1
        log = self._directory / "logs" / f"worker-{worker.index}.log"
        text = f"worker {worker.index} {why} (log: {log})"
        if error is not None and error.get("permanent"):
            raise ConfigError(error["text"]) if error.get("config") else SimulatorError(error["text"], permanent=True)
        for job in lost:
            self._retry(job, text)
        allowed = self._config.rollout.restarts
        again = self._launcher.restarts and worker.failures <= allowed
        waits = not self._launcher.restarts
        text += f", with {len(lost)} episodes in hand" if lost else ""
        with self._state.lock:
            if again:
                self._state.restarts += 1
                self._state.notes.append(f"{text}; it is started again ({worker.failures} of {allowed} times in a row)")
            elif waits:
                self._state.notes.append(f"{text}; it is used again when it reports again")
            else:
                self._state.notes.append(f"{text}; it is left out, after {allowed} restarts in a row")
            self._state.lock.notify_all()
        if again or waits:
            self._launch(worker)
            return
        worker.gone, worker.started = True, None
        with self._state.lock:
            self._state.queue.move_out(worker.index)
        if all(other.gone for other in self._state.workers):
            raise SimulatorError(f"no worker is left: {text}; rollout.restarts={allowed}", code="WORKERS")

    def _hand_out(self) -> None:
        with self._state.lock:
            ready = [worker for worker in self._state.workers if worker.link is not None]
            if not ready or not len(self._state.queue):
                return
            left = len(self._state.queue) + sum(len(worker.jobs) for worker in ready)
            share, now = -(-left // len(ready)), time.monotonic()
            given: list[tuple[Worker, list[Job]]] = []
            for worker in ready:
                jobs = self._state.queue.take(worker.index, list(worker.jobs.values()), share)
                for job in jobs:
                    job.since = now
                    worker.jobs[job.number] = job
                given.append((worker, jobs))
        for worker, jobs in given:
            while jobs:
                task = jobs[0].task
                same = [job for job in jobs if job.task == task]
                jobs = [job for job in jobs if job.task != task]
                asked = [{"number": job.number, "request": asdict(job.request)} for job in same]
                message = {"type": "drive", "task": task.to_plain(), "weights": self._state.weights, "jobs": asked}
                assert worker.link is not None
                with contextlib.suppress(OSError):  # it has ended; its connection will say so
                    worker.link.send(message)

    def _fail(self, err: Exception) -> None:
        with self._state.lock:
            self._state.failure = err
            self._state.lock.notify_all()

    def _end(self) -> None:
        for worker in self._state.workers:
            if worker.link is not None:
                with contextlib.suppress(OSError):
                    worker.link.send({"type": "end"})
        deadline = time.monotonic() + CLOSE_S
        for worker in self._state.workers:
            if worker.link is not None:
                worker.link.socket.settimeout(max(0.1, deadline - time.monotonic()))
                with contextlib.suppress(EOFError, OSError, ValueError, KeyError, TypeError):
                    while time.monotonic() < deadline:  # its last beat says what it spent
                        for message in worker.link.receive():
                            if message.get("type") == "beat":
                                self._take_message(worker, message)
                            elif message.get("type") == "done":
                                self._transport.discard(str(message["handle"]))
                worker.link.close()
                worker.link = None
            if worker.started is not None:
                worker.started.kill()
        for link in list(self._strangers):
            self._hang_up(link)
        self._selector.close()
        self._listener.close()
        for end in self._bell:
            end.close()
        self._launcher.close()
        clear(self._config, self._directory)


def clear(config: RunConfig, directory: Path) -> None:
    """Remove what workers left that are gone: weights, address, episodes that nobody took over."""
    shutil.rmtree(directory / FOLDER, ignore_errors=True)
    remove_leftovers(config, directory)
