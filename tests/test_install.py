"""The container recipes as text: nothing here can build them."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
DOCKER = (ROOT / "install" / "Dockerfile").read_text()
APPTAINER = (ROOT / "install" / "alpagym.def").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def copied():
    """What both take from the repository."""
    docker = [words for line in re.findall(r"^COPY (.+)$", DOCKER, re.MULTILINE) for words in line.split()[:-1]]
    section = APPTAINER.split("%files\n")[1].split("\n\n")[0]
    return docker, [line.split()[0] for line in section.splitlines()]


def test_both_take_the_same_files_and_these_exist():
    docker, apptainer = copied()
    assert sorted(docker) == sorted(apptainer)
    for name in docker:
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("text", [DOCKER, APPTAINER])
def test_python_and_uv_are_allowed_ones(text):
    (python,) = re.findall(r"python:(3\.\d+)-slim", text)
    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains(f"{python}.0")
    (uv,) = re.findall(r'"uv(.*?)"', text)
    # Each version that the recipe allows is one that the project allows: the lower bounds agree.
    assert uv.startswith(PROJECT["tool"]["uv"]["required-version"])


def test_both_install_the_lock_files_versions_in_the_same_way():
    commands = [re.findall(r"uv sync ([^\n$]+)", text)[0].strip() for text in (DOCKER, APPTAINER)]
    assert commands[0] == commands[1]
    assert "--locked" in commands[0]
    for text in (DOCKER, APPTAINER):
        assert "/opt/alpagym/.venv/bin:$PATH" in text


@pytest.mark.parametrize("text", [DOCKER, APPTAINER])
def test_no_secret_is_built_in(text):
    assert not re.search(r"(TOKEN|API_?KEY|PASSWORD|SECRET)", text)


def test_docker_instructions_are_instructions():
    lines = re.sub(r"\\\n", " ", DOCKER).splitlines()
    words = {line.split()[0] for line in lines if line and not line.startswith("#")}
    assert words <= {"FROM", "ARG", "RUN", "ENV", "WORKDIR", "COPY", "CMD"}
    assert next(line.split()[0] for line in lines if line and not line.startswith("#")) == "FROM"
    sections = re.findall(r"^%(\w+)$", APPTAINER, re.MULTILINE)
    assert sections == ["files", "post", "environment", "test"]
