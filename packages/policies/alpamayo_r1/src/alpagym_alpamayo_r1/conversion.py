"""Release to training and back, and trained weights to a directory that loads anywhere.

A conversion moves names in `config.json` and adds what a release leaves out (tokenizer, image processor, description of
the backbone); weights are linked, not copied, unless asked. An export joins trained shards with a base checkpoint. Both
check names and shapes before they write, verify what they wrote, and leave nothing behind where a check fails.
"""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from alpagym_alpamayo_r1.architecture import (
    LAYOUTS,
    TRAINING,
    Architecture,
    Layout,
    layout_of,
    load_architecture,
    read_architecture,
    read_config,
)
from alpagym_alpamayo_r1.checkpoints import (
    EMBEDDING,
    EXPERT_PARTS,
    HEAD,
    PROVENANCE,
    Findings,
    building,
    check_constants,
    check_tie,
    compare,
    holds_expert,
    is_constant,
    verify,
)
from alpagym_alpamayo_r1.processing import make_image_processor
from alpagym_alpamayo_r1.shards import (
    INDEX,
    SafetensorsSource,
    TensorInfo,
    listing,
    open_source,
    same_bits,
    sha256,
    shard_files,
    write_shards,
)
from alpagym_alpamayo_r1.targets import move_targets
from alpagym_alpamayo_r1.vocabulary import check_tokenizer, extend_tokenizer, load_tokenizer
from alpagym_plugins import ConfigError, check_choice
from alpagym_runtime.files import read_json, write_json

# Keys that a conversion to training adds to a config; the way back removes those that it added.
ADDED, VERSION = "alpagym_added", "alpamayo_version"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
# What is copied beside weights: data. Code and pickles that came along are left out, and named.
_COPIED = (".json", ".txt", ".jinja", ".md", ".yaml")
_COPIED_NAMES = ("LICENSE", "NOTICE", "README")
MAX_SHARD_BYTES = 4_000_000_000


def local_directory(name_or_path: str | Path) -> Path:
    """A local directory for a path, or for a hub name that is in the local cache already; nothing is fetched.

    Raises:
        ConfigError: it is neither.

    """
    path = Path(name_or_path)
    if path.is_dir():
        return path
    text = str(name_or_path)
    if text.count("/") == 1 and not text.startswith((".", "/", "~")):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        with contextlib.suppress(LocalEntryNotFoundError, HFValidationError):
            return Path(snapshot_download(text, local_files_only=True))
    raise ConfigError(
        f"{text!r} is no directory here, and the hub is never asked; download it first: "
        f"hf download {text} --local-dir DIR (gated models want an accepted licence)"
    )


def convert(
    source: Path,
    output: Path,
    to: str,
    *,
    backbone: Path | None = None,
    copy_weights: bool = False,
    overwrite: bool = False,
) -> Findings:
    """Write a checkpoint directory in another layout.

    Args:
        source: release (1, 1.5) or training directory.
        output: made anew; absent where a check fails.
        to: "training", "1" or "1.5".
        backbone: directory with the backbone's tokenizer, where the source has none.
        copy_weights: copy the shards in place of symbolic links to them.
        overwrite: replace an existing checkpoint.

    Raises:
        ConfigError: names the key of the config, the option, or the target that is unknown.
        CorruptFileError: names tensors that are missing, extra or swapped.

    """
    check_choice("to", to, LAYOUTS)
    target = LAYOUTS[to]
    config = read_config(source)
    architecture = load_architecture(source)
    weights = SafetensorsSource(source)
    with contextlib.closing(weights):
        with_expert = holds_expert(weights.infos, architecture)
        problems = compare(weights.infos, architecture, with_expert=with_expert or target is not TRAINING)
        problems += check_tie(weights, architecture) + check_constants(weights, architecture)
        Findings(source, architecture.layout.name, problems=problems).check()
        where = {name: info.file for name, info in weights.infos.items()}
        total = sum(info.bytes for info in weights.infos.values())
    moved = moved_config(config, target, architecture)
    final = read_architecture(moved)
    with building(output, overwrite=overwrite) as folder:
        write_json(folder / "config.json", moved)
        for file in sorted(set(where.values())):
            if copy_weights:
                shutil.copyfile(source / file, folder / file)
            else:
                (folder / file).symlink_to((source / file).resolve())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
        _write_words(source, folder, final, backbone, needed=target is TRAINING)
        left_out = _copy_rest(source, folder)
        write_json(
            folder / PROVENANCE,
            {
                "made_by": _made_by("convert"),
                "source": str(source.resolve()),
                "from": architecture.layout.name,
                "to": to,
                "left_out": left_out,
            },
        )
        found = verify(folder, read_all=False)
        found.check()
    found.directory = output
    return found


