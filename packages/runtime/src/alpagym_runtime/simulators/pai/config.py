"""The one rule by which chunks are written everywhere."""

from __future__ import annotations

import re
from typing import Any

from alpagym_plugins import ConfigError

_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


def parse_chunks(value: Any, key: str = "chunk_ids") -> list[int] | None:
    """Chunk numbers, ascending, each once; None means all.

    `3` and `"3"` are chunk 3; `"0-3"` is 0, 1, 2 (the end is excluded, as in the published recipes); `"0 1 5"`,
    `"0,1,5"` and `[0, 1, 5]` are lists, whose parts may be ranges.

    Raises:
        ConfigError: anything else, an empty list, and a range that holds nothing, such as `"0-0"` or `"3-0"`.

    """
    if value is None:
        return None
    parts = re.split(r"[\s,]+", value.strip()) if isinstance(value, str) else value
    parts = [parts] if isinstance(parts, int) else parts
    if not isinstance(parts, (list, tuple)) or not parts or parts == [""]:
        raise ConfigError(f"names no chunk: {value!r}; give 3, 0-3 (end excluded), a list, or null for all", key=key)
    found: set[int] = set()
    for part in parts:
        match = None if isinstance(part, bool) else _RANGE.fullmatch(str(part))
        if match is None:
            raise ConfigError(f"{part!r} is no chunk; give 3, 0-3 (end excluded) or a list of them", key=key)
        first = int(match[1])
        end = first + 1 if match[2] is None else int(match[2])
        if end <= first:
            raise ConfigError(
                f"{part!r} holds no chunk: the end is excluded, so {first}-{first + 1} is chunk {first}", key=key
            )
        found.update(range(first, end))
    return sorted(found)
