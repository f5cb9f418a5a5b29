"""The page: sections in the order in which a reader asks, for one run or for two side by side."""

from __future__ import annotations

import base64
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alpagym_host.report.figures import COLOURS, SHADES, Line, Picture, bars, drive, lines, shares
from alpagym_host.report.run_data import NAMES, RESAMPLES, RunData
from alpagym_host.report.signs import Sign, manner, signs
from alpagym_plugins import ConfigError
from alpagym_runtime.files import write_atomic
from alpagym_runtime.rollouts.references import RECORDING
from alpagym_runtime.rollouts.statistics import compare
from alpagym_runtime.secrets import redacted
from alpagym_runtime.telemetry.metrics import describe

VIDEO_LIMIT_BYTES = 3_000_000
"""A longer video stays a file beside the page, which then shows stills of it."""
STILLS = 4
_COUNTS = ("drives", "void", "retried", "initial_fault", "non_finite")
RATES = {"collision_at_fault": "collision at fault", "collision": "collision", "offroad": "off-road", "goal": "goal"}


def write_report(runs: Sequence[RunData], output: Path) -> None:
    """Write the page of one run or two."""
    write_atomic(output, page(runs).encode())


def page(runs: Sequence[RunData]) -> str:
    """The page as text.

    Raises:
        ConfigError: more than two runs.

    """
    if not 1 <= len(runs) <= 2:
        raise ConfigError(f"a report shows one run or two side by side, got {len(runs)}")
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("alpagym_host.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"interval": interval, "percent": percent, "share": share, "number": number}
    names = ["A", "B"][: len(runs)]
    return environment.get_template("report.html.j2").render(
        title=" and ".join(run.name for run in runs),
        runs=[_run(run, name, colour) for run, name, colour in zip(runs, names, COLOURS, strict=False)],
        comparison=_comparison(runs),
        curves=curves(runs),
        kinds=kinds(runs),
        config_difference=_difference(runs),
        rates=RATES,
    )


# ---------------------------------------------------------------- numbers as text


def interval(value: Mapping[str, Any] | None, sign: bool = False, scale: float = 1.0, digits: int = 3) -> str:
    """`mean [low, high]`; a dash where there is none."""
    if value is None or value["mean"] is None:
        return "–"
    form = f"{'+' if sign else ''}.{digits}f"
    bounds = [format(scale * v, form) if v is not None else "∞" for v in (value["low"], value["high"])]
    return f"{scale * value['mean']:{form}} [{bounds[0]}, {bounds[1]}]"


def percent(value: Mapping[str, Any] | None, sign: bool = False) -> str:
    """A share with its interval, in percent."""
    text = interval(value, sign, 100.0, 1)
    return text if text == "–" else f"{text} %"


def share(value: Mapping[str, Any]) -> str:
    """A share in whole percent, or a dash."""
    return "–" if value["mean"] is None else f"{100 * value['mean']:.0f} %"


def number(value: Any, digits: int = 3) -> str:
    """A number, or a dash."""
    return "–" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)


# ---------------------------------------------------------------- one run


def _run(run: RunData, letter: str, colour: str) -> dict[str, Any]:
    shown = run.shown()
    summary = run.summary
    facts = {
        "directory": str(run.directory),
        "status": summary.get("status", "not ended"),
        "command": summary.get("command", "–"),
        "steps": len(run.training()),
    }
    if summary:
        facts |= {
            "wall time": f"{summary['wall_s']:.0f} s",
            "CPU time": f"{summary['cpu_s']:.0f} s",
            "peak memory": f"{summary['peak_rss_bytes'] / 1e9:.2f} GB",
            **_workers(summary),
            "config hash": summary["config_hash"],
            "processor": summary["cpu"],
            "versions": ", ".join(f"{name} {version}" for name, version in summary["versions"].items()),
        }
    if run.cosmos is not None:
        facts |= {f"Cosmos-RL: {what}": text for what, text in run.cosmos.lines}
    return {
        "letter": letter,
        "colour": colour,
        "name": run.name,
        "facts": facts,
        "tiles": _tiles(run),
        "signs": [*_cosmos_signs(run), *signs(run.evaluations, run.comparisons, run.training(), run.references)],
        "evaluations": [(NAMES[name], evaluation) for name, evaluation in shown.items()],
        "manners": _manners(run),
        "families": _families(shown),
        "comparisons": [(NAMES[c["before"]], NAMES[c["after"]], c) for c in _distinct(run)],
        "last_is_best": _last_is_best(run),
        "drives": [_drive(run, about, letter) for about in run.videos],
        "trouble": _trouble(run),
        "config": run.config_text,
    }


