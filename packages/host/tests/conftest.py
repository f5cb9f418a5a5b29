import importlib.util
import os
import shutil
import sys
import tempfile
import textwrap
import uuid
from pathlib import Path

import pytest


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A PATH that holds nothing but the stand-ins that a test writes: `tools(name, shell_script)`."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def add(name, script="exit 0"):
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return add


GPU_LINES = "\\n".join(f"{i}, GPU-{i}aaaa, NVIDIA H200, 143771, 570.1" for i in range(2))
DOCKER = 'case "$1" in version) echo 28.2.2;; compose) echo 2.36.0;; info) echo \'{"nvidia": {}}\';; esac'


@pytest.fixture
def good_tools(tools):
    """A machine with two GPUs, Docker, Redis, git and uv."""
    tools("nvidia-smi", f"printf '{GPU_LINES}\\n'")
    tools("docker", DOCKER)
    tools("redis-server", "echo Redis server v=7.0.15")
    tools("git", "echo abc1234")
    tools("uv", "echo uv 0.9")
    return tools


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


STAND_INS = Path(__file__).parent / "stand_ins"
SCENES = "uuid,scene_id,nre_version_string,path,last_modified,artifact_repository,hf_revision"
SUITES = "test_suite_id,scene_id,uuid"


def build_checkout(folder, scenes=("clip-a", "clip-b"), repository="local"):
    """A checkout of AlpaSim whose launcher is a stand-in; suite `public_2604` holds its first scene."""
    wizard = folder / "src" / "wizard"
    (wizard / "alpasim_wizard").mkdir(parents=True)
    shutil.copy(STAND_INS / "wizard.py", wizard / "alpasim_wizard" / "__main__.py")
    (wizard / "configs" / "topology").mkdir(parents=True)
    (wizard / "configs" / "topology" / "1gpu.yaml").write_text("# @package _global_\n")
    (folder / "src" / "grpc").mkdir()
    (folder / "src" / "grpc" / "pyproject.toml").write_text("[project]\n")
    for name in ("pyproject.toml", "uv.lock"):
        (folder / name).write_text("")
    data = folder / "data" / "scenes"
    data.mkdir(parents=True)
    rows = [f"uuid-{i},{name},26.04,p,2026-04-01,{repository},main" for i, name in enumerate(scenes)]
    (data / "sim_scenes.csv").write_text("\n".join([SCENES, *rows]) + "\n")
    (data / "sim_suites.csv").write_text(f"{SUITES}\npublic_2604,{scenes[0]},uuid-0\n")
    return folder


@pytest.fixture
def alpasim_machine(tmp_path, monkeypatch):
    """Stand-ins for docker, uv and nvidia-smi before the real PATH, and a mark in the environment of all that starts.

    Gives the folder of the tools, and the mark.
    """
    folder, mark = tmp_path / "stand in tools", uuid.uuid4().hex
    folder.mkdir()
    for name in ("docker", "uv"):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_INS / name}.py "$@"\n')
        (folder / name).chmod(0o755)
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{GPU_LINES}\\n'\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("ALPAGYM_TEST_MARK", mark)
    monkeypatch.setenv("ALPAGYM_TEST_DOCKER_LOG", str(tmp_path / "docker.log"))
    return folder, mark


@pytest.fixture
def checkout(tmp_path):
    """A stand-in checkout in a folder that is hard to quote."""
    return build_checkout(tmp_path / "alpa sim = # 'x'", ("clip-a", "clip-b", "clip-c"))


@pytest.fixture
def make_checkout():
    """`make_checkout(folder, scenes)`, see `build_checkout`."""
    return build_checkout


@pytest.fixture(scope="module")
def make_slurm():
    """`make_slurm(shape)`, see `slurm_cluster.py`; all are ended after the module."""
    spec = importlib.util.spec_from_file_location("slurm_cluster", Path(__file__).with_name("slurm_cluster.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["slurm_cluster"] = module
    spec.loader.exec_module(module)
    made = []

    def make(shape=""):
        # Paths of sockets are short.
        folder = tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp")
        try:
            cluster = module.SlurmCluster(Path(folder.name), shape)
        except FileNotFoundError as err:
            pytest.skip(str(err))
        made.append((cluster, folder))
        return cluster

    yield make
    for cluster, folder in made:
        cluster.close()
        folder.cleanup()


@pytest.fixture(scope="module")
def slurm_cluster(make_slurm):
    """A Slurm of two nodes."""
    cluster = make_slurm()
    cluster.start()
    return cluster
