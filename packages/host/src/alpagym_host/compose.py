"""From the overrides of a command line to one validated `RunConfig`.

Hydra composes the groups (`policy=…`, `experiment=…`) from the YAML of every installed `alpagym.configs` package. The
values (`a.b.c=…`, `~a.b`) are applied here, after it: so an unknown key is reported by our schema with its full name
and the nearest right one, and text stays the text that was typed (Hydra reads `12e34567` as infinity and `1_0` as 10).

Nothing here touches the disk or starts a process.
"""

from __future__ import annotations

import importlib
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from alpagym_host.as_cosmos import ONLY_GRPO, SAME_MEANING, as_cosmos
from alpagym_plugins import ConfigError, ConfigErrors, entries, load, names, nearest
from alpagym_runtime.run_config import PLUGIN_SECTIONS, RunConfig, from_mapping, to_mapping
from alpagym_runtime.secrets import secret_in

CONFIG_MODULE = "alpagym_host.conf"
CONFIG_NAME = "default"

# Groups whose presets set keys of other sections too.
_SEVERAL_SECTIONS = ("deploy", "topology")

_OVERRIDE = re.compile(r"(?P<sign>~|\+\+|\+)?(?P<key>[\w./-]+)(?P<equals>=(?P<value>.*))?", re.DOTALL)
_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")
_RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
# A list's item: quoted, or anything without the characters that structure it.
_ITEM = re.compile(r"""\s*(?P<quoted>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")\s*|(?P<plain>[^,'"\[\]{}]*)""", re.DOTALL)


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


def compose(overrides: Sequence[str], base: RunConfig | None = None, tell: Callable[[str], None] = _tell) -> RunConfig:
    """The run that a list of overrides describes.

    Args:
        overrides: `group=choice`, `key.path=value`, `~key.path`; of two that set the same key, the later one holds.
            `experiment=DIR/experiment/NAME.yaml` is a file of the user's own.
            A value of a text key is taken as typed; quotes around it are removed, `null` is no text.
        base: start from this config in place of the defaults; a group choice then replaces its whole section.
        tell: takes a line about what the presets say and the run goes without.

    Raises:
        ConfigError: names the key as it is written in an override, and what to write.
        PluginError: a section's `type` is not installed or fails to import.

    """
    parsed, folders = _own_experiments([_parse(text) for text in overrides])
    with _Groups(folders) as groups:
        chosen, values = _sort(parsed, groups)
        of_grpo = False
        if base is None:
            data, of_grpo = _composed(groups, chosen, values)
        else:
            data = to_mapping(base)
            _replace_sections(data, chosen, groups)
    # A section's type says what its other keys mean, so it comes first.
    for override in sorted(values, key=lambda item: not item.key.endswith(".type")):
        _apply(data, override)
    _refuse_targets(data, "")
    resolved = _resolve(data)
    _refuse_secrets(resolved, "")
    try:
        config = from_mapping(resolved)
    except ConfigErrors as err:
        raise ConfigErrors([_as_written(one, values, resolved) for one in err.errors]) from err
    except ConfigError as err:
        raise _as_written(err, values, resolved) from err
    check_run_name(config.run.name)
    if of_grpo and config.trainer.type == "grpo":
        config, left_out = as_cosmos(config, {override.key for override in values})
        if left_out:
            tell(f"trainer=cosmos has no counterpart of, and goes without: {', '.join(left_out)}")
    return config


