"""Workers as actors of a Ray cluster: each runs the worker's command in its process, on whatever node Ray gives it."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

from alpagym_runtime.errors import PluginError
from alpagym_runtime.rollouts.launchers import Started
from alpagym_runtime.run_config import RunConfig


class RayLauncher:
    """See the module's text; joins the cluster of $RAY_ADDRESS or of this machine, or starts one for the run."""

    restarts = True

    def __init__(self, config: RunConfig, directory: Path) -> None:
        for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ENABLE_UV_RUN_RUNTIME_ENV"):
            # Nothing is reported, and actors run in the environment of their node, also under `uv run`.
            os.environ.setdefault(name, "0")
        try:
            import ray
        except ModuleNotFoundError as err:
            raise PluginError("deploy=ray needs Ray, which is not installed: uv sync --extra ray") from err
        self._ray, self._directory = ray, directory
        self._gpus = 1 if config.rollout.device == "cuda" else 0
        self._joined = not ray.is_initialized()
        if self._joined:
            _join(ray)
        self.host: str = ray.util.get_node_ip_address()
        self._actors = ray.remote(_Worker)

    def start(self, index: int) -> Started:
        """See `Launcher`."""
        actor: Any = self._actors.options(
            num_cpus=1, num_gpus=self._gpus, max_restarts=0, scheduling_strategy="SPREAD"
        ).remote()
        return _Actor(self._ray, actor, actor.run.remote(str(self._directory), index))

    def close(self) -> None:
        """Leave the cluster; one that was started for the run ends."""
        if self._joined:
            self._ray.shutdown()


class _Worker:
    """What an actor does."""

    def run(self, directory: str, index: int) -> int:
        from alpagym_runtime.rollouts.worker import serve

        return serve(Path(directory), index)


class _Actor:
    def __init__(self, ray: Any, actor: Any, result: Any) -> None:
        self._ray, self._actor, self._result = ray, actor, result

    def ended(self) -> str | None:
        if not self._ray.wait([self._result], timeout=0)[0]:
            return None
        try:
            return f"ended with exit code {self._ray.get(self._result)}"
        except self._ray.exceptions.RayError as err:
            return f"was lost by Ray: {' '.join(str(err).split())[:300]}"

    def kill(self) -> None:
        self._ray.kill(self._actor)


def _join(ray: Any) -> None:
    """Connect to the cluster that there is, or start one; Ray's handlers of signals do not stay."""
    here = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(address="auto", log_to_driver=False, configure_logging=False)
    except ConnectionError:
        if os.environ.get("RAY_ADDRESS"):
            raise
        ray.init(address="local", include_dashboard=False, log_to_driver=False, configure_logging=False)
    finally:
        if here:
            for number, handler in before.items():
                signal.signal(number, handler)
