"""Where the services of a run listen: a file each in `endpoints/` of the run directory, on any shared file system.

    endpoints/alpasim-0.json    {"kind": "alpasim", "host": …, "port": …, "capacity": …, "scenes": […], "beat": 17}

Files are written beside their place and renamed, so a reader sees a whole one. Whoever published one rewrites it every
few seconds; how old that is, is told by the file system's own clock, so the clocks of two machines need not agree. What
no longer beats is not listed.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from alpagym_runtime.files import replacing

FOLDER = "endpoints"
BEAT_S = 5.0
STALE_S = 30.0
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


@dataclass(frozen=True)
class Endpoint:
    """A service of a run.

    Attributes:
        name: unique in the run, such as alpasim-0.
        kind: what speaks there, such as alpasim.
        host, port: where, as other processes of the run reach it.
        capacity: rollouts at once.
        scenes: what it offers.
        beat: how often it was rewritten.

    """

    name: str
    kind: str
    host: str
    port: int
    capacity: int = 1
    scenes: tuple[str, ...] = ()
    beat: int = 0

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def own_address() -> str:
    """This machine's address for others: that of its name, or, where that is loopback's (Debian), of its main route."""
    with contextlib.suppress(OSError):
        found = socket.gethostbyname(socket.gethostname())
        if not found.startswith("127."):
            return found
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address for documentation (RFC 5737); a datagram socket sends nothing
        return str(probe.getsockname()[0])
    return "127.0.0.1"


class Registry:
    """The endpoints of one run directory; see the module's text."""

    def __init__(self, directory: Path) -> None:
        self.folder = directory / FOLDER

    def publish(self, endpoint: Endpoint) -> None:
        """Write an endpoint; one of the same name is replaced."""
        if not _NAME.fullmatch(endpoint.name):
            raise ValueError(f"an endpoint's name is lower-case letters, digits and '-', got {endpoint.name!r}")
        self.folder.mkdir(exist_ok=True)
        with replacing(self.folder / f"{endpoint.name}.json", durable=False) as temporary:
            temporary.write_text(json.dumps(asdict(endpoint)))

    def beat(self, endpoint: Endpoint) -> Endpoint:
        """Publish again, and give what was published."""
        endpoint = replace(endpoint, beat=endpoint.beat + 1)
        self.publish(endpoint)
        return endpoint

    def withdraw(self, name: str) -> None:
        """Take an endpoint back; no matter if it is gone."""
        (self.folder / f"{name}.json").unlink(missing_ok=True)

    def fresh(self, kind: str, stale_s: float = STALE_S) -> list[Endpoint]:
        """Endpoints of a kind that beat within `stale_s`, by name."""
        return [endpoint for endpoint, age_s in self.all() if endpoint.kind == kind and age_s <= stale_s]

    def all(self) -> list[tuple[Endpoint, float]]:
        """Every endpoint with the seconds since its last beat, by name; what is no endpoint is left out."""
        found = []
        files = sorted(self.folder.glob("[!.]*.json")) if self.folder.is_dir() else []
        now_s = self._now_s() if files else 0.0
        for file in files:
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                data = json.loads(file.read_text())
                endpoint = Endpoint(**{**data, "scenes": tuple(data["scenes"])})
                found.append((endpoint, max(0.0, now_s - file.stat().st_mtime)))
        return found

    def wait(self, kind: str, timeout_s: float, least: int = 1) -> list[Endpoint]:
        """Fresh endpoints of a kind, waited for until there are `least`; what there is at the timeout."""
        deadline_s = time.monotonic() + timeout_s
        while len(found := self.fresh(kind)) < least and time.monotonic() < deadline_s:
            time.sleep(0.2)
        return found

    def named(self, name: str, timeout_s: float) -> Endpoint | None:
        """The endpoint of a name, waited for, however long ago it was published; None at the timeout."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            found = next((endpoint for endpoint, _ in self.all() if endpoint.name == name), None)
            if found is not None or time.monotonic() >= deadline_s:
                return found
            time.sleep(0.2)

    def _now_s(self) -> float:
        """The file system's time: that of a file made now; this machine's where nothing can be made."""
        try:
            with tempfile.NamedTemporaryFile(prefix=".probe-", dir=self.folder) as probe:
                return Path(probe.name).stat().st_mtime
        except OSError:
            return time.time()
