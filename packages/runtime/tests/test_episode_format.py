import gc
import json
import os
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from alpagym_runtime.episodes import format as episode_format
from alpagym_runtime.episodes.format import EpisodeFile, read, to_bytes, write
from alpagym_runtime.errors import CorruptFileError
from alpagym_runtime.testing.conformance import empty_episode
from alpagym_runtime.testing.examples import assert_same, example_camera_episode, example_episode
from alpagym_runtime.types import Decision, Frame, MeasureSeries, Ragged

MAPS = Path("/proc/self/maps")
DTYPES = [np.dtype(name) for name in ("?", "i1", "u1", "i2", "<i8", "u8", "f2", "<f4", ">f4", ">i8", "f8")]


def there_and_back(episode, folder, frames="all", **how):
    path = folder / "episode.arrow"
    write(episode, path, frames)
    return read(path, **how)


# ---------------------------------------------------------------- what was written is what is read


@pytest.mark.parametrize("frames", ["seen", "arrived", "none", "all", "dense"])
def test_an_episode_comes_back_whole(tmp_path, frames):
    for episode in (example_episode(), example_episode(1, 3), empty_episode()):
        assert_same(there_and_back(episode, tmp_path, frames), episode, "the episode")


@pytest.mark.parametrize("jpeg", [False, True])
@pytest.mark.parametrize("frames", ["seen", "arrived", "all", "dense"])
def test_the_pictures_that_were_seen_come_back_to_the_bit(tmp_path, frames, jpeg):
    episode = example_camera_episode(6, 2, jpeg=jpeg)
    expected = episode if frames != "seen" else episode.with_arrays(frames=())
    assert_same(there_and_back(episode, tmp_path, frames), expected, "the episode")


def arrays(rows):
    shapes = st.lists(st.integers(0, 3), max_size=3).map(lambda tail: (rows, *tail))
    # Any bits at all, also those of NaNs: an array is bytes of a type.
    return st.tuples(st.sampled_from(DTYPES), shapes).flatmap(
        lambda of: hnp.arrays(np.uint8, (int(np.prod(of[1])) * of[0].itemsize,)).map(
            lambda raw: (raw & 1 if of[0].kind == "b" else raw).view(of[0]).reshape(of[1])
        )
    )


def raggeds(rows):
    lengths = st.lists(st.integers(0, 3), min_size=rows, max_size=rows)
    return lengths.flatmap(
        lambda n: st.sampled_from([np.int64, np.float32, np.uint8]).map(
            lambda dtype: Ragged(
                np.arange(sum(n) * 2).reshape(-1, 2).astype(dtype), np.cumsum([0, *n]).astype(np.int64)
            )
        )
    )


NAMES = st.text(min_size=1, max_size=8)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), ticks=st.integers(0, 4))
def test_any_types_shapes_and_names_survive(tmp_path, data, ticks):
    draw = data.draw
    decision = Decision(
        np.zeros((ticks, 2, 3), np.float32),
        np.zeros((ticks, 1), np.float32),
        np.ones((ticks, 1), bool),
        np.zeros(ticks, np.int64),
        trace=draw(st.dictionaries(NAMES, st.one_of(arrays(ticks), raggeds(ticks)), max_size=3)),
        carry=draw(st.dictionaries(NAMES, arrays(ticks), max_size=2)),
    )
    series = st.integers(0, 6).flatmap(
        lambda m: st.tuples(hnp.arrays(np.float64, m), hnp.arrays(np.bool_, m)).map(
            lambda of: MeasureSeries(np.arange(m, dtype=np.int64) * 100_000, *of, "max")
        )
    )
    episode = example_episode(ticks).with_arrays(
        observation={"time_us": np.arange(ticks + 1, dtype=np.int64) * 100_000}
        | draw(st.dictionaries(NAMES, arrays(ticks + 1), max_size=3)),
        decisions=draw(st.sampled_from([decision, None])),
        labels=draw(st.dictionaries(NAMES, arrays(ticks), max_size=2)),
        terms=draw(st.dictionaries(NAMES, hnp.arrays(np.float64, ticks), max_size=2)),
        measures=draw(st.dictionaries(NAMES, series, max_size=3)),
        driving_score=draw(st.floats()),
    )
    assert_same(there_and_back(episode, tmp_path), episode, "the episode")


