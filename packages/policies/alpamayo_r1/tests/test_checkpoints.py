"""Conversion, export and loading, bit for bit, and everything that must be refused (fault MTH-09)."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from alpagym_alpamayo_r1.architecture import LAYOUTS
from alpagym_alpamayo_r1.checkpoints import HEAD, PROVENANCE, load_model, verify
from alpagym_alpamayo_r1.conversion import convert, export, local_directory
from alpagym_alpamayo_r1.processing import Processor
from alpagym_alpamayo_r1.prompt import LAYOUTS as PROMPTS
from alpagym_alpamayo_r1.shards import INDEX, parse_size, same_bits
from alpagym_alpamayo_r1.tiny import TinySize, make_tiny, save_tiny
from alpagym_alpamayo_r1.tiny import example_drive as drive
from alpagym_plugins import ConfigError
from alpagym_runtime.errors import CorruptFileError

SMALL = TinySize(future_bins=300, history_bins=100)


def state_of(directory):
    return {k: v for file in sorted(directory.glob("*.safetensors")) for k, v in load_file(file).items()}


def assert_same_state(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not same_bits(one[name], other[name])] == []


def names_in(folder):
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def ranks(tmp_path):
    """write(state, world) -> a folder of real DTensor shards, as a sharded trainer leaves them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def write(state, world, folder="policy"):
        place = tmp_path / folder
        place.mkdir(parents=True)
        for rank in range(world):
            dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
            mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
            local = {}
            for name, value in state.items():
                if value.ndim == 0:
                    local[name] = value
                    continue
                if value.ndim == 1:
                    part, placement = value, Replicate()
                else:
                    parts = value.chunk(world, 0)
                    part = parts[rank].clone() if rank < len(parts) else value[:0].clone()
                    placement = Shard(0)
                local[name] = DTensor.from_local(
                    part, mesh, [placement], run_check=False, shape=value.shape, stride=value.stride()
                )
            torch.save(local, place / f"model_rank_{rank}.pth")
            dist.destroy_process_group()
        return place

    return write


# ---------------------------------------------------------------- conversion


@pytest.mark.parametrize("version", ["1", "1.5"])
def test_release_to_training_and_back_is_the_same(release, version, tmp_path):
    convert(release[version], tmp_path / "training", "training")
    convert(tmp_path / "training", tmp_path / "back", version)
    before = json.loads((release[version] / "config.json").read_text())
    trained = json.loads((tmp_path / "training" / "config.json").read_text())
    assert (trained["model_type"], trained["architectures"]) == ("alpamayo_reasoning_vla", ["ReasoningVLA"])
    assert trained["action_in_proj_cfg"]["_target_"].startswith("alpamayo_r1.models.")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == before
    assert_same_state(state_of(tmp_path / "back"), state_of(release[version]))


@pytest.mark.parametrize(("version", "other"), [("1", "1.5"), ("1.5", "1")])
def test_one_release_as_the_other(release, version, other, tmp_path):
    convert(release[version], tmp_path / "other", other)
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    assert config["model_type"] == LAYOUTS[other].model_type
    assert config["diffusion_cfg"]["_target_"].startswith(f"{LAYOUTS[other].family}.")
    convert(tmp_path / "other", tmp_path / "back", version)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (release[version] / "config.json").read_text()
    )


def test_a_release_without_words_gets_the_backbones(release, tmp_path):
    model, processor = make_tiny(SMALL)
    bare, backbone = tmp_path / "bare", tmp_path / "backbone"
    save_tiny(bare, model, processor)
    for name in names_in(bare):
        if name.startswith(("tokenizer", "special", "added", "vocab", "merges", "preprocessor", "chat")):
            (bare / name).unlink()
    with pytest.raises(ConfigError, match="--vlm-name-or-path"):
        convert(bare, tmp_path / "out", "training")
    assert not (tmp_path / "out").exists()
    # The backbone's own tokenizer: base words only.
    from alpagym_alpamayo_r1.tiny import make_tokenizer

    make_tokenizer((), 0).save_pretrained(backbone)
    convert(bare, tmp_path / "out", "training", backbone=backbone)
    made = Processor.load(tmp_path / "out", load_model(tmp_path / "out").architecture)
    assert made.tokenizer.get_vocab() == processor.tokenizer.get_vocab()


