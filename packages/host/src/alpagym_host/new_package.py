"""`alpagym new KIND NAME`: a package of your own with a plugin in it, its preset and its tests.

The files under `templates/` are a working plugin named `plugin-name`; making a package is copying them under another
name. Inside a uv workspace the package becomes a member of it.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import shutil
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from pathlib import Path

from alpagym_plugins import ConfigError, entries

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LONGEST_NAME = 40


class Kind(StrEnum):
    """What a new package adds."""

    POLICY = "policy"
    REWARD = "reward"
    SIMULATOR = "simulator"
    TRAINER = "trainer"


@dataclass(frozen=True)
class _Facts:
    group: str  # of entry points, short
    description: str
    extra: str  # of alpagym-runtime
    command: str  # tries it


_FACTS = {
    Kind.POLICY: _Facts("policies", "A policy", "torch", "alpagym train policy=plugin_name"),
    Kind.REWARD: _Facts("rewards", "A reward term", "", "alpagym train reward=plugin_name"),
    Kind.SIMULATOR: _Facts(
        "simulators", "A simulator", "", "alpagym evaluate simulator=plugin_name policy=constant_speed reward=metrics"
    ),
    Kind.TRAINER: _Facts("trainers", "A trainer", "torch", "alpagym train trainer=plugin_name"),
}


@dataclass(frozen=True)
class NewPackage:
    """What was made.

    Attributes:
        folder: the package.
        workspace: the pyproject.toml of the uv workspace that it joined, or None.
        command: tries the plugin.

    """

    folder: Path
    workspace: Path | None
    command: str


def make_package(kind: Kind, name: str, parent: Path) -> NewPackage:
    """Write a package `parent / name`, whole or not at all.

    Args:
        kind: what it adds.
        name: of the distribution, such as `lane-keeping`; the plugin is `lane_keeping`.
        parent: an existing folder.

    Raises:
        ConfigError: the name cannot be used, the folder is there, or the workspace's members cannot be read.

    """
    check_name(kind, name)
    folder = parent.resolve() / name
    if folder.exists():
        raise ConfigError(f"{folder} exists; nothing is overwritten: choose another name or --directory", key="NAME")
    if not parent.is_dir():
        raise ConfigError(f"{parent} is no folder", key="--directory")
    workspace = _workspace(folder)
    joined = None if workspace is None else _with_member(workspace, folder)
    # Under a name of its own until it is whole; same folder, so that the move is a rename.
    building = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=folder.parent))
    try:
        for path, text in _files(kind, name).items():
            (building / path).parent.mkdir(parents=True, exist_ok=True)
            (building / path).write_text(text, "utf-8")
        building.chmod(0o755)
        building.rename(folder)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    if workspace is not None and joined is not None:
        workspace.write_text(joined, "utf-8")
    return NewPackage(folder, workspace, _FACTS[kind].command.replace("plugin_name", _module(name)))


def check_name(kind: Kind, name: str) -> None:
    """Refuse a name that a distribution, a module or a plugin cannot have, or that is taken.

    Raises:
        ConfigError: says why, and what to write where that is clear.

    """
    module = _module(name)
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        better = re.sub(r"[^a-z0-9]+", "-", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()).strip("-")
        hint = f"; such as {better!r}" if _NAME.fullmatch(better) and len(better) <= _LONGEST_NAME else ""
        raise ConfigError(
            f"must be words of small letters and digits joined by '-', at most {_LONGEST_NAME} characters, a letter "
            f"first; got {name!r}{hint}",
            key="NAME",
        )
    if keyword.iskeyword(module):
        raise ConfigError(f"{module!r} is a word of Python's and cannot be imported; choose another", key="NAME")
    if module in sys.stdlib_module_names or importlib.util.find_spec(module) is not None:
        raise ConfigError(f"a module {module!r} is installed, which the new one would hide; choose another", key="NAME")
    for entry in entries(_FACTS[kind].group):
        if entry.name == module:
            raise ConfigError(f"{entry.distribution} has a {kind} {module!r} already; choose another", key="NAME")


def _module(name: str) -> str:
    return name.replace("-", "_")


def _files(kind: Kind, name: str) -> dict[str, str]:
    """Text by path in the package."""
    facts, module = _FACTS[kind], _module(name)
    templates = resources.files("alpagym_host") / "templates"
    own, common = templates / kind.value, templates / "common"
    source = f"src/{module}"
    sources: dict[str, Traversable] = {
        "pyproject.toml": common / "pyproject.toml.txt",
        "README.md": common / "README.md.txt",
        f"{source}/config.py": own / "config.py.txt",
        f"{source}/{kind}.py": own / f"{kind}.py.txt",
        f"{source}/conf/{kind}/{module}.yaml": own / "preset.yaml.txt",
        f"tests/test_{module}.py": own / "test.py.txt",
    }
    words = {
        "PLUGIN_DESCRIPTION": facts.description,
        "[PLUGIN_EXTRA]": f"[{facts.extra}]" if facts.extra else "",
        "PLUGIN_RUNTIME": _compatible(metadata.version("alpagym-runtime")),
        "PLUGIN_GROUP": facts.group,
        "PLUGIN_COMMAND": facts.command,
        "PLUGIN_KIND": kind.value,
        "PLUGIN_SECTION": kind.value,
        "plugin-name": name,
        "plugin_name": module,
        "PluginName": "".join(word.capitalize() for word in name.split("-")),
    }
    files = {f"{source}/__init__.py": f'"""{facts.description} for AlpaGym."""\n'}
    files |= {f"{source}/py.typed": "", f"{source}/conf/__init__.py": '"""Presets."""\n'}
    for path, template in sources.items():
        text = template.read_text("utf-8")
        for word, by in words.items():
            text = text.replace(word, by)
        files[path] = text
    if kind is Kind.TRAINER:
        # Its tests train the small policy.
        files["pyproject.toml"] = files["pyproject.toml"].replace(
            'dev = ["pytest>=8.4"]', 'dev = ["alpagym-waypoint[torch]", "pytest>=8.4"]'
        )
    return files


def _compatible(version: str) -> str:
    """The versions that keep the contract of this one (docs/versioning.md): before 1.0 a minor one may change it."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return f">={major}.{minor},<{major + 1}" if major else f">=0.{minor},<0.{minor + 1}"


