"""The embedded world as an AlpaSim: our client and others' drivers against it, over real gRPC."""

from __future__ import annotations

import json
import math
import pickle
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from carla_driver_interface._proto import common_pb2 as common
from carla_driver_interface._proto import egodriver_pb2 as ego
from carla_driver_interface._proto import egodriver_pb2_grpc as ego_grpc

from alpagym_runtime.envs.core import DrivingCore, build_terms
from alpagym_runtime.envs.presets import reward_section
from alpagym_runtime.errors import CorruptFileError
from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.rollouts.collector import Collector
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.alpasim.asl import describe, kind_of, read_asl, rollout_path, to_dict
from alpagym_runtime.simulators.alpasim.config import AlpasimConfig
from alpagym_runtime.simulators.alpasim.wire import common_pb2, runtime_pb2
from alpagym_runtime.simulators.embedded.camera_config import CamerasConfig
from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
from alpagym_runtime.simulators.embedded.server import ServeOptions, WorldServer, build_world, declare_cameras
from alpagym_runtime.simulators.embedded.server_asl import AslLog, score_again
from alpagym_runtime.simulators.embedded.server_messages import RolloutError, plan_at_steps, read_plan
from alpagym_runtime.simulators.embedded.server_rollout import RolloutOptions
from alpagym_runtime.types import EpisodeRequest, PolicySpec, Sampling

PERIOD = 200_000
WARMUP = 1_600_000
SCENES = [f"procedural-test-{i:06d}" for i in range(64)]
CODE = grpc.StatusCode


@contextmanager
def served(slots=4, steps=60, retries=2, config=None, folder=None, log=None, sizes=None, **options):
    config = config or EmbeddedConfig()
    options["cameras"] = declare_cameras(config.cameras, sizes or {})
    log = log or (None if folder is None else partial(AslLog, folder))
    rollout = RolloutOptions(PERIOD, WARMUP, steps, **options)
    world = build_world(config, DatasetSection(), slots, rollout, sizes)
    server = WorldServer(ServeOptions(rollout, max_rollout_retries=retries), world, log)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def world():
    with served() as server:
        yield server


def call(server, method, request, answer):
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        data = channel.unary_unary(f"/RuntimeService/{method}")(request.SerializeToString(), timeout=60)
    return answer.FromString(data)


def simulate(server, port, scenes=SCENES[:1], ids=None, count=1, each=4):
    request = runtime_pb2.SimulationRequest(n_concurrent_per_driver=each)
    request.available_drivers.add(ip="127.0.0.1", port=port)
    for scene in scenes:
        request.rollout_specs.add(scenario_id=scene, nr_rollouts=count, session_uuids=ids or [])
    return call(server, "simulate", request, runtime_pb2.SimulationReturn).rollout_returns


def refusal(function, *arguments, **options):
    with pytest.raises(grpc.RpcError) as caught:
        function(*arguments, **options)
    return caught.value.code(), caught.value.details()


class Driver(ego_grpc.EgodriverServiceServicer):
    """A driver of the test's own, with others' messages: keeps its calls, answers what `answer` makes of a request."""

    def __init__(self, answer=None):
        self.calls, self.answer, self.poses = [], answer or self.straight, {}
        self.server = grpc.server(ThreadPoolExecutor(16))
        ego_grpc.add_EgodriverServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.server.stop(None)

    def names(self, session=None):
        return [name for name, request in self.calls if session in (None, request.session_uuid)]

    def requests(self, name):
        return [request for called, request in self.calls if called == name]

    def note(self, name, request):
        self.calls.append((name, request))
        return common.Empty()

    def start_session(self, request, context):
        self.note("start", request)
        return common.SessionRequestStatus()

    def close_session(self, request, context):
        return self.note("close", request)

    def submit_image_observation(self, request, context):
        return self.note("image", request)

    def submit_egomotion_observation(self, request, context):
        self.poses[request.session_uuid] = request.trajectory.poses[-1].pose
        return self.note("ego", request)

    def submit_route(self, request, context):
        return self.note("route", request)

    def submit_recording_ground_truth(self, request, context):
        return self.note("recording", request)

    def drive(self, request, context):
        self.note("drive", request)
        return self.answer(request, context)

    def straight(self, request, context):
        out, pose = ego.DriveResponse(), self.poses[request.session_uuid]
        for k in range(30):
            item = out.trajectory.poses.add(timestamp_us=request.time_now_us + 100_000 * k)
            item.pose.CopyFrom(pose)
            item.pose.vec.x += 0.5 * k
        return out


