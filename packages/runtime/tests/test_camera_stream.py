"""The embedded world seen through cameras: frames, times, ids, and that a picture depends on its own slot only."""

from __future__ import annotations

import io
from contextlib import closing
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
import simplejpeg

from alpagym_runtime.errors import ConfigError
from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.run_config import DatasetSection, build_section
from alpagym_runtime.simulators.embedded.camera_config import CamerasConfig, MountConfig
from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
from alpagym_runtime.simulators.embedded.simulator import EmbeddedSimulator
from alpagym_runtime.testing.conformance import SimulatorConformance
from alpagym_runtime.testing.scenes import RoadUser, moving, simulator_of, standing, straight_drive
from alpagym_runtime.types import Ended, EpisodeRequest, PolicySpec

pytestmark = pytest.mark.timeout(600)  # the first test may have to compile the renderer

DATASET = DatasetSection(split="train", train_scenes=3)
SPEC = PolicySpec(("ego_history_rig", "ego_dynamics_rig"), cameras={"front": (24, 40)}, frames=2, frame_step_us=200_000)


class TestEmbeddedWithCameras(SimulatorConformance):
    policy_spec = replace(SPEC, cameras={"front": (24, 40), "left": (16, 24)})

    def make(self, slots: int):
        return EmbeddedConfig().build(self.policy_spec, DATASET, slots, self.labels)


class TestEmbeddedWithCamerasInItsOwnThread(SimulatorConformance):
    policy_spec = replace(SPEC, frames=3, frame_step_us=100_000)

    def make(self, slots: int):
        config = EmbeddedConfig(threads=1, warmup_ticks=2, cameras=CamerasConfig(encoding="jpeg95", threads=2))
        return config.build(self.policy_spec, DATASET, slots, self.labels)


def make(spec=SPEC, *, slots=1, cameras=None, **config):
    return EmbeddedConfig(cameras=cameras or CamerasConfig(), **config).build(spec, DATASET, slots, ())


def drive(simulator, requests, ticks=5):
    """Rows a slot over some ticks, at constant speed."""
    rows = [[] for _ in requests]
    simulator.start(np.arange(len(requests)), requests)
    for _ in range(ticks):
        batch = simulator.receive(len(requests), 10.0)
        for i, slot in enumerate(batch.slots.tolist()):
            rows[slot].append({k: v[i] for k, v in batch.observation.items() if k.startswith(("camera", "time"))})
        running = batch.ended == Ended.RUNNING
        speed = batch.observation["ego_dynamics_rig"][running, 0]
        plan = np.zeros((int(running.sum()), 64, 3), np.float32)
        plan[:, :, 0] = speed[:, None] * 0.1 * np.arange(1, 65)
        simulator.send(batch.slots[running], plan_decision(plan), np.zeros(len(plan), bool))
    return rows


def requests(count):
    return [EpisodeRequest(f"procedural-train-{i % 3:06d}", horizon_ticks=20, policy_seed=i) for i in range(count)]


def test_two_frames_lie_a_step_apart_and_the_newest_is_now():
    with closing(make()) as simulator:
        for row in drive(simulator, requests(1))[0]:
            # frame_step_us = 200,000: now - 0.2 s and now.
            assert row["camera_front_time_us"].tolist() == [int(row["time_us"]) - 200_000, int(row["time_us"])]
            assert row["camera_front"].shape == (2, 24, 40, 3)


def test_a_frame_keeps_its_pixels_and_its_id_in_the_next_observation():
    with closing(make()) as simulator:
        rows = drive(simulator, requests(1))[0]
    for before, after in pairwise(rows):
        assert (before["camera_front"][1] == after["camera_front"][0]).all()
        assert before["camera_front_frame_id"][1] == after["camera_front_frame_id"][0] != 0


def test_frames_within_a_tick_are_rendered_where_the_world_was_then():
    # Control every 0.2 s, frames 0.1 s apart: the middle one is what control every 0.1 s sees at that time.
    def frames(control_period_us):
        spec = replace(SPEC, frames=2, frame_step_us=100_000)
        with closing(make(spec, control_period_us=control_period_us)) as simulator:
            rows = drive(simulator, requests(1), ticks=2)[0]
        times = [row["camera_front_time_us"] for row in rows]
        pictures = [row["camera_front"] for row in rows]
        return dict(zip(np.concatenate(times).tolist(), np.concatenate(pictures), strict=True))

    slow, fast = frames(200_000), frames(100_000)
    shared = sorted(slow.keys() & fast.keys())
    assert len(shared) >= 3
    for time_us in shared:
        assert (slow[time_us] == fast[time_us]).all(), time_us


def test_before_the_scene_began_the_oldest_frame_stands_in():
    # Handover at 1.6 s: 3 frames a second apart want -0.4 s, 0.6 s and 1.6 s.
    spec = replace(SPEC, frames=3, frame_step_us=1_000_000)
    with closing(make(spec)) as simulator:
        row = drive(simulator, requests(1), ticks=1)[0][0]
    assert row["camera_front_time_us"].tolist() == [0, 600_000, 1_600_000]
    assert (row["camera_front_frame_id"] == 0).tolist() == [True, False, False]


