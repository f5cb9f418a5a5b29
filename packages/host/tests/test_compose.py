from pathlib import Path

import pytest

from alpagym_host.compose import compose, to_yaml
from alpagym_plugins import ConfigError, PluginError
from alpagym_runtime.rollouts import references
from alpagym_runtime.run_config import load_run_config
from alpagym_runtime.trainers.cosmos.config import CosmosTrainerConfig


@pytest.fixture(scope="module")
def base():
    return compose([])


def refusal(*overrides):
    with pytest.raises((ConfigError, PluginError)) as caught:
        compose(overrides)
    return str(caught.value)


# ---------------------------------------------------------------- what is composed


def test_the_default_run():
    config = compose([])
    assert (config.simulator.type, config.policy.type, config.trainer.type) == ("embedded", "waypoint", "grpo")
    assert config.expected_valid_steps == 35


@pytest.mark.parametrize(
    ("words", "trainer", "cameras"),
    [
        ([], "grpo", ["front"]),
        (["experiment=smoke"], "grpo", ["front"]),
        (["experiment=imitation"], "sft", ["front"]),
        (["experiment=lowdim"], "grpo", []),
    ],
)
def test_what_the_experiments_train(words, trainer, cameras):
    config = compose(words)
    assert (config.policy.type, config.trainer.type) == ("waypoint", trainer)
    assert config.policy.config.cameras == cameras
    # Pictures as far apart as decisions are rendered and kept once.
    assert config.policy.config.frame_step_us == config.simulator.config.control_period_us
    assert ("actors_rig" in config.policy.config.spec().fields) is not bool(cameras)


@pytest.mark.parametrize("flow", ["motion", "joint"])
def test_only_the_tiny_model_is_paid_for_more_than_the_recipe(flow):
    recipe, tiny = (compose([f"experiment=pai_rl_{flow}{size}", "dataset.path=recordings"]) for size in ("", "_tiny"))
    assert [*recipe.reward.terms, "pai_distance"] == [*tiny.reward.terms]
    assert recipe.policy.config.noise_correlation == 0.0 < tiny.policy.config.noise_correlation


def test_default_yaml_states_the_defaults_of_the_schema():
    config = compose([])
    for name in ("run", "dataset", "rollout", "evaluation", "checkpoint", "store"):
        assert getattr(config, name) == type(getattr(config, name))(), name


ROOT = Path(__file__).parents[3]
PRESETS = sorted(
    f"{path.parent.name}={path.stem}"
    for folder in ("packages/host/src/alpagym_host/conf", "packages/policies/*/src/*/conf")
    for path in ROOT.glob(f"{folder}/*/*.yaml")
)
# What a preset cannot know.
RECORDED = [f"dataset={source}" for source in ("commonroad", "files", "pai", "pai_reasoning")]
RECORDED += [f"experiment=pai_{flow}" for flow in ("sft_stage1", "sft_stage2", "rl_motion", "rl_joint")]
MORE = {choice: ["dataset.path=recordings"] for choice in RECORDED}


@pytest.mark.parametrize("choice", PRESETS)
def test_every_preset_composes_validates_and_renders(choice, tmp_path):
    config = compose([choice, *MORE.get(choice, [])])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_run_config(tmp_path) == config


def test_the_groups_that_users_know_have_their_presets():
    wanted = {
        *(
            "topology=local_cpu",
            "topology=local_colocated_1gpu",
            "topology=local_colocated_separated_1gpu",
            "topology=local_disaggregated_2gpu",
        ),
        *("topology=slurm_full_node_1_3_4", "deploy=local", "deploy=slurm", "transport=disk", "trainer=cosmos"),
        *("reward=progress_safety", "reward=metrics", "reward=distance_to_gt", "logging=wandb"),
        *("policy=alpamayo_1", "policy=alpamayo_1_5", "experiment=alpamayo_1_5_local_2gpu_smoke"),
    }
    assert wanted <= set(PRESETS)


@pytest.mark.parametrize("choice", [preset for preset in PRESETS if preset.startswith("topology=")])
def test_the_gpus_of_every_topology_suffice_for_its_roles(choice):
    config = compose([choice])
    if config.topology.gpus_per_node == 0:
        return
    roles = CosmosTrainerConfig().gpus(config)
    assert sum(roles.values()) == config.topology.train_gpus
    if choice.startswith("topology=slurm"):
        assert config.cosmos.mode == "disaggregated"