# ---------------------------------------------------------------- whole drives


class AlongTheRoute:
    """Keeps the present speed along the route; reads what crosses the wire."""

    spec = PolicySpec()

    def act(self, observation, seeds, sampling):
        plan = np.zeros((len(seeds), 64, 3), np.float32)
        for n in range(len(seeds)):
            points = observation["route_rig"][n][observation["route_mask"][n]].astype(float)
            points[0] = 0.0
            arc = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(points, axis=0).T))])
            at = float(observation["ego_dynamics_rig"][n, 0]) * 0.1 * np.arange(1, 65)
            plan[n, :, 0], plan[n, :, 1] = np.interp(at, arc, points[:, 0]), np.interp(at, arc, points[:, 1])
            plan[n, :, 2] = np.arctan2(np.gradient(plan[n, :, 1]), np.maximum(np.gradient(plan[n, :, 0]), 1e-6))
        return plan_decision(plan)


def drive_all(simulator, scenes, policy, horizon=35):
    core = DrivingCore(simulator, build_terms(reward_section("driving"), simulator), policy.spec)
    with closing(core):
        asked = [EpisodeRequest(scene, horizon_ticks=horizon) for scene in scenes]
        return Collector(core, policy, min_ready=1, timeout_s=60.0).collect(asked, Sampling("mean"))


@pytest.mark.parametrize("count", [6, pytest.param(64, marks=pytest.mark.slow)])
def test_the_served_world_equals_the_one_in_the_process(world, count):
    policy, scenes = AlongTheRoute(), SCENES[:count]
    here = EmbeddedConfig(end_on=[]).build(policy.spec, DatasetSection(), 4, ())
    there = AlpasimConfig(
        address=f"127.0.0.1:{world.port}", control_period_us=PERIOD, force_gt_duration_us=WARMUP
    ).build(policy.spec, DatasetSection(scene_ids=scenes), 4, ())
    ours, theirs = drive_all(here, scenes, policy), drive_all(there, scenes, policy)
    for a, b in zip(ours, theirs, strict=True):
        assert a.ended == b.ended
        assert len(a) == len(b)
        assert a.observation.keys() == b.observation.keys()
        for name, array in a.observation.items():
            np.testing.assert_array_equal(array[0], b.observation[name][0], err_msg=name)
        apart = a.decisions.plan_rig[:10, :, :2] - b.decisions.plan_rig[:10, :, :2]
        assert np.hypot(*np.moveaxis(apart, -1, 0)).max() < 1e-3
        # In the tick of an event a world in the process keeps the numbers of its moment.
        for name, paid in a.terms.items():
            np.testing.assert_allclose(b.terms[name], paid, atol=0.02 if name == "pace" else 1e-3, err_msg=name)
    scores = np.array([[a.driving_score, b.driving_score] for a, b in zip(ours, theirs, strict=True)])
    assert abs(np.diff(scores.mean(axis=0))[0]) < 0.02
    assert 0.0 < scores.mean() < 1.0


def test_a_third_partys_policy_server_drives_whole_scenes(world, tmp_path):
    command = [sys.executable, "-m", "carla_driver_interface.cli", "serve", "--mode", "alpasim", "--port", "0"]
    command += ["--policy", "route_follower", "--log-file", str(tmp_path / "log")]
    port = free_port()
    command[command.index("0")] = str(port)
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            grpc.channel_ready_future(channel).result(timeout=30)
        returns = simulate(world, port, SCENES[:4])
    finally:
        server.terminate()
        server.wait(30)
    assert [answer.success for answer in returns] == [True] * 4, [answer.error for answer in returns]
    for answer in returns:
        # The whole recording: 8.6 s and more, the handover at 1.6 s, a sample each reported pose: 0.1 s.
        progress = next(metric for metric in answer.timestep_metrics if metric.name == "progress")
        assert list(progress.timestamps_us) == [WARMUP + 100_000 * k for k in range(len(progress.timestamps_us))]
        assert len(progress.values) > 60
        assert answer.aggregated_metrics["dist_traveled_m"] > 5.0


SIZES = {"front": (48, 80), "camera_front_wide_120fov": (40, 64)}


class Looks(AlongTheRoute):
    """The same, with pictures."""

    spec = PolicySpec(
        fields=("ego_history_rig", "ego_dynamics_rig", "route_rig", "camera_rays"), cameras=SIZES, frames=2
    )


