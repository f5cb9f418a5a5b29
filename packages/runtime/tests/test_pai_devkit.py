"""Our reader against NVIDIA's own devkit on the synthetic tree: poses, frames by bar code, calibration."""

from __future__ import annotations

import os

# The hub's client reads it when it is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest

from alpagym_runtime.geometry import quaternion_to_xyzw
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.pai.calibration import read_cameras, read_vehicle
from alpagym_runtime.simulators.pai.clips import PaiDataset
from alpagym_runtime.simulators.pai.egomotion import EgoLog
from alpagym_runtime.simulators.pai.synthetic import REVISION
from alpagym_runtime.simulators.pai.video import ClipVideo
from alpagym_runtime.testing.pai import CAMERAS, shared_hub

physical_ai_av = pytest.importorskip(
    "physical_ai_av", reason="needs the devkit: uv run --extra pai pytest packages/runtime/tests/test_pai_devkit.py"
)


@pytest.fixture(scope="module")
def devkit():
    return physical_ai_av.PhysicalAIAVDatasetInterface(
        revision=REVISION, cache_dir=shared_hub(), confirm_download_threshold_gb=float("inf")
    )


@pytest.fixture
def ours():
    return PaiDataset(DatasetSection(source="pai", path=str(shared_hub())))


def test_the_index(devkit, ours):
    index = devkit.clip_index
    assert index.index.tolist() == ours.index.clip_id.tolist()
    assert index["chunk"].tolist() == ours.index.chunk.tolist()
    assert index["split"].tolist() == ours.index.split.tolist()
    assert sorted(devkit.features.ALL) == sorted(ours.tree.features)


def test_poses_between_samples(devkit, ours):
    rng = np.random.default_rng(3)
    for sample in (*ours.samples("train"), *ours.samples("val")):
        theirs = devkit.get_clip_feature(sample.clip_id, "egomotion")
        log = EgoLog.from_table(ours.tree.table("egomotion", sample.chunk, sample.clip_id, "egomotion"), "log")
        assert (int(theirs.time_range[0]), int(theirs.time_range[1])) == (log.time_us[0], log.time_us[-1])
        query = np.sort(rng.integers(log.time_us[0], log.time_us[-1], 300))
        state, pose = theirs(query), log.poses(query)
        np.testing.assert_allclose(pose.position, state.pose.translation, atol=1e-9)
        xyzw = quaternion_to_xyzw(pose.quaternion_wxyz)
        expected = state.pose.rotation.as_quat()
        np.testing.assert_allclose(np.abs(np.sum(xyzw * expected, axis=1)), 1.0, atol=1e-12)
        np.testing.assert_allclose(log.velocities(query), state.velocity, atol=1e-9)
        with pytest.raises(ValueError, match="range"):
            theirs(np.array([log.time_us[-1] + 1]))


def test_frames_by_time(devkit, ours):
    query = 5_100_000 - np.array([300_000, 200_000, 100_000, 0])
    for sample in (ours.samples("train")[0], ours.samples("val")[2]):
        for name in CAMERAS:
            camera = f"camera_{name}"
            frames, stamps = devkit.get_clip_feature(sample.clip_id, camera).decode_images_from_timestamps(query)
            video = ClipVideo.open(ours.tree, camera, sample.chunk, sample.clip_id)
            numbers = video.numbers(query)
            assert video.timestamps_us[numbers].tolist() == stamps.tolist()
            assert (video.decode(numbers) == frames).all()


def test_calibration(devkit, ours):
    sample = ours.samples("train")[0]
    cameras = read_cameras(ours.tree, sample.chunk, sample.clip_id)
    models = devkit.get_clip_feature(sample.clip_id, "camera_intrinsics").camera_models
    poses = devkit.get_clip_feature(sample.clip_id, "sensor_extrinsics").sensor_poses
    assert cameras.keys() == models.keys()
    rays = np.array([[0.1, 0.2, 1.0], [-0.5, 0.1, 0.8], [0.3, -0.4, 0.5]])
    rays /= np.linalg.norm(rays, axis=1, keepdims=True)
    for name, camera in cameras.items():
        np.testing.assert_allclose(camera.model.project(rays)[0], models[name].ray2pixel(rays), atol=1e-9)
        np.testing.assert_allclose(camera.pose_rig_to_optical.transform(rays), poses[name].apply(rays), atol=1e-12)
    theirs = devkit.get_clip_feature(sample.clip_id, "vehicle_dimensions")
    assert vars(read_vehicle(ours.tree, sample.chunk, sample.clip_id)) == vars(theirs)
