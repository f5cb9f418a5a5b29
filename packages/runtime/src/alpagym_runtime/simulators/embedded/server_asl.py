"""Logs of served rollouts in AlpaSim's format, and the measures computed again from one.

The log's frame is the rollout's own (`server_messages`): the recorded rig at the handover.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.errors import CorruptFileError
from alpagym_runtime.simulators.alpasim.asl import EGO, AslWriter, kind_of, planar, rollout_path
from alpagym_runtime.simulators.alpasim.wire import asl_pb2, common_pb2
from alpagym_runtime.simulators.embedded.measures_alpasim import NAMES, Record, Sample, alpasim_measures
from alpagym_runtime.simulators.embedded.scene import KINDS, STEP_US, Scene
from alpagym_runtime.simulators.embedded.server_messages import into_frame, out_of_frame, plan_at_steps
from alpagym_runtime.simulators.embedded.server_rollout import RolloutOptions
from alpagym_runtime.types import MeasureSeries


class AslLog:
    """A served rollout's log below a folder; a retry replaces its predecessor's."""

    def __init__(self, folder: Path, scene_id: str, session_id: str) -> None:
        path = rollout_path(folder, scene_id, session_id)
        if not path.parent.resolve().is_relative_to(folder.resolve()):
            raise OSError(f"{path.parent} leads out of {folder}; remove the symbolic link on the way")
        self._writer = AslWriter(path)

    def begin(self, scene: Scene, session_id: str, frame: NDArray[np.float64], options: RolloutOptions) -> None:
        """See `RolloutLog`."""
        self._writer.write("rollout_metadata", metadata(scene, session_id, frame, options))

    def actors(
        self, time_us: int, ego: NDArray[np.float64], ids: NDArray[np.int64], poses: NDArray[np.float64]
    ) -> None:
        """See `RolloutLog`."""
        self._writer.write("actor_poses", actor_poses(time_us, ego, ids, poses))

    def write(self, kind: str, message: bytes) -> None:
        """See `RolloutLog`."""
        self._writer.write(kind, message)

    def close(self) -> None:
        """See `RolloutLog`."""
        self._writer.close()


def metadata(scene: Scene, session_id: str, frame: NDArray[np.float64], options: RolloutOptions) -> bytes:
    """`RolloutMetadata`, the first entry."""
    out = asl_pb2.RolloutMetadata(force_gt_duration=options.force_gt_duration_us)
    session = out.session_metadata
    session.session_uuid, session.scene_id = session_id, scene.scene_id
    session.n_sim_steps, session.control_timestep_us = options.n_sim_steps, options.control_period_us
    session.render_start_timestamp_us = scene.handover * STEP_US - options.force_gt_duration_us
    out.version_ids.runtime_version.version_id = f"alpagym-world-{version('alpagym-runtime')}"
    boxes = [(EGO, scene.vehicle.length_m, scene.vehicle.width_m, "car")]
    for a, (size, kind) in enumerate(zip(scene.actors.size, scene.actors.kind, strict=True)):
        boxes.append((str(a), float(size[0]), float(size[1]), KINDS[int(kind)]))
    for name, length, width, label in boxes:
        actor = out.actor_definitions.actor_aabb.add(actor_id=name, actor_label=label)
        actor.aabb.size_x, actor.aabb.size_y = length, width
    out.transform_ego_coords_rig_to_aabb.vec.x = scene.vehicle.centre_offset_m
    out.transform_ego_coords_rig_to_aabb.quat.w = 1.0
    for k, pose in enumerate(into_frame(scene.ego_log[:, :3], frame)):
        _set(out.ego_rig_recorded_ground_truth_trajectory.poses.add(timestamp_us=k * STEP_US).pose, pose)
    return out.SerializeToString()


def actor_poses(
    time_us: int, ego_centre: NDArray[np.float64], ids: NDArray[np.int64], poses: NDArray[np.float64]
) -> bytes:
    """`ActorPoses`: centres [K,3] of boxes in the log's frame."""
    out = asl_pb2.ActorPoses(timestamp_us=time_us)
    for name, pose in zip([EGO, *map(str, ids.tolist())], [ego_centre, *poses], strict=True):
        _set(out.actor_poses.add(actor_id=name).actor_pose, pose)
    return out.SerializeToString()


