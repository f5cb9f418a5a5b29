"""`alpagym pai …`: the published scripts' flags, the disk budget, resuming, checks and pictures."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import cv2
import pytest
from typer.testing import CliRunner

from alpagym_host import cli
from alpagym_host.compose import compose
from alpagym_host.pai_commands import pai, spread
from alpagym_runtime.envs.presets import reward_section
from alpagym_runtime.errors import ConfigError
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.pai import download
from alpagym_runtime.simulators.pai.clips import ClipIndex, PaiDataset
from alpagym_runtime.simulators.pai.download import DownloadChoice, carry_out, curate, plan_download
from alpagym_runtime.testing.pai import copy_of_tree, shared_tree

FRONT = "camera_front_wide_120fov"


class TreeHub:
    """A hub whose repository is the synthetic tree; counts what it hands out."""

    def __init__(self) -> None:
        self.fetched: list[str] = []

    def fetch(self, patterns, folder):
        for pattern in patterns:
            for source in sorted(shared_tree().glob(pattern)):
                path = source.relative_to(shared_tree())
                if source.is_file() and not (folder / path).is_file():
                    (folder / path).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(source, folder / path)
                    self.fetched.append(str(path))

    def sizes(self, paths):
        return {path: (shared_tree() / path).stat().st_size for path in paths if (shared_tree() / path).is_file()}


def run(*words: str):
    return CliRunner().invoke(pai, list(words), catch_exceptions=False)


def index_of(path: Path) -> list[str]:
    return ClipIndex.read(path).clip_id.tolist()


def test_lists_of_several_words_are_spread():
    words = ["--camera", "a", "b", "--num-reasoning-clips", "16", "--labels", "c", "-c", "0", "5", "-n", "3"]
    expected = ["--camera", "a", "--camera", "b", "--num-reasoning-clips", "16", "--labels", "c"]
    assert spread(words) == [*expected, "-c", "0", "-c", "5", "-n", "3"]


# ---------------------------------------------------------------- download


def test_the_chosen_files_and_no_others_are_fetched(tmp_path):
    hub = TreeHub()
    choice = DownloadChoice([1], [FRONT, "egomotion", "vehicle_dimensions"])
    plan = plan_download(hub, tmp_path, choice)
    assert set(plan.files) == {
        f"camera/{FRONT}/{FRONT}.chunk_0001.zip",
        "labels/egomotion/egomotion.chunk_0001.zip",
        "calibration/vehicle_dimensions/vehicle_dimensions.chunk_0001.parquet",
    }
    assert plan.missing_bytes == sum(plan.files.values())
    carry_out(hub, tmp_path, plan, note=lambda text: None)
    assert [sample.chunk for sample in PaiDataset(DatasetSection(source="pai", path=str(tmp_path))).samples("val")] == [
        1
    ] * 3
    assert set(plan.files) <= set(hub.fetched)
    assert not list(tmp_path.rglob("*chunk_0000*"))


def test_an_interrupted_download_goes_on(tmp_path):
    hub = TreeHub()
    choice = DownloadChoice([0], [FRONT, "egomotion"])
    carry_out(hub, tmp_path, plan_download(hub, tmp_path, choice), note=lambda text: None)
    torn = tmp_path / "labels/egomotion/egomotion.chunk_0000.zip"
    torn.unlink()
    again = plan_download(hub, tmp_path, choice)
    assert again.missing_bytes == again.files["labels/egomotion/egomotion.chunk_0000.zip"]
    hub.fetched.clear()
    carry_out(hub, tmp_path, again, note=lambda text: None)
    assert hub.fetched == ["labels/egomotion/egomotion.chunk_0000.zip"]


def test_what_does_not_fit_is_not_begun(tmp_path, monkeypatch):
    hub = TreeHub()
    monkeypatch.setattr(download.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(2**31, 2**30, 2**30))
    plan = plan_download(hub, tmp_path, DownloadChoice([0], [FRONT]))
    hub.fetched.clear()
    with pytest.raises(ConfigError, match=r"output_dir: .* GB are missing .*1\.1 GB free"):
        carry_out(hub, tmp_path, plan)
    assert hub.fetched == []


def test_reasoning_clips_choose_their_chunks_and_write_an_index(tmp_path):
    hub = TreeHub()
    choice = DownloadChoice(None, ["egomotion"], ["ood_reasoning.parquet"], True, 3)
    plan = plan_download(hub, tmp_path, choice)
    carry_out(hub, tmp_path, plan, note=lambda text: None)
    clips = index_of(tmp_path / "clip_index_reasoning_mini.parquet")
    assert clips == plan.clips
    assert len(clips) == 3
    assert plan_download(hub, tmp_path, choice).clips == clips
    index = ClipIndex.read(tmp_path / "clip_index.parquet")
    assert sorted({int(index.chunk[index.row(clip)]) for clip in clips}) == plan.chunks
    assert (tmp_path / "reasoning/ood_reasoning.parquet").is_file()


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        (DownloadChoice([0], ["camera_front_wide_120fv"]), "did you mean 'camera_front_wide_120fov'"),
        (DownloadChoice([7], [FRONT]), "chunks 0 to 1, not 7"),
        (DownloadChoice([0], [], ["nothing.parquet"]), "the hub has no reasoning/nothing.parquet"),
        (DownloadChoice(None, [], [], True, 60), "5 clips .* 60 wanted"),
    ],
)
def test_a_wrong_choice_is_named(tmp_path, choice, text):
    with pytest.raises(ConfigError, match=text):
        plan_download(TreeHub(), tmp_path, choice)


def test_the_published_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "HuggingFaceHub", lambda revision: TreeHub())
    words = ["download", "--chunk-ids", "0-1", "--camera", FRONT, "camera_cross_left_120fov"]
    words += ["--calibration", "camera_intrinsics", "--labels", "egomotion", "--output-dir", str(tmp_path)]
    done = run(*words, "--dry-run")
    assert "4 files of 1 chunks" in done.stdout
    assert not (tmp_path / "camera").exists()
    assert run(*words).exit_code == 0
    assert (tmp_path / f"camera/{FRONT}/{FRONT}.chunk_0000.zip").is_file()


def test_offline_is_said_at_once(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs pip install 'alpagym-runtime[pai]'")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
        run("download", "--output-dir", str(tmp_path))


@pytest.mark.parametrize("preset", ["pai_motion", "pai_joint", "pai_joint_published"])
def test_presets_of_rewards_are_the_environments_own(preset):
    assert compose([f"reward={preset}"]).reward == reward_section(preset)


# ---------------------------------------------------------------- curate


def test_curated_clips_are_a_repeatable_sample(tmp_path):
    source, target = shared_tree() / "clip_index.parquet", tmp_path / "mini.parquet"
    words = ["curate", "-p", str(source), "-n", "2", "-o", str(target), "--chunk"]
    assert "2 clips" in run(*words, "0").stdout
    first = index_of(target)
    assert set(first) <= set(index_of(source)[:3])
    run(*words, "0-1")
    assert index_of(target) == first
    run(*words, "0", "1")
    assert len(index_of(target)) == 2
    assert PaiDataset(section(tmp_path, target)).index.split.tolist()


def section(folder: Path, index: Path) -> DatasetSection:
    tree = copy_of_tree(folder / "tree")
    shutil.copy(index, tree / "mine.parquet")
    return DatasetSection(source="pai", path=str(tree), clip_index="mine.parquet")


def test_only_clips_with_reasoning(tmp_path):
    source, target = shared_tree() / "clip_index.parquet", tmp_path / "r.parquet"
    run("curate", "-p", str(source), "-o", str(target), "--only-reasoning-chunks")
    assert index_of(target) == index_of(source)[:5]  # the last clip has no event


@pytest.mark.parametrize(("count", "chunks", "text"), [(9, None, "6 clips to draw from, 9"), (1, [5], "not 5")])
def test_what_cannot_be_curated(tmp_path, count, chunks, text):
    with pytest.raises(ConfigError, match=text):
        curate(shared_tree() / "clip_index.parquet", tmp_path / "x.parquet", count, chunks)


# ---------------------------------------------------------------- check, show


def test_a_whole_tree_has_no_problems():
    done = run("check", str(shared_tree()), "--decode", "--camera", FRONT)
    assert done.exit_code == 0
    assert "train 3, val 3; 0 problems" in done.stderr


def test_problems_are_listed(tmp_path):
    tree = copy_of_tree(tmp_path / "tree")
    path = tree / f"camera/{FRONT}/{FRONT}.chunk_0001.zip"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-50])
    (tree / "labels/egomotion/egomotion.chunk_0000.zip").unlink()
    done = run("check", str(tree), "--camera", FRONT)
    assert done.exit_code == 1
    assert "no whole zip" in done.stdout
    assert "chunk 0 of egomotion is not on disk" in done.stdout


def test_a_contact_sheet_has_the_path_in_it(tmp_path):
    clip = index_of(shared_tree() / "clip_index.parquet")[0]
    out = tmp_path / "clip.png"
    done = run("show", str(shared_tree()), clip, "--out", str(out), "--camera", FRONT, "--frames", "2", "--width", "96")
    assert clip in done.stdout
    picture = cv2.imread(str(out))[..., ::-1].astype(int)
    # Two captions of 22 px (clip, frame), then 54 px of picture; the path's green stands out of sky and ground.
    assert picture.shape == (22 + 22 + 54, 2 * 96, 3)
    green = (picture[..., 1] > 150) & (picture[..., 0] < 130) & (picture[..., 2] < 140)
    assert green[44:].sum() > 10


def test_make_synthetic_is_a_command(tmp_path, monkeypatch):
    words = ["pai", "make-synthetic", str(tmp_path / "t"), "--chunks", "5", "--clips-per-chunk", "1", "--camera", FRONT]
    monkeypatch.setattr(sys, "argv", ["alpagym", *words, "--width", "64", "--height", "36", "--event-text-key", "coc"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    settings = {"reasoning": "reasoning/ood_reasoning.parquet", "key_frame": "default"}
    with pytest.raises(ConfigError, match="no sample of split 'train' is left: 1 clips"):
        PaiDataset(DatasetSection(source="pai", path=str(tmp_path / "t"), **settings)).samples(
            "train"
        )  # it has no event
