"""A rollout worker: a process with slots, a simulator and a copy of the policy, that drives what the trainer asks for.

    python -m alpagym_runtime.rollouts.worker RUN_DIR --index I

It starts from the frozen config of the run directory, without Hydra, and reports where `workers/rendezvous.json` says.
The trainer's supervisor starts it on this machine, srun or Ray on others; it is the same command, and what it prints is
in `logs/worker-I.log`. It ends when it is told to, and at once when the trainer's process is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import queue
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from alpagym_runtime.errors import ConfigError, CorruptFileError, PluginError, SimulatorError
from alpagym_runtime.policies.noisy_expert import NoisyExpert
from alpagym_runtime.rollouts.collector import Collector
from alpagym_runtime.rollouts.cores import Cores, World, make_policy
from alpagym_runtime.rollouts.weights import take
from alpagym_runtime.rollouts.wire import Link, Message, Rendezvous, Task
from alpagym_runtime.run_config import RunConfig, load_run_config
from alpagym_runtime.telemetry.timers import TIMERS
from alpagym_runtime.transport.between import build_transport
from alpagym_runtime.transport.picture_memory import picture_memory
from alpagym_runtime.types import Episode, EpisodeRequest, Policy, TrainablePolicy

BEAT_S = 1.0
LONGEST_WAIT_S = 600.0
"""For the trainer to say where it listens; a job may start its workers first, and waits as long for them."""
LOST_ITS_TRAINER = 3
"""Exit code."""

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class _Job:
    number: int
    task: Task
    request: EpisodeRequest


class Worker:
    """See the module's text.

    Args:
        config: the frozen config.
        directory: the run's.
        index: which worker this is.
        link: to the trainer.

    """

    def __init__(self, config: RunConfig, directory: Path, index: int, link: Link) -> None:
        self._config, self._directory, self._link = config, directory, link
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._waiting: deque[_Job] = deque()
        self._wanted = self._loaded = 0
        self._ends = False
        device = _device(config, index)  # before the transport, which takes the GPU in hand
        self._transport = build_transport(config, "rollout", directory)
        # From here on nobody else notices that the trainer is gone.
        threading.Thread(target=self._listen, name="listen", daemon=True).start()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        self._policy = make_policy(config, device)
        self._cores = Cores(config, config.rollout.slots_of_worker, directory)
        self._collectors: dict[tuple[World, object, bool], Collector] = {}

    def run(self) -> None:
        """Drive until told to end."""
        try:
            while True:
                while not self._waiting and not self._ends:
                    self._read(self._inbox.get())
                if self._ends:
                    return
                self._drive(self._waiting[0].task)
        except _Ended:
            return
        finally:
            self._cores.close()
            self._transport.close()
            with contextlib.suppress(OSError):
                self._link.send(self._state())

    # ------------------------------------------------------------ driving

    def _drive(self, task: Task) -> None:
        """Everything of one task that is here or comes before another task does."""
        collector = self._collector(task)
        numbers: list[int] = []

        def more() -> Iterator[EpisodeRequest]:
            while not self._inbox.empty():
                self._read(self._inbox.get())
            if self._ends:
                raise _Ended
            if self._wanted > self._loaded and task.noise is None:
                self._loaded = take(self._directory, self._wanted, self._policy)
            while self._waiting and self._waiting[0].task == task:
                job = self._waiting.popleft()
                numbers.append(job.number)
                yield job.request

        def done(index: int, episode: Episode) -> None:
            family = "" if episode.failure is not None else collector.scene_family(episode.request.scene_id)
            handle = self._transport.send(episode)
            self._link.send({"type": "done", "number": numbers[index], "handle": handle, "family": family})

        collector.stream((), task.sampling, done, more)

    def _collector(self, task: Task) -> Collector:
        key = task.world, task.noise, task.keep_frames
        if key not in self._collectors:
            driver: Policy = self._policy if task.noise is None else NoisyExpert(self._policy.spec, task.noise)
            rollout = self._config.rollout
            self._collectors[key] = Collector(
                self._cores.core(task.world, driver.spec)[0],
                driver,
                min_ready=min(rollout.min_ready, rollout.slots_of_worker),
                timeout_s=rollout.timeout_s,
                retries=rollout.retries,
                config_hash=self._config.config_hash,
                actor=task.actor,
                keep_frames=task.keep_frames,
                allocate=picture_memory(self._transport),
            )
        return self._collectors[key]

    # ------------------------------------------------------------ messages

    def _read(self, message: Message) -> None:
        if message["type"] == "end":
            self._ends = True
            return
        task = Task.from_plain(message["task"])
        if isinstance(self._policy, TrainablePolicy):
            self._wanted = max(self._wanted, int(message["weights"]))
        for job in message["jobs"]:
            self._waiting.append(_Job(int(job["number"]), task, EpisodeRequest(**job["request"])))

    def _listen(self) -> None:
        try:
            while True:
                for message in self._link.receive():
                    self._inbox.put(message)
        except (EOFError, OSError, ValueError):
            if not self._ends:
                self._leave()

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            try:
                self._link.send(self._state())
            except OSError:
                return  # whoever listens notices too

    def _state(self) -> Message:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {"type": "beat", "cpu_s": time.process_time(), "peak_rss_bytes": peak, "seconds": TIMERS.take()}

    def _leave(self) -> None:
        """The trainer is gone: nobody wants what is being driven."""
        print("the trainer is gone", flush=True)
        try:
            self._transport.close()
        finally:
            os._exit(LOST_ITS_TRAINER)


class _Ended(Exception):
    """Told to end in the middle of a drive."""


def _device(config: RunConfig, index: int) -> str:
    """Where a worker's policy computes; with it, or for transport=nccl, the worker takes a GPU in hand.

    Workers take turns on the GPUs of their machine that no trainer's process computes or receives on, else on all.
    """
    on_gpu = config.rollout.device == "cuda"
    nccl = getattr(config.transport.config, "backend", None) == "nccl"
    if not on_gpu and not nccl:
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "needs a GPU, and this machine has none that torch can use",
            key="rollout.device" if on_gpu else "transport.backend",
        )
    gpus = range(torch.cuda.device_count())
    taken = config.topology.processes if nccl or config.learner.device == "cuda" else 0
    free = gpus[taken:] or gpus
    torch.cuda.set_device(free[index % len(free)])
    return f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"


def _connect(directory: Path) -> tuple[Rendezvous, Link]:
    """The trainer's address and a connection to it; waits for a trainer that starts later."""
    deadline = time.monotonic() + LONGEST_WAIT_S
    while True:
        try:
            found = Rendezvous.read(directory)
            return found, Link(socket.create_connection((found.host, found.port), timeout=10.0))
        except (OSError, CorruptFileError) as err:
            if time.monotonic() > deadline:
                raise ConfigError(f"no trainer awaits workers in {directory}: {err}; start the run first") from err
            time.sleep(0.2)


