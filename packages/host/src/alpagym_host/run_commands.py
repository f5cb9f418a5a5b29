"""`alpagym list | status | logs | stop | clean`: look after runs from another terminal.

They read the run directory, and ask Slurm where a run is a job. A process is signalled only if it is the one that the
run wrote down.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from alpagym_plugins import ConfigError

if TYPE_CHECKING:
    from alpagym_host.slurm.jobs import Job

_ROOT = Path("tmp/alpagym-runs")
_POLL_S = 0.2
_JOB_POLL_S = 1.0
_AFTER_GRACE_S = 30.0

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False)]


def list_runs(
    root: Annotated[Path, typer.Argument(metavar="ROOT", help="A folder of run directories, as run.root.")] = _ROOT,
    limit: Annotated[int, typer.Option(help="The newest so many; 0: all.", min=0)] = 20,
) -> None:
    """List runs, newest first: how each stands, and how far it got."""
    folders = [path.parent for path in root.glob("*/config.yaml") if not path.parent.is_symlink()]
    if not folders:
        typer.echo(f"no runs in {root}")
        return
    folders.sort(key=lambda path: (path / "config.yaml").stat().st_mtime, reverse=True)
    rows = [("run", "command", "how", "progress", "score", "last change")]
    told = _jobs(folders[: limit or None])
    for folder in folders[: limit or None]:
        facts = _facts(folder, told.get(folder))
        score = "" if facts["score"] is None else f"{facts['score']:.3f}"
        rows.append((folder.name, facts["command"], facts["shown"], facts["progress"], score, facts["changed"]))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if len(folders) > limit > 0:
        typer.echo(f"{len(folders) - limit} older ones: --limit 0")


def status(run_directory: RunDir) -> None:
    """Show what a run is doing: phase, progress, processes, endpoints, and the cause if it failed."""
    from alpagym_host.leftovers import living
    from alpagym_host.run_dir import open_existing
    from alpagym_host.run_state import read_state
    from alpagym_runtime.endpoints import STALE_S, Registry

    directory = open_existing(run_directory)
    job = _jobs([directory]).get(directory)
    state, facts = read_state(directory), _facts(directory, job)
    typer.echo(f"{directory}\n{facts['command']}: {facts['shown']}")
    if job is not None:
        reason = "" if job.reason in ("", "None") else f" ({job.reason})"
        where = f", on {job.nodes}, {job.elapsed} of {job.limit}" if job.nodes else ""
        typer.echo(f"job        {job.id} {job.state or 'is no longer known to Slurm'}{reason}{where}")
    if state is not None and facts["condition"] in ("running", "lost", "killed"):
        typer.echo(
            f"phase      {state.phase}, since {_clock(state.since)}, process {state.process.pid} on {state.host}"
        )
    if facts["progress"]:
        typer.echo(f"progress   {facts['progress']}")
    if facts["score"] is not None:
        typer.echo(f"score      {facts['score']:.3f}")
    if state is not None and facts["condition"] != "completed":
        alive = {identity.pid for identity in living(state)}
        for child in state.children if state.phase != "ended" else ():
            how = "runs" if child["pid"] in alive else ("ended" if state.here else "on another machine")
            log = "" if child["log"] is None else f", log: {child['log']}"
            typer.echo(f"process    {child['name']} {child['pid']} {how}{log}")
        for endpoint, age_s in Registry(directory).all():
            fresh = "answers" if age_s <= STALE_S else "silent"
            typer.echo(
                f"endpoint   {endpoint.name} at {endpoint.address}: scenes: {len(endpoint.scenes)}, "
                f"{endpoint.capacity} at once; {fresh}, last beat {age_s:.0f} s ago"
            )
        if facts["condition"] == "killed" and job is None:
            typer.echo(f"left       {len(alive)} processes; clear up: alpagym clean {directory}")
    for line in _cosmos(directory):
        typer.echo(line)
    if state is not None and state.cause:
        typer.echo(f"cause      {state.cause}")
    if facts["condition"] in ("stopped", "failed", "killed") and not (job is not None and job.active):
        typer.echo(f"to go on   alpagym resume {directory}")


def _cosmos(directory: Path) -> Iterator[str]:
    """How a Cosmos-RL job stands, and what its numbers are a sign of."""
    from alpagym_runtime.run_config import load_run_config
    from alpagym_runtime.trainers.cosmos.monitor import job_state

    if not (directory / "cosmos").is_dir() or (found := job_state(directory, load_run_config(directory))) is None:
        return
    for what, text in found.lines:
        yield f"{what:<10} {text}"
    for sign in found.signs:
        yield f"{'healthy' if sign.healthy else 'sick':<10} {sign.name}: {sign.text}"
        for number, remedy in enumerate(sign.remedies, 1):
            yield f"           {number}. {remedy}"


def logs(
    run_directory: RunDir,
    name: Annotated[str | None, typer.Argument(help="A log's name or the beginning of it; none: all.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="The last so many of each; 0: everything.", min=0)] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends, or Ctrl-C.")] = False,
) -> None:
    """Print a run's logs: launcher, trainer, and AlpaSim's own."""
    from alpagym_host.run_dir import open_existing
    from alpagym_host.run_state import condition, read_state

    directory = open_existing(run_directory)
    files = _log_files(directory, name)
    if not files and not follow:
        there = ", ".join(sorted(_log_files(directory, None))) or "none; a run in one process writes to its terminal"
        raise ConfigError(f"{directory} has no log {name or ''!r}; there are: {there}", key="NAME")
    places: dict[Path, int] = {}
    for title, file in files.items():
        places[file] = _print_tail(title, file, lines, several=len(files) > 1)
    while follow:
        state, job = read_state(directory), _jobs([directory]).get(directory)
        over = condition(directory, state) != "running" if job is None else not job.active
        for title, file in _log_files(directory, name).items():
            places[file] = _print_more(title, file, places.get(file, 0))
        if over:
            return
        time.sleep(_POLL_S if job is None else _JOB_POLL_S)


def stop(
    run_directory: RunDir,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for a checkpoint.")] = False,
    timeout_s: Annotated[
        float | None, typer.Option(help="Longest wait for the end; default: deploy.grace_s and 30 s.", min=0)
    ] = None,
) -> None:
    """Stop a run in order, and wait until it has ended: checkpoint, then everything that it started."""
    from alpagym_host.run_dir import open_existing
    from alpagym_host.run_state import condition, read_state
    from alpagym_runtime.run_config import load_run_config

    directory = open_existing(run_directory)
    if (job := _jobs([directory], say=False).get(directory)) is not None:
        raise typer.Exit(_stop_job(directory, job, now, timeout_s))
    state = read_state(directory)
    how = condition(directory, state)
    if how == "killed":
        raise ConfigError(f"{directory} was killed; clear up: alpagym clean {directory}")
    if state is None or how != "running":
        typer.echo(f"{directory} is not running: {how}")
        return
    if not state.here:
        raise ConfigError(f"{directory} runs on {state.host}, process {state.process.pid}; stop it there")
    limit_s = load_run_config(directory).deploy.grace_s + _AFTER_GRACE_S if timeout_s is None else timeout_s
    state.process.signal(signal.SIGINT if now else signal.SIGTERM)
    if now:
        time.sleep(_POLL_S)
        state.process.signal(signal.SIGINT)
    deadline_s = time.monotonic() + limit_s
    while state.process.alive:
        if time.monotonic() > deadline_s:
            typer.echo(
                f"still running after {limit_s:g} s: process {state.process.pid}\n"
                f"  alpagym stop --now {directory}, or in the worst case alpagym clean --force {directory}",
                err=True,
            )
            raise typer.Exit(1)
        time.sleep(_POLL_S)
    typer.echo(f"stopped; to continue:\n  alpagym resume {directory}")


def _stop_job(directory: Path, job: Job, now: bool, timeout_s: float | None) -> int:
    """Stop a run that is a Slurm job, and wait until that has ended; the exit code."""
    from alpagym_host.slurm import jobs
    from alpagym_runtime.run_config import load_run_config

    if not job.active:
        typer.echo(f"{directory} is not running: job {job.id} {job.state or 'has ended'}")
        return 0
    # The job's shell passes SIGUSR2 on to the trainer; what waits, or shall end at once, is cancelled.
    gentle = not (now or job.waits)
    answer = jobs.cancel(job.id, *(["--batch", "--signal=USR2"] if gentle else []))
    if not answer.ok:
        raise ConfigError(f"scancel {job.id}: {answer.first_line}")
    limit_s = load_run_config(directory).deploy.grace_s + _AFTER_GRACE_S if timeout_s is None else timeout_s
    deadline_s = time.monotonic() + limit_s
    while jobs.ask([job.id])[job.id].active:
        if time.monotonic() > deadline_s:
            typer.echo(
                f"job {job.id} is still there after {limit_s:g} s\n"
                f"  alpagym stop --now {directory}, or scancel {job.id}",
                err=True,
            )
            return 1
        time.sleep(_JOB_POLL_S)
    did = "cancelled before it began" if job.waits else "stopped"
    typer.echo(f"{did}; to continue:\n  alpagym resume {directory}")
    return 0


def clean(
    run_directory: RunDir,
    force: Annotated[bool, typer.Option("--force", help="Kill its supervisor first, if that still lives.")] = False,
) -> None:
    """End what a killed run has left: its processes and containers, nobody else's; the results stay."""
    from alpagym_host.leftovers import clear, living
    from alpagym_host.run_dir import open_existing
    from alpagym_host.run_state import condition, read_state

    directory = open_existing(run_directory)
    job = _jobs([directory], say=False).get(directory)
    if job is not None:
        if job.active:
            raise ConfigError(f"job {job.id} of {directory} is {job.state}; stop it: alpagym stop {directory}")
        typer.echo("nothing was left: Slurm ends all that a job has started")
        return
    state = read_state(directory)
    how = condition(directory, state)
    if state is not None and how == "running":
        if not force:
            raise ConfigError(f"{directory} is running; stop it: alpagym stop {directory}; or add --force")
        if not state.here:
            raise ConfigError(f"{directory} runs on {state.host}, process {state.process.pid}; clean it there")
        state.process.signal(signal.SIGKILL)
        while state.process.alive:
            time.sleep(_POLL_S)
    elif how == "lost" and state is not None:
        raise ConfigError(f"{directory} was last seen on {state.host}; clean it there")
    if not clear(directory, typer.echo):
        typer.echo("nothing was left")
    elif state is not None and living(state):
        raise typer.Exit(1)


