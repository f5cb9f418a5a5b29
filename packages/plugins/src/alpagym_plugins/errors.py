"""The two errors a user of configurations and plugins can cause."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """A value in a configuration is wrong; says which one.

    A dataclass knows its own field names only. Whoever holds it adds where it stands, with `under`:

        try:
            term.check()
        except ConfigError as err:
            raise err.under(f"reward.terms.{name}") from err

    Attributes:
        message: what was expected and what came, without the key.
        key: dotted path of the wrong value, as a user would write it in an override; empty if unknown.
    """

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.key = key

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message

    def under(self, prefix: str) -> ConfigError:
        """The same error seen from one level up: `prefix.key`, or `prefix` alone if the key is empty."""
        return ConfigError(self.message, key=".".join(part for part in (prefix, self.key) if part))


class ConfigErrors(ConfigError):
    """Several values are wrong; `errors` says which ones."""

    def __init__(self, errors: Sequence[Exception]) -> None:
        lines = "".join(f"\n  {err}" for err in errors)
        super().__init__(f"{len(errors)} values are wrong:{lines}")
        self.errors = list(errors)


class PluginError(ValueError):
    """A plugin cannot be found or loaded; the first line names it, its distribution and the cause."""
