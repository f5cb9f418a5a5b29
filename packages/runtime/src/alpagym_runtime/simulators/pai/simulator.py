"""The open-loop world behind the `Simulator` protocol: a sample is shown, one plan is scored, the episode ends.

Nothing is simulated: the observation at the end is the one at the key frame, with the plan's last time. The recording's
reasoning is a label, never a part of the observation.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Sequence
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.errors import ConfigError, CorruptFileError, SceneError
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.base import no_failures, rows_of
from alpagym_runtime.simulators.pai.clips import PaiDataset, Sample, Span
from alpagym_runtime.simulators.pai.codec import TrajectoryCodec
from alpagym_runtime.simulators.pai.completion import bins_of
from alpagym_runtime.simulators.pai.config import LABELS, PaiConfig
from alpagym_runtime.simulators.pai.loader import Loaded, SampleLoader
from alpagym_runtime.simulators.pai.samples import Layout
from alpagym_runtime.simulators.pai.scoring import (
    COMFORT_BOUNDS,
    PREFIXES_S,
    comfort_checks,
    comfort_score,
    corner_distance,
    displacements,
    minimum_displacements,
)
from alpagym_runtime.types import (
    Decision,
    Ended,
    EpisodeRequest,
    Failure,
    Labels,
    Measures,
    MeasureSeries,
    Observation,
    PolicySpec,
    Ragged,
    SimulatorSpec,
    TickBatch,
)

FIELDS = ("ego_history_rig", "ego_dynamics_rig")
MEASURES = (
    "ade_m",
    "ade_m/by_t=3.0",
    "fde_m",
    "min_ade",
    *(f"min_ade/by_t={seconds}" for seconds in PREFIXES_S),
    *(f"min_ade@{seconds}s" for seconds in PREFIXES_S),
    "corner_distance",
    "comfort",
    *(f"comfort/{name}" for name in COMFORT_BOUNDS),
)
"""Displacements in m; `comfort` in [-1, 0], its checks 1 passed or 0 failed."""

IDLE, LOADING, READY, WAITING, SCORED = range(5)


class PaiSimulator:
    """See `types.Simulator`. Samples are decoded by the loader's processes; plans are scored when they are sent."""

    def __init__(
        self,
        config: PaiConfig,
        policy_spec: PolicySpec,
        dataset: DatasetSection,
        slots: int,
        labels: Sequence[str] = (),
    ) -> None:
        self._labels = sorted({*labels, *policy_spec.privileged})
        self._config, self._policy = config, policy_spec
        self._layout = Layout.of(policy_spec)
        _check_policy(config, policy_spec)
        if dataset.source != "pai":
            raise ConfigError(f"the open-loop world reads dataset=pai, got {dataset.source!r}", key="dataset.source")
        unknown = [name for name in self._labels if name not in LABELS]
        if unknown:
            raise ConfigError(f"this world has no label {unknown[0]!r}; it has {', '.join(LABELS)}", key="labels")
        if "cot_utf8" in self._labels and dataset.reasoning is None:
            raise ConfigError(
                "the recording's reasoning is needed, and none is read; set "
                "dataset.reasoning=reasoning/ood_reasoning.parquet and dataset.key_frame=events",
                key="dataset.reasoning",
            )
        layout = self._layout
        # The published sample wants 1.6 s before its key frame, whatever it reads of them.
        span = Span(max(layout.before_us, 1_600_000), layout.after_us)
        self.data = PaiDataset(dataset, span)
        self._samples = self._choose(dataset)
        self.spec = SimulatorSpec(
            closed_loop=False,
            control_period_us=layout.after_us,
            slots=slots,
            scenes=tuple(self._samples),
            measures=dict.fromkeys(MEASURES, "tick"),
            cameras=tuple(name.removeprefix("camera_") for name in self.data.tree.cameras),
        )
        self._codec = TrajectoryCodec()
        longest = max((len(sample.cot.encode()) for sample in self._samples.values()), default=0)
        self._text_bytes = max(longest, 1)
        workers = config.workers if layout.cameras else 0
        self._loader = SampleLoader(
            self.data.tree.root, layout, workers, config.cache_mb, round(config.max_gap_s * 1e6)
        )
        self._requests: list[EpisodeRequest | None] = [None] * slots
        self._failures: list[Failure | None] = no_failures(slots)
        self._sample: list[Sample | None] = [None] * slots
        self._loaded: list[Loaded | None] = [None] * slots
        # Members of a group share the arrays of their sample.
        self._shared: WeakValueDictionary[tuple[str, int], Loaded] = WeakValueDictionary()
        self._phase, self._ended = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self._tick = np.zeros(slots, np.int64)
        self._values = np.zeros((slots, len(MEASURES)))

    # ------------------------------------------------------------ protocol

    def start(self, slots: NDArray[np.int64], requests: Sequence[EpisodeRequest]) -> None:
        """Ask for the samples of slots."""
        for slot, request in zip(rows_of(slots).tolist(), requests, strict=True):
            self._abandon(slot)
            self._requests[slot], self._failures[slot] = request, None
            self._phase[slot], self._ended[slot], self._tick[slot] = LOADING, Ended.RUNNING, 0
            try:
                sample = self._find(request)
            except (SceneError, CorruptFileError) as err:
                self._fail(slot, "INVALID_SCENE", str(err))
                continue
            self._sample[slot] = sample
            self._loader.submit(sample)

    def expect(self, requests: Sequence[EpisodeRequest]) -> None:
        """Requests that will be started, soonest first: their samples are decoded ahead where there is room."""
        samples: dict[tuple[str, int], Sample] = {}
        for request in requests:
            sample = self._samples.get(request.scene_id)
            if sample is not None and request.start_us < 0:
                samples.setdefault((sample.clip_id, sample.t0_us), sample)
        self._loader.expect(list(samples.values()))

    def receive(self, min_ready: int, timeout_s: float) -> TickBatch:
        """Rows whose sample is there, and rows that have been scored."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._collect_samples()
            rows = np.flatnonzero((self._phase == READY) | (self._phase == SCORED))
            left = deadline - time.monotonic()
            if len(rows) >= min(min_ready, int((self._phase != IDLE).sum())) or left <= 0:
                return self._batch(rows)
            if not (self._phase == LOADING).any():
                # All others wait for a decision: nothing can come.
                time.sleep(min(left, timeout_s))
                return self._batch(rows)
            self._loader.wait(min(left, 1.0))

    def send(self, slots: NDArray[np.int64], decisions: Decision, stop: NDArray[np.bool_]) -> None:
        """Score plans; a stopped slot is not scored."""
        rows = rows_of(slots)
        self._phase[rows], self._ended[rows] = SCORED, Ended.SCORED
        going = np.flatnonzero(~np.asarray(stop, bool))
        if len(going):
            self._score(rows[going], decisions.take(going))

    def scene_hash(self, scene_id: str) -> str:
        """Of the clip's files (their sizes and checksums in the zips) and the key frame."""
        sample = self._samples.get(scene_id) or self.data.find(scene_id)
        digest = hashlib.sha256(f"{sample.clip_id} {sample.t0_us} {sample.cot}".encode())
        for feature in ("egomotion", *sorted(self._layout.cameras)):
            zipped = self.data.tree.zip(feature, sample.chunk)
            for name in sorted(zipped.names):
                if name.startswith(sample.clip_id):
                    info = zipped.names[name]
                    digest.update(f"{name} {info.file_size} {info.CRC}".encode())
        return digest.hexdigest()

    def scene_family(self, scene_id: str) -> str:
        """The kind of its reasoning's event; "" without reasoning."""
        sample = self._samples.get(scene_id)
        return sample.cluster if sample else ""

    def close(self) -> None:
        """End the loader's processes; idempotent."""
        self._phase[:] = IDLE
        self._loader.close()
        self.data.close()

    # ------------------------------------------------------------ samples

    def _choose(self, dataset: DatasetSection) -> dict[str, Sample]:
        """The samples by scene id, checked: every file is there and whole."""
        cameras = list(self._layout.cameras)
        for camera in cameras:
            if camera not in self.data.tree.cameras:
                known = ", ".join(name.removeprefix("camera_") for name in self.data.tree.cameras)
                raise ConfigError(f"{self.data.tree.root} has no {camera}; it has {known}", key="policy.cameras")
        if dataset.scene_ids is not None:
            try:
                samples = [self.data.find(scene_id) for scene_id in dataset.scene_ids]
            except SceneError as err:
                raise ConfigError(str(err), key="dataset.scene_ids") from err
            named = dict(zip(dataset.scene_ids, samples, strict=True))
        else:
            named = {sample.scene_id: sample for sample in self.data.samples(dataset.split)}
        aliases = [("egomotion", "egomotion")]
        aliases += [(camera, alias) for camera in cameras for alias in ("video", "frame_timestamps")]
        kept: dict[str, Sample] = {}
        problems: dict[str, None] = {}
        for scene_id, sample in named.items():
            found = self.data.problems_of(sample, aliases)
            problems |= dict.fromkeys(found)
            if not found:
                kept[scene_id] = sample
        self.data.problems = list(problems)
        self.data.dropped["bad files"] = len(named) - len(kept)
        if problems and (not dataset.skip_bad or not kept):
            listed = "\n".join(list(problems)[:8])
            raise ConfigError(
                f"{len(named) - len(kept)} of {len(named)} samples cannot be read, {len(problems)} problems (leave "
                f"them out with dataset.skip_bad=true):\n{listed}",
                key="dataset.path",
            )
        return kept

    def _find(self, request: EpisodeRequest) -> Sample:
        scene_id = request.scene_id
        if request.start_us >= 0:
            scene_id = f"{scene_id.partition('@')[0]}@{request.start_us}"
        return self._samples.get(scene_id) or self.data.find(scene_id)

    def _abandon(self, slot: int) -> None:
        sample = self._sample[slot]
        if self._phase[slot] == LOADING and sample is not None:
            self._loader.release(sample)
        self._sample[slot] = self._loaded[slot] = None

    def _fail(self, slot: int, code: str, text: str) -> None:
        self._phase[slot], self._ended[slot] = SCORED, Ended.FAILED
        self._failures[slot] = Failure("permanent", code, text)

    def _collect_samples(self) -> None:
        for slot in np.flatnonzero(self._phase == LOADING).tolist():
            sample = self._sample[slot]
            assert sample is not None
            key = (sample.clip_id, sample.t0_us)
            shared = self._shared.get(key)
            if shared is not None:
                self._loader.release(sample)
            elif not self._loader.ready(sample):
                continue
            else:
                try:
                    shared = self._loader.take(sample)
                except SceneError as err:
                    self._fail(slot, "UNREADABLE_SAMPLE", str(err))
                    continue
                self._shared[key] = shared
            self._loaded[slot], self._phase[slot] = shared, READY

    # ------------------------------------------------------------ scoring

    def _score(self, rows: NDArray[np.int64], decisions: Decision) -> None:
        loaded = [self._loaded[row] for row in rows.tolist()]
        motions = [item.motion for item in loaded if item is not None]
        target = np.stack([motion.plan_rig for motion in motions]).astype(np.float64)
        height = np.stack([motion.future_rig[:, 2] for motion in motions])
        plan = self._plans(decisions, np.stack([motion.history_rig for motion in motions]))
        plans = plan[:, None]
        distances, checks = displacements(plan, target), comfort_checks(plan)
        step_s = self._layout.plan_step_us * 1e-6
        values = {
            "ade_m": distances.mean(axis=1),
            "ade_m/by_t=3.0": distances[:, : round(3.0 / step_s)].mean(axis=1),
            "fde_m": distances[:, -1],
            **minimum_displacements(plans, target, step_s),
            "corner_distance": corner_distance(plans, target, height),
            "comfort": comfort_score(checks),
            **{f"comfort/{name}": passed.astype(np.float64) for name, passed in checks.items()},
        }
        self._values[rows] = np.stack([values[name] for name in MEASURES], axis=1)
        self._tick[rows] = 1

    def _plans(self, decisions: Decision, history: NDArray[np.float64]) -> NDArray[np.float64]:
        """The plans [n,T,3] that are scored; history [n,H,7]."""
        scored = self._config.scored
        plan = decisions.plan_rig.astype(np.float64)
        if scored == "plan":
            return plan
        w, x, y, z = (history[..., 3 + k] for k in range(4))
        yaw = np.arctan2(2.0 * (w * z + x * y), 1.0 - 2.0 * (y * y + z * z))
        speed = self._codec.initial_speed(history[..., :2], yaw)
        if scored == "round_trip":
            bins = self._codec.encode(history[..., :2], yaw, plan)
        else:
            trace = decisions.trace.get(scored)
            if trace is None:
                there = ", ".join(sorted(decisions.trace)) or "none"
                raise ConfigError(
                    f"{scored!r} needs the policy's trace {scored!r}, and its traces are: {there}; use "
                    "simulator.scored=plan",
                    key="simulator.scored",
                )
            if isinstance(trace, Ragged):
                texts = texts_of(trace)
                bins = np.stack([bins_of(text, self._codec.tokens, self._codec.bins) for text in texts])
            else:
                bins = np.clip(np.asarray(trace, np.int64), 0, self._codec.bins - 1)
        return self._codec.decode(bins, speed)

    # ------------------------------------------------------------ results

    def _batch(self, rows: NDArray[np.int64]) -> TickBatch:
        ended, tick = self._ended[rows].copy(), self._tick[rows].copy()
        well = ended != Ended.FAILED
        self._phase[rows] = np.where(ended == Ended.RUNNING, WAITING, IDLE)
        scored = well & (tick > 0)
        values = np.where(scored[:, None], self._values[rows], 0.0)
        nothing = np.zeros(len(rows), bool)
        batch = TickBatch(
            slots=rows.astype(np.int64),
            requests=[request for request in (self._requests[slot] for slot in rows) if request is not None],
            tick=tick,
            controls=well.copy(),
            observation=self._observe(rows, tick),
            observation_valid=well.copy(),
            measures=Measures(
                {name: values[:, m].copy() for m, name in enumerate(MEASURES)},
                {name: scored.copy() for name in MEASURES},
            ),
            measures_previous=Measures(
                {name: np.zeros(len(rows)) for name in MEASURES}, {name: nothing.copy() for name in MEASURES}
            ),
            labels=self._label(rows),
            ended=ended,
            failure=[self._failures[slot] for slot in rows],
            episode_measures={
                int(i): self._series(int(rows[i])) for i in np.flatnonzero(well & (ended != Ended.RUNNING))
            },
        )
        for slot in rows[ended != Ended.RUNNING].tolist():
            self._sample[slot] = self._loaded[slot] = None
        return batch

    def _series(self, slot: int) -> dict[str, MeasureSeries]:
        sample = self._sample[slot]
        assert sample is not None
        count = int(self._tick[slot]) + 1
        times = sample.t0_us + np.arange(count, dtype=np.int64) * self.spec.control_period_us
        valid = np.arange(count) > 0
        return {
            name: MeasureSeries(times.copy(), np.where(valid, self._values[slot, m], 0.0), valid.copy())
            for m, name in enumerate(MEASURES)
        }

    def _observe(self, rows: NDArray[np.int64], tick: NDArray[np.int64]) -> Observation:
        spec, count, layout = self._policy, len(rows), self._layout
        out: Observation = {"time_us": np.zeros(count, np.int64)}
        if "ego_history_rig" in spec.fields:
            out["ego_history_rig"] = np.zeros((count, spec.history_steps, 7), np.float32)
            out["ego_history_mask"] = np.zeros((count, spec.history_steps), bool)
        if "ego_dynamics_rig" in spec.fields:
            out["ego_dynamics_rig"] = np.zeros((count, 7), np.float32)
        for name, (height, width) in layout.cameras.items():
            out[name] = np.zeros((count, layout.frames, height, width, 3), np.uint8)
            out[f"{name}_time_us"] = np.zeros((count, layout.frames), np.int64)
            out[f"{name}_frame_id"] = np.zeros((count, layout.frames), np.uint64)
        for i, slot in enumerate(rows.tolist()):
            sample, loaded = self._sample[slot], self._loaded[slot]
            if sample is None or loaded is None:
                continue
            out["time_us"][i] = sample.t0_us + tick[i] * self.spec.control_period_us
            if "ego_history_rig" in out:
                out["ego_history_rig"][i], out["ego_history_mask"][i] = loaded.motion.history_rig, True
            if "ego_dynamics_rig" in out:
                out["ego_dynamics_rig"][i] = loaded.motion.dynamics_rig
            for name in layout.cameras:
                out[name][i] = loaded.images[name]
                out[f"{name}_time_us"][i], out[f"{name}_frame_id"][i] = loaded.time_us[name], loaded.frame_id[name]
        return out

    def _label(self, rows: NDArray[np.int64]) -> Labels:
        steps, out = self._layout.plan_steps, Labels()
        for name in self._labels:
            text = name == "cot_utf8"
            shape = (len(rows), self._text_bytes) if text else (len(rows), steps, 3)
            out[name] = np.zeros(shape, np.uint8 if text else np.float32)
            out[f"{name}_mask"] = np.zeros(shape[:2], bool)
        for i, slot in enumerate(rows.tolist()):
            sample, loaded = self._sample[slot], self._loaded[slot]
            if sample is None or loaded is None:
                continue
            for name in self._labels:
                if name != "cot_utf8":
                    out[name][i], out[f"{name}_mask"][i] = loaded.motion.plan_rig, True
                    continue
                data = np.frombuffer(sample.cot.encode(), np.uint8)
                out[name][i, : len(data)], out[f"{name}_mask"][i, : len(data)] = data, True
        return out