def _composed(groups: _Groups, chosen: Mapping[str, str], values: Sequence[_Override]) -> tuple[dict[str, Any], bool]:
    """The config of the choices, and whether it is one of grpo that Cosmos-RL is to train.

    That is so where trainer=cosmos is chosen on top of one: by the user, or by a preset on top of another.
    """
    data = groups.compose(chosen)
    asked = chosen.get("trainer") == "cosmos"  # a preset's own `type` would go over it
    if not (asked or data["trainer"]["type"] == "cosmos") or any(word.key == "trainer.type" for word in values):
        return data, False
    without = {group: choice for group, choice in chosen.items() if group != "trainer"}
    if "trainer" in chosen:
        kind = groups.compose(without)["trainer"]["type"]
        if kind not in ("grpo", "cosmos"):
            raise ConfigError(
                f"cosmos takes over runs of trainer=grpo, and this preset trains with {kind}: Cosmos-RL compares the "
                "drives of a group, and learns neither values nor plans of others",
                key="trainer",
            )
    else:
        kind = "cosmos"
    if kind == "cosmos" and not ONLY_GRPO & data["trainer"].keys():
        return data, False
    placed = any(override.key.split(".")[0] == "topology" or override.key == "cosmos.mode" for override in values)
    if "topology" not in chosen and not placed and not data["topology"]["gpus_per_node"]:
        without["topology"] = "local_colocated_1gpu"
    data = groups.compose({**without, "trainer": "grpo"})
    data["trainer"]["type"] = "grpo"
    return data, True


def check_run_name(name: str) -> None:
    """Refuse a run name that is not one plain part of a path, or that a shell or an option parser reads otherwise.

    Raises:
        ConfigError: the key is `run.name`.

    """
    if not _RUN_NAME.fullmatch(name):
        shown = name if len(name) <= 40 else name[:40] + "…"
        raise ConfigError(
            f"must be 1 to 100 letters, digits, '.', '_' or '-', not '.' or '-' first; got {shown!r}", key="run.name"
        )


