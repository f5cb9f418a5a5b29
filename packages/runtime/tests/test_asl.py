"""AlpaSim's logs: field numbers, cut and foreign files, names of folders, and served rollouts scored again."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpagym_runtime.errors import CorruptFileError
from alpagym_runtime.simulators.alpasim.asl import (
    AslWriter,
    describe,
    kind_of,
    read_asl,
    rollout_path,
    safe_name,
    time_us,
)
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