def test_conversion_reads_a_whole_prompt(training, tiny):
    model, processor = tiny
    loaded = load_model(training)
    again = Processor.load(training, loaded.architecture)
    batch = processor.encode([drive()], PROMPTS["sft"], generate=False)
    same = again.encode([drive()], PROMPTS["sft"], generate=False)
    assert torch.equal(batch.input_ids, same.input_ids)
    with torch.no_grad():
        assert torch.equal(model(batch), loaded(same))


def test_code_and_pickles_are_left_out(release, tmp_path):
    source = tmp_path / "release"
    shutil.copytree(release["1.5"], source)
    (source / "modeling_custom.py").write_text("raise SystemExit")
    (source / "pytorch_model.bin").write_bytes(b"x")
    convert(source, tmp_path / "out", "training")
    assert not names_in(tmp_path / "out") & {"modeling_custom.py", "pytorch_model.bin"}
    provenance = json.loads((tmp_path / "out" / PROVENANCE).read_text())
    assert provenance["left_out"] == ["modeling_custom.py", "pytorch_model.bin"]


def test_an_unknown_target_is_refused_with_its_key(release, tmp_path):
    source = tmp_path / "release"
    shutil.copytree(release["1.5"], source)
    config = json.loads((source / "config.json").read_text())
    config["diffusion_cfg"]["_target_"] = "os.system"
    (source / "config.json").write_text(json.dumps(config))
    for act in (lambda: load_model(source), lambda: convert(source, tmp_path / "out", "training")):
        with pytest.raises(ConfigError, match="diffusion_cfg._target_.*'os.system' is unknown"):
            act()
    assert not (tmp_path / "out").exists()


def test_existing_output_is_kept(release, tmp_path):
    output = tmp_path / "out"
    convert(release["1.5"], output, "training")
    with pytest.raises(ConfigError, match="--overwrite"):
        convert(release["1.5"], output, "training")
    convert(release["1.5"], output, "training", overwrite=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="is no checkpoint"):
        convert(release["1.5"], tmp_path / "home", "training", overwrite=True)
    assert names_in(tmp_path / "home") == {"letter.txt"}
    assert names_in(tmp_path) == {"out", "home"}


def test_a_hub_name_is_never_fetched():
    with pytest.raises(ConfigError, match="hf download nvidia/Alpamayo-1.5-10B"):
        local_directory("nvidia/Alpamayo-1.5-10B")


# ---------------------------------------------------------------- damage