def to_yaml(config: RunConfig) -> str:
    """The config as YAML with every default written out; `load_run_config` reads back an equal config."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(to_mapping(config)))


# ---------------------------------------------------------------- overrides


@dataclass(frozen=True)
class _Override:
    text: str
    key: str
    value: str | None  # None deletes


def _parse(text: str) -> _Override:
    match = _OVERRIDE.fullmatch(text)
    if match is None or (match["equals"] is None) != (match["sign"] == "~"):
        raise ConfigError(f"{text!r} is no override; write group=choice, key.path=value, or ~key.path to delete")
    return _Override(text, match["key"], match["value"])


def _own_experiments(overrides: Sequence[_Override]) -> tuple[list[_Override], list[str]]:
    """Files given as `experiment=….yaml` become names in folders that are searched too; those folders."""
    out, folders = [], []
    for override in overrides:
        if override.key == "experiment" and (override.value or "").endswith(".yaml"):
            file = Path(_unquote(override.value or "")).expanduser().absolute()
            if not file.is_file():
                raise ConfigError(f"{file} does not exist", key="experiment")
            if file.parent.name != "experiment":
                raise ConfigError(f"{file} must lie in a folder named 'experiment', as presets do", key="experiment")
            folders.append(str(file.parent.parent))
            override = replace(override, value=file.stem)
        out.append(override)
    return out, folders


def _sort(overrides: Sequence[_Override], groups: _Groups) -> tuple[dict[str, str], list[_Override]]:
    chosen: dict[str, str] = {}
    values = []
    for override in overrides:
        group = override.key.partition("/")[0]
        is_value = override.value is None or override.value.lstrip().startswith("{")
        if group not in groups.names or is_value:
            if not _KEY.fullmatch(override.key):
                raise ConfigError(
                    f"{override.text!r} is no override; a key is names joined by dots; groups are "
                    f"{', '.join(groups.names)}"
                )
            values.append(override)
            continue
        choice = _unquote(override.value or "")
        if choice == "null":
            if override.key != "experiment":
                raise ConfigError(f"choose one of {', '.join(groups.choices(override.key))}", key=override.key)
            chosen.pop("experiment", None)
            continue
        groups.check(override.key, choice)
        chosen[override.key] = choice
    return chosen, values


def _unquote(text: str) -> str:
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" else text


def _replace_sections(data: dict[str, Any], chosen: dict[str, str], groups: _Groups) -> None:
    composed = groups.compose(chosen) if chosen else {}
    for group in chosen:
        if group not in data or group in _SEVERAL_SECTIONS:
            raise ConfigError("cannot be chosen on top of a finished run; set the keys themselves", key=group)
        data[group] = composed[group]


def _apply(data: dict[str, Any], override: _Override) -> None:
    *parents, last = override.key.split(".")
    node = data
    for depth, name in enumerate(parents):
        if override.value is None and name not in node:
            raise ConfigError(f"cannot be deleted: {_absent(name, node)}", key=override.key)
        child = node.setdefault(name, {})
        if child is None:
            child = node[name] = {}
        if not isinstance(child, dict):
            above = ".".join(parents[: depth + 1])
            raise ConfigError(f"{above} is {child!r} and has no keys below it", key=override.key)
        node = child
    if override.value is not None:
        node[last] = _read(override.key, override.value, _type_of(data, override.key.split(".")))
    elif last in node:
        del node[last]
    else:
        raise ConfigError(f"cannot be deleted: {_absent(last, node)}", key=override.key)


def _absent(name: str, node: Mapping[str, Any]) -> str:
    near = nearest(name, map(str, node))
    hint = f"did you mean {near!r}?" if near else f"there are: {', '.join(map(str, node)) or 'none'}"
    return f"no {name!r} there; {hint}"


def _as_written(err: Exception, values: Sequence[_Override], data: Mapping[str, Any]) -> Exception:
    """An unknown section under the whole key that the user wrote; a key of grpo with the name that Cosmos-RL has."""
    if isinstance(err, ConfigError) and err.message.startswith("unknown key"):
        section, _, name = err.key.partition(".")
        if section == "trainer" and name in SAME_MEANING and data["trainer"].get("type") == "cosmos":
            return ConfigError(f"unknown key; trainer=cosmos has cosmos.{SAME_MEANING[name]}", key=err.key)
        for override in values:
            if override.key.startswith(f"{err.key}."):
                return ConfigError(f"{err.key} is an {err.message}", key=override.key)
    return err


# ---------------------------------------------------------------- values


def _read(key: str, raw: str, hint: Any) -> Any:
    """The value of an override; texts, alone or in a list, exactly as typed."""
    hint = _without_null(hint)
    if raw.strip() == "null":
        return None
    if "${" not in raw and hint is str and not raw.startswith(("'", '"')):
        return raw
    if "${" not in raw and typing.get_origin(hint) is list and typing.get_args(hint) == (str,):
        items = _text_items(raw)
        if items is not None:
            return [None if item == "null" else _read(key, item, str) for item in items]
    return _read_with_hydra(key, raw)


def _text_items(raw: str) -> list[str] | None:
    """Items of `[a,b,'c d']`, quotes kept; None if it is no flat list."""
    raw = raw.strip()
    if not (raw.startswith("[") and raw.endswith("]")):
        return None
    inside, items, at = raw[1:-1], [], 0
    if not inside.strip():
        return []
    while True:
        match = _ITEM.match(inside, at)
        assert match is not None  # the plain form matches even nothing
        items.append(match["quoted"] or match["plain"].strip())
        at = match.end()
        if at == len(inside):
            return items if all(items) else None
        if inside[at] != ",":
            return None
        at += 1


def _read_with_hydra(key: str, raw: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(f"key={raw}")
        if override.is_sweep_override():
            raise ConfigError(
                f"{raw!r} is several values, and a run takes one; [a,b] is a list, --multirun makes runs",
                key=key,
            )
        return override.value()
    except HydraException as err:
        cause = str(err).strip().splitlines()[0]
        raise ConfigError(f"cannot read {raw!r} ({cause}); quote it: {key}='\"…\"'", key=key) from err


def _type_of(data: Mapping[str, Any], path: Sequence[str]) -> Any:
    """The annotated type of a dotted key; None where the schema does not know it (validation will say so)."""
    section, *rest = path
    if section == "reward":
        if len(rest) < 3 or rest[0] != "terms":
            return None
        group, node, rest = "rewards", data["reward"]["terms"].get(rest[1]), rest[2:]
    elif section == "logging":
        if len(rest) < 3 or rest[0] != "loggers":
            return None
        group, node, rest = "loggers", data["logging"]["loggers"].get(rest[1]), rest[2:]
    elif section in PLUGIN_SECTIONS:
        group, node = PLUGIN_SECTIONS[section], data.get(section)
    else:
        return _field_type(RunConfig, path)
    if rest == ["type"]:
        return str
    name = node.get("type") if isinstance(node, dict) else None
    return _field_type(load(group, name), rest) if isinstance(name, str) else None


def _field_type(hint: Any, path: Sequence[str]) -> Any:
    for name in path:
        hint = _without_null(hint)
        if typing.get_origin(hint) is dict:
            hint = typing.get_args(hint)[1]
        elif isinstance(hint, type) and is_dataclass(hint):
            hint = typing.get_type_hints(hint).get(name)
        else:
            return None
    return hint


def _without_null(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        others = [item for item in typing.get_args(hint) if item is not type(None)]
        return others[0] if len(others) == 1 else hint
    return hint


def _refuse_targets(data: Any, key: str) -> None:
    if isinstance(data, dict):
        for name, value in data.items():
            below = f"{key}.{name}" if key else str(name)
            if name == "_target_":
                raise ConfigError("is refused: a config names plugins by `type`, never code", key=below)
            _refuse_targets(value, below)
    elif isinstance(data, list):
        for i, value in enumerate(data):
            _refuse_targets(value, f"{key}[{i}]")


def _refuse_secrets(data: Any, key: str) -> None:
    """A config is written down and shown, so it names the variable that holds a secret and never holds the secret."""
    if isinstance(data, dict):
        for name, value in data.items():
            _refuse_secrets(value, f"{key}.{name}" if key else str(name))
    elif isinstance(data, list):
        for i, value in enumerate(data):
            _refuse_secrets(value, f"{key}[{i}]")
    elif isinstance(data, str) and (what := secret_in(data)):
        raise ConfigError(
            f"holds {what}, and a config is written to files; leave it out: programs read secrets from their variables",
            key=key,
        )


def _resolve(data: dict[str, Any]) -> dict[str, Any]:
    """Plain data without interpolations such as `${oc.env:NAME}`; a failure names the key that holds it."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    def visit(plain: Any, node: Any, key: str) -> Any:
        if isinstance(plain, dict):
            return {k: item(v, node, k, f"{key}.{k}" if key else str(k)) for k, v in plain.items()}
        return [item(v, node, i, f"{key}[{i}]") for i, v in enumerate(plain)]

    def item(plain: Any, node: Any, index: Any, key: str) -> Any:
        if isinstance(plain, (dict, list)):
            return visit(plain, node[index], key)
        if plain == "???":
            raise ConfigError(f"must be given: {key}=VALUE", key=key)
        if not (isinstance(plain, str) and "${" in plain):
            return plain
        try:
            found = node[index]
            return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
        except OmegaConfBaseException as err:
            raise ConfigError(f"cannot resolve {plain!r}: {str(err).splitlines()[0]}", key=key) from err

    try:
        tree = OmegaConf.create(data)
    except OmegaConfBaseException as err:
        raise ConfigError(str(err).splitlines()[0], key=str(err.full_key or "")) from err
    return typing.cast("dict[str, Any]", visit(data, tree, ""))