@pytest.fixture(scope="module")
def seen():
    with served(sizes=SIZES) as server:
        yield server


def test_served_pictures_equal_those_in_the_process(seen):
    scenes = SCENES[:2]
    there = AlpasimConfig(
        address=f"127.0.0.1:{seen.port}", control_period_us=PERIOD, force_gt_duration_us=WARMUP
    ).build(Looks.spec, DatasetSection(scene_ids=scenes), 2, ())
    theirs = drive_all(there, scenes, Looks(), horizon=6)
    spec = replace(Looks.spec, fields=AlongTheRoute.spec.fields)
    world = EmbeddedConfig(end_on=[], cameras=CamerasConfig(encoding="jpeg95"))
    blind = AlongTheRoute()
    blind.spec = spec
    ours = drive_all(world.build(spec, DatasetSection(), 2, ()), scenes, blind, horizon=6)
    for a, b in zip(ours, theirs, strict=True):
        for name, array in a.observation.items():
            if not name.endswith("_frame_id"):  # the file's hash there, the pixels' here
                np.testing.assert_array_equal(array[0], b.observation[name][0], err_msg=name)
        assert b.observation["camera_front_rays_mask"].all()
        assert b.observation["camera_front"][0].std() > 5.0
        assert b.receipt.pictures["front"].endswith("JPEG 48x80 by 8/8 to 48x80")


def test_pictures_come_with_each_step_and_one_after_the_last(seen):
    with Driver() as driver:
        (answer,) = simulate(seen, driver.port, ids=["pictures"])
        drives, images = driver.requests("drive"), driver.requests("image")
        declared = driver.requests("start")[0].rollout_spec.vehicle.available_cameras
    assert answer.success
    assert [camera.logical_id for camera in declared] == list(SIZES)
    # Every 0.1 s from the first step on, to the end of the last one.
    times = [image.camera_image.frame_end_us for image in images if image.camera_image.logical_id == "front"]
    assert sorted(times) == list(range(0, drives[-1].time_query_us + 1, 100_000))
    assert images[0].camera_image.image_bytes[:3] == b"\xff\xd8\xff"


def test_a_camera_that_is_not_served_is_refused_by_the_driver(world):
    there = AlpasimConfig(
        address=f"127.0.0.1:{world.port}", control_period_us=PERIOD, force_gt_duration_us=WARMUP
    ).build(Looks.spec, DatasetSection(scene_ids=SCENES[:1]), 1, ())
    (episode,) = drive_all(there, SCENES[:1], Looks())
    assert episode.failure.kind == "permanent"
    assert "'front'" in episode.failure.text


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---------------------------------------------------------------- order and content of the calls


def test_calls_come_in_alpasims_order(world):
    with Driver() as driver:
        (answer,) = simulate(world, driver.port, ids=["a-session"])
        names = driver.names()
        first = driver.requests("ego")[0]
        drives = driver.requests("drive")
    assert answer.success
    assert answer.rollout_uuid == "a-session"
    assert names[0] == "start"
    assert names[-1] == "close"
    assert names.count("start") == names.count("close") == 1
    # 8 recorded steps with observations and without a drive, then observations and a drive a step.
    assert "drive" not in names[: 1 + 8 * 3]
    assert names.count("ego") == names.count("route") == names.count("recording") == 8 + len(drives)
    tail = names[1 + 8 * 3 : -1]
    assert [sorted(tail[k : k + 4]) for k in range(0, len(tail), 4)] == [["drive", "ego", "recording", "route"]] * len(
        drives
    )
    assert [tail[k + 3] for k in range(0, len(tail), 4)] == ["drive"] * len(drives)
    assert [d.time_now_us for d in drives] == [WARMUP + PERIOD * k for k in range(len(drives))]
    assert {d.time_query_us - d.time_now_us for d in drives} == {PERIOD}
    assert [pose.timestamp_us for pose in first.trajectory.poses] == [0]


def test_at_the_handover_the_car_is_the_origin(world):
    with Driver() as driver:
        simulate(world, driver.port)
        request = driver.requests("ego")[8]
        start = driver.requests("start")[0]
    last = request.trajectory.poses[-1]
    assert last.timestamp_us == WARMUP
    assert (last.pose.vec.x, last.pose.vec.y, last.pose.quat.w, last.pose.quat.z) == (0.0, 0.0, 1.0, 0.0)
    assert len(request.dynamic_states) == len(request.trajectory.poses) == 2  # one a grid step of 0.1 s
    assert request.dynamic_states[-1].linear_velocity.x > 1.0
    assert start.debug_info.scene_id == SCENES[0]


