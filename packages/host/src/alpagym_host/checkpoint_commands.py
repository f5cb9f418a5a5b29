"""`alpagym checkpoint`: convert, export and verify Alpamayo checkpoints, and make a tiny one.

The work is done by the package alpagym-alpamayo-r1, which is imported when a command runs: help needs neither it nor
torch.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from alpagym_plugins import ConfigError

checkpoint = typer.Typer(help="Convert, export and verify Alpamayo checkpoints.", no_args_is_help=True)

_PACKAGE = "alpagym_alpamayo_r1"
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing checkpoint directory.")]


@checkpoint.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Release or training directory.", show_default=False)],
    output: Annotated[Path, typer.Argument(help="New directory.", show_default=False)],
    to: Annotated[str, typer.Option(help="training | 1 | 1.5")] = "training",
    vlm_name_or_path: Annotated[
        str | None, typer.Option(help="Local directory of the backbone, for its tokenizer.", show_default=False)
    ] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy the weights; they are linked otherwise.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Write a checkpoint in another layout: release (1, 1.5) to training, and back."""
    tools = _tools("conversion")
    backbone = None if vlm_name_or_path is None else tools.local_directory(vlm_name_or_path)
    _report(
        tools.convert(
            tools.local_directory(source), output, to, backbone=backbone, copy_weights=copy, overwrite=overwrite
        )
    )


@checkpoint.command()
def export(
    trained: Annotated[
        Path,
        typer.Argument(
            help="Folder of model_rank_*.pth, a run, a step of it, or a safetensors file.", show_default=False
        ),
    ],
    output: Annotated[Path, typer.Argument(help="New directory.", show_default=False)],
    base: Annotated[Path, typer.Option(help="Converted checkpoint that training started from.", show_default=False)],
    vlm_only: Annotated[bool, typer.Option("--vlm-only", help="Leave the action expert out.")] = False,
    allow_extra: Annotated[
        list[str] | None, typer.Option(help="A trained tensor to leave out; may be repeated.", show_default=False)
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of an output file.")] = "4GB",
    overwrite: Overwrite = False,
) -> None:
    """Write trained weights as a Hugging Face directory with provenance."""
    tools, shards = _tools("conversion"), _tools("shards")
    _report(
        tools.export(
            trained,
            base,
            output,
            vlm_only=vlm_only,
            allow_extra=tuple(allow_extra or ()),
            max_shard_bytes=shards.parse_size(max_shard_size),
            overwrite=overwrite,
        )
    )


@checkpoint.command()
def verify(
    directory: Annotated[Path, typer.Argument(show_default=False)],
    against: Annotated[
        Path | None, typer.Option(help="A directory that must hold the same tensors, bit for bit.", show_default=False)
    ] = None,
    headers_only: Annotated[bool, typer.Option("--headers-only", help="Do not read the numbers themselves.")] = False,
) -> None:
    """Check names, shapes, shards, ties, tokenizer and numbers of a checkpoint directory."""
    found = _tools("checkpoints").verify(directory, against=against, read_all=not headers_only)
    _report(found)
    for problem in found.problems:
        print(f"problem: {problem}")
    raise typer.Exit(1 if found.problems else 0)


@checkpoint.command()
def tiny(
    output: Annotated[Path, typer.Argument(help="New directory.", show_default=False)],
    release: Annotated[str, typer.Option(help="Whose layout: 1 | 1.5")] = "1.5",
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
    overwrite: Overwrite = False,
) -> None:
    """Make a small release-like checkpoint with random weights, to try the other commands on."""
    made = _tools("tiny")
    with _tools("checkpoints").building(output, overwrite=overwrite) as folder:
        made.save_tiny(folder, *made.make_tiny(layout=made.release_layout(release), seed=seed))
    _report(_tools("checkpoints").verify(output))


def _tools(module: str) -> Any:
    try:
        return importlib.import_module(f"{_PACKAGE}.{module}")
    except ModuleNotFoundError as err:
        raise ConfigError(
            f"`alpagym checkpoint` needs the module {err.name!r}: pip install 'alpagym-alpamayo-r1[torch]'"
        ) from err


def _report(found: Any) -> None:
    parts = "backbone and action expert" if found.has_expert else "backbone only"
    print(f"{found.directory}: layout {found.layout}, {found.tensors} tensors, {found.bytes / 1e9:.3f} GB, {parts}")
    for note in found.notes:
        print(f"note: {note}")
