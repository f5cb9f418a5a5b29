import string
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import MISSING, OmegaConf

from alpagym_host.alpasim.checkout import Checkout
from alpagym_host.alpasim.wizard import argv, check_topology, config_folders, quote, topology_facts
from alpagym_host.compose import compose
from alpagym_host.preflight import preflight
from alpagym_plugins import ConfigError
from alpagym_runtime.machine import Machine

RUN = ["simulator=alpasim", "dataset.scene_ids=[clip-a]"]
OURS = {
    "alpagym_1gpu": ({0}, 4),
    "alpagym_2gpu": ({1}, 4),
    "alpagym_4gpu": ({3}, 4),
    "alpagym_8gpu": ({4, 5, 6, 7}, 12),
    "alpagym_8gpu_whole": (set(range(8)), 24),
}


def command(tmp_path, *overrides):
    return argv(compose([*RUN, *overrides]), Checkout(tmp_path, "abc"), tmp_path / "wizard_0")


def words(tmp_path, *overrides):
    parser = OverridesParser.create()
    return {word.key_or_group: word.value() for word in parser.parse_overrides(command(tmp_path, *overrides)[3:])}


# ---------------------------------------------------------------- command line


def test_the_launcher_is_asked_for_a_server_of_this_run(tmp_path):
    found = words(tmp_path, "expected_valid_steps=8", "topology=local_disaggregated_2gpu")
    assert found.pop("hydra.searchpath") == [f"file://{folder}" for folder in config_folders()]
    # 1.7 s of 0.1 s are recorded, 8 are decided, and one more `drive` brings the last observation: 17 + 8 + 1.
    assert found == {
        "hydra.run.dir": str(tmp_path / "wizard_0"),
        "deploy": "local",
        "topology": "alpagym_2gpu",
        "driver_source": "external_dynamic",
        "wizard.run_method": "DOCKER_COMPOSE",
        "wizard.run_mode": "SERVER",
        "wizard.debug_flags.use_localhost": True,
        "runtime.simulation_config.send_recording_ground_truth": True,
        "runtime.simulation_config.skip_driver_during_force_gt": True,
        "runtime.simulation_config.force_gt_duration_us": 1_700_000,
        "runtime.simulation_config.control_timestep_us": 100_000,
        "runtime.simulation_config.n_sim_steps": 26,
        "wizard.log_dir": str(tmp_path / "wizard_0"),
        "scenes.scene_ids": ["clip-a"],
    }


def test_the_program_is_the_checkouts_own_python(tmp_path):
    assert command(tmp_path)[:3] == [str(tmp_path / ".venv/bin/python"), "-m", "alpasim_wizard"]


def test_choices_of_the_launcher_stand_before_what_the_run_decides(tmp_path):
    overrides = [
        *("alpasim.wizard_args.driver=alpamayo1_5", "alpasim.wizard_args.renderer=nre"),
        *("alpasim.wizard_args.cameras=4cam_1080", "alpasim.wizard_args.extra_overrides=['eval.enabled=false']"),
    ]
    found = command(tmp_path, *overrides)
    assert found[-6:-2] == ["driver=alpamayo1_5", "renderer=nre", "+cameras=4cam_1080", "eval.enabled=false"]
    assert found[-2].startswith("wizard.log_dir=")


def test_a_suite_is_named_instead_of_scenes(tmp_path):
    found = words(tmp_path, "dataset.scene_ids=null", "dataset.test_suite_id=public_2604")
    assert found["scenes.test_suite_id"] == "public_2604"
    assert "scenes.scene_ids" not in found


def test_scene_ids_stay_text(tmp_path):
    ids = ["12e34567", "00123", "true", "null", "clip a"]
    found = words(tmp_path, "dataset.scene_ids=['12e34567','00123','true','null','clip a']")
    assert found["scenes.scene_ids"] == ids


@pytest.mark.parametrize(
    ("section", "key"),
    [("UserSimulatorConfig", "runtime"), ("SimulationConfig", "runtime.simulation_config"), ("Other", None)],
)
def test_the_runtimes_own_retries_are_off_where_the_revision_has_them(tmp_path, section, key):
    file = tmp_path / "src/runtime/alpasim_runtime/config.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"@dataclass\nclass {section}:\n    max_rollout_retries: int = 2\n\nclass Last:\n    x: int = 1\n")
    found = [word for word in command(tmp_path) if "max_rollout_retries" in word]
    assert found == ([] if key is None else [f"++{key}.max_rollout_retries=0"])


@pytest.mark.parametrize("override", ["wizard.log_dir=/x", "++scenes.scene_ids=[a]", "wizard.run_mode=ONESHOT"])
def test_what_the_run_decides_cannot_be_overridden(override):
    with pytest.raises(ConfigError, match=r"alpasim.wizard_args.extra_overrides\[0\]: .* is set for every run"):
        compose([*RUN, f"alpasim.wizard_args.extra_overrides=['{override}']"])


@given(st.text(alphabet=string.printable + "é€'\"\\${}#=", max_size=20))
def test_any_text_arrives_unchanged(text):
    for word, pick in ((f"k={quote(text)}", lambda v: v), (f"k=[{quote(text)},b]", lambda v: v[0])):
        value = OverridesParser.create().parse_override(word).value()
        resolved = OmegaConf.to_container(OmegaConf.create({"k": value}), resolve=True)
        assert pick(resolved["k"]) == text


