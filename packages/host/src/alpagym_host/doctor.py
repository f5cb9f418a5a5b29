"""The checks of `alpagym doctor` and how they are shown.

Each check asks one thing, within a time-out, and says what was found. What is absent and not asked for by the config
is `off`, which is no fault. The checks run side by side, so the slowest one is what a user waits for.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from rich.console import Console

from alpagym_host import doctor_machine, doctor_packages, hugging_face
from alpagym_host.doctor_types import Context, Finding
from alpagym_host.preflight import preflight
from alpagym_plugins import ConfigError
from alpagym_runtime.machine import Machine
from alpagym_runtime.run_config import RunConfig
from alpagym_runtime.secrets import redacted

_MARKS = {"ok": ("✓", "green"), "off": ("·", "dim"), "warn": ("!", "yellow"), "wrong": ("✗", "bold red")}


@dataclass(frozen=True)
class _Check:
    name: str
    run: Callable[[Context], Iterator[Finding]]


_CHECKS = (
    _Check("Python", doctor_packages.python),
    _Check("packages", doctor_packages.packages),
    _Check("plugins", doctor_packages.plugins),
    _Check("GPUs", doctor_machine.gpus),
    _Check("containers", doctor_machine.containers),
    _Check("Redis", doctor_machine.redis),
    _Check("disk", doctor_machine.disk),
    _Check("ports", doctor_machine.ports),
    _Check("AlpaSim", doctor_machine.alpasim),
    _Check("Hugging Face", hugging_face.check),
    _Check("W&B", doctor_machine.wandb),
    _Check("Slurm", doctor_machine.slurm),
)


def examine(config: RunConfig, machine: Machine, timeout_s: float, ids: Sequence[str] = ()) -> list[Finding]:
    """All findings, in the order of the checks, and at the end what stands in the way of `config`.

    Args:
        config: the run to check for.
        machine: this one.
        timeout_s: longest wait for one answer.
        ids: further Hugging Face ids, `models/OWNER/NAME` or `datasets/OWNER/NAME`.

    """
    context = Context(config, machine, timeout_s, tuple(ids))
    with ThreadPoolExecutor(len(_CHECKS)) as pool:
        found = [finding for part in pool.map(lambda check: _run(check, context), _CHECKS) for finding in part]
    rest = []
    for problem in preflight(config, "train", machine):
        # What a check has found already gets the run's words, and is not said twice.
        at = next((i for i, f in enumerate(found) if f.state == "wrong" and f.text in problem.message), None)
        if at is not None:
            found[at] = replace(found[at], text=problem.message, remedy=problem.remedy)
            continue
        shown = "null" if problem.value is None else str(problem.value) or "''"
        rest.append(Finding("this run", "wrong", f"{problem.key} = {shown}: {problem.message}", problem.remedy))
    return [*found, *(rest or [Finding("this run", "ok", "nothing else stands in its way")])]


def _run(check: _Check, context: Context) -> list[Finding]:
    try:
        return list(check.run(context))
    except ConfigError:
        raise
    except Exception as err:  # one check that breaks must not hide the others
        return [Finding(check.name, "warn", f"could not be checked: {type(err).__name__}: {err}")]


def render(findings: Sequence[Finding], console: Console) -> None:
    """A line a finding, wrapped to the screen; remedies on lines of their own, never wrapped, to be copied."""
    name_width = max(len(finding.name) for finding in findings)
    indent = " " * (name_width + 5)
    last = ""
    for finding in findings:
        mark, style = _MARKS[finding.state]
        name = finding.name if finding.name != last else ""
        last = finding.name
        lines = textwrap.wrap(redacted(finding.text), max(30, console.width - len(indent) - 1)) or [""]
        console.print(f" {mark}", style=style, end=" ", markup=False, highlight=False)
        console.print(f"{name.ljust(name_width)}  {lines[0]}", markup=False, highlight=False, soft_wrap=True)
        for line in lines[1:]:
            console.print(indent + line, markup=False, highlight=False, soft_wrap=True)
        if finding.remedy and finding.state in ("warn", "wrong"):
            console.print(f"{indent}→ {redacted(finding.remedy)}", markup=False, highlight=False, soft_wrap=True)
    wrong = sum(finding.state == "wrong" for finding in findings)
    said = "nothing is wrong" if not wrong else f"{wrong} thing{'s are' if wrong > 1 else ' is'} wrong"
    console.print(f"\n{said}", markup=False, highlight=False)