def damaged(release, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(release["1.5"], folder)
    return folder, sorted(folder.glob("*.safetensors"))


def change(file, edit):
    state = load_file(file)
    edit(state)
    save_file(state, file)


def everything_refuses(folder, tmp_path, match):
    for act in (
        lambda: verify(folder).check(),
        lambda: load_model(folder),
        lambda: convert(folder, tmp_path / "out", "training"),
        lambda: export(folder, folder, tmp_path / "out"),
    ):
        with pytest.raises(CorruptFileError, match=match):
            act()
    assert names_in(tmp_path) == {folder.name}


def test_a_missing_shard(release, tmp_path):
    folder, files = damaged(release, tmp_path)
    lost = sorted(load_file(files[1]))
    files[1].unlink()
    everything_refuses(folder, tmp_path, f"lacks {files[1].name}.*{lost[0]}")


def test_a_cut_shard(release, tmp_path):
    folder, files = damaged(release, tmp_path)
    files[1].write_bytes(files[1].read_bytes()[:-100])
    everything_refuses(folder, tmp_path, f"{files[1].name} .* is not whole")


def test_swapped_shards(release, tmp_path):
    folder, files = damaged(release, tmp_path)
    files[0].rename(folder / "x")
    files[1].rename(files[0])
    (folder / "x").rename(files[1])
    everything_refuses(folder, tmp_path, "in another shard than the index says")


def test_a_key_that_is_missing(release, tmp_path):
    folder, _files = damaged(release, tmp_path)
    index = json.loads((folder / INDEX).read_text())
    name = "action_out_proj.bias"
    change(folder / index["weight_map"][name], lambda state: state.pop(name))
    everything_refuses(folder, tmp_path, f"in the index but in no shard: {name}")
    del index["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(index))
    everything_refuses(folder, tmp_path, f"1 missing: {name}")


def test_a_key_that_is_extra(release, tmp_path):
    folder, files = damaged(release, tmp_path)
    change(files[0], lambda state: state.update({"vlm.backdoor": torch.zeros(3)}))
    everything_refuses(folder, tmp_path, "in a shard but not in the index: vlm.backdoor")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["vlm.backdoor"] = files[0].name
    (folder / INDEX).write_text(json.dumps(index))
    everything_refuses(folder, tmp_path, "1 that the config does not know: vlm.backdoor")


def test_a_shape_that_differs(release, tmp_path):
    folder, _files = damaged(release, tmp_path)
    where = json.loads((folder / INDEX).read_text())["weight_map"]["action_out_proj.bias"]
    change(folder / where, lambda state: state.update({"action_out_proj.bias": torch.zeros(7)}))
    everything_refuses(folder, tmp_path, r"action_out_proj.bias \[7\] in place of \[2\]")


def test_numbers_that_are_not_finite(release, tmp_path):
    folder, _files = damaged(release, tmp_path)
    where = json.loads((folder / INDEX).read_text())["weight_map"]["action_out_proj.bias"]
    change(folder / where, lambda state: state["action_out_proj.bias"].fill_(float("nan")))
    with pytest.raises(CorruptFileError, match="not finite: action_out_proj.bias"):
        verify(folder).check()


def test_an_index_that_leaves_its_folder(release, tmp_path):
    folder, _files = damaged(release, tmp_path)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["action_out_proj.bias"] = "../secret.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    everything_refuses(folder, tmp_path, "is no plain file name")


def test_constants_may_be_stored_and_must_agree(release, tmp_path):
    folder, files = damaged(release, tmp_path)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["action_space.accel_std"] = files[0].name
    (folder / INDEX).write_text(json.dumps(index))
    change(files[0], lambda state: state.update({"action_space.accel_std": torch.tensor(0.6810).bfloat16()}))
    load_model(folder)
    change(files[0], lambda state: state.update({"action_space.accel_std": torch.tensor(0.5).bfloat16()}))
    everything_refuses(folder, tmp_path, "accel_std is 0.5, the config says 0.681")


# ---------------------------------------------------------------- export


def mixed(model):
    """A trained state: every number changed, one matrix in bfloat16."""
    torch.manual_seed(3)
    state = {k: v + 0.01 * torch.randn_like(v) for k, v in model.state_dict().items() if k.startswith("vlm.")}
    name = "vlm.model.language_model.layers.0.mlp.up_proj.weight"
    state[name] = state[name].bfloat16()
    return state


@pytest.mark.parametrize("world", [1, 2, 4])
def test_sharded_weights_come_back_bit_for_bit(training, tiny, ranks, world, tmp_path):
    model, _processor = tiny
    state = mixed(model)
    place = ranks({f"reasoning_vla.{k}": v for k, v in state.items()}, world, "alpha/checkpoints/step_70/policy")
    export(place, training, tmp_path / "out", max_shard_bytes=500_000)
    written = state_of(tmp_path / "out")
    expert = {k: v for k, v in model.state_dict().items() if not k.startswith("vlm.")}
    assert_same_state(written, state | expert)
    loaded = load_model(tmp_path / "out")
    assert_same_state(dict(loaded.state_dict()), state | expert)
    provenance = json.loads((tmp_path / "out" / PROVENANCE).read_text())
    assert (provenance["step"], provenance["run_id"]) == (70, "alpha")
    assert "Alpamayo 1.5" in provenance["base_model"]
    assert sorted(provenance["from_base"]) == sorted(expert)
    verify(tmp_path / "out").check()
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def test_export_gives_the_trained_models_output(training, tiny, tmp_path):
    _, processor = tiny
    model = load_model(training)
    with torch.no_grad():
        for value in model.vlm.parameters():
            value.add_(0.01)
    run = tmp_path / "run" / "checkpoints"
    for step in (9, 10):
        (run / f"step_{step:08d}").mkdir(parents=True)
        save_file(dict(model.state_dict()), run / f"step_{step:08d}" / "model.safetensors")
    export(tmp_path / "run", training, tmp_path / "out")
    batch = processor.encode([drive()], PROMPTS["sft"], generate=True)
    with torch.no_grad():
        assert torch.equal(model(batch), load_model(tmp_path / "out")(batch))
    assert json.loads((tmp_path / "out" / PROVENANCE).read_text())["step"] == 10


def test_backbone_alone(training, tiny, ranks, tmp_path):
    state = mixed(tiny[0])
    export(ranks(state, 2), training, tmp_path / "out", vlm_only=True)
    assert state_of(tmp_path / "out").keys() == state.keys()
    assert not load_model(tmp_path / "out").with_expert
    with pytest.raises(ConfigError, match="holds the backbone only"):
        load_model(tmp_path / "out", with_expert=True)
    with pytest.raises(CorruptFileError, match="missing: action_in_proj"):
        convert(tmp_path / "out", tmp_path / "release", "1.5")
    assert not (tmp_path / "release").exists()


def test_tied_weights_stay_tied(ranks, tmp_path):
    model, processor = make_tiny(TinySize(future_bins=300, history_bins=100, tied=True))
    save_tiny(tmp_path / "release", model, processor)
    convert(tmp_path / "release", tmp_path / "training", "training")
    state = dict(model.state_dict())
    assert HEAD in state
    export(ranks(state, 2), tmp_path / "training", tmp_path / "out")
    assert HEAD not in state_of(tmp_path / "out")
    loaded = load_model(tmp_path / "out")
    assert loaded.vlm.lm_head.weight is loaded.vlm.model.language_model.embed_tokens.weight
    assert_same_state(dict(loaded.state_dict()), state)
    untied = state | {HEAD: state[HEAD] + 1}
    with pytest.raises(CorruptFileError, match="are tied by the config, but differ"):
        export(ranks(untied, 2, "untied"), tmp_path / "training", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_swapped_and_missing_ranks(training, tiny, ranks, tmp_path):
    place = ranks(mixed(tiny[0]), 4)
    files = [place / f"model_rank_{rank}.pth" for rank in range(4)]
    files[1].rename(place / "x")
    files[2].rename(files[1])
    (place / "x").rename(files[2])
    with pytest.raises(CorruptFileError, match="files swapped.*vlm.lm_head.weight"):
        export(place, training, tmp_path / "out")
    files[1].unlink()
    with pytest.raises(CorruptFileError, match=r"lacks the files of ranks \[1\]"):
        export(place, training, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_trained_keys_that_are_missing_or_extra(training, tiny, ranks, tmp_path):
    state = mixed(tiny[0])
    less = {k: v for k, v in state.items() if k != HEAD}
    with pytest.raises(CorruptFileError, match=f"1 missing: {HEAD}"):
        export(ranks(less, 2, "less"), training, tmp_path / "out")
    more = state | {"value_head.weight": torch.zeros(2, 2)}
    place = ranks(more, 2, "more")
    with pytest.raises(CorruptFileError, match="1 that the config does not know: value_head.weight"):
        export(place, training, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export(place, training, tmp_path / "out", allow_extra=("value_head.weight",))
    assert "value_head.weight" not in state_of(tmp_path / "out")


def test_replicas_that_differ(training, tiny, ranks, tmp_path):
    state = mixed(tiny[0])
    place, other = ranks(state, 2), ranks({k: v + 1 for k, v in state.items()}, 2, "other")
    shutil.copy(other / "model_rank_1.pth", place / "model_rank_1.pth")
    with pytest.raises(CorruptFileError, match="replicated, but the ranks hold different values"):
        export(place, training, tmp_path / "out")
    assert names_in(tmp_path) == {"policy", "other"}


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_pickle_that_runs_code_is_not_run(training, tmp_path):
    place = tmp_path / "policy"
    place.mkdir()
    torch.save({"vlm.x": Payload(tmp_path / "marker")}, place / "model_rank_0.pth")
    with pytest.raises(CorruptFileError, match="nothing else is loaded"):
        export(place, training, tmp_path / "out")
    assert names_in(tmp_path) == {"policy"}


def test_changed_bytes_are_seen_by_verify(training, tiny, ranks, tmp_path):
    export(ranks(mixed(tiny[0]), 2), training, tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "not the bytes" in verify(tmp_path / "out", read_all=False).problems[0]


def test_verify_against_another(release, training, tiny, ranks, tmp_path):
    assert verify(training, against=release["1.5"]).problems == []
    state = dict(tiny[0].state_dict())
    state["vlm.model.visual.pos_embed.weight"] = state["vlm.model.visual.pos_embed.weight"] * 2
    export(ranks(state, 2), training, tmp_path / "out")
    assert verify(tmp_path / "out", against=training).problems == [
        f"1 differ from {training}: vlm.model.visual.pos_embed.weight"
    ]


@pytest.mark.parametrize(
    ("text", "size"), [("4GB", 4_000_000_000), ("1GiB", 1 << 30), ("500MB", 500_000_000), ("77", 77)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


def test_a_wrong_size_names_the_option():
    with pytest.raises(ConfigError, match="max_shard_size"):
        parse_size("four")
