import os
import subprocess
import sys

from alpagym_host import run_dir
from alpagym_host.compose import compose
from alpagym_runtime.run_config import load_run_config


def alpagym(*arguments, cwd, **environment):
    command = [sys.executable, "-m", "alpagym_host.cli", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_help_is_light(tmp_path):
    code = "import sys; sys.argv = ['alpagym', '--help']\nfrom alpagym_host.cli import main\n"
    code += "try:\n    main()\nexcept SystemExit as leave:\n    assert not leave.code\n"
    code += "heavy = {'torch', 'grpc', 'hydra', 'omegaconf', 'numba', 'numpy', 'pyarrow'} & sys.modules.keys()\n"
    code += "assert not heavy, heavy\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "evaluate" in done.stdout


def test_overrides_without_a_command_train_and_a_dry_run_makes_nothing(tmp_path):
    done = alpagym("experiment=smoke", "reward=metrics", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "config.yaml").write_text(done.stdout)
    assert load_run_config(tmp_path) == compose(["experiment=smoke", "reward=metrics"])


def test_a_wrong_request_leaves_with_two_and_makes_nothing(tmp_path):
    done = alpagym("train", "dataset.path=None", cwd=tmp_path, HOME=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == "error: dataset.path: is the text 'None'; use null\n"
    assert list(tmp_path.iterdir()) == []


def test_the_traceback_is_shown_on_request(tmp_path):
    done = alpagym("train", "rollout.slotz=1", "--traceback", cwd=tmp_path)
    assert done.returncode != 0
    assert "Traceback" in done.stderr


def test_a_run_that_trained_needs_a_checkpoint_to_be_evaluated(tmp_path):
    made = run_dir.create(compose(["run.seed=9"]), "train", tmp_path / "made")
    frozen = (made / "config.yaml").read_bytes()
    done = alpagym("evaluate", "--run", "made", "--dry-run", cwd=tmp_path)
    assert done.returncode == 2
    assert "has no checkpoint yet; continue it: alpagym resume" in done.stderr
    for step in (20, 100):
        (made / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    done = alpagym("evaluate", "--run", "made", "dataset.split=val", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"path: {made}/checkpoints/step_00000100\n" in done.stdout
    assert "split: val" in done.stdout
    assert (made / "config.yaml").read_bytes() == frozen
    done = alpagym("evaluate", "--run", "made", "--best", "--dry-run", cwd=tmp_path)
    assert "--best: " in done.stderr
    assert "keeps none; it comes with evaluation.every_updates > 0" in done.stderr
    (made / "checkpoints" / "best").mkdir()
    done = alpagym("evaluate", "--run", "made", "--best", "--dry-run", cwd=tmp_path)
    assert f"path: {made}/checkpoints/best\n" in done.stdout


def test_the_best_checkpoint_is_one_of_a_run(tmp_path):
    done = alpagym("evaluate", "--best", "--dry-run", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "error: --best: chooses among the checkpoints of a run; name it with --run\n",
    )
