"""`kernel`: numba's compiler with a cache that cannot be stale.

Numba keys a cached function by its own file only, so a changed helper or constant in another file would not reach its
callers. Ours lie in a folder named by the hash of all kernel sources, of the modules whose constants they take and of
numba's version, in the user's cache (or NUMBA_CACHE_DIR), which also serves read-only installations. Two numbas in one
folder would throw out each other's work at every turn. No fast maths: the state of the world must be the same bits in
every process.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])

_IMPORT = re.compile(rb"^from (alpagym_runtime[\w.]*) import (\([^)]*\)|[^(\n]*)", re.MULTILINE)
_CONSTANT = re.compile(rb"\b[A-Z][A-Z0-9_]+\b")


def sources_digest(files: Iterable[Path]) -> str:
    """Name of compiled code: 16 hex digits of files that hold kernels, and of the modules whose constants they take."""
    root = Path(__file__).parent
    texts = {file: file.read_bytes() for file in files}
    for text in list(texts.values()):
        for module, names in _IMPORT.findall(text):
            if _CONSTANT.search(names):
                file = root.joinpath(*module.decode().split(".")[1:]).with_suffix(".py")
                file = file if file.exists() else file.with_suffix("") / "__init__.py"
                texts[file] = file.read_bytes()
    digest = hashlib.sha256(numba.__version__.encode())
    for file in sorted(texts):
        digest.update(texts[file])
    return digest.hexdigest()[:16]


@lru_cache(maxsize=1)
def cache_folder() -> Path | None:
    """Where compiled kernels are kept; None where no folder can be written (they are compiled in each process then)."""
    files = Path(__file__).parent.rglob("*.py")
    digest = sources_digest(file for file in files if b"alpagym_runtime.kernels import" in file.read_bytes())
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    candidates = [base / "alpagym", Path(tempfile.gettempdir()) / f"alpagym-{os.getuid()}"]
    if os.environ.get("NUMBA_CACHE_DIR"):
        candidates.insert(0, Path(os.environ["NUMBA_CACHE_DIR"]) / "alpagym")
    for candidate in candidates:
        folder = candidate / f"kernels-{digest}"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Compiled code is executed: only our own folder will do.
            if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
                return folder
        except OSError:
            continue
    return None


def kernel(function: F) -> F:
    """Compile with `nogil`, cached across processes."""
    return _compile(function, inline=False)


def inlined(function: F) -> F:
    """A kernel that LLVM merges into its callers.

    For helpers that take a whole `Bank` or `Slots`: counting references to their 50 arrays costs 0.5 us a call.
    """
    return _compile(function, inline=True)


def _compile(function: F, inline: bool) -> F:
    folder = cache_folder()
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder or "")
    try:
        options = {"cache": folder is not None, "nogil": True, "error_model": "numpy", "forceinline": inline}
        return numba.njit(**options)(function)
    finally:
        numba.config.CACHE_DIR = before
