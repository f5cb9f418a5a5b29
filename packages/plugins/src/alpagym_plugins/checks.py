"""Checks that config dataclasses make of their own fields."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from numbers import Real

from alpagym_plugins.errors import ConfigError


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` was most likely meant to be, whatever its case; None if none is close."""
    by_folded = {choice.casefold(): choice for choice in choices}
    close = difflib.get_close_matches(word.casefold(), by_folded, n=1)
    return by_folded[close[0]] if close else None


def check_range(
    key: str,
    value: float,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> None:
    """Refuse a number outside its range; NaN and the infinities always are.

    Args:
        key: name of the field, for the message.
        value: the number to check.
        minimum: least allowed value.
        maximum: greatest allowed value.
        above: a value that must be exceeded.
        below: a value that must not be reached.

    Raises:
        ConfigError: names the key, the value and the range.
    """
    limits = [("at least", minimum), ("above", above), ("at most", maximum), ("below", below)]
    wanted = " and ".join(f"{words} {limit}" for words, limit in limits if limit is not None)
    if not (
        _is_finite_number(value)
        and (minimum is None or value >= minimum)
        and (above is None or value > above)
        and (maximum is None or value <= maximum)
        and (below is None or value < below)
    ):
        raise ConfigError(f"must be a finite number{' ' if wanted else ''}{wanted}, got {value!r}", key=key)


def _is_finite_number(value: object) -> bool:
    # bool is an int to Python, but `slots: true` is a slip of the user's.
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    # An int is finite, and one beyond 1e308 would overflow isfinite.
    return isinstance(value, int) or math.isfinite(value)


def check_choice(key: str, value: str, choices: Iterable[str]) -> None:
    """Refuse a word that is not one of the choices.

    Raises:
        ConfigError: names the key, the value, every choice and the nearest one.
    """
    allowed = list(choices)
    if value in allowed:
        return
    near = nearest(str(value), allowed)
    hint = f"; did you mean {near!r}?" if near else ""
    raise ConfigError(f"must be one of {', '.join(map(repr, allowed))}, got {value!r}{hint}", key=key)
