"""From a few answers to experiment files and the commands of a whole open-loop flow: what `alpagym pai setup` does.

A question is answered by a flag, else by a variable of the environment (those of the published skills), else by the
user, else by its default. What has no default and no answer is listed, and nothing is written. Secrets are never asked
for and never written: `WANDB_API_KEY` and `HF_TOKEN` stay in the environment.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from alpagym_plugins import ConfigError, nearest
from alpagym_runtime.files import write_atomic
from alpagym_runtime.simulators.pai.config import parse_chunks

Answers = dict[str, str]
CAMERAS = ("front_wide_120fov", "cross_left_120fov", "cross_right_120fov", "front_tele_30fov")
RELEASES = {"1": "nvidia/Alpamayo-R1-10B", "1.5": "nvidia/Alpamayo-1.5-10B"}
TRUE = ("yes", "y", "true", "1")


@dataclass(frozen=True)
class Question:
    """One answer that is needed.

    Attributes:
        name: of the flag, `--name`.
        text: as it is asked.
        variable: of the environment.
        default: None where nothing is safe to assume.
        choices: empty for free text.
        when: whether it is asked, by the answers so far.

    """

    name: str
    text: str
    variable: str = ""
    default: str | None = None
    choices: tuple[str, ...] = ()
    when: Callable[[Answers], bool] = field(default=lambda answers: True)


def _is(name: str, *values: str) -> Callable[[Answers], bool]:
    return lambda answers: answers.get(name) in values


WANDB = (
    Question("wandb", "Log to W&B?", "USE_WANDB", "no", ("yes", "no")),
    Question("wandb-team", "W&B team (entity)", "WANDB_TEAM", "", when=_is("wandb", "yes")),
)
RL = (
    Question("version", "Alpamayo version", "ALPAMAYO_VERSION", "1.5", ("1", "1.5")),
    Question("reward", "Reward: motion (ADE and comfort) or joint (reasoning too)", "REWARD_MODE", "motion",
             ("motion", "joint")),
    Question("chunks", "PAI chunks to download", "CHUNK_IDS", "3116", when=_is("reward", "motion")),
    Question("clips", "Clips to curate", "NUM_CURATED_CLIPS", "16", when=_is("reward", "motion")),
    Question("clips", "Clips with reasoning to sample", "NUM_REASONING_CLIPS", "16", when=_is("reward", "joint")),
    *WANDB,
    Question("wandb-project", "W&B project", "WANDB_PROJECT", "Alpamayo_RL", when=_is("wandb", "yes")),
    Question("wandb-name", "W&B run name", "WANDB_EXPERIMENT", "ReasoningVLA_Post_Training", when=_is("wandb", "yes")),
    Question("compute", "One node (local) or several (cluster)", "COMPUTE_SHAPE", "local", ("local", "cluster")),
    Question("judge", "Folder of Lingo-Judge", "LINGO_JUDGE_DIR", when=_is("reward", "joint")),
    Question("model", "Folder of the converted checkpoint", "ALPAMAYO_MODEL_DIR"),
    Question("data", "Folder of the dataset", "ALPAMAYO_PAI_LOCAL_DIR", when=_is("reward", "motion")),
    Question("data", "Folder of the dataset", "ALPAMAYO_PAI_REASONING_LOCAL_DIR", when=_is("reward", "joint")),
    Question("output", "Folder of the training run", "TRAIN_OUTPUT_DIR"),
    Question("logs", "Folder of the log of training; empty: none", "ALPAMAYO_LOG_DIR", ""),
)  # fmt: skip
SFT = (
    Question("version", "Alpamayo version", "ALPAMAYO_VERSION", "1", ("1", "1.5")),
    Question("chunks", "PAI chunks to download, such as 0-10 (end excluded)", "CHUNK_RANGE"),
    Question("train-chunks", "… of these for training", "TRAIN_CHUNKS", ""),
    Question("val-chunks", "… and for validation", "VAL_CHUNKS", ""),
    Question("coc", "Learn recorded reasoning (CoC) in stage 1?", "ENABLE_COC", "no", ("yes", "no")),
    Question("clips", "Clips with reasoning to sample", "NUM_REASONING_CLIPS", "16", when=_is("coc", "yes")),
    *WANDB,
    Question("wandb-project", "W&B project", "WANDB_PROJECT", "alpamayo_sft", when=_is("wandb", "yes")),
    Question("stages", "Which stages", "STAGES", "both", ("stage1", "stage2", "both", "eval")),
    Question("data", "Folder of the dataset", "PAI_DIR"),
    Question("model", "Folder of the converted checkpoint", "CKPT_DIR"),
    Question("stage1", "Checkpoint of stage 1", "STAGE1_CKPT", when=_is("stages", "stage2", "eval")),
    Question("stage2", "Checkpoint of stage 2", "STAGE2_CKPT", when=_is("stages", "eval")),
    Question("compute", "One node (local) or several (cluster)", "COMPUTE_SHAPE", "local", ("local", "cluster")),
    Question("output", "Folder of the training runs", "TRAIN_OUTPUT_DIR"),
)
FLOWS = {"rl": RL, "sft": SFT}


def answer(
    flow: str,
    flags: Mapping[str, str],
    environment: Mapping[str, str],
    ask: Callable[[Question], str | None] | None = None,
) -> Answers:
    """Answers to a flow's questions.

    Args:
        flow: rl | sft.
        flags: by name; they win.
        environment: variables of the published skills.
        ask: asks the user; None where nobody is there.

    Raises:
        ConfigError: an unknown flag, a value that is none of the choices, or questions without an answer.

    """
    questions = FLOWS[flow]
    known = {question.name for question in questions}
    for name in flags:
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean --{near}?" if near else f"there are: {', '.join(f'--{n}' for n in sorted(known))}"
            raise ConfigError(f"no such flag of the flow {flow}; {hint}", key=f"--{name}")
    found: Answers = {}
    lacking = []
    for question in questions:
        if not question.when(found):
            continue
        value = flags.get(question.name) or environment.get(question.variable)
        if not value and ask is not None:
            value = ask(question)
        if not value:
            value = question.default
        if value is None:
            lacking.append(f"--{question.name} (or ${question.variable}): {question.text}")
            continue
        if question.choices and value not in question.choices:
            value = {True: "yes", False: "no"}[value.lower() in TRUE] if "yes" in question.choices else value
            if value not in question.choices:
                raise ConfigError(f"must be {' or '.join(question.choices)}, got {value!r}", key=f"--{question.name}")
        found[question.name] = value
    if lacking:
        raise ConfigError("no answer, and nothing is safe to assume; nothing was written:\n  " + "\n  ".join(lacking))
    if flow == "sft":
        _deal_chunks(found)
    return found


def experiments(flow: str, answers: Answers) -> dict[str, str]:
    """YAML of experiments by name."""
    if flow == "rl":
        return {f"my_pai_rl_{answers['reward']}": _rl(answers)}
    wanted = {"both": (1, 2), "stage1": (1,), "stage2": (2,), "eval": (2,)}[answers["stages"]]
    return {f"my_pai_sft_stage{stage}": _sft(answers, stage) for stage in wanted}


def steps(flow: str, answers: Answers, folder: Path) -> list[str]:
    """The commands of a flow, in order; experiments lie in `folder`/experiment."""
    release = RELEASES[answers["version"]]
    model, data, output = (shlex.quote(answers[name]) for name in ("model", "data", "output"))
    cameras = " ".join(f"camera_{name}" for name in CAMERAS)
    calibration = "camera_intrinsics sensor_extrinsics vehicle_dimensions"
    own = {name: shlex.quote(str(folder / "experiment" / f"{name}.yaml")) for name in experiments(flow, answers)}
    fetch = (
        f"alpagym pai download --output-dir {data} --camera {cameras} --calibration {calibration} --labels egomotion"
    )
    sample = f"--only-reasoning-chunks --num-reasoning-clips {answers.get('clips')} --reasoning ood_reasoning.parquet"
    reasoning = f"{fetch} {sample}"
    out = [
        "# 1 convert: licences are accepted on the hub's pages, once",
        f"hf download {release} --local-dir {model}_release",
        "hf download nvidia/Cosmos-Reason2-8B --include '*.json' '*.txt'",
        f"alpagym checkpoint convert {model}_release {model} --vlm-name-or-path nvidia/Cosmos-Reason2-8B",
        "# 2 data",
    ]
    if flow == "rl":
        (name,) = own
        if answers["reward"] == "joint":
            out += [f"hf download wayveai/Lingo-Judge --local-dir {shlex.quote(answers['judge'])}", reasoning]
            index = "clip_index_reasoning_mini.parquet --reasoning reasoning/ood_reasoning.parquet"
        else:
            chunks = answers["chunks"]
            out += [
                f"{fetch} --chunk-ids {chunks}",
                f"alpagym pai curate -p {data}/clip_index.parquet -c {chunks} -n {answers['clips']} "
                f"-o {data}/clip_index_mini.parquet",
            ]
            index = "clip_index_mini.parquet"
        out += [
            f"alpagym pai check {data} --clip-index {index}",
            "# 3 train; the same command again goes on where it stopped",
            _train(own[name], output, answers),
            "# 4 export and evaluate",
            f"alpagym checkpoint export {output} {output}_exported --base {model}",
            f"alpagym evaluate experiment={own[name]} policy.model.path={output}_exported",
        ]
        return out
    out += [f"{fetch} --chunk-ids {answers['chunks']}" if answers["coc"] == "no" else reasoning]
    index = " --clip-index clip_index_reasoning_mini.parquet" if answers["coc"] == "yes" else ""
    out += [f"alpagym pai check {data}{index}", "# 3 train; the same command again goes on where it stopped"]
    stages = answers["stages"]
    if stages in ("both", "stage1"):
        out.append(_train(own["my_pai_sft_stage1"], f"{output}/stage1", answers))
    if stages in ("both", "stage2"):
        newest = f"$(ls -d {output}/stage1/checkpoint-* | sort -V | tail -1)"
        first = f'"{newest}"' if stages == "both" else shlex.quote(answers["stage1"])
        more = f"trainer.stage1_path={first}"
        out.append(_train(own["my_pai_sft_stage2"], f"{output}/stage2", answers, more))
    if stages in ("both", "eval"):
        newest = f'"$(ls -d {output}/stage2/checkpoint-* | sort -V | tail -1)"'
        place = shlex.quote(answers["stage2"]) if stages == "eval" else newest
        out += ["# 4 evaluate", f"alpagym evaluate experiment={own['my_pai_sft_stage2']} policy.model.path={place}"]
    return out


def write(flow: str, answers: Answers, folder: Path) -> list[Path]:
    """Write the experiments and `steps.sh`; their paths."""
    folder = folder.expanduser().absolute()
    (folder / "experiment").mkdir(parents=True, exist_ok=True)
    made = []
    for name, text in experiments(flow, answers).items():
        made.append(folder / "experiment" / f"{name}.yaml")
        write_atomic(made[-1], text.encode())
    script = folder / "steps.sh"
    lines = ["#!/usr/bin/env bash", f"# Written by `alpagym pai setup {flow}`.", "set -euo pipefail"]
    write_atomic(script, ("\n".join([*lines, *steps(flow, answers, folder)]) + "\n").encode())
    return [*made, script]


def _train(experiment: str, directory: str, answers: Answers, more: str = "") -> str:
    if answers["compute"] == "cluster":
        return " ".join(
            part
            for part in (
                f"# on every node, with a run directory that all of them see: alpagym train experiment={experiment}",
                more,
                f"--directory {directory} makes it; then torchrun --nnodes $NNODES --nproc-per-node 8",
                "--node-rank $NODE_RANK --rdzv-id pai --rdzv-backend c10d --rdzv-endpoint $RDZV_HOST:$RDZV_PORT",
                f"-m alpagym_host.launch.torchrun {directory}",
            )
            if part
        )
    kept = ""
    if logs := answers.get("logs"):
        kept = f" 2>&1 | tee -a {shlex.quote(str(Path(logs) / 'train.log'))}"
    return f"alpagym train experiment={experiment} {more + ' ' if more else ''}--directory {directory} --resume{kept}"


def _rl(answers: Answers) -> str:
    joint = answers["reward"] == "joint"
    lines = _head(f"pai_rl_{answers['reward']}", answers)
    lines += [
        "dataset:",
        f"  path: {_text(answers['data'])}",
        "  every_split: true   # a handful: train and measure on the same",
    ]
    if joint:
        lines += ["reward:", "  terms:", f"    pai_joint_corrected: {{grader_path: {_text(answers['judge'])}}}"]
    return "\n".join([*lines, ""])


def _sft(answers: Answers, stage: int) -> str:
    reasons = answers["coc"] == "yes" and stage == 1
    overrides = ["/trainer: alpamayo_sft_stage1_cot", "/dataset: pai_reasoning"] if reasons else []
    lines = _head(f"pai_sft_stage{stage}", answers, overrides)
    chunks = {"train": answers["train-chunks"], "val": answers["val-chunks"], "test": answers["val-chunks"]}
    lines += ["dataset:", f"  path: {_text(answers['data'])}"]
    if reasons:  # sampled clips are of any chunk
        lines += [f"  {split}_chunks: null" for split in chunks] + ["  every_split: true"]
    else:
        lines += [f"  {split}_chunks: {_text(value)}" for split, value in chunks.items()]
        if chunks["train"] == chunks["val"]:
            lines += ["  allow_overlap: true"]
    return "\n".join([*lines, ""])


def _head(base: str, answers: Answers, overrides: Sequence[str] = ()) -> list[str]:
    policy = {"1": "alpamayo_1", "1.5": "alpamayo_1_5"}[answers["version"]]
    chosen = [f"/policy: {policy}", *overrides, *(["/logging: wandb"] if answers["wandb"] == "yes" else [])]
    lines = [
        "# @package _global_",
        "# Written by `alpagym pai setup`; change it as you like. docs/pai.md",
        "defaults:",
        f"  - {base}",
        *(f"  - override {choice}" for choice in chosen),
        "  - _self_",
        f"run: {{name: my_{base}}}",
        "policy:",
        f"  model: {{path: {_text(answers['model'])}}}",
    ]
    if answers["wandb"] == "yes":
        entity = _text(answers["wandb-team"]) if answers["wandb-team"] else "null"
        name = _text(answers["wandb-name"]) if answers.get("wandb-name") else "null"
        project = _text(answers["wandb-project"])
        about = f"mode: online, project: {project}, entity: {entity}, name: {name}"
        lines += ["logging:", f"  loggers: {{wandb: {{{about}}}}}"]
    return lines


def _text(value: str) -> str:
    """A value as YAML text."""
    return "'" + str(value).replace("'", "''") + "'"


def _deal_chunks(answers: Answers) -> None:
    """Train on all chunks but the last and validate on that, where nothing else was said."""
    chunks = parse_chunks(answers["chunks"], "--chunks") or []
    last = f"{chunks[-1]}-{chunks[-1] + 1}"
    first = " ".join(map(str, chunks[:-1])) or last
    answers["train-chunks"] = answers["train-chunks"] or first
    answers["val-chunks"] = answers["val-chunks"] or last
