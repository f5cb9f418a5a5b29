"""One sample as arrays: pictures at t0 and before, motion around it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.errors import SceneError
from alpagym_runtime.geometry import wrap_angle, yaw_from_quaternion
from alpagym_runtime.simulators.pai.clips import Sample
from alpagym_runtime.simulators.pai.egomotion import EgoLog
from alpagym_runtime.simulators.pai.tree import Tree
from alpagym_runtime.simulators.pai.video import ClipVideo
from alpagym_runtime.types import PolicySpec


@dataclass(frozen=True)
class Layout:
    """What of a sample is wanted; all times relative to t0.

    Attributes:
        cameras: feature name -> (height, width) px; (0, 0) keeps the video's own size.
        frames, frame_step_us: K pictures a camera, oldest first, the last at t0.
        history_steps, history_step_us: H poses up to t0.
        plan_steps, plan_step_us: T poses after t0.

    """

    cameras: dict[str, tuple[int, int]]
    frames: int = 4
    frame_step_us: int = 100_000
    history_steps: int = 16
    history_step_us: int = 100_000
    plan_steps: int = 64
    plan_step_us: int = 100_000

    @staticmethod
    def of(spec: PolicySpec) -> Layout:
        """What a policy reads; its cameras carry the features' names without `camera_`."""
        cameras = {f"camera_{name}": (int(h), int(w)) for name, (h, w) in spec.cameras.items()}
        return Layout(
            cameras,
            spec.frames,
            spec.frame_step_us,
            spec.history_steps,
            spec.history_step_us,
            spec.plan_steps,
            spec.plan_step_us,
        )

    @property
    def before_us(self) -> int:
        """How much of a clip is read before t0."""
        return max((self.history_steps - 1) * self.history_step_us, (self.frames - 1) * self.frame_step_us)

    @property
    def after_us(self) -> int:
        """How much is read after t0."""
        return self.plan_steps * self.plan_step_us


@dataclass(frozen=True)
class Motion:
    """The recorded motion around t0, in the rig frame of t0.

    Attributes:
        history_rig: [H,7] f64 position xyz m, quaternion wxyz; the last row is the identity.
        future_rig: [T,7] f64, likewise.
        dynamics_rig: [7] f64 velocity m/s, acceleration m/s², yaw rate rad/s.

    """

    history_rig: NDArray[np.float64]
    future_rig: NDArray[np.float64]
    dynamics_rig: NDArray[np.float64]

    @property
    def history_yaw(self) -> NDArray[np.float64]:
        """[H] rad."""
        return yaw_from_quaternion(self.history_rig[:, 3:])

    @property
    def plan_rig(self) -> NDArray[np.float32]:
        """[T,3] f32 x m, y m, yaw rad: what was driven."""
        yaw = wrap_angle(yaw_from_quaternion(self.future_rig[:, 3:]))
        return np.concatenate([self.future_rig[:, :2], yaw[:, None]], axis=1).astype(np.float32)


def read_motion(tree: Tree, sample: Sample, layout: Layout, max_gap_us: int = 500_000) -> Motion:
    """A sample's motion.

    Raises:
        SceneError: the log has a gap longer than `max_gap_us` in the span that is read.
        OutOfRangeError: the log does not cover it.

    """
    table = tree.table("egomotion", sample.chunk, sample.clip_id, "egomotion")
    log = EgoLog.from_table(table, f"egomotion of clip {sample.clip_id}")
    t0 = sample.t0_us
    gap = log.longest_gap_us(t0 - layout.before_us, t0 + layout.after_us)
    if gap > max_gap_us:
        raise SceneError(
            f"the egomotion of clip {sample.clip_id} has a gap of {gap} us around {t0} us; at most {max_gap_us} "
            "(simulator.max_gap_s)"
        )
    times = [
        t0 + np.arange(1 - layout.history_steps, 1, dtype=np.int64) * layout.history_step_us,
        t0 + np.arange(1, layout.plan_steps + 1, dtype=np.int64) * layout.plan_step_us,
    ]
    history, future = (log.poses_rig(t0, at) for at in times)
    rows = [np.concatenate([pose.position, pose.quaternion_wxyz], axis=1) for pose in (history, future)]
    rows[0][-1] = [0, 0, 0, 1, 0, 0, 0]
    return Motion(rows[0], rows[1], log.dynamics_rig(t0))


@dataclass(frozen=True)
class Pictures:
    """One camera of a sample.

    Attributes:
        images: [K,h,w,3] u8 RGB, oldest first.
        time_us: [K] i64 of the frames that they are.
        number: [K] i64, their numbers in the video.

    """

    images: NDArray[np.uint8]
    time_us: NDArray[np.int64]
    number: NDArray[np.int64]


def read_pictures(tree: Tree, sample: Sample, camera: str, layout: Layout) -> Pictures:
    """A camera's pictures at t0 - (K - 1) step … t0: the last frame at or before each time.

    Raises:
        OutOfRangeError: a time lies outside the clip's frames.
        CorruptFileError: the zip or the video is not whole.

    """
    video = ClipVideo.open(tree, camera, sample.chunk, sample.clip_id)
    times = sample.t0_us + np.arange(1 - layout.frames, 1, dtype=np.int64) * layout.frame_step_us
    numbers = video.numbers(times)
    size = layout.cameras[camera]
    return Pictures(video.decode(numbers, None if size == (0, 0) else size), video.timestamps_us[numbers], numbers)


def frame_ids(clip_id: str, camera: str, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """[K] u64, never 0: the same frame has the same id in every sample and process."""
    texts = [f"{clip_id}/{camera}/{number}" for number in np.asarray(numbers).tolist()]
    ids = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") or 1 for text in texts]
    return np.array(ids, np.uint64)


def motion_array(motion: Motion) -> NDArray[np.float64]:
    """A motion as one flat array."""
    return np.concatenate([motion.history_rig.reshape(-1), motion.future_rig.reshape(-1), motion.dynamics_rig])


def motion_of(array: NDArray[np.float64], layout: Layout) -> Motion:
    """The inverse of `motion_array`."""
    history, future = 7 * layout.history_steps, 7 * layout.plan_steps
    return Motion(
        array[:history].reshape(-1, 7), array[history : history + future].reshape(-1, 7), array[history + future :]
    )


def part_bytes(layout: Layout) -> dict[str, int]:
    """Bytes of each part of a sample: "" for the motion, then the cameras."""
    sizes = {"": 8 * (7 * layout.history_steps + 7 * layout.plan_steps + 7)}
    return sizes | {name: layout.frames * h * w * 3 for name, (h, w) in layout.cameras.items()}
