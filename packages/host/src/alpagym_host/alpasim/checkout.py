"""Where AlpaSim's code is, and its own uv environment: a checkout that the user names, or a pinned clone in the cache.

    $XDG_CACHE_HOME/alpagym/alpasim/<12 hex digits of url and ref>/    the clone, with its .venv
                                    <the same>.lock, <the same>.log    who makes it, and what git and uv said

A clone is made beside its place and renamed into it, so what is there is whole; then no network is asked, for it nor
for its environment. Its ref is what it was when it was cloned: name a commit, and it stays what the config says.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from alpagym_host.cause import last_words
from alpagym_plugins import ConfigError
from alpagym_runtime.deploy_config import AlpasimSection
from alpagym_runtime.files import write_atomic

WIZARD = Path("src/wizard/alpasim_wizard")
# What makes a folder a checkout that we can start; a revision without one of them is another program.
_LAYOUT = ("pyproject.toml", "uv.lock", "src/wizard/configs", str(WIZARD / "__main__.py"), "src/grpc/pyproject.toml")
_READY = ".venv/alpagym-ready"
_HIDDEN = ("UV_PROJECT_ENVIRONMENT", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")
"""Variables that would lead its tools to our environment."""

Run = Callable[[str, Sequence[str], Path, Path], int]
"""Runs a program to its end: name, command line, folder, log; its exit code."""


@dataclass(frozen=True)
class Checkout:
    """AlpaSim's code on disk, and the commit it is at ("unknown" where git does not say)."""

    path: Path
    commit: str

    @property
    def python(self) -> Path:
        """The interpreter of its own environment."""
        return self.path / ".venv" / "bin" / "python"

    def retries_key(self) -> str | None:
        """The config key of the runtime's own retries, where this revision has one."""
        text = _read(self.path / "src/runtime/alpasim_runtime/config.py")
        found: str | None = None
        sections = {"UserSimulatorConfig": "runtime", "SimulationConfig": "runtime.simulation_config"}
        for part in re.split(r"^class ", text, flags=re.MULTILINE)[1:]:
            name = re.match(r"\w+", part)
            if name and name[0] in sections and re.search(r"^    max_rollout_retries\s*:", part, re.MULTILINE):
                found = f"{sections[name[0]]}.max_rollout_retries"
        return found


def environment() -> dict[str, str]:
    """Our environment for AlpaSim's tools, without what would lead them back to us."""
    return {name: value for name, value in os.environ.items() if name not in _HIDDEN}


def cached(section: AlpasimSection) -> Path:
    """Where the clone is or will be."""
    if section.checkout_cache is not None:
        root = Path(section.checkout_cache).expanduser().absolute()
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "alpagym" / "alpasim"
    return root / hashlib.sha256(f"{section.repo_url}@{section.repo_ref}".encode()).hexdigest()[:12]


def present(section: AlpasimSection) -> Path | None:
    """The checkout that is on disk already; None if one has to be cloned."""
    folder = Path(section.repo_path).expanduser().absolute() if section.repo_path is not None else cached(section)
    return folder if not lacking(folder) else None


def lacking(folder: Path) -> list[str]:
    """What a folder lacks to be a checkout that we can start."""
    return [name for name in _LAYOUT if not (folder / name).exists()]


