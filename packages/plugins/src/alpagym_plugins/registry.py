"""Which plugins are installed, and loading exactly one of them.

Listing reads the metadata of the installed distributions and imports nothing. Loading imports one target. A broken
plugin therefore shows only when it is asked for, and then under its own name.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
from dataclasses import dataclass
from importlib import metadata

from alpagym_plugins.checks import nearest
from alpagym_plugins.errors import PluginError

GROUPS: dict[str, str] = {
    "simulators": "alpagym.simulators",
    "policies": "alpagym.policies",
    "rewards": "alpagym.rewards",
    "transports": "alpagym.transports",
    "trainers": "alpagym.trainers",
    "loggers": "alpagym.loggers",
    "configs": "alpagym.configs",
}
"""Short name of a group of plugins -> its entry-point group. All but `configs` hold config dataclasses."""

_PACKAGES_OF_YAML = "configs"


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """One installed plugin, as its distribution declares it; nothing of it has been imported.

    Attributes:
        name: what a configuration writes as `type`.
        distribution: name of the distribution that declares it.
        version: version of that distribution.
        target: `module:attribute`; for the group `configs`, the package that holds the YAML.
    """

    name: str
    distribution: str
    version: str
    target: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} ({self.target})"


@dataclass(frozen=True, slots=True)
class _Installed:
    entries: dict[str, tuple[Entry, ...]]
    unreadable: tuple[str, ...]


def entries(group: str) -> list[Entry]:
    """Everything installed in a group, sorted by name; a name that two distributions claim is there twice.

    Raises:
        PluginError: there is no such group.
    """
    return list(_installed().entries.get(_entry_point_group(group), ()))


def names(group: str) -> list[str]:
    """Names of the plugins of a group, sorted, each once.

    Raises:
        PluginError: there is no such group.
    """
    return sorted({entry.name for entry in entries(group)})


def load(group: str, name: str) -> type:
    """Import one plugin and give its config dataclass.

    Args:
        group: short name, a key of `GROUPS` other than `configs`.
        name: name of the entry point.

    Raises:
        PluginError: the name is not installed, is claimed twice, fails to import, or is no dataclass. The first line
            names the plugin, its distribution and the root cause; the exception it was is chained.
    """
    if group == _PACKAGES_OF_YAML:
        raise PluginError(f"group {group!r} holds packages of YAML, not classes; list them with entries({group!r})")
    found = [entry for entry in entries(group) if entry.name == name]
    if not found:
        raise PluginError(_not_installed(group, name))
    if len(found) > 1:
        raise PluginError(
            f"{len(found)} plugins of group {group!r} are named {name!r}: {' and '.join(map(str, found))}; "
            f"uninstall all but one"
        )
    entry = found[0]
    who = f"plugin {name!r} of group {group!r} from {entry}"
    try:
        target = metadata.EntryPoint(name=name, group=_entry_point_group(group), value=entry.target).load()
    # A module can do anything when it is imported, even leave the program.
    except (Exception, SystemExit) as err:
        raise PluginError(f"{who} failed to load: {_cause(err)}") from err
    if not (isinstance(target, type) and dataclasses.is_dataclass(target)):
        raise PluginError(f"{who} must be a config dataclass, got {target!r}")
    return target


def _entry_point_group(group: str) -> str:
    if group not in GROUPS:
        near = nearest(group, GROUPS)
        hint = f"; did you mean {near!r}?" if near else ""
        raise PluginError(f"no group of plugins named {group!r}; there are: {', '.join(GROUPS)}{hint}")
    return GROUPS[group]


def _not_installed(group: str, name: str) -> str:
    installed = names(group)
    near = nearest(name, installed)
    hint = f"; did you mean {near!r}?" if near else ""
    unreadable = "".join(f"\nunreadable entry points: {text}" for text in _installed().unreadable)
    return f"no plugin of group {group!r} named {name!r}; installed: {', '.join(installed) or 'none'}{hint}{unreadable}"


def _cause(err: BaseException) -> str:
    root, seen = err, {id(err)}
    while True:
        before = root.__cause__ or (None if root.__suppress_context__ else root.__context__)
        if before is None or id(before) in seen:
            break
        root = before
        seen.add(id(root))
    # A wrapper often says what to do, and the root what happened: both belong on the first line.
    return _one_line(err) if root is err else f"{_one_line(err)} (root cause: {_one_line(root)})"


def _one_line(err: BaseException) -> str:
    return f"{type(err).__name__}: {' '.join(str(err).split())}"


def _installed() -> _Installed:
    return _scan(tuple(_fingerprint(folder or ".") for folder in sys.path))


def _fingerprint(folder: str) -> tuple[str, int, int]:
    # Installing adds a folder to site-packages, which changes its time: a few stats instead of reading 150 files.
    try:
        stat = os.stat(folder)
    except OSError:
        return folder, 0, 0
    return folder, stat.st_ino, stat.st_mtime_ns


@functools.lru_cache(maxsize=1)
def _scan(environment: tuple[tuple[str, int, int], ...]) -> _Installed:
    # Not metadata.entry_points(): one malformed entry_points.txt, of any distribution, makes that raise.
    wanted = frozenset(GROUPS.values())
    found: dict[str, list[Entry]] = {group: [] for group in wanted}
    unreadable: list[str] = []
    seen: set[str] = set()
    for distribution in metadata.distributions():
        try:
            text = distribution.read_text("entry_points.txt") or ""
            name = distribution.name
            # As Python resolves imports: the first of two copies on sys.path counts. Most declare nothing of ours,
            # but one without our groups still hides a later copy that has them.
            normal = re.sub(r"[-_.]+", "-", name).lower()
            if normal in seen:
                continue
            seen.add(normal)
            if not any(group in text for group in wanted):
                continue
            for point in distribution.entry_points:
                if point.group in wanted:
                    entry = Entry(point.name, name, distribution.version, point.value)
                    found[point.group].append(entry)
        except Exception as err:
            unreadable.append(f"{getattr(distribution, '_path', distribution)}: {_one_line(err)}")
    return _Installed({group: tuple(sorted(listed)) for group, listed in found.items()}, tuple(unreadable))