# ---------------------------------------------------------------- facts


def _jobs(directories: Sequence[Path], say: bool = True) -> dict[Path, Job]:
    """The Slurm jobs of those runs that have one, by directory, asked at once.

    Raises:
        ConfigError: Slurm does not answer, unless `say`: then that is said, and nothing is known of them.

    """
    from alpagym_host.slurm import jobs

    numbers = {path: number for path in directories if (number := jobs.read(path)) is not None}
    try:
        told = jobs.ask(numbers.values())
    except ConfigError as err:
        if not say:
            raise
        typer.echo(str(err), err=True)
        return {}
    return {path: told[number] for path, number in numbers.items()}


def _facts(directory: Path, job: Job | None = None) -> dict[str, Any]:
    """How a run stands, for people."""
    from alpagym_host.run_state import condition, read_state
    from alpagym_runtime.errors import CorruptFileError
    from alpagym_runtime.files import read_json

    state = read_state(directory)
    how: str = condition(directory, state)
    if job is not None:
        how = _standing(how, job)
    summary: dict[str, Any] = {}
    if (directory / "summary.json").is_file():
        try:
            summary = read_json(directory / "summary.json")
        except (CorruptFileError, OSError):
            summary = {}
    if how == "new" and summary:
        how = str(summary.get("status", how))  # of a version that wrote no state
    evaluations = summary.get("evaluations") or {}
    final = evaluations.get("final") or {}
    command = (directory / "command").read_text().strip() if (directory / "command").is_file() else "?"
    score = (final.get("driving_score") or {}).get("mean")
    shown = state.phase if how == "running" and state is not None and state.phase != command else how
    changed = max((path.stat().st_mtime for path in directory.iterdir() if path.is_file()), default=0.0)
    return {
        "command": command,
        "condition": how,
        "shown": shown,
        "progress": _progress(directory, summary),
        "score": score,
        "changed": _clock(changed),
    }


