"""How AlpaGym finds its plugins, and how their config dataclasses check themselves.

A plugin is a config dataclass named by an entry point: importing it is cheap, its `build` makes the real thing. A
distribution that nobody asks for is never imported, so it cannot break a program. Standard library only: a config
module that imports this package and nothing else can be validated on any machine.

This package does not build, compose or merge configurations; `alpagym_host` does.
"""

from alpagym_plugins.checks import check_choice, check_range, nearest
from alpagym_plugins.errors import ConfigError, ConfigErrors, PluginError
from alpagym_plugins.problems import Problem
from alpagym_plugins.registry import GROUPS, Entry, entries, load, names

__all__ = [
    "GROUPS",
    "ConfigError",
    "ConfigErrors",
    "Entry",
    "PluginError",
    "Problem",
    "check_choice",
    "check_range",
    "entries",
    "load",
    "names",
    "nearest",
]
