"""`alpagym doctor`: what works on this machine, what does not, and the command that fixes it."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer


def doctor(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OVERRIDES",
            help="Check for this run, such as experiment=NAME policy.model.path=DIR; none: for the default one.",
            show_default=False,
        ),
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Longest wait for one answer.", min=0.1)] = 10.0,
    hugging_face: Annotated[
        list[str] | None,
        typer.Option(help="Check access to this too: models/OWNER/NAME or datasets/OWNER/NAME.", metavar="ID"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Findings as JSON.")] = False,
) -> None:
    """Check this machine: Python, packages, GPUs, containers, disk, ports, accounts, Slurm, and a run's own needs.

    Exit code 0: nothing is wrong, 1: something is, 2: the overrides are wrong.
    """
    from rich.console import Console

    from alpagym_host.compose import compose
    from alpagym_host.doctor import examine, render
    from alpagym_runtime.machine import Machine

    config = compose(overrides or [])
    findings = examine(config, Machine(timeout_s), timeout_s, hugging_face or [])
    if json:
        import json as encoder

        print(encoder.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        render(findings, Console())
    raise typer.Exit(1 if any(finding.state == "wrong" for finding in findings) else 0)