def test_special_values_survive(tmp_path):
    value = np.array([np.nan, -np.inf, -0.0, 1e-320, 2.0, 3.0])
    odd = {
        "empty": np.zeros((6, 0, 3), np.float32),
        "bytes": np.arange(12, dtype=np.uint8).reshape(6, 2),
        "text": np.array(["ä", "", "日本", "a\0b"[:2], "e", "f"]),
    }
    episode = example_episode()
    clock = episode.observation["time_us"]
    episode = episode.with_arrays(
        observation=episode.observation | odd,
        measures={"speed_mps": MeasureSeries(clock, value, np.array([0, 1, 1, 1, 0, 1], bool))},
        labels={"words": np.array(["a", None, "", "ö", None], object)},
    )
    assert_same(there_and_back(episode, tmp_path), episode, "the episode")


def test_equal_episodes_have_equal_bytes():
    assert to_bytes(example_camera_episode(5, 1)) == to_bytes(example_camera_episode(5, 1))
    assert to_bytes(example_episode(5, 1)) != to_bytes(example_episode(5, 2))


def test_objects_are_refused_by_name(tmp_path):
    episode = example_episode().with_arrays(labels={"thing": np.array([{}] * 5, object)})
    with pytest.raises(ValueError, match="label.thing.*dict"):
        write(episode, tmp_path / "e.arrow")


# ---------------------------------------------------------------- pictures are stored once


def test_overlapping_histories_store_a_frame_once(tmp_path):
    episode = example_camera_episode(6, frames=4)
    table = _table(episode, tmp_path, "seen")
    assert [frame.tick for frame in table] == list(range(7))  # 7 moments, 28 pictures in the histories
    ids = episode.observation["camera_front_frame_id"]
    assert [frame.frame_id for frame in table] == ids[:, -1].tolist()


def _table(episode, folder, frames):
    write(episode, folder / "t.arrow", frames)
    return EpisodeFile(folder / "t.arrow").frames()


def test_two_pictures_under_one_id_are_both_kept(tmp_path):
    episode = example_camera_episode(3, frames=1)
    episode.observation["camera_front_frame_id"][:] = 7
    assert len(_table(episode, tmp_path, "seen")) == 4
    assert_same(there_and_back(episode, tmp_path, "seen"), episode, "the episode")


def test_a_frame_that_did_not_arrive_is_kept_as_pixels(tmp_path):
    episode = example_camera_episode(3, frames=1, jpeg=True)
    episode.frames = episode.frames[1:]
    assert [f.format for f in _table(episode, tmp_path, "arrived")] == ["rgb8", "jpeg", "jpeg", "jpeg"]
    assert_same(there_and_back(episode, tmp_path, "arrived"), episode, "the episode")


def test_another_decoder_is_an_error_that_names_both(tmp_path, monkeypatch):
    write(example_camera_episode(3, jpeg=True), tmp_path / "e.arrow", "arrived")
    right = episode_format.decode
    monkeypatch.setattr(episode_format, "decode", lambda *arguments: right(*arguments) ^ 1)
    with pytest.raises(CorruptFileError, match="decodes to other pixels.*opencv.*store.frames=seen"):
        read(tmp_path / "e.arrow")


def test_a_jpeg_that_is_no_jpeg_is_an_error(tmp_path):
    episode = example_camera_episode(3, jpeg=True)
    cut = episode.frames[1]
    episode.frames = (episode.frames[0], Frame(0, "front", cut.time_us, cut.frame_id, "jpeg", cut.data[:-9]))
    write(episode, tmp_path / "e.arrow", "arrived")
    with pytest.raises(CorruptFileError, match="no whole JPEG"):
        read(tmp_path / "e.arrow")


def test_without_pictures_no_picture_is_read(tmp_path):
    episode = example_camera_episode()
    path = tmp_path / "e.arrow"
    write(episode, path, "seen")
    data = bytearray(path.read_bytes())
    picture = EpisodeFile(path).frames()[2].data.tobytes()
    at = data.find(picture)
    data[at] ^= 1
    path.write_bytes(data)
    plain = {n: a for n, a in episode.observation.items() if n != "camera_front"}
    assert_same(read(path, frames=False), episode.with_arrays(observation=plain), "the rest")
    with pytest.raises(CorruptFileError, match=r"e.arrow \(\d+ bytes\).*checksum of frame"):
        read(path)


def test_one_column_is_a_view_of_the_file(tmp_path):
    write(example_camera_episode(), tmp_path / "e.arrow")
    file = EpisodeFile(tmp_path / "e.arrow")
    plan = file.column("decision.plan_rig")
    assert not plan.flags.owndata
    before = (tmp_path / "e.arrow").read_bytes()
    plan[:] = 9.0  # copy on write
    assert (tmp_path / "e.arrow").read_bytes() == before
    with pytest.raises(KeyError, match="no column 'plan'.*decision.plan_rig"):
        file.column("plan")


