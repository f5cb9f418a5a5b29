import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import pytest

from alpagym_runtime.episodes.store import EpisodeStore, Keep, best_of_group, find_store
from alpagym_runtime.errors import ConfigError, CorruptFileError
from alpagym_runtime.testing.conformance import empty_episode
from alpagym_runtime.testing.examples import assert_same, example_camera_episode, example_episode
from alpagym_runtime.types import Ended


def drive(score, ended=Ended.HORIZON, *, scene="s", group=0, seed=0, **request):
    episode = example_episode(3, seed)
    request = replace(episode.request, scene_id=scene, group_id=group, world_seed=1, **request)
    return episode.with_arrays(request=request, driving_score=score, ended=ended)


def ids(store, *where):
    return store.rows(where)["id"].to_pylist()


def filled(path, **options):
    """Six drives: scores 0, 0.2, … 1, the first of them a collision, and a failed one."""
    store = EpisodeStore(path, **options)
    made = [store.add(drive(k / 5, Ended.COLLISION if k == 0 else Ended.HORIZON, seed=k)) for k in range(6)]
    made.append(store.add(empty_episode()))
    store.close()
    return store, made


def test_what_is_added_is_found_and_read(tmp_path):
    _, made = filled(tmp_path)
    again = EpisodeStore(tmp_path)
    assert ids(again) == made
    assert_same(again.read(made[2]), drive(0.4, seed=2), "the third")
    row = again.rows().to_pylist()[2]
    assert (row["driving_score"], row["ended"], row["version"], row["mode"]) == (0.4, "horizon", 7, "sample")
    assert row["reward"] == pytest.approx(row["term/progress"] + row["term/collision"])
    assert row["world_seed"] == 1
    assert row["bytes"] == (tmp_path / "data" / f"{made[2]}.arrow").stat().st_size


def test_questions(tmp_path):
    store, made = filled(tmp_path)
    assert ids(store, "driving_score>=0.5") == made[3:6]
    assert ids(store, "driving_score>=0.5", "driving_score < 0.9") == made[3:5]
    assert ids(store, "ended=collision|failed") == [made[0], made[6]]
    assert ids(store, "ended!=horizon") == [made[0], made[6]]
    assert ids(store, "scene_id=no scene") == [made[6]]
    assert ids(store, "version=7", "initial_fault=false") == made[:6]
    assert ids(store, "measure/progress>=0") == made[:6]


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("driving_scor>1", "did you mean 'driving_score'"),
        ("driving_score", "NAME OP VALUE"),
        ("version=new", "version is of type int64"),
        ("version>1|2", "alternatives"),
        ("initial_fault=maybe", "bool"),
    ],
)
def test_a_question_that_cannot_be_read(tmp_path, condition, message):
    with pytest.raises(ConfigError, match=message):
        filled(tmp_path)[0].rows([condition])


def test_scene_ids_never_reach_a_path(tmp_path):
    store = EpisodeStore(tmp_path / "store")
    odd = ["../../x", "/etc/x", "a/b", "..", "", "a\0b", "con\nid", "a" * 300, "-rf", "%2e%2e", "x;touch y"]
    made = [store.add(drive(0.5, scene=scene)) for scene in odd]
    assert len(set(made)) == len(odd)
    store.close()
    assert EpisodeStore(tmp_path / "store").rows()["scene_id"].to_pylist() == odd
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    for name in odd:
        with pytest.raises(ConfigError, match="no episode id"):
            store.open(name)


# ---------------------------------------------------------------- what stays


@pytest.mark.parametrize(
    ("keep", "stay"),
    [
        (Keep(), [0, 1, 2, 3, 4, 5, 6]),
        (Keep(last=2), [5, 6]),
        (Keep(best=2), [4, 5]),
        (Keep(best=1, worst=2), [0, 1, 5]),
        (Keep(failures=True), [0, 6]),
        (Keep(last=1, failures=True), [0, 6]),
        (Keep(best=1, worst=99), [0, 1, 2, 3, 4, 5]),
    ],
)
def test_keep_rules(tmp_path, keep, stay):
    _, made = filled(tmp_path, keep=keep)
    assert ids(EpisodeStore(tmp_path)) == [made[k] for k in stay]
    assert len(list((tmp_path / "data").iterdir())) == len(stay)


def test_the_index_is_only_added_to(tmp_path):
    store, made = filled(tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "index").iterdir()}
    store.remove(made[:2])
    EpisodeStore(tmp_path, keep=Keep(best=1)).flush()
    assert before.items() <= {path: path.read_bytes() for path in (tmp_path / "index").iterdir()}.items()
    assert ids(store) == made[5:6]
    assert store.rows(removed=True)["id"].to_pylist() == made


# ---------------------------------------------------------------- groups


