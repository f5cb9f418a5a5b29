"""Our text of the wire is AlpaSim's wire: numbers, types and paths, beside another copy of it in this process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from carla_driver_interface._proto import common_pb2 as their_common
from carla_driver_interface._proto import egodriver_pb2 as their_egodriver
from carla_driver_interface._proto import egodriver_pb2_grpc as their_service
from carla_driver_interface._proto import sensorsim_pb2 as their_sensorsim
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from alpagym_runtime.simulators.alpasim import services
from alpagym_runtime.simulators.alpasim.image_message import read_image
from alpagym_runtime.simulators.alpasim.replies import TERMINATE, drive_replies, plan_in_local, varint
from alpagym_runtime.simulators.alpasim.trajectories import read_poses
from alpagym_runtime.simulators.alpasim.wire import common_pb2, egodriver_pb2, runtime_pb2, sensorsim_pb2

ROOT = Path(__file__).parents[3]


def field_table(descriptor):
    """Name -> number, type, repeated, presence, and the other message's short name."""
    out = {}
    for field in descriptor.fields:
        inner = field.message_type.name if field.message_type else field.enum_type.name if field.enum_type else ""
        out[field.name] = (field.number, field.type, field.is_repeated, field.has_presence, inner)
    return out


def messages_of(file_descriptor):
    stack = list(file_descriptor.message_types_by_name.values())
    while stack:
        message = stack.pop()
        yield message.full_name.removeprefix(file_descriptor.package + "."), message
        stack += list(message.nested_types)


PAIRS = [(common_pb2, their_common), (egodriver_pb2, their_egodriver), (sensorsim_pb2, their_sensorsim)]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=["common", "egodriver", "sensorsim"])
def test_every_field_has_alpasims_number_and_type(ours, theirs):
    known = dict(messages_of(theirs.DESCRIPTOR))
    mine = dict(messages_of(ours.DESCRIPTOR))
    assert mine
    for name, message in mine.items():
        assert field_table(message) == field_table(known[name]), name
        for enum in message.enum_types:
            theirs_enum = known[name].enum_types_by_name[enum.name]
            assert sorted(v.number for v in enum.values) == sorted(v.number for v in theirs_enum.values)
    if ours is not sensorsim_pb2:  # of the renderer's file a driver needs the cameras only
        assert mine.keys() == known.keys()


RUNTIME = {
    "RolloutSpec": "scenario_id 1 string, nr_rollouts 2 uint32, session_uuids 3 string*",
    "SimulationRequest": "available_drivers 1 DriverAddress*, rollout_specs 2 RolloutSpec*, "
    "n_concurrent_per_driver 3 uint32",
    "SimulationRequest.DriverAddress": "ip 1 string, port 2 uint32",
    "SceneMetadata": "version_string 1 string, training_date 2 string, dataset_hash 3 string, uuid 4 string, "
    "camera_ids 5 string*, lidar_ids 6 string*, start_time_us 7 fixed64, end_time_us 8 fixed64",
    "SceneInfo": "scene_id 1 string, provider_kind 2 string, metadata 3 SceneMetadata",
    "ServiceCapacity": "service_name 1 string, total_capacity 2 uint32, skipped 3 bool",
    "RuntimeInfo": "max_supported_concurrent_rollouts 1 uint32, nr_workers 2 uint32, renderer_type 3 string, "
    "scenes 4 SceneInfo*, service_capacities 5 ServiceCapacity*, runtime_version 6 VersionId, nre_version 7 VersionId, "
    "physics_version 8 VersionId, driver_version 9 VersionId, traffic_version 10 VersionId, "
    "video_model_version 11 VersionId",
    "SimulationReturn": "runtime_version 1 VersionId, nre_version 2 VersionId, physics_version 3 VersionId, "
    "driver_version 4 VersionId, traffic_version 5 VersionId, rollout_returns 6 RolloutReturn*, "
    "video_model_version 7 VersionId",
    "SimulationReturn.TimestepMetric": "name 1 string, timestamps_us 2 fixed64*, values 3 double*, valid 4 bool*, "
    "time_aggregation 5 TimeAggregation",
    "SimulationReturn.RolloutReturn": "rollout_spec 1 RolloutSpec, success 2 bool, rollout_uuid 3 string, "
    "error 4 string, timestep_metrics 5 TimestepMetric*, aggregated_metrics 6 AggregatedMetricsEntry*, "
    "error_code 7 RolloutErrorCode",
    "SimulationReturn.RolloutReturn.AggregatedMetricsEntry": "key 1 string, value 2 double",
}


