"""The driver server over real gRPC, spoken to with AlpaSim's own messages (those of carla-driver-interface)."""

from __future__ import annotations

import logging
import math
import multiprocessing
import pickle
import socket
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import cv2
import grpc
import numpy as np
import pytest
from carla_driver_interface._proto import common_pb2 as common
from carla_driver_interface._proto import egodriver_pb2 as ego
from carla_driver_interface._proto import egodriver_pb2_grpc as ego_grpc
from carla_driver_interface.testing import FakeCamera, FakeLoop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alpagym_runtime.pictures import BadFrameError, decode, describe, frame_size
from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.policies.config import ConstantSpeedConfig, FakeVlaConfig, LogReplayConfig
from alpagym_runtime.simulators.alpasim.config import ServerConfig
from alpagym_runtime.simulators.alpasim.drive import PolicyDriver
from alpagym_runtime.testing.fake_alpasim import picture
from alpagym_runtime.types import PolicySpec

NOW = 1_700_000_000_000_001  # odd, and beyond what float64 of seconds or float32 would keep
TICK = 100_000


class Watcher:
    """A policy of the test's own: keeps what it saw, answers what `plan` says."""

    def __init__(self, spec=None, plan=None, delay_s=0.0):
        self.spec = spec or PolicySpec()
        self.seen, self.batches, self.delay_s = [], [], delay_s
        self.plan = plan or (lambda observation: np.zeros((len(observation["time_us"]), 64, 3)))

    def act(self, observation, seeds, sampling):
        self.seen += [{k: v[i] for k, v in observation.items()} for i in range(len(seeds))]
        self.batches.append(len(seeds))
        time.sleep(self.delay_s)
        return plan_decision(self.plan(observation))


@contextmanager
def serving(policy, sessions=32, max_batch=64, **config):
    driver = PolicyDriver(policy, ServerConfig(**config), sessions=sessions, max_batch=max_batch)
    driver.start()
    thread = threading.Thread(target=driver.serve)
    thread.start()
    try:
        yield driver
    finally:
        driver.stop()
        thread.join()
        driver.close()


class Client:
    """One session, as AlpaSim holds it."""

    def __init__(self, driver, cameras=(), session=None, limit=-1):
        target = f"127.0.0.1:{driver.server.port}"
        self.channel = grpc.insecure_channel(
            target, options=[("grpc.max_send_message_length", limit), ("grpc.use_local_subchannel_pool", 1)]
        )
        self.stub = ego_grpc.EgodriverServiceStub(self.channel)
        self.id, self.cameras = session or uuid.uuid4().hex, cameras

    def start(self, scene_id="clip"):
        request = ego.DriveSessionRequest(session_uuid=self.id, random_seed=7)
        request.debug_info.scene_id = scene_id
        for name in self.cameras:
            request.rollout_spec.vehicle.available_cameras.add(logical_id=name)
        self.stub.start_session(request, timeout=20)
        return self

    def image(self, name, time_us, data):
        image = ego.RolloutCameraImage.CameraImage(
            frame_start_us=time_us - 30_000, frame_end_us=time_us, image_bytes=data, logical_id=name
        )
        self.stub.submit_image_observation(ego.RolloutCameraImage(session_uuid=self.id, camera_image=image), timeout=20)

    def pose(self, time_us, x=0.0, y=0.0, quat=(1.0, 0.0, 0.0, 0.0), speed=None, z=0.0):
        request = ego.RolloutEgoTrajectory(session_uuid=self.id)
        item = request.trajectory.poses.add(timestamp_us=time_us)
        item.pose.vec.x, item.pose.vec.y, item.pose.vec.z = x, y, z
        item.pose.quat.w, item.pose.quat.x, item.pose.quat.y, item.pose.quat.z = quat
        state = request.dynamic_states.add()
        if speed is not None:
            state.linear_velocity.x = speed
        self.stub.submit_egomotion_observation(request, timeout=20)

    def route(self, time_us, points):
        request = ego.RouteRequest(session_uuid=self.id)
        request.route.timestamp_us = time_us
        for x, y in points:
            request.route.waypoints.add(x=x, y=y)
        self.stub.submit_route(request, timeout=20)

    def drive(self, now_us, timeout=20):
        request = ego.DriveRequest(session_uuid=self.id, time_now_us=now_us, time_query_us=now_us + TICK)
        return self.stub.drive(request, timeout=timeout)

    def close(self):
        self.stub.close_session(ego.DriveSessionCloseRequest(session_uuid=self.id), timeout=20)
        self.channel.close()

    def ticks(self, count, begin=0):
        for k in range(begin, begin + count):
            self.pose(NOW + k * TICK, x=float(k))
            self.drive(NOW + k * TICK)


def refusal(call, *arguments, **options):
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **options)
    return caught.value.code(), caught.value.details()


CODE = grpc.StatusCode


@pytest.fixture(scope="module")
def straight():
    with serving(ConstantSpeedConfig().build(), sessions=64) as driver:
        yield driver


# ---------------------------------------------------------------- clients that are not ours


def test_a_third_party_loop_drives_two_hundred_steps_straight(straight):
    camera = FakeCamera(width=64, height=48)
    with FakeLoop(f"127.0.0.1:{straight.server.port}", (camera,), initial_speed_mps=8.0) as loop:
        result = loop.run(200)
    assert result.steps == 200
    assert not result.terminated_by_policy
    np.testing.assert_allclose(result.speeds_mps, 8.0, atol=2e-3)  # float32 poses 160 m out: 1.5e-5 m a tick of 0.1 s
    np.testing.assert_allclose(result.lateral_offsets_m, 0.0, atol=1e-6)


