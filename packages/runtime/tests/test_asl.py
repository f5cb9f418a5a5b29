"""AlpaSim's logs: field numbers, cut and foreign files, names of folders, and served rollouts scored again."""

from __future__ import annotations

import logging
import math

import av
import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st

from alpagym_runtime.errors import ConfigError, CorruptFileError
from alpagym_runtime.simulators.alpasim.asl import (
    AslWriter,
    describe,
    kind_of,
    read_asl,
    rollout_path,
    safe_name,
    time_us,
)
from alpagym_runtime.simulators.alpasim.asl_export import moments, to_rerun, to_video
from alpagym_runtime.simulators.alpasim.wire import asl_pb2, egodriver_pb2
from alpagym_runtime.simulators.embedded.server_asl import AslLog

SCENE = "procedural-test-000003"
ODD = [
    "../../x",
    "/etc/x",
    "a/b",
    "..",
    ".",
    "",
    "a\0b",
    "con\nid",
    "a" * 300,
    "-rf",
    "%2e%2e",
    "x;touch y",
    "id-" + "0" * 32,
]


def numbers(message):
    return {field.name: field.number for field in message.DESCRIPTOR.fields}


def test_the_fields_have_alpasims_numbers():
    assert numbers(asl_pb2.LogEntry) == {
        "rollout_metadata": 1, "actor_poses": 2, "driver_request": 4, "driver_return": 5, "driver_session_request": 10,
        "driver_camera_image": 11, "driver_ego_trajectory": 12, "egomotion_estimate_error": 16, "route_request": 17,
        "ground_truth_request": 18,
    }  # fmt: skip
    assert numbers(asl_pb2.RolloutMetadata) == {
        "session_metadata": 1, "actor_definitions": 2, "force_gt_duration": 3, "version_ids": 4, "rollout_index": 5,
        "transform_ego_coords_rig_to_aabb": 6, "ego_rig_recorded_ground_truth_trajectory": 7,
    }  # fmt: skip
    assert numbers(asl_pb2.RolloutMetadata.SessionMetadata) == {
        "session_uuid": 1, "scene_id": 2, "batch_size": 3, "n_sim_steps": 4, "start_timestamp_us": 5,
        "control_timestep_us": 6, "nre_runid": 7, "nre_version": 8, "nre_uuid": 9, "render_start_timestamp_us": 10,
    }  # fmt: skip
    assert numbers(asl_pb2.RolloutMetadata.VersionIds) == {
        "runtime_version": 1, "egodriver_version": 2, "sensorsim_version": 3, "physics_version": 4,
        "traffic_version": 5, "controller_version": 6, "video_model_version": 7,
    }  # fmt: skip
    assert numbers(asl_pb2.RolloutMetadata.ActorDefinitions) == {"actor_aabb": 1}
    assert numbers(asl_pb2.RolloutMetadata.ActorDefinitions.ActorAABB) == {"actor_id": 1, "aabb": 2, "actor_label": 3}
    assert numbers(asl_pb2.ActorPoses) == {"timestamp_us": 1, "actor_poses": 2}
    assert numbers(asl_pb2.ActorPoses.ActorPose) == {"actor_id": 1, "actor_pose": 2}


@settings(deadline=None, max_examples=40)
@given(names=st.lists(st.text(min_size=1, max_size=20).filter(lambda text: text < "\ud800"), max_size=5))
def test_what_is_written_is_read(tmp_path_factory, names):
    path = tmp_path_factory.mktemp("asl") / "rollout.asl"
    writer = AslWriter(path)
    for name in names:
        writer.write("driver_request", egodriver_pb2.DriveRequest(session_uuid=name, time_now_us=7).SerializeToString())
    writer.close()
    found = list(read_asl(path))
    assert [entry.driver_request.session_uuid for entry in found] == names
    assert [time_us(entry) for entry in found] == [7] * len(names)


