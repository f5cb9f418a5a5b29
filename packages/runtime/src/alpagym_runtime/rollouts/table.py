"""`per_scene.parquet`: a row an evaluated drive, under the name of its evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alpagym_runtime.errors import CorruptFileError
from alpagym_runtime.files import replacing

Row = dict[str, Any]
"""One evaluated drive: scene_id, family, seed, ended, failed, driving_score, reward, terms and aggregated measures."""

FILE = "per_scene.parquet"


def write_rows(path: Path, rows: Mapping[str, list[Row]]) -> None:
    """Replace the table by these evaluations, in order; a column that a row lacks is null there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    merged = [{"evaluation": name, **row} for name, group in rows.items() for row in group]
    columns: dict[str, None] = {}
    for row in merged:
        columns |= dict.fromkeys(row)
    table = pa.table({name: [row.get(name) for row in merged] for name in columns})
    with replacing(path) as temporary:
        pq.write_table(table, temporary)


def read_rows(path: Path) -> dict[str, list[Row]]:
    """Evaluations of a run by name; empty where there is no table yet.

    Raises:
        CorruptFileError: the file is cut; names path, size and the remedy.

    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.exists():
        return {}
    try:
        merged = pq.read_table(path).to_pylist()
    except (pa.ArrowInvalid, OSError) as err:
        raise CorruptFileError(
            f"{path} ({path.stat().st_size} bytes) is not whole: {err}; remove it and resume"
        ) from err
    rows: dict[str, list[Row]] = {}
    for row in merged:
        rows.setdefault(row.pop("evaluation"), []).append(row)
    return rows
