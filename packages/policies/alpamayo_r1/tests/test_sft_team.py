"""Two nodes that meet by torchrun's rendezvous, one process each, weights spread over both (gloo on a CPU)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from alpagym_runtime.testing.pai import shared_tree

FEW = ("data.camera_features=[camera_front_wide_120fov]", "data.num_frames=1", "trainer.dataloader_num_workers=0")


def start(node: int, nodes: int, port: int, *overrides: str) -> subprocess.Popen[str]:
    meet = [f"--nnodes={nodes}", f"--node-rank={node}", "--nproc-per-node=1", "--rdzv-id=sft", "--rdzv-backend=c10d"]
    command = [*meet, f"--rdzv-endpoint=localhost:{port}", "-m", "alpagym_alpamayo_r1.train"]
    command += ["--config-name", "sft_stage1", *FEW, "trainer.bf16=false", "trainer.max_steps=2", *overrides]
    command += ["trainer.warmup_steps=1", "trainer.learning_rate=1e-3", "data.train_dataset.chunk_ids=0-1"]
    command += [f"data.val_dataset.local_dir={shared_tree()}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def end_of(children: list[subprocess.Popen[str]]) -> tuple[list[int], str]:
    said = [child.communicate(timeout=240)[0] for child in children]
    return [child.returncode for child in children], "\n".join(said)


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("localhost", 0))
        return int(bound.getsockname()[1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_nodes_take_the_steps_of_one(training, tmp_path):
    same = (f"model.checkpoint_path={training}", f"data.train_dataset.local_dir={shared_tree()}")
    alone = (*same, f"paths.output_dir={tmp_path / 'one'}", "trainer.gradient_accumulation_steps=2")
    both = (
        *same,
        f"paths.output_dir={tmp_path / 'two'}",
        "trainer.gradient_accumulation_steps=1",
        "trainer.fsdp=always",
    )
    codes, said = end_of([start(0, 1, free_port(), *alone)])
    assert codes == [0], said
    port = free_port()
    codes, said = end_of([start(node, 2, port, *both) for node in (0, 1)])
    assert codes == [0, 0], said
    # Two forwards a step, in one process or one in each of two: the same samples, sums in another order.
    one, two = (load_file(tmp_path / name / "checkpoint-2" / "model.safetensors") for name in ("one", "two"))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-5
    assert any(not torch.equal(one[name], value) for name, value in load_file(training / shard(training)).items())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_node_without_the_dataset_is_named_on_all(training, tmp_path):
    folders = (str(shared_tree()), str(tmp_path / "nowhere"))
    port = free_port()
    children = [
        start(
            node,
            2,
            port,
            f"model.checkpoint_path={training}",
            f"data.train_dataset.local_dir={folder}",
            f"paths.output_dir={tmp_path / 'out'}",
        )
        for node, folder in enumerate(folders)
    ]
    codes, said = end_of(children)
    assert 0 not in codes
    assert said.count("data.train_dataset.local_dir=") >= 2
    assert f"has no data.train_dataset.local_dir={tmp_path / 'nowhere'}" in said
    assert not (tmp_path / "out").exists()


def shard(folder) -> str:
    return next(path.name for path in sorted(folder.glob("model-*.safetensors")))