def resolve(
    section: AlpasimSection, run: Run, say: Callable[[str], None], wait: Callable[[], None] = lambda: time.sleep(0.2)
) -> Checkout:
    """The checkout with its environment; clones and builds what is not there.

    Args:
        section: which one.
        run: runs git and uv.
        say: tells the user what takes long.
        wait: a moment, while another process makes the same; may raise to give up.

    Raises:
        ConfigError: it is no checkout, or cannot be cloned or built; says what git or uv said last.

    """
    if section.repo_path is not None:
        folder = Path(section.repo_path).expanduser().absolute()
        if missing := lacking(folder):
            raise ConfigError(
                f"{folder} is no checkout of AlpaSim: it lacks {', '.join(missing)}",
                key="alpasim.repo_path",
            )
        if not (folder / ".venv/bin/python").exists():
            name = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
            with _locked(cached(section).parent, name, say, wait) as base:
                _build(folder, base.with_suffix(".log"), run, say)
        return Checkout(folder, _commit(folder))
    folder = cached(section)
    with _locked(folder.parent, folder.name, say, wait):
        log = folder.with_suffix(".log")
        if lacking(folder):
            _clone(section, folder, log, run, say)
        if not (folder / _READY).is_file():
            _build(folder, log, run, say)
            write_atomic(folder / _READY, f"{section.repo_url}@{section.repo_ref}\n".encode())
    return Checkout(folder, _commit(folder))


@contextlib.contextmanager
def _locked(root: Path, name: str, say: Callable[[str], None], wait: Callable[[], None]) -> Iterator[Path]:
    """One process at a time makes a clone or an environment; the others then find it made."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        handle = os.open(root / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as err:
        raise ConfigError(f"cannot write in {root}: {err.strerror}", key="alpasim.checkout_cache") from err
    try:
        waits = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waits:
                    say(f"another process makes {root / name}; waiting for it")
                waits = True
                wait()
                continue
            except OSError:
                pass  # a file system without locks
            break
        yield root / name
    finally:
        os.close(handle)


def _clone(section: AlpasimSection, folder: Path, log: Path, run: Run, say: Callable[[str], None]) -> None:
    url, ref = section.repo_url, section.repo_ref
    say(f"cloning {url} at {ref}; log: {log}")
    making = folder.with_name(f".partial-{folder.name}")
    for left in (making, folder):  # what a killed clone left, and a folder that is no checkout: both are ours
        shutil.rmtree(left, ignore_errors=True)
    making.mkdir()
    # A commit's short name is known to a whole history only: fetch that without files, then the files of one commit.
    short = re.fullmatch(r"[0-9a-f]{4,39}", ref) is not None
    depth = ["--filter=blob:none"] if short else ["--depth=1"]
    steps = [
        ["git", "init", "--quiet"],
        ["git", "remote", "add", "origin", url],
        ["git", "fetch", "--quiet", *depth, *(["--tags", "origin"] if short else ["origin", ref])],
        ["git", "checkout", "--quiet", "--detach", ref if short else "FETCH_HEAD"],
    ]
    try:
        for step in steps:
            if run("git", step, making, log):
                raise ConfigError(
                    f"cannot clone {url} at {ref}: {last_words(log, 3)}; a checkout of yours: alpasim.repo_path=DIR",
                    key="alpasim.repo_ref",
                )
        if missing := lacking(making):
            raise ConfigError(f"{url} at {ref} is no AlpaSim: it has no {', '.join(missing)}", key="alpasim.repo_ref")
        making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _build(folder: Path, log: Path, run: Run, say: Callable[[str], None]) -> None:
    """Its environment with the launcher, from its own lock, and the messages that its containers import."""
    say(f"building AlpaSim's environment in {folder / '.venv'}; log: {log}")
    uv = ["uv", "sync", "--project", str(folder), "--frozen", "--extra", "wizard", "--extra", "grpc"]
    if run("uv", uv, folder, log):
        raise ConfigError(f"cannot build AlpaSim's environment: {last_words(log, 3)}", key="alpasim")
    compiler = folder / ".venv/bin/compile-protos"
    if compiler.exists() and run("compile-protos", [str(compiler)], folder / "src/grpc", log):
        raise ConfigError(f"cannot compile AlpaSim's messages: {last_words(log, 3)}", key="alpasim")
    if not (folder / ".venv/bin/python").exists():
        raise ConfigError(f"uv made no {folder / '.venv/bin/python'}; see {log}", key="alpasim")


def _commit(folder: Path) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