def texts_of(trace: Ragged) -> list[str]:
    """The rows of a trace of UTF-8 bytes as text; what is no UTF-8 becomes the replacement character."""
    data, offsets = np.asarray(trace.values, np.uint8).tobytes(), trace.offsets.tolist()
    return [data[a:b].decode(errors="replace") for a, b in itertools.pairwise(offsets)]


def text_trace(texts: Sequence[str]) -> Ragged:
    """Texts as a trace of UTF-8 bytes."""
    parts = [np.frombuffer(text.encode(), np.uint8) for text in texts]
    offsets = np.cumsum([0] + [len(part) for part in parts]).astype(np.int64)
    return Ragged(np.concatenate([*parts, np.zeros(0, np.uint8)]), offsets)


def _check_policy(config: PaiConfig, spec: PolicySpec) -> None:
    missing = [name for name in spec.fields if name not in FIELDS]
    if missing:
        raise ConfigError(
            f"the open-loop world has no {', '.join(missing)}: the dataset records no route, and its labels of road "
            f"users are no observation; it has {', '.join(FIELDS)} and cameras",
            key="policy",
        )
    if spec.plan_step_us != 100_000:
        raise ConfigError(f"plans are scored at 10 Hz, got plan_step_us={spec.plan_step_us}", key="policy")
    shapes = (spec.plan_steps, spec.history_steps, spec.history_step_us)
    if config.scored != "plan" and shapes != (64, 16, 100_000):
        raise ConfigError(
            f"{config.scored!r} goes through tokens: 64 poses from 16 of history, 100000 us apart; the policy has "
            f"{shapes}",
            key="simulator.scored",
        )
