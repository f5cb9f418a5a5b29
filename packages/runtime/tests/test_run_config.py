from __future__ import annotations

import copy
import math

import pytest

from alpagym_plugins import ConfigError, PluginError
from alpagym_runtime.run_config import from_mapping, load_run_config, to_mapping

BASE = to_mapping(
    from_mapping(
        {
            "run": {},
            "simulator": {"type": "toy"},
            "policy": {"type": "waypoint"},
            "reward": {
                "terms": {
                    "off": {"type": "off_road", "scale": -1},
                    "m": {"type": "measure", "scale": 1, "measure": "x"},
                }
            },
            "transport": {"type": "memory"},
            "trainer": {"type": "grpo"},
        }
    )
)
JUNK = [None, "x", "", -1, 1.5, True, [], {}, [1], ["a", None], {"a": 1}, {1: 2}, b"x", "None", math.nan, math.inf]
JUNK += [10**400, "1e3", "³", "1_0", "+-1", "../../x", "a\0b", "9" * 30]


# Sections and mappings whose names are the user's own.
FREE_NAMES = (("reward",), ("reward", "terms"), ("logging",), ("logging", "loggers"), ("deploy", "slurm", "env"))


def leaves(data, above=()):
    for name, value in data.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from leaves(value, (*above, name))


def changed(path, value):
    data = copy.deepcopy(BASE)
    node = data
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    return data


def test_every_default_is_written_out_and_read_back():
    assert to_mapping(from_mapping(BASE)) == BASE
    assert BASE["trainer"]["warm_start"]["epochs"] == 10


@pytest.mark.parametrize("path", list(leaves(BASE)), ids=".".join)
def test_any_value_is_taken_as_it_is_or_refused_by_name(path):
    for junk in JUNK:
        refused = None
        try:
            config = from_mapping(changed(path, junk))
        except (ConfigError, PluginError) as err:
            refused = err
        if refused is None:
            # NaN is no value anywhere; what was taken comes back equal.
            assert from_mapping(to_mapping(config)) == config
        elif isinstance(refused, PluginError):
            assert path[-1] == "type"
            assert repr(junk) in str(refused)
        else:
            assert refused.key.split(".")[0].split("[")[0] == path[0], f"{junk!r}: {refused}"


def test_an_unknown_key_is_named_at_any_depth():
    for path in leaves(BASE):
        node = BASE
        for name in path:
            node = node[name]
        if not isinstance(node, dict) or path in FREE_NAMES:
            continue
        with pytest.raises(ConfigError) as caught:
            from_mapping(changed(path, node | {"colour": 1}))
        assert caught.value.key == ".".join((*path, "colour"))
        with pytest.raises(ConfigError, match="_target_: is refused"):
            from_mapping(changed(path, node | {"_target_": "os.system"}))


def test_a_config_of_another_schema_is_refused():
    with pytest.raises(ConfigError, match="schema_version: this config has schema 7, this program reads 1"):
        from_mapping(BASE | {"schema_version": 7})


def test_the_hash_leaves_out_name_and_place_only():
    config = from_mapping(BASE)
    renamed = from_mapping(changed(("run", "name"), "other") | {})
    assert renamed.config_hash == config.config_hash
    assert from_mapping(changed(("run", "root"), "elsewhere")).config_hash == config.config_hash
    # Who drives changes no result.
    assert from_mapping(changed(("rollout", "workers"), 2)).config_hash == config.config_hash
    for path, value in (
        (("run", "seed"), 2),
        (("trainer", "kl_weight"), 0.1),
        (("reward", "terms", "m", "scale"), 2.0),
    ):
        assert from_mapping(changed(path, value)).config_hash != config.config_hash


@pytest.mark.parametrize("text", ["", "a: [", "- 1", "\0"])
def test_a_file_that_is_no_config_is_named(text, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="config.yaml|simulator.type: needs"):
        load_run_config(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        load_run_config(tmp_path / "absent.yaml")
