"""Stored episodes from end to end: driven, kept, read, scored again, driven again, learned from, shown."""

from __future__ import annotations

import json
import re
import textwrap

import av
import gymnasium
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from typer.testing import CliRunner

from alpagym_host import cli
from alpagym_host.compose import compose
from alpagym_runtime.episodes.export import export
from alpagym_runtime.episodes.store import EpisodeStore
from alpagym_runtime.episodes.viewer import page
from alpagym_runtime.errors import ConfigError, PluginError
from alpagym_runtime.run_config import load_run_config
from alpagym_runtime.testing.examples import assert_same, example_camera_episode
from alpagym_runtime.trainers.base import decision_batch
from alpagym_runtime.trainers.replay import Replayer
from alpagym_runtime.trainers.run import Run, build_policy
from alpagym_runtime.types import Ended, EpisodeRequest, Sampling

SMALL = ["policy=waypoint_actors", "rollout.slots=8", "rollout.group_size=2"]
SMALL += ["dataset.test_scenes=4", "dataset.train_scenes=4"]


def roll_out(folder, *overrides):
    """A store that `alpagym rollout` filled."""
    config = compose([*SMALL, f"store.path={folder}", *overrides])
    directory = folder.parent / f"run-{len(list(folder.parent.iterdir()))}"
    directory.mkdir()
    outcome = Run(config, directory).rollout()
    assert outcome.completed
    return config


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Two groups of two drives of the untrained policy, with the expert's labels."""
    folder = tmp_path_factory.mktemp("store") / "episodes"
    roll_out(folder, "rollout.groups=2", "store.labels=[target_plan_rig]")
    return EpisodeStore(folder)


def files_of(store, *where):
    return [store.open(name) for name in store.rows(where)["id"].to_pylist()]


# ---------------------------------------------------------------- collecting


def test_a_rollout_keeps_its_episodes(store):
    rows = store.rows().to_pylist()
    assert sorted((row["group_id"], row["member"]) for row in rows) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for row in rows:
        episode = store.read(row["id"])
        assert len(episode.observation["time_us"]) == len(episode) + 1
        assert row["reward"] == episode.rewards.sum()
        assert episode.labels["target_plan_rig"].shape == (len(episode), 64, 3)
        assert (store.path / "configs" / f"{row['config_hash']}.yaml").is_file()


def test_a_rollout_that_was_stopped_goes_on_where_it_stood(tmp_path):
    folder = tmp_path / "episodes"
    config = compose([*SMALL, f"store.path={folder}", "rollout.groups=4", "policy=constant_speed", "rollout.slots=2"])
    (tmp_path / "run").mkdir()
    stopped = Run(
        config, tmp_path / "run", stop_requested=lambda: len(list(folder.glob("data/*.arrow"))) >= 3
    ).rollout()
    assert not stopped.completed
    first = EpisodeStore(folder).rows()["id"].to_pylist()
    assert 3 <= len(first) < 8
    assert Run(config, tmp_path / "run").rollout().completed
    rows = EpisodeStore(folder).rows()
    assert rows["id"].to_pylist()[: len(first)] == first
    pairs = set(zip(rows["group_id"].to_pylist(), rows["member"].to_pylist(), strict=True))
    assert (len(rows), len(pairs)) == (8, 8)


def test_what_a_rule_removed_is_not_driven_again(tmp_path):
    folder = tmp_path / "episodes"
    options = ["policy=constant_speed", "rollout.groups=2", "store.keep_best=1"]
    roll_out(folder, *options)
    kept = EpisodeStore(folder).rows()["id"].to_pylist()
    assert len(kept) == 1
    roll_out(folder, *options)
    assert EpisodeStore(folder).rows()["id"].to_pylist() == kept


def test_the_store_changes_no_result():
    assert compose([]).config_hash == compose(["store.frames=none", "store.keep_last=3"]).config_hash
    assert compose([]).config_hash != compose(["run.seed=2"]).config_hash


