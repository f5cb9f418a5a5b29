"""What a Cosmos-RL job must be kept from doing on a machine that others use too.

Each of these replaces a function of exactly the release that `version` lets through; where one is gone, the job ends
with its name.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from alpagym_plugins import ConfigError
from alpagym_runtime.children import Identity
from alpagym_runtime.trainers.cosmos.tables import FOLDER

OWNER = "ALPAGYM_COSMOS_OWNER"
"""The variable that tells workers which process they work for (an `Identity` as JSON)."""
SECRET = "ALPAGYM_COSMOS_SECRET"
"""The variable with the password of the job's Redis."""
JOB_SECRET = "ALPAGYM_JOB_SECRET"
"""The variable with what the nodes of a Slurm job share and nobody else knows; made in the job, by its script."""
EVERYWHERE = "ALPAGYM_COSMOS_LISTEN"
"""The variable that opens controller and Redis to other machines; only where a job spans several nodes."""
LOOPBACK = "127.0.0.1"
REDIS_PID = "redis.pid"
"""Below FOLDER: the number of the job's Redis, while it runs."""
COMMAND_WAIT_MS = 50
EPISODE_WAIT_MS = 500
_IDLE_S = 0.002
_READ_S = 60.0
_LOOK_S = 1.0
_GRACE_S = 10.0


def owner_variables(owner: Identity, start: int | None = None) -> dict[str, str]:
    """The environment of a job's processes: whom they work for, and a fresh password.

    Args:
        owner: whom they work for.
        start: on several nodes, which start of the job this is: all derive the same password, which is nowhere written.

    Raises:
        ConfigError: the job's script has left no secret to derive it from.

    """
    described = {"pid": owner.pid, "started": owner.started, "boot": owner.boot}
    if start is None:
        return {OWNER: json.dumps(described), SECRET: secrets.token_hex(16)}
    if not (shared := os.environ.get(JOB_SECRET)):
        raise ConfigError(f"{JOB_SECRET} is not set: a job on several nodes is started by alpagym submit", key="deploy")
    return {
        OWNER: json.dumps(described),
        SECRET: hmac.new(shared.encode(), f"start {start}".encode(), hashlib.sha256).hexdigest(),
    }


def read_often() -> None:
    """Shorten blocking reads of Redis.

    For commands: in colocated mode each training step waits for one to end (10 s). For episodes: the end of a policy
    worker waits for one (10 s), before it sleeps for 15 s.
    """
    from cosmos_rl.utils import constant

    stream = constant.RedisStreamConstant
    for name, wait_ms in (
        ("CMD_READING_TIMEOUT_MS", COMMAND_WAIT_MS),
        ("ROLLOUT_READING_TIMEOUT_MS", EPISODE_WAIT_MS),
    ):
        _need(stream, name)
        setattr(stream, name, wait_ms)


def wait_for_commands() -> None:
    """Let a policy worker that has nothing to do wait a moment between two looks.

    Its main loop spins: a core for nothing, and the interpreter for 5 ms at a time, for which threads beside it wait
    each time that they come back from the system. An episode that arrives does so many times.
    """
    from cosmos_rl.policy.worker import rl_worker

    worker = _need(rl_worker, "RLPolicyWorker")
    plain = _need(worker, "broadcast_command")

    def broadcast_command(self: Any) -> Any:
        if self.global_rank == 0 and not self.fetch_command_buffer.queue and not self.command_buffer.queue:
            time.sleep(_IDLE_S)
        return plain(self)

    worker.broadcast_command = broadcast_command


def wait_for_everybody() -> None:
    """Let the controller hand out prompts by the number of a rollout only once rollouts and policies have numbers.

    With data_dispatch_as_rank_in_mesh the first rollout asks before the last replica is there, and Cosmos-RL ends the
    job over it.
    """
    from cosmos_rl.dispatcher.data import data_fetcher

    fetcher = _need(data_fetcher, "ControllerDataFetcher")
    plain = _need(fetcher, "get_batched_prompt")

    def get_batched_prompt(
        self: Any, n: int, validation_step: Any = None, rank_in_mesh: Any = None, **more: Any
    ) -> Any:
        rollouts = getattr(self, "rollout_global_mesh_size", 0)
        numbered = rank_in_mesh is not None and 0 <= rank_in_mesh < rollouts
        if not (numbered and getattr(self, "policy_global_mesh_size", 0)):
            return [], False  # as while it holds rollouts back: they ask again
        return plain(self, n, validation_step, rank_in_mesh, **more)

    fetcher.get_batched_prompt = get_batched_prompt