# ---------------------------------------------------------------- groups


@dataclass
class _Groups:
    """Hydra's groups over all installed packages of YAML, for the length of a `with` block."""

    folders: Sequence[str] = ()
    names: list[str] = field(default_factory=list)
    _search: str = ""
    _packages: list[str] = field(default_factory=list)
    _broken: list[str] = field(default_factory=list)

    def __enter__(self) -> _Groups:
        import hydra
        from hydra.core.global_hydra import GlobalHydra
        from hydra.core.object_type import ObjectType

        others = self._config_packages()
        self._packages = [CONFIG_MODULE, *others]
        places = [*(f"pkg://{name}" for name in others), *(f"file://{folder}" for folder in self.folders)]
        quoted = ",".join(f"'{place}'" for place in places)
        self._search = f"hydra.searchpath=[{quoted}]"
        # A program around us may use Hydra for itself; leaving the context restores its state.
        self._outer = GlobalHydra.instance().hydra
        GlobalHydra.instance().clear()
        hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3")
        self._loader = typing.cast("Any", GlobalHydra.instance().config_loader())
        found = self._loader.get_group_options("", ObjectType.GROUP, overrides=[self._search])
        self.names = sorted(set(found) - {"hydra"})
        self._register_plugins()
        return self

    def __exit__(self, *exc: object) -> None:
        from hydra.core.global_hydra import GlobalHydra

        GlobalHydra.instance().hydra = self._outer

    def choices(self, group: str) -> list[str]:
        """Names that a group offers."""
        return sorted(self._loader.get_group_options(group, overrides=[self._search]))

    def check(self, group: str, choice: str) -> None:
        """Refuse a choice that does not exist."""
        folder, _, name = choice.rpartition("/")
        known = self.choices(f"{group}/{folder}" if folder else group)
        if name not in known:
            near = nearest(name, known)
            hint = f"; did you mean {near!r}?" if near else ""
            if choice == "None" and group == "experiment":
                hint = "; for none write experiment=null"
            broken = "".join(f"\n{text}" for text in self._broken)
            raise ConfigError(f"no {choice!r}; there are: {', '.join(known) or 'none'}{hint}{broken}", key=group)
        file = f"{group}/{choice}.yaml"
        holders = [package for package in self._packages if resources.files(package).joinpath(file).is_file()]
        own = [folder for folder in self.folders if (Path(folder) / file).is_file()]
        if holders and own:
            raise ConfigError(f"{own[0]}/{file} has the name of a preset of {holders[0]}; rename it", key=group)
        if len(holders) > 1:
            raise ConfigError(
                f"{group}/{choice} is in two packages: {' and '.join(holders)}; uninstall one of them", key=group
            )

    def compose(self, chosen: Mapping[str, str]) -> dict[str, Any]:
        """The config of these choices as plain data, interpolations kept."""
        import hydra
        from hydra.errors import HydraException
        from omegaconf import OmegaConf

        overrides = [self._search, *(f"{group}={choice}" for group, choice in chosen.items())]
        try:
            config = hydra.compose(CONFIG_NAME, overrides=overrides)
        except HydraException as err:
            words = " ".join(f"{group}={choice}" for group, choice in chosen.items()) or "the defaults"
            raise ConfigError(f"cannot compose {words}: {' '.join(str(err).split())}") from err
        return typing.cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False))

    def _config_packages(self) -> list[str]:
        """Packages of YAML besides ours; one that does not import is left out, and named if a choice is missing."""
        usable = []
        for entry in entries("configs"):
            if entry.target == CONFIG_MODULE:
                continue
            try:
                importlib.import_module(entry.target)
                usable.append(entry.target)
            except Exception as err:
                self._broken.append(f"configs {entry.name!r} from {entry} failed to load: {type(err).__name__}: {err}")
        return usable

    def _register_plugins(self) -> None:
        """Make `policy=NAME` work for an installed plugin that brings no YAML: it runs with its own defaults."""
        from hydra.core.config_store import ConfigStore

        for section, group in PLUGIN_SECTIONS.items():
            # Hydra would take a node beside a YAML of the same name for its schema, and warn.
            for name in set(names(group)) - set(self.choices(section)):
                ConfigStore.instance().store(group=section, name=name, node={"type": name})
