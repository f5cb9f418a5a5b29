"""Cameras beside the simulator: which frames a policy sees now, rendered once and kept as long as it sees them.

A camera takes frame k at k · `period_us` of the scene's clock. Of these only the frames that an observation shows are
rendered, when it is made. Frames before the first tick show the recording.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from alpagym_runtime.simulators.embedded.camera_config import BRAKES_MPS2, STEP_US, CamerasConfig, check_cameras
from alpagym_runtime.simulators.embedded.rendering.frame_ids import frame_ids
from alpagym_runtime.simulators.embedded.rendering.rays import mounted
from alpagym_runtime.simulators.embedded.rendering.renderer import Eye, Jobs, Renderer
from alpagym_runtime.simulators.embedded.rendering.scenery import STORE, Scenery
from alpagym_runtime.simulators.embedded.scene import Scene
from alpagym_runtime.simulators.embedded.state import Slots
from alpagym_runtime.types import Frame, Observation, PolicySpec

Int = NDArray[np.int64]

NEVER = -(10**9)
STANDS_MPS = 0.2
JPEG_QUALITY = 95


class _Camera:
    """One camera's frames: pictures [N,F,h,w,3] by slot, with their steps and ids."""

    def __init__(self, eye: Eye, period: int, slots: int, frames: int) -> None:
        self.eye, self.period = eye, period
        self.pictures = np.zeros((slots, frames, eye.height, eye.width, 3), np.uint8)
        self.steps = np.full((slots, frames), NEVER, np.int64)
        self.ids = np.zeros((slots, frames), np.uint64)


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
        self._count, self._step = spec.frames, spec.frame_step_us // STEP_US
        self._cameras: dict[str, _Camera] = {}
        for name, (height, width) in spec.cameras.items():
            mount = config.mount(name)
            eye = Eye(mounted(name, mount, (height, width)), height, width, config.antialias)
            self._cameras[name] = _Camera(eye, mount.period_us // STEP_US, slots, spec.frames)
        self._renderer = Renderer(config.threads)
        slowest = max(camera.period for camera in self._cameras.values())
        # Where everybody was at the last steps, by step modulo the ring's length.
        self._ring = (self._count - 1) * self._step + slowest + 2
        self._known = np.full((slots, self._ring), NEVER, np.int64)
        self._actors = np.zeros((slots, self._ring, 8, 5))
        self._present = np.zeros((slots, self._ring, 8), bool)
        self._fresh = np.ones(slots, bool)
        self._sceneries: dict[tuple[int, float], Scenery] = {}
        self._texels = {camera.eye.texel_m for camera in self._cameras.values()}

    @property
    def names(self) -> tuple[str, ...]:
        """The cameras."""
        return tuple(self._cameras)

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
        for name, camera in self._cameras.items():
            wanted = self._wanted(slots, rows, camera)
            steps, old = self._choose(rows, wanted, camera)
            places, slot, step = _assign(camera.steps, rows, steps)
            self._render(camera, slots, slot, step, places[1])
            files = self._encode(camera, slot, places[1]) if self._config.encoding == "jpeg95" else []
            if self._files_only:
                known = zip(slot.tolist(), step.tolist(), files, strict=True)
                frames += [Frame(row, name, at * STEP_US, 0, "jpeg", data) for row, at, data in known]
                continue
            ids = camera.ids[slot, places[1]] = frame_ids(camera.pictures, slot, places[1])
            for data, row, at, number in zip(files, slot.tolist(), step.tolist(), ids.tolist(), strict=False):
                frames.append(Frame(row, name, at * STEP_US, number, "jpeg", data))
            out[f"camera_{name}"] = camera.pictures[rows[:, None], places[0]]
            out[f"camera_{name}_time_us"] = steps * STEP_US
            out[f"camera_{name}_frame_id"] = np.where(old, np.uint64(0), camera.ids[rows[:, None], places[0]])
        return out, tuple(frames)

    def close(self) -> None:
        """End the threads."""
        self._renderer.close()

    # ------------------------------------------------------------

    def _wanted(self, slots: Slots, rows: Int, camera: _Camera) -> Int:
        """[n,K] steps of the frames at or before the times that the policy asks for, oldest first."""
        back = np.arange(self._count - 1, -1, -1) * self._step
        return (slots.step[rows][:, None] - back) // camera.period * camera.period

    def _choose(self, rows: Int, wanted: Int, camera: _Camera) -> tuple[Int, NDArray[np.bool_]]:
        """[n,K] steps that can be shown, and where a frame stands in for an older one."""
        known = self._known[rows]
        usable = (known >= 0) & (known % camera.period == 0)
        before = np.where(usable[:, None, :] & (known[:, None, :] <= wanted[..., None]), known[:, None, :], NEVER).max(
            -1
        )
        oldest = np.where(usable, known, 10**9).min(axis=1)[:, None]
        old = before < 0
        return np.where(old, np.minimum(oldest, 10**9 - 1), before), old

    def _remember(self, slots: Slots, rows: Int) -> None:
        """Keep where everybody is now and was a step ago; at an episode's start, in the recording before it."""
        count = 1 + int(np.flatnonzero(slots.present[rows].any(axis=0)).max(initial=-1))
        for row in rows[self._fresh[rows]].tolist():
            count = max(count, len(self._scene_of(row).actors.first))
        if count > self._actors.shape[2]:
            more = 2 * count - self._actors.shape[2]
            self._actors = np.pad(self._actors, ((0, 0), (0, 0), (0, more), (0, 0)))
            self._present = np.pad(self._present, ((0, 0), (0, 0), (0, more)))
        for row in rows[self._fresh[rows]].tolist():
            self._begin(slots, row)
        now = slots.step[rows]
        count = min(self._actors.shape[2], slots.present.shape[1])
        actors, before = slots.actors[rows, :count, :4], slots.actors_before[rows, :count]
        present = slots.present[rows, :count]
        slower = (before[..., 3] - actors[..., 3]) * (1e6 / STEP_US) > BRAKES_MPS2
        earlier = now - 1
        missing = (earlier >= slots.start[rows]) & (self._known[rows, earlier % self._ring] != earlier)
        if missing.any():
            was = present & ~np.isnan(before[..., 0])
            self._keep(rows[missing], earlier[missing], before[missing], was[missing], slower[missing])
        standing = (actors[..., 3] < STANDS_MPS) & self._braked(rows, earlier, count)
        self._keep(rows, now, actors, present, slower | standing)

    def _braked(self, rows: Int, steps: Int, count: int) -> NDArray[np.bool_]:
        """Whether each road user's brake lamps shone at a step."""
        lit: NDArray[np.bool_] = self._actors[rows, steps % self._ring, :count, 4] > 0.0
        return lit & (self._known[rows, steps % self._ring] == steps)[:, None]

    def _keep(self, rows: Int, steps: Int, actors: Any, present: NDArray[np.bool_], braking: NDArray[np.bool_]) -> None:
        at, count = steps % self._ring, present.shape[1]
        self._known[rows, at] = steps
        self._present[rows, at] = False
        self._present[rows, at, :count] = present
        self._actors[rows, at, :count, :4] = np.where(present[..., None], actors, 0.0)
        self._actors[rows, at, :count, 4] = braking

    def _begin(self, slots: Slots, row: int) -> None:
        """Forget the last episode; recall the recording before the slot's first tick."""
        self._fresh[row] = False
        self._known[row] = NEVER
        for camera in self._cameras.values():
            camera.steps[row] = NEVER
        for key in [key for key in self._sceneries if key[0] == row]:
            del self._sceneries[key]
        scene, start = self._scene_of(row), int(slots.step[row])
        for texel in self._texels:
            limit = self._config.memory_mb << 20
            self._sceneries[row, texel] = STORE.get(scene, texel, self._config.weather, limit)
        actors = scene.actors
        count, last = len(actors.first), actors.tracks.shape[1] - 1
        braking = np.zeros((1, count), bool)
        first = max(start - self._ring + 1, 0)
        for step in range(first, start):
            there = ((actors.first <= step) & (step <= actors.last))[None]
            now, before = actors.tracks[None, :, min(step, last)], actors.tracks[None, :, max(min(step, last) - 1, 0)]
            slower = (before[..., 3] - now[..., 3]) * (1e6 / STEP_US) > BRAKES_MPS2
            braking = slower | (braking & (now[..., 3] < STANDS_MPS))
            self._keep(np.array([row]), np.array([step]), now, there, braking)

    def _render(self, camera: _Camera, slots: Slots, slot: Int, step: Int, place: Int) -> None:
        if not len(slot):
            return
        frames = camera.pictures.shape[1]
        out = camera.pictures.reshape(-1, *camera.pictures.shape[2:])
        groups = []
        at = step % self._ring
        scenes = slots.scene[slot]
        for number in np.unique(scenes):
            chosen = np.flatnonzero(scenes == number)
            who = slot[chosen]
            scene = self._scene_of(int(who[0]))
            count = len(scene.actors.first)
            jobs = Jobs(
                who * frames + place[chosen],
                np.ascontiguousarray(slots.trail[who, step[chosen], :3]),
                (step[chosen] * (STEP_US * 1e-6)).astype(np.float64),
                np.ascontiguousarray(self._actors[who, at[chosen], :count]),
                np.ascontiguousarray(self._present[who, at[chosen], :count]),
            )
            groups.append((scene, self._sceneries[int(who[0]), camera.eye.texel_m], jobs))
        self._renderer.draw(camera.eye, groups, out)

    def _encode(self, camera: _Camera, slot: Int, place: Int) -> list[bytes]:
        """JPEGs of new pictures, which are replaced by what the JPEGs show if anybody looks at them here."""
        files = []
        for row, k in zip(slot.tolist(), place.tolist(), strict=True):
            picture = camera.pictures[row, k]
            files.append(simplejpeg.encode_jpeg(picture, JPEG_QUALITY, "RGB", "420"))
            if not self._files_only:
                simplejpeg.decode_jpeg(files[-1], "RGB", buffer=picture)
        return files


def _assign(held: Int, rows: Int, steps: Int) -> tuple[tuple[Int, Int], Int, Int]:
    """Places for frames: ([n,K] of each row's frames, [j] of new ones), slots [j] and steps [j] of the new ones.

    A frame that is held stays where it is; a new one takes the place of one that is not wanted any more.
    """
    places = np.zeros(steps.shape, np.int64)
    slots: list[Int] = []
    news: list[Int] = []
    targets: list[Int] = []
    for k in range(steps.shape[1]):
        mine = held[rows]
        same = mine == steps[:, k : k + 1]
        have = same.any(axis=1)
        wanted = (mine[:, :, None] == steps[:, None, :]).any(axis=2)
        places[:, k] = np.where(have, same.argmax(axis=1), wanted.argmin(axis=1))
        new = np.flatnonzero(~have)
        held[rows[new], places[new, k]] = steps[new, k]
        slots.append(rows[new])
        news.append(steps[new, k])
        targets.append(places[new, k])
    return (places, np.concatenate(targets)), np.concatenate(slots), np.concatenate(news)