def _set(pose: common_pb2.Pose, planar: NDArray[np.float64]) -> None:
    pose.vec.x, pose.vec.y = float(planar[0]), float(planar[1])
    pose.quat.w, pose.quat.z = math.cos(planar[2] / 2.0), math.sin(planar[2] / 2.0)


def score_again(entries: Iterable[asl_pb2.LogEntry], scene: Scene) -> Mapping[str, MeasureSeries]:
    """AlpaSim's measures of a served rollout, from its log and the scene's map.

    Raises:
        CorruptFileError: the log does not begin with its metadata, is another scene's, or holds no policy step.

    """
    scan = iter(entries)
    first = next(scan, None)
    if first is None or kind_of(first) != "rollout_metadata":
        raise CorruptFileError("the log does not begin with rollout_metadata")
    meta = first.rollout_metadata
    session = meta.session_metadata
    if session.scene_id != scene.scene_id:
        raise CorruptFileError(f"the log is of scene {session.scene_id!r}, not of {scene.scene_id!r}")
    handover_us = session.render_start_timestamp_us + meta.force_gt_duration
    frame = scene.ego_log[handover_us // STEP_US, :3]
    start, period_us = session.render_start_timestamp_us, session.control_timestep_us
    record = Record(
        log=scene.ego_log[:, :3],
        area=scene.area,
        lane_map=scene.lane_map,
        size=(scene.vehicle.length_m, scene.vehicle.width_m),
        centre_offset_m=scene.vehicle.centre_offset_m,
        plan_step_us=STEP_US,
        period_us=period_us,
        logged=([0] if start > 0 else []) + list(range(start, handover_us, period_us)),
    )
    now_us = 0
    for entry in scan:
        kind = kind_of(entry)
        if kind == "driver_ego_trajectory":
            items = entry.driver_ego_trajectory.trajectory.poses
            local = out_of_frame(np.array([planar(item.pose) for item in items]).reshape(-1, 3), frame)
            for item, pose in zip(items, local, strict=True):
                record.ego[item.timestamp_us] = pose
        elif kind == "actor_poses" and entry.actor_poses.timestamp_us >= handover_us:
            _add_sample(record, entry.actor_poses, scene, frame)
        elif kind == "driver_request":
            now_us = entry.driver_request.time_now_us
        elif kind == "driver_return" and entry.driver_return.trajectory.poses:
            _add_plan(record, entry.driver_return.trajectory, now_us, frame)
    if not record.samples:
        raise CorruptFileError("the log holds no step at or after the handover")
    return alpasim_measures(record, NAMES)


def _add_sample(record: Record, poses: asl_pb2.ActorPoses, scene: Scene, frame: NDArray[np.float64]) -> None:
    found = {item.actor_id: planar(item.actor_pose) for item in poses.actor_poses}
    centre = np.array([found.pop(EGO)])
    ids = np.array(sorted(map(int, found)), np.int64)
    local = out_of_frame(np.array([found[str(a)] for a in ids]).reshape(-1, 3), frame)
    record.samples.append(Sample(poses.timestamp_us, ids, local, scene.actors.size[ids]))
    # The driver is not told the last pose; the log has it as the centre of the box.
    rig = out_of_frame(centre, frame)[0]
    rig[:2] -= record.centre_offset_m * np.array([math.cos(rig[2]), math.sin(rig[2])])
    record.ego.setdefault(poses.timestamp_us, rig)


def _add_plan(record: Record, plan: common_pb2.Trajectory, now_us: int, frame: NDArray[np.float64]) -> None:
    times = np.array([item.timestamp_us for item in plan.poses], np.int64)
    poses = np.array([planar(item.pose) for item in plan.poses])
    poses[:, 2] = np.unwrap(poses[:, 2])
    pose = record.ego[now_us]
    rig = into_frame(out_of_frame(poses, frame), pose)
    record.plans.append((now_us, pose, plan_at_steps(times, rig, now_us, STEP_US, 64)))
