"""Pictures that overlapping histories share are held once, from the collector to the minibatch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpagym_runtime.rollouts.pictures import PictureTrack, overlapping, successive
from alpagym_runtime.testing.examples import assert_same, example_episode, example_observation
from alpagym_runtime.trainers.base import Observations, decision_batch
from alpagym_runtime.types import PolicySpec

SHAPE = (4, 6, 3)


def frames(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *SHAPE), np.uint8)


def spanned_bytes(array):
    low, high = np.lib.array_utils.byte_bounds(array)
    return high - low


def drive(track, rows_by_slot):
    """Writes all but the last of rows [T,K,h,w,3] of several slots side by side, as a collector does."""
    for t in range(max(map(len, rows_by_slot.values())) - 1):
        slots = np.array([slot for slot, rows in rows_by_slot.items() if t < len(rows) - 1])
        track.write(slots, np.full(len(slots), t), np.stack([rows_by_slot[slot][t] for slot in slots]))


def test_overlapping_rows_show_each_frame_in_each_place():
    found = overlapping(frames(5), 3)
    # 5 frames, 3 a row: rows 012, 123, 234
    np.testing.assert_array_equal(found, frames(5)[np.array([[0, 1, 2], [1, 2, 3], [2, 3, 4]])])
    assert not found.flags.writeable


@given(ticks=st.lists(st.integers(2, 9), min_size=1, max_size=3), histories=st.integers(1, 4))
@settings(deadline=None, max_examples=30)
def test_a_track_gives_back_what_was_seen(ticks, histories):
    track = PictureTrack(3, 4, histories, SHAPE)
    for round_ in range(2):  # the second episode in a slot begins anew
        rows = {k: overlapping(frames(t + histories - 1, 10 * round_ + k), histories) for k, t in enumerate(ticks)}
        drive(track, rows)
        for slot, seen in rows.items():
            found = track.read(slot, len(seen) - 1, seen[-1])
            np.testing.assert_array_equal(found, seen)
            # T + K - 1 frames, not T · K
            assert spanned_bytes(found) == (len(seen) + histories - 1) * np.prod(SHAPE)


def test_histories_that_do_not_overlap_are_kept_whole():
    track = PictureTrack(2, 4, 2, SHAPE)
    shifted, apart = overlapping(frames(7), 2), frames(12, 1).reshape(6, 2, *SHAPE)
    drive(track, {0: shifted, 1: apart})
    np.testing.assert_array_equal(track.read(0, 5, shifted[5]), shifted)
    np.testing.assert_array_equal(track.read(1, 5, apart[5]), apart)


def test_one_changed_pixel_is_not_lost():
    track = PictureTrack(1, 8, 2, SHAPE)
    rows = overlapping(frames(6), 2).copy()
    rows[3, 0, 0, 0, 0] ^= 1
    drive(track, {0: rows})
    np.testing.assert_array_equal(track.read(0, 4, rows[4]), rows)


def test_a_last_row_between_two_ticks_is_kept_and_costs_its_own_episode_only():
    track = PictureTrack(2, 8, 2, SHAPE)
    rows, other = overlapping(frames(6), 2).copy(), overlapping(frames(6, 2), 2)
    rows[4] = frames(2, 1)
    drive(track, {0: rows, 1: other})
    np.testing.assert_array_equal(track.read(0, 4, rows[4]), rows)
    # 5 rows of 2 frames share: 6 frames
    assert spanned_bytes(track.read(1, 4, other[4])) == 6 * np.prod(SHAPE)
    # Without its last row, which nobody trains on, the episode's frames follow each other.
    np.testing.assert_array_equal(successive(track.read(0, 4, rows[4])[:-1]), frames(6)[:5])


def test_an_episode_keeps_its_pictures_when_its_slot_drives_on():
    track = PictureTrack(1, 8, 2, SHAPE)
    rows = overlapping(frames(4), 2)
    drive(track, {0: rows})
    found = track.read(0, 2, rows[2])
    drive(track, {0: overlapping(frames(4, 1), 2)})
    np.testing.assert_array_equal(found, rows)


@pytest.mark.parametrize("between", [False, True])
def test_an_episodes_pictures_lie_in_the_memory_that_was_asked_for(between):
    track, seen = PictureTrack(1, 8, 2, SHAPE), frames(6)
    rows = np.stack([seen[k : k + 2] for k in range(4)])
    last = seen[4:6] if not between else seen[[0, 5]]
    drive(track, {0: np.concatenate([rows, last[None]])})
    given = []

    def allocate(count):
        given.append(np.zeros(count, np.uint8))
        return given[-1]

    found = track.read(0, 4, last, allocate)
    assert len(given) == 1
    assert np.shares_memory(found, given[0])
    np.testing.assert_array_equal(found, np.concatenate([rows, last[None]]))


def test_successive_frames_of_a_view_are_no_copy():
    plain = frames(6)
    rows = overlapping(plain, 3)
    assert np.shares_memory(successive(rows), plain)
    np.testing.assert_array_equal(successive(rows), plain)
    np.testing.assert_array_equal(successive(rows.copy()), plain)
    assert successive(frames(12).reshape(4, 3, *SHAPE)) is None


# ---------------------------------------------------------------- batches


def episodes(histories):
    """Two episodes; the pictures of the first overlap, those of the second do not."""
    spec = PolicySpec(cameras={"front": SHAPE[:2]}, frames=histories)
    found = [
        example_episode(ticks).with_arrays(observation=example_observation(spec, ticks + 1, ticks)) for ticks in (4, 3)
    ]
    found[0].observation["camera_front"] = overlapping(frames(5 + histories - 1), histories)
    return found


@pytest.mark.parametrize("consume", [False, True])
@pytest.mark.parametrize("histories", [1, 2, 3])
def test_a_batch_gives_back_what_the_episodes_hold(histories, consume):
    wanted = np.concatenate([e.observation["camera_front"][:-1] for e in episodes(histories)])
    given_ = episodes(histories)
    batch, decisions = decision_batch(given_, consume=consume)
    assert len(batch) == len(decisions) == 4 + 3
    rows = np.array([6, 0, 3, 3])
    np.testing.assert_array_equal(batch.take(rows)["camera_front"], wanted[rows])
    np.testing.assert_array_equal(batch.keep(rows).take(np.array([1, 2]))["camera_front"], wanted[[0, 3]])
    # 4 + K - 1 shared frames of the first, 3 · K of the second (one frame a row is never shared)
    assert len(batch.frames["camera_front"]) == 4 + histories - 1 + 3 * histories
    assert all(("camera_front" in e.observation) is not consume for e in given_)


def test_other_fields_are_taken_with_the_pictures():
    given_ = episodes(2)
    batch, _ = decision_batch(given_, drop=("time_us",))
    row = batch.take(np.array([5]))
    assert "time_us" not in row
    # row 5 is tick 1 of the second episode
    expected = {n: array[1:2] for n, array in given_[1].observation.items() if n != "time_us"}
    assert_same({name: row[name] for name in expected}, expected, "the row")


def test_plain_observations_are_taken_as_they_are():
    plain = {"x": np.arange(3.0), "camera_a": frames(6).reshape(3, 2, *SHAPE)}
    found = Observations.of(plain).take(np.array([2, 0]))
    assert_same(found, {name: array[[2, 0]] for name, array in plain.items()}, "rows")


def test_portions_join_to_what_one_batch_is():
    def part(first):
        pictures = np.arange(first, first + 3, dtype=np.uint8).reshape(3, 1, 1, 1) * np.ones((1, 2, 2, 3), np.uint8)
        # Rows of two frames: 0 1, then 1 2.
        return Observations({"x": np.array([first, first + 1])}, {"camera_a": pictures}, {"camera_a": ROWS})

    parts = [part(0), part(10)]
    whole = Observations.concatenate(parts)
    assert parts == []
    assert len(whole.frames["camera_a"]) == 6
    taken = whole.take(np.array([3, 0]))
    assert taken["x"].tolist() == [11, 0]
    assert taken["camera_a"][:, :, 0, 0, 0].tolist() == [[11, 12], [0, 1]]


ROWS = np.array([[0, 1], [1, 2]])