def test_the_runtime_file_has_alpasims_numbers_and_types():
    found = {}
    for name, message in messages_of(runtime_pb2.DESCRIPTOR):
        parts = []
        for f in sorted(message.fields, key=lambda f: f.number):
            kinds = {f.TYPE_STRING: "string", f.TYPE_UINT32: "uint32", f.TYPE_FIXED64: "fixed64", f.TYPE_BOOL: "bool"}
            inner = f.message_type or f.enum_type
            kind = inner.name if inner else {**kinds, f.TYPE_DOUBLE: "double"}[f.type]
            parts.append(f"{f.name} {f.number} {kind}{'*' if f.is_repeated else ''}")
        found[name] = ", ".join(parts)
    assert found == RUNTIME
    aggregations = [f"{v.name}={v.number}" for v in runtime_pb2.TimeAggregation.DESCRIPTOR.values]
    assert [text.rpartition("_")[2] for text in aggregations] == [
        "UNSPECIFIED=0", "MEAN=1", "MEDIAN=2", "MAX=3", "MIN=4", "LAST=5",
    ]  # fmt: skip
    codes = {
        v.name.removeprefix("ROLLOUT_ERROR_CODE_"): v.number for v in runtime_pb2.RolloutErrorCode.DESCRIPTOR.values
    }
    assert codes == {"NONE": 0, "UNSPECIFIED": 1, "INVALID_SCENE": 2}


def test_the_paths_are_alpasims():
    text = Path(their_service.__file__).read_text()
    for method in (
        "start_session", "close_session", "submit_image_observation", "submit_egomotion_observation", "submit_route",
        "submit_recording_ground_truth", "drive", "get_version",
    ):  # fmt: skip
        assert f"'{services.path(services.EGODRIVER, method)}'" in text
    assert services.path(services.RUNTIME, "simulate") == "/RuntimeService/simulate"


def test_both_copies_live_in_one_process_and_read_each_other():
    mine = egodriver_pb2.DriveSessionRequest(session_uuid="a", random_seed=2**63)
    mine.debug_info.scene_id = "clip"
    camera = mine.rollout_spec.vehicle.available_cameras.add(logical_id="front")
    camera.intrinsics.ftheta_param.angle_to_pixeldist_poly.extend([0.0, 900.0])
    theirs = their_egodriver.DriveSessionRequest.FromString(mine.SerializeToString())
    assert theirs.random_seed == 2**63
    cameras = theirs.rollout_spec.vehicle.available_cameras
    assert list(cameras[0].intrinsics.ftheta_param.angle_to_pixeldist_poly) == [0.0, 900.0]
    assert egodriver_pb2.DriveSessionRequest.FromString(theirs.SerializeToString()) == mine


coordinates = st.floats(-1e3, 1e3, width=32)


@settings(deadline=None)  # the first example compiles
@given(
    plan=st.lists(st.tuples(coordinates, coordinates, st.floats(-3.0, 3.0, width=32)), min_size=1, max_size=70),
    yaw=st.floats(-3.0, 3.0),
    now_us=st.integers(0, 2**62),
    samples=st.booleans(),
)
def test_replies_are_what_the_messages_would_be(plan, yaw, now_us, samples):
    plan_rig = np.array([plan], np.float32)
    pose = np.array([[5.0, -3.0, 1.0, np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)]])
    (data,) = drive_replies(plan_rig, pose, np.array([now_us]), 100_000, samples)
    answer = their_egodriver.DriveResponse.FromString(data)
    expected = plan_in_local(plan_rig, pose)[0].tolist()
    assert not answer.terminate_session
    assert len(answer.debug_info.sampled_trajectories) == samples
    for trajectory in (answer.trajectory, *answer.debug_info.sampled_trajectories):
        assert [item.timestamp_us for item in trajectory.poses] == [now_us + 100_000 * k for k in range(len(plan) + 1)]
        poses = [(p.pose.vec, p.pose.quat) for p in trajectory.poses]
        assert [[v.x, v.y, v.z, q.w, q.x, q.y, q.z] for v, q in poses] == expected


_NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -2.5, float("nan"), float("inf")]) | st.floats(width=32)
_POSES = st.tuples(st.integers(0, 2**64 - 1), st.lists(_NUMBERS, min_size=7, max_size=7), st.booleans())


