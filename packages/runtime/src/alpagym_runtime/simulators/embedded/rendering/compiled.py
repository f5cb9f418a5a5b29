"""`picture_kernel`: the compiler for pictures, with fast maths and a cache keyed by this folder's own sources.

Fast maths reorders sums, so pictures are equal bit for bit on one build and CPU family only; the world's own kernels
never use it. Nothing here may be called by the world or call it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numba

from alpagym_runtime import kernels

F = TypeVar("F", bound=Callable[..., Any])


@lru_cache(maxsize=1)
def picture_folder() -> Path | None:
    """Where compiled pictures are kept; None where no folder can be written."""
    base = kernels.cache_folder()
    if base is None:
        return None
    # The renderer's own file has no kernel, and no constant of one.
    files = (file for file in Path(__file__).parent.glob("*.py") if file.name != "renderer.py")
    folder = base.parent / f"pictures-{kernels.sources_digest(files)}"
    folder.mkdir(exist_ok=True, mode=0o700)
    return folder


def picture_kernel(function: F) -> F:
    """Compile with `nogil` and fast maths, cached across processes."""
    return _compile(function, inline=False)


def inlined(function: F) -> F:
    """A picture kernel that LLVM merges into its callers: a call with arrays costs more than what it computes here."""
    return _compile(function, inline=True)


def strict(function: F) -> F:
    """A picture kernel without fast maths: it computes the same bits wherever it is merged into, or called from."""
    return _compile(function, inline=False, fast=False)


def _compile(function: F, inline: bool, fast: bool = True) -> F:
    folder = picture_folder()
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder or "")
    try:
        options: dict[str, Any] = {"cache": folder is not None, "nogil": True, "fastmath": fast, "error_model": "numpy"}
        options["forceinline"] = inline
        return numba.njit(**options)(function)
    finally:
        numba.config.CACHE_DIR = before
