"""What a program that failed said of it, in a few lines: its log holds thousands, of ten containers at once."""

from __future__ import annotations

import re
import signal
from collections import deque
from pathlib import Path

from alpagym_runtime.secrets import redacted

_TAIL_BYTES = 1 << 20
_WIDTH = 300
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# Lines that name a cause; the first of them is nearest to it, what follows is how others noticed.
_NAMES_A_CAUSE = re.compile(
    r"(?<![\w.])(\w*(Error|Exception)\b|error:|fatal|out of memory|killed|denied|unauthorized|no space left|not found"
    r"|no such|cannot|could not|failed to|refused|invalid|unknown)",
    re.IGNORECASE,
)


def last_words(log: Path, lines: int = 12) -> str:
    """Lines of a log that tell why its program failed: the first that name a cause, then the last of all.

    Args:
        log: its file; the last MiB is read.
        lines: at most so many.

    Returns:
        Lines in their order, cut to 300 characters, without colours and secrets; "it said nothing" if it did not.

    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as err:
        return f"its log cannot be read ({err.strerror}: {log})"
    causes: list[tuple[int, str]] = []
    last: deque[tuple[int, str]] = deque(maxlen=max(1, lines // 2))
    for number, line in enumerate(_ANSI.sub("", text).replace("\r", "\n").splitlines()):
        line = line.rstrip()
        if not line:
            continue
        last.append((number, line))
        if (
            len(causes) < lines - lines // 2
            and _NAMES_A_CAUSE.search(line)
            and line not in {text for _, text in causes}
        ):
            causes.append((number, line))
    chosen = sorted({*causes, *last})[:lines]
    shown = [line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…" for _, line in chosen]
    return redacted("\n".join(shown)) or "it said nothing"


def ending(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
