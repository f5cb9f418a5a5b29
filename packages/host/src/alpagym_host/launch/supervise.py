"""A run with an AlpaSim of its own: one supervisor that starts everything, watches it, and leaves nothing behind.

    prepare    checkout, environment, scenes, access           before there is a run directory
    bring up   the launcher, until the runtime answers         logs/alpasim.log, endpoints/alpasim-0.json
    train      the trainer, in a process of its own            logs/trainer.log, its progress where ours goes
    tear down  always: after success, failure and signals

The first thing that goes wrong is the cause, and is reported last, when everything has ended. The supervisor does no
work itself: a trainer that crashes or is killed for memory leaves somebody to clear up. If the supervisor is killed,
the trainer ends by itself, and `alpagym clean` finds the rest.
"""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from alpagym_host.alpasim import checkout as checkouts
from alpagym_host.alpasim import scenes, wizard
from alpagym_host.alpasim.checkout import Checkout
from alpagym_host.cause import ending, last_words
from alpagym_host.errors import RunFailedError
from alpagym_host.launch.local import Stop, requeued, stop_signals
from alpagym_host.leftovers import clear, compose_down
from alpagym_host.run_dir import Command, locked
from alpagym_host.run_state import Tracker, tracked
from alpagym_runtime.children import Child, Children
from alpagym_runtime.endpoints import BEAT_S, Endpoint, Registry, own_address
from alpagym_runtime.errors import SimulatorError
from alpagym_runtime.run_config import RunConfig

_WATCH_S = 1.0
_LEAST_REFUSALS = 3  # one may be a full queue; a server that is gone refuses each
_FAILURE_GRACE_S = 5.0  # what is left of a run that has failed
_LEFT_BEHIND_S = 3.0
_LOOKS = 6  # at AlpaSim after the trainer has failed: if that is gone too, it is the cause


class _Stopped(Exception):
    """A signal asked for the end."""


def prepare(config: RunConfig, console: Console) -> Checkout:
    """AlpaSim's checkout, and everything that can be checked before anything starts; leaves nothing but the cache.

    Raises:
        ConfigError: the checkout, its environment, a scene, a topology or the access is not to be had.

    """

    def say(text: str) -> None:
        _say(console, text)

    with Children() as children, stop_signals(console, "stopping") as stop:

        def wait() -> None:
            children.ended(0.2)
            if stop():
                children.stop(children.started, 2.0)
                raise RunFailedError("stopped before anything was started", 128 + (stop.signal or signal.SIGTERM))

        def run(name: str, argv: Sequence[str], folder: Path, log: Path) -> int:
            child = children.start(name, argv, log=log, environment=checkouts.environment(), folder=folder)
            while (code := child.code) is None:
                wait()
            return code

        if (folder := checkouts.present(config.alpasim)) is not None:
            _check_scenes(config, folder)  # before the environment is built, which takes minutes
        found = checkouts.resolve(config.alpasim, run, say, wait)
        if folder is None:
            _check_scenes(config, found.path)
    return found


def _check_scenes(config: RunConfig, folder: Path) -> None:
    wizard.check_topology(config.alpasim.wizard_args.topology, folder)
    scenes.require_access(scenes.to_fetch(scenes.chosen(config, folder), folder))


def supervise(
    config: RunConfig,
    directory: Path,
    command: Command,
    console: Console,
    checkout: Checkout,
    trainer: Sequence[str] | None = None,
) -> int:
    """Bring AlpaSim up, run the command against it, tear everything down.

    Args:
        config: the frozen config of `directory`.
        directory: a run directory, new or to be continued.
        command: what to do.
        console: where progress and the result go.
        checkout: what `prepare` gave.
        trainer: the program that works, given the directory; ours by default.

    Returns:
        Exit code: 0, or 128 + the signal that stopped it.

    Raises:
        RunFailedError: something ended that should not have; its first cause.

    """
    with locked(directory) as lock:
        clear(directory, lambda text: _say(console, text))
        (directory / "logs").mkdir(exist_ok=True)
        _say(console, f"run directory: {directory}")
        with (
            Children() as children,
            tracked(directory, "bring up", children.token) as tracker,
            stop_signals(console, "stopping, then taking AlpaSim down; Ctrl-C again kills both") as stop,
        ):
            supervisor = _Supervisor(config, directory, command, console, children, tracker, stop, lock)
            code = supervisor.run(checkout, trainer)
    return requeued(config, directory, code, console)


