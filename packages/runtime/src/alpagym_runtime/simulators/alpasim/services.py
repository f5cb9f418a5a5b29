"""Names of AlpaSim's services, as they are on the wire; the messages' own package is ours."""

from __future__ import annotations

EGODRIVER = "egodriver.EgodriverService"
RUNTIME = "RuntimeService"  # AlpaSim's file has no package

CONTRACT_METADATA = (("carla-driver-interface-contract", "2"),)
"""Sent with `get_version`: cameras are optical frames. That package sends body frames to a server without it."""


def path(service: str, method: str) -> str:
    """The method's path."""
    return f"/{service}/{method}"
