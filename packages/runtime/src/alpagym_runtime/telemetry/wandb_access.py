"""Whether a W&B server takes our key for an entity: one request, without the client."""

from __future__ import annotations

import base64
import json
import netrc
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from alpagym_runtime.secrets import redacted

if TYPE_CHECKING:
    from alpagym_runtime.telemetry.config import WandbConfig

PUBLIC = "https://api.wandb.ai"
_QUERY = "query { viewer { username entity teams(first: 500) { edges { node { name } } } } }"


@dataclass(frozen=True)
class AccessTrouble:
    """What is wrong with one key of the section, and what helps."""

    key: str
    message: str
    remedy: str


def server_url(config: WandbConfig) -> str:
    """The server's address."""
    return (config.base_url or os.environ.get("WANDB_BASE_URL") or PUBLIC).rstrip("/")


def access_trouble(config: WandbConfig) -> AccessTrouble | None:
    """Why the server would refuse this run; None if it takes the key and the key belongs to the entity.

    Nothing is created on the server. The key itself is never part of a message.
    """
    url = server_url(config)
    api_key = _api_key(url)
    if api_key is None:
        return AccessTrouble(
            "mode", f"no key for {redacted(url)}", "wandb login, or export WANDB_API_KEY, or mode=offline"
        )
    target = f"entity {config.entity or '(default of the key)'}, project {config.project!r} at {redacted(url)}"
    try:
        viewer = _viewer(url, api_key, config.timeout_s)
    except urllib.error.HTTPError as err:
        with err:
            if err.code == 401:
                return AccessTrouble("mode", f"401: the key is not valid at {redacted(url)}", "wandb login --relogin")
            if err.code == 403:
                return AccessTrouble(
                    "entity",
                    f"403: the key may not write to {target}",
                    "set entity and project of this logger to ones that are yours, or its mode=offline",
                )
            return AccessTrouble("mode", f"{target} answered {err.code} {err.reason}", "try again, or mode=offline")
    except (OSError, ValueError) as err:
        reason = redacted(str(getattr(err, "reason", err)))
        return AccessTrouble("mode", f"{redacted(url)} cannot be reached: {reason}", "mode=offline")
    if viewer is None:
        return AccessTrouble("mode", f"the key is not valid at {redacted(url)}", "wandb login --relogin")
    teams = [edge["node"]["name"] for edge in (viewer.get("teams") or {}).get("edges", [])]
    known = {viewer.get("username"), viewer.get("entity"), *teams} - {None}
    if config.entity is not None and config.entity not in known:
        return AccessTrouble(
            "entity",
            f"the key belongs to {', '.join(sorted(known))}, and may not write to {target}",
            "set entity of this logger to one of these, or its mode=offline",
        )
    return None


def _viewer(url: str, api_key: str, timeout_s: float) -> dict[str, Any] | None:
    token = base64.b64encode(f"api:{api_key}".encode()).decode()
    request = urllib.request.Request(
        f"{url}/graphql",
        json.dumps({"query": _QUERY}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Basic {token}"},
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        data = json.load(response)
    return (data.get("data") or {}).get("viewer")


def _api_key(url: str) -> str | None:
    """$WANDB_API_KEY, or what `wandb login` wrote into the netrc file."""
    found = os.environ.get("WANDB_API_KEY")
    if found:
        return found
    for path in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        if path:
            try:
                entry = netrc.netrc(os.path.expanduser(path)).authenticators(urlsplit(url).hostname or "")
            except (OSError, netrc.NetrcParseError):
                continue
            if entry is not None:
                return entry[2]
    return None
