import sys
import textwrap

import pytest

from alpagym_host.compose import compose, to_yaml
from alpagym_plugins import ConfigError, PluginError
from alpagym_runtime.run_config import load_run_config


@pytest.fixture(scope="module")
def base():
    return compose([])


def refusal(*overrides):
    with pytest.raises((ConfigError, PluginError)) as caught:
        compose(overrides)
    return str(caught.value)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Writes files of a distribution that declares entry points, as an installer leaves them."""
    site = tmp_path / "site"
    before = set(sys.modules)

    def install(files, entry_points):
        info = site / "acme-1.2.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(textwrap.dedent(entry_points))
        for name, text in files.items():
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            (site / name).write_text(textwrap.dedent(text))
        monkeypatch.syspath_prepend(str(site))

    yield install
    for name in set(sys.modules) - before:
        if name.startswith("acme"):
            del sys.modules[name]


# ---------------------------------------------------------------- what is composed


def test_the_default_run():
    config = compose([])
    assert (config.simulator.type, config.policy.type, config.trainer.type) == ("embedded", "waypoint", "grpo")
    assert config.expected_valid_steps == 35


def test_default_yaml_states_the_defaults_of_the_schema():
    config = compose([])
    for name in ("run", "dataset", "rollout", "evaluation", "checkpoint", "store"):
        assert getattr(config, name) == type(getattr(config, name))(), name


@pytest.mark.parametrize(
    "choice",
    [
        *("simulator=embedded", "simulator=toy", "dataset=procedural", "policy=waypoint", "policy=constant_speed"),
        *("policy=route_follower", "policy=log_replay", "reward=distance_to_gt", "reward=metrics"),
        *(
            "reward=progress_safety",
            "reward=driving",
            "trainer=grpo",
            "trainer=sft",
            "transport=memory",
            "transport=disk",
        ),
        "transport=shared_memory",
        "experiment=smoke",
    ],
)
def test_every_preset_composes(choice):
    compose([choice])


def test_the_weights_of_the_reward_presets():
    def scales(reward):
        return {name: term.scale for name, term in compose([f"reward={reward}"]).reward.terms.items()}

    assert scales("distance_to_gt") == {"distance_to_gt": -0.01}
    assert scales("metrics") == {"progress": 1, "collision": -10}
    assert scales("progress_safety") == {"progress": 1, "collision": -10, "off_road": -5, "distance_to_gt": -0.01}
    assert scales("driving") == {"progress": 1, "collision": -1, "off_road": -1, "pace": -0.03}


def test_the_command_line_wins_over_the_experiment():
    config = compose(["rollout.slots=96", "reward=metrics", "experiment=smoke"])
    assert (config.run.name, config.rollout.slots, len(config.reward.terms)) == ("smoke", 96, 2)


def test_a_plus_is_not_needed_and_does_no_harm(base):
    plain, *others = (compose([f"{plus}run.seed=7"], base) for plus in ("", "+", "++"))
    assert plain.run.seed == 7
    assert others == [plain, plain]


def test_a_term_can_be_deleted_and_added():
    config = compose(["~reward.terms.pace", "reward.terms.near.scale=-1", "reward.terms.near.type=distance_to_gt"])
    assert list(config.reward.terms) == ["progress", "collision", "off_road", "near"]


def test_overrides_go_on_top_of_a_finished_run():
    base = compose(["experiment=smoke", "run.seed=5"])
    config = compose(["dataset=commonroad", "dataset.path=recordings", "run.name=again"], base)
    assert (config.dataset.source, config.run.seed, config.rollout) == ("commonroad", 5, base.rollout)
    with pytest.raises(ConfigError, match="experiment: cannot be chosen on top of a finished run"):
        compose(["experiment=smoke"], base)


# ---------------------------------------------------------------- text stays text, null is null


@pytest.mark.parametrize("text", ["12e34567", "1_0", "true", "00123", "1:30", "0x1F", "2026-01-01", "~", "no", "nullx"])
def test_text_stays_as_typed(text, base, tmp_path):
    config = compose([f"dataset.scene_ids=[{text},a]", f"dataset.path={text}"], base)
    assert config.dataset.scene_ids == [text, "a"]
    assert config.dataset.path == text
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_run_config(tmp_path) == config


@pytest.mark.parametrize(
    "path", ["/a b/c=d", "x,y", "it's", "{a}", "ü/é", "a;b", "#1", "c: d", "- e", 'say "x"', "100%"]
)
def test_any_path_survives(path, base, tmp_path):
    config = compose([f"run.root={path}"], base)
    assert config.run.root == path
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_run_config(tmp_path) == config


def test_quotes_around_a_text_are_not_part_of_it():
    config = compose(["dataset.scene_ids=['a,b',\"c d\", e f ]", "dataset.path='x y'"])
    assert config.dataset.scene_ids == ["a,b", "c d", "e f"]
    assert config.dataset.path == "x y"


def test_a_number_where_text_belongs_is_refused_inside_a_mapping():
    assert "dataset.scene_ids[0]: must be text" in refusal("dataset={scene_ids:[12e34567]}")


def test_null_unsets_and_keeps_its_type(base):
    assert compose(["dataset.path=x", "dataset.path=null"], base).dataset.path is None
    assert compose(["trainer.warm_start=null"], base).trainer.config.warm_start is None


def test_none_is_refused_with_the_word_to_use():
    assert refusal("dataset.path=None") == "dataset.path: is the text 'None'; use null"
    assert refusal("dataset.scene_ids=[a,None]") == "dataset.scene_ids[1]: is the text 'None'; use null"


# ---------------------------------------------------------------- typos and wrong types


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rewrad=x", "rewrad: unknown key; did you mean reward?"),
        ("cosmos.train.lr=1", "cosmos.train.lr: unknown key; did you mean cosmos.train.optm_lr?"),
        ("cosmoss.train.lr=1", "cosmoss.train.lr: cosmoss is an unknown key; did you mean cosmos?"),
        ("run.sed=1", "run.sed: unknown key; did you mean run.seed?"),
        ("reward.terms.off_road.scael=1", "reward.terms.off_road.scael: unknown key"),
        (
            "simulator.control_period=1",
            "simulator.control_period: unknown key; did you mean simulator.control_period_us?",
        ),
        ("policy=waypont", "policy: no 'waypont'; there are: alpamayo_1,"),
        ("policy=waypont", "did you mean 'waypoint'?"),
        ("experiment=smok", "smoke; did you mean 'smoke'?"),
        ("policy=null", "policy: choose one of alpamayo_1,"),
        ("policy.type=waypont", "no plugin of group 'policies' named 'waypont'"),
        ("~reward.terms.pacee", "reward.terms.pacee: cannot be deleted: no 'pacee' there; did you mean 'pace'?"),
        ("~run.seed.x", "run.seed.x: run.seed is 1 and has no keys below it"),
        ("expected_valid_steps=8.5", "expected_valid_steps: must be a whole number, got 8.5"),
        ("expected_valid_steps=-1", "expected_valid_steps: must be a finite number at least 1"),
        ("expected_valid_steps=0", "expected_valid_steps: must be a finite number at least 1"),
        ("expected_valid_steps=${oc.env:ALPAGYM_TEST_WORD}", "expected_valid_steps: must be a whole number, got 'abc'"),
        ("expected_valid_steps=${oc.env:ALPAGYM_TEST_UNSET}", "expected_valid_steps: cannot resolve"),
        ("run.seed=1,2", "run.seed: '1,2' is several values"),
        ("rollout.slots=[1", "rollout.slots: cannot read '[1'"),
        ("rollout=0", "rollout: must be a mapping, got 0"),
        ("simulator._target_=os.system", "simulator._target_: is refused"),
        ("simulator={type:embedded,_target_:os.system}", "simulator._target_: is refused"),
        ("hydra.run.dir=x", "hydra.run.dir: hydra is an unknown key"),
        ("foo", "'foo' is no override; write group=choice, key.path=value"),
        ("policy@x=waypoint", "is no override"),
        ("dataset=commonroad", "dataset.path: commonroad needs a folder"),
    ],
)
def test_a_wrong_override_is_named(override, message, monkeypatch):
    monkeypatch.setenv("ALPAGYM_TEST_WORD", "abc")
    assert message in refusal(override)


def test_an_environment_value_is_converted_and_checked(monkeypatch):
    monkeypatch.setenv("ALPAGYM_TEST_STEPS", "12")
    assert compose(["expected_valid_steps=${oc.env:ALPAGYM_TEST_STEPS}"]).expected_valid_steps == 12


@pytest.mark.parametrize(
    "name",
    ["../../x", "/etc/x", "a/b", "..", ".", "", "a\0b", "con\nid", "a" * 300, "-rf", "%2e%2e", "x;touch y", "a b", "ü"],
)
def test_a_run_name_that_is_no_plain_file_name_is_refused(name, base):
    with pytest.raises(ConfigError, match=r"run.name: must be 1 to 100 letters"):
        compose([f"run.name={name}"], base)


def test_a_frozen_config_with_an_extra_key_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(compose([])) + "colour: red\n")
    with pytest.raises(ConfigError, match="colour: unknown key"):
        load_run_config(tmp_path)


# ---------------------------------------------------------------- plugins

ACME = """
    from dataclasses import dataclass

    @dataclass
    class Config:
        label: str = "x"
        count: int = 1