# ---------------------------------------------------------------- a uv workspace around it


def _workspace(folder: Path) -> Path | None:
    """The pyproject.toml of the workspace that the folder would lie in."""
    for above in folder.parents:
        file = above / "pyproject.toml"
        if file.is_file():
            section = tomllib.loads(file.read_text("utf-8")).get("tool", {}).get("uv", {}).get("workspace")
            if section is not None:
                excluded = any(folder.relative_to(above).match(p) for p in section.get("exclude", ()))
                return None if excluded else file
    return None


def _with_member(workspace: Path, folder: Path) -> str | None:
    """The workspace's text with the package among its members; None where a pattern covers it already."""
    text = workspace.read_text("utf-8")
    before = tomllib.loads(text)
    members = before["tool"]["uv"]["workspace"].get("members", [])
    path = folder.relative_to(workspace.parent)
    if any(path.match(pattern) for pattern in members):
        return None
    found = re.search(r"^\[tool\.uv\.workspace\][^\[]*?^members\s*=\s*\[", text, re.DOTALL | re.MULTILINE)
    if found is not None:
        rest = text[found.end() :]
        # In front, where no comma or comment of another entry is in the way.
        added = f'\n  "{path.as_posix()}",' if rest.startswith("\n") else f'"{path.as_posix()}"' + ", " * bool(members)
        before["tool"]["uv"]["workspace"]["members"] = [path.as_posix(), *members]
        # Text is changed by pattern, so that comments stay; what it then means is checked.
        if _parses_to(changed := text[: found.end()] + added + rest, before):
            return changed
    raise ConfigError(
        f"cannot find `members = […]` under [tool.uv.workspace] in {workspace}; write {path.as_posix()!r} there first, "
        "or make the package elsewhere with --directory",
        key="NAME",
    )


def _parses_to(text: str, data: object) -> bool:
    try:
        return tomllib.loads(text) == data
    except tomllib.TOMLDecodeError:
        return False