def test_pictures_that_take_turns_are_read_without_a_copy(tmp_path):
    episode = example_camera_episode(5, frames=1)
    right = example_camera_episode(5, 9, frames=1).observation
    episode.observation.update({name.replace("front", "right"): right[name] for name in right if "camera" in name})
    stored = there_and_back(episode, tmp_path, "seen")
    assert_same(stored, episode, "the episode")
    for name in ("camera_front", "camera_right"):
        assert not stored.observation[name].flags.owndata
        assert stored.observation[name].base is not None
        stored.observation[name][:] = 3


def count_maps():
    return len(MAPS.read_text().splitlines()) if MAPS.exists() else 0


def test_a_thousand_open_episodes_hold_no_file_and_no_memory(tmp_path):
    import resource

    path = tmp_path / "e.arrow"
    write(example_camera_episode(4, height=64, width=64), path, "dense")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    maps = count_maps()
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, before[1]))
    try:
        pictures = [read(path).observation["camera_front"] for _ in range(1000)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (pictures[0] == pictures[999]).all()
    del pictures
    gc.collect()
    assert count_maps() < maps + 100


def test_other_arrow_readers_open_it(tmp_path):
    write(example_episode(5), tmp_path / "e.arrow")
    with pa.memory_map(str(tmp_path / "e.arrow")) as source:
        table = pa.ipc.open_file(source).read_all()
    assert table.num_rows == 6
    assert table["reward"].null_count == 1  # the last row is an observation without a decision
    assert table["decision.plan_rig"].type == pa.fixed_shape_tensor(pa.float32(), (64, 3))
    json.loads(table.schema.metadata[b"alpagym.episode"], parse_constant=pytest.fail)


# ---------------------------------------------------------------- files that are not whole


def test_every_cut_is_noticed(tmp_path):
    path = tmp_path / "e.arrow"
    write(example_episode(2), path)
    whole = path.read_bytes()
    for size in [0, 3, 10, *range(50, len(whole), 997), len(whole) - 10, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptFileError, match=rf"e.arrow \({size} bytes\).*remove it"):
            read(path)


def test_flipped_bits_are_noticed_or_change_nothing(tmp_path):
    path = tmp_path / "e.arrow"
    episode = example_camera_episode(2, height=4, width=4)
    write(episode, path)
    whole = path.read_bytes()
    noticed = 0
    for at in range(0, len(whole), 53):
        data = bytearray(whole)
        data[at] ^= 0x10
        path.write_bytes(data)
        try:
            assert_same(read(path), episode, f"after a flip at {at}")
        except CorruptFileError:
            noticed += 1
    # The rest lies in names, in padding, or in what Arrow writes twice.
    assert noticed > 0.3 * len(range(0, len(whole), 53))


def test_a_newer_format_names_both_versions(tmp_path, monkeypatch):
    monkeypatch.setattr(episode_format, "FORMAT_VERSION", 2)
    write(example_episode(), tmp_path / "e.arrow")
    monkeypatch.undo()
    with pytest.raises(CorruptFileError, match="format 2, this program reads 1"):
        read(tmp_path / "e.arrow")


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04" * 99, b"\x80\x04cos\nsystem\n" * 9, b"ARROW1\0\0" + b"\0" * 64])
def test_other_files_are_no_episodes(tmp_path, data):
    (tmp_path / "e.arrow").write_bytes(data)
    with pytest.raises(CorruptFileError, match="no whole episode"):
        read(tmp_path / "e.arrow")


def test_lengths_beyond_the_file_are_refused(tmp_path):
    path = tmp_path / "e.arrow"
    write(example_episode(), path)
    with pa.memory_map(str(path)) as source:
        batch = pa.ipc.open_file(source).get_batch(0)
        meta = json.loads(batch.schema.metadata[b"alpagym.episode"])
        meta["columns"]["decision.plan_rig"]["rows"] = 10**12
        text = json.dumps(meta).encode()
        crc = {b"alpagym.episode": text, b"alpagym.episode.crc32": str(zlib.crc32(text)).encode()}
        schema = batch.schema.with_metadata(crc)
        with pa.OSFile(str(path) + "2", "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            writer.write_batch(batch)
    os.replace(f"{path}2", path)
    with pytest.raises(CorruptFileError, match="plan_rig.*do not fit"):
        read(path)