def _standing(how: str, job: Job) -> str:
    """How a run stands by its directory and its job: who is silent on another machine may be over, or not begun."""
    if job.waits:
        return "queued"
    if job.active:
        return how if how == "running" else "starting"
    if how in ("running", "lost"):
        return "killed"
    return "not begun" if how == "new" else how


def _progress(directory: Path, summary: dict[str, Any]) -> str:
    """Stage and step of the last line of metrics.jsonl, or of the summary."""
    import json

    last = None
    for line in _last_lines(directory / "metrics.jsonl", 1):
        try:
            last = json.loads(line)
        except ValueError:
            last = None
    if isinstance(last, dict) and "stage" in last:
        return f"{last['stage']} step {last.get('step', '?')}"
    return f"{summary['stage']} step {summary.get('step', '?')}" if summary.get("stage") else ""


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


# ---------------------------------------------------------------- logs


def _log_files(directory: Path, name: str | None) -> dict[str, Path]:
    """Title -> file: logs/ and, below alpasim/, what AlpaSim's parts write themselves."""
    found = {path.stem: path for path in sorted((directory / "logs").glob("*.log"))}
    for path in sorted((directory / "alpasim").glob("wizard_*/txt-logs/*.log")):
        found[f"{path.parts[-3]}/{path.stem}"] = path
    return {title: path for title, path in found.items() if name is None or title.startswith(name)}


def _last_lines(file: Path, count: int) -> list[str]:
    try:
        with file.open("rb") as handle:
            handle.seek(0, os.SEEK_END)
            size = handle.tell()
            handle.seek(max(0, size - max(1, count) * 4096))
            return handle.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []


def _print_tail(title: str, file: Path, count: int, several: bool) -> int:
    if several:
        typer.echo(f"== {title}: {file}")
    size = file.stat().st_size
    for line in _last_lines(file, count) if count else _all_lines(file):
        typer.echo(line)
    return size


def _all_lines(file: Path) -> Iterator[str]:
    with file.open(errors="replace") as handle:
        for line in handle:
            yield line.rstrip("\n")


def _print_more(title: str, file: Path, place: int) -> int:
    """Print whole new lines; where the next ones begin."""
    try:
        with file.open("rb") as handle:
            handle.seek(place)
            text = handle.read(1 << 20)
    except OSError:
        return place
    whole = text[: text.rfind(b"\n") + 1]
    for line in whole.decode(errors="replace").splitlines():
        typer.echo(f"{title}: {line}")
    return place + len(whole)