def test_alpasims_zero_dynamics_in_the_warm_up_are_an_option():
    with served(config=EmbeddedConfig(alpasim_quirks=True), zero_dynamics=True) as server, Driver() as driver:
        simulate(server, driver.port)
        states = [request.dynamic_states[-1].linear_velocity.x for request in driver.requests("ego")]
    assert states[:8] == [0.0] * 8
    assert states[9] > 1.0


def test_a_driver_is_asked_in_the_warm_up_if_told():
    with served(skip_driver_during_force_gt=False) as server, Driver() as driver:
        (answer,) = simulate(server, driver.port)
        assert driver.requests("drive")[0].time_now_us == 0
    assert answer.success


def test_terminate_ends_a_rollout_as_a_success_with_measures_so_far(world):
    def answer(request, context):
        if request.time_now_us < WARMUP + 5 * PERIOD:
            return driver.straight(request, context)
        return ego.DriveResponse(terminate_session=True)

    with Driver(answer) as driver:
        (result,) = simulate(world, driver.port)
    assert result.success
    # Our own measures are sampled once a tick, AlpaSim's at each reported pose: twice.
    counts = {metric.name: len(metric.values) for metric in result.timestep_metrics}
    assert {count for name, count in counts.items() if name.startswith("alpagym/")} <= {6}
    assert {count for name, count in counts.items() if not name.startswith("alpagym/")} == {11}


def test_measures_that_need_candidate_plans_are_nan_without_any(world):
    def sampled(request, context):
        out = driver.straight(request, context)
        out.debug_info.sampled_trajectories.add().CopyFrom(out.trajectory)
        return out

    with Driver() as driver:
        (plain,) = simulate(world, driver.port)
    with Driver(sampled) as driver:
        (candidate,) = simulate(world, driver.port)
    assert math.isnan(plain.aggregated_metrics["min_ade@0.5s(gt)"])
    assert candidate.aggregated_metrics["min_ade@0.5s(gt)"] >= 0.0
    assert "scene_score" not in plain.aggregated_metrics


# ---------------------------------------------------------------- requests


def test_wrong_requests_have_alpasims_statuses(world):
    with Driver() as driver:
        ask = lambda *scenes, **options: refusal(simulate, world, driver.port, scenes or SCENES[:1], **options)  # noqa: E731
        code, text = ask("nowhere")
        assert (code, text) == (CODE.INVALID_ARGUMENT, "No data source found for scene_id: nowhere")
        assert ask(each=0)[0] == CODE.INVALID_ARGUMENT
        assert ask(ids=["a", "b"])[0] == CODE.UNKNOWN
        assert ask(ids=["a", "a"], count=2)[0] == CODE.INVALID_ARGUMENT
        assert list(simulate(world, driver.port, count=0)) == []
        assert not driver.calls
    assert refusal(call, world, "simulate", one_spec(), runtime_pb2.SimulationReturn)[0] == CODE.INVALID_ARGUMENT
    with grpc.insecure_channel(f"127.0.0.1:{world.port}") as channel:
        code, _ = refusal(channel.unary_unary("/RuntimeService/simulate"), b"\xff\xff not a message", timeout=20)
    assert code == CODE.INVALID_ARGUMENT


def one_spec():
    request = runtime_pb2.SimulationRequest()
    request.rollout_specs.add(scenario_id=SCENES[0], nr_rollouts=1)
    return request


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/x", "a/b", "..", "", "a\0b", "con\nid", "a" * 300, "-rf", "%2e%2e", "x;touch y"]
)
def test_session_ids_that_are_no_names_are_refused(world, name):
    code, text = refusal(simulate, world, 1, ids=[name])
    assert code == CODE.INVALID_ARGUMENT
    assert "\n" not in text


def test_only_this_machine_reaches_the_world(world):
    found = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    where = {c.laddr.ip.removeprefix("::ffff:") for c in found if c.laddr.port == world.port}
    assert where == {"127.0.0.1"}


