"""Clips with labels of road users as scenes of the embedded world."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from alpagym_runtime.envs.core import DrivingCore, build_terms
from alpagym_runtime.envs.presets import reward_section
from alpagym_runtime.errors import ConfigError, CorruptFileError
from alpagym_runtime.geometry import Pose
from alpagym_runtime.policies.config import LogReplayConfig
from alpagym_runtime.rollouts.collector import Collector
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
from alpagym_runtime.simulators.embedded.scene import KINDS
from alpagym_runtime.simulators.embedded.scene_check import problems
from alpagym_runtime.simulators.pai.egomotion import EgoLog
from alpagym_runtime.simulators.pai.replay import PaiReplay, Track, on_grid, read_tracks
from alpagym_runtime.simulators.pai.synthetic import OBSTACLE_COLUMNS
from alpagym_runtime.testing.pai import copy_of_tree, shared_tree
from alpagym_runtime.types import EpisodeRequest, Sampling


def section(path=None, **settings) -> DatasetSection:
    return DatasetSection(source="pai", **{"path": str(path or shared_tree()), "split": "train", **settings})


def straight_log(speed: float = 10.0) -> EgoLog:
    """East at a constant speed for 10 s."""
    times = np.arange(0, 10_000_001, 10_000, dtype=np.int64)
    position = np.stack([speed * times * 1e-6, 0.0 * times, 0.0 * times], axis=-1)
    pose = Pose(position, np.tile([1.0, 0.0, 0.0, 0.0], (len(times), 1)))
    velocity = np.tile([speed, 0.0, 0.0], (len(times), 1))
    return EgoLog(times, pose, velocity, np.zeros_like(velocity), np.zeros(len(times)))


def labels(rows: list[tuple], **changed) -> pa.Table:
    """(time, track, class, x, y) in the rig frame of its time, 4 x 2 x 1.5 m, heading as the ego."""
    columns: dict[str, list] = {name: [] for name in OBSTACLE_COLUMNS}
    for time, track, label, x, y in rows:
        values = {"timestamp_us": time, "source": "s", "track_id": track, "label_class": label}
        values |= {"center_x": x, "center_y": y, "center_z": 0.75, "size_x": 4.0, "size_y": 2.0, "size_z": 1.5}
        values |= {"orientation_x": 0.0, "orientation_y": 0.0, "orientation_z": 0.0, "orientation_w": 1.0}
        values |= {"reference_frame": "rig", "reference_frame_timestamp_us": time}
        for name, value in (values | changed).items():
            columns[name].append(value)
    return pa.table(columns)


def test_a_label_is_placed_by_the_pose_at_its_own_time():
    # At 2 s the ego is at x = 20 m; 15 m ahead, 3 m to the left is (35, 3). Half a second later it has come 5 m
    # nearer in the rig frame: it stands.
    rows = [(2_000_000, "a", "automobile", 15.0, 3.0), (2_500_000, "a", "automobile", 10.0, 3.0)]
    (track,) = read_tracks(labels(rows), straight_log(), "labels")
    np.testing.assert_allclose(track.states, [[35.0, 3.0, 0.0], [35.0, 3.0, 0.0]], atol=1e-9)
    states, first, last = on_grid(track, np.arange(60) * 100_000)
    assert (first, last) == (20, 25)
    np.testing.assert_allclose(states[first : last + 1, 3], 0.0, atol=1e-9)


def test_a_track_with_a_long_gap_becomes_two_and_staggered_labels_meet_the_grid():
    rows = [(time, "a", "person", 20.0, 0.0) for time in (1_030_000, 1_130_000, 1_230_000, 3_030_000, 3_130_000)]
    tracks = read_tracks(labels(rows), straight_log(), "labels")
    assert [len(track.time_us) for track in tracks] == [3, 2]
    assert [track.kind for track in tracks] == ["pedestrian", "pedestrian"]
    states, first, last = on_grid(tracks[0], np.arange(60) * 100_000)
    # The ego's 10 m/s, 20 m ahead: at 1.1 s x = 31 m.
    assert (first, last) == (11, 12)
    np.testing.assert_allclose(states[11], [31.0, 0.0, 0.0, 10.0], atol=1e-6)


def test_a_track_between_two_grid_points_has_no_place_on_it():
    track = Track(np.array([110_000, 190_000]), np.zeros((2, 3)), 4.0, 2.0, "car")
    assert on_grid(track, np.arange(10) * 100_000)[1:] == (0, -1)


@pytest.mark.parametrize(
    ("changed", "text"),
    [({"reference_frame": "world"}, "reference_frame must be rig"),
     ({"reference_frame_timestamp_us": 5}, "must be timestamp_us")],
)  # fmt: skip
def test_labels_in_another_frame_are_refused(changed, text):
    with pytest.raises(CorruptFileError, match=text):
        read_tracks(labels([(1_000_000, "a", "bus", 5.0, 0.0)], **changed), straight_log(), "labels")


def test_a_missing_column_is_named():
    table = labels([(1_000_000, "a", "bus", 5.0, 0.0)]).drop_columns(["size_y"])
    with pytest.raises(CorruptFileError, match="lacks size_y"):
        read_tracks(table, straight_log(), "labels")


def test_clips_are_scenes_with_their_traffic():
    source = PaiReplay(section())
    assert len(source.ids("train")) == len(source.ids("val")) == 3
    assert source.ids("test") == ()
    scene = source.load(source.ids("train")[0])
    assert scene.family == "pai.no_map"
    assert sorted(KINDS[kind] for kind in scene.actors.kind) == ["car", "car", "pedestrian"]
    assert len(scene.ego_log) == 201
    assert (scene.vehicle.length_m, scene.vehicle.centre_offset_m) == (4.9, pytest.approx(1.42))
    assert problems(scene) == []


def test_a_label_over_the_recorded_ego_is_left_out(monkeypatch):
    source = PaiReplay(section())
    scene_id = source.ids("train")[0]
    inside = labels([(t, "ghost", "trailer", 1.4, 0.0) for t in range(1_000_000, 2_000_000, 100_000)])
    table = source._data.tree.table
    monkeypatch.setattr(source._data.tree, "table", lambda f, *a: inside if f == "obstacle.offline" else table(f, *a))
    assert len(source.load(scene_id).actors.first) == 0
    assert source.dropped == {"overlap the recorded ego": 1}


def test_the_recorded_drive_reaches_its_goal_among_them():
    policy = LogReplayConfig().build()
    simulator = EmbeddedConfig(traffic="replay").build(policy.spec, section(), 3, ())
    core = DrivingCore(simulator, build_terms(reward_section("driving"), simulator), policy.spec)
    requests = [EpisodeRequest(scene, horizon_ticks=95) for scene in simulator.spec.scenes]
    for episode in Collector(core, policy).collect(requests, Sampling(mode="mean")):
        assert episode.measures["collision_count"].aggregate() == 0.0
        assert episode.measures["offroad_count"].aggregate() == 0.0
        assert episode.driving_score > 0.95
    simulator.close()


def test_clips_without_labels_are_named_or_left_out(tmp_path):
    tree = copy_of_tree(tmp_path / "tree")
    (tree / "labels/obstacle.offline/obstacle.offline.chunk_0000.zip").unlink()
    with pytest.raises(ConfigError, match=r"3 of 3 clips cannot be replayed.*chunk 0 of obstacle\.offline"):
        PaiReplay(section(tree)).ids("train")
    source = PaiReplay(section(tree, skip_bad=True))
    assert source.ids("train") == ()
    assert len(source.skipped) == 3
    text = (tree / "features.csv").read_text()
    (tree / "features.csv").unlink()
    (tree / "features.csv").write_text("\n".join(line for line in text.splitlines() if "obstacle" not in line) + "\n")
    with pytest.raises(ConfigError, match="no labels of road users"):
        PaiReplay(section(tree))
