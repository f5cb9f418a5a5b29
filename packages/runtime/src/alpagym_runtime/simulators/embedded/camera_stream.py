"""Cameras beside the simulator: which frames a policy sees now, rendered once and kept as long as it sees them.

A camera takes frame k at k · `period_us` of the scene's clock. Of these only the frames that an observation shows are
rendered, when it is made. Frames before the first tick show the recording.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from alpagym_runtime.pictures import frame_id
from alpagym_runtime.simulators.embedded.camera_config import BRAKES_MPS2, STEP_US, CamerasConfig, check_cameras
from alpagym_runtime.simulators.embedded.camera_memory import (
    NEVER,
    STANDS_MPS,
    STEPS_A_SECOND,
    choose,
    empty_ring,
    remember,
)
from alpagym_runtime.simulators.embedded.rendering.jpeg import QUALITY, Coder
from alpagym_runtime.simulators.embedded.rendering.rays import mounted
from alpagym_runtime.simulators.embedded.rendering.renderer import Eye, Jobs, Renderer
from alpagym_runtime.simulators.embedded.rendering.scenery import STORE, Scenery
from alpagym_runtime.simulators.embedded.scene import Scene
from alpagym_runtime.simulators.embedded.state import Slots
from alpagym_runtime.types import Frame, Observation, PolicySpec

Int = NDArray[np.int64]


class _Camera:
    """One camera's pictures [N,F,h,w,3] by slot and place, and their ids [N,F]; no pictures if none are kept."""

    def __init__(self, eye: Eye, slots: int, frames: int, *, kept: bool, coded: bool) -> None:
        self.eye = eye
        self.coder = Coder(eye.height, eye.width) if coded else None
        self.pictures = np.zeros((slots if kept else 0, frames, eye.height, eye.width, 3), np.uint8)
        self.ids = np.zeros((slots, frames), np.uint64)


class _Shutter:
    """Cameras that take their frames at the same times, every `period` steps: `held` [N,F] are those that are kept.

    `passing`: each observation shows one frame, of the present step, so that pictures are drawn in the receiver's array
    and not kept. Where a slot is seen twice at one step, its picture is drawn again.
    """

    def __init__(self, period: int, slots: int, frames: int, *, files_only: bool) -> None:
        self.period = period
        self.passing = frames == period == 1 and not files_only
        self.cameras: dict[str, _Camera] = {}
        self.held = np.full((slots, frames), NEVER, np.int64)