def _die_with(parent: int) -> None:
    """Be killed when the process that started this one dies, even while stopped; for children of the trainer."""
    if sys.platform != "linux" or os.getppid() != parent:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(LOST_ITS_TRAINER)


def _log(directory: Path, index: int) -> None:
    """Everything that is printed goes to the worker's log."""
    folder = directory / "logs"
    folder.mkdir(exist_ok=True)
    handle = os.open(folder / f"worker-{index}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def serve(directory: Path, index: int) -> int:
    """Be worker `index` of a run until it ends; the exit code."""
    _log(directory, index)
    rendezvous, link = _connect(directory)
    _die_with(rendezvous.pid)
    now, host = time.strftime("%Y-%m-%d %H:%M:%S"), socket.gethostname()
    print(f"{now} {host}: worker {index}, process {os.getpid()}", flush=True)
    try:
        config = load_run_config(directory)
        link.send({"type": "hello", "index": index, "token": rendezvous.token, "config_hash": config.config_hash})
        link.socket.settimeout(None)
        Worker(config, directory, index, link).run()
    except Exception as err:
        traceback.print_exc()
        kind = next((kind for kind in (ConfigError, PluginError, SimulatorError) if isinstance(err, kind)), None)
        permanent = kind in (ConfigError, PluginError) or getattr(err, "permanent", False)
        text = str(err) if kind else f"{type(err).__name__}: {err}"
        try:
            link.send(
                {"type": "error", "config": kind in (ConfigError, PluginError), "permanent": permanent, "text": text}
            )
        except OSError:
            return LOST_ITS_TRAINER
        return 1
    finally:
        link.close()
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m alpagym_runtime.rollouts.worker", description=__doc__)
    parser.add_argument("directory", metavar="RUN_DIR", type=Path)
    parser.add_argument("--index", type=int, default=os.environ.get("SLURM_PROCID"), help="default: $SLURM_PROCID")
    options = parser.parse_args(arguments)
    if options.index is None:
        parser.error("--index is required outside a Slurm step")
    return serve(options.directory.absolute(), options.index)


if __name__ == "__main__":
    sys.exit(main())
