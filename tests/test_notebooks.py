"""The notebooks of docs/notebooks: executed, without errors, and still running."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_was_executed_from_top_to_bottom_and_shows_pictures(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_lines_run(path, monkeypatch, tmp_path):
    pytest.importorskip("torch", reason="uv sync --all-packages")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    names: dict[str, Any] = {}
    for cell in code_cells(path):
        exec(compile("".join(cell["source"]), str(path), "exec"), names)