def test_a_cut_log_is_read_up_to_the_cut(tmp_path, caplog):
    path = tmp_path / "rollout.asl"
    writer = AslWriter(path)
    for k in range(3):
        writer.write("driver_request", egodriver_pb2.DriveRequest(time_now_us=k + 1).SerializeToString())
    writer.close()
    whole = path.read_bytes()
    for cut in (1, 5, len(whole) // 3 - 1):
        path.write_bytes(whole[:-cut])
        with caplog.at_level(logging.WARNING):
            assert [time_us(entry) for entry in read_asl(path)] == [1, 2]
        assert "is cut at byte" in caplog.text


@pytest.mark.parametrize("data", [b"PK\x03\x04 a zip file", b"\xff\xff\xff\xff", b"\x00\x00\x00\x03\xff\xff\xff"])
def test_other_files_are_refused_with_their_path(tmp_path, data):
    path = tmp_path / "other.asl"
    path.write_bytes(data)
    with pytest.raises(CorruptFileError, match=r"other\.asl.*no ASL log"):
        list(read_asl(path))


def test_entries_of_other_services_are_kept_as_other(tmp_path):
    # Field 3, render_request: 3 << 3 | 2 = 26, two bytes.
    path = tmp_path / "rollout.asl"
    path.write_bytes(b"\x00\x00\x00\x04" + bytes([26, 2, 8, 1]))
    (entry,) = read_asl(path)
    assert kind_of(entry) == "other"
    assert describe(entry) == "4 bytes"


def test_any_id_is_a_folder_of_its_own_inside(tmp_path):
    paths = {rollout_path(tmp_path, name, "s") for name in [*ODD, SCENE, "SCENE"]}
    assert len(paths) == len(ODD) + 2
    for path in paths:
        assert path.resolve().is_relative_to(tmp_path)
        assert path.parent.parent.parent == tmp_path / "rollouts"
        AslWriter(path).close()
    assert safe_name(SCENE) == SCENE


def test_a_link_that_leads_out_is_not_followed(tmp_path):
    inside, outside = tmp_path / "logs", tmp_path / "outside"
    (inside / "rollouts").mkdir(parents=True)
    outside.mkdir()
    (inside / "rollouts" / SCENE).symlink_to(outside)
    with pytest.raises(OSError, match="leads out"):
        AslLog(inside, SCENE, "session")
    assert not list(outside.iterdir())


# ---------------------------------------------------------------- conversions


def pose_at(x, y, yaw=0.0):
    return {"vec": {"x": x, "y": y}, "quat": {"w": math.cos(yaw / 2), "z": math.sin(yaw / 2)}}


@pytest.fixture
def drive_log(tmp_path):
    """Two decisions 0.2 s apart, turned left by 90 degrees; a car ahead, a picture of 48x96, a route with padding."""
    path = tmp_path / "rollout.asl"
    writer = AslWriter(path)
    meta = asl_pb2.RolloutMetadata()
    box = meta.actor_definitions.actor_aabb.add(actor_id="7", actor_label="car")
    box.aabb.size_x, box.aabb.size_y = 4.0, 2.0
    writer.write("rollout_metadata", meta.SerializeToString())
    before = egodriver_pb2.DriveRequest(time_now_us=1)  # no pose is known yet: nothing to show
    writer.write("driver_request", before.SerializeToString())
    for k in range(2):
        now_us = 1_000_000 + 200_000 * k
        rig = pose_at(10.0, 2.0 * k, math.pi / 2)
        ego = egodriver_pb2.RolloutEgoTrajectory(trajectory={"poses": [{"pose": rig, "timestamp_us": now_us}]})
        writer.write("driver_ego_trajectory", ego.SerializeToString())
        actors = [("EGO", rig), ("7", pose_at(10.0, 20.0, math.pi / 2))]
        poses = asl_pb2.ActorPoses(
            timestamp_us=now_us, actor_poses=[{"actor_id": name, "actor_pose": pose} for name, pose in actors]
        )
        writer.write("actor_poses", poses.SerializeToString())
        points = [{"x": 0.0}, {"x": 5.0}, {"x": math.nan, "y": math.nan}]
        route = egodriver_pb2.RouteRequest(route={"waypoints": points, "timestamp_us": now_us})
        writer.write("route_request", route.SerializeToString())
        picture = simplejpeg.encode_jpeg(np.full((48, 96, 3), (200, 30, 30), np.uint8))
        image = egodriver_pb2.RolloutCameraImage(
            camera_image={"frame_end_us": now_us, "image_bytes": picture, "logical_id": "front"}
        )
        writer.write("driver_camera_image", image.SerializeToString())
        writer.write("driver_request", egodriver_pb2.DriveRequest(time_now_us=now_us).SerializeToString())
        plan = [
            {"pose": pose_at(10.0, 2.0 * k + x, math.pi / 2), "timestamp_us": now_us + j} for j, x in enumerate((0, 3))
        ]
        answer = egodriver_pb2.DriveResponse(trajectory={"poses": plan})
        if k == 0:  # the second call is never answered
            writer.write("driver_return", answer.SerializeToString())
    writer.close()
    return path


def test_a_logs_decisions_are_told_in_the_rig_frame(drive_log):
    first, second = moments(read_asl(drive_log))
    assert (first.time_us, second.time_us) == (1_000_000, 1_200_000)
    # The rig looks along local +y: 3 m of y are 3 m ahead.
    np.testing.assert_allclose(first.plan_rig, [[0, 0, 0], [3, 0, 0]], atol=1e-5)
    assert second.plan_rig is None
    np.testing.assert_allclose(first.row["route_rig"], [[0, 0], [5, 0]], atol=1e-5)
    # The car stands at y = 20: 20 m ahead at first, 18 m after 2 m.
    np.testing.assert_allclose(first.row["actors_rig"][0], [20, 0, 0, 0, 0, 4, 2, 0, 0], atol=1e-5)
    np.testing.assert_allclose(second.row["actors_rig"][0, :2], [18, 0], atol=1e-5)
    np.testing.assert_allclose(second.row["ego_history_rig"], [[-2, 0], [0, 0]], atol=1e-5)


def test_a_logs_video_shows_cameras_and_the_view_from_above_at_the_logs_pace(drive_log, tmp_path):
    assert to_video(read_asl(drive_log), tmp_path / "drive.mp4") == 2
    with av.open(tmp_path / "drive.mp4") as video:
        pictures = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
        assert video.streams.video[0].average_rate == 5  # a picture in 0.2 s
    # The camera is scaled to 480 rows, 960 wide; the view from above has 480.
    assert [picture.shape for picture in pictures] == [(480, 1440, 3)] * 2
    red, green, blue = pictures[0][100:400, 100:800].reshape(-1, 3).mean(axis=0)
    assert red > 180
    assert max(green, blue) < 60


def test_a_log_without_a_decision_makes_no_video(tmp_path):
    path = tmp_path / "rollout.asl"
    AslWriter(path).close()
    with pytest.raises(ConfigError, match="no call of drive"):
        to_video(read_asl(path), tmp_path / "drive.mp4")
    assert not (tmp_path / "drive.mp4").exists()


def test_a_log_becomes_a_rerun_recording(drive_log, tmp_path):
    pytest.importorskip("rerun", reason="uv sync --all-packages --extra rerun")
    assert to_rerun(read_asl(drive_log), tmp_path / "drive.rrd") == 2
    assert (tmp_path / "drive.rrd").stat().st_size > 1000
