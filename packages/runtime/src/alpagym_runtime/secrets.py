"""Secrets are known by the names of the variables that hold them; their values are never written or shown.

Which variables hold one is told by their names (`HF_TOKEN`, `WANDB_API_KEY`, …). A password inside a URL is one too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

_NAMES = re.compile(r"(TOKEN|API_?KEY|ACCESS_KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(?P<before>[a-zA-Z][a-zA-Z0-9+.-]*://[^\s/@:]*:)(?P<password>[^\s/@]+)(?=@)")
# Shorter values are words such as "true", which would be found everywhere.
_LEAST_LENGTH = 8


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret."""
    return _NAMES.search(name) is not None


def secret_variables() -> Iterator[tuple[str, str]]:
    """Name and value of each environment variable that holds a secret, longest value first."""
    found = [(name, value) for name, value in os.environ.items() if _NAMES.search(name) and len(value) >= _LEAST_LENGTH]
    return iter(sorted(found, key=lambda item: -len(item[1])))


def secret_in(text: str) -> str | None:
    """What kind of secret a text holds, in words that do not repeat it; None for none."""
    for name, value in secret_variables():
        if value in text:
            return f"the value of the environment variable {name}"
    return "a password in a URL" if _URL_PASSWORD.search(text) else None


def redacted(text: str) -> str:
    """The text with every secret replaced by `***`."""
    for _, value in secret_variables():
        text = text.replace(value, "***")
    return _URL_PASSWORD.sub(r"\g<before>***", text)
