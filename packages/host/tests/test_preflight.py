import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from alpagym_host.compose import compose
from alpagym_host.preflight import PreflightError, describe, preflight, require
from alpagym_plugins import ConfigError, Problem
from alpagym_runtime.machine import Machine

SMOKE = ("experiment=alpamayo_1_5_local_2gpu_smoke", "reward=progress_safety")


def found(*overrides, command="train"):
    return {problem.key: problem for problem in preflight(compose(overrides), command, Machine())}


def checkpoint(folder, trainable=1000, frozen=100):
    """A checkpoint of two tensors, as one file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    tensors = {"vlm.model.weight": np.zeros(trainable, np.float16), "expert.weight": np.zeros(frozen, np.float16)}
    save_file(tensors, folder / "model.safetensors")
    return folder


# ---------------------------------------------------------------- the seed's quick start


def test_the_quick_start_names_exactly_what_is_missing(tmp_path):
    (tmp_path / "tools").mkdir()
    # Redis, git and uv are there; GPUs and Docker are not.
    for name in ("redis-server", "git", "uv"):
        (tmp_path / "tools" / name).write_text("#!/bin/sh\n")
        (tmp_path / "tools" / name).chmod(0o755)
    missing = tmp_path / "tmp" / "checkpoints" / "alpamayo"
    words = (*SMOKE, f"policy.model.path={missing}")
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "alpagym_host.cli", *words],
        cwd=tmp_path,
        env=os.environ | {"PATH": str(tmp_path / "tools"), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    seconds = time.perf_counter() - begun
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert seconds < 30  # 2 s of an idle core, and the machine may be busy
    lines = done.stderr.splitlines()
    assert lines[0] == "error: 4 things stand in the way of this run; nothing was started"
    keys = [line[4:] for line in lines if re.match(r"^ ?\d+  ", line)]
    assert keys == [
        f"policy.model.path = {missing}",
        "simulator.address = ''",
        "trainer = cosmos",
        "topology.gpus_per_node = 2",
    ]
    said = " ".join(done.stderr.split())
    assert "does not exist" in said
    assert "docker is not on PATH" in said
    assert "needs cosmos-rl 0.4.7, and cosmos-rl is not installed → uv sync --all-packages --extra cosmos" in said
    assert "2 GPUs needed (1 policy + 1 rollout), 0 found: nvidia-smi is not on PATH" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tools"]


def test_with_everything_there_only_the_extra_is_missing(good_tools, tmp_path):
    problems = found(*SMOKE, f"policy.model.path={checkpoint(tmp_path / 'model')}")
    assert list(problems) == ["trainer"]


def test_the_trainer_itself_names_the_missing_extra(good_tools):
    with pytest.raises(ConfigError, match="trainer: .*uv sync --all-packages --extra cosmos"):
        compose(["trainer=cosmos"]).trainer.config.build(None)


def test_the_default_run_has_no_problem(tools):
    assert found() == {}


def test_preflight_of_any_experiment_imports_no_torch(tmp_path):
    code = (
        "import sys\nfrom alpagym_host.compose import compose\nfrom alpagym_host.preflight import preflight\n"
        "from alpagym_runtime.machine import Machine\n"
        "for name in ('local_2gpu_smoke', 'clrl_test_run', 'slurm_template'):\n"
        "    preflight(compose([f'experiment=alpamayo_1_5_{name}']), 'train', Machine())\n"
        "print(sorted({'torch', 'transformers', 'grpc', 'wandb'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


# ---------------------------------------------------------------- first principles


def test_too_few_gpus_say_needed_and_found(good_tools, tmp_path):
    good_tools("nvidia-smi", "echo '0, GPU-0a, NVIDIA H200, 143771, 570.1'")
    problem = found(*SMOKE)["topology.gpus_per_node"]
    # 143771 MiB = 150.8 GB
    assert problem.message == "2 GPUs needed (1 policy + 1 rollout), 1 found (NVIDIA H200, 151 GB)"
    assert "topology=local_colocated_1gpu" in problem.remedy
    assert "topology.gpus_per_node" not in found(*SMOKE, "topology=local_colocated_1gpu")


def test_cuda_visible_devices_counts(good_tools, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert "1 found" in found(*SMOKE)["topology.gpus_per_node"].message
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES='' hides the others" in found(*SMOKE)["topology.gpus_per_node"].message


def test_a_topology_smaller_than_its_roles_is_named():
    problem = found(*SMOKE, "cosmos.rollout.parallelism.n_init_replicas=3")["topology.gpus_per_node"]
    assert "4 GPUs needed for policy and rollouts; 1 nodes × (2 - 0 of AlpaSim) = 2 planned" in problem.message


def test_gpus_that_nothing_uses_are_named():
    problem = found("topology=local_colocated_1gpu")["topology.gpus_per_node"]
    assert problem.message == "no part of this run uses a GPU (simulator=embedded, trainer=grpo)"


def test_a_model_that_does_not_fit_says_how_much_it_needs(good_tools, tmp_path):
    good_tools("nvidia-smi", "printf '0, GPU-0a, Tiny, 1, 570.1\\n1, GPU-1a, Tiny, 1, 570.1\\n'")
    path = checkpoint(tmp_path / "model", trainable=200_000, frozen=50_000)
    problems = found(*SMOKE, f"policy.model.path={path}")
    # float32: (4 · 200,000 + 50,000) · 4 bytes = 3.4 MB on a GPU of 1.05 MB; a rollout's 250,000 · 4 = 1 MB fit.
    problem = problems["cosmos.policy.parallelism.dp_shard_size"]
    assert "need at least 0.0 GB on each policy GPU" in problem.message
    assert "cosmos.rollout.parallelism.dp_shard_size" not in problems
    # Over four GPUs: 0.85 MB each, and every parameter once more for the rollouts, 1 MB.
    assert compose(SMOKE).cosmos.gpu_bytes(200_000, 50_000) == (3_400_000, 1_000_000)
    four = compose([*SMOKE, "cosmos.policy.parallelism.dp_shard_size=4"])
    assert four.cosmos.gpu_bytes(200_000, 50_000) == (1_850_000, 1_000_000)


def test_a_batch_that_does_not_divide_names_the_next_one_that_does():
    problem = found(*SMOKE, "cosmos.train.train_batch_per_replica=10", "cosmos.train.train_policy.mini_batch=4")[
        "cosmos.train.train_batch_per_replica"
    ]
    assert "1 × 4 = 4" in problem.message
    assert problem.remedy == "cosmos.train.train_batch_per_replica=12"


def test_colocated_roles_need_equal_shares():
    problem = found(*SMOKE, "topology=local_colocated_1gpu", "cosmos.policy.parallelism.dp_shard_size=2")
    assert "both need the same parallelism" in problem["cosmos.rollout.parallelism"].message


def test_roles_of_their_own_on_one_gpu_share_its_memory(good_tools):
    shared = "topology=local_colocated_separated_1gpu"
    # As in disaggregated mode 3.4 and 1.0 MB, but on one GPU.
    assert compose([*SMOKE, shared]).cosmos.gpu_bytes(200_000, 50_000) == (4_400_000, 1_000_000)
    words = ("trainer=cosmos", "rollout.group_size=8", "cosmos.train.train_batch_per_replica=8", shared)
    assert set(found(*words, "topology.gpus_per_node=1")) <= {"trainer"}
    # No GPU is in NCCL twice; over gloo the same transport works.
    assert found(*words, "transport=nccl")["transport.backend"].remedy == "transport.backend=gloo"
    assert set(found(*words, "transport=nccl", "transport.backend=gloo")) <= {"trainer"}
    more = found(*words, "cosmos.rollout.parallelism.n_init_replicas=2")
    assert "as many rollouts as policy replicas" in more["cosmos.rollout.parallelism.n_init_replicas"].message
    several = found(*words, "deploy=slurm", "deploy.slurm.partition=gpu", "topology.train_nodes=2")
    assert "GPUs of their own" in several["cosmos.mode"].message


def test_pictures_that_memory_cannot_hold_say_how_many_groups_it_can(monkeypatch):
    monkeypatch.setattr(Machine, "memory_bytes", 10_000_000_000)
    words = ("policy=alpamayo_tiny", "policy.cameras=[front_wide_120fov]", "policy.height=320", "policy.width=576")
    problem = found(*words, "rollout.scenes_per_step=100", "rollout.group_size=10", "expected_valid_steps=36")
    # 1000 episodes × (36 + 4) frames × 320 · 576 · 3 bytes = 22.1 GB; 10 GB hold 45 of 100 groups.
    assert "1000 episodes × 40 frames × 0.55 MB of pictures = 22.1 GB" in problem["rollout.scenes_per_step"].message
    assert problem["rollout.scenes_per_step"].remedy == "rollout.scenes_per_step=45"
    assert found("rollout.scenes_per_step=100") == {}


def test_datasets_stores_and_checkpoints_that_are_not_there_are_named_together(tmp_path):
    words = ("dataset=commonroad", "dataset.path=absent", "trainer=sft", "trainer.store=gone", "checkpoint.path=lost")
    assert list(found(*words)) == ["trainer.store", "dataset.path", "checkpoint.path"]
    words = ("dataset=commonroad", f"dataset.path={tmp_path}", "trainer.warm_start.store=gone")
    assert list(found(*words)) == ["trainer.warm_start.store"]


def test_an_unused_trainer_is_not_asked():
    assert found("trainer=cosmos", command="evaluate") == {}
    assert found("trainer=cosmos", "transport=nccl", command="evaluate") == {}  # this process drives alone


def test_a_suite_needs_an_alpasim_of_the_runs_own(good_tools, tmp_path):
    assert "only AlpaSim has test suites" in found("dataset.test_suite_id=x")["dataset.test_suite_id"].message
    base = (*SMOKE, "simulator.address=127.0.0.1:50051")
    assert "simulator.address" not in found(*base)
    problem = found(*base, "dataset.scene_ids=null", "dataset.test_suite_id=x")["dataset.test_suite_id"]
    assert "was started with its scenes" in problem.message
    assert "needs to know its scenes" in found(*SMOKE, "dataset.scene_ids=null")["dataset.scene_ids"].message
    with pytest.raises(ConfigError, match=r"dataset.test_suite_id: and scene_ids exclude each other"):
        compose([*SMOKE, "dataset.test_suite_id=x"])


@pytest.mark.parametrize(
    ("script", "message", "remedy"),
    [
        ("echo 'permission denied while trying to connect' >&2; exit 1", "refuses this user", "usermod -aG docker"),
        ("echo 'Cannot connect to the Docker daemon' >&2; exit 1", "daemon does not answer", "systemctl start docker"),
        ('[ "$1" = version ] && echo 28 || exit 1', "has no Compose plugin", "docker-compose-plugin"),
    ],
)
def test_docker_says_what_is_wrong_with_it(good_tools, script, message, remedy):
    good_tools("docker", script)
    problem = found(*SMOKE)["simulator.address"]
    assert message in problem.message
    assert remedy in problem.remedy


def test_a_tool_that_hangs_is_left_after_its_time(good_tools):
    good_tools("docker", "exec /bin/sleep 30")
    begun = time.perf_counter()
    trouble = Machine(timeout_s=0.5).docker_trouble
    assert time.perf_counter() - begun < 10
    assert "did not answer within 0.5 s" in trouble.message


def test_a_checkout_that_is_none_is_named(good_tools, tmp_path):
    assert "is no checkout" in found(*SMOKE, f"alpasim.repo_path={tmp_path}")["alpasim.repo_path"].message
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "src").mkdir()
    assert "alpasim.repo_path" not in found(*SMOKE, f"alpasim.repo_path={tmp_path}")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "lacks weights: model.safetensors"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("["), "cannot be read"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {f"a{i}": f"model-{i}.safetensors" for i in range(5)}})
            ),
            "lacks weights: model-0.safetensors, model-1.safetensors, model-2.safetensors and 2 more",
        ),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_named(good_tools, tmp_path, break_it, message):
    folder = checkpoint(tmp_path / "model")
    break_it(folder)
    assert message in found(*SMOKE, f"policy.model.path={folder}")["policy.model.path"].message


def test_templates_list_every_placeholder_that_is_left(tools):
    problems = found("experiment=alpamayo_1_5_slurm_template")
    left = [key for key, problem in problems.items() if "placeholder" in problem.message]
    assert {"run.root", "deploy.slurm.partition", "deploy.slurm.account", "deploy.slurm.container_image"} <= set(left)
    assert "alpasim.wizard_args.deploy" in left
    filled = found("experiment=alpamayo_1_5_slurm_template", "deploy.slurm.partition=gpu")
    assert "deploy.slurm.partition" not in filled
    assert not Path("YOUR_SHARED_FOLDER").exists()


# ---------------------------------------------------------------- who drives


def test_what_only_workers_do_is_refused_without_them(tools):
    problems = found("trainer.on_policy=false", "rollout.device=cuda")
    assert problems["trainer.on_policy"].remedy == "rollout.workers=2, or trainer.on_policy=true"
    assert problems["rollout.device"].remedy == "rollout.workers=2"
    assert not {"trainer.on_policy"} & found("trainer.on_policy=false", "rollout.workers=2").keys()


def test_workers_on_gpus_need_one(tools):
    assert "1 rollout workers" in found("rollout.device=cuda", "rollout.workers=2")["topology.gpus_per_node"].message


def test_ray_needs_workers_and_ray(tools, monkeypatch):
    monkeypatch.setattr(Machine, "version", lambda self, name: None)
    problems = found("deploy=ray")
    assert problems["rollout.workers"].message == "Ray drives with at least one worker"
    assert problems["deploy.kind"].remedy == "uv sync --extra ray"
    assert "rollout.workers" not in found("deploy=ray", "rollout.workers=1")


# ---------------------------------------------------------------- the list


def test_the_list_shows_key_value_message_and_remedy_and_wraps_the_message_only():
    long = "word " * 30
    text = describe([Problem("a.b", None, long, "do " * 60), Problem("c", "", "short", "x")], width=60)
    lines = text.splitlines()
    assert lines[0] == "2 things stand in the way of this run; nothing was started"
    assert lines[2] == " 1  a.b = null"
    assert max(len(line) for line in lines if "word" in line) <= 60
    assert f"    → {'do ' * 60}" in text
    assert " 2  c = ''" in lines


def test_require_raises_all_of_it():
    with pytest.raises(PreflightError) as caught:
        require(compose(["dataset=commonroad", "dataset.path=absent", "checkpoint.path=lost"]), "train")
    assert [problem.key for problem in caught.value.problems] == ["dataset.path", "checkpoint.path"]


def test_several_wrong_values_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        compose(["run.seed=-1", "rollout.slots=0", "rewrad=x", "expected_valid_steps=0", "policy.hid=3"])
    text = str(caught.value)
    assert text.startswith("5 values are wrong:\n")
    for part in (
        "run.seed: must",
        "rollout.slots: must",
        "rewrad: unknown key; did you mean reward?",
        "policy.hid: unknown key",
    ):
        assert part in text


# ---------------------------------------------------------------- several processes


@pytest.mark.parametrize(
    ("words", "key", "remedy"),
    [
        (["rollout.scenes_per_step=1"], "rollout.scenes_per_step", "rollout.scenes_per_step=2"),
        (["trainer=cosmos"], "topology.processes", "topology.processes=1"),
        (["learner.device=cuda", "topology=local_colocated_1gpu"], "topology.gpus_per_node", "topology=…"),
    ],
)
def test_a_team_that_cannot_be_is_named(words, key, remedy):
    assert remedy in found("policy=waypoint_actors", *words, "topology.processes=2")[key].remedy


@pytest.mark.parametrize(
    ("words", "key", "says", "remedy"),
    [
        (["rollout.scenes_per_step=7"], "rollout.scenes_per_step", "8 processes", "rollout.scenes_per_step=8"),
        (
            ["dataset.train_scenes=2"],
            "trainer.warm_start.drives_per_scene",
            "2 scenes × 3 are 6",
            "trainer.warm_start.drives_per_scene=4, or topology.processes=6",
        ),
        (["dataset.val_scenes=7"], "dataset.val_scenes", "7 scenes", "dataset.val_scenes=8"),
        (
            ["trainer.warm_start.validation_scenes=5"],
            "trainer.warm_start.validation_scenes",
            "5 scenes",
            "trainer.warm_start.validation_scenes=8",
        ),
        (["trainer=sft", "dataset.val_scenes=3"], "dataset.val_scenes", "3 scenes", "or trainer.patience=0"),
        (["dataset.val_scenes=3", "trainer.warm_start.patience=0"], None, "", ""),
        (["dataset.val_scenes=3", "trainer.warm_start=null"], None, "", ""),
    ],
)
def test_work_that_eight_processes_cannot_share_is_named_with_numbers(words, key, says, remedy):
    problems = found("policy=waypoint_actors", "rollout.scenes_per_step=32", *words, "topology.processes=8")
    assert list(problems) == ([] if key is None else [key])
    if key is not None:
        assert says in problems[key].message
        assert remedy in problems[key].remedy


def test_a_team_on_cpus_needs_nothing():
    assert not found("policy=waypoint_actors", "topology.processes=2")


# ---------------------------------------------------------------- room on a GPU


def released_sizes(folder):
    """The config of a checkpoint of 1.5's size, and the headers of its language model's linear layers; no weights."""
    from alpagym_alpamayo_r1.tiny import TinySize, make_config, make_tokenizer
    from alpagym_alpamayo_r1.vocabulary import MARKERS_1_5

    config = make_config(make_tokenizer(MARKERS_1_5, 4000), TinySize())
    del config["vlm_config"]
    config |= {"vlm_name_or_path": "nvidia/Cosmos-Reason2-8B", "vocab_size": 155_697, "model_dtype": "bfloat16"}
    config |= {"expert_cfg": {"hidden_size": 2048, "intermediate_size": 6144}}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"self_attn.q_proj": (4096, 4096), "self_attn.k_proj": (1024, 4096), "self_attn.v_proj": (1024, 4096),
              "self_attn.o_proj": (4096, 4096), "mlp.gate_proj": (12288, 4096), "mlp.up_proj": (12288, 4096),
              "mlp.down_proj": (4096, 12288)}  # fmt: skip
    header, end = {}, 0
    for layer in range(36):
        for name, (rows, columns) in shapes.items():
            begin, end = end, end + 2 * rows * columns
            key = f"vlm.model.language_model.layers.{layer}.{name}.weight"
            header[key] = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)  # a hole: no block of it is on the disk
    return folder


def test_closed_loop_training_is_planned_for_80_gb(good_tools, tmp_path):
    words = ("experiment=alpamayo_1_5_clrl_test_run", f"policy.model.path={released_sizes(tmp_path / 'model')}")
    good_tools("nvidia-smi", "echo '0, GPU-0a, NVIDIA H100 80GB HBM3, 81559, 570.1'")
    assert found(*words) == {}
    # Four decisions at a time keep four times the activations of one, 24 GB each.
    message = found(*words, "trainer.micro_batch=4")["policy.rows"].message
    assert re.search(r"the run needs 1\d\d\.\d GB of a GPU \(weights 2\d\.\d, .*\); the smallest has 85\.5 GB", message)
    # All weights in place of adapters: gradients and two moments of 8.8 billion in bfloat16 are 53 GB more.
    assert "gradients and moments 5" in found(*words, "learner.lora=null")["policy.rows"].message
    good_tools("nvidia-smi", "echo '0, GPU-0a, NVIDIA A100-SXM4-40GB, 40960, 570.1'")
    assert "the smallest has 42.9 GB" in found(*words)["policy.rows"].message


# ---------------------------------------------------------------- Cosmos-RL


def test_cosmos_carries_episodes_through_nccl_between_two_workers(good_tools):
    words = ("trainer.type=cosmos", "rollout.group_size=8", "cosmos.train.train_batch_per_replica=16", "transport=nccl")
    gpus = ("topology.gpus_per_node=2",)
    assert set(found(*words, *gpus)) <= {"trainer"}  # the extra may be missing
    # No two GPUs, no NCCL.
    assert "memory" in found(*words, "cosmos.mode=colocated")["transport"].remedy
    assert found(*words, "cosmos.device=cpu")["transport.backend"].remedy == "transport.backend=gloo"
    for role in ("policy", "rollout"):
        key = f"cosmos.{role}.parallelism.n_init_replicas"
        assert found(*words, f"{key}=2")[key].remedy == "transport=disk"
    # (1 step ahead + 1) × 512 + a batch of 1 group of 8.
    message = found(*words, *gpus, "cosmos.train.train_batch_per_replica=512")
    assert "are 1032" in message["cosmos.train.train_batch_per_replica"].message


def test_what_cosmos_has_under_way_through_nccl_fits_its_room(good_tools):
    words = ("trainer.type=cosmos", "rollout.group_size=8", "cosmos.train.train_batch_per_replica=16", "transport=nccl")
    gpus, pictures = ("topology.gpus_per_node=2",), ("policy=fake_vla",)
    # (1 step ahead + 1) × 16 + a batch of 1 group of 8 = 40 episodes × (35 + 1) frames × 2 × 320 × 512 × 3 bytes.
    problem = found(*words, *gpus, *pictures, "transport.limit_mb=1415")["transport.limit_mb"]
    assert "40 episodes × 36 frames × 0.98 MB of pictures = 1.42 GB" in problem.message
    assert problem.remedy == "transport.limit_mb=1416, transport=disk, or smaller batches"
    assert "transport.limit_mb" not in found(*words, *gpus, *pictures, "transport.limit_mb=1416")


def test_cosmos_names_what_its_workers_cannot_do(good_tools):
    words = ("trainer.type=cosmos", "rollout.group_size=8", "cosmos.device=cpu")
    assert set(found(*words)) <= {"trainer"}  # the extra may be missing
    assert found(*words, "transport=shared_memory")["transport"].remedy == "transport=disk"
    key = "cosmos.rollout.parallelism.dp_shard_size"
    assert "more of n_init_replicas" in found(*words, f"{key}=2")[key].remedy
    key = "cosmos.policy.parallelism.dp_shard_size"
    two = ("topology.gpus_per_node=3", "cosmos.train.train_batch_per_replica=16", f"{key}=2")
    assert key not in found(*words, *two)
    # 10 episodes a step are not whole groups of 8; 16 are.
    problem = found(*words, "cosmos.train.train_batch_per_replica=10")["cosmos.train.train_batch_per_replica"]
    assert "10 × 1 policy replicas = 10 episodes" in problem.message
    assert problem.remedy == "cosmos.train.train_batch_per_replica=16"
    # 12 × 2 = 24 are three groups.
    two = "cosmos.policy.parallelism.n_init_replicas=2"
    assert "cosmos.train.train_batch_per_replica" not in found(*words, two, "cosmos.train.train_batch_per_replica=12")
