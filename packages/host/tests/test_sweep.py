import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpagym_host.cli import main
from alpagym_host.compose import compose
from alpagym_host.sweep import expand, varied
from alpagym_plugins import ConfigError
from alpagym_runtime.run_config import load_run_config

TINY = (
    *("simulator=toy", "policy=constant_speed", "logging=console", "dataset.test_scenes=1", "expected_valid_steps=3"),
    *("evaluation.bootstrap=100", "rollout.slots=2"),
)


def alpagym(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["alpagym", *words])
    with pytest.raises(SystemExit) as leave:
        main()
    return leave.value.code


def test_every_combination_is_a_run_and_the_last_override_changes_fastest():
    assert expand(["run.seed=1,2", "run.name=x", "reward=metrics,driving"]) == [
        ["run.seed=1", "run.name=x", "reward=metrics"],
        ["run.seed=1", "run.name=x", "reward=driving"],
        ["run.seed=2", "run.name=x", "reward=metrics"],
        ["run.seed=2", "run.name=x", "reward=driving"],
    ]
    assert varied(["run.seed=1,2", "run.name=x", "reward=metrics,driving"]) == [0, 2]


@pytest.mark.parametrize(
    "value", ["[a,b]", "'x,y'", '"x,y"', "{a: 1, b: 2}", "it's", "a\\,b", "", "[[1,2],[3,4]]", "'it\\'s, so'", "${a,b}"]
)
def test_a_comma_inside_quotes_or_brackets_does_not_separate(value):
    assert expand([f"k={value}"]) == [[f"k={value}"]]


def test_lists_are_values_too():
    assert expand(["k=[a,b],[c]"]) == [["k=[a,b]"], ["k=[c]"]]


@given(st.lists(st.from_regex(r"[a-z0-9.\-]{1,8}", fullmatch=True), min_size=1, max_size=6))
def test_plain_values_come_back_as_they_were(values):
    assert expand([f"k={','.join(values)}"]) == [[f"k={value}"] for value in values]


def test_null_in_a_sweep_is_null_and_a_number_is_a_number():
    first, second = (compose(words) for words in expand(["deploy.slurm.cpus_per_task=null,1"]))
    assert (first.deploy.slurm.cpus_per_task, second.deploy.slurm.cpus_per_task) == (None, 1)


def test_an_empty_value_and_a_flood_of_runs_are_refused():
    with pytest.raises(ConfigError, match="run.seed: '1,,2' has an empty value"):
        expand(["run.seed=1,,2"])
    with pytest.raises(ConfigError, match="are 1024 runs; at most 1000"):
        expand([f"k{i}=1,2" for i in range(10)])


def test_a_sweep_makes_a_directory_for_each_run(monkeypatch, tmp_path, capsys):
    words = ("evaluate", "--multirun", f"run.root={tmp_path}", "run.seed=1,2", "reward=metrics,distance_to_gt", *TINY)
    assert alpagym(monkeypatch, *words) == 0
    made = [path for path in tmp_path.iterdir() if not path.is_symlink()]
    configs = [load_run_config(path) for path in made]
    assert {(c.run.seed, "progress" in c.reward.terms) for c in configs} == {
        (seed, progress) for seed in (1, 2) for progress in (True, False)
    }
    for path in made:
        assert json.loads((path / "summary.json").read_text())["status"] == "completed"
    shown = capsys.readouterr().out
    assert "run 2 of 4: run.seed=1 reward=distance_to_gt" in shown
    assert "4 of 4 runs completed" in shown


def test_one_wrong_run_stops_a_sweep_before_it_begins(monkeypatch, tmp_path, capsys):
    assert alpagym(monkeypatch, "evaluate", "-m", f"run.root={tmp_path}", "run.seed=2,-2", *TINY) == 2
    assert "error: run.seed=-2: run.seed: must be a finite number" in capsys.readouterr().err
    assert alpagym(monkeypatch, "evaluate", "-m", f"run.root={tmp_path}", "dataset.path=null,absent", *TINY) == 2
    assert "dataset.path = absent" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_a_sweep_that_fails_does_not_stop_the_others(monkeypatch, tmp_path, capsys):
    # Weights for a policy that has none: found when the run builds it.
    (tmp_path / "weights").mkdir()
    words = ("evaluate", "-m", f"run.root={tmp_path / 'runs'}", f"checkpoint.path={tmp_path / 'weights'},null", *TINY)
    assert alpagym(monkeypatch, *words) == 1
    shown = capsys.readouterr().out
    assert "error: checkpoint.path: 'constant_speed' has no weights to load" in shown
    assert "1 of 2 runs completed" in shown


def test_a_dry_run_of_a_sweep_prints_each_config_and_makes_nothing(monkeypatch, tmp_path, capsys):
    assert alpagym(monkeypatch, "train", "-m", "--dry-run", f"run.root={tmp_path}", "run.seed=1,2") == 0
    shown = capsys.readouterr().out
    assert shown.count("schema_version: 1") == 2
    assert "# run.seed=2" in shown
    assert list(tmp_path.iterdir()) == []


def test_several_values_without_multirun_name_it(monkeypatch, capsys):
    assert alpagym(monkeypatch, "train", "run.seed=1,2") == 2
    assert "--multirun makes runs" in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--directory", "x"), ("--run", "x")])
def test_options_that_name_one_run_do_not_go_with_multirun(option, monkeypatch, capsys):
    assert alpagym(monkeypatch, "evaluate", "-m", *option, "run.seed=1,2") == 2
    assert option[0] in capsys.readouterr().err