def test_training_keeps_its_episodes_where_asked(tmp_path):
    overrides = ["simulator=toy", "trainer.updates=1", "trainer.warm_start=null", "rollout.scenes_per_step=2"]
    overrides += ["store.record=[train,evaluate]", "transport=disk", "evaluation.every_updates=0"]
    config = compose([*SMALL, *overrides])
    run = Run(config, tmp_path)
    assert run.train().completed
    rows = EpisodeStore(tmp_path / "episodes").rows()
    modes = rows["mode"].to_pylist()
    assert modes.count("sample") == 4  # 2 groups of 2
    assert modes.count("mean") == 8  # 4 scenes, before and after
    assert not list((tmp_path / "transport").glob("*.arrow"))
    # The weights of the last version are in a checkpoint, so those drives can be repeated too.
    replayer = Replayer()
    for version in (0, 1):
        (file, *_) = files_of(EpisodeStore(tmp_path / "episodes"), "mode=mean", f"version={version}")
        assert replayer.replay(file).same


# ---------------------------------------------------------------- scoring again


def ratios_from_disk(store):
    """Largest distance from 1 of the probability ratio over all stored decisions, and how many there are."""
    config = load_run_config(next((store.path / "configs").iterdir()))
    policy = build_policy(config)
    worst, count = 0.0, 0
    for name in store.rows()["id"].to_pylist():
        episode = store.read(name)
        observation, decisions = decision_batch([episode])
        with torch.no_grad():
            score = policy.score(observation.take(np.arange(len(decisions))), decisions, episode.sampling)
        worst = max(worst, float(np.abs(np.exp(score.log_prob.numpy() - decisions.log_prob) - 1.0).max()))
        count += len(decisions)
    return worst, count


def test_scoring_from_disk_gives_ratio_one(store):
    worst, count = ratios_from_disk(store)
    assert count
    assert worst <= 1e-6


@pytest.mark.timeout(600)  # compiles the renderer, once an installation
def test_scoring_pictures_from_disk_gives_ratio_one(tmp_path):
    small = ["policy.camera_height=16", "policy.camera_width=32", "rollout.groups=1", "expected_valid_steps=5"]
    roll_out(tmp_path / "store", "policy=waypoint", *small)
    store = EpisodeStore(tmp_path / "store")
    episode = store.read(store.rows()["id"].to_pylist()[0])
    assert episode.observation["camera_front"].shape == (6, 2, 16, 32, 3)
    assert episode.observation["camera_front"].std() > 1.0
    worst, count = ratios_from_disk(store)
    assert count == 2 * 5
    assert worst <= 1e-6


# ---------------------------------------------------------------- driving again


STOPS_EARLY = """
    from dataclasses import dataclass
    import numpy as np

    @dataclass
    class StopConfig:
        after: int = 3

        def build(self, simulator_spec):
            return Stop(self.after)

    class Stop:
        needs = frozenset()

        def __init__(self, after):
            self.after = after

        def tick(self, batch, decisions):
            return np.ones(len(batch))

        def end(self, episode):
            return 0.0

        def stop(self, batch):
            return batch.tick >= self.after
"""


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory):
    """Drives of several policies and worlds, with every way in which one can end."""
    site = tmp_path_factory.mktemp("site")
    (site / "acme_stop.py").write_text(textwrap.dedent(STOPS_EARLY))
    (site / "acme_stop-1.dist-info").mkdir()
    (site / "acme_stop-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-stop\nVersion: 1\n")
    entry = "[alpagym.rewards]\nacme_stop = acme_stop:StopConfig\n"
    (site / "acme_stop-1.dist-info" / "entry_points.txt").write_text(entry)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield _drive_every_kind(tmp_path_factory.mktemp("kinds") / "episodes")


