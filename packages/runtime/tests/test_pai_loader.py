"""Samples decoded ahead by worker processes: equal to direct reading, bounded, and robust."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

from alpagym_runtime.errors import ConfigError, SceneError
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.pai.clips import PaiDataset, Sample
from alpagym_runtime.simulators.pai.loader import SampleLoader
from alpagym_runtime.simulators.pai.samples import Layout, read_motion, read_pictures
from alpagym_runtime.simulators.pai.synthetic import read_bar_code
from alpagym_runtime.testing.pai import shared_tree

LAYOUT = Layout({"camera_front_wide_120fov": (54, 96), "camera_cross_left_120fov": (36, 64)})


@pytest.fixture(scope="module")
def data():
    return PaiDataset(DatasetSection(source="pai", path=str(shared_tree())))


@pytest.fixture(scope="module")
def working(data):
    """One loader with two processes for all tests: starting them takes a second."""
    loader = SampleLoader(data.tree.root, LAYOUT, workers=2, cache_mb=1)
    yield loader
    loader.close()
    loader.close()
    assert all(worker.process.returncode is not None for worker in loader._workers)


def check(data, sample, loaded):
    motion = read_motion(data.tree, sample, LAYOUT)
    assert (loaded.motion.history_rig == motion.history_rig).all()
    assert (loaded.motion.future_rig == motion.future_rig).all()
    assert (loaded.motion.dynamics_rig == motion.dynamics_rig).all()
    for camera in LAYOUT.cameras:
        pictures = read_pictures(data.tree, sample, camera, LAYOUT)
        assert (loaded.images[camera] == pictures.images).all()
        assert loaded.time_us[camera].tolist() == pictures.time_us.tolist()
        assert [read_bar_code(image) for image in loaded.images[camera]] == pictures.number.tolist()


def test_workers_read_what_direct_reading_reads(data, working):
    samples = [*data.samples("train"), *data.samples("val")]
    for sample in samples:
        working.submit(sample)
    for sample in samples:
        check(data, sample, working.take(sample))


def test_in_this_process_too(data):
    loader = SampleLoader(data.tree.root, LAYOUT, workers=0, cache_mb=1)
    for sample in (*data.samples("train"), data.samples("train")[0]):
        loader.submit(sample)
        assert loader.ready(sample)
        check(data, sample, loader.take(sample))
    loader.close()


def test_the_cache_is_bounded_and_drops_the_oldest(data):
    loader = SampleLoader(data.tree.root, LAYOUT, workers=0, cache_mb=1)
    count = loader.capacity
    clip = data.samples("train")[0]
    # 93 KB a sample in 1 MiB: pictures 4 · 54 · 96 · 3 + 4 · 36 · 64 · 3, the motion 4,536, each on pages of 4,096.
    assert count == 2**20 // (65536 + 28672 + 8192)
    times = [5_000_000 + 100_000 * i for i in range(count + 1)]
    for time_us in times:
        sample = Sample("", clip.clip_id, 0, "", time_us)
        loader.submit(sample)
        loader.take(sample)
    assert [key[1] for key in loader._entries] == times[1:]
    loader.close()


def test_what_is_expected_is_there_before_it_is_wanted(data, working):
    samples = [Sample("", data.samples("val")[1].clip_id, 1, "", 6_000_000 + 100_000 * i) for i in range(3)]
    working.expect(samples)
    deadline = time.monotonic() + 60.0
    while not all(map(working.ready, samples)) and time.monotonic() < deadline:
        working.wait(1.0)
    assert all(map(working.ready, samples))
    working.submit(samples[2])
    check(data, samples[2], working.take(samples[2]))


def test_more_is_wanted_than_fits(data, working):
    clip = data.samples("train")[2]
    wanted = [Sample("", clip.clip_id, 0, "", 4_000_000 + 50_000 * i) for i in range(2 * working.capacity)]
    for sample in wanted:
        working.submit(sample)
    for sample in wanted:
        working.take(sample)


def test_a_sample_that_cannot_be_read_is_an_error_each_time(working):
    nobody = Sample("", "nobody", 0, "", 5_000_000)
    for _ in range(2):
        working.submit(nobody)
        with pytest.raises(SceneError, match="nobody"):
            working.take(nobody)


def test_what_is_released_makes_room(data, working):
    sample = Sample("", data.samples("train")[0].clip_id, 0, "", 7_123_456)
    working.submit(sample)
    working.release(sample)
    assert all(entry.waiting == 0 for entry in working._entries.values())


def test_a_worker_that_is_killed_is_replaced(data, working):
    first = working._workers[0].process
    os.kill(first.pid, signal.SIGKILL)
    samples = [Sample("", data.samples("val")[0].clip_id, 1, "", 8_000_000 + 50_000 * i) for i in range(4)]
    for sample in samples:
        working.submit(sample)
    for sample in samples:
        check(data, sample, working.take(sample))
    assert first.poll() == -signal.SIGKILL
    assert all(worker.process is not first for worker in working._workers)


def test_nothing_is_left_in_shared_memory(data):
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    loader = SampleLoader(data.tree.root, LAYOUT, workers=0, cache_mb=1)
    assert not os.path.isdir("/dev/shm") or set(os.listdir("/dev/shm")) <= before
    loader.close()


def test_arrays_belong_to_the_taker(data):
    loader = SampleLoader(data.tree.root, LAYOUT, workers=0, cache_mb=1)
    sample = data.samples("train")[0]
    loader.submit(sample)
    first = loader.take(sample)
    kept = np.array(first.images["camera_front_wide_120fov"])
    loader._arena[:100] = b"\0" * 100
    assert (first.images["camera_front_wide_120fov"] == kept).all()
    loader.close()


def test_two_samples_must_fit(data):
    with pytest.raises(ConfigError, match=r"simulator\.cache_mb=\d+"):
        SampleLoader(data.tree.root, Layout({"camera_front_wide_120fov": (1080, 1920)}), workers=0, cache_mb=10)
