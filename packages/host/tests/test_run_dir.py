import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path

import pytest

from alpagym_host import run_dir
from alpagym_host.compose import compose
from alpagym_plugins import ConfigError
from alpagym_runtime.run_config import load_run_config


@pytest.fixture(scope="module")
def composed():
    return compose([])


@pytest.fixture
def config(composed, tmp_path):
    composed.run.root, composed.run.name = str(tmp_path / "runs"), "run"
    return composed


def frozen_clock():
    return datetime(2026, 1, 2, 3, 4, 5)


def create_one(config, seed):
    config.run.seed = seed
    return run_dir.create(config, "train", now=frozen_clock)


def test_a_run_directory_holds_its_frozen_config(config):
    made = run_dir.create(config, "evaluate", now=frozen_clock)
    assert re.fullmatch(r"run-20260102-030405-[0-9a-f]{6}", made.name)
    assert load_run_config(made) == config
    assert run_dir.command_of(made) == "evaluate"
    assert sorted(path.name for path in made.iterdir()) == ["command", "config.yaml"]


def test_twenty_at_once_in_one_second_get_twenty_directories(config):
    with multiprocessing.get_context("fork").Pool(20) as pool:
        made = pool.starmap(create_one, [(config, seed) for seed in range(20)])
    assert len(set(made)) == 20
    assert [load_run_config(path).run.seed for path in made] == list(range(20))


def test_latest_is_a_link_to_the_newest(config):
    run_dir.create(config, "train")
    newest = run_dir.create(config, "train")
    assert (newest.parent / "latest").readlink() == Path(newest.name)
    assert run_dir.open_existing(newest.parent / "latest") == newest


def test_a_folder_of_the_users_called_latest_is_left_alone(config, tmp_path):
    kept = tmp_path / "runs" / "latest"
    kept.mkdir(parents=True)
    made = run_dir.create(config, "train")
    assert sorted(path.name for path in kept.parent.iterdir()) == sorted(["latest", made.name])
    assert not kept.is_symlink()


def test_a_discarded_directory_leaves_nothing(config, tmp_path):
    run_dir.discard(run_dir.create(config, "train"))
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_directory_with_a_runs_files_is_not_discarded(config):
    made = run_dir.create(config, "train")
    (made / "metrics.jsonl").write_text("{}\n")
    run_dir.discard(made)
    assert load_run_config(made) == config


def test_an_explicit_directory_that_exists_is_an_error(config, tmp_path):
    made = run_dir.create(config, "train", tmp_path / "mine")
    before = (made / "config.yaml").read_bytes()
    with pytest.raises(ConfigError, match=f"exists; to continue it: alpagym resume {made}"):
        run_dir.create(config, "train", made)
    assert (made / "config.yaml").read_bytes() == before


def test_a_name_that_leaves_the_root_makes_nothing(config, tmp_path):
    config.run.name = "../../x"
    with pytest.raises(ConfigError, match="run.name"):
        run_dir.create(config, "train")
    assert list(tmp_path.iterdir()) == []


def test_a_parent_that_is_a_file_is_named_with_owner_and_mode(config, tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match=r"cannot make .*runs belongs to \S+ and has mode -rw.*run.root=DIR"):
        run_dir.create(config, "train")


def test_a_parent_of_another_user_is_named_with_owner_and_mode(config):
    # Permissions do not stop root: become nobody for a moment.
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        config.run.root = f"{parent}/runs"
        os.chmod(parent, 0o555)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)
        try:
            with pytest.raises(ConfigError, match=r"Permission denied; \S+ belongs to \S+ and has mode dr-xr-xr-x"):
                run_dir.create(config, "train")
        finally:
            if is_root:
                os.seteuid(0)
            os.chmod(parent, 0o755)


def test_a_link_out_of_the_run_directory_is_refused(config, tmp_path):
    made = run_dir.create(config, "train")
    outside = tmp_path / "outside"
    outside.mkdir()
    (made / "checkpoints").symlink_to(outside)
    with pytest.raises(ConfigError, match="checkpoints is a symbolic link to .*outside"):
        run_dir.open_existing(made)


def test_a_lock_that_is_a_link_is_not_followed(config, tmp_path):
    made = run_dir.create(config, "train")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (made / ".lock").symlink_to(victim)
    with pytest.raises(ConfigError, match="cannot lock"), run_dir.locked(made):
        pass
    assert victim.read_text() == "mine"


def test_what_is_no_run_directory_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"is no run directory \(no config.yaml\)"):
        run_dir.open_existing(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        run_dir.open_existing(tmp_path / "absent")


def test_a_run_directory_in_use_names_its_holder(tmp_path):
    with (
        run_dir.locked(tmp_path),
        pytest.raises(ConfigError, match=f"is in use by process {os.getpid()} on .* since 20"),
        run_dir.locked(tmp_path),
    ):
        pass
    with run_dir.locked(tmp_path):
        pass


def test_a_lock_of_a_killed_process_is_free(tmp_path):
    hold = "import sys, time, pathlib; from alpagym_host.run_dir import locked\n"
    hold += "with locked(pathlib.Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)\n"
    process = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"in use by process {process.pid}"), run_dir.locked(tmp_path):
            pass
        process.kill()
        process.wait()
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == process.pid
    with run_dir.locked(tmp_path):
        pass