def _cosmos_signs(run: RunData) -> list[Sign]:
    """What the numbers of a Cosmos-RL job are a sign of, with the remedies in their order."""
    found = [] if run.cosmos is None else [sign for sign in run.cosmos.signs if not sign.healthy]
    return [
        Sign("watch", f"Cosmos-RL: {sign.name}", f"{sign.text}. First: {'; then: '.join(sign.remedies)}")
        for sign in found
    ]


def _workers(summary: Mapping[str, Any]) -> dict[str, str]:
    if "workers" not in summary:
        return {}
    found = summary["workers"]
    text = f"{found['count']}, {found['restarts']} restarts, {found['lost']} episodes lost and driven again"
    return {"workers": text}


def _manners(run: RunData) -> list[tuple[str, dict[str, Any], str]]:
    """Who, a summary, and what that way of driving looks like: the policy's evaluations, then the references."""
    recording = run.references.get(RECORDING)
    found = [(NAMES[name], e) for name, e in run.shown().items()] + list(run.references.items())
    return [(name, evaluation, ", ".join(manner(evaluation, recording)) or "–") for name, evaluation in found]


def _distinct(run: RunData) -> list[dict[str, Any]]:
    """Comparisons, without that of the best weights where they are the last ones."""
    return [c for c in run.comparisons if c["after"] == "final" or not _last_is_best(run)]


def _last_is_best(run: RunData) -> bool:
    # Summaries, not rows: these hold NaN, which equals nothing.
    return "best" in run.evaluations and run.evaluations["best"] == run.evaluations.get("final")


def _tiles(run: RunData) -> list[tuple[str, str, str]]:
    """The few numbers that matter: heading, value, what it was before."""
    final = run.evaluations.get("final")
    if final is None:
        return []
    before = run.evaluations.get("warm_start") or run.evaluations.get("start")
    word = "warm start" if "warm_start" in run.evaluations else "start"
    score = final["driving_score"]
    tiles = [
        ("driving score", number(score["mean"]), f"{word} {number(before['driving_score']['mean'])}" if before else "")
    ]
    for rate in ("collision_at_fault", "offroad"):
        if final["rates"].get(rate) is not None:
            was = (
                f"{word} {100 * before['rates'][rate]:.1f} %"
                if before and before["rates"].get(rate) is not None
                else ""
            )
            tiles.append((RATES[rate], f"{100 * final['rates'][rate]:.1f} %", was))
    pace = final["drive"].get("speed_ratio", {}).get("mean")
    if pace is not None:
        tiles.append(("pace", f"{pace:.2f} ×", "of the recording"))
    tiles.append(("drives", str(score["n"]), f"in {final['scenes']} scenes"))
    return tiles


def _families(shown: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, int, list[dict[str, Any] | None]]]:
    """Kind, drives of the last evaluation, and each evaluation's score."""
    names = sorted({family for evaluation in shown.values() for family in evaluation["by_family"]})
    rows = []
    for family in names:
        cells = [_score(evaluation["by_family"].get(family)) for evaluation in shown.values()]
        rows.append((family or "–", max(cell["n"] for cell in cells if cell), cells))
    return rows


def _score(family: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if family is None:
        return None
    return {"mean": family["driving_score"], **{key: family[key] for key in ("low", "high", "n", "rates")}}


def _trouble(run: RunData) -> dict[str, Any]:
    """What the infrastructure did, apart from what the policy did."""
    table: dict[str, dict[str, Any]] = {}
    for name, evaluation in run.evaluations.items():
        line = table.setdefault(NAMES.get(name, "val, all"), dict.fromkeys(_COUNTS, 0) | {"codes": {}})
        codes = dict(evaluation["failures"])
        line["retried"] += codes.pop("retried", 0)
        line["drives"] += len(run.rows[name])
        line["void"] += evaluation["failed"]
        line["initial_fault"] += evaluation["initial_fault"]
        line["non_finite"] += evaluation["non_finite_reward"]
        for code, count in codes.items():
            line["codes"][code] = line["codes"].get(code, 0) + count
    evaluations = [
        line | {"name": name, "codes": ", ".join(f"{code} {count}" for code, count in line["codes"].items())}
        for name, line in table.items()
    ]
    texts: dict[str, int] = {}
    for rows in run.rows.values():
        for row in rows:
            if row["failed"]:
                texts[row["failure"] or "unknown"] = texts.get(row["failure"] or "unknown", 0) + 1
    wanted = ("void", "episodes_retried", "initial_fault", "non_finite", "groups_dropped", "steps_refused")
    training = {}
    for name in wanted:
        values = [row[name] for row in run.training() if row.get(name) is not None]
        metric = describe(name)
        if values and metric is not None:
            training[metric.words] = int(sum(values))
    return {
        "evaluations": evaluations,
        "texts": [(redacted(text), count) for text, count in sorted(texts.items(), key=lambda item: -item[1])[:12]],
        "training": training,
        "any": any(e["void"] or e["retried"] for e in evaluations) or any(training.values()),
    }


def _drive(run: RunData, about: Mapping[str, Any], letter: str) -> dict[str, Any]:
    path = run.directory / "videos" / about["file"]
    stills = _stills(path)
    small = path.is_file() and path.stat().st_size <= VIDEO_LIMIT_BYTES
    figure = None
    if about["time_s"]:
        terms = {name: values for name, values in about["terms"].items() if any(values)}
        figure = drive(f"{letter} {about['which']} drive", about["time_s"], terms, about["speed_mps"])
    return {
        **{
            key: about[key]
            for key in ("which", "scene_id", "family", "seed", "ended", "driving_score", "evaluated_score")
        },
        "path": f"videos/{about['file']}",
        "video": _data_uri("video/mp4", path.read_bytes()) if small else None,
        "stills": stills,
        "figure": figure,
    }


def _stills(path: Path) -> list[str]:
    """A few pictures of a video, evenly spaced, as JPEG data; for paper, and while it loads."""
    if not path.is_file():
        return []
    import av
    import cv2

    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="bgr24") for frame in container.decode(video=0)]
    chosen = [frames[round(k * (len(frames) - 1) / max(STILLS - 1, 1))] for k in range(min(STILLS, len(frames)))]
    encoded = (cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 80])[1].tobytes() for picture in chosen)
    return [_data_uri("image/jpeg", data) for data in encoded]