def test_a_slower_camera_shows_its_newest_frame():
    cameras = CamerasConfig(mounts={"slow": MountConfig(period_us=500_000)})
    spec = replace(SPEC, cameras={"slow": (24, 40)}, frames=1)
    with closing(make(spec, cameras=cameras)) as simulator:
        rows = drive(simulator, requests(1), ticks=4)[0]
    # Observed at 1.6, 1.8, 2.0, 2.2 s; frames every 0.5 s: of 1.5 s until 2.0 s is there.
    assert [row["camera_slow_time_us"][0] for row in rows] == [1_500_000, 1_500_000, 2_000_000, 2_000_000]


def test_cameras_of_two_periods_show_what_each_shows_alone():
    cameras = CamerasConfig(mounts={"slow": MountConfig(period_us=500_000)})
    both = replace(SPEC, cameras={"slow": (24, 40), "front": (24, 40), "left": (16, 24)})
    with closing(make(both, cameras=cameras)) as simulator:
        together = drive(simulator, requests(1), ticks=4)[0]
    for name, size in both.cameras.items():
        with closing(make(replace(SPEC, cameras={name: size}), cameras=cameras)) as simulator:
            alone = drive(simulator, requests(1), ticks=4)[0]
        for a, b in zip(together, alone, strict=True):
            for key in (f"camera_{name}", f"camera_{name}_time_us", f"camera_{name}_frame_id"):
                assert (a[key] == b[key]).all(), key


@pytest.mark.parametrize("threads", [1, 3])
def test_an_episode_is_the_same_pictures_alone_and_in_a_batch(threads):
    with closing(make()) as alone:
        expected = drive(alone, requests(2)[1:])[0]
    with closing(make(slots=8, cameras=CamerasConfig(threads=threads))) as many:
        found = drive(many, [*requests(1), *requests(2)[1:], *requests(6)])[1]
    for a, b in zip(expected, found, strict=True):
        for name in a:
            assert (a[name] == b[name]).all(), name


def test_a_restarted_slot_sees_nothing_of_its_last_episode():
    with closing(make()) as fresh:
        expected = drive(fresh, requests(2)[1:], ticks=1)[0][0]
    with closing(make()) as used:
        drive(used, requests(1), ticks=4)
        found = drive(used, requests(2)[1:], ticks=1)[0][0]
    assert (expected["camera_front"] == found["camera_front"]).all()


def test_jpeg_shows_what_its_bytes_decode_to():
    with closing(make(cameras=CamerasConfig(encoding="jpeg95"))) as simulator:
        simulator.start(np.arange(1), requests(1))
        batch = simulator.receive(1, 10.0)
    # Both frames are new at the handover.
    assert len(batch.frames) == 2
    by_id = {frame.frame_id: frame for frame in batch.frames}
    for k, number in enumerate(batch.observation["camera_front_frame_id"][0].tolist()):
        frame = by_id[number]
        assert (frame.format, frame.camera, frame.slot) == ("jpeg", "front", 0)
        assert frame.time_us == batch.observation["camera_front_time_us"][0, k]
        decoded = simplejpeg.decode_jpeg(io.BytesIO(frame.data).getvalue(), "RGB")
        assert (decoded == batch.observation["camera_front"][0, k]).all()


@pytest.mark.parametrize("encoding", ["raw", "jpeg95"])
def test_a_single_frame_is_the_newest_of_two(encoding):
    # Pictures of one frame are drawn where they are handed over, those of two are kept and copied.
    two = replace(SPEC, cameras={"front": (32, 48)})
    rows = []
    for spec in (two, replace(two, frames=1)):
        with closing(make(spec, slots=3, cameras=CamerasConfig(encoding=encoding))) as simulator:
            rows.append([row for slot in drive(simulator, requests(3)) for row in slot])
    for pair, alone in zip(*rows, strict=True):
        for name in ("camera_front", "camera_front_time_us", "camera_front_frame_id"):
            assert (pair[name][-1:] == alone[name]).all()
    arrays = [row["camera_front"] for row in rows[1]]
    assert not any(np.shares_memory(a, b) for a, b in pairwise(arrays))


def test_a_slot_that_stops_sees_its_last_picture_again():
    spec = replace(SPEC, cameras={"front": (32, 48)}, frames=1)
    with closing(make(spec, slots=2, cameras=CamerasConfig(encoding="jpeg95"))) as simulator:
        simulator.start(np.arange(2), requests(2))
        before = simulator.receive(2, 10.0)
        simulator.send(np.arange(2), plan_decision(np.zeros((2, 64, 3), np.float32)), np.array([False, True]))
        after = simulator.receive(2, 10.0)
    assert after.ended.tolist() == [Ended.RUNNING, Ended.SCORED]
    for name in ("camera_front", "camera_front_frame_id"):
        assert (before.observation[name][1] == after.observation[name][1]).all()
    # Its file came before.
    assert [frame.slot for frame in before.frames] == [0, 1]
    assert [frame.slot for frame in after.frames] == [0]


