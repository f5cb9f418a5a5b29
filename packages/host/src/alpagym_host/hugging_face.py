"""Whether Hugging Face lets us have what a run needs: token, licence, existence of an id. One request each."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from alpagym_host.alpasim.scenes import DATASET
from alpagym_host.doctor_types import Context, Finding

_NAME = "Hugging Face"
_YES = {"1", "ON", "YES", "TRUE"}


def check(context: Context) -> Iterator[Finding]:
    """The token, then each id that the run needs or that was asked about."""
    ids = list(dict.fromkeys([*_needed(context), *context.ids]))
    if _offline():
        yield Finding(_NAME, "off", "HF_HUB_OFFLINE is set: nothing is asked, local copies are used")
        return
    token = _token()
    if token is None:
        yield Finding(_NAME, "wrong" if ids else "off", "no token", "hf auth login, or export HF_TOKEN")
    elif not ids:
        yield Finding(_NAME, "ok", "a token is there; this run needs nothing that is gated")
    if not ids:
        return
    code, text = _ask("/api/whoami-v2", token, context.timeout_s)
    if code is None:
        said = f"{_endpoint()} does not answer: {text}"
        yield Finding(_NAME, "wrong", said, "HF_HUB_OFFLINE=1 with local copies")
        return
    if token is not None and code == 401:
        yield Finding(_NAME, "wrong", "401: the token is not valid", "hf auth login")
        return
    if token is not None and code == 200:
        yield Finding(_NAME, "ok", f"logged in as {_account(text)}")
    for name in ids:
        yield _access(name, token, context.timeout_s)


def access(name: str, timeout_s: float) -> Finding:
    """Whether we may read `models/OWNER/NAME` or `datasets/OWNER/NAME`: ok, wrong, or off where nothing is asked."""
    if _offline():
        return Finding(_NAME, "off", "HF_HUB_OFFLINE is set: nothing is asked, local copies are used")
    token = _token()
    if token is None:
        return Finding(_NAME, "wrong", f"{name} is gated, and there is no token", "hf auth login, or export HF_TOKEN")
    return _access(name, token, timeout_s)


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in _YES


def _needed(context: Context) -> Iterator[str]:
    if context.starts_alpasim:
        yield DATASET
    release = getattr(context.config.policy.config, "HUGGING_FACE", None)
    if release is not None and not Path(context.config.policy.config.model.path or "absent").expanduser().is_dir():
        yield release


def _access(name: str, token: str | None, timeout_s: float) -> Finding:
    kind, _, owner_and_name = name.partition("/")
    if kind not in ("models", "datasets") or owner_and_name.count("/") != 1:
        return Finding(_NAME, "wrong", f"{name!r} is no id", "models/OWNER/NAME or datasets/OWNER/NAME")
    page = f"{_endpoint()}/{'datasets/' if kind == 'datasets' else ''}{owner_and_name}"
    code, text = _ask(f"/api/{name}/auth-check", token, timeout_s)
    if code == 200:
        return Finding(_NAME, "ok", f"{owner_and_name}: access")
    if code == 403:
        said, remedy = f"{owner_and_name} is gated, and this account may not read it", f"accept its terms: {page}"
    elif code == 404 or (code == 401 and "RepoNotFound" in text):
        said, remedy = f"there is no {name}, or it is private", f"look at {page}"
    elif code == 401:
        said, remedy = f"{owner_and_name} wants a valid token", f"hf auth login, then accept its terms: {page}"
    else:
        return Finding(_NAME, "wrong", f"{owner_and_name}: {text}", "try again, or HF_HUB_OFFLINE=1 with local copies")
    return Finding(_NAME, "wrong", f"{code}: {said}", remedy)


def _ask(path: str, token: str | None, timeout_s: float) -> tuple[int | None, str]:
    """Status and body; None and the reason where there is no answer. An error's code stands before its body."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        request = urllib.request.Request(_endpoint() + path, headers=headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return answer.status, answer.read(1 << 20).decode(errors="replace")
    except urllib.error.HTTPError as err:
        with err:
            return err.code, f"{err.code} {err.headers.get('X-Error-Code', '')} {err.reason}"
    except (OSError, ValueError) as err:
        return None, str(getattr(err, "reason", err))


def _account(text: str) -> str:
    try:
        return str(json.loads(text)["name"])
    except (ValueError, KeyError, TypeError):
        return "?"


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _token() -> str | None:
    """As huggingface_hub looks for it: two variables, then the file of `hf auth login`."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(name, "").strip():
            return os.environ[name].strip()
    home = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface")
    path = Path(os.environ.get("HF_TOKEN_PATH") or f"{home}/token").expanduser()
    try:
        return path.read_text().strip() or None
    except OSError:
        return None