@pytest.mark.parametrize("image_format", ["jpeg", "png"])
def test_a_third_party_loop_drives_with_pictures(image_format):
    policy = Watcher(
        PolicySpec(cameras={"camera_front": (48, 64)}), lambda o: np.tile(_straight(8.0), (len(o["time_us"]), 1, 1))
    )
    camera = FakeCamera(width=128, height=96)
    steps = 200 if image_format == "jpeg" else 20
    with serving(policy) as driver:
        target = f"127.0.0.1:{driver.server.port}"
        with FakeLoop(target, (camera,), initial_speed_mps=8.0, image_format=image_format) as loop:
            assert loop.run(steps).steps == steps
    assert len(policy.seen) == steps
    first, last = policy.seen[0], policy.seen[-1]
    assert first["camera_camera_front_time_us"].tolist() == [0]
    assert last["camera_camera_front_time_us"].tolist() == [(steps - 1) * TICK]
    # Sky above, road below, as the third party draws them: (110, 160, 220) and (75, 75, 75).
    np.testing.assert_allclose(last["camera_camera_front"][0, 4, 32], (110, 160, 220), atol=6)
    np.testing.assert_allclose(last["camera_camera_front"][0, 44, 40], (75, 75, 75), atol=12)
    # 50 points, 2 m apart, become 20 at AlpaSim's own 80/19 m.
    np.testing.assert_allclose(last["route_rig"][:, 0], np.arange(20) * 80.0 / 19.0, atol=1e-3)
    assert last["route_mask"].all()


def _straight(speed):
    plan = np.zeros((64, 3))
    plan[:, 0] = speed * 0.1 * np.arange(1, 65)
    return plan


def test_the_third_party_command_drives(straight):
    command = [sys.executable, "-m", "carla_driver_interface", "demo", "--driver", f"127.0.0.1:{straight.server.port}"]
    code = "import sys; from carla_driver_interface.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *command[3:], "--steps", "5"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_version_declares_optical_cameras_and_the_api(straight):
    version, call = Client(straight).stub.get_version.with_call(common.Empty(), timeout=5)
    assert ("carla-driver-interface-contract", "2") in [(m.key, m.value) for m in call.initial_metadata()]
    assert version.version_id.startswith("alpagym-egodriver-")
    assert (version.grpc_api_version.major, version.grpc_api_version.minor) == (0, 54)


def test_the_health_service_serves(straight):
    with grpc.insecure_channel(f"127.0.0.1:{straight.server.port}") as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


# ---------------------------------------------------------------- what a policy sees and what it answers


def test_the_plan_begins_at_now_and_turns_left():
    # A plan to (3, 0) then left; the ego at (10, 5), yaw 90 deg: rig (3, 0) is local (10, 8), rig (0, 3) local (7, 5).
    plan = np.zeros((64, 3))
    plan[0], plan[1] = (3.0, 0.0, 0.0), (0.0, 3.0, math.pi / 2.0)
    half = math.sqrt(0.5)
    with serving(Watcher(plan=lambda o: plan[None])) as driver:
        client = Client(driver).start()
        client.pose(NOW, 10.0, 5.0, (half, 0.0, 0.0, half), z=2.0)
        poses = client.drive(NOW).trajectory.poses
        client.close()
    assert [p.timestamp_us for p in poses] == [NOW + k * TICK for k in range(65)]
    xyz = np.array([(p.pose.vec.x, p.pose.vec.y, p.pose.vec.z) for p in poses[:3]])
    np.testing.assert_allclose(xyz, [(10, 5, 2), (10, 8, 2), (7, 5, 2)], atol=1e-6)
    quats = np.array([(p.pose.quat.w, p.pose.quat.x, p.pose.quat.y, p.pose.quat.z) for p in poses])
    np.testing.assert_allclose(np.square(quats).sum(1), 1.0, atol=1e-6)
    # Yaw 90 + 90 deg: w = cos 90 deg = 0, z = 1.
    np.testing.assert_allclose(np.abs(quats[2]), (0, 0, 0, 1), atol=1e-6)


def test_samples_are_sent_when_asked_for():
    with serving(Watcher(), samples=True) as driver:
        client = Client(driver).start()
        client.pose(NOW)
        answer = client.drive(NOW)
        client.close()
    (sample,) = answer.debug_info.sampled_trajectories
    assert sample == answer.trajectory
    assert sample.poses[-1].timestamp_us - NOW >= 5_000_000


@pytest.mark.parametrize("scale", [1.0, -1.0, 2.0])
def test_a_quaternion_of_any_sign_or_norm_gives_the_same_heading(scale):
    policy = Watcher()
    with serving(policy) as driver:
        client = Client(driver).start()
        quat = scale * np.array([0.9238795325, 0.0, 0.0, 0.3826834324])  # 45 deg
        client.pose(NOW - TICK, 0.0, 0.0, quat)
        client.pose(NOW, 1.0, 1.0, quat)
        answer = client.drive(NOW).trajectory.poses[0].pose.quat
        client.close()
    yaw = 2.0 * math.atan2(answer.z, answer.w)
    assert math.degrees(yaw) % 360 == pytest.approx(45.0, abs=1e-4)
    # sqrt 2 m along the heading in 0.1 s: 14.142 m/s straight ahead.
    np.testing.assert_allclose(policy.seen[0]["ego_dynamics_rig"][:2], (math.sqrt(200.0), 0.0), atol=1e-4)


@pytest.mark.parametrize("quat", [(0, 0, 0, 0), (math.nan, 0, 0, 1), (math.inf, 0, 0, 0)])
def test_what_is_no_rotation_is_refused_with_its_time(straight, quat):
    client = Client(straight).start()
    code, text = refusal(client.pose, NOW, quat=quat)
    assert code == CODE.INVALID_ARGUMENT
    assert str(NOW) in text
    assert client.id in text
    client.pose(NOW)
    assert len(client.drive(NOW).trajectory.poses) == 65
    client.close()


