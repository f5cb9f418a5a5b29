"""What a wheel holds is what the source holds, and the lock fits the project files."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORKSPACE = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["uv"]["workspace"]
MEMBERS = [ROOT / member for member in WORKSPACE["members"]]

pytestmark = pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv: python3 -m pip install uv")


def uv(*arguments: str | Path) -> None:
    done = subprocess.run(["uv", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"uv {' '.join(map(str, arguments))}\n{done.stderr}"


def files_in_wheel(folder: Path, member: Path) -> set[str]:
    """Paths that the wheel's RECORD lists, less the wheel's own metadata."""
    (module,) = [path.name for path in (member / "src").iterdir() if path.is_dir()]
    (wheel,) = folder.glob(f"{module}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (record,) = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
        rows = csv.reader(io.StringIO(archive.read(record).decode()))
        return {row[0] for row in rows if ".dist-info/" not in row[0]}


def files_in_source(member: Path) -> set[str]:
    source = member / "src"
    return {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Every wheel, built straight from the source."""
    folder = tmp_path_factory.mktemp("wheels")
    uv("build", "--all-packages", "--wheel", "--out-dir", folder)
    return folder


@pytest.fixture(scope="module")
def wheels_by_sdist(tmp_path_factory):
    """Every wheel, built from the sdist that was built from the source."""
    folder = tmp_path_factory.mktemp("wheels_by_sdist")
    uv("build", "--all-packages", "--out-dir", folder)
    return folder


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
def test_wheel_holds_every_source_file(wheels, member):
    listed = files_in_wheel(wheels, member)
    assert any(name.endswith("/py.typed") for name in listed)
    assert listed == files_in_source(member)


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
def test_wheel_by_way_of_the_sdist_lists_the_same_files(wheels, wheels_by_sdist, member):
    assert files_in_wheel(wheels_by_sdist, member) == files_in_wheel(wheels, member)


def test_lock_fits_the_project_files():
    uv("lock", "--check")


def test_every_member_carries_readme_and_licence():
    for member in MEMBERS:
        assert (member / "README.md").is_file(), member
        assert (member / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes(), member