def _drive_every_kind(folder):
    scenes = "dataset.scene_ids=[procedural-test-000000,procedural-test-000003]"
    for overrides in (
        [scenes],
        [scenes, "policy=constant_speed", "policy.speed_factor=1.2", "rollout.mode=mean"],
        [scenes, "policy=constant_speed", "policy.speed_factor=0"],
        [scenes, "policy=route_follower", "expected_valid_steps=90"],
        [scenes, "policy=log_replay", "expected_valid_steps=90", "simulator.end_on=[]", "rollout.mode=mean"],
        ["simulator=toy", "policy=log_replay", "expected_valid_steps=80", "rollout.groups=2", "rollout.mode=mean"],
        ["simulator=toy", "simulator.late_measures=true", "rollout.groups=1"],
        ["simulator=toy", "reward.terms.stop={type: acme_stop, scale: 0.1}", "rollout.groups=1"],
    ):
        config = roll_out(folder, *overrides)
    run = Run(config, folder.parent / "run-0")
    collector = run.collector(run.core("test", run.policy.spec), run.policy, purpose="rollout")
    collector.collect([EpisodeRequest("no-such-scene", policy_seed=3)], Sampling())
    run.store.close()
    return EpisodeStore(folder)


def test_twenty_episodes_of_all_kinds_give_the_same_bytes(every_kind):
    rows = every_kind.rows()
    kinds = set(rows["ended"].to_pylist())
    assert kinds == {ended.name.lower() for ended in Ended} - {"running"}
    files = files_of(every_kind)
    assert len(files) >= 20
    replayer = Replayer()
    for file in files:
        found = replayer.replay(file)
        assert found.same, (file.meta["request"], file.meta["ended"], found.differences)
    replayer.close()


def test_a_drive_that_differs_says_where(store, tmp_path):
    (file, *_) = files_of(store)
    config = load_run_config(next((store.path / "configs").iterdir()))
    config.policy.config.seed = 5  # other first weights
    found = Replayer(config).replay(file)
    assert not found.same
    text = "\n".join(found.differences)
    assert re.search(r"receipt.config_hash: '.*' stored, '.*' now", text)
    assert re.search(r"column decision.plan_rig: (from row 0 on, by up to|float32)", text)


def test_a_config_that_is_gone_is_asked_for(store, tmp_path):
    (file, *_) = files_of(store)
    lonely = tmp_path / "a" / "data" / file.path.name
    lonely.parent.mkdir(parents=True)
    lonely.write_bytes(file.path.read_bytes())
    with pytest.raises(ConfigError, match=r"config of .* is not at .*--config"):
        Replayer().replay(type(file)(lonely))


# ---------------------------------------------------------------- learning from a store


def sft(store, folder, *overrides):
    folder.mkdir()
    options = ["trainer=sft", f"trainer.store={store.path}", "trainer.epochs=8", "trainer.batch=16", "simulator=toy"]
    config = compose([*SMALL, *options, *overrides])
    run = Run(config, folder)
    outcome = run.train()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return outcome, [row["loss"] for row in map(json.loads, lines) if row["stage"] == "imitation"], run


@pytest.mark.parametrize("target", ["plan", "expert"])
def test_imitation_of_stored_drives_learns(store, tmp_path, target):
    outcome, losses, _ = sft(store, tmp_path / "run", f"trainer.target={target}")
    assert outcome.completed
    assert losses[-1] < 0.8 * losses[0]


def test_imitation_of_the_best_of_each_group(store, tmp_path):
    from alpagym_runtime.trainers.sft.config import SftConfig
    from alpagym_runtime.trainers.sft.stored import choose, read_data

    files = choose(SftConfig(store=str(store.path), best_of_group=1))
    rows = {row["id"]: row for row in store.rows().to_pylist()}
    assert sorted(rows[file.path.stem]["group_id"] for file in files) == [0, 1]
    for file in files:
        mine = rows[file.path.stem]
        others = [row for row in rows.values() if row["group_id"] == mine["group_id"]]
        rank = lambda row: (row["driving_score"], row["reward"])  # noqa: E731
        assert rank(mine) == max(map(rank, others))
    policy = build_policy(compose(["policy=waypoint_actors"]))
    observation, target = read_data(files, policy.spec, "plan")
    assert len(target) == sum(rows[file.path.stem]["ticks"] for file in files) == len(observation)
    with pytest.raises(ConfigError, match="none of the 4 episodes"):
        choose(SftConfig(store=str(store.path), where=["driving_score>2"]))
    with pytest.raises(ConfigError, match="best_of_group"):
        SftConfig(best_of_group=2)


