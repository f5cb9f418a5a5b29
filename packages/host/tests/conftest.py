import sys
import textwrap

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
    """A machine with two GPUs, Docker, Redis and git."""
    tools("nvidia-smi", f"printf '{GPU_LINES}\\n'")
    tools("docker", DOCKER)
    tools("redis-server", "echo Redis server v=7.0.15")
    tools("git", "echo abc1234")
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
