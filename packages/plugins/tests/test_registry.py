import subprocess
import sys
import textwrap

import pytest

import alpagym_plugins as plugins
from alpagym_plugins import PluginError

GOOD = """
    from dataclasses import dataclass

    @dataclass
    class Config:
        speed_mps: float = 3.0
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Writes a distribution as an installer leaves it: a module, METADATA and entry_points.txt."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    modules = []

    def install(distribution, module, source, entry_points, version="1.2"):
        (site / f"{module}.py").write_text(textwrap.dedent(source))
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(textwrap.dedent(entry_points))
        modules.append(module)
        return site

    yield install
    for module in modules:
        sys.modules.pop(module, None)


def test_a_plugin_is_loaded_by_name(install):
    install("acme-sim", "acme_sim", GOOD, "[alpagym.simulators]\nacme = acme_sim:Config\n")
    assert plugins.load("simulators", "acme")().speed_mps == 3.0


def test_names_are_sorted_and_nothing_is_imported(install):
    points = "[alpagym.loggers]\nzeta_test = acme_log:Z\nalpha_test = acme_log:A\n"
    install("acme-log", "acme_log", "raise RuntimeError", points)
    listed = plugins.names("loggers")
    assert listed == sorted(listed)
    assert {"alpha_test", "zeta_test"} <= set(listed)
    assert "acme_log" not in sys.modules


def test_entries_say_distribution_version_and_target(install):
    install("acme-sim", "acme_sim", "raise RuntimeError", "[alpagym.simulators]\nacme = acme_sim:Config\n")
    (entry,) = [entry for entry in plugins.entries("simulators") if entry.name == "acme"]
    assert entry == plugins.Entry("acme", "acme-sim", "1.2", "acme_sim:Config")
    assert "acme_sim" not in sys.modules


def test_a_distribution_installed_later_is_seen(install):
    assert "acme" not in plugins.names("simulators")
    install("acme-sim", "acme_sim", GOOD, "[alpagym.simulators]\nacme = acme_sim:Config\n")
    assert "acme" in plugins.names("simulators")


def test_a_broken_plugin_does_not_disturb_another(install):
    install("broken-sim", "broken_sim", "import no_such_module_x", "[alpagym.simulators]\nbroken = broken_sim:C\n")
    install("acme-sim", "acme_sim", GOOD, "[alpagym.simulators]\nacme = acme_sim:Config\n")
    plugins.load("simulators", "acme")
    assert "broken_sim" not in sys.modules


def test_unreadable_metadata_does_not_disturb_another(install):
    install("garbled", "garbled", "", "[alpagym.simulators]\nthis line has no equals sign\n")
    install("acme-sim", "acme_sim", GOOD, "[alpagym.simulators]\nacme = acme_sim:Config\n")
    plugins.load("simulators", "acme")
    with pytest.raises(PluginError, match="unreadable entry points: .*garbled"):
        plugins.load("simulators", "absent")


def test_an_unknown_name_lists_the_installed_and_the_nearest(install):
    install("acme-sim", "acme_sim", GOOD, "[alpagym.simulators]\nacme_city = acme_sim:Config\n")
    with pytest.raises(PluginError, match=r"named 'acme_cty'; installed: .*acme_city.*; did you mean 'acme_city'\?"):
        plugins.load("simulators", "acme_cty")


def test_an_import_failure_names_plugin_distribution_and_root_cause(install):
    source = """
        try:
            import no_such_module_x
        except ImportError as err:
            raise RuntimeError("acme needs\\nmodule x") from err
    """
    install("acme-sim", "acme_sim", source, "[alpagym.simulators]\nacme = acme_sim:Config\n")
    with pytest.raises(PluginError) as caught:
        plugins.load("simulators", "acme")
    first_line = str(caught.value).splitlines()[0]
    for part in ("'acme'", "acme-sim 1.2", "RuntimeError: acme needs module x", "No module named 'no_such_module_x'"):
        assert part in first_line
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("def f(:", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("Other = 1", "AttributeError: .*'Config'"),
    ],
)
def test_any_failure_at_import_is_reported_as_the_plugins(install, source, cause):
    install("acme-sim", "acme_sim", source, "[alpagym.simulators]\nacme = acme_sim:Config\n")
    with pytest.raises(PluginError, match=f"'acme'.*acme-sim 1.2.*{cause}"):
        plugins.load("simulators", "acme")


def test_a_target_that_is_no_dataclass_is_refused(install):
    install("acme-sim", "acme_sim", "class Config: ...", "[alpagym.simulators]\nacme = acme_sim:Config\n")
    with pytest.raises(PluginError, match="'acme'.*acme-sim 1.2.*must be a config dataclass"):
        plugins.load("simulators", "acme")


def test_a_dataclass_instance_is_no_config_dataclass(install):
    install(
        "acme-sim", "acme_sim", textwrap.dedent(GOOD) + "config = Config()", "[alpagym.rewards]\na = acme_sim:config"
    )
    with pytest.raises(PluginError, match="must be a config dataclass"):
        plugins.load("rewards", "a")


def test_two_distributions_with_one_name_are_both_named(install):
    install("acme-sim", "acme_sim", GOOD, "[alpagym.simulators]\ncity = acme_sim:Config\n")
    install("other-sim", "other_sim", GOOD, "[alpagym.simulators]\ncity = other_sim:Config\n", version="0.3")
    assert plugins.names("simulators").count("city") == 1
    with pytest.raises(PluginError, match="'city': acme-sim 1.2 .* and other-sim 0.3"):
        plugins.load("simulators", "city")
    assert "acme_sim" not in sys.modules


def test_a_second_copy_of_one_distribution_is_hidden_by_the_first(install, tmp_path, monkeypatch):
    site = install("acme-sim", "acme_sim", GOOD, "[alpagym.simulators]\nacme = acme_sim:Config\n")
    older = tmp_path / "older" / "acme_sim-1.0.dist-info"
    older.mkdir(parents=True)
    (older / "METADATA").write_text("Metadata-Version: 2.1\nName: Acme.Sim\nVersion: 1.0\n")
    (older / "entry_points.txt").write_text("[alpagym.simulators]\nacme = acme_sim:Config\n")
    monkeypatch.setattr(sys, "path", [str(site), str(tmp_path / "older"), *sys.path])
    (entry,) = [entry for entry in plugins.entries("simulators") if entry.name == "acme"]
    assert entry.version == "1.2"


def test_an_unknown_group_names_the_nearest():
    with pytest.raises(PluginError, match=r"no group of plugins named 'reward'; .*did you mean 'rewards'\?"):
        plugins.names("reward")


def test_packages_of_yaml_are_listed_not_loaded(install):
    install("acme-conf", "acme_conf", "raise RuntimeError", "[alpagym.configs]\nacme = acme_conf\n")
    assert "acme" in plugins.names("configs")
    with pytest.raises(PluginError, match=r"entries\('configs'\)"):
        plugins.load("configs", "acme")


def test_the_package_needs_the_standard_library_only():
    # -S: without site-packages.
    source = plugins.__path__[0].removesuffix("alpagym_plugins")
    code = f"import sys; sys.path.insert(0, {source!r}); import alpagym_plugins as p; print(len(p.GROUPS))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "7"