def test_a_run_that_goes_on_refuses_other_data(store, tmp_path):
    from alpagym_runtime.trainers.sft.config import SftConfig
    from alpagym_runtime.trainers.sft.stored import choose, hold_still

    files = choose(SftConfig(store=str(store.path)))
    hold_still(files, tmp_path, resuming=False)
    hold_still(files, tmp_path, resuming=True)
    with pytest.raises(ConfigError, match="4 then, 3 now"):
        hold_still(files[:3], tmp_path, resuming=True)


# ---------------------------------------------------------------- the offline environment


def test_the_offline_environment_gives_what_was_recorded(store):
    env = gymnasium.make("alpagym_runtime:alpagym/Offline-v0", store=str(store.path), order=True, layout="nested")
    for name in store.rows()["id"].to_pylist():
        episode = store.read(name)
        observation, info = env.reset()
        assert info["episode"] == name
        for t in range(len(episode)):
            np.testing.assert_array_equal(observation["ego_dynamics_rig"], episode.observation["ego_dynamics_rig"][t])
            assert info["log_prob"] == pytest.approx(float(episode.decisions.log_prob[t, 0]))
            np.testing.assert_array_equal(info["plan_rig"], episode.decisions.plan_rig[t])
            observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
            assert reward == episode.rewards[t]
            assert (terminated or truncated) == (t == len(episode) - 1)
        assert (terminated, truncated) == (episode.ended.terminated, episode.ended.truncated)
        assert info["ended"] == episode.ended.name.lower()
        np.testing.assert_array_equal(observation["time_us"], episode.observation["time_us"][-1])
    env.close()


@pytest.mark.parametrize("layout", ["flat", "nested"])
def test_the_offline_environment_passes_gymnasiums_checks(store, layout):
    env = gymnasium.make("alpagym_runtime:alpagym/Offline-v0", store=str(store.path), layout=layout)
    check_env(env.unwrapped, skip_render_check=True)


def test_the_offline_environment_shows_pictures(tmp_path):
    store = EpisodeStore(tmp_path / "s")
    store.add(example_camera_episode(4, frames=2))
    store.close()
    env = gymnasium.make("alpagym_runtime:alpagym/Offline-v0", store=str(tmp_path / "s"), layout="nested")
    observation, _ = env.reset(seed=0)
    assert observation["camera_front"].shape == (2, 24, 32, 3)
    assert env.observation_space.contains(observation)


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_the_offline_environment_has_a_vector_environment(store, mode):
    envs = gymnasium.make_vec("alpagym_runtime:alpagym/Offline-v0", 2, store=str(store.path), autoreset_mode=mode)
    single = gymnasium.make("alpagym_runtime:alpagym/Offline-v0", store=str(store.path))
    observation, info = envs.reset(seed=4)
    for slot, seed in enumerate((4, 5)):
        expected, first = single.reset(seed=seed)
        assert info["episode"][slot] == first["episode"]
        for name, array in expected.items():
            np.testing.assert_array_equal(observation[name][slot], array)
    assert envs.autoreset_mode is envs.metadata["autoreset_mode"]
    assert envs.metadata["autoreset_mode"].name.lower() == mode


def test_a_question_that_leaves_nothing_is_an_error(store):
    with pytest.raises(ConfigError, match="no episode of"):
        gymnasium.make("alpagym_runtime:alpagym/Offline-v0", store=str(store.path), where=["driving_score>2"])


# ---------------------------------------------------------------- for other tools


@pytest.fixture(scope="module")
def pictured(tmp_path_factory):
    store = EpisodeStore(tmp_path_factory.mktemp("pictured"))
    for seed, jpeg in ((1, False), (2, True)):
        store.add(example_camera_episode(6, seed, height=48, width=64, jpeg=jpeg))
    store.close()
    return store