# ---------------------------------------------------------------- topologies against the documented schema


@dataclass
class Service:
    volumes: list[str] = field(default_factory=list)
    image: str = MISSING
    command: list[str] = MISSING
    replicas_per_container: int = MISSING
    gpus: list[int] | None = MISSING
    environments: list[str] = field(default_factory=list)


@dataclass
class Services:
    renderer: Service = field(default_factory=Service)
    driver: Service = field(default_factory=Service)
    physics: Service = field(default_factory=Service)
    trafficsim: Service = field(default_factory=Service)
    controller: Service = field(default_factory=Service)


@dataclass
class EndpointSection:
    skip: bool = False
    n_concurrent_rollouts: int = 0


@dataclass
class Endpoints:
    renderer: EndpointSection = field(default_factory=EndpointSection)
    driver: EndpointSection = field(default_factory=EndpointSection)
    physics: EndpointSection = field(default_factory=EndpointSection)
    trafficsim: EndpointSection = field(default_factory=EndpointSection)
    controller: EndpointSection = field(default_factory=EndpointSection)


@dataclass
class Runtime:
    nr_workers: int = MISSING
    endpoints: Endpoints = field(default_factory=Endpoints)


@dataclass
class Wizard:
    """What AlpaSim's launcher documents of `defines`, `services` and `runtime`."""

    defines: dict[str, str] = field(default_factory=dict)
    services: Services = field(default_factory=Services)
    runtime: Runtime = field(default_factory=Runtime)


def test_these_are_all_of_our_topologies():
    (folder,) = [folder for folder in config_folders() if folder.name == "alpagym_alpasim_configs"]
    assert sorted(file.stem for file in (folder / "topology").glob("*.yaml")) == sorted(OURS)


@pytest.mark.parametrize("name", OURS)
def test_a_topology_composes_over_the_launchers_schema(tmp_path, name):
    (tmp_path / "base.yaml").write_text("defaults:\n  - _self_\n  - topology: ???\ndefines: {filesystem: /data}\n")
    search = [f"file://{folder}" for folder in config_folders()]
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        composed = hydra_compose(
            "base", overrides=[f"hydra.searchpath=[{','.join(map(quote, search))}]", f"topology={name}"]
        )
    merged = OmegaConf.merge(OmegaConf.structured(Wizard), composed)  # refuses an unknown key or another type
    assert merged.runtime.endpoints.driver.skip
    gpus, capacity = OURS[name]
    facts = topology_facts(name)
    assert (set(facts.gpus), facts.capacity) == (gpus, capacity)
    totals = {}
    for service, endpoint in merged.runtime.endpoints.items():
        if not endpoint.skip:
            section = merged.services[service]
            totals[service] = len(section.gpus or [0]) * section.replicas_per_container * endpoint.n_concurrent_rollouts
    assert totals == dict.fromkeys(("renderer", "physics", "controller"), capacity)
    # A renderer holds the scenes of its rollouts and one more, so that none is thrown out too early.
    assert int(merged.defines.nre_cache_size) == merged.runtime.endpoints.renderer.n_concurrent_rollouts + 1


@pytest.mark.parametrize(
    "preset", ["local_colocated_1gpu", "local_disaggregated_2gpu", "slurm_partial_node_1_2_1", "slurm_full_node_1_3_4"]
)
def test_alpasim_has_gpus_that_the_nodes_of_a_preset_have(preset):
    config = compose([*RUN, f"topology={preset}"])
    facts = topology_facts(config.alpasim.wizard_args.topology)
    assert max(facts.gpus) < config.topology.gpus_per_node
    if config.topology.alpasim_gpus:
        assert len(facts.gpus) == config.topology.alpasim_gpus


def test_a_topology_that_is_not_there_is_named_with_those_that_are(tmp_path):
    (tmp_path / "src/wizard/configs/topology").mkdir(parents=True)
    (tmp_path / "src/wizard/configs/topology/8gpu_64rollouts.yaml").write_text("")
    check_topology("8gpu_64rollouts", tmp_path)
    check_topology("alpagym_2gpu", tmp_path)
    with pytest.raises(ConfigError, match="no '3gpu'; there are: 8gpu_64rollouts, alpagym_1gpu, alpagym_2gpu"):
        check_topology("3gpu", tmp_path)


def test_a_topology_that_needs_more_gpus_than_there_are_is_said(good_tools):
    words = [*RUN, "topology=local_cpu", "alpasim.wizard_args.topology=alpagym_4gpu"]
    problems = {problem.key: problem for problem in preflight(compose(words), "train", Machine())}
    problem = problems["alpasim.wizard_args.topology"]
    assert "puts AlpaSim on GPU 3, so 4 needed; 2 found" in problem.message


def test_a_stock_topology_is_left_to_alpasim():
    assert topology_facts("8gpu_12rollouts") is None


def test_folders_of_configs_are_found_as_packages():
    assert all(Path(folder).is_dir() for folder in config_folders())