def simulate(config: RunConfig, directory: Path, console: Console, checkout: Checkout, number: int) -> int:
    """Bring an AlpaSim up for a run that works elsewhere, on another node of its job, and keep it until a signal.

    Args:
        config: the frozen config of `directory`.
        directory: the run's; whoever trains holds it.
        console: where progress goes.
        checkout: what `prepare` gave.
        number: of this AlpaSim; its endpoint and its folder are called so.

    Returns:
        0 after a signal.

    Raises:
        RunFailedError: it did not come up, or ended.

    """
    (directory / "logs").mkdir(exist_ok=True)
    with (
        Children() as children,
        stop_signals(console, "taking AlpaSim down") as stop,
    ):
        _Supervisor(config, directory, None, console, children, None, stop, None, number).run(checkout, None)
    return 0


class _Supervisor:
    """Without a command it works for others: it holds neither directory nor state, and only keeps AlpaSim."""

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        command: Command | None,
        console: Console,
        children: Children,
        tracker: Tracker | None,
        stop: Stop,
        lock: int | None,
        number: int = 0,
    ) -> None:
        self._config, self._directory, self._command, self._console = config, directory, command, console
        self._children, self._tracker, self._stop, self._lock = children, tracker, stop, lock
        self._name = f"alpasim-{number}"
        self._log = directory / "logs" / ("alpasim.log" if command is not None else f"{self._name}.log")
        self._registry = Registry(directory)
        self._endpoint: Endpoint | None = None
        self._wizard: Child | None = None
        self._trainer: Child | None = None
        self._compose: tuple[str, str] | None = None
        self._beaten_s = 0.0
        self._refusals = 0

    def run(self, checkout: Checkout, trainer: Sequence[str] | None) -> int:
        """All phases; the exit code."""
        code, failure, hurry = 0, None, True
        try:
            self._bring_up(checkout)
            code = self._train(trainer) if self._command is not None else self._keep()
            hurry = False
        except _Stopped:
            hurry = False
            code = 128 + (self._stop.signal or signal.SIGTERM)
            if self._trainer is None and self._command is not None:
                _say(self._console, f"stopped before it began; to begin again:\n  alpagym resume {self._directory}")
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        except RunFailedError as err:
            code, failure = err.code, err
        except (SimulatorError, OSError) as err:
            code, failure = 1, RunFailedError(str(err))
        finally:
            self._tear_down(hurry)
        self._note(code=code, cause=str(failure) if failure is not None else "")
        if failure is not None:
            raise failure
        return code

    def _note(self, **changes: Any) -> None:
        if self._tracker is not None:
            self._tracker.update(**changes)

    # ------------------------------------------------------------ bring up

    def _bring_up(self, checkout: Checkout) -> None:
        # A launcher starts in an empty folder: an endpoint of the last time would be taken for this time's.
        stem = "wizard" if self._command is not None else self._name.replace("alpasim", "wizard")
        numbers = [int(path.name.rpartition("_")[2]) for path in (self._directory / "alpasim").glob(f"{stem}_[0-9]*")]
        folder = self._directory / "alpasim" / f"{stem}_{max(numbers, default=-1) + 1}"
        folder.mkdir(parents=True)
        log = self._log
        argv = wizard.argv(self._config, checkout, folder)
        # Compose names a project after its folder, and all of ours are called wizard_N.
        name = re.sub(r"[^a-z0-9_-]", "-", self._directory.name.lower()).strip("-_")
        project = f"alpagym-{name}-{self._children.token[:6]}"
        self._compose = (str(folder / wizard.COMPOSE), project)
        self._note(
            containers=(self._compose,), facts={"alpasim": str(checkout.path), "alpasim_commit": checkout.commit}
        )
        environment = checkouts.environment() | {"COMPOSE_PROJECT_NAME": project, "PYTHONUNBUFFERED": "1"}
        self._wizard = self._start("alpasim", argv, log=log, environment=environment, folder=checkout.path)
        address = self._wait_until_ready(folder / wizard.ENDPOINT, log)
        host, _, port = address.rpartition(":")
        facts = self._ask(address, log)
        if self._command is None and host == "127.0.0.1":
            host = own_address()  # its runtime listens everywhere, and the trainer is on another node
        self._endpoint = Endpoint(self._name, "alpasim", host, int(port), facts.capacity, facts.scenes)
        self._registry.publish(self._endpoint)
        many = f"{len(facts.scenes)} scene{'s' if len(facts.scenes) > 1 else ''}"
        slots = self._config.rollout.slots
        waits = f"; of {slots} slots {slots - facts.capacity} wait their turn" if slots > facts.capacity else ""
        _say(self._console, f"AlpaSim: {many} at {address}, {facts.capacity} rollouts at once{waits}")

    def _wait_until_ready(self, file: Path, log: Path) -> str:
        """The runtime's HOST:PORT once it accepts connections."""
        limit_s = self._config.alpasim.startup_timeout_s
        deadline_s, address = time.monotonic() + limit_s, None
        _say(self._console, f"starting AlpaSim; log: {log}")
        with _waiting(self._console) as show:
            while time.monotonic() < deadline_s:
                show(log)
                self._watch(0.25)
                address = address or _read_endpoint(file)
                if address is not None and _connects(address):
                    return address
        what = f"its runtime at {address} accepts no connection" if address else f"there is no {file}"
        raise RunFailedError(
            f"AlpaSim is not ready after {limit_s:g} s (alpasim.startup_timeout_s): {what}; last in {log}:\n"
            + last_words(log)
        )

    def _ask(self, address: str, log: Path) -> Any:
        from alpagym_runtime.simulators.alpasim.probe import runtime_facts

        deadline_s = time.monotonic() + min(self._config.alpasim.startup_timeout_s, 120.0)
        while True:
            try:
                facts = runtime_facts(address, 5.0)
                break
            except SimulatorError as err:
                if time.monotonic() > deadline_s:
                    raise RunFailedError(f"AlpaSim does not say what it offers: {err}\n{last_words(log)}") from err
                self._watch(0.5)
        wanted = self._config.dataset.scene_ids or []
        missing = sorted(set(wanted) - set(facts.scenes))
        if missing or not facts.scenes:
            said = f"{len(wanted)} scenes needed, {len(facts.scenes)} there; missing: {', '.join(missing[:3]) or 'all'}"
            raise RunFailedError(f"AlpaSim offers other scenes than the run drives: {said}\n{last_words(log)}")
        return facts

    # ------------------------------------------------------------ train

    def _keep(self) -> int:
        """Look after AlpaSim until a signal, which `_watch` raises."""
        while True:
            self._watch(_WATCH_S)

    def _train(self, program: Sequence[str] | None) -> int:
        self._note(phase=self._command)
        argv = [*(program or (sys.executable, "-m", "alpagym_host.launch.trainer")), str(self._directory)]
        log = self._directory / "logs" / "trainer.log"
        assert self._lock is not None
        # It holds the lock with us: while it lives, nobody else works in the directory.
        trainer = self._trainer = self._start("trainer", argv, log=log, show=True, keep_open=(self._lock,))
        deadline_s = None
        while trainer.code is None:
            try:
                self._watch(_WATCH_S)
            except _Stopped:
                if deadline_s is None:
                    # To it alone: what it started is its own to end, after the checkpoint.
                    trainer.signal(signal.SIGTERM)
                    deadline_s = time.monotonic() + self._config.deploy.grace_s
                elif time.monotonic() > deadline_s:
                    _say(
                        self._console,
                        f"the trainer did not end within deploy.grace_s = {self._config.deploy.grace_s:g} s and is "
                        f"killed; to continue from the last checkpoint:\n  alpagym resume {self._directory}",
                    )
                    raise
        code = trainer.code
        if deadline_s is not None:
            # However it ended, it was asked to; one that was done before it noticed has completed.
            return 128 + (self._stop.signal or signal.SIGTERM) if code else 0
        if code:
            for _ in range(_LOOKS):
                with contextlib.suppress(_Stopped):
                    self._watch(0.1)
                time.sleep(0.1)
            raise RunFailedError(f"the trainer {ending(code)}; last in {log}:\n{last_words(log)}", max(code, 1))
        return 0

    # ------------------------------------------------------------ watch

    def _start(self, name: str, argv: Sequence[str], **options: Any) -> Child:
        child = self._children.start(name, argv, **options)
        self._note(children=tuple(one.describe() for one in self._children.started))
        return child

    def _watch(self, timeout_s: float) -> None:
        """Wait a little, and look at everything.

        Raises:
            RunFailedError: AlpaSim ended or no longer listens.
            _Stopped: a signal came; raised at each look from then on.

        """
        self._children.ended(timeout_s if not self._stop() else min(timeout_s, 0.1))
        if self._wizard is not None and self._wizard.code is not None:
            log = self._wizard.log
            assert log is not None
            what = "AlpaSim" if self._endpoint is not None else "AlpaSim did not start: its launcher"
            raise RunFailedError(f"{what} {ending(self._wizard.code)}; last in {log}:\n{last_words(log)}")
        if self._endpoint is not None:
            self._refusals = 0 if _connects(self._endpoint.address) else self._refusals + 1
            if self._refusals >= _LEAST_REFUSALS:
                what = f"AlpaSim's runtime at {self._endpoint.address} no longer listens"
                raise RunFailedError(f"{what}; last in {self._log}:\n{last_words(self._log)}")
            if time.monotonic() - self._beaten_s > BEAT_S:
                self._beaten_s = time.monotonic()
                self._endpoint = self._registry.beat(self._endpoint)
        if self._stop():
            raise _Stopped

    # ------------------------------------------------------------ tear down

    def _tear_down(self, hurry: bool) -> None:
        limit_s = self._config.alpasim.stop_timeout_s
        try:
            self._note(phase="tear down")
            if self._endpoint is not None:
                self._registry.withdraw(self._endpoint.name)
            if hurry:
                limit_s = min(limit_s, _FAILURE_GRACE_S)
                self._children.stop(self._children.started, limit_s)
            elif self._trainer is not None:
                # It has ended, or has had its time; what it left behind is nobody's, or clears up after it.
                self._children.stop([self._trainer], _LEFT_BEHIND_S)
            if self._wizard is not None:
                self._children.stop([self._wizard], limit_s)
            if self._compose is not None:
                compose_down(*self._compose)
        except KeyboardInterrupt:
            _say(self._console, "killing what is left")
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # what another Ctrl-C would ask for is being done
            self._children.close()


def _read_endpoint(file: Path) -> str | None:
    """HOST:PORT from the launcher's file; None until it is whole."""
    from omegaconf import OmegaConf

    try:
        data: Any = OmegaConf.to_container(OmegaConf.load(file))
        host, port = str(data["host"]), int(data["port"])
    except Exception:  # not there, half written, or one of the YAML parser's many errors: it is read again
        return None
    # With the host's network, which we ask for, every name of this machine is loopback's.
    host = "127.0.0.1" if host in ("localhost", "0.0.0.0", socket.gethostname()) else host
    return f"{host}:{port}"


def _connects(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _waiting(console: Console) -> Iterator[Any]:
    """Shows, on a terminal, how long AlpaSim has been starting and what its log says."""
    from rich.markup import escape

    begun_s = time.monotonic()
    if not console.is_terminal:
        yield lambda log: None
        return
    with console.status("starting AlpaSim") as status:

        def show(log: Path) -> None:
            minutes, seconds = divmod(int(time.monotonic() - begun_s), 60)
            line = last_words(log, 1).splitlines()[-1][: max(20, console.width - 30)]
            status.update(f"starting AlpaSim {minutes}:{seconds:02d}  [dim]{escape(line)}[/dim]")

        yield show


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
