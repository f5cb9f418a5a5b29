"""Values of scene files, checked one by one, with errors that name the place."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.errors import SceneError
from alpagym_runtime.geometry import check_times
from alpagym_runtime.simulators.embedded.lane_map import MERGE, Agent, Stop
from alpagym_runtime.simulators.embedded.scene import KINDS, Vehicle
from alpagym_runtime.simulators.embedded.scene_layout import PLACE_MAX_M

Float = NDArray[np.float64]


class Value:
    """A place in a JSON document, for errors that name it."""

    def __init__(self, data: Any, place: str) -> None:
        self.data = data
        self.place = place

    def wrong(self, expected: str) -> SceneError:
        """The error that something else was expected here."""
        shown = repr(self.data)[:60] if not isinstance(self.data, (list, dict)) else type(self.data).__name__
        return SceneError(f"{self.place}: {shown}, expected {expected}")

    def __getitem__(self, key: str) -> Value:
        if not isinstance(self.data, dict):
            raise self.wrong("an object")
        if key not in self.data:
            raise SceneError(f"{self.place}: no {key!r}")
        return Value(self.data[key], f"{self.place}.{key}")

    def get(self, key: str) -> Value | None:
        """The value under a key; None where it is absent or null."""
        return self[key] if isinstance(self.data, dict) and self.data.get(key) is not None else None

    def items(self, count: int | None = None, limit: int = 100_000) -> list[Value]:
        """The entries of a list: exactly `count`, at most `limit`."""
        if not isinstance(self.data, list) or len(self.data) > limit:
            raise self.wrong(f"a list of at most {limit}")
        if count is not None and len(self.data) != count:
            raise SceneError(f"{self.place}: {len(self.data)} entries, expected {count}")
        return [Value(item, f"{self.place}[{k}]") for k, item in enumerate(self.data)]

    def text(self) -> str:
        """A text of 1 to 1000 characters."""
        if not isinstance(self.data, str) or not self.data or len(self.data) > 1000:
            raise self.wrong("a text")
        return self.data

    def number(self, low: float = -1e12, high: float = 1e12) -> float:
        """A number within bounds."""
        if isinstance(self.data, bool) or not isinstance(self.data, (int, float)) or not low <= self.data <= high:
            raise self.wrong(f"a number from {low:g} to {high:g}")
        return float(self.data)

    def whole(self, low: int, high: int) -> int:
        """A whole number within bounds."""
        if type(self.data) is not int or not low <= self.data <= high:
            raise self.wrong(f"a whole number from {low} to {high}")
        return self.data

    def array(self, *shape: int | None, bound: float = PLACE_MAX_M) -> Float:
        """A float array of a shape (None: any), finite and up to `bound` in size."""
        try:
            table = np.array(self.data, np.float64)
        except (TypeError, ValueError, OverflowError):
            raise self.wrong(f"numbers of shape {_shape(shape)}") from None
        if table.size == 0 and len(shape) > 1 and shape[0] is None and self.data == []:
            table = np.zeros((0, *(n or 0 for n in shape[1:])))
        fits = table.ndim == len(shape) and all(n is None or n == m for n, m in zip(shape, table.shape, strict=True))
        if not fits:
            raise SceneError(f"{self.place}: numbers of shape {list(table.shape)}, expected {_shape(shape)}")
        bad = np.argwhere(~(np.abs(table) <= bound))
        if len(bad):
            raise SceneError(f"{self.place}{bad[0].tolist()}: not a finite number up to {bound:g}")
        return table

    def times(self) -> NDArray[np.int64]:
        """[K] ascending times, us."""
        values = [item.whole(0, 2**62) for item in self.items()]
        try:
            return check_times(np.array(values, np.int64), self.place)
        except ValueError as err:
            raise SceneError(str(err)) from err


def _shape(shape: tuple[int | None, ...]) -> str:
    return "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"


def read_vehicle(value: Value) -> Vehicle:
    """The ego's sizes, from a file of ours."""
    names = [field.name for field in dataclasses.fields(Vehicle)]
    unknown = set(value.data) - set(names) if isinstance(value.data, dict) else set()
    if unknown:
        raise SceneError(f"{value.place}: {sorted(unknown)[0]!r} is not known; a newer program wrote it")
    vehicle = Vehicle(**{name: value[name].number(-100.0, 1e6) for name in names})
    if not (0.1 <= vehicle.length_m <= 50.0 and 0.1 <= vehicle.width_m <= 10.0 and 0.05 <= vehicle.wheelbase_m <= 50.0):
        raise SceneError(f"{value.place}: {vehicle}, expected the size of a vehicle in m")
    return vehicle


def vehicle_of_box(trajectory: Value) -> Vehicle:
    """The ego's sizes by AlpaSim's `rig_bbox`; the default vehicle where there is none."""
    box = trajectory.get("rig_bbox")
    if box is None:
        return Vehicle()
    centre, size = box["centroid"].array(3), box["dim"].array(3)
    if not (0.5 <= size[0] <= 50.0 and 0.3 <= size[1] <= 10.0 and abs(centre[0]) < size[0] / 2.0):
        raise SceneError(f"{box.place}: {size[0]:g} m x {size[1]:g} m around {centre[0]:g} m, expected a car's box")
    scaled = Vehicle.of_size(float(size[0]), float(size[1]))
    return dataclasses.replace(scaled, rear_overhang_m=float(size[0] / 2.0 - centre[0]))


def read_stops(value: Value, groups: int) -> tuple[Stop, ...]:
    """Stops by ascending arc length; `groups` signal groups exist."""
    stops = []
    for item in value.items(limit=10_000):
        arc, group, x, y = item.items(count=4)
        conflict = tuple(float("nan") if v.data is None else v.number(-PLACE_MAX_M, PLACE_MAX_M) for v in (x, y))
        stops.append(
            Stop(arc.number(-PLACE_MAX_M, PLACE_MAX_M), group.whole(MERGE, groups - 1), (conflict[0], conflict[1]))
        )
    if any(b.arc_m < a.arc_m for a, b in itertools.pairwise(stops)):
        raise SceneError(f"{value.place}: arc lengths do not ascend")
    return tuple(stops)


def read_agent(value: Value, groups: int) -> Agent:
    """An agent of the reactive traffic; `groups` signal groups exist."""
    path = value["path"].array(None, 2)
    if not 2 <= len(path) <= 100_000 or not (np.hypot(*np.diff(path, axis=0).T) > 1e-6).all():
        raise SceneError(f"{value.place}.path: needs 2 to 100000 points, all distinct from their neighbours")
    yields = value["yields_to_cars"]
    if not isinstance(yields.data, bool):
        raise yields.wrong("true or false")
    return Agent(
        path=path,
        start_arc_m=value["start_arc_m"].number(-PLACE_MAX_M, PLACE_MAX_M),
        start_speed_mps=value["start_speed_mps"].number(0.0, 200.0),
        desired_speed_mps=value["desired_speed_mps"].number(0.0, 200.0),
        kind=value["kind"].whole(0, len(KINDS) - 1),
        length_m=value["length_m"].number(0.01, 100.0),
        width_m=value["width_m"].number(0.01, 100.0),
        lateral_m=value["lateral_m"].number(-1e3, 1e3),
        lanes_left=value["lanes_left"].whole(0, 20),
        lanes_right=value["lanes_right"].whole(0, 20),
        lane_width_m=value["lane_width_m"].number(0.1, 100.0),
        stops=read_stops(value["stops"], groups),
        yields_to_cars=yields.data,
    )
