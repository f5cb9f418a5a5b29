"""`--multirun`: every combination of the values of an override is a run of its own, with a directory of its own.

    alpagym train run.seed=1,2,3 reward=metrics,driving --multirun        # six runs, one after the other

Commas inside quotes and brackets do not separate. All runs are composed and checked before the first one starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from alpagym_plugins import ConfigError

_OPENING, _CLOSING = "([{", ")]}"
MOST_RUNS = 1000


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each run, the last override changing fastest.

    Raises:
        ConfigError: a value is empty, or there are more than 1000 runs.

    """
    choices = [_choices(override) for override in overrides]
    count = 1
    for values in choices:
        count *= len(values)
    if count > MOST_RUNS:
        raise ConfigError(f"these overrides are {count} runs; at most {MOST_RUNS} in one sweep")
    return [list(combination) for combination in itertools.product(*choices)]


def varied(overrides: Sequence[str]) -> list[int]:
    """Indices of the overrides that have several values."""
    return [i for i, override in enumerate(overrides) if len(_choices(override)) > 1]


def _choices(override: str) -> list[str]:
    key, equals, value = override.partition("=")
    if not equals or key.startswith("~"):
        return [override]
    parts = _split(value)
    if len(parts) > 1 and not all(part.strip() for part in parts):
        raise ConfigError(f"{value!r} has an empty value between commas; a text with a comma is quoted", key=key)
    return [f"{key}={part.strip() if len(parts) > 1 else part}" for part in parts]


def _split(value: str) -> list[str]:
    """Parts between commas that stand outside quotes and brackets."""
    parts, start, depth, quote, at = [], 0, 0, "", 0
    while at < len(value):
        char = value[at]
        if char == "\\":
            at += 1  # whatever follows is meant literally
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in _OPENING:
            depth += 1
        elif char in _CLOSING:
            depth -= 1
        elif char == "," and depth <= 0:
            parts.append(value[start:at])
            start = at + 1
        at += 1
    # An apostrophe that nothing closes is a letter, as in it's: then the text is one value.
    return [value] if quote else [*parts, value[start:]]
