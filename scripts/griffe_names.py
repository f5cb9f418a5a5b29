"""For the site's reference: an attribute's line may name several (`low, high: of it`); griffe knows one a line."""

from __future__ import annotations

import re
from typing import Any

import griffe

_NAMES = re.compile(r"^( +)(\w+(?:, \w+)+): ", re.MULTILINE)


class SplitNames(griffe.Extension):
    """Writes such a line as one line a name; all but the last point at the last."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Change the text of each docstring before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = _NAMES.sub(_split, obj.docstring.value)


def _split(line: re.Match[str]) -> str:
    *others, last = line[2].split(", ")
    return "".join(f"{line[1]}{name}: as `{last}`.\n" for name in others) + f"{line[1]}{last}: "
