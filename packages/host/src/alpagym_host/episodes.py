"""The commands on stored episodes: `alpagym episodes list | show | export | view` and `alpagym replay`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from alpagym_plugins import ConfigError

if TYPE_CHECKING:
    from alpagym_runtime.episodes.format import EpisodeFile

app = typer.Typer(help="Look at stored episodes, and hand them to other tools.", no_args_is_help=True)

Where = Annotated[
    list[str] | None,
    typer.Option("--where", help="A condition, such as ended=collision|offroad or driving_score>=0.8; repeat for and."),
]
Limit = Annotated[int, typer.Option("--limit", help="At most this many, the newest; 0: all.", min=0)]
Episodes = Annotated[
    list[Path],
    typer.Argument(
        metavar="EPISODE...",
        help="Episode files, or a store or run directory for all of its episodes that --where leaves.",
        show_default=False,
    ),
]
Store = Annotated[
    Path, typer.Argument(metavar="STORE", help="A store's folder, or a run directory.", show_default=False)
]

_SHOWN = ("id", "scene_id", "group_id", "member", "ended", "driving_score", "reward", "ticks", "version", "bytes")


@app.command("list")
def list_episodes(
    store: Store,
    where: Where = None,
    limit: Limit = 0,
    sort: Annotated[str | None, typer.Option(help="Sort by this column, greatest last.")] = None,
    columns: Annotated[
        str | None, typer.Option(help="Columns to print, joined by commas; `all` for every one.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="A JSON object a line, with every column.")] = False,
) -> None:
    """Print the episodes of a store, a line each; counts and what was left out go to stderr."""
    import json as text

    from alpagym_runtime.episodes.store import EpisodeStore, find_store
    from alpagym_runtime.files import strict

    opened = EpisodeStore(find_store(store))
    table = opened.rows(where or ())
    if sort is not None:
        table = table.sort_by([(_known(sort, table.column_names, "--sort"), "ascending")])
    total = len(table)
    if limit:
        table = table.slice(max(total - limit, 0))
    if json:
        for row in table.to_pylist():
            typer.echo(text.dumps(strict(row), allow_nan=False))
    else:
        names = list(_SHOWN)
        if columns is not None:
            names = table.column_names if columns == "all" else columns.split(",")
        for name in names:
            _known(name, table.column_names, "--columns")
        lines = [names, *([_cell(row[name]) for name in names] for row in table.to_pylist())]
        widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
        for line in lines:
            typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    scores = [score for score in table["driving_score"].to_pylist() if score is not None]
    mean = f", mean driving score {sum(scores) / len(scores):.3f}" if scores else ""
    typer.echo(f"{len(table)} of {total} episodes{mean}, {sum(table['bytes'].to_pylist()) / 1e6:.1f} MB", err=True)
    _report(opened.problems)


@app.command()
def show(
    episode: Annotated[Path, typer.Argument(metavar="EPISODE", help="An episode file.", show_default=False)],
) -> None:
    """Print what an episode file holds: its facts, its receipt, every column, and whether all checksums fit."""
    from alpagym_runtime.episodes.format import EpisodeFile

    file = EpisodeFile(episode)
    for name, value in _flat({k: v for k, v in file.meta.items() if k not in ("columns", "series")}):
        typer.echo(f"{name}: {_cell(value)}")
    typer.echo("")
    rows = [("column", "kind", "type", "rows", "row shape", "aggregation")]
    for name, about in file.columns.items():
        series = file.meta["series"].get(name.partition(".")[2], {}) if about["kind"] == "measure" else {}
        shape = about.get("shape", [about["count"]] if about["kind"] == "frames" else [])
        cells = (name, about["kind"], about.get("dtype", ""), about["rows"], shape or "", series.get("aggregation", ""))
        rows.append(tuple(str(cell) for cell in cells))  # type: ignore[arg-type]
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        typer.echo("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    file.episode()
    typer.echo(f"\n{file.size} bytes; all checksums fit")


@app.command()
def export(
    episodes: Episodes,
    to: Annotated[str, typer.Option("--to", help="video, json, parquet, lerobot or rerun.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The new file or folder.", show_default=False)],
    where: Where = None,
    limit: Limit = 0,
) -> None:
    """Write episodes in another format: a video, JSON, a Parquet table, a LeRobotDataset v3, a Rerun recording."""
    from alpagym_runtime.episodes.export import export as write

    files = _files(episodes, where, limit)
    write(files, to, output)
    typer.echo(f"{len(files)} episodes in {output}")


@app.command()
def view(
    episodes: Episodes,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page; default: <episode>.html in this folder.")
    ] = None,
    where: Where = None,
) -> None:
    """Write an HTML page of one episode, or of two side by side, with a slider over time."""
    from alpagym_runtime.episodes.viewer import write_page

    files = _files(episodes, where, 0)
    page = output or Path(f"{files[0].path.stem}.html")
    write_page(files, page)
    typer.echo(f"open in a browser: {page.absolute()}")


def replay(
    episodes: Episodes,
    where: Where = None,
    limit: Limit = 0,
    config: Annotated[
        Path | None, typer.Option(help="Config file or run directory, where the store does not keep it.")
    ] = None,
) -> None:
    """Drive stored episodes again from their seeds, and say whether the same bytes come out (exit code 1: no)."""
    from alpagym_runtime.run_config import load_run_config
    from alpagym_runtime.trainers.replay import Replayer

    files = _files(episodes, where, limit)
    replayer = Replayer(None if config is None else load_run_config(config))
    same = 0
    try:
        for file in files:
            found = replayer.replay(file)
            same += found.same
            facts = f"{file.meta['ended']}, {found.episode.request.scene_id}, {len(found.episode)} ticks"
            typer.echo(f"{file.path.stem}: {'same bytes' if found.same else 'DIFFERS'} ({facts})")
            for line in found.differences[:8]:
                typer.echo(f"    {line}")
            if len(found.differences) > 8:
                typer.echo(f"    and {len(found.differences) - 8} more")
    finally:
        replayer.close()
    typer.echo(f"{same} of {len(files)} episodes gave the same bytes")
    if same < len(files):
        raise typer.Exit(1)


# ---------------------------------------------------------------- helpers


def _files(paths: list[Path], where: list[str] | None, limit: int) -> list[EpisodeFile]:
    from alpagym_runtime.episodes.format import EpisodeFile
    from alpagym_runtime.episodes.store import EpisodeStore, find_store

    found: list[EpisodeFile] = []
    for path in paths:
        if path.is_file():
            if where:
                raise ConfigError(f"chooses in a store, and {path} is one episode", key="--where")
            found.append(EpisodeFile(path))
            continue
        store = EpisodeStore(find_store(path))
        found += [store.open(name) for name in store.rows(where or ())["id"].to_pylist()]
        _report(store.problems)
    if not found:
        raise ConfigError("no episode was chosen; loosen --where")
    return found[-limit:] if limit else found


def _known(name: str, names: list[str], option: str) -> str:
    from alpagym_plugins import nearest

    if name not in names:
        near = nearest(name, names)
        hint = f"did you mean {near!r}?" if near else f"there are: {', '.join(names)}"
        raise ConfigError(f"episodes have no {name!r}; {hint}", key=option)
    return name


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _flat(data: Any, name: str = "") -> list[tuple[str, Any]]:
    if isinstance(data, dict):
        return [line for key, value in data.items() for line in _flat(value, f"{name}.{key}" if name else key)]
    return [(name, data)]


def _report(problems: list[str]) -> None:
    for problem in problems:
        typer.echo(f"left out: {problem}", err=True)
