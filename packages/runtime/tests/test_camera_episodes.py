"""Pictures from the simulator to the store, with a toy world that has a camera."""

import cv2
import numpy as np
import pytest

from alpagym_runtime.envs.core import DrivingCore, ScaledTerm
from alpagym_runtime.episodes.frames import decode
from alpagym_runtime.episodes.store import EpisodeStore
from alpagym_runtime.policies.base import plan_decision
from alpagym_runtime.random import generator
from alpagym_runtime.rollouts.collector import Collector
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.testing.examples import assert_same
from alpagym_runtime.testing.toy import ToySimulator
from alpagym_runtime.testing.toy_config import ToyConfig
from alpagym_runtime.types import EpisodeRequest, Frame, PolicySpec, Sampling

SPEC = PolicySpec(frames=2)
HEIGHT, WIDTH = 24, 32


class CameraToy(ToySimulator):
    """The toy world with a camera `front`: a picture a tick, a function of the scene and the time."""

    def receive(self, min_ready, timeout_s):
        batch = super().receive(min_ready, timeout_s)
        seen, ids, times, frames = [], [], [], []
        for row, slot in enumerate(batch.slots.tolist()):
            now = int(batch.observation["time_us"][row])
            moments = [max(now - 200_000, 2_000_000), now]
            encoded = [jpeg(batch.requests[row], moment) for moment in moments]
            seen.append([decode(data, "jpeg", HEIGHT, WIDTH) for data in encoded])
            first = now == 2_000_000
            ids.append([0 if first else moments[0] + slot, now + slot])
            times.append(moments)
            frames.append(Frame(slot, "front", now, now + slot, "jpeg", encoded[1]))
        batch.observation["camera_front"] = np.array(seen, np.uint8).reshape(-1, 2, HEIGHT, WIDTH, 3)
        batch.observation["camera_front_frame_id"] = np.array(ids, np.uint64).reshape(-1, 2)
        batch.observation["camera_front_time_us"] = np.array(times, np.int64).reshape(-1, 2)
        batch.frames = tuple(frames)
        return batch


def jpeg(request, time_us):
    small = generator(request.world_seed, time_us).integers(0, 256, (6, 8, 3), np.uint8)
    return cv2.imencode(".jpg", cv2.resize(small, (64, 48)))[1].tobytes()


class Ahead:
    spec = SPEC

    def act(self, observations, seeds, sampling):
        assert observations["camera_front"].shape[1:] == (2, HEIGHT, WIDTH, 3)
        plan = np.zeros((len(seeds), 64, 3), np.float32)
        plan[..., 0] = np.arange(1, 65) * 0.5
        return plan_decision(plan)


class StopsAt:
    """Ends every drive after some ticks, whole batches at once."""

    needs = frozenset()

    def tick(self, batch, decisions):
        return np.ones(len(batch))

    def end(self, episode):
        return 0.0

    def stop(self, batch):
        return batch.tick >= 3


def collect(terms=None, keep_frames=True, sink=None):
    core = DrivingCore(CameraToy(ToyConfig(), SPEC, DatasetSection(), 3), terms or {}, SPEC)
    collector = Collector(core, Ahead(), keep_frames=keep_frames, sink=sink)
    requests = [EpisodeRequest(f"toy-{64 + k}", horizon_ticks=4 + k, world_seed=k, policy_seed=k) for k in range(5)]
    return collector.collect(requests, Sampling())


def test_an_episode_holds_the_frames_that_arrived_for_it():
    for k, episode in enumerate(collect()):
        times = episode.observation["time_us"]
        assert [frame.time_us for frame in episode.frames] == times.tolist()
        assert [frame.data for frame in episode.frames] == [jpeg(episode.request, int(t)) for t in times]
        assert len(episode) == 4 + k


def test_frames_survive_a_batch_that_a_term_stopped():
    for episode in collect({"stop": ScaledTerm(1.0, StopsAt())}):
        assert episode.ended.name == "SCORED"
        shown = set(episode.observation["camera_front_frame_id"].ravel().tolist()) - {0}
        assert shown <= {frame.frame_id for frame in episode.frames}


@pytest.mark.parametrize("mode", ["seen", "arrived", "none"])
def test_a_store_keeps_pictures_as_it_is_told(tmp_path, mode):
    store = EpisodeStore(tmp_path, frames=mode)
    episodes = collect(keep_frames=mode == "arrived", sink=store.add)
    store.close()
    by_scene = {episode.request.scene_id: episode for episode in episodes}
    assert len(store.rows()) == 5
    for name in store.rows()["id"].to_pylist():
        stored = store.read(name)
        drove = by_scene[stored.request.scene_id]
        if mode == "none":
            rest = {n: array for n, array in drove.observation.items() if n != "camera_front"}
            drove = drove.with_arrays(observation=rest)
        assert_same(stored, drove, name)


def test_encoded_frames_take_the_room_of_their_bytes(tmp_path):
    sizes = {}
    for mode in ("arrived", "none"):
        store = EpisodeStore(tmp_path / mode, frames=mode)
        (episode, *_) = collect()
        sizes[mode] = (tmp_path / mode / "data" / f"{store.add(episode)}.arrow").stat().st_size
    encoded = sum(len(frame.data) for frame in episode.frames)
    # A fixed part describes the frame table; the rest is the JPEGs.
    assert 0 <= sizes["arrived"] - sizes["none"] - encoded < 8_000