def test_json_is_strict_and_complete(store, pictured, tmp_path):
    for number, source in enumerate((store, pictured)):
        export(files_of(source), "json", tmp_path / f"{number}.json")
        document = json.loads((tmp_path / f"{number}.json").read_text(), parse_constant=pytest.fail)
        for entry, file in zip(document, files_of(source), strict=True):
            assert entry["columns"]["observation.time_us"] == file.column("observation.time_us").tolist()
            assert entry["request"]["world_seed"] == file.request.world_seed


def test_parquet_has_a_row_a_moment(store, tmp_path):
    export(files_of(store), "parquet", tmp_path / "t.parquet")
    table = pq.read_table(tmp_path / "t.parquet")
    rows = store.rows().to_pylist()
    assert len(table) == sum(row["ticks"] + 1 for row in rows)
    assert str(table.schema.field("observation.time_us").type) == "int64"
    assert str(table.schema.field("controls").type) == "bool"
    own = table.filter(np.array(table["episode"].to_pylist()) == rows[0]["id"])
    episode = store.read(rows[0]["id"])
    assert own["reward"].to_pylist() == [*episode.rewards.tolist(), None]
    plans = np.array(own["decision.plan_rig"].to_pylist()[:-1], np.float32).reshape(-1, 64, 3)
    np.testing.assert_array_equal(plans, episode.decisions.plan_rig)
    assert table.schema.field("decision.plan_rig").metadata[b"shape"] == b"[64, 3]"
    mask = np.array(own["observation.route_mask"].to_pylist())
    np.testing.assert_array_equal(mask, episode.observation["route_mask"])


def test_video_has_a_frame_a_moment(store, pictured, tmp_path):
    for number, (source, size) in enumerate(((store, (480, 480)), (pictured, (64, 48)))):
        path = tmp_path / f"{number}.mp4"
        export(files_of(source), "video", path)
        with av.open(str(path)) as container:
            frames = list(container.decode(video=0))
            assert float(container.streams.video[0].average_rate) == 5.0
        assert len(frames) == sum(row["ticks"] + 1 for row in source.rows().to_pylist())
        assert (frames[0].width, frames[0].height) == size


def test_video_shows_what_was_seen(pictured, tmp_path):
    (file, _) = files_of(pictured)
    export([file], "video", tmp_path / "v.mp4")
    with av.open(str(tmp_path / "v.mp4")) as container:
        shown = [frame.to_ndarray(format="rgb24").astype(int) for frame in container.decode(video=0)]
    seen = file.episode().observation["camera_front"][:, -1].astype(int)
    own = np.mean([np.abs(a - b).mean() for a, b in zip(shown, seen, strict=True)])
    other = np.mean([np.abs(a - b).mean() for a, b in zip(shown, seen[::-1], strict=True)])
    assert own < 0.5 * other  # chroma is at half the resolution, so noise loses some


