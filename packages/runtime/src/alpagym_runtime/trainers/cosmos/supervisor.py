"""A Cosmos-RL job as children of the run's own process: started, watched, and taken down with all that it started.

Cosmos-RL itself waits for ever for a worker that never came, goes on when one has died, and leaves its Redis behind.
So: workers must say that they are there in time, training steps must come in time, and the end of any process that
should live ends the job within seconds, with what that process said last.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from alpagym_runtime.children import Child, Children, identify
from alpagym_runtime.endpoints import own_address
from alpagym_runtime.errors import ConfigError
from alpagym_runtime.files import write_json
from alpagym_runtime.run_config import RunConfig
from alpagym_runtime.trainers.cosmos.commands import TOML, environment, launch_command
from alpagym_runtime.trainers.cosmos.config import is_spread
from alpagym_runtime.trainers.cosmos.housekeeping import LOOPBACK, end_redis
from alpagym_runtime.trainers.cosmos.journal import Journal, Worker
from alpagym_runtime.trainers.cosmos.monitor import STATUS, Logs, Seen, plain
from alpagym_runtime.trainers.cosmos.nodes import DOWN, RUNS, Call, call, first_options, job_start
from alpagym_runtime.trainers.cosmos.tables import (
    FOLDER,
    MODEL,
    OUTPUT,
    WINDOWS,
    cosmos_config,
    placeholder_model,
    to_toml,
)

_FAILURE_GRACE_S = 3.0
_LOOK_AGAIN_S = 2.0  # a worker that says why it ends does so before it is gone
_LAST_LINES = 12
_END_S = 20.0  # Cosmos-RL's own end: a policy worker sleeps 15 s first; all that counts is kept by then


class JobError(RuntimeError):
    """The job ended, or had to be ended, before its last step; says which part and what it said last."""


class Job:
    """See the module's text.

    Args:
        config: the run's.
        directory: the run's.
        program: what starts the job; Cosmos-RL's launcher by default.

    """

    def __init__(self, config: RunConfig, directory: Path, program: Sequence[str] | None = None) -> None:
        self._config, self._directory, self._program = config, directory, program
        self._folder = directory / FOLDER
        self._children: Children | None = None
        self._launcher: Child | None = None
        self._journal = Journal(directory)
        self._logs = Logs(self._folder / "logs", self._folder / "launcher.log")
        self._began_s = self._progress_s = 0.0
        self._step, self._told, self._everybody = 0, 0, False
        self._starts = self._log_began = 0

    @property
    def seen(self) -> Seen:
        """What the logs said so far."""
        return self._logs.seen

    def start(self, resume: bool) -> None:
        """Start launcher, controller and workers.

        Raises:
            ConfigError: redis-server is missing; says how to get it.

        """
        if shutil.which("redis-server") is None:
            raise ConfigError(
                "Cosmos-RL starts a Redis, and redis-server is not on PATH: apt-get install redis-server", key="trainer"
            )
        end_redis(self._folder)  # of a start that was killed together with all who would have ended it
        self._journal.clear_workers()
        write_config(self._config, self._directory, resume)
        self._logs.skip()
        self._children = Children()
        self._starts += 1
        several = is_spread(self._config)
        node = first_options(self._config) if several else ()
        argv = self._program or launch_command(self._config, self._directory, node)
        log = self._folder / "launcher.log"
        self._log_began = log.stat().st_size if log.exists() else 0
        surroundings = environment(self._config, self._directory, self._starts)
        if several:
            self._call(RUNS)
        self._launcher = self._children.start("cosmos", argv, log=log, environment=surroundings)
        self._began_s = self._progress_s = time.monotonic()
        self._everybody = False

    def check(self, wait_s: float, step: int, total: int) -> bool:
        """Wait a little and look at everything; False when the job has ended as it should.

        Args:
            wait_s: longest wait.
            step: the last training step that is known.
            total: the last one that there will be.

        Raises:
            JobError: it has ended otherwise, or will not go on; everything is down.

        """
        assert self._children is not None
        assert self._launcher is not None
        self._children.ended(wait_s)
        seen = self._logs.look()
        self._tell()
        now_s = time.monotonic()
        # After a start from a checkpoint steps that are known are made again: that is progress too.
        if step > self._step or self._journal.told != self._told:
            self._step, self._told, self._progress_s = max(step, self._step), self._journal.told, now_s
        code = self._launcher.code
        if code is not None:  # its last steps may be newer than what the caller knows
            for made in self._journal.steps(step):
                step, total = made.step, made.total
        done = step >= total
        if code == 0 and done:
            return False
        if code is not None:
            self._fail(f"Cosmos-RL ended with code {code} after step {step}", "launcher")
        workers = self._journal.workers()
        for name, worker in workers.items():
            if worker.failure and not done:  # afterwards all is kept, and ends may be rough
                self._fail(f"{name} ended: {worker.failure}", worker.role)
        if not done:
            gone = [name for name, worker in workers.items() if self._is_gone(worker)]
            if gone or seen.died:
                # Whoever died may have had the time to say why.
                time.sleep(_LOOK_AGAIN_S)
                for name, worker in self._journal.workers().items():
                    if worker.failure:
                        self._fail(f"{name} ended: {worker.failure}", worker.role)
                codes = ", ".join(f"process {pid} with code {code}" for pid, code in seen.died.items())
                self._fail(f"a worker has died ({', '.join(gone) or codes})", (gone or ["policy"])[0].split("-")[0])
            if not self._everybody:
                self._everybody = self._registered(workers, now_s)
                self._progress_s = now_s
            elif now_s - self._progress_s > self._config.cosmos.watchdog_s:
                stuck = f"; rollouts waited {seen.rejected} times for newer weights" if seen.rejected else ""
                self._fail(
                    f"no training step for {self._config.cosmos.watchdog_s:g} s (cosmos.watchdog_s) after step {step} "
                    f"of {total}{stuck}",
                    "controller",
                )
        elif now_s - self._progress_s > _END_S:
            # All steps are made and kept. What does not end by itself is ended.
            self.stop()
            return False
        return True

    def ask_to_stop(self) -> bool:
        """Ask for an end after the step in hand, with a checkpoint; False where nobody can be asked."""
        if (port := self._controller_port()) is None:
            return False
        request = urllib.request.Request(
            f"http://{LOOPBACK}:{port}/api/request_stop",
            json.dumps({"reason": "the run was asked to stop"}).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=5.0) as answer:
                return bool(json.loads(answer.read()).get("accepted"))
        except (OSError, ValueError):
            return False

    def wait_for_end(self, limit_s: float) -> bool:
        """Wait for the launcher's end; whether it came in time."""
        assert self._children is not None
        assert self._launcher is not None
        deadline_s = time.monotonic() + limit_s
        while self._launcher.code is None and time.monotonic() < deadline_s:
            self._children.ended(0.5)
            self._logs.look()
        return self._launcher.code is not None

    def stop(self, grace_s: float = _FAILURE_GRACE_S) -> None:
        """End every process of the job; idempotent."""
        children, self._children = self._children, None
        if children is not None:
            if is_spread(self._config):
                self._call(DOWN)
            children.close(grace_s)
            end_redis(self._folder)
        self._tell()
        for name in ("mail", WINDOWS):
            shutil.rmtree(self._folder / name, ignore_errors=True)

    # ------------------------------------------------------------

    def _call(self, state: str) -> None:
        cosmos = self._config.cosmos
        controller = f"{cosmos.host or own_address()}:{cosmos.controller_port}"
        call(self._directory, Call(job_start(), self._starts, state, controller))

    def _registered(self, workers: dict[str, Worker], now_s: float) -> bool:
        cosmos = self._config.cosmos
        wanted = {"policy": cosmos.policy.parallelism.gpus, "rollout": cosmos.rollout.parallelism.gpus}
        there = {role: sum(worker.role == role for worker in workers.values()) for role in wanted}
        if all(there[role] >= count for role, count in wanted.items()):
            return True
        if now_s - self._began_s > cosmos.register_timeout_s:
            missing = " and ".join(f"{there[r]} of {n} {r} workers" for r, n in wanted.items() if there[r] < n)
            role = next(role for role, count in wanted.items() if there[role] < count)
            self._fail(
                f"{missing} said that they are there within {cosmos.register_timeout_s:g} s "
                "(cosmos.register_timeout_s)",
                role,
            )
        return False

    def _fail(self, what: str, role: str) -> None:
        text = self._last_words(role)
        self.stop()
        raise JobError(f"{what}{text}")

    def _last_words(self, role: str) -> str:
        """Last lines of a part's log; if another part tells of an error and this one does not, of that."""
        newest = self._logs.newest
        logs = sorted(newest.glob("*.log"), key=lambda log: not log.name.startswith(role)) if newest is not None else []
        texts = {log: log.read_text(errors="replace") for log in [*logs, self._folder / "launcher.log"]}
        log = next((log for log, text in texts.items() if "Traceback" in text), next(iter(texts)))
        lines = [line for line in texts[log].splitlines() if line.strip()]
        # What follows is torchrun's summary, a page that does not hold the error.
        end = next((i for i, line in enumerate(lines) if i and " failed (exitcode: " in line), len(lines))
        return f"; last in {log}:\n" + "\n".join(lines[max(end - _LAST_LINES, 0) : end])

    @staticmethod
    def _is_gone(worker: Worker) -> bool:
        """Whether a worker of this machine was ended before its end."""
        me = identify(os.getpid())
        here = me is not None and worker.process.boot == me.boot
        return here and not worker.ended and not worker.process.alive

    def _tell(self) -> None:
        with contextlib.suppress(OSError):
            write_json(self._folder / STATUS, plain(self._logs.seen))

    def _controller_port(self) -> int | None:
        """As this start's launcher said; None before it did: at the configured one another job may answer."""
        with contextlib.suppress(OSError, ValueError):
            text = (self._folder / "launcher.log").read_bytes()[self._log_began :].decode(errors="replace")
            for line in text.splitlines()[::-1]:
                if "Controller will be launched locally on port" in line:
                    return int(line.rpartition("port")[2].strip(" ."))
        return None


