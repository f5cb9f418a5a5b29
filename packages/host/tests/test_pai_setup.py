from __future__ import annotations

import shlex
import subprocess

import pytest
from typer.testing import CliRunner

from alpagym_host import pai_setup
from alpagym_host.cli import app
from alpagym_host.compose import compose
from alpagym_plugins import ConfigError

PLACES = {"model": "/m", "data": "/d", "output": "/o"}


def made(flow, tmp_path, **flags):
    answers = pai_setup.answer(flow, {name.replace("_", "-"): value for name, value in (PLACES | flags).items()}, {})
    return answers, pai_setup.write(flow, answers, tmp_path), pai_setup.steps(flow, answers, tmp_path)


def test_flags_win_over_variables_and_variables_over_asking():
    asked = []

    def ask(question):
        asked.append(question.name)
        return "7" if question.name == "clips" else None

    environment = {"REWARD_MODE": "motion", "ALPAMAYO_MODEL_DIR": "/m", "ALPAMAYO_PAI_LOCAL_DIR": "/d"}
    environment |= {"TRAIN_OUTPUT_DIR": "/o", "CHUNK_IDS": "5"}
    answers = pai_setup.answer("rl", {"chunks": "6"}, environment, ask)
    assert (answers["chunks"], answers["clips"], answers["data"], answers["version"]) == ("6", "7", "/d", "1.5")
    assert "judge" not in answers  # of the joint reward only
    assert not {"reward", "model", "data", "output", "chunks"} & set(asked)


def test_what_cannot_be_assumed_is_listed_and_nothing_is_written(tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)--judge .or .LINGO_JUDGE_DIR.*--data .or .ALPAMAYO_PAI_REASONING"):
        pai_setup.answer("rl", {"reward": "joint", "model": "/m", "output": "/o"}, {})
    with pytest.raises(ConfigError, match="did you mean --reward"):
        pai_setup.answer("rl", PLACES | {"rewards": "joint"}, {})
    with pytest.raises(ConfigError, match="motion or joint, got 'both'"):
        pai_setup.answer("rl", PLACES | {"reward": "both"}, {})
    outcome = CliRunner().invoke(app, ["pai", "setup", "sft", "--no-ask", "--out", str(tmp_path / "out")])
    assert outcome.exit_code == 1
    assert isinstance(outcome.exception, ConfigError)
    assert not (tmp_path / "out").exists()


CHUNKS = {"chunks": "0-10", "stages": "stage1"}


@pytest.mark.parametrize(
    ("flow", "flags", "wanted"),
    [
        ("rl", {}, {"policy": "alpamayo_1_5", "terms": ["pai_motion"]}),
        ("rl", {"reward": "joint", "judge": "/j"}, {"policy": "alpamayo_1_5", "terms": ["pai_joint_corrected"]}),
        ("sft", CHUNKS, {"policy": "alpamayo_1", "train": "0 1 2 3 4 5 6 7 8"}),
        ("sft", CHUNKS | {"coc": "yes", "wandb": "yes"}, {"policy": "alpamayo_1", "cot": True}),
        ("sft", {"chunks": "0-1", "stages": "stage2", "stage1": "/s"}, {"policy": "alpamayo_1", "train": "0-1"}),
    ],
)
def test_what_is_written_composes(tmp_path, flow, flags, wanted):
    _, paths, _ = made(flow, tmp_path, **flags)
    config = compose([f"experiment={paths[0]}"])
    assert config.policy.type == wanted["policy"]
    assert config.policy.config.model.path == "/m"
    assert config.dataset.path == "/d"
    if "terms" in wanted:
        assert list(config.reward.terms) == wanted["terms"]
        assert (config.rollout.group_size, config.rollout.scenes_per_step) == (12, 4)
        assert config.dataset.every_split
    if "train" in wanted:
        assert config.dataset.train_chunks == wanted["train"]
    if wanted.get("cot"):
        assert "cot" in config.trainer.config.components_order
        assert (config.dataset.key_frame, config.dataset.train_chunks) == ("events", None)
        assert config.logging.loggers["wandb"].config.mode == "online"
    assert subprocess.run(["bash", "-n", paths[-1]], check=False).returncode == 0


def test_the_commands_go_from_conversion_to_evaluation(tmp_path):
    _, _, lines = made("sft", tmp_path, chunks="0-10", train_chunks="0-9", val_chunks="9-10")
    commands = [line.split(" --")[0] for line in lines if line.startswith(("alpagym", "hf"))]
    words = [" ".join(command.split()[:3]) for command in commands]
    assert [word for word in words if not word.startswith("hf")] == [
        "alpagym checkpoint convert",
        "alpagym pai download",
        "alpagym pai check",
        f"alpagym train experiment={tmp_path}/experiment/my_pai_sft_stage1.yaml",
        f"alpagym train experiment={tmp_path}/experiment/my_pai_sft_stage2.yaml",
        f"alpagym evaluate experiment={tmp_path}/experiment/my_pai_sft_stage2.yaml",
    ]
    assert 'trainer.stage1_path="$(ls -d /o/stage1/checkpoint-* | sort -V | tail -1)"' in lines[-3]
    assert all(shlex.split(line) for line in lines if not line.startswith("#"))


def test_an_experiment_of_ones_own_is_refused_where_it_cannot_be_meant(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "loose.yaml").write_text("run: {name: x}")
    (tmp_path / "experiment" / "smoke.yaml").write_text("run: {name: x}")
    for path, says in (
        (tmp_path / "experiment" / "none.yaml", "does not exist"),
        (tmp_path / "loose.yaml", "must lie in a folder named 'experiment'"),
        (tmp_path / "experiment" / "smoke.yaml", "has the name of a preset of alpagym_host.conf"),
    ):
        with pytest.raises(ConfigError, match=says):
            compose([f"experiment={path}"])