def test_the_weights_of_the_reward_presets():
    def scales(reward):
        return {name: term.scale for name, term in compose([f"reward={reward}"]).reward.terms.items()}

    assert scales("distance_to_gt") == {"distance_to_gt": -0.01}
    assert scales("metrics") == {"progress": 1, "collision": -10}
    assert scales("progress_safety") == {"progress": 1, "collision": -10, "off_road": -5, "distance_to_gt": -0.01}
    assert scales("driving") == {"progress": 1, "collision": -1, "off_road": -1, "pace": -0.03}


def test_the_reference_policies_are_the_presets_of_their_names():
    presets = {"recording": "log_replay"}
    for name, config in references._CONFIGS.items():
        assert compose([f"policy={presets.get(name, name)}"]).policy.config == config


def test_imitation_alone_takes_more_drives_and_no_reinforcement():
    trainer = compose(["experiment=imitation"]).trainer
    assert trainer.type == "sft"
    assert (trainer.config.drives_per_scene, trainer.config.epochs, trainer.config.patience) == (4, 16, 16)


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


SECRET = "5ecretmarker-0123456789"


@pytest.mark.parametrize("key", ["dataset.path", "run.root", "store.path", "logging.loggers.w.project"])
def test_the_value_of_a_secret_variable_is_refused_and_not_repeated(key, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    text = refusal("logging.loggers.w.type=wandb", f"{key}=a/{SECRET}/b")
    assert text.startswith(f"{key}: holds the value of the environment variable WANDB_API_KEY")
    assert SECRET not in text


def test_a_secret_by_interpolation_and_a_password_in_a_url_are_refused(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    assert "holds the value of the environment variable HF_TOKEN" in refusal("dataset.path=${oc.env:HF_TOKEN}")
    text = refusal("alpasim.repo_url=https://me:hunter22@example.org/alpasim.git")
    assert "alpasim.repo_url: holds a password in a URL" in text
    assert "hunter22" not in text


def test_only_names_of_variables_are_exported_to_a_job():
    assert compose(["deploy.slurm.export_env=[HF_TOKEN]"]).deploy.slurm.export_env == ["HF_TOKEN"]
    text = refusal("deploy.slurm.export_env=[HF_TOKEN=hunter22]")
    assert "deploy.slurm.export_env[0]: must be the name of a variable" in text
    assert "hunter22" not in text


@pytest.mark.parametrize("group", ["policy", "simulator", "trainer", "transport"])
def test_a_run_folder_can_name_registered_kinds_only(group, tmp_path):
    config = to_yaml(compose([]))
    start = config.index(f"\n{group}:\n  type: ")
    end = config.index("\n", start + len(group) + 5)
    (tmp_path / "config.yaml").write_text(config[:start] + f"\n{group}:\n  type: os.system" + config[end:])
    with pytest.raises(PluginError, match="no plugin of group .* named 'os.system'"):
        load_run_config(tmp_path)


def test_yaml_that_would_run_code_is_refused(tmp_path):
    marker = tmp_path / "marker"
    text = to_yaml(compose([])).replace("name: run", f"name: !!python/object/apply:os.mkdir ['{marker}']")
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"config.yaml cannot be read"):
        load_run_config(tmp_path)
    assert not marker.exists()


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


def test_two_presets_of_one_name_are_refused_by_name(install):
    install(
        {"acme_conf/__init__.py": "", "acme_conf/reward/metrics.yaml": "terms: {}\n"},
        "[alpagym.configs]\nacme = acme_conf\n",
    )
    assert "reward/metrics is in two packages: alpagym_host.conf and acme_conf" in refusal("reward=metrics")
    compose(["reward=driving"])


@pytest.mark.parametrize("group", ["simulators", "policies", "rewards", "transports", "trainers", "loggers"])
def test_a_broken_plugin_that_is_not_named_breaks_nothing(group, install):
    install({"acme_broken.py": "import no_such_module_x"}, f"[alpagym.{group}]\nbroken = acme_broken:Config\n")
    compose([])
    words = {"rewards": ["reward.terms.b.scale=1", "reward.terms.b.type=broken"]}
    words["loggers"] = ["logging.loggers.b.type=broken"]
    section = {"simulators": "simulator", "policies": "policy", "transports": "transport", "trainers": "trainer"}
    first = refusal(*words.get(group, [f"{section.get(group)}=broken"])).splitlines()[0]
    for part in ("plugin 'broken'", "acme 1.2", "No module named 'no_such_module_x'"):
        assert part in first


def test_hydra_of_the_program_around_us_is_left_alone():
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    with initialize_config_module("alpagym_host.conf", version_base="1.3"):
        outer = GlobalHydra.instance().hydra
        compose([])
        assert GlobalHydra.instance().hydra is outer