def moved_config(config: Mapping[str, Any], target: Layout, architecture: Architecture) -> dict[str, Any]:
    """A config in another layout; back and forth gives the first one again."""
    before = layout_of(config)
    moved = move_targets(copy.deepcopy(dict(config)), target.family)
    moved |= {"model_type": target.model_type, "architectures": [target.architecture]}
    if target is TRAINING and before is not TRAINING:
        added = {VERSION: before.name, "vlm_config": copy.deepcopy(architecture.vlm)}
        new = [key for key in added if key not in config]
        moved |= {key: added[key] for key in new}
        moved[ADDED] = new
    elif target is not TRAINING:
        for key in moved.pop(ADDED, []):
            moved.pop(key, None)
    return moved


def export(
    trained: Path,
    base: Path,
    output: Path,
    *,
    vlm_only: bool = False,
    allow_extra: tuple[str, ...] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    step: int | None = None,
    run_id: str | None = None,
) -> Findings:
    """Write trained weights as a Hugging Face directory with provenance.

    Names in the trained files may carry a trainer's wrappers; one that begins with `model.` or `lm_head.` is the
    backbone's. Action-expert weights that were not trained come from the base, so that nothing stays random.

    Args:
        trained: folder of `model_rank_<r>.pth`, a checkpoint folder of ours, or a safetensors file.
        base: converted checkpoint that training started from: config, words, and the expert.
        output: made anew; absent where a check fails.
        vlm_only: write the backbone alone; its config then says so by being a training one.
        allow_extra: names in the trained files to leave out; any other unknown one is an error.
        max_shard_bytes: of an output file.
        overwrite: replace an existing checkpoint.
        step: for the provenance; None takes it from the path, where that says so.
        run_id: likewise.

    Raises:
        ConfigError: the base or the request is wrong.
        CorruptFileError: names tensors that are missing, extra, of another shape, or of swapped files.

    """
    architecture = load_architecture(base)
    if vlm_only and architecture.layout is not TRAINING:
        raise ConfigError("needs a training base (alpagym checkpoint convert --to training)", key="vlm_only")
    new, old = open_source(_weights_place(trained)), SafetensorsSource(base)
    with contextlib.closing(new), contextlib.closing(old):
        names = {_vlm_name(name): name for name in new.infos}
        if len(names) != len(new.infos):
            raise ConfigError(f"{trained} has two tensors for one name")
        infos = {full: new.infos[name] for full, name in names.items() if full not in allow_extra}
        from_base: list[str] = []
        if not vlm_only:
            parts = [part for part in EXPERT_PARTS if not any(name.startswith(part) for name in infos)]
            from_base = [name for name in old.infos if name.startswith(tuple(parts))] if parts else []
        elif any(name.startswith(EXPERT_PARTS) for name in infos):
            infos = {name: info for name, info in infos.items() if not name.startswith(EXPERT_PARTS)}
        with_expert = bool(from_base) or holds_expert(infos, architecture)
        everything = {**infos, **{name: old.infos[name] for name in from_base}}
        problems = compare(everything, architecture, with_expert=with_expert, allow_extra=allow_extra)
        problems += check_constants(old, architecture)
        Findings(trained, architecture.layout.name, problems=problems).check()

        def tensor(name: str) -> Tensor:
            return new.tensor(names[name]) if name in infos else old.tensor(name)

        if architecture.tied and HEAD in everything:
            if not same_bits(tensor(HEAD), tensor(EMBEDDING)):
                problem = f"{HEAD} and {EMBEDDING} are tied by the config, but differ"
                Findings(trained, architecture.layout.name, problems=[problem]).check()
            del everything[HEAD]
        for name in [name for name in everything if is_constant(name)]:
            del everything[name]
        # In the base's order, so that two exports of one run are laid out alike.
        order = {name: index for index, name in enumerate(old.infos)}
        everything = dict(sorted(everything.items(), key=lambda item: order.get(item[0], len(order))))
        with building(output, overwrite=overwrite) as folder:
            where = write_shards(folder, everything, tensor, max_shard_bytes)
            shutil.copyfile(base / "config.json", folder / "config.json")
            left_out = _copy_rest(base, folder, words=True)
            found_step, found_run = _where_from(trained)
            write_json(
                folder / PROVENANCE,
                {
                    "made_by": _made_by("export"),
                    "trained": str(trained.resolve()),
                    "base": str(base.resolve()),
                    "base_model": _base_name(base, architecture),
                    "step": found_step if step is None else step,
                    "run_id": found_run if run_id is None else run_id,
                    "trained_tensors": sum(name in infos for name in everything),
                    "from_base": sorted(from_base),
                    "ignored": sorted(allow_extra),
                    "left_out": left_out,
                    "sha256": {file: sha256(folder / file) for file in [*sorted(set(where.values())), INDEX]},
                },
            )
            found = verify(folder, read_all=False)
            found.check()
            _compare_written(folder, everything, tensor)
    found.directory = output
    return found