@given(poses=st.lists(_POSES, max_size=5), extra=st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_poses_are_read_as_the_messages_have_them(poses, extra):
    theirs = their_common.Trajectory()
    for time_us, (x, y, z, qw, qx, qy, qz), whole in poses:
        item = theirs.poses.add(timestamp_us=time_us)
        if whole:
            item.pose.quat.CopyFrom(their_common.Quat(w=qw, x=qx, y=qy, z=qz))
        item.pose.vec.CopyFrom(their_common.Vec3(x=x, y=y, z=z))
    # Field 9 is in no contract; a field's default is not on the wire.
    data = theirs.SerializeToString() + b"\x4a" + varint(len(extra)) + extra
    times, read = read_poses(common_pb2.Trajectory.FromString(data))
    assert times.tolist() == [item.timestamp_us for item in theirs.poses]
    parts = [(item.pose.vec, item.pose.quat) for item in theirs.poses]
    expected = [[v.x, v.y, v.z, q.w, q.x, q.y, q.z] for v, q in parts]
    np.testing.assert_array_equal(read, np.array(expected).reshape(-1, 7))


def test_a_plan_on_a_slope_lies_in_the_slope():
    # Pitch -30 deg (nose up) about y: ahead is (cos 30, 0, sin 30).
    half = np.radians(-30.0) / 2.0
    pose = np.array([[1.0, 2.0, 3.0, np.cos(half), 0.0, np.sin(half), 0.0]])
    plan = np.array([[[10.0, 0.0, 0.0], [0.0, 10.0, np.pi / 2.0]]], np.float32)
    out = plan_in_local(plan, pose)[0]
    np.testing.assert_allclose(out[1, :3], (1.0 + 8.660254, 2.0, 8.0), atol=1e-5)
    np.testing.assert_allclose(out[2, :3], (1.0, 12.0, 3.0), atol=1e-5)
    np.testing.assert_allclose(np.square(out[:, 3:]).sum(axis=1), 1.0, atol=1e-6)


def test_terminate_is_one_field():
    answer = their_egodriver.DriveResponse.FromString(TERMINATE)
    assert answer.terminate_session
    assert not answer.trajectory.poses


# ---------------------------------------------------------------- the page that says what is tested where


def known_test_ids():
    ids = set()
    for file in (*ROOT.glob("packages/*/tests/test_*.py"), *ROOT.glob("tests/test_*.py")):
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE):
            ids.add(f"{file.name}::{name}")
    suite = ROOT / "packages/runtime/src/alpagym_runtime/testing/conformance.py"
    simulators = suite.read_text().partition(
        "# ---------------------------------------------------------------- policies"
    )[0]
    for name in re.findall(r"^    def (test_\w+)", simulators, re.MULTILINE):
        ids.add(f"test_alpasim_conformance.py::{name}")
    return ids


def test_every_fact_of_the_conformance_page_has_a_test_that_exists():
    page = (ROOT / "docs/alpasim-conformance.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith(("| fact", "| ---"))]
    assert len(rows) > 60
    known, missing = known_test_ids(), []
    for row in rows:
        fact, where = [cell.strip() for cell in row.strip("|").split("|")][:2]
        ids = re.findall(r"`(test_\w+\.py::test_\w+)`", where)
        if not ids and not where.startswith("not seen:"):
            missing.append(f"no test: {fact}")
        missing += [f"unknown test {name}: {fact}" for name in ids if name not in known]
    assert not missing, "\n".join(missing)


# ---------------------------------------------------------------- generated code


@pytest.mark.slow  # asks the package index
def test_the_generated_messages_are_those_of_the_protos():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/generate_protos.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


IMPORT = """
import google.protobuf, wire.egodriver_pb2 as e, wire.runtime_pb2 as r
m = e.DriveRequest(session_uuid="a", time_now_us=2**63)
assert e.DriveRequest.FromString(m.SerializeToString()) == m and r.SimulationReturn().SerializeToString() == b""
print(google.protobuf.__version__)
"""


@pytest.mark.slow  # asks the package index
@pytest.mark.parametrize("version", ["6.31.1", ">=7,<8"])
def test_the_messages_work_at_both_ends_of_the_protobuf_range(version):
    assert shutil.which("uv")
    requirement = f"protobuf=={version}" if version[0].isdigit() else f"protobuf{version}"
    command = ["uv", "run", "--no-project", "--isolated", "--with", requirement, "python", "-W", "error", "-c", IMPORT]
    folder = ROOT / "packages/runtime/src/alpagym_runtime/simulators/alpasim"
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(folder)}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(version if version[0].isdigit() else "7."), done.stdout


# ---------------------------------------------------------------- pictures, read in place


def image_fields(message):
    """What `read_image` and the generated class make of bytes; "error" where they refuse."""
    read = []
    for reader in (read_image, their_egodriver.RolloutCameraImage.FromString):
        try:
            found = reader(message)
        except DecodeError:
            read.append("error")
            continue
        if isinstance(found, their_egodriver.RolloutCameraImage):
            image = found.camera_image
            read.append((found.session_uuid, image.logical_id, image.frame_end_us, image.image_bytes))
        else:
            read.append((found.session_id, found.camera, found.frame_end_us, bytes(found.data)))
    return read


@settings(deadline=None, max_examples=200)
@given(
    session=st.text(max_size=70),
    camera=st.text(max_size=40),
    times=st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
    data=st.binary(max_size=300),
    cut=st.integers(0, 20),
    more=st.binary(max_size=12),
)
def test_pictures_are_read_in_place_as_the_generated_class_reads_them(session, camera, times, data, cut, more):
    image = their_egodriver.RolloutCameraImage.CameraImage(
        frame_start_us=times[0], frame_end_us=times[1], image_bytes=data, logical_id=camera
    )
    whole = their_egodriver.RolloutCameraImage(session_uuid=session, camera_image=image).SerializeToString()
    assert image_fields(whole)[0] == (session, camera, times[1], data)
    ours, theirs = image_fields(whole[: len(whole) - cut] + more)
    assert ours == theirs


@settings(deadline=None, max_examples=300)
@given(
    data=st.lists(st.sampled_from([b"\x0a", b"\x1a", b"\x22", b"\x2a", b"\x19", b"\x00", b"\x02", b"\xff", b"a" * 8]))
)
def test_what_only_looks_like_a_picture_is_read_alike(data):
    ours, theirs = image_fields(b"".join(data))
    assert ours == theirs
