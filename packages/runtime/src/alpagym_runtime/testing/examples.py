"""Made-up but well-formed objects of the contract, for tests: observations, episodes, ticks; and a deep comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.episodes.frames import decode
from alpagym_runtime.random import generator
from alpagym_runtime.types import (
    Decision,
    Ended,
    Episode,
    EpisodeRequest,
    Frame,
    Measures,
    MeasureSeries,
    Observation,
    PolicySpec,
    Ragged,
    Receipt,
    Sampling,
    TickBatch,
)


def example_observation(spec: PolicySpec, count: int, seed: int = 0) -> Observation:
    """A complete observation of `count` cars that drive 0 to 20 m/s on gently curved routes, as `Policy.act` reads it.

    Holds exactly what the spec names: fields with their masks (some rows masked), cameras, carry, privileged labels.
    """
    random = generator(seed, count)
    speed, bend = random.uniform(0.0, 20.0, count), random.uniform(-0.01, 0.01, count)
    out: Observation = {"time_us": np.arange(count) * 100_000 + 2_000_000}
    if "ego_history_rig" in spec.fields:
        ago_s = np.arange(1 - spec.history_steps, 1) * (spec.history_step_us * 1e-6)
        history = np.zeros((count, spec.history_steps, 7), np.float32)
        history[..., 0], history[..., 3] = speed[:, None] * ago_s, 1.0
        out["ego_history_rig"] = history
        out["ego_history_mask"] = np.arange(spec.history_steps) >= random.integers(0, 2, count)[:, None]
    if "ego_dynamics_rig" in spec.fields:
        dynamics = random.normal(0.0, 0.3, (count, 7)).astype(np.float32)
        dynamics[:, 0] = speed
        out["ego_dynamics_rig"] = dynamics
    if "route_rig" in spec.fields:
        x = np.arange(spec.route_points) * 4.0
        y = random.uniform(-1.0, 1.0, (count, 1)) + bend[:, None] * x * x / 2.0
        out["route_rig"] = np.stack([np.broadcast_to(x, y.shape), y], axis=-1).astype(np.float32)
        known = random.integers(0, spec.route_points + 1, count)[:, None]
        out["route_mask"] = np.arange(spec.route_points) < known
    if "actors_rig" in spec.fields:
        actors = random.normal(0.0, 1.0, (count, spec.actors, 9)).astype(np.float32)
        actors[..., :2] *= np.array([30.0, 3.0], np.float32)
        actors[..., 5:7] = 4.5, 2.0
        actors[..., 7:] = 0.0
        out["actors_rig"] = actors
        out["actors_mask"] = np.arange(spec.actors) < random.integers(0, spec.actors + 1, count)[:, None]
    for name, (height, width) in spec.cameras.items():
        shape = (count, spec.frames, height, width, 3)
        out[f"camera_{name}"] = random.integers(0, 256, shape, np.uint8)
        before = np.arange(1 - spec.frames, 1) * spec.frame_step_us
        out[f"camera_{name}_time_us"] = out["time_us"][:, None] + before
        out[f"camera_{name}_frame_id"] = random.integers(1, 2**63, shape[:2]).astype(np.uint64)
    for name, row in spec.carry.items():
        out[f"carry_{name}"] = random.normal(size=(count, *row)).astype(np.float32)
    for name in spec.privileged:
        time_s = np.arange(1, spec.plan_steps + 1) * (spec.plan_step_us * 1e-6)
        plan = np.zeros((count, spec.plan_steps, 3), np.float32)
        plan[..., 0] = speed[:, None] * time_s
        out[name] = plan
        out[f"{name}_mask"] = np.arange(spec.plan_steps) < random.integers(0, spec.plan_steps + 1, count)[:, None]
    return out


def example_series(name: str, ticks: int, seed: int = 0, *, period_us: int = 200_000) -> MeasureSeries:
    """T + 1 samples of a measure, plausible for its name: counts never fall, progress rises within [0, 1].

    The third sample and, of jerk, the first are undefined and hold NaN, except of counts and progress.
    """
    random = generator(seed, len(name), sum(name.encode()))
    valid = np.ones(ticks + 1, bool)
    if name.endswith("_count"):
        value = np.cumsum(np.r_[0, random.integers(0, 3, ticks) // 2]).astype(np.float64)
    elif name == "progress":
        value = np.cumsum(random.uniform(0.0, 1.0 / (ticks + 1), ticks + 1))
    else:
        value = random.normal(0.0, 3.0, ticks + 1)
        valid[2:3] = False
        valid[:1] = name != "jerk_mps3"
    return MeasureSeries(
        2_000_000 + np.arange(ticks + 1) * period_us, np.where(valid, value, np.nan), valid, aggregation="last"
    )


def ticks_of(measures: Mapping[str, MeasureSeries], request: EpisodeRequest | None = None) -> TickBatch:
    """An episode's T ticks as the T rows of one batch: row k holds the measures after tick k + 1 and before."""
    count = len(next(iter(measures.values())).time_us) - 1

    def part(rows: slice) -> Measures:
        return Measures(
            {name: series.value[rows].copy() for name, series in measures.items()},
            {name: series.valid[rows].copy() for name, series in measures.items()},
        )

    return TickBatch(
        slots=np.arange(count),
        requests=[request or EpisodeRequest("example")] * count,
        tick=np.arange(1, count + 1),
        controls=np.ones(count, bool),
        observation={},
        observation_valid=np.zeros(count, bool),
        measures=part(slice(1, None)),
        measures_previous=part(slice(None, -1)),
        labels={},
        ended=np.zeros(count, np.int64),
        failure=[None] * count,
    )


