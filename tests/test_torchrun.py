"""A run in several processes is the run of one: the same numbers, the same weights, one writer."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from alpagym_host import run_dir
from alpagym_host.launch.torchrun import command_line
from alpagym_runtime.run_config import from_mapping
from alpagym_runtime.testing.conformance import run_results, training_rows
from alpagym_runtime.trainers.checkpoints import CheckpointStore, load_weights
from alpagym_runtime.trainers.run import Run

SFT = {"drives_per_scene": 1, "epochs": 3, "batch": 32}
TERMS = {"progress": {"type": "progress", "scale": 1.0}, "collision": {"type": "collision", "scale": -1.0}}


def configure(trainer, **sections):
    """Three groups a step, which two processes share as one and two; nine scenes of twelve decisions."""
    return from_mapping(
        {
            "run": {"seed": 3},
            "simulator": {"type": "toy"},
            "dataset": {"train_scenes": 5, "val_scenes": 3, "test_scenes": 3},
            "expected_valid_steps": 12,
            "policy": {"type": "waypoint", "hidden": 16, "actors": 1, "value_head": trainer["type"] == "ppo"},
            "reward": {"terms": TERMS},
            "rollout": {"slots": 8, "group_size": 3, "scenes_per_step": 3},
            "transport": {"type": "memory"},
            "trainer": {"updates": 4, "minibatch": 32, "warm_start": SFT} | trainer,
            "evaluation": {"bootstrap": 100, "every_updates": 2, "videos": False, "seeds": [1, 2]},
            "checkpoint": {"every_updates": 2, "keep": 9},
            "logging": {"loggers": {"jsonl": {"type": "jsonl"}}},
        }
        | sections
    )


def start(directory, size):
    """The processes of a team, as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "alpagym_host.launch.torchrun", str(directory)]
    return [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]


def train(config, directory, size):
    """Train to the end in a new or a given run directory; what it leaves."""
    if not directory.exists():
        run_dir.create(config, "train", directory)
    if size == 1:
        assert Run(config, directory).train().completed
    else:
        for process in start(directory, size):
            text, _ = process.communicate(timeout=200)
            assert process.returncode == 0, text
    return run_results(directory)


def assert_alike(found, wanted, tolerance=2e-5):
    """The same numbers and weights up to the order in which sums are taken."""
    assert [(row["stage"], row["step"], row.keys()) for row in found["metrics"]] == [
        (row["stage"], row["step"], row.keys()) for row in wanted["metrics"]
    ]
    for row, other in zip(found["metrics"], wanted["metrics"], strict=True):
        for name, value in row.items():
            if isinstance(value, float):
                # Adam's first steps have the size of the rate whatever the gradient, so a last bit shows.
                assert value == pytest.approx(other[name], rel=2e-3, abs=2e-4), (row["stage"], row["step"], name)
    assert found["tensors"].keys() == wanted["tensors"].keys()
    for name, tensor in found["tensors"].items():
        np.testing.assert_allclose(tensor, wanted["tensors"][name], rtol=1e-3, atol=tolerance, err_msg=name)
    assert [row["driving_score"] for row in found["per_scene"]] == pytest.approx(
        [row["driving_score"] for row in wanted["per_scene"]], abs=1e-4
    )
    assert [(row["scene_id"], row["seed"]) for row in found["per_scene"]] == [
        (row["scene_id"], row["seed"]) for row in wanted["per_scene"]
    ]


def back_to(directory, source, step):
    """A copy of a run as it stood when this checkpoint was the newest."""
    shutil.copytree(source, directory)
    for newer in CheckpointStore(directory / "checkpoints", 1).steps():
        if newer > step:
            shutil.rmtree(directory / "checkpoints" / f"step_{newer:08d}")
    (directory / "summary.json").unlink()


@pytest.fixture(scope="module")
def grpo(tmp_path_factory):
    """The same run by one process and by two: directories and results."""
    config, folder = configure({"type": "grpo", "kl_weight": 0.1}), tmp_path_factory.mktemp("grpo")
    return config, {size: (folder / str(size), train(config, folder / str(size), size)) for size in (1, 2)}


def test_two_processes_train_as_one(grpo):
    _, runs = grpo
    assert_alike(runs[2][1], runs[1][1])