class CameraStream:
    """See the module's text.

    Args:
        config: mounts, encoding, weather.
        spec: which cameras and how many frames.
        slots: of the simulator.
        scene_of: the scene that a slot drives.
        files_only: for who sends pictures on and looks at none: no fields, only frames, their ids 0; jpeg95 only.

    Raises:
        ConfigError: an unknown camera, a size that cannot be rendered, frames off the world's grid.

    """

    def __init__(
        self,
        config: CamerasConfig,
        spec: PolicySpec,
        slots: int,
        scene_of: Callable[[int], Scene],
        *,
        files_only: bool = False,
    ) -> None:
        assert config.encoding == "jpeg95" or not files_only
        self._config, self._scene_of, self._files_only = config, scene_of, files_only
        check_cameras(config, spec)
        frames, step = spec.frames, spec.frame_step_us // STEP_US
        self._back = np.arange(frames - 1, -1, -1) * step
        shutters: dict[int, _Shutter] = {}
        for name, (height, width) in spec.cameras.items():
            mount = config.mount(name)
            eye = Eye(mounted(name, mount, (height, width)), height, width, config.antialias)
            period = mount.period_us // STEP_US
            shutter = shutters.setdefault(period, _Shutter(period, slots, frames, files_only=files_only))
            coded = config.encoding == "jpeg95" and not files_only
            shutter.cameras[name] = _Camera(eye, slots, frames, kept=not shutter.passing, coded=coded)
        self._shutters = tuple(shutters.values())
        self._names = tuple(spec.cameras)
        self._renderer = Renderer(config.threads)
        # Where everybody was at the last steps, by step modulo the ring's length.
        self._ring = (frames - 1) * step + max(shutters) + 2
        self._known, self._crowd, self._there = empty_ring(slots, self._ring, 8)
        self._fresh = np.ones(slots, bool)
        self._sceneries: dict[tuple[int, float], Scenery] = {}
        self._texels = {camera.eye.texel_m for shutter in self._shutters for camera in shutter.cameras.values()}

    @property
    def names(self) -> tuple[str, ...]:
        """The cameras."""
        return self._names

    @property
    def quads(self) -> int:
        """Quads drawn so far; for benchmarks."""
        return self._renderer.quads

    def start(self, rows: Int) -> None:
        """Episodes begin anew in these slots."""
        self._fresh[rows] = True

    def observe(self, slots: Slots, rows: Int) -> tuple[Observation, tuple[Frame, ...]]:
        """camera_<name> [n,K,h,w,3] u8 with _time_us and _frame_id [n,K] of every camera, and newly encoded frames."""
        self._remember(slots, rows)
        out: Observation = {}
        frames: list[Frame] = []
        size = len(rows), len(self._back)
        for shutter in self._shutters:
            steps, places, old = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, bool)
            new = np.empty((size[0] * size[1], 3), np.int64)
            count = choose(
                rows, slots.step, self._back, shutter.period, self._known, shutter.held, steps, places, old, new
            )
            slot, place, step = np.ascontiguousarray(new[:count].T)
            newly = {*slot.tolist()}
            if shutter.passing:
                slot, place, step = rows, places[:, 0], steps[:, 0]
            to = np.arange(size[0]) if shutter.passing else slot * size[1] + place
            jobs = self._jobs(slots, slot, step, to)
            for name, camera in shutter.cameras.items():
                eye = camera.eye
                shape = eye.height, eye.width, 3
                kept = np.empty((*size, *shape), np.uint8) if shutter.passing else camera.pictures
                drawn = kept.reshape(-1, *shape)
                self._renderer.draw(eye, [(self._sceneries[row, eye.texel_m], part) for row, part in jobs], drawn)
                pictures = [drawn[k] for k in to.tolist()]
                if self._files_only:
                    files = [simplejpeg.encode_jpeg(picture, QUALITY, "RGB", "420") for picture in pictures]
                    known = zip(slot.tolist(), step.tolist(), files, strict=True)
                    frames += [Frame(row, name, at * STEP_US, 0, "jpeg", data) for row, at, data in known]
                    continue
                files = [] if camera.coder is None else [camera.coder.code(picture) for picture in pictures]
                # Of a JPEG's bytes, as who receives them has it; of raw pixels otherwise.
                ids = np.array([frame_id(one) for one in files or (one.data for one in pictures)], np.uint64)
                for data, row, at, number in zip(files, slot.tolist(), step.tolist(), ids.tolist(), strict=False):
                    if row in newly:
                        frames.append(Frame(row, name, at * STEP_US, number, "jpeg", data))
                if shutter.passing:
                    seen, numbers = kept, ids[:, None]
                else:
                    camera.ids[slot, place] = ids
                    seen = kept[rows[:, None], places]
                    numbers = np.where(old, np.uint64(0), camera.ids[rows[:, None], places])
                out[f"camera_{name}"] = seen
                out[f"camera_{name}_time_us"] = steps * STEP_US
                out[f"camera_{name}_frame_id"] = numbers
        return out, tuple(frames)

    def close(self) -> None:
        """End the threads."""
        self._renderer.close()

    # ------------------------------------------------------------

    def _remember(self, slots: Slots, rows: Int) -> None:
        """Keep where everybody is now and was a step ago; at an episode's start, in the recording before it."""
        more = slots.present.shape[1] - self._there.shape[2]
        if more > 0:
            self._crowd = np.pad(self._crowd, ((0, 0), (0, 0), (0, more), (0, 0)))
            self._there = np.pad(self._there, ((0, 0), (0, 0), (0, more)))
        for row in rows[self._fresh[rows]].tolist():
            self._begin(slots, row)
        remember(
            rows, slots.step, slots.start, slots.actors, slots.actors_before, slots.present, self._known, self._crowd,
            self._there,
        )  # fmt: skip

    def _begin(self, slots: Slots, row: int) -> None:
        """Forget the last episode; recall the recording before the slot's first tick."""
        self._fresh[row] = False
        self._known[row] = NEVER
        for shutter in self._shutters:
            shutter.held[row] = NEVER
        for key in [key for key in self._sceneries if key[0] == row]:
            del self._sceneries[key]
        scene, start = self._scene_of(row), int(slots.step[row])
        for texel in self._texels:
            limit = self._config.memory_mb << 20
            self._sceneries[row, texel] = STORE.get(scene, texel, self._config.weather, limit)
        actors = scene.actors
        count, last = len(actors.first), actors.tracks.shape[1] - 1
        braking = np.zeros(count, bool)
        for step in range(max(start - self._ring + 1, 0), start):
            at, there = step % self._ring, (actors.first <= step) & (step <= actors.last)
            now, before = actors.tracks[:, min(step, last), :4], actors.tracks[:, max(min(step, last) - 1, 0), 3]
            slower = (before - now[:, 3]) * STEPS_A_SECOND > BRAKES_MPS2
            braking = slower | (braking & (now[:, 3] < STANDS_MPS))
            self._known[row, at] = step
            self._there[row, at] = False
            self._there[row, at, :count] = there
            self._crowd[row, at, :count, :4] = np.where(there[:, None], now, 0.0)
            self._crowd[row, at, :count, 4] = braking

    def _jobs(self, slots: Slots, slot: Int, step: Int, to: Int) -> list[tuple[int, Jobs]]:
        """Slots' frames to render to places `to`, a group a scene; with one of the slots that drive it."""
        if len(slot) == 1:
            # Views: for one picture of a small camera, indexing by arrays is a twentieth of a step.
            [row], [now] = slot.tolist(), step.tolist()
            when, count = now % self._ring, len(self._scene_of(row).actors.first)
            ring = self._crowd[row, when : when + 1, :count], self._there[row, when : when + 1, :count]
            return [(row, Jobs(to, slots.trail[row, now : now + 1, :3], np.array([now * (STEP_US * 1e-6)]), *ring))]
        scenes, at = slots.scene[slot], step % self._ring
        jobs = []
        for number in np.unique(scenes):
            chosen = np.flatnonzero(scenes == number)
            who, when = slot[chosen], at[chosen]
            row = int(who[0])
            count = len(self._scene_of(row).actors.first)
            part = Jobs(
                to[chosen],
                slots.trail[who, step[chosen], :3],
                step[chosen].astype(np.float64) * (STEP_US * 1e-6),
                self._crowd[who, when, :count],
                self._there[who, when, :count],
            )
            jobs.append((row, part))
        return jobs
