"""`alpagym checkpoint` end to end on a tiny checkpoint, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from alpagym_host.cli import app
from alpagym_plugins import ConfigError
from alpagym_runtime.errors import CorruptFileError

SCRIPTS = Path(__file__).parents[1] / "scripts"


def alpagym(*arguments):
    """What a command prints; in this process, since importing torch takes longer than any of them."""
    done = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def run(*arguments):
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True)


def test_help_needs_no_torch():
    code = (
        "import sys\nsys.argv = ['alpagym', 'checkpoint', 'export', '--help']\n"
        "from alpagym_host.cli import main\n"
        "try:\n    main()\nexcept SystemExit as leave:\n    assert not leave.code\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert "--vlm-only" in done.stdout


def test_a_hub_name_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match="hf download nvidia/Alpamayo-1.5-10B"):
        alpagym("convert", "nvidia/Alpamayo-1.5-10B", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_make_convert_export_verify(tmp_path):
    steps = [
        ("tiny", "release"),
        ("convert", "release", "training"),
        ("export", "release", "exported", "--base", "training", "--max-shard-size", "1MB"),
        ("verify", "exported", "--against", "release"),
        ("convert", "exported", "back", "--to", "1.5"),
    ]
    names = {"release", "training", "exported", "back"}
    for step in steps:
        assert "99 tensors" in alpagym(*(tmp_path / word if word in names else word for word in step))
    before, after = ((tmp_path / name / "config.json").read_text() for name in ("release", "back"))
    assert json.loads(before) == json.loads(after)
    shards = sorted((tmp_path / "exported").glob("*.safetensors"))
    assert len(shards) > 2
    shards[0].unlink()
    with pytest.raises(CorruptFileError, match=f"lacks {shards[0].name}"):
        alpagym("verify", tmp_path / "exported")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_recipes_script_names(tmp_path):
    release, training, exported = tmp_path / "release", tmp_path / "training", tmp_path / "exported"
    alpagym("tiny", release)
    steps = [
        ("convert_release_config_to_training.py", "--alpamayo-model", release, "--output-dir", training),
        ("convert_checkpoint.py", "to-a1", "--input", release, "--output", tmp_path / "one"),
        (
            *("convert_cosmos_rl_checkpoint.py", "--cosmos-policy-ckpt", release, "--base-hf-ckpt", training),
            *("--output-dir", exported, "--max-shard-size", "1MB"),
        ),
    ]
    for name, *flags in steps:
        done = run(SCRIPTS / name, *flags)
        assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "one" / "config.json").read_text())["model_type"] == "alpamayo_r1"
    alpagym("verify", exported, "--against", release)