def write_config(config: RunConfig, directory: Path, resume: bool) -> Path:
    """Put Cosmos-RL's TOML where its processes read it; its path."""
    folder = directory.absolute() / FOLDER
    folder.mkdir(exist_ok=True)
    (folder / MODEL).write_text(placeholder_model())
    (folder / TOML).write_text(to_toml(cosmos_config(config, directory, resume)))
    return folder / TOML


def newest_checkpoint(directory: Path, ranks: int = 1) -> int:
    """The step of Cosmos-RL's newest checkpoint that is whole; 0 where there is none.

    Args:
        directory: the run's.
        ranks: GPUs of a policy replica, each of which keeps its part.

    """
    places = (directory / FOLDER / OUTPUT / "checkpoints").glob("step_*/policy")
    files = ("cosmos_config", *(f".rank_{rank}_complete" for rank in range(ranks)))
    whole = [place for place in places if all((place / name).is_file() for name in files)]
    return max((int(place.parent.name.removeprefix("step_")) for place in whole), default=0)


def remove_torn_checkpoints(directory: Path, newest: int) -> None:
    """Remove Cosmos-RL's checkpoints beyond a step: they are not whole.

    It refuses to write over them, so a job that comes to that step again would end there each time.
    """
    for place in (directory / FOLDER / OUTPUT / "checkpoints").glob("step_*"):
        if int(place.name.removeprefix("step_")) > newest:
            shutil.rmtree(place)
