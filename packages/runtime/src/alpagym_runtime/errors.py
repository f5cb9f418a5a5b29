"""What can go wrong, by whose fault it is.

A wrong *input* is a `ValueError` or `ConfigError` and stops everything before it starts. A wrong *world* is a
`SimulatorError`: the episode is void and counted, never scored. A wrong *program* is an `assert`.
"""

from __future__ import annotations

from alpagym_plugins import ConfigError, PluginError

__all__ = [
    "ConfigError",
    "CorruptFileError",
    "OutOfRangeError",
    "PluginError",
    "ResetNeededError",
    "SceneError",
    "SimulatorError",
]


class SceneError(ValueError):
    """A scene that cannot be loaded or driven; the message names the scene or file, the place and the reason."""


class SimulatorError(RuntimeError):
    """The world failed. `permanent` errors (unknown scene, undelivered measure) are never retried."""

    def __init__(self, message: str, *, code: str = "SIMULATOR", permanent: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.permanent = permanent


class ResetNeededError(RuntimeError):
    """`step` was called before `reset`, or after the episode's end."""


class OutOfRangeError(ValueError):
    """A time outside a log was asked for; carries the query and the log's range, integers in microseconds."""

    def __init__(self, query_us: int, first_us: int, last_us: int, what: str = "trajectory") -> None:
        super().__init__(
            f"{what}: {query_us} us is outside the log's [{first_us}, {last_us}] us; nothing is extrapolated"
        )
        self.query_us = query_us
        self.first_us = first_us
        self.last_us = last_us


class CorruptFileError(ValueError):
    """A file that is cut, empty or of another kind; the message names path, size and the remedy."""
