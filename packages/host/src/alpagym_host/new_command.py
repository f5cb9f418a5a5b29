"""`alpagym new`: the command around `new_package`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from alpagym_host.new_package import Kind, make_package


def new(
    kind: Annotated[Kind, typer.Argument(metavar="KIND", help="policy | reward | simulator | trainer")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Such as lane-keeping.", show_default=False)],
    directory: Annotated[
        Path, typer.Option("--directory", help="Where the package's folder is made.", metavar="DIR")
    ] = Path(),
) -> None:
    """Make a package with a plugin in it that works, its preset, and its tests."""
    made = make_package(kind, name, directory)
    if made.workspace is not None:
        print(f"{made.folder}: a member of the workspace {made.workspace}")
        print("next: uv sync --all-packages")
    else:
        print(made.folder)
        print(f"next: cd {made.folder} && uv pip install -e .")
    print(f"      pytest {made.folder}/tests")
    print(f"      {made.command}")