def _data_uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


# ---------------------------------------------------------------- figures


def curves(runs: Sequence[RunData]) -> list[Picture]:
    """Evaluations over training, and what the trainer reports."""
    two = len(runs) > 1
    found = [_scores(runs, two)] if any(run.training() for run in runs) else []
    grpo = [(run, [row for row in run.training() if row["stage"] != "imitation"]) for run in runs]
    imitation = [(run, run.training("imitation")) for run in runs]
    labels = ["A: ", "B: "] if two else [""]
    curve = _Curves(grpo, labels)
    reward = curve.of({"reward": "reward", "driving_score": "driving score"})
    found += _maybe("Training drives", "Mean reward and score of the exploring drives.", reward, "update", "")
    terms = list(dict.fromkeys(k for _, rows in grpo for row in rows for k in row if k.startswith("term/")))
    shown = curve.of({name: name.removeprefix("term/") for name in terms})
    found += _maybe("Reward terms", "Each term's part of the reward; they sum to it.", shown, "update", "reward")
    rates = curve.of({"rate/collision_at_fault": "collision at fault", "rate/offroad": "off-road"})
    found += _maybe("Events in training", "Share of the exploring drives.", rates, "update", "share")
    found += _maybe("KL of an update", "Dotted: 0.05.", curve.of({"kl": "KL"}), "update", "nat", 0.05)
    ratio = curve.of({"ratio_min": "smallest", "ratio_mean": "mean", "ratio_max": "largest"})
    found += _maybe("Probability ratio", "New to old probability of the decisions driven.", ratio, "update", "")
    clip = curve.of({"clip_share": "clipped decisions"})
    found += _maybe("Clipped decisions", "Share outside the clip range.", clip, "update", "share")
    found += _maybe("Entropy", "Of the policy's distribution.", curve.of({"entropy": "entropy"}), "update", "nat")
    groups = curve.of({"groups_informative": "informative groups", "groups": "groups"})
    found += _maybe("Groups", "Groups whose drives differ in reward, of all.", groups, "update", "groups")
    manner = curve.of({"drive/speed_ratio": "pace against the recording", "drive/weaving_per_s": "weaving, 1/s"})
    found += _maybe("Manner", "Of the exploring drives.", manner, "update", "")
    speed = curve.of({"throughput/decisions_per_s": "decisions"})
    found += _maybe("Throughput", "Driven and trained on.", speed, "update", "1/s")
    ages = curve.of({"staleness_max": "oldest", "staleness_mean": "mean"})
    workers = curve.of({"workers/alive": "workers", "workers/restarts": "restarts", "workers/lost": "episodes lost"})
    if workers:
        found += _maybe(
            "Age of the weights that drove", "Versions behind those they train.", ages, "update", "versions"
        )
        found += _maybe("Workers", "Restarts and lost episodes since the start.", workers, "update", "")
    losses = _Curves(imitation, labels).of({"loss": "training", "validation_loss": "validation"})
    found += _maybe("Imitation loss", "It ends when validation stops falling.", losses, "epoch", "loss")
    for (_, rows), label in zip(grpo, labels, strict=True):
        if rows and "seconds_drive" in rows[0]:
            found.append(_times(rows, label))
    return found


