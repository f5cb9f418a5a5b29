"""`alpagym scenes …` as people call it, on files in a temporary folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from alpagym_host.cli import app

COMMONROAD = Path(__file__).parents[3] / ".." / "shared" / "data" / "commonroad"


def scenes(*arguments):
    """Exit code and output, standard error included."""
    result = CliRunner().invoke(app, ["scenes", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output.splitlines()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three procedural scenes as files."""
    folder = tmp_path_factory.mktemp("made")
    code, lines = scenes("make", "--out", folder, "--count", 3, "dataset=procedural")
    assert (code, len(lines)) == (0, 3)
    return folder


def test_made_scenes_are_listed_by_file(made):
    assert sorted(path.name for path in made.iterdir()) == [f"procedural-test-00000{k}.usdz" for k in range(3)]
    code, lines = scenes("list", "dataset=files", f"dataset.path={made}")
    assert code == 0
    rows = [line.split("\t") for line in lines if "\t" in line]
    assert [(split, name) for split, name, _ in rows] == [
        ("train", "procedural-test-000000"),
        ("val", "procedural-test-000001"),
        ("test", "procedural-test-000002"),
    ]


def test_drawn_scenes_are_pictures(made, tmp_path):
    code, lines = scenes(
        "draw", "--out", tmp_path / "png", "--count", 1, "--size", 100, "dataset=files", f"dataset.path={made}"
    )
    assert (code, lines) == (0, [str(tmp_path / "png" / "procedural-test-000002.png")])
    data = (tmp_path / "png" / "procedural-test-000002.png").read_bytes()
    # Width and height in a PNG's header.
    assert (data[:4], data[16:24]) == (b"\x89PNG", bytes([0, 0, 0, 100, 0, 0, 0, 100]))


def test_a_check_reports_what_was_skipped_and_leaves_with_one(made, tmp_path):
    assert scenes("check", "dataset=files", f"dataset.path={made}")[0] == 0
    (tmp_path / "good.usdz").write_bytes((made / "procedural-test-000000.usdz").read_bytes())
    (tmp_path / "empty.usdz").write_bytes(b"")
    code, lines = scenes("check", "dataset=files", f"dataset.path={tmp_path}")
    assert code == 1
    assert "skipped empty.usdz: the file is empty" in lines
    assert lines[-1] == "1 scenes, 1 files or scenes that cannot be used"


def test_import_writes_folders_and_goes_on_after_a_bad_file(made, tmp_path):
    bad = tmp_path / "bad.usdz"
    bad.write_bytes(b"no zip")
    out = tmp_path / "out"
    code, lines = scenes("import", bad, made / "procedural-test-000001.usdz", "--out", out, "--format", "folder")
    assert code == 1
    assert any(line.startswith(f"error: {bad}: not a whole zip") for line in lines)
    assert [path.name for path in out.iterdir()] == ["procedural-test-000001"]
    assert (out / "procedural-test-000001" / "alpagym.json").is_file()


@pytest.mark.skipif(not COMMONROAD.is_dir(), reason="no folder of CommonRoad recordings beside the repository")
def test_a_recording_becomes_a_scene_file(tmp_path):
    code, lines = scenes("import", COMMONROAD / "ZAM_Urban-7_1_S-2.xml", "--out", tmp_path)
    assert (code, lines) == (0, [str(tmp_path / "ZAM_Urban-7_1_S-2.ego-100.usdz")])
    code, lines = scenes("check", "dataset=files", f"dataset.path={tmp_path}")
    assert (code, lines) == (0, ["1 scenes, 0 files or scenes that cannot be used"])


def test_a_folder_without_scenes_is_an_error_in_one_line(tmp_path):
    command = [sys.executable, "-m", "alpagym_host.cli", "scenes", "list", "dataset=files", f"dataset.path={tmp_path}"]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path}: no .usdz, no .xodr and no folder with metadata.yaml")


def test_files_need_a_path():
    from alpagym_host.compose import compose
    from alpagym_plugins import ConfigError

    with pytest.raises(ConfigError, match="dataset.path: files needs a folder or file of .usdz or .xodr"):
        compose(["dataset=files"])