@pytest.mark.parametrize(("kind", "install"), [("lerobot", "uv sync --group lerobot"), ("rerun", "[rerun]")])
def test_a_library_that_is_missing_is_named_with_its_remedy(store, tmp_path, kind, install, monkeypatch):
    import sys

    for module in ("lerobot", "lerobot.datasets.lerobot_dataset", "rerun"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(PluginError, match=re.escape(install)):
        export(files_of(store), kind, tmp_path / "out")


def test_rerun_takes_a_recording(store, pictured, tmp_path):
    pytest.importorskip("rerun")
    export([*files_of(store), *files_of(pictured)], "rerun", tmp_path / "r.rrd")
    assert (tmp_path / "r.rrd").stat().st_size > 10_000


def test_lerobot_reads_what_was_exported(store, tmp_path):
    module = pytest.importorskip("lerobot.datasets.lerobot_dataset")
    export(files_of(store), "lerobot", tmp_path / "l")
    dataset = module.LeRobotDataset("alpagym/l", root=tmp_path / "l")
    assert dataset.num_episodes == 4
    assert len(dataset) == sum(row["ticks"] for row in store.rows().to_pylist())


def test_an_export_overwrites_nothing(store, tmp_path):
    (tmp_path / "x.json").write_text("mine")
    with pytest.raises(ConfigError, match=r"x\.json exists"):
        export(files_of(store), "json", tmp_path / "x.json")
    with pytest.raises(ConfigError, match="there are json, lerobot"):
        export(files_of(store), "csv", tmp_path / "x.csv")


def test_the_page_holds_everything_it_shows(store, pictured):
    text = page([files_of(store)[0], files_of(pictured)[0]])
    assert not re.search(r"""(src|href)=["'](?!data:)|url\(|https?://""", text)
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    panels = json.loads(found[1], parse_constant=pytest.fail)["panels"]
    first, second = store.read(store.rows()["id"][0].as_py()), pictured.read(pictured.rows()["id"][0].as_py())
    assert [len(panel["moments"]) for panel in panels] == [len(first) + 1, len(second) + 1]
    assert panels[0]["terms"] == {name: values.tolist() for name, values in first.terms.items()}
    assert panels[1]["moments"][0]["pictures"]["front"].startswith("data:image/jpeg;base64,")
    np.testing.assert_allclose(panels[0]["moments"][2]["plan"], first.decisions.plan_rig[2, :, :2], atol=0.006)


def test_a_scene_id_cannot_break_out_of_the_page(tmp_path):
    store = EpisodeStore(tmp_path)
    episode = example_camera_episode(1)
    evil = "</script><script>alert(1)</script>"
    from dataclasses import replace

    name = store.add(episode.with_arrays(request=replace(episode.request, scene_id=evil)))
    text = page([store.open(name)])
    assert "<script>alert" not in text
    with pytest.raises(ConfigError, match="one episode or two"):
        page([store.open(name)] * 3)


# ---------------------------------------------------------------- the commands


def alpagym(*arguments):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments], catch_exceptions=False)


def test_the_commands_on_episodes(store, tmp_path):
    rows = store.rows().to_pylist()
    listed = alpagym("episodes", "list", store.path, "--sort", "reward", "--limit", 3)
    assert listed.exit_code == 0
    assert f"3 of {len(rows)} episodes" in listed.output
    best = max(rows, key=lambda row: row["reward"])
    assert best["id"] in listed.stdout.splitlines()[3]
    as_json = alpagym("episodes", "list", store.path, "--json", "--where", f"reward>={best['reward']}")
    assert json.loads(as_json.stdout)["id"] == best["id"]

    file = store.path / "data" / f"{best['id']}.arrow"
    shown = alpagym("episodes", "show", file).output
    assert f"request.world_seed: {best['world_seed']}" in shown
    assert re.search(r"decision.plan_rig +array +<f4 +\d+ +\[64, 3\]", shown)

    assert alpagym("episodes", "export", store.path, "--to", "json", "-o", tmp_path / "all.json").exit_code == 0
    assert len(json.loads((tmp_path / "all.json").read_text())) == len(rows)
    assert alpagym("episodes", "view", file, "-o", tmp_path / "page.html").exit_code == 0
    assert best["scene_id"] in (tmp_path / "page.html").read_text()

    replayed = alpagym("replay", file)
    assert replayed.exit_code == 0
    assert f"{best['id']}: same bytes" in replayed.output
    with pytest.raises(ConfigError, match="did you mean 'reward'"):
        alpagym("episodes", "list", store.path, "--sort", "rewrad")
    with pytest.raises(ConfigError, match="loosen --where"):
        alpagym("replay", store.path, "--where", "reward>99")


def test_sampling_is_stored(store):
    (file, *_) = files_of(store)
    assert file.episode().sampling == Sampling("sample", 1.0)
    assert file.episode().ended != Ended.RUNNING
    assert_same(file.episode(), store.read(file.path.stem), "the same file")