"""


def test_a_plugin_without_yaml_can_be_chosen_and_its_keys_are_checked(install):
    install({"acme.py": ACME}, "[alpagym.policies]\nacme = acme:Config\n")
    config = compose(["policy=acme", "policy.label=1_0", "policy.count=3"])
    assert (config.policy.type, config.policy.config.label, config.policy.config.count) == ("acme", "1_0", 3)
    assert refusal("policy=acme", "policy.cuont=3") == "policy.cuont: unknown key; did you mean policy.count?"


def test_experiments_of_another_distribution_are_found(install):
    experiment = "# @package _global_\ndefaults:\n  - override /policy: constant_speed\nrun:\n  name: acme\n"
    install(
        {"acme_conf/__init__.py": "", "acme_conf/experiment/acme.yaml": experiment},
        "[alpagym.configs]\nacme = acme_conf\n",
    )
    config = compose(["experiment=acme"])
    assert (config.run.name, config.policy.type) == ("acme", "constant_speed")


def test_a_broken_package_of_yaml_shows_only_when_a_choice_is_missing(install):
    install({"acme_conf/__init__.py": "import no_such_module_x"}, "[alpagym.configs]\nacme = acme_conf\n")
    compose([])
    assert "No module named 'no_such_module_x'" in refusal("experiment=acme")


def test_hydra_of_the_program_around_us_is_left_alone():
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    with initialize_config_module("alpagym_host.conf", version_base="1.3"):
        outer = GlobalHydra.instance().hydra
        compose([])
        assert GlobalHydra.instance().hydra is outer
