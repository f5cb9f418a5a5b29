"""`alpagym report`: one page of a run, or of two side by side; runs write their own when they end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PAGE = "report.html"


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)],
    other: Annotated[
        Path | None, typer.Argument(metavar="RUN_B", help="Another one, to compare with the first.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The page; default: report.html, or report_against_<RUN_B>.html, in RUN."),
    ] = None,
) -> None:
    """Write a page of a run: results, signs, curves, videos. With two: both side by side, compared in pairs."""
    from alpagym_host.report.page import write_report
    from alpagym_host.report.run_data import load_run

    runs = [load_run(path) for path in (run, other) if path is not None]
    name = PAGE if other is None else f"report_against_{runs[1].name}.html"
    page = output or runs[0].directory / name
    write_report(runs, page)
    typer.echo(f"open in a browser: {page.absolute()}")


def write_own(directory: Path) -> str:
    """Write the report of a run that has just ended into its directory; its path, or why there is none."""
    from alpagym_host.report.page import write_report
    from alpagym_host.report.run_data import load_run
    from alpagym_plugins import ConfigError
    from alpagym_runtime.errors import CorruptFileError

    page = directory / PAGE
    try:
        write_report([load_run(directory)], page)
    except (ConfigError, CorruptFileError, OSError) as err:
        return f"none ({err})"  # the run is complete all the same
    return str(page)