def test_the_info_says_what_is_served(world):
    info = call(world, "get_runtime_info", common_pb2.Empty(), runtime_pb2.RuntimeInfo)
    assert info.max_supported_concurrent_rollouts == 4
    assert [scene.scene_id for scene in info.scenes] == sorted(world.simulator.spec.scenes)
    assert len({scene.metadata.dataset_hash for scene in info.scenes}) == len(info.scenes)
    assert [c.service_name for c in info.service_capacities] == [
        "controller",
        "driver",
        "physics",
        "renderer",
        "trafficsim",
    ]
    assert info.driver_version.version_id == "<skip>"


def test_more_rollouts_than_slots_take_turns(world):
    with Driver() as driver:
        answers = simulate(world, driver.port, SCENES[:3], count=3, each=16)
        starts = driver.requests("start")
    assert [answer.success for answer in answers] == [True] * 9
    assert [answer.rollout_spec.scenario_id for answer in answers] == [s for s in SCENES[:3] for _ in range(3)]
    assert len({start.session_uuid for start in starts}) == 9


# ---------------------------------------------------------------- faults of a driver


def test_an_unreachable_driver_fails_at_once_after_its_attempts(world):
    began, before = time.monotonic(), world.counts.attempts
    (answer,) = simulate(world, free_port(), ids=["unreachable"])
    assert time.monotonic() - began < 10.0
    assert not answer.success
    assert "UNAVAILABLE" in answer.error
    assert answer.error_code == runtime_pb2.ROLLOUT_ERROR_CODE_UNSPECIFIED
    assert world.counts.attempts - before == 3
    assert world.counts.running == 0


def test_a_retry_comes_under_the_same_id_and_may_succeed(world):
    failed = []

    def once(request, context):
        if not failed:
            failed.append(request.session_uuid)
            context.abort(CODE.INTERNAL, "a hiccup")
        return driver.straight(request, context)

    with Driver(once) as driver:
        (answer,) = simulate(world, driver.port, ids=["again"])
        names = driver.names("again")
    assert answer.success
    assert names.count("start") == names.count("close") == 2


def test_a_driver_that_hangs_fails_by_the_deadline_and_the_others_go_on():
    release = threading.Event()

    def hang(request, context):
        if request.session_uuid == "hangs":
            release.wait(30)
        return driver.straight(request, context)

    with served(retries=0, drive_timeout_s=1.0) as server, Driver(hang) as driver:
        began = time.monotonic()
        answers = simulate(server, driver.port, count=2, ids=["hangs", "goes"])
        assert time.monotonic() - began < 25.0
        release.set()
        assert [answer.success for answer in answers] == [False, True]
        assert "DEADLINE_EXCEEDED" in answers[0].error
        assert server.counts.errors == {"DEADLINE_EXCEEDED": 1}
        (answer,) = simulate(server, driver.port, ids=["goes"])
        assert answer.success


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda plan: plan.ClearField("poses"), "empty plan"),
        (lambda plan: setattr(plan.poses[0], "timestamp_us", plan.poses[1].timestamp_us), "do not increase strictly"),
        (lambda plan: plan.poses.pop(0), "outside range"),
        (lambda plan: setattr(plan.poses[3].pose.quat, "w", 0.5), "is none"),
        (lambda plan: setattr(plan.poses[3].pose.vec, "x", math.nan), "is none"),
    ],
    ids=["empty", "times", "late", "norm", "nan"],
)
def test_plans_that_alpasim_would_not_drive_fail_the_rollout(change, text):
    plan = common_pb2.Trajectory()
    for k in range(10):
        plan.poses.add(timestamp_us=1_000_000 + 100_000 * k).pose.quat.w = 1.0
    times, poses = read_plan(plan, 1_000_000, 1_200_000)
    assert (len(times), poses.shape) == (10, (10, 3))
    change(plan)
    with pytest.raises(RolloutError, match=text):
        read_plan(plan, 1_000_000, 1_200_000)


