"""The commands `alpagym pai …`: get the PhysicalAI-AV dataset, look at it, check it, or make a synthetic one.

`download` and `curate` take the flags of the published scripts, lists of several words included; `setup` asks what the
published skills ask.
"""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from alpagym_plugins import ConfigError

pai = typer.Typer(
    help="The PhysicalAI-AV dataset: set a flow up, download, curate, check, show; make a synthetic one.",
    no_args_is_help=True,
)

LISTS = ("--chunk-ids", "--camera", "--calibration", "--labels", "--lidar", "--radar", "--reasoning", "--chunk", "-c")
CHUNKS = "0 | 0-3 (end excluded) | 0 1 5"


class _Lists(typer.core.TyperCommand):
    """Options of several words, as the published scripts have: `--camera A B` is `--camera A --camera B`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args))


def spread(args: list[str]) -> list[str]:
    """Arguments with the name of a list repeated before each of its words."""
    out: list[str] = []
    name = ""
    for word in args:
        if word.startswith("-"):
            name = word if word in LISTS else ""
            if not name:
                out.append(word)
        elif name:
            out += [name, word]
        else:
            out.append(word)
    return out


class Flow(StrEnum):
    """Which open-loop flow."""

    RL = "rl"
    SFT = "sft"


class TextKey(StrEnum):
    """Under which key an event's text stands; both have been seen."""

    COT = "cot"
    COC = "coc"


Names = list[str] | None
Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A tree or a hub cache.", show_default=False)]


@pai.command(cls=_Lists)
def download(
    output_dir: Annotated[Path, typer.Option(help="The tree.", metavar="DIR", show_default=False)],
    chunk_ids: Annotated[Names, typer.Option(help=f"{CHUNKS}; none: all.", metavar="CHUNKS")] = None,
    camera: Annotated[Names, typer.Option(help="Camera features.", metavar="NAMES")] = None,
    calibration: Annotated[Names, typer.Option(help="Calibration features.", metavar="NAMES")] = None,
    labels: Annotated[Names, typer.Option(help="Label features, such as egomotion.", metavar="NAMES")] = None,
    lidar: Annotated[Names, typer.Option(metavar="NAMES")] = None,
    radar: Annotated[Names, typer.Option(metavar="NAMES")] = None,
    reasoning: Annotated[Names, typer.Option(help="Files such as ood_reasoning.parquet.", metavar="FILES")] = None,
    only_reasoning_chunks: Annotated[bool, typer.Option("--only-reasoning-chunks")] = False,
    num_reasoning_clips: Annotated[
        int, typer.Option(help="Sample so many clips with reasoning, and write their index.", min=0)
    ] = 0,
    random_seed: Annotated[int, typer.Option(help="Of that sample.")] = 11,
    revision: Annotated[str, typer.Option(help="Of the dataset.")] = "main",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would take, fetch the small tables only.")
    ] = False,
) -> None:
    """Fetch a part of the dataset; what is there already stays, and it must fit on the disk before it begins."""
    from alpagym_runtime.simulators.pai.config import parse_chunks
    from alpagym_runtime.simulators.pai.download import DownloadChoice, HuggingFaceHub, carry_out, plan_download

    groups = (camera, calibration, labels, lidar, radar)
    choice = DownloadChoice(
        parse_chunks(chunk_ids, "chunk_ids"),
        [name for group in groups for name in group or ()],
        list(reasoning or ()),
        only_reasoning_chunks,
        num_reasoning_clips,
        random_seed,
    )
    hub = HuggingFaceHub(revision)
    plan = plan_download(hub, output_dir, choice)
    print(
        f"{len(plan.files)} files of {len(plan.chunks)} chunks: {plan.missing_bytes / 1e9:.2f} GB to fetch, "
        f"{plan.free_bytes / 1e9:.1f} GB free" + (f"; {len(plan.clips)} clips" if plan.clips else "")
    )
    if not dry_run:
        carry_out(hub, output_dir, plan)