def test_times_are_whole_microseconds_end_to_end():
    policy = Watcher(PolicySpec(cameras={"front": (16, 16)}))
    with serving(policy) as driver:
        client = Client(driver, ("front",)).start()
        client.image("front", NOW - 7, picture("s", "front", 0, 16, 16, "png"))
        client.pose(NOW)
        answer = client.drive(NOW)
        code, text = refusal(client.drive, 2**63 + 5)
        client.close()
    assert policy.seen[0]["time_us"] == NOW
    assert policy.seen[0]["time_us"].dtype == np.int64
    assert policy.seen[0]["camera_front_time_us"].tolist() == [NOW - 7]
    assert answer.trajectory.poses[64].timestamp_us == NOW + 6_400_000
    assert code == CODE.INVALID_ARGUMENT
    assert "beyond every clock" in text


def test_speeds_come_from_poses_in_the_warm_up_and_from_the_report_after():
    policy = Watcher()
    with serving(policy) as driver:
        client = Client(driver).start()
        # 1 m/s² from 5 m/s: x = 5 t + t²/2 at t = -0.2, -0.1, 0; the reported states are zero.
        for t in (-0.2, -0.1, 0.0):
            client.pose(NOW + round(t * 1e6), 5.0 * t + t * t / 2.0)
        client.drive(NOW)
        client.pose(NOW + TICK, 0.505, speed=4.25)
        client.drive(NOW + TICK)
        client.close()
    first, second = (row["ego_dynamics_rig"] for row in policy.seen)
    np.testing.assert_allclose(first[[0, 3]], (5.0, 1.0), atol=1e-4)
    np.testing.assert_allclose(second[[0, 3]], (4.25, 0.0), atol=1e-6)


def test_the_first_batch_of_reported_velocities_is_not_believed():
    # AlpaSim's seeded history reports local axes: facing +y, 10 m/s ahead is (0, 10) there.
    policy, half = Watcher(), math.sqrt(0.5)
    with serving(policy) as driver:
        client = Client(driver).start()
        request = ego.RolloutEgoTrajectory(session_uuid=client.id)
        for k in (1, 0):
            item = request.trajectory.poses.add(timestamp_us=NOW - k * TICK)
            item.pose.vec.y, item.pose.quat.w, item.pose.quat.z = -1.0 * k, half, half
            request.dynamic_states.add().linear_velocity.y = 10.0
        client.stub.submit_egomotion_observation(request)
        client.drive(NOW)
        client.close()
    np.testing.assert_allclose(policy.seen[0]["ego_dynamics_rig"][:2], (10.0, 0.0), atol=1e-4)


def test_history_is_interpolated_masked_and_in_the_rig():
    policy, half = Watcher(PolicySpec(history_steps=4)), math.sqrt(0.5)
    with serving(policy) as driver:
        client = Client(driver).start()
        client.pose(NOW - 250_000, 0.0, 0.0)  # facing +x; 2.5 m behind
        client.pose(NOW, 2.5, 0.0, (half, 0.0, 0.0, half))  # now facing +y
        client.drive(NOW)
        client.close()
    row = policy.seen[0]
    assert row["ego_history_mask"].tolist() == [False, True, True, True]
    # 0.2 s ago at x = 0.5: 2 m behind along local x is rig (0, 2) to the left of one who faces +y; yaw -90 + 18 deg.
    np.testing.assert_allclose(row["ego_history_rig"][1, :3], (0.0, 2.0, 0.0), atol=1e-6)
    yaw = 2.0 * math.degrees(math.atan2(row["ego_history_rig"][1, 6], row["ego_history_rig"][1, 3]))
    assert yaw == pytest.approx(-72.0, abs=1e-3)
    np.testing.assert_array_equal(row["ego_history_rig"][3], (0, 0, 0, 1, 0, 0, 0))


def test_a_route_ends_at_the_first_nan_and_follows_the_car():
    policy = Watcher()
    with serving(policy) as driver:
        client = Client(driver).start()
        client.pose(NOW)
        client.route(NOW, [(4.0 * k, 1.0) for k in range(12)] + [(math.nan, math.nan)] * 8)
        client.drive(NOW)
        client.pose(NOW + TICK, 3.0)
        client.drive(NOW + TICK)  # no new route: 3 m further on the old one
        client.close()
    first, second = policy.seen
    assert first["route_mask"].tolist() == [True] * 12 + [False] * 8
    np.testing.assert_allclose(first["route_rig"][:12, 0], 4.0 * np.arange(12))
    np.testing.assert_allclose(second["route_rig"][:12, 0], 4.0 * np.arange(12) - 3.0)
    assert np.isfinite(second["route_rig"]).all()


@pytest.mark.parametrize("count", [1, 2, 3, 7, 50, 3000])
def test_any_number_of_waypoints(count):
    policy = Watcher()
    with serving(policy) as driver:
        client = Client(driver).start()
        client.pose(NOW)
        client.route(NOW, [(1.0 * k, 0.0) for k in range(count)])
        client.drive(NOW)
        client.close()
    row = policy.seen[0]
    length = min(count, 512) - 1.0
    known = min(int(length / (80.0 / 19.0)) + 1, 20)
    assert row["route_mask"].sum() == known
    np.testing.assert_allclose(row["route_rig"][:known, 0], np.arange(known) * 80.0 / 19.0, atol=1e-4)


