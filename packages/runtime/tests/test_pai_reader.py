"""The reader of the PhysicalAI-AV dataset: golden samples, chunks, splits, events, motion, pictures, broken files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpagym_runtime.errors import ConfigError, CorruptFileError, OutOfRangeError, SceneError
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.pai.calibration import read_cameras, read_vehicle
from alpagym_runtime.simulators.pai.clips import PaiDataset
from alpagym_runtime.simulators.pai.config import parse_chunks
from alpagym_runtime.simulators.pai.egomotion import CubicSpline, EgoLog
from alpagym_runtime.simulators.pai.samples import Layout, frame_ids, read_motion, read_pictures
from alpagym_runtime.simulators.pai.synthetic import PLATFORM, read_bar_code, table_bytes, write_index
from alpagym_runtime.simulators.pai.tree import Tree
from alpagym_runtime.simulators.pai.video import ClipVideo, frame_numbers
from alpagym_runtime.testing.pai import CAMERAS, REASONING, copy_of_tree, shared_hub, shared_tree

GOLDEN = Path(__file__).parents[3] / ".." / "shared" / "golden" / "samples.json"
NATIVE = Layout({f"camera_{name}": (0, 0) for name in CAMERAS})


def dataset(path: Path | None = None, **settings) -> PaiDataset:
    return PaiDataset(DatasetSection(source="pai", path=str(path or shared_tree()), **settings))


def reasoning_table(tree: Path, rows: dict[str, list[dict]]) -> None:
    columns = {"clip_id": list(rows), "events": [json.dumps(events) for events in rows.values()]}
    path = tree / "reasoning/ood_reasoning.parquet"
    path.unlink()
    path.write_bytes(table_bytes(columns, ("clip_id",)))


def event(time_us: int, text: str, key: str = "coc") -> dict:
    return {"event_start_frame": 0, "event_start_timestamp": time_us, key: text}


# ---------------------------------------------------------------- golden


@pytest.mark.skipif(not GOLDEN.is_file(), reason="golden samples are not beside this checkout: ../shared/golden")
@pytest.mark.parametrize("kind", ["default_keyframe", "reasoning"])
def test_samples_are_those_of_the_published_dataset_class(kind):
    of_hub = kind == "reasoning"
    data = dataset(shared_hub(), **REASONING) if of_hub else dataset()
    golden = json.loads(GOLDEN.read_text())[kind]
    assert golden
    for expected in golden:
        clip, t0 = expected["clip_id"], expected["t0_us"]
        sample = data.find(clip if expected["cot"] is None else f"{clip}@{t0}")
        assert (sample.t0_us, sample.cot) == (t0, expected["cot"] or "")
        motion = read_motion(data.tree, sample, NATIVE)
        np.testing.assert_allclose(motion.history_rig[:, :3], expected["history_xyz"], atol=1e-4)
        np.testing.assert_allclose(motion.future_rig[:, :3], expected["future_xyz"], atol=1e-4)
        np.testing.assert_allclose(motion.history_yaw, expected["history_yaw"], atol=1e-5)
        np.testing.assert_allclose(motion.plan_rig[:, 2], expected["future_yaw"], atol=1e-5)
        for i, name in enumerate(CAMERAS):
            pictures = read_pictures(data.tree, sample, f"camera_{name}", NATIVE)
            assert pictures.time_us.tolist() == expected["absolute_timestamps"][i]
            assert pictures.number.tolist() == expected["frame_numbers"][i]
            assert [read_bar_code(image) for image in pictures.images] == expected["frame_numbers"][i]


def test_a_plain_tree_and_a_hub_cache_give_the_same():
    plain, hub = dataset(), dataset(shared_hub())
    sample = plain.samples("train")[0]
    assert hub.samples("train") == plain.samples("train")
    a, b = read_motion(plain.tree, sample, NATIVE), read_motion(hub.tree, sample, NATIVE)
    assert (a.future_rig == b.future_rig).all()


# ---------------------------------------------------------------- chunks and splits


@pytest.mark.parametrize(
    ("value", "chunks"),
    [
        (None, None),
        (3, [3]),
        ("0", [0]),
        ("0 1 5", [0, 1, 5]),
        ("0-3", [0, 1, 2]),
        ("0-3,2", [0, 1, 2]),
        ([4, "1-3"], [1, 2, 4]),
        ("3116-3119", [3116, 3117, 3118]),
    ],
)
def test_chunks_exclude_the_end_of_a_range(value, chunks):
    assert parse_chunks(value) == chunks


@pytest.mark.parametrize("value", ["3-0", "0-0", "-1", "a", "", [], [True], 1.5, "1-", [None]])
def test_what_names_no_chunk_is_refused(value):
    with pytest.raises(ConfigError, match="chunk_ids"):
        parse_chunks(value, "dataset.chunk_ids")


def test_a_chunk_written_as_text_is_a_chunk():
    # The published reader takes "1" for no chunk at all, without a word.
    assert {sample.chunk for sample in dataset(chunk_ids="1").samples("val")} == {1}


def test_splits_are_the_indexs_own():
    data = dataset()
    assert [sample.chunk for sample in data.samples("train")] == [0, 0, 0]
    assert [sample.chunk for sample in data.samples("val")] == [1, 1, 1]


def test_an_unknown_chunk_names_those_there_are():
    with pytest.raises(ConfigError, match=r"(?s)chunk_ids.*7.*0, 1"):
        dataset(chunk_ids=[0, 7]).samples("train")


def test_no_sample_left_gives_the_counts_of_each_filter():
    with pytest.raises(ConfigError, match="6 clips .* 3 of the split, 0 of those in chunk_ids=1"):
        dataset(chunk_ids=1).samples("train")


def test_splits_that_overlap_are_an_error_unless_allowed():
    with pytest.raises(ConfigError, match="3 clips are in train and in val"):
        dataset(train_chunks="0-1", val_chunks="0-1")
    with pytest.warns(UserWarning, match="3 clips are in train and in val"):
        data = dataset(train_chunks="0-1", val_chunks="0-1", allow_overlap=True)
    assert data.samples("train") == data.samples("val")


def test_a_handful_of_clips_is_every_split():
    data = dataset(every_split=True, chunk_ids="0")
    assert data.samples("train") == data.samples("val") == data.samples("test")
    assert len(data.samples("test")) == 3
    with pytest.raises(ConfigError, match="train_chunks.*means nothing beside every_split"):
        dataset(every_split=True, train_chunks="0")


def test_a_chunk_that_is_not_on_disk_is_found_before_the_first_batch(tmp_path):
    tree = copy_of_tree(tmp_path / "tree")
    (tree / "labels/egomotion/egomotion.chunk_0001.zip").unlink()
    data = dataset(tree)
    (problem,) = data.check(data.samples("val"), [])
    assert "chunk 1 of egomotion is not on disk" in problem
    assert "there are 0" in problem
    assert "alpagym pai download --chunk-ids 1" in problem


def test_neither_a_tree_nor_a_cache(tmp_path):
    with pytest.raises(ConfigError, match="make-synthetic"):
        dataset(tmp_path)


def test_a_missing_index_names_those_there_are():
    with pytest.raises(ConfigError, match="clip_index_mini.parquet"):
        dataset(clip_index="clip_index_typo.parquet")


# ---------------------------------------------------------------- reasoning


def test_reasoning_without_a_table(tmp_path):
    tree = copy_of_tree(tmp_path / "tree")
    (tree / "reasoning/ood_reasoning.parquet").unlink()
    with pytest.raises(ConfigError, match=r"dataset\.reasoning.*does not exist"):
        dataset(tree, **REASONING)


def test_a_table_without_the_clip_names_the_index_to_take(tmp_path):
    tree = copy_of_tree(tmp_path / "tree")
    clips = [sample.clip_id for sample in dataset(tree).samples("train")]
    reasoning_table(tree, {clips[0]: [event(5_000_000, "only this one")]})
    half = dataset(tree, **REASONING)
    with pytest.raises(ConfigError, match=r"dataset\.clip_index: 2 of 3 clips have no row"):
        half.samples("train")
    left = dataset(tree, **REASONING, skip_bad=True)
    assert [sample.clip_id for sample in left.samples("train")] == clips[:1]
    assert left.dropped == {"without reasoning": 2}


def test_the_default_key_frame_with_a_table_lists_the_times(tmp_path):
    tree = copy_of_tree(tmp_path / "tree")
    clips = [sample.clip_id for sample in dataset(tree).samples("train")]
    reasoning_table(tree, {clip: [event(7_900_000, "b"), event(4_200_000, "a")] for clip in clips})
    with pytest.raises(ConfigError, match=r"dataset\.key_frame: .*4200000, 7900000 us.*5100000.*key_frame=events"):
        dataset(tree, reasoning=REASONING["reasoning"]).samples("train")


def test_events_without_a_table():
    with pytest.raises(ConfigError, match=r"dataset\.key_frame.*dataset\.reasoning="):
        dataset(key_frame="events")


def test_all_events_with_room_are_samples_and_the_text_is_unchanged(tmp_path):
    tree = copy_of_tree(tmp_path / "tree")
    clips = [sample.clip_id for sample in dataset(tree).samples("train")]
    text = 'Slow "down":\n the lead brakes – 20 m ahead. ✔'
    rows = {clips[0]: [event(7_900_000, "later"), event(4_200_000, text), event(900_000, "too early")]}
    reasoning_table(tree, rows | {clip: [] for clip in clips[1:]})
    data = dataset(tree, **REASONING)
    samples = data.samples("train")
    assert [(s.t0_us, s.cot) for s in samples] == [(4_200_000, text), (7_900_000, "later")]
    assert [s.scene_id for s in samples] == [f"{clips[0]}@4200000", f"{clips[0]}@7900000"]
    first = dataset(tree, **REASONING, events="first").samples("train")
    assert [s.t0_us for s in first] == [4_200_000]


def test_coc_stands_above_cot_and_neither_is_an_error(tmp_path):
    tree = copy_of_tree(tmp_path / "tree")
    clips = [sample.clip_id for sample in dataset(tree).samples("train")]
    both = {**event(5_000_000, "coc text"), "cot": "cot text"}
    reasoning_table(tree, {clips[0]: [both], clips[1]: [event(5_000_000, "cot only", "cot")], clips[2]: []})
    assert [s.cot for s in dataset(tree, **REASONING).samples("train")] == ["coc text", "cot only"]
    reasoning_table(tree, {clip: [event(5_000_000, "x", "text")] for clip in clips})
    with pytest.raises(CorruptFileError, match="neither coc nor cot"):
        dataset(tree, **REASONING).samples("train")


def test_an_unknown_time_names_the_key_frames():
    data = dataset(**REASONING)
    clip = data.samples("train")[0].clip_id
    with pytest.raises(SceneError, match=r"key frames \[5200000\]"):
        data.find(f"{clip}@5300000")
    with pytest.raises(SceneError, match="no clip 'nobody'"):
        data.find("nobody")


# ---------------------------------------------------------------- motion


@given(
    st.lists(st.integers(1, 50_000), min_size=3, max_size=40),
    st.lists(st.floats(-3, 3), min_size=4, max_size=4),
    st.floats(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_a_cubic_is_its_own_spline(gaps, coefficients, share):
    # Not-a-knot ends: the spline through points of one cubic is that cubic.
    times = np.concatenate([[-7_000], -7_000 + np.cumsum(gaps)]).astype(np.int64)
    cubic = np.polynomial.Polynomial(coefficients)
    scale = (times[-1] - times[0]) * 1.0
    values = cubic((times - times[0]) / scale)
    query = np.array([times[0] + int(share * (times[-1] - times[0]))])
    spline = CubicSpline(times, values[:, None])
    np.testing.assert_allclose(spline.at(query)[0, 0], cubic((query[0] - times[0]) / scale), atol=1e-8)
    np.testing.assert_allclose(spline.at(times)[:, 0], values, atol=1e-9)


@pytest.mark.parametrize(("count", "expected"), [(1, 4.0), (2, 3.0), (3, 0.25)])
def test_few_points_have_a_spline_too(count, expected):
    # (0, 4); with (1 s, 2) a line through (0.5, 3); with y = (t - 1)² at 0, 1, 2 the parabola: (0.5 - 1)² = 0.25.
    times = np.arange(count, dtype=np.int64) * 1_000_000
    values = {1: [4.0], 2: [4.0, 2.0], 3: [1.0, 0.0, 1.0]}[count]
    at = CubicSpline(times, np.array(values)[:, None]).at(np.array([500_000]) if count > 1 else np.array([0]))
    assert at[0, 0] == pytest.approx(expected)


def test_velocity_is_turned_from_the_anchor_into_the_body():
    data = dataset()
    for sample in data.samples("train"):
        dynamics = read_motion(data.tree, sample, NATIVE).dynamics_rig
        assert abs(dynamics[1]) < 1e-2  # no lateral part
        assert dynamics[0] > 3.0


def test_nothing_is_extrapolated():
    data = dataset()
    sample = data.samples("train")[0]
    log = EgoLog.from_table(data.tree.table("egomotion", 0, sample.clip_id, "egomotion"), "log")
    last = int(log.time_us[-1])
    log.poses(last)
    with pytest.raises(OutOfRangeError, match=str(last + 1)):
        log.poses(last + 1)


def test_a_gap_in_the_motion_drops_the_sample(tmp_path):
    data = dataset()
    sample = data.samples("train")[0]
    with pytest.raises(SceneError, match=r"gap of 10000 us.*max_gap_s"):
        read_motion(data.tree, sample, NATIVE, max_gap_us=9_999)


# ---------------------------------------------------------------- pictures


def test_frames_are_the_last_at_or_before():
    times = np.array([100, 133, 167], np.int64)
    assert frame_numbers(times, [100, 132, 133, 166, 167], "c").tolist() == [0, 0, 1, 1, 2]
    for outside in (99, 168):
        with pytest.raises(OutOfRangeError, match=rf"c: {outside} us is outside the log's \[100, 167\]"):
            frame_numbers(times, [120, outside], "c")


@given(st.lists(st.integers(0, 601), min_size=1, max_size=6))
@settings(max_examples=15, deadline=None)
def test_any_frames_in_any_order_are_decoded(numbers):
    data = dataset()
    sample = data.samples("train")[0]
    video = ClipVideo.open(data.tree, "camera_front_wide_120fov", 0, sample.clip_id)
    pictures = video.decode(np.array(numbers))
    assert [read_bar_code(picture) for picture in pictures] == numbers


def test_pictures_are_resized_whole():
    data = dataset()
    sample = data.samples("val")[0]
    layout = Layout({"camera_front_tele_30fov": (36, 64)}, frames=2)
    small = read_pictures(data.tree, sample, "camera_front_tele_30fov", layout)
    assert small.images.shape == (2, 36, 64, 3)
    assert [read_bar_code(image) for image in small.images] == small.number.tolist()
    large = read_pictures(data.tree, sample, "camera_front_tele_30fov", NATIVE)
    assert abs(small.images.mean() - large.images[2:].mean()) < 3.0


def test_a_frame_has_one_id_in_all_samples():
    one, two = (frame_ids("clip", "camera_a", np.array(n)) for n in ([3, 4], [4, 5]))
    assert one[1] == two[0]
    assert len({*one.tolist(), *two.tolist(), *frame_ids("clip", "camera_b", np.array([4])).tolist()}) == 4


# ---------------------------------------------------------------- calibration


def test_cameras_look_where_their_names_say():
    tree = Tree(shared_tree())
    clip = dataset().samples("train")[0].clip_id
    cameras = read_cameras(tree, 0, clip)
    ahead, left = np.array([20.0, 0.0, 1.45]), np.array([9.3, 19.7, 0.95])
    pixel, valid = cameras["camera_front_wide_120fov"].project_rig(ahead)
    assert valid
    np.testing.assert_allclose(pixel, [48.0, 27.0], atol=1e-9)  # the principal point, half of 96 x 54
    pixel, valid = cameras["camera_cross_left_120fov"].project_rig(left)
    assert valid
    np.testing.assert_allclose(pixel, [48.0, 27.0], atol=0.5)
    model = cameras["camera_front_wide_120fov"].model
    points = np.array([[10.0, 20.0], [60.0, 25.5], [90.0, 50.0]])
    rays, known = model.unproject(points)
    assert known.all()
    np.testing.assert_allclose(model.project(rays)[0], points, atol=1e-6)


def test_the_vehicle():
    clip = dataset().samples("train")[0].clip_id
    assert vars(read_vehicle(Tree(shared_tree()), 0, clip)) == PLATFORM


# ---------------------------------------------------------------- broken files


def test_a_torn_zip_is_named_with_its_size_and_the_remedy(tmp_path):
    tree = copy_of_tree(tmp_path / "tree")
    path = tree / "camera/camera_front_wide_120fov/camera_front_wide_120fov.chunk_0000.zip"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: len(data) // 2])
    torn = dataset(tree)
    (problem,) = torn.check(torn.samples("train"), ["camera_front_wide_120fov"])
    assert str(path) in problem
    assert f"{len(data) // 2} bytes" in problem
    assert "download" in problem


def test_a_clip_without_a_camera_names_the_setting(tmp_path):
    tree = copy_of_tree(tmp_path / "tree")
    data = dataset(tree)
    clip = data.samples("train")[1].clip_id
    presence = tree / "metadata/feature_presence.parquet"
    columns = {"clip_id": data.index.clip_id.tolist(), "camera_front_tele_30fov": (data.index.clip_id != clip).tolist()}
    presence.unlink()
    presence.write_bytes(table_bytes(columns, ("clip_id",)))
    shutil.move(presence, presence.with_name("sensor_presence.parquet"))  # its older name
    (problem,) = dataset(tree).check(data.samples("train"), ["camera_front_tele_30fov"])
    assert f"clip {clip} was recorded without camera_front_tele_30fov" in problem
    assert "policy.cameras" in problem


def test_a_torn_table_is_named(tmp_path):
    tree = copy_of_tree(tmp_path / "tree")
    path = tree / "clip_index.parquet"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-10])
    with pytest.raises(CorruptFileError, match=rf"{len(data) - 10} bytes.*download"):
        dataset(tree)


def test_a_clip_that_stands_twice_is_an_error(tmp_path):
    tree = copy_of_tree(tmp_path / "tree")
    (tree / "clip_index.parquet").unlink()
    write_index(tree / "clip_index.parquet", [("a", 0, "train"), ("a", 1, "train")])
    with pytest.raises(CorruptFileError, match="1 clips twice, such as a"):
        dataset(tree)


def test_a_video_that_ends_early_is_an_error(tmp_path):
    # Two frames where the timestamps name three.
    path = tmp_path / "short.mp4"
    with av.open(path, "w") as container:
        stream = container.add_stream("h264", rate=30)
        stream.width, stream.height, stream.pix_fmt = 64, 36, "yuv420p"
        for _ in range(2):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((36, 64, 3), np.uint8), format="rgb24")))
        container.mux(stream.encode())
    with path.open("rb") as file:
        video = ClipVideo(np.array([0, 33, 67], np.int64), "short", file)
        with pytest.raises(CorruptFileError, match="ends before frame 2"):
            video.decode(np.array([2]))
