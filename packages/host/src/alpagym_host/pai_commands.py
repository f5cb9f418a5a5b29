"""The commands `alpagym pai …`: the PhysicalAI-AV dataset on disk."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

pai = typer.Typer(help="The PhysicalAI-AV dataset: make a synthetic one, look at it, check it.", no_args_is_help=True)


class TextKey(StrEnum):
    """Under which key an event's text stands; both have been seen."""

    COT = "cot"
    COC = "coc"


@pai.command("make-synthetic")
def make_synthetic(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.", show_default=False)],
    hf_cache: Annotated[
        Path | None, typer.Option("--hf-cache", help="Also lay it out as a hub cache here.", metavar="DIR")
    ] = None,
    chunks: Annotated[
        str, typer.Option(help="3 | 0-3 (end excluded) | '0 1 5'. Even places train, odd ones val.")
    ] = "0-2",
    clips_per_chunk: Annotated[int, typer.Option(min=1, max=100)] = 3,
    camera: Annotated[
        list[str] | None, typer.Option(help="A camera feature; several times. Default: the four.")
    ] = None,
    width: Annotated[int, typer.Option(help="Of the pictures, px.", min=64, max=3840)] = 320,
    height: Annotated[int, typer.Option(help="Of the pictures, px.", min=36, max=2160)] = 180,
    seed: Annotated[int, typer.Option(help="Of everything.", min=0)] = 0,
    event_text_key: Annotated[TextKey, typer.Option(help="Key of the reasoning's text.")] = TextKey.COT,
    gop: Annotated[int, typer.Option(help="Frames from one key frame to the next.", min=1, max=602)] = 30,
    obstacles: Annotated[bool, typer.Option(help="Labels of other road users too.")] = True,
) -> None:
    """Write a small tree in the dataset's layout: nothing of it comes from the dataset."""
    from alpagym_runtime.simulators.pai.config import parse_chunks
    from alpagym_runtime.simulators.pai.synthetic import DEFAULT_CAMERAS, SyntheticFlags, lay_out_hub_cache, make_tree

    flags = SyntheticFlags(
        chunks=parse_chunks(chunks, "chunks") or (),
        clips_per_chunk=clips_per_chunk,
        cameras=tuple(camera or DEFAULT_CAMERAS),
        width=width,
        height=height,
        seed=seed,
        event_text_key=event_text_key.value,
        gop=gop,
        obstacles=obstacles,
    )
    print(json.dumps(make_tree(out, flags)))
    if hf_cache is not None:
        print(lay_out_hub_cache(out, hf_cache))
