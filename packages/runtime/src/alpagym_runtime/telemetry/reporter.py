"""Progress for people. The runtime reports; the host draws bars or prints lines."""

from __future__ import annotations

from typing import Protocol


class Reporter(Protocol):
    """Who shows progress."""

    def stage(self, name: str, total: int, unit: str) -> None:
        """Begin a stage of `total` units; ends the one before."""
        ...

    def advance(self, amount: int = 1, **numbers: float) -> None:
        """Progress in the present stage, with a few numbers worth showing."""
        ...

    def note(self, text: str) -> None:
        """One line that stays."""
        ...


class Silent:
    """Shows nothing."""

    def stage(self, name: str, total: int, unit: str) -> None:
        """Nothing."""

    def advance(self, amount: int = 1, **numbers: float) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""
