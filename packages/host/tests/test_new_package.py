import tomllib

import pytest

from alpagym_host.new_package import Kind, check_name, make_package
from alpagym_plugins import ConfigError

WORKSPACE = """\
[project]
name = "mine"
version = "0"

[tool.uv.workspace]
# By name.
members = [
  "packages/one",  # the first
]

[tool.ruff]
line-length = 100
"""


def members(folder):
    return tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]["members"]


@pytest.mark.parametrize("kind", Kind)
def test_every_word_of_the_templates_is_replaced(kind, tmp_path):
    made = make_package(kind, "lane-keeping", tmp_path)
    assert made.folder == tmp_path / "lane-keeping"
    files = [path for path in made.folder.rglob("*") if path.is_file()]
    assert len(files) == 9
    for path in files:
        text = path.read_text()
        for word in ("plugin_name", "plugin-name", "PluginName", "PLUGIN_"):
            assert word not in text, f"{word} in {path}"
            assert word not in str(path.relative_to(tmp_path))


def test_the_project_file_says_what_it_adds_and_needs(tmp_path):
    made = make_package(Kind.REWARD, "lane-keeping", tmp_path)
    project = tomllib.loads((made.folder / "pyproject.toml").read_text())
    assert project["project"]["name"] == "lane-keeping"
    # The version of this repository is 0.1.0: before 1.0 a minor version may change the contract.
    assert project["project"]["dependencies"] == ["alpagym-runtime>=0.1,<0.2"]
    assert project["project"]["entry-points"] == {
        "alpagym.rewards": {"lane_keeping": "lane_keeping.config:LaneKeepingConfig"},
        "alpagym.configs": {"lane_keeping": "lane_keeping.conf"},
    }


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Lane_Keeping", "such as 'lane-keeping'"),
        ("LaneKeeping", "such as 'lane-keeping'"),
        ("2fast", "a letter first"),
        ("a--b", "such as 'a-b'"),
        ("../out", "such as 'out'"),
        ("", "a letter first"),
        ("x" * 41, "at most 40"),
        ("lambda", "a word of Python's"),
        ("json", "would hide"),
        ("numpy", "would hide"),
        ("alpagym-runtime", "would hide"),
        ("progress", "alpagym-runtime has a reward 'progress' already"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(name, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as refused:
        make_package(Kind.REWARD, name, tmp_path)
    assert refused.value.key == "NAME"
    assert list(tmp_path.iterdir()) == []


def test_a_plugin_of_another_kind_may_have_the_name():
    check_name(Kind.POLICY, "off-road")


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "lane-keeping").mkdir()
    (tmp_path / "lane-keeping/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists; nothing is overwritten"):
        make_package(Kind.REWARD, "lane-keeping", tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["lane-keeping", "notes.txt"]


def test_a_missing_parent_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no folder"):
        make_package(Kind.REWARD, "lane-keeping", tmp_path / "gone")


def test_in_a_workspace_it_becomes_a_member_and_the_rest_of_the_file_stays(tmp_path):
    (tmp_path / "pyproject.toml").write_text(WORKSPACE)
    (tmp_path / "packages").mkdir()
    made = make_package(Kind.REWARD, "lane-keeping", tmp_path / "packages")
    assert made.workspace == tmp_path / "pyproject.toml"
    wanted = WORKSPACE.replace("members = [", 'members = [\n  "packages/lane-keeping",')
    assert (tmp_path / "pyproject.toml").read_text() == wanted


@pytest.mark.parametrize("listed", ['["one"]', "[]", '["one",]', '[\n  "one"\n]'])
def test_any_way_to_write_a_list_gets_the_member(listed, tmp_path):
    (tmp_path / "pyproject.toml").write_text(f"[tool.uv.workspace]\nmembers = {listed}\n")
    make_package(Kind.REWARD, "lane-keeping", tmp_path)
    assert members(tmp_path) == ["lane-keeping", *(["one"] if "one" in listed else [])]


def test_a_pattern_that_covers_it_is_enough(tmp_path):
    text = '[tool.uv.workspace]\nmembers = ["packages/*"]\n'
    (tmp_path / "pyproject.toml").write_text(text)
    (tmp_path / "packages").mkdir()
    make_package(Kind.REWARD, "lane-keeping", tmp_path / "packages")
    assert (tmp_path / "pyproject.toml").read_text() == text


def test_a_workspace_that_cannot_be_changed_is_left_alone(tmp_path):
    text = "[tool.uv]\nworkspace = { members = [] }\n"
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(ConfigError, match="write 'lane-keeping' there first"):
        make_package(Kind.REWARD, "lane-keeping", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["pyproject.toml"]
    assert (tmp_path / "pyproject.toml").read_text() == text
