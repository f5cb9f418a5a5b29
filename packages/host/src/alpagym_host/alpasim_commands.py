"""`alpagym serve`, the embedded world as an AlpaSim, and `alpagym asl`, the logs of rollouts.

What a command needs is imported when it runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from alpagym_plugins import ConfigError

asl = typer.Typer(help="Read AlpaSim's logs of rollouts (ASL).", no_args_is_help=True)

Log = Annotated[Path, typer.Argument(help="A rollout.asl.", exists=True, dir_okay=False, show_default=False)]

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="OVERRIDES", help="group=choice or key.path=value, as for train.", show_default=False),
]


def serve_world(
    overrides: Overrides = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; other than loopback it is open to all.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one, and prints it.", min=0, max=65535)] = 50052,
    slots: Annotated[int, typer.Option(help="Rollouts at once.", min=1, max=4096)] = 16,
    driver: Annotated[
        list[str] | None,
        typer.Option(help="A driver for requests that name none; may be given again.", metavar="HOST:PORT"),
    ] = None,
    sessions_per_driver: Annotated[int, typer.Option(help="Of each --driver, at once.", min=1)] = 1,
    force_gt_ms: Annotated[int, typer.Option(help="The recording drives so long before the handover.", min=0)] = 1600,
    steps: Annotated[int, typer.Option(help="Most control steps of a rollout, recorded ones included.", min=1)] = 200,
    ask_in_warm_up: Annotated[bool, typer.Option(help="Call `drive` while the recording drives, too.")] = False,
    drive_timeout_s: Annotated[float, typer.Option(help="Longest wait for a driver's answer.", min=0.1)] = 60.0,
    camera: Annotated[
        list[str] | None,
        typer.Option(help="A camera to send, such as front=320x512; may be given again.", metavar="NAME=HxW"),
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Keep each rollout's log here, in AlpaSim's format.", metavar="DIR")
    ] = None,
) -> None:
    """Serve the embedded world as an AlpaSim that calls drivers, until SIGINT, SIGTERM or `shut_down`."""
    from rich.console import Console

    from alpagym_host.compose import compose
    from alpagym_host.launch.serve import serve

    serve(
        compose(overrides or []),
        Console(),
        host=host,
        port=port,
        slots=slots,
        drivers=driver or [],
        sessions_per_driver=sessions_per_driver,
        force_gt_ms=force_gt_ms,
        steps=steps,
        ask_in_warm_up=ask_in_warm_up,
        drive_timeout_s=drive_timeout_s,
        log_dir=log_dir,
        cameras=camera or [],
    )


@asl.command("print")
def print_log(
    log: Log,
    kind: Annotated[str | None, typer.Option(help="Only entries of this kind, such as driver_return.")] = None,
    limit: Annotated[int, typer.Option(help="At most so many; 0: all.", min=0)] = 0,
) -> None:
    """One line an entry: number, time in the scene's clock, kind, content."""
    from alpagym_runtime.simulators.alpasim.asl import NUMBERS, describe, kind_of, read_asl, time_us

    if kind is not None and kind not in {*NUMBERS, "other"}:
        raise ConfigError(f"must be one of {', '.join([*NUMBERS, 'other'])}, got {kind!r}", key="--kind")
    shown = 0
    for number, entry in enumerate(read_asl(log)):
        if kind not in (None, kind_of(entry)):
            continue
        at = time_us(entry)
        clock = "" if at is None else f"{at / 1e6:.3f} s"
        print(f"{number:6d}  {clock:>16}  {kind_of(entry):24}  {describe(entry)}".rstrip())
        shown += 1
        if shown == limit:
            return


@asl.command("json")
def to_json(
    log: Log,
    output: Annotated[Path, typer.Argument(help="A file of JSON lines, one an entry.", show_default=False)],
) -> None:
    """Write every entry as a line of JSON; bytes are base64."""
    from alpagym_runtime.files import replacing
    from alpagym_runtime.simulators.alpasim.asl import read_asl, to_dict

    count = 0
    with replacing(output) as temporary, temporary.open("w") as file:
        for entry in read_asl(log):
            file.write(json.dumps(to_dict(entry), allow_nan=False) + "\n")
            count += 1
    print(f"{count} entries: {output}")


@asl.command()
def frames(
    log: Log,
    output: Annotated[Path, typer.Argument(help="A folder; each camera gets one in it.", show_default=False)],
) -> None:
    """Write every picture as it was sent: DIR/<camera>/<time in us>.jpg or .png."""
    from alpagym_runtime.pictures import BadFrameError, frame_format
    from alpagym_runtime.simulators.alpasim.asl import kind_of, read_asl, safe_name

    count = 0
    for entry in read_asl(log):
        if kind_of(entry) != "driver_camera_image":
            continue
        image = entry.driver_camera_image.camera_image
        try:
            ending = {"jpeg": "jpg", "png": "png"}[frame_format(image.image_bytes)]
        except BadFrameError as err:
            typer.echo(f"{image.logical_id} at {image.frame_end_us} us {err}", err=True)
            continue
        folder = output / safe_name(image.logical_id)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{image.frame_end_us}.{ending}").write_bytes(image.image_bytes)
        count += 1
    print(f"{count} pictures: {output}")


@asl.command()
def video(
    log: Log,
    output: Annotated[Path, typer.Argument(help="A file named .mp4, .mkv, .webm or .webp.", show_default=False)],
) -> None:
    """Write a video, a picture a decision: the cameras' newest frames, and the plan from above."""
    from alpagym_runtime.simulators.alpasim.asl import read_asl
    from alpagym_runtime.simulators.alpasim.asl_export import to_video

    print(f"{to_video(read_asl(log), output)} pictures: {output}")


@asl.command()
def rerun(log: Log, output: Annotated[Path, typer.Argument(help="A file named .rrd.", show_default=False)]) -> None:
    """Write a Rerun recording: route, road users, trail, plans, pictures. Needs alpagym-runtime[rerun]."""
    from alpagym_runtime.simulators.alpasim.asl import read_asl
    from alpagym_runtime.simulators.alpasim.asl_export import to_rerun

    print(f"{to_rerun(read_asl(log), output)} decisions: {output}")


@asl.command()
def score(log: Log, overrides: Overrides = None) -> None:
    """Compute a served rollout's measures again from its log and the dataset's scene (dataset=…); prints JSON."""
    from itertools import chain

    from alpagym_host.compose import compose
    from alpagym_runtime.errors import CorruptFileError
    from alpagym_runtime.files import strict
    from alpagym_runtime.simulators.alpasim.asl import kind_of, read_asl
    from alpagym_runtime.simulators.embedded.dataset import open_source
    from alpagym_runtime.simulators.embedded.server_asl import score_again

    entries = read_asl(log)
    first = next(entries, None)
    if first is None or kind_of(first) != "rollout_metadata":
        raise CorruptFileError(f"{log} does not begin with rollout_metadata; is it an ASL log?")
    source = open_source(compose(overrides or []).dataset)
    scene = source.load(first.rollout_metadata.session_metadata.scene_id)
    measures = score_again(chain([first], entries), scene)
    values = {name: series.aggregate() for name, series in measures.items()}
    print(json.dumps(strict(values), indent=2, allow_nan=False))