@pai.command(cls=_Lists)
def curate(
    clip_index_path: Annotated[Path, typer.Option("--clip-index-path", "-p", metavar="FILE", show_default=False)],
    output_path: Annotated[Path, typer.Option("--output-path", "-o", metavar="FILE", show_default=False)],
    chunk: Annotated[Names, typer.Option("--chunk", "-c", help=f"{CHUNKS}; none: all.", metavar="CHUNKS")] = None,
    num_samples: Annotated[int, typer.Option("--num-samples", "-n", help="Clips; 0: all that are left.", min=0)] = 0,
    only_reasoning_chunks: Annotated[
        bool, typer.Option("--only-reasoning-chunks", help="Only clips with usable reasoning.")
    ] = False,
    ood_reasoning_path: Annotated[
        Path | None, typer.Option(help="Its table; default: beside the index.", metavar="FILE")
    ] = None,
    random_seed: Annotated[int, typer.Option(help="Of the sample.")] = 11,
) -> None:
    """Write an index of some clips of another one."""
    from alpagym_runtime.simulators.pai.config import parse_chunks
    from alpagym_runtime.simulators.pai.download import curate as write_index

    table = None
    if only_reasoning_chunks:
        table = ood_reasoning_path or clip_index_path.parent / "reasoning/ood_reasoning.parquet"
        if not table.is_file():
            raise ConfigError(f"{table} does not exist; give --ood-reasoning-path", key="ood_reasoning_path")
    chosen = write_index(clip_index_path, output_path, num_samples, parse_chunks(chunk, "chunk"), table, random_seed)
    print(f"{output_path}: {len(chosen)} clips")


@pai.command(cls=_Lists)
def check(
    path: Directory,
    camera: Annotated[Names, typer.Option(help="Camera features; default: all there are.", metavar="NAMES")] = None,
    clip_index: Annotated[str, typer.Option(help="Relative to DIR.")] = "clip_index.parquet",
    chunk_ids: Annotated[Names, typer.Option(help=f"{CHUNKS}; none: all.", metavar="CHUNKS")] = None,
    reasoning: Annotated[Names, typer.Option(help="Its table, relative to DIR: key frames are its events.")] = None,
    decode: Annotated[bool, typer.Option("--decode", help="Also decode the pictures at each key frame.")] = False,
) -> None:
    """Open every file that the samples need; leaves with 1 and a line a problem if something is wrong."""
    from alpagym_runtime.simulators.pai.clips import PaiDataset
    from alpagym_runtime.simulators.pai.download import check_tree

    data = PaiDataset(_section(path, clip_index, chunk_ids, reasoning))
    splits, counts = [], {}
    for split in ("train", "val", "test"):
        try:
            counts[split] = len(data.samples(split))
            splits.append(split)
        except ConfigError as err:
            print(f"{split}: {err}", file=sys.stderr)
    problems = check_tree(data, splits, camera or list(data.tree.cameras), decode)
    for text in problems:
        print(text)
    listed = ", ".join(f"{split} {count}" for split, count in counts.items()) or "no samples"
    print(f"{data.tree.root}: {listed}; {len(problems)} problems", file=sys.stderr)
    data.close()
    if problems or not splits:
        raise typer.Exit(1)