# ---------------------------------------------------------------- parts


def _write_words(
    source: Path, folder: Path, architecture: Architecture, backbone: Path | None, *, needed: bool
) -> None:
    """Tokenizer and image processor."""
    if (source / "tokenizer_config.json").is_file():
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        check_tokenizer(load_tokenizer(folder), architecture)
    elif backbone is not None:
        extend_tokenizer(load_tokenizer(backbone), architecture).save_pretrained(folder)
    elif needed:
        raise ConfigError(
            f"{source} has no tokenizer; give the backbone's directory: --vlm-name-or-path DIR "
            f"(it names {architecture.raw.get('vlm_name_or_path')!r})"
        )
    if (source / "preprocessor_config.json").is_file():
        shutil.copyfile(source / "preprocessor_config.json", folder / "preprocessor_config.json")
    elif needed:
        make_image_processor(architecture).save_pretrained(folder)


def _copy_rest(source: Path, folder: Path, *, words: bool = False) -> list[str]:
    """Copy the data files that are not there yet; names of what was left out."""
    left_out = []
    for path in sorted(source.iterdir()):
        skipped = path.name in ("config.json", INDEX, PROVENANCE) or bool(shard_files([path.name]))
        if skipped or (path.name in TOKENIZER_FILES and not words) or (folder / path.name).exists():
            continue
        wanted = path.suffix in _COPIED or path.name.partition(".")[0] in _COPIED_NAMES
        if wanted and path.is_file() and not path.name.startswith("."):
            shutil.copyfile(path, folder / path.name)
        else:
            left_out.append(path.name)
    return left_out


def _weights_place(trained: Path) -> Path:
    """Where the weights of a training checkpoint lie: itself, its `policy` folder, or a run's newest step."""
    if (trained / "policy").is_dir():
        return trained / "policy"
    if (trained / "checkpoints").is_dir():
        steps = sorted(p for p in (trained / "checkpoints").glob("step_*") if p.name[5:].isdigit())
        if not steps:
            raise ConfigError(f"{trained} has no checkpoint yet")
        return _weights_place(max(steps, key=lambda p: int(p.name[5:])))
    if not trained.exists():
        raise ConfigError(f"{trained} does not exist")
    return trained


def _vlm_name(name: str) -> str:
    return f"vlm.{name}" if name.startswith(("model.", "lm_head.")) else name


def _where_from(trained: Path) -> tuple[int | None, str | None]:
    """Step and run that a path names, such as …/<run>/checkpoints/step_100/policy."""
    resolved = _weights_place(trained).resolve()
    for path in (resolved, *resolved.parents):
        if path.name.startswith("step_") and path.name[5:].isdigit():
            run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
            return int(path.name[5:]), run.name
    return None, None


def _base_name(base: Path, architecture: Architecture) -> str:
    stored = read_json(base / PROVENANCE) if (base / PROVENANCE).is_file() else {}
    name = Path(stored.get("source", base)).name if isinstance(stored, dict) else base.name
    version = architecture.raw.get(VERSION, architecture.layout.name)
    return f"{name} (Alpamayo {version})"


def _compare_written(folder: Path, infos: Mapping[str, TensorInfo], tensor: Any) -> None:
    written = SafetensorsSource(folder)
    with contextlib.closing(written):
        differ = [name for name in infos if not same_bits(written.tensor(name), tensor(name))]
    Findings(folder, "export", problems=[f"written otherwise than read: {listing(differ)}"] if differ else []).check()


def _made_by(command: str) -> str:
    from importlib.metadata import version

    return f"alpagym checkpoint {command} ({version('alpagym-alpamayo-r1')})"