def test_the_best_of_each_group(tmp_path):
    store = EpisodeStore(tmp_path)
    made = [store.add(drive(score, group=group)) for group in (0, 1) for score in (0.1, 0.9, 0.5)]
    store.add(empty_episode())
    store.add(drive(1.0).with_arrays(initial_fault=True))
    assert best_of_group(store.rows(), 1)["id"].to_pylist() == [made[1], made[4]]
    assert best_of_group(store.rows(), 2)["id"].to_pylist() == [made[1], made[2], made[4], made[5]]


# ---------------------------------------------------------------- when things break


def test_an_episode_that_is_not_in_the_index_is_found(tmp_path):
    store, made = filled(tmp_path)
    rows = store.rows()
    for part in (tmp_path / "index").iterdir():
        part.unlink()
    again = EpisodeStore(tmp_path)
    assert again.rows().drop_columns(["written_us"]).equals(rows.drop_columns(["written_us"]))
    again.flush()
    assert EpisodeStore(tmp_path).rows()["id"].to_pylist() == made


def test_a_damaged_part_of_the_index_is_reported_and_made_again(tmp_path):
    _, made = filled(tmp_path)
    (part,) = (tmp_path / "index").iterdir()
    part.write_bytes(part.read_bytes()[:-10])
    again = EpisodeStore(tmp_path)
    assert ids(again) == made
    assert str(part) in again.problems[0]


def test_a_torn_episode_is_reported_and_the_others_stay(tmp_path):
    _, made = filled(tmp_path)
    path = tmp_path / "data" / f"{made[1]}.arrow"
    path.write_bytes(path.read_bytes()[:1000])
    (next((tmp_path / "index").iterdir())).unlink()
    again = EpisodeStore(tmp_path)
    assert ids(again) == [made[0], *made[2:]]
    assert f"{path} (1000 bytes)" in again.problems[0]
    with pytest.raises(CorruptFileError, match="remove it"):
        again.read(made[1])


WRITER = """
    import sys
    from pathlib import Path
    from alpagym_runtime.episodes import store
    from alpagym_runtime.testing.examples import example_camera_episode
    store.FLUSH_EVERY = 5
    target = store.EpisodeStore(Path(sys.argv[1]))
    episode = example_camera_episode(10, height=128, width=128)
    for k in range(int(sys.argv[2])):
        target.add(episode)
        print(k, flush=True)
    target.close()
"""


def writer(folder, count):
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(folder), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("moments", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_writer_leaves_whole_episodes(tmp_path, moments):
    counts = []
    for attempt in range(moments):
        with writer(tmp_path, 10**6) as process:
            for _ in range(3 + attempt % 4):
                last = int(process.stdout.readline())
            time.sleep(0.007 * attempt)
            process.send_signal(signal.SIGKILL)
            counts.append(last + 1)
    store = EpisodeStore(tmp_path)
    found = ids(store)
    assert len(found) >= sum(counts)
    assert store.problems == []
    expected = example_camera_episode(10, height=128, width=128)
    for name in found:
        assert_same(store.read(name), expected, name)
    partials = list((tmp_path / "data").glob(".partial-*"))
    for path in partials:
        os.utime(path, (0, 0))
    store.add(expected)
    assert not list((tmp_path / "data").glob(".partial-*"))


def test_two_writers_share_a_store(tmp_path):
    with writer(tmp_path, 12) as one, writer(tmp_path, 12) as two:
        assert (one.wait(60), two.wait(60)) == (0, 0)
    store = EpisodeStore(tmp_path)
    assert len(ids(store)) == 24
    assert store.problems == []


@contextlib.contextmanager
def mounted(folder, options):
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_a_clear_error_and_earlier_episodes_are_whole(tmp_path):
    with mounted(tmp_path / "disk", "size=2m"):
        store, episode = EpisodeStore(tmp_path / "disk" / "store"), example_camera_episode(10, height=128, width=128)
        message = r"cannot write .*arrow \(\d.* MB of arrays\): No space left.*MB are free.*store.keep_last"
        with pytest.raises(OSError, match=message):
            [store.add(episode) for _ in range(100)]
        found = ids(EpisodeStore(tmp_path / "disk" / "store"))
        assert len(found) >= 2
        for name in found:
            assert_same(store.read(name), episode, name)


def test_a_read_only_disk_can_be_read_and_says_why_it_cannot_be_written(tmp_path):
    with mounted(tmp_path / "disk", "size=8m"):
        _, made = filled(tmp_path / "disk" / "store")
        subprocess.run(["mount", "-o", "remount,ro", tmp_path / "disk"], check=True)
        store = EpisodeStore(tmp_path / "disk" / "store")
        assert ids(store) == made
        assert_same(store.read(made[1]), drive(0.2, seed=1), "an episode")
        with pytest.raises(OSError, match="Read-only file system.*store.path"):
            store.add(example_episode())


def test_no_store_is_said_plainly(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        find_store(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="no episode store"):
        EpisodeStore(tmp_path).rows()
    filled(tmp_path / "run" / "episodes")
    assert find_store(tmp_path / "run") == tmp_path / "run" / "episodes" == find_store(tmp_path / "run" / "episodes")
