"""Figures as inline SVG, by matplotlib without a display; sized for a phone's width, so that text stays readable."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#1f5fa8", "#c2571a")
"""Of the first and the second run; distinct in grey, too."""
SHADES = ("#1f5fa8", "#2a9d6f", "#c2571a", "#8a5bb8", "#b8860b", "#5c6670", "#c23b5a")
INK, GRID = "#2b3036", "#d9dde2"
WIDTH_IN, HEIGHT_IN = 4.2, 2.5

_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


@dataclass
class Line:
    """A curve: x, y, and bounds of y where there are intervals."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: str
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    dashed: bool = False
    marks: bool = False


@dataclass
class Picture:
    """A figure on the page: title, what it shows in words, SVG text."""

    title: str
    words: str
    svg: str
    axis: tuple[float, float] = (0.0, 1.0)
    """Where the x axis begins and ends, as shares of the width."""
    span_s: float = field(default=0.0)
    """What the x axis spans, for a figure of one drive."""


def lines(
    title: str, words: str, curves: Sequence[Line], x: str, y: str, limit: float | None = None, zero: bool = False
) -> Picture:
    """Curves with their intervals as bands; `limit` is drawn as a dotted line, `zero` begins the axis at 0."""
    with _style(title):
        figure, axes = _figure()
        for curve in curves:
            values = _floats(curve.y)
            style = {"color": curve.colour, "linestyle": "--" if curve.dashed else "-", "linewidth": 1.6}
            marker = "o" if curve.marks or len(values) == 1 else None
            axes.plot(curve.x, values, label=curve.label, marker=marker, markersize=3.5, **style)  # type: ignore[arg-type]
            if curve.low is not None and curve.high is not None:
                low, high = _floats(curve.low), _floats(curve.high)
                axes.fill_between(curve.x, low, high, color=curve.colour, alpha=0.15, linewidth=0)
        if limit is not None:
            axes.axhline(limit, color=INK, linestyle=":", linewidth=1.0)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        bottom, top = axes.get_ylim()
        if top - bottom < 1e-3 * max(abs(bottom), abs(top)):  # a constant, not the noise of its last digits
            middle = (bottom + top) / 2.0
            axes.set_ylim(middle - 0.5 * abs(middle), middle + 0.5 * abs(middle))
        if zero:
            axes.set_ylim(bottom=0.0)
        if len(curves) > 1:
            _legend_above(axes)
        return Picture(title, words, _svg(figure))


def bars(
    title: str, words: str, kinds: Sequence[str], series: Sequence[tuple[str, str, Sequence[Mapping[str, Any]]]], x: str
) -> Picture:
    """Horizontal bars by kind of scene, one a series (label, colour, values with mean, low and high), with whiskers."""
    with _style(title):
        thick = 0.8 / max(len(series), 1)
        height_in = 0.7 + 0.3 * len(kinds) * max(len(series), 1) ** 0.7
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        axes = figure.add_subplot()
        for k, (label, colour, values) in enumerate(series):
            mean = _floats([value["mean"] for value in values])
            low, high = _floats([v["low"] for v in values]), _floats([v["high"] for v in values])
            at = np.arange(len(kinds)) + (k - (len(series) - 1) / 2.0) * thick
            axes.barh(at, np.nan_to_num(mean), thick * 0.9, color=colour, label=label)
            axes.hlines(at, low, high, color=INK, linewidth=1.0)
        axes.set_yticks(np.arange(len(kinds)), kinds)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(x)
        axes.axvline(0.0, color=INK, linewidth=0.8)
        if len(series) > 1:
            _legend_above(axes)
        return Picture(title, words, _svg(figure))


def shares(title: str, words: str, x: Sequence[float], parts: Mapping[str, Sequence[float]]) -> Picture:
    """What a step's time is made of, stacked."""
    with _style(title):
        figure, axes = _figure()
        if len(x) == 1:
            x, parts = [x[0], x[0] + 1], {name: [values[0]] * 2 for name, values in parts.items()}
        axes.stackplot(x, *parts.values(), labels=list(parts), colors=SHADES, alpha=0.85, linewidth=0)
        axes.set_xlabel("update")
        axes.set_ylabel("s")
        _legend_above(axes)
        return Picture(title, words, _svg(figure))


def drive(
    title: str, times_s: Sequence[float], terms: Mapping[str, Sequence[float]], speed: Sequence[float]
) -> Picture:
    """One drive: what each reward term has added up to, and the speed; the x axis fills a known part of the width."""
    left, right = 0.14, 0.86
    with _style(title):
        figure = Figure(figsize=(WIDTH_IN, 2.1))
        axes = figure.add_axes((left, 0.2, right - left, 0.6))
        for (name, values), colour in zip(terms.items(), SHADES * 3, strict=False):
            axes.plot(times_s, np.cumsum(_floats(values)), color=colour, label=name, linewidth=1.5)
        axes.set_xlabel("time, s")
        axes.set_ylabel("reward so far")
        span = max(times_s[-1], 1e-3)
        axes.set_xlim(0.0, span)
        other = axes.twinx()
        other.plot(times_s, _floats(speed), color=INK, linewidth=1.0, linestyle=":", label="speed, m/s")
        other.set_ylim(bottom=0.0)
        other.grid(visible=False)
        handles = [*axes.get_legend_handles_labels()[0], *other.get_legend_handles_labels()[0]]
        _legend_above(axes, handles)
        words = f"Reward terms added up over the drive, and the speed (dotted, right axis): {title}"
        return Picture(title, words, _svg(figure), (left, right), span)


def _style(title: str) -> AbstractContextManager[None]:
    """Our look; ids inside a figure are hashed with its title, so that two on a page never share one."""
    settings: Any = _STYLE | {"svg.hashsalt": title}
    return matplotlib.rc_context(settings)


def _figure() -> tuple[Figure, Axes]:
    # Margins by hand: a layout engine takes half of a figure's time.
    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN))
    return figure, figure.add_axes((0.15, 0.18, 0.82, 0.63))


def _legend_above(axes: Axes, handles: Sequence[Any] | None = None) -> None:
    """In rows above the axes, where it hides nothing."""
    found = axes.get_legend_handles_labels()[0] if handles is None else handles
    columns = 2 if len(found) == 4 else 3
    axes.legend(
        handles=list(found),
        ncols=columns,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        borderaxespad=0.2,
        handlelength=1.4,
    )


def _svg(figure: Figure) -> str:
    """The <svg> element: as wide as its place, no ids of groups (they repeat on a page), no date."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    return re.sub(r'^<svg ([^>]*?)height="[^"]*"([^>]*?)width="[^"]*"', r"<svg \1\2", text, count=1)


def _floats(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], np.float64)