def test_rank_0_writes_what_one_process_writes(grpo):
    _, runs = grpo
    ours = {".lock", "report.html", "state.json"}  # of the command, not of the run
    names = [
        {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - ours
        for folder, _ in runs.values()
    ]
    assert names[0] == names[1]
    summary = json.loads((runs[2][0] / "summary.json").read_text())
    assert summary["processes"] == 2


def test_a_run_of_two_goes_on_with_one(grpo, tmp_path):
    config, runs = grpo
    back_to(tmp_path / "run", runs[2][0], 5)
    assert_alike(train(config, tmp_path / "run", 1), runs[1][1])


@pytest.mark.slow  # 25 s of CPU
def test_sharded_weights_train_as_whole_ones_and_go_on_as_such(tmp_path):
    trainer = {"type": "ppo", "updates": 3, "value_first": 1, "micro_batch": 16, "warm_start": SFT | {"epochs": 2}}
    whole = configure(trainer, learner={"shard": "never"})
    sharded = configure(trainer, learner={"shard": "always"})
    wanted = train(whole, tmp_path / "whole", 1)
    assert_alike(train(sharded, tmp_path / "sharded", 2), wanted, tolerance=5e-5)
    # The checkpoint after the first update of two sharding processes serves one that does not.
    back_to(tmp_path / "again", tmp_path / "sharded", 4)
    assert_alike(train(sharded, tmp_path / "again", 1), wanted, tolerance=5e-5)


@pytest.mark.slow  # 70 s of CPU
def test_eight_processes_with_uneven_shares_train_as_one(tmp_path):
    # Eleven groups are shared as 1 or 2, nine expert drives likewise, and five of eight evaluate nothing.
    scenes = {"train_scenes": 9, "val_scenes": 9, "test_scenes": 3}
    rollout = {"slots": 8, "group_size": 3, "scenes_per_step": 11}
    config = configure({"type": "grpo", "updates": 3}, dataset=scenes, rollout=rollout)
    assert_alike(train(config, tmp_path / "eight", 8), train(config, tmp_path / "one", 1))


@pytest.mark.slow  # 45 s of CPU
def test_a_process_whose_drives_teach_nothing_takes_part_in_a_sharded_step(tmp_path):
    # A group each; 10, 0, 11, 11 decisions are worth a gradient, then 0, 11, 10, 11 and so on.
    trainer = {"type": "grpo", "updates": 4, "warm_start": None, "least_advantage": 1.2}
    rollout = {"slots": 8, "group_size": 3, "scenes_per_step": 4}
    sharded = configure(trainer, rollout=rollout, learner={"shard": "always"})
    whole = configure(trainer, rollout=rollout, learner={"shard": "never"})
    wanted = train(whole, tmp_path / "whole", 1)
    assert_alike(train(sharded, tmp_path / "sharded", 4), wanted, tolerance=5e-5)
    assert [row["decisions_kept"] for row in training_rows(tmp_path / "whole")] == [32.0, 32.0, 12.0, 22.0]


SHARES = """
    import json, sys
    sys.path.insert(0, sys.argv[1])
    import numpy as np, torch
    from test_grpo_maths import LinePolicy, step_data
    from alpagym_runtime.trainers.base import Observations
    from alpagym_runtime.trainers.grpo.config import GrpoConfig
    from alpagym_runtime.trainers.team import Team
    from alpagym_runtime.trainers.update import StepData, optimise

    team, found = Team.join("cpu"), []
    for cut in (3, 0, 11):
        policy = LinePolicy()
        data = step_data(policy)
        rows = np.arange(11)[:cut] if team.rank == 0 else np.arange(11)[cut:]
        part = StepData(data.observation.keep(rows), data.decisions.take(rows), data.advantage_B[rows], data.sampling)
        optimiser = torch.optim.SGD(policy.module.parameters(), lr=0.1)
        config = GrpoConfig(minibatch=4, epochs=2, gradient_clip=1.0, kl_stop=1e9, micro_batch=2)
        numbers = optimise(policy, optimiser, part, config, 5, None, None, team)
        found.append([numbers, [p.detach().tolist() for p in policy.module.parameters()]])
    if team.rank == 0:
        print(json.dumps(found))
    team.leave()
"""


def test_uneven_shares_give_the_gradient_of_the_unsplit_batch(tmp_path):
    # MTH-04: eleven decisions as 3 and 8, as 0 and 11, as 11 and 0; means of the processes' means would differ.
    import torch

    maths = Path(__file__).parents[1] / "packages" / "runtime" / "tests"
    sys.path.insert(0, str(maths))
    try:
        from test_grpo_maths import LinePolicy, step_data
    finally:
        sys.path.remove(str(maths))
    from alpagym_runtime.trainers.grpo.config import GrpoConfig
    from alpagym_runtime.trainers.update import optimise

    policy = LinePolicy()
    config = GrpoConfig(minibatch=4, epochs=2, gradient_clip=1.0, kl_stop=1e9)
    wanted = optimise(policy, torch.optim.SGD(policy.module.parameters(), lr=0.1), step_data(policy), config, 5)
    script = tmp_path / "shares.py"
    script.write_text(textwrap.dedent(SHARES))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(script), str(maths)]
    children = [
        subprocess.Popen(command, env=os.environ | shared | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    text, _ = (child.communicate(timeout=120)[0] for child in children)
    for numbers, weights in json.loads(text):
        for found, other in zip(weights, policy.module.parameters(), strict=True):
            np.testing.assert_allclose(found, other.detach().numpy(), atol=1e-12)
        assert numbers == pytest.approx(wanted, abs=1e-6)


@pytest.mark.slow  # 20 s of CPU
def test_a_signal_stops_all_after_the_step_in_hand(tmp_path):
    config = configure({"type": "grpo", "updates": 10_000, "warm_start": None})
    run_dir.create(config, "train", tmp_path / "run")
    processes = start(tmp_path / "run", 2)
    end = time.monotonic() + 100.0
    while len(training_rows(tmp_path / "run")) < 3 and time.monotonic() < end:
        time.sleep(0.1)
    processes[1].send_signal(signal.SIGTERM)  # one is enough
    codes = [(process.communicate(timeout=60), process.returncode)[1] for process in processes]
    assert codes == [143, 143]
    done = len(training_rows(tmp_path / "run"))
    assert CheckpointStore(tmp_path / "run" / "checkpoints", 1).steps()[-1] == done
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "stopped"


@pytest.mark.slow  # 25 s of CPU: torchrun itself imports torch once more
def test_the_command_starts_torchrun(tmp_path):
    config = configure({"type": "grpo", "updates": 1})
    run_dir.create(config, "train", tmp_path / "run")
    done = subprocess.run(command_line(2, tmp_path / "run"), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "completed"


@pytest.mark.slow  # 35 s of CPU
def test_a_team_in_a_job_script_of_ones_own_is_queued_again(tmp_path):
    deploy = {"kind": "local", "requeues": 1}
    config = configure(
        {"type": "grpo", "updates": 10_000, "warm_start": None}, topology={"processes": 2}, deploy=deploy
    )
    run_dir.create(config, "train", tmp_path / "run")
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$*" >>"{tmp_path}/told"\n')
    (tmp_path / "scontrol").chmod(0o755)
    job = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"}
    command = [sys.executable, "-m", "alpagym_host.cli", "resume", str(tmp_path / "run")]
    with subprocess.Popen(command, env=os.environ | job) as process:
        end = time.monotonic() + 200.0
        while len(training_rows(tmp_path / "run")) < 3 and time.monotonic() < end:
            time.sleep(0.1)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(100) == 138  # not torchrun's 1
    assert (tmp_path / "told").read_text() == "requeue 77\n"
    assert CheckpointStore(tmp_path / "run" / "checkpoints", 1).steps()[-1] == len(training_rows(tmp_path / "run"))


def test_it_says_how_it_is_started(tmp_path):
    config = configure({"type": "grpo"})
    run_dir.create(config, "train", tmp_path / "run")
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    command = [sys.executable, "-m", "alpagym_host.launch.torchrun", str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "torchrun --nproc-per-node N -m alpagym_host.launch.torchrun RUN_DIR" in done.stderr


# ---------------------------------------------------------------- adapters


def lora(**options):
    sections = {"learner": {"lora": {"rank": 2, "alpha": 4.0, "targets": ["trunk.*", "head"]} | options}}
    return configure({"type": "grpo", "updates": 3, "learning_rate": 0.01, "warm_start": None}, **sections)


def test_adapters_learn_and_checkpoints_hold_plain_weights(tmp_path):
    config = lora()
    results = train(config, tmp_path / "run", 1)
    plain = config.policy.config.build().module.state_dict()
    weights = load_weights(tmp_path / "run")
    assert weights.keys() == plain.keys()
    changed = {name for name, value in weights.items() if not bool((value == plain[name]).all())}
    assert changed == {"trunk.0.weight", "trunk.2.weight", "head.weight"}
    # The rank of what was learnt is that of the adapter.
    assert np.linalg.matrix_rank((weights["trunk.2.weight"] - plain["trunk.2.weight"]).numpy(), tol=1e-5) == 2
    # Evaluated from the checkpoint alone, without adapters, it drives as it did with them.
    plainly = configure({"type": "grpo"}, checkpoint={"path": str(tmp_path / "run")})
    run_dir.create(plainly, "evaluate", tmp_path / "evaluated")
    summary = Run(plainly, tmp_path / "evaluated").evaluate().summary
    score = summary["evaluations"]["final"]["driving_score"]["mean"]
    assert score == pytest.approx(results["summary"]["evaluations"]["final"]["driving_score"]["mean"], abs=1e-5)


def test_a_run_with_adapters_goes_on_to_the_same_bits(tmp_path):
    config = lora()
    wanted = train(config, tmp_path / "whole", 1)
    back_to(tmp_path / "again", tmp_path / "whole", 2)
    found = train(config, tmp_path / "again", 1)
    for name, tensor in found["tensors"].items():
        np.testing.assert_array_equal(tensor, wanted["tensors"][name], err_msg=name)


def test_a_target_without_a_layer_is_named(tmp_path):
    from alpagym_runtime.errors import ConfigError

    with pytest.raises(ConfigError, match=r"learner\.lora\.targets: matches no linear layer .*\['q_proj'\].*trunk\.0"):
        Run(lora(targets=["q_proj"]), tmp_path).train()
