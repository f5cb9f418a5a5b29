"""Options of the open-loop world, and the one rule by which chunks are written everywhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from alpagym_plugins import ConfigError, check_choice, check_range

if TYPE_CHECKING:
    from alpagym_runtime.simulators.pai.simulator import PaiSimulator

SCORED = ("plan", "round_trip", "tokens", "text")
LABELS = ("target_plan_rig", "recorded_plan_rig", "cot_utf8")

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


@dataclass
class PaiConfig:
    """The open-loop world: a sample of the PhysicalAI-AV dataset, one plan, one score.

    Attributes:
        scored: what is scored: plan (the decision's) | round_trip (the plan through the trajectory tokens and back, as
            the published rewards do) | tokens (the trace `tokens`) | text (the trace `text`, a completion).
        workers: processes that decode pictures; 0 decodes in this one.
        cache_mb: shared memory for decoded samples, MiB; the least recently used ones go first.
        max_gap_s: a sample whose recorded motion has a larger gap is left out and counted.

    """

    scored: str = "plan"
    workers: int = 2
    cache_mb: int = 1024
    max_gap_s: float = 0.5

    def __post_init__(self) -> None:
        check_choice("scored", self.scored, SCORED)
        check_range("workers", self.workers, minimum=0, maximum=256)
        check_range("cache_mb", self.cache_mb, minimum=1, maximum=1_000_000)
        check_range("max_gap_s", self.max_gap_s, above=0)

    def build(self, policy_spec: Any, dataset: Any, slots: int, labels: Sequence[str]) -> PaiSimulator:
        """A simulator with `slots` slots over the dataset's split, delivering what `policy_spec` and `labels` name."""
        from alpagym_runtime.simulators.pai.simulator import PaiSimulator

        return PaiSimulator(self, policy_spec, dataset, slots, labels)