def keep_to_this_machine(directory: Path) -> None:
    """Bind controller and Redis to loopback, with a password; on several nodes to all addresses, with a password."""
    from cosmos_rl.utils import network_util, redis_stream

    everywhere = os.environ.get(EVERYWHERE) == "1"
    if not everywhere:
        replace_everywhere(network_util, "bind_available_port", _bind_loopback)
        replace_everywhere(network_util, "get_eth_ips", lambda: [LOOPBACK])
    secret = os.environ.get(SECRET)
    plain = network_util.write_redis_config
    folder = directory / FOLDER

    def write_redis_config(port: int, logfile: str, *args: Any, **options: Any) -> str:
        (folder / REDIS_PID).unlink(missing_ok=True)  # an earlier one's would say that this one has read its file
        path: str = plain(port, str(folder / "redis.log"), *args, **options)
        text = Path(path).read_text()
        Path(path).write_text(redis_text(text, folder, secret, everywhere))
        threading.Thread(target=_remove_read, args=(Path(path), folder), daemon=True).start()
        return path

    replace_everywhere(network_util, "write_redis_config", write_redis_config)
    if secret:
        os.environ["REDISCLI_AUTH"] = secret  # for the controller's own redis-cli
        client = _need(redis_stream, "redis").Redis
        client.__init__ = functools.partialmethod(client.__init__, password=secret)


def redis_text(text: str, folder: Path, secret: str | None, everywhere: bool) -> str:
    """A configuration of Redis, less its openness: addresses, password, and a folder of the run's for its files."""
    changes = [
        (r"^bind .*$", "bind 0.0.0.0" if everywhere else f"bind {LOOPBACK}"),
        (r"^protected-mode .*$", "protected-mode yes"),
        (r"^dir .*$", f"dir {folder}"),
    ]
    for pattern, line in changes:
        text, count = re.subn(pattern, line, text, flags=re.MULTILINE)
        if count != 1:
            raise RuntimeError(
                f"Cosmos-RL's configuration of Redis has {count} lines {pattern!r} where one is expected"
            )
    # It leaves its parent and writes over its environment: this file is how it is found again.
    return text + f"\npidfile {folder / REDIS_PID}\n" + (f"requirepass {secret}\n" if secret else "")


def _remove_read(path: Path, folder: Path) -> None:
    """Remove a configuration, which holds the password, once Redis has read it (it then writes its number)."""
    deadline_s = time.monotonic() + _READ_S
    while not (folder / REDIS_PID).is_file() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    path.unlink(missing_ok=True)


def end_redis(folder: Path) -> None:
    """End a job's Redis that outlived its controller; no matter if there is none."""
    path = folder / REDIS_PID
    try:
        process = psutil.Process(int(path.read_text()))
        # The number may be another's by now; Redis wrote the file within seconds of its start.
        ours = process.name().startswith("redis-server") and process.create_time() <= path.stat().st_mtime + 1.0
        if ours:
            process.terminate()
            process.wait(timeout=_GRACE_S)
    except psutil.TimeoutExpired:
        process.kill()
    except (OSError, ValueError, psutil.Error):
        pass
    path.unlink(missing_ok=True)


def end_with_owner(folder: Path | None = None) -> None:
    """End this process when the one that it works for is gone, however that went; nothing happens on other machines.

    What it forked, and the Redis of `folder`, go first: neither notices by itself.
    """
    text = os.environ.get(OWNER)
    if not text:
        return
    owner = Identity(**json.loads(text))

    def watch() -> None:
        while owner.alive:
            time.sleep(_LOOK_S)
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()  # Cosmos-RL's heartbeats do not end at SIGTERM
        if folder is not None:
            end_redis(folder)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="alpagym-owner", daemon=True).start()


def _bind_loopback(start_port: int, max_port: int = 65536) -> socket.socket:
    """A listening socket on the first free port of loopback."""
    for port in range(start_port, max_port):
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((LOOPBACK, port))
            made.listen(128)
            return made
        except OSError:
            made.close()
    raise RuntimeError(f"no port from {start_port} to {max_port - 1} is free on {LOOPBACK}")


def _need(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise RuntimeError(f"this Cosmos-RL has no {name} in {owner!r}; it is not the release that was checked")
    return getattr(owner, name)


def replace_everywhere(module: ModuleType, name: str, by: Any) -> None:
    """Replace a function, also where it was imported by name already."""
    old = _need(module, name)
    for other in list(sys.modules.values()):
        if getattr(other, "__name__", "").startswith("cosmos_rl") and other.__dict__.get(name) is old:
            setattr(other, name, by)