@pai.command(cls=_Lists)
def show(
    path: Directory,
    clip: Annotated[str, typer.Argument(metavar="CLIP", help="CLIP, or CLIP@MICROSECONDS.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="A PNG.", metavar="FILE")] = Path("clip.png"),
    camera: Annotated[Names, typer.Option(help="Camera features; default: all there are.", metavar="NAMES")] = None,
    frames: Annotated[int, typer.Option(help="Of each camera, 0.1 s apart, the last at the key frame.", min=1)] = 4,
    width: Annotated[int, typer.Option(help="Of one picture, px.", min=64, max=1920)] = 480,
    clip_index: Annotated[str, typer.Option(help="Relative to DIR.")] = "clip_index.parquet",
    reasoning: Annotated[Names, typer.Option(help="Its table, relative to DIR: key frames are its events.")] = None,
) -> None:
    """Draw a contact sheet of a clip: its cameras' frames with the driven path in each; its facts go to stdout."""
    import cv2

    from alpagym_runtime.files import write_atomic
    from alpagym_runtime.simulators.pai.clips import PaiDataset
    from alpagym_runtime.simulators.pai.contact_sheet import contact_sheet
    from alpagym_runtime.simulators.pai.samples import Layout, read_motion

    data = PaiDataset(_section(path, clip_index, None, reasoning))
    sample = data.find(clip)
    layout = Layout(dict.fromkeys(camera or data.tree.cameras, (0, 0)), frames)
    sheet = contact_sheet(data.tree, sample, layout, width)
    motion = read_motion(data.tree, sample, layout)
    write_atomic(out, cv2.imencode(".png", sheet[..., ::-1])[1].tobytes())
    speed = motion.dynamics_rig[0]
    facts = {"clip_id": sample.clip_id, "chunk": sample.chunk, "split": sample.split, "t0_us": sample.t0_us}
    facts |= {"cot": sample.cot, "event_cluster": sample.cluster, "speed_mps": round(float(speed), 3)}
    print(json.dumps(facts, ensure_ascii=False))
    print(out)
    data.close()


def _section(path: Path, clip_index: str, chunk_ids: Names, reasoning: Names) -> Any:
    from alpagym_runtime.run_config import DatasetSection

    table = reasoning[0] if reasoning else None
    return DatasetSection(
        source="pai",
        path=str(path),
        clip_index=clip_index,
        chunk_ids=chunk_ids,
        reasoning=table,
        key_frame="events" if table else "default",
        skip_bad=bool(table),
    )


@pai.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def setup(
    context: typer.Context,
    flow: Annotated[Flow, typer.Argument(help="rl: GRPO of the language model; sft: the two stages.")],
    out: Annotated[Path, typer.Option("--out", help="Where the experiments go.", metavar="DIR")] = Path("pai_setup"),
    ask: Annotated[bool, typer.Option("--ask/--no-ask", help="Ask for what no flag or variable answers.")] = True,
) -> None:
    """Ask what an open-loop flow needs (flags: --reward joint --clips 16 …), write its experiments and its commands.

    Each question's flag and variable of the environment are shown with it; `--no-ask` lists those without an answer.
    """
    import os

    from alpagym_host import pai_setup

    if "--questions" in context.args:
        for question in pai_setup.FLOWS[flow.value]:
            default = "" if question.default is None else f", default {question.default or 'none'}"
            print(f"--{question.name:14} ${question.variable}: {question.text}{default}")
        return
    someone = _answer_to if ask and sys.stdin.isatty() else None
    answers = pai_setup.answer(flow.value, _flags(context.args), os.environ, someone)
    made = pai_setup.write(flow.value, answers, out)
    print("\n".join(pai_setup.steps(flow.value, answers, out.expanduser().absolute())))
    print("\n".join(f"# written: {path}" for path in made), file=sys.stderr)


def _flags(arguments: list[str]) -> dict[str, str]:
    """`--name value` and `--name=value` as a mapping."""
    out: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        name, joined, value = rest.pop(0).partition("=")
        if not name.startswith("--") or (not joined and not rest):
            raise ConfigError("must be --name value", key=name)
        out[name.removeprefix("--")] = value if joined else rest.pop(0)
    return out


def _answer_to(question: Any) -> str | None:
    """What the user types; empty takes the default."""
    hint = f" [{'/'.join(question.choices)}]" if question.choices else ""
    prompt = f"{question.text}{hint} (--{question.name}, ${question.variable})"
    answer: str = typer.prompt(prompt, default=question.default or "", show_default=bool(question.default))
    return answer


@pai.command("make-synthetic", cls=_Lists)
def make_synthetic(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.", show_default=False)],
    hf_cache: Annotated[
        Path | None, typer.Option("--hf-cache", help="Also lay it out as a hub cache here.", metavar="DIR")
    ] = None,
    chunks: Annotated[str, typer.Option(help="3 | 0-3 (end excluded) | '0 1 5'; train and val by turns.")] = "0-2",
    clips_per_chunk: Annotated[int, typer.Option(min=1, max=100)] = 3,
    camera: Annotated[Names, typer.Option(help="Camera features; default: four.", metavar="NAMES")] = None,
    width: Annotated[int, typer.Option(help="Of the pictures, px.", min=64, max=3840)] = 320,
    height: Annotated[int, typer.Option(help="Of the pictures, px.", min=36, max=2160)] = 180,
    seed: Annotated[int, typer.Option(help="Of everything.", min=0)] = 0,
    event_text_key: Annotated[TextKey, typer.Option(help="Key of the reasoning's text.")] = TextKey.COT,
    gop: Annotated[int, typer.Option(help="Frames from one key frame to the next.", min=1, max=602)] = 30,
    obstacles: Annotated[bool, typer.Option(help="Labels of other road users too.")] = True,
) -> None:
    """Write a small tree in the dataset's layout: nothing of it comes from the dataset."""
    from alpagym_runtime.simulators.pai.config import parse_chunks
    from alpagym_runtime.simulators.pai.synthetic import DEFAULT_CAMERAS, SyntheticFlags, lay_out_hub_cache, make_tree

    flags = SyntheticFlags(
        chunks=parse_chunks(chunks, "chunks") or (),
        clips_per_chunk=clips_per_chunk,
        cameras=tuple(camera or DEFAULT_CAMERAS),
        width=width,
        height=height,
        seed=seed,
        event_text_key=event_text_key.value,
        gop=gop,
        obstacles=obstacles,
    )
    print(json.dumps(make_tree(out, flags)))
    if hf_cache is not None:
        print(lay_out_hub_cache(out, hf_cache))