def test_files_alone_are_the_files_that_come_with_pictures():
    config, found = EmbeddedConfig(cameras=CamerasConfig(encoding="jpeg95")), []
    for files_only in (False, True):
        with closing(EmbeddedSimulator(config, SPEC, DATASET, 1, files_only=files_only)) as simulator:
            simulator.start(np.arange(1), requests(1))
            found.append([simulator.receive(1, 10.0)])
            simulator.send(np.arange(1), plan_decision(np.zeros((1, 64, 3), np.float32)), np.zeros(1, bool))
            found[-1].append(simulator.receive(1, 10.0))
    full, alone = found
    # Two frames 0.2 s apart at the handover; a tick of 0.2 s later one of them is new.
    assert [len(batch.frames) for batch in alone] == [2, 1]
    for before, after in zip(full, alone, strict=True):
        assert [(f.time_us, f.data) for f in before.frames] == [(f.time_us, f.data) for f in after.frames]
        assert not any(name.startswith("camera") for name in after.observation)


def test_an_actor_ahead_is_in_the_picture_and_covers_more_when_it_is_nearer():
    def changed(distance_m):
        pictures = []
        for users in ([], [RoadUser(standing(distance_m, 0.0, 0.0, 60), (4.0, 1.8))]):
            scene = straight_drive(users=users).build()
            spec = replace(SPEC, cameras={"front": (96, 160)})
            with closing(simulator_of([scene], spec, cameras=CamerasConfig(weather="clear"))) as simulator:
                simulator.start(np.arange(1), [EpisodeRequest("hand-made", horizon_ticks=5)])
                pictures.append(simulator.receive(1, 10.0).observation["camera_front"][0, -1].astype(int))
        return int((np.abs(pictures[0] - pictures[1]).max(axis=-1) > 8).sum())

    far, near = changed(40.0), changed(12.0)
    # f = 80 / tan(42.5 deg) = 87 px: a car of 1.8 x 1.5 m at 40 m is 4 x 3 px.
    assert far >= 8
    assert near > 3 * far


def test_braking_cars_show_their_lamps():
    slowing = moving(14.0, 0.0, 0.0, 8.0, 60)
    slowing[:, 3] = np.maximum(8.0 - 0.4 * np.arange(60), 0.0)
    pictures = []
    for track in (moving(14.0, 0.0, 0.0, 8.0, 60), slowing):
        scene = straight_drive(users=[RoadUser(track, (4.0, 1.8))], handover=3).build()
        spec = replace(SPEC, cameras={"front": (96, 160)}, frames=1)
        with closing(simulator_of([scene], spec, cameras=CamerasConfig(weather="clear"))) as simulator:
            simulator.start(np.arange(1), [EpisodeRequest("hand-made", horizon_ticks=5)])
            pictures.append(simulator.receive(1, 10.0).observation["camera_front"][0, -1].astype(int))
    redder = (pictures[1][..., 0] - pictures[1][..., 1]) - (pictures[0][..., 0] - pictures[0][..., 1])
    # A lamp of 0.4 x 0.25 m at 11 m: 87 px * 0.4 / 11 = 3 px by 2.
    assert (redder > 40).sum() >= 2


@pytest.mark.parametrize(
    ("spec", "cameras", "says"),
    [
        (replace(SPEC, cameras={"frnt": (24, 40)}), CamerasConfig(), "did you mean 'front'"),
        (replace(SPEC, cameras={"front": (2, 40)}), CamerasConfig(), "2 x 40 px"),
        (replace(SPEC, frame_step_us=50_000), CamerasConfig(), "frame_step_us is 50000"),
        (replace(SPEC, frames=0), CamerasConfig(), "0 frames"),
    ],
)
def test_what_cannot_be_rendered_is_refused_at_once(spec, cameras, says):
    with pytest.raises(ConfigError, match=says):
        make(spec, cameras=cameras)


def test_mounts_in_a_config_are_checked_and_come_back():
    data = {"mounts": {"nose": {"fov_deg": 70.0, "z_m": 0.7}}, "weather": "fog"}
    config = build_section(CamerasConfig, data, "simulator.cameras")
    assert config.mount("nose") == MountConfig(fov_deg=70.0, z_m=0.7)
    assert config.mount("front_tele_30fov") == config.mount("camera_front_tele_30fov")
    assert build_section(CamerasConfig, asdict(config), "simulator.cameras") == config
    with pytest.raises(ConfigError, match=r"simulator\.cameras\.mounts\.nose\.fov_dg"):
        build_section(CamerasConfig, {"mounts": {"nose": {"fov_dg": 70.0}}}, "simulator.cameras")
