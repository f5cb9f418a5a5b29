"""What a run that was killed has left behind: processes, containers, endpoints. Found by what the run wrote down.

Processes are those that carry the run's token or descend from a child of it that still is the same process; containers
are those of its own Compose project. A name is never enough.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from alpagym_host.run_state import RunState, condition, read_state
from alpagym_runtime.children import Identity, end, family
from alpagym_runtime.endpoints import FOLDER, Registry

_GRACE_S = 5.0
_COMPOSE_S = 10.0


def clear(directory: Path, say: Callable[[str], None]) -> int:
    """End what is left of a run that was killed; how many processes that were.

    The caller has made sure that nobody works in the directory. A run that ended by itself has left nothing.
    """
    state = read_state(directory)
    if state is None or condition(directory, state) != "killed":
        return 0
    for file, project in state.containers:
        compose_down(file, project)
    before = living(state)
    left = end(lambda: living(state), _GRACE_S, _leaders(state)) if before else []
    for endpoint, _ in Registry(directory).all():
        Registry(directory).withdraw(endpoint.name)
    for probe in (*directory.glob(".probe-*"), *(directory / FOLDER).glob(".probe-*")):
        probe.unlink(missing_ok=True)
    if before:
        say(f"ended {len(before) - len(left)} processes that the killed run had left")
    if left:
        say(f"still there: processes {', '.join(str(identity.pid) for identity in left)}; they wait for hardware")
    return len(before)


def living(state: RunState) -> list[Identity]:
    """Processes of a run on this machine, its supervisor left out."""
    if not state.here or not state.token:
        return []
    found = family([state.token], _leaders(state))
    return [identity for identity in found if identity not in (state.process,) and identity.pid != os.getpid()]


def compose_down(file: str, project: str) -> None:
    """Remove the containers of a Compose project; nothing where there is no such file or no docker."""
    docker = shutil.which("docker")
    if docker is None or not Path(file).is_file():
        return
    # What it says is of no use to anybody: the project is gone, or its processes are ended all the same.
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [docker, "compose", "-p", project, "-f", file, "down", "--timeout", "5", "--remove-orphans"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_COMPOSE_S,
            start_new_session=True,
            cwd=Path(file).parent,
        )


def _leaders(state: RunState) -> list[Identity]:
    return [Identity(child["pid"], child["started"], child["boot"]) for child in state.children]
