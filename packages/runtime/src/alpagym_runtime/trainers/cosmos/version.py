"""Which Cosmos-RL this was built against. Its internals move between patch releases, so another one is refused."""

from __future__ import annotations

from importlib import metadata

from alpagym_plugins import ConfigError
from alpagym_runtime.trainers.cosmos.config import INSTALL, VERSION


def require_version() -> None:
    """Refuse any Cosmos-RL but ours, before it is imported.

    Raises:
        ConfigError: names what is installed, and the command that brings the right one.

    """
    try:
        found = metadata.version("cosmos-rl")
    except metadata.PackageNotFoundError:
        raise ConfigError(f"needs cosmos-rl {VERSION}, which is not installed: {INSTALL}", key="trainer") from None
    if found != VERSION:
        raise ConfigError(f"needs cosmos-rl {VERSION}, and {found} is installed: {INSTALL}", key="trainer")