def _scores(runs: Sequence[RunData], two: bool) -> Picture:
    curves = []
    for run, colour, letter in zip(runs, COLOURS, ("A: ", "B: "), strict=False):
        letter = letter if two else ""
        points = [row for row in run.metrics if row["stage"].startswith("evaluate/")]
        val = [row for row in points if row["stage"].startswith("evaluate/val_")]
        test = [row for row in points if row["stage"].removeprefix("evaluate/") in ("start", "warm_start", "final")]
        for rows, label, dashed in ((val, "val", False), (test, "test", True)):
            if rows:
                x, y = [row["step"] for row in rows], [row["driving_score"] for row in rows]
                low, high = [row.get("low") for row in rows], [row.get("high") for row in rows]
                curves.append(Line(f"{letter}{label}", x, y, colour, low, high, dashed=dashed, marks=True))
    words = "Mean action, with 95 % intervals over scenes; x counts steps of imitation and of training."
    return lines("Driving score", words, curves, "training step", "driving score")


class _Curves:
    """Curves of metrics over the steps of some rows; colours by metric for one run, by run for two."""

    def __init__(self, runs: Sequence[tuple[RunData, Sequence[Mapping[str, Any]]]], labels: Sequence[str]) -> None:
        self._runs, self._labels = runs, labels

    def of(self, metrics: Mapping[str, str]) -> list[Line]:
        found = []
        for k, (name, words) in enumerate(metrics.items()):
            for (_, rows), label, colour in zip(self._runs, self._labels, COLOURS, strict=False):
                points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
                if points:
                    shade = SHADES[k % len(SHADES)] if len(self._runs) == 1 else colour
                    x, y = zip(*points, strict=True)
                    found.append(Line(f"{label}{words}", x, y, shade, dashed=len(self._runs) > 1 and k % 2 == 1))
        return found


def _maybe(title: str, words: str, curves: Sequence[Line], x: str, y: str, limit: float | None = None) -> list[Picture]:
    return [lines(title, words, curves, x, y, limit)] if curves else []


def _times(rows: Sequence[Mapping[str, Any]], label: str) -> Picture:
    """Driving split into what was measured inside it; the world's thread may overlap with the policy."""
    parts: dict[str, list[float]] = {}
    for name, words in (("simulate", "simulate"), ("observe", "observe"), ("render", "render"), ("act", "act")):
        if any(f"seconds_{name}" in row for row in rows):
            parts[words] = [row.get(f"seconds_{name}", 0.0) for row in rows]
    inside = [sum(values[i] for values in parts.values()) for i in range(len(rows))]
    rest = [max(row["seconds_drive"] - used, 0.0) for row, used in zip(rows, inside, strict=True)]
    parts |= {"rest of driving": rest, "train": [row.get("seconds_train", 0.0) for row in rows]}
    words = "Seconds of each update. The world steps in a thread beside the policy, so parts may overlap."
    return shares(f"{label}Time of an update", words, [row["step"] for row in rows], parts)


def kinds(runs: Sequence[RunData]) -> Picture | None:
    """Scores by kind of scene: of two runs at their ends, or of one run before and after."""
    series = []
    if len(runs) == 2:
        chosen = [
            (f"{letter}: last", run.evaluations.get("final"), c)
            for letter, run, c in zip("AB", runs, COLOURS, strict=True)
        ]
    else:
        shown = runs[0].shown()
        shades = {"start": "#b9c2cc", "warm_start": "#7f8b98", "final": COLOURS[0], "best": "#2a9d6f"}
        chosen = [(NAMES[name], evaluation, shades[name]) for name, evaluation in shown.items()]
    chosen = [(label, evaluation, colour) for label, evaluation, colour in chosen if evaluation is not None]
    families = sorted({family for _, evaluation, _ in chosen if evaluation for family in evaluation["by_family"]})
    if not families:
        return None
    nothing = {"mean": None, "low": None, "high": None}
    for label, evaluation, colour in chosen:
        assert evaluation is not None
        values = [_score(evaluation["by_family"].get(family)) or nothing for family in families]
        series.append((label, colour, values))
    words = "Mean driving score with 95 % intervals."
    return bars("Score by kind of scene", words, [family or "–" for family in families], series, "driving score")


# ---------------------------------------------------------------- two runs


def _comparison(runs: Sequence[RunData]) -> dict[str, Any] | None:
    """B against A over the drives that both made at their ends."""
    if len(runs) < 2 or not all("final" in run.rows for run in runs):
        return None
    return compare([runs[0].rows["final"]], [runs[1].rows["final"]], RESAMPLES)


def _difference(runs: Sequence[RunData]) -> list[str]:
    """Lines of the two configs that differ."""
    if len(runs) < 2:
        return []
    a, b = (run.config_text.splitlines() for run in runs)
    return [line for line in difflib.unified_diff(a, b, "A", "B", lineterm="", n=1) if line[:3] not in ("---", "+++")]