def test_the_recording_is_a_policys_if_it_reads_it():
    with serving(LogReplayConfig().build()) as driver:
        client = Client(driver).start()
        request = ego.GroundTruthRequest(session_uuid=client.id)
        request.ground_truth.timestamp_us = NOW
        for k in range(100):
            item = request.ground_truth.trajectory.poses.add(timestamp_us=NOW + k * TICK)
            item.pose.vec.x, item.pose.vec.y, item.pose.quat.w = 0.5 * k, 0.1 * k, 1.0
        client.stub.submit_recording_ground_truth(request)  # before the pose that it hangs on
        client.pose(NOW, 100.0, 50.0)
        for _ in range(3):
            client.stub.submit_recording_ground_truth(request)
        poses = client.drive(NOW).trajectory.poses
        client.close()
    np.testing.assert_allclose((poses[10].pose.vec.x, poses[10].pose.vec.y), (105.0, 51.0), atol=1e-4)


# ---------------------------------------------------------------- frames


def test_frames_are_sorted_by_their_own_time_and_chosen_by_step():
    policy = Watcher(PolicySpec(cameras={"front": (16, 16)}, frames=3))
    with serving(policy) as driver:
        client = Client(driver, ("front", "rear")).start()
        for ago in (0, 200_000, 100_000, 50_000, 300_000):
            client.image("front", NOW - ago, picture("s", "front", 10_000 * (ago // 10_000), 16, 16, "png"))
        client.pose(NOW)
        client.drive(NOW)
        client.pose(NOW + TICK)
        client.image("front", NOW + 30_000, picture("s", "front", 990_000, 16, 16, "png"))
        client.image("front", NOW + 30_000, b"the same time again: the first one counts")
        client.drive(NOW + TICK)
        client.close()
    first, second = policy.seen
    assert (NOW - first["camera_front_time_us"]).tolist() == [200_000, 100_000, 0]
    assert first["camera_front"][:, 0, 0, 0].tolist() == [20, 10, 0]
    assert (second["camera_front_time_us"] - NOW).tolist() == [-TICK, 0, 30_000]
    assert second["camera_front_frame_id"][:2].tolist() == first["camera_front_frame_id"][1:].tolist()
    assert second["camera_front_frame_id"].min() > 0


def test_the_oldest_frame_stands_in_for_what_is_missing():
    policy = Watcher(PolicySpec(cameras={"front": (16, 16)}, frames=2))
    with serving(policy) as driver:
        client = Client(driver, ("front",)).start()
        client.image("front", NOW - 10, picture("s", "front", 0, 16, 16, "jpeg"))
        client.pose(NOW)
        client.drive(NOW)
        client.close()
    assert policy.seen[0]["camera_front_frame_id"][0] == 0
    assert policy.seen[0]["camera_front_frame_id"][1] > 0
    assert (policy.seen[0]["camera_front"][0] == policy.seen[0]["camera_front"][1]).all()


def test_a_camera_has_its_name_without_the_prefix_too():
    policy = Watcher(PolicySpec(cameras={"front_wide_120fov": (16, 16)}))
    with serving(policy) as driver:
        client = Client(driver, ("camera_front_wide_120fov", "camera_rear")).start()
        client.image("camera_front_wide_120fov", NOW - 10, picture("s", "front", 0, 16, 16, "jpeg"))
        client.pose(NOW)
        client.drive(NOW)
        client.close()
    assert policy.seen[0]["camera_front_wide_120fov_frame_id"][0] > 0


def test_frames_that_nobody_will_see_are_not_decoded():
    # 17 ticks of warm-up pictures, then 5 drives at half the frame rate: 1 + 5 of 28 are seen (one a drive).
    policy = Watcher(PolicySpec(cameras={"front": (16, 16)}))
    with serving(policy) as driver:
        client = Client(driver, ("front",)).start()
        data = picture("s", "front", 0, 16, 16, "jpeg")
        for k in range(28):
            client.image("front", NOW + (k - 17) * TICK, data)
            client.pose(NOW + (k - 17) * TICK)
            if k >= 17 and k % 2 == 1:
                request = ego.DriveRequest(
                    session_uuid=client.id, time_now_us=NOW + (k - 17) * TICK, time_query_us=NOW + (k - 15) * TICK
                )
                client.stub.drive(request)
        client.close()
        counts = driver.stats()["calls"]
    assert counts["images"] == 28
    assert counts["decoded"] == 6
    assert [int(row["camera_front_time_us"][0] - NOW) for row in policy.seen] == [2 * k * TICK for k in range(6)]


PNG = cv2.imencode(".png", np.full((40, 60, 3), 9, np.uint8))[1].tobytes()
JPEG = picture("s", "c", 0, 40, 60, "jpeg")


@pytest.mark.parametrize(
    ("wanted", "eighths"), [((5, 8), 1), ((6, 8), 2), ((10, 15), 2), ((10, 16), 4), ((20, 30), 4), ((20, 31), 8)]
)
def test_a_jpeg_is_decoded_in_the_least_scale_of_1_2_4_and_8_eighths_that_covers(wanted, eighths):
    # 40 x 60 by 1, 2, 4 and 8 eighths, rounded up: 5 x 8, 10 x 15, 20 x 30, 40 x 60.
    assert describe(JPEG, *wanted).endswith(f"JPEG 40x60 by {eighths}/8 to {wanted[0]}x{wanted[1]}")
    assert decode(JPEG, *wanted).shape == (*wanted, 3)


def test_the_size_of_a_jpeg_is_in_its_frame_header():
    progressive = cv2.imencode(".jpg", np.zeros((7, 9, 3), np.uint8), [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])[1].tobytes()
    assert b"\xff\xc2" in progressive
    header = JPEG.index(b"\xff\xc0")
    assert frame_size(progressive) == (7, 9)
    assert frame_size(JPEG[:header] + b"\xff\xff" + JPEG[header:]) == (40, 60)  # fill bytes before a marker
    for cut in (3, 20, header, header + 8):
        with pytest.raises(BadFrameError, match="no frame header"):
            frame_size(JPEG[:cut])


class Marker:
    """Unpickling this would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize(
    "data",
    [b"", b"hello", JPEG[:-40], JPEG[:30], PNG[:-13], PNG[:60] + b"\0" + PNG[61:], PNG[:20], "pickle"],
    ids=[
        "empty",
        "text",
        "cut JPEG",
        "JPEG header",
        "PNG without end",
        "PNG with a wrong byte",
        "PNG header",
        "pickle",
    ],
)
def test_a_frame_is_whole_or_bad(data, tmp_path):
    marker = tmp_path / "marker"
    if data == "pickle":
        data = pickle.dumps(Marker(marker))
    policy = Watcher(PolicySpec(cameras={"front": (40, 60)}))
    with serving(policy) as driver:
        bad, good = Client(driver, ("front",)).start(), Client(driver, ("front",)).start()
        for client, content in ((bad, data), (good, PNG)):
            client.image("front", NOW, content)
            client.pose(NOW)
        code, text = refusal(bad.drive, NOW)
        assert code == CODE.INVALID_ARGUMENT
        assert bad.id in text
        assert "'front'" in text
        assert str(NOW) in text
        code, text = refusal(bad.pose, NOW + TICK)
        assert code == CODE.FAILED_PRECONDITION
        good.drive(NOW)
        bad.close()
        again = Client(driver, ("front",), session=bad.id).start()  # a retry takes the same id
        again.close()
        good.close()
    assert (policy.seen[0]["camera_front"] == 9).all()
    assert not marker.exists()


def test_a_picture_of_absurd_size_is_refused_before_memory_is_taken():
    header = bytearray(PNG)
    header[16:24] = (60_000).to_bytes(4, "big") * 2
    import zlib

    header[29:33] = zlib.crc32(bytes(header[12:29])).to_bytes(4, "big")
    with serving(Watcher(PolicySpec(cameras={"front": (40, 60)}))) as driver:
        client = Client(driver, ("front",)).start()
        client.image("front", NOW, bytes(header))
        client.pose(NOW)
        code, text = refusal(client.drive, NOW)
        client.close()
    assert code == CODE.INVALID_ARGUMENT
    assert "60000 x 60000" in text


# ---------------------------------------------------------------- sessions and statuses


def test_a_session_opens_again_after_it_was_closed_and_forgets():
    policy = Watcher()
    with serving(policy) as driver:
        client = Client(driver).start()
        code, text = refusal(client.start)
        assert (code, client.id in text) == (CODE.ALREADY_EXISTS, True)
        client.ticks(2)
        client.close()
        again = Client(driver, session=client.id).start()
        code, _ = refusal(again.drive, NOW)
        assert code == CODE.FAILED_PRECONDITION
        again.ticks(1)
        again.close()
        Client(driver, session=client.id).close()  # unknown by now: fine
    assert policy.seen[2]["ego_history_mask"].sum() == 1


def test_unknown_sessions_and_wrong_orders_have_their_statuses(straight):
    client = Client(straight)
    assert refusal(client.drive, NOW)[0] == CODE.NOT_FOUND
    assert refusal(client.pose, NOW)[0] == CODE.NOT_FOUND
    client.start()
    assert refusal(client.drive, NOW)[0] == CODE.FAILED_PRECONDITION  # no pose
    client.pose(NOW)
    assert refusal(client.drive, NOW + TICK)[0] == CODE.FAILED_PRECONDITION  # no pose at that time
    first = client.drive(NOW)
    assert client.drive(NOW) == first  # the same call again
    assert refusal(client.drive, NOW - TICK)[0] == CODE.INVALID_ARGUMENT
    client.close()


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/x", "a/b", "..", "", "a\0b", "con\nid", "a" * 300, "-rf", "%2e%2e", "x;touch y"]
)
def test_session_ids_are_letters_digits_and_hyphens(straight, name):
    code, text = refusal(Client(straight, session=None).stub.start_session, ego.DriveSessionRequest(session_uuid=name))
    assert code == CODE.INVALID_ARGUMENT
    assert "\n" not in text


def test_a_missing_camera_is_said_at_the_start():
    with serving(FakeVlaConfig().build()) as driver:
        code, text = refusal(Client(driver, ("front",)).start)
    assert code == CODE.FAILED_PRECONDITION
    assert "camera_front_wide_120fov" in text
    assert "'front'" in text


def declared(name, **spec):
    request = ego.DriveSessionRequest(session_uuid=uuid.uuid4().hex)
    camera = request.rollout_spec.vehicle.available_cameras.add(logical_id=name)
    camera.rig_to_camera.vec.x, camera.rig_to_camera.vec.z = 1.5, 1.2
    pose = camera.rig_to_camera.quat
    pose.w, pose.x, pose.y, pose.z = 0.5, -0.5, 0.5, -0.5
    model = camera.intrinsics.opencv_pinhole_param
    model.principal_point_x, model.principal_point_y = 960.0, 540.0
    model.focal_length_x = model.focal_length_y = 1000.0
    camera.intrinsics.resolution_w, camera.intrinsics.resolution_h = 1920, 1080
    return request, camera.intrinsics


READS_CALIBRATION = PolicySpec(fields=("ego_dynamics_rig", "camera_rays"), cameras={"front": (270, 480)})


def test_a_policy_reads_the_calibration_that_was_declared():
    policy = Watcher(READS_CALIBRATION)
    with serving(policy) as driver:
        client = Client(driver)
        request, _ = declared("front")
        client.id = request.session_uuid
        client.stub.start_session(request, timeout=20)
        client.image("front", NOW, picture("clip", "front", NOW, 270, 480, "png"))
        client.pose(NOW)
        client.drive(NOW)
        client.close()
    (seen,) = policy.seen
    np.testing.assert_allclose(seen["camera_front_position_rig"], [1.5, 0.0, 1.2])
    assert seen["camera_front_rays_mask"].all()
    # The leftmost cell of the middle row: (60, 540) px of 1920 x 1080, 0.9 to the left of the axis.
    left = np.array([1.0, 0.9, 0.0]) / np.hypot(1.0, 0.9)
    np.testing.assert_allclose(seen["camera_front_rays_rig"][4, 0], left, atol=1e-6)


def test_a_windshield_is_refused_if_the_policy_reads_rays():
    request, intrinsics = declared("front")
    intrinsics.bivariate_windshield_model_param.horizontal_poly.append(1.0)
    with serving(Watcher(READS_CALIBRATION)) as driver:
        code, text = refusal(Client(driver).stub.start_session, request)
    assert code == CODE.FAILED_PRECONDITION
    assert "'front' looks through a windshield" in text
    # Who reads pictures only does not care.
    with serving(Watcher(PolicySpec(cameras={"front": (270, 480)}))) as driver:
        Client(driver).stub.start_session(request, timeout=20)


def test_large_messages_pass_and_larger_ones_are_refused_alone():
    policy = Watcher(PolicySpec(cameras={"front": (16, 16)}))
    with serving(policy, max_message_mib=8) as driver:
        client = Client(driver, ("front", *(f"c{k}" for k in range(8)))).start()
        for size in (4_194_304, 4_194_305, 6_220_800):
            client.image("c0", NOW, bytes(size))
        for k in range(8):
            client.image(f"c{k}", NOW + TICK, bytes(2 * 2**20))
        code, _ = refusal(client.image, "c0", NOW, bytes(8 * 2**20 + 1))
        assert code == CODE.RESOURCE_EXHAUSTED
        client.image("front", NOW, PNG)
        client.pose(NOW)
        assert len(client.drive(NOW).trajectory.poses) == 65
        client.close()
    assert ServerConfig().max_message_mib == 64


def test_capacity_is_said_at_once_and_comes_back():
    with serving(Watcher(), sessions=2) as driver:
        clients = [Client(driver).start() for _ in range(2)]
        began = time.monotonic()
        code, text = refusal(Client(driver).start)
        assert (code, time.monotonic() - began < 1.0) == (CODE.RESOURCE_EXHAUSTED, True)
        assert "2 sessions" in text
        clients[0].close()
        Client(driver).start().close()
        clients[1].close()


def test_a_silent_session_is_closed_and_its_room_comes_back():
    with serving(Watcher(delay_s=0.8), sessions=1, idle_timeout_s=0.4) as driver:
        client = Client(driver).start()
        client.pose(NOW)
        client.drive(NOW)  # waits for us longer than the idle time: not silent
        time.sleep(1.0)
        code, text = refusal(client.pose, NOW + TICK)
        assert code == CODE.FAILED_PRECONDITION
        assert "silent" in text
        Client(driver).start().close()
        assert driver.stats()["sessions"] == {"opened": 2, "closed": 1, "failed": 1}


def test_a_drive_that_nobody_answers_ends_with_a_status():
    driver = PolicyDriver(Watcher(), ServerConfig(drive_timeout_s=0.4))
    driver.start()  # and nobody serves
    try:
        client = Client(driver).start()
        client.pose(NOW)
        began = time.monotonic()
        code, text = refusal(client.drive, NOW)
        assert code == CODE.DEADLINE_EXCEEDED
        assert client.id in text
        assert time.monotonic() - began < 3.0
    finally:
        driver.close()


def test_a_client_that_gives_up_a_drive_loses_its_session_only():
    policy = Watcher(delay_s=0.5)
    with serving(policy) as driver:
        client, other = Client(driver).start(), Client(driver).start()
        client.pose(NOW)
        assert refusal(client.drive, NOW, timeout=0.1)[0] == CODE.DEADLINE_EXCEEDED
        other.ticks(1)
        assert refusal(client.pose, NOW + TICK)[0] == CODE.FAILED_PRECONDITION
        client.close()
        other.close()


def test_stopping_ends_calls_in_flight_with_a_status():
    driver = PolicyDriver(Watcher(), ServerConfig())
    driver.start()
    clients = [Client(driver).start() for _ in range(8)]
    for client in clients:
        client.pose(NOW)
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(refusal, client.drive, NOW) for client in clients]
        while driver.server.counts["drives"] < 8:
            time.sleep(0.01)
        began = time.monotonic()
        driver.close()
        assert time.monotonic() - began < 6.0
        assert {call.result()[0] for call in calls} == {CODE.UNAVAILABLE}


# ---------------------------------------------------------------- policies that fail


def test_a_policy_that_raises_ends_the_session_at_fault(caplog):
    def plan(observation):
        if (observation["ego_history_rig"][:, 0, 0] < -5.0).any():
            raise ValueError("boom")
        return np.zeros((len(observation["time_us"]), 64, 3))

    with serving(Watcher(PolicySpec(history_steps=2), plan, delay_s=0.05)) as driver, caplog.at_level(logging.CRITICAL):
        good, bad = Client(driver).start(), Client(driver).start()
        for client, back in ((good, -1.0), (bad, -9.0)):
            client.pose(NOW - TICK, back)
            client.pose(NOW)
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.submit(good.drive, NOW), pool.submit(refusal, bad.drive, NOW)
            assert len(first.result().trajectory.poses) == 65
            code, text = second.result()
        assert code == CODE.INTERNAL
        assert "boom" in text
        assert bad.id in text
        good.ticks(2, begin=1)
        good.close()


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_plan_that_is_not_finite_reaches_nobody(wrong):
    def plan(observation):
        out = np.zeros((len(observation["time_us"]), 64, 3))
        out[observation["ego_history_rig"][:, 0, 0] < -5.0, 3, 1] = wrong
        return out

    with serving(Watcher(PolicySpec(history_steps=2), plan)) as driver:
        good, bad = Client(driver).start(), Client(driver).start()
        for client, back in ((good, -1.0), (bad, -9.0)):
            client.pose(NOW - TICK, back)
            client.pose(NOW)
        code, text = refusal(bad.drive, NOW)
        assert code == CODE.INTERNAL
        assert "finite" in text
        assert good.drive(NOW)
        good.close()


# ---------------------------------------------------------------- ports, processes, load


def test_a_taken_port_is_noticed(straight):
    port = straight.server.port
    second = PolicyDriver(Watcher(), ServerConfig(port=port))
    began = time.monotonic()
    with pytest.raises(OSError, match=str(port)):
        second.start()
    assert time.monotonic() - began < 2.0
    with socket.socket() as plain:
        plain.bind(("127.0.0.1", 0))
        plain.listen()
        with pytest.raises(OSError, match=str(plain.getsockname()[1])):
            PolicyDriver(Watcher(), ServerConfig(port=plain.getsockname()[1])).start()


def test_a_port_can_be_bound_again_after_the_stop():
    with serving(Watcher()) as driver:
        port = driver.server.port
        Client(driver).start().close()
    began = time.monotonic()
    with serving(Watcher(), port=port) as driver:
        assert driver.server.port == port
    assert time.monotonic() - began < 5.0


def test_servers_on_free_ports_do_not_mix():
    drivers = [PolicyDriver(Watcher(), ServerConfig(), sessions=1) for _ in range(20)]
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(PolicyDriver.start, drivers))
    try:
        assert len({driver.server.port for driver in drivers}) == 20
        for k, driver in enumerate(drivers):
            # Only server k knows session tag-k: any other one would answer NOT_FOUND.
            client = Client(driver, session=f"tag-{k}").start()
            for tick in range(100):
                client.route(NOW + tick, [(0.0, 0.0)])
            client.close()
            assert driver.stats()["sessions"]["opened"] == 1
    finally:
        for driver in drivers:
            driver.close()


CHILD = """
import sys, grpc
from carla_driver_interface._proto import common_pb2, egodriver_pb2_grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    print(egodriver_pb2_grpc.EgodriverServiceStub(channel).get_version(common_pb2.Empty(), timeout=20).version_id)
"""


def test_processes_start_while_the_server_lives(straight):
    client = Client(straight).start()
    worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0.0,))
    worker.start()
    client.ticks(5)
    command = [sys.executable, "-c", CHILD, f"127.0.0.1:{straight.server.port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("alpagym-egodriver-"), done.stderr
    worker.join(60)
    assert worker.exitcode == 0
    client.ticks(5, begin=5)
    client.close()


def test_other_addresses_than_loopback_warn(caplog):
    with caplog.at_level(logging.WARNING), serving(Watcher(), host="0.0.0.0"):
        assert "anybody on that network" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING), serving(Watcher()):
        assert not caplog.records


def test_sixteen_sessions_share_a_slow_policy_without_cross_talk():
    # 16 sessions x 10 ticks at 0.5 s a forward of at most 8: 20 forwards of 8 would be 10 s.
    policy = Watcher(PolicySpec(cameras={"front": (16, 16)}), delay_s=0.5)
    with serving(policy, sessions=17, max_batch=8) as driver:
        clients = [Client(driver, ("front",)).start() for _ in range(16)]
        idle = Client(driver, ("front",)).start()

        def drive(i):
            for k in range(10):
                clients[i].image(
                    "front", NOW + k * TICK, cv2.imencode(".png", np.full((16, 16, 3), i, np.uint8))[1].tobytes()
                )
                clients[i].pose(NOW + k * TICK, x=1000.0 * i)
                answer = clients[i].drive(NOW + k * TICK)
                assert answer.trajectory.poses[0].pose.vec.x == 1000.0 * i
            return 10

        began = time.monotonic()
        with ThreadPoolExecutor(17) as pool:
            running = [pool.submit(drive, i) for i in range(16)]
            time.sleep(0.5)
            asked = time.monotonic()
            Client(driver).stub.get_version(common.Empty(), timeout=5)
            assert time.monotonic() - asked < 1.0
            code, _ = refusal(Client(driver, ("front",)).start)
            asked = time.monotonic()
            idle.close()
            assert time.monotonic() - asked < 1.0
            assert code == CODE.RESOURCE_EXHAUSTED
            assert [call.result() for call in running] == [10] * 16
        assert time.monotonic() - began < 15.0
        for client in clients:
            client.close()
        histogram = driver.stats()["batch_histogram"]
    assert max(map(int, histogram)) <= 8
    assert np.mean(policy.batches) > 6.0
    seen = [int(row["camera_front"][0, 0, 0, 0]) for row in policy.seen]
    assert sorted(seen) == sorted(list(range(16)) * 10)
    for row in policy.seen:
        assert (row["camera_front"] == row["camera_front"][0, 0, 0, 0]).all()


def test_a_slow_model_is_never_idle_while_half_of_the_sessions_wait():
    # 8 sessions, 0.1 s a forward. In two halves of 4 the model is busy all the time; all 8 x 12 ticks are 24 forwards.
    policy = Watcher(delay_s=0.1)
    with serving(policy, sessions=8) as driver:
        clients = [Client(driver).start() for _ in range(8)]
        for _ in range(2):  # until it is known that forwards are slow
            clients[0].ticks(16, begin=16 * _)
        policy.batches.clear()
        before = driver.stats()

        def drive(i):
            clients[i].ticks(12, begin=40)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(drive, range(8)))
        after = driver.stats()
        for client in clients:
            client.close()
    busy_s = after["model_busy_share"] * after["wall_s"] - before["model_busy_share"] * before["wall_s"]
    assert busy_s > 0.8 * (after["wall_s"] - before["wall_s"])
    assert np.mean(policy.batches) > 3.0


def test_a_free_model_goes_with_a_third_of_the_sessions():
    # Of 6 sessions 2 are a third: they are answered at once; one alone waits out the window of 3 s for a second.
    driver = PolicyDriver(Watcher(), ServerConfig(), sessions=6, window_s=3.0)
    driver.start()
    thread = threading.Thread(target=driver.serve)
    thread.start()
    try:
        clients = [Client(driver).start() for _ in range(6)]
        began = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda client: client.ticks(1), clients[:2]))
        together_s = time.monotonic() - began
        clients[2].ticks(1)
        alone_s = time.monotonic() - began - together_s
        for client in clients:
            client.close()
    finally:
        driver.stop()
        thread.join()
        driver.close()
    assert together_s < 2.0
    assert alone_s >= 3.0


def test_answers_do_not_depend_on_the_batch():
    def run(count):
        with serving(ConstantSpeedConfig().build()) as driver:
            clients = [Client(driver).start() for _ in range(count)]

            def drive(i):
                out = b""
                for k in range(3):
                    clients[i].pose(NOW + k * TICK, x=(i + 1.37) * k, y=0.1 * k * k)
                    out += clients[i].drive(NOW + k * TICK).SerializeToString()
                return out

            with ThreadPoolExecutor(count) as pool:
                return list(pool.map(drive, range(count)))

    assert run(8)[0] == run(1)[0]


# ---------------------------------------------------------------- fuzz

METHODS = {
    "start_session": ego.DriveSessionRequest,
    "close_session": ego.DriveSessionCloseRequest,
    "submit_image_observation": ego.RolloutCameraImage,
    "submit_egomotion_observation": ego.RolloutEgoTrajectory,
    "submit_route": ego.RouteRequest,
    "submit_recording_ground_truth": ego.GroundTruthRequest,
    "drive": ego.DriveRequest,
}
KNOWN = {
    CODE.OK,
    CODE.INVALID_ARGUMENT,
    CODE.NOT_FOUND,
    CODE.FAILED_PRECONDITION,
    CODE.ALREADY_EXISTS,
    CODE.RESOURCE_EXHAUSTED,
}


@pytest.fixture(scope="module")
def fuzzed():
    with serving(Watcher(PolicySpec(cameras={"front": (16, 16)})), sessions=4) as driver:
        yield driver


def send_raw(client, method, data):
    call = client.channel.unary_unary(f"/egodriver.EgodriverService/{method}")
    code = CODE.OK
    try:
        call(data, timeout=10)
    except grpc.RpcError as err:
        code = err.code()
    assert code in KNOWN


slow_input = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@slow_input
@given(method=st.sampled_from(sorted(METHODS)), data=st.binary(max_size=200))
def test_any_bytes_give_a_status(fuzzed, method, data):
    client = Client(fuzzed)
    send_raw(client, method, data)
    client.channel.close()


numbers = st.one_of(st.sampled_from([0, 1, NOW, 2**63 - 1, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))
floats = st.one_of(st.sampled_from([0.0, 1.0, math.nan, math.inf, -math.inf, 1e38, 1e-45]), st.floats(width=32))


def messages(descriptor, session):
    """Messages with any values in any fields, below a known session."""
    fields = {}
    for field in descriptor.fields:
        kind = field.cpp_type
        if field.name == "session_uuid":
            continue
        if kind == field.CPPTYPE_MESSAGE:
            one = messages(field.message_type, session)
        elif kind in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
            one = floats
        elif field.type == field.TYPE_STRING:
            one = st.sampled_from(["front", "", "x"])
        elif kind == field.CPPTYPE_BOOL:
            one = st.booleans()
        elif field.type == field.TYPE_BYTES:
            one = st.one_of(st.binary(max_size=40), st.sampled_from([PNG, JPEG]))
        elif kind == field.CPPTYPE_ENUM:
            one = st.just(0)
        elif kind == field.CPPTYPE_UINT32:
            one = st.integers(0, 2**32 - 1)
        else:
            one = numbers
        fields[field.name] = st.lists(one, max_size=3) if field.is_repeated else one
    return st.fixed_dictionaries({}, optional=fields)


def fill(message, values):
    for name, value in values.items():
        field = message.DESCRIPTOR.fields_by_name[name]
        if field.is_repeated:
            for item in value:
                if field.message_type is not None:
                    fill(getattr(message, name).add(), item)
                else:
                    getattr(message, name).append(item)
        elif field.message_type is not None:
            getattr(message, name).SetInParent()
            fill(getattr(message, name), value)
        else:
            setattr(message, name, value)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_values_in_any_fields_give_a_status(fuzzed, data):
    client = Client(fuzzed, ("front",)).start()
    try:
        names = data.draw(st.lists(st.sampled_from(sorted(set(METHODS) - {"start_session"})), min_size=1, max_size=4))
        for name in names:
            message = METHODS[name](session_uuid=client.id)
            fill(message, data.draw(messages(message.DESCRIPTOR, client.id)))
            send_raw(client, name, message.SerializeToString())
    finally:
        client.close()


def test_the_server_lives_after_the_fuzz(fuzzed):
    client = Client(fuzzed, ("front",)).start()
    client.image("front", NOW, PNG)
    client.ticks(2)
    client.close()
    assert not fuzzed.server.sessions
