"""`alpagym serve`: the embedded world as an AlpaSim. What it needs is imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

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
    )
