"""Checks of what is installed: Python, distributions against what ours ask for, plugins."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement

from alpagym_host.doctor_types import Context, Finding
from alpagym_plugins import GROUPS, PluginError, entries, load

PYTHONS = ((3, 11), (3, 14))
_OURS = ("alpagym-host", "alpagym-runtime", "alpagym-plugins", "alpagym-waypoint", "alpagym-alpamayo-r1")
_SHOWN = ("torch", "numpy", "gymnasium", "pyarrow", "grpcio", "protobuf", "transformers")
_EXTRAS = ("torch", "cosmos", "vllm", "flash-attn", "deepspeed", "ray", "wandb", "pai")


def python(context: Context) -> Iterator[Finding]:
    """The interpreter."""
    low, high = PYTHONS
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.prefix}"
    if low <= sys.version_info[:2] < high:
        yield Finding("Python", "ok", text)
    else:
        wanted = f"{low[0]}.{low[1]} to {high[0]}.{high[1] - 1}"
        yield Finding("Python", "wrong", f"{text}; {wanted} is needed", f"uv sync --python {low[0]}.{low[1] + 1}")


def packages(context: Context) -> Iterator[Finding]:
    """Our packages, what they require, and which extras are there."""
    ours = {name: version for name in _OURS if (version := context.machine.version(name)) is not None}
    shown = [f"{name} {version}" for name in _SHOWN if (version := context.machine.version(name)) is not None]
    yield Finding("packages", "ok", f"alpagym {ours.get('alpagym-host', '?')}; {', '.join(shown)}")
    for name in ours:
        for requirement, extra in _requirements(name):
            found = context.machine.version(requirement.name)
            if found is None and not extra:
                text = f"{name} needs {requirement.name}, which is not installed"
                yield Finding("packages", "wrong", text, f"uv sync, or pip install '{requirement}'")
            elif found is not None and not requirement.specifier.contains(found, prereleases=True):
                text = f"{requirement.name} {found} is installed; {name} needs {requirement.specifier}"
                yield Finding("packages", "wrong", text, f"uv sync, or pip install '{requirement}'")
    clash = [name for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13") if context.machine.version(name)]
    if len(clash) > 1:
        remedy = "pip uninstall nvidia-nccl-cu12 && pip install --force-reinstall --no-deps nvidia-nccl-cu13"
        yield Finding("packages", "wrong", f"{' and '.join(clash)} overwrite each other's libnccl.so.2", remedy)
    extras = []
    for extra in _EXTRAS:
        needs = [requirement.name for requirement, name in _requirements("alpagym-runtime") if name == extra]
        if needs and all(context.machine.version(name) for name in needs):
            extras.append(extra)
    yield Finding("packages", "ok", f"extras installed: {', '.join(extras) or 'none'}")


def plugins(context: Context) -> Iterator[Finding]:
    """Every installed plugin is loaded once; one that fails matters only to runs that name it."""
    broken = []
    count = 0
    for group in GROUPS.keys() - {"configs"}:
        for entry in entries(group):
            count += 1
            try:
                load(group, entry.name)
            except PluginError as err:
                broken.append((entry, str(err).splitlines()[0]))
    yield Finding("plugins", "ok", f"{count - len(broken)} load")
    for entry, text in broken:
        text = f"{text} (no run needs it that does not name it)"
        yield Finding("plugins", "warn", text, f"pip uninstall {entry.distribution}")


def _requirements(distribution: str) -> Iterator[tuple[Requirement, str]]:
    """What a distribution requires here, with the extra that asks for it ("" for none)."""
    try:
        lines = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement, ""
            continue
        for extra in _EXTRAS:
            if requirement.marker.evaluate({"extra": extra}):
                yield requirement, extra