class Marker:
    """Unpickling this would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_what_a_driver_says_beside_its_plan_may_be_large_and_is_not_unpickled(world, tmp_path):
    # gRPC alone refuses answers from 4 MiB on, and AlpaSim unpickles these bytes.
    secret = pickle.dumps(Marker(tmp_path / "made")) + bytes(6_000_000)
    last = []

    def answer(request, context):
        out = driver.straight(request, context)
        if last:
            out.terminate_session = True
        out.debug_info.unstructured_debug_info = secret
        last.append(request)
        return out

    with Driver(answer) as driver:
        (result,) = simulate(world, driver.port)
    assert result.success
    assert len(last) == 2
    assert not list(tmp_path.iterdir())


def test_a_request_beyond_the_limit_is_refused_alone(world):
    limit = world.options.max_message_mib * 2**20
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{world.port}", options=options) as channel:
        simulating = channel.unary_unary("/RuntimeService/simulate")
        code, _ = refusal(simulating, bytes(limit + 1), timeout=20)
        assert code == CODE.RESOURCE_EXHAUSTED
        empty = simulating(runtime_pb2.SimulationRequest().SerializeToString(), timeout=20)
    assert not runtime_pb2.SimulationReturn.FromString(empty).rollout_returns


def test_a_short_plan_is_held_at_its_end():
    # 2 m/s for 0.5 s, then the last pose: at 0.1 s 0.2 m, from 0.5 s on 1 m.
    times, poses = np.array([0, 500_000]), np.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    plan = plan_at_steps(times, poses, 0, 100_000, 8)
    np.testing.assert_allclose(plan[:, 0], [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0, 1.0], atol=1e-12)


DRIVER = """
import sys, threading
from alpagym_runtime.policies.config import ConstantSpeedConfig
from alpagym_runtime.simulators.alpasim.config import ServerConfig
from alpagym_runtime.simulators.alpasim.drive import PolicyDriver
driver = PolicyDriver(ConstantSpeedConfig().build(), ServerConfig(port=int(sys.argv[1])))
driver.start()
print("ready", flush=True)
driver.serve()
"""


def test_a_killed_driver_is_noticed_and_its_slots_come_back(world):
    port = free_port()
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(port)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout.readline() == "ready\n"
    with ThreadPoolExecutor(1) as pool:
        # 8 rollouts of 7 s each, in 4 slots; the driver dies when the first ones drive.
        running = pool.submit(simulate, world, port, SCENES[:4], count=2, each=4)
        while not world.counts.running:
            time.sleep(0.01)
        driver.kill()
        driver.wait(10)
        driver.stdout.close()
        began = time.monotonic()
        answers = running.result(60)
    assert time.monotonic() - began < 10.0
    lost = [answer for answer in answers if not answer.success]
    assert lost
    assert all("UNAVAILABLE" in answer.error for answer in lost)
    assert world.counts.running == 0
    with Driver() as fine:
        assert simulate(world, fine.port)[0].success


# ---------------------------------------------------------------- the server's own life


def test_a_taken_port_is_said(world):
    other = WorldServer(ServeOptions(world.options.rollout, port=world.port), world.simulator)
    with pytest.raises(OSError, match=str(world.port)):
        other.start()


def test_stopping_ends_rollouts_and_threads():
    def ours():
        return [thread for thread in threading.enumerate() if thread.name in ("served-world", "world")]

    before = len(ours())
    with Driver() as driver:
        with served() as server:
            channel = grpc.insecure_channel(f"127.0.0.1:{server.port}")
            request = one_spec()
            request.rollout_specs[0].nr_rollouts = 50
            request.available_drivers.add(ip="127.0.0.1", port=driver.port)
            request.n_concurrent_per_driver = 1
            running = channel.unary_unary("/RuntimeService/simulate").future(request.SerializeToString())
            while not driver.requests("drive"):
                time.sleep(0.01)
            server.stop()
            assert running.code() in (CODE.UNAVAILABLE, CODE.CANCELLED, CODE.UNKNOWN)
            channel.close()
        names = driver.names()
        assert names.count("start") == names.count("close")
    assert len(ours()) == before


def test_shut_down_ends_the_server():
    with served() as server:
        call(server, "shut_down", common_pb2.Empty(), common_pb2.Empty)
        assert server.wait(15.0)


# ---------------------------------------------------------------- logs

SCENE = SCENES[3]


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    with served(folder=folder) as server, Driver() as driver:
        (answer,) = simulate(server, driver.port, [SCENE], ids=["logged"])
        yield folder, answer, server.simulator.scene(SCENE), driver.calls


def test_a_served_rollout_is_logged_in_the_order_of_its_calls(logged):
    folder, answer, _, calls = logged
    entries = list(read_asl(rollout_path(folder, SCENE, "logged")))
    kinds = [kind_of(entry) for entry in entries]
    assert answer.success
    assert kinds[:2] == ["rollout_metadata", "driver_session_request"]
    drives = sum(name == "drive" for name, _ in calls)
    assert kinds.count("driver_request") == kinds.count("driver_return") == drives
    assert kinds.count("actor_poses") == 1 + 2 * (8 + drives)  # the first, and each 0.1 s of the steps
    meta = entries[0].rollout_metadata
    assert meta.force_gt_duration == 1_600_000
    assert meta.actor_definitions.actor_aabb[0].actor_id == "EGO"
    assert all(describe(entry) or kind_of(entry) == "driver_request" for entry in entries)
    for entry in entries:
        json.dumps(to_dict(entry), allow_nan=False)


def test_a_rollout_is_scored_again_from_its_log(logged):
    folder, answer, scene, _ = logged
    again = score_again(read_asl(rollout_path(folder, SCENE, "logged")), scene)
    compared = 0
    for metric in answer.timestep_metrics:
        name = f"alpasim/{metric.name}"
        if name not in again:
            continue
        np.testing.assert_array_equal(again[name].valid, metric.valid, err_msg=name)
        good = again[name].valid
        # The log holds float32: 1e-4 m at 100 m and more; flags are equal.
        np.testing.assert_allclose(again[name].value[good], np.array(metric.values)[good], atol=2e-4, err_msg=name)
        compared += 1
    assert compared >= 15


@pytest.mark.parametrize(("interval", "each"), [(0, 1), (40_000, 5)])
def test_driver_and_log_are_told_the_poses_of_the_interval(tmp_path, interval, each):
    with served(folder=tmp_path, steps=14, pose_reporting_interval_us=interval) as server, Driver() as driver:
        (answer,) = simulate(server, driver.port, [SCENE], ids=["fine"])
        scene = server.simulator.scene(SCENE)
    told = [request.trajectory.poses for request in driver.requests("ego")]
    # Fourteen ticks of 0.2 s: before the first all that was recorded, then so many a tick.
    assert [len(poses) for poses in told[1:]] == [each] * 13
    times = [item.timestamp_us for poses in told for item in poses]
    begin, step = told[0][-1].timestamp_us, interval or PERIOD
    assert times[len(told[0]) - 1 :] == [begin + step * k for k in range(1 + 13 * each)]
    progress = next(metric for metric in answer.timestep_metrics if metric.name == "progress")
    # Six ticks are the driver's.
    assert list(progress.timestamps_us) == [begin + WARMUP + step * k for k in range(1 + 6 * each)]
    again = score_again(read_asl(rollout_path(tmp_path, SCENE, "fine")), scene)
    np.testing.assert_allclose(again["alpasim/progress"].value, np.array(progress.values), atol=2e-4)


def test_a_log_of_another_scene_is_refused(logged):
    folder, _, scene, _ = logged
    entries = list(read_asl(rollout_path(folder, SCENE, "logged")))
    entries[0].rollout_metadata.session_metadata.scene_id = "elsewhere"
    with pytest.raises(CorruptFileError, match="elsewhere"):
        score_again(entries, scene)
    with pytest.raises(CorruptFileError, match="rollout_metadata"):
        score_again(entries[1:], scene)


def test_a_full_disk_fails_that_rollout_only(tmp_path):
    class Full(AslLog):
        def write(self, kind, message):
            raise OSError(28, "No space left on device")

    with served(retries=0, log=lambda scene, session: Full(tmp_path, scene, session)) as server, Driver() as driver:
        (answer,) = simulate(server, driver.port, [SCENE])
        assert not answer.success
        assert "No space left" in answer.error
        assert server.counts.running == 0
        server._open_log = lambda scene, session: AslLog(tmp_path, scene, session)
        assert simulate(server, driver.port, [SCENE])[0].success


def test_a_disk_that_fills_up_fails_the_rollouts_on_it_and_room_heals(tmp_path):
    # A log of this scene has some 280 KB: the second one does not fit on 400 KiB.
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", tmp_path], check=False)
    if done.returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        with served(retries=0, folder=tmp_path) as server, Driver() as driver:
            answers = [simulate(server, driver.port, [SCENE])[0] for _ in range(4)]
            assert [answer.success for answer in answers] == [True, False, False, False]
            assert all("No space left" in answer.error for answer in answers[1:])
            assert "rollout.asl" in answers[1].error
            assert driver.names().count("start") == driver.names().count("close")
            for path in tmp_path.iterdir():
                shutil.rmtree(path)
            assert simulate(server, driver.port, [SCENE])[0].success
    finally:
        subprocess.run(["umount", tmp_path], check=True)
