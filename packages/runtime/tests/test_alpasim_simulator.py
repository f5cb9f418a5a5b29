"""AlpaSim behind the Simulator protocol, against the fake one: rollouts, measures, and every fault that it knows."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import pytest

from alpagym_runtime.envs.core import DrivingCore, build_terms
from alpagym_runtime.envs.presets import reward_section
from alpagym_runtime.episodes.format import read, write
from alpagym_runtime.errors import ConfigError, SimulatorError
from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.policies.config import ConstantSpeedConfig, FakeVlaConfig, LogReplayConfig
from alpagym_runtime.rollouts.collector import Collector
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.alpasim.config import AlpasimConfig, ServerConfig
from alpagym_runtime.simulators.alpasim.measures import measures_of, ticks_until_event
from alpagym_runtime.simulators.alpasim.wire import egodriver_pb2, runtime_pb2
from alpagym_runtime.testing.fake_alpasim import EPOCH_US, FakeAlpaSim, Fault, picture
from alpagym_runtime.types import Ended, EpisodeRequest, PolicySpec, Sampling

CAMERAS = {"front": (24, 32)}


def config(*fakes, **options):
    server = ServerConfig(**options.pop("server", {}))
    address = ",".join(fake.address for fake in fakes)
    return AlpasimConfig(address=address, **{"force_gt_duration_us": 300_000, "server": server, **options})


@contextmanager
def collecting(*fakes, policy=None, slots=4, reward="distance_to_gt", retries=2, timeout_s=30.0, labels=(), **options):
    policy = policy or ConstantSpeedConfig().build()
    simulator = config(*fakes, **options).build(policy.spec, DatasetSection(), slots, labels)
    core = DrivingCore(simulator, build_terms(reward_section(reward), simulator), policy.spec)
    with closing(core):
        yield Collector(core, policy, retries=retries, timeout_s=timeout_s, min_ready=1)


def requests(*scenes, horizon=5):
    return [EpisodeRequest(scene, horizon_ticks=horizon, world_seed=i, policy_seed=i) for i, scene in enumerate(scenes)]


def outcomes(episodes):
    return [episode.ended.name for episode in episodes]


def failures(episodes):
    return [(e.failure.kind, e.failure.code) for e in episodes if e.failure is not None]


# ---------------------------------------------------------------- whole drives


@pytest.mark.parametrize("skip", [True, False], ids=["warm-up skipped", "warm-up asked"])
def test_the_collector_drives_alpasim_like_any_world(skip):
    policy = FakeVlaConfig(cameras=["front"], height=24, width=32, frames=2).build()
    with (
        FakeAlpaSim(cameras=CAMERAS, skip_driver_during_force_gt=skip) as fake,
        collecting(fake, policy=policy, reward="progress_safety", skip_driver_during_force_gt=skip) as collector,
    ):
        episodes = collector.collect(requests("clip-a", "clip-b", "clip-c-short", "clip-a", "clip-b"), Sampling("mean"))
    assert outcomes(episodes) == ["HORIZON"] * 5
    for episode in episodes:
        driven = episode.controls
        assert len(episode) == (5 if skip else 8)
        assert driven.tolist() == [False] * (0 if skip else 3) + [True] * 5
        times = episode.observation["time_us"]
        assert times.dtype == np.int64
        assert times[0] == EPOCH_US + (400_000 if skip else 100_000)
        assert (np.diff(times) == 100_000).all()
        assert episode.rewards.sum() == pytest.approx(sum(t.sum() for t in episode.terms.values()), abs=1e-9)
        assert 0.0 < episode.driving_score <= 1.0
        assert not episode.initial_fault
        # Decoded pictures are those of the frame at each observation's own time.
        shown = episode.observation["camera_front"][-1, -1, 5, 5]
        assert abs(int(shown[0]) - (int(times[-1]) // 10_000 + 5) % 256) <= 3
    same_a, same_b = episodes[0], episodes[3]
    for name, array in same_a.observation.items():
        assert array.tobytes() == same_b.observation[name].tobytes(), name


def test_the_recording_drives_perfectly_when_replayed():
    with (
        FakeAlpaSim() as fake,
        collecting(fake, policy=LogReplayConfig().build(), reward="progress_safety") as collector,
    ):
        episodes = collector.collect(requests("clip-a", "clip-b", horizon=20), Sampling("mean"))
    for episode in episodes:
        assert episode.ended == Ended.HORIZON
        # Plans go through float32: 30 m · 2^-24 = 2 um a tick.
        assert episode.measures["distance_to_gt_m"].value.max() < 1e-3
        assert episode.measures["progress"].aggregate() == pytest.approx(1.0, abs=1e-3)
        assert episode.driving_score == pytest.approx(1.0, abs=1e-3)
        assert len(episode.measures["alpasim/progress"].value) == 21
        assert episode.measures["alpasim/scene_score"].aggregate() > 0.0


def test_the_horizon_ends_the_rollout_early():
    with FakeAlpaSim() as fake, collecting(fake) as collector:
        collector.collect(requests("clip-a", horizon=3), Sampling())
        (rollout,) = fake.rollouts
    assert rollout.terminated
    assert rollout.drives == 4  # three decisions, and the one that ends it
    assert egodriver_pb2.DriveResponse.FromString(rollout.replies[-1]).terminate_session


def test_alpasims_own_end_is_a_truncation():
    with FakeAlpaSim(n_sim_steps=8, cameras=CAMERAS) as fake:
        policy = FakeVlaConfig(cameras=["front"], height=24, width=32).build()
        with collecting(fake, policy=policy, reward="progress_safety") as collector:
            (episode,) = collector.collect(requests("clip-a", horizon=50), Sampling())
    assert outcomes([episode]) == ["SCENE_END"]
    assert len(episode) == 5  # 8 steps, 3 of warm-up
    times = episode.observation["time_us"]
    assert (np.diff(times) == 100_000).all()
    # The last frame came, the last pose did not.
    assert episode.observation["camera_front_time_us"][-1, 0] == times[-1]
    assert episode.measures["distance_to_gt_m"].valid.tolist() == [True] * 5 + [False]
    assert episode.measures["alpasim/dist_to_gt_location"].valid.all()


def test_events_are_counted_from_alpasims_metrics():
    def swerve(observation):
        plan = np.zeros((len(observation["time_us"]), 64, 3))
        plan[..., 0] = 0.8 * np.arange(1, 65)
        plan[..., 1] = 0.25 * np.arange(1, 65)
        return plan

    class Swerve:
        spec = PolicySpec()

        def act(self, observation, seeds, sampling):
            return plan_decision(swerve(observation))

    with FakeAlpaSim() as fake, collecting(fake, policy=Swerve(), reward="progress_safety") as collector:
        (episode,) = collector.collect(requests("clip-a", horizon=40), Sampling())
    measures = episode.measures
    assert measures["offroad_count"].aggregate() == 1.0
    at = int(np.flatnonzero(np.diff(measures["offroad_count"].value))[0]) + 1
    assert measures["alpasim/offroad"].value[at] == 1.0
    assert measures["alpasim/offroad"].value[at - 1] == 0.0
    assert (measures["progress"].value[at:] == measures["progress"].value[at]).all()
    assert episode.driving_score == 0.0
    # The event pays on its tick, once: -5.
    assert episode.terms["off_road"].tolist() == [0.0] * (at - 1) + [-5.0] + [0.0] * (40 - at)


def test_frames_arrive_once_as_they_came():
    spec = PolicySpec(cameras=CAMERAS, frames=3)
    with FakeAlpaSim(cameras=CAMERAS) as fake, closing(config(fake).build(spec, DatasetSection(), 1, ())) as simulator:
        simulator.start(np.array([0]), requests("clip-a", horizon=4))
        frames = []
        for _ in range(5):
            batch = simulator.receive(1, 20.0)
            frames += batch.frames
            if batch.ended[0]:
                break
            simulator.send(batch.slots, plan_decision(np.zeros((1, 64, 3))), np.zeros(1, bool))
    assert [frame.time_us for frame in frames] == [EPOCH_US + 100_000 * k for k in range(2, 9)]
    assert len({frame.frame_id for frame in frames}) == 7
    for frame in frames:
        assert frame.format == "jpeg"
        assert frame.data == picture("clip-a", "front", frame.time_us, 24, 32, "jpeg")


@pytest.mark.parametrize("image_format", ["jpeg", "png"])
def test_what_was_seen_is_read_back_from_what_arrived(tmp_path, image_format):
    policy = FakeVlaConfig(cameras=["front"], height=16, width=24, frames=2).build()
    with (
        FakeAlpaSim(cameras={"front": (48, 64)}, image_format=image_format) as fake,
        closing(config(fake).build(policy.spec, DatasetSection(), 1, ())) as simulator,
    ):
        collector = Collector(DrivingCore(simulator, {}, policy.spec), policy, keep_frames=True)
        (episode,) = collector.collect(requests("clip-a", horizon=4), Sampling("mean"))
    # 48 x 64 by 2/8 is 12 x 16, too small for 16 x 24; the next of 1, 2, 4 and 8 eighths is 24 x 32.
    how = "JPEG 48x64 by 4/8 to 16x24" if image_format == "jpeg" else "PNG 48x64 to 16x24"
    assert episode.receipt.pictures["front"].startswith("simplejpeg ")
    assert episode.receipt.pictures["front"].endswith(how)
    file = tmp_path / "episode.arrow"
    write(episode, file, frames="arrived")
    back = read(file)
    np.testing.assert_array_equal(back.observation["camera_front"], episode.observation["camera_front"])
    assert back.receipt == episode.receipt


def test_labels_are_the_recording_from_here_on():
    with FakeAlpaSim() as fake:
        simulator = config(fake).build(PolicySpec(), DatasetSection(), 1, ("recorded_plan_rig",))
        with closing(simulator):
            simulator.start(np.array([0]), requests("clip-a"))
            batch = simulator.receive(1, 20.0)
    from alpagym_runtime.testing.fake_alpasim import Road

    road = Road("clip-a")
    here, then = road.pose(400_000), road.pose(1_400_000)
    dx, dy = then[:2] - here[:2]
    expected = (math.cos(here[2]) * dx + math.sin(here[2]) * dy, math.cos(here[2]) * dy - math.sin(here[2]) * dx)
    np.testing.assert_allclose(batch.labels["recorded_plan_rig"][0, 9, :2], expected, atol=2e-5)
    assert batch.labels["recorded_plan_rig_mask"].all()


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("kind", ["delay", "reorder", "duplicate"])
def test_late_swapped_and_doubled_calls_change_nothing(kind):
    spec_policy = FakeVlaConfig(cameras=["front"], height=24, width=32, frames=3)

    def drive(*faults):
        with FakeAlpaSim(cameras=CAMERAS, faults=faults, camera_interval_us=50_000) as fake:
            with collecting(fake, policy=spec_policy.build()) as collector:
                return collector.collect(requests("clip-a", "clip-b"), Sampling())

    for plain, odd in zip(drive(), drive(Fault(kind, seconds=0.01)), strict=True):
        assert odd.ended == Ended.HORIZON
        for name, array in plain.observation.items():
            assert array.tobytes() == odd.observation[name].tobytes(), name


def test_an_oversize_message_is_refused_alone():
    fault = Fault("oversize", tick=4, bytes=4 * 2**20 + 1)
    with FakeAlpaSim(faults=(fault,)) as fake, collecting(fake, server={"max_message_mib": 4}) as collector:
        episodes = collector.collect(requests("clip-a"), Sampling())
        assert fake.rollouts[0].statuses == [("submit_image_observation", "RESOURCE_EXHAUSTED")]
    assert outcomes(episodes) == ["HORIZON"]


def test_malformed_bytes_are_refused_alone():
    with FakeAlpaSim(faults=(Fault("malformed", tick=4),)) as fake, collecting(fake) as collector:
        episodes = collector.collect(requests("clip-a", "clip-b"), Sampling())
        statuses = dict(fake.rollouts[0].statuses)
    assert outcomes(episodes) == ["HORIZON"] * 2
    assert set(statuses.values()) <= {"INVALID_ARGUMENT", "NOT_FOUND"}
    assert len(statuses) == 7


def test_a_bad_picture_voids_its_episode_and_a_retry_helps():
    policy = FakeVlaConfig(cameras=["front"], height=24, width=32).build()
    with FakeAlpaSim(cameras=CAMERAS, faults=(Fault("bad_image", tick=5, rollouts=(0,)),)) as fake:
        with collecting(fake, policy=policy, slots=2) as collector:
            episodes = collector.collect(requests("clip-a", "clip-b"), Sampling())
        assert outcomes(episodes) == ["HORIZON"] * 2
        assert collector.counts == {"retried": 1, "episodes": 2}
        assert sorted(episode.request.attempt for episode in episodes) == [0, 1]
        with collecting(fake, policy=policy, slots=2, retries=0) as collector:
            pass


def test_a_rollout_that_begins_again_after_decisions_is_void():
    # AlpaSim retries under the same id; what we were told before cannot be untold.
    with FakeAlpaSim(faults=(Fault("fail", tick=5, attempts=1),)) as fake:
        with collecting(fake, retries=0) as collector:
            (episode,) = collector.collect(requests("clip-a"), Sampling())
        assert episode.ended == Ended.FAILED
        assert failures([episode]) == [("transient", "RESTARTED")]


def test_a_rollout_that_begins_again_before_any_decision_goes_on():
    with FakeAlpaSim(faults=(Fault("fail", tick=1, attempts=2),)) as fake, collecting(fake, retries=0) as collector:
        (episode,) = collector.collect(requests("clip-a"), Sampling())
        assert [rollout.attempt for rollout in fake.rollouts] == [0, 1, 2]
    assert episode.ended == Ended.HORIZON
    assert len(episode) == 5


def test_transient_failures_are_retried_a_bounded_number_of_times():
    with FakeAlpaSim(faults=(Fault("fail", tick=1),)) as fake, collecting(fake, retries=2) as collector:
        (episode,) = collector.collect(requests("clip-a"), Sampling())
        assert len({rollout.session_id for rollout in fake.rollouts}) == 3
    assert failures([episode]) == [("transient", "ROLLOUT")]
    assert "told to fail" in episode.failure.text
    assert collector.counts == {"retried": 2, "failed": 1}


def test_permanent_failures_are_not_retried():
    with FakeAlpaSim() as fake, collecting(fake) as collector:
        episodes = collector.collect(requests("nowhere", "clip-a"), Sampling())
        assert [rollout.scene_id for rollout in fake.rollouts] == ["clip-a"]
    assert outcomes(episodes) == ["FAILED", "HORIZON"]
    assert failures(episodes) == [("permanent", "INVALID_SCENE")]
    assert collector.counts["retried"] == 0


def test_the_wrong_scene_is_noticed():
    with FakeAlpaSim(faults=(Fault("wrong_scene", rollouts=(0,)),)) as fake, collecting(fake, slots=1) as collector:
        episodes = collector.collect(requests("clip-a"), Sampling())
    assert outcomes(episodes) == ["HORIZON"]
    assert collector.counts["retried"] == 1


def test_a_wrong_control_period_is_named():
    with FakeAlpaSim(control_period_us=150_000, force_gt_duration_us=300_000) as fake:
        with collecting(fake, retries=0) as collector:
            (episode,) = collector.collect(requests("clip-a"), Sampling())
    assert "150000" in episode.failure.text
    assert "control_period_us is 100000" in episode.failure.text


def test_a_missing_camera_is_permanent():
    policy = FakeVlaConfig(cameras=["tele"], height=24, width=32).build()
    with FakeAlpaSim(cameras=CAMERAS) as fake, collecting(fake, policy=policy) as collector:
        (episode,) = collector.collect(requests("clip-a"), Sampling())
    assert failures([episode]) == [("permanent", "FAILED_PRECONDITION")]
    assert "'tele'" in episode.failure.text
    assert "'front'" in episode.failure.text


def test_a_hanging_rollout_is_void_and_the_others_go_on():
    with FakeAlpaSim(faults=(Fault("hang", tick=5, rollouts=(0,)),)) as fake:
        with collecting(fake, slots=3, server={"idle_timeout_s": 0.6}) as collector:
            episodes = collector.collect(requests("clip-a", "clip-b", "clip-c-short"), Sampling())
        assert outcomes(episodes) == ["HORIZON"] * 3
        assert collector.counts["retried"] == 1


def test_a_rollout_deadline_holds():
    with (
        FakeAlpaSim(faults=(Fault("hang", tick=0),)) as fake,
        collecting(fake, retries=0, rollout_timeout_s=0.5) as collector,
    ):
        began = time.monotonic()
        (episode,) = collector.collect(requests("clip-a"), Sampling())
    assert failures([episode]) == [("transient", "DEADLINE_EXCEEDED")]
    assert time.monotonic() - began < 10.0


def test_no_measures_is_an_error_that_says_so():
    with FakeAlpaSim(faults=(Fault("no_eval"),)) as fake, collecting(fake, reward="metrics") as collector:
        with pytest.raises(SimulatorError, match="collision_count"):
            collector.collect(requests("clip-a"), Sampling())


# ---------------------------------------------------------------- several runtimes


def test_rollouts_go_where_there_is_room():
    with FakeAlpaSim(capacity=1) as small, FakeAlpaSim(capacity=3) as large:
        with collecting(small, large, slots=8) as collector:
            episodes = collector.collect(requests(*["clip-a"] * 12), Sampling())
        assert outcomes(episodes) == ["HORIZON"] * 12
        assert len(small.rollouts) + len(large.rollouts) == 12
        assert len(large.rollouts) > len(small.rollouts) > 0


def test_a_lost_runtime_voids_its_episodes_and_the_others_go_on():
    crash = Fault("crash", tick=6)
    with FakeAlpaSim(capacity=2, faults=(crash,)) as dying, FakeAlpaSim(capacity=2) as living:
        with collecting(dying, living, slots=4, retries=2) as collector:
            episodes = collector.collect(requests(*["clip-a"] * 6), Sampling())
            assert outcomes(episodes) == ["HORIZON"] * 6
            assert 1 <= collector.counts["retried"] <= 2
            # It comes back on its port, and is used again.
            dying.stop()
            with FakeAlpaSim(capacity=2, port=dying.port) as again:
                until = time.monotonic() + 20.0
                while not again.rollouts and time.monotonic() < until:
                    collector.collect(requests(*["clip-b"] * 4), Sampling())
                assert again.rollouts


def test_no_runtime_left_is_a_failure_not_a_hang():
    with (
        FakeAlpaSim(faults=(Fault("crash", tick=4),)) as fake,
        collecting(fake, retries=1, connect_timeout_s=1.0) as collector,
    ):
        (episode,) = collector.collect(requests("clip-a"), Sampling())
    assert episode.ended == Ended.FAILED
    assert episode.failure.kind == "transient"


def test_runtimes_with_different_scenes_are_refused():
    with (
        FakeAlpaSim() as one,
        FakeAlpaSim(scenes=("clip-a", "other")) as two,
        pytest.raises(SimulatorError, match="other"),
    ):
        config(one, two).build(PolicySpec(), DatasetSection(), 1, ())


def test_no_answer_is_an_error_with_the_address():
    with pytest.raises(SimulatorError, match="127.0.0.1:9"):
        AlpasimConfig(address="127.0.0.1:9", connect_timeout_s=0.5).build(PolicySpec(), DatasetSection(), 1, ())


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: AlpasimConfig().build(PolicySpec(), DatasetSection(), 1, ()), "simulator.address"),
        (lambda: AlpasimConfig(address="nowhere"), "HOST:PORT"),
        (lambda: AlpasimConfig(force_gt_duration_us=150_000), "multiple of control_period_us"),
        (lambda: AlpasimConfig(frames="some"), "frames"),
        (lambda: ServerConfig(port=70_000), "port"),
        (lambda: AlpasimConfig(address="h:1").build(PolicySpec(), DatasetSection(), 1, ("speed",)), "speed"),
        (
            lambda: AlpasimConfig(address="h:1").build(PolicySpec(action_kinds=frozenset({"control"})), None, 1, ()),
            "plans",
        ),
    ],
)
def test_wrong_configs_are_named(build, text):
    with pytest.raises(ConfigError, match=text):
        build()


# ---------------------------------------------------------------- sessions that nobody asked for


def test_only_sessions_that_we_asked_for_are_welcome():
    import grpc

    from alpagym_runtime.simulators.alpasim.services import EGODRIVER, path

    with FakeAlpaSim() as fake, closing(config(fake).build(PolicySpec(), DatasetSection(), 1, ())) as simulator:
        with grpc.insecure_channel(simulator.address) as channel:
            start = egodriver_pb2.DriveSessionRequest(session_uuid="0" * 32).SerializeToString()
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(path(EGODRIVER, "start_session"))(start, timeout=5)
    assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert "0" * 32 in caught.value.details()


def test_an_abandoned_rollout_is_told_to_end():
    with ExitStack() as stack:
        fake = stack.enter_context(FakeAlpaSim(capacity=1))
        simulator = stack.enter_context(closing(config(fake).build(PolicySpec(), DatasetSection(), 1, ())))
        for scene in ("clip-a", "clip-b"):
            simulator.start(np.array([0]), requests(scene))
            batch = simulator.receive(1, 20.0)
            assert batch.requests[0].scene_id == scene  # one slot of capacity: the first rollout gave it back
        assert fake.rollouts[0].terminated


# ---------------------------------------------------------------- measures by hand


def metric(name, times, values, aggregation=3):
    return runtime_pb2.SimulationReturn.TimestepMetric(
        name=name, timestamps_us=times, values=values, valid=[True] * len(times), time_aggregation=aggregation
    )


def test_measures_are_taken_at_ticks_and_stop_at_the_first_event():
    # Samples every 50 us, ticks every 100 from 1000 on; a collision lasts from 1150 to 1200 and again from 1350.
    times = list(range(900, 1451, 50))
    hits = [1.0 if 1150 <= t <= 1200 or t >= 1350 else 0.0 for t in times]
    metrics = [
        metric("collision_any", times, hits),
        metric("collision_front", times, [0.0] * len(times)),
        metric("collision_lateral", times, hits),
        metric("offroad", times, [0.0] * len(times)),
        metric("progress_rel_to_total", times, [t / 2000.0 for t in times], 5),
        metric("gt_dist_traveled_m", times, [100.0] * len(times), 5),
        metric("speed_of_theirs", times, [math.nan] * len(times), 2),
    ]
    ticks = np.arange(1000, 1401, 100)
    out = measures_of(metrics, ticks, 100, np.linspace(0.0, 0.4, 5), np.ones(5, bool))
    assert out["alpasim/collision_any"].value.tolist() == [0, 0, 1, 0, 1]
    assert out["collision_count"].value.tolist() == [0, 0, 1, 1, 1]
    assert out["collision_at_fault_count"].value.tolist() == [0, 0, 1, 1, 1]
    np.testing.assert_allclose(out["progress"].value, [0.0, 0.1, 0.2, 0.2, 0.2])
    assert out["initial_fault"].aggregate() == 0.0
    assert out["alpasim/scene_score"].value[-1] == 0.0
    assert not out["alpasim/speed_of_theirs"].valid.any()
    assert out["alpasim/speed_of_theirs"].aggregation == "median"
    assert not out["alpasim/plan_deviation"].valid.any()


def test_pace_and_speed_are_defined_up_to_the_first_event():
    ticks = np.arange(0, 500, 100)

    def kept(hits=(0,) * 5, off=(0,) * 5, progress=(0.0, 0.1, 0.2, 0.3, 0.4), standing=False):
        metrics = [metric(name, ticks, list(map(float, hits))) for name in ("collision_any", "collision_front")]
        metrics += [metric("collision_lateral", ticks, [0.0] * 5), metric("offroad", ticks, list(map(float, off)))]
        out = measures_of(metrics, ticks, 100, np.array(progress), np.ones(5, bool), standing=standing)
        return ticks_until_event(out, standing=standing)

    # The tick in which it happens still counts.
    assert kept() == 5
    assert kept(hits=(0, 0, 1, 0, 0)) == 3
    assert kept(off=(0, 1, 1, 1, 1)) == 2
    assert kept(progress=(0.0, 0.5, 0.8, 0.99, 1.0)) == 4
    assert kept(progress=(1.0,) * 5, standing=True) == 5
    # A contact at the handover is no event of the drive; the next one is.
    assert kept(hits=(1, 1, 0, 1, 0)) == 4


@pytest.mark.parametrize(("standing", "counted"), [(False, 0.0), (True, 1.0)])
def test_what_follows_the_goal_is_not_counted(standing, counted):
    # The goal at the third tick, a contact at the fifth: the drive was over, unless its recording goes nowhere.
    ticks = np.arange(0, 500, 100)
    metrics = [metric(name, ticks, [0.0, 0.0, 0.0, 0.0, 1.0]) for name in ("collision_any", "collision_front")]
    metrics += [metric(name, ticks, [0.0] * 5) for name in ("collision_lateral", "offroad")]
    progress = np.array([0.0, 0.5, 0.99, 1.0, 1.0])
    out = measures_of(metrics, ticks, 100, progress, np.ones(5, bool), standing=standing)
    assert out["collision_count"].value[-1] == counted
    assert out["progress"].value[-1] == (1.0 if standing else 0.99)


def test_the_scene_score_is_progress_over_four_fifths_until_the_cut():
    # No incident; 4.5 m from the recorded path at the third tick: progress counts up to there, 0.2 / 0.8 = 0.25.
    ticks = np.arange(0, 500, 100)
    zero = [0.0] * 5
    metrics = [
        *(metric(name, ticks, zero) for name in ("collision_any", "collision_front", "collision_lateral", "offroad")),
        metric("progress_rel_to_total", ticks, [0.0, 0.1, 0.2, 0.3, 0.4], 5),
        metric("gt_dist_traveled_m", ticks, [50.0] * 5, 5),
        metric("dist_to_gt_trajectory", ticks, [0.0, 1.0, 4.5, 1.0, 1.0]),
    ]
    out = measures_of(metrics, ticks, 100, np.zeros(5), np.ones(5, bool))
    assert out["alpasim/scene_score"].aggregate() == pytest.approx(0.25)


def test_what_is_true_at_the_handover_is_an_initial_fault():
    ticks = np.arange(0, 300, 100)
    out = measures_of([metric("offroad", ticks, [1.0, 1.0, 0.0])], ticks, 100, np.zeros(3), np.ones(3, bool))
    assert out["initial_fault"].aggregate() == 1.0
    assert out["offroad_count"].value.tolist() == [0.0, 0.0, 0.0]


# ---------------------------------------------------------------- Gymnasium


@pytest.mark.parametrize("layout", ["flat", "nested"])
def test_gymnasium_drives_alpasim(layout):
    import gymnasium

    with FakeAlpaSim(cameras=CAMERAS) as fake:
        env = gymnasium.make(
            "alpagym_runtime:alpagym/AlpaSim-v0",
            address=fake.address,
            cameras=["front"],
            height=24,
            width=32,
            frames=2,
            horizon=4,
            force_gt_duration_us=300_000,
            reward="progress_safety",
            layout=layout,
            debug=True,
        )
        with closing(env):
            for seed in (1, 2):
                observation, info = env.reset(seed=seed)
                assert info["scene_id"] in fake.scenes
                assert observation["camera_front"].shape == ((2, 24, 32, 3) if layout == "nested" else (24, 32, 6))
                for tick in range(4):
                    observation, reward, terminated, truncated, info = env.step(np.zeros(16, np.float32))
                    assert env.observation_space.contains(observation)
                    assert (terminated, truncated) == (False, tick == 3)
                assert info["ended"] == "horizon"
                assert info["reward_is_late"]
                assert reward == pytest.approx(sum(info["terms"].values()))
                assert 0.0 < info["driving_score"] <= 1.0


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_gymnasiums_vector_environment_drives_alpasim(mode):
    import gymnasium

    with FakeAlpaSim(cameras=CAMERAS) as fake:
        envs = gymnasium.make_vec(
            "alpagym_runtime:alpagym/AlpaSim-v0",
            2,
            address=fake.address,
            cameras=["front"],
            height=24,
            width=32,
            horizon=3,
            force_gt_duration_us=300_000,
            reward="progress_safety",
            layout="lerobot",
            autoreset_mode=mode,
        )
        with closing(envs):
            observation, info = envs.reset(seed=1)
            assert set(info["scene_id"]) <= set(fake.scenes)
            ends = 0
            for _ in range(8):
                observation, _, terminated, truncated, info = envs.step(np.zeros((2, 16), np.float32))
                assert observation in envs.observation_space
                assert observation["pixels"]["front"].shape == (2, 24, 32, 3)
                assert observation["pixels"]["front"].any()
                over = terminated | truncated
                ends += int(over.sum())
                if over.any():
                    numbers = info["final_info"] if mode == "same_step" else info
                    assert set(numbers["ended"][over]) == {"horizon"}
                    assert numbers["reward_is_late"][over].all()
            # 8 steps: ends at 3 and 6 in the same step, at 3 and 7 with a step for the reset
            assert ends == 4


def test_gymnasium_says_why_a_drive_failed():
    import gymnasium

    with FakeAlpaSim(faults=(Fault("hang", tick=4),)) as fake:
        options = {"address": fake.address, "force_gt_duration_us": 300_000, "reward": "distance_to_gt"}
        with closing(gymnasium.make("alpagym/AlpaSim-v0", **options, timeout_s=5.0)) as env:
            env.reset(seed=1)
            with pytest.raises(SimulatorError, match="silent"):
                env.step(np.zeros(16, np.float32))
        with closing(gymnasium.make("alpagym/AlpaSim-v0", scene_id="nowhere", **options)) as env:
            with pytest.raises(SimulatorError, match="nowhere"):
                env.reset(seed=1)
        with pytest.raises(ConfigError, match="plans"):
            gymnasium.make("alpagym/AlpaSim-v0", action_type="control", **options)