def example_decision(count: int, seed: int = 0, *, plan_steps: int = 64) -> Decision:
    """A decision with every kind of column: factors of which some do not count, a ragged and a plain trace, a carry."""
    random = generator(seed, count)
    lengths = random.integers(0, 4, count)
    tokens = Ragged(random.integers(0, 1000, int(lengths.sum())), np.concatenate([[0], np.cumsum(lengths)]))
    return Decision(
        random.normal(size=(count, plan_steps, 3)).astype(np.float32),
        random.normal(size=(count, 2)).astype(np.float32),
        random.uniform(size=(count, 2)) < 0.8,
        np.full(count, 7, np.int64),
        trace={"tokens": tokens, "latent": random.normal(size=(count, 4)).astype(np.float32)},
        carry={"noise": random.normal(size=(count, 2)).astype(np.float32)},
    )


def example_episode(ticks: int = 5, seed: int = 0) -> Episode:
    """A whole episode of T ticks with every field set."""
    spec = PolicySpec(carry={"noise": (2,)})
    random = generator(seed, ticks)
    terms = {"progress": random.uniform(size=ticks), "collision": -random.uniform(size=ticks)}
    return Episode(
        EpisodeRequest("scene-ä/0", 2_000_000, ticks, 2**64 - 1, seed, 3, 1, 0),
        Ended.HORIZON,
        None,
        {name: example_series(name, ticks, seed) for name in ("collision_count", "progress", "distance_to_gt_m")},
        0.5,
        False,
        observation=example_observation(spec, ticks + 1, seed),
        decisions=example_decision(ticks, seed),
        labels={
            "target_plan_rig": np.zeros((ticks, 64, 3), np.float32),
            "target_plan_rig_mask": np.ones((ticks, 64), bool),
        },
        controls=np.ones(ticks, bool),
        rewards=terms["progress"] + terms["collision"],
        terms=terms,
        sampling=Sampling("sample", 0.9, 0.98),
        receipt=Receipt("c0ffee", "5cene", {"alpagym-runtime": "0.1.0"}, "x86_64 example"),
    )


def example_camera_episode(
    ticks: int = 5, seed: int = 0, *, frames: int = 3, height: int = 24, width: int = 32, jpeg: bool = False
) -> Episode:
    """An episode with a camera `front`: overlapping histories of K frames, of which the first rows lack the oldest.

    With `jpeg`, the pixels are those of JPEGs of half the size again that arrived (`Episode.frames`), scaled down.
    """
    import cv2

    episode, random = example_episode(ticks, seed), generator(seed, 5)
    moments = ticks + 1
    period_us = 200_000
    time_us = 2_000_000 + np.arange(moments, dtype=np.int64) * period_us
    base = random.integers(0, 256, (moments, max(height // 4, 1), max(width // 4, 1), 3), np.uint8)
    pictures = np.stack([cv2.resize(b, (width, height), interpolation=cv2.INTER_CUBIC) for b in base])
    ids = random.integers(1, 2**63, moments).astype(np.uint64)
    arrived = []
    if jpeg:
        for t in range(moments):
            large = cv2.resize(pictures[t], (width * 3 // 2, height * 3 // 2))
            data = cv2.imencode(".jpg", cv2.cvtColor(large, cv2.COLOR_RGB2BGR))[1].tobytes()
            arrived.append(Frame(0, "front", int(time_us[t]), int(ids[t]), "jpeg", data))
            pictures[t] = decode(data, "jpeg", height, width)
    index = np.arange(moments)[:, None] + np.arange(1 - frames, 1)
    oldest = np.maximum(index, 0)
    observation = {
        **episode.observation,
        "time_us": time_us,
        "camera_front": pictures[oldest],
        "camera_front_time_us": time_us[oldest],
        "camera_front_frame_id": np.where(index < 0, np.uint64(0), ids[oldest]),
    }
    return episode.with_arrays(observation=observation, frames=tuple(arrived))


def assert_same(a: Any, b: Any, where: str = "it") -> None:
    """Fail unless two objects of the contract are equal, arrays to the bit and with their types; says where not."""
    if isinstance(a, np.ndarray) and a.dtype != object:
        assert isinstance(b, np.ndarray), f"{where}: array and {type(b).__name__}"
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{where}: {a.dtype} {a.shape} and {b.dtype} {b.shape}"
        assert a.tobytes() == b.tobytes(), f"{where} differs:\n{a}\n{b}"
        return
    assert type(a) is type(b), f"{where}: {type(a).__name__} and {type(b).__name__}"
    if is_dataclass(a):
        for f in fields(a):
            assert_same(getattr(a, f.name), getattr(b, f.name), f"{where}.{f.name}")
    elif isinstance(a, Mapping):
        assert a.keys() == b.keys(), f"{where}: keys {sorted(a)} and {sorted(b)}"
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, (list, tuple, np.ndarray)):
        assert len(a) == len(b), f"{where}: lengths {len(a)} and {len(b)}"
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    elif not (isinstance(a, float) and math.isnan(a) and math.isnan(b)):
        assert a == b, f"{where}: {a!r} and {b!r}"


def finite(array: NDArray[Any]) -> bool:
    """Whether no number is NaN or infinite."""
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())
