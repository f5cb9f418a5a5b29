"""What this machine has: GPUs, tools, memory, containers. Every question has a time-out and imports nothing heavy.

Preflight and doctor ask it. Answers are kept for the life of the object, so that many checks ask once.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path

from alpagym_runtime.secrets import redacted

_LIST_GPUS = (
    "nvidia-smi",
    "--query-gpu=index,uuid,name,memory.total,driver_version",
    "--format=csv,noheader,nounits",
)
INSTALL_DOCKER = "https://docs.docker.com/engine/install/"


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi lists it.

    Attributes:
        index: nvidia-smi's number.
        name: product.
        memory_bytes: all of its memory.
        driver: version of the driver.

    """

    index: int
    name: str
    memory_bytes: int
    driver: str


@dataclass(frozen=True)
class Answer:
    """What a program said: exit code (None: it is absent, or did not answer in time) and its text, without secrets."""

    code: int | None
    text: str

    @property
    def ok(self) -> bool:
        """Whether it ended with 0."""
        return self.code == 0

    @property
    def first_line(self) -> str:
        """The first line with content."""
        return next((line.strip() for line in self.text.splitlines() if line.strip()), "")


@dataclass(frozen=True)
class Trouble:
    """Something that does not work, and what helps."""

    message: str
    remedy: str


class Machine:
    """This machine, asked lazily; see the module's text.

    Args:
        timeout_s: longest that a program may take to answer.

    """

    def __init__(self, timeout_s: float = 10.0) -> None:
        self._timeout_s = timeout_s
        self._answers: dict[tuple[str, ...], Answer] = {}

    def tool(self, name: str) -> str | None:
        """Path of a program on PATH."""
        return shutil.which(name)

    def ask(self, *argv: str, timeout_s: float | None = None) -> Answer:
        """Run a program and give its answer; stderr where stdout is empty."""
        if argv not in self._answers:
            self._answers[argv] = self._ask(argv, timeout_s or self._timeout_s)
        return self._answers[argv]

    def _ask(self, argv: tuple[str, ...], timeout_s: float) -> Answer:
        if self.tool(argv[0]) is None:
            return Answer(None, f"{argv[0]} is not on PATH")
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, errors="replace", timeout=timeout_s, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            return Answer(None, f"{argv[0]} did not answer within {timeout_s:g} s")
        except OSError as err:
            return Answer(None, f"{argv[0]} cannot be run: {err.strerror}")
        # On failure the reason is on stderr; docker prints its own version on stdout before it.
        text = done.stdout if done.returncode == 0 and done.stdout.strip() else done.stderr or done.stdout
        return Answer(done.returncode, redacted(text))

    def version(self, distribution: str) -> str | None:
        """Version of an installed distribution."""
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return None

    @cached_property
    def gpus(self) -> list[Gpu]:
        """GPUs that this process may use: those of nvidia-smi that CUDA_VISIBLE_DEVICES leaves."""
        answer = self.ask(*_LIST_GPUS)
        if not answer.ok:
            return []
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        allowed = None if visible is None else [word.strip() for word in visible.split(",") if word.strip()]
        found = []
        for line in answer.text.splitlines():
            cells = [cell.strip() for cell in line.split(",")]
            if len(cells) != 5 or not cells[0].isdigit() or not cells[3].isdigit():
                continue
            index, uuid, name, mebibytes, driver = cells
            if (
                allowed is None
                or index in allowed
                or any(word.startswith("GPU-") and uuid.startswith(word) for word in allowed)
            ):
                found.append(Gpu(int(index), name, int(mebibytes) << 20, driver))
        return found

    @property
    def gpus_text(self) -> str:
        """How many GPUs there are, in words, with the reason where there is none."""
        if self.gpus:
            sizes = sorted({f"{gpu.memory_bytes / 1e9:.0f} GB" for gpu in self.gpus})
            return f"{len(self.gpus)} found ({self.gpus[0].name}, {' to '.join(sizes)})"
        answer = self.ask(*_LIST_GPUS)
        if answer.ok and os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
            return f"0 found: CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides the others"
        return f"0 found: {answer.first_line or 'nvidia-smi lists none'}"

    @cached_property
    def memory_bytes(self) -> int | None:
        """Memory that a new process can have without swapping; None where the system does not say."""
        limits = []
        for line in _read("/proc/meminfo").splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) << 10)
        # A container's own limit; "max" is none.
        limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
        if limit.isdigit() and used.isdigit():
            limits.append(max(0, int(limit) - int(used)))
        if not limits and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        return min(limits, default=None)

    def free_bytes(self, path: Path) -> int | None:
        """Free space of the file system that a path is or would be on."""
        for place in (path, *path.parents):
            try:
                return shutil.disk_usage(place).free
            except OSError:
                continue
        return None

    def port_is_free(self, port: int, host: str = "127.0.0.1") -> bool:
        """Whether a server could listen there now."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                return False
        return True

    @cached_property
    def docker_trouble(self) -> Trouble | None:
        """Why containers cannot be started with Docker Compose; None if they can."""
        if self.tool("docker") is None:
            return Trouble("docker is not on PATH", f"install Docker Engine with the Compose plugin: {INSTALL_DOCKER}")
        daemon = self.ask("docker", "version", "--format", "{{.Server.Version}}")
        if not daemon.ok:
            said = daemon.first_line
            if "permission denied" in daemon.text.lower():
                return Trouble(
                    f"the Docker daemon refuses this user: {said}", "sudo usermod -aG docker $USER, then log in again"
                )
            return Trouble(f"the Docker daemon does not answer: {said}", "sudo systemctl start docker")
        compose = self.ask("docker", "compose", "version", "--short")
        if not compose.ok:
            return Trouble(
                f"Docker {daemon.first_line} has no Compose plugin: {compose.first_line}",
                "apt-get install docker-compose-plugin",
            )
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError):
        return ""
