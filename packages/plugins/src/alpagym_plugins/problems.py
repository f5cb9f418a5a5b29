"""What stands in the way of a run, as a list that a person can work through."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that would make a run fail, found before anything starts.

    A plugin's config dataclass reports its own with an optional method

        def preflight(self, config: RunConfig, machine: Machine) -> Iterable[Problem]: ...

    which neither imports anything heavy nor writes anything, so that a login node can call it.

    Attributes:
        key: dotted path of the value in question, as an override writes it; one that begins with a dot is below the
            plugin's own section.
        value: what it is now.
        message: what is needed and what was found.
        remedy: what to do: a command, or an override, as it is typed.

    """

    key: str
    value: object
    message: str
    remedy: str

    def under(self, prefix: str) -> Problem:
        """The same with `prefix` before a key that begins with a dot."""
        return dataclasses.replace(self, key=prefix + self.key) if self.key.startswith(".") else self
