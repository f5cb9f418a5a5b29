"""What our own OpenDRIVE files carry beside the standard: `userData` of lanes and header, and named objects.

OpenDRIVE cannot say a fixed signal plan, the marking of a line apart from a lane, or that lanes of two roads are
neighbours. Our writer gives each lane a road of its own and puts the rest here; other readers pass over it.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.errors import SceneError
from alpagym_runtime.simulators.embedded.lane_map import LaneMap, Signals
from alpagym_runtime.simulators.embedded.opendrive_xml import OpenDrive

LANE, SIGNALS, TREES = "alpagym.lane", "alpagym.signals", "alpagym.trees"
SURFACE, SIDEWALK, MARKING = "alpagym.surface", "alpagym.sidewalk", "alpagym.marking."
GROUPS_MAX = 10_000


def marking_kind(name: str) -> Literal["solid", "dashed", "yellow", "edge", "stop"]:
    """The kind in a marking object's name."""
    kind = name.removeprefix(MARKING)
    if kind not in ("solid", "dashed", "yellow", "edge", "stop"):
        raise SceneError(f"marking {kind[:40]!r} is not known")
    return kind  # type: ignore[return-value]


def lane_note(lane_id: int, left: int, right: int, group: int, width_m: float, yields_to: tuple[int, ...]) -> str:
    """The value of a lane's note."""
    return json.dumps([lane_id, left, right, group, width_m, list(yields_to)])


def signals_note(signals: Signals) -> str:
    """The value of the signals' note."""
    return json.dumps([signals.cycle_s, signals.yellow_s, signals.green_s.tolist(), signals.heads.tolist()])


def apply(lane_map: LaneMap, file: OpenDrive, lanes: list[dict[str, str]]) -> LaneMap:
    """The map with its notes in force: lanes in the order and with the neighbours that were written.

    A file that lacks some notes, or was edited so that they do not fit, keeps what the standard part says.

    Raises:
        SceneError: a note that is no JSON of the right shape.

    """
    if not lanes or not all(LANE in note for note in lanes):
        return lane_map
    rows = [_row(note[LANE], len(lanes)) for note in lanes]
    if sorted(row[0] for row in rows) != list(range(len(rows))):
        return lane_map
    new_id = [row[0] for row in rows]
    ordered = list(lane_map.lanes)
    for lane, (lane_id, left, right, group, width_m, yields_to) in zip(lane_map.lanes, rows, strict=True):
        ordered[lane_id] = replace(
            lane,
            lane_id=lane_id,
            successors=tuple(sorted(new_id[s] for s in lane.successors)),
            left=left,
            right=right,
            signal_group=group,
            width_m=width_m,
            yields_to=tuple(yields_to),
        )
    signals = _signals(file.notes[SIGNALS]) if SIGNALS in file.notes else Signals()
    groups = len(signals.green_s)
    if any(lane.signal_group >= groups for lane in ordered):
        raise SceneError(f"{LANE}: a lane has a signal group beyond the {groups} that there are")
    return replace(lane_map, lanes=tuple(ordered), signals=signals, trees=_trees(file.notes.get(TREES, "[]")))


def _trees(text: str) -> NDArray[np.float64]:
    try:
        trees = np.array(_load(text, TREES), np.float64).reshape(-1, 3)
    except (TypeError, ValueError, OverflowError):
        trees = np.full((1, 3), np.nan)
    if not (np.abs(trees) < 1e9).all():
        raise SceneError(f"{TREES}: {text[:60]!r}, expected [[x, y, radius]]")
    return trees


def _load(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as err:
        raise SceneError(f"{what}: {text[:40]!r} is no JSON: {err}") from None


def _row(text: str, count: int) -> tuple[int, int, int, int, float, list[int]]:
    row = _load(text, LANE)
    if isinstance(row, list) and len(row) == 6 and isinstance(row[5], list):
        whole = [*row[:4], *row[5]]
        fits = all(type(v) is int and -1 <= v < max(count, GROUPS_MAX) for v in whole)
        lanes = [*row[1:3], *row[5]]
        width = row[4]
        if fits and type(width) in (int, float) and 0.0 < width < 1e3 and all(v < count for v in lanes):
            return row[0], row[1], row[2], row[3], float(width), row[5]
    raise SceneError(f"{LANE}: {text[:60]!r}, expected [id, left, right, group, width, [lanes that go first]]")


def _signals(text: str) -> Signals:
    row = _load(text, SIGNALS)
    try:
        cycle, yellow, green, heads = row
        green, heads = (np.array(t, np.float64) for t in (green, heads))
        signals = Signals(float(cycle), green.reshape(-1, 2), float(yellow), heads.reshape(-1, 4))
    except (TypeError, ValueError, OverflowError):
        raise SceneError(
            f"{SIGNALS}: {text[:60]!r}, expected [cycle, yellow, [[start, end]], [[x, y, yaw, group]]]"
        ) from None
    check_signals(signals, SIGNALS)
    return signals


def check_signals(signals: Signals, what: str) -> None:
    """SceneError where a plan cannot run."""
    green = signals.green_s
    numbers = [signals.cycle_s, signals.yellow_s, *green.ravel(), *signals.heads.ravel()]
    fits = all(math.isfinite(v) and abs(v) < 1e9 for v in numbers) and signals.cycle_s >= 0.0
    if fits and len(green):
        fits = signals.cycle_s > 0.0 and bool(
            (green[:, 0] >= 0.0).all() and (green[:, 0] < green[:, 1]).all() and (green[:, 1] <= signals.cycle_s).all()
        )
    if not fits or len(green) > GROUPS_MAX:
        raise SceneError(f"{what}: greens must start before they end, within a finite cycle")
